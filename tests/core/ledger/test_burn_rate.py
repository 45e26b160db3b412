"""When a budget is empty, by its newest calls."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal

import pytest

from gateway.core.ledger.arithmetic import AccountKey, Amount, Balance, Limits
from gateway.core.ledger.burn_rate import BurnRate, burn_rate
from gateway.core.record import CallRecord
from gateway.core.usage import Charge, Usage
from tests.telemetry.test_callbacks import CALL

S = AccountKey("session", "alice", "s")
OTHER = AccountKey("session", "alice", "other")
NOW = 10_000.0


def call(ago_s: float, tokens: int = 100, nano_usd: int = 0, account: AccountKey = S) -> CallRecord:
    charge = Charge(Usage.of(tokens, 0), "provider", Decimal(0))
    return replace(
        CALL,
        started_at=NOW - ago_s,
        duration_s=1.0,
        accounts=(account,),
        spent=Amount(tokens, nano_usd, 1),
        charge=charge,
    )


def balance(limits: Limits, used: Amount, resets_s: float | None = None) -> Balance:
    return Balance(S, limits, used, Amount(), resets_s)


#: 6 calls in 5 minutes, 100 tokens each: 2 tokens per second
CALLS = [call(ago_s) for ago_s in (0, 60, 120, 180, 240, 300)]


def test_rate_is_the_mean_of_the_newest_calls() -> None:
    rate = burn_rate(balance(Limits(10_000), Amount(5_250)), CALLS, NOW)
    assert rate == BurnRate("tokens", 6, 120.0, 100.0, 4_750 / 2, 47, refills_first=False)


@pytest.mark.parametrize(("closing", "calls"), [("", 37), ("call-1 10000 -1 -1", 0)])
def test_what_is_kept_for_the_closing_call_is_not_left(closing: str, calls: int) -> None:
    kept = replace(balance(Limits(10_000), Amount(5_250)), closing_share=0.1, closing=closing)
    rate = burn_rate(kept, CALLS, NOW)
    assert rate is not None
    assert (rate.empty_in_calls, rate.empty_in_s) == (calls, calls and 3_750 / 2)


def test_unit_that_is_empty_first_is_named() -> None:
    rate = burn_rate(balance(Limits(10_000, None, 12), Amount(5_000, 0, 10)), CALLS, NOW)
    assert rate is not None
    assert (rate.unit, rate.empty_in_calls, rate.empty_in_s) == ("calls", 2, 100.0)


@pytest.mark.parametrize(
    "records",
    [
        [],
        CALLS[:2],
        [call(ago_s) for ago_s in (601.5, 700, 800, 900)],  # idle for ten minutes
        [call(0), call(10), call(3_700), call(3_800)],  # the others are too old
        [call(ago_s, account=OTHER) for ago_s in (0, 10, 20, 30)],
        [replace(call(ago_s), charge=None) for ago_s in (0, 10, 20, 30)],
        [call(ago_s, tokens=0) for ago_s in (0, 10, 20, 30)],
    ],
)
def test_nothing_is_said_without_enough_recent_calls(records: list[CallRecord]) -> None:
    assert burn_rate(balance(Limits(10_000), Amount(5_000)), records, NOW) is None


def test_nothing_is_said_without_a_limit() -> None:
    assert burn_rate(balance(Limits(), Amount(5_000)), CALLS, NOW) is None


def test_exceeded_budget_is_empty_now() -> None:
    rate = burn_rate(balance(Limits(100), Amount(600)), CALLS, NOW)
    assert rate is not None
    assert (rate.empty_in_s, rate.empty_in_calls) == (0, 0)


@pytest.mark.parametrize(("resets_s", "refills_first"), [(2_000.0, True), (3_000.0, False)])
def test_window_that_ends_before_is_reported(resets_s: float, refills_first: bool) -> None:
    rate = burn_rate(balance(Limits(10_000), Amount(5_250), resets_s), CALLS, NOW)
    assert rate is not None
    assert rate.refills_first is refills_first


def test_calls_at_the_same_moment_give_a_finite_rate() -> None:
    rate = burn_rate(balance(Limits(10_000), Amount(300)), [call(0)] * 3, NOW)
    assert rate is not None
    assert rate.per_minute == 18_000
