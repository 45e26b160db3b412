from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.core.conversation.message import (
    MAX_DEPTH,
    MAX_VALUES,
    UNKNOWN_ROLE,
    Hashed,
    decode,
    digest,
    encode,
    has_too_many_values,
    hashed,
    key_of,
    keys_of,
    outline_of,
    parse_bytes,
    text_of,
    text_parts,
    with_changes,
    without_cache_marks,
)

MARK = b'"cache_control":{"type":"ephemeral","ttl":"1h"}'


def key(raw: bytes) -> bytes:
    return keys_of([raw])[0]


def is_marked(raw: bytes) -> bool:
    assert key_of(raw) == (key(raw), without_cache_marks(raw) is not raw)
    return key_of(raw)[1]


@pytest.mark.parametrize(
    "marked",
    [
        b'{"role":"user","content":"a",' + MARK + b"}",
        b'{"role":"user",' + MARK + b',"content":"a"}',
        b"{" + MARK + b',"role":"user","content":"a"}',
        b'{"role":"user","content":"a" , ' + MARK.replace(b":", b" : ") + b"}",
        b'{"role":"user","content":"a","cache_control":{}}',
    ],
)
def test_a_cache_mark_does_not_change_the_key(marked: bytes) -> None:
    bare = b'{"role":"user","content":"a"}'
    assert key(marked) in (key(bare), key(bare.replace(b"}", b" }")))
    assert (is_marked(bare), is_marked(marked)) == (False, True)


def test_hashes_are_computed_on_first_use_or_passed_in() -> None:
    bare, marked = b'{"role":"user","content":"a"}', b'{"role":"user","content":"a",' + MARK + b"}"
    found = Hashed([bare, marked])
    assert found.raws == (bare, marked)
    assert found.keys == (key(bare), key(bare))
    assert found.marked == frozenset({1})
    assert found.digests == (digest(bare), digest(marked))
    assert hashed(found) is found
    assert hashed([bare, marked]).keys == found.keys
    given_to = Hashed([bare, marked], [b"1", b"2"], marked=[1])
    assert given_to.keys == (b"1", b"2")
    assert given_to.digests == (b"1", digest(marked))
    assert Hashed([bare, bare], [b"1", b"2"], unmarked=2).digests == (b"1", b"2")


@pytest.mark.parametrize(
    ("content", "is_same"),
    [
        ([{"type": "text", "text": "a"}], True),
        ([{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}], True),
        ([{"type": "text", "text": "b"}], False),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": ""}], False),
        ([{"type": "text", "text": "a", "citations": []}], False),
        ([{"type": "input_text", "text": "a"}], False),
        ([{"type": "text", "text": 5}], False),
        (["a"], False),
        ([], False),
        (None, False),
    ],
)
def test_single_text_has_one_identity_as_list_and_as_string(content: Any, is_same: bool) -> None:
    said = {"role": "user", "content": "a", "name": "n"}
    as_list = outline_of(json.dumps({**said, "content": content}).encode())
    assert (as_list.identity == outline_of(encode(said)).identity) is is_same
    assert as_list.identity != outline_of(encode({**said, "role": "assistant"})).identity


@pytest.mark.parametrize("raw", [b"5", b"{", b'{"role":"user","content":[1]}', b'{"role":"user","content":"\\ud800"}'])
def test_unparsable_message_has_its_bytes_as_identity(raw: bytes) -> None:
    assert outline_of(raw).identity not in (b"", outline_of(raw + b" ").identity)


@pytest.mark.parametrize("style", [{}, {"separators": (",", ":")}, {"ensure_ascii": False}, {"indent": 1}])
def test_message_has_one_identity_with_and_without_thinking(style: Any) -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    left = [{"type": "text", "text": "caf\u00e9"}, {"type": "tool_use", "id": "1", "name": "f", "input": {"n": 1.0}}]
    with_thinking = json.dumps({"role": "assistant", "content": [thought, *left]}, **style).encode()
    without = json.dumps({"role": "assistant", "content": left}, **style).encode()
    assert outline_of(with_thinking).identity == outline_of(without).identity


def test_openai_cache_mark_is_recognized() -> None:
    mark = b'"prompt_cache_breakpoint":{"mode":"explicit","ttl":"30m"}'
    part = b'{"role":"user","content":[{"type":"text","text":"a"%b}]}'
    bare, marked, both = part % b"", part % (b"," + mark), part % (b"," + mark + b"," + MARK)
    assert key(bare) == key(marked) == key(both)
    assert (is_marked(bare), is_marked(marked)) == (False, True)
    assert not outline_of(marked).sealed
    assert key(encode({"content": "a" + marked.decode()})) != key(encode({"content": "a" + bare.decode()}))


def test_message_with_only_a_mark_has_the_key_of_an_empty_one() -> None:
    assert key(b"{" + MARK + b"}") == key(b"{}")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        # inside a text, so it is no field
        (encode({"content": 'a,"cache_control":{"a":1}'}), encode({"content": "a"})),
        (encode({"content": '{"cache_control":{"a":1},'}), encode({"content": "{"})),
        (encode({'a,"cache_control': {}, "b": 1}), encode({"a": {}, "b": 1})),
        # not flat
        (b'{"a":1,"cache_control":{"b":{"c":1}}}', b'{"a":1}'),
        (b'{"a":1,"cache_control":null}', b'{"a":1}'),
        (b'{"a":1,"cache_control":{"b":"}"},"c":1}', b'{"a":1,"c":1}'),
    ],
)
def test_text_that_looks_like_a_mark_is_kept(one: bytes, other: bytes) -> None:
    assert key(one) != key(other)
    assert not is_marked(one)


@given(
    st.recursive(
        st.text(st.sampled_from('a,:{}"\\'), max_size=8) | st.integers(),
        lambda inner: (
            st.dictionaries(st.sampled_from(["cache_control", "a", 'a,"cache_control"']), inner, max_size=3)
            | st.lists(inner, max_size=3)
        ),
    )
)
@settings(max_examples=300, deadline=None)
def test_removing_marks_keeps_valid_json_and_all_other_fields(value: Any) -> None:
    def unmarked(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: unmarked(v) for k, v in value.items() if k != "cache_control"}
        return [unmarked(inner) for inner in value] if isinstance(value, list) else value

    raw = json.dumps(value).encode()
    if is_marked(raw):
        assert raw != json.dumps(unmarked(value)).encode()
    if unmarked(value) == value:
        assert not is_marked(raw)


#: the same rule as one pattern, which is too slow for long conversations
_FLAT = rb'"cache_control"\s*:\s*\{(?:[^{}"\\]|"[^"\\{}]*")*\}'
PATTERN = re.compile(rb",\s*" + _FLAT + rb"|(?<=\{)(?:\s*" + _FLAT + rb"\s*,?)+")


@given(
    st.lists(
        st.sampled_from([MARK, MARK, b'"cache_control"', b",", b"{", b"}", b" ", b"\n", b'"a":1', b"\\"]), max_size=12
    )
)
@settings(max_examples=500, deadline=None)
@example([b"{", MARK, b",", MARK, b",", MARK, b"}"])
def test_each_mark_is_removed_with_one_comma_in_any_bytes(pieces: list[bytes]) -> None:
    raw = b"".join(pieces)
    assert without_cache_marks(raw) == PATTERN.sub(b"", raw)
    assert (without_cache_marks(raw) is raw) == (without_cache_marks(raw) == raw)


@given(st.lists(st.sampled_from([MARK, MARK, b'"a":1', b'"b":{%s}' % MARK, b'"c":{"cache_control":{"d":{}}}'])))
def test_removing_duplicate_marks_leaves_none(members: list[bytes]) -> None:
    found = without_cache_marks(b"{" + b" , ".join(members) + b"}")
    assert MARK not in found
    assert without_cache_marks(found) is found
    assert isinstance(json.loads(found), dict)


NESTED = b'{"cache_control":%b}'


@given(
    st.recursive(
        st.sampled_from([b"1", b'"a"', b'"}"', b'"\\"{"', b"{}", b'{"ttl":"1h"}']),
        lambda inner: (
            st.builds(
                lambda members: b"{" + b" , ".join(b'"%b":%b' % member for member in members) + b"}",
                st.lists(
                    st.tuples(st.sampled_from([b"a", b"cache_control", b"prompt_cache_breakpoint"]), inner), max_size=3
                ),
            )
            | st.lists(inner, max_size=2).map(lambda values: b"[" + b",".join(values) + b"]")
        ),
    )
)
@settings(max_examples=300, deadline=None)
@example(NESTED % (NESTED % (NESTED % b'{"a":1}')))
@example(b'{"cache_control":{"prompt_cache_breakpoint":{}},"prompt_cache_breakpoint":{"cache_control":{}}}')
def test_removing_nested_marks_leaves_none(raw: bytes) -> None:
    found = without_cache_marks(raw)
    assert without_cache_marks(found) is found
    json.loads(found)


@pytest.mark.parametrize("number", [b"1e999", b"9" * 5000, b"NaN", b"[" * 2000 + b"]" * 2000])
def test_mark_that_cannot_be_written_again_is_kept(number: bytes) -> None:
    assert not is_marked(b'{"role":"user","content":"a","cache_control":{"a":%b}}' % number)


DEEP = b"[" * (MAX_DEPTH + 5) + b"]" * (MAX_DEPTH + 5)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"role":"user","content":"a","content":"b"}',
        b'{"role":"user","content":"a","x":NaN}',
        b'{"role":"user","content":"a","x":-Infinity}',
        b'{"role":"user","content":"a","x":1e999}',
        b'{"role":"user","content":"a","x":' + b"7" * 5000 + b"}",
        b'{"role":"user","content":"a\\ud800"}',
        b'{"role":"user","content":"a","x":' + DEEP + b"}",
        b'{"role":"user","tool_calls":"none","content":"a"}',
    ],
)
def test_message_that_cannot_be_written_without_loss_is_sealed(raw: bytes) -> None:
    found = outline_of(raw)
    assert (found.role, found.sealed) == ("user", True)


CALL: dict[str, Any] = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("message", "call", "is_sealed"),
    [
        ({}, {}, False),
        ({}, {"extra_content": {"google": {"thought_signature": "c2ln"}}}, True),
        ({}, {"thought_signature": "c2ln"}, True),
        ({}, {"provider_specific_fields": {"thought_signature": "c2ln"}}, True),
        ({}, {"function": {**CALL["function"], "provider_specific_fields": {"thought_signature": "c2ln"}}}, True),
        ({}, {"id": "c1__thought__c2ln"}, True),
        ({"extra_content": {"google": {"thought_signature": "c2ln"}}}, {}, True),
        ({"provider_specific_fields": {"thought_signatures": ["c2ln"]}}, {}, True),
        ({"reasoning_details": [{"type": "reasoning.encrypted", "data": "c2ln"}]}, {}, True),
        ({"provider_specific_fields": {"refusal": None}, "extra_content": None}, {}, False),
        ({"reasoning_content": "I look."}, {}, False),
    ],
)
def test_signed_call_is_sealed(message: dict[str, Any], call: dict[str, Any], *, is_sealed: bool) -> None:
    assert outline_of(
        encode({"role": "assistant", "content": None, "tool_calls": [{**CALL, **call}], **message})
    ).sealed is (is_sealed)


def test_escaped_pairs_and_plain_numbers_are_not_sealed() -> None:
    assert not outline_of(b'{"role":"user","content":"\\ud83d\\ude00","x":[1.5,12345678901234567890]}').sealed


@pytest.mark.parametrize("raw", [b"", b"{", b"7", b"[]", b"null", b"\xff{}", b'{"a":"\xed\xa0\x80"}', b"[" * 100_000])
def test_bytes_that_are_no_message_have_an_unknown_role_and_are_sealed(raw: bytes) -> None:
    found = outline_of(raw)
    assert (found.role, found.sealed, found.is_known) == (UNKNOWN_ROLE, True, False)
    assert text_of(raw) == ""


@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
@settings(max_examples=300)
def test_any_bytes_can_be_parsed(raw: bytes) -> None:
    assert outline_of(raw).sealed == parse_bytes(raw)[1] or not outline_of(raw).is_known
    assert len(keys_of([raw])) == 1


odd = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["id", "function", "name", "arguments", "text", "type"]), inner, max_size=3)
    ),
    max_leaves=6,
)
fields = ["role", "content", "tool_calls", "tool_call_id", "function_call", "name", "cache_control"]


def test_arguments_with_too_many_values_are_not_parsed() -> None:
    """All other threads wait while JSON is parsed."""
    many = "[" + "[]," * (MAX_VALUES // 2) + "broken"
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": many}}
    assert has_too_many_values(many)
    assert outline_of(encode({"role": "assistant", "content": "hm", "tool_calls": [call]})).faults == ()
    assert not has_too_many_values("x" * (MAX_VALUES + 1))


@given(
    st.dictionaries(
        st.sampled_from(fields), odd | st.sampled_from(["user", "tool", "assistant", "function"]), max_size=5
    )
)
@example({"role": "user", "content": [{"type": [], "text": "a part of no type"}]})
@settings(max_examples=300)
def test_any_object_can_be_parsed(message: dict[str, Any]) -> None:
    found = outline_of(json.dumps(message).encode())
    assert found.role == str(message.get("role"))


def test_outline_describes_a_message() -> None:
    calls = [
        {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}},
        {"id": "b", "type": "function", "function": {"name": "see", "arguments": "{"}},
    ]
    found = outline_of(encode({"role": "assistant", "content": "hm", "tool_calls": calls}))
    assert (found.calls, found.names, found.length) == (("a", "b"), (("a", "look"), ("b", "see")), 2)
    assert found.faults == ("arguments of call b are not JSON",)
    old = outline_of(
        encode({"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": "{}"}})
    )
    assert (old.calls, old.faults, old.sealed) == (("function:look",), (), False)
    assert outline_of(encode({"role": "tool", "tool_call_id": "a", "content": "x"})).result_of == "a"
    assert outline_of(encode({"role": "function", "name": "look", "content": "x"})).result_of == "function:look"
    assert outline_of(encode({"role": "user", "content": None})).faults == ("a user message without content",)
    same = [
        outline_of(encode({"role": role, "content": text})).text_key
        for role, text in (("user", "a"), ("tool", "a"), ("tool", "b"))
    ]
    assert same[0] == same[1] != same[2]


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({"thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "s"}]}, True),
        ({"thinking_blocks": [{"type": "redacted_thinking", "data": "x"}]}, True),
        ({"reasoning_details": [{"type": "reasoning.text", "text": "hm", "signature": "s"}]}, True),
        ({"reasoning_details": [{"type": "reasoning.encrypted", "data": "x", "format": "anthropic-claude-v1"}]}, True),
        ({"reasoning_details": [{"type": "reasoning.encrypted", "data": "x", "format": "openai-responses-v1"}]}, False),
        ({"reasoning_details": [{"type": "reasoning.text", "text": "hm", "signature": None, "format": None}]}, False),
        ({"thinking_blocks": [], "reasoning_details": ["hm"]}, False),
        ({"thinking_blocks": True, "reasoning_details": True}, False),
        ({"reasoning_content": "hm"}, False),
    ],
)
def test_claude_thinking_is_recognized_in_the_fields_of_each_host(fields: dict[str, Any], thinks: bool) -> None:
    assert outline_of(encode({"role": "assistant", "content": "so", **fields})).thinks == thinks
    assert not outline_of(encode({"role": "user", "content": "so", **fields})).thinks


def test_invalid_contents_have_no_text() -> None:
    assert [text_parts(odd) for odd in (None, 7, {"text": "x"}, [7, {"text": 7}])] == [""] * 4
    assert text_of(encode({"content": [{"type": "text", "text": "a"}, {"text": "b"}]})) == "ab"


def test_encoded_messages_are_compact_and_half_a_surrogate_pair_becomes_a_question_mark() -> None:
    assert encode({"a": [1, "\u00e9"]}) == '{"a":[1,"\u00e9"]}'.encode()
    assert encode({"a": "x\ud800"}) == b'{"a":"x?"}'
    assert decode(encode({"a": [1, "\u00e9"]})) == {"a": [1, "\u00e9"]}


def test_messages_are_replaced_and_empty_bytes_are_not_dropped() -> None:
    assert with_changes([b"a", b"", b"c", b"d"], {0: b"A", 2: None}) == (b"A", b"", b"d")
