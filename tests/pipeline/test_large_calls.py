"""Large bodies are read in threads instead of the event loop, and huge bodies are held once while waiting."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from gateway.call.types import Caller
from gateway.core.http.request import Outgoing
from gateway.core.ledger.arithmetic import Limits
from gateway.core.ledger.charging import KeyLimits
from gateway.pipeline.exchange import Exchange
from tests.support.fakes import BODY, SSE, FakeReply, World
from tests.support.scripted import DONE, chunk, completion

#: functions that read a body, or most of one
BODY_READERS = {
    *("read_fields", "_check_encoding", "with_form_model", "opening_items", "handles_in"),
    *("contents_of", "kept_elsewhere", "input_text", "token_ids", "_read_for_hold", "write_fields", "thinking_blocks"),
    *("referenced_tools", "routes_of", "advisors_of"),
}
MESSAGES = [
    {"role": role, "content": f"{turn} " + "word " * 2000} for turn in range(60) for role in ("user", "assistant")
]
NO_USAGE = json.dumps({"object": "list", "data": []}).encode()
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("chat/completions", {"model": "q-1", "messages": MESSAGES}),
    "stream": ("chat/completions", {"model": "q-1", "stream": True, "messages": MESSAGES}),
    "responses": ("responses", {"model": "q-1", "input": MESSAGES}),
    "messages": ("messages", {"model": "q-1", "max_tokens": 10, "messages": MESSAGES}),
    "completions": ("completions", {"model": "q-1", "prompt": "word " * 200_000}),
    "embeddings": ("embeddings", {"model": "q-1", "input": ["word " * 2000] * 60}),
    "unknown": ("rerank", {"model": "q-1", "query": "word", "documents": ["word " * 2000] * 60}),
    "no JSON": ("files", {}),
}


@pytest.fixture
def world() -> World:
    return World()


@contextmanager
def record_called_functions() -> Iterator[set[str]]:
    """Yield the names of all functions of the gateway that this thread calls in the block."""
    names = set[str]()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and "/gateway/" in frame.f_code.co_filename:
            names.add(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        yield names
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("has_budget", [True, False], ids=["budget", "no budget"])
@pytest.mark.parametrize("name", CALLS)
async def test_a_large_body_is_not_read_in_the_event_loop(name: str, has_budget: bool, world: World) -> None:
    path, fields = CALLS[name]
    body = json.dumps(fields).encode() if fields else b"x" * 600_000
    assert len(body) > 2**19
    pieces = [chunk("a"), DONE] if name == "stream" else [NO_USAGE]
    world.upstream.answer = lambda _: FakeReply(headers=SSE if name == "stream" else [], pieces=pieces)
    budget = KeyLimits(Limits(tokens=10**9, nano_usd=10**15)) if has_budget else KeyLimits()
    incoming = world.incoming(body, path, headers=[], caller=Caller("alice", budget=budget))
    with record_called_functions() as names:
        reply, _ = await world.call(incoming)
    assert reply.status == 200, reply
    assert names & BODY_READERS == set()
    assert "read" in names


async def test_a_small_body_is_read_in_the_event_loop_while_a_large_one_waits(world: World) -> None:
    until = threading.Event()
    large = json.dumps(CALLS["chat"][1]).encode()
    world.gateway.planner._threads.reading.submit(until.wait)
    waiting = asyncio.create_task(world.call(world.incoming(large)))
    reply, _ = await world.call(world.incoming(BODY))
    assert (reply.status, waiting.done()) == (200, False)
    until.set()
    reply, _ = await waiting
    assert reply.status == 200


async def test_a_large_body_without_usage_is_charged_like_a_small_one(world: World) -> None:
    world.upstream.answer = lambda _: FakeReply(pieces=[NO_USAGE])
    for count in (10, 100):
        await world.call(
            world.incoming(json.dumps({"model": "m", "input": ["word " * 2000] * count}).encode(), "embeddings")
        )
    small, large = (record.charge.usage.input_tokens for record, _ in world.recorder.records if record.charge)
    assert large == 10 * small


async def test_a_settlement_cancelled_while_texts_are_read_charges_by_body_length(
    world: World,
) -> None:
    until, ended = threading.Event(), asyncio.Event()

    def answer(_: Outgoing) -> FakeReply:
        world.gateway.planner._threads.reading.submit(until.wait)
        asyncio.get_running_loop().call_soon(ended.set)
        return FakeReply(pieces=[NO_USAGE])

    world.upstream.answer = answer
    body = json.dumps({"model": "m", "input": ["word " * 2000] * 60}).encode()
    call = asyncio.create_task(world.call(world.incoming(body, "embeddings")))
    await ended.wait()
    while not world.gateway.planner._threads.reading._work_queue.qsize():
        await asyncio.sleep(0)
    call.cancel()
    await asyncio.wait({call})
    until.set()
    assert world.record.charge is not None
    assert world.record.charge.usage.input_tokens == -(-len(body) // 4)
    assert world.store.settled == 1


# --- huge bodies --------------------------------------------------------------------------------------------------

HUGE = [{"role": role, "content": f"{turn} " + "word " * 8000} for turn in range(120) for role in ("user", "assistant")]
TOO_LONG = {"code": "context_length_exceeded", "message": "Your input exceeds the context window of this model."}


def huge(**changes: object) -> bytes:
    body = json.dumps({"model": "m", "messages": [*HUGE, {"role": "user", "content": "go on"}], **changes}).encode()
    assert len(body) > 8 * 2**20
    return body


async def test_only_the_bytes_of_a_huge_body_are_held_while_waiting_for_the_response(world: World) -> None:
    sent = asyncio.Event()

    def answer(_: Outgoing) -> FakeReply:
        sent.set()
        return FakeReply(pieces=[None])

    world.upstream.answer = answer
    exchange: Exchange = world.gateway.handle(world.incoming(huge()))
    entering = asyncio.create_task(exchange.__aenter__())
    await sent.wait()
    asked = exchange._state.context.request
    assert asked is not None
    assert asked.contents.is_unloaded
    assert asked.contents.messages is None
    assert exchange._state.context.plan is not None
    entering.cancel()
    await asyncio.wait({entering})


async def test_a_huge_body_refused_for_its_length_is_read_again_and_trimmed(world: World) -> None:
    refusal = FakeReply(400, pieces=[json.dumps({"error": TOO_LONG}).encode()])
    answers = iter([refusal])
    world.upstream.answer = lambda _: next(answers, FakeReply(pieces=[completion()]))
    body = huge()
    reply, _ = await world.call(world.incoming(body))
    first, second = (json.loads(one.body)["messages"] for one in world.upstream.sent)
    assert (reply.status, first) == (200, json.loads(body)["messages"])
    assert len(second) < len(first)
    assert "trimmed again" in world.record.notes["context"]


async def test_huge_bodies_are_planned_one_after_the_other(world: World) -> None:
    async with world.gateway.planner.huge_turn:
        waiting = asyncio.create_task(world.call(world.incoming(huge())))
        reply, _ = await world.call(world.incoming(BODY))
        assert (reply.status, waiting.done()) == (200, False)
    reply, _ = await waiting
    assert reply.status == 200
    calls = [asyncio.create_task(world.call(world.incoming(huge()))) for _ in range(2)]
    await asyncio.sleep(0)
    calls[0].cancel()
    await asyncio.wait(calls)
    assert not world.gateway.planner.huge_turn.locked()


async def test_the_marks_of_a_huge_body_are_removed_before_sending(world: World) -> None:
    marked = [{**HUGE[0], "x_gateway": {"priority": 2}}, *HUGE[1:]]
    await world.call(world.incoming(huge(messages=marked)))
    assert json.loads(world.upstream.sent[0].body)["messages"] == HUGE
