"""A token budget for one agent run in one process: `BudgetManager`.

The gateway's own budgets are kept in stores.

budget = BudgetManager(100_000)
allocation = budget.allocate(4_000)          # held: what runs beside it cannot spend it
budget.record_usage(3_120, allocation)       # settled: what was not needed is free again
budget.suggested_mode                        # "raw", later "table", "summary", "handle_only"
"""

from __future__ import annotations

from dataclasses import field
from itertools import count

from gateway.core.errors import BudgetExhausted
from gateway.core.ledger.arithmetic import (
    EMPTY,
    AccountKey,
    Amount,
    Claim,
    Hold,
    Limits,
    Moment,
    Refused,
    balance_of,
    reserve,
    settle,
)
from gateway.core.modes import ResponseMode, mode_for
from gateway.core.values import dataclass

__all__ = ["Allocation", "BudgetExhausted", "BudgetManager"]

_KEY = AccountKey("session", "library")
#: a budget without a window never looks at the time
_NO_TIME = Moment(0, 0)


def _is_count(value: object) -> bool:
    """Whether it is a whole number from 0.

    Python reads NaN out of JSON, and no comparison with that holds: once added to a budget it would grant everything.
    """
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@dataclass(slots=True)
class _Open:
    """What an allocation's manager knows of it: who it is, the tokens still held, and those recorded for it so far."""

    manager: BudgetManager | None = None
    held: int = 0
    spent: int = 0


@dataclass(frozen=True, slots=True)
class Allocation:
    """Tokens held for one call until its usage is recorded, by the manager that held them."""

    id: str
    tokens: int
    open: _Open = field(default_factory=_Open, repr=False, compare=False)


class BudgetManager:
    """Tokens that may be spent in all: held before a call, settled after it. For one thread, or one event loop.

    Args:
        total_budget: tokens, 0 or more.

    Raises:
        ValueError: the budget is negative, or no whole number.
    """

    def __init__(self, total_budget: int) -> None:
        if not _is_count(total_budget):
            raise ValueError(f"a budget is 0 tokens or more, in whole numbers, not {total_budget!r}")
        self._claim = Claim(_KEY, Limits(tokens=total_budget))
        self._account = EMPTY
        self._numbers = count(1)
        self.total_budget = total_budget

    def allocate(self, tokens: int, *, least: int | None = None) -> Allocation:
        """Hold tokens for a call: `tokens`, or with `least` as many of them as are left, but no fewer than that.

        Raises:
            BudgetExhausted: fewer are left.
            ValueError: a number is negative, or no whole one, or `least` is more than `tokens`.
        """
        fixed = tokens if least is None else least
        if not (_is_count(tokens) and _is_count(fixed) and fixed <= tokens):
            raise ValueError(f"{tokens!r} tokens, at least {least!r}, cannot be held: give whole numbers from 0")
        number = f"allocation-{next(self._numbers)}"
        hold = Hold(number, (self._claim,), Amount(fixed), Amount(1), most=tokens - fixed)
        outcome = reserve({_KEY: self._account}, hold, _NO_TIME)
        if isinstance(outcome, Refused):
            raise BudgetExhausted(
                f"{fixed:,} token{' is' if fixed == 1 else 's are'} needed and {self.remaining:,} "
                f"of {self.total_budget:,} are left "
                f"({self.used:,} used, {self.held:,} held).",
                {"limit": self.total_budget, "used": self.used, "held": self.held, "needed": fixed},
            )
        granted, changes = outcome
        self._account = changes[_KEY]
        tokens = fixed + granted.units
        return Allocation(number, tokens, _Open(self, tokens))

    def record_usage(self, tokens: int, allocation: Allocation | None = None) -> int:
        """Add what was really spent, in the place of what was held for it; the tokens that are left then.

        Recorded in full even where it is more than was held. An allocation counts once, with the largest number that
        was recorded for it: to record the same again changes nothing, and nothing that was spent is taken back. 0
        gives it back.

        Raises:
            ValueError: the number is negative, or no whole one, or the allocation is another manager's. Nothing was
                recorded.
        """
        if not _is_count(tokens):
            raise ValueError(f"usage is 0 tokens or more, in whole numbers, not {tokens!r}")
        if allocation is None:
            self._settle(0, tokens)
            return self.remaining
        known = allocation.open
        if known.manager is not self:
            raise ValueError(f"{allocation.id} was allocated by another manager: record its usage there")
        self._settle(known.held, max(0, tokens - known.spent))
        known.held, known.spent = 0, max(tokens, known.spent)
        return self.remaining

    def _settle(self, held: int, spent: int) -> None:
        self._account = settle({_KEY: self._account}, [_KEY], Amount(held), Amount(spent))[_KEY]

    @property
    def used(self) -> int:
        """Tokens spent."""
        return self._account.used.tokens

    @property
    def held(self) -> int:
        """Tokens of allocations whose usage is not known yet."""
        return self._account.held.tokens

    @property
    def remaining(self) -> int:
        """Tokens that may still be allocated."""
        return max(0, self.total_budget - self.used - self.held)

    @property
    def usage_fraction(self) -> float:
        """Share of the budget that is spent: 0 to 1, and beyond where a call cost more than was held for it."""
        return balance_of(self._account, self._claim, _NO_TIME).used_fraction or 0.0

    @property
    def suggested_mode(self) -> ResponseMode:
        """How tool results should be shown from here on."""
        return mode_for(1 - self.usage_fraction)
