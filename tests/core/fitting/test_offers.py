from __future__ import annotations

import json
from typing import Any

from gateway.core.conversation import Conversation
from gateway.core.fitting.draft import Draft
from gateway.core.fitting.offers import GAP_TOKENS, OPENING, Opening, cost_of
from gateway.core.fitting.reader import Reader, weigher
from gateway.core.fitting.worth import Scores, Worth

LINES = [f"order W{n}00{n} of customer {n}{n}{n}{n} was shipped to Boston{n} yesterday.\n" for n in range(1, 6)]
ROOM = 10_000.0


def draft_of(*contents: Any) -> Draft:
    messages = [{"role": "assistant", "content": content} for content in contents]
    on = {"role": "user", "content": "on"}
    return Draft.untouched(Conversation.of_messages([*messages, on]), Reader(weigher(len)))


def opening_of(draft: Draft, start: int, frame: int = 10) -> Opening:
    unit = next(unit for unit in draft.conversation.units if unit.start == start)
    known = {index: draft.known(index) for index in unit.indices}
    return Opening(unit, frame, known, {index: set() for index in known})


def scores_of(draft: Draft) -> Scores:
    return Scores(draft, Worth(), {index: draft.known(index) for index in range(len(draft.decisions))})


def test_a_unit_is_offered_with_as_many_blocks_as_raise_its_worth_per_token() -> None:
    draft = draft_of("".join(LINES))
    offer = opening_of(draft, 0, frame=200).bundle(scores_of(draft))
    assert len(offer.picks) == len(LINES)
    cheap = opening_of(draft, 0, frame=1).bundle(scores_of(draft))
    assert 1 <= len(cheap.picks) < len(LINES)
    assert cheap.ratio > offer.ratio


def test_two_blocks_that_say_the_same_are_not_both_of_an_offer() -> None:
    draft = draft_of(LINES[0] * 2)
    assert opening_of(draft, 0, frame=200).bundle(scores_of(draft)).picks == [(0, 0)]


def test_an_offer_falls_with_what_is_kept_however_often_it_is_looked_at() -> None:
    draft = draft_of("".join(LINES))
    opening, scores = opening_of(draft, 0, frame=200), scores_of(draft)
    ratios = [opening.bundle(scores).ratio]
    for terms in draft.known(0).terms:
        scores.keep(terms)
        ratios.append(opening.bundle(scores).ratio)
        assert ratios[-1] == opening_of(draft, 0, frame=200).bundle(scores).ratio
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[-1] == 0


def test_once_a_unit_is_open_its_other_blocks_are_offered_one_by_one() -> None:
    draft = draft_of("".join(LINES))
    opening, scores = opening_of(draft, 0), scores_of(draft)
    assert [place for _, _, place, _ in opening.entries(scores, ROOM)] == [OPENING]
    assert not list(opening.entries(scores, 5.0))
    taken = opening.bundle(scores).picks
    opening.opens(scores)
    for index, number in taken:
        opening.picked[index].add(number)
        scores.keep(draft.known(index).terms[number])
    entries = list(opening.entries(scores, ROOM))
    offers = [opening.single(scores, place) for _, _, place, _ in entries]
    assert sorted([*taken, *(offer.picks[0] for offer in offers)]) == [(0, number) for number in range(len(LINES))]
    assert all(offer.ratio <= -stale for (stale, *_), offer in zip(entries, offers, strict=True))
    assert all(offer.cost >= least for (*_, least), offer in zip(entries, offers, strict=True))


def test_the_first_row_of_a_table_is_paid_with_its_head() -> None:
    rows = [{"id": f"W{n}00{n}", "city": f"city{n}", "text": "a|b"} for n in range(9)]
    known = draft_of(json.dumps({"total": 9, "rows": rows})).known(0)
    row = len(known.tokens) - 1
    head = known.sliced.blocks[row].needs
    assert head >= 0
    assert cost_of(known, row, ()) == known.tokens[row] + known.tokens[head] + GAP_TOKENS
    assert cost_of(known, row, {head}) == known.tokens[row] + GAP_TOKENS
