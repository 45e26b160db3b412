"""Test Redis URLs."""

from __future__ import annotations

import re

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
def test_redis_url_is_parsed(url: str, expected: Address) -> None:
    assert parse(url) == expected


HOST = "each host is a name or an address, optionally with a port from 1 to 65535"
DATABASE = "after the hosts only a database number may follow, as in /0"


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("", "this is not a Redis URL"),
        ("postgres://h", "this is not a Redis URL"),
        ("redis+tls://h", "this is not a Redis URL"),
        ("redis", HOST),
        ("redis://", HOST),
        ("redis:///1", HOST),
        ("redis://h:x", HOST),
        ("redis://h:99999", HOST),
        ("redis://h:0", HOST),
        ("redis://[::1", HOST),
        ("redis+cluster://a,,b", HOST),
        ("redis://user:SECRET?ss@h", HOST),
        ("redis://user:SECRET/ss@h", HOST),
        ("redis://h/SECRET", DATABASE),
        ("redis://h/-1", DATABASE),
        ("redis://h/1/2", DATABASE),
        ("redis://h/1/", DATABASE),
        ("redis+sentinel://a/main/1/2", DATABASE),
        ("redis+sentinel://a/main/", DATABASE),
        ("redis://a,b", "several hosts need redis+sentinel:// or redis+cluster://"),
        ("redis+sentinel://a", "the name of the service must follow the sentinels"),
        ("redis+sentinel://a//1", "the name of the service must follow the sentinels"),
        ("redis+cluster://a/1", "a cluster only has database 0"),
        ("redis://h?db=SECRET", "unknown option; known: none without TLS (rediss://)"),
        ("redis://h?ssl_ca_certs=SECRET", "unknown option; known: none without TLS (rediss://)"),
        ("rediss://h?ssl_cert_reqs=none", "unknown option; known: ssl_ca_certs, ssl_certfile, "),
        ("rediss://h?sentinel_password=SECRET", "unknown option; known: ssl_ca_certs, ssl_certfile, "),
        ("rediss://h?ssl_check_hostname=SECRET", "ssl_check_hostname must be true or false"),
        ("rediss://h?ssl_ca_certs", "each option after the question mark must be NAME=VALUE"),
        ("rediss://h?SECRET", "each option after the question mark must be NAME=VALUE"),
        ("rediss://h?ssl_ca_certs=a&ssl_ca_certs=b", "an option is given twice"),
    ],
)
def test_invalid_redis_url_is_refused_without_repeating_it(url: str, problem: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(problem)}") as caught:
        parse(url)
    assert "SECRET" not in str(caught.value)


def test_an_address_never_shows_its_password() -> None:
    assert repr(parse("redis://user:SECRET@h:1")) == "Address(redis://h:1)"
