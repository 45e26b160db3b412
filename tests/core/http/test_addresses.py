from __future__ import annotations

import pytest

from gateway.core.http.addresses import is_address, is_host


@pytest.mark.parametrize(
    ("url", "is_one"),
    [
        ("http://a.example", True),
        ("https://a.example:8443/v1?x=y", True),
        ("http://me:secret@[::1]:80/", True),
        ("http://a.example:", True),
        ("http://a.example:65535", True),
        ("http://a.example:65536", False),
        ("http://a.example:0", False),
        ("http://a.example:a", False),
        ("http://:80/", False),
        ("http://[::1/", False),
        ("http:///v1", False),
        ("socks5://a.example", False),
        ("a.example:80", False),
        ("", False),
    ],
)
def test_http_url_needs_scheme_host_and_valid_port(url: str, is_one: bool) -> None:
    assert is_address(url) is is_one


@pytest.mark.parametrize(
    ("host", "is_one"),
    [
        *((host, True) for host in ("127.0.0.1", "::1", "fe80::1%eth0", "127.1", "0", "a", "my_pod-0.a.example.")),
        *((host, True) for host in ("b\u00fccher.example", "localhost", "x" * 63)),
        *(
            (host, False)
            for host in ("", "not a host", " a", "a\n", "http://a", "a/b", "a:80", "*", "a..b", "x" * 64, "[::1")
        ),
        *((host, False) for host in ("300.1.1.1", "1.2.3.4.5", "1..2", "::1::", "::g", "a,b", "a@b")),
    ],
)
def test_host_is_an_address_or_a_host_name(host: str, is_one: bool) -> None:
    assert is_host(host) is is_one
