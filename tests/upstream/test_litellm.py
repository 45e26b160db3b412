"""The litellm adapter from outside: requests to the provider, errors, and things it must never do."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway import config
from gateway.app.resources import translation_problems
from gateway.core.errors import (
    GatewayError,
    InvalidRequest,
    NotFound,
    Unauthenticated,
    UpstreamNotAccepted,
    UpstreamProtocolError,
    UpstreamRefused,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from gateway.core.http.headers import Headers
from gateway.core.http.request import Outgoing
from gateway.upstream.litellm import LitellmSettings, LitellmUpstream
from gateway.upstream.litellm.faults import Refusal, convert
from tests.conftest import StartUpstream, closed_port, full_backlog
from tests.support.scripted import DONE, SSE_HEAD, Connection, chunk, completion, usage_chunk
from tests.support.timing import eventually, in_time

ROOT = Path(__file__).parent.parent.parent
FAMILIES = config.families()
HI = [{"role": "user", "content": "hi"}]
CHAT = "chat/completions"
KEY: Headers = [(b"authorization", b"Bearer sk-secret-key")]
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"model": "m", "messages": HI},
    "messages": {"model": "m", "messages": HI, "max_tokens": 9},
    "responses": {"model": "m", "input": "hi"},
}
MESSAGE = json.dumps(
    {
        "id": "msg_1", "type": "message", "role": "assistant", "model": "m", "stop_reason": "end_turn",
        "content": [{"type": "text", "text": "hello"}], "usage": {"input_tokens": 10, "output_tokens": 5},
    }
).encode()  # fmt: skip
#: a warning of pydantic about litellm's types, which is suppressed outside of tests
pytestmark = [
    pytest.mark.filterwarnings("ignore:Accessing the"),
    pytest.mark.filterwarnings("ignore:.*ReadOnly. qualifier"),
]
paths = pytest.mark.parametrize("path", list(BODIES))


@asynccontextmanager
async def upstream_of(url: str, **changes: Any) -> AsyncIterator[LitellmUpstream]:
    values: dict[str, Any] = {
        "provider": "openai", "base_url": f"{url}/v1", "headers": frozenset({b"x-fixed"}), "is_keyless": False,
        "options": {}, "connect_s": 30, "first_byte_s": 30, "between_bytes_s": 30, "families": FAMILIES, **changes,
    }  # fmt: skip
    upstream = LitellmUpstream(LitellmSettings("p", **values))
    try:
        yield upstream
    finally:
        await upstream.aclose()


def outgoing(
    url: str,
    path: str = "chat/completions",
    fields: Mapping[str, Any] = {},
    *,
    headers: Headers = KEY,
    method: str = "POST",
) -> Outgoing:
    body = json.dumps({**BODIES.get(path, BODIES["chat/completions"]), **fields}).encode()
    return Outgoing(method, f"{url}/v1/{path}", headers, body)


async def answer_of(upstream: LitellmUpstream, request: Outgoing) -> tuple[int, bytes]:
    async with upstream.send(request) as reply:
        return reply.status, b"".join([piece async for piece in reply.chunks()])


def streamed(connection: Connection) -> None:
    connection.send(SSE_HEAD + chunk("hello") + chunk("", **finish("stop")) + usage_chunk() + DONE)


def finish(reason: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}


async def test_the_configured_headers_and_the_credential_go_to_the_provider_and_no_others(
    byte_server: StartUpstream,
) -> None:
    server = byte_server(lambda connection: connection.whole(completion()))
    headers: Headers = [*KEY, (b"x-fixed", b"1"), (b"x-other", b"2"), (b"x-stainless-os", b"3"), (b"user-agent", b"me")]
    async with upstream_of(server.url) as upstream:
        status, body = await answer_of(upstream, outgoing(server.url, headers=headers))
    assert status == 200
    assert json.loads(body)["choices"][0]["message"]["content"] == "hello"
    [request] = server.requests
    assert request.path == "/v1/chat/completions"
    assert request.header("authorization") == "Bearer sk-secret-key"
    assert (request.header("x-fixed"), request.header("x-other")) == ("1", None)
    assert request.header("user-agent") != "me"


@pytest.mark.parametrize("header", [(b"x-api-key", b"sk-mine"), (b"api-key", b"sk-mine")])
async def test_a_credential_is_taken_from_wherever_its_format_puts_it(
    byte_server: StartUpstream, header: tuple[bytes, bytes]
) -> None:
    server = byte_server(lambda connection: connection.whole(completion()))
    async with upstream_of(server.url) as upstream:
        await answer_of(upstream, outgoing(server.url, headers=[header]))
    assert server.requests[0].header("authorization") == "Bearer sk-mine"


async def test_without_a_credential_nothing_is_sent_even_if_the_environment_has_one(
    byte_server: StartUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-machine")
    server = byte_server(lambda connection: connection.whole(completion()))
    async with upstream_of(server.url) as upstream:
        with pytest.raises(Unauthenticated, match=r"providers\.p\.key"):
            await answer_of(upstream, outgoing(server.url, headers=[]))
    assert server.requests == []
    async with upstream_of(server.url, is_keyless=True) as upstream:
        await answer_of(upstream, outgoing(server.url, headers=[]))
    assert server.requests[0].header("authorization") == "Bearer sk-of-the-machine"


@paths
@pytest.mark.parametrize(
    "field",
    [
        {"api_base": "http://127.0.0.1:9"}, {"base_url": "http://127.0.0.1:9"}, {"api_key": "sk-x"},
        {"custom_llm_provider": "anthropic"}, {"mock_response": "free"}, {"fallbacks": ["gpt-4o"]},
        {"extra_body": {"model": "dear"}}, {"extra_headers": {"a": "b"}}, {"litellm_params": {}},
        {"aws_secret_access_key": "x"}, {"vertex_credentials": "/etc/passwd"}, {"_skip_mcp_handler": False},
        {"model_list": []}, {"num_predict": 9}, {"max_new_tokens": 9}, {"generationConfig": {"maxOutputTokens": 9}},
        {"azure_ad_token": "x"}, {"headers": {"a": "b"}},
    ],
    ids=lambda field: next(iter(field)),
)  # fmt: skip
async def test_fields_that_control_litellm_are_refused(
    byte_server: StartUpstream, path: str, field: dict[str, Any]
) -> None:
    server = byte_server(lambda connection: connection.whole(completion()))
    async with upstream_of(server.url) as upstream:
        with pytest.raises(InvalidRequest, match=next(iter(field))):
            await answer_of(upstream, outgoing(server.url, path, field))
    assert server.requests == []


@paths
async def test_limit_field_of_another_format_is_refused(byte_server: StartUpstream, path: str) -> None:
    server = byte_server(lambda connection: connection.whole(completion()))
    field = "max_tokens" if path == "responses" else "max_output_tokens"
    async with upstream_of(server.url) as upstream:
        with pytest.raises(InvalidRequest, match=field):
            await answer_of(upstream, outgoing(server.url, path, {field: 10_000}))


async def test_unknown_field_is_passed_to_a_provider_that_accepts_it(byte_server: StartUpstream) -> None:
    server = byte_server(lambda connection: connection.whole(completion()))
    async with upstream_of(server.url) as upstream:
        await answer_of(
            upstream, outgoing(server.url, CHAT, {"min_p": 0.1, "chat_template_kwargs": {"thinking": True}})
        )
    sent = server.requests[0].json
    assert (sent["min_p"], sent["chat_template_kwargs"]) == (0.1, {"thinking": True})
    async with upstream_of(server.url, provider="anthropic") as upstream:
        with pytest.raises(InvalidRequest, match="min_p"):
            await answer_of(upstream, outgoing(server.url, CHAT, {"min_p": 0.1}))


async def test_hints_are_left_out_and_noted(byte_server: StartUpstream) -> None:
    server = byte_server(lambda connection: connection.whole(MESSAGE))
    notes: dict[str, str] = {}
    request = outgoing(
        server.url, CHAT, {"metadata": {"session_id": "s"}, "prompt_cache_key": "k", "n": 1, "store": False}
    )
    async with upstream_of(server.url, provider="anthropic", base_url=server.url) as upstream:
        await answer_of(
            upstream, Outgoing("POST", f"{server.url}/chat/completions", KEY, request.body, notes.__setitem__)
        )
    assert notes == {"untranslated": "metadata, n, prompt_cache_key, store"}
    assert {"metadata", "n", "prompt_cache_key", "store"}.isdisjoint(server.requests[0].json)


@pytest.mark.parametrize(
    ("path", "fields", "noted"),
    [
        ("chat/completions", {"prompt_cache_key": "k"}, "prompt_cache_key"),
        # litellm derives one from the session in it
        ("messages", {"metadata": {"user_id": json.dumps({"session_id": "s"})}}, "user"),
    ],
)
async def test_mistral_at_another_host_gets_no_prompt_cache_key(
    byte_server: StartUpstream, path: str, fields: dict[str, Any], noted: str
) -> None:
    server = byte_server(lambda connection: connection.whole(completion()))
    notes: dict[str, str] = {}
    sent = outgoing(server.url, path, {"model": "mistral-large-latest", **fields})
    async with upstream_of(server.url, provider="mistral") as upstream:
        status, _ = await answer_of(upstream, Outgoing("POST", sent.url, KEY, sent.body, notes.__setitem__))
    assert (status, notes) == (200, {"untranslated": noted})
    assert "prompt_cache_key" not in server.requests[0].json


async def test_unsigned_thinking_has_an_empty_signature_as_in_a_stream(byte_server: StartUpstream) -> None:
    """The type of the SDK has a string there, and clients send back what they received."""
    said = {"role": "assistant", "content": "hello", "reasoning_content": "hm"}
    answer = {**json.loads(completion()), "choices": [{"index": 0, "message": said, "finish_reason": "stop"}]}
    server = byte_server(lambda connection: connection.whole(json.dumps(answer).encode()))
    async with upstream_of(server.url) as upstream:
        _, body = await answer_of(upstream, outgoing(server.url, "messages"))
    assert json.loads(body)["content"][0] == {"type": "thinking", "thinking": "hm", "signature": ""}


CALLED = {"id": "t", "type": "function", "function": {"name": "get", "arguments": "{}"}}
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "SIG"}
#: a turn with a tool call and thinking, in each format
THOUGHTFUL: dict[str, dict[str, Any]] = {
    "chat/completions": {
        "messages": [
            *HI,
            {"role": "assistant", "reasoning_content": "hm", "thinking_blocks": [THOUGHT], "tool_calls": [CALLED]},
            {"role": "tool", "tool_call_id": "t", "content": "one"},
        ]
    },
    "messages": {
        "messages": [
            *HI,
            {"role": "assistant", "content": [THOUGHT, {"type": "tool_use", "id": "t", "name": "get", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "one"}]},
        ]
    },
    "responses": {
        "input": [
            *HI,
            {
                "type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}],
                "encrypted_content": json.dumps([THOUGHT]),
            },
            {"type": "function_call", "call_id": "t", "name": "get", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "t", "output": "one"},
        ]
    },
}  # fmt: skip


PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aaaa"}}
SHOWN = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "one"}, PICTURE]}
FAILED = {"type": "tool_result", "tool_use_id": "t", "content": "no", "is_error": True}


CITED: dict[str, Any] = {
    "type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "one"},
    "citations": {"enabled": True},
}  # fmt: skip
FOUND = {"type": "search_result", "source": "s", "title": "t", "content": [{"type": "text", "text": "one"}]}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": [{**FOUND, "citations": {"enabled": True}}]}


@pytest.mark.parametrize(
    ("fields", "noted"),
    [
        ({"messages": [{"role": "user", "content": [CITED]}]}, {"untranslated": "citations"}),
        ({"messages": [{"role": "user", "content": [{**CITED, "citations": {"enabled": False}}]}]}, {}),
        (
            {"messages": [*THOUGHTFUL["messages"]["messages"][:-1], {"role": "user", "content": [RESULT]}]},
            {"untranslated": "citations"},
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, {"untranslated": "citations"}),
        ({"context_management": {"edits": []}}, {"untranslated": "context_management"}),
    ],
)
async def test_fields_lost_for_a_messages_client_are_noted(
    byte_server: StartUpstream, fields: dict[str, Any], noted: dict[str, str]
) -> None:
    server = byte_server(lambda connection: connection.whole(MESSAGE))
    notes: dict[str, str] = {}
    sent = outgoing(server.url, "messages", {"model": "claude-sonnet-4-5", **fields})
    async with upstream_of(server.url, provider="anthropic", base_url=server.url) as upstream:
        request = Outgoing("POST", f"{server.url}/messages", KEY, sent.body, notes.__setitem__)
        status, _ = await answer_of(upstream, request)
    assert (status, notes) == (200, noted)


@pytest.mark.parametrize(
    ("provider", "model", "blocks", "noted"),
    [
        ("openai", "gpt-5", [FAILED], {"untranslated": "is_error"}),
        ("openai", "gpt-5", [{**FAILED, "is_error": False}], {}),
        ("openai", "gpt-5", [SHOWN, PICTURE], {}),
        ("deepseek", "deepseek-chat", [SHOWN], {"untranslated": "image_url"}),
        ("deepseek", "deepseek-chat", [PICTURE, {"type": "text", "text": "see"}], {"untranslated": "image_url"}),
    ],
)
async def test_content_silently_removed_by_litellm_is_noted(
    byte_server: StartUpstream, provider: str, model: str, blocks: list[dict[str, Any]], noted: dict[str, str]
) -> None:
    server = byte_server(lambda connection: connection.whole(completion()))
    notes: dict[str, str] = {}
    turns = [*THOUGHTFUL["messages"]["messages"][:-1], {"role": "user", "content": blocks}]
    sent = outgoing(server.url, "messages", {"model": model, "messages": turns})
    async with upstream_of(server.url, provider=provider) as upstream:
        status, _ = await answer_of(upstream, Outgoing("POST", sent.url, KEY, sent.body, notes.__setitem__))
    assert (status, notes) == (200, noted)
    is_sent = b"aaaa" in server.requests[0].body
    assert is_sent == (provider == "openai" and (SHOWN in blocks))


#: by format: the field with the effort, and the field with the output limit
EFFORTS: dict[str, tuple[dict[str, Any], str]] = {
    "chat/completions": ({"reasoning_effort": "high"}, "max_completion_tokens"),
    "responses": ({"reasoning": {"effort": "high"}}, "max_output_tokens"),
}


@pytest.mark.parametrize("path", list(EFFORTS))
@pytest.mark.parametrize(
    ("model", "limit", "thinking"),
    [
        ("claude-sonnet-4-5", 9000, {"type": "enabled", "budget_tokens": 4096}),
        ("claude-sonnet-4-5", 4096, {"type": "enabled", "budget_tokens": 2048}),
        ("claude-sonnet-4-5", 1100, {"type": "enabled", "budget_tokens": 1024}),
        ("claude-sonnet-4-5", 1000, None),
        ("claude-opus-4-6", 1000, {"type": "adaptive", "display": "summarized"}),
    ],
)
async def test_thinking_for_an_effort_fits_the_output_limit_of_anthropic(
    byte_server: StartUpstream, path: str, model: str, limit: int, thinking: dict[str, Any] | None
) -> None:
    server = byte_server(lambda connection: connection.whole(MESSAGE))
    notes: dict[str, str] = {}
    effort, name = EFFORTS[path]
    sent = outgoing(server.url, path, {"model": model, **effort, name: limit})
    async with upstream_of(server.url, provider="anthropic", base_url=server.url) as upstream:
        request = Outgoing("POST", f"{server.url}/{path}", KEY, sent.body, notes.__setitem__)
        status, _ = await answer_of(upstream, request)
    arrived = server.requests[0].json
    assert (status, arrived["max_tokens"], arrived.get("thinking")) == (200, limit, thinking)
    assert notes == ({} if thinking else {"untranslated": "reasoning_effort"})


def to_claude(url: str, path: str, fields: Mapping[str, Any], notes: dict[str, str] | None = None) -> Outgoing:
    body = json.dumps({**BODIES[path], **fields}).encode()
    return Outgoing("POST", f"{url}/{path}", KEY, body, ({} if notes is None else notes).__setitem__)


SAMPLING = {"temperature": 0.2, "top_p": 0.9, "top_k": 5}


@pytest.mark.parametrize("path", ["chat/completions", "messages"])
@pytest.mark.parametrize(
    ("model", "sent", "noted"),
    [
        ("claude-opus-5-5", {}, ["temperature", "top_k", "top_p"]),
        ("claude-haiku-5-5", {}, ["temperature", "top_k", "top_p"]),
        ("claude-opus-4-7", {}, ["temperature", "top_k", "top_p"]),
        ("claude-sonnet-4-5", SAMPLING, []),
    ],
)
async def test_sampling_is_removed_for_models_that_refuse_it(
    byte_server: StartUpstream, path: str, model: str, sent: dict[str, Any], noted: list[str]
) -> None:
    server = byte_server(lambda connection: connection.whole(MESSAGE))
    notes: dict[str, str] = {}
    async with upstream_of(server.url, provider="anthropic", base_url=server.url) as upstream:
        request = to_claude(server.url, path, {"model": model, **SAMPLING}, notes)
        status, _ = await answer_of(upstream, request)
    assert status == 200
    arrived = server.requests[0].json
    assert {name: arrived[name] for name in SAMPLING if name in arrived} == sent
    assert notes.get("untranslated", "") == ", ".join(noted)


PREFILLED = [*HI, {"role": "assistant", "content": "Sure: {"}]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("chat/completions", {"messages": PREFILLED}),
        ("messages", {"messages": PREFILLED}),
        ("responses", {"input": PREFILLED}),
    ],
)
async def test_prefill_is_refused_for_models_that_refuse_it(
    byte_server: StartUpstream, path: str, fields: dict[str, Any]
) -> None:
    server = byte_server(lambda connection: connection.whole(MESSAGE))
    async with upstream_of(server.url, provider="anthropic", base_url=server.url) as upstream:
        for model in ("claude-opus-5-5", "claude-haiku-5-5", "claude-opus-4-7"):
            with pytest.raises(InvalidRequest, match="End with a user message"):
                await answer_of(upstream, to_claude(server.url, path, {**fields, "model": model}))
        assert server.requests == []
        status, _ = await answer_of(upstream, to_claude(server.url, path, {**fields, "model": "claude-sonnet-4-5"}))
    assert (status, server.requests[0].json["messages"][-1]["role"]) == (200, "assistant")


@pytest.mark.parametrize(
    ("model", "thinking"),
    [
        ("claude-fable-5-1", "adaptive"),
        ("claude-opus-5-5", "adaptive"),
        ("claude-sonnet-5-5", "adaptive"),
        ("claude-haiku-5-5", "adaptive"),
        ("claude-sonnet-4-5", "enabled"),
    ],
)
async def test_thinking_budget_has_the_form_that_the_model_accepts(
    byte_server: StartUpstream, model: str, thinking: str
) -> None:
    """litellm decides that, with its own table."""
    server = byte_server(lambda connection: connection.whole(MESSAGE))
    budget = {"thinking": {"type": "enabled", "budget_tokens": 2_000}, "max_tokens": 4_000}
    async with upstream_of(server.url, provider="anthropic", base_url=server.url) as upstream:
        for path in ("chat/completions", "messages"):
            assert (await answer_of(upstream, to_claude(server.url, path, {"model": model, **budget})))[0] == 200
    asked = [request.json["thinking"] for request in server.requests]
    assert [one["type"] for one in asked] == [thinking] * 2
    assert all(("budget_tokens" in one) is (thinking == "enabled") for one in asked)


async def test_thinking_budget_of_the_caller_is_unchanged(byte_server: StartUpstream) -> None:
    """Between tool calls thinking may exceed the output limit."""
    server = byte_server(lambda connection: connection.whole(MESSAGE))
    thinking = {"type": "enabled", "budget_tokens": 9000}
    request = outgoing(server.url, "messages", {"model": "claude-sonnet-4-5", "max_tokens": 5000, "thinking": thinking})
    async with upstream_of(server.url, provider="anthropic", base_url=server.url) as upstream:
        await answer_of(upstream, Outgoing("POST", f"{server.url}/messages", KEY, request.body))
    assert server.requests[0].json["thinking"] == thinking


#: by format: the field that asks for a JSON object, and a system message
JSON_MODES: dict[str, dict[str, Any]] = {
    "chat/completions": {
        "response_format": {"type": "json_object"}, "messages": [{"role": "system", "content": "Be brief."}, *HI],
    },
    "responses": {"text": {"format": {"type": "json_object"}}, "instructions": "Be brief."},
}  # fmt: skip


@pytest.mark.parametrize("path", list(JSON_MODES))
async def test_claude_is_asked_for_json_in_a_message(byte_server: StartUpstream, path: str) -> None:
    server = byte_server(lambda connection: connection.whole(MESSAGE))
    notes: dict[str, str] = {}
    sent = outgoing(server.url, path, {"model": "claude-sonnet-4-5", **JSON_MODES[path]})
    async with upstream_of(server.url, provider="anthropic", base_url=server.url) as upstream:
        await answer_of(upstream, Outgoing("POST", f"{server.url}/{path}", KEY, sent.body, notes.__setitem__))
    first, second = server.requests[0].json["system"]
    assert (first["text"], "one JSON object and nothing else" in second["text"]) == ("Be brief.", True)
    assert notes == {"untranslated": "response_format"}


@pytest.mark.parametrize("path", list(JSON_MODES))
async def test_provider_with_a_json_mode_gets_no_message(byte_server: StartUpstream, path: str) -> None:
    server = byte_server(lambda connection: connection.whole(completion()))
    notes: dict[str, str] = {}
    sent = outgoing(server.url, path, {"model": "gpt-4o", **JSON_MODES[path]})
    async with upstream_of(server.url) as upstream:
        await answer_of(upstream, Outgoing("POST", sent.url, KEY, sent.body, notes.__setitem__))
    arrived = server.requests[0].json
    assert (arrived["response_format"], len(arrived["messages"]), notes) == ({"type": "json_object"}, 2, {})


@pytest.mark.parametrize(("signature", "thinks"), [("SIG", True), ("", False)])
async def test_thinking_is_removed_if_the_turn_began_with_unsigned_thinking(
    byte_server: StartUpstream, signature: str, *, thinks: bool
) -> None:
    """After a fallback or a change of model, litellm removes such thinking, and Anthropic refuses the rest."""
    server = byte_server(lambda connection: connection.whole(MESSAGE))
    thought = {"type": "thinking", "thinking": "hm", "signature": signature}
    use = {"type": "tool_use", "id": "t", "name": "get", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "one"}
    asked = {
        "model": "claude-sonnet-4-5", "max_tokens": 5000, "thinking": {"type": "enabled", "budget_tokens": 2000},
        "messages": [
            *HI, {"role": "assistant", "content": [thought, use]}, {"role": "user", "content": [result]},
        ],
    }  # fmt: skip
    async with upstream_of(server.url, provider="anthropic", base_url=server.url) as upstream:
        request = outgoing(server.url, "messages", asked)
        await answer_of(upstream, Outgoing("POST", f"{server.url}/messages", KEY, request.body))
    assert ("thinking" in server.requests[0].json) is thinks


@paths
@pytest.mark.parametrize(
    ("provider", "model", "name"), [("openai", "gpt-5", "reasoning_content"), ("cerebras", "gpt-oss-120b", "reasoning")]
)
async def test_earlier_thinking_is_sent_in_the_field_of_the_provider(
    byte_server: StartUpstream, path: str, provider: str, model: str, name: str
) -> None:
    """Cerebras refuses a message with `reasoning_content`, and OpenAI one with `thinking_blocks`."""
    server = byte_server(lambda connection: connection.whole(completion()))
    async with upstream_of(server.url, provider=provider) as upstream:
        status, _ = await answer_of(upstream, outgoing(server.url, path, {"model": model, **THOUGHTFUL[path]}))
    assert status == 200
    said = server.requests[0].json["messages"][1]
    assert said[name] == "hm"
    assert not said.keys() & ({"thinking_blocks", "reasoning", "reasoning_content"} - {name})


@paths
@pytest.mark.parametrize(
    ("provider", "model", "roles"),
    [
        ("openai", "gpt-5", ["user", "assistant", "tool", "user"]),
        ("mistral", "any", ["user", "assistant", "tool", "assistant", "user"]),
        ("hosted_vllm", "mistralai/Devstral-Small", ["user", "assistant", "tool", "assistant", "user"]),
    ],
)
async def test_mistral_gets_an_assistant_message_between_tool_and_user(
    byte_server: StartUpstream, path: str, provider: str, model: str, roles: list[str]
) -> None:
    """Claude Code sends its reminders next to tool results, and OpenAI accepts any order."""
    server = byte_server(lambda connection: connection.whole(completion()))
    [(name, turns)] = THOUGHTFUL[path].items()
    words = {"type": "text", "text": "go"}
    said = [{**turns[-1], "content": [*turns[-1]["content"], words]}] if path == "messages" else [turns[-1], *HI]
    async with upstream_of(server.url, provider=provider) as upstream:
        status, _ = await answer_of(upstream, outgoing(server.url, path, {"model": model, name: [*turns[:-1], *said]}))
    assert status == 200
    sent = server.requests[0].json["messages"]
    assert [message["role"] for message in sent] == roles
    assert all(message.get("content") or message.get("tool_calls") for message in sent)


@pytest.mark.parametrize(("behind", "roles"), [([], []), ([{"type": "text", "text": "go"}], ["user"])])
async def test_mistral_gets_tool_images_after_an_assistant_message(
    byte_server: StartUpstream, behind: list[dict[str, Any]], roles: list[str]
) -> None:
    """litellm would insert a user message right after the tool result."""
    server = byte_server(lambda connection: connection.whole(completion()))
    result = {"type": "tool_result", "tool_use_id": "t", "content": [PICTURE]}
    turns = [*THOUGHTFUL["messages"]["messages"][:-1], {"role": "user", "content": [result, *behind]}]
    async with upstream_of(server.url, provider="mistral") as upstream:
        await answer_of(upstream, outgoing(server.url, "messages", {"model": "mistral-large", "messages": turns}))
    sent = server.requests[0].json["messages"]
    assert [message["role"] for message in sent] == ["user", "assistant", "tool", "assistant", "user", *roles]
    assert isinstance(sent[2]["content"], str)
    assert [part["type"] for part in sent[4]["content"]] == ["text", "image_url"]


@pytest.mark.parametrize("field", [{"n": 2}, {"logprobs": True}, {"seed": 1}], ids=lambda field: next(iter(field)))
async def test_unsupported_field_is_refused_by_name(byte_server: StartUpstream, field: dict[str, Any]) -> None:
    server = byte_server(lambda connection: connection.whole(b"{}"))
    async with upstream_of(server.url, provider="anthropic") as upstream:
        status, body = await answer_of(upstream, outgoing(server.url, CHAT, field))
    error = json.loads(body)["error"]
    assert (status, error["code"]) == (400, "not_translatable")
    assert next(iter(field)) in error["message"]
    assert "drop_params" not in error["message"]
    assert server.requests == []


async def test_untranslatable_call_has_its_code_in_both_formats(byte_server: StartUpstream) -> None:
    server = byte_server(lambda connection: connection.whole(b"{}"))
    async with upstream_of(server.url, provider="nonesuch") as upstream:
        answers = [
            await answer_of(upstream, outgoing(server.url, path, {"max_tokens": 9})) for path in (CHAT, "messages")
        ]
    found = [(status, json.loads(body)["error"]["type"], json.loads(body)["error"]["code"]) for status, body in answers]
    assert found == [(400, "invalid_request_error", "not_translatable")] * 2
    assert server.requests == []


@pytest.mark.parametrize(
    "field",
    [
        {"previous_response_id": "resp_1"}, {"conversation": "conv_1"}, {"prompt": {"id": "p"}}, {"background": True},
        {"input": [{"type": "item_reference", "id": "msg_1"}]},
    ],
    ids=lambda field: next(iter(field)),
)  # fmt: skip
async def test_stored_state_of_the_responses_api_is_refused(byte_server: StartUpstream, field: dict[str, Any]) -> None:
    server = byte_server(lambda connection: connection.whole(completion()))
    async with upstream_of(server.url) as upstream:
        with pytest.raises(InvalidRequest, match="stored state"):
            await answer_of(upstream, outgoing(server.url, "responses", field))
    assert server.requests == []


@pytest.mark.parametrize("model", ["../admin", "a/../../b", "m?x=1", "m#", "a b", "", None, 7, "x" * 600, "m\n"])
async def test_invalid_model_name_is_refused(byte_server: StartUpstream, model: Any) -> None:
    server = byte_server(lambda connection: connection.whole(completion()))
    async with upstream_of(server.url) as upstream:
        with pytest.raises(InvalidRequest):
            await answer_of(upstream, outgoing(server.url, CHAT, {"model": model}))


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "models"), ("POST", "messages/count_tokens"), ("GET", "messages")]
)
async def test_unsupported_path_is_not_found(byte_server: StartUpstream, method: str, path: str) -> None:
    server = byte_server(lambda connection: connection.whole(completion()))
    async with upstream_of(server.url) as upstream:
        with pytest.raises(NotFound, match="chat/completions"):
            await answer_of(upstream, outgoing(server.url, path, method=method))


async def test_configured_argument_applies_if_the_call_has_none(byte_server: StartUpstream) -> None:
    server = byte_server(lambda connection: connection.whole(completion()))
    async with upstream_of(server.url, options={"temperature": 0.25, "api_key": "no"}) as upstream:
        for said in ({"temperature": 1}, {}):
            assert (await answer_of(upstream, outgoing(server.url, fields=said)))[0] == 200
    assert [json.loads(request.body)["temperature"] for request in server.requests] == [1, 0.25]
    assert {request.header("authorization") for request in server.requests} == {"Bearer sk-secret-key"}


async def test_embeddings_have_no_stream(byte_server: StartUpstream) -> None:
    server = byte_server(lambda connection: connection.whole(completion()))
    asked = outgoing(server.url, "embeddings", {"input": "hi", "messages": None, "stream": True})
    async with upstream_of(server.url) as upstream:
        with pytest.raises(InvalidRequest, match="stream"):
            await answer_of(upstream, asked)
    assert server.requests == []


async def test_connect_timeout_differs_from_a_silent_provider() -> None:
    with full_backlog() as url:
        async with upstream_of(url, connect_s=0.3) as upstream:
            with pytest.raises(UpstreamNotAccepted, match="connection"):
                await answer_of(upstream, outgoing(url))


@paths
@pytest.mark.parametrize(
    "fields", [{"messages": [7], "input": [7]}, {"messages": [{"role": "user", "content": 7}], "tools": [1]}]
)
async def test_untranslatable_request_is_refused(byte_server: StartUpstream, path: str, fields: dict[str, Any]) -> None:
    server = byte_server(lambda connection: connection.whole(completion()))
    known = {name: value for name, value in fields.items() if name in {*BODIES[path], "tools"}}
    async with upstream_of(server.url) as upstream:
        try:
            status, _ = await answer_of(upstream, outgoing(server.url, path, known))
        except GatewayError as fault:
            status = fault.status
    assert status in (200, 400, 502)


async def test_a_body_that_is_no_object_is_refused(byte_server: StartUpstream) -> None:
    server = byte_server(lambda connection: connection.whole(completion()))
    async with upstream_of(server.url) as upstream:
        for body in (b"[]", b"{", b""):
            with pytest.raises(InvalidRequest, match="JSON object"):
                await answer_of(upstream, Outgoing("POST", f"{server.url}/v1/chat/completions", KEY, body))


@paths
async def test_leaving_a_stream_closes_the_connection(byte_server: StartUpstream, path: str) -> None:
    left: list[bool] = []

    def script(connection: Connection) -> None:
        connection.send(SSE_HEAD + chunk("hello"))
        left.append(connection.wait_until_left())

    server = byte_server(script)
    async with upstream_of(server.url) as upstream:
        with in_time():
            async with upstream.send(outgoing(server.url, path, {"stream": True})) as reply:
                async for piece in reply.chunks():
                    if b"hello" in piece:
                        break
            await eventually(lambda: left == [True], "the provider sees that nobody listens")


async def test_cancelling_a_task_in_a_stream_closes_the_connection(byte_server: StartUpstream) -> None:
    left: list[bool] = []

    def script(connection: Connection) -> None:
        connection.send(SSE_HEAD + chunk("hello"))
        left.append(connection.wait_until_left())

    server = byte_server(script)
    async with upstream_of(server.url) as upstream:
        reading = asyncio.create_task(answer_of(upstream, outgoing(server.url, CHAT, {"stream": True})))
        await eventually(lambda: server.requests, "the call is under way")
        await asyncio.sleep(0.2)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await eventually(lambda: left == [True], "the provider sees that nobody listens")


@paths
async def test_provider_that_does_not_begin_times_out(byte_server: StartUpstream, path: str) -> None:
    def silent(connection: Connection) -> None:
        connection.wait_until_left()

    server = byte_server(silent)
    async with upstream_of(server.url, first_byte_s=0.3) as upstream:
        for stream in (False, True):
            with in_time(), pytest.raises(UpstreamTimeout, match="timeout_s"):
                await answer_of(upstream, outgoing(server.url, path, {"stream": stream}))


async def test_provider_that_stops_sending_times_out(byte_server: StartUpstream) -> None:
    def script(connection: Connection) -> None:
        connection.send(SSE_HEAD + chunk("hello"))
        connection.wait_until_left()

    server = byte_server(script)
    async with upstream_of(server.url, between_bytes_s=0.3) as upstream:
        with in_time(), pytest.raises(UpstreamTimeout, match="between_bytes"):
            await answer_of(upstream, outgoing(server.url, CHAT, {"stream": True}))


async def test_refused_connection_differs_from_a_broken_one(byte_server: StartUpstream) -> None:
    nowhere = f"http://127.0.0.1:{closed_port()}"
    for provider in ("openai", "anthropic"):
        async with upstream_of(nowhere, provider=provider) as upstream:
            with pytest.raises(UpstreamRefused):
                await answer_of(upstream, outgoing(nowhere))
        server = byte_server(lambda connection: connection.reset())
        async with upstream_of(server.url, provider=provider) as upstream:
            with pytest.raises(UpstreamUnreachable) as caught:
                await answer_of(upstream, outgoing(server.url))
        assert not isinstance(caught.value, UpstreamRefused)
        assert len(server.requests) == 1


@paths
async def test_broken_stream_is_an_error(byte_server: StartUpstream, path: str) -> None:
    def script(connection: Connection) -> None:
        connection.send(SSE_HEAD.replace(b"connection: close", b"transfer-encoding: chunked"))
        event = chunk("hello")
        connection.send(b"%x\r\n%b\r\n" % (len(event), event))
        connection.reset()

    server = byte_server(script)
    async with upstream_of(server.url) as upstream:
        with pytest.raises((UpstreamProtocolError, UpstreamUnreachable)):
            await answer_of(upstream, outgoing(server.url, path, {"stream": True}))


async def test_no_key_appears_in_a_message(byte_server: StartUpstream) -> None:
    said = json.dumps({"error": {"message": "Incorrect API key provided: sk-secret-key.", "type": "x"}}).encode()
    server = byte_server(lambda connection: connection.whole(said, status=b"401 Unauthorized"))
    async with upstream_of(server.url) as upstream:
        status, body = await answer_of(upstream, outgoing(server.url))
    assert status == 401
    assert json.loads(body)["error"]["message"] == "Incorrect API key provided: ***."


@pytest.mark.parametrize("status", [b"400 Bad Request", b"404 Not Found", b"429 Too Many Requests", b"529 Overloaded"])
@pytest.mark.parametrize("provider", ["openai", "anthropic"])
async def test_refusal_keeps_status_message_and_retry_after(
    byte_server: StartUpstream, provider: str, status: bytes
) -> None:
    said = json.dumps({"type": "error", "error": {"message": 'Not {now}: "wait".', "type": "x"}}).encode()
    server = byte_server(lambda connection: connection.whole(said, b"retry-after: 9", status=status))
    async with upstream_of(server.url, provider=provider) as upstream:
        async with upstream.send(outgoing(server.url, "messages")) as reply:
            body = json.loads(b"".join([piece async for piece in reply.chunks()]))
            assert reply.status == int(status[:3])
            assert (b"retry-after", b"9") in list(reply.headers)
    assert body["type"] == "error"
    assert body["error"]["message"] == 'Not {now}: "wait".'
    assert len(server.requests) == 1


async def test_invalid_response_is_an_error(byte_server: StartUpstream) -> None:
    server = byte_server(lambda connection: connection.whole(b"<html>", b"content-type: text/html"))
    async with upstream_of(server.url) as upstream:
        status, body = await answer_of(upstream, outgoing(server.url))
        assert status == 500
        assert b"Traceback" not in body
    async with upstream_of(server.url, provider="mistral") as upstream:
        with pytest.raises(UpstreamProtocolError) as caught:
            await answer_of(upstream, outgoing(server.url))
    assert "Traceback" not in caught.value.message


@paths
@pytest.mark.parametrize("events", [b"", chunk("hello")], ids=["nothing", "a beginning"])
@pytest.mark.parametrize("provider", ["openai", "mistral"])
async def test_stream_without_end_is_not_a_complete_response(
    byte_server: StartUpstream, path: str, events: bytes, provider: str
) -> None:
    server = byte_server(lambda connection: connection.send(SSE_HEAD + events))
    async with upstream_of(server.url, provider=provider) as upstream:
        with pytest.raises(UpstreamProtocolError, match="ended"):
            await answer_of(upstream, outgoing(server.url, path, {"stream": True}))


@paths
async def test_connections_are_kept_between_calls_and_closed_with_the_last_provider(
    byte_server: StartUpstream, path: str
) -> None:
    server = byte_server(streamed)
    async with upstream_of(server.url) as first:
        async with upstream_of(server.url) as second:
            await answer_of(second, outgoing(server.url, path, {"stream": True}))
        assert (await answer_of(first, outgoing(server.url, path, {"stream": True})))[0] == 200


@pytest.mark.parametrize(
    "said",
    [
        "litellm.BadRequestError: OpenAIException - it is wrong\nTraceback (most recent call last):\n  File x",
        "litellm.APIError: AzureException APIError - it is wrong",
        "litellm.InternalServerError: AnthropicException - it is wrong. Handle with `litellm.InternalServerError`.",
        'litellm.NotFoundError: BedrockException - {"error":{"message":"it is wrong"}}',
        'litellm.NotFoundError: XException - {"message":"it is wrong"}',
        'AnthropicException - b\'{"error":{"message":"it is wrong"}}\'',
        "it is wrong\n\nThis looks like a bug in LiteLLM rather than in your request. File it",
    ],
)
def test_provider_message_has_no_litellm_text(said: str) -> None:
    class Odd(Exception):
        status_code = 400

    found = convert(Odd(said), "p", [])
    assert isinstance(found, Refusal)
    assert found.message == "it is wrong"


def test_a_missing_package_is_named() -> None:
    class APIConnectionError(Exception):
        status_code = 500

    error = APIConnectionError("No module named 'google'")
    error.__context__ = ModuleNotFoundError("No module named 'google'", name="google")
    found = convert(error, "p", [])
    assert isinstance(found, UpstreamProtocolError)
    assert '"google"' in found.message


async def test_call_and_check_name_what_to_install_without_litellm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "litellm", None)
    async with upstream_of("http://127.0.0.1:9") as upstream:
        with pytest.raises(UpstreamUnreachable, match=r"litellm is not installed\. Install it with: pip install"):
            await upstream.library()
    settings = config.load(environment={}, search=False, flags={"providers.aws": {"adapter": "litellm"}}).settings
    [problem] = translation_problems(settings)
    assert problem.startswith("providers.aws.adapter: litellm cannot be loaded: litellm is not installed. Install it")


SCRIPT = """
import asyncio, json, sys
from gateway import config
from gateway.app import resources
from gateway.upstream.litellm import library

async def main():
    settings = config.load(environment={}, search=False, flags=json.loads(sys.argv[1])).settings
    upstreams = resources.upstreams_of(settings.providers, resources.tls_contexts(settings.providers), config.families())
    assert not [name for name in sys.modules if name.partition(".")[0] in ("litellm", "httpx")]
    for upstream in upstreams.values():
        await upstream.aclose()
    print("litellm" in sys.modules)

asyncio.run(main())
"""


@pytest.mark.parametrize(("adapter", "is_imported"), [("http", False), ("litellm", True)])
def test_litellm_is_imported_only_if_needed_and_in_a_thread(adapter: str, is_imported: bool, tmp_path: Path) -> None:
    flags = {
        "providers.p.adapter": adapter, "providers.p.base_url": "http://127.0.0.1:9/v1", "built_in_providers": False,
        "default_provider": "p", "store.url": "memory://",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(flags)],
        cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False, timeout=180,
    )  # fmt: skip
    assert (done.stdout.strip(), done.stderr) == (str(is_imported), "")
