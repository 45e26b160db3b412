"""Laws of trimming, tested with generated conversations of 4 to 24 steps and small budgets."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.conversation.message import decode, encode, keys_of
from gateway.core.conversation.units import Conversation
from gateway.core.trimming.overflow import ContextOverflow
from gateway.core.trimming.policy import TrimPolicy
from gateway.core.trimming.reader import Reader, counter_of
from gateway.core.trimming.report import TrimmedConversation
from gateway.core.trimming.strategies import Condense, Dedupe, Drop, Shorten, Summarize
from gateway.core.trimming.summary import Passage, SummaryNeeded
from gateway.core.trimming.text_blocks import GAP
from gateway.core.trimming.trim_conversation import trim_conversation
from gateway.core.trimming.trim_decision import TrimDecision
from gateway.core.trimming.validate import problems

pytestmark = pytest.mark.long

law = settings(max_examples=15, deadline=None)

Messages = list[dict[str, Any]]

WORDS = [
    "order",
    "invoice",
    "refund",
    "flight",
    "customer",
    "JFK",
    "HAT204",
    "2024-05-17",
    "/src/app/main.py",
    "user_4711",
    "price",
    "1299.50",
    "San",
    "Francisco",
    "cancelled",
    "pending",
    "注文番号",
    "航空券を予約しました",
    "kunde@example.com",
    "the",
    "of",
    "and",
    "with",
]


def _pool() -> tuple[list[str], list[str], list[str]]:
    """Return sentences, texts and JSON documents: drawing from a pool is quick and gives different texts."""
    chance = random.Random(4711)

    def sentence() -> str:
        return " ".join(chance.choices(WORDS, k=chance.randint(3, 40)))

    def document() -> str:
        rows = [
            {"id": chance.randint(1000, 99999), "name": chance.choice(WORDS), "note": sentence()}
            for _ in range(chance.randint(0, 20))
        ]
        value = {"status": chance.choice(WORDS), "items": rows, "nested": {"code": chance.choice(WORDS), "more": []}}
        return json.dumps(value, ensure_ascii=chance.random() < 0.5)

    texts = [".\n".join(sentence() for _ in range(chance.randint(1, 12))) for _ in range(30)]
    return [sentence() for _ in range(30)], [*texts, "", "x"], [*(document() for _ in range(30)), "{}", "[1, 2"]


SENTENCES, TEXTS, DOCUMENTS = _pool()
words = st.sampled_from(WORDS)
sentences = st.sampled_from(SENTENCES)
texts = st.sampled_from(TEXTS)
contents = st.sampled_from([*TEXTS, *DOCUMENTS])
parts = st.lists(texts.map(lambda text: {"type": "text", "text": text}), min_size=1, max_size=2)


@st.composite
def conversations(draw: st.DrawFn) -> Messages:
    messages: Messages = [{"role": "system", "content": draw(sentences)}, {"role": "user", "content": draw(texts)}]
    for step in range(draw(st.integers(4, 24))):
        kind = draw(st.sampled_from(["call", "call", "call", "parallel", "talk"]))
        if kind == "talk":
            messages.append({"role": "assistant", "content": draw(texts)})
            messages.append({"role": "user", "content": draw(st.one_of(sentences, parts))})
            continue
        ids = [f"call_{step}_{n}" for n in range(1 if kind == "call" else draw(st.integers(2, 3)))]
        arguments = st.one_of(words, texts).map(lambda text: json.dumps({"query": text, "limit": 5}))
        calls = [
            {"id": i, "type": "function", "function": {"name": "search", "arguments": draw(arguments)}} for i in ids
        ]
        messages.append({"role": "assistant", "content": draw(st.none() | sentences), "tool_calls": calls})
        messages.extend({"role": "tool", "tool_call_id": i, "content": draw(contents)} for i in ids)
    return messages


limits = st.integers(800, 4000)


def tokens(text: str) -> int:
    """Estimate tokens, close enough to a tokenizer and fast."""
    return len(text) // 4 + sum(ord(letter) > 0x2E80 for letter in text) + 1


WEIGH = counter_of(tokens)


def raws_of(messages: Messages) -> list[bytes]:
    return [encode(message) for message in messages]


def fitted(
    messages: Messages | Conversation,
    limit: int,
    trim_decision: TrimDecision | None = None,
    policy: TrimPolicy | None = None,
    summaries: Mapping[str, str] | None = None,
    *,
    reader: Reader | None = None,
) -> TrimmedConversation | None:
    conversation = messages if isinstance(messages, Conversation) else Conversation.of_messages(messages)
    try:
        return trim_conversation(
            conversation,
            limit,
            reader or Reader(WEIGH),
            trim_decision=trim_decision,
            policy=policy,
            summaries=summaries,
        )
    except ContextOverflow:
        return None


def total(raws: Sequence[bytes]) -> int:
    return sum(WEIGH(raws))


def wrong_with(messages: Messages | Conversation, done: TrimmedConversation, limit: int) -> list[str]:
    told = [(place, raw) for place, raw in enumerate(done.messages) if b"[summary of " in raw]
    before = messages if isinstance(messages, Conversation) else Conversation.of_messages(messages)
    return problems(before, Conversation.of(done.messages), total(done.messages), limit, *told)


POLICIES = [
    TrimPolicy(),
    TrimPolicy(recall="all"),
    TrimPolicy(recall="said", low_water=0.5),
    TrimPolicy(strategies=(Dedupe(), Shorten(), Drop())),
    TrimPolicy(strategies=(Drop(),)),
    TrimPolicy(strategies=(Condense(most_characters=2000),)),
    TrimPolicy(strategies=()),
    TrimPolicy(strategies=(Dedupe(), Summarize(200), Condense(), Drop())),
    TrimPolicy(strategies=(Summarize(200),)),
]


@pytest.mark.parametrize("policy", POLICIES, ids=range(len(POLICIES)))
@given(messages=conversations(), limit=limits)
@settings(law, max_examples=10)
def test_a_trim_fits_and_is_valid_or_raises(policy: TrimPolicy, messages: Messages, limit: int) -> None:
    done = fitted(messages, limit, policy=policy)
    if done is not None:
        assert total(done.messages) <= limit
        assert done.tokens == total(done.messages)
        assert wrong_with(messages, done, limit) == []


@given(messages=conversations(), limit=limits)
@law
def test_a_trim_raises_only_if_pinned_messages_are_too_large(messages: Messages, limit: int) -> None:
    conversation = Conversation.of_messages(messages)
    must = total([raw for item, raw in zip(conversation.items, conversation.messages, strict=True) if item.pinned])
    # The task stays too; it may be shortened to almost nothing, or be that short already.
    stub = min(total([encode({"role": "user", "content": "[...]"})]), total(conversation.messages[1:2]))
    assert (fitted(messages, limit) is None) == (must + (0 if conversation.items[1].pinned else stub) > limit)


@given(messages=conversations(), limit=limits, needed=st.sets(st.integers(1, 40), max_size=3))
@law
def test_needed_messages_stay_if_they_fit_and_cause_no_error(messages: Messages, limit: int, needed: set[int]) -> None:
    conversation = Conversation.of(raws_of(messages), needed=[index for index in needed if index < len(messages)])
    done = fitted(conversation, limit)
    assert (done is None) == (fitted(messages, limit) is None)
    if done is None:
        return
    assert wrong_with(conversation, done, limit) == []
    held = replace(conversation, pinned_by_client=conversation.needed)
    if fitted(held, limit) is not None:
        assert {held.keys[index] for index in held.needed} <= {*done.keys}


@given(messages=conversations(), limit=limits)
@law
def test_order_and_pinned_messages_are_kept(messages: Messages, limit: int) -> None:
    done = fitted(messages, limit)
    if done is not None:
        conversation = Conversation.of_messages(messages)
        assert done.keys == keys_of(done.messages)
        places = [done.keys.index(item.key) for item in conversation.items if item.pinned]
        assert places == sorted(places)
        ids = [message["tool_call_id"] for message in done.decoded() if message["role"] == "tool"]
        assert ids == [i for m in messages if (i := m.get("tool_call_id")) in set(ids)]


@given(messages=conversations(), limit=limits)
@law
def test_a_unit_is_never_split(messages: Messages, limit: int) -> None:
    done = fitted(messages, limit)
    if done is not None:
        sent = {i for m in done.decoded() for i in [m.get("tool_call_id")] if i}
        find_labelled = {call["id"] for m in done.decoded() for call in m.get("tool_calls", ())}
        assert sent == find_labelled
        for unit in Conversation.of_messages(messages).units:
            ids = {call["id"] for call in messages[unit.start].get("tool_calls", ())}
            assert ids <= sent or ids.isdisjoint(sent)


@given(messages=conversations(), limit=limits)
@law
def test_system_task_and_a_user_message_are_never_lost(messages: Messages, limit: int) -> None:
    done = fitted(messages, limit)
    if done is not None:
        assert done.messages[0] == encode(messages[0])
        task = done.decoded()[1]
        assert task["role"] == "user"
        first = str(task["content"]).split("[...]", maxsplit=1)[0].rstrip()
        assert str(messages[1]["content"]).startswith(first)


@given(messages=conversations())
@law
def test_a_conversation_that_fits_is_unchanged(messages: Messages) -> None:
    raws = raws_of(messages)
    done = trim_conversation(Conversation.of(raws), total(raws), Reader(WEIGH))
    assert not done.changed
    assert all(one is other for one, other in zip(done.messages, raws, strict=True))


@given(messages=conversations(), limit=limits)
@law
def test_trimming_twice_equals_trimming_once(messages: Messages, limit: int) -> None:
    done = fitted(messages, limit)
    if done is not None:
        again = fitted(done.decoded(), limit)
        assert again is not None
        assert again.messages == done.messages


@given(messages=conversations(), limit=limits, recall=st.sampled_from(["off", "said", "all"]))
@law
def test_the_same_turn_again_sends_the_same_bytes(messages: Messages, limit: int, recall: Any) -> None:
    policy = TrimPolicy(recall=recall)
    done = fitted(messages, limit, policy=policy)
    if done is not None and done.trim_decision is not None:
        kept = TrimDecision.from_json(json.loads(json.dumps(done.trim_decision.to_json())))
        assert kept == done.trim_decision
        again = fitted(json.loads(json.dumps(messages)), limit, kept, policy)
        assert again is not None
        assert again.messages == done.messages
        assert again.outcomes == done.outcomes
        assert again.applied == ()
        assert again.trim_decision is kept


@given(messages=conversations(), limit=limits, recall=st.sampled_from(["off", "all"]))
@law
def test_each_turn_is_valid_and_keeps_its_prefix_until_the_next_trim(
    messages: Messages, limit: int, recall: Any
) -> None:
    trim_decision: TrimDecision | None = None
    before: list[bytes] = []
    reader, policy = Reader(WEIGH), TrimPolicy(recall=recall)
    for stop in range(2, len(messages) + 1):
        if messages[stop - 1]["role"] == "assistant" or (stop < len(messages) and messages[stop]["role"] == "tool"):
            continue
        conversation = Conversation.of_messages(messages[:stop], reader)
        try:
            done = trim_conversation(conversation, limit, reader, trim_decision=trim_decision, policy=policy)
        except ContextOverflow:
            continue
        assert wrong_with(conversation, done, limit) == []
        assert done.tokens == total(done.messages)
        assert sum(fate.tokens_after for fate in done.outcomes) == done.tokens
        sent = list(done.messages)
        if done.trim_decision is not None and not done.applied:
            assert sent[: len(before)] == before
        before, trim_decision = sent, done.trim_decision


@given(
    messages=conversations(),
    limit=limits,
    noise=st.dictionaries(st.text(max_size=5), st.integers(), max_size=3),
    plan=st.text(st.sampled_from("kdcsm~=0123-,:;< "), max_size=30),
)
@settings(law, max_examples=10)
def test_any_stored_trim_decision_is_harmless(messages: Messages, limit: int, noise: Any, plan: str) -> None:
    reader = Reader(WEIGH)  # cached facts about messages do not belong to a decision
    conversation = Conversation.of_messages(messages, reader)
    plans = [
        "k1 c0-9000 =7 d1",
        "k1 c0-9 =2 d1",
        "d4",
        "k4 3<99:0",
        "k4 9<0:0",
        "k1 c0-90000000 k2",
        "k3",
        "k5",
        "~ m3",
        "k2 ~ k1",
        "k3 ~",
        "k1 m2 ~",
        plan,
    ]
    written = [{"v": 2, "prefix": conversation.prefix(4), "size": 4, "plan": plan} for plan in plans]
    for value in (noise, *written, *({**one, "summary": "s"} for one in written)):
        done = fitted(conversation, limit, TrimDecision.from_json(value), summaries={"s": "what was"}, reader=reader)
        if done is not None:
            assert wrong_with(conversation, done, limit) == []


ODD = [
    b"",
    b"{",
    b"7",
    b"\xff",
    b"[" * 5000,
    b'{"role":"critic","content":"no"}',
    b'{"role":"tool","tool_call_id":"call_0_0","content":"a","content":"b"}',
    b'{"role":"tool","tool_call_id":"call_1_0","content":"found","score":NaN}',
    b'{"role":"user","content":"half a pair \\ud800 of the order"}',
    b'{"role":"tool","tool_call_id":"call_2_0","content":"{\\"a\\":\\"\\\\ud800 '
    + b"order " * 60
    + b'\\",\\"b\\":1}"}',
    b'{"role":"assistant","content":"x","big":' + b"9" * 6000 + b"}",
    b'{"role":"user","content":' + b"[" * 400 + b"]" * 400 + b"}",
    b'{"role":"tool","tool_call_id":"call_1_0","content":"' + b"[" * 900 + b"]" * 900 + b'"}',
    b'{"role":"assistant","content":null,"tool_calls":"none"}',
    b'{"role":"assistant","tool_calls":[7,{"id":1},{"id":"call_9","function":{"name":"f","arguments":"'
    + b'{\\"a\\":' * 300
    + b"1"
    + b"}" * 300
    + b'"}}]}',
    b'{"role":["user"],"content":{"a":1},"cache_control":{"type":"ephemeral"}}',
]


@given(
    messages=conversations(),
    limit=limits,
    odd=st.lists(st.tuples(st.integers(0, 60), st.sampled_from(ODD)), max_size=4),
    policy=st.sampled_from(POLICIES),
    max_wait=st.integers(0, 40) | st.none(),
)
@settings(law, max_examples=50)
def test_odd_messages_are_sent_unchanged_or_left_out(
    messages: Messages, limit: int, odd: list[tuple[int, bytes]], policy: TrimPolicy, max_wait: int | None
) -> None:
    raws = raws_of(messages)
    for place, raw in odd:
        raws.insert(min(place, len(raws)), raw)
    looks = iter(range(max_wait if max_wait is not None else 0))
    reader = Reader(WEIGH)
    conversation = Conversation.of(raws, reader)

    def expired() -> bool:
        return max_wait is not None and next(looks, None) is None

    try:
        done = trim_conversation(conversation, limit, reader, policy=policy, expired=expired)
    except ContextOverflow:
        return
    assert total(done.messages) == done.tokens <= limit
    if done.changed:
        assert problems(conversation, Conversation.of(done.messages), done.tokens, limit) == []
        sealed = {item.key for item in conversation.items if item.sealed}
        places = [n for n, item in enumerate(conversation.items) if item.sealed and done.outcomes[n].rule != "drop"]
        assert [key for key in done.keys if key in sealed] == [conversation.keys[n] for n in places]
        # If there was no time to recall lines or to read the task, the next turn does it.
        again = trim_conversation(
            conversation, limit, Reader(WEIGH), trim_decision=done.trim_decision, policy=replace(policy, recall="off")
        )
        others = [was for now, was in zip(again.messages, done.messages, strict=True) if now != was]
        assert others == [] or (max_wait is not None and [decode(was)["content"] for was in others] == [GAP])


SUMMING = [
    TrimPolicy(strategies=(Dedupe(), Summarize(100), Condense(), Drop()), recall="off"),
    TrimPolicy(strategies=(Summarize(100), Drop()), recall="said"),
    TrimPolicy(strategies=(Shorten(), Summarize(300), Drop()), recall="off", low_water=0.5),
]


@given(messages=conversations(), limit=limits, policy=st.sampled_from(SUMMING), length=st.integers(1, 900))
@settings(law, max_examples=20)
def test_each_turn_with_summaries_is_valid_and_asks_only_at_a_trim(
    messages: Messages, limit: int, policy: TrimPolicy, length: int
) -> None:
    """Summaries have any length: a model may ignore the limit of the prompt."""
    trim_decision: TrimDecision | None = None
    texts: dict[str, str] = {}
    before: list[bytes] = []
    reader = Reader(WEIGH)
    for stop in range(2, len(messages) + 1):
        if messages[stop - 1]["role"] == "assistant" or (stop < len(messages) and messages[stop]["role"] == "tool"):
            continue
        conversation = Conversation.of_messages(messages[:stop], reader)
        wanted: str | None = None
        passage: Passage | None = None
        try:
            try:
                done = trim_conversation(
                    conversation, limit, reader, trim_decision=trim_decision, policy=policy, summaries=texts, use="ask"
                )
            except SummaryNeeded as needed:
                wanted, passage = needed.passage.id, needed.passage
                texts[wanted] = (wanted[:4] + " word") * (length // 2)
                done = trim_conversation(
                    conversation,
                    limit,
                    reader,
                    trim_decision=trim_decision,
                    policy=policy,
                    summaries=texts,
                    use="known",
                )
        except ContextOverflow:
            continue
        if passage is not None and trim_decision is not None and trim_decision.summary is not None:
            assert passage.earlier == texts[trim_decision.summary]
        assert wrong_with(conversation, done, limit) == []
        assert done.tokens == total(done.messages) <= limit
        assert sum(fate.tokens_after for fate in done.outcomes) == done.tokens
        summed = [index for index, fate in enumerate(done.outcomes) if fate.rule == "summarize"]
        assert len(summed) == done.outcomes.actions.get("summarize", 0)
        told = [raw for raw in done.messages if b"[summary of " in raw]
        assert len(told) == bool(summed)
        if told:
            assert done.trim_decision is not None
            assert done.trim_decision.summary in texts
            assert json.loads(told[0])["content"].startswith(f"[summary of {len(summed)} earlier messages]\n")
            assert conversation.pinned.isdisjoint(summed)
            split = [unit for unit in conversation.units if 0 < len({*unit.indices} & {*summed}) < len(unit.indices)]
            assert split == []
        if done.trim_decision is not None:
            assert not any(text in json.dumps(done.trim_decision.to_json()) for text in texts.values() if text)
            elsewhere = trim_conversation(
                Conversation.of_messages(messages[:stop]), limit, Reader(WEIGH),
                trim_decision=TrimDecision.from_json(json.loads(json.dumps(done.trim_decision.to_json()))), policy=policy, summaries=texts,
            )  # fmt: skip
            assert elsewhere.messages == done.messages
            if not done.applied:
                assert wanted is None
                assert list(done.messages)[: len(before)] == before
        before, trim_decision = list(done.messages), done.trim_decision


@given(messages=conversations(), limit=limits)
@law
def test_without_permission_to_ask_no_summary_is_made(messages: Messages, limit: int) -> None:
    known = {"s": "what was"}
    plain = fitted(messages, limit, policy=TrimPolicy(strategies=(Dedupe(), Condense(), Drop())))
    other = fitted(
        messages, limit, policy=TrimPolicy(strategies=(Dedupe(), Summarize(), Condense(), Drop())), summaries=known
    )
    assert (plain and plain.messages) == (other and other.messages)


@given(
    messages=conversations(),
    limit=limits,
    policy=st.sampled_from([*POLICIES, *SUMMING]),
    thoughts=st.lists(st.booleans(), min_size=24, max_size=24),
)
@settings(law, max_examples=15)
def test_a_turn_that_began_with_thinking_still_does_after_each_trim(
    messages: Messages, limit: int, policy: TrimPolicy, thoughts: list[bool]
) -> None:
    thinking = [{"type": "thinking", "thinking": "hm", "signature": "s"}]
    spoken = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    for place, thinks in zip(spoken, thoughts, strict=False):
        if thinks or messages[place - 1]["role"] == "user":
            messages[place] = {**messages[place], "thinking_blocks": thinking}
    for sent, _ in turn_by_turn(messages, limit, policy):
        words = max(place for place, message in enumerate(sent) if message["role"] == "user")
        assert all("thinking_blocks" in message for message in sent[words + 1 : words + 2])


def google(number: int) -> dict[str, Any]:
    return {"extra_content": {"google": {"thought_signature": f"c2ln{number}"}}}


def openrouter(number: int) -> dict[str, Any]:
    details = [{"type": "reasoning.encrypted", "data": f"c2ln{number}", "format": "openai-responses-v1"}]
    return {"reasoning_details": details}


def of_the_first_call(fields: dict[str, Any], message: dict[str, Any]) -> dict[str, Any]:
    first, *others = message["tool_calls"]
    return {**message, "tool_calls": [{**first, **fields}, *others]}


SIGNED: Mapping[str, Callable[[dict[str, Any], int], dict[str, Any]]] = {
    "Gemini signs the first of parallel calls": lambda one, n: of_the_first_call(google(n), one),
    "litellm puts it into a field of its own": lambda one, n: of_the_first_call(
        {"provider_specific_fields": {"thought_signature": f"c2ln{n}"}}, one
    ),
    "litellm puts it into the function": lambda one, n: of_the_first_call(
        {"function": {**one["tool_calls"][0]["function"], "provider_specific_fields": {"thought_signature": f"c2{n}"}}},
        one,
    ),
    "Gemini signs the text next to the calls": lambda one, n: {**one, **google(n)},
    "litellm puts that into a field of its own": lambda one, n: {
        **one,
        "provider_specific_fields": {"thought_signatures": [f"c2ln{n}"]},
    },
    "OpenRouter": lambda one, n: {**one, **openrouter(n)},
}


@pytest.mark.parametrize("sign", SIGNED.values(), ids=SIGNED)
@given(messages=conversations(), limit=limits, policy=st.sampled_from([*POLICIES, *SUMMING]))
@settings(law, max_examples=10)
def test_a_signed_call_is_sent_unchanged_or_left_out_on_each_turn(
    sign: Callable[[dict[str, Any], int], dict[str, Any]], messages: Messages, limit: int, policy: TrimPolicy
) -> None:
    calling = [place for place, message in enumerate(messages) if message.get("tool_calls")]
    for number, place in enumerate(calling):
        messages[place] = sign(messages[place], number)
    for sent, original in turn_by_turn(messages, limit, policy):
        known = {message["tool_calls"][0]["id"]: message for message in original if message.get("tool_calls")}
        assert all(one == known[one["tool_calls"][0]["id"]] for one in sent if one.get("tool_calls"))


@given(messages=conversations(), limit=limits, policy=st.sampled_from([*POLICIES, *SUMMING]))
@settings(law, max_examples=15)
def test_a_call_keeps_its_reasoning_on_each_turn(messages: Messages, limit: int, policy: TrimPolicy) -> None:
    """DeepSeek and Kimi refuse a call without it."""
    for place, message in enumerate(messages):
        if message.get("tool_calls"):
            messages[place] = {**message, "reasoning_content": f"I look at {place}. {SENTENCES[place % 30]}"}
    for sent, original in turn_by_turn(messages, limit, policy):
        known = {message["tool_calls"][0]["id"]: message for message in original if message.get("tool_calls")}
        for one in sent:
            if one.get("tool_calls"):
                assert one["reasoning_content"] == known[one["tool_calls"][0]["id"]]["reasoning_content"]


def turn_by_turn(messages: Messages, limit: int, policy: TrimPolicy) -> Iterator[tuple[Messages, Messages]]:
    """Yield what is sent and what the client sent, on each turn of a session."""
    trim_decision: TrimDecision | None = None
    texts: dict[str, str] = {}
    for stop in range(2, len(messages) + 1):
        if messages[stop - 1]["role"] == "assistant" or (stop < len(messages) and messages[stop]["role"] == "tool"):
            continue
        conversation = Conversation.of_messages(messages[:stop])
        attempt = partial(
            trim_conversation,
            conversation,
            limit,
            Reader(WEIGH),
            trim_decision=trim_decision,
            policy=policy,
            summaries=texts,
        )
        try:
            try:
                done = attempt(use="ask")
            except SummaryNeeded as needed:
                texts[needed.passage.id] = "told"
                done = attempt(use="known")
        except ContextOverflow:
            continue
        assert wrong_with(messages[:stop], done, limit) == []
        trim_decision = done.trim_decision
        yield [dict(one) for one in done.decoded()], messages[:stop]


#: tokens for the gap marks of dropped messages
ROOM = 300
STRICT = {("tool", "user"), ("user", "user"), ("assistant", "assistant")}


def neighbours(messages: Sequence[Mapping[str, Any]]) -> set[tuple[str, str]]:
    return set(pairwise(message["role"] for message in messages if message["role"] != "system")) & STRICT


def with_thoughts(messages: Messages) -> Messages:
    """Return an assistant message in Mistral's form, with thinking that must not be changed."""
    thought = {"type": "thinking", "thinking": [{"type": "text", "text": SENTENCES[0]}]}
    return [
        {**message, "content": [thought, {"type": "text", "text": message["content"]}]}
        if message["role"] == "assistant" and message["content"]
        else message
        for message in messages
    ]


@pytest.mark.parametrize("policy", POLICIES[:7], ids=range(7))
@given(messages=conversations() | conversations().map(with_thoughts), limit=limits)
@settings(law, max_examples=20)
def test_roles_keep_the_clients_order_on_each_turn(policy: TrimPolicy, messages: Messages, limit: int) -> None:
    trim_decision: TrimDecision | None = None
    reader = Reader(WEIGH)
    for stop in range(2, len(messages) + 1):
        if messages[stop - 1]["role"] == "assistant" or (stop < len(messages) and messages[stop]["role"] == "tool"):
            continue
        conversation = Conversation.of_messages(messages[:stop], reader)
        pinned = total([conversation.messages[index] for index in conversation.pinned])
        done = fitted(conversation, limit, trim_decision, policy, reader=reader)
        if done is None:
            continue
        trim_decision = done.trim_decision
        assert wrong_with(conversation, done, limit) == []
        if pinned + ROOM <= limit:
            assert neighbours(done.decoded()) <= neighbours(messages[:stop])
