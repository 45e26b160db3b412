"""Test BudgetManager, the token budget of one agent run."""

from __future__ import annotations

import asyncio
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier, Thread
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway import Allocation, BudgetExhausted, BudgetManager, ResponseMode


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
    if not isinstance(odd, str):  # a text is counted
        with pytest.raises(ValueError, match="whole numbers"):
            budget.allocate(odd)
    if odd is not None and not isinstance(odd, str):
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
    ("used", "requested", "mode"),
    [
        (0, "raw", "raw"),
        (49, "raw", "raw"),
        (49, "summary", "summary"),
        (50, "raw", "table"),
        (79, "raw", "table"),
        (60, "handle_only", "handle_only"),
        (80, "raw", "summary"),
        (94, "table", "summary"),
        (95, "raw", "handle_only"),
        (150, "raw", "handle_only"),
    ],
)
def test_suggested_mode_is_the_requested_one_until_the_budget_asks_for_less(
    used: int, requested: ResponseMode, mode: str
) -> None:
    budget = BudgetManager(100)
    budget.record_usage(used)
    assert budget.suggested_mode(requested) == mode


def test_unknown_mode_is_refused_with_the_known_ones() -> None:
    odd: Any = "short"
    for call in (BudgetManager(100).suggested_mode, partial(BudgetManager(100).render, "x")):
        with pytest.raises(ValueError, match="unknown response mode 'short'; the known ones are raw, table, summary"):
            call(odd)


def test_allocation_in_a_block_is_released_at_its_end_unless_usage_was_recorded() -> None:
    budget = BudgetManager(100)
    held = []

    def fail() -> None:
        with budget.allocate(40):
            held.append(budget.held)
            raise OSError("the tool failed")

    with pytest.raises(OSError, match="the tool failed"):
        fail()
    assert held == [40]
    assert numbers(budget) == (0, 0, 100)
    with budget.allocate(40) as allocation:
        budget.record_usage(30, allocation)
    assert numbers(budget) == (30, 0, 70)
    with budget.allocate(40) as allocation:
        pass
    budget.record_usage(5, allocation)
    assert numbers(budget) == (35, 0, 65)


class Words:
    name = "words"

    def count(self, text: str) -> int:
        return len(text.split())


def test_texts_are_counted_by_the_counter() -> None:
    assert BudgetManager(100).allocate("four characters make one").tokens == 6
    budget = BudgetManager(5, counter=Words())
    assert (budget.count("one two"), budget.allocate("one two three").tokens) == (2, 3)
    assert budget.allocate("one two three", least=1).tokens == 2
    with pytest.raises(BudgetExhausted, match=r"^2 tokens are needed and 0 of 5 are left"):
        budget.allocate("one two")


@pytest.mark.parametrize("count", [-1, 1.5, None])
def test_a_counter_without_a_whole_number_holds_nothing(count: Any) -> None:
    class Odd(Words):
        def count(self, text: str) -> int:
            return cast(int, count)

    budget = BudgetManager(100, counter=Odd())
    with pytest.raises(ValueError, match="whole numbers"):
        budget.allocate("text")
    assert numbers(budget) == (0, 0, 100)


THREADS, LOOPS, TURNS, SIZE, TOTAL = 16, 4, 300, 7, 20_000


def test_threads_and_event_loops_never_allocate_more_than_the_budget() -> None:
    budget = BudgetManager(TOTAL)
    barrier = Barrier(THREADS + LOOPS)
    seen: list[int] = []
    granted: list[Allocation] = []

    def look() -> None:
        account = budget._account
        seen.append(account.used.tokens + account.held.tokens)

    def take(number: int) -> None:
        try:
            allocation = budget.allocate(SIZE)
        except BudgetExhausted:
            return
        look()
        if number % 3:
            budget.record_usage(SIZE - number % 2, allocation)
        granted.append(allocation)

    def in_thread() -> None:
        barrier.wait()
        for number in range(TURNS):
            take(number)

    async def in_tasks() -> None:
        async def task(number: int) -> None:
            await asyncio.sleep(0)
            take(number)

        await asyncio.gather(*[task(number) for number in range(TURNS)])

    def in_loop() -> None:
        barrier.wait()
        asyncio.run(in_tasks())

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [Thread(target=in_thread) for _ in range(THREADS)] + [Thread(target=in_loop) for _ in range(LOOPS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert max(seen) <= TOTAL
    # No more fits, and each grant is in the sum: what was recorded, or what is still held.
    assert budget.remaining < SIZE
    assert budget.held == sum(allocation.open.held for allocation in granted)
    assert budget.used == sum(allocation.open.spent for allocation in granted)


def test_usage_recorded_by_many_threads_for_one_allocation_counts_once() -> None:
    budget = BudgetManager(1_000)
    allocation = budget.allocate(100)
    barrier = Barrier(8)

    def record(number: int) -> None:
        barrier.wait()
        budget.record_usage(50 + number, allocation)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(record, range(8)))
    assert numbers(budget) == (57, 0, 943)


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
