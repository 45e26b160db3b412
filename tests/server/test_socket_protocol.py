"""The limits of WebSocket connections, tested with plain sockets: client libraries would not exceed them."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.server import serving
from gateway.server.protocol import ServerConfig
from tests.support.asgi import with_lifespan
from tests.support.gateways import until
from tests.support.web import connect, read_all, read_until

HANDSHAKE = (
    b"GET /v1/responses HTTP/1.1\r\nhost: a\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    b"sec-websocket-extensions: permessage-deflate\r\n\r\n"
)
MIB = 2**20


def frame(data: bytes, *, announced: int | None = None) -> bytes:
    """Return a masked text message, or its start if `announced` names more bytes."""
    size = len(data) if announced is None else announced
    return struct.pack("!BBQ4s", 0x81, 0xFF, size, bytes(4)) + data


class Application:
    """An application that answers each message with 12 MiB, which is more than the buffers of the system."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    async def __call__(self, _scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            self.heard.append(message)
            await send({"type": "websocket.send", "text": "x" * 12 * MIB})
        self.heard.append(message)


@pytest.fixture
def application() -> Application:
    return Application()


@pytest.fixture
def options(application: Application) -> ServerConfig:
    made = serving.make_config(
        with_lifespan(application), max_head_bytes=65_536, max_body=MIB, head_timeout_s=5, grace_s=1
    )
    made.ws_ping_interval, made.ws_ping_timeout, made.linger_s = 0.05, 0.1, 0.1
    return made


@pytest.fixture
def url(options: ServerConfig) -> Iterator[str]:
    with serving.ServerThread(options) as running:
        yield running.url


@contextlib.contextmanager
def opened(url: str, room: int = 4096) -> Iterator[socket.socket]:
    with connect(url) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
        sock.sendall(HANDSHAKE)
        head = read_until(sock, b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 101")
        assert b"deflate" not in head
        yield sock


@pytest.mark.parametrize(
    "head",
    [
        # as nginx sends it: the header comes first
        b"GET /v1/responses HTTP/1.1\r\nUpgrade: websocket\r\nConnection: upgrade\r\nHost: a",
        b"GET /s/a/v1/responses?x=1 HTTP/1.1\r\nhost: a\r\nConnection: keep-alive, Upgrade\r\nUPGRADE:WebSocket",
    ],
)
def test_handshake_is_recognized_in_any_spelling(head: bytes, url: str) -> None:
    rest = b"\r\nsec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    with connect(url) as sock:
        sock.sendall(head + rest)
        assert read_until(sock, b"\r\n\r\n").startswith(b"HTTP/1.1 101")


def test_client_that_answers_no_ping_is_disconnected(url: str, application: Application) -> None:
    with opened(url) as sock:
        sock.sendall(frame(b"hi"))
        until(lambda: len(application.heard) == 2, what="the application hears of the end")
        assert application.heard[-1]["type"] == "websocket.disconnect"


def test_memory_of_incoming_messages_is_limited(url: str, options: ServerConfig, application: Application) -> None:
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(opened(url)) for _ in range(17)]
        for sock in socks:
            with contextlib.suppress(OSError):
                sock.sendall(frame(b"x" * (MIB - 1), announced=MIB))
        until(lambda: application.heard, what="one of them is hung up on")
    until(lambda: options.arriving.used == 0, what="all of it is given back")


def test_complete_message_releases_its_memory(url: str, options: ServerConfig, application: Application) -> None:
    with opened(url) as sock:
        sock.sendall(frame(b"x" * 1000, announced=2000))
        until(lambda: options.arriving.used > 0)
        sock.sendall(b"x" * 1000)
        until(lambda: application.heard)
        assert application.heard[0]["text"] == "x" * 2000
        assert options.arriving.used == 0


@pytest.fixture
def patient_url(application: Application) -> Iterator[str]:
    made = serving.make_config(
        with_lifespan(application), max_head_bytes=65_536, max_body=MIB, head_timeout_s=5, grace_s=1
    )
    with serving.ServerThread(made) as running:
        yield running.url


def tiny(opcode: int, data: bytes = b"") -> bytes:
    return bytes([opcode, 0x80 | len(data)]) + bytes(4) + data


@pytest.mark.parametrize("part", [b"", b"ab"])
def test_message_of_many_frames_blocks_no_other_connection(
    part: bytes, patient_url: str, application: Application
) -> None:
    with opened(patient_url) as sock, opened(patient_url) as other:
        count = 20_000
        sock.sendall(tiny(0x01, b"x") + tiny(0x00, part) * count)
        other.sendall(frame(b"hi"))
        until(lambda: application.heard)
        assert application.heard[0]["text"] == "hi"
        sock.sendall(tiny(0x80, b"y"))
        until(lambda: len(application.heard) == 2)
        assert application.heard[1]["text"] == "x" + part.decode() * count + "y"


def test_only_the_last_of_many_pings_is_answered(patient_url: str, application: Application) -> None:
    # With a smaller buffer the system sends tiny parts, for more than a minute.
    with opened(patient_url, MIB // 4) as sock:
        sock.sendall(frame(b"hi"))
        until(lambda: application.heard)
        time.sleep(0.2)  # the sent bytes fill all buffers
        sock.sendall(tiny(0x89, b"no") * 1000 + tiny(0x89, b"last"))
        found = read_until(sock, bytes([0x8A, 4]) + b"last")
    assert found.count(bytes([0x8A, 2]) + b"no") < 1000


@pytest.mark.parametrize("header", [b"x-a: " + b"b" * 9_000, b"content-length: 5"])
def test_a_handshake_that_the_library_refuses_is_not_left_open(header: bytes, patient_url: str) -> None:
    with connect(patient_url) as sock:
        sock.sendall(HANDSHAKE[:-2] + header + b"\r\n\r\n")
        answer = read_all(sock)
    assert b" 101 " not in answer


def test_handled_message_is_not_kept(patient_url: str, application: Application) -> None:
    with opened(patient_url) as sock:
        tracemalloc.start()
        try:
            sock.sendall(frame(b"x" * (MIB - 1)))
            until(lambda: application.heard)
            # The text itself and the response remain. The received bytes are released.
            until(lambda: _traced(MIB - 1) <= 1, what="all but the text is given back")
        finally:
            tracemalloc.stop()


def _traced(size: int) -> int:
    """Return the number of used memory blocks of about this size."""
    return sum(size <= trace.size < size + 1000 for trace in tracemalloc.take_snapshot().traces)
