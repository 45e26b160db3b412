"""Define the strategies that shorten a draft, in the configured order.

`condense` alone reaches every limit that can be reached. The others are for clients that want fewer changes to their
messages. `drop` is also the last resort when choosing took too long.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import Final, Protocol

from gateway.core.conversation.units import Unit
from gateway.core.trimming.dedupe import dedupe
from gateway.core.trimming.draft import (
    DROP,
    KEEP,
    SUMMARIZED,
    Decision,
    Draft,
    DuplicateResult,
    SummaryEntry,
    is_summarized,
)
from gateway.core.trimming.overlap import overlap
from gateway.core.trimming.reader import KnownBlocks
from gateway.core.trimming.relevance import RelevanceFactors
from gateway.core.trimming.select import condense
from gateway.core.trimming.summary import MESSAGE_OVERHEAD, Passage, SummaryNeeded, SummaryUse, ids_of
from gateway.core.values import dataclass


class Strategy(Protocol):
    """Shorten a draft. A strategy changes nothing that is pinned or before `draft.first`, and raises no error."""

    @property
    def name(self) -> str:
        """Return the name in the configuration."""

    @property
    def is_last_word(self) -> bool:
        """Return whether its result should stay; later strategies run only if the result is over the limit itself."""

    @property
    def may_drop(self) -> bool:
        """Return whether it leaves messages out; then the last resort may do so too."""

    def apply(self, draft: Draft, limit: int) -> Draft:
        """Return the draft with at most `limit` tokens if possible, else as short as this strategy can make it."""


#: If a choice leaves more than this share of the limit empty, the newest units fill it up.
_MAX_EMPTY_SHARE: Final = 0.5


@dataclass(frozen=True, slots=True)
class Dedupe:
    """Remove repeated tool results, whole or in part."""

    name: str = "dedupe"
    is_last_word: bool = False
    may_drop: bool = False

    def apply(self, draft: Draft, limit: int) -> Draft:  # noqa: ARG002 - it always removes all repetitions
        """Replace repetitions by references to the first result."""
        return overlap(dedupe(draft))


@dataclass(frozen=True, slots=True)
class Condense:
    """Keep the blocks with the highest relevance.

    Only the newest units with `most_characters` in total are read; a longer unit between them is skipped. The other
    units are left out, unless they fit unchanged in the end.
    """

    relevance: RelevanceFactors = field(default_factory=RelevanceFactors)
    most_characters: int = 2_000_000
    name: str = "condense"
    is_last_word: bool = True
    may_drop: bool = True

    def apply(self, draft: Draft, limit: int) -> Draft:
        """Choose the blocks of all units that may be changed."""
        left, unread = self.most_characters, list[Unit]()
        for unit in reversed(draft.open_units()):
            length = sum(draft.conversation.items[index].length for index in unit.indices)
            if length > left and unit.start != draft.conversation.task:
                unread.append(unit)
            else:
                left -= length
        readable = _leave_out(draft, -1, unread)[0] if unread else draft
        return fill_with_newest(draft, condense(readable, limit, self.relevance), limit)


def fill_with_newest(draft: Draft, chosen: Draft, limit: int) -> Draft:
    """Return the choice, with the newest units restored while they fit, if the choice left most of the room empty.

    Talk that repeats the same words has little value by its terms, but it is still a conversation.
    """
    fixed = sum(draft.tokens_of(index) for index in draft.conversation.pinned)
    room = limit - chosen.total()
    if room <= _MAX_EMPTY_SHARE * (limit - fixed):
        return chosen
    now, shown = list(chosen.decisions), set[int]()
    for unit in reversed(draft.open_units()):
        previous = {index: _restored(draft.decisions[index], index, now, shown) for index in unit.indices}
        if draft.conversation.priority(unit) == 0 or all(now[index] == previous[index] for index in previous):
            continue
        more = sum(draft.tokens_if(index, previous[index]) - chosen.tokens_of(index) for index in unit.indices)
        if more <= room:
            room -= more
            for index, decision in previous.items():
                now[index], before = decision, draft.decisions[index]
                if decision == KEEP and isinstance(before, DuplicateResult) and not before.parts:
                    shown.add(before.source)
    changes = {index: decision for index, decision in enumerate(now) if decision != chosen.decisions[index]}
    return chosen.with_decisions(changes) if changes else chosen


def _restored(previous: Decision, index: int, now: Sequence[Decision], shown: Collection[int]) -> Decision:
    """Return the earlier decision for a message, corrected for references.

    A reference to a result that is not whole now becomes the content itself, unless a newer copy has the content.
    """
    if index in shown:
        return ()
    if not isinstance(previous, DuplicateResult) or now[previous.source] == KEEP:
        return previous
    return () if previous.source in shown and not previous.parts else KEEP


@dataclass(frozen=True, slots=True)
class Shorten:
    """Keep the head and tail of long messages, oldest messages first."""

    #: Estimated tokens that are left of each long message, half of them its head and half its tail.
    tokens: int = 300
    name: str = "shorten"
    is_last_word: bool = False
    may_drop: bool = False

    def apply(self, draft: Draft, limit: int) -> Draft:
        """Cut the middle out of messages until the draft fits; references to them get new decisions."""
        total = draft.total()
        changes: dict[int, Decision] = {}
        pointing = draft.references()
        long = [index for unit in by_priority(draft) if not unit.sealed for index in unit.indices]
        for index in long:
            if total <= limit:
                break
            before = draft.tokens_if(index, KEEP)
            if changes.get(index, draft.decisions[index]) == KEEP and before > 2 * self.tokens:
                known = draft.known(index)
                resolved = _resolve_references(pointing.get(index, {}), changes)
                long += resolved
                resolved[index] = known.sliced.with_needed(_head_and_tail(known, self.tokens / 2))
                total += sum(draft.tokens_if(i, now) - draft.tokens_of(i) for i, now in resolved.items())
                changes.update(resolved)
        return draft.with_decisions(changes) if changes else draft


def _head_and_tail(known: KnownBlocks, each: float) -> set[int]:
    """Return the first and the last blocks, in about `each` tokens at either end."""
    return {*leading(known, each), *_up_to(range(len(known.tokens))[::-1], known, each)}


def leading(known: KnownBlocks, room: float) -> Iterator[int]:
    """Yield the first blocks, in about `room` tokens."""
    return _up_to(range(len(known.tokens)), known, room)


def _up_to(numbers: Sequence[int], known: KnownBlocks, room: float) -> Iterator[int]:
    for number in numbers:
        room -= known.tokens[number]
        if room < 0:
            return
        yield number


@dataclass(frozen=True, slots=True)
class Summarize:
    """Replace the oldest units by one text of a model. It does nothing without summaries to use."""

    #: most tokens of a summary
    tokens: int = 800
    use: SummaryUse = "off"
    #: texts of the existing summaries, by id
    summaries: Mapping[str, str] = field(default_factory=dict)
    #: most tokens of the whole conversation: a summary that leaves more is of no use
    most: int = 0
    name: str = "summarize"
    is_last_word: bool = True
    may_drop: bool = True

    def with_summaries(self, use: SummaryUse, summaries: Mapping[str, str], most: int) -> Summarize:
        """Return this strategy with summaries to use, and with the limit of the whole conversation."""
        return replace(self, use=use, summaries=summaries, most=most)

    def apply(self, draft: Draft, limit: int) -> Draft:
        """Replace as many units as necessary by a summary, which includes the present summary.

        Raises:
            SummaryNeeded: the summary has to be made first.
        """
        units = _summarizable_units(draft)
        old = draft.summary
        if self.use == "off" or not units or (old is not None and old[0] < draft.first):
            return draft
        room = self.tokens + MESSAGE_OVERHEAD - (draft.tokens_of(old[0]) if old is not None else 0)
        shorter, rest = _leave_out(draft, limit - room, units)
        needed = sum(shorter.decisions[unit.start] == DROP for unit in units)
        ids = ids_of(old[1].id if old is not None else None, (_keys(draft, unit) for unit in units))
        # Best is the number of units that is needed, then more. Fewer may still be enough for this turn.
        for count in (*range(max(1, needed), len(units) + 1), *range(needed - 1, 0, -1)):
            text = self.summaries.get(ids[count - 1])
            summarized = _with_summary(draft, units[:count], ids[count - 1], text) if text is not None else draft
            if summarized is not draft and summarized.total() <= min(self.most, draft.total() - 1):
                return summarized
        is_of_use = needed and rest + room <= min(self.most, draft.total() - 1)
        if self.use == "ask" and is_of_use and ids[needed - 1] not in self.summaries:
            raise SummaryNeeded(_passage_of(draft, units[:needed], ids[needed - 1]))
        return draft


def _summarizable_units(draft: Draft) -> list[Unit]:
    """Return the units that a summary may replace, in the order in which they are replaced.

    If the last turn begins with thinking that may be removed, its units are excluded. Otherwise the summary, a text of
    the assistant, would precede the remaining thinking of the turn, and the provider would refuse that.
    """
    conversation = draft.conversation
    task, turn, outlines = conversation.task, conversation.last_turn, conversation.outlines
    may_go = bool(turn) and outlines[turn[0]].thinks and turn[0] not in conversation.all_undroppable
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


def _with_summary(draft: Draft, units: Sequence[Unit], summary: str, text: str) -> Draft:
    """Return the draft with a new summary instead of these units and the present summary."""
    without, _ = _leave_out(draft, -1, units)
    first, *others = _summarized_messages(draft, units)
    changes: dict[int, Decision] = dict.fromkeys(others, SUMMARIZED)
    return without.with_decisions({**changes, first: SummaryEntry(summary, 1 + len(others), text)})


def _summarized_messages(draft: Draft, units: Sequence[Unit]) -> list[int]:
    """Return the messages of these units and those that the present summary replaces."""
    earlier = (index for index, decision in enumerate(draft.decisions) if is_summarized(decision))
    return sorted([*earlier, *(index for unit in units for index in unit.indices)])


def _passage_of(draft: Draft, units: Sequence[Unit], summary: str) -> Passage:
    old = draft.summary
    # A reference to another result is shown to the model as it is sent: its content is in that other result.
    newer = [
        draft.rendered(index).raw or b""
        if isinstance(draft.decisions[index], DuplicateResult)
        else draft.conversation.messages[index]
        for index in sorted(index for unit in units for index in unit.indices)
    ]
    count = len(_summarized_messages(draft, units))
    return Passage(summary, old[1].text if old is not None else None, tuple(newer), count)


@dataclass(frozen=True, slots=True)
class Drop:
    """Leave out whole units, oldest first; the first block of the task stays, or a gap mark."""

    #: whether the task may be read to find its first block, which may take long
    reads: bool = True
    name: str = "drop"
    is_last_word: bool = True
    may_drop: bool = True

    def apply(self, draft: Draft, limit: int) -> Draft:
        """Leave out units until the draft fits."""
        task = draft.conversation.task
        dropped, total = _leave_out(draft, limit, (unit for unit in by_priority(draft) if unit.start != task))
        return _shorten_task(dropped, limit, reads=self.reads) if total > limit else dropped


def drop_priority_zero(draft: Draft, limit: int) -> Draft:
    """Leave out units to which the client gave priority 0, oldest first, until the draft fits."""
    conversation = draft.conversation
    if 0 not in conversation.priorities.values():
        return draft
    worthless = (unit for unit in draft.open_units() if conversation.priority(unit) == 0)
    return _leave_out(draft, limit, (unit for unit in worthless if unit.start != conversation.task))[0]


def by_priority(draft: Draft) -> list[Unit]:
    """Return the units that may be changed, lowest priority first, then oldest."""
    return sorted(draft.open_units(), key=draft.conversation.priority)


def _leave_out(draft: Draft, limit: int, units: Iterable[Unit]) -> tuple[Draft, int]:
    """Return the draft without the units, or without as many as necessary to fit, and its tokens."""
    counts = [*draft.token_counts()]
    total = sum(counts)
    changes: dict[int, Decision] = {}
    pointing = draft.references()
    for unit in units:
        if total <= limit:
            break
        left = draft.least_decisions(unit)
        changes.update(left)
        for source in unit.indices:
            left |= _resolve_references(pointing.get(source, {}), changes)
            changes.update(left)
        for index, decision in left.items():
            now = draft.tokens_if(index, decision)
            total, counts[index] = total + now - counts[index], now
    return (draft.with_decisions(changes) if changes else draft), total


def _resolve_references(
    pointing: Mapping[int, DuplicateResult], changes: Mapping[int, Decision]
) -> dict[int, Decision]:
    """Return new decisions for references to a result that is not sent whole any more.

    The newest copy gets its content back, which no other message would show. The other copies become gap marks, the
    shortest form. A result that left out only parts becomes whole again.
    """
    left = {index: same for index, same in pointing.items() if index not in changes}
    newest = max((index for index, same in left.items() if not same.parts), default=None)
    return {index: KEEP if same.parts or index == newest else () for index, same in left.items()}


def _shorten_task(draft: Draft, limit: int, *, reads: bool) -> Draft:
    """Return the draft with the task shortened to its first block or a gap mark, if it may be changed."""
    unit = next((unit for unit in draft.open_units() if unit.start == draft.conversation.task), None)
    if unit is None or unit.sealed:
        return draft
    for picked in ((0,), ()) if reads and draft.known(unit.start).terms else ((),):
        shorter = draft.with_decisions({unit.start: picked})
        if shorter.total() <= limit:
            return shorter
    return shorter


DEFAULT: Final[tuple[Strategy, ...]] = (Dedupe(), Condense(), Shorten(), Drop())


def strategies_of(names: Sequence[str], *, shorten_tokens: int, summary_tokens: int = 800) -> tuple[Strategy, ...]:
    """Return the strategies with these names, in this order.

    Raises:
        ValueError: a name is unknown.
    """
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
