from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.tools import MAX_NAMES, MAX_RECENT, OTHERS, ToolUse

NAMES = st.lists(st.sampled_from(["a", "b", "c", OTHERS]), max_size=9)


def test_calls_are_counted_by_name_and_listed_in_their_order() -> None:
    use = ToolUse().with_calls(("search", "read", "search")).with_calls(["read"])
    assert use == ToolUse(("search", "read", "search", "read"), {"search": 2, "read": 2})


def test_an_answer_without_calls_changes_nothing() -> None:
    use = ToolUse(("a",), {"a": 1})
    assert use.with_calls(()) is use


def test_only_the_last_calls_are_listed_and_all_are_counted() -> None:
    use = ToolUse().with_calls(["old"] * 3).with_calls([f"t{number % 5}" for number in range(MAX_RECENT)])
    assert len(use.recent) == MAX_RECENT
    assert (use.recent[0], use.recent[-1]) == ("t0", f"t{(MAX_RECENT - 1) % 5}")
    assert (use.calls["old"], sum(use.calls.values())) == (3, 3 + MAX_RECENT)


def test_tools_beyond_the_first_ones_are_counted_together() -> None:
    use = ToolUse().with_calls([f"t{number}" for number in range(MAX_NAMES + 3)]).with_calls(["t0", "t300", OTHERS])
    assert len(use.calls) == MAX_NAMES + 1
    assert (use.calls["t0"], use.calls[OTHERS]) == (2, 5)
    assert use.recent[-3:] == ("t0", "t300", OTHERS)


def test_tool_named_like_the_others_entry_takes_no_slot() -> None:
    use = ToolUse().with_calls([OTHERS, *(f"t{number}" for number in range(MAX_NAMES))])
    assert use.calls[OTHERS] == 1
    assert use.calls[f"t{MAX_NAMES - 1}"] == 1


@given(NAMES, NAMES)
def test_tool_counts_do_not_depend_on_response_boundaries(first: list[str], second: list[str]) -> None:
    assert ToolUse().with_calls(first).with_calls(second) == ToolUse().with_calls(first + second)
