"""Read the date or time from which something is no longer accepted."""

from __future__ import annotations

from datetime import UTC, datetime, tzinfo
from typing import Final

#: the message about an invalid date
NO_DATE: Final = "must be a date like 2026-12-31, or a time like 2026-12-31T18:00:00Z"
#: the last year that is accepted, so that the time is a valid date in every time zone
_LAST_YEAR: Final = 9998


def date_or_time(text: str, zone: tzinfo = UTC) -> float:
    """Return the Unix time in seconds of a date or a time in ISO 8601. A date means its first moment.

    `zone`: of a text without a time zone.

    Raises:
        ValueError: the text is not a date or time.
    """
    try:
        given = datetime.fromisoformat(text.strip())
    except ValueError:
        raise ValueError(NO_DATE) from None
    if not 1 < given.year <= _LAST_YEAR:
        raise ValueError(NO_DATE)
    return (given if given.tzinfo is not None else given.replace(tzinfo=zone)).timestamp()
