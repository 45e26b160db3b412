"""A store in one process, gone with it. First-class: `memory://`, and what most tests run on."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from gateway.core.ids import first_id_at
from gateway.core.ports import CallRecord, Page, SessionKey, SessionView, Store
from gateway.core.usage import Totals
from gateway.stores.cursor import Cursor

#: records kept of one session, and call ids remembered of all; totals are not affected by what is forgotten here
CALLS_PER_SESSION: Final = 1000
CALLS_IN_ALL: Final = 100_000


class MemoryStore:
    """Sessions in a dict. No method awaits between reading and writing, so each is one step for every caller."""

    def __init__(self) -> None:
        self._sessions: dict[SessionKey, SessionView] = {}
        self._calls: dict[SessionKey, deque[CallRecord]] = {}
        self._by_id: dict[str, CallRecord] = {}

    async def settle(self, record: CallRecord) -> Totals:
        """See `Store.settle`."""
        key = record.session
        known = record.call_id in self._by_id
        if not known:
            self._remember(record)
        if key is None:
            return Totals()
        view = self._sessions.get(key)
        if known or record.charge is None:
            return view.totals if view else Totals()
        totals = (view.totals if view else Totals()).add(record.charge)
        ended = record.started_at + record.duration_s
        self._sessions[key] = SessionView(
            key,
            view.created_at if view else record.started_at,
            max(ended, view.last_call_at if view else 0.0),
            totals,
            view.derived if view else record.derived_session,
        )
        return totals

    def _remember(self, record: CallRecord) -> None:
        self._by_id[record.call_id] = record
        if len(self._by_id) > CALLS_IN_ALL:
            del self._by_id[next(iter(self._by_id))]
        if record.session is not None:
            self._calls.setdefault(record.session, deque(maxlen=CALLS_PER_SESSION)).append(record)

    async def totals(self, session: SessionKey) -> Totals:
        """See `Store.totals`."""
        view = self._sessions.get(session)
        return view.totals if view else Totals()

    async def session(self, session: SessionKey) -> SessionView | None:
        """See `Store.session`."""
        return self._sessions.get(session)

    async def sessions(self, namespace: str | None, limit: int, cursor: str | None, sort: str) -> Page:
        """See `Store.sessions`."""
        after = Cursor.parse(cursor) if cursor else None
        rows = [
            (Cursor.of(view, sort), view)
            for view in self._sessions.values()
            if namespace is None or view.key.namespace == namespace
        ]
        if after is not None:
            rows = [row for row in rows if row[0] < after]
        page = heapq.nlargest(limit + 1, rows, key=lambda row: row[0])
        more = str(page[limit - 1][0]) if len(page) > limit else None
        return Page([view for _, view in page[:limit]], more)

    async def calls(self, session: SessionKey, limit: int) -> Sequence[CallRecord]:
        """See `Store.calls`."""
        return heapq.nlargest(limit, self._calls.get(session, ()), key=lambda record: record.call_id)

    async def call(self, namespace: str | None, request_id: str) -> CallRecord | None:
        """See `Store.call`."""

        def visible(record: CallRecord) -> bool:
            return namespace is None or (record.session is not None and record.session.namespace == namespace)

        own = self._by_id.get(request_id)
        if own is not None and visible(own):
            return own
        named = (record for record in self._by_id.values() if record.request_id == request_id and visible(record))
        return max(named, key=lambda record: record.call_id, default=None)

    async def reset(self, session: SessionKey) -> bool:
        """See `Store.reset`."""
        view = self._sessions.get(session)
        if view is None:
            return False
        self._sessions[session] = SessionView(view.key, view.created_at, view.last_call_at, Totals(), view.derived)
        return True

    async def delete(self, session: SessionKey) -> bool:
        """See `Store.delete`."""
        found = self._sessions.pop(session, None) is not None
        for record in self._calls.pop(session, ()):
            self._by_id.pop(record.call_id, None)
        return found

    async def expire(self, before: float) -> int:
        """See `Store.expire`."""
        old = [key for key, view in self._sessions.items() if view.last_call_at < before]
        for key in old:
            await self.delete(key)
        oldest_kept = first_id_at(before)
        self._by_id = {call_id: record for call_id, record in self._by_id.items() if call_id >= oldest_kept}
        for key, calls in list(self._calls.items()):
            kept = deque((call for call in calls if call.call_id >= oldest_kept), maxlen=CALLS_PER_SESSION)
            if kept:
                self._calls[key] = kept
            else:
                del self._calls[key]
        return len(old)

    async def ping(self) -> None:
        """See `Store.ping`."""

    async def aclose(self) -> None:
        """See `Store.aclose`."""


if TYPE_CHECKING:
    _: Store = MemoryStore()
