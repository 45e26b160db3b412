"""What a unit offers while blocks are chosen: to be opened with the best of its blocks, or one block more.

Looked at a thousand times in a choice, so that what is worth nothing any more is not looked at again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import chain, compress, repeat
from typing import Final, NamedTuple

from gateway.core.conversation import Unit
from gateway.core.fitting.draft import Pick
from gateway.core.fitting.reader import Known, Lookup, lookup_of
from gateway.core.fitting.worth import Scores

#: tokens a block costs beside its text: a gap mark, as often as not
GAP_TOKENS: Final = 1.5
#: the place of the opening among what a unit offers
OPENING: Final = -1
#: A unit is looked at once or twice before it is clear that the words all units share are kept.
_LOOKS: Final = 2

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
    """Those of a unit that may be worth something, in their order; a row in each list."""

    #: which message each is of, and which block of that
    indices: list[int]
    numbers: list[int]
    lookups: list[Lookup]
    terms: list[tuple[str, ...]]
    factors: list[float]
    #: what each costs with all that it needs
    prices: list[float]

    @classmethod
    def of(cls, known: Mapping[int, Known], scores: Scores) -> _Blocks:
        return cls(
            list(chain.from_iterable([repeat(index, len(one.terms)) for index, one in known.items()])),
            list(chain.from_iterable([range(len(one.terms)) for one in known.values()])),
            list(chain.from_iterable([one.lookups for one in known.values()])),
            list(chain.from_iterable([one.terms for one in known.values()])),
            list(chain.from_iterable(map(scores.factors, known))),
            [cost + GAP_TOKENS for one in known.values() for cost in one.costs],
        )

    def gains(self, left: Mapping[str, float]) -> list[float]:
        """What each adds alone."""
        return [sum(lookup(left)) * by for lookup, by in zip(self.lookups, self.factors, strict=True)]

    def living(self, gains: Sequence[float]) -> _Blocks:
        """These without the blocks that add nothing."""
        return _Blocks(
            list(compress(self.indices, gains)),
            list(compress(self.numbers, gains)),
            list(compress(self.lookups, gains)),
            list(compress(self.terms, gains)),
            list(compress(self.factors, gains)),
            list(compress(self.prices, gains)),
        )


#: of a unit that was not looked at
_UNREAD: Final = _Blocks([], [], [], [], [], [])


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
    #: terms that come with the frame, and by what they count
    _fixed: Sequence[tuple[Lookup, float]] = ()

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
        gain = sum(blocks.lookups[place](scores.left)) * blocks.factors[place]
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
            fixed = [(scores.priority(index), one.fixed) for index, one in self.known.items() if one.fixed]
            self._fixed = [(lookup_of(terms), by) for by, terms in fixed]
        self._gains = self._blocks.gains(scores.left)
        if self._looks == _LOOKS:
            self._blocks = self._blocks.living(self._gains)
            self._gains = list(filter(None, self._gains))

    def _bundled(self, scores: Scores) -> Offer:
        self._look(scores)
        blocks, gains = self._blocks, self._gains
        gain = sum([sum(lookup(scores.left)) * by for lookup, by in self._fixed])
        cost = float(self.frame)
        ratio = gain / cost
        ranks = [gain / -price for gain, price in zip(gains, blocks.prices, strict=True)]
        taken: list[int] = []
        said: set[str] = set()
        for place in sorted(range(len(ranks)), key=ranks.__getitem__):
            more, price = gain + gains[place], cost + blocks.prices[place]
            if taken and more / price > ratio:
                more = gain + self._gain_beside(scores, place, said)
            if more / price <= ratio:  # nor would it with those after it, which add less
                break
            gain, cost, ratio = more, price, more / price
            said.update(blocks.terms[place])
            taken.append(place)
        return Offer(ratio, cost, [(blocks.indices[place], blocks.numbers[place]) for place in taken])

    def _gain_beside(self, scores: Scores, place: int, said: AbstractSet[str]) -> float:
        """What a block adds where some terms are said already."""
        terms = self._blocks.terms[place]
        if said.isdisjoint(terms):
            return self._gains[place]
        return sum([scores.left[term] for term in terms if term not in said]) * self._blocks.factors[place]

    def opens(self, scores: Scores) -> None:
        """What stands in its frame is kept."""
        self.is_open = True
        scores.keep(chain.from_iterable(known.fixed for known in self.known.values()))
