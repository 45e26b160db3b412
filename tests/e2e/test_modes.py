"""Tool results in a stricter mode: what a model is shown, what is kept for it, and who may fetch that."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from typing import Any

import pytest

from gateway.mock import MockServer, Provider
from tests.conftest import StartGateway
from tests.support.gateways import GatewayThread
from tests.support.web import CHAT, Reply, Web

ROWS = json.dumps([{"id": number, "name": f"item {number}", "state": "open"} for number in range(80)])
TEXT = "\n".join(f"line {number}: the value of part {number} is {number * number}" for number in range(200))


def history(*results: str) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "look it up"}]
    for number, result in enumerate(results):
        made = {"id": f"c{number}", "type": "function", "function": {"name": "search", "arguments": "{}"}}
        messages.append({"role": "assistant", "content": None, "tool_calls": [made]})
        messages.append({"role": "tool", "tool_call_id": f"c{number}", "content": result, "x-kept": [1, 2]})
    return messages


def call(web: Web, session: str, mode: str, *results: str, **headers: str) -> Reply:
    body = {"model": "mock-small", "messages": history(*results), "max_tokens": 9}
    return web.post(CHAT, body, {"x-session-id": session, "x-response-mode": mode, **headers})


def sent(mock: Provider) -> list[Any]:
    messages: list[Any] = json.loads(mock.calls[-1].body)["messages"]
    return messages


def handle_in(text: str) -> str:
    return text.rpartition("GET /api/results/")[2].rstrip("]")


def test_a_call_may_ask_for_less_than_all(gateway: GatewayThread, mock: Provider, session: str) -> None:
    reply = call(gateway.web, session, "table", ROWS, TEXT)
    assert reply.header("x-response-mode") == "table"
    rows, text = sent(mock)[2], sent(mock)[4]
    assert "id|name|state" in rows["content"]
    assert rows["x-kept"] == [1, 2], "what nobody here knows survives"
    assert text["content"] == TEXT, "text is no table"
    assert sent(mock)[:2] == history(ROWS)[:2]


@pytest.mark.parametrize("mode", ["summary", "handle_only"])
def test_what_is_left_out_can_be_fetched_whole(gateway: GatewayThread, mock: Provider, session: str, mode: str) -> None:
    call(gateway.web, session, mode, ROWS, TEXT)
    for index, original in ((2, ROWS), (4, TEXT)):
        shown = sent(mock)[index]["content"]
        assert len(shown) < len(original) / 2
        answer = gateway.web.get(f"/api/results/{handle_in(shown)}")
        assert answer.body.decode() == original
        assert answer.header("content-type") == "text/plain; charset=utf-8"
        assert answer.header("x-content-type-options") == "nosniff"


def test_the_same_mode_sends_the_same_bytes_on_every_turn(gateway: GatewayThread, mock: Provider, session: str) -> None:
    call(gateway.web, session, "summary", ROWS, TEXT)
    first = sent(mock)
    call(gateway.web, session, "summary", ROWS, TEXT, ROWS + " ")
    assert sent(mock)[: len(first)] == first


def test_raw_is_forwarded_byte_for_byte(gateway: GatewayThread, mock: Provider, session: str) -> None:
    body = json.dumps({"model": "mock-small", "messages": history(ROWS)}, indent=1).encode()
    gateway.web.send("POST", CHAT, body, {"x-session-id": session, "x-response-mode": "raw"})
    assert mock.calls[-1].body == body


def test_a_mode_nobody_knows_is_refused(gateway: GatewayThread, session: str) -> None:
    reply = call(gateway.web, session, "tiny", ROWS)
    assert (reply.status, reply.error["param"]) == (400, "x-response-mode")
    assert "raw, table, summary, handle_only" in reply.error["message"]


def test_a_handle_is_of_no_use_to_another_client_key(
    mock_server: MockServer, mock: Provider, gateway_server: StartGateway
) -> None:
    keys = [{"name": name, "key": f"{name}-0123456789abcdef"} for name in ("alice", "bob")]
    gateway = gateway_server(mock_server.url, **{"auth.keys": keys, "auth.admin_key": "admin-0123456789abcdef"})
    alice, bob = ({"authorization": f"Bearer {key['key']}"} for key in keys)
    call(gateway.web, "s", "handle_only", ROWS, **alice)
    handle = handle_in(sent(mock)[2]["content"])
    assert gateway.web.get(f"/api/results/{handle}", alice).body.decode() == ROWS
    assert gateway.web.get(f"/api/results/{handle}", bob).status == 404
    assert gateway.web.get(f"/api/results/{handle}").status == 401
    call(gateway.web, "s", "handle_only", ROWS, **bob)
    assert handle_in(sent(mock)[2]["content"]) != handle, "nor does it tell that another has the same text"


def test_a_handle_ends_with_its_session_and_comes_back_with_the_next_call(
    gateway: GatewayThread, mock: Provider, session: str
) -> None:
    call(gateway.web, session, "handle_only", ROWS)
    handle = handle_in(sent(mock)[2]["content"])
    assert gateway.web.send("DELETE", f"/api/sessions/{session}").status == 200
    assert gateway.web.get(f"/api/results/{handle}").status == 404
    call(gateway.web, session, "handle_only", ROWS)
    assert handle_in(sent(mock)[2]["content"]) == handle
    assert gateway.web.get(f"/api/results/{handle}").body.decode() == ROWS


def test_without_a_session_nothing_can_be_kept_and_so_nothing_is_left_out(
    mock_server: MockServer, mock: Provider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url, **{"sessions.on_missing": "none"})
    body = {"model": "mock-small", "messages": history(ROWS, TEXT)}
    gateway.web.post(CHAT, body, {"x-response-mode": "handle_only"})
    assert "id|name|state" in sent(mock)[2]["content"]
    assert sent(mock)[4]["content"] == TEXT


def test_modes_may_be_turned_off(mock_server: MockServer, mock: Provider, gateway_server: StartGateway) -> None:
    gateway = gateway_server(mock_server.url, **{"budget.tokens": 4_000, "budget.modes": False, "context.trim": "off"})
    for _ in range(3):
        reply = gateway.web.post(
            CHAT, {"model": "mock-small", "messages": history(ROWS[:2_000]), "max_tokens": 9}, {"x-session-id": "s"}
        )
    assert reply.header("x-session-budget-remaining-tokens") is not None
    assert sent(mock)[2]["content"] == ROWS[:2_000]


def test_no_full_text_is_kept_where_nothing_was_left_out(
    mock_server: MockServer, mock: Provider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url)
    call(gateway.web, "s", "table", ROWS, TEXT)
    with closing(sqlite3.connect(gateway.store)) as db:
        assert db.execute("SELECT count(*) FROM results").fetchone() == (0,)
