"""What a unit offers while blocks are chosen: to be opened with the best of its blocks, or one block more.

Looked at a thousand times in a choice, so that what is worth nothing any more is not looked at again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from itertools import chain, repeat
from typing import Final, NamedTuple

from gateway.core.conversation import Unit
from gateway.core.fitting.draft import Pick
from gateway.core.fitting.reader import Known
from gateway.core.fitting.worth import Scores

#: tokens a block costs beside its text: a gap mark, as often as not
GAP_TOKENS: Final = 1.5
#: the place of the opening among what a unit offers
OPENING: Final = -1

#: what can be taken: its ratio less than 0, its unit, its place in that, and the least that it may cost
Entry = tuple[float, int, int, float]


class Offer(NamedTuple):
    """Blocks (and the frame, for a unit that is not open yet) at a price."""

    ratio: float
    cost: float
    picks: list[Pick]


def cost_of(known: Known, number: int, picked: Collection[int]) -> float:
    """Estimated tokens of a block, with the table's head if it is the first of its rows."""
    cost, whole = known.tokens[number], known.costs[number]
    return (whole if whole > cost and known.sliced.blocks[number].needs not in picked else cost) + GAP_TOKENS


@dataclass(slots=True)
class _Blocks:
    """Those of a unit, in their order; a row in each list."""

    #: which message each is of, and which block of that
    indices: list[int]
    numbers: list[int]
    terms: list[tuple[str, ...]]
    factors: list[float]
    #: what each costs with all that it needs
    prices: list[float]

    @classmethod
    def of(cls, known: Mapping[int, Known], scores: Scores) -> _Blocks:
        return cls(
            list(chain.from_iterable([repeat(index, len(one.terms)) for index, one in known.items()])),
            list(chain.from_iterable([range(len(one.terms)) for one in known.values()])),
            list(chain.from_iterable([one.terms for one in known.values()])),
            list(chain.from_iterable(map(scores.factors, known))),
            [cost + GAP_TOKENS for one in known.values() for cost in one.costs],
        )

    def gain(self, place: int, left: Mapping[str, float]) -> float:
        """What one adds alone."""
        return sum(map(left.__getitem__, self.terms[place])) * self.factors[place]

    def gains(self, left: Mapping[str, float]) -> list[float]:
        """What each adds alone."""
        worth = left.__getitem__
        return [sum(map(worth, terms)) * by for terms, by in zip(self.terms, self.factors, strict=True)]


#: of a unit that was not looked at
_UNREAD: Final = _Blocks([], [], [], [], [])


@dataclass(slots=True)
class Opening:
    """A unit under choice."""

    unit: Unit
    frame: int
    known: dict[int, Known]
    picked: dict[int, set[int]] = field(default_factory=dict)
    is_open: bool = False
    _offer: Offer | None = None
    #: how often something was kept when that was worked out
    _as_of: int = -1
    _blocks: _Blocks = field(default_factory=lambda: _UNREAD)
    #: what each of these added alone, when it was opened
    _gains: list[float] = field(default_factory=list)
    #: a heap of those that add something, by what they added for their price when they were looked at last
    _ranks: list[tuple[float, int]] = field(default_factory=list)
    #: terms that come with the frame and may be worth something, and by what they count
    _fixed: Sequence[tuple[Sequence[str], float]] = ()

    def entries(self, scores: Scores, room: float) -> Iterator[Entry]:
        """What can be taken: the opening, or blocks once it is open.

        What was worked out before is no less than what it is now, and is looked at again when it is due.
        """
        start = self.unit.start
        if not self.is_open:
            # What an opening offered is not made smaller to fit.
            if (self._offer.cost if self._offer is not None else self.frame) <= room:
                offer = self._offer or self.bundle(scores)
                yield -offer.ratio, start, OPENING, offer.cost
            return
        if self._blocks is _UNREAD:
            self._look(scores)
        rows = zip(self._gains, self._blocks.indices, self._blocks.numbers, strict=True)
        for place, (gain, index, number) in enumerate(rows):
            if gain and number not in self.picked[index]:
                known = self.known[index]
                cost = cost_of(known, number, self.picked[index])
                yield gain / -cost, start, place, known.tokens[number] + GAP_TOKENS

    def single(self, scores: Scores, place: int) -> Offer:
        """One block more."""
        blocks = self._blocks
        pick = index, number = blocks.indices[place], blocks.numbers[place]
        cost = cost_of(self.known[index], number, self.picked[index])
        return Offer(blocks.gain(place, scores.left) / cost, cost, [pick])

    def bundle(self, scores: Scores) -> Offer:
        """Opening the unit with as many of its best blocks as raise the worth per token of the whole."""
        if self._offer is None or self._as_of != scores.kept:
            self._offer, self._as_of = self._bundled(scores), scores.kept
        return self._offer

    def _look(self, scores: Scores) -> None:
        if self._blocks is _UNREAD:
            self._blocks = _Blocks.of(self.known, scores)
            self._fixed = [(one.fixed, scores.priority(index)) for index, one in self.known.items()]
        self._gains = self._blocks.gains(scores.left)

    def _bundled(self, scores: Scores) -> Offer:
        if self._blocks is _UNREAD:
            self._look(scores)
            ranked = enumerate(zip(self._gains, self._blocks.prices, strict=True))
            self._ranks = [(gain / -price, place) for place, (gain, price) in ranked if gain]
            heapify(self._ranks)
        blocks, ranks, worth = self._blocks, self._ranks, scores.left.__getitem__
        self._fixed = [(list(filter(worth, terms)), by) for terms, by in self._fixed]
        gain = sum([sum(map(worth, terms)) * by for terms, by in self._fixed])
        cost = float(self.frame)
        ratio = gain / cost
        taken: list[tuple[float, int]] = []
        said: set[str] = set()
        while ranks:
            place, alone = self._best(scores)
            more, price = gain + alone, cost + blocks.prices[place]
            if taken and more / price > ratio and not said.isdisjoint(blocks.terms[place]):
                more = gain + self._gain_beside(scores, place, said)
            if more / price <= ratio:  # nor would it with those after it, which add less
                break
            gain, cost, ratio = more, price, more / price
            said.update(blocks.terms[place])
            taken.append(heappop(ranks))
        for one in taken:
            heappush(ranks, one)
        return Offer(ratio, cost, [(blocks.indices[place], blocks.numbers[place]) for _, place in taken])

    def _best(self, scores: Scores) -> tuple[int, float]:
        """The block that adds most for its price, and what it adds alone.

        No block adds more than it did before, so that only those are looked at again that were the best.
        """
        blocks, ranks = self._blocks, self._ranks
        while True:
            before, place = ranks[0]
            gain = blocks.gain(place, scores.left)
            rank = gain / -blocks.prices[place]
            if rank <= before:
                return place, gain
            heapreplace(ranks, (rank, place))

    def _gain_beside(self, scores: Scores, place: int, said: AbstractSet[str]) -> float:
        """What a block adds where some terms are said already."""
        terms = self._blocks.terms[place]
        return sum([scores.left[term] for term in terms if term not in said]) * self._blocks.factors[place]

    def opens(self, scores: Scores) -> None:
        """What stands in its frame is kept."""
        self.is_open = True
        self._look(scores)
        scores.keep(chain.from_iterable(known.fixed for known in self.known.values()))
