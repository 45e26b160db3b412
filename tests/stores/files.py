"""A store in a file, and a look at the file past the store."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterator
from decimal import Decimal
from pathlib import Path

from gateway.core.ledger.arithmetic import Moment
from gateway.core.ledger.session_key import SessionKey
from gateway.core.record import CallRecord
from gateway.core.usage import Charge, Usage
from gateway.stores.sqlite import SqliteStore

MakeRecord = Callable[..., CallRecord]

KEY = SessionKey("alice", "s")
CHARGE = Charge(Usage.of(10, 5), "provider", Decimal("0.01"))
#: of a store that is to give up
TIMEOUT_S = 0.2
#: of one that is not to, however slow the machine
PATIENT_S = 60.0


class Clock:
    """A wall clock that advances only when a test calls it."""

    def __init__(self) -> None:
        self.time = 1_000.0

    def __call__(self) -> float:
        return self.time


class Time:
    """The time for holds and windows: what a machine's two clocks show, and since which boot."""

    def __init__(self) -> None:
        self.wall = 1_000.0
        self.mono = 50.0
        self.boot = "first boot"
        #: by how much a server's clock is taken to be ahead of what it shows
        self.passed = 0.0

    def __call__(self) -> Moment:
        return Moment(self.wall, self.mono, self.boot)

    def go_on(self, seconds: float) -> None:
        self.wall += seconds
        self.mono += seconds
        self.passed += seconds

    def overhead(self) -> float:
        """A clock of this process that goes as that of a server does."""
        return time.monotonic() + self.passed


@contextlib.asynccontextmanager
async def opened(path: Path, timeout_s: float = PATIENT_S) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(path, timeout_s=timeout_s)
    try:
        yield store
    finally:
        await store.aclose()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[sqlite3.Connection]:
    """A transaction of another process, from the point of view of SQLite."""
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        connection.execute("BEGIN IMMEDIATE")
        yield connection
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        connection.close()


def write(path: Path, text: str, *values: object) -> None:
    connection = sqlite3.connect(path)
    try:
        connection.execute(text, values)
        connection.commit()
    finally:
        connection.close()


def query(path: Path, text: str) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(path)
    try:
        return connection.execute(text).fetchall()
    finally:
        connection.close()
