"""Items of a translated Responses stream: they have OpenAI's order, and none is lost."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.upstream.litellm.items import Items


def item(kind: str, index: int, of: str = "message") -> dict[str, Any]:
    return {"type": f"response.output_item.{kind}", "output_index": index, "item": {"type": of, "id": f"i{index}"}}


def part(kind: str, index: int) -> dict[str, Any]:
    return {"type": f"response.{kind}", "output_index": index, "item_id": f"i{index}"}


def sent(*events: dict[str, Any]) -> list[dict[str, Any]]:
    items = Items()
    return [one for event in events for one in items.ordered(event)]


ARGUMENTS = "function_call_arguments.done"
COMPLETED = {"type": "response.completed", "response": {}}


def test_item_ends_after_earlier_items() -> None:
    started = [item("added", 0), part("output_text.delta", 0), item("added", 1, "function_call"), item("added", 2)]
    later = part("output_text.delta", 2)
    ends = [[part(ARGUMENTS, 1), item("done", 1)], [item("done", 2)], [part("output_text.done", 0), item("done", 0)]]
    events = sent(*started, *ends[0], later, *ends[1], *ends[2], COMPLETED)
    assert events == [*started, later, *ends[2], *ends[0], *ends[1], COMPLETED]


def test_ended_item_delays_nothing() -> None:
    events = [item("added", 0), item("done", 0), item("added", 1), part(ARGUMENTS, 1), item("done", 1), COMPLETED]
    assert sent(*events) == events


def test_held_events_come_before_the_end_of_the_response() -> None:
    events = [item("added", 0), item("added", 1), part(ARGUMENTS, 1), part("late", 1), item("done", 1)]
    assert sent(*events) == events[:2]
    assert sent(*events, COMPLETED) == [*events, COMPLETED]


def put_in(pieces: list[str], whole: str) -> list[str]:
    """Return what is streamed of the input of a custom tool, given the JSON around it."""
    started = item("added", 0, "custom_tool_call")
    deltas = [{**part("function_call_arguments.delta", 0), "delta": piece} for piece in pieces]
    ended = item("done", 0, "custom_tool_call")
    ended["item"]["input"] = whole
    first, *said, end, last = sent(started, *deltas, part(ARGUMENTS, 0), ended)
    assert (first, last) == (started, ended)
    assert end == {**part("custom_tool_call_input.done", 0), "input": whole}
    assert all(one == {**part("custom_tool_call_input.delta", 0), "delta": one["delta"]} for one in said)
    return [one["delta"] for one in said]


@pytest.mark.parametrize("text", ["*** Begin\n+x", 'a "quoted\\path" \t end\\', "é 😀 \u2028", "", "x" * 200])
@pytest.mark.parametrize("is_ascii", [True, False])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_custom_tool_input_is_streamed_as_it_arrives(text: str, size: int, *, is_ascii: bool) -> None:
    written = json.dumps({"content": text}, ensure_ascii=is_ascii)
    pieces = [written[start : start + size] for start in range(0, len(written), size)]
    said = put_in(pieces, text)
    assert "".join(said) == text
    assert len(said) > 1 or size > 1 or len(text) < 2


@pytest.mark.parametrize(
    "written", ['{"other": "' + "x" * 100 + '"}', "no JSON", '{"content": 5}', r'{"content": "\ud83d"}']
)
def test_custom_tool_input_of_another_form_is_sent_at_the_end(written: str) -> None:
    assert put_in(list(written), written) == [written]


def test_misread_text_is_not_sent_twice() -> None:
    assert put_in(['{"content": "a'], "b") == ["a"]
