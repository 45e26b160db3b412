"""Background responses: charged for their maximum cost at the start, and for the reported usage once fetched."""

from __future__ import annotations

import json
import signal
import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import pytest

from gateway.mock import MockProvider, MockServer
from tests.conftest import Scripted, StartGateway, StartProcess, StartUpstream
from tests.stores.redis_servers import RedisServer
from tests.support.gateways import GatewayThread, until
from tests.support.scripted import SSE_HEAD, Connection
from tests.support.web import HI, Reply, Web, connect, read_until

pytestmark = pytest.mark.long

BUDGET = 5_000
ASKED = {"model": "mock-small", "input": "count to three", "background": True, "max_output_tokens": 500}
HELD = "x-session-budget-remaining-tokens"


def begin(web: Web, session: str, **fields: Any) -> Reply:
    reply = web.post("/v1/responses", {**ASKED, **fields}, {"x-session-id": session})
    assert reply.status == 200, reply.body
    return reply


def fetch(web: Web, answer_id: str, query: str = "", **headers: str) -> Reply:
    return web.get(f"/v1/responses/{answer_id}{query}", headers)


def used(web: Web, session: str) -> int:
    found: int = web.get(f"/api/sessions/{session}").json["budget"]["used"]["tokens"]
    return found


def outcomes(web: Web, session: str) -> list[tuple[str, str]]:
    calls = web.get(f"/api/sessions/{session}/calls").json["calls"]
    return [(call["outcome"], call["usage_source"]) for call in calls]


@pytest.fixture
def limited(gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider) -> GatewayThread:
    return gateway_server(mock_server.url, **{"budget.tokens": BUDGET})


def test_a_fetched_background_response_is_charged_by_the_reported_usage(
    web: Web, mock: MockProvider, session: str
) -> None:
    begun = begin(web, session)
    assert begun.json["status"] == "queued"
    assert begun.header("x-session-usage-source") == "estimated"
    assert begun.header("x-session-usage-final") == "false"
    assert begun.header("x-token-usage") is None
    assert begun.header("x-session-unmetered") is None, "it will be metered"
    assert outcomes(web, session) == [("pending", "estimated")]
    running = fetch(web, begun.json["id"])
    assert running.json["status"] == "in_progress"
    assert running.header("x-session-cumulative-token-usage") is None
    assert outcomes(web, session) == [("pending", "estimated")]
    billed = mock.billed()
    expected = (billed.input_tokens, billed.output_tokens, billed.total_tokens)
    assert billed.calls == 1
    for _ in range(3):
        made = fetch(web, begun.json["id"])
        assert made.json["status"] == "completed"
        assert made.totals == expected
        assert json.loads(made.header("x-token-usage") or "")["totalTokens"] == billed.total_tokens
        assert made.header("x-session-usage-source") == "provider"
        assert made.header("x-session-cumulative-calls") == "1"
        assert made.header("x-session-usage-final") == "true"
        assert made.header("x-session-id") == session
    [call] = web.get(f"/api/sessions/{session}/calls").json["calls"]
    assert (call["outcome"], call["usage_source"], call["finish_reason"]) == ("ok", "provider", "completed")
    assert call["notes"]["answer"] == begun.json["id"]


@pytest.fixture(params=["sqlite", "redis"])
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Yield the flags of a gateway whose store outlives the gateway."""
    if request.param == "sqlite":
        yield {}
        return
    server = RedisServer(tmp_path)
    yield {"store.url": server.url}
    server.kill()


def test_the_maximum_cost_is_reserved_until_the_response_is_fetched_even_after_a_restart(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider, stored: dict[str, Any]
) -> None:
    flags: dict[str, Any] = {"budget.tokens": BUDGET, "budget.modes": False, **stored}
    gateway = gateway_server(mock_server.url, **flags)
    begun = begin(gateway.web, "s", max_output_tokens=4_000)
    billed = mock.billed().total_tokens
    left = int(begun.header(HELD) or 0)
    assert 0 < left < BUDGET - 4_000
    assert used(gateway.web, "s") == BUDGET - left
    folder = gateway.folder
    gateway.stop()
    again = gateway_server(mock_server.url, folder=folder, **flags)
    assert used(again.web, "s") == BUDGET - left
    fetch(again.web, begun.json["id"])
    assert used(again.web, "s") == BUDGET - left, "the response is not complete yet"
    assert fetch(again.web, begun.json["id"]).json["status"] == "completed"
    assert used(again.web, "s") == billed


def test_the_output_limit_is_lowered_to_the_remaining_budget(limited: GatewayThread, mock: MockProvider) -> None:
    begin(limited.web, "s", max_output_tokens=100_000)
    assert json.loads(mock.calls[-1].body)["max_output_tokens"] < BUDGET
    refused = limited.web.post("/v1/responses", ASKED, {"x-session-id": "s"})
    assert refused.error["code"] == "budget_exhausted"


def test_a_usd_budget_is_charged_at_the_price_of_the_matched_model_entry(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider
) -> None:
    entry = {"provider": "upstream", "name": "mock-small"}
    models = [
        {"match": "cheap", **entry, "price": {"input": 1, "output": 1}},
        {"match": "dear", **entry, "price": {"input": 100, "output": 200}},
    ]
    web = gateway_server(mock_server.url, **{"budget.usd": 1, "models": models}).web
    begun = begin(web, "s", model="dear").json["id"]
    held = float(web.get("/api/sessions/s").json["budget"]["used"]["usd"])
    for _ in range(2):
        fetch(web, begun)
    shown, billed = web.get("/api/sessions/s").json, mock.billed()
    cost = (100 * billed.input_tokens + 200 * billed.output_tokens) / 1_000_000
    assert held >= 500 * 200 / 1_000_000
    assert float(shown["cost_usd"]) == float(shown["budget"]["used"]["usd"]) == pytest.approx(cost)


def test_a_cancelled_response_is_charged_for_its_input(limited: GatewayThread) -> None:
    begun = begin(limited.web, "s")
    weight = limited.web.get("/api/sessions/s").json["cumulative_token_usage"]["total_tokens"]
    assert used(limited.web, "s") >= weight + 500
    cancelled = limited.web.post(f"/v1/responses/{begun.json['id']}/cancel", {})
    assert cancelled.json["status"] == "cancelled"
    assert used(limited.web, "s") == weight
    assert outcomes(limited.web, "s") == [("ok", "estimated")]


def test_a_stream_that_its_client_left_is_settled_when_it_is_fetched(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider
) -> None:
    gateway = gateway_server(mock_server.url, **{"budget.tokens": BUDGET, "sessions.on_disconnect": "cancel"})
    body = json.dumps({**ASKED, "stream": True}).encode()
    head = b"POST /v1/responses HTTP/1.1\r\nhost: g\r\ncontent-type: application/json\r\nx-session-id: s\r\n"
    with connect(gateway.url) as sock:
        sock.sendall(head + b"x-mock: interval=1,chunks=20\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        head_bytes = read_until(sock, b"response.output_text.delta")
    until(lambda: gateway.web.get("/api/sessions/s").status == 200, what="the call is settled")
    assert outcomes(gateway.web, "s") == [("pending", "estimated")]
    assert used(gateway.web, "s") > 500
    answer_id = head_bytes.split(b'"id":"', 1)[1].split(b'"')[0].decode()
    fetch(gateway.web, answer_id)
    made = fetch(gateway.web, answer_id, "?stream=true&starting_after=2")
    assert made.totals[2] == mock.billed().total_tokens == used(gateway.web, "s")
    assert outcomes(gateway.web, "s") == [("ok", "provider")]


def test_a_complete_background_stream_is_settled_like_any_stream(limited: GatewayThread, mock: MockProvider) -> None:
    reply = begin(limited.web, "s", stream=True)
    assert reply.totals[2] == mock.billed().total_tokens == used(limited.web, "s")
    assert outcomes(limited.web, "s") == [("ok", "provider")]


def test_fetching_with_another_client_key_shows_no_totals(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider
) -> None:
    keys = [{"name": name, "key": f"{name}-key-0123456789"} for name in ("ann", "bob")]
    web = gateway_server(mock_server.url, **{"auth.keys": keys}).web

    def of(name: str) -> dict[str, str]:
        return {"authorization": f"Bearer {name}-key-0123456789", "x-session-id": "s"}

    begun = web.post("/v1/responses", ASKED, of("ann")).json["id"]
    for _ in range(2):
        made = fetch(web, begun, **of("bob"))
    assert made.json["status"] == "completed"
    assert made.header("x-session-cumulative-token-usage") is None
    [call] = web.get("/api/sessions/s/calls", of("ann")).json["calls"]
    assert call["usage"]["total_tokens"] == mock.billed().total_tokens
    assert web.get("/api/sessions/s", of("bob")).status == 404


def test_a_limited_client_key_can_fetch_only_its_own_responses(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider
) -> None:
    keys = [{"name": name, "key": f"{name}-key-0123456789", "models": ["mock-small"]} for name in ("ann", "bob")]
    web = gateway_server(mock_server.url, **{"auth.keys": keys, "budget.tokens": BUDGET}).web

    def of(name: str) -> dict[str, str]:
        return {"authorization": f"Bearer {name}-key-0123456789", "x-session-id": "s"}

    begun = web.post("/v1/responses", ASKED, of("ann")).json["id"]
    for path in (begun, "resp_of_nobody"):
        refused = fetch(web, path, **of("bob"))
        assert (refused.status, refused.error["code"]) == (404, "model_not_found")
    for _ in range(2):
        made = fetch(web, begun, **of("ann"))
    assert made.totals[2] == mock.billed().total_tokens


def test_observers_receive_the_final_usage_once(limited: GatewayThread, mock: MockProvider) -> None:
    begun = begin(limited.web, "s").json["id"]

    def metric(name: str) -> float:
        lines = limited.web.get("/metrics").body.decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    assert metric("gateway_tokens_total") == 0
    assert metric('gateway_calls_total{dialect="responses"') == 1
    assert metric("gateway_overhead_seconds_count") == 0, "all other metrics count the call once"
    for _ in range(4):
        fetch(limited.web, begun)
    assert metric("gateway_overhead_seconds_count") == 1 + 4
    assert metric("gateway_tokens_total") == mock.billed().total_tokens
    assert metric('gateway_call_duration_seconds_count{provider="upstream",model="mock-small"') == 0
    assert metric('gateway_calls_total{dialect="responses"') == 2
    assert metric("gateway_estimated_calls_total") == 0


def test_observers_receive_a_complete_stream_once_although_it_is_fetched(
    limited: GatewayThread, mock: MockProvider
) -> None:
    headers = {"x-session-id": "s", "x-mock": "interval=0.05,chunks=5"}
    reply = limited.web.post("/v1/responses", {**ASKED, "stream": True}, headers)
    answer_id = reply.body.split(b'"id":"', 1)[1].split(b'"')[0].decode()
    fetch(limited.web, answer_id)
    for _ in range(2):
        assert fetch(limited.web, answer_id).totals[2] == mock.billed().total_tokens
    lines = limited.web.get("/metrics").body.decode().splitlines()
    reported = sum(float(line.split()[-1]) for line in lines if line.startswith("gateway_tokens_total"))
    assert reported == mock.billed().total_tokens


def test_observers_of_all_workers_receive_usage_once_for_concurrent_fetches(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider, stored: dict[str, Any]
) -> None:
    one = gateway_server(mock_server.url, **stored)
    workers = one, gateway_server(mock_server.url, folder=one.folder, **stored)
    begun = [begin(one.web, "s").json["id"] for _ in range(8)]
    for answer_id in begun:
        fetch(one.web, answer_id)
    together = threading.Barrier(8)

    def fetch_all(number: int) -> None:
        for answer_id in begun:
            together.wait(60)
            fetch(workers[number % 2].web, answer_id)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(fetch_all, range(8)))
    lines = [line for worker in workers for line in worker.web.get("/metrics").body.decode().splitlines()]
    reported = sum(float(line.split()[-1]) for line in lines if line.startswith("gateway_tokens_total"))
    assert reported == mock.billed().total_tokens


def test_observers_receive_the_usage_of_a_call_without_a_session(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider, stored: dict[str, Any]
) -> None:
    web = gateway_server(mock_server.url, **{"sessions.on_missing": "none", **stored}).web
    begun = web.post("/v1/responses", ASKED).json["id"]
    for _ in range(3):
        fetch(web, begun)
    lines = web.get("/metrics").body.decode().splitlines()
    reported = sum(float(line.split()[-1]) for line in lines if line.startswith("gateway_tokens_total"))
    assert reported == mock.billed().total_tokens


def test_the_tokens_of_a_previous_background_response_are_reserved(web: Web, session: str, mock: MockProvider) -> None:
    long = "The boat went up the river, past the mill. " * 300
    begun = begin(web, session, input=long).json["id"]
    for _ in range(2):
        made = fetch(web, begun)
    going_on = {"model": "mock-small", "input": "and?", "previous_response_id": begun}
    reply = web.post("/v1/responses", going_on, {"x-session-id": session})
    billed = reply.json["usage"]["input_tokens"]
    assert billed > made.json["usage"]["total_tokens"]
    assert int(reply.header("x-context-tokens") or 0) == pytest.approx(billed, rel=0.03)


@pytest.mark.parametrize("key", ["held", None])
def test_a_response_is_fetched_from_its_provider_but_without_a_credential_for_another(
    gateway_server: StartGateway,
    mock_server: MockServer,
    mock: MockProvider,
    byte_server: StartUpstream,
    key: str | None,
) -> None:
    usage = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
    elsewhere = byte_server(lambda connection: connection.whole(response("completed", usage=usage)))
    providers = {
        "first": {"base_url": elsewhere.url},
        "second": {"base_url": mock_server.url, **({"key": key} if key else {})},
    }
    models = [{"match": "mock-*", "provider": "second"}]
    web = gateway_server("", providers=providers, models=models, default_provider="first").web
    begun = web.post("/v1/responses", ASKED, {"x-session-id": "s", "authorization": "Bearer of-the-caller"}).json["id"]
    before = len(mock.calls)
    for _ in range(2):
        made = fetch(web, begun, authorization="Bearer of-the-caller")
    assert len(mock.calls) - before == (2 if key else 0)
    assert len(elsewhere.requests) == (0 if key else 2)
    assert outcomes(web, "s") == [("ok", "provider") if key else ("pending", "estimated")]
    assert made.status == 200


def test_a_stream_can_be_fetched_from_its_provider_while_it_is_still_read(
    gateway_server: StartGateway, byte_server: StartUpstream
) -> None:
    usage = {"input_tokens": 40, "output_tokens": 9, "total_tokens": 49}
    made = json.loads(response("completed", usage=usage))
    is_fetched = threading.Event()

    def script(connection: Connection) -> None:
        if connection.request.head.startswith(b"POST"):
            connection.send(events(CREATED))
            is_fetched.wait(60)
            connection.send(events(("response.completed", {"response": made})).removeprefix(SSE_HEAD))
            connection.sock.close()
        else:
            connection.whole(json.dumps(made).encode())

    first, second = byte_server(lambda connection: connection.whole(b"{}", status=b"404 N")), byte_server(script)
    providers = {"first": {"base_url": first.url}, "second": {"base_url": second.url, "key": "held"}}
    keys = [{"name": "ann", "key": "ann-key-0123456789", "models": ["m"]}]
    models = [{"match": "m", "provider": "second"}]
    flags = {"providers": providers, "models": models, "default_provider": "first", "auth.keys": keys}
    gateway = gateway_server("", **flags, **{"budget.tokens": BUDGET})
    ann = {"authorization": "Bearer ann-key-0123456789", "x-session-id": "s"}
    with gateway.web.open("POST", "/v1/responses", {**ASKED, "model": "m", "stream": True}, ann) as begun:
        assert b"resp_1" in begun.readline() + begun.readline()
    for _ in range(2):
        assert fetch(gateway.web, "resp_1", **ann).status == 200
    is_fetched.set()
    until(lambda: gateway.web.get("/api/sessions/s/calls", ann).json.get("calls"), what="the call is settled")
    for _ in range(2):
        assert fetch(gateway.web, "resp_1", **ann).totals == (40, 9, 49)


def test_a_stream_that_breaks_after_its_response_was_fetched_is_charged_by_reported_usage(
    gateway_server: StartGateway, byte_server: StartUpstream
) -> None:
    usage, is_fetched = {"input_tokens": 40, "output_tokens": 9, "total_tokens": 49}, threading.Event()

    def script(connection: Connection) -> None:
        if connection.request.head.startswith(b"POST"):
            connection.send(events(CREATED))
            is_fetched.wait(60)
            connection.sock.close()
        else:
            connection.whole(response("completed", usage=usage))

    gateway = gateway_server(byte_server(script).url, **{"budget.tokens": BUDGET})
    with gateway.web.open(
        "POST", "/v1/responses", {**ASKED, "model": "m", "stream": True}, {"x-session-id": "s"}
    ) as begun:
        assert b"resp_1" in begun.readline() + begun.readline()
        assert fetch(gateway.web, "resp_1").header("x-token-usage") is None, "its stream is still read"
        is_fetched.set()
        until(lambda: gateway.web.get("/api/sessions/s/calls").json.get("calls"), what="the call is settled")
    until(lambda: outcomes(gateway.web, "s") == [("ok", "provider")], what="it is settled by its answer")
    assert used(gateway.web, "s") == 49
    assert fetch(gateway.web, "resp_1").totals == (40, 9, 49)
    lines = gateway.web.get("/metrics").body.decode().splitlines()
    assert sum(float(line.split()[-1]) for line in lines if line.startswith("gateway_tokens_total")) == 49


def test_a_stream_of_a_killed_worker_is_charged_by_reported_usage_once_fetched(
    mock_server: MockServer, mock: MockProvider, gateway_process: StartProcess
) -> None:
    flags: dict[str, Any] = {"budget.tokens": BUDGET, "budget.lease_s": 5}
    gateway = gateway_process(mock_server.url, **flags)
    body = {**ASKED, "stream": True}
    with gateway.web.open("POST", "/v1/responses", body, {"x-session-id": "s", "x-mock": "interval=1"}) as begun:
        head_bytes = begun.read(300)
        gateway.signal(signal.SIGKILL)
        gateway.wait()
    answer_id = head_bytes.split(b'"id":"', 1)[1].split(b'"')[0].decode()
    again = gateway_process(mock_server.url, folder=gateway.folder, **flags)
    until(lambda: again.web.get("/api/sessions/s/calls").json.get("calls"), what="its lease has ended")
    assert outcomes(again.web, "s") == [("worker_lost", "estimated")]
    assert used(again.web, "s") > 500
    for _ in range(2):
        made = fetch(again.web, answer_id)
    assert made.totals[2] == mock.billed().total_tokens == used(again.web, "s")
    assert outcomes(again.web, "s") == [("ok", "provider")]


def test_a_stream_of_a_killed_worker_is_charged_by_usage_fetched_before_its_lease_ended(
    mock_server: MockServer, mock: MockProvider, gateway_process: StartProcess, stored: dict[str, Any]
) -> None:
    flags: dict[str, Any] = {"budget.tokens": BUDGET, "budget.lease_s": 8, "budget.modes": False, **stored}
    gateway = gateway_process(mock_server.url, **flags)
    body = {**ASKED, "max_output_tokens": 3_000, "stream": True}
    with gateway.web.open("POST", "/v1/responses", body, {"x-session-id": "s", "x-mock": "interval=1"}) as begun:
        head_bytes = begun.read(300)
        answer_id = head_bytes.split(b'"id":"', 1)[1].split(b'"')[0].decode()
        gateway.signal(signal.SIGKILL)
        gateway.wait()
    again = gateway_process(mock_server.url, folder=gateway.folder, **flags)
    for _ in range(3):
        fetch(again.web, answer_id)
    until(lambda: again.web.get("/api/sessions/s/calls").json.get("calls"), what="its lease has ended")
    until(lambda: outcomes(again.web, "s") == [("ok", "provider")], what="it is settled by its answer")
    assert used(again.web, "s") == mock.billed().total_tokens

    def reported_tokens() -> float:
        lines = again.web.get("/metrics").body.decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("gateway_tokens_total"))

    until(lambda: reported_tokens() == mock.billed().total_tokens, what="observers are notified")
    assert fetch(again.web, answer_id).totals[2] == mock.billed().total_tokens
    assert reported_tokens() == mock.billed().total_tokens


def test_the_sdk_polls_a_background_response(gateway: GatewayThread, mock: MockProvider, session: str) -> None:
    headers = {"x-session-id": session}
    with openai.OpenAI(base_url=gateway.base_url, api_key="any", max_retries=0, default_headers=headers) as client:
        answer = client.responses.create(model="mock-small", input="hi", background=True)
        while answer.status in ("queued", "in_progress"):
            answer = client.responses.retrieve(answer.id)
    assert answer.status == "completed"
    totals = gateway.web.get(f"/api/sessions/{session}").json["cumulative_token_usage"]
    assert totals["total_tokens"] == mock.billed().total_tokens


def response(status: str, **fields: Any) -> bytes:
    return json.dumps(
        {"id": "resp_1", "object": "response", "model": "m", "status": status, "output": [], **fields}
    ).encode()


@pytest.mark.parametrize(
    ("ended", "charged"),
    [
        (response("failed", error={"code": "server_error", "message": "no"}, usage=None), None),
        (response("incomplete", usage={"input_tokens": 40, "output_tokens": 9, "total_tokens": 49}), 49),
        (response("failed", error={"code": "x", "message": "no"}, usage={"input_tokens": 40, "output_tokens": 0}), 40),
    ],
)
def test_a_failed_or_incomplete_response_is_charged_by_the_reported_usage(
    scripted: Scripted, session: str, ended: bytes, charged: int | None
) -> None:
    answers = [response("queued", usage=None), ended]
    web = scripted.play(lambda connection: connection.whole(answers[connection.request.head.startswith(b"GET")]))
    begin(web, session, model="m")
    fetch(web, "resp_1")
    [call] = web.get(f"/api/sessions/{session}/calls").json["calls"]
    assert (call["usage"] or {}).get("total_tokens") == charged


DELTA = {"item_id": "m", "output_index": 0, "content_index": 0, "delta": "on " * 300}
OUTPUT = [{"type": "message", "content": [{"type": "output_text", "text": "on " * 300}]}]


@pytest.mark.parametrize("query", ["", "?stream=true"])
@pytest.mark.parametrize("error", [{"code": "server_error", "message": "no"}, None])
def test_a_failed_response_without_usage_costs_nothing_with_or_without_a_stream(
    scripted: Scripted, session: str, query: str, error: dict[str, str] | None
) -> None:
    failed = response("failed", error=error, usage=None, output=OUTPUT)
    stream = events(
        ("response.output_text.delta", DELTA), ("response.failed", {"response": {**json.loads(failed), "output": []}})
    )

    def script(connection: Connection) -> None:
        head = connection.request.head
        if head.startswith(b"POST"):
            connection.whole(response("queued", usage=None))
        elif b"stream=true" in head:
            connection.send(stream)
            connection.sock.close()
        else:
            connection.whole(failed)

    web = scripted.play(script)
    begin(web, session, model="m")
    fetch(web, "resp_1", query)
    [call] = web.get(f"/api/sessions/{session}/calls").json["calls"]
    assert (call["outcome"], call["usage"]) == ("provider_error", None)


def test_an_error_event_in_a_fetched_stream_does_not_make_the_response_failed(scripted: Scripted, session: str) -> None:
    done = ("response.completed", {"response": json.loads(response("completed"))})

    def script(connection: Connection) -> None:
        if connection.request.head.startswith(b"POST"):
            connection.whole(response("queued", usage=None))
        else:
            connection.send(events(("response.output_text.delta", DELTA), FAULT, done))
            connection.sock.close()

    web = scripted.play(script)
    begin(web, session, model="m")
    fetch(web, "resp_1", "?stream=true")
    [call] = web.get(f"/api/sessions/{session}/calls").json["calls"]
    assert (call["outcome"], call["usage_source"]) == ("ok", "estimated")
    assert call["usage"]["output_tokens"] > 200


@pytest.mark.parametrize(
    "said",
    [
        b'{"error": {"message": "overloaded"}}',
        b"Accepted",
        response("in_progress", error={"code": "server_error", "message": "trying again"}),
        response("in_progress", incomplete_details={"reason": "max_output_tokens"}),
        response("processing"),
    ],
)
def test_a_fetched_body_that_is_not_a_final_response_leaves_the_call_pending(
    scripted: Scripted, session: str, said: bytes
) -> None:
    answers = [response("queued", usage=None), said]
    web = scripted.play(lambda connection: connection.whole(answers[connection.request.head.startswith(b"GET")]))
    begin(web, session, model="m")
    assert fetch(web, "resp_1").body == said
    assert outcomes(web, session) == [("pending", "estimated")]


@pytest.mark.parametrize(
    "begun",
    [
        response("queued", usage={"input_tokens": 0, "output_tokens": 0, "total_tokens": 0}),
        response("in_progress", usage={"input_tokens": 7, "output_tokens": 0, "total_tokens": 7}),
        response("processing", usage=None),
    ],
)
def test_a_response_is_pending_until_its_status_is_final(scripted: Scripted, session: str, begun: bytes) -> None:
    web = scripted.play(lambda connection: connection.whole(begun))
    begin(web, session, model="m")
    [(outcome, _)] = outcomes(web, session)
    assert outcome == "pending"


def test_a_response_with_a_lone_surrogate_in_its_id_is_forwarded(scripted: Scripted, session: str) -> None:
    web = scripted.play(lambda connection: connection.whole(response("queued", id="resp_\ud800")))
    begin(web, session, model="m")
    assert outcomes(web, session) == [("pending", "estimated")]


def test_a_fetched_response_is_forwarded_although_its_pending_entry_is_damaged(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider
) -> None:
    gateway = gateway_server(mock_server.url)
    begun = begin(gateway.web, "s").json["id"]
    fetch(gateway.web, begun)
    with closing(sqlite3.connect(gateway.folder / "gateway.db")) as db, db:
        db.execute("UPDATE lessons SET value = ? WHERE key LIKE 'pending%'", (b"{",))
    made = fetch(gateway.web, begun)
    assert (made.status, made.json["status"]) == (200, "completed")


def test_a_call_that_reuses_the_id_of_a_deleted_call_is_not_charged_by_its_response(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider
) -> None:
    gateway = gateway_server(mock_server.url, **{"budget.tokens": BUDGET})
    begun = begin(gateway.web, "small").json["id"]
    [small] = gateway.web.get("/api/sessions/small/calls").json["calls"]
    named = {"x-session-id": "large", "x-request-id": small["call_id"]}
    assert gateway.web.post("/v1/responses", {**ASKED, "max_output_tokens": 4_000}, named).status == 200
    with closing(sqlite3.connect(gateway.folder / "gateway.db")) as db, db:
        db.execute("DELETE FROM calls WHERE call_id = ?", (small["call_id"],))
    for _ in range(2):
        made = fetch(gateway.web, begun)
    assert made.json["status"] == "completed"
    assert used(gateway.web, "large") > 4_000
    assert made.header("x-session-id") is None


def test_a_response_fetched_while_the_store_is_unavailable_is_forwarded_without_store_retries(
    gateway_server: StartGateway,
    mock_server: MockServer,
    mock: MockProvider,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server = RedisServer(tmp_path)
    web = gateway_server(mock_server.url, **{"store.url": server.url}).web
    begun = begin(web, "s").json["id"]
    fetch(web, begun)
    server.kill()
    for _ in range(3):
        made = fetch(web, begun)
        assert (made.status, made.json["status"]) == (200, "completed")
    assert capsys.readouterr().err.count("store unavailable") == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("on_failure", ["closed", "open"])
def test_a_call_that_ended_while_the_store_was_unavailable_is_settled_when_fetched_later(
    gateway_server: StartGateway, byte_server: StartUpstream, tmp_path: Path, on_failure: str, *, stream: bool
) -> None:
    usage = {"input_tokens": 40, "output_tokens": 9, "total_tokens": 49}
    server, is_unavailable = RedisServer(tmp_path), threading.Event()

    def script(connection: Connection) -> None:
        if connection.request.head.startswith(b"GET"):
            connection.whole(response("completed", usage=usage))
            return
        if not is_unavailable.is_set():
            server.send_signal(signal.SIGSTOP)
            is_unavailable.set()
        if stream:
            connection.send(events(CREATED))
            connection.sock.close()
        else:
            connection.whole(response("queued", usage=None))

    flags = {"store.url": server.url, "store.on_failure": on_failure, "store.timeout_ms": 300, "budget.tokens": BUDGET}
    gateway = gateway_server(byte_server(script).url, **flags)
    try:
        begin(gateway.web, "s", model="m", stream=stream)
        server.send_signal(signal.SIGCONT)
        until(lambda: gateway.web.get("/api/sessions/s/calls").json.get("calls"), what="the call is settled")
        assert outcomes(gateway.web, "s") == [("pending", "estimated")]
        assert used(gateway.web, "s") > 500
        for _ in range(3):
            assert fetch(gateway.web, "resp_1").totals == (40, 9, 49)
        assert outcomes(gateway.web, "s") == [("ok", "provider")]
        assert used(gateway.web, "s") == 49
        lines = gateway.web.get("/metrics").body.decode().splitlines()
        assert sum(float(line.split()[-1]) for line in lines if line.startswith("gateway_tokens_total")) == 49
    finally:
        server.kill()


def test_fetching_while_the_store_is_unavailable_returns_503_and_not_404(
    gateway_server: StartGateway,
    mock_server: MockServer,
    mock: MockProvider,
    byte_server: StartUpstream,
    tmp_path: Path,
) -> None:
    first = byte_server(lambda connection: connection.whole(b"{}", status=b"404 Not Found"))
    providers = {"first": {"base_url": first.url}, "second": {"base_url": mock_server.url, "key": "held"}}
    keys = [
        {"name": "ann", "key": "ann-key-0123456789", "models": ["mock-*"]},
        {"name": "b", "key": "bob-key-0123456789"},
    ]
    models = [{"match": "mock-*", "provider": "second"}]
    flags = {"providers": providers, "models": models, "default_provider": "first", "auth.keys": keys}
    server = RedisServer(tmp_path)
    web = gateway_server("", **flags, **{"store.url": server.url}).web
    ann, bob = {"authorization": "Bearer ann-key-0123456789"}, {"authorization": "Bearer bob-key-0123456789"}
    begun = web.post("/v1/responses", ASKED, {**ann, "x-session-id": "s"}).json["id"]
    server.kill()
    for who in (ann, bob, ann):
        orphaned = fetch(web, begun, **who)
        assert (orphaned.status, orphaned.error["code"]) == (503, "store_unavailable")


def events(*said: tuple[str, dict[str, Any]]) -> bytes:
    numbered = ({"type": kind, "sequence_number": number, **fields} for number, (kind, fields) in enumerate(said))
    return SSE_HEAD + b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in numbered)


CREATED = ("response.created", {"response": json.loads(response("in_progress"))})
FAULT = ("error", {"code": "server_error", "message": "The stream broke.", "param": None})


def test_an_error_event_in_a_stream_does_not_end_its_response(scripted: Scripted, session: str) -> None:
    usage = {"input_tokens": 40, "output_tokens": 9, "total_tokens": 49}
    answers = {
        "POST /v1/responses ": events(CREATED, FAULT),
        "GET /v1/responses/resp_1?stream=true ": events(FAULT),
        "GET /v1/responses/resp_1 ": events(("response.completed", {"response": {"id": "resp_1", "usage": usage}})),
    }

    def script(connection: Connection) -> None:
        head = connection.request.head.decode()
        connection.send(next(said for begins, said in answers.items() if head.startswith(begins)))
        connection.sock.close()

    web = scripted.play(script)
    begun = begin(web, session, model="m", stream=True)
    assert outcomes(web, session) == [("pending", "estimated")]
    assert "x-session-cumulative-token-usage" in begun.comments
    assert "x-token-usage" not in begun.comments, "the usage is not known yet"
    fetch(web, "resp_1", "?stream=true")
    assert outcomes(web, session) == [("pending", "estimated")]
    fetch(web, "resp_1")
    [call] = web.get(f"/api/sessions/{session}/calls").json["calls"]
    assert (call["outcome"], call["finish_reason"], call["usage"]["total_tokens"]) == ("ok", "completed", 49)


@pytest.mark.parametrize("said", [(CREATED,), (CREATED, FAULT)])
def test_no_fallback_is_used_once_a_background_stream_has_started(
    gateway_server: StartGateway, byte_server: StartUpstream, said: tuple[tuple[str, dict[str, Any]], ...]
) -> None:
    def breaks_off(connection: Connection) -> None:
        connection.send(events(*said))
        connection.reset()

    first = byte_server(breaks_off)
    other = byte_server(lambda connection: connection.whole(response("completed")))
    providers = {"first": {"base_url": first.url, "auth": "none"}, "other": {"base_url": other.url, "auth": "none"}}
    models = [{"match": "m", "provider": "first", "fallback": ["other/m"]}]
    flags = {"providers": providers, "models": models, "default_provider": "first", "budget.tokens": BUDGET}
    web = gateway_server("", **flags).web
    begun = begin(web, "s", model="m", stream=True)
    assert b"resp_1" in begun.body
    assert (len(first.requests), len(other.requests)) == (1, 0)
    assert outcomes(web, "s") == [("pending", "estimated")]
    assert used(web, "s") > 500


@pytest.mark.parametrize("path", ["responses/resp_2?stream=true", "chat/deferred-completion/resp_2"])
def test_a_fetched_stream_is_forwarded_unchanged_even_if_it_breaks_off(scripted: Scripted, path: str) -> None:
    said = b': a\n\nevent: x\r\ndata: {"id":"c","choices":[],"usage":{"prompt_tokens":3},"sequence_number":7}\r\n\r\n'

    def script(connection: Connection) -> None:
        connection.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 999\r\n\r\n" + said)
        connection.sock.close()

    reply = scripted.play(script).get(f"/v1/{path}")
    assert (reply.body, reply.clean) == (said, False)


def test_a_cancelled_response_is_charged_for_what_its_stream_delivered(scripted: Scripted, session: str) -> None:
    said = ("response.output_text.delta", {"item_id": "m", "output_index": 0, "content_index": 0, "delta": "on " * 300})

    def script(connection: Connection) -> None:
        if b"/cancel " in connection.request.head:
            connection.whole(response("cancelled", usage=None))
        else:
            connection.send(events(CREATED, said))
            connection.sock.close()

    web = scripted.play(script)
    begin(web, session, model="m", stream=True)
    [begun] = web.get(f"/api/sessions/{session}/calls").json["calls"]
    web.post("/v1/responses/resp_1/cancel")
    [call] = web.get(f"/api/sessions/{session}/calls").json["calls"]
    assert (begun["outcome"], call["outcome"], call["finish_reason"]) == ("pending", "ok", "cancelled")
    assert call["usage"] == begun["usage"]
    assert call["usage"]["output_tokens"] > 200


@pytest.mark.parametrize(
    "output", [[], [{"type": "message", "content": [{"type": "output_text", "text": "on " * 300}]}]]
)
def test_the_output_of_a_fetched_stream_without_usage_is_counted_once(
    scripted: Scripted, session: str, output: list[Any]
) -> None:
    said = ("response.output_text.delta", {"item_id": "m", "output_index": 0, "content_index": 0, "delta": "on " * 300})
    last = ("response.completed", {"response": json.loads(response("completed", output=output))})

    def script(connection: Connection) -> None:
        if connection.request.head.startswith(b"GET "):
            connection.send(events(said, last))
            connection.sock.close()
        else:
            connection.whole(response("queued"))

    web = scripted.play(script)
    begin(web, session, model="m")
    fetch(web, "resp_1", "?stream=true&starting_after=1")
    [call] = web.get(f"/api/sessions/{session}/calls").json["calls"]
    assert (call["outcome"], call["usage_source"]) == ("ok", "estimated")
    assert 200 < call["usage"]["output_tokens"] < 300


def test_a_deferred_chat_completion_is_charged_when_it_is_fetched(scripted: Scripted, session: str) -> None:
    usage = {"prompt_tokens": 30, "completion_tokens": 12, "total_tokens": 42}
    choice = {"index": 0, "message": {"role": "assistant", "content": "three"}, "finish_reason": "stop"}
    fetched: list[bytes] = []

    def script(connection: Connection) -> None:
        if connection.request.head.startswith(b"POST"):
            connection.whole(b'{"request_id": "f15c114e"}')
        elif not fetched:
            fetched.append(b"")
            connection.whole(b"", status=b"202 Accepted")
        else:
            connection.whole(json.dumps({"id": "c1", "model": "m", "choices": [choice], "usage": usage}).encode())

    web = scripted.play(script)
    body = {"model": "m", "messages": HI, "deferred": True}
    assert web.post("/v1/chat/completions", body, {"x-session-id": session}).json == {"request_id": "f15c114e"}
    assert web.get("/v1/chat/deferred-completion/f15c114e").status == 202
    assert outcomes(web, session) == [("pending", "estimated")]
    assert web.get("/v1/chat/deferred-completion/f15c114e").totals == (30, 12, 42)
    assert outcomes(web, session) == [("ok", "provider")]
