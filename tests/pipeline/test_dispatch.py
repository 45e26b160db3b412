"""Call one provider with fakes: what its refusals mean, and what is sent instead."""

from __future__ import annotations

import asyncio
import json

import pytest

from gateway.core.http.request import Outgoing
from gateway.core.http.retry_policy import EXPLAINED
from gateway.dialects.base import named_event
from tests.support.fakes import KEY, SSE, STREAM, FakeReply, World
from tests.support.scripted import DONE, chunk


@pytest.fixture
def world() -> World:
    return World()


@pytest.mark.parametrize("status", sorted(EXPLAINED))
async def test_a_refusal_of_stream_options_is_retried_once(world: World, status: int) -> None:
    refusal = FakeReply(status, pieces=[b'{"error":{"message":"unknown field stream_options"}}'])

    def answer(request: Outgoing) -> FakeReply:
        if b"stream_options" in request.body:
            return refusal
        return FakeReply(headers=SSE, pieces=[chunk("a"), DONE])

    world.upstream.answer = answer
    for sent in (2, 3):
        reply, _ = await world.call(world.incoming(STREAM))
        assert reply.status == 200
        assert len(world.upstream.sent) == sent
    assert world.upstream.open == 0
    assert [record.notes.get("stream_usage") for record, _ in world.recorder.records] == [
        "refused by the provider",
        None,
    ]
    assert (await world.store.totals(KEY)).calls == 2


async def test_a_refusal_with_and_without_stream_options_is_forwarded(world: World) -> None:
    world.upstream.answer = lambda _: FakeReply(400, pieces=[b'{"error":{"message":"no stream_options"}}'])
    reply, body = await world.call(world.incoming(STREAM))
    assert (reply.status, reply.upstream_error) == (400, True)
    assert b"no stream_options" in body
    assert len(world.upstream.sent) == 2


TOO_LONG = {"code": "context_length_exceeded", "message": "Your input exceeds the context window of this model."}
TAKEN = named_event({"type": "response.created", "response": {"id": "r", "usage": None}})
FAILED = named_event({"type": "response.failed", "response": {"id": "r", "usage": None, "error": TOO_LONG}})
LATE: dict[str, tuple[str, list[bytes]]] = {
    "responses": ("input", [TAKEN + FAILED]),
    "chat/completions": (
        "messages",
        [b": waiting\n\n", b"data: " + json.dumps({"error": TOO_LONG}).encode() + b"\n\n"],
    ),
}


def streamed(field: str, turns: int) -> bytes:
    said = [
        {"role": role, "content": f"{turn} " + "word " * 40} for turn in range(turns) for role in ("user", "assistant")
    ]
    return json.dumps({"model": "m", "stream": True, field: [*said, {"role": "user", "content": "go on"}]}).encode()


@pytest.mark.parametrize("path", LATE)
async def test_a_stream_refused_for_its_length_is_trimmed_and_retried_once(path: str, world: World) -> None:
    field, refusal = LATE[path]
    answers = iter([FakeReply(headers=SSE, pieces=refusal)])
    world.upstream.answer = lambda _: next(answers, FakeReply(headers=SSE, pieces=[b'data: {"fine":1}\n\n']))
    body = streamed(field, 60)
    reply, sent = await world.call(world.incoming(body, path))
    first, second = (json.loads(one.body)[field] for one in world.upstream.sent)
    assert (reply.status, first) == (200, json.loads(body)[field])
    assert len(second) < len(first)
    assert b"fine" in sent
    assert b"exceeds" not in sent
    assert "trimmed again" in world.record.notes["context"]
    assert world.upstream.open == 0


@pytest.mark.parametrize("path", LATE)
async def test_a_stream_that_is_refused_twice_is_forwarded_unchanged(path: str, world: World) -> None:
    field, refusal = LATE[path]
    world.upstream.answer = lambda _: FakeReply(headers=SSE, pieces=refusal)
    reply, sent = await world.call(world.incoming(streamed(field, 60), path))
    assert (reply.status, len(world.upstream.sent)) == (200, 2)
    assert sent.replace(b": 0\n\n", b"") == b"".join(refusal)
    assert world.record.outcome == "provider_error"


async def test_a_short_stream_is_forwarded_without_delay(world: World) -> None:
    never = FakeReply(headers=SSE, pieces=[TAKEN, None])
    world.upstream.answer = lambda _: never
    async with asyncio.timeout(30), world.gateway.handle(world.incoming(streamed("input", 1), "responses")) as reply:
        assert not isinstance(reply.body, bytes)
        assert await anext(reply.body) == TAKEN
