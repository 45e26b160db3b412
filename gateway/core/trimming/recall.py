"""Repeat old lines that answer the newest question, at the end of the last message (recall).

What was sent before stays unchanged, so the provider's cache stays valid and the lines cost only their own tokens. They
follow a neutral heading, each with the role of its message.

If text of a tool were repeated in a user message, instructions in it would look like the user's. Therefore `said`, the
default of the configuration, repeats only text of the user and the assistant. From old tool results it repeats only
values that can be arguments of the tools, and only at the end of another tool result. `TrimPolicy` itself has recall
off by default.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from itertools import chain
from typing import Final, Literal, NamedTuple

from gateway.core.conversation.message import RESULT_ROLES
from gateway.core.trimming.answers import MAX_ANSWER_SHARE, rank_answers
from gateway.core.trimming.draft import KEEP, Draft, DuplicateResult, Lines
from gateway.core.trimming.offers import GAP_TOKENS
from gateway.core.trimming.parameters import NO_PARAMETERS, Parameters
from gateway.core.trimming.reader import KnownBlocks
from gateway.core.trimming.relevance import ASKED_SHARE, RelevanceFactors, answered, kept_terms, last_words, rarity
from gateway.core.trimming.worklists import find_open_values
from gateway.core.values import dataclass

#: off; lines of the user and the assistant; lines of all roles
Recall = Literal["off", "said", "all"]

_ROLES: Final = {"said": frozenset({"user", "assistant"}), "all": frozenset({"user", "assistant", "tool"})}
#: tokens of the heading, and of the role before the first line of a message
_HEADING_TOKENS: Final = 12
_ROLE_TOKENS: Final = 3
#: With less room than these tokens, a heading is not worth it.
_MIN_ROOM: Final = 24
#: Estimated characters per token of tool calls: names and JSON are denser than text.
_CALL_CHARS_PER_TOKEN: Final = 3
#: Lines are chosen by estimated tokens and then counted exactly. If they exceed the room, the choice is repeated with a
#: fifth less room, up to this many tries.
_TRIES: Final = 3
#: bytes in memory of an entry of the tables below, and of a number in them
_ENTRY_BYTES: Final = 300
_NUMBER_BYTES: Final = 16


def recall(draft: Draft, room: float, scope: Recall, factors: RelevanceFactors) -> Draft:
    """Return the draft with old lines in about `room` tokens at its end, or the same draft if no line helps."""
    if scope == "off" or room < _MIN_ROOM:
        return draft
    last = len(draft.decisions) - 1
    message = draft.conversation.outlines[last]
    if message.sealed or message.role not in RESULT_ROLES | {"user"}:
        return draft
    # Values of results are recalled only at the end of a result, so that they do not look like words of the user.
    past, key = _cached_past(draft, _ROLES[scope], with_results=message.role in RESULT_ROLES)
    if not past.lines:
        return draft
    relevance = _relevance_by_term(draft, past, _unsaid_terms(draft, past, key), factors)
    offered = [line for line in past.lines if not relevance.keys().isdisjoint(line.terms)] if relevance else []
    if not offered:
        return draft
    offers = list(zip(offered, _line_factors(draft, past, offered, factors), strict=True))
    answers = _unsent_answers(draft, past, _ROLES[scope])
    before = draft.tokens_of(last)
    wanted = room
    for _ in range(_TRIES):
        chosen, rest = _choose_answers(draft, answers, wanted - _HEADING_TOKENS)
        said = {term for index, numbers in chosen.items() for n in numbers for term in draft.known(index).terms[n]}
        left = relevance | dict.fromkeys(said & relevance.keys(), 0.0)
        lines = _choose_lines(draft, past, offers, _Choice(left, chosen, rest))
        if not lines:
            break
        recalled = replace(draft, recalls={**draft.recalls, last: lines})
        if recalled.tokens_of(last) - before <= room:
            return recalled
        wanted *= 0.8
    return draft


# --- what can be recalled: the same until the next trim --------------------------------------------------------------


class _Line(NamedTuple):
    """A line of the conversation that is not sent any more."""

    #: its message, and the number of its block there
    source: int
    number: int
    #: its place among all lines of the past
    place: int
    #: its terms that are not sent
    terms: tuple[str, ...]
    #: estimated tokens: alone, and with the block that it needs, such as a table's head
    cost: float
    whole: float
    #: the number of the block that it needs, or -1
    needs: int


class _TermUse(NamedTuple):
    """The use of a term: its last message, how many assistant messages have it, and whether it is more than a word."""

    last: int
    assistant_uses: int
    is_named: bool
    #: no assistant message has used it, and it has the shape of a tool's example value
    is_asked: bool = False
    #: see `find_open_values`
    is_open: bool = False


@dataclass(frozen=True, slots=True)
class _Past:
    """What can be recalled of the first `size` messages, and where its terms occur."""

    size: int
    lines: tuple[_Line, ...]
    #: the terms of these lines, and their uses
    uses: Mapping[str, _TermUse]
    #: term -> the places of all blocks that have it
    holders: Mapping[str, Sequence[int]]
    #: by place: how many terms the line has; an empty place follows each message, so that no line has a neighbour in
    #: another message
    lengths: Sequence[int]
    #: the number of all lines
    blocks: int
    #: message -> the blocks of it that are still sent
    present: Mapping[int, frozenset[int]]

    @property
    def size_bytes(self) -> int:
        """Return the approximate size in memory."""
        places = sum(map(len, self.holders.values())) + len(self.lengths)
        numbers = sum(map(len, self.present.values())) + sum(len(line.terms) for line in self.lines)
        entries = len(self.lines) + len(self.uses) + len(self.holders) + len(self.present)
        return _ENTRY_BYTES * entries + _NUMBER_BYTES * (places + numbers)


def _cached_past(draft: Draft, speakers: frozenset[str], *, with_results: bool) -> tuple[_Past, Hashable]:
    """Return the past and its cache key. The past ends with the last message that is not sent unchanged.

    `with_results`: include values of tool results that the tools take.

    Later messages do not change the past, so it is computed once for each trim.
    """
    decisions = draft.decisions
    size = next((index + 1 for index in reversed(range(len(decisions))) if decisions[index] != KEEP), 0)
    recalls = tuple(sorted((i, lines) for i, lines in draft.recalls.items() if i < size))
    parameters = draft.parameters if with_results else NO_PARAMETERS
    # Conversations with and without thinking have the same prefix, but messages with thinking cannot be repeated.
    sealed = tuple(index for index, one in enumerate(draft.conversation.outlines[:size]) if one.sealed)
    key = draft.conversation.prefix(size), decisions[:size], recalls, speakers, parameters, sealed
    past = draft.reader.cached(
        "past", key, lambda: _read_past(draft, size, speakers, parameters), lambda past: past.size_bytes
    )
    return past, key


def _read_past(draft: Draft, size: int, speakers: frozenset[str], parameters: Parameters) -> _Past:
    draft.read(range(size))
    sent = set[str]().union(*kept_terms(draft, range(size)))
    lines: list[_Line] = []
    holders: dict[str, list[int]] = {}
    lengths: list[int] = []
    present: dict[int, frozenset[int]] = {}
    blocks = 0
    asks = parameters != NO_PARAMETERS
    open_values = find_open_values(draft, size)
    for index in _changed(draft, size, speakers | RESULT_ROLES if asks else speakers):
        known = draft.known(index)
        decision = draft.decisions[index]
        present[index] = frozenset((len(known.sliced.blocks), *decision) if isinstance(decision, tuple) else ())
        is_spoken = draft.conversation.outlines[index].role in speakers
        numbers: Sequence[int] = range(len(known.sliced.lines))
        if not is_spoken:
            numbers = sorted(_asked_blocks(parameters, known, open_values.get(index, frozenset())))
        draft.deadline.tick(1 + len(numbers))
        for place, number in enumerate(numbers, len(lengths)):
            for term in _terms_of(known, number):
                holders.setdefault(term, []).append(place)
        lines += _lines(index, known, numbers, len(lengths), sent)
        blocks += len(numbers)
        lengths += [*(len(_terms_of(known, number)) for number in numbers), 0]
    needed = frozenset(chain.from_iterable(line.terms for line in lines))
    uses = _term_uses(draft, size, needed)
    for term in parameters.wanted([term for term, one in uses.items() if one.is_named and not one.assistant_uses]):
        uses[term] = uses[term]._replace(is_asked=True)
    for term in uses.keys() & chain.from_iterable(open_values.values()):
        uses[term] = uses[term]._replace(is_open=True)
    return _Past(size, tuple(lines), uses, holders, lengths, blocks, present)


def _changed(draft: Draft, size: int, speakers: frozenset[str]) -> list[int]:
    """Return the messages of these roles that are not sent whole."""
    return [
        index
        for unit in draft.conversation.units
        for index in unit.indices
        if index < size
        and not draft.conversation.outlines[index].sealed
        and draft.decisions[index] != KEEP
        and not isinstance(draft.decisions[index], DuplicateResult)
        and draft.conversation.outlines[index].role in speakers
    ]


def _asked_blocks(parameters: Parameters, known: KnownBlocks, open_values: AbstractSet[str]) -> set[int]:
    """Return the blocks of a result with values that the tools take, or that are still open."""
    wanted = {*open_values, *parameters.wanted([*known.named])}
    alike = {number for number, terms in enumerate(known.terms) if not wanted.isdisjoint(terms)}
    return alike | parameters.blocks_named(known.labels)


def _terms_of(known: KnownBlocks, number: int) -> Sequence[str]:
    """Return the terms of a line. The calls of a message count as one more line after its blocks."""
    return known.terms[number] if number < len(known.terms) else known.fixed


def _lines(index: int, known: KnownBlocks, numbers: Sequence[int], start: int, sent: set[str]) -> Iterator[_Line]:
    """Yield the given lines of a message that have terms which are not sent, except lines of call arguments.

    The line of the calls is included: an agent often repeats what it did.
    """
    sliced = known.sliced
    for place, number in enumerate(numbers, start):
        had = _terms_of(known, number)
        if sent.issuperset(had):
            continue
        terms = tuple([term for term in had if term not in sent])
        if number == len(known.terms):
            tokens = len(sliced.fixed) / _CALL_CHARS_PER_TOKEN
            yield _Line(index, number, place, terms, tokens, tokens, -1)
        elif not sliced.slots[sliced.blocks[number].slot].in_arguments:
            needs = sliced.blocks[number].needs
            yield _Line(index, number, place, terms, known.tokens[number], known.costs[number], needs)


def _term_uses(draft: Draft, size: int, terms: AbstractSet[str]) -> dict[str, _TermUse]:
    """Return the uses of terms in the first `size` messages. So the cached result stays valid when messages follow."""
    if not draft.memo.uses:
        return _term_uses_before(draft, size, terms)
    last, assistant_uses, named = draft.memo.uses[0]
    later = {term for term in terms if last[term] >= size}
    uses = {term: _TermUse(last[term], assistant_uses[term], term in named) for term in terms}
    return uses | _term_uses_before(draft, size, later)


def _term_uses_before(draft: Draft, size: int, terms: AbstractSet[str]) -> dict[str, _TermUse]:
    last: dict[str, int] = {}
    assistant_uses: Counter[str] = Counter()
    named: set[str] = set()
    for index, message in enumerate(draft.conversation.outlines[:size]):
        known = draft.known(index)
        found = terms & known.all_terms.keys()
        last.update(dict.fromkeys(found, index))
        named |= found & known.named
        if message.role == "assistant":
            assistant_uses.update(found)
    return {term: _TermUse(index, assistant_uses[term], term in named) for term, index in last.items()}


# --- what was not said since ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _UnsaidTerms:
    """The terms of a past that no later message has. It is extended as the conversation grows."""

    #: keys of the later messages
    keys: tuple[bytes, ...]
    #: lines recalled at the end of some of them
    recalls: Mapping[int, Lines]
    #: the terms and their uses
    uses: Mapping[str, _TermUse]

    @property
    def size_bytes(self) -> int:
        """Return the approximate size in memory."""
        return _ENTRY_BYTES * (1 + len(self.keys) + len(self.recalls) + len(self.uses))


def _unsaid_terms(draft: Draft, past: _Past, key: Hashable) -> Mapping[str, _TermUse]:
    """Return the terms of the past that no later message has. The last message is ignored: it may still get lines."""
    keys = draft.conversation.keys[past.size : len(draft.decisions) - 1]

    def renew(known: _UnsaidTerms | None) -> _UnsaidTerms:
        stop = past.size + len(known.keys) if known is not None else 0
        is_continued = known is not None and known.keys == keys[: len(known.keys)]
        if known is None or not is_continued or known.recalls != _lines_between(draft, past.size, stop):
            known = _UnsaidTerms((), {}, past.uses)
        if len(known.keys) == len(keys):
            return known
        end = past.size + len(keys)
        uses = _drop_said_terms(draft, known.uses, range(past.size + len(known.keys), end))
        return _UnsaidTerms(keys, _lines_between(draft, past.size, end), uses)

    return draft.reader.extend_cached("unsaid", key, renew, lambda unsaid: unsaid.size_bytes).uses


def _lines_between(draft: Draft, start: int, stop: int) -> dict[int, Lines]:
    return {index: lines for index, lines in draft.recalls.items() if start <= index < stop}


def _drop_said_terms(draft: Draft, uses: Mapping[str, _TermUse], indices: Iterable[int]) -> Mapping[str, _TermUse]:
    """Return the uses of terms that are neither in these messages nor in the lines recalled there."""
    if not uses:
        return uses
    draft.read({*indices, *(source for index in indices for source, _ in draft.recalls.get(index, ()))})
    said = set[str]().union(*(uses.keys() & terms for terms in kept_terms(draft, indices)))
    return {term: one for term, one in uses.items() if term not in said} if said else uses


# --- what is worth its tokens now -------------------------------------------------------------------------------------


def _relevance_by_term(
    draft: Draft, past: _Past, unsaid: Mapping[str, _TermUse], factors: RelevanceFactors
) -> dict[str, float]:
    """Return the relevance of each term of the past that no later message has."""
    end = len(draft.decisions)
    is_question = draft.conversation.outlines[-1].role == "user"
    wanted = unsaid if is_question else _drop_said_terms(draft, unsaid, range(max(past.size, end - 1), end))
    odds = {one: _odds(one, end, factors) for one in {*wanted.values()}}
    relevance = {term: odds[one] for term, one in wanted.items()}
    if is_question:
        asked = draft.known(end - 1)
        for term in relevance.keys() & asked.all_terms.keys():
            one = past.uses[term]
            relevance[term] = ASKED_SHARE * factors.odds(
                1, one.assistant_uses, is_named=one.is_named or term in asked.named
            )
    return relevance


def _odds(one: _TermUse, end: int, factors: RelevanceFactors) -> float:
    odds = factors.odds(end - one.last, one.assistant_uses, is_named=one.is_named)
    return odds * (factors.asked_for if one.is_asked else 1.0) * (factors.open_value if one.is_open else 1.0)


def _line_factors(draft: Draft, past: _Past, lines: Sequence[_Line], factors: RelevanceFactors) -> list[float]:
    """Return the factor of each line, which is higher if the line or a neighbour answers the last words."""
    scores = [0.0] * (len(past.lengths) + 1)
    for term, asks in last_words(draft).items():
        places = past.holders.get(term, ())
        gain = rarity(asks, past.blocks, len(places))
        for place in places:
            scores[place] += gain
    mean = sum(past.lengths) / past.blocks
    scores = [score and answered(score, size / mean) for score, size in zip(scores, (*past.lengths, 0), strict=True)]
    best = max(scores) or 1.0
    priorities = draft.conversation.priorities
    return [
        (1 + factors.answer * _add_neighbours(scores, line.place, factors.neighbour) / best)
        * priorities.get(line.source, 1.0)
        for line in lines
    ]


def _add_neighbours(scores: Sequence[float], place: int, share: float) -> float:
    return scores[place] + share * max(scores[place - 1], scores[place + 1])


class _Choice(NamedTuple):
    """A choice of lines in progress."""

    #: the relevance of each term that is not sent yet
    relevance: dict[str, float]
    #: message -> the numbers of its chosen lines
    chosen: dict[int, set[int]]
    #: estimated tokens that are still free
    room: float


def _unsent_answers(draft: Draft, past: _Past, speakers: frozenset[str]) -> Sequence[int]:
    """Return the messages of the past that answer the newest question, best first, if they are not sent whole."""
    unsent = {*_changed(draft, past.size, speakers)}
    unsent -= {source for lines in draft.recalls.values() for source, _ in lines}
    return [index for index in rank_answers(draft) if index in unsent]


def _choose_answers(draft: Draft, answers: Sequence[int], room: float) -> tuple[dict[int, set[int]], float]:
    """Choose whole messages, without the arguments of calls; return their lines and the room that is left."""
    chosen: dict[int, set[int]] = {}
    most = MAX_ANSWER_SHARE * room
    for index in answers:
        known = draft.known(index)
        slots = known.sliced.slots
        numbers = {n for n, block in enumerate(known.sliced.blocks) if not slots[block.slot].in_arguments}
        cost = sum(known.tokens[number] for number in numbers) + _ROLE_TOKENS
        if numbers and cost <= min(room, most):
            room -= cost
            chosen[index] = numbers
    return chosen, room


def _choose_lines(draft: Draft, past: _Past, offered: Sequence[tuple[_Line, float]], choice: _Choice) -> Lines:
    """Add the lines with the highest relevance per token to a choice, and return all its lines."""
    relevance, chosen, room = choice

    def offer(line: _Line, factor: float) -> tuple[float, float]:
        draft.deadline.tick()
        has_head = line.needs in chosen.get(line.source, past.present[line.source])
        cost = (line.cost if has_head else line.whole) + GAP_TOKENS + (0 if line.source in chosen else _ROLE_TOKENS)
        return sum([relevance.get(term, 0.0) for term in line.terms]) * factor / cost, cost

    heap = [(-offer(line, factor)[0], place) for place, (line, factor) in enumerate(offered)]
    heapq.heapify(heap)
    while heap:
        stale, place = heapq.heappop(heap)
        line, factor = offered[place]
        ratio, cost = offer(line, factor)
        if ratio <= 0:
            continue
        if -ratio > stale and heap and -ratio > heap[0][0]:
            heapq.heappush(heap, (-ratio, place))
        elif cost <= room:
            room -= cost
            chosen.setdefault(line.source, set()).add(line.number)
            relevance.update(dict.fromkeys(line.terms, 0.0))
    return tuple((index, draft.known(index).sliced.with_needed(chosen[index])) for index in sorted(chosen))
