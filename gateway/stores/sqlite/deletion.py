"""Deletions in parts: each function is one transaction of a few milliseconds, called again until nothing is left."""

from __future__ import annotations

import itertools
import math
import sqlite3
import time
from collections.abc import Sequence
from typing import Final

from gateway.core.ids import first_id_at
from gateway.core.ledger import AccountKey
from gateway.stores.sqlite import accounts, kept
from gateway.stores.sqlite.transaction import transact

#: namespace and id of a session
Key = tuple[str, str]

#: A client key's account stays: it must not begin anew because the key was not used for a while. So does one on which
#: calls under way hold something: in a new one, each would give its own back out of what others hold by then.
_IS_FREE: Final = "kind = 'session' AND held_tokens = 0 AND held_nano_usd = 0 AND held_calls = 0"
#: call records, and other rows, that one transaction deletes: a few milliseconds in which nobody else can write
_CHUNK: Final = 500
#: After so many seconds a transaction ends with the session whose turn it is: on a busy machine each statement waits
#: for its turn, and a few hundred of them would keep the file locked for longer than calls wait for it.
_MOST_S: Final = 0.02
#: rows that one statement names
_AT_ONCE: Final = 100
_OLD_SESSIONS: Final = "SELECT namespace, id FROM sessions WHERE last_call_at < ? LIMIT ?"
_IS_OLD: Final = "SELECT 1 FROM sessions WHERE namespace = ? AND id = ? AND last_call_at < ?"
_DELETE_CALLS: Final = (
    "DELETE FROM calls WHERE number IN (SELECT number FROM calls WHERE namespace = ? AND session_id = ? LIMIT ?)"
)
_DELETE_SESSION: Final = "DELETE FROM sessions WHERE namespace = ? AND id = ?"
_DELETE_RESULTS: Final = "DELETE FROM results WHERE namespace = ? AND id = ?"
_DELETE_ACCOUNT: Final = f"DELETE FROM accounts WHERE {_IS_FREE} AND namespace = ? AND id = ? AND changed_at < ?"  # noqa: S608  # constants
_DELETE_OLD_CALLS: Final = "DELETE FROM calls WHERE number IN (SELECT number FROM calls WHERE call_id < ? LIMIT ?)"
_DELETE_OLD_LESSONS: Final = "DELETE FROM lessons WHERE key IN (SELECT key FROM lessons WHERE changed_at < ? LIMIT ?)"
#: the condition of rows of table {0} that are old and have no session
_ALONE: Final = (
    "changed_at < :before AND NOT EXISTS "
    "(SELECT 1 FROM sessions WHERE sessions.namespace = {0}.namespace AND sessions.id = {0}.id)"
)
#: the same for `states` and `tools`: the two rows of a session go together
_BOTH_ALONE: Final = (
    _ALONE  # noqa: S608  # constants
    + " AND NOT EXISTS (SELECT 1 FROM {1} AS other WHERE other.namespace = {0}.namespace AND "
    "other.id = {0}.id AND other.changed_at >= :before)"
)


def old_sessions(connection: sqlite3.Connection, before: float) -> list[Key]:
    """Some of the sessions that were called last before this time."""
    return connection.execute(_OLD_SESSIONS, (before, _CHUNK)).fetchall()


def delete_sessions(
    connection: sqlite3.Connection, keys: Sequence[Key], before: float | None
) -> tuple[int, Sequence[Key]]:
    """Delete sessions with their calls and states, if older than `before`; how many went, and those still to go."""
    return transact(connection, lambda db: _delete_within(db, keys, before))


def _delete_within(
    connection: sqlite3.Connection, keys: Sequence[Key], before: float | None
) -> tuple[int, Sequence[Key]]:
    gone, room, until = 0, _CHUNK, time.monotonic() + _MOST_S
    changed_before = math.inf if before is None else before
    for index, key in enumerate(keys):
        if index and time.monotonic() > until:
            return gone, keys[index:]
        if before is not None and not connection.execute(_IS_OLD, (*key, before)).fetchone():
            continue  # it was called since the list was read
        room -= connection.execute(_DELETE_CALLS, (*key, room)).rowcount
        if room == 0:
            return gone, keys[index:]
        kept.delete(connection, *key, changed_before)
        if before is None:
            accounts.forget(connection, AccountKey("session", *key))
        else:
            connection.execute(_DELETE_ACCOUNT, (*key, before))
        connection.execute(_DELETE_RESULTS, key)
        gone += connection.execute(_DELETE_SESSION, key).rowcount
    return gone, ()


def delete_old_calls(connection: sqlite3.Connection, before: float) -> int:
    """Delete some of the calls that began before this time; how many."""
    return connection.execute(_DELETE_OLD_CALLS, (first_id_at(before), _CHUNK)).rowcount


def delete_old_states(connection: sqlite3.Connection, before: float) -> int:
    """Delete some of the states without a session that were changed last before this time; how many were found."""
    return _delete_alone(connection, "states", _BOTH_ALONE.format("states", "tools"), before)


def delete_old_tools(connection: sqlite3.Connection, before: float) -> int:
    """The same for rows of tools, which have the agents' steps, too."""
    return _delete_alone(connection, "tools", _BOTH_ALONE.format("tools", "states"), before)


def delete_old_accounts(connection: sqlite3.Connection, before: float) -> int:
    """The same for accounts: of parents, or other sessions, that never called themselves."""
    return _delete_alone(connection, "accounts", f"{_IS_FREE} AND {_ALONE.format('accounts')}", before)


def delete_old_results(connection: sqlite3.Connection, before: float) -> int:
    """The same for tool results."""
    return _delete_alone(connection, "results", _ALONE.format("results"), before)


def _delete_alone(connection: sqlite3.Connection, table: str, condition: str, before: float) -> int:
    """Rows are looked for before the file is locked: to find them the whole table is read."""
    find = f"SELECT namespace, id FROM {table} WHERE {condition} LIMIT :most"  # noqa: S608  # constants
    keys = connection.execute(find, {"before": before, "most": _CHUNK}).fetchall()
    if not keys:
        return 0

    def delete(db: sqlite3.Connection) -> None:
        for start in range(0, len(keys), _AT_ONCE):
            some = {f"key{index}": part for index, part in enumerate(itertools.chain(*keys[start : start + _AT_ONCE]))}
            rows = ", ".join(f"(:key{index}, :key{index + 1})" for index in range(0, len(some), 2))
            query = f"DELETE FROM {table} WHERE (namespace, id) IN (VALUES {rows}) AND {condition}"  # noqa: S608  # constants
            db.execute(query, {**some, "before": before})

    transact(connection, delete)
    return len(keys)


def delete_old_lessons(connection: sqlite3.Connection, before: float) -> int:
    """Delete some of the lessons that nothing was added to since this time; how many."""
    return connection.execute(_DELETE_OLD_LESSONS, (before, _CHUNK)).rowcount
