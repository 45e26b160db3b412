"""Recognize stream events that differ only in one text, so that they need no parsing.

The bytes around the text are known from one parsed event. If all events have the same bytes there, their texts are cut
out and decoded together. This takes a fifth of the time of parsing, or half of it if the events have padding.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple, Self

import msgspec

from gateway.dialects.fields import UNREADABLE

_TEXTS: Final = msgspec.json.Decoder(list[str])
#: padding by which OpenAI hides the lengths of texts from observers of the encrypted connection
_PADDING: Final = re.compile(rb'"obfuscation": ?"([^"\\]*)"')


class TextFrame(NamedTuple):
    """Bytes before and after one text in a JSON object, including the quotes of the text.

    `between`: the bytes between the text and the padding after it, including the quotes; empty without padding.
    """

    before: bytes
    between: bytes
    after: bytes

    @classmethod
    def around(cls, event: bytes, start: int, end: int) -> Self:
        """Return the frame of an event with its text from `start` to `end`."""
        padding = _PADDING.search(event, end)
        if padding is None:
            return cls(event[:start], b"", event[end:])
        return cls(event[:start], event[end : padding.start(1)], event[padding.end(1) :])

    def matches(self, event: bytes) -> bool:
        """Return True if an event begins and ends like this frame."""
        return event.startswith(self.before) and event.endswith(self.after)

    def texts(self, events: Sequence[bytes]) -> list[str] | None:
        """Return the text of each event; None if an event differs outside its text, or has no string there."""
        before, between, after = self
        start, stop = len(before), -len(after)
        pieces = [event[start:stop] for event in events]
        # One comparison for all events. An event shorter than the frame makes the joined bytes longer than the events.
        if b"%b%b%b" % (before, (after + before).join(pieces), after) != b"".join(events):
            return None
        if not between:
            return _strings(pieces)
        texts, marks, padding = zip(*[piece.partition(between) for piece in pieces], strict=True)
        is_padded = marks.count(between) == len(marks) and _strings(padding) is not None
        return _strings(texts) if is_padded else None


def _strings(pieces: Sequence[bytes]) -> list[str] | None:
    """Decode the contents of JSON strings; return None if one of them is not a valid string."""
    try:
        # If a piece escapes its closing quote, its string runs into the line break, which is invalid in a string.
        texts = _TEXTS.decode(b'["%b"\n]' % b'"\n,"'.join(pieces))
    except UNREADABLE:
        return None
    # A piece with an unescaped quote gives more strings.
    return texts if len(texts) == len(pieces) else None
