"""The steps of agents are in the row of the tools that were called; the rest of a state has its own row."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.core.ledger.session_key import SessionKey
from gateway.core.record import CallRecord
from gateway.core.session import SessionState
from gateway.core.steps import StepState
from gateway.core.tools import ToolUse
from gateway.stores.sqlite import SqliteStore, deletion
from gateway.stores.sqlite.schema import MIGRATIONS
from tests.stores.files import CHARGE, KEY, MakeRecord, opened, query, write

EPOCH = {"v": 1, "prefix": "p1", "decisions": [1], "recalls": {}}
AT = StepState("work", 1, ("read", "write"))
WRITES = ("INSERT", "UPDATE", "DELETE")


def one_further(state: SessionState) -> SessionState:
    at = state.steps.get("default", StepState())
    return state.with_step("default", StepState("work", at.index + 1, (*at.recent, "read")))


async def settle(store: SqliteStore, record: CallRecord) -> None:
    await store.settle(record, lambda places: (one_further(SessionState(steps=places)).steps, record))


async def state_of(store: SqliteStore, key: SessionKey = KEY) -> SessionState:
    return (await store.remembered(key)).state


async def tools_of(store: SqliteStore) -> ToolUse:
    view = await store.session(KEY)
    assert view is not None
    return view.tools


async def test_an_answer_that_calls_tools_writes_them_and_the_steps_in_one_row(path: Path, record: MakeRecord) -> None:
    async with opened(path) as store:
        await store.update(KEY, lambda state: state.with_trim_decision(EPOCH))
        await settle(store, record(tools=("read",), charge=CHARGE))
        statements = list[str]()
        store._hot.set_trace_callback(statements.append)
        await settle(store, record(tools=("read",), charge=CHARGE))
        store._hot.set_trace_callback(None)
        written = [one for one in statements if one.startswith(WRITES)]
        assert [one.split()[2] for one in written].count("tools") == 1
        assert not any("states" in one for one in written)
        assert await state_of(store) == SessionState(
            {"p1": EPOCH}, steps={"default": StepState("work", 2, ("read",) * 2)}
        )
        assert await tools_of(store) == ToolUse(("read", "read"), {"read": 2})


async def test_settling_a_call_again_does_not_advance_its_step(path: Path, record: MakeRecord) -> None:
    async with opened(path) as store:
        once = record(tools=("read",), charge=CHARGE)
        for _ in range(3):
            await settle(store, once)
        assert (await state_of(store)).steps["default"].index == 1
        assert await tools_of(store) == ToolUse(("read",), {"read": 1})


async def test_one_part_of_a_state_changes_without_the_other(path: Path, record: MakeRecord) -> None:
    async with opened(path) as store, opened(path) as other:
        await store.update(KEY, one_further)
        await other.update(KEY, lambda state: state.with_trim_decision(EPOCH))
        await store.update(KEY, lambda state: state.with_parent("boss"))
        await other.settle(record(tools=("read",), charge=CHARGE))
        expected = SessionState({"p1": EPOCH}, parent="boss", steps={"default": StepState("work", 1, ("read",))})
        assert [await state_of(one) for one in (store, other)] == [expected] * 2


async def test_reset_keeps_steps_and_clears_totals_and_tools(path: Path, record: MakeRecord) -> None:
    async with opened(path) as store:
        await settle(store, record(tools=("read",), charge=CHARGE))
        assert await store.reset(KEY)
        assert await tools_of(store) == ToolUse()
        assert (await state_of(store)).steps["default"].index == 1
        await store.delete(KEY)
        assert await state_of(store) == SessionState()
        assert query(path, "SELECT count(*) FROM tools") == [(0,)]


@pytest.mark.parametrize("value", [b"", b"{", b"[]", b'{"default":7}', b"[" * 100_000, "text", 7])
async def test_damaged_steps_are_ignored_and_the_rest_is_kept(path: Path, value: object) -> None:
    async with opened(path) as store:
        await store.update(KEY, lambda state: one_further(state).with_trim_decision(EPOCH))
        write(path, "UPDATE tools SET steps = ?", value)
        assert await state_of(store) == SessionState({"p1": EPOCH})
        assert (await store.update(KEY, one_further)).steps["default"].index == 1


# --- what is old ----------------------------------------------------------------------------------------------------------


async def test_steps_of_sessions_that_never_called_go_with_their_time(path: Path, record: MakeRecord) -> None:
    async with opened(path) as store:
        await store.settle(record("called", at=5_000.0, tools=("read",), charge=CHARGE))
        for name in ("called", "never"):
            await store.update(SessionKey("alice", name), one_further)
        write(path, "UPDATE tools SET changed_at = 1000.0")
        assert await store.expire(2_000.0) == 0
        assert query(path, "SELECT id FROM tools") == [("called",)]


@pytest.mark.parametrize("meanwhile", ["UPDATE tools SET changed_at = 3000.0 WHERE id = 's'"])
async def test_steps_that_change_while_old_ones_are_looked_for_stay(path: Path, meanwhile: str) -> None:
    async with opened(path):
        pass
    write(path, "INSERT INTO tools VALUES ('alice', 's', x'7b7d', NULL, 1), ('alice', 'dead', x'7b7d', NULL, 1)")
    connection = sqlite3.connect(path, isolation_level=None)

    def between(statement: str) -> None:
        if statement == "BEGIN IMMEDIATE":
            write(path, meanwhile)

    connection.set_trace_callback(between)
    tools = next(table for table in deletion.ALONE if table.name == "tools")
    keys, _ = deletion.look(connection, tools, 2_000.0, deletion.FIRST)
    assert len(keys) == 2
    assert not deletion.delete_alone(connection, tools, keys, 2_000.0)
    connection.close()
    assert query(path, "SELECT id FROM tools") == [("s",)]


async def test_steps_that_a_call_under_way_entered_outlive_its_expired_session(path: Path, record: MakeRecord) -> None:
    async with opened(path) as store:
        await store.update(KEY, lambda state: state.with_trim_decision(EPOCH).with_parent("boss"))
        await store.settle(record(at=1_000.0, tools=("read",), charge=CHARGE))
        await store.update(KEY, one_further)
        write(path, "UPDATE states SET changed_at = 1000.0")
        write(path, "UPDATE tools SET changed_at = 3000.0")
        assert await store.expire(2_000.0) == 1
        steps = {"default": StepState("work", 1, ("read",))}
        assert await state_of(store) == SessionState({"p1": EPOCH}, parent="boss", steps=steps), "all of it or nothing"
        await store.settle(record(at=4_000.0, tools=("write",), charge=CHARGE))
        assert await tools_of(store) == ToolUse(("write",), {"write": 1}), "what was called before is gone"


@pytest.mark.parametrize("newer", ["states", "tools"])
async def test_a_state_without_a_session_goes_whole_or_not_at_all(path: Path, newer: str) -> None:
    older = "tools" if newer == "states" else "states"
    async with opened(path) as store:
        await store.update(KEY, lambda state: one_further(state).with_parent("boss"))
        write(path, f"UPDATE {newer} SET changed_at = 3000.0")  # noqa: S608  # constants
        write(path, f"UPDATE {older} SET changed_at = 1000.0")  # noqa: S608  # constants
        whole = await state_of(store)
        await store.expire(2_000.0)
        assert await state_of(store) == whole
        write(path, f"UPDATE {newer} SET changed_at = 1000.0")  # noqa: S608  # constants
        await store.expire(2_000.0)
        assert await state_of(store) == SessionState()


async def test_a_change_that_changes_nothing_keeps_a_state_from_going_as_old(path: Path) -> None:
    async with opened(path) as store:
        await store.update(KEY, lambda state: one_further(state).with_parent("boss"))
        for table in ("states", "tools"):
            write(path, f"UPDATE {table} SET changed_at = 1000.0")  # noqa: S608  # constants
        whole = await store.update(KEY, lambda state: state.with_parent("boss"))
        await store.expire(2_000.0)
        assert await state_of(store) == whole


# --- an older file --------------------------------------------------------------------------------------------------------


async def test_steps_of_format_8_are_migrated_and_unreadable_ones_are_left(path: Path, record: MakeRecord) -> None:
    path.parent.mkdir()
    made = sqlite3.connect(path)
    made.create_function("unpacked_size", 1, len)
    for script in MIGRATIONS[:8]:
        made.executescript(script)
    steps = b'"steps":{"default":{"active":"work","index":1,"recent":["read","write"],"is_set":false}}'
    values = {
        "s": b'{"epochs":{"p1":{"v":1,"prefix":"p1","decisions":[1],"recalls":{}}},' + steps + b"}",
        "none": b'{"epochs":{},"steps":{}}', "odd": b"{", "deep": b"[" * 100_000, "list": b"[]", "text": "x",
    }  # fmt: skip
    made.executemany("INSERT INTO states VALUES ('alice', ?, 1000.0, ?)", values.items())
    made.execute("INSERT INTO tools VALUES ('alice', 's', ?)", (b'{"recent":["read"],"calls":{"read":4}}',))
    made.commit()
    made.executescript("PRAGMA application_id=1195463749; PRAGMA user_version=8;")
    made.close()
    async with opened(path) as store:
        expected = SessionState({"p1": EPOCH}, steps={"default": AT})
        assert await state_of(store) == expected
        assert await store.update(KEY, lambda state: state.with_parent("boss")) == replace(expected, parent="boss")
        assert await state_of(store) == replace(expected, parent="boss")
        await settle(store, record(tools=("read",), charge=CHARGE))
        assert (await tools_of(store)).calls == {"read": 5}
        assert (await state_of(store)).steps["default"].index == 2
        for name in ("none", "odd", "deep", "list", "text"):
            assert await state_of(store, SessionKey("alice", name)) == SessionState()
    assert query(path, "SELECT id FROM tools") == [("s",)]
