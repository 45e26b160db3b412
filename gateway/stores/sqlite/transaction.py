"""Run a write transaction: all of it, or nothing."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]


def transact(connection: sqlite3.Connection, work: Work[T]) -> T:
    """What `work` gave in a transaction that was committed. What it raises takes back what it wrote.

    Raises:
        sqlite3.Error: nothing was written, or it is not known whether.
    """
    connection.execute("BEGIN IMMEDIATE")
    try:
        result = work(connection)
        connection.execute("COMMIT")
    except BaseException:
        # Some errors have ended it already.
        with contextlib.suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise
    return result
