from __future__ import annotations

from typing import Any

import pytest

from gateway.mock.replies import chunked
from gateway.mock.schemas import sample


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "string"}, "sample value"),
        ({"type": "string", "format": "date"}, "2024-01-01"),
        ({"type": "string", "minLength": 15}, "sample valuexxx"),
        ({"type": "string", "maxLength": 3}, "sam"),
        ({"type": "integer"}, 1),
        ({"type": "number", "minimum": 5}, 5),
        ({"type": "integer", "exclusiveMinimum": 5}, 6),
        ({"type": "boolean"}, True),
        ({"type": ["null", "string"]}, None),
        ({"enum": ["red", "blue"]}, "red"),
        ({"const": 7}, 7),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 2}, [1, 1]),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, 1),
        ({"type": "object"}, {}),
        ({"properties": {"a": {"type": "integer"}, "b": {}}}, {"a": 1, "b": "sample b"}),
        ({"type": "object", "properties": {"a": {}, "b": {}}, "required": ["b"]}, {"b": "sample b"}),
        ({"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer"}}}, 1),
    ],
)
def test_sample_satisfies_the_schema(schema: dict[str, Any], expected: object) -> None:
    assert sample(schema) == expected


def test_recursive_schema_terminates() -> None:
    node = {
        "type": "object",
        "properties": {"children": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
        "required": ["children"],
    }
    value = sample({"$ref": "#/$defs/node", "$defs": {"node": node}})
    assert isinstance(value, dict)
    assert "None" not in str(value)


def test_text_is_split_into_chunks() -> None:
    assert chunked("abcdef", 3) == ["ab", "cd", "ef"]
    assert chunked("ab", 5) == ["a", "b"]
    assert chunked("one two", None) == ["one", " two"]
