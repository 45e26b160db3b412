from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway import config
from gateway.call.types import PlanRequest
from gateway.context.caches import ContextCaches
from gateway.context.planner import Planner, PlannerThreads
from gateway.core.context_budget import ContextOptions, ContextPolicy
from gateway.core.counting.cache import CountCache
from gateway.core.counting.estimate import Estimate, Estimator
from gateway.core.counting.measure import TokenCounter, Wire
from gateway.core.counting.prefix_cache import PrefixCache
from gateway.core.counting.request import read_request
from gateway.core.plan import Plan
from gateway.core.record import ContextRecord
from gateway.core.routing import ModelFacts, Route
from gateway.core.session import Remembered, SessionState
from gateway.core.trimming.overflow import TextTooLong
from gateway.core.trimming.policy import TrimPolicy
from gateway.core.trimming.recall import Recall
from gateway.dialects.base import Call
from gateway.dialects.contents import Contents, contents_of
from gateway.dialects.fields import read_fields
from gateway.stores.learner import Learner
from gateway.stores.memory import MemoryStore
from tests.support.threads import CountedThreads
from tests.support.timing import count_loop_turns, eventually

FAMILIES = config.families()
FIELDS = {"chat": "messages", "messages": "messages", "responses": "input"}
#: a message that is long enough to be cached
LONG = {"role": "system", "content": "long " * 1000}


class Letters:
    """A counter with its own rule, which records how often it is called."""

    def __init__(self, name: str) -> None:
        self.name = f"letters:{name}"
        self._divisor = len(name)
        self.asked = 0

    def count(self, text: str) -> int:
        self.asked += 1
        return len(text) // self._divisor + 1


class World:
    """A planner with caches, and its counters."""

    def __init__(
        self,
        policy: ContextPolicy | None = None,
        threads: PlannerThreads | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        memory: ContextCaches | None = None,
    ) -> None:
        #: what all count with; empty: what the model has
        self.tokenizer = ""
        self.memory = memory or ContextCaches()
        self.counters: dict[str, Letters] = {}
        self.token_counts = CountedThreads(2)
        threads = threads or PlannerThreads()
        threads.counts = self.token_counts
        self.planner = Planner(
            Estimator(FAMILIES, self.counter, self.memory.counts),
            lambda _: 32_768,
            Learner(MemoryStore()),
            policy or ContextPolicy(),
            clock=clock,
            memory=self.memory,
            threads=threads,
            translated=frozenset({"translated"}),
        )

    def counter(self, name: str) -> TokenCounter:
        name = self.tokenizer or name
        return self.counters.setdefault(name, Letters(name))

    @property
    def asked(self) -> int:
        return sum(counter.asked for counter in self.counters.values())

    def contents(self, body: bytes, wire: Wire = "chat", *, known: PrefixCache | None = None) -> Contents:
        call = Call("chat", "m", stream=False, body=body, fields=read_fields(body))
        contents = contents_of(call, wire, known if known is not None else self.planner.prefixes)
        assert contents is not None
        return contents

    async def estimate(self, body: bytes, wire: Wire = "chat", model: str = "gpt-4o", tokenizer: str = "") -> Estimate:
        contents = self.contents(body, wire)
        asked = PlanRequest(
            contents, Route("p", model), ModelFacts(tokenizer=tokenizer or None), ContextOptions(), len(body)
        )
        counted_tokens, *_ = await self.planner.count_tokens(asked, Remembered())
        return counted_tokens.estimate


def cold(body: bytes, wire: Wire, model: str, tokenizer: str) -> Estimate:
    """Return the estimate without caches, from the decoded body."""
    estimator = Estimator(FAMILIES, Letters, CountCache(0))
    return estimator.estimate(read_request(wire, json.loads(body), model=model, provider="p", tokenizer=tokenizer))


def body_of(messages: Sequence[Any], field: str = "messages", **more: Any) -> bytes:
    return json.dumps({"model": "m", **more, field: messages}).encode()


# --- token counts do not depend on caches ---------------------------------------------------------------------------

MARK: dict[str, Any] = {"cache_control": {"type": "ephemeral"}}
TEXT = st.text(max_size=20)
PART: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [
        {"type": "text", "text": "some words"},
        {"type": "thinking", "thinking": "let me see", "signature": "s"},
        {"type": "redacted_thinking", "data": "x" * 60},
        {"type": "image_url", "image_url": {"url": "https://a/b.png"}},
        {"type": "image_url", "image_url": {"url": "https://a/b.png", "detail": "high"}},
        {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "QUJD" * 90}},
        {"type": "what", "is": ["this"]},
        {"type": "tool_use", "id": "a", "name": "look", "input": {"q": 1}},
        {"type": "tool_result", "tool_use_id": "a", "content": "found"},
        {"type": "tool_result", "tool_use_id": "b", "content": [{"type": "text", "text": "found"}]},
    ]
)
CONTENT = TEXT | st.lists(PART | PART.map(lambda part: part | MARK), max_size=3)
MESSAGE = st.one_of(
    st.builds(lambda role, content: {"role": role, "content": content}, st.sampled_from(["user", "system"]), CONTENT),
    st.builds(lambda content: {"role": "user", "content": content, **MARK}, TEXT),
    st.builds(lambda content, thought: {"role": "assistant", "content": content, "reasoning": thought}, CONTENT, TEXT),
    st.builds(
        lambda call, content: {"role": "tool", "tool_call_id": call, "content": content},
        st.sampled_from(["", "a", "b", "c"]),
        st.sampled_from(["found", "nothing", "more " * 9]) | CONTENT,
    ),
    st.sampled_from([{"type": "reasoning", "encrypted_content": "x" * 90}, {"type": "function_call", "name": "look"}]),
    st.sampled_from([{"type": "function_call_output", "call_id": "a", "output": "found"}, "text", 12, 1.5, None]),
)
MORE = st.lists(MESSAGE, min_size=1, max_size=4)
Change = Callable[[list[Any]], list[Any]]


def marked(messages: list[Any]) -> list[Any]:
    """Return the messages with cache marks on the last one only."""
    plain = [{k: v for k, v in m.items() if k != "cache_control"} if isinstance(m, dict) else m for m in messages]
    return [*plain[:-1], {**plain[-1], **MARK}] if plain and isinstance(plain[-1], dict) else plain


CHANGE: st.SearchStrategy[Change] = st.one_of(
    MORE.map(lambda more: lambda messages: messages + more),
    MORE.map(lambda more: lambda messages: marked(messages + more)),
    st.builds(lambda at, one: lambda old: [*old[:at], one, *old[at + 1 :]], st.integers(1, 8), MESSAGE),
    st.integers(1, 8).map(lambda size: lambda messages: messages[:size]),
    st.integers(1, 4).map(lambda at: lambda messages: [*messages[:at], *messages[at:][::-1]]),
    st.just(lambda messages: messages + messages[1:]),
    st.just(lambda messages: messages),
)
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Looks."}, "name": "look"}]
#: fields outside the messages
FIELD: list[tuple[str, Any]] = [
    ("system", "be kind"),
    ("system", [{"type": "tool_result", "tool_use_id": "a"}]),
    ("instructions", "be kind " * 90),
    ("tools", TOOLS),
    ("tools", TOOLS * 2),
    ("tool_choice", "required"),
    ("tool_choice", None),
    ("function_call", {"name": "look"}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "a", "schema": {"b": "c" * 600}}}),
    ("response_format", {"type": "json_object"}),
    ("text", {"format": {"name": "a", "schema": {"b": "c"}}}),
    ("thinking", {"type": "enabled"}),
    ("previous_response_id", "a"),
    ("previous_response_id", None),
    ("prompt_cache_key", "b"),
    ("prediction", "word " * 90),
    ("prediction", "other " * 90),
    ("metadata", {"a": "b"}),
]
#: model, tokenizer, format, other fields
KIND = st.tuples(
    st.sampled_from(["gpt-4o", "gpt-4", "claude-sonnet-4-5", "claude-3-7-sonnet", "gemini-2.5-pro", "deepseek-chat"]),
    st.sampled_from(["", "", "o200k_base", "cl100k"]),
    st.sampled_from(["chat", "chat", "messages", "responses"]),
    st.lists(st.sampled_from(FIELD), max_size=3).map(dict),
)
TURN = st.tuples(CHANGE, st.none() | KIND)


@settings(max_examples=150, deadline=None)
@given(st.lists(TURN, min_size=1, max_size=10), KIND)
def test_a_known_prefix_does_not_change_a_count(turns: list[tuple[Change, Any]], kind: Any) -> None:
    async def play() -> None:
        world, messages = World(), [LONG]
        for change, other in turns:
            messages = change(messages)[:40]
            model, tokenizer, wire, more = other or kind
            body = body_of(messages, FIELDS[wire], **more)
            assert await world.estimate(body, wire, model, tokenizer) == cold(body, wire, model, tokenizer)
        world.planner.close()

    asyncio.run(play())


@settings(max_examples=100, deadline=None)
@given(st.lists(CHANGE, min_size=1, max_size=8))
def test_a_known_prefix_does_not_change_the_messages(changes: list[Change]) -> None:
    async def play() -> None:
        world, messages = World(), [LONG]
        for change in changes:
            messages = change(messages)[:40]
            body = body_of(messages)
            warm, plain = world.contents(body), world.contents(body, known=PrefixCache(0))
            assert warm.messages == plain.messages == tuple(json.dumps(message).encode() for message in messages)
            if warm.new_messages:
                assert warm.text_before_last == plain.text_before_last
            await world.estimate(body)
        world.planner.close()

    asyncio.run(play())


# --- what a turn costs ------------------------------------------------------------------------------------------------


def turn(number: int) -> list[Any]:
    return [
        {"role": "assistant", "content": f"I do {number} next"},
        {"role": "tool", "tool_call_id": f"{number}", "content": f"result {number} " * 30},
    ]


@pytest.fixture
async def world() -> Any:
    made = World()
    yield made
    made.planner.close()


async def test_a_turn_counts_and_splits_only_new_messages(world: World) -> None:
    messages = [LONG, {"role": "user", "content": "go"}]
    for number in range(10):
        messages += turn(number)
        await world.estimate(body_of(messages))
    messages += turn(10)
    contents = world.contents(body_of(messages))
    assert [json.loads(raw) for raw in contents.new_messages] == [messages[-3], *turn(10)]
    before = world.asked
    await world.estimate(body_of(messages))
    assert world.asked - before == 2


async def test_a_client_may_change_the_last_message_from_turn_to_turn(world: World) -> None:
    messages: list[Any] = [LONG, {"role": "user", "content": "go"}]
    for number in range(3):
        messages += turn(number)
        body = body_of([*messages[:-1], {**messages[-1], "content": f"{messages[-1]['content']} (now: {number})"}])
        assert len(world.contents(body).new_messages) == (3 if number else 4)
        await world.estimate(body)


async def test_moving_cache_marks_keep_the_prefix_known(world: World) -> None:
    messages: list[Any] = [{**LONG, **MARK}, {"role": "user", "content": "go"}]
    for number in range(3):
        messages = marked(messages + turn(number))
        messages[0] = {**LONG, **MARK}
        contents = world.contents(body_of(messages))
        assert len(contents.new_messages) == (3 if number else 4)
        assert contents.messages == tuple(json.dumps(message).encode() for message in messages)
        await world.estimate(body_of(messages))


async def test_the_clients_marks_keep_the_prefix_known(world: World) -> None:
    messages: list[Any] = [LONG, {"role": "user", "content": "go", "x_gateway": {"priority": "pinned"}}]
    await world.estimate(body_of(messages))
    contents = world.contents(body_of(messages + turn(1)))
    assert (len(contents.new_messages), contents.pinned, contents.marked) == (3, frozenset({1}), True)
    assert b"x_gateway" not in b"".join(contents.messages or ())


async def test_a_clients_mark_after_a_known_prefix_is_applied(world: World) -> None:
    messages: list[Any] = [LONG, {"role": "user", "content": "go"}]
    await world.estimate(body_of(messages))
    contents = world.contents(body_of([*messages, {"role": "user", "content": "on", "x_gateway": {"priority": 3}}]))
    assert (contents.priorities, len(contents.messages or ())) == ({2: 3.0}, 3)


async def test_marks_that_one_format_ignores_are_applied_in_another(world: World) -> None:
    messages: list[Any] = [LONG, {"role": "user", "content": "go", "x_gateway": {"priority": 3}}]
    await world.estimate(body_of(messages), "messages")
    assert world.contents(body_of(messages), "chat").priorities == {1: 3.0}


@pytest.mark.parametrize(("characters", "handed"), [(1_000, 0), (100_000, 1)])
async def test_a_long_conversation_with_bound_thinking_is_read_in_a_thread(
    world: World, characters: int, handed: int
) -> None:
    block = {"type": "thinking", "thinking": "t" * characters, "signature": "s"}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": [block]}]
    contents = world.contents(json.dumps({"model": "m", "messages": messages}).encode(), "messages")
    conversation = await world.planner.bound(contents)
    assert conversation is not None
    assert (conversation.thinking, world.token_counts.handed) == ({1: 1}, handed)


async def test_a_large_request_with_few_new_bytes_is_counted_in_the_loop(world: World) -> None:
    messages: list[Any] = [LONG] * 20
    async with count_loop_turns() as turns:
        await world.estimate(body_of(messages))
        assert (before := turns()) > 1
        await world.estimate(body_of(messages + turn(1)))
        assert turns() == before
        # another way to count has no cached prefix
        await world.estimate(body_of(messages + turn(1)), tokenizer="cl100k")
        assert turns() > before


async def test_the_overhead_is_cached_once_for_all_turns(world: World) -> None:
    more: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}
    first = await world.estimate(body_of([LONG], **more, metadata={"turn": 1}, prompt_cache_key="a"))
    taken = world.memory.overhead.size_bytes
    again = await world.estimate(body_of([LONG], **more, metadata={"turn": 2}, prompt_cache_key="b"))
    assert (again, world.memory.overhead.size_bytes) == (first, taken)
    await world.estimate(body_of([LONG], **{**more, "tools": TOOLS * 2}))
    assert world.memory.overhead.size_bytes > taken > 0


async def test_a_request_with_known_tools_is_counted_in_the_loop(world: World) -> None:
    tools = TOOLS * 1_000
    for more, handed in ((tools, 1), (tools, 1), ([*tools, *TOOLS], 2)):
        await world.estimate(body_of([LONG], tools=more))
        assert world.token_counts.handed == handed


async def test_another_tokenizer_counts_the_overhead_again() -> None:
    """As after a reload that sets another tokenizer for the model."""
    body, memory = body_of([LONG], tools=TOOLS), ContextCaches()
    for name in ("a", "another", "a"):
        warm, cold = World(memory=memory), World()
        warm.tokenizer = cold.tokenizer = name
        assert await warm.estimate(body) == await cold.estimate(body)
        warm.planner.close()
        cold.planner.close()


async def test_a_large_body_is_parsed_in_a_thread(world: World) -> None:
    for words, handed in ((10, 0), (200_000, 1)):
        body = body_of([{"role": "user", "content": "word " * words}])
        call = Call("chat", "m", stream=False, body=body, fields=read_fields(body))
        assert await world.planner.contents(call, "chat") == world.contents(body)
        assert world.token_counts.handed == handed


# --- the plan does not depend on caches -----------------------------------------------------------------------------


def _said(turn: int) -> list[dict[str, Any]]:
    """Return a tool call and its result; every seventh turn has a user message, and some messages have cache marks."""
    asked = [{"role": "user", "content": f"Which code has town {turn % 5}, and is PLZ{turn - 9} right?"}]
    call = {"id": f"c{turn}", "type": "function", "function": {"name": "look", "arguments": f'{{"town": {turn % 5}}}'}}
    rows = [{"town": n % 5, "code": f"PLZ{turn * 10 + n}", "note": "some words " * 9} for n in range(4)]
    result: dict[str, Any] = {"role": "tool", "tool_call_id": f"c{turn}", "content": json.dumps(rows)}
    text = f"Town {turn % 5} it is, code PLZ{turn} I think, as hotel{turn}.example says. " * 2
    said = {"role": "assistant", "content": text, "tool_calls": [call]}
    return [*(asked if turn % 7 == 0 else []), said, result | (MARK if turn % 11 == 5 else {})]


@pytest.mark.parametrize("recall", ["off", "said", "all"])
async def test_a_fresh_gateway_sends_the_same_as_one_that_knows_the_session(recall: Recall) -> None:
    policy = ContextPolicy(fit=TrimPolicy(recall=recall))

    async def planned(world: World, body: bytes, state: SessionState) -> Plan:
        contents = world.contents(body)
        asked = PlanRequest(contents, Route("p", "gpt-4o"), ModelFacts(), ContextOptions(budget=4000), len(body))
        return await world.planner.plan(asked, Remembered(state))

    warm, state = World(policy), SessionState()
    messages: list[dict[str, Any]] = [LONG, {"role": "user", "content": "Find the codes of all towns."}]
    cuts = resumed = recalled = 0
    for turn in range(60):
        messages += _said(turn)
        if turn == 40:
            messages[-6:] = []  # the client goes back, and on in another way
        body = body_of(messages)
        cold = World(policy)
        first, second = await planned(warm, body, state), await planned(cold, body, state)
        cold.planner.close()
        assert first == second
        cuts, resumed = cuts + (first.trim_decision is not None), resumed + (first.messages is not None)
        recalled += first.context.trimmed.get("recall", 0)
        if first.trim_decision is not None:
            state = state.with_trim_decision(first.trim_decision, instead_of=first.resumed)
    warm.planner.close()
    assert cuts
    assert resumed > cuts // 2
    assert (recalled > 0) == (recall != "off")


# --- waiting for other trims ----------------------------------------------------------------------------------------


class Clock:
    """A clock that shows the time it is set to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("waited_s", "rule"), [(0.0, "condense"), (4.9, "condense"), (6.1, "drop")])
async def test_waiting_for_a_thread_does_not_shorten_the_deadline_at_first(waited_s: float, rule: str) -> None:
    clock, threads, fitting, go_on = Clock(), PlannerThreads(), CountedThreads(1), threading.Event()
    threads.trimming = fitting
    world = World(ContextPolicy(fit=TrimPolicy(recall="off"), deadline_s=1.0), threads, clock=clock)
    others = fitting.submit(go_on.wait, 30)
    pages = ("".join(f"Hotel A{page}0{line} has {line * 7}{page} rooms.\n" for line in range(9)) for page in range(40))
    body = body_of([{"role": "user", "content": page} for page in pages])
    asked = PlanRequest(world.contents(body), Route("p", "gpt-4o"), ModelFacts(), ContextOptions(budget=700), len(body))
    plan = asyncio.create_task(world.planner.plan(asked, Remembered()))
    await eventually(lambda: fitting.handed == 2)
    clock.now += waited_s
    go_on.set()
    assert (await plan).context.trimmed.keys() >= {rule}
    assert ("condense" in (await plan).context.trimmed) is (rule == "condense")
    assert others.result()
    world.planner.close()


# --- values that tools use ------------------------------------------------------------------------------------------

CALL = {"name": "profile", "arguments": "{}"}
NOTES = {f"note{number}": f"nothing that A{number}1 would ask for, and B{number}2 neither" for number in range(40)}
PROFILE = json.dumps(
    {
        **NOTES,
        "kept": "it is card_4421, which has been with her for as long as she can think back",
        **{f"more_{name}": NOTES[name] for name in NOTES},
    }
)
PAY = {"name": "pay", "description": "With a card, such as card_78.", "parameters": {"type": "object"}}


@pytest.mark.parametrize(
    ("wire", "messages", "tools"),
    [
        (
            "chat",
            [
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "c", "type": "function", "function": CALL}],
                },
                {"role": "tool", "tool_call_id": "c", "content": PROFILE},
            ],
            [{"type": "function", "function": PAY}],
        ),
        (
            "responses",
            [
                {"type": "function_call", "call_id": "c", **CALL},
                {"type": "function_call_output", "call_id": "c", "output": PROFILE},
            ],
            [{"type": "function", **PAY}],
        ),
    ],
)
@pytest.mark.parametrize("is_told", [True, False])
async def test_values_that_later_tool_calls_use_stay_in_a_result(
    wire: Wire, messages: list[Any], tools: list[Any], *, is_told: bool
) -> None:
    world = World(ContextPolicy(fit=TrimPolicy(recall="off")))
    said = [{"role": "user", "content": "Hi"}, *messages, {"role": "user", "content": "Go on."}]
    body = body_of(
        said, FIELDS[wire], tools=tools if is_told else json.loads(json.dumps(tools).replace("card_78", "one"))
    )
    asked = PlanRequest(
        world.contents(body, wire), Route("p", "gpt-4o"), ModelFacts(), ContextOptions(budget=260), len(body)
    )
    plan = await world.planner.plan(asked, Remembered())
    assert plan.messages is not None
    assert (b"card_4421" in b"".join(plan.messages)) is is_told
    world.planner.close()


# --- requests of one text -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("wire", "field"), [("responses", "input"), ("completions", "prompt")])
@pytest.mark.parametrize(
    ("policy", "options", "is_refused"),
    [
        (ContextPolicy(), ContextOptions(budget=400), True),
        (ContextPolicy(), ContextOptions(budget=40_000), False),
        (ContextPolicy(), ContextOptions("off", 400), False),
        (ContextPolicy(), ContextOptions("shadow", 400), False),
        (ContextPolicy(overflow="forward"), ContextOptions(budget=400), False),
        (ContextPolicy(overflow="least"), ContextOptions(budget=400), False),
    ],
)
async def test_a_request_of_one_text_is_sent_unchanged_or_refused(
    wire: Wire, field: str, policy: ContextPolicy, options: ContextOptions, *, is_refused: bool
) -> None:
    world = World(policy)
    contents = world.contents(json.dumps({"model": "m", field: "a sea of words " * 500}).encode(), wire)
    plan = await world.planner.plan(PlanRequest(contents, Route("p", "m"), ModelFacts(), options, 7_500), Remembered())
    assert (plan.messages, plan.trim_decision) == (None, None)
    assert isinstance(plan.overflow, TextTooLong) is is_refused
    assert plan.overflow is None or plan.overflow.param == field
    world.planner.close()


# --- tokens that a provider bills in addition -----------------------------------------------------------------------


class Billed(World):
    """A session whose provider bills `always` tokens more than estimated, and `each` more per tool call."""

    def __init__(self, always: int, each: int) -> None:
        super().__init__()
        self.always, self.each = always, each
        self.remembered = Remembered()

    async def turn(self, messages: list[Any], budget: int) -> tuple[ContextRecord, int]:
        """Return the expected and the billed tokens of the request."""
        body = body_of(messages, tools=[{"type": "function", "function": {"name": "look", "parameters": {}}}])
        options = ContextOptions(budget=budget)
        asked = PlanRequest(self.contents(body), Route("p", "gpt-4o"), ModelFacts(), options, len(body))
        plan = await self.planner.plan(asked, self.remembered)
        sent = [json.loads(raw) for raw in plan.messages] if plan.messages is not None else messages
        calls = sum(len(message.get("tool_calls", ())) for message in sent)
        billed = plan.context.estimate + self.always + self.each * calls
        state = self.remembered.state
        self.remembered = Remembered(
            state.with_trim_decision(plan.trim_decision, instead_of=plan.resumed)
            if plan.trim_decision is not None
            else state,
            plan.context.reported(billed),
        )
        return plan.context, billed


def _called(number: int) -> list[Any]:
    call = {"id": f"c{number}", "type": "function", "function": {"name": "look", "arguments": f'{{"n": {number}}}'}}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"c{number}", "content": "\n".join(f"row {number}.{i} holds {i * number}" for i in range(60))},
    ]  # fmt: skip


@pytest.mark.parametrize(("always", "each"), [(0, 0), (0, 30), (1_000, 30), (300, -20), (300, 60)])
async def test_the_tokens_of_a_trimmed_request_match_the_bill_and_fill_the_budget(always: int, each: int) -> None:
    world, budget = Billed(always, each), 3_500
    messages: list[Any] = [{"role": "system", "content": "Look."}, {"role": "user", "content": "What holds most?"}]
    cuts = 0
    for number in range(60):
        before = world.remembered.last_turn
        context, billed = await world.turn(messages, budget)
        messages += _called(number)
        if number > 8:
            assert abs(context.tokens - billed) <= 0.01 * billed
            assert billed <= budget
        if before is not None and (context.frames or 0) < (before.frames or 0):
            cuts += 1
            assert billed > 0.6 * budget, "a cut goes no deeper than it should"
    assert cuts > 0
    world.planner.close()


# --- formats and models that restrict a trim ------------------------------------------------------------------------

_WORDS = "some words of it that say a thing " * 6


@pytest.mark.parametrize(
    ("wire", "provider", "model", "takes_turns"),
    [
        ("chat", "p", "m", True),
        ("chat", "p", "gpt-4o", False),
        ("messages", "p", "m", False),
        ("messages", "translated", "m", True),
        ("messages", "translated", "gpt-4o", False),
    ],
)
async def test_roles_alternate_if_format_and_model_may_require_it(
    world: World, wire: Wire, provider: str, model: str, *, takes_turns: bool
) -> None:
    texts = [f"{_WORDS * (7 if n % 6 == 1 else 1)} {n}" for n in range(25)]
    messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
    body = body_of(messages, model=model)
    followed = set[tuple[str, str]]()
    for budget in range(500, 1000, 50):
        contents = world.contents(body, wire)
        asked = PlanRequest(contents, Route(provider, model), ModelFacts(), ContextOptions(budget=budget), len(body))
        plan = await world.planner.plan(asked, Remembered())
        assert plan.messages is not None
        followed.update(pairwise(json.loads(raw)["role"] for raw in plan.messages))
    assert all(one != next_one for one, next_one in followed) is takes_turns


async def test_a_tool_search_stays_while_calls_of_its_tool_stay(world: World) -> None:
    found = [{"type": "function", "name": "look", "defer_loading": True, "parameters": {}}]
    items: list[Any] = [
        {"role": "user", "content": "Look at it."},
        {"type": "tool_search_call", "call_id": "s", "execution": "client", "arguments": {}},
        {"type": "tool_search_output", "call_id": "s", "execution": "client", "tools": found},
    ]
    for number in range(12):
        items.append({"type": "function_call", "call_id": f"c{number}", "name": "look", "arguments": "{}"})
        items.append({"type": "function_call_output", "call_id": f"c{number}", "output": f"{_WORDS * 3} {number}"})
    body = body_of(items, "input")
    asked = PlanRequest(
        world.contents(body, "responses"), Route("p", "m"), ModelFacts(), ContextOptions(budget=900), len(body)
    )
    plan = await world.planner.plan(asked, Remembered())
    assert plan.messages is not None
    sent = [json.loads(raw) for raw in plan.messages]
    assert sent[:3] == items[:3]
    assert len(sent) < len(items)


async def test_messages_of_other_formats_count_like_chat_messages(world: World) -> None:
    items: list[Any] = [{"role": "user", "content": "Look at it."}]
    for number in range(12):
        items.append({"type": "function_call", "call_id": f"c{number}", "name": "look", "arguments": "{}"})
        items.append({"type": "function_call_output", "call_id": f"c{number}", "output": f"{_WORDS * 3} {number}"})
    body = body_of(items, "input")
    asked = PlanRequest(
        world.contents(body, "responses"), Route("p", "m"), ModelFacts(), ContextOptions(budget=900), len(body)
    )
    context = (await world.planner.plan(asked, Remembered())).context
    assert sum(fate.tokens_before for fate in context.message_fates) == pytest.approx(context.original_tokens, rel=0.02)


# --- errors when trimming is not enough -----------------------------------------------------------------------------

SEA = "a sea of words " * 500
SCHEMA = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object", "title": SEA}}}


@pytest.mark.parametrize(
    ("wire", "body", "param"),
    [
        ("messages", {"system": SEA, "messages": [{"role": "user", "content": "hi"}]}, "system"),
        ("responses", {"instructions": SEA, "input": [{"role": "user", "content": "hi"}]}, "instructions"),
        ("responses", {"instructions": SEA, "input": "hi"}, "instructions"),
        ("responses", {"input": "hi", "text": SCHEMA}, "text"),
        ("responses", {"input": SEA * 2, "instructions": SEA}, "input"),
        ("messages", {"system": "be brief", "messages": [{"role": "user", "content": SEA}]}, "messages[0]"),
        # The system text fits, but not together with the messages that must stay.
        ("messages", {"system": SEA[:4_000], "messages": [{"role": "user", "content": SEA[:2_400]}]}, "system"),
    ],
)
async def test_a_refusal_names_the_largest_part(wire: Wire, body: dict[str, Any], param: str) -> None:
    world = World(ContextPolicy())
    raw = json.dumps({"model": "m", **body}).encode()
    asked = PlanRequest(world.contents(raw, wire), Route("p", "m"), ModelFacts(), ContextOptions(budget=500), len(raw))
    plan = await world.planner.plan(asked, Remembered())
    assert plan.overflow is not None
    assert plan.overflow.param == param
    assert f"{param} " in plan.overflow.message
    world.planner.close()
