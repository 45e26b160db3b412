"""Server-sent events: bytes in, whole events out, every byte kept.

An event ends at a blank line made of LF, CR LF or CR (WHATWG HTML, section 9.2.6). Where the bytes are cut does not
change the reading: a CR LF that arrives in two parts leaves a lone LF in front of the next event, which reads as
nothing. What is not yet a whole event is held back, up to a limit; past it the rest of that event comes out as it
arrives, unread.
"""

from __future__ import annotations

import re
from typing import Final

#: Larger events exist (a whole Responses object in `response.completed`), unread ones must not fill the memory.
MAX_EVENT_BYTES: Final = 4 * 1024 * 1024

_BLANK_LINE: Final = re.compile(rb"(?:\r\n|\n|\r)(?:\r\n|\n|\r)")
_LINE_END: Final = re.compile(rb"\r\n|\n|\r")


class EventSplitter:
    """Cuts a stream into events. The blocks that `feed` and `rest` return, joined, are the bytes that went in."""

    __slots__ = ("_buffer", "_limit", "_overflow")

    def __init__(self, limit: int = MAX_EVENT_BYTES) -> None:
        self._buffer = b""
        self._limit = limit
        self._overflow = False

    def feed(self, chunk: bytes) -> list[bytes]:
        """Blocks that are complete now, each with the blank line that ends it."""
        data = self._buffer + chunk if self._buffer else chunk
        blocks = _split_lf(data) if b"\r" not in data else _split_any(data)
        rest = blocks.pop()
        if self._overflow and blocks:
            self._overflow = False
        if len(rest) > self._limit or (self._overflow and rest):
            # The last two bytes stay: they may be the first part of the blank line.
            blocks.append(rest[:-2])
            rest = rest[-2:]
            self._overflow = True
        self._buffer = rest
        return blocks

    def rest(self) -> bytes:
        """What the stream ended with and no blank line closed."""
        rest, self._buffer = self._buffer, b""
        return rest


def _split_lf(data: bytes) -> list[bytes]:
    parts = data.split(b"\n\n")
    last = parts.pop()
    blocks = [part + b"\n\n" for part in parts]
    blocks.append(last)
    return blocks


def _split_any(data: bytes) -> list[bytes]:
    blocks: list[bytes] = []
    start = 0
    for match in _BLANK_LINE.finditer(data):
        blocks.append(data[start : match.end()])
        start = match.end()
    blocks.append(data[start:])
    return blocks


def event_data(block: bytes) -> bytes:
    """The data of one block: its `data` lines joined by LF; empty for a comment or an event without data."""
    if block.startswith(b"data: ") and block.find(b"\n") == len(block) - 2 and b"\r" not in block:
        return block[6:-2]
    lines = [_field_value(line) for line in _LINE_END.split(block) if line.startswith(b"data")]
    return b"\n".join(line for line in lines if line is not None)


def _field_value(line: bytes) -> bytes | None:
    name, _, value = line.partition(b":")
    if name != b"data":
        return None
    return value.removeprefix(b" ")


def comment(text: str) -> bytes:
    """A block that clients skip."""
    return b": " + text.encode() + b"\n\n"
