"""Whether a request turns thinking on, in the fields that the APIs document."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.dialects.reasoning import has_thinking, referenced_tools, turns_thinking_on


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, True),
        ({"thinking": {"type": "adaptive"}}, True),
        ({"thinking": {"type": "between_tools"}}, True),
        ({"thinking": {"type": "disabled"}}, False),
        ({"thinking": None}, None),
        ({"thinking": {"type": []}}, None),
        ({"enable_thinking": True}, True),
        ({"enable_thinking": False}, False),
        ({"enable_thinking": "no"}, None),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"chat_template_kwargs": {"thinking": True}}, True),
        ({"chat_template_kwargs": {"other": 1}}, None),
        ({"chat_template_kwargs": []}, None),
        ({"reasoning_effort": "high"}, True),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": None}, None),
        ({"reasoning": {"effort": "low"}}, True),
        ({"reasoning": {"effort": "none", "summary": "auto"}}, False),
        ({"reasoning": {"enabled": False}}, False),
        ({"reasoning": {"max_tokens": 2000}}, True),
        ({"reasoning": {"summary": "auto"}}, None),
        ({"reasoning": "high"}, None),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "high"}, True),
    ],
)
def test_each_thinking_switch_is_recognized(fields: dict[str, Any], expected: bool | None) -> None:
    assert turns_thinking_on({name: json.dumps(value).encode() for name, value in fields.items()}) is expected


@pytest.mark.parametrize(
    "block",
    [
        {"type": "thinking", "thinking": "", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
        {"role": "assistant", "thinking_blocks": []},
        {"role": "assistant", "reasoning_details": [{"type": "reasoning.encrypted"}]},
        {"type": "reasoning", "encrypted_content": "x"},
    ],
)
def test_thinking_in_messages_differs_from_text_that_mentions_it(block: dict[str, Any]) -> None:
    assert has_thinking(json.dumps([block]).encode())
    assert not has_thinking(json.dumps([{"role": "user", "content": json.dumps(block)}]).encode())


def test_tools_that_messages_refer_to_are_found_anywhere() -> None:
    result = {
        "type": "tool_search_tool_search_result",
        "tool_references": [{"type": "tool_reference", "tool_name": "a"}],
    }
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "tool_reference"},
        {"role": "assistant", "content": [{"type": "tool_search_tool_result", "content": result}]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "content": [{"type": "tool_reference", "tool_name": "b"}]}],
        },
        {"role": "system", "content": [{"type": "tool_removal", "tool": {"type": "tool_reference", "name": "c"}}]},
        {"role": "assistant", "content": [{"type": "tool_use", "name": "d", "input": {}}]},
    ]
    assert referenced_tools(json.dumps(messages).encode()) == {"a", "b", "c"}
    assert referenced_tools(json.dumps(messages[:1]).encode()) == frozenset()


@pytest.mark.parametrize(
    "messages", [b'"tool_reference"', b'{"type":"tool_reference"}', b'[{"type":"tool_reference"', b""]
)
def test_messages_that_are_not_a_list_refer_to_nothing(messages: bytes) -> None:
    assert referenced_tools(messages) == frozenset()
