from __future__ import annotations

from typing import Any

import pytest

from gateway.core.counting.context import MAX_TOOLS, ContextCounts, SeenContent, ToolResultTokens, context_counts
from gateway.core.counting.measure import Wire, measure
from gateway.core.tools import OTHERS


def result(call_id: str, text: str) -> dict[str, str]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def counts(words: Any, *messages: dict[str, Any]) -> ContextCounts:
    measures = [measure("chat", message, words) for message in messages]
    return context_counts(measures, ContextCounts(definition_tokens=5), SeenContent())[0]


def test_conversation_and_results_are_counted_separately(words: Any) -> None:
    call = {"type": "function", "id": "1", "function": {"name": "look", "arguments": "a b"}}
    found = counts(
        words,
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "what is it"},
        {"role": "assistant", "tool_calls": [call]},
        result("1", "one two three four"),
    )
    assert found == ContextCounts(2 + 3 + 3, 4, 5, results=1, tools={"look": ToolResultTokens(1, 4)})


@pytest.mark.parametrize(
    ("second", "why"),
    [(result("1", "other words here"), "the same call id"), (result("2", "one two three"), "the same content")],
    ids=["id", "content"],
)
def test_a_result_counts_once(words: Any, second: dict[str, str], why: str) -> None:
    found = counts(words, result("1", "one two three"), second)
    assert (found.tool_tokens, found.repeated_tokens, found.results) == (3, 3, 1), why


@pytest.mark.parametrize(
    ("content", "is_the_same"),
    [
        ([{"type": "text", "text": "one two three"}], True),
        ({"type": "input_text", "text": "one two three"}, True),
        ([{"type": "text", "text": "one two"}, {"type": "text", "text": "three"}], False),
        ([{"type": "text", "text": "one two three"}, {"type": "image", "text": "four"}], False),
        ([{"type": "text", "text": ["one two three"]}], False),
        ([{"type": ["text"], "text": "one two three"}], False),
    ],
)
def test_single_text_part_is_the_same_result_as_a_plain_string(words: Any, content: Any, *, is_the_same: bool) -> None:
    found = counts(words, result("1", "one two three"), {"role": "tool", "tool_call_id": "2", "content": content})
    assert (found.results == 1) is is_the_same


def test_results_without_id_are_distinguished_by_content(words: Any) -> None:
    found = counts(words, *({"role": "tool", "content": text} for text in ("a", "b c", "a")))
    assert (found.tool_tokens, found.repeated_tokens) == (3, 1)


def test_results_in_one_anthropic_message_count_separately(words: Any) -> None:
    blocks = [{"type": "tool_result", "tool_use_id": str(n), "content": f"number {n}"} for n in range(3)]
    measures = [measure("messages", {"role": "user", "content": blocks}, words)]
    found, _ = context_counts(measures, ContextCounts(), SeenContent())
    assert (found.tool_tokens, found.results, found.conversation_tokens) == (6, 3, 0)


# --- by tool ----------------------------------------------------------------------------------------------------------


def chat_call(call_id: str, name: str) -> dict[str, Any]:
    function = {"name": name, "arguments": "{}"}
    return {"role": "assistant", "tool_calls": [{"type": "function", "id": call_id, "function": function}]}


#: a call of `look`, two parallel calls of `read` with their results in the other order, and a result without a call
BY_TOOL: dict[Wire, list[dict[str, Any]]] = {
    "chat": [
        chat_call("1", "look"),
        result("1", "one two"),
        {"role": "assistant", "tool_calls": [*chat_call("2", "read")["tool_calls"], *chat_call("3", "read")["tool_calls"]]},
        result("3", "three"),
        result("2", "four five six"),
        result("9", "seven"),
    ],
    "messages": [
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "look", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "one two"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": n, "name": "read", "input": {}} for n in "23"]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "3", "content": "three"},
                {"type": "tool_result", "tool_use_id": "2", "content": [{"type": "text", "text": "four five six"}]},
                {"type": "tool_result", "tool_use_id": "9", "content": "seven"},
            ],
        },
    ],
    "responses": [
        {"type": "function_call", "id": "fc_1", "call_id": "1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "one two"},
        {"type": "function_call", "id": "fc_2", "call_id": "2", "name": "read", "arguments": "{}"},
        {"type": "custom_tool_call", "id": "fc_3", "call_id": "3", "name": "read", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "3", "output": "three"},
        {"type": "function_call_output", "call_id": "2", "output": "four five six"},
        {"type": "function_call_output", "call_id": "9", "output": "seven"},
    ],
}  # fmt: skip


@pytest.mark.parametrize("wire", BY_TOOL)
def test_results_count_for_the_tool_of_their_call(words: Any, wire: Wire) -> None:
    measures = [measure(wire, message, words) for message in BY_TOOL[wire]]
    found, seen = context_counts(measures, ContextCounts(), SeenContent())
    assert found.tools == {"look": (1, 2), "read": (2, 4), "unknown": (1, 1)}
    assert seen.calls == {}


def test_tool_names_are_limited_in_length(words: Any) -> None:
    found = counts(words, chat_call("1", "look" + "x" * 1_000_000), result("1", "one two"))
    assert found.tools == {"look" + "x" * 252: (1, 2)}


def test_results_of_legacy_functions_count_by_function_name(words: Any) -> None:
    called = {"role": "assistant", "function_call": {"name": "look", "arguments": "{}"}}
    found = counts(words, called, {"role": "function", "name": "look", "content": "one two"})
    assert found.tools == {"look": (1, 2)}


def test_a_result_counts_once_for_its_tool(words: Any) -> None:
    first, again = result("1", "one two three"), result("2", "one two three")
    found = counts(words, chat_call("1", "look"), first, first, chat_call("2", "read"), again)
    assert found.tools == {"look": (1, 3)}
    assert found.repeated_tokens == 6


def test_call_is_known_to_later_messages(words: Any) -> None:
    called, answer = (measure("chat", one, words) for one in (chat_call("1", "look"), result("1", "one two")))
    before, seen = context_counts([called], ContextCounts(), SeenContent())
    assert seen.calls == {"1": "look"}
    assert context_counts([answer], before, seen)[0].tools == {"look": (1, 2)}
    assert context_counts([answer], before, seen)[0].tools == {"look": (1, 2)}, "what was before is not changed"
    assert before.tools == {}


@pytest.mark.parametrize(("call_id", "name"), [("", "look"), (None, "look"), (7, "look"), ("1", None), ("1", 7)])
def test_result_of_a_call_without_name_or_id_counts_for_unknown(words: Any, call_id: Any, name: Any) -> None:
    assert counts(words, chat_call(call_id, name), result("1", "one two")).tools == {"unknown": (1, 2)}


def test_tools_over_the_limit_are_counted_together(words: Any) -> None:
    numbers = [str(number) for number in range(MAX_TOOLS + 3)]
    turns = [message for one in numbers for message in (chat_call(one, f"t{one}"), result(one, f"number {one}"))]
    found = counts(words, *turns, chat_call("x", "t0"), result("x", "more"))
    assert len(found.tools) == MAX_TOOLS + 1
    assert (found.tools["t0"], found.tools[OTHERS]) == ((2, 3), (3, 6))
