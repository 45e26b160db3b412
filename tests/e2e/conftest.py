"""Fixtures for the tests of the dashboard."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.support import browsers


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsers.chromium() as started:
        yield started
