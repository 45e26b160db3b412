"""Test the arithmetic of budgets, by example and by laws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gateway.core.ledger.arithmetic import (
    DIMENSIONS,
    EMPTY,
    MOST,
    NO_LIMITS,
    NOTHING,
    Account,
    AccountKey,
    Amount,
    Balance,
    Changes,
    Claim,
    Dimension,
    Granted,
    Hold,
    Limits,
    Moment,
    Refused,
    after_deletion,
    balance_of,
    correct,
    extend,
    is_lease_over,
    most_used_balance,
    nano,
    periods,
    reserve,
    settle,
    with_new_period,
)
from gateway.core.ledger.session_key import SessionKey
from gateway.core.record import ORPHANED, CallRecord
from gateway.core.stored import OpenHold
from gateway.core.usage import Charge, Totals, Usage

law = settings(max_examples=150, deadline=None)

S = AccountKey("session", "alice", "s")
KEY = AccountKey("key", "alice")
PARENT = AccountKey("session", "alice", "parent")
RATE = AccountKey("rate", "alice")
NOW = Moment(1_000.0, 50.0, "boot")


def later(seconds: float) -> Moment:
    return Moment(NOW.wall + seconds, NOW.mono + seconds, NOW.boot)


def hold(*claims: Claim, fixed: Amount = NOTHING, **fields: Any) -> Hold:
    return Hold("h", claims, fixed, **fields)


def granted(outcome: tuple[Granted, Changes] | Refused) -> tuple[Granted, Changes]:
    assert not isinstance(outcome, Refused), outcome
    return outcome


# --- amounts ------------------------------------------------------------------------------------------------------------


def test_amounts_stay_within_bounds() -> None:
    assert Amount(1, 2, 3).plus(Amount(10, 20, 30)) == Amount(11, 22, 33)
    assert Amount(1, 2, 3).plus(Amount(10, 20, 0), 3) == Amount(31, 62, 3)
    assert Amount(MOST, MOST - 1, 0).plus(Amount(5, 5, MOST), 2) == Amount(MOST, MOST, MOST)
    assert Amount(5, 5, 5).less(Amount(1, 5, 9)) == Amount(4, 0, 0)


@pytest.mark.parametrize("name", Amount._fields)
def test_each_part_of_an_amount_has_its_bounds_by_itself(name: str) -> None:
    assert Amount(5, 5, 5)._replace(**{name: MOST}).plus(Amount(1, 1, 1)) == Amount(6, 6, 6)._replace(**{name: MOST})
    assert Amount(5, 5, 5).less(Amount(1, 1, 1)._replace(**{name: 9})) == Amount(4, 4, 4)._replace(**{name: 0})


@pytest.mark.parametrize(
    ("usd", "expected"),
    [
        (Decimal("0.5"), 500_000_000),
        (Decimal("0.0000000001"), 1),
        (Decimal(0), 0),
        (0, 0),
        (3, 3 * 10**9),
        (Decimal("1e30"), MOST),
        (10**30, MOST),
    ],
)
def test_usd_are_counted_in_billionths_rounded_up(usd: Decimal | int, expected: int) -> None:
    assert nano(usd) == expected


def test_limits_are_known_by_their_dimension() -> None:
    limits = Limits(1, None, 3)
    assert [limits.of(name) for name in DIMENSIONS] == [1, None, 3]
    assert [one.is_none for one in (limits, NO_LIMITS, Limits(calls=0), Limits(nano_usd=1), Limits(window=9))] == [
        *(False, True, False, False, True)
    ]


# --- time ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("earlier", "now", "seconds", "same_boot"),
    [
        (Moment(0, 10, "a"), Moment(10**9, 15, "a"), 5, True),
        (Moment(10**9, 10, "a"), Moment(0, 10, "a"), 0, True),
        (Moment(100, 10, "a"), Moment(130, 500, "b"), 30, False),
        (Moment(100, 10, ""), Moment(130, 5, ""), 30, False),
        (Moment(100, 10, "a"), Moment(90, 5, "b"), 0, False),
    ],
)
def test_time_follows_monotonic_clock_until_reboot(
    earlier: Moment, now: Moment, seconds: float, same_boot: bool
) -> None:
    assert now.since(earlier) == seconds
    assert now.is_same_boot(earlier) is same_boot


def test_lease_ends_after_its_time_or_reboot() -> None:
    assert [is_lease_over(NOW, 30, now) for now in (NOW, later(30), later(30.5))] == [False, False, True]
    assert is_lease_over(NOW, 30, replace(NOW, boot="other"))
    assert is_lease_over(NOW, 30, replace(NOW, mono=1.0))
    assert not is_lease_over(NOW, 30, replace(NOW, wall=10**9))


# --- limits and balances -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("configured", "declared", "decided", "expected"),
    [
        (100, None, {}, 100),
        (100, 40, {}, 40),
        (100, 400, {}, 100),
        (None, 40, {}, 40),
        (None, None, {}, None),
        (100, None, {"tokens": 500}, 500),
        (100, 40, {"tokens": 500}, 40),
        (100, None, {"tokens": None}, None),
        (100, 40, {"tokens": None}, 40),
        (100, None, {"calls": 1}, 100),
        (100, None, {"tokens": 0}, 0),
    ],
)
def test_limit_is_configured_or_overridden_and_lowered_by_declared(
    configured: int | None, declared: int | None, decided: dict[Dimension, int | None], expected: int | None
) -> None:
    claim = Claim(S, Limits(configured, window=9), Limits(declared, window=1))
    limits = claim.limits(Account(overrides=decided))
    assert (limits.tokens, limits.window) == (expected, 9)


def test_balance_has_left_amount_and_used_fraction() -> None:
    one = Balance(S, Limits(100, None, 10), Amount(70, 5, 9), Amount(20))
    assert [one.left(name) for name in DIMENSIONS] == [10, None, 1]
    assert one.used_fraction == 0.9
    assert Balance(S, Limits(100), Amount(130), NOTHING).left("tokens") == 0
    assert Balance(S, NO_LIMITS, Amount(130), NOTHING).used_fraction is None
    assert Balance(S, Limits(0), NOTHING, NOTHING).used_fraction == 1.0


def test_narrowest_account_has_the_largest_used_share() -> None:
    wide, tight = Balance(S, Limits(100), Amount(10), NOTHING), Balance(KEY, Limits(100), Amount(60), NOTHING)
    rate = Balance(RATE, Limits(calls=10), Amount(calls=9), NOTHING)
    free = Balance(AccountKey("session", "alice", "free"), NO_LIMITS, Amount(10**6), NOTHING)
    assert most_used_balance([wide, rate, tight, free]) == tight
    assert most_used_balance([rate, free]) is None
    assert most_used_balance([]) is None


def test_new_window_resets_used_but_not_held() -> None:
    claim = Claim(KEY, Limits(100, window=60))
    account = Account(Amount(40), Amount(20), NOW)
    assert balance_of(account, claim, later(59)) == Balance(KEY, claim.configured, Amount(40), Amount(20), 1)
    assert balance_of(account, claim, later(60)) == Balance(KEY, claim.configured, NOTHING, Amount(20), 60)
    assert balance_of(Account(Amount(40)), claim, NOW) == Balance(KEY, claim.configured, Amount(40), NOTHING, 60)
    [(_, changes)] = [granted(reserve({KEY: account}, hold(claim, fixed=Amount(5)), later(90)))]
    assert changes[KEY] == Account(NOTHING, Amount(25), later(90), period=1)


# --- holds --------------------------------------------------------------------------------------------------------------


def test_a_hold_is_taken_on_every_account_or_on_none() -> None:
    claims = [Claim(S, Limits(100)), Claim(KEY, Limits(50))]
    outcome, changes = granted(reserve({}, hold(*claims, fixed=Amount(50, 7, 1)), NOW))
    assert changes == {key: Account(held=Amount(50, 7, 1)) for key in (S, KEY)}
    assert [one.held for one in outcome.balances] == [Amount(50, 7, 1)] * 2
    refusal = reserve({}, hold(*claims, fixed=Amount(51)), NOW)
    assert refusal == Refused(Balance(KEY, Limits(50), NOTHING, NOTHING), "tokens", 51, is_busy=False)


def test_refusal_is_busy_if_running_calls_hold_the_rest() -> None:
    for account, is_busy in ((Account(Amount(60), Amount(30)), True), (Account(Amount(90)), False)):
        refusal = reserve({S: account}, hold(Claim(S, Limits(100)), fixed=Amount(20)), NOW)
        assert isinstance(refusal, Refused)
        assert refusal.is_busy is is_busy


def test_granted_units_are_limited_by_every_account() -> None:
    claims = [Claim(S, Limits(100)), Claim(KEY, Limits(nano_usd=70))]
    asked = hold(*claims, fixed=Amount(10, 10), unit=Amount(2, 10), least=1, most=50)
    assert granted(reserve({}, asked, NOW))[0].units == 6
    assert granted(reserve({}, replace(asked, claims=tuple(claims[:1])), NOW))[0].units == 45
    assert granted(reserve({}, replace(asked, claims=()), NOW)) == (Granted(50, ()), {})


def test_rate_account_counts_requests_only() -> None:
    claims = [Claim(S), Claim(RATE, Limits(calls=2, window=60))]
    asked = hold(*claims, fixed=Amount(10, 10, 1), unit=Amount(1), most=5)
    _, accounts = granted(reserve({}, asked, NOW))
    assert accounts[RATE] == Account(Amount(calls=1), opened=NOW)
    outcome, more = extend(accounts, asked, 5, NOW)
    assert (outcome.units, more[RATE], more[S].held.tokens) == (5, accounts[RATE], 20)
    assert RATE not in settle(accounts, [S, RATE], Amount(15, 10, 1), Amount(3))
    assert RATE not in correct(accounts, [S, RATE], Amount(15), Amount(3), periods(accounts, [S]))
    assert RATE not in periods(accounts, [S, RATE])


def test_a_hold_is_extended_by_what_every_account_has_left() -> None:
    asked = hold(Claim(S, Limits(30)), Claim(KEY), fixed=Amount(10), unit=Amount(2), most=5)
    _, accounts = granted(reserve({}, asked, NOW))
    outcome, accounts = extend(accounts, asked, 9, NOW)
    assert outcome.units == 5
    assert [account.held for account in accounts.values()] == [Amount(30)] * 2
    outcome, again = extend(accounts, asked, 9, NOW)
    assert (outcome.units, again) == (0, accounts)
    outcome, _ = extend({}, hold(Claim(S), unit=Amount(1)), 9, NOW)
    assert outcome.units == 9


def test_settling_replaces_hold_by_spent() -> None:
    account = Account(Amount(1), Amount(50), NOW, {"tokens": 9}, period=3)
    assert settle({S: account}, [S], Amount(20), Amount(30, 4)) == {
        S: replace(account, used=Amount(31, 4), held=Amount(30))
    }
    assert settle({}, [S], Amount(20), NOTHING) == {S: EMPTY}
    assert correct({S: account}, [S], Amount(1), Amount(7), {S: 3}) == {S: replace(account, used=Amount(7))}
    assert correct({}, [S], Amount(5), Amount(7), {S: 0}, "a") == {S: Account(Amount(7))}


def in_next_window(account: Account) -> Account:
    hourly = hold(Claim(S, Limits(window=60)), fixed=NOTHING)
    _, first = granted(reserve({S: account}, hourly, NOW))
    _, second = granted(reserve(first, hourly, later(60)))
    return second[S]


@pytest.mark.parametrize("begun", [with_new_period, after_deletion, in_next_window])
def test_correction_subtracts_only_in_the_same_period(
    begun: Callable[[Account], Account],
) -> None:
    orphaned = settle({S: EMPTY, KEY: EMPTY}, [S, KEY], NOTHING, Amount(10))
    charged = periods(orphaned, [S, KEY])
    accounts = settle(orphaned | {S: begun(orphaned[S])}, [S, KEY], NOTHING, Amount(20))
    found = correct(accounts, [S, KEY, PARENT], Amount(10), Amount(3), charged)
    assert [found[key].used for key in (S, KEY, PARENT)] == [Amount(23), Amount(23), Amount(3)]


def test_holds_of_running_calls_survive_deletion() -> None:
    account = Account(Amount(1), Amount(50), NOW, {"tokens": 9}, period=3)
    assert with_new_period(account) == replace(account, used=NOTHING, period=4)
    assert after_deletion(account) == Account(held=Amount(50), period=4)


# --- orphaned calls ---------------------------------------------------------------------------------------------------------


def record(charge: Charge | None) -> CallRecord:
    return CallRecord(
        "h", "h", SessionKey("alice", "s"), False, 0.0, "chat", "chat", "openai", "m", None, True, 0, ORPHANED, None,
        None, (), charge, 0.0, None, 0.0, 0, 0, accounts=(S,), spent=Amount(7, 1_000, 1),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("cost", "unit", "expected_cost", "expected_spent"),
    [
        (Decimal("0.1"), Decimal("0.0000005"), Decimal("0.100021"), Amount(49, 22_000, 1)),
        (None, None, None, Amount(49, 1_000, 1)),
        (Decimal("0.1"), None, Decimal("0.1"), Amount(49, 1_000, 1)),
    ],
)
def test_orphaned_call_is_charged_for_input_and_delivered_output(
    cost: Decimal | None, unit: Decimal | None, expected_cost: Decimal | None, expected_spent: Amount
) -> None:
    opened = OpenHold(hold(), record(Charge(Usage.of(7, 0), "estimated", cost)), noted=42, unit_usd=unit)
    orphaned = opened.as_orphaned()
    assert orphaned.charge == Charge(Usage.of(7, 42), "estimated", expected_cost)
    assert (orphaned.spent, orphaned.outcome) == (expected_spent, ORPHANED)


def test_orphaned_call_without_charge_is_not_charged() -> None:
    assert OpenHold(hold(), record(None), noted=42).as_orphaned() == record(None)


def test_totals_without_a_call_are_those_before_it_and_never_below_zero() -> None:
    charge = Charge(Usage(10, 5, 15, 4, 3, 2), "estimated", Decimal("0.5"))
    before = Totals().add(Charge(Usage.of(3, 4), "provider", None))
    assert before.add(charge, 9).without(charge, 9) == before
    assert Totals().without(charge, 9) == Totals()


# --- laws ---------------------------------------------------------------------------------------------------------------

small = st.integers(0, 30)
counts = small | st.sampled_from([2**52, MOST - 1, MOST])
amounts = st.builds(Amount, counts, counts, counts)
limits = st.none() | counts
all_limits = st.builds(Limits, limits, limits, limits, st.none() | st.sampled_from([1.0, 60.0]))
keys = st.sampled_from([S, KEY, RATE, AccountKey("session", "alice", "parent")])
claims = st.builds(Claim, keys, all_limits, st.builds(Limits, limits, limits, limits))
decisions: st.SearchStrategy[dict[Dimension, int | None]] = st.dictionaries(st.sampled_from(DIMENSIONS), limits)
moments = st.builds(Moment, st.floats(0, 200), st.floats(0, 200), st.sampled_from(["", "b"]))
accounts = st.dictionaries(keys, st.builds(Account, amounts, amounts, st.none() | moments, decisions))


@st.composite
def holds(draw: st.DrawFn) -> Hold:
    found = draw(st.lists(claims, max_size=3, unique_by=lambda one: one.key))
    least, more = draw(small), draw(small)
    unit = draw(st.builds(Amount, small, small, st.just(0)))
    return Hold("h", tuple(found), draw(amounts), unit, least, least + more)


@law
@given(accounts, holds(), moments)
def test_law_a_hold_is_granted_only_while_used_and_held_and_asked_stay_within_every_limit(
    before: dict[AccountKey, Account], asked: Hold, now: Moment
) -> None:
    # Amounts are capped at `MOST`, so above it more units do not change the amount.
    assume(not asked.most or MOST not in asked.amount(asked.most))
    outcome = reserve(before, asked, now)
    balance = {one.key: balance_of(before.get(one.key, EMPTY), one, now) for one in asked.claims}
    needed = asked.amount(asked.least)

    def room(key: AccountKey, amount: Amount) -> bool:
        one = balance[key]
        return all(
            one.limits.of(name) is None or not asked_for or used + held + asked_for <= (one.limits.of(name) or 0)
            for name, used, held, asked_for in zip(DIMENSIONS, one.used, one.held, amount, strict=True)
        )

    if isinstance(outcome, Refused):
        assert outcome.balance == balance[outcome.balance.key]
        assert not room(outcome.balance.key, needed)
        assert outcome.needed == needed[DIMENSIONS.index(outcome.dimension)]
        return
    answer, changes = outcome
    assert asked.least <= answer.units <= asked.most
    assert all(room(key, asked.amount(answer.units)) for key in balance)
    if answer.units < asked.most:
        assert not all(room(key, asked.amount(answer.units + 1)) for key in balance)
    assert set(changes) == set(balance)
    for one, after in zip(asked.claims, answer.balances, strict=True):
        assert after == balance_of(changes[one.key], one, now)


@law
@given(accounts, holds(), moments, small)
def test_law_an_extension_stays_within_every_limit_that_was_kept_until_then(
    before: dict[AccountKey, Account], asked: Hold, now: Moment, units: int
) -> None:
    answer, changes = extend(before, asked, units, now)
    assert 0 <= answer.units <= units
    more = NOTHING.plus(asked.unit, answer.units)
    for one in asked.claims:
        was, now_is = balance_of(before.get(one.key, EMPTY), one, now), balance_of(changes[one.key], one, now)
        assert now_is.used == was.used
        if one.key.kind != "rate":
            assert now_is.held == was.held.plus(more)
            assert all(left >= more[at] for at, name in enumerate(DIMENSIONS) if (left := was.left(name)) is not None)


@law
@given(st.lists(st.tuples(holds(), st.builds(Amount, small, small, small)), max_size=6), st.randoms())
def test_law_any_order_of_settling_ends_in_the_same_accounts_with_nothing_held(
    calls: Sequence[tuple[Hold, Amount]], chance: Any
) -> None:
    unlimited = [
        (
            replace(
                asked,
                fixed=asked.fixed._replace(tokens=1, nano_usd=2, calls=3),
                claims=tuple(Claim(one.key) for one in asked.claims),
            ),
            spent,
        )
        for asked, spent in calls
    ]

    def run(order: Sequence[tuple[Hold, Amount]]) -> dict[AccountKey, Account]:
        found: dict[AccountKey, Account] = {}
        for asked, _ in unlimited:
            found |= granted(reserve(found, asked, NOW))[1]
        for asked, spent in order:
            found |= settle(found, [one.key for one in asked.claims], asked.amount(asked.most), spent)
        return found

    shuffled = list(unlimited)
    chance.shuffle(shuffled)
    ends = run(unlimited)
    assert run(shuffled) == ends
    assert all(account.held == NOTHING for account in ends.values())
