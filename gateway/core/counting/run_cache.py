"""Cache results for the first messages of a conversation by their keys, for longer ones that begin with them.

A table by message is asked for every message on every turn; here a turn asks once for all that it shares with the last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

from gateway.core.counting.cache import CountCache
from gateway.core.values import dataclass

T = TypeVar("T")

#: Runs are looked for by so many messages at their beginning. A shorter run is worked out anew.
_SIGN: Final = 4
#: runs that are remembered of all that begin with the same messages
_OF_ONE_SIGN: Final = 8
#: bytes that a run takes beside its value, and each of its keys
_BYTES: Final = 200
_KEY_BYTES: Final = 64


@dataclass(frozen=True, slots=True)
class _Run:
    keys: tuple[bytes, ...]
    value: Any
    size: int


class RunCache:
    """Values of whole runs of messages, kept in a cache. Of two that two threads keep at once, one may be lost."""

    def __init__(self, cache: CountCache) -> None:
        self._cache = cache

    def extended(
        self, kind: str, keys: tuple[bytes, ...], extend: Callable[[int, T | None], T], size: Callable[[T], int]
    ) -> T:
        """The value of messages with these keys, for this `kind` of question.

        Args:
            kind: what is asked.
            keys: of the messages.
            extend: works it out, from how many messages are known and their value; 0 and None where none are.
            size: bytes that a value takes.
        """
        if len(keys) < _SIGN:
            return extend(0, None)
        kept = cast("tuple[_Run, ...]", self._cache.peek(kind, keys[:_SIGN]) or ())
        fits = [run for run in kept if keys[: len(run.keys)] == run.keys]
        known = max(fits, key=lambda run: len(run.keys), default=None)
        if known is not None and len(known.keys) == len(keys):
            return cast("T", known.value)
        value = extend(len(known.keys), known.value) if known is not None else extend(0, None)
        run = _Run(keys, value, _BYTES + _KEY_BYTES * len(keys) + size(value))
        # the run that this one goes on from is given up for it
        runs = (*[one for one in kept if one is not known], run)[-_OF_ONE_SIGN:]
        self._cache.put(kind, keys[:_SIGN], runs, sum(one.size for one in runs))
        return value
