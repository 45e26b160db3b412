"""Usage and filters in the dashboard, in a real browser: who spent what, which calls are listed, kept in the URL."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from playwright.sync_api import Browser, Page, expect

from gateway.core.calling_agent import CallingAgent
from gateway.core.ledger.session_key import SessionKey
from gateway.core.record import CallRecord
from gateway.mock import MockServer
from tests.support import browsers, records
from tests.support.gateways import GatewayThread
from tests.support.web import CHAT, HI, Web

pytestmark = pytest.mark.long

ADMIN = "admin-key-0123456789"
KEYS = {"alice": "alice-key-0123456789", "bob": "bob-key-9876543210"}
DAY_S = 86_400


def spent(key: str, days_ago: float, cost: str | None, model: str = "mock-large") -> CallRecord:
    record = records.record("work", time.time() - days_ago * DAY_S, model=model, cost=cost or "0")
    charge = record.charge
    assert charge is not None
    if cost is None:
        charge = replace(charge, cost_usd=None)
    return replace(record, session=SessionKey(key, "work"), charge=charge, agent=CallingAgent("x", type="Explore"))


@pytest.fixture(scope="module")
def site(mock_server: MockServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayThread]:
    """Yield a gateway whose client keys have spent something on several days."""
    folder = tmp_path_factory.mktemp("usage")
    old = [spent("alice", 2, "3"), spent("alice", 1, "1"), spent("bob", 1, "2"), spent("bob", 40, "10")]
    records.settle(folder / "gateway.db", [*old, spent("bob", 1, None, "free-model")])
    flags = {
        "auth.admin_key": ADMIN,
        "auth.keys": [{"name": name, "key": key} for name, key in KEYS.items()],
        "sessions.ttl": "3000d",
        "budget.tokens": 100_000,
    }
    gateway = GatewayThread(folder, mock_server.url, flags)
    yield gateway
    gateway.stop()


def web(site: GatewayThread, key: str) -> Web:
    return Web(site.url, {"authorization": f"Bearer {key}"})


@pytest.fixture
def page(browser: Browser, site: GatewayThread) -> Iterator[Page]:
    with browsers.opened(browser) as watched:
        yield as_caller(watched.page, ADMIN)


def as_caller(page: Page, key: str) -> Page:
    page.add_init_script(f"sessionStorage.setItem('gateway.key', '{key}')")
    return page


def rows(page: Page, table: str) -> list[str]:
    texts = page.get_by_role("region", name=table).locator("tbody tr:not(.spacer)").all_inner_texts()
    return [re.sub(r"\s+", " ", text.replace("\u202f", " ")).strip() for text in texts]


# --- usage --------------------------------------------------------------------------------------------------------


def test_usage_lists_the_top_spenders_and_says_what_has_no_price(page: Page, site: GatewayThread) -> None:
    page.goto(f"{site.url}/ui#/usage")
    expect(page.locator(".tile", has_text="Cost").locator(".value")).to_have_text("≥ $6")
    expect(page.get_by_text("The price of the model is unknown for 1 call")).to_be_visible()
    assert rows(page, "Usage by key") == [
        "alice $4 67 % 2,020 0 % 2 charged",
        "bob ≥ $2 33 % 2,020 0 % 2 charged",
    ]
    expect(page.locator("figure canvas")).to_be_visible()
    page.get_by_role("button", name="90 days").click()
    expect(page).to_have_url(re.compile("days=90"))
    expect(page.locator(".tile", has_text="Cost").locator(".value")).to_have_text("≥ $16")
    assert rows(page, "Usage by key")[0].startswith("bob ≥ $12 75 %")
    page.get_by_role("button", name="Model").click()
    expect(page).to_have_url(re.compile("by=model"))
    assert rows(page, "Usage by model")[1].startswith("free-model unknown")
    page.get_by_role("button", name="Tokens").click()
    page.reload()
    for name in ("Model", "Tokens", "90 days"):
        expect(page.get_by_role("button", name=name, exact=True)).to_have_attribute("aria-pressed", "true")


def test_the_bars_of_usage_are_stacked_and_their_legend_shows_the_parts(page: Page, site: GatewayThread) -> None:
    page.goto(f"{site.url}/ui#/usage?days=7")
    figure = page.locator("figure")
    box = figure.locator(".u-over").bounding_box()
    assert box is not None
    # Yesterday is the sixth of seven bars.
    page.mouse.move(box["x"] + box["width"] * 5.6 / 7.2, box["y"] + 20)
    expect(figure).to_contain_text(re.compile(r"alice \$1\s*bob \$2"))


def test_a_spender_opens_the_usage_of_this_key_by_model(page: Page, site: GatewayThread) -> None:
    page.goto(f"{site.url}/ui#/usage")
    page.get_by_role("link", name="bob").click()
    expect(page.get_by_text("Only key bob")).to_be_visible()
    assert [row.split()[0] for row in rows(page, "Usage by model")] == ["mock-large", "free-model"]
    page.get_by_role("link", name="show all").click()
    expect(page.get_by_text("Only key bob")).to_be_hidden()


def test_a_client_key_finds_its_sessions_and_usage_from_its_own_view(browser: Browser, site: GatewayThread) -> None:
    with browsers.opened(browser) as watched:
        page = as_caller(watched.page, KEYS["alice"])
        page.goto(f"{site.url}/ui#/keys/alice")
        page.get_by_role("link", name="by model and day").click()
        expect(page.get_by_text("Only key alice")).to_be_visible()
        assert [row.split()[0] for row in rows(page, "Usage by model")] == ["mock-large"]
        page.get_by_role("link", name="sessions", exact=True).click()
        expect(page.get_by_role("link", name="work", exact=True)).to_be_visible()


def test_a_client_key_sees_only_its_own_usage(browser: Browser, site: GatewayThread) -> None:
    with browsers.opened(browser) as watched:
        page = as_caller(watched.page, KEYS["alice"])
        page.goto(f"{site.url}/ui#/usage?key=bob")
        expect(page.get_by_role("heading", name="No usage in the last 30 days")).to_be_visible()
        page.goto(f"{site.url}/ui#/usage")
        expect(page.locator(".tile", has_text="Cost").locator(".value")).to_have_text("$4")
        assert [row.split()[0] for row in rows(page, "Usage by key")] == ["alice"]


# --- filters ------------------------------------------------------------------------------------------------------


@pytest.fixture
def called(site: GatewayThread) -> None:
    for name, key in KEYS.items():
        for model, mock in (("mock-small", ""), ("mock-large", "status=500")):
            headers = {"x-session-id": f"{name}-today", "x-session-tag": f"tag-{name}", "x-mock": mock}
            web(site, key).post(CHAT, {"model": model, "messages": HI}, headers)


def test_calls_are_filtered_and_new_ones_are_added(page: Page, site: GatewayThread, called: None) -> None:
    page.goto(f"{site.url}/ui#/")
    page.get_by_text("Filters").click()
    page.get_by_label("Key").select_option("alice")
    page.get_by_label("Status").select_option("failed")
    listed = page.get_by_role("region", name="Calls, newest first").locator("tbody tr:not(.spacer)")
    expect(listed).to_have_count(1)
    expect(listed).to_contain_text("mock-large")
    expect(page).to_have_url(re.compile(r"key=alice&status=failed"))
    page.reload()
    expect(listed).to_have_count(1)
    expect(page.get_by_label("Status")).to_have_value("failed")
    body = {"model": "mock-large", "messages": HI}
    for key in KEYS.values():
        web(site, key).post(CHAT, body, {"x-session-id": "again", "x-mock": "status=500"})
    expect(listed).to_have_count(2)
    page.get_by_role("button", name="Clear").click()
    expect(page.get_by_role("link", name="bob/again")).to_be_visible()
    assert "key=" not in page.url
    page.goto(f"{site.url}/ui#/?tag=nobody")
    expect(page.get_by_role("heading", name="No call found")).to_be_visible()


def test_sessions_are_filtered_by_key_and_time(page: Page, site: GatewayThread, called: None) -> None:
    page.goto(f"{site.url}/ui#/sessions?key=bob&since=24h")
    names = page.get_by_role("region", name="Sessions").locator("tbody tr:not(.spacer) th")
    expect(page.get_by_role("link", name="bob/bob-today")).to_be_visible()
    assert all(name.startswith("bob/") for name in names.all_inner_texts())
    assert "bob/work" not in names.all_inner_texts()
    page.get_by_label("Time").select_option("")
    expect(page.get_by_role("link", name="bob/work")).to_be_visible()
    expect(page).to_have_url(re.compile(r"sessions\?key=bob$"))


def test_the_report_is_downloaded_as_csv(page: Page, site: GatewayThread) -> None:
    page.goto(f"{site.url}/ui#/usage?by=model&key=alice")
    with page.expect_download() as started:
        page.get_by_role("button", name="Download CSV").click()
    assert re.fullmatch(r"usage-by-model-[-0-9]+\.csv", started.value.suggested_filename)
    lines = started.value.path().read_text().splitlines()
    assert lines[0].startswith("start,model,calls,")
    assert [line.split(",")[-1] for line in lines[1:] if ",mock-large," in line][:2] == ["3.000000", "1.000000"]


def test_a_report_with_too_many_lines_can_be_made_smaller(browser: Browser, site: GatewayThread) -> None:
    with browsers.opened(browser) as watched:
        watched.allowed = ("400",)
        page = as_caller(watched.page, ADMIN)
        message = (
            "The report has 60,000 lines, the limit is 50,000. Use a longer bucket, a shorter time, or fewer labels."
        )
        body = json.dumps({"error": {"code": "invalid_request", "message": message}})
        page.route("**/api/usage?group_by=tag**", lambda route: route.fulfill(status=400, body=body))
        page.goto(f"{site.url}/ui#/usage?by=tag&days=90")
        expect(page.get_by_text(message)).to_be_visible()
        page.get_by_role("button", name="Key", exact=True).click()
        expect(page.locator("figure canvas")).to_be_visible()


def test_wrong_values_in_the_address_are_replaced_by_the_usual_ones(page: Page, site: GatewayThread) -> None:
    page.goto(f"{site.url}/ui#/usage?by=evil&days=-1&show=")
    for name in ("Key", "Cost", "30 days"):
        expect(page.get_by_role("button", name=name, exact=True)).to_have_attribute("aria-pressed", "true")
