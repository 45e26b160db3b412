"""Read the turns of an agent from the messages of a request: calls, results and user messages.

Only what decides whether two turns are equal is decoded. Texts are compared as they are written in JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

import msgspec

from gateway.core.counting.measure import Wire
from gateway.core.runaway import NO_TURNS, TurnReader, Turns
from gateway.dialects.fields import UNREADABLE

Raw = msgspec.Raw
_ABSENT: Final = Raw(b"")
#: how the texts begin that Claude Code adds to user messages by itself
_REMINDER: Final = b'"<system-reminder>'
_QUOTE: Final = b'"'
#: Longer arguments are compared as they are written. Shorter ones are compared as values, regardless of the order of
#: their keys.
_NORMALIZED: Final = 2048


class _Function(msgspec.Struct):
    name: str = ""
    arguments: Raw = _ABSENT


class _ToolCall(msgspec.Struct):
    function: _Function | None = None
    custom: Raw = _ABSENT
    type: str = ""


class _ChatMessage(msgspec.Struct):
    role: str = ""
    content: Raw = _ABSENT
    tool_calls: list[_ToolCall] | None = None
    function_call: _Function | None = None


class _Block(msgspec.Struct):
    type: str = ""
    text: Raw = _ABSENT
    name: str = ""
    input: Raw = _ABSENT
    content: Raw = _ABSENT


class _Message(msgspec.Struct):
    role: str = ""
    content: Raw = _ABSENT


class _Item(msgspec.Struct):
    type: str = "message"
    role: str = ""
    content: Raw = _ABSENT
    name: str = ""
    arguments: Raw = _ABSENT
    input: Raw = _ABSENT
    action: Raw = _ABSENT
    operation: Raw = _ABSENT
    output: Raw = _ABSENT


_CHAT: Final = msgspec.json.Decoder(_ChatMessage)
_MESSAGES: Final = msgspec.json.Decoder(_Message)
_ITEMS: Final = msgspec.json.Decoder(_Item)
_BLOCKS: Final = msgspec.json.Decoder(list[_Block])
_ANY: Final = msgspec.json.Decoder()
_SORTED: Final = msgspec.json.Encoder(order="sorted")
#: calls of the Responses API that the client answers
_CALLS: Final = frozenset(
    {
        *("function_call", "custom_tool_call", "computer_call", "local_shell_call", "shell_call"),
        *("apply_patch_call", "tool_search_call"),
    }
)
_OUTPUTS: Final = frozenset({*(f"{call}_output" for call in _CALLS), "tool_search_output"})


def read_turns(wire: Wire, messages: Iterable[bytes], before: Turns = NO_TURNS) -> Turns:
    """Return the turns after these messages, which follow those of `before`. A message that is unreadable is skipped.

    The last turn stays open, see `closed`.
    """
    reader = TurnReader(before)
    read = _READERS.get(wire)
    for raw in messages if read is not None else ():
        try:
            read(raw, reader)  # type: ignore[misc]
        except UNREADABLE:
            continue
    return reader.turns


def closed(turns: Turns) -> Turns:
    """Return the turns with the last one closed, as at the end of a request."""
    if not turns.results:
        return turns
    reader = TurnReader(turns)
    reader.close()
    return reader.turns


def _read_chat(raw: bytes, reader: TurnReader) -> None:
    message = _CHAT.decode(raw)
    role = message.role
    if role in ("tool", "function"):
        reader.result(_text(message.content))
    elif role == "assistant":
        for call in message.tool_calls or ():
            _read_function(call.function or _Function(call.type, call.custom), reader)
        if message.function_call is not None:
            _read_function(message.function_call, reader)
        elif not message.tool_calls:
            reader.text(_text(message.content))
    elif role == "user":
        _read_user(_text(message.content), reader)


def _read_function(function: _Function, reader: TurnReader) -> None:
    reader.call(function.name, _normalized_text(bytes(function.arguments)))


def _read_message(raw: bytes, reader: TurnReader) -> None:
    message = _MESSAGES.decode(raw)
    content, is_user = bytes(message.content), message.role == "user"
    if not is_user and message.role != "assistant":
        return
    if not content.startswith(b"["):
        _read_user(content, reader) if is_user else reader.text(content)
        return
    words = []
    for block in _BLOCKS.decode(content):
        kind = block.type
        if kind == "tool_result":
            reader.result(_text(block.content))
        elif kind == "tool_use":
            reader.call(block.name, _normalized(bytes(block.input)))
        elif is_user or kind == "text":
            text = bytes(block.text)
            if not text.startswith(_REMINDER):
                words.append(text)
    if words and is_user:
        reader.user(b"".join(words))
    elif words:
        reader.text(b"".join(words))


def _read_item(raw: bytes, reader: TurnReader) -> None:
    item = _ITEMS.decode(raw)
    kind = item.type
    if kind in _CALLS:
        arguments = next((given for given in (item.arguments, item.input, item.action, item.operation) if given), b"")
        reader.call(item.name or kind, _normalized_text(bytes(arguments)))
    elif kind in _OUTPUTS:
        reader.result(_text(item.output))
    elif kind == "message" and item.role == "user":
        _read_user(_text(item.content), reader)
    elif kind == "message" and item.role == "assistant":
        reader.text(_text(item.content))


def _read_user(text: bytes, reader: TurnReader) -> None:
    if not text.startswith(_REMINDER):
        reader.user(text)


def _text(content: Raw) -> bytes:
    """Return a content; of a list with one text, only the text.

    Clients write a text as a list while it has a cache mark, and later as a string.
    """
    raw = bytes(content)
    if not raw.startswith(b"[") or raw.count(b'"text"', 0, 256) == 0:
        return raw
    try:
        blocks = _BLOCKS.decode(raw)
    except UNREADABLE:
        return raw
    return bytes(blocks[0].text) if len(blocks) == 1 and blocks[0].text else raw


def _normalized_text(raw: bytes) -> bytes:
    """Return arguments in a comparable form; those in a string are JSON within JSON."""
    if len(raw) > _NORMALIZED or not raw.startswith(_QUOTE):
        return _normalized(raw)
    try:
        return _normalized(_ANY.decode(raw).encode("utf-8", "surrogatepass"))
    except UNREADABLE:
        return raw


def _normalized(raw: bytes) -> bytes:
    """Return arguments in a comparable form: compact JSON with sorted keys, if they are short."""
    if len(raw) > _NORMALIZED or not raw.startswith(b"{"):
        return raw
    try:
        return _SORTED.encode(_ANY.decode(raw))
    except (*UNREADABLE, ValueError):
        return raw


_READERS: Final[Mapping[Wire, Callable[[bytes, TurnReader], None]]] = {
    "chat": _read_chat,
    "messages": _read_message,
    "responses": _read_item,
}
