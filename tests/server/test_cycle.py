"""Responses as a client on a plain socket reads them. Requests are tested in test_protocol.py."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.server import serving
from gateway.server.cycle import WRITE
from tests.support.asgi import with_lifespan
from tests.support.web import connect, read_all

Headers = list[tuple[bytes, bytes]]
CLOSE = (b"connection", b"close")


def start(*headers: tuple[bytes, bytes], status: int = 200) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": list(headers)}


def part(body: bytes, *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


def said(request: bytes, *messages: dict[str, Any]) -> bytes:
    """Return what a client reads after it sends these bytes to an application that sends these messages."""

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        for message in messages:
            await send(message)

    options = serving.make_config(
        with_lifespan(app), max_head_bytes=65_536, max_body=2**24, head_timeout_s=5, grace_s=1
    )
    with serving.ServerThread(options) as server, connect(server.url) as sock:
        sock.sendall(request)
        return read_all(sock)


def request(method: bytes = b"GET", version: bytes = b"1.1", *, keep: bool = False) -> bytes:
    return b"%b / HTTP/%b\r\nhost: x\r\nconnection: %b\r\n\r\n" % (method, version, b"keep-alive" if keep else b"close")


def test_response_of_known_length_is_sent_without_chunks() -> None:
    answer = said(request(), start((b"content-length", b"4"), (b"x-a", b"b")), part(b"ab", more=True), part(b"cd"))
    assert answer == b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\nx-a: b\r\nconnection: close\r\n\r\nabcd"


def test_response_of_unknown_length_is_sent_in_chunks() -> None:
    answer = said(request(), start(), part(b"a" * 17, more=True), part(b"", more=True), part(b"b"))
    head = b"HTTP/1.1 200 OK\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    assert answer == head + b"11\r\n" + b"a" * 17 + b"\r\n1\r\nb\r\n0\r\n\r\n"


def test_without_chunked_encoding_a_response_ends_with_the_connection() -> None:
    answer = said(request(version=b"1.0", keep=True), start(), part(b"a", more=True), part(b"b"))
    assert answer == b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nab"


@pytest.mark.parametrize("headers", [[], [(b"content-length", b"4")]])
def test_response_to_head_has_no_body(headers: Headers) -> None:
    answer = said(request(b"HEAD"), start(*headers), part(b"abcd"))
    assert answer == b"HTTP/1.1 200 OK\r\n%bconnection: close\r\n\r\n" % b"".join(b"%b: %b\r\n" % p for p in headers)


@pytest.mark.parametrize("status", [204, 304])
def test_response_without_body_announces_no_length(status: int) -> None:
    _, _, fields = said(request(), start(status=status), part(b"")).partition(b"\r\n")
    assert fields == b"connection: close\r\n\r\n"


@pytest.mark.parametrize("status", [204, 304])
def test_response_without_body_may_announce_a_length(status: int) -> None:
    """Some providers announce a length. The next request on the connection must still get its response."""
    answer = said(request(keep=True) + request(), start((b"content-length", b"5"), status=status), part(b""))
    assert answer.count(b"HTTP/1.1 %d " % status) == 2


@pytest.mark.parametrize("version", [b"0.9", b"1.0"])
def test_http_1_0_client_gets_no_100_continue(version: bytes) -> None:
    asked = request(b"POST", version).replace(b"\r\n\r\n", b"\r\nexpect: 100-continue\r\n\r\n")
    answer = said(asked, start(), part(b"ab"))
    assert answer == b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nab"


@pytest.mark.parametrize("value", [b"close", b"Close", b"x-a , close"])
def test_an_application_may_end_the_connection(value: bytes) -> None:
    answer = said(request(keep=True), start((b"content-length", b"0"), (b"connection", value)), part(b""))
    assert answer == b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: %b\r\n\r\n" % value


@pytest.mark.parametrize(
    "header",
    [
        *((b"x-a", b"b" + bytes([octet])) for octet in (0, 1, 8, 10, 11, 13, 31, 127)),
        (b"x-a", b"b\r\nx-c: d"),
        *((b"x-a" + bytes([octet]), b"b") for octet in b'\0\n\r\t\x7f\xe9 ()<>@,;:\\[]={}"/?A'),
    ],
)
def test_head_with_injected_headers_is_not_sent(header: tuple[bytes, bytes]) -> None:
    assert said(request(), start((b"content-length", b"0"), header, CLOSE), part(b"")) == b""


@pytest.mark.parametrize("octet", [9, 32, 126, 128, 255])
def test_header_values_may_contain_all_other_octets(octet: int) -> None:
    answer = said(request(), start((b"content-length", b"0"), (b"x-a", b"b" + bytes([octet]) + b"c")), part(b""))
    assert b"\r\nx-a: b%bc\r\n" % bytes([octet]) in answer


@pytest.mark.parametrize("parts", [[part(b"abc")], [part(b"a", more=True), part(b"bc")]])
def test_body_longer_than_its_content_length_is_an_error(parts: list[dict[str, Any]]) -> None:
    answer = said(request(keep=True), start((b"content-length", b"2")), *parts)
    assert answer.endswith((b"\r\n\r\n", b"\r\n\r\na"))


def test_body_shorter_than_its_content_length_is_an_error() -> None:
    answer = said(request(keep=True) * 2, start((b"content-length", b"3")), part(b"ab"))
    assert answer == b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nab"


@pytest.mark.parametrize(
    "messages", [[part(b"a")], [start(), start()], [start(), part(b"a"), part(b"b")], [{"type": "http.response.x"}]]
)
def test_messages_out_of_order_are_errors(messages: list[dict[str, Any]]) -> None:
    answer = said(request(), *messages)
    assert b"b" not in answer.partition(b"\r\n\r\n")[2]
    assert answer.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize(
    ("asked", "body"),
    [
        (request(), b"2\r\nab\r\n2\r\ncd\r\n0\r\n\r\n"),
        (request(version=b"1.0"), b"abcd"),
        (request(b"HEAD"), b""),
    ],
)
def test_parts_can_be_written_without_waiting(asked: bytes, body: bytes) -> None:
    class Begun(dict[str, Any]):
        """The message that starts a response; the first part is written when it was sent."""

        def __setitem__(self, name: str, value: Any) -> None:
            super().__setitem__(name, value)
            assert name == WRITE
            assert value(b"ab")

    answer = said(asked, Begun(start()), part(b"cd", more=True), part(b""))
    assert answer.partition(b"\r\n\r\n")[2] == body
