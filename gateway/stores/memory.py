"""A store in one process, gone with it. First-class: `memory://`, and what most tests run on."""

from __future__ import annotations

import heapq
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from gateway.core.counting.calibration import LastTurn
from gateway.core.ids import first_id_at
from gateway.core.ports import CallRecord, Lesson, Page, SessionKey, SessionView, Store
from gateway.core.session import Change, Remembered, SessionState
from gateway.core.usage import Totals
from gateway.stores.cursor import Cursor

#: records kept of one session, and call ids remembered of all; totals are not affected by what is forgotten here
CALLS_PER_SESSION: Final = 1000
CALLS_IN_ALL: Final = 100_000
#: states and lessons kept; those that were not changed for longest go first. What is gone is decided or learned anew
STATES_IN_ALL: Final = 10_000
LESSONS_IN_ALL: Final = 10_000

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class _Newest(Generic[K, V]):
    """So many values, with the time of their last change; those changed last."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[K, tuple[float, V]] = OrderedDict()

    def get(self, key: K) -> V | None:
        kept = self._values.get(key)
        return None if kept is None else kept[1]

    def put(self, key: K, value: V, now: float) -> None:
        self._values[key] = (now, value)
        self._values.move_to_end(key)
        if len(self._values) > self._most:
            self._values.popitem(last=False)

    def drop(self, key: K) -> None:
        self._values.pop(key, None)

    def changed_before(self, before: float) -> list[K]:
        return [key for key, (changed_at, _) in self._values.items() if changed_at < before]


class MemoryStore:
    """Sessions in a dict. No method awaits between reading and writing, so each is one step for every caller.

    `now` gives the time of day.
    """

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._sessions: dict[SessionKey, SessionView] = {}
        self._calls: dict[SessionKey, deque[CallRecord]] = {}
        self._by_id: dict[str, CallRecord] = {}
        self._last_turns: dict[SessionKey, LastTurn] = {}
        self._states = _Newest[SessionKey, SessionState](STATES_IN_ALL)
        self._lessons = _Newest[str, bytes](LESSONS_IN_ALL)

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
        saved = record.context.saved_tokens if record.context else 0
        totals = (view.totals if view else Totals()).add(record.charge, saved)
        ended = record.started_at + record.duration_s
        self._sessions[key] = SessionView(
            key,
            view.created_at if view else record.started_at,
            max(ended, view.last_call_at if view else 0.0),
            totals,
            view.derived if view else record.derived_session,
        )
        if record.last_turn is not None:
            self._last_turns[key] = record.last_turn
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

    async def remembered(self, session: SessionKey) -> Remembered:
        """See `Store.remembered`."""
        return Remembered(self._states.get(session) or SessionState(), self._last_turns.get(session))

    async def update(self, session: SessionKey, change: Change) -> SessionState:
        """See `Store.update`."""
        state = change(self._states.get(session) or SessionState())
        self._states.put(session, state, self._now())
        return state

    async def learned(self, key: str) -> bytes | None:
        """See `Store.learned`."""
        return self._lessons.get(key)

    async def learn(self, lessons: Mapping[str, Lesson]) -> Mapping[str, bytes]:
        """See `Store.learn`."""
        known = {key: lesson(self._lessons.get(key)) for key, lesson in lessons.items()}
        for key, value in known.items():
            self._lessons.put(key, value, self._now())
        return known

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
        self._states.drop(session)
        return self._forget(session)

    def _forget(self, session: SessionKey) -> bool:
        found = self._sessions.pop(session, None) is not None
        self._last_turns.pop(session, None)
        for record in self._calls.pop(session, ()):
            self._by_id.pop(record.call_id, None)
        return found

    async def expire(self, before: float) -> int:
        """See `Store.expire`."""
        old = [key for key, view in self._sessions.items() if view.last_call_at < before]
        for key in old:
            self._forget(key)
        self._expire_calls(first_id_at(before))
        for key in self._states.changed_before(before):
            if key not in self._sessions:
                self._states.drop(key)
        for lesson in self._lessons.changed_before(before):
            self._lessons.drop(lesson)
        return len(old)

    def _expire_calls(self, oldest_kept: str) -> None:
        self._by_id = {call_id: record for call_id, record in self._by_id.items() if call_id >= oldest_kept}
        for key, calls in list(self._calls.items()):
            kept = deque((call for call in calls if call.call_id >= oldest_kept), maxlen=CALLS_PER_SESSION)
            if kept:
                self._calls[key] = kept
            else:
                del self._calls[key]

    async def ping(self) -> None:
        """See `Store.ping`."""

    async def aclose(self) -> None:
        """See `Store.aclose`."""


if TYPE_CHECKING:
    _: Store = MemoryStore()
