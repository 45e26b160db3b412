from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.steps import (
    MOST_RECENT,
    Agent,
    BudgetBelow,
    Condition,
    ConditionFacts,
    MessageMatches,
    NotRecentlyUsed,
    SequenceMatch,
    Step,
    StepState,
    TokensAbove,
    ToolUsed,
    matches_any,
)

NO_FACTS = ConditionFacts()


@pytest.mark.parametrize(
    ("condition", "recent", "expected"),
    [
        (ToolUsed(("search",)), [], False),
        (ToolUsed(("search",)), ["search"], True),
        (ToolUsed(("search",)), ["Search"], False),
        (ToolUsed(("search",)), ["research", "searches"], False),
        (ToolUsed(("read_*", "open")), ["a", "read_file", "b"], True),
        (ToolUsed(("read_*",), 2), ["read_file", "a", "b"], False),
        (ToolUsed(("read_*",), 3), ["read_file", "a", "b"], True),
        (NotRecentlyUsed(("search",), 2), [], True),
        (NotRecentlyUsed(("search",), 2), ["search", "a", "b"], True),
        (NotRecentlyUsed(("search",), 3), ["search", "a", "b"], False),
        (SequenceMatch((("a",), ("b",))), ["a", "b"], True),
        (SequenceMatch((("a",), ("b",))), ["b", "a"], False),
        (SequenceMatch((("a",), ("b",))), ["b"], False),
        (SequenceMatch((("a",), ("b",))), ["a", "b", "c"], False),
        (SequenceMatch((("a",), ("b",))), ["a", "c", "b"], False),
        (SequenceMatch((("a", "x*"), ("b",))), ["c", "xyz", "b"], True),
    ],
)
def test_tool_conditions(condition: Condition, recent: list[str], expected: bool) -> None:
    assert condition.holds(recent, NO_FACTS) is expected


@pytest.mark.parametrize(
    ("condition", "facts", "expected"),
    [
        (MessageMatches(lambda text: "evaluate" in text), ConditionFacts("please evaluate"), True),
        (MessageMatches(lambda text: "evaluate" in text), ConditionFacts("hello"), False),
        (MessageMatches(lambda _: True), ConditionFacts(None), False),
        (TokensAbove(100), ConditionFacts(tokens=100), False),
        (TokensAbove(100), ConditionFacts(tokens=101), True),
        (TokensAbove(0), ConditionFacts(tokens=None), False),
        (BudgetBelow(0.2), ConditionFacts(left=0.2), False),
        (BudgetBelow(0.2), ConditionFacts(left=0.19), True),
        (BudgetBelow(1), NO_FACTS, False),
    ],
)
def test_conditions_on_facts(condition: Condition, facts: ConditionFacts, expected: bool) -> None:
    assert condition.holds(["any"], facts) is expected


def test_condition_window_equals_remembered_tools() -> None:
    recent = ["search", *["a"] * (MOST_RECENT - 1)]
    assert ToolUsed(("search",)).holds(recent, NO_FACTS)
    assert not ToolUsed(("search",)).holds([*recent[1:], "a"], NO_FACTS)


PATTERNS = st.text(alphabet="ab*?[]!-\n.|()", max_size=6)


def test_message_is_read_once_and_only_if_needed() -> None:
    read = []

    def message() -> str:
        read.append("message")
        return "please review"

    review = Step("review", conditions=(ToolUsed(("write",)), MessageMatches(lambda text: "review" in text)))
    agent, facts = Agent("a", [review, replace(review, name="again")]), ConditionFacts(message)
    assert agent.with_active_step(StepState(), facts).active is None
    assert read == []
    assert agent.with_active_step(StepState(recent=("write",)), facts).active == "review"
    assert facts.message == "please review"
    assert read == ["message"]


@given(st.text(alphabet="ab[]!-\n.|()", max_size=8), st.lists(PATTERNS, max_size=4).map(tuple))
def test_patterns_are_those_of_a_shell(name: str, patterns: tuple[str, ...]) -> None:
    assert matches_any(name, patterns) is any(fnmatchcase(name, pattern) for pattern in patterns)
