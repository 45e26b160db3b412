"""Run a write transaction, which is rolled back if it fails."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]


def transact(connection: sqlite3.Connection, work: Work[T]) -> T:
    """Run `work` in a transaction, commit it, and return its result. If it raises, its writes are rolled back.

    Raises:
        sqlite3.Error: nothing was written, or it is not known whether.
    """
    connection.execute("BEGIN IMMEDIATE")
    try:
        result = work(connection)
        connection.execute("COMMIT")
    except BaseException:
        # Some errors have ended the transaction already.
        with contextlib.suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise
    return result
