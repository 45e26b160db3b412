"""What came of a fitting: the messages to send, and the fate of each that came. No text but the messages themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property
from typing import Any, Final, NamedTuple

from gateway.core.conversation import Conversation
from gateway.core.fitting.draft import DROP, Decision, Draft, Lines, Same, Summary, is_summed
from gateway.core.fitting.epoch import Epoch
from gateway.core.fitting.reader import Made
from gateway.core.message import read
from gateway.core.values import dataclass

_MESSAGE_BYTES: Final = 400
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


@dataclass(frozen=True, slots=True)
class Sent:
    """What the first messages of a conversation became, and what that takes off; it holds no message that was kept."""

    decisions: tuple[Decision, ...]
    recalls: Mapping[int, Lines]
    rules: Mapping[int, str]
    made: Mapping[int, Made]
    #: those of them that were made of messages with cache marks, which they carry
    marked: frozenset[int]
    #: tokens that the changes take off
    saved: int
    #: the rule that changed each of them
    hows: Mapping[int, str]
    #: messages by that rule
    actions: Mapping[str, int]

    @classmethod
    def of(cls, draft: Draft) -> Sent:
        """What a draft says is sent."""
        made = draft.made_of(draft.changed())
        saved = sum(draft.came[index] - one.tokens for index, one in made.items())
        hows = {index: rule_of(draft.decisions[index], draft.rules.get(index, "")) for index in sorted(made)}
        marked = draft.conversation.marked & made.keys()
        return cls(draft.decisions, draft.recalls, draft.rules, made, marked, saved, hows, dict(Counter(hows.values())))

    def remade(self, made: Mapping[int, Made], marked: frozenset[int]) -> Sent:
        """Some of it made anew, for the marks that there are now."""
        saved = self.saved + sum(self.made[index].tokens - one.tokens for index, one in made.items())
        return replace(self, made={**self.made, **made}, marked=marked & self.made.keys(), saved=saved)

    def with_lines(self, draft: Draft, index: int) -> Sent:
        """This when the draft adds nothing but old lines at the end of one message that was kept."""
        made = draft.made(index)
        return replace(
            self,
            decisions=draft.decisions,
            recalls=draft.recalls,
            made={**self.made, index: made},
            marked=self.marked | (draft.conversation.marked & {index}),
            saved=self.saved + draft.came[index] - made.tokens,
            hows={**self.hows, index: "recall"},
            actions={**self.actions, "recall": self.actions.get("recall", 0) + 1},
        )

    @property
    def size_bytes(self) -> int:
        """About what it takes."""
        numbers = sum(len(decision) for decision in self.decisions if isinstance(decision, tuple))
        texts = sum(len(one.raw or b"") for one in self.made.values())
        return _MESSAGE_BYTES * (1 + len(self.made)) + 8 * len(self.decisions) + _NUMBER_BYTES * numbers + texts


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
    #: messages by the rule that changed them, in this turn or before
    actions: Mapping[str, int]
    conversation: Conversation = field(repr=False)
    came: Sequence[int] = field(repr=False)
    sent: Sent | None = field(repr=False)

    @classmethod
    def untouched(cls, conversation: Conversation, came: Sequence[int], tokens: int) -> Fitted:
        """Everything as it came."""
        return cls(
            tokens, tokens, changed=False, epoch=None, applied=(), actions={},
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
            actions=sent.actions,
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
    def summaries(self) -> frozenset[int]:
        """The messages in whose place a summary stands."""
        decisions = self.sent.decisions if self.sent is not None else ()
        return frozenset(index for index, decision in enumerate(decisions) if isinstance(decision, Summary))

    @cached_property
    def fates(self) -> tuple[Fate, ...]:
        """One for each message that came."""
        pinned = self.conversation.pinned
        roles = [one.role for one in self.conversation.sketches]
        after, rules = list(self.came), ["kept"] * len(roles)
        for index in pinned:
            rules[index] = "pinned"
        for index, one in self._made.items():
            after[index] = one.tokens
        for index, rule in self.sent.hows.items() if self.sent is not None else ():
            rules[index] = rule
        return tuple(map(Fate._make, zip(roles, self.came, after, rules, strict=True)))

    def decoded(self) -> list[Any]:
        """The messages to send as values; None for bytes that are no JSON."""
        return [read(raw)[0] for raw in self.messages]
