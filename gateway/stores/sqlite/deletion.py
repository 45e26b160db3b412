"""Delete sessions and old rows in parts: each transaction takes a few milliseconds."""

from __future__ import annotations

import math
import sqlite3
import time
from collections.abc import Sequence
from itertools import chain
from typing import Final, NamedTuple

from gateway.core.ids import first_id_at
from gateway.core.ledger.arithmetic import AccountKey
from gateway.stores.sqlite import accounts, agents, kept
from gateway.stores.sqlite.transaction import transact

#: namespace and id of a session
Key = tuple[str, str]

#: Accounts that may be deleted. The account of a client key stays: it must not start from zero because the key was
#: unused for a while. An account with holds of running calls stays as well: each would give its hold back from a new
#: account, out of what others hold by then.
_HOLDS_NOTHING: Final = "held_tokens = 0 AND held_nano_usd = 0 AND held_calls = 0"
_IS_FREE: Final = f"kind = 'session' AND {_HOLDS_NOTHING}"
#: Rows that one transaction deletes. It takes some milliseconds, during which no other worker can write.
_CHUNK: Final = 500
#: Seconds after which a transaction ends with the current session. On a busy machine, a few hundred statements would
#: keep the file locked longer than calls wait for it.
_MOST_S: Final = 0.02
#: rows that one statement names
_AT_ONCE: Final = 100
#: Rows that one search reads, in the order of their sessions. The same thread also reads tool results, makes
#: checkpoints and serves /readyz.
LOOK: Final = 10_000
#: the session of the last of so many rows after a position; no row if there are fewer
_END: Final = (
    "SELECT namespace, id FROM {} WHERE {} AND (namespace, id) > (:namespace, :id) "
    "ORDER BY namespace, id LIMIT 1 OFFSET :look - 1"
)
#: the sessions with rows up to that session which meet a condition
_FIND: Final = (
    "SELECT DISTINCT namespace, id FROM {} WHERE {} AND (namespace, id) > (:namespace, :id) "
    "AND (namespace, id) <= (:last_namespace, :last_id) AND {} ORDER BY namespace, id"
)
#: positions before the first and after the last session: SQLite sorts all blobs after all texts
FIRST: Final = ("", "")
_BEYOND_ALL: Final = (b"", b"")
_IS_OLD: Final = "SELECT 1 FROM sessions WHERE namespace = ? AND id = ? AND last_call_at < ?"
_SOME_CALLS: Final = (
    "FROM calls WHERE number IN "
    "(SELECT number FROM calls WHERE namespace = ? AND session_id = ? ORDER BY call_id LIMIT ?)"
)
_DELETE_CALLS: Final = f"DELETE {_SOME_CALLS}"
_COUNT_CALLS: Final = "SELECT count(*) FROM calls WHERE namespace = ? AND session_id = ?"
#: Remembers the calls of a deleted session. Its client key and its parents stay charged for them. If such a call is
#: settled again (out of a journal, or because it was orphaned), they must not be charged twice.
_NOTE_CALLS: Final = (
    f"INSERT OR REPLACE INTO gone SELECT call_id, epochs, iif(epochs IS NULL, NULL, record) {_SOME_CALLS}"
)
_DELETE_SESSION: Final = "DELETE FROM sessions WHERE namespace = ? AND id = ?"
_DELETE_RESULTS: Final = (
    "DELETE FROM results WHERE rowid IN (SELECT rowid FROM results WHERE namespace = ? AND id = ? LIMIT ?)"
)
_DELETE_ACCOUNT: Final = f"DELETE FROM accounts WHERE {_IS_FREE} AND namespace = ? AND id = ? AND changed_at < ?"  # noqa: S608  # constants
_DELETE_AGENT_ACCOUNTS: Final = (
    f"DELETE FROM accounts WHERE {accounts.OF_AGENTS} AND {_HOLDS_NOTHING} AND changed_at < ?"  # noqa: S608  # constants
)
_DELETE_OLD_CALLS: Final = "DELETE FROM calls WHERE number IN (SELECT number FROM calls WHERE call_id < ? LIMIT ?)"
_DELETE_OLD_GONE: Final = "DELETE FROM gone WHERE call_id IN (SELECT call_id FROM gone WHERE call_id < ? LIMIT ?)"
#: Most sessions that one transaction deletes. All pages that it changes are read before it starts. An old session was
#: not read for weeks, and reading a page from the disk can take longer than calls wait for a locked file.
_READ_AT_ONCE: Final = 20
#: reads calls before they are deleted: their rows to the last byte, and their entries in all indexes
_READ_CALLS: Final = (
    "SELECT count(*), max(substr(record, -1)), "
    "max(EXISTS (SELECT 1 FROM calls AS at WHERE at.call_id = some.call_id)), "
    "max(EXISTS (SELECT 1 FROM calls AS at INDEXED BY calls_of_session WHERE at.namespace IS some.namespace "
    "AND at.session_id IS some.session_id AND at.call_id = some.call_id)), "
    "max(EXISTS (SELECT 1 FROM calls AS at INDEXED BY calls_by_request WHERE at.request_id = some.request_id "
    "AND at.number = some.number)), "
    "max(EXISTS (SELECT 1 FROM calls AS at INDEXED BY calls_by_answer WHERE at.namespace = some.namespace "
    "AND at.answer = some.answer AND at.call_id = some.call_id)) FROM (SELECT * FROM calls WHERE {} LIMIT ?) AS some"
)
_READ_OLD_CALLS: Final = _READ_CALLS.format("call_id < ?")
_READ_CALLS_OF: Final = _READ_CALLS.format("namespace = ? AND session_id = ?")
#: reads tool results in the same way
_READ_RESULTS_OF: Final = (
    "SELECT count(*), max(substr(text, -1)), "
    "max(EXISTS (SELECT 1 FROM results AS at WHERE at.namespace = some.namespace "
    "AND at.id = some.id AND at.handle = some.handle)), "
    "max(EXISTS (SELECT 1 FROM results AS at INDEXED BY results_by_handle WHERE at.handle = some.handle "
    "AND at.rowid = some.number)), "
    "max(EXISTS (SELECT 1 FROM results AS at INDEXED BY results_by_size WHERE at.namespace = some.namespace "
    "AND at.id = some.id AND at.size = some.size AND at.rowid = some.number)) "
    "FROM (SELECT rowid AS number, * FROM results WHERE namespace = ? AND id = ? LIMIT ?) AS some"
)
#: reads the other rows of a session in the same way
_READ_ROWS_OF: Final = (
    "SELECT (SELECT kept FROM sessions WHERE namespace = ?1 AND id = ?2), "
    "(SELECT EXISTS (SELECT 1 FROM sessions AS at INDEXED BY sessions_listed WHERE at.last_call_at = one.last_call_at "
    "AND at.namespace = ?1 AND at.id = ?2) FROM sessions AS one WHERE one.namespace = ?1 AND one.id = ?2), "
    "(SELECT substr(value, -1) FROM states WHERE namespace = ?1 AND id = ?2), "
    "(SELECT substr(value, -1) FROM tools WHERE namespace = ?1 AND id = ?2), "
    "(SELECT max(substr(tools, -1)) FROM agents WHERE namespace = ?1 AND id = ?2), "
    "(SELECT decided FROM accounts WHERE kind = 'session' AND namespace = ?1 AND id = ?2)"
)
_DELETE_OLD_LESSONS: Final = "DELETE FROM lessons WHERE key IN (SELECT key FROM lessons WHERE changed_at < ? LIMIT ?)"
_NO_SESSION: Final = (
    "NOT EXISTS (SELECT 1 FROM sessions WHERE sessions.namespace = {0}.namespace AND sessions.id = {0}.id)"
)
#: the condition for rows of table {0} that are old and have no session
_ALONE: Final = f"changed_at < :before AND {_NO_SESSION}"
#: The same for `states` and `tools`. Both rows of a session are deleted together. They stay while child sessions are
#: charged to its account, as the state names the session's own parent, who is charged as well.
_BOTH_ALONE: Final = (
    _ALONE  # noqa: S608  # constants
    + " AND NOT EXISTS (SELECT 1 FROM {1} AS other WHERE other.namespace = {0}.namespace AND "
    "other.id = {0}.id AND other.changed_at >= :before) AND NOT EXISTS (SELECT 1 FROM accounts WHERE kind = 'session' "
    "AND accounts.namespace = {0}.namespace AND accounts.id = {0}.id AND accounts.changed_at >= :before)"
)
#: the condition for accounts of agents that are old and whose session is gone, see `AccountKey`
_AGENT_ALONE: Final = (
    f"kind = 'agent' AND {_HOLDS_NOTHING} AND changed_at < :before AND NOT EXISTS (SELECT 1 FROM sessions "  # noqa: S608  # constants
    "WHERE sessions.namespace = accounts.namespace "
    "AND sessions.id = substr(accounts.id, 1, instr(accounts.id, '/') - 1))"
)


class CleanupTable(NamedTuple):
    """A table to search for old rows. `old`: their condition. `kind`: only rows of this kind."""

    name: str
    old: str
    kind: str | None = None

    @property
    def part(self) -> str:
        """Return the condition for rows of this kind."""
        return f"kind = '{self.kind}'" if self.kind else "1"

    def among(self, keys: str) -> str:
        """Return the condition for rows of some sessions, which finds them by an index.

        With several rows of VALUES and no SELECT around them, SQLite would read the whole table.
        """
        columns, values = ("kind, namespace, id", f"'{self.kind}', ") if self.kind else ("namespace, id", "")
        return f"({columns}) IN (SELECT {values}column1, column2 FROM (VALUES {keys}))"  # noqa: S608  # constants


SESSIONS: Final = CleanupTable("sessions", "last_call_at < :before")
#: Tables with rows that may have no session to be deleted with: of parents and others that never made a call.
ALONE: Final = (
    CleanupTable("states", _BOTH_ALONE.format("states", "tools")),
    CleanupTable("tools", _BOTH_ALONE.format("tools", "states")),
    CleanupTable(
        "accounts",
        f"{_IS_FREE} AND {_ALONE.format('accounts')}",
        "session",
    ),
    CleanupTable("accounts", _AGENT_ALONE, "agent"),
    # The check for a session only needs indexes, and `changed_at` needs the row. `iif` does the cheaper check first.
    CleanupTable("results", f"iif({_NO_SESSION.format('results')}, changed_at < :before, 0)"),
)


#: sessions with more calls than `:before`, which is a number here
LONG_SESSIONS: Final = CleanupTable(
    "sessions",
    "(SELECT count(*) FROM calls WHERE calls.namespace = sessions.namespace AND session_id = sessions.id) > :before",
)


class OldRows(NamedTuple):
    """The sessions that a search has found, and the position to continue from; None if there are no more rows."""

    keys: Sequence[Key]
    after: Key | None


def look(connection: sqlite3.Connection, table: CleanupTable, before: float, after: Key) -> OldRows:
    """Return the sessions of rows that are older than `before`, among the next `LOOK` rows after a position."""
    position = {"namespace": after[0], "id": after[1]}
    end: Key | None = connection.execute(_END.format(table.name, table.part), {**position, "look": LOOK}).fetchone()
    last_namespace, last_id = end or _BEYOND_ALL
    bounds = {**position, "last_namespace": last_namespace, "last_id": last_id, "before": before}
    return OldRows(connection.execute(_FIND.format(table.name, table.part, table.old), bounds).fetchall(), end)


def delete_sessions(
    connection: sqlite3.Connection, keys: Sequence[Key], before: float | None
) -> tuple[int, Sequence[Key]]:
    """Delete a part of these sessions with all their data, if older than `before` (None: in any case).

    Return the number of deleted sessions, and the sessions that are left.
    """
    count = _preload(connection, keys)
    deleted, left = transact(connection, lambda db: _delete_within(db, keys[:count], before))
    return deleted, (*left, *keys[count:])


def _preload(connection: sqlite3.Connection, keys: Sequence[Key]) -> int:
    """Read the rows that the next transaction will delete, and return of how many sessions they are."""
    rows = 0
    for number, key in enumerate(keys[:_READ_AT_ONCE]):
        if rows >= _CHUNK:
            return number
        connection.execute(_READ_ROWS_OF, key).fetchone()
        for query in (_READ_RESULTS_OF, _READ_CALLS_OF):
            rows += connection.execute(query, (*key, _CHUNK)).fetchone()[0]
    return len(keys[:_READ_AT_ONCE])


def _delete_within(
    connection: sqlite3.Connection, keys: Sequence[Key], before: float | None
) -> tuple[int, Sequence[Key]]:
    deleted, room, until = 0, _CHUNK, time.monotonic() + _MOST_S
    changed_before = math.inf if before is None else before
    for index, key in enumerate(keys):
        if index and time.monotonic() > until:
            return deleted, keys[index:]
        if before is not None and not connection.execute(_IS_OLD, (*key, before)).fetchone():
            continue  # the session was called again after the search
        room -= connection.execute(_DELETE_RESULTS, (*key, room)).rowcount
        if before is None:
            connection.execute(_NOTE_CALLS, (*key, room))
        room -= connection.execute(_DELETE_CALLS, (*key, room)).rowcount
        if room == 0:
            return deleted, keys[index:]
        kept.delete(connection, *key, changed_before)
        agents.delete(connection, *key)
        if before is None:
            accounts.forget(connection, AccountKey("session", *key))
        else:
            connection.execute(_DELETE_ACCOUNT, (*key, before))
            connection.execute(_DELETE_AGENT_ACCOUNTS, (*accounts.of_agents(*key), before))
        deleted += connection.execute(_DELETE_SESSION, key).rowcount
    return deleted, ()


def delete_oldest_calls(connection: sqlite3.Connection, key: Key, most: int) -> int:
    """Delete some of the oldest calls of a session that has more than `most`, and return their number."""
    too_many = connection.execute(_COUNT_CALLS, key).fetchone()[0] - most
    if too_many <= 0:
        return 0
    some = (*key, min(too_many, _CHUNK))
    connection.execute(_READ_CALLS_OF, some).fetchone()

    def delete(db: sqlite3.Connection) -> int:
        db.execute(_NOTE_CALLS, some)
        return db.execute(_DELETE_CALLS, some).rowcount

    return transact(connection, delete)


def delete_old_calls(connection: sqlite3.Connection, before: float) -> int:
    """Delete some of the calls that began before this time, and return their number."""
    some = (first_id_at(before), _CHUNK)
    connection.execute(_READ_OLD_CALLS, some).fetchone()
    return connection.execute(_DELETE_OLD_CALLS, some).rowcount


def delete_old_gone(connection: sqlite3.Connection, before: float) -> int:
    """Forget some deleted calls that began before this time, and return their number; see `_NOTE_CALLS`."""
    return connection.execute(_DELETE_OLD_GONE, (first_id_at(before), _CHUNK)).rowcount


def delete_alone(
    connection: sqlite3.Connection, table: CleanupTable, keys: Sequence[Key], before: float
) -> Sequence[Key]:
    """Delete rows that `look` has found in a table of `ALONE`, if they are still old; return the sessions left."""
    some, rest = keys[:_CHUNK], keys[_CHUNK:]

    def delete(db: sqlite3.Connection) -> None:
        for start in range(0, len(some), _AT_ONCE):
            values = {f"key{index}": part for index, part in enumerate(chain(*some[start : start + _AT_ONCE]))}
            rows = ", ".join(f"(:key{index}, :key{index + 1})" for index in range(0, len(values), 2))
            query = f"DELETE FROM {table.name} WHERE {table.among(rows)} AND {table.old}"  # noqa: S608  # constants
            db.execute(query, {**values, "before": before})

    transact(connection, delete)
    return rest


def delete_old_lessons(connection: sqlite3.Connection, before: float) -> int:
    """Delete some of the lessons that were last changed before this time, and return their number."""
    return connection.execute(_DELETE_OLD_LESSONS, (before, _CHUNK)).rowcount
