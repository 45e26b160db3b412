from __future__ import annotations

import json
import re

import pytest

from gateway.core.counting.heuristic import HeuristicCounter
from gateway.core.modes.extract import MAX_EXTRACT_CHARS, extract, extract_limit, tokens_of
from gateway.core.trimming.text_blocks import GAP
from tests.support.timing import count_calls

COUNT = HeuristicCounter().count
PROSE = [f"Paragraph {n} tells of the {word} and of nothing else that anybody may want.\n" for n, word in enumerate(
    "harbour bridge market tower garden station museum library theatre castle".split() * 8  # noqa: SIM905 - short
)]  # fmt: skip


@pytest.mark.parametrize(("words", "limit"), [(100, 120), (800, 120), (1000, 150), (2000, 300), (100_000, 400)])
def test_an_extract_has_a_share_of_the_text_within_bounds(words: int, limit: int) -> None:
    assert extract_limit("word " * words) == limit


def test_a_long_text_is_not_counted_to_its_end() -> None:
    assert tokens_of("word " * 10_000_000) == tokens_of("word " * 8000)


def test_blocks_keep_their_order_and_gaps_are_marked() -> None:
    text = "".join(PROSE)
    short = extract(text, 150)
    assert COUNT(short) <= 150
    assert short.startswith(PROSE[0])
    assert GAP in short
    kept = [line for line in short.split("\n") if line != GAP]
    assert len(kept) > 3
    assert all(f"{line}\n" in PROSE for line in kept)
    assert sorted(kept, key=lambda line: PROSE.index(f"{line}\n")) == kept


def test_errors_and_rare_identifiers_are_kept() -> None:
    lines = [*PROSE]
    lines[31] = "Order ZX-48213 was sent to warehouse/north_7 by carrier.\n"
    lines[47] = "TimeoutError: the warehouse did not answer.\n"
    short = extract("".join(lines), 120)
    assert lines[31] in short
    assert lines[47] in short


def test_repeated_text_is_shown_once() -> None:
    line = "The reservation HAT204 of user sara_doe_496 was cancelled on Monday.\n"
    assert extract(line * 100, 120).count("HAT204") == 1


def test_rows_follow_their_column_names() -> None:
    rows = [{"flight_number": f"HAT{n:03}", "seats": {"economy": n, "business": n * 7}} for n in range(200)]
    lines = extract(json.dumps(rows), 120).split("\n")
    assert lines[:3] == [
        "[some of 200 rows; empty cell: no such key]",
        "flight_number|seats.economy|seats.business",
        "HAT000|0|0",
    ]
    assert "HAT199|199|1393" in lines
    assert len(lines) > 8


def test_the_first_and_last_of_many_rows_are_read() -> None:
    rows = [{"flight_number": f"HAT{n}", "error": "fatal" if n in {1400, 9000, 19_990} else ""} for n in range(20_000)]
    short = extract(json.dumps(rows), 400)
    assert "HAT1400|fatal" in short
    assert "HAT9000|fatal" not in short
    assert "HAT19990|fatal" in short


def test_other_json_is_shown_as_paths_and_values() -> None:
    value = {"order": {"id": "W-4711", "lines": [["a" * 100, "b" * 100]]}, "note": "text " * 500}
    short = extract(json.dumps(value), 120)
    assert "order.id: W-4711\n" in short


def test_numbers_and_paths_are_unchanged() -> None:
    accounts = ", ".join(
        f'"acc_{n}": {{"balance": 9007199254740993.{n:02}, "rate": 1.10, "path": "C:\\\\acc_{n}"}}' for n in range(60)
    )
    short = extract(f'{{"accounts": {{{accounts}}}}}', 120)
    assert r"accounts.acc_1: {balance: 9007199254740993.01, rate: 1.10, path: C:\acc_1}" in short


def test_a_wide_table_is_shown_as_keys_with_values() -> None:
    rows = [{"id": n, "content": {f"name of field {m}": m * n for m in range(30)}} for n in range(9)]
    lines = extract(json.dumps(rows), 400).split("\n")
    assert lines[0].startswith("{id: 0, content: {name of field 0: 0, ")
    assert "[8].content.name of field 29: 232" in lines


def test_long_cells_are_clipped() -> None:
    rows = [{"identifier": n, "description": f"item {n}, " * 200 + "end"} for n in range(20)]
    short = extract(json.dumps(rows), 400)
    assert re.search(r"\n\d+\|item .*…(\n|\Z)", short)


def test_a_long_text_is_read_at_both_ends() -> None:
    lines = [f"line {n} of the log\n" for n in range(100_000)]
    lines[50] = "MemoryError: at the beginning\n"
    lines[50_000] = "LookupError: in the middle\n"
    lines[-50] = "FatalError: at the end\n"
    text = "".join(lines)
    assert count_calls(lambda: extract(text, 400)) < 1_000_000, "of the whole text there are ten times as many"
    short = extract(text, 400)
    assert "at the beginning" in short
    assert "in the middle" not in short
    assert "at the end" in short


def test_an_extract_is_short_enough_to_be_recognized() -> None:
    spaced = "".join(f"word{n}{' ' * 200}\n" for n in range(1000))
    short = extract(spaced, 400)
    assert MAX_EXTRACT_CHARS / 2 < len(short) < 2 * MAX_EXTRACT_CHARS


def test_json_of_empty_keys_is_shown() -> None:
    assert extract('{"":[],"":[]}' + " " * 400, 120) == "[]"


def test_text_without_words_is_shortened_too() -> None:
    assert extract("-" * 5000, 120).startswith("-" * 100)
    assert len(extract("-" * 5000, 120)) < 300
