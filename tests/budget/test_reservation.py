"""Parents of sessions, also with concurrent calls, and reservations while the store is unavailable."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest

from gateway.budget.reservation import Budgets, named_agents
from gateway.call.types import CallAccounts, TakenHold
from gateway.core.calling_agent import CallingAgent
from gateway.core.errors import InvalidRequest, StoreDamaged, StoreUnavailable
from gateway.core.ledger.arithmetic import Amount, Claim, Limits
from gateway.core.ledger.charging import AgentName, BudgetPolicy, ChargedAccounts
from gateway.core.ledger.output_limit import CallNeed
from gateway.core.ledger.session_key import SessionKey
from gateway.core.session import Remembered, SessionState
from gateway.core.stored import CallStart
from gateway.stores.availability import Availability
from gateway.stores.fallback import FallbackStore
from gateway.stores.leases import Leases
from gateway.stores.memory import MemoryStore
from gateway.stores.stale_accounts import StaleAccounts
from tests.support.records import record

A, B = SessionKey("alice", "a"), SessionKey("alice", "b")


class SlowStore(MemoryStore):
    """A store that lets other tasks run while it is read."""

    async def remembered(self, session: SessionKey) -> Remembered:
        found = await super().remembered(session)
        await asyncio.sleep(0)
        return found


def fallback_of(store: MemoryStore, stale: StaleAccounts | None = None) -> FallbackStore:
    return FallbackStore(store, Availability(), stale)


def budgets(store: MemoryStore, policy: BudgetPolicy | None = None) -> Budgets:
    return Budgets(fallback_of(store), Leases(store, store.settle, lease_s=60), policy or BudgetPolicy(), time.time)


async def test_sessions_that_name_each_other_concurrently_leave_no_circle() -> None:
    store = SlowStore()
    asked = budgets(store)
    both = await asyncio.gather(asked.parents(A, None, "b"), asked.parents(B, None, "a"), return_exceptions=True)
    assert any(isinstance(one, InvalidRequest) for one in both)
    states = [(await store.remembered(key)).state.parent for key in (A, B)]
    assert states.count(None) >= 1
    for key, parent in zip((A, B), states, strict=True):
        await asked.parents(key, parent, None)


async def test_of_two_parents_named_concurrently_one_is_kept_and_the_other_refused() -> None:
    store = SlowStore()
    asked = budgets(store)
    both = await asyncio.gather(asked.parents(A, None, "x"), asked.parents(A, None, "y"), return_exceptions=True)
    kept = (await store.remembered(A)).state.parent
    assert [one for one in both if not isinstance(one, BaseException)] == [(SessionKey("alice", kept or ""),)]
    assert sum(isinstance(one, InvalidRequest) for one in both) == 1


async def above(asked: Budgets, session: SessionKey, named: str | None = None) -> list[str]:
    """Return the ids of the parents that a call of a session is charged to."""
    _, charged, accounts = await asked.read(
        session, ChargedAccounts("alice", session=session), named, with_totals=False
    )
    assert [claim.key for claim in accounts.claims] == [key.account for key in (*reversed(charged.parents), session)]
    assert [balance.key for balance in accounts.balances] == [claim.key for claim in accounts.claims]
    return [key.id for key in charged.parents]


async def test_the_parents_of_a_session_are_read_again_from_the_store() -> None:
    store = MemoryStore()
    asked, other_worker = budgets(store), budgets(store)
    assert await above(asked, A) == []
    assert await above(asked, A, "b") == ["b"]
    assert await above(asked, A) == ["b"]
    assert await above(other_worker, B, "c") == ["c"]
    assert await above(asked, A) == ["b", "c"], "it has one more parent at the top"
    with pytest.raises(InvalidRequest, match='already has the parent "b", so it cannot have "x"'):
        await above(asked, A, "x")
    await store.update(A, lambda _: SessionState())
    assert await above(asked, A) == [], "it was deleted, and starts again"
    assert await above(asked, A, "x") == ["x"]


@pytest.mark.parametrize(
    ("chain", "charged"),
    [
        ("ab", "b"),
        ("aba", "b"),  # concurrent calls may have stored a circle
        ("abcb", "bc"),
        ("abcdefghi", "bcdefghi"),
    ],
)
@pytest.mark.parametrize("is_named", [True, False])
async def test_a_call_is_charged_once_to_each_of_its_nearest_parents(
    chain: str, charged: str, *, is_named: bool
) -> None:
    store = MemoryStore()
    for one, parent in itertools.pairwise(chain):
        await store.update(SessionKey("alice", one), partial(SessionState.with_parent, parent=parent))
    asked = budgets(store)
    for _ in range(2):
        assert await above(asked, A, "b" if is_named else None) == list(charged)


@pytest.mark.parametrize("is_named", [True, False])
async def test_a_chain_that_grew_too_long_at_its_top_is_refused(*, is_named: bool) -> None:
    asked = budgets(MemoryStore())
    for one, parent in itertools.pairwise("abcdefghijkl"):
        await above(asked, SessionKey("alice", one), parent)
    assert await above(asked, SessionKey("alice", "d")) == list("efghijkl")
    for one, parent in (("a", "b"), ("c", "d")):
        with pytest.raises(InvalidRequest, match=r"now has 9 parents or more.*at most 8.*Start a new"):
            await above(asked, SessionKey("alice", one), parent if is_named else None)


async def test_while_the_store_is_unavailable_the_last_seen_parents_are_charged() -> None:
    asked = budgets(MemoryStore())
    a, b, c, x = (SessionKey("alice", name) for name in "abcx")
    await above(asked, b, "c")
    await above(asked, a, "b")
    assert asked.parents_as_seen(a, None) == asked.parents_as_seen(a, "b") == (b, c)
    assert asked.parents_as_seen(x, None) == ()
    assert asked.parents_as_seen(x, "b") == (b, c), "the parent named by its first call"
    assert asked.parents_as_seen(a, "x") == (x,), "it may have been deleted and created again"
    assert asked.parents_as_seen(c, "b") == (b,)
    assert asked.parents_as_seen(c, "c") == (), "no session is charged twice"


async def test_while_the_store_is_unavailable_at_most_eight_parents_are_charged() -> None:
    asked = budgets(MemoryStore())
    for one, parent in itertools.pairwise("ihgfedcba"):
        await above(asked, SessionKey("alice", parent), one)
    assert [key.id for key in asked.parents_as_seen(A, None)] == list("bcdefghi")
    assert [key.id for key in asked.parents_as_seen(SessionKey("alice", "x"), "a")] == list("abcdefgh")


class DamagedStore(MemoryStore):
    """A store in which the account of the session "b" cannot be read."""

    async def open_call(
        self, session: SessionKey, claims: Sequence[Claim], *, with_totals: bool, above: Sequence[SessionKey] = ()
    ) -> CallStart:
        if B.account in [claim.key for claim in claims]:
            raise StoreDamaged("b")
        return await super().open_call(session, claims, with_totals=with_totals, above=above)


async def test_a_damaged_account_does_not_affect_sessions_that_are_not_its_children() -> None:
    store = DamagedStore()
    await store.update(A, lambda state: state.with_parent("x"))
    assert await above(budgets(store), A) == ["x"]
    with pytest.raises(InvalidRequest):
        await above(budgets(store), A, "b")


async def test_a_call_reserved_before_the_store_became_unavailable_is_counted_once() -> None:
    store, charged = MemoryStore(), ChargedAccounts("alice", session=A)
    leases = Leases(store, store.settle, lease_s=60)
    found = Budgets(fallback_of(store), leases, BudgetPolicy(session=Limits(tokens=1_000)), time.time)

    async def taken(accounts: CallAccounts, call_id: str) -> TakenHold:
        need = CallNeed(100, output=50)
        return await found.reserve(accounts, call_id, lambda: need, lambda _: record("a", 0.0), is_stream=False)

    held = await taken(await found.read_accounts(charged), "1")
    await taken(found.stale_accounts(charged), "2")
    assert [balance.held.tokens for balance in await store.balances([Claim(A.account)])] == [150]
    (before,) = found.stale_accounts(charged).balances
    found.close(held, Amount(150, 0, 1))
    assert found.stale_accounts(charged).balances == (before,)
    assert before.used.tokens + before.held.tokens == 300


@pytest.mark.parametrize("is_reported_in_time", [True, False])
async def test_the_store_gets_the_hold_of_a_call_when_it_is_available_again(*, is_reported_in_time: bool) -> None:
    store, stale, charged = MemoryStore(), StaleAccounts(), ChargedAccounts("alice", session=A)
    leases = Leases(store, store.settle, lease_s=60, tick_s=0)
    found = Budgets(fallback_of(store, stale), leases, BudgetPolicy(session=Limits(tokens=1_000)), time.time)
    await found.read_accounts(charged)
    need, call = CallNeed(100, output=700), record("a", 0.0)
    taken = await found.reserve(
        found.stale_accounts(charged), call.call_id, lambda: need, lambda _: call, is_stream=False
    )
    stale.drop_spent()
    if is_reported_in_time:
        await leases.tick()
    (balance,) = (await found.read_accounts(charged)).balances
    assert balance.left("tokens") == (200 if is_reported_in_time else 1_000)
    (balance,) = found.stale_accounts(charged).balances
    assert balance.left("tokens") == 200, "the store is unavailable again"
    await store.settle(replace(call, accounts=(A.account,), spent=Amount(10)))
    found.close(taken, Amount(10))
    await leases.tick()
    (balance,) = (await found.read_accounts(charged)).balances
    assert (balance.used.tokens, balance.held.tokens) == (10, 0)
    (balance,) = found.stale_accounts(charged).balances
    assert balance.left("tokens") == 990


async def above_agent(asked: Budgets, agent: CallingAgent, is_away: bool = False) -> list[str]:
    """Return the accounts of agents that a call of this agent is charged to."""
    charged = ChargedAccounts("alice", session=A, agents=named_agents(agent))
    read = asked.open if is_away else asked.read
    _, _, accounts = await read(A, charged, None, with_totals=False)
    return [claim.key.id for claim in accounts.claims if claim.key.kind == "agent"]


CAPS = BudgetPolicy(agents={"*": Limits(tokens=100), "free": Limits(), "b": Limits(calls=5)})


async def test_a_nested_agent_is_charged_to_the_agents_above_that_made_calls() -> None:
    store = MemoryStore()
    asked = budgets(store, CAPS)
    a, b = CallingAgent("a", "main", "lead", "subagent"), CallingAgent("b", "a", "worker", "subagent")
    assert await above_agent(asked, a) == ["a/a"]
    assert await above_agent(asked, b) == ["a/b"], "nobody knows of a call of its parent"
    for agent in (a, b):
        await store.settle(replace(record("a", 1.0), session=A, agent=agent))
    assert await above_agent(asked, b) == ["a/a", "a/b"]
    assert await above_agent(asked, CallingAgent("c", "b")) == ["a/a", "a/b", "a/c"]
    assert await above_agent(asked, CallingAgent("d", "b", "free")) == ["a/a", "a/b"]
    assert await above_agent(asked, CallingAgent("e", "root-thread")) == ["a/e"]
    assert await above_agent(asked, CallingAgent()) == []
    assert await above_agent(asked, CallingAgent(request_class="subagent")) == ["a/main"], (
        "the agent of a child session"
    )


async def test_agents_above_are_remembered_while_the_store_is_unavailable() -> None:
    store = MemoryStore()
    asked = budgets(store, CAPS)
    for agent in (CallingAgent("a"), CallingAgent("b", "a")):
        await store.settle(replace(record("a", 1.0), session=A, agent=agent))
    assert await above_agent(asked, CallingAgent("b", "a")) == ["a/a", "a/b"]
    availability = asked._store.availability
    availability.accepts_without_store = True
    availability.report(StoreUnavailable("gone"))
    assert await above_agent(asked, CallingAgent("b", "a"), is_away=True) == ["a/a", "a/b"]
    assert await above_agent(asked, CallingAgent("c", "a"), is_away=True) == ["a/c"]


def test_limits_are_those_of_the_type_then_of_the_id_then_of_any_agent() -> None:
    by_type, by_id, any_agent = Limits(1), Limits(2), Limits(3)
    policy = BudgetPolicy(agents={"*": any_agent, "Explore": by_type, "a1": by_id})
    assert policy.limits_of_agent(AgentName("a1", "Explore")) == by_type
    assert policy.limits_of_agent(AgentName("a1", "Plan")) == by_id
    assert policy.limits_of_agent(AgentName("a1")) == by_id
    assert policy.limits_of_agent(AgentName("a2", "Plan")) == any_agent
    assert BudgetPolicy().limits_of_agent(AgentName("a1", "Explore")).is_none
