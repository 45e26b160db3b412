"""Read cache marks (`cache_control`) in messages and tools, and compare messages without them."""

from __future__ import annotations

from typing import Any

from gateway.mock.wire import JsonObject, encode

MARK = "cache_control"


def has_cache_mark(message: JsonObject) -> bool:
    """Return whether a content block of a message has a cache mark."""
    content = message.get("content")
    return isinstance(content, list) and any(isinstance(block, dict) and block.get(MARK) for block in content)


def without_cache_marks(message: JsonObject) -> bytes:
    """Return the JSON of a message without cache marks. A text has the same JSON as a string and as a single block."""
    content = message.get("content")
    if not isinstance(content, list):
        return encode(message)
    blocks: list[Any] = [unmarked(block) if isinstance(block, dict) else block for block in content]
    if len(blocks) == 1 and isinstance(blocks[0], dict) and blocks[0].keys() == {"type", "text"}:
        return encode({**message, "content": blocks[0]["text"]})
    return encode({**message, "content": blocks})


def unmarked(item: JsonObject) -> JsonObject:
    """Return a content block or tool without its cache mark."""
    return {key: value for key, value in item.items() if key != MARK}
