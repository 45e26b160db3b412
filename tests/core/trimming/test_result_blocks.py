from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.trimming.blocks import render, slice_message
from gateway.core.trimming.result_blocks import split_result

LONG = "x" * 170
LINE = st.sampled_from(
    [
        "ok 1 - a\n",
        "test a ... ok\n",
        "def f(x):\n",
        "ValueError: no\n",
        "\n",
        "## Head\n",
        "@@ -1 +1 @@\n",
        f"{LONG}\n",
        "word " * 60 + "\n",
        "PID USER CMD\n",
        "static int f(int a)\n",
        "end",
    ]
)


@given(st.lists(LINE, max_size=40).map("".join))
@settings(max_examples=200, deadline=None)
def test_the_blocks_of_a_result_are_its_text(text: str) -> None:
    pieces = split_result(text)
    assert "".join(piece.text for piece in pieces) == text
    assert all(-1 <= piece.needs < len(pieces) and piece.needs != number for number, piece in enumerate(pieces))


def shown(text: str, part: str) -> str:
    """Return what is sent of a result if the block with a text is chosen."""
    message = {"role": "tool", "tool_call_id": "c", "content": text}
    sliced = slice_message(message)
    number = next(number for number, block in enumerate(sliced.blocks) if part in block.text)
    return str(render(message, sliced, [number])["content"])


FRAMES = "".join(f'  File "/app/m{n}.py", line {n}, in f{n}\n    return f{n + 1}({LONG[:60]})\n' for n in range(30))


def test_a_traceback_never_ends_before_its_error() -> None:
    text = f"running\nTraceback (most recent call last):\n{FRAMES}KeyError: 'user_7'\n(exit code 1)\n"
    assert "KeyError: 'user_7'\n" in shown(text, "m3.py")


def test_compiler_output_keeps_its_first_error() -> None:
    notes = "".join(f"cc -c src/file{n}.c -o out/file{n}.o {LONG}\n" for n in range(9))
    text = f"{notes}src/b.c:12:5: error: unknown type name 'foo'\n   12 | foo x;\n{notes}make: *** [all] Error 1\n"
    assert "src/b.c:12:5: error: unknown type name 'foo'\n" in shown(text, "file3.c")


def test_passing_tests_become_a_number() -> None:
    passed = "".join(f"test suite::case_{n} ... ok\n" for n in range(55))
    text = f"running 56 tests\n{passed}test suite::bad ... FAILED\n\nfailures: suite::bad {LONG}\n"
    assert "[55 passing tests and 1 other line omitted]\n" in shown(text, "failures:")
    assert split_result(text)[1].factor < 1


def test_a_part_of_a_function_comes_with_its_head() -> None:
    body = "".join(f"    value_{n} = call_{n}({LONG[:40]})\n" for n in range(40))
    text = f"import os\n\n\ndef first(a):\n{body}\n\ndef second(b):\n{body.replace('value', 'other')}"
    assert "def second(b):\n" in shown(text, "other_30")
    assert "def first(a):\n" not in shown(text, "other_30")
    listing = "".join(f"{number:4}\t{line}\n" for number, line in enumerate(text.splitlines(), 1))
    assert "def first(a):\n" in shown(listing, "value_30")


def test_c_functions_have_heads() -> None:
    body = "".join(f"  call_{n}(ctx, {LONG[:40]});\n" for n in range(40))
    text = f'#include "a.h"\n\nstatic void pony_assert_fail(const char* expr,\n  int line)\n{{\n{body}}}\n'
    result = shown(text, "call_30")
    assert "static void pony_assert_fail(const char* expr,\n" in result
    assert "[lines " in result


def test_a_hunk_of_a_diff_comes_with_its_file() -> None:
    hunk = "@@ -1,9 +1,9 @@\n" + "".join(f" context {LONG[:50]}\n" for _ in range(9))
    text = f"diff --git a/x.py b/x.py\n{hunk}diff --git a/y.py b/y.py\n{hunk}+added line\n"
    result = shown(text, "+added line")
    assert "diff --git a/y.py" in result
    assert "diff --git a/x.py" not in result


def test_a_row_of_a_printed_table_comes_with_the_names_of_its_columns() -> None:
    rows = "".join(f"{n}  root  {LONG}\n" for n in range(9))
    assert shown(f"PID  USER  CMD\n{rows}", "7  root").startswith("PID  USER  CMD\n")


@pytest.mark.parametrize(
    "part", ["a::", "test ", "Error", "src/a.c:1: ", "f(a, ", "def ", "12 ERROR", "PID  ", "#", "::"]
)
def test_long_results_are_split_in_linear_time(part: str) -> None:
    """Of a pattern that tries every position of a line again, this would take minutes."""
    line = part * (200_000 // len(part))
    assert "".join(piece.text for piece in split_result(line)) == line
    lines = f"{line[:390]}\n" * 500
    assert "".join(piece.text for piece in split_result(lines)) == lines
