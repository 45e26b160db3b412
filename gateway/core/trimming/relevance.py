"""Score blocks by the terms that the next turn may need and that no other kept block has.

A term is an identifier, a name or a word. The score estimates how likely the next turn needs it, from facts that are
known before the model replies. Each of these is a factor:

- the kind of the term
- how often the assistant has used it
- how long ago it last occurred
- whether its block answers the last words

The factors were tuned on one half of 126 recorded conversations and checked on the other half.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, count
from typing import Final

from gateway.core.conversation.message import SYSTEM_ROLES, text_of
from gateway.core.trimming.draft import KEEP, Draft, TermUses
from gateway.core.trimming.identifiers import MAX_QUESTION_CHARS, find_codes, find_labelled
from gateway.core.trimming.reader import KnownBlocks
from gateway.core.trimming.terms import IDENTIFIER
from gateway.core.trimming.worklists import find_open_values
from gateway.core.values import dataclass

#: How much a word, a name or an identifier in the last words counts for a block that has it too.
_QUESTION_FACTORS: Final = (0.5, 1.0, 1.5)
#: Share of its relevance that a term keeps if only the question has it.
ASKED_SHARE: Final = 0.1
#: BM25 parameter: how much a long block is marked down.
_LENGTH_PENALTY: Final = 0.4
#: Term lookups that count as one piece of work for the deadline.
_TERMS_PER_TICK: Final = 100
#: Blocks matched that count as one piece of work.
_BLOCKS_PER_TICK: Final = 10


@dataclass(frozen=True, slots=True)
class RelevanceFactors:
    """Factors that make up the relevance of terms and blocks."""

    #: A plain word, relative to an identifier or a name: words can mostly be replaced by others.
    word: float = 0.08
    #: A term that the assistant has used in a text or a call: what was useful once is useful again.
    said: float = 4.0
    #: The same for each further assistant message with the term, up to three.
    said_again: float = 1.5
    #: An identifier that no assistant message has used, with the shape of a tool's example: it will be needed.
    asked_for: float = 10.0
    #: An open value of a list that the assistant works through: it is needed until a call has it.
    open_value: float = 10.0
    #: A value of a result under the name of a tool's parameter.
    parameter: float = 3.0
    #: Relevance falls with the distance in messages to this power: slowly, because the newest turns are kept anyway.
    fading: float = 0.3
    #: The block that answers the last words best gains ten times its relevance: the present question counts most.
    answer: float = 10.0
    #: Share of a neighbour's match that a block gains: a table row is read with the row next to it.
    neighbour: float = 0.3

    def odds(self, age: int, uses: int, *, is_named: bool) -> float:
        """Return the relative likelihood that a term is needed: `age` in messages, used in `uses` of the assistant."""
        odds: float = age**-self.fading
        if not is_named:
            odds *= self.word
        return odds * self.said * self.said_again ** (min(uses, 3) - 1) if uses else odds


class Scores:
    """The relevance of every block of a conversation while blocks are chosen.

    Each block has a place, numbered in the order of the candidates. After all blocks, each candidate has one more place
    for its fixed part. A term that is kept has no more relevance. It is subtracted once from the sums of all places
    that have it, so the sum of a place is always what its block would add.
    """

    def __init__(
        self,
        draft: Draft,
        relevance_factors: RelevanceFactors,
        candidates: Mapping[int, KnownBlocks],
        sent: Iterable[int] = (),
    ) -> None:
        #: the present relevance of each term
        self.left = {**_term_relevance(draft, relevance_factors)}
        known = candidates.values()
        #: the place of the first block of each message; `frames`: the place of its fixed part
        self.starts = dict(zip(candidates, accumulate([len(one.terms) for one in known], initial=0), strict=False))
        #: the terms of each place
        self.terms = list(chain.from_iterable([one.terms for one in known]))
        codes = self._name_codes(draft, known)
        self.frames = dict(zip(candidates, count(len(self.terms)), strict=False))
        self._holders = _holders(draft, self.terms)
        priorities = draft.conversation.priorities
        #: the factor of each place, by which its sum is multiplied
        self.factors = _block_factors(draft, relevance_factors, candidates, self._holders, codes)
        self._keep_sent(draft, sent)
        for place, one in zip(self.frames.values(), known, strict=True):
            self.terms.append(one.fixed)
            for term in one.fixed:
                self._holders[term].append(place)
        self.factors += [priorities.get(index, 1.0) for index in candidates]
        worth_of = self.left.__getitem__
        #: the relevance of all terms of each place together
        self.sums = [sum(map(worth_of, terms)) for terms in self.terms]

    def _name_codes(self, draft: Draft, known: Iterable[KnownBlocks]) -> Sequence[str]:
        """Add the codes that the question names as terms of the blocks labelled with them; return the codes."""
        question = _question(draft)
        if question is None or draft.conversation.items[question].length > MAX_QUESTION_CHARS:
            return ()
        codes = find_codes(text_of(draft.conversation.messages[question]))
        if codes:
            texts = (block.text for one in known for block in one.sliced.blocks)
            for place, code in find_labelled(codes, draft.deadline.over(texts)):
                self.terms[place] = (*self.terms[place], code)
            self.left.update(dict.fromkeys(codes, ASKED_SHARE))
        return codes

    def keep(self, terms: Iterable[str]) -> None:
        """Mark terms as kept: they have no more relevance."""
        left, holders, sums = self.left, self._holders, self.sums
        for term in terms:
            relevance = left[term]
            if relevance:
                left[term] = 0.0
                for place in holders.get(term, ()):
                    sums[place] -= relevance

    def _keep_sent(self, draft: Draft, indices: Iterable[int]) -> None:
        """Mark the terms of messages that are sent as kept.

        A question that names a thing does not say what is known of it. So a term that only the question has keeps a
        tenth of its relevance.
        """
        left, question = self.left, _question(draft)
        if question is not None:
            left.update({term: ASKED_SHARE * left[term] for terms in kept_terms(draft, (question,)) for term in terms})
        for terms in kept_terms(draft, [index for index in indices if index != question]):
            left.update(dict.fromkeys(terms, 0.0))


def _question(draft: Draft) -> int | None:
    """Return the index of the last message if it is the user's and has no recalled lines, else None."""
    last = len(draft.decisions) - 1
    return last if draft.conversation.items[last].role == "user" and last not in draft.recalls else None


def _holders(draft: Draft, terms_of: Sequence[Sequence[str]]) -> defaultdict[str, list[int]]:
    """Return the places that have each term."""
    holders = defaultdict[str, list[int]](list)
    for place, terms in enumerate(terms_of):
        if not place % _BLOCKS_PER_TICK:
            draft.deadline.tick()
        for term in terms:
            holders[term].append(place)
    return holders


def kept_terms(draft: Draft, indices: Iterable[int]) -> Iterator[Collection[str]]:
    """Yield the terms of messages as they are sent, including recalled lines, in several collections per message."""
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
    """Return the terms of the last user message, of the end of the conversation, and of the last assistant text."""
    conversation, outlines = draft.conversation, draft.conversation.outlines
    spoken = {index for index in conversation.pinned if outlines[index].role not in SYSTEM_ROLES}
    last_text = next(
        (i for i in reversed(range(len(outlines))) if outlines[i].role == "assistant" and outlines[i].length), None
    )
    if last_text is not None:
        spoken.add(last_text)
    asks: dict[str, float] = {}
    for index in sorted(spoken):
        for term, kind in draft.known(index).all_terms.items():
            asks[term] = max(asks.get(term, 0.0), _QUESTION_FACTORS[kind])
    return asks


def _term_relevance(draft: Draft, relevance_factors: RelevanceFactors) -> Mapping[str, float]:
    """Return the relative likelihood that each term is needed next, computed once for all choices of a request."""
    relevance = draft.memo.relevance.get(relevance_factors)
    if relevance is None:
        relevance = draft.memo.relevance[relevance_factors] = _compute_term_relevance(draft, relevance_factors)
    return relevance


def _compute_term_relevance(draft: Draft, relevance_factors: RelevanceFactors) -> dict[str, float]:
    # Computed for whole tables at a time: term by term, this would take most of the time of a choice.
    uses = draft.memo.uses
    if not uses:
        uses.append(uses_of(draft))
    last, assistant_uses, named = uses[0]
    size = len(draft.decisions)
    fading = [(size - index) ** -relevance_factors.fading for index in range(size)]
    relevance = {
        term: fading[index] if term in named else fading[index] * relevance_factors.word for term, index in last.items()
    }
    use = [1.0, *(relevance_factors.said * relevance_factors.said_again**more for more in range(3))]
    for term, times in assistant_uses.items():
        relevance[term] *= use[min(len(use) - 1, times)]
    for term in draft.parameters.wanted([term for term in named if term not in assistant_uses]):
        relevance[term] *= relevance_factors.asked_for
    for term in set(chain.from_iterable(find_open_values(draft, size).values())):
        relevance[term] *= relevance_factors.open_value
    return relevance


def uses_of(draft: Draft) -> TermUses:
    """Return which messages use each term of a conversation."""
    items = draft.conversation.items
    draft.read(item.index for item in items if item.role not in SYSTEM_ROLES)
    uses = TermUses({}, Counter(), set())
    for item in items:
        if item.role in SYSTEM_ROLES:
            continue
        known = draft.known(item.index)
        draft.deadline.tick(1 + len(known.all_terms) // _TERMS_PER_TICK)
        uses.last.update(dict.fromkeys(known.all_terms, item.index))
        uses.named.update(known.named)
        if item.role == "assistant":
            uses.assistant_uses.update(iter(known.all_terms))
    return uses


def _block_factors(
    draft: Draft,
    relevance_factors: RelevanceFactors,
    candidates: Mapping[int, KnownBlocks],
    holders: Mapping[str, Sequence[int]],
    codes: Iterable[str],
) -> list[float]:
    """Return the factor of each block.

    - how well it answers the last words: BM25, relative to the best block
    - the client's priority for its message
    - whether it has a value under the name of a tool's parameter
    - its kind, such as the report of an error
    """
    blocks = sum([len(known.terms) for known in candidates.values()])
    length = sum([known.length for known in candidates.values()])
    scores = [0.0] * blocks
    for term, asks in (last_words(draft) | dict.fromkeys(codes, _QUESTION_FACTORS[IDENTIFIER])).items():
        places = holders.get(term)
        if places:
            gain = rarity(asks, blocks, len(places))
            for place in places:
                scores[place] += gain
    sizes = [len(terms) for known in candidates.values() for terms in known.terms]
    mean = length / blocks if blocks else 0.0
    scores = [score and answered(score, size / mean) for score, size in zip(scores, sizes, strict=True)]
    scale = relevance_factors.answer / (max(scores, default=0.0) or 1.0)
    parameters, priorities = draft.parameters, draft.conversation.priorities
    factors: list[float] = []
    for index, known in candidates.items():
        start, priority = len(factors), priorities.get(index, 1.0)
        block_scores = scores[start : start + len(known.terms)]
        factors += [
            (1 + scale * score) * priority for score in _add_neighbours(block_scores, relevance_factors.neighbour)
        ]
        for number in parameters.blocks_named(known.labels):
            factors[start + number] *= relevance_factors.parameter
        for number, factor in known.sliced.factors.items():
            factors[start + number] *= factor
    return factors


def rarity(asks: float, blocks: int, count: int) -> float:
    """Return the score of a question's term that `count` of so many blocks have. `asks`: the factor of its kind."""
    return asks * math.log(1 + (blocks - count + 0.5) / (count + 0.5))


def answered(score: float, length: float) -> float:
    """Return the BM25 score of a block. `length`: its number of terms, relative to the mean of all blocks."""
    return score / (1 - _LENGTH_PENALTY + _LENGTH_PENALTY * length)


def _add_neighbours(scores: Sequence[float], share: float) -> list[float]:
    neighbours = zip(scores, [0.0, *scores], [*scores[1:], 0.0], strict=False)
    # Not `max`: this runs thousands of times in a choice, and `max` would take half of that time.
    return [score + share * (before if before > after else after) for score, before, after in neighbours]  # noqa: FURB136
