"""Test how long a response may be: what is reserved, and which output limit is sent."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.ledger.arithmetic import (
    MOST,
    Account,
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
    TokenRate,
)
from gateway.core.ledger.output_limit import (
    DEFAULT_OUTPUT,
    STREAM_STEP,
    CallNeed,
    LimitToSend,
    OutputAsked,
    affordable_input,
    hold_for,
    limit_of_hold,
    limit_of_step,
    limit_to_set,
    longest_output,
    output_room,
    output_to_reserve,
    wanted_output,
    widest_room,
)
from gateway.core.ledger.session_key import SessionKey

SESSION = SessionKey("alice", "s")
NOW = Moment(1_000.0, 50.0)


def balance(limits: Limits | None = None, used: int = 0, held: int = 0, **fields: Any) -> Balance:
    amounts = Amount(used, used, used), Amount(held, held, held)
    return Balance(SESSION.account, limits or Limits(tokens=1_000), *amounts, **fields)


def claim(limits: Limits | None = None) -> Claim:
    return Claim(SESSION.account, limits or Limits(tokens=1_000))


# --- what the call asks for -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "step", "sets", "wants"),
    [
        (OutputAsked(), None, None, None),
        (OutputAsked(900), None, None, 900),
        (OutputAsked(), 500, 500, 500),
        (OutputAsked(900), 500, 500, 500),
        (OutputAsked(300), 500, None, 300),
        (OutputAsked(900, least=600), 500, 600, 600),
        (OutputAsked(900, least=900), 500, None, 900),
    ],
)
def test_a_step_lowers_the_limit_of_a_call_but_not_below_what_it_needs(
    asked: OutputAsked, step: int | None, sets: int | None, wants: int | None
) -> None:
    assert (limit_of_step(asked, step), wanted_output(asked, step)) == (sets, wants)


def test_the_default_of_the_api_is_reserved_if_nothing_else_limits_the_output() -> None:
    assert output_to_reserve(OutputAsked(default=16), None) == 16
    assert output_to_reserve(OutputAsked(), None) is None
    assert output_to_reserve(OutputAsked(default=16), 9) == 9
    assert output_to_reserve(OutputAsked(10**30), None) == MOST


# --- the limit that is sent -------------------------------------------------------------------------------------------


def test_the_first_reason_decides_the_limit_that_is_sent() -> None:
    call = OutputAsked(4_000)
    assert limit_to_set(call, budget=900, step=500, held=300) == (900, "set by the budget")
    assert limit_to_set(call, budget=None, step=500, held=300) == (500, "set by the step")
    assert limit_to_set(call, budget=None, step=None, held=300) == (300, "set by the hold")
    assert limit_to_set(call, budget=None, step=None, held=None) is None
    assert limit_to_set(OutputAsked(is_none=True), budget=900, step=500, held=300) is None


def test_the_limit_that_is_sent_is_one_that_the_provider_accepts() -> None:
    limit, free = LimitToSend(900, "set by the budget"), OutputAsked()
    assert limit.within(free, model=None, refused=None, room=None) == limit
    assert limit.within(free, model=800, refused=None, room=None).tokens == 800
    assert limit.within(free, model=800, refused=700, room=None).tokens == 700
    assert limit.within(free, model=800, refused=700, room=600) == (600, "set by the budget")
    assert limit.within(OutputAsked(4_000), model=800, refused=None, room=600).tokens == 800, "its own limit"


def test_limits_of_several_models_count_only_if_all_are_known() -> None:
    assert (longest_output([400, 900]), longest_output([400, None]), longest_output([])) == (900, None, None)
    assert (widest_room([500, 900], 100), widest_room([500, None], 100), widest_room([500, 90], 100)) == (
        800, None, None,
    )  # fmt: skip


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
    assert hold(CallNeed(100), clamp=False).least == 225


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


def test_a_closing_call_holds_all_that_is_left_and_is_lowered_to_it() -> None:
    left = (balance(Limits(tokens=40_001)),)
    assert hold(CallNeed(0, is_last=True), left).most == DEFAULT_OUTPUT
    assert hold(CallNeed(0, is_last=True, model_output=30_000), left).most == 30_000
    assert hold(CallNeed(0, is_last=True, model_output=30_000, room=700), left).most == 700
    assert hold(CallNeed(0, is_last=True, output=90_000), left, clamp=False).least == 10_000


def usual(tokens: int, *, grows: bool = True) -> CallNeed:
    return CallNeed(100, can_grow=grows, usual_output=tokens)


def test_a_stream_of_usual_length_holds_a_little_more_than_that() -> None:
    rich = (balance(Limits(tokens=100_000)),)
    assert [hold(usual(tokens), rich).most for tokens in (1, 100, 400, 1_600, 9_000)] == [128, 145, 482, 1_832, 2_048]
    assert [usual(tokens).step for tokens in (1, 400, 9_000)] == [32, 120, 2_048]
    assert hold(usual(100, grows=False), rich).most == DEFAULT_OUTPUT, "a hold that cannot grow is not smaller"
    assert hold(CallNeed(100, output=900, can_grow=True, usual_output=100), rich).most == 900


@pytest.mark.parametrize(
    ("limit", "held", "least", "most"),
    [
        (6_000, 0, 145, 145),
        (6_000, 3_000, 145, 145),
        (6_000, 4_280, 145, 145),  # 1,475 stay free of the 5,900 that are left without the others
        (6_000, 4_281, 1_620, 1_620),  # refused until these are free
        (250, 0, 145, 145),
        (250, 10, 150, 150),
        (110, 0, 16, 145),
    ],
)
def test_a_stream_of_usual_length_waits_until_a_share_stays_free(limit: int, held: int, least: int, most: int) -> None:
    made = hold(usual(100), (balance(Limits(tokens=limit), held=held),))
    assert (made.least, made.most) == (least, most)


def test_a_stream_of_usual_length_may_become_as_long_as_others_may_leave_room_for() -> None:
    need, limits = usual(100), Limits(tokens=6_000)
    made = hold_for("h", (claim(limits),), (balance(limits, used=1_000, held=2_000),), need, clamp=True)
    outcome = reserve({SESSION.account: Account(Amount(1_000), Amount(2_000))}, made, NOW)
    assert not isinstance(outcome, Refused)
    assert outcome[0].units == 145
    assert limit_of_hold(made, outcome[0], need) == 4_900


@given(left=st.integers(1, 10**4), others=st.integers(0, 10**4), tokens=st.integers(1, 9_000))
def test_law_a_stream_of_usual_length_is_refused_for_good_only_if_it_could_never_be_useful(
    left: int, others: int, tokens: int
) -> None:
    limits, need = Limits(tokens=left + others), usual(tokens)
    made = hold_for("h", (claim(limits),), (balance(limits, held=others),), need, clamp=True)
    outcome = reserve({SESSION.account: Account(held=Amount(others))}, made, NOW)
    assert 0 <= made.least <= made.most
    if isinstance(outcome, Refused):
        assert outcome.is_busy == (left + others >= 100 + 16)
    else:
        assert 100 + outcome[0].units <= left


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
    assert limit_of_hold(made, outcome, need) == limit


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
    limit = limit_of_hold(made, outcome[0], need)
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
