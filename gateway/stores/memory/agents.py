"""Keep what the subagents of each session used, in memory."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.core.agent_use import AgentUse, counted_agent, subagent_of
from gateway.core.ledger.session_key import SessionKey
from gateway.core.record import CallRecord
from gateway.stores.sums import stopped


class MemoryAgents:
    """What each subagent used, by session and id."""

    def __init__(self) -> None:
        self._uses: dict[SessionKey, dict[str, AgentUse]] = {}

    def add(self, key: SessionKey, record: CallRecord, orphaned: CallRecord | None) -> None:
        """Add a call to what its subagent used. Does nothing for a call of the main agent.

        `orphaned`: an earlier record of the call, whose charge is subtracted; None if there is none.
        """
        agent = subagent_of(record)
        if agent is None:
            return
        uses = self._uses.setdefault(key, {})
        name = counted_agent(agent, uses)
        use = uses.get(name) or AgentUse(name)
        totals = use.totals
        if orphaned is not None and orphaned.charge is not None:
            totals = totals.without(orphaned.charge, orphaned.saved_tokens)
        if record.charge is not None:
            totals = stopped(totals.add(record.charge, record.saved_tokens))
        uses[name] = use.with_call(record, totals)

    def of(self, key: SessionKey) -> Sequence[AgentUse]:
        """Return what each subagent of a session used."""
        return [*self._uses.get(key, {}).values()]

    def drop(self, key: SessionKey) -> None:
        """Delete what the subagents of a session used."""
        self._uses.pop(key, None)
