from __future__ import annotations

from gateway.core.session import MAX_AGENTS, MAX_EPOCHS, MAX_SUMMARIES, SessionState
from gateway.core.steps import StepState


def epoch(prefix: str) -> dict[str, object]:
    return {"v": 1, "prefix": prefix}


def test_an_epoch_is_kept_under_its_prefix() -> None:
    assert SessionState().with_epoch(epoch("a")).epochs == {"a": epoch("a")}


def test_an_epoch_takes_the_place_of_the_one_it_goes_on_from() -> None:
    state = SessionState().with_epoch(epoch("a")).with_epoch(epoch("b")).with_epoch(epoch("c"), instead_of="a")
    assert list(state.epochs) == ["b", "c"]


def test_the_oldest_conversation_gives_way() -> None:
    state = SessionState()
    for number in range(MAX_EPOCHS + 2):
        state = state.with_epoch(epoch(str(number)))
    assert list(state.epochs) == [str(number) for number in range(2, MAX_EPOCHS + 2)]


def test_the_same_epoch_again_is_the_newest_and_stands_once() -> None:
    state = SessionState().with_epoch(epoch("a")).with_epoch(epoch("b")).with_epoch(epoch("a"))
    assert list(state.epochs) == ["b", "a"]


def summed(prefix: str, summary: object) -> dict[str, object]:
    return {**epoch(prefix), "summary": summary}


def test_a_summary_stays_as_long_as_an_epoch_refers_to_it() -> None:
    state = SessionState().with_summary("s1", "first").with_epoch(summed("a", "s1"))
    assert state.summaries == {"s1": "first"}
    state = state.with_epoch(epoch("b"))
    assert state.summaries == {"s1": "first"}
    state = state.with_summary("s2", "second").with_epoch(summed("c", "s2"), instead_of="a")
    assert state.summaries == {"s2": "second"}


def test_of_two_summaries_of_the_same_messages_the_first_is_kept() -> None:
    state = SessionState().with_summary("s1", "first")
    assert state.with_summary("s1", "second").summaries == {"s1": "first"}
    assert state.with_epoch(summed("a", "s1"), summaries={"s1": "second"}).summaries == {"s1": "first"}


def test_a_text_that_was_forgotten_meanwhile_comes_with_its_epoch() -> None:
    state = SessionState().with_summary("s1", "first").with_epoch(epoch("other"))
    assert state.summaries == {}
    assert state.with_epoch(summed("a", "s1"), summaries={"s1": "first", "s0": "x"}).summaries == {"s1": "first"}


def test_summaries_are_bounded_and_the_newest_stay() -> None:
    state = SessionState()
    for number in range(5):
        name = f"s{number}"
        state = state.with_summary(name, name * (MAX_SUMMARIES // 6)).with_epoch(summed(f"p{number}", name))
    assert list(state.summaries) == ["s2", "s3", "s4"]
    assert sum(map(len, state.summaries.values())) <= MAX_SUMMARIES
    assert SessionState().with_summary("s", "x" * (MAX_SUMMARIES + 1)).summaries == {}


def test_an_epoch_that_names_nonsense_does_no_harm() -> None:
    state = SessionState().with_summary("s1", "first")
    assert state.with_epoch(summed("a", ["s1"])).with_epoch(summed("b", "s9")).summaries == {}


def test_conversations_that_share_a_summary_keep_it_once() -> None:
    state = SessionState().with_summary("s1", "first").with_epoch(summed("a", "s1")).with_epoch(summed("b", "s1"))
    assert state.with_epoch(epoch("c"), instead_of="a").summaries == {"s1": "first"}


def test_an_agent_has_one_place_and_the_one_that_went_on_last_is_at_the_end() -> None:
    state = SessionState().with_step("a", StepState("x")).with_step("b", StepState("y")).with_step("a", StepState("z"))
    assert list(state.steps.items()) == [("b", StepState("y")), ("a", StepState("z"))]


def test_the_agent_that_stood_still_longest_gives_way() -> None:
    state = SessionState()
    for number in range(MAX_AGENTS + 1):
        state = state.with_step(f"a{number}", StepState("x")).with_step("a0", StepState("y", number))
    assert list(state.steps) == [f"a{number}" for number in range(2, MAX_AGENTS + 1)] + ["a0"]
