"""Connections to a vanished host are given up; connections to a busy host are not."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.core.errors import UpstreamHungUp, UpstreamProtocolError, UpstreamTimeout, UpstreamUnreachable
from gateway.core.http.request import Outgoing
from gateway.upstream import keepalive, origin
from gateway.upstream.http import HttpUpstream, UpstreamTimeouts
from gateway.upstream.keepalive import KeepaliveSettings
from tests.support.muting import mute, needs_linux
from tests.support.timing import LIMIT_S, eventually, in_time
from tests.upstream.answering import answering, ok

#: longer than any test: a task that waits for the limit of the call itself would time out
LIMITS = UpstreamTimeouts(connect_s=60, first_byte_s=60, between_bytes_s=60)
LARGE = bytes(16 * 1024 * 1024)


@pytest.fixture
def sent_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give up after two retransmissions, and check often."""
    monkeypatch.setattr(keepalive, "_MOST_RETRANSMISSIONS", 2)
    monkeypatch.setattr(origin, "_CHECK_S", 0.05)


@contextlib.asynccontextmanager
async def upstream_of(url: str, limits: UpstreamTimeouts = LIMITS) -> AsyncIterator[HttpUpstream]:
    upstream = HttpUpstream("p", url, limits)
    yield upstream
    await upstream.aclose()


async def ask(upstream: HttpUpstream, url: str, method: str = "POST", body: bytes = b"") -> bytes:
    async with upstream.send(Outgoing(method, f"{url}/v1/x", [], body)) as reply:
        return b"".join([piece async for piece in reply.chunks()])


@needs_linux
@pytest.mark.usefixtures("sent_twice")
async def test_dead_idle_connection_is_closed_with_the_other_idle_ones() -> None:
    async with answering(ok(), ok(), ok()) as server, upstream_of(server.url) as upstream:
        await asyncio.gather(ask(upstream, server.url), ask(upstream, server.url))
        for writer in server.writers:
            mute(writer.get_extra_info("socket"))
        with in_time(), pytest.raises(UpstreamHungUp, match="does not deliver data"):
            await ask(upstream, server.url)
        assert await ask(upstream, server.url) == b"ok"
        assert server.connections == 3


@needs_linux
@pytest.mark.usefixtures("sent_twice")
async def test_idempotent_request_is_sent_over_a_new_connection() -> None:
    async with answering(ok(b"old"), ok(b"new")) as server, upstream_of(server.url) as upstream:
        await ask(upstream, server.url)
        mute(server.writers[0].get_extra_info("socket"))
        with in_time():
            assert await ask(upstream, server.url, "GET") == b"new"


@contextlib.asynccontextmanager
async def reading_heads(go_on: asyncio.Event, *, is_muted: bool) -> AsyncIterator[str]:
    """Start a server that reads the head of a request, and its body when it may continue; return its address."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            await reader.readuntil(b"\r\n\r\n")
            if is_muted:
                mute(writer.get_extra_info("socket"))
            await go_on.wait()
            if not is_muted:
                await reader.readexactly(len(LARGE))
                writer.write(ok())

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        go_on.set()


@needs_linux
@pytest.mark.usefixtures("sent_twice")
async def test_vanished_host_fails_a_request_in_progress() -> None:
    async with reading_heads(asyncio.Event(), is_muted=True) as url, upstream_of(url) as upstream:
        with in_time(), pytest.raises(UpstreamUnreachable, match="does not deliver data") as raised:
            await ask(upstream, url, body=LARGE)
    assert not isinstance(raised.value, UpstreamHungUp)


@needs_linux
@pytest.mark.usefixtures("sent_twice")
async def test_busy_host_that_reads_nothing_is_waited_for() -> None:
    go_on = asyncio.Event()
    async with reading_heads(go_on, is_muted=False) as url, upstream_of(url) as upstream:
        asking = asyncio.create_task(ask(upstream, url, body=LARGE))
        await eventually(lambda: asked_for_room(upstream) > keepalive._MOST_RETRANSMISSIONS, "the system asks for room")
        assert not asking.done()
        go_on.set()
        assert await asyncio.wait_for(asking, LIMIT_S) == b"ok"


def asked_for_room(upstream: HttpUpstream) -> int:
    """Return how often the system has sent a probe since the other side had no more room."""
    backoff = 4
    return max(
        (sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 5)[backoff] for sock in sockets_of(upstream)), default=0
    )


def sockets_of(upstream: HttpUpstream) -> list[socket.socket]:
    transports = [one._transport for one in upstream._origin._all]
    return [one.get_extra_info("socket") for one in transports if one is not None]


@needs_linux
@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_abandoned_request_is_not_delivered_later(is_cancelled: bool) -> None:
    async with answering(ok()) as server:
        limits = LIMITS if is_cancelled else replace(LIMITS, first_byte_s=0.2)
        async with upstream_of(server.url, limits) as upstream:
            await ask(upstream, server.url)
            mute(server.writers[0].get_extra_info("socket"))
            [sock] = sockets_of(upstream)
            port = sock.getsockname()[1]
            asking = asyncio.create_task(ask(upstream, server.url))
            await eventually(lambda: unacknowledged(port), "it is sent")
            if is_cancelled:
                asking.cancel()
            with in_time(), pytest.raises(asyncio.CancelledError if is_cancelled else UpstreamTimeout):
                await asking
            await eventually(lambda: not upstream._origin._all, "the connection has ended")
            assert not unacknowledged(port)


def unacknowledged(port: int) -> int:
    """Return the bytes from this port that the system still has to deliver."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(int(line[4].split(":")[0], 16) for line in lines if line[1].endswith(f":{port:04X}"))


@needs_linux
@pytest.mark.parametrize(
    ("received", "error"),
    [
        (b"", UpstreamUnreachable),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n", UpstreamProtocolError),
        (b"HTTP/1.1 200 OK\r\n\r\n", UpstreamProtocolError),  # this response ends with its connection
    ],
)
async def test_vanished_host_is_detected_by_probes(
    received: bytes, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(origin, "_PROBES", KeepaliveSettings(after_s=1, every_s=1, times=1))
    async with answering(received) as server, upstream_of(server.url) as upstream:
        asking = asyncio.create_task(ask(upstream, server.url))
        await eventually(lambda: server.requests, "the request is there")
        mute(server.writers[0].get_extra_info("socket"))
        with in_time(), pytest.raises(error):
            await asking


async def test_system_sends_keepalive_probes() -> None:
    async with answering(ok()) as server, upstream_of(server.url) as upstream:
        await ask(upstream, server.url)
        [sock] = sockets_of(upstream)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


@needs_linux
def test_other_systems_send_probes_but_report_no_unacknowledged_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(socket, "TCP_KEEPALIVE", socket.TCP_KEEPIDLE, raising=False)
    with socket.socket() as sock:
        KeepaliveSettings(after_s=7, every_s=8, times=9).begin(sock)
        assert [sock.getsockopt(socket.IPPROTO_TCP, one) for one in (4, 5, 6)] == [7, 8, 9]
        assert not keepalive.is_unacknowledged(sock)
