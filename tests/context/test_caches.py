from __future__ import annotations

import gc
import json
import time
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from gateway import config
from gateway.app.worker import Worker
from gateway.call.types import PlanRequest
from gateway.context.caches import ContextCaches
from gateway.context.planner import Planner
from gateway.core.context_budget import ContextOptions, ContextPolicy
from gateway.core.counting.estimate import Estimator
from gateway.core.counting.heuristic import CharacterCounter
from gateway.core.counting.measure import TokenCounter
from gateway.core.plan import Plan
from gateway.core.routing import ModelFacts, Route
from gateway.core.session import Remembered, SessionState
from gateway.dialects.base import Call
from gateway.dialects.contents import contents_of
from gateway.dialects.fields import read_fields
from gateway.stores.learner import Learner
from gateway.stores.memory import MemoryStore

Messages = list[dict[str, Any]]


class Noted(CharacterCounter):
    """A counter that records what it counts."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def count(self, text: str) -> int:
        self.asked.append(text)
        return super().count(text)


def planner_of(memory: ContextCaches, counter: TokenCounter) -> Planner:
    estimator = Estimator(config.families(), lambda _: counter, memory.counts)
    learner = Learner(MemoryStore())
    return Planner(estimator, lambda _: 32_768, learner, ContextPolicy(), clock=time.monotonic, memory=memory)


def conversation(number: int, turns: int = 30) -> Messages:
    return [{"role": "user", "content": f"Parcel {number}-{turn}: depot {turn * 7}. " * 9} for turn in range(turns)]


async def planned(
    planner: Planner,
    messages: Sequence[dict[str, Any]],
    budget: int,
    *,
    model: str = "gpt-4o",
    state: SessionState | None = None,
    schema: dict[str, Any] | None = None,
    more: dict[str, Any] | None = None,
) -> Plan:
    form = {} if schema is None else {"response_format": {"json_schema": {"name": "a", "schema": schema}}}
    body = json.dumps({"model": "m", "messages": messages, **form, **(more or {})}, ensure_ascii=False).encode()
    call = Call("chat", "m", stream=False, body=body, fields=read_fields(body))
    contents = contents_of(call, "chat", planner.prefixes)
    assert contents is not None
    asked = PlanRequest(contents, Route("p", model), ModelFacts(), ContextOptions(budget=budget), len(body))
    return await planner.plan(asked, Remembered(state or SessionState()))


async def plan(planner: Planner, messages: Sequence[dict[str, Any]], budget: int) -> int:
    """Return the tokens of the plan."""
    return (await planned(planner, messages, budget)).context.tokens


@pytest.mark.parametrize("budget", [100_000, 1_000])
async def test_planners_share_their_caches(budget: int) -> None:
    memory, counter = ContextCaches(), Noted()
    first, second, stranger = (planner_of(one, counter) for one in (memory, memory, ContextCaches()))
    messages = conversation(1)
    sent = await plan(first, messages, budget)
    counter.asked.clear()
    assert await plan(second, messages, budget) == sent
    assert counter.asked == []
    assert await plan(stranger, messages, budget) == sent
    assert len(counter.asked) >= len(messages)
    for planner in (first, second, stranger):
        planner.close()


async def test_all_caches_together_stay_below_the_limit() -> None:
    limit = 2 * 2**20
    memory = ContextCaches(limit)
    planner = planner_of(memory, CharacterCounter())
    most = 0
    for number in range(60):
        await plan(planner, conversation(number), 1_000)
        most = max(most, memory.size_bytes)
    assert limit / 2 < most <= limit
    planner.close()


def _asked(call_id: str, name: str = "look") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": "{}"}}


LONG = "x" * 20_000
HOSTILE: dict[str, Callable[[str], Messages]] = {
    "ids": lambda mark: [
        {"role": "assistant", "content": None, "tool_calls": [_asked(LONG + mark)]},
        {"role": "tool", "tool_call_id": LONG + mark, "content": "ok " * 30},
    ],
    "ids of broken calls": lambda mark: [
        {"role": "assistant", "content": "", "tool_calls": [{"id": LONG + mark, "function": {"arguments": "{"}}]},
    ],
    "names": lambda mark: [{"role": "assistant", "content": None, "tool_calls": [_asked(mark, LONG + mark)]}],
    "roles": lambda mark: [{"role": LONG + mark, "content": "ok"}],
    "images": lambda mark: [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://a/b", "detail": LONG + mark}}]}
    ],
    "words": lambda mark: [{"role": "assistant", "content": LONG + mark, "thinking_blocks": [1]}],
}


@pytest.mark.parametrize("kind", HOSTILE)
async def test_long_names_stay_below_the_cache_limit(kind: str) -> None:
    limit = 2**20
    memory = ContextCaches(limit)
    planner = planner_of(memory, CharacterCounter())
    await plan(planner, conversation(0), 1_000)
    tracemalloc.start()
    for number in range(24):
        said = [message for place in range(8) for message in HOSTILE[kind](f"{number}.{place}")]
        messages = [{"role": "user", "content": "Look."}, *said, {"role": "user", "content": "And now?"}]
        await planned(planner, messages, 30_000)
        await planned(planner, messages, 100)
    planner.close()
    gc.collect()
    took, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert took < 2 * limit


async def test_models_with_different_image_rules_have_separate_token_counts() -> None:
    image = {"type": "image_url", "image_url": {"url": "https://a/b.png"}}
    messages = conversation(1, 10)
    messages[1:1] = [{"role": "user", "content": [{"type": "text", "text": "This is it."}, image]}]
    memory = ContextCaches()
    warm, cold = (planner_of(one, CharacterCounter()) for one in (memory, ContextCaches()))
    await planned(warm, messages, 900)
    assert await planned(warm, messages, 900, model="gpt-4o-mini") == await planned(
        cold, messages, 900, model="gpt-4o-mini"
    )
    for planner in (warm, cold):
        planner.close()


async def test_a_reload_keeps_the_caches() -> None:
    settings = config.Settings.model_validate({"store": {"url": "memory://"}, "context": {"memory_mb": 16}})
    worker = Worker(MemoryStore(), settings, lambda: config.Loaded(settings, None, {}))
    lasting, messages = worker.lasting, conversation(1)
    first, second = lasting.planner(settings), lasting.planner(settings)
    await plan(first, messages, 100_000)
    body = json.dumps({"model": "m", "messages": messages}).encode()
    found = second.prefixes.find("chat", body[body.index(b"[") :])
    assert found is not None
    assert len(found.keys) == len(messages) - 1
    await worker.aclose()


async def test_the_overhead_cache_stays_below_the_limit() -> None:
    """A schema is cached decoded, which takes many times its bytes. Each request has another one."""
    memory = ContextCaches(32 * 2**20)
    planner = planner_of(memory, CharacterCounter())
    await planned(planner, conversation(0, 1), 1_000, schema={})
    tracemalloc.start()
    for number in range(200):
        await planned(
            planner, conversation(0, 1), 1_000, schema={f"{number}.{place}": {"a": 1} for place in range(200)}
        )
    planner.close()
    gc.collect()
    took, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 2**19 < memory.overhead.size_bytes <= 2**20
    assert took < 2**21


async def test_unknown_field_names_count_toward_the_cache_size() -> None:
    """They are part of the key and may be long. One emoji makes every character take four bytes in memory."""
    memory = ContextCaches(32 * 2**20)
    planner = planner_of(memory, CharacterCounter())
    await planned(planner, conversation(0, 1), 100_000)
    tracemalloc.start()
    for number in range(100):
        await planned(planner, conversation(0, 1), 100_000, more={f"{number}\U0001f4e6" + "x" * 50_000: 1})
    planner.close()
    gc.collect()
    took, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert memory.overhead.size_bytes <= 2**20
    assert took < 3 * 2**20
