"""The thresholds of a budget that have to be announced."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.ledger.arithmetic import AccountKey, Amount, Balance, Dimension, Limits
from gateway.core.ledger.thresholds import DEFAULT_THRESHOLDS, Announced, announced, due, is_watched, unit_of

S = AccountKey("session", "alice", "s")


def balance(used: Amount, limits: Limits, period: int = 0) -> Balance:
    return Balance(S, limits, used, Amount(), period=period)


@pytest.mark.parametrize(
    ("used", "limits", "expected"),
    [
        (Amount(499), Limits(1_000), ()),
        (Amount(500), Limits(1_000), (50,)),
        (Amount(2_000), Limits(1_000), (50, 80, 95, 100)),
        (Amount(0, 80, 0), Limits(1_000, 100), (50, 80)),
        (Amount(0, 0, 1), Limits(None, None, 2), (50,)),
        (Amount(10), Limits(), ()),
        (Amount(10), Limits(0), ()),
    ],
)
def test_thresholds_are_reached_exactly(used: Amount, limits: Limits, expected: tuple[int, ...]) -> None:
    assert due(balance(used, limits), DEFAULT_THRESHOLDS, None) == expected


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        (balance(Amount(500), Limits(1_000)), balance(Amount(790), Limits(1_000)), ()),
        (balance(Amount(500), Limits(1_000)), balance(Amount(800), Limits(1_000)), (80,)),
        (balance(Amount(900), Limits(1_000)), balance(Amount(900), Limits(1_000), period=1), (50, 80)),
        (balance(Amount(900), Limits(1_000)), balance(Amount(900), Limits(2_000)), ()),
        (balance(Amount(900), Limits(1_000)), balance(Amount(1_000), Limits(2_000)), (50,)),
        (balance(Amount(600), Limits(1_000)), balance(Amount(600), Limits(700)), (80,)),
    ],
)
def test_threshold_is_announced_again_in_a_new_period_or_after_a_raised_limit(
    before: Balance, now: Balance, expected: tuple[int, ...]
) -> None:
    assert due(now, DEFAULT_THRESHOLDS, announced(before)) == expected


@given(st.lists(st.integers(0, 400), max_size=20), st.integers(1, 1_000))
def test_every_threshold_is_announced_exactly_once_in_a_period(spent: list[int], limit: int) -> None:
    used, before, fired = 0, None, list[int]()
    for amount in spent:
        used += amount
        now = balance(Amount(used), Limits(limit))
        fired += due(now, DEFAULT_THRESHOLDS, before)
        before = announced(now)
    assert fired == [one for one in DEFAULT_THRESHOLDS if used * 100 >= one * limit]


@pytest.mark.parametrize(
    ("used", "limits", "unit"),
    [
        (Amount(90, 10, 1), Limits(100, 100, 100), "tokens"),
        (Amount(90, 95, 1), Limits(100, 100, 100), "nano_usd"),
        (Amount(90, 95, 1), Limits(None, None, 2), "calls"),
        (Amount(90, 95, 1), Limits(0, 100, None), "nano_usd"),
    ],
)
def test_unit_is_the_one_with_the_largest_used_share(used: Amount, limits: Limits, unit: Dimension) -> None:
    assert unit_of(balance(used, limits)) == unit


def test_account_without_a_limit_is_not_watched() -> None:
    assert not is_watched(Limits(window=60))
    assert not is_watched(Limits(0, None, 0))
    assert is_watched(Limits(None, 1))


def test_nothing_is_announced_of_an_account_that_was_never_compared() -> None:
    assert Announced() == (0, Amount(), (None, None, None))
