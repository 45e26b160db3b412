"""The Protocols behind which the outside world stands, and the values they exchange.

Adapters satisfy them structurally; each adapter file proves it to the type checker with one assignment. Several workers
may share one store, so nothing here may be answered from a cache.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import field, replace
from decimal import Decimal
from typing import TYPE_CHECKING, Final, Literal, Protocol, get_args, runtime_checkable

from gateway.core.counting.calibration import LastTurn
from gateway.core.counting.context import ToolWeights
from gateway.core.counting.estimate import Source
from gateway.core.errors import StoreUnavailable
from gateway.core.fitting.receipt import Fates
from gateway.core.ledger import (
    NO_LIMITS,
    NOTHING,
    AccountKey,
    Amount,
    Claim,
    Dimension,
    Granted,
    Hold,
    Limits,
    Refused,
    Standing,
    nano,
)
from gateway.core.session import Change, Places, Remembered, SessionState
from gateway.core.tools import ToolUse
from gateway.core.usage import Charge, Totals, Usage
from gateway.core.values import dataclass

if TYPE_CHECKING:  # that module imports this one
    from gateway.core.spending import Allowance

Headers = list[tuple[bytes, bytes]]

#: Why the task of a call was cancelled, where it was not because its client left: the message of the cancel. The client
#: took nothing for too long; the gateway stops; nobody waits any longer for a call of the gateway's own.
Cut = Literal["client_stalled", "cut_at_shutdown", "too_slow"]
STALLED: Final[Cut] = "client_stalled"
SHUT_DOWN: Final[Cut] = "cut_at_shutdown"
TOO_SLOW: Final[Cut] = "too_slow"
CUTS: Final[tuple[Cut, ...]] = get_args(Cut)
#: How a call ended; docs/operations.md tells what each means. A call that is cut or breaks off is charged for what was
#: delivered.
Outcome = Literal[
    Cut,
    "ok",
    "provider_error",
    "refused",
    "upstream_failed",
    "upstream_broken",
    "budget_end",
    "client_left",
    "internal_error",
    "worker_lost",
]
OUTCOMES: Final[tuple[Outcome, ...]] = get_args(Outcome)
#: the outcome of a call whose worker was gone before it settled
LOST: Final[Outcome] = "worker_lost"


#: the namespace of callers on this machine where no client keys are needed
OPEN_NAMESPACE: Final = "default"
#: The namespace of other callers without a client key: this one where they bring no credential of a provider, else this
#: prefix and a digest of that credential.
ANONYMOUS: Final = "anonymous"
CREDENTIAL_PREFIX: Final = "cred-"


def is_reserved(name: str) -> bool:
    """Whether a client key of this name would see the sessions of callers that have none."""
    return name in (OPEN_NAMESPACE, ANONYMOUS) or name.startswith(CREDENTIAL_PREFIX)


@dataclass(frozen=True, slots=True)
class SessionKey:
    """A session's identity in the store: ids are the client's to choose, so they live under their client key's name."""

    namespace: str
    id: str

    @property
    def account(self) -> AccountKey:
        """The account that its budget is kept on."""
        return AccountKey("session", self.namespace, self.id)


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
class ContextRecord:
    """What one call weighed and what was left out of it: numbers and names of rules, no text.

    Attributes:
        tokens: input tokens that the provider was expected to report for what was sent.
        original_tokens: the same for what came.
        source: how good these numbers are.
        budget: input tokens the call was allowed, the smallest of all limits; None where nothing limits it.
        conversation_tokens: of what was sent, texts, calls and thinking; no tool results or definitions of tools.
        tool_tokens: tool results in what was sent, each counted once.
        trimmed: number of messages by the rule that changed them, as their fates tell it.
        shadow: it was only decided; what was sent is what came.
        key: under which the difference to the reported usage is learned.
        estimate: `tokens` before anything learned was added.
        frames: of what was sent, see `Estimate`; None in records from before these were counted.
        before: this session's last turn, where `estimate` was corrected by what that taught; None else.
        message_fates: what became of each message that came, in order; empty where nothing was changed.
        tool_weights: how many results of each tool make `tool_tokens`, and their tokens.
        margin: tokens that are kept free beside `tokens`, as these are an estimate.
        kept: the part of `tokens` that the request only names: an earlier answer, which its provider keeps.
    """

    tokens: int
    original_tokens: int
    source: Source
    budget: int | None
    conversation_tokens: int
    tool_tokens: int
    key: str
    estimate: int
    frames: int | None = None
    before: LastTurn | None = None
    trimmed: Mapping[str, int] = field(default_factory=dict)
    shadow: bool = False
    message_fates: Fates = Fates()  # of no message, and nobody changes it
    tool_weights: ToolWeights = field(default_factory=dict)
    margin: int = 0
    kept: int = 0

    @property
    def remaining(self) -> int | None:
        """Input tokens that what was sent leaves of the budget; None where there is no budget."""
        return None if self.budget is None else max(0, self.budget - self.tokens - self.margin)

    def reported(self, tokens: int) -> LastTurn:
        """What the session remembers when the provider has reported so many input tokens."""
        residual = tokens - self.kept - self.estimate
        if self.kept:
            # The provider may have dropped some of what it keeps. What is sent is no lighter for that.
            residual = max(0, residual)
        if self.before is None:
            return LastTurn(self.key, residual, self.frames)
        return self.before.then(residual, self.frames)

    @property
    def saved_tokens(self) -> int:
        """Tokens that were not sent."""
        return 0 if self.shadow else max(0, self.original_tokens - self.tokens)


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One call, all an observer or a person may need; no prompt or answer text, no credential.

    Attributes:
        call_id: the gateway's own, unique.
        request_id: the client's, which may repeat, or the gateway's where it sent none.
        session: None for a call without one.
        derived_session: the session's id was made by the gateway, as the call named none.
        started_at: seconds since the epoch.
        dialect: the name of the client's format.
        operation: what kind of call it is, such as `chat`.
        provider: the last one it was sent to, or was to be sent to.
        model: the name it has at that provider.
        response_model: the name that the answer gives; None where it gives none.
        status: HTTP status of the answer, 499 where nobody waited for it.
        error_code: of the gateway's own error; None where it had none.
        finish_reason: as the answer says it; None where it says nothing.
        tools: names of the tools that the answer calls.
        charge: None where the provider bills nothing.
        overhead_s: seconds until it was first sent, or until its end where it was not.
        first_byte_s: seconds until the head of the answer came; None where none came.
        duration_s: seconds until its end.
        request_bytes: of the client's body.
        response_bytes: of the body that was passed on to the client.
        notes: remarks by name.
        context: None where the call was not weighed.
        accounts: those it is charged to.
        spent: what of it counts against their budgets.
        mode: how its tool results were shown; None where they were not looked at.
        step: the step that it was made in; None where its agent has none.
        kept: what its session remembers of what the provider keeps now, see `kept_as`.
    """

    call_id: str
    request_id: str
    session: SessionKey | None
    derived_session: bool
    started_at: float
    dialect: str
    operation: str
    provider: str
    model: str
    response_model: str | None
    stream: bool
    status: int
    outcome: Outcome
    error_code: str | None
    finish_reason: str | None
    tools: tuple[str, ...]
    charge: Charge | None
    overhead_s: float
    first_byte_s: float | None
    duration_s: float
    request_bytes: int
    response_bytes: int
    notes: Mapping[str, str] = field(default_factory=dict)
    context: ContextRecord | None = None
    accounts: tuple[AccountKey, ...] = ()
    spent: Amount = NOTHING
    mode: str | None = None
    step: str | None = None
    kept: str = ""

    @property
    def last_turn(self) -> LastTurn | None:
        """By how much the estimate of this call was off; None where the provider did not report its input.

        Nor is 0 believed: no request weighs nothing, and the session's next one would be taken for light.
        """
        reported = self._reported
        return self.context.reported(reported) if self.context is not None and reported else None

    @property
    def _reported(self) -> int:
        """Input tokens as the provider said; 0 where it said nothing."""
        charge = self.charge
        return charge.usage.input_tokens if charge is not None and charge.source == "provider" else 0

    @property
    def saved_tokens(self) -> int:
        """Tokens that were not sent."""
        return self.context.saved_tokens if self.context is not None else 0

    @property
    def counted_tools(self) -> tuple[str, ...]:
        """The tools its session counts: none of a call that is not charged, or whose own record may yet come."""
        return self.tools if self.charge is not None and self.outcome != LOST else ()

    @property
    def surprise(self) -> int | None:
        """Reported less expected input tokens, where the session's last turn taught what to expect; None else."""
        reported = self._reported
        if not reported or self.context is None or self.context.before is None:
            return None
        return reported - self.context.tokens


@dataclass(frozen=True, slots=True)
class OpenHold:
    """A hold as a store keeps it.

    Attributes:
        units: how many were granted, see `Hold`.
        noted: tokens of the answer that had been delivered when its worker last said so.
        lost: the record to write should nobody settle the call: charged for its input, at the least.
        unit_usd: what a token of the answer costs; None where nobody knows.
    """

    hold: Hold
    lost: CallRecord
    units: int = 0
    noted: int = 0
    unit_usd: Decimal | None = None

    def as_lost(self) -> CallRecord:
        """The record of the call, charged for what had been delivered as far as it was noted."""
        record, charge = self.lost, self.lost.charge
        if charge is None:
            return record
        usage = Usage.of(charge.usage.input_tokens, self.noted)
        more = (self.unit_usd or 0) * self.noted
        cost = charge.cost_usd + more if charge.cost_usd is not None else None
        spent = record.spent.plus(Amount(self.noted, nano(more)))
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
class Opening:
    """What a call begins with: what its session remembers, how its accounts stand, and the totals where asked for."""

    remembered: Remembered
    standings: tuple[Standing, ...]
    totals: Totals | None


#: calls that a store knows the order of, for `Store.latest`
MOST_LATEST: Final = 4096


@dataclass(frozen=True, slots=True)
class Settled:
    """A call, and its session's totals right after it; None for a call without a session."""

    call: CallRecord
    totals: Totals | None


@dataclass(frozen=True, slots=True)
class Latest:
    """Calls in the order in which they were settled.

    `cursor`: the place of the last of them, to go on from; `missed`: how many before the first are no longer known.
    """

    settled: Sequence[Settled]
    cursor: int
    missed: int = 0


#: what was learned under a key until now -> what is known with one lesson more; pure, may be applied more than once
Lesson = Callable[[bytes | None], bytes]
#: where a session's agents are in their steps -> where they are once a call has ended, and its record that says so;
#: pure, may be applied more than once. All records are of the same call and differ in their notes alone
Ending = Callable[[Places], tuple[Places, CallRecord]]


class RecordRefused(StoreUnavailable):
    """The store is there and cannot take this one record. Offered again, it would be refused again."""


@runtime_checkable
class Store(Protocol):
    """Sessions, their totals and their call records."""

    async def settle(self, record: CallRecord, ending: Ending | None = None) -> Totals:
        """Write `record` and add its charge to its session, in one step, once per `call_id`; the totals after it.

        With an `ending`, what it makes of the session's steps is kept in that same step, and the record that it gives
        is written in the place of `record`; what it gave last is what was kept. Where the call was settled before,
        neither is. A call without a session has no ending.

        The session remembers `record.last_turn` where there is one, `record.kept` before what it has of that, as far as
        `MAX_KEPT` goes, and the tools that its calls asked for, each call once: those of a call that is taken for lost
        are not known. A record without a session or without a charge is only written. The hold of the same id is given
        back, and `record.spent` added to `record.accounts`. A call that was taken for lost when its lease ended is
        corrected. Durable against the end of this process when it returns.

        Raises:
            StoreConflict: nothing was written, as others changed the state each time; only with an `ending`.
            RecordRefused: nothing is settled, nor would it be if it was tried again: the store is well, and cannot take
                this record, or not read what it has in the record's place or on its accounts.
            StoreUnavailable: nothing was written, or it is not known whether.
        """
        ...

    async def reserve(self, opened: OpenHold, lease_s: float) -> Granted | Refused:
        """Take the hold on all its accounts or on none, for as long as it is renewed every `lease_s`; once per id.

        `settle` of the record with the hold's id gives it back, whatever that record says.

        Raises:
            StoreDamaged: nothing is held, as one of the accounts cannot be read.
            StoreUnavailable: nothing is held, or it is not known whether; then the lease ends it.
        """
        ...

    async def extend(self, hold_id: str, units: int) -> Granted | None:
        """Hold up to so many more units: tells how many it was, which may be 0; None where there is no such hold.

        Raises:
            StoreUnavailable: nothing was added, or it is not known whether.
        """
        ...

    async def renew(self, noted: Mapping[str, int]) -> None:
        """Begin the leases of these holds anew, and note the tokens delivered so far. Unknown holds are passed over.

        Raises:
            StoreUnavailable: it did not happen, or it is not known whether.
        """
        ...

    async def overdue(self, limit: int) -> Sequence[OpenHold]:
        """Holds whose lease has ended; they stay until they are settled."""
        ...

    async def standings(self, claims: Sequence[Claim]) -> tuple[Standing, ...]:
        """How each account stands, in the order of the claims.

        Raises:
            StoreDamaged: one of them cannot be read. It is never taken for an empty one.
            StoreUnavailable: nobody knows.
        """
        ...

    async def opening(self, session: SessionKey, claims: Sequence[Claim], *, with_totals: bool) -> Opening:
        """What `remembered`, `standings` and `totals` give, in one round. Read on every call, so it must be cheap."""
        ...

    async def decide(self, account: AccountKey, limits: Mapping[Dimension, int | None] | None) -> None:
        """Set limits of one account in place of the configured ones: None lifts a limit.

        With None in place of `limits`, all are as configured again. Dimensions that are not named stay as they are.

        Raises:
            StoreUnavailable: nothing was written, or it is not known whether.
        """
        ...

    async def missing_results(self, session: SessionKey, handles: Sequence[str]) -> Sequence[str]:
        """Those of these handles that the session has no text under."""
        ...

    async def results_size(self, session: SessionKey) -> int:
        """Bytes of all texts that the session has under handles, as UTF-8."""
        ...

    async def keep_results(self, session: SessionKey, texts: Mapping[str, str], most: int) -> Sequence[str]:
        """Keep tool results by handle, for as long as the session is kept. A handle that has a text keeps that one.

        One after the other, and each only if the texts of the session are then no more than `most` bytes: what is kept
        never makes room for others. Gives the handles that there is no text under now.

        Raises:
            StoreUnavailable: nothing was written, or it is not known whether.
        """
        ...

    async def results(self, session: SessionKey, handles: Sequence[str]) -> Mapping[str, str]:
        """The texts that the session has under these handles, all at once."""
        ...

    async def result(self, namespace: str | None, handle: str) -> str | None:
        """The text under a handle in one namespace (None: in any); None where there is none."""
        ...

    async def keys(self) -> Sequence[StoredKey]:
        """The client keys that are kept here, by name."""
        ...

    async def add_key(self, key: StoredKey) -> bool:
        """Keep a client key; False where there is one of that name."""
        ...

    async def revoke_key(self, name: str) -> bool:
        """Forget a client key, not its sessions nor its account; False where there is none of that name."""
        ...

    async def totals(self, session: SessionKey) -> Totals:
        """The session's totals now; zero for an unknown one."""
        ...

    async def session(self, session: SessionKey) -> SessionView | None:
        """The session, or None."""
        ...

    async def remembered(self, session: SessionKey) -> Remembered:
        """What a call needs to know of its session: its state, and what its settled records gave it to remember.

        Empty for an unknown session.
        """
        ...

    async def update(self, session: SessionKey, change: Change) -> SessionState:
        """Apply `change` to the session's state in one step, and keep and give the result.

        The session need not exist yet: a request may be cut before its first call is settled. `change` is pure and may
        be applied more than once.

        Raises:
            StoreUnavailable: nothing was written, or it is not known whether.
        """
        ...

    async def learned(self, key: str) -> bytes | None:
        """What was learned under a key, as `learn` left it."""
        ...

    async def learn(self, lessons: Mapping[str, Lesson]) -> Mapping[str, bytes]:
        """Apply each lesson to what was learned under its key, all in one step; what is known now, by key.

        Raises:
            StoreUnavailable: nothing was written, or it is not known whether.
        """
        ...

    async def sessions(self, namespace: str | None, limit: int, cursor: str | None, sort: str) -> Page:
        """Sessions of one namespace (None: of all), `sort` one of `recent`, `tokens`."""
        ...

    async def calls(self, session: SessionKey, limit: int, before: str | None = None) -> Sequence[CallRecord]:
        """A session's newest records, newest first; `before`: of those whose call id sorts before this one.

        Here and below, a record that this version cannot read is left out, and named in the log.
        """
        ...

    async def call(self, namespace: str | None, request_id: str) -> CallRecord | None:
        """The newest record with this request id or call id."""
        ...

    async def latest(self, after: int | None, limit: int) -> Latest:
        """Calls of all namespaces that were settled after a place, whichever worker did it. None: from now on.

        Only the last `MOST_LATEST` are known, each as its record is now: those that were deleted are left out. A call
        that was taken for lost stands there again when it is corrected.
        """
        ...

    async def reset(self, session: SessionKey) -> bool:
        """Set the totals, and what is known of its tools, to nothing; False where there is no such session."""
        ...

    async def delete(self, session: SessionKey) -> bool:
        """Forget the session, its state and its calls; False where there is no such session."""
        ...

    async def expire(self, before: float) -> int:
        """Forget sessions whose last call lies before this time, and older records and lessons; how many sessions."""
        ...

    async def ping(self) -> None:
        """Return if the store can be read and written, else raise StoreUnavailable."""
        ...

    async def aclose(self) -> None:
        """Release what the store holds."""
        ...


class AtWork(Protocol):
    """Is told whether a provider may be at work on a call: then giving it up may cost something."""

    def __call__(self, *, is_so: bool) -> None:
        """`is_so`: whether one may be, from now on."""


def told_nobody(*, is_so: bool) -> None:
    """The `AtWork` for those who need not be told."""
    del is_so


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One request to a provider. `url` is absolute and already encoded.

    `note` keeps a remark, by its name, in the call's record; `at_work`: see `AtWork`; `call_id`: the call it is for.
    """

    method: str
    url: str
    headers: Headers
    body: bytes
    note: Callable[[str, str], None] = lambda _name, _text: None
    at_work: AtWork = told_nobody
    call_id: str = ""


class UpstreamReply(Protocol):
    """A provider's answer of which the head has arrived. Its bytes come as the provider framed them, still encoded."""

    @property
    def status(self) -> int:
        """The HTTP status."""
        ...

    @property
    def headers(self) -> Sequence[tuple[bytes, bytes]]:
        """As received; names in the case the provider wrote them."""
        ...

    def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises UpstreamTimeout or UpstreamProtocolError where it breaks off."""
        ...


class Upstream(Protocol):
    """The way to one provider."""

    def send(self, request: Outgoing) -> AbstractAsyncContextManager[UpstreamReply]:
        """Send; the body of the `with` reads the answer, leaving it gives the connection back.

        `request.at_work` is called before anything is sent: until then, it costs nothing where the client leaves.

        Raises:
            UpstreamUnreachable, UpstreamTimeout, UpstreamProtocolError: before the head of an answer was there.
            RequestFault: it cannot be sent as it came.
        """
        ...

    async def aclose(self) -> None:
        """Close the connections."""
        ...


@dataclass(frozen=True, slots=True)
class StepChange:
    """A session's agent went to another step, or on in the sequence of the one it is in.

    `index`: the place in that sequence, None where the step has none. `tools`: that the answer asked for. `at`: seconds
    since the epoch.
    """

    session: SessionKey
    agent: str
    step_before: str | None
    step: str | None
    index: int | None
    tools: tuple[str, ...]
    at: float


class Observer(Protocol):
    """Is told of calls and steps, changes nothing, must not block. One that steps are nothing to inherits `stepped`."""

    def record(self, call: CallRecord, totals: Totals | None, left: Allowance | None = None) -> None:
        """Called once per call, after it was settled. `totals`: the session's, None for a call without one.

        `left`: what is left of the budgets that the call was charged to; None where none is limited.
        """
        ...

    def stepped(self, change: StepChange) -> None:
        """Called after a change was kept."""
        del change
