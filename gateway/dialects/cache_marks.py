"""Set cache marks (`cache_control`) in a request to a Claude model whose client sets none.

Claude reads a prompt from the cache only up to a block that has a mark. A request gets at most three, in the order in
which the provider reads it:

1. the end of the system prompt, or else the last tool;
2. the user message before the last reply of the model, where the previous call of an agent had its last mark;
3. the newest message.

The last two are set only if a further call is likely: the request offers tools, or contains a reply of the model.
https://platform.claude.com/docs/en/build-with-claude/prompt-caching
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from gateway.core.counting.measure import Wire
from gateway.core.counting.request import ITEMS
from gateway.dialects.fields import join

_MARK: Final = b'"cache_control"'
#: kept for five minutes after its last use
_EPHEMERAL: Final = msgspec.Raw(b'{"type":"ephemeral"}')
#: blocks that may have a mark, by the format of the request
_MARKABLE: Final[Mapping[Wire, frozenset[str]]] = {
    "messages": frozenset({"text", "image", "document", "search_result", "tool_use", "tool_result"}),
    "chat": frozenset({"text"}),
}
_SYSTEM_ROLES: Final = frozenset({"system", "developer"})

_Object = dict[str, msgspec.Raw]
_OBJECT: Final = msgspec.json.Decoder(_Object)
_LIST: Final = msgspec.json.Decoder(list[msgspec.Raw])
_encode = msgspec.json.encode


def may_have_marks(wire: Wire, model: str, *, in_chat: bool) -> bool:
    """Return whether cache marks are of use in a request. `in_chat`: the provider accepts them in chat calls."""
    return "claude" in model.lower() and (wire == "messages" or (wire == "chat" and in_chat))


def with_cache_marks(fields: Mapping[str, object], wire: Wire, *, keep_strings: bool) -> dict[str, msgspec.Raw]:
    """Return the fields of a request that get cache marks, with these marks; empty if none can be set.

    Args:
        fields: system prompt, tools and messages of the request, as objects or encoded (`msgspec.Raw`).
        wire: its format.
        keep_strings: do not write a text that is a string as a list of one text block, which has place for a mark.
    """
    needed = {name: value for name, value in fields.items() if name in ("system", "tools", ITEMS[wire])}
    raws = {name: _encode(value) for name, value in needed.items() if value is not msgspec.UNSET}
    if any(_MARK in raw for raw in raws.values()):
        return {}  # The client sets its own.
    try:
        return _with_marks(raws, wire, keep_strings=keep_strings)
    except (msgspec.DecodeError, RecursionError):
        return {}  # The provider refuses what cannot be read.


def _with_marks(fields: Mapping[str, bytes], wire: Wire, *, keep_strings: bool) -> dict[str, msgspec.Raw]:
    raws: list[bytes | msgspec.Raw] = list(_LIST.decode(fields.get(ITEMS[wire], b"[]")))
    messages = [_OBJECT.decode(raw) for raw in raws]
    roles = [_role(message) for message in messages]
    changes: dict[str, msgspec.Raw] = {}
    places = _last_system(roles) if wire == "chat" else ()
    if wire == "messages":
        changes |= _marked_start(fields, keep_strings=keep_strings)
    if "assistant" in roles or _offers_tools(fields):
        places = (*places, *_newest_user_messages(roles))
    is_marked = False
    for index in places:
        content = _marked_content(messages[index].get("content"), wire, keep_strings=keep_strings)
        if content is not None:
            raws[index], is_marked = _encode({**messages[index], "content": content}), True
    return {**changes, ITEMS[wire]: join(raws)} if is_marked else changes


def _marked_start(fields: Mapping[str, bytes], *, keep_strings: bool) -> dict[str, msgspec.Raw]:
    """Return the system prompt with a mark at its end, or else the tools with a mark on the last one."""
    system = _marked_content(fields.get("system"), "messages", keep_strings=keep_strings)
    if system is not None:
        return {"system": system}
    tools = _LIST.decode(fields["tools"]) if _offers_tools(fields) else []
    for index in reversed(range(len(tools))):
        tool = _OBJECT.decode(tools[index])
        # A tool that the model searches for is not part of the beginning of the prompt.
        if bytes(tool.get("defer_loading", b"")) != b"true":
            tools[index] = msgspec.Raw(_encode({**tool, "cache_control": _EPHEMERAL}))
            return {"tools": join(tools)}
    return {}


def _marked_content(content: bytes | msgspec.Raw | None, wire: Wire, *, keep_strings: bool) -> msgspec.Raw | None:
    """Return the content of a message with a mark on its last block that can have one; None if there is none."""
    if content is None or bytes(content) == b"null":
        return None
    if bytes(content).startswith(b'"'):
        if keep_strings or not msgspec.json.decode(content).strip():
            return None
        return msgspec.Raw(b'[{"type":"text","text":%s,"cache_control":%s}]' % (bytes(content), bytes(_EPHEMERAL)))
    blocks = _LIST.decode(content)
    for index in reversed(range(len(blocks))):
        block = _OBJECT.decode(blocks[index])
        if _may_be_marked(block, wire):
            blocks[index] = msgspec.Raw(_encode({**block, "cache_control": _EPHEMERAL}))
            return join(blocks)
    return None


def _may_be_marked(block: _Object, wire: Wire) -> bool:
    kind = _text(block.get("type"))
    if kind not in _MARKABLE[wire]:
        return False
    return kind != "text" or bool(_text(block.get("text")).strip())


def _offers_tools(fields: Mapping[str, bytes]) -> bool:
    return fields.get("tools", b"").startswith(b"[{")


def _last_system(roles: Sequence[str]) -> tuple[int, ...]:
    """Return the index of the last message of the system prompt that a chat request begins with, if any."""
    count = next((index for index, role in enumerate(roles) if role not in _SYSTEM_ROLES), len(roles))
    return (count - 1,) if count else ()


def _newest_user_messages(roles: Sequence[str]) -> tuple[int, ...]:
    """Return the indices of the last message of a user or tool before the last reply, and of the last one of all."""
    sent = [index for index, role in enumerate(roles) if role in ("user", "tool")]
    reply = max((index for index, role in enumerate(roles) if role == "assistant"), default=-1)
    before = [index for index in sent if index < reply]
    return tuple(dict.fromkeys((*before[-1:], *sent[-1:])))


def _role(message: _Object) -> str:
    return _text(message.get("role"))


def _text(raw: bytes | msgspec.Raw | None) -> str:
    """Return the value if it is a string, else an empty one."""
    value = msgspec.json.decode(raw) if raw is not None else None
    return value if isinstance(value, str) else ""
