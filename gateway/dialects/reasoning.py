"""Find out whether a request turns thinking on, and whether its messages contain thinking."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from gateway.dialects.fields import UNREADABLE, decode

#: Fields that turn thinking on or off, with their APIs. Anthropic, DeepSeek and Kimi: `thinking`. Alibaba:
#: `enable_thinking`. Servers of open models: `chat_template_kwargs`. OpenRouter: `reasoning`. OpenAI:
#: `reasoning_effort`.
THINKING_FIELDS: Final = ("thinking", "enable_thinking", "chat_template_kwargs", "reasoning", "reasoning_effort")
#: what a switch is called within `chat_template_kwargs`
_SWITCHES: Final = ("enable_thinking", "thinking")
#: keys and types that stand in messages with thinking blocks, as the bytes of a JSON string. Within the text of a
#: message the quotes are escaped, so that a text which mentions them has no such bytes.
_THINKING: Final = (
    *(b'"thinking"', b'"redacted_thinking"', b'"thinking_blocks"'),
    *(b'"reasoning"', b'"reasoning_details"', b'"encrypted_content"'),
)
_REFERENCE: Final = "tool_reference"
_LIST: Final = msgspec.json.Decoder(list[msgspec.Raw])


def turns_thinking_on(fields: Mapping[str, bytes]) -> bool | None:
    """Return whether a request turns thinking on; False if it turns it off, None if it says nothing.

    Where one field turns it on and another off, it counts as on: providers differ in which of them they read.
    """
    said = [_SAYS[name](decode(fields[name])) for name in THINKING_FIELDS if name in fields]
    return True if True in said else False if False in said else None


def has_thinking(messages: bytes) -> bool:
    """Return whether messages hold thinking blocks. Reads no JSON, and may say so of a tool call with such a key."""
    return any(word in messages for word in _THINKING)


def referenced_tools(messages: bytes) -> frozenset[str]:
    """Return the tools that messages refer to instead of listing them (Anthropic).

    Results of a tool search and `tool_addition` or `tool_removal` blocks do. A request whose list of tools lacks one of
    them is refused: https://platform.claude.com/docs/en/agents-and-tools/tool-use/tool-search-tool,
    https://platform.claude.com/docs/en/build-with-claude/mid-conversation-system-messages.
    """
    word = f'"{_REFERENCE}"'.encode()
    if word not in messages:
        return frozenset()
    try:
        referring = [bytes(raw) for raw in _LIST.decode(messages) if word in bytes(raw)]
    except UNREADABLE:
        return frozenset()
    return frozenset(_references(map(decode, referring)))


def _references(values: Iterable[Any]) -> set[str]:
    found, left = set[str](), list(values)
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += value
        elif isinstance(value, dict):
            if value.get("type") == _REFERENCE:
                found |= {name for name in (value.get("name"), value.get("tool_name")) if isinstance(name, str)}
            left += value.values()
    return found


def _by_type(value: Any) -> bool | None:
    """`thinking`: its type; Kimi and some servers also take true or false."""
    kind = value.get("type") if isinstance(value, dict) else None
    return _by_switch(value) if not isinstance(kind, str) else kind != "disabled"


def _by_switch(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _by_template(value: Any) -> bool | None:
    said = [_by_switch(value.get(name)) for name in _SWITCHES] if isinstance(value, dict) else []
    return True if True in said else False if False in said else None


def _by_effort(value: Any) -> bool | None:
    return value != "none" if isinstance(value, str) else None


def _by_reasoning(value: Any) -> bool | None:
    """`reasoning`: its effort; OpenRouter also has `enabled` and `max_tokens`."""
    if not isinstance(value, dict):
        return None
    said = [_by_switch(value.get("enabled")), _by_effort(value.get("effort")), "max_tokens" in value or None]
    return False if False in said else True if True in said else None


_SAYS: Final = {
    "thinking": _by_type,
    "enable_thinking": _by_switch,
    "chat_template_kwargs": _by_template,
    "reasoning": _by_reasoning,
    "reasoning_effort": _by_effort,
}
