"""Show and set the steps of a session in the API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.call.observers import notify_step
from gateway.core import errors
from gateway.core.ledger.session_key import SessionKey
from gateway.core.ports import Observer, Sessions
from gateway.core.routing import Route
from gateway.core.session import SessionState
from gateway.core.steps import DEFAULT_AGENT, Agent, ConditionFacts, Step, StepState
from gateway.core.values import dataclass

_INITIAL = StepState()


def steps_json(state: SessionState, agents: Mapping[str, Agent]) -> dict[str, Any]:
    """Return the step state of all agents, and the active step of the agent whose state changed last."""
    last = next(reversed(list(state.steps)), None)
    active = state.steps[last].active if last is not None else None
    return {
        "active_step": active,
        "steps": {name: _step_state_json(step, agents.get(name)) for name, step in state.steps.items()},
    }


def _step_state_json(state: StepState, agent: Agent | None) -> dict[str, Any]:
    """Return the step state of one agent as JSON. `due`: the tools of which one is due; null if none is."""
    step = agent.step(state) if agent is not None else None
    due = agent.due(state) if agent is not None else None
    return {
        "active_step": state.active,
        "description": step.description if step is not None else None,
        "sequence_index": agent.finished_entries(state) if agent is not None else None,
        "sequence": [list(entry) for entry in step.sequence] if step is not None else [],
        "due": list(due) if due is not None else None,
        "is_set": state.is_set,
        "recent_tools": list(state.recent),
    }


def step_of(state: SessionState, agents: Mapping[str, Agent], route: Route, agent_name: str | None) -> Step | None:
    """Return the step in which a session's next call starts, or None without steps.

    If the conditions of the agent depend on more than tools, only the call itself can evaluate them. Then return the
    present step. `agent_name`: the agent that the request names; used if the route names none.
    """
    agent = agents.get(route.agent or agent_name or DEFAULT_AGENT)
    if agent is None:
        return None
    present = state.steps.get(agent.name, _INITIAL)
    return agent.step(present if agent.reads_facts else agent.with_active_step(present, ConditionFacts()))


@dataclass(frozen=True, slots=True)
class StepSetting:
    """A step that is set manually for an agent of a session. `step`: None for the step that the conditions select."""

    agent: Agent
    step: str | None
    index: int


def setting_of(asked: Mapping[str, Any], agents: Mapping[str, Agent]) -> StepSetting:
    """Return the step that a change of a session sets.

    Raises:
        InvalidRequest: the agent, the step or the index in its sequence does not exist.
    """
    name = asked.get("agent", DEFAULT_AGENT)
    agent = agents.get(name) if isinstance(name, str) else None
    if agent is None:
        known = f'"agent" must be an agent with steps: {", ".join(sorted(agents))}.'
        raise errors.InvalidRequest(known if agents else "No steps are configured, so none can be set.", param="agent")
    wanted = asked["active_step"]
    step = next((step for step in agent.steps if step.name == wanted), None)
    if step is None and wanted is not None:
        known = ", ".join(step.name for step in agent.steps)
        raise errors.InvalidRequest(
            f'"active_step" must be null or a step of the agent "{agent.name}": {known}.', param="active_step"
        )
    index = asked.get("sequence_index", 0)
    if "sequence_index" in asked and (step is None or type(index) is not int or not 0 <= index < len(step.sequence)):
        entries = len(step.sequence) if step is not None else 0
        allowed = f"The sequence has {entries}, so send 0 to {entries - 1}" if entries else "The step has no sequence"
        raise errors.InvalidRequest(
            f'"sequence_index" is the number of completed entries of the step\'s sequence. {allowed}.',
            param="sequence_index",
        )
    return StepSetting(agent, step.name if step is not None else None, index)


async def set_step(
    store: Sessions, key: SessionKey, setting: StepSetting, observers: Sequence[Observer], at: float
) -> SessionState:
    """Set the step of a session and notify the observers. `at`: Unix time in seconds. Return the new state."""
    agent, before = setting.agent, _INITIAL

    def change(state: SessionState) -> SessionState:
        nonlocal before
        before = state.steps.get(agent.name, _INITIAL)
        return state.with_step(agent.name, agent.set(before, setting.step, setting.index))

    changed = await store.update(key, change)
    notify_step([observer.stepped for observer in observers], key, agent, (before, changed.steps[agent.name]), at=at)
    return changed
