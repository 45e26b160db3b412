"""Trim a draft that is over its limit.

It goes down to the low-water mark, so that the next turns only append: what must stay, and a share of the room beside
that (`TrimPolicy.low_water`). What the client had cached and what was sent before stays at the beginning as far as that
can be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from gateway.core.conversation.message import SYSTEM_ROLES
from gateway.core.fitting.deadline import Deadline
from gateway.core.fitting.draft import KEEP, Draft, SummaryEntry
from gateway.core.fitting.offers import GAP_TOKENS
from gateway.core.fitting.overflow import ContextOverflow
from gateway.core.fitting.policy import TrimPolicy
from gateway.core.fitting.role_order import in_order, without_marks
from gateway.core.fitting.strategies import Dedupe, Drop, Strategy, first_to_go, leading

#: Most room that is given to the beginning of a task of which a cut left nothing: a share of the limit, and at least
#: so many tokens (some sentences). More would take the room of old lines that the last messages ask for.
_TASK: Final = 0.05
_TASK_TOKENS: Final = 64
#: the same for a task that can be told whole, or whose first words are longer than that
_MOST_TASK: Final = 0.3


def cut(draft: Draft, limit: int, policy: TrimPolicy, *, was_sent: bool) -> tuple[Draft, tuple[str, ...]]:
    """Down to the low-water mark; what the client had cached stays while it can, and so does what was sent."""
    fixed = system_tokens(draft)
    low = _low(draft, limit, policy)
    first = _protected(draft, limit)
    # Without its task, what was sent before is not worth keeping as it is.
    was_sent = was_sent and not lost_task(draft)
    if deduped := _deduped(draft, max(_appended(draft), first), (low + limit) // 2, policy):
        return deduped
    settles = was_sent and policy.recall != "off" and not policy.summarizes
    if settles and (short := _cut_tail(draft, low, limit, policy)):
        return short
    for start, target in ((first, low), (first, limit), (0, low), (0, limit)):
        fresh, applied = _apply(draft.reopened(start), target, limit, policy.strategies)
        if fresh.total() <= limit:
            break
    else:
        return dropped(fresh, limit, policy), (*applied, "drop")
    same = _unchanged(draft, in_order(fresh), policy.stale * (limit - fixed)) if was_sent else 0
    if same > start:
        # The same choice with less room behind what stays, not another one.
        kept, kept_applied = _apply(draft.reopened(same, fresh.steps), target, limit, policy.strategies)
        if kept.total() <= max(target, fresh.total()):
            return kept, kept_applied
    return fresh, applied


def _deduped(draft: Draft, start: int, enough: int, policy: TrimPolicy) -> tuple[Draft, tuple[str, ...]] | None:
    """What came twice told once, from `start` on, where that is asked for first and is enough.

    It loses nothing, so that it need not go as deep as others; with less room the next cut would come too soon.
    """
    strategy = next(iter(policy.strategies), None)
    if not isinstance(strategy, Dedupe) or 0 in draft.conversation.priorities.values():  # these go before all else
        return None
    opened = without_marks(draft.reopened(start))
    fresh = strategy.apply(opened, enough)
    if fresh is opened or fresh.total() > enough:
        return None
    return fresh.ruled(opened, strategy.name), (strategy.name,)


def _cut_tail(draft: Draft, low: int, limit: int, policy: TrimPolicy) -> tuple[Draft, tuple[str, ...]] | None:
    """Cut only what was appended since the last cut, if that is enough and what that cut left is small.

    All that stands behind the first change is paid in full again, and the newest stretch is the last of it: to change
    only that is the cheapest.
    """
    tail = max(_appended(draft), _protected(draft, limit))
    fixed = system_tokens(draft)
    if sum(without_marks(draft).weights()[:tail]) - fixed > policy.settled * (limit - fixed):
        return None
    # A long newest result may hold the half of it, and can be cut on the next turn: then less is enough.
    for target in (low, (low + limit) // 2):
        fresh, applied = _apply(draft.reopened(tail), target, target, policy.strategies)
        if fresh.total() <= target:
            return fresh, applied
    return None


def _appended(draft: Draft) -> int:
    """Where the newest stretch begins that stands as it came."""
    changed = (i for i in reversed(range(len(draft.decisions))) if draft.decisions[i] != KEEP)
    last = next(changed, -1)
    return next((unit.start for unit in draft.conversation.units if unit.start > last), len(draft.decisions))


def _apply(draft: Draft, target: int, limit: int, strategies: Sequence[Strategy]) -> tuple[Draft, tuple[str, ...]]:
    """Down to the target; once a strategy has done all that should be done, the limit is enough."""
    applied: list[str] = []
    enough, draft = target, without_marks(draft)
    if any(strategy.may_drop for strategy in strategies):
        lighter = first_to_go(draft, target)
        if lighter is not draft:
            applied.append("drop")
            draft = lighter
    for strategy in strategies:
        if draft.total() <= enough:
            break
        lighter = strategy.apply(draft, target)
        if strategy.is_last_word and lighter is not draft:
            enough = limit
        if lighter.decisions != draft.decisions:
            applied.append(strategy.name)
            draft = lighter.ruled(draft, strategy.name)
    return draft, tuple(applied)


def with_task(draft: Draft, limit: int, *, may_drop: bool) -> Draft:
    """Put the task back where a cut left nothing of its beginning and there is room: whole, or its first sentences.

    Everything else in the conversation is about the task. `may_drop`: something else can be left out for it later;
    where nothing can, and nothing is told of it at all, it gets a little.
    """
    task = draft.conversation.task
    if task is None or not lost_task(draft) or not (may_drop or draft.decisions[task] == ()):
        return draft
    share = limit - system_tokens(draft)
    little = max(_TASK_TOKENS, int(_TASK * share))
    room = min(limit - draft.total(), int(_MOST_TASK * share) if may_drop else little)
    if draft.original[task] - draft.weight(task) <= room:
        return draft.having({task: KEEP})
    known = draft.known(task)
    kept, first = draft.decisions[task], {*leading(known, min(room, little) - GAP_TOKENS)}
    if not first and may_drop:
        first = {0}
    told = draft.having({task: known.sliced.closed(first.union(kept if isinstance(kept, tuple) else ()))})
    return told if told.weight(task) - draft.weight(task) <= room else draft


def lost_task(draft: Draft) -> bool:
    """Whether a cut took the beginning of the task."""
    task = draft.conversation.task
    decision = draft.decisions[task] if task is not None else KEEP
    return task is not None and isinstance(decision, tuple) and 0 not in decision and bool(draft.known(task).tokens)


def lacks_task(draft: Draft, limit: int) -> bool:
    """Whether a cut took the beginning of the task, though what must stay leaves room to tell it."""
    conversation = draft.conversation
    task = conversation.task
    if task is None or not lost_task(draft):
        return False
    return draft.weight_as(task, (0,)) + sum(draft.weight(index) for index in conversation.pinned) <= limit


def given_up(start: Draft, limit: int, policy: TrimPolicy) -> Draft:
    """Whole units left out of what was sent before, down to the low-water mark, with nothing read any more."""
    draft = replace(start, watch=Deadline(), first=0, recalls={})
    if policy.may_drop:
        lighter = Drop(reads=False).apply(draft, _low(draft, limit, policy))
        if lighter.total() <= limit:
            return lighter
    return dropped(draft, limit, policy, reads=False)


def dropped(draft: Draft, limit: int, policy: TrimPolicy, *, reads: bool = True) -> Draft:
    """Whole units left out of the conversation as it came, if that is allowed."""
    if policy.may_drop:
        untouched = Draft.untouched(draft.conversation, draft.reader, original=draft.original)
        draft = Drop(reads=reads).apply(untouched, limit)
    weights = draft.weights()
    if sum(weights) <= limit:
        return draft
    largest = max(range(len(weights)), key=weights.__getitem__)
    raise ContextOverflow(
        needed=sum(weights),
        limit=limit,
        index=largest,
        role=draft.conversation.items[largest].role,
        tokens=weights[largest],
    )


def _low(draft: Draft, limit: int, policy: TrimPolicy) -> int:
    """The share of what is left beside that which must stay: of all, a long newest result would leave the old nothing.

    What must stay on this turn can mostly be cut on the next.
    """
    must = min(limit, sum(draft.original[index] for index in draft.conversation.pinned))
    return must + int((limit - must) * policy.depth)


def system_tokens(draft: Draft) -> int:
    """Tokens of what no cut can take: shares of a limit are of the rest."""
    outline = draft.conversation.outline
    return sum(draft.weight(index) for index in outline.fixed if outline.outlines[index].role in SYSTEM_ROLES)


def _protected(draft: Draft, limit: int) -> int:
    """Where changes may begin: behind the last cache mark up to which everything fits beside what must stay."""
    weights = draft.weights()
    needed = sum(weights)
    for unit in reversed(draft.conversation.units):
        if needed <= limit and not draft.conversation.marked.isdisjoint(unit.indices):
            return unit.stop
        if not unit.pinned:
            needed -= sum(weights[index] for index in unit.indices)
    return 0


def _unchanged(sent: Draft, fresh: Draft, waste: float) -> int:
    """Up to where a fresh choice differs from what was sent by no more than `waste` tokens."""
    stop = 0
    for unit in sent.conversation.units:
        for index in unit.indices:
            waste -= _difference(sent, fresh, index)
        if waste < 0:
            break
        stop = unit.stop
    return stop


def _difference(sent: Draft, fresh: Draft, index: int) -> float:
    old, new = sent.decisions[index], fresh.decisions[index]
    if old != new and isinstance(new, SummaryEntry):
        return math.inf  # made for all that comes behind it: one without the other makes no sense
    if isinstance(old, tuple) and isinstance(new, tuple):
        tokens = sent.known(index).tokens
        return sum(tokens[number] for number in {*old} ^ {*new})
    return 0 if old == new else abs(sent.weight(index) - fresh.weight(index))
