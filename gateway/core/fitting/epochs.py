"""Fit a conversation turn by turn: what was sent stays as it was sent, and cuts are rare and deep.

A provider charges a tenth for the part of a request that begins like the one before. A window that slides breaks that
beginning on every turn and costs twice what sending everything would. So decisions are remembered (an `Epoch`), new
messages are appended as they come until the limit is hit, and then enough is cut to leave room for some turns. Even
then the beginning is left alone as far as a fresh choice would hardly differ.

An epoch is a small value without any text of the conversation: hashes and numbers of blocks. It is found again by the
hash of the messages it was made for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from gateway.core.conversation import SYSTEM_ROLES, Conversation, Message
from gateway.core.fitting.draft import DROP, KEEP, Decision, Draft, Same, numbers_of, spans_of
from gateway.core.fitting.overflow import ContextOverflow
from gateway.core.fitting.reader import Reader
from gateway.core.fitting.recall import Recall, recall
from gateway.core.fitting.strategies import DEFAULT, Drop, Strategy
from gateway.core.fitting.validate import problems
from gateway.core.fitting.worth import Worth, known_of

#: of the way messages are cut into blocks: an epoch made by another version is not understood
VERSION: Final = 1


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


@dataclass(frozen=True, slots=True)
class Epoch:
    """What was decided for the first messages of a conversation."""

    #: hash of those messages
    prefix: str
    decisions: tuple[Decision, ...]
    recalls: Mapping[int, tuple[tuple[int, tuple[int, ...]], ...]]

    def to_json(self) -> dict[str, Any]:
        """A value that JSON can hold."""
        decisions = [
            spans_of(d) if isinstance(d, tuple) else [d.of] if isinstance(d, Same) else int(d == KEEP)
            for d in self.decisions
        ]
        recalls = {
            str(index): [[source, spans_of(blocks)] for source, blocks in lines]
            for index, lines in self.recalls.items()
        }
        return {"v": VERSION, "prefix": self.prefix, "decisions": decisions, "recalls": recalls}

    @classmethod
    def from_json(cls, value: Any) -> Epoch | None:
        """The epoch, or None for what is not one of this version."""
        try:
            if value["v"] != VERSION:
                return None
            recalls = {
                int(index): tuple((int(source), numbers_of(blocks)) for source, blocks in lines)
                for index, lines in value["recalls"].items()
            }
            return cls(str(value["prefix"]), tuple(map(_decision, value["decisions"])), recalls)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError):
            return None


def _decision(value: Any) -> Decision:
    if isinstance(value, str):
        return numbers_of(value)
    if isinstance(value, list):
        return Same(int(value[0]))
    return KEEP if value else DROP


@dataclass(frozen=True, slots=True)
class Fitted:
    """The messages to send, and how it came to them."""

    messages: tuple[Message, ...]
    #: tokens of the messages as they came, and as they are sent
    tokens_before: int
    tokens: int
    changed: bool
    #: what to remember; None while everything fits
    epoch: Epoch | None
    #: the strategies that changed something in this turn; empty where what was sent before still fits
    applied: tuple[str, ...]
    #: messages left out, messages cut, old messages repeated in part
    dropped: int
    cut: int
    recalled: int


def fit(
    conversation: Conversation,
    limit: int,
    reader: Reader,
    *,
    epoch: Epoch | None = None,
    policy: FitPolicy | None = None,
    salt: str = "",
) -> Fitted:
    """Make the messages weigh at most `limit` tokens, as weighed by `reader`.

    What fits comes back untouched. `epoch` is what an earlier turn of the same conversation gave; one of another
    conversation is not used. `salt` must be what it was then (see `Conversation.prefix_hashes`).

    Raises:
        ContextOverflow: what must stay is over the limit alone.
    """
    policy = policy or FitPolicy()
    draft = Draft.untouched(conversation, reader)
    before = draft.total()
    if before <= limit:
        return Fitted(conversation.messages, before, before, changed=False, epoch=None, applied=(), **_NOTHING)
    hashes = conversation.prefix_hashes(salt)
    before_draft = resumed = _resume(draft, epoch, hashes)
    applied: tuple[str, ...] = ()
    if resumed.total() > limit:
        before_draft, applied = _cut(resumed, limit, policy, was_sent=resumed is not draft)
    fitted = _recalled(before_draft, before, limit, policy)
    if problems(conversation, fitted.messages(), fitted.total(), limit):
        # Our own mistake; whole units can be left out without making any.
        fitted, applied = _dropped(draft, limit), ("drop",)
    return _result(fitted, before, applied, Epoch(hashes[-1], fitted.decisions, fitted.recalls))


_NOTHING: Final[dict[str, int]] = {"dropped": 0, "cut": 0, "recalled": 0}


def _result(draft: Draft, before: int, applied: tuple[str, ...], epoch: Epoch) -> Fitted:
    decisions = draft.decisions
    return Fitted(
        messages=tuple(draft.messages()),
        tokens_before=before,
        tokens=draft.total(),
        changed=True,
        epoch=epoch,
        applied=applied,
        dropped=sum(decision == DROP for decision in decisions),
        cut=sum(isinstance(decision, tuple | Same) for decision in decisions),
        recalled=len({source for lines in draft.recalls.values() for source, _ in lines}),
    )


def _resume(draft: Draft, epoch: Epoch | None, hashes: Sequence[str]) -> Draft:
    """The draft with what was decided before, if it was for the beginning of this conversation."""
    if epoch is None or not 0 < len(epoch.decisions) <= len(hashes):
        return draft
    if hashes[len(epoch.decisions) - 1] != epoch.prefix or not _is_sound(draft, epoch):
        return draft
    resumed = replace(draft.having(dict(enumerate(epoch.decisions))), recalls=epoch.recalls)
    pinned = (item.index for item in draft.conversation.items if item.pinned)
    return draft if any(resumed.decisions[index] != KEEP for index in pinned) else resumed


def _is_sound(draft: Draft, epoch: Epoch) -> bool:
    """Whether the numbers mean something here; an epoch comes out of a store and may be anything."""
    size = len(epoch.decisions)

    def has(index: int, blocks: tuple[int, ...]) -> bool:
        return 0 <= index < size and (not blocks or max(blocks) < len(known_of(draft, index).sliced.blocks))

    for index, decision in enumerate(epoch.decisions):
        if isinstance(decision, tuple) and not (has(index, decision) and not draft.conversation.items[index].sealed):
            return False
        if isinstance(decision, Same) and not 0 <= decision.of < index:
            return False
    return all(
        has(index, ()) and all(has(source, blocks) for source, blocks in lines)
        for index, lines in epoch.recalls.items()
    )


# --- a cut ------------------------------------------------------------------------------------------------------------


def _cut(draft: Draft, limit: int, policy: FitPolicy, *, was_sent: bool) -> tuple[Draft, tuple[str, ...]]:
    """Down to the low-water mark; what the client had cached stays while it can, and so does what was sent."""
    fixed = _system_tokens(draft)
    low = fixed + int((limit - fixed) * policy.low_water)
    first = _protected(draft, limit)
    for start, target in ((first, low), (first, limit), (0, low), (0, limit)):
        fresh, applied = _apply(draft.reopened(start), target, limit, policy.strategies)
        if fresh.total() <= limit:
            break
    else:
        return _dropped(draft.reopened(0), limit), (*applied, "drop")
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
    for strategy in strategies:
        if draft.total() <= enough:
            break
        lighter = strategy.apply(draft, target)
        if strategy.is_last_word:
            enough = limit
        if lighter.decisions != draft.decisions:
            applied.append(strategy.name)
            draft = lighter
    return draft, tuple(applied)


def _dropped(draft: Draft, limit: int) -> Draft:
    """Whole units left out of the conversation as it came."""
    untouched = Draft.untouched(draft.conversation, draft.reader)
    dropped = Drop().apply(untouched, limit)
    total = dropped.total()
    if total <= limit:
        return dropped
    left = [index for index, decision in enumerate(dropped.decisions) if decision != DROP]
    largest = max(left, key=dropped.weight)
    raise ContextOverflow(
        needed=total,
        limit=limit,
        index=largest,
        role=dropped.conversation.items[largest].role,
        tokens=dropped.weight(largest),
    )


def _system_tokens(draft: Draft) -> int:
    return sum(draft.weight(item.index) for item in draft.conversation.items if item.role in SYSTEM_ROLES)


def _protected(draft: Draft, limit: int) -> int:
    """Where changes may begin: behind the last cache mark up to which everything fits beside what must stay."""
    conversation = draft.conversation
    for unit in reversed(conversation.units):
        if any(conversation.items[index].breakpoint for index in unit.indices):
            behind = (u for u in conversation.units if u.start >= unit.stop and u.pinned)
            needed = sum(map(draft.weight, range(unit.stop))) + sum(sum(map(draft.weight, u.indices)) for u in behind)
            if needed <= limit:
                return unit.stop
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
    return recall(draft, room, policy.recall, policy.worth)


def find(epochs: Mapping[str, Epoch], conversation: Conversation, salt: str = "") -> Epoch | None:
    """The newest epoch of this conversation among those kept by `prefix`."""
    return next(_found(epochs, conversation.prefix_hashes(salt)), None)


def _found(epochs: Mapping[str, Epoch], hashes: Sequence[str]) -> Iterator[Epoch]:
    for prefix in reversed(hashes):
        if prefix in epochs:
            yield epochs[prefix]
