"""Add up the usage of calls by hour and by day, by labels such as client key, model and tag.

Stores keep these roll-ups longer than sessions and call records. Hours and days are those of UTC. A call belongs to the
hour and the day in which it began.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Final, Literal, NamedTuple, get_args

from gateway.core.record import FAILED, REFUSED, CallRecord

#: The labels by which usage is added up. A new one needs no migration: each row keeps only the labels that it has.
#: Those of `row_names` come from the record itself (`agent` is the type of the agent), others from `CallRecord.labels`.
LABELS: Final = ("key", "group", "agent", "provider", "model", "tag")
KEY: Final = "key"
#: the numbers of a row, in their order; costs in picodollars
COUNTS: Final = (
    "calls", "charged_calls", "refused_calls", "failed_calls", "unpriced_calls", "input_tokens", "cache_read_tokens",
    "output_tokens", "total_tokens", "cost_pico_usd",
)  # fmt: skip
Period = Literal["hour", "day"]
PERIODS: Final[tuple[Period, ...]] = get_args(Period)
#: hours of a day
HOURS: Final = 24
PERIOD_S: Final[Mapping[Period, int]] = {"hour": 3600, "day": 86_400}
#: replaces the labels of calls beyond the limits
OTHER: Final = "(other)"
#: Rows of one day with all labels. Further calls are added up by client key only. An hour has at most as many.
MOST_ROWS: Final = 1_000
#: the same, with the rows by client key; further calls are added to one row
MOST_ROWS_WITH_KEYS: Final = 2_000
_NO_LIMIT: Final = 2**31 - 1
#: sets of labels to cache
_KNOWN: Final = 4_096


class RowName(NamedTuple):
    """The labels of a row as text. The row is created only while its day has less than `most` rows."""

    text: str
    most: int


class UsageRow(NamedTuple):
    """Usage of one hour or day with the same labels.

    `number`: the hour or day, counted from 1970. `labels`: as `text_of` wrote them. `counts`: see `COUNTS`.
    """

    number: int
    labels: str
    counts: Sequence[int]


class UsageQuery(NamedTuple):
    """The hours or days to read, from `first` to `last`, of one client key (None: of all)."""

    period: Period
    first: int
    last: int
    key: str | None = None


def number_of(period: Period, at: float) -> int:
    """Return the hour or day of a Unix time in seconds."""
    return int(at // PERIOD_S[period])


def row_names(record: CallRecord) -> tuple[RowName, ...]:
    """Return the rows to which a call may be added: to the first of its day that exists or may be created.

    The row of its hour has the same labels. Rows are never removed from a day, so the same call always leads to the
    same row.
    """
    key = record.session.namespace if record.session is not None else ""
    agent = record.agent.type or "" if record.agent is not None else ""
    own = {KEY: key, "agent": agent, "provider": record.provider, "model": record.model, **record.labels}
    return _names(tuple([own.get(name, "") for name in LABELS]))


@lru_cache(_KNOWN)
def _names(values: tuple[str, ...]) -> tuple[RowName, ...]:
    labels = dict(zip(LABELS, values, strict=True))
    by_key = {name: value if name == KEY else OTHER for name, value in labels.items() if value}
    others = {name: OTHER for name, value in labels.items() if value}
    return (
        RowName(text_of(labels), MOST_ROWS),
        RowName(text_of(by_key), MOST_ROWS_WITH_KEYS),
        RowName(text_of(others), _NO_LIMIT),
    )


def text_of(labels: Mapping[str, str]) -> str:
    """Return labels as JSON, in their order and without empty ones."""
    return json.dumps({name: labels[name] for name in LABELS if labels.get(name)}, separators=(",", ":"))


@lru_cache(_KNOWN)
def labels_of(text: str) -> Mapping[str, str]:
    """Return the labels of a row."""
    labels: dict[str, str] = json.loads(text)
    return labels


def call_counts(record: CallRecord) -> tuple[int, int, int]:
    """Return 1 for each of these that a call is: any call, refused, failed."""
    return 1, int(record.outcome == REFUSED), int(record.outcome in FAILED)


class UsageGroup(NamedTuple):
    """A line of a report: the start of its hour or day (Unix seconds; None: of the whole time), labels, numbers."""

    start: int | None
    labels: tuple[str, ...]
    counts: Sequence[int]


def grouped(rows: Iterable[UsageRow], by: Sequence[str], period: Period | None) -> list[UsageGroup]:
    """Add rows with the same values of the labels `by`. `period`: separately for each hour or day.

    The lines are in the order of time, and then of falling costs and tokens.
    """
    sums: dict[tuple[int, tuple[str, ...]], Sequence[int]] = {}
    chosen: dict[str, tuple[str, ...]] = {}
    for number, text, counts in rows:
        values = chosen.get(text)
        if values is None:
            labels = labels_of(text)
            values = chosen[text] = tuple([labels.get(name, "") for name in by])
        place = (number if period else 0, values)
        known = sums.get(place)
        sums[place] = counts if known is None else [one + more for one, more in zip(known, counts, strict=True)]
    length = PERIOD_S[period] if period else 0
    groups = [UsageGroup(at * length if period else None, values, counts) for (at, values), counts in sums.items()]
    return sorted(groups, key=lambda group: (group.start or 0, -group.counts[-1], -group.counts[-2], group.labels))
