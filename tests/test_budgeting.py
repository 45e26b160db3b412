"""Parents of sessions, also where several calls say at once who they are; and calls that the store leaves alone."""

from __future__ import annotations

import asyncio
import time

from gateway.budgeting import Book, Budgets, Taken
from gateway.core.errors import InvalidRequest
from gateway.core.ledger import Amount, Limits
from gateway.core.namespaces import SessionKey
from gateway.core.session import Remembered
from gateway.core.spending import BudgetPolicy, Charged, Need
from gateway.stores.blind import Blind
from gateway.stores.leases import Leases
from gateway.stores.memory import MemoryStore
from tests.support.records import record

A, B = SessionKey("alice", "a"), SessionKey("alice", "b")


class SlowStore(MemoryStore):
    """Others get their turn while it is read."""

    async def remembered(self, session: SessionKey) -> Remembered:
        found = await super().remembered(session)
        await asyncio.sleep(0)
        return found


def budgets(store: MemoryStore, policy: BudgetPolicy | None = None) -> Budgets:
    return Budgets(store, Leases(store, store.settle, lease_s=60), Blind(), policy or BudgetPolicy(), time.time)


async def test_sessions_that_name_each_other_at_once_make_no_circle_that_stays() -> None:
    store = SlowStore()
    asked = budgets(store)
    both = await asyncio.gather(asked.parents(A, None, "b"), asked.parents(B, None, "a"), return_exceptions=True)
    assert any(isinstance(one, InvalidRequest) for one in both)
    states = [(await store.remembered(key)).state.parent for key in (A, B)]
    assert states.count(None) >= 1
    for key, parent in zip((A, B), states, strict=True):
        await asked.parents(key, parent, None)


async def test_of_two_parents_named_at_once_one_stays_and_the_other_is_refused() -> None:
    store = SlowStore()
    asked = budgets(store)
    both = await asyncio.gather(asked.parents(A, None, "x"), asked.parents(A, None, "y"), return_exceptions=True)
    kept = (await store.remembered(A)).state.parent
    assert [one for one in both if not isinstance(one, BaseException)] == [(SessionKey("alice", kept or ""),)]
    assert sum(isinstance(one, InvalidRequest) for one in both) == 1


async def test_a_call_that_was_held_before_the_store_went_is_counted_once() -> None:
    found, charged = budgets(MemoryStore(), BudgetPolicy(session=Limits(tokens=1_000))), Charged("alice", session=A)

    async def taken(book: Book, call_id: str) -> Taken:
        need = Need(100, output=50)
        return await found.reserve(book, call_id, lambda: need, lambda _: record("a", 0.0), is_stream=False)

    held = await taken(await found.book(charged), "1")
    await taken(found.blind_book(charged), "2")
    (before,) = found.blind_book(charged).standings
    found.close(held, Amount(150, 0, 1))
    assert found.blind_book(charged).standings == (before,)
    assert before.used.tokens + before.held.tokens == 300
