"""The budget that the running gateway notes in its store, in each kind of store."""

from __future__ import annotations

import pytest

from gateway.core.ledger.arithmetic import NO_LIMITS, Limits
from gateway.core.ledger.charging import BudgetPolicy
from gateway.core.ports import Store
from gateway.stores.running_budget import save_running_budget, with_running_budget

CONFIGURED = BudgetPolicy(session=Limits(tokens=7), warn_at=0.5)


async def test_without_a_note_the_configured_budget_is_given(store: Store) -> None:
    assert await with_running_budget(store, CONFIGURED) == CONFIGURED


@pytest.mark.parametrize("limits", [NO_LIMITS, Limits(tokens=5), Limits(nano_usd=10**9, calls=3, window=86_400.0)])
async def test_the_noted_budget_replaces_the_configured_one_and_nothing_else(store: Store, limits: Limits) -> None:
    await save_running_budget(store, BudgetPolicy(session=Limits(tokens=1)))
    await save_running_budget(store, BudgetPolicy(session=limits, warn_at=0.9))
    assert await with_running_budget(store, CONFIGURED) == BudgetPolicy(session=limits, warn_at=0.5)


async def test_a_note_that_cannot_be_read_is_left_alone(store: Store) -> None:
    await save_running_budget(store, CONFIGURED)
    await store.learn({"served/session-budget": lambda _: b'{"of": "a later version"}'})
    assert await with_running_budget(store, CONFIGURED) == CONFIGURED
