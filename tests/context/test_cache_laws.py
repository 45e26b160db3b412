"""Caches do not change plans: a planner with filled caches plans like a new one.

Sessions of all formats are planned in turn, under several policies, for several models and with changing budgets. They
have common prefixes, continue differently, and are serialized differently.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest

from gateway import config
from gateway.call.types import PlanRequest
from gateway.context.caches import ContextCaches
from gateway.context.planner import Planner, PlannerThreads
from gateway.core.context_budget import ContextOptions, ContextPolicy
from gateway.core.counting.estimate import Estimator
from gateway.core.counting.measure import Wire
from gateway.core.plan import Plan
from gateway.core.routing import ModelFacts, Route
from gateway.core.session import Remembered, SessionState
from gateway.core.trimming.policy import TrimPolicy
from gateway.core.trimming.strategies import strategies_of
from gateway.dialects.base import Call
from gateway.dialects.contents import contents_of
from gateway.dialects.fields import read_fields
from gateway.steps.last_user_message import NewestMessages
from gateway.stores.learner import Learner
from gateway.stores.memory import MemoryStore

pytestmark = pytest.mark.long

Json = dict[str, Any]

FAMILIES = config.families()
ITEMS = {"chat": "messages", "messages": "messages", "responses": "input"}
MODELS = ("gpt-4o", "gpt-4o-mini", "claude-sonnet-4-5", "mistral-large", "gemini-2.5-pro", "deepseek-chat")
POLICIES = (
    ContextPolicy(fit=TrimPolicy(recall="said"), deadline_s=600),
    ContextPolicy(fit=TrimPolicy(recall="all"), keep_last_turns=2, overflow="least", deadline_s=600),
    ContextPolicy(
        fit=TrimPolicy(strategies=strategies_of(["dedupe", "shorten", "drop"], shorten_tokens=40)), deadline_s=600
    ),
    ContextPolicy(fit=TrimPolicy(recall="said"), trim="shadow", deadline_s=600),
)
WORDS = ("Parcel", "parcel", "Order", "depot", "Berlin", "berlin", "Müller", "配送", "Retry", "the", "was", "sent by")
MARK: Json = {"cache_control": {"type": "ephemeral"}}
#: JSON that changes the bytes of a message but not its meaning
ODD = (
    '"cache_control":{"type":"a"},"cache_control":{"type":"b"},',
    '"cache_control":{"cache_control":{"a":1}},',
    '"cache_control":{"a":1e999},',
    '"thinking_blocks":{"cache_control":{}},',
    '"role":"user",',
)


class Letters:
    """A counter with its own rule."""

    def __init__(self, name: str) -> None:
        self.name = f"letters:{name}"
        self._divisor = 2 + len(name) % 3

    def count(self, text: str) -> int:
        return len(text) // self._divisor + 1


class Asks(NamedTuple):
    """One call to plan."""

    body: bytes
    wire: Wire
    policy: int
    model: str
    tokenizer: str
    budget: int
    state: SessionState


class Side:
    """Planners with several policies that share their caches."""

    def __init__(self, memory: ContextCaches, learner: Learner, threads: PlannerThreads) -> None:
        estimator = Estimator(FAMILIES, Letters, memory.counts)
        self._newest = NewestMessages()
        self._planners = [
            Planner(
                estimator, lambda _: 32_768, learner, policy, clock=time.monotonic,
                memory=memory, threads=threads,
            )
            for policy in POLICIES
        ]  # fmt: skip

    async def plan(self, asks: Asks) -> tuple[Plan, object]:
        """Return the plan and the counts of the request."""
        planner = self._planners[asks.policy]
        call = Call("chat", "m", stream=False, body=asks.body, fields=read_fields(asks.body))
        contents = contents_of(call, asks.wire, planner.prefixes)
        assert contents is not None
        facts, options = ModelFacts(tokenizer=asks.tokenizer), ContextOptions(budget=asks.budget)
        asked = PlanRequest(contents, Route("p", asks.model), facts, options, len(asks.body))
        plan = await planner.plan(asked, Remembered(asks.state))
        return plan, (contents.messages, contents.pinned, contents.priorities, self._newest.of(contents))


def told(plan: Plan) -> object:
    """Return all fields, with errors as text."""
    return (
        plan.messages,
        plan.trim_decision,
        plan.resumed,
        plan.context,
        plan.safe_tokens,
        plan.overhead,
        str(plan.overflow),
    )


class Session:
    """A conversation, and how its client serializes it."""

    def __init__(self, chance: random.Random, wire: Wire) -> None:
        self.wire, self._chance, self._calls = wire, chance, 0
        self.model, self.state = chance.choice(MODELS), SessionState()
        self.elements: list[Json | str] = [self._words("user", 20)]
        if wire != "messages":
            self.elements.insert(0, self._words("system", 12))

    def fork(self) -> Session:
        """Return a copy with all or the first of its messages, and perhaps its decisions."""
        other, chance = Session(self._chance, self.wire), self._chance
        other.model, other._calls = chance.choice([self.model, chance.choice(MODELS)]), self._calls
        other.elements = self.elements[: chance.randrange(1, 2 * len(self.elements))]
        other.state = chance.choice([self.state, SessionState()])
        return other

    def go_on(self) -> None:
        """Add a turn, or change the last message or an earlier one."""
        chance, elements = self._chance, self.elements
        kind = chance.random()
        if kind < 0.1 and len(elements) > 3:
            del elements[chance.randrange(2, len(elements)) :]
        elif kind < 0.2:
            place = chance.randrange(len(elements))
            raw = json.dumps(elements[place]) if isinstance(elements[place], dict) else elements[place]
            elements[place] = "{" + chance.choice(ODD) + str(raw)[1:]
        for _ in range(chance.choice([1, 2, 4])):
            elements += self._step()
        elements.append(self._words("user", chance.choice([4, 30])))

    def body(self) -> bytes:
        """Return the request; sometimes a message has other bytes, a cache mark or a lower priority."""
        chance, last = self._chance, len(self.elements) - 1
        raws = list[str]()
        for place, element in enumerate(self.elements):
            raw = element if isinstance(element, str) else json.dumps(self._form(element, is_last=place == last))
            if chance.random() < 0.01:
                raw = (
                    f'{{"x_gateway":{{"priority":{chance.choice(["0", "3", chr(34) + "pinned" + chr(34)])}}},{raw[1:]}'
                )
            raws.append(raw)
        array = chance.choice([",", ",", ", "]).join(raws)
        return f'{{"model":"m","{ITEMS[self.wire]}":[{array}]}}'.encode()

    def _form(self, element: Json, *, is_last: bool) -> Json:
        chance, content = self._chance, element.get("content")
        if isinstance(content, str) and self.wire != "responses" and (is_last or chance.random() < 0.04):
            marks = MARK if chance.random() < 0.5 else {}
            return {**element, "content": [{"type": "text", "text": content, **marks}]}
        if element.get("tool_calls") and chance.random() < 0.04:
            return {**element, "tool_calls": [call | MARK for call in element["tool_calls"]]}
        return dict(reversed(element.items())) if chance.random() < 0.02 else element

    def _text(self, count: int) -> str:
        chance = self._chance
        return " ".join(chance.choice([*WORDS, f"ID-{chance.randrange(50)}", "sent.\n"]) for _ in range(count))

    def _words(self, role: str, count: int) -> Json:
        return {"role": role, "content": self._text(count)}

    def _step(self) -> list[Json]:
        """Return a tool call with its result, an image, or a text."""
        chance, kind = self._chance, self._chance.random()
        if kind < 0.1:
            return [self._picture(), self._words("assistant", 9)]
        if kind < 0.3:
            return [self._words("assistant", 30), self._words("user", 9)]
        if kind < 0.34:
            return [self._words("assistant", 0), self._words("user", 9)]
        self._calls += 1
        name, rows = f"call_{self._calls}", [{"id": chance.randrange(60), "is": self._text(4)} for _ in range(9)]
        result = chance.choice([json.dumps(rows), self._text(60), "\n\n".join(["All parcels are late. " * 9] * 2)])
        return list(_CALLS[self.wire](name, self._text(5), result))

    def _picture(self) -> Json:
        url = "https://a/b.png"
        part: Json = {"type": "image_url", "image_url": {"url": url}}
        if self.wire != "chat":
            part = {"type": "image", "source": {"type": "url", "url": url}}
        if self.wire == "responses":
            part = {"type": "input_image", "image_url": url}
        return {"role": "user", "content": [part]}


def _chat(name: str, said: str, result: str) -> Iterator[Json]:
    function = {"name": "find", "arguments": json.dumps({"q": said})}
    calls = [{"id": name, "type": "function", "function": function}]
    yield {"role": "assistant", "content": said, "tool_calls": calls}
    yield {"role": "tool", "tool_call_id": name, "content": result}


def _messages(name: str, said: str, result: str) -> Iterator[Json]:
    yield {"role": "assistant", "content": [{"type": "tool_use", "id": name, "name": "find", "input": {"q": said}}]}
    yield {"role": "user", "content": [{"type": "tool_result", "tool_use_id": name, "content": result}]}


def _responses(name: str, said: str, result: str) -> Iterator[Json]:
    yield {"type": "function_call", "call_id": name, "name": "find", "arguments": json.dumps({"q": said})}
    yield {"type": "function_call_output", "call_id": name, "output": result}


_CALLS: dict[Wire, Callable[[str, str, str], Iterator[Json]]] = {
    "chat": _chat,
    "messages": _messages,
    "responses": _responses,
}


def _next(sessions: list[Session], chance: random.Random) -> Session:
    if not sessions or (len(sessions) < 8 and chance.random() < 0.3):
        wires: Sequence[Wire] = ("chat", "chat", "messages", "responses")
        is_new = not sessions or chance.random() < 0.3
        sessions.append(Session(chance, chance.choice(wires)) if is_new else chance.choice(sessions).fork())
    return chance.choice(sessions)


@pytest.mark.parametrize("seed", range(6))
async def test_cached_requests_do_not_change_a_plan(seed: int) -> None:
    chance, sessions, cuts = random.Random(seed), list[Session](), 0
    threads, learner = PlannerThreads(), Learner(MemoryStore())
    warm = [Side(ContextCaches(size), learner, threads) for size in (2**14, 2**18, 2**28)]
    for _ in range(45):
        session = _next(sessions, chance)
        if chance.random() < 0.8:
            session.go_on()
        own, model, budget = (
            sessions.index(session) % len(POLICIES),
            session.model,
            chance.choice([400, 900, 900, 4_000]),
        )
        policy, model = chance.choice([own, own, chance.randrange(4)]), chance.choice([model, model, *MODELS[:2]])
        asks = Asks(session.body(), session.wire, policy, model, chance.choice("ab"), budget, session.state)
        plan, known = await Side(ContextCaches(), learner, threads).plan(asks)
        for side in warm:
            found, known_too = await side.plan(asks)
            assert told(found) == told(plan)
            assert known_too == known
        cuts += plan.messages is not None
        if plan.trim_decision is not None:
            session.state = session.state.with_trim_decision(plan.trim_decision, instead_of=plan.resumed)
    threads.close()
    assert cuts > 5
