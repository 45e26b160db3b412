from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.counting.calibration import (
    _MAX_FRAME_TOKENS,
    MAX_RESIDUALS,
    CorrectedEstimate,
    LastTurn,
    Residual,
    calibration_key,
    can_be_trimmed_to,
    correct_estimate,
    is_plausible,
    largest_estimate,
    residuals_from,
    whole_request_tokens,
)
from gateway.core.counting.context import ContextCounts
from gateway.core.counting.estimate import Estimate

KEY = calibration_key("openai", "gpt-4o", "chat", "tools")


def estimate(tokens: int = 1000, *, spread: float = 0.1, doubt: int = 0, frames: int = 0) -> Estimate:
    return Estimate(tokens, "calibrated", spread, doubt, "tools", "gpt-4o", "words", ContextCounts(), frames=frames)


def seen(*residuals: int, of: int = 1_000) -> tuple[Residual, ...]:
    """Return the residuals of requests of this estimate."""
    return tuple(Residual(residual, of) for residual in residuals)


def test_margin_is_the_spread_of_the_family_before_learning() -> None:
    found = correct_estimate(estimate(), KEY)
    assert (found.tokens, found.margin, found.offset, found.source) == (1000, 100, 0, "calibrated")
    assert found.safe_tokens == 1100


def test_median_of_the_last_residuals_is_added() -> None:
    found = correct_estimate(estimate(), KEY, seen(300, 310, 4000, 290, 300))
    assert (found.tokens, found.offset, found.source) == (1300, 300, "learned")


def test_last_turn_of_the_session_takes_precedence() -> None:
    found = correct_estimate(estimate(), KEY, seen(300, 300, 300), LastTurn(KEY, 420))
    assert (found.tokens, found.source) == (1420, "learned")


def test_last_turn_of_another_shape_is_ignored() -> None:
    other = LastTurn(calibration_key("openai", "gpt-4o", "chat", "image"), 8000)
    assert correct_estimate(estimate(), KEY, (), other).tokens == 1000
    assert correct_estimate(estimate(), KEY, seen(50), other).tokens == 1050


@pytest.mark.parametrize(("residual", "tokens"), [(10**9, 1000 + 8192), (-(10**9), 400)])
def test_learned_offset_is_clamped(residual: int, tokens: int) -> None:
    assert correct_estimate(estimate(), KEY, seen(residual)).tokens == tokens


def test_margin_grows_with_the_spread_of_reports() -> None:
    agreed = correct_estimate(estimate(), KEY, seen(*(300,) * 12)).margin
    spread = correct_estimate(estimate(), KEY, seen(300, 300, 300, 300, 300, 300, 300, 300, 400, 450)).margin
    assert agreed == 26  # 2 % of 1,300
    assert spread == 150


def test_doubt_is_in_the_margin_until_reports_arrive() -> None:
    assert correct_estimate(estimate(doubt=500), KEY).margin == 600
    assert correct_estimate(estimate(doubt=500), KEY, seen(*(0,) * 9)).margin == 60


def test_one_wrong_report_does_not_block_the_context_window() -> None:
    assert correct_estimate(estimate(100_000), KEY, seen(0, 0, 0, 90_000, of=100_000)).margin <= 25_000


@given(
    st.integers(0, 10**7),
    st.lists(st.builds(Residual, st.integers(-(10**9), 10**9), st.integers(0, 10**7)), max_size=40),
    st.one_of(st.none(), st.integers(-(10**9), 10**9)),
    st.floats(0, 1),
)
def test_corrected_tokens_are_never_negative_and_have_a_margin(
    tokens: int, residuals: list[Residual], last: int | None, spread: float
) -> None:
    turn = LastTurn(KEY, last) if last is not None else None
    found = correct_estimate(estimate(tokens, spread=spread), KEY, residuals, turn)
    assert found.tokens >= 0
    assert found.margin >= max(8, 0.02 * found.tokens - 1)
    assert (found.source == "learned") == bool(residuals or turn)
    assert found == correct_estimate(estimate(tokens, spread=spread), KEY, residuals, turn)


def test_residuals_survive_json() -> None:
    assert residuals_from(json.loads(json.dumps(seen(1, -2, 3)))) == seen(1, -2, 3)


def test_residuals_without_estimates_are_read() -> None:
    assert residuals_from([1, -2]) == (Residual(1, 0), Residual(-2, 0))
    assert correct_estimate(estimate(10), KEY, residuals_from([300, 310, 290])).offset == 300


def test_residuals_of_large_requests_are_scaled_down_for_small_ones() -> None:
    known = (Residual(0, 7), Residual(195, 953), Residual(400, 2_000))
    small = correct_estimate(estimate(7, spread=0.0), KEY, known)
    assert (small.tokens, small.margin) == (8, 8)
    assert correct_estimate(estimate(2_000), KEY, known).offset == 195


def test_negative_residuals_of_large_requests_are_scaled_down() -> None:
    assert correct_estimate(estimate(100), KEY, seen(-400, -10)).tokens == 100 - 30
    assert correct_estimate(estimate(1_000), KEY, seen(-400, -10)).tokens == 1_000 - 205


def test_constant_offset_is_added_to_small_requests() -> None:
    known = (Residual(5_020, 40_000), Residual(5_000, 9_000), Residual(5_004, 10_000))
    assert correct_estimate(estimate(10), KEY, known).offset == 5_000


def test_surprise_of_a_large_request_is_scaled_down() -> None:
    turn, known = LastTurn(KEY, 0), (Residual(0, 900), Residual(195, 953))
    assert correct_estimate(estimate(20, spread=0.0), KEY, (), turn, known).margin == 8


@pytest.mark.parametrize(
    "value",
    [
        None,
        "text",
        3,
        {"key": 1},
        {"residual": 2},
        ["a", True, None],
        {"key": "k"},
        [[1], [1, 2, 3], [True, 1], ["a", 1]],
    ],
)
def test_invalid_residuals_are_ignored(value: object) -> None:
    assert residuals_from(value) == ()


def test_keys_of_different_requests_differ() -> None:
    keys = {
        calibration_key(*parts)
        for parts in [("a", "b", "c", "d"), ("ab", "", "c", "d"), ("a", "b", "c", ""), ("a", "b", "cd", "")]
    }
    assert len(keys) == 4


@pytest.mark.parametrize(
    ("shape", "other", "may"),
    [
        ("tools+image", "tools+image", True),
        ("tools+image+other", "tools", True),
        ("image", "", True),
        ("tools", "tools+image", False),
        ("tools+schema", "tools", False),
        ("tools", "thinking", False),
    ],
)
def test_only_marks_of_messages_can_disappear_from_a_shape(shape: str, other: str, *, may: bool) -> None:
    of = calibration_key("a", "b", "chat", shape)
    assert can_be_trimmed_to(of, calibration_key("a", "b", "chat", other)) is may
    assert not can_be_trimmed_to(of, calibration_key("a", "c", "chat", other))


def test_margin_after_a_known_turn_comes_from_surprises() -> None:
    plain = estimate(10_000, spread=0.0)
    turn = LastTurn(KEY, 300)
    known = seen(300, 9_000)
    unsure = correct_estimate(plain, KEY, known, turn)
    assert (unsure.margin, unsure.last) == (206, turn)
    assert correct_estimate(plain, KEY, known, turn, seen(1, -2, 3, 0, 1, 2, -1, 0)).margin == 52
    assert correct_estimate(plain, KEY, known, turn, seen(1, 700, 3, 0, 1, 2, -1, 700)).margin == 700


def test_surprises_do_not_change_the_first_call_of_a_session() -> None:
    found = correct_estimate(estimate(10_000, spread=0.0), KEY, seen(*(300,) * 12), None, seen(*(0,) * 12))
    assert (found.margin, found.last) == (206, None)


def test_ceiling_is_the_largest_estimate_within_the_budget() -> None:
    turn = LastTurn(KEY, 500)
    most = largest_estimate(estimate(spread=0.0), KEY, (), turn, (), budget=10_000)
    assert correct_estimate(estimate(most, spread=0.0), KEY, (), turn).safe_tokens <= 10_000
    assert correct_estimate(estimate(most + 20, spread=0.0), KEY, (), turn).safe_tokens > 10_000


# --- frames: what a provider adds to each call ---------------------------------------------------------------------------


class Session:
    """A session whose provider adds `always` tokens to a request and `each` tokens to a call. A call has 300 tokens of text."""

    def __init__(self, always: int, each: int) -> None:
        self.always, self.each = always, each
        self.last: LastTurn | None = None
        self.frames: tuple[Residual, ...] = ()

    def reported(self, calls: int) -> int:
        return 500 + 300 * calls + self.always + self.each * calls

    def expected(self, calls: int) -> CorrectedEstimate:
        return correct_estimate(estimate(500 + 300 * calls, frames=calls), KEY, (), self.last, frames=self.frames)

    def turn(self, calls: int) -> None:
        residual = self.always + self.each * calls
        self.last = self.last.followed_by(residual, calls) if self.last is not None else LastTurn(KEY, residual, calls)
        if self.last.over:
            self.frames = (*self.frames, Residual(self.last.added, self.last.over))[-MAX_RESIDUALS:]


@given(
    st.integers(0, 5_000),
    st.integers(-20, 40),
    st.lists(st.integers(1, 3), min_size=8, max_size=30),
    st.floats(0, 1),
)
def test_trimmed_calls_lower_the_expected_offset(always: int, each: int, steps: list[int], left: float) -> None:
    session, calls = Session(always, each), 0
    for step in (0, *steps):
        calls += step
        session.turn(calls)
    kept = max(1, int(calls * left))
    reported = session.reported(kept)
    assert abs(session.expected(kept).tokens - reported) <= 0.01 * reported
    session.turn(kept)
    assert abs(session.expected(kept + 2).tokens - session.reported(kept + 2)) <= 0.01 * reported


@given(st.integers(0, 5_000), st.lists(st.integers(0, 60), min_size=1, max_size=30), st.integers(0, 60))
def test_offset_stays_if_calls_add_nothing(always: int, turns: list[int], calls: int) -> None:
    session = Session(always, 0)
    for each in turns:
        session.turn(each)
    found = session.expected(calls)
    assert (found.offset, found.frame) == (always, 0)
    plain = correct_estimate(estimate(500 + 300 * calls), KEY, (), LastTurn(KEY, always))
    assert (found.tokens, found.margin) == (plain.tokens, plain.margin)


def test_first_call_of_a_session_is_expected_to_add_what_others_did() -> None:
    turn, others = LastTurn(KEY, 100, 0), (Residual(30 * 31, 30), Residual(0, 1), Residual(31 * 30, 30))
    assert correct_estimate(estimate(frames=1), KEY, (), turn, frames=others).offset == 130
    assert correct_estimate(estimate(frames=1), KEY, (), turn).offset == 100


def test_single_call_only_counts_in_part() -> None:
    turn = LastTurn(KEY, 100, 0).followed_by(140, 1)
    assert correct_estimate(estimate(frames=2), KEY, (), turn).offset == 160


def test_residual_too_large_for_frames_belongs_to_the_turn() -> None:
    turn = LastTurn(KEY, 100, 0).followed_by(5_100, 1)
    assert turn == LastTurn(KEY, 5_100, 1)
    assert LastTurn(KEY, 100, 5).followed_by(200, 5) == LastTurn(KEY, 200, 5)


def test_tokens_of_old_frames_fade() -> None:
    turn = LastTurn(KEY, 0, 0)
    for calls in range(1, 200):
        turn = turn.followed_by(40 * calls, calls)
    before = turn.frames or 0
    assert (turn.added, turn.over) == (40 * turn.over, 32)
    for calls in range(1, 200):
        turn = turn.followed_by(turn.residual + 10, before + calls)
    assert turn.added <= 11 * turn.over


def test_last_turn_without_frame_count_is_learned_from_the_next_turn() -> None:
    old = LastTurn(KEY, 300)
    assert correct_estimate(estimate(frames=9), KEY, (), old, frames=(Residual(400, 20),)).offset == 300
    assert old.followed_by(310, 9) == LastTurn(KEY, 310, 9)
    assert LastTurn(KEY, 310, 9, 40, 2).followed_by(320, None) == LastTurn(KEY, 320, None, 40, 2)


@given(*[st.integers(-(10**18), 10**18)] * 4, st.lists(st.builds(Residual, st.integers(), st.integers()), max_size=3))
def test_impossible_numbers_are_bounded(frames: int, added: int, over: int, calls: int, of: list[Residual]) -> None:
    turn = LastTurn(KEY, 0, frames, added, over)
    assert abs(correct_estimate(estimate(frames=calls), KEY, (), turn, frames=of).frame) <= _MAX_FRAME_TOKENS
    assert turn.followed_by(5, calls).residual == 5


def test_ceiling_includes_the_tokens_of_frames() -> None:
    turn = LastTurn(KEY, 500 + 40 * 10, 10, 40 * 32, 32)
    others = (Residual(40 * 32, 32),)
    most = largest_estimate(estimate(spread=0.0, frames=10), KEY, (), turn, (), frames=others, budget=10_000)
    for calls in (0, 4, 10):
        text = estimate(most - 40 * calls, spread=0.0, frames=calls)
        assert 9_990 <= correct_estimate(text, KEY, (), turn, frames=others).safe_tokens <= 10_000


@pytest.mark.parametrize(
    ("reported", "shape", "tells"),
    [
        (8 * 1000 + 8_192, "tools", True),
        (8 * 1000 + 8_193, "tools", False),
        (900_000, "tools+image", True),  # a picture that is only named may be of any size
        (2**24 + 1, "image", False),
        (400, "tools", True),
        (399, "tools", False),  # no text has so few tokens
        (10, "tools+image", True),
        (0, "", False),
    ],
)
def test_implausible_report_is_not_learned(reported: int, shape: str, *, tells: bool) -> None:
    assert is_plausible(reported, 1000, calibration_key("p", "m", "chat", shape)) is tells


@pytest.mark.parametrize(
    ("reported", "newest", "before", "whole"),
    [
        (1_100, 100, None, 1_100),
        (400, 100, None, 400),
        (399, 0, None, None),
        (399, 100, None, None),  # neither of the whole request nor of its newest messages
        (314, 100, None, 900 + 314),
        (315, 100, None, None),
        (150, 100, None, 900 + 150),
        (40, 100, None, 900 + 40),
        (39, 100, None, None),
        (150, 100, LastTurn(KEY, 70), 900 + 70 + 150),
        (150, 100, LastTurn(KEY, -300), 900 + 150),  # an earlier report of too little
    ],
)
def test_too_small_report_covers_the_newest_messages_or_nothing(
    reported: int, newest: int, before: LastTurn | None, whole: int | None
) -> None:
    assert whole_request_tokens(reported, 1_000, newest, before, KEY) == whole


def test_any_report_is_plausible_if_parts_have_unknown_size() -> None:
    assert whole_request_tokens(5, 1_000, 100, None, calibration_key("p", "m", "chat", "tools+image")) == 5
