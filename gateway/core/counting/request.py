"""Read the parts of a request that cost tokens, in each wire format.

A value may be decoded JSON, or its bytes in the body. Bytes are only decoded if they are not in a cache.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Final

from gateway.core.counting.measure import Wire
from gateway.core.counting.tools import compact
from gateway.core.repeated import cache_key
from gateway.core.values import dataclass

#: a JSON value, or its bytes
Piece = Any

#: top-level fields that let a provider add content: search results, or content stored from earlier calls
_SERVER_FIELDS: Final = frozenset(
    {
        *("mcp_servers", "web_search_options", "plugins", "container"),
        *("previous_response_id", "conversation", "prompt"),
        # xAI, Azure
        *("search_parameters", "data_sources"),
    }
)
#: the field of a system prompt that is no message
_SYSTEM_FIELDS: Final = {"messages": "system", "responses": "instructions"}
#: the field of the conversation: usually an array of messages, or of texts in completions
ITEMS: Final[Mapping[Wire, str]] = {
    "chat": "messages",
    "messages": "messages",
    "responses": "input",
    "completions": "prompt",
}
#: the fields of the response schema
SCHEMA_FIELDS: Final[Mapping[Wire, tuple[str, ...]]] = {
    "chat": ("response_format",),
    "responses": ("text",),
    "messages": ("output_config", "output_format"),
    "completions": (),
}
#: fields that control a call but do not change its input tokens
_NO_TOKENS: Final = frozenset({"models", "provider", "metadata", "user", "stop", "stop_sequences", "logit_bias"})
#: also the fields that are counted separately, such as tools; models see no other text of theirs
_NOT_OTHERS: Final = _NO_TOKENS | {"model", "tools", "functions", "tool_choice", "function_call"}
#: `_IGNORED_FIELDS`: by format, the fields that do not change the overhead. `_KNOWN_FIELDS`: by format, all fields
#: except the unknown ones, see `RequestParts.others`.
_IGNORED_FIELDS: Final = {wire: _NO_TOKENS | {items} for wire, items in ITEMS.items()}
_KNOWN_FIELDS: Final = {wire: _NOT_OTHERS | {items, _SYSTEM_FIELDS.get(wire, "")} for wire, items in ITEMS.items()}
#: fields whose value matters even if it is short
_DECODED_FIELDS: Final = frozenset(
    {
        *("model", "tools", "functions", "tool_choice", "function_call", "thinking", "reasoning"),
        *_SYSTEM_FIELDS.values(),
        *(name for names in SCHEMA_FIELDS.values() for name in names),
    }
)
#: Unknown fields are counted if they have more bytes than this together. Switches and IDs are shorter.
_SHORT_BYTES: Final = 512
_decode: Final = json.JSONDecoder().decode
_FORCED_CHOICES: Final = frozenset({"required", "any"})
_FORCED_TYPES: Final = frozenset({"function", "tool", "any", "custom"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestParts:
    """A request, split into the parts that cost tokens.

    Attributes:
        system: a system prompt outside of the messages.
        tools: the values of the fields that define tools.
        schema: the JSON schema of the response.
        schema_name: the name of the schema.
        schema_about: the description of the schema.
        forced: True if some tool must be called.
        forced_name: the tool that must be called, if the request names it.
        thinking: True if the request asks the model to think.
        server: True if the provider may fetch content by itself, whose size is unknown.
        tokenizer: the tokenizer to count with; empty for that of the model family.
        others: the unknown top-level fields if they are long, because a provider may bill their text.
    """

    wire: Wire
    model: str = ""
    provider: str = ""
    messages: Sequence[Piece] = ()
    system: Piece = None
    tools: Sequence[Piece] = ()
    schema: Piece = None
    schema_name: str = ""
    schema_about: str = ""
    forced: bool = False
    forced_name: str = ""
    thinking: bool = False
    server: bool = False
    tokenizer: str = ""
    others: Sequence[Piece] = ()


def read_request(
    wire: Wire,
    body: Mapping[str, Piece],
    *,
    model: str = "",
    provider: str = "",
    messages: Sequence[Piece] | None = None,
    tokenizer: str = "",
) -> RequestParts:
    """Split a body into the parts that cost tokens; never raises.

    Args:
        wire: the wire format of the body.
        body: the top-level fields; values are decoded or bytes.
        model: the model name of the provider, if it differs from the one in the body.
        provider: the provider that is called.
        messages: the elements of `messages` or `input`, if the caller has already split them.
        tokenizer: the tokenizer to count with instead of that of the model family.
    """
    choice = decode_piece(body.get("tool_choice", body.get("function_call")))
    forced_name = _forced_tool(choice) if choice is not None else ""
    own_model = None if model else decode_piece(body.get("model"))
    schema_holder = _schema_holder(wire, body)
    about = schema_holder.get("description")
    title = schema_holder.get("name")
    return RequestParts(
        wire=wire,
        model=model or (own_model if isinstance(own_model, str) else ""),
        provider=provider,
        messages=_messages(wire, body) if messages is None else messages,
        system=_field_value(body, _SYSTEM_FIELDS.get(wire, "")),
        tools=tuple(tools for field in ("tools", "functions") if (tools := _field_value(body, field)) is not None),
        schema=schema_holder.get("schema"),
        schema_name=title if isinstance(title, str) else "",
        schema_about=about if isinstance(about, str) else "",
        forced=bool(forced_name) or (choice is not None and _is_forced(choice)),
        forced_name=forced_name,
        # `prompt` names a template in Responses, but is the conversation itself in completions.
        server=any(
            _field_value(body, field) is not None for field in _SERVER_FIELDS & body.keys() if field != ITEMS[wire]
        ),
        thinking=_asks_for_thinking(decode_piece(body.get("thinking")), decode_piece(body.get("reasoning"))),
        tokenizer=tokenizer,
        others=_unknown_fields(wire, body, has_schema=schema_holder.get("schema") is not None),
    )


def key_of_fields(wire: Wire, fields: Mapping[str, bytes]) -> Hashable:
    """Return a key that is equal for all bodies that `read_request` reads in the same way, except for their messages.

    For a short field whose value is not read, the key only says whether the field is present. Such fields may contain
    IDs that differ with each call.
    """
    ignored, known = _IGNORED_FIELDS[wire], _KNOWN_FIELDS[wire]
    others = sum([len(raw) for name, raw in fields.items() if name not in known])
    decoded_fields = _DECODED_FIELDS if others <= _SHORT_BYTES else fields
    return tuple(
        [
            (name, cache_key(raw) if name in decoded_fields else raw == b"null")
            for name, raw in fields.items()
            if name not in ignored
        ]
    )


def wire_of(body: Mapping[str, Any]) -> Wire:
    """Return the most likely wire format of a decoded body."""
    if "prompt" in body:
        return "completions"
    if "messages" not in body:
        return "responses"
    tools = body.get("tools")
    is_anthropic = "system" in body or "anthropic_version" in body or "output_config" in body
    is_anthropic = is_anthropic or (
        isinstance(tools, list) and any(isinstance(tool, Mapping) and "input_schema" in tool for tool in tools)
    )
    return "messages" if is_anthropic or (_is_claude(body) and "max_tokens" in body and not tools) else "chat"


def decode_piece(piece: Piece) -> Any:
    """Return the value of a piece; bytes that are not JSON are returned as text."""
    if piece is None or not isinstance(piece, bytes | bytearray | memoryview):
        return piece
    raw = bytes(piece)
    try:
        return _decode(raw.decode())
    except (ValueError, RecursionError):
        return raw.decode("utf-8", "replace")


def _field_value(body: Mapping[str, Piece], field: str) -> Piece:
    """Return the piece of a field, or None if it is absent or null."""
    piece = body.get(field)
    if piece is None:
        return None
    return None if isinstance(piece, bytes | bytearray | memoryview) and bytes(piece) == b"null" else piece


def _unknown_fields(wire: Wire, body: Mapping[str, Piece], *, has_schema: bool) -> tuple[Piece, ...]:
    """Return the unknown fields, or nothing if they are short together."""
    known = _KNOWN_FIELDS[wire].union(SCHEMA_FIELDS[wire] if has_schema else ())
    others = [piece for name, piece in body.items() if name not in known]
    return tuple(others) if sum(map(_size, others)) > _SHORT_BYTES else ()


def _size(piece: Piece) -> int:
    """Return the size of a piece in bytes; for a decoded one, the size of its usual JSON."""
    if isinstance(piece, bytes | bytearray | memoryview):
        return len(piece)
    try:
        return len(json.dumps(piece))
    except (ValueError, TypeError, RecursionError):
        return len(compact(piece))


def _is_claude(body: Mapping[str, Any]) -> bool:
    model = body.get("model")
    return isinstance(model, str) and model.startswith("claude")


def _messages(wire: Wire, body: Mapping[str, Piece]) -> Sequence[Piece]:
    field = ITEMS[wire]
    if field not in body:
        return ()
    piece = body[field]
    if wire == "completions" or (isinstance(piece, bytes) and not piece.lstrip().startswith(b"[")):
        # The value is one text, which is decoded when it is counted.
        return (piece,)
    value = decode_piece(piece)
    return value if isinstance(value, list) else (value,)


def _is_forced(choice: object) -> bool:
    if isinstance(choice, Mapping):
        return choice.get("type") in ("any", "tool") or choice.get("mode") == "required"
    return isinstance(choice, str) and choice in _FORCED_CHOICES


def _forced_tool(choice: object) -> str:
    if not isinstance(choice, Mapping) or str(choice.get("type", "function")) not in _FORCED_TYPES:
        return ""
    inner = choice.get("function", choice.get("custom"))
    name = inner.get("name") if isinstance(inner, Mapping) else choice.get("name")
    return name if isinstance(name, str) else ""


def _schema_holder(wire: Wire, body: Mapping[str, Piece]) -> Mapping[str, Any]:
    """Return the object with the response schema, its name and description; empty if there is none."""
    if wire == "chat":
        holder = _value_at(decode_piece(body.get("response_format")), "json_schema")
    elif wire == "responses":
        holder = _value_at(decode_piece(body.get("text")), "format")
    else:
        holder = _value_at(decode_piece(body.get("output_config")), "format") or decode_piece(body.get("output_format"))
    return holder if isinstance(holder, Mapping) else {}


def _value_at(value: object, *path: str) -> object:
    for name in path:
        if value is None:
            break
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _asks_for_thinking(thinking: object, reasoning: object) -> bool:
    """Return True if the request asks for thinking, in Anthropic's fields or in those of chat hosts of its models."""
    if thinking is None and reasoning is None:
        return False
    if isinstance(thinking, Mapping) and thinking.get("type") in ("enabled", "adaptive"):
        return True
    if not isinstance(reasoning, Mapping) or reasoning.get("enabled") is False or reasoning.get("effort") == "none":
        return False
    return any(key in reasoning for key in ("enabled", "effort", "max_tokens"))
