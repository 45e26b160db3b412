"""Commit the writes of one turn of the event loop in one transaction."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from gateway.core.errors import StoreUnavailable
from gateway.stores.sqlite.transaction import Work, transact

T = TypeVar("T")

#: seconds after which a locked database is tried again
RETRY_S: Final = 0.002
_BUSY: Final = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})


@dataclass(slots=True, eq=False)
class _Pending:
    """A write that waits for a transaction. After `deadline` (loop time) a locked database is not tried again."""

    work: Work[Any]
    done: asyncio.Future[Any]
    deadline: float


class Writer:
    """Writes over one connection that does not wait for locks.

    Args:
        connection: used in the event loop only.
        check: called before each transaction; raises an error to prevent it.
        timeout_s: how long a locked database is tried again.
        unavailable: converts an error of SQLite into the error for callers.
        committed: called after each transaction.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        check: Callable[[], None],
        timeout_s: float,
        unavailable: Callable[[Exception], StoreUnavailable],
        committed: Callable[[], None],
    ) -> None:
        self._connection = connection
        self._check = check
        self._timeout_s = timeout_s
        self._unavailable = unavailable
        self._committed = committed
        self._loop = asyncio.get_running_loop()
        self._pending: list[_Pending] = []
        self._flush_handle: asyncio.Handle | None = None
        self._paused = False

    async def write(self, work: Work[T]) -> T:
        """Run `work` in the next transaction, and return its result. It may run more than once, but has effect once.

        Raises:
            StoreUnavailable: nothing was written, or it is not known whether.
            Exception: raised by `work`, whose writes were rolled back.
        """
        done: asyncio.Future[T] = self._loop.create_future()
        self._pending.append(_Pending(work, done, self._loop.time() + self._timeout_s))
        self._schedule(0)
        return await done

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Start no transaction within this context."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False
            if self._pending:
                self._schedule(0)

    async def drain(self) -> None:
        """Write all waiting changes, or let them fail at their deadlines."""
        while self._pending:
            if self._flush_handle is not None:
                self._flush_handle.cancel()
            self._flush()
            await asyncio.sleep(RETRY_S)

    def _schedule(self, delay_s: float) -> None:
        if self._flush_handle is None and not self._paused:
            call = self._loop.call_later(delay_s, self._flush) if delay_s else self._loop.call_soon(self._flush)
            self._flush_handle = call

    def _flush(self) -> None:
        self._flush_handle = None
        if self._paused:
            return
        batch, self._pending = self._pending, []
        self._flush_batch(batch)

    def _flush_batch(self, batch: list[_Pending]) -> None:
        try:
            self._check()
            results = transact(self._connection, lambda db: [pending.work(db) for pending in batch])
        except sqlite3.Error as error:
            self._failed(batch, error)
            return
        except Exception as error:  # noqa: BLE001  # raised again in the caller whose work failed
            self._retry_singly(batch, error)
            return
        for pending, result in zip(batch, results, strict=True):
            if not pending.done.done():
                pending.done.set_result(result)
        self._committed()

    def _failed(self, batch: list[_Pending], error: sqlite3.Error) -> None:
        now = self._loop.time()
        busy = getattr(error, "sqlite_errorcode", 0) & 0xFF in _BUSY
        waiting = []
        for pending in batch:
            if busy and pending.deadline > now:
                waiting.append(pending)
            elif not pending.done.done():
                pending.done.set_exception(self._unavailable(error))
        if waiting:
            self._pending = waiting + self._pending
            self._schedule(RETRY_S)

    def _retry_singly(self, batch: list[_Pending], error: Exception) -> None:
        """Run each write again in its own transaction, so that an error reaches only the write that raised it."""
        if len(batch) > 1:
            for pending in batch:
                self._flush_batch([pending])
            return
        if not batch[0].done.done():
            batch[0].done.set_exception(error)
