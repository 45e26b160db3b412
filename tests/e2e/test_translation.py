"""Translate between formats: official SDKs, `adapter: litellm`, and the built-in provider as the upstream."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import anthropic
import httpx  # noqa: F401  # before a gateway in this process imports it in a thread: SDKs of openai look into the half of it
import openai
import pytest
from websockets.sync.client import connect as connect_socket

from gateway.mock import Behaviour, MockProvider, MockServer
from tests.conftest import StartGateway, StartProcess, StartUpstream
from tests.support.gateways import GatewayProcess, GatewayThread, until
from tests.support.scripted import DONE, SSE_HEAD, ByteServer, Connection, chunk, usage_chunk
from tests.support.timing import LIMIT_S, in_time
from tests.support.web import connect, read_until

#: models for a chat client and a responses client, in both directions
MODELS = ["claude/claude-sonnet-4-5", "gpt/gpt-4o"]
FAR_END = {"claude/claude-sonnet-4-5": "/v1/messages", "gpt/gpt-4o": "/v1/chat/completions"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
HI: list[Any] = [{"role": "user", "content": "What about the weather?"}]
#: pydantic warns about litellm; users do not see this
pytestmark = [
    pytest.mark.filterwarnings("ignore:Accessing the"),
    pytest.mark.filterwarnings("ignore:.*ReadOnly. qualifier"),
]
models = pytest.mark.parametrize("model", MODELS)


def providers(url: str, **changes: object) -> dict[str, dict[str, object]]:
    row = {"adapter": "litellm", "key": "sk-held-by-the-gateway", "retries": 0, **changes}
    return {
        "claude": {**row, "litellm": "anthropic", "base_url": url},
        "gpt": {**row, "litellm": "openai", "base_url": f"{url}/v1"},
    }


@pytest.fixture(scope="module")
def translating_server(mock_server: MockServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayThread]:
    flags = {"providers": providers(mock_server.url), "default_provider": "claude"}
    gateway = GatewayThread(tmp_path_factory.mktemp("translating"), mock_server.url, flags)
    yield gateway
    gateway.stop()


@dataclass(frozen=True)
class Bench:
    """A client of each kind for one session, the gateway, and the upstream provider."""

    gateway: GatewayThread
    mock: MockProvider
    session: str
    chat: openai.OpenAI
    claude: anthropic.Anthropic

    @property
    def totals(self) -> tuple[int, int]:
        return totals(self.gateway, self.session)

    @property
    def billed(self) -> tuple[int, int]:
        return billed(self.mock)

    @property
    def paths(self) -> set[str]:
        return {call.path for call in self.mock.calls}


@pytest.fixture
def bench(translating_server: GatewayThread, mock: MockProvider, session: str) -> Iterator[Bench]:
    url, headers = translating_server.url, {"x-session-id": session}
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, default_headers=headers) as chat,
        anthropic.Anthropic(base_url=url, api_key="any", max_retries=0, default_headers=headers) as claude,
    ):
        yield Bench(translating_server, mock, session, chat, claude)


def totals(gateway: GatewayThread | GatewayProcess, session: str) -> tuple[int, int]:
    """Return input and output tokens of a session."""
    reply = gateway.web.get(f"/api/sessions/{session}")
    if reply.status == 404:
        return 0, 0
    shown = reply.json["cumulative_token_usage"]
    return shown["input_tokens"], shown["output_tokens"]


def billed(mock: MockProvider) -> tuple[int, int]:
    return mock.billed().input_tokens, mock.billed().output_tokens


# --- chat clients --------------------------------------------------------------------------------------------------


@models
def test_a_chat_client_gets_a_response(bench: Bench, model: str) -> None:
    raw = bench.chat.chat.completions.with_raw_response.create(model=model, messages=HI, max_tokens=50)
    answer = raw.parse()
    assert answer.choices[0].message.content == "You said: What about the weather?"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == model.partition("/")[2]
    assert bench.paths == {FAR_END[model]}
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == bench.billed == bench.totals
    assert raw.headers["x-session-usage-source"] == "provider"
    assert float(raw.headers["x-session-cumulative-cost-usd"]) > 0


@models
@pytest.mark.parametrize("asked", [True, False])
def test_a_chat_client_gets_a_stream(bench: Bench, model: str, asked: bool) -> None:
    options: Any = {"stream_options": {"include_usage": True}} if asked else {}
    chunks = list(bench.chat.chat.completions.create(model=model, messages=HI, max_tokens=50, stream=True, **options))
    texts = [choice.delta.content or "" for part in chunks for choice in part.choices]
    assert "".join(texts) == "You said: What about the weather?"
    assert len(texts) > 3
    usages = [part.usage for part in chunks if part.usage is not None]
    assert len(usages) == asked
    assert bench.billed == bench.totals > (0, 0)


@models
@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_client_calls_tools_and_returns_their_results(bench: Bench, model: str, stream: bool) -> None:
    tools: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]
    asked: dict[str, Any] = {"model": model, "tools": tools, "max_tokens": 50}
    if stream:
        with bench.chat.chat.completions.stream(messages=HI, **asked) as events:
            message = events.get_final_completion().choices[0].message
    else:
        message = bench.chat.chat.completions.create(messages=HI, **asked).choices[0].message
    assert message.tool_calls is not None
    [call] = message.tool_calls
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "sample city"})
    said: Any = {"role": "assistant", "tool_calls": [call.to_dict()]}
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "sunny, 21 degrees"}
    final = bench.chat.chat.completions.create(messages=[*HI, said, result], **asked)
    assert final.choices[0].message.content == "The tool answered: sunny, 21 degrees"
    assert bench.billed == bench.totals
    assert bench.paths == {FAR_END[model]}


@models
def test_a_chat_client_gets_structured_output(bench: Bench, model: str) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
    answer = bench.chat.chat.completions.create(model=model, messages=HI, max_tokens=50, response_format=form)
    sent = json.loads(bench.mock.calls[-1].body)
    assert json.dumps(SCHEMA["properties"]) in json.dumps(
        sent["output_format" if "claude" in model else "response_format"]
    )
    if "gpt" in model:  # Anthropic's part of the built-in provider responds with free text
        assert json.loads(answer.choices[0].message.content or "") == {"city": "sample city"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("client", ["chat", "messages"])
def test_cached_tokens_of_anthropic_are_part_of_the_input_and_counted_once(
    bench: Bench, client: str, stream: bool
) -> None:
    cached = {"type": "text", "text": "Know this: " + "word " * 2000, "cache_control": {"type": "ephemeral"}}
    messages: Any = [{"role": "user", "content": [cached]}, {"role": "assistant", "content": "Yes."}, *HI]
    create: Any = bench.chat.chat.completions.create if client == "chat" else bench.claude.messages.create
    for _ in range(2):
        answer = create(model=MODELS[0], messages=messages, max_tokens=50, stream=stream)
        if stream:
            list(answer)
    assert bench.billed == bench.totals
    shown = bench.gateway.web.get(f"/api/sessions/{bench.session}").json["cumulative_token_usage"]
    assert 2000 < shown["cache_read_tokens"] < shown["input_tokens"] - 2000
    assert 2000 < shown["cache_write_tokens"] < shown["input_tokens"] - 2000


@pytest.mark.parametrize("stream", [False, True])
def test_a_completions_client_gets_a_response(bench: Bench, stream: bool) -> None:
    for model in MODELS:
        answer: Any = bench.chat.completions.create(model=model, prompt="Say hi", max_tokens=50, stream=stream)
        parts = list(answer) if stream else [answer]
        assert "".join(choice.text for part in parts for choice in part.choices) == "You said: Say hi"
    assert bench.billed == bench.totals > (0, 0)


def test_embeddings_are_forwarded_and_metered(bench: Bench) -> None:
    answer = bench.chat.embeddings.create(model="gpt/text-embedding-3-small", input=["one", "two words"])
    assert len(answer.data) == 2
    assert isinstance(answer.data[0].embedding[0], float)
    assert bench.billed == bench.totals > (0, -1)


# --- messages clients ----------------------------------------------------------------------------------------------


@models
@pytest.mark.parametrize("stream", [False, True])
def test_a_messages_client_gets_a_response(bench: Bench, model: str, stream: bool) -> None:
    asked: dict[str, Any] = {"model": model, "messages": HI, "max_tokens": 50, "system": "Be brief."}
    if stream:
        with bench.claude.messages.stream(**asked) as events:
            answer: Any = events.get_final_message()
    else:
        answer = bench.claude.messages.create(**asked)
    assert [block.text for block in answer.content] == ["You said: What about the weather?"]
    assert (answer.stop_reason, answer.model) == ("end_turn", model.partition("/")[2])
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == bench.billed == bench.totals
    assert bench.paths == {FAR_END[model]}


@models
@pytest.mark.parametrize("stream", [False, True])
def test_a_messages_client_uses_tools_and_returns_their_results(bench: Bench, model: str, stream: bool) -> None:
    tools: Any = [{"name": "get_weather", "description": "It.", "input_schema": SCHEMA}]
    asked: dict[str, Any] = {"model": model, "max_tokens": 50, "tools": tools}
    if stream:
        with bench.claude.messages.stream(messages=HI, **asked) as events:
            answer: Any = events.get_final_message()
    else:
        answer = bench.claude.messages.create(messages=HI, **asked)
    assert answer.stop_reason == "tool_use"
    [used] = answer.content
    assert (used.type, used.name, used.input) == ("tool_use", "get_weather", {"city": "sample city"})
    result: Any = {"type": "tool_result", "tool_use_id": used.id, "content": "sunny, 21 degrees"}
    said: Any = {"role": "assistant", "content": [used.to_dict()]}
    final = bench.claude.messages.create(messages=[*HI, said, {"role": "user", "content": [result]}], **asked)
    assert final.content[0].to_dict()["text"] == "The tool answered: sunny, 21 degrees"
    assert bench.billed == bench.totals
    assert bench.paths == {FAR_END[model]}


@models
def test_extra_fields_of_claude_code_do_not_fail_a_call(bench: Bench, model: str) -> None:
    more: Any = {
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "metadata": {"user_id": json.dumps({"session_id": "s"})},
        "diagnostics": {"previous_message_id": None},
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    }
    answer = bench.claude.messages.create(
        model=model, messages=HI, max_tokens=50, system=more.pop("system"), extra_body=more,
        extra_headers={"anthropic-beta": "context-management-2025-06-27"},
    )  # fmt: skip
    assert answer.stop_reason == "end_turn"
    assert b"previous_message_id" not in bench.mock.calls[-1].body


def arrived(bench: Bench, model: str, **fields: Any) -> Any:
    """Return the body that reaches the provider for a Messages call with these fields."""
    bench.claude.messages.create(**{"model": model, "messages": HI, "max_tokens": 4000, **fields})
    return json.loads(bench.mock.calls[-1].body)


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


TEXT = {"type": "document", "title": "A", "source": {"type": "text", "media_type": "text/plain", "data": "in a text"}}
PARTS = {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "in parts"}]}}
SAID = {"type": "document", "context": "B", "source": {"type": "content", "content": "said"}}
FOUND = {"type": "search_result", "title": "C", "source": "D", "content": [{"type": "text", "text": "found"}]}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}}
USE = {"type": "tool_use", "id": "t", "name": "get", "input": {}}
CALL = [
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": [USE]},
]
TOOL = {"name": "get", "input_schema": {"type": "object"}}


@models
def test_text_documents_and_search_results_reach_the_model(bench: Bench, model: str) -> None:
    sent = arrived(bench, model, **user({**TEXT, "cache_control": {"type": "ephemeral"}}, PARTS, SAID, FOUND))
    texts = [part["text"] for part in sent["messages"][0]["content"]]
    assert texts == ["A", "in a text", "in parts", "B", "said", "C\nD", "found"]
    marked = [part for part in sent["messages"][0]["content"] if "cache_control" in part]
    assert [part["text"] for part in marked] == (["in a text"] if model == MODELS[0] else [])
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "one"}, FOUND]}
    sent = arrived(bench, model, messages=[*CALL, *user(result)["messages"]], tools=[TOOL])
    assert b'"found"' in bench.mock.calls[-1].body


def test_a_pdf_is_sent_to_openai_as_a_file_and_to_anthropic_as_a_document(bench: Bench) -> None:
    sent = arrived(bench, MODELS[1], **user(PDF, {"type": "text", "text": "x"}))
    file = {"filename": "document.pdf", "file_data": "data:application/pdf;base64,JVBERi0="}
    assert sent["messages"][0]["content"][0] == {"type": "file", "file": file}
    sent = arrived(bench, MODELS[0], **user(PDF, {"type": "text", "text": "x"}))
    assert sent["messages"][0]["content"][0]["source"] == PDF["source"]


@pytest.mark.parametrize(
    "fields",
    [
        user({"type": "document", "source": {"type": "file", "file_id": "file_1"}}),
        {"extra_body": {"mcp_servers": [{"type": "url", "url": "https://x", "authorization_token": "secret"}]}},
        {"extra_body": {"container": "c"}},
        {"extra_body": {"thread": {"type": "continue", "previous_message_id": "msg_1"}}},
        {"extra_body": {"compaction": {"type": "summarize"}}},
    ],
)
def test_features_that_only_anthropic_has_are_refused_for_other_providers(bench: Bench, fields: dict[str, Any]) -> None:
    with pytest.raises(anthropic.BadRequestError):
        arrived(bench, MODELS[1], **fields)
    assert bench.mock.calls == []


@models
def test_disabled_parallel_tool_use_is_translated(bench: Bench, model: str) -> None:
    choice = {"type": "any", "disable_parallel_tool_use": True}
    sent = arrived(bench, model, tools=[TOOL], tool_choice=choice)
    assert (sent["tool_choice"] == choice) if model == MODELS[0] else (sent["parallel_tool_calls"] is False)


@pytest.mark.parametrize(("name", "sent"), [("u1", "u1"), ("u" * 65, hashlib.sha256(b"u" * 65).hexdigest())])
def test_a_user_id_too_long_for_openai_is_hashed(bench: Bench, name: str, sent: str) -> None:
    assert arrived(bench, MODELS[1], metadata={"user_id": name})["user"] == sent
    assert arrived(bench, MODELS[0], metadata={"user_id": name})["metadata"] == {"user_id": name}


def test_earlier_thinking_is_sent_only_to_anthropic(bench: Bench) -> None:
    thought = [{"type": "thinking", "thinking": "hm", "signature": "SIG"}, USE]
    result = {"type": "tool_result", "tool_use_id": "t", "content": "one"}
    turns = [CALL[0], {"role": "assistant", "content": thought}, *user(result)["messages"]]
    sent = arrived(bench, MODELS[1], messages=turns, tools=[TOOL])
    assert "thinking_blocks" not in sent["messages"][1]
    sent = arrived(bench, MODELS[0], messages=turns, tools=[TOOL], thinking={"type": "enabled", "budget_tokens": 1024})
    assert sent["messages"][1]["content"][0] == thought[0]


@pytest.mark.parametrize(
    ("model", "fields", "effort"),
    [
        ("gpt/gpt-5.1", {"output_config": {"effort": "low"}}, "low"),
        ("gpt/gpt-5.1", {"output_config": {"effort": "max"}, "thinking": {"type": "adaptive"}}, "high"),
        ("gpt/gpt-5.1", {"output_config": {"effort": "low"}, "thinking": {"type": "disabled"}}, "none"),
        ("gpt/gpt-4o", {"output_config": {"effort": "low"}}, None),
        ("gpt/gpt-4o", {"thinking": {"type": "adaptive"}}, None),
        ("gpt/gpt-4o", {"thinking": {"type": "disabled"}}, None),
    ],
)
def test_the_reasoning_effort_is_sent_only_to_models_that_support_it(
    bench: Bench, model: str, fields: dict[str, Any], effort: str | None
) -> None:
    assert arrived(bench, model, extra_body=fields).get("reasoning_effort") == effort


def test_the_empty_text_next_to_tool_calls_is_dropped(bench: Bench) -> None:
    call = {"id": "t", "type": "function", "function": {"name": "get", "arguments": "{}"}}
    turns: list[Any] = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t", "content": "one"},
    ]
    tools: Any = [{"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}]
    bench.chat.chat.completions.create(model=MODELS[0], messages=turns, tools=tools)
    [block] = json.loads(bench.mock.calls[-1].body)["messages"][1]["content"]
    assert block["type"] == "tool_use"


SIGNED = {"type": "thinking", "thinking": "hm", "signature": "SIG"}


@pytest.mark.parametrize(
    ("model", "message", "kind"),
    [
        ("claude/claude-sonnet-4-5", {"content": "ok"}, None),
        ("claude/claude-sonnet-4-5", {"content": [{"type": "text", "text": "ok"}]}, None),
        ("claude/claude-sonnet-4-5", {"content": "ok", "thinking_blocks": [SIGNED]}, "enabled"),
        ("claude/claude-opus-4-6", {"content": "ok"}, "adaptive"),
    ],
)
def test_thinking_is_not_enabled_in_a_turn_that_started_without_thinking(
    bench: Bench, model: str, message: dict[str, Any], kind: str | None
) -> None:
    call = {"id": "t", "type": "function", "function": {"name": "get", "arguments": "{}"}}
    said: Any = {"role": "assistant", "tool_calls": [call], **message}
    result: Any = {"role": "tool", "tool_call_id": "t", "content": "one"}
    tools: Any = [{"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}]
    asked: dict[str, Any] = {"model": model, "tools": tools, "reasoning_effort": "low"}
    raw = bench.chat.chat.completions.with_raw_response.create(messages=[*HI, said, result], **asked)
    assert json.loads(bench.mock.calls[-1].body).get("thinking", {}).get("type") == kind
    notes = bench.gateway.web.get(f"/api/calls/{raw.headers['x-gateway-request-id']}").json["notes"]
    assert notes == ({} if kind else {"untranslated": "reasoning_effort"})
    bench.chat.chat.completions.create(messages=[*HI, said, result, *HI], **asked)
    assert "thinking" in json.loads(bench.mock.calls[-1].body), "the next turn is another"


def test_audio_that_the_provider_does_not_support_is_refused(bench: Bench) -> None:
    part = {"type": "input_audio", "input_audio": {"data": "aaaa", "format": "wav"}}
    said: list[Any] = [{"role": "user", "content": [part]}]
    with pytest.raises(openai.BadRequestError, match="input_audio"):
        bench.chat.chat.completions.create(model=MODELS[0], messages=said)
    assert bench.mock.calls == []


def test_a_model_with_two_providers_is_translated_only_for_formats_that_need_it(
    gateway_server: StartGateway, byte_server: StartUpstream
) -> None:
    """Use the pair of providers that docs/guides/providers.md shows."""
    far_end = byte_server(lambda connection: connection.whole(claude_message({"type": "text", "text": "ok"})))
    pair: dict[str, Any] = {
        "anthropic": {"base_url": f"{far_end.url}/v1", "key": "sk-a", "dialects": ["messages"]},
        "claude-chat": {
            **providers(far_end.url)["claude"], "dialects": ["chat", "responses", "completions"],
        },
    }  # fmt: skip
    shared = [{"match": "claude-*", "provider": {"anthropic": 1, "claude-chat": 1}}]
    gateway = gateway_server(
        far_end.url, built_in_providers=True, providers=pair, models=shared, default_provider="anthropic"
    )
    for number in range(4):
        native = {"model": "claude-sonnet-4-5", "messages": HI, "max_tokens": 9, "mcp_servers": [{"name": "m"}]}
        session = {"x-session-id": f"s{number}"}
        assert gateway.web.post("/v1/messages", native, session).status == 200
        assert far_end.requests[-1].json["mcp_servers"] == native["mcp_servers"]
        assert gateway.web.post("/v1/responses", {"model": "claude-sonnet-4-5", "input": "hi"}, session).status == 200
        chat = {"model": "claude-sonnet-4-5", "messages": HI}
        assert gateway.web.post("/v1/chat/completions", chat, session).status == 200
    assert {request.path for request in far_end.requests} == {"/v1/messages"}


# --- responses clients ---------------------------------------------------------------------------------------------


@models
@pytest.mark.parametrize("stream", [False, True])
def test_a_responses_client_gets_a_response(bench: Bench, model: str, stream: bool) -> None:
    asked: dict[str, Any] = {
        "model": model, "instructions": "Be brief.", "input": "What about the weather?", "store": False,
        "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k",
    }  # fmt: skip
    if stream:
        with bench.chat.responses.stream(**asked) as events:
            seen = list(events)
            answer: Any = events.get_final_response()
        assert [event.sequence_number for event in seen if hasattr(event, "sequence_number")][:3] == [0, 1, 2]
    else:
        answer = bench.chat.responses.create(**asked)
    assert answer.output_text == "You said: What about the weather?"
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == bench.billed == bench.totals
    assert bench.paths == {FAR_END[model]}


@models
@pytest.mark.parametrize("stream", [False, True])
def test_a_responses_client_calls_functions_and_returns_their_results(bench: Bench, model: str, stream: bool) -> None:
    tools: Any = [{"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": False}]
    asked: dict[str, Any] = {"model": model, "tools": tools}
    if stream:
        with bench.chat.responses.stream(input=HI, **asked) as events:
            answer: Any = events.get_final_response()
    else:
        answer = bench.chat.responses.create(input=HI, **asked)
    [call] = [item for item in answer.output if item.type == "function_call"]
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "sample city"})
    said: Any = {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments}
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny, 21 degrees"}
    final = bench.chat.responses.create(input=[*HI, said, result], **asked)
    assert final.output_text == "The tool answered: sunny, 21 degrees"
    assert bench.billed == bench.totals


@pytest.mark.parametrize("kept", [True, False])
def test_claude_keeps_thinking_if_a_responses_client_sends_its_reasoning_back(bench: Bench, kept: bool) -> None:
    reasoning: Any = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]}
    if kept:
        reasoning["encrypted_content"] = json.dumps([SIGNED])
    call: Any = {"type": "function_call", "call_id": "t", "name": "get", "arguments": "{}"}
    result: Any = {"type": "function_call_output", "call_id": "t", "output": "one"}
    tools: Any = [{"type": "function", "name": "get", "parameters": {"type": "object"}, "strict": False}]
    bench.chat.responses.create(
        model=MODELS[0], input=[*HI, reasoning, call, result], tools=tools, reasoning={"effort": "low"}
    )
    sent = json.loads(bench.mock.calls[-1].body)
    assert (sent["messages"][1]["content"][0] == SIGNED) == ("thinking" in sent) == kept


def test_a_previous_response_id_is_refused_for_a_translated_provider(bench: Bench) -> None:
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        bench.chat.responses.create(model=MODELS[0], input="hi", previous_response_id="resp_1")
    assert bench.mock.calls == []


@models
def test_a_websocket_remembers_responses_that_a_translated_provider_does_not_store(bench: Bench, model: str) -> None:
    """The client leaves `store` at its default, which means that OpenAI stores responses."""
    url, previous = bench.gateway.url.replace("http", "ws") + "/v1/responses", None
    with connect_socket(url, additional_headers={"x-session-id": bench.session}) as socket:
        for text in ("one", "two"):
            create = {"type": "response.create", "model": model, "input": text, "previous_response_id": previous}
            socket.send(json.dumps({name: value for name, value in create.items() if value is not None}))
            event = json.loads(socket.recv(LIMIT_S))
            while event["type"] not in ("response.completed", "error"):
                event = json.loads(socket.recv(LIMIT_S))
            assert event["type"] == "response.completed", event
            previous = event["response"]["id"]
    assert [one["role"] for one in json.loads(bench.mock.calls[-1].body)["messages"]] == ["user", "assistant", "user"]
    assert bench.billed == bench.totals


def test_untranslatable_calls_do_not_open_the_circuit(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider
) -> None:
    rows = providers(mock_server.url, breaker={"failures": 3})
    web = gateway_server(mock_server.url, providers=rows, default_provider="claude").web
    odd = {"model": MODELS[0]}
    assert {web.post("/v1/completions", odd).status for _ in range(5)} == {502}
    assert mock.calls == []
    assert web.post("/v1/chat/completions", {"model": MODELS[0], "messages": HI}).status == 200


# --- errors --------------------------------------------------------------------------------------------------------

ERRORS = [
    (400, openai.BadRequestError, anthropic.BadRequestError),
    (401, openai.AuthenticationError, anthropic.AuthenticationError),
    (404, openai.NotFoundError, anthropic.NotFoundError),
    (429, openai.RateLimitError, anthropic.RateLimitError),
]


@models
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: str(error[0]))
def test_an_error_reaches_the_client_as_the_error_class_of_its_sdk(
    bench: Bench,
    model: str,
    stream: bool,
    error: tuple[int, type[openai.APIStatusError], type[anthropic.APIStatusError]],
) -> None:
    status, of_openai, of_anthropic = error
    bench.mock.behaviour = Behaviour(status=status, retry_after="1")
    words = f"A status {status} was asked for."
    create: Any = bench.chat.chat.completions.create
    with pytest.raises(of_openai, match=words) as first:
        create(model=model, messages=HI, stream=stream)
    assert first.value.response.headers["x-gateway-upstream-error"] == "true"
    assert first.value.response.headers["retry-after"] == "1"
    create = bench.chat.responses.create
    with pytest.raises(of_openai, match=words):
        create(model=model, input="hi", stream=stream)
    create = bench.claude.messages.create
    with pytest.raises(of_anthropic, match=words) as last:
        create(model=model, messages=HI, max_tokens=9, stream=stream)
    assert last.value.body["type"] == "error"  # type: ignore[index]
    assert bench.totals == (0, 0)


def test_an_untranslatable_field_gets_a_400(bench: Bench) -> None:
    with pytest.raises(openai.BadRequestError, match="'n'") as caught:
        bench.chat.chat.completions.create(model=MODELS[0], messages=HI, n=2)
    assert caught.value.code == "not_translatable"
    assert bench.mock.calls == []


def test_a_broken_translated_stream_ends_with_an_error_event(bench: Bench) -> None:
    bench.mock.behaviour = Behaviour(die=2, chunks=10)
    for model in MODELS:
        with pytest.raises(openai.APIError):
            list(bench.chat.chat.completions.create(model=model, messages=HI, stream=True))
        with pytest.raises(anthropic.APIError):
            list(bench.claude.messages.create(model=model, messages=HI, max_tokens=99, stream=True))


def claude_event(kind: str, **fields: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), json.dumps({"type": kind, **fields}).encode())


def claude_stream(*content: tuple[dict[str, Any], list[dict[str, Any]]]) -> bytes:
    """Return a stream as Anthropic sends it: the start of each block, and its deltas."""
    usage = {"input_tokens": 10, "output_tokens": 1}
    message = {"id": "m", "type": "message", "role": "assistant", "model": "c", "content": [], "usage": usage}
    events = [claude_event("message_start", message=message)]
    for index, (block, deltas) in enumerate(content):
        events.append(claude_event("content_block_start", index=index, content_block=block))
        events += [claude_event("content_block_delta", index=index, delta=delta) for delta in deltas]
        events.append(claude_event("content_block_stop", index=index))
    events.append(claude_event("message_delta", delta={"stop_reason": "tool_use"}, usage={"output_tokens": 5}))
    return b"".join([*events, claude_event("message_stop")])


def claude_message(*content: dict[str, Any]) -> bytes:
    """Return a whole response as Anthropic sends it."""
    usage = {"input_tokens": 10, "output_tokens": 5}
    message = {"id": "m", "type": "message", "role": "assistant", "model": "c", "stop_reason": "tool_use"}
    return json.dumps({**message, "content": content, "usage": usage}).encode()


THOUGHT = (
    {"type": "thinking", "thinking": "", "signature": ""},
    [
        {"type": "thinking_delta", "thinking": "first "},
        {"type": "thinking_delta", "thinking": "second"},
        {"type": "signature_delta", "signature": "SIG"},
    ],
)


def use(name: str, *arguments: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    block = {"type": "tool_use", "id": f"t-{name}", "name": name, "input": {}}
    return block, [{"type": "input_json_delta", "partial_json": one} for one in arguments]


def test_streamed_thinking_and_calls_are_translated_without_changes(
    gateway_server: StartGateway, byte_server: StartUpstream
) -> None:
    """If it were sent twice, thinking would no longer match the signature that the next turn is checked against."""
    said = claude_stream(THOUGHT, use("plain"), use("one", "", '{"a":', "1}"))
    far_end = byte_server(lambda connection: connection.send(SSE_HEAD + said))
    gateway = gateway_server(far_end.url, providers=providers(far_end.url), default_provider="gpt")
    tools: list[Any] = [{"name": name, "input_schema": {"type": "object"}} for name in ("plain", "one")]
    with anthropic.Anthropic(base_url=gateway.url, api_key="any", max_retries=0) as claude:
        thinking: Any = {"type": "enabled", "budget_tokens": 1024}
        with claude.messages.stream(
            model=MODELS[0], messages=HI, max_tokens=4000, tools=tools, thinking=thinking
        ) as stream:
            thought, *uses = stream.get_final_message().content
    assert thought.model_dump(exclude_none=True) == {
        "type": "thinking", "thinking": "first second", "signature": "SIG",
    }  # fmt: skip
    assert [one.input for one in uses if one.type == "tool_use"] == [{}, {"a": 1}]
    functions: list[Any] = [{"type": "function", "function": {"name": name}} for name in ("plain", "one")]
    arguments: dict[int, str] = {}
    with openai.OpenAI(base_url=gateway.base_url, api_key="any", max_retries=0) as chat:
        for piece in chat.chat.completions.create(model=MODELS[0], messages=HI, tools=functions, stream=True):
            for call in piece.choices[0].delta.tool_calls or () if piece.choices else ():
                arguments[call.index] = arguments.get(call.index, "") + (
                    (call.function and call.function.arguments) or ""
                )
    assert [json.loads(one) for one in arguments.values()] == [{}, {"a": 1}]


@pytest.mark.parametrize("stream", [True, False])
def test_a_response_has_its_thinking_as_a_reasoning_item_with_encrypted_content(
    gateway_server: StartGateway, byte_server: StartUpstream, stream: bool
) -> None:
    thought = {"type": "thinking", "thinking": "first second", "signature": "SIG"}
    far_end = byte_server(
        lambda connection: (
            connection.send(SSE_HEAD + claude_stream(THOUGHT, use("one", "{}")))
            if stream
            else connection.whole(claude_message(thought, use("one")[0]))
        )
    )
    gateway = gateway_server(far_end.url, providers=providers(far_end.url), default_provider="gpt")
    asked: dict[str, Any] = {"model": MODELS[0], "input": "hi", "reasoning": {"effort": "low"}}
    reply = gateway.web.post("/v1/responses", {**asked, "stream": stream})
    events = reply.events if stream else []
    responses = [event["response"] for event in events if "response" in event] if stream else [reply.json]
    assert {response["store"] for response in responses} == {False}
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"][:1]
    for item in [*items, responses[-1]["output"][0]]:
        assert item["summary"] == [{"type": "summary_text", "text": "first second"}]
        assert json.loads(item["encrypted_content"]) == [thought]
        assert not item.keys() & {"role", "content"}
    begun = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [item["summary"] for item in begun if item["type"] == "reasoning"] == ([[]] if stream else [])
    assert len(items) == stream


def test_a_custom_tool_is_streamed_as_custom_and_items_end_in_order(
    gateway_server: StartGateway, byte_server: StartUpstream
) -> None:
    """Codex stores items in the order in which they end, and sends them back. Its patches use a custom tool."""
    text = ({"type": "text", "text": ""}, [{"type": "text_delta", "text": "Look:"}])
    said = claude_stream(text, use("patch", '{"content": "*** Be', 'gin\\n+x"}'), use("one", '{"a":1}'))
    far_end = byte_server(lambda connection: connection.send(SSE_HEAD + said))
    gateway = gateway_server(far_end.url, providers=providers(far_end.url), default_provider="gpt")
    tools: Any = [{"type": "custom", "name": "patch"}, {"type": "function", "name": "one", "parameters": {}}]
    with openai.OpenAI(base_url=gateway.base_url, api_key="any", max_retries=0) as client:
        with client.responses.stream(model=MODELS[0], input="hi", tools=tools) as stream:
            events = [event.model_dump(warnings=False) for event in stream]
            output = [one.model_dump(warnings=False) for one in stream.get_final_response().output]
    ended = [event["item"]["type"] for event in events if event["type"] == "response.output_item.done"]
    assert ended == [one["type"] for one in output] == ["message", "custom_tool_call", "function_call"]
    put_in = [event for event in events if event["type"].startswith("response.custom_tool_call_input.")]
    assert "".join(event["delta"] for event in put_in[:-1]) == put_in[-1]["input"] == "*** Begin\n+x"
    assert {event["item_id"] for event in put_in} == {output[1]["id"]}
    arguments = [event["item_id"] for event in events if event["type"].startswith("response.function_call_arguments.")]
    assert set(arguments) == {output[2]["id"]}


def openai_stream(*calls: tuple[int, str | None, str]) -> bytes:
    """Return a stream of a provider with OpenAI's format from (number, id, arguments) of parts of calls."""
    pieces = [
        {"index": index, "function": {"arguments": arguments, **({"name": "get"} if call_id else {})}}
        | ({"id": call_id, "type": "function"} if call_id else {})
        for index, call_id, arguments in calls
    ]
    deltas = [[{"index": 0, "delta": {"tool_calls": [one]}, "finish_reason": None}] for one in pieces]
    last = [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]
    return b"".join([*(chunk(choices=choices) for choices in [*deltas, last]), usage_chunk(), DONE])


@pytest.mark.parametrize(
    "said",
    [
        openai_stream((0, "a", ""), (1, "b", ""), (0, None, '{"n":1}'), (1, None, '{"n":2}')),
        openai_stream((0, "a", '{"n":1}'), (0, "b", '{"n":'), (0, None, "2}")),
    ],
    ids=["which take turns", "which are given one number"],
)
def test_parallel_tool_calls_keep_their_arguments_in_every_format(
    gateway_server: StartGateway, byte_server: StartUpstream, said: bytes
) -> None:
    far_end = byte_server(lambda connection: connection.send(SSE_HEAD + said))
    gateway = gateway_server(far_end.url, providers=providers(far_end.url), default_provider="gpt")
    shape: dict[str, Any] = {"type": "object", "properties": {}}
    with anthropic.Anthropic(base_url=gateway.url, api_key="any", max_retries=0) as claude:
        tools: Any = [{"name": "get", "input_schema": shape}]
        with claude.messages.stream(model=MODELS[1], messages=HI, max_tokens=99, tools=tools) as messages:
            blocks = messages.get_final_message().content
    assert [(one.id, one.input) for one in blocks if one.type == "tool_use"] == [("a", {"n": 1}), ("b", {"n": 2})]
    function: dict[str, Any] = {"name": "get", "parameters": shape}
    flat: Any = [{"type": "function", **function}]
    nested: Any = [{"type": "function", "function": function}]
    with openai.OpenAI(base_url=gateway.base_url, api_key="any", max_retries=0) as client:
        with client.responses.stream(model=MODELS[1], input="hi", tools=flat) as responses:
            output = responses.get_final_response().output
        items = [(one.call_id, json.loads(one.arguments)) for one in output if one.type == "function_call"]
        assert items == [("a", {"n": 1}), ("b", {"n": 2})]
        with client.chat.completions.stream(model=MODELS[1], messages=HI, tools=nested) as chat:
            calls = chat.get_final_completion().choices[0].message.tool_calls or []
        assert [(one.id, json.loads(one.function.arguments)) for one in calls] == items


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_a_translated_stream_that_starts_with_an_error_falls_back_and_costs_nothing(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider, byte_server: StartUpstream, path: str
) -> None:
    said = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}
    event = b"event: error\ndata: " + json.dumps(said).encode() + b"\n\n"
    far_end = byte_server(lambda connection: connection.send(SSE_HEAD + event))
    row = providers(mock_server.url)["gpt"]
    flags: dict[str, Any] = {"providers": {**providers(far_end.url), "gpt": row}, "default_provider": "gpt"}
    flags["models"] = [{"match": "main", "provider": "claude", "name": "claude-sonnet-4-5", "fallback": ["gpt/gpt-4o"]}]
    gateway = gateway_server(mock_server.url, **flags)
    asked = {"input": "hi"} if path == "/v1/responses" else {"messages": HI, "max_tokens": 50}
    alone = gateway.web.post(path, {"model": "claude/claude-sonnet-4-5", "stream": True, **asked})
    assert alone.status >= 500
    assert alone.totals == (0, 0, 0)
    reply = gateway.web.post(path, {"model": "main", "stream": True, **asked}, {"x-session-id": "s"})
    assert reply.status == 200
    assert totals(gateway, "s") == billed(mock)
    assert len(far_end.requests) == 2


def reports_cached_tokens(connection: Connection) -> None:
    usage = {
        "input_tokens": 10,
        "cache_read_input_tokens": 1000,
        "cache_creation_input_tokens": 300,
        "output_tokens": 5,
        "cache_creation": {"ephemeral_5m_input_tokens": 100, "ephemeral_1h_input_tokens": 200},
        "inference_geo": "us",
    }
    message = {"id": "m", "type": "message", "role": "assistant", "model": "c", "content": [], "usage": usage}
    if not connection.request.json.get("stream"):
        connection.whole(json.dumps({**message, "stop_reason": "end_turn"}).encode())
        return
    end = claude_event("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 5})
    start = claude_event("message_start", message=message)
    connection.send(SSE_HEAD + start + end + claude_event("message_stop"))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_one_hour_caching_is_charged_in_every_format(
    gateway_server: StartGateway, byte_server: StartUpstream, path: str, stream: bool
) -> None:
    far_end = byte_server(reports_cached_tokens)
    gateway = gateway_server(far_end.url, providers=providers(far_end.url), default_provider="gpt")
    asked = {"input": "hi"} if path == "/v1/responses" else {"messages": HI, "max_tokens": 50}
    body = {"model": "claude/claude-sonnet-4-5", "stream": stream, **asked}
    assert gateway.web.post(path, body, {"x-session-id": "s"}).status == 200
    assert totals(gateway, "s") == (1310, 5)
    usd = (10 * 3 + 1000 * 0.3 + 100 * 3.75 + 200 * 6 + 5 * 15) / 10**6
    assert float(gateway.web.get("/api/sessions/s").json["cost_usd"]) == pytest.approx(usd)


@pytest.mark.parametrize("stream", [False, True])
def test_the_inference_region_changes_the_price_for_a_messages_client(
    gateway_server: StartGateway, byte_server: StartUpstream, stream: bool
) -> None:
    far_end = byte_server(reports_cached_tokens)
    gateway = gateway_server(far_end.url, providers=providers(far_end.url), default_provider="gpt")
    body = {"model": "claude/claude-opus-4-6", "stream": stream, "messages": HI, "max_tokens": 50}
    assert gateway.web.post("/v1/messages", body, {"x-session-id": "s"}).status == 200
    usd = 1.1 * (10 * 5 + 1000 * 0.5 + 100 * 6.25 + 200 * 10 + 5 * 25) / 10**6
    assert float(gateway.web.get("/api/sessions/s").json["cost_usd"]) == pytest.approx(usd, abs=1e-6)


@models
def test_the_input_of_a_broken_messages_stream_is_charged(bench: Bench, model: str) -> None:
    """litellm writes zero input tokens at the start of the stream."""
    bench.mock.behaviour = Behaviour(die=2, chunks=10)
    with pytest.raises(anthropic.APIError):
        list(bench.claude.messages.create(model=model, messages=HI, max_tokens=99, stream=True))
    assert bench.totals[0] > 0


# --- disconnects, loading, limits ------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_disconnect", ["cancel", "drain"])
def test_a_client_that_leaves_a_stream_is_charged_and_the_upstream_call_is_closed(
    gateway_server: StartGateway, on_disconnect: str
) -> None:
    left: list[bool] = []

    def script(connection: Connection) -> None:
        connection.send(SSE_HEAD + chunk("hello " * 50))
        left.append(connection.wait_until_left())

    with ByteServer(script) as far_end:
        flags: dict[str, Any] = {"sessions.on_disconnect": on_disconnect, "sessions.drain_s": 0.2}
        gateway = gateway_server(far_end.url, providers=providers(far_end.url), default_provider="gpt", **flags)
        body = json.dumps({"model": "gpt/gpt-4o", "messages": HI, "stream": True}).encode()
        with connect(gateway.url) as sock:
            sock.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-session-id: s\r\n"
                b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
            )
            read_until(sock, b"hello")
        with in_time():
            until(lambda: gateway.web.get("/api/sessions/s").status == 200, what="it is settled")
            until(lambda: totals(gateway, "s")[1] >= 50, what="what was delivered is charged")
            until(lambda: left == [True], what="the connection to the provider is closed")


def test_a_call_during_the_loading_of_litellm_waits(
    mock_server: MockServer, mock: MockProvider, gateway_process: StartProcess
) -> None:
    gateway = gateway_process(mock_server.url, providers=providers(mock_server.url), default_provider="gpt")
    for path, body in (
        ("/v1/chat/completions", {"model": MODELS[0], "messages": HI}),
        ("/v1/messages", {"model": MODELS[1], "messages": HI, "max_tokens": 9}),
    ):
        reply = gateway.web.post(path, body, {"x-session-id": "s"})
        assert reply.status == 200, reply.body
    assert totals(gateway, "s") == billed(mock)
    gateway.stop()
    said = gateway.errors.read_text()
    assert "Traceback" not in said
    assert "Unclosed" not in said
    assert "weather" not in said
    assert "sk-held" not in said


@models
def test_budget_and_context_limits_apply_to_translated_providers(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway, model: str
) -> None:
    limits: dict[str, Any] = {"budget.tokens": 400, "budget.modes": False}
    gateway = gateway_server(mock_server.url, providers=providers(mock_server.url), default_provider="gpt", **limits)
    long: list[Any] = []
    for turn in range(30):
        long += [{"role": "user", "content": f"Turn {turn}. " + "word " * 20}, {"role": "assistant", "content": "Yes."}]
    asked = {"model": model, "messages": [*long, *HI], "max_tokens": 20}
    reply = gateway.web.post("/v1/chat/completions", asked, {"x-session-id": "s", "x-context-budget": "300"})
    assert reply.status == 200, reply.body
    assert int(reply.header("x-context-tokens") or 0) <= 300 < int(reply.header("x-context-tokens-original") or 0)
    assert billed(mock)[0] <= 330
    while reply.status == 200:
        reply = gateway.web.post("/v1/chat/completions", asked, {"x-session-id": "s", "x-context-budget": "300"})
        assert sum(totals(gateway, "s")) == sum(billed(mock)) <= 400
    assert (reply.status, reply.error["code"]) == (400, "budget_exhausted")


def test_twenty_concurrent_translated_calls_are_all_metered(bench: Bench) -> None:
    async def all_at_once() -> None:
        async with openai.AsyncOpenAI(
            base_url=bench.gateway.base_url,
            api_key="any",
            max_retries=0,
            default_headers={"x-session-id": bench.session},
        ) as client:
            create: Any = client.chat.completions.create
            with in_time(at_most=60):
                answers = await asyncio.gather(
                    *(create(model=MODELS[number % 2], messages=HI, max_tokens=50) for number in range(20))
                )
        assert {answer.choices[0].message.content for answer in answers} == {"You said: What about the weather?"}

    asyncio.run(all_at_once())
    assert len(bench.mock.calls) == 20
    assert bench.billed == bench.totals


def test_sampling_parameters_that_a_model_refuses_are_left_out_and_noted(bench: Bench) -> None:
    asked: dict[str, Any] = {"model": "claude/claude-opus-5-5", "messages": HI, "temperature": 0.2}
    raw = bench.chat.chat.completions.with_raw_response.create(**asked)
    assert "temperature" not in json.loads(bench.mock.calls[-1].body)
    record = bench.gateway.web.get(f"/api/calls/{raw.headers['x-gateway-request-id']}").json
    assert record["notes"] == {"untranslated": "temperature"}
    with pytest.raises(openai.BadRequestError, match="End with a user message"):
        bench.chat.chat.completions.create(**{**asked, "messages": [*HI, {"role": "assistant", "content": "Sure"}]})
