"""Read system messages that change which tools a conversation offers (Anthropic), and the beta that they need.

(https://platform.claude.com/docs/en/build-with-claude/mid-conversation-system-messages)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from gateway.core.views.read_messages import TOOL_CHANGES, WITHDRAW
from gateway.dialects.fields import UNREADABLE, decode

#: The beta for changes that name a tool by reference. Bedrock and Google Cloud accept it, too.
TOOL_CHANGES_BETA: Final = b"mid-conversation-tool-changes-2026-07-01"
_WORDS: Final = tuple(f'"{kind}"'.encode() for kind in TOOL_CHANGES)
#: An error about tool changes has one of these, in lower case: the blocks, the beta, or a system role inside a
#: conversation, which a host may not know.
_ABOUT: Final = (b"tool_removal", b"tool_addition", b"mid-conversation", b"unexpected role")
#: an error about the position of a system message, by a host that knows such messages
_ABOUT_PLACE: Final = (b"must follow", b"must immediately follow", b"must precede")
#: bytes of an error that are read
_MAX_BYTES: Final = 65_536
_PLACE: Final = re.compile(rb"\bmessages[.\[](\d{1,6})")
_LIST: Final = msgspec.json.Decoder(list[msgspec.Raw])


def changes_tools(messages: bytes) -> bool:
    """Return whether a client changes tools inside the conversation itself; True if the messages cannot be decoded.

    Changes inside a compaction block are ignored, because the provider wrote them.
    """
    if not any(word in messages for word in _WORDS):
        return False
    try:
        changing = [decode(bytes(raw)) for raw in _LIST.decode(messages) if any(word in bytes(raw) for word in _WORDS)]
    except UNREADABLE:
        return True
    return any(block.get("type") in TOOL_CHANGES for message in changing for block in _instructions(message))


def refuses_changes(refusal: bytes, sent: Sequence[bytes]) -> bool:
    """Return whether an error is about tool changes: it mentions them, or the place it names has one.

    An error about thinking blocks may name such a place as the first difference. It is not about the change.

    Args:
        refusal: the body of the error.
        sent: the messages of the request.
    """
    text = refusal[:_MAX_BYTES].lower()
    if b"signature" in text or any(word in text for word in _ABOUT_PLACE):
        return False
    place = _PLACE.search(text)
    index = int(place[1]) if place is not None else len(sent)
    is_at_change = index < len(sent) and any(word in sent[index] for word in _WORDS)
    return is_at_change or any(word in text for word in _ABOUT)


def withdrawn_by_compaction(messages: Sequence[bytes]) -> frozenset[str]:
    """Return the names of the tools that the newest compaction block lists as withdrawn."""
    for raw in reversed(messages):
        if b'"compaction"' in raw:
            blocks = [block for block in _blocks(decode(raw)) if block.get("type") == "compaction"]
            changes = [change for block in blocks for change in _list(block.get("tool_changes"))]
            names = dict[str, bool]()
            for change in changes:
                tool = change.get("tool") if isinstance(change, dict) else None
                name = tool.get("name") if isinstance(tool, dict) else None
                if isinstance(name, str):
                    names[name] = change.get("type") == WITHDRAW
            return frozenset(name for name, is_withdrawn in names.items() if is_withdrawn)
    return frozenset()


def _instructions(message: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the blocks of a system message, or the system blocks inside a user message."""
    for block in _blocks(message):
        if message.get("role") == "system":
            yield block
        elif block.get("type") == "mid_conv_system":
            yield from _blocks(block)


def _blocks(holder: Any) -> list[Mapping[str, Any]]:
    content = holder.get("content") if isinstance(holder, dict) else None
    return [block for block in _list(content) if isinstance(block, dict)]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
