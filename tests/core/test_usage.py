from __future__ import annotations

from decimal import Decimal

import pytest

from gateway.core.usage import Charge, Totals, Usage, UsageSource

FULL = Usage(100, 20, 125, 40, 10, 5, 3, 2)


def charge(source: UsageSource, cost: str | None = "0.5", usage: Usage = FULL) -> Charge:
    return Charge(usage, source, Decimal(cost) if cost is not None else None)


def test_usage_of_two_sides_totals_them() -> None:
    assert Usage.of(3, 4) == Usage(3, 4, 7)


def test_usage_without_a_part_is_never_negative() -> None:
    assert FULL.without(Usage(40, 20, 60, 90)) == Usage(60, 0, 65, 0, 10, 5, 3, 2)


def test_saved_tokens_are_added_and_subtracted() -> None:
    once = Totals().add(charge("provider"), 7)
    both = once.add(charge("estimated"))
    assert (both.calls, both.trimmed_calls, both.saved_tokens) == (2, 1, 7)
    assert both.without(charge("estimated")) == once
    assert once.without(charge("provider"), 7) == Totals()


def test_a_charge_adds_every_count_once() -> None:
    assert Totals().add(charge("provider")) == Totals(
        calls=1,
        input_tokens=100,
        output_tokens=20,
        total_tokens=125,
        cache_read_tokens=40,
        cache_write_tokens=10,
        reasoning_tokens=5,
        cost_usd=Decimal("0.5"),
    )


def test_adding_leaves_the_earlier_totals_as_they_were() -> None:
    before = Totals()
    before.add(charge("provider"))
    assert before == Totals()


@pytest.mark.parametrize("source", ["estimated", "mixed"])
def test_a_charge_that_rests_on_an_estimate_is_counted_as_such(source: UsageSource) -> None:
    totals = Totals().add(charge(source))
    assert (totals.estimated_tokens, totals.estimated_calls) == (125, 1)


def test_a_call_without_a_price_is_counted_as_unpriced_and_costs_nothing() -> None:
    totals = Totals().add(charge("provider", None)).add(charge("provider", "0"))
    assert (totals.unpriced_calls, totals.cost_usd) == (1, Decimal(0))


@pytest.mark.parametrize(
    ("sources", "grade"),
    [
        ((), "provider"),
        (("provider", "provider"), "provider"),
        (("estimated", "mixed"), "estimated"),
        (("provider", "estimated"), "mixed"),
    ],
)
def test_totals_source_depends_on_estimated_calls(sources: tuple[UsageSource, ...], grade: str) -> None:
    totals = Totals()
    for source in sources:
        totals = totals.add(charge(source))
    assert totals.source == grade


def test_costs_add_up_without_binary_rounding() -> None:
    totals = Totals()
    for _ in range(10):
        totals = totals.add(charge("provider", "0.1"))
    assert totals.cost_usd == Decimal(1)
