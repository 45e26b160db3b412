"""/v1/responses: requests, whole responses, streams, and streams that are ended early."""

from __future__ import annotations

import json
import sys
import tracemalloc
from typing import Any

import pytest

from gateway.core.errors import InvalidRequest
from gateway.core.usage import Usage
from gateway.dialects.base import Call, EventReader, ParsedResponse, StreamMeter, Verdict
from gateway.dialects.fields import join
from gateway.dialects.openai_responses import OpenAIResponses
from gateway.dialects.responses_output import MAX_KEPT
from tests.support.nesting import DEEP

DIALECT = OpenAIResponses()
HELLO = "hello, " * 8


def call(**fields: object) -> Call:
    return DIALECT.read(json.dumps({"model": "asked", "input": "x" * 40, **fields}).encode())


def answer_to(*events: object) -> ParsedResponse:
    reader = DIALECT.reader(call(), drop_usage=True)
    for event in events:
        reader.read(json.dumps(event).encode())
    return reader.answer()


def whole(**fields: object) -> ParsedResponse:
    return DIALECT.answer(json.dumps({"object": "response", **fields}).encode())


def usage_of(answer: ParsedResponse) -> Usage:
    assert answer.usage is not None
    return answer.usage.complete(0, 0)[0]


def created(number: int = 0, **fields: object) -> dict[str, Any]:
    response = {"id": "resp_1", "created_at": 7, "model": "gpt", "status": "in_progress", "output": [], **fields}
    return {"type": "response.created", "sequence_number": number, "response": response}


def added(index: int, kind: str, **fields: object) -> dict[str, Any]:
    item = {"id": f"item_{index}", "type": kind, "status": "in_progress", **fields}
    return {"type": "response.output_item.added", "output_index": index, "item": item}


def done(index: int, kind: str, **fields: object) -> dict[str, Any]:
    item = {"id": f"item_{index}", "type": kind, "status": "completed", **fields}
    return {"type": "response.output_item.done", "output_index": index, "item": item}


def delta(kind: str, text: object, index: object = 0, **fields: object) -> dict[str, Any]:
    return {"type": f"response.{kind}.delta", "output_index": index, "delta": text, **fields}


# --- the request ---------------------------------------------------------------------------------------------------------


def test_request_is_read() -> None:
    body = b'{"model":"m","input":[{"role":"user"}],"stream":true,"x":1}'
    found = DIALECT.read(body)
    assert (found.operation, found.model, found.stream, found.usage_asked) == ("chat", "m", True, True)
    assert found.body is body


def test_request_without_model_is_accepted() -> None:
    assert DIALECT.read(b'{"prompt":{"id":"pmpt_1"}}').model is None
    assert DIALECT.read(b'{"input":"hi","previous_response_id":"resp_1"}').model is None
    assert DIALECT.read(b"{}").model is None
    assert DIALECT.read(b'{"prompt":{"id":"pmpt_1"},"model":"m"}').model == "m"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"model":7,"input":"x"}', "model"),
        (b'{"model":7,"prompt":{"id":"pmpt_1"}}', "model"),
        (b'{"model":"m","stream":1}', "stream"),
        (b'{"model":"m","input":"a","input":"b"}', "input"),
        (b"\xef\xbb\xbf{}", None),
        (b"", None),
    ],
)
def test_invalid_responses_request_is_refused_with_the_field_name(body: bytes, param: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        DIALECT.read(body)
    assert caught.value.param == param


def test_unchanged_request_keeps_its_bytes() -> None:
    found = call(stream=True)
    assert found.with_model("asked", DIALECT.usage_option(found)) is found.body
    found = DIALECT.read(b'{"prompt":{"id":"pmpt_1"}}')
    assert found.with_model("", DIALECT.usage_option(found)) is found.body


def test_only_changed_fields_get_new_bytes() -> None:
    found = DIALECT.read(b'{ "store" : false,"model":"alias","input":[ {} ],"top_p": 9e-1}')
    sent = found.with_model("real", {"max_output_tokens": 5, "input": join([b'{"role": "user"}', b"{}"])})
    assert sent == (b'{"store":false,"model":"real","input":[{"role": "user"},{}],"top_p":9e-1,"max_output_tokens":5}')


@pytest.mark.parametrize(
    ("fields", "opening"),
    [
        ({"input": "hello"}, ["hello"]),
        ({"instructions": "be brief", "input": [{"role": "user", "content": "hello"}]}, ["be brief", "hello"]),
        ({"input": [{"role": "developer", "content": "d"}, {"type": "reasoning"}, {"role": "user", "content": "u"}]},
         ["d", "u"]),
    ],
)  # fmt: skip
def test_conversation_is_identified_by_instructions_and_first_item(fields: dict[str, Any], opening: list[str]) -> None:
    assert DIALECT.opening(call(**fields)) == opening


def test_stored_prompt_alone_identifies_no_conversation() -> None:
    assert DIALECT.opening(DIALECT.read(b'{"prompt":{"id":"pmpt_1"}}')) == []


def test_every_text_of_a_request_is_counted() -> None:
    found = call(
        instructions="i", input=[{"role": "user", "content": "u"}], tools=[{"name": "find"}],
        prompt={"variables": {"city": "Rome"}}, text={"format": {"name": "shape"}}, metadata={"note": "no"},
    )  # fmt: skip
    assert set(DIALECT.input_text(found)) == {"i", "user", "u", "find", "Rome", "shape"}


# --- whole responses --------------------------------------------------------------------------------------------------


def test_whole_response_is_read() -> None:
    found = whole(
        status="completed", model="gpt-5", service_tier="flex", error=None,
        output=[
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x" * 40}], "encrypted_content": "x" * 80},
            {"type": "web_search_call", "id": "ws_1", "action": {"type": "search", "query": "x" * 40}},
            {"type": "message", "content": [{"type": "output_text", "text": "x" * 400}, {"refusal": "x" * 40}]},
            {"type": "function_call", "name": "find", "arguments": "x" * 40},
            {"type": "custom_tool_call", "name": "run", "input": "x" * 40},
            {"type": "mcp_call", "name": "ask", "arguments": "x" * 40, "output": "y" * 400},
            {"type": "function_call_output", "output": "y" * 400},
        ],
        usage={"input_tokens": 10, "output_tokens": 5, "total_tokens": 15},
    )  # fmt: skip
    assert (found.model, found.finish_reason, found.service_tier, found.error) == ("gpt-5", "completed", "flex", False)
    assert found.tools == ("web_search_call", "find", "run", "ask")
    assert usage_of(found) == Usage(10, 5, 15)
    assert 170 <= found.output_estimate <= 190


def test_incomplete_response_has_its_reason() -> None:
    found = whole(status="incomplete", incomplete_details={"reason": "content_filter"})
    assert (found.finish_reason, found.error) == ("content_filter", False)


def test_running_response_has_not_ended() -> None:
    assert whole(status="queued", usage=None, output=[]).finish_reason is None


@pytest.mark.parametrize("body", [{"error": {"message": "x"}}, {"status": "failed", "error": {"code": "server_error"}}])
def test_error_with_status_200_is_noted(body: dict[str, Any]) -> None:
    assert whole(**body).error


@pytest.mark.parametrize("body", [b"", b"<html>", b"null", b"[]", b"7", b"\xff\xfe", b"{" * DEEP, b"[" * DEEP, b"{}"])
def test_response_of_another_form_gives_an_empty_result(body: bytes) -> None:
    assert DIALECT.answer(body) == ParsedResponse()


@pytest.mark.parametrize(
    "body",
    [
        {"model": 7, "status": [], "service_tier": {}, "usage": 7, "incomplete_details": 7},
        {"output": {"a": 1}, "incomplete_details": {"reason": 7}},
        {"output": [7, None, {"type": "function_call"}, {"type": "function_call", "name": 7}, {"type": []}]},
        {"output": [{"type": "message", "content": 7, "summary": [7, {"text": 7}], "encrypted_content": []}]},
    ],
)
def test_response_with_wrong_types_gives_an_empty_result(body: dict[str, Any]) -> None:
    assert whole(**body) == ParsedResponse()


# --- streams ---------------------------------------------------------------------------------------------------------------


def test_a_stream_is_read() -> None:
    item = {"name": "find", "arguments": "x" * 8}
    found = answer_to(
        created(usage=None),
        added(0, "message"),
        delta("output_text", "x" * 8, 0, content_index=0),
        done(0, "message", content=[{"type": "output_text", "text": "x" * 8}]),
        added(1, "function_call", name="find"),
        delta("function_call_arguments", "x" * 8, 1),
        done(1, "function_call", **item),
        added(2, "web_search_call"),
        {
            "type": "response.completed",
            "response": {
                "status": "completed",
                "service_tier": "default",
                "output": [{"type": "function_call", **item}],
                "usage": {"input_tokens": 3, "output_tokens": 4, "total_tokens": 7},
            },
        },
    )
    assert usage_of(found) == Usage(3, 4, 7)
    assert (found.model, found.finish_reason, found.service_tier, found.tools) == (
        "gpt", "completed", "default", ("find", "web_search_call"),
    )  # fmt: skip
    assert found.output_estimate == 9


@pytest.mark.parametrize(
    "kind",
    [
        *("output_text", "refusal", "reasoning_text", "reasoning_summary_text", "function_call_arguments"),
        *("custom_tool_call_input", "mcp_call_arguments", "code_interpreter_call_code", "audio.transcript", "new"),
    ],
)
def test_all_deltas_are_counted(kind: str) -> None:
    assert answer_to(delta(kind, "x" * 8)).output_estimate == 2


def test_audio_is_counted_by_its_length_and_not_as_text() -> None:
    assert answer_to(delta("audio", "x" * 8000)).output_estimate == 3


def test_whole_item_is_counted_once() -> None:
    text = [{"type": "output_text", "text": "x" * 8}]
    assert answer_to(done(0, "message", content=text)).output_estimate == 2
    pieces = [delta("output_text", "x" * 8), done(0, "message", content=text)]
    assert answer_to(*pieces).output_estimate == 2
    unnumbered = [{**event, "output_index": None, "item_id": "item_0"} for event in pieces]
    assert answer_to(*unnumbered).output_estimate == 2
    assert answer_to({"type": "response.completed", "response": {"output": [{"content": text}]}}).output_estimate == 2


def test_unreadable_reasoning_is_estimated_from_its_length() -> None:
    events = [added(0, "reasoning", encrypted_content="x" * 80), done(0, "reasoning", encrypted_content="x" * 800)]
    assert answer_to(*events).output_estimate == 100


@pytest.mark.parametrize("numbered", [True, False])
def test_start_and_end_events_are_one_tool_call(numbered: bool) -> None:
    events = [added(0, "function_call", name="find"), done(0, "function_call", name="find")]
    if not numbered:
        events = [{name: value for name, value in event.items() if name != "output_index"} for event in events]
    assert answer_to(*events).tools == ("find",)


@pytest.mark.parametrize(
    "event",
    [
        {"type": "error", "code": "x", "message": "y"},
        {"type": "error", "error": {"message": "x"}},
        {"error": {"message": "x"}},
        {"type": "response.failed", "response": {"status": "failed", "error": {"code": "server_error"}}},
        {"type": "response.failed", "response": {"status": "failed"}},
    ],
)
def test_an_error_event_is_noted(event: dict[str, Any]) -> None:
    assert answer_to(created(), event).error


@pytest.mark.parametrize(
    ("data", "verdict"),
    [
        (b"[DONE]", Verdict.LAST),
        (b'{"type":"response.completed","response":{}}', Verdict.LAST),
        (b'{"type":"response.incomplete"}', Verdict.LAST),
        (b'{"type":"response.failed"}', Verdict.LAST),
        (b'{"type":"response.in_progress"}', Verdict.PASS),
        (b'{"type":["response.failed"]}', Verdict.PASS),
        (b"not json", Verdict.PASS),
        (b"[]", Verdict.PASS),
    ],
)
def test_an_event_is_the_last_one_or_passes(data: bytes, verdict: Verdict) -> None:
    assert DIALECT.reader(call(), drop_usage=True).read(data) is verdict


@pytest.mark.parametrize(
    "event",
    [
        {"type": "response.output_item.added"}, {"type": "response.output_item.done", "item": "x"},
        {"type": "response.output_item.done", "item": {}, "output_index": []}, {"type": "response.created", "response": 7},
        {"type": [], "sequence_number": "7"}, {"type": "response.output_text.delta", "delta": 7},
        {"type": "response.output_text.delta", "delta": "", "output_index": {}, "content_index": []},
    ],
)  # fmt: skip
def test_event_with_wrong_types_is_ignored(event: dict[str, Any]) -> None:
    reader = DIALECT.reader(call(), drop_usage=True)
    assert reader.read(json.dumps(event).encode()) is Verdict.PASS
    assert reader.answer() == ParsedResponse()
    assert b"response.incomplete" in reader.cut_short()


DELTA = b'event: d\ndata: {"type":"response.output_text.delta","delta":"hi"}\n\n'
LAST = b'event: response.completed\ndata: {"type":"response.completed"}\n\n'


@pytest.mark.parametrize(
    ("region", "plain"),
    [
        (DELTA, len(DELTA)),
        (DELTA * 3, len(DELTA) * 3),
        (DELTA + LAST, len(DELTA)),
        (DELTA + LAST.replace(b"completed", b"failed") + LAST, len(DELTA)),
        (DELTA + b"data: [DONE]\n\n", len(DELTA)),
        (DELTA + b"data: {", len(DELTA)),
        (LAST + DELTA, 0),
        (DELTA.replace(b"\n", b"\r\n"), 0),
        (b"data: {", 0),
        (b"", 0),
    ],
)
def test_only_events_before_a_possible_end_mark_may_be_read_later(region: bytes, plain: int) -> None:
    assert DIALECT.reader(call(), drop_usage=True).plain_prefix(region) == plain


# --- ended early -----------------------------------------------------------------------------------------------------------


def fed(reader: EventReader, *events: object) -> StreamMeter:
    meter = StreamMeter(reader)
    for event in events:
        meter.feed(b"data: " + json.dumps(event).encode() + b"\n\n")
    return meter


def cut_after(*events: object) -> list[Any]:
    meter = fed(DIALECT.reader(call(), drop_usage=True), *events)
    blocks = meter.end_at_limit().decode().removesuffix("\n\n").split("\n\n")
    found = [json.loads(block.partition("\ndata: ")[2]) for block in blocks]
    assert [f"event: {event['type']}" for event in found] == [block.partition("\n")[0] for block in blocks]
    assert meter.response().finish_reason == "max_output_tokens"
    assert meter.response().usage is None
    return found


def output_after(*events: object) -> Any:
    [end] = cut_after(created(), *events)
    return end["response"]["output"]


def test_stream_ended_early_has_the_response_received_so_far() -> None:
    tools = [{"type": "function", "name": "find"}]
    [end] = cut_after(
        created(4, tools=tools, instructions="i"),
        added(0, "message", role="assistant", content=[]),
        delta("output_text", HELLO, 0, content_index=0, sequence_number=9),
    )
    assert (end["type"], end["sequence_number"]) == ("response.incomplete", 10)
    response = end["response"]
    assert {name: response[name] for name in ("id", "created_at", "model", "tools", "instructions", "status")} == {
        "id": "resp_1", "created_at": 7, "model": "gpt", "tools": tools, "instructions": "i", "status": "incomplete",
    }  # fmt: skip
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    part = {"type": "output_text", "annotations": [], "text": HELLO}
    message = {"id": "item_0", "type": "message", "status": "incomplete", "role": "assistant", "content": [part]}
    assert response["output"] == [message]
    assert response["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 14,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 24,
    }


def test_stream_ended_before_its_start_has_a_start_and_an_end() -> None:
    start_event, end = cut_after()
    assert (start_event["type"], start_event["sequence_number"], start_event["response"]["status"]) == (
        "response.created",
        0,
        "in_progress",
    )
    assert (end["type"], end["sequence_number"], end["response"]["status"]) == ("response.incomplete", 1, "incomplete")
    assert start_event["response"]["id"] == end["response"]["id"]
    assert end["response"]["model"] == "asked"


@pytest.mark.parametrize(
    ("item", "kind", "numbers", "expected"),
    [
        ("message", "refusal", {"content_index": 0}, {"content": [{"type": "refusal", "refusal": "ab"}]}),
        ("reasoning", "reasoning_text", {"content_index": 0}, {"content": [{"type": "reasoning_text", "text": "ab"}]}),
        ("reasoning", "reasoning_summary_text", {"summary_index": 0},
         {"summary": [{"type": "summary_text", "text": "ab"}]}),
        ("function_call", "function_call_arguments", {}, {"arguments": "ab"}),
        ("mcp_call", "mcp_call_arguments", {}, {"arguments": "ab"}),
        ("custom_tool_call", "custom_tool_call_input", {}, {"input": "ab"}),
        ("code_interpreter_call", "code_interpreter_call_code", {}, {"code": "ab"}),
    ],
)  # fmt: skip
def test_text_in_deltas_is_in_the_field_of_its_item_type(
    item: str, kind: str, numbers: dict[str, int], expected: dict[str, Any]
) -> None:
    [found] = output_after(added(0, item), delta(kind, "a", **numbers), delta(kind, "b", **numbers))
    assert found == {"id": "item_0", "type": item, "status": "incomplete", **expected}


def test_parts_and_items_keep_their_order() -> None:
    found = output_after(
        added(1, "message"),
        added(0, "message"),
        delta("refusal", "c", 1, content_index=1),
        delta("output_text", "b", 1, content_index=0),
        delta("output_text", "a", 0, content_index=0),
    )
    assert [[part.get("text") or part["refusal"] for part in item["content"]] for item in found] == [["a"], ["b", "c"]]


def test_finished_item_is_unchanged() -> None:
    text = {"type": "output_text", "text": "whole", "annotations": [{"type": "url_citation"}]}
    late = delta("output_text", "late", 0, content_index=0)
    ended = done(0, "message", content=[text])
    assert output_after(added(0, "message"), delta("output_text", "wh", 0, content_index=0), ended, late) == [
        ended["item"]
    ]


def test_deltas_of_an_unknown_item_are_left_out() -> None:
    assert output_after(delta("output_text", "x", 0), delta("new", "x", 0), added(1, "x"), delta("new", "x", 1)) == [
        {"id": "item_1", "type": "x", "status": "incomplete"}
    ]


def test_an_item_of_a_type_without_a_status_gets_none() -> None:
    item = {"id": "ctc_1", "type": "custom_tool_call", "name": "run", "call_id": "call_1", "input": ""}
    event = {"type": "response.output_item.added", "output_index": 0, "item": item}
    assert output_after(event, delta("custom_tool_call_input", "ls", 0)) == [{**item, "input": "ls"}]


def test_lone_surrogate_does_not_prevent_the_end_of_a_stream() -> None:
    [found] = output_after(added(0, "message", role="\ud800"), delta("output_text", "a\ud83d", 0, content_index=0))
    assert found["content"][0]["text"] == "a?"


def test_too_long_item_keeps_its_type_and_others_keep_their_text() -> None:
    chunk = "x" * 65_536
    pieces = [delta("output_text", chunk, 0, content_index=0)] * (MAX_KEPT // len(chunk) + 5)
    found = output_after(
        added(0, "message", role="assistant", content=[], other="o" * 999),
        *pieces,
        added(1, "function_call", name="find", call_id="call_1", arguments=""),
        delta("function_call_arguments", "{", 1),
        done(2, "image_generation_call", result="x" * MAX_KEPT),
    )
    assert found == [
        {"id": "item_0", "type": "message", "status": "incomplete", "role": "assistant", "content": []},
        {"id": "item_1", "type": "function_call", "status": "incomplete", "name": "find", "call_id": "call_1",
         "arguments": "{"},
        {"id": "item_2", "type": "image_generation_call", "status": "completed"},
    ]  # fmt: skip


def test_too_large_response_keeps_its_id() -> None:
    [end] = cut_after(created(instructions="x" * (MAX_KEPT + 1), id="resp_9"))
    response = end["response"]
    assert (response["id"], response["created_at"], response["model"]) == ("resp_9", 7, "gpt")
    assert (response["instructions"], response["tools"], response["output"]) == (None, [], [])


def test_deep_nesting_does_not_prevent_the_end_of_a_stream() -> None:
    for depth in range(sys.getrecursionlimit() - 300, sys.getrecursionlimit(), 7):
        nested = b"[" * depth + b"]" * depth
        item = b'{"type":"response.output_item.done","output_index":0,"item":{"type":"x","a":' + nested + b"}}"
        reader = DIALECT.reader(call(), drop_usage=True)
        reader.read(json.dumps(created()).encode())
        reader.read(item)
        assert b'"id":"resp_1"' in reader.cut_short()


def test_an_endless_stream_does_not_fill_the_memory() -> None:
    reader = DIALECT.reader(call(), drop_usage=True)
    reader.read(json.dumps(created()).encode())
    tracemalloc.start()
    try:
        for number in range(5_000):
            reader.read(json.dumps(added(number, "function_call", name="x" * 200, arguments="x" * 2_000)).encode())
            reader.read(json.dumps(delta("output_text", "x" * 50, number % 7, content_index=number)).encode())
            reader.read(json.dumps(delta("function_call_arguments", "x", f"i{number}", item_id=f"i{number}")).encode())
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 4 * MAX_KEPT


def test_the_next_event_has_the_number_after_the_last() -> None:
    meter = StreamMeter(DIALECT.reader(call(), drop_usage=True))
    assert meter.next_number() == 0
    for event in (created(), delta("output_text", "hi")):
        meter.feed(b"data: " + json.dumps({**event, "sequence_number": 41}).encode() + b"\n\n")
    assert meter.next_number() == 42
    meter.feed(b'data: {"type":"response.output_text.delta","sequence_number":43')
    assert meter.next_number() == 42, "what is not whole does not count"


def test_stream_ended_early_reports_the_counted_input() -> None:
    request = DIALECT.read(json.dumps({"model": "m", "input": "word " * 1_000}).encode())

    def shown(input_tokens: int | None) -> Any:
        reader = DIALECT.reader(request, drop_usage=True, input_tokens=input_tokens)
        return json.loads(reader.cut_short().rpartition(b"data: ")[2])["response"]["usage"]["input_tokens"]

    assert shown(321) == 321
    assert shown(None) > 1_000


def test_openai_searches_are_read_from_the_last_event() -> None:
    def event(kind: str, searches: int, usage: object) -> bytes:
        of_tools = {"image_gen": {"total_tokens": 0}, "web_search": {"num_requests": searches}}
        return json.dumps({"type": kind, "response": {"id": "r", "tool_usage": of_tools, "usage": usage}}).encode()

    reader = OpenAIResponses().reader(OpenAIResponses().read(b"{}"), drop_usage=False)
    reader.read(event("response.created", 0, None))
    reader.read(event("response.completed", 2, {"input_tokens": 3, "output_tokens": 4, "total_tokens": 7}))
    found = reader.answer().usage
    assert found is not None
    assert (found.total_tokens, found.searches, found.picture_tokens) == (7, 2, 0)
