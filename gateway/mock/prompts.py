"""Read texts and token counts from requests, for all wire formats."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from gateway.mock import tokens
from gateway.mock.wire import JsonObject, decode, encode

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import msgspec

    from gateway.mock.schemas import Schema

#: The schema of a response if the client only asks for "a JSON object".
ANY_OBJECT: Final[Schema] = {"type": "object", "properties": {"answer": {"type": "string"}}}


def text_of(content: object) -> str:
    """Return the text of a message's content, which is a string or a list of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    return " ".join(part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str))


def last_text(messages: Sequence[JsonObject], role: str = "user") -> str:
    """Return the text of the last message with this role; empty if there is none."""
    for message in reversed(messages):
        if message.get("role") == role:
            return text_of(message.get("content"))
    return ""


def read_messages(raw: Iterable[msgspec.Raw]) -> tuple[list[JsonObject], list[tuple[bytes, int]]]:
    """Return the decoded messages, and the raw JSON and tokens of each.

    Raises:
        ApiError: 400, a message is not an object.
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
    """Return the tokens of a request's overhead (tools, schemas), counted as JSON text with its keys."""
    return sum(tokens.count(encode(value).decode()) for value in values if value)


def schema_of(value: object) -> Schema:
    """Return `value` if it is a JSON schema, otherwise the schema of an object without properties."""
    return value if isinstance(value, dict) else {"type": "object"}
