"""What every store counts of the subagents of a session, and what it does with their accounts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from gateway.core.agent_use import MAX_AGENT_TOOLS, MAX_SUBAGENTS, AgentUse, agents_of_session
from gateway.core.calling_agent import CallingAgent
from gateway.core.ledger.arithmetic import NOTHING, AccountKey, Amount, Claim, Hold, Limits, Refused
from gateway.core.ledger.session_key import SessionKey
from gateway.core.ports import Store
from gateway.core.record import ORPHANED, CallRecord
from gateway.core.stored import OpenHold
from gateway.core.tools import OTHERS
from gateway.core.usage import MAX_TOKENS, Charge, Totals, Usage

MakeRecord = Callable[..., CallRecord]

KEY = SessionKey("alice", "s")
CHARGE = Charge(Usage(10, 5, 15, 4, 3, 2), "provider", Decimal("0.000123"))
ONCE = Totals().add(CHARGE)
HELPER = CallingAgent("helper", "main", "Explore", "subagent")
NESTED = CallingAgent("nested", "helper", "Plan", "subagent")
ACCOUNT = AccountKey("agent", "alice", "s/helper")


def made_by(agent: CallingAgent | None, record: MakeRecord, session: str = "s", **fields: Any) -> CallRecord:
    return record(session, agent=agent, **{"charge": CHARGE, "tools": (), **fields})


async def uses(store: Store, key: SessionKey = KEY) -> dict[str, AgentUse]:
    return {one.id: one for one in await store.agents(key)}


async def test_calls_of_the_main_agent_are_not_counted_as_a_subagents(store: Store, record: MakeRecord) -> None:
    for agent in (None, CallingAgent(), CallingAgent(request_class="compaction")):
        await store.settle(made_by(agent, record))
    assert await store.agents(KEY) == []
    assert await store.agents(SessionKey("alice", "unknown")) == []


async def test_a_subagent_has_its_own_totals_tools_and_times(store: Store, record: MakeRecord) -> None:
    await store.settle(made_by(HELPER, record, at=1_000.0, tools=("read", "read", "grep"), step="find"))
    await store.settle(made_by(replace(HELPER, type=None), record, at=1_010.0, tools=("read",), step="write"))
    await store.settle(made_by(NESTED, record, at=1_020.0))
    await store.settle(made_by(None, record, at=1_030.0, tools=("edit",), step="plan"))
    found = await uses(store)
    twice = ONCE.add(CHARGE)
    assert found == {
        "helper": AgentUse("helper", "main", "Explore", "write", 1_000.0, 1_012.0, twice, {"read": 3, "grep": 1}),
        "nested": AgentUse("nested", "helper", "Plan", None, 1_020.0, 1_022.0, ONCE, {}),
    }
    view = await store.session(KEY)
    assert view is not None
    main, *others = agents_of_session(view.totals, view.tools, [*found.values()], await store.calls(KEY, 10))
    assert (main.totals, main.tools, main.step) == (ONCE, {"edit": 1}, "plan")
    total = Totals()
    for one in (main, *others):
        total = total.plus(one.totals)
    assert total == view.totals == await store.totals(KEY)


async def test_a_call_without_a_charge_shows_its_subagent(store: Store, record: MakeRecord) -> None:
    await store.settle(made_by(HELPER, record, charge=None, at=1_000.0))
    assert (await uses(store))["helper"].totals == Totals()


async def test_a_call_that_is_settled_twice_counts_once(store: Store, record: MakeRecord) -> None:
    call = made_by(HELPER, record)
    await store.settle(call)
    await store.settle(call)
    assert (await uses(store))["helper"].totals == ONCE


async def test_the_record_of_an_orphaned_call_replaces_its_charge(store: Store, record: MakeRecord) -> None:
    guess = Charge(Usage.of(7, 0), "estimated", Decimal("0.5"))
    orphaned = made_by(HELPER, record, charge=guess, outcome=ORPHANED, tools=("read",))
    await store.settle(orphaned)
    found = (await uses(store))["helper"]
    assert (found.totals, found.tools) == (Totals().add(guess), {})
    await store.settle(replace(orphaned, charge=CHARGE, outcome="ok"))
    found = (await uses(store))["helper"]
    assert (found.totals, found.tools) == (ONCE, {"read": 1})


async def test_a_correction_after_a_reset_takes_nothing_from_later_calls(store: Store, record: MakeRecord) -> None:
    guess = Charge(Usage.of(7, 0), "estimated", Decimal("0.5"))
    orphaned = made_by(HELPER, record, charge=guess, outcome=ORPHANED)
    await store.settle(orphaned)
    await store.reset(KEY)
    assert await store.agents(KEY) == []
    await store.settle(made_by(HELPER, record))
    await store.settle(replace(orphaned, charge=CHARGE, outcome="ok"))
    assert (await uses(store))["helper"].totals == await store.totals(KEY) == ONCE.add(CHARGE)


async def test_deletion_deletes_subagents(store: Store, record: MakeRecord) -> None:
    await store.settle(made_by(HELPER, record))
    await store.settle(made_by(HELPER, record, "t"))
    await store.delete(KEY)
    assert await store.agents(KEY) == []
    assert set(await uses(store, SessionKey("alice", "t"))) == {"helper"}


async def test_expiry_deletes_subagents(store: Store, record: MakeRecord) -> None:
    await store.settle(made_by(HELPER, record, at=1_000.0))
    assert await store.expire(5_000.0) == 1
    assert await store.agents(KEY) == []


async def test_subagents_beyond_the_bound_are_counted_together(store: Store, record: MakeRecord) -> None:
    for number in range(MAX_SUBAGENTS + 3):
        await store.settle(made_by(CallingAgent(f"a{number}", None, "T", "subagent"), record, tools=("read",)))
    await store.settle(made_by(CallingAgent("a0", None, "T", "subagent"), record))
    found = await uses(store)
    assert len(found) == MAX_SUBAGENTS + 1
    assert found["a0"].totals == ONCE.add(CHARGE)
    assert (found[OTHERS].totals, found[OTHERS].tools) == (ONCE.add(CHARGE).add(CHARGE), {"read": 3})
    assert (found[OTHERS].type, found[OTHERS].parent) == (None, None)
    total = Totals()
    for one in found.values():
        total = total.plus(one.totals)
    assert total == await store.totals(KEY)


async def test_an_orphaned_call_beyond_the_bound_is_corrected(store: Store, record: MakeRecord) -> None:
    for number in range(MAX_SUBAGENTS):
        await store.settle(made_by(CallingAgent(f"a{number}"), record))
    guess = Charge(Usage.of(7, 0), "estimated", Decimal("0.5"))
    orphaned = made_by(HELPER, record, charge=guess, outcome=ORPHANED)
    await store.settle(orphaned)
    await store.settle(replace(orphaned, charge=CHARGE, outcome="ok"))
    assert (await uses(store))[OTHERS].totals == ONCE


async def test_tools_of_a_subagent_beyond_the_bound_are_counted_together(store: Store, record: MakeRecord) -> None:
    names = tuple(f"tool/{number}" for number in range(MAX_AGENT_TOOLS + 2))
    await store.settle(made_by(HELPER, record, tools=(*names, names[0])))
    await store.settle(made_by(HELPER, record, tools=(names[-1], names[1])))
    tools = (await uses(store))["helper"].tools
    assert (len(tools), tools[names[0]], tools[names[1]], tools[OTHERS]) == (MAX_AGENT_TOOLS + 1, 2, 2, 3)


@pytest.mark.parametrize("erase", ["reset", "delete"])
async def test_the_account_of_a_subagent_is_emptied_with_its_session(
    store: Store, record: MakeRecord, erase: str
) -> None:
    other = AccountKey("agent", "alice", "s0/helper")
    for session, account in (("s", ACCOUNT), ("s0", other)):
        spent, accounts = Amount(15, 0, 1), (SessionKey("alice", session).account, account)
        await store.settle(made_by(HELPER, record, session, accounts=accounts, spent=spent))
    [before] = await store.balances([Claim(ACCOUNT, Limits(15))])
    assert (before.used, before.left("tokens")) == (Amount(15, 0, 1), 0)
    assert await (store.reset(KEY) if erase == "reset" else store.delete(KEY))
    found = await store.balances([Claim(ACCOUNT), Claim(other)])
    assert [one.used for one in found] == [NOTHING, Amount(15, 0, 1)]


async def test_a_subagents_account_expires_with_its_session(store: Store, record: MakeRecord) -> None:
    accounts = (KEY.account, ACCOUNT)
    await store.settle(made_by(HELPER, record, at=1_000.0, accounts=accounts, spent=Amount(15, 0, 1)))
    await store.expire(10.0**12)
    [found] = await store.balances([Claim(ACCOUNT)])
    assert found.used == NOTHING


async def test_a_hold_on_a_subagents_account_never_exceeds_its_limit(store: Store, record: MakeRecord) -> None:
    claims = (Claim(KEY.account, Limits(1_000)), Claim(ACCOUNT, Limits(25)))
    accounts, refusals = tuple(one.key for one in claims), list[str]()
    for _ in range(5):
        orphaned = made_by(HELPER, record, outcome=ORPHANED, accounts=accounts, spent=Amount(10, 0, 1))
        opened = OpenHold(Hold(orphaned.call_id, claims, Amount(10, 0, 1)), orphaned)
        outcome = await store.reserve(opened, 30.0)
        if isinstance(outcome, Refused):
            refusals.append(f"{outcome.balance.key.kind} {outcome.balance.key.id} {outcome.is_busy}")
        else:
            await store.extend(opened.hold.id, 1)
    assert refusals == ["agent s/helper True"] * 3
    session, agent = await store.balances(claims)
    assert (session.held, agent.held) == (Amount(20, 0, 2), Amount(20, 0, 2))


async def test_sums_of_a_subagent_are_as_large_and_exact_as_those_of_its_session(
    store: Store, record: MakeRecord
) -> None:
    odd = Charge(Usage.of(2**53 - 1, 2**53 - 3), "mixed", Decimal("9007.199254740993"))
    most = Charge(Usage.of(MAX_TOKENS, MAX_TOKENS), "provider", Decimal(4_000_000))
    for charge in (odd, CHARGE, *[most] * 2):
        await store.settle(made_by(HELPER, record, charge=charge))
        assert (await uses(store))["helper"].totals == await store.totals(KEY)


async def test_parallel_settlements_of_subagents_add_up(store: Store, record: MakeRecord) -> None:
    agents = [HELPER, NESTED, None]
    calls = [made_by(agents[number % 3], record, tools=("read",)) for number in range(60)]
    await asyncio.gather(*(store.settle(call) for call in calls))
    found = await uses(store)
    assert {name: (use.totals.calls, use.tools) for name, use in found.items()} == {
        "helper": (20, {"read": 20}),
        "nested": (20, {"read": 20}),
    }
    assert (await store.totals(KEY)).calls == 60
