"""Estimate when a budget is empty, by the newest calls that were charged to it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from gateway.core.ledger.arithmetic import DIMENSIONS, Balance, Dimension
from gateway.core.record import CallRecord
from gateway.core.values import dataclass

#: fewer calls say nothing about a rate
LEAST_CALLS: Final = 3
#: newest calls that are read for an estimate
NEWEST_CALLS: Final = 100
#: calls that began earlier (seconds) are ignored
_MAX_AGE_S: Final = 3_600.0
#: seconds without a call after which an account is idle, so that it has no rate
_IDLE_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class BurnRate:
    """When a budget is empty if its calls continue like the newest ones.

    What is kept for the closing call of a session is not left for these calls. After the closing call nothing is left.

    Attributes:
        unit: the unit that is used up first. USD are billionths.
        calls: the number of calls on which the estimate is based.
        per_minute: mean amount per minute.
        per_call: mean amount per call.
        empty_in_s: seconds until the budget is empty; 0 if it is.
        empty_in_calls: calls for which it is enough.
        refills_first: its window ends before it is empty.
    """

    unit: Dimension
    calls: int
    per_minute: float
    per_call: float
    empty_in_s: float
    empty_in_calls: int
    refills_first: bool


def burn_rate(balance: Balance, records: Iterable[CallRecord], now: float) -> BurnRate | None:
    """Return the rate of an account; None without a limit, with too few calls, or if the account is idle.

    Args:
        balance: the account.
        records: its newest calls; those of other accounts are ignored.
        now: Unix time in seconds.
    """
    recent = [
        record
        for record in records
        if record.charge is not None and balance.key in record.accounts and now - record.started_at <= _MAX_AGE_S
    ]
    if len(recent) < LEAST_CALLS:
        return None
    if now - max(record.started_at + record.duration_s for record in recent) > _IDLE_S:
        return None
    seconds = max(1.0, now - min(record.started_at for record in recent))
    rates = []
    for at, unit in enumerate(DIMENSIONS):
        limit, spent = balance.limits.of(unit), sum(record.spent[at] for record in recent)
        if limit is not None and spent:
            kept = limit if balance.closing else balance.kept(unit)
            left, per_call = max(0, limit - balance.used[at] - kept), spent / len(recent)
            empty_in_s = left * seconds / spent
            refills_first = balance.resets_s is not None and balance.resets_s < empty_in_s
            per_minute = spent * 60 / seconds
            rates.append(
                BurnRate(unit, len(recent), per_minute, per_call, empty_in_s, int(left / per_call), refills_first)
            )
    return min(rates, key=lambda rate: rate.empty_in_s, default=None)
