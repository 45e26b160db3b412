"""The dashboard in a real browser while things change: new calls, broken connections, expired keys."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect

from gateway.mock import MockServer
from tests.conftest import StartGateway
from tests.support import browsers, records
from tests.support.gateways import GatewayThread, until
from tests.support.web import CHAT

pytestmark = pytest.mark.long

ALICE, ADMIN = "alice-key-0123456789", "admin-key-0123456789"
FOCUSED = "document.activeElement.textContent.trim()"
#: labels of each canvas since it was cleared: text, left edge, right edge, width of the canvas
WATCH_LABELS = """
const { fillText, clearRect } = CanvasRenderingContext2D.prototype;
CanvasRenderingContext2D.prototype.clearRect = function (...area) {
  this.canvas.labels = {};
  clearRect.apply(this, area);
};
CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
  const at = this.getTransform().transformPoint({ x, y }).x;
  const { width } = this.measureText(text);
  const left = { left: at, center: at - width / 2, right: at - width }[this.textAlign];
  this.canvas.labels[text] = [left, left + width, this.canvas.width];
  fillText.call(this, text, x, y);
};
"""


@pytest.fixture(scope="module")
def site(mock_server: MockServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayThread]:
    """Yield a gateway with more sessions and calls than are shown at once."""
    folder = tmp_path_factory.mktemp("dashboard")
    now = time.time() - 5_000
    sessions = [records.record(f"s{number:05}", now + number) for number in range(1_000)]
    records.settle(folder / "gateway.db", sessions)
    gateway = GatewayThread(folder, mock_server.url, {"budget.tokens": 10_000_000})
    yield gateway
    gateway.stop()


@pytest.fixture
def watched(browser: Browser) -> Iterator[browsers.WatchedPage]:
    with browsers.opened(browser) as found:
        yield found


def show(watched: browsers.WatchedPage, gateway: GatewayThread, place: str) -> Page:
    """Open a place of the dashboard and wait until it is complete and receives new calls."""
    page = watched.page
    page.goto(f"{gateway.url}/ui{place}")
    expect(page.locator("main h1")).to_be_visible()
    expect(page.locator("#feed")).to_have_text("live")
    return page


def tops(region: Locator) -> float:
    return float(region.evaluate("element => element.scrollTop"))


def rows(table: Locator) -> int:
    return int(table.get_attribute("aria-rowcount") or 0) - 1


# --- lists that are scrolled --------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_paused", [False, True])
def test_new_calls_move_neither_the_visible_rows_nor_the_focus(
    watched: browsers.WatchedPage, site: GatewayThread, is_paused: bool
) -> None:
    page = show(watched, site, "#/")
    region = page.get_by_role("region", name="Calls, newest first")
    if is_paused:
        page.get_by_role("button", name="Pause").click()
    region.evaluate("element => element.scrollTo(0, 2000)")
    row = region.get_by_role("link", name="s00935")
    expect(row).to_be_visible()
    row.focus()
    place = row.bounding_box()
    seen = 0 if is_paused else rows(region.locator("table"))
    for number in range(3):
        site.web.chat(f"moves-{number}")
    if is_paused:
        expect(page.get_by_text("3 new since the pause")).to_be_visible()
    else:
        until(lambda: page.evaluate("document.querySelector('main .table').scrollTop") > 2000, what="rows above")
        assert rows(region.locator("table")) >= min(500, seen)
    assert row.bounding_box() == place
    assert page.evaluate(FOCUSED) == "s00935"


def test_a_focused_row_at_the_top_stays_focused_and_visible(watched: browsers.WatchedPage, site: GatewayThread) -> None:
    page = show(watched, site, "#/")
    region = page.get_by_role("region", name="Calls, newest first")
    site.web.chat("focused")
    row = region.get_by_role("link", name="focused")
    row.focus()
    page.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
    records.settle(site.store, [records.record("others", time.time()) for _ in range(60)])
    expect(page.locator("tbody tr:not(.spacer)", has_text="others")).not_to_have_count(0)
    until(lambda: tops(region) > 60 * 32 - 800, what="the list follows")
    expect(row).to_be_focused()
    expect(row).to_be_in_viewport()


def test_keys_move_through_sessions_and_keep_the_position_while_pages_load(
    watched: browsers.WatchedPage, site: GatewayThread
) -> None:
    page = show(watched, site, "#/sessions")
    region = page.get_by_role("region", name="Sessions")
    table = region.locator("table")
    region.focus()
    page.keyboard.press("End")
    last = page.evaluate(FOCUSED)
    expect(table).to_have_attribute("aria-rowcount", "401")
    assert page.evaluate(FOCUSED) == last
    before = tops(region)
    assert before > 4_000
    page.keyboard.press("ArrowDown")
    assert page.evaluate(FOCUSED) not in ("", last)
    page.keyboard.press("PageDown")
    assert before + 300 < tops(region) < before + 1_000

    def goes_down() -> bool:
        page.keyboard.press("PageDown")
        return bool(page.evaluate(FOCUSED) == "s00000")

    until(goes_down, what="the last row")
    page.keyboard.press("Home")
    assert tops(region) == 0


def test_renewing_the_session_list_keeps_the_focus_and_the_visible_rows(
    watched: browsers.WatchedPage, site: GatewayThread
) -> None:
    page = show(watched, site, "#/sessions")
    region = page.get_by_role("region", name="Sessions")
    region.focus()
    for _ in range(4):
        page.keyboard.press("ArrowDown")
    focused = page.evaluate(FOCUSED)
    site.web.chat("renews-the-list")
    expect(page.locator("tbody tr:not(.spacer)").first).to_contain_text("renews-the-list")
    assert page.evaluate(FOCUSED) == focused
    site.web.chat(focused)
    expect(page.locator("tbody tr:not(.spacer)").first).to_contain_text(focused)
    assert page.evaluate(FOCUSED) == focused, "even if the row itself has moved"
    # If the user has scrolled down, the list is not renewed, and no page is lost.
    region.evaluate("element => element.scrollTo(0, element.scrollHeight)")
    expect(region.locator("table")).to_have_attribute("aria-rowcount", "401")
    before = tops(region)
    site.web.chat("not-seen")
    page.wait_for_timeout(3_500)
    assert tops(region) == before
    assert rows(region.locator("table")) == 400


def test_a_failed_next_page_is_not_requested_again_and_again(
    watched: browsers.WatchedPage, site: GatewayThread
) -> None:
    watched.allowed = ("503",)
    page = show(watched, site, "#/sessions")
    asked: list[str] = []

    def refuse(route: Route) -> None:
        asked.append(route.request.url)
        route.fulfill(status=503, body=json.dumps({"error": {"code": "store", "message": "The store is unavailable."}}))

    page.route("**/api/sessions?**cursor=**", refuse)
    region = page.get_by_role("region", name="Sessions")
    region.evaluate("element => element.scrollTo(0, element.scrollHeight)")
    expect(page.get_by_text("The store is unavailable.")).to_be_visible()
    page.wait_for_timeout(500)
    assert len(asked) <= 2
    page.unroute("**/api/sessions?**cursor=**")
    # This is still near enough to the end to load more, and only once: then the end is far away.
    region.evaluate("element => element.scrollBy(0, -50)")
    expect(region.locator("table")).to_have_attribute("aria-rowcount", "401")


# --- missed calls -------------------------------------------------------------------------------------------------


def expect_all(page: Page, calls: int) -> None:
    """Check that the tile, the list and the charts show this number of calls."""
    expect(page.locator(".tile", has_text="Calls").locator(".value").first).to_have_text(f"{calls:,}", timeout=20_000)
    expect(page.get_by_role("button", name=f"All {calls:,}", exact=True)).to_be_visible()
    expect(page.locator("h2:has-text('Calls') + span")).to_have_text(f"{calls:,} charged")
    chart = page.locator("figure", has_text="Total tokens").locator("[role=img]")
    expect(chart).to_have_attribute("aria-label", re.compile(f"{calls} points"))


def test_after_a_lost_connection_a_session_shows_all_calls_made_meanwhile(
    watched: browsers.WatchedPage, site: GatewayThread
) -> None:
    watched.allowed = ("404", "net::ERR", "Failed to load resource")
    page = watched.page
    page.route("**/api/events", lambda route: route.fulfill(status=404, body="{}"))
    records.settle(site.store, [records.record("gap", time.time()) for _ in range(10)])
    page.goto(f"{site.url}/ui#/session/gap")
    expect_all(page, 10)
    page.route("**/api/**", lambda route: route.abort())
    expect(page.locator("#feed")).to_have_text("offline")
    records.settle(site.store, [records.record("gap", time.time()) for _ in range(250)])
    # Many calls of other sessions hide the missed calls of this session.
    records.settle(site.store, [records.record("others", time.time()) for _ in range(600)])
    page.unroute("**/api/**")
    expect_all(page, 260)
    page.goto(f"{site.url}/ui#/")
    expect(page.locator("main table")).to_have_attribute("aria-rowcount", "501")


def test_a_session_shows_all_calls_even_if_they_arrive_faster_than_the_page_renews(
    watched: browsers.WatchedPage, site: GatewayThread
) -> None:
    now = time.time()
    records.settle(site.store, [records.record("burst", now)])
    page = show(watched, site, "#/session/burst")
    expect_all(page, 1)
    for part in range(5):
        records.settle(site.store, [records.record("burst", now + part) for _ in range(140)])
    expect_all(page, 701)
    # A call that began long before the others ends last.
    records.settle(site.store, [records.record("burst", now - 60)])
    expect_all(page, 702)


def test_loaded_older_calls_are_kept_after_a_gap(watched: browsers.WatchedPage, site: GatewayThread) -> None:
    now = time.time()
    records.settle(site.store, [records.record("old", now - 1_500 + number) for number in range(1_200)])
    page = show(watched, site, "#/session/old")
    older = page.get_by_role("button", name="Load older calls")
    older.focus()
    page.keyboard.press("Enter")
    expect_all(page, 1_200)
    assert page.evaluate("document.activeElement !== document.body")
    records.settle(site.store, [records.record("old", now) for _ in range(300)])
    expect_all(page, 1_500)
    expect(older).to_be_hidden()


# --- buttons ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "name"),
    [("#/sessions", "Tokens"), ("#/session/pressed", "Failed"), ("#/session/pressed", "By time"), ("#/", "Pause")],
)
def test_a_pressed_button_keeps_the_focus_when_the_view_renews(
    watched: browsers.WatchedPage, site: GatewayThread, place: str, name: str
) -> None:
    site.web.chat("pressed")
    page = show(watched, site, place)
    button = page.get_by_role("button", name=re.compile(f"^{name}"))
    button.focus()
    element = button.element_handle()
    page.keyboard.press("Enter")
    expect(page.locator("[aria-pressed=true]", has_text=re.compile(f"^({name}|Resume)"))).to_be_focused()
    calls = page.locator(".tile .value").first
    before = calls.inner_text() if place != "#/sessions" else ""
    site.web.chat("pressed")
    if before:
        expect(calls).not_to_have_text(before)
    assert element is not None
    assert element.evaluate("element => element === document.activeElement")


# --- views after leaving them, and keys ----------------------------------------------------------------------------


def asked_on_models(page: Page, gateway: GatewayThread) -> list[str]:
    """Return the API requests that the Models page makes when there is a new call."""
    page.get_by_role("link", name="Models").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Models")
    expect(page.locator("#feed")).to_have_text("live")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    gateway.web.chat("asks")
    page.wait_for_timeout(4_000)
    return [url for url in asked if "/api/" in url]


def test_a_failed_view_makes_no_requests_after_it_was_left(watched: browsers.WatchedPage, site: GatewayThread) -> None:
    watched.allowed = ("503",)
    page = watched.page
    body = json.dumps({"error": {"code": "store", "message": "The store is unavailable."}})
    page.route("**/api/sessions?**", lambda route: route.fulfill(status=503, body=body))
    page.goto(f"{site.url}/ui#/sessions")
    for _ in range(4):
        page.get_by_role("button", name="Try again").click()
        expect(page.get_by_text("The store is unavailable.")).to_be_visible()
    page.unroute("**/api/sessions?**")
    assert asked_on_models(page, site) == []


@pytest.fixture
def locked(mock_server: MockServer, gateway_server: StartGateway) -> GatewayThread:
    gateway = gateway_server(mock_server.url, **{"auth.admin_key": ADMIN, "auth.keys": [{"name": "al", "key": ALICE}]})
    gateway.web.headers["authorization"] = f"Bearer {ALICE}"
    gateway.web.chat("first")
    return gateway


def enter(page: Page, key: str = ADMIN) -> None:
    page.get_by_label("Key", exact=True).fill(key)
    page.keyboard.press("Enter")


def test_a_view_makes_no_requests_after_its_key_was_forgotten(
    locked: GatewayThread, watched: browsers.WatchedPage
) -> None:
    watched.allowed = ("401",)
    page = watched.page
    page.goto(f"{locked.url}/ui#/sessions")
    enter(page)
    for _ in range(4):
        expect(page.get_by_role("link", name="al/first")).to_be_visible()
        page.get_by_role("button", name="Forget key").click()
        enter(page)
    expect(page.get_by_role("link", name="al/first")).to_be_visible()
    assert asked_on_models(page, locked) == []


def test_background_requests_do_not_open_the_key_dialog(locked: GatewayThread, watched: browsers.WatchedPage) -> None:
    watched.allowed = ("401",)
    page = watched.page
    page.clock.install()
    page.goto(f"{locked.url}/ui#/health")
    enter(page)
    expect(page.locator("#feed")).to_have_text("live")
    page.evaluate("sessionStorage.setItem('gateway.key', 'a-key-of-yesterday')")
    notice = page.get_by_role("alert").filter(has_text="not known (any more)")
    page.clock.run_for(6_000)
    expect(notice).to_be_visible()
    for _ in range(3):
        page.clock.run_for(6_000)
        expect(page.get_by_role("dialog")).to_have_count(0)
    notice.get_by_role("button", name="Enter a key").click()
    enter(page)
    expect(notice).to_be_hidden()
    expect(page.get_by_text("reachable")).to_be_visible()
    expect(page.locator("#feed")).to_have_text("live")


def test_a_dismissed_key_dialog_stays_closed_and_leaves_a_button(
    locked: GatewayThread, watched: browsers.WatchedPage
) -> None:
    watched.allowed = ("401",)
    page = watched.page
    page.goto(f"{locked.url}/ui#/")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#feed")).to_have_text("locked")
    page.wait_for_timeout(500)
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.get_by_role("button", name="Enter a key").click()
    enter(page)
    expect(page.locator("tbody tr:not(.spacer)", has_text="al/first")).to_be_visible()


def test_a_key_with_invalid_characters_is_refused_in_the_dialog(
    locked: GatewayThread, watched: browsers.WatchedPage
) -> None:
    watched.allowed = ("401",)
    page = watched.page
    page.goto(f"{locked.url}/ui#/sessions")
    enter(page, "ключ-0123456789")
    expect(page.get_by_role("dialog").get_by_role("alert")).to_contain_text("A key cannot contain “к”")
    expect(page.get_by_label("Key", exact=True)).to_be_focused()
    enter(page)
    expect(page.get_by_role("link", name="al/first")).to_be_visible()


# --- changes ------------------------------------------------------------------------------------------------------


def test_a_change_that_cannot_be_shown_leaves_a_notice(watched: browsers.WatchedPage, site: GatewayThread) -> None:
    watched.allowed = ("404",)
    site.web.chat("changed")
    page = show(watched, site, "#/session/changed")
    gone = json.dumps({"error": {"code": "not_found", "message": 'There is no session "changed".'}})

    def answer(route: Route) -> None:
        if route.request.method == "GET":
            route.fulfill(status=404, body=gone)
        else:
            route.continue_()

    page.route("**/api/sessions/changed", answer)
    page.get_by_role("button", name="Change budget").click()
    page.get_by_role("button", name="Remove all limits").click()
    page.get_by_role("button", name="Set this budget").click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    notice = page.get_by_role("alert").filter(has_text='There is no session "changed"')
    expect(notice).to_be_visible()
    page.unroute("**/api/sessions/changed")
    site.web.chat("changed")
    expect(page.get_by_text("No budget: this session has no limit.")).to_be_visible()
    expect(notice).to_be_hidden()


# --- names and numbers of any size --------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [320, 1280])
def test_a_long_model_name_does_not_widen_the_page(
    browser: Browser, mock_server: MockServer, gateway_server: StartGateway, width: int
) -> None:
    gateway = gateway_server(mock_server.url)
    name = "mock-" + "m" * 251
    body = {"model": name, "messages": [{"role": "user", "content": "hi"}]}
    assert gateway.web.post(CHAT, body, {"x-session-id": "long-name"}).status == 200
    with browsers.opened(browser, viewport={"width": width, "height": 800}) as watched:
        for place in ("#/", "#/session/long-name", "#/usage?by=model", "#/models"):
            page = show(watched, gateway, place)
            expect(page.locator("main figure").first).to_be_visible()
            assert page.evaluate("document.documentElement.scrollWidth") <= width, place
        table = page.get_by_role("region", name=re.compile("Error of the estimates"))
        expect(table.get_by_title(name)).to_be_visible()
        assert table.evaluate("element => element.scrollWidth - element.clientWidth") <= 0
        edge = page.locator("#model").evaluate("element => element.getBoundingClientRect().right")
        assert edge <= width


def labels(page: Page, title: str) -> dict[str, list[float]]:
    """Return the labels of a chart with their positions."""
    canvas = page.locator("figure", has_text=title).locator("canvas")
    found: dict[str, list[float]] = until(lambda: canvas.evaluate("canvas => canvas.labels"), what=title)
    return found


def plain(text: str) -> str:
    return text.replace("\u202f", "").replace(",", "")


@pytest.mark.parametrize(
    ("calls", "cost"), [(1, "0.000002"), (3, "0.00025"), (9, "0.000001"), (1_000, "0.00075"), (5, "1234.5")]
)
def test_axis_labels_are_complete_and_correct(browser: Browser, site: GatewayThread, calls: int, cost: str) -> None:
    name, now = f"axes-{calls}-{cost}", time.time()
    records.settle(site.store, [records.record(name, now - calls + at, cost=cost) for at in range(calls)])
    with browsers.opened(browser) as watched:
        watched.page.add_init_script(WATCH_LABELS)
        page = show(watched, site, f"#/session/{name}")
        for title in ("Tokens of each call", "Total tokens", "Cost of each call", "Time of each call"):
            found = labels(page, title)
            for text, (left, right, width) in found.items():
                assert left >= 0, (title, text)
                assert right <= width, (title, text)
            numbers = [int(plain(text).removeprefix("call ")) for text in found if text.startswith("call ")]
            assert numbers
            assert 1 <= min(numbers) <= max(numbers) <= calls
            if title.startswith("Cost"):
                assert all(re.fullmatch(r"\$\d+(\.\d\d+)?", plain(text)) for text in found if text[0] == "$"), found
                assert sum(float(plain(text)[1:]) == 0 for text in found if text[0] == "$") == 1, found


def test_the_axis_of_a_few_tokens_has_whole_numbers(browser: Browser, site: GatewayThread) -> None:
    page_of = {"input": 7, "output": 2}
    with browsers.opened(browser) as watched:
        page = watched.page
        page.add_init_script(WATCH_LABELS)

        def small(route: Route) -> None:
            answer = route.fetch().json()
            for call in answer["calls"]:
                call["usage"] |= {
                    "input_tokens": page_of["input"],
                    "output_tokens": page_of["output"],
                    "total_tokens": 9,
                    "cache_read_tokens": 0,
                }
            route.fulfill(body=json.dumps(answer))

        page.route("**/api/sessions/few/calls**", small)
        records.settle(site.store, [records.record("few", time.time()) for _ in range(3)])
        show(watched, site, "#/session/few")
        found = {text for text in labels(page, "Tokens of each call") if not text.startswith("call")}
        assert found in ({"0", "2", "4", "6", "8"}, {"0", "5"}, {"0", "5", "10"}), found


def test_estimates_that_are_all_too_high_are_drawn_below_zero(browser: Browser, site: GatewayThread) -> None:
    with browsers.opened(browser) as watched:
        watched.page.add_init_script(WATCH_LABELS)

        def too_high(route: Route) -> None:
            answer = route.fetch().json()
            calls = [call for call in answer["calls"] if call["context"]][:1]
            calls[0]["context"]["tokens"] = calls[0]["usage"]["input_tokens"] * 2
            route.fulfill(body=json.dumps({"calls": calls}))

        site.web.chat("too-high")
        watched.page.route("**/api/calls?limit=1000", too_high)
        page = show(watched, site, "#/models")
        found = labels(page, "Reported tokens above or below")
        assert {"0.0%", "\u2212100.0%"} <= {plain(text) for text in found}


def pixels(chart: Locator, colour: str) -> int:
    """Return how many pixels of a chart have a colour of the style sheet."""
    found: Any = chart.evaluate(
        """(canvas, name) => {
          const hex = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
          const [r, g, b] = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
          const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
          let count = 0;
          for (let at = 0; at < data.length; at += 4)
            if (data[at + 3] > 128 && Math.abs(data[at] - r) + Math.abs(data[at + 1] - g) + Math.abs(data[at + 2] - b) < 24)
              count++;
          return count;
        }""",
        colour,
    )
    return int(found)


@pytest.mark.parametrize("axis", ["By call", "By time"])
def test_one_call_is_a_point_below_its_budget(watched: browsers.WatchedPage, site: GatewayThread, axis: str) -> None:
    watched.allowed = ("willReadFrequently",)
    site.web.chat("alone")
    body = {"budget": {"tokens": 100}}
    assert site.web.send("PATCH", "/api/sessions/alone", body).status == 200
    page = show(watched, site, "#/session/alone")
    page.get_by_role("button", name=axis).click()
    chart = page.locator("figure", has_text="Total tokens").locator("canvas")
    expect(chart).to_be_visible()
    page.wait_for_timeout(200)
    assert pixels(chart, "limit") > 100, "the line of its budget"
    assert pixels(chart, "input") > 8, "the point of its call"
    share = page.locator("figure", has_text="Tokens of each call").locator("canvas")
    assert pixels(share, "input") > 8
