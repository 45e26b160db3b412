"""Compute the active step of an agent from the tools that it used, and the tools that it may call.

- A step holds if its conditions are met, or if it is active and its sequence is not finished.
- The first step that holds, in the configured order, becomes active. If none holds, the default step does.
- Conditions are checked before a call and after each used tool.
- A step that becomes active starts its sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final, Literal, NamedTuple

from gateway.core.ledger.session_key import SessionKey
from gateway.core.steps.conditions import (
    MOST_RECENT,
    BudgetBelow,
    Condition,
    ConditionFacts,
    MessageMatches,
    Patterns,
    TokensAbove,
    matches_any,
)
from gateway.core.values import dataclass

Enforce = Literal["filter", "require", "reject", "observe"]

#: the agent of calls that name none
DEFAULT_AGENT: Final = "default"
#: characters of a tool name that are remembered
_NAME: Final = 256


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A named mode of work.

    Attributes:
        name: unique among the agent's steps.
        description: for people.
        conditions: all must be met.
        allowed: tools that may be called; None: all.
        denied: tools that may not be called, even if they are allowed.
        sequence: tools in the order in which they are due; each entry has alternatives.
        is_default: the step that is active if no other holds.
        enforce: how a request that offers other tools is handled, see docs/concepts/steps.md.
        context_budget: the most input tokens of a call.
        model: the model to call instead of the requested one.
        max_output_tokens: the most output tokens of a call.
        max_seconds: the longest time that the step may be active without a new user message.
    """

    name: str
    description: str = ""
    conditions: tuple[Condition, ...] = ()
    allowed: Patterns | None = None
    denied: Patterns = ()
    sequence: tuple[Patterns, ...] = ()
    is_default: bool = False
    enforce: Enforce = "filter"
    context_budget: int | None = None
    model: str | None = None
    max_output_tokens: int | None = None
    max_seconds: float | None = None

    def allows(self, tool: str) -> bool:
        """Return whether the step allows a tool, regardless of its sequence."""
        return (self.allowed is None or matches_any(tool, self.allowed)) and not matches_any(tool, self.denied)

    def due(self, index: int) -> Patterns | None:
        """Return the due entry of the sequence after `index` entries, or None if it is finished or there is none."""
        return self.sequence[index] if index < len(self.sequence) else None

    def allows_now(self, tool: str, due: Patterns | None) -> bool:
        """Return whether a tool may be called while the entry `due` is due."""
        return (due is None or matches_any(tool, due)) and self.allows(tool)

    def callable(self, tools: Iterable[str], due: Patterns | None) -> tuple[str, ...]:
        """Return those of the tools that may be called while the entry `due` is due."""
        return tuple([tool for tool in tools if self.allows_now(tool, due)])


@dataclass(frozen=True, slots=True)
class StepState:
    """The position of a session in the steps of one agent.

    Attributes:
        active: the name of the active step; None: no step is active.
        index: the index of the due entry of its sequence; the length of the sequence once it is finished.
        recent: the last used tools, newest last.
        is_set: the step was set by hand. It holds until its sequence is finished, or without one until it is set again.
    """

    active: str | None = None
    index: int = 0
    recent: tuple[str, ...] = ()
    is_set: bool = False


@dataclass(frozen=True, slots=True)
class StepChange:
    """An agent of a session changed to another step, or advanced in the sequence of its step.

    Attributes:
        index: the number of finished entries of the sequence; None if the step has none.
        tools: the tools that the response calls.
        at: Unix time in seconds.
    """

    session: SessionKey
    agent: str
    step_before: str | None
    step: str | None
    index: int | None
    tools: tuple[str, ...]
    at: float


class Used(NamedTuple):
    """The state after some tools were used. `stray`: those that were not due or not allowed."""

    state: StepState
    stray: tuple[str, ...] = ()


class Agent:
    """The steps of one agent, in order."""

    def __init__(self, name: str, steps: Sequence[Step]) -> None:
        self.name = name
        self.steps = tuple(steps)
        #: looked up with `StepState.active`, which can be None
        self._by_name: dict[str | None, Step] = {step.name: step for step in steps}
        self._default = next((step for step in steps if step.is_default), None)
        #: the agent can be without an active step, or in one that enforces nothing
        self._may_be_free = any(step.enforce == "observe" for step in steps) or not any(
            step.is_default or not step.conditions for step in steps
        )
        #: The default step is checked last, even while its sequence runs.
        self._others = tuple(step for step in steps if not step.is_default)
        conditions = [condition for step in steps for condition in step.conditions]
        self.reads_message = any(isinstance(condition, MessageMatches) for condition in conditions)
        self.reads_tokens = any(isinstance(condition, TokensAbove) for condition in conditions)
        self.reads_budget = any(isinstance(condition, BudgetBelow) for condition in conditions)
        #: a condition reads something besides tools
        self.reads_facts = self.reads_message or self.reads_tokens or self.reads_budget

    def ever_allows(self, tool: str) -> bool:
        """Return whether the agent may call a tool in one of its steps, or without an active step."""
        return self._may_be_free or any(step.allows(tool) for step in self.steps)

    def step(self, state: StepState) -> Step | None:
        """Return the active step, or None if there is none or the configuration no longer has it."""
        return self._by_name.get(state.active)

    def due(self, state: StepState) -> Patterns | None:
        """Return the due entry of the active step's sequence, or None if it is finished or there is none."""
        step = self.step(state)
        return step.due(state.index) if step is not None else None

    def finished_entries(self, state: StepState) -> int | None:
        """Return the number of finished entries of the active step's sequence, or None if it has no sequence."""
        step = self.step(state)
        return min(state.index, len(step.sequence)) if step is not None and step.sequence else None

    def with_active_step(self, state: StepState, facts: ConditionFacts) -> StepState:
        """Return the state after all conditions were checked and the right step became active."""
        current = self._by_name.get(state.active)
        is_running = current is not None and state.index < len(current.sequence)
        if state.is_set and current is not None and (is_running or not current.sequence):
            return state
        active = self._default
        for step in self._others:
            if (is_running and step is current) or _holds(step, state, facts):
                active = step
                break
        if active is not None and active is current:
            return replace(state, is_set=False) if state.is_set else state
        name = active.name if active is not None else None
        if name is None and state.active is None:
            return state
        return StepState(name, recent=state.recent)

    def after_tools(self, state: StepState, tools: Sequence[str], facts: ConditionFacts) -> Used:
        """Return the state after these tools were used in order. Each can finish an entry and change the step.

        If the step is enforced, conditions ignore stray tools. A model that calls a tool which it was not offered must
        not reach another step this way.
        """
        stray = []
        for tool in tools:
            name, index, recent = tool[:_NAME], state.index, state.recent
            step = self._by_name.get(state.active)
            due = step.due(index) if step is not None else None
            is_stray = step is not None and not step.allows_now(name, due)
            if is_stray:
                stray.append(name)
            elif due is not None:
                index += 1
            if not is_stray or step is None or step.enforce == "observe":
                recent = (*recent[1 - MOST_RECENT :], name)
            state = self.with_active_step(StepState(state.active, index, recent, state.is_set), facts)
        return Used(state, tuple(stray))

    def set(self, state: StepState, name: str | None, index: int = 0) -> StepState:
        """Return the state after a step was set by hand.

        Args:
            state: the current state.
            name: the step; None lets the conditions decide again.
            index: the number of finished entries of its sequence.

        Raises:
            KeyError: there is no such step.
        """
        if name is None:
            return StepState(recent=state.recent)
        return StepState(self._by_name[name].name, index, state.recent, is_set=True)


def _holds(step: Step, state: StepState, facts: ConditionFacts) -> bool:
    # No generator expression, because this runs often: for each step before each call and after each tool.
    for condition in step.conditions:  # noqa: SIM110
        if not condition.holds(state.recent, facts):
            return False
    return True
