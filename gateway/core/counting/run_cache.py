"""Cache a result for the first messages of a conversation, and extend it for longer conversations.

A table by message would be searched for every message on every turn. This cache is searched once per turn for all
messages that the turn shares with the previous one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

from gateway.core.counting.cache import CountCache
from gateway.core.values import dataclass

T = TypeVar("T")

#: Number of first messages that identify a run (a sequence of messages from the start). Results for shorter runs are
#: not cached.
_ID_LENGTH: Final = 4
#: maximum number of cached runs that start with the same messages
_PER_ID: Final = 8
#: bytes that a run takes in addition to its value, and for each of its keys
_BYTES: Final = 200
_KEY_BYTES: Final = 64


@dataclass(frozen=True, slots=True)
class _Run:
    keys: tuple[bytes, ...]
    value: Any
    size: int


class RunCache:
    """Cache values for runs of messages.

    If two threads store runs at the same time, one of them may be lost.
    """

    def __init__(self, cache: CountCache) -> None:
        self._cache = cache

    def get_extended(
        self, kind: str, keys: tuple[bytes, ...], extend: Callable[[int, T | None], T], size: Callable[[T], int]
    ) -> T:
        """Return the value for messages with these keys, extended from the longest cached run.

        Args:
            kind: namespace of the values.
            keys: keys of the messages.
            extend: computes the value from the number of messages of the cached run and its value, or from 0 and None.
            size: returns the bytes that a value takes.
        """
        if len(keys) < _ID_LENGTH:
            return extend(0, None)
        cached = cast("tuple[_Run, ...]", self._cache.peek(kind, keys[:_ID_LENGTH]) or ())
        matches = [run for run in cached if keys[: len(run.keys)] == run.keys]
        longest = max(matches, key=lambda run: len(run.keys), default=None)
        if longest is not None and len(longest.keys) == len(keys):
            return cast("T", longest.value)
        value = extend(len(longest.keys), longest.value) if longest is not None else extend(0, None)
        run = _Run(keys, value, _BYTES + _KEY_BYTES * len(keys) + size(value))
        # the new run replaces the run that it continues
        runs = (*[old for old in cached if old is not longest], run)[-_PER_ID:]
        self._cache.put(kind, keys[:_ID_LENGTH], runs, sum(one.size for one in runs))
        return value
