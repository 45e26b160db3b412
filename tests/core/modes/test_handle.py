from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.core.modes.handle import describe, ends_with_handle, handle_line


def test_the_handle_line_has_description_size_and_handle() -> None:
    assert handle_line("summary of", 8213, "h-_1") == "[summary of 8,213 characters; full text: GET /api/results/h-_1]"


@pytest.mark.parametrize("handle", ["", "a b", "a/b", "a\n", "é", "a]", "x" * 129])
def test_a_handle_with_other_characters_is_refused(handle: str) -> None:
    with pytest.raises(ValueError, match="a handle is made of"):
        handle_line("summary of", 1, handle)


@pytest.mark.parametrize("handle", ["a", "x" * 128])
def test_the_handle_line_is_recognized_at_the_end_of_a_text(handle: str) -> None:
    line = handle_line('what it is, "quoted" [and] more;', 12_345_678, handle)
    assert ends_with_handle(line)
    assert ends_with_handle(f"text\nmore\n\n{line}")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "]",
        "[summary of 12 characters; full text: GET /api/results/h] ",
        "[summary of 12 characters; full text: GET /api/results/h]\n",
        "text [summary of 12 characters; full text: GET /api/results/h]",
        "[summary of many characters; full text: GET /api/results/h]",
        "[summary of 12 characters; full text: GET /api/results/h/i]",
        "[summary of\n12 characters; full text: GET /api/results/h]",
        f"[{'x' * 400} 12 characters; full text: GET /api/results/h]",
    ],
)
def test_other_lines_are_not_recognized(text: str) -> None:
    assert not ends_with_handle(text)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ([{"id": 1, "name": "a"}] * 3, "JSON, 3 rows with columns id, name"),
        ([{"id": 1}], "JSON, 1 row with columns id"),
        ([1.5, 2], "JSON, 2 values, first 1.5"),
        (["x" * 50], f'JSON, 1 value, first "{"x" * 30}…'),
        ([None], "JSON, 1 value, first null"),
        ([], "JSON, 0 values"),
        ([[{"id": 1}, {"id": 2}], []], "JSON, 2 lists, the first of 2 rows with columns id"),
        ([[[1]]], "JSON, 1 list, the first of 1 list"),
        (
            {"id": "A1", "ok": True, "n": 1.50, "text": "long " * 20, "at": {"x": 1, "y": 2}, "rows": [{"a": 1}]},
            'JSON, id "A1", ok true, n 1.5, text, at (2 keys), rows (1 row with columns a)',
        ),
        ({"a key\n on two  lines": 1}, "JSON, a key on two lines 1"),
    ],
)
def test_json_is_described_by_its_shape(value: Any, says: str) -> None:
    assert describe(json.dumps(value)) == says


def test_json_lines_are_described_as_such() -> None:
    assert describe('{"a":1}\n{"a":2}\n') == "JSON lines, 2 rows with columns a"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("one line", 'text, 1 line, begins "one line"'),
        ("\n\n  first\n\tsecond\n", 'text, 4 lines, begins "first second"'),
        (
            "Traceback (most recent call last):\n" + "  a line\n" * 30 + "ValueError: no seat 12A\nbash-$",
            f'text, 33 lines, begins "Traceback (most recent call last):{" a line" * 12} …", says "ValueError: no seat 12A"',
        ),
        ("error: in the first line", 'text, 1 line, begins "error: in the first line"'),
    ],
)
def test_a_text_is_described_by_its_first_words_and_its_last_error(text: str, says: str) -> None:
    assert describe(text) == says


def test_a_description_is_one_short_line() -> None:
    for text in (
        json.dumps({f"key {n}": n for n in range(1000)}),
        json.dumps([{"x" * 1000: 1}] * 2),
        "x" * 10_000 + "\nerror " + "y" * 1000,
        "\u2028\x85\x0b" * 200 + "a\x0bb",
    ):
        says = describe(text)
        assert len(says) <= 240
        assert len(says.splitlines()) == 1
