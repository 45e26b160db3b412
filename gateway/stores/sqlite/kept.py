"""Read and write a session's state and the tools that it used.

The current steps of agents are stored in the row of the tools: steps change when tools are called, and that row is
written then anyway. The rest of a state can be long if the session is trimmed, and changes rarely.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import msgspec

from gateway.core.ledger.session_key import SessionKey
from gateway.core.session import Change, Places, SessionState
from gateway.core.tools import ToolUse
from gateway.stores import states

#: columns that `state_of` reads
STATE: Final = "states.value, steps"
#: Joins both rows to a namespace and an id. Either row may be missing, or may exist before its session does.
JOINED: Final = "LEFT JOIN states USING (namespace, id) LEFT JOIN tools USING (namespace, id)"
_KEPT: Final = f"SELECT {STATE}, tools.value FROM (SELECT ? AS namespace, ? AS id) {JOINED}"  # noqa: S608  # constants
_KEEP_STATE: Final = (
    "INSERT INTO states (namespace, id, changed_at, value) VALUES (?, ?, ?, ?) "
    "ON CONFLICT DO UPDATE SET changed_at = excluded.changed_at, value = excluded.value"
)
_ROW: Final = "SELECT value, steps FROM tools WHERE namespace = ? AND id = ?"
_KEEP_ROW: Final = (
    "INSERT INTO tools (namespace, id, value, steps, changed_at) VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
    "value = excluded.value, steps = coalesce(excluded.steps, steps), changed_at = excluded.changed_at"
)
#: no tools, as `_USES` reads them
_NONE_CALLED: Final = b"{}"
_CLEAR_TOOLS: Final = "UPDATE tools SET value = x'7b7d' WHERE namespace = ? AND id = ?"
_CHANGED_AT: Final = (
    "SELECT max(coalesce((SELECT changed_at FROM states WHERE namespace = ?1 AND id = ?2), 0), "
    "coalesce((SELECT changed_at FROM tools WHERE namespace = ?1 AND id = ?2), 0), "
    "coalesce((SELECT changed_at FROM accounts WHERE kind = 'session' AND namespace = ?1 AND id = ?2), 0))"
)
_DELETE_STATE: Final = "DELETE FROM states WHERE namespace = ? AND id = ?"
_DELETE_TOOLS: Final = "DELETE FROM tools WHERE namespace = ? AND id = ?"
_USES: Final = msgspec.json.Decoder(ToolUse)


class SessionRow(NamedTuple):
    """The row of a session in the table `tools`. `called`: the tools as JSON (column `value`); None without a row."""

    called: bytes | None
    steps: Places


class RowUpdate(NamedTuple):
    """The row that a call has read, and the steps in which the call ends."""

    row: SessionRow
    steps: Places


def state_of(value: object, steps: object) -> SessionState:
    """Decode a session's state from the columns `STATE`; an empty state if there is none."""
    state = states.read(value)
    return state if steps is None else state.with_steps(states.read_steps(steps))


def tool_use(value: bytes | None) -> ToolUse:
    """Decode the tools of a session."""
    return _USES.decode(value) if value is not None else ToolUse()


def read(db: sqlite3.Connection, key: SessionKey) -> SessionRow:
    """Read the row of a session's tools."""
    called, steps = db.execute(_ROW, _at(key)).fetchone() or (None, None)
    return SessionRow(called, states.read_steps(steps))


def add(db: sqlite3.Connection, key: SessionKey, update: RowUpdate | None, called: Sequence[str], now: float) -> None:
    """Save the changes of an ended call: its session's steps, and the tools that its response `called`."""
    is_moved = update is not None and update.steps is not update.row.steps
    if called or is_moved:
        row = update.row if update is not None else read(db, key)
        tools = msgspec.json.encode(tool_use(row.called).with_calls(called)) if called else row.called
        _keep_row(db, key, tools, update.steps if update is not None and is_moved else None, now)


def change(db: sqlite3.Connection, key: SessionKey, make: Change, now: float) -> SessionState:
    """Apply a change to a session's state, and return the new state."""
    value, steps, called = db.execute(_KEPT, _at(key)).fetchone()
    before = state_of(value, steps)
    state = make(before)
    is_moved = state.steps is not before.steps
    if is_moved:
        _keep_row(db, key, called, state.steps, now)
    is_same = replace(state, steps=before.steps) == before
    if not (is_same and is_moved):
        # An unchanged state is written as well: with a new `changed_at` it is not deleted as old.
        rest = replace(state, steps={})
        db.execute(_KEEP_STATE, (*_at(key), now, states.written(rest)))
    return state


def _keep_row(db: sqlite3.Connection, key: SessionKey, called: bytes | None, steps: Places | None, now: float) -> None:
    """Write the row of a session's tools. `steps`: None keeps the stored ones."""
    written = states.written_steps(steps) if steps is not None else None
    db.execute(_KEEP_ROW, (*_at(key), called or _NONE_CALLED, written, now))


def clear_tools(db: sqlite3.Connection, key: SessionKey) -> None:
    """Set the tool counts of a session to zero."""
    db.execute(_CLEAR_TOOLS, _at(key))


def delete(db: sqlite3.Connection, namespace: str, session_id: str, before: float) -> None:
    """Delete the state and the tools of a session if all are older than `before`; otherwise only its tool counts.

    Calls of a child session may still be charged to its account. Its state names its own parent, so it stays as well.
    """
    key = (namespace, session_id)
    if db.execute(_CHANGED_AT, key).fetchone()[0] < before:
        db.execute(_DELETE_STATE, key)
        db.execute(_DELETE_TOOLS, key)
    else:
        db.execute(_CLEAR_TOOLS, key)


def _at(key: SessionKey) -> tuple[str, str]:
    return key.namespace, key.id
