"""Combine Anthropic's own context edits with trimming by the gateway."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.conftest import StartGateway, StartUpstream
from tests.support.gateways import GatewayThread
from tests.support.web import Reply

#: As a client writes it after rewriting the conversation. The spaces show whether the gateway rewrites it.
TASK_BUDGET = '{"task_budget" : {"type":"tokens", "total":200000, "remaining":64000}}'
EDITS = '{"edits" : [{"type":"clear_tool_uses_20250919"}, {"type":"compact_20260112"}]}'
BETAS = "task-budgets-2026-03-13,context-management-2025-06-27,compact-2026-01-12"
CLEARED = {"type": "clear_tool_uses_20250919", "cleared_tool_uses": 2, "cleared_input_tokens": 2_000}


def messages(turns: int) -> list[dict[str, Any]]:
    """Return a conversation that is far over its budget."""
    said = [
        [{"role": "user", "content": f"Question {turn}: " + "word " * 200}, {"role": "assistant", "content": f"{turn}"}]
        for turn in range(turns)
    ]
    return [*(one for pair in said for one in pair), {"role": "user", "content": "And now?"}]


def ask(gateway: GatewayThread, session: str, turns: int) -> Reply:
    body = (
        f'{{"model":"claude-fable-5", "max_tokens":100, "output_config":{TASK_BUDGET}, "context_management":{EDITS}, '
        f'"messages":{json.dumps(messages(turns))}}}'
    )
    headers = {"x-session-id": session, "x-context-budget": "2500", "anthropic-beta": BETAS}
    return gateway.web.post("/v1/messages", body.encode(), headers)


def test_a_task_budget_and_edits_pass_through_a_trim_unchanged(
    byte_server: StartUpstream, gateway_server: StartGateway
) -> None:
    upstream = byte_server(lambda connection: connection.whole(b'{"usage":{"input_tokens":9,"output_tokens":9}}'))
    gateway = gateway_server(upstream.url)
    for turns in (20, 21):
        reply = ask(gateway, "s", turns)
        assert reply.header("x-context-trimmed") != "none"
        request = upstream.requests[-1]
        assert len(request.json["messages"]) < 2 * turns
        assert f'"output_config":{TASK_BUDGET}'.encode() in request.body, "`remaining` is the client's to send once"
        assert f'"context_management":{EDITS}'.encode() in request.body
        assert request.header("anthropic-beta") == BETAS


@pytest.mark.parametrize("edits", [[], [CLEARED]], ids=["none", "cleared"])
def test_tokens_cleared_by_the_provider_are_not_counted_as_saved_and_teach_nothing(
    byte_server: StartUpstream, gateway_server: StartGateway, edits: list[dict[str, Any]]
) -> None:
    # The provider bills a part of what was sent.
    said = {"usage": {"input_tokens": 1_500, "output_tokens": 9}, "context_management": {"applied_edits": edits}}
    upstream = byte_server(lambda connection: connection.whole(json.dumps(said).encode()))
    gateway = gateway_server(upstream.url)
    first, second = (ask(gateway, "s", 20) for _ in range(2))
    tokens = [int(one.header("x-context-tokens") or 0) for one in (first, second)]
    assert (tokens[0] == tokens[1]) is bool(edits), "a report of the whole request is learned"
    session = gateway.web.get("/api/sessions/s").json
    received = [int(one.header("x-context-tokens-original") or 0) for one in (first, second)]
    assert session["saved_by_trimming"] == {"input_tokens": sum(received) - sum(tokens), "calls": 2}
    assert session["cumulative_token_usage"]["input_tokens"] == 3_000, "it is charged as reported"
