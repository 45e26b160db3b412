"""Trim a conversation turn by turn: rarely and deeply, and unchanged in between for the prompt cache.

A provider charges about a tenth of the price for the prefix that a request shares with the previous request. A sliding
window changes that prefix on every turn, and costs twice as much as sending everything. Therefore decisions are
remembered (`TrimDecision`), and new messages are appended unchanged until the limit is reached. Then enough is trimmed
to leave room for some turns. Even then, the start of the prefix stays unchanged if a new decision would hardly change
it.

A turn without a new decision is cheap. The reader caches the messages that result from a trim decision, after the
validator has accepted them. Messages appended since then are sent unchanged and need no check: if they have errors, the
client made them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final

from gateway.core.conversation.message import digest
from gateway.core.conversation.units import Conversation, Item
from gateway.core.trimming.deadline import Deadline, DeadlinePassed, never
from gateway.core.trimming.draft import KEEP, Draft, DuplicateResult
from gateway.core.trimming.overflow import ContextOverflow
from gateway.core.trimming.policy import TrimPolicy
from gateway.core.trimming.reader import Reader
from gateway.core.trimming.recall import recall
from gateway.core.trimming.report import RenderedTokens, TrimmedConversation, TrimmedPrefix
from gateway.core.trimming.role_order import restore_role_order
from gateway.core.trimming.summary import SummaryUse
from gateway.core.trimming.trim import (
    could_show_task,
    drop_units,
    drop_without_reading,
    has_lost_task,
    restore_task,
    system_tokens,
    trim_draft,
)
from gateway.core.trimming.trim_decision import DecisionDetails, TrimDecision
from gateway.core.trimming.validate import problems

#: The assistant's last message is kept whole if it takes at most this share of the limit.
_MAX_WORDS_SHARE: Final = 0.125
#: tries to make room for gap marks that keep the order of roles
_MAX_TRIES: Final = 3

#: a trimmed draft, and the strategies that were applied
_Trimmed = tuple[Draft, tuple[str, ...]]


def trim_conversation(
    conversation: Conversation,
    limit: int,
    reader: Reader,
    *,
    trim_decision: TrimDecision | None = None,
    policy: TrimPolicy | None = None,
    salt: str = "",
    expired: Callable[[], bool] = never,
    summaries: Mapping[str, str] | None = None,
    use: SummaryUse = "off",
) -> TrimmedConversation:
    """Trim the messages to at most `limit` tokens, as `reader` counts them.

    Messages that fit are returned unchanged, and an earlier trim decision stays in force while it fits.

    Args:
        conversation: the messages. It should use the same reader, because another one makes this slow.
        limit: tokens of all messages.
        reader: counts tokens.
        trim_decision: the decision of an earlier turn; it is ignored if it belongs to another conversation.
        policy: how to choose.
        salt: the salt of the decision's prefix hash (see `Conversation.prefix`).
        expired: called every few milliseconds of choosing; once it returns True, only whole units are left out.
        summaries: texts by id; a decision is ignored if its summary is not among them.
        use: what `summarize` may do. A summary that was sent before stays in any case.

    Raises:
        ContextOverflow: what must stay exceeds the limit. If no strategy leaves messages out, all must stay.
        SummaryNeeded: a summary has to be made first; only if `use` is `ask`.
    """
    summaries = summaries or {}
    policy = (policy or TrimPolicy()).with_summaries(use, summaries, limit)
    original = reader.token_counts(conversation)
    if policy.keeps_decisions:
        draft = Draft.untouched(conversation, reader, original=original, deadline=Deadline(expired))
        resumed = _keep_decision(draft, trim_decision, limit, policy=policy, salt=salt, summaries=summaries)
        if resumed is not None:
            return resumed
    if sum(original) <= limit:
        return TrimmedConversation.untouched(conversation, original, sum(original))
    attempt = partial(
        _trim,
        limit,
        reader,
        original,
        trim_decision=trim_decision,
        policy=policy,
        salt=salt,
        expired=expired,
        summaries=summaries,
    )
    newest = _pin_last_message(conversation, original, limit)
    needed = _pin_needed(newest, original, limit)
    for option in [newest] if needed is newest else [needed, newest]:
        if option is not conversation:
            with suppress(ContextOverflow):
                return attempt(option)
    return attempt(conversation)


def _keep_decision(
    draft: Draft,
    trim_decision: TrimDecision | None,
    limit: int,
    *,
    policy: TrimPolicy,
    salt: str,
    summaries: Mapping[str, str],
) -> TrimmedConversation | None:
    """Return the earlier trim decision, continued, if its result is within the limit; else None."""
    try:
        sent = _resume(draft, trim_decision, salt, summaries)
    except DeadlinePassed:
        return None
    if sent is None or trim_decision is None:
        return None
    sent_tokens, before = sent.token_counts(draft.original, draft.reader.framing), sum(draft.original)
    if before - sent_tokens.saved > limit:
        return None
    sent, sent_tokens, now = _continue(draft, sent, sent_tokens, trim_decision, limit, policy=policy, salt=salt)
    return TrimmedConversation.with_prefix(
        draft.conversation, draft.original, before, sent=sent, rendered_tokens=sent_tokens, trim_decision=now
    )


def _pin_needed(conversation: Conversation, original: Sequence[int], limit: int) -> Conversation:
    """Pin the messages that later messages need as well (`Conversation.needed`), except those of priority 0.

    If all pinned messages then exceed the limit, return the conversation unchanged.
    """
    needed = {index for index in conversation.needed if conversation.priorities.get(index) != 0}
    if needed <= conversation.pinned:
        return conversation
    option = replace(conversation, pinned_by_client=conversation.pinned_by_client | needed)
    must = sum(original[index] for unit in option.units if unit.pinned for index in unit.indices)
    return option if must <= limit else conversation


def _pin_last_message(conversation: Conversation, original: Sequence[int], limit: int) -> Conversation:
    """Pin the assistant's last message and everything after it as well, if this message is short or calls tools.

    The model has not read the results of these calls, even if a user message follows them, and would ask for them
    again. The user's message usually refers to the assistant's last message. A long message without calls can be
    shortened.
    """
    last = conversation.last_response
    if not last or last.start in conversation.pinned:
        return conversation
    is_short = sum(original[index] for index in last) <= _MAX_WORDS_SHARE * limit
    if not (is_short or conversation.outlines[last.start].calls):
        return conversation
    return replace(conversation, pinned_by_client=conversation.pinned_by_client | {*range(last.start, len(original))})


def _trim(
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
    draft = start = Draft.untouched(conversation, reader, original=original, deadline=Deadline(expired))
    sent: TrimmedPrefix | None = None
    try:
        sent = _resume(draft, trim_decision, salt, summaries)
        if sent is not None and trim_decision is not None:
            sent_tokens = sent.token_counts(original, reader.framing)
            if before - sent_tokens.saved <= limit:
                sent, sent_tokens, now = _continue(
                    draft, sent, sent_tokens, trim_decision, limit, policy=policy, salt=salt
                )
                return TrimmedConversation.with_prefix(
                    conversation, original, before, sent=sent, rendered_tokens=sent_tokens, trim_decision=now
                )
            start = draft.with_earlier_decisions(sent.decisions, sent.recalls, sent.rules, sent.rendered)
        done, applied = _in_role_order(
            lambda room: _trim_with_task(start, room, policy, was_sent=sent is not None), limit
        )
        # No strategy was needed if it was enough to remove recalled lines.
        applied = applied or ("recall",)
    except DeadlinePassed:
        done, applied = _in_role_order(lambda room: (drop_without_reading(start, room, policy), ("drop",)), limit)
    else:
        recalled_tokens = sum(max(0, done.tokens_of(index) - done.original[index]) for index in done.recalls)
        done = _add_recall(done, before, done.total(), recalled_tokens=recalled_tokens, limit=limit, policy=policy)
    if problems(conversation, done.sent(), done.total(), limit, done.inserted()):
        # The result is invalid because of a bug in the gateway. Leaving out whole units avoids it.
        done, applied = _in_role_order(lambda room: (drop_units(draft, room, policy), ("drop",)), limit)
    sent, now = _remember(done, salt, lambda: TrimmedPrefix.of(done))
    sent_tokens = sent.token_counts(original, reader.framing)
    return TrimmedConversation.with_prefix(
        conversation, original, before, sent=sent, rendered_tokens=sent_tokens, trim_decision=now, applied=applied
    )


def _in_role_order(make: Callable[[int], _Trimmed], limit: int) -> _Trimmed:
    """Return the result of `make` for a limit, with the roles in the client's order.

    If gap marks leave it over the limit, it is made again with less room. The limit comes before the order, because
    not every provider requires the order.
    """
    plain, room = make(limit), limit
    done, applied = plain
    for _ in range(_MAX_TRIES):
        done = restore_role_order(done)
        if done.total() <= limit:
            return done, applied
        room -= done.total() - limit
        try:
            done, applied = make(room)
        except ContextOverflow:
            break
    return plain


def _trim_with_task(start: Draft, limit: int, policy: TrimPolicy, *, was_sent: bool) -> _Trimmed:
    done, applied = trim_draft(start, limit, policy, was_sent=was_sent)
    done = restore_task(done, limit, may_drop=policy.may_drop)
    if not could_show_task(done, limit):
        return done, applied
    # Only a little room is missing. It is better used for the task than kept free for the next turns.
    full, full_applied = trim_draft(start, limit, replace(policy, low_water=1.0), was_sent=was_sent)
    return (done, applied) if could_show_task(full, limit) else (full, full_applied)


def _continue(
    draft: Draft,
    sent: TrimmedPrefix,
    sent_tokens: RenderedTokens,
    trim_decision: TrimDecision,
    limit: int,
    *,
    policy: TrimPolicy,
    salt: str,
) -> tuple[TrimmedPrefix, RenderedTokens, TrimDecision]:
    """Return what was sent before, which still fits; only the last message may get recalled lines.

    The task is also restored if there was no room for it before and there is now.
    """
    before, last = sum(draft.original), len(draft.original) - 1
    start = draft.with_earlier_decisions(sent.decisions, sent.recalls, sent.rules, {})
    if policy.may_drop and not policy.keeps_decisions and has_lost_task(start):
        again = restore_task(start, limit, may_drop=True)
        if again is not start and not problems(
            draft.conversation, again.sent(), again.total(), limit, again.inserted()
        ):
            sent, trim_decision = _remember(again, salt, partial(TrimmedPrefix.of, again))
            start, sent_tokens = again, sent.token_counts(draft.original, draft.reader.framing)
    as_before = sent, sent_tokens, trim_decision
    if policy.recall == "off":
        return as_before
    recalled_tokens = sum(max(0, sent_tokens.tokens[index] - draft.original[index]) for index in sent.recalls)
    done = _add_recall(
        start, before, before - sent_tokens.saved, recalled_tokens=recalled_tokens, limit=limit, policy=policy
    )
    if done is start:
        return as_before
    longer = sent.with_recalled_lines(done, last)
    more = longer.token_counts(draft.original, draft.reader.framing)
    was = Conversation(
        draft.conversation.messages[last:], draft.conversation.keys[last:], frozenset(), parser=draft.reader
    )
    rendered = longer.rendered[last]
    now = Conversation((rendered.raw or b"",), (rendered.key,), frozenset(), parser=draft.reader)
    if problems(was, now, before - more.saved, limit):
        return as_before
    remembered, new_decision = _remember(done, salt, lambda: longer)
    return remembered, more, new_decision


def _remember(done: Draft, salt: str, compute: Callable[[], TrimmedPrefix]) -> tuple[TrimmedPrefix, TrimDecision]:
    trim_decision = TrimDecision.of(done.conversation.prefix(len(done.original), salt), done)
    summary = done.summary
    return _cached_prefix(done, trim_decision, summary[1].text if summary is not None else "", compute), trim_decision


def _cached_prefix(
    draft: Draft, trim_decision: TrimDecision, summary: str, compute: Callable[[], TrimmedPrefix]
) -> TrimmedPrefix:
    # Sessions with the same start share a reader, but may have different summaries.
    summary_hash = digest(summary.encode("utf-8", "replace")) if summary else b""
    key = (trim_decision.prefix, trim_decision.plan, trim_decision.summary, summary_hash)
    sent = draft.reader.cached("sent", key, compute, lambda sent: sent.size_bytes)
    # The prefix hash ignores thinking. Messages with thinking cannot be split, so block numbers are invalid for them.
    if sent.keys != draft.conversation.keys[: trim_decision.size] and not _is_valid(draft, sent):
        raise ValueError("numbers of other messages")
    return sent.for_messages(draft)


def _resume(
    draft: Draft, trim_decision: TrimDecision | None, salt: str, summaries: Mapping[str, str]
) -> TrimmedPrefix | None:
    """Return what was sent before, if it belongs to the start of this conversation and may still be sent; else None."""
    conversation = draft.conversation
    if trim_decision is None or not 0 < trim_decision.size <= len(conversation.keys):
        return None
    if conversation.prefix(trim_decision.size, salt) != trim_decision.prefix:
        return None
    try:
        text = summaries.get(trim_decision.summary or "", "")
        sent = _cached_prefix(draft, trim_decision, text, lambda: _apply_decision(draft, trim_decision, summaries))
    except ValueError:
        return None
    if any(sent.decisions[index] != KEEP for index in conversation.pinned if index < trim_decision.size):
        return None
    return sent


def _apply_decision(draft: Draft, trim_decision: TrimDecision, summaries: Mapping[str, str]) -> TrimmedPrefix:
    """Return the result of a trim decision for its messages.

    Raises:
        ValueError: the decision does not fit the messages, or its result must not be sent.
    """
    plan = trim_decision.read(summaries)
    beginning = draft.conversation.first_messages(trim_decision.size)
    unchanged = Draft.untouched(
        beginning, draft.reader, original=draft.original[: trim_decision.size], deadline=draft.deadline
    )
    if not _is_valid(unchanged, plan):
        raise ValueError("numbers of another conversation")
    sent = unchanged.with_earlier_decisions(plan.decisions, plan.recalls, plan.rules, {})
    if problems(beginning, sent.sent(), 0, 0, sent.inserted()):
        raise ValueError("not to be sent")
    return TrimmedPrefix.of(sent)


def _is_valid(draft: Draft, plan: DecisionDetails | TrimmedPrefix) -> bool:
    """Return whether the numbers of a decision are valid for these messages: a stored decision may be damaged."""
    items, raws = draft.conversation.items, draft.conversation.messages

    def has(index: int, blocks: tuple[int, ...], *, calls: bool = False) -> bool:
        if not 0 <= index < len(items) or not blocks:
            return 0 <= index < len(items)
        sliced = draft.reader.sliced(items[index], raws[index], draft.deadline)
        return max(blocks) < len(sliced.lines if calls else sliced.blocks)

    for index, decision in enumerate(plan.decisions):
        may_be = not items[index].sealed or (items[index].is_assistant_text and decision == ())
        if isinstance(decision, tuple) and not (may_be and has(index, decision)):
            return False
        if isinstance(decision, DuplicateResult) and not (0 <= decision.source < index and _may_refer(items[index])):
            return False
    return all(
        has(index, ()) and not items[index].sealed and all(has(source, blocks, calls=True) for source, blocks in lines)
        for index, lines in plan.recalls.items()
    )


def _may_refer(item: Item) -> bool:
    return item.role == "tool" and not item.sealed


def _add_recall(
    draft: Draft, before: int, total: int, *, recalled_tokens: int, limit: int, policy: TrimPolicy
) -> Draft:
    """Return the draft with old lines recalled at its end, within the token and cost limits of the policy.

    `total`: the tokens of the draft; `recalled_tokens`: the tokens of the lines that it has already.
    """
    if policy.recall == "off" or len(draft.decisions) - 1 in draft.recalls:
        return draft
    room = min(
        limit - total,
        policy.recall_share * (limit - system_tokens(draft)) - recalled_tokens,
        policy.recall_saving * policy.cached_price * (before - total),
    )
    try:
        return recall(draft, room, policy.recall, policy.relevance)
    except DeadlinePassed:
        return draft


def find(trim_decisions: Iterable[TrimDecision], conversation: Conversation, salt: str = "") -> TrimDecision | None:
    """Return the trim decision that covers most messages of this conversation, or None."""
    size = len(conversation.keys)
    for trim_decision in sorted(trim_decisions, key=lambda trim_decision: -trim_decision.size):
        if 0 < trim_decision.size <= size and conversation.prefix(trim_decision.size, salt) == trim_decision.prefix:
            return trim_decision
    return None
