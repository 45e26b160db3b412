"""Index background responses by their id, and settle their calls when the response is fetched."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Any

import pytest

from gateway.call.types import Caller, ClientResponse, SessionPolicy
from gateway.core.ledger.arithmetic import NO_LIMITS, Limits
from gateway.core.ledger.charging import KeyLimits
from gateway.core.ledger.session_key import SessionKey
from gateway.core.record import ORPHANED, CallRecord, response_digest
from gateway.core.usage import Charge, Totals
from gateway.dialects import endpoint
from tests.support.fakes import KEY, FakeReply, UnavailableStore, World

PATH = "responses/resp_1"
TOOL = {"type": "function", "name": "look", "description": "Looks at things. " * 50, "parameters": {"type": "object"}}
USAGE = {"input_tokens": 700, "output_tokens": 40, "total_tokens": 740}


async def asked(world: World, *, background: bool, **said: Any) -> CallRecord:
    """Make a call with this response and return its record."""
    body = {"model": "m", "input": "hi", "tools": [TOOL], "background": background}
    answers(world, **said)
    await world.call(world.incoming(json.dumps(body).encode(), "responses"))
    return world.recorder.records[-1][0]


async def fetched(world: World, **said: Any) -> tuple[ClientResponse, bytes]:
    answers(world, **said)
    return await world.call(world.incoming(b"", PATH, method="GET", endpoint=endpoint("GET", PATH)))


async def charges(world: World) -> list[Charge | None]:
    return [call.charge for call in await world.store.calls(KEY, 9)]


def answers(world: World, **said: Any) -> None:
    body = json.dumps({"id": "resp_1", "status": "completed", "output": [], **said}).encode()
    world.upstream.answer = lambda _: FakeReply(pieces=[body])


async def test_a_background_response_can_be_continued_like_any_response() -> None:
    at_once, later = World(), World()
    made = await asked(at_once, background=False, usage=USAGE)
    await asked(later, background=True, status="queued", usage=None)
    await fetched(later, usage=USAGE)
    kept = [(await world.store.remembered(KEY)).kept_tokens("p", ["resp_1"]) for world in (at_once, later)]
    assert made.charge is not None
    assert kept[0] == kept[1]
    assert 40 < kept[1] < 740 - 100, "the tools are sent with each request"


async def test_the_response_of_an_orphaned_call_can_be_continued_once_fetched() -> None:
    before, world, name = World(), World(), response_digest("resp_1")
    begun = await asked(before, background=True, status="queued", usage=None)
    noted = await before.store.learned(f"pending\n{name}") or b""
    await world.store.learn({f"pending\n{name}": lambda _: noted})
    await world.store.settle(replace(begun, outcome=ORPHANED, notes={}, answer=None))
    assert await world.store.call_of_response("alice", name) is None
    await fetched(world, usage=USAGE)
    found = await world.store.call_of_response("alice", name)
    assert found is not None
    assert (found.call_id, found.outcome) == (begun.call_id, "ok")


async def test_the_note_of_a_pending_call_keeps_the_names_of_earlier_versions() -> None:
    world, key = World(), f"pending\n{response_digest('resp_1')}"
    await asked(world, background=True, status="queued", usage=None)
    noted = json.loads(await world.store.learned(key) or b"")
    assert [*noted] == ["provider", "namespace", "call_id", "ids", "beside", "match", "tier", "is_told"]


async def test_later_fetches_do_not_change_the_settled_usage() -> None:
    world = World()
    await asked(world, background=True, status="queued", usage=None)
    for tokens in (40, 900, 3):
        reply, _ = await fetched(world, usage={**USAGE, "output_tokens": tokens, "total_tokens": 700 + tokens})
        assert reply.charge is not None
        assert reply.charge.usage.total_tokens == 740
        assert reply.totals is not None
        assert (reply.totals.calls, reply.totals.total_tokens) == (1, 740)
        assert await charges(world) == [reply.charge]


async def test_a_fetched_response_is_forwarded_even_if_reading_the_totals_fails() -> None:
    class Odd(UnavailableStore):
        is_odd = False

        async def totals(self, key: SessionKey) -> Totals:
            if self.is_odd:
                raise RuntimeError("a bug")
            return await super().totals(key)

    store = Odd()
    world = World(store=store)
    await asked(world, background=True, status="queued", usage=None)
    store.is_odd = True
    reply, body = await fetched(world, usage=USAGE)
    assert (reply.status, json.loads(body)["usage"]) == (200, USAGE)


@pytest.mark.parametrize(("is_noted", "status"), [(True, "completed"), (False, "completed"), (False, "queued")])
async def test_a_fetched_response_without_a_known_call_is_forwarded(
    is_noted: bool, status: str, caplog: pytest.LogCaptureFixture
) -> None:
    world = World()
    if is_noted:
        await asked(world, background=True, status="queued", usage=None)
        await world.store.delete(KEY)
    with caplog.at_level(logging.WARNING):
        reply, body = await fetched(world, status=status, usage=USAGE)
    assert (json.loads(body)["usage"], reply.charge) == (USAGE, None)
    assert {record.getMessage() for record in caplog.records} == {"an observer failed"}, "as it is to"
    assert set(await charges(world)) <= {None}


async def test_observers_receive_nothing_for_an_unknown_response() -> None:
    background = World().gateway.background
    assert not await background.claim_notification("resp_1")
    assert not await background.claim_notification("resp_1")


async def test_fetching_a_settled_response_charges_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World()
    with caplog.at_level(logging.WARNING):
        made = await asked(world, background=False, usage=USAGE)
        reply, _ = await fetched(world, usage={**USAGE, "output_tokens": 900})
    assert (reply.charge, await charges(world)) == (None, [made.charge])
    assert {record.getMessage() for record in caplog.records} == {"an observer failed"}


async def test_a_refused_fetch_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    await asked(world, background=True, status="queued", usage=None)
    before = await charges(world)
    world.upstream.answer = lambda _: FakeReply(404, pieces=[b'{"error":{"message":"gone"}}'])
    with caplog.at_level(logging.WARNING):
        reply, _ = await world.call(world.incoming(b"", PATH, method="GET", endpoint=endpoint("GET", PATH)))
    assert (reply.status, await charges(world)) == (404, before)
    assert {record.getMessage() for record in caplog.records} == {"an observer failed"}


@pytest.mark.parametrize("limits", [Limits(tokens=10**6), NO_LIMITS])
async def test_a_call_without_a_session_is_settled_by_its_fetch_without_totals(
    limits: Limits, caplog: pytest.LogCaptureFixture
) -> None:
    world, caller = World(SessionPolicy(on_missing="none")), Caller("alice", budget=KeyLimits(limits))
    body = json.dumps({"model": "m", "input": "hi", "background": True}).encode()
    answers(world, status="queued", usage=None)
    await world.call(world.incoming(body, "responses", headers=[], caller=caller))
    answers(world, usage=USAGE)
    fetching = world.incoming(b"", PATH, method="GET", endpoint=endpoint("GET", PATH), headers=[], caller=caller)
    with caplog.at_level(logging.WARNING):
        reply, _ = await world.call(fetching)
    begun, made, _ = [record for record, _ in world.recorder.records]
    assert made.charge is not None
    assert (made.call_id, made.charge.usage.total_tokens) == (begun.call_id, 740)
    assert (reply.charge, reply.totals) == (None, None)
    assert {record.getMessage() for record in caplog.records} == {"an observer failed"}
