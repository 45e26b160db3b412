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

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from gateway.core.conversation import Conversation, Item
from gateway.core.fitting.draft import KEEP, Draft, Same
from gateway.core.fitting.epoch import Epoch, Plan
from gateway.core.fitting.overflow import ContextOverflow
from gateway.core.fitting.reader import Reader
from gateway.core.fitting.recall import Recall, recall
from gateway.core.fitting.receipt import Fitted, Sent
from gateway.core.fitting.strategies import DEFAULT, Drop, Strategy, first_to_go
from gateway.core.fitting.validate import problems
from gateway.core.fitting.watch import Expired, Watch, never
from gateway.core.fitting.worth import Worth, known_of
from gateway.core.message import SYSTEM_ROLES


@dataclass(frozen=True, slots=True)
class FitPolicy:
    """How conversations are fitted. Shares are of the limit without the system messages."""

    strategies: Sequence[Strategy] = DEFAULT
    #: A cut goes down to here: lower loses more, higher cuts and pays more often.
    low_water: float = 0.7
    #: What was sent stays through a cut as long as no more than this share of it is other than a fresh choice.
    stale: float = 0.1
    recall: Recall = "off"
    #: at most this share for recalled lines, each turn
    recall_share: float = 0.25
    #: and at most this share of what the trimming saves this turn: recall must not eat what trimming earns
    recall_saving: float = 0.5
    #: what a token costs that the provider has cached, in relation to one it has not
    cached_price: float = 0.1
    #: for recall; `Condense` has its own
    worth: Worth = field(default_factory=Worth)

    @property
    def may_drop(self) -> bool:
        """Whether whole units may be left out, as the last resort too."""
        return any(strategy.may_drop for strategy in self.strategies)


def fit(
    conversation: Conversation,
    limit: int,
    reader: Reader,
    *,
    epoch: Epoch | None = None,
    policy: FitPolicy | None = None,
    salt: str = "",
    expired: Callable[[], bool] = never,
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

    Raises:
        ContextOverflow: what must stay is over the limit alone; where no strategy leaves messages out, all must stay.
    """
    policy = policy or FitPolicy()
    came = reader.weights(conversation)
    before = sum(came)
    if before <= limit:
        return Fitted.untouched(conversation, came, before)
    draft = start = Draft.untouched(conversation, reader, came=came, watch=Watch(expired))
    sent: Sent | None = None
    applied: tuple[str, ...] = ()
    try:
        sent = _resumed(draft, epoch, salt)
        if sent is not None:
            if policy.recall == "off" and before - sent.saved <= limit and epoch is not None:
                return Fitted.having(conversation, came, before, sent=sent, epoch=epoch)
            start = draft.as_sent(sent.decisions, sent.recalls, sent.rules, sent.made)
        done = start
        if before - (sent.saved if sent is not None else 0) > limit:
            done, applied = _cut(start, limit, policy, was_sent=sent is not None)
    except Expired:
        done, applied = _given_up(start, limit, policy), ("drop",)
    done = _recalled(done, before, limit, policy)
    if done is start and sent is not None and epoch is not None:
        return Fitted.having(conversation, came, before, sent=sent, epoch=epoch)
    if problems(conversation, done.sent(), done.total(), limit):
        # Our own mistake; whole units can be left out without making any.
        done, applied = _dropped(draft, limit, policy), ("drop",)
    now = Epoch.of(conversation.prefix(len(came), salt), done)
    sent = _kept(reader, now, lambda: Sent.of(done))
    return Fitted.having(conversation, came, before, sent=sent, epoch=now, applied=applied)


def _kept(reader: Reader, epoch: Epoch, compute: Callable[[], Sent]) -> Sent:
    return reader.kept("sent", (epoch.prefix, epoch.plan), compute, lambda sent: sent.size_bytes)


def _resumed(draft: Draft, epoch: Epoch | None, salt: str) -> Sent | None:
    """What was sent before, if it was for the beginning of this conversation and may still be."""
    conversation = draft.conversation
    if epoch is None or not 0 < epoch.size <= len(conversation.keys):
        return None
    if conversation.prefix(epoch.size, salt) != epoch.prefix:
        return None
    try:
        sent = _kept(draft.reader, epoch, lambda: _sent(draft, epoch))
    except ValueError:
        return None
    if any(sent.decisions[index] != KEEP for index in conversation.pinned if index < epoch.size):
        return None
    again = [i for i in sent.marked | conversation.marked if i in sent.made and sent.made[i].raw is not None]
    if not again:
        return sent
    anew = draft.as_sent(sent.decisions, sent.recalls, sent.rules, {})
    return sent.remade({index: anew.made(index) for index in again}, conversation.marked)


def _sent(draft: Draft, epoch: Epoch) -> Sent:
    """What an epoch makes of its messages; ValueError for one that makes no sense, or what must not be sent."""
    plan = epoch.read()
    beginning = draft.conversation.beginning(epoch.size)
    as_came = Draft.untouched(beginning, draft.reader, came=draft.came[: epoch.size], watch=draft.watch)
    if not _is_sound(as_came, plan):
        raise ValueError("numbers of another conversation")
    sent = as_came.as_sent(plan.decisions, plan.recalls, plan.rules, {})
    if problems(beginning, sent.sent(), 0, 0):
        raise ValueError("not to be sent")
    return Sent.of(sent)


def _is_sound(draft: Draft, plan: Plan) -> bool:
    """Whether the numbers mean something here; an epoch comes out of a store and may be anything."""
    items, raws = draft.conversation.items, draft.conversation.messages

    def has(index: int, blocks: tuple[int, ...]) -> bool:
        if not 0 <= index < len(items):
            return False
        return not blocks or max(blocks) < len(draft.reader.sliced(items[index], raws[index], draft.watch).blocks)

    for index, decision in enumerate(plan.decisions):
        if isinstance(decision, tuple) and not (has(index, decision) and not items[index].sealed):
            return False
        if isinstance(decision, Same) and not (0 <= decision.of < index and _may_point(items[index])):
            return False
    return all(
        has(index, ()) and not items[index].sealed and all(has(source, blocks) for source, blocks in lines)
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
    for start, target in ((first, low), (first, limit), (0, low), (0, limit)):
        fresh, applied = _apply(draft.reopened(start), target, limit, policy.strategies)
        if fresh.total() <= limit:
            break
    else:
        return _dropped(fresh, limit, policy), (*applied, "drop")
    same = _unchanged(draft, fresh, policy.stale * (limit - fixed)) if was_sent else 0
    if same > start:
        kept, kept_applied = _apply(draft.reopened(same), target, limit, policy.strategies)
        if kept.total() <= max(target, fresh.total()):
            return kept, kept_applied
    return fresh, applied


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
        if strategy.is_last_word:
            enough = limit
        if lighter.decisions != draft.decisions:
            applied.append(strategy.name)
            draft = lighter.ruled(draft, strategy.name)
    return draft, tuple(applied)


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
    return fixed + int((limit - fixed) * policy.low_water)


def _system_tokens(draft: Draft) -> int:
    return sum(draft.weight(item.index) for item in draft.conversation.items if item.role in SYSTEM_ROLES)


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
    if isinstance(old, tuple) and isinstance(new, tuple):
        tokens = known_of(sent, index).tokens
        return sum(tokens[number] for number in {*old} ^ {*new})
    return 0 if old == new else abs(sent.weight(index) - fresh.weight(index))


def _recalled(draft: Draft, before: int, limit: int, policy: FitPolicy) -> Draft:
    """Old lines at the end, within the room and the money there is for them."""
    total = draft.total()
    room = min(
        limit - total,
        policy.recall_share * (limit - _system_tokens(draft)),
        policy.recall_saving * policy.cached_price * (before - total),
    )
    if len(draft.conversation.items) - 1 in draft.recalls:
        return draft
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
