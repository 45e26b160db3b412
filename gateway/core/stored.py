"""Define the values that stores exchange with their users, besides records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field, replace
from decimal import Decimal
from typing import Final, Literal, get_args

from gateway.core.ledger.arithmetic import NO_LIMITS, Amount, Balance, Hold, Limits, nano
from gateway.core.ledger.session_key import SessionKey
from gateway.core.record import CallRecord
from gateway.core.session import Places, Remembered
from gateway.core.tools import ToolUse
from gateway.core.usage import Totals, Usage
from gateway.core.values import dataclass

#: calls that a store knows the order of, for `Store.latest`
MOST_LATEST: Final = 4096
#: the orders of a list of sessions: by last call, by tokens, by cost
Sort = Literal["recent", "tokens", "cost"]
SORTS: Final[tuple[Sort, ...]] = get_args(Sort)
#: names that one search for a part of a name reads
MOST_SEARCHED: Final = 10_000
#: what was learned under a key until now -> what is known with one lesson more; pure, may be applied more than once
Lesson = Callable[[bytes | None], bytes]
#: where a session's agents are in their steps -> where they are once a call has ended, and its record that says so;
#: pure, may be applied more than once. All records are of the same call and differ in their notes alone
Ending = Callable[[Places], tuple[Places, CallRecord]]


@dataclass(frozen=True, slots=True)
class SessionView:
    """A session as the store knows it. Times are seconds since the epoch, for display only.

    `derived`: its id was made by the gateway, as its calls named none.
    """

    key: SessionKey
    created_at: float
    last_call_at: float
    totals: Totals
    derived: bool = False
    tools: ToolUse = field(default_factory=ToolUse)


@dataclass(frozen=True, slots=True)
class OpenHold:
    """A hold as a store keeps it.

    Attributes:
        units: how many were granted, see `Hold`.
        noted: tokens of the answer that had been delivered when its worker last said so.
        orphaned: the record to write should nobody settle the call: charged for its input, at the least.
        unit_usd: what a token of the answer costs; None where nobody knows.
        goes_on: the answer is made to its end, whoever is there for it: all that is held may be spent.
    """

    hold: Hold
    orphaned: CallRecord
    units: int = 0
    noted: int = 0
    unit_usd: Decimal | None = None
    goes_on: bool = False

    def as_orphaned(self) -> CallRecord:
        """The record of the call, charged for what had been delivered as far as it was noted."""
        record, charge = self.orphaned, self.orphaned.charge
        if charge is None:
            return record
        usage = Usage.of(charge.usage.input_tokens, self.noted)
        more = (self.unit_usd or 0) * self.noted
        cost = charge.cost_usd + more if charge.cost_usd is not None else None
        noted = record.spent.plus(Amount(self.noted, nano(more)))
        spent = self.hold.amount(self.units) if self.goes_on else noted
        return replace(record, charge=replace(charge, usage=usage, cost_usd=cost), spent=spent)


@dataclass(frozen=True, slots=True)
class StoredKey:
    """A client key that is kept in the store: by the digest of the key, which is shown once and kept nowhere.

    `models`: shell patterns of those it may call, empty for all; `limits`: of all its sessions together; `rpm`: how
    many requests it may make in a minute, None for any number.
    """

    name: str
    digest: bytes
    created_at: float
    models: tuple[str, ...] = ()
    limits: Limits = NO_LIMITS
    rpm: int | None = None


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a list, newest first; `cursor` continues it, None at the end."""

    sessions: Sequence[SessionView]
    cursor: str | None


@dataclass(frozen=True, slots=True)
class CallOpening:
    """What a call begins with: what its session remembers, how its accounts stand, and the totals where asked for.

    `parents`: of further sessions that were asked for.
    """

    remembered: Remembered
    balances: tuple[Balance, ...]
    totals: Totals | None
    parents: tuple[str | None, ...] = ()


@dataclass(frozen=True, slots=True)
class CallClosing:
    """What a call ends with: its session's totals, and how accounts stand; None where that cannot be read."""

    totals: Totals
    balances: tuple[Balance, ...] | None = None


@dataclass(frozen=True, slots=True)
class Settled:
    """A call, and its session's totals right after it; None for a call without a session."""

    call: CallRecord
    totals: Totals | None


@dataclass(frozen=True, slots=True)
class LatestCalls:
    """Calls in the order in which they were settled.

    `cursor`: the place of the last of them, to go on from; `missed`: how many before the first are no longer known.
    """

    settled: Sequence[Settled]
    cursor: int
    missed: int = 0
