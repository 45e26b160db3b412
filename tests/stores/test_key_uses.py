"""The last use of client keys is saved after the calls, and is never lost or set back."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from gateway.core.errors import StoreUnavailable
from gateway.core.ports import Store
from gateway.core.stored import Lesson
from gateway.stores.key_uses import KeyUses, last_uses
from gateway.stores.memory import MemoryStore
from tests.stores.conftest import MakeRecord


async def test_the_latest_call_of_each_key_is_saved_on_every_store(store: Store, record: MakeRecord) -> None:
    one, other = KeyUses(store), KeyUses(store)
    for uses, namespace, at in ((one, "alice", 2_000.0), (other, "alice", 1_000.0), (other, "bob", 1_500.0)):
        uses.record(record(namespace=namespace, at=at, duration_s=0.5), None)
    one.record(record(None), None)
    one.record(record(namespace="default"), None)
    assert await last_uses(store) == {}
    await one.aclose()
    await other.aclose()
    assert await last_uses(store) == {"alice": 2_000.5, "bob": 1_500.5}


async def test_many_calls_are_one_write(record: MakeRecord) -> None:
    store = CountingStore()
    uses = KeyUses(store, write_after_s=0)
    for number in range(100):
        uses.record(record(at=1_000.0 + number, duration_s=0.0), None)
    await asyncio.wait_for(store.written.wait(), 5)
    assert (store.writes, await last_uses(store)) == (1, {"alice": 1_099.0})
    await uses.aclose()
    assert store.writes == 1


async def test_times_that_the_store_did_not_take_are_saved_later(record: MakeRecord) -> None:
    store = CountingStore()
    uses, store.is_away = KeyUses(store, write_after_s=0), True
    uses.record(record(duration_s=0.0), None)
    await asyncio.wait_for(store.written.wait(), 5)
    assert await last_uses(store) == {}
    store.is_away = False
    await uses.aclose()
    assert await last_uses(store) == {"alice": 1_000.0}


async def test_values_of_another_version_are_ignored(store: Store) -> None:
    await store.learn({"served/client-key-uses": lambda _: b'{"alice": "yesterday"}'})
    assert await last_uses(store) == {}


class CountingStore(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.writes, self.is_away, self.written = 0, False, asyncio.Event()

    async def learn(self, lessons: Mapping[str, Lesson]) -> Mapping[str, bytes]:
        self.writes += 1
        self.written.set()
        if self.is_away:
            raise StoreUnavailable("away")
        return await super().learn(lessons)
