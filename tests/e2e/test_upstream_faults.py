"""Faults of a provider's connection: what the client receives, and what is charged."""

from __future__ import annotations

import contextlib
import gzip
import json
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from gateway.dialects.base import named_event
from gateway.mock import MockProvider
from tests.conftest import Scripted, StartProcess, StartUpstream
from tests.support.gateways import until
from tests.support.scripted import DONE, SSE_HEAD, Connection, Script, chunk, completion, usage_chunk
from tests.support.timing import in_time
from tests.support.web import CHAT, HI, Reply, Web, chat_bytes, connect, talk

JSON_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 5000\r\n\r\n"
# The scripted server closes each connection and announces it, so that the gateway does not reuse the connection.
CHUNKED_SSE_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
)


def framed(data: bytes) -> bytes:
    return b"%x\r\n" % len(data) + data + b"\r\n"


def nothing_charged(web: Web, session: str) -> None:
    answer = web.get(f"/api/sessions/{session}")
    assert answer.status == 404 or answer.json["cumulative_token_usage"]["total_tokens"] == 0


def the_call(web: Web, session: str) -> Any:
    def newest() -> Any:
        answer = web.get(f"/api/sessions/{session}/calls")
        return answer.status == 200 and answer.json["calls"]

    [found] = until(newest)
    return found


def refused(answer: Reply, status: int, code: str, *, may_help: str = "true") -> None:
    assert answer.status == status
    assert answer.error["code"] == code
    assert answer.error["message"]
    assert answer.header("x-should-retry") == may_help
    assert answer.header("x-gateway-request-id")
    assert answer.header("x-gateway-upstream-error") is None
    assert answer.header("x-session-cumulative-total-tokens") == "0"


@pytest.mark.parametrize("stream", [True, False])
def test_a_refused_connection_is_a_502_and_costs_nothing(stream: bool, scripted: Scripted, session: str) -> None:
    answer = scripted.web.chat(session, model="closed/m", stream=stream)
    refused(answer, 502, "upstream_unreachable")
    assert "connection refused" in answer.error["message"]
    nothing_charged(scripted.web, session)


def _reset(connection: Connection) -> None:
    connection.reset()


def _close(connection: Connection) -> None:
    del connection


def _half_a_head(connection: Connection) -> None:
    connection.send(b"HTTP/1.1 200 OK\r\ncontent-ty")


def _reset_in_the_head(connection: Connection) -> None:
    connection.send(b"HTTP/1.1 200 OK\r\ncontent-ty")
    time.sleep(0.02)
    connection.reset()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("script", [_reset, _close, _half_a_head, _reset_in_the_head])
def test_a_connection_that_ends_before_the_first_byte_costs_nothing(
    script: Script, stream: bool, scripted: Scripted, session: str
) -> None:
    answer = scripted.play(script).chat(session, stream=stream)
    assert answer.error["code"] in ("upstream_unreachable", "upstream_protocol_error")
    refused(answer, 502, answer.error["code"])
    nothing_charged(scripted.web, session)
    assert the_call(scripted.web, session)["outcome"] == "upstream_failed"


@pytest.mark.parametrize(
    "data",
    [
        b"garbage\r\n\r\n",
        b"HTTP/9.9 999 What\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 abc OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello!",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx-huge: " + b"a" * 200_000 + b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\x00" * 100,
    ],
    ids=[
        "no http",
        "version",
        "header",
        "status",
        "two lengths",
        "negative",
        "length and chunked",
        "huge",
        "tls",
        "zeros",
    ],
)
def test_an_invalid_http_response_is_a_502_and_costs_nothing(data: bytes, scripted: Scripted, session: str) -> None:
    answer = scripted.play(lambda connection: connection.send(data)).chat(session)
    assert answer.status == 502
    refused(answer, 502, answer.error["code"])
    assert "Traceback" not in answer.body.decode()
    nothing_charged(scripted.web, session)


@pytest.mark.parametrize("stream", [True, False])
def test_a_silent_provider_is_a_504_and_its_connection_is_closed(
    stream: bool, scripted: Scripted, session: str
) -> None:
    left: list[bool] = []
    web = scripted.play(lambda connection: left.append(connection.wait_until_left()))
    with in_time(at_least=0.5):
        answer = web.chat(session, model="hasty/m", stream=stream)
    refused(answer, 504, "upstream_timeout", may_help="false")
    until(lambda: left)
    assert left == [True]


@pytest.mark.parametrize("end", [_reset, _close])
def test_a_response_that_breaks_is_a_502_and_charged_by_reported_usage(
    end: Script, scripted: Scripted, session: str
) -> None:
    def script(connection: Connection) -> None:
        connection.send(JSON_HEAD + completion())
        # A reset discards bytes that the gateway has not read yet.
        scripted.web.process_pending_events()
        end(connection)

    answer = scripted.play(script).chat(session)
    assert answer.status == 502
    assert answer.error["code"] in ("upstream_unreachable", "upstream_protocol_error")
    # The provider has worked, so it bills. Its usage was among the received bytes.
    found = the_call(scripted.web, session)
    assert (found["outcome"], found["usage_source"]) == ("upstream_broken", "provider")
    assert (found["usage"]["input_tokens"], found["usage"]["output_tokens"]) == (10, 5)
    assert answer.totals == (
        found["usage"]["input_tokens"],
        found["usage"]["output_tokens"],
        found["usage"]["total_tokens"],
    )


def test_a_response_that_stops_is_a_504(scripted: Scripted, session: str) -> None:
    def script(connection: Connection) -> None:
        connection.send(JSON_HEAD + completion())
        connection.wait_until_left()

    answer = scripted.play(script).chat(session, model="halting/m")
    assert (answer.status, answer.error["code"]) == (504, "upstream_timeout")
    assert the_call(scripted.web, session)["outcome"] == "upstream_broken"


def _silent(connection: Connection) -> None:
    connection.wait_until_left()


def _bad_chunk(connection: Connection) -> None:
    connection.send(b"not a size\r\n")


TWO_CHUNKS = CHUNKED_SSE_HEAD + framed(chunk("one")) + framed(chunk("two"))
WITHOUT_A_LENGTH = SSE_HEAD + chunk("one") + chunk("two")


@pytest.mark.parametrize(
    ("begun", "end"),
    [*((TWO_CHUNKS, end) for end in (_close, _reset, _silent, _bad_chunk)), (WITHOUT_A_LENGTH, _reset)],
)
def test_a_broken_stream_ends_with_an_error_event_and_not_cleanly(
    begun: bytes, end: Script, scripted: Scripted, session: str
) -> None:
    def script(connection: Connection) -> None:
        connection.send(begun)
        # A reset discards bytes that the gateway has not read yet.
        scripted.web.process_pending_events()
        end(connection)

    with in_time():
        answer = scripted.play(script).stream(session, model="halting/m" if end is _silent else "m")
    assert answer.status == 200
    assert "[DONE]" not in answer.data_lines
    assert answer.events[-1]["error"]["code"].startswith("upstream_")
    assert [event["choices"][0]["delta"]["content"] for event in answer.events[:-1]] == ["one", "two"]
    assert not answer.clean
    found = the_call(scripted.web, session)
    assert (found["outcome"], found["usage_source"]) == ("upstream_broken", "estimated")
    assert found["usage"]["input_tokens"] > 0
    assert found["usage"]["output_tokens"] > 0


def test_a_broken_responses_stream_ends_with_an_error_and_response_failed(scripted: Scripted, session: str) -> None:
    def event(number: int) -> bytes:
        said = {"type": "response.output_text.delta", "delta": "hi", "output_index": 0, "sequence_number": number}
        return b"event: response.output_text.delta\ndata: " + json.dumps(said).encode() + b"\n\n"

    def script(connection: Connection) -> None:
        connection.send(CHUNKED_SSE_HEAD + framed(event(0)) + framed(event(1)))

    body = {"model": "m", "input": "hi", "stream": True}
    answer = scripted.play(script).post("/v1/responses", body, {"x-session-id": session})
    assert [one["sequence_number"] for one in answer.events] == [0, 1, 2, 3]
    assert [one["type"] for one in answer.events[2:]] == ["error", "response.failed"]
    response = answer.events[-1]["response"]
    assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
    assert response["error"]["message"] == answer.events[-2]["error"]["message"]


def test_openai_sdk_sees_the_error_of_an_interrupted_responses_stream(scripted: Scripted) -> None:
    created = {"type": "response.created", "sequence_number": 0, "response": {"id": "resp_1", "status": "in_progress"}}
    event = b"event: response.created\ndata: " + json.dumps(created).encode() + b"\n\n"
    scripted.play(lambda connection: connection.send(CHUNKED_SSE_HEAD + framed(event)))
    with openai.OpenAI(base_url=scripted.gateway.base_url, api_key="k", max_retries=0) as client:
        stream = client.responses.create(model="m", input="hi", stream=True)
        assert next(stream).type == "response.created"
        with pytest.raises(openai.APIError, match="broke off"):
            next(stream)


def test_an_interrupted_background_stream_has_no_response_failed_event(scripted: Scripted, session: str) -> None:
    created = {"type": "response.created", "sequence_number": 0, "response": {"id": "resp_1", "status": "in_progress"}}
    event = b"data: " + json.dumps(created).encode() + b"\n\n"
    web = scripted.play(lambda connection: connection.send(CHUNKED_SSE_HEAD + framed(event)))
    body = {"model": "m", "input": "hi", "stream": True, "background": True}
    answer = web.post("/v1/responses", body, {"x-session-id": session})
    assert [one["type"] for one in answer.events] == ["response.created", "error"]


def test_the_sdk_raises_when_a_stream_breaks(scripted: Scripted, session: str) -> None:
    scripted.play(lambda connection: connection.send(TWO_CHUNKS))
    with openai.OpenAI(base_url=scripted.gateway.base_url, api_key="k", max_retries=0, timeout=60) as client:
        stream = client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            extra_headers={"x-session-id": session},
        )
        assert len([next(stream), next(stream)]) == 2
        with pytest.raises(openai.APIError) as error:
            next(stream)
    assert not isinstance(error.value, openai.APITimeoutError)


def test_a_stream_that_breaks_after_its_usage_is_charged_by_that_usage(scripted: Scripted, session: str) -> None:
    def script(connection: Connection) -> None:
        connection.send(CHUNKED_SSE_HEAD + framed(chunk("one")) + framed(usage_chunk(30, 4)))

    answer = scripted.play(script).stream(session)
    assert answer.events[-1]["error"]
    found = the_call(scripted.web, session)
    assert found["usage_source"] == "provider"
    assert found["usage"]["total_tokens"] == 34


BEGUN: dict[str, tuple[str, dict[str, Any], bytes]] = {
    "chat": (CHAT, {"messages": HI}, chunk("Hello")),
    "completions": ("/v1/completions", {"prompt": "hi"}, chunk(choices=[{"index": 0, "text": "Hello"}])),
    "messages": (
        "/v1/messages",
        {"messages": HI, "max_tokens": 50},
        named_event({"type": "message_start", "message": {"role": "assistant", "usage": {"input_tokens": 9}}})
        + named_event({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hello"}}),
    ),
    "responses": (
        "/v1/responses",
        {"input": "hi"},
        named_event({"type": "response.created", "response": {"id": "resp_1", "status": "in_progress"}})
        + named_event({"type": "response.output_text.delta", "output_index": 0, "delta": "Hello"}),
    ),
}


@pytest.mark.parametrize("is_chunked", [True, False])
@pytest.mark.parametrize("api", BEGUN)
def test_a_stream_that_ends_too_early_in_http_ends_with_an_error_event(
    api: str, is_chunked: bool, scripted: Scripted, session: str
) -> None:
    path, body, begun = BEGUN[api]
    whole = CHUNKED_SSE_HEAD + framed(begun) + b"0\r\n\r\n" if is_chunked else SSE_HEAD + begun
    web = scripted.play(lambda connection: connection.send(whole))
    answer = web.post(path, {"model": "m", "stream": True, **body}, {"x-session-id": session})
    assert begun in answer.body
    last = answer.events[-1]
    error_holder = last["response"] if api == "responses" else last
    assert "before the response was complete" in error_holder["error"]["message"]
    assert not answer.clean
    found = the_call(web, session)
    assert found["outcome"] == "upstream_broken"
    assert found["usage"]["input_tokens"] > 0
    assert found["usage"]["output_tokens"] > 0
    assert found["usage_source"] == ("mixed" if api == "messages" else "estimated")


def test_a_stream_of_an_unknown_format_is_forwarded_unchanged(scripted: Scripted, session: str) -> None:
    said = b'data: {"token": {"text": "Hello"}}\n\n'
    answer = scripted.play(lambda connection: connection.send(SSE_HEAD + said)).stream(session)
    assert (answer.data_lines, answer.clean) == ([said[6:].decode().strip()], True)
    assert the_call(scripted.web, session)["outcome"] == "ok"


def test_a_stream_without_an_end_mark_is_complete_if_http_ends_it(scripted: Scripted, session: str) -> None:
    def script(connection: Connection) -> None:
        connection.send(CHUNKED_SSE_HEAD + framed(chunk("one")) + framed(usage_chunk(30, 4)) + b"0\r\n\r\n")

    answer = scripted.play(script).stream(session)
    assert answer.clean
    assert answer.totals == (30, 4, 34)
    assert not any("error" in event for event in answer.events)


@pytest.mark.parametrize("pause_s", [0, 0.2])
def test_bytes_after_the_end_mark_do_not_change_the_usage(pause_s: float, scripted: Scripted, session: str) -> None:
    def script(connection: Connection) -> None:
        connection.send(SSE_HEAD + chunk("one") + usage_chunk(30, 4) + DONE)
        time.sleep(pause_s)
        connection.send(usage_chunk(1000, 1000) + b"garbage \x00\xff\n\n" + DONE)

    answer = scripted.play(script).stream(session)
    assert answer.clean
    assert answer.totals == (30, 4, 34)
    assert b"1000" not in answer.body, "the client did not request usage"
    assert b"garbage" in answer.body
    assert scripted.web.get(f"/api/sessions/{session}").json["calls"] == 1


def test_a_stream_kept_open_after_the_end_mark_ends_for_the_client(scripted: Scripted, session: str) -> None:
    def script(connection: Connection) -> None:
        connection.send(CHUNKED_SSE_HEAD + framed(chunk("one")) + framed(usage_chunk()) + framed(DONE))
        connection.wait_until_left()

    answer = scripted.play(script).stream(session)
    assert answer.clean
    assert answer.totals == (10, 5, 15)


@pytest.mark.parametrize(
    "line", [b"data: {broken\n\n", b"data: [1,2]\n\n", b"data: \xff\xfe\n\n", b"nonsense\n\n", b"data\n\n"]
)
def test_a_malformed_event_is_forwarded_and_the_rest_is_metered(line: bytes, scripted: Scripted, session: str) -> None:
    def script(connection: Connection) -> None:
        connection.send(SSE_HEAD + chunk("one") + line + chunk("two") + usage_chunk(30, 4) + DONE)

    answer = scripted.play(script).stream(session)
    assert answer.clean
    assert chunk("one") + line + chunk("two") in answer.body
    assert b": x-session-cumulative-token-usage: " in answer.body
    view = scripted.web.get(f"/api/sessions/{session}").json
    assert view["cumulative_token_usage"]["total_tokens"] == 34


def test_a_malformed_stream_of_the_built_in_provider_is_metered(web: Web, mock: MockProvider, session: str) -> None:
    answer = web.stream(session, "malformed=1;chunks=6;tokens=20/6")
    assert answer.data_lines[-1] == "[DONE]"
    assert answer.totals == (20, 6, 26)


def test_a_response_that_is_not_json_is_forwarded_and_estimated(web: Web, mock: MockProvider, session: str) -> None:
    answer = web.chat(session, "malformed=1")
    assert answer.status == 200
    with pytest.raises(json.JSONDecodeError):
        json.loads(answer.body)
    assert answer.header("x-session-usage-source") == "estimated"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("status", [400, 401, 403, 404, 408, 409, 422, 429, 500, 503, 529])
def test_an_error_of_the_provider_is_forwarded_unchanged_and_costs_nothing(
    status: int, stream: bool, web: Web, mock: MockProvider, session: str
) -> None:
    answer = web.chat(session, f"status={status};retry_after=7", stream=stream)
    assert answer.status == status
    assert answer.error["message"] == f"A status {status} was asked for."
    assert answer.header("retry-after") == "7"
    assert answer.header("x-gateway-upstream-error") == "true"
    assert answer.header("x-session-cumulative-total-tokens") == "0"
    assert answer.header("x-session-cumulative-calls") == "0"
    nothing_charged(web, session)
    found = the_call(web, session)
    assert (found["outcome"], found["status"], found["usage"]) == ("provider_error", status, None)
    assert len(mock.calls) == 1


def test_an_error_with_status_200_is_forwarded_as_an_upstream_error_and_costs_nothing(
    scripted: Scripted, session: str
) -> None:
    body = b'{"error": {"code": 502, "message": "Provider returned error"}, "user_id": "u"}'
    answer = scripted.play(lambda connection: connection.whole(body)).chat(session, model="m")
    assert (answer.status, answer.body, answer.header("x-gateway-upstream-error")) == (200, body, "true")
    assert answer.totals == (0, 0, 0)
    assert the_call(scripted.web, session)["outcome"] == "provider_error"


def test_an_html_page_of_the_provider_is_forwarded(web: Web, session: str) -> None:
    answer = web.chat(session, "html=1")
    assert (answer.status, answer.header("content-type")) == (502, "text/html; charset=utf-8")
    assert answer.body.startswith(b"<html>")
    assert answer.header("x-gateway-upstream-error") == "true"


def test_usage_in_an_error_is_not_charged(scripted: Scripted, session: str) -> None:
    web = scripted.play(lambda connection: connection.whole(completion(), status=b"500 Oops"))
    assert web.chat(session).totals == (0, 0, 0)


def test_an_error_inside_a_stream_is_forwarded_and_earlier_output_is_charged(scripted: Scripted, session: str) -> None:
    error = b'data: {"error":{"message":"overloaded","type":"server_error"}}\n\n'

    def script(connection: Connection) -> None:
        connection.send(SSE_HEAD + chunk("one two three") + error)

    answer = scripted.play(script).stream(session)
    assert error in answer.body
    found = the_call(scripted.web, session)
    assert found["outcome"] == "provider_error"
    assert found["usage_source"] == "estimated"
    assert found["usage"]["output_tokens"] > 0


REDIRECTS = [b"300 Choices", b"301 Moved", b"302 Found", b"303 See", b"307 Temporary Redirect", b"308 Permanent"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("status", REDIRECTS)
def test_redirect_of_a_metered_call_is_an_error_that_names_its_target(
    status: bytes, stream: bool, scripted: Scripted, session: str
) -> None:
    target = b"location: https://user:secret@elsewhere.example:8443/v1/x?key=secret"
    web = scripted.play(lambda connection: connection.whole(b"{}", target, status=status))
    answer = web.chat(session, stream=stream)
    refused(answer, 502, "upstream_redirect", may_help="false")
    assert status[:3].decode() in answer.error["message"]
    assert "redirect to elsewhere.example:8443." in answer.error["message"]
    assert "secret" not in answer.body.decode()
    assert answer.header("location") is None
    assert [request.path for request in scripted.upstream.requests] == [CHAT]
    nothing_charged(scripted.web, session)


def test_openai_sdk_sends_no_prompt_to_the_target_of_a_redirect(scripted: Scripted, byte_server: StartUpstream) -> None:
    other = byte_server(lambda connection: connection.whole(completion()))
    target = f"location: {other.url}/v1/chat/completions".encode()
    scripted.play(lambda connection: connection.whole(b"", target, status=b"307 Temporary Redirect"))
    with openai.OpenAI(base_url=scripted.gateway.base_url, api_key="any") as client:
        with pytest.raises(openai.InternalServerError) as raised:
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    assert raised.value.code == "upstream_redirect"
    assert other.requests == []
    assert len(scripted.upstream.requests) == 1


def test_redirect_reaches_clients_of_the_messages_api_as_an_error_of_that_format(
    scripted: Scripted, session: str
) -> None:
    web = scripted.play(lambda connection: connection.whole(b"", b"location: /v1/x", status=b"308 Permanent"))
    body = {"model": "m", "max_tokens": 9, "messages": HI}
    answer = web.post("/v1/messages", body, {"x-session-id": session})
    assert (answer.status, answer.json["type"], answer.json["error"]["type"]) == (502, "error", "api_error")
    assert f"redirect to {scripted.upstream.url.partition('//')[2]}." in answer.json["error"]["message"]


def test_redirect_of_an_unmetered_request_with_a_body_is_an_error(scripted: Scripted) -> None:
    web = scripted.play(lambda connection: connection.whole(b"", b"location: http://x/", status=b"307 Temporary"))
    answer = web.post("/v1/messages/count_tokens", {"model": "m", "messages": HI})
    assert (answer.status, answer.error["code"]) == (502, "upstream_redirect")


def test_redirect_of_a_download_is_forwarded(scripted: Scripted) -> None:
    """A file may be stored at another host, and its request carries nothing that is metered."""
    target = b"location: https://files.example/1"
    answer = scripted.play(lambda connection: connection.whole(b"", target, status=b"302 Found")).get(
        "/v1/files/file-1/content"
    )
    assert (answer.status, answer.header("location")) == (302, "https://files.example/1")


def test_cookies_are_neither_forwarded_nor_stored(web: Web, mock: MockProvider, session: str) -> None:
    first = web.chat(session, "cookie=1", stream=False)
    assert first.status == 200
    assert first.header("set-cookie") is None
    streamed = web.stream(session, "cookie=1")
    assert streamed.header("set-cookie") is None
    for _ in range(3):
        web.chat(session)
    assert all(call.header("cookie") is None for call in mock.calls)
    # Cookies of clients are not forwarded either.
    web.post(CHAT, {"model": "m", "messages": HI}, {"cookie": "secret=1"})
    assert mock.calls[-1].header("cookie") is None


def test_hop_by_hop_headers_are_not_forwarded_to_the_provider(scripted: Scripted) -> None:
    hop = [
        b"keep-alive: timeout=5",
        b"proxy-authorization: Basic c2VjcmV0",
        b"proxy-connection: keep-alive",
        b"te: trailers",
        b"trailer: x-checksum",
        b"x-hop: 1",
        b"x-other-hop: 1",
        b"x-kept: 1",
        b"origin: http://gateway",
        b"referer: http://gateway/page",
        b"cookie: a=b",
        b"x-forwarded-for: 10.0.0.1",
        b"x-session-id: hop",
        b"openai-organization: org-1",
        b"accept-encoding: gzip, br",
    ]
    request = chat_bytes(b'{"model":"m","messages":[]}', *hop)
    request = request.replace(b"connection: close", b"connection: close, X-Hop, x-other-hop")
    assert talk(scripted.web.url, request).status == 200
    [received] = scripted.upstream.requests
    names = {name for name, _ in received.headers}
    assert not names & {
        "keep-alive", "proxy-authorization", "proxy-connection", "te", "trailer", "x-hop", "x-other-hop",
        "origin", "referer", "cookie", "x-forwarded-for", "x-session-id",
    }  # fmt: skip
    assert received.header("x-kept") == "1"
    assert received.header("openai-organization") == "org-1"
    assert received.header("accept-encoding") == "identity"
    assert received.header("host") == scripted.upstream.url.removeprefix("http://")
    assert "gateway" not in (received.header("connection") or "")


def test_every_connection_header_names_hop_by_hop_headers(scripted: Scripted) -> None:
    request = chat_bytes(b'{"model":"m","messages":[]}', b"connection: x-second-hop", b"x-second-hop: 1")
    assert talk(scripted.web.url, request).status == 200
    assert scripted.upstream.requests[0].header("x-second-hop") is None


def test_hop_by_hop_headers_are_not_forwarded_to_the_client(scripted: Scripted, session: str) -> None:
    web = scripted.play(
        lambda connection: connection.whole(
            completion(),
            b"Keep-Alive: timeout=99",
            b"X-Hop: 1",
            b"Connection: X-Hop",
            b"Proxy-Authenticate: Basic",
            b"Trailer: x-late",
            b"Upgrade: h2c",
            b"Alt-Svc: h3",
            b"Set-Cookie: a=b",
            b"Set-Cookie: c=d",
            b"X-Kept: 1",
            b"X-Request-Id: theirs",
            b"x-session-cumulative-total-tokens: 999999",
            b"x-session-id: another-session",
        )
    )
    answer = web.chat(session)
    names = [name for name, _ in answer.headers]
    assert not set(names) & {"keep-alive", "x-hop", "proxy-authenticate", "trailer", "upgrade", "alt-svc", "set-cookie"}
    assert answer.header("x-kept") == "1"
    assert [value for name, value in answer.headers if name == "x-request-id"] == ["theirs"]
    assert answer.header("x-gateway-request-id") not in {"theirs", None}
    # Headers of a provider cannot replace headers of the gateway.
    assert [value for name, value in answer.headers if name == "x-session-cumulative-total-tokens"] == ["15"]
    assert [value for name, value in answer.headers if name == "x-session-id"] == [session]


@pytest.mark.parametrize("value", [b"a\x01b", b"a\x7fb", b"caf\xe9"])
def test_unusual_bytes_in_a_header_of_the_provider_break_nothing(
    value: bytes, scripted: Scripted, session: str
) -> None:
    web = scripted.play(lambda connection: connection.whole(completion(), b"x-odd: " + value))
    answer = web.chat(session)
    assert answer.status in (200, 502)
    assert "\r" not in (answer.header("x-odd") or "")


@pytest.mark.parametrize("accepted", [None, "identity", "gzip"])
@pytest.mark.parametrize("stream", [True, False])
def test_unrequested_gzip_is_decompressed(
    stream: bool, accepted: str | None, web: Web, mock: MockProvider, session: str
) -> None:
    headers = {"x-mock": "gzip=1;tokens=20/6", "x-session-id": session}
    if accepted is not None:
        headers["accept-encoding"] = accepted
    body = {"model": "m", "messages": HI, "stream": stream}
    answer = web.post(CHAT, body, headers)
    assert mock.calls[0].header("accept-encoding") == "identity"
    assert answer.status == 200
    assert answer.header("content-encoding") is None
    assert answer.totals == (20, 6, 26)
    assert (answer.data_lines[-1] == "[DONE]") if stream else answer.json["choices"]


def test_gzip_is_decompressed_for_a_client_without_accept_encoding(web: Web, mock: MockProvider) -> None:
    answer = talk(web.url, chat_bytes(b'{"model":"m","messages":[]}', b"x-mock: gzip=1"))
    assert answer.header("content-encoding") is None
    assert answer.json["object"] == "chat.completion"


def test_a_compressed_error_is_decompressed(scripted: Scripted, session: str) -> None:
    """A client that sent no accept-encoding gets no gzip, for any status."""
    compressed = gzip.compress(b'{"error":{"message":"no","type":"x","param":null,"code":"y"}}')
    web = scripted.play(lambda connection: connection.whole(compressed, b"content-encoding: gzip", status=b"400 Bad"))
    answer = talk(web.url, chat_bytes(b'{"model":"m","messages":[]}'))
    assert answer.status == 400
    assert answer.header("content-encoding") is None
    assert answer.error["code"] == "y"


def test_a_compressed_file_is_decompressed_for_a_client_that_did_not_request_gzip(scripted: Scripted) -> None:
    data = b"some file content " * 100
    web = scripted.play(
        lambda connection: connection.whole(
            gzip.compress(data), b"content-encoding: gzip", b"content-type: application/octet-stream"
        )
    )
    answer = web.get("/v1/files/file-1/content")
    assert answer.header("content-encoding") is None
    assert answer.body == data


@pytest.mark.parametrize("packing", [b"br", b"zstd", b"gzip, gzip", b"GZIP, br"])
@pytest.mark.parametrize("kind", [b"application/json", b"text/event-stream"])
def test_a_response_with_an_unsupported_encoding_is_a_502(
    kind: bytes, packing: bytes, scripted: Scripted, session: str
) -> None:
    headers = (b"content-encoding: " + packing, b"content-type: " + kind)
    web = scripted.play(lambda connection: connection.whole(b"\x0b\x02\x80abc\x03", *headers))
    answer = web.chat(session)
    assert (answer.status, answer.error["code"]) == (502, "upstream_protocol_error")
    assert answer.header("x-should-retry") == "false"
    assert packing.decode().lower() in answer.error["message"]


def test_openai_sdk_does_not_retry_a_call_whose_response_cannot_be_decoded(scripted: Scripted) -> None:
    scripted.play(lambda connection: connection.whole(b"\x0b\x02\x80abc\x03", b"content-encoding: br"))
    with openai.OpenAI(base_url=scripted.gateway.base_url, api_key="any") as client:
        with pytest.raises(openai.InternalServerError):
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    assert len(scripted.upstream.requests) == 1


@pytest.mark.parametrize("status", [b"200 OK", b"400 Bad Request"])
@pytest.mark.parametrize("coding", [b"gzip, chunked", b"gzip", b"deflate, chunked", b"x-gzip"])
def test_gzip_as_a_transfer_coding_is_decoded(coding: bytes, status: bytes, scripted: Scripted, session: str) -> None:
    compressed = zlib.compress(completion()) if coding.startswith(b"deflate") else gzip.compress(completion())
    head = b"HTTP/1.1 " + status + b"\r\ncontent-type: application/json\r\nconnection: close\r\n"
    body = framed(compressed) + framed(b"") if coding.endswith(b"chunked") else compressed
    head += b"transfer-encoding: " + coding + b"\r\n\r\n"
    answer = scripted.play(lambda connection: connection.send(head + body)).chat(session)
    assert answer.status == int(status[:3])
    assert answer.json["object"] == "chat.completion"
    assert answer.header("transfer-encoding") is None
    if answer.status == 200:
        assert answer.totals == (10, 5, 15)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/files/file-1/content"])
@pytest.mark.parametrize("codings", [(b"br, chunked", b""), (b"gzip, chunked", b"content-encoding: gzip\r\n")])
def test_a_transfer_coding_that_cannot_be_decoded_is_an_error(
    codings: tuple[bytes, bytes], path: str, scripted: Scripted
) -> None:
    head = b"HTTP/1.1 200 OK\r\n" + codings[1] + b"transfer-encoding: " + codings[0] + b"\r\n\r\n"
    web = scripted.play(lambda connection: connection.send(head + framed(b"\x1f\x8babc") + framed(b"")))
    body = {"model": "m", "messages": HI}
    answer = web.post(path, body) if path.endswith("completions") else web.get(path)
    assert (answer.status, answer.error["code"]) == (502, "upstream_protocol_error")
    assert answer.header("x-should-retry") == "false"


def test_a_charset_as_content_encoding_is_ignored(scripted: Scripted, session: str) -> None:
    web = scripted.play(lambda connection: connection.whole(completion(), b"content-encoding: utf-8"))
    assert web.chat(session).totals == (10, 5, 15)


@pytest.mark.parametrize("split", [1, 40, 4096])
def test_json_with_the_content_type_of_a_stream_is_metered_and_forwarded_unchanged(
    split: int, scripted: Scripted, session: str
) -> None:
    def script(connection: Connection) -> None:
        connection.send(CHUNKED_SSE_HEAD + framed(b"\n\n"))
        time.sleep(0.05)
        connection.send(framed(completion()[:split]))
        time.sleep(0.05)
        connection.send(framed(completion()[split:] or b" ") + b"0\r\n\r\n")

    answer = scripted.play(script).stream(session)
    assert answer.body.strip() == completion()
    found = the_call(scripted.web, session)
    assert (found["usage"]["total_tokens"], found["usage_source"]) == (15, "provider")


def test_a_json_error_with_the_content_type_of_a_stream_costs_nothing(scripted: Scripted, session: str) -> None:
    body = b'{"error":{"message":"no","type":"x","param":null,"code":"y"}}'
    web = scripted.play(lambda connection: connection.whole(body, b"content-type: text/event-stream"))
    assert web.stream(session).body == body
    nothing_charged(web, session)


def test_incomplete_json_with_the_content_type_of_a_stream_ends_with_an_error(scripted: Scripted, session: str) -> None:
    answer = scripted.play(lambda connection: connection.send(CHUNKED_SSE_HEAD + framed(completion()[:90]))).stream(
        session
    )
    assert not answer.clean
    assert answer.events[-1]["error"]["code"].startswith("upstream_")
    assert the_call(scripted.web, session)["outcome"] == "upstream_broken"


def test_a_stream_whose_first_chunk_ends_before_its_json_is_a_stream(scripted: Scripted, session: str) -> None:
    def script(connection: Connection) -> None:
        connection.send(CHUNKED_SSE_HEAD + framed(b"data: "))
        time.sleep(0.05)
        connection.send(framed(chunk("one")[6:] + usage_chunk() + DONE) + b"0\r\n\r\n")

    answer = scripted.play(script).stream(session)
    assert (answer.totals, answer.data_lines[-1]) == ((10, 5, 15), "[DONE]")


def test_invalid_gzip_is_a_502(scripted: Scripted, session: str) -> None:
    web = scripted.play(lambda connection: connection.whole(b"\x1f\x8bgarbage", b"content-encoding: gzip"))
    answer = web.chat(session)
    assert answer.status == 502
    assert answer.error["code"] == "upstream_protocol_error"
    assert answer.header("x-should-retry") == "false"


def test_incomplete_gzip_is_a_502(scripted: Scripted, session: str) -> None:
    compressed = gzip.compress(completion())
    web = scripted.play(
        lambda connection: connection.whole(compressed[: len(compressed) // 2], b"content-encoding: gzip")
    )
    answer = web.chat(session)
    # Half a response is not forwarded as if it were whole.
    assert answer.status == 502
    assert answer.error["code"] == "upstream_protocol_error"


def drained(web: Web, body: bytes) -> int:
    """Return the number of bytes of a response, which is read and discarded."""
    with connect(web.url) as sock:
        sock.sendall(chat_bytes(body))
        size = 0
        with contextlib.suppress(ConnectionError):
            while piece := sock.recv(1 << 20):
                size += len(piece)
    return size


def bomb(size: int) -> bytes:
    """Return `size` bytes "x" compressed with gzip, without a line end."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    block = b"x" * (1 << 20)
    return b"".join([packer.compress(block) for _ in range(size >> 20)]) + packer.flush()


def held_by_the_kernel() -> int:
    """Return the maximum number of bytes that the kernel buffers between two ends of a connection."""
    ends = (Path("/proc/sys/net/ipv4", name).read_text().split() for name in ("tcp_rmem", "tcp_wmem"))
    return sum(int(most) for _, _, most in ends)


def sse(body: bytes) -> Callable[[Connection], None]:
    head = SSE_HEAD.replace(b"\r\n\r\n", b"\r\ncontent-encoding: gzip\r\n\r\n")
    return lambda connection: connection.send(head + body)


def test_memory_stays_bounded_for_any_response(gateway_process: StartProcess, byte_server: StartUpstream) -> None:
    upstream = byte_server(lambda connection: connection.whole(completion()))
    gateway = gateway_process(upstream.url, **{"sessions.drain_s": 1})
    for _ in range(3):
        assert gateway.web.chat("warm").status == 200
    before = gateway.rss
    peak = 0
    stop = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not stop.wait(0.01):
            peak = max(peak, gateway.rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        compressed = bomb(160 << 20)
        body = b'{"model":"m","messages":[],"stream":true}'
        # A gzip bomb as an event stream without the end of any event.
        upstream.script = sse(compressed)
        assert drained(gateway.web, body) >= 160 << 20
        in_bomb = peak - before

        # A line without an end.
        def endless(connection: Connection) -> None:
            connection.send(SSE_HEAD + b"data: ")
            block = b"x" * (1 << 20)
            for _ in range(100):
                connection.send(block)

        upstream.script = endless
        assert drained(gateway.web, body) >= 100 << 20
        # A reader that does not read: the provider has to wait.
        sent: list[Connection] = []

        def firehose(connection: Connection) -> None:
            sent.append(connection)
            connection.send(SSE_HEAD)
            event = chunk("y" * 10_000)
            while not connection.stopping.is_set():
                connection.send(event)

        def at_rest() -> bool:
            before = [connection.sent for connection in sent]
            time.sleep(0.3)
            now = [connection.sent for connection in sent]
            assert max(now) < 2 * held_by_the_kernel() + (8 << 20), (
                "the provider is read although the clients read nothing"
            )
            return now == before

        upstream.script = firehose
        with contextlib.ExitStack() as stalled:
            for _ in range(8):
                stalled.enter_context(connect(gateway.url)).sendall(chat_bytes(body))
            until(lambda: len(sent) == 8)
            until(at_rest)
        # A gzip bomb as a whole response.
        upstream.script = lambda connection: connection.whole(compressed, b"content-encoding: gzip")
        drained(gateway.web, b'{"model":"m","messages":[]}')
    finally:
        stop.set()
        watcher.join()
    assert in_bomb < 100 << 20
    assert peak - before < 300 << 20
    upstream.script = lambda connection: connection.whole(completion())
    assert gateway.web.chat("warm").status == 200


def test_a_closed_pooled_connection_is_replaced_without_an_error(mock: MockProvider, gateway_server: Any) -> None:
    """A restarted provider has closed the pooled connections; the next call opens a new one."""
    from gateway.mock import MockServer

    first = MockServer(mock).start()
    port = int(first.url.rpartition(":")[2])
    gateway = gateway_server(first.url)
    assert gateway.web.chat("s").status == 200
    first.stop()
    with MockServer(mock, port=port):
        gateway.web.process_pending_events()
        assert gateway.web.chat("s").status == 200
    assert mock.billed().calls == 2
    assert gateway.web.get("/api/sessions/s").json["calls"] == 2
