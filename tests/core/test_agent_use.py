"""The shares of all agents add up to the session, and totals with children contain each call once."""

from __future__ import annotations

from decimal import Decimal

from gateway.core.agent_use import AgentUse, agents_of_session, parents_of, totals_with_children
from gateway.core.tools import OTHERS, ToolUse
from gateway.core.usage import Charge, Totals, Usage


def used(tokens: int) -> Totals:
    return Totals().add(Charge(Usage.of(tokens, 0), "provider", Decimal(tokens)))


SUBAGENTS = [
    AgentUse("b", "a", created_at=2.0, totals=used(20), tools={"read": 1}),
    AgentUse("a", "main", "Explore", created_at=1.0, totals=used(10), tools={"read": 2, "unknown": 1}),
    AgentUse("c", "gone", created_at=3.0, totals=used(5)),
]


def test_the_main_agent_of_a_session_without_subagents_has_all() -> None:
    [main] = agents_of_session(used(100), ToolUse(), [], [])
    assert (main.id, main.totals) == ("main", used(100))
    assert totals_with_children([main]) == {}


def test_the_main_agent_has_what_no_subagent_used() -> None:
    tools = ToolUse((), {"read": 5, "edit": 1, OTHERS: 3})
    main, *others = agents_of_session(used(100).plus(used(35)), tools, SUBAGENTS, [])
    assert [one.id for one in others] == ["a", "b", "c"]
    # The session counts the tool "unknown" under the name of all others.
    assert (main.id, main.tools) == ("main", {"read": 2, "edit": 1, OTHERS: 2})
    assert (main.totals.total_tokens, main.totals.cost_usd) == (100, Decimal(100))


def test_no_share_is_below_zero() -> None:
    main, *_ = agents_of_session(used(1), ToolUse(), SUBAGENTS, [])
    assert main.totals == Totals()
    assert main.tools == {}


def test_the_main_agent_includes_all_others_and_a_parent_its_children() -> None:
    agents = agents_of_session(used(135), ToolUse(), SUBAGENTS, [])
    found = {name: totals.total_tokens for name, totals in totals_with_children(agents).items()}
    assert found == {"main": 135, "a": 30}


def test_a_circle_of_parents_counts_each_call_once() -> None:
    one, other = AgentUse("x", "y", totals=used(1)), AgentUse("y", "x", totals=used(2))
    agents = agents_of_session(used(3), ToolUse(), [one, other], [])
    found = {name: totals.total_tokens for name, totals in totals_with_children(agents).items()}
    assert found == {"main": 3, "x": 3, "y": 3}
    assert parents_of("x", "y", {"x": one, "y": other}, 8) == ["y"]


def test_parents_are_bounded() -> None:
    chain = {str(number): AgentUse(str(number), str(number + 1)) for number in range(20)}
    assert parents_of("start", "0", chain, 8) == [*map(str, range(8))]
    assert parents_of("start", "main", chain, 8) == []
