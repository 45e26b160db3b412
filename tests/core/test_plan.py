from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.config import families
from gateway.core.context_budget import ContextPolicy, SummaryModel
from gateway.core.conversation.units import Conversation
from gateway.core.counting.cache import CountCache
from gateway.core.counting.calibration import LastTurn, Residual
from gateway.core.counting.counted import CountedRequest, LearnedCorrections, count_tokens
from gateway.core.counting.estimate import Estimator
from gateway.core.counting.families import TokenizerFamilies
from gateway.core.counting.heuristic import CharacterCounter
from gateway.core.counting.measure import Wire
from gateway.core.counting.request import RequestParts
from gateway.core.plan import ChoiceBudget, Plan, TokenCounters, make_room, unchanged_plan
from gateway.core.routing import ModelFacts, Route
from gateway.core.session import SessionState
from gateway.core.trimming.overflow import BudgetTooSmall, ContextOverflow
from gateway.core.trimming.policy import TrimPolicy
from gateway.core.trimming.reader import Framing, Reader
from gateway.core.trimming.recall import Recall
from gateway.core.trimming.strategies import Condense, Dedupe, Drop, Shorten, Strategy, Summarize
from gateway.core.views import view_of

ESTIMATOR = Estimator(families(), lambda _: CharacterCounter(), CountCache())
READER = Reader(lambda messages: ESTIMATOR.message_tokens(RequestParts(wire="chat", model="gpt-4o", messages=messages)))
SCALES = TokenCounters(ESTIMATOR, READER)
TOOL = {"type": "function", "function": {"name": "find", "description": "Finds."}}


def messages(turns: int) -> list[bytes]:
    found: list[dict[str, Any]] = [
        {"role": "system", "content": "You look things up."},
        {"role": "user", "content": "Find the parcel of order 4711."},
    ]
    for number in range(turns):
        call = {"id": f"c{number}", "type": "function", "function": {"name": "find", "arguments": f'{{"n": {number}}}'}}
        found.append({"role": "assistant", "content": None, "tool_calls": [call]})
        lines = "\n".join(f"Parcel {number}-{line} lies at depot {line * 7} in row {line}." for line in range(30))
        found.append({"role": "tool", "tool_call_id": f"c{number}", "content": lines})
    return [json.dumps(message).encode() for message in found]


def counted(raws: Sequence[bytes], learned: LearnedCorrections | None = None) -> CountedRequest:
    request = RequestParts(wire="chat", model="gpt-4o", provider="openai", messages=raws)
    return count_tokens(request, ESTIMATOR.estimate(request), learned or LearnedCorrections())


def room(budget: int, **changes: Any) -> ChoiceBudget:
    plain = ChoiceBudget(budget, ContextPolicy(), False, SessionState(), LearnedCorrections(), lambda: False)
    return replace(plain, **changes)


def planned(raws: Sequence[bytes], place: ChoiceBudget) -> Plan:
    return make_room(counted(raws, place.learned), view_of("chat", raws), Conversation.of(raws, READER), place, SCALES)


def test_request_within_budget_is_unchanged() -> None:
    original = counted(messages(3))
    plan = unchanged_plan(original, 9_999)
    assert (plan.messages, plan.trim_decision, plan.context.budget) == (None, None, 9_999)
    assert plan.context.tokens == plan.context.original_tokens == original.expected.tokens
    assert plan.context.saved_tokens == 0


@pytest.mark.parametrize("safety", [None, 1.0, 1.25, 3.0])
def test_remaining_tokens_are_budget_minus_sent(safety: float | None) -> None:
    original = counted(messages(3))
    context = unchanged_plan(original, 9_999, safety).context
    assert context.remaining is not None
    assert context.remaining == 9_999 - context.tokens - context.margin
    assert original.fits(9_999 - context.remaining, safety)
    assert not original.fits(9_999 - context.remaining - 1, safety)
    assert unchanged_plan(original, original.expected.tokens - 1, safety).context.remaining == 0
    assert unchanged_plan(original, None, safety).context.remaining is None


def test_remaining_tokens_after_trimming() -> None:
    plan = planned(messages(12), room(2_000))
    assert plan.messages is not None
    sent = counted(plan.messages).expected
    assert plan.context.remaining == 2_000 - sent.tokens - sent.margin > 100
    shadow = planned(messages(12), room(2_000, shadow=True))
    assert shadow.context.remaining == 0


def test_a_plan_is_within_its_budget_with_its_margin_and_says_what_it_did() -> None:
    raws = messages(12)
    plan = planned(raws, room(2_000))
    assert plan.messages is not None
    sent = counted(plan.messages)
    assert sent.expected.safe_tokens <= 2_000
    context = plan.context
    assert context.tokens == sent.expected.tokens
    assert context.original_tokens == counted(raws).expected.tokens
    assert context.saved_tokens == context.original_tokens - context.tokens > 0
    assert len(context.message_fates) == len(raws)
    changed = [fate for fate in context.message_fates if fate[3] not in ("kept", "pinned")]
    assert sum(context.trimmed.values()) == len(changed) > 0
    parts = sent.estimate.context
    assert (context.conversation_tokens, context.tool_tokens) == (parts.conversation_tokens, parts.tool_tokens)
    assert context.tool_weights == parts.tools
    assert sum(one.tokens for one in parts.tools.values()) == parts.tool_tokens > 0


def test_safety_factor_is_kept_free() -> None:
    plan = planned(messages(12), room(2_000, policy=ContextPolicy(safety=1.5)))
    assert plan.messages is not None
    assert counted(plan.messages).expected.tokens * 1.5 <= 2_000


def test_learned_correction_of_a_session_has_room() -> None:
    key = counted(messages(1)).key
    plain = planned(messages(12), room(2_000))
    taught = planned(messages(12), room(2_000, learned=LearnedCorrections(last_turn=LastTurn(key, 600))))
    assert plain.messages is not None
    assert taught.messages is not None
    assert taught.context.estimate + 600 <= 2_000
    assert taught.context.tokens == taught.context.estimate + 600
    assert taught.context.before == LastTurn(key, 600)


def test_tokens_kept_by_provider_are_expected_but_cause_no_trim() -> None:
    raws = messages(12)
    plain, kept = (
        planned(raws, room(2_000)),
        planned(raws, room(2_000, learned=LearnedCorrections(stored_tokens=50_000))),
    )
    assert kept.messages == plain.messages
    assert kept.safe_tokens == plain.safe_tokens
    assert kept.overhead == plain.overhead > 0
    assert kept.context.tokens == plain.context.tokens + 50_000
    assert kept.context.saved_tokens == plain.context.saved_tokens > 0
    assert kept.context.remaining == 0
    for off, residual in ((700, 700), (0, 0), (-3_000, 0)):
        last = kept.context.reported(kept.context.estimate + 50_000 + off)
        assert (last.key, last.residual) == (kept.context.key, residual)
    assert kept.context.key != plain.context.key
    assert plain.context.reported(plain.context.estimate - 300).residual == -300


def test_learned_offsets_trim_like_family_numbers() -> None:
    raws, each = messages(30), 40
    family = ESTIMATOR.family(RequestParts(wire="chat", model="gpt-4o"))
    dear = TokenizerFamilies([replace(family, per_call=family.per_call + each)])
    known = Estimator(dear, lambda _: CharacterCounter(), CountCache())
    reader = Reader(lambda some: known.message_tokens(RequestParts(wire="chat", model="gpt-4o", messages=some)))
    request = RequestParts(wire="chat", model="gpt-4o", provider="openai", messages=raws, tools=([TOOL],))
    key = count_tokens(request, ESTIMATOR.estimate(request), LearnedCorrections()).key
    by_family = make_room(
        count_tokens(request, known.estimate(request), LearnedCorrections((), (), (), LastTurn(key, 0, 30))),
        view_of("chat", raws), Conversation.of(raws, reader), room(2_000), TokenCounters(known, reader),
    )  # fmt: skip
    learned = LearnedCorrections((), (), (Residual(each * 33, 32),), LastTurn(key, each * 30, 30, each * 32, 32))
    original = count_tokens(request, ESTIMATOR.estimate(request), learned)
    framed = READER.with_counter(READER._count_tokens, "", Framing(call=round(original.expected.frame)))
    by_learning = make_room(
        original, view_of("chat", raws), Conversation.of(raws, framed),
        room(2_000, learned=learned), TokenCounters(ESTIMATOR, framed),
    )  # fmt: skip
    assert by_learning.messages == by_family.messages is not None
    assert abs(by_learning.context.tokens - by_family.context.tokens) <= 1
    assert by_learning.context.frames == sum(b"tool_calls" in raw for raw in by_learning.messages or ()) < 30


@pytest.mark.parametrize("added", [-900, 1_900])
def test_correction_learned_without_image_applies_after_image_is_trimmed(added: int) -> None:
    url = {"type": "image_url", "image_url": {"url": "https://pictures.example/1.png"}}
    raws = messages(30)
    raws[2:2] = [
        json.dumps({"role": "user", "content": [url]}).encode(),
        b'{"role": "assistant", "content": "A parcel."}',
        b'{"role": "user", "content": "Where are all of them?"}',
    ]
    learned = LearnedCorrections(last_turn=LastTurn(counted(messages(1)).key, added, 4))
    original = counted(raws, learned)
    assert original.expected.last is None
    plan = planned(raws, room(3_000, learned=learned))
    assert plan.context.key == counted(messages(1)).key
    assert plan.context.tokens == plan.context.estimate + added
    assert 1_000 < plan.context.tokens <= 3_000 - plan.context.margin
    # An image that must stay is counted as an image.
    newest = [*raws, json.dumps({"role": "user", "content": [url]}).encode()]
    seen = planned(newest, room(3_000, learned=replace(learned, offsets=(Residual(1_600, 1_000),))))
    assert seen.context.key == original.key
    assert seen.context.tokens == seen.context.estimate + 1_600 <= 3_000


@pytest.mark.parametrize("each", [-40, 40])
def test_dropped_calls_take_no_room(each: int) -> None:
    raws = messages(400)
    request = RequestParts(wire="chat", model="gpt-4o", provider="openai", messages=raws, tools=([TOOL],))
    key = count_tokens(request, ESTIMATOR.estimate(request), LearnedCorrections()).key
    learned = LearnedCorrections(last_turn=LastTurn(key, each * 10, 10, each * 32, 32))
    original = count_tokens(request, ESTIMATOR.estimate(request), learned)
    plan = make_room(
        original, view_of("chat", raws), Conversation.of(raws, READER),
        room(6_000, learned=learned), SCALES,
    )  # fmt: skip
    assert 2_500 < plan.context.tokens <= 6_000 - plan.context.margin


def test_next_turn_continues_the_trim_decision() -> None:
    raws = messages(12)
    first = planned(raws, room(2_000))
    assert first.trim_decision is not None
    state = SessionState().with_trim_decision(first.trim_decision)
    later = [*raws, json.dumps({"role": "assistant", "content": "It is at depot 7."}).encode(), messages(0)[1]]
    second = planned(later, room(2_000, state=state))
    assert first.messages is not None
    assert second.messages is not None
    assert second.messages[: len(first.messages)] == first.messages
    assert second.trim_decision is None
    assert second.context.trimmed == first.context.trimmed


def test_shadow_plan_sends_unchanged_and_reports() -> None:
    raws = messages(12)
    plan = planned(raws, room(2_000, shadow=True))
    assert plan.messages is None
    assert plan.context.shadow
    assert plan.context.tokens == plan.context.original_tokens
    assert plan.context.saved_tokens == 0
    assert plan.context.trimmed == planned(raws, room(2_000)).context.trimmed
    assert plan.trim_decision is not None


def test_shadow_decisions_are_not_continued_by_real_plans() -> None:
    raws = messages(12)
    shadow = planned(raws, room(2_000, shadow=True))
    assert shadow.trim_decision is not None
    state = SessionState().with_trim_decision(shadow.trim_decision)
    real = planned(raws, room(2_000, state=state))
    assert real.trim_decision is not None
    assert real.resumed is None
    assert planned(raws, room(2_000, shadow=True, state=state)).trim_decision is None


def test_overflow_names_the_largest_message() -> None:
    raws = [*messages(0), json.dumps({"role": "user", "content": "word " * 4_000}).encode()]
    with pytest.raises(ContextOverflow, match=r"messages\[2\] \(user\)") as refused:
        planned(raws, room(2_000))
    assert refused.value.param == "messages[2]"


def test_tools_over_budget_are_named() -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "word " * 500}}
    request = RequestParts(wire="chat", model="gpt-4o", messages=messages(3), tools=([tool],))
    original = count_tokens(request, ESTIMATOR.estimate(request), LearnedCorrections())
    with pytest.raises(BudgetTooSmall, match=r"Offer fewer tools") as refused:
        make_room(original, view_of("chat", messages(3)), Conversation.of(messages(3), READER), room(400), SCALES)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "tools")


def test_long_field_over_budget_is_not_blamed_on_a_message() -> None:
    request = RequestParts(wire="chat", model="gpt-4o", messages=messages(3), others=("word " * 500,))
    original = count_tokens(request, ESTIMATOR.estimate(request), LearnedCorrections())
    with pytest.raises(BudgetTooSmall, match=r"long fields"):
        make_room(original, view_of("chat", messages(3)), Conversation.of(messages(3), READER), room(400), SCALES)


@pytest.mark.parametrize("wire", ["chat", "messages", "responses"])
def test_request_without_messages_is_refused_or_unchanged(wire: Wire) -> None:
    request = RequestParts(wire=wire, model="gpt-4o", provider="openai", messages=[])
    original = count_tokens(request, ESTIMATOR.estimate(request), LearnedCorrections())
    parts = original, view_of(wire, []), Conversation.of([], READER)
    with pytest.raises(BudgetTooSmall):
        make_room(*parts, room(1), SCALES)
    for place in (room(original.estimate.overhead + 1), room(1, policy=LEAST)):
        assert make_room(*parts, place, SCALES).messages is None


def test_margin_alone_causes_no_refusal() -> None:
    raws = messages(2)
    least = counted([raws[0], raws[1], *raws[-2:]]).estimate.tokens
    plan = planned(raws, room(least + 5))
    assert plan.messages is not None
    assert plan.context.estimate <= least + 5


@pytest.mark.parametrize("safety", [None, 1.0])
@pytest.mark.parametrize("margin", [3, 600])
def test_tokens_billed_beyond_estimate_have_room(safety: float | None, margin: int) -> None:
    raws = messages(12)
    least = counted([raws[0], raws[1], *raws[-2:]])
    learned = LearnedCorrections(last_turn=LastTurn(least.key, 400))
    budget = least.estimate.tokens + 400 + margin
    context = planned(raws, room(budget, policy=ContextPolicy(safety=safety), learned=learned)).context
    assert budget - 0.5 * margin - 200 < context.tokens <= budget


@pytest.mark.parametrize("of_this_session", [True, False])
def test_learned_correction_alone_causes_no_refusal(of_this_session: bool) -> None:
    raws = messages(4)
    original = counted([raws[0], raws[1], *raws[-2:]])
    last = LastTurn(original.key, 5_000) if of_this_session else None
    learned = LearnedCorrections(offsets=(Residual(5_000, 1_000),) * 3, last_turn=last)
    assert planned(raws, room(original.estimate.tokens + 5, learned=learned)).messages is not None
    with pytest.raises(ContextOverflow):
        planned(raws, room(original.estimate.tokens - 5, learned=learned))


def test_damaged_trim_decision_is_made_again() -> None:
    state = SessionState({"x": {"v": 99}, "y": {"prefix": 3}})
    assert planned(messages(12), room(2_000, state=state)).trim_decision is not None


def test_every_action_has_a_name_after_the_deadline() -> None:
    raws = messages(12)
    task = {"role": "user", "content": " ".join(f"Look for parcel {number}." for number in range(400))}
    last = {"role": "user", "content": "And now?"}
    raws = [raws[0], json.dumps(task).encode(), *raws[2:], json.dumps(last).encode()]
    context = planned(raws, room(300, expired=lambda: True)).context
    assert set(context.trimmed) == {"drop"}
    assert {fate[3] for fate in context.message_fates} == {"drop", "pinned"}


# --- other formats ------------------------------------------------------------------------------------------------

LEAST = ContextPolicy(overflow="least")
#: has tokens in these formats, but is not a chat message
SYSTEM = "You look things up, say where they are, and ask for nothing that was said before. " * 4
OTHERS: tuple[Wire, ...] = ("messages", "responses")


def element(wire: Wire, number: int) -> list[bytes]:
    """Return a tool call with its result and a text."""
    lines = "\n".join(f"Parcel {number}-{line} lies at depot {line * 7} in row {line}." for line in range(12))
    if wire == "responses":
        found: list[dict[str, Any]] = [
            {"type": "function_call", "call_id": f"c{number}", "name": "find", "arguments": f'{{"n": {number}}}'},
            {"type": "function_call_output", "call_id": f"c{number}", "output": lines},
        ]
    else:
        use = {"type": "tool_use", "id": f"c{number}", "name": "find", "input": {"n": number}}
        result = {"type": "tool_result", "tool_use_id": f"c{number}", "content": lines}
        found = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    found.append({"role": "assistant", "content": f"Parcel {number}-3 is at depot 21."})
    found.append({"role": "user", "content": f"What of parcel {number + 1}-5, and depot {number * 7}?"})
    return [json.dumps(one).encode() for one in found]


def elements(wire: Wire, turns: int) -> list[bytes]:
    task = json.dumps({"role": "user", "content": "Find the parcels of order 4711."}).encode()
    return [task, *(raw for number in range(turns) for raw in element(wire, number))]


def planned_as(wire: Wire, raws: Sequence[bytes], place: ChoiceBudget, tools: Sequence[Any] = ()) -> Plan:
    model = "gpt-4o" if wire == "responses" else "claude-sonnet-4-5"
    request = RequestParts(wire=wire, model=model, provider="p", messages=raws, tools=tuple(tools), system=SYSTEM)
    original = count_tokens(request, ESTIMATOR.estimate(request), place.learned)
    view = view_of(wire, raws)
    # Tokens are counted as chat messages with the numbers of the model, as in the planner.
    bare = replace(request, messages=(), tools=(), system=None)
    reader = Reader(lambda chat: ESTIMATOR.message_tokens(replace(bare, messages=chat), read_as="chat"))
    conversation = Conversation.of(
        view.messages, reader,
        pinned=view.marks.held, following=view.marks.following, keep_last_turns=place.policy.keep_last_turns,
    )  # fmt: skip
    return make_room(original, view, conversation, place, TokenCounters(ESTIMATOR, reader))


ODD = [
    *(b"965", b"null", b"[]", b"{}", b'"x"', b'{"role":"user"}', b'{"role":"user","content":"wait"}'),
    *(b'{"role":"user","content":[]}', b'{"role":"user","content":[7]}', b'{"role":"user","content":" \\n"}'),
    *(b'{"role":"assistant","content":"so"}', b'{"role":"assistant","content":[]}', b'{"role":"system","content":"s"}'),
    *(b'{"type":"reasoning","id":"rs_9","summary":[]}', b'{"type":"item_reference","id":"rs_8"}'),
]


@given(
    st.sampled_from(["chat", *OTHERS]),
    st.lists(st.tuples(st.integers(0, 20), st.sampled_from(ODD)), min_size=1, max_size=3),
    st.sampled_from([0.3, 0.5, 0.8]),
)
@example("messages", [(2, b"965"), (0, b'{"role":"user","content":[]}')], 0.3)
@settings(max_examples=60, deadline=None)
def test_unusual_elements_leave_a_valid_request(wire: Wire, odd: list[tuple[int, bytes]], share: float) -> None:
    raws = messages(5) if wire == "chat" else elements(wire, 5)
    for place, raw in odd:
        raws.insert(min(place, len(raws)), raw)
    original = planned_as(wire, raws, room(10**9)).context.estimate
    try:
        plan = planned_as(wire, raws, room(int(original * share)))
    except ContextOverflow:
        return
    assert plan.messages is not None
    assert plan.context.estimate <= original * share


def asked_twice(wire: Wire, number: int) -> list[bytes]:
    """Return a text and two calls, in one message with their reasoning or with their results in one element."""
    task, call, result, said, _ = (json.loads(raw) for raw in elements(wire, number + 1)[-5:])
    if wire == "responses":
        thought = {"type": "reasoning", "id": f"rs_{number}", "summary": [], "encrypted_content": "x" * 80}
        found = [task, thought, call, {**call, "call_id": f"d{number}"}, result, {**result, "call_id": f"d{number}"}]
    else:
        (use,), (answer,) = call["content"], result["content"]
        uses, answers = [use, {**use, "id": f"d{number}"}], [answer, {**answer, "tool_use_id": f"d{number}"}]
        found = [task, {**call, "content": uses}, {**result, "content": answers}]
    return [json.dumps(one).encode() for one in (*found, said)]


@pytest.mark.parametrize("wire", OTHERS)
def test_tokens_are_counted_for_elements_not_views(wire: Wire) -> None:
    raws = [raw for number in range(8) for raw in asked_twice(wire, number)]
    plan = planned_as(wire, raws, room(900))
    rules = Counter(fate.rule for fate in plan.context.message_fates)
    assert dict(plan.context.trimmed) == {rule: rules[rule] for rule in rules if rule not in ("kept", "pinned")}
    assert plan.context.trimmed["drop"] == len(raws) - len(plan.messages or ())


@pytest.mark.parametrize("keep_last_turns", [1, 3])
@pytest.mark.parametrize("wire", OTHERS)
def test_overflow_least_sends_what_must_stay(wire: Wire, keep_last_turns: int) -> None:
    raws, policy = elements(wire, 8), replace(LEAST, keep_last_turns=keep_last_turns)
    least = planned_as(wire, raws, room(1, policy=policy)).context.estimate
    for budget in range(least - 100, least + 40, 4):
        context = planned_as(wire, raws, room(budget, policy=policy)).context
        assert context.estimate <= max(budget, least)


def test_too_long_turn_does_not_trim_later_turns() -> None:
    raws = messages(12)
    first = planned(raws, room(2_000, policy=LEAST))
    assert first.trim_decision is not None
    assert first.messages is not None
    state = SessionState().with_trim_decision(first.trim_decision)
    answer = json.dumps({"role": "assistant", "content": "It is at depot 7."}).encode()
    long = [*raws, answer, json.dumps({"role": "user", "content": "Parcel, parcel. " * 700}).encode()]
    least = planned(long, room(2_000, policy=LEAST, state=state))
    assert least.messages is not None
    assert len(least.messages) < len(first.messages)
    state = state.with_trim_decision(least.trim_decision, instead_of=least.resumed) if least.trim_decision else state
    later = planned([*long, answer, raws[1]], room(2_000, policy=LEAST, state=state))
    assert later.messages is not None
    assert len({*first.messages} & {*later.messages}) > len(first.messages) // 2


@pytest.mark.parametrize("keep_last_turns", [1, 3])
@pytest.mark.parametrize("wire", OTHERS)
def test_request_format_alone_causes_no_refusal(wire: Wire, keep_last_turns: int) -> None:
    raws, policy = elements(wire, 8), ContextPolicy(keep_last_turns=keep_last_turns)
    least = planned_as(wire, raws, room(1, policy=replace(policy, overflow="least"))).context.estimate
    for budget in range(least, least + 40, 2):
        assert planned_as(wire, raws, room(budget, policy=policy)).context.estimate <= budget
    with pytest.raises(ContextOverflow) as refused:
        planned_as(wire, raws, room(least - 1, policy=policy))
    assert refused.value.needed == refused.value.limit + 1


@pytest.mark.parametrize("wire", OTHERS)
def test_overflow_least_is_sent_with_tools_over_budget(wire: Wire) -> None:
    tools = [[{"name": "f", "description": "word " * 500}]]
    with pytest.raises(BudgetTooSmall):
        planned_as(wire, elements(wire, 8), room(400), tools)
    plan = planned_as(wire, elements(wire, 8), room(400, policy=LEAST), tools)
    assert plan.messages is not None
    assert len(plan.messages) < 8


@pytest.mark.parametrize("recall", ["off", "said", "all"])
@pytest.mark.parametrize("wire", OTHERS)
def test_repeated_request_is_sent_as_the_same_bytes(wire: Wire, recall: Recall) -> None:
    policy = ContextPolicy(safety=1.3, fit=TrimPolicy(recall=recall))
    resumed = 0
    for budget in range(500, 620, 20):
        state, raws = SessionState(), elements(wire, 10)
        for size in range(len(elements(wire, 5)), len(raws) + 1, 2):
            first = planned_as(wire, raws[:size], room(budget, policy=policy, state=state))
            state = state.with_trim_decision(first.trim_decision) if first.trim_decision is not None else state
            again = planned_as(wire, raws[:size], room(budget, policy=policy, state=state))
            assert again.messages == first.messages
            assert (again.context.tokens, again.context.trimmed) == (first.context.tokens, first.context.trimmed)
            resumed += again.resumed is not None
    assert resumed > 40


def written(wire: Wire, number: int) -> list[bytes]:
    """Return an assistant message with a text and a call that writes a file."""
    said, lines = f"I write part {number}.", "\n".join(f"part {number} line {line} of {line * 7}" for line in range(40))
    if wire == "responses":
        asked = {"type": "function_call", "call_id": f"c{number}", "name": "write"}
        found: list[dict[str, Any]] = [
            {"role": "assistant", "content": said},
            {**asked, "arguments": json.dumps({"text": lines})},
            {"type": "function_call_output", "call_id": f"c{number}", "output": f"part {number} is written"},
        ]
    else:
        use = {"type": "tool_use", "id": f"c{number}", "name": "write", "input": {"text": lines}}
        result = {"type": "tool_result", "tool_use_id": f"c{number}", "content": f"part {number} is written"}
        found = [
            {"role": "assistant", "content": [{"type": "text", "text": said}, use]},
            {"role": "user", "content": [result]},
        ]
    return [json.dumps(one).encode() for one in found]


@pytest.mark.parametrize("wire", OTHERS)
def test_assistant_text_is_trimmed_from_turn_to_turn(wire: Wire) -> None:
    raws, state, before = elements(wire, 0), SessionState(), tuple[bytes, ...]()
    resumed = 0
    for number in range(30):
        raws += written(wire, number)
        plan = planned_as(wire, raws, room(3_000, state=state))
        if plan.messages is None:
            continue
        assert plan.context.tokens + plan.context.margin <= 3_000
        sent = b"\n".join(plan.messages)
        told, called = set(re.findall(rb"I write part (\d+)", sent)), set(re.findall(rb'"c(\d+)"', sent))
        assert told <= called, "no words without what they announce"
        assert len(called) > 3, "there is room for more than what must stay"
        if plan.trim_decision is None:
            resumed += 1
            assert plan.messages[: len(before)] == before
        else:
            state = state.with_trim_decision(plan.trim_decision)
        before = plan.messages
    assert resumed > 10


def run_of_one_reasoning(steps: int) -> list[bytes]:
    """Return an open run of an agent whose only reasoning is before its first call."""
    found: list[dict[str, Any]] = [
        {"role": "user", "content": "Find the parcels of order 4711."},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "Z2VoZWlt" * 20},
    ]
    for number in range(steps):
        call, result = (json.loads(raw) for raw in element("responses", number)[:2])
        found += [{**call, "id": f"fc_{number}"}, result]
    return [json.dumps(one).encode() for one in found]


def test_old_results_of_open_run_are_trimmed_and_calls_stay() -> None:
    raws = run_of_one_reasoning(24)
    original, whole = [json.loads(raw) for raw in raws], planned_as("responses", raws, room(10**9)).context.estimate
    with pytest.raises(ContextOverflow):
        planned_as("responses", raws, room(600))
    for budget in (whole - 100, whole // 2, whole // 3):
        for policy in (TrimPolicy(), TrimPolicy(strategies=(Drop(),)), TrimPolicy(strategies=(Shorten(20), Drop()))):
            plan = planned_as("responses", raws, room(budget, policy=ContextPolicy(fit=policy)))
            assert plan.messages is not None
            assert plan.safe_tokens <= budget
            sent = [json.loads(raw) for raw in plan.messages]
            assert [one for one in sent if "output" not in one] == [one for one in original if "output" not in one]
            assert sent[-1] == original[-1], "the result that was not answered yet"
            assert sum("Parcel" in one.get("output", "") for one in sent) > 1


def test_open_run_keeps_its_prefix_until_the_next_trim() -> None:
    raws, state, before, resumed = run_of_one_reasoning(60), SessionState(), tuple[bytes, ...](), 0
    for size in range(24, len(raws) + 1, 2):
        plan = planned_as("responses", raws[:size], room(4_000, state=state))
        if plan.messages is None:
            continue
        if plan.trim_decision is None:
            resumed += 1
            assert plan.messages[: len(before)] == before
        else:
            state = state.with_trim_decision(plan.trim_decision)
        before = plan.messages
    assert resumed > 20


def test_finished_run_of_one_reasoning_is_dropped_whole() -> None:
    raws = [*run_of_one_reasoning(24), *(json.dumps({"role": "user", "content": say}).encode() for say in "ab")]
    plan = planned_as("responses", raws, room(600))
    assert plan.messages is not None
    assert not any(b'"rs_1"' in raw or b"function_call" in raw for raw in plan.messages)


# --- summaries ----------------------------------------------------------------------------------------------------


def summing(window: int | None = 8_000, **changes: Any) -> ChoiceBudget:
    facts = ModelFacts(window=window, output=150)
    model = SummaryModel("short", Route("other", "short-1"), facts, 200)
    fit = TrimPolicy(strategies=(Dedupe(), Summarize(200), Condense(), Drop()))
    return room(2_000, policy=ContextPolicy(fit=fit, summary=model), use="ask", **changes)


def plain() -> Plan:
    return planned(messages(12), room(2_000))


def test_plan_asks_for_summary_and_then_uses_it() -> None:
    raws = messages(12)
    asked = planned(raws, summing())
    assert asked.needs is not None
    assert (asked.messages, asked.trim_decision) == (None, None)
    assert (asked.needs.model, asked.needs.max_tokens) == ("short", 150)
    assert [message["role"] for message in asked.needs.messages] == ["system", "user"]
    state = SessionState().with_summary(asked.needs.id, "Nothing was found.")
    plan = planned(raws, replace(summing(state=state), use="known"))
    assert plan.needs is None
    assert plan.context.trimmed == {"summarize": asked.needs.count}
    assert plan.messages is not None
    assert json.loads(plan.messages[2])["content"].endswith("Nothing was found.")
    assert plan.trim_decision is not None
    kept = state.with_trim_decision(plan.trim_decision)
    again = planned(raws, replace(summing(state=kept), use="off"))
    assert (again.messages, again.trim_decision) == (plan.messages, None)


def test_trim_decision_without_its_summary_is_not_used() -> None:
    raws = messages(12)
    asked = planned(raws, summing())
    assert asked.needs is not None
    state = SessionState().with_summary(asked.needs.id, "Nothing was found.")
    plan = planned(raws, replace(summing(state=state), use="known"))
    assert plan.trim_decision is not None
    forgotten = SessionState({plan.trim_decision["prefix"]: plan.trim_decision})
    assert planned(raws, summing(state=forgotten)).needs == asked.needs
    anew = planned(raws, replace(summing(state=forgotten), use="off"))
    assert anew.resumed is None
    assert anew.messages == plain().messages


def test_shadow_uses_no_summaries() -> None:
    plan = planned(messages(12), summing(shadow=True))
    assert plan.needs is None
    assert plan.context.trimmed == plain().context.trimmed


@pytest.mark.parametrize("window", [200, 300])
def test_summary_model_with_small_window_is_not_called(window: int) -> None:
    plan = planned(messages(12), summing(window))
    assert plan.needs is None
    assert plan.messages == plain().messages


def test_without_summaries_trims_are_as_rare_as_by_dropping() -> None:
    def cuts(strategy: Strategy) -> int:
        place = room(2_000, policy=ContextPolicy(fit=TrimPolicy(strategies=(strategy,))))
        state, found = SessionState(), 0
        for turns in range(12, 24):
            plan = planned(messages(turns), replace(place, state=state))
            if plan.trim_decision is not None:
                state, found = state.with_trim_decision(plan.trim_decision), found + 1
        return found

    assert cuts(Summarize(200)) == cuts(Drop()) < 6


def test_without_summary_model_nothing_is_requested() -> None:
    place = summing()
    plan = planned(messages(12), replace(place, policy=replace(place.policy, summary=None)))
    assert plan.messages == plain().messages


def test_summary_model_of_unknown_window_gets_usual_size() -> None:
    assert planned(messages(12), summing(None)).needs is not None


def test_summary_request_fits_a_small_window() -> None:
    asked = planned(messages(12), summing(1_200))
    assert asked.needs is not None
    raws = [json.dumps(message).encode() for message in asked.needs.messages]
    request = RequestParts(wire="chat", model="short-1", provider="other", messages=raws)
    assert ESTIMATOR.estimate(request).tokens <= 900
    assert "[...]" in asked.needs.messages[1]["content"]


def talk(rounds: int) -> list[bytes]:
    found: list[dict[str, Any]] = [{"role": "user", "content": "Plan the move. The code is BX-77120."}]
    for number in range(rounds):
        details = " ".join(f"Room {number}{desk} has {desk + 3} desks." for desk in range(20))
        found.append({"role": "assistant", "content": f"Floor {number} takes Atlas-{number}00. {details}"})
        found.append({"role": "user", "content": f"And floor {number + 1}?"})
    return [json.dumps(message).encode() for message in found]


def test_decision_for_alternating_roles_is_not_shared_with_other_models() -> None:
    def turn(raws: list[bytes], state: SessionState, *, takes_turns: bool) -> tuple[list[str], Plan]:
        conversation = Conversation.of(raws, READER, takes_turns=takes_turns)
        place = room(1_500, state=state, policy=ContextPolicy(fit=TrimPolicy(recall="off")))
        plan = make_room(counted(raws), view_of("chat", raws), conversation, place, SCALES)
        assert plan.messages is not None
        return [json.loads(raw)["role"] for raw in plan.messages], plan

    roles, first = turn(talk(20), SessionState(), takes_turns=False)
    assert first.trim_decision is not None
    assert any(one == other for one, other in pairwise(roles)), "what stood between them was left out"
    state = SessionState().with_trim_decision(first.trim_decision)
    strict, second = turn(talk(21), state, takes_turns=True)
    assert second.resumed is None
    assert strict == ["user", "assistant"] * (len(strict) // 2) + ["user"]
    again, third = turn(talk(21), state, takes_turns=False)
    assert third.resumed == first.trim_decision["prefix"]
    assert again[: len(roles)] == roles


def compacted(task_words: int) -> list[bytes]:
    """Return a task and a run that the provider compacted in the middle."""

    def element(role: str, *blocks: Any) -> bytes:
        return json.dumps({"role": role, "content": list(blocks)}).encode()

    def used(number: int, *before: Any) -> list[bytes]:
        call = {"type": "tool_use", "id": f"t{number}", "name": "find", "input": {"n": number}}
        lines = "\n".join(f"Parcel {number}-{line} lies at depot {line * 7} in row {line}." for line in range(30))
        result = {"type": "tool_result", "tool_use_id": f"t{number}", "content": lines}
        return [element("assistant", *before, call), element("user", result)]

    task = {"type": "text", "text": " ".join(f"word{number}" for number in range(task_words))}
    block = {"type": "compaction", "content": "So far so good."}
    later = [raw for number in range(6, 12) for raw in used(number)]
    return [element("user", task), *used(1), *used(2), *used(5, block), *later]


@pytest.mark.parametrize("task_words", [10, 5_000])
def test_messages_before_a_compaction_take_no_room(task_words: int) -> None:
    raws = compacted(task_words)
    whole = planned_as("messages", raws, room(10**9)).context
    plan = planned_as("messages", raws, room(int(whole.tokens * 0.8)))
    assert plan.messages is not None
    assert plan.messages[:5] == tuple(raws[:5]), "the provider drops that, so that it costs nothing"
    assert plan.context.tokens > whole.tokens * 0.5, "no more is left out than has to be"
    assert sum(fate.tokens_before for fate in list(plan.context.message_fates)[:5]) == 0
