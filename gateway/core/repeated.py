"""Use bytes that repeat with each call, such as a list of tools, as keys of a cache."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from gateway.core.conversation.message import digest

#: digests that stay known
_KNOWN: Final = 128
#: Bytes of what a digest stays known of: of fewer it is taken as fast, and more would take too much memory.
_WORTH_KEEPING: Final = range(512, 64 * 1024)
#: bytes of each sample: from the beginning, the middle and the end
_SAMPLE: Final = 32


class Repeated:
    """Some bytes. Looked up by their length and three samples, and then compared whole.

    Each request has a copy of its own, whose hash nobody has taken yet; to compare is ten times as fast as to hash.
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


def again(raw: bytes) -> bytes | Repeated:
    """Bytes that come again and again, as a key."""
    return Repeated(raw) if len(raw) >= _WORTH_KEEPING.start else raw


def digest_again(raw: bytes) -> bytes:
    """`digest` of bytes that come again and again."""
    return _known_digest(Repeated(raw)) if len(raw) in _WORTH_KEEPING else digest(raw)


@lru_cache(_KNOWN)
def _known_digest(repeated: Repeated) -> bytes:
    return digest(repeated.raw)
