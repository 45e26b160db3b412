"""The dashboard in a real browser: what each view shows and does for each key, without errors on the page."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from gateway.cli import numbers
from gateway.mock import MockServer
from tests.conftest import StartGateway
from tests.support import browsers, records
from tests.support.conversations import TOOLS, agent
from tests.support.gateways import GatewayThread
from tests.support.web import CHAT, HI, Web

pytestmark = pytest.mark.long

ALICE, ADMIN = "alice-key-0123456789", "admin-key-0123456789"
#: markup that would become an element and run if it were not escaped
EVIL = "<img src=x onerror=alert(1)>"
VIEWS = ("#/", "#/sessions", "#/session/agent-1", "#/keys", "#/models", "#/health", "#/audit")
AXE = Path(__file__).parent / "axe" / "axe.min.js"
FLAGS = {
    "budget.tokens": 60_000,
    "context.budget": 3_000,
    "runaway.loop.refuse": 6,
    "models": [
        {"match": "mock-large", "provider": "upstream", "price": {"input": 1, "output": 10, "cache_read": 0.1}},
    ],
}


def step(web: Web, number: int, session: str = "agent-1", model: str = "mock-large") -> None:
    """Make one call of an agent with this number of tool results in its history."""
    body = {"model": model, "messages": agent(number), "tools": TOOLS, "max_tokens": 40, "tool_choice": "required"}
    reply = web.post(CHAT, body, {"x-session-id": session})
    assert reply.status == 200, reply.body


@pytest.fixture(scope="module")
def site(mock_server: MockServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayThread]:
    """Yield a gateway with a long session, whose later calls were trimmed, and some short sessions."""
    gateway = GatewayThread(tmp_path_factory.mktemp("dashboard"), mock_server.url, FLAGS)
    for number in range(10):
        step(gateway.web, number)
    for number in range(4):
        gateway.web.chat(f"other-{number}", f"tokens={number + 1}000/10", model="mock-large")
    yield gateway
    gateway.stop()


@dataclass(frozen=True)
class Ui:
    """The dashboard of one gateway."""

    page: Page
    watched: browsers.WatchedPage
    gateway: GatewayThread

    def show(self, place: str) -> Page:
        self.page.goto(f"{self.gateway.url}/ui{place}")
        expect(self.page.locator("main h1, main h2").first).to_be_visible()
        return self.page

    def row(self, text: str) -> Locator:
        return self.page.locator("main tbody tr", has_text=text).first


@pytest.fixture
def ui(browser: Browser, site: GatewayThread) -> Iterator[Ui]:
    with browsers.opened(browser) as watched:
        yield Ui(watched.page, watched, site)


def api(gateway: GatewayThread, path: str) -> Any:
    return gateway.web.get(f"/api/{path}").json


# --- live ---------------------------------------------------------------------------------------------------------


def test_a_call_appears_when_it_settles_unless_the_list_is_paused(ui: Ui) -> None:
    page = ui.show("#/")
    expect(page).to_have_title("Live · Gateway")
    expect(page.locator("#feed")).to_have_text("live")
    ui.gateway.web.chat("fresh-1")
    expect(ui.row("fresh-1")).to_be_visible()
    page.get_by_role("button", name="Pause").click()
    ui.gateway.web.chat("fresh-2")
    expect(page.get_by_text("1 new since the pause")).to_be_visible()
    expect(ui.row("fresh-2")).to_have_count(0)
    page.get_by_role("button", name="Resume").click()
    expect(ui.row("fresh-2")).to_be_visible()
    expect(page.locator("main canvas")).to_be_visible()


def test_without_an_event_stream_the_page_polls_every_few_seconds(ui: Ui) -> None:
    ui.watched.allowed = ("404",)
    ui.page.route("**/api/events", lambda route: route.fulfill(status=404, body="{}"))
    ui.show("#/")
    expect(ui.page.locator("#feed")).to_have_text("every 3 s")
    ui.gateway.web.chat("polled")
    expect(ui.row("polled")).to_be_visible()


def test_an_unreachable_gateway_is_shown_as_offline_until_it_responds_again(
    browser: Browser, mock_server: MockServer, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url)
    with browsers.opened(browser) as watched:
        watched.allowed = ("net::ERR", "Failed to load resource")
        page = watched.page
        page.goto(f"{gateway.url}/ui")
        expect(page.get_by_text("No calls yet")).to_be_visible()
        page.route("**/api/**", lambda route: route.abort())
        gateway.web.chat("ends-the-stream")
        page.reload()
        expect(page.locator("#feed")).to_have_text("offline")
        expect(page.get_by_text("The gateway does not respond")).to_be_visible()
        page.unroute("**/api/**")
        expect(page.locator("#feed")).to_have_text("live")
        expect(page.get_by_role("row", name="ends-the-stream")).to_be_visible()


# --- sessions -----------------------------------------------------------------------------------------------------


def test_sessions_are_found_sorted_and_opened_by_keyboard_alone(ui: Ui) -> None:
    page = ui.show("#/sessions")
    page.get_by_role("button", name="Cost").click()
    expect(page).to_have_url(re.compile("sort=cost"))
    expect(page.locator("tbody tr:not(.spacer)").first).to_contain_text("agent-1")
    page.get_by_label("Find").fill("other")
    expect(page.locator("tbody tr:not(.spacer)")).to_have_count(4)
    expect(page).to_have_url(re.compile("q=other"))
    costs = page.locator("tbody tr:not(.spacer) th").all_text_contents()
    assert costs == ["other-3", "other-2", "other-1", "other-0"]
    page.get_by_role("region", name="Sessions").focus()
    for key in ("ArrowDown", "ArrowDown", "End", "ArrowUp", "Enter"):
        page.keyboard.press(key)
    expect(page.get_by_role("heading", level=1)).to_have_text("other-1")
    page.go_back()
    expect(page.locator("tbody tr:not(.spacer)")).to_have_count(4)


def test_a_search_without_results_shows_a_message(ui: Ui) -> None:
    page = ui.show("#/sessions?q=nobody")
    expect(page.get_by_role("heading", name="No session found")).to_be_visible()


def test_thousands_of_sessions_and_calls_are_scrolled_with_few_elements(
    browser: Browser, mock_server: MockServer, gateway_server: StartGateway, tmp_path: Path
) -> None:
    sessions = [records.record(f"s{number:05}", 1.79e9 + number) for number in range(1_500)]
    calls = [records.record("long", 1.795e9 + number) for number in range(1_050)]
    records.settle(tmp_path / "gateway.db", sessions + calls)
    gateway = gateway_server(mock_server.url, folder=tmp_path, **{"sessions.ttl": "3000d"})
    with browsers.opened(browser) as watched:
        page = watched.page
        page.goto(f"{gateway.url}/ui#/sessions")
        region = page.get_by_role("region", name="Sessions")
        last = page.get_by_role("link", name="s00000")
        for _ in range(40):
            region.evaluate("element => element.scrollTo(0, element.scrollHeight)")
            assert page.locator("tbody tr").count() < 100
            if last.is_visible():
                break
            page.wait_for_timeout(50)
        expect(last).to_be_visible()
        page.goto(f"{gateway.url}/ui#/session/long")
        expect(page.get_by_role("region", name="Calls of this session")).to_have_attribute("tabindex", "0")
        assert page.locator("tbody tr").count() < 100
        page.get_by_role("button", name="Load older calls").click()
        expect(page.get_by_role("button", name="All 1,050")).to_be_visible()
        expect(page.get_by_role("button", name="Load older calls")).to_be_hidden()


# --- one session --------------------------------------------------------------------------------------------------


def test_a_session_shows_its_usage_its_tools_and_its_calls_over_time(ui: Ui) -> None:
    page = ui.show("#/session/agent-1")
    expect(page).to_have_title("agent-1 · Gateway")
    shown = api(ui.gateway, "sessions/agent-1")
    total = shown["cumulative_token_usage"]["total_tokens"]
    tile = page.locator(".tile", has_text="Tokens").locator(".value")
    assert re.sub(r"\D", "", tile.inner_text()) == str(total)
    expect(page.locator(".tools-used")).to_contain_text("list_depot")
    expect(page.locator("figure canvas")).to_have_count(6)
    expect(page.locator("figure", has_text="Total tokens").locator("[role=img]")).to_have_attribute(
        "aria-label", re.compile("10 points")
    )
    page.get_by_role("button", name="By time").click()
    expect(page.locator("figure canvas")).to_have_count(6)
    expect(page.get_by_role("list", name="Response mode, by call")).to_be_visible()


def test_a_session_shows_its_agents_and_the_calls_of_one(ui: Ui) -> None:
    for agent_id, parent in (("lead", ""), ("helper", "lead")):
        headers = {"x-session-id": "with-agents", "x-claude-code-agent-id": agent_id}
        headers |= {"x-claude-code-agent-type": "Explore", "x-claude-code-parent-agent-id": parent}
        assert ui.gateway.web.post(CHAT, {"model": "mock-large", "messages": HI}, headers).status == 200
    ui.gateway.web.chat("with-agents", "tokens=10/5", model="mock-large")
    page = ui.show("#/session/with-agents")
    table = page.get_by_role("region", name="Agents of this session")
    expect(table.locator("tbody tr")).to_have_count(3)
    lead = table.locator("tbody tr", has_text="lead")
    expect(lead).to_contain_text("Explore")
    calls = page.get_by_role("region", name="Calls of this session, newest first")
    expect(calls.locator("tbody tr:not(.spacer)")).to_have_count(3)
    table.get_by_role("link", name="helper").click()
    expect(page).to_have_url(re.compile("agent=helper"))
    expect(calls.locator("tbody tr:not(.spacer)")).to_have_count(1)
    calls.locator("tbody tr:not(.spacer) a").first.press("Enter")
    expect(page.get_by_role("complementary", name="Call")).to_contain_text("helper, type Explore, started by lead")
    page.keyboard.press("Escape")
    page.get_by_role("link", name="show all agents").click()
    expect(calls.locator("tbody tr:not(.spacer)")).to_have_count(3)


def test_a_call_opens_with_its_record_and_the_trim_rule_of_each_message(ui: Ui) -> None:
    page = ui.show("#/session/agent-1")
    page.get_by_role("button", name=re.compile("^Trimmed")).click()
    page.locator("tbody tr:not(.spacer) a").first.press("Enter")
    panel = page.get_by_role("complementary", name="Call")
    calls = api(ui.gateway, "sessions/agent-1/calls")["calls"]
    call = next(call for call in calls if call["context"]["trimmed"])
    expect(panel).to_contain_text(call["call_id"])
    expect(panel).to_contain_text("upstream/mock-large")
    items = api(ui.gateway, f"calls/{call['call_id']}?explain=1")["context"]["items"]
    rules = panel.locator("tbody tr:not(.spacer) .badge").all_text_contents()
    assert rules == [item["rule"] for item in items]
    expect(page).to_have_url(re.compile(f"call={call['call_id']}"))
    page.keyboard.press("Escape")
    expect(panel).to_be_hidden()
    assert page.evaluate("document.activeElement.closest('tr') !== null"), "the focus is restored"
    ui.show(f"#/call/{call['call_id']}")
    expect(page.get_by_role("link", name="agent-1")).to_be_visible()


def test_a_refused_call_is_shown_as_not_sent(ui: Ui) -> None:
    body = {"model": "mock-large", "messages": agent(1)}
    refused = ui.gateway.web.post(CHAT, body, {"x-session-id": "poor", "x-session-budget-tokens": "1"})
    assert refused.error["code"] == "budget_exhausted"
    page = ui.show(f"#/call/{refused.header('x-gateway-request-id')}")
    facts = page.locator("main .receipt")
    expect(facts).to_contain_text(re.compile(r"Sent\s*nothing; it would have been \d+ tokens"))
    expect(facts).to_contain_text("Of the tokens to send")
    expect(facts).to_contain_text("No message was sent.")
    expect(facts).to_contain_text(re.compile(r"Allowed\s*1 token(?!s)"))
    expect(page.get_by_text("chat, chat")).to_have_count(0)
    ui.gateway.web.post(CHAT, body, {"x-session-id": "poor"})
    ui.gateway.web.post(CHAT, body, {"x-session-id": "poor", "x-session-budget-tokens": "1"})
    page = ui.show("#/session/poor")
    chart = page.locator("main .chart").filter(has_text="Context: received and sent")
    expect(chart).to_contain_text(re.compile(r"received\s*\d+\s*sent\s*\u2013"))


def test_numbers_that_round_up_to_the_next_unit_use_that_unit(ui: Ui) -> None:
    formatted_as = {
        9_999: "9,999",
        10_049: "10 k",
        999_499: "999 k",
        999_500: "1 M",
        999_999_999: "1 G",
        2.5e12: "2.50 T",
    }
    assert formatted(ui, "compact", list(formatted_as)) == list(formatted_as.values())


def test_numbers_dollars_and_shares_are_formatted_as_in_the_commands(ui: Ui) -> None:
    amounts = ["0", "0.000001", "0.0000001", "0.0123", "0.15", "0.9999", "1", "1.5", "20", "1234.5", "37037.03673"]
    assert formatted(ui, "usd", amounts) == [numbers.cost(amount) for amount in amounts]
    whole = [0, 7, 1_500, 12_345, 9_007_199_254_740_991]
    assert formatted(ui, "number", whole) == [f"{number:,}" for number in whole]
    shares = [0, 0.004, 0.5, 1, 1851.852]
    assert formatted(ui, "percent", shares) == [numbers.share(share) for share in shares]


def formatted(ui: Ui, function: str, values: Sequence[object]) -> list[str]:
    """Return the results of a function of the dashboard's format.js for these values."""
    ui.show("#/")
    shown = ui.page.evaluate(
        """([name, values]) => import(document.querySelector("script[type=module]").src.replace("app.js", "format.js"))
            .then(format => values.map(value => format[name](value)))""",
        [function, list(values)],
    )
    return [text.replace("\u202f", " ") for text in shown]


def test_a_new_call_of_the_session_appears_without_a_reload(ui: Ui) -> None:
    ui.gateway.web.chat("grows")
    page = ui.show("#/session/grows")
    expect(page.locator("#feed")).to_have_text("live")
    expect(page.get_by_role("button", name="All 1")).to_be_visible()
    ui.gateway.web.chat("grows")
    expect(page.get_by_role("button", name="All 2")).to_be_visible()


def test_a_session_shows_when_its_budget_is_empty(ui: Ui) -> None:
    for _ in range(3):
        ui.gateway.web.chat("burning", "tokens=990/10")
    page = ui.show("#/session/burning")
    expect(page.get_by_role("group", name="Budget", exact=True)).to_contain_text(
        re.compile(r"At this rate empty in .*, 57 calls\.")
    )


def test_a_budget_is_raised_lifted_and_restored_after_a_review_of_the_change(ui: Ui) -> None:
    ui.gateway.web.chat("spender")
    page = ui.show("#/session/spender")

    def limits() -> Any:
        return api(ui.gateway, "sessions/spender")["budget"]

    page.get_by_role("button", name="Change budget").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Tokens", exact=True).fill("-5")
    dialog.get_by_role("button", name="Review").click()
    expect(dialog.get_by_role("alert")).to_contain_text("whole number, 0 or more")
    dialog.get_by_role("button", name=re.compile("^Tokens .2$")).click()
    dialog.get_by_label("Calls").fill("1")
    dialog.get_by_role("button", name="Review").click()
    expect(dialog).to_contain_text(re.compile("Tokens: 60.000 → 120.000"))
    expect(dialog).to_contain_text("further calls are refused")
    assert limits()["tokens"] == 60_000, "nothing changes before the confirmation"
    dialog.get_by_role("button", name="Set this budget").click()
    expect(page.locator(".bars")).to_contain_text(re.compile("of 120.000"))
    assert (limits()["tokens"], limits()["calls"]) == (120_000, 1)
    page.get_by_role("button", name="Change budget").click()
    dialog.get_by_role("button", name="Remove all limits").click()
    dialog.get_by_role("button", name="Set this budget").click()
    expect(page.get_by_text("No budget: this session has no limit.")).to_be_visible()
    assert limits() is None
    page.get_by_role("button", name="Change budget").click()
    expect(dialog.locator("#budget-calls-used")).to_have_text("used 1")
    dialog.get_by_label("Calls").fill("1")
    dialog.get_by_role("button", name="Review").click()
    expect(dialog).to_contain_text("less than already used: further calls are refused")
    dialog.get_by_role("button", name="Back").click()
    dialog.get_by_role("button", name="As configured").click()
    dialog.get_by_role("button", name="Set this budget").click()
    expect(page.locator(".bars")).to_contain_text(re.compile("of 60.000"))
    assert (limits()["tokens"], limits()["calls"]) == (60_000, None)


def test_a_session_is_reset_after_a_confirmation(ui: Ui) -> None:
    ui.gateway.web.chat("again")
    page = ui.show("#/session/again")
    page.get_by_role("button", name="Reset").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    assert api(ui.gateway, "sessions/again")["calls"] == 1
    page.get_by_role("button", name="Reset").click()
    page.get_by_role("dialog").get_by_role("button", name="Reset").click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(page.locator(".tile", has_text="Calls").locator(".value").first).to_have_text("0")
    assert api(ui.gateway, "sessions/again")["calls"] == 0


def test_a_stopped_session_is_resumed_after_a_confirmation(ui: Ui) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "read_file", "arguments": "{}"}}
    turn = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "no such file"},
    ]
    messages = [{"role": "user", "content": "go"}, *turn * 6]
    assert ui.gateway.web.chat("looping", messages=messages).status == 400
    page = ui.show("#/session/looping")
    expect(page.locator(".tile", has_text="Last stop").locator(".value")).to_have_text("loop")
    page.get_by_role("button", name="Resume").click()
    page.get_by_role("dialog").get_by_role("button", name="Resume").click()
    expect(page.locator(".tile", has_text="Last stop")).to_have_count(0)
    assert ui.gateway.web.chat("looping", messages=messages).status == 200


def test_a_refused_action_shows_its_error_in_the_dialog(ui: Ui) -> None:
    ui.watched.allowed = ("403",)
    page = ui.show("#/session/agent-1")
    body = json.dumps({"error": {"code": "forbidden", "message": "This needs the admin key."}})
    page.route("**/api/sessions/agent-1/reset", lambda route: route.fulfill(status=403, body=body))
    page.get_by_role("button", name="Reset").click()
    page.get_by_role("dialog").get_by_role("button", name="Reset").click()
    expect(page.get_by_role("dialog").get_by_role("alert")).to_have_text("This needs the admin key.")


def test_a_session_with_only_failed_calls_is_shown(ui: Ui) -> None:
    ui.gateway.web.post(CHAT, b"nonsense", {"x-session-id": "in-vain"})
    page = ui.show("#/session/in-vain")
    expect(page.locator(".tile", has_text="Tokens").locator(".value")).to_have_text("0")
    expect(ui.row("invalid_request")).to_be_visible()


def test_an_unknown_session_shows_a_message(ui: Ui) -> None:
    ui.watched.allowed = ("404",)
    page = ui.show("#/session/nobody")
    expect(page.get_by_text('There is no session "nobody". Its first call may still be running')).to_be_visible()


# --- models and health --------------------------------------------------------------------------------------------


def test_models_show_prices_and_the_error_of_estimates(ui: Ui) -> None:
    page = ui.show("#/models")
    page.get_by_label("Find").fill("mock-large")
    expect(page.get_by_role("region", name="Models").locator("tbody tr:not(.spacer)")).to_have_count(1)
    expect(ui.row("mock-large")).to_contain_text("$10")
    expect(page.get_by_role("region", name=re.compile("Error of the estimates"))).to_contain_text("upstream/mock-large")
    expect(page.locator("figure canvas")).to_be_visible()


def test_health_shows_the_store_and_each_provider(ui: Ui) -> None:
    page = ui.show("#/health")
    expect(page.locator(".facts")).to_contain_text("reachable")
    expect(ui.row("upstream")).to_contain_text(re.compile("ok|not called yet"))
    expect(page.locator(".tile", has_text="Gateway")).to_contain_text("ready")
    # a process id, without separators between its thousands
    expect(page.locator(".tile", has_text="Worker")).to_contain_text(str(os.getpid()))


def test_the_audit_log_shows_changes_and_finds_those_of_a_session(ui: Ui) -> None:
    for name, tokens in (("audited-1", 70_000), ("audited-2", 80_000)):
        ui.gateway.web.send("PATCH", f"/api/sessions/{name}", {"budget": {"tokens": tokens}})
    page = ui.show("#/health")
    page.get_by_role("link", name="Audit log").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Audit log")
    expect(ui.row("audited-1")).to_contain_text("tokens 60,000 → 70,000")
    expect(ui.row("audited-1")).to_contain_text("this machine without a key")
    page.get_by_label("Find").fill("audited-2")
    expect(page.get_by_role("region", name="Changes").locator("tbody tr:not(.spacer)")).to_have_count(1)
    assert page.url.endswith("#/audit?target=audited-2")
    page.get_by_label("Find").fill("nobody")
    expect(page.get_by_text("No change found")).to_be_visible()
    page.go_back()
    expect(page.get_by_role("link", name="Health")).to_have_attribute("aria-current", "page")


# --- who may see it -----------------------------------------------------------------------------------------------


def test_a_required_key_is_requested_and_kept_only_for_the_tab(
    browser: Browser, mock_server: MockServer, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url, **{"auth.admin_key": ADMIN, "auth.keys": [{"name": "al", "key": ALICE}]})
    Web(gateway.url, {"authorization": f"Bearer {ALICE}"}).chat("mine")
    with browsers.opened(browser) as watched:
        watched.allowed = ("401", "403", "404")
        page = watched.page
        page.goto(f"{gateway.url}/ui#/sessions")
        dialog = page.get_by_role("dialog", name="A key is needed")
        dialog.get_by_label("Key").fill("no-key-of-this-gateway")
        dialog.get_by_role("button", name="Use this key").click()
        expect(dialog.get_by_role("alert")).to_contain_text("not known")
        dialog.get_by_label("Key").fill(ADMIN)
        page.keyboard.press("Enter")
        expect(page.get_by_role("link", name="al/mine")).to_be_visible()
        expect(page.locator("#feed")).to_have_text("live")
        page.get_by_role("link", name="al/mine").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("al/mine")
        page.reload()
        expect(page.get_by_role("heading", level=1)).to_have_text("al/mine")
        assert ADMIN not in page.url
        assert page.evaluate("JSON.stringify(localStorage)").count(ADMIN) == 0
        page.get_by_role("button", name="Forget key").click()
        dialog.get_by_label("Key").fill(ALICE)
        page.keyboard.press("Enter")
        page.goto(f"{gateway.url}/ui#/sessions")
        expect(page.get_by_role("link", name="mine", exact=True)).to_be_visible()
        page.get_by_role("link", name="Health").click()
        expect(page.get_by_text("This needs the admin key")).to_be_visible()
        expect(page.get_by_role("button", name="Enter a key")).to_be_visible()


def test_an_administrator_makes_changes_rotates_and_revokes_a_key(
    browser: Browser, mock_server: MockServer, gateway_server: StartGateway
) -> None:
    keys = [{"name": "al", "key": ALICE, "budget": {"calls": 4}}]
    gateway = gateway_server(mock_server.url, **{"auth.admin_key": ADMIN, "auth.keys": keys})
    admin = Web(gateway.url, {"authorization": f"Bearer {ADMIN}"})

    def key(name: str) -> Any:
        return next((one for one in admin.get("/api/keys").json["keys"] if one["name"] == name), None)

    with browsers.opened(browser) as watched:
        watched.allowed = ("400", "401")
        page = watched.page
        page.goto(f"{gateway.url}/ui#/keys")
        dialog = page.get_by_role("dialog")
        dialog.get_by_label("Key").fill(ADMIN)
        page.keyboard.press("Enter")
        page.get_by_role("button", name="New key").click()
        dialog.get_by_label("Name").fill("bob")
        dialog.get_by_label("US dollars").fill("much")
        dialog.get_by_role("button", name="Make the key").click()
        expect(dialog.get_by_role("alert")).to_contain_text("budget.usd: ")
        dialog.get_by_label("US dollars").fill("5")
        dialog.get_by_label("Refills").fill("1d")
        dialog.get_by_label("Models").fill("mock-* gpt-*")
        dialog.get_by_role("button", name="Make the key").click()
        secret = dialog.get_by_label("Key").input_value()
        dialog.get_by_role("button", name="Done").click()
        expect(page.get_by_role("link", name="bob")).to_be_visible()
        assert (key("bob")["budget"]["usd"], key("bob")["models"]) == ("5.000000", ["mock-*", "gpt-*"])
        page.get_by_role("link", name="bob").click()
        expect(page.locator(".bars")).to_contain_text("$0 of $5")
        page.get_by_role("button", name="Change").click()
        dialog.get_by_role("button", name="Review").click()
        expect(dialog.get_by_role("alert")).to_contain_text("Nothing was changed")
        dialog.get_by_label("US dollars").fill("20")
        dialog.get_by_label("Models").fill("")
        dialog.get_by_role("button", name="Review").click()
        expect(dialog).to_contain_text("US dollars: 5 → 20; Models: mock-* gpt-* → none.")
        assert key("bob")["budget"]["usd"] == "5.000000", "nothing changes before the confirmation"
        dialog.get_by_role("button", name="Change the key").click()
        expect(page.locator(".bars")).to_contain_text("$0 of $20")
        assert (key("bob")["window"], key("bob")["models"]) == ("1d", [])
        page.get_by_role("button", name="Rotate").click()
        dialog.get_by_role("button", name="Rotate").click()
        new = dialog.get_by_label("Key").input_value()
        assert new.startswith("gw-")
        assert new != secret
        dialog.get_by_role("button", name="Done").click()
        expect(page.get_by_text("accepted until")).to_be_visible()
        page.get_by_role("button", name="Revoke").click()
        dialog.get_by_role("button", name="Revoke").click()
        expect(page.get_by_role("link", name="al", exact=True)).to_be_visible()
        assert key("bob") is None
        page.get_by_role("button", name="Forget key").click()
        dialog.get_by_label("Key").fill(ALICE)
        page.keyboard.press("Enter")
        page.get_by_role("link", name="al", exact=True).click()
        expect(page.locator(".bars")).to_contain_text("0 of 4")
        expect(page.get_by_role("button", name="Change")).to_have_count(0)


# --- layout and keyboard ------------------------------------------------------------------------------------------


def test_names_chosen_by_clients_never_become_markup(ui: Ui) -> None:
    tool = {"type": "function", "function": {"name": EVIL, "parameters": {"type": "object", "properties": {}}}}
    body = {"model": EVIL, "messages": [{"role": "user", "content": EVIL}], "tools": [tool], "tool_choice": "required"}
    ui.gateway.web.post(CHAT, body, {"x-session-id": "evil"})
    (call,) = api(ui.gateway, "sessions/evil/calls")["calls"]
    assert (call["model"], call["tools"]) == (EVIL, [EVIL])
    places = ("#/", "#/session/evil", f"#/session/evil?call={call['call_id']}", f"#/call/{call['call_id']}", "#/models")
    for place in places:
        page = ui.show(place)
        expect(page.locator("main", has_text="<img").first).to_be_visible()
        assert page.locator("main img, main script").count() == 0, place
    ui.show(f"#/sessions?q={EVIL}")
    assert ui.page.locator("main img").count() == 0
    expect(ui.page.get_by_label("Find")).to_have_value(EVIL)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_for_phones_does_not_scroll_sideways_in_either_colour_scheme(
    browser: Browser, site: GatewayThread, scheme: Any
) -> None:
    with browsers.opened(browser, viewport={"width": 390, "height": 800}, color_scheme=scheme) as watched:
        ui = Ui(watched.page, watched, site)
        for place in VIEWS:
            page = ui.show(place)
            width = page.evaluate("document.documentElement.scrollWidth")
            assert width <= 390, f"{place} is {width} wide"
            assert page.evaluate("document.documentElement.dataset.theme") == scheme
        red = page.evaluate("getComputedStyle(document.documentElement).backgroundColor.match(/\\d+/)[0] * 1")
        assert (red < 64) == (scheme == "dark")


@pytest.mark.parametrize("width", [780, 1000, 1180])
def test_names_are_readable_in_windows_of_medium_width(ui: Ui, width: int) -> None:
    ui.page.set_viewport_size({"width": width, "height": 700})
    for place, column in (
        ("#/", "Session"),
        ("#/sessions", "Session"),
        ("#/session/agent-1", "Model"),
        ("#/models", "Model"),
    ):
        page = ui.show(place)
        head = page.locator("main .table:not(.short)").get_by_role("columnheader", name=column, exact=True)
        expect(head).to_be_visible()
        assert (head.bounding_box() or {"width": 0})["width"] >= 200, place
        assert page.evaluate("document.documentElement.scrollWidth") <= width, place


def test_the_chosen_colour_scheme_survives_a_reload(ui: Ui) -> None:
    page = ui.show("#/session/agent-1")
    page.get_by_label("Colours").select_option("dark")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    expect(page.locator("figure canvas")).to_have_count(6)
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_every_control_is_reached_by_tab_with_a_visible_focus(ui: Ui) -> None:
    page = ui.show("#/session/agent-1")
    wanted = page.locator("a:visible, button:visible, select:visible, input:visible").count()
    page.evaluate("document.activeElement.blur()")
    seen = set()
    for _ in range(wanted + 20):
        page.keyboard.press("Tab")
        name, outline = page.evaluate(
            "(() => { const e = document.activeElement; return [e.id + e.textContent.slice(0, 30) + (e.href ?? ''),"
            " getComputedStyle(e).outlineStyle] })()"
        )
        if page.evaluate("document.activeElement === document.body"):
            break
        seen.add(name)
        assert outline != "none", name
    assert any("Change budget" in name for name in seen)
    assert any("Trimmed" in name for name in seen)
    assert any("#/session/agent-1?call=" in name for name in seen)


def violations(page: Page, place: str, options: str = "{resultTypes: ['violations']}") -> list[str]:
    """Return what axe finds on a page."""
    page.add_script_tag(path=AXE)
    found = []
    for problem in page.evaluate(f"axe.run({options})")["violations"]:
        nodes = [node["html"][:120] for node in problem["nodes"]][:3]
        found.append(f"{place}: {problem['impact']}: {problem['id']}: {nodes}")
    return found


@pytest.mark.parametrize("width", [390, 1280])
def test_axe_finds_nothing_in_the_views_and_dialogs_of_keys_and_phones_need_not_scroll(
    browser: Browser, mock_server: MockServer, gateway_server: StartGateway, width: int
) -> None:
    keys = [{"name": "al", "key": ALICE, "models": ["mock-*"], "budget": {"usd": 4, "window": "1d"}}]
    gateway = gateway_server(mock_server.url, **{"auth.keys": keys})
    made = {"name": "team", "budget": {"tokens": 9}, "expires": "30d"}
    assert gateway.web.post("/api/keys", made).status == 201
    size = {"width": width, "height": 800}
    with browsers.opened(browser, bypass_csp=True, viewport=size) as watched:
        ui, found = Ui(watched.page, watched, gateway), list[str]()
        for place, button in (("#/keys", "New key"), ("#/keys/team", "Change"), ("#/keys/team", "Rotate")):
            page = ui.show(place)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, place
            found += violations(page, place)
            page.get_by_role("button", name=button).click()
            found += violations(page, f"{place} {button}")
            page.keyboard.press("Escape")
        assert found == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(browser: Browser, site: GatewayThread, scheme: Any) -> None:
    call = api(site, "sessions/agent-1/calls")["calls"][0]["call_id"]
    # The page's policy would block the script of axe. All other tests check the policy.
    with browsers.opened(browser, color_scheme=scheme, bypass_csp=True) as watched:
        ui = Ui(watched.page, watched, site)
        found = []
        # In the dark scheme, only the colours differ.
        options = "{resultTypes: ['violations']" + (", runOnly: ['color-contrast']}" if scheme == "dark" else "}")
        for place in (*(VIEWS[1:] if scheme == "light" else ()), f"#/session/agent-1?call={call}"):
            found += violations(ui.show(place), place, options)
        assert [line for line in found if ": serious:" in line or ": critical:" in line] == []
