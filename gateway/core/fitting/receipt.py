"""What came of a fitting: the messages to send, and the fate of each that came. No text but the messages themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property
from typing import Any, Final, NamedTuple

from gateway.core.conversation import Conversation
from gateway.core.fitting.draft import DROP, Decision, Draft, Lines, Same, Summary, is_summed
from gateway.core.fitting.epoch import Epoch
from gateway.core.fitting.reader import Framing, Made
from gateway.core.message import read
from gateway.core.values import dataclass

_MESSAGE_BYTES: Final = 400
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


@dataclass(frozen=True, slots=True)
class Sent:
    """What the first messages of a conversation became, and what that takes off; it holds no message that was kept."""

    #: of all these messages
    keys: tuple[bytes, ...]
    decisions: tuple[Decision, ...]
    recalls: Mapping[int, Lines]
    rules: Mapping[int, str]
    made: Mapping[int, Made]
    #: those of them that were made of messages with cache marks, which they carry
    marked: frozenset[int]
    #: the tokens of each of them, by the reader's framing at that time, and what the changes take off
    tokens: Mapping[int, int]
    saved: int
    framing: Framing
    #: the rule that changed each of them
    hows: Mapping[int, str]

    @classmethod
    def of(cls, draft: Draft) -> Sent:
        """What a draft says is sent."""
        made = draft.made_of(draft.changed())
        tokens, saved = _weighed(draft, made)
        hows = {index: rule_of(draft.decisions[index], draft.rules.get(index, "")) for index in sorted(made)}
        keys, marked = draft.conversation.keys, draft.conversation.marked & made.keys()
        # as an epoch tells them: the rule by which a message was left out is nothing to go on from
        rules = {index: rule for index, rule in draft.rules.items() if isinstance(draft.decisions[index], tuple)}
        return cls(keys, draft.decisions, draft.recalls, rules, made, marked, tokens, saved, draft.reader.framing, hows)

    def of_these(self, draft: Draft) -> Sent:
        """The same of the first messages of this draft, which say the same, and by the framing that there is now.

        They may say it in other bytes, a text as a list for one, and with other cache marks.
        """
        conversation, framing = draft.conversation, draft.reader.framing
        keys = conversation.keys[: len(self.keys)]
        marked = conversation.marked & self.made.keys()
        others = {index for index in self.made if keys[index] != self.keys[index]} if keys != self.keys else set()
        again = [index for index in others | self.marked | marked if self.made[index].raw is not None]
        if not (others or again) and self.framing == framing:
            return self
        anew = draft.as_sent(self.decisions, self.recalls, self.rules, {})
        made = {**self.made, **anew.made_of(again)} if again else self.made
        tokens, saved = _weighed(anew, made)
        return replace(self, keys=keys, made=made, marked=marked, tokens=tokens, saved=saved, framing=framing)

    def with_lines(self, draft: Draft, index: int) -> Sent:
        """This when the draft adds nothing but old lines at the end of one message that was kept."""
        tokens = draft.weight(index)
        return replace(
            self,
            keys=draft.conversation.keys,
            decisions=draft.decisions,
            recalls=draft.recalls,
            made={**self.made, index: draft.made(index)},
            marked=self.marked | (draft.conversation.marked & {index}),
            tokens={**self.tokens, index: tokens},
            saved=self.saved + draft.came[index] - tokens,
            hows={**self.hows, index: "recall"},
        )

    @property
    def size_bytes(self) -> int:
        """About what it takes."""
        numbers = sum(len(decision) for decision in self.decisions if isinstance(decision, tuple))
        texts = sum(len(one.raw or b"") for one in self.made.values())
        return (
            _MESSAGE_BYTES * (1 + len(self.made)) + _KEY_BYTES * len(self.decisions) + _NUMBER_BYTES * numbers + texts
        )


def _weighed(draft: Draft, made: Mapping[int, Made]) -> tuple[dict[int, int], int]:
    """The tokens of each, and what all of them take off."""
    tokens = {index: draft.weigh(index, one) for index, one in made.items()}
    return tokens, sum(draft.came[index] - weight for index, weight in tokens.items())


def rule_of(decision: Decision, rule: str) -> str:
    """The rule that changed a message; `rule` is the strategy where it chose blocks: none did for a last resort."""
    if isinstance(decision, Same):
        return "dedupe"
    if isinstance(decision, tuple):
        return rule or "drop"
    if is_summed(decision):
        return "summarize"
    return "drop" if decision == DROP else "recall"


@dataclass(frozen=True)
class Fitted:
    """The messages to send, and how it came to them."""

    #: tokens of the messages as they came, and as they are sent
    tokens_before: int
    tokens: int
    changed: bool
    #: what to remember; None while everything fits, and the one that was given where nothing new was decided
    epoch: Epoch | None
    #: the strategies that changed something in this turn; empty where what was sent before still fits
    applied: tuple[str, ...]
    conversation: Conversation = field(repr=False)
    came: Sequence[int] = field(repr=False)
    sent: Sent | None = field(repr=False)

    @classmethod
    def untouched(cls, conversation: Conversation, came: Sequence[int], tokens: int) -> Fitted:
        """Everything as it came."""
        return cls(
            tokens, tokens, changed=False, epoch=None, applied=(),
            conversation=conversation, came=came, sent=None,
        )  # fmt: skip

    @classmethod
    def having(
        cls,
        conversation: Conversation,
        came: Sequence[int],
        tokens: int,
        *,
        sent: Sent,
        epoch: Epoch,
        applied: tuple[str, ...] = (),
    ) -> Fitted:
        """The first messages as they were decided, the others as they came; `tokens` of all as they came."""
        return cls(
            tokens_before=tokens,
            tokens=tokens - sent.saved,
            changed=True,
            epoch=epoch,
            applied=applied,
            conversation=conversation,
            came=came,
            sent=sent,
        )

    @cached_property
    def messages(self) -> tuple[bytes, ...]:
        """The messages to send."""
        messages: list[bytes | None] = list(self.conversation.messages)
        for index, raw in self.changes.items():
            messages[index] = raw
        return tuple([raw for raw in messages if raw is not None])

    @cached_property
    def keys(self) -> tuple[bytes, ...]:
        """A hash of each, for whoever keeps things by them."""
        keys = list(self.conversation.keys)
        for index, one in self._made.items():
            keys[index] = one.key
        return tuple([key for key in keys if key])  # what is left out has none

    @property
    def _made(self) -> Mapping[int, Made]:
        return self.sent.made if self.sent is not None else {}

    @property
    def changes(self) -> Mapping[int, bytes | None]:
        """What is sent in the place of each message that is not sent as it came; None for nothing."""
        return {index: one.raw for index, one in self._made.items()}

    @property
    def new(self) -> frozenset[int]:
        """The messages in whose place another one stands: a summary, or the mark of what may not be changed."""
        decisions, sketches = self.sent.decisions if self.sent is not None else (), self.conversation.sketches
        return frozenset(
            index
            for index, decision in enumerate(decisions)
            if isinstance(decision, Summary) or (decision == () and sketches[index].sealed)
        )

    @cached_property
    def fates(self) -> Fates:
        """One for each message that came."""
        roles = [one.role for one in self.conversation.sketches]
        after, rules = list(self.came), ["kept"] * len(roles)
        for index in self.conversation.pinned:
            rules[index] = "pinned"
        for index, tokens in self.sent.tokens.items() if self.sent is not None else ():
            after[index] = tokens
        for index, rule in self.sent.hows.items() if self.sent is not None else ():
            rules[index] = rule
        return Fates.in_columns(roles, self.came, after, rules)

    def decoded(self) -> list[Any]:
        """The messages to send as values; None for bytes that are no JSON."""
        return [read(raw)[0] for raw in self.messages]
