"""Test that JSON is split and joined without changing the bytes of its values."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.views.raw import compact, fields_of, items_of, list_of, object_of

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(value=st.dictionaries(st.text(), values), indent=st.none() | st.integers(0, 2), ascii_only=st.booleans())
def test_object_is_split_into_its_fields(value: dict[str, Any], indent: int | None, ascii_only: bool) -> None:
    raw = json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode()
    fields = fields_of(raw)
    assert list(fields) == list(value)
    assert [json.loads(one) for one in fields.values()] == list(value.values())
    assert json.loads(object_of(fields)) == value


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b'{"a" : [ 1.10, 1E5,-0 ] }', '{"a":[1.10,1E5,-0]}'),
        (b"1.10", "1.10"),
        (b'"a"', '"a"'),
        ('["\ufdd0", 1]'.encode(), '["\ufdd0", 1]'),
    ],
)
def test_compact_json_keeps_the_spelling_of_numbers(raw: bytes, text: str) -> None:
    assert compact(raw) == text


@given(value=st.lists(values), indent=st.none() | st.integers(0, 2))
def test_list_is_split_into_its_items(value: list[Any], indent: int | None) -> None:
    items = items_of(json.dumps(value, indent=indent).encode())
    assert [json.loads(one) for one in items] == value
    assert json.loads(list_of(items)) == value


@pytest.mark.parametrize("number", [b"1E5", b"1.10", b"-0.0", b"1" * 40, b"3.14159265358979323846264338327950288"])
def test_values_keep_their_bytes(number: bytes) -> None:
    text = rb'"\u30a8\/"'
    raw = b' {"a" : ' + number + b' ,\n"\\u0062":[ ' + text + b" , " + number + b"] } "
    fields = fields_of(raw)
    assert fields == {"a": number, "b": b"[ " + text + b" , " + number + b"]"}
    assert items_of(fields["b"]) == [text, number]
    assert object_of(fields) == b'{"a":' + number + b',"b":[ ' + text + b" , " + number + b"]}"


@pytest.mark.parametrize("raw", [b'"[]"', b"{}", b"3", b"", b" null"])
def test_non_list_has_no_items(raw: bytes) -> None:
    assert items_of(raw) == []
