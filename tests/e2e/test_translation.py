"""Clients of one format and providers of another: official SDKs, `adapter: litellm`, the built-in provider behind it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import anthropic
import openai
import pytest

from gateway.mock import Behaviour, MockServer, Provider
from tests.conftest import StartGateway, StartProcess
from tests.support.gateways import GatewayProcess, GatewayThread, until
from tests.support.scripted import SSE_HEAD, ByteServer, Connection, chunk
from tests.support.timing import in_time
from tests.support.web import connect

#: of a chat client and of a responses client, both ways
MODELS = ["claude/claude-sonnet-4-5", "gpt/gpt-4o"]
FAR_END = {"claude/claude-sonnet-4-5": "/v1/messages", "gpt/gpt-4o": "/v1/chat/completions"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
HI: list[Any] = [{"role": "user", "content": "What about the weather?"}]
#: litellm has pydantic say this; outside of tests it is not heard
pytestmark = [
    pytest.mark.filterwarnings("ignore:Accessing the"),
    pytest.mark.filterwarnings("ignore:.*ReadOnly. qualifier"),
]
models = pytest.mark.parametrize("model", MODELS)


def providers(url: str, **changes: object) -> dict[str, object]:
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
    """A client of each kind for one session, the gateway between, and the far end."""

    gateway: GatewayThread
    mock: Provider
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
def bench(translating_server: GatewayThread, mock: Provider, session: str) -> Iterator[Bench]:
    url, headers = translating_server.url, {"x-session-id": session}
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, default_headers=headers) as chat,
        anthropic.Anthropic(base_url=url, api_key="any", max_retries=0, default_headers=headers) as claude,
    ):
        yield Bench(translating_server, mock, session, chat, claude)


def totals(gateway: GatewayThread | GatewayProcess, session: str) -> tuple[int, int]:
    """Input and output of a session."""
    reply = gateway.web.get(f"/api/sessions/{session}")
    if reply.status == 404:
        return 0, 0
    shown = reply.json["cumulative_token_usage"]
    return shown["input_tokens"], shown["output_tokens"]


def billed(mock: Provider) -> tuple[int, int]:
    return mock.billed().input_tokens, mock.billed().output_tokens


# --- chat clients --------------------------------------------------------------------------------------------------


@models
def test_a_chat_client_gets_a_whole_answer(bench: Bench, model: str) -> None:
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
def test_a_chat_client_calls_tools_and_brings_their_results(bench: Bench, model: str, stream: bool) -> None:
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
    if "gpt" in model:  # Anthropic's part of the built-in provider answers in free text
        assert json.loads(answer.choices[0].message.content or "") == {"city": "sample city"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("client", ["chat", "messages"])
def test_tokens_that_anthropic_caches_are_inside_the_input_and_counted_once(
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
def test_a_text_client_gets_an_answer(bench: Bench, stream: bool) -> None:
    for model in MODELS:
        answer: Any = bench.chat.completions.create(model=model, prompt="Say hi", max_tokens=50, stream=stream)
        parts = list(answer) if stream else [answer]
        assert "".join(choice.text for part in parts for choice in part.choices) == "You said: Say hi"
    assert bench.billed == bench.totals > (0, 0)


def test_embeddings_are_passed_and_metered(bench: Bench) -> None:
    answer = bench.chat.embeddings.create(model="gpt/text-embedding-3-small", input=["one", "two words"])
    assert len(answer.data) == 2
    assert isinstance(answer.data[0].embedding[0], float)
    assert bench.billed == bench.totals > (0, -1)


# --- messages clients ----------------------------------------------------------------------------------------------


@models
@pytest.mark.parametrize("stream", [False, True])
def test_a_messages_client_gets_an_answer(bench: Bench, model: str, stream: bool) -> None:
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
def test_a_messages_client_uses_tools_and_brings_their_results(bench: Bench, model: str, stream: bool) -> None:
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
def test_what_claude_code_sends_besides_does_not_stop_a_call(bench: Bench, model: str) -> None:
    more: Any = {
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "metadata": {"user_id": json.dumps({"session_id": "s"})},
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    }
    answer = bench.claude.messages.create(
        model=model, messages=HI, max_tokens=50, system=more.pop("system"), extra_body=more,
        extra_headers={"anthropic-beta": "context-management-2025-06-27"},
    )  # fmt: skip
    assert answer.stop_reason == "end_turn"


# --- responses clients ---------------------------------------------------------------------------------------------


@models
@pytest.mark.parametrize("stream", [False, True])
def test_a_responses_client_gets_an_answer(bench: Bench, model: str, stream: bool) -> None:
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
def test_a_responses_client_calls_functions_and_brings_their_results(bench: Bench, model: str, stream: bool) -> None:
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


def test_a_reference_to_what_is_kept_elsewhere_is_refused(bench: Bench) -> None:
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        bench.chat.responses.create(model=MODELS[0], input="hi", previous_response_id="resp_1")
    assert bench.mock.calls == []


def test_calls_that_cannot_be_translated_close_the_provider_for_nobody(
    gateway_server: StartGateway, mock_server: MockServer, mock: Provider
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
def test_a_refusal_reaches_the_client_as_the_error_class_of_its_sdk(
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


def test_what_the_provider_does_not_know_is_a_clear_400(bench: Bench) -> None:
    with pytest.raises(openai.BadRequestError, match="'n'") as caught:
        bench.chat.chat.completions.create(model=MODELS[0], messages=HI, n=2)
    assert caught.value.code == "not_translatable"
    assert bench.mock.calls == []


def test_a_stream_that_breaks_off_ends_in_an_error_event(bench: Bench) -> None:
    bench.mock.behaviour = Behaviour(die=2, chunks=10)
    for model in MODELS:
        with pytest.raises(openai.APIError):
            list(bench.chat.chat.completions.create(model=model, messages=HI, stream=True))
        with pytest.raises(anthropic.APIError):
            list(bench.claude.messages.create(model=model, messages=HI, max_tokens=99, stream=True))


# --- leaving, loading, limits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_disconnect", ["cancel", "drain"])
def test_a_client_that_leaves_a_stream_is_charged_and_the_provider_told(
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
            got = b""
            while b"hello" not in got:
                got += sock.recv(65536)
        with in_time():
            until(lambda: gateway.web.get("/api/sessions/s").status == 200, what="it is settled")
            until(lambda: totals(gateway, "s")[1] >= 50, what="what was delivered is charged")
            until(lambda: left == [True], what="the provider is hung up on")


def test_a_call_that_comes_while_litellm_loads_waits_for_it(
    mock_server: MockServer, mock: Provider, gateway_process: StartProcess
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
def test_a_budget_and_a_context_limit_hold_as_for_any_provider(
    mock_server: MockServer, mock: Provider, gateway_server: StartGateway, model: str
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


def test_twenty_calls_at_once_are_all_answered_and_counted(bench: Bench) -> None:
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
