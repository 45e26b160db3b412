"""Compute what an account has spent, what is held on it, and what may still be held.

A hold is granted only if `used + held` of each account stays within its limits. Concurrent calls can therefore not
overspend together. A hold is taken on all accounts of a call or on none. When the call ends, its cost replaces the
hold, once.

All functions are pure. Each store applies these rules to its data in one transaction, and its tests compare the results
with these functions. Amounts are whole numbers: tokens as the budget counts them, billionths of a US dollar (nano USD),
and calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from decimal import ROUND_CEILING, Decimal
from math import ceil
from typing import Final, Literal, NamedTuple

from gateway.core.ledger.windows import CalendarWindow, Window
from gateway.core.values import dataclass

Dimension = Literal["tokens", "nano_usd", "calls"]
DIMENSIONS: Final[tuple[Dimension, ...]] = ("tokens", "nano_usd", "calls")

_AT: Final[Mapping[Dimension, Literal[0, 1, 2]]] = {"tokens": 0, "nano_usd": 1, "calls": 2}

#: the largest sum: JSON and Lua hold whole numbers exactly up to here
MOST: Final = 2**53
NANO: Final = 10**9
#: The largest budget in US dollars. A session's cost can be slightly larger: it is counted in trillionths, in 62 bits.
MOST_USD: Final = 4_500_000
#: the smallest budget above 0 in US dollars, because budgets are counted in billionths
LEAST_USD: Final = Decimal(1) / NANO


class Amount(NamedTuple):
    """An amount of tokens, nano USD and calls. Each is >= 0."""

    tokens: int = 0
    nano_usd: int = 0
    calls: int = 0

    def plus(self, other: Amount, times: int = 1) -> Amount:
        """Return this plus `times` the other; each part is at most `MOST`."""
        tokens, nano_usd, calls = other
        tokens, nano_usd, calls = self[0] + tokens * times, self[1] + nano_usd * times, self[2] + calls * times
        if tokens > MOST or nano_usd > MOST or calls > MOST:
            return Amount(min(MOST, tokens), min(MOST, nano_usd), min(MOST, calls))
        return Amount(tokens, nano_usd, calls)

    def less(self, other: Amount) -> Amount:
        """Return this minus the other; each part is at least 0."""
        tokens, nano_usd, calls = other
        return Amount(max(0, self.tokens - tokens), max(0, self.nano_usd - nano_usd), max(0, self.calls - calls))


NOTHING: Final = Amount()


def nano(usd: Decimal | int) -> int:
    """Return US dollars as billionths, rounded up, at most `MOST`."""
    return min(MOST, int((usd * NANO).to_integral_value(ROUND_CEILING)) if isinstance(usd, Decimal) else usd * NANO)


class AccountKey(NamedTuple):
    """Identify an account: of a session, of an agent in it, of a client key, or (`rate`) its requests in this minute.

    Client keys share accounts: that of their `group`, whose name is the namespace, and that of `all` keys together. The
    `id` of a session's account is the session's id. That of an agent is `SESSION/AGENT`, as no id has a slash.
    """

    kind: Literal["session", "agent", "key", "rate", "group", "all"]
    namespace: str
    id: str = ""

    @property
    def session_id(self) -> str:
        """Return the id of the session that the account belongs to; empty for those of client keys."""
        return self.id.partition("/")[0] if self.kind == "agent" else self.id

    @property
    def agent_id(self) -> str:
        """Return the id of the agent that the account belongs to; empty if it belongs to none."""
        return self.id.partition("/")[2] if self.kind == "agent" else ""


@dataclass(frozen=True, slots=True)
class Moment:
    """A point in time: `wall` is Unix time, `mono` is the monotonic clock of this `boot`, both in seconds."""

    wall: float
    mono: float
    boot: str = ""

    def since(self, earlier: Moment) -> float:
        """Return the seconds since `earlier`: by the monotonic clock, or by wall time after a reboot."""
        if self.is_same_boot(earlier):
            return self.mono - earlier.mono
        return max(0.0, self.wall - earlier.wall)

    def is_same_boot(self, earlier: Moment) -> bool:
        """Return whether the machine has not rebooted since `earlier`: same boot id, and `mono` did not go back."""
        return self.boot == earlier.boot and self.mono >= earlier.mono


class Limits(NamedTuple):
    """Limits of an account; None: no limit. `window`: when use restarts at zero, see `Window`."""

    tokens: int | None = None
    nano_usd: int | None = None
    calls: int | None = None
    window: Window = None

    def of(self, dimension: Dimension) -> int | None:
        """Return the limit of one dimension."""
        return self[_AT[dimension]]

    @property
    def is_none(self) -> bool:
        """Return whether nothing is limited."""
        return self[:3] == (None, None, None)

    def lowered(self, to: Limits) -> Limits:
        """Return these limits, each lowered to the one of `to` if that is lower."""
        if to.is_none:
            return self
        return Limits(
            _lower(self.tokens, to.tokens),
            _lower(self.nano_usd, to.nano_usd),
            _lower(self.calls, to.calls),
            self.window,
        )


def _lower(one: int | None, other: int | None) -> int | None:
    return min((limit for limit in (one, other) if limit is not None), default=None)


NO_LIMITS: Final = Limits()


@dataclass(frozen=True, slots=True)
class Account:
    """The stored state of an account.

    Attributes:
        used: the amount spent since the window began at `opened`; without a window, ever since.
        held: the sum of all open holds.
        opened: when the window began; None if there is no window, or none yet.
        overrides: limits that an operator set for this account, instead of the configured ones. None: unlimited.
        period: how many times `used` was set to zero: by a reset, a new window, or the deletion of its session.
        closing: the closing call of this period, as `closing_mark` writes it; empty if there was none.
    """

    used: Amount = NOTHING
    held: Amount = NOTHING
    opened: Moment | None = None
    overrides: Mapping[Dimension, int | None] = field(default_factory=dict)
    period: int = 0
    closing: str = ""


EMPTY: Final = Account()


@dataclass(frozen=True, slots=True)
class Claim:
    """An account that a call is charged to, with its configured limits and those that the call declares.

    Attributes:
        closing_share: the share of each limit that is kept for the closing call of the account.
        is_closing: this call is the closing call: it may use that share, and no other call may after it.
    """

    key: AccountKey
    configured: Limits = NO_LIMITS
    declared: Limits = NO_LIMITS
    closing_share: float = 0.0
    is_closing: bool = False

    @property
    def undeclared(self) -> Claim:
        """Return the same claim without the limits that the call declares."""
        return self if self.declared.is_none else replace(self, declared=NO_LIMITS)

    def limits(self, account: Account) -> Limits:
        """Return the limits in force. Limits that a call declares can only lower them."""
        granted = self.granted(account) if account.overrides else self.configured
        return granted.lowered(self.declared)

    def granted(self, account: Account) -> Limits:
        """Return the limits without those that the call declares."""
        if not account.overrides:
            return self.configured
        configured, overrides = self.configured, account.overrides
        limits = {name: overrides[name] if name in overrides else configured.of(name) for name in DIMENSIONS}
        return Limits(**limits, window=configured.window)


@dataclass(frozen=True, slots=True)
class Balance:
    """An account at one moment: its limits in force, what is used and what is held.

    Attributes:
        resets_s: seconds until the window ends; None without a window.
        is_absent: the store lost this account, as Redis can when it evicts keys.
        is_orphaned: calls were charged to the lost account.
        period: see `Account`.
        closing_share: the share of each limit that this call may not use, as it is kept for the closing call.
        closing: the mark of the closing call that was made under these limits; empty if there was none.
    """

    key: AccountKey
    limits: Limits
    used: Amount
    held: Amount
    resets_s: float | None = None
    is_absent: bool = field(default=False, compare=False)
    is_orphaned: bool = field(default=False, compare=False)
    period: int = field(default=0, compare=False)
    closing_share: float = 0.0
    closing: str = ""

    def lowered(self, to: Limits) -> Balance:
        """Return the same balance for a call that declares these limits."""
        return self if to.is_none else replace(self, limits=self.limits.lowered(to))

    def left(self, dimension: Dimension) -> int | None:
        """Return how much is neither used nor held, or None if it is unlimited."""
        limit = self.limits.of(dimension)
        at = _AT[dimension]
        return None if limit is None else max(0, limit - self.used[at] - self.held[at])

    def kept(self, dimension: Dimension) -> int:
        """Return how much of a limit this call may not use, as it is kept for the closing call."""
        limit = self.limits.of(dimension)
        return ceil(limit * self.closing_share) if limit and self.closing_share else 0

    def free(self, dimension: Dimension) -> int | None:
        """Return how much this call may still hold, or None if it is unlimited."""
        left = self.left(dimension)
        return left if left is None or not self.closing_share else max(0, left - self.kept(dimension))

    def is_closed_to(self, call_id: str) -> bool:
        """Return whether the closing call was made, and is another call than this one."""
        return bool(self.closing) and closing_call(self.closing) != call_id

    @property
    def used_fraction(self) -> float | None:
        """Return the largest used share of a limit, without holds, or None without limits. It can exceed 1."""
        if self.limits.is_none:
            return None
        shares = [_share(self.used[at], self.limits.of(name)) for at, name in enumerate(DIMENSIONS)]
        return max(share for share in shares if share is not None)


def _share(used: int, limit: int | None) -> float | None:
    if limit is None:
        return None
    return used / limit if limit else 1.0


@dataclass(frozen=True, slots=True)
class Hold:
    """A request to hold amounts before a call.

    It asks for `fixed`, and for as many units as the budget allows, between `least` and `most`. A unit is one output
    token, and `unit` is what it costs. `id`: unique, made by the gateway.
    """

    id: str
    claims: tuple[Claim, ...]
    fixed: Amount
    unit: Amount = NOTHING
    least: int = 0
    most: int = 0

    def amount(self, units: int) -> Amount:
        """Return the amount that is held with this many units."""
        return self.fixed.plus(self.unit, units)


@dataclass(frozen=True, slots=True)
class Granted:
    """A hold that was taken. `units`: how many; `balances`: of each claim afterwards, in the order of the claims."""

    units: int
    balances: tuple[Balance, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """A hold that was not taken, because one account has too little left.

    Attributes:
        balance: the balance of this account.
        dimension: what it has too little of.
        needed: the least that was asked for.
        is_busy: running calls hold what is missing, and may release it.
    """

    balance: Balance
    dimension: Dimension
    needed: int
    is_busy: bool

    @property
    def is_temporary(self) -> bool:
        """Return whether waiting can help: other calls may release their holds, or the minute of a rate limit ends."""
        return self.is_busy or self.balance.key.kind == "rate"


def closing_mark(call_id: str, limits: Limits) -> str:
    """Return what an account keeps of its closing call: the call's id, and the limits under which it was made.

    With other limits the account is open again. prelude.lua writes the same text.
    """
    return " ".join([call_id, *(str(-1 if limit is None else min(MOST, limit)) for limit in limits[:3])])


def closing_call(mark: str) -> str:
    """Return the id of the call that made this mark."""
    return mark.partition(" ")[0]


def with_call_ended(account: Account, call_id: str, spent: Amount) -> Account:
    """Return the account after a call ended. A closing call that cost nothing can be made again."""
    if not account.closing or spent != NOTHING or closing_call(account.closing) != call_id:
        return account
    return replace(account, closing="")


Accounts = Mapping[AccountKey, Account]
Changes = dict[AccountKey, Account]
Periods = Mapping[AccountKey, int]


def balance_of(account: Account, claim: Claim, now: Moment) -> Balance:
    """Return the balance of an account for a call."""
    limits = claim.limits(account)
    current = _current(account, limits.window, now)
    resets = _seconds_left(current, limits.window, now)
    if not claim.closing_share:
        return Balance(claim.key, limits, current.used, current.held, resets, period=current.period)
    return Balance(
        claim.key, limits, current.used, current.held, resets, period=current.period,
        closing_share=0.0 if claim.is_closing else claim.closing_share,
        closing=_mark_in_force(current, claim),
    )  # fmt: skip


def _mark_in_force(account: Account, claim: Claim) -> str:
    """Return the mark of the closing call, or an empty text if it was made under other limits.

    A closing call of the account's own limits closes it for all calls. One of limits that a call declared closes it for
    calls that declare the same.
    """
    mark, call_id = account.closing, closing_call(account.closing)
    limits = (claim.granted(account), claim.limits(account)) if mark else ()
    return mark if any(mark == closing_mark(call_id, one) for one in limits) else ""


def reserve(accounts: Accounts, hold: Hold, now: Moment) -> tuple[Granted, Changes] | Refused:
    """Take a hold on all its accounts, with as many units as each of them has left. A missing account is empty."""
    before = [balance_of(accounts.get(claim.key, EMPTY), claim, now) for claim in hold.claims]
    refusal = refused(before, hold)
    if refusal is not None:
        return refusal
    units = hold.most
    for balance in before:
        units = units_left(balance, hold.fixed, hold.unit, units)
    granted, changes, balances = hold.amount(units), Changes(), []
    for claim, balance in zip(hold.claims, before, strict=True):
        account = _current(accounts.get(claim.key, EMPTY), claim.configured.window, now)
        if claim.is_closing:
            account = replace(account, closing=closing_mark(hold.id, claim.limits(account)))
        changes[claim.key] = taken = _take(account, claim.key, granted)
        after = Balance(claim.key, balance.limits, taken.used, taken.held, balance.resets_s)
        if claim.closing_share:
            after = replace(after, closing_share=balance.closing_share, closing=_mark_in_force(taken, claim))
        balances.append(after)
    return Granted(units, tuple(balances)), changes


def extend(accounts: Accounts, hold: Hold, units: int, now: Moment) -> tuple[Granted, Changes]:
    """Hold up to `units` more: as many as every account has left, which can be none."""
    for claim in hold.claims:
        balance = balance_of(accounts.get(claim.key, EMPTY), claim, now)
        units = units_left(balance, NOTHING, hold.unit, units)
    more = NOTHING.plus(hold.unit, units)
    changes, balances = Changes(), []
    for claim in hold.claims:
        account = _current(accounts.get(claim.key, EMPTY), claim.configured.window, now)
        # A rate account counts requests and has no holds that could be released.
        changes[claim.key] = taken = account if claim.key.kind == "rate" else _hold(account, more)
        balances.append(balance_of(taken, claim, now))
    return Granted(units, tuple(balances)), changes


def settle(accounts: Accounts, keys: Iterable[AccountKey], held: Amount, spent: Amount, ended: str = "") -> Changes:
    """Release what was held on these accounts, and add what was spent.

    `ended`: the id of the call if it has ended; empty if its hold is only released.
    """
    changes = Changes()
    for key in keys:
        if key.kind != "rate":
            account = accounts.get(key, EMPTY)
            if account.closing:
                account = with_call_ended(account, ended, spent)
            used, given_back = account.used.plus(spent), account.held.less(held)
            changes[key] = Account(used, given_back, account.opened, account.overrides, account.period, account.closing)
    return changes


def periods(accounts: Accounts, keys: Iterable[AccountKey]) -> Periods:
    """Return the current period of each account."""
    return {key: accounts.get(key, EMPTY).period for key in keys if key.kind != "rate"}


def correct(  # noqa: PLR0917  # as `settle`, and what was charged before
    accounts: Accounts,
    keys: Iterable[AccountKey],
    wrong: Amount,
    right: Amount,
    charged: Periods,
    ended: str = "",
) -> Changes:
    """Replace a provisional charge by the real one.

    Args:
        accounts: the stored accounts.
        keys: the accounts that were charged.
        wrong: the provisional amount, charged when a hold expired.
        right: the amount that was really spent.
        charged: the period of each account in which `wrong` was added. In a later period `wrong` is no longer part of
            `used`, so it is not subtracted from what other calls used since.
        ended: the id of the call.
    """
    changes = Changes()
    for key in keys:
        if key.kind != "rate":
            account = accounts.get(key, EMPTY)
            used = account.used.less(wrong) if charged.get(key) == account.period else account.used
            changes[key] = replace(with_call_ended(account, ended, right), used=used.plus(right))
    return changes


def with_new_period(account: Account) -> Account:
    """Set `used` to zero and begin a new period. Running calls keep their holds until they release them."""
    return replace(account, used=NOTHING, period=account.period + 1, closing="")


def after_deletion(account: Account) -> Account:
    """Return what remains of an account whose session was deleted: the holds of running calls, in a new period."""
    return Account(held=account.held, period=account.period + 1)


def is_lease_over(renewed: Moment, lease_s: float, now: Moment) -> bool:
    """Return whether the lease of a hold has ended. A reboot ends all leases, because no worker has survived it."""
    return not now.is_same_boot(renewed) or now.since(renewed) > lease_s


def most_used_balance(balances: Sequence[Balance]) -> Balance | None:
    """Return the balance with the largest used share, or None if nothing is limited."""
    limited = [balance for balance in balances if balance.used_fraction is not None and balance.key.kind != "rate"]
    return max(limited, key=lambda balance: balance.used_fraction or 0.0, default=None)


def _current(account: Account, window: Window, now: Moment) -> Account:
    """Return the account in the current window. What was used before the first window counts in it."""
    if window is None:
        return account
    if account.opened is None:
        return replace(account, opened=now)
    if isinstance(window, CalendarWindow):
        is_current = account.opened.wall >= window.bounds(now.wall)[0]
    else:
        is_current = now.since(account.opened) < window
    return account if is_current else replace(with_new_period(account), opened=now)


def _seconds_left(account: Account, window: Window, now: Moment) -> float | None:
    """Return the seconds until the current window of an account ends, or None without a window."""
    if window is None:
        return None
    if isinstance(window, CalendarWindow):
        return window.bounds(now.wall)[1] - now.wall
    return window - (now.since(account.opened) if account.opened else 0.0)


def _take(account: Account, key: AccountKey, amount: Amount) -> Account:
    if key.kind == "rate":
        # A request counts when it is made, no matter how long it takes or how it ends.
        return replace(account, used=account.used.plus(Amount(calls=amount.calls)))
    return _hold(account, amount)


def _hold(account: Account, amount: Amount) -> Account:
    held = account.held.plus(amount)
    return Account(account.used, held, account.opened, account.overrides, account.period, account.closing)


def refused(balances: Iterable[Balance], hold: Hold) -> Refused | None:
    """Return why a hold cannot be taken with these balances, or None if it can.

    A permanent reason is preferred to a temporary one (a hold of another call, or a rate limit), so that no caller
    waits in vain.
    """
    temporary, least = None, hold.amount(hold.least)
    for balance in balances:
        for at, name in enumerate(DIMENSIONS):
            limit = balance.limits.of(name)
            if limit is None or not least[at]:
                continue
            if balance.closing and balance.is_closed_to(hold.id):
                return Refused(balance, name, least[at], is_busy=False)
            if balance.closing_share:
                limit -= balance.kept(name)
            if balance.used[at] + balance.held[at] + least[at] > limit:
                refusal = Refused(balance, name, least[at], balance.used[at] + least[at] <= limit)
                if not refusal.is_temporary:
                    return refusal
                temporary = temporary or refusal
    return temporary


def units_left(balance: Balance, fixed: Amount, unit: Amount, most: int) -> int:
    """Return how many units an account can still hold after `fixed`, at most `most`."""
    units = most
    for at, name in enumerate(DIMENSIONS):
        left = balance.free(name) if balance.closing_share else balance.left(name)
        if left is not None and unit[at]:
            units = min(units, max(0, left - fixed[at]) // unit[at])
    return units
