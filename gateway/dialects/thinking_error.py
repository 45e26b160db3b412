"""Read a provider's error about thinking blocks.

The texts are Anthropic's. Cloud hosts and translating proxies pass them on.
(https://platform.claude.com/docs/en/build-with-claude/preserved-thinking)
"""

from __future__ import annotations

import re
from typing import Final, Literal

from gateway.core.values import dataclass

#: `binding`: a block does not match the messages before it. `round`: a tool call without result lacks its thinking.
Kind = Literal["binding", "round"]

_STATUSES: Final = frozenset({400, 422})
#: bytes of an error that are read
_MAX_BYTES: Final = 65_536
_PHRASES: Final[tuple[tuple[Kind, re.Pattern[bytes]], ...]] = (
    ("binding", re.compile(rb"bound to a different conversation", re.IGNORECASE)),
    ("binding", re.compile(rb"preceding\W{0,4}thinking\W{0,4}block is missing", re.IGNORECASE)),
    ("round", re.compile(rb"must start with a thinking block", re.IGNORECASE)),
    ("round", re.compile(rb"expected\W{0,4}thinking\W{0,4}or\W{0,4}redacted_thinking", re.IGNORECASE)),
    ("round", re.compile(rb"blocks in the latest assistant message cannot be modified", re.IGNORECASE)),
)
_PLACE: Final = re.compile(rb"\bmessages[.\[](\d{1,6})")


@dataclass(frozen=True, slots=True)
class ThinkingRefusal:
    """Reason why thinking was refused, and the first message with a refused block (None if not named)."""

    kind: Kind
    message: int | None = None


def thinking_refusal(status: int, body: bytes) -> ThinkingRefusal | None:
    """Return what an error says about thinking blocks; None if it is about something else."""
    if status not in _STATUSES or b"thinking" not in body:
        return None
    text = body[:_MAX_BYTES]
    kind = next((kind for kind, phrase in _PHRASES if phrase.search(text)), None)
    if kind is None:
        return None
    place = _PLACE.search(text)
    return ThinkingRefusal(kind, int(place[1]) if place is not None else None)
