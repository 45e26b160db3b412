from __future__ import annotations

import json
from collections.abc import Hashable
from itertools import product
from typing import Any

import pytest

from gateway.core.counting.measure import Wire
from gateway.core.counting.request import RequestParts, decode_piece, key_of_fields, read_request, wire_of

SCHEMA = {"type": "object"}


@pytest.mark.parametrize(
    ("wire", "choice", "forced", "name"),
    [
        ("chat", "auto", False, ""),
        ("chat", "none", False, ""),
        ("chat", "required", True, ""),
        ("chat", {"type": "function", "function": {"name": "look"}}, True, "look"),
        ("chat", {"name": "look"}, True, "look"),
        ("responses", {"type": "function", "name": "look"}, True, "look"),
        ("responses", {"type": "allowed_tools", "mode": "required", "tools": []}, True, ""),
        ("responses", {"type": "allowed_tools", "mode": "auto", "tools": []}, False, ""),
        ("messages", {"type": "any"}, True, ""),
        ("messages", {"type": "tool", "name": "look"}, True, "look"),
        ("messages", {"type": "auto"}, False, ""),
        ("chat", 3, False, ""),
    ],
)
def test_forced_tool_choice_is_recognized(wire: Wire, choice: Any, forced: bool, name: str) -> None:
    found = read_request(wire, {"tool_choice": choice})
    assert (found.forced, found.forced_name) == (forced, name)


@pytest.mark.parametrize(
    ("wire", "body"),
    [
        ("chat", {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}),
        ("responses", {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}}),
        ("messages", {"output_config": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}}),
        ("messages", {"output_format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}),
    ],
)
def test_response_schema_is_found(wire: Wire, body: dict[str, Any]) -> None:
    for form in (body, {name: json.dumps(value).encode() for name, value in body.items()}):
        found = read_request(wire, form)
        assert (found.schema, found.schema_name) == (SCHEMA, "n")


@pytest.mark.parametrize("body", [{"response_format": {"type": "json_object"}}, {"response_format": 3}, {}])
def test_request_without_schema_has_none(body: dict[str, Any]) -> None:
    assert read_request("chat", body).schema is None


@pytest.mark.parametrize(
    ("body", "thinks"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 1}}, True),
        ({"thinking": {"type": "adaptive"}}, True),
        ({"thinking": {"type": "disabled"}}, False),
        ({"reasoning": {"enabled": True}}, True),
        ({"reasoning": {"effort": "high"}}, True),
        ({"reasoning": {"effort": "none"}}, False),
        ({"reasoning": {"enabled": False, "max_tokens": 3}}, False),
        ({"reasoning": {"summary": "auto"}}, False),
        ({"reasoning": {"summary": "auto"}, "thinking": {"type": "enabled", "budget_tokens": 1}}, True),
        ({}, False),
    ],
)
def test_thinking_is_recognized_in_both_formats(body: dict[str, Any], thinks: bool) -> None:
    assert read_request("chat", body).thinking is thinks


def test_content_fetched_by_the_provider_is_marked() -> None:
    assert read_request("messages", {"mcp_servers": [{}]}).server
    assert not read_request("messages", {}).server


def test_messages_are_read_from_the_field_of_the_format() -> None:
    assert read_request("chat", {"messages": [1, 2]}).messages == [1, 2]
    assert read_request("responses", {"input": "text"}).messages == ("text",)
    assert read_request("responses", {"input": [1], "instructions": "be kind"}).system == "be kind"
    assert read_request("responses", {"input": b' "text"'}).messages == (b' "text"',)
    assert read_request("completions", {"prompt": ["a", "b"]}).messages == (["a", "b"],)
    assert read_request("completions", {"prompt": b"[1, 2]"}).messages == (b"[1, 2]",)
    assert read_request("messages", {"system": "be kind"}).system == "be kind"
    assert read_request("chat", {"messages": b"[1]"}).messages == [1]
    assert read_request("chat", {"messages": b"broken"}, messages=[b"{}"]).messages == [b"{}"]


def test_model_of_the_provider_replaces_the_one_in_the_body() -> None:
    assert read_request("chat", {"model": b'"mine"'}).model == "mine"
    assert read_request("chat", {"model": "mine"}, model="theirs", provider="p").model == "theirs"
    assert read_request("chat", {"model": 3}).model == ""


@pytest.mark.parametrize(
    ("piece", "value"),
    [(b'{"a":1}', {"a": 1}), (memoryview(b"3"), 3), (b"{", "{"), (b"\xff", "\ufffd"), ("text", "text"), (None, None)],
)
def test_bytes_are_decoded(piece: Any, value: object) -> None:
    assert decode_piece(piece) == value


def test_bytes_nested_too_deep_become_text() -> None:
    assert decode_piece(b"[" * 200_000).startswith("[[[")


@pytest.mark.parametrize(
    ("body", "wire"),
    [
        ({"prompt": "x"}, "completions"),
        ({"input": "x"}, "responses"),
        ({}, "responses"),
        ({"messages": [], "model": "gpt-4o"}, "chat"),
        ({"messages": [], "system": "x"}, "messages"),
        ({"messages": [], "tools": [{"name": "a", "input_schema": {}}]}, "messages"),
        ({"messages": [], "tools": [{"function": {"name": "a"}}], "model": "claude-3", "max_tokens": 3}, "chat"),
        ({"messages": [], "model": "claude-3", "max_tokens": 3}, "messages"),
        ({"messages": [], "model": "anthropic/claude-3", "max_tokens": 3}, "chat"),
    ],
)
def test_format_of_a_body_is_guessed(body: dict[str, Any], wire: Wire) -> None:
    assert wire_of(body) == wire


#: fields and values in which bodies may differ
FIELDS: list[tuple[str, bytes]] = [
    ("tools", b'[{"name":"a"}]'),
    ("tools", b'[{"name":"b"}]'),
    ("tools", b"null"),
    ("tool_choice", b'"required"'),
    ("tool_choice", b'"auto"'),
    ("tool_choice", b"null"),
    ("function_call", b'{"name":"a"}'),
    ("function_call", b'{"name":"b"}'),
    ("system", b'"be kind"'),
    ("instructions", b'"%s"' % (b"be kind " * 99)),
    ("response_format", b'{"json_schema":{"name":"a","schema":{"b":"%s"}}}' % (b"c" * 600)),
    ("response_format", b'{"type":"%s"}' % (b"c" * 600)),
    ("text", b'{"format":{"schema":{}}}'),
    ("output_format", b'{"schema":{}}'),
    ("thinking", b'{"type":"enabled"}'),
    ("thinking", b'{"type":"disabled"}'),
    ("reasoning", b'{"effort":"low"}'),
    ("reasoning", b'{"effort":"none"}'),
    ("previous_response_id", b'"a"'),
    ("previous_response_id", b"null"),
    ("prompt", b'{"id":"a"}'),
    ("prompt_cache_key", b'"a"'),
    ("prompt_cache_key", b'"b"'),
    ("prediction", b'"%s"' % (b"a" * 505)),
    ("prediction", b'"%s"' % (b"b" * 512)),
    ("metadata", b'{"a":"b"}'),
    ("user", b'"%s"' % (b"a" * 600)),
]


@pytest.mark.parametrize("wire", ["chat", "messages", "responses"])
def test_bodies_with_one_key_are_read_as_the_same_request(wire: Wire) -> None:
    seen: dict[Hashable, RequestParts] = {}
    for fields in product(FIELDS, repeat=3):
        request = read_request(wire, dict(fields), messages=())
        assert seen.setdefault(key_of_fields(wire, dict(fields)), request) == request
    assert len(seen) > 1_000


def test_unread_fields_do_not_change_the_key() -> None:
    shared = {"tools": b"[]", "system": b'"%s"' % (b"be kind " * 99)}
    turns = [
        {
            **shared,
            "metadata": b'{"turn":%d}' % turn,
            "previous_response_id": b'"%d"' % turn,
            "messages": b"[%d]" % turn,
        }
        for turn in range(2)
    ]
    assert key_of_fields("messages", turns[0]) == key_of_fields("messages", turns[1])
    assert key_of_fields("messages", turns[0]) != key_of_fields("messages", {**turns[0], "tools": b"[1]"})


LONG = "word " * 200


@pytest.mark.parametrize(
    ("wire", "name", "value"),
    [
        ("completions", "suffix", LONG),
        ("completions", "messages", [{"role": "user", "content": LONG}]),
        ("chat", "prediction", {"type": "content", "content": LONG}),
        ("chat", "documents", [{"title": "t", "text": LONG}]),
        ("chat", "chat_template", LONG),
        ("chat", "system", LONG),
        ("chat", "response_format", {"type": "json_object", "schema": LONG}),
        ("responses", "prompt", {"id": "x", "variables": {"a": LONG}}),
        ("responses", "messages", [LONG]),
        ("messages", "documents", [{"text": LONG}]),
    ],
)
def test_long_unknown_field_is_returned(wire: Wire, name: str, value: Any) -> None:
    for form in (value, json.dumps(value).encode()):
        assert form in read_request(wire, {"model": "m", name: form}).others


def test_many_short_unknown_fields_are_returned() -> None:
    assert read_request("chat", {f"field_{number}": b'"one two three"' for number in range(100)}).others
    assert not read_request("chat", {"temperature": b"1", "top_p": b"0.5", "prompt_cache_key": b'"one two"'}).others


@pytest.mark.parametrize(
    ("wire", "body"),
    [
        ("chat", {"messages": [LONG], "tools": [LONG], "functions": [LONG], "metadata": {"a": LONG}, "stop": [LONG]}),
        ("chat", {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"d": LONG}}}}),
        ("chat", {"logit_bias": {str(number): 1 for number in range(300)}, "tool_choice": {"tools": [LONG]}}),
        ("responses", {"input": LONG, "instructions": LONG, "text": {"format": {"name": "n", "schema": {"d": LONG}}}}),
        ("messages", {"messages": [LONG], "system": LONG, "output_format": {"schema": {"d": LONG}}}),
        ("completions", {"prompt": LONG}),
    ],
)
def test_known_fields_are_not_returned_as_unknown(wire: Wire, body: dict[str, Any]) -> None:
    assert read_request(wire, body).others == ()
