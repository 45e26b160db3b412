"""Reservations of calls. If creating a record fails, the call is charged for what is known."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from gateway.core.errors import StoreDamaged
from gateway.core.ledger.arithmetic import Claim, Granted, Limits, Refused
from gateway.core.ledger.charging import BudgetPolicy
from gateway.core.ledger.output_limit import DEFAULT_OUTPUT, STREAM_STEP
from gateway.core.pricing import price_from_table
from gateway.core.record import ORPHANED, CallRecord
from gateway.core.routing import ModelFacts, ModelRule, Route, Routes
from gateway.core.session import kept_text
from gateway.core.stored import OpenHold
from gateway.dialects import endpoint
from gateway.dialects.base import Call, EventReader, ParsedResponse
from gateway.dialects.openai_chat import OpenAIChat
from tests.support.fakes import KEY, PRICE, SSE, STREAM, FakeReply, UnavailableStore, World, whole
from tests.support.records import record
from tests.support.scripted import DONE, chunk, usage_chunk


class Unreadable(OpenAIChat):
    """A dialect whose responses cannot be read to their end."""

    def reader(self, call: Call, *, drop_usage: bool, input_tokens: int | None = None) -> EventReader:
        made = super().reader(call, drop_usage=drop_usage, input_tokens=input_tokens)

        class Broken(type(made)):  # type: ignore[misc]
            def answer(self) -> ParsedResponse:
                raise ZeroDivisionError

        made.__class__ = Broken
        return made


class Nameless(Unreadable):
    """A dialect without a usable name once its call has a response, so that no record can be created."""

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


def record_holds(world: World) -> list[OpenHold]:
    """Return a list that receives the requested reservations, in order."""
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


async def test_a_call_with_unreadable_usage_is_charged_for_its_input_and_releases_its_hold() -> None:
    world = world_of()
    found = await failed(world, Unreadable())
    assert world.leases.count == 0
    assert found["held"] == (0, 0, 0)
    record = world.record
    assert record.outcome == "internal_error"
    assert record.notes["usage"] == "unknown: the gateway failed to read it"
    assert record.charge is not None
    assert record.charge.source == "estimated"
    assert found["used"] == record.spent
    assert record.spent.tokens >= record.charge.usage.input_tokens > 0
    assert (await world.store.calls(KEY, 10)) == [record]


async def test_a_deferred_call_with_unreadable_usage_is_charged_its_whole_reservation() -> None:
    world = world_of()
    incoming = world.incoming(STREAM[:-1] + b',"deferred":true,"max_tokens":5000}')
    with pytest.raises(ZeroDivisionError):
        await world.call(replace(incoming, endpoint=replace(incoming.endpoint, dialect=Unreadable())))
    assert world.record.spent.tokens > 5_000


async def test_a_call_without_a_record_is_settled_as_orphaned_when_its_lease_ends() -> None:
    world = world_of()
    opened = record_holds(world)
    found = await failed(world, Nameless())
    assert world.leases.count == 0, "the hold is not renewed and ends with its lease"
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
async def test_an_orphaned_call_is_charged_its_expected_input_without_the_margin(path: str, body: bytes) -> None:
    world = world_of()
    opened = record_holds(world)
    await world.call(world.incoming(body, path))
    [held] = opened
    orphaned, context = held.as_orphaned(), world.record.context
    assert orphaned.charge is not None
    expected = orphaned.charge.usage.input_tokens
    assert 0 < expected < held.hold.fixed.tokens, "the hold has a margin"
    assert context is None or expected == context.tokens
    assert orphaned.spent.tokens == expected


@pytest.mark.parametrize(("limits", "is_all"), [(Limits(tokens=1_000_000), True), (Limits(calls=9), False)])
async def test_an_orphaned_background_call_is_charged_its_whole_reservation(limits: Limits, is_all: bool) -> None:
    world = World(budget=BudgetPolicy(session=limits))
    opened = record_holds(world)
    asked = b'{"model":"m","input":"hi","background":true,"max_output_tokens":5000}'
    await world.call(world.incoming(asked, "responses"))
    [kept] = opened
    orphaned = replace(kept, units=kept.hold.most).as_orphaned()
    assert (orphaned.spent == kept.hold.amount(5_000)) is is_all
    assert (orphaned.spent.tokens > 5_000) is is_all
    assert orphaned.outcome == ORPHANED
    assert orphaned.charge is not None
    assert orphaned.charge.usage.output_tokens == 0, "the output is unknown"


async def test_observers_receive_a_fetch_without_the_totals_of_its_background_call() -> None:
    world = World()
    said: dict[str, Any] = {"id": "resp_1", "status": "queued", "usage": None}
    world.upstream.answer = lambda _: FakeReply(pieces=[json.dumps(said).encode()])
    asked = b'{"model":"m","input":"hi","background":true}'
    await world.call(world.incoming(asked, "responses"))
    said |= {"status": "completed", "usage": {"input_tokens": 3, "output_tokens": 4}}
    path = "responses/resp_1"
    reply, _ = await world.call(world.incoming(b"", path, method="GET", endpoint=endpoint("GET", path)))
    assert reply.totals is not None
    outcomes = [
        (one.outcome, totals.total_tokens if totals is not None else None) for one, totals in world.recorder.records
    ]
    begun, made, fetching = outcomes
    assert (begun[0], made, fetching) == ("pending", ("ok", 7), ("ok", None))


FALLBACK = Routes([ModelRule("m", "p", fallback=("q/second",))], ["p", "q"], "p")


@pytest.mark.parametrize(
    ("asked", "facts", "most"),
    [
        ({"max_tokens": 50}, {}, 50),
        ({"max_output_tokens": 50}, {}, DEFAULT_OUTPUT),  # no provider of this format reads this field
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
async def test_the_longest_possible_output_of_all_routes_is_reserved(
    asked: dict[str, object], facts: dict[str, dict[str, Any]], most: int
) -> None:
    world = World(
        budget=BudgetPolicy(session=Limits(tokens=1_000_000)),
        routes=FALLBACK,
        facts=lambda route: ModelFacts(**facts.get(route.provider, {})),
    )
    opened = record_holds(world)
    body = {"model": "m", "messages": [{"role": "user", "content": "hello there"}], **asked}
    await world.call(world.incoming(json.dumps(body).encode()))
    assert opened[0].hold.most == most


async def test_no_more_is_reserved_than_the_largest_window_leaves() -> None:
    windows = {"p": 800, "q": 900}
    world = World(
        budget=BudgetPolicy(session=Limits(tokens=1_000_000)),
        routes=FALLBACK,
        facts=lambda route: ModelFacts(window=windows[route.provider]),
    )
    opened = record_holds(world)
    await world.call()
    assert opened[0].hold.most == 900 - opened[0].hold.fixed.tokens


async def test_a_completion_without_a_limit_reserves_the_default_of_its_api() -> None:
    world = world_of()
    opened = record_holds(world)
    await world.call(world.incoming(b'{"model":"m","prompt":"hello"}', "completions"))
    assert opened[0].hold.most == 16


async def test_under_a_usd_budget_no_fallback_without_a_price_is_used() -> None:
    def price(route: Route) -> ModelFacts:
        return ModelFacts(price=PRICE if route.provider == "p" else None)

    world = World(budget=BudgetPolicy(session=Limits(nano_usd=10**9)), routes=FALLBACK, facts=price)
    world.upstream.answer = lambda request: FakeReply(500, pieces=[b"{}"])
    await world.call()
    assert [sent.url for sent in world.upstream.sent] == ["http://p/v1/chat/completions"]
    assert world.record.notes["left_out"].startswith("q/second")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_limit_in_an_unknown_field_is_replaced_by_the_reservation_unless_it_can_grow(*, stream: bool) -> None:
    world = World(
        budget=BudgetPolicy(session=Limits(tokens=1_000_000)), facts=lambda _: ModelFacts(reasoning=False, output=9_000)
    )
    body = {"model": "m", "messages": [], "stream": stream, "max_output_tokens": 9_000}
    await world.call(world.incoming(json.dumps(body).encode()))
    assert json.loads(world.upstream.sent[0].body).get("max_tokens") == (None if stream else 9_000)


async def test_stored_tokens_count_for_long_context_prices() -> None:
    table = {"input_cost_per_token": 1e-6, "output_cost_per_token": 1e-5}
    long = {f"{name}_above_200k_tokens": 2 * rate for name, rate in table.items()}
    price = price_from_table(table | long)
    world = World(budget=BudgetPolicy(session=Limits(nano_usd=10**12)), facts=lambda _: ModelFacts(price=price))
    await world.store.settle(replace(record("s", 0.0), session=KEY, kept=kept_text("p", ["resp_1"], 250_000)))
    opened = record_holds(world)
    for before in (None, "resp_1"):
        body = {"model": "m", "previous_response_id": before, "input": "And?", "max_output_tokens": 100}
        await world.call(world.incoming(json.dumps(body).encode(), "responses"))
    assert [one.hold.unit.nano_usd for one in opened] == [10_000, 20_000]


@pytest.mark.parametrize(
    ("asked", "facts"), [({"max_tokens": 50}, {"reasoning": False}), ({}, {"output": 50, "reasoning": True})]
)
async def test_a_fully_reserved_stream_is_not_ended_by_the_token_estimate(
    asked: dict[str, object], facts: dict[str, Any]
) -> None:
    """The provider keeps to its limit, and the budget has nothing left to reserve."""
    world = World(budget=BudgetPolicy(session=Limits(tokens=100)), facts=lambda _: ModelFacts(**facts))
    pieces = [chunk(f"{number} and more") for number in range(200)]
    world.upstream.answer = lambda _: FakeReply(headers=SSE, pieces=[*pieces, DONE])
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True, **asked}
    _, answer = await world.call(world.incoming(json.dumps(body).encode()))
    assert all(piece in answer for piece in pieces)


async def test_noted_output_of_an_orphaned_call_is_charged_at_the_price_of_its_model() -> None:
    world = World(budget=BudgetPolicy(session=Limits(nano_usd=10**9)))
    opened = record_holds(world)
    await world.call(world.incoming(STREAM.replace(b'"m"', b'"q-m"')))
    before, after = (replace(opened[0], noted=tokens).as_orphaned().spent for tokens in (0, 100))
    assert after.nano_usd - before.nano_usd == 100 * 10_000


async def test_a_stream_reports_at_its_start_the_budget_left_after_its_reservation() -> None:
    world = world_of()
    opened = record_holds(world)
    async with world.gateway.handle(world.incoming(STREAM)) as reply:
        held = opened[0].hold.fixed.tokens + opened[0].hold.most
        assert reply.allowance is not None
        assert reply.allowance.remaining_tokens == 1_000_000 - held
        await whole(reply)


async def test_a_call_that_cannot_be_reserved_is_charged_before_its_first_chunk_is_sent() -> None:
    """While the provider has the call, a budget is set that is too small."""
    world = World()
    world.upstream.answer = lambda _: FakeReply(headers=SSE, pieces=[chunk("one"), usage_chunk(), DONE])
    async with world.gateway.handle(world.incoming(STREAM)) as reply:
        await world.store.override_limits(KEY.account, {"tokens": 1})
        assert not isinstance(reply.body, bytes)
        await anext(reply.body)
        [charged] = await world.store.calls(KEY, 9)
        assert charged.outcome == ORPHANED
        assert charged.spent.tokens > 0
        await whole(reply)
    assert await world.store.calls(KEY, 9) == [world.record]
    (balance,) = await world.store.balances([Claim(KEY.account)])
    assert balance.used == world.record.spent


async def test_a_call_refused_for_a_damaged_account_is_not_recorded() -> None:
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
async def test_a_deferred_call_is_refused_only_under_a_budget_that_counts_its_cost(
    budget: BudgetPolicy, status: int
) -> None:
    world = World(budget=budget)
    reply, _ = await world.call(world.incoming(b'{"model":"m","input":"hi","deferred":true}', "responses"))
    assert (reply.status, len(world.upstream.sent)) == (status, int(status == 200))


async def test_a_stream_ended_by_its_budget_is_noted_and_its_connection_closed() -> None:
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
async def test_after_a_stream_in_one_piece_later_streams_are_reserved_in_full(
    answered: int, then: int, *, is_json: bool
) -> None:
    world = World(budget=BudgetPolicy(session=Limits(tokens=1_000_000)), facts=lambda _: ModelFacts(reasoning=False))
    usage = {"prompt_tokens": 9, "completion_tokens": answered, "total_tokens": 9 + answered}
    whole = chunk("x", usage=usage)
    in_json = FakeReply(pieces=[whole.removeprefix(b"data: ").strip()])
    world.upstream.answer = lambda _: in_json if is_json else FakeReply(headers=SSE, pieces=[whole, DONE])
    opened = record_holds(world)
    for _ in range(2):
        reply, _ = await world.call(world.incoming(STREAM))
        assert reply.status == 200
    assert [one.hold.most for one in opened] == [STREAM_STEP, then]
