"""Test which accounts a call is charged to, and how much is held for it."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.ledger.arithmetic import (
    MOST,
    Account,
    AccountKey,
    Amount,
    Balance,
    Claim,
    Granted,
    Limits,
    Moment,
    Refused,
    reserve,
)
from gateway.core.ledger.charging import (
    DEFAULT_OUTPUT,
    STREAM_STEP,
    BudgetPolicy,
    CallNeed,
    ChargedAccounts,
    KeyLimits,
    TokenRate,
    accounts_of,
    affordable_input,
    budgets_in,
    claims_of,
    dearest,
    hold_for,
    limit_to_set,
    limits_output,
    output_room,
    rate_of,
    remaining_fraction,
    spent_by,
)
from gateway.core.ledger.session_key import SessionKey
from gateway.core.pricing import Price, Rates, price_per_million
from gateway.core.usage import Charge, Usage

SESSION = SessionKey("alice", "s")
POLICY = BudgetPolicy(session=Limits(tokens=1_000))
NOW = Moment(1_000.0, 50.0)


def balance(limits: Limits | None = None, used: int = 0, held: int = 0, **fields: Any) -> Balance:
    amounts = Amount(used, used, used), Amount(held, held, held)
    return Balance(SESSION.account, limits or Limits(tokens=1_000), *amounts, **fields)


def claim(limits: Limits | None = None) -> Claim:
    return Claim(SESSION.account, limits or Limits(tokens=1_000))


# --- who is charged -------------------------------------------------------------------------------------------------------


def test_a_call_is_charged_to_its_key_its_parents_from_the_top_and_its_session() -> None:
    parents = (SessionKey("alice", "near"), SessionKey("alice", "far"))
    key = KeyLimits(Limits(tokens=9), rpm=5)
    claims = claims_of(POLICY, ChargedAccounts("alice", key, SESSION, parents, Limits(tokens=7)))
    assert [(one.key.kind, one.key.id) for one in claims] == [
        ("rate", ""), ("key", ""), ("session", "far"), ("session", "near"), ("session", "s"),
    ]  # fmt: skip
    assert claims[0].configured == Limits(calls=5, window_s=60)
    assert claims[-1].declared == Limits(tokens=7)
    assert claims[2].declared.is_none, "what a call declares is for its own session"
    assert [key.kind for key in accounts_of(claims)] == ["key", "session", "session", "session"]


def test_a_key_without_a_budget_has_no_account() -> None:
    assert claims_of(POLICY, ChargedAccounts("alice")) == ()


# --- counted amounts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weight", "tokens"), [(1.0, 110), (0.0, 30), (0.1, 38), (0.11, 39)], ids=["full", "free", "price", "rounded up"]
)
def test_cached_tokens_count_as_configured(weight: float, tokens: int) -> None:
    charge = Charge(Usage(100, 10, 110, cache_read_tokens=80), "provider", Decimal("0.0000000001"))
    assert spent_by(charge, weight) == Amount(tokens, 1, 1)


def test_unbilled_call_counts_nothing() -> None:
    assert spent_by(None, 1.0) == Amount()


def test_cached_tokens_beyond_input_give_no_credit() -> None:
    charge = Charge(Usage(100, 10, 110, cache_read_tokens=500), "provider", None)
    assert spent_by(charge, 0.0) == Amount(10, 0, 1)
    assert spent_by(charge, 0.1) == Amount(20, 0, 1)


def test_spent_amount_is_capped() -> None:
    assert spent_by(Charge(Usage(1, 1, MOST + 5), "provider", Decimal(10) ** 9), 1.0) == Amount(MOST, MOST, 1)


def test_call_is_held_at_its_highest_possible_rate() -> None:
    price = price_per_million(
        input=Decimal(1), output=Decimal(4), cache_read=Decimal("0.1"), cache_write=Decimal("1.25")
    )
    assert rate_of(price, 10, None) == TokenRate(Decimal("0.00000125"), Decimal("0.000004"))
    assert rate_of(None, 10, None) is None
    hourly = Price(Rates(Decimal(1), Decimal(4), cache_write=Decimal("1.25"), cache_write_1h=Decimal(2)), {})
    assert rate_of(hourly, 10, None) == TokenRate(Decimal("1.25"), Decimal(4))
    assert rate_of(hourly, 10, None, caches_1h=True) == TokenRate(Decimal(2), Decimal(4))
    assert rate_of(hourly, 10, "flex") == rate_of(hourly, 10, None)
    assert rate_of(hourly, 10, "priority") is None, "nobody knows what it costs"


def test_fallback_models_are_held_at_the_highest_rate() -> None:
    rates = [TokenRate(Decimal(1), Decimal(20)), None, TokenRate(Decimal(2), Decimal(10))]
    assert dearest(rates) == TokenRate(Decimal(2), Decimal(20))
    assert dearest([None]) is None


# --- holds ---------------------------------------------------------------------------------------------------------


def hold(need: CallNeed, balances: tuple[Balance, ...] = (), *, clamp: bool = True) -> Any:
    return hold_for("h", (claim(),), balances or (balance(),), need, clamp=clamp)


def test_input_and_output_limit_of_each_choice_are_held() -> None:
    made = hold(CallNeed(100, output=50, choices=3, rate=TokenRate(Decimal("0.001"), Decimal("0.002"))))
    assert made.fixed == Amount(100, 100_000_000, 1)
    assert made.unit == Amount(3, 6_000_000)
    assert (made.least, made.most) == (16, 50)
    assert hold(CallNeed(0, output=9_000, can_grow=True), (balance(Limits(tokens=10**6)),)).most == 9_000, (
        "of a stream too"
    )


def test_without_clamping_output_limit_is_held_whole_or_refused() -> None:
    assert hold(CallNeed(100, output=50), clamp=False).least == 50
    assert hold(CallNeed(100), clamp=False).least == 16


def test_short_output_limit_is_held_whole() -> None:
    assert (hold(CallNeed(1, output=3)).least, hold(CallNeed(1, output=3)).most) == (3, 3)


def test_hold_is_at_least_the_smallest_accepted_limit() -> None:
    assert hold(CallNeed(100, output=32_000, least_output=1_025)).least == 1_025
    assert hold(CallNeed(100, output=900, least_output=1_025)).least == 900
    assert hold(CallNeed(100, output=400, least_output=50), (balance(held=5),)).least == 100


@pytest.mark.parametrize(
    ("output", "held", "limit", "least"),
    [
        (400, Amount(5), 1_000, 100),
        (4_000, Amount(500), 1_000, 225),  # of what would be left if nothing was held
        (400, Amount(5), 140, 16),
        (3, Amount(5), 1_000, 3),
        (400, Amount(0, 0, 1), 1_000, 100),
    ],
)
def test_output_is_not_shortened_to_a_useless_part_while_others_hold(
    output: int, held: Amount, limit: int, least: int
) -> None:
    accounts = (balance(Limits()), Balance(SESSION.account, Limits(tokens=limit), Amount(), held))
    assert hold(CallNeed(100, output=output), accounts).least == least


def test_hold_is_capped_at_the_models_output_limit() -> None:
    assert hold(CallNeed(1, output=10**9, model_output=4_000)).most == 4_000
    assert hold(CallNeed(1, output=50, model_output=4_000)).most == 50


def test_call_without_output_tokens_holds_only_input() -> None:
    made = hold(CallNeed(0, output=50, has_output=False))
    assert (made.fixed, made.unit, made.most) == (Amount(1, 0, 1), Amount(), 0)


def test_unlimited_output_holds_a_share_of_what_is_left() -> None:
    rich = (balance(Limits(tokens=100_000)),)
    assert hold(CallNeed(0), rich).most == DEFAULT_OUTPUT
    assert hold(CallNeed(0, model_output=8_000), rich).most == 8_000
    assert hold(CallNeed(0), (balance(Limits(tokens=40_001)),)).most == 10_000
    assert hold(CallNeed(0), (balance(Limits(tokens=6_000)),)).most == 4_096
    assert hold(CallNeed(0), (*rich, balance(Limits(tokens=40_001)))).most == 10_000, "of the least that is left"
    assert hold(CallNeed(0, can_grow=True), rich).most == STREAM_STEP
    assert hold(CallNeed(0, can_grow=True, model_output=300), rich).most == 300
    assert hold(CallNeed(0, room=700), rich).most == 700
    assert hold(CallNeed(0, model_output=20_000, room=700), (balance(Limits(tokens=60_000)),)).most == 700
    assert hold(CallNeed(0, model_output=8_000, room=700), rich).most == 8_000, "no limit is set"
    assert hold(CallNeed(0, output=900, room=700), rich).most == 900, "it is the call's own"


def test_window_room_is_what_input_leaves_if_useful() -> None:
    assert (output_room(8_192, 1_000), output_room(116, 100)) == (7_192, 16)
    assert (output_room(None, 5), output_room(115, 100), output_room(100, 2_000)) == (None, None, None)


def granted(need: CallNeed, limits: Limits, used: int = 0) -> tuple[Any, Granted]:
    account = claim(limits)
    made = hold_for("h", (account,), (balance(limits, used),), need, clamp=True)
    outcome = reserve({SESSION.account: Account(used=Amount(used))}, made, NOW)
    assert not isinstance(outcome, Refused)
    return made, outcome[0]


@pytest.mark.parametrize(
    ("need", "limits", "limit"),
    [
        (CallNeed(100, output=50), Limits(tokens=1_000), None),
        (CallNeed(100, output=5_000), Limits(tokens=1_000), 900),
        (CallNeed(100, output=5_000), Limits(), None),
        (CallNeed(100), Limits(), None),
        (CallNeed(100), Limits(tokens=1_000), 900),
        (CallNeed(100, model_output=200), Limits(tokens=1_000), None),
        (CallNeed(100, model_output=2_000), Limits(tokens=1_000), 900),
        (CallNeed(100, can_grow=True), Limits(tokens=1_000), 900),
        (CallNeed(100, can_grow=True), Limits(tokens=5_000), 4_900),
        (CallNeed(100, can_grow=True), Limits(tokens=50_000), None),
        (CallNeed(100, can_grow=True, model_output=3_000), Limits(tokens=5_000), None),
        (CallNeed(100, can_grow=True, model_output=3_000), Limits(tokens=3_100), None),
        (CallNeed(100, has_output=False), Limits(tokens=1_000), None),
        (CallNeed(100, output=5_000), Limits(calls=3), None),
        (CallNeed(100, output=5_000, model_output=200), Limits(calls=3), None),
        (CallNeed(100), Limits(calls=3), None),
        (CallNeed(100), Limits(nano_usd=3), DEFAULT_OUTPUT),
        # Only the room in the window bounds the limit.
        (CallNeed(100, room=500), Limits(tokens=1_000), 500),
        (CallNeed(100, room=950), Limits(tokens=1_000), 900),
        (CallNeed(100, model_output=2_000, room=500), Limits(tokens=1_000), 500),
        (CallNeed(100, model_output=200, room=150), Limits(tokens=1_000), None),
        (CallNeed(100, output=5_000, room=500), Limits(tokens=1_000), 900),
        (CallNeed(100, can_grow=True, room=500), Limits(tokens=1_000), 500),
        (CallNeed(100, can_grow=True, room=500), Limits(tokens=50_000), None),
    ],
)
def test_output_limit_is_set_only_if_the_budget_is_the_bound(need: CallNeed, limits: Limits, limit: int | None) -> None:
    made, outcome = granted(need, limits)
    assert limit_to_set(made, outcome, need) == limit


@given(
    left=st.integers(16, 10**6),
    others=st.integers(0, 1_000),
    need=st.builds(
        CallNeed,
        st.integers(0, 10**6),
        output=st.one_of(st.none(), st.integers(1, 10**7)),
        choices=st.integers(1, 9),
        can_grow=st.booleans(),
        room=st.one_of(st.none(), st.integers(16, 10**6)),
    ),
)
def test_output_limit_keeps_call_within_budget(left: int, others: int, need: CallNeed) -> None:
    limits = Limits(tokens=left + others)
    made = hold_for("h", (claim(limits),), (balance(limits, held=others),), need, clamp=True)
    outcome = reserve({SESSION.account: Account(held=Amount(others))}, made, NOW)
    if isinstance(outcome, Refused):
        return
    limit = limit_to_set(made, outcome[0], need)
    sent = limit if limit is not None else need.output if need.output is not None else outcome[0].units
    assert max(1, need.input_tokens) + sent * need.choices <= left


# --- affordable input -------------------------------------------------------------------------------------------------------


def test_affordable_input_leaves_room_for_output() -> None:
    assert affordable_input([balance()], None, None) == 750
    assert affordable_input([balance()], 100, None) == 900
    assert affordable_input([balance(used=990)], 100, None) == 8
    assert affordable_input([balance(used=2_000)], 100, None) == 1
    assert affordable_input([balance(Limits(calls=5))], 100, None) is None
    assert affordable_input([balance(), balance(used=500)], 100, None) == 400, "of all budgets"


def test_affordable_input_costs_at_most_what_is_left() -> None:
    dollar = balance(Limits(nano_usd=10**9))
    assert affordable_input([dollar], 100, TokenRate(Decimal("0.001"), Decimal("0.001"))) == 900
    assert affordable_input([dollar], None, TokenRate(Decimal("0.001"), Decimal("0.001"))) == 750
    assert affordable_input([balance(), dollar], 100, TokenRate(Decimal("0.01"), Decimal("0.001"))) == 90
    assert affordable_input([balance()], 100, TokenRate(Decimal("0.001"), Decimal("0.001"))) == 900
    assert affordable_input([dollar], 100, None) is None
    assert affordable_input([dollar], 100, TokenRate(Decimal(0), Decimal(0))) is None


def test_remaining_fraction_ignores_holds() -> None:
    assert remaining_fraction([balance(used=100, held=800), balance(Limits(tokens=200), used=150)]) == 0.25
    assert remaining_fraction([balance(used=5_000)]) == 0
    assert remaining_fraction([]) == 1
    assert budgets_in([balance(Limits(calls=1))])
    rate = Balance(AccountKey("rate", "alice"), Limits(calls=1), Amount(), Amount())
    assert not budgets_in([rate]), "the count of requests is no budget"
    assert not limits_output([balance(Limits(calls=1))])
