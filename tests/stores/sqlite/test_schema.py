"""Whose a file is, who may read it, and how it comes from an older format to the newest."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import stat
import zlib
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest

from gateway.core.calling_agent import CallingAgent
from gateway.core.counting.calibration import LastTurn
from gateway.core.errors import StoreUnavailable
from gateway.core.ledger.arithmetic import Amount, Claim, Hold, Limits
from gateway.core.ledger.session_key import SessionKey
from gateway.core.record import ORPHANED, ContextRecord
from gateway.core.session import Remembered, SessionState
from gateway.core.stored import SORTS, OpenHold
from gateway.core.tools import ToolUse
from gateway.core.usage import Totals
from gateway.stores.sqlite import SqliteStore
from gateway.stores.sqlite.schema import MIGRATIONS, connect, hold_key, migrate
from tests.stores.files import CHARGE, KEY, MakeRecord, locked, opened, query, write


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


async def test_a_file_that_cannot_be_written_is_refused_with_the_remedy(path: Path) -> None:
    async with opened(path):
        pass
    # The version that a writer must know: also for one whom no mode of a file keeps out, it is read-only so.
    with path.open("r+b") as file:
        file.seek(18)
        file.write(b"\x03")
    with pytest.raises(StoreUnavailable, match=r"cannot be written: .*readonly.*Let the gateway write to it"):
        SqliteStore(path)


def test_a_disk_that_is_full_is_a_reason_to_make_room_on_it(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA max_page_count=1")
        with pytest.raises(StoreUnavailable, match=r"disk is full\. Make room on its disk, or name another file"):
            migrate(connection, path)


async def test_file_stays_usable_after_a_running_older_version_writes_its_format_number(
    path: Path, record: MakeRecord
) -> None:
    async with opened(path) as store:
        await store.settle(record(charge=CHARGE))
        write(path, "PRAGMA user_version=9")
    for _ in range(2):
        async with opened(path) as store:
            assert (await store.totals(KEY)).calls == 1
            assert query(path, "PRAGMA user_version") == [(len(MIGRATIONS),)]
            write(path, "PRAGMA user_version=9")
            await store.ping()
        assert query(path, "PRAGMA user_version") == [(len(MIGRATIONS),)]


async def test_running_older_version_keeps_the_format_of_a_newer_one(path: Path) -> None:
    async with opened(path) as store:
        write(path, f"PRAGMA user_version={len(MIGRATIONS) + 1}")
        await store.ping()
    assert query(path, "PRAGMA user_version") == [(len(MIGRATIONS) + 1,)]


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
    with pytest.raises(StoreUnavailable, match=rf"The store {path} was made by another program"):
        SqliteStore(path)
    assert query(path, "SELECT name FROM sqlite_master") == [("sessions",)]


@pytest.mark.parametrize("place", ["folder", "below a file"])
async def test_a_path_where_no_file_can_be_is_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    path = tmp_path if place == "folder" else tmp_path / "file" / "gateway.db"
    with pytest.raises(StoreUnavailable):
        SqliteStore(path)


# --- older formats --------------------------------------------------------------------------------------------------------

#: what the first release made, and never to be adapted to a later one
FORMAT_1 = """
CREATE TABLE sessions (
    namespace TEXT NOT NULL, id TEXT NOT NULL, derived INTEGER NOT NULL,
    created_at REAL NOT NULL, last_call_at REAL NOT NULL,
    calls INTEGER NOT NULL, input_tokens INTEGER NOT NULL, output_tokens INTEGER NOT NULL,
    total_tokens INTEGER NOT NULL, cache_read_tokens INTEGER NOT NULL, cache_write_tokens INTEGER NOT NULL,
    reasoning_tokens INTEGER NOT NULL, estimated_tokens INTEGER NOT NULL, estimated_calls INTEGER NOT NULL,
    unpriced_calls INTEGER NOT NULL, cost_pico_usd INTEGER NOT NULL,
    PRIMARY KEY (namespace, id)
) WITHOUT ROWID;
CREATE TABLE calls (
    call_id TEXT PRIMARY KEY, request_id TEXT, namespace TEXT, session_id TEXT, record BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX calls_of_session ON calls (namespace, session_id, call_id);
CREATE INDEX calls_by_request ON calls (request_id) WHERE request_id IS NOT NULL;
PRAGMA application_id=1195463749;
PRAGMA user_version=1;
"""
OLD_TOTALS = Totals(3, 11, 12, 23, 4, 5, 6, 7, 2, 1, cost_usd=Decimal("0.000000000013"))
OLD_CALL = (
    b'{"call_id":"0000000f4240aa","request_id":"r","session":{"namespace":"alice","id":"s0"},"derived_session":false,'
    b'"started_at":1000.0,"dialect":"chat","operation":"chat","provider":"openai","model":"gpt-5","response_model":null,'
    b'"stream":false,"status":200,"outcome":"ok","error_code":null,"finish_reason":"stop","tools":["search"],'
    b'"charge":{"usage":{"input_tokens":10,"output_tokens":5,"total_tokens":15,"cache_read_tokens":0,'
    b'"cache_write_tokens":0,"reasoning_tokens":0,"audio_input_tokens":0,"audio_output_tokens":0},"source":"provider",'
    b'"cost_usd":"0.01"},"overhead_s":0.001,"first_byte_s":0.25,"duration_s":2.0,"request_bytes":1,"response_bytes":2,'
    b'"notes":{"a":"b"}}'
)


def write_format_1(path: Path, sessions: int = 3) -> None:
    """A file as the first release left it, with data in it."""
    path.parent.mkdir()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.executescript(FORMAT_1)
    for number in range(sessions):
        row = ("alice", f"s{number}", 1, 1_000.0, 2_000.0 + number, 3, 11, 12, 23, 4, 5, 6, 7, 2, 1, 13)
        connection.execute(f"INSERT INTO sessions VALUES ({', '.join('?' * len(row))})", row)  # noqa: S608  # no text
    connection.execute("INSERT INTO calls VALUES ('0000000f4240aa', 'r', 'alice', 's0', ?)", (OLD_CALL,))
    connection.commit()
    connection.close()


async def test_the_first_format_is_never_changed(path: Path) -> None:
    write_format_1(path)
    made = sqlite3.connect(":memory:")
    made.executescript(MIGRATIONS[0])
    schema = "SELECT type, name, replace(sql, char(10), ' ') FROM sqlite_master ORDER BY name"
    as_made = [(kind, name, sql and sql.split()) for kind, name, sql in made.execute(schema)]
    made.close()
    as_released = [(kind, name, sql and str(sql).split()) for kind, name, sql in query(path, schema)]
    assert as_made == as_released


async def test_a_file_of_the_first_format_keeps_all_totals_and_calls_and_goes_on(
    path: Path, record: MakeRecord
) -> None:
    write_format_1(path)
    for _ in range(2):
        async with opened(path) as store:
            page = await store.sessions("alice", 10, None, "recent")
            assert [view.key.id for view in page.sessions] == ["s2", "s1", "s0"]
            assert {view.totals for view in page.sessions} == {OLD_TOTALS}
            assert {(view.created_at, view.derived) for view in page.sessions} == {(1_000.0, True)}
            (call,) = await store.calls(SessionKey("alice", "s0"), 10)
            assert call == await store.call("alice", "r")
            assert (call.model, call.tools, call.notes, call.context) == ("gpt-5", ("search",), {"a": "b"}, None)
            assert await store.remembered(SessionKey("alice", "s0")) == Remembered()
        assert query(path, "PRAGMA user_version") == [(len(MIGRATIONS),)]
    context = ContextRecord(6, 10, "calibrated", None, 6, 0, "k", 8)
    item = record("s0", charge=CHARGE, context=context)
    async with opened(path) as store:
        assert await store.settle(item) == OLD_TOTALS.add(CHARGE, 4)
        assert await store.remembered(SessionKey("alice", "s0")) == Remembered(last_turn=LastTurn("k", 2))
        assert await store.update(SessionKey("alice", "s1"), lambda state: state) == SessionState()
    assert query(path, "PRAGMA integrity_check") == [("ok",)]


async def test_tool_results_of_an_older_file_count_with_the_bytes_they_have_unpacked(path: Path) -> None:
    path.parent.mkdir()
    connection = sqlite3.connect(path)
    for script in MIGRATIONS[:3]:
        connection.executescript(script)
    texts = {"a": zlib.compress("größer ".encode() * 50), "b": zlib.compress(b"x"), "damaged": b"x", "odd": "text"}
    rows = [(handle, "alice", "s", 1_000.0, text) for handle, text in texts.items()]
    connection.executemany("INSERT INTO results VALUES (?, ?, ?, ?, ?)", rows)
    connection.executescript("PRAGMA application_id=1195463749; PRAGMA user_version=3;")
    connection.close()
    async with opened(path) as store:
        assert await store.results_size(SessionKey("alice", "s")) == 9 * 50 + 1
        assert await store.result("alice", "b") == "x"


def write_format(version: int, path: Path, newest: Path) -> None:
    """A file as an older version made it, with the content of a file in the newest format."""
    made = sqlite3.connect(path)
    made.create_function("unpacked_size", 1, len)
    made.create_function("steps_of", 1, lambda _: None)
    made.create_function("hold_key", 1, hold_key)
    for script in MIGRATIONS[:version]:
        made.executescript(script)
    made.execute("ATTACH ? AS newest", (str(newest),))
    for (table,) in made.execute("SELECT name FROM main.sqlite_master WHERE type = 'table'").fetchall():
        names = ", ".join(name for (name,) in made.execute(f"SELECT name FROM main.pragma_table_info('{table}')"))  # noqa: S608
        source = f"newest.{table}" if table != "latest" else "newest.calls WHERE number > 0 ORDER BY number"
        made.execute(f"INSERT INTO main.{table} ({names}) SELECT {names} FROM {source}")  # noqa: S608  # no text
    made.commit()
    made.executescript(f"PRAGMA application_id=1195463749; PRAGMA user_version={version};")
    made.close()


async def test_what_an_older_version_has_settled_is_listed_in_order(path: Path, record: MakeRecord) -> None:
    newest = path.with_name("newest.db")
    calls = [record(f"s{number % 3}", at=1_000.0 + number, charge=CHARGE) for number in range(9)]
    async with opened(newest) as store:
        for one in calls:
            await store.settle(one)
    write_format(14, path, newest)
    async with opened(path) as store:
        for namespace in ("alice", None):
            assert list(await store.newest_calls(namespace, 5)) == calls[:-6:-1]
            for sort in SORTS:
                page = await store.sessions(namespace, 10, None, sort)
                assert [view.key.id for view in page.sessions] == ["s2", "s1", "s0"]
    assert query(path, "PRAGMA integrity_check") == [("ok",)]


async def test_orphaned_call_of_an_older_version_is_corrected(path: Path, record: MakeRecord) -> None:
    key, newest = SessionKey("alice", "s"), path.with_name("newest.db")
    real = record("s", charge=CHARGE, accounts=(key.account,), spent=Amount(7))
    async with opened(newest) as store:
        await store.settle(replace(real, outcome=ORPHANED, spent=Amount(50)))
    write_format(4, path, newest)
    async with opened(path) as store:
        assert (await store.settle(real)).calls == 1
        (balance,) = await store.balances([Claim(key.account)])
        assert balance.used == Amount(7)


async def test_migration_of_an_older_file_is_logged_once(path: Path, heard: pytest.LogCaptureFixture) -> None:
    """With millions of calls it takes minutes, during which the gateway does not serve."""
    write_format_1(path)
    for _ in range(2):
        async with opened(path):
            pass
    async with opened(path.with_name("new.db")):
        pass
    said = [entry.getMessage() for entry in heard.records if "format" in entry.getMessage()]
    assert len(said) == 1
    assert f"{path.name}: migrating its file from format 1 to {len(MIGRATIONS)}" in said[0]


async def test_a_session_of_format_5_counts_its_tools_from_then_on(path: Path, record: MakeRecord) -> None:
    key = SessionKey("alice", "s0")
    write_format_1(path)
    for number, script in enumerate(MIGRATIONS[1:5], 2):
        for statement in script.split(";")[:-1]:
            if "unpacked_size" not in statement:  # there are no results
                write(path, statement)
        write(path, f"PRAGMA user_version={number}")
    async with opened(path) as store:
        before = await store.session(key)
        assert before is not None
        assert (before.totals, before.tools) == (OLD_TOTALS, ToolUse())
        await store.settle(record("s0", charge=CHARGE, tools=("look", "read", "look")))
        after = await store.session(key)
        assert after is not None
        assert (after.totals, after.created_at) == (OLD_TOTALS.add(CHARGE), before.created_at)
        assert after.tools == ToolUse(("look", "read", "look"), {"look": 2, "read": 1})
    assert query(path, "PRAGMA integrity_check") == [("ok",)]


async def test_a_session_of_format_15_counts_its_subagents_from_then_on(path: Path, record: MakeRecord) -> None:
    key, newest, agent = SessionKey("alice", "s"), path.with_name("newest.db"), CallingAgent("a1", "main", "Explore")
    async with opened(newest) as store:
        await store.settle(record("s", charge=CHARGE))
    write_format(15, path, newest)
    async with opened(path) as store:
        assert await store.agents(key) == []
        totals = await store.settle(record("s", charge=CHARGE, agent=agent))
        [use] = await store.agents(key)
        assert (use.id, use.type, use.totals.plus(Totals().add(CHARGE))) == ("a1", "Explore", totals)
        assert [one.agent for one in await store.calls(key, 9)] == [agent, None]
    assert query(path, "PRAGMA integrity_check") == [("ok",)]


@pytest.mark.parametrize("version", [7, 8, 9])
async def test_calls_and_open_holds_of_an_older_format_are_kept(path: Path, record: MakeRecord, version: int) -> None:
    key, newest = SessionKey("alice", "s"), path.with_name("newest.db")
    claims = (Claim(key.account, Limits(tokens=100)),)
    done, real = (record("s", request_id=name, charge=CHARGE, accounts=(key.account,)) for name in ("r1", "r2"))
    orphaned = replace(real, outcome=ORPHANED, spent=Amount(50))
    held = OpenHold(Hold("h" * 24, claims, Amount(7)), replace(done, call_id="h" * 24))
    async with opened(newest) as store:
        for one in (done, orphaned):
            await store.settle(one)
        await store.reserve(held, 180.0)
    write_format(version, path, newest)
    async with opened(path) as store:
        assert list(await store.calls(key, 9)) == [orphaned, done]
        assert [await store.call("alice", name) for name in ("r1", "r2")] == [done, orphaned]
        (balance,) = await store.balances(claims)
        assert (balance.used, balance.held) == (Amount(50), Amount(7))
        assert (await store.settle(done)).calls == 2, "it is known, and so is the other"
        await store.settle(real)
        await store.settle(replace(held.orphaned, charge=CHARGE, spent=Amount(1)))
        (balance,) = await store.balances(claims)
        assert (balance.used, balance.held) == (Amount(1), Amount())
    shape = "SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY name"
    assert query(path, shape) == query(newest, shape)
    assert query(path, "PRAGMA integrity_check") == [("ok",)]


async def test_calls_of_format_13_are_kept_and_found_by_their_answers_from_then_on(
    path: Path, record: MakeRecord
) -> None:
    newest = path.with_name("newest.db")
    old, orphaned = record("s", charge=CHARGE), record("s", charge=CHARGE, outcome=ORPHANED)
    async with opened(newest) as store:
        for one in (old, orphaned):
            await store.settle(one)
    write_format(13, path, newest)
    new = record("s", charge=CHARGE, answer="new")
    async with opened(path) as store:
        await store.settle(new)
        await store.settle(corrected := replace(orphaned, outcome="ok", answer="late"))
        assert await store.call_of_response("alice", "new") == new
        assert await store.call_of_response("alice", "late") == corrected
        assert {one.call_id for one in await store.calls(SessionKey("alice", "s"), 9)} == {
            one.call_id for one in (old, orphaned, new)
        }
    shape = "SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY name"
    assert query(path, shape) == query(newest, shape)


async def test_the_calls_settled_last_of_format_9_stay_in_their_order_and_their_numbers_are_not_given_again(
    path: Path, record: MakeRecord
) -> None:
    newest = path.with_name("newest.db")
    old, late, early, gone = (record(name, at=at, charge=CHARGE) for name, at in [
        ("s", 9_000.0), ("s", 3_000.0), (None, 2_000.0), ("gone", 4_000.0),
    ])  # fmt: skip
    orphaned = record("s", at=5_000.0, outcome=ORPHANED, charge=CHARGE)
    async with opened(newest) as store:
        for one in (old, orphaned, late, early, gone):
            await store.settle(one)
    write_format(9, path, newest)
    for statement in (
        "DELETE FROM latest WHERE number = 1",
        "UPDATE latest SET number = number + 70",
        "DELETE FROM calls WHERE session_id = 'gone'",
    ):
        write(path, statement)
    async with opened(path) as store:
        assert (await store.settled_after(None, 9)).cursor == 75
        found = await store.settled_after(71, 9)
        assert [one.call for one in found.settled] == [orphaned, late, early]
        assert [one.totals and one.totals.calls for one in found.settled] == [2, 3, None]
        assert found.missed == 0
        assert (await store.settled_after(0, 1)).settled == found.settled[:1], (
            "nobody noted when the oldest was settled"
        )
        assert await store.calls(SessionKey("alice", "s"), 9) == [old, orphaned, late]
        right, newer = replace(orphaned, outcome="ok"), record("s", at=1.0)
        for one in (right, newer):
            await store.settle(one)
        again = await store.settled_after(75, 9)
        assert ([one.call for one in again.settled], again.cursor) == ([right, newer], 77)
    assert query(path, "PRAGMA integrity_check") == [("ok",)]


async def test_calls_of_more_than_a_thousand_bytes_share_pages(path: Path, record: MakeRecord) -> None:
    async with opened(path) as store:
        for _ in range(200):
            await store.settle(record(notes={"note": "x" * 500}))
    ((pages,),) = query(path, "PRAGMA page_count")
    assert isinstance(pages, int)
    assert pages < 150


async def test_the_sum_of_tool_results_is_read_from_an_index_alone(path: Path) -> None:
    async with opened(path):
        plan = query(path, "EXPLAIN QUERY PLAN SELECT sum(size) FROM results WHERE namespace = 'a' AND id = 's'")
    assert "USING COVERING INDEX results_by_size" in str(plan)


async def test_worker_of_the_first_release_works_next_to_a_newer_one(path: Path) -> None:
    write_format_1(path)
    columns = [str(name) for (name,) in query(path, "SELECT name FROM pragma_table_info('sessions')")]
    async with opened(path) as store:
        values = ", ".join(["'bob'", "'s'", *"11"] + ["1"] * (len(columns) - 4))
        write(path, f"INSERT INTO sessions ({', '.join(columns)}) VALUES ({values})")  # noqa: S608  # no text
        assert (await store.totals(SessionKey("bob", "s"))).calls == 1
        assert (await store.totals(SessionKey("bob", "s"))).saved_tokens == 0


async def test_several_workers_that_start_on_an_old_file_at_once_all_come_up(path: Path) -> None:
    write_format_1(path, 200)

    async def start() -> Totals:
        async with opened(path) as store:
            return await store.totals(SessionKey("alice", "s7"))

    found = await asyncio.gather(*(asyncio.to_thread(asyncio.run, start()) for _ in range(4)))
    assert found == [OLD_TOTALS] * 4


async def test_a_file_that_cannot_be_brought_to_the_newest_format_is_left_as_it_was(path: Path) -> None:
    write_format_1(path)
    write(path, "CREATE TABLE lessons (mine TEXT)")
    before = query(path, "SELECT name, sql FROM sqlite_master")
    with pytest.raises(StoreUnavailable, match=r"lessons.*store\.url"):
        SqliteStore(path)
    assert query(path, "SELECT name, sql FROM sqlite_master") == before
    assert query(path, "PRAGMA user_version") == [(1,)]


async def test_a_file_of_the_newest_format_that_is_locked_is_not_said_to_be_old(path: Path) -> None:
    async with opened(path):
        pass
    connection = connect(path, busy_timeout_s=0.01)
    try:
        with locked(path), pytest.raises(StoreUnavailable, match="cannot be used: database is locked"):
            migrate(connection, path)
    finally:
        connection.close()
