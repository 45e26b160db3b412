"""Decompress a body sent as zstd, up to a limit.

Codex packs its requests so where it is signed in.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gateway.core.http.compression import Corrupt, TooLarge

#: Bytes handed on at once: a block of 4 bytes may come to 128 KiB, and nothing bounds what one step gives. So many come
#: to 8 MiB at most.
_SLICE: Final = 256
#: what a frame may have the reader keep at hand; no sender may count on more: https://www.rfc-editor.org/rfc/rfc9659
_WINDOW: Final = 8 << 20


def unpack_zstd(body: bytes, limit: int) -> bytes:
    """A whole body unpacked, of one frame or several.

    Raises:
        TooLarge: it is over `limit` bytes.
        Corrupt: the bytes cannot be unpacked.
    """
    pieces, left = [], limit
    for piece in _decompressed(body):
        left -= len(piece)
        if left < 0:
            raise TooLarge
        pieces.append(piece)
    return b"".join(pieces)


def _decompressed(body: bytes) -> Iterator[bytes]:
    # Most gateways never see such a body.
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
