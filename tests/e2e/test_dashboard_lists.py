"""Lists of the dashboard in a real browser: names, shortened ids, two lines on phones, counts of calls."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, ViewportSize, expect

from gateway.mock import MockServer
from tests.conftest import StartGateway
from tests.support import browsers
from tests.support.gateways import GatewayThread
from tests.support.web import CHAT, HI

pytestmark = pytest.mark.long

LONG = "refactor-login-2f9c1b7e-4d3a-4c1e-9a57-0b6f2d9e81aa"
BODY = {"model": "mock-small", "messages": HI}
LISTS = ("#/", "#/sessions")
PHONE: ViewportSize = {"width": 390, "height": 800}


@pytest.fixture
def gateway(mock_server: MockServer, gateway_server: StartGateway) -> GatewayThread:
    gateway = gateway_server(mock_server.url)
    gateway.web.post(CHAT, BODY, {"x-session-id": LONG, "x-session-tag": "nightly", "x-mock": "tokens=900/70"})
    return gateway


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    with browsers.opened(browser) as watched:
        yield watched.page


def is_cut(page: Page, selector: str) -> bool:
    found: bool = page.locator(selector).first.evaluate("element => element.scrollWidth > element.clientWidth")
    return found


def test_a_long_id_is_shortened_in_its_middle_and_keeps_its_name(gateway: GatewayThread, page: Page) -> None:
    page.set_viewport_size(PHONE)
    for place in LISTS:
        page.goto(f"{gateway.url}/ui{place}")
        link = page.get_by_role("link", name=LONG)
        expect(link).to_have_attribute("title", LONG)
        assert is_cut(page, ".named .head")
        edges = link.evaluate(
            "link => [link.querySelector('.id').lastChild, link.closest('th, td')]"
            ".map(element => element.getBoundingClientRect().right)"
        )
        assert edges[0] <= edges[1], place
        assert link.locator(".id > span").last.inner_text() == "9e81aa"


def test_a_phone_shows_rows_in_two_lines_until_the_window_is_wide(gateway: GatewayThread, page: Page) -> None:
    page.set_viewport_size(PHONE)
    page.goto(f"{gateway.url}/ui#/sessions")
    row = page.locator("main tbody tr", has_text="1 call, 970 tokens · nightly")
    expect(row.locator(".below").first).to_be_visible()
    assert row.evaluate("element => element.offsetHeight") == 52
    page.set_viewport_size({"width": 1280, "height": 800})
    expect(row.locator(".below").first).to_be_hidden()
    expect(row.locator(".badge", has_text="nightly")).to_be_visible()
    assert row.evaluate("element => element.offsetHeight") == 32
    page.set_viewport_size(PHONE)
    page.goto(f"{gateway.url}/ui#/session/{LONG}")
    expect(page.locator("main tbody tr", has_text="900 in, 70 out")).to_be_visible()


def test_a_session_counts_its_charged_and_refused_calls(gateway: GatewayThread, page: Page) -> None:
    for _ in range(2):
        gateway.web.post(CHAT, BODY, {"x-session-id": LONG, "x-session-budget-tokens": "1"})
    gateway.web.post(CHAT, BODY, {"x-session-id": LONG, "x-mock": "status=500"})
    page.goto(f"{gateway.url}/ui#/session/{LONG}")
    expect(page.get_by_text("1 charged, 2 refused, 1 not charged")).to_be_visible()
    expect(page.locator(".title .badge")).to_have_text("nightly")
    expect(page.locator("figure li", has_text="used by this session")).to_be_visible()
    expect(page.locator("figure li", has_text="now, with child sessions")).to_be_hidden()
    page.get_by_role("button", name=re.compile("^Refused")).click()
    expect(page.get_by_text("0 charged, 2 refused")).to_be_visible()


def test_only_a_stopped_session_can_be_resumed(gateway: GatewayThread, page: Page) -> None:
    page.goto(f"{gateway.url}/ui#/session/{LONG}")
    expect(page.get_by_role("button", name="Reset")).to_be_visible()
    expect(page.get_by_role("button", name="Resume")).to_be_hidden()


@pytest.mark.parametrize("place", LISTS)
def test_no_heading_of_a_list_is_cut(gateway: GatewayThread, page: Page, place: str) -> None:
    page.goto(f"{gateway.url}/ui{place}")
    expect(page.get_by_role("link", name=LONG)).to_be_visible()
    cut = page.locator("main thead th").evaluate_all(
        "cells => cells.filter(cell => cell.scrollWidth > cell.clientWidth).map(cell => cell.textContent)"
    )
    assert cut == []
