"""/v1/messages: the request as read and written, the answer as read, a stream ended early."""

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


def test_a_call_is_read_as_far_as_it_matters() -> None:
    body = b'{"model":"m","messages":[{"role":"user"}],"stream":true,"x":1}'
    found = DIALECT.read(body)
    assert (found.operation, found.model, found.stream, found.usage_asked) == ("chat", "m", True, True)
    assert found.body is body


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
def test_a_body_that_is_no_messages_call_is_refused_and_the_field_named(body: bytes, param: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        DIALECT.read(body)
    assert caught.value.param == param


def test_a_call_that_needs_no_change_keeps_its_bytes() -> None:
    found = call(stream=True)
    assert found.written("asked", DIALECT.usage_option(found)) is found.body


def test_what_is_changed_is_changed_and_every_other_byte_kept() -> None:
    found = DIALECT.read(b'{ "system" : [ ],"model":"alias","messages":[ {} ],"max_tokens": 9e0}')
    sent = found.written("real", {"max_tokens": 5, "messages": join([b'{"role": "user"}', b"{}"])})
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
def test_a_conversation_is_known_by_its_system_text_and_first_message(
    fields: dict[str, Any], opening: list[str]
) -> None:
    assert DIALECT.opening(call(**fields)) == opening


def test_every_text_of_a_request_weighs() -> None:
    found = call(
        system="s", messages=[{"role": "user", "content": "u"}], tools=[{"name": "find"}], metadata={"user_id": "no"}
    )
    assert list(DIALECT.input_text(found)) == ["s", "user", "u", "find"]


# --- whole answers ---------------------------------------------------------------------------------------------------------


def test_a_whole_answer_is_read() -> None:
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
    found = DIALECT.answer(json.dumps(body).encode())
    assert (found.model, found.finish_reason, found.tools, found.service_tier, found.error) == (
        "claude", "tool_use", ("web_search", "find"), "batch", False,
    )  # fmt: skip
    assert usage_of(found) == Usage(15, 7, 22, 5)
    assert found.output_estimate == 5 * 10 + 4 + 5  # the keys and signs of the arguments, too


@pytest.mark.parametrize("body", [b"", b"<html>", b"null", b"[]", b"7", b"\xff\xfe", b"{" * DEEP, b"[" * DEEP, b"{}"])
def test_an_answer_of_any_other_shape_is_read_as_nothing(body: bytes) -> None:
    assert DIALECT.answer(body) == ParsedResponse()


def test_an_error_with_a_good_status_is_noted() -> None:
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
def test_an_answer_of_the_wrong_types_is_read_as_nothing(body: dict[str, Any]) -> None:
    assert DIALECT.answer(json.dumps(body).encode()) == ParsedResponse()


# --- streams ---------------------------------------------------------------------------------------------------------------


def test_a_stream_is_read() -> None:
    found = answer_to(
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
    assert usage_of(found) == Usage(12, 30, 42)
    assert (found.model, found.finish_reason, found.tools, found.service_tier, found.output_estimate) == (
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
        # Bought beforehand: its tokens have no price of their own.
        ({"service_tier": "priority"}, None),
    ],
)
def test_a_tier_is_what_the_price_depends_on(said: dict[str, Any], tier: str | None) -> None:
    whole = DIALECT.answer(json.dumps({"type": "message", "usage": {"output_tokens": 7, **said}}).encode())
    assert whole.service_tier == tier
    assert answer_to(start(input_tokens=12, **said), ended("end_turn", output_tokens=7)).service_tier == tier
    assert answer_to(start(input_tokens=12), ended("end_turn", output_tokens=7, **said)).service_tier == tier
    # What the end does not say again still holds.
    assert answer_to(start(**said), ended("end_turn", speed=said.get("speed", "standard"))).service_tier == tier
    assert answer_to(start(**said), ended("end_turn", service_tier="standard")).service_tier == tier


def test_a_stream_that_broke_off_has_no_output_reported() -> None:
    found = answer_to(start(input_tokens=12))
    assert found.usage is not None
    assert (found.usage.input_tokens, found.usage.output_tokens) == (12, None)


def test_zeros_of_a_host_that_does_not_know_the_input_yet_are_no_input() -> None:
    zeros = start(input_tokens=0, cache_read_input_tokens=0, cache_creation_input_tokens=0)
    assert answer_to(zeros, delta(type="text_delta", text="hi")).usage is None
    assert usage_of(answer_to(zeros, ended("end_turn", input_tokens=7, output_tokens=2))) == Usage.of(7, 2)


def test_zeros_at_the_end_take_nothing_from_the_input_that_was_said_at_the_start() -> None:
    begun = start(input_tokens=7, cache_read_input_tokens=3)
    for zeros in ({"input_tokens": 0}, {"input_tokens": 0, "cache_read_input_tokens": 0}):
        found = answer_to(begun, ended("end_turn", **zeros, output_tokens=2))
        assert usage_of(found) == Usage(10, 2, 12, cache_read_tokens=3)
    told_anew = ended("end_turn", input_tokens=0, cache_read_input_tokens=10, output_tokens=2)
    assert usage_of(answer_to(begun, told_anew)) == Usage(10, 2, 12, cache_read_tokens=10)


def test_thinking_that_nobody_can_read_weighs_by_its_length() -> None:
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
def test_a_conversation_that_its_provider_edited_tells_nothing_of_the_size_of_the_request(
    said: dict[str, Any], weight: int | None
) -> None:
    usage = {"input_tokens": 400, "output_tokens": 5}
    whole = DIALECT.answer(json.dumps({"usage": usage, **said}).encode())
    streamed = answer_to(start(input_tokens=400), {**ended("end_turn", output_tokens=5), **said})
    for found in (whole, streamed):
        assert found.usage is not None
        assert (found.usage.request_tokens, usage_of(found).input_tokens) == (weight, 400)


def test_a_conversation_that_its_provider_compacted_tells_nothing_of_the_size_of_the_request() -> None:
    compacted = {"type": "compaction", "content": "so far"}
    whole = {"usage": {"input_tokens": 400, "output_tokens": 5}, "content": [compacted]}
    streamed = [start(input_tokens=400), block("compaction"), ended("end_turn", output_tokens=5)]
    for found in (DIALECT.answer(json.dumps(whole).encode()), answer_to(*streamed)):
        assert found.usage is not None
        assert found.usage.request_tokens == 0


def handed_over(category: str | None, model: str, index: int = 0) -> dict[str, Any]:
    trigger = {"type": "refusal", "category": category}
    return block("fallback", index, **{"from": {"model": "claude"}, "to": {"model": model}, "trigger": trigger})


def test_why_a_model_refused_is_read_whole_and_in_a_stream() -> None:
    details = {"type": "refusal", "category": "cyber"}
    whole = {"stop_reason": "refusal", "stop_details": details}
    streamed = {"type": "message_delta", "delta": whole, "usage": {"output_tokens": 0}}
    for found in (DIALECT.answer(json.dumps(whole).encode()), answer_to(start(), streamed)):
        assert (found.finish_reason, found.refusal) == ("refusal", "cyber")
    for nothing in (
        {},
        {"stop_details": None},
        {"stop_details": {"category": None}},
        {"stop_details": {"category": 7}},
    ):
        assert answer_to({"type": "message_delta", "delta": {"stop_reason": "refusal", **nothing}}).refusal is None


def test_where_a_model_refused_and_another_one_goes_on_it_is_that_one_that_answers() -> None:
    blocks = [handed_over("bio", "second"), stop(), handed_over(None, "third", 1), stop(1)]
    content = [one["content_block"] for one in blocks if "content_block" in one]
    whole = DIALECT.answer(json.dumps({"model": "third", "content": content}).encode())
    for found in (whole, answer_to(start(), *blocks)):
        assert (found.declined, found.model, found.refusal) == (("bio", None), "third", None)
    unread = [block("fallback"), block("fallback", trigger=7, to=7), block("fallback", trigger={}, to={"model": 7})]
    assert answer_to(start(), *unread).declined == (None, None, None)
    assert answer_to(start(), *unread).model == "claude"


@pytest.mark.parametrize("event", [{"type": "error"}, {"type": "error", "error": {"message": "x"}}, {"error": "x"}])
def test_an_error_event_is_noted(event: dict[str, Any]) -> None:
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
def test_an_event_of_the_wrong_types_is_read_as_nothing(event: object) -> None:
    reader = DIALECT.reader(call(), drop_usage=True)
    assert reader.read(json.dumps(event).encode()) is Verdict.PASS
    assert reader.answer() == ParsedResponse()
    assert reader.cut_short().endswith(b'{"type":"message_stop"}\n\n')


@pytest.mark.parametrize("data", [b"[DONE]", b'{"type":"message_stop"}'])
def test_the_end_is_the_last_event(data: bytes) -> None:
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
def test_only_events_before_anything_like_an_end_may_wait_to_be_read(region: bytes, plain: int) -> None:
    assert DIALECT.reader(call(), drop_usage=True).plain_prefix(region) == plain


def test_an_endless_stream_of_tool_calls_does_not_fill_the_memory() -> None:
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
    blocks = meter.cut_short().decode().removesuffix("\n\n").split("\n\n")
    found = [json.loads(block.partition("\ndata: ")[2]) for block in blocks]
    assert [f"event: {event['type']}" for event in found] == [block.partition("\n")[0] for block in blocks]
    assert meter.answer().finish_reason == next(
        (event["delta"]["stop_reason"] for event in found if event["type"] == "message_delta"),
        meter.answer().finish_reason,
    )
    return found


@pytest.mark.parametrize("arguments", [{"order_id": 7, "notify": True, "lines": [1.5, None, {"a": "b"}]}, {}])
def test_a_call_weighs_the_same_whole_and_in_a_stream(arguments: dict[str, Any]) -> None:
    whole = {"type": "message", "content": [{"type": "tool_use", "id": "t", "name": "find", "input": arguments}]}
    written = json.dumps(arguments, separators=(",", ":")) if arguments else ""
    streamed = answer_to(
        start(), block("tool_use", id="t", name="find", input={}), delta(type="input_json_delta", partial_json=written)
    )
    assert DIALECT.answer(json.dumps(whole).encode()).output_estimate == streamed.output_estimate > 0


def test_a_stream_that_is_cut_short_ends_its_open_block_and_says_what_it_used() -> None:
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


def test_a_stream_that_is_cut_short_repeats_what_its_host_said_it_used() -> None:
    running = {"type": "message_delta", "delta": {}, "usage": {"output_tokens": 33}}
    assert cut_after(start(), running)[0]["usage"] == {"output_tokens": 33}


def test_a_stream_that_is_cut_short_after_its_reason_came_keeps_it() -> None:
    assert cut_after(start(), ended("end_turn", output_tokens=3)) == [{"type": "message_stop"}]


def test_a_stream_that_is_cut_short_before_it_began_begins_and_ends() -> None:
    begun, reason, last = cut_after({"type": "ping"})
    assert (begun["type"], begun["message"]["model"], begun["message"]["content"]) == ("message_start", "asked", [])
    assert (reason["type"], last["type"]) == ("message_delta", "message_stop")
