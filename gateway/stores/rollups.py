"""Compute what a call adds to the roll-ups of usage, and keep them in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from gateway.core.record import CallRecord
from gateway.core.retention import Retention
from gateway.core.rollup import (
    COUNTS,
    KEY,
    Period,
    RowName,
    UsageQuery,
    UsageRow,
    call_counts,
    labels_of,
    number_of,
    row_names,
)
from gateway.stores.sums import MAX_SUM, SUMS, sums_of

#: the numbers of a row that are sums of a session as well, by their places there
_FROM_SUMS: Final = tuple(
    SUMS.index(name)
    for name in (
        "unpriced_calls", "input_tokens", "cache_read_tokens", "output_tokens", "total_tokens", "cost_pico_usd"
    )
)  # fmt: skip
_CHARGED: Final = SUMS.index("calls")


def added_by(record: CallRecord) -> tuple[int, ...]:
    """Return what a call adds to each number of a row, see `COUNTS`. The sums are those of its session."""
    sums = sums_of(record.charge, record.saved_tokens)
    calls, refused, failed = call_counts(record)
    return (calls, sums[_CHARGED], refused, failed, *[sums[place] for place in _FROM_SUMS])


class Rollups:
    """The roll-ups of a `MemoryStore`. It is also used to fill those of an older SQLite file from its call records."""

    def __init__(self) -> None:
        self._rows: dict[tuple[Period, int], dict[str, list[int]]] = {}

    def add(self, record: CallRecord, replaced: CallRecord | None = None) -> None:
        """Add a call. `replaced`: its earlier record that was added before; it is taken back."""
        if replaced is not None:
            self._add(replaced, -1)
        self._add(record, 1)

    def _add(self, record: CallRecord, sign: int) -> None:
        day, hour = (number_of(period, record.started_at) for period in ("day", "hour"))
        text = self._chosen(day, row_names(record), may_create=sign > 0)
        if text is None:
            return
        places: tuple[tuple[Period, int], ...] = (("day", day), ("hour", hour))
        for place in places:
            row = self._rows.setdefault(place, {}).setdefault(text, [0] * len(COUNTS))
            for number, count in enumerate(added_by(record)):
                row[number] = max(0, min(row[number] + sign * count, MAX_SUM))

    def _chosen(self, day: int, names: Sequence[RowName], *, may_create: bool) -> str | None:
        """Return the labels of the first row that exists or may be created."""
        rows = self._rows.get(("day", day), {})
        for text, most in names:
            if text in rows or len(rows) < most:
                return text if text in rows or may_create else None
        return None

    def rows(self) -> Iterator[tuple[Period, UsageRow]]:
        """Yield all rows."""
        for (period, number), rows in self._rows.items():
            yield from ((period, UsageRow(number, text, counts)) for text, counts in rows.items())

    def read(self, query: UsageQuery) -> list[UsageRow]:
        """Return the rows of a query, in the order of time."""
        asked = ((number, self._rows.get((query.period, number), {})) for number in range(query.first, query.last + 1))
        found = (UsageRow(number, text, tuple(counts)) for number, rows in asked for text, counts in rows.items())
        return [row for row in found if is_of_key(row.labels, query.key)]

    def expire(self, retention: Retention, now: float) -> None:
        """Drop hours and days that are older than they are kept."""
        oldest = oldest_kept(retention, now)
        for period, number in [*self._rows]:
            if number < oldest[period]:
                del self._rows[period, number]


def is_of_key(labels: str, key: str | None) -> bool:
    """Return whether a row belongs to a client key; every row belongs to None."""
    return key is None or labels_of(labels).get(KEY, "") == key


def oldest_kept(retention: Retention, now: float) -> dict[Period, int]:
    """Return the first hour and the first day that are kept."""
    return {period: number_of(period, now - kept_s) for period, kept_s in retention.usage_s.items()}
