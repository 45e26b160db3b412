"""Split the token count of a request into conversation, tool results and tool definitions.

A tool result that occurs twice, with the same call ID or the same content, counts as one result here. The provider
bills it each time, and `estimate.py` counts it each time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Final, NamedTuple

from gateway.core.counting.measure import ContentTokens, MeasuredMessage
from gateway.core.tools import counted_as
from gateway.core.values import dataclass

#: Number of tools whose results are counted by name. The results of all other tools are counted together, see
#: `gateway.core.tools.OTHERS`.
MAX_TOOLS: Final = 64
#: the tool name of a result whose call does not precede it
UNKNOWN: Final = "unknown"


class ToolResultTokens(NamedTuple):
    """The number of different results of one tool, and their tokens."""

    results: int
    tokens: int


TokensByTool = Mapping[str, ToolResultTokens]

NO_RESULTS: Final = ToolResultTokens(0, 0)


@dataclass(frozen=True, slots=True)
class ContextCounts:
    """Tokens of the parts of a context, counted by the tokenizer, without what the provider adds.

    Attributes:
        conversation_tokens: texts, thinking and tool calls of all messages, including system texts.
        tool_tokens: tool results. A result with the call ID or the content of an earlier result is not counted again.
        definition_tokens: definitions of the offered tools.
        results: number of different results.
        repeated_tokens: tokens of the repeated results that `tool_tokens` leaves out.
        tools: tool name -> its part of `results` and `tool_tokens`.
    """

    conversation_tokens: int = 0
    tool_tokens: int = 0
    definition_tokens: int = 0
    results: int = 0
    repeated_tokens: int = 0
    tools: TokensByTool = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SeenContent:
    """The tool results of earlier messages, and the calls that still have no result.

    Attributes:
        results: call IDs and content hashes of the results.
        calls: call ID -> tool name, for each call without a result.
    """

    results: frozenset[str | bytes] = frozenset()
    calls: Mapping[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.results) + len(self.calls)


def context_counts(
    measures: Sequence[MeasuredMessage], before: ContextCounts, seen: SeenContent
) -> tuple[ContextCounts, SeenContent]:
    """Add messages to the counts of a context; return the new counts and the seen content.

    Args:
        measures: the added messages.
        before: the counts of the messages before them.
        seen: the content of the messages before them.
    """
    conversation = before.conversation_tokens + sum([conversation_tokens(item.counts) for item in measures])
    tool_tokens, results, repeated = before.tool_tokens, before.results, before.repeated_tokens
    with_tools = [item for item in measures if item.results or item.called]
    if not with_tools:
        parts = ContextCounts(conversation, tool_tokens, before.definition_tokens, results, repeated, before.tools)
        return parts, seen
    known, calls, tools = set(seen.results), dict(seen.calls), dict(before.tools)
    for measure in with_tools:
        calls.update(measure.called)
        for result in measure.results:
            name = calls.pop(result.call_id, UNKNOWN)
            if result.digest in known or (result.call_id != "" and result.call_id in known):
                repeated += result.tokens
            else:
                results += 1
                tool_tokens += result.tokens
                _add_result(tools, name, result.tokens)
            known.update((result.call_id, result.digest))
    parts = ContextCounts(conversation, tool_tokens, before.definition_tokens, results, repeated, tools)
    return parts, SeenContent(frozenset(known), calls)


def _add_result(tools: dict[str, ToolResultTokens], name: str, tokens: int) -> None:
    name = counted_as(name, tools, MAX_TOOLS)
    results, before = tools.get(name, NO_RESULTS)
    tools[name] = ToolResultTokens(results + 1, before + tokens)


def conversation_tokens(counts: ContentTokens) -> int:
    """Return the tokens of a message that do not belong to a tool result."""
    return counts.text + counts.call + counts.thinking + counts.inline + counts.other
