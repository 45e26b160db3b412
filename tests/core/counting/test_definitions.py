"""Test the token counts of tools and response schemas before the numbers of a family are applied."""

from __future__ import annotations

import json
from typing import Any

from gateway.core.counting.definitions import count_tools, shown_schema
from gateway.core.counting.heuristic import HeuristicCounter


def test_property_named_like_a_schema_keyword_is_kept() -> None:
    schema = {
        "type": "object",
        "required": ["format"],
        "properties": {"format": {"type": "string", "format": "date", "minLength": 3}},
        "anyOf": [{"required": []}],
    }
    assert shown_schema(schema) == {
        "type": "object",
        "properties": {"format": {"type": "string"}},
        "anyOf": [{}],
    }


def test_very_deep_schema_stays_unchanged() -> None:
    deep: Any = {"format": "x"}
    for _ in range(70):
        deep = {"items": deep}
    assert '"format"' in json.dumps(shown_schema(deep))


def test_deferred_and_provider_run_tools_are_counted_separately() -> None:
    tools = [
        {"name": "a", "description": "b", "input_schema": {}},
        {"name": "later", "input_schema": {}, "defer_loading": True},
        {"type": "web_search_20250305", "name": "web_search"},
        {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "c", "parameters": {}}]},
        {"type": "custom", "name": "grammar", "format": {"syntax": "lark"}},
        "what",
    ]
    found = count_tools(tools, HeuristicCounter())
    assert (found.count, found.deferred, found.server) == (3, 1, 1)
    assert found.server_json > 0


def test_grammar_and_schema_of_any_tool_type_are_counted(words: Any) -> None:
    plain = {"type": "custom", "name": "run", "description": "Runs it."}
    grammar = {"type": "grammar", "syntax": "lark", "definition": "word " * 50}
    bare, more = (count_tools([one], words) for one in (plain, {**plain, "format": grammar}))
    assert min(more.json - bare.json, more.typescript - bare.typescript) >= 50
    assert count_tools([{"type": "of_a_host", "name": "f", "input_schema": {"type": "object"}}], words).count == 1
