"""The JSON of sessions, tools, costs and models in /api, in a running gateway."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from gateway.mock import MockProvider, MockServer
from tests.conftest import StartGateway
from tests.support.web import CHAT, HI, Web


def test_session_is_shown_with_all_fields(web: Web, session: str) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    web.chat(session, tools=[tool])
    web.chat(session)
    view = web.get(f"/api/sessions/{session}").json
    assert view["id"] == session
    assert view["calls"] == 2
    assert view["recent_tools"] == ["look"]
    assert view["derived_id"] is False
    assert view["usage_source"] == "provider"
    created, last = (datetime.fromisoformat(view[name]) for name in ("created_at", "last_call_at"))
    assert created <= last
    usage = view["cumulative_token_usage"]
    assert usage["input_tokens"] + usage["output_tokens"] == usage["total_tokens"] > 0
    assert view["cost_usd"] is None


def test_a_session_shows_what_each_of_its_tools_has_in_the_context(web: Web, session: str) -> None:
    look, read = ({"type": "function", "function": {"name": name, "parameters": {}}} for name in ("look", "read"))
    headers = {"x-session-id": session}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    for tool in (look, look, read):
        answer = web.post(CHAT, {"model": "gpt-4o", "messages": messages, "tools": [tool]}, headers).json
        called = answer["choices"][0]["message"]
        name = called["tool_calls"][0]["id"]
        result = {"role": "tool", "tool_call_id": name, "content": f"{len(messages)} lines were found"}
        messages += [called, result, {"role": "user", "content": "go on"}]
    messages.append({"role": "tool", "tool_call_id": "nobody's", "content": "words that nobody asked for"})
    request_id = web.post(CHAT, {"model": "gpt-4o", "messages": messages}, headers).header("x-gateway-request-id")
    web.post("/v1/embeddings", {"model": "text-embedding-3-small", "input": "text"}, headers)
    view, context = web.get(f"/api/sessions/{session}").json, web.get(f"/api/calls/{request_id}").json["context"]
    assert view["recent_tools"] == ["look", "look", "read"]
    assert [(name, one["calls"], one["results"]) for name, one in view["tools"].items()] == [
        ("look", 2, 2),
        ("read", 1, 1),
        ("unknown", 0, 1),
    ]
    assert sum(one["result_tokens"] for one in view["tools"].values()) == context["tool_tokens"] > 4
    shown = {name: {part: one[part] for part in ("results", "result_tokens")} for name, one in view["tools"].items()}
    assert context["tools"] == shown


def test_a_reset_session_shows_the_tools_of_its_context_and_no_calls(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    own = gateway_server(mock_server.url)
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    result = {"role": "tool", "tool_call_id": "1", "content": "three words more"}
    own.web.chat("s", tools=[tool], messages=[*HI, result])
    assert own.web.post("/api/sessions/s/reset").status == 200
    view = own.web.get("/api/sessions/s").json
    assert view["recent_tools"] == []
    assert {name: one["calls"] for name, one in view["tools"].items()} == {"unknown": 0}


def test_costs_are_shown_to_the_millionth(web: Web, session: str) -> None:
    first = web.chat(session, "tokens=1000/7", model="priced")
    assert first.header("x-session-cumulative-cost-usd") == "0.001070"
    assert web.chat(session, "tokens=1/0", model="priced").header("x-session-cumulative-cost-usd") == "0.001071"
    assert web.get(f"/api/sessions/{session}").json["cost_usd"] == "0.001071"
    assert web.get(f"/api/calls/{first.header('x-gateway-request-id')}").json["cost_usd"] == "0.001070"


def test_cost_with_an_unknown_part_is_not_shown(web: Web, session: str) -> None:
    assert web.chat(session, model="priced").header("x-session-cumulative-cost-usd")
    assert web.chat(session, model="nobody-knows-this").header("x-session-cumulative-cost-usd") is None
    assert web.get(f"/api/sessions/{session}").json["cost_usd"] is None


def test_models_are_looked_up_by_a_part_of_their_name(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url, **{"providers.openai": {"base_url": mock_server.url, "auth": "none"}})
    models = gateway.web.get("/api/models?q=gpt-4o-mini").json["models"]
    assert models
    assert all("gpt-4o-mini" in model["model"] for model in models)
    assert len(gateway.web.get("/api/models?q=gpt-4o-mini&limit=1").json["models"]) == 1
    named = next(model for model in models if model["name"] == "gpt-4o-mini")
    assert named["provider"] == "openai"
    assert named["window"] == 128_000
    assert float(named["price"]["input"]) > 0
    assert gateway.web.get("/api/models?q=no-such-model-anywhere").json["models"] == []
    assert gateway.web.get("/api/models?q=gpt-4o-min?").json["models"] == [
        model for model in models if model["model"].endswith("gpt-4o-mini")
    ]


def test_model_of_a_route_and_a_table_is_listed_once(gateway_server: StartGateway, mock_server: MockServer) -> None:
    row = {"match": "gpt-4o-mini", "provider": "openai", "window": 5000}
    gateway = gateway_server(mock_server.url, models=[row], built_in_providers=True)
    found = [
        one for one in gateway.web.get("/api/models?q=gpt-4o-mini").json["models"] if one["model"] == "gpt-4o-mini"
    ]
    assert [one["window"] for one in found] == [5000]


def test_response_mode_follows_the_budget_only_if_modes_are_on(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    for modes, mode in ((True, "table"), (False, "raw")):
        own = gateway_server(mock_server.url, **{"budget.tokens": 100, "budget.modes": modes})
        own.web.chat("s", "tokens=40/20")
        view, listed = own.web.get("/api/sessions/s").json, own.web.get("/api/sessions").json["sessions"]
        changed = own.web.send("PATCH", "/api/sessions/s", {"budget": {"tokens": 101}}).json
        assert view["budget"]["used_fraction"] == 0.6
        assert [one["response_mode"] for one in (view, *listed, changed)] == [mode] * 3
