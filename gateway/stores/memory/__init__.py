"""Store everything in the memory of one process (`memory://`). Most tests run on it."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import AsyncIterator, Callable, Hashable, Mapping, Sequence
from dataclasses import field, replace
from itertools import islice
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from gateway.core.agent_use import AgentUse
from gateway.core.audit import AuditEntry, AuditPage
from gateway.core.bounded import BoundedDict
from gateway.core.counting.calibration import LastTurn
from gateway.core.ids import first_id_at
from gateway.core.ledger.arithmetic import AccountKey, Balance, Claim, Dimension, Granted, Moment, Refused
from gateway.core.ledger.session_key import SessionKey
from gateway.core.ports import Store
from gateway.core.record import CallRecord
from gateway.core.retention import DEFAULT_RETENTION, Retention
from gateway.core.rollup import UsageQuery, UsageRow
from gateway.core.session import MAX_KEPT, Change, Remembered, SessionState
from gateway.core.stored import (
    SORTS,
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
from gateway.core.tools import ToolUse
from gateway.core.usage import Totals
from gateway.core.values import dataclass
from gateway.stores import clock
from gateway.stores.cursor import Cursor, Names, page_of
from gateway.stores.damage import Refusing
from gateway.stores.memory.accounts import MemoryLedger
from gateway.stores.memory.agents import MemoryAgents
from gateway.stores.memory.audit import MemoryAuditLog
from gateway.stores.memory.calls import MemoryCalls, OrphanCharge
from gateway.stores.memory.latest import MemoryLatest
from gateway.stores.memory.lists import SortedSessions
from gateway.stores.sums import stopped

#: States and lessons kept. The ones changed longest ago are dropped first, and are decided or learned again.
STATES_IN_ALL: Final = 10_000
LESSONS_IN_ALL: Final = 10_000

_NOTHING_LEFT: Final = (None, "")

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class _Newest(Generic[K, V]):
    """The `most` newest values, with the time of their last change (Unix seconds)."""

    def __init__(self, most: int) -> None:
        self._values = BoundedDict[K, tuple[float, V]](most)

    def __contains__(self, key: K) -> bool:
        return key in self._values

    def get(self, key: K) -> V | None:
        kept = self._values.get(key)
        return None if kept is None else kept[1]

    def put(self, key: K, value: V, now: float) -> None:
        self._values[key] = (now, value)

    def drop(self, key: K) -> None:
        self._values.pop(key, None)

    def changed_before(self, before: float) -> list[K]:
        return [key for key, (changed_at, _) in self._values.items() if changed_at < before]


@dataclass(slots=True)
class _Results:
    """A session's tool results by handle, their size in bytes as UTF-8, and the last change (Unix seconds)."""

    texts: dict[str, str] = field(default_factory=dict)
    size: int = 0
    changed_at: float = 0.0


class MemoryStore:
    """A `Store` of dicts. No method awaits between reading and writing, so each method is atomic.

    `now` returns Unix seconds, `moment` the time for holds.
    """

    def __init__(
        self,
        now: Callable[[], float] = time.time,
        moment: Callable[[], Moment] = clock.now,
        retention: Retention = DEFAULT_RETENTION,
    ) -> None:
        self._now = now
        self._ledger = MemoryLedger(now, moment)
        self._keys: dict[str, StoredKey] = {}
        self._results: dict[SessionKey, _Results] = {}
        self._sessions: dict[SessionKey, SessionView] = {}
        #: the same sessions in each order
        self._sorted = {sort: SortedSessions(sort) for sort in SORTS}
        self._calls = MemoryCalls(retention)
        self._agents = MemoryAgents()
        self._audit = MemoryAuditLog(retention)
        self._resets: dict[SessionKey, int] = {}
        #: what the calls of a session left for the next one: its last turn, and what its provider keeps
        self._left: dict[SessionKey, tuple[LastTurn | None, str]] = {}
        #: The parents of sessions. They are kept as long as the accounts, even if the states are dropped.
        self._parents: dict[SessionKey, str] = {}
        self._states = _Newest[SessionKey, SessionState](STATES_IN_ALL)
        self._lessons = _Newest[str, bytes](LESSONS_IN_ALL)
        self._latest = MemoryLatest()

    async def settle(self, record: CallRecord, ending: StepEnding | None = None) -> Totals:
        """See `Store.settle`."""
        with Refusing(record.call_id):
            return self._settle(record, ending)

    async def settle_and_read(self, record: CallRecord, ending: StepEnding | None, claims: Sequence[Claim]) -> CallEnd:
        """See `Store.settle_and_read`."""
        return CallEnd(await self.settle(record, ending), self._ledger.balances(claims))

    def _settle(self, record: CallRecord, ending: StepEnding | None) -> Totals:
        known = self._calls.get(record.call_id)
        is_new = known is None or record.replaces(known)
        if is_new:
            if ending is not None and (key := record.session) is not None:
                state = self._state(key)
                steps, record = ending(state.steps)
                self._keep_state(key, state.with_steps(steps))
            self._calls.add(record)
            self._charge(record, known)
        totals = self._totals(record.session) if record.session is not None else None
        # An orphaned call that still runs and is charged for more is listed again only when it ends.
        if is_new and not (known is not None and record.is_provisional):
            self._latest.add(record.call_id, totals)
        return totals or Totals()

    def _charge(self, record: CallRecord, orphaned: CallRecord | None) -> None:
        """Charge a call. `orphaned`: its earlier record as an orphaned call, whose charge is taken back."""
        key, earlier = record.session, self._calls.take_orphan_charge(record.call_id)
        if orphaned is None:
            self._ledger.settle(record)
        else:
            self._ledger.correct(record, orphaned, earlier.periods)
        resets = self._resets.get(key, 0) if key is not None else 0
        if key is not None:
            self._add(key, record, orphaned if earlier.resets == resets else None)
        if record.is_provisional:
            charge = OrphanCharge(resets, self._ledger.periods(record.accounts))
            self._calls.note_orphan_charge(record.call_id, charge)

    def _add(self, key: SessionKey, record: CallRecord, orphaned: CallRecord | None) -> None:
        """Add a call to its session's totals. `orphaned`: its record that these totals contain, or None."""
        wrong = orphaned.charge if orphaned is not None else None
        view = self._sessions.get(key)
        totals, tools = (view.totals, view.tools) if view else (Totals(), ToolUse())
        if orphaned is not None and wrong is not None:
            totals = totals.without(wrong, orphaned.saved_tokens)
        if record.charge is not None:
            totals = stopped(totals.add(record.charge, record.saved_tokens))
        tools = tools.with_calls(record.counted_tools)
        ended = record.started_at + record.duration_s
        view = SessionView(
            key,
            view.created_at if view else record.started_at,
            max(ended, view.last_call_at if view else 0.0),
            totals,
            view.derived if view else record.derived_session,
            tools,
        )
        self._show(view)
        self._agents.add(key, record, orphaned)
        last_turn, kept = self._left.get(key, _NOTHING_LEFT)
        self._left[key] = record.last_turn or last_turn, (record.counted_kept + kept)[:MAX_KEPT]

    def _show(self, view: SessionView) -> None:
        """Update a session in the lists."""
        self._sessions[view.key] = view
        for ordered in self._sorted.values():
            ordered.change(view.key)

    async def reserve(self, opened: OpenHold, lease_s: float) -> Granted | Refused:
        """See `Store.reserve`."""
        return self._ledger.reserve(opened, lease_s, is_settled=opened.hold.id in self._calls)

    async def extend(self, hold_id: str, units: int) -> Granted | None:
        """See `Store.extend`."""
        return self._ledger.extend(hold_id, units)

    async def renew(self, noted: Mapping[str, int]) -> frozenset[str]:
        """See `Store.renew`."""
        return self._ledger.renew(noted)

    async def overdue_holds(self, limit: int) -> Sequence[OpenHold]:
        """See `Store.overdue_holds`."""
        return self._ledger.overdue(limit)

    async def balances(self, claims: Sequence[Claim]) -> tuple[Balance, ...]:
        """See `Store.balances`."""
        return self._ledger.balances(claims)

    async def open_call(
        self, session: SessionKey, claims: Sequence[Claim], *, with_totals: bool, above: Sequence[SessionKey] = ()
    ) -> CallStart:
        """See `Store.open_call`."""
        totals = self._totals(session) if with_totals else None
        parents = tuple([self._parents.get(key) for key in above])
        return CallStart(await self.remembered(session), self._ledger.balances(claims), totals, parents)

    async def override_limits(self, account: AccountKey, limits: Mapping[Dimension, int | None] | None) -> None:
        """See `Store.override_limits`."""
        self._ledger.decide(account, limits)

    async def missing_results(self, session: SessionKey, handles: Sequence[str]) -> Sequence[str]:
        """See `Store.missing_results`."""
        kept = self._results.get(session, _Results())
        return [handle for handle in handles if handle not in kept.texts]

    async def results_size(self, session: SessionKey) -> int:
        """See `Store.results_size`."""
        return self._results.get(session, _Results()).size

    async def keep_results(self, session: SessionKey, texts: Mapping[str, str], most: int) -> Sequence[str]:
        """See `Store.keep_results`."""
        kept = self._results.setdefault(session, _Results())
        kept.changed_at = self._now()
        for handle, text in texts.items():
            size = len(text.encode("utf-8", "surrogatepass"))
            if handle not in kept.texts and kept.size + size <= most:
                kept.texts[handle] = text
                kept.size += size
        return [handle for handle in texts if handle not in kept.texts]

    async def results(self, session: SessionKey, handles: Sequence[str]) -> Mapping[str, str]:
        """See `Store.results`."""
        texts = self._results.get(session, _Results()).texts
        return {handle: texts[handle] for handle in handles if handle in texts}

    async def result(self, namespace: str | None, handle: str) -> str | None:
        """See `Store.result`."""
        for session, kept in self._results.items():
            if namespace in (None, session.namespace) and handle in kept.texts:
                return kept.texts[handle]
        return None

    async def keys(self) -> Sequence[StoredKey]:
        """See `Store.keys`."""
        return [self._keys[name] for name in sorted(self._keys)]

    async def add_key(self, key: StoredKey) -> bool:
        """See `Store.add_key`."""
        return self._keys.setdefault(key.name, key) is key

    async def change_key(self, name: str, change: KeyChange) -> StoredKey | None:
        """See `Store.change_key`."""
        if name in self._keys:
            self._keys[name] = change(self._keys[name])
        return self._keys.get(name)

    async def revoke_key(self, name: str) -> bool:
        """See `Store.revoke_key`."""
        return self._keys.pop(name, None) is not None

    async def totals(self, session: SessionKey) -> Totals:
        """See `Store.totals`."""
        return self._totals(session)

    def _totals(self, session: SessionKey) -> Totals:
        view = self._sessions.get(session)
        return view.totals if view else Totals()

    async def session(self, session: SessionKey) -> SessionView | None:
        """See `Store.session`."""
        return self._sessions.get(session)

    async def agents(self, session: SessionKey) -> Sequence[AgentUse]:
        """See `Store.agents`."""
        return self._agents.of(session)

    async def remembered(self, session: SessionKey) -> Remembered:
        """See `Store.remembered`."""
        return Remembered(self._state(session), *self._left.get(session, _NOTHING_LEFT))

    async def update(self, session: SessionKey, change: Change) -> SessionState:
        """See `Store.update`."""
        state = change(self._state(session))
        self._keep_state(session, state)
        return state

    def _state(self, session: SessionKey) -> SessionState:
        return self._states.get(session) or SessionState(parent=self._parents.get(session))

    def _keep_state(self, session: SessionKey, state: SessionState) -> None:
        self._states.put(session, state, self._now())
        self._parents.pop(session, None)
        if state.parent is not None:
            self._parents[session] = state.parent

    async def learned(self, key: str) -> bytes | None:
        """See `Store.learned`."""
        return self._lessons.get(key)

    async def learn(self, lessons: Mapping[str, Lesson]) -> Mapping[str, bytes]:
        """See `Store.learn`."""
        known = {key: lesson(self._lessons.get(key)) for key, lesson in lessons.items()}
        for key, value in known.items():
            self._lessons.put(key, value, self._now())
        return known

    async def sessions(
        self, namespace: str | None, limit: int, cursor: str | None, sort: Sort, *, part: str = ""
    ) -> Page:
        """See `Store.sessions`."""
        places = self._sorted[sort].places(self._sessions)
        end = bisect_left(places, Cursor.parse(cursor)) if cursor else len(places)
        after = islice(reversed(places), len(places) - end, None)
        visible = (place for place in after if namespace is None or place.namespace == namespace)
        chosen, more = page_of(visible, Names(namespace, part), limit)
        return Page([replace(self._sessions[place.key], tools=ToolUse()) for place in chosen], more)

    async def session_counts(self, namespaces: Sequence[str]) -> Sequence[int]:
        """See `Store.session_counts`."""
        counts = Counter(key.namespace for key in self._sessions)
        return [counts[namespace] for namespace in namespaces]

    async def newest_calls(self, namespace: str | None, limit: int) -> Sequence[CallRecord]:
        """See `Store.newest_calls`."""
        return self._calls.newest(namespace, limit)

    async def calls(self, session: SessionKey, limit: int, before: str | None = None) -> Sequence[CallRecord]:
        """See `Store.calls`."""
        return self._calls.of_session(session, limit, before)

    async def call(self, namespace: str | None, request_id: str) -> CallRecord | None:
        """See `Store.call`."""
        return self._calls.find(namespace, request_id)

    async def call_of_response(self, namespace: str, answer: str) -> CallRecord | None:
        """See `Store.call_of_response`."""
        return self._calls.of_response(namespace, answer)

    async def each_call(self, since: float) -> AsyncIterator[CallRecord]:
        """See `Store.each_call`."""
        for record in self._calls.since(first_id_at(since)):
            yield record

    async def settled_after(self, after: int | None, limit: int) -> LatestCalls:
        """See `Store.settled_after`."""
        return self._latest.after(after, limit, self._calls.shown)

    async def usage(self, query: UsageQuery) -> Sequence[UsageRow]:
        """See `Store.usage`."""
        return self._calls.rollups.read(query)

    async def reset(self, session: SessionKey) -> bool:
        """See `Store.reset`."""
        for account in (session.account, *self._ledger.of_agents(session.account)):
            self._ledger.clear(account)
        self._agents.drop(session)
        view = self._sessions.get(session)
        if view is None:
            return False
        self._show(SessionView(view.key, view.created_at, view.last_call_at, Totals(), view.derived))
        self._resets[session] = self._resets.get(session, 0) + 1
        return True

    async def delete(self, session: SessionKey) -> bool:
        """See `Store.delete`."""
        self._states.drop(session)
        self._parents.pop(session, None)
        for account in (session.account, *self._ledger.of_agents(session.account)):
            self._ledger.forget(account)
        self._calls.delete(session)
        return self._forget(session)

    def _forget(self, session: SessionKey) -> bool:
        existed = self._sessions.pop(session, None) is not None
        for ordered in self._sorted.values():
            ordered.change(session)
        self._left.pop(session, None)
        self._resets.pop(session, None)
        self._results.pop(session, None)
        self._agents.drop(session)
        self._calls.forget(session)
        return existed

    async def expire(self, before: float) -> int:
        """See `Store.expire`."""
        old = [key for key, view in self._sessions.items() if view.last_call_at < before]
        for key in old:
            self._forget(key)
        self._calls.expire(before, self._now())
        self._audit.expire(self._now())
        for key in self._states.changed_before(before):
            if key not in self._sessions:
                self._states.drop(key)
        for account in self._ledger.changed_before(before):
            # The account of a client key stays: it must not start from zero because the key was unused for a while.
            of_session = SessionKey(account.namespace, account.session_id)
            if account.kind in ("session", "agent") and of_session not in self._sessions:
                self._ledger.expire(account)
        self._expire_parents()
        for key in [key for key, kept in self._results.items() if kept.changed_at < before]:
            if key not in self._sessions:
                del self._results[key]
        for lesson in self._lessons.changed_before(before):
            self._lessons.drop(lesson)
        return len(old)

    def _expire_parents(self) -> None:
        for key in [*self._parents]:
            if not (key in self._sessions or key in self._states or key.account in self._ledger):
                del self._parents[key]

    async def record_change(self, entry: AuditEntry) -> None:
        """See `Store.record_change`."""
        self._audit.add(entry)

    async def changes(self, limit: int, cursor: str | None = None, target: str = "") -> AuditPage:
        """See `Store.changes`."""
        return self._audit.page(limit, cursor, target)

    async def ping(self) -> None:
        """See `Store.ping`."""

    async def aclose(self) -> None:
        """See `Store.aclose`."""


if TYPE_CHECKING:
    _: Store = MemoryStore()
