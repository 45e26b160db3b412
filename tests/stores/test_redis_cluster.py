"""What a cluster asks for: all of a session in one slot, and a hold on several servers that no crash tears apart."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis import exceptions
from redis.crc import key_slot

from gateway.core.errors import StoreUnavailable
from gateway.core.ledger.arithmetic import NOTHING, AccountKey, Amount, Claim, Granted, Hold, Limits, Refused
from gateway.core.ledger.session_key import SessionKey
from gateway.core.record import ORPHANED, CallRecord
from gateway.core.stored import OpenHold
from gateway.core.usage import Charge, Totals, Usage
from gateway.stores.redis import RedisStore
from gateway.stores.redis.keys import Keys, session_of, tag_of, tag_of_account, tag_of_call
from gateway.stores.redis.scripts import Command
from tests.stores.files import PATIENT_S
from tests.stores.redis_servers import RedisCluster, RedisServer
from tests.support.timing import in_time

MakeRecord = Callable[..., CallRecord]

KEY = SessionKey("alice", "s")
PARENT = AccountKey("session", "alice", "parent")
CLIENT = AccountKey("key", "alice")
RATE = AccountKey("rate", "alice")
ACCOUNTS = (KEY.account, PARENT, CLIENT)
CHARGE = Charge(Usage.of(10, 5), "provider")
LEASE_S = 30.0


class Ahead:
    """By how much the servers' clocks are taken to be ahead."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def overhead(self) -> float:
        """A clock of this process by which as much time has passed."""
        return time.monotonic() + self.seconds


@pytest.fixture
def ahead() -> Ahead:
    return Ahead()


@pytest.fixture(params=["redis", "cluster"])
async def store(request: pytest.FixtureRequest, ahead: Ahead) -> AsyncIterator[RedisStore]:
    servers: RedisServer | RedisCluster = request.getfixturevalue(
        "redis_server" if request.param == "redis" else "redis_cluster"
    )
    servers.flush()
    made = RedisStore(servers.url, timeout_s=PATIENT_S, moment=ahead.overhead, ahead_s=ahead)
    yield made
    await made.aclose()


@pytest.fixture
async def clustered(redis_cluster: RedisCluster, ahead: Ahead) -> AsyncIterator[RedisStore]:
    redis_cluster.flush()
    made = RedisStore(redis_cluster.url, timeout_s=PATIENT_S, moment=ahead.overhead, ahead_s=ahead)
    yield made
    await made.aclose()


class Cut:
    """A way to the servers that ends at its n-th round trip: before it, or when only the answer is missing."""

    def __init__(self, link: Any, after: int, *, is_done: bool) -> None:
        self.link = link
        self.left = after
        self.is_done = is_done

    async def call(self, *commands: Command) -> list[Any]:
        self.left -= 1
        if self.left >= 0:
            return list(await self.link.call(*commands))
        if self.left == -1 and self.is_done:
            await self.link.call(*commands)
        raise StoreUnavailable("cut")

    async def aclose(self) -> None:
        await self.link.aclose()


async def cut(store: RedisStore, after: int, work: Callable[[], Awaitable[object]], *, is_done: bool) -> bool:
    """Do something as a process that ends after so many round trips; whether it came to its end before."""
    ledger: Any = store._ledger
    link = ledger._link
    ledger._link = Cut(link, after, is_done=is_done)
    try:
        await work()
    except StoreUnavailable:
        await asyncio.sleep(0.01)
        return False
    finally:
        ledger._link = link
    return True


def held(record: CallRecord, limits: int = 1_000) -> OpenHold:
    claims = (*(Claim(one, Limits(limits)) for one in ACCOUNTS), Claim(RATE, Limits(calls=10**6, window=10**6)))
    orphaned = replace(
        record, outcome=ORPHANED, accounts=ACCOUNTS, spent=Amount(1), charge=Charge(Usage.of(1, 0), "estimated")
    )
    return OpenHold(Hold(record.call_id, claims, Amount(10, 0, 1), Amount(1), 0, 5), orphaned)


def spent(record: CallRecord) -> CallRecord:
    return replace(record, accounts=ACCOUNTS, spent=Amount(7), charge=CHARGE)


async def balance(store: RedisStore) -> list[tuple[Amount, Amount]]:
    return [(one.used, one.held) for one in await store.balances([Claim(key) for key in ACCOUNTS])]


# --- crashes --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])
async def test_interrupted_hold_ends_with_its_lease(
    store: RedisStore, record: MakeRecord, ahead: Ahead, is_done: bool
) -> None:
    orphaned, at_the_end = 0, False
    for after in range(20):
        opened = held(record())
        at_the_end = await cut(store, after, lambda: store.reserve(opened, LEASE_S), is_done=is_done)  # noqa: B023
        if at_the_end:
            break
        assert await store.overdue_holds(10) == []
        ahead.seconds += LEASE_S + 1
        found = await store.overdue_holds(10)
        assert [one.hold.id for one in found] in ([], [opened.hold.id])
        for one in found:
            await store.settle(one.as_orphaned())
            orphaned += 1
        assert await balance(store) == [(Amount(orphaned), NOTHING)] * 3
        assert await store.overdue_holds(10) == []
    assert at_the_end


@pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])
async def test_interrupted_hold_is_held_once_when_repeated(
    store: RedisStore, record: MakeRecord, is_done: bool
) -> None:
    for after in range(20):
        opened = held(record())
        at_the_end = await cut(store, after, lambda: store.reserve(opened, LEASE_S), is_done=is_done)  # noqa: B023
        outcome = await store.reserve(opened, LEASE_S)
        assert isinstance(outcome, Granted)
        assert outcome.units == 5
        assert [one.held for one in outcome.balances[:3]] == [Amount(15, 0, 1)] * 3
        await store.settle(replace(spent(record(call_id=opened.hold.id)), spent=NOTHING))
        assert await balance(store) == [(NOTHING, NOTHING)] * 3
        if at_the_end:
            return
    pytest.fail("it never came to its end")


@pytest.mark.parametrize("sweeps", [False, True], ids=["", "and taken for lost"])
@pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])
async def test_interrupted_settlement_counts_once_when_repeated(
    store: RedisStore, record: MakeRecord, ahead: Ahead, is_done: bool, sweeps: bool
) -> None:
    for number in range(30):
        call = spent(record(request_id=f"r{number}"))
        await store.reserve(held(call), LEASE_S)
        at_the_end = await cut(store, number, lambda: store.settle(call), is_done=is_done)  # noqa: B023
        if sweeps:
            ahead.seconds += LEASE_S + 1
            for one in await store.overdue_holds(10):
                await store.settle(one.as_orphaned())
        calls = number + 1
        totals = await store.settle(call)
        assert (totals.calls, totals.total_tokens, totals.estimated_calls) == (calls, 15 * calls, 0)
        assert await balance(store) == [(Amount(7 * calls), NOTHING)] * 3
        assert await store.call("alice", call.call_id) == call
        ahead.seconds += LEASE_S + 1
        assert await store.overdue_holds(10) == []
        if at_the_end:
            return
    pytest.fail("it never came to its end")


async def test_a_hold_is_never_taken_after_its_lease_has_ended(
    clustered: RedisStore, record: MakeRecord, ahead: Ahead
) -> None:
    store = clustered
    ledger: Any = store._ledger
    link = ledger._link

    class Slow:
        """Stands still after the first word."""

        async def call(self, *commands: Command) -> list[Any]:
            replies: list[Any] = await link.call(*commands)
            ahead.seconds += LEASE_S + 1
            return replies

    ledger._link = Slow()
    with pytest.raises(StoreUnavailable, match="longer than the lease"):
        await store.reserve(held(record()), LEASE_S)
    ledger._link = link
    assert await store.overdue_holds(10) == []
    assert await balance(store) == [(NOTHING, NOTHING)] * 3


# --- parts of a hold ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["redis", "cluster"])
async def test_a_clock_that_was_set_ahead_ends_no_lease_whose_worker_renews_it(
    request: pytest.FixtureRequest, kind: str, record: MakeRecord
) -> None:
    """`set_ahead`: the servers' clocks; `later`: that of the worker which looks for holds of others."""
    set_ahead, later = Ahead(), Ahead()
    servers: RedisServer | RedisCluster = request.getfixturevalue(f"redis_{'server' if kind == 'redis' else kind}")
    servers.flush()
    store = RedisStore(servers.url, timeout_s=PATIENT_S, moment=later.overhead, ahead_s=set_ahead)
    one, other = held(record()), held(record())
    for opened in (one, other):
        await store.reserve(opened, LEASE_S)
    assert await store.overdue_holds(10) == []
    set_ahead.seconds = 3_600.0
    assert await store.overdue_holds(10) == [], "it may be that nobody has died"
    await store.renew({one.hold.id: 0})
    set_ahead.seconds, later.seconds = 3_600 + LEASE_S - 2, LEASE_S - 2
    assert await store.overdue_holds(10) == []
    await store.renew({one.hold.id: 0})
    set_ahead.seconds, later.seconds = 3_600 + LEASE_S + 2, LEASE_S + 2
    assert [found.hold.id for found in await store.overdue_holds(10)] == [other.hold.id]
    await store.aclose()


async def test_partial_hold_is_released_when_a_later_account_refuses(store: RedisStore, record: MakeRecord) -> None:
    opened = held(record())
    restrict = Claim(AccountKey("session", "alice", "narrow"), Limits(5))
    claims = (*opened.hold.claims, restrict)
    outcome = await store.reserve(replace(opened, hold=replace(opened.hold, claims=claims)), LEASE_S)
    assert isinstance(outcome, Refused)
    assert outcome.balance.key == restrict.key
    assert await balance(store) == [(NOTHING, NOTHING)] * 3
    [rate] = await store.balances([Claim(RATE, Limits(calls=9, window=10**6))])
    assert rate.used == NOTHING
    assert await store.extend(opened.hold.id, 1) is None


async def test_one_of_two_concurrent_calls_is_granted_with_room_for_one(
    clustered: RedisStore, record: MakeRecord
) -> None:
    """Each would lack what the other has, if the accounts were taken in any order."""
    ledger: Any = clustered._ledger
    link = ledger._link
    first, second = held(record()), held(replace(record(), session=SessionKey("alice", "other")))
    done = {place: asyncio.Event() for place in ("{alice}", "{alice/parent}")}
    #: whom the one call lets go first, and where
    after = {("{alice}", second.hold.id): first.hold.id, ("{alice/parent}", first.hold.id): second.hold.id}

    class InTurn:
        """The first call comes first to the key, the second to the parent, if it ever comes there."""

        async def call(self, *commands: Command) -> list[Any]:
            asked = str(commands[0][3:5])
            place = next((name for name in done if name in asked), None)
            if place is not None and any(who in asked and where == place for where, who in after):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(done[place].wait(), 0.3)
            replies: list[Any] = await link.call(*commands)
            if place is not None and any(who in asked for (where, _), who in after.items() if where == place):
                done[place].set()
            return replies

    def scarce(opened: OpenHold) -> OpenHold:
        claims = (Claim(CLIENT, Limits(15)), Claim(PARENT, Limits(15)))
        return replace(opened, hold=replace(opened.hold, claims=claims))

    ledger._link = InTurn()
    outcomes = await asyncio.gather(*(clustered.reserve(scarce(one), LEASE_S) for one in (first, second)))
    ledger._link = link
    assert sorted(type(one).__name__ for one in outcomes) == ["Granted", "Refused"]


async def test_every_account_holds_as_many_units_as_the_narrowest_has_wherever_they_are(
    store: RedisStore, record: MakeRecord
) -> None:
    claims = (Claim(KEY.account, Limits(100)), Claim(PARENT, Limits(14)), Claim(CLIENT, Limits(12)))
    opened = held(record())
    opened = replace(opened, hold=replace(opened.hold, claims=claims, most=50))
    outcome = await store.reserve(opened, LEASE_S)
    assert isinstance(outcome, Granted)
    assert outcome.units == 2
    assert [one.held.tokens for one in outcome.balances] == [12] * 3
    assert await balance(store) == [(NOTHING, Amount(12, 0, 1))] * 3
    await store.override_limits(CLIENT, {"tokens": 13})
    more = await store.extend(opened.hold.id, 9)
    assert more is not None
    assert more.units == 1
    assert await balance(store) == [(NOTHING, Amount(13, 0, 1))] * 3
    await store.settle(spent(opened.orphaned))
    assert await balance(store) == [(Amount(7), NOTHING)] * 3


async def test_a_hold_of_an_older_version_is_given_back_wherever_its_parts_lie(
    clustered: RedisStore, record: MakeRecord
) -> None:
    """It does not say where; nor does this record name an account there."""
    store, opened = clustered, held(record())
    await store.reserve(opened, LEASE_S)
    await store._link.call(("HDEL", Keys("gateway:").hold(opened.hold.id, tag_of("alice", "s")), "o"))
    await store.settle(replace(spent(opened.orphaned), accounts=(KEY.account,)))
    assert await balance(store) == [(Amount(7), NOTHING), (NOTHING, NOTHING), (NOTHING, NOTHING)]


async def test_charge_of_an_orphaned_call_by_an_older_version_is_reversed(
    clustered: RedisStore, redis_cluster: RedisCluster, record: MakeRecord
) -> None:
    store, opened, keys = clustered, held(record()), Keys("gateway:")
    await store.settle(opened.as_orphaned())
    as_it_was = "return redis.call('SET', KEYS[1], cmsgpack.pack(cmsgpack.unpack(redis.call('GET', KEYS[1]))[1]))"
    for key in (PARENT, CLIENT):
        settled = keys.settled(tag_of_account(key), opened.hold.id)
        assert redis_cluster.nodes[0].cli("-c", "eval", as_it_was, "1", settled) == "OK\n"
    await store.settle(replace(spent(opened.orphaned), outcome="ok"))
    assert await balance(store) == [(Amount(7), NOTHING)] * 3


# --- keys -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [KEY, SessionKey("", ""), SessionKey("a}b", "{c/d"), SessionKey("漢/", "}{")])
def test_data_of_a_session_is_in_one_slot(key: SessionKey) -> None:
    keys, tag = Keys("gateway:"), tag_of(key.namespace, key.id)
    names = [*keys.all_of(tag), keys.account(key.account), keys.hold("h", tag), keys.settled(tag, "c")]
    assert len({key_slot(name.encode()) for name in names}) == 1
    assert session_of(tag) == key
    assert session_of(tag_of_call("a/b")) is None


# --- servers that move, freeze and die --------------------------------------------------------------------------------------


async def test_keys_that_moved_to_another_server_are_found_there(
    clustered: RedisStore, redis_cluster: RedisCluster, record: MakeRecord
) -> None:
    store = clustered
    await store.settle(spent(record()))
    slot = key_slot(f"{{{tag_of('alice', 's')}}}".encode())
    nodes = redis_cluster.nodes
    names = {node.cli("cluster", "myid").strip(): node for node in nodes}
    source = next(node for node in nodes if int(node.cli("cluster", "countkeysinslot", f"{slot}")) > 0)
    target_id, target = next((name, node) for name, node in names.items() if node is not source)
    source_id = next(name for name, node in names.items() if node is source)
    for importing, state, other in ((target, "importing", source_id), (source, "migrating", target_id)):
        importing.cli("cluster", "setslot", f"{slot}", state, other)
    moved = source.cli("cluster", "getkeysinslot", f"{slot}", "100").split()
    source.cli("migrate", "127.0.0.1", f"{target.port}", "", "0", "5000", "keys", *moved)
    # Half way the source says where to ask; what needs several keys has to wait until all are there.
    assert (await store.totals(KEY)).calls == 1
    with pytest.raises(StoreUnavailable, match="TRYAGAIN"):
        await store.settle(spent(record()))
    for node in (target, source, *nodes):
        node.cli("cluster", "setslot", f"{slot}", "node", target_id)
    assert (await store.settle(spent(record()))).calls == 2
    assert (await store.totals(KEY)).calls == 2


async def test_frozen_cluster_server_delays_no_sessions_of_other_servers(tmp_path: Path, record: MakeRecord) -> None:
    cluster = RedisCluster(tmp_path)
    store = RedisStore(cluster.url, timeout_s=1)
    keys = [SessionKey("alice", str(number)) for number in range(120)]

    async def ask_all() -> list[Totals | BaseException]:
        return await asyncio.gather(*(store.totals(key) for key in keys), return_exceptions=True)

    async def all_answer() -> None:
        deadline = time.monotonic() + 60
        while not all(isinstance(one, Totals) for one in await ask_all()):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)

    try:
        await all_answer()
        cluster.nodes[0].send_signal(signal.SIGSTOP)
        for _ in range(2):
            with in_time():  # one after the other, those of the frozen server would take 40 s
                answers = await ask_all()
            assert {type(one) for one in answers} == {Totals, StoreUnavailable}
            assert 20 < sum(isinstance(one, Totals) for one in answers) < 100
        cluster.nodes[0].send_signal(signal.SIGCONT)
        await all_answer()
        cluster.kill()
        with pytest.raises(StoreUnavailable):
            await store.settle(spent(record()))
    finally:
        await store.aclose()
        cluster.kill()


class SlowToClose:
    """Something of redis-py's whose connections take too long to be seen closed."""

    def __init__(self, known: Any) -> None:
        self._known = known

    def __getattr__(self, name: str) -> Any:
        return getattr(self._known, name)

    async def aclose(self, *which: str) -> None:
        await self._known.aclose(*which)
        raise exceptions.TimeoutError("Timed out closing connection")


async def test_connection_that_closes_slowly_blocks_no_other_request(clustered: RedisStore) -> None:
    link: Any = clustered._link
    link._cluster.nodes_manager = SlowToClose(link._cluster.nodes_manager)
    assert await clustered.keys() == []


async def test_a_store_whose_connections_are_slow_to_close_is_closed(redis_server: RedisServer) -> None:
    store = RedisStore(redis_server.url, timeout_s=PATIENT_S)
    await store.ping()
    link: Any = store._link
    link._pool = SlowToClose(link._pool)
    await store.aclose()
