"""Read system messages that change the tools inside a conversation, and refuse invalid ones.

Source: https://platform.claude.com/docs/en/build-with-claude/mid-conversation-system-messages, "Limitations".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from gateway.mock.betas import INLINE_TOOLS, TOOL_CHANGES
from gateway.mock.claude_rules import ModelRules
from gateway.mock.prefixes import blocks_of
from gateway.mock.wire import ApiError, JsonObject

_BETAS: Final = frozenset({TOOL_CHANGES, INLINE_TOOLS})
_CHANGES: Final = ("tool_addition", "tool_removal")


def refuse_tool_changes(
    tools: Sequence[JsonObject], rules: ModelRules, messages: Sequence[JsonObject], betas: frozenset[str]
) -> None:
    """Refuse tool changes in a wrong place, without model support, without beta, or of undeclared tools.

    Raises:
        ApiError: 400.
    """
    for number, message in enumerate(messages):
        changes = [block for block in blocks_of(message.get("content")) if block.get("type") in _CHANGES]
        if message.get("role") != "system" or not changes:
            continue
        _check_place(number, messages)
        if not (rules.tool_changes and betas & _BETAS):
            raise ApiError(400, f"messages.{number}.content.0.type: Input should be 'text'")
        names = [tool.get("name") for tool in tools]
        for name in _unresolved(changes, names):
            raise ApiError(400, f'messages.{number}: tool reference "{name}" is not declared in `tools`')


def withdrawn_tools(messages: Sequence[JsonObject]) -> list[str]:
    """Return the names of the tools that are withdrawn at the end of a conversation; the model cannot call them."""
    names: dict[str, None] = {}
    for message in messages:
        for block in blocks_of(message.get("content")) if message.get("role") == "system" else ():
            tool = block.get("tool")
            name = tool.get("name") if isinstance(tool, dict) else None
            if not isinstance(name, str):
                continue
            if block.get("type") == "tool_removal":
                names[name] = None
            elif block.get("type") == "tool_addition":
                names.pop(name, None)
    return list(names)


def _check_place(number: int, messages: Sequence[JsonObject]) -> None:
    """Refuse a system message unless a user message precedes it, and an assistant message or the end follows it."""
    roles = [message.get("role") for message in messages]
    before = next((role for role in reversed(roles[:number]) if role != "system"), None)
    after = next((role for role in roles[number:] if role != "system"), "assistant")
    if before != "user" or after != "assistant":
        raise ApiError(
            400,
            f"messages.{number}: a system message must follow a user message and precede an assistant message or end "
            "the array",
        )


def _unresolved(changes: Sequence[JsonObject], names: Sequence[object]) -> Iterator[object]:
    for change in changes:
        tool = change.get("tool")
        if isinstance(tool, dict) and tool.get("type") == "tool_reference" and tool.get("name") not in names:
            yield tool.get("name")
