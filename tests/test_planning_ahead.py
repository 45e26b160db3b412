from __future__ import annotations

import json
import threading
import time
from typing import Any, TypeVar

import pytest

from gateway import config
from gateway.core.context_budget import ContextPolicy, Wishes
from gateway.core.counting.cache import CountCache
from gateway.core.counting.estimate import Estimator
from gateway.core.counting.heuristic import CharacterCounter
from gateway.core.routing import ModelFacts, Route
from gateway.core.session import Remembered
from gateway.dialects.base import Call
from gateway.dialects.contents import contents_of
from gateway.dialects.fields import read_fields
from gateway.planning import Asked, Planner
from gateway.stores.learner import Learner
from gateway.stores.memory import MemoryStore
from tests.support.timing import eventually

P = TypeVar("P", bound=Planner)

MESSAGES = [{"role": "user", "content": f"Parcel {number} lies at depot {number * 7}."} for number in range(40)]


def planner_of(kind: type[P]) -> P:
    estimator = Estimator(config.families(), lambda _: CharacterCounter(), CountCache())
    learner = Learner(MemoryStore())
    return kind(estimator, lambda _: True, learner, ContextPolicy(), deadline_s=60, clock=time.monotonic)


def asked(planner: Planner, **wishes: Any) -> Asked:
    body = json.dumps({"model": "m", "messages": MESSAGES}).encode()
    contents = contents_of(Call("chat", "m", stream=False, body=body, fields=read_fields(body)), "chat", planner.known)
    assert contents is not None
    return Asked(contents, Route("p", "gpt-4o"), ModelFacts(), Wishes(**wishes), len(body))


def fitting_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("fitting")}


@pytest.mark.parametrize(
    ("share", "trim", "reads"), [(1.2, "auto", True), (1.9, "auto", True), (2.5, "auto", False), (1.2, "off", False)]
)
async def test_near_its_budget_a_conversation_is_read_ahead_beside_the_loop(
    share: float, trim: Any, *, reads: bool
) -> None:
    planner = planner_of(Planner)
    weighed, *_ = await planner.weigh(asked(planner), Remembered())
    before = fitting_threads()
    plan = await planner.plan(asked(planner, budget=int(weighed.expected.tokens * share), trim=trim), Remembered())
    assert plan.messages is None
    assert bool(fitting_threads() - before) is reads
    planner.close()


class Blind(Planner):
    """Cannot read messages."""

    looked = 0

    def view(self, contents: Any, keys: Any = None) -> Any:
        self.looked += 1
        raise RecursionError(f"{len(contents.messages)} messages")


async def test_what_goes_wrong_beside_the_loop_is_logged_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    planner = planner_of(Blind)
    weighed, *_ = await planner.weigh(asked(planner), Remembered())
    for turn in (1, 2):
        await planner.plan(asked(planner, budget=int(weighed.expected.tokens * 1.2)), Remembered())
        await eventually(lambda turn=turn: caplog.text.count("RecursionError: 40 messages") == turn)  # type: ignore[misc]
    assert planner.looked == 2
    planner.close()


async def test_a_call_that_is_planned_while_the_worker_stops_is_planned() -> None:
    planner = planner_of(Planner)
    weighed, *_ = await planner.weigh(asked(planner), Remembered())
    planner.close()
    plan = await planner.plan(asked(planner, budget=int(weighed.expected.tokens * 1.2)), Remembered())
    assert plan.overflow is None


async def test_where_nobody_limits_it_nothing_is_read_ahead() -> None:
    planner = planner_of(Planner)
    before = fitting_threads()
    await planner.plan(asked(planner), Remembered())
    assert fitting_threads() == before
    planner.close()
