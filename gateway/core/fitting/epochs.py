"""Fit a conversation turn by turn: what was sent stays as it was sent, and cuts are rare and deep.

A provider charges a tenth for the part of a request that begins like the one before. A window that slides breaks that
beginning on every turn and costs twice what sending everything would. So decisions are remembered (an `Epoch`), new
messages are appended as they come until the limit is hit, and then enough is cut to leave room for some turns. Even
then the beginning is left alone as far as a fresh choice would hardly differ.

A turn on which nothing new has to be decided is cheap: what an epoch makes of its messages is kept by the reader, and
so is the verdict of the validator on it. What was appended since is sent as it came, behind a unit that is sent as it
came, so that it can break nothing that the client has not broken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from typing import Final

from gateway.core.conversation import Conversation, Item
from gateway.core.fitting.draft import KEEP, Draft, Same, Summary
from gateway.core.fitting.epoch import Epoch, Plan
from gateway.core.fitting.offers import GAP_TOKENS
from gateway.core.fitting.overflow import ContextOverflow
from gateway.core.fitting.reader import Reader
from gateway.core.fitting.recall import Recall, recall
from gateway.core.fitting.receipt import Fitted, Sent
from gateway.core.fitting.strategies import DEFAULT, Drop, Strategy, Summarize, first_to_go, leading
from gateway.core.fitting.summary import Use
from gateway.core.fitting.validate import problems
from gateway.core.fitting.watch import Expired, Watch, never
from gateway.core.fitting.worth import Worth
from gateway.core.message import SYSTEM_ROLES, digest
from gateway.core.values import dataclass

#: low-water marks with recall and without
_DEEP: Final = 0.55
_SHALLOW: Final = 0.7
#: most that last words may take to be kept whole
_WORDS: Final = 0.125
#: Most that the beginning of a task is given that would have been left out: a share, or the tokens of some sentences.
#: More of a long one takes the room of old lines that are asked for.
_TASK: Final = 0.05
_TASK_TOKENS: Final = 64


@dataclass(frozen=True, slots=True)
class FitPolicy:
    """How conversations are fitted. Shares are of the limit without the system messages."""

    strategies: Sequence[Strategy] = DEFAULT
    #: A cut goes down to here: lower loses more, higher cuts and pays more often. None is 0.7, and 0.55 with recall,
    #: which brings back what is asked for and costs less than what it saves to send little on every turn.
    low_water: float | None = None
    #: With recall, what a cut left is settled up to this share: the next one takes from what came behind it. More
    #: starves the new, and without recall what was lost once would be lost for good.
    settled: float = 0.5
    #: What was sent stays through a cut as long as no more than this share of it is other than a fresh choice.
    stale: float = 0.2
    recall: Recall = "off"
    #: at most this share for recalled lines, each turn
    recall_share: float = 0.25
    #: and at most this many times what the trimming saves this turn: what is recalled is paid in full once, and what
    #: is saved is saved on every later turn again
    recall_saving: float = 2.0
    #: what a token costs that the provider has cached, in relation to one it has not
    cached_price: float = 0.1
    #: for recall; `Condense` has its own
    worth: Worth = field(default_factory=Worth)

    @property
    def depth(self) -> float:
        """The low-water mark in use."""
        if self.low_water is not None:
            return self.low_water
        return _DEEP if self.recall != "off" else _SHALLOW

    @property
    def may_drop(self) -> bool:
        """Whether whole units may be left out, as the last resort too."""
        return any(strategy.may_drop for strategy in self.strategies)

    @property
    def summarizes(self) -> bool:
        """Whether a summary may come of it: then what was appended last is not all that a cut may take."""
        return any(isinstance(strategy, Summarize) and strategy.use != "off" for strategy in self.strategies)

    def given(self, use: Use, summaries: Mapping[str, str], most: int) -> FitPolicy:
        """This with summaries to use, see `Summarize.given`."""
        given = [one.given(use, summaries, most) if isinstance(one, Summarize) else one for one in self.strategies]
        return replace(self, strategies=given)


def fit(
    conversation: Conversation,
    limit: int,
    reader: Reader,
    *,
    epoch: Epoch | None = None,
    policy: FitPolicy | None = None,
    salt: str = "",
    expired: Callable[[], bool] = never,
    summaries: Mapping[str, str] | None = None,
    use: Use = "off",
) -> Fitted:
    """Make the messages weigh at most `limit` tokens, as weighed by `reader`.

    What fits comes back untouched, and what an earlier turn decided stays while it fits.

    Args:
        conversation: the messages; read through the same reader, or it is slow.
        limit: tokens of all messages.
        reader: weighs them.
        epoch: what an earlier turn of the same conversation gave; one of another conversation is not used.
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
    policy = (policy or FitPolicy()).given(use, summaries, limit)
    came = reader.weights(conversation)
    if sum(came) <= limit:
        return Fitted.untouched(conversation, came, sum(came))
    attempt = partial(
        _fitted, limit, reader, came, epoch=epoch, policy=policy, salt=salt, expired=expired, summaries=summaries
    )
    newest = _with_newest(conversation, came, limit)
    try:
        return attempt(newest)
    except ContextOverflow:
        if newest is conversation:
            raise
        return attempt(conversation)


def _with_newest(conversation: Conversation, came: Sequence[int], limit: int) -> Conversation:
    """The conversation with what the newest words answer kept as it came, which is wanted as long as it fits.

    Results that came with words behind them were not read by the model yet, and it would ask for them again. Words of
    its own are what the user's refer to; long ones can be told in part.
    """
    last = conversation.last_words
    if not last or last.start in conversation.pinned:
        return conversation
    is_short = sum(came[index] for index in last) <= _WORDS * limit
    if not (is_short or conversation.sketches[last.start].calls):
        return conversation
    return replace(conversation, wanted=conversation.wanted | {*range(last.start, len(came))})


def _fitted(
    limit: int,
    reader: Reader,
    came: Sequence[int],
    conversation: Conversation,
    *,
    epoch: Epoch | None,
    policy: FitPolicy,
    salt: str,
    expired: Callable[[], bool],
    summaries: Mapping[str, str],
) -> Fitted:
    before = sum(came)
    draft = start = Draft.untouched(conversation, reader, came=came, watch=Watch(expired))
    sent: Sent | None = None
    try:
        sent = _resumed(draft, epoch, salt, summaries)
        if sent is not None and epoch is not None:
            if before - sent.saved <= limit:
                sent, now = _continued(draft, sent, epoch, limit, policy=policy, salt=salt)
                return Fitted.having(conversation, came, before, sent=sent, epoch=now)
            start = draft.as_sent(sent.decisions, sent.recalls, sent.rules, sent.made)
        done, applied = _cut(start, limit, policy, was_sent=sent is not None)
        done = _with_task(done, limit)
        # It may have been enough to take back what was repeated.
        applied = applied or ("recall",)
    except Expired:
        done, applied = _given_up(start, limit, policy), ("drop",)
    else:
        done = _recalled(done, before, done.total(), limit, policy)
    if problems(conversation, done.sent(), done.total(), limit, done.inserted()):
        # Our own mistake; whole units can be left out without making any.
        done, applied = _dropped(draft, limit, policy), ("drop",)
    sent, now = _remembered(done, salt, lambda: Sent.of(done))
    return Fitted.having(conversation, came, before, sent=sent, epoch=now, applied=applied)


def _continued(
    draft: Draft, sent: Sent, epoch: Epoch, limit: int, *, policy: FitPolicy, salt: str
) -> tuple[Sent, Epoch]:
    """What was sent before still fits: nothing but the last message may be other than before, for lines behind it."""
    if policy.recall == "off":
        return sent, epoch
    start = draft.as_sent(sent.decisions, sent.recalls, sent.rules, {})
    before, last = sum(draft.came), len(draft.came) - 1
    done = _recalled(start, before, before - sent.saved, limit, policy)
    if done is start:
        return sent, epoch
    longer = sent.with_lines(done, last)
    was = Conversation(
        draft.conversation.messages[last:], draft.conversation.keys[last:], frozenset(), book=draft.reader
    )
    made = longer.made[last]
    now = Conversation((made.raw or b"",), (made.key,), frozenset(), book=draft.reader)
    if problems(was, now, before - longer.saved, limit):
        return sent, epoch
    return _remembered(done, salt, lambda: longer)


def _remembered(done: Draft, salt: str, compute: Callable[[], Sent]) -> tuple[Sent, Epoch]:
    epoch = Epoch.of(done.conversation.prefix(len(done.came), salt), done)
    told = done.summary
    return _kept(done.reader, epoch, told[1].text if told is not None else "", compute), epoch


def _kept(reader: Reader, epoch: Epoch, summary: str, compute: Callable[[], Sent]) -> Sent:
    # Sessions that begin alike share a reader, and need not have the same summary.
    key = (epoch.prefix, epoch.plan, digest(summary.encode("utf-8", "replace")) if summary else b"")
    return reader.kept("sent", key, compute, lambda sent: sent.size_bytes)


def _resumed(draft: Draft, epoch: Epoch | None, salt: str, summaries: Mapping[str, str]) -> Sent | None:
    """What was sent before, if it was for the beginning of this conversation and may still be."""
    conversation = draft.conversation
    if epoch is None or not 0 < epoch.size <= len(conversation.keys):
        return None
    if conversation.prefix(epoch.size, salt) != epoch.prefix:
        return None
    try:
        text = summaries.get(epoch.summary or "", "")
        sent = _kept(draft.reader, epoch, text, lambda: _sent(draft, epoch, summaries))
    except ValueError:
        return None
    if any(sent.decisions[index] != KEEP for index in conversation.pinned if index < epoch.size):
        return None
    again = [i for i in sent.marked | conversation.marked if i in sent.made and sent.made[i].raw is not None]
    if not again:
        return sent
    anew = draft.as_sent(sent.decisions, sent.recalls, sent.rules, {})
    return sent.remade({index: anew.made(index) for index in again}, conversation.marked)


def _sent(draft: Draft, epoch: Epoch, summaries: Mapping[str, str]) -> Sent:
    """What an epoch makes of its messages; ValueError for one that makes no sense, or what must not be sent."""
    plan = epoch.read(summaries)
    beginning = draft.conversation.beginning(epoch.size)
    as_came = Draft.untouched(beginning, draft.reader, came=draft.came[: epoch.size], watch=draft.watch)
    if not _is_sound(as_came, plan):
        raise ValueError("numbers of another conversation")
    sent = as_came.as_sent(plan.decisions, plan.recalls, plan.rules, {})
    if problems(beginning, sent.sent(), 0, 0, sent.inserted()):
        raise ValueError("not to be sent")
    return Sent.of(sent)


def _is_sound(draft: Draft, plan: Plan) -> bool:
    """Whether the numbers mean something here; an epoch comes out of a store and may be anything."""
    items, raws = draft.conversation.items, draft.conversation.messages

    def has(index: int, blocks: tuple[int, ...], *, calls: bool = False) -> bool:
        if not 0 <= index < len(items) or not blocks:
            return 0 <= index < len(items)
        sliced = draft.reader.sliced(items[index], raws[index], draft.watch)
        return max(blocks) < len(sliced.lines if calls else sliced.blocks)

    for index, decision in enumerate(plan.decisions):
        if isinstance(decision, tuple) and not (has(index, decision) and not items[index].sealed):
            return False
        if isinstance(decision, Same) and not (0 <= decision.of < index and _may_point(items[index])):
            return False
    return all(
        has(index, ()) and not items[index].sealed and all(has(source, blocks, calls=True) for source, blocks in lines)
        for index, lines in plan.recalls.items()
    )


def _may_point(item: Item) -> bool:
    return item.role == "tool" and not item.sealed


# --- a cut ------------------------------------------------------------------------------------------------------------


def _cut(draft: Draft, limit: int, policy: FitPolicy, *, was_sent: bool) -> tuple[Draft, tuple[str, ...]]:
    """Down to the low-water mark; what the client had cached stays while it can, and so does what was sent."""
    fixed = _system_tokens(draft)
    low = _low(draft, limit, policy)
    first = _protected(draft, limit)
    settles = was_sent and policy.recall != "off" and not policy.summarizes
    if settles and (short := _cut_tail(draft, low, limit, policy)):
        return short
    for start, target in ((first, low), (first, limit), (0, low), (0, limit)):
        fresh, applied = _apply(draft.reopened(start), target, limit, policy.strategies)
        if fresh.total() <= limit:
            break
    else:
        return _dropped(fresh, limit, policy), (*applied, "drop")
    same = _unchanged(draft, fresh, policy.stale * (limit - fixed)) if was_sent else 0
    if same > start:
        # The same choice with less room behind what stays, not another one.
        kept, kept_applied = _apply(draft.reopened(same, fresh.steps), target, limit, policy.strategies)
        if kept.total() <= max(target, fresh.total()):
            return kept, kept_applied
    return fresh, applied


def _cut_tail(draft: Draft, low: int, limit: int, policy: FitPolicy) -> tuple[Draft, tuple[str, ...]] | None:
    """Only what was appended since the last cut, if that is enough and what the cut left is small.

    All that was sent behind the place of a cut is paid in full again, and the newest stretch is the end of it.
    """
    tail = max(_appended(draft), _protected(draft, limit))
    fixed = _system_tokens(draft)
    if sum(draft.weights()[:tail]) - fixed > policy.settled * (limit - fixed):
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
    enough = target
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


def _with_task(draft: Draft, limit: int) -> Draft:
    """The task by its beginning where a cut left no more than a mark of it, and there is room: all else is about it."""
    task = draft.conversation.task
    if task is None or task < draft.first or draft.decisions[task] != ():
        return draft
    most = max(_TASK_TOKENS, int(_TASK * (limit - _system_tokens(draft))))
    room = min(limit - draft.total(), most)
    if draft.came[task] - draft.weight(task) <= room:
        return draft.having({task: KEEP})
    known = draft.known(task)
    told = draft.having({task: known.sliced.closed({*leading(known, room - GAP_TOKENS)})})
    return told if told.total() <= limit else draft


def _given_up(start: Draft, limit: int, policy: FitPolicy) -> Draft:
    """Whole units left out of what was sent before, down to the low-water mark, with nothing read any more."""
    draft = replace(start, watch=Watch(), first=0, recalls={})
    if policy.may_drop:
        dropped = Drop(reads=False).apply(draft, _low(draft, limit, policy))
        if dropped.total() <= limit:
            return dropped
    return _dropped(draft, limit, policy, reads=False)


def _dropped(draft: Draft, limit: int, policy: FitPolicy, *, reads: bool = True) -> Draft:
    """Whole units left out of the conversation as it came, if that is allowed."""
    if policy.may_drop:
        untouched = Draft.untouched(draft.conversation, draft.reader, came=draft.came)
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


def _low(draft: Draft, limit: int, policy: FitPolicy) -> int:
    fixed = _system_tokens(draft)
    return fixed + int((limit - fixed) * policy.depth)


def _system_tokens(draft: Draft) -> int:
    outline = draft.conversation.outline
    return sum(draft.weight(index) for index in outline.fixed if outline.sketches[index].role in SYSTEM_ROLES)


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
    if old != new and isinstance(new, Summary):
        return math.inf  # made for all that comes behind it: one without the other makes no sense
    if isinstance(old, tuple) and isinstance(new, tuple):
        tokens = sent.known(index).tokens
        return sum(tokens[number] for number in {*old} ^ {*new})
    return 0 if old == new else abs(sent.weight(index) - fresh.weight(index))


def _recalled(draft: Draft, before: int, total: int, limit: int, policy: FitPolicy) -> Draft:
    """Old lines at the end, within the room and the money there is for them; `total`: the tokens of the draft."""
    if policy.recall == "off" or len(draft.decisions) - 1 in draft.recalls:
        return draft
    room = min(
        limit - total,
        policy.recall_share * (limit - _system_tokens(draft)),
        policy.recall_saving * policy.cached_price * (before - total),
    )
    try:
        return recall(draft, room, policy.recall, policy.worth)
    except Expired:
        return draft


def find(epochs: Iterable[Epoch], conversation: Conversation, salt: str = "") -> Epoch | None:
    """Of some epochs, the one that covers most of this conversation."""
    size = len(conversation.keys)
    for epoch in sorted(epochs, key=lambda epoch: -epoch.size):
        if 0 < epoch.size <= size and conversation.prefix(epoch.size, salt) == epoch.prefix:
            return epoch
    return None
