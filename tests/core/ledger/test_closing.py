from __future__ import annotations

from dataclasses import replace

import pytest

from gateway.core.ledger.arithmetic import (
    EMPTY,
    NOTHING,
    Account,
    AccountKey,
    Amount,
    Balance,
    Claim,
    Granted,
    Hold,
    Limits,
    Moment,
    Refused,
    after_deletion,
    balance_of,
    reserve,
    settle,
    with_new_period,
)
from gateway.core.ledger.closing import CLOSING_MESSAGE, ClosingPolicy, closing_balances, closing_claims

KEY, PARENT = AccountKey("session", "alice", "s"), AccountKey("session", "alice", "p")
NOW = Moment(0.0, 0.0)
CLAIM = Claim(KEY, Limits(tokens=100, window=60.0), closing_share=0.2)
CLOSING = replace(CLAIM, is_closing=True)


def take(account: Account, tokens: int, claim: Claim = CLAIM, name: str = "a", now: Moment = NOW) -> Account | Refused:
    """Return the account after a hold, or its refusal."""
    outcome = reserve({KEY: account}, Hold(name, (claim,), Amount(tokens, 0, 1)), now)
    return outcome if isinstance(outcome, Refused) else outcome[1][KEY]


def taken(account: Account, tokens: int, claim: Claim = CLAIM, name: str = "a", now: Moment = NOW) -> Account:
    after = take(account, tokens, claim, name, now)
    assert isinstance(after, Account)
    return after


def test_only_a_closing_call_may_use_what_is_kept() -> None:
    assert isinstance(take(EMPTY, 81), Refused)
    assert taken(EMPTY, 80).held == Amount(80, 0, 1)
    assert taken(EMPTY, 100, CLOSING).held == Amount(100, 0, 1)
    assert isinstance(take(EMPTY, 101, CLOSING), Refused)


@pytest.mark.parametrize("claim", [CLAIM, CLOSING])
def test_after_a_closing_call_every_call_is_refused_permanently(claim: Claim) -> None:
    account = taken(EMPTY, 10, CLOSING)
    refused = take(account, 1, claim, "b")
    assert isinstance(refused, Refused)
    assert (refused.is_busy, refused.balance.closing) == (False, "a 100 -1 -1")
    spent = settle({KEY: account}, [KEY], Amount(10, 0, 1), Amount(3, 0, 1), "a")[KEY]
    assert isinstance(take(spent, 1, claim, "b"), Refused)


def test_a_call_that_uses_nothing_of_the_limited_units_is_not_refused() -> None:
    claim = replace(CLAIM, configured=Limits(nano_usd=100))
    account = taken(EMPTY, 10, replace(claim, is_closing=True))
    assert taken(account, 5, claim, "free").held.tokens == 15


def test_a_closing_call_that_cost_nothing_can_be_made_again() -> None:
    account = taken(EMPTY, 10, CLOSING)
    failed = settle({KEY: account}, [KEY], Amount(10, 0, 1), NOTHING, "a")[KEY]
    assert taken(failed, 10, CLOSING, "b").closing == "b 100 -1 -1"
    other = settle({KEY: account}, [KEY], NOTHING, NOTHING, "c")[KEY]
    assert other.closing == account.closing, "only the closing call itself reopens the account"


@pytest.mark.parametrize("change", [with_new_period, after_deletion])
def test_a_reset_or_deletion_reopens_the_account(change: object) -> None:
    assert callable(change)
    account = settle({KEY: taken(EMPTY, 10, CLOSING)}, [KEY], Amount(10, 0, 1), Amount(10, 0, 1), "a")[KEY]
    assert taken(change(account), 10, name="b").closing == ""


def test_other_limits_and_a_new_window_reopen_the_account() -> None:
    account = settle({KEY: taken(EMPTY, 10, CLOSING)}, [KEY], Amount(10, 0, 1), Amount(10, 0, 1), "a")[KEY]
    assert isinstance(take(replace(account, overrides={"tokens": 200}), 10, name="b"), Account)
    assert isinstance(take(account, 10, name="b", now=Moment(61.0, 61.0)), Account)
    assert isinstance(take(account, 10, replace(CLAIM, declared=Limits(tokens=50)), "b"), Refused), "a client cannot"


def test_a_declared_budget_closes_the_account_only_for_calls_that_declare_the_same() -> None:
    declared = replace(CLAIM, declared=Limits(tokens=50))
    account = taken(EMPTY, 45, replace(declared, is_closing=True))
    spent = settle({KEY: account}, [KEY], Amount(45, 0, 1), Amount(20, 0, 1), "a")[KEY]
    assert isinstance(take(spent, 1, declared, "b"), Refused)
    assert isinstance(take(spent, 1, replace(CLAIM, declared=Limits(tokens=60)), "b"), Account)
    assert isinstance(take(spent, 1, CLAIM, "b"), Account)


def test_without_the_setting_a_mark_has_no_effect() -> None:
    account = taken(EMPTY, 10, CLOSING)
    assert isinstance(take(account, 10, replace(CLAIM, closing_share=0.0), "b"), Account)


def test_a_repeated_reservation_of_the_closing_call_is_not_refused_by_its_own_mark() -> None:
    account = taken(EMPTY, 10, CLOSING)
    assert isinstance(take(account, 10, CLOSING), Account)


def test_units_are_granted_up_to_what_is_kept() -> None:
    hold = Hold("a", (CLAIM,), Amount(10, 0, 1), Amount(1), 1, 500)
    outcome = reserve({}, hold, NOW)
    assert not isinstance(outcome, Refused)
    assert outcome[0].units == 70
    closing = reserve({}, replace(hold, claims=(CLOSING,)), NOW)
    assert not isinstance(closing, Refused)
    assert closing[0] == Granted(90, (balance_of(closing[1][KEY], CLOSING, NOW),))


def test_what_is_kept_is_rounded_up_and_shown_as_left() -> None:
    balance = balance_of(Account(used=Amount(calls=1)), Claim(KEY, Limits(calls=5), closing_share=0.1), NOW)
    assert (balance.left("calls"), balance.free("calls"), balance.kept("calls")) == (4, 3, 1)
    assert (balance.left("tokens"), balance.free("tokens"), balance.kept("tokens")) == (None, None, 0)


def test_a_closing_call_uses_what_is_kept_of_its_own_session_only() -> None:
    parent = replace(CLAIM, key=PARENT)
    own, other = closing_claims((CLAIM, parent), KEY)
    assert (own.is_closing, other.is_closing) == (True, False)
    balances = tuple(Balance(key, Limits(100), NOTHING, NOTHING, closing_share=0.2) for key in (KEY, PARENT))
    assert [one.kept("tokens") for one in closing_balances(balances, KEY)] == [0, 20]


def test_the_instruction_says_what_is_left_within_its_bound() -> None:
    assert ClosingPolicy(0.1, "Left: {tokens} of {tokens}.").instruction(7) == "Left: 7 of 7."
    assert "{" not in ClosingPolicy(0.1).instruction(10**12)
    assert ClosingPolicy(0.1).most_tokens >= len(CLOSING_MESSAGE) // 4
    assert ClosingPolicy(0.1, "字" * 100).most_tokens >= 150
