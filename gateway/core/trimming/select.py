"""Choose the blocks with the highest score that fit into a number of tokens.

Units are opened, and blocks taken, in the order of their relevance per token. A tool call and its results are one unit.
Opening it costs its frame (ids, names, short arguments), and only then can its blocks be taken one by one. A unit that
is never opened is left out as a whole. While blocks are taken, the relevance of the others only falls. So the heap may
hold outdated values, and only its first entry has to be computed again.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from math import inf
from typing import Final

from gateway.core.conversation.units import Unit
from gateway.core.trimming.answers import MAX_ANSWER_SHARE, rank_answers
from gateway.core.trimming.draft import DROP, KEEP, ChosenBlocks, Decision, Draft
from gateway.core.trimming.offers import BlockOffer, CandidateBlocks, Entry, UnitCandidate
from gateway.core.trimming.relevance import RelevanceFactors, Scores

#: Blocks are chosen by estimated tokens and then counted exactly, in up to so many rounds while room is left.
_ROUNDS: Final = 3
#: How often the number of undone steps to repeat is halved. Each time, the changed messages are counted again.
_HALVINGS: Final = 4
#: If less room than this share of the limit is left, there is no further round.
_MIN_ROOM_SHARE: Final = 0.02
#: A task that takes at most this share of the room is kept whole: everything else is done for the task.
_WHOLE_TASK_SHARE: Final = 0.3
#: Share of the room for whole messages that answer the newest question.
_ANSWERS_SHARE: Final = 0.5
#: Two ratios of relevance to tokens count as equal if they differ by less than this share.
_EQUAL_RATIO: Final = 1e-12


def condense(draft: Draft, limit: int, factors: RelevanceFactors) -> Draft:
    """Choose blocks again for every unit that may be changed, so that all messages have at most `limit` tokens.

    The result exceeds the limit only if the messages that must stay exceed it: pinned units, earlier decisions, and the
    start of the task.
    """
    choice = _Choice(draft, limit)
    return choice.repeat(draft.steps) if draft.steps else choice.choose(factors)


class _Choice:
    _blocks: CandidateBlocks

    def __init__(self, draft: Draft, limit: int) -> None:
        self._draft = draft
        self._limit = limit
        task = draft.conversation.task
        units = [unit for unit in draft.open_units() if unit.start == task or not _was_left_out(draft, unit)]
        items = draft.conversation.items
        blank: dict[int, Decision] = {i: KEEP if items[i].sealed else () for unit in units for i in unit.indices}
        frames = draft.with_decisions(blank).token_counts()
        draft.read(index for unit in units for index in unit.indices)
        self._units = {unit.start: self._candidate(unit, frames) for unit in units}
        #: the unit of each message
        self._starts = {index: unit.start for unit in units for index in unit.indices}
        #: the last draft, and the starts of the units that were changed since
        self._drafted = draft
        self._touched = {*self._units}
        self._steps: list[ChosenBlocks] = []
        #: estimated tokens that are still free; negative: over the limit
        self._room = 0.0
        #: estimated tokens of all steps
        self._taken = 0.0

    def _candidate(self, unit: Unit, frames: Sequence[int]) -> UnitCandidate:
        known = {index: self._draft.known(index) for index in unit.indices}
        return UnitCandidate(
            unit, sum(frames[index] for index in unit.indices), known, {i: set() for i in unit.indices}
        )

    def choose(self, factors: RelevanceFactors) -> Draft:
        """Choose by estimated tokens and count, until little room is left; then undo steps until it fits."""
        candidates = {index: known for candidate in self._units.values() for index, known in candidate.known.items()}
        fixed = [i for i in range(len(self._draft.decisions)) if i not in candidates]
        self._blocks = CandidateBlocks(candidates, Scores(self._draft, factors, candidates, fixed))
        counts = self._draft.token_counts()
        self._room = float(self._limit - sum(counts[index] for index in fixed))
        task = self._draft.conversation.task
        for candidate in self._bound_candidates():
            candidate.open(self._blocks.scores)
            self._room -= candidate.frame
        if task is not None and task in self._units:
            self._take_task(self._units[task], task)
        self._take_answers()
        waiting: list[Entry] = []
        for number, candidate in enumerate(self._units.values(), -len(self._units)):
            waiting += candidate.entries(self._blocks, ()) if candidate.is_open else ((-inf, number, 0.0),)
        draft = self._draft
        for _ in range(_ROUNDS):
            waiting = self._fill(waiting)
            draft = self._count()
            if not waiting or self._room < _MIN_ROOM_SHARE * self._limit:
                break
        return self._undo_until_it_fits(draft)

    def repeat(self, steps: Sequence[ChosenBlocks]) -> Draft:
        """Repeat the steps of an earlier choice that concern these units, and undo the last ones until it fits."""
        task = self._draft.conversation.task
        if task is not None and task in self._units:
            self._units[task].is_open = True
        for candidate in self._bound_candidates():
            candidate.is_open = True
        for step in steps:
            if step.start in self._units:
                self._add(step)
        return self._undo_until_it_fits(self._count())

    def _bound_candidates(self) -> Iterator[UnitCandidate]:
        """Yield the units that are always sent, at least their frames."""
        return (candidate for candidate in self._units.values() if candidate.unit.bound)

    def _undo_until_it_fits(self, draft: Draft) -> Draft:
        """Undo the last steps until the draft fits, then repeat as many of them as still fit.

        Small gaps between chosen blocks are closed, so a step may add several times its own tokens. How many cannot be
        known before counting. So the share of the steps is undone that the excess is of all tokens taken.
        """
        undone: list[ChosenBlocks] = []
        while self._room < 0 and self._steps:
            excess, freed = -self._room * self._taken / (self._taken - self._room), 0.0
            undone.clear()  # with the steps of an earlier round, the draft did not fit
            while self._steps and freed <= excess:
                undone.append(self._steps[-1])
                freed += self._take_back()
            draft = self._count()
        return self._repeat_some(draft, undone)

    def _repeat_some(self, draft: Draft, undone: Sequence[ChosenBlocks]) -> Draft:
        """Repeat as many steps as fit, the last of `undone` first. All do not fit; halving finds how many do."""
        fitting, too_many = 0, len(undone)
        for _ in range(_HALVINGS):
            tried = (too_many - fitting) // 2
            if not tried or self._room < _MIN_ROOM_SHARE * self._limit:
                break
            for step in undone[len(undone) - fitting - tried : len(undone) - fitting][::-1]:
                self._add(step)
            draft = self._count()
            if self._room >= 0:
                fitting += tried
                continue
            too_many = fitting + tried
            for _ in range(tried):
                self._take_back()
            draft = self._count()
        return draft

    def _add(self, step: ChosenBlocks) -> None:
        """Take the blocks of a step again."""
        candidate = self._units[step.start]
        candidate.is_open = True
        self._taken += float(candidate.frame) if step.opened else 0.0
        for index, number in step.added:
            candidate.picked[index].add(number)
            self._taken += candidate.known[index].tokens[number]
        self._steps.append(step)
        self._touched.add(step.start)

    def _count(self) -> Draft:
        touched = [self._units[start] for start in self._touched]
        items = self._draft.conversation.items
        changes = {
            index: _decision(candidate, index, is_sealed=items[index].sealed)
            for candidate in touched
            for index in candidate.unit.indices
        }
        self._touched.clear()
        self._drafted = draft = self._drafted.with_decisions(changes, tuple(self._steps))
        self._room = float(self._limit - draft.total())
        return draft

    def _take_task(self, candidate: UnitCandidate, task: int) -> None:
        """Take the task first: whole if it is short, else its first block or only its frame."""
        candidate.is_open = True
        short = _WHOLE_TASK_SHARE * self._room
        self._room -= candidate.frame
        if candidate.unit.sealed or not candidate.known[task].terms:
            return
        start = self._blocks.scores.starts[task]
        for count, room in ((len(candidate.known[task].terms), short), (1, self._room)):
            places = range(start, start + count)
            cost = sum(map(self._blocks.costs.__getitem__, places))
            if cost <= room:
                self._take(candidate, BlockOffer(0.0, cost, places))
                break

    def _take_answers(self) -> None:
        """Take whole messages that answer the newest question, best first, in a share of the room."""
        room, most = _ANSWERS_SHARE * self._room, MAX_ANSWER_SHARE * self._room
        for index in rank_answers(self._draft):
            candidate = self._units.get(index)
            if candidate is None or candidate.is_open or candidate.unit.sealed or len(candidate.known) > 1:
                continue
            start, known = self._blocks.scores.starts[index], candidate.known[index]
            cost = candidate.frame + sum(known.tokens)
            if cost <= min(room, most):
                room -= cost
                self._take(candidate, BlockOffer(0.0, cost, range(start, start + len(known.terms))))

    def _fill(self, heap: list[Entry]) -> list[Entry]:
        """Take offers in the order of their relevance per token; return the entries that had no room."""
        blocks, tick = self._blocks, self._draft.deadline.tick
        units = [*self._units.values()]
        without_room: list[Entry] = []
        heapq.heapify(heap)
        while heap:
            entry = stale, place, least = heapq.heappop(heap)
            if least > self._room:
                without_room.append(entry)
                continue
            tick()
            offer = blocks.offer_block(place) if place >= 0 else units[place].offer_opening(blocks, self._room)
            ratio, cost, places = offer
            if ratio <= 0:
                continue
            if -ratio > stale and heap and -ratio > (1 - _EQUAL_RATIO) * heap[0][0]:
                heapq.heappush(heap, (-ratio, place, least))
            elif cost > self._room:
                without_room.append(entry)
            else:
                candidate = units[place] if place < 0 else self._units[self._starts[blocks.indices[place]]]
                self._take(candidate, offer)
                if place < 0:
                    for other in candidate.entries(blocks, places):
                        heapq.heappush(heap, other)
        return without_room

    def _take(self, candidate: UnitCandidate, offer: BlockOffer) -> None:
        self._room -= offer.cost
        self._taken += offer.cost
        opened = not candidate.is_open
        if opened:
            candidate.open(self._blocks.scores)
        picks = self._blocks.take(offer.places)
        for index, number in picks:
            candidate.picked[index].add(number)
        self._steps.append(ChosenBlocks(candidate.unit.start, picks, opened))
        self._touched.add(candidate.unit.start)

    def _take_back(self) -> float:
        """Undo the last step; return the estimated tokens that it frees."""
        step = self._steps.pop()
        candidate = self._units[step.start]
        freed = float(candidate.frame) if step.opened else 0.0
        for index, number in step.added:
            candidate.picked[index].discard(number)
            freed += candidate.known[index].tokens[number]
        candidate.is_open = not step.opened
        self._touched.add(step.start)
        self._taken = max(0.0, self._taken - freed)
        return freed


def _was_left_out(draft: Draft, unit: Unit) -> bool:
    """Return whether an earlier trim left the unit out.

    Such a unit stays left out, because the prefix would change otherwise. Only recall repeats its lines.
    """
    return all(draft.decisions[index] == decision for index, decision in draft.least_decisions(unit).items())


def _decision(candidate: UnitCandidate, index: int, *, is_sealed: bool) -> Decision:
    if not candidate.is_open:
        return DROP
    if is_sealed:
        return KEEP
    known = candidate.known[index]
    picked = known.sliced.without_small_gaps(candidate.picked[index])
    return KEEP if len(picked) == len(known.sliced.blocks) and known.sliced.is_verbatim else picked
