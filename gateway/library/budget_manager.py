"""Keep a token budget for one agent run in one program, without a gateway: `BudgetManager`.

budget = BudgetManager(100_000)
with budget.allocate(4_000) as allocation:    # held: concurrent calls cannot spend it
    budget.record_usage(3_120, allocation)    # settled: the rest is free again
budget.suggested_mode()                       # "raw", later "table", "summary", "handle_only"
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import field
from itertools import count
from threading import Lock
from typing import Self

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
from gateway.core.modes import ResponseMode, mode_for, stricter
from gateway.core.values import dataclass
from gateway.library.counters import CharacterCounter, TokenCounter
from gateway.library.results import RenderedResult, check_mode, render_result

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
    """The state of an allocation: its manager, the tokens still held, and those recorded for it so far.

    It changes only under the lock of its manager.
    """

    manager: BudgetManager | None = None
    held: int = 0
    spent: int = 0


@dataclass(frozen=True, slots=True)
class Allocation:
    """Tokens held for one call until its usage is recorded with the same manager.

    In a `with` block, the end of the block releases what is still held, also after an error.
    """

    id: str
    tokens: int
    open: _Open = field(default_factory=_Open, repr=False, compare=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.open.manager is not None:
            self.open.manager.record_usage(0, self)


class BudgetManager:
    """A token budget: hold tokens before a call and record the usage after it.

    Threads and event loops can share one: a lock is held while numbers are added, never while something waits.

    Args:
        total_budget: tokens, 0 or more.
        counter: counts the tokens of texts; four characters per token by default.
        full_texts: keeps the full text of results that `render` shortens, by handle; None: nothing is left out.

    Raises:
        ValueError: the budget is not a whole number >= 0.
    """

    def __init__(
        self,
        total_budget: int,
        *,
        counter: TokenCounter | None = None,
        full_texts: MutableMapping[str, str] | None = None,
    ) -> None:
        if not _is_count(total_budget):
            raise ValueError(f"the budget must be a whole number of tokens, 0 or more, not {total_budget!r}")
        self._claim = Claim(_KEY, Limits(tokens=total_budget))
        self._account = EMPTY
        self._lock = Lock()
        self._numbers = count(1)
        self._counter = counter or CharacterCounter()
        self._full_texts = full_texts
        self.total_budget = total_budget

    def count(self, text: str) -> int:
        """Return the tokens of a text."""
        return self._counter.count(text)

    def allocate(self, tokens: int | str, *, least: int | None = None) -> Allocation:
        """Hold tokens for a call. With `least`, hold as many of them as are left, but at least `least`.

        Args:
            tokens: how many, or a text whose tokens are counted.
            least: the fewest tokens that are useful; None: all of them.

        Raises:
            BudgetExhausted: too few are left.
            ValueError: a number is not a whole number >= 0, or `least` is more than `tokens`.
        """
        most = self.count(tokens) if isinstance(tokens, str) else tokens
        fixed = most if least is None else least
        if not (_is_count(most) and _is_count(fixed) and fixed <= most):
            raise ValueError(f"cannot hold {most!r} tokens, at least {least!r}: give whole numbers, 0 or more")
        with self._lock:
            number = f"allocation-{next(self._numbers)}"
            hold = Hold(number, (self._claim,), Amount(fixed), Amount(1), most=most - fixed)
            outcome = reserve({_KEY: self._account}, hold, _NO_TIME)
            if not isinstance(outcome, Refused):
                granted, changes = outcome
                self._account = changes[_KEY]
                held = fixed + granted.units
                return Allocation(number, held, _Open(self, held))
            used, held = self._account.used.tokens, self._account.held.tokens
        left = max(0, self.total_budget - used - held)
        raise BudgetExhausted(
            f"{fixed:,} token{' is' if fixed == 1 else 's are'} needed and {left:,} of {self.total_budget:,} are left "
            f"({used:,} used, {held:,} held).",
            {"limit": self.total_budget, "used": used, "held": held, "needed": fixed},
        )

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
        known = allocation.open if allocation is not None else _Open(self)
        if allocation is not None and known.manager is not self:
            raise ValueError(f"{allocation.id} was allocated by another manager; record its usage there")
        with self._lock:
            more = max(0, tokens - known.spent)
            self._account = settle({_KEY: self._account}, [_KEY], Amount(known.held), Amount(more))[_KEY]
            known.held, known.spent = 0, known.spent + more
        return self.remaining

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
        account = self._account
        return max(0, self.total_budget - account.used.tokens - account.held.tokens)

    @property
    def usage_fraction(self) -> float:
        """Return the used share of the budget, from 0. It exceeds 1 if calls cost more than was held for them."""
        return balance_of(self._account, self._claim, _NO_TIME).used_fraction or 0.0

    def suggested_mode(self, requested: ResponseMode = "raw") -> ResponseMode:
        """Return the response mode for tool results from now on.

        It is `requested` while more than half of the budget is left, then `table`, `summary` (20 % or less) and
        `handle_only` (5 % or less), but never shows more than `requested`.

        Raises:
            ValueError: the mode is unknown.
        """
        check_mode(requested)
        unused = max(0, self.total_budget - self.used)
        return stricter(requested, mode_for(unused / self.total_budget if self.total_budget else 0.0))

    def render(self, result: str, requested: ResponseMode = "raw") -> RenderedResult:
        """Return a tool result in the mode that `suggested_mode` returns now. Nothing is allocated or recorded.

        Raises:
            ValueError: the mode is unknown.
        """
        return render_result(result, self.suggested_mode(requested), self._full_texts)
