"""The store that calls use: none waits for it while it is unavailable."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.core.errors import StoreConflict, StoreDamaged, StoreUnavailable
from gateway.core.ledger.arithmetic import Amount, Claim, Hold, Limits
from gateway.core.ledger.session_key import SessionKey
from gateway.core.ports import (
    AuditLog,
    Calls,
    ClientKeys,
    Ledger,
    Lessons,
    RecordRefused,
    Results,
    Sessions,
    Store,
    UsageHistory,
)
from gateway.core.record import CallRecord
from gateway.stores.availability import Availability
from gateway.stores.fallback import FallbackStore
from gateway.stores.memory import MemoryStore

SESSION = SessionKey("alice", "a")
CLAIM = Claim(SESSION.account, Limits(tokens=100))
#: the methods that no call uses, or that a call can do without
OPTIONAL = {
    *("overdue_holds", "override_limits", "totals", "session", "sessions", "update", "reset", "delete", "expire"),
    *("missing_results", "results_size", "keep_results", "results", "result", "add_key", "revoke_key"),
    *("change_key", "session_counts"),
    *("each_call", "usage", "record_change", "changes"),
}
METHODS = sorted(
    name
    for protocol in (Ledger, Sessions, Calls, UsageHistory, Results, ClientKeys, Lessons, AuditLog)
    for name, _ in inspect.getmembers(protocol, inspect.isfunction)
    if not name.startswith("_")
)


class FailingStore(MemoryStore):
    """A store of which each method raises `error`, and counts that it was asked."""

    def __init__(self, error: StoreUnavailable) -> None:
        super().__init__()
        self.asked = 0

        async def fail(*_: object, **__: object) -> None:
            self.asked += 1
            raise error

        async def fail_each(*_: object) -> AsyncIterator[CallRecord]:
            await fail()
            for one in list[CallRecord]():
                yield one

        for name in METHODS:
            setattr(self, name, fail_each if name == "each_call" else fail)


async def ask(store: Store, name: str) -> None:
    """Call a method with as many arguments as it needs."""
    method: Any = getattr(store, name)
    needed = [one for one in inspect.signature(method).parameters.values() if one.default is one.empty]
    positional = [None for one in needed if one.kind is not one.KEYWORD_ONLY]
    asked = method(*positional, **{one.name: None for one in needed if one.kind is one.KEYWORD_ONLY})
    if inspect.isasyncgen(asked):
        _ = [one async for one in asked]
    else:
        await asked


@pytest.mark.parametrize("name", METHODS)
async def test_the_first_error_marks_the_store_as_unavailable_if_every_call_needs_it(name: str) -> None:
    failing, availability = FailingStore(StoreUnavailable("gone")), Availability()
    store = FallbackStore(failing, availability)
    with pytest.raises(StoreUnavailable, match="gone"):
        await ask(store, name)
    assert availability.is_unavailable == (name not in OPTIONAL)
    assert availability.failures == (name not in OPTIONAL)


@pytest.mark.parametrize("name", METHODS)
async def test_no_method_asks_an_unavailable_store(name: str) -> None:
    failing, availability = FailingStore(StoreUnavailable("gone")), Availability(waiting=lambda: 3)
    availability.report(StoreUnavailable("gone"))
    with pytest.raises(StoreUnavailable, match=r"Ended calls that wait for it: 3\."):
        await ask(FallbackStore(failing, availability), name)
    assert failing.asked == 0
    assert availability.failures == 1, "a call that was refused at once is no new failure"


@pytest.mark.parametrize(
    ("error", "failures"), [(StoreConflict("busy"), 0), (RecordRefused("bad"), 0), (StoreDamaged("broken"), 1)]
)
async def test_conflicts_refused_records_and_damage_leave_the_store_available(
    error: StoreUnavailable, failures: int
) -> None:
    availability = Availability()
    store = FallbackStore(FailingStore(error), availability)
    with pytest.raises(type(error)):
        await store.balances([CLAIM])
    assert (availability.is_unavailable, availability.failures) == (False, failures)


async def test_balances_that_were_read_are_known_while_the_store_is_unavailable() -> None:
    store, availability = MemoryStore(), Availability(accepts_without_store=True)
    fallback = FallbackStore(store, availability)
    await fallback.balances([CLAIM])
    availability.report(StoreUnavailable("gone"))
    hold = Hold("h", (CLAIM,), Amount(60, 0, 1))
    fallback.stale.reserve(hold)
    fallback.stale.settle("h", Amount(50, 0, 1))
    assert fallback.stale.balances([CLAIM])[0].left("tokens") == 50
    availability.restore()
    assert fallback.stale.balances([CLAIM])[0].left("tokens") == 50, "the store reports it with its next balances"
    await fallback.balances([CLAIM])
    assert fallback.stale.balances([CLAIM])[0].left("tokens") == 100


async def test_a_call_is_refused_without_the_store_unless_calls_continue_without_it() -> None:
    Availability(accepts_without_store=True).check_accepts_without_store()
    with pytest.raises(StoreUnavailable):
        Availability().check_accepts_without_store()
    Availability().check()
