"""What is held for a call; and where making its record fails, it is charged for what is known, and nothing stays held."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from gateway.core.errors import StoreDamaged
from gateway.core.ledger.arithmetic import Claim, Granted, Limits, Refused
from gateway.core.ledger.charging import DEFAULT_OUTPUT, STREAM_STEP, BudgetPolicy
from gateway.core.pricing import price_from_table
from gateway.core.record import ORPHANED, CallRecord
from gateway.core.routing import ModelFacts, ModelRule, Route, Routes
from gateway.core.session import kept_as
from gateway.core.stored import OpenHold
from gateway.dialects import endpoint
from gateway.dialects.base import Call, EventReader, ParsedResponse
from gateway.dialects.openai_chat import OpenAIChat
from tests.support.fakes import KEY, PRICE, SSE, STREAM, FakeReply, UnavailableStore, World, whole
from tests.support.records import record
from tests.support.scripted import DONE, chunk, usage_chunk


class Unreadable(OpenAIChat):
    """Its answers cannot be read to their end."""

    def reader(self, call: Call, *, drop_usage: bool, input_tokens: int | None = None) -> EventReader:
        made = super().reader(call, drop_usage=drop_usage, input_tokens=input_tokens)

        class Broken(type(made)):  # type: ignore[misc]
            def answer(self) -> ParsedResponse:
                raise ZeroDivisionError

        made.__class__ = Broken
        return made


class Nameless(Unreadable):
    """Nothing can be made of its calls once they are answered."""

    is_answered = False

    def reader(self, call: Call, *, drop_usage: bool, input_tokens: int | None = None) -> EventReader:
        self.is_answered = True
        return super().reader(call, drop_usage=drop_usage, input_tokens=input_tokens)

    @property
    def name(self) -> str:  # type: ignore[override]
        if self.is_answered:
            raise ZeroDivisionError
        return "chat"


def world_of() -> World:
    world = World(budget=BudgetPolicy(session=Limits(tokens=1_000_000)))
    world.upstream.answer = lambda _: FakeReply(headers=SSE, pieces=[chunk("one"), usage_chunk(), DONE])
    return world


def watched(world: World) -> list[OpenHold]:
    """The holds that are asked for, in their order."""
    opened: list[OpenHold] = []
    reserve = world.store.reserve

    class Watching(type(world.store)):  # type: ignore[misc]
        async def reserve(self, one: OpenHold, lease_s: float) -> object:
            opened.append(one)
            return await reserve(one, lease_s)

    world.store.__class__ = Watching
    return opened


async def failed(world: World, dialect: OpenAIChat) -> Mapping[str, Sequence[object]]:
    incoming = world.incoming(STREAM)
    with pytest.raises(ZeroDivisionError):
        await world.call(replace(incoming, endpoint=replace(incoming.endpoint, dialect=dialect)))
    (balance,) = await world.store.balances([Claim(KEY.account)])
    return {"used": balance.used, "held": balance.held}


async def test_a_call_of_which_nobody_can_tell_what_it_used_is_charged_for_its_input_and_holds_nothing() -> None:
    world = world_of()
    found = await failed(world, Unreadable())
    assert world.leases.count == 0
    assert found["held"] == (0, 0, 0)
    record = world.record
    assert record.outcome == "internal_error"
    assert record.notes["usage"] == "not known: the gateway failed to read it"
    assert record.charge is not None
    assert record.charge.source == "estimated"
    assert found["used"] == record.spent
    assert record.spent.tokens >= record.charge.usage.input_tokens > 0
    assert (await world.store.calls(KEY, 10)) == [record]


async def test_all_that_was_held_for_a_deferred_answer_is_spent_where_nobody_can_tell_what_it_used() -> None:
    world = world_of()
    incoming = world.incoming(STREAM[:-1] + b',"deferred":true,"max_tokens":5000}')
    with pytest.raises(ZeroDivisionError):
        await world.call(replace(incoming, endpoint=replace(incoming.endpoint, dialect=Unreadable())))
    assert world.record.spent.tokens > 5_000


async def test_a_call_without_a_record_is_left_to_whoever_settles_those_of_workers_that_are_gone() -> None:
    world = world_of()
    opened = watched(world)
    found = await failed(world, Nameless())
    assert world.leases.count == 0, "nobody renews it: it ends with its lease"
    assert world.recorder.records == []
    assert found["held"] != (0, 0, 0)
    [hold] = opened
    orphaned: CallRecord = hold.as_orphaned()
    await world.settler.settle(orphaned)
    (balance,) = await world.store.balances([Claim(KEY.account)])
    assert balance.held == (0, 0, 0)
    assert balance.used.calls == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", STREAM),
        ("completions", b'{"model":"m","prompt":"Name one river in Egypt, and one lake in Kenya."}'),
        ("embeddings", b'{"model":"m","input":"Name one river in Egypt, and one lake in Kenya."}'),
    ],
)
async def test_an_orphaned_call_is_charged_the_expected_input_and_not_the_margin_that_was_held(
    path: str, body: bytes
) -> None:
    world = world_of()
    opened = watched(world)
    await world.call(world.incoming(body, path))
    [held] = opened
    orphaned, context = held.as_orphaned(), world.record.context
    assert orphaned.charge is not None
    expected = orphaned.charge.usage.input_tokens
    assert 0 < expected < held.hold.fixed.tokens, "the hold has a margin"
    assert context is None or expected == context.tokens
    assert orphaned.spent.tokens == expected


@pytest.mark.parametrize(("limits", "is_all"), [(Limits(tokens=1_000_000), True), (Limits(calls=9), False)])
async def test_all_that_was_held_for_an_answer_in_the_background_is_spent_where_its_worker_is_lost(
    limits: Limits, is_all: bool
) -> None:
    world = World(budget=BudgetPolicy(session=limits))
    opened = watched(world)
    asked = b'{"model":"m","input":"hi","background":true,"max_output_tokens":5000}'
    await world.call(world.incoming(asked, "responses"))
    [kept] = opened
    orphaned = replace(kept, units=kept.hold.most).as_orphaned()
    assert (orphaned.spent == kept.hold.amount(5_000)) is is_all
    assert (orphaned.spent.tokens > 5_000) is is_all
    assert orphaned.outcome == ORPHANED
    assert orphaned.charge is not None
    assert orphaned.charge.usage.output_tokens == 0, "of what its session is charged for no answer is known"


async def test_the_request_that_fetches_an_answer_is_told_without_the_totals_of_the_call_that_asked_for_it() -> None:
    world = World()
    said: dict[str, Any] = {"id": "resp_1", "status": "queued", "usage": None}
    world.upstream.answer = lambda _: FakeReply(pieces=[json.dumps(said).encode()])
    asked = b'{"model":"m","input":"hi","background":true}'
    await world.call(world.incoming(asked, "responses"))
    said |= {"status": "completed", "usage": {"input_tokens": 3, "output_tokens": 4}}
    path = "responses/resp_1"
    reply, _ = await world.call(world.incoming(b"", path, method="GET", endpoint=endpoint("GET", path)))
    assert reply.totals is not None
    told = [
        (one.outcome, totals.total_tokens if totals is not None else None) for one, totals in world.recorder.records
    ]
    begun, made, fetching = told
    assert (begun[0], made, fetching) == ("pending", ("ok", 7), ("ok", None))


FALLBACK = Routes([ModelRule("m", "p", fallback=("q/second",))], ["p", "q"], "p")


@pytest.mark.parametrize(
    ("asked", "facts", "most"),
    [
        ({"max_tokens": 50}, {}, 50),
        ({"max_output_tokens": 50}, {}, DEFAULT_OUTPUT),  # no provider of this format reads it
        ({"max_tokens": 500}, {"p": {"output": 200}, "q": {"output": 300}}, 300),
        ({}, {"p": {"output": 200}, "q": {"output": 300}}, 300),
        ({}, {"p": {"output": 200}}, DEFAULT_OUTPUT),
        ({}, {"p": {"window": 800}}, DEFAULT_OUTPUT),
        ({"stream": True}, {"p": {"reasoning": False}, "q": {"reasoning": False}}, STREAM_STEP),
        ({"stream": True}, {"p": {"reasoning": False}, "q": {"reasoning": True}}, DEFAULT_OUTPUT),
        ({"stream": True}, {"p": {"reasoning": False}}, DEFAULT_OUTPUT),
        ({}, {"p": {"reasoning": False}, "q": {"reasoning": False}}, DEFAULT_OUTPUT),
    ],
)
async def test_as_much_is_held_as_the_longest_answer_may_have_wherever_the_call_goes(
    asked: dict[str, object], facts: dict[str, dict[str, Any]], most: int
) -> None:
    world = World(
        budget=BudgetPolicy(session=Limits(tokens=1_000_000)),
        routes=FALLBACK,
        facts=lambda route: ModelFacts(**facts.get(route.provider, {})),
    )
    opened = watched(world)
    body = {"model": "m", "messages": [{"role": "user", "content": "hello there"}], **asked}
    await world.call(world.incoming(json.dumps(body).encode()))
    assert opened[0].hold.most == most


async def test_no_more_is_held_than_the_widest_window_leaves() -> None:
    windows = {"p": 800, "q": 900}
    world = World(
        budget=BudgetPolicy(session=Limits(tokens=1_000_000)),
        routes=FALLBACK,
        facts=lambda route: ModelFacts(window=windows[route.provider]),
    )
    opened = watched(world)
    await world.call()
    assert opened[0].hold.most == 900 - opened[0].hold.fixed.tokens


async def test_a_completion_that_names_no_limit_is_held_for_what_its_api_gives() -> None:
    world = world_of()
    opened = watched(world)
    await world.call(world.incoming(b'{"model":"m","prompt":"hello"}', "completions"))
    assert opened[0].hold.most == 16


async def test_under_a_budget_in_usd_a_call_goes_to_no_model_whose_price_is_not_known() -> None:
    def price(route: Route) -> ModelFacts:
        return ModelFacts(price=PRICE if route.provider == "p" else None)

    world = World(budget=BudgetPolicy(session=Limits(nano_usd=10**9)), routes=FALLBACK, facts=price)
    world.upstream.answer = lambda request: FakeReply(500, pieces=[b"{}"])
    await world.call()
    assert [sent.url for sent in world.upstream.sent] == ["http://p/v1/chat/completions"]
    assert world.record.notes["left_out"].startswith("q/second")


@pytest.mark.parametrize("stream", [True, False])
async def test_where_nobody_reads_a_calls_limit_what_is_held_is_set_unless_that_still_grows(*, stream: bool) -> None:
    world = World(
        budget=BudgetPolicy(session=Limits(tokens=1_000_000)), facts=lambda _: ModelFacts(reasoning=False, output=9_000)
    )
    body = {"model": "m", "messages": [], "stream": stream, "max_output_tokens": 9_000}
    await world.call(world.incoming(json.dumps(body).encode()))
    assert json.loads(world.upstream.sent[0].body).get("max_tokens") == (None if stream else 9_000)


async def test_what_a_provider_keeps_of_earlier_turns_counts_for_what_a_token_costs() -> None:
    table = {"input_cost_per_token": 1e-6, "output_cost_per_token": 1e-5}
    long = {f"{name}_above_200k_tokens": 2 * rate for name, rate in table.items()}
    price = price_from_table(table | long)
    world = World(budget=BudgetPolicy(session=Limits(nano_usd=10**12)), facts=lambda _: ModelFacts(price=price))
    await world.store.settle(replace(record("s", 0.0), session=KEY, kept=kept_as("p", ["resp_1"], 250_000)))
    opened = watched(world)
    for before in (None, "resp_1"):
        body = {"model": "m", "previous_response_id": before, "input": "And?", "max_output_tokens": 100}
        await world.call(world.incoming(json.dumps(body).encode(), "responses"))
    assert [one.hold.unit.nano_usd for one in opened] == [10_000, 20_000]


@pytest.mark.parametrize(
    ("asked", "facts"), [({"max_tokens": 50}, {"reasoning": False}), ({}, {"output": 50, "reasoning": True})]
)
async def test_an_answer_that_is_held_whole_is_not_ended_for_what_its_tokens_are_taken_to_be(
    asked: dict[str, object], facts: dict[str, Any]
) -> None:
    """The provider keeps to its limit; nothing is left to hold more of."""
    world = World(budget=BudgetPolicy(session=Limits(tokens=100)), facts=lambda _: ModelFacts(**facts))
    pieces = [chunk(f"{number} and more") for number in range(200)]
    world.upstream.answer = lambda _: FakeReply(headers=SSE, pieces=[*pieces, DONE])
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True, **asked}
    _, answer = await world.call(world.incoming(json.dumps(body).encode()))
    assert all(piece in answer for piece in pieces)


async def test_what_had_come_of_a_call_that_was_lost_costs_what_its_model_takes() -> None:
    world = World(budget=BudgetPolicy(session=Limits(nano_usd=10**9)))
    opened = watched(world)
    await world.call(world.incoming(STREAM.replace(b'"m"', b'"q-m"')))
    before, after = (replace(opened[0], noted=tokens).as_orphaned().spent for tokens in (0, 100))
    assert after.nano_usd - before.nano_usd == 100 * 10_000


async def test_a_stream_says_at_its_beginning_what_is_left_beside_what_it_holds() -> None:
    world = world_of()
    opened = watched(world)
    async with world.gateway.handle(world.incoming(STREAM)) as reply:
        held = opened[0].hold.fixed.tokens + opened[0].hold.most
        assert reply.allowance is not None
        assert reply.allowance.left_tokens == 1_000_000 - held
        await whole(reply)


async def test_a_call_that_can_be_held_no_more_is_charged_before_a_part_of_its_answer_goes_out() -> None:
    """While the provider had it, a budget was set that has too little left."""
    world = World()
    world.upstream.answer = lambda _: FakeReply(headers=SSE, pieces=[chunk("one"), usage_chunk(), DONE])
    async with world.gateway.handle(world.incoming(STREAM)) as reply:
        await world.store.decide(KEY.account, {"tokens": 1})
        assert not isinstance(reply.body, bytes)
        await anext(reply.body)
        [charged] = await world.store.calls(KEY, 9)
        assert charged.outcome == ORPHANED
        assert charged.spent.tokens > 0
        await whole(reply)
    assert await world.store.calls(KEY, 9) == [world.record]
    (balance,) = await world.store.balances([Claim(KEY.account)])
    assert balance.used == world.record.spent


async def test_a_call_that_is_refused_as_its_account_is_damaged_is_not_recorded() -> None:
    class Damaged(UnavailableStore):
        async def reserve(self, opened: OpenHold, lease_s: float) -> Granted | Refused:
            raise StoreDamaged("its account cannot be read")

    world = World(budget=BudgetPolicy(session=Limits(tokens=1_000)), store=Damaged())
    reply, _ = await world.call()
    assert (reply.status, world.upstream.sent) == (503, [])
    assert (world.store.settled, world.leases.count) == (0, 0)


@pytest.mark.parametrize(
    ("budget", "status"),
    [
        (BudgetPolicy(session=Limits(tokens=10**6)), 400),
        (BudgetPolicy(session=Limits(tokens=10**6), deferred=True), 200),
        (BudgetPolicy(session=Limits(calls=9)), 200),
        (BudgetPolicy(), 200),
    ],
)
async def test_what_is_billed_later_is_refused_only_where_a_budget_counts_what_it_costs(
    budget: BudgetPolicy, status: int
) -> None:
    world = World(budget=budget)
    reply, _ = await world.call(world.incoming(b'{"model":"m","input":"hi","deferred":true}', "responses"))
    assert (reply.status, len(world.upstream.sent)) == (status, int(status == 200))


async def test_a_stream_that_is_ended_for_its_budget_says_so_in_its_record_and_is_hung_up_on() -> None:
    world = World(budget=BudgetPolicy(session=Limits(tokens=1_000)), facts=lambda _: ModelFacts(reasoning=False))
    world.upstream.answer = lambda _: FakeReply(
        headers=SSE, pieces=[*(chunk("and more " * 50) for _ in range(500)), DONE]
    )
    async with world.gateway.handle(world.incoming(STREAM)) as reply:
        await whole(reply)
        assert world.upstream.open == 0
    assert world.record.outcome == "budget_end"


@pytest.mark.parametrize(("answered", "then"), [(STREAM_STEP, STREAM_STEP), (9_000, DEFAULT_OUTPUT)])
@pytest.mark.parametrize("is_json", [False, True], ids=["one event", "JSON in place of a stream"])
async def test_streams_that_came_in_one_piece_are_held_whole_from_then_on(
    answered: int, then: int, *, is_json: bool
) -> None:
    world = World(budget=BudgetPolicy(session=Limits(tokens=1_000_000)), facts=lambda _: ModelFacts(reasoning=False))
    usage = {"prompt_tokens": 9, "completion_tokens": answered, "total_tokens": 9 + answered}
    whole = chunk("x", usage=usage)
    in_json = FakeReply(pieces=[whole.removeprefix(b"data: ").strip()])
    world.upstream.answer = lambda _: in_json if is_json else FakeReply(headers=SSE, pieces=[whole, DONE])
    opened = watched(world)
    for _ in range(2):
        reply, _ = await world.call(world.incoming(STREAM))
        assert reply.status == 200
    assert [one.hold.most for one in opened] == [STREAM_STEP, then]
