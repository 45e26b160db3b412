"""/v1/chat/completions: requests and responses."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.errors import InvalidRequest
from gateway.core.usage import Usage
from gateway.dialects import CHAT
from gateway.dialects.base import Call, ParsedResponse, StreamMeter, Verdict
from gateway.dialects.choices import CHAT_FORM, ChoicesReader
from gateway.dialects.fields import join
from gateway.dialects.openai_chat import completion_request, completion_text
from gateway.dialects.texts import estimate
from tests.support.nesting import DEEP


def call(**fields: object) -> Call:
    return CHAT.read(json.dumps({"model": "m", "messages": [], **fields}).encode())


def raw_call(body: bytes) -> Call:
    return CHAT.read(body)


def answer_to(*chunks: object) -> ParsedResponse:
    reader = CHAT.reader(call(), drop_usage=False)
    for chunk in chunks:
        reader.read(chunk if isinstance(chunk, bytes) else json.dumps(chunk).encode())
    return reader.answer()


def delta(**fields: object) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields}]}


def usage(prompt: int, output: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


def stream(*chunks: object, drop_usage: bool = True) -> tuple[bytes, ParsedResponse]:
    """Return what passes of a stream that arrives in one chunk, and what is read of it."""
    events = [b"data: " + json.dumps(one, separators=(",", ":")).encode() + b"\n\n" for one in chunks]
    meter = StreamMeter(CHAT.reader(call(), drop_usage=drop_usage))
    return meter.feed(b"".join(events)) + meter.close(), meter.response()


def spoken(text: str, **more: object) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None, **more}
    return {"id": "c", "model": "m", "choices": [choice]}


@pytest.mark.parametrize("last", [{"finish_reason": "stop"}, {}])
@pytest.mark.parametrize("overhead", [[], [{"id": "c", "model": "m", "choices": [], "usage": usage(50, 9)}]])
def test_usage_of_a_choice_is_read_once_and_passes(last: dict[str, str], overhead: list[dict[str, Any]]) -> None:
    said = [spoken("a"), spoken("b"), spoken("c", usage=usage(50, 8)), spoken("d", usage=usage(50, 9), **last)]
    passed, answer = stream(*said, *overhead)
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens) == (50, 9, 59)
    assert passed.count(b'"usage"') == 2, "nobody but the provider says it there"


def test_usage_of_a_choice_is_read_despite_an_invalid_number() -> None:
    answer = answer_to(
        {"choices": [{"delta": {"content": 7}, "usage": {**usage(50, 9), "cached_tokens": 20}}], "id": 1}
    )
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.cache_read_tokens) == (50, 9, 20)
    assert answer_to({"choices": [{"message": {}, "usage": "many"}, 7]}).usage is None


# --- reading a request ------------------------------------------------------------------------------------------------------


def test_request_is_read() -> None:
    body = b'{"model":"m","messages":[{"role":"user"}],"stream":true,"x":1}'
    result = CHAT.read(body)
    assert (result.operation, result.model, result.stream, result.usage_asked) == ("chat", "m", True, False)
    assert result.body is body
    assert list(result.fields) == ["model", "messages", "stream", "x"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"messages":[]}', "model"),
        (b'{"model":null,"messages":[]}', "model"),
        (b'{"model":"","messages":[]}', "model"),
        (b'{"model":7,"messages":[]}', "model"),
        (b'{"model":["m"],"messages":[]}', "model"),
        (b'{"model":"m"}', "messages"),
        (b'{"model":"m","messages":null}', "messages"),
        (b'{"model":"m","messages":"hi"}', "messages"),
        (b'{"model":"m","messages":{}}', "messages"),
        (b'{"model":"m","messages":[],"stream":1}', "stream"),
        (b'{"model":"m","messages":[],"stream":"true"}', "stream"),
        (b'{"model":"m","messages":[],"messages":[]}', "messages"),
        (b"[]", None),
        (b"", None),
        (b"\xff", None),
        (b'{"model":"\\ud800","messages":[]}', None),
        (b'{"model":"m","messages":' + b"[" * DEEP + b"]" * DEEP + b"}", None),
    ],
)
def test_invalid_chat_request_is_refused_with_the_field_name(body: bytes, param: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        CHAT.read(body)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("options", "asks"),
    [
        ({"include_usage": True}, True),
        ({"include_usage": False}, False),
        ({"include_usage": 1}, False),
        ({}, False),
        (None, False),
        ([], False),
    ],
)
def test_only_true_asks_for_usage(options: object, asks: bool) -> None:
    assert call(stream=True, stream_options=options).usage_asked is asks


# --- writing it ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "ask"),
    [
        ({}, True),
        ({"stream": False}, True),
        ({"stream": True}, False),
        ({"stream": True, "stream_options": {"include_usage": True}}, True),
    ],
)
def test_unchanged_request_keeps_its_bytes(fields: dict[str, Any], ask: bool) -> None:
    result = call(**fields)
    assert result.with_model("m", CHAT.usage_option(result) if ask else {}) is result.body


def test_model_alias_is_replaced_and_every_other_byte_kept() -> None:
    result = raw_call(b'{ "x" : 1e2,"model":"alias","messages":[ ] ,"y":"\\u0041"}')
    assert result.with_model("real", {}) == b'{"x":1e2,"model":"real","messages":[ ],"y":"\\u0041"}'


def test_trimmed_messages_replace_the_original_ones() -> None:
    result = raw_call(b'{"model":"m","messages":[{"a": 1},{}],"y":1}')
    assert result.with_model("m", {"messages": join([b'{"a": 1}'])}) == b'{"model":"m","messages":[{"a": 1}],"y":1}'


@pytest.mark.parametrize(
    ("options", "written"),
    [
        (..., {"include_usage": True}),
        (None, {"include_usage": True}),
        ({"include_usage": False, "include_obfuscation": False}, {"include_usage": True, "include_obfuscation": False}),
        (7, {"include_usage": True}),
    ],
)
def test_usage_option_is_added_to_a_stream(options: object, written: dict[str, Any]) -> None:
    fields = {} if options is ... else {"stream_options": options}
    result = call(stream=True, **fields)
    sent = json.loads(result.with_model("m", CHAT.usage_option(result)))
    assert sent["stream_options"] == written


# --- identifying texts and token estimates ----------------------------------------------------------------------------


def test_the_opening_is_the_system_text_and_the_first_user_item() -> None:
    messages = [
        {"role": "system", "content": "s"},
        {"role": "developer", "content": [{"type": "text", "text": "d"}]},
        {"role": "assistant", "content": "not this"},
        {"role": "user", "content": "u"},
        {"role": "user", "content": "nor this"},
        {"role": "system", "content": "nor that"},
    ]
    assert CHAT.opening(call(messages=messages)) == ["s", "d", "u"]


def test_an_opening_is_the_same_on_every_turn_of_a_conversation() -> None:
    first = [{"role": "user", "content": "hello"}]
    later = [*first, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "go on"}]
    assert CHAT.opening(call(messages=first)) == CHAT.opening(call(messages=later))


@pytest.mark.parametrize(
    "messages", [[], [7, None, "x", []], [{"content": "x"}], [{"role": ["user"]}], [{"role": {"a": 1}}]]
)
def test_messages_without_identifying_items_give_an_empty_opening(messages: list[object]) -> None:
    assert CHAT.opening(call(messages=messages)) == []


@pytest.mark.parametrize("depth", [100, 300, 500, 900])
@pytest.mark.parametrize("brackets", [(b"[", b"]"), (b'{"a":', b"}")], ids=["lists", "objects"])
def test_an_opening_nested_as_deep_as_a_body_may_be_does_not_raise(depth: int, brackets: tuple[bytes, bytes]) -> None:
    opening, closing = brackets
    content = opening * depth + b"1" + closing * depth
    result = raw_call(b'{"model":"m","messages":[{"role":"user","content":' + content + b"}]}")
    assert CHAT.opening(result) is not None


def test_opening_read_at_the_nesting_limit_does_not_raise_deeper_in_the_stack() -> None:
    def read(depth: int) -> Call | None:
        content = b"[" * depth + b"]" * depth
        try:
            return raw_call(b'{"model":"m","messages":[{"role":"user","content":' + content + b"}]}")
        except InvalidRequest:
            return None

    def deeper(frames: int, result: Call) -> list[str] | None:
        return deeper(frames - 1, result) if frames else CHAT.opening(result)

    readable = [result for depth in range(500, 1_000, 10) if (result := read(depth)) is not None]
    assert readable
    assert deeper(60, readable[-1]) is not None


def test_opening_with_a_number_beyond_double_does_not_raise() -> None:
    result = raw_call(b'{"model":"m","messages":[{"role":"user","content":[1e999,{"a":1' + b"0" * 400 + b"}]}]}")
    assert CHAT.opening(result) is not None


def test_opening_of_large_content_is_stable_and_depends_on_the_content() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 200_000}}
    first = [{"role": "system", "content": "s" * 100_000}, {"role": "user", "content": [image, {"text": "what?"}]}]
    later = [*first, {"role": "assistant", "content": "a cat"}, {"role": "user", "content": "sure?"}]
    other = [first[0], {"role": "user", "content": [{**image, "detail": "low"}, {"text": "what?"}]}]
    assert CHAT.opening(call(messages=first)) == CHAT.opening(call(messages=later))
    assert CHAT.opening(call(messages=first)) != CHAT.opening(call(messages=other))


def test_every_text_of_a_request_is_counted() -> None:
    result = call(
        messages=[{"role": "user", "content": [{"type": "text", "text": "abcd"}]}],
        tools=[{"function": {"name": "find", "description": "finds"}}],
        functions=[{"name": "old"}],
        response_format={"type": "json_schema", "json_schema": {"name": "shape"}},
        metadata={"note": "not prompt text"},
    )
    assert {"abcd", "find", "finds", "old", "shape"} <= set(CHAT.input_text(result))
    assert "not prompt text" not in set(CHAT.input_text(result))
    assert estimate(CHAT.input_text(call(messages=["x" * 400]))) == 100


# --- reading a response -----------------------------------------------------------------------------------------------


def test_whole_response_is_read() -> None:
    body = {
        "model": "m-2025",
        "service_tier": "flex",
        "choices": [
            {
                "index": 0,
                "finish_reason": "tool_calls",
                "message": {
                    "content": "x" * 40,
                    "refusal": None,
                    "tool_calls": [{"id": "1", "function": {"name": "find", "arguments": '{"a":1}'}}],
                },
            }
        ],
        "usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15},
    }
    result = CHAT.answer(json.dumps(body).encode())
    assert (result.model, result.service_tier, result.finish_reason, result.tools) == (
        "m-2025",
        "flex",
        "tool_calls",
        ("find",),
    )
    assert result.usage is not None
    assert result.usage.complete(0, 0) == (Usage(10, 5, 15), "provider")
    assert not result.error


@pytest.mark.parametrize("body", [b"", b"<html>", b"null", b"7", b"[]", b"\xff", b"[" * DEEP, b'{"choices":7}', b"{}"])
def test_invalid_response_gives_an_empty_result(body: bytes) -> None:
    assert CHAT.answer(body) == ParsedResponse()


def test_text_of_a_stream_is_counted_once_and_rounded_up_at_the_end() -> None:
    assert answer_to(*[delta(content="a")] * 5).output_estimate == 2


@pytest.mark.parametrize(
    ("part", "tokens"),
    [
        ({"content": "x" * 8}, 2),
        ({"content": [{"type": "text", "text": "x" * 8}]}, 3),
        ({"content": None, "refusal": "x" * 8}, 2),
        ({"reasoning_content": "x" * 8}, 2),
        ({"reasoning": "x" * 8}, 2),
        ({"reasoning_content": "x" * 8, "reasoning": "x" * 8}, 2),
        ({"tool_calls": [{"function": {"name": "find", "arguments": "x" * 8}}]}, 3),
        ({"role": "assistant", "unknown": "x" * 8}, 0),
        ({}, 0),
    ],
)
def test_all_billed_output_is_counted(part: dict[str, Any], tokens: int) -> None:
    assert answer_to(delta(**part)).output_estimate == tokens


def test_the_model_is_the_first_named_and_the_finish_reason_and_tier_the_last() -> None:
    result = answer_to(
        {"model": "", "choices": [{"finish_reason": None}]},
        {"model": "a", "service_tier": "default", "choices": [{"finish_reason": "stop"}]},
        {"model": "b", "service_tier": "flex", "choices": [{"finish_reason": "length"}]},
        {"model": 7, "service_tier": 7, "choices": [{"finish_reason": 7}]},
    )
    assert (result.model, result.service_tier, result.finish_reason) == ("a", "flex", "length")


def tool(name: object, **fields: object) -> dict[str, Any]:
    return delta(tool_calls=[{"function": {"name": name, "arguments": ""}, **fields}])


def test_a_tool_call_in_pieces_is_one_call() -> None:
    pieces = [tool("find", index=0, id="1"), delta(tool_calls=[{"index": 0, "function": {"arguments": "{}"}}])]
    assert answer_to(*pieces).tools == ("find",)


def test_a_name_that_comes_in_pieces_is_put_together() -> None:
    pieces = [
        tool("edit_ex", index=0, id="1"),
        tool("isting_", index=0),
        tool("other", index=1, id="2"),
        tool("file", index=0, id="1"),
        tool("other", index=1, id="2"),
    ]
    answer = answer_to(*pieces)
    assert answer.tools == ("edit_existing_file", "other")
    assert len(answer_to(tool("a", index=0, id="1"), tool("b" * 999, index=0)).tools[0]) == 256


def test_second_name_without_id_is_not_a_piece_of_the_first() -> None:
    assert answer_to(tool("find", index=0), tool("look", index=0)).tools == ("find",)


def test_tool_calls_are_distinguished_by_index_and_id() -> None:
    assert answer_to(tool("a", index=0, id="1"), tool("b", index=1, id="2")).tools == ("a", "b")
    assert answer_to(tool("a", index=0, id="1"), tool("b", index=0, id="2")).tools == ("a", "b")


def whole(name: str, arguments: object, **fields: object) -> dict[str, Any]:
    return delta(tool_calls=[{"function": {"name": name, "arguments": arguments}, **fields}])


@pytest.mark.parametrize("place", [{"index": 0}, {"index": 0, "id": ""}, {"index": 0, "id": None}, {}, {"id": ""}])
@pytest.mark.parametrize("is_object", [False, True])
def test_complete_calls_with_one_index_and_no_id_are_separate_calls(place: dict[str, Any], is_object: bool) -> None:
    first, second = ({"x": 1}, {"x": 2}) if is_object else ('{"x":1}', '{"x":2}')
    assert answer_to(whole("a", first, **place), whole("b", second, **place)).tools == ("a", "b")
    assert answer_to(whole("a", first, **place), whole("a", second, **place)).tools == ("a", "a")
    assert answer_to(whole("a", "{}", **place), whole("b", "{}", **place), whole("a", "{}", **place)).tools == tuple(
        "aba"
    )
    calls = [{"function": {"name": name, "arguments": "{}"}, **place} for name in "abc"]
    assert answer_to(delta(tool_calls=calls)).tools == ("a", "b", "c")


def test_complete_call_in_pieces_can_be_followed_by_another_at_its_index() -> None:
    def more(text: str) -> dict[str, Any]:
        return delta(tool_calls=[{"index": 0, "function": {"arguments": text}}])

    pieces = [whole("a", '{"x"', index=0), more(":1}"), whole("b", "", index=0), more('{"y":'), more("2}")]
    assert answer_to(*pieces).tools == ("a", "b")
    assert answer_to(*pieces, whole("b", '{"y":3}', index=0)).tools == ("a", "b", "b")


@pytest.mark.parametrize(
    "pieces",
    [
        [("a", '{"x":'), ("a", "1}"), ("a", "")],
        [("a", '{"x":1}'), ("a", '{"x":1}')],
        [("a", "{}"), ("a", '{"x":1}')],
        [("a", '{"x":1}'), ("a", None)],
        [("a", ""), ("b", "{}")],
    ],
)
def test_a_call_whose_name_is_repeated_with_each_piece_is_one_call(pieces: list[tuple[str, Any]]) -> None:
    assert answer_to(*[whole(name, text, index=0) for name, text in pieces]).tools == ("a",)


def test_a_complete_call_with_an_id_may_be_followed_by_one_without() -> None:
    assert answer_to(whole("a", "{}", index=0, id="1"), whole("b", "{}", index=0)).tools == ("a", "b")
    assert answer_to(whole("a", "{}", index=0), whole("b", "{}", index=0, id="2")).tools == ("a", "b")
    assert answer_to(whole("a", "{}", index=0, id="1"), whole("a", "{}", index=0, id="1")).tools == ("a",)


def test_endless_arguments_are_not_kept() -> None:
    pieces = [whole("a", "{" + "x" * 70_000, index=0), whole("a", "}" * 70_000, index=0), whole("b", "{}", index=0)]
    assert answer_to(*pieces).tools == ("a",)


def of_choice(index: object, name: str | None, end: str | None = None) -> dict[str, Any]:
    part = tool(name, index=0)["choices"][0]["delta"] if name else {"content": "well"}
    return {"index": index, "delta": part, "finish_reason": end}


@pytest.mark.parametrize("numbers", [(0, 1), (1, 2), (0, 7)])
@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("is_turned", [False, True], ids=["in order", "turned"])
def test_first_choice_decides_tools_and_finish_reason(
    numbers: tuple[int, int], is_whole: bool, is_turned: bool
) -> None:
    choices = [of_choice(numbers[0], "a", "tool_calls"), of_choice(numbers[1], "other_tool" * 9, "length")]
    ordered = choices[::-1] if is_turned else choices
    result = answer_to({"choices": ordered}) if is_whole else answer_to(*[{"choices": [one]} for one in ordered])
    assert (result.tools, result.finish_reason) == (("a",), "tool_calls")
    assert result.output_estimate > answer_to({"choices": choices[:1]}).output_estimate, "all of it was delivered"


def test_tools_of_other_choices_are_ignored() -> None:
    for choices in (
        [of_choice(0, None, "stop"), of_choice(1, "b", "tool_calls")],
        [of_choice(1, "b"), of_choice(0, None)],
    ):
        assert answer_to({"choices": choices}).tools == ()
    assert answer_to({"choices": [of_choice(1, "b", "tool_calls")]}).tools == ("b",)
    assert answer_to({"choices": [of_choice("1", "a"), of_choice(None, "b")]}).tools == ("a",)


def test_legacy_function_in_pieces_is_one_call() -> None:
    first_piece = delta(function_call={"name": "find", "arguments": ""})
    answer = answer_to(first_piece, *[delta(function_call={"arguments": '{"query":"words"}'})] * 3)
    assert answer.tools == ("find",)
    assert answer.output_estimate > answer_to(first_piece).output_estimate


def test_chunk_with_an_odd_extra_field_is_read_normally() -> None:
    chunk = delta(function_call={"name": "find", "arguments": '{"query":"some words"}'}, reasoning="well", refusal="no")
    odd = {**chunk, "choices": [*chunk["choices"], 7]}
    plain, read = answer_to(chunk), answer_to(odd)
    assert (
        (read.tools, read.output_estimate) == (plain.tools, plain.output_estimate) == (("find",), plain.output_estimate)
    )
    assert plain.output_estimate > 5


def test_a_custom_tool_is_a_tool() -> None:
    said = {"index": 0, "id": "c", "type": "custom", "custom": {"name": "grep", "input": "a long pattern " * 20}}
    answer = answer_to(delta(tool_calls=[said]))
    assert answer.tools == ("grep",)
    assert answer.output_estimate > 50


def test_tool_calls_without_an_index_are_distinguished_by_position() -> None:
    calls = [{"function": {"name": name}} for name in ("a", "b")]
    assert answer_to(delta(tool_calls=calls)).tools == ("a", "b")


def test_a_name_that_is_repeated_without_an_id_is_the_same_call() -> None:
    assert answer_to(tool("a", index=0, id="1"), tool("a", index=0)).tools == ("a",)


def test_a_call_whose_name_and_id_are_repeated_is_one_call() -> None:
    find = tool("find", index=0, id="1")
    once, often = answer_to(find), answer_to(find, find, find)
    assert (often.tools, often.output_estimate) == (("find",), once.output_estimate)
    more = tool("more", index=0, id="2")
    assert answer_to(find, more, find, more, more).tools == ("find", "more")


def test_a_call_whose_id_comes_late_is_one_call() -> None:
    late = tool("find", index=0, id="1")
    assert answer_to(tool("find", index=0), late, late).tools == ("find",)
    assert answer_to(tool("find", index=0), late, tool("more", index=0, id="2")).tools == ("find", "more")


@pytest.mark.parametrize("broken", [7, None, "x", {}, {"function": 7}, {"function": {}}, {"function": {"name": 7}}])
def test_tool_call_without_a_name_is_ignored(broken: object) -> None:
    assert answer_to(delta(tool_calls=[broken])).tools == ()
    assert answer_to(delta(tool_calls=broken)).tools == ()


def test_tool_name_is_shortened_and_odd_indexes_are_accepted() -> None:
    assert answer_to(tool("x" * 10_000)).tools == ("x" * 256,)
    assert answer_to(tool("a", index=[]), tool("b", index={}), tool("c", index=None)).tools == ("a", "b", "c")


def test_endless_tool_calls_do_not_fill_the_memory() -> None:
    reader = CHAT.reader(call(), drop_usage=False)
    tracemalloc.start()
    try:
        for number in range(10_000):
            reader.read(json.dumps(tool("x" * 200, index=number, id=str(number))).encode())
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 2**20


def test_an_error_inside_a_stream_is_noted() -> None:
    assert answer_to({"error": {"message": "x"}}).error
    assert not answer_to({"error": None}).error


@pytest.mark.parametrize("error", [{}, {"code": None, "message": None, "param": None}, "", False])
def test_empty_error_is_ignored(error: object) -> None:
    assert not answer_to({"error": error}).error


def test_usage_is_read_from_both_places_groq_puts_it() -> None:
    usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
    for chunk in ({"x_groq": {"usage": usage}}, {"x_groq": {"usage": usage}, "usage": usage}, {"usage": usage}):
        result = answer_to(chunk).usage
        assert result is not None
        assert result.complete(0, 0)[0] == Usage(10, 5, 15)
    assert answer_to({"x_groq": {}}, {"x_groq": 7}, {"x_groq": {"usage": 7}}).usage is None


@pytest.mark.parametrize(
    "number", [b'"7"', b"-5", b"NaN", b"Infinity", b"true", b"[7]", b"{}", b"null", b"1e999", b"-1e999", b"1.5"]
)
def test_invalid_count_is_ignored_alone(number: bytes) -> None:
    chunk = (
        b'{"choices":[{"delta":{"content":"abcd"}}],"usage":{"prompt_tokens":' + number + b',"completion_tokens":3}}'
    )
    result = answer_to(chunk)
    assert result.usage is not None
    assert (result.usage.input_tokens, result.usage.output_tokens) == (None, 3)
    assert result.output_estimate == 1


@pytest.mark.parametrize("number", [b"1" + b"0" * 400, b"1e300", b"9007199254740993", b"18446744073709551616"])
def test_huge_count_is_capped(number: bytes) -> None:
    result = answer_to(b'{"usage":{"prompt_tokens":' + number + b',"completion_tokens":3}}')
    assert result.usage is not None
    assert result.usage.input_tokens == 2**53


def test_chunk_with_wrong_types_is_read_partly() -> None:
    result = answer_to(
        {
            "model": "m",
            "choices": [
                7,
                None,
                {"index": 0, "delta": 7, "finish_reason": "stop"},
                {"delta": {"content": "abcd", "tool_calls": [{"function": {"name": "find"}}]}},
                {"message": {"content": "abcd"}, "finish_reason": 7},
            ],
            "usage": {"prompt_tokens": 1, "completion_tokens": 2},
        }
    )
    assert (result.model, result.finish_reason, result.tools) == ("m", "stop", ("find",))
    assert result.usage is not None
    assert result.output_estimate == 3


def test_choices_of_the_wrong_type_do_not_hide_the_usage() -> None:
    for choices in (7, {"a": 1}, "x", True):
        result = answer_to({"choices": choices, "usage": {"prompt_tokens": 1, "completion_tokens": 2}})
        assert result.usage is not None


# --- what passes, what is dropped --------------------------------------------------------------------------------------------------

USAGE = b'"usage":{"prompt_tokens":1,"completion_tokens":2}'


@pytest.mark.parametrize(
    ("data", "verdict"),
    [
        (b"[DONE]", Verdict.LAST),
        (b'{"choices":[],' + USAGE + b"}", Verdict.DROP),
        (b"{" + USAGE + b"}", Verdict.DROP),
        (b'{"choices":null,' + USAGE + b"}", Verdict.DROP),
        (b'{"choices":[{"delta":{}}],' + USAGE + b"}", Verdict.PASS),
        (b'{"choices":[],"usage":null}', Verdict.PASS),
        (b'{"choices":[],"prompt_filter_results":[{}]}', Verdict.PASS),
        (b'{"choices":[],"error":{"message":"x"},' + USAGE + b"}", Verdict.PASS),
        (b"not json", Verdict.PASS),
        (b"7", Verdict.PASS),
        (b"", Verdict.PASS),
    ],
)
def test_only_a_chunk_with_nothing_but_usage_is_dropped(data: bytes, verdict: Verdict) -> None:
    assert CHAT.reader(call(), drop_usage=True).read(data) is verdict


def test_a_client_that_asked_for_usage_gets_its_chunk() -> None:
    assert CHAT.reader(call(), drop_usage=False).read(b'{"choices":[],' + USAGE + b"}") is Verdict.PASS


CHOICE = b'data: {"choices":[{"delta":{"content":"hi"}}]}\n\n'
SPACED = b'data: {"choices": [{"delta": {"content": "hi"}}]}\n\n'
DONE = b"data: [DONE]\n\n"
USAGE_CHUNK = b'data: {"choices":[],' + USAGE + b"}\n\n"


@pytest.mark.parametrize(
    ("region", "plain"),
    [
        (CHOICE, len(CHOICE)),
        (SPACED * 3, len(SPACED) * 3),
        (CHOICE * 2 + DONE, len(CHOICE) * 2),
        (CHOICE + USAGE_CHUNK, len(CHOICE)),
        (CHOICE + b"data: {", len(CHOICE)),
        (USAGE_CHUNK + CHOICE, 0),
        (CHOICE + SPACED, len(CHOICE)),
        (CHOICE + b": note\n\n" + CHOICE, 0),
        (CHOICE.replace(b"\n", b"\r\n"), 0),
        (b'data: {"choices":[{', 0),
        (DONE, 0),
        (b"", 0),
    ],
)
def test_only_chunks_with_a_choice_may_be_read_later(region: bytes, plain: int) -> None:
    assert CHAT.reader(call(), drop_usage=True).plain_prefix(region) == plain


TEXTS = st.sampled_from([None, "", "a word", "\u4e2d\u6587 and \U0001f600", 7, ["a"]])
SEEN = st.sampled_from([None, None, None, "word"])
CALLED = {"index": 0, "id": "c", "function": {"name": "f", "arguments": "{"}}
DELTAS = st.one_of(
    st.fixed_dictionaries({"content": TEXTS}),
    st.fixed_dictionaries({"content": st.just("said")}, optional={"refusal": SEEN, "reasoning": SEEN, "other": SEEN}),
    st.fixed_dictionaries(
        {"content": TEXTS, "reasoning_content": SEEN, "reasoning": SEEN, "refusal": SEEN},
        optional={"tool_calls": st.just([CALLED]), "audio": st.just({"data": "AAAA", "transcript": "t"})},
    ),
)
CHOICES = st.fixed_dictionaries(
    {"delta": DELTAS},
    optional={
        "index": st.sampled_from([0, 0, 0, 1, -1, "1", None, [0], True]),
        "finish_reason": st.sampled_from([None, None, "stop", 3]),
        "text": TEXTS,
    },
)
CHUNKS = st.one_of(
    st.fixed_dictionaries(
        {"id": st.just("i"), "model": st.just("m"), "choices": st.lists(CHOICES, min_size=1, max_size=2)},
        optional={
            "service_tier": st.sampled_from([None, "default", "flex"]),
            "usage": st.sampled_from([None, {"prompt_tokens": 3, "completion_tokens": 4}, 5]),
            "x_groq": st.just({"usage": {"prompt_tokens": 1, "completion_tokens": 1}}),
            "error": st.just({"message": "no"}),
            "created": st.just(5),
        },
    ),
    st.sampled_from([{"choices": 7}, {}, [], 7]),
)


def assert_the_same_at_once(events: list[bytes]) -> None:
    apart, together = CHAT.reader(call(), drop_usage=True), CHAT.reader(call(), drop_usage=True)
    for event in events:
        apart.read(event)
    together.read_all(events)
    assert together.answer() == apart.answer()
    assert together.cut_short() == apart.cut_short()


@given(st.lists(CHUNKS.map(lambda chunk: json.dumps(chunk).encode()) | st.just(b'{"choices":[{"delta":'), max_size=12))
def test_batch_of_chunks_gives_the_same_result_as_single_chunks(events: list[bytes]) -> None:
    assert_the_same_at_once(events)


SAID = st.sampled_from([" word", "", '"', '",', "\\", "\n", "\u4e2d \U0001f600", '"content":"'])
#: the common part of all chunks of a stream, and the positions of their texts
AROUND = st.sampled_from(
    [
        '{"id":"i","model":"m","choices":[{"index":0,"delta":{"content":%s},"finish_reason":null}]}',
        '{"id": "i", "model": "m", "choices": [{"index": 0, "delta": {"content": %s}}]}',
        '{"id":"i","model":"m","choices":[{"index":1,"delta":{"content":%s}}],"service_tier":"flex"}',
        '{"id":"i","model":"m","choices":[{"index":0,"delta":{"content":%s,"content":"last"}}]}',
        '{"id":"i","model":"m","x":{"content":"y"},"choices":[{"index":0,"delta":{"content":%s}}]}',
        '{"id":"i","model":"m","choices":[{"index":0,"delta":{"content":%s},"finish_reason":"stop"}]}',
        '{"id":"i","model":"m","choices":[{"index":0,"delta":{"content":%s}}],"usage":{"prompt_tokens":3}}',
        '{"id":"i","model":"m","choices":[{"index":0,"delta":{"content":%s}}],"obfuscation":"PADDING"}',
        '{"id":"i","model":"m","obfuscation":"PADDING","choices":[{"index":0,"delta":{"content":%s}}]}',
    ]
)
PADDING = st.sampled_from(["", "aB3", "\\u0061", '",', "\\", '","choices":[],"x":"'])
ALIKE = st.tuples(AROUND, st.lists(st.tuples(SAID, PADDING), max_size=12)).map(
    lambda made: [(made[0] % json.dumps(text)).replace("PADDING", padding).encode() for text, padding in made[1]]
)


@given(st.lists(ALIKE | CHUNKS.map(lambda chunk: [json.dumps(chunk).encode()]), max_size=5))
def test_similar_chunks_give_the_same_result_as_single_chunks(parts: list[list[bytes]]) -> None:
    assert_the_same_at_once([event for part in parts for event in part])


@pytest.mark.parametrize("padding", ["", ',"obfuscation":"PADDING"', ', "obfuscation": "PADDING"'])
def test_similar_padded_chunks_are_not_parsed_one_by_one(padding: str) -> None:
    around = '{"id":"i","model":"m","choices":[{"index":0,"delta":{"content":"word"}}]' + padding + "}"
    chunks = [around.replace("PADDING", "x" * number).encode() for number in range(20)]
    reader = ChoicesReader(CHAT_FORM, drop_usage=True)
    reader.read_all(chunks[:8])
    assert reader._count_alike(chunks) == len(chunks)


@given(st.lists(ALIKE, max_size=5))
def test_similar_chunks_in_parts_give_the_same_result(parts: list[list[bytes]]) -> None:
    apart, together = CHAT.reader(call(), drop_usage=True), CHAT.reader(call(), drop_usage=True)
    for part in parts:
        for event in part:
            apart.read(event)
        together.read_all(part)
    assert together.answer() == apart.answer()
    assert together.cut_short() == apart.cut_short()


@pytest.mark.parametrize(
    ("of_chunk", "of_choice", "of_delta"),
    [
        ({"service_tier": "flex"}, {}, {}),
        ({"usage": {"prompt_tokens": 3, "completion_tokens": 4}}, {}, {}),
        ({"x_groq": {"usage": {"prompt_tokens": 3, "completion_tokens": 4}}}, {}, {}),
        ({"error": {"message": "no"}}, {}, {}),
        ({"choices": [{"index": 0, "delta": {"content": "one"}}, {"index": 1, "delta": {"content": "two"}}]}, {}, {}),
        ({}, {"finish_reason": "stop"}, {}),
        ({}, {"index": 1}, {}),
        ({}, {"index": "1"}, {}),
        ({}, {"index": [0]}, {}),
        ({}, {}, {"reasoning": "words"}),
        ({}, {}, {"reasoning_content": "words"}),
        ({}, {}, {"refusal": "words"}),
        ({}, {}, {"tool_calls": [CALLED]}),
        ({}, {}, {"function_call": {"name": "f", "arguments": "{}"}}),
        ({}, {}, {"audio": {"data": "AAAA", "transcript": "words"}}),
        ({}, {}, {"content": ["words"]}),
        ({}, {}, {}),
    ],
)
def test_chunk_with_more_than_text_is_read_among_similar_ones(
    of_chunk: dict[str, Any], of_choice: dict[str, Any], of_delta: dict[str, Any]
) -> None:
    def chunk(more: int = 0, **said: Any) -> bytes:
        choice = {"index": 0, "delta": {"content": "said", **(of_delta if more else {})}, **(of_choice if more else {})}
        value = {"id": "i", "created": 5, "model": "m", "choices": [choice], **said, **(of_chunk if more else {})}
        return json.dumps({name: one for name, one in value.items() if one is not None}).encode()

    assert_the_same_at_once([chunk(), chunk(more=1), chunk()])
    assert_the_same_at_once([chunk(id=None, created=None), chunk(more=1)])
    assert_the_same_at_once([chunk(model=None), chunk(model=None), chunk(more=1), chunk(model="another")])
    assert_the_same_at_once([chunk(service_tier="a"), chunk(service_tier=""), chunk(more=1)])


@pytest.mark.parametrize(
    "nested",
    [
        b'data: {"choices":[{"delta":{"x":{"choices":[{"a":1}]}}}]}\n\n',
        b'data: {"choices":[{"delta":{"x":{"choices":[{"choices":[{"a":1}]}]}}}]}\n\n',
    ],
)
def test_chunk_with_the_mark_twice_does_not_hide_the_end_or_usage(nested: bytes) -> None:
    for hidden in (DONE, USAGE_CHUNK):
        meter = StreamMeter(CHAT.reader(call(), drop_usage=True))
        assert hidden not in meter.feed(hidden + nested)


def test_request_by_the_gateway_is_plain_json_with_any_content() -> None:
    body = completion_request("m", [{"role": "user", "content": "half a pair \ud800"}], ("max_tokens", 5))
    said = [{"role": "user", "content": "half a pair ?"}]
    assert json.loads(body) == {"model": "m", "messages": said, "max_tokens": 5}


def answered(**message: object) -> bytes:
    return json.dumps({"choices": [{"message": message, "finish_reason": message.pop("end", "stop")}]}).encode()


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (answered(content=" All is well.\n"), "All is well."),
        (answered(content="cut", end="length"), "cut"),
        (answered(content=[{"type": "text", "text": "in "}, {"type": "text", "text": "parts"}]), "in parts"),
        (answered(content="half a pair \ud800"), "half a pair ?"),
        (answered(content="  "), None),
        (answered(content=None), None),
        (answered(content="no", refusal="I will not"), None),
        (answered(content="no", end="content_filter"), None),
        (b'{"choices":[{"message":7}]}', None),
        (b'{"choices":[7]}', None),
        (b'{"choices":[]}', None),
        (b'{"choices":7}', None),
        (b"7", None),
        (b"<html>", None),
    ],
)
def test_text_of_a_whole_response_is_read(body: bytes, text: str | None) -> None:
    assert completion_text(body) == text
