"""What only a file can get wrong: restarts, several writers, locks, kills, formats and permissions."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from decimal import Decimal
from pathlib import Path

import pytest

import gateway
from gateway.core.errors import StoreUnavailable
from gateway.core.ids import first_id_at
from gateway.core.ports import CallRecord, SessionKey
from gateway.core.usage import Charge, Totals, Usage
from gateway.stores.sqlite import MIGRATIONS, SqliteStore

MakeRecord = Callable[..., CallRecord]

KEY = SessionKey("alice", "s")
CHARGE = Charge(Usage.of(10, 5), "provider", Decimal("0.01"))
TIMEOUT_S = 0.2


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "gateway.db"


@contextlib.asynccontextmanager
async def opened(path: Path, timeout_s: float = TIMEOUT_S) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(path, timeout_s=timeout_s)
    try:
        yield store
    finally:
        await store.aclose()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[sqlite3.Connection]:
    """Another process in the middle of a transaction, as far as SQLite can tell."""
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        connection.execute("BEGIN IMMEDIATE")
        yield connection
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        connection.close()


def query(path: Path, text: str) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(path)
    try:
        return connection.execute(text).fetchall()
    finally:
        connection.close()


async def longest_gap(stop: asyncio.Event) -> float:
    """The longest time in which the event loop ran nothing else."""
    longest, last = 0.0, time.perf_counter()
    while not stop.is_set():
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    return longest


# --- restarts -------------------------------------------------------------------------------------------------------------


async def test_totals_and_calls_survive_a_restart(path: Path, record: MakeRecord) -> None:
    items = [record(charge=CHARGE, at=1_000.0 + number) for number in range(3)]
    async with opened(path) as store:
        for item in items:
            before = await store.settle(item)
    async with opened(path) as store:
        assert await store.totals(KEY) == before
        assert list(await store.calls(KEY, 10)) == items[::-1]
        assert await store.settle(items[0]) == before


async def test_what_is_waiting_when_the_store_closes_is_written(path: Path, record: MakeRecord) -> None:
    store = SqliteStore(path)
    task = asyncio.create_task(store.settle(record(charge=CHARGE)))
    await asyncio.sleep(0)
    await store.aclose()
    assert (await task).calls == 1
    async with opened(path) as store:
        assert (await store.totals(KEY)).calls == 1


async def test_a_closed_store_says_so_instead_of_hanging(path: Path, record: MakeRecord) -> None:
    store = SqliteStore(path)
    await store.aclose()
    with pytest.raises(StoreUnavailable):
        await asyncio.wait_for(store.settle(record()), 3)
    with pytest.raises(StoreUnavailable):
        await store.totals(KEY)
    with pytest.raises(StoreUnavailable):
        await store.ping()


# --- several writers ------------------------------------------------------------------------------------------------------


async def test_two_stores_on_one_file_write_at_once_and_nothing_is_lost_or_doubled(
    path: Path, record: MakeRecord
) -> None:
    each = 150
    shared = [record(charge=CHARGE) for _ in range(20)]
    mine, others = ([record(charge=CHARGE) for _ in range(each)] for _ in range(2))

    async def write(items: list[CallRecord]) -> None:
        async with opened(path, 30) as store:
            for start in range(0, len(items), 5):
                await asyncio.gather(*(store.settle(item) for item in items[start : start + 5]))
                await asyncio.sleep(0)

    async with opened(path):
        await asyncio.gather(
            asyncio.to_thread(asyncio.run, write([*mine, *shared])),
            asyncio.to_thread(asyncio.run, write([*others, *shared])),
        )
    async with opened(path) as store:
        totals = await store.totals(KEY)
    assert totals.calls == 2 * each + len(shared)
    assert totals.cost_usd == Decimal("0.01") * totals.calls
    assert query(path, "PRAGMA integrity_check") == [("ok",)]


async def test_one_store_sees_at_once_what_another_has_settled(path: Path, record: MakeRecord) -> None:
    async with opened(path) as first, opened(path) as second:
        await first.settle(record(charge=CHARGE))
        assert (await second.totals(KEY)).calls == 1
        assert (await second.settle(record(charge=CHARGE))).calls == 2
        assert (await first.totals(KEY)).calls == 2


# --- a locked database -------------------------------------------------------------------------------------------------------


async def test_a_locked_database_is_unavailable_within_the_timeout_and_the_loop_runs_on(
    path: Path, record: MakeRecord
) -> None:
    async with opened(path) as store:
        stop = asyncio.Event()
        ticker = asyncio.create_task(longest_gap(stop))
        with locked(path):
            started = time.perf_counter()
            with pytest.raises(StoreUnavailable, match="locked"):
                await asyncio.wait_for(store.settle(record(charge=CHARGE)), 5)
            waited = time.perf_counter() - started
        stop.set()
        assert TIMEOUT_S * 0.8 <= waited < TIMEOUT_S + 0.4
        assert await ticker < 0.15
        assert await store.totals(KEY) == Totals()


async def test_a_settlement_refused_by_a_lock_can_be_offered_again_and_counts_once(
    path: Path, record: MakeRecord
) -> None:
    item = record(charge=CHARGE)
    async with opened(path, 0.02) as store:
        with locked(path), pytest.raises(StoreUnavailable):
            await store.settle(item)
        assert (await store.settle(item)).calls == 1


async def test_a_lock_that_goes_away_in_time_is_waited_for(path: Path, record: MakeRecord) -> None:
    async with opened(path, 5) as store:
        with locked(path):
            waiting = [asyncio.create_task(store.settle(record(charge=CHARGE))) for _ in range(3)]
            await asyncio.sleep(0.03)
            waiting.append(asyncio.create_task(store.settle(record(charge=CHARGE))))
            await asyncio.sleep(0.03)
            assert not any(task.done() for task in waiting)
        totals = await asyncio.wait_for(asyncio.gather(*waiting), 3)
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
        await asyncio.wait_for(store.aclose(), 3)
        with pytest.raises(StoreUnavailable):
            await task


@pytest.mark.parametrize("verb", ["ping", "reset", "delete", "expire"])
async def test_every_other_write_ends_within_the_timeout_too(path: Path, record: MakeRecord, verb: str) -> None:
    async with opened(path) as store:
        await store.settle(record(charge=CHARGE))
        arguments: dict[str, tuple[object, ...]] = {"ping": (), "reset": (KEY,), "delete": (KEY,), "expire": (9e9,)}
        with locked(path):
            started = time.perf_counter()
            with pytest.raises((StoreUnavailable, TimeoutError)):
                await asyncio.wait_for(getattr(store, verb)(*arguments[verb]), TIMEOUT_S + 1)
            waited = time.perf_counter() - started
        assert waited < TIMEOUT_S + 0.5


# --- long lists -----------------------------------------------------------------------------------------------------------


def fill(path: Path, sessions: dict[str, int], at: float = 1_000.0) -> None:
    """Sessions with this many calls each, written past the store, which would take long."""
    connection = sqlite3.connect(path)
    for name, calls in sessions.items():
        row = ("alice", name, 0, at, at, calls, *[0] * 10)
        connection.execute(f"INSERT INTO sessions VALUES ({', '.join('?' * len(row))})", row)  # noqa: S608  # no text
        ids = ((f"{first_id_at(at)[:10]}{name}{number:012}", "alice", name) for number in range(calls))
        connection.executemany("INSERT INTO calls VALUES (?, NULL, ?, ?, zeroblob(700))", ids)
    connection.commit()
    connection.close()


async def delete_all(store: SqliteStore) -> None:
    assert await store.delete(SessionKey("alice", "long"))


async def expire_all(store: SqliteStore) -> None:
    assert await store.expire(2_000.0) == 1


@pytest.mark.parametrize("work", [delete_all, expire_all])
async def test_another_process_can_write_while_a_long_session_goes(
    path: Path, record: MakeRecord, work: Callable[[SqliteStore], Coroutine[object, object, None]]
) -> None:
    async with opened(path) as store, opened(path, 0.1) as other:
        fill(path, {"long": 20_000})
        task = asyncio.create_task(work(store))
        during = 0
        while not task.done():
            for writer in (store, other):
                await writer.settle(record("new", at=5_000.0, charge=CHARGE))
            during += 1
            assert query(path, "SELECT count(*) FROM calls WHERE session_id = 'new'") == [(2 * during,)]
        await task
        assert during > 5
        assert query(path, "SELECT count(*) FROM calls WHERE session_id = 'long'") == [(0,)]
        assert (await store.totals(SessionKey("alice", "new"))).calls == 2 * during


async def test_no_transaction_of_a_deletion_takes_more_than_a_part(path: Path) -> None:
    async with opened(path) as store:
        fill(path, {"long": 1_700, "other": 3})
        left = set[object]()
        task = asyncio.create_task(store.delete(SessionKey("alice", "long")))
        while not task.done():
            await asyncio.sleep(0)
            before = await store.totals(SessionKey("alice", "long"))
            ((count,),) = query(path, "SELECT count(*) FROM calls WHERE session_id = 'long'")
            after = await store.totals(SessionKey("alice", "long"))
            assert before.calls or not count, "calls without their totals"
            assert count or not after.calls, "totals without their calls"
            left.add(count)
        assert left <= {1_700, 1_200, 700, 200, 0}
        assert len(left) > 2
        assert await store.session(SessionKey("alice", "long")) is None
        assert len(query(path, "SELECT * FROM calls")) == 3


async def test_a_session_that_is_called_while_it_expires_stays_with_that_call(path: Path, record: MakeRecord) -> None:
    key = SessionKey("alice", "long")
    async with opened(path, 5) as store:
        fill(path, {"long": 5_000})
        task = asyncio.create_task(store.expire(2_000.0))
        while query(path, "SELECT count(*) FROM calls") == [(5_000,)]:
            await asyncio.sleep(0)
        newest = record("long", at=5_000.0, charge=CHARGE)
        assert (await store.settle(newest)).calls == 5_001
        assert await task == 0
        assert list(await store.calls(key, 10)) == [newest], "the old calls went by their age"
        assert (await store.totals(key)).calls == 5_001


async def test_a_deletion_that_could_not_be_ended_can_be_asked_for_again(path: Path) -> None:
    key = SessionKey("alice", "long")
    async with opened(path, 0.05) as store:
        fill(path, {"long": 5_000})
        task = asyncio.create_task(store.delete(key))
        while query(path, "SELECT count(*) FROM calls") == [(5_000,)]:
            await asyncio.sleep(0)
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailable):
            await task
        other.close()
        assert await store.session(key) is not None
        assert await store.delete(key)
        assert query(path, "SELECT count(*) FROM calls") == [(0,)]


async def test_a_record_that_sqlite_cannot_take_fails_alone_and_at_once(
    path: Path, record: MakeRecord, caplog: pytest.LogCaptureFixture
) -> None:
    bad = record(charge=Charge(Usage(-(2**70), 0, 0), "provider", None))
    good = [record(charge=CHARGE) for _ in range(2)]
    async with opened(path) as store:
        work = asyncio.gather(*(store.settle(item) for item in (good[0], bad, good[1])), return_exceptions=True)
        results = await asyncio.wait_for(work, 3)
        assert [type(result) for result in results] == [Totals, StoreUnavailable, Totals]
        assert (await store.totals(KEY)).calls == 2
    assert "OverflowError" in caplog.text
    assert bad.call_id in caplog.text


# --- the file --------------------------------------------------------------------------------------------------------------------


async def test_a_new_file_and_its_folder_are_for_their_owner_only(path: Path, record: MakeRecord) -> None:
    umask = os.umask(0)
    try:
        async with opened(path) as store:
            await store.settle(record())
            modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}
            folder = stat.S_IMODE(path.parent.stat().st_mode)
    finally:
        os.umask(umask)
    assert modes["gateway.db"] == 0o600
    assert set(modes.values()) == {0o600}
    assert folder == 0o700


async def test_a_new_file_has_the_newest_format_and_opening_it_again_changes_nothing(path: Path) -> None:
    for _ in range(2):
        async with opened(path):
            pass
        assert query(path, "PRAGMA user_version") == [(len(MIGRATIONS),)]
    assert query(path, "PRAGMA journal_mode") == [("wal",)]


async def test_a_file_of_a_newer_version_is_refused_with_the_remedy_and_left_alone(path: Path) -> None:
    async with opened(path):
        pass
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version=99")
    connection.close()
    with pytest.raises(StoreUnavailable, match=r"format 99.*newer version.*store\.url"):
        SqliteStore(path)
    assert query(path, "PRAGMA user_version") == [(99,)]


async def test_a_file_that_is_no_database_is_refused_and_left_alone(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"this is somebody's letter\n" * 100)
    with pytest.raises(StoreUnavailable, match=r"gateway\.db"):
        SqliteStore(path)
    assert path.read_bytes().startswith(b"this is somebody's letter")


async def test_a_database_of_another_program_is_refused_and_left_alone(path: Path) -> None:
    path.parent.mkdir()
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE sessions (mine TEXT)")
    connection.commit()
    connection.close()
    with pytest.raises(StoreUnavailable):
        SqliteStore(path)
    assert query(path, "SELECT name FROM sqlite_master") == [("sessions",)]


@pytest.mark.parametrize("place", ["folder", "below a file"])
async def test_a_path_where_no_file_can_be_is_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    path = tmp_path if place == "folder" else tmp_path / "file" / "gateway.db"
    with pytest.raises(StoreUnavailable):
        SqliteStore(path)


async def test_the_file_is_sound_and_the_log_bounded_after_many_commits(path: Path, record: MakeRecord) -> None:
    async with opened(path, 5) as store:
        for _ in range(2_000):
            await store.settle(record(charge=CHARGE))
        log = path.with_name("gateway.db-wal").stat().st_size
        assert (await store.totals(KEY)).calls == 2_000
        assert query(path, "PRAGMA integrity_check") == [("ok",)]
    # A commit writes at least two pages of 4 KiB; without checkpoints the log would hold them all.
    assert log < 2_000 * 2 * 4096


async def test_an_error_of_the_store_names_the_file_but_not_its_folder(path: Path, record: MakeRecord) -> None:
    async with opened(path, 0.01) as store:
        with locked(path), pytest.raises(StoreUnavailable) as caught:
            await store.settle(record())
    assert "gateway.db" in caught.value.message
    assert str(path.parent) not in caught.value.message


# --- kill -9 ------------------------------------------------------------------------------------------------------------------------

CHILD = """
import asyncio, sys
from pathlib import Path
from gateway.core.ids import call_id
from gateway.core.ports import CallRecord, SessionKey
from gateway.core.usage import Charge, Usage
from gateway.stores.sqlite import SqliteStore

def record(number):
    name = call_id(1_000_000 + number, number.to_bytes(10, "big"))
    return CallRecord(
        name, name, SessionKey("alice", "s"), False, 1000.0, "chat", "chat", "openai", "m", None, False, 200, "ok", None,
        None, (), Charge(Usage.of(10, 5), "provider", None), 0.0, None, 1.0, 1, 1,
    )

async def main():
    store = SqliteStore(Path(sys.argv[1]), timeout_s=5)
    number = 0
    while True:
        await asyncio.gather(*(store.settle(record(number + n)) for n in range(3)))
        number += 3
        print(number, flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("after", [1, 40])
async def test_a_kill_right_after_settling_loses_nothing(path: Path, after: int) -> None:
    root = str(Path(gateway.__file__).parent.parent)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert child.stdout is not None
    with child.stdout as lines:
        acknowledged = 0
        for _ in range(after):
            acknowledged = int(lines.readline())
        child.send_signal(signal.SIGKILL)
        child.wait(5)
        acknowledged = max([acknowledged, *map(int, lines.read().split())])
    async with opened(path) as store:
        totals = await store.totals(KEY)
        assert totals.calls >= acknowledged >= 3 * after
        assert totals.calls % 3 == 0
        assert totals.total_tokens == 15 * totals.calls
        assert len(await store.calls(KEY, 100_000)) == totals.calls
    assert query(path, "PRAGMA integrity_check") == [("ok",)]
