"""Read the texts of a request in each format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from gateway.mock import tokens
from gateway.mock.wire import JsonObject, decode, encode

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import msgspec

    from gateway.mock.schemas import Schema

#: What an answer must satisfy where only "a JSON object" was asked for.
ANY_OBJECT: Final[Schema] = {"type": "object", "properties": {"answer": {"type": "string"}}}


def text_of(content: object) -> str:
    """The text of a message's content: a string, or a list of parts of which some have a `text`."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    return " ".join(part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str))


def last_text(messages: Sequence[JsonObject], role: str = "user") -> str:
    """The text of the last message with this role; empty where there is none."""
    for message in reversed(messages):
        if message.get("role") == role:
            return text_of(message.get("content"))
    return ""


def read_messages(raw: Iterable[msgspec.Raw]) -> tuple[list[JsonObject], list[tuple[bytes, int]]]:
    """The messages decoded, and the raw JSON of each with its tokens.

    Raises:
        ApiError: 400, one of them is not an object.
    """
    messages: list[JsonObject] = []
    sizes: list[tuple[bytes, int]] = []
    for item in raw:
        data = bytes(item)
        message = decode(data, JsonObject)
        messages.append(message)
        sizes.append((data, tokens.count_json(message) + tokens.MESSAGE_TOKENS))
    return messages, sizes


def extra_tokens(*values: object) -> int:
    """Tokens of what a request carries beside its messages (tools, schemas), counted as JSON text with its keys."""
    return sum(tokens.count(encode(value).decode()) for value in values if value)


def schema_of(value: object) -> Schema:
    """`value` where it is a JSON schema, otherwise that of an object without properties."""
    return value if isinstance(value, dict) else {"type": "object"}
