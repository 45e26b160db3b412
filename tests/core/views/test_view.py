"""What holds of every view, for generated conversations of agents in each format."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.conversation import Conversation
from gateway.core.counting.cache import CountCache
from gateway.core.counting.measure import Wire
from gateway.core.fitting.epochs import FitPolicy, fit
from gateway.core.fitting.overflow import ContextOverflow
from gateway.core.fitting.reader import Reader, weigher
from gateway.core.fitting.receipt import Fitted
from gateway.core.fitting.strategies import Condense, Dedupe, Drop, Shorten
from gateway.core.message import encode
from gateway.core.views import View, new_faults, view_of

law = settings(max_examples=60, deadline=None)

Json = dict[str, Any]
#: what happens in a conversation: words of the user's, or calls with their results
Step = tuple[str, list[str]]
WORDS = [
    "order",
    "invoice",
    "refund",
    "flight",
    "JFK",
    "HAT204",
    "2024-05-17",
    "/src/main.py",
    "price",
    "1299.50",
    "cancelled",
    "注文番号",
    "the",
    "of",
    "and",
]
WEIGH = weigher(lambda text: len(text) // 4 + 1)
POLICIES = [
    FitPolicy(),
    FitPolicy(recall="said"),
    FitPolicy(strategies=[Drop()]),
    FitPolicy(strategies=[Dedupe(), Shorten(60), Drop()]),
    FitPolicy(strategies=[Condense()]),
]

texts = st.builds(
    lambda seed, lines: "\n".join(" ".join(random.Random(seed + n).choices(WORDS, k=12)) for n in range(lines)),
    st.integers(0, 40),
    st.integers(1, 12),
)
choices = st.tuples(st.floats(0.2, 0.95), st.sampled_from(POLICIES))


@st.composite
def steps(draw: st.DrawFn) -> list[Step]:
    kinds = st.sampled_from(["call", "call", "call", "user"])
    made = [("user", [draw(texts)])]
    for _ in range(draw(st.integers(3, 14))):
        kind = draw(kinds)
        made.append((kind, draw(st.lists(texts, min_size=1, max_size=3 if kind == "call" else 1))))
    return made


def as_messages(made: Sequence[Step], chance: random.Random) -> list[Json]:
    """Anthropic's: results in one user message, sometimes with words behind them; thinking; cache marks."""
    found: list[Json] = []
    for number, (kind, said) in enumerate(made):
        if kind == "user":
            block: Json = {"type": "text", "text": said[0]}
            if chance.random() < 0.3:
                block["cache_control"] = {"type": "ephemeral"}
            if found and found[-1]["role"] == "user" and isinstance(found[-1]["content"], list):
                found[-1]["content"].append(block)
            else:
                found.append({"role": "user", "content": chance.choice([said[0], [block]])})
            if chance.random() < 0.5:
                found.append(
                    {"role": "assistant", "content": [{"type": "text", "text": said[0][:200], "citations": None}]}
                )
            continue
        ids = [f"toolu_{number}_{place}" for place in range(len(said))]
        blocks: list[Json] = [{"type": "tool_use", "id": one, "name": "search", "input": {"q": one}} for one in ids]
        if chance.random() < 0.5:
            blocks.insert(0, {"type": "text", "text": f"I look at {number}."})
        if chance.random() < 0.4:
            blocks.insert(0, {"type": "thinking", "thinking": "hm", "signature": "c2lnbmVk"})
        found.append({"role": "assistant", "content": blocks})
        results = [
            {
                "type": "tool_result",
                "tool_use_id": one,
                "content": chance.choice([text, [{"type": "text", "text": text}]]),
            }
            for one, text in zip(ids, said, strict=True)
        ]
        chance.shuffle(results)
        found.append({"role": "user", "content": results})
    return found


def as_responses(made: Sequence[Step], chance: random.Random) -> list[Json]:
    """OpenAI's items: reasoning before calls, results in any order behind them, also call by call."""
    found: list[Json] = []
    for number, (kind, said) in enumerate(made):
        if kind == "user":
            content = chance.choice([said[0], [{"type": "input_text", "text": said[0]}]])
            found.append({"role": "user", "content": content})
            if chance.random() < 0.5:
                part = {"type": "output_text", "text": said[0][:200], "annotations": []}
                found += chance.choice([[], [reasoning(number)]])
                found.append({"type": "message", "role": "assistant", "id": f"msg_{number}", "content": [part]})
            continue
        found += chance.choice([[], [reasoning(number)]])
        if chance.random() < 0.3:
            found.append({"role": "assistant", "content": f"I look at {number}."})
        calls, results = [], []
        for place, text in enumerate(said):
            one = f"call_{number}_{place}"
            call = chance.choice(["function_call", "custom_tool_call"])
            given_to = {"arguments": '{"q": 1}'} if call == "function_call" else {"input": "q"}
            calls.append({"type": call, "call_id": one, "name": "search", **given_to})
            output = chance.choice([text, [{"type": "input_text", "text": text}]])
            results.append({"type": f"{call}_output", "call_id": one, "output": output})
        if chance.random() < 0.3 and found[-1].get("type") != "reasoning":
            found += [item for pair in zip(calls, results, strict=True) for item in pair]
        else:
            chance.shuffle(results)
            found += calls + results
    return found


def reasoning(number: int) -> Json:
    return {"type": "reasoning", "id": f"rs_{number}", "summary": [], "encrypted_content": "Z2VoZWlt"}


Render = Callable[[Sequence[Step], random.Random], list[Json]]
FORMATS: list[tuple[Wire, Render]] = [("messages", as_messages), ("responses", as_responses)]
formats = pytest.mark.parametrize(("wire", "render"), FORMATS, ids=["messages", "responses"])


def elements_of(wire: Wire, render: Render, made: Sequence[Step], seed: int) -> list[bytes]:
    elements = [encode(element) for element in render(made, random.Random(seed))]
    assert new_faults(wire, [], elements) == [], "the test itself writes what no provider takes"
    return elements


def fitted(view: View, share: float, policy: FitPolicy) -> Fitted | None:
    conversation = Conversation.of(view.messages, pinned=view.held)
    try:
        return fit(conversation, int(sum(WEIGH(view.messages)) * share), Reader(WEIGH), policy=policy)
    except ContextOverflow:
        return None


@formats
@law
@given(made=steps(), seed=st.integers(0, 99))
def test_what_nobody_changes_is_the_bytes_that_came(wire: Wire, render: Render, made: list[Step], seed: int) -> None:
    elements = elements_of(wire, render, made, seed)
    view = view_of(wire, elements)
    assert view.restored({}) == tuple(elements)
    assert view.shown(view.messages) == tuple(elements)
    assert all(view.owned), "each element is told of in some message"


@formats
@law
@given(made=steps(), seed=st.integers(0, 99), more=st.integers(0, 3))
def test_what_was_read_before_is_the_same_when_it_is_read_again(
    wire: Wire, render: Render, made: list[Step], seed: int, more: int
) -> None:
    elements, book = elements_of(wire, render, made, seed), CountCache()
    view_of(wire, elements[: len(elements) - more], book)
    again, fresh = view_of(wire, elements, book), view_of(wire, elements)
    assert (again.messages, again.places, again.held) == (fresh.messages, fresh.places, fresh.held)
    assert book.hits >= len(elements) - more


@formats
@law
@given(made=steps(), seed=st.integers(0, 99), choice=choices)
def test_what_is_chosen_is_a_request_that_the_provider_takes(
    wire: Wire, render: Render, made: list[Step], seed: int, choice: tuple[float, FitPolicy]
) -> None:
    elements, (share, policy) = elements_of(wire, render, made, seed), choice
    view = view_of(wire, elements)
    done = fitted(view, share, policy)
    if done is None:
        return
    sent = view.restored(done.changes, done.summaries)
    assert new_faults(wire, elements, sent) == []
    assert len(sent) <= len(elements)
    assert signed(sent) <= signed(elements), "what is signed or sealed stays as it was"
    fates = view.fates(done.fates)
    assert len(fates) == len(elements)
    assert sum(fate.tokens_before for fate in fates) == sum(fate.tokens_before for fate in done.fates)
    assert sum(fate.tokens_after for fate in fates) == sum(fate.tokens_after for fate in done.fates)


@formats
@law
@given(made=steps(), seed=st.integers(0, 99))
def test_a_unit_that_is_left_out_takes_all_of_it_along(wire: Wire, render: Render, made: list[Step], seed: int) -> None:
    elements = elements_of(wire, render, made, seed)
    view = view_of(wire, elements)
    conversation = Conversation.of(view.messages, pinned=view.held)
    for unit in conversation.units:
        if unit.start != conversation.task:
            sent = view.restored(dict.fromkeys(unit.indices))
            assert new_faults(wire, elements, sent) == []


@formats
@law
@given(made=steps(), seed=st.integers(0, 99))
def test_a_summary_stands_where_what_it_stands_for_stood(
    wire: Wire, render: Render, made: list[Step], seed: int
) -> None:
    elements = elements_of(wire, render, made, seed)
    view = view_of(wire, elements)
    units = [unit for unit in Conversation.of(view.messages, pinned=view.held).units if unit.stop - unit.start > 1][:-1]
    if not units:
        return
    gone: dict[int, bytes | None] = {index: None for unit in units for index in unit.indices}
    gone[units[0].start] = encode({"role": "assistant", "content": "[summary of old messages]\nall was well"})
    sent = view.restored(gone, {units[0].start})
    assert new_faults(wire, elements, sent) == []
    place = next(place for place, raw in enumerate(sent) if b"[summary of old messages]" in raw)
    assert sent[:place] == tuple(elements[: view.places[units[0].start][0]])


@formats
@law
@given(made=steps(), seed=st.integers(0, 99))
def test_results_can_be_shown_in_another_form(wire: Wire, render: Render, made: list[Step], seed: int) -> None:
    elements = elements_of(wire, render, made, seed)
    view = view_of(wire, elements)
    shown = [short(raw) for raw in view.messages]
    sent = view.shown(shown)
    assert new_faults(wire, elements, sent) == []
    assert sum(raw.count(b"in short") for raw in sent) == sum(raw.count(b"in short") for raw in shown)
    assert view_of(wire, sent).shown([short(raw) for raw in view_of(wire, sent).messages]) == sent


def short(raw: bytes) -> bytes:
    message = json.loads(raw)
    if message["role"] != "tool":
        return raw
    content = "in short" if isinstance(message["content"], str) else [{"type": "text", "text": "in short"}]
    return encode({**message, "content": content})


def signed(elements: Sequence[bytes]) -> set[bytes]:
    """Everything that a provider checks, as it stands in the request."""
    blocks = [element for raw in elements for element in parts(json.loads(raw))]
    return {encode(block) for block in blocks if block.get("type") in ("thinking", "reasoning", "tool_use")}


def parts(element: Json) -> list[Json]:
    content = element.get("content")
    return [element, *(content if isinstance(content, list) else [])]


def test_chat_messages_are_their_own_view() -> None:
    elements = [encode({"role": "user", "content": "hello"}), encode({"role": "assistant", "content": "hi"})]
    view = view_of("chat", elements)
    assert view.messages == tuple(elements)
    assert view.restored({1: None}) == (elements[0],)
    assert view.restored({1: b"{}"}) == (elements[0], b"{}")
    assert view.array == "messages"
    assert view_of("responses", elements).array == "input"


def test_the_messages_of_some_elements_are_known() -> None:
    results = [{"type": "tool_result", "tool_use_id": one, "content": one} for one in "ab"]
    calls = [{"type": "tool_use", "id": one, "name": "f", "input": {}} for one in "ab"]
    elements = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": calls},
        {"role": "user", "content": results},
    ]
    view = view_of("messages", [encode(element) for element in elements])
    assert view.indices({2}) == {2, 3}
    assert view.indices({0, 7}) == {0}
