"""Keep the call records of a `MemoryStore`: by id, by response, by session and in order."""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import field
from itertools import islice
from typing import Final

from gateway.core.ids import first_id_at
from gateway.core.ledger.arithmetic import Periods
from gateway.core.ledger.session_key import SessionKey
from gateway.core.record import CallRecord
from gateway.core.retention import Retention
from gateway.core.values import dataclass
from gateway.stores.memory.lists import CallsInOrder, merged
from gateway.stores.rollups import Rollups

#: Records kept per session, and call ids kept for all sessions. Totals do not change when a record is dropped.
CALLS_PER_SESSION: Final = 1000
CALLS_IN_ALL: Final = 100_000
#: the number of resets of a deleted session: no existing session has it
_DELETED: Final = -1


@dataclass(frozen=True, slots=True)
class OrphanCharge:
    """When an orphaned call was charged: the resets of its session, and the budget periods of its accounts, by then."""

    resets: int = 0
    periods: Periods = field(default_factory=dict)


class MemoryCalls:
    """The records of the calls that were settled last, and the usage of all calls by hour and day."""

    def __init__(self, retention: Retention) -> None:
        self.rollups = Rollups()
        self._retention = retention
        self._per_session = retention.calls_per_session or CALLS_PER_SESSION
        self._by_session: dict[SessionKey, deque[CallRecord]] = {}
        #: the calls of all sessions of each namespace
        self._in_order: defaultdict[str, CallsInOrder] = defaultdict(CallsInOrder)
        #: not a BoundedDict: dropping a call also drops what is kept about it in other tables, see `_drop`
        self._by_id: dict[str, CallRecord] = {}
        #: call ids by namespace and response id; of several calls with the same response id, the newest
        self._by_response: dict[tuple[str, str], str] = {}
        #: ids of calls that were deleted with their sessions: they are not shown, and not charged again
        self._deleted: set[str] = set()
        self._orphan_charges: dict[str, OrphanCharge] = {}

    def __contains__(self, call_id: str) -> bool:
        return call_id in self._by_id

    def get(self, call_id: str) -> CallRecord | None:
        """Return the record of a settled call, also if its session was deleted; None if it is unknown."""
        return self._by_id.get(call_id)

    def shown(self, call_id: str) -> CallRecord | None:
        """Return the record of a call; None if it is unknown or was deleted with its session."""
        return self._by_id.get(call_id) if call_id not in self._deleted else None

    def add(self, record: CallRecord) -> None:
        """Keep a record. It replaces an earlier record of the same call."""
        known = self._by_id.get(record.call_id)
        is_new = known is None
        self.rollups.add(record, known)
        self._deleted.discard(record.call_id)
        self._by_id[record.call_id] = record
        if len(self._by_id) > CALLS_IN_ALL:
            self._drop(next(iter(self._by_id)))
        if record.session is None:
            return
        if record.answer is not None:
            key = record.session.namespace, record.answer
            self._by_response[key] = max(record.call_id, self._by_response.get(key, ""))
        calls = self._by_session.setdefault(record.session, deque(maxlen=self._per_session))
        in_order = self._in_order[record.session.namespace]
        if is_new and len(calls) == self._per_session:
            in_order.forget([calls[0].call_id])
        in_order.add(record)
        if not is_new:
            calls = self._by_session[record.session] = deque(
                (call for call in calls if call.call_id != record.call_id), self._per_session
            )
        calls.append(record)

    def _drop(self, call_id: str) -> None:
        record = self._by_id.pop(call_id, None)
        if record is not None and record.session is not None and record.answer is not None:
            key = record.session.namespace, record.answer
            if self._by_response.get(key) == call_id:
                del self._by_response[key]
        self._deleted.discard(call_id)
        self._orphan_charges.pop(call_id, None)

    def note_orphan_charge(self, call_id: str, charge: OrphanCharge) -> None:
        """Keep when an orphaned call was charged, until `take_orphan_charge`."""
        self._orphan_charges[call_id] = charge

    def take_orphan_charge(self, call_id: str) -> OrphanCharge:
        """Return when a call was charged as orphaned, and forget it."""
        return self._orphan_charges.pop(call_id, OrphanCharge())

    def newest(self, namespace: str | None, limit: int) -> list[CallRecord]:
        """Return the newest records, see `Calls.newest_calls`."""
        lists = [one for name, one in self._in_order.items() if namespace in (None, name)]
        return list(islice(merged(lists), limit))

    def since(self, first_id: str) -> list[CallRecord]:
        """Return the records whose ids do not sort before this one, oldest first."""
        found = [one for name, one in self._by_id.items() if name >= first_id and name not in self._deleted]
        return sorted(found, key=lambda record: record.call_id)

    def of_session(self, session: SessionKey, limit: int, before: str | None) -> list[CallRecord]:
        """Return the newest records of a session, see `Calls.calls`."""
        records = [one for one in self._by_session.get(session, ()) if before is None or one.call_id < before]
        return heapq.nlargest(limit, records, key=lambda record: record.call_id)

    def find(self, namespace: str | None, request_id: str) -> CallRecord | None:
        """Return the newest record with this request id or call id, see `Calls.call`."""

        def visible(record: CallRecord) -> bool:
            is_own = namespace is None or (record.session is not None and record.session.namespace == namespace)
            return is_own and record.call_id not in self._deleted

        own = self._by_id.get(request_id)
        if own is not None and visible(own):
            return own
        named = (record for record in self._by_id.values() if record.request_id == request_id and visible(record))
        return max(named, key=lambda record: record.call_id, default=None)

    def of_response(self, namespace: str, answer: str) -> CallRecord | None:
        """Return the newest call with this response, see `Calls.call_of_response`."""
        return self.shown(self._by_response.get((namespace, answer), ""))

    def delete(self, session: SessionKey) -> None:
        """Hide the calls of a deleted session. They are not charged again."""
        for record in self._unlist(session):
            self._deleted.add(record.call_id)
            charge = self._orphan_charges.get(record.call_id)
            if charge is not None:
                self._orphan_charges[record.call_id] = OrphanCharge(_DELETED, charge.periods)

    def forget(self, session: SessionKey) -> None:
        """Drop the calls of a session that are not hidden."""
        for record in self._unlist(session):
            self._drop(record.call_id)

    def _unlist(self, session: SessionKey) -> Sequence[CallRecord]:
        """Remove the calls of a session from all lists, and return them."""
        listed = self._by_session.pop(session, ())
        self._in_order[session.namespace].forget(call.call_id for call in listed)
        # Only a full list may be incomplete. Searching the calls of all sessions each time takes too long.
        is_all = len(listed) < self._per_session
        return [*listed] if is_all else [call for call in self._by_id.values() if call.session == session]

    def expire(self, sessions_before: float, now: float) -> None:
        """Drop old calls and old usage. `sessions_before`: the Unix time before which sessions are dropped."""
        oldest_kept = first_id_at(self._retention.calls_before(sessions_before, now))
        self.rollups.expire(self._retention, now)
        for call_id in [call_id for call_id in self._by_id if call_id < oldest_kept]:
            self._drop(call_id)
        for key, calls in list(self._by_session.items()):
            kept = deque((call for call in calls if call.call_id >= oldest_kept), maxlen=self._per_session)
            self._in_order[key.namespace].forget(call.call_id for call in calls if call.call_id < oldest_kept)
            if kept:
                self._by_session[key] = kept
            else:
                del self._by_session[key]
