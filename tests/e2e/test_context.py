"""Count the tokens of requests and trim requests, through a running gateway on real ports."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from gateway.mock import MockProvider, MockServer
from tests.conftest import StartGateway, StartUpstream
from tests.support.conversations import TASK, TOOLS, agent, step
from tests.support.gateways import GatewayThread
from tests.support.scripted import Connection, completion
from tests.support.web import CHAT, Reply, Web

BUDGET = {"x-context-budget": "2500"}


def ask(
    web: Web,
    session: str,
    messages: list[dict[str, Any]],
    headers: dict[str, str] | None = None,
    *,
    model: str = "gpt-4o",
) -> Reply:
    body = {"model": model, "messages": messages, "tools": TOOLS}
    return web.post(CHAT, body, {"x-session-id": session, **(headers or {})})


def sent(mock: MockProvider) -> list[dict[str, Any]]:
    """Return the messages of the last call that reached the provider."""
    found: list[dict[str, Any]] = json.loads(mock.calls[-1].body)["messages"]
    return found


def numbers(reply: Reply) -> tuple[int, int]:
    return int(reply.header("x-context-tokens") or -1), int(reply.header("x-context-tokens-original") or -1)


def test_a_request_within_its_budget_is_forwarded_byte_for_byte(web: Web, mock: MockProvider, session: str) -> None:
    body = b'{"messages" : [{"role":"user", "content":"caf\\u00e9"}],  "model":"gpt-4o", "x":1.50}'
    reply = web.post(CHAT, body, {"x-session-id": session, **BUDGET})
    assert mock.calls[-1].body == body
    assert reply.header("x-context-trimmed") == "none"
    tokens, original = numbers(reply)
    assert tokens == original > 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"model": "text-embedding-3-small", "input": "word " * 300}),
        ("/v1/images/generations", {"model": "gpt-image-1", "prompt": "word " * 300}),
        ("/v1/responses/compact", {"model": "gpt-4.1", "input": "word " * 300}),
    ],
)
def test_a_request_that_cannot_be_trimmed_is_sent_unchanged_and_reported_as_unsupported(
    web: Web, mock: MockProvider, session: str, path: str, body: dict[str, Any]
) -> None:
    reply = web.post(path, body, {"x-session-id": session, "x-context-budget": "10"})
    assert json.loads(mock.calls[-1].body) == body
    assert reply.header("x-context-trimmed") == "unsupported"


def test_only_metered_calls_report_unsupported_trimming(web: Web, session: str) -> None:
    named = {"x-session-id": session}
    refused = web.post("/v1/embeddings", b"{", named)
    assert (refused.status, refused.header("x-context-trimmed")) == (400, None)
    assert web.get("/v1/models", named).header("x-context-trimmed") is None
    counted = web.post("/v1/messages/count_tokens", {"model": "claude-sonnet-4-5", "messages": agent(1)}, named)
    assert counted.header("x-context-trimmed") is None


def test_a_request_over_its_budget_is_trimmed_and_keeps_calls_with_their_results(
    web: Web, mock: MockProvider, session: str
) -> None:
    received = agent(12)
    reply = ask(web, session, received, BUDGET)
    assert reply.status == 200
    tokens, original = numbers(reply)
    assert tokens <= 2500 < original
    messages = sent(mock)
    assert messages[0] == received[0]
    assert messages[1]["content"].startswith(TASK["content"])
    assert messages[-1] == received[-1]
    calls = [call["id"] for message in messages for call in message.get("tool_calls") or ()]
    assert calls == [message["tool_call_id"] for message in messages if message["role"] == "tool"]
    assert reply.header("x-context-trimmed") != "none"
    assert json.loads(mock.calls[-1].body)["tools"] == TOOLS


def test_the_next_turn_keeps_the_trimmed_prefix_unchanged(web: Web, mock: MockProvider, session: str) -> None:
    ask(web, session, agent(12), BUDGET)
    first = sent(mock)
    reply = ask(web, session, agent(13), BUDGET)
    assert sent(mock)[: len(first)] == first
    assert sent(mock)[len(first) :] == step(12)
    assert reply.header("x-context-trimmed") != "none"


def test_alternating_roles_still_alternate_after_trimming(web: Web, mock: MockProvider, session: str) -> None:
    """Some providers refuse any other order, such as a user message after a tool result."""
    talk: list[dict[str, Any]] = [{"role": "system", "content": "You help."}]
    for turn in range(25):
        talk.append({"role": "user", "content": f"Question {turn} about order A{turn}0."})
        ask(web, session, talk, {"x-context-budget": "1200"}, model="mistral-large")
        messages = sent(mock)
        assert [message["role"] for message in messages[1:]] == ["user", "assistant"] * (len(messages) // 2 - 1) + [
            "user"
        ]
        talk.append(
            {"role": "assistant", "content": f"Order A{turn}0 has parcels: " + f"P{turn}7 to hall {turn}. " * 12}
        )
    assert len(messages) < len(talk) - 1


def test_another_gateway_with_the_same_store_sends_the_same_messages(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    first = gateway_server(mock_server.url)
    ask(first.web, "shared", agent(12), BUDGET)
    ask(first.web, "shared", agent(13), BUDGET)
    decided = sent(mock)
    first.stop()
    second = gateway_server(mock_server.url, folder=first.folder)
    ask(second.web, "shared", agent(13), BUDGET)
    assert sent(mock) == decided


def test_the_trimmed_items_of_a_call_match_its_header_and_the_savings(web: Web, session: str) -> None:
    received = agent(12)
    reply = ask(web, session, received, BUDGET)
    record = web.get(f"/api/calls/{reply.header('x-gateway-request-id')}?explain=1").json
    items = record["context"]["items"]
    assert [item["role"] for item in items] == [message["role"] for message in received]
    counted: dict[str, int] = {}
    for item in items:
        counted[item["rule"]] = counted.get(item["rule"], 0) + 1
        assert item["sent_tokens"] <= item["tokens"] or item["rule"] == "recall"
    shown = dict(part.split("=") for part in (reply.header("x-context-trimmed") or "").split(","))
    assert {rule: int(number) for rule, number in shown.items()} == {
        rule: number for rule, number in counted.items() if rule not in ("kept", "pinned")
    }
    assert "items" not in web.get(f"/api/calls/{reply.header('x-gateway-request-id')}").json["context"]
    assert "Parcel" not in json.dumps(record)
    saved = web.get(f"/api/sessions/{session}").json["saved_by_trimming"]
    tokens, original = numbers(reply)
    assert saved == {"input_tokens": original - tokens, "calls": 1}


def test_shadow_mode_decides_but_sends_the_request_unchanged(web: Web, mock: MockProvider, session: str) -> None:
    received = agent(12)
    reply = ask(web, session, received, {**BUDGET, "x-context-trim": "shadow"})
    assert sent(mock) == received
    assert reply.header("x-context-trimmed") == "none"
    assert reply.header("x-context-shadow") not in (None, "none")
    tokens, original = numbers(reply)
    assert tokens == original > 2500
    assert web.get(f"/api/sessions/{session}").json["saved_by_trimming"]["calls"] == 0


def test_trimming_off_sends_the_request_unchanged(web: Web, mock: MockProvider, session: str) -> None:
    received = agent(12)
    reply = ask(web, session, received, {**BUDGET, "x-context-trim": "off"})
    assert sent(mock) == received
    assert (reply.header("x-context-trimmed"), reply.header("x-context-shadow")) == ("none", None)


def test_a_message_too_long_for_the_budget_is_refused_by_its_index_and_costs_nothing(
    web: Web, mock: MockProvider, session: str
) -> None:
    before = len(mock.calls)
    long = [*agent(2), {"role": "user", "content": "word " * 4000}]
    reply = ask(web, session, long, BUDGET)
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
    assert "messages[6] (user)" in reply.error["message"]
    assert reply.header("x-should-retry") == "false"
    assert int(reply.header("x-context-tokens-original") or 0) > 4000
    assert len(mock.calls) == before
    assert reply.totals == (0, 0, 0)


def test_on_overflow_forward_sends_the_request_unchanged(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url, **{"context.on_overflow": "forward"})
    long = [*agent(2), {"role": "user", "content": "word " * 4000}]
    assert ask(gateway.web, "s", long, BUDGET).status == 200
    assert sent(mock) == long


def test_on_overflow_least_sends_the_least_possible(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url, **{"context.on_overflow": "least"})
    long = [*agent(9), {"role": "user", "content": "word " * 4000}]
    reply = ask(gateway.web, "s", long, BUDGET)
    assert reply.status == 200
    assert sent(mock)[0] == long[0]
    assert sent(mock)[-1] == long[-1]
    assert len(sent(mock)) <= 3
    assert int(reply.header("x-context-tokens") or 0) > 4000


def test_after_a_too_long_turn_the_next_turn_keeps_the_earlier_messages(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url, **{"context.on_overflow": "least"})
    assert ask(gateway.web, "s", agent(20), BUDGET).status == 200
    before = sent(mock)
    long = [*agent(20), {"role": "user", "content": "word " * 4000}]
    assert ask(gateway.web, "s", long, BUDGET).status == 200
    assert len(sent(mock)) < len(before)
    later = [*long, {"role": "assistant", "content": "Go on."}, {"role": "user", "content": "Find parcel 4."}]
    reply = ask(gateway.web, "s", later, BUDGET)
    assert reply.status == 200
    assert len([message for message in sent(mock) if message in before]) > len(before) // 2
    assert int(reply.header("x-context-tokens") or 0) <= 2500


@pytest.mark.parametrize(
    "headers", [{"x-context-budget": "many"}, {"x-context-budget": "0"}, {"x-context-budget": "-5"},
                {"x-context-trim": "maybe"}],
)  # fmt: skip
def test_an_invalid_context_header_is_refused(
    web: Web, mock: MockProvider, session: str, headers: dict[str, str]
) -> None:
    before = len(mock.calls)
    reply = ask(web, session, agent(1), headers)
    assert (reply.status, reply.error["code"]) == (400, "invalid_request")
    assert next(iter(headers)) in reply.error["message"]
    assert reply.header("x-session-id") == session
    assert len(mock.calls) == before


def test_a_header_can_only_lower_the_configured_context_budget(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url, **{"context.budget": 3000})
    for headers, limit in (({}, 3000), ({"x-context-budget": "9000"}, 3000), ({"x-context-budget": "2000"}, 2000)):
        reply = ask(gateway.web, f"s{limit}{len(headers)}", agent(20), headers)
        assert numbers(reply)[0] <= limit
        record = gateway.web.get(f"/api/calls/{reply.header('x-gateway-request-id')}").json
        assert record["context"]["budget"] == limit


def test_the_context_budget_is_the_window_minus_the_output_limit(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    models = [{"match": "small", "provider": "upstream", "window": 4000, "output": 2000}]
    gateway = gateway_server(mock_server.url, models=models)
    body = {"model": "small", "messages": agent(20), "max_tokens": 1500}
    reply = gateway.web.post(CHAT, body)
    assert gateway.web.get(f"/api/calls/{reply.header('x-gateway-request-id')}").json["context"]["budget"] == 2500
    assert numbers(reply)[0] <= 2500


def test_a_refusal_for_length_teaches_the_window_and_is_retried_for_the_client(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url)
    reply = ask(gateway.web, "s", agent(30), {"x-mock": "window=4000"})
    assert reply.status == 200
    assert len(mock.calls) == 2
    assert len(sent(mock)) <= len(agent(30))
    record = gateway.web.get(f"/api/calls/{reply.header('x-gateway-request-id')}").json
    assert record["context"]["budget"] == 3600
    assert "refused" in record["notes"]["context"]
    assert record["usage"]["input_tokens"] <= 4000
    # The window is now known to other sessions, too: one call is enough.
    assert ask(gateway.web, "t", agent(30), {"x-mock": "window=4000"}).status == 200
    assert len(mock.calls) == 3


def test_the_output_limit_is_not_subtracted_from_an_input_limit(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    models = [{"match": "m", "provider": "upstream", "window": 20_000, "input": 12_000, "output": 6_000}]
    gateway = gateway_server(mock_server.url, models=models)
    body = {"model": "m", "messages": agent(18), "max_tokens": 6_000}
    reply = gateway.web.post(CHAT, body)
    assert reply.header("x-context-trimmed") == "none"
    assert numbers(reply)[0] > 8_000
    assert reply.header("x-context-budget-tokens") == "12000"
    [model] = gateway.web.get("/api/models?q=m").json["models"]
    assert (model["window"], model["input"], model["output"]) == (20_000, 12_000, 6_000)


def test_a_refusal_that_names_an_input_limit_teaches_it_and_no_window(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url)
    items = [
        {"role": "user", "content": "Sum up: " + "one two three " * 200},
        *({"role": r, "content": f"{i} " * 400} for i in range(12) for r in ("assistant", "user")),
    ]
    body = {"model": "m", "input": items, "max_output_tokens": 3_000}
    reply = gateway.web.post("/v1/responses", body, {"x-session-id": "s", "x-mock": "window=4000"})
    assert (reply.status, reply.header("x-context-budget-tokens")) == (200, "4000")
    again = gateway.web.post("/v1/responses", body, {"x-session-id": "t"})
    assert again.header("x-context-budget-tokens") == "4000", "the output limit is not subtracted"


def test_a_larger_window_requested_by_a_beta_header_applies_to_that_call(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    models = [{"match": "m", "provider": "upstream", "betas": {"wide-1": 30_000}}]
    gateway, wide = gateway_server(mock_server.url, models=models), {"anthropic-beta": "other-1, wide-1"}

    def budget(session: str, headers: dict[str, str]) -> str | None:
        reply = ask(gateway.web, session, agent(20), headers, model="m")
        assert reply.status == 200
        return reply.header("x-context-budget-tokens")

    assert budget("a", {"x-mock": "window=4000"}) == "3600"
    assert budget("b", {}) == "3600", "it was learned"
    assert budget("c", wide) == "27000"
    assert dict(mock.calls[-1].headers)["anthropic-beta"] == "other-1, wide-1"
    assert len(sent(mock)) == len(agent(20))
    # A provider that refuses it anyway teaches the window of calls with this header.
    assert budget("d", {**wide, "x-mock": "window=5000"}) == budget("e", wide) == "4500"


def test_a_configured_window_takes_precedence_over_a_learned_one(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    models = [{"match": "gpt-4o", "provider": "upstream", "window": 100_000}]
    gateway = gateway_server(mock_server.url, models=models)
    assert ask(gateway.web, "s", agent(30), {"x-mock": "window=4000"}).status == 200
    later = ask(gateway.web, "t", agent(30))
    assert later.header("x-context-trimmed") == "none"


def test_an_absurd_reported_window_is_ignored(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url)
    assert ask(gateway.web, "s", agent(3), {"x-mock": "window=1"}).status == 400
    assert ask(gateway.web, "t", agent(3)).status == 200


def test_a_context_budget_for_more_than_20_000_messages_is_refused(web: Web, mock: MockProvider, session: str) -> None:
    before = len(mock.calls)
    many: list[dict[str, Any]] = [{"role": "user", "content": "hi"}] * 20_001
    marked: list[dict[str, Any]] = [{**many[0], "x_gateway": {"priority": 0}}, *many]
    cases: list[tuple[list[dict[str, Any]], dict[str, str]]] = [(many, BUDGET), (marked, {})]
    for messages, headers in cases:
        reply = ask(web, session, messages, headers)
        assert (reply.status, reply.error["code"]) == (400, "invalid_request")
        assert "20,000" in reply.error["message"]
    assert len(mock.calls) == before
    asked = ask(web, session, many)
    assert (asked.status, asked.header("x-context-trimmed")) == (200, "unsupported")


def test_a_refusal_for_length_is_forwarded_if_trimming_cannot_help(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url)
    reply = ask(gateway.web, "s", agent(1, lines=300), {"x-mock": "window=1000"})
    assert reply.status == 400
    assert reply.header("x-gateway-upstream-error") == "true"
    assert "1000 tokens" in reply.error["message"]
    assert len(mock.calls) == 1
    off = ask(gateway.web, "t", agent(30), {"x-mock": "window=4000", "x-context-trim": "off"})
    assert (off.status, off.header("x-gateway-upstream-error")) == (400, "true")


def test_a_refusal_for_length_without_a_number_trims_the_request_and_teaches_nothing(
    byte_server: StartUpstream, gateway_server: StartGateway
) -> None:
    sizes: list[int] = []

    def refuses_the_first(connection: Connection) -> None:
        sizes.append(len(connection.request.body))
        if len(sizes) % 2:
            error = {"code": "context_length_exceeded", "message": "This is too long.", "type": "invalid_request_error"}
            connection.whole(json.dumps({"error": error}).encode(), status=b"400 Bad Request")
        else:
            connection.whole(completion(usage=None))

    gateway = gateway_server(byte_server(refuses_the_first).url)
    for session in ("s", "t"):
        reply = ask(gateway.web, session, agent(30))
        assert reply.status == 200
        received, budget, tokens = (
            int(reply.header(f"x-context-{name}") or 0) for name in ("tokens-original", "budget-tokens", "tokens")
        )
        assert 0 < tokens <= budget <= 0.8 * received
    assert len(sizes) == 4
    assert sizes[0] == sizes[2], "the second session is sent whole, as nothing was learned of a limit"


def test_token_counts_are_corrected_by_reported_usage(web: Web, mock: MockProvider, session: str) -> None:
    """The built-in provider reports a fixed usage: 2,000 input tokens, more than it would count itself."""
    first = ask(web, session, agent(2), {"x-mock": "tokens=2000/5"})
    second = ask(web, session, agent(2), {"x-mock": "tokens=2000/5"})
    assert numbers(second)[0] == 2000 != numbers(first)[0]


def test_a_message_marked_as_pinned_is_kept_and_the_mark_is_not_forwarded(
    web: Web, mock: MockProvider, session: str
) -> None:
    received = agent(12)
    marked = [dict(message) for message in received]
    marked[2]["x_gateway"] = {"priority": "pinned"}
    reply = ask(web, session, marked, BUDGET)
    assert reply.status == 200
    assert sent(mock)[2:4] == received[2:4]
    assert b"x_gateway" not in mock.calls[-1].body
    small = [{"role": "user", "content": "hi", "x_gateway": {"priority": 3}}]
    ask(web, f"{session}-small", small)
    assert sent(mock) == [{"role": "user", "content": "hi"}]


def test_a_message_with_priority_zero_is_dropped_first(web: Web, mock: MockProvider, session: str) -> None:
    marked = [dict(message) for message in agent(6)]
    marked[10]["x_gateway"] = {"priority": 0}
    marked[11]["x_gateway"] = {"priority": 0}
    ask(web, session, marked, {"x-context-budget": "2700"})
    assert "call_4" not in json.dumps(sent(mock))
    assert "call_3" in json.dumps(sent(mock))


def test_an_invalid_mark_is_refused_by_its_position(web: Web, session: str) -> None:
    reply = ask(web, session, [{"role": "user", "content": "hi", "x_gateway": {"prio": 1}}])
    assert (reply.status, reply.error["param"]) == (400, "messages[0].x_gateway")


@pytest.mark.parametrize("streamed", [False, True])
def test_the_openai_sdk_runs_a_long_agent_within_its_budget(
    gateway: GatewayThread, mock: MockProvider, session: str, streamed: bool
) -> None:
    with openai.OpenAI(
        base_url=f"{gateway.url}/v1", api_key="k", max_retries=0,
        default_headers={"x-session-id": session, "x-context-budget": "2500"},
    ) as client:  # fmt: skip
        create: Any = client.chat.completions.with_raw_response.create
        for steps in range(1, 25, 3):
            raw = create(model="gpt-4o", messages=agent(steps), tools=TOOLS, stream=streamed)
            assert int(raw.headers["x-context-tokens"]) <= 2500
            if streamed:
                assert [chunk for chunk in raw.parse() if chunk.choices]
    assert len(mock.calls) == 8


def test_a_call_without_reported_usage_is_charged_by_the_exact_count(
    mock_server: MockServer, gateway_server: StartGateway, session: str
) -> None:
    web = gateway_server(mock_server.url).web
    reply = web.chat(session, "usage=none", model="gpt-4o", messages=[{"role": "user", "content": "hello world"}])
    assert reply.header("x-session-usage-source") == "estimated"
    assert reply.totals[0] == int(reply.header("x-context-tokens") or 0) == 9


# --- each key of `context:` does what it says -------------------------------------------------------------------------


def trimmed(reply: Reply) -> set[str]:
    """Return the rules that changed a message."""
    return {part.partition("=")[0] for part in (reply.header("x-context-trimmed") or "").split(",")}


def test_only_the_configured_strategies_are_used(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    web = gateway_server(mock_server.url, **{"context.strategies": ["drop"], "context.recall": "off"}).web
    assert trimmed(ask(web, "s", agent(12), BUDGET)) == {"drop"}
    assert all(message in agent(12) for message in sent(mock))
    keys = {"context.strategies": ["shorten", "drop"], "context.result_max_tokens": 100, "context.recall": "off"}
    web = gateway_server(mock_server.url, **keys).web
    assert "shorten" in trimmed(ask(web, "s", agent(12), BUDGET))
    cut = [message for message in sent(mock) if message not in agent(12)]
    assert cut
    assert all(len(message["content"]) < 700 for message in cut)


def test_reserve_tokens_are_subtracted_from_the_window(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    models = [{"match": "small", "provider": "upstream", "window": 4000}]
    web = gateway_server(mock_server.url, models=models, **{"context.reserve_tokens": 1000}).web
    reply = web.post(CHAT, {"model": "small", "messages": agent(20), "max_tokens": 10})
    assert web.get(f"/api/calls/{reply.header('x-gateway-request-id')}").json["context"]["budget"] == 3000


def test_a_lower_low_water_mark_trims_more(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    left = []
    for mark in (1, 0.4):
        web = gateway_server(mock_server.url, **{"context.low_water": mark, "context.recall": "off"}).web
        left.append(numbers(ask(web, "s", agent(12), BUDGET))[0])
    assert left[0] > 1.5 * left[1]


def test_the_safety_factor_lowers_the_context_budget(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    web = gateway_server(mock_server.url, **{"context.safety": 2, "context.low_water": 1}).web
    assert 2 * numbers(ask(web, "s", agent(12), BUDGET))[0] <= 2500


def test_the_last_turns_are_never_trimmed(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    turns = [
        *agent(8),
        {"role": "user", "content": "And parcel 9-1?"},
        *step(8),
        {"role": "user", "content": "Thanks."},
    ]
    web = gateway_server(mock_server.url, **{"context.keep_last_turns": 2, "context.recall": "off"}).web
    assert ask(web, "s", turns, {"x-context-budget": "1500"}).status == 200
    assert sent(mock)[-4:] == turns[-4:]


@pytest.mark.parametrize(("recall", "comes_back"), [("off", False), ("all", True)])
def test_recall_adds_dropped_lines_that_the_user_asks_for(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway, recall: str, comes_back: bool
) -> None:
    web = gateway_server(mock_server.url, **{"context.recall": recall, "context.strategies": ["drop"]}).web
    asked = [*agent(12), {"role": "user", "content": "In which row does Parcel 0-17 stand?"}]
    assert ("recall" in trimmed(ask(web, "s", asked, BUDGET))) == comes_back
    assert ("Parcel 0-17 stands in row 51" in sent(mock)[-1]["content"]) == comes_back


def test_after_its_deadline_trimming_only_drops(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    web = gateway_server(mock_server.url, **{"context.deadline_ms": 0.001}).web
    reply = ask(web, "s", agent(40), BUDGET)
    assert trimmed(reply) == {"drop"}
    assert numbers(reply)[0] <= 2500


@pytest.mark.parametrize("trim", ["off", "shadow"])
def test_trimming_can_be_turned_off_by_configuration(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway, trim: str
) -> None:
    web = gateway_server(mock_server.url, **{"context.trim": trim}).web
    reply = ask(web, "s", agent(12), BUDGET)
    assert sent(mock) == agent(12)
    assert (reply.header("x-context-shadow") is not None) == (trim == "shadow")
