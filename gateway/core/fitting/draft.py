"""What is to become of each message, and what the result weighs: the value that strategies hand on to one another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from gateway.core.conversation import Conversation, Message, Unit
from gateway.core.fitting.reader import Reader

#: said before old lines that are repeated; neutral, and no instruction
EARLIER: Final = "[earlier in this conversation]"


@dataclass(frozen=True, slots=True)
class Same:
    """A result whose content is that of an earlier one, message `of`."""

    of: int


#: keep as it came, drop, keep these blocks, or point at the same result
Decision = Literal["keep", "drop"] | tuple[int, ...] | Same

# spelled out for mypy, which takes a bare Final in a tuple for a str
KEEP: Final[Literal["keep"]] = "keep"  # noqa: PYI064
DROP: Final[Literal["drop"]] = "drop"  # noqa: PYI064

#: old lines: (message, blocks of it), in order
Lines = tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class Draft:
    """A conversation and a decision for every message of it."""

    conversation: Conversation
    reader: Reader
    decisions: tuple[Decision, ...]
    #: messages before this one are not to be changed
    first: int = 0
    #: message -> old lines that are repeated at its end
    recalls: Mapping[int, Lines] = field(default_factory=dict)

    @classmethod
    def untouched(cls, conversation: Conversation, reader: Reader) -> Draft:
        """Everything as it came."""
        return cls(conversation, reader, (KEEP,) * len(conversation.items))

    def having(self, changes: Mapping[int, Decision]) -> Draft:
        """Some messages decided otherwise."""
        decisions = list(self.decisions)
        for index, decision in changes.items():
            decisions[index] = decision
        return replace(self, decisions=tuple(decisions))

    def reopened(self, first: int) -> Draft:
        """From `first` on everything may be decided anew, and nothing is repeated."""
        return replace(self, first=first, recalls={i: lines for i, lines in self.recalls.items() if i < first})

    def open_units(self) -> list[Unit]:
        """The units that may be changed."""
        return [unit for unit in self.conversation.units if unit.start >= self.first and not unit.pinned]

    def message(self, index: int) -> Message | None:
        """What is sent in the place of a message."""
        return self._made(index)[0]

    def weight(self, index: int) -> int:
        """Its tokens."""
        return self._made(index)[1]

    def total(self) -> int:
        """Tokens of all messages that are sent."""
        return sum(self.weight(index) for index in range(len(self.decisions)))

    def messages(self) -> list[Message]:
        """What is sent."""
        made = (self.message(index) for index in range(len(self.decisions)))
        return [message for message in made if message is not None]

    def _made(self, index: int) -> tuple[Message | None, int]:
        made, weight = self._decided(index)
        if made is None or index not in self.recalls:
            return made, weight
        made = _with_lines(made, self._text_of(self.recalls[index]))
        return made, self.reader.weigh_new(made)

    def _decided(self, index: int) -> tuple[Message | None, int]:
        decision, item, raw = self.decisions[index], self.conversation.items[index], self.conversation.messages[index]
        if decision == KEEP:
            return raw, self.reader.weight(item, raw)
        if decision == DROP:
            return None, 0
        if isinstance(decision, Same):
            made = {**raw, "content": f"[same as the result of {self.conversation.items[decision.of].answers}]"}
            return made, self.reader.weigh_new(made)
        return self.reader.cut(item, raw, decision)

    def _text_of(self, lines: Lines) -> str:
        texts = []
        for source, numbers in lines:
            item, raw = self.conversation.items[source], self.conversation.messages[source]
            blocks = self.reader.know(item, raw).sliced.blocks
            texts.append(f"{item.role}: " + "\n".join(blocks[number].text.rstrip("\n") for number in numbers))
        return "\n".join([EARLIER, *texts])


def _with_lines(message: Message, text: str) -> Message:
    content = message.get("content")
    if isinstance(content, list):
        return {**message, "content": [*content, {"type": "text", "text": text}]}
    return {**message, "content": f"{content}\n\n{text}" if content else text}


def spans_of(numbers: Sequence[int]) -> str:
    """`(0, 1, 2, 5)` as `0-2,5`."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def numbers_of(spans: str) -> tuple[int, ...]:
    """The opposite; ValueError for what is none."""
    numbers: list[int] = []
    for span in spans.split(",") if spans else ():
        low, _, high = span.partition("-")
        numbers.extend(range(int(low), int(high or low) + 1))
    return tuple(numbers)
