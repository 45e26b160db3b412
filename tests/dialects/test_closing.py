from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from gateway.core.counting.measure import Wire
from gateway.core.counting.request import ITEMS
from gateway.dialects.closing import refused_field, with_instruction, with_task_budget, without_tool_calls

TEXT = "Finish now."
USER = {"role": "user", "content": "Hi."}
TOOL = {"role": "tool", "tool_call_id": "c", "content": "rows"}


def fields(**values: object) -> dict[str, msgspec.Raw]:
    return {name: msgspec.Raw(json.dumps(value).encode()) for name, value in values.items()}


def instructed(wire: Wire, messages: object, *, is_strict: bool = False) -> Any:
    given = fields(**{ITEMS[wire]: messages})
    return json.loads(bytes(with_instruction(given, wire, None, TEXT, is_strict=is_strict)))


@pytest.mark.parametrize(
    ("wire", "messages", "expected"),
    [
        ("chat", [USER], [{"role": "user", "content": f"Hi.\n\n{TEXT}"}]),
        (
            "chat",
            [{"role": "user", "content": [{"type": "text", "text": "Hi."}]}],
            [{"role": "user", "content": [{"type": "text", "text": "Hi."}, {"type": "text", "text": TEXT}]}],
        ),
        ("chat", [USER, TOOL], [USER, TOOL, {"role": "user", "content": TEXT}]),
        ("chat", [], [{"role": "user", "content": TEXT}]),
        ("chat", [{"role": "user", "content": None}], [{"role": "user", "content": None}, {"role": "user", "content": TEXT}]),
        ("chat", ["odd"], ["odd", {"role": "user", "content": TEXT}]),
        (
            "messages",
            [USER],
            [{"role": "user", "content": [{"type": "text", "text": "Hi."}, {"type": "text", "text": TEXT}]}],
        ),
        (
            "messages",
            [{"role": "user", "content": []}],
            [{"role": "user", "content": [{"type": "text", "text": TEXT}]}],
        ),
        (
            "messages",
            [USER, {"role": "assistant", "content": "Hel"}],
            [USER, {"role": "assistant", "content": "Hel"}, {"role": "user", "content": TEXT}],
        ),
        (
            "responses",
            "Hi.",
            [USER, {"type": "message", "role": "user", "content": [{"type": "input_text", "text": TEXT}]}],
        ),
    ],
)  # fmt: skip
def test_the_instruction_follows_the_last_message(wire: Wire, messages: object, expected: object) -> None:
    assert instructed(wire, messages) == expected


@pytest.mark.parametrize("given", ["Hi.", {"role": "user"}, None])
def test_what_is_no_list_of_messages_stays(given: object) -> None:
    assert instructed("chat", given) == given


def test_where_roles_must_alternate_it_follows_the_tool_result() -> None:
    assert instructed("chat", [USER, TOOL], is_strict=True) == [USER, {**TOOL, "content": f"rows\n\n{TEXT}"}]


def test_the_messages_before_it_keep_their_bytes() -> None:
    first = b'{"content" : "\\u0061", "role":"user"}'
    sent = with_instruction({}, "chat", [first, b'{"role":"assistant","content":"b"}'], TEXT, is_strict=False)
    assert bytes(sent).startswith(b"[" + first + b',{"role":"assistant","content":"b"},')


@pytest.mark.parametrize(
    ("wire", "given", "expected"),
    [
        ("chat", {"tools": [{}], "tool_choice": "required"}, {"tool_choice": "none"}),
        ("chat", {"functions": [{}]}, {"function_call": "none"}),
        ("responses", {"tools": [{}]}, {"tool_choice": "none"}),
        ("messages", {"tools": [{}]}, {"tool_choice": {"type": "none"}}),
        ("chat", {}, {}),
        ("chat", {"tools": []}, {}),
        ("chat", {"tools": "odd"}, {}),
        ("completions", {"tools": [{}]}, {}),
    ],
)
def test_no_tools_are_called(wire: Wire, given: dict[str, object], expected: object) -> None:
    assert without_tool_calls(fields(**given), wire) == expected


def test_the_task_budget_says_what_is_left() -> None:
    assert with_task_budget({}, 700) == {
        "output_config": {"task_budget": {"type": "tokens", "total": 20_000, "remaining": 700}}
    }
    effort = with_task_budget(fields(output_config={"effort": "low"}), 30_000)
    assert effort["output_config"] == {
        "effort": "low",
        "task_budget": {"type": "tokens", "total": 30_000, "remaining": 30_000},
    }
    assert with_task_budget(fields(output_config={"task_budget": {}}), 700) == {}
    assert with_task_budget(fields(output_config=[]), 700) == {}


def test_a_refused_field_is_found_once() -> None:
    assert refused_field(b"Unknown beta: Task-Budgets-2026-03-13", ()) == "output_config"
    assert refused_field(b"`tool_choice` none is not supported", ()) == "tool_choice"
    assert refused_field(b"`tool_choice` none is not supported", {"tool_choice"}) is None
    assert refused_field(b"no such model", ()) is None
