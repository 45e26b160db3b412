"""Compute what an account has spent, what is held on it, and what may still be held.

At any moment an account's `used + held` is within its limits when a hold is granted, so that calls side by side cannot
overspend together. A hold is taken on all accounts of a call or on none, and replaced by what the call cost, once.

Values in, values out: a store applies these functions to what it keeps, in one step, and is held to them by its tests.
Amounts are whole numbers: tokens as the budget counts them, billionths of a US dollar, calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from decimal import ROUND_CEILING, Decimal
from typing import Final, Literal, NamedTuple

from gateway.core.values import dataclass

Dimension = Literal["tokens", "nano_usd", "calls"]
DIMENSIONS: Final[tuple[Dimension, ...]] = ("tokens", "nano_usd", "calls")

_AT: Final[Mapping[Dimension, Literal[0, 1, 2]]] = {"tokens": 0, "nano_usd": 1, "calls": 2}

#: No sum passes this: the largest whole number that JSON and Lua hold exactly.
MOST: Final = 2**53
NANO: Final = 10**9
#: The largest budget in US dollars. The cost of a session is counted a bit further: in trillionths, in 62 bits.
MOST_USD: Final = 4_500_000
#: The smallest above 0: budgets are counted in billionths.
LEAST_USD: Final = Decimal(1) / NANO


class Amount(NamedTuple):
    """What is counted; each >= 0."""

    tokens: int = 0
    nano_usd: int = 0
    calls: int = 0

    def plus(self, other: Amount, times: int = 1) -> Amount:
        """The sum, or as much of it as can be counted exactly."""
        tokens, nano_usd, calls = other
        tokens, nano_usd, calls = self[0] + tokens * times, self[1] + nano_usd * times, self[2] + calls * times
        if tokens > MOST or nano_usd > MOST or calls > MOST:
            return Amount(min(MOST, tokens), min(MOST, nano_usd), min(MOST, calls))
        return Amount(tokens, nano_usd, calls)

    def less(self, other: Amount) -> Amount:
        """What is left of this; nothing where the other is larger."""
        tokens, nano_usd, calls = other
        return Amount(max(0, self.tokens - tokens), max(0, self.nano_usd - nano_usd), max(0, self.calls - calls))


NOTHING: Final = Amount()


def nano(usd: Decimal | int) -> int:
    """Billionths of a US dollar, rounded up."""
    return min(MOST, int((usd * NANO).to_integral_value(ROUND_CEILING)) if isinstance(usd, Decimal) else usd * NANO)


class AccountKey(NamedTuple):
    """Whose account: a session's, a client key's, or the count of a client key's requests in the running minute."""

    kind: Literal["session", "key", "rate"]
    namespace: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class Moment:
    """A point in time: `wall` in seconds since the epoch, `mono` on a clock that nobody sets, since this `boot`."""

    wall: float
    mono: float
    boot: str = ""

    def since(self, earlier: Moment) -> float:
        """Seconds between the two: by the clock that nobody sets as long as it has not begun anew."""
        if self.is_of_boot(earlier):
            return self.mono - earlier.mono
        return max(0.0, self.wall - earlier.wall)

    def is_of_boot(self, earlier: Moment) -> bool:
        """Whether the machine has run since then: its clock has the same name and has not gone back."""
        return self.boot == earlier.boot and self.mono >= earlier.mono


class Limits(NamedTuple):
    """Limits of an account; None: no limit. `window_s`: seconds after which use is counted anew; None: it never is."""

    tokens: int | None = None
    nano_usd: int | None = None
    calls: int | None = None
    window_s: float | None = None

    def of(self, dimension: Dimension) -> int | None:
        """The limit in one dimension."""
        return self[_AT[dimension]]

    @property
    def is_none(self) -> bool:
        """Whether nothing is limited."""
        return self[:3] == (None, None, None)

    def lowered(self, to: Limits) -> Limits:
        """These limits, each lowered to that of `to` where that is less."""
        if to.is_none:
            return self
        return Limits(
            _least(self.tokens, to.tokens),
            _least(self.nano_usd, to.nano_usd),
            _least(self.calls, to.calls),
            self.window_s,
        )


def _least(one: int | None, other: int | None) -> int | None:
    return min((limit for limit in (one, other) if limit is not None), default=None)


NO_LIMITS: Final = Limits()


@dataclass(frozen=True, slots=True)
class Account:
    """What a store keeps of an account.

    Attributes:
        used: what was spent in the window that began at `opened`, or in its whole life.
        held: what all open holds have together.
        opened: when its window began; None where it has none, or none yet.
        decided: limits that an operator set for this account alone, None for "lifted"; they stand in place of the
            configured ones.
        period: how often what is used began anew: by a reset, a new window, or because its session was deleted.
    """

    used: Amount = NOTHING
    held: Amount = NOTHING
    opened: Moment | None = None
    decided: Mapping[Dimension, int | None] = field(default_factory=dict)
    period: int = 0


EMPTY: Final = Account()


@dataclass(frozen=True, slots=True)
class Claim:
    """One account that a call is charged to, and its limits: as configured, and as the call itself declares them."""

    key: AccountKey
    configured: Limits = NO_LIMITS
    declared: Limits = NO_LIMITS

    @property
    def undeclared(self) -> Claim:
        """The same claim without what this call declares."""
        return self if self.declared.is_none else replace(self, declared=NO_LIMITS)

    def limits(self, account: Account) -> Limits:
        """The limits in force. What a call declares only ever lowers them."""
        if not account.decided:
            return self.configured.lowered(self.declared)
        configured, decided = self.configured, account.decided
        found = {name: decided[name] if name in decided else configured.of(name) for name in DIMENSIONS}
        return Limits(**found, window_s=configured.window_s).lowered(self.declared)


@dataclass(frozen=True, slots=True)
class Balance:
    """What an account has used and holds, with its limits in force.

    `resets_s`: seconds until its window ends; None without a window. `is_absent`: a store that may lose keys has lost
    this account. `is_orphaned`: calls were charged to the lost account.
    """

    key: AccountKey
    limits: Limits
    used: Amount
    held: Amount
    resets_s: float | None = None
    is_absent: bool = field(default=False, compare=False)
    is_orphaned: bool = field(default=False, compare=False)

    def lowered(self, to: Limits) -> Balance:
        """The same for a call that declares these limits."""
        return self if to.is_none else replace(self, limits=self.limits.lowered(to))

    def left(self, dimension: Dimension) -> int | None:
        """What may still be held; None where nothing limits it."""
        limit = self.limits.of(dimension)
        at = _AT[dimension]
        return None if limit is None else max(0, limit - self.used[at] - self.held[at])

    @property
    def used_fraction(self) -> float | None:
        """The largest share of a limit that is used, 0 to 1 and beyond, without holds; None where none is set."""
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
    """What is asked for before a call: `fixed`, and `unit` for each of at least `least` and at most `most` units.

    A unit is a token of the answer, so that the answer can be as long as the budget allows. `id`: ours, and unique.
    """

    id: str
    claims: tuple[Claim, ...]
    fixed: Amount
    unit: Amount = NOTHING
    least: int = 0
    most: int = 0

    def amount(self, units: int) -> Amount:
        """What is held with so many units."""
        return self.fixed.plus(self.unit, units)


@dataclass(frozen=True, slots=True)
class Granted:
    """The hold was taken, with so many units. `balances`: of each claim after it, in their order."""

    units: int
    balances: tuple[Balance, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """The hold was taken on no account, as the one of `balance_of` has too little left in `dimension`.

    `needed`: the least that was asked of it. `is_busy`: what it lacks is held by calls under way, and may come back.
    """

    balance_of: Balance
    dimension: Dimension
    needed: int
    is_busy: bool

    @property
    def is_passing(self) -> bool:
        """Whether it helps to wait: for what others hold, or for the minute whose requests are counted to end."""
        return self.is_busy or self.balance_of.key.kind == "rate"


Accounts = Mapping[AccountKey, Account]
Changes = dict[AccountKey, Account]
Periods = Mapping[AccountKey, int]


def balance_of(account: Account, claim: Claim, now: Moment) -> Balance:
    """How an account stands for a call."""
    limits = claim.limits(account)
    current = _current(account, limits.window_s, now)
    resets = None
    if limits.window_s is not None:
        resets = limits.window_s - (now.since(current.opened) if current.opened else 0.0)
    return Balance(claim.key, limits, current.used, current.held, resets)


def reserve(accounts: Accounts, hold: Hold, now: Moment) -> tuple[Granted, Changes] | Refused:
    """Take a hold on all its accounts: the most units that every one of them has left. A missing account is empty."""
    before = [balance_of(accounts.get(claim.key, EMPTY), claim, now) for claim in hold.claims]
    found = refused(before, hold)
    if found is not None:
        return found
    units = hold.most
    for balance in before:
        units = units_left(balance, hold.fixed, hold.unit, units)
    granted, changes, balances = hold.amount(units), Changes(), []
    for claim, balance in zip(hold.claims, before, strict=True):
        account = _current(accounts.get(claim.key, EMPTY), claim.configured.window_s, now)
        changes[claim.key] = taken = _take(account, claim.key, granted)
        balances.append(Balance(claim.key, balance.limits, taken.used, taken.held, balance.resets_s))
    return Granted(units, tuple(balances)), changes


def extend(accounts: Accounts, hold: Hold, units: int, now: Moment) -> tuple[Granted, Changes]:
    """Hold up to so many more units; as many as every account has left, which may be none."""
    for claim in hold.claims:
        balance = balance_of(accounts.get(claim.key, EMPTY), claim, now)
        units = units_left(balance, NOTHING, hold.unit, units)
    more = NOTHING.plus(hold.unit, units)
    changes, balances = Changes(), []
    for claim in hold.claims:
        account = _current(accounts.get(claim.key, EMPTY), claim.configured.window_s, now)
        # The count of requests holds nothing, and nothing would be given back there.
        changes[claim.key] = taken = account if claim.key.kind == "rate" else _hold(account, more)
        balances.append(balance_of(taken, claim, now))
    return Granted(units, tuple(balances)), changes


def settle(accounts: Accounts, keys: Iterable[AccountKey], held: Amount, spent: Amount) -> Changes:
    """Give back what was held on these accounts, and add what was spent. Nothing spent: the hold is released."""
    changes = Changes()
    for key in keys:
        if key.kind != "rate":
            account = accounts.get(key, EMPTY)
            used, given_back = account.used.plus(spent), account.held.less(held)
            changes[key] = Account(used, given_back, account.opened, account.decided, account.period)
    return changes


def periods(accounts: Accounts, keys: Iterable[AccountKey]) -> Periods:
    """In which epoch each of these accounts is now."""
    return {key: accounts.get(key, EMPTY).period for key in keys if key.kind != "rate"}


def correct(accounts: Accounts, keys: Iterable[AccountKey], wrong: Amount, right: Amount, charged: Periods) -> Changes:
    """Put what was really spent in the place of what it was taken for when a hold had run out.

    `charged`: the epoch in which `wrong` was added to each account. Where an account has begun anew since, `wrong` is
    gone already, and nothing is taken from what others have used now.
    """
    changes = Changes()
    for key in keys:
        if key.kind != "rate":
            account = accounts.get(key, EMPTY)
            used = account.used.less(wrong) if charged.get(key) == account.period else account.used
            changes[key] = replace(account, used=used.plus(right))
    return changes


def anew(account: Account) -> Account:
    """Nothing is used any more. What calls under way hold stays held, until each of them gives its own back."""
    return replace(account, used=NOTHING, period=account.period + 1)


def forgotten(account: Account) -> Account:
    """What stays of an account whose session was deleted: what calls under way hold, and how often it began anew."""
    return Account(held=account.held, period=account.period + 1)


def is_over(renewed: Moment, lease_s: float, now: Moment) -> bool:
    """Whether the lease of a hold has ended. One of an earlier boot has no owner any more."""
    return not now.is_of_boot(renewed) or now.since(renewed) > lease_s


def narrowest(balances: Sequence[Balance]) -> Balance | None:
    """The account that has the largest share used; None where nothing is limited."""
    limited = [one for one in balances if one.used_fraction is not None and one.key.kind != "rate"]
    return max(limited, key=lambda one: one.used_fraction or 0.0, default=None)


def _current(account: Account, window_s: float | None, now: Moment) -> Account:
    """The account in the window that is running now; its first one begins with what it had used until then."""
    if window_s is None:
        return account
    if account.opened is None:
        return replace(account, opened=now)
    if now.since(account.opened) < window_s:
        return account
    return replace(anew(account), opened=now)


def _take(account: Account, key: AccountKey, amount: Amount) -> Account:
    if key.kind == "rate":
        # A request counts when it is made, however long it then takes and whatever becomes of it.
        return replace(account, used=account.used.plus(Amount(calls=amount.calls)))
    return _hold(account, amount)


def _hold(account: Account, amount: Amount) -> Account:
    return Account(account.used, account.held.plus(amount), account.opened, account.decided, account.period)


def refused(balances: Iterable[Balance], hold: Hold) -> Refused | None:
    """Why a hold cannot be taken on accounts that stand so; None where it can.

    What will not come back goes before what others hold, and before the count of a minute: nobody should wait in vain.
    """
    passing, least = None, hold.amount(hold.least)
    for balance in balances:
        for at, name in enumerate(DIMENSIONS):
            limit = balance.limits.of(name)
            if limit is not None and least[at] and balance.used[at] + balance.held[at] + least[at] > limit:
                found = Refused(balance, name, least[at], balance.used[at] + least[at] <= limit)
                if not found.is_passing:
                    return found
                passing = passing or found
    return passing


def units_left(balance: Balance, fixed: Amount, unit: Amount, most: int) -> int:
    """Units, up to `most`, that an account has left beside `fixed`."""
    units = most
    for at, name in enumerate(DIMENSIONS):
        left = balance.left(name)
        if left is not None and unit[at]:
            units = min(units, max(0, left - fixed[at]) // unit[at])
    return units
