"""The calls that were settled last, in the order in which they were: for whoever watches all workers of a store."""

from __future__ import annotations

import sqlite3
from typing import Final

import msgspec

from gateway.core.ports import MOST_LATEST, CallRecord, Latest, Settled
from gateway.core.usage import Totals
from gateway.stores.sqlite.rows import record_of
from gateway.stores.sums import columns_of, totals_of

#: calls between two clearings of what is too old to be asked for
_CLEAR_EVERY: Final = 64
_NOTE: Final = "INSERT INTO latest (call_id, totals) VALUES (?, ?)"
_CLEAR: Final = "DELETE FROM latest WHERE number <= ?"
_ENDS: Final = "SELECT coalesce(min(number), 1), coalesce(max(number), 0) FROM latest"
_READ: Final = (
    "SELECT number, totals, record FROM latest LEFT JOIN calls USING (call_id) WHERE number > ? ORDER BY number LIMIT ?"
)
_TOTALS: Final = msgspec.json.Decoder(tuple[int, ...])


def note(connection: sqlite3.Connection, record: CallRecord, totals: Totals) -> None:
    """Note a call that was just settled."""
    after = msgspec.json.encode(columns_of(totals)) if record.session is not None else None
    number = connection.execute(_NOTE, (record.call_id, after)).lastrowid or 0
    if number % _CLEAR_EVERY == 0:
        connection.execute(_CLEAR, (number - MOST_LATEST,))


def read(connection: sqlite3.Connection, after: int | None, limit: int) -> Latest:
    """See `Store.latest`."""
    first, last = connection.execute(_ENDS).fetchone()
    if after is None:
        return Latest((), last)
    known = after if after <= last else 0  # else the file is another one by now
    rows = connection.execute(_READ, (known, limit)).fetchall()
    settled = [_settled(record, totals) for _, totals, record in rows if record is not None]
    return Latest(settled, rows[-1][0] if rows else last, max(0, first - 1 - known))


def _settled(record: bytes, totals: bytes | None) -> Settled:
    return Settled(record_of((record,)), totals_of(_TOTALS.decode(totals)) if totals is not None else None)
