"""Test the messages of budget refusals, and the reported allowance."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from typing import Any

import pytest

from gateway.core.errors import BudgetBusy, BudgetExhausted, RateLimited
from gateway.core.ledger.arithmetic import (
    DIMENSIONS,
    NOTHING,
    AccountKey,
    Amount,
    Balance,
    Claim,
    Dimension,
    Limits,
    Refused,
)
from gateway.core.ledger.charging import BudgetPolicy
from gateway.core.ledger.refusals import allowance, dimension_json, refusal
from gateway.core.ledger.session_key import OPEN_NAMESPACE, SessionKey

SESSION = SessionKey("alice", "s")
POLICY = BudgetPolicy(session=Limits(tokens=1_000))


def balance(limits: Limits | None = None, used: int = 0, held: int = 0, **fields: Any) -> Balance:
    amounts = Amount(used, used, used), Amount(held, held, held)
    return Balance(SESSION.account, limits or Limits(tokens=1_000), *amounts, **fields)


def claim() -> Claim:
    return Claim(SESSION.account, Limits(tokens=1_000))


# --- a refusal ------------------------------------------------------------------------------------------------------------


def test_exhausted_budget_message_has_account_numbers_and_remedy() -> None:
    fault = refusal(Refused(balance(used=1_200), "tokens", 9, is_busy=False), claim(), POLICY, 0)
    assert isinstance(fault, BudgetExhausted)
    assert fault.status == 400
    assert fault.message == (
        'Session "s" has used 1,200 of its 1,000 tokens. '
        "Raise it with: gateway sessions budget alice/s 2000, or start a new session."
    )
    assert fault.details["budget"] == {
        "account": "session", "id": "s", "unit": "tokens", "limit": 1_000, "used": 1_200, "held": 0, "resets_at": None,
        "needed": 9,
    }  # fmt: skip


def test_refusal_names_needed_amount_and_sufficient_budget() -> None:
    fault = refusal(Refused(balance(used=100), "tokens", 2_000, is_busy=False), claim(), POLICY, 0)
    assert fault.message == (
        'Session "s" has used 100 of its 1,000 tokens, and this call needs 2,000. '
        "Raise it with: gateway sessions budget alice/s 4100, or start a new session."
    )


@pytest.mark.parametrize("session", ["s", "-x", "--help", "-5", "a.b:c", "two words", "it's", '"$HOME"', "-$(id)"])
@pytest.mark.parametrize(
    ("name", "option"),
    [("tokens", []), ("nano_usd", ["--usd"]), ("calls", ["--calls"])],
    ids=["tokens", "usd", "calls"],
)
def test_remedy_is_a_valid_shell_command(session: str, name: Dimension, option: list[str]) -> None:
    key = AccountKey("session", OPEN_NAMESPACE, session)
    limits = Limits(*(10**9 if one == name else None for one in DIMENSIONS))
    balance_of = Balance(key, limits, Amount(10**9, 10**9, 10**9), NOTHING, None)
    fault = refusal(Refused(balance_of, name, 1, is_busy=False), Claim(key, limits), POLICY, 0)
    command = fault.message.partition("Raise it with: ")[2].partition(", or start")[0]
    said = subprocess.run(["/bin/sh", "-c", f"printf '%s\n' {command}"], capture_output=True, check=True, text=True)
    words = said.stdout.splitlines()
    assert words[:3] == ["gateway", "sessions", "budget"]
    number = "2" if name == "nano_usd" else "2000000000"
    behind = [session, number] if not option else [session]
    if session.startswith("-"):
        assert words[3:] == [*([*option, number] if option else []), "--", *behind]
    else:
        assert words[3:] == [*behind, *([*option, number] if option else [])]


@pytest.mark.parametrize(
    ("name", "most"), [("tokens", "9007199254740992"), ("nano_usd", "4500000"), ("calls", "9007199254740992")]
)
def test_remedy_is_capped_at_the_largest_budget(name: Dimension, most: str) -> None:
    limits = Limits(*(2**53 if one == name else None for one in DIMENSIONS))
    balance_of = Balance(SESSION.account, limits, Amount(2**53, 2**53, 2**53), NOTHING, None)
    fault = refusal(Refused(balance_of, name, 1, is_busy=False), Claim(SESSION.account, limits), POLICY, 0)
    assert f" {most}, or start" in fault.message


def test_the_status_of_a_refusal_is_as_configured_for_this_one_only() -> None:
    strict = BudgetPolicy(exhausted_status=402)
    assert refusal(Refused(balance(), "tokens", 9, is_busy=False), claim(), strict, 0).status == 402
    assert BudgetExhausted.status == 400


def test_a_budget_that_refills_says_when() -> None:
    minutes = balance(Limits(tokens=10, window=3_600), used=10, resets_s=600.0)
    fault = refusal(Refused(minutes, "tokens", 9, is_busy=False), claim(), POLICY, 1_795_000_000)
    assert "It refills in 10 min." in fault.message
    for now in (1_795_000_000, 1_795_000_000.75):
        assert dimension_json(minutes, "tokens", now)["resets_at"] == "2026-11-18T11:16:40Z"


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        *((30, "30 s"), (119, "119 s"), (120, "2 min"), (7_199, "120 min"), (7_200, "2 h"), (7_300, "2 h")),
        *((172_799, "48 h"), (172_800, "2 d"), (200_000, "2 d")),
    ],
)
def test_refill_time_has_a_readable_unit(seconds: float, said: str) -> None:
    refills = balance(used=1_000, resets_s=seconds)
    assert f"in {said}." in refusal(Refused(refills, "tokens", 1, is_busy=False), claim(), POLICY, 0).message


def test_usd_amounts_are_in_dollars() -> None:
    broke = balance(Limits(nano_usd=10**9), used=10**9)
    fault = refusal(Refused(broke, "nano_usd", 5_000, is_busy=False), claim(), POLICY, 0)
    assert 'Session "s" has used 1.000000 USD of its 1.000000 USD.' in fault.message
    assert "--usd 2," in fault.message
    assert fault.details["budget"]["limit"] == "1.000000"  # type: ignore[index]


@pytest.mark.parametrize(
    ("limit", "asked"), [(1, "0.000000002"), (20_000, "0.00004"), (10**9 // 2, "1"), (1_234_567_891, "2.469135782")]
)
def test_usd_remedy_has_exact_decimals(limit: int, asked: str) -> None:
    broke = balance(Limits(nano_usd=limit), used=limit)
    fault = refusal(Refused(broke, "nano_usd", 0, is_busy=False), claim(), POLICY, 0)
    assert f"--usd {asked}, or start" in fault.message


def test_budget_held_by_other_calls_is_busy() -> None:
    fault = refusal(Refused(balance(held=995), "tokens", 9, is_busy=True), claim(), POLICY, 0)
    assert isinstance(fault, BudgetBusy)
    assert "running calls have reserved 995. This call needs 9" in fault.message


def test_remedy_for_declared_budget_names_the_header() -> None:
    declared = Claim(SESSION.account, Limits(tokens=9_000), Limits(tokens=1_000))
    fault = refusal(Refused(balance(used=1_000), "tokens", 9, is_busy=False), declared, POLICY, 0)
    assert "declares this budget in x-session-budget-tokens" in fault.message


def test_remedy_for_client_key_names_its_configuration() -> None:
    key = Balance(AccountKey("key", "alice"), Limits(calls=1), Amount(0, 0, 1), Amount())
    fault = refusal(Refused(key, "calls", 1, is_busy=False), Claim(key.key, Limits(calls=1)), POLICY, 0)
    assert fault.message.startswith(
        'The client key "alice" has used 1 of its 1 calls. Raise it with: '
        "gateway keys set alice --budget-calls 3, or in auth.keys."
    )


def test_rate_limit_error_has_retry_after() -> None:
    rate = Balance(AccountKey("rate", "alice"), Limits(calls=2, window=60), Amount(calls=2), Amount(), 12.3)
    fault = refusal(Refused(rate, "calls", 1, is_busy=False), Claim(rate.key, rate.limits), POLICY, 0)
    assert isinstance(fault, RateLimited)
    assert (fault.retry_after, "Wait 13 s" in fault.message) == (13, True)
    ended = refusal(Refused(replace(rate, resets_s=0.0), "calls", 1, is_busy=False), Claim(rate.key), POLICY, 0)
    assert ended.retry_after == 1, "to ask again at once is no advice"


# --- headers --------------------------------------------------------------------------------------------------------------


def test_allowance_reports_the_account_with_least_left() -> None:
    top = Balance(AccountKey("key", "a"), Limits(tokens=500, nano_usd=10**9), Amount(450), Amount(20))
    told = allowance([balance(used=100), top], 0.8)
    assert told is not None
    assert (told.limit_tokens, told.remaining_tokens, told.limit_usd, told.remaining_usd) == (
        500,
        30,
        "1.000000",
        "1.000000",
    )
    assert told.warning == 0.9


def test_no_warning_below_threshold_and_no_allowance_without_limits() -> None:
    told = allowance([balance(used=799)], 0.8)
    assert told is not None
    assert told.warning is None
    assert (allowance([balance(used=800)], 0.8) or told).warning == 0.8
    assert told.limit_usd is None
    rate = Balance(AccountKey("rate", "a"), Limits(calls=1), Amount(calls=1), Amount())
    assert allowance([rate, balance(Limits())], 0.8) is None
