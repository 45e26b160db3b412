from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.counting.tools import compact, properties_of, strings_of, typescript


def test_function_is_rendered_as_typescript() -> None:
    schema = {
        "type": "object",
        "description": "What to look for.",
        "properties": {
            "city": {"type": "string", "title": "City", "description": "The city\n  and its state"},
            "unit": {"type": "string", "enum": ["c", "f"], "default": "c"},
            "days": {"type": ["integer", "null"]},
            "place": {"type": "object", "properties": {"lat": {"type": "number"}}, "required": ["lat"]},
            "tags": {"type": "array", "items": {"$ref": "#/$defs/Tag"}},
            "either": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
            "fixed": {"const": 3},
        },
        "required": ["city"],
        "$defs": {"Tag": {"type": "string"}},
    }
    assert typescript("get_weather", "Weather of a city.\n\n  Be exact.", schema) == (
        "// Weather of a city.\n//\n// Be exact.\n"
        "type get_weather = (_: // What to look for.\n{\n"
        "// City\n//\n// The city\n// and its state\ncity: string,\n"
        'unit?: "c" | "f", // default: c\n'
        "days?: number | null,\n"
        "place?: {\nlat: number,\n},\n"
        "tags?: string[],\n"
        "either?: boolean | null,\n"
        "fixed?: 3,\n"
        "}) => any;\n\n"
    )


@pytest.mark.parametrize("schema", [None, {}, {"type": "object", "properties": {}}, [], "text", {"properties": 3}])
def test_function_without_parameters_is_rendered_without_arguments(schema: object) -> None:
    assert typescript("now", "", schema) == "type now = () => any;\n\n"
    assert properties_of(schema) == {}


def test_recursive_schema_ends() -> None:
    schema: dict[str, Any] = {
        "properties": {"next": {"$ref": "#/$defs/Node"}},
        "$defs": {"Node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}, "all": {"$ref": "x"}}}},
    }
    assert "any" in typescript("walk", "", schema)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["type", "properties", "items", "enum", "anyOf", "required", "$ref", "$defs", "default", "a"]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=20,
)


@given(st.text(max_size=5), st.text(max_size=20), JSON)
def test_any_schema_can_be_rendered(name: str, description: str, schema: Any) -> None:
    assert typescript(name, description, schema).endswith(" any;\n\n")


def chained(links: int, width: int) -> dict[str, Any]:
    """Return definitions that each refer to the next one many times."""
    known: dict[str, Any] = {f"d{link}": {"anyOf": [{"$ref": f"#/$defs/d{link + 1}"}] * width} for link in range(links)}
    known[f"d{links}"] = {"type": "string", "enum": ["one", "two"]}
    return {"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": known}


def nested(levels: int, kinds: list[object]) -> dict[str, Any]:
    """Return nested objects and arrays with many types each."""
    inner: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        inner = {"type": kinds, "items": inner, "properties": {"x": inner}}
    return {"properties": {"a": inner}}


@pytest.mark.parametrize(
    "schema",
    [
        chained(18, 50),
        chained(2, 3_000),
        nested(18, ["array", "object"] * 20),
        nested(18, [["array"], ["array", None]]),
    ],
    ids=["chain", "wide", "types", "types in types"],
)
def test_small_schema_does_not_make_endless_text(schema: dict[str, Any]) -> None:
    """Without a limit, each of these would take more memory than any machine has."""
    assert len(typescript("f", "", schema)) < 4_000_000


def test_realistic_definitions_are_rendered_in_full() -> None:
    assert typescript("f", "", chained(3, 4)).count('"one" | "two"') == 64
    assert "a?: string | null," in typescript("f", "", {"properties": {"a": {"type": ["string", "null"]}}})


def test_required_names_are_looked_up_fast() -> None:
    names = [f"a{number}" for number in range(3_000)]
    schema = {"properties": {name: {"type": "string"} for name in names}, "required": [{}, 3, *names[1:]]}
    written = typescript("f", "", schema)
    assert "a0?: string" in written
    assert written.count("?:") == 1


def test_json_too_deep_to_write_becomes_text() -> None:
    deep: Any = "bottom"
    for _ in range(100_000):
        deep = [deep]
    assert compact(deep) == "bottom"
    assert sorted(strings_of({"a": [1], "b": "c"})) == ["1", "a", "b", "c"]


def test_number_too_long_to_write_becomes_text() -> None:
    assert compact({"a": 10**5000}).startswith("a\n0x")
