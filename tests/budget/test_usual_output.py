"""A stream without a limit first reserves what earlier streams of its session or model needed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from gateway.core.errors import BudgetBusy
from gateway.core.ledger.arithmetic import Claim, Limits
from gateway.core.ledger.charging import BudgetPolicy
from gateway.core.ledger.output_limit import DEFAULT_OUTPUT, STREAM_STEP
from gateway.core.routing import ModelFacts
from tests.budget.test_accounts import FALLBACK, record_holds
from tests.support.fakes import KEY, SSE, FakeReply, World
from tests.support.scripted import DONE, chunk, usage_chunk

PLENTY = Limits(tokens=1_000_000)


class Clock:
    seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


@dataclass
class Paced(FakeReply):
    """A stream whose parts arrive one after the other, by a clock of the test."""

    clock: Clock | None = None

    async def chunks(self) -> AsyncIterator[bytes]:
        async for piece in super().chunks():
            if self.clock is not None:
                self.clock.seconds += 0.1
            yield piece


class Streams:
    """Streams of a model without reasoning, which arrive gradually unless `clock` is None."""

    def __init__(self, limits: Limits = PLENTY, facts: ModelFacts | None = None) -> None:
        self.clock = Clock()
        known = facts or ModelFacts(reasoning=False)
        self.world = World(budget=BudgetPolicy(session=limits), facts=lambda _: known, clock=self.clock)
        self.holds = record_holds(self.world)

    async def call(self, session: str, tokens: int, *, one_piece: bool = False, **fields: object) -> str:
        """Make a call whose response has these output tokens; return what the client gets."""
        pieces = [*[chunk("word ") for _ in range(30)], usage_chunk(10, tokens), DONE]
        clock = None if one_piece else self.clock
        self.world.upstream.answer = lambda _: Paced(
            headers=SSE, pieces=[b"".join(pieces)] if one_piece else pieces, clock=clock
        )
        body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}], **fields}
        headers = [(b"x-session-id", session.encode()), (b"content-type", b"application/json")]
        incoming = replace(self.world.incoming(json.dumps(body).encode()), headers=headers)
        _, answer = await self.world.call(incoming)
        return answer.decode()

    @property
    def held(self) -> int:
        """Return the output tokens that the last call asked for."""
        return self.holds[-1].hold.most


async def test_a_stream_reserves_what_earlier_streams_of_its_model_needed() -> None:
    streams = Streams()
    for number in range(8):
        await streams.call(f"earlier-{number}", 100)
        assert streams.held == STREAM_STEP
    await streams.call("new", 100)
    assert streams.held == 145
    assert streams.world.recorder.records[-1][0].notes["reserved"] == "145 output tokens at first; usual are 100"
    await streams.call("new", 100, model="other")
    assert streams.held == STREAM_STEP
    assert "reserved" not in streams.world.recorder.records[-1][0].notes


async def test_the_streams_of_the_same_session_are_a_better_guide() -> None:
    streams = Streams()
    for _ in range(4):
        await streams.call("s", 400)
    for number in range(16):
        await streams.call(f"other-{number}", 100)
    await streams.call("s", 400)
    assert streams.held == 482
    await streams.call("new", 100)
    assert streams.held == 145


async def test_lengths_of_a_model_survive_a_restart_of_the_worker() -> None:
    streams = Streams()
    for number in range(8):
        await streams.call(f"earlier-{number}", 100)
    await streams.world.learner.aclose()
    after = Streams()
    after.world = World(
        budget=BudgetPolicy(session=Limits(tokens=10**6)), facts=lambda _: ModelFacts(reasoning=False),
        clock=after.clock, store=streams.world.store,
    )  # fmt: skip
    after.holds = record_holds(after.world)
    await after.call("new", 100)
    assert after.held == 145


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        ({"max_tokens": 900}, 900),
        ({"stream": False}, DEFAULT_OUTPUT),
        ({"n": 2}, STREAM_STEP),
        ({}, 145),
    ],
)
async def test_only_a_stream_without_a_limit_reserves_its_usual_output(fields: Mapping[str, Any], most: int) -> None:
    streams = Streams()
    for number in range(8):
        await streams.call(f"earlier-{number}", 100)
    await streams.call("new", 100, **fields)
    assert streams.held == most


async def test_a_model_whose_output_is_not_all_visible_reserves_as_before() -> None:
    streams = Streams(facts=ModelFacts(reasoning=True))
    for number in range(9):
        await streams.call(f"earlier-{number}", 100)
    assert streams.held == DEFAULT_OUTPUT
    assert await streams.world.learner.outputs("p", "m") == ()


@pytest.mark.parametrize("fields", [{"max_tokens": 900}, {"n": 2}])
async def test_calls_with_a_limit_teach_nothing(fields: Mapping[str, Any]) -> None:
    streams = Streams()
    for number in range(8):
        await streams.call(f"earlier-{number}", 100, **fields)
    assert await streams.world.learner.outputs("p", "m") == ()


async def test_without_a_budget_nothing_is_learned() -> None:
    streams = Streams(Limits(calls=100))
    await streams.call("s", 100)
    assert await streams.world.learner.outputs("p", "m") == ()


async def test_a_model_whose_streams_arrive_in_one_piece_reserves_as_before() -> None:
    """Such a stream cannot be ended when it exceeds its hold."""
    streams = Streams()
    for number in range(8):
        await streams.call(f"earlier-{number}", 100, one_piece=True)
    assert await streams.world.learner.outputs("p", "m") == ()
    for number in range(8):
        await streams.call(f"later-{number}", 100)
    await streams.call("new", 100)
    assert streams.held == 145, "a short one proves nothing"
    await streams.call("new", 129, one_piece=True)
    await streams.call("new", 100)
    assert streams.held == STREAM_STEP
    streams.clock.seconds += 3_601
    await streams.call("new", 100)
    assert streams.held == 145


async def test_with_clamp_output_false_a_stream_reserves_as_before() -> None:
    streams = Streams()
    policy = BudgetPolicy(session=Limits(tokens=10**6), clamp=False)
    streams.world = World(budget=policy, facts=lambda _: ModelFacts(reasoning=False), clock=streams.clock)
    streams.holds = record_holds(streams.world)
    for number in range(9):
        await streams.call(f"earlier-{number}", 100)
    assert streams.held == STREAM_STEP


async def test_a_client_that_compacts_its_conversation_reserves_as_before() -> None:
    streams = Streams()
    for number in range(9):
        await streams.call(f"earlier-{number}", 100)
    assert streams.held == 145
    prompt = "Your task is to create a detailed summary of the conversation so far."
    await streams.call("new", 100, messages=[{"role": "user", "content": prompt}])
    assert streams.held == STREAM_STEP


async def test_a_longer_stream_is_extended_and_ends_at_the_budget() -> None:
    streams = Streams(Limits(tokens=1_000))
    for number in range(8):
        await streams.call(f"earlier-{number}", 100)
    long = [*[chunk("word " * 4) for _ in range(400)], usage_chunk(10, 1_600), DONE]
    streams.world.upstream.answer = lambda _: Paced(headers=SSE, pieces=long, clock=streams.clock)
    _, answer = await streams.world.call(streams.world.incoming(
        b'{"model":"m","stream":true,"messages":[{"role":"user","content":"hi"}]}'
    ))  # fmt: skip
    assert streams.held == 145
    assert b'"finish_reason":"length"' in answer.replace(b'": ', b'":')
    record = streams.world.recorder.records[-1][0]
    assert record.outcome == "budget_end"
    assert 900 < record.spent.tokens < 1_100
    sent = json.loads(streams.world.upstream.sent[-1].body)
    assert sent["max_tokens"] > 900, "the provider may use what is left"
    lengths = await streams.world.learner.outputs("p", "m")
    assert lengths[-1] > 1_600, "it would have been longer, and counts twice"


async def test_many_streams_share_a_budget_and_never_hold_more_than_it_has() -> None:
    streams = Streams(Limits(tokens=6_000))
    for number in range(8):
        await streams.call(f"earlier-{number}", 100)
    world, replies = streams.world, []
    world.upstream.answer = lambda _: Paced(headers=SSE, pieces=[chunk("word "), usage_chunk(10, 100), DONE])
    asked = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"hi"}]}'
    handled = [world.gateway.handle(world.incoming(asked)) for _ in range(50)]
    for one in handled:
        replies.append(await one.__aenter__())
        [balance] = await world.store.balances([Claim(KEY.account)])
        assert balance.used.tokens + balance.held.tokens <= 6_000
    busy = [reply for reply in replies if isinstance(reply.fault, BudgetBusy)]
    assert 50 - len(busy) >= 15
    assert {reply.status for reply in replies} == {200, 429}
    [balance] = await world.store.balances([Claim(KEY.account)])
    assert balance.held.tokens <= 0.8 * 6_000, "some is left for streams that become longer"
    for one in handled:
        await one.__aexit__(None, None, None)


@pytest.mark.parametrize(("known", "most"), [("p", 145), ("q", STREAM_STEP)])
async def test_the_next_route_decides_if_a_fallback_was_never_used(known: str, most: int) -> None:
    streams = Streams()
    streams.world = World(
        budget=BudgetPolicy(session=PLENTY), facts=lambda _: ModelFacts(reasoning=False), clock=streams.clock,
        routes=FALLBACK,
    )  # fmt: skip
    for _ in range(8):
        streams.world.learner.report_output(known, "m" if known == "p" else "second", 100)
    streams.holds = record_holds(streams.world)
    await streams.call("new", 100)
    assert streams.held == most
