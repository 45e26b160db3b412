"""Read and write the audit log in SQLite."""

from __future__ import annotations

import sqlite3
from typing import Final

from gateway.core.audit import MOST_CHANGES, AuditEntry, AuditPage
from gateway.stores.audit_entries import encoded, number_of, page_of_rows

#: `number` is never used again, so that a cursor always continues after its entry.
TABLE: Final = """
    CREATE TABLE changes (
        number INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, target TEXT NOT NULL, value BLOB NOT NULL
    );
    """
_ADD: Final = "INSERT INTO changes (at, target, value) VALUES (?, ?, ?)"
_DROP: Final = "DELETE FROM changes WHERE number <= ?"
_DELETE_OLD: Final = "DELETE FROM changes WHERE number IN (SELECT number FROM changes WHERE at < ? LIMIT 200)"
_PAGE: Final = (
    "SELECT CAST(number AS TEXT), value FROM changes WHERE (?1 IS NULL OR number < ?1) AND instr(target, ?2) > 0 "
    "ORDER BY number DESC LIMIT ?3"
)


def add(connection: sqlite3.Connection, entry: AuditEntry) -> None:
    """Add an entry, and drop the oldest one if there are too many."""
    number = connection.execute(_ADD, (entry.at, entry.target, encoded(entry))).lastrowid or 0
    connection.execute(_DROP, (number - MOST_CHANGES,))


def page(connection: sqlite3.Connection, limit: int, cursor: str | None, target: str) -> AuditPage:
    """See `AuditLog.changes`."""
    return page_of_rows(connection.execute(_PAGE, (number_of(cursor), target, limit + 1)).fetchall(), limit)


def delete_old(connection: sqlite3.Connection, before: float) -> int:
    """Delete some of the entries that were made before this Unix time in seconds, and return their number."""
    return connection.execute(_DELETE_OLD, (before,)).rowcount
