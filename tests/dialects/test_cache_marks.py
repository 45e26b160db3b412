"""Cache marks that the gateway sets: where, how many, and that nothing else of the request changes."""

from __future__ import annotations

import copy
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.conversation.message import without_cache_marks
from gateway.dialects.cache_marks import may_have_marks, with_cache_marks

MARK = {"type": "ephemeral"}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
TEXT = {"type": "text", "text": "look"}
CALL = {"type": "tool_use", "id": "t1", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "found"}
THOUGHT = {"type": "thinking", "thinking": "so", "signature": "s"}


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def reply(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def marked(body: dict[str, Any], *, wire: Any = "messages", keep_strings: bool = False) -> dict[str, Any]:
    """Return the body with marks, as the provider reads it."""
    fields = {name: msgspec.Raw(json.dumps(value).encode()) for name, value in body.items()}
    return body | {
        name: json.loads(bytes(raw)) for name, raw in with_cache_marks(fields, wire, keep_strings=keep_strings).items()
    }


def places(value: Any, above: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Return where the marks are."""
    if isinstance(value, dict):
        own = [above] if value.get("cache_control") == MARK else []
        return own + [place for key, one in value.items() for place in places(one, (*above, key))]
    if isinstance(value, list):
        return [place for index, one in enumerate(value) for place in places(one, (*above, index))]
    return []


LOOP = [user(TEXT), reply(THOUGHT, CALL), user(RESULT), reply(CALL), user(RESULT, TEXT)]


def test_an_agent_loop_has_marks_at_the_end_of_the_system_prompt_and_of_the_two_newest_user_messages() -> None:
    body = {"system": [TEXT, TEXT], "tools": [TOOL], "messages": LOOP}
    assert places(marked(body)) == [("system", 1), ("messages", 2, "content", 0), ("messages", 4, "content", 1)]


def test_a_mark_of_the_previous_call_stays_where_it_was() -> None:
    before = places(marked({"tools": [TOOL], "messages": LOOP[:3]}))
    after = places(marked({"tools": [TOOL], "messages": LOOP}))
    assert before[-1] == ("messages", 2, "content", 0)
    assert before[-1] in after


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        pytest.param({"messages": [user(TEXT)]}, [], id="a single question"),
        pytest.param({"system": "Be brief.", "messages": [user(TEXT)]}, [("system", 0)], id="only the system prompt"),
        pytest.param(
            {"tools": [TOOL, {**TOOL, "defer_loading": True}], "messages": [user(TEXT)]},
            [("tools", 0), ("messages", 0, "content", 0)],
            id="the last tool that is loaded",
        ),
        pytest.param(
            {"tools": [], "system": [{"type": "text", "text": " "}], "messages": [user(TEXT)]}, [], id="empty texts"
        ),
        pytest.param(
            {"messages": [{"role": "user", "content": "a"}, reply(TEXT), {"role": "user", "content": "b"}]},
            [("messages", 0, "content", 0), ("messages", 2, "content", 0)],
            id="strings",
        ),
        pytest.param(
            {"messages": [user(TEXT), reply(TEXT), user({"type": "odd"})]},
            [("messages", 0, "content", 0)],
            id="a block that may have none",
        ),
        pytest.param({"system": [TEXT | {"cache_control": MARK}], "messages": LOOP}, [("system", 0)], id="its own"),
        pytest.param({"messages": "odd", "system": 7}, [], id="not readable"),
        pytest.param({}, [], id="nothing"),
    ],
)
def test_marks_are_set_only_where_they_are_of_use(body: dict[str, Any], expected: list[tuple[str | int, ...]]) -> None:
    assert places(marked(body)) == expected


def test_strings_stay_strings_for_models_that_bind_thinking() -> None:
    body = {"system": "Be brief.", "tools": [TOOL], "messages": [{"role": "user", "content": "a"}, *LOOP[1:3]]}
    got = marked(body, keep_strings=True)
    assert places(got) == [("tools", 0), ("messages", 2, "content", 0)]
    assert (got["system"], got["messages"][0]) == (body["system"], body["messages"][0])


def test_chat_calls_have_marks_on_texts() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "tool", "tool_call_id": "t1", "content": "found"},
    ]
    got = marked({"messages": messages}, wire="chat")
    assert places(got) == [("messages", 0, "content", 0), ("messages", 1, "content", 0), ("messages", 3, "content", 0)]
    assert got["messages"][3]["content"][0]["text"] == "found"


@pytest.mark.parametrize(
    ("wire", "model", "in_chat", "expected"),
    [
        ("messages", "claude-opus-5-5", False, True),
        ("messages", "eu.anthropic.Claude-x", False, True),
        ("messages", "deepseek-v4", False, False),
        ("chat", "anthropic/claude-opus-5.5", True, True),
        ("chat", "claude-opus-5-5", False, False),
        ("responses", "claude-opus-5-5", True, False),
    ],
)
def test_marks_are_for_claude_models(wire: Any, model: str, in_chat: bool, expected: bool) -> None:
    assert may_have_marks(wire, model, in_chat=in_chat) is expected


BLOCKS = st.sampled_from([TEXT, CALL, RESULT, THOUGHT, {"type": "text", "text": ""}, {"type": 7}])
MESSAGES = st.builds(
    lambda role, content: {"role": role, "content": content},
    st.sampled_from(["user", "assistant", "system"]),
    st.text(max_size=3) | st.lists(BLOCKS, max_size=3),
)


def flat(body: dict[str, Any]) -> Any:
    """Return a body without marks, each text of its own as a list of blocks."""
    body = json.loads(without_cache_marks(json.dumps(body).encode()))
    for message in body["messages"]:
        if isinstance(message["content"], str):
            message["content"] = [{"type": "text", "text": message["content"]}]
    return body


@given(st.lists(MESSAGES, max_size=7), st.booleans(), st.booleans())
def test_only_marks_change_and_there_are_at_most_three(
    messages: list[dict[str, Any]],
    has_tools: bool,
    keep_strings: bool,
) -> None:
    body: dict[str, Any] = {"messages": copy.deepcopy(messages)} | ({"tools": [TOOL]} if has_tools else {})
    got = marked(body, keep_strings=keep_strings)
    assert len(places(got)) <= 3
    assert flat(got) == flat(body)
