"""Test the properties of every view with generated agent conversations in each format."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.conversation.message import Hashed, all_without_cache_marks, decode, encode, keys_of
from gateway.core.conversation.units import Conversation
from gateway.core.counting.cache import CountCache
from gateway.core.counting.measure import Wire
from gateway.core.trimming.overflow import ContextOverflow
from gateway.core.trimming.policy import TrimPolicy
from gateway.core.trimming.reader import Reader, counter_of
from gateway.core.trimming.report import TrimmedConversation
from gateway.core.trimming.strategies import Condense, Dedupe, Drop, Shorten
from gateway.core.trimming.trim_conversation import trim_conversation
from gateway.core.views import View, new_faults, view_of
from gateway.core.views.view import loaders

law = settings(max_examples=60, deadline=None)

Json = dict[str, Any]
T = TypeVar("T")
#: steps of a conversation: words of the user, or calls with their results
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
WEIGH = counter_of(lambda text: len(text) // 4 + 1)
POLICIES = [
    TrimPolicy(),
    TrimPolicy(recall="said"),
    TrimPolicy(strategies=[Drop()]),
    TrimPolicy(strategies=[Dedupe(), Shorten(60), Drop()]),
    TrimPolicy(strategies=[Condense()]),
]


class CountingBook(CountCache):
    """Count the elements that are parsed."""

    read = 0

    def get_many(
        self,
        kind: str,
        keys: Sequence[Hashable],
        compute: Callable[[Sequence[int]], Iterable[T]],
        size: Callable[[T], int] | None = None,
    ) -> list[T]:
        def counted(missing: Sequence[int]) -> Iterable[T]:
            self.read += len(missing)
            return compute(missing)

        return super().get_many(kind, keys, counted, size)


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
    """Return Anthropic messages: results in one user message, sometimes followed by words; thinking; cache marks."""
    return instructed(thoughtful(served(spoken(made, chance), chance), chance), chance)


def spoken(made: Sequence[Step], chance: random.Random) -> list[Json]:
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
                blocks: list[Json] = [{"type": "text", "text": said[0][:200], "citations": None}]
                if chance.random() < 0.2:
                    blocks.insert(0, {"type": "compaction", "content": f"All was well until {number}."})
                found.append({"role": "assistant", "content": blocks})
            continue
        ids = [f"toolu_{number}_{place}" for place in range(len(said))]
        given_to = {"q": said[0]} if chance.random() < 0.3 else {"q": 1.10}
        blocks = [{"type": "tool_use", "id": one, "name": "search", "input": given_to} for one in ids]
        if chance.random() < 0.5:
            blocks.insert(0, {"type": "text", "text": f"I look at {number}."})
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


def served(elements: Sequence[Json], chance: random.Random) -> list[Json]:
    """Add some calls to server tools; their results follow directly or in later messages."""
    found: list[Json] = []
    share, waiting = chance.choice([0.0, 0.0, 0.3]), ""
    last = len(elements) - 1
    for number, element in enumerate(elements):
        is_said = element["role"] == "assistant"
        if waiting and (is_said or number == last or chance.random() < 0.3):
            result = {"type": "code_execution_tool_result", "tool_use_id": waiting, "content": {"stdout": "x"}}
            if is_said:
                element["content"].insert(0, result)
            elif found[-1]["role"] == "user":
                found.append({"role": "assistant", "content": [result]})
            else:
                asked = next(place for place, one in enumerate(found[-1]["content"]) if one.get("id") == waiting)
                found[-1]["content"].insert(asked + 1, result)
            waiting = ""
        if is_said and number < last and chance.random() < share:
            waiting = f"srvtoolu_{number}"
            blocks, asks = element["content"], {"type": "server_tool_use", "id": waiting, "name": "run", "input": {}}
            calls = [block for block in blocks if block["type"] == "tool_use"]
            for call in calls:
                call.update(chance.choice([{}, {"caller": {"type": "code_execution_20250825", "tool_id": waiting}}]))
            blocks.insert(len(blocks) - len(calls), asks)
        found.append(element)
    return found


def thoughtful(elements: list[Json], chance: random.Random) -> list[Json]:
    """Add some thinking; in some conversations each turn starts with it."""
    share, is_first, turns = chance.choice([0.0, 0.1, 0.4]), False, chance.random() < 0.6
    for element in elements:
        content = element["content"]
        if element["role"] == "user":
            is_first = is_first or isinstance(content, str) or any(one["type"] == "text" for one in content)
            continue
        if (turns and is_first) or chance.random() < share:
            content.insert(0, {"type": "thinking", "thinking": "hm", "signature": "c2lnbmVk"})
        is_first = False
    return elements


def instructed(elements: Sequence[Json], chance: random.Random) -> list[Json]:
    """Add some system messages at allowed positions."""
    found: list[Json] = []
    share = chance.choice([0.0, 0.2, 0.6])
    for number, (element, behind) in enumerate(zip(elements, [*elements[1:], None], strict=True)):
        found.append(element)
        may_stand = element["role"] == "user" and (behind is None or behind["role"] == "assistant")
        if may_stand and chance.random() < share:
            note = {"type": chance.choice(["text", "text", "tool_removal"]), "text": f"Note {number}."}
            found.append({"role": "system", "content": chance.choice([note["text"], [note]])})
    return found


def as_responses(made: Sequence[Step], chance: random.Random) -> list[Json]:
    """Return OpenAI items: reasoning before calls, results in any order after them or directly after each call."""
    found: list[Json] = []
    for number, (kind, said) in enumerate(made):
        if kind == "user":
            content = chance.choice([said[0], [{"type": "input_text", "text": said[0]}]])
            found.append({"role": "user", "content": content})
            if chance.random() < 0.5:
                part = {"type": "output_text", "text": said[0][:200], "annotations": []}
                found += before(number, chance)
                found.append({"type": "message", "role": "assistant", "id": f"msg_{number}", "content": [part]})
            continue
        found += before(number, chance)
        if chance.random() < 0.3:
            found.append({"role": "assistant", "content": f"I look at {number}."})
        calls, results = [], []
        for place, text in enumerate(said):
            one = f"call_{number}_{place}"
            call = chance.choice(["function_call", "custom_tool_call"])
            asked = text if chance.random() < 0.3 else "q"
            given_to = {"arguments": json.dumps({"q": asked})} if call == "function_call" else {"input": asked}
            calls.append({"type": call, "call_id": one, "name": "search", **given_to})
            output = chance.choice([text, [{"type": "input_text", "text": text}]])
            results.append({"type": f"{call}_output", "call_id": one, "output": output})
        if chance.random() < 0.3 and found[-1].get("type") not in ("reasoning", "item_reference"):
            found += [item for pair in zip(calls, results, strict=True) for item in pair]
        else:
            chance.shuffle(results)
            found += calls + results
    return marked(phased(found, chance), chance)


def phased(items: list[Json], chance: random.Random) -> list[Json]:
    """Add a phase to all assistant messages in some conversations."""
    if chance.random() < 0.5:
        return items
    said = [item for item in items if item.get("role") == "assistant"]
    for item in said:
        item["phase"] = "final_answer" if "id" in item else "commentary"
    return items


def marked(items: list[Json], chance: random.Random) -> list[Json]:
    """Add some explicit prompt cache marks, to parts of items that have an ID."""
    for number, item in enumerate(items):
        content = item.get("content")
        if isinstance(content, list) and chance.random() < 0.3:
            content[-1]["prompt_cache_breakpoint"] = {"mode": "explicit", "ttl": "30m"}
            item["id"] = item.get("id", f"marked_{number}")
    return items


def before(number: int, chance: random.Random) -> list[Json]:
    """Return items before a text or call of the model: reasoning, complete or as a reference, a model item, a compaction."""
    thoughts = [reasoning(number), {"type": "item_reference", "id": f"rs_{number}"}]
    did = {"type": "item_reference", "id": f"ws_{number}"}
    compact = {"type": "compaction", "id": f"cmp_{number}", "encrypted_content": "Z2VoZWlt"}
    found = chance.choice([[], [], thoughts[:1], thoughts[1:], thoughts[1:], [thoughts[1], did]])
    return [compact, *found] if chance.random() < 0.1 else found


def reasoning(number: int) -> Json:
    return {"type": "reasoning", "id": f"rs_{number}", "summary": [], "encrypted_content": "Z2VoZWlt"}


Render = Callable[[Sequence[Step], random.Random], list[Json]]
FORMATS: list[tuple[Wire, Render]] = [("messages", as_messages), ("responses", as_responses)]
formats = pytest.mark.parametrize(("wire", "render"), FORMATS, ids=["messages", "responses"])


def elements_of(wire: Wire, render: Render, made: Sequence[Step], seed: int) -> list[bytes]:
    elements = [encode(element) for element in render(made, random.Random(seed))]
    assert new_faults(wire, [], elements) == [], "the test itself writes what no provider takes"
    return elements


def fitted(view: View, share: float, policy: TrimPolicy) -> TrimmedConversation | None:
    conversation = Conversation.of(
        view.messages,
        pinned=view.marks.held,
        leading=view.marks.undroppable,
        following=view.marks.following,
        priorities=dict.fromkeys(view.marks.stale, 0.0),
    )
    try:
        return trim_conversation(conversation, int(sum(WEIGH(view.messages)) * share), Reader(WEIGH), policy=policy)
    except ContextOverflow:
        return None


@formats
@law
@given(made=steps(), seed=st.integers(0, 99))
def test_unchanged_elements_keep_their_bytes(wire: Wire, render: Render, made: list[Step], seed: int) -> None:
    elements = elements_of(wire, render, made, seed)
    view = view_of(wire, elements)
    assert view.restored({}).raws == tuple(elements)
    assert view.with_messages(view.messages) == tuple(elements)
    assert all(view.messages_of_elements), "each element is told of in some message"


@formats
@law
@given(made=steps(), seed=st.integers(0, 99), more=st.integers(0, 3))
def test_cached_elements_give_the_same_view(wire: Wire, render: Render, made: list[Step], seed: int, more: int) -> None:
    elements, book = elements_of(wire, render, made, seed), CountingBook()
    view_of(wire, elements[: len(elements) - more], book)
    book.read = 0
    again, fresh = view_of(wire, elements, book), view_of(wire, elements)
    assert (again.messages, again.places, again.marks.held, again.marks.undroppable) == (
        fresh.messages,
        fresh.places,
        fresh.marks.held,
        fresh.marks.undroppable,
    )
    assert again.marks.stale == fresh.marks.stale
    assert again.chat.keys == keys_of(fresh.messages)
    assert again.chat.marked == Hashed(fresh.messages).marked
    assert book.read <= 2 * more, "elements, and messages that are made of several"


@formats
@law
@given(made=steps(), seed=st.integers(0, 99), more=st.integers(0, 3), taken=st.lists(choices, min_size=1, max_size=3))
def test_cached_changes_give_the_same_elements(
    wire: Wire, render: Render, made: list[Step], *, seed: int, more: int, taken: list[tuple[float, TrimPolicy]]
) -> None:
    elements, book = elements_of(wire, render, made, seed), CountingBook()
    bare = all_without_cache_marks(elements)
    # Clients move their cache marks from turn to turn.
    for seen in (elements[: len(elements) - more], bare, elements):
        for share, policy in taken:
            view = view_of(wire, Hashed(seen, keys_of(seen), unmarked=len(seen) if seen is bare else 0), book)
            done = fitted(view, share, policy)
            if done is None:
                continue
            fresh = view_of(wire, seen).restored(done.changes, done.replaced).raws
            sent = view.restored(done.changes, done.replaced)
            assert sent.raws == fresh
            assert sent.keys == keys_of(fresh)
            faults = new_faults(wire, seen, fresh)
            assert new_faults(wire, seen, fresh, book) == faults
            broken = fresh[1:] if seed % 2 else fresh[: len(fresh) // 2]
            assert new_faults(wire, seen, broken, book) == new_faults(wire, seen, broken)
            book.read = 0
            assert view_of(wire, seen, book).restored(done.changes, done.replaced).raws == fresh
            assert new_faults(wire, seen, fresh, book) == faults
            assert book.read == 0


def without_phase(raw: bytes) -> bytes:
    """Return a new message (one without an ID) without its phase, or any other element unchanged."""
    item = decode(raw)
    if not isinstance(item, dict) or "phase" not in item or "id" in item:
        return raw
    return encode({name: value for name, value in item.items() if name != "phase"})


@formats
@law
@given(made=steps(), seed=st.integers(0, 99), choice=choices)
def test_trimmed_request_is_accepted_by_the_provider(
    wire: Wire, render: Render, made: list[Step], seed: int, choice: tuple[float, TrimPolicy]
) -> None:
    elements, (share, policy) = elements_of(wire, render, made, seed), choice
    view = view_of(wire, elements)
    done = fitted(view, share, policy)
    if done is None:
        return
    sent = view.restored(done.changes, done.replaced).raws
    assert new_faults(wire, elements, sent) == []
    assert len(sent) <= len(elements)
    assert signed(sent) <= signed(elements), "what is signed or sealed stays as it was"
    assert notes(sent) == notes(elements), "what the operator said stays"
    assert compactions(sent)[-1:] == compactions(elements)[-1:], "what stands for all before it stays"
    # A new message may get a phase on the way back. Providers bill no tokens for that name.
    assert sum(WEIGH(view_of(wire, [*map(without_phase, sent)]).messages)) <= done.tokens, "what was chosen is sent"
    fates = view.fates(done.outcomes)
    assert len(fates) == len(elements)
    assert sum(fate.tokens_before for fate in fates) == sum(fate.tokens_before for fate in done.outcomes)
    assert sum(fate.tokens_after for fate in fates) == sum(fate.tokens_after for fate in done.outcomes)


@law
@given(made=steps(), seed=st.integers(0, 99), choice=choices)
def test_sent_items_keep_phases_cache_marks_and_compactions(
    made: list[Step], seed: int, choice: tuple[float, TrimPolicy]
) -> None:
    elements, (share, policy) = elements_of("responses", as_responses, made, seed), choice
    found = view_of("responses", elements)
    done = fitted(found, share, policy)
    sent = found.restored(done.changes, done.replaced).raws if done is not None else tuple(elements)
    check_items(elements, sent)
    check_items(elements, found.with_messages([short(raw) for raw in found.messages]))


@law
@given(made=steps(), seed=st.integers(0, 99))
def test_summary_has_a_phase_if_other_items_have(made: list[Step], seed: int) -> None:
    elements = elements_of("responses", as_responses, made, seed)
    found = view_of("responses", elements)
    units = Conversation.of(found.messages, pinned=found.marks.held, following=found.marks.following).units
    gone = next((unit for unit in units if unit.stop - unit.start > 1 and not (unit.pinned or unit.bound)), None)
    if gone is None:
        return
    changes: dict[int, bytes | None] = dict.fromkeys(gone.indices)
    changes[gone.start] = encode({"role": "assistant", "content": "[summary of old messages]\nall was well"})
    check_items(elements, found.restored(changes, {gone.start}).raws)


def check_items(original: Sequence[bytes], sent: Sequence[bytes]) -> None:
    """Check the fields that clients of the Responses API must send back."""
    before, after = ([json.loads(raw) for raw in raws] for raws in (original, sent))
    phases = [item.get("phase") for item in before if item.get("role") == "assistant"]
    if phases and all(phases):
        assert all(item.get("phase") for item in after if item.get("role") == "assistant")
    known = {item["id"]: (item.get("phase"), marks(item)) for item in before if "id" in item and "role" in item}
    assert all((item.get("phase"), marks(item)) == known[item["id"]] for item in after if item.get("id") in known)
    sealed = [raw for raw, item in zip(original, before, strict=True) if item.get("type") == "compaction"]
    kept = [raw for raw, item in zip(sent, after, strict=True) if item.get("type") == "compaction"]
    assert set(kept) <= set(sealed)
    assert kept[-1:] == sealed[-1:]


def marks(item: Json) -> list[Any]:
    return [part.get("prompt_cache_breakpoint") for part in parts(item)[1:]]


@formats
@law
@given(made=steps(), seed=st.integers(0, 99))
def test_dropped_unit_is_dropped_completely(wire: Wire, render: Render, made: list[Step], seed: int) -> None:
    elements = elements_of(wire, render, made, seed)
    view = view_of(wire, elements)
    conversation = Conversation.of(
        view.messages, pinned=view.marks.held, leading=view.marks.undroppable, following=view.marks.following
    )
    for unit in conversation.units:
        if unit.start != conversation.task and not (unit.pinned or unit.bound):
            sent = view.restored(dict.fromkeys(unit.indices)).raws
            assert new_faults(wire, elements, sent) == []
            assert notes(sent) == notes(elements)


@formats
@law
@given(made=steps(), seed=st.integers(0, 99))
def test_summary_is_at_the_position_of_what_it_replaces(
    wire: Wire, render: Render, made: list[Step], seed: int
) -> None:
    elements = elements_of(wire, render, made, seed)
    view = view_of(wire, elements)
    conversation = Conversation.of(
        view.messages, pinned=view.marks.held, leading=view.marks.undroppable, following=view.marks.following
    )
    units = [unit for unit in conversation.units if unit.stop - unit.start > 1 and not (unit.pinned or unit.bound)]
    if not units:
        return
    gone: dict[int, bytes | None] = {index: None for unit in units for index in unit.indices}
    gone[units[0].start] = encode({"role": "assistant", "content": "[summary of old messages]\nall was well"})
    sent = view.restored(gone, {units[0].start}).raws
    assert new_faults(wire, elements, sent) == []
    place = next(place for place, raw in enumerate(sent) if b"[summary of old messages]" in raw)
    assert without_notes(sent[:place]) == without_notes(elements[: view.places[units[0].start][0]])
    assert notes(sent) == notes(elements)


@formats
@law
@given(made=steps(), seed=st.integers(0, 99))
def test_results_can_be_replaced(wire: Wire, render: Render, made: list[Step], seed: int) -> None:
    elements = elements_of(wire, render, made, seed)
    view = view_of(wire, elements)
    shown = [short(raw) for raw in view.messages]
    sent = view.with_messages(shown)
    assert new_faults(wire, elements, sent) == []
    assert sum(raw.count(b"in short") for raw in sent) == sum(raw.count(b"in short") for raw in shown)
    assert view_of(wire, sent).with_messages([short(raw) for raw in view_of(wire, sent).messages]) == sent


def short(raw: bytes) -> bytes:
    message = json.loads(raw)
    if message["role"] != "tool":
        return raw
    content = "in short" if isinstance(message["content"], str) else [{"type": "text", "text": "in short"}]
    return encode({**message, "content": content})


def signed(elements: Sequence[bytes]) -> set[bytes]:
    """Return everything that a provider verifies, unchanged from the request."""
    blocks = [element for raw in elements for element in parts(json.loads(raw))]
    return {encode(block) for block in blocks if block.get("type") in ("thinking", "reasoning")}


def notes(elements: Sequence[bytes]) -> list[str]:
    """Return the texts of system messages in the middle of the conversation."""
    found = [json.loads(raw) for raw in elements]
    return [
        part.get("text") or part["content"] for one in found if one.get("role") == "system" for part in texts_of(one)
    ]


def texts_of(element: Json) -> list[Json]:
    content = element["content"]
    return content if isinstance(content, list) else [element]


def without_notes(elements: Sequence[bytes]) -> list[bytes]:
    return [raw for raw in elements if json.loads(raw).get("role") != "system"]


def compactions(elements: Sequence[bytes]) -> list[Json]:
    blocks = [element for raw in elements for element in parts(json.loads(raw))]
    return [block for block in blocks if block.get("type") == "compaction"]


def parts(element: Json) -> list[Json]:
    content = element.get("content")
    return [element, *(content if isinstance(content, list) else [])]


@pytest.mark.parametrize(
    ("tools", "needed"),
    [
        ([("a", ""), ("", "a")], {0}),
        ([("a", ""), ("", "b")], set()),
        ([("", "a"), ("a", "")], set()),
        ([("a", "a")], set()),  # one message, which stays or goes
        ([("a", ""), ("a", ""), ("", "a")], {1}),
        ([("a", ""), ("", "a"), ("a", "")], {0}),
        ([("ab", ""), ("b", ""), ("", "b"), ("", "a")], {0, 1}),
    ],
)
def test_last_loader_of_a_tool_is_needed_by_its_last_call(tools: list[tuple[str, str]], needed: set[int]) -> None:
    assert {*loaders(tools)} == needed


def test_chat_messages_need_no_conversion() -> None:
    elements = [encode({"role": "user", "content": "hello"}), encode({"role": "assistant", "content": "hi"})]
    view = view_of("chat", elements)
    assert view.messages == tuple(elements)
    assert view.restored({1: None}).raws == (elements[0],)
    assert view.restored({1: b"{}"}).raws == (elements[0], b"{}")
    assert view.array == "messages"
    assert view_of("responses", elements).array == "input"


def test_messages_of_elements_are_returned() -> None:
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


@pytest.mark.parametrize("odd", [[], {}, 3, None, ["text"]])
@pytest.mark.parametrize("wire", ["chat", "responses", "messages"])
def test_type_or_role_that_is_no_string_is_unknown(wire: Wire, odd: object) -> None:
    last = {"role": "user", "content": "x"}
    for element in (
        {"type": odd, "a": 1},
        {"role": odd, "content": "y"},
        {"role": "user", "content": [{"type": odd, "text": "y"}]},
        {"role": "assistant", "content": [{"type": odd, "text": "y"}]},
        {"type": "function_call_output", "call_id": "a", "output": [{"type": odd}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": odd}]}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": odd, "content": odd}]},
        {"type": "function_call", "call_id": odd, "name": odd, "arguments": odd},
    ):
        raws = [encode(element), encode(last)]
        view = view_of(wire, raws)
        assert view.with_messages(view.messages) == tuple(raws)
        assert new_faults(wire, raws, raws) == []


def thinking_run(result: str, *next_to_result: Json) -> list[bytes]:
    """Return an agent run of Claude that thought once; a reminder may be next to the first result."""
    thought = {"type": "thinking", "thinking": "First the test.", "signature": "c2ln"}
    uses = [{"type": "tool_use", "id": name, "name": "read", "input": {}} for name in "abc"]
    results = [
        {"type": "tool_result", "tool_use_id": name, "content": text}
        for name, text in zip("abc", (result, LONG, LONG), strict=True)
    ]
    elements: list[Json] = [
        {"role": "user", "content": "Fix the parser."},
        {"role": "assistant", "content": [thought, uses[0]]},
    ]
    elements.append({"role": "user", "content": [results[0], *next_to_result]})
    for use, told in zip(uses[1:], results[1:], strict=True):
        elements += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [told]}]
    return [encode(element) for element in elements]


LONG = "\n".join(f"row {number}: y = lex(char_{number})" for number in range(60))
REMINDER: Json = {"type": "text", "text": "<system-reminder>Keep your list up to date.</system-reminder>"}


@pytest.mark.parametrize("overhead", [(), (REMINDER,)])
def test_first_result_is_shortened_and_thinking_stays_if_the_turn_thought_once(overhead: tuple[Json, ...]) -> None:
    elements = thinking_run("\n".join(f"line {number}: x = parse(token_{number})" for number in range(300)), *overhead)
    view = view_of("messages", elements)
    done = fitted(view, 0.5, TrimPolicy())
    assert done is not None
    sent = view.restored(done.changes, done.replaced).raws
    assert sent[1] == elements[1]
    assert new_faults("messages", elements, sent) == []
    assert len(sent[2]) < len(elements[2]) / 2


def test_unread_result_next_to_words_is_shortened_but_not_dropped() -> None:
    *elements, _, told = thinking_run("x")[:5]
    thought = {"type": "thinking", "thinking": LONG, "signature": "c2ln"}
    use = encode(
        {"role": "assistant", "content": [thought, {"type": "tool_use", "id": "b", "name": "read", "input": {}}]}
    )
    result = {**json.loads(told)["content"][0], "content": "It was so, and so it is. " * 400}
    last = encode({"role": "user", "content": [result, REMINDER]})
    view = view_of("messages", [*elements, use, last])
    found = [done for share in (0.03, 0.05, 0.1, 0.2, 0.3) if (done := fitted(view, share, TrimPolicy())) is not None]
    assert found
    for done in found:
        sent = view.restored(done.changes, done.replaced).raws
        assert sent[-2] == use
        assert json.loads(sent[-1])["content"][0]["tool_use_id"] == "b"
        assert len(sent[-1]) < len(last) / 2


def test_trim_never_makes_a_reminder_start_a_turn_with_thinking() -> None:
    elements = thinking_run("x", REMINDER)
    view = view_of("messages", elements)
    for share in (0.3, 0.5, 0.7, 0.9):
        done = fitted(view, share, TrimPolicy())
        sent = view.restored(done.changes, done.replaced).raws if done is not None else ()
        assert done is None or new_faults("messages", elements, sent) == []
        assert done is None or sent[1] == elements[1]


def reminded(calls: int) -> list[bytes]:
    """Return a run that thought once, with long arguments, and a reminder next to every third result."""
    elements: list[Json] = [{"role": "user", "content": "Fix the parser."}]
    for number in range(calls):
        text = "\n".join(f"def test_{number}_{n}(): assert parse({n}) == {n * 3}" for n in range(12))
        use: Json = {"type": "tool_use", "id": f"t{number}", "name": "write", "input": {"text": text}}
        thought = [{"type": "thinking", "thinking": "First the test.", "signature": "c2ln"}] if not number else []
        elements.append({"role": "assistant", "content": [*thought, use]})
        lines = "\n".join(f"line {number}-{n}: x = parse(token_{n})" for n in range(12))
        result = {"type": "tool_result", "tool_use_id": f"t{number}", "content": lines}
        elements.append({"role": "user", "content": [result, *([REMINDER] if number % 3 == 2 else [])]})
    return [encode(element) for element in elements]


@pytest.mark.parametrize(
    ("policy", "share", "applied"),
    [
        (TrimPolicy(), 0.6, "condense"),
        (TrimPolicy(recall="said"), 0.6, "condense"),
        (TrimPolicy(strategies=(Shorten(60),)), 0.9, "shorten"),
    ],
)
def test_reminders_next_to_results_do_not_cause_dropped_calls(policy: TrimPolicy, share: float, applied: str) -> None:
    elements = reminded(9)
    view = view_of("messages", elements)
    assert view.marks.following, "words that go with results"
    done = fitted(view, share, policy)
    assert done is not None
    assert done.applied == (applied,)
    assert new_faults("messages", elements, view.restored(done.changes, done.replaced).raws) == []
