"""Test the request headers that the gateway reads."""

from __future__ import annotations

import pytest

from gateway.call.types import NO_DIRECTIVES
from gateway.core.errors import InvalidRequest
from gateway.core.http.gateway_headers import DIRECTIVES, GATEWAY_HEADERS
from gateway.core.http.headers import ProviderAddress, request_headers
from gateway.server.headers import directives


def test_gateway_headers_are_not_forwarded() -> None:
    headers = [(name, b"1") for name in GATEWAY_HEADERS]
    sent = request_headers(
        headers, ProviderAddress("p", "https://p.example"), client_key_headers=frozenset(), decompressed=False
    )
    assert GATEWAY_HEADERS.isdisjoint(name for name, _ in sent)


@pytest.mark.parametrize("name", DIRECTIVES)
def test_invalid_gateway_header_is_named(name: bytes) -> None:
    with pytest.raises(InvalidRequest) as refused:
        directives([(name, b"? ?")])
    assert refused.value.param == name.decode()
    assert name.decode() in refused.value.message
    assert directives([(b"x-other", b"? ?")]) is NO_DIRECTIVES
