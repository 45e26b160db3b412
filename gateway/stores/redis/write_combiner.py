"""Combine changes of one session that wait in a worker into one write."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
W = TypeVar("W")


class WriteCombiner(Generic[K, W]):
    """Combine waiting changes of the same key into one call of `write`.

    `write` makes all of them in one step, and returns a result or an exception for each.
    """

    def __init__(self, write: Callable[[K, Sequence[W]], Awaitable[Sequence[Any]]]) -> None:
        self._write = write
        self._waiting: dict[K, list[tuple[W, asyncio.Future[Any]]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def __contains__(self, key: K) -> bool:
        """Return True while changes of this key are waiting or being written."""
        return key in self._waiting

    async def add(self, key: K, work: W) -> Any:
        """Make a change and return its result. It is made even if the caller is cancelled meanwhile."""
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if key in self._waiting:
            self._waiting[key].append((work, done))
        else:
            self._waiting[key] = [(work, done)]
            task = asyncio.create_task(self._run(key))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await done

    async def _run(self, key: K) -> None:
        while batch := self._waiting[key]:
            self._waiting[key] = []
            results: Sequence[Any]
            try:
                results = await self._write(key, [work for work, _ in batch])
            except Exception as error:  # noqa: BLE001  # raised again in each waiting caller
                results = [error] * len(batch)
            for (_, done), result in zip(batch, results, strict=True):
                if done.done():
                    continue
                if isinstance(result, Exception):
                    done.set_exception(result)
                else:
                    done.set_result(result)
        del self._waiting[key]

    async def drain(self) -> None:
        """Wait until all changes are written."""
        while self._tasks:
            await asyncio.wait(self._tasks)
