"""A conversation with thinking that is bound to an account, across a fallback and a change of the model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.mock import MockProvider, MockServer
from gateway.mock.turns import Behaviour
from tests.conftest import StartGateway
from tests.support import stopping
from tests.support.gateways import GatewayThread
from tests.support.web import Reply

SONNET, OPUS = "claude-sonnet-5-5", "claude-opus-5-5"
SECOND = {"auth": "none", "retries": 0, "breaker": {"failures": 1000}}
MODELS = [{"match": model, "provider": "upstream", "fallback": [f"spare-{model}"]} for model in (SONNET, OPUS)] + [
    {"match": f"spare-{model}", "provider": "second", "name": model} for model in (SONNET, OPUS)
]


@pytest.fixture
def second() -> Iterator[MockServer]:
    server = MockServer(MockProvider()).start()
    yield server
    stopping.soon(server.stop)


@pytest.fixture
def both(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider, second: MockServer
) -> GatewayThread:
    assert not mock.calls
    return gateway_server(mock_server.url, models=MODELS, **{"providers.second": {"base_url": second.url, **SECOND}})


def talk(thoughts: int, task: str = "Think well.") -> list[dict[str, Any]]:
    """Return a conversation after this number of responses with thinking."""
    found: list[dict[str, Any]] = [{"role": "user", "content": task}]
    for number in range(thoughts):
        thinking = {"type": "thinking", "thinking": "hm", "signature": f"c2ln{number}"}
        found += [
            {"role": "assistant", "content": [thinking, {"type": "text", "text": f"So far {number}."}]},
            {"role": "user", "content": "Go on."},
        ]
    return found


def ask(gateway: GatewayThread, messages: list[dict[str, Any]], model: str = SONNET) -> Reply:
    body = {"model": model, "max_tokens": 50, "thinking": {"type": "adaptive"}, "messages": messages}
    reply = gateway.web.post("/v1/messages", body, {"x-session-id": "s"})
    assert reply.status == 200, reply.body
    return reply


def record_of(gateway: GatewayThread, reply: Reply) -> Any:
    return gateway.web.get(f"/api/calls/{reply.header('x-gateway-request-id')}?explain=1").json


def unread(gateway: GatewayThread, reply: Reply) -> list[tuple[int, str, str]]:
    found = record_of(gateway, reply)["unread_thinking"]
    return [(one["blocks"], one["reason"], f"{one['provider']}/{one['model']}") for one in found]


def test_a_conversation_stays_with_the_provider_of_its_newest_thinking(
    both: GatewayThread, mock: MockProvider, second: MockServer
) -> None:
    assert unread(both, ask(both, talk(0))) == []
    assert unread(both, ask(both, talk(1))) == []
    mock.behaviour = Behaviour(status=529)
    fell_back = ask(both, talk(2))
    assert record_of(both, fell_back)["provider"] == "second"
    assert unread(both, fell_back) == [(2, "provider", f"upstream/{SONNET}")]
    mock.behaviour, tried = Behaviour(), len(mock.calls)
    stayed = ask(both, talk(3))
    assert record_of(both, stayed)["provider"] == "second"
    assert len(mock.calls) == tried, "the first provider is not asked"
    assert unread(both, stayed) == [(2, "provider", f"upstream/{SONNET}")], "its own block is read"
    second.provider.behaviour = Behaviour(status=529)
    returned = ask(both, talk(4))
    assert record_of(both, returned)["provider"] == "upstream"
    assert unread(both, returned) == [(2, "provider", f"second/{SONNET}")]


def test_another_conversation_of_the_session_uses_the_configured_provider(
    both: GatewayThread, mock: MockProvider
) -> None:
    mock.behaviour = Behaviour(status=529)
    ask(both, talk(1))
    mock.behaviour = Behaviour()
    other = ask(both, talk(1, "Think of something else."))
    assert record_of(both, other)["provider"] == "upstream"


def test_thinking_readable_by_any_account_does_not_pin_the_provider(both: GatewayThread, mock: MockProvider) -> None:
    mock.behaviour = Behaviour(status=529)
    assert unread(both, ask(both, talk(1), OPUS)) == []
    mock.behaviour = Behaviour()
    assert record_of(both, ask(both, talk(2), OPUS))["provider"] == "upstream"


def test_a_change_of_the_model_reports_the_unreadable_blocks(both: GatewayThread, mock: MockProvider) -> None:
    ask(both, talk(0), OPUS)
    ask(both, talk(1), OPUS)
    assert unread(both, ask(both, talk(2))) == [(2, "model", f"upstream/{OPUS}")]
    assert unread(both, ask(both, talk(3))) == [(2, "model", f"upstream/{OPUS}")]
    assert unread(both, ask(both, talk(4), OPUS)) == [], "Opus reads what Sonnet made, and its own again"
    sent = json.loads(mock.calls[-1].body)["messages"]
    assert sent == talk(4), "the blocks stay in the conversation"


def test_a_conversation_without_thinking_reports_no_unread_blocks(both: GatewayThread) -> None:
    body = {"model": SONNET, "max_tokens": 50, "messages": talk(0)}
    reply = both.web.post("/v1/messages", body, {"x-session-id": "s"})
    assert unread(both, reply) == []
