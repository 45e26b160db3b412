"""Parents of sessions, also where several calls say at once who they are."""

from __future__ import annotations

import asyncio
import time

from gateway.budgeting import Budgets
from gateway.core.errors import InvalidRequest
from gateway.core.namespaces import SessionKey
from gateway.core.session import Remembered
from gateway.core.spending import BudgetPolicy
from gateway.stores.blind import Blind
from gateway.stores.leases import Leases
from gateway.stores.memory import MemoryStore

A, B = SessionKey("alice", "a"), SessionKey("alice", "b")


class SlowStore(MemoryStore):
    """Others get their turn while it is read."""

    async def remembered(self, session: SessionKey) -> Remembered:
        found = await super().remembered(session)
        await asyncio.sleep(0)
        return found


def budgets(store: MemoryStore) -> Budgets:
    return Budgets(store, Leases(store, store.settle, lease_s=60), Blind(), BudgetPolicy(), time.time)


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
