"""Test the rules of steps, by example and against an independent reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gateway.core.steps import (
    MOST_RECENT,
    Agent,
    BudgetBelow,
    ConditionFacts,
    Enforce,
    MessageMatches,
    NotRecentlyUsed,
    SequenceMatch,
    Step,
    StepState,
    TokensAbove,
    ToolUsed,
)

START = StepState()
NO_FACTS = ConditionFacts()

WORK = Step("work", is_default=True, denied=("publish",))
REVIEW = Step(
    "review",
    conditions=(ToolUsed(("write",), 1),),
    allowed=("read_*", "comment", "publish"),
    sequence=(("read_a", "read_b"), ("comment",)),
)
ALERT = Step("alert", conditions=(BudgetBelow(0.1),), allowed=("stop",))
AGENT = Agent("writer", [ALERT, REVIEW, WORK])


def after(agent: Agent, *tools: str, state: StepState = START, facts: ConditionFacts = NO_FACTS) -> StepState:
    return agent.after_tools(agent.with_active_step(state, facts), tools, facts).state


def callable_now(agent: Agent, state: StepState, tools: Sequence[str]) -> tuple[str, ...]:
    step = agent.step(state)
    assert step is not None
    return step.callable(tools, agent.due(state))


# --- tools of all steps -----------------------------------------------------------------------------------------


def test_an_agent_may_ever_call_what_any_of_its_steps_allows() -> None:
    closed = Agent("a", [ALERT, replace(WORK, allowed=("read_*", "publish"))])
    assert [closed.ever_allows(tool) for tool in ("stop", "read_a", "publish", "write")] == [True, True, False, False]


@pytest.mark.parametrize(
    "steps",
    [
        [ALERT],
        [ALERT, replace(WORK, allowed=("read_*",)), Step("watch", conditions=ALERT.conditions, enforce="observe")],
    ],
    ids=["it may be in no step", "a step only observes"],
)
def test_agent_without_mandatory_step_may_call_anything(steps: list[Step]) -> None:
    assert Agent("a", steps).ever_allows("whatever")


def test_step_without_conditions_always_holds() -> None:
    assert not Agent("a", [Step("only", allowed=("read_*",))]).ever_allows("write")


# --- active step -----------------------------------------------------------------------------------------------------


def test_the_default_step_is_active_where_no_other_holds() -> None:
    assert AGENT.with_active_step(START, NO_FACTS) == StepState("work")


def test_without_a_default_no_step_is_active_and_every_tool_may_be_called() -> None:
    agent = Agent("a", [REVIEW])
    state = agent.with_active_step(START, NO_FACTS)
    assert state is START
    assert agent.after_tools(state, ["anything"], NO_FACTS).stray == ()
    assert agent.step(state) is None


def test_the_first_that_holds_is_active() -> None:
    agent = Agent("a", [Step("first", conditions=(ToolUsed(("x",)),)), Step("second", conditions=(ToolUsed(("x",)),))])
    assert after(agent, "x").active == "first"


def test_all_conditions_of_a_step_must_hold() -> None:
    agent = Agent("a", [Step("both", conditions=(ToolUsed(("x",)), ToolUsed(("y",))))])
    assert after(agent, "x").active is None
    assert after(agent, "x", "y").active == "both"


def test_running_sequence_keeps_its_step() -> None:
    state = after(AGENT, "write", "read_a")
    assert (state.active, state.index) == ("review", 1)
    assert AGENT.with_active_step(state, NO_FACTS) is state


def test_earlier_step_interrupts_a_running_sequence() -> None:
    state = after(AGENT, "write", "read_a")
    poor = AGENT.with_active_step(state, ConditionFacts(left=0.05))
    assert (poor.active, poor.index, poor.recent) == ("alert", 0, ("write", "read_a"))
    # The step that was left restarts if its conditions still hold; here the last tool is no longer `write`.
    assert AGENT.with_active_step(poor, NO_FACTS).active == "work"


def test_a_finished_sequence_ends_the_step_as_soon_as_its_conditions_do_not_hold() -> None:
    state = after(AGENT, "write", "read_b", "comment")
    assert (state.active, state.index, state.recent) == ("work", 0, ("write", "read_b", "comment"))


def test_finished_sequence_is_not_restarted_while_step_holds() -> None:
    agent = Agent("a", [Step("s", allowed=("a", "b", "c"), sequence=(("a",), ("b",)))])
    state = after(agent, "a", "b")
    assert (state.index, agent.due(state), agent.finished_entries(state)) == (2, None, 2)
    assert callable_now(agent, state, ["c", "b", "z"]) == ("c", "b")
    assert after(agent, "c", "a", state=state).index == 2


def test_default_step_is_checked_last_even_in_its_sequence() -> None:
    agent = Agent(
        "a", [Step("d", is_default=True, sequence=(("x",), ("y",))), Step("s", conditions=(ToolUsed(("x",)),))]
    )
    assert after(agent).active == "d"
    assert after(agent, "x").active == "s"


def test_default_sequence_continues_while_no_other_step_holds() -> None:
    agent = Agent("a", [Step("d", is_default=True, sequence=(("x",), ("y",)))])
    assert after(agent, "x").index == 1
    finished = after(agent, "x", "y")
    assert (finished.active, finished.index) == ("d", 2)


# --- callable tools ---------------------------------------------------------------------------------------------


def test_only_the_entry_that_is_due_may_be_called() -> None:
    state = after(AGENT, "write")
    assert AGENT.due(state) == ("read_a", "read_b")
    assert callable_now(AGENT, state, ["comment", "read_b", "read_c", "read_a"]) == ("read_b", "read_a")


def test_what_is_denied_may_not_be_called_even_if_it_is_allowed() -> None:
    step = Step("s", allowed=("read_*",), denied=("read_secret",))
    assert [step.allows(name) for name in ("read_x", "read_secret", "write")] == [True, False, False]
    assert not Step("none", allowed=()).allows("x")
    assert Step("all").allows("x")


def test_denied_tool_is_never_due() -> None:
    agent = Agent("a", [Step("s", denied=("read_secret",), sequence=(("read_*",),))])
    assert callable_now(agent, after(agent), ["read_x", "read_secret"]) == ("read_x",)


# --- used tools --------------------------------------------------------------------------------------------------


def test_parallel_tool_calls_are_processed_in_order() -> None:
    used = AGENT.after_tools(
        AGENT.with_active_step(START, NO_FACTS), ["write", "read_a", "comment", "search"], NO_FACTS
    )
    assert (used.state.active, used.stray) == ("work", ())
    assert used.state.recent == ("write", "read_a", "comment", "search")


def test_stray_tool_is_ignored() -> None:
    used = AGENT.after_tools(after(AGENT, "write"), ["comment", "read_a"], NO_FACTS)
    assert used.stray == ("comment",)
    assert (used.state.active, used.state.index) == ("review", 1)
    assert used.state.recent == ("write", "read_a")


@pytest.mark.parametrize(("enforce", "active"), [("filter", "work"), ("require", "work"), ("observe", "publish")])
def test_stray_call_changes_step_only_in_observe_mode(enforce: Enforce, active: str) -> None:
    work = Step("work", denied=("approve",), is_default=True, enforce=enforce)
    agent = Agent("a", [Step("publish", conditions=(SequenceMatch((("approve",),)),)), work])
    used = agent.after_tools(agent.with_active_step(START, NO_FACTS), ["approve"], NO_FACTS)
    assert (used.state.active, used.stray) == (active, ("approve",))


def test_tool_is_checked_in_the_step_reached_before_it() -> None:
    used = AGENT.after_tools(AGENT.with_active_step(START, NO_FACTS), ["write", "write"], NO_FACTS)
    assert used.stray == ("write",)


def test_recent_tools_and_names_are_bounded() -> None:
    state = after(AGENT, *["x" * 100_000] * (MOST_RECENT + 3))
    assert len(state.recent) == MOST_RECENT
    assert {len(name) for name in state.recent} == {256}


def test_nothing_is_stray_where_no_step_is_active() -> None:
    assert Agent("a", [REVIEW]).after_tools(START, ["anything"], NO_FACTS).stray == ()


# --- steps set by hand --------------------------------------------------------------------------------------------------------


def test_a_step_set_by_hand_holds_until_its_sequence_is_finished() -> None:
    state = AGENT.set(START, "review")
    assert AGENT.with_active_step(state, ConditionFacts(left=0.01)) is state
    state = after(AGENT, "read_a", state=state, facts=ConditionFacts(left=0.01))
    assert (state.active, state.index, state.is_set) == ("review", 1, True)
    state = after(AGENT, "comment", state=state)
    assert (state.active, state.is_set) == ("work", False)


def test_step_set_by_hand_without_sequence_stays() -> None:
    state = after(AGENT, "search", "write", state=START)
    state = AGENT.set(state, "alert")
    state = after(AGENT, "stop", "stop", state=state)
    assert (state.active, state.is_set) == ("alert", True)
    assert AGENT.with_active_step(AGENT.set(state, None), NO_FACTS).active == "work"


def test_setting_a_step_restarts_its_sequence() -> None:
    state = after(AGENT, "write", "read_a")
    assert AGENT.set(state, "review") == StepState("review", 0, ("write", "read_a"), is_set=True)


def test_a_step_that_does_not_exist_cannot_be_set() -> None:
    with pytest.raises(KeyError):
        AGENT.set(START, "nothing")


def test_finished_step_set_by_hand_is_not_restarted() -> None:
    agent = Agent("a", [Step("s", sequence=(("a",),))])
    state = after(agent, "a", state=agent.set(START, "s"))
    assert state == StepState("s", 1, ("a",))


# --- another configuration ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_set", [False, True])
def test_removed_step_is_replaced(is_set: bool) -> None:
    gone = StepState("gone", 3, ("write",), is_set=is_set)
    assert AGENT.step(gone) is None
    assert AGENT.due(gone) is None
    assert AGENT.finished_entries(gone) is None
    assert AGENT.after_tools(gone, ["x"], NO_FACTS).stray == ()
    assert AGENT.with_active_step(gone, NO_FACTS) == StepState("review", 0, ("write",))
    assert Agent("a", [ALERT]).with_active_step(gone, NO_FACTS) == StepState(None, 0, ("write",))


def test_a_sequence_that_got_shorter_is_finished() -> None:
    state = StepState("review", 7)
    assert (AGENT.due(state), AGENT.finished_entries(state)) == (None, 2)


def test_unneeded_facts_are_not_read() -> None:
    assert (AGENT.reads_message, AGENT.reads_tokens) == (False, False)
    agent = Agent("a", [Step("s", conditions=(MessageMatches(bool), TokensAbove(1)))])
    assert (agent.reads_message, agent.reads_tokens) == (True, True)


# --- against a plain reference --------------------------------------------------------------------------------------

TOOLS = ("read_a", "read_b", "write", "list", "other")
NAMES = st.sampled_from(TOOLS)
PATTERN = st.sampled_from([*TOOLS, "read_*", "*"])
ENTRY = st.lists(PATTERN, min_size=1, max_size=2).map(tuple)
CONDITION = st.one_of(
    st.builds(ToolUsed, ENTRY, st.integers(1, 4)),
    st.builds(NotRecentlyUsed, ENTRY, st.integers(1, 4)),
    st.builds(SequenceMatch, st.lists(ENTRY, min_size=1, max_size=3).map(tuple)),
    st.builds(BudgetBelow, st.sampled_from([0.3, 0.6])),
    st.builds(TokensAbove, st.sampled_from([10, 20])),
)
PLAIN_STEP = st.builds(
    Step,
    name=st.just(""),
    conditions=st.lists(CONDITION, max_size=2).map(tuple),
    allowed=st.none() | st.lists(PATTERN, max_size=3).map(tuple),
    denied=st.lists(PATTERN, max_size=1).map(tuple),
    sequence=st.lists(ENTRY, max_size=3).map(tuple),
    is_default=st.booleans(),
    enforce=st.sampled_from(["filter", "observe"]),
)
FACTS = st.builds(ConditionFacts, st.none(), st.sampled_from([5, 15, 25]), st.sampled_from([0.2, 0.5, 1.0]))


@st.composite
def steps(draw: st.DrawFn) -> list[Step]:
    found = draw(st.lists(PLAIN_STEP, min_size=1, max_size=4))
    default = next((index for index, step in enumerate(found) if step.is_default), None)
    return [replace(step, name=f"s{index}", is_default=index == default) for index, step in enumerate(found)]


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@dataclass
class Plain:
    """Implement docs/concepts/steps.md a second time, with mutable values."""

    steps: list[Step]
    active: Step | None = None
    done: list[str] = field(default_factory=list)
    """Return the tools that finished entries of the active step's sequence."""
    by_hand: bool = False
    log: list[str] = field(default_factory=list)

    def holds(self, step: Step, facts: ConditionFacts) -> bool:
        for condition in step.conditions:
            match condition:
                case ToolUsed(tools, within):
                    good = len([name for name in self.log[-within:] if matches(name, tools)]) > 0
                case NotRecentlyUsed(tools, window):
                    good = len([name for name in self.log[-window:] if matches(name, tools)]) == 0
                case SequenceMatch(entries):
                    tail = self.log[len(self.log) - len(entries) :] if len(self.log) >= len(entries) else None
                    good = tail is not None and all(matches(n, e) for n, e in zip(tail, entries, strict=True))
                case BudgetBelow(share):
                    good = facts.left < share
                case TokensAbove(tokens):
                    good = facts.tokens is not None and facts.tokens > tokens
                case _:
                    raise AssertionError(condition)
            if not good:
                return False
        return True

    def is_running(self) -> bool:
        return self.active is not None and len(self.done) < len(self.active.sequence)

    def look(self, facts: ConditionFacts) -> None:
        if self.by_hand and self.active is not None and (self.is_running() or not self.active.sequence):
            return
        self.by_hand = False
        for step in self.steps:
            runs = step is self.active and self.is_running()
            if not step.is_default and (runs or self.holds(step, facts)):
                self.enter(step)
                return
        self.enter(next((step for step in self.steps if step.is_default), None))

    def enter(self, step: Step | None) -> None:
        if step is not self.active:
            self.active, self.done = step, []

    def may(self, name: str) -> bool:
        step = self.active
        if step is None:
            return True
        if step.allowed is not None and not matches(name, step.allowed):
            return False
        if matches(name, step.denied):
            return False
        return not self.is_running() or matches(name, step.sequence[len(self.done)])

    def use(self, name: str, facts: ConditionFacts) -> bool:
        """Return whether the tool was due and allowed."""
        is_fine = self.may(name)
        if is_fine and self.is_running():
            self.done.append(name)
        if is_fine or self.active is None or self.active.enforce == "observe":
            self.log.append(name)
        self.look(facts)
        return is_fine


class StepsMachine(RuleBasedStateMachine):
    """Generate steps and tools in any order: rules and reference are always in the same state."""

    @initialize(found=steps())
    def begin(self, found: list[Step]) -> None:
        self.agent, self.plain, self.state = Agent("a", found), Plain(found), START

    @rule(facts=FACTS)
    def a_call_comes(self, facts: ConditionFacts) -> None:
        before = self.state
        self.state = self.agent.with_active_step(before, facts)
        self.plain.look(facts)
        assert self.agent.with_active_step(self.state, facts) == self.state, "looking twice changes nothing"

    @rule(tools=st.lists(NAMES, min_size=1, max_size=4), facts=FACTS)
    def an_answer_calls(self, tools: list[str], facts: ConditionFacts) -> None:
        used = self.agent.after_tools(self.state, tools, facts)
        expected = [name for name in tools if not self.plain.use(name, facts)]
        assert list(used.stray) == expected
        if used.state.active == self.state.active and used.state.index > self.state.index:
            assert used.state.index - self.state.index <= len(tools)
        self.state = used.state

    @rule(data=st.data())
    def somebody_sets_a_step(self, data: st.DataObject) -> None:
        step = data.draw(st.none() | st.sampled_from(self.plain.steps))
        done = data.draw(st.integers(0, max(0, len(step.sequence) - 1))) if step is not None else 0
        self.state = self.agent.set(self.state, step.name if step is not None else None, done)
        self.plain.active, self.plain.by_hand = step, step is not None
        self.plain.done = [entry[0] for entry in step.sequence[:done]] if step is not None else []

    @invariant()
    def both_are_in_the_same_place(self) -> None:
        if not hasattr(self, "plain"):
            return
        plain, state = self.plain, self.state
        assert state.active == (plain.active.name if plain.active is not None else None)
        assert state.index == len(plain.done)
        assert list(state.recent) == plain.log[-MOST_RECENT:]
        may = tuple(name for name in TOOLS if plain.may(name))
        assert may == (TOOLS if state.active is None else callable_now(self.agent, state, TOOLS))


TestStepsAgainstAPlainReference = StepsMachine.TestCase
