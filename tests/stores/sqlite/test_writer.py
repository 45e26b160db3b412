"""Settlements, states and lessons on their way into transactions: locks, deadlines, and what cannot be written."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from gateway.core.errors import StoreUnavailable
from gateway.core.ledger.arithmetic import Amount, Claim, Hold
from gateway.core.ports import RecordRefused
from gateway.core.session import SessionState
from gateway.core.stored import Lesson, OpenHold
from gateway.core.usage import Charge, Totals, Usage
from gateway.stores.sqlite import SqliteStore
from tests.stores.files import CHARGE, KEY, TIMEOUT_S, MakeRecord, locked, opened, query
from tests.support.timing import LIMIT_S, count_loop_turns, in_time


async def the_loop_runs_on() -> None:
    """Whatever is tried meanwhile: if each try held it up for a moment, these turns would take half a minute."""
    with in_time():
        for _ in range(100):
            await asyncio.sleep(0.002)


async def test_a_locked_database_is_unavailable_when_the_timeout_is_over(path: Path, record: MakeRecord) -> None:
    async with opened(path, TIMEOUT_S) as store:
        with locked(path), in_time(at_least=TIMEOUT_S * 0.8), pytest.raises(StoreUnavailable, match="locked"):
            await asyncio.wait_for(store.settle(record(charge=CHARGE)), LIMIT_S)
        assert await store.totals(KEY) == Totals()


async def test_a_settlement_refused_by_a_lock_can_be_offered_again_and_counts_once(
    path: Path, record: MakeRecord
) -> None:
    item = record(charge=CHARGE)
    async with opened(path, 0.02) as store:
        with locked(path), pytest.raises(StoreUnavailable):
            await store.settle(item)
        assert (await store.settle(item)).calls == 1


async def test_write_waits_for_a_short_lock_without_blocking_the_event_loop(path: Path, record: MakeRecord) -> None:
    async with opened(path) as store:
        with locked(path):
            waiting = [asyncio.create_task(store.settle(record(charge=CHARGE))) for _ in range(3)]
            await the_loop_runs_on()
            waiting.append(asyncio.create_task(store.settle(record(charge=CHARGE))))
            await asyncio.sleep(0.03)
            assert not any(task.done() for task in waiting)
        totals = await asyncio.wait_for(asyncio.gather(*waiting), LIMIT_S)
    assert sorted(item.calls for item in totals) == [1, 2, 3, 4]


async def test_totals_can_be_read_while_another_process_writes(path: Path, record: MakeRecord) -> None:
    async with opened(path) as store:
        await store.settle(record(charge=CHARGE))
        with locked(path):
            assert (await store.totals(KEY)).calls == 1
            assert await store.session(KEY) is not None


async def test_a_settlement_that_waits_in_a_closing_store_ends_within_the_timeout(
    path: Path, record: MakeRecord
) -> None:
    store = SqliteStore(path, timeout_s=0.05)
    with locked(path):
        task = asyncio.create_task(store.settle(record(charge=CHARGE)))
        await asyncio.sleep(0)
        await asyncio.wait_for(store.aclose(), LIMIT_S)
        with pytest.raises(StoreUnavailable):
            await task


@pytest.mark.parametrize("verb", ["ping", "reset", "delete", "expire"])
async def test_every_other_write_ends_within_the_timeout_too(path: Path, record: MakeRecord, verb: str) -> None:
    async with opened(path, TIMEOUT_S) as store:
        await store.settle(record(charge=CHARGE))
        arguments: dict[str, tuple[object, ...]] = {"ping": (), "reset": (KEY,), "delete": (KEY,), "expire": (9e9,)}
        with locked(path), pytest.raises(StoreUnavailable):
            await asyncio.wait_for(getattr(store, verb)(*arguments[verb]), LIMIT_S)


async def test_a_record_that_sqlite_cannot_take_fails_alone_and_at_once(path: Path, record: MakeRecord) -> None:
    bad = record(charge=Charge(Usage(-(2**70), 0, 0), "provider", None))
    good = [record(charge=CHARGE) for _ in range(2)]
    async with opened(path) as store:
        work = asyncio.gather(*(store.settle(item) for item in (good[0], bad, good[1])), return_exceptions=True)
        results = await asyncio.wait_for(work, LIMIT_S)
        assert [type(result) for result in results] == [Totals, RecordRefused, Totals]
        assert (await store.totals(KEY)).calls == 2
    assert "OverflowError" in str(results[1])
    assert bad.call_id in str(results[1])


# --- states and lessons ---------------------------------------------------------------------------------------------------


def one_more(known: bytes | None) -> bytes:
    return (known or b"") + b"x"


def counts(state: SessionState) -> SessionState:
    number = state.trim_decisions["n"]["number"] if state.trim_decisions else 0
    return SessionState({"n": {"prefix": "n", "number": number + 1}})


async def work_on(store: SqliteStore, verb: str) -> object:
    return await (store.update(KEY, counts) if verb == "update" else store.learn({"k": one_more}))


@pytest.mark.parametrize("verb", ["update", "learn"])
async def test_a_change_waits_for_a_lock_no_longer_than_the_timeout_and_changes_nothing(path: Path, verb: str) -> None:
    async with opened(path, TIMEOUT_S) as store:
        with locked(path):
            with in_time(at_least=TIMEOUT_S * 0.8), pytest.raises(StoreUnavailable, match="locked"):
                await asyncio.wait_for(work_on(store, verb), LIMIT_S)
            assert (await store.remembered(KEY)).state == SessionState()
            assert await store.learned("k") is None
        assert (await store.remembered(KEY)).state == SessionState()
        assert await store.learned("k") is None


async def test_a_change_that_waited_is_made_on_what_another_process_wrote_meanwhile(path: Path) -> None:
    async with opened(path) as store:
        await store.update(KEY, counts)
        await store.learn({"k": one_more})
        with locked(path) as other:
            waiting = [asyncio.create_task(work_on(store, verb)) for verb in ("update", "learn", "update")]
            await the_loop_runs_on()
            assert not any(task.done() for task in waiting)
            other.execute("UPDATE states SET value = ?", (b'{"epochs":{"n":{"prefix":"n","number":70}}}',))
            other.execute("UPDATE lessons SET value = ?", (b"y",))
            other.execute("COMMIT")
        results = await asyncio.wait_for(asyncio.gather(*waiting), LIMIT_S)
        assert results[1] == {"k": b"yx"}
        assert (await store.remembered(KEY)).state.trim_decisions["n"]["number"] == 72


@contextlib.contextmanager
def traced(store: SqliteStore) -> Iterator[list[str]]:
    """The statements that the store runs meanwhile."""
    statements = list[str]()
    store._hot.set_trace_callback(statements.append)
    yield statements
    store._hot.set_trace_callback(None)


def adding(letter: bytes) -> Mapping[str, Lesson]:
    return {"k": lambda known: (known or b"") + letter}


async def test_writes_of_one_loop_iteration_share_a_transaction(path: Path, record: MakeRecord) -> None:
    async with opened(path) as store:
        with traced(store) as statements:
            await asyncio.gather(
                store.update(KEY, counts),
                store.settle(record(charge=CHARGE)),
                store.learn({"k": one_more, "l": one_more}),
            )
    assert statements.count("BEGIN IMMEDIATE") == statements.count("COMMIT") == 1
    assert [text.split()[0] for text in statements[-2:]] == ["INSERT", "COMMIT"]


async def test_writes_that_waited_share_the_next_transaction(path: Path, record: MakeRecord) -> None:
    async def twice(store: SqliteStore) -> None:
        await store.learn({"k": one_more})
        await store.settle(record(charge=CHARGE))

    async with opened(path) as store:
        with traced(store) as statements:
            await asyncio.gather(*(twice(store) for _ in range(64)))
    assert statements.count("COMMIT") == 2


async def test_repeated_writes_do_not_block_the_event_loop(path: Path) -> None:
    async with opened(path) as store, count_loop_turns() as turns:
        for _ in range(20):
            await store.learn({"k": one_more})
        assert turns() >= 10


async def test_writes_keep_their_order_while_waiting_for_a_lock(path: Path) -> None:
    async with opened(path) as store:
        with locked(path):
            waiting = [asyncio.create_task(store.learn(adding(letter))) for letter in (b"a", b"b")]
            await asyncio.sleep(0.01)
        assert await asyncio.wait_for(store.learn(adding(b"c")), LIMIT_S) == {"k": b"abc"}
        assert [task.result() for task in waiting] == [{"k": b"a"}, {"k": b"ab"}]


async def test_nothing_is_written_while_a_checkpoint_keeps_all_waiting_and_all_of_it_in_order_after_it(
    path: Path,
) -> None:
    async with opened(path) as store:
        tasks = [asyncio.create_task(store.learn(adding(letter))) for letter in (b"a", b"b")]
        await asyncio.sleep(0)
        with store._writer.paused(), traced(store) as statements:
            tasks.append(asyncio.create_task(store.learn(adding(b"c"))))
            await asyncio.sleep(0.01)
            assert [task.done() for task in tasks] == [False] * 3
            assert statements == []
        assert await asyncio.wait_for(store.learn(adding(b"d")), LIMIT_S) == {"k": b"abcd"}


async def test_failing_write_raises_to_its_caller_and_writes_nothing(path: Path) -> None:
    def fails(state: SessionState) -> SessionState:
        raise LookupError(state)

    async with opened(path) as store:
        with pytest.raises(LookupError):
            await store.update(KEY, fails)
        assert await store.learn(adding(b"a")) == {"k": b"a"}
    assert query(path, "SELECT count(*) FROM states") == [(0,)]


@pytest.mark.parametrize("verb", ["update", "learn"])
async def test_a_change_in_a_closing_store_is_made_and_in_a_closed_one_refused(path: Path, verb: str) -> None:
    store = SqliteStore(path)
    task = asyncio.create_task(work_on(store, verb))
    await asyncio.sleep(0)
    await store.aclose()
    await task
    with pytest.raises(StoreUnavailable):
        await asyncio.wait_for(work_on(store, verb), LIMIT_S)
    with pytest.raises(StoreUnavailable):
        await store.remembered(KEY)
    with pytest.raises(StoreUnavailable):
        await store.learned("k")
    assert len(query(path, "SELECT * FROM states UNION ALL SELECT '', * FROM lessons")) == 1


async def test_a_state_that_json_cannot_hold_is_refused_and_the_old_one_stays(path: Path) -> None:
    async with opened(path) as store:
        await store.update(KEY, counts)
        with pytest.raises(TypeError):
            await store.update(KEY, lambda _: SessionState({"p": {"prefix": object()}}))
        assert (await store.remembered(KEY)).state == counts(SessionState())


@pytest.mark.parametrize("is_held", [True, False])
async def test_a_call_that_begins_is_one_look_and_a_settlement_writes_each_table_once(
    path: Path, record: MakeRecord, *, is_held: bool
) -> None:
    held = record(charge=CHARGE, tools=(), accounts=(KEY.account,), spent=Amount(15))
    hold = Hold(held.call_id, (Claim(KEY.account),), Amount(20))
    async with opened(path) as store:
        with traced(store) as statements:
            for with_totals in (False, True):
                await store.open_call(KEY, [Claim(KEY.account)], with_totals=with_totals)
        assert [text.split()[0] for text in statements] == ["SELECT", "SELECT"]
        if is_held:
            await store.reserve(OpenHold(hold, held), 180.0)
        await asyncio.sleep(0)
        with traced(store) as statements:
            await store.settle(held)
    verbs = [" ".join(text.split("(")[0].split()[:3]) for text in statements if not text.startswith("--")]
    assert verbs == [
        "BEGIN IMMEDIATE",
        "SELECT 'settled', record,",  # whether it is settled, and what is held for it
        *(["DELETE FROM holds"] if is_held else []),
        "INSERT INTO accounts",
        "UPDATE usage SET",  # of the hour and the day: the first call of a day makes rows, and counts them
        "SELECT calls FROM",
        "INSERT INTO usage",
        "INSERT INTO usage",
        "INSERT INTO usage",
        "INSERT INTO sessions",  # which also returns the totals after it
        "INSERT INTO calls",
        "COMMIT",
    ]
