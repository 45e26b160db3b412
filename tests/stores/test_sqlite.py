"""What only a file can get wrong: restarts, several writers, kills."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import sqlite3
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import pytest

import gateway
from gateway.core.counting.calibration import LastTurn
from gateway.core.errors import StoreUnavailable
from gateway.core.ledger.arithmetic import AccountKey, Amount, Claim
from gateway.core.record import CallRecord, ContextRecord
from gateway.core.session import Remembered
from gateway.stores.sqlite import SqliteStore
from tests.stores.counting import counts, counts_apart, ending, number_apart, number_in
from tests.stores.files import CHARGE, KEY, MakeRecord, locked, opened, query
from tests.support.timing import LIMIT_S

# --- restarts ---------------------------------------------------------------------------------------------------------


async def test_totals_and_calls_survive_a_restart(path: Path, record: MakeRecord) -> None:
    items = [record(charge=CHARGE, at=1_000.0 + number) for number in range(3)]
    async with opened(path) as store:
        for item in items:
            before = await store.settle(item)
    async with opened(path) as store:
        assert await store.totals(KEY) == before
        assert list(await store.calls(KEY, 10)) == items[::-1]
        assert await store.settle(items[0]) == before


async def test_states_last_turns_and_lessons_survive_a_restart(path: Path, record: MakeRecord) -> None:
    async with opened(path) as store:
        await store.settle(record(charge=CHARGE, context=ContextRecord(6, 9, "exact", None, 6, 0, "k", 8)))
        state = await store.update(KEY, lambda state: state.with_trim_decision({"prefix": "p", "decisions": [1]}))
        await store.learn({"k": lambda _: b"[2]"})
    async with opened(path) as store:
        assert await store.remembered(KEY) == Remembered(state, LastTurn("k", 2))
        assert await store.learned("k") == b"[2]"
        assert (await store.totals(KEY)).saved_tokens == 3


async def test_late_settlement_does_not_age_an_account(path: Path, record: MakeRecord) -> None:
    parent = AccountKey("session", "alice", "parent")
    async with opened(path) as store:
        for at in (6_000.0, 1_000.0):
            await store.settle(record(at=at, accounts=(parent,), spent=Amount(5)))
        await store.expire(5_000.0)
        (balance,) = await store.balances([Claim(parent)])
        assert balance.used == Amount(10)


async def test_damaged_file_is_reported_without_waiting(path: Path, record: MakeRecord) -> None:
    async with opened(path) as store:
        await store.settle(record(charge=CHARGE))
    roots = query(path, "SELECT rootpage FROM sqlite_master WHERE rootpage > 0")
    with path.open("r+b") as file:
        for (root,) in roots:
            assert isinstance(root, int)
            file.seek((root - 1) * 4096)
            file.write(b"\xff" * 4096)
    async with opened(path) as store:
        for ask in (store.totals(KEY), store.calls(KEY, 1), store.settle(record(charge=CHARGE))):
            with pytest.raises(StoreUnavailable, match=r"malformed\. Restore a copy of the file, or move it away\.$"):
                await ask


async def test_waiting_writes_are_written_when_the_store_closes(path: Path, record: MakeRecord) -> None:
    store = SqliteStore(path)
    task = asyncio.create_task(store.settle(record(charge=CHARGE)))
    await asyncio.sleep(0)
    await store.aclose()
    assert (await task).calls == 1
    async with opened(path) as store:
        assert (await store.totals(KEY)).calls == 1


async def test_closed_store_raises_instead_of_hanging(path: Path, record: MakeRecord) -> None:
    store = SqliteStore(path)
    await store.aclose()
    with pytest.raises(StoreUnavailable):
        await asyncio.wait_for(store.settle(record()), LIMIT_S)
    with pytest.raises(StoreUnavailable):
        await store.totals(KEY)
    with pytest.raises(StoreUnavailable):
        await store.ping()


async def test_work_that_waits_for_a_lock_keeps_no_other_work_of_the_loop_waiting(path: Path) -> None:
    async with opened(path) as store:
        with locked(path):
            pings = [asyncio.create_task(store.ping()) for _ in range(30)]
            await asyncio.sleep(0)
            await asyncio.wait_for(asyncio.to_thread(int), LIMIT_S)
            assert sum(ping.done() for ping in pings) <= 1
        await asyncio.gather(*pings, return_exceptions=True)


# --- several writers --------------------------------------------------------------------------------------------------


async def test_two_stores_on_one_file_write_at_once_and_nothing_is_lost_or_doubled(
    path: Path, record: MakeRecord
) -> None:
    each = 150
    shared = [record(charge=CHARGE) for _ in range(20)]
    mine, others = ([record(charge=CHARGE) for _ in range(each)] for _ in range(2))

    async def write(items: list[CallRecord]) -> None:
        async with opened(path) as store:
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


async def test_changes_of_two_stores_on_one_file_are_all_made_each_on_the_one_before(path: Path) -> None:
    each = 150

    async def change() -> None:
        async with opened(path) as store:
            for _ in range(each):
                await asyncio.gather(
                    store.update(KEY, counts),
                    store.update(KEY, counts_apart),
                    store.learn({"a": lambda known: (known or b"") + b"a", "b": lambda known: (known or b"") + b"b"}),
                )

    async with opened(path) as store:
        await asyncio.gather(*(asyncio.to_thread(asyncio.run, change()) for _ in range(2)))
        state = (await store.remembered(KEY)).state
        assert (number_in(state.steps), number_apart(state)) == (2 * each, 2 * each)
        assert (await store.learned("a"), await store.learned("b")) == (b"a" * 2 * each, b"b" * 2 * each)
    assert query(path, "PRAGMA integrity_check") == [("ok",)]


async def test_calls_that_end_in_two_stores_on_one_file_each_go_on_from_the_one_before(
    path: Path, record: MakeRecord
) -> None:
    shared = [record(charge=CHARGE) for _ in range(60)]

    async def settle() -> None:
        async with opened(path) as store:
            for one in shared:
                await store.settle(one, ending(one))

    async with opened(path) as store:
        await asyncio.gather(*(asyncio.to_thread(asyncio.run, settle()) for _ in range(2)))
        numbers = [int(one.notes["number"]) for one in await store.calls(KEY, 100)]
        assert sorted(numbers) == list(range(1, 61)), "none twice, none skipped"
        assert number_in((await store.remembered(KEY)).state.steps) == 60


async def test_two_stores_on_one_file_keep_no_more_results_than_there_is_room(path: Path) -> None:
    most = 400

    async def keep(name: str) -> None:
        async with opened(path) as store:
            for number in range(60):
                await store.keep_results(KEY, {f"{name}{number}": "x" * 7}, most)

    async with opened(path) as store:
        await asyncio.gather(*(asyncio.to_thread(asyncio.run, keep(name)) for name in "ab"))
        assert await store.results_size(KEY) == most // 7 * 7
    assert query(path, "SELECT count(*) FROM results") == [(most // 7,)]


async def test_one_store_sees_at_once_what_another_has_settled(path: Path, record: MakeRecord) -> None:
    async with opened(path) as first, opened(path) as second:
        await first.settle(record(charge=CHARGE))
        assert (await second.totals(KEY)).calls == 1
        assert (await second.settle(record(charge=CHARGE))).calls == 2
        assert (await first.totals(KEY)).calls == 2


# --- the file ---------------------------------------------------------------------------------------------------------


async def test_the_file_is_sound_and_the_log_bounded_after_many_commits(path: Path, record: MakeRecord) -> None:
    async with opened(path) as store:
        for _ in range(2_000):
            await store.settle(record(charge=CHARGE))
        log = path.with_name("gateway.db-wal").stat().st_size
        assert (await store.totals(KEY)).calls == 2_000
        assert query(path, "PRAGMA integrity_check") == [("ok",)]
    # A commit writes at least six pages of 4 KiB; without checkpoints the log would hold them all.
    assert log < 2_000 * 4 * 4096


async def test_commits_do_not_wait_for_a_checkpoint_blocked_by_a_reader(path: Path, record: MakeRecord) -> None:
    """As a backup of a large file does, for minutes."""
    async with opened(path, 0.5) as store:
        statements = list[str]()
        store._slow.set_trace_callback(statements.append)
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM calls").fetchone()
            for number in range(6):
                # Random, so that it cannot be compressed: two megabytes of the log.
                await store.keep_results(KEY, {f"r{number}": os.urandom(2**21).hex()}, 2**30)
                await store._checkpoint_now()
            assert not [one for one in statements if "RESTART" in one]
            reader.execute("COMMIT")
        await store._checkpoint_now()
        assert [one for one in statements if "RESTART" in one]


async def test_an_error_of_the_store_names_the_file_but_not_its_folder(path: Path, record: MakeRecord) -> None:
    async with opened(path, 0.01) as store:
        with locked(path), pytest.raises(StoreUnavailable) as caught:
            await store.settle(record())
    assert "gateway.db" in caught.value.message
    assert str(path.parent) not in caught.value.message


# --- kill -9 ----------------------------------------------------------------------------------------------------------

CHILD = """
import asyncio, sys
from pathlib import Path
from gateway.core.ids import call_id
from gateway.core.ledger.session_key import SessionKey
from gateway.core.record import CallRecord, ContextRecord
from gateway.core.session import SessionState
from gateway.core.usage import Charge, Usage
from gateway.stores.sqlite import SqliteStore

def record(number):
    name = call_id(1_000_000 + number, number.to_bytes(10, "big"))
    return CallRecord(
        name, name, SessionKey("alice", "s"), False, 1000.0, "chat", "chat", "openai", "m", None, False, 200, "ok", None,
        None, (), Charge(Usage.of(10, 5), "provider", None), 0.0, None, 1.0, 1, 1,
        context=ContextRecord(9, 11, "exact", None, 9, 0, "image", number),
    )

def counts(state):
    number = state.trim_decisions["n"]["number"] if state.trim_decisions else 0
    return SessionState({"n": {"prefix": "n", "number": number + 1}})

def one_more(known):
    return (known or b"") + b"x"

async def main():
    store = SqliteStore(Path(sys.argv[1]), timeout_s=60)
    number = 0
    while True:
        work = [store.settle(record(number + n)) for n in range(3)]
        await asyncio.gather(*work, store.update(SessionKey("alice", "s"), counts), store.learn({"k": one_more}))
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
        child.wait(LIMIT_S)
        acknowledged = max([acknowledged, *map(int, lines.read().split())])
    async with opened(path) as store:
        totals = await store.totals(KEY)
        assert totals.calls >= acknowledged >= 3 * after
        assert totals.calls % 3 == 0
        assert (totals.trimmed_calls, totals.saved_tokens) == (totals.calls, 2 * totals.calls)
        remembered = await store.remembered(KEY)
        assert remembered.state.trim_decisions["n"]["number"] == totals.calls // 3
        assert remembered.last_turn == LastTurn("image", 10 - (totals.calls - 1))
        assert await store.learned("k") == b"x" * (totals.calls // 3)
        assert totals.total_tokens == 15 * totals.calls
        assert len(await store.calls(KEY, 100_000)) == totals.calls
    assert query(path, "PRAGMA integrity_check") == [("ok",)]


async def test_full_disk_makes_the_store_unavailable(path: Path) -> None:
    async with opened(path) as store:
        await store.ping()
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))
        try:
            with pytest.raises(StoreUnavailable):
                await store.ping()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        await store.ping()
