from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.core.conversation.lossless_json import as_bare_value
from gateway.core.trimming.parts import split_parts, without_parts


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("[1, {}]", [as_bare_value("1"), {}]),
        ('{"total": 2, "tags": [1], "rows": [1, 2]}', [as_bare_value("1"), as_bare_value("2")]),
        ('{"total": 2}', ['{"total": 2}']),
        ("one\n\ntwo\nthree", ["one", "two\nthree"]),
        ("[broken", ["[broken"]),
        ('{"a": 1}\n{"a": 2}', ['{"a": 1}\n{"a": 2}']),
        ('{"a": [1], "a": [2]}', ['{"a": [1], "a": [2]}']),
        (None, [""]),
        ([{"type": "text", "text": "a"}], [""]),
    ],
)
def test_split_parts_of_a_content(content: Any, parts: list[Any]) -> None:
    assert split_parts(content)[0] == parts


def test_the_mark_replaces_the_first_part_and_json_stays_valid() -> None:
    assert json.loads(without_parts("[1, 2, 3, 4]", (1, 3), "c0")) == [1, "[2 items as in the result of c0]", 3]
    shown = json.loads(without_parts('{"n": 1, "rows": [{"a": "é"}, 2]}', (0,), "c0"))
    assert shown == {"n": 1, "rows": ["[1 item as in the result of c0]", 2]}
    assert without_parts("a\n\nb\n\nc", (1, 2), "c0") == "a\n\n[2 paragraphs as in the result of c0]"


def test_remaining_numbers_keep_their_spelling() -> None:
    shown = without_parts('{"n": 1.10, "rows": [9007199254740993.07, 2, 1E+5]}', (1,), "c0")
    assert shown == '{"n":1.10,"rows":[9007199254740993.07,"[1 item as in the result of c0]",1E+5]}'


@pytest.mark.parametrize("gone", [(), (2,), (0, 9)])
def test_missing_parts_raise_an_error(gone: tuple[int, ...]) -> None:
    with pytest.raises(ValueError):
        without_parts("[1, 2]", gone, "c0")
