"""Trim a draft that is over its limit.

The result goes down to the low-water mark: the tokens of what must stay, and a share of the other room
(`TrimPolicy.low_water`). Then the next turns only append messages. The prefix that the client marked for the cache, and
what was sent before, stay unchanged as far as possible.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from gateway.core.conversation.message import SYSTEM_ROLES
from gateway.core.trimming.deadline import Deadline
from gateway.core.trimming.draft import KEEP, Draft, SummaryEntry
from gateway.core.trimming.offers import GAP_TOKENS
from gateway.core.trimming.overflow import ContextOverflow
from gateway.core.trimming.policy import TrimPolicy
from gateway.core.trimming.role_order import restore_role_order, without_marks
from gateway.core.trimming.strategies import Dedupe, Drop, Strategy, drop_priority_zero, leading

#: Most room for the start of a task that a trim removed: this share of the limit, and at least `_TASK_TOKENS`, a few
#: sentences. More would take the room of old lines that the last messages refer to.
_TASK_SHARE: Final = 0.05
_TASK_TOKENS: Final = 64
#: Most of the room that a trim keeps, however slowly the conversation grows. Recalled lines take their share of it:
#: without room for them, every question would need a trim, and a long chat would cost twice as much.
_MAX_LOW_WATER: Final = 0.85
#: The same for a task that fits whole, or whose first block is longer than that.
_WHOLE_TASK_SHARE: Final = 0.3


def trim_draft(draft: Draft, limit: int, policy: TrimPolicy, *, was_sent: bool) -> tuple[Draft, tuple[str, ...]]:
    """Trim to the low-water mark; keep what the client had cached, and what was sent before, while there is room."""
    fixed = system_tokens(draft)
    low = _low_water_tokens(draft, limit, policy)
    first = _first_changeable(draft, limit)
    # Without its task, keeping what was sent before is not worth it.
    was_sent = was_sent and not has_lost_task(draft)
    if deduped := _dedupe_only(draft, max(_appended_start(draft), first), (low + limit) // 2, policy):
        return deduped
    may_keep_older = was_sent and policy.recall != "off" and not policy.summarizes
    if may_keep_older and (short := _trim_tail(draft, low, limit, policy)):
        return short
    for start, target in ((first, low), (first, limit), (0, low), (0, limit)):
        fresh, applied = _apply_strategies(draft.reopened(start), target, limit, policy.strategies)
        if fresh.total() <= limit:
            break
    else:
        return drop_units(fresh, limit, policy), (*applied, "drop")
    same = _unchanged_stop(draft, restore_role_order(fresh), policy.stale * (limit - fixed)) if was_sent else 0
    if same > start:
        # Make the same choice again, with what was sent before kept up to `same`.
        kept, kept_applied = _apply_strategies(draft.reopened(same, fresh.steps), target, limit, policy.strategies)
        if kept.total() <= max(target, fresh.total()):
            return kept, kept_applied
    return fresh, applied


def _dedupe_only(draft: Draft, start: int, enough: int, policy: TrimPolicy) -> tuple[Draft, tuple[str, ...]] | None:
    """Remove repeated results from `start` on, if this strategy comes first and is enough; else return None.

    It loses nothing, so it need not go down to the low-water mark. With less room, the next trim would come too soon.
    """
    strategy = next(iter(policy.strategies), None)
    if not isinstance(strategy, Dedupe) or 0 in draft.conversation.priorities.values():  # priority 0 is dropped first
        return None
    opened = without_marks(draft.reopened(start))
    fresh = strategy.apply(opened, enough)
    if fresh is opened or fresh.total() > enough:
        return None
    return fresh.with_rule(opened, strategy.name), (strategy.name,)


def _trim_tail(draft: Draft, low: int, limit: int, policy: TrimPolicy) -> tuple[Draft, tuple[str, ...]] | None:
    """Trim only what was appended since the last trim, if that is enough and the older part is small.

    Everything after the first change is paid in full again. The appended part is at the end, so changing only that part
    is the cheapest.
    """
    tail = max(_appended_start(draft), _first_changeable(draft, limit))
    fixed = system_tokens(draft)
    if sum(without_marks(draft).token_counts()[:tail]) - fixed > policy.settled * (limit - fixed):
        return None
    # A long newest result may take half of the room. It can be trimmed on the next turn, so less is enough now.
    for target in (low, (low + limit) // 2):
        fresh, applied = _apply_strategies(draft.reopened(tail), target, target, policy.strategies)
        if fresh.total() <= target:
            return fresh, applied
    return None


def _appended_start(draft: Draft) -> int:
    """Return the index of the first message after the last changed unit: from there on, all messages are unchanged."""
    changed = (i for i in reversed(range(len(draft.decisions))) if draft.decisions[i] != KEEP)
    last = next(changed, -1)
    return next((unit.start for unit in draft.conversation.units if unit.start > last), len(draft.decisions))


def _apply_strategies(
    draft: Draft, target: int, limit: int, strategies: Sequence[Strategy]
) -> tuple[Draft, tuple[str, ...]]:
    """Apply strategies until the target is reached; after a strategy with `is_last_word`, the limit is enough."""
    applied: list[str] = []
    enough, draft = target, without_marks(draft)
    if any(strategy.may_drop for strategy in strategies):
        shorter = drop_priority_zero(draft, target)
        if shorter is not draft:
            applied.append("drop")
            draft = shorter
    for strategy in strategies:
        if draft.total() <= enough:
            break
        shorter = strategy.apply(draft, target)
        if strategy.is_last_word and shorter is not draft:
            enough = limit
        if shorter.decisions != draft.decisions:
            applied.append(strategy.name)
            draft = shorter.with_rule(draft, strategy.name)
    return draft, tuple(applied)


def restore_task(draft: Draft, limit: int, *, may_drop: bool) -> Draft:
    """Restore a task whose start was removed, if there is room: whole, or its first sentences.

    Everything else in the conversation is about the task. `may_drop`: other units can be left out for it later. If none
    can, only a task without any text left gets a little room.
    """
    task = draft.conversation.task
    if task is None or not has_lost_task(draft) or not (may_drop or draft.decisions[task] == ()):
        return draft
    share = limit - system_tokens(draft)
    little = max(_TASK_TOKENS, int(_TASK_SHARE * share))
    room = min(limit - draft.total(), int(_WHOLE_TASK_SHARE * share) if may_drop else little)
    if draft.original[task] - draft.tokens_of(task) <= room:
        return draft.with_decisions({task: KEEP})
    known = draft.known(task)
    kept, first = draft.decisions[task], {*leading(known, min(room, little) - GAP_TOKENS)}
    if not first and may_drop:
        first = {0}
    restored = draft.with_decisions(
        {task: known.sliced.with_needed(first.union(kept if isinstance(kept, tuple) else ()))}
    )
    return restored if restored.tokens_of(task) - draft.tokens_of(task) <= room else draft


def has_lost_task(draft: Draft) -> bool:
    """Return whether a trim removed the start of the task."""
    task = draft.conversation.task
    decision = draft.decisions[task] if task is not None else KEEP
    return task is not None and isinstance(decision, tuple) and 0 not in decision and bool(draft.known(task).tokens)


def could_show_task(draft: Draft, limit: int) -> bool:
    """Return whether a trim removed the start of the task although it has room next to what must stay."""
    conversation = draft.conversation
    task = conversation.task
    if task is None or not has_lost_task(draft):
        return False
    return draft.tokens_if(task, (0,)) + sum(draft.tokens_of(index) for index in conversation.pinned) <= limit


def drop_without_reading(start: Draft, limit: int, policy: TrimPolicy) -> Draft:
    """Leave out whole units of what was sent before, down to the low-water mark, without reading any text."""
    draft = replace(start, deadline=Deadline(), first=0, recalls={})
    if policy.may_drop:
        shorter = Drop(reads=False).apply(draft, _low_water_tokens(draft, limit, policy))
        if shorter.total() <= limit:
            return shorter
    return drop_units(draft, limit, policy, reads=False)


def drop_units(draft: Draft, limit: int, policy: TrimPolicy, *, reads: bool = True) -> Draft:
    """Leave out whole units of the original conversation, if the policy allows it.

    Raises:
        ContextOverflow: the rest is still over the limit.
    """
    if policy.may_drop:
        untouched = Draft.untouched(draft.conversation, draft.reader, original=draft.original)
        draft = Drop(reads=reads).apply(untouched, limit)
    counts = draft.token_counts()
    if sum(counts) <= limit:
        return draft
    largest = max(range(len(counts)), key=counts.__getitem__)
    raise ContextOverflow(
        needed=sum(counts),
        limit=limit,
        index=largest,
        role=draft.conversation.items[largest].role,
        tokens=counts[largest],
    )


def _low_water_tokens(draft: Draft, limit: int, policy: TrimPolicy) -> int:
    """Return the low-water mark in tokens: what must stay, and a share of the rest of the limit.

    As a share of the whole limit, a long newest result would leave no room for old messages. What must stay on this
    turn can mostly be trimmed on the next.
    """
    must = min(limit, sum(draft.original[index] for index in draft.conversation.pinned))
    return must + int((limit - must) * _low_water_share(draft, limit - must, policy))


def _low_water_share(draft: Draft, room: int, policy: TrimPolicy) -> float:
    """Return the share of the room that a trim keeps: the policy's, or more if the conversation grows slowly.

    With a growth of `g` rooms a turn and a cached price of `p`, keeping a share `s` costs an uncached prompt every
    `(1 - s) / g` turns. The returned share makes these prompts cost as much as the cached ones: `p / (p + (1 - p) g)`.
    A smaller share would lose old messages for hardly any money.
    """
    if policy.low_water is not None or room <= 0:
        return policy.depth
    items, task = draft.conversation.items, draft.conversation.task
    turns = sum(item.role == "assistant" for item in items)
    grown = sum(draft.original[item.index] for item in items if item.role not in SYSTEM_ROLES and item.index != task)
    price, growth = policy.cached_price, grown / (turns or 1) / room
    share = price / (price + (1 - price) * growth) if growth > 0 else 0.0
    recalled = policy.recall_share if policy.recall != "off" else 0.0
    return max(policy.depth, min(_MAX_LOW_WATER - recalled, share))


def system_tokens(draft: Draft) -> int:
    """Return the tokens of system messages that no trim can remove. Shares of a limit are of the rest."""
    outline = draft.conversation.outline
    return sum(draft.tokens_of(index) for index in outline.fixed if outline.outlines[index].role in SYSTEM_ROLES)


def _first_changeable(draft: Draft, limit: int) -> int:
    """Return where changes may start: after the last cache mark up to which all fits together with what must stay."""
    counts = draft.token_counts()
    needed = sum(counts)
    for unit in reversed(draft.conversation.units):
        if needed <= limit and not draft.conversation.marked.isdisjoint(unit.indices):
            return unit.stop
        if not unit.pinned:
            needed -= sum(counts[index] for index in unit.indices)
    return 0


def _unchanged_stop(sent: Draft, fresh: Draft, waste: float) -> int:
    """Return the index up to which a new choice differs by at most `waste` tokens from what was sent."""
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
        return math.inf  # a new summary covers later messages too: it makes no sense with only a part of the choice
    if isinstance(old, tuple) and isinstance(new, tuple):
        tokens = sent.known(index).tokens
        return sum(tokens[number] for number in {*old} ^ {*new})
    return 0 if old == new else abs(sent.tokens_of(index) - fresh.tokens_of(index))
