"""Check the context edits of a request, and clear the tool results and thinking that they name.

Cleared content is neither read by the model nor billed. Clearing does not invalidate thinking that is bound to the
conversation. Source: platform.claude.com/docs/en/build-with-claude/context-editing. The error messages come from tests
against the real API (2026-09-26).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Final, Literal, NamedTuple, TypeVar

import msgspec

from gateway.mock import betas
from gateway.mock.claude_sizes import total_of
from gateway.mock.prefixes import blocks_of, is_thinking
from gateway.mock.wire import ApiError, JsonObject

#: The minimum of input tokens for the threshold of a compaction.
MIN_COMPACTION_TRIGGER: Final = 50_000
#: The text that replaces a cleared tool result. The text of the real API is not published.
CLEARED: Final = "[This tool result was cleared.]"

_AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]
_NotNegative = Annotated[int, msgspec.Meta(ge=0)]
T = TypeVar("T")


class InputTokens(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="input_tokens"):
    """A number of input tokens."""

    value: _AtLeastOne


class ToolUses(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="tool_uses"):
    """A number of tool uses."""

    value: _NotNegative


class ThinkingTurns(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="thinking_turns"):
    """A number of assistant messages with thinking."""

    value: _AtLeastOne


class AllTurns(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="all"):
    """All assistant messages."""


class ClearToolUses(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="clear_tool_uses_20250919"):
    """Clear the oldest tool results."""

    trigger: InputTokens | ToolUses = InputTokens(100_000)
    keep: ToolUses = ToolUses(3)
    clear_at_least: InputTokens | None = None
    exclude_tools: list[str] | None = None
    clear_tool_inputs: bool | list[str] | None = None


class ClearThinking(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="clear_thinking_20251015"):
    """Clear the oldest thinking. `keep`: None for the model's default."""

    keep: ThinkingTurns | AllTurns | Literal["all"] | None = None


class Compact(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="compact_20260112"):
    """Summarize the conversation when it is long."""

    trigger: InputTokens | None = None
    pause_after_compaction: bool = False
    instructions: str | None = None

    @property
    def threshold(self) -> int:
        """Return the number of input tokens at which the API compacts."""
        return self.trigger.value if self.trigger else 150_000


Edit = ClearToolUses | ClearThinking | Compact
_BETA_EDITS: Final = {
    "compact_20260112": {betas.THRESHOLD_COMPACTION},
    "clear_tool_uses_20250919": {betas.CONTEXT_EDITING, betas.THRESHOLD_COMPACTION},
    "clear_thinking_20251015": {betas.CONTEXT_EDITING, betas.THRESHOLD_COMPACTION},
}


class _ContextManagement(msgspec.Struct, forbid_unknown_fields=True):
    edits: list[Edit] = []


class Edited(NamedTuple):
    """The messages after the edits, and a report of what was cleared."""

    messages: list[JsonObject]
    applied: list[JsonObject]


def read_edits(value: object, named: frozenset[str], *, thinks: bool) -> tuple[Edit, ...]:
    """Return the edits of a request.

    Args:
        value: the `context_management` of the request.
        named: the betas of the request.
        thinks: thinking is on.

    Raises:
        ApiError: 400, the edits are not valid, or the request does not name their beta.
    """
    if value is None:
        return ()
    if named.isdisjoint({betas.CONTEXT_EDITING, betas.THRESHOLD_COMPACTION}):
        raise ApiError(400, f"context_management: {betas.EXTRA_INPUTS}")
    _refuse_tags(value, named)
    edits = read_field(value, _ContextManagement, "context_management").edits
    for number, edit in enumerate(edits):
        if isinstance(edit, Compact) and edit.threshold < MIN_COMPACTION_TRIGGER:
            problem = f"trigger.value must be at least {MIN_COMPACTION_TRIGGER}"
            raise ApiError(400, f"context_management.edits.{number}.compact_20260112: {problem}")
        if isinstance(edit, ClearThinking):
            _refuse_thinking_edit(number, thinks=thinks)
    return tuple(edits)


def read_field(value: object, kind: type[T], path: str) -> T:
    """Return a field of a request, converted to `kind`.

    Raises:
        ApiError: 400, the field has the wrong type.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ApiError(400, f"{path}: {error}") from None


def _refuse_thinking_edit(number: int, *, thinks: bool) -> None:
    name = "`clear_thinking_20251015`"
    if number:
        first = f"{name} must be the first strategy in `context_management.edits` when provided"
        raise ApiError(400, f"context_management: {first}")
    if not thinks:
        raise ApiError(400, f"{name} strategy requires `thinking` to be enabled or adaptive")


def _refuse_tags(value: object, named: frozenset[str]) -> None:
    """Refuse edits of a type that no beta of the request allows."""
    edits = value.get("edits") if isinstance(value, dict) else None
    allowed = [kind for kind, required in _BETA_EDITS.items() if not named.isdisjoint(required)]
    for number, edit in enumerate(edits if isinstance(edits, list) else []):
        kind = edit.get("type") if isinstance(edit, dict) else None
        if kind not in allowed:
            expected = ", ".join(map(repr, sorted(allowed)))
            message = f"Input tag '{kind}' found using 'type' does not match any of the expected tags: {expected}"
            raise ApiError(400, f"context_management.edits.{number}: {message}")


def apply_edits(messages: list[JsonObject], edits: Sequence[Edit], *, overhead: int, keeps_thinking: bool) -> Edited:
    """Return the messages after the edits.

    Args:
        messages: the messages before the edits.
        edits: the edits of the request, in order.
        overhead: input tokens of system prompt and tools, which count towards a trigger.
        keeps_thinking: the model keeps all thinking by default.
    """
    if not edits:
        return Edited(messages, [])
    original = total_of(messages) + overhead
    applied: list[JsonObject] = []
    for edit in edits:
        if isinstance(edit, ClearThinking):
            cleared, count = _without_thinking(messages, edit, keeps_all=keeps_thinking)
            report: JsonObject = {"type": "clear_thinking_20251015", "cleared_thinking_turns": count}
            minimum = 1
        elif isinstance(edit, ClearToolUses) and _is_due(edit, messages, original):
            cleared, count = _without_results(messages, edit)
            report = {"type": "clear_tool_uses_20250919", "cleared_tool_uses": count}
            minimum = edit.clear_at_least.value if edit.clear_at_least else 1
        else:
            continue
        tokens = total_of(messages) - total_of(cleared)
        if count and tokens >= minimum:
            messages = cleared
            applied.append({**report, "cleared_input_tokens": tokens})
    return Edited(messages, applied)


def _is_due(edit: ClearToolUses, messages: Sequence[JsonObject], tokens: int) -> bool:
    if isinstance(edit.trigger, InputTokens):
        return tokens > edit.trigger.value
    return len(_calls(messages)) > edit.trigger.value


def _calls(messages: Sequence[JsonObject]) -> dict[str, str]:
    """Return the names of the called tools by call id, oldest call first."""
    blocks = [block for message in messages for block in blocks_of(message.get("content"))]
    return {str(block.get("id")): str(block.get("name")) for block in blocks if block.get("type") == "tool_use"}


def _without_results(messages: Sequence[JsonObject], edit: ClearToolUses) -> tuple[list[JsonObject], int]:
    calls = _calls(messages)
    old = list(calls)[: len(calls) - edit.keep.value] if edit.keep.value < len(calls) else []
    cleared = {call for call in old if calls[call] not in (edit.exclude_tools or ())}
    inputs = edit.clear_tool_inputs
    without_input = {call for call in cleared if inputs is True or (isinstance(inputs, list) and calls[call] in inputs)}

    def clear(block: JsonObject) -> JsonObject:
        if block.get("type") == "tool_result" and block.get("tool_use_id") in cleared:
            return {**block, "content": CLEARED}
        if block.get("type") == "tool_use" and block.get("id") in without_input:
            return {**block, "input": {}}
        return block

    return [_mapped(message, clear) for message in messages], len(cleared)


def _mapped(message: JsonObject, change: Callable[[JsonObject], JsonObject]) -> JsonObject:
    content = message.get("content")
    return {**message, "content": [change(block) for block in content]} if isinstance(content, list) else message


def _without_thinking(
    messages: Sequence[JsonObject], edit: ClearThinking, *, keeps_all: bool
) -> tuple[list[JsonObject], int]:
    if edit.keep is None:
        kept = None if keeps_all else 1
    else:
        kept = edit.keep.value if isinstance(edit.keep, ThinkingTurns) else None
    turns = [n for n, message in enumerate(messages) if any(map(is_thinking, blocks_of(message.get("content"))))]
    old = set() if kept is None else set(turns[:-kept])
    cleared = [_remove_thinking(message) if n in old else message for n, message in enumerate(messages)]
    return cleared, len(old)


def _remove_thinking(message: JsonObject) -> JsonObject:
    return {**message, "content": [block for block in blocks_of(message.get("content")) if not is_thinking(block)]}
