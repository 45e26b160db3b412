"""All paths except chat: forwarded with as few changes as possible, and metered if the response carries usage."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from gateway.mock import MockProvider
from tests.conftest import Scripted, StartGateway, StartUpstream
from tests.support.gateways import GatewayThread
from tests.support.scripted import SSE_HEAD, Connection
from tests.support.web import HI, Web


@pytest.fixture
def claude(gateway: GatewayThread) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=gateway.url, api_key="any", max_retries=0) as made:
        yield made


def totals(web: Web, session: str) -> tuple[int, int, int]:
    usage = web.get(f"/api/sessions/{session}").json["cumulative_token_usage"]
    return usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]


def billed(mock: MockProvider) -> tuple[int, int, int]:
    ledger = mock.billed()
    return ledger.input_tokens, ledger.output_tokens, ledger.total_tokens


def test_a_file_is_uploaded_unchanged_and_costs_nothing(
    client: openai.OpenAI, web: Web, mock: MockProvider, session: str
) -> None:
    content = bytes(range(256)) * 4000
    raw = client.files.with_raw_response.create(
        file=("data.bin", io.BytesIO(content)), purpose="assistants", extra_headers={"x-session-id": session}
    )
    assert raw.parse().bytes == len(content)
    [call] = mock.calls
    assert (call.header("content-type") or "").startswith("multipart/form-data; boundary=")
    assert call.body_bytes > len(content)
    assert web.get(f"/api/sessions/{session}").status == 404 or totals(web, session) == (0, 0, 0)


def test_a_large_upload_arrives_whole(web: Web, mock: MockProvider) -> None:
    body = b"--b\r\ncontent-disposition: form-data; name=x\r\n\r\n" + b"\x00\xff" * (15 << 20) + b"\r\n--b--\r\n"
    web.post("/v1/uploads/upload_1/parts", body, {"content-type": "multipart/form-data; boundary=b"})
    assert mock.calls[0].body_sha256 == hashlib.sha256(body).hexdigest()


def test_speech_is_forwarded_as_bytes(client: openai.OpenAI, mock: MockProvider, session: str) -> None:
    raw = client.audio.speech.with_raw_response.create(
        model="mock-tts",
        voice="alloy",
        input="hello there",
        response_format="wav",
        extra_headers={"x-session-id": session},
    )
    assert raw.headers["content-type"] == "audio/wav"
    audio = raw.content
    assert audio == bytes(range(256)) * 2
    assert raw.headers["content-length"] == str(len(audio))
    assert raw.headers["x-session-id"] == session


def test_a_transcription_is_metered(client: openai.OpenAI, web: Web, mock: MockProvider, session: str) -> None:
    answer = client.audio.transcriptions.create(
        model="mock-transcribe", file=("a.wav", b"\x00" * 50_000), extra_headers={"x-session-id": session}
    )
    assert answer.text == "A recording of 50000 bytes."
    assert totals(web, session) == billed(mock)
    assert billed(mock)[0] == 50
    [record] = web.get(f"/api/sessions/{session}/calls").json["calls"]
    assert (record["model"], record["usage_source"]) == ("mock-transcribe", "provider")


def test_images_are_metered(client: openai.OpenAI, web: Web, mock: MockProvider, session: str) -> None:
    answer = client.images.generate(model="mock-image", prompt="a cat", n=2, extra_headers={"x-session-id": session})
    assert answer.data is not None
    assert len(answer.data) == 2
    assert totals(web, session) == billed(mock)
    assert billed(mock)[1] > 0


def test_models_are_listed_in_the_format_of_the_caller(
    client: openai.OpenAI, claude: anthropic.Anthropic, mock: MockProvider
) -> None:
    assert "mock-small" in [model.id for model in client.models.list().data]
    assert client.models.retrieve("mock-small").object == "model"
    assert claude.models.list().data[0].type == "model"
    assert all(call.billed is None for call in mock.calls)


def test_embeddings_are_metered(client: openai.OpenAI, web: Web, mock: MockProvider, session: str) -> None:
    raw = client.embeddings.with_raw_response.create(
        model="mock-embed", input=["one", "two three"], extra_headers={"x-session-id": session}
    )
    answer = raw.parse()
    assert len(answer.data) == 2
    assert totals(web, session) == billed(mock) == (answer.usage.prompt_tokens, 0, answer.usage.total_tokens)
    assert raw.headers["x-session-cumulative-total-tokens"] == str(answer.usage.total_tokens)


def test_embeddings_without_a_session_id_share_one_session_per_key(client: openai.OpenAI, mock: MockProvider) -> None:
    first = client.embeddings.with_raw_response.create(model="mock-embed", input="one")
    second = client.embeddings.with_raw_response.create(model="mock-embed", input="two")
    assert first.headers["x-session-id"] == second.headers["x-session-id"]


@pytest.mark.parametrize("stream", [True, False])
def test_completions_are_metered(
    stream: bool, client: openai.OpenAI, web: Web, mock: MockProvider, session: str
) -> None:
    headers = {"x-session-id": session}
    if stream:
        options: Any = {"include_usage": True}
        events = list(
            client.completions.create(
                model="m", prompt="once upon", stream=True, stream_options=options, extra_headers=headers
            )
        )
        assert events[-1].usage is not None
    else:
        client.completions.create(model="m", prompt="once upon", extra_headers=headers)
    assert totals(web, session) == billed(mock)


def test_usage_is_requested_for_streamed_completions_and_hidden_from_the_client(
    web: Web, mock: MockProvider, session: str
) -> None:
    body = {"model": "m", "prompt": "once upon a time", "stream": True}
    answer = web.post("/v1/completions", body, {"x-session-id": session})
    assert answer.data_lines[-1] == "[DONE]"
    assert not any(json.loads(line).get("usage") for line in answer.data_lines[:-1])
    assert json.loads(mock.calls[0].body) == {**body, "stream_options": {"include_usage": True}}
    assert answer.comments["x-session-usage-source"] == "provider"
    assert answer.totals == billed(mock)


def test_streamed_completions_of_a_host_that_reports_no_usage_are_estimated(
    web: Web, mock: MockProvider, session: str
) -> None:
    body = {"model": "m", "prompt": "once upon a time", "stream": True}
    answer = web.post("/v1/completions", body, {"x-session-id": session, "x-mock": "usage=none"})
    assert answer.comments["x-session-usage-source"] == "estimated"
    assert answer.totals[1] > 0


def test_responses_are_metered(client: openai.OpenAI, web: Web, mock: MockProvider, session: str) -> None:
    raw = client.responses.with_raw_response.create(
        model="m", input="hi there", extra_headers={"x-session-id": session}
    )
    answer = raw.parse()
    assert answer.usage is not None
    assert raw.headers["x-session-cumulative-total-tokens"] == str(answer.usage.total_tokens)
    assert totals(web, session) == billed(mock)


def test_streamed_responses_are_metered(client: openai.OpenAI, web: Web, mock: MockProvider, session: str) -> None:
    with client.responses.stream(model="m", input="hi there", extra_headers={"x-session-id": session}) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[-1] == "response.completed"
    assert final.usage is not None
    assert totals(web, session) == billed(mock)
    assert totals(web, session)[2] == final.usage.total_tokens


def test_tools_of_responses_are_recorded(client: openai.OpenAI, web: Web, mock: MockProvider, session: str) -> None:
    tools: Any = [{"type": "function", "name": "search", "parameters": {"type": "object"}, "strict": False}]
    for stream in (True, False):
        answer: Any = client.responses.create(
            model="m", input="hi", tools=tools, stream=stream, extra_headers={"x-session-id": session}
        )
        if stream:
            list(answer)
    assert web.get(f"/api/sessions/{session}").json["recent_tools"] == ["search", "search"]
    assert totals(web, session) == billed(mock)


def test_messages_are_metered(claude: anthropic.Anthropic, web: Web, mock: MockProvider, session: str) -> None:
    raw = claude.messages.with_raw_response.create(
        model="m",
        max_tokens=50,
        messages=[{"role": "user", "content": "hi there"}],
        extra_headers={"x-session-id": session},
    )
    assert raw.headers["x-session-cumulative-total-tokens"] == str(billed(mock)[2])
    assert totals(web, session) == billed(mock)


def test_streamed_messages_are_metered(claude: anthropic.Anthropic, web: Web, mock: MockProvider, session: str) -> None:
    with claude.messages.stream(
        model="m",
        max_tokens=50,
        messages=[{"role": "user", "content": "hi there"}],
        extra_headers={"x-session-id": session},
    ) as stream:
        text = "".join(stream.text_stream)
    assert "hi there" in text
    assert totals(web, session) == billed(mock)
    view = web.get(f"/api/sessions/{session}").json
    assert (view["calls"], view["usage_source"]) == (1, "provider")


def test_cached_messages_are_counted_with_their_cached_part(
    claude: anthropic.Anthropic, web: Web, mock: MockProvider, session: str
) -> None:
    messages: Any = [
        {"role": "user", "content": "a long document about many things. " * 40},
        {"role": "user", "content": "and?"},
    ]
    for _ in range(2):
        claude.messages.create(model="m", max_tokens=50, messages=messages, extra_headers={"x-session-id": session})
    assert totals(web, session) == billed(mock)


def test_counting_tokens_is_free(claude: anthropic.Anthropic, web: Web, mock: MockProvider, session: str) -> None:
    counted = claude.messages.count_tokens(
        model="m", messages=[{"role": "user", "content": "hi"}], extra_headers={"x-session-id": session}
    )
    assert counted.input_tokens > 0
    assert web.get(f"/api/sessions/{session}").status == 404


@pytest.mark.parametrize("path", ["/messages", "/v1/messages", "/v1/v1/messages", "/s/bare-claude/messages"])
def test_anthropics_paths_work_with_and_without_the_version(path: str, web: Web, mock: MockProvider) -> None:
    answer = web.post(path, {"model": "m", "max_tokens": 5, "messages": HI})
    assert answer.status == 200
    assert answer.json["type"] == "message"
    assert mock.calls[0].path == "/v1/messages"


def test_anthropic_headers_are_forwarded(claude: anthropic.Anthropic, mock: MockProvider) -> None:
    claude.messages.create(
        model="m",
        max_tokens=5,
        messages=[{"role": "user", "content": "hi"}],
        extra_headers={"anthropic-beta": "context-1m-2025-08-07"},
    )
    assert mock.calls[0].header("anthropic-beta") == "context-1m-2025-08-07"
    assert mock.calls[0].header("anthropic-version")


def test_all_requests_of_the_anthropic_sdk_go_to_anthropic(
    byte_server: StartUpstream, gateway_server: StartGateway
) -> None:
    openais, anthropics = (byte_server(lambda connection: connection.whole(b'{"data":[]}')) for _ in range(2))
    provider = {"base_url": anthropics.url, "auth": "none"}
    gateway = gateway_server(openais.url, **{"built_in_providers": True, "providers.anthropic": provider})
    with anthropic.Anthropic(base_url=gateway.url, api_key="any", max_retries=0) as claude:
        claude.beta.files.upload(file=("notes.txt", b"for Claude"))
        claude.beta.skills.list()
        claude.messages.batches.list()
    assert [request.path.partition("?")[0] for request in anthropics.requests] == [
        "/v1/files",
        "/v1/skills",
        "/v1/messages/batches",
    ]
    assert not openais.requests
    with openai.OpenAI(base_url=gateway.base_url, api_key="any", max_retries=0) as client:
        client.files.list()
    assert len(openais.requests) == 1


def test_an_error_of_the_anthropic_api_keeps_its_format(claude: anthropic.Anthropic, mock: MockProvider) -> None:
    with pytest.raises(anthropic.APIStatusError) as error:
        claude.messages.create(
            model="m",
            max_tokens=5,
            messages=[{"role": "user", "content": "hi"}],
            extra_headers={"x-mock": "status=529"},
        )
    assert error.value.status_code == 529
    assert error.value.response.headers["x-gateway-upstream-error"] == "true"


def test_a_broken_anthropic_stream_ends_with_an_anthropic_error_event(scripted: Scripted, session: str) -> None:
    start = (
        b'event: message_start\ndata: {"type":"message_start","message":{"id":"m","type":"message","role":"assistant",'
        b'"model":"m","content":[],"usage":{"input_tokens":25,"output_tokens":1}}}\n\n'
    )

    def script(connection: Connection) -> None:
        connection.send(SSE_HEAD.replace(b"connection: close", b"transfer-encoding: chunked"))
        connection.send(b"%x\r\n" % len(start) + start + b"\r\n")

    web = scripted.play(script)
    body = {"model": "m", "max_tokens": 5, "messages": HI, "stream": True}
    answer = web.post("/v1/messages", body, {"x-session-id": session})
    last = answer.body.strip().split(b"\n\n")[-1]
    assert last.startswith(b"event: error\ndata: ")
    assert json.loads(last.partition(b"data: ")[2])["type"] == "error"
    assert totals(web, session)[0] == 25


def test_a_metered_response_is_not_counted_again_when_it_is_fetched(scripted: Scripted, session: str) -> None:
    stored = b'{"id":"resp_1","object":"response","usage":{"input_tokens":50,"output_tokens":5,"total_tokens":55}}'
    web = scripted.play(lambda connection: connection.whole(stored))
    headers = {"x-session-id": session}
    assert web.post("/v1/responses", {"model": "m", "input": "x"}, headers).totals == (50, 5, 55)
    for method, path in (
        ("GET", "/v1/responses/resp_1"),
        ("POST", "/v1/responses/resp_1/cancel"),
        ("DELETE", "/v1/responses/resp_1"),
    ):
        assert web.send(method, path, b"" if method == "POST" else None, headers).body == stored
    assert totals(web, session) == (50, 5, 55)


def test_an_unknown_path_with_usage_in_its_response_is_metered(scripted: Scripted, session: str) -> None:
    answer = b'{"results":[],"usage":{"input_tokens":50,"output_tokens":5}}'
    web = scripted.play(lambda connection: connection.whole(answer))
    assert web.post("/v1/rerank", {"model": "m", "query": "x"}, {"x-session-id": session}).totals == (50, 5, 55)


def test_a_broken_binary_response_does_not_end_cleanly(scripted: Scripted, session: str) -> None:
    def script(connection: Connection) -> None:
        connection.send(b"HTTP/1.1 200 OK\r\ncontent-type: audio/mpeg\r\ncontent-length: 1000\r\n\r\n" + b"a" * 500)

    web = scripted.play(script)
    answer = web.post("/v1/audio/speech", {"model": "m", "input": "x"}, {"x-session-id": session})
    assert (answer.status, answer.clean) == (200, False)
    assert answer.body == b"a" * 500


def test_a_range_request_for_a_file_is_forwarded(scripted: Scripted) -> None:
    web = scripted.play(
        lambda connection: connection.whole(
            b"part", b"content-range: bytes 0-3/10", b"content-type: application/pdf", status=b"206 Partial Content"
        )
    )
    answer = web.get("/v1/files/f/content", {"range": "bytes=0-3"})
    assert (answer.status, answer.body, answer.header("content-range")) == (206, b"part", "bytes 0-3/10")
    assert scripted.upstream.requests[0].header("range") == "bytes=0-3"


@pytest.mark.parametrize("announced", [b"", b"content-length: 0\r\n", b"content-length: 5\r\n"])
@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
def test_a_response_without_a_body_is_forwarded_without_a_content_length(
    status: bytes, announced: bytes, scripted: Scripted
) -> None:
    def script(connection: Connection) -> None:
        connection.send(b"HTTP/1.1 " + status + b"\r\n" + announced + b"connection: close\r\n\r\n")

    answer = scripted.play(script).send("DELETE", "/v1/files/f")
    assert (answer.status, answer.body, answer.header("content-length")) == (int(status[:3]), b"", None)


def test_a_head_request_gets_a_response_without_a_body(scripted: Scripted) -> None:
    def script(connection: Connection) -> None:
        connection.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 55\r\n\r\n")

    answer = scripted.play(script).send("HEAD", "/v1/models")
    assert (answer.status, answer.body) == (200, b"")
