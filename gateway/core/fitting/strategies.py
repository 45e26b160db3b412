"""Define the strategies that shorten a draft, in the configured order.

`condense` alone reaches every limit that can be reached; the others are for those who want less done to their
messages, and `drop` is what is left when choosing took too long.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import Final, Protocol

from gateway.core.conversation.units import Unit
from gateway.core.fitting.dedupe import dedupe
from gateway.core.fitting.draft import DROP, KEEP, SUMMED, Decision, Draft, DuplicateResult, SummaryEntry, is_summed
from gateway.core.fitting.overlap import overlap
from gateway.core.fitting.reader import KnownBlocks
from gateway.core.fitting.relevance import RelevanceFactors
from gateway.core.fitting.select import condense
from gateway.core.fitting.summary import AROUND, Passage, SummaryNeeded, Use, ids_of
from gateway.core.values import dataclass


class Strategy(Protocol):
    """Makes a draft lighter. It changes nothing that is pinned or before `draft.first`, and never fails."""

    @property
    def name(self) -> str:
        """As in the configuration."""

    @property
    def is_last_word(self) -> bool:
        """What it leaves should stay: those after it are asked only if that is over the limit itself."""

    @property
    def may_drop(self) -> bool:
        """It leaves messages out; so then may whoever has no more time to choose."""

    def apply(self, draft: Draft, limit: int) -> Draft:
        """The draft at `limit` tokens or less if this can be done, else as light as it gets."""


#: A choice that leaves more than this share of the limit empty is filled up with the newest units.
_EMPTY: Final = 0.5


@dataclass(frozen=True, slots=True)
class Dedupe:
    """Results that came twice, whole or in part."""

    name: str = "dedupe"
    is_last_word: bool = False
    may_drop: bool = False

    def apply(self, draft: Draft, limit: int) -> Draft:  # noqa: ARG002 - there is no half of it
        """Point at the first of them."""
        return overlap(dedupe(draft))


@dataclass(frozen=True, slots=True)
class Condense:
    """The blocks of most worth.

    Of the newest units so many are read as have `most_characters` in all, and a longer one between them is passed over.
    The others are left out, but for what has room as it is.
    """

    worth: RelevanceFactors = field(default_factory=RelevanceFactors)
    most_characters: int = 2_000_000
    name: str = "condense"
    is_last_word: bool = True
    may_drop: bool = True

    def apply(self, draft: Draft, limit: int) -> Draft:
        """Choose."""
        left, unread = self.most_characters, list[Unit]()
        for unit in reversed(draft.open_units()):
            length = sum(draft.conversation.items[index].length for index in unit.indices)
            if length > left and unit.start != draft.conversation.task:
                unread.append(unit)
            else:
                left -= length
        readable = _left_out(draft, -1, unread)[0] if unread else draft
        return filled(draft, condense(readable, limit, self.worth), limit)


def filled(draft: Draft, chosen: Draft, limit: int) -> Draft:
    """The choice, and where it left most of the room empty the newest units as they were, as many as fit.

    Talk that says the same words again is worth little by its terms, and is a conversation all the same.
    """
    fixed = sum(draft.weight(index) for index in draft.conversation.pinned)
    room = limit - chosen.total()
    if room <= _EMPTY * (limit - fixed):
        return chosen
    now, told = list(chosen.decisions), set[int]()
    for unit in reversed(draft.open_units()):
        was = {index: _restored(draft.decisions[index], index, now, told) for index in unit.indices}
        if draft.conversation.priority(unit) == 0 or all(now[index] == was[index] for index in was):
            continue
        more = sum(draft.weight_as(index, was[index]) - chosen.weight(index) for index in unit.indices)
        if more <= room:
            room -= more
            for index, decision in was.items():
                now[index], before = decision, draft.decisions[index]
                if decision == KEEP and isinstance(before, DuplicateResult) and not before.parts:
                    told.add(before.of)
    changes = {index: decision for index, decision in enumerate(now) if decision != chosen.decisions[index]}
    return chosen.having(changes) if changes else chosen


def _restored(was: Decision, index: int, now: Sequence[Decision], told: Collection[int]) -> Decision:
    """What a message was. What pointed at a result that is not whole now is itself, unless a newer copy told it."""
    if index in told:
        return ()
    if not isinstance(was, DuplicateResult) or now[was.of] == KEEP:
        return was
    return () if was.of in told and not was.parts else KEEP


@dataclass(frozen=True, slots=True)
class Shorten:
    """Head and tail of long messages, oldest first."""

    #: tokens that are left of each long message, about: half of them its head, half its tail
    tokens: int = 300
    name: str = "shorten"
    is_last_word: bool = False
    may_drop: bool = False

    def apply(self, draft: Draft, limit: int) -> Draft:
        """Cut the middle out until it fits; what points at what was cut goes the same way."""
        total = draft.total()
        changes: dict[int, Decision] = {}
        pointing = draft.pointing()
        long = [index for unit in by_priority(draft) if not unit.sealed for index in unit.indices]
        for index in long:
            if total <= limit:
                break
            before = draft.weight_as(index, KEEP)
            if changes.get(index, draft.decisions[index]) == KEEP and before > 2 * self.tokens:
                known = draft.known(index)
                alone = _alone(pointing.get(index, {}), changes)
                long += alone
                alone[index] = known.sliced.closed(_ends(known, self.tokens / 2))
                total += sum(draft.weight_as(i, now) - draft.weight(i) for i, now in alone.items())
                changes.update(alone)
        return draft.having(changes) if changes else draft


def _ends(known: KnownBlocks, each: float) -> set[int]:
    """The first and the last blocks, up to about `each` tokens on either side."""
    return {*leading(known, each), *_while(range(len(known.tokens))[::-1], known, each)}


def leading(known: KnownBlocks, room: float) -> Iterator[int]:
    """The first blocks, up to about so many tokens."""
    return _while(range(len(known.tokens)), known, room)


def _while(numbers: Sequence[int], known: KnownBlocks, room: float) -> Iterator[int]:
    for number in numbers:
        room -= known.tokens[number]
        if room < 0:
            return
        yield number


@dataclass(frozen=True, slots=True)
class Summarize:
    """One text, written by a model, for the oldest units. It does nothing until it is `given` summaries to use."""

    #: the most a summary may take
    tokens: int = 800
    use: Use = "off"
    #: texts of the summaries there are, by id
    summaries: Mapping[str, str] = field(default_factory=dict)
    #: more than this in all is of no use
    most: int = 0
    name: str = "summarize"
    is_last_word: bool = True
    may_drop: bool = True

    def given(self, use: Use, summaries: Mapping[str, str], most: int) -> Summarize:
        """This with summaries to use, and the limit that the whole conversation must not be over."""
        return replace(self, use=use, summaries=summaries, most=most)

    def apply(self, draft: Draft, limit: int) -> Draft:
        """Let a summary stand for as many units as it takes; the one there is goes into the new one.

        Raises:
            SummaryNeeded: it has to be made first.
        """
        units = _sent_behind_the_task(draft)
        old = draft.summary
        if self.use == "off" or not units or (old is not None and old[0] < draft.first):
            return draft
        room = self.tokens + AROUND - (draft.weight(old[0]) if old is not None else 0)
        lighter, rest = _left_out(draft, limit - room, units)
        needed = sum(lighter.decisions[unit.start] == DROP for unit in units)
        ids = ids_of(old[1].id if old is not None else None, (_keys(draft, unit) for unit in units))
        # Best is what is needed, then the next more; less is still enough for this turn.
        for count in (*range(max(1, needed), len(units) + 1), *range(needed - 1, 0, -1)):
            text = self.summaries.get(ids[count - 1])
            summed = _summed(draft, units[:count], ids[count - 1], text) if text is not None else draft
            if summed is not draft and summed.total() <= min(self.most, draft.total() - 1):
                return summed
        is_of_use = needed and rest + room <= min(self.most, draft.total() - 1)
        if self.use == "ask" and is_of_use and ids[needed - 1] not in self.summaries:
            raise SummaryNeeded(_passage(draft, units[:needed], ids[needed - 1]))
        return draft


def _sent_behind_the_task(draft: Draft) -> list[Unit]:
    """The units that a summary may stand for, in the order in which they go.

    None of a turn that begins with thinking which may go: the summary would be words of the assistant's before the
    thinking that is left of the turn, and refused for that.
    """
    conversation = draft.conversation
    task, turn, outlines = conversation.task, conversation.last_turn, conversation.outlines
    may_go = bool(turn) and outlines[turn[0]].thinks and turn[0] not in conversation.leaders
    stop = turn[0] if may_go else len(outlines)
    return [
        unit
        for unit in by_priority(draft)
        if task is not None
        and task < unit.start < stop
        and not unit.bound
        and any(draft.decisions[i] != DROP for i in unit.indices)
    ]


def _keys(draft: Draft, unit: Unit) -> Sequence[bytes]:
    return draft.conversation.keys[unit.start : unit.stop]


def _summed(draft: Draft, units: Sequence[Unit], summary: str, text: str) -> Draft:
    """The draft with a summary in the place of these units and the summary before it."""
    without, _ = _left_out(draft, -1, units)
    first, *others = _stood_for(draft, units)
    changes: dict[int, Decision] = dict.fromkeys(others, SUMMED)
    return without.having({**changes, first: SummaryEntry(summary, 1 + len(others), text)})


def _stood_for(draft: Draft, units: Sequence[Unit]) -> list[int]:
    """The messages of these units, and those that the present summary stands for."""
    earlier = (index for index, decision in enumerate(draft.decisions) if is_summed(decision))
    return sorted([*earlier, *(index for unit in units for index in unit.indices)])


def _passage(draft: Draft, units: Sequence[Unit], summary: str) -> Passage:
    old = draft.summary
    # What points at another result says no more where it is read than where it is sent.
    newer = [
        draft.made(index).raw or b""
        if isinstance(draft.decisions[index], DuplicateResult)
        else draft.conversation.messages[index]
        for index in sorted(index for unit in units for index in unit.indices)
    ]
    count = len(_stood_for(draft, units))
    return Passage(summary, old[1].text if old is not None else None, tuple(newer), count)


@dataclass(frozen=True, slots=True)
class Drop:
    """Whole units, oldest first; of the task its first block stays, or a mark."""

    #: the task may be read to find its first block; that may take long
    reads: bool = True
    name: str = "drop"
    is_last_word: bool = True
    may_drop: bool = True

    def apply(self, draft: Draft, limit: int) -> Draft:
        """Leave out until it fits."""
        task = draft.conversation.task
        dropped, total = _left_out(draft, limit, (unit for unit in by_priority(draft) if unit.start != task))
        return _stub(dropped, limit, reads=self.reads) if total > limit else dropped


def first_to_go(draft: Draft, limit: int) -> Draft:
    """Leave out what the client has said is worth nothing, oldest first, until it fits."""
    conversation = draft.conversation
    if 0 not in conversation.priorities.values():
        return draft
    worthless = (unit for unit in draft.open_units() if conversation.priority(unit) == 0)
    return _left_out(draft, limit, (unit for unit in worthless if unit.start != conversation.task))[0]


def by_priority(draft: Draft) -> list[Unit]:
    """The units that may be changed, those of least priority first, then the oldest."""
    return sorted(draft.open_units(), key=draft.conversation.priority)


def _left_out(draft: Draft, limit: int, units: Iterable[Unit]) -> tuple[Draft, int]:
    """The draft without as many of the units as it takes to fit, and its tokens."""
    weights = [*draft.weights()]
    total = sum(weights)
    changes: dict[int, Decision] = {}
    pointing = draft.pointing()
    for unit in units:
        if total <= limit:
            break
        left = draft.least(unit)
        changes.update(left)
        for source in unit.indices:
            left |= _alone(pointing.get(source, {}), changes)
            changes.update(left)
        for index, decision in left.items():
            now = draft.weight_as(index, decision)
            total, weights[index] = total + now - weights[index], now
    return (draft.having(changes) if changes else draft), total


def _alone(pointing: Mapping[int, DuplicateResult], changes: Mapping[int, Decision]) -> dict[int, Decision]:
    """What becomes of what points at a result that is not sent whole any more.

    The newest copy has its content back, which would be told nowhere; the others are the same again, and a gap mark is
    the shortest there is. What a part was left out of is whole again.
    """
    left = {index: same for index, same in pointing.items() if index not in changes}
    newest = max((index for index, same in left.items() if not same.parts), default=None)
    return {index: KEEP if same.parts or index == newest else () for index, same in left.items()}


def _stub(draft: Draft, limit: int, *, reads: bool) -> Draft:
    """The task cut down, where it may be."""
    unit = next((unit for unit in draft.open_units() if unit.start == draft.conversation.task), None)
    if unit is None or unit.sealed:
        return draft
    for picked in ((0,), ()) if reads and draft.known(unit.start).terms else ((),):
        shorter = draft.having({unit.start: picked})
        if shorter.total() <= limit:
            return shorter
    return shorter


DEFAULT: Final[tuple[Strategy, ...]] = (Dedupe(), Condense(), Shorten(), Drop())


def strategies_of(names: Sequence[str], *, shorten_tokens: int, summary_tokens: int = 800) -> tuple[Strategy, ...]:
    """The strategies of a configuration, in its order; ValueError for a name that is none."""
    strategies: Sequence[Strategy] = (
        Dedupe(),
        Condense(),
        Shorten(shorten_tokens),
        Summarize(summary_tokens),
        Drop(),
    )
    known = {strategy.name: strategy for strategy in strategies}
    for name in names:
        if name not in known:
            raise ValueError(f"{name!r} is no strategy; there are {', '.join(known)}")
    return tuple(known[name] for name in names)
