"""Define the clocks that parts of the gateway use, and format times for JSON."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import NamedTuple


class Clocks(NamedTuple):
    """Two clocks: `monotonic` returns seconds for durations, `wall` returns Unix time in seconds."""

    monotonic: Callable[[], float]
    wall: Callable[[], float]


def time_text(seconds: float) -> str:
    """Return a Unix time as ISO 8601 in UTC, with milliseconds: `2026-01-31T12:00:00.000Z`."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
