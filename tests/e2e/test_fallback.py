"""Fallback through a running gateway: if the provider of a model fails, the next model responds."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.mock import MockProvider, MockServer
from gateway.mock.turns import Behaviour
from tests.conftest import StartGateway, StartUpstream, closed_port, full_backlog
from tests.support import stopping
from tests.support.conversations import agent
from tests.support.gateways import GatewayThread, until
from tests.support.scripted import SSE_HEAD, Connection, Script, chunk
from tests.support.timing import LIMIT_S
from tests.support.web import HI, Reply, chat_bytes, connect

#: settings of the second provider, next to the "upstream" of every test
SECOND = {"auth": "none", "retries": 0, "breaker": {"failures": 1000}}
PRICES = ({"input": 1, "output": 2}, {"input": 10, "output": 20})
MODELS = [
    {"match": "main", "provider": "upstream", "fallback": ["spare"], "price": PRICES[0]},
    {"match": "spare", "provider": "second", "name": "gpt-4o", "price": PRICES[1]},
]


@pytest.fixture
def second() -> Iterator[MockServer]:
    server = MockServer(MockProvider()).start()
    yield server
    stopping.soon(server.stop)


@pytest.fixture
def both(gateway_server: StartGateway, mock_server: MockServer, second: MockServer) -> GatewayThread:
    return gateway_server(mock_server.url, models=MODELS, **{"providers.second": {"base_url": second.url, **SECOND}})


def ask(gateway: GatewayThread, **fields: Any) -> Reply:
    body = {"model": "main", "messages": HI, "max_tokens": 50, **fields}
    return gateway.web.post("/v1/chat/completions", body, {"x-session-id": "s"})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [408, 413, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524, 529])
def test_a_failed_provider_is_replaced_by_the_next_and_the_call_charged_once(
    both: GatewayThread, mock: MockProvider, second: MockServer, status: int, stream: bool
) -> None:
    mock.behaviour = Behaviour(status=status)
    reply = ask(both, stream=stream)
    assert reply.status == 200
    assert json.loads(second.provider.calls[-1].body)["model"] == "gpt-4o"
    assert reply.totals[2] == second.provider.billed().total_tokens > 0
    assert mock.billed().total_tokens == 0
    record = both.web.get(f"/api/calls/{reply.header('x-gateway-request-id')}").json
    assert (record["provider"], record["model"]) == ("second", "gpt-4o")
    assert record["notes"]["fallback"] == f"upstream/main: {status}"


def test_a_provider_that_accepts_no_connection_is_tried_once(gateway_server: StartGateway, second: MockServer) -> None:
    with full_backlog() as url:
        flags = {"providers.upstream.retries": 2, "providers.upstream.timeout_s.connect": 0.2}
        gateway = gateway_server(
            url, models=MODELS, **flags, **{"providers.second": {"base_url": second.url, **SECOND}}
        )
        reply = ask(gateway)
        assert reply.status == 200
        notes = gateway.web.get(f"/api/calls/{reply.header('x-gateway-request-id')}").json["notes"]
        assert notes["fallback"] == "upstream/main: upstream_timeout"
        assert "retries" not in notes


KEYS = {"providers.upstream.auth": "bearer", "providers.upstream.key": "sk-revoked-0123456789"}


@pytest.fixture
def keyed(gateway_server: StartGateway, mock_server: MockServer, second: MockServer) -> GatewayThread:
    """Return a gateway like `both` that holds keys for both providers."""
    spare = {"base_url": second.url, **SECOND, "auth": "bearer", "key": "sk-second-0123456789"}
    return gateway_server(mock_server.url, models=MODELS, **{**KEYS, "providers.second": spare})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [401, 402, 403])
def test_a_refused_key_of_the_gateway_causes_a_fallback(
    keyed: GatewayThread, mock: MockProvider, second: MockServer, status: int, stream: bool
) -> None:
    mock.behaviour = Behaviour(status=status)
    reply = ask(keyed, stream=stream)
    assert reply.status == 200
    assert reply.totals[2] == second.provider.billed().total_tokens > 0
    record = keyed.web.get(f"/api/calls/{reply.header('x-gateway-request-id')}").json
    assert record["notes"]["fallback"] == f"upstream/main: {status}"


@pytest.mark.parametrize(("said", "expected"), [((429, 401), 429), ((401, 429), 429), ((403, 401), 403)])
def test_if_all_providers_fail_a_refused_key_is_the_least_preferred_error(
    keyed: GatewayThread, mock: MockProvider, second: MockServer, said: tuple[int, int], expected: int
) -> None:
    mock.behaviour, second.provider.behaviour = Behaviour(status=said[0]), Behaviour(status=said[1])
    reply = ask(keyed)
    assert (reply.status, reply.header("x-gateway-upstream-error")) == (expected, "true")
    assert len(second.provider.calls) == 1


def test_a_refused_key_of_the_caller_causes_no_fallback(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider, second: MockServer
) -> None:
    flags = {"providers.upstream.auth": "bearer", "providers.second": {"base_url": second.url, **SECOND}}
    gateway = gateway_server(mock_server.url, models=MODELS, **flags)
    mock.behaviour = Behaviour(status=401)
    assert ask(gateway).status == 401
    assert second.provider.calls == []


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
def test_an_error_of_the_request_causes_no_fallback(
    both: GatewayThread, mock: MockProvider, second: MockServer, status: int
) -> None:
    mock.behaviour = Behaviour(status=status)
    assert ask(both).status == status
    assert second.provider.calls == []


def test_an_unreachable_provider_causes_a_fallback(gateway_server: StartGateway, second: MockServer) -> None:
    gateway = gateway_server(
        f"http://127.0.0.1:{closed_port()}",
        models=MODELS,
        **{"providers.second": {"base_url": second.url, **SECOND}},
    )
    assert ask(gateway).status == 200
    assert len(second.provider.calls) == 1


def test_if_all_providers_fail_the_error_of_the_last_is_forwarded(
    both: GatewayThread, mock: MockProvider, second: MockServer
) -> None:
    mock.behaviour = Behaviour(status=503)
    second.provider.behaviour = Behaviour(status=429, retry_after="7")
    reply = ask(both)
    assert (reply.status, reply.header("retry-after")) == (429, "7")
    assert reply.totals == (0, 0, 0)


def test_if_the_last_provider_returns_413_the_error_before_it_is_forwarded(
    both: GatewayThread, mock: MockProvider, second: MockServer
) -> None:
    mock.behaviour = Behaviour(status=503)
    second.provider.behaviour = Behaviour(status=413)
    reply = ask(both)
    assert reply.status == 503
    record = both.web.get(f"/api/calls/{reply.header('x-gateway-request-id')}").json
    assert record["status"] == 503, "the record has the status that the client got"
    assert len(second.provider.calls) == 1


def test_a_request_too_long_for_the_window_of_one_model_goes_to_the_next(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider, second: MockServer
) -> None:
    small = [{**MODELS[0], "window": 1000}, {**MODELS[1], "window": 100_000}]
    gateway = gateway_server(mock_server.url, models=small, **{"providers.second": {"base_url": second.url, **SECOND}})
    long = [{"role": "user", "content": "word " * 3000}]
    assert ask(gateway, messages=long).status == 200
    assert mock.calls == []
    assert json.loads(second.provider.calls[-1].body)["messages"] == long


def test_a_request_refused_as_too_long_goes_to_the_next_model(
    both: GatewayThread, mock: MockProvider, second: MockServer
) -> None:
    mock.behaviour = Behaviour(window=300)
    assert ask(both, messages=[{"role": "user", "content": "word " * 3000}]).status == 200
    assert len(second.provider.calls) == 1


def test_the_request_is_trimmed_to_the_window_of_each_model(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider, second: MockServer
) -> None:
    sizes = [{**MODELS[0], "window": 8_000}, {**MODELS[1], "window": 3_000}]
    gateway = gateway_server(mock_server.url, models=sizes, **{"providers.second": {"base_url": second.url, **SECOND}})
    mock.behaviour = Behaviour(status=503)
    assert ask(gateway, messages=agent(20)).status == 200
    first, other = (json.loads(one.calls[-1].body)["messages"] for one in (mock, second.provider))
    assert len(json.dumps(other)) < len(json.dumps(first)) < len(json.dumps(agent(20)))


def test_a_usd_budget_reserves_the_price_of_the_most_expensive_fallback(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider, second: MockServer
) -> None:
    gateway = gateway_server(
        mock_server.url,
        models=MODELS,
        **{"providers.second": {"base_url": second.url, **SECOND}, "budget.usd": "0.002"},
    )
    mock.behaviour = Behaviour(status=503)
    ask(gateway, max_tokens=500)
    sent = json.loads(second.provider.calls[-1].body)
    assert sent["max_tokens"] * 20 <= 2_000
    assert gateway.web.get("/api/sessions/s").json["cost_usd"] is not None


def test_the_credential_of_the_caller_is_not_sent_to_a_fallback(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider, second: MockServer
) -> None:
    gateway = gateway_server(
        mock_server.url,
        models=MODELS,
        **{
            "providers.upstream": {"base_url": mock_server.url, "retries": 0},
            "providers.second": {"base_url": second.url, **SECOND, "auth": "bearer"},
        },
    )
    mock.behaviour = Behaviour(status=503)
    body = {"model": "main", "messages": HI}
    reply = gateway.web.post("/v1/chat/completions", body, {"authorization": "Bearer the-callers-own"})
    assert reply.status == 503
    assert second.provider.calls == []


def test_a_gateway_key_repeated_in_a_body_is_masked(gateway_server: StartGateway, byte_server: StartUpstream) -> None:
    def script(connection: Connection) -> None:
        said = connection.request.header("authorization") or ""
        assert said == "Bearer sk-revoked-0123456789"
        is_good = connection.request.json["model"] == "good"
        body = json.dumps({"error": {"message": f"Incorrect API key provided: {said}"}}).encode()
        connection.whole(body, b"x-seen: " + said.encode(), status=b"200 OK" if is_good else b"401 Unauthorized")

    gateway = gateway_server(byte_server(script).url, **KEYS)
    for model, status in (("bad", 401), ("good", 200)):
        reply = ask(gateway, model=model)
        assert (reply.status, reply.error["message"]) == (status, "Incorrect API key provided: Bearer ***")
        assert reply.header("x-seen") == "Bearer ***"


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        (b"text/event-stream", "chat/completions"),
        (b"audio/mpeg", "audio/speech"),
        (b"application/json", "files"),
        (b"application/json", "chat/completions"),
    ],
)
def test_a_gateway_key_repeated_in_response_headers_is_masked(
    kind: bytes, path: str, gateway_server: StartGateway, byte_server: StartUpstream
) -> None:
    def script(connection: Connection) -> None:
        said = (connection.request.header("authorization") or "").encode()
        connection.send(
            b"HTTP/1.1 200 OK\r\nx-seen: %b\r\ncontent-type: %b\r\ncontent-length: 2\r\n\r\n{}" % (said, kind)
        )

    gateway = gateway_server(byte_server(script).url, **KEYS)
    reply = gateway.web.post(f"/v1/{path}", {"model": "m", "messages": HI, "input": "hi"})
    assert (reply.status, reply.header("x-seen")) == (200, "Bearer ***")


@pytest.mark.parametrize("is_whole", [True, False], ids=["whole", "broken off"])
@pytest.mark.parametrize(
    ("path", "event"),
    [
        ("chat/completions", {"error": {"message": "KEY is no key"}}),
        ("messages", {"type": "error", "error": {"type": "authentication_error", "message": "KEY is no key"}}),
        ("responses", {"type": "error", "code": "invalid_api_key", "message": "KEY is no key"}),
    ],
)
def test_a_gateway_key_repeated_in_a_stream_error_is_masked(
    path: str, event: dict[str, Any], is_whole: bool, gateway_server: StartGateway, byte_server: StartUpstream
) -> None:
    said = b"data: " + json.dumps(event).replace("KEY", "sk-revoked-0123456789").encode()
    gateway = gateway_server(byte_server(lambda c: c.send(SSE_HEAD + said + b"\n\n" * is_whole)).url, **KEYS)
    body = {"model": "m", "messages": HI, "input": "hi", "max_tokens": 9, "stream": True}
    answer = gateway.web.post(f"/v1/{path}", body).body
    assert b"sk-revoked" not in answer
    assert not is_whole or b"*** is no key" in answer


ANTHROPIC = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}
REFUSED_IN_STREAM = {
    "chat": ("/v1/chat/completions", {"error": {"code": 503, "message": "No host is up"}}, 503),
    "messages": ("/v1/messages", ANTHROPIC, 529),
    "responses": ("/v1/responses", {"type": "error", "code": "server_error", "message": "Failed"}, 500),
    "too long": ("/v1/responses", {"type": "error", "code": "context_length_exceeded", "message": "Too long"}, 400),
}
#: bytes before the refusal: nothing, comments, or the event that OpenAI sends for each accepted request
BEFORE = {
    "at once": b"",
    "comments": b": PROCESSING\n\n: PROCESSING\n\n",
    "taken": b'event: response.created\ndata: {"type":"response.created","response":{"id":"r","usage":null}}\n\n',
}


@pytest.mark.parametrize("kind", REFUSED_IN_STREAM)
def test_an_error_inside_a_200_causes_a_fallback_and_costs_nothing(
    gateway_server: StartGateway, byte_server: StartUpstream, second: MockServer, kind: str
) -> None:
    path, said, status = REFUSED_IN_STREAM[kind]
    error = {"error": said} if path == "/v1/responses" else said
    script = byte_server(lambda connection: connection.whole(json.dumps(error).encode()))
    flags = {"providers.second": {"base_url": second.url, **SECOND}}
    gateway = gateway_server(script.url, models=MODELS, **flags)
    asked = {"input": "hi"} if path == "/v1/responses" else {"messages": HI, "max_tokens": 50}
    reply = gateway.web.post(path, {"model": "main", **asked}, {"x-session-id": "s"})
    assert (reply.status, reply.header("x-gateway-upstream-error")) == (200, None)
    record = gateway.web.get(f"/api/calls/{reply.header('x-gateway-request-id')}").json
    assert record["notes"]["fallback"] == f"upstream/main: {status}"
    assert reply.totals[2] == second.provider.billed().total_tokens > 0


def in_stream(said: object, before: bytes = b"") -> Script:
    event = before + b"event: error\ndata: " + json.dumps(said).encode() + b"\n\n"
    return lambda connection: connection.send(SSE_HEAD + event)


def streamed(gateway: GatewayThread, path: str, model: str = "main") -> Reply:
    asked = {"input": "hi"} if path == "/v1/responses" else {"messages": HI, "max_tokens": 50}
    return gateway.web.post(path, {"model": model, "stream": True, **asked}, {"x-session-id": "s"})


@pytest.mark.parametrize("before", BEFORE.values(), ids=BEFORE)
@pytest.mark.parametrize("kind", REFUSED_IN_STREAM)
def test_an_error_as_the_first_stream_event_causes_a_fallback_and_costs_nothing(
    gateway_server: StartGateway, byte_server: StartUpstream, second: MockServer, kind: str, before: bytes
) -> None:
    path, said, status = REFUSED_IN_STREAM[kind]
    flags = {"providers.second": {"base_url": second.url, **SECOND}}
    gateway = gateway_server(byte_server(in_stream(said, before)).url, models=MODELS, **flags)
    reply = streamed(gateway, path)
    assert reply.status == 200
    assert b"event: error" not in reply.body
    record = gateway.web.get(f"/api/calls/{reply.header('x-gateway-request-id')}").json
    assert record["notes"]["fallback"] == f"upstream/main: {status}"
    used = gateway.web.get("/api/sessions/s").json["cumulative_token_usage"]
    assert used["total_tokens"] == second.provider.billed().total_tokens


@pytest.mark.parametrize("before", BEFORE.values(), ids=BEFORE)
def test_a_stream_that_ends_without_content_causes_a_fallback_and_costs_nothing(
    gateway_server: StartGateway, byte_server: StartUpstream, second: MockServer, before: bytes
) -> None:
    flags = {"providers.second": {"base_url": second.url, **SECOND}}
    gateway = gateway_server(byte_server(lambda c: c.send(SSE_HEAD + before)).url, models=MODELS, **flags)
    reply = streamed(gateway, "/v1/responses")
    assert (reply.status, reply.clean) == (200, True)
    record = gateway.web.get(f"/api/calls/{reply.header('x-gateway-request-id')}").json
    assert record["notes"]["fallback"] == "upstream/main: upstream_protocol_error"
    used = gateway.web.get("/api/sessions/s").json["cumulative_token_usage"]
    assert used["total_tokens"] == second.provider.billed().total_tokens > 0


@pytest.mark.parametrize(
    ("said", "before"),
    [
        ({"error": {"code": 400, "message": "Bad schema"}}, b""),
        ({"error": {"code": 503, "message": "Late"}}, chunk("one")),
    ],
    ids=["the call's own fault", "after text"],
)
def test_a_stream_error_without_a_possible_fallback_is_forwarded_unchanged(
    gateway_server: StartGateway, byte_server: StartUpstream, second: MockServer, said: object, before: bytes
) -> None:
    flags = {"providers.second": {"base_url": second.url, **SECOND}}
    gateway = gateway_server(byte_server(in_stream(said, before)).url, models=MODELS, **flags)
    reply = streamed(gateway, "/v1/chat/completions")
    assert (reply.status, second.provider.calls) == (200, [])
    assert reply.body.startswith(before + b"event: error\ndata: " + json.dumps(said).encode())


def test_the_stream_error_of_the_last_fallback_is_forwarded_unchanged(
    gateway_server: StartGateway, byte_server: StartUpstream, second: MockServer
) -> None:
    path, said, _ = REFUSED_IN_STREAM["messages"]
    server = byte_server(in_stream(said))
    flags = {"providers.second": {"base_url": server.url, **SECOND}}
    gateway = gateway_server(server.url, models=MODELS, **flags)
    reply = streamed(gateway, path)
    assert (reply.status, len(server.requests)) == (200, 2)
    assert json.dumps(said).encode() in reply.body
    assert reply.body.count(b"event: error") == 1


def test_no_credential_header_of_the_caller_is_sent_to_a_fallback(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider, second: MockServer
) -> None:
    held = {"base_url": second.url, **SECOND, "auth": "bearer", "key": "sk-second-0123456789"}
    flags = {"providers.upstream.auth": "bearer", "providers.second": held}
    gateway = gateway_server(mock_server.url, models=MODELS, **flags)
    mock.behaviour = Behaviour(status=503)
    body = {"model": "main", "messages": HI}
    own = {"authorization": "Bearer own", "x-goog-api-key": "AIzaOwn", "helicone-auth": "Bearer own"}
    reply = gateway.web.post("/v1/chat/completions", body, own)
    assert reply.status == 200
    assert [mock.calls[0].header(name) for name in own] == list(own.values())
    assert [second.provider.calls[0].header(name) for name in own] == ["Bearer sk-second-0123456789", None, None]


def test_sessions_are_distributed_among_providers_and_keep_their_provider(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider, second: MockServer
) -> None:
    shared = [{"match": "main", "provider": {"upstream": 1, "second": 1}}]
    gateway = gateway_server(mock_server.url, models=shared, **{"providers.second": {"base_url": second.url, **SECOND}})

    def turns(session: str) -> tuple[int, int]:
        before = len(mock.calls), len(second.provider.calls)
        for _ in range(3):
            body = {"model": "main", "messages": HI}
            gateway.web.post("/v1/chat/completions", body, {"x-session-id": session})
        return len(mock.calls) - before[0], len(second.provider.calls) - before[1]

    counts = {turns(f"s-{number}") for number in range(16)}
    assert counts == {(3, 0), (0, 3)}
    mock.behaviour = Behaviour(status=503)
    assert {turns(f"s-{number}")[1] for number in range(8)} == {3}, "sessions fall back if a provider fails"


@pytest.mark.parametrize("header", ["api-key", "authorization"])
def test_a_provider_with_a_fixed_header_credential_gets_no_credential_of_the_caller(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider, second: MockServer, header: str
) -> None:
    providers = {
        "providers.upstream": {"base_url": mock_server.url, "retries": 0},
        "providers.second": {"base_url": second.url, "retries": 0, "headers": {header: "second-secret"}},
    }
    gateway = gateway_server(mock_server.url, models=MODELS, **providers)
    mock.behaviour = Behaviour(status=503)
    body = {"model": "main", "messages": HI}
    reply = gateway.web.post("/v1/chat/completions", body, {"authorization": "Bearer the-callers-own"})
    assert reply.status == 200
    assert second.provider.calls[-1].header(header) == "second-secret"
    assert "the-callers-own" not in str(second.provider.calls[-1].headers)


def test_after_a_fallback_the_first_model_gets_its_earlier_prefix_again(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider, second: MockServer
) -> None:
    sizes = [{**MODELS[0], "window": 8_000}, {**MODELS[1], "window": 3_000}]
    gateway = gateway_server(mock_server.url, models=sizes, **{"providers.second": {"base_url": second.url, **SECOND}})

    def sent() -> Any:
        return json.loads(mock.calls[-1].body)["messages"]

    ask(gateway, messages=agent(20))
    first = sent()
    mock.behaviour = Behaviour(status=429)
    assert ask(gateway, messages=agent(21)).status == 200
    mock.behaviour = Behaviour()
    assert ask(gateway, messages=agent(22)).status == 200
    assert sent()[: len(first)] == first


def test_a_temporary_error_is_returned_if_the_request_is_too_long_for_the_fallback(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider, second: MockServer
) -> None:
    sizes = [{**MODELS[0], "window": 100_000}, {**MODELS[1], "window": 1_000}]
    gateway = gateway_server(mock_server.url, models=sizes, **{"providers.second": {"base_url": second.url, **SECOND}})
    mock.behaviour = Behaviour(status=429, retry_after="5")
    reply = ask(gateway, messages=[{"role": "user", "content": "word " * 3000}])
    assert (reply.status, reply.header("retry-after")) == (429, "5")
    assert second.provider.calls == []


def test_the_output_limit_is_that_of_the_model_that_responds(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider, second: MockServer
) -> None:
    limits = [{**MODELS[0], "output": 50_000}, {**MODELS[1], "output": 700}]
    gateway = gateway_server(
        mock_server.url,
        models=limits,
        **{"providers.second": {"base_url": second.url, **SECOND}, "budget.tokens": 100_000},
    )
    mock.behaviour = Behaviour(status=503)
    body = {"model": "main", "messages": HI}
    assert gateway.web.post("/v1/chat/completions", body, {"x-session-id": "s"}).status == 200
    assert json.loads(mock.calls[-1].body)["max_tokens"] > 700
    assert json.loads(second.provider.calls[-1].body)["max_tokens"] == 700


def test_a_fallback_too_expensive_for_the_budget_is_left_out(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider, second: MockServer
) -> None:
    del mock
    dear = [MODELS[0], {**MODELS[1], "price": {"input": 1000, "output": 100_000}}]
    gateway = gateway_server(
        mock_server.url,
        models=dear,
        **{"providers.second": {"base_url": second.url, **SECOND}, "budget.usd": "0.01"},
    )
    reply = ask(gateway)
    assert (reply.status, second.provider.calls) == (200, [])
    notes = gateway.web.get(f"/api/calls/{reply.header('x-gateway-request-id')}").json["notes"]
    assert notes["left_out"].startswith("second/gpt-4o: "), "if the call fails, this explains the missing fallback"
    assert (
        "left_out"
        not in gateway.web.get(f"/api/calls/{ask(gateway, model='m').header('x-gateway-request-id')}").json["notes"]
    )


@pytest.mark.parametrize("is_connected", [False, True], ids=["not connected to it", "connected to it"])
def test_no_fallback_is_used_after_the_client_has_left(
    gateway_server: StartGateway, byte_server: StartUpstream, second: MockServer, is_connected: bool
) -> None:
    has_left = threading.Event()

    def refuse(connection: Connection) -> None:
        has_left.wait(LIMIT_S)
        connection.whole(b'{"error":{"message":"busy"}}', status=b"503 Service Unavailable")

    first = byte_server(refuse)
    providers = {"providers.second": {"base_url": second.url, **SECOND}}
    gateway = gateway_server(first.url, models=MODELS, **providers)
    if is_connected:
        # With an open connection to the second provider, the gateway need not wait for anything.
        gateway.web.post("/v1/chat/completions", {"model": "spare", "messages": HI})
    before = len(second.provider.calls)
    body = json.dumps({"model": "main", "messages": HI}).encode()
    with connect(gateway.url) as sock:
        sock.sendall(chat_bytes(body, b"x-session-id: s").replace(b"connection: close\r\n", b""))
        until(lambda: first.requests, what="the provider is at work on the call")
    gateway.web.process_pending_events()
    has_left.set()
    [call] = until(lambda: gateway.web.get("/api/sessions/s/calls").json.get("calls"))
    gateway.web.post("/v1/chat/completions", {"model": "spare", "messages": HI})
    assert len(second.provider.calls) == before + 1, "only the last call of this test"
    assert (call["outcome"], call["usage"]) == ("client_left", None)


#: too long for the window of the first model
LONG = [{"role": "user", "content": "word " * 3_000}]
RESULT = "\n".join(f"line {number} of the log says something else {number * 7919}" for number in range(1_500))


@pytest.mark.parametrize(("priced", "code"), [(False, "price_unknown"), (True, "budget_exhausted")])
def test_a_usd_budget_reserves_the_price_of_the_fallback_with_the_larger_window(
    gateway_server: StartGateway, mock_server: MockServer, second: MockServer, priced: bool, code: str
) -> None:
    main = {"match": "main", "provider": "upstream", "fallback": ["spare"], "window": 1_000, "price": PRICES[0]}
    spare: dict[str, Any] = {"match": "spare", "provider": "second", "name": "unknown", "window": 100_000}
    models = [main, {**spare, "price": PRICES[1]} if priced else spare]
    flags: dict[str, Any] = {"providers.second": {"base_url": second.url, **SECOND}, "budget.usd": 0.02}
    reply = ask(gateway_server(mock_server.url, models=models, **flags), messages=LONG)
    assert (reply.status, reply.error["code"]) == (400, code)
    assert second.provider.calls == []


@pytest.mark.parametrize("usd", [0.008, 0.012])
def test_a_call_with_results_shortened_to_fit_the_budget_keeps_its_fallbacks(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider, second: MockServer, usd: float
) -> None:
    models = [{**one, "window": 100_000} for one in MODELS]
    flags: dict[str, Any] = {"providers.second": {"base_url": second.url, **SECOND}, "budget.usd": usd}
    gateway = gateway_server(mock_server.url, models=models, **flags)
    mock.behaviour = Behaviour(status=503)
    calls = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    messages = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": RESULT},
    ]
    reply = ask(gateway, messages=messages)
    assert (reply.status, reply.header("x-response-mode")) == (200, "handle_only")
    assert len(second.provider.calls) == 1


# --- request formats of providers ----------------------------------------------------------------------------------------


def test_at_most_two_silent_providers_are_tried(gateway_server: StartGateway, byte_server: StartUpstream) -> None:
    def script(connection: Connection) -> None:
        connection.wait_until_left()

    silent = byte_server(script)
    quiet = {"base_url": silent.url, **SECOND, "timeout_s": {"first_byte": 0.3}}
    names = ["upstream", "second", "third"]
    gateway = gateway_server(
        silent.url,
        models=[{"match": "main", "provider": dict.fromkeys(names, 1)}],
        **{f"providers.{name}": quiet for name in names},
    )
    reply = ask(gateway)
    assert (reply.status, reply.error["code"], len(silent.requests)) == (504, "upstream_timeout", 2)
    [record] = gateway.web.get("/api/sessions/s/calls").json["calls"]
    assert record["notes"]["fallback"].endswith("/main: upstream_timeout")
    assert record["usage"] is None


def takes(*formats: str) -> dict[str, Any]:
    return {"providers.upstream.dialects": list(formats)}


REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": HI}),
    "responses": ("/v1/responses", {"input": "hi"}),
    "messages": ("/v1/messages", {"messages": HI, "max_tokens": 50}),
    "completions": ("/v1/completions", {"prompt": "hi"}),
    "embeddings": ("/v1/embeddings", {"input": "hi"}),
}


@pytest.mark.parametrize("format_", REQUESTS)
def test_a_call_in_a_format_not_supported_by_its_provider_goes_to_the_next(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider, second: MockServer, format_: str
) -> None:
    others = takes(*(name for name in REQUESTS if name != format_))
    gateway = gateway_server(
        mock_server.url, models=MODELS, **{"providers.second": {"base_url": second.url, **SECOND}}, **others
    )
    for name, (path, body) in REQUESTS.items():
        assert gateway.web.post(path, {"model": "main", **body}, {"x-session-id": "s"}).status == 200, name
    assert [call.path for call in second.provider.calls] == [REQUESTS[format_][0]]
    assert len(mock.calls) == len(REQUESTS) - 1


COUNTED = {"messages": "/v1/messages/count_tokens", "responses": "/v1/responses/input_tokens"}


@pytest.mark.parametrize("format_", COUNTED)
def test_token_counting_uses_a_provider_that_supports_the_format(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider, second: MockServer, format_: str
) -> None:
    gateway = gateway_server(
        mock_server.url, models=MODELS, **{"providers.second": {"base_url": second.url, **SECOND}}, **takes("chat")
    )
    _, body = REQUESTS[format_]
    answer = gateway.web.post(COUNTED[format_], {"model": "main", **body}, {"x-session-id": "s"})
    assert (answer.status, mock.calls) == (200, [])
    assert answer.json["input_tokens"] > 0


def test_an_unsupported_format_does_not_send_the_callers_credential_to_another_provider(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider, second: MockServer
) -> None:
    unheld = {"providers.second": {"base_url": second.url, **SECOND, "auth": "bearer"}}
    own = {"authorization": "Bearer of-the-first", "x-session-id": "s"}
    gateway = gateway_server(mock_server.url, models=MODELS, **unheld, **takes("responses"))
    reply = gateway.web.post("/v1/chat/completions", {"model": "main", "messages": HI}, own)
    assert (reply.status, reply.json["error"]["code"]) == (400, "invalid_request")
    assert (mock.calls, second.provider.calls) == ([], [])


@pytest.mark.parametrize("format_", REQUESTS)
def test_a_call_in_a_format_without_a_provider_is_refused_and_costs_nothing(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider, format_: str
) -> None:
    other = "responses" if format_ == "chat" else "chat"
    gateway = gateway_server(mock_server.url, **takes(other))
    path, body = REQUESTS[format_]
    reply = gateway.web.post(path, {"model": "mock-small", **body}, {"x-session-id": "s"})
    assert reply.status == 400
    error = reply.json["error"]
    assert f"the format {format_}: upstream accepts {other}" in error["message"]
    assert reply.json.get("type") == ("error" if format_ == "messages" else None)
    assert mock.calls == []
    assert gateway.web.get("/v1/models").status == 200, "requests without a format are sent"
