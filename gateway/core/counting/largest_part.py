"""Find the largest part of a request besides its messages, to name it in an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from gateway.core.counting.measure import Wire
from gateway.core.counting.request import ITEMS, Piece, decode_piece
from gateway.core.counting.tools import compact

#: Number of fields that are counted, longest first. The others are IDs and switches.
_MOST_FIELDS: Final = 4
#: share of the tool list from which a single tool is named instead of the list
_LARGEST_TOOL_SHARE: Final = 0.5


class RequestPart(NamedTuple):
    """A field of a request, or one of its elements, and its tokens. `param` is its path in the request."""

    param: str
    tokens: int


def largest_overhead(
    wire: Wire, fields: Mapping[str, bytes], count_tokens: Callable[[Mapping[str, Piece]], int]
) -> RequestPart | None:
    """Return the field with the most tokens besides the messages, or the tool in it that takes most of these tokens.

    `count_tokens` returns the tokens of a request with these fields and without messages.
    """
    overhead: dict[str, Piece] = {name: raw for name, raw in fields.items() if name != ITEMS[wire]}
    longest = sorted(overhead, key=lambda name: len(overhead[name]), reverse=True)[:_MOST_FIELDS]
    total = count_tokens(overhead)
    parts = [
        RequestPart(name, total - count_tokens({other: raw for other, raw in overhead.items() if other != name}))
        for name in longest
    ]
    field = max(parts, key=lambda part: part.tokens, default=None)
    if field is None or field.tokens <= 0:
        return None
    elements = decode_piece(overhead[field.param]) if field.param in ("tools", "functions") else None
    if not isinstance(elements, list) or len(elements) < 2:  # noqa: PLR2004
        return field
    index = max(range(len(elements)), key=lambda place: len(compact(elements[place])))
    rest = elements[:index] + elements[index + 1 :]
    element = RequestPart(f"{field.param}[{index}]", total - count_tokens({**overhead, field.param: rest}))
    return element if element.tokens >= _LARGEST_TOOL_SHARE * field.tokens else field
