"""Read the newest settled calls, in order."""

from __future__ import annotations

import sqlite3
from typing import Final

import msgspec

from gateway.core.stored import MOST_LATEST, LatestCalls, Settled
from gateway.core.usage import Totals
from gateway.stores.damage import UnreadRecords
from gateway.stores.sqlite.rows import LAST_NUMBER, read_record
from gateway.stores.sums import totals_of

_LAST: Final = f"SELECT {LAST_NUMBER}"
_READ: Final = (
    "SELECT number, totals, call_id, record, namespace, session_id FROM calls WHERE number > ? ORDER BY number LIMIT ?"
)
#: An older version wrote JSON.
_JSON: Final = msgspec.json.Decoder(tuple[int, ...])
_TOTALS: Final = msgspec.msgpack.Decoder(tuple[int, ...])


def read(connection: sqlite3.Connection, after: int | None, limit: int, unread: UnreadRecords) -> LatestCalls:
    """See `Store.settled_after`."""
    last = connection.execute(_LAST).fetchone()[0]
    if after is None:
        return LatestCalls((), last)
    known = after if after <= last else 0  # a higher number comes from another file that had this path before
    begin = max(known, last - MOST_LATEST)
    rows = connection.execute(_READ, (begin, limit)).fetchall()
    records = [(read_record(unread, *row), totals) for _, totals, *row in rows]
    settled = [Settled(record, _totals(totals)) for record, totals in records if record is not None]
    return LatestCalls(settled, rows[-1][0] if rows else last, begin - known)


def _totals(value: bytes | None) -> Totals | None:
    if value is None:
        return None
    return totals_of((_JSON if value.startswith(b"[") else _TOTALS).decode(value))
