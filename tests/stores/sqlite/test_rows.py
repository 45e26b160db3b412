"""Rows that are damaged, or were written by another program, are not read as something else."""

from __future__ import annotations

import sqlite3
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from gateway.core.counting.calibration import LastTurn
from gateway.core.ledger.arithmetic import Amount, Claim, Hold
from gateway.core.record import ContextRecord
from gateway.core.session import Remembered, SessionState
from gateway.core.stored import OpenHold, Sort
from gateway.core.usage import MAX_TOKENS, Charge, Totals, Usage
from gateway.stores.cursor import Cursor
from gateway.stores.damage import UnreadRecords
from gateway.stores.sqlite import rows
from gateway.stores.sums import SUMS
from tests.stores.files import CHARGE, KEY, MakeRecord, opened, query, write

EPOCH = {"v": 1, "prefix": "p1", "decisions": [1], "recalls": {}}
STATE = SessionState({"p1": EPOCH})
DEEP = b'{"epochs":{"p":{"prefix":' + b"[" * 100_000
DAMAGED = [b"", b"{", b"\xff\xfe", b"[]", b'{"epochs":[]}', b'{"epochs":{"p":3}}', DEEP, "text", 7, 1.5]


def test_the_columns_are_the_totals_in_their_order() -> None:
    names = [field.name for field in fields(Totals)]
    assert [name.replace("cost_pico_usd", "cost_usd") for name in SUMS] == names


@pytest.mark.parametrize("value", DAMAGED, ids=lambda value: repr(value)[:12])
async def test_damaged_state_is_ignored_and_replaced_by_the_next(path: Path, record: MakeRecord, value: object) -> None:
    async with opened(path) as store:
        await store.update(KEY, lambda _: STATE)
        await store.settle(record(charge=CHARGE, context=ContextRecord(9, 9, "exact", None, 9, 0, "k", 9)))
        write(path, "UPDATE states SET value = ?", value)
        assert await store.remembered(KEY) == Remembered(last_turn=LastTurn("k", 1))
        assert await store.update(KEY, lambda state: state.with_trim_decision(EPOCH)) == STATE
        assert (await store.remembered(KEY)).state == STATE


@pytest.mark.parametrize("value", ["text", 7, 1.5])
async def test_damaged_lesson_is_ignored_and_replaced_by_the_next(path: Path, value: object) -> None:
    async with opened(path) as store:
        await store.learn({"k": lambda _: b"1"})
        write(path, "UPDATE lessons SET value = ?", value)
        assert await store.learned("k") is None
        assert await store.learn({"k": lambda known: b"new" if known is None else b"old"}) == {"k": b"new"}
        assert await store.learned("k") == b"new"


@pytest.mark.parametrize(
    "damage", ["last_key = NULL", "last_key = x'00'", "last_residual = 'x'", "last_residual = 0.5"]
)
async def test_damaged_last_turn_is_ignored(path: Path, record: MakeRecord, damage: str) -> None:
    async with opened(path) as store:
        await store.settle(record(charge=CHARGE, context=ContextRecord(9, 9, "exact", None, 9, 0, "k", 9)))
        assert await store.remembered(KEY) == Remembered(last_turn=LastTurn("k", 1))
        write(path, f"UPDATE sessions SET {damage}")  # noqa: S608  # constants
        assert await store.remembered(KEY) == Remembered()


async def test_a_last_turn_that_an_older_version_wrote_has_no_frames(path: Path, record: MakeRecord) -> None:
    async with opened(path) as store:
        await store.settle(record(charge=CHARGE, context=ContextRecord(9, 9, "exact", None, 9, 0, "k", 9, frames=4)))
        assert await store.remembered(KEY) == Remembered(last_turn=LastTurn("k", 1, 4))
        write(path, "UPDATE sessions SET last_frames = NULL, last_added = NULL, last_over = NULL")
        assert await store.remembered(KEY) == Remembered(last_turn=LastTurn("k", 1))


async def test_a_state_of_a_newer_version_is_read_as_far_as_it_is_known(path: Path) -> None:
    async with opened(path) as store:
        await store.update(KEY, lambda _: STATE)
        write(path, "UPDATE states SET value = ?", b'{"new":[1],"epochs":{"p1":{"v":2,"prefix":"p1"}}}')
        assert (await store.remembered(KEY)).state == SessionState({"p1": {"v": 2, "prefix": "p1"}})


async def test_a_residual_is_kept_within_what_a_number_of_json_holds(path: Path, record: MakeRecord) -> None:
    context = ContextRecord(9, 9, "exact", None, 9, 0, "k", 9)
    async with opened(path) as store:
        await store.settle(record(charge=Charge(Usage.of(2**80, 1), "provider"), context=context))
        assert (await store.remembered(KEY)).last_turn == LastTurn("k", MAX_TOKENS)
    assert query(path, "SELECT typeof(last_residual) FROM sessions") == [("integer",)]


async def test_a_state_that_another_worker_changed_or_deleted_is_not_answered_from_before(path: Path) -> None:
    async with opened(path) as mine, opened(path) as other:
        await mine.update(KEY, lambda _: STATE)
        assert (await mine.remembered(KEY)).state == STATE
        second = {**EPOCH, "prefix": "p2"}
        await other.update(KEY, lambda state: state.with_trim_decision(second, instead_of="p1"))
        assert (await mine.remembered(KEY)).state == SessionState({"p2": second})
        await other.delete(KEY)
        assert await mine.remembered(KEY) == Remembered()
        await other.learn({"k": lambda _: b"1"})
        assert await mine.learned("k") == b"1"


async def test_a_hold_is_found_by_its_whole_id(path: Path, record: MakeRecord) -> None:
    mine = record(charge=CHARGE, accounts=(KEY.account,), spent=Amount(1))
    claims = (Claim(KEY.account),)
    async with opened(path) as store:
        await store.reserve(OpenHold(Hold(mine.call_id, claims, Amount(7), Amount(1), 0, 0), mine), 180.0)
        write(path, "UPDATE holds SET id = 'of a call with the same key'")
        assert await store.extend(mine.call_id, 1) is None
        await store.settle(mine)
        (balance,) = await store.balances(claims)
        assert (balance.used, balance.held) == (Amount(1), Amount(7))
    assert query(path, "SELECT id FROM holds") == [("of a call with the same key",)]


class Planned(sqlite3.Connection):
    """Notes how SQLite goes about what it is asked."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.plans: list[str] = []

    def execute(self, sql: str, parameters: Any = ()) -> sqlite3.Cursor:
        """As the connection does it."""
        if sql.startswith("SELECT"):
            self.plans += [row[3] for row in super().execute(f"EXPLAIN QUERY PLAN {sql}", parameters)]
        return super().execute(sql, parameters)


@pytest.mark.parametrize("namespace", [None, "alice"])
async def test_a_list_reads_its_page_out_of_an_index_and_sorts_nothing(
    path: Path, record: MakeRecord, namespace: str | None
) -> None:
    async with opened(path) as store:
        await store.settle(record())
    db = sqlite3.connect(path, factory=Planned)
    assert len(rows.newest(db, namespace, 10, UnreadRecords())) == 1
    assert len(rows.calls(db, KEY, 10, None, UnreadRecords())) == 1
    for after in (None, Cursor(2e9, "z", "z")):
        assert len([*rows.places(db, namespace, "recent", after, 10)]) == 1
    found = [plan for plan in db.plans if "SCALAR" not in plan]
    db.close()
    assert not [plan for plan in found if "TEMP B-TREE" in plan]
    assert all("INDEX" in plan for plan in found), found


async def test_a_call_is_looked_up_by_its_name_and_not_among_those_of_its_namespace(
    path: Path, record: MakeRecord
) -> None:
    async with opened(path) as store:
        await store.settle(record(request_id="named"))
    db = sqlite3.connect(path, factory=Planned)
    assert rows.call(db, KEY.namespace, "named", UnreadRecords()) is not None
    found = [plan for plan in db.plans if plan.startswith("SEARCH")]
    db.close()
    assert [plan.split("(")[-1] for plan in found] == ["call_id=?)", "request_id=?)"]


@pytest.mark.parametrize("sort", ["tokens", "cost"])
async def test_the_other_orders_read_one_index_alone(path: Path, record: MakeRecord, sort: Sort) -> None:
    async with opened(path) as store:
        await store.settle(record())
    db = sqlite3.connect(path, factory=Planned)
    assert len([*rows.places(db, None, sort, None, 10)]) == 1
    found = db.plans
    db.close()
    assert found[0] == "SCAN sessions USING COVERING INDEX sessions_listed"
