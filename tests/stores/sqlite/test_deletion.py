"""Deletions go in parts between which everybody can write, and end where they were asked to."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path

import pytest

from gateway.core.errors import StoreUnavailable
from gateway.core.ids import first_id_at
from gateway.core.ledger.session_key import SessionKey
from gateway.core.record import ORPHANED
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


STATES = deletion.ALONE[0]


def delete_states(connection: sqlite3.Connection) -> set[deletion.Key]:
    """Delete the old states that one look finds and one transaction takes; which were found."""
    keys, _ = deletion.look(connection, STATES, 2_000.0, deletion.FIRST)
    assert not deletion.delete_alone(connection, STATES, keys, 2_000.0)
    return set(keys)


async def test_rows_without_a_session_go_in_few_statements(path: Path) -> None:
    async with opened(path):
        fill_changes(path, 450)
        connection, statements = sqlite3.connect(path, isolation_level=None), list[str]()
        connection.set_trace_callback(statements.append)
        delete_states(connection)
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
    assert delete_states(connection) == {("alice", "s"), ("alice", "dead")}
    connection.close()
    assert query(path, "SELECT id FROM states") == [("s",)]


async def test_a_long_session_keeps_its_state_until_the_last_of_it_goes(path: Path) -> None:
    async with opened(path) as store:
        fill(path, {"long": 1_700})
        key = SessionKey("alice", "long")
        await store.update(key, lambda state: state.with_trim_decision({"prefix": "p"}))
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


def fill_all(path: Path, sessions: int, results: int = 1) -> None:
    """Old sessions with all that one can have, as many results each; and the same rows of others that have no session."""
    names = [f"old{number:06}" for number in range(sessions)]
    fill(path, dict.fromkeys(names, 1))
    with contextlib.closing(sqlite3.connect(path)) as connection:
        for name in (*names, *(f"lone{number:06}" for number in range(sessions))):
            connection.execute("INSERT INTO states VALUES ('alice', ?, 1000.0, x'7b7d')", (name,))
            connection.execute("INSERT INTO tools VALUES ('alice', ?, x'7b7d', NULL, 1000.0)", (name,))
            connection.executemany(
                "INSERT INTO accounts VALUES (?, 'alice', ?, 1, 1, 1, 0, 0, 0, NULL, NULL, NULL, NULL, 1000.0, 0, NULL)",
                (("session", name), ("agent", f"{name}/helper")),
            )
            rows = ((f"{name}{number:06}", name) for number in range(results))
            connection.executemany("INSERT INTO results VALUES (?, 'alice', ?, 1000.0, x'00', 1)", rows)
        connection.execute("UPDATE calls SET request_id = 'r' || number")
        connection.commit()


def delete_alone(connection: sqlite3.Connection, table: deletion.CleanupTable) -> None:
    """One look at a table, and the deletion of what it finds."""
    keys: Sequence[deletion.Key]
    keys, _ = deletion.look(connection, table, 2_000.0, deletion.FIRST)
    while keys:
        keys = deletion.delete_alone(connection, table, keys, 2_000.0)


def plans(path: Path, statements: Sequence[str]) -> list[str]:
    """How SQLite goes about these statements."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        asked = [one for one in statements if one.startswith(("SELECT", "DELETE"))]
        return [str(row[3]) for one in asked for row in connection.execute(f"EXPLAIN QUERY PLAN {one}")]


async def test_nothing_that_a_deletion_does_goes_through_a_whole_table(path: Path) -> None:
    async with opened(path):
        fill_all(path, 3)
        connection, statements = sqlite3.connect(path, isolation_level=None), list[str]()
        connection.set_trace_callback(statements.append)
        keys, end = deletion.look(connection, deletion.SESSIONS, 2_000.0, deletion.FIRST)
        assert (len(keys), end) == (3, None)
        assert deletion.delete_sessions(connection, keys, 2_000.0) == (3, ())
        for table in deletion.ALONE:
            delete_alone(connection, table)
        deletion.delete_old_calls(connection, 2_000.0)
        connection.close()
    found = plans(path, statements)
    tables = ("calls", "sessions", "states", "tools", "accounts", "results", "agents")
    assert not [step for step in found if step.startswith("SCAN") and step.split()[1] in tables]
    assert not [step for step in found if step.endswith("(kind=?)")]
    assert query(path, " UNION ALL ".join(f"SELECT count(*) FROM {table}" for table in tables)) == [(0,)] * len(tables)  # noqa: S608  # constants


@pytest.mark.parametrize("table", [deletion.SESSIONS, *deletion.ALONE], ids=lambda table: table.name)
async def test_a_look_goes_through_some_rows_and_the_next_one_goes_on_behind_them(
    path: Path, table: deletion.CleanupTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deletion, "LOOK", 4)
    async with opened(path):
        fill_all(path, 6)
        if table is not deletion.SESSIONS:
            write(path, "DELETE FROM sessions")
        connection = sqlite3.connect(path, isolation_level=None)
        found, after = list[int](), deletion.FIRST
        for _ in range(10):
            keys, end = deletion.look(connection, table, 2_000.0, after)
            found.append(len(keys))
            if end is None:
                break
            after = end
        connection.close()
    assert found == ([4, 2] if table is deletion.SESSIONS else [4, 4, 4, 0])


async def test_all_that_is_old_goes_however_many_looks_it_takes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deletion, "LOOK", 4)
    async with opened(path) as store:
        fill_all(path, 7)
        assert await store.expire(2_000.0) == 7
    tables = ("calls", "sessions", "states", "tools", "accounts", "results", "agents")
    assert query(path, " UNION ALL ".join(f"SELECT count(*) FROM {table}" for table in tables)) == [(0,)] * len(tables)  # noqa: S608  # constants


async def test_what_a_deletion_touches_is_read_before_the_file_is_locked(path: Path) -> None:
    """A page that has to come from a busy disk can take longer than calls wait for a locked file."""
    async with opened(path):
        fill_all(path, 30)
        connection, statements = sqlite3.connect(path, isolation_level=None), list[str]()
        connection.set_trace_callback(statements.append)
        keys, _ = deletion.look(connection, deletion.SESSIONS, 2_000.0, deletion.FIRST)
        statements.clear()
        _, left = deletion.delete_sessions(connection, keys, 2_000.0)
        begins = statements.index("BEGIN IMMEDIATE")
        gone = {name for _, name in keys} - {name for _, name in left}
        assert gone
        for name in gone:
            mine = [one for one in statements[:begins] if f"'{name}'" in one]
            read = " ".join(plans(path, mine))
            for table in ("sessions", "states", "tools", "accounts"):
                assert f"SEARCH {table} " in read
            for (index,) in query(
                path, "SELECT name FROM sqlite_master WHERE tbl_name IN ('calls', 'results') AND type = 'index'"
            ):
                assert f"INDEX {index} " in read
            assert all(f"substr({column}, -1)" in " ".join(mine) for column in ("record", "text", "value"))
        statements.clear()
        write(path, "DELETE FROM sessions")
        deletion.delete_old_calls(connection, 2_000.0)
        read = " ".join(plans(path, statements[:1]))
        assert statements[0].startswith("SELECT")
        for (index,) in query(path, "SELECT name FROM sqlite_master WHERE tbl_name = 'calls' AND type = 'index'"):
            assert f"INDEX {index} " in read
        connection.close()


async def test_results_of_a_session_go_in_parts_too(path: Path) -> None:
    async with opened(path):
        fill_all(path, 1, results=1_200)
        connection = sqlite3.connect(path, isolation_level=None)
        keys: Sequence[deletion.Key] = [("alice", "old000000")]
        left = list[object]()
        while keys:
            _, keys = deletion.delete_sessions(connection, keys, None)
            ((results, sessions),) = query(
                path, "SELECT (SELECT count(*) FROM results WHERE id LIKE 'old%'), (SELECT count(*) FROM sessions)"
            )
            left.append((results, sessions))
        connection.close()
    assert left == [(700, 1), (200, 1), (0, 0)]


async def test_no_more_sessions_are_read_than_one_transaction_can_take(path: Path) -> None:
    async with opened(path):
        fill_all(path, 5, results=400)
        connection, statements = sqlite3.connect(path, isolation_level=None), list[str]()
        connection.set_trace_callback(statements.append)
        keys = [("alice", f"old{number:06}") for number in range(5)]
        deletion.delete_sessions(connection, keys, None)
        connection.close()
    read = statements[: statements.index("BEGIN IMMEDIATE")]
    assert [key for key in keys if any(f"'{key[1]}'" in one for one in read)] == keys[:2]


async def test_a_deletion_goes_on_after_the_checkpoint_that_commits_waited_for(path: Path, record: MakeRecord) -> None:
    """Its next transaction would lock the file before those commits, which have waited for as long as they may."""
    async with opened(path, 0.5) as store:
        fill(path, {f"old{number}": 1 for number in range(60)})
        statements = list[str]()
        store._slow.set_trace_callback(statements.append)
        begun, ended = asyncio.Event(), asyncio.Event()

        async def checkpoint() -> None:
            with store._writer.paused():
                begun.set()
                await ended.wait()

        store._checkpoint = asyncio.create_task(checkpoint())
        await begun.wait()
        expiring = asyncio.create_task(store.expire(2_000.0))
        settling = asyncio.create_task(store.settle(record("new", at=5_000.0, charge=CHARGE)))
        # Without an end of the checkpoint it would go on to its third transaction within a few milliseconds.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.2):
                while statements.count("COMMIT") < 3:
                    await asyncio.sleep(0.001)
        before = statements.count("COMMIT")
        ended.set()
        assert (await settling).calls == 1
        assert await expiring == 60
        assert before == 1


async def test_the_calls_of_a_deleted_session_are_remembered_by_their_ids_for_as_long_as_records(
    path: Path, record: MakeRecord
) -> None:
    async with opened(path) as store:
        for outcome in ("ok", ORPHANED):
            await store.settle(record(at=1_000.0, outcome=outcome, charge=CHARGE))
        assert await store.delete(KEY)
        assert await store.expire(500.0) == 0
        assert query(path, "SELECT count(*), count(record) FROM gone") == [(2, 1)]
        assert await store.expire(1_500.0) == 0
        assert query(path, "SELECT count(*) FROM gone") == [(0,)]
