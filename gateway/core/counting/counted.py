"""Correct the estimate of a request by what earlier calls taught."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from gateway.core.context_budget import LengthLimit
from gateway.core.counting.calibration import Corrected, LastTurn, Residual, calibration_key, corrected
from gateway.core.counting.estimate import Estimate
from gateway.core.counting.request import RequestParts
from gateway.core.values import dataclass


@dataclass(frozen=True, slots=True)
class CountedRequest:
    """A request and what the provider is expected to report for it, in tokens.

    `expected` is of the request itself. `kept` comes on top where the request goes on from an answer that the provider
    keeps (`previous_response_id`): what that answer and all before it weigh. The context budget leaves it
    out: it cannot be cut here, nobody knows how much of it the provider drops, and what is sent beside it is what was
    said last, which should stay.
    `key`: under which this kind of request is learned.
    """

    request: RequestParts
    estimate: Estimate
    expected: Corrected
    key: str
    kept: int = 0

    @property
    def tokens(self) -> int:
        """What the provider is expected to report."""
        return self.expected.tokens + self.kept

    def margin(self, safety: float | None) -> int:
        """Tokens to keep free beside those expected: as learned, or a configured factor's part."""
        expected = self.expected
        return expected.margin if safety is None else ceil(expected.tokens * safety) - expected.tokens

    @property
    def framed(self) -> int:
        """The estimate and the part of what was learned that grows with the number of frames (see `Estimate`).

        It is what a choice among messages can change; `beyond`, the rest of what was learned, is a constant.
        """
        return self.estimate.tokens + round(self.expected.frame * self.estimate.frames)

    @property
    def beyond(self) -> int:
        """Tokens that were learned and stay the same whatever messages are left out; may be negative."""
        return self.expected.tokens - self.framed

    def fits(self, budget: int | None, safety: float | None) -> bool:
        """Whether it is surely within the budget."""
        return budget is None or self.expected.tokens + self.margin(safety) <= budget


@dataclass(frozen=True, slots=True)
class Learned:
    """What is known from earlier calls.

    Attributes:
        offsets: by how much requests of this kind were off; this and the next two see `corrected`.
        surprises: by how much they were off although their session's last turn was known.
        frames: what each frame added.
        last_turn: of this session.
        limit: of the model, as its provider named it in a refusal.
        kept: tokens of the earlier answer that the request goes on from.
    """

    offsets: Sequence[Residual] = ()
    surprises: Sequence[Residual] = ()
    frames: Sequence[Residual] = ()
    last_turn: LastTurn | None = None
    limit: LengthLimit | None = None
    kept: int = 0

    @property
    def is_of_others(self) -> bool:
        """Whether other sessions taught any of it but the limit."""
        return bool(self.offsets or self.surprises or self.frames)

    @property
    def alone(self) -> Learned:
        """What the session taught, and the limit."""
        return Learned(last_turn=self.last_turn, limit=self.limit, kept=self.kept)


def key_of(request: RequestParts, estimate: Estimate, kept: int = 0) -> str:
    """The key under which errors of estimates like this one are learned.

    Requests that go on from a kept answer of known weight have one of their own: that weight is a guess too.
    """
    shape = f"{estimate.shape}+kept" if kept else estimate.shape
    return calibration_key(request.provider, request.model, request.wire, shape)


def count_tokens(request: RequestParts, estimate: Estimate, learned: Learned, key: str | None = None) -> CountedRequest:
    """The request with its estimate corrected by what was learned.

    `key`: correct it as a request of this key, where that is not the key of its own shape.
    """
    key = key or key_of(request, estimate, learned.kept)
    expected = corrected(estimate, key, learned.offsets, learned.last_turn, learned.surprises, frames=learned.frames)
    return CountedRequest(request, estimate, expected, key, learned.kept)
