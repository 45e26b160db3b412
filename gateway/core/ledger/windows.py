"""Compute when the window of a budget begins and ends: after a number of seconds, or by days, weeks and months."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, tzinfo
from functools import lru_cache
from typing import Final, Literal, get_args

from gateway.core.values import dataclass

CalendarUnit = Literal["day", "week", "month"]
CALENDAR_UNITS: Final[tuple[CalendarUnit, ...]] = get_args(CalendarUnit)
#: the time zone that needs no database
UTC_NAME: Final = "UTC"
#: units of a duration, the largest first
_UNITS: Final = ((86_400, "d"), (3_600, "h"), (60, "m"))
#: windows whose bounds are cached
_CACHED: Final = 256


@lru_cache(_CACHED)
def time_zone(name: str) -> tzinfo:
    """Return a time zone by its name in the IANA database, such as `Europe/Berlin`.

    Raises:
        ValueError: this machine does not know it.
    """
    if name == UTC_NAME:
        return UTC
    from zoneinfo import ZoneInfo  # noqa: PLC0415  # few budgets need it, and it imports Python's build settings

    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):  # KeyError: `ZoneInfoNotFoundError`
        raise ValueError(
            "is not a time zone known on this machine; use UTC, or a name like Europe/Berlin (package tzdata)"
        ) from None


@dataclass(frozen=True, slots=True)
class CalendarWindow:
    """A window that begins at midnight, on Monday, or on the first of a month, in a time zone.

    `zone`: a name in the IANA database. A name that this machine does not know means UTC.
    """

    unit: CalendarUnit
    zone: str = UTC_NAME

    def bounds(self, at: float) -> tuple[float, float]:
        """Return when the window that contains this Unix time begins, and when the next one does, in Unix seconds.

        A day with a change of the clocks has 23 or 25 hours. A midnight that the clocks skip is the moment of the
        change, and of a midnight that comes twice the first one counts.
        """
        try:
            zone = time_zone(self.zone)
        except ValueError:
            zone = UTC
        return _bounds_of_date(self.unit, zone, datetime.fromtimestamp(at, zone).date())


@lru_cache(_CACHED)
def _bounds_of_date(unit: CalendarUnit, zone: tzinfo, today: date) -> tuple[float, float]:
    if unit == "month":
        first = today.replace(day=1)
        following = (first + timedelta(days=31)).replace(day=1)
    else:
        days = 7 if unit == "week" else 1
        first = today - timedelta(days=today.weekday() if unit == "week" else 0)
        following = first + timedelta(days=days)
    return _midnight(first, zone), _midnight(following, zone)


def _midnight(day: date, zone: tzinfo) -> float:
    return datetime(day.year, day.month, day.day, tzinfo=zone).timestamp()


#: seconds after which use restarts at zero, or days, weeks or months; None: never
Window = float | CalendarWindow | None


def window_text(window: Window) -> str | None:
    """Return a window as in the configuration, such as `1d` or `month`, or None."""
    if window is None or isinstance(window, CalendarWindow):
        return window.unit if window is not None else None
    seconds = round(window)
    size, unit = next(((size, unit) for size, unit in _UNITS if seconds % size == 0), (1, "s"))
    return f"{seconds // size}{unit}"
