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
    """Sessions in one order. Changed sessions are collected, and sorted when the list is read."""

    def __init__(self, sort: Sort) -> None:
        self._sort = sort
        #: the smallest first
        self._places: list[Cursor] = []
        self._changed: set[SessionKey] = set()

    def change(self, key: SessionKey) -> None:
        """Note that a session was changed or deleted."""
        self._changed.add(key)

    def places(self, sessions: Mapping[SessionKey, SessionView]) -> list[Cursor]:
        """Return the places of these sessions, the smallest first. The list is valid until the next change."""
        if self._changed:
            changed = {(key.namespace, key.id) for key in self._changed}
            # The list is sorted except for its end, so sorting takes about one comparison per place.
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
        #: ids of deleted calls that are still in the list
        self._deleted: set[str] = set()

    def add(self, record: CallRecord) -> None:
        """Add a call, or replace its record. Calls are settled almost in this order, so most are added at the end."""
        place = bisect_left(self._calls, record.call_id, key=_by_id)
        if place < len(self._calls) and self._calls[place].call_id == record.call_id:
            self._calls[place] = record
        else:
            self._calls.insert(place, record)
        self._deleted.discard(record.call_id)

    def forget(self, call_ids: Iterable[str]) -> None:
        """Delete calls. The list is rebuilt when half of its calls are deleted, so that one deletion costs little."""
        self._deleted.update(call_ids)
        if 2 * len(self._deleted) > len(self._calls):
            self._calls = [*self._kept(self._calls)]
            self._deleted.clear()

    def newest(self) -> Iterator[CallRecord]:
        """Return the calls, the newest first."""
        return self._kept(reversed(self._calls))

    def _kept(self, calls: Iterable[CallRecord]) -> Iterator[CallRecord]:
        return (record for record in calls if record.call_id not in self._deleted)


def merged(lists: Iterable[CallsInOrder]) -> Iterator[CallRecord]:
    """Return the calls of several namespaces, the newest first."""
    return merge(*(one.newest() for one in lists), key=_by_id, reverse=True)


def _by_id(record: CallRecord) -> str:
    return record.call_id
