"""Unpacking gzip and deflate in pieces, under a limit: a small packed body can unpack to gigabytes."""

from __future__ import annotations

import zlib
from typing import Final

#: window bits that make zlib read either a gzip or a zlib header
_ANY_HEADER: Final = 32 + zlib.MAX_WBITS
SUPPORTED: Final = frozenset({"gzip", "x-gzip", "deflate"})


class TooLarge(Exception):
    """The unpacked size passed the limit."""


class Corrupt(Exception):
    """The bytes are not what their content-encoding says."""


class Unpacker:
    """Unpacks one body. `feed` may be called with pieces cut anywhere."""

    def __init__(self, limit: int | None) -> None:
        """Set up; `limit`: largest size in bytes once unpacked, None for a stream that is handed on piece by piece."""
        self._inflate = zlib.decompressobj(_ANY_HEADER)
        self._left = limit
        self._header_known = False

    def feed(self, piece: bytes, *, at_most: int = 1 << 20) -> list[bytes]:
        """The unpacked bytes, in pieces of at most `at_most`.

        Raises:
            TooLarge: the limit is passed.
            Corrupt: the bytes cannot be unpacked.
        """
        found: list[bytes] = []
        rest = piece
        while rest and not self._inflate.eof:
            try:
                out = self._inflate.decompress(rest, at_most)
            except zlib.error:
                self._try_raw_deflate()
                continue
            rest = self._inflate.unconsumed_tail
            self._header_known = True
            if self._left is not None:
                self._left -= len(out)
                if self._left < 0:
                    raise TooLarge
            if out:
                found.append(out)
        return found

    @property
    def complete(self) -> bool:
        """Whether the end of the packed data was reached."""
        return self._inflate.eof

    def _try_raw_deflate(self) -> None:
        """Some servers send `deflate` without the zlib header that RFC 9110 asks for."""
        if self._header_known:
            raise Corrupt from None
        self._inflate = zlib.decompressobj(-zlib.MAX_WBITS)
        self._header_known = True


def unpack(body: bytes, limit: int) -> bytes:
    """A whole body unpacked.

    Raises:
        TooLarge, Corrupt: as `Unpacker.feed`.
    """
    unpacker = Unpacker(limit)
    unpacked = b"".join(unpacker.feed(body))
    if not unpacker.complete:
        raise Corrupt
    return unpacked
