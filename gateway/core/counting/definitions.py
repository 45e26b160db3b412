"""Count the tokens of tool definitions and of the response schema.

How many tokens these make is the family's to say (`estimate.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gateway.core.counting.binary import readable
from gateway.core.counting.measure import TokenCounter
from gateway.core.counting.tools import compact, typescript
from gateway.core.values import dataclass

#: how deep namespaces of tools are looked into that stand in one another: deeper than any in use
_MOST_NAMESPACES: Final = 8
#: parts of a schema that recorded usage shows no trace of
_UNSEEN: Final = frozenset(
    {
        *("additionalProperties", "$schema", "required", "format"),
        *("minimum", "maximum", "minLength", "maxLength"),
    }
)


@dataclass(frozen=True, slots=True)
class ToolDefinitions:
    """The tools of a request, weighed.

    Attributes:
        typescript: tokens of the functions, written as OpenAI shows them to a model.
        json: tokens of the functions, written as JSON.
        count: number of functions.
        server: number of tools that the provider runs.
        server_json: tokens of those, written as JSON.
        deferred: number of tools that are not shown to the model yet.
    """

    typescript: int = 0
    json: int = 0
    count: int = 0
    server: int = 0
    server_json: int = 0
    deferred: int = 0

    def plus(self, other: ToolDefinitions) -> ToolDefinitions:
        """Both together."""
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
    """Definitions of tools in any wire format, decoded. Their order does not matter."""
    total = NO_TOOLS
    for tool in value if isinstance(value, list) else [value]:
        total = total.plus(_count_tool(tool, counter, depth))
    return total


def _count_tool(tool: object, counter: TokenCounter, depth: int) -> ToolDefinitions:
    if not isinstance(tool, Mapping):
        return ToolDefinitions(server_json=counter.count(readable(tool)[0]))
    if isinstance(tool.get("tools"), list) and tool.get("type") == "namespace" and depth < _MOST_NAMESPACES:
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
    """A response schema without what usage shows no trace of."""
    if depth > 64:  # noqa: PLR2004  # deeper than any schema; a guard
        return schema
    if isinstance(schema, Mapping):
        # The keys of these are names of fields, not words of the schema language.
        return {
            key: {name: shown_schema(inner, depth + 1) for name, inner in value.items()}
            if key in ("properties", "$defs", "definitions") and isinstance(value, Mapping)
            else shown_schema(value, depth + 1)
            for key, value in schema.items()
            if key not in _UNSEEN
        }
    if isinstance(schema, list):
        return [shown_schema(item, depth + 1) for item in schema]
    return schema
