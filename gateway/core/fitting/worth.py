"""What a block is worth: the terms the next turn may need, and only those that are not kept elsewhere already.

A term is an identifier, a name or a word. How likely it is needed is told by what is known before the reply: its kind,
how often the assistant has used it, how long ago it was last seen, and whether its block answers the last words. Each
of these is a factor. Weights were set on one half of 126 recorded conversations and checked on the other.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gateway.core.fitting.draft import KEEP, Draft
from gateway.core.fitting.reader import Known
from gateway.core.fitting.watch import Watch
from gateway.core.message import SYSTEM_ROLES

#: how much a word, a name, an identifier among the last words asks for a block that holds it too
_ASKS: Final = (0.5, 1.0, 1.5)
#: BM25: how far a long block is marked down
_LENGTH: Final = 0.4
#: so many terms looked up are a piece of work
_TERMS_A_PIECE: Final = 100
#: and so many blocks matched
_BLOCKS_A_PIECE: Final = 10


@dataclass(frozen=True, slots=True)
class Worth:
    """The factors."""

    #: an identifier or a name is 1; a word can mostly be said in other words
    word: float = 0.08
    #: a term that the assistant has used in a text or a call: what was of use once is of use again
    said: float = 4.0
    #: and for each further message of the assistant's with it, up to three
    said_again: float = 1.5
    #: worth falls with the distance in messages to the power of this: slowly, the newest turns are kept anyway
    fading: float = 0.3
    #: a block that answers the last words best gains ten times its worth: what is asked for now beats what may be
    answer: float = 10.0
    #: share of a neighbour's match that spills over: a table's row is read with the row beside it
    neighbour: float = 0.3


class Scores:
    """The worth of every block of a conversation, while choosing. `kept` grows with what is taken."""

    def __init__(self, draft: Draft, worth: Worth, candidates: Mapping[int, Known]) -> None:
        self.kept: set[str] = set()
        self._weights = _weights(draft, worth)
        self._priorities = draft.conversation.priorities
        matches = _matches(candidates, _last_words(draft), worth.neighbour, draft.watch)
        self._factor = {
            i: [(1 + worth.answer * match) * self._priorities.get(i, 1.0) for match in found]
            for i, found in matches.items()
        }

    def gain(self, index: int, number: int, terms: Iterable[str], taken: Collection[str] = ()) -> float:
        """What a block adds to what is kept and `taken`."""
        weights, kept = self._weights, self.kept
        gain = sum([weights.get(term, 0.0) for term in terms if term not in kept and term not in taken])
        return gain * self._factor[index][number] if gain else 0.0

    def gain_fixed(self, index: int, terms: Iterable[str]) -> float:
        """What the uncut part of a message adds."""
        weights, kept = self._weights, self.kept
        return sum(weights.get(term, 0.0) for term in terms if term not in kept) * self._priorities.get(index, 1.0)


def known_of(draft: Draft, index: int) -> Known:
    """What is known of a message."""
    return draft.known(index)


def terms_kept(draft: Draft, index: int) -> Iterator[str]:
    """The terms of what is sent in the place of a message, repeated lines included."""
    decision = draft.decisions[index]
    if decision == KEEP or isinstance(decision, tuple):
        known = known_of(draft, index)
        yield from known.fixed
        for number, terms in enumerate(known.terms):
            if decision == KEEP or number in decision:
                yield from terms
    for source, blocks in draft.recalls.get(index, ()):
        known = known_of(draft, source)
        for number in blocks:
            yield from known.terms[number] if number < len(known.terms) else known.fixed


def _last_words(draft: Draft) -> dict[str, float]:
    """Terms of the last user message, of what the conversation ends with, and of the last assistant text."""
    items = draft.conversation.items
    spoken = {item.index for item in items if item.pinned and item.role not in SYSTEM_ROLES}
    said = next((item.index for item in reversed(items) if item.role == "assistant" and item.length), None)
    if said is not None:
        spoken.add(said)
    asks: dict[str, float] = {}
    for index in spoken:
        for term, kind in known_of(draft, index).all_terms.items():
            asks[term] = max(asks.get(term, 0.0), _ASKS[kind])
    return asks


def _weights(draft: Draft, worth: Worth) -> dict[str, float]:
    """Odds that a term is needed next, each in relation to the others."""
    kinds: dict[str, int] = {}
    said: dict[str, int] = {}
    last: dict[str, int] = {}
    for item in draft.conversation.items:
        if item.role in SYSTEM_ROLES:
            continue
        terms = known_of(draft, item.index).all_terms
        draft.watch.tick(1 + len(terms) // _TERMS_A_PIECE)
        for term, kind in terms.items():
            if kinds.get(term, -1) < kind:
                kinds[term] = kind
            last[term] = item.index
            if item.role == "assistant":
                said[term] = said.get(term, 0) + 1
    end = len(draft.conversation.items)
    base = (worth.word, 1.0, 1.0)
    fade = [0.0, *(age**-worth.fading for age in range(1, end + 1))]
    use = [1.0, *(worth.said * worth.said_again**more for more in range(3))]
    return {
        term: base[kind] * fade[end - last[term]] * use[min(len(use) - 1, said.get(term, 0))]
        for term, kind in kinds.items()
    }


def _matches(
    candidates: Mapping[int, Known], asks: Mapping[str, float], spill: float, watch: Watch
) -> dict[int, list[float]]:
    """How well each block answers, 0 to about 1: BM25 in relation to the best of them."""
    scores = {index: [0.0] * len(known.terms) for index, known in candidates.items()}
    answering: list[tuple[int, int, int, set[str]]] = []
    holders: dict[str, int] = {}
    blocks = length = 0
    wanted = asks.keys()
    for index, known in candidates.items():
        blocks += len(known.terms)
        watch.tick(1 + len(known.terms) // _BLOCKS_A_PIECE)
        for number, terms in enumerate(known.terms):
            length += len(terms)
            if shared := wanted & terms.keys():
                answering.append((index, number, len(terms), shared))
                for term in shared:
                    holders[term] = holders.get(term, 0) + 1
    if not answering:
        return scores
    rarity = {t: asks[t] * math.log(1 + (blocks - n + 0.5) / (n + 0.5)) for t, n in holders.items()}
    for index, number, size, shared in answering:
        score = sum([rarity[term] for term in shared])
        scores[index][number] = score / (1 - _LENGTH + _LENGTH * size * blocks / length)
    best = max(max(found, default=0.0) for found in scores.values())
    return {index: [score / best for score in _spilled(found, spill)] for index, found in scores.items()}


def _spilled(scores: Sequence[float], share: float) -> list[float]:
    padded = [0.0, *scores, 0.0]
    return [score + share * max(padded[i], padded[i + 2]) for i, score in enumerate(scores)]
