"""What is deleted, a part at a time: each function is one transaction of a few milliseconds, and is called again."""

from __future__ import annotations

import contextlib
import math
import sqlite3
from collections.abc import Sequence
from typing import Final

from gateway.core.ids import first_id_at

#: namespace and id of a session
Key = tuple[str, str]

#: call records, and other rows, that one transaction deletes: a few milliseconds in which nobody else can write
_CHUNK: Final = 500
_OLD_SESSIONS: Final = "SELECT namespace, id FROM sessions WHERE last_call_at < ? LIMIT ?"
_IS_OLD: Final = "SELECT 1 FROM sessions WHERE namespace = ? AND id = ? AND last_call_at < ?"
_DELETE_CALLS: Final = (
    "DELETE FROM calls WHERE call_id IN (SELECT call_id FROM calls WHERE namespace = ? AND session_id = ? LIMIT ?)"
)
_DELETE_STATE: Final = "DELETE FROM states WHERE namespace = ? AND id = ? AND changed_at < ?"
_DELETE_SESSION: Final = "DELETE FROM sessions WHERE namespace = ? AND id = ?"
_DELETE_OLD_CALLS: Final = "DELETE FROM calls WHERE call_id IN (SELECT call_id FROM calls WHERE call_id < ? LIMIT ?)"
_DELETE_OLD_LESSONS: Final = "DELETE FROM lessons WHERE key IN (SELECT key FROM lessons WHERE changed_at < ? LIMIT ?)"
_IS_ALONE: Final = (
    "changed_at < ? AND NOT EXISTS "
    "(SELECT 1 FROM sessions WHERE sessions.namespace = states.namespace AND sessions.id = states.id)"
)
_OLD_STATES: Final = f"SELECT namespace, id FROM states WHERE {_IS_ALONE} LIMIT ?"  # noqa: S608  # constants
_DELETE_ALONE: Final = f"DELETE FROM states WHERE namespace = ? AND id = ? AND {_IS_ALONE}"  # noqa: S608  # constants


def old_sessions(connection: sqlite3.Connection, before: float) -> list[Key]:
    """Some of the sessions that were called last before this time."""
    return connection.execute(_OLD_SESSIONS, (before, _CHUNK)).fetchall()


def delete_sessions(
    connection: sqlite3.Connection, keys: Sequence[Key], before: float | None
) -> tuple[int, Sequence[Key]]:
    """Delete sessions with their calls and states, if older than `before`; how many went, and those still to go."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        result = _delete_within(connection, keys, before)
        connection.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise
    return result


def _delete_within(
    connection: sqlite3.Connection, keys: Sequence[Key], before: float | None
) -> tuple[int, Sequence[Key]]:
    gone, room = 0, _CHUNK
    changed_before = math.inf if before is None else before
    for index, key in enumerate(keys):
        if before is not None and not connection.execute(_IS_OLD, (*key, before)).fetchone():
            continue  # it was called since the list was read
        room -= connection.execute(_DELETE_CALLS, (*key, room)).rowcount
        if room == 0:
            return gone, keys[index:]
        connection.execute(_DELETE_STATE, (*key, changed_before))
        gone += connection.execute(_DELETE_SESSION, key).rowcount
    return gone, ()


def delete_old_calls(connection: sqlite3.Connection, before: float) -> int:
    """Delete some of the calls that began before this time; how many."""
    return connection.execute(_DELETE_OLD_CALLS, (first_id_at(before), _CHUNK)).rowcount


def delete_old_states(connection: sqlite3.Connection, before: float) -> int:
    """Delete some of the states without a session that were changed last before this time; how many were found.

    They are looked for before the file is locked: nothing but a look at all states finds them.
    """
    keys = connection.execute(_OLD_STATES, (before, _CHUNK)).fetchall()
    if not keys:
        return 0
    connection.execute("BEGIN IMMEDIATE")
    try:
        connection.executemany(_DELETE_ALONE, [(*key, before) for key in keys])
        connection.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise
    return len(keys)


def delete_old_lessons(connection: sqlite3.Connection, before: float) -> int:
    """Delete some of the lessons that nothing was added to since this time; how many."""
    return connection.execute(_DELETE_OLD_LESSONS, (before, _CHUNK)).rowcount
