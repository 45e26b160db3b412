from __future__ import annotations

import pytest

from gateway.core.modes.unread import UnreadForm
from gateway.core.session import (
    MAX_AGENTS,
    MAX_BLOCKS,
    MAX_DECISIONS,
    MAX_KEPT,
    MAX_SUMMARIES,
    MAX_UNREAD,
    Remembered,
    SessionState,
    kept_text,
)
from gateway.core.steps import StepState
from gateway.core.thinking_origin import ThinkingOrigin


def trim_decision(prefix: str) -> dict[str, object]:
    return {"v": 1, "prefix": prefix}


def test_trim_decision_is_kept_by_prefix() -> None:
    assert SessionState().with_trim_decision(trim_decision("a")).trim_decisions == {"a": trim_decision("a")}


def test_trim_decision_replaces_the_one_it_continues() -> None:
    state = (
        SessionState()
        .with_trim_decision(trim_decision("a"))
        .with_trim_decision(trim_decision("b"))
        .with_trim_decision(trim_decision("c"), instead_of="a")
    )
    assert list(state.trim_decisions) == ["b", "c"]


def test_oldest_conversation_is_dropped() -> None:
    state = SessionState()
    for number in range(MAX_DECISIONS + 2):
        state = state.with_trim_decision(trim_decision(str(number)))
    assert list(state.trim_decisions) == [str(number) for number in range(2, MAX_DECISIONS + 2)]


def test_repeated_trim_decision_becomes_the_newest() -> None:
    state = (
        SessionState()
        .with_trim_decision(trim_decision("a"))
        .with_trim_decision(trim_decision("b"))
        .with_trim_decision(trim_decision("a"))
    )
    assert list(state.trim_decisions) == ["b", "a"]


def summed(prefix: str, summary: object) -> dict[str, object]:
    return {**trim_decision(prefix), "summary": summary}


def test_summary_is_kept_while_a_trim_decision_refers_to_it() -> None:
    state = SessionState().with_summary("s1", "first").with_trim_decision(summed("a", "s1"))
    assert state.summaries == {"s1": "first"}
    state = state.with_trim_decision(trim_decision("b"))
    assert state.summaries == {"s1": "first"}
    state = state.with_summary("s2", "second").with_trim_decision(summed("c", "s2"), instead_of="a")
    assert state.summaries == {"s2": "second"}


def test_of_two_summaries_of_the_same_messages_the_first_is_kept() -> None:
    state = SessionState().with_summary("s1", "first")
    assert state.with_summary("s1", "second").summaries == {"s1": "first"}
    assert state.with_trim_decision(summed("a", "s1"), summaries={"s1": "second"}).summaries == {"s1": "first"}


def test_dropped_summary_returns_with_its_trim_decision() -> None:
    state = SessionState().with_summary("s1", "first").with_trim_decision(trim_decision("other"))
    assert state.summaries == {}
    assert state.with_trim_decision(summed("a", "s1"), summaries={"s1": "first", "s0": "x"}).summaries == {
        "s1": "first"
    }


def test_summaries_are_bounded_and_the_newest_stay() -> None:
    state = SessionState()
    for number in range(5):
        name = f"s{number}"
        state = state.with_summary(name, name * (MAX_SUMMARIES // 6)).with_trim_decision(summed(f"p{number}", name))
    assert list(state.summaries) == ["s2", "s3", "s4"]
    assert sum(map(len, state.summaries.values())) <= MAX_SUMMARIES
    assert SessionState().with_summary("s", "x" * (MAX_SUMMARIES + 1)).summaries == {}


def test_invalid_summary_name_in_trim_decision_is_ignored() -> None:
    state = SessionState().with_summary("s1", "first")
    assert state.with_trim_decision(summed("a", ["s1"])).with_trim_decision(summed("b", "s9")).summaries == {}


def test_conversations_that_share_a_summary_keep_it_once() -> None:
    state = (
        SessionState()
        .with_summary("s1", "first")
        .with_trim_decision(summed("a", "s1"))
        .with_trim_decision(summed("b", "s1"))
    )
    assert state.with_trim_decision(trim_decision("c"), instead_of="a").summaries == {"s1": "first"}


def test_agents_are_ordered_by_last_change() -> None:
    state = SessionState().with_step("a", StepState("x")).with_step("b", StepState("y")).with_step("a", StepState("z"))
    assert list(state.steps.items()) == [("b", StepState("y")), ("a", StepState("z"))]


def test_longest_unused_agent_is_dropped() -> None:
    state = SessionState()
    for number in range(MAX_AGENTS + 1):
        state = state.with_step(f"a{number}", StepState("x")).with_step("a0", StepState("y", number))
    assert list(state.steps) == [f"a{number}" for number in range(2, MAX_AGENTS + 1)] + ["a0"]


def test_kept_tokens_are_found_by_any_id_at_the_provider() -> None:
    known = Remembered(kept=kept_text("p", ("resp_1", "conv_1"), 6_000))
    assert known.kept_tokens("p", ("resp_1",)) == known.kept_tokens("p", ("conv_1",)) == 6_000
    assert known.kept_tokens("q", ("resp_1",)) == known.kept_tokens("p", ("resp_2",)) == known.kept_tokens("p", ()) == 0


def test_newest_kept_entry_counts_and_oldest_are_dropped() -> None:
    kept = ""
    for number in range(20):
        kept = (kept_text("p", (f"resp_{number}",), number + 1) + kept_text("p", ("conv",), number) + kept)[:MAX_KEPT]
    known = Remembered(kept=kept)
    assert known.kept_tokens("p", ("conv",)) == 19
    found = [number for number in range(20) if known.kept_tokens("p", (f"resp_{number}",))]
    assert found == list(range(12, 20))
    assert known.kept_tokens("p", ("resp_13", "conv")) == 19


@pytest.mark.parametrize(("tokens", "kept"), [(-5, 0), (0, 0), (16**8, 16**8 - 1), (10**40, 16**8 - 1)])
def test_kept_entries_have_a_fixed_width(tokens: int, kept: int) -> None:
    written = kept_text("p", ("r" * 100_000, "\ud83d"), tokens)
    assert len(written) == 2 * len(kept_text("p", ("r",), 1))
    assert Remembered(kept=written).kept_tokens("p", ("\ud83d",)) == kept


@pytest.mark.parametrize("damage", ["x", "zz", "00"])
def test_damaged_kept_text_gives_zero(damage: str) -> None:
    written = kept_text("p", ("r",), 6_000)
    assert Remembered(kept=written[:16] + damage).kept_tokens("p", ("r",)) == 0
    assert Remembered(kept=damage + written).kept_tokens("p", ("r",)) == 0


def test_oldest_thinking_origins_are_dropped() -> None:
    state = SessionState()
    for number in range(MAX_DECISIONS + 2):
        state = state.with_thinking(str(number), (ThinkingOrigin("a", "m", number),))
    state = state.with_thinking("2", (ThinkingOrigin("b", "m", 0),)).with_thinking("new", ())
    assert list(state.thinking)[:1] == ["4"]
    assert list(state.thinking)[-2:] == ["2", "new"]
    assert len(state.thinking) == MAX_DECISIONS


def test_unread_results_are_kept_and_oldest_dropped() -> None:
    state = SessionState()
    for number in range(MAX_UNREAD + 3):
        state = state.with_unread({str(number): UnreadForm("summary")})
    assert list(state.unread) == [str(number) for number in range(3, MAX_UNREAD + 3)]
    again = state.with_unread({"5": UnreadForm("handle_only", (1, 2))})
    assert list(again.unread)[-1] == "5"
    assert len(again.unread) == MAX_UNREAD


def test_the_blocks_of_extracts_are_bounded() -> None:
    state = SessionState()
    for number in range(4):
        state = state.with_unread({str(number): UnreadForm("summary", tuple(range(MAX_BLOCKS // 2)))})
    assert list(state.unread) == ["2", "3"]
