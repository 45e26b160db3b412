"""Make ids of calls that sort by time."""

from __future__ import annotations

from typing import Final

_TIME_DIGITS: Final = 12


def call_id(milliseconds: int, noise: bytes) -> str:
    """An id from wall time in milliseconds and at least 8 random bytes."""
    return f"{milliseconds:0{_TIME_DIGITS}x}{noise.hex()}"


def first_id_at(seconds: float) -> str:
    """Sorts before every id made at or after this time (seconds since the epoch) and after all earlier ones."""
    return f"{max(0, int(seconds * 1000)):0{_TIME_DIGITS}x}"
