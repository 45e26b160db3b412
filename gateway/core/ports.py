"""Define the Protocols for I/O: store, provider connection and observers.

Adapters do not inherit from them. Each adapter module has one assignment with which the type checker proves that the
adapter fits. Several workers may share one store, so an adapter must not answer from a cache.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol, TypeVar, runtime_checkable

from gateway.core.agent_use import AgentUse
from gateway.core.audit import AuditEntry, AuditPage
from gateway.core.errors import StoreUnavailable
from gateway.core.http.request import Outgoing
from gateway.core.ledger.arithmetic import AccountKey, Balance, Claim, Dimension, Granted, Refused
from gateway.core.ledger.refusals import Allowance
from gateway.core.ledger.session_key import SessionKey
from gateway.core.record import CallRecord
from gateway.core.rollup import UsageQuery, UsageRow
from gateway.core.runaway import RunawayAlert
from gateway.core.session import Change, Remembered, SessionState
from gateway.core.steps import StepChange
from gateway.core.stored import (
    CallEnd,
    CallStart,
    KeyChange,
    LatestCalls,
    Lesson,
    OpenHold,
    Page,
    SessionView,
    Sort,
    StepEnding,
    StoredKey,
)
from gateway.core.usage import Totals

T = TypeVar("T")


class RecordRefused(StoreUnavailable):
    """The store is available but cannot take this record. Trying again will not help."""


class Ledger(Protocol):
    """The accounts of a store: open a call, reserve its cost, and settle it."""

    async def open_call(
        self, session: SessionKey, claims: Sequence[Claim], *, with_totals: bool, above: Sequence[SessionKey] = ()
    ) -> CallStart:
        """Return what `Sessions.remembered`, `balances` and `Sessions.totals` return, read in one round trip.

        Every call starts with it, so it must be cheap.

        Args:
            session: the session of the call.
            claims: the accounts to read.
            with_totals: read the session's totals too.
            above: sessions whose parents are read in the same round trip.
        """
        ...

    async def balances(self, claims: Sequence[Claim]) -> tuple[Balance, ...]:
        """Return the balance of each account, in the order of the claims.

        Raises:
            StoreDamaged: an account cannot be read. It is never treated as empty.
            StoreUnavailable: the balances are not known.
        """
        ...

    async def reserve(self, opened: OpenHold, lease_s: float) -> Granted | Refused:
        """Take the hold on all its accounts or on none. A second call with the same id changes nothing.

        The hold lasts as long as it is renewed every `lease_s` seconds. `settle` with the record of the same id
        releases it, whatever the record says.

        Raises:
            StoreDamaged: nothing is held, because an account cannot be read.
            StoreUnavailable: nothing is held, or it is not known. If it is held, its lease ends it.
        """
        ...

    async def extend(self, hold_id: str, units: int) -> Granted | None:
        """Hold up to `units` more, and return how many were granted. That can be 0. None: there is no such hold.

        Raises:
            StoreUnavailable: nothing was added, or it is not known.
        """
        ...

    async def renew(self, noted: Mapping[str, int]) -> frozenset[str]:
        """Restart the leases of these holds, and note the output tokens delivered so far.

        Args:
            noted: delivered tokens by the id of the hold.

        Returns:
            The ids without a hold. Their calls were settled by this worker or another one, or the store lost its data.

        Raises:
            StoreUnavailable: the leases were not renewed, or it is not known.
        """
        ...

    async def overdue_holds(self, limit: int) -> Sequence[OpenHold]:
        """Return up to `limit` holds whose lease has ended. They remain until they are settled."""
        ...

    async def settle(self, record: CallRecord, ending: StepEnding | None = None) -> Totals:
        """Write the record, charge it to its session and accounts, and return the session's new totals.

        All of this is one transaction, done once per `call_id`. It survives the end of this process once this returns.

        - The hold with the id of the call is released, and `record.spent` is added to `record.accounts`.
        - The session remembers `record.last_turn` if there is one, and the tools that its calls asked for, each call
          once. The tools of an orphaned call are not known.
        - `record.kept` is put before what the session already keeps, and the whole is cut at `MAX_KEPT`.
        - If a subagent made the call, it is added to what that one used, see `Sessions.agents`.
        - A record without a session is only written.
        - A record without a charge adds nothing to the totals. Its session is listed from then on, with this call's
          time.
        - A call that was settled as orphaned or pending is corrected, see `CallRecord.replaces`.
        - The usage of the call's hour and day is changed in the same way, see `UsageHistory`.

        Args:
            record: the record of the call.
            ending: moves the session's agents in their steps. The moved steps are kept in the same transaction, and the
                record that it returns is written instead of `record`. If it runs several times, its last result counts.
                It has no effect if the call was settled before. A call without a session has none.

        Raises:
            StoreConflict: nothing was written, because other calls changed the state each time. Only with an `ending`.
            RecordRefused: nothing was written, and trying again will not help. The store is available. It cannot take
                this record, or cannot read the record that it replaces or one of the accounts.
            StoreUnavailable: nothing was written, or it is not known.
        """
        ...

    async def settle_and_read(self, record: CallRecord, ending: StepEnding | None, claims: Sequence[Claim]) -> CallEnd:
        """Do what `settle` does, and return its totals and the new balances of these claims, in one round trip.

        It raises what `settle` raises. The call is settled even if the balances cannot be read afterwards.
        """
        ...

    async def override_limits(self, account: AccountKey, limits: Mapping[Dimension, int | None] | None) -> None:
        """Override the configured limits of one account. `limits` of None removes all overrides.

        A limit of None means unlimited. Dimensions that are not named keep their override.

        Raises:
            StoreUnavailable: nothing was written, or it is not known.
        """
        ...


class Sessions(Protocol):
    """The sessions of a store: their totals, and the state that the next call needs."""

    async def totals(self, session: SessionKey) -> Totals:
        """Return the session's current totals, which are zero for an unknown session."""
        ...

    async def session(self, session: SessionKey) -> SessionView | None:
        """Return the session, or None."""
        ...

    async def agents(self, session: SessionKey) -> Sequence[AgentUse]:
        """Return what each subagent of the session used, in any order. Calls of the main agent are not counted here.

        At most `MAX_SUBAGENTS` are counted by id, and all others together. They are counted in the same transaction as
        the totals of the session, and deleted with a reset of these.
        """
        ...

    async def sessions(
        self, namespace: str | None, limit: int, cursor: str | None, sort: Sort, *, part: str = ""
    ) -> Page:
        """Return a page of the sessions of one namespace, the largest first, without their tools.

        Args:
            namespace: None for all namespaces.
            limit: the most sessions on the page.
            cursor: where the page before ended; None for the first page.
            sort: what "largest" means.
            part: text that the session's displayed name must contain, ignoring case. Such a search reads at most
                `MOST_SEARCHED` names. Its cursor continues the search, also if nothing was found yet.
        """
        ...

    async def session_counts(self, namespaces: Sequence[str]) -> Sequence[int]:
        """Return the number of stored sessions of each namespace."""
        ...

    async def remembered(self, session: SessionKey) -> Remembered:
        """Return the session's state and what its settled records left for the next call. Empty if it is unknown."""
        ...

    async def update(self, session: SessionKey, change: Change) -> SessionState:
        """Apply `change` to the session's state in one transaction, and return the new state.

        The session need not exist yet, because a request can be trimmed before its first call is settled. `change` is
        pure and may be applied more than once.

        Raises:
            StoreUnavailable: nothing was written, or it is not known.
        """
        ...

    async def reset(self, session: SessionKey) -> bool:
        """Set the session's totals and tool counts to zero, and the accounts of its subagents.

        Return False if there is no such session.
        """
        ...

    async def delete(self, session: SessionKey) -> bool:
        """Delete the session, its state and its calls. Return False if there is no such session."""
        ...

    async def expire(self, before: float) -> int:
        """Delete old sessions, records and lessons, and return the number of deleted sessions.

        Args:
            before: Unix time in seconds. A session is old if its last call is older than this.
        """
        ...


class Calls(Protocol):
    """The call records of a store. A record that this version cannot read is left out and named in the log."""

    async def newest_calls(self, namespace: str | None, limit: int) -> Sequence[CallRecord]:
        """Return the newest records of all sessions of one namespace (None: of all), newest first."""
        ...

    async def calls(self, session: SessionKey, limit: int, before: str | None = None) -> Sequence[CallRecord]:
        """Return the newest records of a session, newest first.

        Args:
            session: the session.
            limit: the most records.
            before: return only records whose call id sorts before this one.
        """
        ...

    async def call(self, namespace: str | None, request_id: str) -> CallRecord | None:
        """Return the newest record with this request id or call id in one namespace (None: in any), or None."""
        ...

    async def call_of_response(self, namespace: str, answer: str) -> CallRecord | None:
        """Return the newest call of a session in this namespace whose record has this `answer`, or None."""
        ...

    def each_call(self, since: float) -> AsyncIterator[CallRecord]:
        """Yield all records of calls that began at or after this Unix time. Only a small part is in memory at once.

        The order is the store's own. A call that is settled meanwhile can be missing or be yielded twice.
        """
        ...

    async def settled_after(self, after: int | None, limit: int) -> LatestCalls:
        """Return calls of all namespaces and workers that were settled after this cursor, in that order.

        Only the last `MOST_LATEST` calls are kept in order. Each comes with its current record, and deleted ones are
        left out. An orphaned call appears again when it is corrected.

        Args:
            after: the cursor of an earlier result; None starts now.
            limit: the most calls.
        """
        ...


class UsageHistory(Protocol):
    """The usage of all calls by hour and by day, which a store keeps longer than sessions and call records.

    `Ledger.settle` writes it in the same transaction.
    """

    async def usage(self, query: UsageQuery) -> Sequence[UsageRow]:
        """Return the rows of these hours or days, in any order. Several rows can have the same labels."""
        ...


class Results(Protocol):
    """The full texts of tool results, which a store keeps by handle as long as their session."""

    async def missing_results(self, session: SessionKey, handles: Sequence[str]) -> Sequence[str]:
        """Return those of these handles for which the session has no text."""
        ...

    async def results_size(self, session: SessionKey) -> int:
        """Return the bytes of all texts that the session has by handle, as UTF-8."""
        ...

    async def keep_results(self, session: SessionKey, texts: Mapping[str, str], most: int) -> Sequence[str]:
        """Keep texts by handle, and return the handles that have no text now. A handle that has a text keeps it.

        The texts are taken one after the other. Each is kept only if all texts of the session then have at most `most`
        bytes. Older texts are never removed to make room.

        Raises:
            StoreUnavailable: nothing was written, or it is not known.
        """
        ...

    async def results(self, session: SessionKey, handles: Sequence[str]) -> Mapping[str, str]:
        """Return the texts that the session has for these handles, in one round trip."""
        ...

    async def result(self, namespace: str | None, handle: str) -> str | None:
        """Return the text of a handle in one namespace (None: in any), or None."""
        ...


class ClientKeys(Protocol):
    """The client keys that were made with `gateway keys` and are kept in a store."""

    async def keys(self) -> Sequence[StoredKey]:
        """Return the client keys, sorted by name."""
        ...

    async def add_key(self, key: StoredKey) -> bool:
        """Keep a client key. Return False if there is one of that name."""
        ...

    async def change_key(self, name: str, change: KeyChange) -> StoredKey | None:
        """Apply `change` to a client key in one transaction, and return the new one. Return None if there is none.

        An error of `change` is raised, and changes nothing.

        Raises:
            StoreConflict: nothing was changed, because others changed the key each time.
            StoreDamaged: the key cannot be read.
        """
        ...

    async def revoke_key(self, name: str) -> bool:
        """Delete a client key, but not its sessions or its account. Return False if there is none of that name."""
        ...


class Lessons(Protocol):
    """The lessons that workers learn from calls and share in a store, such as corrections of token counts."""

    async def learned(self, key: str) -> bytes | None:
        """Return what `learn` left under this key, or None."""
        ...

    async def learn(self, lessons: Mapping[str, Lesson]) -> Mapping[str, bytes]:
        """Apply each lesson to what was learned under its key, in one transaction, and return the results by key.

        Raises:
            StoreUnavailable: nothing was written, or it is not known.
        """
        ...


class AuditLog(Protocol):
    """The changes of administrators. Entries are added, and never changed. `Sessions.expire` deletes old ones."""

    async def record_change(self, entry: AuditEntry) -> None:
        """Add an entry. Of more than `MOST_CHANGES` entries the oldest is dropped.

        Raises:
            StoreUnavailable: it was not added, or it is not known.
        """
        ...

    async def changes(self, limit: int, cursor: str | None = None, target: str = "") -> AuditPage:
        """Return a page of the entries, newest first.

        Args:
            limit: the most entries on the page.
            cursor: where the page before ended, as digits or two numbers with a hyphen; None for the first page.
            target: text that the target of an entry must contain.
        """
        ...


@runtime_checkable
class Store(Ledger, Sessions, Calls, UsageHistory, Results, ClientKeys, Lessons, AuditLog, Protocol):
    """Everything that the gateway keeps. A part of the gateway uses the smallest of these Protocols that it needs."""

    async def ping(self) -> None:
        """Return if the store can be read and written, or raise StoreUnavailable."""
        ...

    async def aclose(self) -> None:
        """Close the connections or files of the store."""
        ...


#: Takes a piece of a body at once, and must not block. Returns False to receive no more for now.
TakePiece = Callable[[bytes], bool]


class PassedPieces(AsyncIterator[bytes]):
    """The pieces of a body that can be taken in the callbacks in which they arrive, without waking a task for each.

    They can also be iterated, and both ways can alternate. Adapters inherit from this class, because `isinstance` is
    slow with a Protocol.
    """

    @abstractmethod
    async def pass_to(self, take: TakePiece) -> bool:
        """Call `take` with each piece as it arrives, until it returns False. Later pieces wait for the next call.

        Returns True when `take` has returned False, and False at the end of the body. Raises what `chunks` raises, and
        the exceptions of `take`.
        """


class UpstreamReply(Protocol):
    """A provider's response after its headers arrived. Its body bytes are the provider's, still compressed."""

    @property
    def status(self) -> int:
        """Return the HTTP status."""
        ...

    @property
    def headers(self) -> Sequence[tuple[bytes, bytes]]:
        """Return the headers as received, with their names in lower case."""
        ...

    def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives. Raises UpstreamTimeout or UpstreamProtocolError if it breaks off.

        It can be `PassedPieces`, see `gateway.upstream.body.pass_pieces`.
        """
        ...


class ReadBody(Protocol):
    """Run work that reads a whole request body: in the event loop, or in a thread if the body is large."""

    async def __call__(self, size: int, work: Callable[[], T]) -> T:
        """Return what `work` returns. `size`: bytes of the body."""
        ...


class Upstream(Protocol):
    """The connection pool of one provider."""

    def send(self, request: Outgoing) -> AbstractAsyncContextManager[UpstreamReply]:
        """Send a request. Read the response inside the `with` block; leaving the block releases the connection.

        `request.at_work` is called before the first byte is sent. Until then the call costs nothing if the client
        disconnects.

        Raises:
            UpstreamUnreachable, UpstreamTimeout, UpstreamProtocolError: before the response headers arrived.
            RequestFault: the request cannot be sent unchanged.
        """
        ...

    async def aclose(self) -> None:
        """Close the connections."""
        ...


class Observer(Protocol):
    """Receive calls and steps. An observer changes nothing and must not block.

    `refused`, `stepped` and `warned` do nothing by default, for observers that inherit from this class.
    """

    def record(self, call: CallRecord, totals: Totals | None, left: Allowance | None = None) -> None:
        """Receive a call, once, after it was settled.

        Args:
            call: the record of the call.
            totals: the session's totals; None for a call without a session.
            left: what is left of the budgets that the call was charged to; None if none is limited.
        """
        ...

    def refused(self, call: CallRecord) -> None:
        """Receive a request that was refused before it became a call, such as one with an unknown client key.

        Anyone can send any number of these. An observer must therefore limit the memory and the traffic they cause.
        """
        del call

    def stepped(self, change: StepChange) -> None:
        """Receive a step change after it was kept."""
        del change

    def warned(self, alert: RunawayAlert) -> None:
        """Receive what runaway protection found, when a threshold is reached or a session is stopped."""
        del alert
