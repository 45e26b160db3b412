"""Take screenshots of the dashboard for the documents, and measure how fast it is drawn.

    python bench/dashboard_shots.py [--out docs/img] [--all] [--serve]

A gateway in front of the built-in provider is filled by agents that call tools until their budgets are almost used up.
Its records are spread over the last twenty minutes, and Chromium takes the screenshots of docs/guides/dashboard.md.
With `--all`, it takes each view in wide and small windows, light and dark. `--serve` only fills the gateway and waits,
for a manual check. Needs Chromium (apt-get install chromium) and `pip install '.[dev]'`.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from playwright.sync_api import Browser, Page, sync_playwright

from gateway import config
from gateway.app import worker
from gateway.cli.serve import only_provider
from gateway.core.ids import call_id
from gateway.core.record import CallRecord
from gateway.mock.server import MockServer
from gateway.server.serving import ServerThread, make_config
from gateway.stores.sqlite import SqliteStore

ROOT = Path(__file__).parent.parent
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SPREAD_S = 1150
WIDE, NARROW = (1360, 860), (390, 844)
MODELS = [
    {"match": "mock-large", "provider": "mock", "price": {"input": 1.25, "output": 10, "cache_read": 0.125}},
    {"match": "mock-small", "provider": "mock", "price": {"input": 0.25, "output": 2, "cache_read": 0.025}},
]
#: screenshots of docs/guides/dashboard.md
SHOWN = {
    ("live", "wide", "dark"),
    ("sessions", "wide", "light"),
    ("session", "wide", "light"),
    ("call", "wide", "dark"),
    ("models", "wide", "light"),
    ("health", "wide", "light"),
    ("session", "narrow", "light"),
    ("live", "narrow", "dark"),
}
TOOLS = ("search", "read_file", "run_tests", "write_file")


@dataclass(frozen=True)
class Agent:
    """A session to play. `lines`: maximum lines of a tool result; `fails`: the provider fails every so many calls."""

    name: str
    steps: int
    lines: int
    model: str = "mock-large"
    fails: int = 0


AGENTS = (
    Agent("coder.refactor-auth", 70, 60),
    Agent("research-2026-11", 44, 90),
    Agent("support:4711", 26, 14, "mock-small"),
    Agent("nightly-report", 30, 40, fails=9),
    Agent("crawler-08", 18, 110),
    Agent("triage:inbox", 22, 8, "mock-small"),
    Agent("migration.plan", 12, 50),
    Agent("eval-run-17", 34, 20, "mock-small", fails=11),
    Agent("docs.rewrite", 9, 30),
    Agent("notebook-5f2c", 5, 12, "mock-small"),
)


def play(url: str, agent: Agent, chance: random.Random) -> None:
    """Call the model and its tools until the steps or the budget are used up."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You work on a code base and say little. " * 12},
        {"role": "user", "content": f"Please see to {agent.name}: find out what is wrong, and mend it."},
    ]
    for step in range(agent.steps):
        tool = TOOLS[min(len(TOOLS) - 1, int(chance.random() ** 1.6 * len(TOOLS)))]
        offered = [{"type": "function", "function": {"name": tool, "parameters": {"type": "object", "properties": {}}}}]
        is_broken = agent.fails and step % agent.fails == agent.fails - 1
        headers = {"x-session-id": agent.name, "content-type": "application/json"}
        headers["x-mock"] = "status=500" if is_broken else f"chunks={chance.randint(10, 160)}"
        wants_tool = step % 4 != 3
        body = {
            "model": agent.model,
            "messages": messages,
            "max_tokens": 400,
            "stream": not wants_tool,
            "tool_choice": "required" if wants_tool else "none",
            "tools": offered,
        }
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        content = answer.read()
        if answer.status != 200:
            continue
        if wants_tool:
            message = json.loads(content)["choices"][0]["message"]
            messages.append({key: value for key, value in message.items() if value is not None})
            lines = [result_line(tool, step, line, chance) for line in range(chance.randint(3, agent.lines))]
            made = message.get("tool_calls") or ()
            messages += [{"role": "tool", "tool_call_id": call["id"], "content": "\n".join(lines)} for call in made]
        else:
            messages.append({"role": "assistant", "content": "I looked at it and go on. " * chance.randint(1, 9)})
            messages.append({"role": "user", "content": "Go on."})


def result_line(tool: str, step: int, line: int, chance: random.Random) -> str:
    return f"{tool}: src/part_{step}/module_{line}.py line {chance.randint(1, 900)} returns {chance.randint(0, 10**6)}"


def settings(store: Path, provider: str) -> config.Loaded:
    flags = {
        **only_provider("mock", provider, auth="none", retries=0),
        "models": MODELS,
        "store.url": f"sqlite://{store}",
        "context.budget": 14_000,
        "budget.tokens": 500_000,
        "telemetry.log.level": "error",
    }
    return config.load(environment={}, flags=flags, search=False)


@contextmanager
def served(store: Path, provider: str) -> Iterator[str]:
    app = worker.build_app(lambda: settings(store, provider))
    with ServerThread(make_config(app, max_head_bytes=65536, max_body=2**26, head_timeout_s=20, grace_s=1)) as server:
        yield server.url


async def spread(source: Path, target: Path, chance: random.Random) -> None:
    """Copy the records of one store to another, as if the sessions had run concurrently over twenty minutes."""
    old, new = SqliteStore(source), SqliteStore(target)
    page = await old.sessions(None, 1000, None, "recent")
    now = time.time()
    moved: list[CallRecord] = []
    for view in page.sessions:
        records = list(reversed(await old.calls(view.key, 1000)))
        begin = now - SPREAD_S * (0.35 + 0.65 * chance.random())
        end = now - chance.random() ** 2 * 240
        for index, record in enumerate(records):
            at = begin + (end - begin) * (index + chance.random()) / len(records)
            slower = 0.4 + chance.random() * 2.5
            moved.append(
                replace(
                    record,
                    call_id=call_id(int(at * 1000), os.urandom(10)),
                    started_at=at,
                    duration_s=record.duration_s + slower,
                    first_byte_s=(record.first_byte_s or 0) + slower / 3,
                )
            )
    for record in sorted(moved, key=lambda one: one.started_at):
        await new.settle(record)
    await old.aclose()
    await new.aclose()


@contextmanager
def filled() -> Iterator[str]:
    """Yield the address of a gateway with records."""
    chance = random.Random(7)
    with tempfile.TemporaryDirectory() as folder, MockServer() as provider:
        played, shown = Path(folder) / "played.db", Path(folder) / "gateway.db"
        with served(played, provider.url) as url:
            for agent in AGENTS:
                play(url, agent, chance)
        asyncio.run(spread(played, shown, chance))
        with served(shown, provider.url) as url:
            yield url


def browser_path() -> str:
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        raise SystemExit("Chromium is missing: apt-get install chromium")
    return found


def newest_trimmed(url: str, session: str) -> str:
    """Return the id of a session's newest trimmed call."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    connection.request("GET", f"/api/sessions/{session}/calls?limit=200")
    calls = json.loads(connection.getresponse().read())["calls"]
    return str(next(call["call_id"] for call in calls if call["context"] and call["context"]["trimmed"]))


def shoot(browser: Browser, url: str, out: Path, *, everything: bool) -> None:
    first = AGENTS[0].name
    trimmed = newest_trimmed(url, first)
    places = {
        "live": "#/",
        "sessions": "#/sessions",
        "session": f"#/session/{first}",
        "call": f"#/session/{first}?call={trimmed}",
        "models": "#/models?q=mock",
        "health": "#/health",
    }
    shapes = {"wide": WIDE, "narrow": NARROW}
    themes: tuple[Literal["light", "dark"], ...] = ("light", "dark")
    for name, shape, theme in product(places, shapes, themes):
        if not everything and (name, shape, theme) not in SHOWN:
            continue
        width, height = shapes[shape]
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=theme)
        page.goto(f"{url}/ui{places[name]}")
        page.wait_for_selector("main h1, main h2")
        settle(page)
        file = out / f"dashboard-{name}-{shape}-{theme}.png"
        # Remove the empty space at the bottom.
        bottom = page.locator("main").evaluate("element => element.getBoundingClientRect().bottom")
        page.screenshot(path=file, clip={"x": 0, "y": 0, "width": width, "height": min(height, bottom)})
        print(f"{file.name}: {file.stat().st_size / 1024:.0f} KiB")
        page.close()


def settle(page: Page) -> None:
    page.wait_for_load_state("load")
    page.locator("main .loading").first.wait_for(state="detached")
    page.wait_for_timeout(400)


def measure(browser: Browser, url: str) -> None:
    """Print first paint and size, in a new context without a cache."""
    for name in ("#/", "#/sessions"):
        paints, sizes = [], []
        for _ in range(5):
            context = browser.new_context(viewport={"width": WIDE[0], "height": WIDE[1]})
            page = context.new_page()
            page.goto(f"{url}/ui{name}")
            settle(page)
            paints.append(page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"))
            sizes.append(
                page.evaluate(
                    "[performance.getEntriesByType('navigation')[0], ...performance.getEntriesByType('resource')]"
                    ".filter(e => e.name.includes('/ui')).reduce((sum, e) => sum + e.transferSize, 0)"
                )
            )
            context.close()
        print(
            f"{name}: first contentful paint {sorted(paints)[2]:.0f} ms (median of 5), {sizes[0] / 1024:.0f} KiB loaded"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "img")
    parser.add_argument("--all", action="store_true", help="each view in each shape and colour")
    parser.add_argument("--serve", action="store_true", help="only fill a gateway and wait")
    options = parser.parse_args()
    with filled() as url:
        print(f"{url}/ui", flush=True)
        if options.serve:
            threading.Event().wait()
        options.out.mkdir(parents=True, exist_ok=True)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=browser_path(), args=["--no-sandbox"])
            measure(browser, url)
            shoot(browser, url, options.out, everything=options.all)
            browser.close()


if __name__ == "__main__":
    main()
