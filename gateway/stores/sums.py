"""Write a session's totals as whole numbers, which SQLite and Redis can add."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Final

from gateway.core.usage import Charge, Totals

#: the fields of `Totals`, in their order
SUMS: Final = (
    "calls", "input_tokens", "output_tokens", "total_tokens", "cache_read_tokens", "cache_write_tokens",
    "reasoning_tokens", "estimated_tokens", "estimated_calls", "unpriced_calls", "trimmed_calls", "saved_tokens",
    "cost_pico_usd",
)  # fmt: skip
#: The largest sum and the largest addend: two of them fit in 64 bits, so that no sum turns negative.
MAX_SUM: Final = 2**62
_NOTHING: Final = (0,) * len(SUMS)
_PICO: Final = Decimal(10) ** 12
#: USD: about 4.6 million
_MAX_COST: Final = MAX_SUM / _PICO


def sums_of(charge: Charge | None, saved_tokens: int) -> tuple[int, ...]:
    """Return what a call adds to each column: zeros without a charge."""
    if charge is None:
        return _NOTHING
    usage, cost = charge.usage, charge.cost_usd
    sums = (
        1,
        usage.input_tokens,
        usage.output_tokens,
        usage.total_tokens,
        usage.cache_read_tokens,
        usage.cache_write_tokens,
        usage.reasoning_tokens,
        charge.estimated_tokens,
        int(charge.source != "provider"),
        int(cost is None),
        int(saved_tokens > 0),
        saved_tokens,
        int(cost * _PICO) if cost else 0,
    )
    return sums if max(sums) <= MAX_SUM else tuple(min(value, MAX_SUM) for value in sums)


def totals_of(row: Sequence[int]) -> Totals:
    """Return the totals of a row with these columns."""
    *counts, cost_pico_usd = row
    return Totals(*counts, cost_usd=cost_pico_usd / _PICO)  # type: ignore[misc, arg-type]  # as many columns as fields


def stopped(totals: Totals) -> Totals:
    """Return the totals, each limited to `MAX_SUM`, for a store without columns."""
    sums = {name: getattr(totals, name) for name in SUMS[:-1]}
    if totals.cost_usd <= _MAX_COST and max(sums.values()) <= MAX_SUM:
        return totals
    counts = {name: min(value, MAX_SUM) for name, value in sums.items()}
    return replace(totals, cost_usd=min(totals.cost_usd, _MAX_COST), **counts)
