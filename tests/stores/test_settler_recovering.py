"""What workers left in their journals is settled file by file: one that cannot be keeps no other waiting."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from gateway.core.errors import StoreUnavailable
from gateway.core.ledger.session_key import SessionKey
from gateway.core.ports import RecordRefused
from gateway.core.record import CallRecord
from gateway.core.stored import StepEnding
from gateway.core.usage import Totals
from gateway.stores.journal import Journal
from gateway.stores.memory import MemoryStore
from gateway.stores.settler import Settler
from tests.support.timing import eventually

MakeRecord = Callable[..., CallRecord]

KEY = SessionKey("alice", "s")


@pytest.fixture
def journals(tmp_path: Path) -> Path:
    return tmp_path / "journals"


@pytest.fixture
async def settler(journals: Path) -> AsyncIterator[Settler]:
    made = Settler(MemoryStore(), Journal(journals))
    yield made
    await made.aclose()


def left(folder: Path, *records: CallRecord) -> Path:
    """The file of a worker that is gone."""
    before, journal = set(folder.glob("*.journal")), Journal(folder)
    for record in records:
        journal.append(record)
    journal.close()
    (file,) = set(folder.glob("*.journal")) - before
    return file


def unreadable(folder: Path) -> Path:
    """A file that can be opened and locked but not read, as on a disk that fails: the memory of this process."""
    file = folder / "0-0-0.journal"
    file.symlink_to("/proc/self/mem")
    return file


def said(caplog: pytest.LogCaptureFixture, *words: str) -> list[str]:
    texts = [entry.getMessage() for entry in caplog.records if entry.levelno == logging.ERROR]
    return [text for text in texts if all(word in text for word in words)]


async def test_a_file_that_cannot_be_read_is_named_once_and_the_others_are_settled(
    journals: Path, record: MakeRecord, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore()
    settler = Settler(store, Journal(journals))
    other = left(journals, record(), record())
    broken = unreadable(journals)
    assert await settler.recover() == 2
    assert (await store.totals(KEY)).calls == 2
    assert not other.exists()
    left(journals, record())
    assert await settler.recover() == 1
    assert broken.is_symlink(), "what was not settled stays"
    assert len(said(caplog, str(broken))) == 1
    await settler.aclose()


class Slow(MemoryStore):
    """Takes no record before as many are on their way as may be, and counts those."""

    def __init__(self) -> None:
        super().__init__()
        self.under_way = self.most = 0

    async def settle(self, record: CallRecord, ending: StepEnding | None = None) -> Totals:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(0)
        self.under_way -= 1
        return await super().settle(record, ending)


async def test_a_long_file_is_settled_in_parts_and_the_records_of_each_at_once(
    journals: Path, record: MakeRecord
) -> None:
    store = Slow()
    settler = Settler(store, Journal(journals))
    file = left(journals, *(record() for _ in range(150)))
    assert await settler.recover() == 150
    assert store.most == 64
    assert (await store.totals(KEY)).calls == 150
    assert not file.exists()
    await settler.aclose()


async def test_started_settler_recovers_journals_by_itself(journals: Path, record: MakeRecord) -> None:
    store = MemoryStore()
    settler = Settler(store, Journal(journals))
    file = left(journals, record())
    settler.start()
    await eventually(lambda: not file.exists())
    assert (await store.totals(KEY)).calls == 1
    await settler.aclose()


async def test_a_file_that_breaks_again_is_named_again(
    settler: Settler, journals: Path, record: MakeRecord, caplog: pytest.LogCaptureFixture
) -> None:
    file = left(journals, record())
    value = file.read_bytes()
    for number in range(1, 3):
        file.unlink()
        broken = unreadable(journals)
        assert await settler.recover() == 0
        assert len(said(caplog, str(broken))) == number
        broken.unlink()
        (journals / broken.name).write_bytes(value)
        assert await settler.recover() == 1
        file.write_bytes(value)


async def test_recovery_stops_when_the_store_becomes_unavailable(journals: Path, record: MakeRecord) -> None:
    class Going(MemoryStore):
        tries = 0

        async def settle(self, record: CallRecord, ending: StepEnding | None = None) -> Totals:
            self.tries += 1
            if self.tries == 2:
                raise StoreUnavailable("The store is unavailable.")
            return await super().settle(record, ending)

    store = Going()
    settler = Settler(store, Journal(journals))
    files = [left(journals, record()) for _ in range(3)]
    with pytest.raises(StoreUnavailable):
        await settler.recover()
    assert [file.exists() for file in files].count(True) == 2
    assert store.tries == 2
    assert await settler.recover() == 2
    assert (await store.totals(KEY)).calls == 3
    await settler.aclose()


async def test_a_record_that_can_neither_be_settled_nor_set_aside_stays_in_the_journal(
    journals: Path, record: MakeRecord
) -> None:
    class Refusing(MemoryStore):
        refusal: StoreUnavailable | None = StoreUnavailable("The store is unavailable.")

        async def settle(self, record: CallRecord, ending: StepEnding | None = None) -> Totals:
            if self.refusal is not None:
                raise self.refusal
            return await super().settle(record, ending)

    class Full(Journal):
        def set_aside(self, record: CallRecord) -> Path:
            raise OSError("no space")

    store = Refusing()
    settler = Settler(store, Full(journals))
    await settler.settle(record())
    store.refusal = RecordRefused("not this one")
    await eventually(lambda: not (settler.waiting or settler.availability.is_unavailable))
    await settler.aclose()
    store.refusal = None
    later = Settler(store, Journal(journals))
    assert await later.recover() == 1
    assert (await store.totals(KEY)).calls == 1
    await later.aclose()


@pytest.mark.parametrize("fails_at", [0, 1])
async def test_recovered_file_is_deleted_after_each_record_is_settled_or_set_aside(
    fails_at: int, journals: Path, record: MakeRecord
) -> None:
    class Refusing(MemoryStore):
        async def settle(self, record: CallRecord, ending: StepEnding | None = None) -> Totals:
            raise RecordRefused("not this one")

    class FullOnce(Journal):
        tries = 0

        def set_aside(self, record: CallRecord) -> Path:
            self.tries += 1
            if self.tries == fails_at + 1:
                raise OSError("no space")
            return super().set_aside(record)

    file = left(journals, record(), record())
    settler = Settler(Refusing(), FullOnce(journals))
    assert await settler.recover() == 0
    assert file.exists(), "one of them is nowhere else"
    assert await settler.recover() == 0
    assert not file.exists()
    await settler.aclose()


async def test_undeletable_journal_does_not_prolong_the_outage(
    tmp_path: Path, record: MakeRecord, caplog: pytest.LogCaptureFixture
) -> None:
    class Stuck(Journal):
        def clear(self) -> None:
            super().clear()
            raise OSError("the disk is read-only")

    store, came_back = MemoryStore(), list[bool]()
    settler = Settler(store, Stuck(tmp_path / "journals"))
    settler.availability.on_available = lambda: came_back.append(True)
    settler.availability.report(StoreUnavailable("The store is unavailable."))
    await settler.settle(record())
    await eventually(lambda: came_back)
    assert said(caplog, "cannot be deleted", "the disk is read-only")
    settler.availability.check()
    assert (await store.totals(KEY)).calls == 1
    await settler.aclose()


async def test_journals_of_other_stores_are_logged_once_at_start(
    tmp_path: Path, record: MakeRecord, heard: pytest.LogCaptureFixture
) -> None:
    file = left(tmp_path / ("a" * 12), record())
    settler = Settler(MemoryStore(), Journal(tmp_path / ("0" * 12)))
    settler.start()
    await settler.aclose()
    [warning] = [entry.getMessage() for entry in heard.records]
    assert str(file.parent) in warning
    assert file.exists()
