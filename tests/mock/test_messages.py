from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from gateway.mock import MockProvider, MockServer
    from tests.mock.conftest import Http

PATH = "/v1/messages"
LOOKUP = {
    "name": "lookup",
    "description": "finds",
    "input_schema": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
}


def body(text: str = "hi", **fields: object) -> dict[str, object]:
    return {"model": "m", "max_tokens": 100, "messages": [{"role": "user", "content": text}], **fields}


@pytest.fixture
def claude(server: MockServer, provider: MockProvider) -> Iterator[Any]:
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0) as made:
        yield made


def test_the_sdk_reads_a_whole_answer(claude: Any) -> None:
    answer = claude.messages.create(**body("good day", system="be kind"))
    assert answer.content[0].text == "You said: good day"
    assert answer.stop_reason == "end_turn"
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (2 + 4 + 2 + 4, 5)


def test_the_sdk_builds_up_a_stream(claude: Any) -> None:
    with claude.messages.stream(**body()) as stream:
        assert "".join(stream.text_stream) == "You said: hi"
        assert stream.get_final_message().usage.output_tokens == 4


def test_the_sdk_loops_with_a_tool(claude: Any) -> None:
    history: list[Any] = [{"role": "user", "content": "find it, in parallel"}]
    with claude.messages.stream(model="m", max_tokens=50, messages=history, tools=[LOOKUP]) as stream:
        first = stream.get_final_message()
    assert first.stop_reason == "tool_use"
    assert [(block.name, block.input) for block in first.content] == [("lookup", {"key": "sample key"})] * 2
    results = [{"type": "tool_result", "tool_use_id": block.id, "content": "found"} for block in first.content]
    history += [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    second = claude.messages.create(model="m", max_tokens=50, messages=history, tools=[LOOKUP])
    assert second.content[0].text == "The tool answered: found"


def test_the_sdk_reads_errors_counts_and_models(claude: Any) -> None:
    anthropic = pytest.importorskip("anthropic")
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(**{**body(), "model": "missing"})
    with pytest.raises(anthropic.RateLimitError) as caught:
        claude.messages.create(**body(), extra_headers={"x-mock": "status=429;retry_after=3"})
    assert caught.value.response.headers["retry-after"] == "3"
    assert claude.messages.count_tokens(model="m", messages=body()["messages"]).input_tokens == 5
    assert [model.id for model in claude.models.list()] == ["mock-small", "mock-large"]
    assert claude.models.retrieve("other").id == "other"


def test_the_events_of_a_stream(web: Http) -> None:
    events = web.send("POST", PATH, body(stream=True), {"x-mock": "chunks=2"}).events
    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        "ping",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[0]["message"]["usage"]["input_tokens"] == 5
    assert events[0]["message"]["stop_reason"] is None
    assert events[6]["usage"] == {"output_tokens": 4}
    assert events[6]["delta"]["stop_reason"] == "end_turn"


def test_tool_choice_limit_and_structure(web: Http) -> None:
    def ask(**fields: object) -> Any:
        return web.send("POST", PATH, body(**fields)).json  # type: ignore[arg-type]

    assert ask(tools=[LOOKUP], tool_choice={"type": "none"})["content"][0]["type"] == "text"
    assert ask(tools=[LOOKUP], tool_choice={"type": "any"})["content"][0]["type"] == "tool_use"
    assert ask(tools=[LOOKUP], tool_choice={"type": "tool", "name": "lookup"})["content"][0]["name"] == "lookup"
    assert ask(max_tokens=2)["stop_reason"] == "max_tokens"
    wanted = {"format": {"type": "json_schema", "schema": LOOKUP["input_schema"]}}
    assert json.loads(ask(output_config=wanted)["content"][0]["text"]) == {"key": "sample key"}


def test_caching_is_split_off_the_input_but_billed_in_full(web: Http, provider: MockProvider) -> None:
    text = {"type": "text", "text": "word " * 100, "cache_control": {"type": "ephemeral"}}
    messages = [{"role": "user", "content": [text]}]
    usages = [web.send("POST", PATH, body(messages=messages, system="be brief")).json["usage"] for _ in range(2)]
    fields = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    assert [[usage[name] for name in fields] for usage in usages] == [[6, 104, 0], [6, 0, 104]]
    assert provider.billed().input_tokens == 2 * 110


def test_usage_can_be_missing_or_whole_at_the_end(web: Http) -> None:
    bare = web.send("POST", PATH, body(stream=True), {"x-mock": "usage=none"}).events
    assert not any("usage" in event or "usage" in event.get("message", {}) for event in bare)
    final = web.send("POST", PATH, body(stream=True), {"x-mock": "usage=finish;tokens=30/9"}).events[-2]
    assert (final["usage"]["input_tokens"], final["usage"]["output_tokens"]) == (30, 9)


def test_errors_have_the_format_of_the_api(web: Http) -> None:
    answer = web.send("POST", PATH, {"model": "m", "messages": []})
    assert answer.status == 400
    assert answer.json["type"] == "error"
    assert answer.json["error"]["type"] == "invalid_request_error"
    overloaded = web.send("POST", PATH, body(), {"x-mock": "status=529"})
    assert overloaded.json["error"]["type"] == "overloaded_error"
