"""Read and write the rows of subagents: what each of them used."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from gateway.core.agent_use import AgentUse, counted_agent, subagent_of, with_tools
from gateway.core.ledger.session_key import SessionKey
from gateway.core.record import CallRecord
from gateway.stores.sums import MAX_SUM, SUMS, sums_of, totals_of

_SUM_LIST: Final = ", ".join(SUMS)
_TOOLS: Final = "SELECT tools FROM agents WHERE namespace = ? AND id = ? AND agent = ?"
_NAMES: Final = "SELECT agent FROM agents WHERE namespace = ? AND id = ?"
_ADD: Final = (
    "INSERT INTO agents (namespace, id, agent, parent, type, step, created_at, last_call_at, tools, "  # noqa: S608  # constants
    f"{_SUM_LIST}) VALUES ({', '.join('?' * (9 + len(SUMS)))}) ON CONFLICT DO UPDATE SET "
    "parent = coalesce(parent, excluded.parent), type = coalesce(excluded.type, type), step = excluded.step, "
    "last_call_at = max(last_call_at, excluded.last_call_at), tools = excluded.tools, "
    + ", ".join(f"{name} = min({name} + excluded.{name}, {MAX_SUM})" for name in SUMS)
)
#: subtracts a wrong charge; the row is missing if the session was reset or deleted since
_TAKE_BACK: Final = (
    f"UPDATE agents SET {', '.join(f'{name} = max(0, {name} - ?)' for name in SUMS)} "  # noqa: S608  # constants
    "WHERE namespace = ? AND id = ? AND agent = ?"
)
_READ: Final = (
    f"SELECT agent, parent, type, step, created_at, last_call_at, tools, {_SUM_LIST} "  # noqa: S608  # constants
    "FROM agents WHERE namespace = ? AND id = ?"
)
_DELETE: Final = "DELETE FROM agents WHERE namespace = ? AND id = ?"
_COUNTS: Final = msgspec.json.Decoder(dict[str, int])


def add(db: sqlite3.Connection, key: SessionKey, record: CallRecord) -> None:
    """Add a call to what its subagent used. Does nothing for a call of the main agent."""
    agent = subagent_of(record)
    if agent is None or record.agent is None:
        return
    name, tools = _counted(db, key, agent)
    is_named = name == agent
    row = (
        record.agent.parent if is_named else None,
        record.agent.type if is_named else None,
        record.step,
        record.started_at,
        record.started_at + record.duration_s,
        msgspec.json.encode(with_tools(_counts(tools), record.counted_tools)),
        *sums_of(record.charge, record.saved_tokens),
    )
    db.execute(_ADD, (key.namespace, key.id, name, *row))


def take_back(db: sqlite3.Connection, key: SessionKey, record: CallRecord) -> None:
    """Subtract the charge of an orphaned call from what its subagent used."""
    agent = subagent_of(record)
    if agent is not None:
        name, _ = _counted(db, key, agent)
        db.execute(_TAKE_BACK, (*sums_of(record.charge, record.saved_tokens), key.namespace, key.id, name))


def _counted(db: sqlite3.Connection, key: SessionKey, agent: str) -> tuple[str, bytes | None]:
    """Return the id under which a subagent is counted, and its tools as stored; None if it has no row yet."""
    row = db.execute(_TOOLS, (key.namespace, key.id, agent)).fetchone()
    if row is not None:
        return agent, row[0]
    known = dict.fromkeys(name for (name,) in db.execute(_NAMES, (key.namespace, key.id)))
    name = counted_agent(agent, known)
    if name == agent:
        return name, None
    row = db.execute(_TOOLS, (key.namespace, key.id, name)).fetchone()
    return name, row[0] if row is not None else None


def read(db: sqlite3.Connection, key: SessionKey) -> Sequence[AgentUse]:
    """See `Store.agents`."""
    return [_use(*row) for row in db.execute(_READ, (key.namespace, key.id))]


def _use(*row: Any) -> AgentUse:
    agent, parent, kind, step, created_at, last_call_at, tools, *sums = row
    return AgentUse(agent, parent, kind, step, created_at, last_call_at, totals_of(sums), _counts(tools))


def _counts(tools: object) -> dict[str, int]:
    """Return the decoded tools of a subagent; none if they cannot be read."""
    try:
        return _COUNTS.decode(tools) if isinstance(tools, bytes) else {}
    except msgspec.MsgspecError:
        return {}


def delete(db: sqlite3.Connection, namespace: str, session_id: str) -> None:
    """Delete the rows of all subagents of a session."""
    db.execute(_DELETE, (namespace, session_id))
