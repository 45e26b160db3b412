from __future__ import annotations

from typing import Any

import pytest

from gateway.core.conversation.message import encode
from gateway.core.conversation.units import Conversation
from gateway.core.trimming.validate import problems


def call(*ids: str, **more: Any) -> dict[str, Any]:
    calls = [{"id": i, "type": "function", "function": {"name": "f", "arguments": "{}"}} for i in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls, **more}


def result(call_id: str, content: str = "found") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


SYSTEM = {"role": "system", "content": "be good"}
TASK = {"role": "user", "content": "task"}
LAST = {"role": "user", "content": "on"}
SIGNED = {"role": "assistant", "content": "so", "reasoning_details": [{"data": "x"}]}
BEFORE = [SYSTEM, TASK, call("a", "b"), result("a"), result("b"), SIGNED, LAST, call("c"), result("c")]
END = [LAST, call("c"), result("c")]


def found(*after: dict[str, Any], tokens: int = 10, limit: int = 10, before: Any = None) -> list[str]:
    return problems(Conversation.of_messages(before or BEFORE), Conversation.of_messages(after), tokens, limit)


def test_the_same_conversation_and_a_valid_part_of_it_pass() -> None:
    assert found(*BEFORE) == []
    assert found(SYSTEM, TASK, *END) == []
    assert found(SYSTEM, TASK, call("a", "b"), result("b"), result("a", "[...]"), *END) == []
    assert found(SYSTEM, {**LAST, "content": "on, and more"}, call("c"), result("c", "found and more")) == []


def broken(function: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "type": "function", "function": function}]}


@pytest.mark.parametrize(
    ("after", "problem"),
    [
        ((SYSTEM, TASK, call("a", "b"), result("a"), *END), "call b without its result"),
        ((SYSTEM, TASK, result("a"), *END), "result of a without its call"),
        ((SYSTEM, TASK, call("a"), LAST, result("a"), *END), "result of a without its call"),
        ((SYSTEM, TASK, call("a"), result("a"), call("a"), result("a"), *END), "call a twice"),
        ((SYSTEM, TASK, call("z"), result("z"), *END), "call z was never made"),
        (
            (SYSTEM, TASK, broken({"name": "f", "arguments": "{"}), result("a"), *END),
            "arguments of call a are not JSON",
        ),
        ((SYSTEM, TASK, broken({"name": "g", "arguments": "{}"}), result("a"), *END), "call a was never made"),
        ((SYSTEM, call("a"), result("a"), *END), "the first message is not a user's"),
        ((SYSTEM, TASK, call("c"), result("c")), "messages[6] (user) was changed, moved or lost"),
        ((SYSTEM, call("c"), result("c")), "no user message"),
        ((TASK, *END), "messages[0] (system) was changed, moved or lost"),
        *(
            (({**SYSTEM, "content": said}, *END), "messages[0] (system) was changed, moved or lost")
            for said in ("be bad", "be good, and more")
        ),
        ((SYSTEM, LAST), "the last message has another role"),
        ((SYSTEM, TASK, {**SIGNED, "content": "[...]"}, *END), "signed reasoning was changed"),
        ((SYSTEM, {**TASK, "content": None}, *END), "a user message without content"),
        ((), "no messages"),
    ],
)
def test_each_problem_is_named(after: Any, problem: str) -> None:
    assert problem in found(*after)


def test_a_signed_message_is_replaced_only_by_a_gap_mark() -> None:
    mark = {"role": "assistant", "content": "[...]"}
    assert found(SYSTEM, TASK, mark, *END) == []
    for other in ({**mark, "content": "so"}, {**mark, "name": "a"}):
        assert found(SYSTEM, TASK, other, *END) == ["a message (assistant) that the client did not send"]
    plain = [SYSTEM, TASK, {"role": "assistant", "content": "so, then"}, SIGNED, *END]
    assert found(SYSTEM, TASK, {**mark, "content": "so [...]"}, mark, *END, before=plain) == []
    assert found(SYSTEM, TASK, mark, {**mark, "content": "so [...]"}, *END, before=plain) != []


def test_the_last_turn_begins_with_its_thinking() -> None:
    thought = {"thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "s"}]}
    turn = [call("a", **thought), result("a"), call("b"), result("b"), call("c"), result("c")]
    before = [SYSTEM, TASK, *turn]
    assert found(SYSTEM, TASK, *turn[:2], *turn[4:], before=before) == []
    assert found(SYSTEM, TASK, *turn[2:], before=before)[0] == "the last turn does not begin with its thinking"
    each = [SYSTEM, TASK, *turn[:2], call("c", **thought), result("c")]
    assert found(SYSTEM, TASK, *each[4:], before=each) == []
    assert found(SYSTEM, TASK, LAST, *turn[4:], before=[SYSTEM, TASK, *turn[:2], LAST, *turn[4:]]) == []


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


@pytest.mark.parametrize(
    ("said", "sent", "is_whole"),
    [
        ({"content": [part("on")]}, {"content": [part("on"), part("more")]}, True),
        ({"content": [part("on"), part("and")]}, {"content": [part("on")]}, False),
        ({"content": [part("on")]}, {"content": [part("off")]}, False),
        ({"content": [part("on")]}, {"content": "on"}, False),
        ({"content": "on"}, {"content": [part("on")]}, False),
        ({"content": "on", "name": "alice"}, {"content": "on, and more", "name": "eve"}, False),
    ],
)
def test_text_may_only_be_added_at_the_end_of_a_user_message(
    said: dict[str, Any], sent: dict[str, Any], is_whole: bool
) -> None:
    before, after = ([SYSTEM, TASK, {"role": "user", **one}] for one in (said, sent))
    problem = [] if is_whole else ["messages[2] (user) was changed, moved or lost"]
    assert found(*after, before=before) == problem


def test_text_next_to_a_call_may_be_shortened() -> None:
    before = [SYSTEM, TASK, {**call("a"), "content": "a long thought"}, result("a"), *END]
    assert found(SYSTEM, TASK, {**call("a"), "content": "[...]"}, result("a"), *END, before=before) == []


def test_a_user_text_is_no_reference() -> None:
    before = [SYSTEM, {**TASK, "content": "what is [same as the result of z]?"}, *END]
    assert found(*before, before=before) == []


def test_pinned_messages_must_be_present_and_in_order() -> None:
    other = {"role": "system", "content": "be brief"}
    for first, second in ((SYSTEM, SYSTEM), (SYSTEM, other)):
        before = [first, second, TASK, *END]
        assert found(*before, before=before) == []
        assert found(first, TASK, *END, before=before) == ["messages[1] (system) was changed, moved or lost"]
    assert found(other, SYSTEM, TASK, *END, before=[SYSTEM, other, TASK, *END]) == [
        "messages[1] (system) was changed, moved or lost"
    ]


def test_sealed_messages_that_belong_together_are_kept_or_dropped_together() -> None:
    signed = {"thinking_blocks": True}
    run = [call("a", **signed), result("a"), call("b", **signed), result("b")]
    before = Conversation.of([encode(one) for one in [TASK, *run, LAST]], following={3})
    for after, faults in (
        ([*run], []),
        ([], []),
        (run[:2], ["messages[1] without the sealed messages that belong to it"]),
    ):
        assert problems(before, Conversation.of_messages([TASK, *after, LAST]), 10, 10) == faults


def test_exceeding_the_limit_is_a_problem() -> None:
    assert found(*BEFORE, tokens=11) == ["11 tokens are over the limit of 10"]


def test_errors_of_the_client_are_not_reported() -> None:
    before = [call("x"), SYSTEM, TASK, broken({"name": "f", "arguments": "{"}), result("a"), LAST]
    assert found(*before, before=before) == []


MARKS = ["[same as the result of a]", "new\n\n[1 paragraph as in the result of a]", "[2 items as in the result of a]"]


@pytest.mark.parametrize("mark", MARKS)
def test_a_result_refers_only_to_whole_results(mark: str) -> None:
    before = [TASK, call("a"), result("a", "long " * 50), call("b"), result("b", "long " * 50), *END]
    pointing = [call("b"), result("b", mark), *END]
    assert found(TASK, call("a"), result("a", "long " * 50), *pointing, before=before) == []
    assert found(TASK, call("a"), result("a", "long " * 50 + "\n\nmore"), *pointing, before=before) == []
    problem = f"{mark[mark.index('[') :]} refers to a result that is not sent whole"
    assert found(TASK, *pointing, before=before) == [problem]
    assert found(TASK, call("a"), result("a", "long [...]"), *pointing, before=before) == [problem]
    own = [TASK, call("a"), result("a"), call("b"), result("b", f"long {mark}"), *END]
    assert found(TASK, *pointing, before=own) == []


TOLD = {"role": "assistant", "content": "[summary of 4 earlier messages]\nFound."}


def with_summary(*after: dict[str, Any], place: int, told: Any = None) -> list[str]:
    before, sent = Conversation.of_messages(BEFORE), Conversation.of_messages(after)
    return problems(before, sent, 10, 10, (place, encode(told or TOLD)))


def test_only_the_summary_may_be_a_new_message() -> None:
    assert with_summary(SYSTEM, TASK, TOLD, *END, place=2) == []
    assert with_summary(SYSTEM, TASK, call("a", "b"), result("a"), result("b"), TOLD, *END, place=5) == []
    assert found(SYSTEM, TASK, TOLD, TOLD, *END) == ["a message (assistant) that the client did not send"]
    assert found(SYSTEM, TASK, {"role": "user", "content": "Obey!"}, {"role": "user", "content": "!"}, *END) == [
        "a message (user) that the client did not send"
    ]


@pytest.mark.parametrize(
    ("after", "place", "told", "problem"),
    [
        ((SYSTEM, TASK, *END), 2, None, "the summary is not where it should be"),
        ((SYSTEM, TASK, TOLD, *END), 3, None, "the summary is not where it should be"),
        *(((SYSTEM, TASK, *END), place, None, "the summary is not where it should be") for place in (-1, 5, 9)),
        ((SYSTEM, TOLD, TASK, *END), 1, None, "the summary precedes the task"),
        ((SYSTEM, TASK, call("a", "b"), TOLD, result("a"), result("b"), *END), 3, None, "call a without its result"),
        (
            (SYSTEM, TASK, {**TOLD, "role": "user"}, *END),
            2,
            {**TOLD, "role": "user"},
            "the summary is more than a text",
        ),
        ((SYSTEM, TASK, {**TOLD, "x": 1}, *END), 2, {**TOLD, "x": 1}, "the summary is more than a text"),
        ((SYSTEM, TASK, {**TOLD, "content": []}, *END), 2, {**TOLD, "content": []}, "the summary is more than a text"),
    ],
)
def test_an_invalid_summary_is_a_problem(after: Any, place: int, told: Any, problem: str) -> None:
    assert any(problem in one for one in with_summary(*after, place=place, told=told))
