"""The summary of a result is decided once, read as it was stored, and deleted with its session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gateway.context.summary_choices import EXTRACT, SummaryChoices
from gateway.core.ledger.session_key import SessionKey
from gateway.stores.memory import MemoryStore

KEY, OTHER = SessionKey("alice", "s"), SessionKey("alice", "other")
ROOM = 1_000


class Counting(MemoryStore):
    """A store that counts how often its texts are read."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    async def results(self, session: SessionKey, handles: Sequence[str]) -> Mapping[str, str]:
        self.reads += 1
        return await super().results(session, handles)


async def test_decisions_are_shared_by_workers_but_not_by_sessions() -> None:
    store = MemoryStore()
    said = {"a": "a summary", "b": EXTRACT}
    await SummaryChoices(store).decide(KEY, said, ROOM)
    other_worker = SummaryChoices(store)
    assert await other_worker.known(KEY, ["a", "b", "c"]) == said
    assert await other_worker.known(OTHER, ["a", "b"]) == {}


async def test_the_first_decision_stays() -> None:
    store = MemoryStore()
    first, second = SummaryChoices(store), SummaryChoices(store)
    await first.decide(KEY, {"a": "first", "b": EXTRACT}, ROOM)
    await second.decide(KEY, {"a": "second", "b": "second"}, ROOM)
    for worker in (first, second):
        assert await worker.known(KEY, ["a", "b"]) == {"a": "first", "b": EXTRACT}


async def test_decisions_of_a_turn_are_read_with_one_request_and_cached() -> None:
    store = Counting()
    await SummaryChoices(store).decide(KEY, {"a": "x", "b": "y", "c": EXTRACT}, ROOM)
    worker, store.reads = SummaryChoices(store), 0
    for _ in range(3):
        assert len(await worker.known(KEY, ["a", "b", "c"])) == 3
    assert store.reads == 1
    assert await worker.known(KEY, []) == {}
    assert store.reads == 1


async def test_decisions_that_may_be_deleted_are_read_again() -> None:
    store = MemoryStore()
    worker = SummaryChoices(store)
    await worker.decide(KEY, {"a": "old", "b": "kept"}, ROOM)
    await store.delete(KEY)
    await store.keep_results(KEY, {"b_s": "kept"}, ROOM)
    assert await worker.known(KEY, ["a", "b"], unsure=["a", "b"]) == {"b": "kept"}
    await worker.decide(KEY, {"a": "new"}, ROOM)
    assert await worker.known(KEY, ["a"]) == {"a": "new"}


async def test_a_decision_without_room_is_not_stored() -> None:
    worker = SummaryChoices(MemoryStore())
    await worker.decide(KEY, {"a": "x" * 10, "b": EXTRACT}, 9)
    assert await worker.known(KEY, ["a", "b"]) == {"b": EXTRACT}
