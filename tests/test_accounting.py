"""A bug in what makes the record of a call costs nobody anything: it is charged for what is known, and nothing stays held."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from gateway.core.ledger import Claim, Limits
from gateway.core.record import CallRecord
from gateway.core.spending import BudgetPolicy
from gateway.core.stored import OpenHold
from gateway.dialects.base import Answer, Call, EventReader
from gateway.dialects.openai_chat import OpenAIChat
from tests.support.fakes import KEY, SSE, STREAM, FakeReply, World
from tests.support.scripted import DONE, chunk, usage_chunk


class Unreadable(OpenAIChat):
    """Its answers cannot be read to their end."""

    def reader(self, call: Call, *, drop_usage: bool, input_tokens: int | None = None) -> EventReader:
        made = super().reader(call, drop_usage=drop_usage, input_tokens=input_tokens)

        class Broken(type(made)):  # type: ignore[misc]
            def answer(self) -> Answer:
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


async def failed(world: World, dialect: OpenAIChat) -> Mapping[str, Sequence[object]]:
    incoming = world.incoming(STREAM)
    with pytest.raises(ZeroDivisionError):
        await world.call(replace(incoming, endpoint=replace(incoming.endpoint, dialect=dialect)))
    (stands,) = await world.store.standings([Claim(KEY.account)])
    return {"used": stands.used, "held": stands.held}


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


async def test_a_call_without_a_record_is_left_to_whoever_settles_those_of_workers_that_are_gone() -> None:
    world = world_of()
    opened: list[OpenHold] = []
    reserve = world.store.reserve

    class Watching(type(world.store)):  # type: ignore[misc]
        async def reserve(self, one: OpenHold, lease_s: float) -> object:
            opened.append(one)
            return await reserve(one, lease_s)

    world.store.__class__ = Watching
    found = await failed(world, Nameless())
    assert world.leases.count == 0, "nobody renews it: it ends with its lease"
    assert world.recorder.records == []
    assert found["held"] != (0, 0, 0)
    [hold] = opened
    lost: CallRecord = hold.as_lost()
    await world.settler.settle(lost)
    (stands,) = await world.store.standings([Claim(KEY.account)])
    assert stands.held == (0, 0, 0)
    assert stands.used.calls == 1
