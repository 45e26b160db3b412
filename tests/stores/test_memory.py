"""What only a store in memory has to do: forget, so that it does not grow without end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gateway.core.ids import call_id
from gateway.core.ports import CallRecord, SessionKey
from gateway.stores.memory import CALLS_IN_ALL, CALLS_PER_SESSION, MemoryStore

MakeRecord = Callable[..., CallRecord]

KEY = SessionKey("alice", "s")


async def test_only_the_newest_calls_of_a_session_are_kept_and_its_totals_are_not_affected(record: MakeRecord) -> None:
    store = MemoryStore()
    for number in range(CALLS_PER_SESSION + 5):
        await store.settle(record(at=1_000.0 + number))
    calls = await store.calls(KEY, 2 * CALLS_PER_SESSION)
    assert len(calls) == CALLS_PER_SESSION
    assert calls[0].started_at == 1_000.0 + CALLS_PER_SESSION + 4
    assert (await store.totals(KEY)).calls == CALLS_PER_SESSION + 5


async def test_call_ids_are_not_remembered_without_bound(record: MakeRecord) -> None:
    store = MemoryStore()
    template = record(None, charge=None)
    ids = [call_id(number, bytes(10)) for number in range(CALLS_IN_ALL + 2)]
    for name in ids:
        await store.settle(replace(template, call_id=name, request_id=name))
    assert [await store.call(None, name) is None for name in ids[:4]] == [True, True, False, False]
