"""Write the items of a Responses stream as OpenAI does.

litellm streams the input of a custom tool as the JSON arguments of a function. It also ends calls before the message
that they follow. A client that keeps items in the order in which they end would send them back in that order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from gateway.core.conversation.json_text import run_end

Event = dict[str, Any]

_ADDED: Final = "response.output_item.added"
_DONE: Final = "response.output_item.done"
_ARGUMENTS: Final = "response.function_call_arguments."
_INPUT: Final = "response.custom_tool_call_input."
_CUSTOM: Final = "custom_tool_call"
_END: Final = ".done"
#: The JSON in which litellm makes the model write the input of a custom tool. The second pattern matches complete
#: characters: an incomplete escape or surrogate pair waits for the rest.
_BEGINNING: Final = re.compile(r'\s*\{\s*"content"\s*:\s*"')
_WHOLE: Final = re.compile(
    r"""(?:[^"\\\x00-\x1f]+|\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F])[\da-fA-F]{4}"""
    r"""|u[dD][89abAB][\da-fA-F]{2}\\u[dD][c-fC-F][\da-fA-F]{2})){0,1000}"""
)
#: characters that may wait; the beginning and every escape are shorter
_MAX_WAITING: Final = 64


class _Input:
    """Input of a custom tool, read from the JSON around it as it arrives."""

    def __init__(self) -> None:
        self._sent: list[str] = []
        self._waiting = ""
        self._has_begun = False

    def more(self, piece: str) -> str:
        """Return the text in a piece of the JSON. If the JSON has another form, `rest` returns all of the text."""
        if len(self._waiting) > _MAX_WAITING:
            return ""
        self._waiting += piece
        if not self._has_begun:
            start = _BEGINNING.match(self._waiting)
            if start is None:
                return ""
            self._has_begun, self._waiting = True, self._waiting[start.end() :]
        end = run_end(_WHOLE, self._waiting, 0)
        text = msgspec.json.decode(f'"{self._waiting[:end]}"', type=str)
        self._waiting = self._waiting[end:]
        self._sent.append(text)
        return text

    def rest(self, text: str) -> str:
        """Return the part of the whole text that was not returned yet."""
        sent = "".join(self._sent)
        return text.removeprefix(sent) if text.startswith(sent) else ""


class Items:
    """Items of one stream: those that have not ended, and events that wait until an earlier item ends."""

    def __init__(self) -> None:
        self._open: set[int] = set()
        self._held: dict[int, list[Event]] = {}
        #: inputs of custom tools, by the id of the call
        self._inputs: dict[str, _Input] = {}

    def ordered(self, event: Event) -> Iterator[Event]:
        """Yield the events to send instead of one event of litellm."""
        index = event.get("output_index")
        if index is None:
            if "response" in event:
                yield from self._rest_before(event)
            else:
                yield event
            return
        for converted in self._convert_custom_tool(event):
            yield from self._in_turn(index, converted)

    def _rest_before(self, event: Event) -> Iterator[Event]:
        """Yield the held events, then an event of the whole response. Items without end are complete by then."""
        for index in sorted(self._held):
            yield from self._held.pop(index)
        yield event

    def _convert_custom_tool(self, event: Event) -> Iterator[Event]:
        kind, item = event["type"], event.get("item") or {}
        item_id: str = item.get("id") or event.get("item_id", "")
        if kind == _ADDED and item.get("type") == _CUSTOM:
            self._inputs[item_id] = _Input()
        read = self._inputs.get(item_id)
        if read is None or kind == _ADDED:
            yield event
            return
        text = ""
        if kind == f"{_ARGUMENTS}delta":
            text = read.more(event["delta"])
        elif kind == _DONE:
            text = read.rest(item["input"])
        where = {"item_id": item_id, "output_index": event["output_index"]}
        if text:
            yield {"type": f"{_INPUT}delta", **where, "delta": text}
        if kind == _DONE:
            yield {"type": f"{_INPUT}done", **where, "input": item["input"]}
            yield event

    def _in_turn(self, index: int, event: Event) -> Iterator[Event]:
        """Yield an event of an item and the events that waited for its end; nothing if the event has to wait."""
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
