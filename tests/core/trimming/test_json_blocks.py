from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.trimming.blocks import render, slice_message
from gateway.core.trimming.deadline import Deadline
from gateway.core.trimming.json_blocks import parse_json, split_json, write_kept


def texts_of(text: str) -> list[str]:
    value = parse_json(text)
    assert value is not None
    return [block.text for block in split_json(value, Deadline())]


def kept(text: str, *picked: int) -> str:
    """Return what is sent of a result, if these of its blocks are kept."""
    message = {"role": "tool", "tool_call_id": "c", "content": text}
    return str(render(message, slice_message(message), picked)["content"])


ROWS = [{"id": n, "city": f"city{n}", "more": {"price": n * 100, "text": "a|b"}} for n in range(4)]


def test_a_kept_row_keeps_its_keys_and_the_rest_is_counted() -> None:
    text = json.dumps({"total": 4, "rows": ROWS, "pad": "x" * 100})
    assert texts_of(text)[:2] == ["total: 4\n", "rows: {id: 0, city: city0, more: {price: 0, text: a|b}}\n"]
    assert json.loads(kept(text, 3)) == {"rows": [ROWS[2], "[3 omitted]"], "[...]": "2 omitted"}


def test_rows_may_have_names_or_stand_in_several_lists() -> None:
    flights = [{"flight": f"HAT{number}", "seats": {"business": number, "economy": 9}} for number in range(4)]
    named = json.dumps({"found": {flight["flight"]: {**flight, "note": "x" * 90} for flight in flights}})
    assert texts_of(named)[0] == f"found.HAT0: {{flight: HAT0, seats: {{business: 0, economy: 9}}, note: {'x' * 90}}}\n"
    assert json.loads(kept(named, 2)) == {"found": {"HAT2": {**flights[2], "note": "x" * 90}, "[...]": "3 omitted"}}
    pairs = json.dumps([[{**one, "note": "x" * 400} for one in pair] for pair in (flights[:2], flights[2:])])
    assert json.loads(kept(pairs, 1)) == [[{**flights[1], "note": "x" * 400}, "[1 omitted]"], "[1 omitted]"]


def test_a_long_row_is_split_into_its_fields() -> None:
    rows = [{"id": n, "text": "word " * 200, "city": "c"} for n in range(4)]
    shown = json.loads(kept(json.dumps(rows), 0))
    assert shown == [{"id": 0, "[...]": "2 omitted"}, "[3 omitted]"]


def test_a_long_text_in_json_has_its_gaps_inside_the_string() -> None:
    note = "".join(f"line {n} {'x' * 40}\n" for n in range(5))
    shown = json.loads(kept(json.dumps({"id": 7, "note": note}), 0, 2))
    assert shown == {"id": 7, "note": "[...]\n" + note.splitlines(keepends=True)[1] + "[...]"}


def test_a_long_list_is_kept_in_parts() -> None:
    assert texts_of(json.dumps({"a": ["x" * 159, "y" * 159]})) == [f"a: {'x' * 159}\n", f"a: {'y' * 159}\n"]
    text = json.dumps({"a": list(range(1000, 1100))})
    assert json.loads(kept(text, 0))["a"] == [*range(1000, 1027), "[73 omitted]"]
    assert json.loads(kept(text, 1, 3))["a"][0] == "[...]"
    assert json.loads(kept(text, 1, 3))["a"][28] == "[...]"


def test_values_are_read_with_their_paths() -> None:
    value = {
        "user": {"name": "Mia", "address": {"street": "s" * 80, "city": "c" * 90}},
        "tags": ["a", "b"],
        "mixed": [{"a": "x" * 700}, [1, 2, {}]],
        "flags": [True, None] * 50,
        "note": "First.\nSecond line of the note, which is long enough to stand alone.\nThird.",
    }
    lines = texts_of(json.dumps(value))
    assert lines[:4] == [
        "user.name: Mia\n",
        f"user.address.street: {'s' * 80}\n",
        f"user.address.city: {'c' * 90}\n",
        "tags: [a, b]\n",
    ]
    assert lines[4].startswith("mixed[0].a: xxx")
    assert "mixed: [1, 2, {}]\n" in lines
    assert any(line.startswith("flags: true, null, true, ") for line in lines)
    assert lines[-1] == "Third.\n"


#: numbers that Python would write differently, or cannot hold
NUMBERS = ("9007199254740993.07", "123456789012345678.9", "1.10", "-0", "1E+05", "0.1e-7", "NaN", "-Infinity")


@pytest.mark.parametrize("number", NUMBERS)
def test_numbers_keep_their_spelling(number: str) -> None:
    cells = ",".join(f'{{"id":{number},"of":[{number},{{}}]}}' for _ in range(12))
    values = ",".join([number] * 60)
    text = f'{{"one":{number},"short":{{"a":{number}}},"values":[{values}],"rows":[{cells}]}}'
    blocks = texts_of(text)
    assert blocks[:2] == [f"one: {number}\n", f"short: {{a: {number}}}\n"]
    assert blocks[-1] == f"rows: {{id: {number}, of: [{number}, {{}}]}}\n"
    assert kept(text, *range(len(blocks))) == text


def test_texts_are_read_without_escapes_and_written_with_them() -> None:
    said = {"path": r"C:\data\new", "said": 'She said "no".', "code": "a\nb", "on": True, "of": None}
    text = json.dumps({"it": said, "pad": "x" * 100})
    assert texts_of(text)[0].startswith(r'it: {path: C:\data\new, said: She said "no"., code: a')
    assert json.loads(kept(text, 0)) == {"it": said, "[...]": "1 omitted"}


@pytest.mark.parametrize("text", ["[]", "{}", "7", "{broken", "[1] 2", '["\ufdd0"]', "[" * 500 + "]" * 500])
def test_what_is_no_json_to_shorten_is_none(text: str) -> None:
    assert parse_json(text) is None


values: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["", "a", "word " * 60, "line\n" * 60, 'q"\\']),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.sampled_from("abcdef"), inner, max_size=6),
    max_leaves=40,
)


def is_part(part: Any, whole: Any) -> bool:
    """Return whether a value has nothing that the whole lacks, except marks of what was omitted."""
    if isinstance(whole, dict) and isinstance(part, dict):
        return all(key == "[...]" or (key in whole and is_part(inner, whole[key])) for key, inner in part.items())
    if isinstance(whole, list) and isinstance(part, list):
        rest = iter(whole)
        shown = [one for one in part if not str(one).endswith((" omitted]", "[...]"))]
        return all(any(is_part(one, other) for other in rest) for one in shown)
    if isinstance(whole, str) and isinstance(part, str):
        return part == whole or "[" in part
    return bool(part == whole)


@given(
    st.lists(values, min_size=1, max_size=6) | st.dictionaries(st.text("ab.[é", max_size=3), values, min_size=1),
    st.data(),
)
@settings(max_examples=200, deadline=None)
def test_what_is_kept_is_json_and_part_of_the_value(value: Any, data: st.DataObject) -> None:
    parsed = parse_json(json.dumps(value))
    assert parsed is not None
    blocks = list(split_json(parsed, Deadline()))
    assert json.loads(write_kept(parsed, [block.place for block in blocks])) == value
    picked = data.draw(st.sets(st.sampled_from(range(len(blocks))), min_size=1))
    assert is_part(json.loads(write_kept(parsed, [blocks[number].place for number in sorted(picked)])), value)
