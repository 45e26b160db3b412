from __future__ import annotations

import pytest

from gateway.core.addresses import is_address


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
def test_an_address_has_a_scheme_of_http_a_host_and_a_port_that_there_is(url: str, is_one: bool) -> None:
    assert is_address(url) is is_one
