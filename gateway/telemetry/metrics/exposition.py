"""Write the text format of Prometheus (0.0.4)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from gateway.telemetry.metrics.families import FAMILIES
from gateway.telemetry.metrics.slots import Name

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
#: shown as another kind than it is kept as: it only grows, and is gone with its process
_TYPES: Final = {"process_cpu_seconds_total": "counter"}


def written(numbers: Mapping[Name, float]) -> str:
    """All metrics that have a number, each with what it says."""
    by_family: dict[str, list[tuple[str, float]]] = {name: [] for name in FAMILIES}
    for name, value in numbers.items():
        # A file that an older version of a worker has left may hold others.
        if name.family in by_family:
            by_family[name.family].append((name.series, value))
    return "".join(_head(name) + "".join(_lines(name, found)) for name, found in by_family.items() if found)


def _lines(family: str, numbers: Iterable[tuple[str, float]]) -> Iterator[str]:
    shown = _added_up(family, numbers) if FAMILIES[family].kind == "histogram" else numbers
    return (f"{series} {_number(value)}\n" for series, value in shown)


def _added_up(family: str, numbers: Iterable[tuple[str, float]]) -> Iterator[tuple[str, float]]:
    """Of a histogram: each bound's count with those of all smaller ones, and the count of all, before their sum."""
    total = f"{family}_sum"
    within = 0.0
    for series, value in numbers:
        if series.startswith(total):
            yield f"{family}_count{series.removeprefix(total)}", within
            yield series, value
            within = 0.0
        else:
            within += value
            yield series, within


def _head(name: str) -> str:
    family = FAMILIES[name]
    return f"# HELP {name} {family.help}\n# TYPE {name} {_TYPES.get(name, family.kind)}\n"


def _number(value: float) -> str:
    return str(int(value)) if value.is_integer() else repr(value)
