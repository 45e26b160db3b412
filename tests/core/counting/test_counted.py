from __future__ import annotations

import json
from dataclasses import replace

from gateway.config import families
from gateway.core.context_budget import LengthLimit
from gateway.core.counting.cache import CountCache
from gateway.core.counting.calibration import LastTurn, Residual
from gateway.core.counting.counted import CountedRequest, LearnedCorrections, count_tokens
from gateway.core.counting.estimate import Estimator
from gateway.core.counting.heuristic import CharacterCounter
from gateway.core.counting.request import RequestParts

ESTIMATOR = Estimator(families(), lambda _: CharacterCounter(), CountCache())
REQUEST = RequestParts(
    wire="chat",
    model="gpt-4o",
    provider="openai",
    messages=[json.dumps({"role": "user", "content": "Find the parcel of order 4711. " * 20}).encode()],
)


def counted(learned: LearnedCorrections | None = None) -> CountedRequest:
    return count_tokens(REQUEST, ESTIMATOR.estimate(REQUEST), learned or LearnedCorrections())


def test_request_fits_only_with_its_margin() -> None:
    original = counted()
    assert original.fits(None, None)
    assert original.fits(original.expected.safe_tokens, None)
    assert not original.fits(original.expected.safe_tokens - 1, None)


def test_fixed_safety_factor_replaces_the_learned_margin() -> None:
    original = counted()
    assert original.fits(original.expected.tokens, 1.0)
    assert not original.fits(original.expected.tokens, 1.01)


def test_turn_without_stored_response_does_not_correct_one_with_it() -> None:
    unknown = counted()
    learned = LearnedCorrections(last_turn=LastTurn(unknown.key, 8_000), stored_tokens=30_000)
    assert counted(learned).tokens == unknown.tokens + 30_000


def test_correction_is_split_into_a_part_per_frame_and_a_constant() -> None:
    original = counted()
    learned = replace(original, expected=replace(original.expected, tokens=original.estimate.tokens + 50, frame=12.0))
    assert learned.estimate_with_frames == original.estimate.tokens + 12 * original.estimate.frames
    assert learned.constant_offset == 50 - 12 * original.estimate.frames


def test_learned_values_of_the_session_exclude_other_sessions() -> None:
    learned = LearnedCorrections((), (), (Residual(40, 100),), LastTurn("k", 1), LengthLimit(8_000), 5)
    assert learned.includes_other_sessions
    assert learned.of_session == LearnedCorrections(
        last_turn=LastTurn("k", 1), limit=LengthLimit(8_000), stored_tokens=5
    )
    assert not learned.of_session.includes_other_sessions
