"""What is found by looking through sessions, in a store of our own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from gateway.core.errors import InvalidRequest
from gateway.core.ids import call_id
from gateway.core.namespaces import SessionKey
from gateway.core.record import CallRecord
from gateway.core.usage import Charge, Usage
from gateway.server.finding import Sort, Wanted, find_sessions, newest_calls, sort_of
from gateway.stores.memory import MemoryStore
from tests.support.web import Web


def record(session: str, at: float, cost: str = "0.01", namespace: str = "alice", tokens: int = 5) -> CallRecord:
    charge = Charge(Usage.of(tokens, 1), "provider", Decimal(cost))
    return CallRecord(
        call_id(int(at * 1000), session.encode().ljust(8, b"0")[:8]), "r", SessionKey(namespace, session), False, at,
        "chat", "chat", "p", "m", None, False, 200, "ok", None, None, (), charge, 0.0, None, 0.5, 1, 1,
    )  # fmt: skip


async def filled(records: Sequence[CallRecord]) -> MemoryStore:
    store = MemoryStore()
    for one in records:
        await store.settle(one)
    return store


async def all_pages(store: MemoryStore, wanted: Wanted, **options: Any) -> list[str]:
    """The ids of all pages; more than there could be is a cursor that leads nowhere."""
    found: list[str] = []
    for _ in range(100):
        page = await find_sessions(store, wanted, **options)
        assert len(page.sessions) <= wanted.limit
        found += [view.key.id for view in page.sessions]
        if page.cursor is None:
            return found
        wanted = replace(wanted, cursor=page.cursor)
    raise AssertionError(found)


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
async def test_the_dearest_sessions_come_first_in_pages_that_miss_and_repeat_none(limit: int) -> None:
    costs = {"a": "0.5", "b": "0.1", "c": "0.5", "d": "2", "e": "0"}
    store = await filled([record(name, 1000.0 + place, cost) for place, (name, cost) in enumerate(costs.items())])
    assert await all_pages(store, Wanted("alice", limit, sort="cost")) == ["d", "c", "a", "b", "e"]


async def test_by_cost_only_so_many_of_those_called_last_are_looked_at() -> None:
    store = await filled([record(str(number), 1000.0 + number, str(9 - number)) for number in range(6)])
    assert await all_pages(store, Wanted("alice", 10, sort="cost"), most=3) == ["3", "4", "5"]


@pytest.mark.parametrize("sort", ["recent", "tokens", "cost"])
@pytest.mark.parametrize("limit", [1, 2, 50])
async def test_a_part_of_a_name_finds_all_that_have_it_in_the_order_asked_for(sort: Sort, limit: int) -> None:
    names = ["Run-1", "other", "run-2", "rerun", "another"]
    store = await filled(
        [record(name, 1000.0 + place, f"0.0{place}", tokens=place) for place, name in enumerate(names)]
    )
    wanted = Wanted("alice", limit, sort=sort, part="RUN")
    found = await all_pages(store, wanted, most=2 if sort != "cost" else 10)
    assert found == ["rerun", "run-2", "Run-1"]


async def test_whoever_sees_all_finds_sessions_by_the_name_of_their_key_too() -> None:
    store = await filled([record("s1", 1000.0), record("s2", 1001.0, namespace="bob")])
    assert await all_pages(store, Wanted(None, 10, part="bob/s")) == ["s2"]
    assert (
        await all_pages(await filled([record("s3", 1000.0, namespace="default")]), Wanted(None, 10, part="def")) == []
    )
    assert await all_pages(store, Wanted("bob", 10, part="bob")) == [], "its own sessions are named without it"


async def test_the_newest_calls_of_all_sessions_come_in_one_list() -> None:
    store = await filled(
        [record(name, 1000.0 + number * 10 + place) for number in range(5) for place, name in enumerate("abc")]
        + [record("old", 900.0), record("b", 2000.0, namespace="bob")]
    )
    for limit in (1, 2, 7, 15, 40):
        found = [(one.session.id, one.started_at) for one in await newest_calls(store, "alice", limit) if one.session]
        expected = sorted(
            [(name, 1000.0 + number * 10 + place) for number in range(5) for place, name in enumerate("abc")]
            + [("old", 900.0)],
            key=lambda row: -row[1],
        )
        assert found == expected[:limit]
    assert len(await newest_calls(store, None, 40)) == 17


async def test_a_session_whose_last_call_is_long_still_gives_its_newer_ones() -> None:
    long = replace(record("long", 1000.0), duration_s=500.0)
    store = await filled([long, *(record("short", 1100.0 + number) for number in range(3))])
    assert [one.started_at for one in await newest_calls(store, "alice", 2)] == [1102.0, 1101.0]


class Counted(MemoryStore):
    """Knows how many records were read."""

    read = 0

    async def calls(self, session: SessionKey, limit: int, before: str | None = None) -> Sequence[CallRecord]:
        records = await super().calls(session, limit, before)
        self.read += len(records)
        return records


async def test_the_newest_calls_of_many_long_sessions_are_found_without_reading_all_of_them() -> None:
    sessions, each, limit = 12, 100, 90
    store = Counted()
    for number in range(each):
        for name in range(sessions):
            await store.settle(record(f"s{name}", 1000.0 + number * sessions + name))
    found = await newest_calls(store, None, limit)
    assert [one.started_at for one in found] == [1000.0 + sessions * each - 1 - place for place in range(limit)]
    # The n-th session has an n-th of the newest among those found until then, and a page is read beyond them.
    assert store.read <= sum(limit // (place + 1) + 20 for place in range(sessions))


async def test_the_newest_calls_of_one_session_may_be_more_than_a_page() -> None:
    store = await filled([record("a", 1000.0 + number) for number in range(100)])
    found = await newest_calls(store, None, 70)
    assert [one.started_at for one in found] == [1099.0 - place for place in range(70)]


def test_an_order_that_nobody_knows_is_refused() -> None:
    assert sort_of(None) == "recent"
    assert sort_of("cost") == "cost"
    with pytest.raises(InvalidRequest, match="recent, tokens, cost"):
        sort_of("name")


def test_the_api_finds_sorts_and_continues(web: Web) -> None:
    for number in range(3):
        web.chat(f"findable-{number}", f"tokens={number + 1}00/1", model="priced")
    found = web.get("/api/sessions?q=findable&sort=cost&limit=2").json
    assert [view["id"] for view in found["sessions"]] == ["findable-2", "findable-1"]
    rest = web.get(f"/api/sessions?q=findable&sort=cost&limit=2&cursor={found['cursor']}").json
    assert ([view["id"] for view in rest["sessions"]], rest["cursor"]) == (["findable-0"], None)


def test_the_calls_of_a_session_come_in_pages(web: Web, session: str) -> None:
    for _ in range(5):
        web.chat(session)
    every = [call["call_id"] for call in web.get(f"/api/sessions/{session}/calls").json["calls"]]
    seen, cursor = list[str](), ""
    while True:
        page = web.get(f"/api/sessions/{session}/calls?limit=2{cursor}").json
        seen += [call["call_id"] for call in page["calls"]]
        if page["cursor"] is None:
            break
        cursor = f"&cursor={page['cursor']}"
    assert seen == every
    assert len(seen) == 5
    wrong = web.get(f"/api/sessions/{session}/calls?cursor=zzz")
    assert (wrong.status, wrong.error["param"]) == (400, "cursor")


def test_the_newest_calls_are_listed_for_whoever_may_see_them(web: Web, session: str) -> None:
    web.chat(session)
    (newest,) = web.get("/api/calls?limit=1").json["calls"]
    assert newest["session"] == session
