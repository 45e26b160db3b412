from __future__ import annotations

from typing import Any

import pytest

from gateway.core.counting.context import ContextCounts, context_counts
from gateway.core.counting.measure import measure


def result(call_id: str, text: str) -> dict[str, str]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def counts(words: Any, *messages: dict[str, Any]) -> ContextCounts:
    measures = [measure("chat", message, words) for message in messages]
    return context_counts(measures, ContextCounts(definition_tokens=5), ())[0]


def test_conversation_and_results_are_counted_apart(words: Any) -> None:
    call = {"type": "function", "id": "1", "function": {"name": "look", "arguments": "a b"}}
    found = counts(
        words,
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "what is it"},
        {"role": "assistant", "tool_calls": [call]},
        result("1", "one two three four"),
    )
    assert found == ContextCounts(2 + 3 + 3, 4, 5, results=1)
    assert found.total_tokens == 17


@pytest.mark.parametrize(
    ("second", "why"),
    [(result("1", "other words here"), "the same call id"), (result("2", "one two three"), "the same content")],
    ids=["id", "content"],
)
def test_a_result_counts_once(words: Any, second: dict[str, str], why: str) -> None:
    found = counts(words, result("1", "one two three"), second)
    assert (found.tool_tokens, found.repeated_tokens, found.results) == (3, 3, 1), why


def test_results_without_an_id_are_told_apart_by_content(words: Any) -> None:
    found = counts(words, *({"role": "tool", "content": text} for text in ("a", "b c", "a")))
    assert (found.tool_tokens, found.repeated_tokens) == (3, 1)


def test_results_of_one_anthropic_message_are_each_a_result(words: Any) -> None:
    blocks = [{"type": "tool_result", "tool_use_id": str(n), "content": f"number {n}"} for n in range(3)]
    measures = [measure("messages", {"role": "user", "content": blocks}, words)]
    found, _ = context_counts(measures, ContextCounts(), ())
    assert (found.tool_tokens, found.results, found.conversation_tokens) == (6, 3, 0)
