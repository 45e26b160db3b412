"""Token counting where the provider has no path for it: the gateway's own count, marked as an estimate."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest

from gateway.mock import MockProvider, MockServer
from tests.conftest import StartGateway, StartUpstream
from tests.support.gateways import GatewayThread
from tests.support.scripted import ByteServer
from tests.support.web import HI

COUNT, INPUT_TOKENS = "/v1/messages/count_tokens", "/v1/responses/input_tokens"
MARK = "x-gateway-token-count"
TOOLS = [{"name": "look", "description": "Looks at a hall.", "input_schema": {"type": "object"}}]
ASKED: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "word " * 500}], "tools": TOOLS}


def refusing(status: bytes, body: bytes = b'{"detail": "Not Found"}') -> Any:
    return lambda connection: connection.whole(body, status=status)


@pytest.fixture
def upstream(byte_server: StartUpstream) -> ByteServer:
    """Return a provider that has no path for counting."""
    return byte_server(refusing(b"404 Not Found"))


@pytest.fixture
def gateway(upstream: ByteServer, gateway_server: StartGateway) -> GatewayThread:
    return gateway_server(upstream.url)


def test_the_anthropic_sdk_gets_an_estimate_that_agrees_with_the_gateways_count(gateway: GatewayThread) -> None:
    with anthropic.Anthropic(base_url=gateway.url, api_key="any", max_retries=0) as client:
        raw = client.messages.with_raw_response.count_tokens(**ASKED)
        beta = client.beta.messages.count_tokens(**ASKED)
    assert raw.headers[MARK] == "estimated"
    expected = gateway.web.post("/api/count?wire=messages", ASKED).json["tokens"]
    assert raw.parse().input_tokens == beta.input_tokens == expected
    assert 500 < expected < 700


def test_the_openai_sdk_gets_an_estimate(gateway: GatewayThread) -> None:
    with openai.OpenAI(base_url=gateway.base_url, api_key="any", max_retries=0) as client:
        raw = client.responses.input_tokens.with_raw_response.count(model="m", input="word " * 500)
    assert raw.headers[MARK] == "estimated"
    count = raw.parse()
    assert count.object == "response.input_tokens"
    assert 490 < count.input_tokens < 560


def test_a_provider_without_the_path_is_not_asked_again(gateway: GatewayThread, upstream: ByteServer) -> None:
    for _ in range(3):
        assert gateway.web.post(COUNT, ASKED).json["input_tokens"] > 500
    assert [request.path for request in upstream.requests] == [COUNT]
    gateway.web.post(COUNT, {**ASKED, "model": "other"})
    assert len(upstream.requests) == 2, "what one model shows says nothing of another"


@pytest.mark.parametrize("status", [b"404 Not Found", b"405 Method Not Allowed", b"501 Not Implemented"])
@pytest.mark.parametrize("path", [COUNT, INPUT_TOKENS])
def test_each_status_of_a_missing_path_leads_to_an_estimate(
    status: bytes, path: str, gateway: GatewayThread, upstream: ByteServer
) -> None:
    upstream.script = refusing(status, b"404 page not found")
    field = {"messages": HI} if path == COUNT else {"input": "hi"}
    answer = gateway.web.post(path, {"model": "m", **field})
    assert (answer.status, answer.header(MARK)) == (200, "estimated")
    assert 0 < answer.json["input_tokens"] < 40


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (b"404 Not Found", {"type": "not_found_error", "message": "model: claude-nothing"}),
        (b"404 Not Found", {"code": "model_not_found", "message": "The model does not exist"}),
        (b"400 Bad Request", {"message": "messages: roles must alternate"}),
        (b"401 Unauthorized", {"message": "no key"}),
        (b"429 Too Many Requests", {"message": "slow down"}),
    ],
)
def test_other_refusals_are_the_providers(
    status: bytes, error: dict[str, str], gateway: GatewayThread, upstream: ByteServer
) -> None:
    body = json.dumps({"error": error}).encode()
    upstream.script = refusing(status, body)
    answer = gateway.web.post(COUNT, ASKED)
    assert (answer.status, answer.body, answer.header(MARK)) == (int(status[:3]), body, None)


def test_a_count_of_the_provider_is_passed_on_unmarked(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    answer = gateway_server(mock_server.url).web.post(COUNT, {**ASKED, "model": "mock-small"})
    assert (answer.status, answer.header(MARK), len(mock.calls)) == (200, None, 1)


def test_what_cannot_be_counted_gets_the_refusal_of_the_provider(gateway: GatewayThread) -> None:
    for body in ({"model": "m"}, {"model": "m", "messages": 5}):
        answer = gateway.web.post(COUNT, body)
        assert (answer.status, answer.header(MARK)) == (404, None)


def test_a_count_makes_no_session_and_no_charge(gateway: GatewayThread) -> None:
    assert gateway.web.post(COUNT, ASKED, {"x-session-id": "s"}).status == 200
    assert gateway.web.get("/api/sessions/s").status == 404


def test_a_large_request_is_counted(gateway: GatewayThread) -> None:
    words = [{"role": "user", "content": "word " * 300_000}]
    assert gateway.web.post(COUNT, {"model": "m", "messages": words}).json["input_tokens"] > 290_000


def test_counts_behind_a_translation_are_the_gateways(upstream: ByteServer, gateway_server: StartGateway) -> None:
    row = {"adapter": "litellm", "litellm": "openai", "base_url": f"{upstream.url}/v1", "key": "any-0123456789"}
    gateway = gateway_server(upstream.url, **{"providers.through": row})
    with anthropic.Anthropic(base_url=gateway.url, api_key="any", max_retries=0) as client:
        raw = client.messages.with_raw_response.count_tokens(**{**ASKED, "model": "through/gpt-5.1"})
    assert raw.headers[MARK] == "estimated"
    assert 500 < raw.parse().input_tokens < 700
    assert upstream.requests == []


@pytest.mark.parametrize(
    "odd",
    [
        {"messages": [5, None, {"role": []}]},
        {"messages": [{"role": "user", "content": {"a": 1}}], "tools": 5},
        {"messages": HI, "system": 7, "tools": [None, {"name": {}}]},
        {"messages": [[]], "thinking": [], "tool_choice": "x"},
        {"messages": {"role": "user"}},
    ],
)
def test_odd_requests_get_a_count_or_a_refusal(odd: dict[str, Any], gateway: GatewayThread) -> None:
    assert gateway.web.post(COUNT, {"model": "m", **odd}).status in (200, 400, 404)
    assert gateway.web.post(INPUT_TOKENS, {"model": "m", "input": odd["messages"]}).status in (200, 400, 404)
