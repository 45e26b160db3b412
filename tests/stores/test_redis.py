"""What only a shared store on servers of its own has to do: servers that stop, freeze, forget, and lose replies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any, Self, cast

import pytest

from gateway.app.resources import open_store
from gateway.config.schema import Settings
from gateway.core.errors import StoreConflict, StoreUnavailable
from gateway.core.ledger.arithmetic import NOTHING, AccountKey, Amount, Claim, Granted, Hold, Limits
from gateway.core.ledger.session_key import SessionKey
from gateway.core.record import ORPHANED, CallRecord
from gateway.core.retention import Retention
from gateway.core.session import SessionState
from gateway.core.stored import OpenHold
from gateway.core.usage import Charge, Totals, Usage
from gateway.stores.redis import RedisStore
from gateway.stores.redis.keys import Keys, tag_of
from gateway.stores.redis.link import SingleLink
from gateway.stores.redis.per_server import CALLS_PER_SESSION
from gateway.stores.redis.scripts import Command
from gateway.stores.redis.write_combiner import WriteCombiner
from tests.stores.counting import counts, ending, number_in
from tests.stores.files import PATIENT_S
from tests.stores.redis_servers import RedisCluster, RedisServer, cli, free_port
from tests.support.muting import mute, needs_linux
from tests.support.timing import eventually, in_time

pytestmark = pytest.mark.long

MakeRecord = Callable[..., CallRecord]
StartServer = Callable[..., RedisServer]

KEY = SessionKey("alice", "s")
ACCOUNTS = (KEY.account, AccountKey("key", "alice"))
CHARGE = Charge(Usage.of(10, 5), "provider")
#: of a store that is to give up
TIMEOUT_S = 0.5
LEASE_S = 30.0


@pytest.fixture
def start(tmp_path: Path) -> Iterator[StartServer]:
    """`start(*options)`: a server for one test, which may do to it what it likes."""
    running: list[RedisServer] = []

    def started(*options: str) -> RedisServer:
        running.append(RedisServer(tmp_path, *options))
        return running[-1]

    yield started
    for server in running:
        server.kill()


@contextlib.asynccontextmanager
async def opened(url: str, **options: Any) -> AsyncIterator[RedisStore]:
    store = RedisStore(url, **{"timeout_s": PATIENT_S, **options})
    try:
        yield store
    finally:
        await store.aclose()
        if url.startswith("rediss"):
            await asyncio.sleep(0.1)  # what is below TLS is closed a few turns of the loop later


@pytest.fixture
async def store(redis_server: RedisServer) -> AsyncIterator[RedisStore]:
    redis_server.flush()
    async with opened(redis_server.url) as made:
        yield made


def held(record: CallRecord, tokens: int = 10) -> OpenHold:
    claims = tuple(Claim(one, Limits(1_000)) for one in ACCOUNTS)
    orphaned = replace(record, outcome=ORPHANED, accounts=ACCOUNTS, spent=Amount(1))
    return OpenHold(Hold(record.call_id, claims, Amount(tokens), Amount(1), 0, 5), orphaned)


def spent(record: CallRecord, tokens: int = 7) -> CallRecord:
    return replace(record, accounts=ACCOUNTS, spent=Amount(tokens), charge=CHARGE)


async def balance(store: RedisStore) -> list[tuple[Amount, Amount]]:
    return [(one.used, one.held) for one in await store.balances([Claim(key) for key in ACCOUNTS])]


async def until_it_works(work: Callable[[], Awaitable[object]], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            await work()
        except StoreUnavailable:
            assert time.monotonic() < deadline, "it does not come back"
            await asyncio.sleep(0.05)
        else:
            return


class Proxy:
    """A proxy that passes requests on, delays the replies, or breaks the connection instead."""

    def __init__(self, port: int, delay_s: float = 0.0, *, bytewise: bool = False) -> None:
        self._port = port
        self._delay_s = delay_s
        self._bytewise = bytewise
        self.loses_replies = False
        #: bytes to send after each reply
        self.tail = b""
        self._server: asyncio.Server | None = None
        self._tasks = set[asyncio.Task[None]]()
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.add(cast("asyncio.Task[None]", asyncio.current_task()))
        try:
            upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", self._port)
        except BaseException:  # gone, or all ends while one is still being opened
            writer.close()
            raise
        self._writers += [writer, upstream_writer]
        self._tasks |= {
            asyncio.create_task(self._pass_on(reader, upstream_writer)),
            asyncio.create_task(self._answer(upstream_reader, writer)),
        }

    def say(self, data: bytes) -> None:
        """Send an unexpected reply to all connections."""
        for writer in self._writers[::2]:
            writer.write(data)

    def end(self, *, is_reset: bool) -> None:
        """All connections, in good order or not."""
        for writer in self._writers[::2]:
            if is_reset:
                at_once = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
            writer.transport.abort()

    def go_silent(self) -> None:
        """Stop replying on open connections, not even at the level of TCP; new connections work."""
        for writer in self._writers[::2]:
            mute(writer.get_extra_info("socket"))

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while (data := await reader.read(65_536)) and not self.loses_replies:
                if self._bytewise:
                    for place in range(len(data)):
                        writer.write(data[place : place + 1])
                        await asyncio.sleep(0)
                else:
                    asyncio.get_running_loop().call_later(self._delay_s, writer.write, data + self.tail)
        if self.loses_replies:
            writer.close()

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


# --- servers that are unavailable -------------------------------------------------------------------------------------


async def test_a_frozen_server_is_said_to_be_unavailable_within_the_deadline_by_every_verb(
    start: StartServer, record: MakeRecord
) -> None:
    server = start()
    async with opened(server.url, timeout_s=TIMEOUT_S) as store:
        await until_it_works(store.ping)
        server.send_signal(signal.SIGSTOP)
        verbs: list[Callable[[], Awaitable[object]]] = [
            store.ping,
            lambda: store.settle(record()),
            lambda: store.reserve(held(record()), LEASE_S),
            lambda: store.extend("h", 1),
            lambda: store.renew({"h": 1}),
            lambda: store.overdue_holds(1),
            lambda: store.balances([Claim(KEY.account)]),
            lambda: store.override_limits(KEY.account, {"tokens": 1}),
            lambda: store.totals(KEY),
            lambda: store.session(KEY),
            lambda: store.remembered(KEY),
            lambda: store.update(KEY, lambda state: state),
            lambda: store.learned("k"),
            lambda: store.learn({"k": lambda _: b""}),
            lambda: store.sessions(None, 1, None, "recent"),
            lambda: store.calls(KEY, 1),
            lambda: store.call(None, "r"),
            lambda: store.reset(KEY),
            lambda: store.delete(KEY),
            lambda: store.expire(0),
            store.keys,
            lambda: store.missing_results(KEY, ["h"]),
            lambda: store.results_size(KEY),
            lambda: store.results(KEY, ["h"]),
            lambda: store.keep_results(KEY, {"h": "text"}, 9),
        ]
        with in_time(at_least=TIMEOUT_S * 0.9):
            results = await asyncio.gather(*(verb() for verb in verbs), return_exceptions=True)
        assert [type(result) for result in results] == [StoreUnavailable] * len(verbs)
        with pytest.raises(StoreUnavailable, match="no reply in time"):
            await store.ping()
        server.send_signal(signal.SIGCONT)
        await until_it_works(store.ping)


async def test_each_exchange_over_a_connection_has_the_whole_deadline_for_itself(start: StartServer) -> None:
    server = start()
    async with opened(server.url, timeout_s=1, connections=1) as store:
        await until_it_works(store.ping)
        await asyncio.sleep(0.5)
        server.send_signal(signal.SIGSTOP)
        with in_time(at_least=0.9), pytest.raises(StoreUnavailable, match="no reply in time"):
            await store.totals(KEY)
        server.send_signal(signal.SIGCONT)
        await until_it_works(store.ping)


async def test_request_queued_behind_a_frozen_server_ends_at_its_deadline(
    start: StartServer,
) -> None:
    server = start()
    async with opened(server.url, timeout_s=1, connections=1) as store:
        await until_it_works(store.ping)
        server.send_signal(signal.SIGSTOP)
        with in_time():  # one batch after the other would take half a minute
            results = await asyncio.gather(*(store.totals(KEY) for _ in range(4_000)), return_exceptions=True)
        assert all(isinstance(result, StoreUnavailable) for result in results)
        server.send_signal(signal.SIGCONT)


async def test_time_in_our_own_queue_is_not_counted_as_server_time(
    redis_server: RedisServer, record: MakeRecord
) -> None:
    redis_server.flush()
    async with Proxy(redis_server.port, 0.2) as proxy, opened(proxy.url, timeout_s=1.5, connections=1) as store:
        with in_time(at_least=1.6):
            await asyncio.gather(*(store.settle(spent(record())) for _ in range(1_100)))
        assert (await store.totals(KEY)).calls == 1_100


async def test_hold_taken_late_by_a_frozen_server_ends_with_its_settlement(
    start: StartServer, record: MakeRecord
) -> None:
    server = start()
    async with opened(server.url, timeout_s=TIMEOUT_S) as store:
        call = record()
        await until_it_works(store.ping)
        server.send_signal(signal.SIGSTOP)
        with pytest.raises(StoreUnavailable):
            await store.reserve(held(call), LEASE_S)
        server.send_signal(signal.SIGCONT)
        await until_it_works(lambda: store.settle(replace(call, charge=None)))
        await until_it_works(store.ping)
        assert await balance(store) == [(NOTHING, NOTHING)] * 2


@pytest.mark.parametrize("kind", ["redis_server", "redis_cluster"])
async def test_connections_to_each_server_are_few_however_much_is_asked_for(
    request: pytest.FixtureRequest, kind: str
) -> None:
    servers: RedisServer | RedisCluster = request.getfixturevalue(kind)
    nodes = servers.nodes if isinstance(servers, RedisCluster) else [servers]
    await eventually(lambda: not any(map(_clients, nodes)), "no connection is left of what was done before")
    async with opened(servers.url, connections=2) as store:
        await asyncio.gather(*(store.totals(SessionKey("alice", str(number))) for number in range(3_000)))
        connected = [_clients(node) for node in nodes]
        assert all(1 <= count <= 2 for count in connected), connected
    await eventually(lambda: not any(map(_clients, nodes)), "no connection is left")


def _clients(server: RedisServer) -> int:
    return server.cli("client", "list", "type", "normal").count("\n") - 1  # without the one that asks


async def test_a_server_that_was_killed_and_started_again_is_used_again(start: StartServer, record: MakeRecord) -> None:
    server = start()
    async with opened(server.url) as store:
        await store.settle(spent(record()))
        server.kill()
        with pytest.raises(StoreUnavailable, match=r"^The store redis://127.0.0.1:\d+ cannot be used: "):
            await store.totals(KEY)
        server.start()
        await store.ping()
        assert (await store.settle(spent(record()))).calls == 1


async def test_a_server_that_is_not_there_at_the_start_is_used_once_it_is(start: StartServer) -> None:
    server = start()
    server.kill()
    async with opened(server.url) as store:
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                await store.ping()
        server.start()
        await store.ping()


async def test_unknown_host_is_an_unavailable_store() -> None:
    async with opened("redis://no-such-host.invalid") as store:
        with pytest.raises(StoreUnavailable, match=r"redis://no-such-host\.invalid cannot be used"):
            await store.ping()


async def test_a_refused_connection_is_one_sentence() -> None:
    async with opened("redis://127.0.0.1:1") as store:
        with pytest.raises(StoreUnavailable, match=r"[^.]\. Try again shortly\.$"):
            await store.ping()


async def test_a_replica_is_unavailable_until_it_is_a_master(start: StartServer, record: MakeRecord) -> None:
    master, replica = start(), start()
    replica.cli("replicaof", "127.0.0.1", str(master.port))
    async with opened(replica.url) as store:
        for verb in (lambda: store.settle(record()), store.ping, lambda: store.update(KEY, lambda state: state)):
            with pytest.raises(StoreUnavailable, match=r"READONLY|LOADING|MASTERDOWN"):
                await verb()
        replica.cli("replicaof", "no", "one")
        await store.ping()
        assert (await store.settle(spent(record()))).calls == 1


async def test_a_server_that_is_no_master_any_more_is_left(start: StartServer) -> None:
    server = start()
    async with opened(server.url) as store:
        await asyncio.gather(*(store.totals(KEY) for _ in range(300)))
        server.cli("replicaof", "127.0.0.1", "1")
        with pytest.raises(StoreUnavailable, match="READONLY"):
            await store.ping()
        # Who is asked next is found out when something is asked next: sentinels may name another.
        await eventually(lambda: not _clients(server), "no connection is left")


def is_master(server: RedisServer) -> bool:
    """Return True if the server is a master. A client that asks while it becomes one is disconnected."""
    with contextlib.suppress(subprocess.CalledProcessError):
        return "role:master" in server.cli("info", "replication")
    return False


async def test_the_master_that_sentinels_name_is_used_also_after_a_failover(
    start: StartServer, record: MakeRecord, tmp_path: Path
) -> None:
    master, replica = start(), start()
    replica.cli("replicaof", "127.0.0.1", str(master.port))
    file = tmp_path / "sentinel.conf"
    file.write_text(f"sentinel monitor main 127.0.0.1 {master.port} 1\nsentinel down-after-milliseconds main 500\n")
    sentinel = RedisServer(tmp_path, config=file)
    try:
        async with opened(f"redis+sentinel://127.0.0.1:{sentinel.port}/main", timeout_s=5) as store:
            call = spent(record())
            await store.settle(call)
            assert master.cli("dbsize") != "0\n"
            await eventually(lambda: "slaves=1" in sentinel.cli("info"), "the sentinel knows the replica")
            await eventually(lambda: replica.cli("dbsize") == master.cli("dbsize"))
            sentinel.cli("sentinel", "failover", "main")
            await eventually(lambda: is_master(replica))
            master.kill()
            await until_it_works(lambda: store.settle(call))
            assert (await store.totals(KEY)).calls == 1
        async with opened(f"redis+sentinel://127.0.0.1:{sentinel.port}/other") as store:
            with pytest.raises(StoreUnavailable, match="No master found for 'other'"):
                await store.ping()
    finally:
        sentinel.kill()


async def test_a_master_that_sentinels_do_not_name_any_more_is_left_although_it_answers(
    start: StartServer, record: MakeRecord, tmp_path: Path
) -> None:
    frozen, promoted = start(), start()
    file = tmp_path / "sentinel.conf"
    file.write_text(f"sentinel monitor main 127.0.0.1 {frozen.port} 1\n")
    sentinel = RedisServer(tmp_path, config=file)
    try:
        async with opened(f"redis+sentinel://127.0.0.1:{sentinel.port}/main", timeout_s=5) as store:
            await asyncio.gather(*(store.totals(KEY) for _ in range(300)))
            assert _clients(frozen)
            # As after a failover that the old master has not noticed yet: sentinels inform it after 10 s.
            sentinel.cli("sentinel", "remove", "main")
            sentinel.cli("sentinel", "monitor", "main", "127.0.0.1", str(promoted.port), "1")
            await until_it_works(lambda: _settled_at(promoted, store, record))
            assert not _clients(frozen), "no connection is left that would lead there again"
    finally:
        sentinel.kill()


async def _settled_at(server: RedisServer, store: RedisStore, record: MakeRecord) -> None:
    await store.settle(spent(record()))
    if server.cli("dbsize") == "0\n":
        raise StoreUnavailable("it was written elsewhere")


# --- lost replies ---------------------------------------------------------------------------------------------------------


@pytest.fixture
async def proxied(redis_server: RedisServer) -> AsyncIterator[tuple[Proxy, RedisStore]]:
    redis_server.flush()
    async with Proxy(redis_server.port) as proxy, opened(proxy.url) as store:
        await store.ping()
        yield proxy, store


async def test_a_hold_whose_answer_was_lost_is_one_hold_when_it_is_asked_for_again(
    proxied: tuple[Proxy, RedisStore], record: MakeRecord
) -> None:
    proxy, store = proxied
    hold = held(record())
    for orphaned in (True, True, False):
        proxy.loses_replies = orphaned
        if orphaned:
            with pytest.raises(StoreUnavailable):
                await store.reserve(hold, LEASE_S)
    outcome = await store.reserve(hold, LEASE_S)
    assert isinstance(outcome, Granted)
    assert outcome.units == 5
    assert await balance(store) == [(NOTHING, Amount(15))] * 2


async def test_settlement_with_a_lost_reply_counts_once_when_repeated(
    proxied: tuple[Proxy, RedisStore], record: MakeRecord
) -> None:
    proxy, store = proxied
    call = record()
    await store.reserve(held(call), LEASE_S)
    proxy.loses_replies = True
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            await store.settle(spent(call))
    proxy.loses_replies = False
    assert await store.settle(spent(call)) == Totals().add(CHARGE)
    assert await balance(store) == [(Amount(7), NOTHING)] * 2


async def test_a_change_whose_answer_was_lost_is_said_to_be_unknown(proxied: tuple[Proxy, RedisStore]) -> None:
    proxy, store = proxied
    proxy.loses_replies = True
    with pytest.raises(StoreUnavailable):
        await store.update(KEY, lambda state: state.with_summary("a", "text"))
    proxy.loses_replies = False
    state = await store.update(KEY, lambda state: state.with_summary("b", "text"))
    assert "b" in state.summaries


async def test_unexpected_reply_is_given_to_no_request(proxied: tuple[Proxy, RedisStore], record: MakeRecord) -> None:
    proxy, store = proxied
    call = record()
    assert (await store.settle(spent(call))).calls == 1
    for stray in (b"*-1\r\n", b"$10\r\nnot yet", b"no reply at all\r\n"):
        proxy.say(stray)
        await asyncio.sleep(0.05)
        assert (await store.totals(KEY)).calls == 1
        proxy.tail = stray
        assert (await store.totals(KEY)).calls == 1
        proxy.tail = b""
        assert (await store.totals(KEY)).calls == 1
        assert [one.call_id for one in await store.calls(KEY, 10)] == [call.call_id]


@pytest.mark.parametrize("is_reset", [False, True])
async def test_ended_connection_is_replaced_without_an_error(
    proxied: tuple[Proxy, RedisStore], record: MakeRecord, is_reset: bool
) -> None:
    proxy, store = proxied
    await asyncio.gather(*(store.settle(spent(record())) for _ in range(300)))
    link = store._link
    assert isinstance(link, SingleLink)
    proxy.end(is_reset=is_reset)
    await eventually(lambda: not link._idle)
    assert (await store.settle(spent(record()))).calls == 301


@needs_linux
async def test_connections_that_a_firewall_has_forgotten_cost_one_call_and_not_one_for_each(
    redis_server: RedisServer, record: MakeRecord
) -> None:
    redis_server.flush()
    async with Proxy(redis_server.port) as proxy, opened(proxy.url, timeout_s=2.0) as store:
        await asyncio.gather(*(store.settle(spent(record())) for _ in range(600)))
        link = store._link
        assert isinstance(link, SingleLink)
        await eventually(lambda: len(link._idle) > 1, "there are several")
        proxy.go_silent()
        with pytest.raises(StoreUnavailable, match="no reply in time"):
            await store.settle(spent(record()))
        assert (await store.settle(spent(record()))).calls == 601


async def test_connections_are_asked_after_by_the_system(proxied: tuple[Proxy, RedisStore], record: MakeRecord) -> None:
    link = proxied[1]._link
    assert isinstance(link, SingleLink)
    [wire] = link._idle
    sock = wire._transport.get_extra_info("socket")
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == 4


async def test_unsendable_command_raises_and_blocks_no_other(store: RedisStore) -> None:
    for _ in range(10):  # more than there are connections
        with pytest.raises(UnicodeEncodeError):
            await store.learned("\ud83d")
    with in_time():
        assert await store.learned("a") is None


async def test_a_reply_may_come_byte_by_byte(redis_server: RedisServer, record: MakeRecord) -> None:
    redis_server.flush()
    async with Proxy(redis_server.port, bytewise=True) as proxy, opened(proxy.url) as store:
        calls = [record() for _ in range(3)]
        await asyncio.gather(*(store.settle(spent(call)) for call in calls))
        found, totals = await asyncio.gather(store.calls(KEY, 10), store.totals(KEY))
        assert {one.call_id for one in found} == {one.call_id for one in calls}
        assert totals.calls == 3


# --- scripts, passwords, TLS ----------------------------------------------------------------------------------------------


async def test_scripts_are_loaded_again_after_the_server_dropped_them(
    store: RedisStore, redis_server: RedisServer, record: MakeRecord
) -> None:
    for _ in range(2):
        redis_server.cli("script", "flush")
        calls = [record() for _ in range(20)]
        await asyncio.gather(*(store.reserve(held(call), LEASE_S) for call in calls))
        redis_server.cli("script", "flush")
        await asyncio.gather(*(store.settle(spent(call)) for call in calls))
    assert await balance(store) == [(Amount(280), NOTHING)] * 2


async def test_balances_are_read_after_a_settlement_whose_script_was_loaded_again(
    store: RedisStore, redis_server: RedisServer, record: MakeRecord
) -> None:
    call, claims = record(), [Claim(key, Limits(1_000)) for key in ACCOUNTS]
    await store.reserve(held(call), LEASE_S)
    redis_server.cli("script", "flush")
    await store.balances(claims)
    closing = await store.settle_and_read(spent(call), None, claims)
    assert [(one.used, one.held) for one in closing.balances or ()] == [(Amount(7), NOTHING)] * 2


@pytest.mark.parametrize("user", ["", "gateway"])
async def test_a_password_is_used_and_never_said(start: StartServer, user: str) -> None:
    server = start("--requirepass", "s3cr3t-p@ss")
    cli(
        "-p",
        str(server.port),
        "-a",
        "s3cr3t-p@ss",
        "--no-auth-warning",
        "acl",
        "setuser",
        "gateway",
        "on",
        ">s3cr3t-p@ss",
        "~*",
        "+@all",
    )
    place = server.url.removeprefix("redis://")
    async with opened(f"redis://{user}:s3cr3t-p%40ss@{place}") as store:
        await store.ping()
    async with opened(f"redis://{user}:wr0ng-p%40ss@{place}") as store:
        with pytest.raises(StoreUnavailable, match="WRONGPASS") as caught:
            await store.ping()
        assert "wr0ng" not in f"{caught.value.message} {caught.value!r} {store._link!r} {vars(store._link)}"
    async with opened(server.url) as store:
        with pytest.raises(StoreUnavailable, match="NOAUTH"):
            await store.ping()


async def test_overdue_holds_that_the_server_has_lost_keep_no_others_from_being_found(
    store: RedisStore, redis_server: RedisServer, record: MakeRecord
) -> None:
    orphaned, left = record(), record()
    for one in (orphaned, left):
        assert isinstance(await store.reserve(held(one), 0.0), Granted)
    redis_server.cli("del", Keys("gateway:").hold(orphaned.call_id))
    assert await store.overdue_holds(1) == []
    assert [one.hold.id for one in await store.overdue_holds(1)] == [left.call_id]


async def test_a_database_of_its_number_is_used(redis_server: RedisServer) -> None:
    redis_server.flush()
    async with opened(f"{redis_server.url}/3") as store:
        await store.ping()
    assert "db3:keys=1" in redis_server.cli("info", "keyspace")
    assert "db0" not in redis_server.cli("info", "keyspace")


@pytest.fixture
async def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A certificate for localhost that signed itself, and its key."""
    key, made = tmp_path / "key.pem", tmp_path / "cert.pem"
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    words += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(made)]
    process = await asyncio.create_subprocess_exec(*words, stderr=asyncio.subprocess.DEVNULL)
    assert await process.wait() == 0
    return made, key


def start_tls(
    start: StartServer, certificate: tuple[Path, Path], clients: str, *options: str
) -> tuple[RedisServer, int]:
    port = free_port()
    words = ["--tls-port", str(port), "--tls-cert-file", str(certificate[0]), "--tls-key-file", str(certificate[1])]
    return start(*words, "--tls-ca-cert-file", str(certificate[0]), "--tls-auth-clients", clients, *options), port


async def test_a_server_is_spoken_to_over_tls_if_its_certificate_is_good(
    start: StartServer, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, port = start_tls(start, certificate, "no")
    trusted = f"ssl_ca_certs={certificate[0]}"
    for url, fault in (
        (f"rediss://localhost:{port}", "certificate"),
        (f"rediss://127.0.0.1:{port}?{trusted}", "certificate"),
        (f"rediss://localhost:{port}?ssl_ca_certs=/nowhere.pem", "No such file"),
    ):
        async with opened(url) as store:
            with pytest.raises(StoreUnavailable, match=fault):
                await store.ping()
    assert server.cli("dbsize") == "0\n"
    for url in (
        f"rediss://localhost:{port}?{trusted}",
        f"rediss://127.0.0.1:{port}?{trusted}&ssl_check_hostname=false",
    ):
        async with opened(url) as store:
            await store.ping()
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    async with opened(f"rediss://localhost:{port}") as store:
        await store.ping()
    assert server.cli("dbsize") == "1\n"


async def test_a_server_that_wants_a_certificate_is_shown_one(
    start: StartServer, certificate: tuple[Path, Path]
) -> None:
    _, port = start_tls(start, certificate, "yes")
    url = f"rediss://localhost:{port}?ssl_ca_certs={certificate[0]}"
    async with opened(url) as store:
        with pytest.raises(StoreUnavailable):
            await store.ping()
    async with opened(f"{url}&ssl_certfile={certificate[0]}&ssl_keyfile={certificate[1]}") as store:
        await store.ping()


async def test_a_cluster_is_spoken_to_over_tls_with_a_password(
    start: StartServer, certificate: tuple[Path, Path]
) -> None:
    server, port = start_tls(start, certificate, "yes", "--cluster-enabled", "yes", "--tls-cluster", "yes")
    server.cli("cluster", "addslotsrange", "0", "16383")
    await eventually(lambda: "cluster_state:ok" in server.cli("cluster", "info"))
    server.cli("config", "set", "requirepass", "s3cr3t")
    own = f"ssl_certfile={certificate[0]}&ssl_keyfile={certificate[1]}&ssl_check_hostname=false"
    url = f"rediss+cluster://:s3cr3t@localhost:{port}?ssl_ca_certs={certificate[0]}&{own}"
    async with opened(url) as store:
        await asyncio.gather(*(store.totals(SessionKey("alice", str(number))) for number in range(20)), store.ping())
    async with opened(url.replace("s3cr3t", "wr0ng")) as store:
        with pytest.raises(StoreUnavailable) as caught:
            await store.ping()
        assert "wr0ng" not in caught.value.message


async def test_sentinels_have_a_password_of_their_own(start: StartServer, tmp_path: Path) -> None:
    master = start("--requirepass", "m4ster")
    file = tmp_path / "sentinel.conf"
    file.write_text(
        f"requirepass s3ntinel\nsentinel monitor main 127.0.0.1 {master.port} 1\nsentinel auth-pass main m4ster\n"
    )
    sentinel = RedisServer(tmp_path, config=file)
    place = f"127.0.0.1:{sentinel.port}/main"
    try:
        async with opened(f"redis+sentinel://:m4ster@{place}?sentinel_password=s3ntinel") as store:
            await store.ping()
        for url in (f"redis+sentinel://:m4ster@{place}", f"redis+sentinel://:m4ster@{place}?sentinel_password=wr0ng"):
            async with opened(url) as store:
                with pytest.raises(StoreUnavailable, match="No master found") as caught:
                    await store.ping()
                assert not any(word in caught.value.message for word in ("m4ster", "wr0ng"))
    finally:
        sentinel.kill()


async def test_silent_sentinels_do_not_block_working_ones(start: StartServer, tmp_path: Path) -> None:
    master = start()
    sentinels = []
    for number in range(2):
        file = tmp_path / f"sentinel-{number}.conf"
        file.write_text(f"sentinel monitor main 127.0.0.1 {master.port} 1\n")
        sentinels.append(RedisServer(tmp_path, config=file))
    places = ",".join(f"127.0.0.1:{one.port}" for one in sentinels)
    try:
        sentinels[0].send_signal(signal.SIGSTOP)
        async with opened(f"redis+sentinel://{places}/main", timeout_s=4) as store:
            await store.ping()
    finally:
        for one in sentinels:
            one.kill()


# --- settings of servers --------------------------------------------------------------------------------------------------


async def test_settings_that_lose_data_are_logged_once(start: StartServer, caplog: pytest.LogCaptureFixture) -> None:
    server = start("--maxmemory-policy", "volatile-lru")
    with caplog.at_level(logging.WARNING, "gateway"):
        async with opened(server.url) as store:
            await store.overdue_holds(1)
            await store.ping()
    assert [message.removeprefix(f"the store {server.url}: ").partition(":")[0] for message in caplog.messages] == [
        "maxmemory-policy is volatile-lru",
        "appendonly is off",
    ]


async def test_good_or_hidden_settings_are_not_logged(start: StartServer, caplog: pytest.LogCaptureFixture) -> None:
    server = start()
    server.cli("config", "set", "appendonly", "yes")
    silent = start()
    silent.cli("acl", "setuser", "default", "-info")
    with caplog.at_level(logging.WARNING, "gateway"):
        for one in (server, silent):
            async with opened(one.url) as store:
                await store.ping()
    assert caplog.messages == []


async def test_a_text_that_cannot_be_found_any_more_is_found_again_without_being_sent(start: StartServer) -> None:
    server = start()
    async with opened(server.url) as store:
        await store.keep_results(KEY, {"h": "text"}, 4)
        assert await store.missing_results(KEY, ["h"]) == []
        for name in server.cli("keys", "*x:*").split():
            server.cli("del", name)
        assert await store.result(KEY.namespace, "h") is None
        assert await store.missing_results(KEY, ["h", "other"]) == ["other"]
        assert await store.result(KEY.namespace, "h") == "text"
        assert await store.result(None, "h") == "text"


# --- what is kept ---------------------------------------------------------------------------------------------------------


async def test_nothing_but_accounts_and_names_of_client_keys_stays_for_ever(
    redis_server: RedisServer, record: MakeRecord
) -> None:
    redis_server.flush()
    async with opened(redis_server.url, retention=Retention(sessions_s=100)) as store:
        call = record(request_id="r")
        rate = Claim(AccountKey("rate", "alice"), Limits(calls=9, window=60))
        hold = held(call)
        await store.reserve(replace(hold, hold=replace(hold.hold, claims=(*hold.hold.claims, rate))), LEASE_S)
        await store.settle(spent(call))
        await store.settle(spent(record(None)))
        await store.update(KEY, lambda state: state.with_summary("a", "b"))
        await store.keep_results(KEY, {"h": "text"}, 9)
        await store.keep_results(KEY, {"refused": "text"}, 0)
        await store.missing_results(KEY, ["h", "never"])
        await store.override_limits(KEY.account, {"tokens": 5})
        await store.learn({"k": lambda _: b"x"})
        await store.ping()
    lasting = {name for name in redis_server.cli("keys", "*").split() if redis_server.cli("pttl", name) == "-1\n"}
    # ... and a list of sessions that never called, of which each worker takes out what is old.
    assert lasting == {"gateway:{alice}:key:", "gateway:alone"}


async def test_all_that_a_session_has_ends_together_and_is_prolonged_together(
    redis_server: RedisServer, record: MakeRecord
) -> None:
    redis_server.flush()
    day, hour = 86_400, 3_600

    def ends_in() -> dict[str, float]:
        names = redis_server.cli("keys", "*").split()
        return {name: float(redis_server.cli("pttl", name)) / 1000 for name in names if name != "gateway:alone"}

    async with opened(redis_server.url, retention=Retention(sessions_s=day)) as store:
        await store.settle(spent(record(tools=())))
        # What a later call makes, while the rest has its end.
        call = spent(record(tools=("a",)))
        await store.settle(call, ending(call))
        assert all(left > 0 for name, left in ends_in().items() if name != "gateway:{alice}:key:")
        orphaned = replace(spent(record()), outcome=ORPHANED)
        await store.settle(orphaned)
        seen = ends_in()
        assert {name.rpartition(":")[2] for name in seen if "{alice/s}" in name} == set("icslautw")
        kept = {name: left for name, left in seen.items() if name != "gateway:{alice}:key:"}
        assert min(kept.values()) > day + 2 * hour
        for name in kept:
            redis_server.cli("pexpire", name, str(int((day + hour) * 1000)))
        await store.settle(spent(record(tools=("a",))))
        # The list of the latest is prolonged now and again; where a call is to be found stays for as long as the call.
        apart = ("gateway:{latest}", "gateway:p:")
        prolonged = {name: left for name, left in ends_in().items() if name in kept and not name.startswith(apart)}
        assert len(prolonged) == 8 + 9
        assert min(prolonged.values()) > day + 2 * hour


async def test_parents_are_kept_while_other_sessions_are_charged_to_them(
    redis_server: RedisServer, record: MakeRecord
) -> None:
    redis_server.flush()
    names = ("gateway:{alice/s}:a", "gateway:{alice/s}:t")
    async with opened(redis_server.url, retention=Retention(sessions_s=86_400)) as store:
        await store.update(KEY, lambda state: state.with_parent("parent"))
        await store.settle(spent(record()))
        for name in names:
            redis_server.cli("pexpire", name, "10000000")
        await store.settle(spent(record("child")))
    assert [int(redis_server.cli("pttl", name)) > 86_400_000 for name in names] == [True, True]


async def test_records_are_bounded_and_totals_are_not(redis_server: RedisServer, record: MakeRecord) -> None:
    redis_server.flush()
    calls = [spent(record(at=1_000.0 + number)) for number in range(CALLS_PER_SESSION + 5)]
    async with opened(redis_server.url, now=lambda: 2_000.0) as store:
        # The last ones are offered late: what began first is what goes.
        await asyncio.gather(*(store.settle(call) for call in calls[5:]))
        for call in reversed(calls[:5]):
            await store.settle(call)
        found = await store.calls(KEY, 2 * CALLS_PER_SESSION)
        assert [call.call_id for call in found] == [call.call_id for call in calls[:4:-1]]
        for call in calls[:5]:
            assert await store.call(None, call.call_id) is None
        assert (await store.totals(KEY)).calls == len(calls)


async def test_settled_calls_beyond_the_limit_leave_no_data_behind(
    redis_server: RedisServer, record: MakeRecord
) -> None:
    redis_server.flush()
    at = [1_000.0]
    async with opened(redis_server.url, retention=Retention(sessions_s=1_000), now=lambda: at[0]) as store:
        orphaned = held(record(at=at[0])).as_orphaned()
        calls = [orphaned, *(spent(record(at=at[0] + 1 + number / 100)) for number in range(CALLS_PER_SESSION + 4))]
        await asyncio.gather(*(store.settle(call) for call in calls))
        ids, records, known_lost = Keys("gateway:").calls(tag_of(KEY.namespace, KEY.id))
        assert int(redis_server.cli("zcard", ids)) == len(calls)
        at[0] = 100_000.0
        await store.settle(spent(record(at=at[0])))
        assert int(redis_server.cli("zcard", ids)) == int(redis_server.cli("hlen", records)) < CALLS_PER_SESSION
        assert int(redis_server.cli("hlen", known_lost)) == 0
        assert (await store.totals(KEY)).calls == len(calls) + 1


@pytest.mark.parametrize("kind", ["redis_server", "redis_cluster"])
async def test_so_many_calls_are_found_by_a_name_that_they_share_and_no_more_are_noted(
    kind: str, request: pytest.FixtureRequest, record: MakeRecord
) -> None:
    server: RedisServer | RedisCluster = request.getfixturevalue(kind)
    server.flush()
    node = server if isinstance(server, RedisServer) else server.nodes[0]
    async with opened(server.url) as store:
        calls = [spent(record(request_id="r", at=1_000.0 + number)) for number in range(40)]
        for call in calls:
            await store.settle(call)
        assert await store.call(None, "r") == calls[-1]
        for scope in (None, KEY.namespace):
            assert node.cli("-c", "zcard", Keys("gateway:").named(scope, "r")) == "32\n"


async def test_repeated_call_counts_once_although_its_record_expired(
    redis_server: RedisServer, record: MakeRecord
) -> None:
    redis_server.flush()
    now = time.time()
    async with opened(redis_server.url) as store:
        calls = [spent(record(at=now + number)) for number in range(CALLS_PER_SESSION + 5)]
        await asyncio.gather(*(store.settle(call) for call in calls))
        assert await store.call(None, calls[0].call_id) is None
        assert await store.settle(calls[0]) == await store.totals(KEY)
        assert (await store.totals(KEY)).calls == len(calls)


async def test_charge_of_an_orphaned_call_by_an_older_version_is_reversed(
    store: RedisStore, redis_server: RedisServer, record: MakeRecord
) -> None:
    opened, keys = held(record()), Keys("gateway:")
    await store.settle(opened.as_orphaned())
    tag = tag_of(KEY.namespace, KEY.id)
    as_it_was = """
        local was = cmsgpack.unpack(redis.call('HGET', KEYS[1], ARGV[1]))
        redis.call('HSET', KEYS[1], ARGV[1], cmsgpack.pack({ was[1], was[2] }))
        redis.call('HDEL', KEYS[2], 'e')
        redis.call('HDEL', KEYS[3], 'e')
        return #was
    """
    names = (keys.calls(tag)[2], *map(keys.account, ACCOUNTS))
    assert redis_server.cli("eval", as_it_was, str(len(names)), *names, opened.hold.id) == "6\n"
    await store.settle(replace(spent(opened.orphaned), outcome="ok"))
    assert await balance(store) == [(Amount(7), NOTHING)] * 2


async def test_of_an_account_nothing_is_written_but_what_has_changed(
    store: RedisStore, redis_server: RedisServer, record: MakeRecord
) -> None:
    call, name = record(), Keys("gateway:").account(KEY.account)
    await store.reserve(held(call), LEASE_S)
    assert set(redis_server.cli("hkeys", name).split()) == {"at", "h1"}
    await store.settle(spent(call))
    redis_server.cli("hset", name, "u2", "1.0")
    await store.reserve(held(record()), LEASE_S)
    assert set(redis_server.cli("hkeys", name).split()) == {"at", "h1", "u1", "u2"}
    assert redis_server.cli("hget", name, "u2").strip() == "1.0"
    assert await balance(store) == [(Amount(7, 1), Amount(15)), (Amount(7), Amount(15))]


async def test_gateways_with_different_prefixes_share_a_server_and_nothing_else(
    store: RedisStore, redis_server: RedisServer, record: MakeRecord
) -> None:
    call = spent(record(request_id="r"))
    await store.settle(call)
    await store.update(KEY, lambda state: state.with_summary("a", "b"))
    async with opened(redis_server.url, prefix="other:") as other:
        assert await other.totals(KEY) == Totals()
        assert (await other.remembered(KEY)).state == SessionState()
        assert await other.call(None, "r") is None
        assert (await other.sessions(None, 10, None, "recent")).sessions == []
        await other.settle(call)
        assert await other.delete(KEY)
    assert (await store.totals(KEY)).calls == 1


async def test_a_long_page_of_sessions_is_read_in_parts(
    store: RedisStore, record: MakeRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls of the same worker have their turn between two of them."""
    names = {f"s{number:04}" for number in range(450)}
    await asyncio.gather(*(store.settle(spent(record(name))) for name in names))
    sizes, call = list[int](), store._link.call

    async def counted(*commands: Command) -> list[Any]:
        sizes.append(len(commands))
        return await call(*commands)

    monkeypatch.setattr(store._link, "call", counted)
    first = await store.sessions(None, 400, None, "recent")
    second = await store.sessions(None, 400, first.cursor, "recent")
    assert (len(first.sessions), len(second.sessions), second.cursor) == (400, 50, None)
    assert {view.key.id for view in (*first.sessions, *second.sessions)} == names
    assert max(sizes) <= 600


async def test_deleted_session_is_removed_from_lists_when_they_are_read(
    store: RedisStore, redis_server: RedisServer, record: MakeRecord
) -> None:
    for name in ("a", "gone", "b"):
        await store.settle(spent(record(name)))
    redis_server.cli("del", "gateway:{alice/gone}:s")
    for namespace in ("alice", None):
        page = await store.sessions(namespace, 2, None, "recent")
        assert ([view.key.id for view in page.sessions], page.cursor) == (["b", "a"], None)
        assert (await store.sessions(namespace, 1, None, "recent")).cursor is not None
    assert redis_server.cli("zcard", "gateway:recent") == "2\n"


# --- several workers ------------------------------------------------------------------------------------------------------


async def test_workers_share_holds_settlements_and_changes(
    store: RedisStore, redis_server: RedisServer, record: MakeRecord
) -> None:
    async with opened(redis_server.url) as other:
        stores = [store, other]
        calls = [record() for _ in range(40)]
        await asyncio.gather(*(stores[n % 2].reserve(held(call), LEASE_S) for n, call in enumerate(calls)))
        assert await balance(other) == [(NOTHING, Amount(600))] * 2
        await asyncio.gather(*(stores[(n + 1) % 2].extend(call.call_id, 1) for n, call in enumerate(calls)))
        await asyncio.gather(*(one.settle(spent(call)) for call in calls for one in stores))
        assert await balance(store) == [(Amount(280), NOTHING)] * 2
        assert (await store.totals(KEY)).calls == 40
        await asyncio.gather(*(stores[n % 2].update(KEY, counts) for n in range(60)))
        await asyncio.gather(*(stores[n % 2].learn({"k": lambda known: (known or b"") + b"x"}) for n in range(60)))
    assert number_in((await store.remembered(KEY)).state.steps) == 60
    assert await store.learned("k") == b"x" * 60


async def test_calls_that_end_on_two_workers_each_go_on_from_the_one_before(
    store: RedisStore, redis_server: RedisServer, record: MakeRecord
) -> None:
    async with opened(redis_server.url) as other:
        stores, calls = [store, other], [spent(record()) for _ in range(60)]
        await asyncio.gather(*(stores[n % 2].settle(call, ending(call)) for n, call in enumerate(calls)))
        # Each settled by both workers, as if one had not heard.
        await asyncio.gather(*(one.settle(call, ending(call)) for call in calls for one in stores))
        numbers = [int(call.notes["number"]) for call in await store.calls(KEY, 100)]
    assert sorted(numbers) == list(range(1, 61)), "none twice, none skipped"
    assert number_in((await store.remembered(KEY)).state.steps) == 60
    assert (await store.totals(KEY)).calls == 60


async def test_a_state_that_was_deleted_comes_back_by_no_worker_that_still_knows_it(
    store: RedisStore, redis_server: RedisServer, record: MakeRecord
) -> None:
    async with opened(redis_server.url) as other:
        await store.update(KEY, lambda state: state.with_summary("a", "text"))
        await other.delete(KEY)
        await other.update(KEY, counts)
        call = spent(record())
        await store.settle(call, ending(call))
        assert (await other.remembered(KEY)).state == counts(counts(SessionState()))


async def test_a_state_of_an_older_version_that_counts_from_one_again_is_no_guess(
    redis_server: RedisServer, store: RedisStore, record: MakeRecord
) -> None:
    name, one = f"gateway:{{{tag_of('alice', 's')}}}:t", record()
    redis_server.cli("hset", name, "v", "1", "s", '{"summaries": {"deleted": "x"}}', "at", "1")
    assert list((await store.open_call(KEY, [], with_totals=False)).remembered.state.summaries) == ["deleted"]
    await store.delete(KEY)
    redis_server.cli("hset", name, "v", "1", "s", '{"summaries": {"new": "y"}}', "at", "1")
    await store.settle(one, ending(one))
    state = (await store.remembered(KEY)).state
    assert (list(state.summaries), number_in(state.steps)) == (["new"], 1)


async def test_a_change_that_its_server_lost_is_no_guess_either_where_its_clock_was_ahead(
    redis_server: RedisServer, record: MakeRecord
) -> None:
    redis_server.flush()
    ahead, one = [3600.0], record()
    name = f"gateway:{{{tag_of('alice', 's')}}}:t"
    async with (
        opened(redis_server.url, ahead_s=lambda: ahead[0]) as mine,
        opened(redis_server.url, ahead_s=lambda: ahead[0]) as other,
    ):
        await mine.update(KEY, lambda state: state.with_summary("old", "a"))
        version, value = redis_server.cli("hmget", name, "v", "s").split("\n", 1)
        ahead[0] = 0.0
        await mine.update(KEY, lambda state: state.with_summary("lost", "b"))
        redis_server.cli("hset", name, "v", version, "s", value.strip())
        await other.update(KEY, lambda state: state.with_summary("kept", "c"))
        await mine.settle(one, ending(one))
        state = (await other.remembered(KEY)).state
        assert (list(state.summaries), number_in(state.steps)) == (["old", "kept"], 1)


#: Brings the end of everything that ends nearer, by milliseconds. One script, because a process for each key takes
#: five seconds.
PASS_TIME = """
for _, name in ipairs(redis.call("KEYS", "*")) do
    local left = redis.call("PTTL", name)
    if left > 0 then redis.call("PEXPIRE", name, left - tonumber(ARGV[1])) end
end
"""


async def test_all_that_a_session_has_stays_where_sessions_are_kept_for_less_long_than_before(
    redis_server: RedisServer, record: MakeRecord
) -> None:
    redis_server.flush()
    async with opened(redis_server.url, retention=Retention(sessions_s=30 * 86_400)) as before:
        await before.settle(record())
        await before.settle(record("quiet"))
    async with opened(redis_server.url, retention=Retention(sessions_s=86_400)) as store:
        await store.keep_results(KEY, {"h": "a text"}, 10**6)
        await store.settle(record("new"))
        for hour in range(2, 31, 2):
            redis_server.cli("eval", PASS_TIME, "0", "7200000")
            await store.settle(record())
            if hour == 24:
                await store.settle(record("quiet"))
        assert await store.results(KEY, ["h"]) == {"h": "a text"}
        listed = {view.key.id for view in (await store.sessions("alice", 10, None, "recent")).sessions}
        assert listed == {"s", "quiet"}


class _Beside:
    """A link to the server of a store, with another worker that changes the session's state."""

    def __init__(self, store: RedisStore) -> None:
        self.link = store._link
        made: Any = store
        made._link = made._ledger._link = made._updates._link = self

    async def overtake(self) -> None:
        await self.link.call(("HINCRBY", "gateway:{alice/s}:t", "v", 1))

    async def everywhere(self, *commands: Command) -> list[list[Any]]:
        return await self.link.everywhere(*commands)

    async def aclose(self) -> None:
        await self.link.aclose()


async def test_a_state_that_others_change_each_time_is_a_conflict(store: RedisStore, record: MakeRecord) -> None:
    class Contended(_Beside):
        """Another worker is always slightly faster."""

        async def call(self, *commands: Command) -> list[Any]:
            if commands[0][0] == "EVALSHA":
                await self.overtake()
            return await self.link.call(*commands)

    await store.update(KEY, counts)
    Contended(store)
    with pytest.raises(StoreConflict, match='session "s"'):
        await store.update(KEY, counts)
    one = spent(record())
    with pytest.raises(StoreConflict, match='session "s"'):
        await store.settle(one, ending(one))
    assert await store.calls(KEY, 10) == [], "nothing was written"
    assert await store.settle(one) == await store.totals(KEY)


async def test_calls_that_wait_behind_a_change_wait_for_a_frozen_server_together(
    start: StartServer, record: MakeRecord
) -> None:
    server = start()
    async with opened(server.url, timeout_s=TIMEOUT_S) as store:
        await until_it_works(store.ping)
        await store.update(KEY, counts)
        server.send_signal(signal.SIGSTOP)
        change = asyncio.create_task(store.update(KEY, counts))
        await asyncio.sleep(0)
        calls = [spent(record()) for _ in range(40)]
        began = time.monotonic()
        ends = asyncio.gather(*(store.settle(one, ending(one)) for one in calls), return_exceptions=True)
        results = [*await ends, *await asyncio.gather(change, return_exceptions=True)]
        took = time.monotonic() - began
        server.send_signal(signal.SIGCONT)
        assert {type(one) for one in results} == {StoreUnavailable}
        assert took < len(calls) * TIMEOUT_S / 4
        await until_it_works(store.ping)
        for one in calls:
            await store.settle(one, ending(one))
        assert (await store.totals(KEY)).calls == len(calls)


async def test_a_change_is_made_of_what_others_made_while_it_paused(store: RedisStore, record: MakeRecord) -> None:
    class Overtaken(_Beside):
        """Another worker changes the state right after each try, but not during the next one."""

        tries = 0

        async def call(self, *commands: Command) -> list[Any]:
            if commands[0][0] != "EVALSHA":
                return await self.link.call(*commands)
            self.tries += 1
            if self.tries == 1:
                await self.overtake()
            answer = await self.link.call(*commands)
            await self.overtake()
            return answer

    await store.update(KEY, counts)
    overtaken = Overtaken(store)
    await store.update(KEY, counts)
    assert overtaken.tries == 3, "of what was seen last, of what the server has then, and after a pause"
    overtaken.tries, one = 0, spent(record())
    await store.settle(one, ending(one))
    assert overtaken.tries <= 4
    assert (await store.remembered(KEY)).state == counts(counts(counts(SessionState())))


async def test_changes_that_wait_for_one_another_are_written_together() -> None:
    batches: list[list[int]] = []

    async def write(_: str, works: Any) -> list[int]:
        batches.append(list(works))
        await asyncio.sleep(0.01)
        if 99 in works:
            raise StoreUnavailable("away")
        return [work * 2 for work in works]

    combiner = WriteCombiner[str, int](write)
    results = await asyncio.gather(*(combiner.add("k", number) for number in range(64)), combiner.add("other", 7))
    assert results == [*(number * 2 for number in range(64)), 14]
    assert [len(batch) for batch in batches] == [64, 1]
    first = asyncio.create_task(combiner.add("k", 1))
    await asyncio.sleep(0.005)
    failed = await asyncio.gather(combiner.add("k", 99), combiner.add("k", 2), return_exceptions=True)
    assert [type(one) for one in failed] == [StoreUnavailable] * 2
    assert (await first, await combiner.add("k", 3)) == (2, 6)
    await combiner.drain()


async def test_what_is_under_way_when_the_store_closes_is_written(
    store: RedisStore, redis_server: RedisServer, record: MakeRecord
) -> None:
    other = RedisStore(redis_server.url, timeout_s=PATIENT_S)
    tasks = [asyncio.create_task(other.settle(spent(record()))) for _ in range(300)]
    changes = [asyncio.create_task(other.update(KEY, counts)) for _ in range(5)]
    await asyncio.sleep(0)
    await other.aclose()
    await asyncio.gather(*tasks, *changes)
    assert (await store.totals(KEY)).calls == 300
    assert number_in((await store.remembered(KEY)).state.steps) == 5


# --- configured -----------------------------------------------------------------------------------------------------------


async def test_the_store_of_the_configuration_is_opened_with_its_deadline(redis_server: RedisServer) -> None:
    redis_server.flush()
    settings = Settings.model_validate({"store": {"url": redis_server.url, "timeout_ms": 4_000}})
    made = open_store(settings)
    assert isinstance(made, RedisStore)
    await made.ping()
    await made.aclose()


def test_redis_client_is_not_loaded_for_other_stores() -> None:
    code = (
        "import sys, gateway.app.resources; sys.exit('redis' in sys.modules or 'gateway.stores.redis' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("kind", ["redis_server", "redis_cluster"])
async def test_lost_account_does_not_reset_its_budget(
    request: pytest.FixtureRequest, record: MakeRecord, kind: str
) -> None:
    """As by an eviction. What is held is lost with it; what was used is known from the totals."""
    servers: RedisServer | RedisCluster = request.getfixturevalue(kind)
    servers.flush()
    limit = Claim(KEY.account, Limits(tokens=40))
    charge = Charge(Usage.of(10, 5), "provider", Decimal("0.0000025"))
    async with opened(servers.url) as store:
        for _ in range(2):
            await store.settle(record("s", accounts=ACCOUNTS, spent=Amount(15, 2_500, 1), charge=charge))
        name = Keys("gateway:").account(KEY.account)
        await store._link.call(("DEL", name))
        (balance,) = await store.balances([limit])
        assert (balance.used, balance.held) == (Amount(30, 5_000, 2), NOTHING)
        orphaned = record("s", outcome=ORPHANED, accounts=(KEY.account,), spent=Amount(20), charge=charge)
        hold = Hold(orphaned.call_id, (limit,), Amount(20))
        assert not isinstance(await store.reserve(OpenHold(hold, orphaned), LEASE_S), Granted)
        await store.settle(record("s", accounts=ACCOUNTS, spent=Amount(15, 2_500, 1), charge=charge))
        (balance,) = await store.balances([limit])
        assert balance.used == Amount(45, 7_500, 3)
        for decided in (True, False):
            await store._link.call(("DEL", name))
            await store.override_limits(KEY.account, {"tokens": 70} if decided else None)
            (balance,) = await store.balances([limit])
            assert balance.used == Amount(45, 7_500, 3), "also where its limits are set then"
            assert balance.limits.tokens == (70 if decided else 40)
        assert await store.reset(KEY)
        await store._link.call(("DEL", name))
        (balance,) = await store.balances([limit])
        assert balance.used == NOTHING, "a reset begins anew"


async def test_calls_of_a_deleted_session_are_passed_over_in_few_exchanges(
    redis_server: RedisServer, store: RedisStore, record: MakeRecord
) -> None:
    for number in range(300):
        await store.settle(record(at=1_000.0 + number))
    assert await store.delete(KEY)
    assert await store.calls(KEY, 1) == []
    new = record(at=2_000.0)
    await store.settle(new)

    def looked() -> int:
        told = redis_server.cli("info", "commandstats")
        return sum(
            int(line.split("calls=")[1].split(",")[0]) for line in told.splitlines() if "zrevrangebylex:" in line
        )

    before = looked()
    assert [call.call_id for call in await store.calls(KEY, 20)] == [new.call_id]
    assert looked() - before == 1


@pytest.mark.parametrize("kind", ["redis_server", "redis_cluster"])
async def test_lost_session_differs_from_new_deleted_and_expired_ones(
    request: pytest.FixtureRequest, record: MakeRecord, kind: str
) -> None:
    servers: RedisServer | RedisCluster = request.getfixturevalue(kind)
    servers.flush()
    charge = Charge(Usage.of(10, 5), "provider", Decimal("0.0000025"))
    limit, keys = Claim(KEY.account, Limits(tokens=40)), Keys("gateway:")
    client = AccountKey("key", KEY.namespace)

    async with opened(servers.url) as store:

        async def settle() -> None:
            await store.settle(record("s", accounts=(KEY.account, client), spent=Amount(15, 2_500, 1), charge=charge))

        async def missing() -> tuple[bool, bool]:
            (balance,) = await store.balances([limit])
            return balance.is_absent, balance.is_orphaned

        assert await missing() == (True, False), "new"
        await settle()
        assert await missing() == (False, False)
        assert await store.reset(KEY)
        assert await missing() == (False, False), "reset"
        await settle()
        assert await store.delete(KEY)
        assert await missing() == (False, False), "deleted"
        await settle()
        for name in (keys.account(KEY.account), keys.session(tag_of(KEY.namespace, KEY.id))):
            await store._link.call(("DEL", name))
        assert await missing() == (True, True), "both are lost"
        (balance,) = await store.balances([Claim(client)])
        assert balance.used == Amount(45, 7_500, 3), "what the client key has used is known all the same"
        assert not isinstance(
            await store.reserve(
                OpenHold(Hold("h", (limit, Claim(client, Limits(tokens=50))), Amount(20)), record("s")), LEASE_S
            ),
            Granted,
        )
