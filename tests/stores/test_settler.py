"""No settlement is lost while the store is unavailable, and none is counted twice after that."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.core.errors import StoreConflict, StoreDamaged, StoreUnavailable
from gateway.core.ledger.session_key import SessionKey
from gateway.core.record import CallRecord
from gateway.core.stored import Lesson, StepEnding
from gateway.core.usage import Totals
from gateway.stores.journal import Journal
from gateway.stores.memory import MemoryStore
from gateway.stores.settler import Settler
from tests.support.timing import eventually, in_time

MakeRecord = Callable[..., CallRecord]

KEY = SessionKey("alice", "s")


class FlakyStore(MemoryStore):
    """`away`: refuses. `deaf`: writes, and then says it could not."""

    def __init__(self) -> None:
        super().__init__()
        self.away = False
        self.deaf = False
        self.tries = 0

    async def settle(self, record: CallRecord, ending: StepEnding | None = None) -> Totals:
        self.tries += 1
        if self.away:
            raise StoreUnavailable("The store is unavailable.")
        totals = await super().settle(record, ending)
        if self.deaf:
            raise StoreUnavailable("The answer was lost.")
        return totals


@pytest.fixture
def store() -> FlakyStore:
    return FlakyStore()


async def accepts_calls(settler: Settler) -> None:
    await eventually(lambda: not settler.availability.is_unavailable, "the settler recovers")
    settler.availability.check()


async def test_settlement_goes_straight_to_an_available_store(store: FlakyStore, record: MakeRecord) -> None:
    settler = Settler(store)
    totals = await settler.settle(record())
    assert totals is not None
    assert totals == await store.totals(KEY)
    settler.availability.check()
    await settler.aclose()


@pytest.mark.parametrize("is_good", [True, False])
async def test_unwritable_journal_is_logged_at_start(
    store: FlakyStore, tmp_path: Path, heard: pytest.LogCaptureFixture, is_good: bool
) -> None:
    (tmp_path / "file").touch()
    settler = Settler(store, Journal(tmp_path / ("new" if is_good else "file")))
    settler.start()
    await settler.aclose()
    assert [entry.levelname for entry in heard.records if "store.journal" in entry.getMessage()] == (
        [] if is_good else ["WARNING"]
    )


async def test_outage_refuses_new_calls_and_keeps_settlements(store: FlakyStore, record: MakeRecord) -> None:
    settler = Settler(store)
    store.away = True
    assert [await settler.settle(record()) for _ in range(2)] == [None, None]
    with pytest.raises(StoreUnavailable, match=r"unavailable\. Ended calls that wait for it: 2\."):
        settler.availability.check()
    await settler.aclose()


async def test_after_an_outage_settlements_are_written_once_and_calls_accepted(
    store: FlakyStore, record: MakeRecord
) -> None:
    settler = Settler(store)
    items = [record(at=1_000.0 + number) for number in range(5)]
    store.away = True
    for item in items:
        await settler.settle(item)
    assert settler.availability.failures == 1, "none that is known to be away is asked"
    store.away = False
    await accepts_calls(settler)
    assert (await store.totals(KEY)).calls == 5
    assert list(await store.calls(KEY, 10)) == items[::-1]
    assert store.tries == 6, "while it is known to be away, nobody waits for the store"
    await settler.aclose()
    assert (await store.totals(KEY)).calls == 5


async def test_waiting_records_are_settled_in_parallel_and_failed_ones_stay(record: MakeRecord) -> None:
    """A store that is far away, and calls that go on: one by one they would wait faster than they are taken."""

    class FarStore(FlakyStore):
        under_way = most = 0

        async def settle(self, record: CallRecord, ending: StepEnding | None = None) -> Totals:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            await asyncio.sleep(0.01)
            self.under_way -= 1
            if self.tries == 30:
                self.away = True
            return await super().settle(record, ending)

    store = FarStore()
    settler = Settler(store, accepts_without_store=True)
    settler.availability.report(StoreUnavailable("away"))
    records = [record() for _ in range(100)]
    for one in records:
        await settler.settle(one)
    await eventually(lambda: store.tries >= 64, "the first are offered")
    await eventually(lambda: settler.waiting == 70, "those that were refused wait")
    store.away = False
    await accepts_calls(settler)
    assert store.most == 64
    assert (await store.totals(KEY)).calls == 100
    await settler.aclose()


async def test_store_becomes_available_while_calls_keep_ending(record: MakeRecord) -> None:
    class SlowStore(FlakyStore):
        async def settle(self, record: CallRecord, ending: StepEnding | None = None) -> Totals:
            await asyncio.sleep(0.02)
            return await super().settle(record, ending)

    store = SlowStore()
    settler = Settler(store, accepts_without_store=True)
    settler.availability.report(StoreUnavailable("away"))
    ended: list[asyncio.Task[Totals | None]] = []

    async def ending() -> None:
        while True:
            ended.append(asyncio.create_task(settler.settle(record())))
            await asyncio.sleep(0.001)

    calls = asyncio.create_task(ending())
    await accepts_calls(settler)
    calls.cancel()
    await asyncio.gather(*ended)
    await settler.aclose()
    assert (await store.totals(KEY)).calls == len(ended)


async def test_outage_before_the_first_settlement_ends_when_the_store_replies() -> None:
    class Silent(FlakyStore):
        pings = 0

        async def ping(self) -> None:
            self.pings += 1
            if self.away:
                raise StoreUnavailable("The store is unavailable.")

    store = Silent()
    settler = Settler(store)
    store.away = True
    settler.availability.report(StoreUnavailable("The store is unavailable."))
    await eventually(lambda: store.pings == 2, "it is asked")
    with pytest.raises(StoreUnavailable):
        settler.availability.check()
    store.away = False
    await accepts_calls(settler)
    await settler.aclose()


async def test_damage_is_logged_once_and_blocks_no_other_call(
    store: FlakyStore, heard: pytest.LogCaptureFixture
) -> None:
    settler = Settler(store)
    for place in ("one", "other", "one"):
        settler.availability.report(StoreDamaged(f"The account {place} cannot be read."))
    settler.availability.check()
    named = [entry.getMessage() for entry in heard.records if "cannot be read" in entry.getMessage()]
    assert [place for line in named for place in ("one", "other") if f" {place} " in line] == ["one", "other"]
    await settler.aclose()


@pytest.mark.parametrize(
    ("refusal", "is_unavailable"), [(StoreConflict("moved"), False), (StoreUnavailable("gone"), True)]
)
async def test_record_that_fails_with_its_ending_can_be_settled_without_it(
    refusal: StoreUnavailable, is_unavailable: bool, record: MakeRecord
) -> None:
    class Refusing(MemoryStore):
        async def settle(self, record: CallRecord, ending: StepEnding | None = None) -> Totals:
            raise refusal

    settler, call = Settler(Refusing()), record()
    with pytest.raises(type(refusal)):
        await settler.settle_with_step(call, lambda places: (places, call), ())
    assert (settler.availability.is_unavailable, settler.waiting) == (is_unavailable, 0)
    await settler.aclose()


async def test_unavailable_store_is_asked_at_intervals(store: FlakyStore, record: MakeRecord) -> None:
    settler = Settler(store)
    store.away = True
    for _ in range(20):
        await settler.settle(record())
    before = store.tries
    with in_time(at_least=0.4):
        await eventually(lambda: store.tries >= before + 2)
    store.away = False
    await accepts_calls(settler)
    assert (await store.totals(KEY)).calls == 20
    await settler.aclose()


async def test_second_outage_loses_nothing(store: FlakyStore, record: MakeRecord) -> None:
    settler = Settler(store)
    for _ in range(2):
        store.away = True
        await settler.settle(record())
        store.away = False
        await accepts_calls(settler)
    assert (await store.totals(KEY)).calls == 2
    await settler.aclose()


async def test_settlement_that_was_written_despite_an_error_counts_once(store: FlakyStore, record: MakeRecord) -> None:
    settler = Settler(store)
    store.deaf = True
    assert await settler.settle(record()) is None
    store.deaf = False
    await accepts_calls(settler)
    assert (await store.totals(KEY)).calls == 1
    await settler.aclose()


async def test_closing_settles_waiting_records_with_a_last_try(store: FlakyStore, record: MakeRecord) -> None:
    settler = Settler(store)
    store.away = True
    for _ in range(3):
        await settler.settle(record())
    store.away = False
    await settler.aclose()
    assert (await store.totals(KEY)).calls == 3
    settler.availability.check()


async def test_settlement_lost_at_shutdown_is_logged(
    store: FlakyStore, record: MakeRecord, caplog: pytest.LogCaptureFixture
) -> None:
    settler = Settler(store)
    store.away = True
    item = record()
    await settler.settle(item)
    with caplog.at_level(logging.ERROR, "gateway"):
        await settler.aclose()
    assert any(item.call_id in entry.getMessage() and "lost" in entry.getMessage() for entry in caplog.records)


@pytest.fixture
def full(tmp_path: Path) -> Path:
    """A folder in which no journal can be made, as on a full disk; deleted, there is room."""
    blocked = tmp_path / "journals"
    blocked.write_bytes(b"")
    return blocked


async def test_running_calls_continue_if_progress_cannot_be_journaled_and_it_is_logged_once(
    store: FlakyStore, record: MakeRecord, full: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settler, none = Settler(store, Journal(full)), Settler(store)
    await none.note([record()])
    with caplog.at_level(logging.ERROR, "gateway"):
        for _ in range(3):
            await settler.note([record()])
        full.unlink()
        await settler.note([record()])
    assert [*map(logging.LogRecord.getMessage, caplog.records)] == [
        f"the progress of running calls cannot be journaled: [Errno 17] File exists: '{full}'"
    ]
    assert len([*full.glob("*.journal")]) == 1
    await settler.aclose()
    await none.aclose()


async def test_records_in_memory_are_journaled_when_the_disk_has_room_again(
    store: FlakyStore, record: MakeRecord, full: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settler = Settler(store, Journal(full))
    store.away = True
    with caplog.at_level(logging.ERROR, "gateway"):
        items = [record() for _ in range(3)]
        for item in items:
            await settler.settle(item)
        await eventually(lambda: store.tries > 4, "it is offered again")
        full.unlink()
        await eventually(lambda: written_in(full) == 3, "what waits is on the disk")
    said = [entry.getMessage() for entry in caplog.records if "waits in memory" in entry.getMessage()]
    assert len(said) == 3, "each is said once"
    store.away = False
    await accepts_calls(settler)
    assert (await store.totals(KEY)).calls == 3
    assert written_in(full) == 0
    await settler.aclose()


async def test_records_in_memory_are_journaled_at_shutdown(
    store: FlakyStore, record: MakeRecord, full: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settler = Settler(store, Journal(full))
    store.away = True
    await settler.settle(record())
    full.unlink()
    with caplog.at_level(logging.ERROR, "gateway"):
        await settler.aclose()
    assert written_in(full) == 1
    assert "lost" not in caplog.text


async def test_record_that_neither_store_nor_journal_takes_at_shutdown_is_logged(
    store: FlakyStore, record: MakeRecord, full: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settler = Settler(store, Journal(full))
    store.away = True
    item = record()
    await settler.settle(item)
    with caplog.at_level(logging.ERROR, "gateway"):
        await settler.aclose()
    assert f"settlement of call {item.call_id} is lost" in caplog.text


def written_in(folder: Path) -> int:
    """Records in the journals of a folder."""
    return sum(file.read_bytes().count(b"\n") for file in folder.glob("*.journal"))


async def test_outage_and_its_end_are_logged_once_each(
    store: FlakyStore, record: MakeRecord, caplog: pytest.LogCaptureFixture
) -> None:
    settler = Settler(store)
    with caplog.at_level(logging.WARNING, "gateway"):
        store.away = True
        for _ in range(5):
            await settler.settle(record())
        store.away = False
        await accepts_calls(settler)
        await settler.aclose()
    said = [entry.getMessage() for entry in caplog.records]
    assert sum("store unavailable" in text for text in said) == 1
    assert sum("store available again" in text for text in said) == 1


async def test_waiting_records_are_bounded_and_lost_ones_logged(
    store: FlakyStore, record: MakeRecord, caplog: pytest.LogCaptureFixture
) -> None:
    settler = Settler(store)
    store.away = True
    with caplog.at_level(logging.CRITICAL, "gateway"):
        for _ in range(10_000):
            await settler.settle(record())
    last = record()
    with caplog.at_level(logging.ERROR, "gateway"):
        await settler.settle(last)
    assert any(last.call_id in entry.getMessage() and "lost" in entry.getMessage() for entry in caplog.records)
    assert settler.waiting == 10_000
    store.away = False
    await settler.aclose()
    assert (await store.totals(KEY)).calls == 10_000


async def test_settlement_of_a_cancelled_caller_is_tried_again(store: FlakyStore, record: MakeRecord) -> None:
    waiting = asyncio.Event()

    class SlowOnce(FlakyStore):
        async def settle(self, record: CallRecord, ending: StepEnding | None = None) -> Totals:
            if self.tries == 0:
                self.tries += 1
                waiting.set()
                await asyncio.sleep(60)
            return await super().settle(record, ending)

    slow = SlowOnce()
    settler = Settler(slow)
    task = asyncio.create_task(settler.settle(record()))
    await waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    settler.availability.check()
    await settler.aclose()
    assert (await slow.totals(KEY)).calls == 1


LESSON = ("key", '{"call_id":"%s"}')


def lesson_of(item: CallRecord) -> CallRecord:
    key, value = LESSON
    return replace(item, lesson=(key, value % item.call_id))


@pytest.mark.parametrize("is_unavailable", [False, True])
async def test_lesson_of_a_record_is_learned_once(
    store: FlakyStore, record: MakeRecord, *, is_unavailable: bool
) -> None:
    settler, item = Settler(store), record()
    await store.learn({"key": lambda _: b"of another call"})
    store.away = is_unavailable
    await settler.settle(lesson_of(item))
    store.away = False
    await accepts_calls(settler)
    assert await store.learned("key") == (LESSON[1] % item.call_id).encode()
    assert list(await store.calls(KEY, 10)) == [item], "it is no part of what is kept"
    noted = (LESSON[1] % item.call_id).encode() + b" and what came of it"
    await store.learn({"key": lambda _: noted})
    await settler.settle(lesson_of(item))
    assert await store.learned("key") == noted
    await settler.aclose()


async def test_lesson_of_a_recovered_record_is_learned(store: FlakyStore, record: MakeRecord, tmp_path: Path) -> None:
    item, gone, other = record(), Settler(store, Journal(tmp_path)), Settler(store, Journal(tmp_path))
    store.away = True
    await gone.settle(lesson_of(item))
    await gone.aclose()
    store.away = False
    assert await other.recover() == 1
    assert await store.learned("key") == (LESSON[1] % item.call_id).encode()
    assert list(await store.calls(KEY, 10)) == [item]
    await other.aclose()


async def test_record_is_settled_after_its_lesson_is_learned(record: MakeRecord) -> None:
    class DullStore(FlakyStore):
        async def learn(self, lessons: Mapping[str, Lesson]) -> Mapping[str, bytes]:
            if self.away:
                raise StoreUnavailable("The store is unavailable.")
            return await super().learn(lessons)

    store, item = DullStore(), record()
    settler = Settler(store)
    store.away = True
    assert await settler.settle(lesson_of(item)) is None
    assert store.tries == 0
    with pytest.raises(StoreUnavailable):
        await settler.settle_with_step(lesson_of(item), lambda places: (places, item), ())
    store.away = False
    await accepts_calls(settler)
    assert await store.learned("key") is not None
    assert list(await store.calls(KEY, 10)) == [item]
    await settler.aclose()


async def test_records_only_on_disk_are_settled_even_if_the_file_was_deleted(
    store: FlakyStore, record: MakeRecord, tmp_path: Path
) -> None:
    folder = tmp_path / "j"
    settler = Settler(store, Journal(folder), most_waiting=1)
    store.away = True
    for _ in range(3):
        await settler.settle(record())
    shutil.rmtree(folder)
    store.away = False
    await eventually(lambda: not (settler.waiting or settler.availability.is_unavailable), "the store is back")
    await settler.recover()
    assert len(await store.calls(KEY, 10)) == 3
    await settler.aclose()


async def test_notes_about_running_calls_stay_when_the_journal_is_left_to_others(
    store: FlakyStore, record: MakeRecord, tmp_path: Path
) -> None:
    journal = Journal(tmp_path / "j")
    settler = Settler(store, journal, most_waiting=1)
    store.away = True
    await settler.settle(record())
    await settler.settle(record())
    await settler.note([record()])
    store.away = False
    await eventually(lambda: not (settler.waiting or settler.availability.is_unavailable), "the store is back")
    assert len([*journal.left_over()]) == 1, "the file of what waits, and no note of a call that lives"
    await settler.aclose()
