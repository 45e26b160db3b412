"""The memory limit of request bodies: bodies are served up to the limit, and refused or abandoned ones free memory."""

from __future__ import annotations

import socket
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.conftest import StartGateway, StartUpstream
from tests.support.gateways import GatewayThread, until
from tests.support.scripted import ByteServer, Held
from tests.support.web import CHAT, Reply, chat_bytes, connect, parse, read_all

MIB = 2**20
#: number of bodies of the largest size that fit into the limit together
FIT = 16
PLAIN = b'{"model":"mock-small","messages":[{"role":"user","content":"hi"}]}'
BODY = PLAIN[:-1] + b" " * (MIB - len(PLAIN)) + b"}"


class Bench:
    """A gateway whose bodies may take 16 MiB together, in front of a provider that responds when released."""

    def __init__(self, gateway_server: StartGateway, byte_server: StartUpstream) -> None:
        self.held = Held()
        self.upstream: ByteServer = byte_server(self.held)
        self.gateway: GatewayThread = gateway_server(self.upstream.url, **{"server.max_body_mb": 1})
        self.clients = ThreadPoolExecutor(2 * FIT)
        self.sockets: list[socket.socket] = []

    def post(self) -> Reply:
        return self.gateway.web.post(CHAT, BODY, {"x-session-id": "s"})

    def begin(self, sent: bytes) -> socket.socket:
        """Send the first part of a request."""
        sock = connect(self.gateway.url)
        self.sockets.append(sock)
        sock.sendall(sent)
        return sock

    def fill(self) -> None:
        """Announce as many bodies as fit, and send half of each."""
        for _ in range(FIT):
            self.begin(chat_bytes(BODY)[: MIB // 2])
        until(lambda: self.small() == 503, what="all is reserved")

    def small(self) -> int:
        """Return the status of a small call. The gateway has processed all earlier requests by then."""
        return self.gateway.web.post(CHAT, {"model": "m", "messages": []}).status

    def is_all_free(self) -> bool:
        """Return True if as many bodies as fit are served at the same time."""
        return [one.status for one in self.clients.map(lambda _: self.post(), range(FIT))] == [200] * FIT


@pytest.fixture
def bench(gateway_server: StartGateway, byte_server: StartUpstream) -> Bench:
    return Bench(gateway_server, byte_server)


@pytest.fixture(autouse=True)
def ended(bench: Bench) -> object:
    """Close everything, even if a test fails."""
    yield
    bench.held.release()
    for sock in bench.sockets:
        sock.close()
    bench.clients.shutdown()


def test_as_many_bodies_as_fit_are_served_at_once(bench: Bench) -> None:
    calls = [bench.clients.submit(bench.post) for _ in range(FIT + 4)]
    until(lambda: sum(call.done() for call in calls) == 4, what="four are refused")
    refused = [call.result() for call in calls if call.done()]
    assert {(one.status, one.error["code"]) for one in refused} == {(503, "overloaded")}
    assert "use 16 MiB of 16 MiB" in refused[0].error["message"]
    until(lambda: len(bench.upstream.requests) == FIT, what="all others are sent")
    assert {len(request.body) for request in bench.upstream.requests} == {MIB}
    bench.held.release()
    assert Counter(call.result().status for call in calls) == {200: FIT, 503: 4}
    assert bench.is_all_free()


def test_a_refused_body_takes_no_memory_while_the_client_keeps_sending_it(bench: Bench) -> None:
    bench.held.release()
    bench.fill()
    refused = [bench.begin(chat_bytes(BODY)[: MIB // 2]) for _ in range(FIT)]
    assert bench.small() == 503
    for sock in bench.sockets[:FIT]:
        sock.close()
    until(bench.is_all_free, what="only bodies of disconnected clients took memory")
    for sock in refused:
        sock.sendall(chat_bytes(BODY)[MIB // 2 :])
        assert parse(read_all(sock)).status == 503


def test_a_chunked_body_takes_the_received_bytes_and_frees_them_when_refused(bench: Bench) -> None:
    bench.held.release()
    head = chat_bytes(b"", b"transfer-encoding: chunked").replace(b"content-length: 0\r\n", b"")
    three_quarters = b"%x\r\n%b\r\n" % (MIB * 3 // 4, BODY[: MIB * 3 // 4])
    for _ in range(FIT):
        bench.begin(head + three_quarters)
    # 4 MiB are free as soon as all of them have arrived.
    until(lambda: bench.small() == 200)
    rest = b"%x\r\n%b\r\n0\r\n\r\n" % (MIB // 4, BODY[MIB * 3 // 4 :])
    for sock in bench.sockets:
        sock.sendall(rest)
    assert {parse(read_all(sock)).status for sock in bench.sockets} == {200}
    late = [bench.begin(head + three_quarters) for _ in range(FIT * 2)]
    for sock in late:
        sock.sendall(rest)
    ends = Counter(parse(read_all(sock)).status for sock in late)
    assert set(ends) <= {200, 503}
    assert ends[200] >= FIT // 2
    assert bench.is_all_free()


def test_a_client_that_leaves_while_sending_its_body_frees_its_memory(bench: Bench) -> None:
    bench.held.release()
    bench.fill()
    for sock in bench.sockets:
        sock.close()
    until(bench.is_all_free, what="all memory is free again")


def test_a_client_that_leaves_before_its_response_frees_its_memory(bench: Bench) -> None:
    for _ in range(FIT):
        bench.begin(chat_bytes(BODY))
    until(lambda: len(bench.upstream.requests) == FIT)
    assert bench.post().status == 503
    for sock in bench.sockets:
        sock.close()
    bench.held.release()
    until(bench.is_all_free, what="all memory is free again")


def test_a_request_refused_for_another_reason_frees_its_memory(bench: Bench) -> None:
    bench.held.release()
    for _ in range(2 * FIT):
        broken = bench.gateway.web.post(CHAT, BODY[:-1] + b"!", {"x-session-id": "s"})
        assert broken.status == 400
    assert bench.is_all_free()
