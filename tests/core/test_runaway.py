"""The rules of runaway protection, compared with a slow count over the whole list of rounds."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.runaway import (
    MAX_PERIOD,
    MAX_WORK,
    RECENT,
    Finding,
    RoundReader,
    RunawayPolicy,
    Thresholds,
    Works,
    WorkState,
    findings,
    lowest_limits,
    overtime,
    rounds_until_alarm,
    with_work,
)

POLICY = RunawayPolicy(loop=Thresholds(3, 5), no_progress=Thresholds(6, 9), rounds=Thresholds(20, 30))
LETTERS = st.lists(st.sampled_from("abc"), max_size=60)


def read(letters: Sequence[str], reader: RoundReader | None = None) -> RoundReader:
    """Return the rounds of an agent that calls one tool in each, named by a letter."""
    reader = reader or RoundReader()
    for letter in letters:
        reader.call(f"tool_{letter}", letter.encode())
        reader.result(b"result of " + letter.encode())
        reader.close()
    return reader


def found(letters: Sequence[str], lifted: int = 0, policy: RunawayPolicy = POLICY) -> dict[str, Finding]:
    return {one.kind: one for one in findings(read(letters), policy, lifted)}


def repetitions(letters: Sequence[str]) -> int:
    """Return how often the last rounds were repeated in a row: the most for any length of them."""
    most = 0
    for period in range(1, MAX_PERIOD + 1):
        last, times = letters[len(letters) - period :], 0
        while len(last) == period and letters[len(letters) - period * (times + 1) :][:period] == last:
            times += 1
            if period * (times + 1) > len(letters):
                break
        most = max(most, times)
    return most


def known(letters: Sequence[str]) -> int:
    """Return how many of the last rounds in a row are among the rounds before."""
    number = 0
    while number < len(letters) and letters[-1 - number] in letters[: len(letters) - 1 - number][-RECENT:]:
        number += 1
    return number


@given(LETTERS)
def test_loops_and_known_rounds_are_those_of_a_count_over_the_whole_list(letters: list[str]) -> None:
    seen = found(letters)
    for kind, number, limits in (
        ("loop", repetitions(letters), POLICY.loop),
        ("no_progress", known(letters), POLICY.no_progress),
        ("rounds", len(letters), POLICY.rounds),
    ):
        reached = [limit for limit in limits if limit is not None and number >= limit]
        assert (kind in seen) == bool(reached)
        if reached:
            assert (seen[kind].number, seen[kind].limit) == (number, max(reached))
            assert seen[kind].action == ("refuse" if len(reached) == 2 else "warn")


@given(LETTERS, st.lists(st.sampled_from("abcd"), max_size=12))
def test_no_rule_finds_anything_before_the_announced_number_of_rounds(before: list[str], after: list[str]) -> None:
    missing = rounds_until_alarm(read(before), lowest_limits(POLICY))
    assert (missing <= 0) or not found(before)
    if len(after) < missing:
        assert not found([*before, *after])


@given(LETTERS, LETTERS)
def test_rounds_can_be_read_in_parts(first: list[str], second: list[str]) -> None:
    whole = read([*first, *second]).rounds
    assert read(second, RoundReader(read(first).rounds)).rounds == whole


@given(LETTERS, LETTERS)
def test_what_a_person_has_accepted_does_not_count(before: list[str], after: list[str]) -> None:
    seen = found([*before, *after], lifted=len(before))
    assert ("loop" in seen) <= (len(after) >= 3)
    assert ("no_progress" in seen) <= (len(after) >= 6)
    assert ("rounds" in seen) == (len(after) >= 20)


@pytest.mark.parametrize(
    ("letters", "text"),
    [
        ("aaa", "the same call (tool_a) had the same result 3 times in a row"),
        ("xababab", "the same 2 calls (tool_a - tool_b) had the same results 3 times in a row"),
        ("abcabcabc", "the same 3 calls (tool_a - tool_b - tool_c) had the same results 3 times in a row"),
    ],
)
def test_a_loop_is_described_by_its_tools(letters: str, text: str) -> None:
    assert found(letters)["loop"].text == text


def test_a_finding_is_the_first_only_at_the_round_that_reaches_its_limit() -> None:
    firsts = [
        (number, one.kind, one.action)
        for number in range(1, 20)
        for one in findings(read("ab" * number), POLICY)
        if one.is_first
    ]
    assert firsts == [
        (3, "loop", "warn"),
        (4, "no_progress", "warn"),
        (5, "loop", "refuse"),
        (10, "rounds", "warn"),
        (15, "rounds", "refuse"),
    ]


def test_the_order_and_the_results_of_parallel_calls_matter() -> None:
    reader = RoundReader()
    for results in ((b"1", b"2"), (b"2", b"1"), (b"1", b"2")):
        reader.call("a", b"x")
        reader.call("b", b"x")
        for result in results:
            reader.result(result)
        reader.close()
    assert (reader.number, reader.known) == (3, 1)


def test_a_new_user_message_ends_everything() -> None:
    reader = read("aaaaa")
    reader.user(b"go on with something else")
    assert list(findings(reader, POLICY)) == []
    assert reader.number == 0


def test_the_same_reply_to_the_same_message_is_a_loop() -> None:
    reader = RoundReader()
    reader.user(b"the task")
    for number in range(1, 6):
        reader.text(b"I cannot do that.")
        reader.user(b"continue")
        seen = {one.kind: one for one in findings(reader, POLICY)}
        assert ("loop" in seen) == (number >= 3)
    assert seen["loop"].text == "the same reply was followed by the same message 5 times in a row"


def test_a_person_who_repeats_a_message_between_other_replies_is_no_loop() -> None:
    reader = RoundReader()
    reader.user(b"the task")
    for number in range(15):
        reader.text(b"part %d" % number)
        reader.user(b"continue")
        assert list(findings(reader, POLICY)) == []


def test_the_same_message_after_tool_calls_is_new() -> None:
    reader = RoundReader()
    for _ in range(10):
        reader.user(b"continue")
        read("ab", reader)
        reader.text(b"done")
    assert reader.number == 2


def test_a_repeated_message_stays_in_the_same_work() -> None:
    reader = RoundReader()
    reader.user(b"the task")
    first = reader.work
    reader.text(b"no")
    reader.user(b"continue")
    second = reader.work
    reader.text(b"no")
    reader.user(b"continue")
    assert 0 != first != second == reader.work


def test_limits_in_seconds_are_found_for_the_session_and_its_step() -> None:
    policy = RunawayPolicy(seconds=Thresholds(80, 100), warn_share=0.5, has_step_seconds=True)
    work = WorkState(1000.0, "draft", 1050.0)
    assert [(one.kind, one.action, one.number) for one in overtime(work, policy, 40, 1079.0)] == [
        ("step_seconds", "warn", 29)
    ]
    assert [(one.kind, one.action) for one in overtime(work, policy, 40, 1100.0)] == [
        ("seconds", "refuse"),
        ("step_seconds", "refuse"),
    ]
    assert [one.key for one in overtime(work, policy, 40, 1100.0)] == ["budget.seconds", "max_seconds of the step"]
    later = work.in_step("review", 1090.0)
    assert (later.since, later.step_since) == (1000.0, 1090.0)
    assert later.in_step("review", 1095.0) is later


def test_a_resumed_work_counts_from_the_round_where_it_was_stopped() -> None:
    stopped = WorkState(1.0, "a", 2.0, ("seconds",), "loop", 12)
    assert stopped.resumed(50.0) == WorkState(50.0, "a", 50.0, lifted=12)
    running = WorkState(1.0)
    assert running.resumed(50.0) is running


def test_a_session_remembers_a_limited_number_of_works() -> None:
    works: Works = {}
    for number in range(MAX_WORK + 3):
        works = with_work(works, str(number), WorkState(number))
    assert list(works) == [str(number) for number in range(3, MAX_WORK + 3)]


def test_without_limits_there_is_nothing_to_read() -> None:
    assert RunawayPolicy().least_messages is None
    assert RunawayPolicy(loop=Thresholds(4), rounds=Thresholds(refuse=3)).least_messages == 6
    assert RunawayPolicy(seconds=Thresholds(None, 60)).least_messages == 0
