"""The items of a translated Responses stream: in OpenAI's order, and none is lost."""

from __future__ import annotations

from typing import Any

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


def test_an_item_ends_behind_those_that_began_before_it() -> None:
    begun = [item("added", 0), part("output_text.delta", 0), item("added", 1, "function_call"), item("added", 2)]
    later = part("output_text.delta", 2)
    ends = [[part(ARGUMENTS, 1), item("done", 1)], [item("done", 2)], [part("output_text.done", 0), item("done", 0)]]
    told = sent(*begun, *ends[0], later, *ends[1], *ends[2], COMPLETED)
    assert told == [*begun, later, *ends[2], *ends[0], *ends[1], COMPLETED]


def test_an_item_that_ended_holds_nothing_back() -> None:
    events = [item("added", 0), item("done", 0), item("added", 1), part(ARGUMENTS, 1), item("done", 1), COMPLETED]
    assert sent(*events) == events


def test_what_waits_for_an_item_without_an_end_comes_before_the_end_of_the_response() -> None:
    events = [item("added", 0), item("added", 1), part(ARGUMENTS, 1), part("late", 1), item("done", 1)]
    assert sent(*events) == events[:2]
    assert sent(*events, COMPLETED) == [*events, COMPLETED]
