"""Show and set the steps of a session in the API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.call.observers import tell_step
from gateway.core import errors
from gateway.core.ledger.session_key import SessionKey
from gateway.core.ports import Observer, Sessions
from gateway.core.routing import Route
from gateway.core.session import SessionState
from gateway.core.steps import DEFAULT_AGENT, Agent, ConditionFacts, Step, StepState
from gateway.core.values import dataclass

_AT_START = StepState()


def steps_json(state: SessionState, agents: Mapping[str, Agent]) -> dict[str, Any]:
    """The active step of the agent whose place changed last, and all agents' places."""
    last = next(reversed(list(state.steps)), None)
    active = state.steps[last].active if last is not None else None
    return {
        "active_step": active,
        "steps": {name: _place(place, agents.get(name)) for name, place in state.steps.items()},
    }


def _place(place: StepState, agent: Agent | None) -> dict[str, Any]:
    """`due`: the tools of which one is due; null where nothing is."""
    step = agent.step(place) if agent is not None else None
    due = agent.due(place) if agent is not None else None
    return {
        "active_step": place.active,
        "description": step.description if step is not None else None,
        "sequence_index": agent.place(place) if agent is not None else None,
        "sequence": [list(entry) for entry in step.sequence] if step is not None else [],
        "due": list(due) if due is not None else None,
        "is_set": place.is_set,
        "recent_tools": list(place.recent),
    }


def step_of(state: SessionState, agents: Mapping[str, Agent], route: Route, asked: str | None) -> Step | None:
    """The step that a session's next call begins in. `asked`: the agent that a request names, where its route has none.

    Where conditions look at more than tools, the one that it is in: only the call itself can tell.
    """
    agent = agents.get(route.agent or asked or DEFAULT_AGENT)
    if agent is None:
        return None
    at = state.steps.get(agent.name, _AT_START)
    return agent.step(at if agent.reads_facts else agent.entered(at, ConditionFacts()))


@dataclass(frozen=True, slots=True)
class Setting:
    """Into which step an agent of a session is put by hand. `step`: None for the one that the conditions say."""

    agent: Agent
    step: str | None
    index: int


def setting_of(asked: Mapping[str, Any], agents: Mapping[str, Agent]) -> Setting:
    """What a change of a session says of its step.

    Raises:
        InvalidRequest: there is no such agent, no such step, or no such place in its sequence.
    """
    name = asked.get("agent", DEFAULT_AGENT)
    agent = agents.get(name) if isinstance(name, str) else None
    if agent is None:
        known = f'"agent" names an agent with steps: {", ".join(sorted(agents))}.'
        raise errors.InvalidRequest(known if agents else "No steps are configured, so none can be set.", param="agent")
    wanted = asked["active_step"]
    step = next((one for one in agent.steps if one.name == wanted), None)
    if step is None and wanted is not None:
        known = ", ".join(one.name for one in agent.steps)
        raise errors.InvalidRequest(
            f'"active_step" is null, or a step of the agent "{agent.name}": {known}.', param="active_step"
        )
    index = asked.get("sequence_index", 0)
    if "sequence_index" in asked and (step is None or type(index) is not int or not 0 <= index < len(step.sequence)):
        entries = len(step.sequence) if step is not None else 0
        most = f"0 to {entries - 1}, as it has {entries}" if entries else "here is none"
        raise errors.InvalidRequest(
            f'"sequence_index" is the number of entries of the step\'s sequence that are done: {most}.',
            param="sequence_index",
        )
    return Setting(agent, step.name if step is not None else None, index)


async def set_step(
    store: Sessions, key: SessionKey, setting: Setting, observers: Sequence[Observer], at: float
) -> SessionState:
    """Put a session into a step, and tell of it. `at`: seconds since the epoch."""
    agent, before = setting.agent, _AT_START

    def change(state: SessionState) -> SessionState:
        nonlocal before
        before = state.steps.get(agent.name, _AT_START)
        return state.with_step(agent.name, agent.set(before, setting.step, setting.index))

    kept = await store.update(key, change)
    tell_step([one.stepped for one in observers], key, agent, (before, kept.steps[agent.name]), at=at)
    return kept
