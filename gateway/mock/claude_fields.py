"""Read the fields of a request that the rules of Claude models check."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gateway.mock.claude_rules import ModelRules
from gateway.mock.prefixes import blocks_of
from gateway.mock.wire import JsonObject


class Controls(msgspec.Struct):
    """The fields of a request that the rules check, without its messages."""

    system: object = None
    tools: list[JsonObject] | None = None
    thinking: JsonObject | None = None
    tool_choice: JsonObject | None = None
    output_config: JsonObject | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: float | None = None
    stop_sequences: list[str] | None = None
    context_management: JsonObject | None = None
    compaction: JsonObject | None = None
    fallbacks: list[JsonObject] | str | None = None

    @property
    def task_budget(self) -> JsonObject:
        """Return the task budget; empty if there is none."""
        budget = (self.output_config or {}).get("task_budget")
        return budget if isinstance(budget, dict) else {}

    @property
    def forces_a_tool(self) -> bool:
        """Return True if the response must call a tool."""
        return (self.tool_choice or {}).get("type") in ("any", "tool")

    def mode(self, rules: ModelRules) -> str:
        """Return the type of thinking; the model's default if the request does not set it."""
        if self.thinking is None:
            return "adaptive" if rules.thinks else "disabled"
        return str(self.thinking.get("type"))

    @property
    def hides_thinking(self) -> bool:
        """Return True if the request asks for thinking blocks without their text."""
        return (self.thinking or {}).get("display") == "omitted"

    def thinks(self, rules: ModelRules, messages: Sequence[JsonObject]) -> bool:
        """Return True if the response starts with thinking; with `between_tools`, only after a tool result."""
        mode = self.mode(rules)
        if self.forces_a_tool or mode == "disabled":
            return False
        return mode != "between_tools" or has_tool_result(messages)


def has_tool_result(messages: Sequence[JsonObject]) -> bool:
    """Return True if the last message contains a tool result."""
    blocks = blocks_of(messages[-1].get("content")) if messages else []
    return any(block.get("type") == "tool_result" for block in blocks)
