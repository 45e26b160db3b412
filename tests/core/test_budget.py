"""Test BudgetManager, the token budget of one agent run."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.budget import Allocation, BudgetExhausted, BudgetManager


def numbers(budget: BudgetManager) -> tuple[int, int, int]:
    return budget.used, budget.held, budget.remaining


def test_allocation_is_held_until_usage_is_recorded() -> None:
    budget = BudgetManager(100)
    assert (budget.total_budget, budget.usage_fraction, *numbers(budget)) == (100, 0.0, 0, 0, 100)
    first, second = budget.allocate(40), budget.allocate(60)
    assert (first.tokens, second.tokens, *numbers(budget)) == (40, 60, 0, 100, 0)
    assert budget.record_usage(25, first) == 15
    assert (*numbers(budget), budget.usage_fraction) == (25, 60, 15, 0.25)
    assert budget.record_usage(0, second) == 75
    assert numbers(budget) == (25, 0, 75)


def test_allocation_counts_once_with_largest_recorded_usage() -> None:
    budget = BudgetManager(100)
    first = budget.allocate(40)
    budget.allocate(20)
    for usage, left in ((30, 50), (30, 50), (0, 50), (45, 35), (30, 35)):
        assert budget.record_usage(usage, first) == left
    assert numbers(budget) == (45, 20, 35)


@pytest.mark.parametrize("is_recorded", [False, True])
def test_usage_of_another_managers_allocation_is_refused(
    is_recorded: bool,
) -> None:
    one, other = BudgetManager(100), BudgetManager(100)
    foreign, own = one.allocate(90), other.allocate(50)
    if is_recorded:
        one.record_usage(60, foreign)
    assert foreign.id == own.id
    for allocation in (foreign, Allocation("of nobody", 5), Allocation(own.id, own.tokens)):
        with pytest.raises(ValueError, match="was allocated by another manager; record its usage there"):
            other.record_usage(60, allocation)
    assert numbers(other) == (0, 50, 50)
    assert numbers(one) == ((60, 0, 40) if is_recorded else (0, 90, 10))


def test_usage_beyond_the_hold_is_recorded_in_full() -> None:
    budget = BudgetManager(100)
    assert budget.record_usage(150, budget.allocate(10)) == 0
    assert budget.record_usage(50) == 0
    assert (budget.used, budget.usage_fraction) == (200, 2.0)


def test_usage_without_allocation_keeps_other_holds() -> None:
    budget = BudgetManager(100)
    budget.allocate(40)
    assert budget.record_usage(10) == 50
    assert numbers(budget) == (10, 40, 50)


def test_allocation_beyond_budget_is_refused_with_numbers() -> None:
    budget = BudgetManager(1_000)
    budget.record_usage(300)
    budget.allocate(600)
    with pytest.raises(BudgetExhausted) as caught:
        budget.allocate(101)
    assert caught.value.message == "101 tokens are needed and 100 of 1,000 are left (300 used, 600 held)."
    assert caught.value.details == {"budget": {"limit": 1_000, "used": 300, "held": 600, "needed": 101}}
    assert numbers(budget) == (300, 600, 100)


def test_allocation_takes_what_is_left_if_enough() -> None:
    budget = BudgetManager(100)
    assert budget.allocate(80, least=50).tokens == 80
    assert budget.allocate(80, least=20).tokens == 20
    with pytest.raises(BudgetExhausted, match=r"^1 token is needed and 0 of 100"):
        budget.allocate(80, least=1)
    assert budget.allocate(80, least=0).tokens == 0
    assert budget.allocate(0).tokens == 0


@pytest.mark.parametrize(("tokens", "least"), [(-1, None), (5, 6), (5, -1)])
def test_invalid_allocations_are_refused(tokens: int, least: int | None) -> None:
    budget = BudgetManager(100)
    with pytest.raises(ValueError, match="cannot hold"):
        budget.allocate(tokens, least=least)
    assert numbers(budget) == (0, 0, 100)


@pytest.mark.parametrize("odd", [json.loads("NaN"), json.loads("Infinity"), 1.5, 2.0, True, "3", None])
def test_only_whole_numbers_are_accepted(odd: Any) -> None:
    with pytest.raises(ValueError, match="whole number"):
        BudgetManager(odd)
    budget = BudgetManager(100)
    held = budget.allocate(40)
    for allocation in (None, held):
        with pytest.raises(ValueError, match="whole number"):
            budget.record_usage(odd, allocation)
    with pytest.raises(ValueError, match="whole numbers"):
        budget.allocate(odd)
    if odd is not None:
        with pytest.raises(ValueError, match="whole numbers"):
            budget.allocate(50, least=odd)
    assert numbers(budget) == (0, 40, 60)
    with pytest.raises(BudgetExhausted):
        budget.allocate(10**6)


def test_negative_budgets_and_usages_are_refused() -> None:
    with pytest.raises(ValueError, match="not -1"):
        BudgetManager(-1)
    budget = BudgetManager(10)
    held = budget.allocate(4)
    with pytest.raises(ValueError, match="not -3"):
        budget.record_usage(-3, held)
    assert numbers(budget) == (0, 4, 6)


def test_budget_of_zero_is_used_up() -> None:
    budget = BudgetManager(0)
    assert (budget.usage_fraction, budget.remaining) == (1.0, 0)
    with pytest.raises(BudgetExhausted):
        budget.allocate(1)


@pytest.mark.parametrize(
    ("used", "mode"),
    [(0, "raw"), (49, "raw"), (60, "table"), (90, "summary"), (97, "handle_only"), (150, "handle_only")],
)
def test_suggested_mode_gets_stricter_as_budget_shrinks(used: int, mode: str) -> None:
    budget = BudgetManager(100)
    budget.record_usage(used)
    assert budget.suggested_mode == mode


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 200), st.lists(st.tuples(st.integers(0, 80), st.integers(0, 80)), max_size=12), st.randoms())
def test_law_holds_stay_within_budget_and_end_in_recorded_sum(
    total: int, calls: list[tuple[int, int]], chance: Any
) -> None:
    budget, waiting, recorded = BudgetManager(total), list[tuple[Allocation, int]](), 0
    for asked, usage in calls:
        try:
            allocation = budget.allocate(asked)
        except BudgetExhausted:
            assert budget.used + budget.held + asked > total
        else:
            assert not asked or budget.used + budget.held <= total
            waiting.append((allocation, usage))
        if waiting and chance.random() < 0.5:
            one, spent = waiting.pop(chance.randrange(len(waiting)))
            for _ in range(2):
                budget.record_usage(spent, one)
            recorded += spent
    for one, usage in waiting:
        budget.record_usage(usage, one)
        recorded += usage
    assert (budget.used, budget.held) == (recorded, 0)
