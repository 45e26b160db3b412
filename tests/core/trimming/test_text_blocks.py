from __future__ import annotations

import pytest

from gateway.core.trimming.text_blocks import GAP, gap_mark, is_passing_test, join_pieces

LINES = [f"line {n}\n" for n in range(1, 41)]


def test_a_long_gap_names_its_lines() -> None:
    pieces = [(line, 30 < number < 34) for number, line in enumerate(LINES, 1)]
    assert join_pieces(pieces) == f"[lines 1 to 30 omitted]\n{''.join(LINES[30:33])}{GAP}"


def test_a_long_gap_in_a_listing_has_the_numbers_of_the_listing() -> None:
    listing = [f"{number:6}\tint x;\n" for number in range(68, 108)]
    assert join_pieces([(line, number == 0) for number, line in enumerate(listing)]) == (
        f"{listing[0]}[lines 69 to 107 omitted]"
    )


def test_lines_that_are_not_in_the_original_are_not_counted() -> None:
    assert join_pieces([(line, line == LINES[0]) for line in LINES], is_original=False) == LINES[0] + GAP


def test_a_gap_that_ends_inside_a_line_is_not_counted() -> None:
    assert join_pieces([("".join(LINES) + "begin ", False), ("end", True)]) == f"{GAP}\nend"


@pytest.mark.parametrize(
    "line",
    [
        "tests/test_a.py::test_b[1-2] PASSED    [ 12%]",
        "test core::parses ... ok",
        "test_parse (tests.test_a.TestA) ... ok",
        "test_parse (tests.test_a.TestA.test_parse) ... ok",
        "ok 12 - parses",
        "    --- PASS: TestParse (0.00s)",
        "[       OK ] Parser.Reads (0 ms)",
        "  \u2713 parses (3 ms)",
        "PASS: parser",
    ],
)
def test_passing_tests_of_many_runners(line: str) -> None:
    assert is_passing_test(f"{line}\n")


@pytest.mark.parametrize("line", ["test core::parses ... FAILED", "not ok 3 - parses", "okay 3", "PASSWORD: x", ""])
def test_other_lines_are_no_passing_tests(line: str) -> None:
    assert not is_passing_test(f"{line}\n")


def test_passing_tests_in_a_gap_are_counted() -> None:
    passed = "".join(f"test t{n} ... ok\n" for n in range(55))
    assert gap_mark(passed, 1) == "[55 passing tests omitted]"
    assert gap_mark(passed + LINES[0], 1) == "[55 passing tests and 1 other line omitted]"
    assert gap_mark("test a ... ok\n", 1) == GAP
