"""Report a trim: the messages to send, and what was done with each received message.

No text but the messages themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property
from itertools import count, repeat
from typing import Any, Final, NamedTuple, TypeVar

from gateway.core.conversation.message import instead, read
from gateway.core.conversation.units import Conversation
from gateway.core.fitting.draft import DROP, Decision, Draft, DuplicateResult, Lines, SummaryEntry, is_summed
from gateway.core.fitting.reader import Framing, RenderedMessage
from gateway.core.fitting.trim_decision import TrimDecision
from gateway.core.values import dataclass

T = TypeVar("T")

_MESSAGE_BYTES: Final = 600
_KEY_BYTES: Final = 72
_NUMBER_BYTES: Final = 40


class Fate(NamedTuple):
    """What became of one message.

    `rule` is `kept` (sent as it came), `pinned` (it had to be), `drop` (left out), `dedupe` (points at an earlier
    result with the same content), `summarize` (a summary stands for it, which the first of these weighs), `recall`
    (old lines stand at its end), or what cut it: `condense`, `shorten`.
    """

    role: str
    tokens_before: int
    tokens_after: int
    rule: str


#: of messages that are sent as they came
UNCHANGED: Final = ("kept", "pinned")


@dataclass(frozen=True, slots=True)
class Fates:
    """The fate of each message, in columns: a session's every record tells that of all its messages.

    Row by row they take more than twice the room in the store.

    Attributes:
        names: of the roles and rules that there are, which `roles` and `rules` give by their places.
        roles: of each message, as all that follow.
        rules: see `Fate`.
        before: its tokens as it came.
        after: as it is sent.
    """

    names: tuple[str, ...] = ()
    roles: tuple[int, ...] = ()
    rules: tuple[int, ...] = ()
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    @classmethod
    def of(cls, fates: Iterable[Fate]) -> Fates:
        """Those of single messages."""
        columns = list(zip(*fates, strict=True))
        return cls.in_columns(*columns) if columns else cls()

    @classmethod
    def in_columns(
        cls, roles: Sequence[str], before: Iterable[int], after: Iterable[int], rules: Sequence[str]
    ) -> Fates:
        """`roles`, `before`, `after`, `rules`: one of each message."""
        places = {name: place for place, name in enumerate(dict.fromkeys((*roles, *rules)))}
        by_place = places.__getitem__
        return cls(tuple(places), tuple(map(by_place, roles)), tuple(map(by_place, rules)), tuple(before), tuple(after))

    def __len__(self) -> int:
        return len(self.before)

    def __getitem__(self, index: int) -> Fate:
        role, rule = self.names[self.roles[index]], self.names[self.rules[index]]
        return Fate(role, self.before[index], self.after[index], rule)

    def __iter__(self) -> Iterator[Fate]:
        name = self.names.__getitem__
        return map(Fate, map(name, self.roles), self.before, self.after, map(name, self.rules))

    @property
    def actions(self) -> Mapping[str, int]:
        """How many messages were changed, by the rule that did it, in the order in which they are met."""
        numbers = ((self.names[place], number) for place, number in Counter(self.rules).items())
        return {rule: number for rule, number in numbers if rule not in UNCHANGED}


class RenderedTokens(NamedTuple):
    """What stands in the place of messages, in tokens.

    `tokens`: of each, by its index; `saved`: how many fewer these are in all; `saved_by_rule`: about the same by the
    rule that changed the message, to share out by, without those that became more.
    """

    tokens: Mapping[int, int]
    saved: int
    saved_by_rule: Mapping[str, int]


@dataclass(frozen=True)
class TrimmedPrefix:
    """What the first messages of a conversation became; it holds no message that was kept.

    What it weighs changes from turn to turn, as the framing is learned (`weights`); nothing else of it does.
    """

    #: of all these messages
    keys: tuple[bytes, ...]
    decisions: tuple[Decision, ...]
    recalls: Mapping[int, Lines]
    rules: Mapping[int, str]
    made: Mapping[int, RenderedMessage]
    #: those of them that were made of messages with cache marks, which they carry
    marked: frozenset[int]
    #: how many calls each of them makes that is not left out
    calls: Mapping[int, int]
    #: the rule that changed each of them
    hows: Mapping[int, str]
    #: those in whose place another message stands: a summary, or the mark of what may not be changed
    new: frozenset[int]
    #: what `weights` said last, and for which framing: that changes on few turns
    _counted: dict[Framing, RenderedTokens] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, draft: Draft) -> TrimmedPrefix:
        """What a draft says is sent."""
        made = draft.made_of(draft.changed())
        calls = {index: _calls(draft, index) for index, one in made.items() if one.raw is not None}
        hows = {index: rule_of(draft.decisions[index], draft.rules.get(index, "")) for index in sorted(made)}
        keys, marked = draft.conversation.keys, draft.conversation.marked & made.keys()
        # as an epoch tells them: the rule by which a message was left out is nothing to go on from
        rules = {index: rule for index, rule in draft.rules.items() if isinstance(draft.decisions[index], tuple)}
        new = frozenset(_new(draft, made))
        return cls(keys, draft.decisions, draft.recalls, rules, made, marked, calls, hows, new)

    def of_these(self, draft: Draft) -> TrimmedPrefix:
        """The same of the first messages of this draft, which say the same.

        They may say it in other bytes, a text as a list for one, and with other cache marks.
        """
        conversation = draft.conversation
        keys = conversation.keys[: len(self.keys)]
        marked = conversation.marked & self.made.keys()
        others = {index for index in self.made if keys[index] != self.keys[index]} if keys != self.keys else set()
        again = [index for index in others | self.marked | marked if self.made[index].raw is not None]
        if not (others or again):
            return self
        anew = draft.as_sent(self.decisions, self.recalls, self.rules, {})
        made = {**self.made, **anew.made_of(again)} if again else self.made
        return replace(self, keys=keys, made=made, marked=marked)

    def with_lines(self, draft: Draft, index: int) -> TrimmedPrefix:
        """This when the draft adds nothing but old lines at the end of one message that was kept."""
        return replace(
            self,
            keys=draft.conversation.keys,
            decisions=draft.decisions,
            recalls=draft.recalls,
            made={**self.made, index: draft.made(index)},
            marked=self.marked | (draft.conversation.marked & {index}),
            calls={**self.calls, index: _calls(draft, index)},
            hows={**self.hows, index: "recall"},
        )

    def weights(self, original: Sequence[int], framing: Framing) -> RenderedTokens:
        """What they weigh; `original`: what all messages weighed as they came, in this framing."""
        known = self._counted.get(framing)
        if known is not None:
            return known
        tokens = dict(self._bare)
        framed = self.calls if framing.message else self._callers
        tokens.update(
            zip(framed, framing.added_to([*map(tokens.__getitem__, framed)], [*framed.values()]), strict=True)
        )
        # The shares are as good in any framing.
        last = next(iter(self._counted.values()), None)
        shares = last.saved_by_rule if last is not None else self._saved_by_rule(original, tokens)
        weights = RenderedTokens(tokens, sum(map(original.__getitem__, tokens)) - sum(tokens.values()), shares)
        self._counted.clear()
        self._counted[framing] = weights
        return weights

    @cached_property
    def _bare(self) -> Mapping[int, int]:
        """What they weigh without framing."""
        return {index: one.tokens for index, one in self.made.items()}

    @cached_property
    def _callers(self) -> Mapping[int, int]:
        """How many calls each makes of those that make any."""
        return {index: calls for index, calls in self.calls.items() if calls}

    def _saved_by_rule(self, original: Sequence[int], tokens: Mapping[int, int]) -> Mapping[str, int]:
        saved = Counter[str]()
        for index, now in tokens.items():
            if now < original[index]:
                saved[self.hows[index]] += original[index] - now
        return saved

    @cached_property
    def changes(self) -> Mapping[int, bytes | None]:
        """What is sent in the place of each message that is not sent as it came; None for nothing."""
        return {index: one.raw for index, one in self.made.items()}

    @cached_property
    def changed_keys(self) -> Mapping[int, bytes | None]:
        """A hash of what is sent in the place of each of these; None for nothing."""
        return {index: one.key or None for index, one in self.made.items()}

    @property
    def size_bytes(self) -> int:
        """About what it takes."""
        numbers = sum(len(decision) for decision in self.decisions if isinstance(decision, tuple))
        texts = sum(len(one.raw or b"") for one in self.made.values())
        return (
            _MESSAGE_BYTES * (1 + len(self.made)) + _KEY_BYTES * len(self.decisions) + _NUMBER_BYTES * numbers + texts
        )


def _new(draft: Draft, made: Iterable[int]) -> Iterator[int]:
    outlines = draft.conversation.outlines
    for index in made:
        decision = draft.decisions[index]
        if isinstance(decision, SummaryEntry) or (decision == () and outlines[index].sealed):
            yield index


def _calls(draft: Draft, index: int) -> int:
    return 0 if isinstance(draft.decisions[index], SummaryEntry) else draft.conversation.outline.calls[index]


def rule_of(decision: Decision, rule: str) -> str:
    """The rule that changed a message; `rule` is the strategy where it chose blocks: none did for a last resort.

    Nor did `summarize`, which leaves a mark of what only pointed at a message that it sums up, or of whose turn it was.
    """
    if isinstance(decision, DuplicateResult):
        return "dedupe"
    if isinstance(decision, tuple):
        return "drop" if rule in ("", "summarize") else rule
    if is_summed(decision):
        return "summarize"
    return "drop" if decision == DROP else "recall"


@dataclass(frozen=True)
class TrimmedConversation:
    """The messages to send, and how it came to them."""

    #: tokens of the messages as they came, and as they are sent
    tokens_before: int
    tokens: int
    changed: bool
    #: what to remember; None while everything fits, and the one that was given where nothing new was decided
    trim_decision: TrimDecision | None
    #: the strategies that changed something in this turn; empty where what was sent before still fits
    applied: tuple[str, ...]
    conversation: Conversation = field(repr=False)
    original: Sequence[int] = field(repr=False)
    sent: TrimmedPrefix | None = field(repr=False)
    #: of the messages that are not sent as they came
    weights: Mapping[int, int] = field(repr=False)
    #: see `RenderedTokens`
    saved_by_rule: Mapping[str, int] = field(default_factory=dict, repr=False)

    @classmethod
    def untouched(cls, conversation: Conversation, original: Sequence[int], tokens: int) -> TrimmedConversation:
        """Everything as it came."""
        return cls(
            tokens, tokens, changed=False, trim_decision=None, applied=(),
            conversation=conversation, original=original, sent=None, weights={},
        )  # fmt: skip

    @classmethod
    def having(
        cls,
        conversation: Conversation,
        original: Sequence[int],
        tokens: int,
        *,
        sent: TrimmedPrefix,
        weights: RenderedTokens,
        trim_decision: TrimDecision,
        applied: tuple[str, ...] = (),
    ) -> TrimmedConversation:
        """The first messages as they were decided, the others as they came; `tokens` of all as they came."""
        return cls(
            tokens_before=tokens,
            tokens=tokens - weights.saved,
            changed=True,
            trim_decision=trim_decision,
            applied=applied,
            conversation=conversation,
            original=original,
            sent=sent,
            weights=weights.tokens,
            saved_by_rule=weights.saved_by_rule,
        )

    @cached_property
    def messages(self) -> tuple[bytes, ...]:
        """The messages to send."""
        return instead(self.conversation.messages, self.changes)

    @cached_property
    def keys(self) -> tuple[bytes, ...]:
        """A hash of each, for whoever keeps things by them."""
        keys = self.conversation.keys
        return instead(keys, self.sent.changed_keys) if self.sent is not None else keys

    @property
    def changes(self) -> Mapping[int, bytes | None]:
        """See `TrimmedPrefix.changes`."""
        return self.sent.changes if self.sent is not None else {}

    @property
    def new(self) -> frozenset[int]:
        """See `TrimmedPrefix.new`."""
        return self.sent.new if self.sent is not None else frozenset()

    @cached_property
    def fates(self) -> Fates:
        """One for each message that came."""
        roles, pinned = self.conversation.outline.roles, dict.fromkeys(self.conversation.pinned, "pinned")
        hows = {**pinned, **self.sent.hows} if self.sent is not None else pinned
        rules = _by_index(hows, repeat("kept", len(roles)))
        return Fates.in_columns(roles, self.original, _by_index(self.weights, self.original), list(rules))

    def decoded(self) -> list[Any]:
        """The messages to send as values; None for bytes that are no JSON."""
        return [read(raw)[0] for raw in self.messages]


def _by_index(some: Mapping[int, T], others: Iterable[T]) -> Iterator[T]:
    """The values of some indices, and those of the others in order."""
    return map(some.get, count(), others)
