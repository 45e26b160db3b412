"""Read the parts of a request that cost tokens, in each wire format.

Values may be decoded JSON, or a value's own bytes as they stand in the body: those are decoded only when they are new.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Final

from gateway.core.counting.measure import Wire
from gateway.core.counting.tools import compact
from gateway.core.repeated import again
from gateway.core.values import dataclass

#: a JSON value, or its bytes
Piece = Any

#: top-level fields that let a provider add what it finds, or keeps from earlier calls
_SERVER_FIELDS: Final = frozenset(
    {
        *("mcp_servers", "web_search_options", "plugins", "container"),
        *("previous_response_id", "conversation", "prompt"),
        # xAI, Azure
        *("search_parameters", "data_sources"),
    }
)
#: where a system text stands that is no message
_SYSTEM_FIELDS: Final = {"messages": "system", "responses": "instructions"}
#: the field that holds the conversation: mostly an array of messages, or of texts in completions
ITEMS: Final[Mapping[Wire, str]] = {
    "chat": "messages",
    "messages": "messages",
    "responses": "input",
    "completions": "prompt",
}
#: where the schema of an answer stands
FORM_FIELDS: Final[Mapping[Wire, tuple[str, ...]]] = {
    "chat": ("response_format",),
    "responses": ("text",),
    "messages": ("output_config", "output_format"),
    "completions": (),
}
#: fields that steer a call, and say nothing of what it costs
_UNREAD: Final = frozenset({"models", "provider", "metadata", "user", "stop", "stop_sequences", "logit_bias"})
#: those, and what is weighed with the tools: no text of theirs is shown to a model
_STEERING: Final = _UNREAD | {"model", "tools", "functions", "tool_choice", "function_call"}
#: by format: fields that make no difference to what stands beside the messages, and those that are no others
_UNTOLD: Final = {wire: _UNREAD | {items} for wire, items in ITEMS.items()}
_COUNTED: Final = {wire: _STEERING | {items, _SYSTEM_FIELDS.get(wire, "")} for wire, items in ITEMS.items()}
#: fields whose value is read, however short
_READ: Final = frozenset(
    {
        *("model", "tools", "functions", "tool_choice", "function_call", "thinking", "reasoning"),
        *_SYSTEM_FIELDS.values(),
        *(name for names in FORM_FIELDS.values() for name in names),
    }
)
#: Bytes that all other fields may have together before they are weighed: switches and ids are shorter than that.
_FEW_BYTES: Final = 512
_decode: Final = json.JSONDecoder().decode
_FORCED_WORDS: Final = frozenset({"required", "any"})
_FORCED_TYPES: Final = frozenset({"function", "tool", "any", "custom"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestParts:
    """A request, taken apart.

    Attributes:
        system: a system text outside the messages.
        tools: the values of its fields that define tools.
        schema: the JSON schema that the answer must follow, with its name and description (`schema_about`).
        forced: some tool must be called; `forced_name`: the one, where the request names it.
        thinking: the model is asked to think.
        server: the provider is asked to fetch things by itself, whose size no one can foresee.
        tokenizer: the one to count with; empty for that of the family.
        others: the top-level fields nobody here knows, where they are long: a provider may bill their text.
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
    """Take a body apart; never raises.

    Args:
        wire: the body's format.
        body: its top level; values decoded or as bytes.
        model: the name the provider knows, where it differs from the body's.
        provider: who is called.
        messages: the elements of `messages` or `input`, where the caller has already told them apart.
        tokenizer: the one to count with instead of the family's.
    """
    choice = decoded(body.get("tool_choice", body.get("function_call")))
    name = _named(choice) if choice is not None else ""
    own = None if model else decoded(body.get("model"))
    form = _format(wire, body)
    about = form.get("description")
    title = form.get("name")
    return RequestParts(
        wire=wire,
        model=model or (own if isinstance(own, str) else ""),
        provider=provider,
        messages=_messages(wire, body) if messages is None else messages,
        system=_given(body, _SYSTEM_FIELDS.get(wire, "")),
        tools=tuple(tools for field in ("tools", "functions") if (tools := _given(body, field)) is not None),
        schema=form.get("schema"),
        schema_name=title if isinstance(title, str) else "",
        schema_about=about if isinstance(about, str) else "",
        forced=bool(name) or (choice is not None and _is_forced(choice)),
        forced_name=name,
        # `prompt` names a template in Responses, but is the conversation itself in completions.
        server=any(_given(body, field) is not None for field in _SERVER_FIELDS & body.keys() if field != ITEMS[wire]),
        thinking=_thinks(decoded(body.get("thinking")), decoded(body.get("reasoning"))),
        tokenizer=tokenizer,
        others=_others(wire, body, has_schema=form.get("schema") is not None),
    )


def key_of_fields(wire: Wire, fields: Mapping[str, bytes]) -> Hashable:
    """What `read_request` says of a body, but for its messages, is the same wherever this is.

    Of short fields that it reads no value of, all that matters is whether they are there: ids in them may differ with
    each call.
    """
    untold, counted = _UNTOLD[wire], _COUNTED[wire]
    others = sum([len(raw) for name, raw in fields.items() if name not in counted])
    read = _READ if others <= _FEW_BYTES else fields
    return tuple(
        [(name, again(raw) if name in read else raw == b"null") for name, raw in fields.items() if name not in untold]
    )


def wire_of(body: Mapping[str, Any]) -> Wire:
    """The format a decoded body is most likely written in."""
    if "prompt" in body:
        return "completions"
    if "messages" not in body:
        return "responses"
    tools = body.get("tools")
    theirs = "system" in body or "anthropic_version" in body or "output_config" in body
    theirs = theirs or (
        isinstance(tools, list) and any(isinstance(tool, Mapping) and "input_schema" in tool for tool in tools)
    )
    return "messages" if theirs or (_is_claude(body) and "max_tokens" in body and not tools) else "chat"


def decoded(piece: Piece) -> Any:
    """The value of a piece; bytes that are no JSON are the text they hold."""
    if piece is None or not isinstance(piece, bytes | bytearray | memoryview):
        return piece
    raw = bytes(piece)
    try:
        return _decode(raw.decode())
    except (ValueError, RecursionError):
        return raw.decode("utf-8", "replace")


def _given(body: Mapping[str, Piece], field: str) -> Piece:
    """A field's piece; None where it is absent or null."""
    piece = body.get(field)
    if piece is None:
        return None
    return None if isinstance(piece, bytes | bytearray | memoryview) and bytes(piece) == b"null" else piece


def _others(wire: Wire, body: Mapping[str, Piece], *, has_schema: bool) -> tuple[Piece, ...]:
    """The fields that are weighed nowhere else; none where they are short."""
    known = _COUNTED[wire].union(FORM_FIELDS[wire] if has_schema else ())
    found = [piece for name, piece in body.items() if name not in known]
    return tuple(found) if sum(map(_size, found)) > _FEW_BYTES else ()


def _size(piece: Piece) -> int:
    """Bytes of a piece; of a decoded one, those that most writers of JSON make of it."""
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
        # One text: it is read where it is weighed.
        return (piece,)
    value = decoded(piece)
    return value if isinstance(value, list) else (value,)


def _is_forced(choice: object) -> bool:
    if isinstance(choice, Mapping):
        return choice.get("type") in ("any", "tool") or choice.get("mode") == "required"
    return isinstance(choice, str) and choice in _FORCED_WORDS


def _named(choice: object) -> str:
    if not isinstance(choice, Mapping) or str(choice.get("type", "function")) not in _FORCED_TYPES:
        return ""
    inner = choice.get("function", choice.get("custom"))
    name = inner.get("name") if isinstance(inner, Mapping) else choice.get("name")
    return name if isinstance(name, str) else ""


def _format(wire: Wire, body: Mapping[str, Piece]) -> Mapping[str, Any]:
    """The object that holds the schema an answer must follow, its name and description; empty where there is none."""
    if wire == "chat":
        found = _inner(decoded(body.get("response_format")), "json_schema")
    elif wire == "responses":
        found = _inner(decoded(body.get("text")), "format")
    else:
        found = _inner(decoded(body.get("output_config")), "format") or decoded(body.get("output_format"))
    return found if isinstance(found, Mapping) else {}


def _inner(value: object, *path: str) -> object:
    for name in path:
        if value is None:
            break
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _thinks(thinking: object, reasoning: object) -> bool:
    """Whether thinking is asked for, in Anthropic's words or in those of hosts that offer its models as chat."""
    if thinking is None and reasoning is None:
        return False
    if isinstance(thinking, Mapping) and thinking.get("type") in ("enabled", "adaptive"):
        return True
    if not isinstance(reasoning, Mapping) or reasoning.get("enabled") is False or reasoning.get("effort") == "none":
        return False
    return any(key in reasoning for key in ("enabled", "effort", "max_tokens"))
