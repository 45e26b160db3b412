"""Test budgets applied to recorded calls, and compare them with a running gateway."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

import pytest

from gateway.core.context_budget import ContextPolicy
from gateway.core.ledger.arithmetic import AccountKey, Limits
from gateway.core.ledger.charging import BudgetPolicy, KeyLimits
from gateway.core.ledger.closing import ClosingPolicy
from gateway.core.ledger.session_key import SessionKey
from gateway.core.pricing import price_per_million
from gateway.core.routing import ModelFacts
from gateway.core.usage import Charge, Usage
from gateway.mock import MockServer
from gateway.replay.budgets import BudgetSums, ReplayOutcome, ReplayRules, outcomes
from gateway.replay.records import ReplayedCall, read_store
from gateway.stores.sqlite import SqliteStore
from tests.conftest import StartGateway
from tests.support.gateways import GatewayThread

FACTS = ModelFacts(window=10_000, output=1_000, price=price_per_million(input=Decimal(1), output=Decimal(10)))
SESSION = SessionKey("default", "s")


def call(number: int, tokens: int = 1_000, output: int = 100, **fields: Any) -> ReplayedCall:
    known: dict[str, Any] = {
        "call_id": f"c{number:03}",
        "request_id": f"r{number}",
        "session": SESSION,
        "at": 1_000.0 + number,
        "provider": "openai",
        "model": "m",
        "stream": False,
        "charge": Charge(Usage.of(tokens, output), "provider", Decimal(tokens + 10 * output) / 1_000_000),
        "original": tokens,
        "sent": tokens,
    }
    return ReplayedCall(**{**known, **fields})


def rules(
    limits: Limits | None = None,
    *,
    keys: Mapping[str, KeyLimits] | None = None,
    context: int | None = None,
    facts: ModelFacts = FACTS,
    **policy: Any,
) -> ReplayRules:
    budgets = BudgetPolicy(session=limits or Limits(), **policy)
    return ReplayRules(ContextPolicy(), budgets, keys or {}, lambda _: facts, context)


def summed(found: Sequence[ReplayOutcome]) -> BudgetSums:
    sums = BudgetSums()
    for one in found:
        sums.add(one)
    return sums


def test_modes_and_refusals_follow_the_budget() -> None:
    found = list(outcomes([call(number) for number in range(12)], rules(Limits(tokens=11_000))))
    assert [one.mode for one in found] == ["raw"] * 5 + ["table"] * 3 + ["summary"] * 2 + ["handle_only"] * 2
    assert [one.number for one in found if one.refused is not None] == [11, 12]
    assert found[10].refused is not None
    assert (found[10].refused["used"], found[10].refused["limit"], found[10].refused["needed"]) == (
        11_000,
        11_000,
        1016,
    )
    sums = summed(found)
    assert sums.spent.tokens == 11_000
    places = sums.places_json()
    assert {mode: place["call"] for mode, place in places["modes"].items()} == {
        "table": 6,
        "summary": 9,
        "handle_only": 11,
    }
    assert places["first_refused"]["call"] == 11
    assert places["first_refused"]["at"] == "1970-01-01T00:16:50.000Z"


def test_without_modes_there_are_none() -> None:
    found = outcomes([call(number) for number in range(12)], rules(Limits(tokens=11_000), modes=False))
    assert {one.mode for one in found} == {"raw"}


def test_output_ends_at_the_budget() -> None:
    [first, second] = outcomes([call(1), call(2, output=500)], rules(Limits(tokens=2_200)))
    assert (first.is_shorter, second.is_shorter) == (False, True)
    assert second.spent.tokens == 1_100


def test_budget_refills_after_its_window() -> None:
    calls = [call(number, at=1_000.0 + 60 * number) for number in range(6)]
    found = outcomes(calls, rules(Limits(tokens=2_300, window=180.0)))
    assert [one.refused is not None for one in found] == [False, False, True, False, False, True]


def test_a_budget_in_usd_takes_the_recorded_cost_and_the_price_where_there_is_none() -> None:
    calls = [call(1), call(2, charge=Charge(Usage.of(1_000, 100), "provider")), call(3)]
    found = list(outcomes(calls, rules(Limits(nano_usd=5_500_000))))
    assert [one.spent.nano_usd for one in found] == [2_000_000, 2_000_000, 1_500_000]
    assert found[2].is_shorter


def test_a_refusal_in_usd_says_so() -> None:
    [_, second] = outcomes([call(1), call(2)], rules(Limits(nano_usd=2_500_000)))
    assert second.refused is not None
    assert (second.refused["unit"], second.refused["limit"], second.refused["needed"]) == (
        "usd",
        "0.002500",
        "0.001160",
    )


def test_cached_tokens_count_as_configured() -> None:
    charge = Charge(Usage(1_000, 100, 1_100, cache_read_tokens=800), "provider")
    [one] = outcomes([call(1, charge=charge)], rules(Limits(tokens=10_000), cached_weight=0.1))
    assert one.spent.tokens == 380


def test_a_parent_is_charged_for_its_children_where_the_record_says_so() -> None:
    parent, child = SessionKey("default", "parent"), SessionKey("default", "child")
    calls = [
        call(1, session=child, accounts=(parent.account, child.account)),
        call(2, session=parent, accounts=(parent.account,)),
    ]
    [_, second] = outcomes(calls, rules(Limits(tokens=2_000)))
    assert second.refused is not None
    assert second.refused["used"] == 1_100


def test_the_budget_of_a_client_key_is_that_of_all_its_sessions() -> None:
    sessions = [SessionKey("alice", name) for name in ("a", "b", "c")]
    calls = [
        call(number, session=session, accounts=(AccountKey("key", "alice"), session.account))
        for number, session in enumerate(sessions)
    ]
    found = outcomes(calls, rules(keys={"alice": KeyLimits(Limits(tokens=2_300))}))
    assert [one.refused is not None for one in found] == [False, False, True]


def test_calls_over_context_budget_are_counted_by_original_tokens() -> None:
    calls = [call(1, 3_000), call(2, 3_000, original=5_000), call(3, 4_500, original=None), call(4, 9_900, charge=None)]
    found = list(outcomes(calls, rules(context=4_000)))
    assert [one.over for one in found] == [0, 1_000, 500, 5_900]
    sums = summed(found)
    assert sums.as_json()["over_context_budget"] == {"calls": 3, "most": 5_900, "tokens": 7_400}
    assert [one["call"] for one in sums.places_json()["calls_over"]] == [2, 3, 4]


def test_context_window_is_the_default_context_budget() -> None:
    [one] = outcomes([call(1, 9_500)], rules())
    assert (one.budget, one.over) == (9_000, 500)
    [one] = outcomes([call(1, 9_500)], rules(facts=ModelFacts()))
    assert (one.budget, one.over) == (None, 0)


def test_calls_are_taken_in_the_order_they_came_and_once() -> None:
    found = outcomes([call(3), call(1), call(2), call(3)], rules())
    assert [(one.call.call_id, one.number) for one in found] == [("c001", 1), ("c002", 2), ("c003", 3)]


def test_sums_say_what_is_not_known() -> None:
    known = summed(list(outcomes([call(1), call(2, charge=None)], rules()))).as_json()
    assert (known["calls"], known["uncharged_calls"], known["cost_usd"]) == (2, 1, "0.002000")
    assert known["cached_share"] == 0.0
    logged = summed(list(outcomes([call(1), call(2, has_details=False)], rules()))).as_json()
    assert (logged["cached_share"], logged["usage"]["cache_read_tokens"]) == (None, None)
    unpriced = [call(1, charge=Charge(Usage.of(5, 5), "estimated")), call(2)]
    assert summed(list(outcomes(unpriced, rules(facts=ModelFacts())))).as_json()["cost_usd"] is None
    assert summed(list(outcomes(unpriced, rules()))).as_json()["estimated_calls"] == 1


def play(gateway: GatewayThread, calls: int) -> list[int]:
    """Return the statuses of the calls of one growing session."""
    messages, statuses = list[dict[str, str]](), list[int]()
    for number in range(calls):
        messages.append({"role": "user", "content": f"{number} " + "and so on " * 200})
        statuses.append(gateway.web.chat(session="s", messages=messages, max_tokens=20).status)
        messages.append({"role": "assistant", "content": "Yes."})
    return statuses


@pytest.mark.parametrize("limit", [7_000, 20_000, 31_000])
async def test_a_session_is_refused_where_the_gateway_refuses_it(
    limit: int, gateway_server: StartGateway, mock_server: MockServer
) -> None:
    free = gateway_server(mock_server.url)
    assert play(free, 10) == [200] * 10
    free.stop()
    store = SqliteStore(free.store, timeout_s=5)
    try:
        recorded = [one async for one in read_store(store, None)]
        totals = await store.totals(SESSION)
    finally:
        await store.aclose()
    found = list(outcomes(recorded, rules(Limits(tokens=limit), facts=ModelFacts())))
    assert sum(one.call.charge.usage.total_tokens for one in found if one.call.charge) == totals.total_tokens
    budgeted = gateway_server(mock_server.url, **{"budget.tokens": limit, "context.trim": "off"})
    statuses = play(budgeted, 10)
    assert 400 in statuses
    assert [one.refused is None for one in found] == [status == 200 for status in statuses]


def test_one_call_that_no_longer_fits_is_the_closing_call() -> None:
    calls = [call(number) for number in range(12)]
    found = list(outcomes(calls, rules(Limits(tokens=6_000), closing=ClosingPolicy(0.25))))
    assert [one.refused is not None for one in found] == [False] * 5 + [True] * 7
    assert summed(found).spent.tokens <= 6_000
    without = outcomes(calls, rules(Limits(tokens=6_000)))
    assert [one.refused is not None for one in without][:5] == [False] * 5
