"""Addresses of a Redis."""

from __future__ import annotations

import pytest

from gateway.core.redis_url import Address, parse


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://h", Address("single", (("h", 6379),), "redis://h")),
        ("redis://h:1/2", Address("single", (("h", 1),), "redis://h:1/2", db=2)),
        ("redis://h/", Address("single", (("h", 6379),), "redis://h")),
        ("rediss://[::1]:7", Address("single", (("::1", 7),), "rediss://[::1]:7", tls=True)),
        (
            "redis://user:p%40s%2Fs@h",
            Address("single", (("h", 6379),), "redis://h", username="user", password="p@s/s"),
        ),
        ("redis://:pa:ss@h", Address("single", (("h", 6379),), "redis://h", password="pa:ss")),
        (
            "redis+sentinel://a,b:2/main/3",
            Address("sentinel", (("a", 26379), ("b", 2)), "redis+sentinel://a,b:2/main/3", db=3, service="main"),
        ),
        (
            "rediss+sentinel://x:y@a/my%20main",
            Address(
                "sentinel", (("a", 26379),), "rediss+sentinel://a/my%20main", tls=True, username="x", password="y",
                service="my main",
            ),
        ),
        (
            "rediss://:p@h:1/2?ssl_ca_certs=/etc/ca.pem&ssl_check_hostname=false",
            Address(
                "single", (("h", 1),), "rediss://h:1/2", tls=True, password="p", db=2,
                options=(("ssl_ca_certs", "/etc/ca.pem"), ("ssl_check_hostname", "false")),
            ),
        ),
        (
            "redis+sentinel://a/main?sentinel_username=u&sentinel_password=a%26b",
            Address(
                "sentinel", (("a", 26379),), "redis+sentinel://a/main", service="main",
                options=(("sentinel_username", "u"), ("sentinel_password", "a&b")),
            ),
        ),
        ("redis+cluster://a:1,b", Address("cluster", (("a", 1), ("b", 6379)), "redis+cluster://a:1,b")),
    ],
)  # fmt: skip
def test_an_address_says_where_a_redis_is_and_who_asks(url: str, expected: Address) -> None:
    assert parse(url) == expected


@pytest.mark.parametrize(
    "url",
    [
        "",
        "redis",
        "redis://",
        "redis:///1",
        "postgres://h",
        "redis+tls://h",
        "redis://h:x",
        "redis://h:99999",
        "redis://h/x",
        "redis://h/-1",
        "redis://h/1/2",
        "redis://a,b",
        "redis://h?db=1",
        "redis://h?ssl_ca_certs=a",
        "rediss://h?ssl_cert_reqs=none",
        "rediss://h?ssl_check_hostname=no",
        "rediss://h?ssl_ca_certs",
        "rediss://h?ssl_ca_certs=a&ssl_ca_certs=b",
        "rediss://h?sentinel_password=a",
        "redis://user:pa?ss@h",
        "redis+sentinel://a",
        "redis+sentinel://a//1",
        "redis+sentinel://a/main/1/2",
        "redis+cluster://a/1",
        "redis+cluster://a,,b",
    ],
)
def test_what_is_no_address_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ValueError, match=r"^this is no address of a Redis$"):
        parse(url)


def test_an_address_never_shows_its_password() -> None:
    assert repr(parse("redis://user:SECRET@h:1")) == "Address(redis://h:1)"
