"""/v1/messages: requests, whole responses, streams, and streams that are ended early."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from gateway.core.errors import InvalidRequest
from gateway.core.usage import Usage
from gateway.dialects.anthropic_messages import AnthropicMessages
from gateway.dialects.base import Call, EventReader, ParsedResponse, StreamMeter, Verdict
from gateway.dialects.fields import join
from tests.support.nesting import DEEP

DIALECT = AnthropicMessages()


def call(**fields: object) -> Call:
    return DIALECT.read(json.dumps({"model": "asked", "messages": [], "max_tokens": 9, **fields}).encode())


def reader_after(*events: object) -> EventReader:
    reader = DIALECT.reader(call(), drop_usage=True)
    for event in events:
        reader.read(json.dumps(event).encode())
    return reader


def answer_to(*events: object) -> ParsedResponse:
    return reader_after(*events).answer()


def usage_of(answer: ParsedResponse) -> Usage:
    assert answer.usage is not None
    return answer.usage.complete(0, 0)[0]


def start(**usage: object) -> dict[str, Any]:
    return {"type": "message_start", "message": {"model": "claude", "usage": {"output_tokens": 1, **usage}}}


def block(kind: str, index: int = 0, **fields: object) -> dict[str, Any]:
    return {"type": "content_block_start", "index": index, "content_block": {"type": kind, **fields}}


def delta(index: int = 0, **fields: object) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": fields}


def stop(index: int = 0) -> dict[str, Any]:
    return {"type": "content_block_stop", "index": index}


def ended(reason: str, **usage: object) -> dict[str, Any]:
    return {"type": "message_delta", "delta": {"stop_reason": reason}, "usage": usage}


# --- the request ---------------------------------------------------------------------------------------------------------


def test_request_is_read() -> None:
    body = b'{"model":"m","messages":[{"role":"user"}],"stream":true,"x":1}'
    result = DIALECT.read(body)
    assert (result.operation, result.model, result.stream, result.usage_asked) == ("chat", "m", True, True)
    assert result.body is body


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"messages":[]}', "model"),
        (b'{"model":"","messages":[]}', "model"),
        (b'{"model":7,"messages":[]}', "model"),
        (b'{"model":"m"}', "messages"),
        (b'{"model":"m","messages":null}', "messages"),
        (b'{"model":"m","messages":"hi"}', "messages"),
        (b'{"model":"m","messages":[],"stream":1}', "stream"),
        (b'{"model":"m","messages":[],"system":"a","system":"b"}', "system"),
        (b"\xef\xbb\xbf{}", None),
        (b"", None),
    ],
)
def test_invalid_messages_request_is_refused_with_the_field_name(body: bytes, param: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        DIALECT.read(body)
    assert caught.value.param == param


def test_unchanged_request_keeps_its_bytes() -> None:
    result = call(stream=True)
    assert result.with_model("asked", DIALECT.usage_option(result)) is result.body


def test_only_changed_fields_get_new_bytes() -> None:
    result = DIALECT.read(b'{ "system" : [ ],"model":"alias","messages":[ {} ],"max_tokens": 9e0}')
    sent = result.with_model("real", {"max_tokens": 5, "messages": join([b'{"role": "user"}', b"{}"])})
    assert sent == b'{"system":[ ],"model":"real","messages":[{"role": "user"},{}],"max_tokens":5}'


@pytest.mark.parametrize(
    ("fields", "opening"),
    [
        ({"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]}, ["hello"]),
        ({"system": "be brief", "messages": [{"role": "user", "content": "hello"}]}, ["be brief", "hello"]),
        ({"system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}]}, ["s"]),
        ({}, []),
    ],
)
def test_conversation_is_identified_by_system_text_and_first_message(
    fields: dict[str, Any], opening: list[str]
) -> None:
    assert DIALECT.opening(call(**fields)) == opening


def test_every_text_of_a_request_is_counted() -> None:
    result = call(
        system="s", messages=[{"role": "user", "content": "u"}], tools=[{"name": "find"}], metadata={"user_id": "no"}
    )
    assert list(DIALECT.input_text(result)) == ["s", "user", "u", "find"]


# --- whole responses -------------------------------------------------------------------------------------------------


def test_whole_response_is_read() -> None:
    body = {
        "type": "message", "model": "claude", "stop_reason": "tool_use",
        "content": [
            {"type": "compaction", "content": "x" * 40},
            {"type": "thinking", "thinking": "x" * 40, "signature": "x" * 40},
            {"type": "text", "text": "x" * 40},
            {"type": "server_tool_use", "name": "web_search", "input": {"query": "x" * 40}},
            {"type": "web_search_tool_result", "content": [{"encrypted_content": "x" * 4000}]},
            {"type": "tool_use", "name": "find", "input": {"q": "x" * 40}},
        ],
        "usage": {"input_tokens": 10, "cache_read_input_tokens": 5, "output_tokens": 7, "service_tier": "batch"},
    }  # fmt: skip
    result = DIALECT.answer(json.dumps(body).encode())
    assert (result.model, result.finish_reason, result.tools, result.service_tier, result.error) == (
        "claude", "tool_use", ("web_search", "find"), "batch", False,
    )  # fmt: skip
    assert usage_of(result) == Usage(15, 7, 22, 5)
    assert result.output_estimate == 5 * 10 + 4 + 5  # includes the keys and punctuation of the arguments


@pytest.mark.parametrize("body", [b"", b"<html>", b"null", b"[]", b"7", b"\xff\xfe", b"{" * DEEP, b"[" * DEEP, b"{}"])
def test_response_of_another_form_gives_an_empty_result(body: bytes) -> None:
    assert DIALECT.answer(body) == ParsedResponse()


def test_error_with_status_200_is_noted() -> None:
    assert DIALECT.answer(b'{"type":"error","error":{"type":"overloaded_error","message":"x"}}').error


@pytest.mark.parametrize(
    "body",
    [
        {"model": 7, "stop_reason": 7, "usage": 7},
        {"content": 7, "usage": {"service_tier": 7}},
        {"content": [7, None, [], {"type": "tool_use"}, {"type": "tool_use", "name": ""}, {"type": [], "name": "x"}]},
        {"content": [{"type": "text", "text": 7, "thinking": [], "signature": 7, "data": {}}]},
    ],
)
def test_response_with_wrong_types_gives_an_empty_result(body: dict[str, Any]) -> None:
    assert DIALECT.answer(json.dumps(body).encode()) == ParsedResponse()


# --- streams ---------------------------------------------------------------------------------------------------------------


def test_stream_is_read() -> None:
    result = answer_to(
        start(input_tokens=12, service_tier="standard"),
        block("tool_use", name="find", input={}),
        delta(type="text_delta", text="x" * 4),
        delta(type="thinking_delta", thinking="x" * 4),
        delta(type="input_json_delta", partial_json="x" * 4),
        delta(type="compaction_delta", content="x" * 4),
        stop(),
        block("mcp_tool_use", 1, name="ask"),
        ended("end_turn", output_tokens=30),
        {"type": "message_stop"},
    )
    assert usage_of(result) == Usage(12, 30, 42)
    assert (result.model, result.finish_reason, result.tools, result.service_tier, result.output_estimate) == (
        "claude", "end_turn", ("find", "ask"), "standard", 6,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("said", "tier"),
    [
        ({"service_tier": "standard", "speed": "fast"}, "fast"),
        ({"service_tier": "standard", "speed": "standard"}, "standard"),
        ({"service_tier": "standard", "inference_geo": "us"}, "us"),
        ({"service_tier": "standard", "inference_geo": "us", "speed": "fast"}, "fast-us"),
        ({"service_tier": "standard", "inference_geo": "global"}, "standard"),
        ({"service_tier": "standard", "inference_geo": "not_available"}, "standard"),
        # Bought in advance: its tokens have no separate price.
        ({"service_tier": "priority"}, None),
    ],
)
def test_tier_is_the_one_that_decides_the_price(said: dict[str, Any], tier: str | None) -> None:
    whole = DIALECT.answer(json.dumps({"type": "message", "usage": {"output_tokens": 7, **said}}).encode())
    assert whole.service_tier == tier
    assert answer_to(start(input_tokens=12, **said), ended("end_turn", output_tokens=7)).service_tier == tier
    assert answer_to(start(input_tokens=12), ended("end_turn", output_tokens=7, **said)).service_tier == tier
    # A value that the end does not repeat stays valid.
    assert answer_to(start(**said), ended("end_turn", speed=said.get("speed", "standard"))).service_tier == tier
    assert answer_to(start(**said), ended("end_turn", service_tier="standard")).service_tier == tier


def test_broken_stream_has_no_reported_output() -> None:
    result = answer_to(start(input_tokens=12))
    assert result.usage is not None
    assert (result.usage.input_tokens, result.usage.output_tokens) == (12, None)


def test_zeros_from_a_host_that_does_not_know_the_input_yet_are_ignored() -> None:
    zeros = start(input_tokens=0, cache_read_input_tokens=0, cache_creation_input_tokens=0)
    assert answer_to(zeros, delta(type="text_delta", text="hi")).usage is None
    assert usage_of(answer_to(zeros, ended("end_turn", input_tokens=7, output_tokens=2))) == Usage.of(7, 2)


def test_zeros_at_the_end_do_not_replace_the_input_reported_at_the_start() -> None:
    start_event = start(input_tokens=7, cache_read_input_tokens=3)
    for zeros in ({"input_tokens": 0}, {"input_tokens": 0, "cache_read_input_tokens": 0}):
        result = answer_to(start_event, ended("end_turn", **zeros, output_tokens=2))
        assert usage_of(result) == Usage(10, 2, 12, cache_read_tokens=3)
    repeated_usage = ended("end_turn", input_tokens=0, cache_read_input_tokens=10, output_tokens=2)
    assert usage_of(answer_to(start_event, repeated_usage)) == Usage(10, 2, 12, cache_read_tokens=10)


def test_unreadable_thinking_is_estimated_from_its_length() -> None:
    assert answer_to(block("redacted_thinking", data="x" * 800)).output_estimate == 100
    hidden = [block("thinking", thinking="", signature=""), delta(signature="x" * 800)]
    assert answer_to(*hidden).output_estimate == 100
    shown = [block("thinking", thinking=""), delta(thinking="x" * 200), delta(signature="x" * 800)]
    assert answer_to(*shown).output_estimate == 100
    read = [block("thinking", thinking=""), delta(thinking="x" * 800), delta(signature="x" * 800)]
    assert answer_to(*read).output_estimate == 200


CLEARED = {"type": "clear_tool_uses_20250919", "cleared_tool_uses": 3, "cleared_input_tokens": 9_000}


@pytest.mark.parametrize(
    ("said", "weight"),
    [
        ({"context_management": {"applied_edits": [CLEARED]}}, 0),
        ({"context_management": {"applied_edits": []}}, None),
        ({"context_management": {"applied_edits": 7}}, None),
        ({"context_management": None}, None),
        ({"context_management": 7}, None),
        ({}, None),
    ],
)
def test_request_size_is_unknown_if_the_provider_edited_the_conversation(
    said: dict[str, Any], weight: int | None
) -> None:
    usage = {"input_tokens": 400, "output_tokens": 5}
    whole = DIALECT.answer(json.dumps({"usage": usage, **said}).encode())
    streamed = answer_to(start(input_tokens=400), {**ended("end_turn", output_tokens=5), **said})
    for result in (whole, streamed):
        assert result.usage is not None
        assert (result.usage.request_tokens, usage_of(result).input_tokens) == (weight, 400)


def test_request_size_is_unknown_if_the_provider_compacted_the_conversation() -> None:
    compacted = {"type": "compaction", "content": "so far"}
    whole = {"usage": {"input_tokens": 400, "output_tokens": 5}, "content": [compacted]}
    streamed = [start(input_tokens=400), block("compaction"), ended("end_turn", output_tokens=5)]
    for result in (DIALECT.answer(json.dumps(whole).encode()), answer_to(*streamed)):
        assert result.usage is not None
        assert result.usage.request_tokens == 0


def handed_over(category: str | None, model: str, index: int = 0) -> dict[str, Any]:
    trigger = {"type": "refusal", "category": category}
    return block("fallback", index, **{"from": {"model": "claude"}, "to": {"model": model}, "trigger": trigger})


def test_refusal_category_is_read_from_whole_responses_and_streams() -> None:
    details = {"type": "refusal", "category": "cyber"}
    whole = {"stop_reason": "refusal", "stop_details": details}
    streamed = {"type": "message_delta", "delta": whole, "usage": {"output_tokens": 0}}
    for result in (DIALECT.answer(json.dumps(whole).encode()), answer_to(start(), streamed)):
        assert (result.finish_reason, result.refusal) == ("refusal", "cyber")
    for nothing in (
        {},
        {"stop_details": None},
        {"stop_details": {"category": None}},
        {"stop_details": {"category": 7}},
    ):
        assert answer_to({"type": "message_delta", "delta": {"stop_reason": "refusal", **nothing}}).refusal is None


def test_after_a_refusal_the_fallback_model_is_the_model_of_the_response() -> None:
    blocks = [handed_over("bio", "second"), stop(), handed_over(None, "third", 1), stop(1)]
    content = [one["content_block"] for one in blocks if "content_block" in one]
    whole = DIALECT.answer(json.dumps({"model": "third", "content": content}).encode())
    for result in (whole, answer_to(start(), *blocks)):
        assert (result.fallback_refusals, result.model, result.refusal) == (("bio", None), "third", None)
    unread = [block("fallback"), block("fallback", trigger=7, to=7), block("fallback", trigger={}, to={"model": 7})]
    assert answer_to(start(), *unread).fallback_refusals == (None, None, None)
    assert answer_to(start(), *unread).model == "claude"


@pytest.mark.parametrize("event", [{"type": "error"}, {"type": "error", "error": {"message": "x"}}, {"error": "x"}])
def test_error_event_is_noted(event: dict[str, Any]) -> None:
    assert answer_to(start(), event).error


@pytest.mark.parametrize(
    "event",
    [
        {"type": "message_start"}, {"type": "message_start", "message": 7}, {"type": "message_delta", "delta": 7},
        {"type": "message_delta", "delta": {"stop_reason": 7}, "usage": []}, {"type": "content_block_start"},
        {"type": "content_block_start", "index": [], "content_block": "x"}, {"type": "content_block_delta"},
        {"type": "content_block_delta", "delta": {"text": 7, "signature": 7}}, {"type": "content_block_stop", "index": {}},
        {"type": ["message_stop"]}, {"type": "ping"}, {}, [], 7,
    ],
)  # fmt: skip
def test_event_with_wrong_types_is_ignored(event: object) -> None:
    reader = DIALECT.reader(call(), drop_usage=True)
    assert reader.read(json.dumps(event).encode()) is Verdict.PASS
    assert reader.answer() == ParsedResponse()
    assert reader.cut_short().endswith(b'{"type":"message_stop"}\n\n')


@pytest.mark.parametrize("data", [b"[DONE]", b'{"type":"message_stop"}'])
def test_end_mark_is_the_last_event(data: bytes) -> None:
    assert DIALECT.reader(call(), drop_usage=True).read(data) is Verdict.LAST


DELTA = b'event: d\ndata: {"type":"content_block_delta","delta":{"text":"hi"}}\n\n'
STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'


@pytest.mark.parametrize(
    ("region", "plain"),
    [
        (DELTA, len(DELTA)),
        (DELTA * 3, len(DELTA) * 3),
        (DELTA + STOP, len(DELTA)),
        (DELTA + b"data: [DONE]\n\n" + DELTA + STOP, len(DELTA)),
        (DELTA + STOP + b"data: [DONE]\n\n", len(DELTA)),
        (DELTA + b"data: {", len(DELTA)),
        (STOP + DELTA, 0),
        (DELTA.replace(b"\n", b"\r\n"), 0),
        (b"data: {", 0),
        (b"", 0),
    ],
)
def test_only_events_before_a_possible_end_mark_may_be_read_later(region: bytes, plain: int) -> None:
    assert DIALECT.reader(call(), drop_usage=True).plain_prefix(region) == plain


def test_endless_tool_calls_do_not_fill_the_memory() -> None:
    reader = DIALECT.reader(call(), drop_usage=True)
    tracemalloc.start()
    try:
        for number in range(10_000):
            reader.read(json.dumps(block("tool_use", number, name="x" * 200)).encode())
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 2**20
    assert len(reader.answer().tools) == 256


# --- ended early -----------------------------------------------------------------------------------------------------------


def cut_after(*events: object) -> list[Any]:
    meter = StreamMeter(DIALECT.reader(call(), drop_usage=True))
    for event in events:
        meter.feed(b"data: " + json.dumps(event).encode() + b"\n\n")
    blocks = meter.end_at_limit().decode().removesuffix("\n\n").split("\n\n")
    result = [json.loads(block.partition("\ndata: ")[2]) for block in blocks]
    assert [f"event: {event['type']}" for event in result] == [block.partition("\n")[0] for block in blocks]
    assert meter.response().finish_reason == next(
        (event["delta"]["stop_reason"] for event in result if event["type"] == "message_delta"),
        meter.response().finish_reason,
    )
    return result


@pytest.mark.parametrize("arguments", [{"order_id": 7, "notify": True, "lines": [1.5, None, {"a": "b"}]}, {}])
def test_tool_call_has_the_same_estimate_whole_and_streamed(arguments: dict[str, Any]) -> None:
    whole = {"type": "message", "content": [{"type": "tool_use", "id": "t", "name": "find", "input": arguments}]}
    written = json.dumps(arguments, separators=(",", ":")) if arguments else ""
    streamed = answer_to(
        start(), block("tool_use", id="t", name="find", input={}), delta(type="input_json_delta", partial_json=written)
    )
    assert DIALECT.answer(json.dumps(whole).encode()).output_estimate == streamed.output_estimate > 0


def test_stream_ended_early_closes_its_open_block_and_reports_usage() -> None:
    events = [start(input_tokens=5), block("text"), stop(), block("text", 1), delta(1, text="x" * 40)]
    assert cut_after(*events) == [
        {"type": "content_block_stop", "index": 1},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "max_tokens", "stop_sequence": None},
            "usage": {"output_tokens": 10},
        },
        {"type": "message_stop"},
    ]


def test_stream_ended_early_repeats_the_usage_of_its_host() -> None:
    running = {"type": "message_delta", "delta": {}, "usage": {"output_tokens": 33}}
    assert cut_after(start(), running)[0]["usage"] == {"output_tokens": 33}


def test_stream_ended_early_keeps_a_received_stop_reason() -> None:
    assert cut_after(start(), ended("end_turn", output_tokens=3)) == [{"type": "message_stop"}]


def test_stream_ended_before_its_start_has_a_start_and_an_end() -> None:
    start_event, reason, last = cut_after({"type": "ping"})
    assert (start_event["type"], start_event["message"]["model"], start_event["message"]["content"]) == (
        "message_start",
        "asked",
        [],
    )
    assert (reason["type"], last["type"]) == ("message_delta", "message_stop")
