"""Calls go to a cheaper model when little of a budget is left, unless that could break them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from gateway.mock import CLAUDE_RULES, Behaviour, MockProvider, MockServer
from tests.conftest import StartGateway
from tests.support.gateways import GatewayThread
from tests.support.web import CHAT, Reply, Web

pytestmark = pytest.mark.long

DEAR = {"match": "dear", "provider": "upstream", "price": {"input": 10, "output": 40}, "window": 100_000}
CHEAP = {"match": "cheap", "provider": "upstream", "price": {"input": 1, "output": 4}, "window": 4_000}
FLAGS: dict[str, object] = {
    "budget.tokens": 1_000,
    "budget.downgrade": {"below": 0.5, "model": "cheap"},
    "models": [DEAR, CHEAP],
}
HELLO: Any = [{"role": "user", "content": "Say hello."}]


@pytest.fixture
def gateway(mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway) -> GatewayThread:
    """Return a gateway whose session "s" has used 60 % of its budget."""
    made = gateway_server(mock_server.url, **FLAGS)
    use_most(made.web, mock)
    return made


def use_most(web: Web, mock: MockProvider) -> None:
    mock.behaviour = Behaviour(tokens=(10, 590))
    assert ask(web).header("x-session-budget-model") is None
    mock.behaviour = Behaviour()


def ask(web: Web, headers: dict[str, str] | None = None, **fields: Any) -> Reply:
    body = {"model": "dear", "messages": HELLO, "max_tokens": 10, **fields}
    reply = web.post(CHAT, body, {"x-session-id": "s", **(headers or {})})
    assert reply.status == 200, reply.body
    return reply


@contextlib.contextmanager
def claude_rules(mock: MockProvider) -> Iterator[None]:
    """Let the provider enforce the rules of Claude models."""
    mock.claude = CLAUDE_RULES
    yield
    mock.claude = ()


def note(web: Web, name: str) -> Any:
    return web.get("/api/sessions/s/calls").json["calls"][0]["notes"].get(name)


def test_the_cheaper_model_serves_calls_until_the_budget_is_raised(gateway: GatewayThread, mock: MockProvider) -> None:
    for _ in range(2):
        assert ask(gateway.web).header("x-session-budget-model") == "cheap"
        assert mock.calls[-1].model == "cheap"
    assert note(gateway.web, "model") == "cheap, as less than 50 % of a budget is left"
    assert gateway.web.send("PATCH", "/api/sessions/s", {"budget": {"tokens": 10_000}}).status == 200
    assert ask(gateway.web).header("x-session-budget-model") is None
    assert mock.calls[-1].model == "dear"


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}],
                    }
                ]
            },
            "images",
        ),
        ({"tools": [{"type": "web_search"}]}, "a tool that the provider runs"),
        (
            {"messages": [*HELLO, {"role": "assistant", "content": "Hello.", "reasoning_content": "Greet."}, *HELLO]},
            "reasoning of another model",
        ),
        ({"messages": [{"role": "user", "content": "word " * 5_000}]}, "window"),
        ({"web_search_options": {"search_context_size": "low"}}, "web_search_options"),
    ],
)
def test_a_call_that_the_cheaper_model_may_not_serve_keeps_its_own(
    gateway: GatewayThread, mock: MockProvider, fields: dict[str, Any], why: str
) -> None:
    gateway.web.send("PATCH", "/api/sessions/s", {"budget": {"tokens": 1_100, "calls": None}})
    before = len(mock.calls)
    body = {"model": "dear", "messages": HELLO, "max_tokens": 10, **fields}
    gateway.web.post(CHAT, body, {"x-session-id": "s", "x-context-trim": "off"})
    assert [call.model for call in mock.calls[before:]] in ([], ["dear"])
    assert why in note(gateway.web, "downgrade")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("format_name", ["chat", "responses", "messages"])
def test_each_format_goes_to_the_cheaper_model(
    gateway: GatewayThread, mock: MockProvider, format_name: str, *, stream: bool
) -> None:
    headers = {"x-session-id": "s"}
    with (
        openai.OpenAI(base_url=gateway.base_url, api_key="any", default_headers=headers) as client,
        anthropic.Anthropic(base_url=gateway.url, api_key="any", default_headers=headers) as claude,
    ):
        if format_name == "chat":
            made: Any = client.chat.completions.create(model="dear", messages=HELLO, max_tokens=10, stream=stream)
        elif format_name == "responses":
            made = client.responses.create(model="dear", input="Say hello.", max_output_tokens=20, stream=stream)
        else:
            made = claude.messages.create(model="dear", messages=HELLO, max_tokens=10, stream=stream)
        if stream:
            assert [*made]
    assert mock.calls[-1].model == "cheap"
    record = gateway.web.get("/api/sessions/s/calls").json["calls"][0]
    assert (record["model"], record["outcome"]) == ("cheap", "ok")
    assert float(record["cost_usd"]) < 0.001


def test_the_own_model_serves_what_the_cheaper_one_refuses(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    flags = {**FLAGS, "models": [DEAR, {**CHEAP, "match": "claude-haiku-5-5"}]}
    gateway = gateway_server(
        mock_server.url, **{**flags, "budget.downgrade": {"below": 0.5, "model": "claude-haiku-5-5"}}
    )
    use_most(gateway.web, mock)
    with claude_rules(mock):
        body = {"model": "dear", "messages": [*HELLO, {"role": "assistant", "content": "Hel"}], "max_tokens": 10}
        reply = gateway.web.post("/v1/messages", body, {"x-session-id": "s"})
    assert reply.status == 200, reply.body
    assert [call.model for call in mock.calls[-2:]] == ["", "dear"], "the refused call names no model in the log"
    assert reply.header("x-session-budget-model") is None
    assert note(gateway.web, "model") is None
    assert "claude-haiku-5-5: 400" in note(gateway.web, "fallback")


def test_thinking_of_the_cheaper_model_does_not_lead_back_to_the_own_one(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    models = [{**DEAR, "match": "claude-opus-5-5"}, {**CHEAP, "match": "claude-haiku-5-5", "window": 100_000}]
    downgrade = {"below": 0.5, "model": "claude-haiku-5-5"}
    gateway = gateway_server(mock_server.url, **{**FLAGS, "models": models, "budget.downgrade": downgrade})
    thinking: Any = {"type": "adaptive"}
    with (
        claude_rules(mock),
        anthropic.Anthropic(base_url=gateway.url, api_key="any", default_headers={"x-session-id": "s"}) as claude,
    ):

        def call(messages: list[Any]) -> Any:
            made = claude.messages.create(model="claude-opus-5-5", messages=messages, max_tokens=60, thinking=thinking)
            content = [block.model_dump(exclude_none=True) for block in made.content]
            assert any(block["type"] == "thinking" for block in content)
            messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "Go on."}]
            return mock.calls[-1].model

        first: list[Any] = [*HELLO]
        mock.behaviour = Behaviour(tokens=(10, 590))
        assert call(first) == "claude-opus-5-5"
        mock.behaviour = Behaviour()
        assert call(first) == "claude-opus-5-5", "Haiku does not read the thinking of Opus"
        assert "reasoning of another model" in note(gateway.web, "downgrade")
        second: list[Any] = [{"role": "user", "content": "Another question."}]
        assert [call(second), call(second), call(second)] == ["claude-haiku-5-5"] * 3


def test_a_client_key_that_may_not_use_the_cheaper_model_keeps_its_own(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    keys = [{"name": "alice", "key": "0123456789abcdef", "models": ["dear"]}]
    gateway = gateway_server(mock_server.url, **FLAGS, **{"auth.keys": keys, "auth.admin_key": "fedcba9876543210"})
    headers = {"authorization": "Bearer 0123456789abcdef"}
    mock.behaviour = Behaviour(tokens=(10, 590))
    ask(gateway.web, headers)
    mock.behaviour = Behaviour()
    ask(gateway.web, headers)
    assert mock.calls[-1].model == "dear"
    record = gateway.web.send("GET", "/api/sessions/s/calls", None, headers).json["calls"][0]
    assert "may not use" in record["notes"]["downgrade"]


def test_another_format_without_a_translation_keeps_the_own_model(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    providers = {"other": {"base_url": mock_server.url, "auth": "none", "dialects": ["messages"]}}
    flags: dict[str, object] = {"providers.other": providers["other"], "models": [DEAR, {**CHEAP, "provider": "other"}]}
    gateway = gateway_server(mock_server.url, **{**FLAGS, **flags})
    use_most(gateway.web, mock)
    assert ask(gateway.web).header("x-session-budget-model") is None
    assert "format" in note(gateway.web, "downgrade")


def test_a_model_that_does_not_cost_less_is_not_used(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url, **{**FLAGS, "models": [{**DEAR, "price": CHEAP["price"]}, CHEAP]})
    use_most(gateway.web, mock)
    assert ask(gateway.web).header("x-session-budget-model") is None
    assert "does not cost less" in note(gateway.web, "downgrade")


def test_reasoning_after_the_change_of_model_is_taken_for_its_own(gateway: GatewayThread, mock: MockProvider) -> None:
    ask(gateway.web)
    said = {"role": "assistant", "content": "Hello.", "reasoning_content": "Greet."}
    assert ask(gateway.web, messages=[*HELLO, said, *HELLO]).header("x-session-budget-model") == "cheap"
