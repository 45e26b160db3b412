from __future__ import annotations

from math import inf
from typing import Any

from gateway.core.conversation.units import Conversation
from gateway.core.trimming.draft import Draft
from gateway.core.trimming.offers import GAP_TOKENS, CandidateBlocks, UnitCandidate
from gateway.core.trimming.reader import Reader, counter_of
from gateway.core.trimming.relevance import RelevanceFactors, Scores

LINES = [f"order W{n}00{n} of customer {n}{n}{n}{n} was shipped to Boston{n} yesterday.\n" for n in range(1, 6)]


def draft_of(*contents: Any, role: str = "assistant") -> Draft:
    messages = [{"role": role, "content": content} for content in contents]
    on = {"role": "user", "content": "on"}
    return Draft.untouched(Conversation.of_messages([*messages, on]), Reader(counter_of(len)))


def opening_of(draft: Draft, start: int, frame: int = 10) -> UnitCandidate:
    unit = next(unit for unit in draft.conversation.units if unit.start == start)
    known = {index: draft.known(index) for index in unit.indices}
    return UnitCandidate(unit, frame, known, {index: set() for index in known})


def stock_of(draft: Draft) -> CandidateBlocks:
    candidates = {index: draft.known(index) for index in range(len(draft.decisions) - 1)}
    return CandidateBlocks(candidates, Scores(draft, RelevanceFactors(), candidates))


def test_an_opening_has_the_blocks_that_raise_its_value_per_token() -> None:
    draft = draft_of("".join(LINES))
    offer = opening_of(draft, 0, frame=200).offer_opening(stock_of(draft), inf)
    assert len(offer.places) == len(LINES)
    cheap = opening_of(draft, 0, frame=1).offer_opening(stock_of(draft), inf)
    assert 1 <= len(cheap.places) < len(LINES)
    assert cheap.ratio > offer.ratio


def test_an_opening_has_only_the_blocks_that_fit() -> None:
    draft = draft_of("".join(LINES))
    opening, stock = opening_of(draft, 0, frame=200), stock_of(draft)
    whole = opening.offer_opening(stock, inf)
    some = opening.offer_opening(stock, whole.cost - 1)
    assert 1 <= len(some.places) < len(whole.places)
    assert some.cost < whole.cost
    assert opening.offer_opening(stock, 1).cost > 1


def test_an_opening_has_no_two_blocks_with_the_same_terms() -> None:
    draft = draft_of(LINES[0] * 2)
    stock = stock_of(draft)
    assert stock.take(opening_of(draft, 0, frame=200).offer_opening(stock, inf).places) == [(0, 0)]


def test_an_offers_value_falls_with_kept_terms() -> None:
    draft = draft_of("".join(LINES))
    opening, stock = opening_of(draft, 0, frame=200), stock_of(draft)
    ratios = [opening.offer_opening(stock, inf).ratio]
    for terms in draft.known(0).terms:
        stock.scores.keep(terms)
        ratios.append(opening.offer_opening(stock, inf).ratio)
        assert ratios[-1] == opening_of(draft, 0, frame=200).offer_opening(stock, inf).ratio
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[-1] == 0


def test_an_offer_is_recomputed_only_if_its_blocks_lost_value() -> None:
    draft = draft_of(LINES[0], LINES[1])
    stock = stock_of(draft)
    first, second = opening_of(draft, 0), opening_of(draft, 1)
    offers = first.offer_opening(stock, inf), second.offer_opening(stock, inf)
    stock.scores.keep([term for term in draft.known(0).terms[0] if term not in draft.known(1).terms[0]])
    assert second.offer_opening(stock, inf) is offers[1]
    assert first.offer_opening(stock, inf).ratio < offers[0].ratio


def test_once_a_unit_is_open_its_other_blocks_are_offered_one_by_one() -> None:
    draft = draft_of("".join(LINES))
    opening, stock = opening_of(draft, 0), stock_of(draft)
    taken = opening.offer_opening(stock, inf).places
    opening.open(stock.scores)
    stock.take(taken)
    entries = list(opening.entries(stock, taken))
    offers = [stock.offer_block(place) for _, place, _ in entries]
    assert sorted([*taken, *(offer.places[0] for offer in offers)]) == [*range(len(LINES))]
    assert all(offer.ratio <= -stale for (stale, *_), offer in zip(entries, offers, strict=True))
    assert all(offer.cost >= least for (*_, least), offer in zip(entries, offers, strict=True))


def table_of(rows: int) -> str:
    """Return a table whose rows are a block each."""
    return "ORDER CITY NOTE\n" + "".join(f"W{n}00{n} city{n} {'x' * 150}\n" for n in range(rows))


def test_the_first_table_row_costs_its_head_too() -> None:
    draft = draft_of(table_of(9), role="function")
    known, stock = draft.known(0), stock_of(draft)
    row = len(known.tokens) - 1
    head = known.sliced.blocks[row].needs
    assert head >= 0
    assert stock.costs[row] == known.tokens[row] + known.tokens[head] + GAP_TOKENS
    stock.take((head,))
    assert stock.costs[row] == known.tokens[row] + GAP_TOKENS


def test_a_rows_value_does_not_rise_once_its_head_is_taken() -> None:
    draft = draft_of(table_of(9), role="function")
    opening, stock = opening_of(draft, 0), stock_of(draft)
    stale = {place: -rank for rank, place, _ in opening.entries(stock, ())}
    head = draft.known(0).sliced.blocks[-1].needs
    stock.take((head,))
    rest = {place: stock.offer_block(place).ratio for place in stale if place != head}
    assert all(ratio <= stale[place] * (1 + 1e-9) for place, ratio in rest.items())


def test_rows_taken_together_pay_for_their_head_once() -> None:
    draft = draft_of(table_of(9), role="function")
    known, stock, opening = draft.known(0), stock_of(draft), opening_of(draft, 0)
    head = known.sliced.blocks[-1].needs
    stock.scores.keep(known.terms[head])  # already kept in another block, so the head has no value of its own
    offer = opening.offer_opening(stock, inf)
    assert head not in offer.places
    assert len(offer.places) >= 8
    texts = sum(known.tokens[place] + GAP_TOKENS for place in offer.places)
    assert abs(offer.cost - opening.frame - texts - known.tokens[head]) < 1e-6


def test_only_the_first_row_pays_for_the_head() -> None:
    draft = draft_of(table_of(9), role="function")
    known, stock = draft.known(0), stock_of(draft)
    row = len(known.tokens) - 1
    assert stock.take((row,)) == [(0, row)]
    assert stock.costs[row - 1] == known.tokens[row - 1] + GAP_TOKENS
    assert stock.offer_block(known.sliced.blocks[row].needs).ratio == 0


class Counted(list[float]):
    """Count how often an item is set."""

    writes = 0

    def __setitem__(self, place: Any, value: Any) -> None:
        self.writes += 1
        super().__setitem__(place, value)


def test_row_costs_are_updated_only_once() -> None:
    draft = draft_of(table_of(41), role="function")
    stock = stock_of(draft)
    rows = [place for place, needed in enumerate(stock.needs) if needed >= 0]
    stock.costs = counted = Counted(stock.costs)
    for place in rows:
        stock.take([place])
    assert [*counted] == stock.alone
    assert counted.writes == len(rows) >= 40
