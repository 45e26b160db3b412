"""Run a real browser for tests of the dashboard, and collect errors on its pages."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from tests.support.timing import LIMIT_S

#: the names of Chromium in Debian, Ubuntu and Google's packages
NAMES = ("chromium", "chromium-browser", "google-chrome")
#: reports what the page's Content-Security-Policy blocked
_WATCH = (
    "document.addEventListener('securitypolicyviolation', e => console.error('CSP', e.violatedDirective, e.blockedURI))"
)


def find() -> str:
    """Return the path of Chromium. Without Chromium, skip the test, or fail it in CI."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        reason = "Chromium is missing, and these tests need it: apt-get install chromium"
        if os.environ.get("CI") or os.environ.get("REQUIRE_BROWSER"):
            pytest.fail(reason)
        pytest.skip(reason)
    return found


@contextmanager
def chromium() -> Iterator[Browser]:
    """Yield a headless browser."""
    path = find()
    expect.set_options(timeout=LIMIT_S * 1_000)
    with sync_playwright() as playwright:
        # Chromium's sandbox needs rights that root lacks in a container. It only visits servers of the tests.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@dataclass
class WatchedPage:
    """A page and its problems: script errors, console errors, violations of its policy, and alerts.

    `allowed`: parts of messages that the test itself causes, such as a 401 response.
    """

    page: Page
    context: BrowserContext
    wrong: list[str] = field(default_factory=list)
    allowed: tuple[str, ...] = ()

    def listen(self) -> None:
        self.page.add_init_script(_WATCH)
        self.page.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        self.page.on("console", self._on_console)
        self.page.on("dialog", self._on_dialog)
        self.page.on("request", self._on_request)

    def _on_console(self, message: Any) -> None:
        if message.type in ("error", "warning") and not any(part in message.text for part in self.allowed):
            self.wrong.append(f"{message.type}: {message.text}")

    def _on_dialog(self, dialog: Any) -> None:
        self.wrong.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _on_request(self, request: Any) -> None:
        if not request.url.startswith(("http://127.0.0.1:", "data:")):
            self.wrong.append(f"asked another host: {request.url}")


@contextmanager
def opened(browser: Browser, **options: Any) -> Iterator[WatchedPage]:
    """Yield a page in its own context; fail at the end if it has problems."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
    watched = WatchedPage(context.new_page(), context)
    watched.page.set_default_timeout(LIMIT_S * 1_000)
    watched.listen()
    try:
        yield watched
    finally:
        context.close()
    assert not watched.wrong, watched.wrong
