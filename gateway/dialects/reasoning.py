"""Detect whether a request turns thinking on, and whether its messages contain thinking."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from gateway.dialects.fields import UNREADABLE, decode

#: Fields that turn thinking on or off, with their APIs. Anthropic, DeepSeek and Kimi: `thinking`. Alibaba:
#: `enable_thinking`. Servers of open models: `chat_template_kwargs`. OpenRouter: `reasoning`. OpenAI:
#: `reasoning_effort`.
THINKING_FIELDS: Final = ("thinking", "enable_thinking", "chat_template_kwargs", "reasoning", "reasoning_effort")
#: names of the switch in `chat_template_kwargs`
_SWITCHES: Final = ("enable_thinking", "thinking")
#: Keys and types in messages with thinking blocks, as the bytes of a JSON string. Quotes inside the text of a message
#: are escaped, so a text that mentions them does not match.
_THINKING: Final = (
    *(b'"thinking"', b'"redacted_thinking"', b'"thinking_blocks"'),
    *(b'"reasoning"', b'"reasoning_details"', b'"encrypted_content"'),
)
_REFERENCE: Final = "tool_reference"
_LIST: Final = msgspec.json.Decoder(list[msgspec.Raw])


def turns_thinking_on(fields: Mapping[str, bytes]) -> bool | None:
    """Return whether a request turns thinking on; False if it turns it off, None if it says nothing.

    If one field turns it on and another one off, it counts as on: providers differ in which field they read.
    """
    switches = [_READERS[name](decode(fields[name])) for name in THINKING_FIELDS if name in fields]
    return True if True in switches else False if False in switches else None


def has_thinking(messages: bytes) -> bool:
    """Return whether messages hold thinking blocks. No JSON is parsed, so a tool call with such a key matches too."""
    return any(word in messages for word in _THINKING)


def referenced_tools(messages: bytes) -> frozenset[str]:
    """Return the tools that messages refer to instead of listing them (Anthropic).

    Such messages are results of a tool search, and `tool_addition` or `tool_removal` blocks. A request is refused if
    its list of tools lacks one of them: https://platform.claude.com/docs/en/agents-and-tools/tool-use/tool-search-tool,
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
    names, left = set[str](), list(values)
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += value
        elif isinstance(value, dict):
            if value.get("type") == _REFERENCE:
                names |= {name for name in (value.get("name"), value.get("tool_name")) if isinstance(name, str)}
            left += value.values()
    return names


def _by_type(value: Any) -> bool | None:
    """Read `thinking`: its type; Kimi and some servers also accept true or false."""
    kind = value.get("type") if isinstance(value, dict) else None
    return _by_switch(value) if not isinstance(kind, str) else kind != "disabled"


def _by_switch(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _by_template(value: Any) -> bool | None:
    switches = [_by_switch(value.get(name)) for name in _SWITCHES] if isinstance(value, dict) else []
    return True if True in switches else False if False in switches else None


def _by_effort(value: Any) -> bool | None:
    return value != "none" if isinstance(value, str) else None


def _by_reasoning(value: Any) -> bool | None:
    """Read `reasoning`: its effort; OpenRouter also has `enabled` and `max_tokens`."""
    if not isinstance(value, dict):
        return None
    switches = [_by_switch(value.get("enabled")), _by_effort(value.get("effort")), "max_tokens" in value or None]
    return False if False in switches else True if True in switches else None


_READERS: Final = {
    "thinking": _by_type,
    "enable_thinking": _by_switch,
    "chat_template_kwargs": _by_template,
    "reasoning": _by_reasoning,
    "reasoning_effort": _by_effort,
}
