from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.counting.calibration import (
    LastTurn,
    Residual,
    calibration_key,
    ceiling,
    corrected,
    residuals_from,
)
from gateway.core.counting.context import ContextCounts
from gateway.core.counting.estimate import Estimate

KEY = calibration_key("openai", "gpt-4o", "chat", "tools")


def estimate(tokens: int = 1000, *, spread: float = 0.1, doubt: int = 0) -> Estimate:
    return Estimate(tokens, "calibrated", spread, doubt, "tools", "gpt-4o", "words", ContextCounts())


def seen(*residuals: int, of: int = 1_000) -> tuple[Residual, ...]:
    """What requests of so many tokens were off by."""
    return tuple(Residual(residual, of) for residual in residuals)


def test_nothing_learned_leaves_the_estimate_with_its_familys_spread_as_margin() -> None:
    found = corrected(estimate(), KEY)
    assert (found.tokens, found.margin, found.offset, found.source) == (1000, 100, 0, "calibrated")
    assert found.safe_tokens == 1100


def test_the_median_of_the_last_residuals_is_added() -> None:
    found = corrected(estimate(), KEY, seen(300, 310, 4000, 290, 300))
    assert (found.tokens, found.offset, found.source) == (1300, 300, "learned")


def test_the_sessions_last_turn_wins_over_the_key() -> None:
    found = corrected(estimate(), KEY, seen(300, 300, 300), LastTurn(KEY, 420))
    assert (found.tokens, found.source) == (1420, "learned")


def test_a_last_turn_of_another_shape_teaches_nothing() -> None:
    other = LastTurn(calibration_key("openai", "gpt-4o", "chat", "image"), 8000)
    assert corrected(estimate(), KEY, (), other).tokens == 1000
    assert corrected(estimate(), KEY, seen(50), other).tokens == 1050


@pytest.mark.parametrize(("residual", "tokens"), [(10**9, 1000 + 8192), (-(10**9), 400)])
def test_what_is_learned_is_clamped(residual: int, tokens: int) -> None:
    assert corrected(estimate(), KEY, seen(residual)).tokens == tokens


def test_spread_of_the_reports_widens_the_margin_and_agreement_narrows_it() -> None:
    agreed = corrected(estimate(), KEY, seen(*(300,) * 12)).margin
    spread = corrected(estimate(), KEY, seen(300, 300, 300, 300, 300, 300, 300, 300, 400, 450)).margin
    assert agreed == 26  # 2 % of 1,300
    assert spread == 150


def test_doubt_about_sizes_is_in_the_margin_until_reports_come() -> None:
    assert corrected(estimate(doubt=500), KEY).margin == 600
    assert corrected(estimate(doubt=500), KEY, seen(*(0,) * 9)).margin == 60


def test_one_strange_report_does_not_shut_the_window() -> None:
    assert corrected(estimate(100_000), KEY, seen(0, 0, 0, 90_000, of=100_000)).margin <= 25_000


@given(
    st.integers(0, 10**7),
    st.lists(st.builds(Residual, st.integers(-(10**9), 10**9), st.integers(0, 10**7)), max_size=40),
    st.one_of(st.none(), st.integers(-(10**9), 10**9)),
    st.floats(0, 1),
)
def test_a_correction_is_never_negative_and_always_leaves_a_margin(
    tokens: int, residuals: list[Residual], last: int | None, spread: float
) -> None:
    turn = LastTurn(KEY, last) if last is not None else None
    found = corrected(estimate(tokens, spread=spread), KEY, residuals, turn)
    assert found.tokens >= 0
    assert found.margin >= max(8, 0.02 * found.tokens - 1)
    assert (found.source == "learned") == bool(residuals or turn)
    assert found == corrected(estimate(tokens, spread=spread), KEY, residuals, turn)


def test_residuals_survive_json() -> None:
    assert residuals_from(json.loads(json.dumps(seen(1, -2, 3)))) == seen(1, -2, 3)


def test_residuals_without_their_request_are_read_as_they_were_written() -> None:
    assert residuals_from([1, -2]) == (Residual(1, 0), Residual(-2, 0))
    assert corrected(estimate(10), KEY, residuals_from([300, 310, 290])).offset == 300


def test_what_large_requests_were_off_by_makes_no_small_one_large() -> None:
    known = (Residual(0, 7), Residual(195, 953), Residual(400, 2_000))
    small = corrected(estimate(7, spread=0.0), KEY, known)
    assert (small.tokens, small.margin) == (8, 8)
    assert corrected(estimate(2_000), KEY, known).offset == 195


def test_what_is_added_to_every_request_is_added_to_a_small_one() -> None:
    known = (Residual(5_020, 40_000), Residual(5_000, 9_000), Residual(5_004, 10_000))
    assert corrected(estimate(10), KEY, known).offset == 5_000


def test_a_surprise_of_a_large_request_leaves_room_for_small_ones() -> None:
    turn, known = LastTurn(KEY, 0), (Residual(0, 900), Residual(195, 953))
    assert corrected(estimate(20, spread=0.0), KEY, (), turn, known).margin == 8


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
def test_foreign_residuals_are_read_as_nothing(value: object) -> None:
    assert residuals_from(value) == ()


def test_keys_of_different_requests_differ() -> None:
    keys = {
        calibration_key(*parts)
        for parts in [("a", "b", "c", "d"), ("ab", "", "c", "d"), ("a", "b", "c", ""), ("a", "b", "cd", "")]
    }
    assert len(keys) == 4


def test_an_estimate_that_follows_its_session_is_as_sure_as_such_estimates_were() -> None:
    plain = estimate(10_000, spread=0.0)
    turn = LastTurn(KEY, 300)
    known = seen(300, 9_000)
    unsure = corrected(plain, KEY, known, turn)
    assert (unsure.margin, unsure.follows) == (206, True)
    assert corrected(plain, KEY, known, turn, seen(1, -2, 3, 0, 1, 2, -1, 0)).margin == 52
    assert corrected(plain, KEY, known, turn, seen(1, 700, 3, 0, 1, 2, -1, 700)).margin == 700


def test_other_sessions_surprises_say_nothing_of_a_first_call() -> None:
    found = corrected(estimate(10_000, spread=0.0), KEY, seen(*(300,) * 12), None, seen(*(0,) * 12))
    assert (found.margin, found.follows) == (206, False)


def test_the_ceiling_is_the_largest_estimate_that_is_within_the_budget() -> None:
    turn = LastTurn(KEY, 500)
    most = ceiling(estimate(spread=0.0), KEY, (), turn, (), budget=10_000)
    assert corrected(estimate(most, spread=0.0), KEY, (), turn).safe_tokens <= 10_000
    assert corrected(estimate(most + 20, spread=0.0), KEY, (), turn).safe_tokens > 10_000
