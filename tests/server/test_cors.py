"""Web pages of other origins are refused unless `server.cors_origins` allows them."""

from __future__ import annotations

import pytest

from gateway.mock import MockServer
from gateway.server import headers
from tests.conftest import StartGateway, closed_port
from tests.support.web import CHAT, Reply, Web

PAGE = "https://app.example"
#: some response headers that clients of OpenAI and Anthropic read
PROVIDERS_HEADERS = {
    *("retry-after", "retry-after-ms", "request-id", "x-request-id", "openai-processing-ms"),
    *("x-ratelimit-limit-requests", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens"),
    *("anthropic-organization-id", "anthropic-ratelimit-requests-remaining", "anthropic-ratelimit-input-tokens-reset"),
}
PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}


def call_from(web: Web, origin: str) -> Reply:
    body = {"model": "mock-small", "messages": [{"role": "user", "content": "hi"}]}
    return web.post("/v1/chat/completions", body, {"origin": origin, "x-session-id": "s"})


def test_page_of_another_origin_is_refused_and_nothing_is_forwarded(
    gateway_server: StartGateway, mock_server: MockServer
) -> None:
    web = gateway_server(mock_server.url).web
    before = len(mock_server.provider.calls)
    answer = call_from(web, PAGE)
    assert (answer.status, answer.error["code"]) == (403, "forbidden")
    assert PAGE in answer.error["message"]
    assert answer.header("access-control-allow-origin") is None
    assert len(mock_server.provider.calls) == before


def test_page_of_an_allowed_origin_may_call_and_read_the_headers(
    gateway_server: StartGateway, mock_server: MockServer
) -> None:
    web = gateway_server(mock_server.url, **{"server.cors_origins": [PAGE]}).web
    asked = web.send("OPTIONS", "/v1/chat/completions", headers={"origin": PAGE, **PREFLIGHT})
    assert asked.status == 200
    assert asked.header("access-control-allow-origin") == PAGE
    assert asked.header("x-gateway-request-id")
    answer = call_from(web, PAGE)
    assert answer.status == 200
    assert answer.header("access-control-allow-origin") == PAGE
    may_be_read(answer)
    assert web.send("GET", "/api/sessions", headers={"origin": PAGE}).status == 200


def test_page_of_another_origin_is_refused_if_others_are_allowed(
    gateway_server: StartGateway, mock_server: MockServer
) -> None:
    web = gateway_server(mock_server.url, **{"server.cors_origins": [PAGE]}).web
    other = "https://evil.example"
    asked, called = web.send("OPTIONS", CHAT, headers={"origin": other, **PREFLIGHT}), call_from(web, other)
    for refused in (asked, called):
        assert (refused.status, refused.error["code"]) == (403, "forbidden")
        assert other in refused.error["message"]
        assert refused.header("x-should-retry") == "false"
        assert refused.header("x-gateway-request-id")
        assert refused.header("access-control-allow-origin") is None
    assert "Origin" in (asked.header("vary") or "")


def test_page_of_an_allowed_origin_may_call_a_private_network(
    gateway_server: StartGateway, mock_server: MockServer
) -> None:
    web = gateway_server(mock_server.url, **{"server.cors_origins": [PAGE]}).web
    private = {**PREFLIGHT, "access-control-request-private-network": "true"}
    asked = web.send("OPTIONS", CHAT, headers={"origin": PAGE, **private})
    assert (asked.status, asked.header("access-control-allow-private-network")) == (200, "true")
    refused = web.send("OPTIONS", CHAT, headers={"origin": "https://evil.example", **private})
    assert (refused.status, refused.header("access-control-allow-private-network")) == (403, None)


def test_preflight_with_an_unknown_method_gets_a_normal_error(
    gateway_server: StartGateway, mock_server: MockServer
) -> None:
    web = gateway_server(mock_server.url, **{"server.cors_origins": [PAGE]}).web
    asked = {"origin": PAGE, "access-control-request-method": "BREW", "x-request-id": "mine"}
    answer = web.send("OPTIONS", CHAT, headers=asked)
    assert (answer.status, answer.error["code"], answer.header("x-gateway-request-id")) == (403, "forbidden", "mine")
    assert answer.error["message"] == "Disallowed CORS method."


@pytest.mark.parametrize(
    ("model", "mock_header", "status"),
    [
        ("mock-small", "", 200),
        ("mock-small", "status=429", 429),
        ("nobody/x", "", 502),
        ("", "", 400),
    ],
)
def test_headers_are_exposed_on_errors_and_streams_too(
    model: str, mock_header: str, status: int, gateway_server: StartGateway, mock_server: MockServer
) -> None:
    nobody = {"base_url": f"http://127.0.0.1:{closed_port()}", "auth": "none", "retries": 0}
    web = gateway_server(mock_server.url, **{"server.cors_origins": [PAGE], "providers.nobody": nobody}).web
    for stream in (False, True):
        body = {"model": model or 1, "messages": [{"role": "user", "content": "hi"}], "stream": stream}
        answer = web.post("/v1/chat/completions", body, {"origin": PAGE, "x-session-id": "s", "x-mock": mock_header})
        assert (answer.status, answer.clean) == (status, True)
        may_be_read(answer)
        assert answer.header("x-session-id") == "s"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nothing", 404), ("GET", "/v1/models", 401), ("GET", "/api/calls/none", 401), ("PUT", "/healthz", 405)],
)
def test_early_refusals_can_be_read_by_allowed_pages(
    method: str, path: str, status: int, gateway_server: StartGateway, mock_server: MockServer
) -> None:
    flags = {"server.cors_origins": [PAGE], "auth.required": True, "auth.admin_key": "admin-0123456789abcdef"}
    answer = gateway_server(mock_server.url, **flags).web.send(method, path, headers={"origin": PAGE})
    assert answer.status == status
    may_be_read(answer)


def may_be_read(answer: Reply) -> None:
    """Check that a page of the allowed origin may read the response and its headers."""
    assert answer.header("access-control-allow-origin") == PAGE
    exposed = (answer.header("access-control-expose-headers") or "").split(", ")
    assert set(exposed) >= {*headers.RESPONSE_HEADERS, *PROVIDERS_HEADERS}
    assert len(exposed) == len(set(exposed))
    assert answer.header("x-gateway-request-id")
