"""Late recall: old lines that answer the last words, repeated at the end of the last message.

What was sent before stays as it was, so the provider's cache holds; the lines cost their own tokens only. They stand
under a neutral heading, each with the role of the message it is from. Text of tools in a user's message is a road for
injected instructions, so that by default only what user and assistant said is recalled, and recall itself is off.
"""

from __future__ import annotations

import heapq
from dataclasses import replace
from typing import Final, Literal

from gateway.core.fitting.draft import KEEP, Draft, Same
from gateway.core.fitting.reader import Known
from gateway.core.fitting.select import Pick, cost_of
from gateway.core.fitting.worth import Scores, Worth, known_of
from gateway.core.message import RESULT_ROLES

#: off; lines of user and assistant; lines of everyone
Recall = Literal["off", "said", "all"]

_SPEAKERS: Final = {"said": frozenset({"user", "assistant"}), "all": frozenset({"user", "assistant", "tool"})}
#: tokens of the heading, and of a role before its first line
_HEADING: Final = 12
_ROLE: Final = 3
#: nothing smaller is worth a heading
_LEAST: Final = 24
#: characters a token of calls has, about: names and JSON are denser than text
_CALL_DENSITY: Final = 3
#: Lines are chosen by estimated tokens: so often, with a fifth less each time, until they fit.
_TRIES: Final = 3


def recall(draft: Draft, room: float, who: Recall, worth: Worth) -> Draft:
    """The draft with old lines of at most about `room` tokens repeated at its end; as it was where none helps."""
    if who == "off" or room < _LEAST:
        return draft
    last = len(draft.conversation.items) - 1
    item = draft.conversation.items[last]
    if item.sealed or item.role not in RESULT_ROLES | {"user"}:
        return draft
    before = draft.weight(last)
    candidates = _candidates(draft, _SPEAKERS[who])
    wanted = room
    for _ in range(_TRIES):
        lines = _choose(draft, candidates, wanted - _HEADING, worth)
        if not lines:
            break
        recalled = replace(draft, recalls={**draft.recalls, last: lines})
        if recalled.weight(last) - before <= room:
            return recalled
        wanted *= 0.8
    return draft


def _candidates(draft: Draft, speakers: frozenset[str]) -> dict[int, tuple[Known, frozenset[int]]]:
    """Messages of the speakers that are not whole any more, with the blocks of them that are still there."""
    found = {}
    for unit in draft.conversation.units:
        for index in () if unit.pinned or unit.sealed else unit.indices:
            decision = draft.decisions[index]
            if decision == KEEP or isinstance(decision, Same) or draft.conversation.items[index].role not in speakers:
                continue
            known = known_of(draft, index)
            present = (len(known.sliced.blocks), *decision) if isinstance(decision, tuple) else ()
            found[index] = _with_calls(known), frozenset(present)
    return found


def _with_calls(known: Known) -> Known:
    """The message with its calls for one more line: what an agent did it often does again."""
    if not known.sliced.fixed:
        return known
    tokens = len(known.sliced.fixed) / _CALL_DENSITY
    return replace(
        known, terms=(*known.terms, known.fixed), tokens=(*known.tokens, tokens), costs=(*known.costs, tokens)
    )


def _choose(
    draft: Draft, candidates: dict[int, tuple[Known, frozenset[int]]], room: float, worth: Worth
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    scores = Scores(draft, worth, {index: known for index, (known, _) in candidates.items()})
    scores.keep_sent(draft, range(len(draft.decisions)))
    chosen: dict[int, set[int]] = {}

    def offer(index: int, number: int) -> tuple[float, float]:
        draft.watch.tick()
        known, present = candidates[index]
        cost = cost_of(known, number, chosen.get(index, present)) + (0 if index in chosen else _ROLE)
        return scores.gain(index, number, known.terms[number]) / cost, cost

    heap = [(-offer(index, number)[0], index, number) for index, number in _lines(candidates)]
    heapq.heapify(heap)
    while heap:
        stale, index, number = heapq.heappop(heap)
        ratio, cost = offer(index, number)
        if ratio <= 0:
            continue
        if -ratio > stale and heap and -ratio > heap[0][0]:
            heapq.heappush(heap, (-ratio, index, number))
        elif cost <= room:
            room -= cost
            chosen.setdefault(index, set()).add(number)
            scores.keep(candidates[index][0].terms[number])
    return tuple((index, candidates[index][0].sliced.closed(chosen[index])) for index in sorted(chosen))


def _lines(candidates: dict[int, tuple[Known, frozenset[int]]]) -> list[Pick]:
    """Blocks of what was said or found; arguments are not lines."""
    return [
        (index, number)
        for index, (known, present) in candidates.items()
        for number, block in enumerate(known.sliced.lines)
        if number not in present and (block.slot < 0 or not known.sliced.slots[block.slot].in_arguments)
    ]
