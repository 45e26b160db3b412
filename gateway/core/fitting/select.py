"""Which blocks to keep: the most worth for the tokens there are.

Units are opened and blocks taken by worth per token. A call and its results are one unit: opening it costs its frame
(ids, names, short arguments), and only then can its blocks be taken one by one; a unit that is never opened vanishes
whole. Worth only falls while blocks are taken, so that a heap of old values needs no more than a second look.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from gateway.core.conversation import Unit
from gateway.core.fitting.draft import DROP, KEEP, Decision, Draft, Pick, Step
from gateway.core.fitting.reader import Known
from gateway.core.fitting.worth import Scores, Worth, known_of

#: tokens a block costs beside its text: a gap mark, as often as not
GAP_TOKENS: Final = 1.5
#: Blocks are chosen by estimated tokens; so often the result is weighed and the rest of the room filled.
_ROUNDS: Final = 3
#: room smaller than this share of the limit is left empty
_CLOSE: Final = 0.02
_SAME: Final = 1e-12


def condense(draft: Draft, limit: int, worth: Worth) -> Draft:
    """Choose anew for every unit that is open, so that all messages together weigh at most `limit` tokens.

    The result is over the limit only where that which must stay already is: pinned units, what was decided before,
    and a stub of the task.
    """
    choice = _Choice(draft, limit)
    return choice.again(draft.steps) if draft.steps else choice.made(worth)


def cost_of(known: Known, number: int, picked: Collection[int]) -> float:
    """Estimated tokens of a block, with the table's head if it is the first of its rows."""
    cost = known.tokens[number]
    if known.costs[number] > cost and known.sliced.blocks[number].needs not in picked:
        cost = known.costs[number]
    return cost + GAP_TOKENS


@dataclass(frozen=True, slots=True)
class _Offer:
    """Blocks (and the frame, for a unit that is not open yet) at a price."""

    ratio: float
    cost: float
    picks: list[Pick]


@dataclass(slots=True)
class _Opening:
    """A unit under choice."""

    unit: Unit
    frame: int
    known: dict[int, Known]
    picked: dict[int, set[int]] = field(default_factory=dict)
    is_open: bool = False
    #: what opening it offers, and how many steps had been taken when that was worked out
    offer: _Offer | None = None
    steps: int = -1

    def left(self) -> Iterator[Pick]:
        for index, known in self.known.items():
            picked = self.picked[index]
            yield from ((index, number) for number in range(len(known.terms)) if number not in picked)

    def least(self, index: int, number: int) -> float:
        """The least that this block may cost, or the opening; what that offered is not made smaller to fit."""
        if index < 0:
            return self.offer.cost if self.offer is not None else self.frame
        return self.known[index].tokens[number] + GAP_TOKENS


class _Choice:
    _scores: Scores

    def __init__(self, draft: Draft, limit: int) -> None:
        self._draft = draft
        self._limit = limit
        units = [unit for unit in draft.open_units() if not _is_gone(draft, unit)]
        blank: dict[int, Decision] = {i: KEEP if unit.sealed else () for unit in units for i in unit.indices}
        frames = draft.having(blank).weights()
        draft.read(index for unit in units for index in unit.indices)
        self._units = {unit.start: self._opening(unit, frames) for unit in units}
        self._steps: list[Step] = []
        self._room = 0.0

    def _opening(self, unit: Unit, frames: Sequence[int]) -> _Opening:
        known = {index: known_of(self._draft, index) for index in unit.indices}
        return _Opening(unit, sum(frames[index] for index in unit.indices), known, {i: set() for i in unit.indices})

    def made(self, worth: Worth) -> Draft:
        """Fill by estimate, weigh, and fill or take back until it is right."""
        candidates = {index: known for opening in self._units.values() for index, known in opening.known.items()}
        fixed = [i for i in range(len(self._draft.decisions)) if i not in candidates]
        self._scores = Scores(self._draft, worth, candidates)
        self._scores.keep_sent(self._draft, fixed)
        self._room = float(self._limit - sum(self._draft.weight(index) for index in fixed))
        task = self._draft.conversation.task
        if task is not None and task in self._units:
            self._start_with(self._units[task], task)
        draft = self._drafted()
        for _ in range(_ROUNDS):
            steps = len(self._steps)
            self._fill()
            draft = self._weighed()
            if len(self._steps) == steps or self._room < _CLOSE * self._limit:
                break
        return self._within(draft)

    def again(self, steps: Sequence[Step]) -> Draft:
        """What was chosen among these units and others, the least of it taken back until it fits."""
        task = self._draft.conversation.task
        if task is not None and task in self._units:
            self._units[task].is_open = True
        for step in steps:
            if step.start in self._units:
                opening = self._units[step.start]
                opening.is_open = True
                for index, number in step.added:
                    opening.picked[index].add(number)
                self._steps.append(step)
        return self._within(self._weighed())

    def _within(self, draft: Draft) -> Draft:
        while self._room < 0 and self._steps:
            freed = 0.0
            while self._steps and freed <= -self._room:
                freed += self._take_back()
            draft = self._weighed()
        return draft

    def _weighed(self) -> Draft:
        draft = self._drafted()
        self._room = float(self._limit - draft.total())
        return draft

    def _start_with(self, opening: _Opening, task: int) -> None:
        """The task stays whatever else goes: its first block, or a mark that there was one."""
        opening.is_open = True
        self._room -= opening.frame
        if not opening.unit.sealed and opening.known[task].terms:
            cost = cost_of(opening.known[task], 0, ())
            if cost <= self._room:
                self._take(opening, _Offer(0.0, cost, [(task, 0)]))

    def _fill(self) -> None:
        heap = [entry for opening in self._units.values() for entry in self._entries(opening)]
        heapq.heapify(heap)
        while heap:
            stale, start, index, number = heapq.heappop(heap)
            opening = self._units[start]
            if opening.least(index, number) > self._room:
                continue
            offer = self._bundle(opening) if index < 0 else self._single(opening, index, number)
            if offer.ratio <= 0:
                continue
            if -offer.ratio > stale + _SAME and heap and -offer.ratio > heap[0][0]:
                heapq.heappush(heap, (-offer.ratio, start, index, number))
            elif offer.cost <= self._room:
                self._take(opening, offer)
                if index < 0:
                    for entry in self._entries(opening):
                        heapq.heappush(heap, entry)

    def _entries(self, opening: _Opening) -> Iterator[tuple[float, int, int, int]]:
        """What can be taken of a unit: its blocks once it is open, before that the opening (message -1)."""
        if not opening.is_open:
            if opening.least(-1, -1) <= self._room:
                # an offer of an earlier round is no less than what it is now, and is looked at again when it is due
                offer = opening.offer or self._bundle(opening)
                yield -offer.ratio, opening.unit.start, -1, -1
            return
        for index, number in opening.left():
            if opening.least(index, number) <= self._room:
                ratio = self._single(opening, index, number).ratio
                if ratio > 0:
                    yield -ratio, opening.unit.start, index, number

    def _single(self, opening: _Opening, index: int, number: int) -> _Offer:
        self._draft.watch.tick()
        known = opening.known[index]
        cost = cost_of(known, number, opening.picked[index])
        return _Offer(self._scores.gain(index, number, known.terms[number]) / cost, cost, [(index, number)])

    def _bundle(self, opening: _Opening) -> _Offer:
        """Opening a unit with as many of its best blocks as raise the worth per token of the whole."""
        if opening.offer is None or opening.steps != len(self._steps):
            opening.offer, opening.steps = self._bundled(opening), len(self._steps)
        return opening.offer

    def _bundled(self, opening: _Opening) -> _Offer:
        scores = self._scores
        gain = sum([scores.gain_fixed(index, known.fixed) for index, known in opening.known.items()])
        cost = float(opening.frame)
        best = gain / cost
        picks: list[Pick] = []
        taken: set[str] = set()
        for _, index, number, alone, price in self._singles(opening):
            terms = opening.known[index].terms[number]
            more = gain + (scores.gain_beside(index, number, terms, taken) if taken else alone)
            if more / (cost + price) <= best:
                break
            gain, cost = more, cost + price
            best = gain / cost
            taken.update(terms)
            picks.append((index, number))
        return _Offer(best, cost, picks)

    def _singles(self, opening: _Opening) -> list[tuple[float, int, int, float, float]]:
        """All blocks of a unit of which none is taken, the best first: its rank, which, what it adds, its cost."""
        found: list[tuple[float, int, int, float, float]] = []
        for index, known in opening.known.items():
            self._draft.watch.tick(1 + len(known.terms))
            gains = self._scores.gains(index, known.terms)
            costs = [cost + GAP_TOKENS for cost in known.costs]
            found += [
                (-gain / cost, index, number, gain, cost)
                for number, (gain, cost) in enumerate(zip(gains, costs, strict=True))
            ]
        found.sort()
        return found

    def _take(self, opening: _Opening, offer: _Offer) -> None:
        self._room -= offer.cost
        opened = not opening.is_open
        opening.is_open = True
        if opened:
            for known in opening.known.values():
                self._scores.keep(known.fixed)
        for index, number in offer.picks:
            opening.picked[index].add(number)
            self._scores.keep(opening.known[index].terms[number])
        self._steps.append(Step(opening.unit.start, offer.picks, opened))

    def _take_back(self) -> float:
        """Undo the last step; estimated tokens freed."""
        step = self._steps.pop()
        opening = self._units[step.start]
        freed = float(opening.frame) if step.opened else 0.0
        for index, number in step.added:
            opening.picked[index].discard(number)
            freed += opening.known[index].tokens[number]
        opening.is_open = not step.opened
        return freed

    def _drafted(self) -> Draft:
        changes = {
            index: _decision(opening, index) for opening in self._units.values() for index in opening.unit.indices
        }
        return replace(self._draft.having(changes), steps=tuple(self._steps))


def _is_gone(draft: Draft, unit: Unit) -> bool:
    """Left out by an earlier cut: it stays so, or the beginning would be another one; recall is what brings it back."""
    return all(draft.decisions[index] == DROP for index in unit.indices)


def _decision(opening: _Opening, index: int) -> Decision:
    if not opening.is_open:
        return DROP
    if opening.unit.sealed:
        return KEEP
    known = opening.known[index]
    picked = known.sliced.closed(opening.picked[index])
    return KEEP if len(picked) == len(known.sliced.blocks) and known.sliced.is_verbatim else picked
