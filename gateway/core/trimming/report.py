"""Report a trim: the messages to send, and what was done with each received message.

Apart from the messages to send, a report holds no text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property
from itertools import count, repeat
from typing import Any, Final, NamedTuple, TypeVar

from gateway.core.conversation.message import parse_bytes, with_changes
from gateway.core.conversation.units import Conversation
from gateway.core.trimming.draft import DROP, Decision, Draft, DuplicateResult, Lines, SummaryEntry, is_summarized
from gateway.core.trimming.reader import Framing, RenderedMessage
from gateway.core.trimming.trim_decision import TrimDecision
from gateway.core.values import dataclass

T = TypeVar("T")

_MESSAGE_BYTES: Final = 600
_KEY_BYTES: Final = 72
_NUMBER_BYTES: Final = 40


class MessageOutcome(NamedTuple):
    """The outcome of a trim for one message.

    | `rule` | meaning |
    |---|---|
    | `kept` | sent unchanged |
    | `pinned` | sent unchanged, because it must be |
    | `drop` | left out |
    | `dedupe` | replaced by a reference to an earlier result with the same content |
    | `summarize` | replaced by a summary; the first of these messages has the summary's tokens |
    | `recall` | old lines are repeated at its end |
    | `condense`, `shorten` | shortened by this strategy |
    """

    role: str
    tokens_before: int
    tokens_after: int
    rule: str


#: the rules of messages that are sent unchanged
UNCHANGED: Final = ("kept", "pinned")


@dataclass(frozen=True, slots=True)
class MessageOutcomes:
    """The outcome of a trim for each message, in columns.

    Every record of a session holds the outcomes of all its messages. As rows, they would take more than twice the space
    in the store.

    Attributes:
        names: the roles and rules that occur; `roles` and `rules` refer to them by their places.
        roles: the role of each message.
        rules: the rule of each message, see `MessageOutcome`.
        before: the tokens of each message before the trim.
        after: the tokens of each message as it is sent.
    """

    names: tuple[str, ...] = ()
    roles: tuple[int, ...] = ()
    rules: tuple[int, ...] = ()
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    @classmethod
    def of(cls, fates: Iterable[MessageOutcome]) -> MessageOutcomes:
        """Return the columns of single outcomes."""
        columns = list(zip(*fates, strict=True))
        return cls.in_columns(*columns) if columns else cls()

    @classmethod
    def in_columns(
        cls, roles: Sequence[str], before: Iterable[int], after: Iterable[int], rules: Sequence[str]
    ) -> MessageOutcomes:
        """Return the outcomes from columns with one value per message."""
        places = {name: place for place, name in enumerate(dict.fromkeys((*roles, *rules)))}
        by_place = places.__getitem__
        return cls(tuple(places), tuple(map(by_place, roles)), tuple(map(by_place, rules)), tuple(before), tuple(after))

    def __len__(self) -> int:
        return len(self.before)

    def __getitem__(self, index: int) -> MessageOutcome:
        role, rule = self.names[self.roles[index]], self.names[self.rules[index]]
        return MessageOutcome(role, self.before[index], self.after[index], rule)

    def __iter__(self) -> Iterator[MessageOutcome]:
        name = self.names.__getitem__
        return map(MessageOutcome, map(name, self.roles), self.before, self.after, map(name, self.rules))

    @property
    def actions(self) -> Mapping[str, int]:
        """Return how many messages each rule has changed, in the order in which the rules first occur."""
        numbers = ((self.names[place], number) for place, number in Counter(self.rules).items())
        return {rule: number for rule, number in numbers if rule not in UNCHANGED}


class RenderedTokens(NamedTuple):
    """Token counts of the messages that a trim changed.

    `tokens`: by index, as they are sent; `saved`: the tokens saved in total; `saved_by_rule`: an estimate of the tokens
    saved by each rule, for sharing out the total. Messages that became longer are not in that estimate.
    """

    tokens: Mapping[int, int]
    saved: int
    saved_by_rule: Mapping[str, int]


@dataclass(frozen=True)
class TrimmedPrefix:
    """The result of a trim for the first messages of a conversation, without the messages that were kept.

    Only its token counts (`token_counts`) change from turn to turn, because the framing is learned.
    """

    #: the keys of all first messages, as the client sent them
    keys: tuple[bytes, ...]
    decisions: tuple[Decision, ...]
    recalls: Mapping[int, Lines]
    rules: Mapping[int, str]
    rendered: Mapping[int, RenderedMessage]
    #: the rendered messages that carry cache marks of the original messages
    marked: frozenset[int]
    #: the number of tool calls of each changed message that is sent
    calls: Mapping[int, int]
    #: the rule that changed each message
    rule_by_index: Mapping[int, str]
    #: messages that are replaced by a new one: a summary, or the gap mark of a signed message
    new: frozenset[int]
    #: the last result of `token_counts`, by its framing, which rarely changes
    _counted: dict[Framing, RenderedTokens] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, draft: Draft) -> TrimmedPrefix:
        """Return what a draft sends."""
        rendered = draft.rendered_messages(draft.changed())
        calls = {index: _call_count(draft, index) for index, one in rendered.items() if one.raw is not None}
        rule_by_index = {
            index: rule_of(draft.decisions[index], draft.rules.get(index, "")) for index in sorted(rendered)
        }
        keys, marked = draft.conversation.keys, draft.conversation.marked & rendered.keys()
        # Keep only what a trim decision stores: later turns do not need the rule by which a message was dropped.
        rules = {index: rule for index, rule in draft.rules.items() if isinstance(draft.decisions[index], tuple)}
        new = frozenset(_replaced(draft, rendered))
        return cls(keys, draft.decisions, draft.recalls, rules, rendered, marked, calls, rule_by_index, new)

    def for_messages(self, draft: Draft) -> TrimmedPrefix:
        """Return the same result for the first messages of this draft, which have the same content.

        Their bytes may differ, for example a text written as a list, and so may their cache marks.
        """
        conversation = draft.conversation
        keys = conversation.keys[: len(self.keys)]
        marked = conversation.marked & self.rendered.keys()
        different = (
            {index for index in self.rendered if keys[index] != self.keys[index]} if keys != self.keys else set()
        )
        to_render = [index for index in different | self.marked | marked if self.rendered[index].raw is not None]
        if not (different or to_render):
            return self
        redone = draft.with_earlier_decisions(self.decisions, self.recalls, self.rules, {})
        rendered = {**self.rendered, **redone.rendered_messages(to_render)} if to_render else self.rendered
        return replace(self, keys=keys, rendered=rendered, marked=marked)

    def with_recalled_lines(self, draft: Draft, index: int) -> TrimmedPrefix:
        """Return this result with old lines recalled at the end of one message that was kept."""
        return replace(
            self,
            keys=draft.conversation.keys,
            decisions=draft.decisions,
            recalls=draft.recalls,
            rendered={**self.rendered, index: draft.rendered(index)},
            marked=self.marked | (draft.conversation.marked & {index}),
            calls={**self.calls, index: _call_count(draft, index)},
            rule_by_index={**self.rule_by_index, index: "recall"},
        )

    def token_counts(self, original: Sequence[int], framing: Framing) -> RenderedTokens:
        """Return the token counts. `original`: the tokens of all messages before the trim, with this framing."""
        known = self._counted.get(framing)
        if known is not None:
            return known
        tokens = dict(self._unframed_tokens)
        framed = self.calls if framing.message else self._calls_made
        tokens.update(
            zip(framed, framing.added_to([*map(tokens.__getitem__, framed)], [*framed.values()]), strict=True)
        )
        # The shares by rule are an estimate, so those of another framing are good enough.
        last = next(iter(self._counted.values()), None)
        shares = last.saved_by_rule if last is not None else self._saved_by_rule(original, tokens)
        rendered_tokens = RenderedTokens(tokens, sum(map(original.__getitem__, tokens)) - sum(tokens.values()), shares)
        self._counted.clear()
        self._counted[framing] = rendered_tokens
        return rendered_tokens

    @cached_property
    def _unframed_tokens(self) -> Mapping[int, int]:
        """Return the tokens of the changed messages without framing."""
        return {index: one.tokens for index, one in self.rendered.items()}

    @cached_property
    def _calls_made(self) -> Mapping[int, int]:
        """Return the number of calls of those messages that make any."""
        return {index: calls for index, calls in self.calls.items() if calls}

    def _saved_by_rule(self, original: Sequence[int], tokens: Mapping[int, int]) -> Mapping[str, int]:
        saved = Counter[str]()
        for index, now in tokens.items():
            if now < original[index]:
                saved[self.rule_by_index[index]] += original[index] - now
        return saved

    @cached_property
    def changes(self) -> Mapping[int, bytes | None]:
        """Return the bytes to send instead of each changed message; None for a dropped one."""
        return {index: one.raw for index, one in self.rendered.items()}

    @cached_property
    def changed_keys(self) -> Mapping[int, bytes | None]:
        """Return the hash of what is sent instead of each changed message; None for a dropped one."""
        return {index: one.key or None for index, one in self.rendered.items()}

    @property
    def size_bytes(self) -> int:
        """Return the approximate size in memory."""
        numbers = sum(len(decision) for decision in self.decisions if isinstance(decision, tuple))
        texts = sum(len(one.raw or b"") for one in self.rendered.values())
        return (
            _MESSAGE_BYTES * (1 + len(self.rendered))
            + _KEY_BYTES * len(self.decisions)
            + _NUMBER_BYTES * numbers
            + texts
        )


def _replaced(draft: Draft, rendered: Iterable[int]) -> Iterator[int]:
    outlines = draft.conversation.outlines
    for index in rendered:
        decision = draft.decisions[index]
        if isinstance(decision, SummaryEntry) or (decision == () and outlines[index].sealed):
            yield index


def _call_count(draft: Draft, index: int) -> int:
    return 0 if isinstance(draft.decisions[index], SummaryEntry) else draft.conversation.outline.calls[index]


def rule_of(decision: Decision, rule: str) -> str:
    """Return the rule that changed a message. `rule`: the strategy that chose its blocks, or "".

    No strategy chose them in a last resort. `summarize` chooses no blocks either. It leaves a gap mark of references to
    summarized messages, and where the order of roles needs one. Both cases count as `drop`.
    """
    if isinstance(decision, DuplicateResult):
        return "dedupe"
    if isinstance(decision, tuple):
        return "drop" if rule in ("", "summarize") else rule
    if is_summarized(decision):
        return "summarize"
    return "drop" if decision == DROP else "recall"


@dataclass(frozen=True)
class TrimmedConversation:
    """The messages to send, and how the trim arrived at them."""

    #: tokens of the messages before the trim, and as they are sent
    tokens_before: int
    tokens: int
    changed: bool
    #: The decision to remember: None while everything fits, or the given one if nothing new was decided.
    trim_decision: TrimDecision | None
    #: the strategies that changed something on this turn; empty if what was sent before still fits
    applied: tuple[str, ...]
    conversation: Conversation = field(repr=False)
    original: Sequence[int] = field(repr=False)
    sent: TrimmedPrefix | None = field(repr=False)
    #: tokens of the messages that are not sent unchanged
    changed_tokens: Mapping[int, int] = field(repr=False)
    #: see `RenderedTokens`
    saved_by_rule: Mapping[str, int] = field(default_factory=dict, repr=False)

    @classmethod
    def untouched(cls, conversation: Conversation, original: Sequence[int], tokens: int) -> TrimmedConversation:
        """Return a result that changes nothing."""
        return cls(
            tokens, tokens, changed=False, trim_decision=None, applied=(),
            conversation=conversation, original=original, sent=None, changed_tokens={},
        )  # fmt: skip

    @classmethod
    def with_prefix(
        cls,
        conversation: Conversation,
        original: Sequence[int],
        tokens: int,
        *,
        sent: TrimmedPrefix,
        rendered_tokens: RenderedTokens,
        trim_decision: TrimDecision,
        applied: tuple[str, ...] = (),
    ) -> TrimmedConversation:
        """Return a result with trimmed first messages and unchanged others. `tokens`: of all before the trim."""
        return cls(
            tokens_before=tokens,
            tokens=tokens - rendered_tokens.saved,
            changed=True,
            trim_decision=trim_decision,
            applied=applied,
            conversation=conversation,
            original=original,
            sent=sent,
            changed_tokens=rendered_tokens.tokens,
            saved_by_rule=rendered_tokens.saved_by_rule,
        )

    @cached_property
    def messages(self) -> tuple[bytes, ...]:
        """Return the messages to send."""
        return with_changes(self.conversation.messages, self.changes)

    @cached_property
    def keys(self) -> tuple[bytes, ...]:
        """Return the hash of each message to send, for caches."""
        keys = self.conversation.keys
        return with_changes(keys, self.sent.changed_keys) if self.sent is not None else keys

    @property
    def changes(self) -> Mapping[int, bytes | None]:
        """Return what is sent instead of changed messages, see `TrimmedPrefix.changes`."""
        return self.sent.changes if self.sent is not None else {}

    @property
    def replaced(self) -> frozenset[int]:
        """Return the messages that are replaced by a new one, see `TrimmedPrefix.new`."""
        return self.sent.new if self.sent is not None else frozenset()

    @cached_property
    def outcomes(self) -> MessageOutcomes:
        """Return the outcome for each message of the client."""
        roles, pinned = self.conversation.outline.roles, dict.fromkeys(self.conversation.pinned, "pinned")
        rule_by_index = {**pinned, **self.sent.rule_by_index} if self.sent is not None else pinned
        rules = _by_index(rule_by_index, repeat("kept", len(roles)))
        return MessageOutcomes.in_columns(
            roles, self.original, _by_index(self.changed_tokens, self.original), list(rules)
        )

    def decoded(self) -> list[Any]:
        """Return the messages to send as JSON values; None for bytes that are not JSON."""
        return [parse_bytes(raw)[0] for raw in self.messages]


def _by_index(overrides: Mapping[int, T], different: Iterable[T]) -> Iterator[T]:
    """Yield a value for each index: from `overrides` if it has one, else from `different`."""
    return map(overrides.get, count(), different)
