"""Keep the audit log in memory."""

from __future__ import annotations

from collections import deque
from itertools import islice

from gateway.core.audit import MOST_CHANGES, AuditEntry, AuditPage
from gateway.core.retention import Retention
from gateway.stores.audit_entries import encoded, number_of, page_of_rows


class MemoryAuditLog:
    """The newest `MOST_CHANGES` entries, each with its number."""

    def __init__(self, retention: Retention) -> None:
        self._kept_s = retention.changes_s
        #: number, time, target, and the encoded entry
        self._entries = deque[tuple[int, float, str, bytes]](maxlen=MOST_CHANGES)
        self._number = 0

    def add(self, entry: AuditEntry) -> None:
        """Add an entry."""
        self._number += 1
        self._entries.append((self._number, entry.at, entry.target, encoded(entry)))

    def page(self, limit: int, cursor: str | None, target: str) -> AuditPage:
        """See `AuditLog.changes`."""
        before = number_of(cursor)
        found = (
            (str(number), value)
            for number, _, name, value in reversed(self._entries)
            if (before is None or number < before) and target in name
        )
        return page_of_rows([*islice(found, limit + 1)], limit)

    def expire(self, now: float) -> None:
        """Drop old entries. `now`: Unix time in seconds."""
        while self._entries and self._entries[0][1] < now - self._kept_s:
            self._entries.popleft()
