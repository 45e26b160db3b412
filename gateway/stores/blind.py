"""What may be spent while the store is away: in each worker, what was left of an account when it saw that last.

No worker knows what others spend meanwhile. So each of them may spend what was left, and a budget is overspent by no
more than that. When the store is back it gets the records of all these calls, and what is counted here is dropped.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

from gateway.core import ledger
from gateway.core.ledger import Account, AccountKey, Amount, Claim, Granted, Hold, Limits, Moment, Refused, Standing
from gateway.stores import clock

#: how many accounts are remembered as they were seen last, and for how many of those that have no limit and hold
#: nothing it is remembered what was spent on them
_REMEMBERED: Final = 20_000


class Blind:
    """Accounts as they were last seen, and what was spent on them since the store went away."""

    def __init__(self, moment: Callable[[], Moment] = clock.now) -> None:
        self._moment = moment
        self._seen: OrderedDict[AccountKey, Standing] = OrderedDict()
        self._accounts: dict[AccountKey, Account] = {}
        #: accounts that have a limit: what was spent on them is not forgotten before the store is back
        self._limited: set[AccountKey] = set()
        #: accounts that have none and on which nothing is held: the first ones were used longest ago, and go first
        self._idle: OrderedDict[AccountKey, None] = OrderedDict()

    def saw(self, standings: Iterable[Standing]) -> None:
        """Remember how accounts stand, as the store said: with their own limits, not with what one call declared."""
        for stands in standings:
            self._seen[stands.key] = stands
            self._seen.move_to_end(stands.key)
        while len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)

    def saw_used(self, standings: Iterable[Standing]) -> None:
        """Remember what is used and held of accounts that were seen before, not the limits: those are of one call."""
        for stands in standings:
            seen = self._seen.get(stands.key)
            if seen is not None:
                self._seen[stands.key] = replace(stands, limits=seen.limits)

    def claims(self, claims: Iterable[Claim]) -> tuple[Claim, ...]:
        """The claims, with the limits that were last in force: an operator may have set some for one session alone."""
        return tuple(self._as_seen(claim) for claim in claims)

    def _as_seen(self, claim: Claim) -> Claim:
        seen = self._seen.get(claim.key)
        if seen is None:
            return claim
        limits = seen.limits
        known = Limits(limits.tokens, limits.nano_usd, limits.calls, claim.configured.window_s)
        return Claim(claim.key, known, claim.declared)

    def standings(self, claims: Iterable[Claim]) -> tuple[Standing, ...]:
        """How the accounts stand as far as this worker knows."""
        now = self._moment()
        return tuple(ledger.standing(self._account(claim.key), claim, now) for claim in claims)

    def reserve(self, hold: Hold) -> Granted | Refused:
        """Take a hold; it lasts until it is settled."""
        now = self._moment()
        for claim in hold.claims:
            if claim.key not in self._seen:
                self.saw([ledger.standing(ledger.EMPTY, Claim(claim.key, claim.configured), now)])
        accounts = {claim.key: self._account(claim.key) for claim in hold.claims}
        outcome = ledger.reserve(accounts, hold, now)
        if isinstance(outcome, Refused):
            return outcome
        granted, changes = outcome
        self._accounts |= changes
        self._limited |= {stands.key for stands in granted.standings if not stands.limits.is_none}
        for key in changes:
            self._idle.pop(key, None)
        return granted

    def settle(self, hold: Hold, units: int, spent: Amount) -> None:
        """Put what was spent in the place of a hold; not on accounts that `forget` has dropped meanwhile."""
        known = [claim.key for claim in hold.claims if claim.key in self._accounts]
        changes = ledger.settle(self._accounts, known, hold.amount(units), spent)
        self._accounts |= changes
        for key, account in changes.items():
            if account.held == ledger.NOTHING and key not in self._limited:
                self._idle[key] = None
        while len(self._idle) > _REMEMBERED:
            key, _ = self._idle.popitem(last=False)
            del self._accounts[key]

    def forget(self) -> None:
        """The store is back: drop what was counted.

        It stays in how accounts were seen last, should the store go again before it says how they stand.
        """
        for key, account in self._accounts.items():
            seen = self._seen.get(key)
            if seen is not None:
                self._seen[key] = replace(seen, used=account.used, held=account.held)
        self._accounts.clear()
        self._limited.clear()
        self._idle.clear()

    def _account(self, key: AccountKey) -> Account:
        account = self._accounts.get(key)
        if account is not None:
            return account
        seen = self._seen.get(key)
        # What was held then may have been spent by now: who held it is not known.
        return Account(used=seen.used.plus(seen.held)) if seen is not None else ledger.EMPTY
