"""Add up the token counts of messages, so that a longer conversation continues from the sums of a shorter one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Final

from gateway.core.conversation.message import SYSTEM_ROLES
from gateway.core.counting.context import ContextCounts, SeenContent, context_counts
from gateway.core.counting.measure import ContentTokens, MeasuredMessage
from gateway.core.counting.media import Media
from gateway.core.values import dataclass

_ASSISTANT: Final = "assistant"
_NO_COUNTS: Final = ContentTokens()
_NO_PARTS: Final = ContextCounts()
_NOTHING: Final = SeenContent()
#: bytes that sums take, and for each result, open call and media
_SUMS_BYTES: Final = 1_200
_PART_BYTES: Final = 160


@dataclass(frozen=True, slots=True)
class MessageSums:
    """The sums of a sequence of messages.

    Attributes:
        counts: the counts of all messages.
        turn: thinking, encrypted characters and encrypted pieces of the messages after the last one that a person
            wrote.
        media: the media of all messages.
        system: True if one of them is a system text.
        context: the parts of the context, without tool definitions.
        seen: the tool results in them, and the calls without a result.
        new: the counts of the messages after the last assistant message; None if there is none.
    """

    counts: ContentTokens = _NO_COUNTS
    turn: ContentTokens = _NO_COUNTS
    media: tuple[Media, ...] = ()
    system: bool = False
    context: ContextCounts = _NO_PARTS
    seen: SeenContent = _NOTHING
    new: ContentTokens | None = None

    def plus(self, measures: Sequence[MeasuredMessage]) -> MessageSums:
        """Return the sums after adding these messages at the end."""
        if not measures:
            return self
        added, media, _, roles, *_ = zip(*measures, strict=True)
        counts = ContentTokens(*map(sum, zip(self.counts, *added, strict=True)))
        context, seen = context_counts(measures, self.context, self.seen)
        return MessageSums(
            counts,
            _turn_thinking(self.turn, measures) if counts.thinking or counts.sealed or counts.seals else _NO_COUNTS,
            tuple(chain(self.media, *media)),
            self.system or not SYSTEM_ROLES.isdisjoint(roles),
            context,
            seen,
            _after_assistant(self.new, roles, added),
        )

    def counts_with_kept_thinking(self, thinking_kept: str) -> ContentTokens:
        """Return the counts of what the provider keeps: all earlier thinking, that of the turn, or none.

        `thinking_kept` is `TokenizerFamily.thoughts`.
        """
        if thinking_kept == "all" or not (self.counts.thinking or self.counts.seals):
            return self.counts
        turn = self.turn if thinking_kept == "turn" else _NO_COUNTS
        return self.counts._replace(thinking=turn.thinking, sealed=turn.sealed, seals=turn.seals)

    def parts(self, definition_tokens: int) -> ContextCounts:
        """Return the parts of the context, including the tokens of the tool definitions."""
        if not definition_tokens:
            return self.context
        parts = self.context
        return ContextCounts(
            parts.conversation_tokens, parts.tool_tokens, definition_tokens,
            parts.results, parts.repeated_tokens, parts.tools,
        )  # fmt: skip

    @property
    def size_bytes(self) -> int:
        """Return the approximate size in memory, in bytes."""
        return _SUMS_BYTES + _PART_BYTES * (len(self.seen) + len(self.media))


def _after_assistant(
    before: ContentTokens | None, roles: Sequence[str], added: Sequence[ContentTokens]
) -> ContentTokens | None:
    """Return the counts after the last assistant message; `before` are those of the earlier messages."""
    if before is None and _ASSISTANT not in roles:
        return None
    last = max([index for index, role in enumerate(roles) if role == _ASSISTANT], default=-1)
    start = before if before is not None and last < 0 else _NO_COUNTS
    return ContentTokens(*map(sum, zip(start, *added[last + 1 :], strict=True)))


def _turn_thinking(before: ContentTokens, measures: Sequence[MeasuredMessage]) -> ContentTokens:
    last_asked = max([index for index, item in enumerate(measures) if item.is_by_user], default=-1)
    thinking, sealed, seals = (before.thinking, before.sealed, before.seals) if last_asked < 0 else (0, 0, 0)
    for item in measures[last_asked + 1 :]:
        thinking += item.counts.thinking
        sealed += item.counts.sealed
        seals += item.counts.seals
    return ContentTokens(thinking=thinking, sealed=sealed, seals=seals)
