"""/v1/completions: requests, responses, and streams that are ended early."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.core.errors import InvalidRequest
from gateway.core.usage import Usage
from gateway.dialects.base import Call, ParsedResponse, StreamMeter, Verdict
from gateway.dialects.completions import Completions

DIALECT = Completions()
USAGE = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}


def call(**fields: object) -> Call:
    return DIALECT.read(json.dumps({"model": "m", "prompt": "p", **fields}).encode())


def piece(text: object, index: int = 0, reason: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"text": text, "index": index, "logprobs": None, "finish_reason": reason}], **fields}


def answer_to(*chunks: object) -> ParsedResponse:
    reader = DIALECT.reader(call(), drop_usage=False)
    for chunk in chunks:
        reader.read(json.dumps(chunk).encode())
    return reader.answer()


def cut_after(*chunks: object) -> list[Any]:
    meter = StreamMeter(DIALECT.reader(call(), drop_usage=True))
    for chunk in chunks:
        meter.feed(b"data: " + json.dumps(chunk).encode() + b"\n\n")
    *events, done = meter.end_at_limit().decode().removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_request_is_read() -> None:
    body = b'{"model":"m","prompt":["a","b"],"stream":true,"x":1}'
    result = DIALECT.read(body)
    assert (result.operation, result.model, result.stream, result.usage_asked) == ("text_completion", "m", True, False)
    assert result.body is body


def test_a_prompt_may_be_absent() -> None:
    assert DIALECT.read(b'{"model":"m"}').model == "m"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"prompt":"p"}', "model"),
        (b'{"model":null}', "model"),
        (b'{"model":["m"]}', "model"),
        (b'{"model":"m","stream":"true"}', "stream"),
        (b'{"model":"m","prompt":"a","prompt":"b"}', "prompt"),
        (b"[]", None),
    ],
)
def test_invalid_completions_request_is_refused_with_the_field_name(body: bytes, param: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        DIALECT.read(body)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "ask"),
    [
        ({}, True),
        ({"stream": True}, False),
        ({"stream": True, "stream_options": {"include_usage": True}}, True),
    ],
)
def test_unchanged_request_keeps_its_bytes(fields: dict[str, Any], ask: bool) -> None:
    result = call(**fields)
    assert result.with_model("m", DIALECT.usage_option(result) if ask else {}) is result.body


def test_usage_option_is_added_and_every_other_byte_kept() -> None:
    result = DIALECT.read(b'{ "x" : 1e2,"model":"alias","prompt":[ 1,2 ],"stream":true}')
    sent = result.with_model("real", {"max_tokens": 5, **DIALECT.usage_option(result)})
    assert sent == (
        b'{"x":1e2,"model":"real","prompt":[ 1,2 ],"stream":true,"max_tokens":5,"stream_options":{"include_usage":true}}'
    )


def test_prompt_gives_no_session_id() -> None:
    assert DIALECT.opening(call()) is None


def test_prompts_are_counted() -> None:
    assert list(DIALECT.input_text(call(prompt=["a", "b"], suffix="c", user="d"))) == ["a", "b", "c"]


def test_whole_response_is_read() -> None:
    result = DIALECT.answer(json.dumps(piece("x" * 40, reason="stop", model="davinci", usage=USAGE)).encode())
    assert (result.model, result.finish_reason, result.output_estimate, result.error) == ("davinci", "stop", 10, False)
    assert result.usage is not None
    assert result.usage.complete(0, 0)[0] == Usage(1, 2, 3)


@pytest.mark.parametrize("body", [b"", b"<html>", b"null", b"[]", b'{"choices":7}', b'{"choices":[{"text":7}]}', b"{}"])
def test_invalid_response_gives_an_empty_result(body: bytes) -> None:
    assert DIALECT.answer(body) == ParsedResponse()


def test_chunk_with_wrong_types_is_read_partly() -> None:
    result = answer_to({"choices": [7, {"delta": 7, "text": "x" * 8, "finish_reason": "stop"}], "usage": USAGE})
    assert (result.output_estimate, result.finish_reason) == (2, "stop")
    assert result.usage is not None


def test_error_inside_a_stream_is_noted() -> None:
    assert answer_to(piece("x"), {"error": {"message": "no"}}).error


def test_the_usage_chunk_reaches_only_a_client_that_asked_for_it() -> None:
    data = json.dumps({"choices": [], "usage": USAGE}).encode()
    assert DIALECT.reader(call(), drop_usage=True).read(data) is Verdict.DROP
    assert DIALECT.reader(call(), drop_usage=False).read(data) is Verdict.PASS


def test_stream_ended_early_ends_each_running_choice_at_its_limit() -> None:
    head: dict[str, Any] = {"id": "cmpl-1", "created": 7, "model": "davinci"}
    [chunk] = cut_after(piece("a", **head), piece("b", 1), piece("", 1, "stop"), piece("c", 2))
    assert {name: chunk[name] for name in head} == head
    assert chunk["object"] == "text_completion"
    assert chunk["choices"] == [
        {"text": "", "logprobs": None, "index": index, "finish_reason": "length"} for index in (0, 2)
    ]


def test_stream_ended_before_its_start_has_an_end() -> None:
    [chunk] = cut_after()
    assert [choice["finish_reason"] for choice in chunk["choices"]] == ["length"]


def test_stream_ended_after_its_last_choice_keeps_the_finish_reason() -> None:
    assert cut_after(piece("a"), piece("", reason="stop")) == []


@pytest.mark.parametrize(
    ("index", "number"), [("1", 1), ("9" * 5000, 0), ("\u0661", 0), ("-1", 0), (None, 0), (1.5, 0)]
)
def test_odd_choice_index_does_not_prevent_the_end_of_a_stream(index: Any, number: int) -> None:
    [chunk] = cut_after(piece("a", index))
    assert [choice["index"] for choice in chunk["choices"]] == [number]


@pytest.mark.parametrize("head", [{"id": 7, "created": "x", "model": []}, {"id": "\ud800", "created": None}])
def test_odd_values_of_a_host_do_not_prevent_the_end_of_a_stream(head: dict[str, Any]) -> None:
    [chunk] = cut_after(piece("a", **head))
    assert chunk["choices"][0]["finish_reason"] == "length"


def test_endless_choices_do_not_make_an_endless_end() -> None:
    [chunk] = cut_after(*[piece("a", index) for index in range(1_000)])
    assert [choice["index"] for choice in chunk["choices"]] == list(range(256))
