"""Keep the order of the newest settled calls in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice

from gateway.core.record import CallRecord
from gateway.core.stored import MOST_LATEST, LatestCalls, Settled
from gateway.core.usage import Totals


class MemoryLatest:
    """The ids of the last `MOST_LATEST` settled calls, each with the totals of its session after it."""

    def __init__(self) -> None:
        self._latest = deque[tuple[str, Totals | None]](maxlen=MOST_LATEST)
        #: number of all settled calls, which is the position of the last one
        self._settled = 0

    def add(self, call_id: str, totals: Totals | None) -> None:
        """Add a call that was settled."""
        self._latest.append((call_id, totals))
        self._settled += 1

    def after(self, after: int | None, limit: int, record_of: Callable[[str], CallRecord | None]) -> LatestCalls:
        """See `Store.settled_after`. `record_of`: returns the current record of a call."""
        if after is None:
            return LatestCalls((), self._settled)
        dropped = self._settled - len(self._latest)
        begin = max(after, dropped) - dropped
        entries = list(islice(self._latest, begin, begin + limit))
        shown = [(record_of(call_id), totals) for call_id, totals in entries]
        settled = [Settled(record, totals) for record, totals in shown if record is not None]
        return LatestCalls(settled, dropped + begin + len(entries), max(0, dropped - after))
