"""Offer the next blocks of a unit, with their value and tokens, while blocks are chosen.

A choice asks for offers a thousand times. So blocks without remaining value are not considered again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from itertools import chain, repeat
from typing import Final, NamedTuple

from gateway.core.conversation.units import Unit
from gateway.core.trimming.draft import Pick
from gateway.core.trimming.reader import KnownBlocks
from gateway.core.trimming.relevance import Scores

#: Tokens that a block costs besides its text: about every second block has a gap mark before it.
GAP_TOKENS: Final = 1.5
#: A value below this is a rounding error of 0: the block has no term that is not kept already.
_MIN_VALUE: Final = 1e-9

#: Opening a unit may take at most this share of the remaining room. Its blocks can have more tokens than estimated, and
#: then they are all taken back together. Its other blocks are offered one by one.
_MAX_OPENING_SHARE: Final = 0.8

#: An entry of a heap with the best first: value per token times -1; the place of a block, or for a unit to open its
#: number counted from the end, as in `list[-1]`; the least cost in tokens.
Entry = tuple[float, int, float]


class BlockOffer(NamedTuple):
    """Blocks that can be taken together, with the frame of their unit if the unit is not open yet.

    `ratio`: value per token, 0 if there is none; `cost`: estimated tokens; `places`: of the blocks.
    """

    ratio: float
    cost: float
    places: Sequence[int]


class CandidateBlocks:
    """The blocks of all candidate units: their places, their costs, and which of them are taken."""

    def __init__(self, candidates: Mapping[int, KnownBlocks], scores: Scores) -> None:
        self.scores = scores
        known = candidates.values()
        #: by place: the message of the block, and the number of the block in that message
        self.indices = list(chain.from_iterable([repeat(i, len(one.terms)) for i, one in candidates.items()]))
        self.numbers = list(chain.from_iterable([range(len(one.terms)) for one in known]))
        #: by place: estimated tokens of the block alone, and with the block that it needs, such as a table's head
        self.alone = [cost + GAP_TOKENS for one in known for cost in one.tokens]
        self.whole = [cost + GAP_TOKENS for one in known for cost in one.costs]
        #: by place: the cost now, which falls to that of the block alone once the block that it needs is taken
        self.costs = [*self.whole]
        #: by place: the place of the block that it needs, or -1
        self.needs = _needs(candidates, scores)
        #: by the place of a block that is not taken: the blocks that need it
        self._rows = defaultdict[int, list[int]](list)
        for place, needed in enumerate(self.needs):
            if needed >= 0:
                self._rows[needed].append(place)

    def offer_block(self, place: int) -> BlockOffer:
        """Return the offer of one block."""
        cost, worth = self.costs[place], self.scores.sums[place]
        return BlockOffer(worth * self.scores.factors[place] / cost if worth > _MIN_VALUE else 0.0, cost, (place,))

    def take(self, places: Sequence[int]) -> list[Pick]:
        """Take the blocks at these places and those that they need; their terms add no more value to other blocks.

        Returns the message and the number of each block in `places`.
        """
        for place in dict.fromkeys([*places, *(needed for place in places if (needed := self.needs[place]) >= 0)]):
            self.scores.keep(self.scores.terms[place])
            for row in self._rows.pop(place, ()):
                self.costs[row] = self.alone[row]
        return [(self.indices[place], self.numbers[place]) for place in places]


def _needs(candidates: Mapping[int, KnownBlocks], scores: Scores) -> Sequence[int]:
    needs: list[int] = []
    for index, known in candidates.items():
        start = scores.starts[index]
        needs += [start + block.needs if block.needs >= 0 else -1 for block in known.sliced.blocks]
    return needs


@dataclass(slots=True)
class UnitCandidate:
    """A unit among which blocks are chosen."""

    unit: Unit
    #: tokens of its messages without any blocks
    frame: int
    #: by message
    known: dict[int, KnownBlocks]
    #: by message: the numbers of the blocks that are taken
    picked: dict[int, set[int]] = field(default_factory=dict)
    #: whether it is sent, at least its frame
    is_open: bool = False
    #: the last result of `offer_opening`
    _offer: BlockOffer | None = None
    #: the places that this offer depends on, and their values at that time
    _offer_places: Sequence[int] = ()
    _offer_values: Sequence[float] = ()
    #: the places of the fixed parts of its messages, which are not split
    _frames: Sequence[int] = ()
    #: see `_ranked`; None until it is asked for
    _ranks: list[tuple[float, int]] | None = None

    def entries(self, stock: CandidateBlocks, taken: Collection[int]) -> Iterator[Entry]:
        """Yield an entry for each block that is not taken, at the cost of the block alone; the unit is open."""
        alone, sums, factors, taken = stock.alone, stock.scores.sums, stock.scores.factors, frozenset(taken)
        for _, place in self._ranked(stock):
            if sums[place] > _MIN_VALUE and place not in taken:
                yield sums[place] * factors[place] / -alone[place], place, alone[place]

    def offer_opening(self, stock: CandidateBlocks, room: float) -> BlockOffer:
        """Return the offer to open the unit, with its best blocks while they raise the value per token and fit.

        The value of a block never rises. So an offer stays valid as long as the values of its blocks are unchanged. If
        not even the best block fits, the offer costs more than `room`.
        """
        sums_of, offer = stock.scores.sums.__getitem__, self._offer
        if offer is None or offer.cost > room or list(map(sums_of, self._offer_places)) != self._offer_values:
            self._offer = offer = self._best_opening(stock, room)
            self._offer_places = [*self._frames, *offer.places]
            self._offer_values = list(map(sums_of, self._offer_places))
        return offer

    def _ranked(self, stock: CandidateBlocks) -> list[tuple[float, int]]:
        """Return a heap of its blocks with value: (value per token times -1 at the last look, place)."""
        if self._ranks is None:
            scores, prices = stock.scores, stock.whole
            self._frames = [scores.frames[index] for index in self.known]
            sums, factors = scores.sums, scores.factors
            starts = [(scores.starts[index], len(known.terms)) for index, known in self.known.items()]
            self._ranks = [
                (sums[place] * factors[place] / -prices[place], place)
                for start, size in starts
                for place in range(start, start + size)
                if sums[place] > _MIN_VALUE
            ]
            heapify(self._ranks)
        return self._ranks

    def _best_opening(self, stock: CandidateBlocks, room: float) -> BlockOffer:
        ranks, scores, prices = self._ranked(stock), stock.scores, stock.whole
        sums, factors, terms = scores.sums, scores.factors, scores.terms
        gain = sum([sums[place] * factors[place] for place in self._frames])
        cost = max(1.0, self.frame)  # the frame of a message without words may count no tokens
        ratio = gain / cost
        taken: list[tuple[float, int]] = []
        paid_places = set[int]()
        present_terms = set[str]()
        while ranks:
            place, alone = _best(ranks, sums, factors, prices)
            needed = stock.needs[place]
            own = 0.0 if place in paid_places else stock.alone[place] if needed in paid_places else prices[place]
            more, price = gain + alone, cost + own
            if taken and price > _MAX_OPENING_SHARE * room:
                break
            if taken and more > ratio * price:
                present_terms.update(terms[taken[-1][1]])
                if not present_terms.isdisjoint(terms[place]):
                    more = gain + _additional_value(scores, place, present_terms)
            if more <= ratio * price:  # it would not raise the ratio: it is offered again once the unit is open
                break
            gain, cost, ratio = more, price, more / price
            paid_places.update((place, needed))
            taken.append(heappop(ranks))
        for one in taken:  # they are offered, but not taken yet
            heappush(ranks, one)
        return BlockOffer(ratio if gain > _MIN_VALUE else 0.0, cost, [place for _, place in taken])

    def open(self, scores: Scores) -> None:
        """Open the unit: the terms of its frame are kept from now on."""
        self.is_open = True
        scores.keep(chain.from_iterable(known.fixed for known in self.known.values()))


def _best(
    ranks: list[tuple[float, int]], sums: Sequence[float], factors: Sequence[float], prices: Sequence[float]
) -> tuple[int, float]:
    """Return the block with the highest value per token, and its value.

    The value of a block never rises, so only blocks that lead by their last known ratio are computed again.
    """
    while True:
        before, place = ranks[0]
        gain = sums[place] * factors[place]
        rank = gain / -prices[place]
        if rank <= before:
            return place, gain
        heapreplace(ranks, (rank, place))


def _additional_value(scores: Scores, place: int, present_terms: set[str]) -> float:
    """Return the value that a block adds to blocks that already have the terms `present_terms`."""
    return sum([scores.left[term] for term in scores.terms[place] if term not in present_terms]) * scores.factors[place]
