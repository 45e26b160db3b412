"""The connection pool of one host: reuse, limits, and closing."""

from __future__ import annotations

import asyncio
import base64
import os
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.core.errors import (
    InvalidRequest,
    UpstreamHungUp,
    UpstreamNotAccepted,
    UpstreamProtocolError,
    UpstreamUnreachable,
)
from gateway.core.http.request import Outgoing
from gateway.upstream import origin
from gateway.upstream.connection import Connection
from gateway.upstream.http import HttpUpstream, UpstreamTimeouts
from gateway.upstream.origin import HostPort, NotConnected, Origin
from tests.conftest import closed_port
from tests.support.timing import LIMIT_S, eventually
from tests.upstream.answering import answering, ok

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
LIMITS = UpstreamTimeouts(connect_s=30, first_byte_s=30, between_bytes_s=30)


@asynccontextmanager
async def origin_of(url: str, most: int = 10) -> AsyncIterator[Origin]:
    made = Origin(url, connect_s=LIMIT_S, wait_s=LIMIT_S, most=most, tls=True, proxy=None)
    yield made
    await made.aclose()


@asynccontextmanager
async def upstream_of(url: str, proxy: str | None = None) -> AsyncIterator[HttpUpstream]:
    upstream = HttpUpstream("p", url, LIMITS, proxy=proxy)
    yield upstream
    await upstream.aclose()


async def ask(upstream: HttpUpstream, url: str, method: str = "POST", *headers: tuple[bytes, bytes]) -> bytes:
    async with upstream.send(Outgoing(method, f"{url}/v1/x", list(headers), b"")) as reply:
        return b"".join([piece async for piece in reply.chunks()])


async def used(connection: Connection) -> None:
    answer = await connection.ask(GET)
    while not answer.is_complete:
        await answer.wait_for_data()
        answer.take()


@pytest.mark.parametrize(
    ("url", "host", "port", "netloc", "authority"),
    [
        ("http://a.example/v1", "a.example", 80, b"a.example", b"a.example:80"),
        ("https://a.example./v1", "a.example", 443, b"a.example.", b"a.example:443"),
        ("https://a.example:8443/v1", "a.example", 8443, b"a.example:8443", b"a.example:8443"),
        ("http://[::1]:8080/v1", "::1", 8080, b"[::1]:8080", b"[::1]:8080"),
        (
            "http://bücher.example/v1",
            "xn--bcher-kva.example",
            80,
            b"xn--bcher-kva.example",
            b"xn--bcher-kva.example:80",
        ),
    ],
)
def test_host_is_named_as_in_its_address(url: str, host: str, port: int, netloc: bytes, authority: bytes) -> None:
    place = HostPort(url)
    assert (place.host, place.port, place.netloc, place.authority) == (host, port, netloc, authority)
    assert place.is_tls is url.startswith("https:")
    assert place.credential == b""


async def test_certificate_authorities_are_read_once_by_the_first_tls_connection() -> None:
    made = origin._made_context
    made.cache_clear()
    async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0) as closing:
        address = f"127.0.0.1:{closing.sockets[0].getsockname()[1]}"
        async with origin_of(f"https://{address}") as first, origin_of(f"https://{address}") as second:
            assert made.cache_info().misses == 0
            refused = await asyncio.gather(first.take(), second.take(), return_exceptions=True)
    assert list(map(type, refused)) == [NotConnected, NotConnected]  # the server speaks no TLS
    assert made.cache_info().misses == 1


async def test_call_beyond_the_limit_waits_for_a_free_connection() -> None:
    async with answering(ok(), ok()) as server, origin_of(server.url, most=2) as place:
        first, second = await place.take(), await place.take()
        third = asyncio.ensure_future(place.take())
        await asyncio.sleep(0.05)
        assert not third.done()
        await used(first)
        place.give(first)
        assert await asyncio.wait_for(third, LIMIT_S) is first
        place.give(second)
        place.give(first)


async def test_place_of_a_timed_out_call_is_free_for_others() -> None:
    async with answering(ok()) as server, origin_of(server.url, most=1) as place:
        first = await place.take()
        given_up = asyncio.ensure_future(place.take())
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        place.give(first)
        place.give(await asyncio.wait_for(place.take(), LIMIT_S))


@pytest.mark.parametrize("host", ["a..b", "b\u00fc..b", "x" * 70, "b\u00fc" * 60])
async def test_invalid_name_cannot_be_resolved(host: str) -> None:
    async with upstream_of(f"http://{host}") as upstream:
        with pytest.raises(UpstreamUnreachable, match="cannot be resolved"):
            await ask(upstream, f"http://{host}")


async def test_addresses_are_cached_for_a_while_or_until_a_connection_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = list[object]()
    look_up = socket.getaddrinfo

    def counted(host: str, *args: Any, **options: Any) -> Any:
        asked.append(host)
        return look_up(host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", counted)
    async with answering(ok(), ok()) as server, origin_of(server.url) as place:
        taken = [await place.take(), await place.take()]
        assert len(asked) == 1
        for connection in taken:
            place.give(connection)
    async with origin_of("http://127.0.0.1:9") as place:
        for _ in range(2):
            with pytest.raises(NotConnected):
                await place.take()
    assert len(asked) == 3


async def test_all_calls_share_one_look_up_that_survives_cancellation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, answer = list[object](), threading.Event()
    look_up = socket.getaddrinfo

    def slow(host: str, *args: Any, **options: Any) -> Any:
        asked.append(host)
        answer.wait(LIMIT_S)
        return look_up(host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    async with answering() as server, origin_of(server.url) as place:
        waiting = [asyncio.create_task(place.take()) for _ in range(5)]
        await eventually(lambda: asked, "it is asked for")
        waiting[0].cancel()
        await asyncio.wait({waiting[0]})
        answer.set()
        for connection in await asyncio.gather(*waiting[1:]):
            place.give(connection)
        assert len(asked) == 1


async def test_unresolvable_names_do_not_delay_others(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = threading.Event()
    look_up = socket.getaddrinfo

    def slow(host: str, *args: Any, **options: Any) -> Any:
        if host.startswith("mute"):
            answer.wait(LIMIT_S)
            raise socket.gaierror(socket.EAI_AGAIN, "no answer")
        return look_up(host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    limits = UpstreamTimeouts(connect_s=0.5, first_byte_s=30, between_bytes_s=30)
    mute = [HttpUpstream("p", f"http://mute{number}.example", limits) for number in range(40)]
    async with answering(ok()) as server, upstream_of(server.url) as upstream:
        waiting = [asyncio.create_task(ask(one, "http://mute.example")) for one in mute]
        await asyncio.sleep(0)
        assert await asyncio.wait_for(ask(upstream, server.url), LIMIT_S) == b"ok"
        for error in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(error, UpstreamNotAccepted)
            assert "not resolved within 0.5 s" in error.message
    for one in mute:
        await one.aclose()
    answer.set()


@pytest.mark.parametrize("is_mute", [False, True])
async def test_known_addresses_are_used_while_a_look_up_hangs(is_mute: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origin, "_MAX_WAIT_S", 0.05)
    monkeypatch.setattr(origin, "_ADDRESSES_S", 0.0)

    answer = threading.Event()

    def away(*_: object, **__: object) -> Any:
        if is_mute:
            answer.wait(LIMIT_S)
        raise socket.gaierror(socket.EAI_AGAIN, "no answer")

    async with answering() as server, origin_of(server.url) as place:
        place.give(await place.take())
        monkeypatch.setattr(socket, "getaddrinfo", away)
        for _ in range(2):
            place.give(await place.take())
        assert server.connections == 3
    answer.set()


async def test_address_that_accepted_is_tried_first(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, tried = asyncio.get_running_loop(), list[object]()
    connect = loop.sock_connect

    async def noted(sock: socket.socket, address: Any) -> None:
        tried.append(address[0])
        await connect(sock, address)

    async with answering() as server, origin_of(server.url) as place:

        def both(*_: object, **__: object) -> Any:
            of = socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, ""
            return [(*of, ("127.0.0.2", closed_port())), (*of, ("127.0.0.1", server.port))]

        monkeypatch.setattr(socket, "getaddrinfo", both)
        monkeypatch.setattr(loop, "sock_connect", noted)
        for _ in range(2):
            place.give(await place.take())
    assert tried == ["127.0.0.2", "127.0.0.1", "127.0.0.1"]


async def test_failed_connection_frees_its_place() -> None:
    async with origin_of("http://127.0.0.1:9", most=1) as place:
        for _ in range(3):
            with pytest.raises(NotConnected):
                await asyncio.wait_for(place.take(), LIMIT_S)


async def test_connection_closed_by_the_server_is_not_reused() -> None:
    async with answering(ok(), ok()) as server, origin_of(server.url) as place:
        first = await place.take()
        await used(first)
        place.give(first)
        server.writers[0].close()
        await eventually(lambda: first.is_lost, "it is noticed")
        assert not place._idle
        second = await place.take()
        assert second is not first
        place.give(second)


async def test_just_closed_connection_is_not_reused() -> None:
    async with answering(ok(), ok()) as server, upstream_of(server.url) as upstream:
        assert await ask(upstream, server.url) == b"ok"
        upstream._origin._idle[0].data_received(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
        assert await ask(upstream, server.url) == b"ok"
        assert server.connections == 2


@pytest.mark.parametrize(
    "let_through",
    [
        b"HTTP/1.1 200 Connection established\r\n\r\n",
        b"HTTP/1.0 200 Connection established\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n",
    ],
)
async def test_tunnel_begins_after_the_head(let_through: bytes) -> None:
    """A connection that is aborted in its handshake leaves nothing open."""
    hello = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(let_through)
        if await reader.read(1) == b"\x16":  # TLS, handshake
            hello.set()
        await reader.read()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        proxy = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        place = Origin("https://provider.invalid", connect_s=LIMIT_S, wait_s=LIMIT_S, most=1, tls=True, proxy=proxy)
        taking = asyncio.ensure_future(place.take())
        await asyncio.wait_for(hello.wait(), LIMIT_S)
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        await asyncio.sleep(0)
        assert not place._all
        assert place._limit.try_take()
        await place.aclose()


async def test_long_idle_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origin, "_KEEPALIVE_S", 0.1)
    async with answering(ok(), ok()) as server, origin_of(server.url) as place:
        first, second = await place.take(), await place.take()
        await used(first)
        place.give(first)
        await asyncio.sleep(0.06)
        await used(second)
        place.give(second)
        await eventually(lambda: first.is_lost, "the first is old")
        await eventually(lambda: second.is_lost, "and so is the second")
        assert not place._all


@pytest.mark.parametrize("length", [b"content-length: 10\r\n", b""])
async def test_aclose_ends_used_connections(length: bytes) -> None:
    async with answering(b"HTTP/1.1 200 OK\r\n" + length + b"\r\nabc") as server:
        upstream = HttpUpstream("p", server.url, LIMITS)
        async with upstream.send(Outgoing("POST", f"{server.url}/", [], b"")) as reply:
            pieces = reply.chunks()
            assert await anext(pieces) == b"abc"
            await upstream.aclose()
            with pytest.raises(UpstreamProtocolError):
                await anext(pieces)
        await upstream.aclose()


@pytest.mark.parametrize(
    ("said", "is_kept"),
    [
        (b"keep-alive: timeout=60, max=100", True),
        (b"Keep-Alive: max=5, timeout=2", True),
        (b"keep-alive: timeout=1", False),
        (b"keep-alive: timeout=0", False),
        (b"keep-alive: max=1", True),
        (b"keep-alive: idletimeout=0", True),
    ],
)
async def test_connection_is_kept_no_longer_than_the_server_keeps_it(said: bytes, is_kept: bool) -> None:
    async with answering(ok(b"", said), ok(b"", said)) as server, origin_of(server.url) as place:
        first = await place.take()
        await used(first)
        place.give(first)
        assert (first in place._idle) is is_kept
        if is_kept and b"=2" in said:
            await asyncio.sleep(1.1)
            second = await place.take()
            assert second is not first
            place.give(second)


async def test_unrequested_data_is_never_passed_on() -> None:
    async with answering(ok(), ok(b"mine")) as server, upstream_of(server.url) as upstream:
        await ask(upstream, server.url)
        os.write(
            server.writers[0].get_extra_info("socket").fileno(), ok(b"evil")
        )  # in this turn, so it is not read yet
        assert await ask(upstream, server.url) == b"mine"
        assert server.connections == 2


async def test_dead_reused_connection_is_no_provider_failure_and_closes_idle_ones() -> None:
    async with answering(ok(), ok(), None, ok(b"new")) as server, upstream_of(server.url) as upstream:
        taken = [await upstream._origin.take() for _ in range(2)]
        for connection in taken:
            await used(connection)
        for connection in taken:
            upstream.release(connection)
        with pytest.raises(UpstreamHungUp) as raised:
            await ask(upstream, server.url)
        assert not raised.value.is_providers
        assert not raised.value.is_retryable, "it may have been read"
        assert not upstream._origin._idle
        assert await ask(upstream, server.url) == b"new"


async def test_unsent_request_goes_over_another_connection() -> None:
    async with answering(ok(), ok(b"new")) as server, upstream_of(server.url) as upstream:
        await ask(upstream, server.url)
        [kept] = upstream._origin._idle
        place, take = upstream._origin, upstream._origin.take

        async def ending(*, fresh: bool = False) -> Connection:
            connection = await take(fresh=fresh)
            if connection is kept:
                connection.abort()
            return connection

        place.take = ending  # type: ignore[method-assign]
        assert await ask(upstream, server.url) == b"new"
        assert len(server.requests) == 2


async def test_idempotent_request_is_retried_on_a_dead_connection() -> None:
    async with answering(ok(), None, ok(b"again"), ok(), None) as server, upstream_of(server.url) as upstream:
        assert await ask(upstream, server.url, "GET") == b"ok"
        assert await ask(upstream, server.url, "GET") == b"again"
        assert await ask(upstream, server.url) == b"ok"
        with pytest.raises(UpstreamUnreachable, match="without a response"):
            await ask(upstream, server.url)
        assert len(server.requests) == 5


async def test_user_in_an_address_is_sent_unless_the_caller_has_a_credential() -> None:
    async with answering(ok(), ok()) as server:
        url = server.url.replace("://", "://me:p%40ss@")
        async with upstream_of(url) as upstream:
            await ask(upstream, url)
            await ask(upstream, url, "POST", (b"authorization", b"Bearer k"))
        basic = base64.b64encode(b"me:p@ss")
        assert b"\r\nauthorization: Basic " + basic + b"\r\n" in server.requests[0]
        assert b"Basic" not in server.requests[1]
        assert all(request.startswith(b"POST /v1/x HTTP/1.1\r\nhost: 127.0.0.1:") for request in server.requests)


async def test_configured_host_header_is_sent_alone() -> None:
    async with answering(ok()) as server, upstream_of(server.url) as upstream:
        await ask(upstream, server.url, "POST", (b"host", b"inner.example"))
        assert server.requests[0].lower().count(b"\r\nhost:") == 1
        assert b"\r\nhost: inner.example\r\n" in server.requests[0]
        assert b"\r\ncontent-length: 0\r\n" in server.requests[0]


@pytest.mark.parametrize(
    ("behind", "path"), [("", b"/"), ("/", b"/"), ("?x=/1", b"/?x=/1"), ("/a?x", b"/a?x"), ("/a%2Fb//c", b"/a%2Fb//c")]
)
@pytest.mark.parametrize("is_by_proxy", [False, True])
async def test_an_address_may_end_with_its_host(behind: str, path: bytes, is_by_proxy: bool) -> None:
    async with answering(ok()) as server:
        url = "http://me:p%40ss@provider.invalid:81" if is_by_proxy else server.url.replace("://", "://me:p%40ss@")
        async with upstream_of(url, server.url if is_by_proxy else None) as upstream:
            async with upstream.send(Outgoing("POST", url + behind, [], b"")) as reply:
                assert reply.status == 200
        whole = b"http://provider.invalid:81" + path if is_by_proxy else path
        # User and password are sent in a header, which a proxy does not log.
        assert server.requests[0].startswith(b"POST " + whole + b" HTTP/1.1\r\nhost: ")


@pytest.mark.parametrize("bad", [b"a\r\nx-evil: 1", b"a\nb", b"a\rb", b"a\0b"])
async def test_line_breaks_are_not_sent(bad: bytes) -> None:
    async with answering(ok()) as server, upstream_of(server.url) as upstream:
        with pytest.raises(InvalidRequest):
            await ask(upstream, server.url, "POST", (b"x-a", bad))
        with pytest.raises(InvalidRequest):
            await ask(upstream, server.url, "POST", (b"x-a" + bad, b"1"))
        assert server.connections == 0


async def test_a_proxy_gets_the_whole_address_and_its_own_credential() -> None:
    async with answering(ok()) as server:
        proxy = server.url.replace("://", "://me:secret@")
        async with upstream_of("http://provider.invalid", proxy) as upstream:
            assert await ask(upstream, "http://provider.invalid") == b"ok"
        [request] = server.requests
        assert request.startswith(b"POST http://provider.invalid/v1/x HTTP/1.1\r\nhost: provider.invalid\r\n")
        assert b"\r\nproxy-authorization: Basic " + base64.b64encode(b"me:secret") + b"\r\n" in request
