from __future__ import annotations

import pytest

from gateway.core.times import time_text


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "1970-01-01T00:00:00.000Z"),
        (1_000.5, "1970-01-01T00:16:40.500Z"),
        (1_767_225_599.9996, "2025-12-31T23:59:59.999Z"),
    ],
)
def test_a_time_has_milliseconds_and_says_that_it_is_utc(seconds: float, shown: str) -> None:
    assert time_text(seconds) == shown
