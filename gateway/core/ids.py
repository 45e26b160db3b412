"""Make call ids that sort by time."""

from __future__ import annotations

from typing import Final

_TIME_DIGITS: Final = 12


def call_id(milliseconds: int, noise: bytes) -> str:
    """Return an id made of a Unix time in milliseconds and at least 8 random bytes."""
    return f"{milliseconds:0{_TIME_DIGITS}x}{noise.hex()}"


def first_id_at(seconds: float) -> str:
    """Return a text that sorts before all ids made at or after this Unix time (seconds), and after all earlier ones."""
    return f"{max(0, int(seconds * 1000)):0{_TIME_DIGITS}x}"
