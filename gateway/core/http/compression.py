"""Decompress gzip and deflate bodies in pieces, up to a size limit."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Final

#: window bits that make zlib read either a gzip or a zlib header
_ANY_HEADER: Final = 32 + zlib.MAX_WBITS
#: bytes that distinguish a gzip or zlib header from raw deflate
_HEADER_BYTES: Final = 2
_GZIP_MAGIC: Final = b"\x1f\x8b"
#: Bytes passed to zlib at once. After each step zlib returns a copy of the input that is left, so a slice is small.
_SLICE: Final = 16 * 1024
SUPPORTED: Final = frozenset({"gzip", "x-gzip", "deflate"})


class TooLarge(Exception):
    """The decompressed size exceeds the limit."""


class Corrupt(Exception):
    """The bytes do not match their content-encoding."""


class Unpacker:
    """Decompress one body, which `feed` takes in pieces of any size."""

    def __init__(self, limit: int | None) -> None:
        """Begin a body. `limit`: largest decompressed size in bytes; None for a stream that is passed on in pieces."""
        self._inflate = zlib.decompressobj(_ANY_HEADER)
        self._left = limit
        self._header_known = False
        self._head = b""

    def feed(self, piece: bytes, *, at_most: int = 1 << 18) -> Iterator[bytes]:
        """Yield the decompressed bytes in pieces of at most `at_most` bytes.

        Each piece is decompressed when the caller asks for it.

        Raises:
            TooLarge: the limit is exceeded.
            Corrupt: the bytes cannot be decompressed.
        """
        if len(piece) <= _SLICE:
            yield from self._feed(piece, at_most)
            return
        for start in range(0, len(piece), _SLICE):
            yield from self._feed(piece[start : start + _SLICE], at_most)

    def _feed(self, piece: bytes, at_most: int) -> Iterator[bytes]:
        rest = self._head + piece
        if not self._header_known and len(rest) < _HEADER_BYTES:
            self._head = rest
            return
        self._head = b""
        while True:
            out, rest = self._step(rest, at_most)
            if out:
                yield out
            # After a full piece zlib may have more output, even if it has taken all input.
            if not rest and len(out) < at_most:
                return

    def _step(self, compressed: bytes, at_most: int) -> tuple[bytes, bytes]:
        """Return one piece of output, and the input that is left."""
        if self._inflate.eof:
            if not compressed.startswith(_GZIP_MAGIC):
                # Another gzip member may begin here. Anything else is padding.
                self._head = compressed if _GZIP_MAGIC.startswith(compressed) else b""
                return b"", b""
            self._inflate = zlib.decompressobj(_ANY_HEADER)
        try:
            out = self._inflate.decompress(compressed, at_most)
        except zlib.error:
            self._try_raw_deflate()
            return self._step(compressed, at_most)
        self._header_known = True
        if self._left is not None:
            self._left -= len(out)
            if self._left < 0:
                raise TooLarge
        return out, self._inflate.unused_data if self._inflate.eof else self._inflate.unconsumed_tail

    @property
    def complete(self) -> bool:
        """Return whether the end of the compressed data was reached."""
        return self._inflate.eof

    def _try_raw_deflate(self) -> None:
        """Switch to raw deflate, because some servers omit the zlib header that RFC 9110 requires."""
        if self._header_known:
            raise Corrupt from None
        self._inflate = zlib.decompressobj(-zlib.MAX_WBITS)
        self._header_known = True


def unpack(body: bytes, limit: int) -> bytes:
    """Decompress a whole body.

    Raises:
        TooLarge, Corrupt: as `Unpacker.feed`.
    """
    unpacker = Unpacker(limit)
    decompressed = b"".join(unpacker.feed(body))
    if not unpacker.complete:
        raise Corrupt
    return decompressed
