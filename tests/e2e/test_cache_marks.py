"""`context.cache: auto`: the gateway sets cache marks for clients that set none, and the provider bills less."""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import anthropic
import openai
import pytest

from gateway.mock import CLAUDE_RULES, MockProvider, MockServer
from tests.conftest import StartGateway
from tests.support.agents import TOOLS, play
from tests.support.gateways import GatewayThread

TURNS = 12
#: USD per million tokens, with the relations that Anthropic's prices have
PRICE = {"input": 10, "output": 50, "cache_read": 1, "cache_write": 12.5}
MODELS = [{"match": "*claude*", "provider": "upstream", "price": PRICE}]


@pytest.fixture
def claude(mock: MockProvider) -> Iterator[MockProvider]:
    """Yield the built-in provider with today's rules of Claude models."""
    mock.claude = CLAUDE_RULES
    yield mock
    mock.claude = ()


def session_of(gateway: GatewayThread, name: str) -> tuple[dict[str, int], Decimal]:
    view = gateway.web.get(f"/api/sessions/{name}").json
    return view["cumulative_token_usage"], Decimal(view["cost_usd"])


def marks_in(body: bytes) -> int:
    return body.count(b'"cache_control"')


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("budget", ["window", 6_000])
@pytest.mark.parametrize("model", ["claude-fable-5-2", "claude-opus-4-8"])
def test_most_input_of_an_agent_is_read_from_the_cache(
    model: str, budget: object, stream: bool, *, gateway_server: StartGateway, mock_server: MockServer,
    claude: MockProvider,
) -> None:  # fmt: skip
    costs = []
    for cache in ("off", "auto"):
        claude.reset()
        gateway = gateway_server(mock_server.url, models=MODELS, **{"context.cache": cache, "context.budget": budget})
        session = play(gateway.base_url, claude, TURNS, model=model, stream=stream, headers={"x-session-id": "one"})
        assert session.errors == []
        usage, cost_usd = session_of(gateway, "one")
        billed = claude.billed()
        assert (usage["input_tokens"], usage["output_tokens"]) == (billed.input_tokens, billed.output_tokens)
        marks = [marks_in(call.body) for call in claude.calls if call.path.endswith("/messages")]
        assert set(marks) == {0} if cache == "off" else set(marks) <= {1, 2, 3}
        assert (usage["cache_read_tokens"] > 0) is (cache == "auto")
        costs.append(cost_usd)
    assert costs[1] < costs[0] * Decimal("0.7" if budget == "window" else "1")


def test_a_mark_of_the_client_is_kept_and_none_is_added(
    gateway_server: StartGateway, mock_server: MockServer, claude: MockProvider
) -> None:
    gateway = gateway_server(mock_server.url, models=MODELS, **{"context.cache": "auto"})
    session = play(gateway.base_url, claude, 4, caches=True)
    assert session.errors == []
    assert [marks_in(call.body) for call in claude.calls] == [1, 1, 1, 1]


def test_the_record_says_what_the_marks_saved(
    gateway_server: StartGateway, mock_server: MockServer, claude: MockProvider
) -> None:
    gateway = gateway_server(mock_server.url, models=MODELS, **{"context.cache": "auto"})
    play(gateway.base_url, claude, 3, model="claude-opus-4-8", headers={"x-session-id": "one"})
    calls = gateway.web.get("/api/calls?session=one").json["calls"]
    notes = [gateway.web.get(f"/api/calls/{call['request_id']}").json["notes"] for call in reversed(calls)]
    assert "more, to be saved by later calls" in notes[0]["cache_marks"]
    assert notes[-1]["cache_marks"].startswith("set by the gateway; saved $0.")
    usage, cost_usd = session_of(gateway, "one")
    plain = (usage["input_tokens"] * 10 + usage["output_tokens"] * 50) / Decimal(1_000_000)
    saved = sum(
        Decimal(note["cache_marks"].split("$")[1].split()[0]) * (-1 if "cost" in note["cache_marks"] else 1)
        for note in notes
    )
    assert plain - cost_usd == pytest.approx(saved, abs=Decimal("0.000003"))


@pytest.mark.parametrize(
    ("model", "tools"), [("gpt-4o", TOOLS), ("claude-fable-5-2", [])], ids=["another model", "a single question"]
)
def test_other_requests_are_forwarded_byte_for_byte(
    model: str, tools: list[Any], *, gateway_server: StartGateway, mock_server: MockServer, claude: MockProvider
) -> None:
    models = [{"match": "*", "provider": "upstream"}]
    gateway = gateway_server(mock_server.url, models=models, **{"context.cache": "auto"})
    client = anthropic.Anthropic(base_url=gateway.base_url.removesuffix("/v1"), api_key="none", max_retries=0)
    client.messages.create(model=model, max_tokens=99, tools=tools, messages=[{"role": "user", "content": "Hi"}])
    assert json.loads(claude.calls[-1].body)["messages"] == [{"role": "user", "content": "Hi"}]
    assert marks_in(claude.calls[-1].body) == 0


def test_chat_calls_have_no_marks_if_the_provider_does_not_know_them(
    gateway_server: StartGateway, mock_server: MockServer, claude: MockProvider
) -> None:
    gateway = gateway_server(mock_server.url, models=MODELS, **{"context.cache": "auto"})
    client = openai.OpenAI(base_url=gateway.base_url, api_key="none", max_retries=0)
    client.chat.completions.create(model="anthropic/claude-x", messages=[{"role": "system", "content": "Be brief."}])
    assert marks_in(claude.calls[-1].body) == 0
