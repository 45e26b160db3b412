"""Create sample values that satisfy a JSON schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

Schema = Mapping[str, object]

_MAX_DEPTH: Final = 12
_FORMATS: Final = {
    "date": "2024-01-01",
    "date-time": "2024-01-01T00:00:00Z",
    "time": "00:00:00Z",
    "email": "sample@example.com",
    "uri": "https://example.com/",
    "uuid": "00000000-0000-4000-8000-000000000000",
    "ipv4": "192.0.2.1",
    "hostname": "example.com",
}


def sample(schema: Schema) -> object:
    """Return a value that satisfies a schema: types, required fields, enums and bounds, but not patterns."""
    return _sample(schema, schema, "value", 0)


def _sample(schema: object, root: Schema, name: str, depth: int) -> object:
    """Return a value for a part of a schema.

    Args:
        schema: the part.
        root: the whole schema, to which `$ref` refers.
        name: the name of the property, which sample strings quote.
        depth: the number of enclosing schemas.
    """
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return None
    if "const" in schema:
        return schema["const"]
    enum = schema.get("enum")
    if isinstance(enum, list) and enum:
        return enum[0]
    chosen = _branch(schema, root)
    if chosen is not None:
        return _sample(chosen, root, name, depth + 1)
    return _of_type(schema, root, name, depth)


def _branch(schema: Schema, root: Schema) -> object:
    """Return the schema to use instead of this one: the target of its `$ref`, or its first alternative, or None."""
    ref = schema.get("$ref")
    if isinstance(ref, str):
        return _resolve(ref, root)
    for key in ("anyOf", "oneOf", "allOf"):
        options = schema.get(key)
        if isinstance(options, list) and options:
            return options[0]
    return None


def _resolve(ref: str, root: Schema) -> object:
    """Return the part of `root` at the JSON pointer `ref` (`#/a/b`), or an empty schema."""
    part: object = root
    for step in ref.removeprefix("#").strip("/").split("/"):
        if step:
            part = part.get(step) if isinstance(part, Mapping) else None
    return part if part is not None else {}


def _of_type(schema: Schema, root: Schema, name: str, depth: int) -> object:
    kind = schema.get("type", "object" if "properties" in schema else "string")
    if isinstance(kind, list):
        kind = kind[0] if kind else "null"
    match kind:
        case "object":
            return _object(schema, root, depth)
        case "array":
            return _array(schema, root, name, depth)
        case "integer" | "number":
            return _number(schema)
        case "boolean":
            return True
        case "null":
            return None
        case _:
            return _string(schema, name)


def _object(schema: Schema, root: Schema, depth: int) -> dict[str, object]:
    """Return an object with the required properties, or with all properties if the schema does not name them."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return {}
    required = schema.get("required")
    names = required if isinstance(required, list) else list(properties)
    return {str(name): _sample(properties.get(name, {}), root, str(name), depth + 1) for name in names}


def _array(schema: Schema, root: Schema, name: str, depth: int) -> list[object]:
    min_items = schema.get("minItems")
    length = min_items if isinstance(min_items, int) else 1
    # A list that contains itself ends here. At the depth limit, it would contain a null instead of an object.
    if depth > _MAX_DEPTH // 2 and min_items is None:
        return []
    return [_sample(schema.get("items", {}), root, name, depth + 1) for _ in range(length)]


def _number(schema: Schema) -> int | float:
    for key, step in (("minimum", 0), ("exclusiveMinimum", 1), ("maximum", 0), ("exclusiveMaximum", -1)):
        bound = schema.get(key)
        if isinstance(bound, int | float):
            return bound + step
    return 1


def _string(schema: Schema, name: str) -> str:
    text = _FORMATS.get(str(schema.get("format")), f"sample {name}")
    min_length, max_length = schema.get("minLength"), schema.get("maxLength")
    if isinstance(min_length, int):
        text = text.ljust(min_length, "x")
    return text[:max_length] if isinstance(max_length, int) else text
