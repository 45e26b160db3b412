"""Calls with all features of budgets at once: what sessions, agents, keys and reports count is the same."""

from __future__ import annotations

import json
import random
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from gateway.mock import Behaviour, MockProvider, MockServer
from tests.conftest import StartProcess
from tests.stores.redis_servers import RedisServer
from tests.support.gateways import GatewayProcess, until
from tests.support.receiver import Receiver, serving
from tests.support.web import HI

pytestmark = pytest.mark.long

LIMIT, AGENT_LIMIT = 600, 300
SAID: Any = HI
KEYS = {name: f"{name}-key-0123456789" for name in ("alice", "bob")}
ADMIN_KEY = "admin-key-0123456789"
ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}
BUDGET: Any = {
    "tokens": LIMIT,
    "seconds": 1_000,
    "closing": {"reserve": 0.2},
    "agents": {"*": {"tokens": AGENT_LIMIT}},
    "downgrade": {"below": 0.4, "model": "mock-tiny"},
}
#: the types of subagents by their ids
TYPES = {"a0": "Explore", "a1": "Plan"}
REFUSALS = {"budget_exhausted", "budget_busy"}


@pytest.fixture(params=["sqlite", "redis"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, str]]:
    if request.param == "sqlite":
        yield {}
        return
    redis = RedisServer(tmp_path)
    yield {"store.url": redis.url}
    redis.kill()


def call(url: str, seed: int) -> str:
    """Make a call with the SDK of some format; return the code of its error, `closing`, or an empty text."""
    chance = random.Random(seed)
    key, session = chance.choice([*KEYS.values()]), f"s{seed % 3}"
    headers = {"x-session-id": session, "x-session-tag": f"t{seed % 2}"}
    agent = chance.choice([None, None, *TYPES])
    if agent is not None:
        headers |= {"x-agent-id": agent, "x-agent-type": TYPES[agent]}
    elif chance.random() < 0.3:
        headers |= {"x-session-id": f"child-{session}", "x-parent-session-id": session}
    made: Any = {"model": "mock-small", "stream": chance.random() < 0.5}
    common: Any = {"max_retries": 0, "default_headers": headers}
    try:
        if seed % 3 == 0:
            with anthropic.Anthropic(base_url=url, auth_token=key, **common) as claude:
                raw: Any = claude.messages.with_raw_response.create(messages=SAID, max_tokens=60, **made)
                return _drained(raw)
        with openai.OpenAI(base_url=f"{url}/v1", api_key=key, **common) as client:
            if seed % 3 == 1:
                return _drained(client.chat.completions.with_raw_response.create(messages=SAID, max_tokens=60, **made))
            return _drained(client.responses.with_raw_response.create(input="hi", max_output_tokens=60, **made))
    except (openai.APIStatusError, anthropic.APIStatusError) as error:
        body: Any = error.body
        return str(body.get("error", body)["code"])


def _drained(raw: Any) -> str:
    response = raw.parse()
    if not hasattr(response, "model_dump"):
        assert [*response]
    return "closing" if raw.headers.get("x-session-closing-call") else ""


def sessions(gateway: GatewayProcess, name: str) -> list[Any]:
    """Return all sessions of a client key, with their agents, once no call holds budget."""
    headers = {"authorization": f"Bearer {KEYS[name]}"}
    rows = [one["id"] for one in gateway.web.get("/api/sessions?limit=100", headers).json["sessions"]]
    found = [gateway.web.get(f"/api/sessions/{row}", headers).json for row in rows]
    return found if all(one["budget"]["held"] == one["calls_under_way"] == 0 for one in found) else []


def used(row: Any) -> int:
    return int(row["cumulative_token_usage"]["total_tokens"])


def usage(gateway: GatewayProcess, label: str) -> dict[str, int]:
    report = gateway.web.get(f"/api/usage?group_by={label}&bucket=total", ADMIN).json["usage"]
    return {row[label]: row["total_tokens"] for row in report}


def test_sums_agree_and_no_limit_is_exceeded_while_settings_change(
    mock_server: MockServer, mock: MockProvider, gateway_process: StartProcess, store: dict[str, str]
) -> None:
    with serving(Receiver()) as receiver:
        flags: dict[str, object] = {
            "budget": BUDGET,
            "runaway": {"loop": {"refuse": 30}},
            "context.cache": "auto",
            "auth": {"keys": [{"name": name, "key": key} for name, key in KEYS.items()], "admin_key": ADMIN_KEY},
            "callbacks.webhooks": [{"url": receiver.url, "events": ["on_budget"], "timeout_s": 5}],
            "server.workers": 2,
            **store,
        }
        gateway = gateway_process(mock_server.url, **flags)
        mock.behaviour = Behaviour(tokens=(20, 15), delay=0.005)
        settings = json.loads(gateway.file.read_text())
        outcomes: Counter[str] = Counter()
        with ThreadPoolExecutor(8) as threads:
            for batch, budget in enumerate([BUDGET, {"tokens": LIMIT}, BUDGET]):
                gateway.file.write_text(json.dumps({**settings, "budget": budget}))
                gateway.signal(signal.SIGHUP)
                outcomes += Counter(threads.map(partial(call, gateway.url), range(batch * 80, batch * 80 + 80)))
        assert set(outcomes) <= {"", "closing", *REFUSALS}, outcomes
        assert outcomes[""] > 0 < outcomes["budget_exhausted"]
        found = {name: until(partial(sessions, gateway, name)) for name in KEYS}
        assert usage(gateway, "key") == {name: sum(map(used, rows)) for name, rows in found.items()}
        by_type: Counter[str] = Counter()
        for row in [row for rows in found.values() for row in rows]:
            agents = row["agents"]
            assert row["budget"]["used"]["tokens"] <= LIMIT
            assert not agents or sum(map(used, agents)) == used(row)
            by_type[""] += 0 if agents else used(row)
            for agent in agents:
                by_type[agent["type"] or ""] += used(agent)
        assert usage(gateway, "agent") == dict(by_type)
        until(lambda: receiver.requests)
        bodies = {one.headers["webhook-id"]: json.loads(one.body)["data"] for one in receiver.requests}
        announced = Counter((one["name"], one["threshold"]) for one in bodies.values())
        assert set(announced.values()) == {1}
