from __future__ import annotations

import json

import pytest

from gateway.core.conversation.lossless_json import Parsed, as_bare_value, bare_text_of, parse, parse_whole, write
from gateway.core.conversation.message import MAX_DEPTH


@pytest.mark.parametrize(
    "text",
    [
        '{"a":1.0}',
        '{"a":-0,"b":1E+05,"c":0.10,"d":12345678901234567890123456789}',
        f"[{'9' * 10_000}]",
        '["é","\\u0000","\\"","<table 1>"]',
        '{"":{"":[]},"b":[true,false,null]}',
    ],
)
def test_compact_json_is_written_back_unchanged(text: str) -> None:
    parsed = parse(text)
    assert parsed is not None
    assert not parsed.is_lines
    assert write(parsed.value) == text


def test_white_space_and_unnecessary_escapes_are_removed() -> None:
    parsed = parse(' {"a" : [ 1 ,\n 2.50 ] , "b" : "\\u00e9\\/" } \n')
    assert parsed is not None
    assert write(parsed.value) == '{"a":[1,2.50],"b":"é/"}'


@pytest.mark.parametrize(
    "text",
    [
        "",
        "text",
        "12",
        '"a"',
        "null",
        '{"a":1',
        "{'a':1}",
        '{"a":1,"a":2}',
        '{"a":NaN}',
        "[Infinity]",
        "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1),
        "[" * 100_000 + "]" * 100_000,
        '["\ufdd0"]',
        '["\ufdd1"]',
        '["\\uFdD0"]',
        '{"a":1}\n{"b":2',
        '{"a":1}\n[2]',
        '{"a":{"b":1}\n{"c":2}}',
        "[" + "1," * 600_000 + "1]",
    ],
)
def test_invalid_or_lossy_or_huge_json_is_not_parsed(text: str) -> None:
    assert parse(text) is None
    assert parse_whole(text) is None


def test_json_lines_are_parsed() -> None:
    parsed = parse('{"a":1}\r\n\n  \n{"a":[2.0]}\n')
    assert parsed == Parsed([{"a": as_bare_value("1")}, {"a": [as_bare_value("2.0")]}], is_lines=True)


def test_parse_whole_does_not_accept_json_lines() -> None:
    assert parse_whole('{"a":1}\n{"a":2}') is None
    assert parse_whole(' {"a":1.0} ') == {"a": as_bare_value("1.0")}


def test_list_followed_by_a_line_is_not_parsed() -> None:
    assert parse('[{"a":1}]\n[{"a":1}]') is None


def test_nesting_up_to_the_limit_is_parsed() -> None:
    parsed = parse("[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1))
    assert parsed is not None


def test_bare_value_has_no_quotes_and_similar_string_has() -> None:
    assert write({"a": as_bare_value("<x>"), "b": "<x>"}) == '{"a":<x>,"b":"<x>"}'
    assert bare_text_of(as_bare_value("12")) == "12"
    assert bare_text_of("12") is None
    assert bare_text_of("") is None


def test_strings_that_look_like_numbers_stay_strings() -> None:
    value = ["1", "true", "", " ", "[1]", "\\", "\u2028"]
    parsed = parse(json.dumps(value))
    assert parsed is not None
    assert json.loads(write(parsed.value)) == value
