"""Clients that disconnect are charged once, because the provider bills; exactly if the response was drained."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.mock import MockProvider, MockServer
from gateway.server import serving
from gateway.upstream.keepalive import KeepaliveSettings
from tests.conftest import Scripted, StartGateway
from tests.support.gateways import GatewayThread, until
from tests.support.muting import mute, needs_linux
from tests.support.scripted import DONE, SSE_HEAD, ByteServer, Connection, chunk, completion, usage_chunk
from tests.support.timing import LIMIT_S, in_time
from tests.support.web import CHAT, HI, Web, chat_bytes, connect, read_until


@pytest.fixture(scope="module")
def cancelling_server(mock_server: MockServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayThread]:
    flags = {"sessions.on_disconnect": "cancel"}
    gateway = GatewayThread(tmp_path_factory.mktemp("cancelling"), mock_server.url, flags)
    yield gateway
    gateway.stop()


@pytest.fixture
def cancelling(cancelling_server: GatewayThread, mock: MockProvider) -> Web:
    return cancelling_server.web


@pytest.fixture(scope="module")
def impatient_server(mock_server: MockServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayThread]:
    gateway = GatewayThread(tmp_path_factory.mktemp("impatient"), mock_server.url, {"sessions.drain_s": 0.3})
    yield gateway
    gateway.stop()


@pytest.fixture
def impatient(impatient_server: GatewayThread, mock: MockProvider) -> Web:
    return impatient_server.web


def leave(
    web: Web,
    session: str,
    mock: str,
    *,
    provider: MockProvider,
    after: bytes = b"",
    stream: bool = False,
    path: str = CHAT,
    **fields: Any,
) -> None:
    """Send a call and disconnect: after `after` was read, or after the provider has received the call."""
    body = json.dumps({"model": "mock-small", "messages": HI, "stream": stream, "max_tokens": 999, **fields}).encode()
    headers = [f"x-session-id: {session}".encode(), f"x-mock: {mock}".encode()]
    before = len(provider.calls)
    with connect(web.url) as sock:
        sock.sendall(chat_bytes(body, *headers, path=path.encode()).replace(b"connection: close\r\n", b""))
        until(lambda: len(provider.calls) > before, what="the provider has the call")
        read_until(sock, after)


def record(web: Web, session: str) -> Any:
    """Return the only call of the session once it is settled."""

    def calls() -> Any:
        answer = web.get(f"/api/sessions/{session}/calls")
        return answer.status == 200 and answer.json["calls"]

    until(calls, what="the call is settled")
    time.sleep(0.05)
    [found] = calls()
    view = web.get(f"/api/sessions/{session}").json
    assert view["calls"] == (1 if found["usage"] else 0)
    return found


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_before_the_first_byte_is_charged_exactly_after_draining(
    stream: bool, web: Web, mock: MockProvider, session: str
) -> None:
    leave(web, session, "delay=0.2;tokens=50/9", provider=mock, stream=stream)
    found = record(web, session)
    assert found["usage"]["total_tokens"] == mock.billed().total_tokens == 59
    assert (found["outcome"], found["status"], found["usage_source"]) == ("ok", 200, "provider")


def test_a_client_that_leaves_a_stream_is_charged_exactly_after_draining(
    web: Web, mock: MockProvider, session: str
) -> None:
    leave(web, session, "chunks=20;interval=0.02;tokens=50/9", provider=mock, after=b"content", stream=True)
    found = record(web, session)
    assert found["usage"]["total_tokens"] == mock.billed().total_tokens == 59
    assert (found["outcome"], found["status"], found["usage_source"]) == ("ok", 200, "provider")
    assert found["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [True, False])
def test_a_call_cancelled_before_the_first_byte_is_charged_by_estimate(
    stream: bool, cancelling: Web, mock: MockProvider, session: str
) -> None:
    leave(cancelling, session, "delay=60", provider=mock, stream=stream)
    found = record(cancelling, session)
    assert (found["outcome"], found["status"], found["usage_source"]) == ("client_left", 499, "estimated")
    assert found["usage"]["input_tokens"] > 0
    assert found["usage"]["output_tokens"] == 0


def test_a_cancelled_stream_is_charged_for_the_delivered_output(
    cancelling: Web, mock: MockProvider, session: str
) -> None:
    leave(cancelling, session, "chunks=900;interval=0.06", provider=mock, after=b"said", stream=True)
    found = record(cancelling, session)
    assert (found["outcome"], found["status"], found["usage_source"]) == ("client_left", 499, "estimated")
    assert found["usage"]["input_tokens"] > 0
    assert 0 < found["usage"]["output_tokens"] < 450


@pytest.fixture
def soon_asking(mock_server: MockServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    """Yield a gateway that cancels, and sends keepalive probes to its clients after one second."""
    monkeypatch.setattr(serving, "_CLIENT_KEEPALIVE", KeepaliveSettings(after_s=1, every_s=1, times=1))
    monkeypatch.setattr(serving, "_UNACKNOWLEDGED_S", 1.0)
    gateway = GatewayThread(tmp_path, mock_server.url, {"sessions.on_disconnect": "cancel"})
    yield gateway.web
    gateway.stop()


@needs_linux
@pytest.mark.parametrize(("mock_header", "after"), [(b"delay=60", b""), (b"chunks=900;interval=0.06", b"said")])
def test_a_client_that_vanishes_silently_is_treated_as_disconnected(
    mock_header: bytes, after: bytes, soon_asking: Web, mock: MockProvider, session: str
) -> None:
    body = json.dumps({"model": "mock-small", "messages": HI, "stream": bool(after), "max_tokens": 999}).encode()
    with connect(soon_asking.url) as sock:
        sock.sendall(chat_bytes(body, b"x-session-id: " + session.encode(), b"x-mock: " + mock_header))
        until(lambda: mock.calls, what="the provider has the call")
        read_until(sock, after)
        mute(sock)
        found = record(soon_asking, session)
    assert (found["outcome"], found["status"]) == ("client_left", 499)


def test_usage_reported_before_a_cancel_is_used(cancelling: Web, mock: MockProvider, session: str) -> None:
    """Anthropic reports the input tokens at the start of a stream: only the output has to be estimated."""
    leave(
        cancelling,
        session,
        "chunks=900;interval=0.06;tokens=77/900",
        provider=mock,
        after=b"said",
        stream=True,
        path="/v1/messages",
    )
    found = record(cancelling, session)
    assert (found["outcome"], found["usage_source"]) == ("client_left", "mixed")
    assert found["usage"]["input_tokens"] == 77
    assert 0 < found["usage"]["output_tokens"] < 450


def test_a_client_that_leaves_after_the_last_byte_is_settled_normally(
    cancelling: Web, mock: MockProvider, session: str
) -> None:
    leave(cancelling, session, "tokens=50/9", provider=mock, after=b"[DONE]", stream=True)
    found = record(cancelling, session)
    assert (found["outcome"], found["usage"]["total_tokens"]) == ("ok", 59)


def test_cancelling_ends_the_call_at_the_provider(mock: MockProvider, byte_server: Any, gateway_server: Any) -> None:
    left: list[bool] = []

    def script(connection: Connection) -> None:
        connection.send(SSE_HEAD + chunk("word"))
        left.append(connection.wait_until_left())

    gateway = gateway_server(byte_server(script).url, **{"sessions.on_disconnect": "cancel"})
    with connect(gateway.url) as sock:
        sock.sendall(chat_bytes(b'{"model":"m","messages":[],"stream":true}'))
        read_until(sock, b"word")
    until(lambda: left)
    assert left == [True]


@pytest.mark.parametrize(
    ("stream", "mock_header"), [(True, "chunks=9;interval=60"), (True, "hang=1"), (False, "delay=60")]
)
def test_draining_ends_after_its_time_limit(
    stream: bool, mock_header: str, impatient: Web, mock: MockProvider, session: str
) -> None:
    with in_time(at_least=0.25):
        leave(impatient, session, mock_header, provider=mock, stream=stream)
        found = record(impatient, session)
    assert (found["outcome"], found["status"]) == ("client_left", 499)
    assert found["usage_source"] == "estimated"
    assert found["usage"]["total_tokens"] > 0


def test_a_drained_response_that_breaks_is_charged_by_estimate(web: Web, mock: MockProvider, session: str) -> None:
    leave(web, session, "chunks=40;interval=0.02;die=10", provider=mock, after=b"word", stream=True)
    found = record(web, session)
    assert (found["outcome"], found["usage_source"]) == ("upstream_broken", "estimated")
    assert found["usage"]["output_tokens"] > 0


def test_a_response_that_stops_while_being_drained_is_charged_by_estimate(scripted: Scripted, session: str) -> None:
    body = completion()

    def script(connection: Connection) -> None:
        connection.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 999\r\n\r\n" + body)
        connection.wait_until_left()

    web = scripted.play(script)
    with connect(web.url) as sock:
        sock.sendall(
            chat_bytes(
                b'{"model":"halting/m","messages":[{"role":"user","content":"hi"}]}',
                b"x-session-id: " + session.encode(),
            )
        )
        until(lambda: scripted.upstream.requests)
    found = record(web, session)
    assert found["outcome"] == "upstream_broken"
    assert found["usage"]["input_tokens"] > 0


def test_a_client_that_leaves_before_its_body_is_complete_is_charged_nothing(
    web: Web, mock: MockProvider, session: str
) -> None:
    with connect(web.url) as sock:
        sock.sendall(chat_bytes(b"x" * 1000, b"x-session-id: " + session.encode())[:-500])
        time.sleep(0.05)
    assert web.chat(session).header("x-session-cumulative-calls") == "1"
    assert len(mock.calls) == 1


def test_a_client_that_closes_only_its_sending_side_is_charged_if_its_call_was_sent(
    web: Web, mock: MockProvider, session: str
) -> None:
    import socket

    body = json.dumps({"model": "mock-small", "messages": HI, "stream": True}).encode()
    before = len(mock.calls)
    with connect(web.url) as sock:
        sock.sendall(chat_bytes(body, b"x-session-id: " + session.encode(), b"x-mock: chunks=5;tokens=50/9"))
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(65536):
            pass
    # This looks like a client that has left: if no provider has received its call yet, the call is not sent.
    web.process_pending_events()
    until(lambda: web.get("/api/health").json["worker"]["calls"] == 0, what="the call has ended")
    if len(mock.calls) > before:
        assert record(web, session)["usage"]["total_tokens"] == 59
    else:
        usage = web.get(f"/api/sessions/{session}").json.get("cumulative_token_usage", {"total_tokens": 0})
        assert usage["total_tokens"] == 0


# --- before it was sent ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("on_disconnect", ["drain", "cancel"])
def test_a_call_waiting_for_a_connection_is_dropped_when_its_client_leaves(
    on_disconnect: str, stream: bool, gateway_server: StartGateway
) -> None:
    is_free = threading.Event()

    def answer(connection: Connection) -> None:
        assert is_free.wait(LIMIT_S)
        connection.whole(completion())

    with ByteServer(answer) as server:
        row = {"base_url": server.url, "auth": "none", "max_connections": 1}
        web = gateway_server(server.url, **{"providers.upstream": row, "sessions.on_disconnect": on_disconnect}).web
        first = threading.Thread(target=lambda: web.chat("first"))
        first.start()
        until(lambda: server.requests, what="the only connection is taken")
        body = json.dumps({"model": "mock-small", "messages": HI, "stream": stream}).encode()
        with connect(web.url) as sock:
            sock.sendall(chat_bytes(body, b"x-session-id: s").replace(b"connection: close\r\n", b""))
            until(lambda: web.get("/api/health").json["worker"]["calls"] == 2)
        until(lambda: web.get("/api/health").json["worker"]["calls"] == 1, what="the call has ended")
        is_free.set()
        first.join()
        assert web.chat("first").status == 200
    assert len(server.requests) == 2, "those of the first session"
    [left] = web.get("/api/sessions/s/calls").json["calls"]
    assert (left["outcome"], left["usage"]) == ("client_left", None)


# --- steps of a session ---------------------------------------------------------------------------------------------

STEPS = [{"name": "s", "sequence": ["read", "write"]}]


def place(web: Web, session: str) -> Any:
    return web.get(f"/api/sessions/{session}").json["steps"]["default"]["sequence_index"]


def tools(*names: str) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name}} for name in names]


READ = {"index": 0, "id": "c", "type": "function", "function": {"name": "read", "arguments": "{}"}}
#: a stream that calls a tool, up to its finish reason
CALLED = b"".join(
    chunk(choices=[{"index": 0, "delta": delta, "finish_reason": reason}])
    for delta, reason in (({"tool_calls": [READ]}, None), ({}, "tool_calls"))
)


@pytest.mark.parametrize("stream", [True, False])
def test_a_response_for_a_disconnected_client_changes_no_step(stream: bool, gateway_server: StartGateway) -> None:
    has_left = threading.Event()

    def script(connection: Connection) -> None:
        has_left.wait(LIMIT_S)
        if stream:
            connection.send(SSE_HEAD + CALLED + usage_chunk() + DONE)
        else:
            message = {"role": "assistant", "content": None, "tool_calls": [READ]}
            connection.whole(completion(choices=[{"index": 0, "message": message, "finish_reason": "tool_calls"}]))

    with ByteServer(script) as upstream:
        web = gateway_server(upstream.url, steps=STEPS).web
        offered: dict[str, Any] = {"tools": tools("read", "write"), "stream": stream}
        with connect(web.url) as sock:
            body = {"model": "m", "messages": HI, **offered}
            sock.sendall(chat_bytes(json.dumps(body).encode(), b"x-session-id: s"))
            until(lambda: upstream.requests, what="the provider has the call")
        web.process_pending_events()
        has_left.set()
        found = record(web, "s")
        assert (found["outcome"], found["tools"]) == ("ok", ["read"])
        assert found["notes"]["step"] == "not stored: the client left before the response ended"
        assert place(web, "s") == 0
        # The client asks again, and the same tool is due, because it never received the response.
        assert web.chat("s", **offered).status == 200
        assert place(web, "s") == 1


def test_a_stream_with_a_finish_reason_changes_the_step_even_if_its_client_left(
    gateway_server: StartGateway,
) -> None:
    has_left = threading.Event()

    def script(connection: Connection) -> None:
        connection.send(SSE_HEAD + CALLED)
        has_left.wait(LIMIT_S)
        connection.send(usage_chunk() + DONE)

    with ByteServer(script) as upstream:
        web = gateway_server(upstream.url, steps=STEPS).web
        body = json.dumps({"model": "m", "messages": HI, "stream": True, "tools": tools("read", "write")}).encode()
        with connect(web.url) as sock:
            sock.sendall(chat_bytes(body, b"x-session-id: s"))
            read_until(sock, b'"finish_reason": "tool_calls"')
        web.process_pending_events()
        has_left.set()
        assert record(web, "s")["tools"] == ["read"]
        assert place(web, "s") == 1
