"""Read and write the roll-ups of usage by hour and day."""

from __future__ import annotations

import sqlite3
from typing import Final

from gateway.core.record import CallRecord
from gateway.core.retention import Retention
from gateway.core.rollup import COUNTS, PERIODS, UsageQuery, UsageRow, number_of, row_names
from gateway.stores.rollups import added_by, is_of_key, oldest_kept
from gateway.stores.sums import MAX_SUM

_AT: Final = "period = ? AND number = ? AND labels = ?"
_ADD: Final = f"UPDATE usage SET {', '.join(f'{name} = min({name} + ?, {MAX_SUM})' for name in COUNTS)} WHERE {_AT}"  # noqa: S608  # constants
_TAKE_BACK: Final = f"UPDATE usage SET {', '.join(f'{name} = max({name} - ?, 0)' for name in COUNTS)} WHERE {_AT}"  # noqa: S608  # constants
_CREATE: Final = (
    f"INSERT INTO usage (period, number, labels, {', '.join(COUNTS)}) "  # noqa: S608  # constants
    f"SELECT ?1, ?2, ?3, {', '.join(f'?{place}' for place in range(5, 5 + len(COUNTS)))} "  # constants
    "WHERE (SELECT count(*) FROM usage WHERE period = ?1 AND number = ?2) < ?4"
)
_READ: Final = f"SELECT number, labels, {', '.join(COUNTS)} FROM usage WHERE period = ? AND number BETWEEN ? AND ?"  # noqa: S608  # constants
_DELETE: Final = (
    "DELETE FROM usage WHERE (period, number, labels) IN "
    "(SELECT period, number, labels FROM usage WHERE period = ? AND number < ? LIMIT ?)"
)
#: rows that one transaction deletes
_CHUNK: Final = 500


def add(db: sqlite3.Connection, record: CallRecord, replaced: CallRecord | None = None) -> None:
    """Add a call to its hour and day. `replaced`: its earlier record that was added before; it is taken back."""
    if replaced is not None:
        _take_back(db, replaced)
    added, names, hour = added_by(record), row_names(record), number_of("hour", record.started_at)
    for period, number in (("hour", hour), ("day", hour // 24)):
        for text, most in names:
            at = (period, number, text)
            if db.execute(_ADD, (*added, *at)).rowcount or db.execute(_CREATE, (*at, most, *added)).rowcount:
                break


def _take_back(db: sqlite3.Connection, record: CallRecord) -> None:
    added = added_by(record)
    for period in PERIODS:
        for text, _ in row_names(record):
            if db.execute(_TAKE_BACK, (*added, period, number_of(period, record.started_at), text)).rowcount:
                break


def read(db: sqlite3.Connection, query: UsageQuery) -> list[UsageRow]:
    """See `Store.usage`."""
    found = db.execute(_READ, (query.period, query.first, query.last))
    rows = (UsageRow(number, labels, counts) for number, labels, *counts in found)
    return [row for row in rows if is_of_key(row.labels, query.key)]


def delete_old(db: sqlite3.Connection, retention: Retention, now: float) -> int:
    """Delete some of the hours and days that are older than they are kept, and return the number of rows."""
    oldest = oldest_kept(retention, now)
    return sum(db.execute(_DELETE, (period, oldest[period], _CHUNK)).rowcount for period in PERIODS)
