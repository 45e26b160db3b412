"""Cancel a call at each of its waits, and again at the next: a sent call is charged once, an unsent call never."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from gateway.call.types import Caller, Incoming
from gateway.core.errors import StoreUnavailable
from gateway.core.http.request import Outgoing
from gateway.core.ledger.arithmetic import AccountKey, Balance, Claim, Granted, Limits, Refused
from gateway.core.ledger.charging import BudgetPolicy, KeyLimits
from gateway.core.ledger.session_key import SessionKey
from gateway.core.record import CallRecord
from gateway.core.session import Change, Remembered, SessionState
from gateway.core.stored import CallStart, OpenHold, StepEnding
from gateway.core.usage import Totals
from tests.support.cancelling import cancelled_at
from tests.support.fakes import BODY, JSON, KEY, SSE, STREAM, FakeReply, FakeUpstream, UnavailableStore, World
from tests.support.scripted import DONE, chunk, usage_chunk

ACCOUNTS = (KEY.account, AccountKey("key", "alice"), AccountKey("session", "alice", "above"))
#: more waits than a call has
MANY = 120


class WaitingReply(FakeReply):
    async def chunks(self) -> AsyncIterator[bytes]:
        async for piece in super().chunks():
            await asyncio.sleep(0)
            yield piece


class WaitingUpstream(FakeUpstream):
    """Wait after sending and when closing. The gateway treats a call as sent until it knows otherwise."""

    @asynccontextmanager
    async def send(self, request: Outgoing) -> AsyncIterator[FakeReply]:
        async with super().send(request) as reply:
            await asyncio.sleep(0)
            yield reply
            await asyncio.sleep(0)


class WaitingStore(UnavailableStore):
    """Wait before and after each operation. `fails_once`: it settles, but reports a failure once."""

    fails_once = False

    async def settle(self, record: CallRecord, ending: StepEnding | None = None) -> Totals:
        totals = await super().settle(record, ending)
        await asyncio.sleep(0)
        if self.fails_once:
            self.fails_once = False
            raise StoreUnavailable("no answer in time")
        return totals

    async def open_call(
        self, session: SessionKey, claims: Sequence[Claim], *, with_totals: bool, above: Sequence[SessionKey] = ()
    ) -> CallStart:
        await asyncio.sleep(0)
        return await super().open_call(session, claims, with_totals=with_totals, above=above)

    async def balances(self, claims: Sequence[Claim]) -> tuple[Balance, ...]:
        await asyncio.sleep(0)
        return await super().balances(claims)

    async def reserve(self, opened: OpenHold, lease_s: float) -> Granted | Refused:
        await asyncio.sleep(0)
        granted = await super().reserve(opened, lease_s)
        await asyncio.sleep(0)
        return granted

    async def update(self, session: SessionKey, change: Change) -> SessionState:
        await asyncio.sleep(0)
        state = await super().update(session, change)
        await asyncio.sleep(0)
        return state

    async def remembered(self, session: SessionKey) -> Remembered:
        await asyncio.sleep(0)
        return await super().remembered(session)

    async def totals(self, session: SessionKey) -> Totals:
        await asyncio.sleep(0)
        return await super().totals(session)


def stream(_: Outgoing) -> FakeReply:
    return WaitingReply(headers=SSE, pieces=[chunk("a"), chunk("b"), usage_chunk(), DONE])


def refused_once(request: Outgoing) -> FakeReply:
    if b"stream_options" in request.body:
        return WaitingReply(400, JSON, [b'{"error":{"message":"stream_options is unknown"}}'])
    return stream(request)


def file(_: Outgoing) -> FakeReply:
    return WaitingReply(headers=[(b"content-type", b"audio/wav")], pieces=[b"x", b"y"])


CALLS: dict[str, tuple[bytes, Callable[[Outgoing], FakeReply]]] = {
    "whole": (BODY, lambda _: WaitingReply()),
    "stream": (STREAM, stream),
    "stream asked for twice": (STREAM, refused_once),
    "file": (BODY, file),
}
MILLION = Limits(tokens=1_000_000)
NO_BUDGET, BUDGET = BudgetPolicy(), BudgetPolicy(session=MILLION)


def world_of(budget: BudgetPolicy, answer: Callable[[Outgoing], FakeReply]) -> World:
    world = World(budget=budget, store=WaitingStore(), upstream=WaitingUpstream())
    world.upstream.answer = answer
    return world


def call_of(world: World, body: bytes) -> Incoming:
    """Return a call that is charged to its session, to its parent, and to its client key."""
    plain = world.incoming(body, caller=Caller("alice", budget=KeyLimits(MILLION)))
    return replace(plain, directives=replace(plain.directives, parent="above"))


async def check(world: World, *, was_paid: bool | None) -> None:
    """Wait for all work; check that the charges match what the provider bills. None: it may bill the call."""
    await world.settler.aclose()
    assert (world.leases.count, world.upstream.open) == (0, 0)
    records = await world.store.calls(KEY, 10)
    charged = sum(record.charge is not None for record in records)
    assert charged in ((0, 1) if was_paid is None else (int(was_paid),))
    assert len(records) <= 1
    assert len(world.recorder.records) <= 1
    balances = await world.store.balances([Claim(key) for key in ACCOUNTS])
    assert [one.held for one in balances] == [(0, 0, 0)] * len(ACCOUNTS)
    assert [one.used.calls for one in balances] == [charged] * len(ACCOUNTS)
    totals = await world.store.totals(KEY)
    assert (totals.calls, totals.total_tokens) == (charged, balances[0].used.tokens)


async def at_each_wait(one: Callable[[tuple[int, ...]], Awaitable[bool]]) -> None:
    """Cancel a call at each of its waits, and at each wait and the next one, until there are no more waits."""
    for place in range(1, MANY):
        for places in ((place,), (place, place + 1)):
            try:
                has_waited = await one(places)
            except AssertionError as error:
                error.add_note(f"cancelled at its waits {places}")
                raise
            if not has_waited and len(places) == 1:
                assert place > 5
                return
    raise AssertionError("it waits more often than that")


@pytest.mark.parametrize("budget", [NO_BUDGET, BUDGET], ids=["no budget", "a budget"])
@pytest.mark.parametrize("name", CALLS)
async def test_a_cancelled_call_is_charged_once_if_it_was_sent(name: str, budget: BudgetPolicy) -> None:
    body, answer = CALLS[name]

    async def one(places: tuple[int, ...]) -> bool:
        world = world_of(budget, answer)
        has_waited = await cancelled_at(world.call(call_of(world, body)), *places)
        sent = len(world.upstream.sent)
        # Whether a call is refused is known after its response.
        await check(world, was_paid=None if answer is refused_once and sent == 1 else sent > 0)
        return has_waited

    await at_each_wait(one)


@pytest.mark.parametrize("budget", [NO_BUDGET, BUDGET], ids=["no budget", "a budget"])
async def test_a_cancelled_call_is_charged_at_most_once_if_it_was_refused(budget: BudgetPolicy) -> None:
    async def one(places: tuple[int, ...]) -> bool:
        world = world_of(budget, lambda _: WaitingReply(429, JSON, [b"{}"]))
        has_waited = await cancelled_at(world.call(call_of(world, BODY)), *places)
        await check(world, was_paid=None if world.upstream.sent else False)
        return has_waited

    await at_each_wait(one)


@pytest.mark.parametrize("name", ["whole", "stream"])
async def test_a_cancelled_call_is_charged_once_if_the_store_reported_a_failure(name: str) -> None:
    body, answer = CALLS[name]

    async def one(places: tuple[int, ...]) -> bool:
        world = world_of(BUDGET, answer)
        assert isinstance(world.store, WaitingStore)
        world.store.fails_once = True
        has_waited = await cancelled_at(world.call(call_of(world, body)), *places)
        await check(world, was_paid=bool(world.upstream.sent))
        return has_waited

    await at_each_wait(one)
