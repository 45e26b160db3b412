"""Decompress a body sent as zstd, up to a limit.

Codex compresses its requests with zstd when it is signed in.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gateway.core.http.compression import Corrupt, TooLarge

#: Compressed bytes for one step. A block of 4 bytes can expand to 128 KiB, and the library does not limit the output of
#: a step. With this number, a step expands to 8 MiB at most.
_SLICE: Final = 256
#: largest window of a frame, in bytes; senders may not exceed it: https://www.rfc-editor.org/rfc/rfc9659
_WINDOW: Final = 8 << 20


def unpack_zstd(body: bytes, limit: int) -> bytes:
    """Decompress a whole body of one or more frames.

    Raises:
        TooLarge: the decompressed body has more than `limit` bytes.
        Corrupt: the bytes cannot be decompressed.
    """
    pieces, remaining = [], limit
    for piece in _decompressed(body):
        remaining -= len(piece)
        if remaining < 0:
            raise TooLarge
        pieces.append(piece)
    return b"".join(pieces)


def _decompressed(body: bytes) -> Iterator[bytes]:
    # Imported here, because most gateways never receive such a body.
    import zstandard  # noqa: PLC0415

    reader = zstandard.ZstdDecompressor(max_window_size=_WINDOW)
    frame = reader.decompressobj()
    try:
        for start in range(0, len(body), _SLICE):
            rest = body[start : start + _SLICE]
            while rest:
                if frame.eof:
                    frame = reader.decompressobj()
                yield frame.decompress(rest)
                rest = frame.unused_data if frame.eof else b""
    except zstandard.ZstdError:
        raise Corrupt from None
    if not frame.eof:
        raise Corrupt
