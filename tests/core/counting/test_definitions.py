"""Tools and schemas of answers as they are weighed, before a family's numbers come to them."""

from __future__ import annotations

import json
from typing import Any

from gateway.core.counting.definitions import count_tools, shown_schema
from gateway.core.counting.heuristic import HeuristicCounter


def test_a_field_that_bears_the_name_of_a_schema_word_is_kept() -> None:
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


def test_a_schema_deeper_than_any_is_left_as_it_is() -> None:
    deep: Any = {"format": "x"}
    for _ in range(70):
        deep = {"items": deep}
    assert '"format"' in json.dumps(shown_schema(deep))


def test_tools_that_are_deferred_or_run_by_the_provider_are_told_apart() -> None:
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


def test_the_grammar_of_a_tool_and_a_schema_of_any_kind_of_tool_are_weighed(words: Any) -> None:
    plain = {"type": "custom", "name": "run", "description": "Runs it."}
    grammar = {"type": "grammar", "syntax": "lark", "definition": "word " * 50}
    bare, more = (count_tools([one], words) for one in (plain, {**plain, "format": grammar}))
    assert min(more.json - bare.json, more.typescript - bare.typescript) >= 50
    assert count_tools([{"type": "of_a_host", "name": "f", "input_schema": {"type": "object"}}], words).count == 1
