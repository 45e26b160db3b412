"""Format times for programs."""

from __future__ import annotations

from datetime import UTC, datetime


def time_text(seconds: float) -> str:
    """Seconds since the epoch in UTC, to the millisecond: `2026-01-31T12:00:00.000Z`."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
