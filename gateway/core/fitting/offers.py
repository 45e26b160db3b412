"""What a unit offers while blocks are chosen: to be opened with the best of its blocks, or one block more.

Looked at a few hundred times in a choice, so that what is worth nothing any more is not looked at again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress
from typing import Final, NamedTuple

from gateway.core.conversation import Unit
from gateway.core.fitting.draft import Pick
from gateway.core.fitting.reader import Known
from gateway.core.fitting.worth import Scores

#: tokens a block costs beside its text: a gap mark, as often as not
GAP_TOKENS: Final = 1.5
#: the place of the opening among what a unit offers
OPENING: Final = -1
#: A unit is looked at once or twice before it is clear that the words all units share are kept.
_LOOKS: Final = 2


class Offer(NamedTuple):
    """Blocks (and the frame, for a unit that is not open yet) at a price."""

    ratio: float
    cost: float
    picks: list[Pick]


def cost_of(known: Known, number: int, picked: Collection[int]) -> float:
    """Estimated tokens of a block, with the table's head if it is the first of its rows."""
    cost = known.tokens[number]
    if known.costs[number] > cost and known.sliced.blocks[number].needs not in picked:
        cost = known.costs[number]
    return cost + GAP_TOKENS


@dataclass(slots=True)
class _Blocks:
    """Those of a unit that may be worth something, in their order; a row in each list."""

    picks: list[Pick]
    terms: Sequence[Iterable[str]]
    factors: list[float]
    #: what each costs with all that it needs
    prices: list[float]

    #: terms that come with the frame, and by what they count
    fixed: Sequence[tuple[Iterable[str], float]]

    @classmethod
    def of(cls, known: Mapping[int, Known], scores: Scores) -> _Blocks:
        return cls(
            [(index, number) for index, one in known.items() for number in range(len(one.terms))],
            [terms for one in known.values() for terms in one.terms],
            [factor for index in known for factor in scores.factors(index)],
            [cost + GAP_TOKENS for one in known.values() for cost in one.costs],
            [(one.fixed, scores.priority(index)) for index, one in known.items()],
        )

    def living(self, left: Callable[[str], float]) -> _Blocks:
        """These without the terms that are kept already, and without the blocks that have no others."""
        terms = [[term for term in terms if left(term)] for terms in self.terms]
        return _Blocks(
            list(compress(self.picks, terms)),
            list(filter(None, terms)),
            list(compress(self.factors, terms)),
            list(compress(self.prices, terms)),
            [([term for term in terms if left(term)], by) for terms, by in self.fixed],
        )


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
    _looks: int = 0
    _blocks: _Blocks = field(default_factory=lambda: _UNREAD)
    #: what each of these adds alone, when it was looked at last
    _gains: list[float] = field(default_factory=list)

    def entries(self, scores: Scores, room: float) -> Iterator[tuple[float, int, int]]:
        """What can be taken, as (its ratio less than 0, the unit, its place): the opening, or blocks once it is open.

        What was worked out before is no less than what it is now, and is looked at again when it is due.
        """
        start = self.unit.start
        if not self.is_open:
            if self.least(OPENING) <= room:
                yield -(self._offer or self.bundle(scores)).ratio, start, OPENING
            return
        if self._blocks is _UNREAD:
            self._look(scores)
        for place, (gain, (index, number)) in enumerate(zip(self._gains, self._blocks.picks, strict=True)):
            if number not in self.picked[index]:
                cost = cost_of(self.known[index], number, self.picked[index])
                yield gain / -cost, start, place

    def least(self, place: int) -> float:
        """The least that a block or the opening may cost; what that offered is not made smaller to fit."""
        if place == OPENING:
            return self._offer.cost if self._offer is not None else self.frame
        index, number = self._blocks.picks[place]
        return self.known[index].tokens[number] + GAP_TOKENS

    def offer(self, scores: Scores, place: int) -> Offer:
        """What is at a place now."""
        return self.bundle(scores) if place == OPENING else self.single(scores, place)

    def single(self, scores: Scores, place: int) -> Offer:
        """One block more."""
        blocks = self._blocks
        pick = index, number = blocks.picks[place]
        cost = cost_of(self.known[index], number, self.picked[index])
        gain = sum(map(scores.left, blocks.terms[place])) * blocks.factors[place]
        return Offer(gain / cost, cost, [pick])

    def bundle(self, scores: Scores) -> Offer:
        """Opening the unit with as many of its best blocks as raise the worth per token of the whole."""
        if self._offer is None or self._as_of != scores.kept:
            self._offer, self._as_of = self._bundled(scores), scores.kept
        return self._offer

    def _look(self, scores: Scores) -> None:
        self._looks += 1
        if self._looks == 1:
            self._blocks = _Blocks.of(self.known, scores)
        elif self._looks == _LOOKS:
            self._blocks = self._blocks.living(scores.left)
        blocks, left = self._blocks, scores.left
        self._gains = [sum(map(left, terms)) * by for terms, by in zip(blocks.terms, blocks.factors, strict=True)]

    def _bundled(self, scores: Scores) -> Offer:
        self._look(scores)
        blocks, left, gains = self._blocks, scores.left, self._gains
        gain = sum([sum(map(left, terms)) * by for terms, by in blocks.fixed])
        cost = float(self.frame)
        best = gain / cost
        ranks = [gain / -price for gain, price in zip(gains, blocks.prices, strict=True)]
        picks: list[Pick] = []
        taken: set[str] = set()
        for place in sorted(range(len(ranks)), key=ranks.__getitem__):
            more, price = gain + gains[place], cost + blocks.prices[place]
            if more / price <= best:  # nor would it with what it shares with those before
                break
            terms = blocks.terms[place]
            if picks:
                more = gain + sum([left(term) for term in terms if term not in taken]) * blocks.factors[place]
                if more / price <= best:
                    break
            gain, cost, best = more, price, more / price
            taken.update(terms)
            picks.append(blocks.picks[place])
        return Offer(best, cost, picks)

    def opens(self, scores: Scores) -> None:
        """What stands in its frame is kept."""
        self.is_open = True
        scores.keep(chain.from_iterable(known.fixed for known in self.known.values()))
