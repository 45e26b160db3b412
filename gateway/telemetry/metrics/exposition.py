"""Render metrics in the Prometheus text format, version 0.0.4."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from gateway.telemetry.metrics.families import FAMILIES
from gateway.telemetry.metrics.slots import Series

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
#: Types that are shown differently from how they are stored. CPU time only grows, so it is shown as a counter. It is
#: stored as a gauge, because it must disappear with its process.
_SHOWN_TYPES: Final = {"process_cpu_seconds_total": "counter"}


def render(values: Mapping[Series, float]) -> str:
    """Return the text of all metrics that have at least one value, with help and type lines."""
    by_family: dict[str, list[tuple[str, float]]] = {name: [] for name in FAMILIES}
    for series, value in values.items():
        # A file that was left by a worker of an older version may contain other metrics.
        if series.family in by_family:
            by_family[series.family].append((series.text, value))
    return "".join(_header(name) + "".join(_lines(name, rows)) for name, rows in by_family.items() if rows)


def _lines(family: str, rows: Iterable[tuple[str, float]]) -> Iterator[str]:
    shown = _cumulative(family, rows) if FAMILIES[family].kind == "histogram" else rows
    return (f"{series} {_number(value)}\n" for series, value in shown)


def _cumulative(family: str, rows: Iterable[tuple[str, float]]) -> Iterator[tuple[str, float]]:
    """Yield the rows of a histogram with cumulative bucket counts, and the total count before each sum.

    Stored buckets count only the values between two bounds. The sum of a histogram follows its last bucket.
    """
    sum_name = f"{family}_sum"
    count = 0.0
    for series, value in rows:
        if series.startswith(sum_name):
            yield f"{family}_count{series.removeprefix(sum_name)}", count
            yield series, value
            count = 0.0
        else:
            count += value
            yield series, count


def _header(name: str) -> str:
    family = FAMILIES[name]
    return f"# HELP {name} {family.help}\n# TYPE {name} {_SHOWN_TYPES.get(name, family.kind)}\n"


def _number(value: float) -> str:
    return str(int(value)) if value.is_integer() else repr(value)
