from __future__ import annotations

from typing import Any

import pytest

from gateway.core.conversation import Conversation
from gateway.core.fitting.draft import DROP, Draft
from gateway.core.fitting.reader import Reader, weigher
from gateway.core.fitting.worth import Scores, Worth, terms_kept


def draft_of(*pairs: tuple[str, Any]) -> Draft:
    messages = [{"role": role, "content": content} for role, content in pairs]
    return Draft.untouched(Conversation.of_messages(messages), Reader(weigher(len)))


def gain(draft: Draft, index: int, worth: Worth | None = None, kept: tuple[str, ...] = ()) -> float:
    scores = Scores(draft, worth or Worth(), {i: draft.known(i) for i in range(len(draft.decisions))})
    scores.keep(kept)
    place = scores.starts[index]
    assert scores.sums[place] == pytest.approx(sum(scores.left[term] for term in draft.known(index).terms[0]))
    return scores.sums[place] * scores.factors[place]


def kept(draft: Draft, index: int) -> set[str]:
    return set().union(*terms_kept(draft, [index]))


def test_an_identifier_is_worth_more_than_a_word() -> None:
    draft = draft_of(("user", "HAT204"), ("user", "refund"), ("assistant", "so"), ("user", "on"))
    assert gain(draft, 0) > gain(draft, 1) * 5


def test_what_the_assistant_has_used_is_worth_more() -> None:
    draft = draft_of(("user", "A1111"), ("user", "B2222"), ("assistant", "B2222"), ("assistant", "so"), ("user", "on"))
    assert gain(draft, 1) > gain(draft, 0) * 3


def test_worth_fades_with_the_distance() -> None:
    draft = draft_of(("user", "A1111"), *[("user", "and")] * 9, ("user", "B2222"), ("assistant", "so"), ("user", "on"))
    assert gain(draft, 10) > gain(draft, 0)
    flat = Worth(fading=0)
    assert gain(draft, 10, flat) == gain(draft, 0, flat)


def test_a_block_that_answers_the_last_words_is_worth_more() -> None:
    draft = draft_of(("user", "A1111 Boston"), ("user", "B2222 Denver"), ("assistant", "so"), ("user", "to Denver"))
    assert gain(draft, 1, kept=("denver",)) > gain(draft, 0, kept=("boston",)) * 3


def test_what_is_kept_already_is_worth_nothing() -> None:
    draft = draft_of(("user", "A1111"), ("user", "on"))
    assert gain(draft, 0, kept=("a1111",)) == 0
    assert gain(draft, 0, kept=("a1111", "a1111")) == 0


def test_the_terms_of_what_is_sent_are_kept() -> None:
    from dataclasses import replace

    line = "Alpha beta gamma delta epsilon zeta eta theta.\n"
    draft = draft_of(("user", line + line.replace("Alpha", "Omega")), ("assistant", "Denver"), ("user", "on"))
    assert "omega" in kept(draft, 0)
    assert "omega" not in kept(draft.having({0: (0,)}), 0)
    assert not kept(draft.having({1: DROP}), 1)
    assert "omega" in kept(replace(draft, recalls={2: ((0, (1,)),)}), 2)
