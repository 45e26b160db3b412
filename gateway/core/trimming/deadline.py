"""Stop a trim that takes longer than its deadline.

The caller supplies the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeVar

T = TypeVar("T")

#: The clock is read after this many pieces of work, every 1 to 3 milliseconds: one piece takes 20 to 50 microseconds.
_CHECK_INTERVAL: Final = 64


class DeadlinePassed(Exception):
    """The time for a trim is over."""


def never() -> bool:
    """Return False: the default for callers without a deadline."""
    return False


class Deadline:
    """Count pieces of work and call `expired` now and then."""

    def __init__(self, expired: Callable[[], bool] = never) -> None:
        self._expired = expired
        self._done = 0

    def tick(self, pieces: int = 1) -> None:
        """Count pieces of work that were done or are about to be done.

        Raises:
            DeadlinePassed: `expired` returned True.
        """
        self._done += pieces
        if self._done >= _CHECK_INTERVAL:
            self._done = 0
            if self._expired():
                raise DeadlinePassed

    def over(self, pieces: Iterable[T]) -> Iterator[T]:
        """Yield each of the pieces and count it."""
        for piece in pieces:
            self.tick()
            yield piece
