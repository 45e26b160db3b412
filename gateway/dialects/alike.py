"""Recognize stream events that differ only in one text, so that they need no parsing.

What stands around the text is known from one of them that was parsed. Where all of it is the same, byte for byte, the
texts are cut out and decoded in one go, in a fifth of the time, with padding behind them in half of it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple, Self

import msgspec

from gateway.dialects.fields import UNREADABLE

_TEXTS: Final = msgspec.json.Decoder(list[str])
#: by which OpenAI hides from those who see its answers encrypted how long their texts are
_PADDING: Final = re.compile(rb'"obfuscation": ?"([^"\\]*)"')


class TextFrame(NamedTuple):
    """What stands in a JSON object before and behind one text in it, the quotes of the text included.

    `between`: what stands between the text and padding behind it, the quotes included; empty where there is none.
    """

    before: bytes
    between: bytes
    after: bytes

    @classmethod
    def around(cls, event: bytes, start: int, end: int) -> Self:
        """That of an event whose text stands there."""
        padding = _PADDING.search(event, end)
        if padding is None:
            return cls(event[:start], b"", event[end:])
        return cls(event[:start], event[end : padding.start(1)], event[padding.end(1) :])

    def holds(self, event: bytes) -> bool:
        """Whether an event begins and ends like that."""
        return event.startswith(self.before) and event.endswith(self.after)

    def texts(self, events: Sequence[bytes]) -> list[str] | None:
        """The text of each of these events; None where one of them is not the same around it, or has none there."""
        before, between, after = self
        start, stop = len(before), -len(after)
        pieces = [event[start:stop] for event in events]
        # One comparison for all of them: an event that is shorter than its frame makes these longer than those.
        if b"%b%b%b" % (before, (after + before).join(pieces), after) != b"".join(events):
            return None
        if not between:
            return _strings(pieces)
        texts, marks, padding = zip(*[piece.partition(between) for piece in pieces], strict=True)
        is_padded = marks.count(between) == len(marks) and _strings(padding) is not None
        return _strings(texts) if is_padded else None


def _strings(pieces: Sequence[bytes]) -> list[str] | None:
    """What these are within the quotes of JSON; None where one of them is no string there."""
    try:
        # A piece that would take the quote behind it into its text runs into a line break, which no string may hold.
        texts = _TEXTS.decode(b'["%b"\n]' % b'"\n,"'.join(pieces))
    except UNREADABLE:
        return None
    # One with a quote in it that is not escaped makes more of them.
    return texts if len(texts) == len(pieces) else None
