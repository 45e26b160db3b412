"""Work that is cancelled at a place of its own: at its n-th wait, wherever that is."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")


class CancelledAt:
    """`await CancelledAt(work, {3})`: work whose task is cancelled when it begins to wait for the third time.

    `waits`: how often it has waited. The task is cancelled as `Task.cancel` does it, also while the work deals with a
    cancel before.
    """

    def __init__(self, work: Coroutine[Any, Any, T], places: Collection[int]) -> None:
        self._work = work
        self._places = places
        self.waits = 0

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._work.__await__()
        thrown: BaseException | None = None
        while True:
            try:
                waited_for = steps.send(None) if thrown is None else steps.throw(thrown)
            except StopIteration as done:
                return done.value
            self.waits += 1
            task = asyncio.current_task()
            if self.waits in self._places and task is not None:
                task.cancel()
            thrown = None
            try:
                yield waited_for
            except BaseException as error:  # given to the work
                thrown = error


async def cancelled_at(work: Coroutine[Any, Any, T], *places: int) -> bool:
    """Do it in a task of its own that is cancelled at these waits; whether it came to the last of them."""
    cancelled = CancelledAt(work, places)

    async def run() -> None:
        await cancelled

    await asyncio.gather(asyncio.create_task(run()), return_exceptions=True)
    return cancelled.waits >= max(places)
