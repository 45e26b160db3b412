"""The calls that were settled last, in the order in which they were: for whoever watches all workers of a store."""

from __future__ import annotations

import sqlite3
from typing import Final

import msgspec

from gateway.core.ports import MOST_LATEST, Latest, Settled
from gateway.stores.sqlite.rows import LAST_NUMBER, record_of
from gateway.stores.sums import totals_of

_LAST: Final = f"SELECT {LAST_NUMBER}"
_READ: Final = "SELECT number, totals, record FROM calls WHERE number > ? ORDER BY number LIMIT ?"
_TOTALS: Final = msgspec.json.Decoder(tuple[int, ...])


def read(connection: sqlite3.Connection, after: int | None, limit: int) -> Latest:
    """See `Store.latest`."""
    last = connection.execute(_LAST).fetchone()[0]
    if after is None:
        return Latest((), last)
    known = after if after <= last else 0  # else the file is another one by now
    begin = max(known, last - MOST_LATEST)
    rows = connection.execute(_READ, (begin, limit)).fetchall()
    settled = [_settled(record, totals) for _, totals, record in rows]
    return Latest(settled, rows[-1][0] if rows else last, begin - known)


def _settled(record: bytes, totals: bytes | None) -> Settled:
    return Settled(record_of((record,)), totals_of(_TOTALS.decode(totals)) if totals is not None else None)
