"""A settlement whose caller is cancelled, at whichever of its waits and again at the next, is neither lost nor doubled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.core.errors import StoreUnavailable
from gateway.core.ledger.arithmetic import Amount, Claim
from gateway.core.ledger.session_key import SessionKey
from gateway.core.ports import RecordRefused
from gateway.core.record import CallRecord
from gateway.core.steps import StepState
from gateway.core.stored import StepEnding
from gateway.core.usage import Totals
from gateway.stores.journal import Journal
from gateway.stores.settler import Settler
from gateway.stores.sqlite import SqliteStore
from tests.stores.files import PATIENT_S
from tests.support.cancelling import cancelled_at
from tests.support.timing import eventually

MakeRecord = Callable[..., CallRecord]

KEY = SessionKey("alice", "s")
PLACES = {"a": StepState("s", 1)}
#: more waits than a settlement has
MANY = 30


class TroubledStore(SqliteStore):
    """`trouble`: None, `away`: it refuses, `deaf`: it writes and says it could not, `picky`: it refuses the record."""

    trouble: str | None = None

    async def settle(self, record: CallRecord, ending: StepEnding | None = None) -> Totals:
        await asyncio.sleep(0)
        if self.trouble == "picky":
            raise RecordRefused("None of this.")
        if self.trouble == "away":
            raise StoreUnavailable("The store is unavailable.")
        totals = await super().settle(record, ending)
        if self.trouble == "deaf":
            raise StoreUnavailable("The answer was lost.")
        return totals


@pytest.fixture
async def store(path: Path) -> AsyncIterator[TroubledStore]:
    made = TroubledStore(path, timeout_s=PATIENT_S)
    yield made
    await made.aclose()


@pytest.fixture
def journals(tmp_path: Path) -> Path:
    return tmp_path / "journals"


async def settled(store: TroubledStore, one: CallRecord) -> tuple[int, int, int]:
    """Calls of the session, those of its account, and whether this record is known."""
    (balance,) = await store.balances([Claim(KEY.account)])
    return (await store.totals(KEY)).calls, balance.used.calls, await store.call(None, one.call_id) is not None


async def each(one: Callable[[tuple[int, ...]], Awaitable[bool]]) -> int:
    """Do it with a cancel at each of its waits, and then with one more at the wait after that; how often it was."""
    for place in range(1, MANY):
        if not await one((place,)):
            return place - 1
        await one((place, place + 1))
    raise AssertionError("it waits more often than that")


@pytest.mark.parametrize("with_ending", [False, True], ids=["alone", "with its session's state"])
@pytest.mark.parametrize("trouble", [None, "away", "deaf"])
async def test_record_is_settled_once_by_its_own_worker(
    trouble: str | None, with_ending: bool, store: TroubledStore, record: MakeRecord, journals: Path
) -> None:
    settler, calls = Settler(store, Journal(journals)), 0

    async def settle(one: CallRecord) -> None:
        if with_ending:
            try:
                await settler.settle_with_step(one, lambda _: (PLACES, one), ())
            except StoreUnavailable:
                pass
            else:
                return
        await settler.settle(one)

    async def once(places: tuple[int, ...]) -> bool:
        nonlocal calls
        one = record(accounts=(KEY.account,), spent=Amount(15, 0, 1))
        store.trouble, calls = trouble, calls + 1
        is_there = await cancelled_at(settle(one), *places)
        store.trouble = None
        await eventually(
            lambda: not (settler.waiting or settler.availability.is_unavailable),
            "the settler offers it again by itself",
        )
        assert await settled(store, one) == (calls, calls, True)
        return is_there

    assert await each(once) > 0
    await settler.aclose()
    assert list(journals.glob("*")) == []


async def test_record_only_on_disk_is_not_deleted_with_settled_ones(
    store: TroubledStore, record: MakeRecord, journals: Path
) -> None:
    calls = 0

    async def once(places: tuple[int, ...]) -> bool:
        nonlocal calls
        settler = Settler(store, Journal(journals), most_waiting=1)
        store.trouble, calls = "away", calls + 2
        first, beyond = (record(accounts=(KEY.account,), spent=Amount(15, 0, 1)) for _ in range(2))
        await settler.settle(first)
        is_there = await cancelled_at(settler.settle(beyond), *places)
        store.trouble = None
        await eventually(lambda: not (settler.waiting or settler.availability.is_unavailable), "the store is back")
        await settler.recover()
        await settler.aclose()
        await Settler(store, Journal(journals)).recover()
        assert await settled(store, beyond) == (calls, calls, True)
        return is_there

    assert await each(once) > 0


async def test_a_record_that_the_store_cannot_take_is_set_aside(
    store: TroubledStore, record: MakeRecord, journals: Path
) -> None:
    calls = 0

    async def once(places: tuple[int, ...]) -> bool:
        nonlocal calls
        calls += 1
        settler, one = Settler(store, Journal(journals)), record(accounts=(KEY.account,), spent=Amount(15, 0, 1))
        store.trouble = "picky"
        is_there = await cancelled_at(settler.settle(one), *places)
        # What was cancelled before the store had refused it is offered once more.
        await eventually(lambda: not settler.waiting)
        await settler.aclose()
        store.trouble = None
        for file in journals.glob("*.unread"):
            file.rename(file.with_suffix(".journal"))
        await Settler(store, Journal(journals)).recover()
        assert await settled(store, one) == (calls, calls, True)
        return is_there

    assert await each(once) > 0


async def test_closing_waits_for_writes_to_the_disk(store: TroubledStore, record: MakeRecord, journals: Path) -> None:
    store.trouble = "away"
    settler, one = Settler(store, Journal(journals)), record()
    task = asyncio.create_task(settler.settle(one))
    await eventually(lambda: settler.waiting)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await settler.aclose()
    store.trouble = None
    assert await Settler(store, Journal(journals)).recover() == 1
    assert await store.call(None, one.call_id) == replace(one)
