"""The URL at which a user reaches a host and port."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

import pytest

from gateway.cli.address import url_of
from gateway.server.serving import bind


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8484"),
        ("192.0.2.7", "http://192.0.2.7:8484"),
        ("0.0.0.0", "http://127.0.0.1:8484"),
        ("", "http://127.0.0.1:8484"),
        ("::", "http://[::1]:8484"),
        ("[::]", "http://[::1]:8484"),
        ("0:0:0:0:0:0:0:0", "http://[::1]:8484"),
        ("::1", "http://[::1]:8484"),
        ("[::1]", "http://[::1]:8484"),
        ("2001:db8::7", "http://[2001:db8::7]:8484"),
        ("fe80::1%eth0", "http://[fe80::1%25eth0]:8484"),
        ("localhost", "http://localhost:8484"),
        ("gateway.example", "http://gateway.example:8484"),
    ],
)
def test_a_host_becomes_a_url_that_can_be_opened(host: str, url: str) -> None:
    assert url_of(host, 8484) == url
    assert urlsplit(url).port == 8484


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "", "::", "::1", "localhost"])
def test_server_responds_at_the_printed_url(host: str) -> None:
    with bind(host, 0) as listener:
        parts = urlsplit(url_of(host, listener.getsockname()[1]))
        assert parts.hostname
        assert parts.port
        socket.create_connection((parts.hostname, parts.port), timeout=5).close()
