"""Read and write the roll-ups of usage by hour and day."""

from __future__ import annotations

import sqlite3
from typing import Final

from gateway.core.record import CallRecord
from gateway.core.retention import Retention
from gateway.core.rollup import COUNTS, HOURS, KEY, UsageQuery, UsageRow, number_of, row_names, text_of
from gateway.stores.rollups import Rollups, added_by, is_of_key, oldest_kept
from gateway.stores.sums import MAX_SUM

#: The hour of the row of a whole day. It is next to the rows of the hours, so that a call changes one page of the file.
_WHOLE_DAY: Final = 24
#: rows that a call changes. There is no row of an hour without that of its day.
_DAY_AND_HOUR: Final = 2
_COUNTS: Final = ", ".join(COUNTS)
#: the rows of a day and of one of its hours
_BOTH: Final = "day = ? AND labels = ? AND hour IN (?, 24)"
_ADD: Final = f"UPDATE usage SET {', '.join(f'{name} = min({name} + ?, {MAX_SUM})' for name in COUNTS)} WHERE {_BOTH}"  # noqa: S608  # constants
_TAKE_BACK: Final = f"UPDATE usage SET {', '.join(f'{name} = max({name} - ?, 0)' for name in COUNTS)} WHERE {_BOTH}"  # noqa: S608  # constants
_CREATE: Final = f"INSERT INTO usage ({_COUNTS}, day, labels, hour) VALUES ({', '.join('?' * (3 + len(COUNTS)))})"  # noqa: S608  # constants
#: the number of rows of a day, which is kept in a row without labels, so that they need not be counted
_ROWS: Final = "SELECT calls FROM usage WHERE day = ? AND labels = '' AND hour = 24"
_COUNT_ROW: Final = (
    f"INSERT INTO usage (day, labels, hour, {_COUNTS}) VALUES (?, '', 24, 1{', 0' * (len(COUNTS) - 1)}) "  # noqa: S608  # constants
    "ON CONFLICT DO UPDATE SET calls = calls + 1"
)
_READ: Final = (
    f"SELECT day, labels, hour, {_COUNTS} FROM usage WHERE day BETWEEN ?1 AND ?2 "  # noqa: S608  # constants
    "AND labels != '' AND substr(labels, 1, length(?3)) = ?3 AND hour {} 24"
)
_READ_DAYS: Final = _READ.format("=")
_READ_HOURS: Final = _READ.format("<")
_DELETE: Final = (
    "DELETE FROM usage WHERE (day, labels, hour) IN (SELECT day, labels, hour FROM usage WHERE day < ? AND {} LIMIT ?)"
)
_DELETE_HOURS: Final = _DELETE.format("hour < 24")
_DELETE_DAYS: Final = _DELETE.format("1")
#: rows that one transaction deletes
_CHUNK: Final = 500


def add(db: sqlite3.Connection, record: CallRecord, replaced: CallRecord | None = None) -> None:
    """Add a call to its hour and day. `replaced`: its earlier record that was added before; it is taken back."""
    if replaced is not None:
        _take_back(db, replaced)
    added, (day, hour) = added_by(record), _place(record)
    for text, most in row_names(record):
        rows = db.execute(_ADD, (*added, day, text, hour)).rowcount
        if rows or _create(db, added, day, text, most):
            if rows < _DAY_AND_HOUR:
                db.execute(_CREATE, (*added, day, text, hour))
            return


def _create(db: sqlite3.Connection, added: tuple[int, ...], day: int, text: str, most: int) -> bool:
    """Create the row of a day; return False if the day has too many."""
    row = db.execute(_ROWS, (day,)).fetchone()
    if row is not None and row[0] >= most:
        return False
    db.execute(_CREATE, (*added, day, text, _WHOLE_DAY))
    db.execute(_COUNT_ROW, (day,))
    return True


def _take_back(db: sqlite3.Connection, record: CallRecord) -> None:
    added, (day, hour) = added_by(record), _place(record)
    for text, _ in row_names(record):
        if db.execute(_TAKE_BACK, (*added, day, text, hour)).rowcount:
            return


def _place(record: CallRecord) -> tuple[int, int]:
    return divmod(number_of("hour", record.started_at), HOURS)


def fill(db: sqlite3.Connection, rollups: Rollups) -> None:
    """Write the usage of an older file, which had no such table."""
    for period, (number, text, counts) in rollups.rows():
        day, hour = (number, _WHOLE_DAY) if period == "day" else divmod(number, HOURS)
        db.execute(_CREATE, (*counts, day, text, hour))
        if period == "day":
            db.execute(_COUNT_ROW, (day,))


def read(db: sqlite3.Connection, query: UsageQuery) -> list[UsageRow]:
    """See `Store.usage`."""
    period, first, last, key = query
    # Labels are JSON that begins with the client key. Rows of other keys with the same beginning are left out below.
    begin = text_of({KEY: key})[:-1] if key else ""
    if period == "day":
        found = ((day, labels, counts) for day, labels, _, *counts in db.execute(_READ_DAYS, (first, last, begin)))
    else:
        rows = db.execute(_READ_HOURS, (first // HOURS, last // HOURS, begin))
        hours = ((day * HOURS + hour, labels, counts) for day, labels, hour, *counts in rows)
        found = (row for row in hours if first <= row[0] <= last)
    return [UsageRow(*row) for row in found if is_of_key(row[1], key)]


def delete_old(db: sqlite3.Connection, retention: Retention, now: float) -> bool:
    """Delete some of the hours and days that are older than they are kept, and return whether there may be more.

    It stops after a few rows, because calls that began long ago may be settled meanwhile and add others.
    """
    oldest = oldest_kept(retention, now)
    hours = db.execute(_DELETE_HOURS, (oldest["hour"] // HOURS, _CHUNK)).rowcount
    days = db.execute(_DELETE_DAYS, (oldest["day"], _CHUNK)).rowcount
    return max(hours, days) >= _CHUNK
