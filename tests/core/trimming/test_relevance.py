from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from gateway.core.conversation.units import Conversation
from gateway.core.trimming.draft import DROP, Draft
from gateway.core.trimming.reader import Reader, counter_of
from gateway.core.trimming.relevance import RelevanceFactors, Scores, kept_terms


def draft_of(*pairs: tuple[str, Any]) -> Draft:
    messages = [{"role": role, "content": content} for role, content in pairs]
    return Draft.untouched(Conversation.of_messages(messages), Reader(counter_of(len)))


def gain(draft: Draft, index: int, worth: RelevanceFactors | None = None, kept: tuple[str, ...] = ()) -> float:
    scores = Scores(draft, worth or RelevanceFactors(), {i: draft.known(i) for i in range(len(draft.decisions))})
    scores.keep(kept)
    place = scores.starts[index]
    assert scores.sums[place] == pytest.approx(sum(scores.left[term] for term in draft.known(index).terms[0]))
    return scores.sums[place] * scores.factors[place]


def kept(draft: Draft, index: int) -> set[str]:
    return set().union(*kept_terms(draft, [index]))


def test_an_identifier_has_more_relevance_than_a_word() -> None:
    draft = draft_of(("user", "HAT204"), ("user", "refund"), ("assistant", "so"), ("user", "on"))
    assert gain(draft, 0) > gain(draft, 1) * 5


def test_a_used_term_has_more_relevance() -> None:
    draft = draft_of(("user", "A1111"), ("user", "B2222"), ("assistant", "B2222"), ("assistant", "so"), ("user", "on"))
    assert gain(draft, 1) > gain(draft, 0) * 3


def test_relevance_falls_with_the_distance() -> None:
    draft = draft_of(("user", "A1111"), *[("user", "and")] * 9, ("user", "B2222"), ("assistant", "so"), ("user", "on"))
    assert gain(draft, 10) > gain(draft, 0)
    flat = RelevanceFactors(fading=0)
    assert gain(draft, 10, flat) == gain(draft, 0, flat)


def test_an_answering_block_has_more_relevance() -> None:
    draft = draft_of(("user", "A1111 Boston"), ("user", "B2222 Denver"), ("assistant", "so"), ("user", "to Denver"))
    assert gain(draft, 1, kept=("denver",)) > gain(draft, 0, kept=("boston",)) * 3


def test_a_kept_term_has_no_relevance() -> None:
    draft = draft_of(("user", "A1111"), ("user", "on"))
    assert gain(draft, 0, kept=("a1111",)) == 0
    assert gain(draft, 0, kept=("a1111", "a1111")) == 0


def test_terms_of_sent_messages_are_kept() -> None:
    line = "Alpha beta gamma delta epsilon zeta eta theta.\n"
    draft = draft_of(("user", line + line.replace("Alpha", "Omega")), ("assistant", "Denver"), ("user", "on"))
    assert "omega" in kept(draft, 0)
    assert "omega" not in kept(draft.with_decisions({0: (0,)}), 0)
    assert not kept(draft.with_decisions({1: DROP}), 1)
    assert "omega" in kept(replace(draft, recalls={2: ((0, (1,)),)}), 2)


PROFILE = json.dumps({"email": "mia@x.org", "card": "card_4421", "seat": "12A", "dob": "1990-04-05", "zip": "Z90210"})
LONG = json.dumps({**json.loads(PROFILE), **{f"note{number}": "nothing of note" for number in range(9)}})
TOOLS = [{"function": {"parameters": {"properties": {"dob": {}, "pay": {"description": "such as card_78"}}}}}]


def worth_by_line(tools: Any) -> dict[str, float]:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": ""}}]},
        {"role": "tool", "tool_call_id": "c", "content": LONG},
        {"role": "user", "content": "on"},
    ]
    conversation = Conversation.of_messages(messages, tools=[json.dumps(one).encode() for one in tools])
    draft = Draft.untouched(conversation, Reader(counter_of(len)))
    known = draft.known(2)
    scores = Scores(draft, RelevanceFactors(), {2: known})
    blocks = [block.text for block in known.sliced.blocks]
    return {text.partition(":")[0]: scores.sums[n] * scores.factors[n] for n, text in enumerate(blocks)}


def test_values_that_the_tools_take_have_more_relevance() -> None:
    plain, asked = worth_by_line([]), worth_by_line([TOOLS])
    by = RelevanceFactors()
    assert asked["card"] == pytest.approx(by.asked_for * plain["card"], rel=0.1)
    assert asked["dob"] == pytest.approx(by.parameter * plain["dob"])
    assert asked["zip"] == plain["zip"]
    assert asked["email"] == plain["email"]


def test_a_used_identifier_gains_nothing_from_its_shape() -> None:
    messages = [{"role": "assistant", "content": "card_4421"}, {"role": "user", "content": "on"}]
    plain = Conversation.of_messages(messages)
    asked = replace(plain, tools=(json.dumps(TOOLS).encode(),))
    first, second = (Draft.untouched(one, Reader(counter_of(len))) for one in (plain, asked))
    assert gain(first, 0) == gain(second, 0)
