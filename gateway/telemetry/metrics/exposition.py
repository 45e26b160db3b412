"""The text that Prometheus reads (exposition format 0.0.4)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gateway.telemetry.metrics.families import FAMILIES
from gateway.telemetry.metrics.slots import Name

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
#: it only grows while its process lives, and begins anew with it
_TYPES: Final = {"process_cpu_seconds_total": "counter"}


def written(numbers: Mapping[Name, float]) -> str:
    """All metrics that have a number, each with what it says."""
    by_family: dict[str, list[str]] = {name: [] for name in FAMILIES}
    for name, value in numbers.items():
        # A file that an older version of a worker has left may hold others.
        if name.family in by_family:
            by_family[name.family].append(f"{name.series} {_number(value)}\n")
    return "".join(_head(name) + "".join(lines) for name, lines in by_family.items() if lines)


def _head(name: str) -> str:
    family = FAMILIES[name]
    return f"# HELP {name} {family.help}\n# TYPE {name} {_TYPES.get(name, family.kind)}\n"


def _number(value: float) -> str:
    return str(int(value)) if value.is_integer() else repr(value)
