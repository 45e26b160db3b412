"""How often a call has to wait for a Redis, which may be some milliseconds away."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from typing import Any, Self, cast

import pytest

from gateway.call.types import Caller
from gateway.core.ledger.arithmetic import Limits
from gateway.core.ledger.charging import BudgetPolicy, KeyLimits
from gateway.core.ledger.session_key import SessionKey
from gateway.core.session import SessionState
from gateway.mock import MockServer
from gateway.stores.redis import RedisStore
from gateway.stores.redis.keys import Keys
from gateway.stores.redis.scripts import Command
from tests.conftest import StartGateway
from tests.stores.counting import counts, number_in
from tests.stores.files import PATIENT_S
from tests.stores.redis_servers import RedisCluster, RedisServer
from tests.support.fakes import KEY, FakeReply, UnavailableStore, World


class Counted:
    """A way to the servers that counts how often it is gone; what is under way at the same time goes together."""

    def __init__(self, link: Any) -> None:
        self.link = link
        self.rounds = 0
        self._under_way = 0

    async def call(self, *commands: Command) -> list[Any]:
        self.rounds += not self._under_way
        self._under_way += 1
        try:
            return list(await self.link.call(*commands))
        finally:
            self._under_way -= 1

    async def everywhere(self, *commands: Command) -> list[list[Any]]:
        return list(await self.link.everywhere(*commands))

    async def aclose(self) -> None:
        await self.link.aclose()


@pytest.fixture(params=["one server", "cluster"])
def servers(request: pytest.FixtureRequest) -> RedisServer | RedisCluster:
    name = "redis_cluster" if request.param == "cluster" else "redis_server"
    found: RedisServer | RedisCluster = request.getfixturevalue(name)
    found.flush()
    return found


@pytest.fixture
async def store(servers: RedisServer | RedisCluster) -> AsyncIterator[RedisStore]:
    made = RedisStore(servers.url, timeout_s=PATIENT_S)
    yield made
    await made.aclose()


def counted(store: RedisStore) -> Counted:
    made: Any = store
    made._link = made._ledger._link = made._updates._link = made._lists._link = link = Counted(made._link)
    return link


MILLION = Limits(tokens=1_000_000)
NO_KEY = Caller("alice")
#: round trips of a call to one server, and to a cluster; budgets of each session, who calls, and for which sessions
CALLS: dict[str, tuple[int, int, Limits, Caller, Sequence[str]]] = {
    "plain": (2, 4, Limits(), NO_KEY, ()),
    "with a budget": (3, 6, MILLION, NO_KEY, ()),
    "with a budget of its client key": (3, 7, Limits(), Caller("alice", budget=KeyLimits(MILLION)), ()),
    "of a session below another": (2, 4, Limits(), NO_KEY, ("above",)),
    "of a session below others": (2, 4, Limits(), NO_KEY, ("above", "higher", "highest")),
    "with all of that": (3, 9, MILLION, Caller("alice", budget=KeyLimits(MILLION, 1_000)), ("above", "higher")),
}


@pytest.mark.parametrize("kind", CALLS)
async def test_a_call_waits_for_so_many_round_trips(
    store: RedisStore, servers: RedisServer | RedisCluster, kind: str
) -> None:
    together, apart, limits, caller, above = CALLS[kind]
    world = World(store=cast("UnavailableStore", store), budget=BudgetPolicy(session=limits))
    for session, parent in pairwise(["s", *above]):
        await store.update(SessionKey("alice", session), lambda state, parent=parent: state.with_parent(parent))  # type: ignore[misc]
    await world.call(world.incoming(caller=caller))
    link = counted(store)
    await world.call(world.incoming(caller=caller))
    assert link.rounds == (apart if isinstance(servers, RedisCluster) else together)


async def test_only_a_call_that_continues_a_response_looks_it_up(
    store: RedisStore, servers: RedisServer | RedisCluster
) -> None:
    world = World(store=cast("UnavailableStore", store))
    answer = b'{"id": "resp_1", "status": "completed", "output": []}'
    world.upstream.answer = lambda _: FakeReply(pieces=[answer])
    alone, going_on = (
        b'{"model": "m", "input": "hi"}',
        b'{"model": "m", "input": "on", "previous_response_id": "resp_1"}',
    )
    link, rounds = counted(store), list[int]()
    for body in (alone, going_on, alone, going_on):
        before = link.rounds
        await world.call(world.incoming(body, "responses", headers=[]))
        rounds.append(link.rounds - before)
    together, apart, *_ = CALLS["plain"]
    plain = apart if isinstance(servers, RedisCluster) else together
    assert rounds[2:] == [plain, plain + 2]


async def test_a_change_of_what_was_just_read_is_one_round_trip(
    store: RedisStore, servers: RedisServer | RedisCluster
) -> None:
    other = RedisStore(servers.url, timeout_s=PATIENT_S)
    await other.update(KEY, counts)
    await other.aclose()
    link = counted(store)
    await store.open_call(KEY, [], with_totals=False)
    for number in (2, 3):
        assert number_in((await store.update(KEY, counts)).steps) == number
        assert link.rounds == number


async def test_a_change_of_what_others_have_changed_meanwhile_is_made_of_that(
    store: RedisStore, servers: RedisServer | RedisCluster
) -> None:
    await store.update(KEY, counts)
    other = RedisStore(servers.url, timeout_s=PATIENT_S)
    await other.update(KEY, counts)
    await other.aclose()
    link = counted(store)
    assert number_in((await store.update(KEY, counts)).steps) == 3
    assert link.rounds == 2, "the server says what it has instead"


async def test_a_change_that_fails_does_so_at_what_the_server_has(
    store: RedisStore, servers: RedisServer | RedisCluster
) -> None:
    def second(state: SessionState) -> SessionState:
        if number_in(state.steps) != 1:
            raise ZeroDivisionError
        return counts(state)

    await store.open_call(KEY, [], with_totals=False)
    with pytest.raises(ZeroDivisionError):
        await store.update(KEY, second)
    other = RedisStore(servers.url, timeout_s=PATIENT_S)
    await other.update(KEY, counts)
    await other.aclose()
    assert number_in((await store.update(KEY, second)).steps) == 2


async def test_texts_are_kept_and_looked_for_in_one_round_trip_each(store: RedisStore) -> None:
    link, texts = counted(store), {f"tr_{number}": "text" for number in range(9)}
    assert await store.keep_results(KEY, texts, 1 << 20) == []
    assert link.rounds == 1
    assert await store.missing_results(KEY, [*texts, "tr_other"]) == ["tr_other"]
    assert link.rounds == 2


@pytest.mark.parametrize("namespace", [None, "alice"])
async def test_a_text_that_was_kept_without_its_name_is_found_once_it_was_looked_for(
    store: RedisStore, namespace: str | None
) -> None:
    """As where a worker ended while it was kept: in a cluster both are asked for at once."""
    await store.keep_results(KEY, {"tr_a": "text", "tr_b": "other"}, 1 << 20)
    await store._link.call(("DEL", Keys("gateway:").handled(namespace, "tr_a")))
    assert await store.result(namespace, "tr_a") is None
    assert await store.missing_results(KEY, ["tr_b", "tr_a"]) == []
    assert await store.result(namespace, "tr_a") == "text"


class Relay:
    """Lets requests and replies through, and counts how often something was asked for."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._open = [self._listening]
        self.url = f"redis://127.0.0.1:{self._listening.getsockname()[1]}"
        self.asked = 0

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                server = socket.create_connection(("127.0.0.1", self._port))
                self._open += [client, server]
                for source, target in ((client, server), (server, client)):
                    threading.Thread(target=self._pass_on, args=(source, target), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                self.asked += target.getpeername()[1] == self._port
                target.sendall(data)

    def __exit__(self, *_: object) -> None:
        for one in self._open:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


def test_the_numbers_for_an_agents_tools_take_one_round_trip(
    redis_server: RedisServer, mock_server: MockServer, gateway_server: StartGateway
) -> None:
    redis_server.flush()
    body = {"model": "mock-small", "messages": [{"role": "user", "content": "hello"}]}
    with Relay(redis_server.port) as relay:
        gateway = gateway_server(mock_server.url, **{"store.url": relay.url, "budget.tokens": 10**6})
        for headers in ({}, {"x-parent-session-id": "above"}):
            rounds = list[int]()
            for _ in range(4):
                before = relay.asked
                assert gateway.web.post("/api/context?session=s", body, headers).status == 200
                rounds.append(relay.asked - before)
            # The gateway looks at the store for itself now and then.
            assert min(rounds) == 1
        gateway.stop()
