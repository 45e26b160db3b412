"""Read and write a session's state and the tools that it used.

Where its agents are in their steps changes as tools are called, and then the row of the tools is written anyway: that
has the steps, too. The rest of a state is long where the session is trimmed, and changes rarely.
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
#: to be joined to what has a namespace and an id: either row may be missing, or be there before its session is
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
    """The row of a session in `tools`. `called`: its column `value`, the tools as JSON; None where there is no row."""

    called: bytes | None
    steps: Places


class RowUpdate(NamedTuple):
    """The row as a call found it, and the steps that the call ends in."""

    row: SessionRow
    steps: Places


def state_of(value: object, steps: object) -> SessionState:
    """A session's state as `STATE` reads it; an empty one where it has none."""
    state = states.read(value)
    return state if steps is None else state.with_steps(states.read_steps(steps))


def tool_use(value: bytes | None) -> ToolUse:
    """The tools of a session as their column has them."""
    return _USES.decode(value) if value is not None else ToolUse()


def read(db: sqlite3.Connection, key: SessionKey) -> SessionRow:
    """The row of a session's tools."""
    called, steps = db.execute(_ROW, _at(key)).fetchone() or (None, None)
    return SessionRow(called, states.read_steps(steps))


def add(db: sqlite3.Connection, key: SessionKey, move: RowUpdate | None, called: Sequence[str], now: float) -> None:
    """Keep what a call that ended makes of its session's steps, and that its answer `called` these tools."""
    is_moved = move is not None and move.steps is not move.row.steps
    if called or is_moved:
        row = move.row if move is not None else read(db, key)
        tools = msgspec.json.encode(tool_use(row.called).with_calls(called)) if called else row.called
        _keep_row(db, key, tools, move.steps if move is not None and is_moved else None, now)


def change(db: sqlite3.Connection, key: SessionKey, make: Change, now: float) -> SessionState:
    """Apply a change to a session's state; the state after it."""
    value, steps, called = db.execute(_KEPT, _at(key)).fetchone()
    before = state_of(value, steps)
    state = make(before)
    is_moved = state.steps is not before.steps
    if is_moved:
        _keep_row(db, key, called, state.steps, now)
    is_same = replace(state, steps=before.steps) == before
    if not (is_same and is_moved):
        # Also where it is the same: with a new `changed_at` it is not deleted as old.
        rest = replace(state, steps={})
        db.execute(_KEEP_STATE, (*_at(key), now, states.written(rest)))
    return state


def _keep_row(db: sqlite3.Connection, key: SessionKey, called: bytes | None, steps: Places | None, now: float) -> None:
    """Write the row; where `steps` is None, those that it has stay."""
    written = states.written_steps(steps) if steps is not None else None
    db.execute(_KEEP_ROW, (*_at(key), called or _NONE_CALLED, written, now))


def clear_tools(db: sqlite3.Connection, key: SessionKey) -> None:
    """Let the tools be counted anew."""
    db.execute(_CLEAR_TOOLS, _at(key))


def delete(db: sqlite3.Connection, namespace: str, session_id: str, before: float) -> None:
    """Delete what is kept of a session if it was changed last before this time; else only forget its tools.

    A session below it may still be charged to its account: then its state, which says who is above it, stays as well.
    """
    key = (namespace, session_id)
    if db.execute(_CHANGED_AT, key).fetchone()[0] < before:
        db.execute(_DELETE_STATE, key)
        db.execute(_DELETE_TOOLS, key)
    else:
        db.execute(_CLEAR_TOOLS, key)


def _at(key: SessionKey) -> tuple[str, str]:
    return key.namespace, key.id
