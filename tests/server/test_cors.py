"""Web pages of other origins: refused, or let in where `server.cors_origins` names them."""

from __future__ import annotations

from gateway.mock import MockServer
from gateway.server import headers
from tests.conftest import StartGateway
from tests.support.web import Reply, Web

PAGE = "https://app.example"
PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}


def call_from(web: Web, origin: str) -> Reply:
    body = {"model": "mock-small", "messages": [{"role": "user", "content": "hi"}]}
    return web.post("/v1/chat/completions", body, {"origin": origin, "x-session-id": "s"})


def test_a_page_that_is_not_named_is_refused_and_nothing_is_forwarded(
    gateway_server: StartGateway, mock_server: MockServer
) -> None:
    web = gateway_server(mock_server.url).web
    before = len(mock_server.provider.calls)
    answer = call_from(web, PAGE)
    assert (answer.status, answer.error["code"]) == (403, "forbidden")
    assert PAGE in answer.error["message"]
    assert answer.header("access-control-allow-origin") is None
    assert len(mock_server.provider.calls) == before


def test_a_page_that_is_named_may_call_and_read_our_headers(
    gateway_server: StartGateway, mock_server: MockServer
) -> None:
    web = gateway_server(mock_server.url, **{"server.cors_origins": [PAGE]}).web
    asked = web.send("OPTIONS", "/v1/chat/completions", headers={"origin": PAGE, **PREFLIGHT})
    assert asked.status == 200
    assert asked.header("access-control-allow-origin") == PAGE
    answer = call_from(web, PAGE)
    assert answer.status == 200
    assert answer.header("access-control-allow-origin") == PAGE
    exposed = (answer.header("access-control-expose-headers") or "").split(", ")
    assert set(exposed) == set(headers.EXPOSED)
    assert web.send("GET", "/api/sessions", headers={"origin": PAGE}).status == 200


def test_a_page_that_is_not_named_beside_one_that_is_stays_out(
    gateway_server: StartGateway, mock_server: MockServer
) -> None:
    web = gateway_server(mock_server.url, **{"server.cors_origins": [PAGE]}).web
    other = "https://evil.example"
    assert web.send("OPTIONS", "/v1/chat/completions", headers={"origin": other, **PREFLIGHT}).status == 400
    assert call_from(web, other).status == 403
