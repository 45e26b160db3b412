"""Read the rounds of an agent from the messages of a request: calls, results and user messages.

Only what decides whether two rounds are equal is decoded, and all messages at once: with one call for each message,
most of the time would pass between the calls. Texts are compared as they are written in JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from gateway.core.counting.measure import Wire
from gateway.core.runaway import NO_ROUNDS, RoundReader, Rounds
from gateway.dialects.fields import UNREADABLE

Raw = msgspec.Raw
_ABSENT: Final = Raw(b"")
#: how texts begin that Claude Code adds to user messages by itself
_REMINDER: Final = "<system-reminder>"
_RAW_REMINDER: Final = b'"<system-reminder>'
_LIST: Final = b"["
#: Bytes of arguments that are compared as values, regardless of the order of their keys. Longer ones are compared as
#: they are written, and so are those with a single key.
_NORMALIZED: Final = 4096
_KEY_END: Final = b'":'
_TWO: Final = 2


class _Function(msgspec.Struct, gc=False):
    name: str = ""
    arguments: Any = None


class _ToolCall(msgspec.Struct, gc=False):
    function: _Function | None = None
    custom: Any = None
    type: str = ""


class _ChatMessage(msgspec.Struct, gc=False):
    role: str = ""
    content: Raw = _ABSENT
    tool_calls: list[_ToolCall] | None = None
    function_call: _Function | None = None


class _Block(msgspec.Struct, gc=False):
    type: str = ""
    text: str = ""
    name: str = ""
    input: Raw = _ABSENT
    content: Raw = _ABSENT


class _Message(msgspec.Struct, gc=False):
    role: str = ""
    content: str | list[_Block] = ""


class _Part(msgspec.Struct, gc=False):
    text: Raw = _ABSENT


class _Item(msgspec.Struct, gc=False):
    type: str = "message"
    role: str = ""
    content: Raw = _ABSENT
    name: str = ""
    arguments: Any = None
    input: Any = None
    action: Any = None
    operation: Any = None
    output: Raw = _ABSENT


_PARTS: Final = msgspec.json.Decoder(list[_Part])
_ANY: Final = msgspec.json.Decoder()
_SORTED: Final = msgspec.json.Encoder(order="sorted")
#: calls of the Responses API that the client answers
_CALLS: Final = frozenset(
    {
        *("function_call", "custom_tool_call", "computer_call", "local_shell_call", "shell_call"),
        *("apply_patch_call", "tool_search_call"),
    }
)
_RESULT_ROLES: Final = frozenset({"tool", "function"})
_OUTPUTS: Final = frozenset({*(f"{call}_output" for call in _CALLS), "tool_search_output"})


def read_rounds(wire: Wire, array: bytes, before: Rounds = NO_ROUNDS) -> tuple[Rounds, RoundReader]:
    """Return the rounds before the last message of an array, and those after it.

    The rounds before the last message can be continued: the client may still change that message. Those after it end
    with a closed round. A message that cannot be read is skipped.

    Args:
        wire: the format.
        array: the messages as a JSON array.
        before: the rounds that the messages follow.
    """
    decoder, read = _READERS[wire]
    try:
        messages = decoder.decode(array)
    except UNREADABLE:
        messages = list(_readable(decoder, array))
    reader = RoundReader(before)
    for message in messages[:-1]:
        read(message, reader)
    open_rounds = reader.rounds
    for message in messages[-1:]:
        read(message, reader)
    reader.close()
    return open_rounds, reader


def _readable(decoder: msgspec.json.Decoder[list[Any]], array: bytes) -> Iterable[Any]:
    """Yield the messages that can be read, and the others as messages without a meaning."""
    try:
        raws = _RAWS.decode(array)
    except UNREADABLE:
        return
    for raw in raws:
        try:
            yield decoder.decode(b"[%b]" % raw)[0]
        except UNREADABLE:
            yield _NOTHING


def _read_chat(message: Any, reader: RoundReader) -> None:
    role = message.role
    if role in _RESULT_ROLES:
        reader.result(_text(message.content))
    elif role == "assistant":
        for call in message.tool_calls or ():
            function = call.function
            if function is not None:
                reader.call(function.name, _normalized_value(function.arguments))
            else:
                reader.call(call.type, _normalized_value(call.custom))
        if message.function_call is not None:
            reader.call(message.function_call.name, _normalized_value(message.function_call.arguments))
        elif not message.tool_calls:
            reader.text(_text(message.content))
    elif role == "user":
        _read_user(_text(message.content), reader)


def _read_message(message: Any, reader: RoundReader) -> None:
    content = message.content
    blocks = (_Block("text", content),) if isinstance(content, str) else content
    if message.role == "user":
        _read_blocks_of_user(blocks, reader)
    elif message.role == "assistant":
        texts = [block.text for block in blocks if block.type == "text"]
        if texts:
            reader.text(_encoded(texts))
        for block in blocks:
            if block.type == "tool_use":
                reader.call(block.name, _normalized(bytes(block.input)))


def _read_blocks_of_user(blocks: Sequence[_Block], reader: RoundReader) -> None:
    texts = []
    for block in blocks:
        if block.type == "tool_result":
            reader.result(_text(block.content))
        elif not block.text.startswith(_REMINDER):
            texts.append(block.text)
    if texts:
        reader.user(_encoded(texts))


def _read_item(item: Any, reader: RoundReader) -> None:
    kind = item.type
    if kind in _CALLS:
        values = (item.arguments, item.input, item.action, item.operation)
        reader.call(item.name or kind, _normalized_value(next((one for one in values if one is not None), None)))
    elif kind in _OUTPUTS:
        reader.result(_text(item.output))
    elif kind == "message" and item.role == "user":
        _read_user(_text(item.content), reader)
    elif kind == "message" and item.role == "assistant":
        reader.text(_text(item.content))


def _read_user(text: bytes, reader: RoundReader) -> None:
    if not text.startswith(_RAW_REMINDER):
        reader.user(text)


def _encoded(texts: Sequence[str]) -> bytes:
    return "\n".join(texts).encode("utf-8", "surrogatepass")


def _text(content: Raw) -> bytes:
    """Return a content; of a list with one text, only the text.

    Clients write a text as a list while it has a cache mark, and later as a string.
    """
    raw = bytes(content)
    if not raw.startswith(_LIST):
        return raw
    try:
        parts = _PARTS.decode(raw)
    except UNREADABLE:
        return raw
    return bytes(parts[0].text) or raw if len(parts) == 1 else raw


def _normalized(arguments: str | bytes) -> str | bytes:
    """Return arguments in a comparable form: compact JSON with sorted keys if there is more than one key."""
    if len(arguments) > _NORMALIZED:
        return arguments
    raw = arguments.encode("utf-8", "surrogatepass") if isinstance(arguments, str) else arguments
    if raw.count(_KEY_END) < _TWO:
        return raw
    try:
        return _SORTED.encode(_ANY.decode(raw))
    except UNREADABLE:
        return raw


def _normalized_value(value: Any) -> str | bytes:
    """Return arguments in a comparable form that some APIs send as a text, and others as a value."""
    return _normalized(value if isinstance(value, str) else _SORTED.encode(value))


_RAWS: Final = msgspec.json.Decoder(list[Raw])
_NOTHING: Final = _Item(type="")
_READERS: Final[Mapping[Wire, tuple[msgspec.json.Decoder[list[Any]], Callable[[Any, RoundReader], None]]]] = {
    "chat": (msgspec.json.Decoder(list[_ChatMessage]), _read_chat),
    "messages": (msgspec.json.Decoder(list[_Message]), _read_message),
    "responses": (msgspec.json.Decoder(list[_Item]), _read_item),
}
