"""Define the values that stores take and return, besides call records."""

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

#: calls that a store keeps in order of settlement, for `Calls.settled_after`
MOST_LATEST: Final = 4096
#: the orders of a list of sessions: by last call, by tokens, by cost
Sort = Literal["recent", "tokens", "cost"]
SORTS: Final[tuple[Sort, ...]] = get_args(Sort)
#: replaced secrets of a client key that can be accepted at the same time
MAX_REPLACED: Final = 4
#: session names that one search reads
MOST_SEARCHED: Final = 10_000
#: Takes what was learned under a key and returns it with one lesson more. It is pure and may be applied more than once.
Lesson = Callable[[bytes | None], bytes]
#: Takes the step of each agent of a session, and returns the steps after a call and the record to write. It is pure and
#: may be applied more than once. Its records are of the same call and differ only in their notes.
StepEnding = Callable[[Places], tuple[Places, CallRecord]]


@dataclass(frozen=True, slots=True)
class SessionView:
    """A session as stored. Times are Unix times in seconds, for display only.

    `derived`: the gateway made its id, because its calls named none.
    """

    key: SessionKey
    created_at: float
    last_call_at: float
    totals: Totals
    derived: bool = False
    tools: ToolUse = field(default_factory=ToolUse)


@dataclass(frozen=True, slots=True)
class OpenHold:
    """A hold as stored, with what is needed to settle its call if its worker dies.

    Attributes:
        units: how many were granted, see `Hold`.
        noted: output tokens delivered when the worker last reported them.
        orphaned: the record to write if the worker does not settle the call. It charges at least the input.
        unit_usd: the price of an output token; None if it is unknown.
        goes_on: the provider completes the output without a client, so all that is held may be spent.
    """

    hold: Hold
    orphaned: CallRecord
    units: int = 0
    noted: int = 0
    unit_usd: Decimal | None = None
    goes_on: bool = False

    def as_orphaned(self) -> CallRecord:
        """Return the record of the orphaned call, charged for the delivered output that was last reported."""
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
class ReplacedSecret:
    """The digest of a secret that a rotation has replaced. It is accepted `until` this Unix time in seconds."""

    digest: bytes
    until: float


@dataclass(frozen=True, slots=True)
class StoredKey:
    """A client key in the store. Only digests of its secrets are kept; a secret is shown once.

    Attributes:
        models: shell patterns of the models it may call; empty for all.
        limits: of all its sessions together.
        rpm: requests per minute; None for any number.
        expires_at: Unix time in seconds from which its calls are refused; None: never.
        replaced: earlier secrets that are still accepted, or were when the key was last changed.
        group: the group of client keys whose budget it shares; None: none.
    """

    name: str
    digest: bytes
    created_at: float
    models: tuple[str, ...] = ()
    limits: Limits = NO_LIMITS
    rpm: int | None = None
    expires_at: float | None = None
    replaced: tuple[ReplacedSecret, ...] = ()
    group: str | None = None

    @property
    def digests(self) -> tuple[bytes, ...]:
        """Return the digest of its secret, and of the secrets that this one has replaced."""
        return (self.digest, *[one.digest for one in self.replaced])

    def accepts_until(self, digest: bytes) -> float | None:
        """Return the Unix time from which a secret of this key is refused because it was replaced, or None."""
        return next((one.until for one in self.replaced if one.digest == digest and digest != self.digest), None)

    def rotated(self, digest: bytes, now: float, overlap_s: float) -> StoredKey:
        """Return the key with a new secret. The present secret is accepted for `overlap_s` seconds more.

        Secrets that were replaced before keep their own end, unless `overlap_s` is 0: then all end at once.

        Raises:
            ValueError: `MAX_REPLACED` replaced secrets are still accepted.
        """
        if overlap_s <= 0:
            return replace(self, digest=digest, replaced=())
        earlier = [one for one in self.replaced if one.until > now]
        if len(earlier) >= MAX_REPLACED:
            raise ValueError(
                f"{len(earlier)} replaced secrets of this key are still accepted, which is the maximum. Wait until one "
                "of them ends, or use an overlap of 0 to end all of them at once"
            )
        return replace(self, digest=digest, replaced=(*earlier, ReplacedSecret(self.digest, now + overlap_s)))


#: Takes a client key and returns it as changed. It is pure and may be applied more than once. It may raise an error.
KeyChange = Callable[[StoredKey], StoredKey]


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a list of sessions. `cursor` continues it; None at the end."""

    sessions: Sequence[SessionView]
    cursor: str | None


@dataclass(frozen=True, slots=True)
class CallStart:
    """The first read of a call: the memory of its session, its balances, and the totals if requested.

    `parents`: the parents of the other sessions that were requested, in their order.
    """

    remembered: Remembered
    balances: tuple[Balance, ...]
    totals: Totals | None
    parents: tuple[str | None, ...] = ()


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The result of settling a call: the totals of its session, and balances, or None if they cannot be read."""

    totals: Totals
    balances: tuple[Balance, ...] | None = None


@dataclass(frozen=True, slots=True)
class Settled:
    """A call and the totals of its session right after it; None for a call without a session."""

    call: CallRecord
    totals: Totals | None


@dataclass(frozen=True, slots=True)
class LatestCalls:
    """Calls in the order in which they were settled.

    `cursor`: continues after the last of them. `missed`: the number of calls before the first that are no longer kept.
    """

    settled: Sequence[Settled]
    cursor: int
    missed: int = 0
