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
    kept_as,
)
from gateway.core.steps import StepState
from gateway.core.thinking_origin import ThinkingOrigin


def trim_decision(prefix: str) -> dict[str, object]:
    return {"v": 1, "prefix": prefix}


def test_an_epoch_is_kept_under_its_prefix() -> None:
    assert SessionState().with_trim_decision(trim_decision("a")).trim_decisions == {"a": trim_decision("a")}


def test_an_epoch_takes_the_place_of_the_one_it_goes_on_from() -> None:
    state = (
        SessionState()
        .with_trim_decision(trim_decision("a"))
        .with_trim_decision(trim_decision("b"))
        .with_trim_decision(trim_decision("c"), instead_of="a")
    )
    assert list(state.trim_decisions) == ["b", "c"]


def test_the_oldest_conversation_gives_way() -> None:
    state = SessionState()
    for number in range(MAX_DECISIONS + 2):
        state = state.with_trim_decision(trim_decision(str(number)))
    assert list(state.trim_decisions) == [str(number) for number in range(2, MAX_DECISIONS + 2)]


def test_the_same_epoch_again_is_the_newest_and_stands_once() -> None:
    state = (
        SessionState()
        .with_trim_decision(trim_decision("a"))
        .with_trim_decision(trim_decision("b"))
        .with_trim_decision(trim_decision("a"))
    )
    assert list(state.trim_decisions) == ["b", "a"]


def summed(prefix: str, summary: object) -> dict[str, object]:
    return {**trim_decision(prefix), "summary": summary}


def test_a_summary_stays_as_long_as_an_epoch_refers_to_it() -> None:
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


def test_a_text_that_was_forgotten_meanwhile_comes_with_its_epoch() -> None:
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


def test_an_epoch_that_names_nonsense_does_no_harm() -> None:
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


def test_an_agent_has_one_place_and_the_one_that_went_on_last_is_at_the_end() -> None:
    state = SessionState().with_step("a", StepState("x")).with_step("b", StepState("y")).with_step("a", StepState("z"))
    assert list(state.steps.items()) == [("b", StepState("y")), ("a", StepState("z"))]


def test_the_agent_that_stood_still_longest_gives_way() -> None:
    state = SessionState()
    for number in range(MAX_AGENTS + 1):
        state = state.with_step(f"a{number}", StepState("x")).with_step("a0", StepState("y", number))
    assert list(state.steps) == [f"a{number}" for number in range(2, MAX_AGENTS + 1)] + ["a0"]


def test_what_stands_on_an_answer_is_found_by_any_of_its_ids_at_its_provider() -> None:
    known = Remembered(kept=kept_as("p", ("resp_1", "conv_1"), 6_000))
    assert known.kept_by("p", ("resp_1",)) == known.kept_by("p", ("conv_1",)) == 6_000
    assert known.kept_by("q", ("resp_1",)) == known.kept_by("p", ("resp_2",)) == known.kept_by("p", ()) == 0


def test_the_newest_of_a_conversation_counts_and_the_oldest_answers_give_way() -> None:
    kept = ""
    for number in range(20):
        kept = (kept_as("p", (f"resp_{number}",), number + 1) + kept_as("p", ("conv",), number) + kept)[:MAX_KEPT]
    known = Remembered(kept=kept)
    assert known.kept_by("p", ("conv",)) == 19
    found = [number for number in range(20) if known.kept_by("p", (f"resp_{number}",))]
    assert found == list(range(12, 20))
    assert known.kept_by("p", ("resp_13", "conv")) == 19


@pytest.mark.parametrize(("tokens", "kept"), [(-5, 0), (0, 0), (16**8, 16**8 - 1), (10**40, 16**8 - 1)])
def test_whatever_is_reported_and_however_long_an_id_is_takes_the_same_room(tokens: int, kept: int) -> None:
    written = kept_as("p", ("r" * 100_000, "\ud83d"), tokens)
    assert len(written) == 2 * len(kept_as("p", ("r",), 1))
    assert Remembered(kept=written).kept_by("p", ("\ud83d",)) == kept


@pytest.mark.parametrize("damage", ["x", "zz", "00"])
def test_what_is_damaged_is_not_known(damage: str) -> None:
    written = kept_as("p", ("r",), 6_000)
    assert Remembered(kept=written[:16] + damage).kept_by("p", ("r",)) == 0
    assert Remembered(kept=damage + written).kept_by("p", ("r",)) == 0


def test_the_conversation_whose_thinking_was_not_seen_longest_gives_way() -> None:
    state = SessionState()
    for number in range(MAX_DECISIONS + 2):
        state = state.with_thinking(str(number), (ThinkingOrigin("a", "m", number),))
    state = state.with_thinking("2", (ThinkingOrigin("b", "m", 0),)).with_thinking("new", ())
    assert list(state.thinking)[:1] == ["4"]
    assert list(state.thinking)[-2:] == ["2", "new"]
    assert len(state.thinking) == MAX_DECISIONS


def test_results_that_were_not_read_are_remembered_and_the_oldest_give_way() -> None:
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
