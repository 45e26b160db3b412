from __future__ import annotations

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest

from gateway.core.expiry import date_or_time

BERLIN = ZoneInfo("Europe/Berlin")


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("2026-12-31", datetime(2026, 12, 31, tzinfo=UTC)),
        (" 2026-12-31T18:00:00Z ", datetime(2026, 12, 31, 18, tzinfo=UTC)),
        ("2026-12-31T18:00:00+02:00", datetime(2026, 12, 31, 16, tzinfo=UTC)),
        ("2026-12-31T18:00", datetime(2026, 12, 31, 18, tzinfo=UTC)),
    ],
)
def test_date_means_its_first_moment_and_time_without_zone_is_utc(text: str, meant: datetime) -> None:
    assert date_or_time(text) == meant.timestamp()


def test_date_is_in_the_given_time_zone() -> None:
    assert date_or_time("2026-07-01", BERLIN) == datetime(2026, 6, 30, 22, tzinfo=UTC).timestamp()
    assert date_or_time("2026-07-01T00:00Z", BERLIN) == datetime(2026, 7, 1, tzinfo=UTC).timestamp()


@pytest.mark.parametrize("text", ["", "30d", "soon", "2026-13-01", "0001-01-01", "9999-12-31", "2026-12-31 25:00"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be a date like"):
        date_or_time(text)
