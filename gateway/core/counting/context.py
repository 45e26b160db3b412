"""Split the tokens of a request into conversation and tool results.

A result that stands in the request twice, under one call id or word for word, is one result to whoever reads the
numbers. The provider bills it each time; what it bills is `estimate.py`'s to say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Final, NamedTuple

from gateway.core.counting.measure import ContentTokens, MeasuredMessage
from gateway.core.tools import counted_as
from gateway.core.values import dataclass

#: tools whose results are counted by name; those of others together, see `gateway.core.tools.OTHERS`
MAX_TOOLS: Final = 64
#: the tool of a result whose call stands nowhere before it
UNKNOWN: Final = "unknown"


class ToolResultTokens(NamedTuple):
    """Different results of one tool, and their tokens."""

    results: int
    tokens: int


ToolWeights = Mapping[str, ToolResultTokens]

NO_WEIGHT: Final = ToolResultTokens(0, 0)


@dataclass(frozen=True, slots=True)
class ContextCounts:
    """Tokens by the tokenizer, without what the provider adds.

    Attributes:
        conversation_tokens: texts, thinking and calls of all messages, system texts included.
        tool_tokens: results of tools; one whose call id or content stood in an earlier result is not counted again.
        definition_tokens: definitions of the tools offered.
        results: how many different results there are.
        repeated_tokens: tokens of results left out above because they stood there already.
        tools: `results` and `tool_tokens` by the tool's name.
    """

    conversation_tokens: int = 0
    tool_tokens: int = 0
    definition_tokens: int = 0
    results: int = 0
    repeated_tokens: int = 0
    tools: ToolWeights = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SeenContent:
    """What stands in earlier messages.

    `results`: call ids and content digests of the results; `calls`: by id, the tool of each call without a result yet.
    """

    results: frozenset[str | bytes] = frozenset()
    calls: Mapping[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.results) + len(self.calls)


def context_counts(
    measures: Sequence[MeasuredMessage], before: ContextCounts, seen: SeenContent
) -> tuple[ContextCounts, SeenContent]:
    """The parts of a context to which messages are added, and what was seen in it.

    Args:
        measures: of the messages that are added.
        before: the parts of the messages before them.
        seen: what was seen in the messages before them.
    """
    conversation = before.conversation_tokens + sum([conversation_tokens(item.counts) for item in measures])
    tool, different, repeated = before.tool_tokens, before.results, before.repeated_tokens
    of_tools = [item for item in measures if item.results or item.called]
    if not of_tools:
        parts = ContextCounts(conversation, tool, before.definition_tokens, different, repeated, before.tools)
        return parts, seen
    known, calls, tools = set(seen.results), dict(seen.calls), dict(before.tools)
    for measure in of_tools:
        calls.update(measure.called)
        for result in measure.results:
            name = calls.pop(result.call_id, UNKNOWN)
            if result.digest in known or (result.call_id != "" and result.call_id in known):
                repeated += result.tokens
            else:
                different += 1
                tool += result.tokens
                _add(tools, name, result.tokens)
            known.update((result.call_id, result.digest))
    parts = ContextCounts(conversation, tool, before.definition_tokens, different, repeated, tools)
    return parts, SeenContent(frozenset(known), calls)


def _add(tools: dict[str, ToolResultTokens], name: str, tokens: int) -> None:
    name = counted_as(name, tools, MAX_TOOLS)
    results, before = tools.get(name, NO_WEIGHT)
    tools[name] = ToolResultTokens(results + 1, before + tokens)


def conversation_tokens(counts: ContentTokens) -> int:
    """The tokens of a message that belong to no tool result."""
    return counts.text + counts.call + counts.thinking + counts.inline + counts.other
