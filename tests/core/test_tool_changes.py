from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from gateway.core.conversation.message import Hashed, decode, encode
from gateway.core.session import SessionState
from gateway.core.thinking import BoundConversation
from gateway.core.tool_changes import (
    MAX_CHANGES,
    MAX_NAMES,
    ToolChange,
    changes_of,
    inserted,
    may_be_inserted_at,
    with_wanted,
    withdrawn_after,
)

TOOLS = frozenset({"read", "write", "run"})


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def thought(number: int, *, alone: bool = False) -> dict[str, Any]:
    blocks = [{"type": "thinking", "thinking": "hm", "signature": f"sig{number}"}]
    return {"role": "assistant", "content": [*blocks, *([] if alone else [{"type": "text", "text": f"said {number}"}])]}


NOTE = {"role": "system", "content": "Be brief."}
SAID = {"role": "assistant", "content": "said"}


def bound(messages: Sequence[dict[str, Any]]) -> BoundConversation:
    return BoundConversation("messages", Hashed(map(encode, messages)))


def wanted(
    messages: Sequence[dict[str, Any]], *names: str, before: Sequence[ToolChange] = ()
) -> tuple[ToolChange, ...]:
    conversation = bound(messages)
    return with_wanted(changes_of(conversation, before), frozenset(names), conversation, frozenset())


def test_a_change_is_repeated_at_its_place_when_the_conversation_goes_on() -> None:
    changes = wanted([user("a")], "write")
    later = bound([user("a"), thought(1), user("b")])
    assert changes_of(later, changes) == changes
    ((place, (message,)),) = inserted(later, changes, TOOLS).items()
    assert place == 1
    assert decode(message) == {
        "role": "system",
        "content": [{"type": "tool_removal", "tool": {"type": "tool_reference", "name": "write"}}],
    }


def test_a_change_belongs_to_its_conversation_only() -> None:
    changes = wanted([user("a"), thought(1), user("b")], "write")
    assert changes_of(bound([user("other"), thought(1), user("b"), SAID]), changes) == ()
    assert changes_of(bound([user("a")]), changes) == ()


def test_thinking_that_a_client_leaves_out_does_not_move_a_change() -> None:
    changes = wanted([user("a"), thought(1, alone=True), thought(2), user("b")], "write")
    whole = bound([user("a"), thought(1, alone=True), thought(2), user("b"), SAID])
    without = bound(
        [user("a"), {"role": "assistant", "content": [{"type": "text", "text": "said 2"}]}, user("b"), SAID]
    )
    assert [*inserted(whole, changes_of(whole, changes), TOOLS)] == [4]
    assert [*inserted(without, changes_of(without, changes), TOOLS)] == [3]


def test_only_the_difference_is_written() -> None:
    first = wanted([user("a")], "write", "run")
    second = wanted([user("a"), SAID, user("b")], "read", "run", before=first)
    assert second[:1] == first
    assert (second[1].withdrawn, second[1].offered) == (("read",), ("write",))
    assert withdrawn_after(second) == {"read", "run"}
    assert wanted([user("a"), SAID, user("b"), SAID, user("c")], "read", "run", before=second) == second


def test_another_try_of_the_same_request_replaces_the_change_of_the_first() -> None:
    first = wanted([user("a")], "write")
    assert wanted([user("a")], "write", before=first) == first
    second = wanted([user("a")], "run", before=first)
    assert [(one.withdrawn, one.offered) for one in second] == [(("run",), ())]
    none = wanted([user("a")], before=first)
    state = SessionState().with_tool_change(first[0]).with_tool_change(none[0])
    assert state.tool_changes == none
    assert inserted(bound([user("a")]), none, TOOLS) == {}


def test_a_tool_that_the_request_does_not_list_is_not_named() -> None:
    change = ToolChange(1, "hash", ("gone", "run"), ("also gone",))
    message = change.message(TOOLS)
    assert message is not None
    assert [block["tool"]["name"] for block in decode(message)["content"]] == ["run"]
    assert ToolChange(1, "hash", ("gone",)).message(TOOLS) is None


@pytest.mark.parametrize(
    ("messages", "size", "may_stand"),
    [
        ([user("a")], 1, True),
        ([user("a"), SAID], 1, True),
        ([user("a"), NOTE, SAID], 1, True),
        ([user("a"), NOTE], 2, True),
        ([user("a"), user("b")], 1, False),
        ([user("a"), NOTE, user("b")], 1, False),
        ([user("a"), SAID], 2, False),
        ([user("a")], 0, False),
    ],
)
def test_tool_change_is_placed_after_user_message(
    messages: Sequence[dict[str, Any]], size: int, *, may_stand: bool
) -> None:
    assert may_be_inserted_at(bound(messages), size) is may_stand


def test_a_change_whose_response_never_came_is_not_repeated_between_two_messages_of_the_user() -> None:
    changes = wanted([user("a")], "write")
    assert changes_of(bound([user("a"), user("b")]), changes) == ()


def test_a_session_that_has_too_many_changes_or_names_forgets_the_older_half_at_once() -> None:
    state = SessionState()
    for size in range(MAX_CHANGES + 5):
        state = state.with_tool_change(ToolChange(size, "hash", ("one",)))
    assert [one.size for one in state.tool_changes] == [*range(MAX_CHANGES // 2 + 1, MAX_CHANGES + 5)]
    state = SessionState()
    for size in range(5):
        state = state.with_tool_change(ToolChange(size, "hash", ("x" * (MAX_NAMES // 4),)))
    assert [one.size for one in state.tool_changes] == [3, 4]


def test_a_change_with_too_many_names_is_not_made() -> None:
    before = wanted([user("a")], "write")
    longer = wanted([user("a"), SAID, user("b")], "x" * (MAX_NAMES // 2), before=before)
    assert longer == before


def test_a_change_moves_when_the_thinking_after_it_is_left_out() -> None:
    conversation = bound([user("a"), thought(1, alone=True), user("b"), SAID, user("c")])
    change = {
        "role": "system",
        "content": [{"type": "tool_removal", "tool": {"type": "tool_reference", "name": "run"}}],
    }
    whole = bound([user("a"), change, thought(1, alone=True), user("b"), SAID, user("c")])
    left = [decode(raw) for raw in whole.without([(0, conversation.size)])]
    assert left == [user("a"), user("b"), change, SAID, user("c")]
    assert whole.indices_without([(0, 9)]) == [0, 3, 1, 4, 5]
