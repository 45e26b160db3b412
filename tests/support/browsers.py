"""A real browser for tests of the dashboard, and what must not happen on its pages."""

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

#: what Debian, Ubuntu and Google call it
NAMES = ("chromium", "chromium-browser", "google-chrome")
#: reports what the page's Content-Security-Policy stopped
_WATCH = (
    "document.addEventListener('securitypolicyviolation', e => console.error('CSP', e.violatedDirective, e.blockedURI))"
)


def find() -> str:
    """The path of Chromium. Without one a test is skipped, but not in CI."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        reason = "Chromium is missing, and these tests need it: apt-get install chromium"
        if os.environ.get("CI") or os.environ.get("REQUIRE_BROWSER"):
            pytest.fail(reason)
        pytest.skip(reason)
    return found


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser without a window."""
    path = find()
    expect.set_options(timeout=LIMIT_S * 1_000)
    with sync_playwright() as playwright:
        # Its sandbox needs rights that root in a container does not have; it only visits a server of ours.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@dataclass
class Watched:
    """A page, and what went wrong on it: errors of its scripts, of its console, of its policy, and alerts.

    `allowed`: parts of messages that a test brings about itself, such as an answer of 401.
    """

    page: Page
    context: BrowserContext
    wrong: list[str] = field(default_factory=list)
    allowed: tuple[str, ...] = ()

    def listen(self) -> None:
        self.page.add_init_script(_WATCH)
        self.page.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        self.page.on("console", self._said)
        self.page.on("dialog", self._asked)
        self.page.on("request", self._asks)

    def _said(self, message: Any) -> None:
        if message.type in ("error", "warning") and not any(part in message.text for part in self.allowed):
            self.wrong.append(f"{message.type}: {message.text}")

    def _asked(self, dialog: Any) -> None:
        self.wrong.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _asks(self, request: Any) -> None:
        if not request.url.startswith(("http://127.0.0.1:", "data:")):
            self.wrong.append(f"asked another host: {request.url}")


@contextmanager
def opened(browser: Browser, **options: Any) -> Iterator[Watched]:
    """A page in a context of its own; nothing may have gone wrong on it in the end."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
    watched = Watched(context.new_page(), context)
    watched.page.set_default_timeout(LIMIT_S * 1_000)
    watched.listen()
    try:
        yield watched
    finally:
        context.close()
    assert not watched.wrong, watched.wrong
