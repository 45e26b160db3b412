"""Define the Protocols for I/O: store, provider connection and observers.

Adapters satisfy them structurally; each adapter file proves it to the type checker with one assignment. Several workers
may share one store, so nothing here may be answered from a cache.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol, TypeVar, runtime_checkable

from gateway.core.errors import StoreUnavailable
from gateway.core.http.request import Outgoing
from gateway.core.ledger.arithmetic import AccountKey, Balance, Claim, Dimension, Granted, Refused
from gateway.core.ledger.refusals import Allowance
from gateway.core.ledger.session_key import SessionKey
from gateway.core.record import CallRecord
from gateway.core.session import Change, Remembered, SessionState
from gateway.core.steps import StepChange
from gateway.core.stored import (
    CallClosing,
    CallOpening,
    Ending,
    LatestCalls,
    Lesson,
    OpenHold,
    Page,
    SessionView,
    Sort,
    StoredKey,
)
from gateway.core.usage import Totals

T = TypeVar("T")


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
        are not known. A record without a session is only written. A record without a charge adds nothing to the totals
        of its session, but the session is listed from then on, with the time of this call. The hold of the same id is
        given back, and `record.spent` added to `record.accounts`. A call that was taken for lost when its lease ended,
        or whose answer was still to come, is corrected; see `CallRecord.replaces`. Durable against the end of this
        process when it returns.

        Raises:
            StoreConflict: nothing was written, as others changed the state each time; only with an `ending`.
            RecordRefused: nothing is settled, nor would it be if it was tried again: the store is well, and cannot take
                this record, or not read what it has in the record's place or on its accounts.
            StoreUnavailable: nothing was written, or it is not known whether.
        """
        ...

    async def closing(self, record: CallRecord, ending: Ending | None, claims: Sequence[Claim]) -> CallClosing:
        """What `settle` does and gives, and then `balances` of these, in one round.

        Raises what `settle` raises: a call is settled also where the accounts cannot be read after it.
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

    async def renew(self, noted: Mapping[str, int]) -> frozenset[str]:
        """Begin the leases of these holds anew, and note the tokens delivered so far.

        Gives the ids of those that there is no hold of: settled, by their own worker or as that of one that is gone,
        or lost with the store's data.

        Raises:
            StoreUnavailable: it did not happen, or it is not known whether.
        """
        ...

    async def overdue(self, limit: int) -> Sequence[OpenHold]:
        """Holds whose lease has ended; they stay until they are settled."""
        ...

    async def balances(self, claims: Sequence[Claim]) -> tuple[Balance, ...]:
        """How each account stands, in the order of the claims.

        Raises:
            StoreDamaged: one of them cannot be read. It is never taken for an empty one.
            StoreUnavailable: nobody knows.
        """
        ...

    async def opening(
        self, session: SessionKey, claims: Sequence[Claim], *, with_totals: bool, above: Sequence[SessionKey] = ()
    ) -> CallOpening:
        """What `remembered`, `balances` and `totals` give, in one round. Read on every call, so it must be cheap.

        `above`: sessions of which their parents are read in that round, too.
        """
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

    async def sessions(
        self, namespace: str | None, limit: int, cursor: str | None, sort: Sort, *, part: str = ""
    ) -> Page:
        """Return a page of the sessions of one namespace (None: of all), the largest first, without their tools.

        `part`: only sessions with this text in the name that a reader of this namespace sees, in upper or lower case.
        Such a search reads at most `MOST_SEARCHED` names. The cursor then continues it, also if nothing was found yet.
        """
        ...

    async def newest(self, namespace: str | None, limit: int) -> Sequence[CallRecord]:
        """Return the newest records of all sessions of one namespace (None: of all), newest first."""
        ...

    async def calls(self, session: SessionKey, limit: int, before: str | None = None) -> Sequence[CallRecord]:
        """A session's newest records, newest first; `before`: of those whose call id sorts before this one.

        Here and below, a record that this version cannot read is left out, and named in the log.
        """
        ...

    async def call(self, namespace: str | None, request_id: str) -> CallRecord | None:
        """The newest record with this request id or call id."""
        ...

    async def answered(self, namespace: str, answer: str) -> CallRecord | None:
        """The newest call of a session in this namespace whose record has this `answer`; None where it is not kept."""
        ...

    async def latest(self, after: int | None, limit: int) -> LatestCalls:
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


class UpstreamReply(Protocol):
    """A provider's answer of which the head has arrived. Its bytes come as the provider framed them, still encoded."""

    @property
    def status(self) -> int:
        """The HTTP status."""
        ...

    @property
    def headers(self) -> Sequence[tuple[bytes, bytes]]:
        """As received, but for their names, which are in lower case."""
        ...

    def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises UpstreamTimeout or UpstreamProtocolError where it breaks off."""
        ...


class ReadBody(Protocol):
    """Does work that goes over a request's body: in the loop, or in a thread if the body is large."""

    async def __call__(self, size: int, work: Callable[[], T]) -> T:
        """Return what `work` returns; `size`: bytes of the body."""
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


class Observer(Protocol):
    """Is told of calls and steps, changes nothing, must not block. One that steps are nothing to inherits `stepped`."""

    def record(self, call: CallRecord, totals: Totals | None, left: Allowance | None = None) -> None:
        """Called once per call, after it was settled. `totals`: the session's, None for a call without one.

        `left`: what is left of the budgets that the call was charged to; None where none is limited.
        """
        ...

    def refused(self, call: CallRecord) -> None:
        """Called for a request that was refused before it became a call, such as one with an unknown client key.

        Anybody can send any number of these, so what it does must be bounded, in memory and in what is sent on.
        """
        del call

    def stepped(self, change: StepChange) -> None:
        """Called after a change was kept."""
        del change
