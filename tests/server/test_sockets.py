"""/v1/responses over a WebSocket, with real clients, a real port and the built-in provider."""

from __future__ import annotations

import asyncio
import json
import signal
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from gateway.core.errors import GatewayError, Unauthenticated
from gateway.mock import Behaviour, MockProvider, MockServer, Turn
from gateway.server.body import BodyMemory, MemoryPool
from gateway.server.protocol import SOCKET_STOPS
from gateway.server.socket_calls import call_headers
from gateway.server.sockets import Sockets
from tests.conftest import StartGateway, StartProcess
from tests.support.gateways import GatewayProcess, GatewayThread, until
from tests.support.timing import LIMIT_S, eventually
from tests.support.web import Web, chat_bytes, parse_usage, read_until, talk
from tests.support.web import connect as connect_plain

LAST = ("response.completed", "response.incomplete", "response.failed", "error")
#: a stream that lasts for minutes
ENDLESS = Turn(behaviour=Behaviour(chunks=900, interval=0.1))


@contextmanager
def opened(
    gateway: GatewayThread | GatewayProcess, session: str | None, path: str = "/v1/responses", **headers: str
) -> Iterator[ClientConnection]:
    named = {"x-session-id": session} if session is not None else {}
    named |= {name.replace("_", "-"): value for name, value in headers.items()}
    with connect(gateway.url.replace("http", "ws") + path, additional_headers=named, max_size=None) as socket:
        yield socket


def ask(socket: ClientConnection, text: str | None = "hi", **fields: Any) -> None:
    given = {} if text is None else {"input": text}
    socket.send(json.dumps({"type": "response.create", "model": "mock-small", **given, **fields}))


def event(socket: ClientConnection) -> Any:
    return json.loads(socket.recv(LIMIT_S))


def answer(socket: ClientConnection) -> list[Any]:
    """Return all events of a response."""
    events = [event(socket)]
    while events[-1]["type"] not in LAST:
        events.append(event(socket))
    return events


def said(last: Any) -> str:
    return str(last["response"]["output"][0]["content"][0]["text"])


def sent(mock: MockProvider) -> Any:
    return json.loads(mock.calls[-1].body)


def calls(web: Web, session: str) -> list[Any]:
    found = web.get(f"/api/sessions/{session}/calls")
    return list(found.json["calls"]) if found.status == 200 else []


@pytest.mark.filterwarnings("ignore:connect:DeprecationWarning")  # how the SDK calls its library
def test_official_sdk_gets_responses_and_is_metered(gateway: GatewayThread, mock: MockProvider, session: str) -> None:
    client = openai.OpenAI(base_url=gateway.base_url, api_key="k", max_retries=0)
    with client, client.responses.connect(extra_headers={"x-session-id": session}) as connection:
        for text in ("one", "two"):
            connection.response.create(model="mock-small", input=text)
            events = []
            for found in connection:
                events.append(found)
                if found.type in LAST:
                    break
            assert events[0].type == "response.created"
            assert events[-1].type == "response.completed"
            assert events[-1].response.output_text == f"You said: {text}"
    billed = mock.billed()
    shown: Any = events[-1].to_dict()["headers"]
    assert parse_usage(str(shown["x-session-cumulative-token-usage"])) == (
        billed.input_tokens, billed.output_tokens, billed.input_tokens + billed.output_tokens,
    )  # fmt: skip
    assert shown["x-session-id"] == session
    assert shown["x-session-usage-final"] == "true"
    assert shown["x-session-cumulative-total-tokens"] == str(billed.input_tokens + billed.output_tokens)
    assert shown["x-session-cumulative-input-tokens"] == str(billed.input_tokens)
    assert shown["x-session-cumulative-output-tokens"] == str(billed.output_tokens)
    assert gateway.web.get(f"/api/sessions/{session}").json["calls"] == 2


def test_each_event_is_one_message_numbered_like_over_http(gateway: GatewayThread, session: str) -> None:
    with opened(gateway, session) as socket:
        ask(socket)
        events = answer(socket)
    assert [one["sequence_number"] for one in events] == list(range(len(events)))


def test_the_path_may_name_the_session(gateway: GatewayThread, mock: MockProvider, session: str) -> None:
    with opened(gateway, None, f"/s/{session}/v1/responses") as socket:
        ask(socket)
        answer(socket)
    assert calls(gateway.web, session)


def test_unstored_response_can_be_continued(gateway: GatewayThread, mock: MockProvider, session: str) -> None:
    with opened(gateway, session) as socket:
        ask(socket, "one", store=False)
        first = answer(socket)[-1]["response"]["id"]
        ask(socket, "two", store=False, previous_response_id=first)
        second = answer(socket)[-1]["response"]["id"]
        ask(socket, "three", store=False, previous_response_id=second, stream_id="fork")
        answer(socket)
        body = sent(mock)
        assert "previous_response_id" not in body
        texts = [item["content"] if isinstance(item["content"], str) else said_by(item) for item in body["input"]]
        assert texts == ["one", "You said: one", "two", "You said: two", "three"]
        # Only the last response of a lane is kept, like at OpenAI.
        ask(socket, "four", store=False, previous_response_id=first)
        answer(socket)
    assert sent(mock)["previous_response_id"] == first


def said_by(item: Any) -> str:
    return str(item["content"][0]["text"])


def test_stored_response_is_continued_by_the_provider(gateway: GatewayThread, mock: MockProvider, session: str) -> None:
    with opened(gateway, session) as socket:
        ask(socket, "one")
        first = answer(socket)[-1]["response"]["id"]
        ask(socket, "two", previous_response_id=first)
        answer(socket)
    assert (sent(mock)["previous_response_id"], sent(mock)["input"]) == (first, "two")


def test_a_warm_up_costs_nothing(gateway: GatewayThread, mock: MockProvider, session: str) -> None:
    with opened(gateway, session) as socket:
        ask(socket, "one", generate=False, store=False)
        warmed = answer(socket)[-1]["response"]["id"]
        assert not mock.calls
        ask(socket, None, previous_response_id=warmed, store=False)
        answer(socket)
    assert [item["content"] for item in sent(mock)["input"]] == ["one"]


def test_long_conversation_is_trimmed_to_its_budget(gateway: GatewayThread, mock: MockProvider, session: str) -> None:
    with opened(gateway, session, x_context_budget="2000") as socket:
        before = None
        for number in range(6):
            ask(socket, f"{number} " + "word " * 600, store=False, previous_response_id=before)
            last = answer(socket)[-1]
            before = last["response"]["id"]
    assert last["headers"]["x-context-trimmed"] != "none"
    assert int(last["headers"]["x-context-tokens-original"]) > 3_000
    billed = mock.calls[-1].billed
    assert billed is not None
    assert billed.input_tokens <= 2_000


def test_budget_applies_and_the_connection_stays_open(gateway: GatewayThread, mock: MockProvider, session: str) -> None:
    with opened(gateway, session, x_session_budget_tokens="200") as socket:
        ask(socket, "word " * 200, stream_id="a")
        refused = answer(socket)[-1]
        assert (refused["type"], refused["status"], refused["stream_id"]) == ("error", 400, "a")
        assert refused["error"]["code"] == "budget_exhausted"
        assert refused["error"]["budget"]
        assert refused["headers"]["x-session-id"] == session
        assert not mock.calls
        ask(socket, "word", max_output_tokens=9)
        ended = answer(socket)[-1]
        assert ended["type"] == "response.completed"
        assert int(ended["headers"]["x-session-budget-remaining-tokens"]) < 200


@pytest.fixture
def cancelling(gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider) -> GatewayThread:
    """A gateway that cancels the calls of clients that left, so that no call outlives a test."""
    return gateway_server(mock_server.url, **{"sessions.on_disconnect": "cancel"})


def test_lanes_run_in_parallel_and_keep_their_order(cancelling: GatewayThread, mock: MockProvider) -> None:
    mock.push(ENDLESS)
    with opened(cancelling, "a") as socket:
        ask(socket, "slow", stream_id="slow")
        assert event(socket)["stream_id"] == "slow"
        ask(socket, "first", stream_id="b.1")
        ask(socket, "second", stream_id="b.1")
        ends: list[Any] = []
        while len(ends) < 2:
            found = event(socket)
            if found["type"] in LAST:
                ends.append(found)
        assert [(one["stream_id"], said(one)) for one in ends] == [
            ("b.1", "You said: first"),
            ("b.1", "You said: second"),
        ]


def test_number_of_busy_streams_is_limited(cancelling: GatewayThread, mock: MockProvider) -> None:
    mock.behaviour = Behaviour(hang=True)
    with opened(cancelling, "a") as socket:
        for number in range(17):
            ask(socket, stream_id=f"lane-{number}")
        refused = event(socket)
        assert (refused["stream_id"], refused["error"]["code"]) == ("lane-16", "websocket_stream_limit_reached")
        for _ in range(17):
            ask(socket, stream_id="lane-0")
        refused = event(socket)
        assert (refused["stream_id"], refused["error"]["code"]) == ("lane-0", "websocket_stream_limit_reached")


def test_new_lane_replaces_an_idle_one(gateway: GatewayThread, mock: MockProvider, session: str) -> None:
    with opened(gateway, session) as socket:
        ids = []
        for number in range(17):
            ask(socket, store=False, stream_id=f"lane-{number}")
            ids.append(answer(socket)[-1]["response"]["id"])
        ask(socket, store=False, previous_response_id=ids[1], stream_id="lane-1")
        answer(socket)
        assert "previous_response_id" not in sent(mock)
        ask(socket, store=False, previous_response_id=ids[0], stream_id="lane-1")
        answer(socket)
        assert sent(mock)["previous_response_id"] == ids[0]


def test_lanes_without_a_remembered_response_are_replaced_too(
    gateway: GatewayThread, mock: MockProvider, session: str
) -> None:
    with opened(gateway, session) as socket:
        for number in range(17):
            ask(socket, stream_id=f"lane-{number}")
            assert answer(socket)[-1]["type"] == "response.completed"


def test_forked_lane_is_not_replaced_by_its_fork(gateway: GatewayThread, mock: MockProvider, session: str) -> None:
    with opened(gateway, session) as socket:
        ids = []
        for number in range(16):
            ask(socket, store=False, stream_id=f"lane-{number}")
            ids.append(answer(socket)[-1]["response"]["id"])
        ask(socket, store=False, previous_response_id=ids[0], stream_id="fork")
        answer(socket)
        assert "previous_response_id" not in sent(mock)
        ask(socket, store=False, previous_response_id=ids[1], stream_id="lane-0")
        answer(socket)
        assert sent(mock)["previous_response_id"] == ids[1]


def test_remembered_responses_take_no_memory_from_calls(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider
) -> None:
    gateway = gateway_server(mock_server.url, **{"server.max_body_mb": 1})
    with opened(gateway, "a") as socket:
        for number in range(16):
            ask(socket, "x" * (2**20 - 300), generate=False, stream_id=f"lane-{number}")
            assert answer(socket)[-1]["type"] == "response.completed"
        # The remaining memory is less than one more of these takes.
        with opened(gateway, "b") as other:
            ask(other, "x" * 2**19, generate=False)
            assert answer(other)[-1]["type"] == "response.completed"
            body = {"model": "mock-small", "input": "x" * (2**20 - 300)}
            assert gateway.web.post("/v1/responses", body).status == 200


@pytest.mark.parametrize("message", ["", "hello", "[]", '{"type":"foo"}', '{"type":"response.inject"}', b"\xff\xfe"])
def test_invalid_message_is_refused_and_the_connection_stays_open(
    message: str | bytes, gateway: GatewayThread, session: str
) -> None:
    with opened(gateway, session) as socket:
        socket.send(message)
        refused = event(socket)
        assert (refused["type"], refused["status"]) == ("error", 400)
        assert refused["error"]["code"] == "invalid_request"
        assert refused["headers"]["x-gateway-request-id"]
        assert refused["headers"]["x-should-retry"] == "false"
        socket.send('{"type":"response.processed","response_id":"resp_1"}')
        ask(socket)
        assert answer(socket)[-1]["type"] == "response.completed"


def test_provider_error_is_sent_with_its_status_and_headers(
    gateway: GatewayThread, mock: MockProvider, session: str
) -> None:
    mock.push(Turn(behaviour=Behaviour(status=429, retry_after="7")))
    with opened(gateway, session) as socket:
        ask(socket)
        [refused] = answer(socket)
        assert (refused["type"], refused["status"], refused["headers"]["retry-after"]) == ("error", 429, "7")
        assert refused["error"]["message"]
        ask(socket)
        assert answer(socket)[-1]["type"] == "response.completed"


def test_a_stream_that_breaks_off_ends_in_an_error(gateway: GatewayThread, mock: MockProvider, session: str) -> None:
    mock.push(Turn(text="a b c d e f", behaviour=Behaviour(die=2)))
    with opened(gateway, session) as socket:
        ask(socket)
        broken = answer(socket)[-1]
        assert broken["type"] == "error"
        assert broken["error"]["code"] == "upstream_protocol_error"
        assert gateway.web.get(f"/api/calls/{broken['headers']['x-gateway-request-id']}").json["session"] == session
        ask(socket)
        assert answer(socket)[-1]["type"] == "response.completed"
    assert len(calls(gateway.web, session)) == 2


def test_a_client_that_leaves_is_charged_for_what_was_delivered(
    gateway: GatewayThread, mock: MockProvider, session: str
) -> None:
    mock.push(Turn(behaviour=Behaviour(chunks=20, interval=0.02)))
    with opened(gateway, session) as socket:
        ask(socket)
        event(socket)
    [found] = until(lambda: calls(gateway.web, session), what="the call is settled")
    assert found["usage"]["output_tokens"] == mock.billed().output_tokens > 0


def test_client_key_is_required_if_one_is_configured(gateway_server: StartGateway, mock_server: MockServer) -> None:
    keys = [{"name": "team", "key": "sk-team-0123456789abcdef"}]
    gateway = gateway_server(mock_server.url, **{"auth.keys": keys})
    with pytest.raises(InvalidStatus) as refused, opened(gateway, "a"):
        pass
    assert refused.value.response.status_code == 401
    assert json.loads(refused.value.response.body or b"")["error"]["code"] == "invalid_api_key"
    with opened(gateway, "a", authorization="Bearer sk-team-0123456789abcdef") as socket:
        ask(socket)
        assert answer(socket)[-1]["type"] == "response.completed"


def test_number_of_open_websockets_is_limited(gateway_server: StartGateway, mock_server: MockServer) -> None:
    gateway = gateway_server(mock_server.url, **{"server.max_concurrency": 1})
    with opened(gateway, "a") as socket:
        with pytest.raises(InvalidStatus) as refused, opened(gateway, "b"):
            pass
        assert refused.value.response.status_code == 503
        ask(socket)
        assert answer(socket)[-1]["type"] == "response.completed"


def test_without_totals_in_streams_the_last_event_has_those_from_before_the_call(
    gateway_server: StartGateway, mock_server: MockServer
) -> None:
    gateway = gateway_server(mock_server.url, **{"sessions.stream_totals": "off"})
    with opened(gateway, "a") as socket:
        ask(socket)
        first = answer(socket)[-1]["headers"]
        ask(socket)
        second = answer(socket)[-1]["headers"]
    assert parse_usage(first["x-session-cumulative-token-usage"])[2] == 0
    assert parse_usage(second["x-session-cumulative-token-usage"])[2] > 0
    assert second["x-session-usage-final"] == "false"


def test_page_of_another_origin_cannot_open_a_websocket(gateway: GatewayThread) -> None:
    with pytest.raises(InvalidStatus) as refused, opened(gateway, "a", origin="https://elsewhere.example"):
        pass
    assert refused.value.response.status_code == 403


@pytest.mark.parametrize("path", ["/v1/realtime?model=m", "/s/mine/v1/chat/completions", "/s/a%20b/v1/responses"])
def test_other_paths_have_no_websocket(path: str, gateway: GatewayThread) -> None:
    with pytest.raises(InvalidStatus) as refused, opened(gateway, None, path):
        pass
    assert refused.value.response.status_code == (400 if "%20" in path else 426)


def test_handshake_without_upgrade_is_refused_with_the_reason(web: Web) -> None:
    orphaned = "GET /v1/responses HTTP/1.1\r\nhost: a\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    refused = talk(web.url, orphaned.encode())
    assert refused.status == 426
    assert "Upgrade" in refused.error["message"]


@pytest.mark.parametrize("path", ["/v1/responses", "/healthz"])
def test_handshake_after_a_request_does_not_lose_its_response(path: str, web: Web, mock: MockProvider) -> None:
    mock.push(Turn(behaviour=Behaviour(delay=0.2)))
    request = chat_bytes(b'{"model":"mock-small","messages":[{"role":"user","content":"hi"}]}')
    handshake = (
        f"GET {path} HTTP/1.1\r\nhost: a\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
        "sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    with connect_plain(web.url) as sock:
        sock.sendall(request.replace(b": close", b": keep-alive") + handshake.encode())
        first = read_until(sock, b"You said: hi")
    assert first.startswith(b"HTTP/1.1 200")


def test_only_relevant_headers_of_the_handshake_are_forwarded(
    gateway: GatewayThread, mock: MockProvider, session: str
) -> None:
    betas = "responses_websockets=2026-02-06,other=1"
    with opened(gateway, session, openai_beta=betas, idempotency_key="k", x_kept="1") as socket:
        ask(socket)
        first = answer(socket)[-1]["headers"]["x-gateway-request-id"]
        ask(socket)
        assert answer(socket)[-1]["headers"]["x-gateway-request-id"] != first
    headers = {name.lower(): value for name, value in mock.calls[-1].headers}
    assert (headers["openai-beta"], headers["x-kept"]) == ("other=1", "1")
    assert not {"upgrade", "sec-websocket-key", "idempotency-key"} & set(headers)


def test_websocket_versions_are_removed_from_openai_beta() -> None:
    beta = (b"openai-beta", b"responses_websockets=2026-02-06")
    assert call_headers([beta, (b"x-empty", b"")]) == [(b"x-empty", b"")]


def test_a_message_that_is_too_large_closes_the_connection(
    gateway_server: StartGateway, mock_server: MockServer
) -> None:
    gateway = gateway_server(mock_server.url, **{"server.max_body_mb": 1})
    with opened(gateway, "a") as socket:
        ask(socket, "x" * (2**20 + 1))
        with pytest.raises(ConnectionClosed):
            event(socket)
        assert socket.close_code == 1009
    with opened(gateway, "a") as socket:
        ask(socket)
        assert answer(socket)[-1]["type"] == "response.completed"


def test_stop_lets_responses_end_and_closes_connections(
    gateway_process: StartProcess, mock_server: MockServer, mock: MockProvider
) -> None:
    mock.push(Turn(behaviour=Behaviour(chunks=10, interval=0.1)))
    gateway = gateway_process(mock_server.url)
    with opened(gateway, "idle") as idle, opened(gateway, "busy") as busy:
        ask(busy, stream_id="a")
        event(busy)
        gateway.signal(signal.SIGTERM)
        with pytest.raises(ConnectionClosed):
            event(idle)
        assert idle.close_code == 1012
        ask(busy, stream_id="b")
        found = answer(busy)
        refused = [one for one in found if one.get("stream_id") == "b"]
        ended = found if found[-1]["stream_id"] == "a" else answer(busy)
        assert ended[-1]["type"] == "response.completed"
        assert [one["error"]["code"] for one in refused] == ["shutting_down"]
        with pytest.raises(ConnectionClosed):
            event(busy)
        assert busy.close_code == 1012
    assert gateway.wait() == 0


def test_stop_refuses_new_connections_while_websockets_are_open(
    gateway_process: StartProcess, mock_server: MockServer, mock: MockProvider
) -> None:
    mock.push(Turn(behaviour=Behaviour(chunks=20, interval=0.1)))
    gateway = gateway_process(mock_server.url)
    with opened(gateway, "idle") as idle, opened(gateway, "busy") as busy:
        ask(busy)
        event(busy)
        gateway.signal(signal.SIGTERM)
        with pytest.raises(ConnectionClosed):
            event(idle)
        with pytest.raises(InvalidStatus) as refused, opened(gateway, "new"):
            pass
        assert refused.value.response.status_code == 503
        assert gateway.web.chat("new").error["code"] == "shutting_down"
        assert answer(busy)[-1]["type"] == "response.completed"
    gateway.wait()


def test_stop_after_the_grace_period_cuts_and_charges_responses(
    gateway_process: StartProcess, mock_server: MockServer, mock: MockProvider
) -> None:
    mock.push(ENDLESS)
    gateway = gateway_process(mock_server.url, **{"server.shutdown_grace_s": 1})
    with opened(gateway, "cut") as socket:
        ask(socket)
        while event(socket)["type"] != "response.output_text.delta":
            pass
        gateway.signal(signal.SIGTERM)
        cut = answer(socket)[-1]
        assert (cut["type"], cut["error"]["code"]) == ("error", "shutting_down")
    assert gateway.wait() == 0
    again = gateway_process(mock_server.url, folder=gateway.folder)
    [found] = calls(again.web, "cut")
    assert found["usage"]["output_tokens"] > 0


class FakeForwarder:
    """A forwarder that accepts every call, and responds when it is released."""

    def __init__(self, pad: int = 0) -> None:
        self.pad = "x" * pad
        self.pool = MemoryPool(1_000)
        self.released = asyncio.Event()
        self.refusal: GatewayError | None = None
        #: status and body of responses without a stream
        self.whole: tuple[int, bytes] | None = None

    async def check_socket(self, scope: Any, others: int) -> None:
        del scope, others
        if self.refusal is not None:
            raise self.refusal

    def memory(self, *, lasting: bool = False) -> BodyMemory:
        del lasting
        return BodyMemory(self.pool)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await self.released.wait()
        if self.whole is not None:
            await send({"type": "http.response.start", "status": self.whole[0], "headers": []})
            await send({"type": "http.response.body", "body": self.whole[1]})
            return
        response = {"id": "resp_1", "output": [], "pad": self.pad}
        event = b"data: " + json.dumps({"type": "response.completed", "response": response}).encode() + b"\n\n"
        head = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        for part in (event[:99], event[99:]):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class Talk:
    """A connection without a port: its incoming and outgoing messages."""

    def __init__(self, forwarder: FakeForwarder, **options: Any) -> None:
        self.sent: list[Any] = []
        self._in: asyncio.Queue[Any] = asyncio.Queue()
        sockets = Sockets(lambda: forwarder, lambda: "id", **options)  # type: ignore[arg-type, return-value]
        self.say("websocket.connect")
        scope = {"type": "websocket", "headers": [], "raw_path": b"/v1/responses", "client": ("127.0.0.1", 1)}
        self.task = asyncio.create_task(sockets(scope, self._in.get, self._take))

    async def _take(self, message: Any) -> None:
        self.sent.append(message)
        if message["type"] == "websocket.close":
            self.say("websocket.disconnect")

    def say(self, kind: str, **fields: Any) -> None:
        self.put({"type": kind, **fields})

    def put(self, message: Any) -> None:
        self._in.put_nowait(message)

    def is_heard(self) -> bool:
        return self._in.empty()

    def create(self, **fields: Any) -> None:
        self.say("websocket.receive", text=json.dumps({"type": "response.create", **fields}))

    @property
    def types(self) -> list[str]:
        texts = [json.loads(one["text"]) for one in self.sent if one["type"] == "websocket.send"]
        return [one["error"]["code"] if one["type"] == "error" else one["type"] for one in texts]

    @property
    def close_code(self) -> int | None:
        return next((one["code"] for one in self.sent if one["type"] == "websocket.close"), None)


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [
        (200, b'{"id":"resp_1","status":"completed","output":[]}', "response.completed"),
        (201, b'{"id":"resp_1","status":"incomplete","output":[]}', "response.incomplete"),
        (200, b'{"error":{"code":"server_error"},"user_id":"u"}', "server_error"),
        (200, b'{"id":"resp_1","status":"failed","error":{"code":"server_error"}}', "response.failed"),
        (200, b'{"id":"resp_1","error":null,"output":[]}', "response.completed"),
        (300, b'{"error":{"code":"elsewhere"}}', "elsewhere"),
        (404, b'{"error":{"code":"model_not_found"}}', "model_not_found"),
    ],
)
async def test_response_without_a_stream_is_one_message(status: int, body: bytes, told: str) -> None:
    forwarder = FakeForwarder()
    forwarder.released.set()
    forwarder.whole = status, body
    talk = Talk(forwarder)
    talk.create(model="m")
    await eventually(lambda: talk.types)
    assert talk.types == [told]
    talk.say("websocket.disconnect")
    await asyncio.wait_for(talk.task, LIMIT_S)


async def test_refused_handshake_ends_the_connection() -> None:
    forwarder = FakeForwarder()
    forwarder.refusal = Unauthenticated("The key was revoked.")
    talk = Talk(forwarder)
    talk.create(model="m")
    await asyncio.wait_for(talk.task, LIMIT_S)
    assert [one["type"] for one in talk.sent] == ["websocket.http.response.start", "websocket.http.response.body"]


async def test_calls_are_notified_when_their_client_leaves() -> None:
    class Patient(FakeForwarder):
        left = 0

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            await asyncio.sleep(0.01)
            self.left += 1

    forwarder = Patient()
    talk = Talk(forwarder)
    for lane in ("a", "b"):
        talk.create(model="m", stream_id=lane)
    talk.say("websocket.disconnect")
    await asyncio.wait_for(talk.task, LIMIT_S)
    assert forwarder.left == 2


async def test_connection_over_its_age_limit_closes_after_the_response() -> None:
    forwarder = FakeForwarder()
    talk = Talk(forwarder, most_age_s=0.01)
    talk.create(model="m")
    await asyncio.sleep(0.05)
    talk.create(model="m", stream_id="b")
    await eventually(lambda: talk.types)
    assert talk.types == ["websocket_connection_limit_reached"]
    assert talk.close_code is None
    forwarder.released.set()
    await asyncio.wait_for(talk.task, LIMIT_S)
    assert talk.types[1:] == ["response.completed", "websocket_connection_limit_reached"]
    assert talk.close_code == 1000


async def test_waiting_requests_are_refused_when_the_server_stops() -> None:
    forwarder = FakeForwarder()
    talk = Talk(forwarder)
    for _ in range(2):
        talk.create(model="m")
    talk.say(SOCKET_STOPS)
    await eventually(talk.is_heard)
    forwarder.released.set()
    await asyncio.wait_for(talk.task, LIMIT_S)
    assert talk.types == ["response.completed", "shutting_down"]
    assert talk.close_code == 1012


async def test_warm_up_needs_access() -> None:
    forwarder = FakeForwarder()
    talk = Talk(forwarder)
    talk.create(model="m", generate=False)
    await eventually(lambda: len(talk.types) == 2)
    forwarder.refusal = Unauthenticated("The key was revoked.")
    talk.create(model="m", generate=False)
    await eventually(lambda: len(talk.types) == 3)
    assert talk.types[2] == "invalid_api_key"
    talk.say("websocket.disconnect")
    await asyncio.wait_for(talk.task, LIMIT_S)


async def test_an_event_with_pictures_is_one_message() -> None:
    forwarder = FakeForwarder(pad=17 * 2**20)
    forwarder.released.set()
    talk = Talk(forwarder)
    talk.create(model="m")
    await eventually(lambda: talk.types)
    assert talk.types == ["response.completed"]
    talk.say("websocket.disconnect")
    await asyncio.wait_for(talk.task, LIMIT_S)


async def test_an_idle_connection_closes_once_when_the_server_stops() -> None:
    talk = Talk(FakeForwarder())
    for _ in range(2):
        talk.say(SOCKET_STOPS)
    await asyncio.wait_for(talk.task, LIMIT_S)
    assert (talk.types, talk.close_code) == ([], 1012)
    assert [one["type"] for one in talk.sent] == ["websocket.accept", "websocket.close"]


async def test_memory_of_messages_and_responses_is_released() -> None:
    forwarder = FakeForwarder()
    forwarder.released.set()
    talk = Talk(forwarder)
    talk.create(model="m", input="x" * 300, store=False)
    await eventually(lambda: talk.types == ["response.completed"])
    await eventually(lambda: 300 < forwarder.pool.used < 600)  # what is remembered
    remembered = forwarder.pool.used
    talk.say("websocket.receive", text='{"type":"response.processed"}')
    await eventually(lambda: talk.is_heard() and forwarder.pool.used == remembered)
    talk.create(model="m", input="x" * 900, store=False)
    await eventually(lambda: len(talk.types) == 2)
    assert talk.types[1] == "overloaded"
    talk.say("websocket.disconnect")
    await asyncio.wait_for(talk.task, LIMIT_S)
    assert forwarder.pool.used == 0


async def test_only_the_last_response_of_a_lane_is_kept() -> None:
    forwarder = FakeForwarder()
    forwarder.released.set()
    talk, taken = Talk(forwarder), list[int]()
    for number in range(1, 4):
        talk.create(model="m", input="x" * 100, store=False)
        await eventually(lambda number=number: len(talk.types) == number)  # type: ignore[misc]
        await eventually(lambda: forwarder.pool.used < 300)
        taken.append(forwarder.pool.used)
    assert len(set(taken)) == 1
    talk.say("websocket.disconnect")
    await asyncio.wait_for(talk.task, LIMIT_S)


async def test_memory_is_released_when_a_client_leaves() -> None:
    forwarder = FakeForwarder()
    talk = Talk(forwarder)
    for _ in range(3):
        talk.create(model="m")
    await eventually(lambda: forwarder.pool.used > 0)
    talk.say("websocket.disconnect")
    await asyncio.sleep(0)
    forwarder.released.set()
    await asyncio.wait_for(talk.task, LIMIT_S)
    assert forwarder.pool.used == 0


async def test_many_messages_at_once_block_no_other_task() -> None:
    talk = Talk(FakeForwarder())
    for _ in range(1_000):
        talk.say("websocket.receive", text="{}")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(talk.types) < 10
    await eventually(lambda: len(talk.types) == 1_000)
    talk.say("websocket.disconnect")
    await asyncio.wait_for(talk.task, LIMIT_S)


class Message(dict[str, Any]):
    """A text that supports weak references."""


async def test_idle_connection_keeps_no_message() -> None:
    talk = Talk(FakeForwarder())
    message = Message(type="websocket.receive", text="{}")
    seen = weakref.ref(message)
    talk.put(message)
    del message
    await eventually(lambda: talk.types)
    await eventually(lambda: seen() is None)
    talk.say("websocket.disconnect")
    await asyncio.wait_for(talk.task, LIMIT_S)
