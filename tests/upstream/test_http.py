from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from gateway.core.errors import (
    InvalidRequest,
    UpstreamBusy,
    UpstreamFault,
    UpstreamNotAccepted,
    UpstreamNotTaken,
    UpstreamProtocolError,
    UpstreamRefused,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from gateway.core.http.request import Outgoing
from gateway.core.http.retry_policy import BreakerPolicy, RetryPolicy
from gateway.upstream.http import HttpUpstream, UpstreamTimeouts, proxy_for, tls_context
from gateway.upstream.retrying import RetryingUpstream
from tests.conftest import StartUpstream, closed_port, full_backlog
from tests.support.scripted import Connection, Script
from tests.support.timing import LIMIT_S, eventually, in_time

LIMITS = UpstreamTimeouts(connect_s=30, first_byte_s=30, between_bytes_s=30)
SHORT = UpstreamTimeouts(connect_s=0.3, first_byte_s=0.3, between_bytes_s=0.3)

OpenUpstream = Callable[[str], HttpUpstream]


@asynccontextmanager
async def upstream_of(
    url: str, limits: UpstreamTimeouts = LIMITS, proxy: str | None = None
) -> AsyncIterator[HttpUpstream]:
    upstream = HttpUpstream("p", f"{url}/v1", limits, proxy=proxy)
    try:
        yield upstream
    finally:
        await upstream.aclose()


def outgoing(url: str, body: bytes = b"{}", method: str = "POST") -> Outgoing:
    return Outgoing(method, f"{url}/v1/x", [(b"x-a", b"1"), (b"x-a", b"2")], body)


async def read(upstream: HttpUpstream, request: Outgoing) -> tuple[int, bytes]:
    async with upstream.send(request) as reply:
        return reply.status, b"".join([piece async for piece in reply.chunks()])


async def test_response_is_passed_unchanged(byte_server: StartUpstream) -> None:
    server = byte_server(lambda connection: connection.whole(b"body", b"X-Odd-Case: yes", status=b"201 Created"))
    async with upstream_of(server.url) as upstream, upstream.send(outgoing(server.url)) as reply:
        assert reply.status == 201
        assert (b"x-odd-case", b"yes") in list(reply.headers)
        assert b"".join([piece async for piece in reply.chunks()]) == b"body"
    [request] = server.requests
    assert request.body == b"{}"
    assert [value for name, value in request.headers if name == "x-a"] == ["1", "2"]


async def test_only_given_headers_are_sent(byte_server: StartUpstream) -> None:
    server = byte_server(lambda connection: connection.whole(b""))
    async with upstream_of(server.url) as upstream:
        await read(upstream, outgoing(server.url))
        await read(upstream, outgoing(server.url, b"", "GET"))
    names = {name for request in server.requests for name, _ in request.headers}
    assert names <= {"host", "x-a", "content-length", "accept-encoding"}


async def test_calls_that_time_out_waiting_for_a_connection_are_not_at_work() -> None:
    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError), contextlib.closing(writer):
            while await reader.readuntil(b"{}"):
                await asyncio.sleep(0.2)
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

    async with await asyncio.start_server(slow, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        limits = UpstreamTimeouts(connect_s=LIMIT_S, first_byte_s=0.35, between_bytes_s=LIMIT_S)
        upstream, reported = HttpUpstream("p", f"{url}/v1", limits, max_connections=1), list[bool]()
        request = replace(outgoing(url), on_work=lambda *, is_so: reported.append(is_so))
        asked = [asyncio.create_task(read(upstream, request)) for _ in range(4)]
        result = await asyncio.gather(*asked, return_exceptions=True)
        await upstream.aclose()
    # Each waits 0.2 s for the provider, the second another 0.2 s for a connection. The others give up waiting.
    assert result[:2] == [(200, b""), (200, b"")]
    for busy in result[2:]:
        assert isinstance(busy, UpstreamBusy)
        assert not busy.is_providers
        assert not busy.is_retryable
        assert "max_connections" in busy.message
    assert reported == [True, True], "nothing was sent of the others"


async def test_work_is_reported_only_after_a_connection() -> None:
    reported = list[bool]()
    url = f"http://127.0.0.1:{closed_port()}"
    async with upstream_of(url) as upstream:
        with pytest.raises(UpstreamRefused):
            await read(upstream, replace(outgoing(url), on_work=lambda *, is_so: reported.append(is_so)))
    assert reported == []


async def test_compressed_responses_stay_compressed_and_cookies_are_not_kept(byte_server: StartUpstream) -> None:
    server = byte_server(
        lambda connection: connection.whole(b"\x1f\x8bnot really", b"content-encoding: gzip", b"set-cookie: a=b")
    )
    async with upstream_of(server.url) as upstream:
        for _ in range(2):
            assert (await read(upstream, outgoing(server.url)))[1] == b"\x1f\x8bnot really"
    assert all(request.header("cookie") is None for request in server.requests)


async def test_connect_timeout_differs_from_a_silent_provider() -> None:
    with full_backlog() as url:
        async with upstream_of(url, replace(LIMITS, connect_s=0.3)) as upstream:
            with pytest.raises(UpstreamNotAccepted, match=r"timeout_s\.connect"):
                await read(upstream, outgoing(url))


async def test_redirect_is_a_response(byte_server: StartUpstream) -> None:
    server = byte_server(lambda connection: connection.whole(b"", b"location: /elsewhere", status=b"302 Found"))
    async with upstream_of(server.url) as upstream:
        assert (await read(upstream, outgoing(server.url)))[0] == 302
    assert len(server.requests) == 1


async def test_an_encoded_address_is_sent_as_it_is(byte_server: StartUpstream) -> None:
    server = byte_server(lambda connection: connection.whole(b""))
    async with upstream_of(server.url) as upstream:
        await read(upstream, Outgoing("GET", f"{server.url}/v1/a%2Fb%20c%3F?q=%2B+%26&q=1", [], b""))
    assert server.requests[0].path == "/v1/a%2Fb%20c%3F?q=%2B+%26&q=1"


@pytest.mark.parametrize("size", [1, 512 * 1024, 512 * 1024 + 1, 5_000_000])
async def test_a_body_of_any_size_arrives_whole_with_its_length(size: int, byte_server: StartUpstream) -> None:
    server = byte_server(lambda connection: connection.whole(b"ok"))
    body = bytes(index % 251 for index in range(1000)) * (size // 1000 + 1)
    async with upstream_of(server.url) as upstream:
        await read(upstream, outgoing(server.url, body[:size]))
    [request] = server.requests
    assert request.header("content-length") == str(size)
    assert request.header("transfer-encoding") is None
    assert request.body == body[:size]


async def test_line_break_in_a_call_is_an_invalid_request(byte_server: StartUpstream) -> None:
    server = byte_server(lambda connection: connection.whole(b""))
    async with upstream_of(server.url) as inner:
        upstream = RetryingUpstream("p", inner, RetryPolicy(2), BreakerPolicy(1, 60))
        broken = replace(outgoing(server.url), headers=[(b"x-a", b"1\nx-b: 2")])
        with pytest.raises(InvalidRequest, match="header or the address of this call contains a line break"):
            async with upstream.send(broken):
                pass
        assert upstream.opens_in_s is None
    assert server.requests == []


async def test_refused_connection_is_reported() -> None:
    url = f"http://127.0.0.1:{closed_port()}"
    async with upstream_of(url) as upstream:
        with pytest.raises(UpstreamUnreachable) as error:
            await read(upstream, outgoing(url))
    assert "connection refused" in error.value.message
    assert '"p"' in error.value.message


async def test_unresolved_name_is_reported() -> None:
    async with upstream_of("http://no-such-name.invalid") as upstream:
        with pytest.raises(UpstreamUnreachable) as error:
            await read(upstream, outgoing("http://no-such-name.invalid"))
    assert "cannot be resolved" in error.value.message


async def test_plain_server_at_an_https_address_is_reported(byte_server: StartUpstream) -> None:
    server = byte_server(lambda connection: connection.whole(b""))
    url = server.url.replace("http:", "https:")
    async with upstream_of(url, SHORT) as upstream:
        with pytest.raises(UpstreamFault):
            await read(upstream, outgoing(url))


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", UpstreamUnreachable),
        (b"nonsense\r\n\r\n", UpstreamProtocolError),
        (b"HTTP/1.1 200 OK\r\nx: " + b"a" * 100_000 + b"\r\n\r\n", UpstreamProtocolError),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nabc", UpstreamProtocolError),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nabc", UpstreamProtocolError),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\nabc", UpstreamProtocolError),
    ],
)
async def test_invalid_responses_are_reported(data: bytes, kind: type[Exception], byte_server: StartUpstream) -> None:
    server = byte_server(lambda connection: connection.send(data))
    async with upstream_of(server.url) as upstream:
        with pytest.raises(kind) as error:
            await read(upstream, outgoing(server.url))
    assert "0x" not in str(error.value)


async def test_reset_in_the_middle_is_reported(byte_server: StartUpstream) -> None:
    def script(connection: Connection) -> None:
        connection.send(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nabc")
        time.sleep(0.05)
        connection.reset()

    server = byte_server(script)
    async with upstream_of(server.url) as upstream:
        with pytest.raises(UpstreamFault):
            await read(upstream, outgoing(server.url))


@pytest.mark.parametrize(
    ("head", "sent"),
    [
        (b"content-length: 10", b"abc"),
        (b"transfer-encoding: chunked", b"3\r\nabc\r\n"),
    ],
)
async def test_data_before_a_break_is_read_before_the_error(
    head: bytes, sent: bytes, byte_server: StartUpstream
) -> None:
    server = byte_server(lambda connection: connection.send(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\n" + sent))
    async with upstream_of(server.url) as upstream, upstream.send(outgoing(server.url)) as reply:
        answer = cast(Any, reply).response
        await eventually(lambda: answer._error, "the break is known")
        pieces = reply.chunks()
        assert await anext(pieces) == b"abc"
        with pytest.raises(UpstreamProtocolError):
            await anext(pieces)


def nonsense_after(moment: threading.Event) -> Script:
    """Send a valid chunk, and then invalid data."""

    def script(connection: Connection) -> None:
        connection.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n")
        moment.wait(LIMIT_S)
        connection.send(b"no size\r\n")
        connection.wait_until_left()

    return script


async def test_response_that_becomes_invalid_fails_at_once(byte_server: StartUpstream) -> None:
    is_read = threading.Event()
    server = byte_server(nonsense_after(is_read))
    async with upstream_of(server.url) as upstream, upstream.send(outgoing(server.url)) as reply:
        pieces = reply.chunks()
        assert await anext(pieces) == b"abc"
        is_read.set()
        with in_time(), pytest.raises(UpstreamProtocolError, match="broke off"):  # LIMITS would allow twice as much
            await anext(pieces)


async def test_response_that_becomes_invalid_while_unread_is_a_provider_error(
    byte_server: StartUpstream,
) -> None:
    has_begun = threading.Event()
    server = byte_server(nonsense_after(has_begun))
    async with upstream_of(server.url) as upstream, upstream.send(outgoing(server.url)) as reply:
        has_begun.set()
        connection = cast(Any, reply).response._connection
        await eventually(lambda: connection.is_lost, "it is hung up on")
        pieces = reply.chunks()
        assert await anext(pieces) == b"abc"
        with pytest.raises(UpstreamProtocolError):
            await anext(pieces)


async def test_response_that_does_not_begin_times_out(byte_server: StartUpstream) -> None:
    def script(connection: Connection) -> None:
        connection.wait_until_left()

    server = byte_server(script)
    with in_time(at_least=0.25):
        async with upstream_of(server.url, SHORT) as upstream:
            with pytest.raises(UpstreamTimeout):
                await read(upstream, outgoing(server.url))


async def test_unread_request_differs_from_a_missing_response() -> None:
    left = asyncio.Event()

    async def refuse_to_read(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await left.wait()
        writer.close()

    async with await asyncio.start_server(refuse_to_read, "127.0.0.1", 0, limit=1024) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        request = outgoing(url, b"x" * (64 << 20))
        async with upstream_of(url, SHORT) as upstream:
            with in_time(at_least=0.25), pytest.raises(UpstreamNotTaken, match="the whole request"):
                await read(upstream, request)
        left.set()


async def test_response_that_stops_times_out(byte_server: StartUpstream) -> None:
    def script(connection: Connection) -> None:
        connection.send(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nabc")
        connection.wait_until_left()

    server = byte_server(script)
    limits = UpstreamTimeouts(connect_s=30, first_byte_s=30, between_bytes_s=0.3)
    async with upstream_of(server.url, limits) as upstream, upstream.send(outgoing(server.url)) as reply:
        pieces = reply.chunks()
        assert await anext(pieces) == b"abc"
        with in_time(), pytest.raises(UpstreamTimeout):
            await anext(pieces)


async def test_response_left_in_the_middle_leaves_no_timer(byte_server: StartUpstream) -> None:
    def script(connection: Connection) -> None:
        connection.send(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nabc")
        connection.wait_until_left()

    def timers() -> list[str]:
        scheduled = cast(Any, asyncio.get_running_loop())._scheduled
        return [repr(timer) for timer in scheduled if not timer.cancelled() and "ReadTimeout" in repr(timer)]

    server = byte_server(script)
    async with upstream_of(server.url) as upstream:
        async with upstream.send(outgoing(server.url)) as reply:
            assert await anext(reply.chunks()) == b"abc"
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(reply.chunks()), 0.05)
            assert len(timers()) == 1
        assert timers() == []


async def test_continuous_response_may_take_longer_than_any_limit(byte_server: StartUpstream) -> None:
    def script(connection: Connection) -> None:
        connection.send(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n")
        for _ in range(10):
            time.sleep(0.12)
            connection.send(b"x")

    server = byte_server(script)
    async with upstream_of(server.url, UpstreamTimeouts(connect_s=1, first_byte_s=1, between_bytes_s=1)) as upstream:
        assert (await read(upstream, outgoing(server.url)))[1] == b"x" * 10


async def test_slow_consumer_does_not_cause_a_timeout(byte_server: StartUpstream) -> None:
    def script(connection: Connection) -> None:
        connection.send(b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nabc")
        time.sleep(0.1)
        connection.send(b"def")

    server = byte_server(script)
    got = b""
    limits = UpstreamTimeouts(connect_s=30, first_byte_s=30, between_bytes_s=1)
    async with upstream_of(server.url, limits) as upstream, upstream.send(outgoing(server.url)) as reply:
        async for piece in reply.chunks():
            if not got:
                await asyncio.sleep(1.3)
            got += piece
    assert got == b"abcdef"


async def test_leaving_in_the_middle_closes_the_connection(byte_server: StartUpstream) -> None:
    left: list[bool] = []

    def script(connection: Connection) -> None:
        connection.send(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nabc")
        left.append(connection.wait_until_left())

    server = byte_server(script)
    async with upstream_of(server.url) as upstream:
        async with upstream.send(outgoing(server.url)) as reply:
            async for _ in reply.chunks():
                break
        await eventually(lambda: left)
        assert left == [True]


async def test_a_connection_is_used_again(byte_server: StartUpstream) -> None:
    def script(connection: Connection) -> None:
        for _ in range(3):
            connection.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
            if not connection.sock.recv(65536):
                return

    server = byte_server(script)
    async with upstream_of(server.url) as upstream:
        for _ in range(3):
            assert (await read(upstream, outgoing(server.url)))[1] == b"ok"
    assert server.connections == 1


async def test_request_goes_through_a_proxy(byte_server: StartUpstream) -> None:
    proxy = byte_server(lambda connection: connection.whole(b"by proxy"))
    async with upstream_of("http://provider.invalid", proxy=proxy.url) as upstream:
        assert await read(upstream, outgoing("http://provider.invalid")) == (200, b"by proxy")
    assert proxy.requests[0].path == "http://provider.invalid/v1/x"


def test_the_proxy_is_the_one_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert proxy_for("https://api.example/v1") is None
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", "localhost,.internal")
    assert proxy_for("https://api.example/v1") == "http://proxy:3128"
    assert proxy_for("http://api.example/v1") is None
    monkeypatch.setenv("http_proxy", "other:3128")
    assert proxy_for("http://api.example/v1") == "http://other:3128"
    assert proxy_for("https://host.internal/v1") is None
    assert proxy_for("https://localhost:8080/v1") is None


@pytest.mark.parametrize(
    ("url", "is_direct"),
    [
        ("http://10.96.0.7:8000/v1", True),
        ("http://11.0.0.7:8000/v1", False),
        ("http://192.168.7.1/v1", True),
        ("http://[fd00::7]:8000/v1", True),
        ("http://[fe80::7]/v1", False),
        ("http://ten.example/v1", False),
    ],
)
def test_networks_of_no_proxy_are_called_directly(
    monkeypatch: pytest.MonkeyPatch, url: str, *, is_direct: bool
) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", "10.0.0.0/8, 192.168.7.9/24,fd00::/8,no/network,other.example")
    assert (proxy_for(url) is None) is is_direct


@pytest.mark.parametrize(
    "proxy", ["socks5://me:secret@proxy:1080", "http://me:secret@proxy:99999", "http://", "http://proxy:a"]
)
async def test_invalid_proxy_is_reported_by_each_call(proxy: str) -> None:
    async with upstream_of("http://provider.invalid", proxy=proxy) as upstream:
        with pytest.raises(UpstreamRefused, match="must be the address of an HTTP proxy") as error:
            await read(upstream, outgoing("http://provider.invalid"))
    assert "secret" not in error.value.message


def test_tls_is_checked_unless_said_otherwise(tmp_path: Path) -> None:
    assert tls_context(verify=True, ca_file=None) is True
    assert tls_context(verify=False, ca_file=None) is False
    with pytest.raises(OSError):
        tls_context(verify=True, ca_file=str(tmp_path / "nothing.pem"))
    authorities = ssl.get_default_verify_paths().cafile
    if authorities is not None:
        context = tls_context(verify=True, ca_file=authorities)
        assert isinstance(context, ssl.SSLContext)
        assert context.verify_mode is ssl.CERT_REQUIRED
