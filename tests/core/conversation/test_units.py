from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.conversation.message import Hashed, encode, outline_of
from gateway.core.conversation.units import Conversation, ConversationOutline


def call(*ids: str, content: Any = None, **more: Any) -> dict[str, Any]:
    calls = [{"id": i, "type": "function", "function": {"name": "look", "arguments": "{}"}} for i in ids]
    return {"role": "assistant", "content": content, "tool_calls": calls, **more}


def result(call_id: str, content: Any = "found") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def user(text: Any = "do it") -> dict[str, Any]:
    return {"role": "user", "content": text}


SYSTEM = {"role": "system", "content": "be good"}


def spans(conversation: Conversation) -> list[tuple[int, int]]:
    return [(unit.start, unit.stop) for unit in conversation.units]


def pinned(conversation: Conversation) -> list[int]:
    return [item.index for item in conversation.items if item.pinned]


def test_call_and_results_in_any_order_are_one_unit() -> None:
    messages = [SYSTEM, user(), call("a", "b"), result("b"), result("a"), user("on"), call("c"), result("c")]
    assert spans(Conversation.of_messages(messages)) == [(0, 1), (1, 2), (2, 5), (5, 6), (6, 8)]


def test_result_without_call_and_call_without_result_are_separate_units() -> None:
    assert spans(Conversation.of_messages([user(), result("x"), call("a"), user()])) == [(0, 1), (1, 2), (2, 3), (3, 4)]


def test_two_calls_with_one_id_have_two_results() -> None:
    assert spans(Conversation.of_messages([call("a", "a"), result("a"), result("a"), result("a")])) == [(0, 3), (3, 4)]


def test_legacy_function_call_and_its_result_are_one_unit() -> None:
    old = {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": "{}"}}
    answer = {"role": "function", "name": "look", "content": "found"}
    assert spans(Conversation.of_messages([user(), old, answer])) == [(0, 1), (1, 3)]


def test_system_last_user_message_and_newest_call_with_results_are_pinned() -> None:
    messages = [SYSTEM, user(), call("a"), result("a"), user("on"), call("b"), result("b")]
    assert pinned(Conversation.of_messages(messages)) == [0, 4, 5, 6]


THOUGHT = {"thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "s"}]}


def test_thinking_at_the_start_of_the_last_turn_is_pinned() -> None:
    old = [call("a", **THOUGHT), result("a"), call("b"), result("b")]
    turn = [call("c", **THOUGHT), result("c"), call("d"), result("d"), call("e"), result("e")]
    messages = [SYSTEM, user(), *old, said("So."), user("on"), *turn]
    assert pinned(Conversation.of_messages(messages)) == [0, 7, 8, 12, 13]
    leader = Conversation.of_messages(messages).units[6]
    assert (leader.bound, leader.pinned) == (True, False), "its results can be cut, and not be left out"
    thanks = [*messages, said("Done."), user("thanks")]
    assert pinned(Conversation.of_messages(thanks)) == [0, 15], "it is no last turn any more"


def test_thinking_is_not_pinned_if_all_messages_think_or_the_first_does_not() -> None:
    each = [one for name in "abc" for one in (call(name, **THOUGHT), result(name))]
    assert pinned(Conversation.of_messages([user(), *each])) == [0, 5, 6]
    later = [call("a"), result("a"), call("b", **THOUGHT), result("b"), call("c"), result("c")]
    assert pinned(Conversation.of_messages([user(), *later])) == [0, 5, 6]


def test_a_pinned_result_pins_its_unit() -> None:
    conversation = Conversation.of_messages([user(), call("a"), result("a"), user("on")], pinned=[2])
    assert [unit.pinned for unit in conversation.units] == [False, True, True]


def test_message_with_unknown_role_is_pinned() -> None:
    assert pinned(Conversation.of_messages([{"role": "critic", "content": "no"}, user(), user()])) == [0, 2]


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
def test_sealed_message_seals_its_unit(message: dict[str, Any]) -> None:
    conversation = Conversation.of_messages([user(), message, result("a"), user()])
    assert conversation.items[1].sealed
    assert conversation.units[1].sealed


def test_plain_messages_are_not_sealed() -> None:
    parts = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}]
    conversation = Conversation.of_messages([user(parts), call("a"), result("a", "x")])
    assert not any(item.sealed for item in conversation.items)
    assert conversation.items[0].length == 2


def test_cache_mark_is_found_on_message_and_part() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    messages = [
        user([{"type": "text", "text": "a"}]),
        user([{"type": "text", "text": "a", **mark}]),
        {**user(), **mark},
    ]
    conversation = Conversation.of_messages(messages)
    assert [item.breakpoint for item in conversation.items] == [False, True, True]
    assert conversation.keys[0] == conversation.keys[1]


def test_unparsable_message_is_pinned_and_may_be_the_result_of_a_waiting_call() -> None:
    raws = [b'{"role":"user","content":"go"}', encode(call("a")), b'{"role":"tool"', encode(call("b")), b"7", b"[]"]
    conversation = Conversation.of([*raws, encode(user())])
    assert spans(conversation) == [(0, 1), (1, 3), (3, 6), (6, 7)]
    assert pinned(conversation) == [2, 4, 5, 6]
    assert [unit.pinned for unit in conversation.units] == [False, True, True, True]


@pytest.mark.parametrize(
    ("turns", "expected"), [(0, [5]), (1, [5]), (2, [3, 4, 5]), (3, [0, 1, 2, 3, 4, 5]), (9, [0, 1, 2, 3, 4, 5])]
)
def test_last_turns_are_kept_completely(turns: int, expected: list[int]) -> None:
    said = {"role": "assistant", "content": "so"}
    messages = [user(), said, said, user("on"), said, user("and"), said, said]
    assert pinned(Conversation.of_messages(messages, keep_last_turns=turns)) == [*expected, 7]


def test_priority_of_a_unit_is_the_highest_of_its_messages() -> None:
    conversation = Conversation.of_messages(
        [user(), call("a", "b"), result("a"), result("b"), user()], priorities={0: 0.5, 2: 0, 3: 2}
    )
    assert [conversation.priority(unit) for unit in conversation.units] == [0.5, 2, 1]


@pytest.mark.parametrize("odd", [-1.0, float("nan"), float("inf")])
def test_negative_or_invalid_priority_is_refused(odd: float) -> None:
    with pytest.raises(ValueError, match="priority"):
        Conversation.of([], priorities={0: odd})


def test_task_is_the_first_user_message() -> None:
    assert Conversation.of_messages([SYSTEM, call("a"), user("one"), user("two")]).task == 2
    assert Conversation.of_messages([SYSTEM]).task is None


def test_prefixes_agree_up_to_the_first_difference_and_depend_on_the_salt() -> None:
    one, two = (
        Conversation.of_messages([SYSTEM, user("a"), user("b")]),
        Conversation.of_messages([SYSTEM, user("a"), user("c")]),
    )
    assert [one.prefix(size) == two.prefix(size) for size in (1, 2, 3)] == [True, True, False]
    assert one.prefix(2, "x") != one.prefix(2, "y")
    assert one.first_messages(2).prefix(2) == one.prefix(2)


def test_messages_are_not_parsed_before_first_use() -> None:
    class Book:
        def outline(self, keys: Any, messages: Any) -> ConversationOutline:
            read.append(len(messages))
            return ConversationOutline().plus([outline_of(raw) for raw in messages])

    read: list[int] = []
    conversation = Conversation.of([encode(user())], Book())
    assert read == []
    assert conversation.items[0].role == conversation.items[0].role == "user"
    assert read == [1]


def test_empty_conversation_has_no_items() -> None:
    conversation = Conversation.of([])
    assert (conversation.items, conversation.units, conversation.task) == ((), (), None)


def test_unrelated_result_does_not_separate_a_call_from_its_result() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "nobody", "content": "x"},
        {"role": "tool", "tool_call_id": "a", "content": "y"},
        {"role": "user", "content": "on"},
    ]
    assert [(unit.start, unit.stop) for unit in Conversation.of_messages(messages).units] == [(0, 1), (1, 4), (4, 5)]


MESSAGES = st.sampled_from(
    [SYSTEM, user(), call("a"), call("a", "b"), call("a", "a"), result("a"), result("b"), result("z"), {"role": "odd"}]
)


@settings(max_examples=200)
@given(st.lists(st.lists(MESSAGES, max_size=5), max_size=5))
def test_extended_outline_equals_the_outline_of_all_messages(parts: list[list[dict[str, Any]]]) -> None:
    grown = ConversationOutline()
    for part in parts:
        grown = grown.plus([outline_of(encode(message)) for message in part])
    whole = Conversation.of_messages([message for part in parts for message in part])
    assert grown == whole.outline
    assert [index for span in grown.spans for index in range(*span)] == list(range(len(grown.outlines)))


def test_messages_known_to_be_unmarked_are_not_searched() -> None:
    marked = {**user(), "cache_control": {"type": "ephemeral"}}
    raws = [encode(message) for message in (SYSTEM, user("a"), marked, user("b"), marked)]
    assert Conversation.of(raws).marked == Conversation.of(Hashed(raws, unmarked=2)).marked == {2, 4}
    assert Conversation.of(Hashed(raws, unmarked=3)).marked == {4}


def test_following_messages_join_the_unit_and_are_bound_if_some_must_stay() -> None:
    run = [call("a"), result("a"), call("b"), result("b")]

    def units(*messages: dict[str, Any], **more: Any) -> list[tuple[int, int, bool, bool]]:
        found = Conversation.of([encode(one) for one in messages], following={3}, **more).units
        return [(one.start, one.stop, one.pinned, one.bound) for one in found]

    assert units(user(), *run, user())[1:2] == [(1, 5, False, False)]
    assert units(user(), *run) == [(0, 1, True, False), (1, 3, False, True), (3, 5, True, False)]
    assert units(user(), *run, user(), pinned={2})[1:3] == [(1, 3, True, False), (3, 5, False, True)]
    assert Conversation.of([encode(one) for one in [user(), *run]], following={3}).first_messages(3).following == set()
