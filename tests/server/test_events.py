"""/api/events in a running gateway, and alone with short intervals."""

from __future__ import annotations

import asyncio
import http.client
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from decimal import Decimal
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.applications import Starlette

from gateway.core.errors import StoreUnavailable
from gateway.core.ledger.session_key import SessionKey
from gateway.core.record import CallRecord
from gateway.core.stored import LatestCalls
from gateway.core.usage import Charge, Usage
from gateway.mock import MockProvider, MockServer
from gateway.server.auth import Authenticator, KeyRule, digest
from gateway.server.events import MOST_LISTENERS, MOST_OF_ONE, MOST_WAITING, EventsApi
from gateway.server.handling import ServerRules
from gateway.server.keyring import KeyRing
from gateway.server.unrecorded import UnrecordedRefusals
from gateway.stores.memory import MemoryStore
from tests.conftest import StartGateway
from tests.support.gateways import GatewayThread
from tests.support.timing import LIMIT_S
from tests.support.web import Web

ADMIN, ALICE, BOB = "admin-key-0123456789", "alice-key-0123456789", "bob-key-0123456789"
EVENTS = "/api/events"


# --- on a running gateway -----------------------------------------------------------------------------------------


def first_events(answer: http.client.HTTPResponse, number: int) -> list[dict[str, str]]:
    """Return the fields of the first events, without comments."""
    found: list[dict[str, str]] = []
    fields: dict[str, str] = {}
    while len(found) < number:
        line = answer.readline().decode().rstrip("\n")
        name, _, value = line.partition(": ")
        if line and name:
            fields[name] = value
        elif not line and fields:
            found.append(fields)
            fields = {}
    return found


@contextmanager
def listening(web: Web) -> Iterator[http.client.HTTPResponse]:
    """Open a stream of events. Calls that end from now on are sent."""
    with web.open("GET", EVENTS) as answer:
        assert answer.status == 200
        assert (answer.readline(), answer.readline()) == (b": \n", b"\n")
        yield answer


@pytest.fixture
def own(mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway) -> GatewayThread:
    return gateway_server(mock_server.url)


def test_each_call_is_sent_as_its_record_with_the_totals_after_it(own: GatewayThread) -> None:
    own.web.chat("before")
    with listening(own.web) as answer:
        assert answer.getheader("content-type") == "text/event-stream; charset=utf-8"
        own.web.chat("one", "tokens=10/5")
        own.web.chat("one", "tokens=20/5")
        events = first_events(answer, 2)
    totals = []
    for event in events:
        data = json.loads(event["data"])
        assert (event["event"], event["id"]) == ("call", data["call_id"])
        totals.append(data.pop("totals")["total_tokens"])
        assert data == own.web.get(f"/api/calls/{data['call_id']}").json
        assert data["session"] == "one"
    assert totals == [15, 40]


def test_calls_of_another_gateway_on_the_same_store_are_sent_too(
    own: GatewayThread, mock_server: MockServer, gateway_server: StartGateway
) -> None:
    other = gateway_server(mock_server.url, folder=own.folder)
    with listening(own.web) as answer:
        other.web.chat("elsewhere")
        [event] = first_events(answer, 1)
    assert json.loads(event["data"])["session"] == "elsewhere"


def test_a_client_key_sees_its_own_calls_and_the_admin_key_all(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    keys = [{"name": "alice", "key": ALICE}, {"name": "bob", "key": BOB}]
    gateway = gateway_server(mock_server.url, **{"auth.admin_key": ADMIN, "auth.keys": keys})
    alice, bob, admin = (Web(gateway.url, {"authorization": f"Bearer {key}"}) for key in (ALICE, BOB, ADMIN))
    assert gateway.web.get(EVENTS).status == 401
    with listening(bob) as of_bob, listening(admin) as of_all:
        alice.chat("s")
        bob.chat("s")
        assert json.loads(first_events(of_bob, 1)[0]["data"])["session"] == "s"
        assert [json.loads(event["data"])["session"] for event in first_events(of_all, 2)] == ["alice/s", "bob/s"]


def test_a_gateway_that_stops_ends_its_streams_and_does_not_wait_for_them(own: GatewayThread) -> None:
    with listening(own.web) as answer:
        began = time.monotonic()
        own.stop()
        assert answer.read() == b""
        assert time.monotonic() - began < 20  # the grace is 30 s


def test_head_request_starts_no_stream(own: GatewayThread) -> None:
    answer = own.web.send("HEAD", EVENTS)
    assert (answer.status, answer.header("content-type")) == (200, "text/event-stream; charset=utf-8")


# --- by itself ----------------------------------------------------------------------------------------------------


@dataclass
class Listening:
    """A listener. `events`: all received events. `stalled`: the listener reads nothing until this is set."""

    text: str = ""
    rest: str = ""
    events: list[tuple[str, Any]] = field(default_factory=list)
    status: int = 0
    stalled: asyncio.Event | None = None
    ended: bool = False
    leave: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    async def receive(self) -> Any:
        await self.leave.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if self.stalled is not None:
            await self.stalled.wait()
        self.status = message.get("status", self.status)
        piece = message.get("body", b"").decode()
        self.text += piece
        *blocks, self.rest = (self.rest + piece).split("\n\n")
        for block in blocks:
            one = dict(line.split(": ", 1) for line in block.split("\n") if line)
            if "event" in one:
                self.events.append((one["event"], json.loads(one["data"])))
        self.ended = message["type"] == "http.response.body" and not message.get("more_body", False)

    @property
    def calls(self) -> list[str]:
        return [data["call_id"] for name, data in self.events if name == "call"]


class Store(MemoryStore):
    """A store that counts its reads and can be unavailable."""

    looks = 0
    is_unavailable = False
    fails = False

    async def settled_after(self, after: int | None, limit: int) -> LatestCalls:
        self.looks += 1
        if self.is_unavailable:
            raise StoreUnavailable("away")
        if self.fails:
            raise RuntimeError("a bug")
        return await super().settled_after(after, limit)


class World:
    def __init__(self, heartbeat_s: float = 60.0, stalled_s: float = 60.0) -> None:
        self.store = Store()
        self.keys = [KeyRule("alice", digest(ALICE))]
        rules = SimpleNamespace(
            keys=KeyRing(self.store), authenticator=None, unrecorded=UnrecordedRefusals(()), new_id=lambda: "0" * 32
        )
        self.rules = rules
        self.know(ALICE)
        self.api = EventsApi(
            self.store, lambda: cast(ServerRules, rules), look_s=0.01, heartbeat_s=heartbeat_s, stalled_s=stalled_s
        )
        self.app = Starlette(routes=self.api.paths())
        self.numbers = iter(range(1_000_000))

    def know(self, *keys: str) -> None:
        """Set the client keys."""
        rules = [KeyRule(key.partition("-")[0], digest(key)) for key in keys]
        self.rules.authenticator = Authenticator(rules, ADMIN)

    async def listen(self, key: str = ADMIN) -> Listening:
        one = Listening()
        scope = {
            "type": "http", "method": "GET", "path": EVENTS, "raw_path": EVENTS.encode(), "query_string": b"",
            "headers": [(b"authorization", f"Bearer {key}".encode())], "client": ("10.0.0.1", 1),
            "http_version": "1.1", "scheme": "http", "server": ("10.0.0.2", 80), "root_path": "",
        }  # fmt: skip
        one.task = asyncio.create_task(self.app(scope, one.receive, one.send))
        await until(lambda: one.text)
        return one

    async def settle(self, number: int = 1, namespace: str = "alice") -> list[str]:
        ids = []
        for _ in range(number):
            call_id = f"{next(self.numbers):032x}"
            await self.store.settle(replace(CALL, call_id=call_id, session=SessionKey(namespace, "s")))
            ids.append(call_id)
        return ids


CALL = CallRecord(
    call_id="", request_id="r", session=SessionKey("alice", "s"), derived_session=False, started_at=1.0,
    dialect="chat", operation="chat", provider="p", model="m", response_model=None, stream=False, status=200,
    outcome="ok", error_code=None, finish_reason="stop", tools=(),
    charge=Charge(Usage.of(2, 1), "provider", Decimal("0.1")), overhead_s=0.0, first_byte_s=None, duration_s=1.0,
    request_bytes=1, response_bytes=1,
)  # fmt: skip


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.002)


@asynccontextmanager
async def world(**settings: float) -> AsyncIterator[World]:
    made = World(**settings)
    try:
        yield made
    finally:
        await made.api.aclose()


async def test_store_is_not_read_without_listeners() -> None:
    async with world() as made:
        one = await made.listen()
        await until(lambda: made.store.looks > 2)
        one.leave.set()
        await until(lambda: one.task is not None and one.task.done())
        await asyncio.sleep(0.03)
        looks = made.store.looks
        await made.settle()
        await asyncio.sleep(0.05)
        assert made.store.looks == looks
        again = await made.listen()
        ids = await made.settle()
        await until(lambda: again.calls == ids)


async def test_all_listeners_share_one_read() -> None:
    async with world() as made:
        listeners = [await made.listen() for _ in range(10)]
        before, began = made.store.looks, time.monotonic()
        await asyncio.sleep(0.2)
        assert made.store.looks - before <= (time.monotonic() - began) / 0.01 + 2
        ids = await made.settle(3)
        for one in listeners:
            await until(lambda one=one: one.calls == ids)  # type: ignore[misc]


async def test_many_calls_come_in_their_order_each_once() -> None:
    async with world() as made:
        one = await made.listen()
        ids: list[str] = []
        for number in range(10):
            ids += await made.settle(50 * number)
        await until(lambda: one.calls == ids)


async def test_events_that_a_slow_listener_misses_are_counted() -> None:
    async with world() as made:
        slow, other = await made.listen(), await made.listen()
        slow.stalled = asyncio.Event()
        [first] = await made.settle()
        await until(lambda: other.calls == [first])
        ids = await made.settle(MOST_WAITING + 40)
        await until(lambda: other.calls == [first, *ids])
        slow.stalled.set()
        await until(lambda: slow.events and slow.events[-1][0] == "missed")
        assert slow.calls == [first, *ids[:MOST_WAITING]]
        assert slow.events[-1] == ("missed", {"count": 40})
        [later] = await made.settle()
        await until(lambda: slow.events[-1][1].get("call_id") == later)
        assert [name for name, _ in other.events].count("missed") == 0


async def test_deleted_calls_are_counted_as_missed_for_administrators() -> None:
    async with world() as made:
        admin, alice = await made.listen(), await made.listen(ALICE)
        made.store.is_unavailable = True
        await asyncio.sleep(0.03)
        ids = await made.settle(5_000, namespace="bob")
        made.store.is_unavailable = False
        await until(lambda: any(name == "missed" for name, _ in admin.events))
        await until(lambda: alice.events)
        await until(lambda: admin.calls and admin.calls[-1] == ids[-1])
        missed = sum(data["count"] for name, data in admin.events if name == "missed")
        assert missed + len(admin.calls) == 5_000
        assert alice.events == [("missed", {"count": None})]


@pytest.mark.parametrize("trouble", ["is_away", "fails"])
async def test_calls_settled_while_the_store_is_unavailable_are_sent_later(trouble: str) -> None:
    async with world() as made:
        one = await made.listen()
        setattr(made.store, trouble, True)
        looks = made.store.looks
        await until(lambda: made.store.looks > looks + 1)
        ids = await made.settle(2)
        setattr(made.store, trouble, False)
        await until(lambda: one.calls == ids)


async def test_unavailable_store_refuses_listeners_and_frees_their_places() -> None:
    async with world() as made:
        made.store.is_unavailable = True
        for _ in range(MOST_LISTENERS + 1):
            assert (await made.listen()).status == 503
        made.store.is_unavailable = False
        assert (await made.listen()).status == 200


async def test_number_of_listeners_is_limited() -> None:
    async with world() as made:
        listeners = [await made.listen() for _ in range(MOST_LISTENERS)]
        assert {one.status for one in listeners} == {200}
        refused = await made.listen()
        assert refused.status == 503
        assert json.loads(refused.text)["error"]["code"] == "overloaded"
        listeners[0].leave.set()
        await until(lambda: listeners[0].task is not None and listeners[0].task.done())
        assert (await made.listen()).status == 200


async def test_number_of_listeners_of_one_client_key_is_limited() -> None:
    async with world() as made:
        made.know(ALICE, BOB)
        listeners = [await made.listen(ALICE) for _ in range(MOST_OF_ONE)]
        assert {one.status for one in listeners} == {200}
        assert (await made.listen(ALICE)).status == 503
        assert [(await made.listen(key)).status for key in (BOB, ADMIN)] == [200, 200]


async def test_heartbeat_is_sent_without_calls() -> None:
    async with world(heartbeat_s=0.02) as made:
        one = await made.listen()
        await until(lambda: one.text.count(": \n\n") >= 4)
        assert one.events == []


@pytest.mark.parametrize("is_busy", [True, False])
async def test_revoked_key_receives_no_more_events(is_busy: bool) -> None:
    async with world(heartbeat_s=0.05) as made:
        one, admin = await made.listen(ALICE), await made.listen()
        await until(lambda: one.text.count(": \n\n") >= 3)
        made.know(BOB)
        for _ in range(1_000):
            if one.ended:
                break
            if is_busy:
                await made.settle()
            await asyncio.sleep(0.01)
        assert one.ended
        heard = one.text
        await made.settle()
        await asyncio.sleep(0.05)
        assert one.text == heard
        assert not admin.ended


async def test_listener_that_reads_nothing_is_disconnected() -> None:
    async with world(stalled_s=0.1) as made:
        one = await made.listen()
        one.stalled = asyncio.Event()
        await made.settle()
        await until(lambda: one.task is not None and one.task.done())
        assert not one.ended  # the connection breaks


async def test_bug_in_a_stream_is_logged() -> None:
    async with world(heartbeat_s=0.01) as made:
        one = await made.listen()
        made.rules.authenticator = None
        assert one.task is not None
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(AttributeError):
                await one.task
        assert not one.ended
        made.know(ALICE)
        assert (await made.listen()).status == 200


async def test_waiting_events_are_sent_when_the_gateway_stops() -> None:
    async with world() as made:
        one = await made.listen()
        made.api.stop()
        await until(lambda: one.ended)
        assert (await made.listen()).status == 503
