"""A Messages request for a compaction reaches the provider unchanged, through a running gateway."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.mock import MockProvider, MockServer
from tests.conftest import StartGateway
from tests.support.gateways import GatewayThread
from tests.support.web import Web

MESSAGES = "/v1/messages"
COMPACTION = {"compaction": {"type": "summarize"}}
BETA = {"anthropic-beta": "compact-2026-09-04"}
ROWS = json.dumps([{"id": number, "name": f"item {number}", "state": "open"} for number in range(80)])
TOOLS = [{"name": name, "input_schema": {"type": "object"}} for name in ("list_items", "drop_items")]


def talk(steps: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"role": "user", "content": "Look at every list."}]
    for number in range(steps):
        call = {"type": "tool_use", "id": f"toolu_{number}", "name": "list_items", "input": {"page": number}}
        result = {"type": "tool_result", "tool_use_id": f"toolu_{number}", "content": ROWS}
        found += [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    return [*found, {"role": "assistant", "content": [{"type": "text", "text": "All were read."}]}]


def body_of(steps: int, **fields: Any) -> bytes:
    body = {"model": "claude-opus-5-5", "max_tokens": 4_096, "messages": talk(steps), "tools": TOOLS, **fields}
    return json.dumps(body).encode()


@pytest.mark.parametrize("overflow", ["error", "forward", "least"])
def test_a_compaction_request_is_never_trimmed(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway, overflow: str
) -> None:
    gateway = gateway_server(mock_server.url, **{"context.on_overflow": overflow})
    over = {"x-session-id": "s", "x-context-budget": "3000", **BETA}
    ordinary = gateway.web.post(MESSAGES, body_of(8), over)
    assert ordinary.header("x-context-trimmed") != "none", "the same conversation is trimmed otherwise"
    asked = body_of(8, **COMPACTION)
    reply = gateway.web.post(MESSAGES, asked, over)
    assert reply.status == 200
    assert mock.calls[-1].body == asked
    assert reply.header("x-context-trimmed") == "none"
    tokens = int(reply.header("x-context-tokens") or 0)
    assert tokens == int(reply.header("x-context-tokens-original") or 0) > 3_000


def test_a_compaction_request_has_the_tool_results_that_the_model_has_seen(
    web: Web, mock: MockProvider, session: str
) -> None:
    """Different results than before would invalidate the thinking in the conversation."""
    shown = {"x-session-id": session, "x-response-mode": "summary", **BETA}
    web.post(MESSAGES, body_of(2), shown)
    before = json.loads(mock.calls[-1].body)["messages"]
    assert before != talk(2)
    web.post(MESSAGES, body_of(2, **COMPACTION), shown)
    assert json.loads(mock.calls[-1].body)["messages"] == before


@pytest.fixture
def small(mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway) -> GatewayThread:
    """Return a gateway with a budget of 8,000 tokens per session."""
    return gateway_server(mock_server.url, **{"budget.tokens": 8_000})


def test_a_budget_refuses_a_compaction_request_instead_of_lowering_its_limit(
    small: GatewayThread, mock: MockProvider
) -> None:
    named = {"x-session-id": "s", **BETA}
    lowered = small.web.post(MESSAGES, body_of(0, max_tokens=9_000), named)
    assert lowered.status == 200
    assert json.loads(mock.calls[-1].body)["max_tokens"] < 9_000, "an ordinary request has its limit lowered"
    count = len(mock.calls)
    refused = small.web.post(MESSAGES, body_of(0, max_tokens=9_000, **COMPACTION), named)
    assert (refused.status, refused.error["code"]) == (400, "budget_exhausted")
    asked = body_of(6, max_tokens=2_000, **COMPACTION)
    assert small.web.post(MESSAGES, asked, named).status == 400, "its results are not shortened to make room"
    assert len(mock.calls) == count
    asked = body_of(0, max_tokens=2_000, **COMPACTION)
    assert small.web.post(MESSAGES, asked, named).status == 200
    assert mock.calls[-1].body == asked


def test_a_step_neither_limits_a_compaction_request_nor_restricts_its_tools(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    step = {"name": "talk", "available_tools": {"allowed": ["list_items"]}, "max_output_tokens": 500}
    gateway = gateway_server(mock_server.url, steps=[step])
    named = {"x-session-id": "s", **BETA}
    gateway.web.post(MESSAGES, body_of(1), named)
    ordinary = json.loads(mock.calls[-1].body)
    assert ordinary["max_tokens"] == 500
    gateway.web.post(MESSAGES, body_of(1, **COMPACTION), named)
    sent = json.loads(mock.calls[-1].body)
    assert "tool_choice" not in sent
    assert sent == {**json.loads(body_of(1, **COMPACTION)), "tools": ordinary["tools"]}


SIGNED = {"type": "compaction", "content": "All lists up to 3 were read.", "signature": "c2lnbmVk", "tool_changes": []}


def after_a_compaction(*, thinks: bool) -> list[dict[str, Any]]:
    """Return messages that start with the signed block, followed by the unchanged turns that the client kept."""
    found: list[dict[str, Any]] = [{"role": "assistant", "content": [SIGNED]}, *talk(6)]
    thought = {"type": "thinking", "thinking": "hm", "signature": "c2ln"}
    for message in found[1:]:
        if thinks and message["role"] == "assistant":
            message["content"].insert(0, thought)
    return [*found, {"role": "user", "content": "And the last one?"}]


@pytest.mark.parametrize("overflow", ["error", "forward", "least"])
def test_turns_after_a_signed_compaction_are_trimmed_only_without_bound_thinking(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway, overflow: str
) -> None:
    gateway = gateway_server(mock_server.url, **{"context.on_overflow": overflow})
    body = {"model": "claude-opus-5-5", "max_tokens": 64, "messages": after_a_compaction(thinks=True)}
    reply = gateway.web.post(MESSAGES, body, {"x-session-id": "s", "x-context-budget": "3000", **BETA})
    assert reply.status == 200
    sent = json.loads(mock.calls[-1].body)
    if overflow == "error":
        assert sent["messages"][0] == {"role": "assistant", "content": [SIGNED]}
        assert b'"signature": "c2ln"' not in mock.calls[-1].body.replace(b'":"', b'": "'), (
            "no thinking remains that the provider would refuse"
        )
    else:
        assert sent == body


@pytest.mark.parametrize(("model", "thinks"), [("claude-opus-5", True), ("claude-opus-5-5", False)])
def test_turns_after_a_signed_compaction_are_trimmed_if_no_thinking_is_bound(
    web: Web, mock: MockProvider, session: str, model: str, *, thinks: bool
) -> None:
    body = {"model": model, "max_tokens": 64, "messages": after_a_compaction(thinks=thinks)}
    reply = web.post(MESSAGES, body, {"x-session-id": session, "x-context-budget": "3000", **BETA})
    assert reply.status == 200
    assert reply.header("x-context-trimmed") != "none"
    sent = json.loads(mock.calls[-1].body)["messages"]
    assert sent[0] == {"role": "assistant", "content": [SIGNED]}, "the block stays first and unchanged"
