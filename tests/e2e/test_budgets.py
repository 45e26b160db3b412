"""Budgets bind concurrent calls; reservations are released, and a raised budget applies at once."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import openai
import pytest

from gateway.core.counting.heuristic import estimate_tokens, rounded_up
from gateway.mock import Behaviour, MockProvider, MockServer, Turn
from tests.conftest import StartGateway, StartProcess, StartUpstream
from tests.support.gateways import GatewayProcess, GatewayThread, until
from tests.support.scripted import SSE_HEAD, Connection, Held, chunk, completion
from tests.support.web import CHAT, HI, Reply, Web, chat_bytes, connect, parse_usage

pytestmark = pytest.mark.long

PRICED = [{"match": "priced", "provider": "upstream", "price": {"input": 100, "output": 1000}}]
ROWS = json.dumps([{"id": number, "name": f"item {number}", "state": "open"} for number in range(60)])


def call(web: Web, session: str, headers: dict[str, str] | None = None, **fields: Any) -> Reply:
    body = {"model": "mock-small", "messages": HI, "max_tokens": 10, **fields}
    return web.post(CHAT, body, {"x-session-id": session, **(headers or {})})


def budget(web: Web, session: str) -> Any:
    return web.get(f"/api/sessions/{session}").json["budget"]


def sent(mock: MockProvider) -> Any:
    """Return the body of the last request that reached the provider."""
    return json.loads(mock.calls[-1].body)


def holds(store: Path) -> int:
    """Return the number of open holds."""
    with contextlib.closing(sqlite3.connect(store)) as db:
        (number,) = db.execute("SELECT count(*) FROM holds").fetchone()
    return int(number)


def noted(store: Path) -> int:
    """Return the output tokens that were noted with the only open hold."""
    with contextlib.closing(sqlite3.connect(store)) as db:
        (number,) = db.execute("SELECT max(noted) FROM holds").fetchone()
    return int(number or 0)


def limit(gateway: GatewayThread, session: str, **limits: object) -> None:
    reply = gateway.web.send("PATCH", f"/api/sessions/{session}", {"budget": limits})
    assert reply.status == 200, reply.body


@pytest.fixture
def small(mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway) -> GatewayThread:
    """Return a gateway with a budget of 1,000 tokens per session."""
    return gateway_server(mock_server.url, **{"budget.tokens": 1_000})


# --- a session until its budget is exhausted ------------------------------------------------------------------------------


def test_a_session_shortens_its_results_then_is_refused_and_continues_after_a_raise(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url, **{"budget.tokens": 40_000})
    call_made = {"id": "c1", "type": "function", "function": {"name": "search", "arguments": "{}"}}
    messages: Any = [
        {"role": "user", "content": "look it up"},
        {"role": "assistant", "content": None, "tool_calls": [call_made]},
        {"role": "tool", "tool_call_id": "c1", "content": ROWS},
        {"role": "assistant", "content": "There are some."},
        {"role": "user", "content": "and now?"},
    ]
    seen: dict[str, str] = {}
    with openai.OpenAI(
        base_url=gateway.base_url, api_key="any", max_retries=0, default_headers={"x-session-id": "long"}
    ) as client:
        refused = None
        for _ in range(200):
            try:
                raw = client.chat.completions.with_raw_response.create(model="mock-small", messages=messages)
            except openai.BadRequestError as error:
                refused = error
                break
            left = int(raw.headers["x-session-budget-remaining-tokens"])
            mode = raw.headers["x-response-mode"]
            if mode not in seen:
                seen[mode] = sent(mock)["messages"][2]["content"]
            assert left + parse_usage(raw.headers["x-session-cumulative-token-usage"])[2] == 40_000
            if left < 8_000:
                assert float(raw.headers["x-session-budget-warning"]) >= 0.8
        assert refused is not None
        assert refused.code == "budget_exhausted"
        assert refused.response.headers["x-should-retry"] == "false"
        arithmetic = refused.body["budget"]  # type: ignore[index]
        assert arithmetic["limit"] == 40_000
        assert arithmetic["used"] + arithmetic["held"] + arithmetic["needed"] > 40_000
        assert list(seen) == ["raw", "table", "summary", "handle_only"]
        assert seen["raw"] == ROWS
        assert "|name|" in seen["table"]
        assert len(seen["handle_only"]) < len(seen["summary"]) < len(seen["table"]) < len(ROWS)
        handle = seen["handle_only"].rpartition("/")[2].rstrip("]")
        assert gateway.web.get(f"/api/results/{handle}").body.decode() == ROWS
        limit(gateway, "long", tokens=200_000)
        raw = client.chat.completions.with_raw_response.create(model="mock-small", messages=messages)
        assert raw.headers["x-response-mode"] == "raw"
    view = gateway.web.get("/api/sessions/long").json
    assert view["budget"]["held"] == 0
    assert view["cumulative_token_usage"]["total_tokens"] == view["budget"]["used"]["tokens"]


def test_a_refusal_names_the_usage_the_limit_and_the_remedy(small: GatewayThread) -> None:
    reply = call(small.web, "s", messages=[{"role": "user", "content": "word " * 2_000}])
    assert (reply.status, reply.error["code"], reply.error["type"]) == (400, "budget_exhausted", "budget_exceeded")
    assert 'Session "s" has used 0 of its 1,000 tokens, and this call needs 2,' in reply.error["message"]
    assert "gateway sessions budget s 5" in reply.error["message"]
    assert reply.header("x-session-cumulative-total-tokens") == "0"
    assert reply.header("x-session-budget-remaining-tokens") == "1000"


# --- concurrent calls -----------------------------------------------------------------------------------------------------


def test_concurrent_calls_never_exceed_the_budget(small: GatewayThread, mock: MockProvider) -> None:
    mock.behaviour = Behaviour(delay=0.05)
    with ThreadPoolExecutor(32) as pool:
        replies = list(pool.map(lambda _: call(small.web, "many", max_tokens=60), range(96)))
    statuses = {reply.status for reply in replies}
    assert 200 in statuses
    assert statuses <= {200, 400, 429}
    for reply in replies:
        if reply.status == 429:
            assert reply.error["code"] == "budget_busy"
            assert (reply.header("retry-after"), reply.header("x-should-retry")) == ("1", "true")
    view = small.web.get("/api/sessions/many").json
    assert view["cumulative_token_usage"]["total_tokens"] == mock.billed().total_tokens <= 1_000
    assert view["budget"]["held"] == 0


@pytest.mark.parametrize("given", ["word " * 300, [7] * 300, [[7] * 100] * 3], ids=["text", "ids", "lists of ids"])
def test_concurrent_embeddings_never_exceed_the_budget(small: GatewayThread, mock: MockProvider, given: object) -> None:
    mock.behaviour = Behaviour(delay=0.05)
    body = {"model": "mock-embed", "input": given}
    with ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(lambda _: small.web.post("/v1/embeddings", body, {"x-session-id": "many"}), range(32)))
    assert {reply.status for reply in replies} >= {200, 429}
    assert mock.billed().total_tokens <= 1_000


def test_tokens_held_by_a_running_call_make_the_budget_busy_and_not_exhausted(
    byte_server: StartUpstream, gateway_server: StartGateway
) -> None:
    held = Held()
    gateway = gateway_server(byte_server(held).url, **{"budget.tokens": 1_000})
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(call, gateway.web, "s", max_tokens=950)
        until(lambda: holds(gateway.store))
        second = call(gateway.web, "s", max_tokens=400)
        held.release()
        assert first.result().status == 200
    assert second.error["code"] == "budget_busy"
    assert "running calls have reserved" in second.error["message"]
    assert call(gateway.web, "s", max_tokens=100).status == 200


@pytest.mark.parametrize("fault", ["status=500", "die=0", "html=1"])
def test_a_failed_call_releases_its_reservation(small: GatewayThread, fault: str) -> None:
    for _ in range(3):
        assert call(small.web, "s", {"x-mock": fault}, max_tokens=900).status >= 500
    assert holds(small.store) == 0
    reply = call(small.web, "s", max_tokens=900)
    assert reply.status == 200


# --- output limits --------------------------------------------------------------------------------------------------------


def test_the_output_limit_of_a_call_is_lowered_to_the_remaining_budget(
    small: GatewayThread, mock: MockProvider
) -> None:
    mock.push(Turn(text="word " * 3_000))
    reply = call(small.web, "s", max_tokens=5_000)
    assert reply.status == 200
    assert 900 < sent(mock)["max_tokens"] < 1_000
    assert reply.json["choices"][0]["finish_reason"] == "length"
    assert reply.json["usage"]["total_tokens"] <= 1_000
    assert call(small.web, "s").error["code"] == "budget_exhausted"


@pytest.mark.parametrize(("tokens", "status"), [(8_000, 200), (1_000, 400)])
def test_a_thinking_budget_stays_below_the_lowered_output_limit(
    tokens: int, status: int, gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider
) -> None:
    web = gateway_server(mock_server.url, **{"budget.tokens": tokens}).web
    before = len(mock.calls)
    thinking = {"type": "enabled", "budget_tokens": 31_999}
    body = {"model": "claude-mock", "max_tokens": 32_000, "thinking": thinking, "messages": HI}
    answer = web.post("/v1/messages", body, {"x-session-id": "s"})
    assert answer.status == status
    bodies = [json.loads(call.body) for call in mock.calls[before:]]
    if status == 200:
        assert 1_024 <= bodies[0]["thinking"]["budget_tokens"] < bodies[0]["max_tokens"] < tokens
    else:
        assert (answer.error["code"], bodies) == ("budget_exhausted", [])


def test_without_clamping_a_call_that_could_exceed_the_budget_is_refused(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url, **{"budget.tokens": 1_000, "budget.clamp_output": False})
    assert call(gateway.web, "s", max_tokens=5_000).error["code"] == "budget_exhausted"
    assert call(gateway.web, "s", max_tokens=500).status == 200
    assert sent(mock)["max_tokens"] == 500


def test_all_choices_of_a_call_share_the_reservation(small: GatewayThread, mock: MockProvider) -> None:
    assert call(small.web, "s", n=4, max_tokens=400).status == 200
    assert 200 < sent(mock)["max_tokens"] < 250


def test_a_call_without_an_output_limit_gets_the_remaining_budget_as_limit(
    small: GatewayThread, mock: MockProvider
) -> None:
    assert call(small.web, "s", max_tokens=None).status == 200
    assert 900 < sent(mock)["max_tokens"] < 1_000


def test_a_request_without_a_budget_is_unchanged(gateway: GatewayThread, session: str, mock: MockProvider) -> None:
    body = b'{"model": "mock-small",  "messages": [{"role":"user","content":"hi"}], "max_tokens": 9000 }'
    reply = gateway.web.send("POST", CHAT, body, {"x-session-id": session})
    assert reply.status == 200
    assert mock.calls[-1].body == body
    assert reply.header("x-session-budget-limit-tokens") is None


def test_a_stream_without_an_output_limit_reserves_more_while_it_runs(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url, models=GROWS, **{"budget.tokens": 20_000})
    mock.behaviour = Behaviour(chunks=4_000, interval=0.0008)
    reply = call(gateway.web, "s", max_tokens=None, stream=True)
    assert reply.status == 200
    assert reply.data_lines[-1] == "[DONE]"
    assert reply.totals[2] == mock.billed().total_tokens > 3_000
    assert reply.comments["x-session-budget-remaining-tokens"] == str(20_000 - reply.totals[2])


def test_a_stream_that_cannot_reserve_more_ends_with_finish_reason_length(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    flags: dict[str, object] = {"budget.tokens": 6_000, "sessions.on_disconnect": "cancel"}
    gateway = gateway_server(mock_server.url, models=GROWS, **flags)
    body = json.dumps({"model": "mock-small", "messages": HI, "max_tokens": 3_800}).encode()
    with ThreadPoolExecutor(1) as pool, connect(gateway.url) as other:
        slow = {"x-mock": "chunks=6000;interval=0.001"}
        stream = pool.submit(call, gateway.web, "s", slow, max_tokens=None, stream=True)
        until(lambda: holds(gateway.store))
        # Another call reserves the rest, so that the reservation of the stream cannot grow.
        other.sendall(chat_bytes(body, b"x-session-id: s", b"x-mock: hang=1"))
        reply = stream.result()
    assert reply.data_lines[-1] == "[DONE]"
    finish = [choice["finish_reason"] for event in reply.events for choice in event["choices"]]
    assert finish[-1] == "length"
    assert reply.header("x-session-usage-source") is not None
    assert 1_000 < reply.totals[2] < 3_500


@pytest.mark.parametrize("model", ["unknown-model", "o3"])
def test_hidden_thinking_is_reserved_at_the_start(
    byte_server: StartUpstream, gateway_server: StartGateway, model: str
) -> None:
    """Thinking is billed at the end, so streams of models that may think are reserved in full at the start."""
    held = Held()
    upstream = byte_server(held)
    gateway = gateway_server(upstream.url, **{"budget.tokens": 30_000})
    with ThreadPoolExecutor(12) as pool:
        calls = [pool.submit(call, gateway.web, "s", max_tokens=None, stream=True, model=model) for _ in range(12)]
        until(lambda: len(upstream.requests) + sum(one.done() for one in calls) == 12)
        held.release()
    bodies = [one.json for one in upstream.requests]
    limits = [body.get("max_tokens", body.get("max_completion_tokens", 10**9)) for body in bodies]
    assert 4_000 < sum(limits) <= 30_000


GROWS = [{"match": "*", "provider": "upstream", "reasoning": False}]


# --- declared and configured budgets --------------------------------------------------------------------------------------


def test_a_declared_budget_lowers_the_configured_budget_and_never_raises_it(small: GatewayThread) -> None:
    low = call(small.web, "a", {"x-session-budget-tokens": "200"})
    assert low.header("x-session-budget-limit-tokens") == "200"
    high = call(small.web, "b", {"x-session-budget-tokens": "999999"})
    assert high.header("x-session-budget-limit-tokens") == "1000"
    refused = call(small.web, "c", {"x-session-budget-tokens": "5"})
    assert refused.error["code"] == "budget_exhausted"
    assert "x-session-budget-tokens" in refused.error["message"]
    assert refused.header("x-session-budget-limit-tokens") == "5"
    both = call(small.web, "d", {"x-session-budget-usd": "0.01"})
    assert both.error["code"] == "price_unknown"


@pytest.mark.parametrize("value", ["-1", "1e9", "", "ten", "1" * 40, "0x10"])
def test_a_declared_budget_that_is_not_a_number_is_refused(small: GatewayThread, value: str) -> None:
    reply = call(small.web, "s", {"x-session-budget-tokens": value})
    assert (reply.status, reply.error["param"]) == (400, "x-session-budget-tokens")


def test_a_usd_budget_works_for_models_with_a_known_price(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url, **{"budget.usd": "0.05", "models": PRICED})
    reply = call(gateway.web, "s", model="priced", max_tokens=4_000)
    assert reply.header("x-session-budget-limit-usd") == "0.050000"
    assert sent(mock)["max_tokens"] < 50, "1000 USD a million tokens: 0.05 USD are 50 of them"
    assert float(reply.header("x-session-budget-remaining-usd") or 1) < 0.05
    while reply.status == 200:
        reply = call(gateway.web, "s", model="priced")
    assert reply.error["code"] == "budget_exhausted"
    assert "--usd 0.1" in reply.error["message"]
    spent = gateway.web.get("/api/sessions/s").json
    assert float(spent["cost_usd"]) <= 0.05
    unknown = call(gateway.web, "s2", model="mock-small")
    assert (unknown.status, unknown.error["code"]) == (400, "price_unknown")


def test_a_call_budget_counts_only_successful_calls(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url, **{"budget.calls": 2})
    assert call(gateway.web, "s", {"x-mock": "status=500"}).status == 500
    assert [call(gateway.web, "s").status for _ in range(3)] == [200, 200, 400]


def test_a_budget_with_a_window_refills(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url, **{"budget.calls": 1, "budget.window": "2s"})
    assert [call(gateway.web, "s").status for _ in range(2)] == [200, 400]
    assert "refills in" in call(gateway.web, "s").error["message"]
    until(lambda: call(gateway.web, "s").status == 200)


# --- parents and keys -----------------------------------------------------------------------------------------------------


def test_a_sub_agent_is_charged_to_all_its_parents(small: GatewayThread) -> None:
    assert call(small.web, "top").status == 200
    assert call(small.web, "middle", {"x-parent-session-id": "top"}).status == 200
    used = budget(small.web, "top")["used"]["tokens"]
    leaf = call(small.web, "leaf", {"x-parent-session-id": "middle"})
    spent = parse_usage(leaf.header("x-token-usage") or "")[2]
    assert budget(small.web, "top")["used"]["tokens"] == used + spent
    # It stays a child without the header.
    assert call(small.web, "leaf").status == 200
    assert budget(small.web, "top")["used"]["tokens"] == used + 2 * spent
    limit(small, "top", tokens=1)
    refused = call(small.web, "leaf")
    assert refused.error["code"] == "budget_exhausted"
    assert 'Session "top"' in refused.error["message"]


def test_a_circle_of_parents_is_refused(small: GatewayThread) -> None:
    assert call(small.web, "self", {"x-parent-session-id": "self"}).status == 400
    assert call(small.web, "b", {"x-parent-session-id": "a"}).status == 200
    circle = call(small.web, "a", {"x-parent-session-id": "b"})
    assert (circle.status, circle.error["param"]) == (400, "x-parent-session-id")
    assert "circle" in circle.error["message"]
    other = call(small.web, "b", {"x-parent-session-id": "c"})
    assert "already has the parent" in other.error["message"]


def test_a_chain_that_grew_at_its_top_still_charges_every_parent(small: GatewayThread) -> None:
    for number in range(1, 12):
        parent = {"x-parent-session-id": f"p{number + 1}"}
        assert call(small.web, f"p{number}", parent, max_tokens=2).status == 200
    used = budget(small.web, "p12")["used"]["tokens"]
    assert call(small.web, "p4", max_tokens=2).status == 200
    assert budget(small.web, "p12")["used"]["tokens"] > used, "p12 is the eighth parent"
    grown = {"x-parent-session-id": "p2"}
    for session, named in (("p1", {}), ("p1", grown), ("p3", {}), ("new", {"x-parent-session-id": "p1"})):
        refused = call(small.web, session, named, max_tokens=2)
        assert (refused.status, refused.error["param"]) == (400, "x-parent-session-id")
        assert "9 parents or more" in refused.error["message"]
        assert "at most 8" in refused.error["message"]
    assert call(small.web, "new", {"x-parent-session-id": "p5"}, max_tokens=2).status == 200


def test_a_client_key_budget_covers_all_sessions_of_that_key_only(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    keys = [
        {"name": "alice", "key": "alice-0123456789abcdef", "budget": {"calls": 3, "window": "1d"}},
        {"name": "bob", "key": "bob-0123456789abcdef", "rpm": 2},
    ]
    gateway = gateway_server(mock_server.url, **{"auth.keys": keys})
    alice = {"authorization": "Bearer alice-0123456789abcdef"}
    assert [call(gateway.web, f"s{number}", alice).status for number in range(4)] == [200, 200, 200, 400]
    assert 'The client key "alice"' in call(gateway.web, "s9", alice).error["message"]
    bob = {"authorization": "Bearer bob-0123456789abcdef"}
    replies = [call(gateway.web, "s", bob) for _ in range(3)]
    assert [reply.status for reply in replies] == [200, 200, 429]
    assert replies[-1].error["code"] == "rate_limit_exceeded"
    assert 0 < int(replies[-1].header("retry-after") or 0) <= 60


def test_a_budget_by_month_refills_on_the_first(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    flags = {"budget.calls": 1, "budget.window": "month", "timezone": "Asia/Kathmandu"}
    gateway = gateway_server(mock_server.url, **flags)
    replies = [call(gateway.web, "s") for _ in range(2)]
    assert [reply.status for reply in replies] == [200, 400]
    resets = datetime.fromisoformat(replies[1].error["budget"]["resets_at"])
    local = resets.astimezone(ZoneInfo("Asia/Kathmandu"))
    assert (local.day, local.hour, local.minute) == (1, 0, 0)


def test_keys_of_a_group_and_all_keys_together_share_budgets(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    names = {"ann": "research", "ben": "research", "eve": None}
    keys = [{"name": name, "key": f"{name}-0123456789abcdef", "group": group} for name, group in names.items()]
    shared = {"auth.groups": {"research": {"budget": {"calls": 2}}}, "auth.budget": {"calls": 3, "window": "1d"}}
    gateway = gateway_server(mock_server.url, **{"auth.keys": keys, **shared})
    ann, ben, eve = ({"authorization": f"Bearer {key['key']}"} for key in keys)
    assert [call(gateway.web, "s", who).status for who in (ann, ben)] == [200, 200]
    group = call(gateway.web, "s", ann)
    assert (group.status, group.error["budget"]["account"]) == (400, "group")
    assert (
        'Group "research" of client keys has used 2 of its 2 calls. Raise it in auth.groups.research.budget and'
        in (group.error["message"])
    )
    assert call(gateway.web, "s", eve).status == 200
    whole = call(gateway.web, "s", eve)
    assert (whole.status, whole.error["budget"]["account"]) == (400, "all")
    assert "All client keys together have used 3 of their 3 calls. It refills in 24 h." in whole.error["message"]
    usage = gateway.web.get("/api/usage?group_by=group").json
    assert {row["group"]: row["charged_calls"] for row in usage["usage"]} == {"research": 2, "": 1}
    shown = gateway.web.get("/api/keys").json
    assert [(one["group"], one["budget"]["used"]["calls"]) for one in shown["shared"]] == [(None, 3), ("research", 2)]


# --- after a crash --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [{"budget.tokens": 100_000}, {}], ids=["budget", "no budget"])
def test_a_stream_of_a_killed_worker_is_charged_by_its_last_note_when_its_lease_ends(
    mock_server: MockServer, mock: MockProvider, gateway_process: StartProcess, limits: dict[str, object]
) -> None:
    flags: dict[str, object] = {"budget.lease_s": 5, **limits}
    gateway = gateway_process(mock_server.url, **flags)
    mock.behaviour = Behaviour(chunks=3_000, interval=0.01)
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(call, gateway.web, "s", stream=True, max_tokens=4_000)
        until(lambda: noted(gateway.store) > 50)
        gateway.signal(signal.SIGKILL)
        gateway.wait()
        stream.exception()
    delivered = noted(gateway.store)
    again = gateway_process(mock_server.url, folder=gateway.folder, **flags)
    view = until(lambda: again.web.get("/api/sessions/s").status == 200 and again.web.get("/api/sessions/s").json, 60)
    usage = view["cumulative_token_usage"]
    assert usage["output_tokens"] == delivered
    assert usage["estimated_tokens"] == usage["total_tokens"]
    assert holds(gateway.store) == 0
    (record,) = again.web.get("/api/sessions/s/calls").json["calls"]
    assert (record["outcome"], record["usage_source"]) == ("worker_lost", "estimated")


class StreamReader:
    """A stream that a client reads to its end, in a thread."""

    def __init__(self, gateway: GatewayProcess) -> None:
        self._text, self._pool = bytearray(), ThreadPoolExecutor(1)
        self._done = self._pool.submit(self._read, gateway)

    def _read(self, gateway: GatewayProcess) -> None:
        body = {"model": "mock-small", "messages": HI, "stream": True, "max_tokens": 60_000}
        with connect(gateway.url) as sock, contextlib.suppress(ConnectionError):
            sock.sendall(chat_bytes(json.dumps(body).encode(), b"x-session-id: s"))
            while piece := sock.recv(65_536):
                self._text += piece

    @property
    def tokens(self) -> int:
        """Return the received output tokens, as the gateway estimates them."""
        texts = re.findall(rb'"content":"([^"]*)"', bytes(self._text))
        return rounded_up(estimate_tokens(b"".join(texts).decode()))

    def all(self) -> int:
        """Return the received output tokens after the connection has ended."""
        self._done.result()
        self._pool.shutdown()
        return self.tokens


def charged_after_a_kill(gateway: GatewayProcess, start: Callable[[], GatewayProcess]) -> Any:
    again = start()
    view = until(lambda: (reply := again.web.get("/api/sessions/s")).status == 200 and reply.json, 60)
    until(lambda: holds(gateway.store) == 0 and not [*gateway.folder.rglob("*.journal")], 60)
    view = again.web.get("/api/sessions/s").json
    assert view["calls"] == 1
    assert view["cumulative_token_usage"]["estimated_tokens"] == view["cumulative_token_usage"]["total_tokens"]
    assert view["budget"]["used"]["tokens"] == view["cumulative_token_usage"]["total_tokens"]
    (record,) = again.web.get("/api/sessions/s/calls").json["calls"]
    assert record["outcome"] == "worker_lost"
    return view["cumulative_token_usage"]["output_tokens"]


def test_at_most_256_tokens_of_a_fast_stream_are_not_charged_after_a_kill(
    mock_server: MockServer, mock: MockProvider, gateway_process: StartProcess
) -> None:
    flags: dict[str, object] = {"budget.lease_s": 5, "budget.tokens": 100_000}
    gateway = gateway_process(mock_server.url, **flags)
    mock.behaviour = Behaviour(chunks=60_000, interval=0.0001)
    reading = StreamReader(gateway)
    until(lambda: reading.tokens > 1_000)
    gateway.signal(signal.SIGKILL)
    gateway.wait()
    original = reading.all()
    again = partial(gateway_process, mock_server.url, folder=gateway.folder, **flags)
    assert original - 256 <= charged_after_a_kill(gateway, again) <= original + 256


def charged_so_far(gateway: GatewayProcess) -> int:
    reply = gateway.web.get("/api/sessions/s")
    return int(reply.json["cumulative_token_usage"]["output_tokens"]) if reply.status == 200 else 0


def test_a_stream_assumed_lost_while_its_worker_was_stopped_is_charged_for_later_output(
    mock_server: MockServer, mock: MockProvider, gateway_process: StartProcess
) -> None:
    flags: dict[str, object] = {"budget.lease_s": 5, "budget.tokens": 100_000}
    gateway = gateway_process(mock_server.url, **flags)
    other = gateway_process(mock_server.url, **flags, **{"store.url": f"sqlite://{gateway.store}"})
    mock.behaviour = Behaviour(chunks=60_000, interval=0.005)
    reading = StreamReader(gateway)
    # Delivered output is noted every 256 tokens. Without a note, nothing is charged while the worker is stopped.
    until(lambda: reading.tokens > 700)
    gateway.signal(signal.SIGSTOP)
    assumed = until(lambda: charged_so_far(other), 60)
    gateway.signal(signal.SIGCONT)
    until(lambda: charged_so_far(other) > assumed + 1_000, what="it is charged while it continues")
    gateway.signal(signal.SIGKILL)
    gateway.wait()
    original = reading.all()
    assert original - 256 <= charged_after_a_kill(gateway, lambda: other) <= original + 256


@pytest.mark.parametrize(("on_failure", "begun"), [("closed", "before"), ("open", "before"), ("open", "meanwhile")])
def test_output_delivered_without_a_store_is_charged_after_the_worker_is_killed(
    mock_server: MockServer, mock: MockProvider, gateway_process: StartProcess, on_failure: str, begun: str
) -> None:
    flags: dict[str, object] = {"budget.lease_s": 5, "budget.tokens": 100_000, "store.timeout_ms": 250}
    flags |= {"store.on_failure": on_failure, "store.journal": "journals"}
    gateway = gateway_process(mock_server.url, **flags)
    mock.behaviour = Behaviour(chunks=60_000, interval=0.005)
    with contextlib.closing(sqlite3.connect(gateway.store, isolation_level=None)) as db:
        if begun == "meanwhile":
            db.execute("BEGIN EXCLUSIVE")
        reading = StreamReader(gateway)
        if begun == "before":
            until(lambda: holds(gateway.store) == 1)
            until(lambda: _locked(db))
        until(lambda: reading.tokens > 700)
        gateway.signal(signal.SIGKILL)
        gateway.wait()
        original = reading.all()
        db.execute("ROLLBACK")
    again = partial(gateway_process, mock_server.url, folder=gateway.folder, **flags)
    assert original - 256 <= charged_after_a_kill(gateway, again) <= original + 256


# --- changing a budget ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"", b"[]", b"{}", b"null", b'{"budget": 5}', b'{"budget": {}}', b'{"budget": {"token": 5}}', b"\xff",
        b'{"budget": {"tokens": -1}}', b'{"budget": {"tokens": 1.5}}', b'{"budget": {"tokens": true}}',
        b'{"budget": {"tokens": 1e400}}', b'{"budget": {"usd": "NaN"}}', b'{"budget": {"tokens": [1]}}',
        b'{"budget": {"tokens": 5}, "other": 1}', b'{"budget": {"tokens": 99999999999999999999}}',
        b'{"budget": {"usd": 1e15}}', b'{"budget": {"usd": "1e-99999999"}}',
        b'{"budget": {"usd": 4500000.01}}', b'{"budget": {"calls": 9007199254740993}}',
        b'{"budget": "' + b"x" * 70_000 + b'"}', b'{"budget":' + b"[" * 5_000,
    ],
)  # fmt: skip
def test_an_invalid_budget_change_is_refused_and_changes_nothing(
    gateway: GatewayThread, session: str, body: bytes
) -> None:
    call(gateway.web, session)
    reply = gateway.web.send("PATCH", f"/api/sessions/{session}", body)
    assert (reply.status, reply.error["code"]) == (400, "invalid_request"), reply.body
    assert budget(gateway.web, session) is None


def test_a_budget_can_be_set_before_the_first_call_changed_partly_and_removed(small: GatewayThread) -> None:
    limit(small, "new", tokens=5, calls=1)
    assert call(small.web, "new").error["budget"]["limit"] == 5
    limit(small, "new", tokens=500)
    assert [call(small.web, "new").status for _ in range(2)] == [200, 400]
    view = small.web.send("PATCH", "/api/sessions/new", {"budget": "default"}).json
    assert (view["budget"]["tokens"], view["budget"]["calls"]) == (1_000, None)
    limit(small, "new", tokens=None)
    assert budget(small.web, "new") is None
    assert call(small.web, "new").header("x-session-budget-limit-tokens") is None


@pytest.mark.parametrize(
    ("body", "headers", "code"),
    [
        ({"messages": HI}, {"x-context-budget": "many"}, "invalid_request"),
        (b"{", {"x-session-budget-tokens": "5", "x-parent-session-id": "above"}, "invalid_request"),
        ({"model": "nobody/has-it", "messages": HI}, {}, "model_not_found"),
    ],
    ids=["directive", "body", "model"],
)
def test_a_call_refused_before_its_accounts_are_read_still_reports_its_budget(
    body: Any, headers: dict[str, str], code: str, mock_server: MockServer, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url, budget={"tokens": 1_000}, default_provider=None)
    assert call(gateway.web, "s", model="upstream/mock-small").status == 200
    before = budget(gateway.web, "s")
    refused = gateway.web.post(CHAT, body, {"x-session-id": "s", **headers})
    assert refused.error["code"] == code
    assert refused.header("x-session-budget-limit-tokens") == "1000"
    assert refused.header("x-session-budget-remaining-tokens") == str(before["remaining"])
    assert budget(gateway.web, "s") == before, "the refused call changes no budget"
    assert gateway.web.get("/api/sessions/above").status == 404


def test_a_call_refused_without_a_session_reports_the_budget_of_its_key(
    mock_server: MockServer, gateway_server: StartGateway
) -> None:
    keys = [{"name": "alice", "key": "alice-0123456789abcdef", "budget": {"tokens": 700}}]
    gateway = gateway_server(mock_server.url, **{"auth.keys": keys})
    headers = {"authorization": "Bearer alice-0123456789abcdef", "x-context-budget": "many", "x-request-id": "mine"}
    refused = gateway.web.post(CHAT, {"model": "mock-small", "messages": HI}, headers)
    assert refused.error["param"] == "x-context-budget"
    assert refused.header("x-session-budget-remaining-tokens") == "700"
    assert (refused.header("x-gateway-request-id"), refused.header("x-session-id")) == ("mine", None)


def test_only_the_admin_key_can_change_a_budget(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    keys = [{"name": "alice", "key": "alice-0123456789abcdef"}]
    gateway = gateway_server(mock_server.url, **{"auth.keys": keys, "auth.admin_key": "admin-0123456789abcdef"})
    change = {"budget": {"tokens": 9}}
    own = {"authorization": "Bearer alice-0123456789abcdef"}
    assert gateway.web.send("PATCH", "/api/sessions/s", change, own).status == 403
    assert gateway.web.send("PATCH", "/api/sessions/s", change).status == 401
    admin = {"authorization": "Bearer admin-0123456789abcdef"}
    assert gateway.web.send("PATCH", "/api/sessions/alice/s", change, admin).status == 200
    assert call(gateway.web, "s", own, max_tokens=50).error["code"] == "budget_exhausted"


def test_resetting_a_session_restores_its_budget(small: GatewayThread) -> None:
    limit(small, "s", calls=1)
    assert [call(small.web, "s").status for _ in range(2)] == [200, 400]
    assert small.web.send("POST", "/api/sessions/s/reset").status == 200
    assert call(small.web, "s").status == 200


# --- regressions ----------------------------------------------------------------------------------------------------------


def test_a_fast_stream_is_not_ended_early(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url, models=GROWS, **{"budget.tokens": 1_000_000})
    mock.behaviour = Behaviour(chunks=60_000, interval=0.0001)
    reply = call(gateway.web, "s", max_tokens=None, stream=True, model="unknown-model")
    finish = [choice["finish_reason"] for event in reply.events for choice in event["choices"]]
    assert finish[-1] == "stop", reply.comments
    assert reply.totals[1] == 60_000


@pytest.mark.parametrize("fields", [{"max_tokens": None}, {"max_tokens": 1_500}])
def test_a_stream_reserved_in_full_is_ended_if_its_provider_far_exceeds_the_limit(
    byte_server: StartUpstream, gateway_server: StartGateway, fields: dict[str, Any]
) -> None:
    def without_end(connection: Connection) -> None:
        connection.send(SSE_HEAD)
        for _ in range(5_000):
            connection.send(chunk("four words and more " * 10))
            time.sleep(0.002)  # a model takes its time, and one read returns little

    gateway = gateway_server(byte_server(without_end).url, **{"budget.tokens": 3_000})
    reply = call(gateway.web, "s", stream=True, model="unknown-model", **fields)
    finish = [choice["finish_reason"] for event in reply.events for choice in event["choices"]]
    assert finish[-1] == "length"
    held = min(3_000, fields["max_tokens"] or 3_000)
    assert held < reply.totals[1] < 1.5 * held + 512 + 1_000, "one look"
    (record,) = gateway.web.get("/api/sessions/s/calls").json["calls"]
    assert record["outcome"] == "budget_end"


def ended(reason: str, **changes: Any) -> bytes:
    return chunk(choices=[{"index": 0, "delta": {}, "finish_reason": reason}], **changes)


@pytest.mark.parametrize("words", [1, 50])
@pytest.mark.parametrize("together", [1, 100, 100_000])
@pytest.mark.parametrize("fields", [{"max_tokens": None}, {"max_tokens": 3_000}])
def test_a_stream_that_arrives_at_once_is_ended_near_the_limit_that_its_provider_ignores(
    byte_server: StartUpstream, gateway_server: StartGateway, fields: dict[str, Any], together: int, words: int
) -> None:
    events = [chunk(" word" * words)] * (30_000 // words)

    def at_once(connection: Connection) -> None:
        connection.send(SSE_HEAD)
        with contextlib.suppress(OSError):
            for start in range(0, len(events), together):
                connection.send(b"".join(events[start : start + together]))
            connection.send(ended("stop") + b"data: [DONE]\n\n")

    gateway = gateway_server(byte_server(at_once).url, **{"budget.tokens": 4_000})
    reply = call(gateway.web, "s", stream=True, model="unknown-model", **fields)
    assert [choice["finish_reason"] for event in reply.events for choice in event["choices"]][-1] == "length"
    held = min(4_000, fields["max_tokens"] or 4_000)
    delivered = sum(event["choices"][0]["delta"].get("content", "").count(" word") for event in reply.events)
    assert 0.9 * held < delivered < 1.5 * held + 1_024


def test_usage_after_one_far_too_long_event_is_charged(
    byte_server: StartUpstream, gateway_server: StartGateway
) -> None:
    usage = {"prompt_tokens": 10, "completion_tokens": 30_000, "total_tokens": 30_010}
    events = chunk(" river" * 30_000) + ended("stop", usage=usage) + b"data: [DONE]\n\n"
    gateway = gateway_server(byte_server(lambda one: one.send(SSE_HEAD + events)).url, **{"budget.tokens": 4_000})
    reply = call(gateway.web, "s", stream=True, model="unknown-model", max_tokens=None)
    assert reply.totals[1] == 30_000
    assert reply.events[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("fields", [{"max_tokens": None}, {"max_tokens": 3_000}])
def test_a_stream_within_its_limit_is_not_ended_early_at_any_speed(
    byte_server: StartUpstream, gateway_server: StartGateway, fields: dict[str, Any]
) -> None:
    def obeys(connection: Connection) -> None:
        # Each word is one token, and is estimated as one and a half.
        limit = connection.request.json["max_tokens"]
        usage = {"prompt_tokens": 10, "completion_tokens": limit, "total_tokens": 10 + limit}
        connection.send(SSE_HEAD + chunk(" river") * limit + ended("length", usage=usage) + b"data: [DONE]\n\n")

    gateway = gateway_server(byte_server(obeys).url, **{"budget.tokens": 4_000})
    reply = call(gateway.web, "s", stream=True, model="unknown-model", **fields)
    (record,) = gateway.web.get("/api/sessions/s/calls").json["calls"]
    assert record["outcome"] == "ok"
    assert sum("river" in str(event) for event in reply.events) == record["usage"]["output_tokens"] > 2_500


def test_concurrent_streams_stay_within_the_budget_while_the_store_is_unavailable(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(
        mock_server.url, **{"budget.tokens": 8_000, "store.on_failure": "open", "store.timeout_ms": 500}
    )
    assert call(gateway.web, "s", max_tokens=5).status == 200
    with contextlib.closing(sqlite3.connect(gateway.store, isolation_level=None)) as db:
        db.execute("BEGIN EXCLUSIVE")
        call(gateway.web, "s", max_tokens=5)
        mock.behaviour = Behaviour(chunks=9_000, interval=0.0001)
        with ThreadPoolExecutor(4) as pool:
            streams = pool.map(lambda _: call(gateway.web, "s", max_tokens=None, stream=True, model="x"), range(4))
            served = [reply.status for reply in streams].count(200)
        db.execute("ROLLBACK")
    assert served > 0
    until(lambda: budget(gateway.web, "s")["used"]["calls"] == 2 + served)
    assert budget(gateway.web, "s")["used"]["tokens"] <= 8_000


def test_a_declared_budget_applies_to_its_call_only_while_the_store_is_unavailable(
    mock_server: MockServer, gateway_server: StartGateway
) -> None:
    flags = {"budget.tokens": 1_000, "store.on_failure": "open", "store.timeout_ms": 250}
    gateway = gateway_server(mock_server.url, **flags)
    low = {"x-session-budget-tokens": "80"}
    assert call(gateway.web, "s").status == 200
    assert call(gateway.web, "s", low).header("x-session-budget-limit-tokens") == "80"
    with contextlib.closing(sqlite3.connect(gateway.store, isolation_level=None)) as db:
        db.execute("BEGIN EXCLUSIVE")
        call(gateway.web, "other")
        away = call(gateway.web, "s", max_tokens=200)
        assert (away.status, away.header("x-session-budget-limit-tokens")) == (200, "1000")
        assert call(gateway.web, "s", low).header("x-session-budget-limit-tokens") == "80"
        db.execute("ROLLBACK")


@pytest.mark.parametrize("on_failure", ["closed", "open"])
def test_a_stream_without_a_store_ends_when_its_reservation_is_used_up(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway, on_failure: str
) -> None:
    flags = {"budget.tokens": 1_000_000, "store.on_failure": on_failure, "store.timeout_ms": 250}
    gateway = gateway_server(mock_server.url, models=GROWS, **flags)
    mock.behaviour = Behaviour(chunks=30_000, interval=0.0001)
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(call, gateway.web, "s", max_tokens=None, stream=True)
        until(lambda: holds(gateway.store) == 1)
        with contextlib.closing(sqlite3.connect(gateway.store, isolation_level=None)) as db:
            until(lambda: _locked(db))
            (held,) = db.execute("SELECT held_tokens FROM holds").fetchone()
            reply = stream.result()
            db.execute("ROLLBACK")
    finish = [choice["finish_reason"] for event in reply.events for choice in event["choices"]]
    assert finish[-1] == "length"
    until(lambda: (view := gateway.web.get("/api/sessions/s")).status == 200 and view.json["calls"] == 1)
    # One read returns at most some 400 KiB, if much has arrived in between.
    assert budget(gateway.web, "s")["used"]["tokens"] < held + 4_000


def _locked(db: sqlite3.Connection) -> bool:
    """Lock a store that is being written to; return True if that succeeded."""
    try:
        db.execute("BEGIN EXCLUSIVE")
    except sqlite3.OperationalError:
        return False
    return True


def test_a_call_that_would_be_clamped_alone_gets_budget_busy_and_not_exhausted(
    byte_server: StartUpstream, gateway_server: StartGateway
) -> None:
    upstream = byte_server(lambda connection: connection.whole(completion()))
    gateway = gateway_server(upstream.url, **{"budget.tokens": 1_000})
    assert call(gateway.web, "alone", max_tokens=5_000).status == 200
    upstream.script = held = Held()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(call, gateway.web, "s", max_tokens=900)
        until(lambda: holds(gateway.store))
        second = call(gateway.web, "s", max_tokens=5_000)
        held.release()
        first.result()
    assert second.error["code"] == "budget_busy"


def test_the_remedy_names_the_session_as_the_command_expects_it(
    mock_server: MockServer, gateway_server: StartGateway
) -> None:
    keys = [{"name": "alice", "key": "alice-0123456789abcdef"}]
    gateway = gateway_server(mock_server.url, **{"budget.tokens": 5, "auth.keys": keys})
    reply = call(gateway.web, "s", {"authorization": "Bearer alice-0123456789abcdef"})
    assert "gateway sessions budget alice/s " in reply.error["message"]


@pytest.mark.parametrize("path", ["responses", "completions", "messages", "embeddings"])
def test_a_body_with_a_duplicate_key_cannot_bypass_the_budget(
    small: GatewayThread, mock: MockProvider, path: str
) -> None:
    body = b'{"model": "m", "model": "m", "max_tokens": 9, "input": "' + b"word " * 3_000 + b'"}'
    reply = small.web.send("POST", f"/v1/{path}", body, {"x-session-id": "s"})
    assert (reply.status, mock.calls) == (400, [])


def test_a_call_without_a_model_cannot_bypass_a_usd_budget(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url, **{"budget.usd": "0.05"})
    reply = gateway.web.post("/v1/responses", {"input": "hi", "prompt": {"id": "p"}}, {"x-session-id": "s"})
    assert (reply.status, reply.error["code"]) == (400, "price_unknown")


def test_the_output_of_each_of_several_prompts_is_reserved(small: GatewayThread, mock: MockProvider) -> None:
    body = {"model": "m", "prompt": ["word " * 20] * 20, "max_tokens": 640}
    assert small.web.post("/v1/completions", body, {"x-session-id": "s"}).status == 200
    assert mock.billed().total_tokens <= 1_000


@pytest.mark.parametrize("limits", [{"budget.calls": 5}, {"budget.tokens": 1_000}])
def test_a_huge_output_limit_is_accepted(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway, limits: dict[str, object]
) -> None:
    gateway = gateway_server(mock_server.url, **limits)
    assert call(gateway.web, "s", max_tokens=10**30).status in (200, 400)
    assert call(gateway.web, "s").status == 200


def test_fast_concurrent_streams_stay_near_their_budget(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url, **{"budget.tokens": 20_000})
    mock.behaviour = Behaviour(chunks=12_000, interval=0.0002)
    with ThreadPoolExecutor(4) as pool:
        streams = pool.map(lambda _: call(gateway.web, "s", max_tokens=None, stream=True, model="x"), range(4))
        assert {reply.status for reply in streams} <= {200, 429}
    assert budget(gateway.web, "s")["used"]["tokens"] < 30_000, "at most the bytes of one read of each stream"
