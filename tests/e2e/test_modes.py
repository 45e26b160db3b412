"""Tool results in stricter modes: what the model sees, what is stored, and who can fetch it."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from gateway.mock import Behaviour, MockProvider, MockServer, Turn
from tests.conftest import StartGateway
from tests.support import stopping
from tests.support.formats import Format
from tests.support.gateways import GatewayThread, until, write_config
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


def sent(mock: MockProvider) -> list[Any]:
    messages: list[Any] = json.loads(mock.calls[-1].body)["messages"]
    return messages


def handle_in(text: str) -> str:
    return text.rpartition("GET /api/results/")[2].rstrip("]")


def test_a_call_can_request_a_stricter_mode(gateway: GatewayThread, mock: MockProvider, session: str) -> None:
    reply = call(gateway.web, session, "table", ROWS, TEXT)
    assert reply.header("x-response-mode") == "table"
    rows, text = sent(mock)[2], sent(mock)[4]
    assert "id|name|state" in rows["content"]
    assert rows["x-kept"] == [1, 2], "unknown fields are kept"
    assert text["content"] == TEXT, "text cannot become a table"
    assert sent(mock)[:2] == history(ROWS)[:2]


@pytest.mark.parametrize("mode", ["summary", "handle_only"])
def test_an_omitted_result_can_be_fetched_in_full(
    gateway: GatewayThread, mock: MockProvider, session: str, mode: str
) -> None:
    call(gateway.web, session, mode, ROWS, TEXT)
    for index, original in ((2, ROWS), (4, TEXT)):
        shown = sent(mock)[index]["content"]
        assert len(shown) < len(original) / 2
        answer = gateway.web.get(f"/api/results/{handle_in(shown)}")
        assert answer.body.decode() == original
        assert answer.header("content-type") == "text/plain; charset=utf-8"
        assert answer.header("x-content-type-options") == "nosniff"


def test_a_session_with_its_budget_and_results_expires_after_its_ttl(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url, **{"sessions.ttl": "1s", "budget.lease_s": 5, "budget.tokens": 100_000})
    web = gateway.web
    call(web, "left", "handle_only", ROWS)
    handle = handle_in(sent(mock)[2]["content"])

    def is_gone() -> bool:
        assert web.chat("used").status == 200
        time.sleep(0.1)
        return web.get("/api/sessions/left").status == 404

    assert web.get(f"/api/results/{handle}").status == web.get("/api/sessions/left").status == 200
    until(is_gone, seconds=60)
    assert web.get(f"/api/results/{handle}").status == 404
    with closing(sqlite3.connect(gateway.store)) as database:
        assert database.execute("SELECT id FROM accounts WHERE kind = 'session'").fetchall() == [("used",)]
        assert database.execute("SELECT id FROM sessions").fetchall() == [("used",)]


@pytest.mark.parametrize("asked", ["raw", "handle_only"])
def test_a_fetched_result_is_sent_in_full_unless_the_budget_is_almost_used_up(
    gateway: GatewayThread, mock: MockProvider, session: str, asked: str
) -> None:
    messages = history(TEXT)
    headers = {"x-session-id": session, "x-session-budget-tokens": "40000"}

    def send(mode: str) -> str:
        body = {"model": "mock-small", "messages": messages, "max_tokens": 9}
        reply = gateway.web.post(CHAT, body, {**headers, "x-response-mode": mode})
        assert reply.status == 200, reply.body
        return str(sent(mock)[-1]["content"])

    arguments = json.dumps({"handle": handle_in(send("handle_only"))})
    made = {"id": "f", "type": "function", "function": {"name": "full_text", "arguments": arguments}}
    messages.append({"role": "assistant", "content": None, "tool_calls": [made]})
    messages.append({"role": "tool", "tool_call_id": "f", "content": TEXT})
    assert send("summary") == send("handle_only") == TEXT
    used = gateway.web.get(f"/api/sessions/{session}").json["cumulative_token_usage"]["total_tokens"]
    gateway.web.chat(session, f"tokens={39_000 - used}/0", model="mock-large")
    assert send(asked).endswith(f"{handle_in(sent(mock)[2]['content'])}]"), "the full text would exceed the budget"


def test_the_same_mode_sends_the_same_bytes_on_every_turn(
    gateway: GatewayThread, mock: MockProvider, session: str
) -> None:
    call(gateway.web, session, "summary", ROWS, TEXT)
    first = sent(mock)
    call(gateway.web, session, "summary", ROWS, TEXT, ROWS + " ")
    assert sent(mock)[: len(first)] == first


def test_raw_is_forwarded_byte_for_byte(gateway: GatewayThread, mock: MockProvider, session: str) -> None:
    body = json.dumps({"model": "mock-small", "messages": history(ROWS)}, indent=1).encode()
    gateway.web.send("POST", CHAT, body, {"x-session-id": session, "x-response-mode": "raw"})
    assert mock.calls[-1].body == body


def test_an_unknown_mode_is_refused(gateway: GatewayThread, session: str) -> None:
    reply = call(gateway.web, session, "tiny", ROWS)
    assert (reply.status, reply.error["param"]) == (400, "x-response-mode")
    assert "raw, table, summary, handle_only" in reply.error["message"]


def test_a_handle_cannot_be_used_with_another_client_key(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
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
    assert handle_in(sent(mock)[2]["content"]) != handle, (
        "the handle does not reveal that another key has the same text"
    )


def test_a_handle_is_deleted_with_its_session_and_restored_by_the_next_call(
    gateway: GatewayThread, mock: MockProvider, session: str
) -> None:
    call(gateway.web, session, "handle_only", ROWS)
    handle = handle_in(sent(mock)[2]["content"])
    assert gateway.web.send("DELETE", f"/api/sessions/{session}").status == 200
    assert gateway.web.get(f"/api/results/{handle}").status == 404
    call(gateway.web, session, "handle_only", ROWS)
    assert handle_in(sent(mock)[2]["content"]) == handle
    assert gateway.web.get(f"/api/results/{handle}").body.decode() == ROWS


def test_without_a_session_no_result_is_replaced_by_a_handle(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url, **{"sessions.on_missing": "none"})
    body = {"model": "mock-small", "messages": history(ROWS, TEXT)}
    gateway.web.post(CHAT, body, {"x-response-mode": "handle_only"})
    assert "id|name|state" in sent(mock)[2]["content"]
    assert sent(mock)[4]["content"] == TEXT


def test_results_beyond_the_storage_limit_are_sent_without_a_handle(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    room = (len(TEXT) + 100) / 2**20
    gateway = gateway_server(mock_server.url, **{"sessions.results_max_mb": room})
    for turn in range(2):
        call(gateway.web, "s", "handle_only", TEXT, ROWS, TEXT + "\nmore")
        text, rows, more = (message["content"] for message in sent(mock)[2::2])
        assert gateway.web.get(f"/api/results/{handle_in(text)}").body.decode() == TEXT, turn
        assert "id|name|state" in rows, "a table has all of it, and needs no handle"
        assert more == TEXT + "\nmore"
    call(gateway.web, "other", "handle_only", TEXT + "\nmore")
    assert "GET /api/results/" in sent(mock)[2]["content"], "another session has its own limit"
    with closing(sqlite3.connect(gateway.store)) as db:
        assert db.execute("SELECT id, size FROM results ORDER BY id").fetchall() == [
            ("other", len(TEXT) + 5),
            ("s", len(TEXT)),
        ]


def test_the_storage_limit_for_results_can_be_changed_by_a_reload(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url, **{"sessions.results_max_mb": 0})
    call(gateway.web, "s", "handle_only", TEXT)
    assert sent(mock)[2]["content"] == TEXT
    write_config(gateway.folder, mock_server.url, {"sessions.results_max_mb": 1})
    assert gateway.web.post("/api/reload").status == 200
    call(gateway.web, "s", "handle_only", TEXT)
    assert gateway.web.get(f"/api/results/{handle_in(sent(mock)[2]['content'])}").body.decode() == TEXT


def test_modes_can_be_turned_off(mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway) -> None:
    gateway = gateway_server(mock_server.url, **{"budget.tokens": 4_000, "budget.modes": False, "context.trim": "off"})
    for _ in range(3):
        reply = gateway.web.post(
            CHAT, {"model": "mock-small", "messages": history(ROWS[:2_000]), "max_tokens": 9}, {"x-session-id": "s"}
        )
    assert reply.header("x-session-budget-remaining-tokens") is not None
    assert sent(mock)[2]["content"] == ROWS[:2_000]


def test_no_full_text_is_stored_if_nothing_was_left_out(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url)
    call(gateway.web, "s", "table", ROWS, TEXT)
    with closing(sqlite3.connect(gateway.store)) as db:
        assert db.execute("SELECT count(*) FROM results").fetchone() == (0,)


def test_a_refused_call_stores_no_text(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url, **{"budget.tokens": 30})
    refused = call(gateway.web, "s", "handle_only", ROWS, TEXT)
    assert refused.error["code"] == "budget_exhausted"
    assert mock.calls == []
    with closing(sqlite3.connect(gateway.store)) as db:
        assert db.execute("SELECT count(*) FROM results").fetchone() == (0,)


# --- with a model that makes summaries ------------------------------------------------------------------------------------

#: messages after results that the model has read
READ = [{"role": "assistant", "content": "Found."}, {"role": "user", "content": "Go on."}]
SAID = "200 lines, one for each part; part 199 has the value 39601."
Start = Callable[..., GatewayThread]


@pytest.fixture
def writer_server() -> Iterator[MockServer]:
    server = MockServer().start()
    yield server
    stopping.soon(server.stop)


@pytest.fixture
def writer(writer_server: MockServer) -> MockProvider:
    """Return the provider of the summary model: each response is `SAID` and costs 700 input and 30 output tokens."""
    writer_server.provider.behaviour = Behaviour(tokens=(700, 30))
    writer_server.provider.push(*[Turn(SAID)] * 9)
    return writer_server.provider


@pytest.fixture
def start_with_summaries(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider, writer_server: MockServer
) -> Start:
    """Return a function that starts gateways whose large results are summarized by a second provider."""
    del mock

    def start(**flags: Any) -> GatewayThread:
        settings = {
            "providers.writer": {"base_url": writer_server.url, "auth": "none", "retries": 0},
            "models": [{"match": "short", "provider": "writer", "price": {"input": 2, "output": 20}}],
            "budget.summary_model": "short",
            **flags,
        }
        return gateway_server(mock_server.url, **settings)

    return start


def texts(mock: MockProvider) -> list[str]:
    """Return the tool results in the last call that reached the provider."""
    return [message["content"] for message in sent(mock) if message["role"] == "tool"]


def test_a_large_result_is_summarized_by_the_configured_model_and_can_be_fetched(
    start_with_summaries: Start, mock: MockProvider, writer: MockProvider
) -> None:
    web = start_with_summaries().web
    assert call(web, "s", "summary", "short", TEXT).header("x-response-mode") == "summary"
    short, shown = texts(mock)
    assert short == "short"
    assert shown.startswith(f"{SAID}\n[summary of {len(TEXT):,} characters; full text: GET /api/results/tr_")
    assert web.get(f"/api/results/{handle_in(shown)}").body.decode() == TEXT
    [asked] = writer.calls
    instruction, data = json.loads(asked.body)["messages"]
    assert instruction["role"] == "system"
    assert json.loads(data["content"]) == {"tool": "search", "result": TEXT}


def test_the_cost_of_a_result_summary_is_charged_to_the_session_as_its_own_call(
    start_with_summaries: Start, mock: MockProvider, writer: MockProvider
) -> None:
    web = start_with_summaries().web
    reply = call(web, "s", "summary", TEXT, f"{TEXT}\nmore")
    bills = [mock.billed(), writer.billed()]
    assert bills[1].total_tokens == 2 * 730
    assert reply.totals[2] == sum(bill.total_tokens for bill in bills)
    assert web.get("/api/sessions/s").json["calls"] == 3
    calls = web.get("/api/sessions/s/calls").json["calls"]
    assert sorted(one["operation"] for one in calls) == ["chat", "result_summary", "result_summary"]
    [main] = [one for one in calls if one["operation"] == "chat"]
    for one in calls:
        if one is not main:
            assert one["notes"] == {"for": main["call_id"]}
            assert one["call_id"] in main["notes"]["result_summaries"]
            assert one["cost_usd"] == "0.002000"
    assert SAID not in json.dumps(calls)


def test_a_summarized_result_is_the_same_on_later_turns_and_in_other_gateways(
    start_with_summaries: Start, mock: MockProvider, writer: MockProvider
) -> None:
    first = start_with_summaries()
    call(first.web, "s", "summary", TEXT)
    begun = sent(mock)
    writer.reset()
    writer.push(*[Turn("Another summary.")] * 9)
    call(first.web, "s", "summary", TEXT, ROWS * 9)
    assert sent(mock)[: len(begun)] == begun
    decided = mock.calls[-1].body
    overhead = start_with_summaries(folder=first.folder)
    call(overhead.web, "s", "summary", TEXT, ROWS * 9)
    assert mock.calls[-1].body == decided
    overhead.stop()
    first.stop()
    call(start_with_summaries(folder=first.folder).web, "s", "summary", TEXT, ROWS * 9)
    assert mock.calls[-1].body == decided
    assert len(writer.calls) == 1


@pytest.mark.parametrize(
    "fault", [Behaviour(status=500), Behaviour(html=True), Behaviour(die=0)], ids=["an error", "a page", "nothing"]
)
def test_if_the_summary_model_fails_the_extract_is_used_on_all_turns(
    start_with_summaries: Start, mock: MockProvider, writer: MockProvider, fault: Behaviour
) -> None:
    plain = start_with_summaries(**{"budget.summary_model": None})
    call(plain.web, "s", "summary", TEXT)
    extract = sent(mock)
    plain.stop()
    writer.behaviour = fault
    gateway = start_with_summaries()
    reply = call(gateway.web, "s", "summary", TEXT)
    assert reply.status == 200
    assert [text.splitlines()[:-1] for text in texts(mock)] == [extract[2]["content"].splitlines()[:-1]]
    note = gateway.web.get(f"/api/calls/{reply.header('x-gateway-request-id')}").json["notes"]["result_summaries"]
    assert note.startswith("none: call ")
    writer.behaviour = Behaviour()
    before = sent(mock)
    gateway.stop()
    call(start_with_summaries(folder=gateway.folder).web, "s", "summary", TEXT)
    assert sent(mock) == before
    assert len(writer.calls) == 1


def test_only_the_four_newest_results_of_a_call_are_summarized(
    start_with_summaries: Start, mock: MockProvider, writer: MockProvider
) -> None:
    web = start_with_summaries().web
    many = [f"{number}\n{TEXT}" for number in range(6)]
    for _ in range(2):
        call(web, "s", "summary", *many)
        assert [text.startswith(SAID) for text in texts(mock)] == [False, False, True, True, True, True]
    assert len(writer.calls) == 4


def test_results_are_summarized_within_the_budget_when_it_runs_low(
    start_with_summaries: Start, mock: MockProvider, writer: MockProvider
) -> None:
    web = start_with_summaries(**{"budget.tokens": 400_000, "context.trim": "off"}).web
    body = {"model": "mock-small", "messages": [*history(TEXT), *READ], "max_tokens": 9}
    web.post(CHAT, body, {"x-session-id": "s", "x-mock": "tokens=340000/9"})
    assert texts(mock) == [TEXT]
    reply = web.post(CHAT, body, {"x-session-id": "s"})
    assert reply.header("x-response-mode") == "summary"
    assert texts(mock)[0].startswith(SAID)
    used = mock.billed().total_tokens + writer.billed().total_tokens
    assert reply.header("x-session-budget-remaining-tokens") == str(400_000 - used)


@pytest.mark.parametrize("wire", ["responses", "messages"])
def test_results_in_other_formats_are_summarized(
    start_with_summaries: Start, mock: MockProvider, writer: MockProvider, wire: str
) -> None:
    web, api = start_with_summaries(default_provider="upstream").web, Format(wire)
    for steps in ((TEXT,), (TEXT, f"{TEXT}\nmore")):
        messages = [{key: value for key, value in one.items() if key != "x-kept"} for one in history(*steps)]
        body = api.body(messages, model="mock-small")
        assert web.post(api.path, body, {"x-session-id": "s", "x-response-mode": "summary"}).status == 200
        assert json.dumps(api.sent(mock.calls[-1].body)).count(SAID) == len(steps)
    assert len(writer.calls) == 2


def test_without_a_session_the_summary_model_is_not_called(
    start_with_summaries: Start, mock: MockProvider, writer: MockProvider
) -> None:
    web = start_with_summaries(**{"sessions.on_missing": "none"}).web
    web.post(CHAT, {"model": "mock-small", "messages": history(TEXT)}, {"x-response-mode": "summary"})
    assert texts(mock) == [TEXT]
    assert writer.calls == []
