from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.modes.table import is_table, table_rows, write_as_table
from tests.support.timing import in_time


@dataclass(frozen=True)
class Number:
    """A JSON number as it is spelled."""

    spelling: str


class Missing:
    """A key that this row does not have."""


DECODER = json.JSONDecoder(parse_int=Number, parse_float=Number)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
LITERALS = {"true": True, "false": False, "null": None}
MARK = re.compile(r'("(?:[^"\\]|\\.)*")|<table (\d+)>')


def untable(text: str) -> Any:
    """Parse a table by the rules in its first line alone."""
    lines = text.split("\n")
    found = re.fullmatch(r"\[JSON (?:list|lines) as a table, (\d+) rows, nothing left out; .*\]", lines[0])
    if found is not None:
        assert len(lines) == 2 + int(found[1])
        return rows_from(lines[1], lines[2:])
    if not is_table(text):
        values = [DECODER.decode(line) for line in lines]
        return values[0] if len(values) == 1 else values
    tables: dict[str, Any] = {}
    at = 2
    while at < len(lines):
        named = re.fullmatch(r"<table (\d+)> (\d+) rows", lines[at])
        assert named is not None
        end = at + 2 + int(named[2])
        tables[named[1]] = rows_from(lines[at + 1], lines[at + 2 : end])
        at = end
    frame = MARK.sub(lambda mark: mark[1] or f'{{"\\u0000table":"{mark[2]}"}}', lines[1])
    return filled(DECODER.decode(frame), tables)


def filled(value: Any, tables: dict[str, Any]) -> Any:
    if isinstance(value, dict):
        if list(value) == ["\0table"]:
            return tables[value["\0table"]]
        return {key: filled(inner, tables) for key, inner in value.items()}
    return [filled(inner, tables) for inner in value] if isinstance(value, list) else value


def rows_from(head: str, lines: list[str]) -> list[dict[str, Any]]:
    paths = paths_from(head)
    return [row_of(paths, cells_from(line)) for line in lines]


def paths_from(head: str) -> list[list[str]]:
    paths: list[list[str]] = [[]]
    at = 0
    while at < len(head):
        if head[at] == '"':
            key, at = DECODER.raw_decode(head, at)
        else:
            end = re.compile(r"[|.]|\Z").search(head, at)
            assert end is not None
            key, at = head[at : end.start()], end.start()
        paths[-1].append(key)
        if head[at : at + 1] == "|":
            paths.append([])
        at += 1
    return paths


def cells_from(line: str) -> list[Any]:
    cells: list[Any] = []
    at = 0
    while at <= len(line):
        if line[at : at + 1] in ('"', "{", "["):
            value, at = DECODER.raw_decode(line, at)
            assert line[at : at + 1] in ("|", "")
        else:
            end = line.find("|", at)
            text = line[at:] if end < 0 else line[at:end]
            value, at = plain(text), at + len(text)
        cells.append(value)
        at += 1
    return cells


def plain(text: str) -> Any:
    if not text:
        return Missing
    if NUMBER.fullmatch(text):
        return Number(text)
    return LITERALS.get(text, text)


def row_of(paths: list[list[str]], cells: list[Any]) -> dict[str, Any]:
    assert len(paths) == len(cells)
    row: dict[str, Any] = {}
    for path, cell in zip(paths, cells, strict=True):
        if cell is not Missing:
            inner = row
            for key in path[:-1]:
                inner = inner.setdefault(key, {})
            inner[path[-1]] = cell
    return row


def spelled(value: Any, gap: str = "") -> str:
    """Return JSON with numbers in their spelling."""
    if isinstance(value, Number):
        return value.spelling
    if isinstance(value, dict):
        return "{" + f",{gap}".join(f"{json.dumps(k)}:{gap}{spelled(v, gap)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + f",{gap}".join(spelled(inner, gap) for inner in value) + "]"
    return json.dumps(value)


NASTY = ["a", "|", '"', ",", "{", "[", "\\", "\n", " ", ".", "1", "-", "e", "true", "null", "<table 1>", "\u2028", "é"]
texts = st.lists(st.sampled_from(NASTY), max_size=4).map("".join)
numbers = st.from_regex(r"-?(0|[1-9][0-9]{0,20})(\.[0-9]{1,3})?([eE][+-]?[0-9]{1,2})?", fullmatch=True).map(Number)
leaves = st.none() | st.booleans() | texts | numbers
#: long enough for a table of a few rows to save characters
keys = st.sampled_from(
    ["a name of a column", "with.a dot and more", "with|a bar and more", 'with "quotes" in it', "", "b"]
)
cells = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3), max_leaves=5
)
tables = st.lists(st.dictionaries(keys, cells, max_size=5), min_size=2, max_size=9)
same_keys = st.lists(
    st.fixed_dictionaries({"a name of a column": cells, "b": st.fixed_dictionaries({"": leaves, "c|.": cells})}),
    min_size=10,
    max_size=12,
)
documents = st.recursive(
    tables | same_keys | leaves,
    lambda inner: st.lists(inner, min_size=1, max_size=3) | st.dictionaries(keys, inner, min_size=1, max_size=3),
    max_leaves=4,
)


@given(documents, st.sampled_from(["", " ", "\n  "]))
@settings(max_examples=100, deadline=None)
def test_nothing_of_json_is_lost(value: Any, gap: str) -> None:
    text = spelled(value, gap)
    shaped = write_as_table(text)
    if isinstance(value, dict | list):
        assert shaped is not None
        assert untable(shaped) == value
        assert write_as_table(shaped) in (None, shaped)
    else:
        assert shaped is None


@given(tables | same_keys)
@settings(max_examples=60, deadline=None)
def test_nothing_of_json_lines_is_lost(rows: list[dict[str, Any]]) -> None:
    shaped = write_as_table("\n".join(map(spelled, rows)))
    assert shaped is not None
    assert untable(shaped) == rows


ROWS = [{"flight_number": f"HAT{n}", "destination": "JFK", "seats_left": n, "price": 1.50} for n in range(4)]


def test_a_list_of_objects_names_its_keys_once() -> None:
    rows = [
        {"identifier": 1, "name": "Ada", "quantity_left": None},
        {"identifier": 2.50, "name": "", "quantity_left": 7},
        {"identifier": "3", "quantity_left": [1, {"a": "b"}], "remarks_of_the_shop": "a|b"},
        {"identifier": 4, "name": "two\nlines", "quantity_left": True},
        {"identifier": 5, "name": "12:30", "quantity_left": "true", "remarks_of_the_shop": " x"},
    ]
    assert (write_as_table(json.dumps(rows, indent=1)) or "").split("\n") == [
        "[JSON list as a table, 5 rows, nothing left out; empty cell: no such key]",
        "identifier|name|quantity_left|remarks_of_the_shop",
        "1|Ada|null|",
        '2.5|""|7|',
        '"3"||[1,{"a":"b"}]|"a|b"',
        '4|"two\\nlines"|true|',
        '5|12:30|"true"|" x"',
    ]


def test_lists_in_a_document_are_written_below_it() -> None:
    legs = [{"origin_airport": "JFK", "destination_airport": "SEA", "date": f"2024-05-0{n}"} for n in range(1, 5)]
    value = {"total": 4, "page": {"results": legs}, "again": legs, "few": [{"a": 1}, {"a": 2}]}
    assert (write_as_table(json.dumps(value)) or "").split("\n")[:4] == [
        "[JSON with its lists as tables below it, nothing left out; empty cell: no such key]",
        '{"total":4,"page":{"results":<table 2>},"again":<table 1>,"few":[{"a":1},{"a":2}]}',
        "<table 1> 4 rows",
        "origin_airport|destination_airport|date",
    ]


def test_json_lines_are_a_table_too() -> None:
    shaped = write_as_table("\n".join(map(json.dumps, ROWS)))
    assert (shaped or "").startswith("[JSON lines as a table, 4 rows, nothing left out; ")


def test_json_lines_that_make_no_table_are_compact() -> None:
    assert write_as_table('{"a": 1}\n{"b": 2}\n') == '{"a":1}\n{"b":2}'


def test_objects_with_the_same_keys_in_every_row_become_columns() -> None:
    rows = [{"flight_number": n, "seats": {"economy_class": n, "business_class": [n]}} for n in range(6)]
    assert (write_as_table(json.dumps(rows)) or "").split("\n")[1:3] == [
        "flight_number|seats.economy_class|seats.business_class",
        "0|0|[0]",
    ]


def test_objects_deep_in_objects_stay_json() -> None:
    rows = [{"a": {"b": {"c": {"d": {"n": n}, "remark": 1}, "remark": 2}, "remark": 3}} for n in range(20)]
    assert (write_as_table(json.dumps(rows)) or "").split("\n")[1:3] == [
        "a.b.c.d|a.b.c.remark|a.b.remark|a.remark",
        '{"n":0}|1|2|3',
    ]


@pytest.mark.parametrize("other", [{"economy_class": 1}, {}, None, "text", {"business_class": 1, "economy_class": 1}])
def test_objects_that_differ_stay_json_in_their_cell(other: Any) -> None:
    rows: list[dict[str, Any]] = [
        {"flight_number": n, "available_seats": {"economy_class": n, "business_class": n}} for n in range(9)
    ]
    rows[5]["available_seats"] = other
    assert (write_as_table(json.dumps(rows)) or "").split("\n")[1] == "flight_number|available_seats"


def test_columns_keep_the_order_of_the_keys_where_they_can() -> None:
    rows = [{"first column": 1, "third column": 3}] + [
        {"first column": 1, "second column": 2, "third column": 3} for _ in range(9)
    ]
    assert (write_as_table(json.dumps(rows)) or "").split("\n")[1] == "first column|second column|third column"


@pytest.mark.parametrize(
    "text", ["null", "true", "false", "0", "-1.50", "1e5", "007", "", " ", "a ", "|", '"a"', "{a", "[", "\t"]
)
def test_a_string_that_could_be_anything_else_has_its_quotes(text: str) -> None:
    rows = [{"the one column": text, "the other column": 1} for _ in range(9)]
    assert (write_as_table(json.dumps(rows)) or "").split("\n")[2] == f"{json.dumps(text)}|1"


@pytest.mark.parametrize("text", ["nullable", "+1", "1.", "2024-05-01", "a, b", "a.b", "é", "x{", "True", "-"])
def test_any_other_string_has_no_quotes(text: str) -> None:
    rows = [{"the one column": text, "the other column": 1} for _ in range(9)]
    assert (write_as_table(json.dumps(rows)) or "").split("\n")[2] == f"{text}|1"


@pytest.mark.parametrize("key", [".a", "a.", "", " ", "a ", "|", '"', "\n", "é.é"])
def test_a_key_that_could_be_several_has_its_quotes(key: str) -> None:
    rows = [{key: 1, "a long name of a column": 1} for _ in range(9)]
    head = f"{json.dumps(key, ensure_ascii=False)}|a long name of a column"
    assert (write_as_table(json.dumps(rows)) or "").split("\n")[1] == head


def test_a_key_cannot_be_mistaken_for_a_path_or_another_column() -> None:
    rows = [{"a.b of a column": 1, "c": {"d|": 2, "": 3}, '"quoted"': 4, " space": 5} for _ in range(9)]
    assert (write_as_table(json.dumps(rows)) or "").split("\n")[
        1
    ] == '"a.b of a column"|c."d|"|c.""|"\\"quoted\\""|" space"'


@pytest.mark.parametrize(
    "value",
    [
        [],
        {},
        [1, 2],
        [{"a": 1}],
        [{"a name": 1}, {"a name": 2}],
        [{"a long name of a column": 1}, 2],
        [{f"the column number {n}": 1} for n in range(50)],
        [{f"the column number {n}": 1 for n in range(101)} for _ in range(3)],
        [{"a": {f"the column number {n}": 1 for n in range(101)}} for _ in range(3)],
        [{} for _ in range(100)],
    ],
)
def test_json_that_is_no_table_only_loses_its_white_space(value: Any) -> None:
    assert write_as_table(json.dumps(value, indent=2)) == json.dumps(value, separators=(",", ":"))


def test_objects_that_would_make_too_many_columns_stay_json_in_their_cell() -> None:
    rows = [{f"the first of two, {m}": {f"{m}{n}": 1 for n in range(60)} for m in "bc"} for _ in range(9)]
    assert (write_as_table(json.dumps(rows)) or "").split("\n")[1] == "the first of two, b|the first of two, c"


def test_lists_too_deep_in_a_document_stay_json() -> None:
    value: Any = ROWS * 3
    for _ in range(9):
        value = {"a": value}
    assert write_as_table(json.dumps(value)) == json.dumps(value, separators=(",", ":"))


@pytest.mark.parametrize("text", ["", "plain text", "[1, 2", '{"a":NaN}', '{"a":1,"a":2}', '["\\ud800"]'])
def test_what_is_no_json_or_cannot_be_written_is_no_table(text: str) -> None:
    assert write_as_table(text) is None


def test_a_pair_of_escapes_is_one_character() -> None:
    assert write_as_table('["\\ud83d\\ude00"]') == '["😀"]'


def test_a_table_is_recognized_by_its_first_line() -> None:
    shaped = write_as_table(json.dumps(ROWS))
    assert shaped is not None
    assert is_table(shaped)
    assert not is_table(json.dumps(ROWS))
    assert not is_table(f"a line before\n{shaped}")
    assert not is_table("[JSON list as a table, and nothing of the kind]\n1|2")


def test_table_rows_returns_the_rows_alone() -> None:
    assert table_rows(json.dumps(ROWS)) == (write_as_table(json.dumps(ROWS)) or "").split("\n")[1:]
    assert table_rows(json.dumps({"rows": ROWS})) is None
    assert table_rows("text") is None


@pytest.mark.parametrize(
    "value",
    [
        [{"id": n, "name": f"user {n}", "email": f"u{n}@example.com", "score": n / 7} for n in range(60_000)],
        [n / 7 for n in range(300_000)],
        {f"key {n}": {"a": n} for n in range(100_000)},
        [[{"a": [{"b": 1}, {"b": 2}]}] for _ in range(40_000)],
        [{f"key {n}": 1 for n in range(100_000)}] * 2,
        [{f"key {n}": 1} for n in range(100_000)],
        {"text": "x|\n" * 2_000_000},
    ],
    ids=["rows", "numbers", "objects", "lists of lists", "wide", "sparse", "text"],
)
def test_megabytes_do_not_take_minutes(value: Any) -> None:
    text = json.dumps(value)
    # Half a second is usual, and tracing multiplies it.
    with in_time(at_most=60):
        write_as_table(text)
