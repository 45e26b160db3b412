"""Convert one message of Anthropic's Messages API to chat messages.

A user message may contain the results of several calls and words of the user. Each result becomes a separate message,
and the rest becomes one message. Thinking is a part that no rule changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gateway.core.conversation.message import decode, encode, parse_bytes
from gateway.core.counting.parts import is_compaction
from gateway.core.views.raw import compact, fields_of, items_of
from gateway.core.views.view import ChatMessage, as_chat_parts, opaque

#: A tuple instead of a set, because the value that is looked up may be any JSON, and some values are not hashable.
_ROLES = ("user", "assistant")
#: Kinds of an element, by its author. The kind is empty for anything else.
#: - User: `words` (with or without tool results), or `results` only.
#: - Assistant: `as_chat_parts`, or `thought` if it starts with thinking.
#: - System: `system` if it only has texts, and tools that are withdrawn or offered by name; `changes` if it has more,
#:   such as tool definitions; `sealed` if it cannot be written again without loss.
USERS = ("words", "results")
SPOKEN = ("said", "thought")
SYSTEM = ("system", "changes", "sealed")
_THINKING = ("thinking", "redacted_thinking")
_CALL = "tool_use"
#: the usual bytes of calls and results
_CALL_OR_RESULT = (b'"tool_use"', b'"tool_result"')
#: types of calls to tools that the provider runs; their results are part of assistant messages
_SERVED = ("server_tool_use", "mcp_tool_use")
#: blocks of system messages that withdraw a tool, and offer it again
TOOL_CHANGES = WITHDRAW, OFFER = ("tool_removal", "tool_addition")
#: type of a part that names a deferred tool, whose definition the model reads from here on
_REFERENCE = "tool_reference"
#: bytes that a piece takes in addition to its message, and for each of its names
_PIECE_BYTES = 250
_NAME_BYTES = 100


class Piece(NamedTuple):
    """One chat message, and the indices of its blocks if it is only a part of its element."""

    message: ChatMessage
    blocks: frozenset[int] | None = None
    #: True if it contains a system instruction, or may belong to an element that cannot be parsed
    is_held: bool = False
    is_result: bool = False
    #: names of tools that a search found and that this message loads
    loads: tuple[str, ...] = ()
    #: names of tools that it calls
    calls: tuple[str, ...] = ()


class ReadMessage(NamedTuple):
    """One element: its kind, and the chat messages that it is made of if it is converted alone."""

    pieces: tuple[Piece, ...]
    kind: str
    #: True for an assistant message with calls
    calls: bool = False
    #: True if it replaces everything before it (a compaction)
    is_compact: bool = False
    #: True if the provider signed its compaction
    is_signed: bool = False
    #: True if it has thinking blocks
    thinks: bool = False
    is_opaque: bool = False
    #: True if it cannot be parsed but may contain calls or results
    may_have_calls: bool = False
    #: `served`: IDs of its calls to tools that the provider runs. `needs`: IDs of such calls in earlier elements that
    #: it refers to.
    served: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    #: IDs of its calls that were made by code which the provider runs
    coded: frozenset[str] = frozenset()
    #: `has_results`: True if it has tool results. `has_words`: True if it has other blocks.
    has_results: bool = False
    has_words: bool = True


def as_blocks(content: Any) -> Iterable[Any]:
    """Return a content as a list of blocks."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def size_of(message: ReadMessage) -> int:
    """Return the approximate size in memory, in bytes."""
    names = sum(len(piece.loads) + len(piece.calls) for piece in message.pieces)
    return _NAME_BYTES * names + sum(_PIECE_BYTES + len(piece.message.raw) for piece in message.pieces)


def read_message(raw: bytes) -> ReadMessage:
    """Convert an element to chat messages; never raises.

    An element that cannot be parsed becomes one opaque message.
    """
    message, is_lossy = parse_bytes(raw)
    if isinstance(message, dict) and message.get("role") in _ROLES and isinstance(message.get("content"), str):
        # The same as in a chat request. If it cannot be written again without loss, every reader treats it as sealed.
        return ReadMessage((Piece(ChatMessage.of(raw)),), kind_of(message))
    kind = kind_of(message)
    content = message["content"] if _is_parsable(message) else []
    served, needs = _server_ids(content) if kind in SPOKEN else ((), ())
    if is_lossy or not _is_parsable(message):
        kind = "sealed" if is_lossy and kind in SYSTEM else kind
        may_have_calls = kind not in SYSTEM and any(mark in raw for mark in _CALL_OR_RESULT)
        piece = Piece(ChatMessage.of(opaque(raw)))
        return ReadMessage((piece,), kind, is_opaque=True, may_have_calls=may_have_calls, served=served, needs=needs)
    if message["role"] == "user":
        pieces = tuple(_pieces_of_user(message, content))
        results = [piece.is_result for piece in pieces]
        return ReadMessage(pieces, kind, has_results=any(results), has_words=not all(results))
    calls = any(map(is_call, content))
    words = encode(assistant_message(message, content, arguments_of(raw) if calls else ()))
    return ReadMessage(
        (Piece(ChatMessage.of(words), loads=loaded_tools(content), calls=called_tools(content)),),
        kind,
        calls=calls,
        is_compact=any(map(is_compaction, content)),
        is_signed=any(is_compaction(block) and bool(block.get("signature")) for block in content),
        thinks=any(block.get("type") in _THINKING for block in content),
        served=served,
        needs=needs,
        coded=frozenset(str(block.get("id")) for block in content if is_call(block) and _is_called_by_code(block)),
    )


def after_signed(reads: Sequence[ReadMessage]) -> range:
    """Return the indices after the last signed compaction, up to the last thinking block.

    Thinking in turns after the compaction stays valid only if these turns follow it unchanged:
    https://platform.claude.com/docs/en/build-with-claude/compaction-thinking-blocks
    """
    signed = max((place for place, one in enumerate(reads) if one.is_signed), default=len(reads))
    thinking = max((place for place, one in enumerate(reads) if one.thinks), default=0)
    return range(signed + 1, thinking + 1)


def _is_called_by_code(block: Mapping[str, Any]) -> bool:
    caller = block.get("caller")
    return isinstance(caller, dict) and "tool_id" in caller


def _server_ids(content: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the IDs of calls that the provider runs, and the IDs of earlier such calls that blocks refer to."""
    calls: dict[str, None] = {}
    needs: list[str] = []
    for block in content:
        kind, caller = block.get("type"), block.get("caller")
        names = [caller.get("tool_id")] if isinstance(caller, dict) else []
        if isinstance(kind, str) and kind.endswith("_tool_result"):
            names.append(block.get("tool_use_id"))
        needs.extend(name for name in names if isinstance(name, str) and name not in calls)
        if kind in _SERVED and isinstance(block.get("id"), str):
            calls[block["id"]] = None
    return tuple(calls), tuple(needs)


def kind_of(message: Any) -> str:
    """Return the kind of an element, see `USERS`."""
    if not isinstance(message, dict):
        return ""
    role, content = message.get("role"), message.get("content")
    blocks = content if isinstance(content, list) else [{"type": "text"}]
    types = [block.get("type") if isinstance(block, dict) else None for block in blocks]
    if role == "user":
        return "results" if all(one == "tool_result" for one in types) else "words"
    if role == "assistant":
        return "thought" if types and types[0] in _THINKING else "said"
    return _kind_of_system(content, types) if role == "system" else ""


def _kind_of_system(content: Any, types: Sequence[Any]) -> str:
    if not isinstance(content, str | list):
        return "sealed"
    may_move = all(one == "text" or changed_tool(block) for one, block in zip(types, content, strict=False))
    return "system" if may_move else "changes"


def changed_tool(block: Any) -> str | None:
    """Return the name of the tool that a block withdraws or offers by name; None for any other block."""
    if not isinstance(block, dict) or block.get("type") not in TOOL_CHANGES:
        return None
    tool = block.get("tool")
    if not isinstance(tool, dict) or tool.get("type") != _REFERENCE or set(tool) != {"type", "name"}:
        return None
    return tool["name"] if isinstance(tool["name"], str) else None


def _is_parsable(message: Any) -> bool:
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        return False
    content = message.get("content")
    return isinstance(content, list) and all(isinstance(block, dict) for block in content)


def arguments_of(raw: bytes) -> list[str]:
    """Return the arguments of the calls of an element, as compact JSON."""
    blocks = [fields_of(block) for block in items_of(fields_of(raw)["content"])]
    return [compact(block.get("input", b"{}")) for block in blocks if decode(block.get("type", b"null")) == _CALL]


def assistant_message(message: Mapping[str, Any], content: Sequence[Any], arguments: Sequence[str]) -> dict[str, Any]:
    """Return what the assistant said as a chat message; `arguments` are those of its calls."""
    call_blocks = [block for block in content if is_call(block)]
    calls = [_call(block, text) for block, text in zip(call_blocks, arguments, strict=True)]
    parts = as_chat_parts([block for block in content if not is_call(block)])
    message_fields: dict[str, Any] = {"role": "assistant", "content": parts}
    if calls:
        message_fields |= {"content": parts or None, "tool_calls": calls}
    return message_fields | _other_fields(message)


def is_call(block: Mapping[str, Any]) -> bool:
    """Return True if a block is a call. It is only dropped together with its message."""
    return block.get("type") == _CALL


def called_tools(content: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the names of the called tools, whether the client or the provider runs them."""
    names = (block.get("name") for block in content if _is_call_type(block.get("type")))
    return tuple([name for name in names if isinstance(name, str)])


def _is_call_type(kind: Any) -> bool:
    return isinstance(kind, str) and kind.endswith(_CALL)


def loaded_tools(content: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the names of the tools that search results load, from searches of the client and of Anthropic."""
    return tuple([name for block in content for name in _tool_references(block.get("content"))])


def _tool_references(content: Any) -> Iterator[str]:
    references = content.get("tool_references") if isinstance(content, dict) else content
    for part in references if isinstance(references, list) else ():
        if isinstance(part, dict) and part.get("type") == _REFERENCE and isinstance(part.get("tool_name"), str):
            yield part["tool_name"]


def _call(block: Mapping[str, Any], arguments: str) -> dict[str, Any]:
    function = {"name": block.get("name"), "arguments": arguments}
    return {"id": block.get("id"), "type": "function", "function": function} | _marks(block)


def _pieces_of_user(message: Mapping[str, Any], content: Sequence[Any]) -> Iterator[Piece]:
    results = [number for number, block in enumerate(content) if block.get("type") == "tool_result"]
    words = frozenset(range(len(content))).difference(results)
    for number in results:
        result = ChatMessage.of(encode(_result(content[number])))
        yield Piece(result, frozenset({number}), is_result=True, loads=loaded_tools([content[number]]))
    if words or not content:
        parts = as_chat_parts([content[number] for number in sorted(words)])
        is_held = any(content[number].get("type") == "mid_conv_system" for number in words)
        raw = encode({"role": "user", "content": parts} | _other_fields(message))
        yield Piece(ChatMessage.of(raw), words, is_held)


def _result(block: Mapping[str, Any]) -> dict[str, Any]:
    content = block.get("content")
    shown = as_chat_parts(content) if isinstance(content, list) else content if isinstance(content, str) else ""
    message = {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": shown}
    return message | _marks(block) | ({"is_error": True} if block.get("is_error") is True else {})


def _marks(block: Mapping[str, Any]) -> dict[str, Any]:
    return {"cache_control": block["cache_control"]} if block.get("cache_control") else {}


def _other_fields(message: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name not in ("role", "content")}
