"""Test which accounts a call is charged to, and at which rate."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from gateway.core.ledger.arithmetic import (
    MOST,
    NO_LIMITS,
    AccountKey,
    Amount,
    Balance,
    Claim,
    Limits,
    Moment,
)
from gateway.core.ledger.charging import (
    ALL_KEYS,
    BudgetPolicy,
    ChargedAccounts,
    KeyLimits,
    SharedBudgets,
    TokenRate,
    accounts_of,
    budgets_in,
    claims_of,
    claims_on,
    dearest,
    limits_output,
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
    assert claims[0].configured == Limits(calls=5, window=60)
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


# --- what is left -------------------------------------------------------------------------------------------------------


def test_remaining_fraction_ignores_holds() -> None:
    assert remaining_fraction([balance(used=100, held=800), balance(Limits(tokens=200), used=150)]) == 0.25
    assert remaining_fraction([balance(used=5_000)]) == 0
    assert remaining_fraction([]) == 1
    assert budgets_in([balance(Limits(calls=1))])
    rate = Balance(AccountKey("rate", "alice"), Limits(calls=1), Amount(), Amount())
    assert not budgets_in([rate]), "the count of requests is no budget"
    assert not limits_output([balance(Limits(calls=1))])


def test_client_keys_claim_the_limited_accounts_that_they_share() -> None:
    shared = SharedBudgets(Limits(calls=9), {"research": Limits(tokens=5), "free": NO_LIMITS})
    whole, group = Claim(ALL_KEYS, Limits(calls=9)), Claim(AccountKey("group", "research"), Limits(tokens=5))
    assert shared.claims("research") == (whole, group)
    assert shared.claims("free") == shared.claims("gone") == shared.claims(None) == (whole,)
    assert SharedBudgets().claims("research") == ()
    charged = ChargedAccounts("alice", KeyLimits(Limits(calls=3), 5, shared.claims("research")))
    claims = claims_of(BudgetPolicy(), charged)
    assert [claim.key.kind for claim in claims] == ["rate", "all", "group", "key"]
    known = shared.limits()
    assert claims_on(accounts_of(claims), BudgetPolicy(), known, {})[:2] == [whole, group]


def test_accounts_have_their_configured_limits_without_a_call() -> None:
    session, key, unknown = AccountKey("session", "a", "s"), AccountKey("key", "a"), AccountKey("key", "b")
    policy = BudgetPolicy(session=Limits(tokens=9))
    assert claims_on([session, key, unknown, AccountKey("rate", "a")], policy, {key: Limits(calls=3)}, {}) == [
        Claim(session, Limits(tokens=9)),
        Claim(key, Limits(calls=3)),
        Claim(unknown),
    ]
