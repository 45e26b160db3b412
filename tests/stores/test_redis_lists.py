"""Lists on a Redis: what an older version has left, how long they grow, and what a list costs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from gateway.core.ledger.session_key import SessionKey
from gateway.core.ports import Store
from gateway.core.record import CallRecord
from gateway.stores.redis import RedisStore, per_server, per_slot
from tests.stores.conftest import OpenStore
from tests.stores.files import Clock, Time
from tests.stores.redis_servers import RedisServer, cli
from tests.stores.test_lists import all_pages, costing, settled

MakeRecord = Callable[..., CallRecord]

#: lists that an older version did not keep
NEW_LISTS = "return redis.call('DEL', 'gateway:calls', 'gateway:calls:alice', 'gateway:cost', 'gateway:cost:alice')"


@pytest.fixture
async def store(open_redis: OpenStore, clock: Clock, moments: Time) -> Any:
    made = await open_redis(clock, moments)
    yield made
    await made.aclose()


@pytest.fixture(params=["redis", "cluster"])
async def shared(request: pytest.FixtureRequest, clock: Clock, moments: Time) -> Any:
    made = await request.getfixturevalue(f"open_{request.param}")(clock, moments)
    yield made
    await made.aclose()


def bounded(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    for module in (per_server, per_slot):
        monkeypatch.setattr(module, "MOST_LATEST", most)


async def test_calls_and_costs_that_an_older_version_has_left_are_listed(
    store: Store, redis_server: RedisServer, record: MakeRecord
) -> None:
    calls = [record(f"s{number % 7}", at=1_000.0 + number, charge=costing(f"0.{number}")) for number in range(60)]
    await settled(store, calls)
    redis_server.cli("eval", NEW_LISTS, "0")
    for namespace in ("alice", None):
        for limit in (3, 60, 100):
            assert list(await store.newest_calls(namespace, limit)) == calls[::-1][:limit]
        dearest = [view.totals.cost_usd for view in (await store.sessions(namespace, 10, None, "cost")).sessions]
        assert len(dearest) == 7
        assert dearest == sorted(dearest, reverse=True)
    for name in ("calls", "calls:alice", "cost", "cost:alice"):
        assert int(redis_server.cli("pttl", f"gateway:{name}")) > 0


async def test_sessions_are_searched_once_for_calls_that_were_not_listed(
    store: Store, redis_server: RedisServer, record: MakeRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = await settled(store, [record(f"s{number}", at=1_000.0 + number) for number in range(5)])
    redis_server.cli("eval", NEW_LISTS, "0")
    assert len(await store.newest_calls(None, 100)) == 5
    searched = list[object]()
    monkeypatch.setattr(cast("RedisStore", store)._lists, "_search_newest", searched.append)
    later = await settled(store, [record("s0", at=2_000.0)])
    assert list(await store.newest_calls(None, 100)) == [*later, *reversed(calls)]
    assert searched == []


async def test_a_session_that_a_server_has_lost_is_looked_for_by_its_cost_once(
    store: Store, redis_server: RedisServer, record: MakeRecord
) -> None:
    await settled(store, [record("a"), record("lost")])
    redis_server.cli("eval", NEW_LISTS, "0")
    redis_server.cli("del", "gateway:{alice/lost}:s")
    assert await all_pages(store, 10, "cost") == ["a"]
    assert redis_server.cli("zcard", "gateway:recent:alice") == "1\n"


@pytest.mark.parametrize("damage", [("set", "junk"), ("hset", "t13", "many")])
async def test_a_session_that_cannot_be_read_is_ranked_by_its_cost_once(
    store: Store, redis_server: RedisServer, record: MakeRecord, damage: tuple[str, ...]
) -> None:
    await settled(store, [record("a"), record("damaged")])
    redis_server.cli("eval", NEW_LISTS, "0")
    redis_server.cli(damage[0], "gateway:{alice/damaged}:s", *damage[1:])
    assert await all_pages(store, 10, "cost") == ["a"]
    assert redis_server.cli("zcard", "gateway:cost:alice") == "2\n"


async def test_a_list_of_calls_keeps_its_newest_and_still_goes_on_with_older_ones(
    shared: Store, record: MakeRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounded(monkeypatch, 5)
    calls = [record(f"s{number % 3}", at=1_000.0 + number) for number in range(30)]
    await asyncio.gather(*map(shared.settle, calls))
    link = cast("RedisStore", shared)._link
    assert await link.call(("ZCARD", "gateway:calls")) == [5]
    assert await link.call(("ZCARD", "gateway:calls:alice")) == [5]
    for limit in (5, 20, 30, 40):
        assert list(await shared.newest_calls("alice", limit)) == calls[::-1][:limit]
    new = record("s1", at=2_000.0)
    await shared.settle(new)
    assert await link.call(("ZCARD", "gateway:calls")) == [5]
    assert list(await shared.newest_calls("alice", 40)) == [new, *reversed(calls)]


async def test_calls_older_than_those_of_a_list_are_found_when_its_own_were_deleted(
    shared: Store, record: MakeRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounded(monkeypatch, 5)
    old = await settled(shared, [record("old", at=1_000.0 + number) for number in range(30)])
    await settled(shared, [record("new", at=2_000.0 + number) for number in range(30)])
    assert await shared.delete(SessionKey("alice", "new"))
    for namespace in ("alice", None):
        assert list(await shared.newest_calls(namespace, 25)) == old[:-26:-1]
        assert list(await shared.newest_calls(namespace, 50)) == old[::-1]


async def test_a_settled_call_is_listed_in_the_same_step(
    store: Store, redis_server: RedisServer, record: MakeRecord
) -> None:
    call = record()
    await store.settle(call)
    commands = cli("-p", str(redis_server.port), "info", "commandstats")
    assert "cmdstat_evalsha" in commands or "cmdstat_eval" in commands
    assert redis_server.cli("zrange", "gateway:calls", "0", "-1").split() == [call.call_id, "alice/s"]
