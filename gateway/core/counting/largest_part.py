"""Find the largest part of a request besides its messages, to name it in a refusal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from gateway.core.counting.measure import Wire
from gateway.core.counting.request import ITEMS, Piece, decoded
from gateway.core.counting.tools import compact

#: fields that are weighed, the longest; all others are ids and switches
_MOST_FIELDS: Final = 4
#: share of a list of tools from which on one of them is what is long
_MOST_OF_IT: Final = 0.5


class RequestPart(NamedTuple):
    """A field, or an element of one, and its tokens. `param`: where it stands in the request."""

    param: str
    tokens: int


def largest_overhead(
    wire: Wire, fields: Mapping[str, bytes], count_tokens: Callable[[Mapping[str, Piece]], int]
) -> RequestPart | None:
    """The field beside the messages that takes most tokens, or the tool in it that takes most of these.

    `count_tokens`: the tokens of a request of these fields, without its messages.
    """
    overhead: dict[str, Piece] = {name: raw for name, raw in fields.items() if name != ITEMS[wire]}
    longest = sorted(overhead, key=lambda name: len(overhead[name]), reverse=True)[:_MOST_FIELDS]
    whole = count_tokens(overhead)
    parts = [
        RequestPart(name, whole - count_tokens({other: raw for other, raw in overhead.items() if other != name}))
        for name in longest
    ]
    field = max(parts, key=lambda part: part.tokens, default=None)
    if field is None or field.tokens <= 0:
        return None
    elements = decoded(overhead[field.param]) if field.param in ("tools", "functions") else None
    if not isinstance(elements, list) or len(elements) < 2:  # noqa: PLR2004
        return field
    index = max(range(len(elements)), key=lambda place: len(compact(elements[place])))
    rest = elements[:index] + elements[index + 1 :]
    element = RequestPart(f"{field.param}[{index}]", whole - count_tokens({**overhead, field.param: rest}))
    return element if element.tokens >= _MOST_OF_IT * field.tokens else field
