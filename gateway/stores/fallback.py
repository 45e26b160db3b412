"""Wrap the store of a worker, so that calls fail at once instead of waiting while it is unavailable.

While the store is unavailable, each method raises `StoreUnavailable` at once, so callers need not check before. Only
balances have a substitute: those that were read last, see `StaleAccounts`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from gateway.core.agent_use import AgentUse
from gateway.core.audit import AuditEntry, AuditPage
from gateway.core.errors import StoreUnavailable
from gateway.core.ledger.arithmetic import AccountKey, Balance, Claim, Dimension, Granted, Refused
from gateway.core.ledger.session_key import SessionKey
from gateway.core.ports import Store
from gateway.core.record import CallRecord
from gateway.core.rollup import UsageQuery, UsageRow
from gateway.core.session import Change, Remembered, SessionState
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
from gateway.stores.availability import Availability
from gateway.stores.stale_accounts import StaleAccounts


class _Guard:
    """A context that raises an error if the store is unavailable. `is_reported`: new errors mark it as unavailable."""

    def __init__(self, availability: Availability, *, is_reported: bool) -> None:
        self._availability = availability
        self._is_reported = is_reported

    def __enter__(self) -> None:
        if self._availability.is_unavailable:
            raise self._availability.error()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._is_reported and isinstance(error, StoreUnavailable):
            self._availability.report(error)


class FallbackStore:
    """A `Store` that fails at once while it is unavailable.

    | an error of | has this effect |
    |---|---|
    | what every call needs: accounts, earlier calls, client keys, lessons | the store is marked as unavailable |
    | other work: updates and lists of sessions, tool results, maintenance | only this operation fails |

    Args:
        store: the store of the worker.
        availability: knows whether the store is unavailable.
        stale: the accounts as last read, for the time while it is unavailable.
    """

    def __init__(self, store: Store, availability: Availability, stale: StaleAccounts | None = None) -> None:
        self.availability = availability
        self.stale = stale if stale is not None else StaleAccounts()
        # The store then has the records of all ended calls, so what they spent is no longer added here.
        availability.on_available = self.stale.drop_spent
        self._store = store
        self._needed = _Guard(availability, is_reported=True)
        self._optional = _Guard(availability, is_reported=False)

    # --- Ledger ------------------------------------------------------------------------------------------------

    async def open_call(
        self, session: SessionKey, claims: Sequence[Claim], *, with_totals: bool, above: Sequence[SessionKey] = ()
    ) -> CallStart:
        """See `Ledger.open_call`. The balances are remembered."""
        with self._needed:
            found = await self._store.open_call(session, claims, with_totals=with_totals, above=above)
        self.stale.remember(found.balances)
        return found

    async def balances(self, claims: Sequence[Claim]) -> tuple[Balance, ...]:
        """See `Ledger.balances`. The balances are remembered."""
        with self._needed:
            found = await self._store.balances(claims)
        self.stale.remember(found)
        return found

    async def reserve(self, opened: OpenHold, lease_s: float) -> Granted | Refused:
        """See `Ledger.reserve`."""
        with self._needed:
            return await self._store.reserve(opened, lease_s)

    async def extend(self, hold_id: str, units: int) -> Granted | None:
        """See `Ledger.extend`."""
        with self._needed:
            return await self._store.extend(hold_id, units)

    async def renew(self, noted: Mapping[str, int]) -> frozenset[str]:
        """See `Ledger.renew`."""
        with self._needed:
            return await self._store.renew(noted)

    async def overdue_holds(self, limit: int) -> Sequence[OpenHold]:
        """See `Ledger.overdue_holds`. Only maintenance needs it."""
        with self._optional:
            return await self._store.overdue_holds(limit)

    async def settle(self, record: CallRecord, ending: StepEnding | None = None) -> Totals:
        """See `Ledger.settle`."""
        with self._needed:
            return await self._store.settle(record, ending)

    async def settle_and_read(self, record: CallRecord, ending: StepEnding | None, claims: Sequence[Claim]) -> CallEnd:
        """See `Ledger.settle_and_read`."""
        with self._needed:
            return await self._store.settle_and_read(record, ending, claims)

    async def override_limits(self, account: AccountKey, limits: Mapping[Dimension, int | None] | None) -> None:
        """See `Ledger.override_limits`."""
        with self._optional:
            await self._store.override_limits(account, limits)

    # --- Sessions ----------------------------------------------------------------------------------------------

    async def totals(self, session: SessionKey) -> Totals:
        """See `Sessions.totals`."""
        with self._optional:
            return await self._store.totals(session)

    async def session(self, session: SessionKey) -> SessionView | None:
        """See `Sessions.session`."""
        with self._optional:
            return await self._store.session(session)

    async def agents(self, session: SessionKey) -> Sequence[AgentUse]:
        """See `Sessions.agents`. It is needed: it names the agents above a subagent, which are charged too."""
        with self._needed:
            return await self._store.agents(session)

    async def sessions(
        self, namespace: str | None, limit: int, cursor: str | None, sort: Sort, *, part: str = ""
    ) -> Page:
        """See `Sessions.sessions`."""
        with self._optional:
            return await self._store.sessions(namespace, limit, cursor, sort, part=part)

    async def session_counts(self, namespaces: Sequence[str]) -> Sequence[int]:
        """See `Sessions.session_counts`."""
        with self._optional:
            return await self._store.session_counts(namespaces)

    async def remembered(self, session: SessionKey) -> Remembered:
        """See `Sessions.remembered`. It is needed: it names the parents, which are charged too."""
        with self._needed:
            return await self._store.remembered(session)

    async def update(self, session: SessionKey, change: Change) -> SessionState:
        """See `Sessions.update`."""
        with self._optional:
            return await self._store.update(session, change)

    async def reset(self, session: SessionKey) -> bool:
        """See `Sessions.reset`."""
        with self._optional:
            return await self._store.reset(session)

    async def delete(self, session: SessionKey) -> bool:
        """See `Sessions.delete`."""
        with self._optional:
            return await self._store.delete(session)

    async def expire(self, before: float) -> int:
        """See `Sessions.expire`."""
        with self._optional:
            return await self._store.expire(before)

    # --- Calls -------------------------------------------------------------------------------------------------

    async def newest_calls(self, namespace: str | None, limit: int) -> Sequence[CallRecord]:
        """See `Calls.newest_calls`."""
        with self._needed:
            return await self._store.newest_calls(namespace, limit)

    async def calls(self, session: SessionKey, limit: int, before: str | None = None) -> Sequence[CallRecord]:
        """See `Calls.calls`."""
        with self._needed:
            return await self._store.calls(session, limit, before)

    async def call(self, namespace: str | None, request_id: str) -> CallRecord | None:
        """See `Calls.call`."""
        with self._needed:
            return await self._store.call(namespace, request_id)

    async def call_of_response(self, namespace: str, answer: str) -> CallRecord | None:
        """See `Calls.call_of_response`."""
        with self._needed:
            return await self._store.call_of_response(namespace, answer)

    async def each_call(self, since: float) -> AsyncIterator[CallRecord]:
        """See `Calls.each_call`."""
        with self._optional:
            async for record in self._store.each_call(since):
                yield record

    async def settled_after(self, after: int | None, limit: int) -> LatestCalls:
        """See `Calls.settled_after`."""
        with self._needed:
            return await self._store.settled_after(after, limit)

    # --- UsageHistory -------------------------------------------------------------------------------------------

    async def usage(self, query: UsageQuery) -> Sequence[UsageRow]:
        """See `UsageHistory.usage`."""
        with self._optional:
            return await self._store.usage(query)

    # --- Results -----------------------------------------------------------------------------------------------

    async def missing_results(self, session: SessionKey, handles: Sequence[str]) -> Sequence[str]:
        """See `Results.missing_results`."""
        with self._optional:
            return await self._store.missing_results(session, handles)

    async def results_size(self, session: SessionKey) -> int:
        """See `Results.results_size`."""
        with self._optional:
            return await self._store.results_size(session)

    async def keep_results(self, session: SessionKey, texts: Mapping[str, str], most: int) -> Sequence[str]:
        """See `Results.keep_results`."""
        with self._optional:
            return await self._store.keep_results(session, texts, most)

    async def results(self, session: SessionKey, handles: Sequence[str]) -> Mapping[str, str]:
        """See `Results.results`."""
        with self._optional:
            return await self._store.results(session, handles)

    async def result(self, namespace: str | None, handle: str) -> str | None:
        """See `Results.result`."""
        with self._optional:
            return await self._store.result(namespace, handle)

    # --- ClientKeys --------------------------------------------------------------------------------------------

    async def keys(self) -> Sequence[StoredKey]:
        """See `ClientKeys.keys`."""
        with self._needed:
            return await self._store.keys()

    async def add_key(self, key: StoredKey) -> bool:
        """See `ClientKeys.add_key`."""
        with self._optional:
            return await self._store.add_key(key)

    async def change_key(self, name: str, change: KeyChange) -> StoredKey | None:
        """See `ClientKeys.change_key`."""
        with self._optional:
            return await self._store.change_key(name, change)

    async def revoke_key(self, name: str) -> bool:
        """See `ClientKeys.revoke_key`."""
        with self._optional:
            return await self._store.revoke_key(name)

    # --- Lessons -----------------------------------------------------------------------------------------------

    async def learned(self, key: str) -> bytes | None:
        """See `Lessons.learned`."""
        with self._needed:
            return await self._store.learned(key)

    async def learn(self, lessons: Mapping[str, Lesson]) -> Mapping[str, bytes]:
        """See `Lessons.learn`."""
        with self._needed:
            return await self._store.learn(lessons)

    # --- AuditLog ----------------------------------------------------------------------------------------------

    async def record_change(self, entry: AuditEntry) -> None:
        """See `AuditLog.record_change`."""
        with self._optional:
            await self._store.record_change(entry)

    async def changes(self, limit: int, cursor: str | None = None, target: str = "") -> AuditPage:
        """See `AuditLog.changes`."""
        with self._optional:
            return await self._store.changes(limit, cursor, target)

    # --- Store -------------------------------------------------------------------------------------------------

    async def ping(self) -> None:
        """See `Store.ping`. It is also sent to an unavailable store."""
        await self._store.ping()

    async def aclose(self) -> None:
        """See `Store.aclose`."""
        await self._store.aclose()


if TYPE_CHECKING:
    _: type[Store] = FallbackStore
