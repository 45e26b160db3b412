"""Enforce budgets while the store is unavailable, from the accounts as last read.

No worker knows what others spend meanwhile. So each of them may spend what was left, and a budget is overspent by no
more than that. When the store is back it gets the records of all calls that have ended, and what was spent by these is
dropped here. Of calls under way it knows nothing until it has taken their holds: until then what they hold counts on
top of what the store says, should it go again.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final

from gateway.core.ledger import arithmetic as ledger
from gateway.core.ledger.arithmetic import (
    NOTHING,
    Account,
    AccountKey,
    Amount,
    Balance,
    Claim,
    Granted,
    Hold,
    Limits,
    Moment,
    Refused,
)
from gateway.stores import clock

logger = logging.getLogger("gateway")

#: how many accounts are remembered as they were seen last, and for how many of those that have no limit and hold
#: nothing it is remembered what was spent on them
_REMEMBERED: Final = 20_000
#: seconds after which a session that this worker saw may have expired in the store
_EXPIRES_S: Final = 3_600.0


class Blind:
    """Accounts as they were last seen, and what was spent on them since the store went away.

    What an account of `_accounts` holds is what `_held` says of it: of calls that only this worker knows of.
    """

    def __init__(self, moment: Callable[[], Moment] = clock.now) -> None:
        self._moment = moment
        #: not a BoundedDict: an account that is dropped here is also dropped from `_spent_at`
        self._seen: OrderedDict[AccountKey, Balance] = OrderedDict()
        #: when sessions were seen last that had used something
        self._spent_at: dict[AccountKey, Moment] = {}
        self._accounts: dict[AccountKey, Account] = {}
        #: by id: holds of calls under way that the store has not taken, and what they hold
        self._holds: dict[str, tuple[Sequence[AccountKey], Amount]] = {}
        self._held: dict[AccountKey, Amount] = {}
        #: requests that were counted when the store was away last, of which it never hears
        self._rates: dict[AccountKey, Account] = {}
        #: accounts that have a limit: what was spent on them is not forgotten before the store is back
        self._limited: set[AccountKey] = set()
        #: accounts that have none and on which nothing is held: the first ones were used longest ago, and go first
        #: not a BoundedDict: an account that is dropped here is also dropped from `_accounts`
        self._idle: OrderedDict[AccountKey, None] = OrderedDict()

    def saw(self, balances: Iterable[Balance]) -> None:
        """Remember how accounts stand, as the store said: with their own limits, not with what one call declared."""
        for balance in balances:
            if balance.key.kind == "key":
                self._name_loss(balance)
            elif balance.key.kind == "session":
                self._name_lost_session(balance)
            self._seen[balance.key] = balance
            self._seen.move_to_end(balance.key)
        while len(self._seen) > _REMEMBERED:
            key, _ = self._seen.popitem(last=False)
            self._spent_at.pop(key, None)

    def _name_lost_session(self, balance: Balance) -> None:
        """Log that a session's account and totals are gone, once. A session that was idle for long has expired.

        A deleted or reset session keeps its account, with nothing used.
        """
        key, now = balance.key, self._moment()
        spent_at = self._spent_at.pop(key, None)
        if balance.used.calls:
            self._spent_at[key] = now
        if not balance.is_absent:
            return
        seen = self._seen.get(key)
        is_news = seen is None or not seen.is_orphaned
        if (balance.is_orphaned and is_news) or (spent_at is not None and now.since(spent_at) < _EXPIRES_S):
            logger.error(
                'the store has lost what session "%s" of "%s" had used%s, so that its budget has room again; the '
                "budget of its client key still holds. Find out who deletes keys (a Redis needs maxmemory-policy "
                "noeviction)",
                key.id,
                key.namespace,
                f": {seen.used.tokens} tokens in {seen.used.calls} calls when this worker looked last" if seen else "",
            )

    def _name_loss(self, balance: Balance) -> None:
        """Say so where an account of a client key has begun anew: only its window ends, nothing else lets it do so."""
        seen = self._seen.get(balance.key)
        if seen is None or seen.limits.window_s is not None or balance.limits.window_s is not None:
            return
        if seen.used.calls and (balance.used, balance.held) == (NOTHING, NOTHING):
            logger.error(
                'the store has lost what client key "%s" had used: %d tokens in %d calls when this worker looked last, '
                "and nothing now, so that its budget has room again. Find out who deletes keys (a Redis needs "
                "maxmemory-policy noeviction), and lower its budget by that until it is mended",
                balance.key.namespace,
                seen.used.tokens,
                seen.used.calls,
            )

    def saw_used(self, balances: Iterable[Balance]) -> None:
        """Remember what is used and held of accounts that were seen before, not the limits: those are of one call."""
        for balance in balances:
            seen = self._seen.get(balance.key)
            if seen is not None:
                self._seen[balance.key] = replace(balance, limits=seen.limits)

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

    def balances(self, claims: Iterable[Claim]) -> tuple[Balance, ...]:
        """How the accounts stand as far as this worker knows."""
        now = self._moment()
        return tuple(ledger.balance_of(self._account(claim.key), claim, now) for claim in claims)

    def reserve(self, hold: Hold) -> Granted | Refused:
        """Take a hold; it lasts until it is settled."""
        now = self._moment()
        for claim in hold.claims:
            if claim.key not in self._seen:
                self.saw([ledger.balance_of(ledger.EMPTY, Claim(claim.key, claim.configured), now)])
        accounts = {claim.key: self._account(claim.key) for claim in hold.claims}
        outcome = ledger.reserve(accounts, hold, now)
        if isinstance(outcome, Refused):
            return outcome
        granted, changes = outcome
        self._accounts |= changes
        keys, held = [claim.key for claim in hold.claims if claim.key.kind != "rate"], hold.amount(granted.units)
        self._holds[hold.id] = keys, held
        for key in keys:
            self._held[key] = self._held.get(key, NOTHING).plus(held)
        self._limited |= {balance.key for balance in granted.balances if not balance.limits.is_none}
        for key in changes:
            self._idle.pop(key, None)
        return granted

    def settle(self, hold_id: str, spent: Amount) -> None:
        """Put what was spent in the place of a hold; nothing is to be done where the store has taken that."""
        changes = self._give_back(hold_id, spent)
        for key, account in changes.items():
            if account.held == NOTHING and key not in self._limited:
                self._idle[key] = None
        while len(self._idle) > _REMEMBERED:
            key, _ = self._idle.popitem(last=False)
            del self._accounts[key]

    def _give_back(self, hold_id: str, spent: Amount | None) -> ledger.Changes:
        """End a hold of ours. `spent`: in its place; None: all of it, as what others hold."""
        keys, held = self._holds.pop(hold_id, ((), NOTHING))
        for key in keys:
            left = self._held[key].less(held)
            self._held[key] = left
            if left == NOTHING:
                del self._held[key]
            seen = self._seen.get(key)
            if spent is not None and seen is not None and key not in self._accounts:
                self._seen[key] = replace(seen, used=seen.used.plus(spent))
        known = [key for key in keys if key in self._accounts]
        changes = ledger.settle(self._accounts, known, held, held if spent is None else spent)
        self._accounts |= changes
        return changes

    def handed_over(self, hold_id: str, balances: Iterable[Balance]) -> None:
        """The store has taken a hold of ours, and says how the accounts stand with it."""
        self._give_back(hold_id, None)
        self.saw_used(balances)

    def forget(self) -> None:
        """The store is back: drop what was spent.

        It stays in how accounts were seen last, should the store go again before it says how they stand.
        """
        for key, account in self._accounts.items():
            seen = self._seen.get(key)
            if seen is not None:
                self._seen[key] = replace(seen, used=account.used, held=NOTHING)
        self._rates |= {key: account for key, account in self._accounts.items() if key.kind == "rate"}
        self._accounts.clear()
        self._limited.clear()
        self._idle.clear()

    def _account(self, key: AccountKey) -> Account:
        account = self._accounts.get(key)
        if account is not None:
            return account
        seen = self._seen.get(key)
        if seen is None:
            return Account(held=self._held.get(key, NOTHING))
        if key.kind == "rate" and (rated := self._rate(key, seen)) is not None:
            return rated
        # What was held then may have been spent by now: who held it is not known.
        return Account(used=seen.used.plus(seen.held), held=self._held.get(key, NOTHING))

    def _rate(self, key: AccountKey, seen: Balance) -> Account | None:
        """The count of requests while the store was away, if it still runs and is more than what the store said."""
        rated, window_s = self._rates.get(key), seen.limits.window_s
        if rated is None or rated.opened is None or window_s is None:
            return None
        is_over = self._moment().since(rated.opened) >= window_s
        return rated if not is_over and rated.used.calls > seen.used.calls else None
