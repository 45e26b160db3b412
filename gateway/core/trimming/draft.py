"""Hold the trim decision for each message, the rendered messages, and their tokens.

Each strategy takes a draft and returns a shorter one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import field, replace
from typing import Final, Literal, NamedTuple

from gateway.core.conversation.message import Message, decode, is_one_text
from gateway.core.conversation.units import Conversation, Unit
from gateway.core.trimming.deadline import Deadline
from gateway.core.trimming.parameters import Parameters
from gateway.core.trimming.parts import without_parts
from gateway.core.trimming.reader import KnownBlocks, Reader, RenderedMessage, RenderOrder
from gateway.core.trimming.summary import summary_message
from gateway.core.values import dataclass

#: Heading of recalled lines. It is neutral, so that no model reads it as an instruction.
RECALL_HEADING: Final = "[earlier in this conversation]"


@dataclass(frozen=True, slots=True)
class DuplicateResult:
    """A result that is replaced by a reference to an equal earlier one.

    `source`: the index of the earlier result, which is sent whole; `parts`: the equal parts if only these are left out.
    """

    source: int
    parts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SummaryEntry:
    """A summary that replaces `count` messages. It is sent instead of the first one; the others are `SUMMARIZED`."""

    id: str
    count: int
    text: str = field(repr=False)


#: keep unchanged, drop, keep these blocks, refer to an equal earlier result, or replace by a summary
Decision = Literal["keep", "drop", "summed"] | tuple[int, ...] | DuplicateResult | SummaryEntry

# Spelled out for mypy, which infers str from a bare Final in a tuple.
KEEP: Final[Literal["keep"]] = "keep"  # noqa: PYI064
DROP: Final[Literal["drop"]] = "drop"  # noqa: PYI064
SUMMARIZED: Final[Literal["summed"]] = "summed"  # noqa: PYI064

#: recalled lines: the index of each source message and the numbers of its blocks, in order
Lines = tuple[tuple[int, tuple[int, ...]], ...]

#: the key of a rendered message: its index, the decision, and the lines recalled at its end
_RenderKey = tuple[int, Decision, Lines]


class TermUses(NamedTuple):
    """Which messages use the terms of a conversation."""

    #: term -> the last message that has it
    last: dict[str, int]
    #: term -> how many assistant messages have it
    assistant_uses: Counter[str]
    #: terms that are more than words
    named: set[str]


#: a block: the index of its message, and its number there
Pick = tuple[int, int]


class ChosenBlocks(NamedTuple):
    """Blocks of the unit at `start` that were chosen in one step. `opened`: this step also added the unit's frame."""

    start: int
    added: Sequence[Pick]
    opened: bool


#: the rendering of a message that is not sent
_DROPPED: Final = RenderedMessage(None, 0, b"")
#: Placeholder for the tokens of an unchanged message: `Draft.original` has them.
_NOT_COUNTED: Final = 0


@dataclass(frozen=True, slots=True)
class _DraftCache:
    """Results that all drafts of a conversation share."""

    #: by message index
    known: dict[int, KnownBlocks] = field(default_factory=dict)
    #: for all messages but system messages; empty until it is needed, then one value
    uses: list[TermUses] = field(default_factory=list)
    #: term -> how likely it is needed, by the `RelevanceFactors` of that computation
    relevance: dict[Hashable, Mapping[str, float]] = field(default_factory=dict)
    #: messages that answer the newest question, best first; empty until it is needed, then one value
    answers: list[Sequence[int]] = field(default_factory=list)
    rendered: dict[_RenderKey, RenderedMessage] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Draft:
    """A conversation with a decision for each of its messages. Drafts are immutable."""

    conversation: Conversation
    reader: Reader
    #: tokens of each message before the trim
    original: Sequence[int]
    decisions: tuple[Decision, ...]
    #: index of the first message that may be changed
    first: int = 0
    #: message -> old lines that are recalled at its end
    recalls: Mapping[int, Lines] = field(default_factory=dict)
    #: message -> the strategy that chose its blocks
    rules: Mapping[int, str] = field(default_factory=dict)
    #: the steps in which blocks were chosen, best first
    steps: Sequence[ChosenBlocks] = ()
    deadline: Deadline = field(default_factory=Deadline)
    memo: _DraftCache = field(default_factory=_DraftCache, repr=False)
    #: the result of `token_counts`: empty until it is needed, then one value
    _token_counts: list[Sequence[int]] = field(default_factory=list, init=False, repr=False, compare=False)
    #: Token counts of an earlier draft, and the messages whose counts may differ here. Empty if it had no counts.
    _earlier_counts: list[tuple[Sequence[int], AbstractSet[int]]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    @classmethod
    def untouched(
        cls,
        conversation: Conversation,
        reader: Reader,
        *,
        original: Sequence[int] | None = None,
        deadline: Deadline | None = None,
    ) -> Draft:
        """Return a draft that changes nothing. `original`: the tokens of each message, if they are known."""
        original = reader.token_counts(conversation) if original is None else original
        return cls(conversation, reader, original, (KEEP,) * len(original), deadline=deadline or Deadline())

    def with_decisions(self, changes: Mapping[int, Decision], steps: Sequence[ChosenBlocks] | None = None) -> Draft:
        """Return a draft with other decisions for some messages. `steps`: how blocks were chosen; None: as before."""
        decisions = list(self.decisions)
        for index, decision in changes.items():
            decisions[index] = decision
        steps = self.steps if steps is None else steps
        return self._share_counts(replace(self, decisions=tuple(decisions), steps=steps), changes.keys())

    def _share_counts(self, draft: Draft, changed: AbstractSet[int]) -> Draft:
        """Pass the token counts of this draft to `draft`, valid for all messages except `changed`; return `draft`."""
        for counts, stale in (
            ((self._token_counts[0], frozenset[int]()),) if self._token_counts else self._earlier_counts
        ):
            draft._earlier_counts.append((counts, stale | changed))
        return draft

    def reopened(self, first: int, steps: Sequence[ChosenBlocks] = ()) -> Draft:
        """Return a draft in which all messages from `first` on can be decided again; lines recalled there are removed.

        `steps`: an earlier choice among these and other units, which the next choice repeats.
        """
        recalls = {i: lines for i, lines in self.recalls.items() if i < first}
        reopened = replace(self, first=first, recalls=recalls, steps=steps)
        return self._share_counts(reopened, self.recalls.keys() - recalls.keys())

    def with_earlier_decisions(
        self,
        decisions: Sequence[Decision],
        recalls: Mapping[int, Lines],
        rules: Mapping[int, str],
        rendered: Mapping[int, RenderedMessage],
    ) -> Draft:
        """Return a draft with earlier decisions for its first messages. `rendered`: renderings of some of them."""
        rest = len(self.decisions) - len(decisions)
        draft = Draft(
            self.conversation, self.reader, self.original, (*decisions, *(KEEP,) * rest), self.first, recalls, rules,
            self.steps, self.deadline, self.memo,
        )  # fmt: skip
        for index, one in rendered.items():
            self.memo.rendered[index, decisions[index], recalls.get(index, ())] = one
        return draft

    def with_rule(self, before: Draft, rule: str) -> Draft:
        """Return this draft, with the strategy `rule` noted for each message whose decision differs from `before`."""
        changed = (i for i, (was, now) in enumerate(zip(before.decisions, self.decisions, strict=True)) if was != now)
        return self._share_counts(replace(self, rules={**self.rules, **dict.fromkeys(changed, rule)}), frozenset())

    def open_units(self) -> list[Unit]:
        """Return the units that may be changed. Summarized messages stay until a new summary replaces the old one."""
        return [
            unit
            for unit in self.conversation.units
            if unit.start >= self.first and not unit.pinned and not is_summarized(self.decisions[unit.start])
        ]

    def least_decisions(self, unit: Unit) -> dict[int, Decision]:
        """Return the decisions that send the least of a unit: dropped, or if bound, without its blocks."""
        if not unit.bound:
            return dict.fromkeys(unit.indices, DROP)
        items = self.conversation.items
        return {index: KEEP if items[index].sealed else () for index in unit.indices}

    def references(self) -> dict[int, dict[int, DuplicateResult]]:
        """Return the references to each result, by the index of that result and then of the referring one."""
        found: dict[int, dict[int, DuplicateResult]] = {}
        for index, decision in enumerate(self.decisions):
            if isinstance(decision, DuplicateResult):
                found.setdefault(decision.source, {})[index] = decision
        return found

    @property
    def parameters(self) -> Parameters:
        """Return the parameters of the request's tools."""
        return self.reader.parameters(self.conversation.tools)

    @property
    def summary(self) -> tuple[int, SummaryEntry] | None:
        """Return the summary and the index of the message that it is sent for, or None."""
        found = ((index, one) for index, one in enumerate(self.decisions) if isinstance(one, SummaryEntry))
        return next(found, None)

    def known(self, index: int) -> KnownBlocks:
        """Return the blocks and terms of a message."""
        found = self.memo.known.get(index)
        if found is None:
            self.read((index,))
            found = self.memo.known[index]
        return found

    def read(self, indices: Iterable[int]) -> None:
        """Load the blocks and terms of several messages at once, from the cache or by reading the text."""
        known = self.memo.known
        missing = [index for index in indices if index not in known]
        keys, raws = self.conversation.keys, self.conversation.messages
        found = self.reader.read_blocks(
            [keys[index] for index in missing], [raws[index] for index in missing], self.deadline
        )
        known.update(zip(missing, found, strict=True))

    def rendered(self, index: int) -> RenderedMessage:
        """Return a message as it is sent."""
        return self._rendered((index,))[0]

    def rendered_messages(self, indices: Sequence[int]) -> dict[int, RenderedMessage]:
        """Return some messages as they are sent, by index."""
        return dict(zip(indices, self._rendered(indices), strict=True))

    def tokens_of(self, index: int) -> int:
        """Return the tokens of a message as it is sent."""
        return self._token_counts[0][index] if self._token_counts else self.count_tokens(index, self.rendered(index))

    def tokens_if(self, index: int, decision: Decision) -> int:
        """Return the tokens that a message would have with this decision."""
        if decision == DROP:
            return 0
        return self._tokens_with(
            decision, index, self._rendered_as([(index, decision, self.recalls.get(index, ()))])[0]
        )

    def token_counts(self) -> Sequence[int]:
        """Return the tokens of each message as it is sent, 0 for messages that are left out."""
        if not self._token_counts:
            counts, stale = self._earlier_counts[0] if self._earlier_counts else (self.original, self.changed())
            counts, wanted = list(counts), sorted(stale)
            for index, rendered in zip(wanted, self._rendered(wanted), strict=True):
                counts[index] = self.count_tokens(index, rendered)
            self._token_counts.append(counts)
        return self._token_counts[0]

    def count_tokens(self, index: int, rendered: RenderedMessage) -> int:
        """Return the tokens of a message that is rendered as `rendered`, with framing."""
        return self._tokens_with(self.decisions[index], index, rendered)

    def _tokens_with(self, decision: Decision, index: int, rendered: RenderedMessage) -> int:
        if decision == KEEP and index not in self.recalls:
            return self.original[index]
        if rendered.raw is None:
            return 0
        calls = 0 if isinstance(decision, SummaryEntry) else self.conversation.outline.calls[index]
        return self.reader.framing.added(rendered.tokens, calls)

    def total(self) -> int:
        """Return the tokens of all messages that are sent."""
        return sum(self.token_counts())

    def changed(self) -> list[int]:
        """Return the indices of the messages that are not sent unchanged."""
        decisions = self.decisions
        return [i for i, decision in enumerate(decisions) if decision != KEEP or i in self.recalls]

    def inserted(self) -> tuple[int, bytes] | None:
        """Return the place of the summary among the messages that are sent, and its bytes; None without a summary."""
        summary = self.summary
        if summary is None:
            return None
        rendered = self._rendered(range(summary[0] + 1))
        return sum(one.raw is not None for one in rendered) - 1, rendered[-1].raw or b""

    def sent(self) -> Conversation:
        """Return the conversation as it is sent."""
        messages = self._rendered(range(len(self.decisions)))
        rendered = [(index, one) for index, one in enumerate(messages) if one.raw is not None]
        return Conversation(
            tuple([one.raw for _, one in rendered if one.raw is not None]),
            tuple([one.key for _, one in rendered]),
            frozenset(place for place, (index, _) in enumerate(rendered) if index in self.conversation.marked),
            parser=self.reader,
        )

    def _rendered(self, indices: Iterable[int]) -> list[RenderedMessage]:
        decisions, recalls = self.decisions, self.recalls
        return self._rendered_as([(index, decisions[index], recalls.get(index, ())) for index in indices])

    def _rendered_as(self, wanted: Sequence[_RenderKey]) -> list[RenderedMessage]:
        rendered = self.memo.rendered
        missing = [key for key in wanted if key not in rendered]
        if missing:
            self._render_missing(missing)
        return [rendered[key] for key in wanted]

    def _render_missing(self, wanted: Sequence[_RenderKey]) -> None:
        raws = self.conversation.messages
        orders = {
            key: RenderOrder(self.conversation.items[key[0]], raws[key[0]], self._target(key[0], key[1]))
            for key in wanted
            if isinstance(key[1], tuple | DuplicateResult)
        }
        rendered = dict(zip(orders, self.reader.render(list(orders.values()), self.deadline), strict=True))
        for key in wanted:
            index, decision, lines = key
            if decision == KEEP:
                rendered[key] = RenderedMessage(raws[index], _NOT_COUNTED, self.conversation.keys[index])
            elif isinstance(decision, SummaryEntry):
                rendered[key] = self.reader.rendered(summary_message(decision.text, decision.count))
            one = rendered.get(key, _DROPPED)
            if lines and one.raw is not None:
                one = self.reader.rendered(_add_lines(decode(one.raw), self._text_of(lines)))
            self.memo.rendered[key] = one

    def _target(self, index: int, decision: tuple[int, ...] | DuplicateResult) -> tuple[int, ...] | str:
        if isinstance(decision, tuple):
            return decision
        source = self.conversation.items[decision.source].result_of
        if decision.parts:
            return without_parts(decode(self.conversation.messages[index]).get("content"), decision.parts, source)
        return f"[same as the result of {source}]"

    def _text_of(self, lines: Lines) -> str:
        texts = []
        for source, numbers in lines:
            role, blocks = self.conversation.outlines[source].role, self.known(source).sliced.lines
            texts.append(f"{role}: " + "\n".join(blocks[number].text.rstrip("\n") for number in numbers))
        return "\n".join([RECALL_HEADING, *texts])


def is_summarized(decision: Decision) -> bool:
    """Return whether a summary replaces a message."""
    return decision == SUMMARIZED or isinstance(decision, SummaryEntry)


def _add_lines(message: Message, text: str) -> Message:
    content = message.get("content")
    if not isinstance(content, list):
        return {**message, "content": f"{content}\n\n{text}" if content else text}
    # Clients that move a cache mark write the same text as a string or as one part. Both must get the same text here.
    if is_one_text(content):
        part = content[0]
        return {**message, "content": [{**part, "text": f"{part['text']}\n\n{text}" if part["text"] else text}]}
    return {**message, "content": [*content, {"type": "text", "text": text}]}
