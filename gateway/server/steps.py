"""Where a session is in the steps of its agents, as the API shows it, and setting it by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.core import errors
from gateway.core.ports import SessionKey, Store
from gateway.core.session import SessionState
from gateway.core.steps import Agent, StepState

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


async def set_step(
    store: Store, key: SessionKey, agents: Mapping[str, Agent], agent_name: object, step: object
) -> SessionState:
    """Put a session into a step, at the beginning of its sequence; None: into the one that the conditions say.

    Raises:
        InvalidRequest: there is no such agent, or no such step.
    """
    agent = agents.get(agent_name) if isinstance(agent_name, str) else None
    if agent is None:
        known = ", ".join(sorted(agents)) or "none"
        raise errors.InvalidRequest(f'"agent" names an agent with steps; configured: {known}.', param="agent")
    if step is not None and not (isinstance(step, str) and any(one.name == step for one in agent.steps)):
        known = ", ".join(one.name for one in agent.steps)
        raise errors.InvalidRequest(
            f'"active_step" is null, or a step of the agent "{agent.name}": {known}.', param="active_step"
        )
    name = step if isinstance(step, str) else None

    def change(state: SessionState) -> SessionState:
        return state.with_step(agent.name, agent.set(state.steps.get(agent.name, _AT_START), name))

    return await store.update(key, change)
