"""The ways to make a draft lighter, tried in their configured order until it fits.

`condense` alone reaches every limit that can be reached; the others are for those who want less done to their
messages, and `drop` is what is left when choosing took too long.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from gateway.core.fitting.dedupe import dedupe
from gateway.core.fitting.draft import DROP, KEEP, Decision, Draft
from gateway.core.fitting.reader import Known
from gateway.core.fitting.select import condense
from gateway.core.fitting.worth import Worth, known_of


class Strategy(Protocol):
    """Makes a draft lighter. It changes nothing that is pinned or before `draft.first`, and never fails."""

    @property
    def name(self) -> str:
        """As in the configuration."""

    @property
    def is_last_word(self) -> bool:
        """What it leaves should stay: those after it are asked only if that is over the limit itself."""

    def apply(self, draft: Draft, limit: int) -> Draft:
        """The draft at `limit` tokens or less if this can be done, else as light as it gets."""


@dataclass(frozen=True, slots=True)
class Dedupe:
    """Results that came twice."""

    name: str = "dedupe"
    is_last_word: bool = False

    def apply(self, draft: Draft, limit: int) -> Draft:  # noqa: ARG002 - there is no half of it
        """Point at the first of them."""
        return dedupe(draft)


@dataclass(frozen=True, slots=True)
class Condense:
    """The blocks of most worth. Units beyond `most_characters`, counted from the newest, are dropped unread."""

    worth: Worth = field(default_factory=Worth)
    most_characters: int = 2_000_000
    name: str = "condense"
    is_last_word: bool = True

    def apply(self, draft: Draft, limit: int) -> Draft:
        """Choose; what is beyond the characters is not even read."""
        read, changes = 0, dict[int, Decision]()
        task = draft.conversation.task
        for unit in reversed(draft.open_units()):
            read += sum(len(draft.conversation.items[index].text) for index in unit.indices)
            if read > self.most_characters and unit.start != task:
                changes.update(dict.fromkeys(unit.indices, DROP))
        if not changes:
            return condense(draft, limit, self.worth)
        return Drop().apply(draft.having(changes), limit)


@dataclass(frozen=True, slots=True)
class Shorten:
    """Head and tail of long messages, oldest first."""

    #: about what is left of each, half of it head
    tokens: int = 300
    name: str = "shorten"
    is_last_word: bool = False

    def apply(self, draft: Draft, limit: int) -> Draft:
        """Cut the middle out until it fits."""
        total = draft.total()
        for unit in draft.open_units():
            for index in () if unit.sealed else unit.indices:
                if total <= limit:
                    return draft
                before = draft.weight(index)
                if draft.decisions[index] == KEEP and before > 2 * self.tokens:
                    known = known_of(draft, index)
                    draft = draft.having({index: known.sliced.closed(_ends(known, self.tokens / 2))})
                    total += draft.weight(index) - before
        return draft


def _ends(known: Known, each: float) -> set[int]:
    """The first and the last blocks, up to about `each` tokens on either side."""
    numbers = range(len(known.tokens))
    return {*_while(numbers, known, each), *_while(numbers[::-1], known, each)}


def _while(numbers: Sequence[int], known: Known, room: float) -> Iterator[int]:
    for number in numbers:
        room -= known.tokens[number]
        if room < 0:
            return
        yield number


@dataclass(frozen=True, slots=True)
class Drop:
    """Whole units, oldest first; of the task its first block stays, or a mark."""

    name: str = "drop"
    is_last_word: bool = True

    def apply(self, draft: Draft, limit: int) -> Draft:
        """Leave out until it fits."""
        total = draft.total()
        task = draft.conversation.task
        for unit in draft.open_units():
            if total <= limit:
                return draft
            if unit.start != task:
                total -= sum(draft.weight(index) for index in unit.indices)
                draft = draft.having(dict.fromkeys(unit.indices, DROP))
        return _stub(draft, limit) if total > limit else draft


def _stub(draft: Draft, limit: int) -> Draft:
    """The task cut down, where it may be."""
    unit = next((unit for unit in draft.open_units() if unit.start == draft.conversation.task), None)
    if unit is None or unit.sealed:
        return draft
    for picked in ((0,), ()) if known_of(draft, unit.start).terms else ((),):
        shorter = draft.having({unit.start: picked})
        if shorter.total() <= limit:
            return shorter
    return shorter


DEFAULT: Final[tuple[Strategy, ...]] = (Dedupe(), Condense(), Shorten(), Drop())
