from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.conversation.message import encode
from gateway.core.conversation.units import Conversation
from gateway.core.trimming.draft import DROP, KEEP, RECALL_HEADING, Draft, DuplicateResult
from gateway.core.trimming.reader import Reader, counter_of

LINES = "".join(f"line {n} {'x' * 40}\n" for n in range(4))
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": LINES},
    {"role": "assistant", "content": "said"},
    {"role": "user", "content": [{"type": "text", "text": "now"}]},
]
RAWS = [encode(message) for message in MESSAGES]
WEIGH = counter_of(len)


def draft() -> Draft:
    return Draft.untouched(Conversation.of(RAWS), Reader(WEIGH))


def contents(done: Draft) -> list[Any]:
    return [json.loads(raw)["content"] for raw in done.sent().messages]


def test_kept_messages_are_unchanged_and_dropped_ones_count_no_tokens() -> None:
    done = draft().with_decisions({1: DROP})
    assert done.sent().messages == (RAWS[0], RAWS[2])
    assert done.rendered(0).raw is RAWS[0]
    assert done.token_counts() == [WEIGH(RAWS)[0], 0, WEIGH(RAWS)[2]]
    assert done.total() == sum(WEIGH([RAWS[0], RAWS[2]]))
    assert done.changed() == [1]


def test_recalled_lines_are_appended_and_counted() -> None:
    done = replace(draft().with_decisions({0: (0,)}), recalls={2: ((0, (1, 3)),), 1: ((0, (2,)),)})
    [part], said = contents(done)[2], contents(done)[1]
    assert part == {"type": "text", "text": f"now\n\n{RECALL_HEADING}\nuser: line 1 {'x' * 40}\nline 3 {'x' * 40}"}
    assert said == f"said\n\n{RECALL_HEADING}\nuser: line 2 {'x' * 40}"
    assert done.total() == sum(WEIGH(done.sent().messages))
    assert done.reopened(2).recalls.keys() == {1}
    assert done.changed() == [0, 1, 2]


Step = Callable[[Draft], Draft]
STEP: st.SearchStrategy[Step] = st.one_of(
    st.builds(
        lambda index, decision: lambda one: one.with_decisions({index: decision}),
        st.integers(0, 2),
        st.sampled_from([KEEP, DROP, (), (0,), (0, 2)]),
    ),
    st.integers(0, 3).map(lambda first: lambda one: one.reopened(first)),
    st.just(lambda one: one.with_rule(draft(), "condense")),
    st.just(lambda one: replace(one, recalls={**one.recalls, 2: ((0, (1,)),)})),
    st.just(lambda one: draft().with_earlier_decisions(one.decisions, one.recalls, one.rules, {})),
)


@given(st.lists(st.tuples(STEP, st.booleans()), max_size=8))
def test_token_counts_of_any_derived_draft_match_what_is_sent(steps: list[tuple[Step, bool]]) -> None:
    done = draft()
    for step, is_weighed in steps:
        if is_weighed:
            done.token_counts()
        done = step(done)
    anew = Draft.untouched(done.conversation, done.reader)
    assert done.token_counts() == [
        replace(anew, decisions=done.decisions, recalls=done.recalls).tokens_of(i) for i in range(3)
    ]
    assert done.total() == sum(WEIGH(done.sent().messages))


def test_tokens_if_counts_a_decision_before_it_is_made() -> None:
    assert draft().tokens_if(0, (0,)) == draft().with_decisions({0: (0,)}).tokens_of(0) < draft().tokens_of(0)


def test_the_keys_of_what_is_sent_are_those_of_its_bytes() -> None:
    done = draft().with_decisions({0: (0,), 1: DROP})
    assert done.sent().keys == Conversation.of(done.sent().messages).keys


def test_rules_are_noted_for_changes_and_earlier_decisions_can_be_resumed() -> None:
    before = draft()
    cut = before.with_decisions({0: (0,)}).with_rule(before, "condense")
    assert cut.with_decisions({1: DROP}).with_rule(cut, "drop").rules == {0: "condense", 1: "drop"}
    again = draft().with_earlier_decisions(cut.decisions[:1], {}, cut.rules, {0: cut.rendered(0)})
    assert again.decisions == ((0,), KEEP, KEEP)
    assert again.rendered(0) is cut.rendered(0)


def test_a_reference_names_the_call_of_the_earlier_result() -> None:
    results = [{"role": "tool", "tool_call_id": f"c{n}", "content": "long"} for n in range(2)]
    done = Draft.untouched(Conversation.of_messages(results), Reader(WEIGH)).with_decisions({1: DuplicateResult(0)})
    assert contents(done) == ["long", "[same as the result of c0]"]
