"""Recognize requests with which a client compacts its conversation by an ordinary call: it asks for a summary.

Claude Code and Codex say so in headers (`gateway.core.calling_agent`) if they are configured to. Without these headers
it is recognized by the prompt in the last message. Each client has fixed sentences for it, at the start of a line.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from gateway.core.counting.measure import Wire
from gateway.core.counting.request import ITEMS
from gateway.core.views import VIEWED
from gateway.dialects.base import Call
from gateway.dialects.contents import is_too_large
from gateway.dialects.fields import UNREADABLE, decode

#: the beginnings of the prompts: of Claude Code (and Roo Code), of Codex, and of several versions of opencode
PROMPTS: Final = (
    "Your task is to create a detailed summary of ",
    "You are performing a CONTEXT CHECKPOINT COMPACTION",
    "Provide a detailed prompt for continuing our conversation above",
    "Create a new anchored summary from the conversation history",
    "Update the anchored summary ",
    "The <prior-summary> summarizes everything that happened before",
    "Summarize the older portion of the preceding conversation",
)
_AT_LINE_START: Final = re.compile("|".join(map(re.escape, PROMPTS)), re.MULTILINE)
_MARKS: Final = tuple(prompt.encode() for prompt in PROMPTS)
#: Bytes at each end of the messages that are searched. The prompts of Claude Code have up to 8,000 characters, and a
#: user can add instructions. Some versions of opencode write the prompt before the conversation, all in one message.
_SEARCHED: Final = 32 * 1024
#: Messages at the end that may have the prompt: the operator's system messages can follow it.
_LAST: Final = 2
_ITEMS: Final = msgspec.json.Decoder(list[msgspec.Raw])
#: a tuple, because a client may send a role that cannot be in a set
_NO_USER: Final = ("system", "developer")


def has_compaction_prompt(call: Call, wire: Wire | None) -> bool:
    """Return whether the last message of the user is a prompt with which a client compacts its conversation."""
    if wire is None or wire not in VIEWED:
        return False
    array = call.fields.get(ITEMS[wire])
    if array is None:
        return False
    view = memoryview(array)
    ends = bytes(view) if len(view) <= 2 * _SEARCHED else bytes(view[:_SEARCHED]) + bytes(view[-_SEARCHED:])
    return any(mark in ends for mark in _MARKS) and any(map(_is_prompt, _last_texts(bytes(array))))


def _is_prompt(text: str) -> bool:
    found = _AT_LINE_START.search(text)
    while found is not None:
        if found.start() == 0 or text[found.start() - 1] == "\n":
            return True
        found = _AT_LINE_START.search(text, found.end())
    return False


def _last_texts(array: bytes) -> list[str]:
    """Return the texts of the last message of the user; none if another message follows it."""
    if is_too_large(array):
        return []
    try:
        items = _ITEMS.decode(array) if array.lstrip().startswith(b"[") else [msgspec.Raw(array)]
    except UNREADABLE:
        return []
    for raw in reversed(items[-_LAST:]):
        message = decode(raw)
        if isinstance(message, str):
            return [message]
        if not isinstance(message, dict):
            return []
        if message.get("role") not in _NO_USER:
            return _texts(message) if message.get("role") == "user" else []
    return []


def _texts(message: dict[str, Any]) -> list[str]:
    """Return the texts of a message, without the results of tools in it."""
    content = message.get("content")
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") != "tool_result"]
    return [text for text in texts if isinstance(text, str)]
