"""Retries and circuit breaker through a running gateway: transient errors are hidden, or name a retry-after."""

from __future__ import annotations

import json

import openai
import pytest

from gateway.mock import MockProvider, MockServer
from gateway.mock.turns import Behaviour, Turn
from tests.conftest import StartGateway, closed_port
from tests.support.gateways import until
from tests.support.web import HI

RETRIES = {"providers.upstream.retries": 2, "providers.upstream.breaker": {"failures": 3, "open_s": 60}}


def busy(status: int, retry_after: str | None = "0") -> Turn:
    return Turn(behaviour=Behaviour(status=status, retry_after=retry_after))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [429, 502, 503, 529])
def test_a_transient_error_is_retried_and_the_call_is_charged_once(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway, status: int, stream: bool
) -> None:
    gateway = gateway_server(mock_server.url, **RETRIES)
    mock.push(busy(status), busy(status))
    body = {"model": "mock-small", "messages": HI, "stream": stream}
    reply = gateway.web.post("/v1/chat/completions", body, {"x-session-id": "s"})
    assert reply.status == 200
    assert len(mock.calls) == 3
    assert reply.totals[2] == mock.billed().total_tokens > 0
    assert mock.billed().calls == 1
    record = gateway.web.get(f"/api/calls/{reply.header('x-gateway-request-id')}").json
    assert record["notes"]["retries"] == f"2, the last after {status}"


@pytest.mark.parametrize("status", [429, 503])
def test_the_openai_sdk_does_not_retry_after_the_gateway_has_retried(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway, status: int
) -> None:
    gateway = gateway_server(mock_server.url, **RETRIES)
    mock.push(*[busy(status)] * 12)
    with openai.OpenAI(base_url=gateway.base_url, api_key="any") as client, pytest.raises(openai.APIStatusError):
        client.chat.completions.create(model="mock-small", messages=[{"role": "user", "content": "hi"}])
    assert len(mock.calls) == 3


def test_two_failing_calls_do_not_open_the_circuit_breaker(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url, **{"providers.upstream.retries": 2, "providers.upstream.breaker": {}})
    mock.push(*[busy(503)] * 6)
    assert [gateway.web.chat("s").status for _ in range(3)] == [503, 503, 200]
    assert len(mock.calls) == 7


def test_an_error_with_a_long_retry_after_is_forwarded_without_a_retry(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url, **RETRIES)
    mock.push(busy(429, "3600"))
    reply = gateway.web.chat("s")
    assert (reply.status, reply.header("retry-after")) == (429, "3600")
    assert reply.header("x-gateway-upstream-error") == "true"
    assert len(mock.calls) == 1


def test_the_circuit_opens_for_an_unreachable_provider_and_errors_have_retry_after(
    gateway_server: StartGateway,
) -> None:
    gateway = gateway_server(f"http://127.0.0.1:{closed_port()}", **{**RETRIES, "providers.upstream.retries": 0})
    replies = [gateway.web.chat("s") for _ in range(4)]
    assert [reply.error["code"] for reply in replies] == ["upstream_unreachable"] * 3 + ["upstream_open_circuit"]
    last = replies[-1]
    assert (last.status, last.header("x-should-retry")) == (503, "true")
    assert 1 <= int(last.header("retry-after") or 0) <= 60
    assert last.totals == (0, 0, 0)


def test_a_client_that_leaves_before_a_retry_is_charged_nothing_and_stops_the_retry(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url, **RETRIES)
    mock.push(busy(503, "5"))
    connection = gateway.web.connect()
    body = json.dumps({"model": "mock-small", "messages": HI}).encode()
    connection.request("POST", "/v1/chat/completions", body, {"x-session-id": "s", "content-type": "application/json"})
    until(lambda: mock.calls, what="it was sent")
    connection.close()
    [call] = until(lambda: gateway.web.get("/api/sessions/s/calls").json.get("calls"))
    assert len(mock.calls) == 1
    assert (call["outcome"], call["usage"]) == ("client_left", None)
