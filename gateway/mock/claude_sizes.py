"""Count the billed tokens of messages to a Claude model."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.mock import tokens
from gateway.mock.prefixes import is_thinking
from gateway.mock.wire import JsonObject, encode

#: Fields with opaque data, which is not billed as text.
_OPAQUE = ("signature", "data", "encrypted_content")


def sizes_of(messages: Sequence[JsonObject]) -> list[tuple[bytes, int]]:
    """Return each message without signatures, which are not billed, and its tokens."""
    billed = [_without_signatures(message) for message in messages]
    return [(encode(message), tokens.count_json(message) + tokens.MESSAGE_TOKENS) for message in billed]


def total_of(messages: Sequence[JsonObject]) -> int:
    """Return the tokens of messages."""
    return sum(size for _, size in sizes_of(messages))


def _without_signatures(message: JsonObject) -> JsonObject:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": [_plain(block) for block in content]}


def _plain(block: JsonObject) -> JsonObject:
    if not (is_thinking(block) or block.get("type") == "compaction"):
        return block
    return {key: value for key, value in block.items() if key not in _OPAQUE}
