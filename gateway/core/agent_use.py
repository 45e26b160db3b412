"""Count what each subagent of a session uses, and compute the share of the main agent.

A store counts subagents only, in the same step as their session. The main agent has the rest: what the session used and
no subagent did. So the shares of all agents always add up to the session, and a call without subagents costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import Final

from gateway.core.calling_agent import MAIN
from gateway.core.record import CallRecord
from gateway.core.tools import OTHERS, ToolUse, counted_as
from gateway.core.usage import Totals
from gateway.core.values import dataclass

#: Subagents of a session that are counted by id. All others are counted together as `OTHERS`.
MAX_SUBAGENTS: Final = 128
#: tools of a subagent that are counted by name
MAX_AGENT_TOOLS: Final = 64


@dataclass(frozen=True, slots=True)
class AgentUse:
    """What one agent of a session used. Times are Unix times in seconds.

    Attributes:
        id: `MAIN` for the main agent, `OTHERS` for all subagents beyond `MAX_SUBAGENTS`.
        parent: the id of the agent that started it; None if the client does not say.
        type: as its last call named it; None if none did.
        step: the step in which its last call was made; None without steps.
        created_at: when its first call began.
        last_call_at: when its last call ended.
        totals: of its own calls, without those of agents that it started.
        tools: number of tool calls by name.
    """

    id: str
    parent: str | None = None
    type: str | None = None
    step: str | None = None
    created_at: float = 0.0
    last_call_at: float = 0.0
    totals: Totals = Totals()  # a shared empty value is safe: it is never changed
    tools: Mapping[str, int] = field(default_factory=dict)

    def with_call(self, record: CallRecord, totals: Totals) -> AgentUse:
        """Return this after one more call. `totals`: those after it."""
        # Subagents that are counted together have neither a common parent nor a common type.
        agent = record.agent if record.agent is not None and record.agent.id == self.id else None
        ended = record.started_at + record.duration_s
        return replace(
            self,
            parent=self.parent or (agent.parent if agent is not None else None),
            type=(agent.type if agent is not None else None) or self.type,
            step=record.step,
            created_at=self.created_at or record.started_at,
            last_call_at=max(self.last_call_at, ended),
            totals=totals,
            tools=with_tools(self.tools, record.counted_tools),
        )


def with_tools(calls: Mapping[str, int], names: Sequence[str]) -> Mapping[str, int]:
    """Return the counts of a subagent's tools with some more tool calls."""
    counts = dict(calls)
    for name in names:
        known = counted_as(name, counts, MAX_AGENT_TOOLS)
        counts[known] = counts.get(known, 0) + 1
    return counts


def subagent_of(record: CallRecord) -> str | None:
    """Return the id of the subagent that made a call; None for the main agent and for a call without a session."""
    agent = record.agent
    return agent.id if agent is not None and agent.id != MAIN and record.session is not None else None


def counted_agent(id_: str, known: Mapping[str, object]) -> str:
    """Return the id under which a subagent is counted, if these are counted already."""
    return counted_as(id_, known, MAX_SUBAGENTS)


def agents_of_session(
    totals: Totals, tools: ToolUse, subagents: Sequence[AgentUse], newest: Iterable[CallRecord]
) -> list[AgentUse]:
    """Return the main agent of a session and its subagents.

    Args:
        totals: of the session.
        tools: of the session.
        subagents: as the store counts them.
        newest: the newest calls of the session, newest first, of which the main agent has its step.
    """
    counts, rest = dict(tools.calls), totals
    for one in subagents:
        rest = rest.less(one.totals)
        for name, number in one.tools.items():
            known = name if name in tools.calls else OTHERS
            counts[known] = counts.get(known, 0) - number
    own = next((record for record in newest if subagent_of(record) is None), None)
    main = AgentUse(
        MAIN,
        step=own.step if own is not None else None,
        last_call_at=own.started_at + own.duration_s if own is not None else 0.0,
        totals=rest,
        tools={name: number for name, number in counts.items() if number > 0},
    )
    return [main, *sorted(subagents, key=lambda one: (one.created_at, one.id))]


def parents_of(id_: str, parent: str | None, known: Mapping[str, AgentUse], most: int) -> list[str]:
    """Return the subagents above a subagent, the nearest first, at most `most`. The main agent is not among them.

    `known`: the counted subagents of the session, by id. An agent that is not known has no known parent.
    """
    found: list[str] = []
    while parent is not None and parent not in (MAIN, id_, *found) and len(found) < most:
        found.append(parent)
        parent = known[parent].parent if parent in known else None
    return found


def totals_with_children(agents: Sequence[AgentUse]) -> Mapping[str, Totals]:
    """Return the totals of each agent that started others, with those of all agents below it.

    `agents`: of `agents_of_session`, the main agent first. It has started all others, directly or not.
    """
    known = {one.id: one for one in agents}
    sums = {one.id: one.totals for one in agents}
    has_children = set[str]()
    for one in agents[1:]:
        above = parents_of(one.id, one.parent, known, len(known))
        for parent in (MAIN, *(name for name in above if name in known)):
            sums[parent] = sums[parent].plus(one.totals)
            has_children.add(parent)
    return {name: sums[name] for name in has_children}
