from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import pytest

from gateway.core.conversation.units import Conversation
from gateway.core.trimming.draft import DROP, KEEP, SUMMARIZED, Decision, Draft, DuplicateResult
from gateway.core.trimming.reader import Framing, Reader, counter_of
from gateway.core.trimming.report import MessageOutcome, MessageOutcomes, TrimmedConversation, TrimmedPrefix, rule_of
from gateway.core.trimming.trim_decision import TrimDecision

TEXT = "a line of text that is long enough to be a block of its own\n"


@pytest.mark.parametrize(
    ("decision", "rule"),
    [(DROP, "drop"), (DuplicateResult(1), "dedupe"), ((0,), "condense"), ((), "condense"), (KEEP, "recall")],
)
def test_rule_of_each_decision(decision: Decision, rule: str) -> None:
    assert rule_of(decision, "condense") == rule


def test_blocks_without_a_strategy_count_as_drop() -> None:
    assert rule_of((), "") == rule_of((0,), "") == "drop"


def draft() -> Draft:
    messages = [{"role": role, "content": TEXT * 9} for role in ("user", "assistant", "assistant", "user")]
    return Draft.untouched(Conversation.of_messages(messages), Reader(counter_of(len)))


def test_a_trimmed_prefix_holds_only_changed_messages() -> None:
    before = draft()
    done = before.with_decisions({0: (0,), 1: DROP}).with_rule(before, "shorten")
    sent = TrimmedPrefix.of(replace(done, recalls={3: ((1, (2,)),)}))
    assert list(sent.rendered) == [0, 1, 3]
    assert sent.rule_by_index == {0: "shorten", 1: "drop", 3: "recall"}
    weights, now = sent.token_counts(before.original, Framing()), replace(done, recalls=sent.recalls)
    assert weights.tokens == {index: now.tokens_of(index) for index in sent.rendered}
    assert weights.saved == before.total() - now.total()
    assert sent.size_bytes > sum(len(made.raw or b"") for made in sent.rendered.values())


def test_a_trimmed_prefix_counts_the_present_framing() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": "I do, and think of it. " * 20, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "here it is"},
    ]
    reader = Reader(counter_of(len))
    for framing in (Framing(), Framing(call=7), Framing(call=7), Framing()):
        framed = reader.with_counter(counter_of(len), "", framing)
        now = Draft.untouched(Conversation.of_messages(messages), framed).with_decisions({1: ()})
        sent = framed.cached("sent", "of them", partial(TrimmedPrefix.of, now), lambda sent: sent.size_bytes)
        assert sent.token_counts(now.original, framing).tokens == {1: now.tokens_of(1)}
        assert now.original[1] == reader.token_counts(now.conversation)[1] + framing.call


def test_the_report_has_each_outcome_and_the_totals() -> None:
    before = draft()
    done = before.with_decisions({0: (0,), 1: DROP}).with_rule(before, "shorten")
    sent = TrimmedPrefix.of(replace(done, recalls={3: ((1, (2,)),)}))
    trim_decision = TrimDecision.of("x", done)
    fitted = TrimmedConversation.with_prefix(
        before.conversation,
        before.original,
        before.total(),
        sent=sent,
        rendered_tokens=sent.token_counts(before.original, Framing()),
        trim_decision=trim_decision,
        applied=("shorten",),
    )
    assert [fate.rule for fate in fitted.outcomes] == ["shorten", "drop", "kept", "recall"]
    assert fitted.outcomes[2] == MessageOutcome("assistant", before.original[2], before.original[2], "kept")
    assert sum(fate.tokens_after for fate in fitted.outcomes) == fitted.tokens == sum(counter_of(len)(fitted.messages))
    assert fitted.outcomes.actions == {"shorten": 1, "drop": 1, "recall": 1}
    orphaned = {fate.rule: fate.tokens_before - fate.tokens_after for fate in fitted.outcomes}
    assert fitted.saved_by_rule == {"shorten": orphaned["shorten"], "drop": orphaned["drop"]}
    assert len(fitted.keys) == len(fitted.messages) == 3
    assert fitted.keys == Conversation.of(fitted.messages).keys


def test_a_conversation_that_fits_has_no_decision_and_no_actions() -> None:
    before = draft()
    fitted = TrimmedConversation.untouched(before.conversation, before.original, before.total())
    assert fitted.messages == before.conversation.messages
    assert (fitted.changed, fitted.trim_decision, fitted.outcomes.actions) == (False, None, {})
    assert [fate.rule for fate in fitted.outcomes] == ["kept", "kept", "kept", "pinned"]


def test_outcomes_in_columns_are_read_one_by_one() -> None:
    rows = [
        MessageOutcome("user", 9, 9, "pinned"),
        *[MessageOutcome("tool", 400 + n, n % 2, "drop") for n in range(200)],
    ]
    rows += [MessageOutcome("tool", 5, 3, "condense"), MessageOutcome("user", 2, 2, "kept")]
    fates = MessageOutcomes.of(rows)
    assert (len(fates), list(fates), fates[1], fates[-1]) == (len(rows), rows, rows[1], rows[-1])
    assert fates.actions == {"drop": 200, "condense": 1}
    assert msgspec.json.decode(msgspec.json.encode(fates), type=MessageOutcomes) == fates
    assert len(msgspec.json.encode(fates)) < len(msgspec.json.encode(rows)) / 2


def test_no_messages_have_no_outcomes() -> None:
    assert (MessageOutcomes.of([]), len(MessageOutcomes()), list(MessageOutcomes()), MessageOutcomes().actions) == (
        MessageOutcomes(),
        0,
        [],
        {},
    )


def test_gap_marks_next_to_a_summary_are_not_counted_as_summarized() -> None:
    assert rule_of((), "summarize") == "drop"
    assert rule_of(SUMMARIZED, "summarize") == "summarize"
    assert rule_of((1, 2), "condense") == "condense"
