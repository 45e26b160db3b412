"""Many concurrent streams: all usage is settled, and memory does not grow from one round to the next."""

from __future__ import annotations

import asyncio
import gc
import json
import threading

from gateway.mock import MockProvider, MockServer
from tests.conftest import StartGateway, StartProcess, StartUpstream
from tests.support.gateways import until
from tests.support.scripted import SSE_HEAD, Connection, Held, chunk
from tests.support.web import HI, Reply, Web, chat_bytes, connect, parse

STREAMS = 200


async def many(url: str, number: int, mock: str) -> list[Reply]:
    """Run this number of streams concurrently in ten sessions."""
    host, _, port = url.removeprefix("http://").partition(":")
    body = json.dumps({"model": "mock-small", "messages": HI, "stream": True}).encode()

    async def one(index: int) -> Reply:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(chat_bytes(body, b"x-session-id: load-%d" % (index % 10), b"x-mock: " + mock.encode()))
        data = await reader.read()
        while piece := await reader.read():
            data += piece
        writer.close()
        await writer.wait_closed()
        return parse(data)

    return await asyncio.gather(*map(one, range(number)))


async def test_200_concurrent_streams_are_all_settled_in_constant_memory(
    mock_server: MockServer, mock: MockProvider, gateway_process: StartProcess
) -> None:
    gateway = gateway_process(mock_server.url)
    rss = []
    for _ in range(4):
        answers = await many(gateway.url, STREAMS, "chunks=20;interval=0.01;delay=0.1;tokens=30/20")
        assert [answer.status for answer in answers] == [200] * STREAMS
        assert all(answer.clean and answer.data_lines[-1] == "[DONE]" for answer in answers)
        rss.append(gateway.rss)
    views = gateway.web.get("/api/sessions").json["sessions"]
    assert len(views) == 10
    assert sum(view["calls"] for view in views) == 4 * STREAMS
    assert sum(view["cumulative_token_usage"]["total_tokens"] for view in views) == 4 * STREAMS * 50
    assert mock.billed().total_tokens == 4 * STREAMS * 50
    assert all(view["usage_source"] == "provider" for view in views)
    assert rss[3] - rss[1] < 8 << 20, f"memory grows: {rss}"


async def test_concurrent_calls_of_one_session_are_all_added(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url)

    def ten_calls() -> None:
        for number in range(10):
            gateway.web.chat("one", "tokens=7/3", stream=number % 2 == 0)

    await asyncio.gather(*(asyncio.to_thread(ten_calls) for _ in range(8)))
    usage = gateway.web.get("/api/sessions/one").json
    assert usage["calls"] == 80
    assert usage["cumulative_token_usage"]["total_tokens"] == 800


def test_calls_above_max_concurrency_are_refused_at_once_and_the_others_complete(
    byte_server: StartUpstream, gateway_server: StartGateway
) -> None:
    held = Held()
    upstream = byte_server(held)
    gateway = gateway_server(upstream.url, **{"server.max_concurrency": 3})
    answers: list[Reply] = []
    threads = [threading.Thread(target=lambda: answers.append(gateway.web.chat("s"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: len(upstream.requests) == 3)
    refused = gateway.web.chat("s")
    assert not answers
    assert (refused.status, refused.error["code"]) == (503, "overloaded")
    assert refused.header("retry-after") == "1"
    assert refused.header("x-should-retry") == "true"
    held.release()
    for thread in threads:
        thread.join()
    assert [answer.status for answer in answers] == [200] * 3
    assert gateway.web.chat("s").status == 200


def test_silent_streams_use_little_memory(gateway_process: StartProcess, byte_server: StartUpstream) -> None:
    opened: list[Connection] = []

    def script(connection: Connection) -> None:
        connection.send(SSE_HEAD + chunk("word"))
        opened.append(connection)
        connection.stopping.wait(120)

    upstream = byte_server(script)
    gateway = gateway_process(upstream.url, **{"sessions.on_disconnect": "cancel"})
    body = b'{"model":"m","messages":[],"stream":true}'
    Web(gateway.url).post("/api/count", json.loads(body))  # the tables of the tokenizer are loaded once
    before = gateway.rss
    sockets = []
    for _ in range(STREAMS):
        sock = connect(gateway.url)
        sock.sendall(chat_bytes(body))
        sockets.append(sock)
    until(lambda: len(opened) == STREAMS, 60)
    grown = gateway.rss - before
    for sock in sockets:
        sock.close()
    assert grown / STREAMS < 100_000
    until(lambda: gateway.web.get("/api/sessions?limit=1").json["sessions"])
    for connection in opened:
        connection.stopping.set()


def test_a_stopped_gateway_leaves_no_open_resources(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    """Warnings are errors here: an open connection, task or file fails this test when it is collected."""
    gateway = gateway_server(mock_server.url)
    gateway.web.stream("s")
    gateway.web.chat("s", "status=500")
    gateway.stop()
    gc.collect()
