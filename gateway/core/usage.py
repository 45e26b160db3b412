"""Define the usage of a call, and add it to a session's totals.

The terms are those of OpenTelemetry. Cached, audio and reasoning tokens are part of `input_tokens` or `output_tokens`.
`total_tokens` is the provider's own number if it reports one, because some providers bill more than the sum.
"""

from __future__ import annotations

from dataclasses import fields, replace
from decimal import Decimal
from typing import Literal

from gateway.core.values import dataclass

#: Where the usage of a call comes from. `mixed`: the provider reported input or output; the other one is estimated.
UsageSource = Literal["provider", "estimated", "mixed"]

#: The largest count that a JSON number holds exactly. Larger reported counts are lowered to it.
MAX_TOKENS = 2**53


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one call. All counts are >= 0; `total_tokens` >= input + output."""

    input_tokens: int = 0
    output_tokens: int = 0
    total_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0
    reasoning_tokens: int = 0
    audio_input_tokens: int = 0
    audio_output_tokens: int = 0
    cache_write_1h_tokens: int = 0  # of cache_write_tokens, those kept for an hour: they cost more

    @classmethod
    def of(cls, input_tokens: int, output_tokens: int) -> Usage:
        """Return a usage with only input and output tokens."""
        return cls(input_tokens, output_tokens, input_tokens + output_tokens)

    def without(self, part: Usage) -> Usage:
        """Return this usage minus a part of it, at least 0 for each count."""
        names = [field.name for field in fields(self)]
        return Usage(*[max(0, getattr(self, name) - getattr(part, name)) for name in names])


@dataclass(frozen=True, slots=True)
class Charge:
    """The usage and cost that one call adds to its session. `cost_usd` is None if the price is unknown."""

    usage: Usage
    source: UsageSource
    cost_usd: Decimal | None = None

    @property
    def estimated_tokens(self) -> int:
        """Return the tokens of this charge if any part of them is estimated, or 0."""
        return 0 if self.source == "provider" else self.usage.total_tokens


@dataclass(frozen=True, slots=True)
class Totals:
    """The totals of a session.

    If `unpriced_calls` > 0, `cost_usd` is not the whole cost. `saved_tokens` is the estimated number of input tokens
    that trimming saved, in `trimmed_calls` calls.
    """

    calls: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    total_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0
    reasoning_tokens: int = 0
    estimated_tokens: int = 0
    estimated_calls: int = 0
    unpriced_calls: int = 0
    trimmed_calls: int = 0
    saved_tokens: int = 0
    cost_usd: Decimal = Decimal(0)

    def add(self, charge: Charge, saved_tokens: int = 0) -> Totals:
        """Return the totals plus one call. `saved_tokens`: input tokens that trimming saved."""
        return self._sum(charge, saved_tokens, 1)

    def without(self, charge: Charge, saved_tokens: int = 0) -> Totals:
        """Return the totals minus one call. Each is at least 0, because the totals may have been reset since."""
        return _not_negative(self._sum(charge, saved_tokens, -1))

    def _sum(self, charge: Charge, saved_tokens: int, sign: int) -> Totals:
        usage = charge.usage
        return replace(
            self,
            calls=self.calls + sign,
            input_tokens=self.input_tokens + sign * usage.input_tokens,
            output_tokens=self.output_tokens + sign * usage.output_tokens,
            total_tokens=self.total_tokens + sign * usage.total_tokens,
            cache_read_tokens=self.cache_read_tokens + sign * usage.cache_read_tokens,
            cache_write_tokens=self.cache_write_tokens + sign * usage.cache_write_tokens,
            reasoning_tokens=self.reasoning_tokens + sign * usage.reasoning_tokens,
            estimated_tokens=self.estimated_tokens + sign * charge.estimated_tokens,
            estimated_calls=self.estimated_calls + sign * (charge.source != "provider"),
            unpriced_calls=self.unpriced_calls + sign * (charge.cost_usd is None),
            trimmed_calls=self.trimmed_calls + sign * (saved_tokens > 0),
            saved_tokens=self.saved_tokens + sign * saved_tokens,
            cost_usd=self.cost_usd + sign * (charge.cost_usd or 0),
        )

    def plus(self, other: Totals) -> Totals:
        """Return the sum of both."""
        return Totals(*[getattr(self, name.name) + getattr(other, name.name) for name in fields(self)])

    def less(self, other: Totals) -> Totals:
        """Return this minus the other; each is at least 0."""
        return _not_negative(Totals(*[getattr(self, name.name) - getattr(other, name.name) for name in fields(self)]))

    @property
    def source(self) -> UsageSource:
        """Return whether the usage was reported, estimated, or a mixture of both."""
        if not self.estimated_calls:
            return "provider"
        return "estimated" if self.estimated_calls == self.calls else "mixed"


def _not_negative(totals: Totals) -> Totals:
    return replace(totals, **{name.name: max(0, getattr(totals, name.name)) for name in fields(totals)})
