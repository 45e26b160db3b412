from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.counting.context import ContextCounts, ToolResultTokens
from gateway.core.counting.measure import ContentTokens, MeasuredMessage
from gateway.core.counting.media import Media
from gateway.core.counting.parts import ToolResult
from gateway.core.counting.sums import MessageSums

COUNTS = st.builds(ContentTokens, *[st.integers(0, 9)] * len(ContentTokens._fields)) | st.builds(
    ContentTokens, text=st.integers(0, 9)
)
RESULTS = st.builds(ToolResult, st.sampled_from(["", "a", "b", "c"]), st.sampled_from([b"1", b"2", b"3"]), st.just(5))
MEASURE = st.builds(
    MeasuredMessage,
    COUNTS,
    st.lists(st.builds(Media, st.sampled_from(["image", "pdf"]), st.integers(1, 9)), max_size=2).map(tuple),
    st.lists(RESULTS, max_size=2).map(tuple),
    st.sampled_from(["system", "developer", "user", "assistant", "tool"]),
    st.booleans(),
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["look", "read"])), max_size=2).map(tuple),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(MEASURE, max_size=8), st.data())
def test_sums_do_not_depend_on_where_they_were_split(measures: list[MeasuredMessage], data: Any) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(measures)), max_size=4)))
    found = MessageSums()
    for start, stop in zip([0, *cuts], [*cuts, len(measures)], strict=True):
        found = found.plus(measures[start:stop])
    assert found == MessageSums().plus(measures)


def asking(text: int) -> MeasuredMessage:
    return MeasuredMessage(ContentTokens(text=text, messages=1), role="user", is_by_user=True)


def thinking(tokens: int) -> MeasuredMessage:
    return MeasuredMessage(ContentTokens(thinking=tokens, sealed=tokens, seals=1, messages=1), role="assistant")


def test_new_counts_cover_messages_after_the_last_assistant_message() -> None:
    one = MessageSums().plus([asking(1), asking(2)])
    assert one.new is None, "nothing says what was there before"
    two = one.plus([thinking(3)])
    assert two.new == ContentTokens()
    three = two.plus([asking(4)]).plus([asking(5)])
    assert three.new == ContentTokens(text=9, messages=2)
    assert three.plus([thinking(6), asking(7)]).new == ContentTokens(text=7, messages=1)


@pytest.mark.parametrize(("thoughts", "tokens"), [("all", 7), ("turn", 4), ("none", 0)])
def test_earlier_thinking_follows_the_rule_of_the_provider(thoughts: str, tokens: int) -> None:
    found = (
        MessageSums()
        .plus([asking(1), thinking(3)])
        .plus([asking(2)])
        .plus([thinking(4)])
        .counts_with_kept_thinking(thoughts)
    )
    assert (found.thinking, found.sealed, found.text) == (tokens, tokens, 3)


def test_turn_is_the_whole_conversation_without_a_user_message() -> None:
    assert MessageSums().plus([thinking(3)]).plus([thinking(4)]).counts_with_kept_thinking("turn").thinking == 7


def test_repeated_result_is_known_from_earlier_messages() -> None:
    result = MeasuredMessage(ContentTokens(result=5, results=1), results=(ToolResult("a", b"1", 5),), role="tool")
    tools = {"unknown": ToolResultTokens(1, 5)}
    found = MessageSums().plus([result]).plus([result]).parts(3)
    assert found == ContextCounts(0, 5, 3, results=1, repeated_tokens=5, tools=tools)


def test_size_of_sums_grows_with_their_entries() -> None:
    result = MeasuredMessage(ContentTokens(), (Media("image"),), (ToolResult("a", b"1", 5),))
    called = MeasuredMessage(ContentTokens(), called=(("a", "look"),))
    assert MessageSums().plus([result]).size_bytes > MessageSums().plus([called]).size_bytes > MessageSums().size_bytes


def test_counts_by_tool_add_up_to_all_results() -> None:
    called = MeasuredMessage(ContentTokens(), called=(("a", "look"), ("b", "read")))
    results = [MeasuredMessage(ContentTokens(), results=(ToolResult(name, name.encode(), 5),)) for name in "abc"]
    parts = MessageSums().plus([called]).plus(results).parts(0)
    assert parts.tools == {"look": (1, 5), "read": (1, 5), "unknown": (1, 5)}
    assert (parts.results, parts.tool_tokens) == (3, 15)
