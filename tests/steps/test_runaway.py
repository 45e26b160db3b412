"""Runaway protection within the pipeline: what is read, what the session remembers, and an unavailable store."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from gateway.call.state import CallState
from gateway.call.types import ClientResponse, Purpose
from gateway.core.ledger.arithmetic import Limits
from gateway.core.ledger.charging import BudgetPolicy
from gateway.core.runaway import RunawayPolicy, Thresholds
from gateway.core.steps import Agent, Step
from gateway.core.times import Clocks
from gateway.dialects import rounds
from gateway.steps import runaway
from gateway.steps.runaway import RunawayGuard
from tests.support.fakes import KEY, FakeReply, World

Json = dict[str, Any]
POLICY = RunawayPolicy(loop=Thresholds(4, 6), no_progress=Thresholds(8, 12), rounds=Thresholds(30, 40))
CLOCK = RunawayPolicy(seconds=Thresholds(80, 100))


def conversation(*results: str, task: str = "go", size: int = 400) -> list[Json]:
    messages: list[Json] = [{"role": "system", "content": "x" * 5000}, {"role": "user", "content": task}]
    for number, result in enumerate(results):
        call = {"id": f"c{number}", "type": "function", "function": {"name": "read", "arguments": '{"path": "a"}'}}
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"c{number}", "content": result * size},
        ]
    return messages


async def call(world: World, messages: list[Json], **changes: Any) -> ClientResponse:
    world.upstream.answer = lambda _: FakeReply()
    body = json.dumps({"model": "m", "messages": messages}).encode()
    reply, _ = await world.call(world.incoming(body, **changes))
    return reply


def warnings(reply: ClientResponse) -> Mapping[str, int]:
    return {one.kind: one.number for one in reply.request.warnings}


class Reads:
    """Counts the messages that are read, through the function that reads them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []

        def counted(wire: Any, array: bytes, before: Any) -> Any:
            self.sizes.append(len(json.loads(array)))
            return rounds.read_rounds(wire, array, before)

        monkeypatch.setattr(runaway, "read_rounds", counted)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(monkeypatch)


async def test_a_conversation_is_read_once_and_not_on_each_call(reads: Reads) -> None:
    world = World(runaway=POLICY)
    for number in range(1, 25):
        reply = await call(world, conversation(*[f"result {one}" for one in range(number)]))
        assert warnings(reply) == {}
    # Nothing can be found in fewer than 8 messages. After that, three rounds are read at a time, with the message
    # before them, which the client may have changed.
    assert reads.sizes == [8, *[7] * 7]


async def test_while_a_loop_goes_on_each_round_is_read(reads: Reads) -> None:
    world = World(runaway=POLICY)
    found = [warnings(await call(world, conversation(*"a" * number))).get("loop") for number in range(1, 7)]
    assert found == [None, None, None, 4, 5, 6]
    assert reads.sizes == [8, 3, 3, 3]


async def test_a_reload_with_other_limits_applies_them_at_once() -> None:
    world = World(runaway=RunawayPolicy(loop=Thresholds(40)))
    for number in range(1, 5):
        assert warnings(await call(world, conversation(*"a" * number))) == {}
    clocks = Clocks(time.monotonic, time.time)
    guard = RunawayGuard(POLICY, store=world.store, planner=world.gateway.planner, observers=[], clocks=clocks)
    world.gateway = replace(world.gateway, runaway=guard)
    assert warnings(await call(world, conversation(*"a" * 5))) == {"loop": 5}


async def test_a_client_that_changes_its_last_message_is_counted_by_what_it_sends() -> None:
    world = World(runaway=POLICY)
    for number in range(1, 6):
        await call(world, conversation(*"a" * number))
    assert warnings(await call(world, conversation(*"aaaab"))) == {}
    assert warnings(await call(world, conversation(*"aaaaba"))) == {}
    assert warnings(await call(world, conversation(*"aaaabaaaa"))) == {"loop": 4}


async def test_a_stopped_work_is_remembered_once_and_its_observers_are_notified_once() -> None:
    world = World(runaway=POLICY)
    for number in (6, 6, 7):
        reply = await call(world, conversation(*"a" * number))
        assert (reply.status, reply.fault.code if reply.fault else None) == (400, "session_stopped")
    assert world.upstream.sent == []
    [work] = (await world.store.remembered(KEY)).state.works.values()
    assert (work.stopped, work.rounds) == ("loop", 7)
    assert [(alert.found.action, alert.found.number) for alert in world.recorder.alerts] == [("refuse", 6)]
    await world.store.update(KEY, lambda state: state.resumed(1.0))
    assert (await call(world, conversation(*"a" * 7))).status == 200
    assert (await call(world, conversation(*"a" * 12))).status == 200
    assert (await call(world, conversation(*"a" * 13))).status == 400


async def test_a_resumed_session_goes_on_from_where_it_was_stopped_last() -> None:
    world = World(runaway=POLICY)
    assert (await call(world, conversation(*"aaaaaa"))).status == 400
    # The client takes back two results and goes on, until it repeats itself again.
    assert (await call(world, conversation(*"aaaabc"))).status == 200
    assert (await call(world, conversation(*"aaaabcdddddd"))).status == 400
    await world.store.update(KEY, lambda state: state.resumed(1.0))
    assert (await call(world, conversation(*"aaaabcdddddd"))).status == 200


async def test_a_call_that_was_refused_does_not_undo_that_a_person_resumes_the_session() -> None:
    world = World(runaway=POLICY)
    await call(world, conversation(*"a" * 6))
    stale = (await world.store.remembered(KEY)).state.works
    resumed = await world.store.update(KEY, lambda state: state.resumed(1.0))
    guard = world.gateway.runaway
    assert guard is not None
    [(name, work)] = stale.items()
    state = CallState.of(world.incoming(), 0.0)
    state.session = KEY
    await guard._remember(state, name, replace(work, rounds=7), instead_of=work)
    assert (await world.store.remembered(KEY)).state == resumed


async def test_another_conversation_of_the_session_is_not_stopped() -> None:
    world = World(runaway=POLICY)
    assert (await call(world, conversation(*"a" * 6))).status == 400
    assert (await call(world, conversation(*"abc", task="a subagent"))).status == 200
    assert (await call(world, conversation(*"a" * 6))).status == 400


@pytest.mark.parametrize("policy", [POLICY, replace(POLICY, seconds=Thresholds(80, 100))])
async def test_without_the_store_a_call_is_warned_and_not_refused(policy: RunawayPolicy) -> None:
    world = World(runaway=policy)
    world.settler.availability.accepts_without_store = world.store.away = True
    reply = await call(world, conversation(*"a" * 8))
    assert (reply.status, warnings(reply)) == (200, {"loop": 8})
    world.store.away = False
    await world.settler.aclose()
    assert "not refused, because the store is unavailable" in world.record.notes["runaway"]


async def test_a_clock_that_cannot_be_stored_stops_no_call() -> None:
    world = World(runaway=CLOCK)
    world.store.fails_updates = True
    reply = await call(world, conversation("a"))
    assert reply.status == 200
    assert world.record.notes["runaway_state"] == "not stored: the store is unavailable"


@pytest.mark.parametrize("policy", [POLICY, CLOCK])
async def test_a_call_of_the_gateway_itself_is_not_checked(policy: RunawayPolicy) -> None:
    world = World(runaway=policy)
    reply = await call(world, conversation(*"a" * 8), purpose=Purpose("summary", derived=False, notes={}))
    assert (reply.status, reply.request.warnings) == (200, ())
    assert (await world.store.remembered(KEY)).state.works == {}


async def test_a_huge_conversation_is_read_in_a_thread() -> None:
    world = World(runaway=POLICY)
    reply = await call(world, conversation(*"abcabcabcabc", size=20_000))
    assert warnings(reply) == {"loop": 4, "no_progress": 9}


async def test_a_budget_with_response_modes_does_not_hide_a_loop() -> None:
    world = World(budget=BudgetPolicy(session=Limits(tokens=20_000)), runaway=POLICY)
    found = [warnings(await call(world, conversation(*"a" * number))).get("loop") for number in range(3, 6)]
    assert found == [None, 4, 5]


async def test_the_clock_of_a_step_is_that_of_its_work() -> None:
    agent = Agent("default", [Step("work", is_default=True, max_seconds=60)])
    policy = RunawayPolicy(warn_share=0.8, has_step_seconds=True)
    world = World(agents={"default": agent}, runaway=policy)
    await call(world, conversation("a"))
    [(name, work)] = (await world.store.remembered(KEY)).state.works.items()
    assert (work.step, work.since == work.step_since) == ("work", True)
    await world.store.update(KEY, lambda state: state.with_work(name, replace(work, step_since=work.step_since - 50)))
    assert warnings(await call(world, conversation(*"ab"))) == {"step_seconds": 50}
    await call(world, conversation(*"abc"))
    assert [(one.found.kind, one.found.action) for one in world.recorder.alerts] == [("step_seconds", "warn")]
