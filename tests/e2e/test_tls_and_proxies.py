"""Connections to a provider: its TLS certificate, private authorities, and proxies from the environment."""

from __future__ import annotations

import base64
import json
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import StartGateway, StartUpstream, closed_port
from tests.support.gateways import GatewayThread
from tests.support.scripted import DONE, SSE_HEAD, ByteServer, Connection, chunk, completion, usage_chunk
from tests.support.web import HI, Reply, Web, chat_bytes, connect

KEY = "provider-0123456789abcdef"
#: a host name whose address only the proxy knows
NAME = "provider.test"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a certificate for 127.0.0.1 and NAME that is its own authority, with its key in the same file."""
    file = tmp_path_factory.mktemp("tls") / "server.pem"
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=test"]
    words += ["-addext", f"subjectAltName=IP:127.0.0.1,DNS:{NAME}", "-keyout", str(file), "-out", f"{file}.crt"]
    subprocess.run(words, check=True, capture_output=True)
    file.write_text(file.read_text() + Path(f"{file}.crt").read_text())
    return file


@pytest.fixture
def provider(certificate: Path) -> Iterator[ByteServer]:
    """Yield a provider that uses TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with ByteServer(answer, tls=context) as server:
        yield server


def answer(connection: Connection) -> None:
    if connection.request.json.get("stream"):
        connection.send(SSE_HEAD + chunk("hello") + usage_chunk() + DONE)
    else:
        connection.whole(completion())


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def start(gateway_server: StartGateway) -> Callable[..., GatewayThread]:
    """Return a function that starts a gateway with a key for the provider at a URL, and with TLS settings."""

    def run(url: str, **tls: object) -> GatewayThread:
        row = {"base_url": url, "key": KEY, "retries": 0, "tls": tls}
        return gateway_server(url, **{"providers.upstream": row})

    return run


def chat(web: Web, *, stream: bool = False) -> Reply:
    return web.post("/v1/chat/completions", {"model": "m", "messages": HI, "stream": stream}, {"x-session-id": "s"})


def refused(reply: Reply) -> str:
    assert (reply.status, reply.error["code"]) == (502, "upstream_unreachable"), reply
    message: str = reply.error["message"]
    return message


# --- certificates --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_configured_authority_is_trusted(
    stream: bool, provider: ByteServer, certificate: Path, start: Callable[..., GatewayThread]
) -> None:
    reply = chat(start(provider.url, ca_file=str(certificate)).web, stream=stream)
    assert (reply.status, reply.totals) == (200, (10, 5, 15))
    assert provider.requests[0].header("authorization") == f"Bearer {KEY}"


def test_an_untrusted_certificate_is_refused_and_gets_no_key(
    provider: ByteServer, start: Callable[..., GatewayThread]
) -> None:
    assert "TLS failed" in refused(chat(start(provider.url).web))
    assert provider.requests == []


def test_a_certificate_for_another_name_is_refused(
    provider: ByteServer, certificate: Path, start: Callable[..., GatewayThread]
) -> None:
    url = provider.url.replace("127.0.0.1", "localhost")
    assert "TLS failed" in refused(chat(start(url, ca_file=str(certificate)).web))
    assert provider.requests == []


def test_the_certificate_is_not_verified_if_verify_is_off(
    provider: ByteServer, start: Callable[..., GatewayThread]
) -> None:
    assert chat(start(provider.url, verify=False).web).status == 200


@pytest.mark.parametrize("size", [1_000_000, 4_000_000])
@pytest.mark.parametrize("framing", ["length", "end"])
def test_a_large_response_is_complete_if_the_sender_closes_after_it(
    framing: str, size: int, provider: ByteServer, certificate: Path, start: Callable[..., GatewayThread]
) -> None:
    body = completion(padding="x" * size)
    length = b"content-length: %d\r\n" % len(body) if framing == "length" else b""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n" + length + b"\r\n"
    provider.script = lambda connection: connection.send(head + body)
    web = start(provider.url, ca_file=str(certificate)).web
    for _ in range(5):
        reply = chat(web)
        assert (reply.status, len(reply.body)) == (200, len(body))
    assert reply.totals == (50, 25, 75)


def test_a_large_stream_to_a_slow_reader_is_complete_if_the_sender_closes_after_it(
    provider: ByteServer, certificate: Path, start: Callable[..., GatewayThread]
) -> None:
    body = chunk("x" * 1000) * 8_000 + usage_chunk() + DONE
    provider.script = lambda connection: connection.send(SSE_HEAD + body)
    web = start(provider.url, ca_file=str(certificate)).web
    request = chat_bytes(json.dumps({"model": "m", "messages": HI, "stream": True}).encode())
    with connect(web.url) as sock:
        sock.sendall(request)
        original = bytearray()
        while piece := sock.recv(32 * 1024):
            original += piece
            time.sleep(0.004)
    assert original.count(b"x" * 1000) == 8_000
    assert b"data: [DONE]" in original


# --- proxies -------------------------------------------------------------------------------------------------------------------


def tunnel_to(target: ByteServer) -> Callable[[Connection], None]:
    """Return a proxy script that connects every CONNECT to one server, for any host name."""

    def script(connection: Connection) -> None:
        port = int(target.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as far:
            connection.send(b"HTTP/1.1 200 Connection established\r\n\r\n")
            there = threading.Thread(target=pump, args=(connection.sock, far), daemon=True)
            there.start()
            pump(far, connection.sock)
            there.join()

    return script


def pump(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            sink.sendall(data)
    except OSError:
        pass
    finally:
        for end in (source, sink):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue


@pytest.fixture
def proxy(provider: ByteServer, byte_server: StartUpstream) -> ByteServer:
    """Return a proxy in front of the provider."""
    return byte_server(tunnel_to(provider))


@pytest.fixture
def start_trusting(start: Callable[..., GatewayThread], certificate: Path) -> Callable[[str], GatewayThread]:
    """Return a function that starts a gateway that trusts the provider's certificate."""
    return lambda url: start(url, ca_file=str(certificate))


@pytest.mark.parametrize("variable", ["HTTPS_PROXY", "https_proxy"])
def test_a_proxy_gets_only_a_connect_request(
    variable: str,
    provider: ByteServer,
    proxy: ByteServer,
    start_trusting: Callable[[str], GatewayThread],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(variable, proxy.url)
    web = start_trusting(f"https://{NAME}/v1").web
    for stream in (False, True):
        reply = chat(web, stream=stream)
        assert (reply.status, reply.totals[2]) == (200, 30 if stream else 15)
    for asked, sent in zip(proxy.requests, provider.requests, strict=True):
        assert asked.head.startswith(f"CONNECT {NAME}:443 HTTP/1.1\r\n".encode())
        assert KEY.encode() not in asked.head
        assert (sent.header("host"), sent.path) == (NAME, "/v1/chat/completions")


def test_an_untrusted_certificate_behind_a_proxy_is_refused(
    provider: ByteServer,
    proxy: ByteServer,
    start: Callable[..., GatewayThread],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", proxy.url)
    refused(chat(start(f"https://{NAME}/v1").web))
    assert provider.requests == []


def test_a_host_in_no_proxy_is_called_directly(
    provider: ByteServer,
    proxy: ByteServer,
    start_trusting: Callable[[str], GatewayThread],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", proxy.url)
    monkeypatch.setenv("NO_PROXY", "other.example,127.0.0.1")
    assert chat(start_trusting(provider.url).web).status == 200
    assert proxy.connections == 0
    monkeypatch.setenv("NO_PROXY", "other.example")
    assert chat(start_trusting(provider.url).web).status == 200
    assert proxy.connections == 1


def test_the_proxy_credential_is_sent_only_to_the_proxy(
    provider: ByteServer,
    proxy: ByteServer,
    start_trusting: Callable[[str], GatewayThread],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", proxy.url.replace("://", "://me:secret@"))
    assert chat(start_trusting(f"https://{NAME}/v1").web).status == 200
    basic = base64.b64encode(b"me:secret").decode()
    assert proxy.requests[0].header("proxy-authorization") == f"Basic {basic}"
    assert provider.requests[0].header("proxy-authorization") is None


@pytest.mark.parametrize("speaks", [True, False])
def test_a_failing_proxy_is_an_error_without_the_credential(
    speaks: bool,
    byte_server: StartUpstream,
    start: Callable[..., GatewayThread],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    denies = byte_server(lambda connection: connection.whole(b"", status=b"407 Proxy Authentication Required"))
    place = denies.url.removeprefix("http://") if speaks else f"127.0.0.1:{closed_port()}"
    monkeypatch.setenv("HTTPS_PROXY", f"http://me:secret@{place}")
    reply = chat(start(f"https://{NAME}/v1").web)
    assert reply.status == 502
    assert "secret" not in reply.body.decode()
    assert NAME in reply.error["message"]
