"""Provide a dict that keeps a limited number of entries and drops the oldest ones (a bounded cache)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class BoundedDict(OrderedDict[K, V]):
    """A dict that drops the entry written longest ago when it has more than `limit` entries.

    To write a key again makes it the newest; to read it changes nothing, so that reading costs what it costs in a dict.
    The order of iteration is from the oldest to the newest. Threads that write need a lock of their own.

    It extends `OrderedDict` because dropping the first entry of a plain dict has to skip all entries dropped before.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def __setitem__(self, key: K, value: V) -> None:
        """Write an entry as the newest one, and drop the oldest if there are too many."""
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._limit:
            self.popitem(last=False)
