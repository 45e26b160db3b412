"""Lists that go over all sessions: what every store must show, and in which order."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from decimal import Decimal

import pytest

from gateway.core.ledger.session_key import SessionKey
from gateway.core.ports import Store
from gateway.core.record import ORPHANED, CallRecord
from gateway.core.stored import SORTS, Sort
from gateway.core.usage import Charge, Usage
from gateway.stores import cursor as cursors
from gateway.stores import sqlite
from gateway.stores.memory.calls import CALLS_PER_SESSION
from gateway.stores.redis import lists as redis_lists

MakeRecord = Callable[..., CallRecord]

PRICED = Charge(Usage(10, 5, 15, 0, 0, 0), "provider", Decimal("0.5"))


def ids(records: Sequence[CallRecord]) -> list[str]:
    return [one.call_id for one in records]


def costing(usd: str, tokens: int = 15) -> Charge:
    return Charge(Usage.of(tokens, 0), "provider", Decimal(usd))


async def settled(store: Store, records: Sequence[CallRecord]) -> list[CallRecord]:
    for one in records:
        await store.settle(one)
    return [*records]


async def all_pages(store: Store, limit: int, sort: Sort, namespace: str | None = "alice", part: str = "") -> list[str]:
    """The ids of all pages; more than there could be is a cursor that leads nowhere."""
    found, place = list[str](), None
    for _ in range(100):
        page = await store.sessions(namespace, limit, place, sort, part=part)
        assert len(page.sessions) <= limit
        found += [view.key.id for view in page.sessions]
        place = page.cursor
        if place is None:
            return found
    raise AssertionError(found)


# --- the newest calls ---------------------------------------------------------------------------------------------------


async def test_the_newest_calls_of_all_sessions_are_those_that_began_last(store: Store, record: MakeRecord) -> None:
    turns = [record(name, at=1_000.0 + 10 * turn + place) for turn in range(5) for place, name in enumerate("abc")]
    old, other = record("old", at=900.0), record("b", namespace="bob", at=2_000.0)
    long = record("long", at=1_005.5, duration_s=5_000.0)
    calls = await settled(store, [*turns, other, long, old])
    by_time = sorted(calls, key=lambda one: one.started_at, reverse=True)
    for namespace in ("alice", "bob", None, "nobody"):
        own = [one for one in by_time if namespace in (None, one.session and one.session.namespace)]
        for limit in (1, 2, 7, 17, 18, 40):
            assert list(await store.newest_calls(namespace, limit)) == own[:limit]


async def test_a_call_without_a_session_is_none_of_them(store: Store, record: MakeRecord) -> None:
    await settled(store, [record(None, at=2_000.0), call := record(at=1_000.0)])
    assert list(await store.newest_calls(None, 10)) == [call]


async def test_a_call_is_listed_once_and_as_it_was_corrected(store: Store, record: MakeRecord) -> None:
    call, later = record(at=1_000.0), record("other", at=1_001.0)
    await settled(store, [replace(call, outcome=ORPHANED), later, later, call, replace(call, model="else")])
    for namespace in ("alice", None):
        assert list(await store.newest_calls(namespace, 10)) == [later, call]


@pytest.mark.parametrize("limit", [2, 3, 10])
async def test_calls_of_a_deleted_session_are_no_longer_listed(store: Store, record: MakeRecord, limit: int) -> None:
    calls = await settled(store, [record(f"s{number % 2}", at=1_000.0 + number) for number in range(8)])
    assert await store.delete(SessionKey("alice", "s1"))
    kept = [one for one in reversed(calls) if one.session == SessionKey("alice", "s0")]
    for _ in range(2):
        for namespace in ("alice", None):
            assert list(await store.newest_calls(namespace, limit)) == kept[:limit]
    await store.settle(calls[7])
    assert list(await store.newest_calls("alice", limit)) == kept[:limit], "it was charged already"
    new = record("s1", at=2_000.0)
    await store.settle(new)
    assert list(await store.newest_calls("alice", limit)) == [new, *kept][:limit]


async def test_expired_calls_are_no_longer_listed(store: Store, record: MakeRecord) -> None:
    calls = [record("old", at=1_000.0), record("both", at=1_001.0), record("both", at=2_000.0), record(at=2_001.0)]
    await settled(store, calls)
    await store.expire(1_500.0)
    for namespace in ("alice", None):
        assert list(await store.newest_calls(namespace, 10)) == [calls[3], calls[2]]


async def test_a_reset_leaves_the_calls_listed(store: Store, record: MakeRecord) -> None:
    await store.settle(call := record())
    await store.reset(SessionKey("alice", "s"))
    assert list(await store.newest_calls("alice", 10)) == [call]


async def test_a_session_with_more_calls_than_are_kept_fills_the_list_with_its_newest(
    store: Store, record: MakeRecord
) -> None:
    calls = [record(at=1_000.0 + number) for number in range(CALLS_PER_SESSION + 5)]
    before = record("before", at=999.0)
    for begin in range(0, len(calls), 50):
        await asyncio.gather(*(store.settle(one) for one in calls[begin : begin + 50]))
    await store.settle(before)
    newest = ids(await store.newest_calls("alice", CALLS_PER_SESSION))
    assert newest == ids(calls[: -CALLS_PER_SESSION - 1 : -1])


async def test_calls_that_are_settled_and_deleted_at_once_leave_lists_that_agree(
    store: Store, record: MakeRecord
) -> None:
    dice = random.Random(7)
    keys = [SessionKey("alice", f"s{number}") for number in range(8)]
    for _ in range(4):
        work = [store.settle(record(dice.choice(keys).id, at=dice.uniform(1_000, 2_000))) for _ in range(40)]
        work += [store.delete(key) for key in dice.sample(keys, 3)]  # type: ignore[misc]
        work += [store.newest_calls("alice", 20) for _ in range(3)]  # type: ignore[misc]
        dice.shuffle(work)
        await asyncio.gather(*work)
    listed = list(await store.newest_calls("alice", 1_000))
    kept = [one for key in keys for one in await store.calls(key, 1_000)]
    assert ids(listed) == sorted(ids(kept), reverse=True)
    assert list(await store.newest_calls(None, 1_000)) == listed
    for sort in SORTS:
        views = {view.key for view in (await store.sessions("alice", 100, None, sort)).sessions}
        assert views == {one.session for one in listed}


# --- sessions -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
async def test_the_dearest_sessions_come_first_in_pages_that_miss_and_repeat_none(
    store: Store, record: MakeRecord, limit: int
) -> None:
    for place, (name, cost) in enumerate({"a": "0.5", "b": "0.1", "c": "0.5", "d": "2", "e": "0"}.items()):
        await store.settle(record(name, at=1_000.0 + place, charge=costing(cost)))
    await store.settle(record("z", namespace="bob", charge=costing("1")))
    await store.settle(record("b", at=900.0, charge=costing("0.00001")))
    assert await all_pages(store, limit, "cost") == ["d", "c", "a", "b", "e"]
    assert await all_pages(store, limit, "cost", None) == ["d", "z", "c", "a", "b", "e"]


async def test_a_session_that_was_reset_or_deleted_moves_in_each_order(store: Store, record: MakeRecord) -> None:
    for name in "abc":
        await store.settle(record(name, charge=costing("1")))
    await store.reset(SessionKey("alice", "c"))
    await store.delete(SessionKey("alice", "b"))
    assert [await all_pages(store, 10, sort) for sort in SORTS] == [["c", "a"], ["a", "c"], ["a", "c"]]


async def test_costs_that_no_double_holds_lose_no_session(store: Store, record: MakeRecord) -> None:
    for place, name in enumerate("abc"):
        await store.settle(record(name, charge=costing(f"100000.00000000000{place}")))
    assert sorted(await all_pages(store, 1, "cost")) == ["a", "b", "c"]


@pytest.mark.parametrize("most", [1, 2, 10_000])
@pytest.mark.parametrize("sort", SORTS)
async def test_a_part_of_a_name_finds_all_that_have_it_in_the_order_asked_for(
    store: Store, record: MakeRecord, monkeypatch: pytest.MonkeyPatch, sort: Sort, most: int
) -> None:
    for module in (cursors, sqlite, redis_lists):
        monkeypatch.setattr(module, "MOST_SEARCHED", most)
    monkeypatch.setattr(redis_lists, "_SEARCH", min(most, 1_000))
    for place, name in enumerate(["Run-1", "other", "run-2", "rerun", "another"]):
        await store.settle(record(name, at=1_000.0 + place, charge=costing(f"0.0{place}", tokens=place)))
    await store.settle(record("run-3", namespace="bob"))
    for limit in (1, 2, 50):
        assert await all_pages(store, limit, sort, part="RUN") == ["rerun", "run-2", "Run-1"]
        assert await all_pages(store, limit, sort, part="nowhere") == []


async def test_a_search_that_found_nothing_yet_goes_on_at_its_cursor(
    store: Store, record: MakeRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (cursors, sqlite, redis_lists):
        monkeypatch.setattr(module, "MOST_SEARCHED", 2)
    monkeypatch.setattr(redis_lists, "_SEARCH", 2)
    for place, name in enumerate(["wanted", "b", "c", "d"]):
        await store.settle(record(name, at=1_000.0 + place))
    first = await store.sessions("alice", 10, None, "recent", part="wanted")
    assert (first.sessions, first.cursor is None) == ([], False)
    second = await store.sessions("alice", 10, first.cursor, "recent", part="wanted")
    assert [view.key.id for view in second.sessions] == ["wanted"]


async def test_a_reader_of_all_sessions_finds_them_by_the_name_of_their_key_too(
    store: Store, record: MakeRecord
) -> None:
    await settled(store, [record("s1"), record("s2", namespace="bob"), record("s3", namespace="default")])
    assert await all_pages(store, 10, "recent", None, part="bob/s") == ["s2"]
    assert await all_pages(store, 10, "recent", None, part="def") == []
    assert await all_pages(store, 10, "recent", "bob", part="bob") == [], "its own sessions are named without it"
