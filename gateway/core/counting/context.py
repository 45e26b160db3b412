"""The two parts of a context: the conversation, and the tool results in it, each of which counts once.

A result that stands in the request twice, under one call id or word for word, is one result to whoever reads the
numbers. The provider bills it each time; what it bills is `estimate.py`'s to say.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from gateway.core.counting.measure import Counts, Measure


@dataclass(frozen=True, slots=True)
class ContextCounts:
    """Tokens by the tokenizer, without what the provider adds.

    Attributes:
        conversation_tokens: texts, thinking and calls of all messages, system texts included.
        tool_tokens: results of tools, each counted once by its call's id and once by its content.
        definition_tokens: definitions of the tools offered.
        results: how many different results there are.
        repeated_tokens: tokens of results left out above because they stood there already.
    """

    conversation_tokens: int = 0
    tool_tokens: int = 0
    definition_tokens: int = 0
    results: int = 0
    repeated_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Conversation, results and definitions."""
        return self.conversation_tokens + self.tool_tokens + self.definition_tokens


def context_counts(
    measures: Iterable[Measure], before: ContextCounts, seen: Collection[str | bytes]
) -> tuple[ContextCounts, frozenset[str | bytes]]:
    """The parts of messages that come behind others, of all together; and what of results was seen in all.

    Args:
        measures: of the messages.
        before: the parts of those before them.
        seen: ids and digests of the results in those.
    """
    conversation, tool = before.conversation_tokens, before.tool_tokens
    different, repeated = before.results, before.repeated_tokens
    known = set(seen)
    for measure in measures:
        conversation += conversation_tokens(measure.counts)
        for result in measure.results:
            if result.digest in known or (result.call_id != "" and result.call_id in known):
                repeated += result.tokens
            else:
                different += 1
                tool += result.tokens
            known.update((result.call_id, result.digest))
    return ContextCounts(conversation, tool, before.definition_tokens, different, repeated), frozenset(known)


def conversation_tokens(counts: Counts) -> int:
    """The tokens of a message that are no tool result."""
    return counts.text + counts.call + counts.thinking + counts.inline + counts.other
