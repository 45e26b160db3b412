"""Summaries of tool results: made at the same time, after the call is reserved, within its budget, and once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from decimal import Decimal
from typing import Any

import pytest

from gateway.call.types import Directives
from gateway.context.summaries import SUMMARY_S
from gateway.core.context_budget import SummaryModel
from gateway.core.http.request import Outgoing
from gateway.core.ledger.arithmetic import Claim, Limits
from gateway.core.ledger.charging import BudgetPolicy
from gateway.core.modes.summary import MAX_SUMMARIES, MAX_SUMMARY_TOKENS
from gateway.core.routing import ModelFacts
from tests.support.fakes import KEY, PRICE, ROUTES, FakeReply, World
from tests.support.scripted import completion

LOG = "".join(f"{n:05} worker-{n % 7} finished job j-{n * 31} in {n * 3 % 101} ms\n" for n in range(150))
SAID = "150 jobs finished; the slowest took 100 ms."


class SummingWorld(World):
    """A world whose model "q-1" summarizes results."""

    def __init__(
        self, summary_s: float = SUMMARY_S, budget: BudgetPolicy | None = None, window: int = 9_000, name: str = "q-1"
    ) -> None:
        route = ROUTES.resolve(name)
        facts = ModelFacts(price=PRICE if route.provider == "q" else None, window=window)
        model = SummaryModel(name, route, facts, MAX_SUMMARY_TOKENS)
        super().__init__(budget=budget, summary_s=summary_s, result_model=model)
        self.answer: Callable[[Outgoing], FakeReply] = lambda _: said(SAID)
        self.main: Callable[[], FakeReply] = FakeReply
        self.upstream.answer = lambda request: self.answer(request) if is_for_a_summary(request) else self.main()

    async def turn(self, *results: str, model: str = "m") -> list[str]:
        """Send a turn; return these results as the model sees them."""
        body = json.dumps({"model": model, "max_tokens": 20, "messages": messages(*results)}).encode()
        reply, _ = await self.call(self.incoming(body, directives=Directives(mode="summary")))
        assert reply.status == 200
        [sent] = [request for request in self.upstream.sent[-1:] if not is_for_a_summary(request)]
        return [message["content"] for message in json.loads(sent.body)["messages"] if message["role"] == "tool"]

    @property
    def asked(self) -> list[Any]:
        """Return the bodies of calls for summaries."""
        return [json.loads(request.body) for request in self.upstream.sent if is_for_a_summary(request)]


def is_for_a_summary(request: Outgoing) -> bool:
    return b"You shorten the result of a tool" in request.body


def written(text: str) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return completion(choices=[choice])


def said(text: str) -> FakeReply:
    return FakeReply(pieces=[written(text)])


def messages(*results: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"role": "user", "content": "look it up"}]
    for number, result in enumerate(results):
        call = {"id": f"c{number}", "type": "function", "function": {"name": f"tool_{number}", "arguments": "{}"}}
        found.append({"role": "assistant", "content": None, "tool_calls": [call]})
        found.append({"role": "tool", "tool_call_id": f"c{number}", "content": result})
    return found


def logs(count: int) -> list[str]:
    return [f"run {number}\n{LOG}" for number in range(count)]


@pytest.fixture
def summing() -> SummingWorld:
    return SummingWorld()


async def test_each_new_result_is_replaced_by_its_summary(summing: SummingWorld) -> None:
    shown = await summing.turn(*logs(2), "short")
    assert [text.split("\n")[0] for text in shown] == [SAID, SAID, "short"]
    assert [json.loads(body["messages"][1]["content"])["tool"] for body in summing.asked] == ["tool_0", "tool_1"]
    assert [json.loads(body["messages"][1]["content"])["result"] for body in summing.asked] == logs(2)
    assert {body["model"] for body in summing.asked} == {"q-real"}
    first, second, call = (record for record, _ in summing.recorder.records)
    assert (first.operation, second.operation, call.operation) == ("result_summary", "result_summary", "chat")
    assert first.charge is not None
    assert first.charge.cost_usd == Decimal("0.000060")
    assert first.notes == {"for": call.call_id}
    assert call.notes["result_summaries"] == f"call {first.call_id}; call {second.call_id}"
    assert (await summing.store.totals(KEY)).total_tokens == 3 * 15


async def test_later_turns_reuse_summaries_and_request_only_new_ones(summing: SummingWorld) -> None:
    shown = await summing.turn(*logs(1))
    summing.answer = lambda _: said("Another text.")
    assert await summing.turn(*logs(1)) == shown
    later = await summing.turn(*logs(2))
    assert later[0] == shown[0]
    assert later[1].startswith("Another text.\n")
    assert len(summing.asked) == 2


async def test_the_newest_results_are_summarized_and_the_others_stay_extracts(summing: SummingWorld) -> None:
    under_way: list[int] = []
    gate = asyncio.Event()

    class Waiting(FakeReply):
        async def chunks(self) -> AsyncIterator[bytes]:
            under_way.append(summing.upstream.open)
            if len(under_way) == MAX_SUMMARIES:
                gate.set()
            await gate.wait()
            yield written(SAID)

    summing.answer = lambda _: Waiting()
    shown = await asyncio.wait_for(summing.turn(*logs(MAX_SUMMARIES + 2)), 20)
    assert [text.startswith(SAID) for text in shown] == [False] * 2 + [True] * MAX_SUMMARIES
    assert len(summing.asked) == max(under_way) == MAX_SUMMARIES
    assert await summing.turn(*logs(MAX_SUMMARIES + 2)) == shown
    assert len(summing.asked) == MAX_SUMMARIES, "those that were passed over are decided on too"


@pytest.mark.parametrize(
    "answer",
    [
        FakeReply(status=500, pieces=[b"{}"]),
        FakeReply(pieces=[b"no answer"]),
        said(""),
        said("word " * 450),
        said("word " * 4_000),
    ],
    ids=["refused", "no JSON", "no text", "too long", "far too long"],
)
async def test_the_extract_stays_after_a_failed_summary(summing: SummingWorld, answer: FakeReply) -> None:
    summing.answer = lambda _: answer
    shown = await summing.turn(*logs(1))
    assert shown[0].startswith("run 0\n00000 worker-0 finished")
    summing.answer = lambda _: said(SAID)
    assert await summing.turn(*logs(1)) == shown
    assert len(summing.asked) == 1
    call = summing.recorder.records[1][0]
    assert call.notes["result_summaries"].startswith("none: ")
    summary = summing.recorder.records[0][0]
    assert summary.call_id in call.notes["result_summaries"]


async def test_a_slow_summary_does_not_affect_the_others() -> None:
    summing = SummingWorld(summary_s=1)
    summing.answer = lambda request: FakeReply(pieces=[None]) if b"run 0" in request.body else said(SAID)
    shown = await summing.turn(*logs(2))
    assert [text.startswith(SAID) for text in shown] == [False, True]
    outcomes = sorted(record.outcome for record, _ in summing.recorder.records)
    assert outcomes == ["ok", "ok", "too_slow"]
    assert summing.upstream.open == 0


@pytest.mark.parametrize("reason", [None, "cut_at_shutdown"])
async def test_a_cancelled_call_cancels_and_settles_its_summaries(summing: SummingWorld, reason: str | None) -> None:
    summing.answer = lambda _: FakeReply(pieces=[None])
    task = asyncio.create_task(summing.turn(*logs(3)))
    while len(summing.upstream.sent) < 3:
        await asyncio.sleep(0.001)
    task.cancel(reason) if reason else task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    records = [record for record, _ in summing.recorder.records]
    assert [record.outcome for record in records] == [reason or "client_left"] * 4
    assert [record.charge is not None for record in records] == [True] * 3 + [False]
    assert summing.store.settled == 4
    assert summing.upstream.open == 0


def limited(**limits: int) -> BudgetPolicy:
    return BudgetPolicy(session=Limits(**limits), modes=False)


async def test_summaries_use_a_share_of_the_remaining_tokens() -> None:
    counts = []
    for tokens in (4_000, 24_000, 60_000, 400_000):
        summing = SummingWorld(budget=limited(tokens=tokens))
        shown = await summing.turn(*logs(4))
        assert [text.startswith(SAID) for text in shown] == sorted(text.startswith(SAID) for text in shown)
        counts.append(len(summing.asked))
    assert counts[0] == 0
    assert counts[-1] == MAX_SUMMARIES
    assert counts == sorted(counts)
    assert 0 < counts[1] < MAX_SUMMARIES


async def test_summaries_use_a_share_of_the_remaining_calls() -> None:
    for calls, asked in ((1, 0), (5, 1), (9, 2), (100, 4)):
        summing = SummingWorld(budget=limited(calls=calls))
        await summing.turn(*logs(4))
        assert len(summing.asked) == asked


async def test_a_refused_call_requests_no_summary() -> None:
    summing = SummingWorld(budget=limited(tokens=300))
    body = json.dumps({"model": "m", "messages": messages(*logs(2))}).encode()
    reply, _ = await summing.call(summing.incoming(body, directives=Directives(mode="summary")))
    assert reply.status == 400
    assert summing.upstream.sent == []
    assert await summing.store.results_size(KEY) == 0


async def test_the_hold_covers_the_call_with_the_longest_summaries() -> None:
    limits = Limits(tokens=400_000)
    summing = SummingWorld(budget=limited(tokens=400_000))
    summing.answer = lambda _: said("word " * 330)
    held = []

    class Looking(FakeReply):
        async def chunks(self) -> AsyncIterator[bytes]:
            [balance] = await summing.store.balances([Claim(KEY.account, limits)])
            held.append(balance.held[0])
            yield completion()

    summing.main = Looking
    shown = await summing.turn(*logs(4))
    assert all(text.startswith("word word") for text in shown)
    call = summing.recorder.records[-1][0]
    assert call.context is not None
    assert held[0] >= call.context.tokens + 20


async def test_a_refused_summary_leaves_the_extract() -> None:
    summing = SummingWorld(budget=limited(nano_usd=10**10), name="m-unpriced")
    shown = await summing.turn(*logs(1), model="q-2")
    assert shown[0].startswith("run 0\n00000 worker-0 finished")
    assert summing.asked == []
    refused, call = (record for record, _ in summing.recorder.records)
    assert (refused.operation, refused.error_code) == ("result_summary", "price_unknown")
    assert call.notes["result_summaries"] == f"none: call {refused.call_id} failed with status 400"
    assert await summing.turn(*logs(1), model="q-2") == shown
    assert len(summing.recorder.records) == 3


async def test_no_summary_is_requested_while_the_store_is_unavailable(summing: SummingWorld) -> None:
    summing.settler.availability.accepts_without_store = True
    summing.store.away = True
    await summing.turn(*logs(2))
    assert summing.asked == []


async def test_a_result_without_a_call_may_name_its_tool_itself(summing: SummingWorld) -> None:
    results = [
        {"role": "function", "name": "old", "content": LOG},
        {"role": "tool", "tool_call_id": "x", "content": f"x{LOG}"},
    ]
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}, *results]}).encode()
    await summing.call(summing.incoming(body, directives=Directives(mode="summary")))
    tools = [json.loads(body["messages"][1]["content"])["tool"] for body in summing.asked]
    assert tools == ["old", "unknown"]


async def test_a_text_above_the_window_is_shortened_in_the_middle() -> None:
    summing = SummingWorld(window=2_000)
    await summing.turn(LOG)
    [body] = summing.asked
    result = json.loads(body["messages"][1]["content"])["result"]
    assert " [...] " in result
    assert LOG.startswith(result.partition(" [...] ")[0])
    assert LOG.endswith(result.partition(" [...] ")[2])


async def test_trimming_to_the_remaining_budget_leaves_room_for_summaries() -> None:
    old = [{"role": role, "content": f"{role} {n} " * 40} for n in range(8) for role in ("user", "assistant")]
    for tokens in range(1_500, 2_800, 20):
        summing = SummingWorld(budget=limited(tokens=tokens))
        body = json.dumps({"model": "m", "max_tokens": 20, "messages": [*old, *messages(*logs(1))]}).encode()
        reply, _ = await summing.call(summing.incoming(body, directives=Directives(mode="summary")))
        assert reply.status == 200
        assert reply.request.mode == "summary"


# --- concurrent calls -----------------------------------------------------------------------------------------------


class Gate(FakeReply):
    """A summary that is sent when the gate opens."""

    opened: asyncio.Event

    @classmethod
    def until(cls, opened: asyncio.Event) -> Gate:
        gate = cls()
        gate.opened = opened
        return gate

    async def chunks(self) -> AsyncIterator[bytes]:
        await self.opened.wait()
        yield written(SAID)


async def begin(summing: SummingWorld, *results: str) -> asyncio.Task[list[str]]:
    """Start a turn and let it run until it waits."""
    task = asyncio.create_task(shown_to(summing, *results))
    for _ in range(60):
        await asyncio.sleep(0.001)
    return task


async def shown_to(summing: SummingWorld, *results: str) -> list[str]:
    """Send a turn; return these results as the model sees them, without other results."""
    body = json.dumps({"model": "m", "max_tokens": len(results) + 20, "messages": messages(*results)}).encode()
    incoming = summing.incoming(body, directives=Directives(mode="summary"))
    reply, _ = await summing.call(incoming)
    assert reply.status == 200
    of_this = [request for request in summing.upstream.sent if not is_for_a_summary(request)]
    bodies = [json.loads(request.body)["messages"] for request in of_this]
    tools = [[message["content"] for message in body if message["role"] == "tool"] for body in bodies]
    return next(contents for contents in tools if len(contents) == len(results))


async def test_concurrent_calls_share_one_summary_of_a_result(summing: SummingWorld) -> None:
    opened = asyncio.Event()
    summing.answer = lambda _: Gate.until(opened)
    first = await begin(summing, *logs(1))
    others = [await begin(summing, *logs(1)) for _ in range(2)]
    opened.set()
    shown = await asyncio.gather(first, *others)
    assert len(summing.asked) == 1
    assert shown == [shown[0]] * 3
    assert shown[0][0].startswith(SAID)
    summary, *calls = sorted(
        (record for record, _ in summing.recorder.records), key=lambda one: one.operation == "chat"
    )
    notes = sorted(call.notes["result_summaries"] for call in calls)
    assert notes == [f"call {summary.call_id}", *[f"requested by call {summary.notes['for']}"] * 2]


async def test_a_call_requests_the_summaries_that_no_other_call_requests(summing: SummingWorld) -> None:
    opened = asyncio.Event()
    summing.answer = lambda _: Gate.until(opened)
    first = await begin(summing, *logs(1))
    second = await begin(summing, *logs(2))
    assert len(summing.asked) == 2, "it does not wait before it asks"
    opened.set()
    assert [text.startswith(SAID) for text in [*await first, *await second]] == [True] * 3
    assert len(summing.asked) == 2


async def test_a_waiting_call_requests_the_summary_if_the_first_is_cancelled(summing: SummingWorld) -> None:
    opened = asyncio.Event()
    summing.answer = lambda _: Gate.until(opened)
    first = await begin(summing, *logs(1))
    others = [await begin(summing, *logs(1)) for _ in range(2)]
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    opened.set()
    shown = await asyncio.wait_for(asyncio.gather(*others), 20)
    assert [text[0].startswith(SAID) for text in shown] == [True, True]
    assert len(summing.asked) == 2


async def test_a_cancelled_waiting_call_does_not_affect_the_others(summing: SummingWorld) -> None:
    opened = asyncio.Event()
    summing.answer = lambda _: Gate.until(opened)
    first = await begin(summing, *logs(1))
    second, third = await begin(summing, *logs(1)), await begin(summing, *logs(1))
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    opened.set()
    shown = await asyncio.wait_for(asyncio.gather(first, third), 20)
    assert [text[0].startswith(SAID) for text in shown] == [True, True]
    assert len(summing.asked) == 1


async def test_waiting_calls_share_a_failed_summary(summing: SummingWorld) -> None:
    opened = asyncio.Event()

    class Empty(Gate):
        async def chunks(self) -> AsyncIterator[bytes]:
            await self.opened.wait()
            yield b"no answer"

    summing.answer = lambda _: Empty.until(opened)
    first, second = await begin(summing, *logs(1)), await begin(summing, *logs(1))
    opened.set()
    shown = await asyncio.gather(first, second)
    assert shown[0] == shown[1]
    assert shown[0][0].startswith("run 0")
    assert len(summing.asked) == 1
