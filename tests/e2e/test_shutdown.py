"""Signals: running calls complete, or are cut and charged; acknowledged calls are kept."""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from gateway.mock import MockProvider, MockServer
from tests.conftest import StartProcess, StartUpstream
from tests.support.gateways import STARTS_S, GatewayProcess, until
from tests.support.scripted import Connection, Held
from tests.support.timing import LIMIT_S
from tests.support.web import CHAT, HI, Reply, chat_bytes, connect, parse, read_all, read_until, talk

pytestmark = pytest.mark.long

#: a stream that runs for minutes
ENDLESS = "chunks=900;interval=0.1"


class Running:
    """A call in its own thread; `answers` is filled when it has ended."""

    def __init__(self, call: Callable[[], Reply]) -> None:
        self.answers: list[Reply] = []
        self._thread = threading.Thread(target=lambda: self.answers.append(call()), daemon=True)
        self._thread.start()

    def end(self) -> Reply:
        self._thread.join(LIMIT_S)
        assert self.answers, "the call has not ended"
        return self.answers[0]


def raw_stream(gateway: GatewayProcess, session: str, mock: str) -> Reply:
    body = json.dumps({"model": "mock-small", "messages": HI, "stream": True}).encode()
    with connect(gateway.url) as sock:
        sock.sendall(chat_bytes(body, f"x-session-id: {session}".encode(), f"x-mock: {mock}".encode()))
        return parse(read_all(sock))


def kept(gateway: GatewayProcess, session: str) -> tuple[int, int, int]:
    """Return calls, total tokens and estimated tokens of a session from the database."""
    with sqlite3.connect(gateway.store) as database:
        query = "SELECT calls, total_tokens, estimated_tokens FROM sessions WHERE id = ?"
        row = database.execute(query, (session,)).fetchone()
        [[checked]] = database.execute("PRAGMA integrity_check").fetchall()
    database.close()
    assert checked == "ok"
    return row or (0, 0, 0)


def is_stopping(gateway: GatewayProcess) -> bool:
    """Return True if the gateway has received a signal: it is alive, but not ready."""
    try:
        return gateway.web.get("/readyz").status == 503 and gateway.web.get("/healthz").status == 200
    except ConnectionError:
        # A worker that begins to stop closes connections on which no request has arrived yet.
        return False


def is_closed(gateway: GatewayProcess) -> bool:
    """Return True if no worker listens any more."""
    try:
        socket.create_connection(("127.0.0.1", int(gateway.url.rpartition(":")[2]))).close()
    except ConnectionError:
        return True
    return False


@pytest.mark.parametrize(("number", "workers"), [(signal.SIGTERM, 1), (signal.SIGINT, 1), (signal.SIGTERM, 2)])
def test_a_running_stream_completes_within_the_grace_and_new_calls_get_retry_after(
    number: signal.Signals, workers: int, byte_server: StartUpstream, gateway_process: StartProcess
) -> None:
    held = Held()
    upstream = byte_server(held)
    gateway = gateway_process(upstream.url, **{"server.shutdown_grace_s": 60, "server.workers": workers})
    running = Running(lambda: gateway.web.stream("s"))
    until(lambda: upstream.requests)
    gateway.signal(number)
    until(lambda: is_stopping(gateway))
    time.sleep(0.5)  # the other worker may not have noticed yet
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/models", "/s/new/v1/responses"):
        refused = gateway.web.post(path, {"model": "mock-small", "messages": HI, "input": HI, "max_tokens": 5})
        assert (refused.status, refused.header("retry-after")) == (503, "1")
        assert refused.header("connection") == "close"
        assert "stopping" in refused.error["message"]
        assert (refused.json.get("type") == "error") == (path == "/v1/messages"), "in the caller's own format"
    assert len(upstream.requests) == 1
    assert not running.answers
    held.release()
    answer = running.end()
    assert answer.clean
    assert answer.data_lines[-1] == "[DONE]"
    assert answer.totals == (10, 5, 15)
    gateway.wait()
    assert is_closed(gateway)
    assert kept(gateway, "s") == (1, 15, 0)
    assert "Traceback" not in gateway.errors.read_text()


def test_a_reload_of_a_stopping_gateway_does_not_accept_new_calls(
    byte_server: StartUpstream, gateway_process: StartProcess
) -> None:
    held = Held()
    upstream = byte_server(held)
    gateway = gateway_process(upstream.url, **{"server.shutdown_grace_s": 60, "telemetry.log.level": "info"})
    running = Running(lambda: gateway.web.stream("s"))
    until(lambda: upstream.requests)
    gateway.signal(signal.SIGTERM)
    until(lambda: is_stopping(gateway))
    gateway.signal(signal.SIGHUP)
    until(lambda: "configuration reloaded" in gateway.errors.read_text())
    assert gateway.web.chat("s").error["code"] == "shutting_down"
    held.release()
    assert running.end().clean
    gateway.wait()


def test_a_worker_added_by_a_signal_stops_like_the_others(
    mock_server: MockServer, mock: MockProvider, gateway_process: StartProcess
) -> None:
    gateway = gateway_process(mock_server.url, **{"server.workers": 2, "server.shutdown_grace_s": 60})
    until(lambda: _both(gateway), STARTS_S, "both answer")
    gateway.signal(signal.SIGTTIN)
    until(lambda: len(_workers(gateway)) == 3, STARTS_S, "a third answers")
    streams = [Running(lambda: gateway.web.stream("s", "chunks=20;interval=0.1")) for _ in range(24)]
    until(lambda: len(mock.calls) == 24)
    gateway.signal(signal.SIGTERM)
    until(lambda: is_stopping(gateway))
    time.sleep(0.5)  # others may not have noticed yet
    assert {gateway.web.chat("s").status for _ in range(24)} == {503}
    assert all(stream.end().clean for stream in streams)
    assert gateway.wait() == 0


def test_after_the_grace_a_stream_ends_with_an_error_and_is_charged(
    mock_server: MockServer, mock: MockProvider, gateway_process: StartProcess
) -> None:
    gateway = gateway_process(mock_server.url, **{"server.shutdown_grace_s": 1})
    running = Running(lambda: raw_stream(gateway, "s", ENDLESS))
    until(lambda: mock.calls)
    gateway.signal(signal.SIGTERM)
    answer = running.end()
    gateway.wait()
    assert answer.status == 200
    assert "[DONE]" not in answer.data_lines
    assert answer.events[-1]["error"]["code"] == "shutting_down"
    assert not answer.clean
    calls, total, estimated = kept(gateway, "s")
    assert calls == 1
    assert total == estimated > len(answer.events), "at least one token per event, and the input"
    assert "Traceback" not in gateway.errors.read_text()


def test_after_the_grace_a_responses_stream_ends_with_numbered_error_events(
    mock_server: MockServer, mock: MockProvider, gateway_process: StartProcess
) -> None:
    gateway = gateway_process(mock_server.url, **{"server.shutdown_grace_s": 1})
    body = {"model": "mock-small", "input": "hi", "stream": True}
    running = Running(lambda: gateway.web.post("/v1/responses", body, {"x-session-id": "s", "x-mock": ENDLESS}))
    until(lambda: mock.calls)
    gateway.signal(signal.SIGTERM)
    answer = running.end()
    gateway.wait()
    assert answer.events[-2]["error"]["code"] == "shutting_down"
    assert answer.events[-1]["type"] == "response.failed"
    response = answer.events[-1]["response"]
    assert response["id"] == answer.events[0]["response"]["id"]
    assert response["output"][0]["content"][0]["text"], "delivered text is part of the response"
    assert [event["sequence_number"] for event in answer.events] == list(range(len(answer.events)))
    assert len(answer.events) > 1


@pytest.mark.parametrize(
    "length", [b"content-length: 1000\r\n", b"connection: close\r\n"], ids=["of a known length", "of no length"]
)
def test_after_the_grace_a_binary_download_is_cut_without_extra_bytes(
    length: bytes, byte_server: StartUpstream, gateway_process: StartProcess
) -> None:
    def speak(connection: Connection) -> None:
        connection.send(b"HTTP/1.1 200 OK\r\ncontent-type: audio/mpeg\r\n" + length + b"\r\nMP3")
        connection.wait_until_left()

    upstream = byte_server(speak)
    gateway = gateway_process(upstream.url, **{"server.shutdown_grace_s": 1})
    head = b"POST /v1/audio/speech HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{}"
    running = Running(lambda: talk(gateway.url, head))
    until(lambda: upstream.requests)
    gateway.signal(signal.SIGTERM)
    answer = running.end()
    gateway.wait()
    assert (answer.status, answer.body) == (200, b"MP3")
    assert not answer.clean


def test_after_the_grace_a_waiting_call_gets_503_and_is_charged(
    mock_server: MockServer, mock: MockProvider, gateway_process: StartProcess
) -> None:
    gateway = gateway_process(mock_server.url, **{"server.shutdown_grace_s": 1})
    running = Running(lambda: gateway.web.chat("s", "delay=60"))
    until(lambda: mock.calls)
    gateway.signal(signal.SIGTERM)
    answer = running.end()
    assert (answer.status, answer.error["code"]) == (503, "shutting_down")
    assert answer.header("retry-after")
    gateway.wait()
    calls, total, estimated = kept(gateway, "s")
    assert calls == 1
    assert total == estimated > 0


def test_an_abandoned_stream_is_charged_at_shutdown(
    mock_server: MockServer, mock: MockProvider, gateway_process: StartProcess
) -> None:
    gateway = gateway_process(mock_server.url, **{"server.shutdown_grace_s": 1})
    body = json.dumps({"model": "mock-small", "messages": HI, "stream": True}).encode()
    with connect(gateway.url) as sock:
        sock.sendall(chat_bytes(body, b"x-session-id: s", b"x-mock: " + ENDLESS.encode()))
        assert sock.recv(100)
    time.sleep(0.1)
    gateway.signal(signal.SIGTERM)
    gateway.wait()
    calls, total, _ = kept(gateway, "s")
    assert calls == 1
    assert total > 0


def test_a_second_signal_stops_the_gateway_at_once(
    mock_server: MockServer, mock: MockProvider, gateway_process: StartProcess
) -> None:
    gateway = gateway_process(mock_server.url, **{"server.shutdown_grace_s": 60})
    assert gateway.web.chat("s", "tokens=3/4").status == 200
    running = Running(lambda: raw_stream(gateway, "s", ENDLESS))
    until(lambda: len(mock.calls) == 2)
    gateway.signal(signal.SIGINT)
    until(lambda: is_stopping(gateway))
    assert gateway.process.poll() is None
    gateway.signal(signal.SIGINT)
    gateway.wait()
    running.end()
    calls, total, _ = kept(gateway, "s")
    assert calls >= 1
    assert total >= 7


@pytest.mark.parametrize("stream", [True, False])
def test_acknowledged_calls_survive_a_kill(
    stream: bool, mock_server: MockServer, mock: MockProvider, gateway_process: StartProcess
) -> None:
    gateway = gateway_process(mock_server.url)
    body = json.dumps({"model": "mock-small", "messages": HI, "stream": stream}).encode()
    request = chat_bytes(body, b"x-session-id: s", b"x-mock: tokens=30/20").replace(b"connection: close\r\n", b"")
    for number in range(1, 3):
        gateway.web.chat("s", "tokens=1/1", stream=stream)
        with connect(gateway.url) as sock:
            sock.sendall(request)
            read_until(sock, b"data: [DONE]\n\n" if stream else b'"usage"')
            gateway.process.kill()
        gateway.wait()
        assert kept(gateway, "s") == (2 * number, 52 * number, 0)
        gateway = gateway_process(mock_server.url, folder=gateway.folder)
        assert gateway.web.chat("other").status == 200
    view = gateway.web.get("/api/sessions/s").json["cumulative_token_usage"]
    assert view["total_tokens"] == 2 * 52


def test_sighup_reloads_the_configuration(
    mock_server: MockServer, mock: MockProvider, gateway_process: StartProcess
) -> None:
    gateway = gateway_process(mock_server.url)
    assert gateway.web.chat(model="fast").json["model"] == "fast"
    settings: dict[str, Any] = json.loads(gateway.file.read_text())
    settings["models"] = [{"match": "fast", "provider": "upstream", "name": "mock-small"}]
    gateway.file.write_text(json.dumps(settings))
    gateway.signal(signal.SIGHUP)
    until(lambda: gateway.web.chat(model="fast").json["model"] == "mock-small")
    gateway.file.write_text("{broken")
    gateway.signal(signal.SIGHUP)
    until(lambda: "gateway.yaml" in gateway.errors.read_text(), what="the log says what is wrong")
    assert gateway.web.chat(model="fast").json["model"] == "mock-small"


def test_two_workers_share_the_totals_of_a_session(
    mock_server: MockServer, mock: MockProvider, gateway_process: StartProcess
) -> None:
    gateway = gateway_process(mock_server.url, **{"server.workers": 2})
    until(lambda: _answers(gateway), STARTS_S, "a worker answers")
    started = mock.billed().calls
    running = [
        Running(
            lambda: gateway.web.post(
                CHAT, {"model": "mock-small", "messages": HI}, {"x-session-id": "s", "x-mock": "tokens=2/1"}
            )
        )
        for _ in range(30)
    ]
    assert [call.end().status for call in running] == [200] * 30
    assert mock.billed().calls - started == 30
    assert gateway.web.get("/api/sessions/s").json["cumulative_token_usage"]["total_tokens"] == 90
    gateway.signal(signal.SIGTERM)
    gateway.wait()
    assert kept(gateway, "s") == (30, 90, 0)


def test_a_worker_that_fails_to_start_is_retried_and_stops_no_other_worker(
    mock_server: MockServer, mock: MockProvider, gateway_process: StartProcess
) -> None:
    gateway = gateway_process(mock_server.url, **{"server.workers": 2})
    dead, other = until(lambda: _both(gateway), STARTS_S, "both answer")
    settings = gateway.file.read_text()
    gateway.file.write_text("{broken")
    os.kill(dead, signal.SIGKILL)
    until(lambda: "Application startup failed" in gateway.errors.read_text(), STARTS_S)
    assert _workers(gateway) == [other]
    assert gateway.web.chat("s").status == 200
    gateway.file.write_text(settings)
    until(lambda: _both(gateway), STARTS_S, "another takes its place")
    gateway.signal(signal.SIGTERM)
    assert gateway.wait() == 0
    assert kept(gateway, "s")[0] == 1


def _both(gateway: GatewayProcess) -> list[int]:
    """Return the two workers, or an empty list until both have responded."""
    found = _workers(gateway)
    return found if len(found) == 2 else []


def _workers(gateway: GatewayProcess) -> list[int]:
    """Return the processes that respond."""
    return sorted({gateway.web.get("/api/health").json["worker"]["pid"] for _ in range(24)})


def _answers(gateway: GatewayProcess) -> bool:
    try:
        return gateway.web.get("/readyz").status == 200
    except (OSError, TimeoutError):
        return False


def test_an_abandoned_call_is_drained_before_the_gateway_stops(
    mock_server: MockServer, mock: MockProvider, gateway_process: StartProcess
) -> None:
    gateway = gateway_process(mock_server.url, **{"server.shutdown_grace_s": 60})
    body = json.dumps({"model": "mock-small", "messages": HI, "stream": True}).encode()
    with connect(gateway.url) as sock:
        sock.sendall(chat_bytes(body, b"x-session-id: left", b"x-mock: chunks=20;interval=0.05;tokens=30/20"))
        until(lambda: mock.calls)
        sock.recv(1000)
    gateway.signal(signal.SIGTERM)
    gateway.wait()
    assert kept(gateway, "left") == (1, 50, 0), "exact, since it was drained"
