from __future__ import annotations

from typing import Any

import pytest

from gateway.core.conversation import Conversation, answered_id, call_ids, key_of, text_parts


def call(*ids: str, content: Any = None, **more: Any) -> dict[str, Any]:
    calls = [{"id": i, "type": "function", "function": {"name": "look", "arguments": "{}"}} for i in ids]
    return {"role": "assistant", "content": content, "tool_calls": calls, **more}


def result(call_id: str, content: Any = "found") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def user(text: Any = "do it") -> dict[str, Any]:
    return {"role": "user", "content": text}


SYSTEM = {"role": "system", "content": "be good"}


def spans(conversation: Conversation) -> list[tuple[int, int]]:
    return [(unit.start, unit.stop) for unit in conversation.units]


def pinned(conversation: Conversation) -> list[int]:
    return [item.index for item in conversation.items if item.pinned]


def test_a_call_and_its_results_are_one_unit_whatever_the_order_of_the_results() -> None:
    messages = [SYSTEM, user(), call("a", "b"), result("b"), result("a"), user("on"), call("c"), result("c")]
    assert spans(Conversation.of(messages)) == [(0, 1), (1, 2), (2, 5), (5, 6), (6, 8)]


def test_a_result_without_its_call_and_a_call_without_result_stand_alone() -> None:
    assert spans(Conversation.of([user(), result("x"), call("a"), user()])) == [(0, 1), (1, 2), (2, 3), (3, 4)]


def test_an_old_function_call_and_its_result_are_one_unit() -> None:
    old = {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": "{}"}}
    answer = {"role": "function", "name": "look", "content": "found"}
    assert spans(Conversation.of([user(), old, answer])) == [(0, 1), (1, 3)]


def test_pinned_are_system_the_last_user_message_and_the_newest_call_with_its_results() -> None:
    messages = [SYSTEM, user(), call("a"), result("a"), user("on"), call("b"), result("b")]
    assert pinned(Conversation.of(messages)) == [0, 4, 5, 6]


def test_a_pinned_result_pins_its_unit() -> None:
    conversation = Conversation.of([user(), call("a"), result("a"), user("on")], pinned=[2])
    assert [unit.pinned for unit in conversation.units] == [False, True, True]


def test_a_message_of_an_unknown_role_is_pinned() -> None:
    assert pinned(Conversation.of([{"role": "critic", "content": "no"}, user(), user()])) == [0, 2]


@pytest.mark.parametrize(
    "message",
    [
        call("a", reasoning_details=[{"type": "reasoning.encrypted", "data": "x"}]),
        call("a", thinking_blocks=[{"type": "thinking", "signature": "x"}]),
        call("a", content=[{"type": "thinking", "thinking": "hm", "signature": "x"}]),
        call("a", content=[{"type": "text", "text": "hm", "annotations": [1]}]),
        {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "type": "custom", "custom": {"input": ""}}]},
        {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f"}, "extra_content": {"google": 1}}]},
        user([{"type": "image_url", "image_url": {"url": "data:"}}]),
        user({"text": "no list"}),
    ],
)
def test_what_must_not_be_rewritten_is_sealed_and_seals_its_unit(message: dict[str, Any]) -> None:
    conversation = Conversation.of([user(), message, result("a"), user()])
    assert conversation.items[1].sealed
    assert conversation.units[1].sealed


def test_plain_messages_are_not_sealed() -> None:
    parts = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}]
    conversation = Conversation.of([user(parts), call("a"), result("a", "x")])
    assert not any(item.sealed for item in conversation.items)
    assert conversation.items[0].text == "ab"


def test_a_cache_mark_is_seen_on_message_and_part_and_does_not_change_the_key() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    plain, part, whole = user([{"type": "text", "text": "a"}]), user([{"type": "text", "text": "a", **mark}]), user("a")
    assert key_of(plain) == key_of(part)
    assert key_of(whole) == key_of({**whole, **mark})
    assert Conversation.of([part, user()]).last_breakpoint == 0
    assert Conversation.of([user(), {**whole, **mark}]).last_breakpoint == 1
    assert Conversation.of([plain]).last_breakpoint is None


def test_the_task_is_the_first_user_message() -> None:
    assert Conversation.of([SYSTEM, call("a"), user("one"), user("two")]).task == 2
    assert Conversation.of([SYSTEM]).task is None


def test_prefix_hashes_agree_up_to_the_first_difference_and_depend_on_the_salt() -> None:
    one, two = Conversation.of([SYSTEM, user("a"), user("b")]), Conversation.of([SYSTEM, user("a"), user("c")])
    assert one.prefix_hashes()[:2] == two.prefix_hashes()[:2]
    assert one.prefix_hashes()[2] != two.prefix_hashes()[2]
    assert set(one.prefix_hashes("x")).isdisjoint(one.prefix_hashes("y"))


def test_odd_contents_have_no_text_and_no_calls() -> None:
    assert [text_parts(odd) for odd in (None, 7, {"text": "x"}, [7, {"text": 7}])] == [""] * 4
    assert call_ids({"role": "assistant", "tool_calls": "none"}) == ()
    assert answered_id({"role": "user"}) is None
