"""Compute the active step of an agent from the tools it used, and the tools it may call.

A step holds when its conditions do, or while it is the active one and its sequence is not finished. The first that
holds, in the order they are written, is the active one; the default step where none does. Conditions are looked at
before a call and after each tool that was used. Entering a step begins its sequence.
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
    is_any,
)
from gateway.core.values import dataclass

Enforce = Literal["filter", "require", "reject", "observe"]

#: the agent of calls that name none
DEFAULT_AGENT: Final = "default"
#: characters of a tool's name that are remembered
_NAME: Final = 256


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A named mode of work.

    Attributes:
        name: unique among the agent's steps.
        description: for people.
        conditions: all must hold.
        allowed: tools it may call; None: all.
        denied: tools it may not call, even if they are allowed.
        sequence: tools in the order they are due; each entry has alternatives.
        is_default: the step to be in where no other holds.
        enforce: what becomes of a request that offers other tools, see docs/concepts/steps.md.
        context_budget: input tokens of a call, at the most.
        model: to call instead of the one that the call names.
        max_output_tokens: of an answer, at the most.
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

    def allows(self, tool: str) -> bool:
        """Whether the step may call a tool at all, whatever is due."""
        return (self.allowed is None or is_any(tool, self.allowed)) and not is_any(tool, self.denied)

    def due(self, index: int) -> Patterns | None:
        """The entry of its sequence that is due after so many; None: it has none, or it is finished."""
        return self.sequence[index] if index < len(self.sequence) else None

    def lets(self, tool: str, due: Patterns | None) -> bool:
        """Whether it lets a tool be called while this is due."""
        return (due is None or is_any(tool, due)) and self.allows(tool)

    def callable(self, tools: Iterable[str], due: Patterns | None) -> tuple[str, ...]:
        """Those of the tools that it lets be called."""
        return tuple([tool for tool in tools if self.lets(tool, due)])


@dataclass(frozen=True, slots=True)
class StepState:
    """Where a session is in the steps of one agent.

    Attributes:
        active: the step's name; None: in none.
        index: of the entry of its sequence that is due; the sequence's length once it is finished.
        recent: the tools used last, the newest at the end.
        is_set: the step was set by hand, and holds until its sequence is finished; without one until it is set anew.
    """

    active: str | None = None
    index: int = 0
    recent: tuple[str, ...] = ()
    is_set: bool = False


@dataclass(frozen=True, slots=True)
class StepChange:
    """A session's agent went to another step, or on in the sequence of the one it is in.

    `index`: the place in that sequence, None where the step has none. `tools`: that the answer asked for. `at`: seconds
    since the epoch.
    """

    session: SessionKey
    agent: str
    step_before: str | None
    step: str | None
    index: int | None
    tools: tuple[str, ...]
    at: float


class Used(NamedTuple):
    """What tools that were used make of a state. `stray`: those that were not due, or not allowed, when used."""

    state: StepState
    stray: tuple[str, ...] = ()


class Agent:
    """The steps of one agent, in order."""

    def __init__(self, name: str, steps: Sequence[Step]) -> None:
        self.name = name
        self.steps = tuple(steps)
        #: None is the name that a state has which is in no step
        self._by_name: dict[str | None, Step] = {step.name: step for step in steps}
        self._default = next((step for step in steps if step.is_default), None)
        #: whether the agent may be in no step, or in one that enforces nothing
        self._may_be_free = any(step.enforce == "observe" for step in steps) or not any(
            step.is_default or not step.conditions for step in steps
        )
        #: The default step is looked at last, also while its sequence runs.
        self._others = tuple(step for step in steps if not step.is_default)
        conditions = [condition for step in steps for condition in step.conditions]
        self.reads_message = any(isinstance(condition, MessageMatches) for condition in conditions)
        self.reads_tokens = any(isinstance(condition, TokensAbove) for condition in conditions)
        self.reads_budget = any(isinstance(condition, BudgetBelow) for condition in conditions)
        #: whether any condition looks at something beside tools
        self.reads_facts = self.reads_message or self.reads_tokens or self.reads_budget

    def ever_allows(self, tool: str) -> bool:
        """Return whether the agent may call a tool in any of its steps, or while it is in none."""
        return self._may_be_free or any(step.allows(tool) for step in self.steps)

    def step(self, state: StepState) -> Step | None:
        """The active one; None also where a changed configuration has it no more."""
        return self._by_name.get(state.active)

    def due(self, state: StepState) -> Patterns | None:
        """The entry of the active step's sequence that is due; None: there is none, or it is finished."""
        step = self.step(state)
        return step.due(state.index) if step is not None else None

    def place(self, state: StepState) -> int | None:
        """The number of entries of the active step's sequence that are done; None where it has no sequence."""
        step = self.step(state)
        return min(state.index, len(step.sequence)) if step is not None and step.sequence else None

    def entered(self, state: StepState, facts: ConditionFacts) -> StepState:
        """The state with the step active whose turn it is."""
        current = self._by_name.get(state.active)
        is_running = current is not None and state.index < len(current.sequence)
        if state.is_set and current is not None and (is_running or not current.sequence):
            return state
        found = self._default
        for step in self._others:
            if (is_running and step is current) or _holds(step, state, facts):
                found = step
                break
        if found is not None and found is current:
            return replace(state, is_set=False) if state.is_set else state
        name = found.name if found is not None else None
        if name is None and state.active is None:
            return state
        return StepState(name, recent=state.recent)

    def used(self, state: StepState, tools: Sequence[str], facts: ConditionFacts) -> Used:
        """The state after these tools were used, one after the other; each may finish an entry, and change the step.

        A stray one is seen by no condition where the step is enforced: a model that calls what it was not offered must
        not get into another step by it.
        """
        stray = []
        for tool in tools:
            name, index, recent = tool[:_NAME], state.index, state.recent
            step = self._by_name.get(state.active)
            due = step.due(index) if step is not None else None
            is_stray = step is not None and not step.lets(name, due)
            if is_stray:
                stray.append(name)
            elif due is not None:
                index += 1
            if not is_stray or step is None or step.enforce == "observe":
                recent = (*recent[1 - MOST_RECENT :], name)
            state = self.entered(StepState(state.active, index, recent, state.is_set), facts)
        return Used(state, tuple(stray))

    def set(self, state: StepState, name: str | None, index: int = 0) -> StepState:
        """The state with a step set by hand, so many entries of its sequence done; None: as the conditions say.

        Raises:
            KeyError: there is no such step.
        """
        if name is None:
            return StepState(recent=state.recent)
        return StepState(self._by_name[name].name, index, state.recent, is_set=True)


def _holds(step: Step, state: StepState, facts: ConditionFacts) -> bool:
    # No generator: this runs for each step at each call, and after each tool.
    for condition in step.conditions:  # noqa: SIM110
        if not condition.holds(state.recent, facts):
            return False
    return True
