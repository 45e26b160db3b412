"""Errors in the first event of a stream or inside a 200, and the limits of waiting for the first event."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence

import pytest

from gateway.core.errors import UpstreamProtocolError
from gateway.dialects.base import named_event
from gateway.dialects.openai_chat import OpenAIChat
from gateway.dialects.openai_responses import OpenAIResponses
from gateway.pipeline import early_refusal
from gateway.pipeline.early_refusal import BegunResponse, is_event_stream, is_whole, looked_at, looked_at_whole
from gateway.upstream.body import AlreadyRead
from tests.support.fakes import BODY, SSE, FakeReply
from tests.support.scripted import chunk, completion

DIALECT = OpenAIChat()
CALL = DIALECT.read(BODY)


async def looked(*pieces: bytes) -> tuple[int, bytes]:
    return await status_and_body(
        await looked_at(FakeReply(headers=SSE, pieces=list(pieces)), DIALECT.reader(CALL, drop_usage=False))
    )


async def status_and_body(begun: BegunResponse) -> tuple[int, bytes]:
    """Return the status and the body of a refusal, or of the response itself."""
    answer = begun.refusal or begun
    return answer.status, b"".join([piece async for piece in answer.chunks()])


@pytest.mark.parametrize(
    ("error", "status"),
    [
        ({"code": 429}, 429),
        ({"code": "429"}, 429),
        ({"status": 503, "code": "whatever"}, 503),
        ({"type": "overloaded_error"}, 529),
        ({"code": "rate_limit_exceeded"}, 429),
        ({"code": None, "type": "server_error"}, 500),
        ({"message": "Something"}, 502),
        ("Something", 502),
    ],
)
async def test_an_error_event_has_the_status_of_the_same_plain_error(error: object, status: int) -> None:
    said = json.dumps({"error": error}).encode()
    assert await looked(b"data: " + said[:7], said[7:] + b"\n\n" + chunk("late")) == (status, said)


async def test_an_error_that_reports_usage_is_a_response() -> None:
    for usage, status in (({"prompt_tokens": 7, "completion_tokens": 0}, 200), ({"prompt_tokens": 0}, 503)):
        event = b"data: " + json.dumps({"error": {"code": 503}, "usage": usage}).encode() + b"\n\n"
        assert (await looked(event))[0] == status


@pytest.mark.parametrize("code", [400, 401, 422, "invalid_request_error", "invalid_prompt"])
async def test_an_error_of_the_request_is_forwarded_to_the_client(code: object) -> None:
    event = b"data: " + json.dumps({"error": {"code": code}}).encode() + b"\n\n"
    assert await looked(event) == (200, event)


@pytest.mark.parametrize(
    "error", [{"code": "context_length_exceeded"}, {"message": "prompt is too long: 5 tokens > 4"}]
)
async def test_a_context_length_error_is_a_refusal(error: dict[str, str]) -> None:
    said = json.dumps({"error": {"type": "invalid_request_error", **error}}).encode()
    assert await looked(b"data: " + said + b"\n\n") == (400, said)


def event(kind: str, **fields: object) -> bytes:
    return named_event({"type": kind, **fields})


TAKEN = [
    event(f"response.{name}", response={"instructions": "x" * 9_000}) for name in ("created", "queued", "in_progress")
]
LONG = {"code": "context_length_exceeded", "message": "Your input exceeds the context window of this model."}


async def looked_of_responses(*pieces: bytes) -> tuple[int, bytes]:
    dialect = OpenAIResponses()
    reader = dialect.reader(dialect.read(b'{"model":"m","input":"hi","stream":true}'), drop_usage=False)
    return await status_and_body(await looked_at(FakeReply(headers=SSE, pieces=list(pieces)), reader))


@pytest.mark.parametrize(
    ("said", "status", "body"),
    [
        (event("error", error=LONG), 400, {"type": "error", "error": LONG}),
        (event("error", **LONG), 400, {"type": "error", **LONG}),
        (event("response.failed", response={"error": LONG}), 400, {"error": LONG}),
        (
            event("response.failed", response={"error": {"code": "server_error"}}),
            500,
            {"error": {"code": "server_error"}},
        ),
    ],
)
async def test_an_error_may_follow_events_that_accept_the_request(said: bytes, status: int, body: object) -> None:
    found, left = await looked_of_responses(*TAKEN, said)
    assert (found, json.loads(left)) == (status, body)
    plain = [piece.partition(b"\n")[2] for piece in (*TAKEN, said)]
    assert (await looked_of_responses(b"".join(plain)))[0] == status


async def test_a_stream_with_output_or_a_final_error_is_forwarded_unchanged() -> None:
    whole = [*TAKEN, event("response.output_text.delta", delta="x"), event("response.failed", response={"error": LONG})]
    for pieces in (
        whole,
        [*whole[:3], event("response.failed", response={"error": {"code": "invalid_prompt"}})],
    ):
        assert await looked_of_responses(*pieces) == (200, b"".join(pieces))


@pytest.mark.parametrize(
    "pieces",
    [
        (chunk("one"), chunk("two")),
        (chunk("one") + b'data: {"error":{"code":503}}\n\n',),
        (b": comment\n\n", b"\n\n", chunk("one")[:9], chunk("one")[9:]),
        (b'data: {"error":{"code":503}}',),
        (b'{"error":{"code":503}}',),
        (b'{"error":{"code":503}}\n\n',),
        (b"data: no JSON\n\n",),
    ],
    ids=["text", "text first", "comments", "cut", "no event", "closed", "no JSON"],
)
async def test_a_stream_with_any_other_start_is_forwarded_unchanged(pieces: tuple[bytes, ...]) -> None:
    assert await looked(*pieces) == (200, b"".join(pieces))


async def looked_at_json(*pieces: bytes | Exception) -> BegunResponse:
    return await looked_at_whole(FakeReply(pieces=list(pieces)), DIALECT.answer)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (b'{"error":{"code":502,"message":"Provider returned error"},"user_id":"u"}', 502),
        (b' \n { "error" : {"code":429,"message":"rate limited"}}', 429),
        (b'{"error":"Something"}', 502),
        (b'{"type":"error","error":{"type":"overloaded_error"}}', 529),
        (b'{"error":{"code":400,"message":"prompt is too long: 5 tokens > 4"}}', 400),
        (b'{"error":{"code":502,"message":"' + b"x" * 9_000 + b'"}}', 502),
    ],
)
async def test_an_error_inside_a_200_has_the_status_that_it_names(error: bytes, status: int) -> None:
    for pieces in ([error], [error[at : at + 1] for at in range(len(error))]):
        assert await status_and_body(await looked_at_json(*pieces)) == (status, error)


@pytest.mark.parametrize(
    "body",
    [
        completion(),
        b"",
        b"{}",
        b'{"error":null,"choices":[]}',
        b'{"error":{"code":400,"message":"Bad schema"}}',
        b'{"error":{"code":502},"usage":{"prompt_tokens":5,"completion_tokens":0}}',
        b'{"error":{"code":502,"message":"' + b"x" * 2**20 + b'"}}',
        b'{"error":{"code":502}',
    ],
)
async def test_any_other_response_is_forwarded_unchanged(body: bytes) -> None:
    for pieces in ([body], [body[:9], body[9:]]):
        assert await status_and_body(await looked_at_json(*pieces)) == (200, body)


async def test_a_broken_response_raises_for_its_reader() -> None:
    begun = await looked_at_json(b'{"error":{"code":502', UpstreamProtocolError("broke off"))
    assert begun.refusal is None
    with pytest.raises(UpstreamProtocolError):
        await status_and_body(begun)


def test_only_uncompressed_json_is_checked_for_errors() -> None:
    assert is_whole(FakeReply())
    assert is_whole(FakeReply(headers=[(b"content-type", b"application/json; charset=utf-8")]))
    assert not is_whole(FakeReply(headers=[(b"content-type", b"application/json"), (b"content-encoding", b"gzip")]))
    assert not is_whole(FakeReply(headers=SSE))
    assert not is_whole(FakeReply(400))


@pytest.mark.parametrize("pieces", [(), (b"\n\n",), (b": comment\n\n: and ano", b"ther"), TAKEN[:1], TAKEN])
async def test_a_stream_that_ends_before_any_output_is_a_failure(pieces: Sequence[bytes]) -> None:
    with pytest.raises(UpstreamProtocolError):
        await looked_of_responses(*pieces)


async def test_waiting_past_comments_is_limited_in_time_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    class Endless(FakeReply):
        async def chunks(self) -> AsyncIterator[bytes]:
            while True:
                seen.append(1)
                await asyncio.sleep(0)
                yield b": waiting\n\n"

    endless = Endless(headers=SSE)
    answer = await asyncio.wait_for(looked_at(endless, DIALECT.reader(CALL, drop_usage=False)), 30)
    assert answer.status == 200
    assert len(seen) <= 2**20 // 11 + 2
    seen.clear()
    monkeypatch.setattr(early_refusal, "_MAX_WAIT_S", 0.0)
    await looked_at(endless, DIALECT.reader(CALL, drop_usage=False))
    assert len(seen) <= 2


def test_only_an_uncompressed_event_stream_is_checked() -> None:
    assert is_event_stream(FakeReply(headers=SSE))
    assert is_event_stream(FakeReply(headers=[(b"content-type", b"Text/Event-Stream ; charset=utf-8")]))
    assert not is_event_stream(FakeReply(headers=[*SSE, (b"content-encoding", b"gzip")]))
    assert not is_event_stream(FakeReply(headers=[(b"content-type", b"application/json")]))
    assert not is_event_stream(AlreadyRead(503, SSE, b""))
