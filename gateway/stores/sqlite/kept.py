"""What is kept of a session beside its totals: its state, and the tools that its answers called.

Where its agents are in their steps changes as tools are called, and then the row of the tools is written anyway: that
has the steps, too. The rest of a state is long where the session is trimmed, and changes rarely.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from gateway.core.ports import SessionKey
from gateway.core.session import Change, SessionState
from gateway.core.tools import ToolUse
from gateway.stores import states

#: columns that `state_of` reads
STATE: Final = "states.value, steps"
#: to be joined to what has a namespace and an id: each of the rows may be missing, and may come before its session
JOINED: Final = "LEFT JOIN states USING (namespace, id) LEFT JOIN tools USING (namespace, id)"
_KEPT: Final = f"SELECT {STATE}, tools.value FROM (SELECT ? AS namespace, ? AS id) {JOINED}"  # noqa: S608  # constants
_KEEP_STATE: Final = (
    "INSERT INTO states (namespace, id, changed_at, value) VALUES (?, ?, ?, ?) "
    "ON CONFLICT DO UPDATE SET changed_at = excluded.changed_at, value = excluded.value"
)
_TOOLS: Final = "SELECT value FROM tools WHERE namespace = ? AND id = ?"
_KEEP_TOOLS: Final = (
    "INSERT INTO tools (namespace, id, value, steps, changed_at) VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
    "value = excluded.value, steps = coalesce(excluded.steps, steps), changed_at = excluded.changed_at"
)
#: nothing called, as `_USES` reads it
_CLEAR_TOOLS: Final = "UPDATE tools SET value = x'7b7d' WHERE namespace = ? AND id = ?"
_CHANGED_AT: Final = (
    "SELECT max(coalesce((SELECT changed_at FROM states WHERE namespace = ?1 AND id = ?2), 0), "
    "coalesce((SELECT changed_at FROM tools WHERE namespace = ?1 AND id = ?2), 0))"
)
_DELETE_STATE: Final = "DELETE FROM states WHERE namespace = ? AND id = ?"
_DELETE_TOOLS: Final = "DELETE FROM tools WHERE namespace = ? AND id = ?"
_USES: Final = msgspec.json.Decoder(ToolUse)


class Kept(NamedTuple):
    """What there is: the state, and the tools as their column has them."""

    state: SessionState
    tools: bytes | None


class Move(NamedTuple):
    """What a call makes of that."""

    kept: Kept
    state: SessionState


def state_of(value: object, steps: object) -> SessionState:
    """A session's state as `STATE` reads it; an empty one where it has none."""
    state = states.read(value)
    if steps is None:
        return state
    return SessionState(state.epochs, state.summaries, state.parent, states.read_steps(steps))


def tool_use(value: bytes | None) -> ToolUse:
    """The tools of a session as their column has them."""
    return _USES.decode(value) if value is not None else ToolUse()


def read(db: sqlite3.Connection, key: SessionKey) -> Kept:
    """What is kept of a session."""
    value, steps, tools = db.execute(_KEPT, _at(key)).fetchone()
    return Kept(state_of(value, steps), tools)


def change(db: sqlite3.Connection, key: SessionKey, make: Change, now: float) -> SessionState:
    """Apply a change to a session's state; the state after it."""
    kept = read(db, key)
    state = make(kept.state)
    _keep(db, key, Move(kept, state), (), now)
    return state


def add(db: sqlite3.Connection, key: SessionKey, move: Move | None, called: Sequence[str], now: float) -> None:
    """Keep what a call that ended makes of its session, and that its answer `called` these tools."""
    if move is None:
        if called:
            _add_tools(db, key, called, now)
    elif called or move.state is not move.kept.state:
        _keep(db, key, move, called, now)


def _keep(db: sqlite3.Connection, key: SessionKey, move: Move, called: Sequence[str], now: float) -> None:
    kept, state = move
    before = kept.state
    is_moved = state.steps is not before.steps
    if is_moved or called:
        tools = kept.tools or b"{}"
        if called:
            tools = msgspec.json.encode(tool_use(kept.tools).with_calls(called))
        db.execute(_KEEP_TOOLS, (*_at(key), tools, states.written_steps(state.steps) if is_moved else None, now))
    is_same = state.epochs is before.epochs and state.summaries is before.summaries and state.parent == before.parent
    if is_same and (is_moved or called):
        return
    # What stays as it is was looked at now, all the same: it must not go as old.
    db.execute(_KEEP_STATE, (*_at(key), now, states.written(SessionState(state.epochs, state.summaries, state.parent))))


def _add_tools(db: sqlite3.Connection, key: SessionKey, called: Sequence[str], now: float) -> None:
    row = db.execute(_TOOLS, _at(key)).fetchone()
    tools = tool_use(row[0] if row else None).with_calls(called)
    db.execute(_KEEP_TOOLS, (*_at(key), msgspec.json.encode(tools), None, now))


def clear_tools(db: sqlite3.Connection, key: SessionKey) -> None:
    """Let the tools be counted anew."""
    db.execute(_CLEAR_TOOLS, _at(key))


def delete(db: sqlite3.Connection, namespace: str, session_id: str, before: float) -> None:
    """Delete what is kept of a session if it was changed last before this time; else only what was called is gone."""
    key = (namespace, session_id)
    if db.execute(_CHANGED_AT, key).fetchone()[0] < before:
        db.execute(_DELETE_STATE, key)
        db.execute(_DELETE_TOOLS, key)
    else:
        db.execute(_CLEAR_TOOLS, key)


def _at(key: SessionKey) -> tuple[str, str]:
    return key.namespace, key.id
