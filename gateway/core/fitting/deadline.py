"""Stop a trim that takes longer than its deadline.

The clock is theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeVar

T = TypeVar("T")

#: A piece of work is about 20 to 50 microseconds, a block read or offered; so many of them are 1 to 3 milliseconds.
_PIECES: Final = 64


class DeadlinePassed(Exception):
    """There is no more time to choose."""


def never() -> bool:
    """For those who can wait."""
    return False


class Deadline:
    """Counts work and asks `expired` now and then."""

    def __init__(self, expired: Callable[[], bool] = never) -> None:
        self._expired = expired
        self._done = 0

    def tick(self, pieces: int = 1) -> None:
        """So many pieces of work were done, or are about to be.

        Raises:
            Expired: there is no more time.
        """
        self._done += pieces
        if self._done >= _PIECES:
            self._done = 0
            if self._expired():
                raise DeadlinePassed

    def over(self, pieces: Iterable[T]) -> Iterator[T]:
        """Each of them, counted."""
        for piece in pieces:
            self.tick()
            yield piece
