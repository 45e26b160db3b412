"""What a block is worth: the terms the next turn may need, and only those that are not kept elsewhere already.

A term is an identifier, a name or a word. How likely it is needed is told by what is known before the reply: its kind,
how often the assistant has used it, how long ago it was last seen, and whether its block answers the last words. Each
of these is a factor. Weights were set on one half of 126 recorded conversations and checked on the other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Final

from gateway.core.fitting.draft import KEEP, Draft, Uses
from gateway.core.fitting.reader import Known
from gateway.core.message import SYSTEM_ROLES
from gateway.core.values import dataclass

#: how much a word, a name, an identifier among the last words asks for a block that holds it too
_ASKS: Final = (0.5, 1.0, 1.5)
#: what is left of a term that only the question holds
ASKED: Final = 0.1
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

    def odds(self, age: int, said: int, *, is_named: bool) -> float:
        """That a term is needed next, in relation to others: last seen so many messages ago, said in so many."""
        odds: float = age**-self.fading
        if not is_named:
            odds *= self.word
        return odds * self.said * self.said_again ** (min(said, 3) - 1) if said else odds


class Scores:
    """The worth of every block of a conversation, while choosing.

    A term that is kept is worth nothing more: what is left of each is one table, so that what a block adds is a plain
    sum over its terms.
    """

    def __init__(self, draft: Draft, worth: Worth, candidates: Mapping[int, Known]) -> None:
        #: what each term is worth now
        self.left = {**_weights(draft, worth)}
        #: how often something was kept
        self.kept = 0
        self._priorities = draft.conversation.priorities
        matches = _matches(draft, candidates, worth.neighbour)
        self._factor = {
            i: [(1 + worth.answer * match) * self._priorities.get(i, 1.0) for match in found]
            for i, found in matches.items()
        }

    def keep(self, terms: Iterable[str]) -> None:
        """These are kept from now on."""
        self.kept += 1
        self.left.update(dict.fromkeys(terms, 0.0))

    def keep_sent(self, draft: Draft, indices: Iterable[int]) -> None:
        """What is sent of these messages is kept.

        A question that names a thing does not say what is known of it: what only the question holds keeps a tenth.
        """
        last = len(draft.decisions) - 1
        is_question = draft.conversation.items[last].role == "user" and last not in draft.recalls
        if is_question:
            left = self.left
            left.update({term: ASKED * left[term] for terms in terms_kept(draft, (last,)) for term in terms})
        for terms in terms_kept(draft, [index for index in indices if index != last or not is_question]):
            self.keep(terms)

    def factors(self, index: int) -> Sequence[float]:
        """By which the terms of each block of a message are worth more."""
        return self._factor[index]

    def priority(self, index: int) -> float:
        """By which the terms of the uncut part of a message are worth more."""
        return self._priorities.get(index, 1.0)


def terms_kept(draft: Draft, indices: Iterable[int]) -> Iterator[Collection[str]]:
    """The terms of what is sent in the place of some messages, repeated lines included, in parts."""
    for index in indices:
        decision = draft.decisions[index]
        if decision == KEEP:
            yield draft.known(index).all_terms
        elif isinstance(decision, tuple):
            known = draft.known(index)
            yield known.fixed
            yield from map(known.terms.__getitem__, decision)
        for source, blocks in draft.recalls.get(index, ()):
            known = draft.known(source)
            yield from (known.terms[number] if number < len(known.terms) else known.fixed for number in blocks)


def last_words(draft: Draft) -> dict[str, float]:
    """Terms of the last user message, of what the conversation ends with, and of the last assistant text."""
    conversation, sketches = draft.conversation, draft.conversation.sketches
    spoken = {index for index in conversation.pinned if sketches[index].role not in SYSTEM_ROLES}
    said = next(
        (i for i in reversed(range(len(sketches))) if sketches[i].role == "assistant" and sketches[i].length), None
    )
    if said is not None:
        spoken.add(said)
    asks: dict[str, float] = {}
    for index in sorted(spoken):
        for term, kind in draft.known(index).all_terms.items():
            asks[term] = max(asks.get(term, 0.0), _ASKS[kind])
    return asks


def _weights(draft: Draft, worth: Worth) -> Mapping[str, float]:
    """Odds that a term is needed next, each in relation to the others: the same for all choices about a request."""
    found = draft.memo.weights.get(worth)
    if found is None:
        found = draft.memo.weights[worth] = _weighed(draft, worth)
    return found


def _weighed(draft: Draft, worth: Worth) -> dict[str, float]:
    # Whole tables at a time: term by term this would be the larger part of a choice.
    uses = draft.memo.uses
    if not uses:
        uses.append(uses_of(draft))
    last, said, named = uses[0]
    size = len(draft.decisions)
    fading = [(size - index) ** -worth.fading for index in range(size)]
    weights = {term: fading[index] if term in named else fading[index] * worth.word for term, index in last.items()}
    use = [1.0, *(worth.said * worth.said_again**more for more in range(3))]
    for term, times in said.items():
        weights[term] *= use[min(len(use) - 1, times)]
    return weights


def uses_of(draft: Draft) -> Uses:
    """Where the terms of a conversation are."""
    items = draft.conversation.items
    draft.read(item.index for item in items if item.role not in SYSTEM_ROLES)
    uses = Uses({}, Counter(), set())
    for item in items:
        if item.role in SYSTEM_ROLES:
            continue
        known = draft.known(item.index)
        draft.watch.tick(1 + len(known.all_terms) // _TERMS_A_PIECE)
        uses.last.update(dict.fromkeys(known.all_terms, item.index))
        uses.named.update(known.named)
        if item.role == "assistant":
            uses.said.update(iter(known.all_terms))
    return uses


def _matches(draft: Draft, candidates: Mapping[int, Known], spill: float) -> dict[int, list[float]]:
    """How well each block answers, 0 to about 1: BM25 in relation to the best of them."""
    asks = last_words(draft)
    answers: dict[int, list[list[str]]] = {}
    for index, known in candidates.items():
        draft.watch.tick(1 + known.length // _TERMS_A_PIECE)
        answers[index] = [list(filter(asks.__contains__, terms)) for terms in known.terms]
    holders = Counter(chain.from_iterable(chain.from_iterable(answers.values())))
    blocks = sum([len(known.terms) for known in candidates.values()])
    length = sum([known.length for known in candidates.values()])
    rarities = {term: rarity(asks[term], blocks, count) for term, count in holders.items()}
    scores = {}
    for index, known in candidates.items():
        draft.watch.tick(1 + len(known.terms) // _BLOCKS_A_PIECE)
        sums = [math.fsum(map(rarities.__getitem__, terms)) for terms in answers[index]]
        sizes = map(len, known.terms)
        scores[index] = [one and answered(one, size * blocks / length) for one, size in zip(sums, sizes, strict=True)]
    best = max(chain.from_iterable(scores.values()), default=0.0) or 1.0
    return {index: [score / best for score in _spilled(each, spill)] for index, each in scores.items()}


def rarity(asks: float, blocks: int, count: int) -> float:
    """What a word that asks is worth where `count` of so many blocks have it."""
    return asks * math.log(1 + (blocks - count + 0.5) / (count + 0.5))


def answered(score: float, length: float) -> float:
    """The score of a block; `length` in relation to the mean of all."""
    return score / (1 - _LENGTH + _LENGTH * length)


def _spilled(scores: Sequence[float], share: float) -> list[float]:
    beside = zip(scores, [0.0, *scores], [*scores[1:], 0.0], strict=False)
    # thousands of times in a choice, and `max` would take the half of that
    return [score + share * (before if before > after else after) for score, before, after in beside]  # noqa: FURB136
