"""Deletions go in parts between which everybody can write, and end where they were asked to."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path

import pytest

from gateway.core.errors import StoreUnavailable
from gateway.core.ids import first_id_at
from gateway.core.namespaces import SessionKey
from gateway.stores.sqlite import SqliteStore, deletion
from gateway.stores.sums import SUMS
from tests.stores.files import CHARGE, KEY, MakeRecord, locked, opened, query, write


def fill(path: Path, sessions: dict[str, int], at: float = 1_000.0) -> None:
    """Sessions with this many calls each, written past the store, which would take long."""
    connection = sqlite3.connect(path)
    for name, calls in sessions.items():
        row = ("alice", name, 0, at, at, calls, *[0] * 12)
        connection.execute(
            f"INSERT INTO sessions (namespace, id, derived, created_at, last_call_at, {', '.join(SUMS)}) "  # noqa: S608  # no text
            f"VALUES ({', '.join('?' * len(row))})",
            row,
        )
        ids = ((f"{first_id_at(at)[:10]}{name}{number:012}", "alice", name) for number in range(calls))
        insert = "INSERT INTO calls (call_id, namespace, session_id, record) VALUES (?, ?, ?, zeroblob(700))"
        connection.executemany(insert, ids)
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
    async with opened(path) as store, opened(path) as other:
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


def slow(path: Path) -> sqlite3.Connection:
    """A connection of a machine that is busy: each statement waits for its turn."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.set_trace_callback(lambda _: time.sleep(0.005))
    return connection


async def test_a_transaction_ends_early_where_its_statements_wait_for_their_turn(path: Path) -> None:
    names = [f"old{number}" for number in range(100)]
    async with opened(path):
        fill(path, dict.fromkeys(names, 1))
        connection = slow(path)
        keys: Sequence[deletion.Key] = [("alice", name) for name in names]
        gone, keys = deletion.delete_sessions(connection, keys, 2_000.0)
        assert 0 < gone < 10
        assert [key[1] for key in keys] == names[gone:]
        assert deletion.delete_sessions(connection, keys[:1], 2_000.0) == (1, ())
        connection.close()
    assert query(path, "SELECT (SELECT count(*) FROM sessions), (SELECT count(*) FROM calls)") == [(99 - gone,) * 2]


async def test_rows_without_a_session_go_in_few_statements(path: Path) -> None:
    async with opened(path):
        fill_changes(path, 450)
        connection, statements = sqlite3.connect(path, isolation_level=None), list[str]()
        connection.set_trace_callback(statements.append)
        assert deletion.delete_old_states(connection, 2_000.0) == 450
        connection.close()
    assert len(statements) < 10
    assert query(path, "SELECT count(*) FROM states") == [(0,)]


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
    async with opened(path) as store:
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


# --- states and lessons ---------------------------------------------------------------------------------------------------


def fill_changes(path: Path, number: int) -> None:
    """So many states without a session, and lessons, all old."""
    connection = sqlite3.connect(path)
    names = [f"n{index:06}" for index in range(number)]
    connection.executemany(
        "INSERT INTO states VALUES ('alice', ?, 1000.0, zeroblob(3000))", [(name,) for name in names]
    )
    connection.executemany("INSERT INTO lessons VALUES (?, 1000.0, zeroblob(100))", [(name,) for name in names])
    connection.commit()
    connection.close()


async def test_old_states_and_lessons_go_in_parts_between_which_everybody_can_write(
    path: Path, record: MakeRecord
) -> None:
    async with opened(path) as store, opened(path) as other:
        fill_changes(path, 1_200)
        await store.update(KEY, lambda state: state.with_parent("p"))
        left = set[tuple[object, ...]]()
        task = asyncio.create_task(store.expire(2_000.0))
        while not task.done():
            await other.settle(record("new", at=5_000.0, charge=CHARGE))
            left |= set(query(path, "SELECT (SELECT count(*) FROM states), (SELECT count(*) FROM lessons)"))
        assert await task == 0
        assert left <= {*((n, 1_200) for n in (1_201, 701, 201, 1)), *((1, n) for n in (700, 200, 0))}
        assert len({states for states, _ in left}) > 2
        assert len({lessons for _, lessons in left}) > 2
        assert query(path, "SELECT id FROM states") == [("s",)]
        assert query(path, "SELECT count(*) FROM lessons") == [(0,)]


@pytest.mark.parametrize(
    "meanwhile",
    [
        "UPDATE states SET changed_at = 3000.0 WHERE id = 's'",
        f"INSERT INTO sessions SELECT 'alice', 's', 0, 3000.0, 3000.0{', 0' * 13}, NULL, NULL, 0, NULL, NULL, NULL, NULL",  # constants
    ],
    ids=["changed again", "settled"],
)
async def test_a_state_that_comes_to_life_while_old_ones_are_looked_for_stays(path: Path, meanwhile: str) -> None:
    async with opened(path):
        pass
    write(path, "INSERT INTO states VALUES ('alice', 's', 1000.0, x'00'), ('alice', 'dead', 1000.0, x'00')")
    connection = sqlite3.connect(path, isolation_level=None)

    def between(statement: str) -> None:
        if statement == "BEGIN IMMEDIATE":
            write(path, meanwhile)

    connection.set_trace_callback(between)
    assert deletion.delete_old_states(connection, 2_000.0) == 2
    connection.close()
    assert query(path, "SELECT id FROM states") == [("s",)]


async def test_a_long_session_keeps_its_state_until_the_last_of_it_goes(path: Path) -> None:
    async with opened(path) as store:
        fill(path, {"long": 1_700})
        key = SessionKey("alice", "long")
        await store.update(key, lambda state: state.with_epoch({"prefix": "p"}))
        task = asyncio.create_task(store.delete(key))
        while not task.done():
            await asyncio.sleep(0)
            ((sessions, states),) = query(path, "SELECT (SELECT count(*) FROM sessions), (SELECT count(*) FROM states)")
            assert sessions == states
        assert query(path, "SELECT count(*) FROM states") == [(0,)]


async def test_an_expiry_that_a_lock_cut_short_says_so_and_can_be_asked_for_again(path: Path) -> None:
    async with opened(path, 0.05) as store:
        fill_changes(path, 10)
        with locked(path), pytest.raises(StoreUnavailable):
            await store.expire(2_000.0)
        assert await store.expire(2_000.0) == 0
        assert query(path, "SELECT count(*) FROM states") == [(0,)]
