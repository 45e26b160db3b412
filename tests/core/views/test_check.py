"""What a provider would refuse in what was changed."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.core.counting.measure import Wire
from gateway.core.message import encode
from gateway.core.views import new_faults

Json = dict[str, Any]

USER = {"role": "user", "content": "Go."}
SAID = {"role": "assistant", "content": "Done."}
USES = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}
TELLS = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "x"}]}
THINKS = {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "c2ln"}]}
NOTE = {"role": "system", "content": "Be quick."}
REFERENCE = {"type": "item_reference", "id": "rs_1"}
CALL = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "a", "output": "x"}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": []}


def faults(wire: Wire, *after: Json, before: tuple[Json, ...] = (USER,)) -> list[str]:
    return new_faults(wire, [encode(one) for one in before], [encode(one) for one in after])


@pytest.mark.parametrize(
    ("after", "fault"),
    [
        ([], "the first message is not the user's"),
        ([SAID], "the first message is not the user's"),
        ([USER, USES, USER], "call a without its result"),
        ([USER, USES], "call a without its result"),
        ([USER, SAID, TELLS], "result of a without its call"),
        ([USER, USES, TELLS, SAID, TELLS], "result of a without its call"),
        ([USER, USES, TELLS, {"role": "assistant", "content": []}], "a message (assistant) without content"),
        ([USER, {"role": "assistant", "content": [{"type": "text", "text": " "}]}], "a text block without text"),
        ([NOTE, USER], "a system message in another place"),
        ([USER, SAID, NOTE, USER], "a system message in another place"),
        ([USER, NOTE, USER], "a system message in another place"),
        ([USER, NOTE, NOTE], "a system message in another place"),
    ],
)
def test_what_anthropic_refuses_is_found(after: list[Json], fault: str) -> None:
    assert fault in faults("messages", *after)


@pytest.mark.parametrize(
    ("after", "fault"),
    [
        ([USER, CALL], "call a without its result"),
        ([USER, OUTPUT], "result of a without its call"),
        ([USER, THOUGHT], "reasoning rs_1 without what came of it"),
        ([USER, THOUGHT, USER], "reasoning rs_1 without what came of it"),
        ([USER, THOUGHT, OUTPUT, CALL], "reasoning rs_1 without what came of it"),
        ([USER, REFERENCE, USER], "reasoning rs_1 without what came of it"),
        ([USER, {"id": "rs_1"}], "reasoning rs_1 without what came of it"),
    ],
)
def test_what_openai_refuses_is_found(after: list[Json], fault: str) -> None:
    assert fault in faults("responses", *after)


@pytest.mark.parametrize(
    ("wire", "after"),
    [
        ("messages", [USER, USES, TELLS, SAID, USER]),
        ("messages", [USER, THINKS, USES, TELLS, SAID]),
        ("messages", [USER, SAID, USER, USES, TELLS, USER, THINKS, USES, TELLS]),
        ("messages", [USER, NOTE, SAID, USER, NOTE]),
        ("responses", [USER, REFERENCE, CALL, OUTPUT]),
        ("responses", [USER, THOUGHT, {"type": "item_reference", "id": "msg_1"}, USER]),
        ("messages", [USER, USER, USES, TELLS]),
        ("responses", [USER, THOUGHT, CALL, OUTPUT]),
        ("responses", [USER, THOUGHT, SAID, USER]),
        ("chat", [SAID]),
        ("completions", []),
    ],
)
def test_what_is_well_has_no_fault(wire: Wire, after: list[Json]) -> None:
    assert faults(wire, *after) == []


def test_thinking_that_is_lost_is_missed() -> None:
    missing = ["the last turn does not begin with thinking"]
    came = (USER, SAID, USER, THINKS, USES, TELLS, USES, TELLS)
    assert faults("messages", USER, SAID, USER, USES, TELLS, before=came) == missing
    assert faults("messages", USER, SAID, USER, SAID, THINKS, before=came) == missing
    assert faults("messages", USER, THINKS, USES, TELLS, before=came) == []
    assert faults("messages", USER, THINKS, USER, SAID, before=(USER, THINKS, USER, SAID, SAID)) == []
    assert faults("messages", USER, USES, TELLS, before=(USER, SAID, USES, TELLS)) == [], "nobody thinks"


def test_what_was_wrong_before_is_not_held_against_it() -> None:
    assert faults("responses", USER, OUTPUT, before=(USER, OUTPUT, SAID)) == []
    assert faults("messages", SAID, USES, TELLS, before=(SAID, USER, USES, TELLS)) == []
    assert faults("messages", USER, SAID, NOTE, USER, before=(USER, SAID, SAID, NOTE, USER)) == []
    assert faults("responses", USER, OUTPUT, OUTPUT, before=(USER, OUTPUT)) == ["result of a without its call"]
