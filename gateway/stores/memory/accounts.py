"""Keep accounts and holds in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from gateway.core.ledger import arithmetic as ledger
from gateway.core.ledger.arithmetic import AccountKey, Balance, Claim, Dimension, Granted, Moment, Refused
from gateway.core.record import CallRecord
from gateway.core.stored import OpenHold
from gateway.core.values import dataclass


@dataclass(slots=True)
class _LeasedHold:
    """A hold, the time of its last renewal, and the seconds until its lease ends."""

    opened: OpenHold
    renewed: Moment
    lease_s: float


class MemoryLedger:
    """Apply the arithmetic of `core/ledger/arithmetic.py` to dicts of accounts and holds.

    `now` returns Unix seconds, `moment` the time for holds.
    """

    def __init__(self, now: Callable[[], float], moment: Callable[[], Moment]) -> None:
        self._now = now
        self._moment = moment
        self._accounts: dict[AccountKey, ledger.Account] = {}
        #: time of each account's last change (Unix seconds)
        self._changed: dict[AccountKey, float] = {}
        self._holds: dict[str, _LeasedHold] = {}

    def __contains__(self, key: AccountKey) -> bool:
        return key in self._accounts

    def reserve(self, opened: OpenHold, lease_s: float, *, is_settled: bool) -> Granted | Refused:
        """See `Store.reserve`. `is_settled`: the call is settled already."""
        leased = self._holds.get(opened.hold.id)
        if leased is not None:
            return Granted(leased.opened.units, self.balances(opened.hold.claims))
        if is_settled:
            # The reservation comes too late: a hold that is taken now would never be given back.
            return Granted(opened.hold.least, self.balances(opened.hold.claims))
        outcome = ledger.reserve(self._accounts, opened.hold, self._moment())
        if isinstance(outcome, Refused):
            return outcome
        granted, changes = outcome
        self._keep(changes)
        self._holds[opened.hold.id] = _LeasedHold(replace(opened, units=granted.units), self._moment(), lease_s)
        return granted

    def extend(self, hold_id: str, units: int) -> Granted | None:
        """See `Store.extend`."""
        leased = self._holds.get(hold_id)
        if leased is None:
            return None
        granted, changes = ledger.extend(self._accounts, leased.opened.hold, units, self._moment())
        self._keep(changes)
        leased.opened = replace(leased.opened, units=leased.opened.units + granted.units)
        return granted

    def renew(self, noted: Mapping[str, int]) -> frozenset[str]:
        """See `Store.renew`."""
        for hold_id, tokens in noted.items():
            leased = self._holds.get(hold_id)
            if leased is not None:
                leased.renewed = self._moment()
                leased.opened = replace(leased.opened, noted=max(tokens, leased.opened.noted))
        return frozenset(noted.keys() - self._holds.keys())

    def overdue(self, limit: int) -> Sequence[OpenHold]:
        """See `Store.overdue_holds`."""
        now = self._moment()
        over = (held.opened for held in self._holds.values() if ledger.is_lease_over(held.renewed, held.lease_s, now))
        return list(islice(over, limit))

    def balances(self, claims: Sequence[Claim]) -> tuple[Balance, ...]:
        """See `Store.balances`."""
        now = self._moment()
        return tuple(ledger.balance_of(self._accounts.get(claim.key, ledger.EMPTY), claim, now) for claim in claims)

    def decide(self, key: AccountKey, limits: Mapping[Dimension, int | None] | None) -> None:
        """See `Store.override_limits`."""
        account = self._accounts.get(key, ledger.EMPTY)
        overrides = {**account.overrides, **limits} if limits is not None else {}
        self._keep({key: replace(account, overrides=overrides)})

    def settle(self, record: CallRecord) -> None:
        """Give back the hold of a call, and charge what it spent."""
        leased = self._holds.pop(record.call_id, None)
        if leased is not None:
            held = leased.opened.hold.amount(leased.opened.units)
            keys = [claim.key for claim in leased.opened.hold.claims]
            self._keep(ledger.settle(self._accounts, keys, held, ledger.NOTHING))
        self._keep(ledger.settle(self._accounts, record.accounts, ledger.NOTHING, record.spent, record.call_id))

    def correct(self, record: CallRecord, orphaned: CallRecord, periods: ledger.Periods) -> None:
        """Replace the charge of an orphaned call. `orphaned`: its earlier record; `periods`: when that was charged."""
        spent, ended = record.spent, record.call_id
        self._keep(ledger.correct(self._accounts, record.accounts, orphaned.spent, spent, periods, ended))

    def periods(self, keys: Sequence[AccountKey]) -> ledger.Periods:
        """Return the current budget periods of accounts."""
        return ledger.periods(self._accounts, keys)

    def clear(self, key: AccountKey) -> None:
        """Set the usage of an account to zero, without changing its age."""
        account = self._accounts.get(key)
        if account is not None:
            self._accounts[key] = ledger.with_new_period(account)

    def forget(self, key: AccountKey) -> None:
        """Set the usage of an account to zero, and remove the limits that an operator set."""
        account = self._accounts.get(key)
        if account is not None:
            self._keep({key: ledger.after_deletion(account)})

    def of_agents(self, session: AccountKey) -> list[AccountKey]:
        """Return the accounts of the agents of a session. `session`: the account of the session."""
        return [
            key
            for key in self._accounts
            if key.kind == "agent" and key.namespace == session.namespace and key.session_id == session.id
        ]

    def changed_before(self, before: float) -> list[AccountKey]:
        """Return the accounts that were last changed before a time (Unix seconds)."""
        return [key for key, changed_at in self._changed.items() if changed_at < before]

    def expire(self, key: AccountKey) -> None:
        """Drop an account, unless running calls hold something on it."""
        if self._accounts[key].held == ledger.NOTHING:
            del self._accounts[key], self._changed[key]

    def _keep(self, changes: Mapping[AccountKey, ledger.Account]) -> None:
        self._accounts |= changes
        self._changed |= dict.fromkeys(changes, self._now())
