"""Trim a conversation turn by turn: rarely and deeply, and unchanged in between for the prompt cache.

A provider charges a tenth for the part of a request that has the same prefix as the request before. A sliding window
changes that prefix on every turn, and costs twice as much as sending everything. Therefore decisions are remembered
(`TrimDecision`), and new messages are appended unchanged until the limit is reached. Then enough is trimmed to leave
room for some turns. Even then the prefix stays unchanged as far as a new choice would hardly differ.

A turn on which nothing new has to be decided is cheap: what an epoch makes of its messages is kept by the reader, and
so is the verdict of the validator on it. What was appended since is sent as it came and need not be checked: nothing of
it was changed, so that what is wrong with it is the client's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final

from gateway.core.conversation.message import digest
from gateway.core.conversation.units import Conversation, Item
from gateway.core.fitting.cut import cut, dropped, given_up, lacks_task, lost_task, system_tokens, with_task
from gateway.core.fitting.deadline import Deadline, DeadlinePassed, never
from gateway.core.fitting.draft import KEEP, Draft, DuplicateResult
from gateway.core.fitting.overflow import ContextOverflow
from gateway.core.fitting.policy import TrimPolicy
from gateway.core.fitting.reader import Reader
from gateway.core.fitting.recall import recall
from gateway.core.fitting.report import RenderedTokens, TrimmedConversation, TrimmedPrefix
from gateway.core.fitting.role_order import in_order
from gateway.core.fitting.summary import Use
from gateway.core.fitting.trim_decision import DecisionDetails, TrimDecision
from gateway.core.fitting.validate import problems

#: most that last words may take to be kept whole
_WORDS: Final = 0.125
#: to make room for an order
_TRIES: Final = 3

#: what was made, and the strategies that made it
_Made = tuple[Draft, tuple[str, ...]]


def fit(
    conversation: Conversation,
    limit: int,
    reader: Reader,
    *,
    trim_decision: TrimDecision | None = None,
    policy: TrimPolicy | None = None,
    salt: str = "",
    expired: Callable[[], bool] = never,
    summaries: Mapping[str, str] | None = None,
    use: Use = "off",
) -> TrimmedConversation:
    """Make the messages weigh at most `limit` tokens, as weighed by `reader`.

    What fits comes back untouched, and what an earlier turn decided stays while it fits.

    Args:
        conversation: the messages; read through the same reader, or it is slow.
        limit: tokens of all messages.
        reader: weighs them.
        trim_decision: what an earlier turn of the same conversation gave; one of another conversation is not used.
        policy: how to choose.
        salt: what it was when the epoch was made (see `Conversation.prefix`).
        expired: asked every few milliseconds of choosing; when it says so, whole units are left out instead of parts.
        summaries: texts by id; an epoch whose summary is not among them is not used.
        use: what `summarize` may do. A summary that was sent before stays in any case.

    Raises:
        ContextOverflow: what must stay is over the limit alone; where no strategy leaves messages out, all must stay.
        SummaryNeeded: a summary has to be made first; only where `use` is `ask`.
    """
    summaries = summaries or {}
    policy = (policy or TrimPolicy()).given(use, summaries, limit)
    original = reader.weights(conversation)
    if policy.keeps_decisions:
        draft = Draft.untouched(conversation, reader, original=original, watch=Deadline(expired))
        resumed = _going_on(draft, trim_decision, limit, policy=policy, salt=salt, summaries=summaries)
        if resumed is not None:
            return resumed
    if sum(original) <= limit:
        return TrimmedConversation.untouched(conversation, original, sum(original))
    attempt = partial(
        _fitted,
        limit,
        reader,
        original,
        trim_decision=trim_decision,
        policy=policy,
        salt=salt,
        expired=expired,
        summaries=summaries,
    )
    newest = _with_newest(conversation, original, limit)
    needed = _with_needed(newest, original, limit)
    for option in [newest] if needed is newest else [needed, newest]:
        if option is not conversation:
            with suppress(ContextOverflow):
                return attempt(option)
    return attempt(conversation)


def _going_on(
    draft: Draft,
    trim_decision: TrimDecision | None,
    limit: int,
    *,
    policy: TrimPolicy,
    salt: str,
    summaries: Mapping[str, str],
) -> TrimmedConversation | None:
    """Return what an earlier turn decided, continued, if that is within the limit; None if it is not."""
    try:
        sent = _resumed(draft, trim_decision, salt, summaries)
    except DeadlinePassed:
        return None
    if sent is None or trim_decision is None:
        return None
    weights, before = sent.weights(draft.original, draft.reader.framing), sum(draft.original)
    if before - weights.saved > limit:
        return None
    sent, weights, now = _continued(draft, sent, weights, trim_decision, limit, policy=policy, salt=salt)
    return TrimmedConversation.having(
        draft.conversation, draft.original, before, sent=sent, weights=weights, trim_decision=now
    )


def _with_needed(conversation: Conversation, original: Sequence[int], limit: int) -> Conversation:
    """The conversation with what its messages need kept as it came, but for what is worth nothing by itself."""
    needed = {index for index in conversation.needed if conversation.priorities.get(index) != 0}
    if needed <= conversation.pinned:
        return conversation
    option = replace(conversation, wanted=conversation.wanted | needed)
    must = sum(original[index] for unit in option.units if unit.pinned for index in unit.indices)
    return option if must <= limit else conversation


def _with_newest(conversation: Conversation, original: Sequence[int], limit: int) -> Conversation:
    """The conversation with what the newest words answer kept as it came, which is wanted as long as it fits.

    Results that came with words behind them were not read by the model yet, and it would ask for them again. Words of
    its own are what the user's refer to; long ones can be told in part.
    """
    last = conversation.last_words
    if not last or last.start in conversation.pinned:
        return conversation
    is_short = sum(original[index] for index in last) <= _WORDS * limit
    if not (is_short or conversation.outlines[last.start].calls):
        return conversation
    return replace(conversation, wanted=conversation.wanted | {*range(last.start, len(original))})


def _fitted(
    limit: int,
    reader: Reader,
    original: Sequence[int],
    conversation: Conversation,
    *,
    trim_decision: TrimDecision | None,
    policy: TrimPolicy,
    salt: str,
    expired: Callable[[], bool],
    summaries: Mapping[str, str],
) -> TrimmedConversation:
    before = sum(original)
    draft = start = Draft.untouched(conversation, reader, original=original, watch=Deadline(expired))
    sent: TrimmedPrefix | None = None
    try:
        sent = _resumed(draft, trim_decision, salt, summaries)
        if sent is not None and trim_decision is not None:
            weights = sent.weights(original, reader.framing)
            if before - weights.saved <= limit:
                sent, weights, now = _continued(draft, sent, weights, trim_decision, limit, policy=policy, salt=salt)
                return TrimmedConversation.having(
                    conversation, original, before, sent=sent, weights=weights, trim_decision=now
                )
            start = draft.as_sent(sent.decisions, sent.recalls, sent.rules, sent.made)
        done, applied = _ordered(lambda room: _cut(start, room, policy, was_sent=sent is not None), limit)
        # It may have been enough to take back what was repeated.
        applied = applied or ("recall",)
    except DeadlinePassed:
        done, applied = _ordered(lambda room: (given_up(start, room, policy), ("drop",)), limit)
    else:
        told = sum(max(0, done.weight(index) - done.original[index]) for index in done.recalls)
        done = _recalled(done, before, done.total(), told=told, limit=limit, policy=policy)
    if problems(conversation, done.sent(), done.total(), limit, done.inserted()):
        # Our own mistake; whole units can be left out without making any.
        done, applied = _ordered(lambda room: (dropped(draft, room, policy), ("drop",)), limit)
    sent, now = _remembered(done, salt, lambda: TrimmedPrefix.of(done))
    weights = sent.weights(original, reader.framing)
    return TrimmedConversation.having(
        conversation, original, before, sent=sent, weights=weights, trim_decision=now, applied=applied
    )


def _ordered(make: Callable[[int], _Made], limit: int) -> _Made:
    """What is made for a limit, with its roles in the order that came; for less, where that leaves no room for it.

    To be within the limit comes first: not everyone wants them so.
    """
    plain, room = make(limit), limit
    done, applied = plain
    for _ in range(_TRIES):
        done = in_order(done)
        if done.total() <= limit:
            return done, applied
        room -= done.total() - limit
        try:
            done, applied = make(room)
        except ContextOverflow:
            break
    return plain


def _cut(start: Draft, limit: int, policy: TrimPolicy, *, was_sent: bool) -> _Made:
    done, applied = cut(start, limit, policy, was_sent=was_sent)
    done = with_task(done, limit, may_drop=policy.may_drop)
    if not lacks_task(done, limit):
        return done, applied
    # So little room is worth more to the task than to the next turns.
    full, full_applied = cut(start, limit, replace(policy, low_water=1.0), was_sent=was_sent)
    return (done, applied) if lacks_task(full, limit) else (full, full_applied)


def _continued(
    draft: Draft,
    sent: TrimmedPrefix,
    weights: RenderedTokens,
    trim_decision: TrimDecision,
    limit: int,
    *,
    policy: TrimPolicy,
    salt: str,
) -> tuple[TrimmedPrefix, RenderedTokens, TrimDecision]:
    """What was sent before still fits: nothing but the last message may be other than before, for lines behind it.

    And the task, where that had no room before, and has now.
    """
    before, last = sum(draft.original), len(draft.original) - 1
    start = draft.as_sent(sent.decisions, sent.recalls, sent.rules, {})
    if policy.may_drop and not policy.keeps_decisions and lost_task(start):
        again = with_task(start, limit, may_drop=True)
        if again is not start and not problems(
            draft.conversation, again.sent(), again.total(), limit, again.inserted()
        ):
            sent, trim_decision = _remembered(again, salt, partial(TrimmedPrefix.of, again))
            start, weights = again, sent.weights(draft.original, draft.reader.framing)
    as_before = sent, weights, trim_decision
    if policy.recall == "off":
        return as_before
    told = sum(max(0, weights.tokens[index] - draft.original[index]) for index in sent.recalls)
    done = _recalled(start, before, before - weights.saved, told=told, limit=limit, policy=policy)
    if done is start:
        return as_before
    longer = sent.with_lines(done, last)
    more = longer.weights(draft.original, draft.reader.framing)
    was = Conversation(
        draft.conversation.messages[last:], draft.conversation.keys[last:], frozenset(), book=draft.reader
    )
    made = longer.made[last]
    now = Conversation((made.raw or b"",), (made.key,), frozenset(), book=draft.reader)
    if problems(was, now, before - more.saved, limit):
        return as_before
    remembered, told_of = _remembered(done, salt, lambda: longer)
    return remembered, more, told_of


def _remembered(done: Draft, salt: str, compute: Callable[[], TrimmedPrefix]) -> tuple[TrimmedPrefix, TrimDecision]:
    trim_decision = TrimDecision.of(done.conversation.prefix(len(done.original), salt), done)
    told = done.summary
    return _kept(done, trim_decision, told[1].text if told is not None else "", compute), trim_decision


def _kept(
    draft: Draft, trim_decision: TrimDecision, summary: str, compute: Callable[[], TrimmedPrefix]
) -> TrimmedPrefix:
    # Sessions that begin alike share a reader, and need not have the same summary.
    told = digest(summary.encode("utf-8", "replace")) if summary else b""
    key = (trim_decision.prefix, trim_decision.plan, trim_decision.summary, told)
    sent = draft.reader.kept("sent", key, compute, lambda sent: sent.size_bytes)
    # The same messages with their thinking cannot be cut, so that numbers of blocks mean nothing in them.
    if sent.keys != draft.conversation.keys[: trim_decision.size] and not _is_sound(draft, sent):
        raise ValueError("numbers of other messages")
    return sent.of_these(draft)


def _resumed(
    draft: Draft, trim_decision: TrimDecision | None, salt: str, summaries: Mapping[str, str]
) -> TrimmedPrefix | None:
    """What was sent before, if it was for the beginning of this conversation and may still be."""
    conversation = draft.conversation
    if trim_decision is None or not 0 < trim_decision.size <= len(conversation.keys):
        return None
    if conversation.prefix(trim_decision.size, salt) != trim_decision.prefix:
        return None
    try:
        text = summaries.get(trim_decision.summary or "", "")
        sent = _kept(draft, trim_decision, text, lambda: _sent(draft, trim_decision, summaries))
    except ValueError:
        return None
    if any(sent.decisions[index] != KEEP for index in conversation.pinned if index < trim_decision.size):
        return None
    return sent


def _sent(draft: Draft, trim_decision: TrimDecision, summaries: Mapping[str, str]) -> TrimmedPrefix:
    """What an epoch makes of its messages; ValueError for one that makes no sense, or what must not be sent."""
    plan = trim_decision.read(summaries)
    beginning = draft.conversation.beginning(trim_decision.size)
    as_came = Draft.untouched(beginning, draft.reader, original=draft.original[: trim_decision.size], watch=draft.watch)
    if not _is_sound(as_came, plan):
        raise ValueError("numbers of another conversation")
    sent = as_came.as_sent(plan.decisions, plan.recalls, plan.rules, {})
    if problems(beginning, sent.sent(), 0, 0, sent.inserted()):
        raise ValueError("not to be sent")
    return TrimmedPrefix.of(sent)


def _is_sound(draft: Draft, plan: DecisionDetails | TrimmedPrefix) -> bool:
    """Whether the numbers mean something here; an epoch comes out of a store and may be anything."""
    items, raws = draft.conversation.items, draft.conversation.messages

    def has(index: int, blocks: tuple[int, ...], *, calls: bool = False) -> bool:
        if not 0 <= index < len(items) or not blocks:
            return 0 <= index < len(items)
        sliced = draft.reader.sliced(items[index], raws[index], draft.watch)
        return max(blocks) < len(sliced.lines if calls else sliced.blocks)

    for index, decision in enumerate(plan.decisions):
        may_be = not items[index].sealed or (items[index].is_talk and decision == ())
        if isinstance(decision, tuple) and not (may_be and has(index, decision)):
            return False
        if isinstance(decision, DuplicateResult) and not (0 <= decision.of < index and _may_point(items[index])):
            return False
    return all(
        has(index, ()) and not items[index].sealed and all(has(source, blocks, calls=True) for source, blocks in lines)
        for index, lines in plan.recalls.items()
    )


def _may_point(item: Item) -> bool:
    return item.role == "tool" and not item.sealed


def _recalled(draft: Draft, before: int, total: int, *, told: int, limit: int, policy: TrimPolicy) -> Draft:
    """Old lines at the end, within the room and the money there is for them.

    `total`: the tokens of the draft; `told`: those of the lines that stand in it already.
    """
    if policy.recall == "off" or len(draft.decisions) - 1 in draft.recalls:
        return draft
    room = min(
        limit - total,
        policy.recall_share * (limit - system_tokens(draft)) - told,
        policy.recall_saving * policy.cached_price * (before - total),
    )
    try:
        return recall(draft, room, policy.recall, policy.worth)
    except DeadlinePassed:
        return draft


def find(trim_decisions: Iterable[TrimDecision], conversation: Conversation, salt: str = "") -> TrimDecision | None:
    """Of some epochs, the one that covers most of this conversation."""
    size = len(conversation.keys)
    for trim_decision in sorted(trim_decisions, key=lambda trim_decision: -trim_decision.size):
        if 0 < trim_decision.size <= size and conversation.prefix(trim_decision.size, salt) == trim_decision.prefix:
            return trim_decision
    return None
