"""Anthropic's messages as chat messages, case by case."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.core.message import encode, plain, sketch
from gateway.core.views import view_of
from gateway.core.views.view import View

Json = dict[str, Any]


def view(*elements: Json) -> View:
    return view_of("messages", [encode(element) for element in elements])


def seen(found: View) -> list[Json]:
    return [json.loads(raw) for raw in found.messages]


def restored(found: View, changes: dict[int, Json | None]) -> list[Json]:
    written = {index: None if form is None else encode(form) for index, form in changes.items()}
    return [json.loads(raw) for raw in found.restored(written)]


TASK: Json = {"role": "user", "content": "Find it."}
CALLS: Json = {
    "role": "assistant",
    "content": [
        {"type": "thinking", "thinking": "hm", "signature": "c2ln"},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "a", "name": "search", "input": {"q": 1}},
        {"type": "tool_use", "id": "b", "name": "search", "input": {}},
    ],
}
ANSWERS: Json = {
    "role": "user",
    "content": [
        {"type": "tool_result", "tool_use_id": "b", "content": [{"type": "text", "text": "two"}], "is_error": True},
        {"type": "tool_result", "tool_use_id": "a", "content": "one", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "And be quick."},
    ],
}


def test_results_and_words_of_one_message_are_messages_of_their_own() -> None:
    found = seen(view(TASK, CALLS, ANSWERS))
    assert [message["role"] for message in found] == ["user", "assistant", "tool", "tool", "user"]
    assert [call["id"] for call in found[1]["tool_calls"]] == ["a", "b"]
    assert found[1]["tool_calls"][0]["function"] == {"name": "search", "arguments": '{"q":1}'}
    assert (found[2]["tool_call_id"], found[2]["content"]) == ("b", [{"type": "text", "text": "two"}])
    assert (found[3]["tool_call_id"], found[3]["content"]) == ("a", "one")
    assert found[4]["content"] == [{"type": "text", "text": "And be quick."}]


def test_thinking_seals_its_message() -> None:
    raws = view(TASK, CALLS, ANSWERS).messages
    assert sketch(raws[1]).sealed
    assert not sketch(raws[3]).sealed


def test_cache_marks_are_seen_where_they_stand() -> None:
    raws = view(TASK, CALLS, ANSWERS).messages
    assert [plain(raw) != raw for raw in raws] == [False, False, False, True, False]


def test_a_changed_result_keeps_all_else_of_its_block() -> None:
    found = view(TASK, CALLS, ANSWERS)
    sent = restored(found, {2: {"role": "tool", "content": "short"}})
    assert sent[2]["content"] == [{**ANSWERS["content"][0], "content": "short"}, *ANSWERS["content"][1:]]
    assert sent[:2] == [TASK, CALLS]


def test_what_is_left_of_a_message_stays() -> None:
    sent = restored(view(TASK, CALLS, ANSWERS), {1: None, 2: None, 3: None})
    assert sent == [TASK, {"role": "user", "content": [ANSWERS["content"][2]]}]


def test_words_are_changed_between_the_calls_that_stay() -> None:
    calls = {"role": "assistant", "content": [*CALLS["content"][1:]], "id": "msg_1"}
    found = view(TASK, calls, ANSWERS)
    parts = [{"type": "text", "text": "[...]"}, {"type": "text", "text": "look"}]
    sent = restored(found, {1: {**seen(found)[1], "content": parts}})
    assert sent[1] == {"role": "assistant", "content": [*parts, *CALLS["content"][2:]], "id": "msg_1"}


def test_no_block_without_text_is_written() -> None:
    found = view(TASK, CALLS, {**ANSWERS, "content": ANSWERS["content"][:2]}, {"role": "assistant", "content": "Done."})
    sent = restored(found, {4: {"role": "assistant", "content": " "}})
    assert sent[3] == {"role": "assistant", "content": "Done."}, "nothing would be left of it"


def test_calls_of_two_messages_that_are_answered_together_go_together() -> None:
    first, second = ({"role": "assistant", "content": [CALLS["content"][place]]} for place in (2, 3))
    found = view(TASK, first, second, ANSWERS)
    assert found.places[:2] == ((0,), (1, 2))
    assert restored(found, {1: None, 2: None, 3: None}) == [
        TASK,
        {"role": "user", "content": [ANSWERS["content"][2]]},
    ]
    assert restored(found, {1: {"role": "assistant", "content": "x"}})[1:3] == [first, second]


@pytest.mark.parametrize(
    "raw",
    [
        b'{"role":"system","content":[{"type":"text","text":"x"}]}',
        b'{"role":"user","content":null}',
        b'{"role":"user","content":["x"]}',
        b'{"role":"user","content":[{"type":"text","text":"x","text":"y"}]}',
        b"[]",
        b"nonsense",
    ],
)
def test_what_nobody_knows_is_left_alone(raw: bytes) -> None:
    found = view_of("messages", [encode(TASK), raw])
    assert not sketch(found.messages[1]).is_known
    assert found.restored({}) == (encode(TASK), raw)


def test_a_summary_is_told_as_words_of_the_user() -> None:
    found = view(TASK, CALLS, {**ANSWERS, "content": ANSWERS["content"][:2]}, CALLS)
    told = encode({"role": "assistant", "content": "[summary of 3 earlier messages]\nAll was well."})
    sent = found.restored({1: told, 2: None, 3: None}, {1})
    assert json.loads(sent[1]) == {"role": "user", "content": "[summary of 3 earlier messages]\nAll was well."}
    assert len(sent) == 3
