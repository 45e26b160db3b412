"""The items of a Responses stream as OpenAI streams them, which clients rely on.

litellm streams what is put into a custom tool as the JSON of a function, and ends calls before the message that they
follow: a client that keeps items as they end would send them back in that order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

Event = dict[str, Any]

_ADDED: Final = "response.output_item.added"
_DONE: Final = "response.output_item.done"
_ARGUMENTS: Final = "response.function_call_arguments."
_INPUT: Final = "response.custom_tool_call_input."
_CUSTOM: Final = "custom_tool_call"
_END: Final = ".done"


class Items:
    """The items of one stream: those that have begun and not ended, and what is held until an earlier one ends."""

    def __init__(self) -> None:
        self._open: set[int] = set()
        self._held: dict[int, list[Event]] = {}
        #: the ids of calls of custom tools
        self._custom: set[str] = set()

    def ordered(self, event: Event) -> Iterator[Event]:
        """The events to send in the place of one."""
        index = event.get("output_index")
        if index is None:
            if "response" in event:
                yield from self._rest_before(event)
            else:
                yield event
            return
        for one in self._of_custom_tools(event):
            yield from self._in_turn(index, one)

    def _rest_before(self, event: Event) -> Iterator[Event]:
        """An event of the whole response behind what is still held: of an item that did not end, nothing is missing."""
        for index in sorted(self._held):
            yield from self._held.pop(index)
        yield event

    def _of_custom_tools(self, event: Event) -> Iterator[Event]:
        kind, item = event["type"], event.get("item") or {}
        if kind == _ADDED and item.get("type") == _CUSTOM:
            self._custom.add(item["id"])
        elif kind.startswith(_ARGUMENTS) and event.get("item_id") in self._custom:
            return
        elif kind == _DONE and item.get("type") == _CUSTOM:
            where = {"item_id": item["id"], "output_index": event["output_index"]}
            if item["input"]:
                yield {"type": f"{_INPUT}delta", **where, "delta": item["input"]}
            yield {"type": f"{_INPUT}done", **where, "input": item["input"]}
        yield event

    def _in_turn(self, index: int, event: Event) -> Iterator[Event]:
        """An event of an item, and what was held for its end; nothing where it has to wait for the end of another."""
        if event["type"] == _ADDED:
            self._open.add(index)
        if index in self._held or (event["type"].endswith(_END) and min(self._open, default=index) < index):
            self._held.setdefault(index, []).append(event)
            return
        yield event
        if event["type"] == _DONE:
            self._open.discard(index)
            first = min(self._open, default=index)
            for held in self._held.pop(first, ()):
                yield from self._in_turn(first, held)
