"""Calls go to a cheaper model when little of a budget is left, unless that could break them."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.mock import Behaviour, MockProvider, MockServer
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
    mock.behaviour = Behaviour(tokens=(500, 100))
    assert ask(web).header("x-session-budget-model") is None
    mock.behaviour = Behaviour()


def ask(web: Web, headers: dict[str, str] | None = None, **fields: Any) -> Reply:
    body = {"model": "dear", "messages": HELLO, "max_tokens": 10, **fields}
    reply = web.post(CHAT, body, {"x-session-id": "s", **(headers or {})})
    assert reply.status == 200, reply.body
    return reply


def note(web: Web, name: str) -> Any:
    return web.get("/api/sessions/s/calls").json["calls"][0]["notes"].get(name)


def test_the_cheaper_model_serves_calls_until_the_budget_is_raised(gateway: GatewayThread, mock: MockProvider) -> None:
    for _ in range(2):
        assert ask(gateway.web).header("x-session-budget-model") == "cheap"
        assert mock.calls[-1].model == "cheap"
    assert note(gateway.web, "model") == "cheap, as less than 50% of a budget is left"
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
