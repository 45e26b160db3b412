"""Keep a token budget for one agent run in one process, without a gateway: `BudgetManager`.

budget = BudgetManager(100_000)
allocation = budget.allocate(4_000)          # held: concurrent calls cannot spend it
budget.record_usage(3_120, allocation)       # settled: the rest is free again
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
#: the time does not matter for a budget without a window
_NO_TIME = Moment(0, 0)


def _is_count(value: object) -> bool:
    """Return whether the value is a whole number >= 0.

    Python parses NaN in JSON, and every comparison with NaN is false. Added to a budget, it would grant everything.
    """
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@dataclass(slots=True)
class _Open:
    """The state of an allocation: its manager, the tokens still held, and those recorded for it so far."""

    manager: BudgetManager | None = None
    held: int = 0
    spent: int = 0


@dataclass(frozen=True, slots=True)
class Allocation:
    """Tokens held for one call until its usage is recorded with the same manager."""

    id: str
    tokens: int
    open: _Open = field(default_factory=_Open, repr=False, compare=False)


class BudgetManager:
    """A token budget: hold tokens before a call and record the usage after it. For one thread or one event loop.

    Args:
        total_budget: tokens, 0 or more.

    Raises:
        ValueError: the budget is not a whole number >= 0.
    """

    def __init__(self, total_budget: int) -> None:
        if not _is_count(total_budget):
            raise ValueError(f"the budget must be a whole number of tokens, 0 or more, not {total_budget!r}")
        self._claim = Claim(_KEY, Limits(tokens=total_budget))
        self._account = EMPTY
        self._numbers = count(1)
        self.total_budget = total_budget

    def allocate(self, tokens: int, *, least: int | None = None) -> Allocation:
        """Hold `tokens` for a call. With `least`, hold as many of them as are left, but at least `least`.

        Raises:
            BudgetExhausted: too few are left.
            ValueError: a number is not a whole number >= 0, or `least` is more than `tokens`.
        """
        fixed = tokens if least is None else least
        if not (_is_count(tokens) and _is_count(fixed) and fixed <= tokens):
            raise ValueError(f"cannot hold {tokens!r} tokens, at least {least!r}: give whole numbers, 0 or more")
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
        """Replace a hold by the tokens that were really spent, and return the tokens left.

        Usage is recorded in full, even if it is more than was held. An allocation counts once, with the largest number
        recorded for it. Recording the same number again changes nothing, and a smaller one subtracts nothing. 0
        releases the hold.

        Raises:
            ValueError: `tokens` is not a whole number >= 0, or another manager made the allocation. Nothing was
                recorded.
        """
        if not _is_count(tokens):
            raise ValueError(f"usage must be a whole number of tokens, 0 or more, not {tokens!r}")
        if allocation is None:
            self._settle(0, tokens)
            return self.remaining
        known = allocation.open
        if known.manager is not self:
            raise ValueError(f"{allocation.id} was allocated by another manager; record its usage there")
        self._settle(known.held, max(0, tokens - known.spent))
        known.held, known.spent = 0, max(tokens, known.spent)
        return self.remaining

    def _settle(self, held: int, spent: int) -> None:
        self._account = settle({_KEY: self._account}, [_KEY], Amount(held), Amount(spent))[_KEY]

    @property
    def used(self) -> int:
        """Return the tokens spent."""
        return self._account.used.tokens

    @property
    def held(self) -> int:
        """Return the tokens of allocations without recorded usage."""
        return self._account.held.tokens

    @property
    def remaining(self) -> int:
        """Return the tokens that can still be allocated."""
        return max(0, self.total_budget - self.used - self.held)

    @property
    def usage_fraction(self) -> float:
        """Return the used share of the budget, from 0. It exceeds 1 if calls cost more than was held for them."""
        return balance_of(self._account, self._claim, _NO_TIME).used_fraction or 0.0

    @property
    def suggested_mode(self) -> ResponseMode:
        """Return the response mode for tool results from now on."""
        return mode_for(1 - self.usage_fraction)
