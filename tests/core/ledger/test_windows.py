"""Windows of the calendar: each moment belongs to one window, whatever the clocks do."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.ledger.arithmetic import EMPTY, Amount, Claim, Limits, Moment, balance_of, reserve
from gateway.core.ledger.windows import CALENDAR_UNITS, CalendarWindow, time_zone, window_text
from tests.core.ledger.test_arithmetic import KEY, hold


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("unit", "zone", "moment", "begin", "end"),
    [
        ("day", "UTC", "2026-11-28T12:00", "2026-11-28T00:00", "2026-11-29T00:00"),
        ("day", "UTC", "2026-11-28T00:00", "2026-11-28T00:00", "2026-11-29T00:00"),
        ("week", "UTC", "2026-11-29T23:59", "2026-11-23T00:00", "2026-11-30T00:00"),
        ("week", "UTC", "2026-11-30T00:00", "2026-11-30T00:00", "2026-12-07T00:00"),
        ("month", "UTC", "2026-12-31T23:59", "2026-12-01T00:00", "2027-01-01T00:00"),
        ("month", "UTC", "2028-02-29T01:00", "2028-02-01T00:00", "2028-03-01T00:00"),
        ("day", "Europe/Berlin", "2026-11-28T23:30", "2026-11-28T23:00", "2026-11-29T23:00"),
        # 23 hours, and 25 hours
        ("day", "Europe/Berlin", "2026-03-29T12:00", "2026-03-28T23:00", "2026-03-29T22:00"),
        ("day", "Europe/Berlin", "2026-10-25T12:00", "2026-10-24T22:00", "2026-10-25T23:00"),
        ("month", "America/New_York", "2026-03-20T00:00", "2026-03-01T05:00", "2026-04-01T04:00"),
        # the clocks skip midnight (Cairo), or show it twice (Havana), or a whole day is missing (Samoa)
        ("day", "Africa/Cairo", "2026-04-24T12:00", "2026-04-23T22:00", "2026-04-24T21:00"),
        ("day", "America/Havana", "2026-11-01T12:00", "2026-11-01T04:00", "2026-11-02T05:00"),
        ("day", "Pacific/Apia", "2011-12-30T09:00", "2011-12-29T10:00", "2011-12-30T10:00"),
        ("day", "Asia/Nowhere", "2026-11-28T12:00", "2026-11-28T00:00", "2026-11-29T00:00"),
    ],
)
def test_window_begins_at_midnight_on_monday_and_on_the_first(  # a table
    unit: str, zone: str, moment: str, begin: str, end: str
) -> None:
    window = CalendarWindow(unit, zone)  # type: ignore[arg-type]
    assert window.bounds(at(moment)) == (at(begin), at(end))


@given(
    st.sampled_from(CALENDAR_UNITS),
    st.sampled_from(["UTC", "Europe/Berlin", "Africa/Cairo", "America/Havana", "Asia/Kathmandu", "America/Asuncion"]),
    st.floats(at("2000-01-01"), at("2037-01-01")),
)
def test_windows_follow_each_other_without_gaps(unit: str, zone: str, moment: float) -> None:
    window = CalendarWindow(unit, zone)  # type: ignore[arg-type]
    begin, end = window.bounds(moment)
    assert begin <= moment < end
    assert window.bounds(begin)[0] == begin
    assert window.bounds(end)[0] == end
    assert window.bounds(end - 1)[0] == begin


def test_usage_restarts_at_midnight_and_not_a_day_after_the_first_call() -> None:
    claim = Claim(KEY, Limits(10, window=CalendarWindow("day")))
    evening = Moment(at("2026-11-28T23:59"), 50.0)
    outcome = reserve({}, hold(claim, fixed=Amount(3)), evening)
    assert isinstance(outcome, tuple)
    account = outcome[1][KEY]
    assert balance_of(account, claim, evening).resets_s == 60
    assert balance_of(account, claim, Moment(evening.wall + 59, 109.0)).held == Amount(3)
    used = type(EMPTY)(Amount(4), Amount(), account.opened)
    assert balance_of(used, claim, Moment(evening.wall + 59, 109.0)).used == Amount(4)
    morning = balance_of(used, claim, Moment(evening.wall + 60, 110.0))
    assert (morning.used, morning.resets_s) == (Amount(), timedelta(days=1).total_seconds())


@pytest.mark.parametrize(
    ("window", "text"),
    [(None, None), (90.0, "90s"), (3600.0, "1h"), (172_800, "2d"), (5_400, "90m"), (CalendarWindow("week"), "week")],
)
def test_window_is_written_as_in_the_configuration(window: float | None, text: str | None) -> None:
    assert window_text(window) == text


@pytest.mark.parametrize("name", ["Europe/Atlantis", "", "../etc/passwd", "/etc/passwd", "Europe", "a\0b"])
def test_unknown_time_zone_is_an_error(name: str) -> None:
    with pytest.raises(ValueError, match="is not a time zone known on this machine"):
        time_zone(name)
