"""What the columns hold: totals, records, states and lessons, read and written inside whatever transaction there is."""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from gateway.core.counting.calibration import LastTurn
from gateway.core.ports import LOST, CallRecord, Lesson, SessionKey, SessionView, StoredKey
from gateway.core.session import Change, Remembered, SessionState
from gateway.core.usage import MAX_TOKENS, Totals
from gateway.stores import states
from gateway.stores.sqlite import accounts
from gateway.stores.sums import MAX_SUM, SUMS, sums_of, totals_of

_SUM_LIST: Final = ", ".join(SUMS)
_INSERT_CALL: Final = "INSERT OR IGNORE INTO calls VALUES (?, ?, ?, ?, ?)"
_RECORD: Final = "SELECT record FROM calls WHERE call_id = ?"
_CORRECT_CALL: Final = "UPDATE calls SET record = ? WHERE call_id = ?"
_ADD: Final = (
    "INSERT INTO sessions "  # noqa: S608  # constants
    f"(namespace, id, derived, created_at, last_call_at, last_key, last_residual, {_SUM_LIST}) "
    f"VALUES ({', '.join('?' * (7 + len(SUMS)))}) ON CONFLICT DO UPDATE SET "
    "last_call_at = max(last_call_at, excluded.last_call_at), "
    "last_key = coalesce(excluded.last_key, last_key), "
    "last_residual = coalesce(excluded.last_residual, last_residual), "
    + ", ".join(f"{name} = min({name} + excluded.{name}, {MAX_SUM})" for name in SUMS)
    + f" RETURNING {_SUM_LIST}"
)
#: never below zero, should they have begun anew since then
_TAKE_BACK: Final = (
    f"UPDATE sessions SET {', '.join(f'{name} = max(0, {name} - ?)' for name in SUMS)} "  # noqa: S608  # constants
    "WHERE namespace = ? AND id = ?"
)
_TOTALS: Final = f"SELECT {_SUM_LIST} FROM sessions WHERE namespace = ? AND id = ?"  # noqa: S608  # constants
#: what `view` reads
VIEW: Final = f"SELECT namespace, id, derived, created_at, last_call_at, {_SUM_LIST} FROM sessions"  # noqa: S608
#: either row may be missing: a state may come before its session, and most sessions have none
_REMEMBERED: Final = (
    "SELECT value, last_key, last_residual FROM (SELECT ? AS namespace, ? AS id) "
    "LEFT JOIN states USING (namespace, id) LEFT JOIN sessions USING (namespace, id)"
)
_STATE: Final = "SELECT value FROM states WHERE namespace = ? AND id = ?"
_KEEP_STATE: Final = "INSERT OR REPLACE INTO states (namespace, id, changed_at, value) VALUES (?, ?, ?, ?)"
_LESSON: Final = "SELECT value FROM lessons WHERE key = ?"
_KEEP_LESSON: Final = "INSERT OR REPLACE INTO lessons (key, changed_at, value) VALUES (?, ?, ?)"
_HAS_RESULT: Final = "SELECT 1 FROM results WHERE namespace = ? AND id = ? AND handle = ?"
_RESULT: Final = "SELECT text FROM results WHERE handle = ? AND (? IS NULL OR namespace = ?) LIMIT 1"
_RECORDS: Final = msgspec.json.Decoder(CallRecord)
_KEYS: Final = msgspec.json.Decoder(StoredKey)


def add(connection: sqlite3.Connection, record: CallRecord, encoded: bytes) -> Totals:
    """Write a record and add its charge to its session, unless it was written before; the totals after it."""
    key, charge = record.session, record.charge
    namespace, session_id = (key.namespace, key.id) if key else (None, None)
    request_id = record.request_id if record.request_id != record.call_id else None
    inserted = connection.execute(_INSERT_CALL, (record.call_id, request_id, namespace, session_id, encoded))
    lost = _lost(connection, record, encoded) if inserted.rowcount == 0 else None
    is_new = inserted.rowcount > 0 or lost is not None
    if is_new:
        accounts.settle(connection, record, lost)
    if key is None:
        return Totals()
    if lost is not None and lost.charge is not None:
        connection.execute(_TAKE_BACK, (*sums_of(lost.charge, lost.saved_tokens), key.namespace, key.id))
    if charge is None or not is_new:
        return read_totals(connection, key)
    last = record.last_turn
    values = (
        key.namespace,
        key.id,
        record.derived_session,
        record.started_at,
        record.started_at + record.duration_s,
        last.key if last else None,
        max(-MAX_TOKENS, min(last.residual, MAX_TOKENS)) if last else None,
        *sums_of(charge, record.saved_tokens),
    )
    return totals_of(connection.execute(_ADD, values).fetchone())


def _lost(connection: sqlite3.Connection, record: CallRecord, encoded: bytes) -> CallRecord | None:
    """What a call was written as when it was taken for lost, if it was: its own record then stands in that place."""
    if record.outcome == LOST:
        return None
    known = record_of(connection.execute(_RECORD, (record.call_id,)).fetchone())
    if known.outcome != LOST:
        return None
    connection.execute(_CORRECT_CALL, (encoded, record.call_id))
    return known


def read_totals(connection: sqlite3.Connection, key: SessionKey) -> Totals:
    """A session's totals; zero for an unknown one."""
    row = connection.execute(_TOTALS, (key.namespace, key.id)).fetchone()
    return totals_of(row) if row else Totals()


def remembered(connection: sqlite3.Connection, key: SessionKey) -> Remembered:
    """See `Store.remembered`."""
    value, last_key, residual = connection.execute(_REMEMBERED, (key.namespace, key.id)).fetchone()
    last = LastTurn(last_key, residual) if isinstance(last_key, str) and isinstance(residual, int) else None
    return Remembered(states.read(value), last)


def change_state(connection: sqlite3.Connection, key: SessionKey, change: Change, now: float) -> SessionState:
    """Apply `change` to a session's state; the state after it."""
    row = connection.execute(_STATE, (key.namespace, key.id)).fetchone()
    state = change(states.read(row[0] if row else None))
    connection.execute(_KEEP_STATE, (key.namespace, key.id, now, states.written(state)))
    return state


def lesson(connection: sqlite3.Connection, key: str) -> bytes | None:
    """What was learned under a key."""
    row = connection.execute(_LESSON, (key,)).fetchone()
    return row[0] if row and isinstance(row[0], bytes) else None


def add_lessons(connection: sqlite3.Connection, lessons: Mapping[str, Lesson], now: float) -> dict[str, bytes]:
    """Apply each lesson to what was learned under its key; what is known after it."""
    known = {key: add_to(lesson(connection, key)) for key, add_to in lessons.items()}
    connection.executemany(_KEEP_LESSON, ((key, now, value) for key, value in known.items()))
    return known


def has_result(connection: sqlite3.Connection, key: SessionKey, handle: str) -> bool:
    """Whether a session has a text under a handle."""
    return connection.execute(_HAS_RESULT, (key.namespace, key.id, handle)).fetchone() is not None


def add_results(connection: sqlite3.Connection, key: SessionKey, texts: Mapping[str, str], now: float) -> None:
    """Keep texts of a session under their handles."""
    rows = ((handle, key.namespace, key.id, now, _packed(text)) for handle, text in texts.items())
    connection.executemany("INSERT OR REPLACE INTO results VALUES (?, ?, ?, ?, ?)", rows)


def result(connection: sqlite3.Connection, namespace: str | None, handle: str) -> str | None:
    """The text under a handle."""
    row = connection.execute(_RESULT, (handle, namespace, namespace)).fetchone()
    return zlib.decompress(row[0]).decode("utf-8", "surrogatepass") if row else None


def _packed(text: str) -> bytes:
    """Tool results are repetitive: the fastest packing makes a third of them."""
    return zlib.compress(text.encode("utf-8", "surrogatepass"), 1)


def keys(connection: sqlite3.Connection) -> list[StoredKey]:
    """The client keys, by name."""
    return [_KEYS.decode(value) for (value,) in connection.execute("SELECT value FROM keys ORDER BY name")]


def add_key(connection: sqlite3.Connection, key: StoredKey) -> bool:
    """Keep a client key, unless there is one of its name."""
    values = (key.name, msgspec.json.encode(key))
    return connection.execute("INSERT OR IGNORE INTO keys VALUES (?, ?)", values).rowcount > 0


def revoke_key(connection: sqlite3.Connection, name: str) -> bool:
    """Forget a client key."""
    return connection.execute("DELETE FROM keys WHERE name = ?", (name,)).rowcount > 0


def view(row: Sequence[Any]) -> SessionView:
    """A session as `VIEW` reads it."""
    namespace, session_id, derived, created_at, last_call_at = row[:5]
    return SessionView(SessionKey(namespace, session_id), created_at, last_call_at, totals_of(row[5:]), bool(derived))


def record_of(row: tuple[bytes]) -> CallRecord:
    """A call as it was written."""
    return _RECORDS.decode(row[0])
