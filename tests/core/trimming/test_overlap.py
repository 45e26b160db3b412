from __future__ import annotations

import json
from typing import Any

from gateway.core.conversation.units import Conversation
from gateway.core.trimming.dedupe import dedupe
from gateway.core.trimming.draft import DROP, KEEP, Draft, DuplicateResult
from gateway.core.trimming.overlap import overlap
from gateway.core.trimming.policy import TrimPolicy
from gateway.core.trimming.reader import Reader, counter_of
from gateway.core.trimming.strategies import Dedupe, Drop
from gateway.core.trimming.trim_conversation import trim_conversation
from gateway.core.trimming.trim_decision import TrimDecision


def row(number: int) -> dict[str, Any]:
    return {"doc_id": f"D{number}", "title": f"title of document {number}", "text": f"word{number} " * 12}


def rows(*numbers: int) -> str:
    return json.dumps({"total": len(numbers), "results": [row(number) for number in numbers]})


def messages(*contents: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    for number, content in enumerate(contents):
        call = {"id": f"c{number}", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        found.append({"role": "assistant", "content": None, "tool_calls": [call]})
        found.append({"role": "tool", "tool_call_id": f"c{number}", "content": content})
    return [*found, {"role": "assistant", "content": "read"}, {"role": "user", "content": "on"}]


def session(*contents: Any) -> Draft:
    return Draft.untouched(Conversation.of_messages(messages(*contents)), Reader(counter_of(len)))


def changes(draft: Draft) -> dict[int, Any]:
    return {i: decision for i, decision in enumerate(draft.decisions) if decision != KEEP}


def test_rows_of_an_earlier_result_are_left_out() -> None:
    done = overlap(session(rows(1, 2, 3), rows(4, 2, 5, 3)))
    assert changes(done) == {4: DuplicateResult(2, (1, 3))}
    shown = json.loads(json.loads(done.rendered(4).raw or b"")["content"])
    assert shown == {"total": 4, "results": [row(4), "[2 items as in the result of c0]", row(5)]}
    assert done.total() < session(rows(1, 2, 3), rows(4, 2, 5, 3)).total()


def test_paragraphs_of_an_earlier_result_are_left_out() -> None:
    long = "the same paragraph " * 15
    done = overlap(session(f"first\n\n{long}\n\nend", f"second\n\n{long}"))
    assert json.loads(done.rendered(4).raw or b"")["content"] == "second\n\n[1 paragraph as in the result of c0]"


def test_a_changed_row_with_the_same_id_stays() -> None:
    other = json.dumps([{**row(number), "text": "changed " * 20} for number in (1, 2)])
    assert changes(overlap(session(rows(1, 2), other))) == {}


def test_a_row_whose_number_differs_beyond_the_digits_of_a_float_stays() -> None:
    first, other = (rows(1, 2, 3).replace('"D', f'9007199254740993.0{digit}, "id": "D') for digit in (7, 8))
    assert changes(overlap(session(first, other))) == {}
    assert changes(overlap(session(first, f" {first}"))) == {4: DuplicateResult(2, (0, 1, 2))}


def test_short_parts_and_parts_without_a_whole_source_stay() -> None:
    numbers = json.dumps(list(range(200)))
    image = [{"type": "image_url", "image_url": {"url": "x" * 500}}]
    draft = session(numbers, numbers + " ", rows(1), rows(1, 2), image, image)
    assert overlap(draft) is draft
    cut = session(rows(1, 2, 3), rows(2, 3)).with_decisions({2: (0,)})
    assert overlap(cut) is cut


def test_the_source_shares_most_parts_and_is_sent_whole() -> None:
    done = overlap(session(rows(1), rows(2, 3, 4), rows(1, 2, 3, 5), rows(5, 3, 4)))
    assert changes(done) == {6: DuplicateResult(4, (1, 2)), 8: DuplicateResult(4, (1, 2))}


def test_a_frozen_result_can_be_a_source_and_is_unchanged() -> None:
    done = overlap(session(rows(1, 2), rows(1, 2, 3), rows(1, 2, 4)).reopened(5))
    assert changes(done) == {6: DuplicateResult(2, (0, 1))}


def test_rows_come_back_if_their_source_is_left_out() -> None:
    draft = overlap(session(rows(1, 2, 3), rows(4, 2, 3), "short"))
    done = Drop().apply(draft, draft.total() - 10)
    assert changes(done) == {1: DROP, 2: DROP}
    tight = Drop().apply(draft, 300)
    assert changes(tight) == {1: DROP, 2: DROP, 3: DROP, 4: DROP}
    assert tight.total() <= 300


def test_overlap_is_reported_as_dedupe_and_stored_in_the_decision() -> None:
    conversation = Conversation.of_messages(messages(rows(1, 2, 3), rows(4, 2, 3), rows(1, 2, 3)))
    reader, policy = Reader(counter_of(len)), TrimPolicy(strategies=(Dedupe(), Drop()), low_water=1.0)
    limit = sum(reader.token_counts(conversation)) - 20
    first = trim_conversation(conversation, limit, reader, policy=policy)
    assert first.outcomes.actions == {"dedupe": 2}
    assert first.trim_decision is not None
    assert first.trim_decision.plan == "k4 =2/1-2 k1 =2 k2"
    again = trim_conversation(
        conversation, limit, Reader(counter_of(len)), trim_decision=first.trim_decision, policy=policy
    )
    assert (again.messages, again.trim_decision) == (first.messages, first.trim_decision)
    wrong = TrimDecision(first.trim_decision.prefix, first.trim_decision.size, "k4 =2/1-9 k1 =2 k2")
    assert (
        trim_conversation(conversation, limit, Reader(counter_of(len)), trim_decision=wrong, policy=policy).messages
        == first.messages
    )


def test_a_source_of_references_stays_whole() -> None:
    again = rows(1, 2, 3, 4)
    done = overlap(dedupe(session(rows(1, 2, 3), again, again)))
    assert changes(done) == {6: DuplicateResult(4)}
    assert changes(dedupe(session(again, again, again).with_decisions({6: DuplicateResult(4)}))) == {
        6: DuplicateResult(4)
    }
