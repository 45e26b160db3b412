"""Split a byte stream into server-sent events, and keep every byte.

An event ends at a blank line made of LF, CR LF or CR (WHATWG HTML, section 9.2.6). Where the bytes are cut does not
change the reading: a CR LF that arrives in two parts leaves a lone LF in front of the next event, which reads as
nothing. What is not yet a whole event is held back, up to a limit; past it the rest of that event comes out as it
arrives, unread.
"""

from __future__ import annotations

import re
from typing import Final

#: A whole Responses object stands in `response.completed`, with its pictures; unread events must not fill the memory.
MAX_EVENT_BYTES: Final = 16 * 1024 * 1024

# The lookahead keeps a single CR LF from being read as two line ends.
_BLANK_LINE: Final = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r)")
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_LINE_END: Final = re.compile(rb"\r\n|\n|\r")
#: An event of more lines is no provider's, and taking it apart would keep everybody else waiting.
_MOST_LINES: Final = 100_000


class EventBuffer:
    """Holds back what is not yet a whole event. What `feed` and `rest` return, joined, are the bytes that went in."""

    __slots__ = ("_buffer", "_limit", "_overflow")

    def __init__(self, limit: int = MAX_EVENT_BYTES) -> None:
        self._buffer = bytearray()
        self._limit = limit
        self._overflow = False

    def feed(self, chunk: bytes) -> bytes:
        """The bytes up to the last blank line; `split_events` cuts them."""
        buffer = self._buffer
        if not buffer and chunk.endswith(b"\n\n"):
            self._overflow = False
            return chunk  # whole events, as a stream usually comes
        # A blank line that ends in what is new began at most three bytes before it.
        searched = max(0, len(buffer) - 3)
        buffer += chunk
        end = _last_blank_line(buffer, searched)
        if end:
            self._overflow = False
        if len(buffer) - end > self._limit or (self._overflow and not end):
            # The last two bytes stay: they may be the first part of the blank line.
            self._overflow = True
            end = max(end, len(buffer) - 2)
        out = bytes(buffer[:end])
        del buffer[:end]
        return out

    def rest(self) -> bytes:
        """What the stream ended with and no blank line closed."""
        rest = bytes(self._buffer)
        self._buffer.clear()
        return rest


def _last_blank_line(buffer: bytearray, start: int) -> int:
    """Where the last blank line ends, 0 where there is none."""
    if buffer.find(b"\r", start) < 0:
        found = buffer.rfind(b"\n\n", start)
        return found + 2 if found >= 0 else 0
    return max((match.end() for match in _BLANK_LINE.finditer(buffer, start)), default=0)


def split_events(region: bytes) -> list[bytes]:
    """Whole events, each with the blank line that ends it; what follows the last one, if anything, comes last."""
    if b"\r" not in region:
        parts = region.split(b"\n\n")
        last = parts.pop()
        blocks = [part + b"\n\n" for part in parts]
    else:
        ends = [match.end() for match in _BLANK_LINE.finditer(region)]
        blocks = [region[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        last = region[ends[-1] :] if ends else region
    return [*blocks, last] if last else blocks


def without_comments(region: bytes, names: tuple[bytes, ...]) -> bytes:
    """These bytes less the events that are nothing but comments, each of which begins with one of these names."""
    # What the cut of a CR LF left in front of one belongs to the event before it.
    return b"".join(
        [block if not _is_comment(block, names) else block[: block.startswith(b"\n")] for block in split_events(region)]
    )


def _is_comment(block: bytes, names: tuple[bytes, ...]) -> bool:
    lines = [line for line in _LINE_END.split(block) if line]
    is_whole = bool(lines) and block.endswith((b"\n", b"\r"))
    return is_whole and all(line.startswith(b": ") and line.startswith(names, 2) for line in lines)


def data_of_events(region: bytes) -> list[bytes]:
    """The data of each event of a region that ends with a blank line; events without data are left out."""
    if region.startswith(b"data: "):
        found = region[6:-2].split(b"\n\ndata: ")
        # Two line ends an event and no CR: every event is one data line, the form nearly all providers send.
        if region.count(b"\n") == 2 * len(found) and b"\r" not in region:
            return list(filter(None, found))
    elif region.startswith(b"event: ") and region.count(b"\n") == 3 * region.count(b"\ndata: ") and b"\r" not in region:
        lines = region.split(b"\n")
        names, data, blank = lines[:-1:3], lines[1::3], lines[2::3]
        # Every event is a name and one data line, as the APIs write it that name their events.
        if not any(blank) and b"\n".join([b"", *names]).count(b"\nevent: ") == len(names):
            return list(filter(None, b"\n".join([b"", *data]).split(b"\ndata: ")))
    return [data for data in map(event_data, split_events(region)) if data]


def event_data(block: bytes) -> bytes:
    """The data of one block: its `data` lines joined by LF; empty for a comment or an event without data.

    So it is for one of more than `_MOST_LINES`, which passes unread.
    """
    if block.startswith(b"data: ") and block.find(b"\n") == len(block) - 2 and b"\r" not in block:
        return block[6:-2]
    if len(block) > _MOST_LINES and block.count(b"\n") + block.count(b"\r") > _MOST_LINES:
        return b""
    block = block.removeprefix(_BYTE_ORDER_MARK)
    lines = [_field_value(line) for line in _LINE_END.split(block) if line.startswith(b"data")]
    return b"\n".join(line for line in lines if line is not None)


def _field_value(line: bytes) -> bytes | None:
    name, _, value = line.partition(b":")
    if name != b"data":
        return None
    return value.removeprefix(b" ")
