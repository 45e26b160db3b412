"""Cache the sums of the first messages of a request by the bytes of its array.

Comparing bytes is fifty times faster than hashing them, so the text itself is stored. Entries belong to no session:
every request that starts with the same bytes continues from the same sums.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager
from typing import Final, cast

from gateway.core.counting.cache import CountCache
from gateway.core.counting.measure import Wire
from gateway.core.counting.sums import MessageSums
from gateway.core.runaway import ROUNDS_BYTES, ReadRounds
from gateway.core.values import dataclass

#: Minimum length of a cached text in bytes. Counting a shorter one takes less time than finding it.
_LEAST_BYTES: Final = 4096
#: A prefix is found by a fingerprint: an offset in bytes, and the bytes directly before it. The offset is the largest
#: of a fixed list that its text reaches. Each offset of the list is `_GROWTH` times the one before it.
_GROWTH: Final = 1.2
_FINGERPRINT_BYTES: Final = 64
#: maximum number of prefixes with the same fingerprint: conversations of about the same length with the same bytes at
#: the offset
_PER_FINGERPRINT: Final = 16
#: bytes that a prefix takes in addition to its text, and for each message
_BYTES: Final = 600
_KEY_BYTES: Final = 144


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """The first messages of an array.

    Attributes:
        text: the array without cache marks, from its bracket to the end of the last of these messages.
        bounds: start and stop of each message in the text, in one flat sequence.
        keys: `keys_of` of the messages.
        kind: the kind of the request that they were counted for, see `Overhead.kind`.
        sums: the sums of the messages.
        `server_references`: the names by which the messages refer to content that only the provider has
            (`dialects/server_state.py`).
        rounds: the rounds of calls and results in the messages, or in the first of them; None if nothing reads them.
    """

    text: bytes
    bounds: tuple[int, ...]
    keys: tuple[bytes, ...]
    kind: Hashable
    sums: MessageSums
    server_references: frozenset[str] = frozenset()
    rounds: ReadRounds | None = None

    @property
    def messages(self) -> tuple[bytes, ...]:
        """Return the bytes of each message."""
        return self.between(0, len(self.keys))

    def between(self, first: int, stop: int) -> tuple[bytes, ...]:
        """Return the bytes of the messages from `first` to `stop - 1`."""
        bounds = self.bounds[2 * first : 2 * stop]
        return tuple(map(self.text.__getitem__, map(slice, bounds[::2], bounds[1::2])))

    @property
    def size_bytes(self) -> int:
        """Return the approximate size in memory, in bytes."""
        rounds = ROUNDS_BYTES if self.rounds is not None else 0
        return _BYTES + len(self.text) + _KEY_BYTES * len(self.keys) + self.sums.size_bytes + rounds


class PrefixCache:
    """Cache prefixes of arrays, limited in bytes.

    If two threads store prefixes at the same time, one may be lost and is counted again later.

    Args:
        limit_bytes: maximum size of all entries together; 0 stores nothing.
        lock: guards the table if threads share it.
    """

    def __init__(self, limit_bytes: int, lock: AbstractContextManager[object] | None = None) -> None:
        self._cache = CountCache(limit_bytes, lock)

    def find(self, wire: Wire, array: bytes) -> CachedPrefix | None:
        """Return the longest cached prefix of a JSON array without cache marks, or None."""
        for offset in _offsets(len(array)):
            matches = [
                prefix for prefix in self._at(wire, _fingerprint(array, offset)) if _starts_with(array, prefix.text)
            ]
            if matches:
                return max(matches, key=lambda prefix: len(prefix.text))
        return None

    def keep(self, wire: Wire, beginning: CachedPrefix, instead_of: CachedPrefix | None = None) -> None:
        """Store a prefix; it replaces the shorter prefix that it continues."""
        if instead_of is not None:
            self._put(wire, instead_of.text, ())
        self._put(wire, beginning.text, (beginning,))

    def _put(self, wire: Wire, text: bytes, new: tuple[CachedPrefix, ...]) -> None:
        """Replace the prefix with this text by `new`, or remove it if `new` is empty."""
        offsets = _offsets(len(text))
        if not offsets:
            return
        fingerprint = _fingerprint(text, offsets[0])
        others = [prefix for prefix in self._at(wire, fingerprint) if prefix.text != text]
        kept = (*others, *new)[-_PER_FINGERPRINT:]
        self._cache.put(wire, fingerprint, kept, sum(prefix.size_bytes for prefix in kept))

    def _at(self, wire: Wire, fingerprint: Hashable) -> tuple[CachedPrefix, ...]:
        return cast("tuple[CachedPrefix, ...]", self._cache.peek(wire, fingerprint) or ())

    @property
    def size_bytes(self) -> int:
        """Return the size of all entries in bytes."""
        return self._cache.size_bytes


def is_worth_keeping(text: bytes) -> bool:
    """Return True if a text is long enough to be cached."""
    return len(text) >= _LEAST_BYTES


def _offsets(length: int) -> tuple[int, ...]:
    """Return the offsets of the list that a text of this length reaches, largest first."""
    return _OFFSETS[: bisect_right(_OFFSETS, length)][::-1]


def _fingerprint(text: bytes, offset: int) -> Hashable:
    return offset, text[offset - _FINGERPRINT_BYTES : offset]


def _starts_with(array: bytes, text: bytes) -> bool:
    """Return True if the text is the first elements of the array and does not end inside an element."""
    if not array.startswith(text):
        return False
    end = len(text)
    while array[end] in b" \t\r\n":
        end += 1
    return array[end] in b",]"


def _all_offsets() -> Iterator[int]:
    offset = float(_LEAST_BYTES)
    while offset < 2**31:  # more than any body
        yield round(offset)
        offset *= _GROWTH


_OFFSETS: Final = tuple(_all_offsets())
