from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

if TYPE_CHECKING:
    import openai
    from openai.types.responses import FunctionToolParam

    from gateway.mock import MockProvider
    from tests.mock.conftest import Http

PATH = "/v1/responses"
LOOKUP: FunctionToolParam = {
    "type": "function",
    "name": "lookup",
    "strict": True,
    "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
}


def test_a_whole_answer(client: openai.OpenAI, provider: MockProvider) -> None:
    answer = client.responses.create(model="m", input="hi there", instructions="be brief")
    assert answer.status == "completed"
    assert answer.output_text == "You said: hi there"
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (2 + 4 + 2 + 4, 5)
    assert provider.billed().total_tokens == answer.usage.total_tokens == 17


def test_the_events_of_a_stream(web: Http) -> None:
    events = web.send("POST", PATH, {"model": "m", "input": "hi", "stream": True}, {"x-mock": "chunks=2"}).events
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [event["sequence_number"] for event in events] == list(range(10))
    assert events[0]["response"]["usage"] is None
    assert events[-1]["response"]["usage"]["total_tokens"] == 9
    assert events[-1]["response"]["output"][0] == events[-2]["item"]


def test_the_sdk_builds_up_a_stream(client: openai.OpenAI) -> None:
    with client.responses.stream(model="m", input="hi") as stream:
        final = stream.get_final_response()
    assert final.output_text == "You said: hi"
    with client.responses.stream(model="m", input="hi in parallel", tools=[LOOKUP]) as stream:
        final = stream.get_final_response()
    calls = [item for item in final.output if item.type == "function_call"]
    assert [(call.name, call.arguments) for call in calls] == [("lookup", '{"key":"sample key"}')] * 2
    assert len({call.call_id for call in calls}) == 2


def test_tool_loop(client: openai.OpenAI) -> None:
    history: list[Any] = [{"role": "user", "content": "look it up"}]
    first = client.responses.create(model="m", input=history, tools=[LOOKUP])
    call = first.output[0]
    assert call.type == "function_call"
    history += [call.to_dict(), {"type": "function_call_output", "call_id": call.call_id, "output": "42"}]
    second = client.responses.create(model="m", input=history, tools=[LOOKUP])
    assert second.output_text == "The tool answered: 42"


def test_a_named_tool_and_none(client: openai.OpenAI) -> None:
    named = client.responses.create(
        model="m", input="x", tools=[LOOKUP], tool_choice={"type": "function", "name": "lookup"}
    )
    assert named.output[0].type == "function_call"
    none = client.responses.create(model="m", input="x", tools=[LOOKUP], tool_choice="none")
    assert none.output[0].type == "message"


def test_a_choice_among_some_tools(web: Http) -> None:
    tools = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in ("a", "b", "c")]

    def call(mode: str, mock: str = "") -> Any:
        choice = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "b"}]}
        body = {"model": "m", "input": "x", "tools": tools, "tool_choice": choice}
        return web.send("POST", "/v1/responses", body, {"x-mock": mock})

    for mode in ("auto", "required"):
        assert [item.get("name") for item in call(mode).json["output"]] == ["b"]
    refused = call("auto", "refuse_allowed_tools=1")
    assert (refused.status, refused.json["error"]["param"]) == (400, "tool_choice")


def test_a_limit_makes_it_incomplete(client: openai.OpenAI, web: Http) -> None:
    answer = client.responses.create(model="m", input="hi", max_output_tokens=2)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    events = web.send("POST", PATH, {"model": "m", "input": "hi", "stream": True, "max_output_tokens": 2}).events
    assert events[-1]["type"] == "response.incomplete"


class Person(BaseModel):
    name: str
    age: int


def test_structured_output(client: openai.OpenAI) -> None:
    answer = client.responses.parse(model="m", input="who", text_format=Person)
    assert answer.output_parsed == Person(name="sample name", age=1)


def test_input_tokens_are_counted_but_not_billed(client: openai.OpenAI, provider: MockProvider) -> None:
    assert client.responses.input_tokens.count(model="m", input="hi there").input_tokens == 6
    assert provider.billed().calls == 0


def test_no_usage_and_no_last_event(web: Http) -> None:
    body = {"model": "m", "input": "hi"}
    assert web.send("POST", PATH, body, {"x-mock": "usage=none"}).json["usage"] is None
    events = web.send("POST", PATH, {**body, "stream": True}, {"x-mock": "no_done=1"}).events
    assert events[-1]["type"] == "response.output_item.done"


def test_errors(web: Http) -> None:
    assert web.send("POST", PATH, {"model": "missing", "input": "x"}).json["error"]["code"] == "model_not_found"
    assert web.send("POST", PATH, b"nonsense").status == 400


def test_stored_history_is_billed_again_without_instructions_and_tools(client: openai.OpenAI) -> None:
    def billed(**asked: Any) -> tuple[Any, int]:
        answer = client.responses.create(model="m", input="hi there", **asked)
        assert answer.usage is not None
        return answer, answer.usage.input_tokens

    first, alone = billed(instructions="be brief")
    said = alone - 6 + first.usage.output_tokens
    second, again = billed(previous_response_id=first.id)
    assert again == said + 6
    assert billed(previous_response_id=first.id)[1] == again
    assert billed(previous_response_id=second.id, instructions="be brief")[1] == again + second.usage.output_tokens + 12
    assert billed(previous_response_id="resp_unknown")[1] == 6
    unkept, _ = billed(store=False)
    assert billed(previous_response_id=unkept.id)[1] == 6


def test_a_conversation_grows_with_each_answer(client: openai.OpenAI, web: Http) -> None:
    body = {"model": "m", "input": "hi there", "conversation": {"id": "conv_1"}}
    weights = [client.responses.create(model="m", input="hi there", conversation="conv_1").usage for _ in range(3)]
    assert [usage.input_tokens for usage in weights if usage is not None] == [6, 17, 28]
    assert web.send("POST", f"{PATH}/input_tokens", body).json["input_tokens"] == 39
    assert web.send("POST", PATH, body).json["conversation"] == {"id": "conv_1"}


CONVERSATION: list[Any] = [{"role": "user", "content": "hi there"}]
TRIGGER = {"type": "compaction_trigger"}


def test_a_trigger_is_answered_with_one_compaction_item(web: Http, provider: MockProvider) -> None:
    body = {"model": "m", "input": [*CONVERSATION, TRIGGER], "stream": True}
    events = web.send("POST", PATH, body).events
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created", "in_progress", "output_item.added", "output_item.done", "completed"
    ]  # fmt: skip
    [item] = events[-1]["response"]["output"]
    assert item["type"] == "compaction"
    assert item == events[3]["item"]
    assert events[-1]["response"]["usage"]["total_tokens"] == provider.billed().total_tokens > 20


def test_a_compaction_item_is_taken_back_and_a_foreign_one_refused(client: openai.OpenAI, web: Http) -> None:
    [item] = client.responses.compact(model="m", input=CONVERSATION).output
    taken = item.model_dump(exclude_none=True)
    assert web.send("POST", PATH, {"model": "m", "input": [taken, *CONVERSATION]}).status == 200
    refused = web.send("POST", PATH, {"model": "m", "input": [{**taken, "encrypted_content": "x"}]})
    assert refused.status == 400
    assert refused.json["error"]["code"] == "invalid_encrypted_content"


def test_a_server_that_knows_no_compaction_refuses_it_or_answers_with_a_message(web: Http) -> None:
    body, refused = {"model": "m", "input": [*CONVERSATION, TRIGGER]}, {"x-mock": "compaction=refused"}
    answer = web.send("POST", PATH, body, refused)
    assert answer.status == 400
    assert "compaction_trigger" in answer.json["error"]["message"]
    assert web.send("POST", f"{PATH}/compact", {"model": "m", "input": CONVERSATION}, refused).status == 404
    ignored = web.send("POST", PATH, body, {"x-mock": "compaction=ignored"}).json
    assert [item["type"] for item in ignored["output"]] == ["message"]
    assert web.send("POST", PATH, body, {"x-mock": "compaction=else"}).status == 400
