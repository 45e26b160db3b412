"""Correct the estimate of a request by the errors of earlier estimates."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from gateway.core.context_budget import LengthLimit
from gateway.core.counting.calibration import CorrectedEstimate, LastTurn, Residual, calibration_key, correct_estimate
from gateway.core.counting.estimate import Estimate
from gateway.core.counting.request import RequestParts
from gateway.core.values import dataclass


@dataclass(frozen=True, slots=True)
class CountedRequest:
    """A request and the input tokens that the provider is expected to report for it.

    Attributes:
        request: the request.
        estimate: its estimate before correction.
        expected: its estimate after correction. This covers the request itself.
        key: the calibration key under which this kind of request is learned.
        stored_tokens: tokens of an earlier response that the provider stores (`previous_response_id`) and of everything
            before it. They are added to `expected`. The context budget ignores them: the gateway cannot trim them, and
            does not know how much of them the provider drops. The messages in the request are the newest ones, which
            should stay.
    """

    request: RequestParts
    estimate: Estimate
    expected: CorrectedEstimate
    key: str
    stored_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Return the input tokens that the provider is expected to report."""
        return self.expected.tokens + self.stored_tokens

    def margin(self, safety: float | None) -> int:
        """Return the tokens to keep free above the expected ones.

        `safety` is a configured factor; if it is None, return the learned margin.
        """
        expected = self.expected
        return expected.margin if safety is None else ceil(expected.tokens * safety) - expected.tokens

    @property
    def estimate_with_frames(self) -> int:
        """Return the estimate plus the part of the correction that grows with the number of frames (see `Estimate`).

        Dropping messages changes this number. The rest of the correction is a constant, see `constant_offset`.
        """
        return self.estimate.tokens + round(self.expected.frame * self.estimate.frames)

    @property
    def constant_offset(self) -> int:
        """Return the part of the correction that stays the same if messages are dropped, in tokens; may be negative."""
        return self.expected.tokens - self.estimate_with_frames

    def fits(self, budget: int | None, safety: float | None) -> bool:
        """Return True if the expected tokens and the margin are within the budget."""
        return budget is None or self.expected.tokens + self.margin(safety) <= budget


@dataclass(frozen=True, slots=True)
class LearnedCorrections:
    """Corrections and limits that are known from earlier calls.

    Attributes:
        offsets: errors of earlier requests of this kind, see `correct_estimate` for this and the next two.
        surprises: errors of earlier requests although the last turn of their session was known.
        frames: tokens that each frame added.
        last_turn: the last turn of this session.
        limit: the context window of the model, as its provider named it in an error.
        stored_tokens: tokens of the earlier response that the request continues.
    """

    offsets: Sequence[Residual] = ()
    surprises: Sequence[Residual] = ()
    frames: Sequence[Residual] = ()
    last_turn: LastTurn | None = None
    limit: LengthLimit | None = None
    stored_tokens: int = 0

    @property
    def includes_other_sessions(self) -> bool:
        """Return True if any of it, except the limit, was learned from other sessions."""
        return bool(self.offsets or self.surprises or self.frames)

    @property
    def of_session(self) -> LearnedCorrections:
        """Return only what was learned from this session, and the limit."""
        return LearnedCorrections(last_turn=self.last_turn, limit=self.limit, stored_tokens=self.stored_tokens)


def calibration_key_of(request: RequestParts, estimate: Estimate, kept: int = 0) -> str:
    """Return the calibration key for estimates like this one.

    A request that continues a stored response has a separate key, because the tokens of that response are an estimate
    too.
    """
    shape = f"{estimate.shape}+kept" if kept else estimate.shape
    return calibration_key(request.provider, request.model, request.wire, shape)


def count_tokens(
    request: RequestParts, estimate: Estimate, learned: LearnedCorrections, key: str | None = None
) -> CountedRequest:
    """Correct the estimate of a request by what was learned.

    Pass `key` to correct it as a request of another shape.
    """
    key = key or calibration_key_of(request, estimate, learned.stored_tokens)
    expected = correct_estimate(
        estimate, key, learned.offsets, learned.last_turn, learned.surprises, frames=learned.frames
    )
    return CountedRequest(request, estimate, expected, key, learned.stored_tokens)
