"""A summary is a call of the gateway: it is settled like any other, its time is limited, and it never fails a call."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal

import pytest

from gateway.call.types import Caller
from gateway.context.summaries import SUMMARY_S
from gateway.core.context_budget import ContextPolicy, SummaryModel
from gateway.core.http.request import Outgoing
from gateway.core.record import CallRecord
from gateway.core.routing import ModelFacts
from gateway.core.trimming.policy import TrimPolicy
from gateway.core.trimming.strategies import strategies_of
from tests.support.fakes import KEY, ROUTES, SSE, FakeReply, World
from tests.support.scripted import DONE, chunk, usage_chunk


def long_body(turns: int = 30) -> bytes:
    said = [
        {"role": role, "content": f"{role} {turn} " * 40} for turn in range(turns) for role in ("user", "assistant")
    ]
    return json.dumps({"model": "m", "messages": [*said, {"role": "user", "content": "And now?"}]}).encode()


class SummingWorld(World):
    """A world with a context budget of 1,500 tokens, whose model "q-1" makes summaries."""

    def __init__(self, summary_s: float = SUMMARY_S) -> None:
        strategies = strategies_of(["summarize", "condense", "drop"], shorten_tokens=100, summary_tokens=100)
        summary = SummaryModel("q-1", ROUTES.resolve("q-1"), ModelFacts(), 100)
        context = ContextPolicy(budget=1500, fit=TrimPolicy(strategies=strategies), summary=summary)
        super().__init__(context=context, summary_s=summary_s)

    @property
    def summary_and_call(self) -> tuple[CallRecord, CallRecord]:
        """Return the records of a summary and its call, in the order of their settlement."""
        [(summary, _), (call, _)] = self.recorder.records
        assert (summary.operation, call.operation) == ("summary", "chat")
        return summary, call


@pytest.fixture
def summing() -> SummingWorld:
    return SummingWorld()


def is_for_a_summary(request: Outgoing) -> bool:
    return request.url.startswith("http://q/")


def hanging(pieces: Sequence[bytes | Exception | None]) -> Callable[[Outgoing], FakeReply]:
    return lambda request: FakeReply(pieces=pieces) if is_for_a_summary(request) else FakeReply()


@dataclass
class GivenUp(FakeReply):
    """A response that sends nothing until it is abandoned."""

    given_up: Callable[[], object] = lambda: None

    async def chunks(self) -> AsyncIterator[bytes]:
        try:
            await asyncio.sleep(60)
        finally:
            self.given_up()
        yield b""


async def test_a_summary_is_settled_before_its_call_is_sent(summing: SummingWorld) -> None:
    settled = []

    def answer(request: Outgoing) -> FakeReply:
        settled.append(summing.store.settled)
        return FakeReply()

    summing.upstream.answer = answer
    reply, _ = await summing.call(summing.incoming(long_body()))
    assert reply.status == 200
    assert settled == [0, 1]
    summary, call = summing.summary_and_call
    assert summary.charge is not None
    assert summary.charge.cost_usd == Decimal("0.000060")
    assert summary.context is None
    assert summary.notes == {"for": call.call_id}
    assert call.context is not None
    assert call.context.trimmed["summarize"] > 0
    assert b"hello" in summing.upstream.sent[1].body


@pytest.mark.parametrize("pieces", [[None], [b"{", None]])
async def test_a_summary_that_takes_too_long_is_charged_and_not_used(
    pieces: list[bytes | None],
) -> None:
    summing = SummingWorld(summary_s=0.5)
    summing.upstream.answer = hanging(pieces)
    reply, _ = await summing.call(summing.incoming(long_body()))
    assert reply.status == 200
    summary, call = summing.summary_and_call
    assert (summary.outcome, summary.status, call.outcome) == ("too_slow", 499, "ok")
    assert summary.charge is not None
    assert summary.charge.usage.input_tokens > 100
    assert call.notes["summary"] == "none: it took longer than 0.5 s"
    assert call.context is not None
    assert "summarize" not in call.context.trimmed
    assert summing.upstream.open == 0
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


@pytest.mark.parametrize("reason", [None, "cut_at_shutdown"])
async def test_a_call_cancelled_during_its_summary_settles_both_once(summing: SummingWorld, reason: str | None) -> None:
    summing.upstream.answer = hanging([None])
    task = asyncio.create_task(summing.call(summing.incoming(long_body())))
    while not summing.upstream.sent:
        await asyncio.sleep(0.001)
    task.cancel(reason) if reason else task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    summary, call = summing.summary_and_call
    assert summary.outcome == call.outcome == (reason or "client_left")
    assert summary.charge is not None
    assert call.charge is None
    assert summing.store.settled == 2
    assert summing.upstream.open == 0
    assert (await summing.store.totals(KEY)).calls == 1


async def test_the_head_of_a_stream_includes_the_usage_of_its_summary(summing: SummingWorld) -> None:
    pieces = [chunk("a"), usage_chunk(), DONE]
    summing.upstream.answer = lambda request: (
        FakeReply() if is_for_a_summary(request) else FakeReply(headers=SSE, pieces=pieces)
    )
    body = json.dumps({**json.loads(long_body()), "stream": True}).encode()
    reply, _ = await summing.call(summing.incoming(body))
    assert reply.totals is not None
    assert (reply.totals.calls, reply.totals.total_tokens) == (1, 15)


async def test_a_call_can_be_cancelled_when_its_summary_times_out() -> None:
    summing = SummingWorld(summary_s=0.5)
    summing.upstream.answer = lambda _: GivenUp(given_up=task.cancel)
    task = asyncio.create_task(summing.call(summing.incoming(long_body())))
    with pytest.raises(asyncio.CancelledError):
        await task
    # If the settlement was cancelled too, the settler repeats it.
    await summing.settler.aclose()
    assert (await summing.store.totals(KEY)).calls == 1


async def test_a_summary_that_cannot_be_stored_is_not_used(
    summing: SummingWorld,
) -> None:
    def answer(_: Outgoing) -> FakeReply:
        summing.store.away = True
        return FakeReply()

    summing.upstream.answer = answer
    summing.settler.availability.accepts_without_store = True
    reply, _ = await summing.call(summing.incoming(long_body()))
    assert reply.status == 200
    _, main = summing.upstream.sent
    assert b"[summary of" not in main.body
    _, call = summing.summary_and_call
    assert call.notes["summary"].startswith("none: The store is unavailable")
    summing.store.away = False
    await summing.settler.aclose()
    assert (await summing.store.totals(KEY)).total_tokens == 2 * 15


async def test_a_streamed_response_is_no_summary(summing: SummingWorld) -> None:
    pieces = [chunk("a"), usage_chunk(), DONE]
    summing.upstream.answer = lambda request: (
        FakeReply(headers=SSE, pieces=pieces) if is_for_a_summary(request) else FakeReply()
    )
    reply, _ = await summing.call(summing.incoming(long_body()))
    assert reply.status == 200
    summary, call = summing.summary_and_call
    assert summary.charge is not None
    assert call.notes["summary"].endswith("has no text")
    assert summing.upstream.open == 0


async def test_a_summary_keeps_a_derived_session_marked_as_derived(summing: SummingWorld) -> None:
    await summing.call(summing.incoming(long_body(), headers=[]))
    summary, call = summing.summary_and_call
    assert summary.session == call.session
    assert summary.derived_session
    assert call.session is not None
    view = await summing.store.session(call.session)
    assert view is not None
    assert view.derived


async def test_a_limited_client_key_may_receive_a_summary_by_another_model(summing: SummingWorld) -> None:
    reply, _ = await summing.call(summing.incoming(long_body(), caller=Caller("alice", ("m",))))
    assert reply.status == 200
    assert "summarize" in (reply.request.context.trimmed if reply.request.context else {})
