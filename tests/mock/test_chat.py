from __future__ import annotations

from typing import TYPE_CHECKING, Any

import openai
import pytest
from pydantic import BaseModel

from gateway.mock import MockProvider, MockServer, ToolCall, Turn

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

    from tests.mock.conftest import Http

WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
        },
    },
}
TIME: ChatCompletionToolParam = {"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}}
ARGUMENTS = '{"city":"sample city","unit":"C"}'


def say(text: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": text}]


def test_a_whole_answer_quotes_the_user(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="any-name", messages=say("good morning"))
    assert answer.model == "any-name"
    assert answer.choices[0].message.content == "You said: good morning"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (6, 5, 11)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_a_whole_answer_has_every_field_of_the_api(web: Http) -> None:
    body = web.chat().json
    assert set(body) == {
        "id", "object", "created", "model", "service_tier", "system_fingerprint", "choices", "usage",
    }  # fmt: skip
    assert body["object"] == "chat.completion"
    message: dict[str, object] = {"role": "assistant", "content": "You said: hi", "refusal": None, "annotations": []}
    assert body["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]


def test_stream_has_the_chunks_of_the_api(web: Http) -> None:
    answer = web.stream()
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.data_lines[-1] == "[DONE]"
    choices = [event["choices"][0] for event in answer.events]
    assert choices[0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert "".join(choice["delta"]["content"] for choice in choices[1:-1]) == "You said: hi"
    assert choices[-1] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert not any("usage" in event for event in answer.events)
    assert len({event["id"] for event in answer.events}) == 1


def test_a_usage_chunk_comes_when_asked_for(web: Http) -> None:
    events = web.stream(stream_options={"include_usage": True}).events
    assert all(event["usage"] is None for event in events[:-1])
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == web.chat().json["usage"]


def test_the_sdk_reads_a_stream(client: openai.OpenAI) -> None:
    with client.chat.completions.create(
        model="m", messages=say("hi"), stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 9


def test_a_limit_cuts_the_answer(client: openai.OpenAI) -> None:
    for answer in (
        client.chat.completions.create(model="m", messages=say("hi"), max_tokens=2),
        client.chat.completions.create(model="m", messages=say("hi"), max_completion_tokens=2),
    ):
        assert answer.choices[0].finish_reason == "length"
        assert answer.choices[0].message.content == "You said"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 2


def test_several_choices(client: openai.OpenAI, web: Http) -> None:
    answer = client.chat.completions.create(model="m", messages=say("hi"), n=3)
    texts = [choice.message.content for choice in answer.choices]
    assert texts == ["You said: hi", "You said: hi (choice 2)", "You said: hi (choice 3)"]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4 + 8 + 8

    streamed = ["", "", ""]
    finished = []
    for event in web.stream(n=3).events:
        choice = event["choices"][0]
        streamed[choice["index"]] += choice["delta"].get("content", "")
        finished += [choice["index"]] if choice["finish_reason"] else []
    assert streamed == texts
    assert sorted(finished) == [0, 1, 2]


def test_tool_loop(client: openai.OpenAI) -> None:
    messages = say("weather please")
    first = client.chat.completions.create(model="m", messages=messages, tools=[WEATHER, TIME])
    assert first.choices[0].finish_reason == "tool_calls"
    assert first.choices[0].message.content is None
    assert first.choices[0].message.tool_calls is not None
    call = first.choices[0].message.tool_calls[0]
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("weather", ARGUMENTS)

    messages += [first.choices[0].message.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]  # type: ignore[list-item]
    second = client.chat.completions.create(model="m", messages=messages, tools=[WEATHER, TIME])
    assert second.choices[0].message.content == "The tool answered: sunny"
    assert second.choices[0].finish_reason == "stop"


def test_a_streamed_tool_call(web: Http) -> None:
    events = web.stream("chunks=4", tools=[WEATHER]).events
    calls = [call for event in events for call in event["choices"][0]["delta"].get("tool_calls", [])]
    assert calls[0]["type"] == "function"
    assert calls[0]["function"] == {"name": "weather", "arguments": ""}
    assert all("id" not in call for call in calls[1:])
    assert len(calls) == 1 + 4
    assert "".join(call["function"]["arguments"] for call in calls) == ARGUMENTS
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def names(answer: Any) -> list[str]:
    return [call["function"]["name"] for call in answer.json["choices"][0]["message"].get("tool_calls", [])]


def test_tool_choice(web: Http) -> None:
    tools = [WEATHER, TIME]
    result = [{"role": "user", "content": "hi"}, {"role": "tool", "tool_call_id": "c", "content": "r"}]
    assert names(web.chat(tools=tools, tool_choice="none")) == []
    assert names(web.chat(tools=tools, tool_choice="auto")) == ["weather"]
    assert names(web.chat(tools=tools, messages=result)) == []
    assert names(web.chat(tools=tools, tool_choice="required", messages=result)) == ["weather"]
    named = {"type": "function", "function": {"name": "time"}}
    assert names(web.chat(tools=tools, tool_choice=named)) == ["time"]
    unknown = web.chat(tools=tools, tool_choice={"type": "function", "function": {"name": "other"}})
    assert (unknown.status, unknown.json["error"]["param"]) == (400, "tool_choice")


def test_a_choice_among_some_tools(web: Http) -> None:
    tools = [WEATHER, TIME]
    entry = {"type": "function", "function": {"name": "time"}}

    def among(mode: str) -> dict[str, Any]:
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [entry]}}

    assert names(web.chat(tools=tools, tool_choice=among("auto"))) == ["time"]
    result = [*say("x"), {"role": "tool", "tool_call_id": "1", "content": "42"}]
    assert names(web.chat(tools=tools, tool_choice=among("auto"), messages=result)) == []
    assert names(web.chat(tools=tools, tool_choice=among("required"), messages=result)) == ["time"]
    refused = web.chat("refuse_allowed_tools=1", tools=tools, tool_choice=among("auto"))
    assert (refused.status, refused.json["error"]["param"]) == (400, "tool_choice")
    assert "allowed_tools" in refused.json["error"]["message"]
    assert names(web.chat("refuse_allowed_tools=1", tools=tools, tool_choice="required")) == ["weather"]


def test_parallel_tool_calls(web: Http) -> None:
    asked = say("both in parallel")
    assert names(web.chat(tools=[WEATHER, TIME], messages=asked)) == ["weather", "time"]
    assert names(web.chat(tools=[WEATHER], messages=asked)) == ["weather", "weather"]
    assert names(web.chat(tools=[WEATHER, TIME], messages=asked, parallel_tool_calls=False)) == ["weather"]
    ids = [call["id"] for call in web.chat(tools=[TIME], messages=asked).json["choices"][0]["message"]["tool_calls"]]
    assert len(set(ids)) == 2


class Person(BaseModel):
    name: str
    age: int
    tags: list[str]


def test_structured_output(client: openai.OpenAI, web: Http) -> None:
    answer = client.chat.completions.parse(model="m", messages=say("who"), response_format=Person)
    assert answer.choices[0].message.parsed == Person(name="sample name", age=1, tags=["sample tags"])
    free = web.chat(response_format={"type": "json_object"}).json["choices"][0]["message"]["content"]
    assert free == '{"answer":"sample answer"}'


def test_a_shared_prefix_is_reported_as_cached(web: Http) -> None:
    system = {"role": "system", "content": "word " * 100}
    first = {"role": "user", "content": "first"}
    turns = [system, first, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "second"}]

    def cached(messages: list[dict[str, str]], model: str = "m") -> int:
        usage = web.chat(messages=messages, model=model).json["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached([system, first]) == 0
    assert cached(turns) == 100 + 4 + 1 + 4
    assert cached([system, {"role": "user", "content": "else"}]) == 104
    assert cached(turns, model="another") == 0
    short = [{"role": "user", "content": "short"}]
    assert cached(short) == cached(short) == 0


def test_scripted_turns(web: Http, provider: MockProvider) -> None:
    provider.push(
        Turn(text="first", usage=(100, 7)),
        Turn(tool_calls=(ToolCall("grep", '{"q":"x"}'),)),
        Turn(text="cut", finish_reason="content_filter"),
    )
    first, second, third, fourth = (web.chat().json for _ in range(4))
    assert first["choices"][0]["message"]["content"] == "first"
    assert (first["usage"]["prompt_tokens"], first["usage"]["total_tokens"]) == (100, 107)
    assert second["choices"][0]["message"]["tool_calls"][0]["function"] == {"name": "grep", "arguments": '{"q":"x"}'}
    assert third["choices"][0]["finish_reason"] == "content_filter"
    assert fourth["choices"][0]["message"]["content"] == "You said: hi"


def test_errors_have_the_format_of_the_api(web: Http, client: openai.OpenAI) -> None:
    for body in (b"", b"{", b"[]", b'{"model":"m"}', b'{"model":"m","messages":[1]}'):
        answer = web.send("POST", "/v1/chat/completions", body)
        assert answer.status == 400
        assert set(answer.json["error"]) == {"message", "type", "param", "code"}
        assert answer.json["error"]["type"] == "invalid_request_error"
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="missing-model", messages=say("hi"))
    assert caught.value.code == "model_not_found"
    assert web.chat(stream_options={"include_usage": True}).status == 400


def test_unknown_paths_and_methods(web: Http) -> None:
    assert web.send("POST", "/v1/nothing").status == 404
    assert web.get("/v1/chat/completions").status == 405


def test_api_key_is_required_if_configured(web: Http) -> None:
    with MockServer(MockProvider(api_key="right")) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as wrong:
            with pytest.raises(openai.AuthenticationError):
                wrong.models.list()
            assert wrong.with_options(api_key="right").models.list().data
        assert server.provider.calls[0].status == 401
