"""What only a store in memory has to do: forget, so that it does not grow without end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gateway.core.ids import call_id
from gateway.core.ledger.session_key import SessionKey
from gateway.core.record import CallRecord
from gateway.core.session import SessionState
from gateway.stores.memory import LESSONS_IN_ALL, STATES_IN_ALL, MemoryStore
from gateway.stores.memory.calls import CALLS_IN_ALL, CALLS_PER_SESSION

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


async def test_least_recently_changed_states_are_dropped_first() -> None:
    store = MemoryStore()
    keys = [SessionKey("alice", str(number)) for number in range(STATES_IN_ALL + 1)]
    state = SessionState({"p": {"prefix": "p"}})
    for key in [*keys[:-1], keys[0], keys[-1]]:
        await store.update(key, lambda _: state)
    kept = [(await store.remembered(key)).state == state for key in (*keys[:3], keys[-1])]
    assert kept == [True, False, True, True]


async def test_parents_are_kept_when_old_states_are_dropped() -> None:
    store = MemoryStore()
    key = SessionKey("alice", "s")
    await store.update(key, lambda state: state.with_parent("parent"))
    for number in range(STATES_IN_ALL):
        await store.update(SessionKey("alice", str(number)), lambda _: SessionState({"p": {"prefix": "p"}}))
    assert (await store.remembered(key)).state == SessionState(parent="parent")
    assert (await store.open_call(SessionKey("alice", "below"), [], with_totals=False, above=[key])).parents == (
        "parent",
    )


async def test_least_recently_changed_lessons_are_dropped_first() -> None:
    store = MemoryStore()
    keys = [str(number) for number in range(LESSONS_IN_ALL + 1)]
    for key in [*keys[:-1], keys[0], keys[-1]]:
        await store.learn({key: lambda _: b"x"})
    assert [await store.learned(key) for key in (*keys[:3], keys[-1])] == [b"x", None, b"x", b"x"]
