"""Rebuild the output of a Responses stream, including an incomplete one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any, Final

from gateway.core.values import dataclass
from gateway.dialects.fields import decode_response

#: limits of what is kept of one stream: bytes of output, number of items, and texts of an item
MAX_KEPT: Final = 1024 * 1024
MAX_ITEMS: Final = 512
_MAX_TEXTS: Final = 64


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the text of a delta belongs: a field of its item, or a part in the list in that field.

    Attributes:
        name: the field of the item.
        numbered_by: the field of the event with the index of the part.
        part: the fields of such a part other than its text.
        text: the field of the part that holds the text.
    """

    name: str
    numbered_by: str | None = None
    part: Mapping[str, object] = field(default_factory=dict)
    text: str = "text"


_PLACES: Final[Mapping[str, _Place]] = {
    "response.output_text.delta": _Place("content", "content_index", {"type": "output_text", "annotations": []}),
    "response.refusal.delta": _Place("content", "content_index", {"type": "refusal"}, "refusal"),
    "response.reasoning_text.delta": _Place("content", "content_index", {"type": "reasoning_text"}),
    "response.reasoning_summary_text.delta": _Place("summary", "summary_index", {"type": "summary_text"}),
    "response.function_call_arguments.delta": _Place("arguments"),
    "response.mcp_call_arguments.delta": _Place("arguments"),
    "response.custom_tool_call_input.delta": _Place("input"),
    "response.code_interpreter_call_code.delta": _Place("code"),
}
#: the fields that are kept of an item whose text is not kept; `_EMPTY` adds the required fields of its type
_BARE: Final = ("id", "type", "status", "role", "call_id", "name", "server_label")
_BARE_CHARACTERS: Final = 256
_EMPTY: Final[Mapping[str, Mapping[str, object]]] = {
    "message": {"content": []},
    "reasoning": {"summary": []},
    "function_call": {"arguments": ""},
    "mcp_call": {"arguments": ""},
    "custom_tool_call": {"input": ""},
}


class _Item:
    """One output item: the event that began or ended it, and the text received between them."""

    __slots__ = ("bare", "event", "is_done", "texts")

    def __init__(self, bare: dict[str, object]) -> None:
        self.bare = bare
        self.event: bytes | None = None
        self.is_done = False
        self.texts: dict[tuple[str, int], bytearray] = {}

    def size(self) -> int:
        """Return the bytes that are kept of the item."""
        return len(self.event or b"") + sum(map(len, self.texts.values()))

    def value(self) -> dict[str, object]:
        """Return the item as far as it was received."""
        event = decode_response(self.event) if self.event is not None else None
        item = dict(event["item"]) if event is not None else dict(self.bare)
        if self.is_done:
            return item
        if "status" in item:
            item["status"] = "incomplete"
        return item | self._received_texts()

    def _received_texts(self) -> dict[str, object]:
        fields: dict[str, object] = {}
        parts: dict[str, dict[int, object]] = {}
        for (kind, number), text in self.texts.items():
            place, content = _PLACES[kind], text.decode()
            if place.numbered_by is None:
                fields[place.name] = content
            else:
                parts.setdefault(place.name, {})[number] = {**place.part, place.text: content}
        return fields | {name: [numbered[number] for number in sorted(numbered)] for name, numbered in parts.items()}


class DeliveredOutput:
    """Keep the delivered output, up to `MAX_KEPT` bytes; of an item that does not fit, only a few fields."""

    __slots__ = ("_items", "_left")

    def __init__(self) -> None:
        self._items: dict[int, _Item] = {}
        self._left = MAX_KEPT

    def item(self, index: object, item: Mapping[str, Any], event: bytes, *, is_done: bool) -> None:
        """Keep the event that begins an item, or the one that ends it and repeats all of it."""
        if type(index) is not int or (index not in self._items and len(self._items) >= MAX_ITEMS):
            return
        before = self._items.get(index)
        if before is not None:
            self._left += before.size()
        entry = self._items[index] = _Item(_bare(item))
        entry.is_done = is_done
        if len(event) <= self._left:
            entry.event = event
            self._left -= len(event)

    def add_text(self, kind: str, event: Mapping[str, Any], text: str) -> None:
        """Add the text of a delta."""
        place, index = _PLACES.get(kind), event.get("output_index")
        entry = self._items.get(index) if place is not None and type(index) is int else None
        if place is None or entry is None or entry.event is None or entry.is_done:
            return
        number = event.get(place.numbered_by, 0) if place.numbered_by is not None else 0
        if type(number) is not int or ((kind, number) not in entry.texts and len(entry.texts) >= _MAX_TEXTS):
            return
        raw = text.encode("utf-8", "replace")
        if len(raw) > self._left:
            self._left += entry.size()
            entry.event, entry.texts = None, {}
        else:
            self._left -= len(raw)
            entry.texts.setdefault((kind, number), bytearray()).extend(raw)

    def items(self) -> list[dict[str, object]]:
        """Return the items in their order."""
        return [self._items[index].value() for index in sorted(self._items)]


def _bare(item: Mapping[str, Any]) -> dict[str, object]:
    known = {name: item.get(name) for name in _BARE}
    short = {name: text for name, text in known.items() if isinstance(text, str) and len(text) <= _BARE_CHARACTERS}
    return {**short, **_EMPTY.get(str(item.get("type")), {})}
