"""Read one message of Anthropic's Messages API as chat messages.

A user's message may hold the results of several calls and words of the user's: each result becomes a message of its
own, what is left becomes one. Thinking is a part that no rule changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gateway.core.conversation.message import decode, encode, read
from gateway.core.counting.parts import is_compaction
from gateway.core.views.raw import compact, fields_of, items_of
from gateway.core.views.view import ChatMessage, opaque, said

#: A tuple and no set: what is looked up in it may be any JSON, which cannot always be hashed.
_ROLES = ("user", "assistant")
#: The kinds of an element. Of the user: `words`, with results or without, or `results` alone. Of the assistant: `said`,
#: or `thought` where it begins with thinking. Of the operator: `system` if it holds texts, and tools that are withdrawn
#: or offered by name; `changes` if it holds more, such as definitions of tools; `sealed` if it cannot be written again.
#: The kind is empty where it is none of these.
USERS = ("words", "results")
SPOKEN = ("said", "thought")
SYSTEM = ("system", "changes", "sealed")
_THINKING = ("thinking", "redacted_thinking")
_CALL = "tool_use"
#: how calls and results are written, mostly
_TIED = (b'"tool_use"', b'"tool_result"')
#: calls that run where the model does; their results are the assistant's words
_SERVED = ("server_tool_use", "mcp_tool_use")
#: blocks of the operator's messages that withdraw a tool and offer it again
TOOL_CHANGES = WITHDRAW, OFFER = ("tool_removal", "tool_addition")
#: names a tool whose definition the model reads from there on, though it was deferred
_REFERENCE = "tool_reference"
#: bytes that a piece takes beside its message, and each of its names
_PIECE_BYTES = 250
_NAME_BYTES = 100


class Piece(NamedTuple):
    """One chat message, and the blocks of its element where it is not made of all of them."""

    message: ChatMessage
    blocks: frozenset[int] | None = None
    #: an instruction of the operator's is in it, or it belongs to what nobody here can read
    is_held: bool = False
    is_result: bool = False
    #: names of tools that were found by a search, and are loaded by this
    loads: tuple[str, ...] = ()
    #: names of tools that it calls
    calls: tuple[str, ...] = ()


class ReadMessage(NamedTuple):
    """One element: the messages it is made of where it stands alone, and what it is."""

    pieces: tuple[Piece, ...]
    kind: str
    #: it is an assistant's and holds calls
    calls: bool = False
    #: it stands for all before it
    is_compact: bool = False
    #: the provider signed the compaction in it
    is_signed: bool = False
    #: thinking blocks are in it
    thinks: bool = False
    is_opaque: bool = False
    #: nobody here can read it, and it may hold calls or results
    is_tied: bool = False
    #: ids of the calls in it that run where the model does, and of such calls in earlier elements that it needs
    served: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    #: ids of the calls in it that were made by code which runs where the model does
    coded: frozenset[str] = frozenset()
    #: results are in it, and other than results
    has_results: bool = False
    has_words: bool = True


def listed(content: Any) -> Iterable[Any]:
    """A content's blocks."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def size_of(found: ReadMessage) -> int:
    """Bytes that it takes."""
    names = sum(len(piece.loads) + len(piece.calls) for piece in found.pieces)
    return _NAME_BYTES * names + sum(_PIECE_BYTES + len(piece.message.raw) for piece in found.pieces)


def read_message(raw: bytes) -> ReadMessage:
    """What an element is. Nothing fails: what cannot be read is told of as it stands."""
    message, is_odd = read(raw)
    if isinstance(message, dict) and message.get("role") in _ROLES and isinstance(message.get("content"), str):
        # As in a chat request; what cannot be written anew is sealed wherever it is read.
        return ReadMessage((Piece(ChatMessage.of(raw)),), kind_of(message))
    kind = kind_of(message)
    content = message["content"] if _is_listed(message) else []
    served, needs = _served(content) if kind in SPOKEN else ((), ())
    if is_odd or not _is_listed(message):
        kind = "sealed" if is_odd and kind in SYSTEM else kind
        is_tied = kind not in SYSTEM and any(mark in raw for mark in _TIED)
        piece = Piece(ChatMessage.of(opaque(raw)))
        return ReadMessage((piece,), kind, is_opaque=True, is_tied=is_tied, served=served, needs=needs)
    if message["role"] == "user":
        pieces = tuple(_of_user(message, content))
        results = [piece.is_result for piece in pieces]
        return ReadMessage(pieces, kind, has_results=any(results), has_words=not all(results))
    calls = any(map(is_call, content))
    words = encode(spoken(message, content, arguments_of(raw) if calls else ()))
    return ReadMessage(
        (Piece(ChatMessage.of(words), loads=loaded(content), calls=called(content)),),
        kind,
        calls=calls,
        is_compact=any(map(is_compaction, content)),
        is_signed=any(is_compaction(block) and bool(block.get("signature")) for block in content),
        thinks=any(block.get("type") in _THINKING for block in content),
        served=served,
        needs=needs,
        coded=frozenset(str(block.get("id")) for block in content if is_call(block) and _by_code(block)),
    )


def after_signed(reads: Sequence[ReadMessage]) -> range:
    """Return the places after the last signed compaction, up to the last thinking block.

    Thinking in turns that were kept after it stays valid only while these turns follow it unchanged:
    https://platform.claude.com/docs/en/build-with-claude/compaction-thinking-blocks
    """
    signed = max((place for place, one in enumerate(reads) if one.is_signed), default=len(reads))
    thinking = max((place for place, one in enumerate(reads) if one.thinks), default=0)
    return range(signed + 1, thinking + 1)


def _by_code(block: Mapping[str, Any]) -> bool:
    caller = block.get("caller")
    return isinstance(caller, dict) and "tool_id" in caller


def _served(content: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Ids of calls that run where the model does, and those that stand in an earlier message."""
    served: dict[str, None] = {}
    needs: list[str] = []
    for block in content:
        kind, caller = block.get("type"), block.get("caller")
        names = [caller.get("tool_id")] if isinstance(caller, dict) else []
        if isinstance(kind, str) and kind.endswith("_tool_result"):
            names.append(block.get("tool_use_id"))
        needs.extend(name for name in names if isinstance(name, str) and name not in served)
        if kind in _SERVED and isinstance(block.get("id"), str):
            served[block["id"]] = None
    return tuple(served), tuple(needs)


def kind_of(message: Any) -> str:
    """See `USERS`."""
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


def _is_listed(message: Any) -> bool:
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        return False
    content = message.get("content")
    return isinstance(content, list) and all(isinstance(block, dict) for block in content)


def arguments_of(raw: bytes) -> list[str]:
    """The arguments of an element's calls, as compact JSON."""
    blocks = [fields_of(block) for block in items_of(fields_of(raw)["content"])]
    return [compact(block.get("input", b"{}")) for block in blocks if decode(block.get("type", b"null")) == _CALL]


def spoken(message: Mapping[str, Any], content: Sequence[Any], arguments: Sequence[str]) -> dict[str, Any]:
    """What the assistant said as a chat message; `arguments`: of its calls."""
    used = [block for block in content if is_call(block)]
    calls = [_call(block, text) for block, text in zip(used, arguments, strict=True)]
    parts = said([block for block in content if not is_call(block)])
    found: dict[str, Any] = {"role": "assistant", "content": parts}
    if calls:
        found |= {"content": parts or None, "tool_calls": calls}
    return found | _other(message)


def is_call(block: Mapping[str, Any]) -> bool:
    """A call: it is only left out with its message."""
    return block.get("type") == _CALL


def called(content: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """The names of the tools that are called, wherever they run."""
    names = (block.get("name") for block in content if _is_use(block.get("type")))
    return tuple([name for name in names if isinstance(name, str)])


def _is_use(kind: Any) -> bool:
    return isinstance(kind, str) and kind.endswith(_CALL)


def loaded(content: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """The names of the tools that results of searches load, those of the client's and those of Anthropic's own."""
    return tuple([name for block in content for name in _references(block.get("content"))])


def _references(content: Any) -> Iterator[str]:
    found = content.get("tool_references") if isinstance(content, dict) else content
    for part in found if isinstance(found, list) else ():
        if isinstance(part, dict) and part.get("type") == _REFERENCE and isinstance(part.get("tool_name"), str):
            yield part["tool_name"]


def _call(block: Mapping[str, Any], arguments: str) -> dict[str, Any]:
    function = {"name": block.get("name"), "arguments": arguments}
    return {"id": block.get("id"), "type": "function", "function": function} | _marks(block)


def _of_user(message: Mapping[str, Any], content: Sequence[Any]) -> Iterator[Piece]:
    results = [number for number, block in enumerate(content) if block.get("type") == "tool_result"]
    words = frozenset(range(len(content))).difference(results)
    for number in results:
        result = ChatMessage.of(encode(_result(content[number])))
        yield Piece(result, frozenset({number}), is_result=True, loads=loaded([content[number]]))
    if words or not content:
        parts = said([content[number] for number in sorted(words)])
        is_held = any(content[number].get("type") == "mid_conv_system" for number in words)
        raw = encode({"role": "user", "content": parts} | _other(message))
        yield Piece(ChatMessage.of(raw), words, is_held)


def _result(block: Mapping[str, Any]) -> dict[str, Any]:
    content = block.get("content")
    shown = said(content) if isinstance(content, list) else content if isinstance(content, str) else ""
    found = {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": shown}
    return found | _marks(block) | ({"is_error": True} if block.get("is_error") is True else {})


def _marks(block: Mapping[str, Any]) -> dict[str, Any]:
    return {"cache_control": block["cache_control"]} if block.get("cache_control") else {}


def _other(message: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name not in ("role", "content")}
