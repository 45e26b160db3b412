"""Write the items of a Responses stream as OpenAI does.

litellm streams what is put into a custom tool as the JSON of a function, and ends calls before the message that they
follow: a client that keeps items as they end would send them back in that order.
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
#: how litellm has the model write what is put into a custom tool, and characters of it that are whole: half of an
#: escape, or of a pair of them, waits for the rest
_BEGINNING: Final = re.compile(r'\s*\{\s*"content"\s*:\s*"')
_WHOLE: Final = re.compile(
    r"""(?:[^"\\\x00-\x1f]+|\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F])[\da-fA-F]{4}"""
    r"""|u[dD][89abAB][\da-fA-F]{2}\\u[dD][c-fC-F][\da-fA-F]{2})){0,1000}"""
)
#: characters that wait: no beginning and no escape is longer
_MOST_WAITING: Final = 64


class _Input:
    """What is put into a custom tool, read out of the JSON around it as that comes."""

    def __init__(self) -> None:
        self._said: list[str] = []
        self._waiting = ""
        self._has_begun = False

    def more(self, piece: str) -> str:
        """The text in a piece of the JSON; all of it comes with the `rest` where it is not as it was asked for."""
        if len(self._waiting) > _MOST_WAITING:
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
        self._said.append(text)
        return text

    def rest(self, text: str) -> str:
        """What is still to be said of the whole text."""
        said = "".join(self._said)
        return text.removeprefix(said) if text.startswith(said) else ""


class Items:
    """The items of one stream: those that have begun and not ended, and what is held until an earlier one ends."""

    def __init__(self) -> None:
        self._open: set[int] = set()
        self._held: dict[int, list[Event]] = {}
        #: by the ids of calls of custom tools
        self._inputs: dict[str, _Input] = {}

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
