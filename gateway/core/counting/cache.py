"""Cache token counts by a hash of the counted content.

The cache is limited in bytes and drops the least recently used entry first. Counting and trimming may share one cache,
so that a turn only costs its new messages. The cache itself uses no threads. Code that shares it between threads passes
a lock.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, TypeVar, cast

from gateway.core.conversation.message import digest
from gateway.core.counting.measure import TokenCounter
from gateway.core.repeated import cached_digest

T = TypeVar("T")

#: bytes that an entry takes in addition to its value: key, hash, slot in the table
_ENTRY_BYTES: Final = 256


class CountCache:
    """Map content to results, limited in bytes (least recently used entries are dropped first).

    Args:
        limit_bytes: maximum size of all entries together; 0 stores nothing.
        lock: guards the table if threads share it.
    """

    def __init__(self, limit_bytes: int = 32 * 1024 * 1024, lock: AbstractContextManager[object] | None = None) -> None:
        self._limit = limit_bytes
        self._lock = lock if lock is not None else nullcontext()
        #: not a BoundedDict: it is bounded by bytes, and an entry that is read stays longer
        self._table: dict[Hashable, tuple[object, int]] = {}
        self._bytes = 0

    def get(self, kind: str, content: bytes, compute: Callable[[], T], size: Callable[[T], int] | None = None) -> T:
        """Return the result of `compute` for this content, from the cache if it is known.

        Use it for content that is sent again with each call, such as tool definitions; messages already have keys.

        Args:
            kind: namespace of the results; equal content may have one result for each kind.
            content: the content; its hash is the key.
            compute: computes the result. Two threads that ask at the same time may both call it; the results are equal.
            size: returns the bytes that a result takes.
        """
        return self.get_by_key(kind, cached_digest(content), compute, size)

    def get_by_key(
        self, kind: str, key: Hashable, compute: Callable[[], T], size: Callable[[T], int] | None = None
    ) -> T:
        """Return the result of `compute` for this key, from the cache if it is known.

        The key is a hash of the content, or another value that identifies it. A result of None is not cached.
        """
        cached = self.peek(kind, key)
        if cached is not None:
            return cast("T", cached)
        value = compute()
        self.put(kind, key, value, size(value) if size is not None else 0)
        return value

    def get_many(
        self,
        kind: str,
        keys: Sequence[Hashable],
        compute: Callable[[Sequence[int]], Iterable[T]],
        size: Callable[[T], int] | None = None,
    ) -> list[T]:
        """Return the results of many keys, like `get_by_key`.

        `compute` is called once with the indices of all unknown keys, or not at all if every key is known.
        """
        table = self._table
        results: list[Any] = []
        unknown: list[int] = []
        with self._lock:
            for key in keys:
                entry_key = kind, key
                entry = table.pop(entry_key, None)
                if entry is None:
                    unknown.append(len(results))
                    results.append(None)
                else:
                    table[entry_key] = entry  # the most recently used entry is at the end
                    results.append(entry[0])
        if not unknown:
            return results
        for index, value in zip(unknown, compute(unknown), strict=True):
            results[index] = value
            cost = _ENTRY_BYTES + (size(value) if size is not None else 0)
            with self._lock:
                self._store((kind, keys[index]), value, cost)
        return results

    def peek(self, kind: str, key: Hashable) -> object:
        """Return the cached value, or None."""
        with self._lock:
            entry = self._table.pop((kind, key), None)
            if entry is None:
                return None
            self._table[kind, key] = entry
            return entry[0]

    def put(self, kind: str, key: Hashable, value: object, size: int) -> None:
        """Store a value of `size` bytes and replace any earlier value."""
        with self._lock:
            self._store((kind, key), value, _ENTRY_BYTES + size)

    def tokens(self, counter: TokenCounter, text: str) -> int:
        """Return the token count of a text, from the cache if it is known."""
        key = digest(text.encode("utf-8", "surrogatepass"))
        return self.get_by_key(f"text\0{counter.name}", key, lambda: counter.count(text))

    def _store(self, key: Hashable, value: object, cost: int) -> None:
        if cost > self._limit:
            return
        replaced = self._table.pop(key, None)
        self._bytes += cost - (replaced[1] if replaced else 0)
        self._table[key] = (value, cost)
        while self._bytes > self._limit:
            _, dropped = self._table.pop(next(iter(self._table)))
            self._bytes -= dropped

    @property
    def size_bytes(self) -> int:
        """Return the size of all entries in bytes."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._table)
