from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from gateway.core.conversation.message import encode
from gateway.core.conversation.message import without_cache_marks as plain_of
from gateway.core.conversation.units import Conversation
from gateway.core.trimming.draft import DROP, Draft
from gateway.core.trimming.overflow import ContextOverflow
from gateway.core.trimming.policy import TrimPolicy
from gateway.core.trimming.reader import Framing, Reader, counter_of
from gateway.core.trimming.report import TrimmedConversation
from gateway.core.trimming.strategies import Condense, Dedupe, Drop, Shorten, Strategy
from gateway.core.trimming.trim_conversation import find, trim_conversation
from gateway.core.trimming.trim_decision import TrimDecision
from gateway.core.trimming.validate import problems

COUNT = counter_of(lambda text: len(text) // 4)
MARK = {"cache_control": {"type": "ephemeral"}}


def step(number: int, size: int = 12) -> list[dict[str, Any]]:
    call = {"id": f"c{number}", "type": "function", "function": {"name": "f", "arguments": f'{{"page": {number}}}'}}
    lines = "".join(f"entry A{number}0{n} of page {number} is worth {n * 7}{number}.\n" for n in range(size))
    return [
        {"role": "assistant", "content": f"Now page {number}.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"c{number}", "content": lines},
    ]


START: list[dict[str, Any]] = [{"role": "system", "content": "be good"}, {"role": "user", "content": "Read the pages."}]


def session(steps: int) -> list[dict[str, Any]]:
    return [*START, *(message for number in range(steps) for message in step(number))]


def run(messages: Any, limit: int, trim_decision: TrimDecision | None = None, **policy: Any) -> TrimmedConversation:
    return trim_conversation(
        Conversation.of_messages(messages),
        limit,
        Reader(COUNT),
        trim_decision=trim_decision,
        policy=TrimPolicy(**policy),
    )


def raws(messages: Any) -> tuple[bytes, ...]:
    return tuple(encode(message) for message in messages)


def tokens(messages: Any) -> int:
    return sum(COUNT(raws(messages)))


def tokens_of(done: TrimmedConversation) -> int:
    return sum(COUNT(done.messages))


def test_a_trim_reaches_the_low_water_mark_and_the_next_turns_append() -> None:
    limit = tokens(session(8)) - 1
    must = tokens([START[0], *step(7)])
    first = run(session(8), limit, low_water=0.6)
    assert must + 0.4 * (limit - must) < first.tokens <= must + 0.6 * (limit - must) + 10
    assert first.applied == ("condense",)
    second = run(session(9), limit, first.trim_decision, low_water=0.6)
    assert second.applied == ()
    assert second.messages == (*first.messages, *raws(step(8)))
    assert second.trim_decision is first.trim_decision


@pytest.mark.parametrize("recall", ["off", "said"])
def test_old_messages_keep_their_share_next_to_a_long_newest_result(recall: Any) -> None:
    messages = [*session(12), *step(12, size=80)]
    must = tokens([START[0], *step(12, size=80)])
    limit = must + 600
    done = run(messages, limit, low_water=0.5, recall=recall)
    assert must > 0.5 * limit  # a share of the whole limit would leave no room for old messages
    assert must + 0.35 * 600 < done.tokens <= limit
    assert [fate.rule for fate in done.outcomes].count("condense") > 1


def test_the_mark_of_a_sealed_text_is_sent_again() -> None:
    thought = {"type": "thinking", "thinking": [{"type": "text", "text": "hm, " * 300}]}
    answer = {"role": "assistant", "content": [thought, {"type": "text", "text": "So it is."}]}
    messages = [*session(1), answer, {"role": "user", "content": "And what is A003 worth?"}]
    done = run(messages, 150)
    assert [message["role"] for message in done.decoded()][-3:] == ["tool", "assistant", "user"]
    assert done.decoded()[-2] == {"role": "assistant", "content": "[...]"}
    assert done.trim_decision is not None
    kept = TrimDecision.from_json(json.loads(json.dumps(done.trim_decision.to_json())))
    again = run(messages, 150, kept)
    assert (again.messages, again.applied) == (done.messages, ())


def test_needed_messages_stay_while_they_fit() -> None:
    messages = session(8)
    conversation = Conversation.of(raws(messages), needed=[3])
    done = trim_conversation(conversation, 700, Reader(COUNT))
    assert done.messages[2:4] == raws(step(0))
    assert (done.outcomes[4].rule, done.tokens <= 700) == ("drop", True)
    must = tokens([START[0], *step(0), *step(7)])
    tight = trim_conversation(conversation, must - 10, Reader(COUNT))
    assert raws(step(0))[0] not in tight.messages
    assert tight.messages[-2:] == raws(step(7))
    longer = Conversation.of(raws([*messages, *step(8)]), needed=[3])
    again = trim_conversation(longer, must - 10, Reader(COUNT), trim_decision=tight.trim_decision)
    assert again.messages[-2:] == raws(step(8))


def test_priority_zero_is_dropped_first_even_if_needed() -> None:
    conversation = Conversation.of(raws(session(8)), needed=[3], priorities={2: 0, 3: 0})
    done = trim_conversation(conversation, 700, Reader(COUNT))
    assert raws(step(0))[1] not in done.messages


def test_with_recall_a_trim_goes_deeper() -> None:
    limit = tokens(session(8)) - 1
    assert run(session(8), limit, recall="off").tokens > 0.6 * limit
    assert TrimPolicy(recall="said").depth < TrimPolicy().depth
    assert TrimPolicy(recall="said", low_water=0.9).depth == 0.9


def test_a_trim_keeps_more_of_a_conversation_that_grows_slowly() -> None:
    talk = [
        {"role": ("user", "assistant")[place % 2], "content": f"On day {place} we saw bird {place * 7} by the lake."}
        for place in range(401)
    ]
    limit = tokens(talk) // 2
    for policy in (TrimPolicy(), TrimPolicy(recall="said")):
        fixed = replace(policy, low_water=policy.depth)
        more, less = (
            trim_conversation(Conversation.of(raws(talk)), limit, Reader(COUNT), policy=one).tokens
            for one in (policy, fixed)
        )
        assert less + 0.05 * limit < more <= limit


def test_the_sent_prefix_survives_the_next_trim() -> None:
    limit, trim_decision, sent = 1200, None, tuple[bytes, ...]()
    shared = cuts = 0
    for steps in range(2, 30):
        done = run(session(steps), limit, trim_decision, stale=0.3)
        now = done.messages
        if done.applied and sent:
            cuts += 1
            shared += next((n for n, (a, b) in enumerate(zip(sent, now, strict=False)) if a != b), len(sent)) > 2
        trim_decision, sent = done.trim_decision, now
    assert cuts >= 3
    assert shared >= cuts / 2


def test_the_second_trim_changes_only_messages_after_the_first() -> None:
    limit, steps = 900, 8
    first = run(session(steps), limit, low_water=0.5, recall="said")
    settled = sum(message not in raws(session(steps)[2:]) for message in first.messages)
    second = first
    while second is first or not second.applied:
        steps += 1
        second = run(session(steps), limit, first.trim_decision, low_water=0.5, stale=0, recall="said")
    assert settled > 2
    assert second.messages[:settled] == first.messages[:settled]
    assert second.tokens < limit


def test_a_decision_of_another_conversation_is_not_used() -> None:
    other = [{"role": "system", "content": "be bad"}, *session(8)[1:]]
    trim_decision = run(session(8), 600).trim_decision
    # With more room it would be continued.
    assert run(session(8), 800, trim_decision).messages != run(session(8), 800).messages
    assert run(other, 800, trim_decision).messages == run(other, 800).messages


def test_a_higher_limit_keeps_the_decision_and_a_lower_one_trims_again() -> None:
    first = run(session(8), 700)
    assert run(session(8), 800, first.trim_decision).messages == first.messages
    shorter = run(session(8), 300, first.trim_decision)
    assert shorter.tokens <= 300
    assert shorter.applied


def test_find_returns_the_decision_that_covers_most() -> None:
    conversation = Conversation.of_messages(session(5))
    kept = [TrimDecision(conversation.prefix(size, "s"), size, f"k{size}") for size in (3, 7)]
    assert find([*kept, TrimDecision("x", 9, "k9"), TrimDecision("x", 99, "k99")], conversation, "s") == kept[1]
    assert find(kept, conversation, "t") is None


def test_a_decision_holds_no_text_of_the_conversation() -> None:
    trim_decision = run(session(8), 500, recall="all").trim_decision
    assert trim_decision is not None
    kept = json.dumps(trim_decision.to_json())
    assert "page" not in kept
    assert "entry" not in kept


def test_the_clients_cached_prefix_stays_while_it_fits() -> None:
    messages = session(8)
    messages[3] = {**messages[3], "content": [{"type": "text", "text": messages[3]["content"], **MARK}]}
    done = run(messages, 700)
    assert done.messages[:4] == raws(messages[:4])
    tight = run(messages, 250)
    assert tight.tokens <= 250
    assert raws(messages)[3] not in tight.messages


def test_recalled_lines_answer_the_question_and_stay() -> None:
    ask = {"role": "user", "content": "What is entry A003 worth?"}
    limit = 500
    first = run([*session(9), ask], limit, recall="all", strategies=(Drop(),))
    assert b"A003 of page 0 is worth 210" in first.messages[-1]
    assert first.outcomes.actions["recall"] > 0
    answer = {"role": "assistant", "content": "210."}
    second = run(
        [*session(9), ask, answer, {"role": "user", "content": "Thanks."}], limit, first.trim_decision, recall="off"
    )
    assert second.messages[: len(first.messages)] == first.messages
    assert "A003" not in str(run([*session(9), ask], limit, strategies=(Drop(),)).messages[:-1])


def test_recall_works_on_a_turn_without_a_trim() -> None:
    messages = [*session(9), {"role": "user", "content": "Go on."}]
    first = run(messages, 500, recall="all", strategies=(Drop(),))
    messages += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "What is entry A003 worth?"}]
    second = run(messages, 800, first.trim_decision, recall="all", strategies=(Drop(),))
    assert second.applied == ()
    assert second.messages[:-1] == (*first.messages, *raws(messages[-2:-1]))
    assert b"A003 of page 0 is worth 210" in second.messages[-1]
    assert second.tokens == tokens_of(second)
    assert [*second.outcomes][-1].rule == "recall"
    messages += [{"role": "assistant", "content": "210."}, {"role": "user", "content": "Thanks."}]
    third = run(messages, 800, second.trim_decision, recall="off", strategies=(Drop(),))
    assert third.messages == (*second.messages, *raws(messages[-2:]))


def test_a_decision_that_orphans_a_result_is_not_used() -> None:
    messages, limit = session(8), tokens(session(8)) - 1
    draft = Draft.untouched(Conversation.of_messages(messages), Reader(COUNT))
    broken = TrimDecision.of(draft.conversation.prefix(len(messages)), draft.with_decisions({4: DROP}))
    assert run(messages, limit, broken).messages == run(messages, limit).messages


def test_recalled_lines_stay_within_their_share_over_many_turns() -> None:
    limit, messages, trim_decision, most = 700, session(24), None, 0
    for number in range(12):
        messages.append(
            {"role": "user", "content": f"What are entries A{number}03, A{number}05 and A{number}07 worth?"}
        )
        done = run(messages, limit, trim_decision, recall="all", strategies=(Drop(),))
        sent = [encode(json.loads(raw)["content"]) for raw in done.messages]
        most = max(most, sum(len(text.partition(b"[earlier in this conversation]")[2]) // 4 for text in sent))
        trim_decision = done.trim_decision
        messages.append({"role": "assistant", "content": "I see."})
    share = TrimPolicy().recall_share * limit
    assert share / 2 < most <= share


def asked() -> list[dict[str, Any]]:
    """Return a session that ends with a question about an old line and an old call."""
    messages = session(9)
    call = messages[2]["tool_calls"][0]
    call["function"] |= {"arguments": '{"page": 0, "code": "zebra7"}'}
    return [*messages, {"role": "user", "content": "What is entry A003 worth, and which call had zebra7?"}]


def test_a_recalled_call_stays_on_later_turns() -> None:
    first = run(asked(), 500, recall="all", strategies=(Drop(),))
    assert b"zebra7" in first.messages[-1].partition(b"[earlier in this conversation]")[2]
    later = [*asked(), {"role": "assistant", "content": "210."}, {"role": "user", "content": "Thanks."}]
    second = run(later, 500, first.trim_decision, recall="all", strategies=(Drop(),))
    assert second.messages[: len(first.messages)] == first.messages


@pytest.mark.parametrize("strategies", [(Drop(),), (Dedupe(), Condense())])
def test_a_decision_with_a_wrong_number_is_harmless(strategies: tuple[Strategy, ...]) -> None:
    messages = asked()
    trim_decision = run(messages, 500, recall="all", strategies=strategies).trim_decision
    assert trim_decision is not None
    for number in re.finditer(r"\d+", trim_decision.plan):
        for wrong in (0, 1, 5, 99):
            plan = f"{trim_decision.plan[: number.start()]}{wrong}{trim_decision.plan[number.end() :]}"
            done = run(messages, 500, replace(trim_decision, plan=plan), recall="all", strategies=strategies)
            assert tokens_of(done) <= 500


def test_strategies_run_in_order_until_it_fits() -> None:
    twice = [
        *session(4),
        *({**m, "content": step(1)[1]["content"]} if m["role"] == "tool" else m for m in step(7)),
        *step(8),
    ]
    limit = tokens(twice) - 20
    assert run(twice, limit, strategies=(Dedupe(), Drop()), low_water=1.0).applied == ("dedupe",)
    assert run(twice, limit - 300, strategies=(Dedupe(), Drop()), low_water=1.0).applied == ("dedupe", "drop")


@pytest.mark.parametrize("recall", ["off", "said"])
def test_if_dedupe_is_enough_nothing_is_lost(recall: Any) -> None:
    same = {"content": step(0)[1]["content"]}
    again = [message | same if "tool_call_id" in message else message for n in range(20, 24) for message in step(n)]
    messages, end = [*session(5), *again], step(8, size=1)
    done = run([*messages, *end], tokens([*messages, *end]) - 10, recall=recall)
    assert done.applied == ("dedupe",)
    assert [one for one in done.decoded() if "same as" not in str(one)] == [*session(5), *again[::2], *end]
    # If dedupe leaves room for only a turn or two, the trim goes down to the low-water mark.
    more = [*messages, *(message for number in range(30, 50) for message in step(number)), *end]
    assert run(more, tokens(more) - 10, recall=recall).applied == ("dedupe", "condense")
    # The same if other strategies come first.
    assert run(messages, tokens(messages) - 10, strategies=(Condense(), Dedupe())).applied == ("condense",)


class Careless:
    """A faulty strategy that drops half of a unit."""

    name = "careless"
    is_last_word = True
    may_drop = True

    def apply(self, draft: Draft, limit: int) -> Draft:
        return draft.with_decisions({3: DROP, **dict.fromkeys(range(4, 12), DROP)})


def test_units_are_dropped_instead_of_sending_a_broken_result() -> None:
    done = run(session(8), 700, strategies=(Careless(),))
    assert done.applied == ("drop",)
    sent = {str(message.get("tool_call_id")) for message in done.decoded() if message["role"] == "tool"}
    assert sent == {call["id"] for message in done.decoded() for call in message.get("tool_calls", ())}
    assert done.tokens <= 700


def test_messages_pinned_by_the_client_stay() -> None:
    done = trim_conversation(Conversation.of_messages(session(8), pinned=[5, 99]), 500, Reader(COUNT))
    assert all(raw in done.messages for raw in raws(session(8)[4:6]))


def test_a_trim_reports_its_counts() -> None:
    done = run(session(8), 500)
    assert done.tokens_before == tokens(session(8))
    assert done.outcomes.actions["drop"] == len(session(8)) - len(done.messages)
    assert sum(done.outcomes.actions.values()) > done.outcomes.actions["drop"]
    assert done.changed


def test_without_a_dropping_strategy_an_overflow_raises() -> None:
    for strategies in ((), (Dedupe(),), (Dedupe(), Shorten())):
        with pytest.raises(ContextOverflow) as caught:
            run(session(8), 100, strategies=strategies)
        assert caught.value.needed > 100
    assert "drop" not in run(session(8), tokens(session(8)) - 500, strategies=(Shorten(tokens=20),)).outcomes.actions


def test_keep_last_turns_keeps_whole_turns_unchanged() -> None:
    ask = [{"role": "user", "content": "And now?"}, *step(20), *step(21), {"role": "user", "content": "Go on."}]
    messages = [*session(8), *ask]
    kept = trim_conversation(Conversation.of_messages(messages, keep_last_turns=2), 800, Reader(COUNT))
    assert kept.messages[-6:] == raws(ask)
    assert [fate.rule for fate in [*kept.outcomes][-6:]] == ["pinned"] * 6
    assert trim_conversation(Conversation.of_messages(messages), 400, Reader(COUNT)).messages[-6:] != raws(ask)


def test_unread_results_are_sent_whole_while_there_is_room() -> None:
    reminder = {"role": "user", "content": "<system-reminder>Keep the list of tasks up to date.</system-reminder>"}
    messages = [*session(8), *step(20), reminder]
    newest = raws(messages)[-3:]
    room = tokens(messages[-3:]) + tokens(START)
    whole = trim_conversation(Conversation.of_messages(messages), room, Reader(COUNT), policy=TrimPolicy(low_water=0.5))
    assert whole.messages[-3:] == newest
    assert [fate.rule for fate in [*whole.outcomes][-3:]] == ["pinned"] * 3
    # Less room is no reason to refuse the call.
    cut = trim_conversation(Conversation.of_messages(messages), room - 60, Reader(COUNT))
    assert cut.tokens <= room - 60
    assert cut.messages[-1] == newest[-1]
    assert cut.messages[-3:] != newest
    again = trim_conversation(
        Conversation.of_messages(messages), room - 60, Reader(COUNT), trim_decision=cut.trim_decision
    )
    assert (again.messages, again.applied) == (cut.messages, ())


def test_the_assistants_last_words_stay_unless_they_are_long() -> None:
    asked = "Shall it be the first or the second? "
    for times, stays in ((1, True), (30, False)):
        said = {"role": "assistant", "content": asked * times}
        messages = [*session(8), said, {"role": "user", "content": "The second."}]
        done = trim_conversation(Conversation.of_messages(messages), 400, Reader(COUNT))
        assert (done.messages[-2] == raws([said])[0]) is stays


def test_results_that_the_model_has_read_may_be_trimmed() -> None:
    messages = [
        *session(8),
        *step(20),
        {"role": "assistant", "content": "Read."},
        {"role": "user", "content": "Go on."},
    ]
    done = trim_conversation(Conversation.of_messages(messages), 120, Reader(COUNT))
    assert raws(messages)[-3] not in done.messages
    assert done.messages[-2:] == raws(messages)[-2:]


def test_a_task_keeps_text_while_there_is_room() -> None:
    said = {"role": "assistant", "content": "These were all."}
    last = {"role": "user", "content": "And now the next one: " + "entry of a page that has not been read yet, " * 40}
    # The last message is so long that the low-water mark leaves no room for others.
    done = trim_conversation(
        Conversation.of_messages([*session(12), said, last]), tokens([*START, said, last]) + 2, Reader(COUNT)
    )
    assert done.messages == raws([*START, said, last])


ASKED = {
    "role": "user",
    "content": "Migrate the billing service from the old schema, which has a row for each line and carrier, to the new one, "
    "where each shipment has a row of its own that names its seat, queue, shard, quota and report, and keep every refund "
    "that was written between March and June. Never touch table LEDGER_7.",
}
PRESSED = {
    "role": "user",
    "content": " ".join(f"Row {n} of the log says code {n * 31} for host h{n}." for n in range(60)),
}


def pressed(limit: int, **policy: Any) -> tuple[list[dict[str, Any]], TrimmedConversation]:
    """Return a turn on which pinned messages leave no room for the task."""
    messages = [START[0], ASKED, *session(12)[2:], PRESSED]
    first = run(messages, limit, **policy)
    assert first.decoded()[1]["content"] == "[...]"
    return [
        *messages,
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": "What was I to keep?"},
    ], first


@pytest.mark.parametrize("recall", ["off", "said"])
def test_a_removed_task_comes_back_with_the_next_trim(recall: Any) -> None:
    limit = tokens([START[0], PRESSED]) + 30
    messages, first = pressed(limit, recall=recall)
    second = run(messages, limit, first.trim_decision, recall=recall)
    assert second.applied
    assert second.decoded()[1] == ASKED
    third = run([*messages, *step(90, size=1)], limit, second.trim_decision, recall=recall)
    assert third.messages[:2] == second.messages[:2]


@pytest.mark.parametrize("recall", ["off", "said"])
def test_a_removed_task_comes_back_as_soon_as_there_is_room(recall: Any) -> None:
    limit = tokens([START[0], PRESSED]) + 30
    messages, first = pressed(limit, recall=recall)
    second = run(messages, 2 * limit, first.trim_decision, recall=recall)
    assert second.applied == ()
    assert second.decoded()[1] == ASKED
    assert second.messages[2] == first.messages[2]
    assert second.trim_decision is not None
    assert second.trim_decision is not first.trim_decision
    assert [fate.rule for fate in second.outcomes][1] == "kept"
    third = run([*messages, *step(90)], 2 * limit, second.trim_decision, recall=recall)
    assert third.trim_decision is second.trim_decision
    assert third.messages[: len(second.messages)] == second.messages


def test_a_long_task_keeps_its_start_if_there_is_room() -> None:
    task = {"role": "user", "content": "".join(f"Point {n}: look at page {n} again. " for n in range(400))}
    last = {"role": "user", "content": "And now the next one: " + "entry of a page that has not been read yet, " * 40}
    messages = [START[0], task, *session(12)[2:], {"role": "assistant", "content": "Done."}, last]
    done = trim_conversation(Conversation.of_messages(messages), tokens([last]) + 150, Reader(COUNT))
    told = json.loads(done.messages[1])["content"]
    assert told.startswith("Point 0: look at page 0 again.")
    assert done.tokens <= tokens([last]) + 150


def test_the_task_comes_first_in_little_room() -> None:
    task = {
        "role": "user",
        "content": "".join(f"Find order {n}, and look whether it was paid before. " for n in range(90)),
    }
    last = {"role": "user", "content": "And now the next one: " + "entry of a page that has not been read yet, " * 40}
    found = [{"role": "assistant", "content": f"Order A{n} is at depot {n * 7}."} for n in range(12)]
    must = tokens([START[0], {**task, "content": "[...]"}, last])
    for room in range(75, 135, 10):
        done = run([START[0], task, *found, last], must + room, recall="said")
        assert "Find order 0," in done.decoded()[1]["content"]
        assert done.tokens <= must + room


def test_a_message_pinned_later_comes_back() -> None:
    first = run(session(8), 600)
    gone = next(index for index, fate in enumerate(first.outcomes) if fate.rule == "drop")
    conversation = Conversation.of_messages(session(8), pinned=[gone])
    done = trim_conversation(conversation, 600, Reader(COUNT), trim_decision=first.trim_decision)
    assert raws(session(8))[gone] in done.messages
    assert done.trim_decision is not first.trim_decision


def test_a_new_choice_is_sent_if_the_old_prefix_does_not_fit() -> None:
    limit = tokens(session(12)) - 300
    first = run(session(8), limit - 300, low_water=0.9)
    stale, fresh = (run(session(12), limit, first.trim_decision, stale=share, low_water=0.9) for share in (100.0, 0.0))
    assert stale.applied == ("condense",)
    assert stale.messages == fresh.messages


# --- another reader, other marks -------------------------------------------------------------------------------------


def test_another_worker_sends_the_same_bytes() -> None:
    first = run(session(8), 500, recall="all")
    reader = Reader(COUNT)
    again = trim_conversation(
        Conversation.of_messages([*session(8), *step(8)], reader), 700, reader, trim_decision=first.trim_decision
    )
    assert again.messages == (*first.messages, *raws(step(8)))
    assert again.trim_decision is first.trim_decision


def test_sent_messages_are_rendered_and_checked_once_despite_new_framing() -> None:
    plain, limit = Reader(COUNT), tokens(session(8)) - 1
    policy = TrimPolicy(recall="said")

    def turn(steps: int, trim_decision: TrimDecision | None, frame: int) -> TrimmedConversation:
        reader = plain.with_counter(COUNT, "", Framing(call=frame))
        return trim_conversation(
            Conversation.of_messages(session(steps), reader), limit, reader, trim_decision=trim_decision, policy=policy
        )

    first = turn(8, None, 0)
    dearer = turn(9, first.trim_decision, 3)
    assert first.sent is not None is not dearer.sent
    assert dearer.sent.rendered is first.sent.rendered
    assert dearer.messages == (*first.messages, *raws(step(8)))
    calls = sum(b"tool_calls" in raw for raw in dearer.messages)
    assert dearer.tokens == tokens_of(dearer) + 3 * calls
    assert sum(fate.tokens_after for fate in dearer.outcomes) == dearer.tokens
    assert turn(8, first.trim_decision, 0).sent is first.sent


def test_trims_of_other_conversations_do_not_evict_cached_facts() -> None:
    counted: list[bytes] = []

    def count_tokens(messages: Sequence[bytes]) -> Sequence[int]:
        counted.extend(messages)
        return COUNT(messages)

    names = [f"agent-{number}" for number in range(8)]
    # enough for facts about each conversation, and for the messages of one or two
    reader, policy, trim_decisions = (
        Reader(count_tokens, limit_bytes=2_000_000),
        TrimPolicy(recall="said"),
        dict[str, TrimDecision | None](),
    )
    for turn in range(4):
        for name in names:
            told = [{**message, "content": f"{message['content']} {name}"} for message in session(20 + turn)]
            counted.clear()
            done = trim_conversation(
                Conversation.of_messages(told, reader),
                1_800,
                reader,
                trim_decision=trim_decisions.get(name),
                policy=policy,
            )
            assert len(counted) > 40 if turn == 0 else len(counted) <= len(step(0)) + 1
            assert bool(done.applied) == (turn == 0)
            trim_decisions[name] = done.trim_decision


def parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each content as a part, so that only the cache mark changes."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]} if message["content"] else message
        for message in messages
    ]


def mark(messages: list[dict[str, Any]], *places: int) -> list[dict[str, Any]]:
    found = list(messages)
    for place in places:
        found[place] = {**found[place], "content": [{**found[place]["content"][0], **MARK}]}
    return found


def test_a_moved_cache_mark_is_sent_only_at_its_new_place() -> None:
    limit, plain = 700, parts(session(8))
    first = trim_conversation(Conversation.of_messages(plain), limit, Reader(COUNT))
    one, *_, other = (index for index, fate in enumerate(first.outcomes) if fate.rule == "condense")
    reader = Reader(COUNT)
    for places in ([one], [other], [], [one, other]):
        conversation = Conversation.of_messages(mark(plain, *places), reader)
        done = trim_conversation(conversation, limit, reader, trim_decision=first.trim_decision)
        assert done.trim_decision is first.trim_decision
        sent = [index for index, fate in enumerate(done.outcomes) if fate.rule != "drop"]
        assert [sent[n] for n, raw in enumerate(done.messages) if b"cache_control" in raw] == places
        assert done.tokens == sum(COUNT(done.messages))


def test_a_prefix_is_recognized_if_a_cache_mark_changed_texts_to_lists() -> None:
    limit, plain = 700, session(8)
    first = trim_conversation(Conversation.of_messages(plain), limit, Reader(COUNT))
    assert first.trim_decision is not None
    listed = [
        one if one["role"] == "tool" else {**one, "content": [{"type": "text", "text": one["content"], **MARK}]}
        for one in plain
    ]
    reader = Reader(COUNT)
    for messages in (listed, plain, listed):
        done = trim_conversation(
            Conversation.of_messages(messages, reader), limit, reader, trim_decision=first.trim_decision
        )
        assert done.trim_decision is first.trim_decision
        assert [fate.rule for fate in done.outcomes] == [fate.rule for fate in first.outcomes]


def test_shortened_messages_keep_their_present_content_form() -> None:
    limit, plain = 700, session(8)
    plain[4]["content"] = f"<think>{'Hm, entry A102. ' * 9}</think>{plain[4]['content']}"
    listed = parts(plain)
    forms = [
        plain,
        listed,
        mark(listed, 1, 2, 3, 5, 6),
        [dict(reversed(one.items())) for one in plain],
        mark(listed, 4, 5),
        [*plain[:5], *listed[5:]],
    ]

    def told(done: TrimmedConversation) -> Any:
        return done.messages, done.tokens_before, done.tokens, [*done.outcomes], done.trim_decision

    def count_tokens(messages: Sequence[bytes]) -> Sequence[int]:
        # like a counter of thinking, which it finds by its place in a text
        return [len(raw) // (3 if b'"<think>' in raw else 4) for raw in map(plain_of, messages)]

    warm, trim_decisions = Reader(count_tokens), list[TrimDecision | None]([None])
    for form in (*forms, *forms[::-1]):
        for trim_decision in trim_decisions:
            found, expected = (
                trim_conversation(Conversation.of_messages(form, reader), limit, reader, trim_decision=trim_decision)
                for reader in (warm, Reader(count_tokens))
            )
            assert told(found) == told(expected)
        trim_decisions = [None, found.trim_decision]


# --- priorities ------------------------------------------------------------------------------------------------------


def prioritised(limit: int, priorities: dict[int, float], **policy: Any) -> TrimmedConversation:
    conversation = Conversation.of_messages(session(8), priorities=priorities)
    return trim_conversation(conversation, limit, Reader(COUNT), policy=TrimPolicy(low_water=1.0, **policy))


def test_priority_zero_is_dropped_before_anything_else_changes() -> None:
    limit = tokens(session(8)) - 20
    done = prioritised(limit, {7: 0.0})
    assert {
        index: fate.rule for index, fate in enumerate(done.outcomes) if fate.tokens_after != fate.tokens_before
    } == {
        6: "drop",
        7: "drop",
    }
    assert done.applied == ("drop",)
    assert done.outcomes.actions == {"drop": 2}


def test_only_as_much_of_priority_zero_is_dropped_as_needed() -> None:
    done = prioritised(tokens(session(8)) - 20, {1: 0.0, 5: 0.0, 7: 0.0})
    assert [index for index, fate in enumerate(done.outcomes) if fate.rule == "drop"] == [4, 5]


def test_priority_zero_is_not_dropped_without_a_dropping_strategy() -> None:
    done = prioritised(tokens(session(8)) - 20, {7: 0.0}, strategies=(Shorten(tokens=20),))
    assert "drop" not in done.outcomes.actions


def test_a_high_priority_is_kept_longer() -> None:
    plain = prioritised(500, {})
    index = next(index for index, fate in enumerate(plain.outcomes) if fate.role == "tool" and fate.rule == "condense")
    high, low = (prioritised(500, {index: worth}) for worth in (50.0, 0.01))
    assert low.outcomes[index].tokens_after < plain.outcomes[index].tokens_after < high.outcomes[index].tokens_after


def test_units_are_dropped_by_priority_and_then_age() -> None:
    done = prioritised(tokens(session(8)) // 2, {3: 2.0, 9: 0.5}, strategies=(Drop(),))
    gone = [index for index, fate in enumerate(done.outcomes) if fate.rule == "drop"]
    assert {8, 9} <= set(gone)
    assert {4, 5} <= set(gone)
    assert not {2, 3} & set(gone)


# --- the report ------------------------------------------------------------------------------------------------------


def test_every_message_has_an_outcome_also_on_resumed_turns() -> None:
    again = {**step(9)[0]["tool_calls"][0], "id": "x"}
    twice = [*session(6), *step(9, size=7), {**step(9)[0], "tool_calls": [again]}]
    twice += [{**step(9, size=7)[1], "tool_call_id": "x"}, {"role": "assistant", "content": "That was all."}]
    twice += [{"role": "user", "content": "What is entry A003 worth?"}]
    strategies = (Dedupe(), Shorten(tokens=45), Drop())
    first = run(twice, 400, strategies=strategies, recall="all", low_water=0.9)
    assert {"dedupe", "shorten", "drop"} <= first.outcomes.actions.keys()
    assert {fate.rule for fate in first.outcomes} >= {"pinned", "dedupe", "shorten", "drop"}
    assert [fate.role for fate in first.outcomes] == [message["role"] for message in twice]
    assert sum(fate.tokens_before for fate in first.outcomes) == first.tokens_before == tokens(twice)
    assert sum(fate.tokens_after for fate in first.outcomes) == first.tokens == sum(COUNT(first.messages))
    assert first.outcomes.actions == {
        rule: count
        for rule in ("dedupe", "shorten", "drop", "recall")
        if (count := sum(fate.rule == rule for fate in first.outcomes))
    }
    assert first.trim_decision is not None
    kept = TrimDecision.from_json(json.loads(json.dumps(first.trim_decision.to_json())))
    resumed = run([*twice, {"role": "assistant", "content": "210."}], tokens(twice) - 100, kept, strategies=strategies)
    assert resumed.outcomes.actions == first.outcomes.actions
    assert [fate.rule for fate in [*resumed.outcomes][:-3]] == [fate.rule for fate in [*first.outcomes][:-2]]
    assert resumed.applied == ()


def test_recalled_lines_are_reported() -> None:
    ask = {"role": "user", "content": "What is entry A003 worth?"}
    done = run([*session(9), ask], 500, recall="all", strategies=(Drop(),))
    assert done.outcomes[-1].rule == "recall"
    assert done.outcomes[-1].tokens_after > done.outcomes[-1].tokens_before
    assert done.outcomes.actions["recall"] == 1


def test_a_conversation_that_fits_is_reported_as_kept() -> None:
    done = run(session(2), 10_000)
    assert [fate.rule for fate in done.outcomes] == ["pinned", "pinned", "kept", "kept", "pinned", "pinned"]
    assert done.outcomes.actions == {}
    assert done.decoded() == session(2)


def test_nothing_is_recalled_in_a_sealed_message() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    ask = {"role": "user", "content": [{"type": "text", "text": "What is entry A003 worth?"}, image]}
    done = run([*session(9), ask], 500, recall="all", strategies=(Drop(),))
    assert done.messages[-1] == encode(ask)


# --- deadline --------------------------------------------------------------------------------------------------------


class Clock:
    """Expire at the `calls`-th call."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


def timed(
    calls: int, trim_decision: TrimDecision | None = None, limit: int = 700, **policy: Any
) -> tuple[TrimmedConversation, bool]:
    clock = Clock(calls)
    conversation = Conversation.of_messages(session(30))
    done = trim_conversation(
        conversation, limit, Reader(COUNT), trim_decision=trim_decision, policy=TrimPolicy(**policy), expired=clock
    )
    assert problems(conversation, Conversation.of(done.messages), sum(COUNT(done.messages)), limit) == []
    return done, clock.left < 0


@pytest.mark.parametrize("recall", ["off", "all"])
def test_past_the_deadline_whole_units_are_dropped_and_it_fits(recall: Any) -> None:
    calls, late = 0, True
    while late:
        done, late = timed(calls, recall=recall)
        if late and recall == "off":
            assert done.applied == ("drop",)
            assert set(done.outcomes.actions) == {"drop"}
        calls += 1
    # 1,800 blocks are read, scored and offered more than once: the clock is looked at often enough
    assert calls > 15
    assert done.applied == ("condense",)


def test_past_the_deadline_the_sent_prefix_stays_and_more_is_dropped() -> None:
    first = run(session(8), 700)
    done, late = timed(0, first.trim_decision, limit=800)
    assert late
    assert done.applied == ("drop",)
    cut = [fate.rule for fate in first.outcomes].count("condense")
    assert cut > 0
    assert all(
        fate.rule in ("drop", was.rule) for was, fate in zip([*first.outcomes][:-2], done.outcomes, strict=False)
    )


def test_past_the_deadline_not_even_the_task_is_read() -> None:
    messages = [{"role": "user", "content": "word " * 4000}, *session(3)[2:], {"role": "user", "content": "on"}]
    done = trim_conversation(Conversation.of_messages(messages), 100, Reader(COUNT), expired=lambda: True)
    assert done.decoded()[0] == {"role": "user", "content": "[...]"}


def test_past_the_deadline_messages_that_may_not_be_dropped_raise() -> None:
    messages = [
        *session(3),
        {"role": "user", "content": "x" * 9000},
        *step(30, size=400),
        {"role": "user", "content": "on"},
    ]
    with pytest.raises(ContextOverflow):
        trim_conversation(
            Conversation.of_messages(messages),
            500,
            Reader(COUNT),
            policy=TrimPolicy(strategies=(Shorten(tokens=20),)),
            expired=lambda: True,
        )


def test_past_the_deadline_an_overflow_raises_as_usual() -> None:
    messages = [*session(3), {"role": "user", "content": "x" * 9000}]
    with pytest.raises(ContextOverflow):
        trim_conversation(Conversation.of_messages(messages), 500, Reader(COUNT), expired=lambda: True)


def test_a_decision_that_takes_too_long_to_read_is_skipped() -> None:
    first = run(session(30), 3500)
    done, late = timed(0, first.trim_decision, limit=3500)
    assert late
    assert list(done.outcomes.actions) == ["drop"]


def test_a_decision_made_without_thinking_is_not_applied_with_it() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    said = {"role": "assistant", "content": "Some words. " * 20 + "The ledger of Zanzibar is worth 7700."}
    question = "What is the ledger of Zanzibar worth?"
    bare = [*START, said, {"role": "user", "content": "Go on."}, *session(8)[2:], {"role": "user", "content": question}]
    reader, policy = Reader(COUNT), TrimPolicy(recall="all", strategies=(Drop(),))
    first = trim_conversation(Conversation.of_messages(bare), 500, reader, policy=policy)
    assert "7700" in first.decoded()[-1]["content"]
    thinking = [*bare]
    thinking[2] = {**said, "content": [thought, {"type": "text", "text": said["content"]}]}
    thinking[-1] = {"role": "user", "content": [{"type": "text", "text": question}]}
    again = trim_conversation(
        Conversation.of_messages(thinking), 500, reader, trim_decision=first.trim_decision, policy=policy
    )
    assert again.tokens <= 500
    assert again.trim_decision != first.trim_decision
