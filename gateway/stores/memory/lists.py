"""List sessions and calls of the store in memory."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from heapq import merge

from gateway.core.ledger.session_key import SessionKey
from gateway.core.record import CallRecord
from gateway.core.stored import SessionView, Sort
from gateway.stores.cursor import Cursor


class SortedSessions:
    """Sessions in one order. What has changed is only noted, and sorted in when the list is read."""

    def __init__(self, sort: Sort) -> None:
        self._sort = sort
        #: the smallest first
        self._places: list[Cursor] = []
        self._changed: set[SessionKey] = set()

    def change(self, key: SessionKey) -> None:
        """Note that a session was changed, or forgotten."""
        self._changed.add(key)

    def places(self, sessions: Mapping[SessionKey, SessionView]) -> list[Cursor]:
        """Return the places of these sessions, the smallest first. The list is valid until the next change."""
        if self._changed:
            changed = {(key.namespace, key.id) for key in self._changed}
            # Sorting what is sorted but for its end takes a comparison for each place.
            places = [place for place in self._places if place[1:] not in changed]
            places += sorted(Cursor.of(sessions[key], self._sort) for key in self._changed if key in sessions)
            places.sort()
            self._places = places
            self._changed.clear()
        return self._places


class CallsInOrder:
    """The calls of all sessions of one namespace, in the order of their ids."""

    def __init__(self) -> None:
        self._calls: list[CallRecord] = []
        #: ids of calls in that list which no session has any more
        self._gone: set[str] = set()

    def add(self, record: CallRecord) -> None:
        """Add a call, or replace its record. Calls are settled nearly in this order: most are added at the end."""
        place = bisect_left(self._calls, record.call_id, key=_by_id)
        if place < len(self._calls) and self._calls[place].call_id == record.call_id:
            self._calls[place] = record
        else:
            self._calls.insert(place, record)
        self._gone.discard(record.call_id)

    def forget(self, call_ids: Iterable[str]) -> None:
        """Forget calls. They are taken out of the list when half of it is gone, so that one call costs little."""
        self._gone.update(call_ids)
        if 2 * len(self._gone) > len(self._calls):
            self._calls = [*self._kept(self._calls)]
            self._gone.clear()

    def newest(self) -> Iterator[CallRecord]:
        """Return the calls, the newest first."""
        return self._kept(reversed(self._calls))

    def _kept(self, calls: Iterable[CallRecord]) -> Iterator[CallRecord]:
        return (record for record in calls if record.call_id not in self._gone)


def merged(lists: Iterable[CallsInOrder]) -> Iterator[CallRecord]:
    """Return the calls of several namespaces, the newest first."""
    return merge(*(one.newest() for one in lists), key=_by_id, reverse=True)


def _by_id(record: CallRecord) -> str:
    return record.call_id
