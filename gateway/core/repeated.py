"""Use bytes that repeat in each call, such as a list of tools, as cache keys."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from gateway.core.conversation.message import digest

#: digests that are cached
_KNOWN: Final = 128
#: Sizes in bytes whose digests are cached. Smaller values are hashed as fast, and larger ones take too much memory.
_WORTH_KEEPING: Final = range(512, 64 * 1024)
#: bytes of each sample, at the start, the middle and the end
_SAMPLE: Final = 32


class Repeated:
    """Bytes as a key whose hash is of their length and three samples; equality compares all bytes.

    Each request has its own copy of the bytes, so Python has no hash of it yet. Comparing is ten times as fast as
    hashing.
    """

    __slots__ = ("_hash", "raw")

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        middle = len(raw) // 2
        self._hash = hash((len(raw), raw[:_SAMPLE], raw[middle : middle + _SAMPLE], raw[-_SAMPLE:]))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Repeated) and self.raw == other.raw


def cache_key(raw: bytes) -> bytes | Repeated:
    """Return the cache key for bytes that repeat often."""
    return Repeated(raw) if len(raw) >= _WORTH_KEEPING.start else raw


def cached_digest(raw: bytes) -> bytes:
    """Return the `digest` of bytes that repeat often."""
    return _known_digest(Repeated(raw)) if len(raw) in _WORTH_KEEPING else digest(raw)


@lru_cache(_KNOWN)
def _known_digest(repeated: Repeated) -> bytes:
    return digest(repeated.raw)
