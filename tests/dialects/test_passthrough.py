"""Paths without a dialect of their own: bytes untouched, usage found wherever the known APIs put it."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from gateway.core.usage import Usage
from gateway.dialects.base import Answer, Verdict
from gateway.dialects.passthrough import PassThrough, PassThroughReader

DIALECT = PassThrough("chat")
DEEP = 200_000
MULTIPART = b'--x\r\ncontent-disposition: form-data; name="model"\r\n\r\nwhisper-1\r\n--x--'


def answer_to(*events: object) -> Answer:
    reader = PassThroughReader()
    for event in events:
        reader.read(event if isinstance(event, bytes) else json.dumps(event).encode())
    return reader.answer()


def usage_of(answer: Answer) -> Usage:
    assert answer.usage is not None
    return answer.usage.complete(0, 0)[0]


def test_a_json_body_is_read_for_its_model_and_stream() -> None:
    call = PassThrough("embeddings").read(b' {"model":"m","stream":true,"input":"x"}')
    assert (call.operation, call.model, call.stream, call.usage_asked) == ("embeddings", "m", True, True)
    assert list(call.fields) == ["model", "stream", "input"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        MULTIPART,
        b"\x00\xff",
        b"[]",
        b"\xef\xbb\xbf{}",
        b'{"model":7}',
        b'{"stream":"yes"}',
        b'{"model":"a","model":"b"}',
        b'{"model":',
        b'{"a":' + b"[" * DEEP,
    ],
    ids=lambda body: repr(body[:20]),
)
def test_a_body_that_cannot_be_read_is_forwarded_as_it_came(body: bytes) -> None:
    call = DIALECT.read(body)
    assert (call.model, call.stream, dict(call.fields)) == (None, False, {})
    assert DIALECT.write(call, "other", ask_usage=True) is body


def test_a_call_keeps_its_bytes_unless_a_route_renames_the_model() -> None:
    call = DIALECT.read(b'{"input": [ 1 ],"model":"alias"}')
    assert DIALECT.write(call, "alias", ask_usage=True) is call.body
    assert DIALECT.write(call, "real", ask_usage=True) == b'{"input":[ 1 ],"model":"real"}'


@pytest.mark.parametrize("operation", ["embeddings", "text_completion", "images"])
def test_nothing_is_known_of_how_other_calls_open(operation: str) -> None:
    assert PassThrough(operation).opening(PassThrough(operation).read(b'{"input":"x"}')) is None


@pytest.mark.parametrize(
    ("body", "opening"),
    [
        ({"input": "hello"}, ["hello"]),
        ({"instructions": "be brief", "input": [{"role": "user", "content": "hello"}]}, ["be brief", "hello"]),
        (
            {
                "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
                "messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}],
            },
            ["be brief", "hello"],
        ),
        ({"model": "m"}, []),
    ],
)
def test_a_conversation_in_another_format_is_known_by_how_it_opens(body: dict[str, Any], opening: list[str]) -> None:
    assert DIALECT.opening(DIALECT.read(json.dumps(body).encode())) == opening


def test_prompt_text_is_found_under_the_names_of_every_known_api() -> None:
    fields = {name: name.upper() for name in ("messages", "input", "prompt", "system", "instructions", "tools")}
    call = DIALECT.read(json.dumps({**fields, "metadata": "no", "user": "no"}).encode())
    assert sorted(DIALECT.input_text(call)) == sorted(fields.values())


def test_a_request_without_prompt_text_weighs_nothing() -> None:
    assert list(DIALECT.input_text(DIALECT.read(b'{"model":"m","input":"x"}'))) == ["x"]
    assert list(DIALECT.input_text(DIALECT.read(MULTIPART))) == []


# --- whole answers -------------------------------------------------------------------------------------------------------------


def test_a_responses_answer_is_read() -> None:
    body = {
        "object": "response", "status": "completed", "model": "gpt-5", "service_tier": "flex", "error": None,
        "output": [
            {"type": "message", "content": [{"type": "output_text", "text": "x" * 400}]},
            {"type": "function_call", "name": "find", "arguments": "{}"},
        ],
        "usage": {"input_tokens": 10, "output_tokens": 5, "total_tokens": 15},
    }  # fmt: skip
    found = DIALECT.answer(json.dumps(body).encode())
    assert (found.model, found.finish_reason, found.service_tier, found.tools, found.error) == (
        "gpt-5", "completed", "flex", ("find",), False,
    )  # fmt: skip
    assert usage_of(found) == Usage(10, 5, 15)
    assert found.output_estimate >= 100


def test_a_messages_answer_is_read() -> None:
    body = {
        "type": "message", "model": "claude", "stop_reason": "tool_use",
        "content": [{"type": "text", "text": "x" * 40}, {"type": "tool_use", "name": "find", "input": {"q": "x"}}],
        "usage": {"input_tokens": 10, "cache_read_input_tokens": 5, "output_tokens": 7},
    }  # fmt: skip
    found = DIALECT.answer(json.dumps(body).encode())
    assert (found.model, found.finish_reason, found.tools) == ("claude", "tool_use", ("find",))
    assert usage_of(found) == Usage(15, 7, 22, 5)


def test_a_completions_answer_is_read() -> None:
    body = {"choices": [{"text": "x" * 40, "finish_reason": "stop"}, 7], "model": "davinci"}
    found = DIALECT.answer(json.dumps(body).encode())
    assert (found.finish_reason, found.output_estimate, found.usage) == ("stop", 10, None)


def test_an_embeddings_answer_is_read() -> None:
    body = {"data": [{"embedding": [0.1]}], "model": "e", "usage": {"prompt_tokens": 8, "total_tokens": 8}}
    assert usage_of(DIALECT.answer(json.dumps(body).encode())) == Usage(8, 0, 8)


@pytest.mark.parametrize("body", [b"", b"<html>", b"null", b"[]", b"7", b"\xff\xfe", b"{" * DEEP, b"[" * DEEP, b"{}"])
def test_an_answer_of_any_other_shape_is_read_as_nothing(body: bytes) -> None:
    assert DIALECT.answer(body) == Answer()


@pytest.mark.parametrize(
    "body",
    [
        {"model": 7, "stop_reason": 7, "status": [], "service_tier": {}, "usage": 7},
        {"choices": 7},
        {"choices": [{"text": 7, "finish_reason": []}]},
        {"delta": 7, "content": 7, "output": {"a": 1}},
        {"delta": {"text": 7, "thinking": None, "stop_reason": 7}},
        {"content": [7, None, {"type": "tool_use"}, {"type": "tool_use", "name": ""}, {"type": [], "name": "x"}]},
        {"content_block": {"type": "tool_use", "name": 7}},
        {"content_block": "x", "item": 7, "response": 7, "message": [], "x_groq": None},
        {"type": ["response.completed"], "model": ""},
        {"type": "response.output_item.done", "item": "x"},
    ],
)
def test_an_answer_of_the_wrong_types_is_read_as_nothing(body: dict[str, Any]) -> None:
    found = DIALECT.answer(json.dumps(body).encode())
    assert (found.model, found.finish_reason, found.service_tier, found.tools, found.usage) == (
        None,
        None,
        None,
        (),
        None,
    )


# --- streams ---------------------------------------------------------------------------------------------------------------------


def test_a_messages_stream_is_read() -> None:
    found = answer_to(
        {"type": "message_start", "message": {"model": "claude", "usage": {"input_tokens": 12, "output_tokens": 1}}},
        {"type": "content_block_start", "content_block": {"type": "tool_use", "name": "find"}},
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "x" * 4}},
        {"type": "content_block_delta", "delta": {"type": "thinking_delta", "thinking": "x" * 4}},
        {"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": "x" * 4}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 30}},
        {"type": "message_stop"},
    )
    assert usage_of(found) == Usage(12, 30, 42)
    assert (found.model, found.finish_reason, found.tools, found.output_estimate) == (
        "claude",
        "end_turn",
        ("find",),
        4,
    )


def test_a_messages_stream_that_broke_off_has_no_output_reported() -> None:
    found = answer_to({"type": "message_start", "message": {"usage": {"input_tokens": 12, "output_tokens": 1}}})
    assert found.usage is not None
    assert (found.usage.input_tokens, found.usage.output_tokens) == (12, None)


def test_a_responses_stream_is_read() -> None:
    found = answer_to(
        {"type": "response.created", "response": {"model": "gpt-5", "status": "in_progress", "usage": None}},
        {"type": "response.output_text.delta", "delta": "x" * 8},
        {"type": "response.output_item.done", "item": {"type": "function_call", "name": "find"}},
        {"type": "response.output_item.done", "item": {"type": "message"}},
        {
            "type": "response.completed",
            "response": {
                "status": "completed",
                "service_tier": "default",
                "output": [{"type": "function_call", "name": "find"}],
                "usage": {"input_tokens": 3, "output_tokens": 4, "total_tokens": 7},
            },
        },
    )
    assert usage_of(found) == Usage(3, 4, 7)
    assert (found.model, found.finish_reason, found.service_tier, found.tools, found.output_estimate) == (
        "gpt-5", "completed", "default", ("find",), 3,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("data", "verdict"),
    [
        (b"[DONE]", Verdict.LAST),
        (b'{"type":"message_stop"}', Verdict.LAST),
        (b'{"type":"response.completed","response":{}}', Verdict.LAST),
        (b'{"type":"response.incomplete"}', Verdict.LAST),
        (b'{"type":"response.failed"}', Verdict.LAST),
        (b'{"type":"message_delta"}', Verdict.PASS),
        (b'{"type":["message_stop"]}', Verdict.PASS),
        (b'{"usage":{"input_tokens":1}}', Verdict.PASS),
        (b"not json", Verdict.PASS),
        (b"[]", Verdict.PASS),
    ],
)
def test_an_event_is_the_last_one_or_passes(data: bytes, verdict: Verdict) -> None:
    reader = DIALECT.reader(DIALECT.read(b"{}"), drop_usage=True)
    assert reader.read(data) is verdict


@pytest.mark.parametrize("event", [{"error": {"message": "x"}}, {"type": "error", "error": "x"}])
def test_an_error_event_is_noted(event: dict[str, Any]) -> None:
    assert answer_to(event).error


DELTA = b'event: d\ndata: {"type":"content_block_delta","delta":{"text":"hi"}}\n\n'
STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'


@pytest.mark.parametrize(
    ("region", "plain"),
    [
        (DELTA, len(DELTA)),
        (DELTA * 3, len(DELTA) * 3),
        (DELTA + STOP, len(DELTA)),
        (DELTA + b"data: {", len(DELTA)),
        (DELTA + b"data: [DONE]\n\n", len(DELTA)),
        (STOP + DELTA, 0),
        (DELTA.replace(b"\n", b"\r\n"), 0),
        (b"data: {", 0),
        (b"", 0),
    ],
)
def test_only_events_before_anything_like_an_end_may_wait_to_be_read(region: bytes, plain: int) -> None:
    assert PassThroughReader().plain_prefix(region) == plain


def test_an_endless_stream_of_tool_calls_does_not_fill_the_memory() -> None:
    reader = PassThroughReader()
    event = json.dumps({"content_block": {"type": "tool_use", "name": "x" * 200}}).encode()
    tracemalloc.start()
    try:
        for _ in range(10_000):
            reader.read(event)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 2**20
