"""Read and write the rows of sessions, calls, lessons, tool results and client keys."""

from __future__ import annotations

import heapq
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from gateway.core.counting.calibration import LastTurn
from gateway.core.ids import first_id_at
from gateway.core.ledger.arithmetic import EMPTY, Claim, Moment, Periods
from gateway.core.ledger.session_key import SessionKey
from gateway.core.record import CallRecord
from gateway.core.session import MAX_KEPT, Remembered
from gateway.core.stored import CallStart, KeyChange, Lesson, SessionView, Sort, StoredKey
from gateway.core.usage import MAX_TOKENS, Totals
from gateway.core.values import dataclass
from gateway.stores.compressed import Compressed, decompressed
from gateway.stores.cursor import Cursor
from gateway.stores.damage import UnreadRecords, decode_key
from gateway.stores.record_encoding import decode_record
from gateway.stores.sqlite import accounts, agents, kept, usage
from gateway.stores.sums import MAX_SUM, SUMS, sums_of, totals_of

_SUM_LIST: Final = ", ".join(SUMS)
#: the number of the call that was settled last, even if it is deleted
LAST_NUMBER: Final = (
    "max((SELECT coalesce(max(number), 0) FROM calls), (SELECT coalesce(max(number), 0) FROM forgotten))"
)
_INSERT_CALL: Final = (
    "INSERT INTO calls (number, call_id, request_id, namespace, session_id, totals, epochs, record, answer) "  # noqa: S608  # constants
    f"VALUES ({LAST_NUMBER} + 1, ?, ?, ?, ?, ?, ?, ?, ?)"
)
#: with a new number, so that `settled_after` lists the call again
_CORRECT_CALL: Final = (
    f"UPDATE calls SET number = {LAST_NUMBER} + 1, totals = ?, epochs = ?, record = ?, answer = ? "  # noqa: S608  # constants
    "WHERE call_id = ?"
)
#: An orphaned call that still runs and is charged for more. It keeps its number: `settled_after` lists it when it ends.
_CHARGE_MORE: Final = "UPDATE calls SET totals = ?, epochs = ?, record = ?, answer = ? WHERE call_id = ?"
_UNDELETE_CALL: Final = "DELETE FROM gone WHERE call_id = ?"
_RESETS: Final = "SELECT resets FROM sessions WHERE namespace = ? AND id = ?"
#: the columns of the last turn, in the order of its fields
_LAST: Final = ("last_key", "last_residual", "last_frames", "last_added", "last_over")
_LAST_LIST: Final = ", ".join(_LAST)
_ADD: Final = (
    "INSERT INTO sessions "  # noqa: S608  # constants
    f"(namespace, id, derived, created_at, last_call_at, kept, {_LAST_LIST}, {_SUM_LIST}) "
    f"VALUES ({', '.join('?' * (6 + len(_LAST) + len(SUMS)))}) ON CONFLICT DO UPDATE SET "
    "last_call_at = max(last_call_at, excluded.last_call_at), "
    f"kept = iif(excluded.kept IS NULL, kept, substr(excluded.kept || coalesce(kept, ''), 1, {MAX_KEPT})), "
    + "".join(f"{name} = iif(excluded.last_key IS NULL, {name}, excluded.{name}), " for name in _LAST)
    + ", ".join(f"{name} = min({name} + excluded.{name}, {MAX_SUM})" for name in SUMS)
    + f" RETURNING {_SUM_LIST}"
)
#: subtracts a wrong charge from the sums, unless they were reset since; no sum falls below zero
_TAKE_BACK: Final = (
    f"UPDATE sessions SET {', '.join(f'{name} = max(0, {name} - ?)' for name in SUMS)} "  # noqa: S608  # constants
    "WHERE namespace = ? AND id = ? AND resets = ?"
)
_TOTALS: Final = f"SELECT {_SUM_LIST} FROM sessions WHERE namespace = ? AND id = ?"  # noqa: S608  # constants
#: Columns that `view` decodes. The condition is in the inner query, so that only the tools of chosen sessions are read.
VIEW: Final = (
    f"SELECT namespace, id, derived, created_at, last_call_at, value, {_SUM_LIST} "  # noqa: S608  # constants
    "FROM (SELECT * FROM sessions WHERE {}) LEFT JOIN tools USING (namespace, id)"
)
_REMEMBERED: Final = (
    f"SELECT {kept.STATE}, kept, {_LAST_LIST} FROM (SELECT ? AS namespace, ? AS id) "  # noqa: S608  # constants
    f"{kept.JOINED} LEFT JOIN sessions USING (namespace, id)"
)
#: the same with the session's account, for a call that begins, in one statement; the account may be missing as well
_OPENING: Final = (
    f"SELECT {kept.STATE}, kept, {_LAST_LIST}, {', '.join(accounts.COLUMNS)}{{}} "  # noqa: S608  # constants
    f"FROM (SELECT ? AS namespace, ? AS id) AS asked {kept.JOINED} LEFT JOIN sessions USING (namespace, id) "
    "LEFT JOIN accounts ON kind = 'session' AND accounts.namespace = asked.namespace AND accounts.id = asked.id"
)
_OPENING_ALONE: Final = _OPENING.format("")
_OPENING_WITH_TOTALS: Final = _OPENING.format(f", {_SUM_LIST}")
#: the first columns of the account and of the totals in these rows
_ACCOUNT_AT: Final = 3 + len(_LAST)
_SUMS_AT: Final = _ACCOUNT_AT + len(accounts.COLUMNS)
_NO_SUMS: Final = (0,) * len(SUMS)
_LESSON: Final = "SELECT value FROM lessons WHERE key = ?"
_KEEP_LESSON: Final = "INSERT OR REPLACE INTO lessons (key, changed_at, value) VALUES (?, ?, ?)"
_HAS_RESULT: Final = "SELECT 1 FROM results WHERE namespace = ? AND id = ? AND handle = ?"
_RESULTS_SIZE: Final = "SELECT coalesce(sum(size), 0) FROM results WHERE namespace = ? AND id = ?"
_KEEP_RESULT: Final = (
    "INSERT INTO results (handle, namespace, id, changed_at, text, size) VALUES (?, ?, ?, ?, ?, ?) "
    "ON CONFLICT (namespace, id, handle) DO UPDATE SET changed_at = excluded.changed_at"
)
_RESULT_OF: Final = "SELECT text FROM results WHERE namespace = ? AND id = ? AND handle = ?"
_RESULT: Final = "SELECT text FROM results WHERE handle = ? AND (? IS NULL OR namespace = ?) LIMIT 1"
_RESET: Final = (
    f"UPDATE sessions SET {', '.join(f'{name} = 0' for name in SUMS)}, resets = resets + 1 "  # noqa: S608  # constants
    "WHERE namespace = ? AND id = ?"
)
#: columns that `read_record` decodes
_CALL: Final = "call_id, record, namespace, session_id"
_PERIODS: Final = msgspec.json.Decoder(tuple[int, ...])
_ANSWERED: Final = (
    f"SELECT {_CALL} FROM calls INDEXED BY calls_by_answer WHERE namespace = ? AND answer = ? "  # noqa: S608  # constants
    "ORDER BY call_id DESC LIMIT 1"
)
_CALLS: Final = f"SELECT {_CALL} FROM calls WHERE {{}}{{}} ORDER BY call_id DESC LIMIT ?"  # noqa: S608  # constants
#: The first id of a time sorts before all ids of calls. So does the id of a call before those after it.
_SOME_CALLS: Final = f"SELECT {_CALL} FROM calls WHERE call_id > ? ORDER BY call_id LIMIT ?"  # noqa: S608  # constants
#: records that one read of all calls returns
_AT_ONCE: Final = 500
_OF_SESSION: Final = "namespace = ? AND session_id = ?"
#: The plus keeps SQLite from using the index of namespaces: the index of call ids already has the right order.
_OF_ANY_SESSION: Final = "+namespace IS NOT NULL"
_LATEST_SESSIONS: Final = (
    "SELECT last_call_at, id FROM sessions INDEXED BY sessions_listed WHERE +namespace = ? ORDER BY last_call_at DESC"
)
_NEWER_CALLS: Final = (
    f"SELECT {_CALL} FROM calls WHERE namespace = ? AND session_id = ? AND call_id > ? AND call_id < ? "  # noqa: S608  # constants
    "ORDER BY call_id DESC LIMIT ?"
)
#: sorts after all call ids, which are hexadecimal
_AFTER_ALL: Final = "g"
#: the columns by which sessions are sorted
_SORTED_BY: Final[Mapping[Sort, str]] = {
    "recent": "last_call_at",
    "tokens": "total_tokens",
    "cost": "cost_pico_usd",
}
_PLACES: Final = (
    "SELECT {0}, namespace, id FROM sessions INDEXED BY sessions_listed WHERE {1} "
    "ORDER BY {0} DESC, namespace DESC, id DESC LIMIT ?"
)
_VIEW_OF_ONE: Final = VIEW.format("namespace = ? AND id = ?")
#: the same columns without tools
_LISTED: Final = (
    f"SELECT namespace, id, derived, created_at, last_call_at, NULL, {_SUM_LIST} "  # noqa: S608  # constants
    "FROM sessions WHERE namespace = ? AND id = ?"
)


def add(connection: sqlite3.Connection, record: CallRecord, encoded: bytes) -> tuple[Totals, bool]:
    """Write a record and add its charge to its session, unless the call was settled before.

    Return the totals after it, and True if the record was written, which includes replacing that of an orphaned call.
    """
    settled, held, gone = accounts.found(connection, record.call_id)
    if settled is not None:
        return _correct(connection, record, encoded, settled)
    if gone is None:
        accounts.settle(connection, record, held)
        usage.add(connection, record)
    elif (orphaned := _orphaned(gone, record)) is not None:
        # The charge of its session is deleted already, those of other accounts are not.
        accounts.correct(connection, record, orphaned.record, orphaned.periods)
        usage.add(connection, record, orphaned.record)
        connection.execute(_UNDELETE_CALL, (record.call_id,))
    else:
        return _totals(_sums(connection, record.session)), False
    sums = _charge(connection, record)
    namespace, session_id = (record.session.namespace, record.session.id) if record.session else (None, None)
    request_id = record.request_id if record.request_id != record.call_id else None
    periods = _periods(connection, record)
    values = (record.call_id, request_id, namespace, session_id, _encoded(sums), periods, encoded, record.answer)
    connection.execute(_INSERT_CALL, values)
    return _totals(sums), True


def _correct(
    connection: sqlite3.Connection, record: CallRecord, encoded: bytes, known: tuple[bytes, bytes | None]
) -> tuple[Totals, bool]:
    """Do the same as `add` for a call that was settled before: only an orphaned call is replaced."""
    orphaned = _orphaned(known, record)
    if orphaned is None:
        return _totals(_sums(connection, record.session)), False
    accounts.correct(connection, record, orphaned.record, orphaned.periods)
    _take_back(connection, orphaned, record.session)
    usage.add(connection, record, orphaned.record)
    sums = _charge(connection, record)
    values = (_encoded(sums), _periods(connection, record), encoded, record.answer, record.call_id)
    connection.execute(_CHARGE_MORE if record.is_provisional else _CORRECT_CALL, values)
    return _totals(sums), True


def _charge(connection: sqlite3.Connection, record: CallRecord) -> Sequence[int] | None:
    """Add a call to its session, and return the totals after it as columns; None for a call without a session."""
    key = record.session
    if key is not None:
        added = (
            key.namespace,
            key.id,
            record.derived_session,
            record.started_at,
            record.started_at + record.duration_s,
            record.counted_kept or None,
            *_last(record),
            *sums_of(record.charge, record.saved_tokens),
        )
        sums: Sequence[int] = connection.execute(_ADD, added).fetchall()[0]
        agents.add(connection, key, record)
        return sums
    return _sums(connection, key)


def _last(record: CallRecord) -> tuple[str | int | None, ...]:
    """Return the columns of the last turn."""
    last = record.last_turn
    if last is None:
        return (None,) * len(_LAST)
    return last.key, max(-MAX_TOKENS, min(last.residual, MAX_TOKENS)), last.frames, last.added, last.over


def reset(connection: sqlite3.Connection, key: SessionKey) -> bool:
    """Set the totals and the tools of a session to zero; return False if the session does not exist."""
    kept.clear_tools(connection, key)
    agents.delete(connection, key.namespace, key.id)
    return connection.execute(_RESET, (key.namespace, key.id)).rowcount > 0


@dataclass(frozen=True, slots=True)
class _Orphaned:
    """The record of an orphaned call, with the resets of its session and the budget periods when it was charged."""

    record: CallRecord
    resets: int
    periods: Periods


def _orphaned(known: tuple[bytes | None, bytes | None], record: CallRecord) -> _Orphaned | None:
    """Return the stored record of an orphaned call; None if it was not orphaned, or `record` does not replace it."""
    value, periods = known
    if value is None:
        return None
    orphaned = decode_record(value, record.call_id, record.session)
    if not record.replaces(orphaned):
        return None
    # An older version stored no budget periods, and did not count them.
    resets, *of_accounts = _PERIODS.decode(periods) if periods else [0] * (1 + len(orphaned.accounts))
    return _Orphaned(orphaned, resets, dict(zip(orphaned.accounts, of_accounts, strict=True)))


def _take_back(connection: sqlite3.Connection, orphaned: _Orphaned, key: SessionKey | None) -> None:
    if key is not None and orphaned.record.charge is not None:
        wrong = sums_of(orphaned.record.charge, orphaned.record.saved_tokens)
        if connection.execute(_TAKE_BACK, (*wrong, key.namespace, key.id, orphaned.resets)).rowcount:
            agents.take_back(connection, key, orphaned.record)


def _periods(connection: sqlite3.Connection, record: CallRecord) -> bytes | None:
    """Encode when an orphaned call was charged, see `_Orphaned`; None for any other call."""
    if not record.is_provisional:
        return None
    key = record.session
    row = connection.execute(_RESETS, (key.namespace, key.id)).fetchone() if key else None
    return msgspec.json.encode((row[0] if row else 0, *accounts.periods(connection, record.accounts)))


def read_totals(connection: sqlite3.Connection, key: SessionKey) -> Totals:
    """Return a session's totals; zero for an unknown session."""
    return _totals(_sums(connection, key))


def _sums(connection: sqlite3.Connection, key: SessionKey | None) -> Sequence[int] | None:
    if key is None:
        return None
    row: Sequence[int] | None = connection.execute(_TOTALS, (key.namespace, key.id)).fetchone()
    return row if row is not None else _NO_SUMS


def _totals(sums: Sequence[int] | None) -> Totals:
    return totals_of(sums) if sums is not None else Totals()


def _encoded(sums: Sequence[int] | None) -> bytes | None:
    return msgspec.msgpack.encode(sums) if sums is not None else None


def remembered(connection: sqlite3.Connection, key: SessionKey) -> Remembered:
    """See `Store.remembered`."""
    return _remembered(connection.execute(_REMEMBERED, (key.namespace, key.id)).fetchone())


def opening(
    connection: sqlite3.Connection,
    key: SessionKey,
    claims: Sequence[Claim],
    above: Sequence[SessionKey],
    now: Moment,
    *,
    with_totals: bool,
) -> CallStart:
    """See `Store.open_call`. One query reads the session and its account; other accounts are read separately."""
    query = _OPENING_WITH_TOTALS if with_totals else _OPENING_ALONE
    row = connection.execute(query, (key.namespace, key.id)).fetchone()
    # A missing row is NULL in all columns. In an existing row, the first of these columns is never NULL.
    columns, own = row[_ACCOUNT_AT:_SUMS_AT], key.account
    account = accounts.account(connection, own, columns) if columns[0] is not None else EMPTY
    balances = accounts.balances(connection, claims, now, {own: account})
    parents = tuple([remembered(connection, one).state.parent for one in above]) if above else ()
    totals = None
    if with_totals:
        sums = row[_SUMS_AT:]
        totals = totals_of(sums) if sums[0] is not None else Totals()
    return CallStart(_remembered(row[:_ACCOUNT_AT]), balances, totals, parents)


def _remembered(row: Sequence[Any]) -> Remembered:
    value, steps, by_provider, *last = row
    by_provider = by_provider if isinstance(by_provider, str) else ""
    return Remembered(kept.state_of(value, steps), _last_turn(*last), by_provider)


def _last_turn(last_key: object, residual: object, *frames: Any) -> LastTurn | None:
    if not isinstance(last_key, str) or not isinstance(residual, int):
        return None
    # An older version stored no frames.
    return LastTurn(last_key, residual, *(frames if {*map(type, frames)} == {int} else ()))


def lesson(connection: sqlite3.Connection, key: str) -> bytes | None:
    """Return what was learned under a key."""
    row = connection.execute(_LESSON, (key,)).fetchone()
    return row[0] if row and isinstance(row[0], bytes) else None


def add_lessons(connection: sqlite3.Connection, lessons: Mapping[str, Lesson], now: float) -> dict[str, bytes]:
    """Apply each lesson to what was learned under its key, and return the new values."""
    known = {key: add_to(lesson(connection, key)) for key, add_to in lessons.items()}
    connection.executemany(_KEEP_LESSON, ((key, now, value) for key, value in known.items()))
    return known


def has_result(connection: sqlite3.Connection, key: SessionKey, handle: str) -> bool:
    """Return True if a session has a text under a handle."""
    return connection.execute(_HAS_RESULT, (key.namespace, key.id, handle)).fetchone() is not None


def results_size(connection: sqlite3.Connection, key: SessionKey) -> int:
    """Return the bytes of all texts of a session, before compression."""
    size: int = connection.execute(_RESULTS_SIZE, (key.namespace, key.id)).fetchone()[0]
    return size


def add_results(
    connection: sqlite3.Connection, key: SessionKey, texts: Mapping[str, Compressed], most: int, now: float
) -> list[str]:
    """Save texts of a session by handle while there is room; return the handles for which there was none."""
    room = most - results_size(connection, key)
    refused = []
    for handle, compressed in texts.items():
        if not has_result(connection, key, handle):
            if compressed.size > room:
                refused.append(handle)
                continue
            room -= compressed.size
        connection.execute(_KEEP_RESULT, (handle, key.namespace, key.id, now, compressed.text, compressed.size))
    return refused


def results(connection: sqlite3.Connection, key: SessionKey, handles: Sequence[str]) -> dict[str, str]:
    """Return the texts that a session has under these handles."""
    rows = ((handle, connection.execute(_RESULT_OF, (key.namespace, key.id, handle)).fetchone()) for handle in handles)
    return {handle: decompressed(row[0]) for handle, row in rows if row}


def result(connection: sqlite3.Connection, namespace: str | None, handle: str) -> str | None:
    """Return the text under a handle in a namespace (None: in any), or None."""
    row = connection.execute(_RESULT, (handle, namespace, namespace)).fetchone()
    return decompressed(row[0]) if row else None


def keys(connection: sqlite3.Connection) -> list[tuple[str, bytes]]:
    """Return the names and values of the client keys."""
    return connection.execute("SELECT name, value FROM keys").fetchall()


def add_key(connection: sqlite3.Connection, key: StoredKey) -> bool:
    """Save a client key; return False if there is one with the same name."""
    values = (key.name, msgspec.json.encode(key))
    return connection.execute("INSERT OR IGNORE INTO keys VALUES (?, ?)", values).rowcount > 0


def change_key(connection: sqlite3.Connection, name: str, change: KeyChange) -> StoredKey | None:
    """Apply `change` to a client key; return None if it does not exist."""
    row = connection.execute("SELECT value FROM keys WHERE name = ?", (name,)).fetchone()
    if row is None:
        return None
    changed = change(decode_key(name, row[0]))
    connection.execute("UPDATE keys SET value = ? WHERE name = ?", (msgspec.json.encode(changed), name))
    return changed


def revoke_key(connection: sqlite3.Connection, name: str) -> bool:
    """Delete a client key; return False if it does not exist."""
    return connection.execute("DELETE FROM keys WHERE name = ?", (name,)).rowcount > 0


def view(row: Sequence[Any]) -> SessionView:
    """Decode a session from the columns of `VIEW`."""
    namespace, session_id, derived, created_at, last_call_at, tools = row[:6]
    key = SessionKey(namespace, session_id)
    return SessionView(key, created_at, last_call_at, totals_of(row[6:]), bool(derived), kept.tool_use(tools))


def session(db: sqlite3.Connection, key: SessionKey) -> SessionView | None:
    """See `Store.session`."""
    row = db.execute(_VIEW_OF_ONE, (key.namespace, key.id)).fetchone()
    return view(row) if row else None


def session_counts(db: sqlite3.Connection, namespaces: Sequence[str]) -> list[int]:
    """Return the number of sessions of each namespace."""
    query = "SELECT count(*) FROM sessions WHERE namespace = ?"
    return [db.execute(query, (namespace,)).fetchone()[0] for namespace in namespaces]


def listed(db: sqlite3.Connection, key: SessionKey) -> SessionView | None:
    """Return a session as a list shows it."""
    row = db.execute(_LISTED, (key.namespace, key.id)).fetchone()
    return view(row) if row else None


def places(
    db: sqlite3.Connection, namespace: str | None, sort: Sort, after: Cursor | None, limit: int
) -> Iterator[Cursor]:
    """Return the positions of sessions of one namespace (None: of all) in a list, after the position `after`."""
    column, conditions, values = _SORTED_BY[sort], ["1"], list[object]()
    if namespace is not None:
        # The plus keeps SQLite from using another index: `sessions_listed` has the right order.
        conditions.append("+namespace = ?")
        values.append(namespace)
    if after is not None:
        conditions.append(f"({column}, namespace, id) < (?, ?, ?)")
        values += after
    query = _PLACES.format(column, " AND ".join(conditions))
    return map(Cursor._make, db.execute(query, (*values, limit)))


def calls(
    db: sqlite3.Connection, session: SessionKey, limit: int, before: str | None, unread: UnreadRecords
) -> list[CallRecord]:
    """See `Store.calls`."""
    return _calls(db, _OF_SESSION, (session.namespace, session.id), limit, before, unread)


def newest(db: sqlite3.Connection, namespace: str | None, limit: int, unread: UnreadRecords) -> list[CallRecord]:
    """See `Store.newest_calls`."""
    if namespace is None:
        return _calls(db, _OF_ANY_SESSION, (), limit, None, unread)
    found = list[CallRecord]()
    before = None
    while len(found) < limit:
        wanted = limit - len(found)
        rows = _newest_rows(db, namespace, wanted, before)
        found += [record for row in rows if (record := read_record(unread, *row)) is not None]
        if len(rows) < wanted:
            break
        before = rows[-1][0]
    return found


def _newest_rows(db: sqlite3.Connection, namespace: str, limit: int, before: str | None) -> list[Any]:
    """Return the columns `_CALL` of the newest calls of a namespace with ids before `before`, newest first.

    Sessions with the latest calls are read first. No call of a session began after its last call had ended, so the
    search ends early. An index of the calls of each namespace would cost a page more per call.
    """
    newest: list[Any] = []
    for last_call_at, session_id in db.execute(_LATEST_SESSIONS, (namespace,)):
        oldest = newest[0][0] if len(newest) == limit else ""
        if oldest and first_id_at(last_call_at + 0.001) <= oldest:
            break
        for row in db.execute(_NEWER_CALLS, (namespace, session_id, oldest, before or _AFTER_ALL, limit)):
            if len(newest) < limit:
                heapq.heappush(newest, row)
            else:
                heapq.heappushpop(newest, row)
    return sorted(newest, reverse=True)


def _calls(  # noqa: PLR0917  # shared by three lists
    db: sqlite3.Connection,
    condition: str,
    values: Sequence[str],
    limit: int,
    before: str | None,
    unread: UnreadRecords,
) -> list[CallRecord]:
    """Return the newest records of a list. A record that cannot be read is replaced by an older one."""
    found: list[CallRecord] = []
    while len(found) < limit:
        wanted = limit - len(found)
        older, bounds = ("", ()) if before is None else (" AND call_id < ?", (before,))
        rows = db.execute(_CALLS.format(condition, older), (*values, *bounds, wanted)).fetchall()
        found += [record for row in rows if (record := read_record(unread, *row)) is not None]
        if len(rows) < wanted:
            break
        before = rows[-1][0]
    return found


def read_record(
    unread: UnreadRecords, call_id: str, value: bytes, namespace: str | None, session_id: str | None
) -> CallRecord | None:
    """Return a record from the columns `_CALL`, or None if it cannot be read."""
    key = SessionKey(namespace, session_id) if namespace is not None and session_id is not None else None
    return unread.read(call_id, value, key)


def some_calls(db: sqlite3.Connection, after: str, unread: UnreadRecords) -> tuple[Sequence[CallRecord], str | None]:
    """Return the next records of all calls in the order of their ids, and the last id; None at the end."""
    found = db.execute(_SOME_CALLS, (after, _AT_ONCE)).fetchall()
    records = [record for row in found if (record := read_record(unread, *row)) is not None]
    return records, found[-1][0] if len(found) == _AT_ONCE else None


def call(db: sqlite3.Connection, namespace: str | None, name: str, unread: UnreadRecords) -> CallRecord | None:
    """See `Store.call`."""
    # The plus keeps SQLite from using the index of namespaces, with which it would read all calls of the namespace.
    condition, scope = ("", ()) if namespace is None else (" AND +namespace = ?", (namespace,))
    for column in ("call_id", "request_id"):
        query = f"SELECT {_CALL} FROM calls WHERE {column} = ?{condition} ORDER BY call_id DESC LIMIT 1"  # noqa: S608
        row = db.execute(query, (name, *scope)).fetchone()
        if row:
            return read_record(unread, *row)
    return None


def answered(db: sqlite3.Connection, namespace: str, answer: str, unread: UnreadRecords) -> CallRecord | None:
    """See `Store.call_of_response`."""
    row = db.execute(_ANSWERED, (namespace, answer)).fetchone()
    return read_record(unread, *row) if row else None
