"""The order in which calls were settled, by whichever worker: the same in every store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal

import pytest

from gateway.core.ledger.arithmetic import Amount
from gateway.core.ledger.session_key import SessionKey
from gateway.core.ports import Store
from gateway.core.record import ORPHANED
from gateway.core.retention import Retention
from gateway.core.stored import MOST_LATEST, LatestCalls, Settled
from gateway.core.usage import Charge, Totals, Usage
from gateway.stores.memory import MemoryStore
from gateway.stores.redis import RedisStore
from gateway.stores.sqlite import SqliteStore
from tests.stores.conftest import MakeRecord
from tests.stores.files import PATIENT_S, opened
from tests.stores.redis_servers import RedisServer

CHARGE = Charge(Usage(10, 5, 15, 4, 3, 2, 1, 1), "provider", Decimal("0.000123"))


def ids(settled: Sequence[Settled]) -> list[str]:
    return [one.call.call_id for one in settled]


async def all_after(store: Store, after: int, limit: int) -> list[LatestCalls]:
    """Pages until there is no more."""
    found = [await store.settled_after(after, limit)]
    while found[-1].settled:
        found.append(await store.settled_after(found[-1].cursor, limit))
    return found


async def test_nothing_is_new_in_an_empty_store(store: Store) -> None:
    now = await store.settled_after(None, 10)
    assert (list(now.settled), now.missed) == ([], 0)
    again = await store.settled_after(now.cursor, 10)
    assert (list(again.settled), again.cursor, again.missed) == ([], now.cursor, 0)


async def test_calls_come_in_the_order_in_which_they_were_settled_each_once(store: Store, record: MakeRecord) -> None:
    await store.settle(record())
    begin = (await store.settled_after(None, 10)).cursor
    late, early = record(at=3_000.0), record(at=2_000.0)
    for one in (late, early, late):
        await store.settle(one)
    found = await store.settled_after(begin, 10)
    assert [one.call for one in found.settled] == [late, early]
    assert list((await store.settled_after(found.cursor, 10)).settled) == []


async def test_each_call_comes_with_the_totals_of_its_session_right_after_it(store: Store, record: MakeRecord) -> None:
    begin = (await store.settled_after(None, 10)).cursor
    for session in ("s", "other", "s"):
        await store.settle(record(session, charge=CHARGE))
    found = await store.settled_after(begin, 10)
    once = Totals().add(CHARGE)
    assert [one.totals for one in found.settled] == [once, once, once.add(CHARGE)]


async def test_a_call_that_is_not_charged_comes_too_and_one_without_a_session_has_no_totals(
    store: Store, record: MakeRecord
) -> None:
    begin = (await store.settled_after(None, 10)).cursor
    await store.settle(record("s", charge=None, outcome="refused"))
    await store.settle(record(None))
    found = await store.settled_after(begin, 10)
    assert [(one.call.session, one.totals) for one in found.settled] == [
        (SessionKey("alice", "s"), Totals()),
        (None, None),
    ]


async def test_the_calls_of_all_namespaces_come(store: Store, record: MakeRecord) -> None:
    begin = (await store.settled_after(None, 10)).cursor
    for namespace in ("alice", "bob"):
        await store.settle(record(namespace=namespace))
    found = await store.settled_after(begin, 10)
    assert [one.call.session.namespace for one in found.settled if one.call.session] == ["alice", "bob"]


async def test_many_come_in_pages_without_a_gap(store: Store, record: MakeRecord) -> None:
    begin = (await store.settled_after(None, 10)).cursor
    settled = [record(f"s{number % 3}") for number in range(150)]
    for one in settled:
        await store.settle(one)
    pages = await all_after(store, begin, 40)
    assert [len(page.settled) for page in pages] == [40, 40, 40, 30, 0]
    assert [one for page in pages for one in ids(page.settled)] == [one.call_id for one in settled]
    assert {page.missed for page in pages} == {0}


async def test_a_call_that_was_taken_for_lost_and_goes_on_does_not_come_again_before_it_ends(
    store: Store, record: MakeRecord
) -> None:
    begin = (await store.settled_after(None, 10)).cursor
    own = record("s", charge=CHARGE)
    orphaned = [
        replace(own, outcome=ORPHANED, charge=Charge(Usage.of(10, tokens), "estimated"), spent=Amount(10 + tokens))
        for tokens in (5, 20, 40)
    ]
    for one in orphaned:
        await store.settle(one)
    found = await store.settled_after(begin, 10)
    assert [one.call for one in found.settled] == [orphaned[-1]], "once, as it is now"
    await store.settle(own)
    found = await store.settled_after(found.cursor, 10)
    assert [one.call for one in found.settled] == [own]


async def test_a_call_that_was_taken_for_lost_comes_again_when_it_is_corrected(
    store: Store, record: MakeRecord
) -> None:
    begin = (await store.settled_after(None, 10)).cursor
    orphaned = record(outcome=ORPHANED, charge=CHARGE)
    await store.settle(orphaned)
    found = await store.settled_after(begin, 10)
    assert [one.call.outcome for one in found.settled] == [ORPHANED]
    right = replace(orphaned, outcome="ok", charge=replace(CHARGE, usage=Usage.of(1, 2)))
    for one in (right, right):
        await store.settle(one)
    found = await store.settled_after(found.cursor, 10)
    assert [one.call.outcome for one in found.settled] == ["ok"]
    assert found.settled[-1].totals is not None
    assert found.settled[-1].totals.total_tokens == 3


async def test_the_calls_of_a_deleted_session_are_passed_over(store: Store, record: MakeRecord) -> None:
    begin = (await store.settled_after(None, 10)).cursor
    for session in ("gone", "here", "gone"):
        await store.settle(record(session))
    await store.delete(SessionKey("alice", "gone"))
    found = await store.settled_after(begin, 10)
    assert [one.call.session for one in found.settled] == [SessionKey("alice", "here")]
    assert (list((await store.settled_after(found.cursor, 10)).settled), found.missed) == ([], 0)


async def test_a_place_is_not_given_again_when_the_newest_call_is_deleted(store: Store, record: MakeRecord) -> None:
    for session in ("here", "gone", "gone"):
        await store.settle(record(session))
    seen = (await store.settled_after(None, 10)).cursor
    for _ in range(2):
        await store.delete(SessionKey("alice", "gone"))
        assert (await store.settled_after(None, 10)).cursor == seen
        newer = record("gone")
        await store.settle(newer)
        found = await store.settled_after(seen, 10)
        assert (ids(found.settled), found.missed) == ([newer.call_id], 0)
        seen = found.cursor


async def test_of_very_many_the_last_are_known_and_those_before_are_counted(
    embedded: Store, record: MakeRecord
) -> None:
    begin = (await embedded.settled_after(None, 10)).cursor
    for number in range(MOST_LATEST + 100):
        await embedded.settle(record(f"s{number % 7}", charge=None))
    pages = await all_after(embedded, begin, 1_000)
    kept = sum(len(page.settled) for page in pages)
    assert MOST_LATEST <= kept <= MOST_LATEST + 64
    assert pages[0].missed + kept == MOST_LATEST + 100
    assert sum(page.missed for page in pages[1:]) == 0


async def test_a_redis_keeps_the_last_only_and_for_as_long_as_sessions(
    redis_server: RedisServer, record: MakeRecord
) -> None:
    redis_server.flush()
    store = RedisStore(redis_server.url, timeout_s=PATIENT_S, retention=Retention(sessions_s=1_000))
    try:
        for _ in range(3):
            await store.settle(record())
        redis_server.cli("set", "gateway:{latest}:n", str(2**40 // 64 * 64))
        redis_server.cli("eval", f"for i = 1, {MOST_LATEST} do redis.call('RPUSH', 'gateway:{{latest}}', '') end", "0")
        await store.settle(record())
        assert redis_server.cli("llen", "gateway:{latest}").strip() == str(MOST_LATEST)
        for key in ("gateway:{latest}", "gateway:{latest}:n"):
            assert 0 < int(redis_server.cli("ttl", key)) <= 1_000 + 10_800
    finally:
        await store.aclose()


async def test_cursor_beyond_the_end_starts_again(store: Store, record: MakeRecord) -> None:
    one = record()
    await store.settle(one)
    if isinstance(store, MemoryStore):
        return  # the list is lost together with all workers that could know a position in it
    found = await store.settled_after(1_000_000, 10)
    assert ids(found.settled) == [one.call_id]


async def test_a_file_that_several_workers_share_shows_the_calls_of_all(
    tmp_path_factory: pytest.TempPathFactory, record: MakeRecord
) -> None:
    path = tmp_path_factory.mktemp("shared") / "gateway.db"
    async with opened(path) as one, opened(path) as other:
        begin = (await other.settled_after(None, 10)).cursor
        settled = record()
        await one.settle(settled)
        assert isinstance(other, SqliteStore)
        assert [found.call for found in (await other.settled_after(begin, 10)).settled] == [settled]
