"""Count the tokens of tool definitions, and simplify response schemas for counting.

The model family turns these counts into provider tokens (`estimate.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gateway.core.counting.binary import readable
from gateway.core.counting.measure import TokenCounter
from gateway.core.counting.tools import compact, typescript
from gateway.core.values import dataclass

#: Maximum depth of nested tool namespaces, which is more than any request uses. Deeper ones count as JSON.
_MAX_NAMESPACE_DEPTH: Final = 8
#: schema keywords that have no effect on recorded usage
_UNBILLED: Final = frozenset(
    {
        *("additionalProperties", "$schema", "required", "format"),
        *("minimum", "maximum", "minLength", "maxLength"),
    }
)


@dataclass(frozen=True, slots=True)
class ToolDefinitions:
    """Token counts of the tools of a request.

    Attributes:
        typescript: tokens of the functions, written as TypeScript (the way OpenAI shows them to a model).
        json: tokens of the functions, written as JSON.
        count: number of functions.
        server: number of tools that the provider runs.
        server_json: tokens of the tools that the provider runs, written as JSON.
        deferred: number of tools that the model does not see yet.
    """

    typescript: int = 0
    json: int = 0
    count: int = 0
    server: int = 0
    server_json: int = 0
    deferred: int = 0

    def plus(self, other: ToolDefinitions) -> ToolDefinitions:
        """Add the counts of other tools."""
        return ToolDefinitions(
            self.typescript + other.typescript,
            self.json + other.json,
            self.count + other.count,
            self.server + other.server,
            self.server_json + other.server_json,
            self.deferred + other.deferred,
        )


NO_TOOLS: Final = ToolDefinitions()


def count_tools(value: object, counter: TokenCounter, depth: int = 0) -> ToolDefinitions:
    """Count the tokens of decoded tool definitions in any wire format. Their order does not matter."""
    total = NO_TOOLS
    for tool in value if isinstance(value, list) else [value]:
        total = total.plus(_count_tool(tool, counter, depth))
    return total


def _count_tool(tool: object, counter: TokenCounter, depth: int) -> ToolDefinitions:
    if not isinstance(tool, Mapping):
        return ToolDefinitions(server_json=counter.count(readable(tool)[0]))
    if isinstance(tool.get("tools"), list) and tool.get("type") == "namespace" and depth < _MAX_NAMESPACE_DEPTH:
        return count_tools(tool["tools"], counter, depth + 1)
    inner = tool.get("function", tool.get("custom"))
    holder = inner if isinstance(inner, Mapping) else tool
    name, description = holder.get("name"), holder.get("description")
    schema = holder.get("parameters", holder.get("input_schema"))
    if not isinstance(name, str) or (schema is None and tool.get("type") not in (None, "function", "custom")):
        return ToolDefinitions(server=1, server_json=counter.count(readable(tool)[0]))
    if tool.get("defer_loading") is True:
        return ToolDefinitions(deferred=1)
    about = description if isinstance(description, str) else ""
    grammar = holder.get("format") if schema is None else None
    extra = counter.count(compact(grammar)) if grammar is not None else 0
    return ToolDefinitions(
        typescript=counter.count(typescript(name, about, schema)) + extra,
        json=counter.count(name) + counter.count(about) + counter.count(compact(schema)) + extra,
        count=1,
    )


def shown_schema(schema: object, depth: int = 0) -> object:
    """Return a response schema without the keywords that have no effect on recorded usage."""
    if depth > 64:  # noqa: PLR2004  # deeper than any schema; a guard
        return schema
    if isinstance(schema, Mapping):
        # The keys of these objects are field names, not schema keywords.
        return {
            key: {name: shown_schema(inner, depth + 1) for name, inner in value.items()}
            if key in ("properties", "$defs", "definitions") and isinstance(value, Mapping)
            else shown_schema(value, depth + 1)
            for key, value in schema.items()
            if key not in _UNBILLED
        }
    if isinstance(schema, list):
        return [shown_schema(item, depth + 1) for item in schema]
    return schema
