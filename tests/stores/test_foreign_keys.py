"""A key in Redis to which another program wrote another type blocks only what belongs to that key."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

import pytest

from gateway.core.errors import StoreDamaged
from gateway.core.ledger.arithmetic import Amount, Claim, Hold
from gateway.core.ledger.session_key import SessionKey
from gateway.core.record import ORPHANED, CallRecord
from gateway.core.stored import SORTS, OpenHold, Sort
from gateway.core.usage import Charge, Usage
from gateway.stores.redis import RedisStore
from gateway.stores.redis.keys import Keys, tag_of
from tests.stores.files import PATIENT_S, Time
from tests.stores.redis_servers import cli

MakeRecord = Callable[..., CallRecord]

KEY = SessionKey("alice", "s")
OTHER = SessionKey("alice", "other")
LEASE_S = 60.0
_KEYS = Keys("gateway:")
TAG = tag_of(KEY.namespace, KEY.id)
#: later than all that tests settle
LATE = 2e9


@dataclass(frozen=True)
class Shared:
    """A store, the time of its holds, and a separate connection to its servers."""

    store: RedisStore
    moments: Time
    port: str
    is_cluster: bool

    def spoil(self, name: str) -> None:
        """Put a text where something else was."""
        self.cli("set", name, "junk")

    def cli(self, *words: str) -> str:
        return cli("-c", "-p", self.port, *words)


@pytest.fixture(params=["server", "cluster"])
async def shared(request: pytest.FixtureRequest, moments: Time) -> AsyncIterator[Shared]:
    server = request.getfixturevalue(f"redis_{request.param}")
    server.flush()
    is_cluster = request.param == "cluster"
    port = server.nodes[0].port if is_cluster else server.port
    store = RedisStore(server.url, timeout_s=PATIENT_S, moment=moments.overhead, ahead_s=lambda: moments.passed)
    yield Shared(store, moments, str(port), is_cluster)
    await store.aclose()


async def settle(shared: Shared, record: MakeRecord) -> list[CallRecord]:
    """A call of each of two sessions."""
    records = [record(), record("other")]
    for one in records:
        await shared.store.settle(one)
    return records


@pytest.mark.parametrize("sort", SORTS)
async def test_a_list_leaves_out_the_session_that_cannot_be_read(
    shared: Shared, record: MakeRecord, sort: Sort, heard: pytest.LogCaptureFixture
) -> None:
    await settle(shared, record)
    shared.spoil(_KEYS.session(TAG))
    for _ in range(2):
        page = await shared.store.sessions(None, 10, None, sort)
        assert [view.key for view in page.sessions] == [OTHER]
    told = [one.getMessage() for one in heard.records if one.levelno == logging.ERROR]
    assert len(told) == 1
    assert TAG in told[0]
    with pytest.raises(StoreDamaged):
        await shared.store.session(KEY)


@pytest.mark.parametrize("name", _KEYS.tools(TAG))
async def test_a_session_is_listed_although_its_tools_cannot_be_read(
    shared: Shared, record: MakeRecord, name: str
) -> None:
    await settle(shared, record)
    shared.spoil(name)
    assert {view.key for view in (await shared.store.sessions(None, 10, None, "recent")).sessions} == {KEY, OTHER}
    with pytest.raises(StoreDamaged):
        await shared.store.session(KEY)


async def test_the_newest_calls_are_listed_beside_those_that_cannot_be_read(
    shared: Shared, record: MakeRecord, heard: pytest.LogCaptureFixture
) -> None:
    (_, other) = await settle(shared, record)
    shared.spoil(_KEYS.calls(TAG)[1])
    for _ in range(2):
        assert list(await shared.store.newest_calls(None, 10)) == [other]
    told = [one.getMessage() for one in heard.records if one.levelno == logging.ERROR]
    assert len(told) == 1
    assert TAG in told[0]


async def test_session_with_an_invalid_total_is_left_out_of_lists(shared: Shared, record: MakeRecord) -> None:
    await settle(shared, record)
    shared.cli("hset", _KEYS.session(TAG), "t4", "many")
    page = await shared.store.sessions("alice", 10, None, "recent")
    assert [view.key for view in page.sessions] == [OTHER]


@pytest.mark.parametrize("name", ["i", "c", "l", "s", "t", "x", "a", "u", "w"])
async def test_old_data_expires_although_some_is_unreadable(shared: Shared, record: MakeRecord, name: str) -> None:
    await settle(shared, record)
    await shared.store.keep_results(KEY, {"call_1": "text"}, 1_000)
    shared.spoil(_KEYS.under(TAG, name))
    await shared.store.expire(LATE)
    assert await shared.store.session(OTHER) is None
    assert (await shared.store.sessions(None, 10, None, "recent")).sessions == []


@pytest.mark.parametrize("name", ["i", "c", "l"])
async def test_calls_of_other_sessions_expire_although_one_is_unreadable(
    shared: Shared, record: MakeRecord, name: str
) -> None:
    (_, other) = await settle(shared, record)
    await shared.store.settle(record("other", at=LATE))
    shared.spoil(_KEYS.under(TAG, name))
    await shared.store.expire(LATE - 1)
    assert other.call_id not in [one.call_id for one in await shared.store.calls(OTHER, 10)]


@pytest.mark.parametrize("name", ["t", "x", "a"])
async def test_sessions_without_calls_expire_although_one_is_unreadable(shared: Shared, name: str) -> None:
    for session in (KEY, OTHER):
        await shared.store.keep_results(session, {"call_1": "text"}, 1_000)
    shared.spoil(_KEYS.under(TAG, name))
    await shared.store.expire(LATE)
    assert await shared.store.results(OTHER, ["call_1"]) == {}


@pytest.mark.parametrize("name", ["i", "c", "l", "s", "t", "x", "a", "u", "w"])
async def test_the_session_itself_can_be_deleted(shared: Shared, record: MakeRecord, name: str) -> None:
    await settle(shared, record)
    shared.spoil(_KEYS.under(TAG, name))
    assert await shared.store.delete(KEY)
    assert await shared.store.session(KEY) is None
    await shared.store.settle(record())
    assert (await shared.store.totals(KEY)).calls == 1


async def test_calls_of_other_sessions_are_found_although_one_is_unreadable(shared: Shared, record: MakeRecord) -> None:
    for session in ("other", "s"):
        await shared.store.settle(record(session, request_id="same"))
    shared.spoil(_KEYS.calls(TAG)[1])
    newest = await shared.store.settled_after(0, 10)
    assert [one.call.session for one in newest.settled] == [OTHER]
    found = await shared.store.call(None, "same")
    assert found is not None
    assert found.session == OTHER


async def test_a_text_that_another_session_has_too_is_found_there(shared: Shared) -> None:
    for session in (OTHER, KEY):
        await shared.store.keep_results(session, {"call_1": "text"}, 1_000)
    for damaged in (KEY, OTHER):
        name = _KEYS.results(tag_of(damaged.namespace, damaged.id))
        shared.cli("rename", name, f"{name}:aside")
        shared.spoil(name)
        assert await shared.store.result(None, "call_1") == "text"
        shared.cli("rename", f"{name}:aside", name)


async def test_holds_of_other_calls_are_renewed_although_one_is_unreadable(shared: Shared, record: MakeRecord) -> None:
    bad, good, left = records = [record("other") for _ in range(3)]
    for one in records:
        orphaned = replace(one, outcome=ORPHANED, charge=Charge(Usage.of(1, 0), "estimated"))
        opened = OpenHold(Hold(one.call_id, (Claim(OTHER.account),), Amount(10), Amount(1), 0, 5), orphaned)
        await shared.store.reserve(opened, LEASE_S)
    tag = tag_of(OTHER.namespace, OTHER.id)
    shared.spoil(_KEYS.hold(bad.call_id, tag if shared.is_cluster else None))
    shared.moments.go_on(LEASE_S * 0.9)
    await shared.store.renew({one.call_id: 1 for one in (bad, good)})
    shared.moments.go_on(LEASE_S * 0.9)
    assert [one.hold.id for one in await shared.store.overdue_holds(10)] == [left.call_id]
