"""Cancel a coroutine at its n-th wait."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")


class CancelledAt:
    """Await `work`, whose task is cancelled when it starts its n-th wait, for each n in `places`.

    `waits`: how often it has waited. The task is cancelled as by `Task.cancel`, even while the work handles an earlier
    cancellation.
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
            except BaseException as error:  # raised in the work
                thrown = error


async def cancelled_at(work: Coroutine[Any, Any, T], *places: int) -> bool:
    """Run the work in its own task, cancelled at these waits; return True if it reached the last of them."""
    cancelled = CancelledAt(work, places)

    async def run() -> None:
        await cancelled

    await asyncio.gather(asyncio.create_task(run()), return_exceptions=True)
    return cancelled.waits >= max(places)
