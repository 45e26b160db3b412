"""Compress tool results for SQLite and Redis."""

from __future__ import annotations

import zlib

from gateway.core.values import dataclass


@dataclass(frozen=True, slots=True)
class Compressed:
    """A compressed tool result, and its size in bytes before compression."""

    text: bytes
    size: int

    @classmethod
    def of(cls, text: str) -> Compressed:
        """Compress a text. Tool results repeat a lot: the fastest level already saves two thirds."""
        encoded = text.encode("utf-8", "surrogatepass")
        return cls(zlib.compress(encoded, 1), len(encoded))


def decompressed(text: bytes) -> str:
    """Return the original text."""
    return zlib.decompress(text).decode("utf-8", "surrogatepass")
