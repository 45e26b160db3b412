from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.core.conversation.units import Conversation
from gateway.core.trimming.draft import DROP, KEEP, SUMMARIZED, Draft, DuplicateResult, SummaryEntry
from gateway.core.trimming.reader import Reader, counter_of
from gateway.core.trimming.strategies import (
    DEFAULT,
    Condense,
    Dedupe,
    Drop,
    Shorten,
    Strategy,
    Summarize,
    drop_priority_zero,
    fill_with_newest,
    strategies_of,
)
from gateway.core.trimming.summary import Passage, SummaryNeeded

LINES = "".join(f"line number {n} with A{n}B{n}C{n} {'x' * 20}\n" for n in range(60))
USER = {"role": "user", "content": "task: " + LINES}
LAST = {"role": "user", "content": "on"}


def said(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def draft_of(*messages: dict[str, Any]) -> Draft:
    return Draft.untouched(Conversation.of_messages(messages), Reader(counter_of(len)))


def test_every_default_is_a_strategy_with_its_own_name() -> None:
    strategies: list[Strategy] = [Dedupe(), Condense(), Shorten(), Drop()]
    assert [strategy.name for strategy in strategies] == ["dedupe", "condense", "shorten", "drop"]
    assert tuple(strategies) == DEFAULT


def test_shorten_keeps_head_and_tail_and_stops_when_it_fits() -> None:
    draft = draft_of(said(LINES), said(LINES), said("short"), LAST)
    done = Shorten(tokens=300).apply(draft, draft.total() - 100)
    assert [decision == KEEP for decision in done.decisions] == [False, True, True, True]
    shown = str(json.loads(done.sent().messages[0])["content"])
    assert shown.startswith("line number 0 ")
    assert shown.endswith(LINES[-40:])
    assert " omitted]" in shown
    assert 200 < len(shown) < 400


def test_shorten_skips_messages_that_are_only_a_little_longer() -> None:
    draft = draft_of(USER, said(LINES[:550]), said(LINES), LAST)
    done = Shorten(tokens=300).apply(draft, 0)
    assert [decision == KEEP for decision in done.decisions] == [False, True, False, True]


def test_shorten_skips_messages_with_long_calls() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": json.dumps({"x": "y" * 200})}}
    caller = {"role": "assistant", "content": "Look.", "tool_calls": [call]}
    answer = {"role": "tool", "tool_call_id": "a", "content": "seen"}
    done = Shorten(tokens=50).apply(draft_of(USER, caller, answer, LAST), 0)
    assert json.loads(done.rendered(1).raw or b"") == caller


def test_shorten_skips_signed_messages() -> None:
    signed = {**said(LINES), "reasoning_details": [{"data": "x"}]}
    done = Shorten(tokens=50).apply(draft_of(USER, signed, said(LINES), LAST), 0)
    assert [decision == KEEP for decision in done.decisions] == [False, True, False, True]


def test_drop_removes_the_oldest_units_but_not_the_task() -> None:
    draft = draft_of(USER, said("one" * 50), said("two" * 50), said("three"), LAST)
    done = Drop().apply(draft, draft.total() - 10)
    assert done.decisions == (KEEP, DROP, KEEP, KEEP, KEEP)


def test_drop_cuts_the_task_last_and_as_little_as_needed() -> None:
    draft = draft_of(USER, said("one"), LAST)
    assert Drop().apply(draft, 200).decisions == ((0,), DROP, KEEP)
    assert Drop().apply(draft, 40).decisions == ((), DROP, KEEP)


def test_a_sealed_task_is_not_cut() -> None:
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x" * 500}}]}
    assert Drop().apply(draft_of(image, said("one"), LAST), 100).decisions == (KEEP, DROP, KEEP)


def test_condense_drops_text_beyond_its_reading_limit() -> None:
    draft = draft_of({"role": "user", "content": "go"}, said(LINES), said(LINES.replace("A", "D")), LAST)
    unread = Condense(most_characters=len(LINES) + 100).apply(draft, 4000)
    assert unread.decisions == (KEEP, DROP, KEEP, KEEP)
    # If it is read, some of it is kept.
    read = Condense().apply(draft, 4000)
    assert isinstance(read.decisions[1], tuple)


def test_a_too_long_text_does_not_remove_older_ones() -> None:
    draft = draft_of(USER, said("found: id 4711"), said(LINES * 3), said("then: id 4712"), LAST)
    done = Condense(most_characters=len(LINES)).apply(draft, draft.tokens_of(0) + 300)
    assert done.decisions == (KEEP, KEEP, DROP, KEEP, KEEP)
    # Blocks of the units that were read are still chosen.
    tight = Condense(most_characters=len(LINES) + 200).apply(draft, 300)
    assert isinstance(tight.decisions[0], tuple)
    assert tight.decisions[2] == DROP
    assert tight.total() <= 300


def test_strategies_are_in_the_configured_order() -> None:
    found = strategies_of(["shorten", "condense", "drop"], shorten_tokens=50)
    assert found == (Shorten(50), Condense(), Drop())
    assert strategies_of([], shorten_tokens=50) == ()


def test_an_unknown_strategy_is_refused_by_name() -> None:
    with pytest.raises(
        ValueError, match="'shrink' is no strategy; there are dedupe, condense, shorten, summarize, drop"
    ):
        strategies_of(["dedupe", "shrink"], shorten_tokens=50)


def looks(*contents: str) -> list[dict[str, Any]]:
    """Return a call and its result for each id."""
    found: list[dict[str, Any]] = []
    for name, content in zip("abcdefgh", contents, strict=False):
        call = {"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}}
        found.append({"role": "assistant", "content": None, "tool_calls": [call]})
        found.append({"role": "tool", "tool_call_id": name, "content": content})
    return found


def test_the_newest_reference_to_a_dropped_result_gets_its_content_back() -> None:
    draft = Dedupe().apply(draft_of(USER, *looks(LINES, LINES, LINES), LAST), 0)
    assert draft.decisions[4::2] == (DuplicateResult(2), DuplicateResult(2))
    done = Drop().apply(draft, draft.total() - 10)
    assert done.decisions == (KEEP, DROP, DROP, KEEP, (), KEEP, KEEP, KEEP)
    assert done.total() <= draft.total() - 10
    assert Drop().apply(draft, 100).decisions[1:7] == (DROP,) * 6


def test_no_reference_to_a_shortened_result_remains() -> None:
    items = [{"id": n, "name": f"name {n} of a long list of items"} for n in range(60)]
    draft = draft_of(SHORT, *looks(json.dumps(items[:40]), json.dumps(items[20:]), LINES, LINES), LAST)
    pointing = Dedupe().apply(draft, 0)
    assert pointing.decisions[2:9:2] == (KEEP, DuplicateResult(2, tuple(range(20))), KEEP, DuplicateResult(6))
    limit = pointing.total() - 100
    first = Shorten(tokens=300).apply(pointing, limit)
    assert isinstance(first.decisions[2], tuple)
    assert first.decisions[4] == KEEP or isinstance(first.decisions[4], tuple)
    assert first.total() <= limit
    all_of_it = Shorten(tokens=300).apply(pointing, 0)
    assert all(isinstance(decision, tuple) for decision in all_of_it.decisions[2:9:2])


def test_an_unread_result_leaves_its_content_to_the_newest_reference() -> None:
    draft = Dedupe().apply(draft_of(USER, *looks(LINES, "other", LINES, "more", LINES, "end"), LAST), 0)
    done = Condense(most_characters=len(LINES) + 10).apply(draft, draft.total() + 1000)
    assert done.decisions[2:12:2] == ((), KEEP, (), KEEP, KEEP)
    assert done.total() <= draft.total()


def test_restored_units_refer_only_to_sent_results() -> None:
    same = "status ok and all is well\n" * 40
    draft = draft_of({"role": "user", "content": "poll"}, *looks(same, same, "short", same), LAST)
    pointing = Dedupe().apply(draft, 0)
    chosen = pointing.with_decisions(dict.fromkeys(range(1, 9), DROP))
    room = chosen.total() + draft.tokens_of(2) + 700
    done = fill_with_newest(pointing, chosen, room)
    assert done.decisions[8] == KEEP
    assert done.decisions[4] == ()
    assert done.total() <= room
    tight = fill_with_newest(pointing, chosen, chosen.total() + 500)
    assert tight.decisions[8] == DROP
    assert tight.decisions[6] == KEEP


def test_drop_and_shorten_start_with_the_lowest_priority() -> None:
    messages = [USER, said(LINES), said(LINES), LAST]
    conversation = Conversation.of_messages(messages, priorities={0: 3.0, 1: 2.0})
    draft = Draft.untouched(conversation, Reader(counter_of(len)))
    assert Drop().apply(draft, draft.total() - 10).decisions == (KEEP, KEEP, DROP, KEEP)
    assert [d == KEEP for d in Shorten().apply(draft, draft.total() - 10).decisions] == [True, True, False, True]


def test_priority_zero_is_dropped_first_but_never_the_task() -> None:
    messages = [USER, said("one"), said("two"), LAST]
    conversation = Conversation.of_messages(messages, priorities={0: 0.0, 1: 0.0})
    draft = Draft.untouched(conversation, Reader(counter_of(len)))
    assert drop_priority_zero(draft, 0).decisions == (KEEP, DROP, KEEP, KEEP)
    empty = draft.with_decisions({1: DROP, 2: DROP})
    assert fill_with_newest(draft, empty, 10 * draft.total()).decisions == (KEEP, DROP, KEEP, KEEP)


# --- summaries ----------------------------------------------------------------------------------------------------

SHORT = {"role": "user", "content": "task"}
ONE, TWO, THREE = said("one " * 200), said("two " * 200), said("three " * 200)


def summing(use: Any = "ask", texts: Any = None, *, tokens: int = 100, most: int = 10_000) -> Summarize:
    return Summarize(tokens).with_summaries(use, texts or {}, most)


def wanted(draft: Draft, strategy: Summarize, limit: int) -> Passage:
    with pytest.raises(SummaryNeeded) as asked:
        strategy.apply(draft, limit)
    return asked.value.passage


def test_a_summary_is_requested_for_the_oldest_units() -> None:
    draft = draft_of(SHORT, ONE, TWO, THREE, LAST)
    limit = draft.total() - 1000
    passage = wanted(draft, summing(), limit)
    assert [json.loads(raw)["content"][:3] for raw in passage.messages] == ["one", "two"]
    assert (passage.count, passage.earlier) == (2, None)
    done = summing("known", {passage.id: "both"}).apply(draft, limit)
    assert done.decisions == (KEEP, SummaryEntry(passage.id, 2, "both"), SUMMARIZED, KEEP, KEEP)
    assert done.total() <= limit
    assert done.inserted() == (1, done.sent().messages[1])
    assert json.loads(done.sent().messages[1]) == said("[summary of 2 earlier messages]\nboth")


def test_the_next_summary_includes_the_earlier_one() -> None:
    draft = draft_of(SHORT, ONE, TWO, THREE, LAST)
    first = wanted(draft, summing(), draft.total() - 100)
    before = summing("known", {first.id: "one"}).apply(draft, draft.total() - 100)
    second = wanted(before, summing(), before.total() - 100)
    assert (second.earlier, second.count, len(second.messages)) == ("one", 2, 1)
    done = summing("known", {second.id: "one, two"}).apply(before, before.total() - 100)
    assert done.decisions == (KEEP, SummaryEntry(second.id, 2, "one, two"), SUMMARIZED, KEEP, KEEP)


def test_a_summary_in_the_frozen_prefix_is_unchanged() -> None:
    draft = draft_of(SHORT, ONE, TWO, THREE, LAST)
    first = wanted(draft, summing(), draft.total() - 100)
    before = summing("known", {first.id: "one"}).apply(draft, draft.total() - 100).reopened(3)
    assert summing().apply(before, 100) is before


@pytest.mark.parametrize("use", ["off", "known"])
def test_no_summary_is_requested_without_permission(use: str) -> None:
    draft = draft_of(SHORT, ONE, TWO, LAST)
    assert summing(use).apply(draft, 500) is draft


def test_no_summary_is_requested_without_use() -> None:
    draft = draft_of(SHORT, ONE, TWO, LAST)
    assert summing(most=100).apply(draft, 90) is draft
    assert summing(tokens=2000).apply(draft, 1000) is draft
    assert summing().apply(draft_of(ONE, TWO), 100).decisions == (KEEP, KEEP)
    dropped = draft.with_decisions({1: DROP, 2: DROP})
    assert summing().apply(dropped, 10) is dropped


def test_a_summary_that_saves_nothing_is_not_used_or_requested_again() -> None:
    draft = draft_of(SHORT, ONE, TWO, LAST)
    limit = draft.total() - 500
    passage = wanted(draft, summing(), limit)
    assert summing("ask", {passage.id: "much " * 1000}).apply(draft, limit) is draft


def test_existing_summaries_of_other_lengths_are_used_first() -> None:
    draft = draft_of(SHORT, ONE, TWO, THREE, LAST)
    two = wanted(draft, summing(), draft.total() - 1000)
    for limit in (draft.total() - 200, draft.total() - 2000):
        done = summing("ask", {two.id: "both"}).apply(draft, limit)
        assert done.decisions[1] == SummaryEntry(two.id, 2, "both")


def test_the_summary_that_makes_enough_room_is_used() -> None:
    draft = draft_of(SHORT, ONE, TWO, THREE, LAST)
    texts = {wanted(draft, summing(), draft.total() - less).id: "told" for less in (100, 1000, 2000)}
    assert len(texts) == 3
    for count, less in ((1, 100), (2, 1000), (3, 2000)):
        done = summing("known", texts).apply(draft, draft.total() - less)
        assert done.decisions[1] == SummaryEntry([*texts][count - 1], count, "told")


def test_a_summary_request_leaves_room_for_the_summary() -> None:
    draft = draft_of(SHORT, ONE, TWO, THREE, LAST)
    passage = wanted(draft, summing(tokens=300), draft.total() - 700)
    assert passage.count == 2


def thought(name: str, *, thinks: bool = True) -> list[dict[str, Any]]:
    call = {"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}}
    thinking = [{"type": "thinking", "thinking": "hm", "signature": "s"}]
    found = {"role": "tool", "tool_call_id": name, "content": "found " * 200}
    return [{**said(None), "tool_calls": [call], **({"thinking_blocks": thinking} if thinks else {})}, found]


def test_no_summary_precedes_the_thinking_of_the_last_turn() -> None:
    each = draft_of(SHORT, *thought("a"), *thought("b"), *thought("c"))
    assert summing().apply(each, 1000) is each
    before = draft_of(SHORT, ONE, TWO, LAST, *thought("a"), *thought("b"), *thought("c"))
    assert wanted(before, summing(), 1000).count == 2
    first = draft_of(SHORT, *thought("a"), *thought("b", thinks=False), *thought("c", thinks=False))
    assert wanted(first, summing(), 1000).count == 2, "behind the thinking, which stays"


def test_a_reference_to_a_summarized_result_becomes_whole_again() -> None:
    def looked(name: str) -> list[dict[str, Any]]:
        call = {"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}}
        return [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": name, "content": "found " * 100},
        ]

    draft = draft_of(SHORT, *looked("a"), *looked("b"), THREE, LAST).with_decisions({4: DuplicateResult(2)})
    passage = wanted(draft, summing(tokens=10), draft.total() - 10)
    assert passage.count == 2
    done = summing("known", {passage.id: "found"}).apply(draft, draft.total() - 10)
    assert done.decisions[3:5] == (KEEP, KEEP)
    both = wanted(draft, summing(), draft.total() - 800)
    assert json.loads(both.messages[3])["content"] == "[same as the result of a]"


def test_messages_of_low_priority_are_summarized_first() -> None:
    conversation = Conversation.of_messages([SHORT, ONE, TWO, THREE, LAST], priorities={2: 0.5})
    draft = Draft.untouched(conversation, Reader(counter_of(len)))
    passage = wanted(draft, summing(), draft.total() - 100)
    assert [json.loads(raw)["content"][:3] for raw in passage.messages] == ["two"]


def test_repetitive_talk_keeps_its_newest_turns() -> None:
    talk = [said("yes we should go there tomorrow and see") for _ in range(60)]
    draft = draft_of({"role": "user", "content": "help me plan"}, *talk, LAST)
    limit = draft.total() // 2
    done = Condense().apply(draft, limit)
    assert 0.4 * limit < done.total() <= limit
    kept = [index for index, decision in enumerate(done.decisions) if decision == KEEP and index > 0]
    assert kept[-20:] == list(range(42, 62)), "the newest, without a gap"


def test_the_answering_line_is_kept() -> None:
    """The question has the terms that it names, and they are still needed."""
    halls = ["".join(f"Parcel {h}-{n} stands in row {n * 3} of hall {h}.\n" for n in range(30)) for h in range(9)]
    asked = {"role": "user", "content": "In which row does Parcel 4-17 stand?"}
    draft = draft_of({"role": "user", "content": "Where are the parcels?"}, *map(said, halls), asked)
    done = Condense().apply(draft, draft.total() // 9)
    assert any(b"Parcel 4-17 stands in row 51" in message for message in done.sent().messages)
