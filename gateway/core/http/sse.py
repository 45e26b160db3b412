"""Split a byte stream into server-sent events without changing a byte.

An event ends at a blank line made of LF, CR LF or CR (WHATWG HTML, section 9.2.6). The result does not depend on how
the bytes are divided into chunks: a CR LF that arrives in two chunks leaves an LF before the next event, which parsers
ignore. An incomplete event is buffered up to a limit. Beyond the limit the rest of the event is passed on as it
arrives, without being parsed.
"""

from __future__ import annotations

import re
from typing import Final

#: `response.completed` contains the whole response with its images. The limit keeps an endless event out of memory.
MAX_EVENT_BYTES: Final = 16 * 1024 * 1024

# Because of the lookahead a single CR LF is not two line ends.
_BLANK_LINE: Final = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r)")
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_LINE_END: Final = re.compile(rb"\r\n|\n|\r")
#: No provider sends an event with more lines. Parsing it would block the event loop.
_MOST_LINES: Final = 100_000


class EventBuffer:
    """Buffer incomplete events. The results of `feed` and `rest`, joined, are the bytes that went in."""

    __slots__ = ("_buffer", "_limit", "_overflow")

    def __init__(self, limit: int = MAX_EVENT_BYTES) -> None:
        self._buffer = bytearray()
        self._limit = limit
        self._overflow = False

    def feed(self, chunk: bytes) -> bytes:
        """Add a chunk, and return the bytes up to the last blank line, for `split_events`."""
        buffer = self._buffer
        if not buffer and chunk.endswith(b"\n\n"):
            self._overflow = False
            return chunk  # whole events: the usual case
        # A blank line that ends in the new chunk begins at most three bytes before it.
        searched = max(0, len(buffer) - 3)
        buffer += chunk
        end = _last_blank_line(buffer, searched)
        if end:
            self._overflow = False
        if len(buffer) - end > self._limit or (self._overflow and not end):
            # The last two bytes stay: they may be the start of the blank line.
            self._overflow = True
            end = max(end, len(buffer) - 2)
        out = bytes(buffer[:end])
        del buffer[:end]
        return out

    def rest(self) -> bytes:
        """Return what follows the last blank line, at the end of the stream."""
        rest = bytes(self._buffer)
        self._buffer.clear()
        return rest


def _last_blank_line(buffer: bytearray, start: int) -> int:
    """Return where the last blank line ends, or 0 if there is none."""
    if buffer.find(b"\r", start) < 0:
        found = buffer.rfind(b"\n\n", start)
        return found + 2 if found >= 0 else 0
    return max((match.end() for match in _BLANK_LINE.finditer(buffer, start)), default=0)


def split_events(region: bytes) -> list[bytes]:
    """Return whole events, each with its blank line; an incomplete rest, if any, comes last."""
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
    """Remove the events that consist only of comments which begin with one of these names."""
    # An LF before a removed block is the second part of a CR LF, which belongs to the event before it.
    return b"".join(
        [block if not _is_comment(block, names) else block[: block.startswith(b"\n")] for block in split_events(region)]
    )


def _is_comment(block: bytes, names: tuple[bytes, ...]) -> bool:
    lines = [line for line in _LINE_END.split(block) if line]
    is_whole = bool(lines) and block.endswith((b"\n", b"\r"))
    return is_whole and all(line.startswith(b": ") and line.startswith(names, 2) for line in lines)


def data_of_events(region: bytes) -> list[bytes]:
    """Return the data of each event in a region that ends with a blank line, without empty ones."""
    if region.startswith(b"data: "):
        found = region[6:-2].split(b"\n\ndata: ")
        # Two line ends per event and no CR: each event is one data line, as nearly all providers send it.
        if region.count(b"\n") == 2 * len(found) and b"\r" not in region:
            return list(filter(None, found))
    elif region.startswith(b"event: ") and region.count(b"\n") == 3 * region.count(b"\ndata: ") and b"\r" not in region:
        lines = region.split(b"\n")
        names, data, blank = lines[:-1:3], lines[1::3], lines[2::3]
        # Each event is a name and one data line, as in APIs that name their events.
        if not any(blank) and b"\n".join([b"", *names]).count(b"\nevent: ") == len(names):
            return list(filter(None, b"\n".join([b"", *data]).split(b"\ndata: ")))
    return [data for data in map(event_data, split_events(region)) if data]


def event_data(block: bytes) -> bytes:
    """Return the `data` lines of one block, joined by LF.

    Empty for a comment, for an event without data, and for a block of more than `_MOST_LINES` lines, which is not
    parsed.
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
