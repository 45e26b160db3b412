"""Parsing of the bytes received over one HTTP/1.1 connection."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import socket
import weakref
from collections.abc import AsyncIterator, Callable

import pytest

from gateway.upstream.connection import BrokenOff, Connection, HttpResponse, NoResponse, NotHttp
from gateway.upstream.read_timeout import ReadTimeout
from tests.support.timing import LIMIT_S, eventually
from tests.upstream.answering import Answering, answering, ok

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@contextlib.asynccontextmanager
async def connected(server: Answering | asyncio.Server) -> AsyncIterator[Connection]:
    ended = asyncio.Event()
    port = server.port if isinstance(server, Answering) else server.sockets[0].getsockname()[1]
    _, connection = await asyncio.get_running_loop().create_connection(
        lambda: Connection(lambda _: ended.set()), "127.0.0.1", port
    )
    try:
        yield connection
    finally:
        connection.abort()
        await ended.wait()


async def next_of(answer: HttpResponse) -> bytes:
    await answer.wait_for_data()
    return answer.take()


async def whole(answer: HttpResponse) -> bytes:
    pieces = []
    while piece := await next_of(answer):
        pieces.append(piece)
    return b"".join(pieces)


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(
    ("original", "body", "is_kept"),
    [
        (ok(b"body"), b"body", True),
        (ok(b""), b"", True),
        (ok(b"body", b"connection: close"), b"body", False),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 4\r\n\r\nbody", b"body", False),
        (CHUNKED + b"2\r\nbo\r\n2;x=y\r\ndy\r\n0\r\n\r\n", b"body", True),
        (CHUNKED + b"4\r\nbody\r\n0\r\nx-trailer: t\r\n\r\n", b"body", True),
        # As some servers send them.
        (CHUNKED + b"4  \r\nbody\r\n0\r\n\r\n", b"body", True),
        (b"HTTP/1.1 200 OK\ncontent-length: 4\n\nbody", b"body", True),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + ok(b"body"), b"body", True),
        (b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\nlink: </b>\r\n\r\n" + ok(b"body"), b"body", True),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b"", True),
        (b"HTTP/1.1 304 Not Modified\r\ncontent-length: 10\r\n\r\n", b"", True),
        # A second response that was not requested, or invalid data.
        (ok(b"body") + ok(b"more"), b"body", False),
        (ok(b"body") + b"nonsense", b"body", False),
    ],
)
async def test_response_is_read_by_its_framing(original: bytes, body: bytes, is_kept: bool, at_once: bool) -> None:
    async with answering(original if at_once else b"") as server, connected(server) as connection:
        request = asyncio.ensure_future(connection.ask(GET))
        if not at_once:
            await eventually(lambda: server.requests, "the request is there")
            for place in range(len(original)):
                server.writers[0].write(original[place : place + 1])
                await asyncio.sleep(0)
        answer = await request
        assert await whole(answer) == body
        assert answer.status in (200, 204, 304)
        assert all(
            name.lower() in (b"content-length", b"transfer-encoding", b"connection") for name, _ in answer.headers
        )
        # Data that belongs to no response may still arrive, and is noticed then.
        await eventually(lambda: not answer.is_tainted or connection.is_lost, "it is hung up on")
        if at_once or is_kept:
            assert connection.release() is is_kept


async def test_header_names_are_stripped_and_lower_case() -> None:
    original = b"HTTP/1.1 200 OK\r\nContent-Length : 4\r\nConnection : keep-alive\r\n\r\nbody"
    async with answering(original) as server, connected(server) as connection:
        answer = await connection.ask(GET)
        assert await whole(answer) == b"body"
        assert [name for name, _ in answer.headers] == [b"content-length", b"connection"]


async def test_response_to_head_has_no_body() -> None:
    async with answering(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n") as server, connected(server) as connection:
        answer = await connection.ask(b"HEAD / HTTP/1.1\r\nhost: x\r\n\r\n", has_body=False)
        assert await whole(answer) == b""


async def test_response_without_length_ends_with_close_and_not_with_reset() -> None:
    open_ended = (b"HTTP/1.1 200 OK\r\n\r\nbody", b"HTTP/1.1 200 OK\r\ntransfer-encoding: identity\r\n\r\nbody")
    for is_reset, original in itertools.product((False, True), open_ended):
        async with answering(original) as server, connected(server) as connection:
            answer = await connection.ask(GET)
            assert await next_of(answer) == b"body"
            if is_reset:
                server.writers[0].transport.abort()
                connection.connection_lost(ConnectionResetError())
                with pytest.raises(BrokenOff):
                    await next_of(answer)
            else:
                server.writers[0].close()
                assert await next_of(answer) == b""
            assert not connection.release()


@pytest.mark.parametrize(
    ("original", "kind"),
    [
        (None, NoResponse),
        (b"SSH-2.0-OpenSSH\r\n", NotHttp),
        (b"HTTP/1.1 200 OK\r\nx: " + b"a" * 70_000, NotHttp),
        (b"HTTP/1.1 200 OK\r\n" + b"x: a\r\n" * 20_000, NotHttp),
        (b"HTTP/1.1 200 OK\r\n" + b"x: " + b"a" * 70_000 + b"\r\n\r\n", NotHttp),
        (b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n", NotHttp),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", NotHttp),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\ncontent-length: 5\r\n\r\nbody", NotHttp),
    ],
)
async def test_invalid_response_raises_and_closes_the_connection(original: bytes | None, kind: type[Exception]) -> None:
    async with answering(original) as server, connected(server) as connection:
        with pytest.raises(kind):
            await asyncio.wait_for(connection.ask(GET), LIMIT_S)
        await eventually(lambda: connection.is_lost, "it is hung up on")
        assert not connection.release()


async def test_unrequested_data_closes_the_connection() -> None:
    async with answering(ok()) as server, connected(server) as connection:
        await whole(await connection.ask(GET))
        assert connection.release()
        server.writers[0].write(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
        await eventually(lambda: connection.is_lost, "it is hung up on")
        with pytest.raises(NoResponse):
            await connection.ask(GET)


async def test_early_refusal_stops_sending_a_large_body() -> None:
    refused = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(ok(b"too large", status=b"413 Content Too Large"))
        await refused.wait()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server, connected(server) as connection:
        body = bytes(50_000_000)
        head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
        answer = await asyncio.wait_for(connection.ask(head, body), LIMIT_S)
        assert (answer.status, await whole(answer)) == (413, b"too large")
        assert not connection.release(), "the rest of the body would be taken for the next request"
        refused.set()


async def test_early_success_response_gets_the_whole_body() -> None:
    size = 20_000_000

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n")
        with contextlib.suppress(asyncio.IncompleteReadError):
            await reader.readexactly(size)
            writer.write(b"whole")
            await reader.read()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0, limit=size) as server, connected(server) as connection:
        head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size
        answer = await asyncio.wait_for(connection.ask(head, bytes(size)), LIMIT_S)
        assert await asyncio.wait_for(whole(answer), LIMIT_S) == b"whole"
        assert connection.release()


async def test_connection_with_unread_request_is_not_reused() -> None:
    is_over = asyncio.Event()

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(ok(b"later", status=b"429 Too Many Requests"))
        await is_over.wait()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server, connected(server) as connection:
        assert connection._transport is not None
        # Simulates a slow network.
        connection._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        body = bytes(500_000)
        head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
        answer = await asyncio.wait_for(connection.ask(head, body), LIMIT_S)
        assert (answer.status, await whole(answer)) == (429, b"later")
        assert not connection.release()
        is_over.set()


async def test_aborted_response_is_not_complete() -> None:
    async with answering(b"HTTP/1.1 200 OK\r\n\r\nbody") as server, connected(server) as connection:
        answer = await connection.ask(GET)
        connection.abort()
        await eventually(lambda: connection.is_lost, "it has ended")
        assert await next_of(answer) == b"body"
        with pytest.raises(BrokenOff):
            await next_of(answer)
        assert not connection.release()


async def test_closing_connection_gets_no_request() -> None:
    async with answering(ok()) as server, connected(server) as connection:
        await whole(await connection.ask(GET))
        assert connection.release()
        connection.abort()
        assert not connection.is_open
        with pytest.raises(NoResponse):
            await connection.ask(GET)


async def test_unread_response_is_buffered_up_to_a_limit() -> None:
    size = 30_000_000
    async with answering(ok(bytes(size))) as server, connected(server) as connection:
        answer = await connection.ask(GET)
        kept = -1
        while answer._kept != kept:
            kept = answer._kept
            await asyncio.sleep(0.05)
        assert kept < 1_000_000
        assert len(await whole(answer)) == size
        assert connection.release()


async def test_external_error_is_raised_after_received_data() -> None:
    async with (
        answering(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nabc") as server,
        connected(server) as connection,
    ):
        answer = await connection.ask(GET)
        await eventually(lambda: answer._kept, "a part has come")
        answer.fail(TimeoutError())
        assert await next_of(answer) == b"abc"
        with pytest.raises(TimeoutError):
            await next_of(answer)
        assert not connection.release()


@pytest.mark.parametrize("endless", [b"4;x=", b"0\r\nx-trailer: "])
async def test_endless_framing_without_body_closes_the_connection(endless: bytes) -> None:
    async with answering(CHUNKED + b"3\r\nabc\r\n" + endless) as server, connected(server) as connection:
        answer = await connection.ask(GET)
        assert await next_of(answer) == b"abc"
        while not connection.is_lost:
            server.writers[0].write(b"x" * 10_000)
            await asyncio.sleep(0)
        with pytest.raises(BrokenOff):
            await next_of(answer)


async def test_response_is_freed_after_release() -> None:
    """Without the garbage collector, which would be the most expensive part of a call under load."""
    async with answering(ok()) as server, connected(server) as connection:
        answer = await connection.ask(GET)
        assert await whole(answer) == b"ok"
        assert connection.release()
        gone = weakref.finalize(answer, lambda: None)
        gc.disable()
        try:
            del answer
            assert not gone.alive
        finally:
            gc.enable()


# --- in the callback in which it arrives --------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def sleeping(take: Callable[[bytes], bool]) -> AsyncIterator[tuple[HttpResponse, asyncio.Task[bool], Answering]]:
    """Yield a response whose reader sleeps, and a server that has sent its head."""
    async with answering(CHUNKED) as server, connected(server) as connection:
        answer = await connection.ask(GET)
        silence = ReadTimeout(LIMIT_S, lambda: answer.fail(TimeoutError()))
        task = asyncio.ensure_future(answer.pass_to(take, silence))
        await eventually(lambda: answer._take is not None, "the reader sleeps")
        try:
            yield answer, task, server
        finally:
            silence.stop()
            task.cancel()


async def test_content_is_passed_on_while_the_reader_sleeps() -> None:
    taken: list[bytes] = []

    def take(piece: bytes) -> bool:
        taken.append(piece)
        return len(taken) < 2

    async with sleeping(take) as (answer, task, server):
        server.writers[0].write(b"3\r\nabc\r\n2")
        await eventually(lambda: taken, "a piece has come")
        server.writers[0].write(b"\r\n")
        assert not task.done()
        server.writers[0].write(b"de\r\n1\r\nf\r\n")
        assert await asyncio.wait_for(task, LIMIT_S) is True, "it has stopped"
        server.writers[0].write(b"1\r\ng\r\n0\r\n\r\n")
        await eventually(lambda: answer.is_complete, "the end has come")
        assert b"".join([*taken, await whole(answer)]) == b"abcdefg"


async def test_the_end_wakes_the_reader() -> None:
    async with sleeping(lambda _: True) as (answer, task, server):
        server.writers[0].write(b"3\r\nabc\r\n0\r\n\r\n")
        assert await asyncio.wait_for(task, LIMIT_S) is False
        assert answer.take() == b""


async def test_a_bug_in_the_callback_is_raised_in_the_reader() -> None:
    def take(_: bytes) -> bool:
        raise RuntimeError("a bug")

    async with sleeping(take) as (_, task, server):
        server.writers[0].write(b"3\r\nabc\r\n")
        with pytest.raises(RuntimeError, match="a bug"):
            await asyncio.wait_for(task, LIMIT_S)
