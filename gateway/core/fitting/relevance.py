"""Score blocks by the terms that the next turn may need and that no other kept block has.

A term is an identifier, a name or a word. How likely it is needed is told by what is known before the reply: its kind,
how often the assistant has used it, how long ago it was last seen, and whether its block answers the last words. Each
of these is a factor. Weights were set on one half of 126 recorded conversations and checked on the other.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, count
from typing import Final

from gateway.core.conversation.message import SYSTEM_ROLES, text_of
from gateway.core.fitting.draft import KEEP, Draft, TermUses
from gateway.core.fitting.identifiers import LONGEST, called, codes_in
from gateway.core.fitting.reader import KnownBlocks
from gateway.core.fitting.terms import IDENTIFIER
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
class RelevanceFactors:
    """The factors."""

    #: an identifier or a name is 1; a word can mostly be said in other words
    word: float = 0.08
    #: a term that the assistant has used in a text or a call: what was of use once is of use again
    said: float = 4.0
    #: and for each further message of the assistant's with it, up to three
    said_again: float = 1.5
    #: an identifier that nobody has used yet, of a form that the tools ask for: it will be
    asked_for: float = 10.0
    #: a value of a result under a name that is also a parameter's
    parameter: float = 3.0
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

    Blocks have places, one after the other in the order of the candidates; behind them has each candidate one for what
    cannot be cut of it. A term that is kept is worth nothing more: it is taken off the sums of all places that have it,
    once, so that what a block adds is there to be read.
    """

    def __init__(
        self, draft: Draft, worth: RelevanceFactors, candidates: Mapping[int, KnownBlocks], sent: Iterable[int] = ()
    ) -> None:
        #: what each term is worth now
        self.left = {**_weights(draft, worth)}
        known = candidates.values()
        #: the place of the first block of each message, and that of what cannot be cut of it
        self.starts = dict(zip(candidates, accumulate([len(one.terms) for one in known], initial=0), strict=False))
        #: by place
        self.terms = list(chain.from_iterable([one.terms for one in known]))
        codes = self._name_codes(draft, known)
        self.frames = dict(zip(candidates, count(len(self.terms)), strict=False))
        self._holders = _holders(draft, self.terms)
        priorities = draft.conversation.priorities
        #: by which the sum of each place is worth more
        self.factors = _factors(draft, worth, candidates, self._holders, codes)
        self._keep_sent(draft, sent)
        for place, one in zip(self.frames.values(), known, strict=True):
            self.terms.append(one.fixed)
            for term in one.fixed:
                self._holders[term].append(place)
        self.factors += [priorities.get(index, 1.0) for index in candidates]
        worth_of = self.left.__getitem__
        #: what the terms of each place are worth together
        self.sums = [sum(map(worth_of, terms)) for terms in self.terms]

    def _name_codes(self, draft: Draft, known: Iterable[KnownBlocks]) -> Sequence[str]:
        """Make the codes that the question names terms of the blocks that are called by them; which they are."""
        question = _question(draft)
        if question is None or draft.conversation.items[question].length > LONGEST:
            return ()
        codes = codes_in(text_of(draft.conversation.messages[question]))
        if codes:
            texts = (block.text for one in known for block in one.sliced.blocks)
            for place, code in called(codes, draft.watch.over(texts)):
                self.terms[place] = (*self.terms[place], code)
            self.left.update(dict.fromkeys(codes, ASKED))
        return codes

    def keep(self, terms: Iterable[str]) -> None:
        """These are kept from now on."""
        left, holders, sums = self.left, self._holders, self.sums
        for term in terms:
            worth = left[term]
            if worth:
                left[term] = 0.0
                for place in holders.get(term, ()):
                    sums[place] -= worth

    def _keep_sent(self, draft: Draft, indices: Iterable[int]) -> None:
        """What is sent of these messages is kept.

        A question that names a thing does not say what is known of it: what only the question holds keeps a tenth.
        """
        left, question = self.left, _question(draft)
        if question is not None:
            left.update({term: ASKED * left[term] for terms in terms_kept(draft, (question,)) for term in terms})
        for terms in terms_kept(draft, [index for index in indices if index != question]):
            left.update(dict.fromkeys(terms, 0.0))


def _question(draft: Draft) -> int | None:
    """The last message, where it is the user's as it came."""
    last = len(draft.decisions) - 1
    return last if draft.conversation.items[last].role == "user" and last not in draft.recalls else None


def _holders(draft: Draft, terms_of: Sequence[Sequence[str]]) -> defaultdict[str, list[int]]:
    """The places that have a term."""
    holders = defaultdict[str, list[int]](list)
    for place, terms in enumerate(terms_of):
        if not place % _BLOCKS_A_PIECE:
            draft.watch.tick()
        for term in terms:
            holders[term].append(place)
    return holders


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
    conversation, outlines = draft.conversation, draft.conversation.outlines
    spoken = {index for index in conversation.pinned if outlines[index].role not in SYSTEM_ROLES}
    said = next(
        (i for i in reversed(range(len(outlines))) if outlines[i].role == "assistant" and outlines[i].length), None
    )
    if said is not None:
        spoken.add(said)
    asks: dict[str, float] = {}
    for index in sorted(spoken):
        for term, kind in draft.known(index).all_terms.items():
            asks[term] = max(asks.get(term, 0.0), _ASKS[kind])
    return asks


def _weights(draft: Draft, worth: RelevanceFactors) -> Mapping[str, float]:
    """Odds that a term is needed next, each in relation to the others: the same for all choices about a request."""
    found = draft.memo.weights.get(worth)
    if found is None:
        found = draft.memo.weights[worth] = _counted(draft, worth)
    return found


def _counted(draft: Draft, worth: RelevanceFactors) -> dict[str, float]:
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
    for term in draft.parameters.wanted([term for term in named if term not in said]):
        weights[term] *= worth.asked_for
    return weights


def uses_of(draft: Draft) -> TermUses:
    """Where the terms of a conversation are."""
    items = draft.conversation.items
    draft.read(item.index for item in items if item.role not in SYSTEM_ROLES)
    uses = TermUses({}, Counter(), set())
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


def _factors(
    draft: Draft,
    worth: RelevanceFactors,
    candidates: Mapping[int, KnownBlocks],
    holders: Mapping[str, Sequence[int]],
    codes: Iterable[str],
) -> list[float]:
    """By which the terms of each block are worth more: how well it answers, 0 to about 1, BM25 in relation to the best.

    And what the client has said of its message, and whether the tools take a value of that name.
    """
    blocks = sum([len(known.terms) for known in candidates.values()])
    length = sum([known.length for known in candidates.values()])
    scores = [0.0] * blocks
    for term, asks in (last_words(draft) | dict.fromkeys(codes, _ASKS[IDENTIFIER])).items():
        places = holders.get(term)
        if places:
            weight = rarity(asks, blocks, len(places))
            for place in places:
                scores[place] += weight
    sizes = [len(terms) for known in candidates.values() for terms in known.terms]
    mean = length / blocks if blocks else 0.0
    scores = [score and answered(score, size / mean) for score, size in zip(scores, sizes, strict=True)]
    by = worth.answer / (max(scores, default=0.0) or 1.0)
    parameters, priorities = draft.parameters, draft.conversation.priorities
    factors: list[float] = []
    for index, known in candidates.items():
        start, priority = len(factors), priorities.get(index, 1.0)
        found = scores[start : start + len(known.terms)]
        factors += [(1 + by * score) * priority for score in _spilled(found, worth.neighbour)]
        for number in parameters.named_in(known.labels):
            factors[start + number] *= worth.parameter
    return factors


def rarity(asks: float, blocks: int, count: int) -> float:
    """What a word that asks is worth where `count` of so many blocks have it."""
    return asks * math.log(1 + (blocks - count + 0.5) / (count + 0.5))


def answered(score: float, length: float) -> float:
    """The score of a block; `length` in relation to the mean of all."""
    return score / (1 - _LENGTH + _LENGTH * length)


def _spilled(scores: Sequence[float], share: float) -> list[float]:
    overhead = zip(scores, [0.0, *scores], [*scores[1:], 0.0], strict=False)
    # thousands of times in a choice, and `max` would take the half of that
    return [score + share * (before if before > after else after) for score, before, after in overhead]  # noqa: FURB136
