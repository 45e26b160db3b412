"""Refused calls in the dashboard, in a real browser: listed apart from failed calls, with their errors."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from gateway.mock import MockServer
from tests.conftest import StartGateway
from tests.support import browsers
from tests.support.gateways import GatewayThread
from tests.support.web import CHAT, HI, Reply

BODY = {"model": "mock-small", "messages": HI}


@pytest.fixture
def gateway(mock_server: MockServer, gateway_server: StartGateway) -> GatewayThread:
    return gateway_server(mock_server.url)


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    with browsers.opened(browser) as watched:
        yield watched.page


def refuse(gateway: GatewayThread, headers: dict[str, str]) -> Reply:
    reply = gateway.web.post(CHAT, BODY, headers)
    assert reply.error["code"] == "budget_exhausted"
    return reply


def plain(text: str) -> str:
    """Remove the spaces that group digits."""
    return text.replace("\u202f", "").replace("\u00a0", " ")


def test_a_session_with_only_a_refused_call_is_listed_and_counted_as_refused(
    gateway: GatewayThread, page: Page
) -> None:
    refuse(gateway, {"x-session-id": "tiny", "x-session-budget-tokens": "3"})
    gateway.web.post(CHAT, BODY, {"x-session-id": "broken", "x-mock": "status=500"})
    page.goto(f"{gateway.url}/ui#/")
    expect(page.locator("main tbody tr", has_text="tiny")).to_contain_text("budget_exhausted")
    expect(page.locator(".tile", has_text="Failed").locator(".value")).to_have_text("1")
    expect(page.locator(".tile", has_text="Refused").locator(".value")).to_have_text("1")
    page.goto(f"{gateway.url}/ui#/sessions")
    expect(page.get_by_role("link", name="tiny")).to_be_visible()
    page.goto(f"{gateway.url}/ui#/session/tiny")
    expect(page.get_by_role("button", name="Refused 1")).to_be_visible()
    expect(page.get_by_role("button", name="Failed 0")).to_be_visible()


def test_a_refused_call_shows_the_error_and_the_exhausted_account(gateway: GatewayThread, page: Page) -> None:
    gateway.web.send("PATCH", "/api/sessions/boss", {"budget": {"tokens": 1000}})
    child = {"x-session-id": "child", "x-parent-session-id": "boss"}
    assert gateway.web.post(CHAT, BODY, {**child, "x-mock": "tokens=900/95"}).status == 200
    refused = refuse(gateway, child)
    budget = refused.json["error"]["budget"]
    page.goto(f"{gateway.url}/ui#/call/{refused.header('x-gateway-request-id')}")
    expect(page.locator("main .problem")).to_contain_text(refused.error["message"])
    facts = plain(page.locator("main .facts").first.inner_text())
    for fact in ("session boss (a parent)", "1,000 tokens", "995 tokens", f"{budget['needed']:,} tokens"):
        assert fact in facts, facts
    page.locator("main .facts a", has_text="boss").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("boss")
    expect(page.locator(".bars")).to_contain_text("Child sessions used about 995 tokens of it, in 1 call.")


def test_a_child_shows_the_used_budget_of_its_parent(gateway: GatewayThread, page: Page) -> None:
    gateway.web.send("PATCH", "/api/sessions/boss", {"budget": {"tokens": 1000}})
    gateway.web.send("PATCH", "/api/sessions/child", {"budget": {"tokens": 9950}})
    child = {"x-session-id": "child", "x-parent-session-id": "boss"}
    assert gateway.web.post(CHAT, BODY, {**child, "x-mock": "tokens=900/95"}).status == 200
    page.goto(f"{gateway.url}/ui#/session/child")
    expect(page.get_by_role("group", name="Budget", exact=True)).to_contain_text("10")
    parent = page.get_by_role("group", name="Budget of parent boss")
    expect(parent).to_contain_text(re.compile(r"Parent: Tokens\s*995 of 1.?000"))
    page.get_by_role("link", name="boss").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("boss")


def test_the_chart_of_a_parent_separates_its_own_usage_from_that_of_its_children(
    gateway: GatewayThread, page: Page
) -> None:
    gateway.web.send("PATCH", "/api/sessions/boss", {"budget": {"tokens": 1000}})
    gateway.web.chat("boss", "tokens=400/10")
    child = {"x-session-id": "child", "x-parent-session-id": "boss", "x-mock": "tokens=90/5"}
    assert gateway.web.post(CHAT, BODY, child).status == 200
    page.goto(f"{gateway.url}/ui#/session/boss")
    expect(page.get_by_role("group", name="Budget", exact=True)).to_contain_text(re.compile(r"505 of 1.?000"))
    expect(page.get_by_role("group", name="Budget", exact=True)).to_contain_text(
        "Child sessions used about 95 tokens of it"
    )
    chart = page.locator("main .chart").filter(has_text="Total tokens")
    expect(chart).to_contain_text(re.compile(r"used by this session\s*410\s*now, with child sessions\s*505"))


def test_a_declared_budget_is_shown_as_declared(gateway: GatewayThread, page: Page) -> None:
    refuse(gateway, {"x-session-id": "tiny", "x-session-budget-tokens": "3"})
    page.goto(f"{gateway.url}/ui#/session/tiny")
    expect(page.get_by_role("group", name="Budget", exact=True)).to_contain_text("0 of 3")
    expect(page.get_by_text("Its last call declared a budget")).to_be_visible()
    expect(page.get_by_text("No budget")).to_have_count(0)


def test_health_lists_refused_keys_by_hash_and_providers_without_calls(
    browser: Browser, mock_server: MockServer, gateway_server: StartGateway
) -> None:
    admin = "admin-key-0123456789"
    gateway = gateway_server(
        mock_server.url, **{"auth.admin_key": admin, "auth.keys": [{"name": "al", "key": "alice-key-0123456789"}]}
    )
    gateway.web.post(CHAT, BODY, {"authorization": "Bearer sk-nobodys-key"})
    with browsers.opened(browser) as watched:
        watched.allowed = ("401",)
        watched.page.goto(f"{gateway.url}/ui#/health")
        watched.page.get_by_role("dialog").get_by_label("Key").fill(admin)
        watched.page.keyboard.press("Enter")
        shown = hashlib.sha256(b"sk-nobodys-key").hexdigest()[:8]
        expect(watched.page.locator("main tr", has_text=shown)).to_contain_text("invalid_api_key")
        expect(watched.page.locator("main tr", has_text="upstream")).to_contain_text("not called yet")
