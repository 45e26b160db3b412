"""Reloads in the audit log: one entry for all workers, and who requested it."""

from __future__ import annotations

import asyncio
import platform
import time

from gateway.app.reload_audit import SIGNAL, claim_reload, record_reload, record_signal
from gateway.config.schema import Settings
from gateway.core.audit import Author
from gateway.core.errors import StoreUnavailable
from gateway.stores.memory import MemoryStore

OLD, NEW, NEWER = (Settings.model_validate({"budget": {"tokens": tokens}}) for tokens in (1, 2, 3))
ADMIN = Author("admin key", "192.0.2.1")


async def actors(store: MemoryStore) -> list[str]:
    return [entry.actor for entry in (await store.changes(100)).entries]


async def test_one_of_several_workers_records_a_signal() -> None:
    store = MemoryStore()
    await asyncio.gather(*(record_signal(store, OLD, NEW) for _ in range(8)))
    [entry] = (await store.changes(100)).entries
    assert (entry.action, entry.target) == ("config.reload", "configuration")
    assert (entry.actor, entry.origin) == (SIGNAL, platform.node())
    assert (entry.old, entry.new) == ({"budget.tokens": 1}, {"budget.tokens": 2})


async def test_each_reload_with_other_changes_is_recorded() -> None:
    store = MemoryStore()
    await record_signal(store, OLD, NEW)
    await record_signal(store, NEW, NEWER)
    assert await actors(store) == [SIGNAL] * 2


async def test_a_reload_without_changes_is_recorded_unless_another_worker_has_just_recorded_one() -> None:
    store = MemoryStore()
    await record_signal(store, NEW, NEW)
    await record_signal(store, OLD, NEW)
    await record_signal(store, NEW, NEW)
    assert [entry.new for entry in (await store.changes(100)).entries] == [{"budget.tokens": 2}, {}]


async def test_a_worker_whose_clock_was_read_first_does_not_record_the_reload_too() -> None:
    store, now = MemoryStore(), time.time()
    for seconds in (0.5, 0.0, 0.3):
        await record_signal(store, OLD, NEW, lambda seconds=seconds: now + seconds)  # type: ignore[misc]
    assert await actors(store) == [SIGNAL]


async def test_a_requested_reload_is_not_recorded_as_a_signal_too() -> None:
    store = MemoryStore()
    await claim_reload(store, OLD, NEW)
    await asyncio.gather(*(record_signal(store, OLD, NEW) for _ in range(3)), record_reload(store, ADMIN, OLD, NEW))
    assert await actors(store) == ["admin key"]


async def test_a_claim_that_cannot_be_read_is_replaced() -> None:
    store = MemoryStore()
    await store.learn({f"served/reload/{platform.node()}": lambda _: b"{"})
    await record_signal(store, OLD, NEW)
    assert await actors(store) == [SIGNAL]


async def test_every_worker_tries_while_the_store_is_unavailable() -> None:
    class Away(MemoryStore):
        async def learn(self, lessons: object) -> dict[str, bytes]:
            del lessons
            raise StoreUnavailable("gone")

    assert await claim_reload(Away(), OLD, NEW)
