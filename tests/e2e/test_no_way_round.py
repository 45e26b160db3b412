"""No spelling of a request, no response of a provider and no time of disconnecting makes a billed call free."""

from __future__ import annotations

import base64
import json
import threading
from typing import Any

import pytest

from gateway.mock import MockProvider, MockServer
from tests.conftest import Scripted, StartGateway, StartUpstream
from tests.support.gateways import until
from tests.support.scripted import DONE, SSE_HEAD, Connection, chunk, completion, usage_chunk
from tests.support.timing import LIMIT_S
from tests.support.web import HI, Web, chat_bytes, connect, talk

STREAM = {"model": "mock-small", "messages": HI, "stream": True}


def calls_of(web: Web, session: str) -> Any:
    answer = web.get(f"/api/sessions/{session}/calls")
    return answer.json["calls"] if answer.status == 200 else []


@pytest.mark.parametrize(
    "path",
    ["/v1/%63hat/completions", "/v1/chat%2Fcompletions", "/v1//chat/completions", "/v1/chat/completions;x",
     "/v1/chat/%2e%2e/chat/completions", "/v1/chat\\completions"],
)  # fmt: skip
def test_an_ambiguous_path_is_refused(path: str, web: Web, mock: MockProvider, session: str) -> None:
    before = len(mock.calls)
    answer = web.post(path, STREAM, {"x-session-id": session})
    assert (answer.status, answer.error["code"]) == (400, "invalid_request")
    assert len(mock.calls) == before


def test_a_stream_on_an_unknown_path_is_charged_by_estimate(scripted: Scripted, session: str) -> None:
    web = scripted.play(
        lambda connection: connection.send(SSE_HEAD + chunk("forty letters, which are ten tokens here") + DONE)
    )
    assert web.post("/v1/CHAT/completions", STREAM, {"x-session-id": session}).status == 200
    [call] = calls_of(web, session)
    assert call["usage_source"] == "estimated"
    assert call["usage"]["output_tokens"] >= 5


def test_an_error_that_quotes_the_client_does_not_disable_stream_usage(scripted: Scripted, session: str) -> None:
    bodies: list[Any] = []

    def script(connection: Connection) -> None:
        bodies.append(connection.request.json)
        if bodies[-1]["messages"][0]["content"] == "bad":
            connection.whole(b'{"error":{"message":"role stream_options is unknown"}}', status=b"400 Bad Request")
        else:
            connection.send(SSE_HEAD + chunk("one") + usage_chunk(10, 5) + DONE)

    web = scripted.play(script)
    hostile = {"model": "m", "stream": True, "messages": [{"role": "stream_options", "content": "bad"}]}
    assert web.post("/v1/chat/completions", hostile, {"x-session-id": "mallory"}).status == 400
    web.post("/v1/chat/completions", {**STREAM, "model": "m"}, {"x-session-id": session})
    assert bodies[-1]["stream_options"] == {"include_usage": True}
    assert [call["usage_source"] for call in calls_of(web, session)] == ["provider"]


def test_a_conversation_of_only_brackets_is_reserved(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider, session: str
) -> None:
    """The request is too large for exact counting and has no texts, but the provider bills it."""
    web = gateway_server(mock_server.url, **{"budget.tokens": 100_000}).web
    used = {"type": "tool_use", "id": "a", "name": "f", "input": {"a": [{}] * 250_000}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "x"}
    messages = [*HI, {"role": "assistant", "content": [used]}, {"role": "user", "content": [result]}]
    body = {"model": "mock-small", "max_tokens": 20, "messages": messages}
    answer = web.post("/v1/messages", body, {"x-session-id": session})
    assert (answer.status, answer.error["code"]) == (400, "budget_exhausted")
    assert mock.calls == []


@pytest.mark.parametrize("method", ["TRACE", "CONNECT"])
def test_trace_and_connect_are_never_forwarded(method: str, scripted: Scripted) -> None:
    request = f"{method} /v1/files HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    answer = talk(scripted.web.url, request.encode())
    assert (answer.status, answer.error["code"]) == (405, "method_not_allowed")
    assert scripted.upstream.requests == []


@pytest.mark.parametrize("status", [b"999 Request denied", b"600 No", b"101 Switching Protocols"])
def test_an_invalid_status_of_a_provider_is_an_error_and_does_not_hang(
    status: bytes, scripted: Scripted, session: str
) -> None:
    answer = scripted.play(lambda connection: connection.whole(completion(), status=status)).chat(session)
    assert answer.status in (502, 504)
    assert answer.error["code"] in ("upstream_protocol_error", "upstream_timeout")


def test_a_client_that_leaves_during_the_retry_without_stream_options_is_charged(
    gateway_server: StartGateway, byte_server: Any, session: str
) -> None:
    attempts: list[Any] = []

    def script(connection: Connection) -> None:
        attempts.append(connection.request.json)
        if "stream_options" in attempts[-1]:
            refusal = b'{"error":{"message":"unknown field: stream_options"}}'
            connection.whole(refusal, status=b"400 Bad Request")
        else:
            connection.wait_until_left()

    web = gateway_server(byte_server(script).url, **{"sessions.on_disconnect": "cancel"}).web
    with connect(web.url) as sock:
        sock.sendall(chat_bytes(json.dumps(STREAM).encode(), b"x-session-id: " + session.encode()))
        until(lambda: len(attempts) == 2)
    [call] = until(lambda: calls_of(web, session))
    assert call["usage"]["input_tokens"] > 0
    assert call["usage_source"] == "estimated"


def test_the_received_part_of_a_response_is_charged_after_the_client_left(
    gateway_server: StartGateway, byte_server: Any, session: str
) -> None:
    is_sent = threading.Event()

    def half(connection: Connection) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 50000\r\n\r\n"
        connection.send(head + b"x" * 20_000)
        is_sent.set()
        connection.wait_until_left()

    web = gateway_server(byte_server(half).url, **{"sessions.on_disconnect": "cancel"}).web
    with connect(web.url) as sock:
        sock.sendall(
            chat_bytes(json.dumps({"model": "m", "messages": HI}).encode(), b"x-session-id: " + session.encode())
        )
        assert is_sent.wait(LIMIT_S)
        web.process_pending_events()
    [call] = until(lambda: calls_of(web, session))
    assert call["usage"]["output_tokens"] == 5_000


def test_a_client_that_reads_nothing_is_disconnected_after_the_write_timeout(
    gateway_server: StartGateway, byte_server: Any, session: str
) -> None:
    def flood(connection: Connection) -> None:
        connection.send(SSE_HEAD)
        for _ in range(20_000):
            connection.send(chunk("x" * 4000))

    flags = {"server.write_timeout_s": 0.5, "sessions.on_disconnect": "cancel"}
    web = gateway_server(byte_server(flood).url, **flags).web
    with connect(web.url) as sock:
        sock.sendall(chat_bytes(json.dumps(STREAM).encode(), b"x-session-id: " + session.encode()))
        [call] = until(lambda: calls_of(web, session))
        assert call["outcome"] == "client_stalled"
        assert call["usage_source"] == "estimated"


def test_a_large_refused_body_is_read_so_that_the_error_arrives(
    gateway_server: StartGateway, mock_server: MockServer
) -> None:
    flags = {"auth.keys": [{"name": "alice", "key": "alice-key-0123456789"}]}
    web = gateway_server(mock_server.url, **flags).web
    answer = web.post("/v1/chat/completions", b'{"x":"' + b"a" * (8 << 20) + b'"}', {"authorization": "Bearer wrong"})
    assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")


@pytest.mark.parametrize("form", ["two", "hidden"])
def test_a_form_with_two_models_is_refused(form: str, web: Web) -> None:
    def part(name: str, value: str) -> str:
        return f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'

    padding = part("pad", "x" * 100_000) if form == "hidden" else ""
    body = (part("model", "mock-small") + padding + part("model", "mock-large") + "--b--\r\n").encode()
    answer = web.post("/v1/audio/transcriptions", body, {"content-type": "multipart/form-data; boundary=b"})
    assert (answer.status, answer.error["param"]) == (400, "model")


# --- budgets apply to all calls -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": HI, "max_tokens": 50_000, "max_completion_tokens": 16}),
        ("chat/completions", {"messages": HI, "max_tokens": -1}),
        ("chat/completions", {"messages": HI, "max_tokens": "50000"}),
        ("chat/completions", {"messages": HI, "n": "40", "max_tokens": 100}),
        ("Chat/Completions", {"messages": HI, "max_tokens": 50_000}),
        ("messages", {"messages": HI, "max_tokens": 50_000, "max_completion_tokens": 16}),
        ("responses", {"input": "hi", "max_output_tokens": 50_000, "max_tokens": 16}),
        ("completions", {"prompt": "hi", "max_tokens": 50_000, "max_completion_tokens": 16}),
    ],
)
def test_no_request_can_get_more_output_than_is_reserved(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider, path: str, body: dict[str, Any]
) -> None:
    web = gateway_server(mock_server.url, **{"budget.tokens": 1_000}).web
    assert web.post(f"/v1/{path}", {"model": "m", **body}, {"x-session-id": "s"}).status in (200, 400, 404)
    sent = json.loads(mock.calls[-1].body)
    limits = [sent[name] for name in ("max_tokens", "max_completion_tokens", "max_output_tokens") if name in sent]
    assert 0 < max(limits) * int(sent.get("n", 1)) < 1_000
    assert min(limits) > 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"prompt": "x", "suffix": "word " * 2_000}),
        ("chat/completions", {"messages": HI, "prediction": {"type": "content", "content": "word " * 2_000}}),
        ("chat/completions", {"messages": HI, "documents": [{"title": "t", "text": "word " * 2_000}]}),
        ("chat/completions", {"messages": HI, "chat_template": "word " * 2_000}),
        ("chat/completions", {"messages": HI, **{f"field_{number}": "word " * 40 for number in range(50)}}),
    ],
)
def test_the_text_of_every_field_is_reserved(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider, path: str, body: dict[str, Any]
) -> None:
    web = gateway_server(mock_server.url, **{"budget.tokens": 1_500}).web
    before = len(mock.calls)
    answer = web.post(f"/v1/{path}", {"model": "m", "max_tokens": 10, **body}, {"x-session-id": "s"})
    assert (answer.status, answer.error["code"]) == (400, "budget_exhausted")
    assert len(mock.calls) == before


@pytest.mark.parametrize(
    "name", ["MAX_TOKENS", "Model", "Stream", "N", "\u017ftream", "max_to\u212aens", "Models", "N_Predict"]
)
def test_a_known_field_in_another_spelling_is_refused(web: Web, mock: MockProvider, session: str, name: str) -> None:
    before = len(mock.calls)
    body = {"model": "m", "messages": HI, name: 1}
    reply = web.post("/v1/chat/completions", body, {"x-session-id": session})
    assert (reply.status, reply.error["param"]) == (400, name)
    assert name.casefold() in reply.error["message"]
    assert len(mock.calls) == before


def test_a_key_limited_to_models_cannot_name_other_fallback_models(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider
) -> None:
    key = {"name": "alice", "key": "alice-key-0123456789", "models": ["mock-small", "mock-mini"]}
    web = gateway_server(mock_server.url, **{"auth.keys": [key]}).web
    before = len(mock.calls)
    for others, status in ((["mock-mini"], 200), (["mock-mini", "mock-dear"], 404)):
        body = {"model": "mock-small", "models": others, "messages": HI}
        answer = web.post("/v1/chat/completions", body, {"authorization": f"Bearer {key['key']}"})
        assert answer.status == status, answer.body
    assert answer.error["param"] == "models"
    assert len(mock.calls) == before + 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("batches", {"input_file_id": "file-1", "endpoint": "/v1/chat/completions", "completion_window": "24h"}),
        ("messages/batches", {"requests": []}),
        ("responses", {"model": "m", "input": "hi", "deferred": True}),
        ("threads/t_1/runs", {"assistant_id": "a"}),
        ("completions", {"model": "m", "prompt": "hi", "deferred": True, "max_tokens": 16}),
        ("batch/jobs", {"model": "m", "input_files": ["f"], "endpoint": "/v1/chat/completions"}),
        ("batches/b_1/requests", {"batch_requests": []}),
        ("async/chat/completions", {"request": {"model": "m", "messages": HI}}),
        ("fine-tunes", {"model": "m", "training_file": "f"}),
        ("fine_tuning/jobs/j_1/start", {}),
        ("fine_tuning/alpha/graders/run", {"grader": {"type": "score_model"}, "model_sample": "x"}),
        ("chatkit/sessions", {"workflow": {"id": "wf_1"}, "user": "u"}),
    ],
)
def test_requests_that_are_billed_later_are_refused_under_a_budget(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider, path: str, body: dict[str, Any]
) -> None:
    gateway = gateway_server(mock_server.url, **{"budget.tokens": 1_000})
    reply = gateway.web.post(f"/v1/{path}", body, {"x-session-id": "s"})
    assert (reply.status, reply.error["code"]) == (400, "not_metered")
    assert "budget.deferred" in reply.error["message"]
    assert reply.header("x-session-unmetered") is None, "no call was sent"
    assert mock.calls == []
    gateway.stop()
    free = gateway_server(mock_server.url, **{"budget.tokens": 1_000, "budget.deferred": "forward"})
    reply = free.web.post(f"/v1/{path}", body, {"x-session-id": "s"})
    assert len(mock.calls) == 1
    assert reply.header("x-session-unmetered") == ("true" if reply.status == 200 else None)


@pytest.mark.parametrize("path", ["conversations/conv_1", "conversations/conv_1/restart"])
def test_continuing_a_stored_conversation_is_charged_to_its_session_and_key(
    gateway_server: StartGateway, byte_server: StartUpstream, path: str
) -> None:
    usage = {"prompt_tokens": 900, "completion_tokens": 100, "total_tokens": 1_000}
    upstream = byte_server(lambda connection: connection.whole(json.dumps({"outputs": [], "usage": usage}).encode()))
    keys = [{"name": name, "key": f"{name}-key-0123456789", "rpm": rpm} for name, rpm in (("slow", 1), ("fast", 60))]
    web = gateway_server(upstream.url, **{"budget.tokens": 1_000, "auth.keys": keys}).web

    def sent(key: str, session: str) -> tuple[int, str]:
        headers = {"authorization": f"Bearer {key}-key-0123456789", "x-session-id": session}
        reply = web.post(f"/v1/{path}", {"inputs": "go on"}, headers)
        return reply.status, reply.error["code"] if reply.status != 200 else ""

    assert [sent("fast", "s"), sent("fast", "s")] == [(200, ""), (400, "budget_exhausted")]
    assert [sent("slow", "a"), sent("slow", "b")] == [(200, ""), (429, "rate_limit_exceeded")]
    assert len(upstream.requests) == 2


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("fim/completions", {"prompt": "x", "suffix": "word " * 2_000, "max_tokens": 10}),
        ("score", {"text_1": "a", "text_2": ["word " * 2_000]}),
        ("classify", {"inputs": ["word " * 2_000]}),
        ("ocr", {"document": {"type": "text", "said": {"word " * 2_000: "x"}}}),
    ],
)
def test_the_text_of_every_field_of_an_unknown_path_is_reserved(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider, path: str, body: dict[str, Any]
) -> None:
    web = gateway_server(mock_server.url, **{"budget.tokens": 1_500}).web
    answer = web.post(f"/v1/{path}", {"model": "m", **body}, {"x-session-id": "s"})
    assert (answer.status, answer.error["code"]) == (400, "budget_exhausted")
    assert mock.calls == []


#: paths that the known providers do not bill or do not know
UNBILLED = (
    *("files", "files/file-1", "files/file-1/content", "uploads/u/parts", "containers/c/files", "moderations"),
    *("threads", "threads/t_1", "threads/t_1/messages", "threads/t_1/runs/r_1", "threads/t_1/runs/r_1/cancel"),
    *("vector_stores", "vector_stores/v_1", "vector_stores/v_1/search", "vector_stores/v_1/file_batches"),
    *("conversations", "conversations/c_1", "conversations/c_1/items", "assistants/a_1", "models", "models/m", "x"),
    *("fine_tuning/alpha/graders/validate", "fine-tunes/estimate-price", "batches/b_1/cancel"),
    *("images/generations", "elsewhere/messages/count_tokens", "responses/resp_1", "chat/completions/chatcmpl-1"),
)
METHODS = ("POST", "PUT", "PATCH", "DELETE", "HEAD", "GET", "OPTIONS", "QUERY", "PROPFIND", "SEARCH", "LOCK", "PURGE")


@pytest.mark.parametrize("method", METHODS)
def test_no_method_and_no_path_bypasses_an_exhausted_budget(
    gateway_server: StartGateway, byte_server: StartUpstream, method: str
) -> None:
    usage = {"prompt_tokens": 900, "completion_tokens": 100, "total_tokens": 1_000}
    upstream = byte_server(lambda connection: connection.whole(json.dumps({"usage": usage}).encode()))
    web = gateway_server(upstream.url, **{"budget.tokens": 1_000}).web
    body = json.dumps({"model": "m", "messages": HI, "input": "hi", "max_tokens": 10}).encode()
    assert web.post("/v1/chat/completions", body, {"x-session-id": "s"}).status == 200
    before = len(upstream.requests)
    for path in UNBILLED:
        head = f"{method} /v1/{path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx-session-id: s\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        answer = talk(web.url, head.encode() + body)
        sent = [request for request in upstream.requests[before:] if request.body]
        assert sent == [], path
        if not (method in ("GET", "HEAD") and path == "models"):
            assert answer.status == 400, path
    assert web.get("/api/sessions/s").json["cumulative_token_usage"]["total_tokens"] == 1_000


@pytest.mark.parametrize("path", ["files/file-1", "vector_stores/v_1/search", "threads/t_1/messages"])
def test_usage_reported_on_a_path_of_stored_objects_is_charged(scripted: Scripted, session: str, path: str) -> None:
    web = scripted.play(lambda connection: connection.whole(completion()))
    reply = web.post(f"/v1/{path}", {"model": "m", "messages": HI}, {"x-session-id": session})
    assert reply.totals == (10, 5, 15)
    scripted.play(lambda connection: connection.whole(b'{"id": "1"}'))
    reply = web.post(f"/v1/{path}", {"name": "x" * 400}, {"x-session-id": session})
    assert (reply.status, reply.totals) == (200, (10, 5, 15)), "nothing was billed"


SECOND = base64.b64encode(bytes(48_000)).decode()
SPOKEN = {"model": "m", "messages": HI, "stream": True, "modalities": ["text", "audio"], "audio": {"format": "pcm16"}}


def spoken(seconds: int) -> bytes:
    audio = {"id": "a", "data": SECOND, "transcript": "x" * 40}
    return chunk(choices=[{"index": 0, "delta": {"audio": audio}, "finish_reason": None}]) * seconds


def test_received_audio_is_charged_after_the_client_left(
    gateway_server: StartGateway, byte_server: StartUpstream, session: str
) -> None:
    def script(connection: Connection) -> None:
        connection.send(SSE_HEAD + spoken(10))
        connection.wait_until_left()

    web = gateway_server(byte_server(script).url, **{"sessions.on_disconnect": "cancel"}).web
    with connect(web.url) as sock:
        sock.sendall(chat_bytes(json.dumps(SPOKEN).encode(), b"x-session-id: " + session.encode()))
        taken = 0
        while taken < 10 * len(SECOND):
            taken += len(sock.recv(65_536))
    [call] = until(lambda: calls_of(web, session))
    assert call["usage"]["output_tokens"] == 10 * (20 + 10)


@pytest.mark.parametrize("asked", [{}, {"modalities": ["text", "audio"], "audio": {"voice": "alloy"}}])
def test_a_stream_with_audio_reserves_its_maximum_cost_at_the_start(
    gateway_server: StartGateway, byte_server: StartUpstream, asked: dict[str, Any]
) -> None:
    limits: list[int] = []

    def script(connection: Connection) -> None:
        limits.append(connection.request.json.get("max_tokens", 16_384))
        connection.send(SSE_HEAD + chunk("hi") + usage_chunk(10, 5) + DONE)

    model = {"match": "m", "provider": "upstream", "window": 128_000, "output": 16_384, "reasoning": False}
    web = gateway_server(byte_server(script).url, **{"budget.tokens": 20_000, "models": [model]}).web
    with web.open("POST", "/v1/chat/completions", {**STREAM, "model": "m", **asked}, {"x-session-id": "s"}) as stream:
        left = int(stream.headers["x-session-budget-remaining-tokens"])
        stream.read()
    is_whole = bool(asked)
    assert (20_000 - left > limits[0]) is is_whole, (left, limits)


@pytest.mark.parametrize("path", ["images/generations", "audio/speech", "rerank", "something/new"])
def test_a_call_without_reported_usage_is_charged_by_estimate(scripted: Scripted, session: str, path: str) -> None:
    web = scripted.play(lambda connection: connection.whole(b'{"data": []}'))
    body = {"model": "m", "prompt": "A tree on a hill, in oil.", "query": "tree", "documents": ["a tree", "a hill"]}
    assert web.post(f"/v1/{path}", body, {"x-session-id": session}).status == 200
    [call] = calls_of(web, session)
    assert call["usage_source"] == "estimated"
    assert call["usage"]["input_tokens"] > 5


def test_a_path_without_a_price_cannot_bypass_a_usd_budget(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider
) -> None:
    web = gateway_server(mock_server.url, **{"budget.usd": 1, "budget.deferred": "forward"}).web
    reply = web.post("/v1/images/generations", {"prompt": "a tree"}, {"x-session-id": "s"})
    assert (reply.status, reply.error["code"]) == (400, "price_unknown")
    assert web.post("/v1/files", {"purpose": "batch"}, {"x-session-id": "s"}).error["code"] != "price_unknown"
