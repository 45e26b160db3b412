from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.dialects.tool_changes import changes_tools, refuses_changes, withdrawn_by_compaction


def change(kind: str, name: str = "read") -> dict[str, Any]:
    return {"type": f"tool_{kind}", "tool": {"type": "tool_reference", "name": name}}


COMPACTION = {"type": "compaction", "content": "so far", "tool_changes": [
    change("removal"), change("removal", "run"), change("addition", "run"), change("addition", "new"),
]}  # fmt: skip


@pytest.mark.parametrize(
    ("message", "is_change"),
    [
        ({"role": "system", "content": [change("removal")]}, True),
        ({"role": "system", "content": [{"type": "text", "text": "x"}, change("addition")]}, True),
        ({"role": "user", "content": [{"type": "mid_conv_system", "content": [change("removal")]}]}, True),
        ({"role": "system", "content": 'a "tool_removal"'}, False),
        ({"role": "assistant", "content": [COMPACTION]}, False),
        ({"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": change("removal")}]}, False),
        ({"role": "user", "content": "hi"}, False),
    ],
)
def test_client_changes_tools_with_system_messages(message: dict[str, Any], *, is_change: bool) -> None:
    assert changes_tools(json.dumps([{"role": "user", "content": "hi"}, message]).encode()) is is_change


def test_newest_compaction_lists_the_withdrawn_tools() -> None:
    older = {**COMPACTION, "tool_changes": [change("removal", "old")]}
    messages = [{"role": "assistant", "content": [block]} for block in (older, COMPACTION)]
    raws = [json.dumps(one).encode() for one in (*messages, {"role": "user", "content": "go"})]
    assert withdrawn_by_compaction(raws) == {"read"}
    assert withdrawn_by_compaction(raws[2:]) == frozenset()


@pytest.mark.parametrize(
    ("text", "is_refused"),
    [
        ("messages.1.content.0.type: Input should be 'text'", True),
        ("messages.1.role: Input should be 'user' or 'assistant'", True),
        ("`tool_removal` is not supported", True),
        ('Unexpected role "system"', True),
        ("Unexpected value(s) `mid-conversation-tool-changes-2026-07-01` for the `anthropic-beta` header", True),
        ("messages.2.content.0: Invalid `signature` in `thinking` block, first at `messages.1.content.0`.", False),
        ("messages.1: a system message must follow a user message", False),
        ("messages.0.content: Input should be a valid string", False),
        ("max_tokens: too many", False),
    ],
)
def test_an_error_is_about_tool_changes_if_it_names_them_or_their_place(text: str, *, is_refused: bool) -> None:
    sent = [{"role": "user", "content": "hi"}, {"role": "system", "content": [change("removal")]}]
    error = {"type": "error", "error": {"type": "invalid_request_error", "message": text}}
    assert refuses_changes(json.dumps(error).encode(), [json.dumps(one).encode() for one in sent]) is is_refused
