"""Cache token counts under the bytes of the counted piece.

Bounded in bytes: what was not used for longest goes first. One cache may serve counting and fitting; a turn then costs
its new messages. It knows of no threads: whoever shares a cache between threads hands in a lock.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, TypeVar, cast

from gateway.core.conversation.message import digest
from gateway.core.counting.measure import TokenCounter
from gateway.core.repeated import digest_again

T = TypeVar("T")

#: bytes that an entry takes beside its value: key, digest, slot in the table
_ENTRY_BYTES: Final = 256


class CountCache:
    """A bounded table of results by content.

    Args:
        limit_bytes: bytes that all entries may take together; 0 keeps nothing.
        lock: guards the table where threads share it.
    """

    def __init__(self, limit_bytes: int = 32 * 1024 * 1024, lock: AbstractContextManager[object] | None = None) -> None:
        self._limit = limit_bytes
        self._lock = lock if lock is not None else nullcontext()
        #: not a BoundedDict: it is bounded by bytes, and an entry that is read stays longer
        self._table: dict[Hashable, tuple[object, int]] = {}
        self._bytes = 0

    def get(self, kind: str, content: bytes, compute: Callable[[], T], size: Callable[[T], int] | None = None) -> T:
        """What `compute` said of this content the first time, for this `kind` of question.

        For content that comes again with each call, as tools do; messages have keys. `size` tells how many bytes a
        value takes. Two threads that ask at once may both compute; the results are equal.
        """
        return self.get_one(kind, digest_again(content), compute, size)

    def get_one(self, kind: str, key: Hashable, compute: Callable[[], T], size: Callable[[T], int] | None = None) -> T:
        """`get` for a caller who has a key: a digest of the content, or what tells it apart as well.

        A value of None is worked out anew each time.
        """
        known = self.peek(kind, key)
        if known is not None:
            return cast("T", known)
        value = compute()
        self.put(kind, key, value, size(value) if size is not None else 0)
        return value

    def get_keyed(
        self,
        kind: str,
        keys: Sequence[Hashable],
        compute: Callable[[Sequence[int]], Iterable[T]],
        size: Callable[[T], int] | None = None,
    ) -> list[T]:
        """`get_one` of many at once.

        `compute` is given the indices of all keys that are new, in one call, and is not called when none is.
        """
        table = self._table
        found: list[Any] = []
        missing: list[int] = []
        with self._lock:
            for key in keys:
                named = kind, key
                entry = table.pop(named, None)
                if entry is None:
                    missing.append(len(found))
                    found.append(None)
                else:
                    table[named] = entry  # the end of the table is what was used last
                    found.append(entry[0])
        if not missing:
            return found
        for index, value in zip(missing, compute(missing), strict=True):
            found[index] = value
            cost = _ENTRY_BYTES + (size(value) if size is not None else 0)
            with self._lock:
                self._keep((kind, keys[index]), value, cost)
        return found

    def peek(self, kind: str, key: Hashable) -> object:
        """What is kept, None where nothing is."""
        with self._lock:
            entry = self._table.pop((kind, key), None)
            if entry is None:
                return None
            self._table[kind, key] = entry
            return entry[0]

    def put(self, kind: str, key: Hashable, value: object, size: int) -> None:
        """Keep something instead of what is kept; `size`: bytes it takes."""
        with self._lock:
            self._keep((kind, key), value, _ENTRY_BYTES + size)

    def tokens(self, counter: TokenCounter, text: str) -> int:
        """Tokens of a text, counted once."""
        key = digest(text.encode("utf-8", "surrogatepass"))
        return self.get_one(f"text\0{counter.name}", key, lambda: counter.count(text))

    def _keep(self, key: Hashable, value: object, cost: int) -> None:
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
        """Bytes that the entries take."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._table)
