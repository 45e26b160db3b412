"""A refusal that its provider does not bill is charged to no session and no budget."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.conftest import StartGateway, StartUpstream
from tests.support.gateways import GatewayThread
from tests.support.scripted import SSE_HEAD, Connection
from tests.support.web import HI, Reply

MODELS = [
    {"match": "fable", "provider": "upstream", "price": {"input": 10, "output": 50}},
    {"match": "opus", "provider": "upstream", "price": {"input": 5, "output": 25}},
]
FREE = {"models": MODELS, "providers.upstream.billed_refusals": ["bio"], "budget.tokens": 1_000_000}


def refusal(category: str | None, output: int = 0) -> dict[str, Any]:
    details = {"type": "refusal", "category": category}
    usage = {"input_tokens": 1_000, "output_tokens": output}
    return {"type": "message", "model": "fable", "content": [], "stop_reason": "refusal", "stop_details": details, "usage": usage}  # fmt: skip


def answer(connection: Connection, message: dict[str, Any]) -> None:
    """Send the message as requested: whole or as a stream."""
    if not connection.request.json.get("stream"):
        connection.whole(json.dumps(message).encode())
        return
    begun = {**message, "stop_reason": None, "stop_details": None, "usage": {**message["usage"], "output_tokens": 1}}
    ended = {name: message[name] for name in ("stop_reason", "stop_details")}
    events = [
        {"type": "message_start", "message": begun},
        *({"type": "content_block_start", "index": index, "content_block": block} for index, block in enumerate(message["content"])),
        {"type": "message_delta", "delta": ended, "usage": message["usage"]},
        {"type": "message_stop"},
    ]  # fmt: skip
    connection.send(SSE_HEAD + b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in events))


def ask(gateway: GatewayThread, **fields: Any) -> Reply:
    body = {"model": "fable", "max_tokens": 100, "messages": HI, **fields}
    return gateway.web.post("/v1/messages", body, {"x-session-id": "s"})


def spent(gateway: GatewayThread) -> tuple[int, int, str, int]:
    """Return the calls, tokens and cost of the session, and the used tokens of its budget."""
    session = gateway.web.get("/api/sessions/s").json
    tokens = session["cumulative_token_usage"]["total_tokens"]
    return session["calls"], tokens, session["cost_usd"], session["budget"]["used"]["tokens"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("message", "tokens", "usd"),
    [
        (refusal("cyber"), 0, "0.000000"),
        (refusal(None), 0, "0.000000"),
        (refusal("bio"), 1_000, "0.010000"),
        (refusal("cyber", output=20), 1_020, "0.011000"),
    ],
    ids=["cyber", "no category", "billed category", "in the middle"],
)
def test_an_unbilled_refusal_is_not_charged(
    byte_server: StartUpstream,
    gateway_server: StartGateway,
    message: dict[str, Any],
    tokens: int,
    usd: str,
    *,
    stream: bool,
) -> None:
    upstream = byte_server(lambda connection: answer(connection, message))
    gateway = gateway_server(upstream.url, **FREE)
    reply = ask(gateway, stream=stream)
    assert reply.status == 200
    assert spent(gateway) == (1, tokens, usd, tokens)
    record = gateway.web.get("/api/sessions/s/calls").json["calls"][0]
    assert ("unbilled" in record["notes"]) is (tokens == 0)
    assert b'"input_tokens": 1000' in reply.body, "the client sees what its provider reported"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("first", "usd"), [(0, "0.005500"), (10, "0.016000")], ids=["before output", "in the middle"])
def test_each_attempt_of_a_server_side_fallback_is_charged_at_the_price_of_its_model(
    byte_server: StartUpstream, gateway_server: StartGateway, first: int, usd: str, stream: bool
) -> None:
    passes = [
        {"type": "message", "model": "fable", "input_tokens": 1_000, "output_tokens": first},
        {"type": "fallback_message", "model": "opus", "input_tokens": 1_000, "output_tokens": 20},
    ]
    trigger = {"type": "refusal", "category": "cyber"}
    block = {"type": "fallback", "from": {"model": "fable"}, "to": {"model": "opus"}, "trigger": trigger}
    usage = {"input_tokens": 1_000, "output_tokens": 20, "iterations": passes}
    # In a stream, the requested model has started the message.
    message = {**refusal(None), "model": "fable" if stream else "opus", "content": [block], "usage": usage}
    message |= {"stop_reason": "end_turn", "stop_details": None}
    upstream = byte_server(lambda connection: answer(connection, message))
    gateway = gateway_server(upstream.url, **FREE)
    assert ask(gateway, stream=stream, fallbacks=[{"model": "opus"}]).status == 200
    tokens = 1_020 + (1_010 if first else 0)
    assert spent(gateway) == (1, tokens, usd, tokens)
    assert gateway.web.get("/api/sessions/s/calls").json["calls"][0]["response_model"] == "opus"


DEAR = [
    {"match": "claude-cheap", "provider": "upstream", "price": {"input": 1, "output": 5}},
    {"match": "claude-opus-*", "provider": "upstream", "price": {"input": 5, "output": 25}},
]


@pytest.mark.parametrize("fallbacks", ["default", [{"model": "claude-opus-5", "max_tokens": 64_000}]])
def test_the_reservation_covers_the_most_expensive_server_side_fallback(
    byte_server: StartUpstream, gateway_server: StartGateway, fallbacks: object
) -> None:
    upstream = byte_server(lambda connection: answer(connection, {**refusal("cyber"), "model": "claude-cheap"}))
    gateway = gateway_server(upstream.url, models=DEAR, **{"budget.usd": 1})
    assert ask(gateway, model="claude-cheap", max_tokens=100_000, fallbacks=fallbacks).status == 200
    body = upstream.requests[0].json
    # 1 USD is 40,000 output tokens of the most expensive model.
    limits = [body["max_tokens"], *(one["max_tokens"] for one in body["fallbacks"] if isinstance(one, dict))]
    assert all(39_000 < limit < 40_000 for limit in limits)
