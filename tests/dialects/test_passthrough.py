"""Paths without their own dialect: bytes stay unchanged, and usage is found where the known APIs put it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.core.errors import InvalidRequest
from gateway.core.usage import Usage
from gateway.dialects.base import ParsedResponse, Verdict
from gateway.dialects.passthrough import PassThrough, PassThroughReader
from tests.support.nesting import DEEP

DIALECT = PassThrough("rerank")
MULTIPART = b'--x\r\ncontent-disposition: form-data; name="model"\r\n\r\nwhisper-1\r\n--x--'


def answer_to(*events: object) -> ParsedResponse:
    reader = PassThroughReader()
    for event in events:
        reader.read(event if isinstance(event, bytes) else json.dumps(event).encode())
    return reader.answer()


def usage_of(answer: ParsedResponse) -> Usage:
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
        b'{"model":"m","max_tokens":[' + b"{}," * 40_000 + b"0]}",
    ],
    ids=lambda body: repr(body[:20]),
)
def test_unreadable_body_is_forwarded_unchanged(body: bytes) -> None:
    call = DIALECT.read(body)
    assert (call.model, call.stream, dict(call.fields)) == (None, False, {})
    assert call.with_model("other", DIALECT.usage_option(call)) is body


def test_a_call_keeps_its_bytes_unless_a_route_renames_the_model() -> None:
    call = DIALECT.read(b'{"input": [ 1 ],"model":"alias"}')
    assert call.with_model("alias", DIALECT.usage_option(call)) is call.body
    assert call.with_model("real", DIALECT.usage_option(call)) == b'{"input":[ 1 ],"model":"real"}'


def test_unreadable_body_is_refused_on_a_counted_path() -> None:
    for body in (b"", MULTIPART, b"[]", b'{"model":7}', b'{"stream":"yes"}', b"\xef\xbb\xbf{}"):
        with pytest.raises(InvalidRequest):
            PassThrough("embeddings", is_read=True).read(body)


def test_a_limit_is_set_and_every_other_byte_kept() -> None:
    call = DIALECT.read(b'{"input": [ 1 ],"model":"m"}')
    assert call.with_model("m", {"n": 1}) == b'{"input":[ 1 ],"model":"m","n":1}'


def test_other_requests_identify_no_conversation() -> None:
    assert DIALECT.opening(DIALECT.read(b'{"messages":[{"role":"user","content":"x"}]}')) is None


def test_prompt_text_is_found_under_the_names_of_every_known_api() -> None:
    fields = {name: name.upper() for name in ("messages", "input", "prompt", "system", "instructions", "tools")}
    call = DIALECT.read(json.dumps({**fields, "metadata": "no", "user": "no"}).encode())
    assert sorted(DIALECT.input_text(call)) == sorted(fields.values())


LONG = "word " * 200


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "x", "suffix": LONG},
        {"text_1": "x", "text_2": [LONG]},
        {"inputs": [LONG]},
        {"grader": {"input": [{"role": "user", "content": LONG}]}},
        {"schema": {LONG: 1}},
        {"prompt": "data: " + LONG},
        {"x": "data:text/plain," + LONG},
        {"x": "word" * 200 + " " + "word" * 200},
    ],
)
def test_text_is_found_in_unknown_fields(body: dict[str, Any]) -> None:
    call = DIALECT.read(json.dumps({"model": "m", **body}).encode())
    assert sum(map(len, DIALECT.input_text(call))) >= len(LONG)


@pytest.mark.parametrize(
    "body",
    [
        {"encoding_format": "float", "voice": "alloy", "size": "1024x1024"},
        {"model": LONG, "metadata": {"a": LONG}, "user": LONG, "stop": LONG, "logit_bias": {LONG: 1}},
        {"image": "data:image/png;base64," + "QUJD" * 1_000},
        {"input_audio": {"data": "QUJD" * 1_000}},
        {"input_audio": {"data": "QUJD\n" * 1_000 + "QQ=="}},
    ],
)
def test_switches_and_labels_are_hardly_counted(body: dict[str, Any]) -> None:
    call = DIALECT.read(json.dumps({"model": "m", **body}).encode())
    assert sum(map(len, DIALECT.input_text(call))) <= 20


def test_request_without_prompt_text_counts_zero() -> None:
    assert list(DIALECT.input_text(DIALECT.read(b'{"model":"m","input":"x"}'))) == ["x"]
    assert list(DIALECT.input_text(DIALECT.read(MULTIPART))) == []


# --- whole responses --------------------------------------------------------------------------------------------------


def test_embeddings_response_is_read() -> None:
    body = {"data": [{"embedding": [0.1]}], "model": "e", "usage": {"prompt_tokens": 8, "total_tokens": 8}}
    assert usage_of(DIALECT.answer(json.dumps(body).encode())) == Usage(8, 0, 8)


@pytest.mark.parametrize("body", [b"", b"<html>", b"null", b"[]", b"7", b"\xff\xfe", b"{" * DEEP, b"[" * DEEP, b"{}"])
def test_response_of_another_form_gives_an_empty_result(body: bytes) -> None:
    assert DIALECT.answer(body) == ParsedResponse()


@pytest.mark.parametrize("place", ["response", "message", "x_groq"])
def test_usage_is_found_wherever_the_known_apis_put_it(place: str) -> None:
    inner = {"model": "m", "service_tier": "flex", "usage": {"input_tokens": 3, "output_tokens": 4}}
    result = answer_to({place: inner})
    assert (usage_of(result), result.model, result.service_tier) == (Usage(3, 4, 7), "m", "flex")


@pytest.mark.parametrize(
    "body",
    [
        {"model": 7, "service_tier": {}, "usage": 7},
        {"choices": 7},
        {"choices": [7, {"text": 7, "delta": 7}]},
        {"delta": 7},
        {"delta": {"text": 7, "thinking": None}},
        {"response": 7, "message": [], "x_groq": None},
        {"type": ["message_start"], "model": ""},
    ],
)
def test_response_with_wrong_types_gives_an_empty_result(body: dict[str, Any]) -> None:
    assert DIALECT.answer(json.dumps(body).encode()) == ParsedResponse()


@pytest.mark.parametrize(
    "body",
    [
        {"choices": [{"message": {"role": "assistant", "content": "x" * 400}}]},
        {"choices": [{"text": "x" * 400}]},
        {"type": "message", "content": [{"type": "text", "text": "x" * 400}]},
        {"object": "response", "output": [{"content": [{"text": "x" * 400}]}]},
    ],
)
def test_text_of_a_whole_response_is_counted_on_any_path(body: dict[str, Any]) -> None:
    assert 100 <= DIALECT.answer(json.dumps(body).encode()).output_estimate <= 101


# --- streams ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "event",
    [
        {"choices": [{"delta": {"content": "x" * 8}}]},
        {"choices": [{"text": "x" * 8}]},
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "x" * 8}},
        {"type": "content_block_delta", "delta": {"type": "thinking_delta", "thinking": "x" * 8}},
        {"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": "x" * 8}},
        {"type": "response.output_text.delta", "delta": "x" * 8},
    ],
)
def test_streamed_text_is_counted_on_any_path(event: dict[str, Any]) -> None:
    assert answer_to(event).output_estimate == 2


def test_broken_messages_stream_has_no_reported_output_on_any_path() -> None:
    result = answer_to({"type": "message_start", "message": {"usage": {"input_tokens": 12, "output_tokens": 1}}})
    assert result.usage is not None
    assert (result.usage.input_tokens, result.usage.output_tokens) == (12, None)


@pytest.mark.parametrize(
    ("data", "verdict"),
    [
        (b"[DONE]", Verdict.LAST),
        (b'{"type":"message_stop"}', Verdict.PASS),
        (b'{"usage":{"input_tokens":1}}', Verdict.PASS),
        (b"not json", Verdict.PASS),
        (b"[]", Verdict.PASS),
    ],
)
def test_an_event_is_the_end_mark_or_passes(data: bytes, verdict: Verdict) -> None:
    reader = DIALECT.reader(DIALECT.read(b"{}"), drop_usage=True)
    assert reader.read(data) is verdict


def test_unknown_stream_is_never_ended_early() -> None:
    assert PassThroughReader().cut_short() == b""


@pytest.mark.parametrize("event", [{"error": {"message": "x"}}, {"type": "error", "error": "x"}])
def test_an_error_event_is_noted(event: dict[str, Any]) -> None:
    assert answer_to(event).error


@pytest.mark.parametrize("error", [{}, {"code": None, "message": None, "param": None}, "", False])
def test_empty_error_is_ignored(error: object) -> None:
    assert not answer_to({"error": error}).error


def test_usage_of_a_choice_is_read() -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 2}
    reported = PassThrough("x").answer(json.dumps({"choices": [{"delta": {}, "usage": usage}]}).encode()).usage
    assert reported is not None
    assert (reported.input_tokens, reported.output_tokens) == (5, 2)


DELTA = b'event: d\ndata: {"type":"content_block_delta","delta":{"text":"hi"}}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("region", "plain"),
    [
        (DELTA, len(DELTA)),
        (DELTA * 3, len(DELTA) * 3),
        (DELTA + b"data: {", len(DELTA)),
        (DELTA + DONE, len(DELTA)),
        (DONE + DELTA, 0),
        (DELTA.replace(b"\n", b"\r\n"), 0),
        (b"data: {", 0),
        (b"", 0),
    ],
)
def test_only_events_before_a_possible_end_mark_may_be_read_later(region: bytes, plain: int) -> None:
    assert PassThroughReader().plain_prefix(region) == plain
