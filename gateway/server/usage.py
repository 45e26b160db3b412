"""/api/usage: add up usage by hour, by day or over the whole time, as JSON, JSON lines or CSV."""

from __future__ import annotations

import asyncio
import csv
import io
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Final, NamedTuple, get_args

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as Path

from gateway.core.errors import InvalidRequest
from gateway.core.ports import UsageHistory
from gateway.core.rollup import COUNTS, LABELS, PERIOD_S, Period, UsageGroup, UsageQuery, grouped, labels_of, number_of
from gateway.core.times import time_text
from gateway.server.auth import Access
from gateway.server.handling import ServerRules, json_handler

#: most hours or days of a query, and lines of a report
MOST_PERIODS: Final = 1_000
MOST_LINES: Final = 50_000
TOTAL: Final = "total"
BUCKETS: Final = (*get_args(Period), TOTAL)
FORMATS: Final = ("json", "jsonl", "csv")
_DEFAULT_DAYS: Final = 30
_DAY_S: Final = PERIOD_S["day"]
_PICO: Final = 12
_COST: Final = COUNTS.index("cost_pico_usd")
#: A spreadsheet would run a cell that begins with one of these. Clients choose the names of models.
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")
_TYPES: Final[Mapping[str, str]] = {"jsonl": "application/x-ndjson", "csv": "text/csv; charset=utf-8"}


class UsageReport(NamedTuple):
    """What to read and how to add it up. `only`: values that labels must have."""

    query: UsageQuery
    by: tuple[str, ...]
    bucket: str
    only: Mapping[str, str]

    @property
    def bounds(self) -> tuple[int, int]:
        """Return the begin and the end in Unix seconds."""
        length = PERIOD_S[self.query.period]
        return self.query.first * length, (self.query.last + 1) * length


class UsageApi:
    """The handler of usage. `store`: where it is kept; `rules` returns the rules in force; `now`: Unix seconds."""

    def __init__(
        self, store: UsageHistory, rules: Callable[[], ServerRules], now: Callable[[], float] = time.time
    ) -> None:
        self._store = store
        self._rules = rules
        self._now = now

    def paths(self) -> list[Path]:
        """Return the routes."""
        return [Path("/api/usage", json_handler(self._rules, self.usage), methods=["GET"])]

    async def usage(self, request: Request, access: Access) -> Any:
        """GET /api/usage?group_by=key,model&from=&to=&bucket=hour|day|total&format=json|jsonl|csv&key=&model=…."""
        asked = request.query_params
        report = report_of(asked, access.namespace, self._now())
        form = _one_of("format", asked.get("format", FORMATS[0]), FORMATS)
        groups = await groups_of(self._store, report)
        if form == FORMATS[0]:
            return await asyncio.to_thread(lambda: _whole_json(report, groups))
        write = jsonl_text if form == "jsonl" else csv_text
        body = await asyncio.to_thread(lambda: "".join(write(report, groups)))
        return Response(body, media_type=_TYPES[form], headers={"cache-control": "no-store"})


async def groups_of(store: UsageHistory, report: UsageReport) -> list[UsageGroup]:
    """Return the lines of a report.

    Raises:
        InvalidRequest: it would have too many.
    """
    rows = await store.usage(report.query)
    period = report.query.period if report.bucket != TOTAL else None

    def add_up() -> list[UsageGroup]:
        chosen = rows
        if report.only:
            chosen = [row for row in rows if report.only.items() <= labels_of(row.labels).items()]
        return grouped(chosen, report.by, period)

    # Adding up tens of thousands of rows would block the event loop.
    groups = await asyncio.to_thread(add_up)
    if len(groups) > MOST_LINES:
        raise InvalidRequest(
            f"The report has {len(groups):,} lines, the limit is {MOST_LINES:,}. Use a longer bucket, a shorter "
            "time, or fewer labels in group_by."
        )
    return groups


def report_of(asked: Mapping[str, str], key: str | None, now: float) -> UsageReport:
    """Return the report that the parameters of a request ask for. `key`: the only client key it may see; None: all.

    Raises:
        InvalidRequest: a parameter is wrong.
    """
    bucket = _one_of("bucket", asked.get("bucket", "day"), BUCKETS)
    period: Period = "hour" if bucket == "hour" else "day"
    by = tuple([name.strip() for name in asked.get("group_by", "").split(",") if name.strip()])
    for name in by:
        _one_of("group_by", name, LABELS)
    end = time_of(asked, "to", now)
    start = time_of(asked, "from", max(0, end - (_DEFAULT_DAYS - 1) * _DAY_S))
    first, last = number_of(period, start), number_of(period, end)
    if first > last:
        raise InvalidRequest("from is later than to. Exchange them.", param="from")
    if last - first >= MOST_PERIODS:
        raise InvalidRequest(
            f"The time has {last - first + 1:,} {period}s, the limit is {MOST_PERIODS:,}. Choose a later from.",
            param="from",
        )
    only = {name: asked[name] for name in LABELS if name in asked}
    return UsageReport(UsageQuery(period, first, last, key), tuple(dict.fromkeys(by)), bucket, only)


def _one_of(name: str, value: str, known: Sequence[str]) -> str:
    if value not in known:
        raise InvalidRequest(f"{name} must be one of {', '.join(known)}, not {value[:50]!r}.", param=name)
    return value


def time_of(asked: Mapping[str, str], name: str, default: float) -> float:
    """Return a time in Unix seconds that a parameter names; `default` without the parameter.

    Raises:
        InvalidRequest: it is not a time.
    """
    text = asked.get(name)
    if text is None:
        return default
    try:
        # In a URL, the plus of an offset is often not escaped, and arrives as a space.
        moment = datetime.fromisoformat(text.strip().replace(" ", "+") if "T" in text else text.strip())
        found = (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        found = -1.0
    if found < 0:
        raise InvalidRequest(
            f"{name} must be a date or a time in UTC, such as 2026-11-28 or 2026-11-28T13:00:00Z, not {text[:50]!r}.",
            param=name,
        )
    return found


def cost_text(pico_usd: int) -> str:
    """Return picodollars as US dollars with six decimals."""
    return f"{Decimal(pico_usd).scaleb(-_PICO):.6f}"


def line_json(report: UsageReport, group: UsageGroup) -> dict[str, Any]:
    """Return a line of a report: its start, labels and numbers."""
    start = {"start": time_text(group.start)} if group.start is not None else {}
    labels = dict(zip(report.by, group.labels, strict=True))
    return {**start, **labels, **numbers_json(group.counts)}


def numbers_json(counts: Sequence[int]) -> dict[str, Any]:
    """Return the numbers of a line."""
    return {**dict(zip(COUNTS, counts, strict=True)), "cost_usd": cost_text(counts[_COST])}


def _whole_json(report: UsageReport, groups: Sequence[UsageGroup]) -> dict[str, Any]:
    start, end = report.bounds
    total = [sum(column) for column in zip(*(group.counts for group in groups), strict=True)] or [0] * len(COUNTS)
    return {
        "from": time_text(start),
        "to": time_text(end),
        "bucket": report.bucket,
        "group_by": list(report.by),
        "usage": [line_json(report, group) for group in groups],
        "total": numbers_json(total),
    }


def jsonl_text(report: UsageReport, groups: Sequence[UsageGroup]) -> Iterator[str]:
    """Yield a report as JSON lines."""
    for group in groups:
        yield msgspec.json.encode(line_json(report, group)).decode() + "\n"


def csv_text(report: UsageReport, groups: Sequence[UsageGroup]) -> Iterator[str]:
    """Yield a report as CSV, with a line of names."""
    start = ("start",) if report.bucket != TOTAL else ()
    yield csv_line((*start, *report.by, *COUNTS, "cost_usd"))
    for group in groups:
        yield csv_line(line_json(report, group).values())


def csv_line(values: Any) -> str:
    """Return a line of CSV. A text that a spreadsheet would run as a formula begins with an apostrophe."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerow([_cell(value) for value in values])
    return out.getvalue()


def _cell(value: object) -> object:
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value
