"""Enforce budgets while the store is unavailable, from the accounts as last read.

A worker does not see what other workers spend meanwhile. Each worker may spend what was left of a budget, so a budget
is overspent by at most that amount per worker.

When the store is available again, it receives the records of all calls that have ended, and their costs are dropped
here. It does not know the running calls until it has taken their holds. Until then, these holds are added to the
balances that the store reports, in case it becomes unavailable again.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from gateway.core.ledger.windows import CalendarWindow
from gateway.stores import clock

logger = logging.getLogger("gateway")

#: Two limits: accounts whose last balance is remembered, and accounts without a limit and without holds whose spending
#: during an outage is remembered.
_REMEMBERED: Final = 20_000
#: Seconds after which the store may have expired a session that this worker saw.
_EXPIRES_S: Final = 3_600.0

#: accounts that never expire, as a log names them
_OWNERS: Final[Mapping[str, str]] = {
    "key": "client key",
    "group": "the group of client keys",
    "all": "the sum of client keys",
}


class StaleAccounts:
    """The last known balance of each account, and what was spent since the store became unavailable.

    The holds in `_accounts` are those in `_held`: of calls that only this worker knows.
    """

    def __init__(self, moment: Callable[[], Moment] = clock.now) -> None:
        self._moment = moment
        #: not a BoundedDict: an account that is dropped here is also dropped from `_spent_at`
        self._seen: OrderedDict[AccountKey, Balance] = OrderedDict()
        #: when each session that had used something was seen last
        self._spent_at: dict[AccountKey, Moment] = {}
        self._accounts: dict[AccountKey, Account] = {}
        #: by hold id: accounts and amount of each hold of a running call that the store has not taken yet
        self._holds: dict[str, tuple[Sequence[AccountKey], Amount]] = {}
        self._held: dict[AccountKey, Amount] = {}
        #: request counts of the last outage, which are never sent to the store
        self._rates: dict[AccountKey, Account] = {}
        #: accounts with a limit: what was spent on them is kept until the store is available again
        self._limited: set[AccountKey] = set()
        #: accounts without a limit and without holds, least recently used first; these are dropped first
        #: not a BoundedDict: an account that is dropped here is also dropped from `_accounts`
        self._idle: OrderedDict[AccountKey, None] = OrderedDict()

    def remember(self, balances: Iterable[Balance]) -> None:
        """Remember the balances that the store returned. Limits are the account's, not those that a call declared."""
        for balance in balances:
            if balance.key.kind in _OWNERS:
                self._name_loss(balance)
            elif balance.key.kind == "session":
                self._name_lost_session(balance)
            self._seen[balance.key] = balance
            self._seen.move_to_end(balance.key)
        while len(self._seen) > _REMEMBERED:
            key, _ = self._seen.popitem(last=False)
            self._spent_at.pop(key, None)

    def _name_lost_session(self, balance: Balance) -> None:
        """Log once that the store has lost a session's account and totals.

        An account can also be absent because the session was idle and expired, which is not logged. A deleted or reset
        session keeps its account, with nothing used.
        """
        key, now = balance.key, self._moment()
        spent_at = self._spent_at.pop(key, None)
        if balance.used.calls:
            self._spent_at[key] = now
        if not balance.is_absent:
            return
        seen = self._seen.get(key)
        was_intact = seen is None or not seen.is_orphaned
        if (balance.is_orphaned and was_intact) or (spent_at is not None and now.since(spent_at) < _EXPIRES_S):
            logger.error(
                'the store has lost what session "%s" of "%s" had used%s, so that its budget has room again; the '
                "budget of its client key still holds. Find out who deletes keys (a Redis needs maxmemory-policy "
                "noeviction)",
                key.id,
                key.namespace,
                f": {seen.used.tokens} tokens in {seen.used.calls} calls when this worker looked last" if seen else "",
            )

    def _name_loss(self, balance: Balance) -> None:
        """Log that the account of a client key was set back to zero.

        Only the end of a budget window does that on purpose, so without a window the store has lost data.
        """
        seen = self._seen.get(balance.key)
        if seen is None or seen.limits.window is not None or balance.limits.window is not None:
            return
        if seen.used.calls and (balance.used, balance.held) == (NOTHING, NOTHING):
            logger.error(
                'the store has lost what %s "%s" had used: %d tokens in %d calls when this worker looked last, '
                "and nothing now, so that its budget has room again. Find out who deletes keys (a Redis needs "
                "maxmemory-policy noeviction), and lower its budget by that until it is mended",
                _OWNERS[balance.key.kind],
                balance.key.namespace,
                seen.used.tokens,
                seen.used.calls,
            )

    def update_usage(self, balances: Iterable[Balance]) -> None:
        """Update what is used and held on known accounts. Limits stay, as those in `balances` belong to one call."""
        for balance in balances:
            seen = self._seen.get(balance.key)
            if seen is not None:
                self._seen[balance.key] = replace(balance, limits=seen.limits)

    def claims(self, claims: Iterable[Claim]) -> tuple[Claim, ...]:
        """Return the claims with the limits that were last in force: an operator may have set some for one session."""
        return tuple(self._as_seen(claim) for claim in claims)

    def _as_seen(self, claim: Claim) -> Claim:
        seen = self._seen.get(claim.key)
        if seen is None:
            return claim
        limits = seen.limits
        known = Limits(limits.tokens, limits.nano_usd, limits.calls, claim.configured.window)
        return replace(claim, configured=known)

    def balances(self, claims: Iterable[Claim]) -> tuple[Balance, ...]:
        """Return the balances of the accounts as far as this worker knows them."""
        now = self._moment()
        return tuple(ledger.balance_of(self._account(claim.key), claim, now) for claim in claims)

    def reserve(self, hold: Hold) -> Granted | Refused:
        """Take a hold, which lasts until it is settled; return the refusal if a budget has too little left."""
        now = self._moment()
        for claim in hold.claims:
            if claim.key not in self._seen:
                self.remember([ledger.balance_of(ledger.EMPTY, Claim(claim.key, claim.configured), now)])
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
        """Replace a hold with what was spent. Without effect if the store has taken the hold."""
        if hold_id not in self._holds:
            return
        changes = self._give_back(hold_id, spent)
        for key, account in changes.items():
            if account.held == NOTHING and key not in self._limited:
                self._idle[key] = None
        while len(self._idle) > _REMEMBERED:
            key, _ = self._idle.popitem(last=False)
            del self._accounts[key]

    def _give_back(self, hold_id: str, spent: Amount | None) -> ledger.Changes:
        """End a hold of this worker and return the changed accounts.

        `spent`: what replaces the hold. None: count the whole hold as spent, as the holds of other workers are.
        """
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

    def drop_hold(self, hold_id: str, balances: Iterable[Balance]) -> None:
        """Drop a hold of this worker that the store has taken. `balances`: of its accounts, with that hold."""
        self._give_back(hold_id, None)
        self.update_usage(balances)

    def drop_spent(self) -> None:
        """Drop what was spent during the outage, as the store is available again.

        The last known balances include it, in case the store becomes unavailable again before it returns new ones.
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
        if key.kind == "rate" and (counted := self._rate(key, seen)) is not None:
            return counted
        # Holds of that time may have been spent by now, and it is not known which calls they belonged to.
        used, held = seen.used.plus(seen.held), self._held.get(key, NOTHING)
        return Account(used=used, held=held, closing=seen.closing)

    def _rate(self, key: AccountKey, seen: Balance) -> Account | None:
        """Return the request count of the last outage, or None if its window is over or the store counted as many."""
        counted, window = self._rates.get(key), seen.limits.window
        if counted is None or counted.opened is None or window is None or isinstance(window, CalendarWindow):
            return None
        is_over = self._moment().since(counted.opened) >= window
        return counted if not is_over and counted.used.calls > seen.used.calls else None
