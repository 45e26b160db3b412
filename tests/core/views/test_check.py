"""Test the faults for which a provider would refuse a changed request."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.core.conversation.message import encode
from gateway.core.counting.measure import Wire
from gateway.core.views import new_faults

Json = dict[str, Any]

USER: Json = {"role": "user", "content": "Go."}
SAID = {"role": "assistant", "content": "Done."}
USES: Json = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}
TELLS = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "x"}]}
THINKS: Json = {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "c2ln"}]}
NOTE = {"role": "system", "content": "Be quick."}
REFERENCE = {"type": "item_reference", "id": "rs_1"}
CALL = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "a", "output": "x"}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": []}


ASKS: Json = {"role": "assistant", "content": [{"type": "server_tool_use", "id": "s", "name": "f", "input": {}}]}
SERVES: Json = {"role": "assistant", "content": [{"type": "web_search_tool_result", "tool_use_id": "s", "content": []}]}
CALLER = {"type": "code_execution_20250825", "tool_id": "s"}
CALLED = {"role": "assistant", "content": [{**USES["content"][0], "caller": CALLER}]}
SHELL = {"type": "local_shell_call", "id": "lsh_1", "call_id": "a", "action": {"type": "exec"}}


def shown(name: str) -> Json:
    return {"type": "local_shell_call_output", "id": name, "output": "{}"}


def faults(wire: Wire, *after: Json, before: tuple[Json, ...] = (USER,)) -> list[str]:
    return new_faults(wire, [encode(one) for one in before], [encode(one) for one in after])


@pytest.mark.parametrize(
    ("after", "fault"),
    [
        ([], "the first message is not from the user"),
        ([SAID], "the first message is not from the user"),
        ([USER, USES, USER], "call a without its result"),
        ([USER, USES], "call a without its result"),
        ([USER, SAID, TELLS], "result of a without its call"),
        ([USER, USES, TELLS, SAID, TELLS], "result of a without its call"),
        ([USER, USES, TELLS, {"role": "assistant", "content": []}], "a message (assistant) without content"),
        ([USER, {"role": "assistant", "content": [{"type": "text", "text": " "}]}], "a text block without text"),
        ([NOTE, USER], "a system message in a forbidden place"),
        ([USER, SAID, NOTE, USER], "a system message in a forbidden place"),
        ([USER, NOTE, USER], "a system message in a forbidden place"),
        ([USER, NOTE, NOTE], "a system message in a forbidden place"),
        ([USER, SERVES], "result of s without its call"),
        ([USER, SERVES, ASKS], "result of s without its call"),
        ([USER, ASKS, SERVES, SERVES], "result of s without its call"),
        ([USER, ASKS, USER], "call s without its result"),
        ([USER, CALLED, TELLS], "tool_use without s, which called for it"),
    ],
)
def test_faults_that_anthropic_refuses_are_found(after: list[Json], fault: str) -> None:
    assert fault in faults("messages", *after)


@pytest.mark.parametrize(
    ("after", "fault"),
    [
        ([USER, CALL], "call a without its result"),
        ([USER, OUTPUT], "result of a without its call"),
        ([USER, THOUGHT], "reasoning rs_1 without the item that follows it"),
        ([USER, THOUGHT, USER], "reasoning rs_1 without the item that follows it"),
        ([USER, THOUGHT, OUTPUT, CALL], "reasoning rs_1 without the item that follows it"),
        ([USER, SHELL], "call a without its result"),
        ([USER, shown("a")], "result of a without its call"),
        ([USER, SHELL, shown("lsh_2")], "result of lsh_2 without its call"),
        ([USER, REFERENCE, USER], "reasoning rs_1 without the item that follows it"),
        ([USER, {"id": "rs_1"}], "reasoning rs_1 without the item that follows it"),
    ],
)
def test_faults_that_openai_refuses_are_found(after: list[Json], fault: str) -> None:
    assert fault in faults("responses", *after)


@pytest.mark.parametrize(
    ("wire", "after"),
    [
        ("messages", [USER, USES, TELLS, SAID, USER]),
        ("messages", [USER, THINKS, USES, TELLS, SAID]),
        ("messages", [USER, SAID, USER, USES, TELLS, USER, THINKS, USES, TELLS]),
        ("messages", [USER, NOTE, SAID, USER, NOTE]),
        ("messages", [USER, ASKS, CALLED, TELLS, SERVES, USER]),
        ("messages", [USER, {"role": "assistant", "content": [*ASKS["content"], *SERVES["content"]]}]),
        ("responses", [USER, SHELL, shown("a")]),
        ("responses", [USER, SHELL, shown("lsh_1")]),
        ("responses", [USER, REFERENCE, CALL, OUTPUT]),
        ("responses", [USER, THOUGHT, {"type": "item_reference", "id": "msg_1"}, USER]),
        ("messages", [USER, USER, USES, TELLS]),
        ("responses", [USER, THOUGHT, CALL, OUTPUT]),
        ("responses", [USER, THOUGHT, SAID, USER]),
        ("chat", [SAID]),
        ("completions", []),
    ],
)
def test_valid_requests_have_no_fault(wire: Wire, after: list[Json]) -> None:
    assert faults(wire, *after) == []


NO_THOUGHT = "the last turn does not start with thinking"
NONE_SINCE = "the turn since the last user message without tool results does not start with thinking"


def test_words_next_to_results_are_checked_as_turn_start_and_as_none() -> None:
    reminder = {"type": "text", "text": "<system-reminder>Be quick.</system-reminder>"}
    thinks = {"role": "assistant", "content": [*THINKS["content"], *USES["content"]]}
    mixed = {"role": "user", "content": [*TELLS["content"], reminder]}
    alone = {"role": "user", "content": [reminder]}
    original = (USER, thinks, mixed, USES, TELLS)
    assert faults("messages", USER, alone, USES, TELLS, before=original) == [NONE_SINCE]
    assert faults("messages", *original, before=(USER, SAID, *original)) == []
    again = (USER, thinks, mixed, thinks, TELLS, USES, TELLS)
    assert faults("messages", USER, thinks, mixed, USES, TELLS, before=again) == [NO_THOUGHT]


def test_missing_thinking_is_found() -> None:
    missing = [NO_THOUGHT, NONE_SINCE]
    original = (USER, SAID, USER, THINKS, USES, TELLS, USES, TELLS)
    assert faults("messages", USER, SAID, USER, USES, TELLS, before=original) == missing
    assert faults("messages", USER, SAID, USER, SAID, THINKS, before=original) == missing
    assert faults("messages", USER, THINKS, USES, TELLS, before=original) == []
    assert faults("messages", USER, THINKS, USER, SAID, before=(USER, THINKS, USER, SAID, SAID)) == []
    assert faults("messages", USER, USES, TELLS, before=(USER, SAID, USES, TELLS)) == [], "nobody thinks"


def test_text_before_the_thinking_of_a_turn_is_found() -> None:
    thinks = {"role": "assistant", "content": [*THINKS["content"], *USES["content"]]}
    original = (USER, thinks, TELLS, thinks, TELLS)
    assert faults("messages", USER, thinks, TELLS, SAID, thinks, TELLS, before=original) == [
        "text before the thinking of a turn"
    ]
    assert faults("messages", USER, thinks, TELLS, USER, thinks, TELLS, before=original) == []
    assert faults("messages", USER, SAID, thinks, TELLS, USER, thinks, TELLS, before=original) == [], "an earlier turn"


def test_faults_of_the_original_are_not_reported() -> None:
    assert faults("responses", USER, OUTPUT, before=(USER, OUTPUT, SAID)) == []
    assert faults("messages", SAID, USES, TELLS, before=(SAID, USER, USES, TELLS)) == []
    assert faults("messages", USER, SAID, NOTE, USER, before=(USER, SAID, SAID, NOTE, USER)) == []
    assert faults("responses", USER, OUTPUT, OUTPUT, before=(USER, OUTPUT)) == ["result of a without its call"]
