"""Format times for JSON."""

from __future__ import annotations

from datetime import UTC, datetime


def time_text(seconds: float) -> str:
    """Return a Unix time as ISO 8601 in UTC, with milliseconds: `2026-01-31T12:00:00.000Z`."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
