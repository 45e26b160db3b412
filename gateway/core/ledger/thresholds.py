"""Decide which thresholds of a budget have to be announced, such as 80 % used.

A threshold is announced once in each budget period. It is announced again if the limit is raised and the threshold is
reached again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from gateway.core.ledger.arithmetic import DIMENSIONS, NOTHING, AccountKey, Amount, Balance, Dimension, Limits
from gateway.core.values import dataclass

#: used percentages of a budget that are announced if nothing else is configured
DEFAULT_THRESHOLDS: Final = (50, 80, 95, 100)
_PERCENT: Final = 100


class Announced(NamedTuple):
    """An account when its thresholds were last compared. All that it had reached by then was announced.

    Attributes:
        period: its budget period, see `Account`.
        used: what was used.
        limits: the limits in force.
    """

    period: int = 0
    used: Amount = NOTHING
    limits: tuple[int | None, int | None, int | None] = (None, None, None)


@dataclass(frozen=True, slots=True)
class BudgetAlert:
    """A threshold that a budget has reached.

    Attributes:
        id: the same each time that this alert is sent.
        at: Unix time in seconds.
        account: whose budget it is.
        threshold: percent.
        unit: what the largest share was used of.
        limits: the limits in force, see `Limits`.
        resets_at: Unix time in seconds at which the window ends; None without a window.
    """

    id: str
    at: float
    account: AccountKey
    threshold: int
    unit: Dimension
    used: Amount
    limits: tuple[int | None, int | None, int | None]
    resets_at: float | None = None

    @property
    def used_fraction(self) -> float:
        """Return the used share of the limit, which can exceed 1."""
        at = DIMENSIONS.index(self.unit)
        return self.used[at] / (self.limits[at] or 1)


def announced(balance: Balance) -> Announced:
    """Return what to remember of an account after its thresholds were announced."""
    return Announced(balance.period, balance.used, balance.limits[:3])


def due(balance: Balance, thresholds: Sequence[int], before: Announced | None) -> tuple[int, ...]:
    """Return the thresholds to announce, in percent.

    Args:
        balance: the account now.
        thresholds: the percentages that are announced.
        before: what is remembered of the account; None if nothing was announced.
    """
    limits = balance.limits[:3]
    reached = [one for one in thresholds if _is_reached(one, balance.used, limits)]
    if before is None or before.period != balance.period:
        return tuple(reached)
    # By the old limits, because a lowered limit reaches thresholds without a call. By the new ones, because a raised
    # limit makes the used share smaller.
    return tuple(
        one
        for one in reached
        if not (_is_reached(one, before.used, before.limits) and _is_reached(one, before.used, limits))
    )


def unit_of(balance: Balance) -> Dimension:
    """Return what the largest share of a limit was used of. Limits of 0 are ignored."""
    used, limits = balance.used, balance.limits
    shares = {name: used[at] / limit for at, name in enumerate(DIMENSIONS) if (limit := limits.of(name))}
    return max(shares, key=lambda name: shares[name], default="tokens")


def is_watched(limits: Limits) -> bool:
    """Return whether an account has a limit whose thresholds can be reached by calls."""
    return any(limits[:3])


def _is_reached(threshold: int, used: Amount, limits: Sequence[int | None]) -> bool:
    """Return whether this share of one of these limits is used; False for a limit of 0, which needs no call."""
    return any(limit and amount * _PERCENT >= threshold * limit for amount, limit in zip(used, limits, strict=True))
