"""The two parts of a context: the conversation, and the tool results in it, each of which counts once.

A result that stands in the request twice, under one call id or word for word, is one result to whoever reads the
numbers. The provider bills it each time; what it bills is `estimate.py`'s to say.
"""

from __future__ import annotations

from collections.abc import Iterable
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


def context_counts(measures: Iterable[Measure], definition_tokens: int = 0) -> ContextCounts:
    """The parts of a request whose messages were measured."""
    conversation = tool = different = repeated = 0
    ids: set[str] = set()
    contents: set[bytes] = set()
    for measure in measures:
        conversation += conversation_tokens(measure.counts)
        for result in measure.results:
            known = result.digest in contents or (result.call_id != "" and result.call_id in ids)
            ids.add(result.call_id)
            contents.add(result.digest)
            if known:
                repeated += result.tokens
            else:
                different += 1
                tool += result.tokens
    return ContextCounts(conversation, tool, definition_tokens, different, repeated)


def conversation_tokens(counts: Counts) -> int:
    """The tokens of a message that are no tool result."""
    return counts.text + counts.call + counts.thinking + counts.inline + counts.other
