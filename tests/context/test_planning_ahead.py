from __future__ import annotations

import json
import threading
import time
from typing import Any, TypeVar

import pytest

from gateway import config
from gateway.call.types import PlanRequest
from gateway.context.planner import Planner
from gateway.core.context_budget import ContextOptions, ContextPolicy
from gateway.core.counting.cache import CountCache
from gateway.core.counting.estimate import Estimator
from gateway.core.counting.heuristic import CharacterCounter
from gateway.core.counting.measure import TokenCounter, Wire
from gateway.core.routing import ModelFacts, Route
from gateway.core.session import Remembered
from gateway.dialects.base import Call
from gateway.dialects.contents import contents_of
from gateway.dialects.fields import read_fields
from gateway.stores.learner import Learner
from gateway.stores.memory import MemoryStore
from tests.support.timing import eventually

P = TypeVar("P", bound=Planner)

MESSAGES = [{"role": "user", "content": f"Parcel {number} lies at depot {number * 7}."} for number in range(40)]


def planner_of(kind: type[P], counter: TokenCounter | None = None) -> P:
    estimator = Estimator(config.families(), lambda _: counter or CharacterCounter(), CountCache())
    learner = Learner(MemoryStore())
    return kind(estimator, lambda _: 32_768, learner, ContextPolicy(), clock=time.monotonic)


def asked(planner: Planner, **options: Any) -> PlanRequest:
    body = json.dumps({"model": "m", "messages": MESSAGES}).encode()
    contents = contents_of(
        Call("chat", "m", stream=False, body=body, fields=read_fields(body)), "chat", planner.prefixes
    )
    assert contents is not None
    return PlanRequest(contents, Route("p", "gpt-4o"), ModelFacts(), ContextOptions(**options), len(body))


def fitting_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("trimming")}


@pytest.mark.parametrize(
    ("share", "trim", "reads"), [(1.2, "auto", True), (1.9, "auto", True), (2.5, "auto", False), (1.2, "off", False)]
)
async def test_a_conversation_near_its_budget_is_read_ahead_in_a_thread(
    share: float, trim: Any, *, reads: bool
) -> None:
    planner = planner_of(Planner)
    counted, *_ = await planner.count_tokens(asked(planner), Remembered())
    before = fitting_threads()
    plan = await planner.plan(asked(planner, budget=int(counted.expected.tokens * share), trim=trim), Remembered())
    assert plan.messages is None
    assert bool(fitting_threads() - before) is reads
    planner.close()


class Blind(Planner):
    """A reader that fails."""

    looked = 0

    def _reader(self, original: Any) -> Any:
        reader = super()._reader(original)

        def outlines(keys: Any, messages: Any) -> Any:
            self.looked += 1
            raise RecursionError(f"{len(messages)} of {len(MESSAGES)} messages")

        reader.outlines = outlines  # type: ignore[method-assign]
        return reader


async def test_an_error_in_the_thread_is_logged_and_the_work_is_retried(caplog: pytest.LogCaptureFixture) -> None:
    planner = planner_of(Blind)
    counted, *_ = await planner.count_tokens(asked(planner), Remembered())
    for turn in (1, 2):
        await planner.plan(asked(planner, budget=int(counted.expected.tokens * 1.2)), Remembered())
        await eventually(lambda turn=turn: caplog.text.count("RecursionError: 16 of 40 messages") == turn)  # type: ignore[misc]
    assert planner.looked == 2
    planner.close()


async def test_a_call_that_is_planned_while_the_worker_stops_is_planned() -> None:
    planner = planner_of(Planner)
    counted, *_ = await planner.count_tokens(asked(planner), Remembered())
    planner.close()
    plan = await planner.plan(asked(planner, budget=int(counted.expected.tokens * 1.2)), Remembered())
    assert plan.overflow is None


async def test_nothing_is_read_ahead_without_a_budget() -> None:
    planner = planner_of(Planner)
    before = fitting_threads()
    await planner.plan(asked(planner), Remembered())
    assert fitting_threads() == before
    planner.close()


# --- in every format --------------------------------------------------------------------------------------------------


class Letters(CharacterCounter):
    """A counter of characters, which records how often it is called."""

    def __init__(self) -> None:
        self.asked = 0

    def count(self, text: str) -> int:
        self.asked += 1
        return super().count(text)


def turn_of(wire: Wire, number: int) -> list[dict[str, Any]]:
    """Return what an agent adds in a turn: a text, two tool calls, two results."""
    said, names = f"I look at depot {number * 31} next.", [f"c{number}a", f"c{number}b"]
    lines = "\n".join(f"Parcel {number}-{line} lies at depot {line * 7} in row {line}." for line in range(6))
    results = {name: f"{name}:\n{lines}" for name in names}
    if wire == "responses":
        return [
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": said}]},
            *({"type": "function_call", "call_id": name, "name": "find", "arguments": "{}"} for name in names),
            *({"type": "function_call_output", "call_id": name, "output": text} for name, text in results.items()),
        ]
    if wire == "messages":
        uses = [{"type": "tool_use", "id": name, "name": "find", "input": {}} for name in names]
        blocks = [{"type": "tool_result", "tool_use_id": name, "content": text} for name, text in results.items()]
        return [
            {"role": "assistant", "content": [{"type": "text", "text": said}, *uses]},
            {"role": "user", "content": blocks},
        ]
    calls = [{"id": name, "type": "function", "function": {"name": "find", "arguments": "{}"}} for name in names]
    return [
        {"role": "assistant", "content": said, "tool_calls": calls},
        *({"role": "tool", "tool_call_id": name, "content": text} for name, text in results.items()),
    ]


@pytest.mark.parametrize("wire", ["chat", "messages", "responses"])
async def test_all_messages_are_read_before_a_trim_which_is_the_same(wire: Wire) -> None:
    elements: list[dict[str, Any]] = [{"role": "user", "content": "Find the parcel of order 4711."}]
    sizes = list[int]()
    warm, cold = Letters(), Letters()
    planner, other = (planner_of(Planner, counter) for counter in (warm, cold))

    def now(planner: Planner, budget: int | None) -> PlanRequest:
        field = "input" if wire == "responses" else "messages"
        body = json.dumps({"model": "m", field: elements}).encode()
        contents = contents_of(
            Call("chat", "m", stream=False, body=body, fields=read_fields(body)), wire, planner.prefixes
        )
        assert contents is not None
        return PlanRequest(contents, Route("p", "gpt-4o"), ModelFacts(), ContextOptions(budget=budget), len(body))

    for number in range(40):
        elements += turn_of(wire, number)
        counted, *_ = await other.count_tokens(now(other, None), Remembered())
        sizes.append(counted.expected.tokens)
    budget, elements[1:] = sizes[-1] - 1, []
    for number in range(39):
        elements += turn_of(wire, number)
        plan = await planner.plan(now(planner, budget), Remembered())
        assert plan.messages is None
        await eventually(lambda: not planner._reading_ahead.locked())
    elements += turn_of(wire, 39)
    asked = now(planner, budget)
    await planner.count_tokens(asked, Remembered())
    before, cold_before = warm.asked, cold.asked
    plan, same = await planner.plan(asked, Remembered()), await other.plan(now(other, budget), Remembered())
    assert plan.messages is not None
    assert plan.messages == same.messages
    assert warm.asked - before < (cold.asked - cold_before) / 4
    planner.close()
    other.close()
