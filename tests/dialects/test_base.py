"""Read a body one level deep, and meter a stream while it passes through."""

from __future__ import annotations

import json
import math
import tracemalloc
from collections.abc import Callable, Iterable

import msgspec
import pytest

from gateway.core.counting.heuristic import estimate_tokens
from gateway.core.counting.request import decode_piece
from gateway.core.errors import InvalidRequest
from gateway.core.http.sse import MAX_EVENT_BYTES
from gateway.core.identity import hash_of, text_of
from gateway.dialects.base import EventReader, ParsedResponse, StreamMeter, Verdict
from gateway.dialects.fields import decode, flag_field, parse_piece, read_fields, string_field, write_fields
from gateway.dialects.opening import identifying_text, identifying_texts
from gateway.dialects.texts import estimate, texts, token_ids
from tests.support.nesting import DEEP
from tests.support.timing import count_calls, in_time


class Reader(EventReader):
    """Drops `drop`, ends at `end`, and passes other events, which it reads only when asked."""

    def __init__(self, plain: int | None = None) -> None:
        self.seen: list[bytes] = []
        self._plain = plain

    def plain_prefix(self, region: bytes) -> int:
        if self._plain is None or b"drop" in region or b"end" in region:
            return 0
        return region.rfind(b"\n\n") + 2

    def read(self, data: bytes) -> Verdict:
        self.seen.append(data)
        return {b"drop": Verdict.DROP, b"end": Verdict.LAST}.get(data, Verdict.PASS)

    def answer(self) -> ParsedResponse:
        return ParsedResponse(output_estimate=len(self.seen))

    def next_number(self) -> int:
        return len(self.seen)

    def cut_short(self) -> bytes:
        return b""


def raw_fields(**values: str) -> dict[str, msgspec.Raw]:
    return {name: msgspec.Raw(value.encode()) for name, value in values.items()}


# --- reading a body -----------------------------------------------------------------------------------------------------


def test_a_body_is_read_one_level_deep_and_values_keep_their_bytes() -> None:
    fields = read_fields(b' {"a" : [1,  2] ,"b":{"c":1e999},\n"d":null}\n')
    assert {name: bytes(raw) for name, raw in fields.items()} == {
        "a": b"[1,  2]",
        "b": b'{"c":1e999}',
        "d": b"null",
    }


@pytest.mark.parametrize("body", [b"{}", b" {\n} "])
def test_an_empty_object_has_no_fields(body: bytes) -> None:
    assert read_fields(body) == {}


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "JSON"),
        (b" ", "JSON"),
        (b"{", "JSON"),
        (b'{"a":1', "JSON"),
        (b'{"a":1}x', "JSON"),
        (b'{"a":1}{"b":2}', "JSON"),
        (b'{"a":NaN}', "JSON"),
        (b'{"a":Infinity}', "JSON"),
        (b"{'a':1}", "JSON"),
        (b'{"a":01}', "JSON"),
        (b"{a:1}", "JSON"),
        (b'{"\\ud800":1}', "JSON"),
        (b"\xef\xbb\xbf{}", "JSON"),
        (b"[]", "not an object"),
        (b"null", "not an object"),
        (b"7", "not an object"),
        (b'"{}"', "not an object"),
        (b'{"a":"\xff"}', r"UTF-8 \(byte 6\)"),
        (b'{"a":"\xed\xa0\x80"}', "UTF-8"),
        (b'{"a":"\xc0\xaf"}', "UTF-8"),
        (b"\xff\xfe{\x00}\x00", "UTF-8"),
        (b'{"a":' + b"[" * DEEP + b"]" * DEEP + b"}", "deep"),
        (b'{"a":' * DEEP + b"1" + b"}" * DEEP, "deep"),
        (b"[" * DEEP, "deep|not an object"),
    ],
)  # fmt: skip
def test_body_that_is_not_a_json_object_is_refused_with_the_reason(body: bytes, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why) as caught:
        read_fields(body)
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"a","model":"b"}',
        b'{"model":"a","model":"a"}',
        b'{"model":"a","x":1,"model":"b","y":2}',
        b'{"model":"a","\\u006dodel":"b"}',
        b'{"\\u006dodel":"a","mode\\u006C":"b"}',
        b'{"model":12,"model":1}',
        b'{"model":1,"model":12}',
        b'{"model":{},"model":{}}',
        b' {\n"model" : "a" ,\r\n"model"\t: "b" } ',
    ],
)
def test_duplicate_key_is_refused_by_name_in_any_spelling(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match='"model" appears more than once') as caught:
        read_fields(body)
    assert caught.value.param == "model"


@pytest.mark.parametrize(
    "body",
    [
        b'{"\\u006dodel":"a"}',
        b'{"a\\nb":1,"a":2}',
        b'{"a":{"model":1,"model":2},"model":3}',
        b'{"a":"\\"model\\":1","model":3}',
        '{"schlüssel":1,"漢":2,"🙂":3}'.encode(),
        b'{"\\ud83d\\ude42":1}',
        b'{"":1}',
        b'{"a":1,"A":2}',
    ],
)
def test_body_with_unique_keys_is_read_in_any_spelling(body: bytes) -> None:
    assert {name: json.loads(bytes(raw)) for name, raw in read_fields(body).items()} == json.loads(body)


def test_very_long_duplicate_key_is_shortened_in_the_error() -> None:
    key = b'"' + b"k" * 100_000 + b'"'
    with pytest.raises(InvalidRequest) as caught:
        read_fields(b"{" + key + b":1," + key + b":2}")
    assert len(caught.value.message) < 300


def test_number_with_a_million_digits_is_kept_unread() -> None:
    body = b'{"a":1' + b"0" * 1_000_000 + b"}"
    assert bytes(read_fields(body)["a"]) == body[5:-1]


@pytest.mark.parametrize("value", [b"1" + b"0" * 10_000, b"[" * 500 + b"]" * 500, b'{"b":1,"b":2}'])
def test_escaped_keys_are_read_next_to_any_value(value: bytes) -> None:
    fields = read_fields(b'{"\\u0061":' + value + b"}")
    assert {name: bytes(raw) for name, raw in fields.items()} == {"a": value}


def test_too_many_fields_are_refused() -> None:
    few = b"{" + b",".join(b'"k%d":1' % number for number in range(1_000)) + b"}"
    assert len(read_fields(few)) == 1_000
    many = b"{" + b",".join(b'"k%d":1' % number for number in range(5_000)) + b"}"
    with pytest.raises(InvalidRequest, match="more than 4096 fields"):
        read_fields(many)


# --- writing, decoding, single fields ---------------------------------------------------------------------------------------


def test_changed_field_keeps_its_position_and_a_new_one_is_last() -> None:
    fields = raw_fields(a="[1,  2]", model='"x"', b="1e5")
    assert write_fields(fields, {"model": "y", "new": True}) == b'{"a":[1,  2],"model":"y","b":1e5,"new":true}'
    assert write_fields(fields, {"model": msgspec.UNSET, "new": 1}) == b'{"a":[1,  2],"b":1e5,"new":1}'


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        (b'{"a":[1,null]}', {"a": [1, None]}),
        (b"1e999", float("inf")),
        (b"-Infinity", float("-inf")),
        (b"1" + b"0" * 400, 10**400),
        (b'"\\ud800"', "\ud800"),
        (b"not json", None),
        (b"", None),
        (b"\xff", None),
        (b"1" + b"0" * 100_000, None),
        (b"[" * DEEP + b"]" * DEEP, None),
        (b"[" * DEEP, None),
    ],
)
def test_any_value_from_outside_is_decoded_or_none(raw: bytes, value: object) -> None:
    assert decode(raw) == value
    assert decode(msgspec.Raw(raw)) == value


@pytest.mark.parametrize(
    "raw",
    [
        b'{"a":[1,1.5,null,"\\ud83d\\ude00"]}', b"12345678901234567890123", b"1e400", b"-0", b'{"a":1,"a":2}',
        # A lone surrogate, invalid JSON, invalid UTF-8, and JSON nested too deep.
        b'"\\ud800"', b"NaN", b'"a" b', b"word", b'"\xff"', b"[" * DEEP,
    ],
)  # fmt: skip
def test_piece_of_json_is_decoded_as_by_the_standard_library(raw: bytes) -> None:
    assert repr(parse_piece(raw)) == repr(decode_piece(raw))


def test_not_a_number_is_decoded() -> None:
    assert math.isnan(decode(b"NaN"))


def test_string_field_is_none_if_absent_or_null() -> None:
    fields = raw_fields(a='"x\\u0041"', b="null")
    assert [string_field(fields, name) for name in "abc"] == ["xA", None, None]


@pytest.mark.parametrize("value", ["1", "true", "[]", "{}", "1e999"])
def test_string_field_of_another_type_is_refused_by_name(value: str) -> None:
    with pytest.raises(InvalidRequest, match='"model" must be a string') as caught:
        string_field(raw_fields(model=value), "model")
    assert caught.value.param == "model"


def test_flag_is_false_if_absent_or_null() -> None:
    fields = raw_fields(a="true", b="false", c="null")
    assert [flag_field(fields, name) for name in "abcd"] == [True, False, False, False]


@pytest.mark.parametrize("value", ["1", "0", '"true"', "[]", "{}"])
def test_flag_of_another_type_is_refused_by_name(value: str) -> None:
    with pytest.raises(InvalidRequest, match='"stream" must be true or false') as caught:
        flag_field(raw_fields(stream=value), "stream")
    assert caught.value.param == "stream"


def test_the_texts_of_a_value_are_its_strings_without_data_urls() -> None:
    value = {"a": "x", "b": ["y", {"c": "z"}], "d": 7, "e": None, "f": "data:image/png;base64,AAAA"}
    assert list(texts(value)) == ["x", "y", "z"]


def test_texts_nested_too_deep_are_ignored() -> None:
    value: object = "deep"
    for _ in range(5_000):
        value = [value]
    assert list(texts([value, "flat"])) == ["flat"]


def test_an_estimate_is_rounded_up_once() -> None:
    assert estimate(iter(["a", "b", "c"])) == 1
    assert estimate(iter(["abcd", "e"])) == 2
    assert estimate(iter([])) == 0


def raw_of(value: object) -> msgspec.Raw:
    return msgspec.Raw(json.dumps(value).encode())


@pytest.mark.parametrize(
    "value",
    [
        {"a": "x", "b": ["y", {"c": "z"}], "d": 7, "e": None, "f": "data:image/png;base64,AAAA"},
        ["", "\\", '"', 'a":"b', "{[", "é漢🙂", "\n", {"\\": "\\"}, {'k":': "v"}],
        [{"a": {"b": {}}}, [], "data"],
        "x",
        7,
    ],
)
def test_the_texts_of_raw_bytes_are_those_of_the_decoded_value(value: object) -> None:
    assert list(texts(raw_of(value))) == list(texts(value))
    spaced = msgspec.Raw(json.dumps(value, ensure_ascii=False, separators=(" , ", " :\n")).encode())
    assert list(texts(spaced)) == list(texts(value))


def test_escaped_data_url_is_not_text() -> None:
    assert list(texts(msgspec.Raw(b'["\\u0064ata:image/png;base64,AA"]'))) == []


def test_more_texts_than_the_limit_are_estimated_from_the_first_ones() -> None:
    many = ["abcd"] * 250_000
    assert estimate(texts(raw_of(many))) == pytest.approx(250_000, rel=0.001)


def test_long_texts_of_other_scripts_are_estimated_from_their_start() -> None:
    assert estimate(iter(["漢" * 2_000_000, "漢" * 1_000, "abcd"])) == 2_001_001
    text = "漢字 kana かな " * 10_000
    assert estimate(iter([text])) == math.ceil(estimate_tokens(text))


@pytest.mark.parametrize(
    ("value", "ids"),
    [
        ([15, 7, 100_257], 3),
        ([[15, 7], [], [3]], 3),
        ([], 0),
        ([[], []], 0),
        ("15, 7", 0),
        (["15, 7", "\\", '"', '\\"[3, 4'], 0),
        (["a", [15, 7], '\\"', 3], 3),
        ([1.5, -2, 1e30], 3),
        ({"a": 15}, 0),
        (15, 0),
    ],
)
def test_token_ids_are_the_numbers_of_an_array(value: object, ids: int) -> None:
    for separators in ((",", ":"), (" , ", " : ")):
        raw = json.dumps(value, separators=separators)
        assert token_ids(raw_fields(input=raw)) == token_ids(raw_fields(prompt=raw, messages="[1]")) == ids


def test_many_token_ids_are_counted_without_decoding() -> None:
    fields = raw_fields(input="[" + ",".join(["15"] * 4_000_000) + "]")
    assert count_calls(lambda: token_ids(fields)) < 100
    assert token_ids(fields) == 4_000_000


def test_token_ids_between_many_texts_are_not_undercounted() -> None:
    fields = raw_fields(input="[" + ",".join(['"",1'] * 250_000) + "]")
    assert token_ids(fields) == 250_000
    assert count_calls(lambda: token_ids(fields)) < 100


# --- identifying a conversation ---------------------------------------------------------------------------------------


def test_small_content_is_identified_by_its_text() -> None:
    content = [{"type": "text", "text": "a"}, {"b": 1, "a": [2], "cache_control": {}}, 7, None, "x"]
    assert identifying_text(raw_of(content)) == text_of(content)
    assert identifying_texts(raw_of([{"role": "user", "content": content}])) == [text_of(content)]
    assert identifying_texts(raw_of([{"role": "user"}])) == ["null"]


@pytest.mark.parametrize("size", [100, 1_000_000])
@pytest.mark.parametrize("as_part", [False, True])
def test_text_identifies_itself_with_any_length_and_cache_mark(size: int, as_part: bool) -> None:
    text = "é\n" * size
    first = raw_of([{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}, "b"] if as_part else text)
    later = raw_of([{"text": text, "type": "text"}, "b"] if as_part else text)
    assert identifying_text(first) == identifying_text(later) == (text + "\nb" if as_part else text)


def test_a_large_part_without_text_is_identified_by_its_bytes() -> None:
    def opening(end: str) -> str:
        return identifying_text(raw_of([{"text": "a"}, {"image": "x" * 100_000 + end}, {"text": 7}, [1]]))

    assert opening("1") == opening("1") != opening("2")
    text, image, number, nested = opening("1").split("\n")
    assert text == "a"
    assert (number, nested) == (hash_of(b'{"text": 7}'), hash_of(b"[1]"))
    assert image.startswith("sha256:")


@pytest.mark.parametrize("value", [{"a": "x" * 100_000}, [{}] * 100_000])
def test_large_content_that_is_not_a_list_is_identified_by_its_bytes(value: object) -> None:
    raw = raw_of(value)
    assert identifying_text(raw) == hash_of(bytes(raw))


def test_large_object_with_text_is_identified_by_its_text() -> None:
    assert identifying_text(raw_of({"text": "x" * 100_000})) == "x" * 100_000


@pytest.mark.parametrize("before", [0, 1, 15, 16, 17, 500, 1_022])
def test_first_user_item_is_found_after_many_others(before: int) -> None:
    items = [{"role": "assistant"}] * before + [{"role": "user", "content": "u"}, {"role": "user", "content": "v"}]
    assert identifying_texts(raw_of(items)) == ["u"]
    assert identifying_texts(raw_of(items[:before])) == []


def test_number_of_examined_items_is_limited() -> None:
    assert identifying_texts(raw_of([{"role": "system", "content": "s"}] * 3_000)) == ["s"] * 1_024


@pytest.mark.parametrize(
    "item", [b'{"role":"user","role":"assistant","content":"x"}', b'{"role":"assistant","r":"user"}']
)
def test_item_of_another_role_does_not_identify_a_conversation(item: bytes) -> None:
    assert identifying_texts(msgspec.Raw(b"[" + item + b"]")) == []


def test_role_is_read_in_any_spelling_unless_it_is_too_long() -> None:
    spelled = "".join(f"\\u{ord(letter):04x}" for letter in "developer")
    item = f'{{"\\u0072ole" : "{spelled}", "content":"x"}}'.encode()
    assert identifying_texts(msgspec.Raw(b"[" + item + b"]")) == ["x"]
    assert identifying_texts(raw_of([{"role": "user" * 100, "content": "x"}])) == []


def test_value_that_is_not_a_list_is_identified_as_a_whole() -> None:
    assert identifying_texts(None) == []
    assert identifying_texts(raw_of("hello")) == ["hello"]
    assert identifying_texts(msgspec.Raw(b"[1")) == [hash_of(b"[1")]
    broken = b"[1," + b"x" * 100_000
    assert identifying_text(msgspec.Raw(broken)) == hash_of(broken)


# --- hostile shapes ----------------------------------------------------------------------------------------------------------------

SIZE = 20_000_000


def repeated(piece: bytes, between: bytes = b",") -> bytes:
    return between.join([piece] * (SIZE // (len(piece) + len(between))))


def user(content: bytes) -> bytes:
    return b'{"model":"m","messages":[{"role":"user","content":' + content + b"}]}"


HOSTILE: dict[str, Callable[[], bytes]] = {
    "empty parts": lambda: user(b"[" + repeated(b"{}") + b"]"),
    "parts in an object": lambda: user(b'{"a":[' + repeated(b"{}") + b"]}"),
    "parts in a text": lambda: user(b'[{"text":[' + repeated(b"{}") + b"]}]"),
    "a role of parts": lambda: b'{"messages":[{"role":[' + repeated(b"{}") + b"]}]}",
    "an escaped key": lambda: b'{"\\u0061":1,"messages":[' + repeated(b'{"a":[]}') + b"]}",
    "short messages": lambda: b'{"messages":[{"role":"user"},' + repeated(b'{"role":"a"}') + b"]}",
    "messages without role": lambda: b'{"messages":[' + repeated(b"{}") + b"]}",
    "system messages": lambda: (
        b'{"messages":[' + repeated(b'{"role":"system","content":[' + b",".join([b"{}"] * 10_000) + b"]}") + b"]}"
    ),
    "escapes": lambda: user(b'"' + repeated(b"\\n", b"") + b'"'),
    "short texts": lambda: user(b"[" + repeated(b'"a"') + b"]"),
    "other scripts": lambda: user(b'"' + repeated("漢".encode(), b"") + b'"'),
    "keys": lambda: user(b"{" + repeated(b'"a":1') + b"}"),
}


@pytest.mark.parametrize("shape", HOSTILE)
def test_hostile_body_is_handled_without_examining_all_parts(shape: str) -> None:
    body = HOSTILE[shape]()

    def work() -> None:
        fields = read_fields(body)
        identifying_texts(fields["messages"])
        estimate(texts(fields["messages"]))

    with in_time():
        assert count_calls(work) < 2_000_000


def test_body_with_many_parts_is_read_without_decoding_them() -> None:
    fields = read_fields(HOSTILE["empty parts"]())
    tracemalloc.start()
    try:
        identifying_texts(fields["messages"])
        list(texts(fields["messages"]))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 2**20


SMALL = {
    **dict.fromkeys(("n", "best_of", "n_predict", "max_tokens", "max_completion_tokens", "max_output_tokens"), 64),
    "model": 1024,
    **dict.fromkeys(("models", "fallbacks", "stream", "stream_options", "background"), 65_536),
    **dict.fromkeys(("service_tier", "speed", "inference_geo", "thinking", "reasoning"), 65_536),
    **dict.fromkeys(("metadata", "session_id", "conversation", "prompt_cache_key"), 65_536),
    **dict.fromkeys(
        ("tool_choice", "function_call", "response_format", "output_config", "text", "client_metadata"), 1_048_576
    ),
}


@pytest.mark.parametrize("name", SMALL)
def test_short_field_is_refused_if_it_is_too_long_to_decode(name: str) -> None:
    most = SMALL[name]
    longest = b'"' + b"x" * (most - 2) + b'"'
    assert bytes(read_fields(b'{"messages":[],"%b": %b}' % (name.encode(), longest))[name]) == longest
    # A longer body causes no more work: many parts need not be read for each name.
    parts = repeated(b"{}") if name in ("n", "model", "text") else b",".join([b"{}"] * (most // 3 + 1))
    for value in (longest[:-1] + b'x"', b"[" + parts + b"]"):
        with pytest.raises(InvalidRequest) as caught:
            read_fields(b'{"%b":%b}' % (name.encode(), value))
        assert caught.value.param == name
        assert caught.value.message == f'The field "{name}" has {len(value):,} bytes; it may have {most:,}.'


def test_long_field_is_read_with_any_length() -> None:
    long = b'"' + b"x" * 2_000_000 + b'"'
    for name in (b"prompt", b"input", b"system", b"instructions", b"tools", b"messages"):
        assert bytes(read_fields(b'{"%b":%b}' % (name, long))[name.decode()]) == long


def test_body_with_too_many_fields_is_refused_before_all_are_read() -> None:
    body = b"{" + repeated(b'"a":1') + b"}"

    def work() -> None:
        with pytest.raises(InvalidRequest):
            read_fields(body)

    assert count_calls(work) < 100_000


# --- the meter -----------------------------------------------------------------------------------------------------------------


def meter_all(pieces: Iterable[bytes], plain: int | None = None) -> tuple[list[bytes], bytes, Reader]:
    reader = Reader(plain)
    meter = StreamMeter(reader)
    passed = [meter.feed(piece) for piece in pieces]
    tail = meter.close()
    meter.response()
    return passed, tail, reader


def test_events_pass_unchanged_except_dropped_ones() -> None:
    passed, tail, reader = meter_all([b"data: a\n\ndata: drop\n\n: note\n\n", b"data: b\n\n"])
    assert passed == [b"data: a\n\n: note\n\n", b"data: b\n\n"]
    assert (tail, reader.seen) == (b"", [b"a", b"drop", b"b"])


def test_end_mark_and_later_events_are_held_until_close() -> None:
    reader = Reader()
    meter = StreamMeter(reader)
    assert meter.feed(b"data: a\n\ndata: end\n\n: after\n\n") == b"data: a\n\n"
    assert meter.ended
    assert meter.feed(b"data: drop\n\n") == b""
    assert meter.feed(b"data: b\n\nda") == b""
    assert meter.feed(b"ta: dr") == b""
    assert meter.feed(b"op\n\ndata: drop") == b""
    assert meter.close() == b"data: end\n\n: after\n\ndata: b\n\n"
    assert reader.seen == [b"a", b"end", b"drop", b"b", b"drop", b"drop"]


OURS = b": x-session-usage-source: provider\n: x-token-usage: {}\n: x-session-cumulative-token-usage: {}\n\n"
COMMENTED = [
    (b"data: a\n\n" + OURS + b"data: end\n\n", b"data: a\n\ndata: end\n\n"),
    (OURS + OURS + b"data: a\n\n" + OURS, b"data: a\n\n"),
    (b"data: a\n\ndata: end\n\n" + OURS, b"data: a\n\ndata: end\n\n"),
    (b"data: a\n\n" + OURS[:-1], b"data: a\n\n"),
    *[
        (kept, kept)
        for kept in (
            b": keep-alive\n\ndata: a\n\n: x-other: 1\n\n",
            b": x-session-calls: 1\n: note\n\ndata: a\n\n",
            b": x-session-calls: 1\ndata: a\n\n",
            b"data: a: x-session-calls: 1\n\ndata: b\n\n",
            b"data: a\n\n: x-session-calls",
        )
    ],
]


@pytest.mark.parametrize(("original", "kept"), COMMENTED)
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("plain", [None, 1])
def test_comments_of_another_gateway_are_dropped_at_any_chunk_boundary(
    original: bytes, kept: bytes, line_end: bytes, plain: int | None
) -> None:
    original, kept = original.replace(b"\n", line_end), kept.replace(b"\n", line_end)
    cuts = [[original[:cut], original[cut:]] for cut in range(len(original))]
    for pieces in [*cuts, [original[at : at + 1] for at in range(len(original))]]:
        passed, tail, _ = meter_all(pieces, plain)
        # A comment that ends inside a CR LF leaves the LF, which is no event.
        assert (b"".join(passed) + tail).lstrip(b"\n").replace(b"\r\n\n", b"\r\n") == kept


def test_stream_that_continues_after_its_end_mark_does_not_fill_the_memory() -> None:
    meter = StreamMeter(Reader())
    meter.feed(b"data: end\n\n")
    for _ in range(500):
        assert meter.feed(b"data: " + b"x" * 10_000 + b"\n\n") == b""
    tail = meter.close()
    assert tail.startswith(b"data: end\n\ndata: x")
    assert len(tail) < 500_000


def test_a_stream_without_an_end_mark_has_not_ended() -> None:
    meter = StreamMeter(Reader())
    meter.feed(b"data: a\n\n")
    assert meter.close() == b""
    assert not meter.ended


@pytest.mark.parametrize(
    ("rest", "tail", "ended"),
    [
        (b"data: end", b"data: end", True),
        (b"data: drop", b"", False),
        (b"data: a", b"data: a", False),
        (b":", b":", False),
    ],
)
def test_event_without_blank_line_is_read_at_the_end(rest: bytes, tail: bytes, ended: bool) -> None:
    meter = StreamMeter(Reader())
    assert meter.feed(b"data: x\n\n" + rest) == b"data: x\n\n"
    assert meter.close() == tail
    assert meter.ended == ended


@pytest.mark.parametrize(
    ("rest", "tail"),
    [
        (b"", b""),
        (b'data: {"a":1}', b'data: {"a":1}\n\n'),
        (b'event: x\r\ndata: {"a":1}\r\n', b'event: x\r\ndata: {"a":1}\n\n'),
        (b'data: {"a":"\x01"}', b'data: {"a":"\x01"}\n\n'),
        (b'data: {"a":', b""),
        (b'event: x\ndata: {"a":1,', b""),
        (b"event: x\n", b""),
        (b"da", b""),
        (b": comm", b""),
        (b"data: end", b"data: end\n\n"),
        (b"data: drop", b""),
    ],
)
def test_end_of_a_broken_stream_does_not_damage_the_next_event(rest: bytes, tail: bytes) -> None:
    meter = StreamMeter(Reader())
    assert meter.feed(b"data: x\n\n" + rest) == b"data: x\n\n"
    assert meter.close_broken() == tail


def test_deferred_events_are_read_before_the_result_is_returned() -> None:
    reader = Reader(plain=0)
    meter = StreamMeter(reader)
    assert meter.feed(b"data: a\n\n") == b"data: a\n\n"
    assert reader.seen == []
    assert meter.response().output_estimate == 1
    assert meter.response().output_estimate == 1


def test_deferred_events_are_read_in_order_before_one_that_cannot_wait() -> None:
    passed, tail, reader = meter_all([b"data: a\n\n", b"data: b\n\n", b"data: drop\n\n", b"data: c\n\n"], plain=0)
    assert (passed, tail) == ([b"data: a\n\n", b"data: b\n\n", b"", b"data: c\n\n"], b"")
    assert reader.seen == [b"a", b"b", b"drop", b"c"]


def test_chunk_that_ends_inside_an_event_passes_up_to_the_event() -> None:
    passed, tail, reader = meter_all([b"data: a\n\ndata: b\n\ndata:", b" drop\n\n"], plain=0)
    assert (passed, tail) == ([b"data: a\n\ndata: b\n\n", b""], b"")
    assert reader.seen == [b"a", b"b", b"drop"]


def test_size_of_deferred_events_is_limited() -> None:
    reader = Reader(plain=0)
    meter = StreamMeter(reader)
    event = b"data: " + b"x" * 1_000 + b"\n\n"
    for _ in range(200):
        assert meter.feed(event) == event
    assert len(reader.seen) > 100


def test_endless_event_passes_as_it_arrives() -> None:
    meter = StreamMeter(Reader())
    piece = b"data: " + b"x" * 1_000_000
    original = went = 0
    for _ in range(8):
        original += len(piece)
        went += len(meter.feed(piece))
        assert original - went <= MAX_EVENT_BYTES
    assert went + len(meter.close()) == original
