"""/api/count, /api/context, /api/trim."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from gateway.mock import MockProvider, MockServer
from tests.conftest import StartGateway
from tests.support.conversations import TOOLS, agent
from tests.support.formats import Format
from tests.support.web import CHAT, Web

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
BODY: dict[str, Any] = {"model": "gpt-4o", "messages": agent(4), "tools": TOOLS}


@pytest.fixture
def fresh(mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway) -> Web:
    """A gateway that has learned nothing yet."""
    return gateway_server(mock_server.url).web


def test_memory_for_bodies_follows_a_reload(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url, **{"server.max_body_mb": 0.001})
    body = {"model": "gpt-4o", "messages": [{"role": "user", "content": "word " * 2_000}]}
    assert gateway.web.post("/api/count", body).status == 413
    settings = json.loads(gateway.file.read_text())
    gateway.file.write_text(json.dumps({**settings, "server": {"max_body_mb": 1}}))
    assert gateway.web.post("/api/reload").status == 200
    for path in ("/api/count", "/api/context", "/api/trim"):
        assert gateway.web.post(path, body).status == 200, path


def test_body_is_counted_by_parts(fresh: Web, mock: MockProvider) -> None:
    found = fresh.post("/api/count?items=1", BODY).json
    assert (found["model"], found["provider"], found["wire"]) == ("gpt-4o", "upstream", "chat")
    assert (found["counter"], found["source"]) == ("tiktoken:o200k_base", "calibrated")
    assert found["tool_results"] == 4
    parts = found["conversation_tokens"] + found["tool_tokens"] + found["definition_tokens"]
    assert 0 < found["tokens"] - parts < 100
    assert [item["role"] for item in found["items"]] == [message["role"] for message in BODY["messages"]]
    assert sum(item["tokens"] for item in found["items"]) < found["tokens"]
    assert mock.calls == []


def test_conversation_tokens_exclude_definitions_and_images(fresh: Web) -> None:
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
    words = [{"type": "text", "text": "hello world"}]

    def conversation(content: Any, **fields: Any) -> int:
        body = {"model": "gpt-4o", "messages": [{"role": "user", "content": content}], **fields}
        return int(fresh.post("/api/context", body).json["conversation_tokens"])

    assert conversation(words) == conversation(words, tools=TOOLS) == conversation([*words, image]) == 2


def test_plain_text_is_counted_exactly(fresh: Web) -> None:
    found = fresh.post("/api/count", {"model": "gpt-4o", "messages": [{"role": "user", "content": "hello world"}]}).json
    assert (found["tokens"], found["source"]) == (9, "exact")


@pytest.mark.parametrize(
    ("wire", "body"),
    [
        ("responses", {"model": "gpt-4o", "input": "hello world"}),
        ("responses", {"model": "gpt-4o", "input": [{"role": "user", "content": "hello world"}]}),
        ("messages", {"model": "claude-sonnet-4-5", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}),
        ("completions", {"model": "gpt-4o", "prompt": "hello world"}),
    ],
)
def test_every_format_is_counted(fresh: Web, wire: str, body: dict[str, Any]) -> None:
    found = fresh.post("/api/count?items=1", body).json
    assert found["wire"] == wire
    assert found["tokens"] > 0
    assert len(found["items"]) == 1


def test_format_can_be_named(fresh: Web) -> None:
    body = {"model": "claude-sonnet-4-5", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    assert fresh.post("/api/count?wire=chat", body).json["wire"] == "chat"
    refused = fresh.post("/api/count?wire=soap", body)
    assert (refused.status, refused.error["param"]) == (400, "wire")


def test_repeated_tool_result_counts_once(fresh: Web) -> None:
    twice = {**BODY, "messages": [*agent(1), *agent(1)[2:]]}
    once = {**BODY, "messages": agent(1)}
    assert fresh.post("/api/count", twice).json["tool_tokens"] == fresh.post("/api/count", once).json["tool_tokens"]


def test_an_agent_gets_the_numbers_for_its_tools(fresh: Web) -> None:
    found = fresh.post("/api/context", BODY, {"x-context-budget": "9000"}).json
    counted = fresh.post("/api/count", BODY).json
    assert found == {
        "conversation_tokens": counted["conversation_tokens"],
        "accumulated_tool_tokens": counted["tool_tokens"],
        "budget": 9000,
        "remaining": 9000 - counted["tokens"] - counted["margin"],
    }
    assert fresh.post("/api/context", BODY, {"x-context-budget": "10"}).json["remaining"] == 0


def test_tokens_of_tools_and_messages_are_returned_on_request(fresh: Web) -> None:
    plain = fresh.post("/api/count", BODY).json
    counted = fresh.post("/api/count?tools=1&items=true", BODY).json
    assert counted["tools"] == {"list_depot": {"results": 4, "result_tokens": plain["tool_tokens"]}}
    context = fresh.post("/api/context?tools=true&items=1", BODY).json
    assert (context["tools"], context["items"]) == (counted["tools"], counted["items"])
    assert len(context["items"]) == len(BODY["messages"])
    assert counted == {**plain, "tools": counted["tools"], "items": counted["items"]}
    assert "tools" not in fresh.post("/api/context?items=1&tools=0", BODY).json


def test_tool_with_the_most_tokens_comes_first(fresh: Web) -> None:
    calls = [{"type": "function", "id": name, "function": {"name": name, "arguments": "{}"}} for name in ("a", "b")]
    results = [{"role": "tool", "tool_call_id": name, "content": text} for name, text in (("a", "x"), ("b", "y " * 9))]
    body = {**BODY, "messages": [*BODY["messages"][:2], {"role": "assistant", "tool_calls": calls}, *results]}
    assert list(fresh.post("/api/count?tools=1", body).json["tools"]) == ["b", "a"]


def test_without_a_budget_remaining_is_null(fresh: Web) -> None:
    found = fresh.post("/api/context", {**BODY, "model": "nobody-knows-this"}).json
    assert (found["budget"], found["remaining"]) == (None, None)


def test_trim_returns_the_body_that_would_be_forwarded(fresh: Web, mock: MockProvider) -> None:
    body, headers = {**BODY, "messages": agent(12)}, {"x-context-budget": "2500"}
    found = fresh.post("/api/trim?explain=1", body, headers).json
    assert mock.calls == []
    fresh.post(CHAT, body, headers)
    assert found["body"] == json.loads(mock.calls[-1].body)
    assert len(found["context"]["items"]) == len(body["messages"])
    assert found["context"]["trimmed"]


def test_trim_ignores_the_response_mode(fresh: Web) -> None:
    headers = {"x-session-id": "shown", "x-response-mode": "summary"}
    assert fresh.post(CHAT, BODY, headers).header("x-response-mode") == "summary"
    assert fresh.post("/api/trim", BODY, headers).json["body"] == BODY


def test_query_may_set_a_budget(fresh: Web) -> None:
    body = {**BODY, "messages": agent(12)}
    found = fresh.post("/api/trim?explain=1&budget=2500", body).json
    assert found == fresh.post("/api/trim?explain=1", body, {"x-context-budget": "2500"}).json
    assert found["context"]["trimmed"]
    lower = fresh.post("/api/trim?budget=9000000", body, {"x-context-budget": "2500"}).json
    assert lower["body"] == found["body"]
    assert fresh.post("/api/context?budget=2500", body).json["budget"] == 2_500
    assert fresh.post("/api/count?budget=2500", body).json["budget"] == 2_500


@pytest.mark.parametrize("query", ["budget=0", "budget=-5", "budget=many", "budget=", "session=a%20b", "session=x/y/z"])
def test_invalid_query_is_refused(query: str, fresh: Web) -> None:
    for path in ("count", "context", "trim"):
        answer = fresh.post(f"/api/{path}?{query}", BODY)
        assert (answer.status, answer.error["param"]) == (400, query.partition("=")[0])


def test_trim_applies_earlier_trim_decisions_of_the_session(fresh: Web, mock: MockProvider) -> None:
    headers = {"x-context-budget": "2500", "x-session-id": "s"}
    fresh.post(CHAT, {**BODY, "messages": agent(12)}, headers)
    before = json.loads(mock.calls[-1].body)["messages"]
    found = fresh.post("/api/trim?session=s", {**BODY, "messages": agent(13)}, {"x-context-budget": "2500"}).json
    assert found["body"]["messages"][: len(before)] == before


def test_remaining_session_budget_limits_the_context(mock_server: MockServer, gateway_server: StartGateway) -> None:
    web = gateway_server(mock_server.url, **{"budget.tokens": 3_000}).web
    web.post(CHAT, {**BODY, "max_tokens": 10}, {"x-session-id": "s"})
    body = {**BODY, "messages": agent(12)}
    free, held = (web.post("/api/context", body, headers).json for headers in ({}, {"x-session-id": "s"}))
    assert held["budget"] < 3_000 < (free["budget"] or 10**9)
    assert web.post("/api/trim?session=s", body).json["context"]["tokens"] <= held["budget"]


@pytest.mark.parametrize(
    ("headers", "fields"),
    [
        ({"x-thread": "s"}, {}),
        ({"x-litellm-session-id": "s"}, {}),
        ({"x-my-own-session-id": "s"}, {}),
        ({}, {"prompt_cache_key": "s"}),
        ({}, {"metadata": {"session_id": "s"}}),
    ],
)
def test_session_is_named_like_in_a_call(
    headers: dict[str, str], fields: dict[str, Any], mock_server: MockServer, gateway_server: StartGateway
) -> None:
    settings = {"budget.tokens": 3_000, "sessions.id_headers": ["x-thread"]}
    web = gateway_server(mock_server.url, **settings).web
    call = {**BODY, **fields, "max_tokens": 10}
    assert web.post(CHAT, call, headers).header("x-session-id") == "s"
    for path in ("count", "context"):
        found = web.post(f"/api/{path}", {**call, "messages": agent(12)}, headers).json
        assert found["budget"] == web.post(f"/api/{path}?session=s", {**call, "messages": agent(12)}).json["budget"]
        assert found["budget"] < 3_000
    by_query = web.post("/api/count?session=other", call, headers).json["budget"]
    assert by_query > found["budget"], "the query stands before what a call says"


def test_budgets_of_parents_apply_before_the_first_call(mock_server: MockServer, gateway_server: StartGateway) -> None:
    web = gateway_server(mock_server.url).web
    body = {**BODY, "max_tokens": 10}

    def budget(session: str, **headers: str) -> int | None:
        named = {"x-session-id": session, **{name.replace("_", "-"): value for name, value in headers.items()}}
        found: int | None = web.post("/api/context", body, named).json["budget"]
        return found

    web.post(CHAT, body, {"x-session-id": "top"})
    web.post(CHAT, body, {"x-session-id": "middle", "x-parent-session-id": "top"})
    web.post(CHAT, body, {"x-session-id": "leaf", "x-parent-session-id": "middle"})
    assert web.send("PATCH", "/api/sessions/top", {"budget": {"tokens": 9_000}}).status == 200
    top = budget("top")
    assert top is not None
    assert top < 9_000
    assert budget("leaf") == budget("middle") == top
    assert budget("new", x_parent_session_id="leaf") == top
    declared = budget("new", x_session_budget_tokens="500")
    assert declared is not None
    assert declared < 500


def test_budget_of_a_client_key_applies_with_and_without_a_session(
    mock_server: MockServer, gateway_server: StartGateway
) -> None:
    keys = [
        {"name": "small", "key": "gw-key-for-small-ones", "budget": {"tokens": 5_000}},
        {"name": "large", "key": "gw-key-for-large-ones"},
    ]
    web = gateway_server(mock_server.url, auth={"keys": keys, "admin_key": "gw-key-for-admin-ones"}).web
    body = {**BODY, "max_tokens": 10}
    small, large, admin = ({"authorization": f"Bearer gw-key-for-{name}-ones"} for name in ("small", "large", "admin"))
    called = web.post(CHAT, body, {**small, "x-session-id": "s"})
    used = called.totals[2]
    for path in ("count", "context"):
        for headers in (small, {**small, "x-session-id": "s"}, {**small, "x-session-id": "new"}):
            budget = web.post(f"/api/{path}", body, headers).json["budget"]
            assert 4_900 - used < budget < 5_000 - used
        for headers in (large, admin):
            assert web.post(f"/api/{path}", body, headers).json["budget"] > 50_000


def test_context_budget_of_the_active_step_applies(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    restrict, wide = {"name": "n", "context_budget": 2_000}, {"name": "w", "context_budget": 4_000}
    routes = [{"match": "routed", "provider": "upstream", "agent": "routed"}]
    agents = {"writer": {"steps": [wide]}, "routed": {"steps": [{**wide, "context_budget": 3_000}]}}
    web = gateway_server(mock_server.url, steps=[restrict], agents=agents, models=routes).web
    named, writer = {"x-session-id": "s"}, {"x-session-id": "s", "x-session-agent": "writer"}
    assert web.post("/api/context", BODY, named).json["budget"] == 2_000, "its first call begins in it"
    for headers in (named, writer):
        called = web.post(CHAT, BODY, headers)
        found = web.post("/api/context", BODY, headers).json
        assert str(found["budget"]) == called.header("x-context-budget-tokens")
    routed = {**BODY, "model": "routed"}
    web.post(CHAT, routed, writer)
    assert web.post("/api/context", routed, writer).json["budget"] == 3_000
    assert web.post("/api/context", {**BODY, "messages": None, "prompt": "x"}, named).json["budget"] != 2_000


def test_trim_leaves_a_body_within_the_budget_unchanged(fresh: Web) -> None:
    found = fresh.post("/api/trim", BODY).json
    assert found["body"] == BODY
    assert found["context"]["trimmed"] == {}


@pytest.mark.parametrize("body", [{"input": "hello there"}, {"prompt": "hello there"}])
def test_text_is_not_trimmed_and_an_error_says_so(fresh: Web, body: dict[str, str]) -> None:
    [field] = body
    reply = fresh.post("/api/trim", {"model": "gpt-4o", **body}, {"x-context-budget": "1"})
    if field == "prompt":
        assert (reply.status, reply.error["code"]) == (400, "invalid_request")
    else:
        assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
        assert reply.error["param"] == "input"


@pytest.mark.parametrize("form", [Format("messages"), Format("responses")], ids=["messages", "responses"])
def test_requests_of_all_formats_are_trimmed(fresh: Web, form: Format) -> None:
    original = form.agent(12)
    found = fresh.post("/api/trim", original, {"x-context-budget": "2500"}).json
    assert found["context"]["tokens"] <= 2500
    assert len(found["body"][form.array]) <= len(original[form.array])
    calls, results = form.pairs(found["body"][form.array])
    assert calls == results != []


def test_body_that_cannot_be_trimmed_enough_is_an_error(fresh: Web) -> None:
    body = {**BODY, "messages": [{"role": "user", "content": "word " * 3000}]}
    reply = fresh.post("/api/trim", body, {"x-context-budget": "1000"})
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")


def test_prompt_without_messages_over_its_budget_is_an_error(fresh: Web) -> None:
    body, headers = {"model": "gpt-4o", "prompt": "word " * 3000}, {"x-context-budget": "1000"}
    trim = fresh.post("/api/trim", body, headers)
    assert (trim.status, trim.error["code"]) == (400, "invalid_request")
    call = fresh.post("/v1/completions", body, headers)
    assert (call.status, call.error["code"]) == (400, "context_length_exceeded")
    assert "Over its budget it is refused (400 context_length_exceeded)" in trim.error["message"]


@pytest.mark.parametrize("path", ["/api/count", "/api/context", "/api/trim"])
@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b"{}", b'{"model":"m"}', b'{"model":3,"messages":[]}', b'{"messages":[]}']
)
def test_invalid_request_body_is_refused(fresh: Web, path: str, body: bytes) -> None:
    reply = fresh.post(path, body)
    assert (reply.status, reply.error["code"]) == (400, "invalid_request")


def test_compressed_body_is_decompressed(fresh: Web) -> None:
    compressed = gzip.compress(json.dumps(BODY).encode())
    assert (
        fresh.post("/api/count", compressed, {"content-encoding": "gzip"}).json == fresh.post("/api/count", BODY).json
    )


def test_a_body_over_the_limit_is_refused(mock_server: MockServer, gateway_server: StartGateway) -> None:
    gateway = gateway_server(mock_server.url, **{"server.max_body_mb": 0.01})
    reply = gateway.web.post("/api/count", {**BODY, "messages": agent(20)})
    assert (reply.status, reply.error["code"]) == (413, "request_too_large")


def test_client_key_is_required(mock_server: MockServer, gateway_server: StartGateway) -> None:
    keys = [{"name": "alice", "key": "alice-key-0123456789"}]
    gateway = gateway_server(mock_server.url, **{"auth.keys": keys, "auth.admin_key": "admin-key-0123456789"})
    assert gateway.web.post("/api/count", BODY).status == 401
    allowed = gateway.web.post("/api/count", BODY, {"authorization": "Bearer alice-key-0123456789"})
    assert allowed.status == 200
