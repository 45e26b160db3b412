"""The limits of one connection. Refused heads are tested in tests/e2e/test_bad_input.py."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import threading
import time
from typing import Any

import pytest

from gateway.mock import MockProvider, MockServer
from gateway.server import serving
from tests.conftest import StartGateway
from tests.support.asgi import with_lifespan
from tests.support.gateways import until
from tests.support.timing import LIMIT_S
from tests.support.web import CHAT, Web, chat_bytes, connect, read_all, read_until, talk

PLAIN = b'{"model":"mock-small","messages":[{"role":"user","content":"hi"}]}'


@pytest.fixture
def small(mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway) -> Web:
    return gateway_server(mock_server.url, **{"server.max_header_kb": 2}).web


@pytest.fixture
def hasty(mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway) -> Web:
    return gateway_server(mock_server.url, **{"server.header_timeout_s": 0.5}).web


def head_of(size: int) -> bytes:
    """Return a request whose head has this many bytes."""
    bare = len(chat_bytes(PLAIN, b"x-pad: ")) - len(PLAIN)
    return chat_bytes(PLAIN, b"x-pad: " + b"a" * (size - bare))


def test_limit_of_the_head_is_exact(small: Web) -> None:
    assert talk(small.url, head_of(1900)).status == 200
    answer = talk(small.url, head_of(2200))
    assert (answer.status, answer.error["code"]) == (431, "headers_too_large")
    assert "server.max_header_kb" in answer.error["message"]


@pytest.mark.parametrize("step", [1, 7, 100, 5000])
def test_limit_applies_to_a_head_in_any_parts(step: int, small: Web) -> None:
    data = head_of(4000)
    with connect(small.url) as sock:
        try:
            for start in range(0, len(data), step):
                sock.sendall(data[start : start + step])
        except ConnectionError:
            pass
        answer = read_all(sock)
    assert b" 431 " in answer or answer == b""


def test_many_small_headers_are_counted_together(small: Web) -> None:
    assert talk(small.url, chat_bytes(PLAIN, *[b"a: b"] * 300)).status == 431


def test_the_limit_is_per_request_and_not_per_connection(small: Web) -> None:
    request = head_of(1500).replace(b"connection: close\r\n", b"")
    with connect(small.url) as sock:
        for _ in range(5):
            sock.sendall(request)
            assert read_until(sock, b'"usage"').startswith(b"HTTP/1.1 200")
        sock.sendall(head_of(4000))
        assert b" 431 " in read_all(sock)


def test_a_large_body_does_not_count_as_head(small: Web) -> None:
    assert small.post(CHAT, PLAIN + b" " * 100_000).status == 200


def chunked_bytes(*headers: bytes) -> bytes:
    """Return a chat request in one chunk, without the last chunk."""
    head = chat_bytes(b"", b"transfer-encoding: chunked", *headers).replace(b"content-length: 0\r\n", b"")
    return head + b"%x\r\n%b\r\n" % (len(PLAIN), PLAIN)


ENDLESS = {
    "trailers": (b"0\r\n", b"x-t: a\r\n" * 1000),
    "one trailer": (b"0\r\nx-t: ", b"a" * 8000),
    "the extension of a chunk": (b"1;x=", b"a" * 8000),
}


@pytest.mark.parametrize("what", ENDLESS)
def test_framing_of_a_body_has_the_limit_of_a_head(what: str, small: Web) -> None:
    begin, piece = ENDLESS[what]
    with connect(small.url) as sock:
        sock.sendall(chunked_bytes() + begin)
        with contextlib.suppress(ConnectionError):
            for _ in range(1000):
                sock.sendall(piece)
            pytest.fail("it was read on and on")


def test_trailers_over_the_limit_are_an_error(small: Web) -> None:
    with connect(small.url) as sock:
        sock.sendall(chunked_bytes() + b"0\r\nx-t: ")
        left = 200
        while not select.select([sock], [], [], 0.01)[0] and left:
            sock.sendall(b"a" * 100)
            left -= 1
        answer = read_all(sock)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b"server.max_header_kb" in answer


def test_chunk_sizes_in_separate_parts_do_not_count_as_framing(small: Web) -> None:
    body = b" " * 3000 + PLAIN
    head, _, _ = chunked_bytes().partition(b"\r\n\r\n")
    with connect(small.url) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(head + b"\r\n\r\n")
        for start in range(len(body)):
            sock.sendall(b"1\r\n")
            sock.sendall(body[start : start + 1] + b"\r\n")
        sock.sendall(b"0\r\n\r\n")
        assert read_all(sock).startswith(b"HTTP/1.1 200 ")


def test_trailer_is_not_treated_as_a_header(small: Web) -> None:
    with connect(small.url) as sock:
        sock.sendall(chunked_bytes(b"x-session-id: named") + b"0\r\nx-session-id: other\r\nx-context-budget: -\r\n\r\n")
        answer = read_all(sock)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"x-session-id: named\r\n" in answer


@pytest.mark.parametrize("keep", [b"close", b"keep-alive"])
def test_a_client_of_http_1_0_gets_no_chunks(keep: bytes, small: Web) -> None:
    body = PLAIN[:-1] + b',"stream":true}'
    request = chat_bytes(body).replace(b"HTTP/1.1", b"HTTP/1.0").replace(b"connection: close", b"connection: " + keep)
    with connect(small.url) as sock:
        sock.sendall(request)
        head, _, events = read_all(sock).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert events.startswith(b"data: {")
    assert events.endswith(b"data: [DONE]\n\n")


def test_client_of_http_1_0_gets_a_complete_response_with_its_length(small: Web) -> None:
    answer = talk(small.url, chat_bytes(PLAIN).replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert answer.status == 200
    assert answer.body.endswith(b"}")
    assert answer.header("content-length") == str(len(answer.body))


def test_a_kept_connection_may_be_idle_for_longer_than_a_head_may_take(hasty: Web) -> None:
    request = chat_bytes(PLAIN).replace(b"connection: close\r\n", b"")
    with connect(hasty.url) as sock:
        for idle_s in (0.0, 0.7):
            time.sleep(idle_s)
            sock.sendall(request)
            assert read_until(sock, b'"usage"').startswith(b"HTTP/1.1 200")


def test_two_gateways_in_one_process_have_their_own_limits(
    small: Web, mock_server: MockServer, gateway_server: StartGateway
) -> None:
    large = gateway_server(mock_server.url).web
    assert talk(large.url, head_of(4000)).status == 200
    assert talk(small.url, head_of(4000)).status == 431


GET = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"


def test_head_after_another_request_has_the_limit_too(small: Web) -> None:
    with connect(small.url) as sock:
        sock.sendall(GET + b"GET /healthz HTTP/1.1\r\nhost: x\r\nx-a: ")
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 50 << 20:
                sock.sendall(b"a" * 65536)
                sent += 65536
        assert sent < 16 << 20, "cut off soon after the limit of 2 KiB"


def test_incomplete_head_after_another_request_times_out(hasty: Web) -> None:
    with connect(hasty.url) as sock:
        sock.sendall(GET + b"GET /heal")
        assert b"header_timeout" in read_all(sock)


def test_requests_sent_at_once_are_answered_in_order(small: Web) -> None:
    with connect(small.url) as sock:
        sock.sendall(GET * 3 + GET.replace(b"host: x", b"host: x\r\nconnection: close"))
        assert read_all(sock).count(b"HTTP/1.1 200") == 4


def test_client_that_leaves_with_several_running_requests_causes_no_bug(
    small: Web, mock: MockProvider, caplog: pytest.LogCaptureFixture
) -> None:
    kept = chat_bytes(PLAIN, b"x-mock: delay=0.3").replace(b"connection: close\r\n", b"")
    with connect(small.url) as sock:
        sock.sendall(kept * 3)
        until(lambda: mock.calls)
    until(lambda: small.get("/api/sessions").json["sessions"])
    assert small.get("/healthz").status == 200
    assert "bug" not in caplog.text
    assert "cannot be answered" not in caplog.text


async def breaks_off(_scope: Any, _receive: Any, send: Any) -> None:
    """Send until the client reads no more, and then break off."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.2):
            while True:
                await send({"type": "http.response.body", "body": bytes(100_000), "more_body": True})


def test_closing_connection_ends_even_if_its_client_reads_nothing() -> None:
    asked = threading.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        asked.set()
        await breaks_off(scope, receive, send)

    options = serving.make_config(
        with_lifespan(app), max_head_bytes=65_536, max_body=2**24, head_timeout_s=5, grace_s=1
    )
    options.linger_s = 0.1
    with serving.ServerThread(options) as server, socket.socket() as client:
        host, port = server.url.removeprefix("http://").split(":")
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        client.settimeout(LIMIT_S)
        client.connect((host, int(port)))
        client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        # The client reads nothing here, because the remaining bytes would then be sent.
        assert asked.wait(LIMIT_S)
        until(lambda: not server._server.server_state.connections)
