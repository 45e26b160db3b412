"""Shared parts of the commands: tables for any width, no control characters, JSON for any encoding."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable

import pytest
import typer

from gateway.cli.common import Exit, print_json, print_table, quoted, stop
from tests.support.timing import count_calls

Printed = Callable[[], str]


@pytest.fixture
def stdout(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Printed]:
    """Replace stdout. `stdout(width=…)` is a terminal, `stdout(encoding=…)` a pipe. The result has the printed text."""

    def replace(width: int | None = None, encoding: str = "utf-8") -> Printed:
        raw = io.BytesIO()
        stream = _Terminal(raw, encoding=encoding) if width else io.TextIOWrapper(raw, encoding=encoding)
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setenv("TERM", "xterm")
        if width:
            monkeypatch.setenv("COLUMNS", str(width))

        def printed() -> str:
            stream.flush()
            return re.sub(r"\x1b\[[0-9]*m", "", raw.getvalue().decode(encoding))

        return printed

    return replace


class _Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


LONG = "x" * 255


def test_small_terminal_shortens_names_but_never_numbers(stdout: Callable[..., Printed]) -> None:
    printed = stdout(width=60)
    print_table(("name", "tokens", "calls"), [[LONG, "9,007,199,254,740,992", "1"]], right=("tokens", "calls"))
    lines = printed().splitlines()
    assert [len(line) for line in lines[1:]] == [60]
    assert lines[1].split() == ["x" * 29 + "…", "9,007,199,254,740,992", "1"]


def test_columns_without_space_are_left_out_in_order(stdout: Callable[..., Printed]) -> None:
    columns, row = ("name", "in", "out", "total"), ["a", "1,000,000,000", "2,000,000,000", "3,000,000,000"]
    for width, names in ((80, columns), (40, ("name", "in", "total")), (20, ("name", "total")), (10, ("name",))):
        printed = stdout(width=width)
        print_table(columns, [row], right=columns[1:], first_to_go=("out", "in"))
        shown = printed().splitlines()
        assert tuple(shown[0].split()) == names
        assert len(shown) == 2
        assert max(map(len, shown)) <= width


def test_an_empty_column_is_the_first_to_be_left_out(stdout: Callable[..., Printed]) -> None:
    printed = stdout(width=20)
    print_table(("name", "calls", "in", "out"), [["a", "", "1,000", "2"]], right=("calls", "in"), first_to_go=("out",))
    assert printed().splitlines()[0].split() == ["name", "in", "out"]


def test_in_a_pipe_nothing_is_shortened_or_left_out(stdout: Callable[..., Printed]) -> None:
    printed = stdout()
    print_table(("name", "model"), [[LONG, LONG]] * 2)
    assert [line.split() for line in printed().splitlines()[1:]] == [[LONG, LONG]] * 2


def test_wide_characters_are_shortened_by_the_columns_that_they_take(stdout: Callable[..., Printed]) -> None:
    printed = stdout(width=40)
    print_table(("name", "said", "n"), [["short", "模型" * 30, "7"], ["b", "", "12"]], right=("n",))
    assert printed().splitlines()[1:] == [f"short  {'模型' * 7}…   7", f"b{' ' * 37}12"]


@pytest.mark.parametrize("width", [1, 2, 5, 20, 24, 30, 40])
def test_a_terminal_of_any_width_has_one_line_for_a_row(width: int, stdout: Callable[..., Printed]) -> None:
    printed, said = stdout(width=width), "word " * 8
    print_table(("the name of a model", "a", "n"), [[LONG[:32], said, "1,234"]], right=("n",))
    lines = printed().splitlines()
    assert len(lines) == 2
    assert max(map(len, lines)) <= width


@pytest.mark.parametrize("width", [None, 60])
def test_long_table_is_fast_per_row(width: int | None, stdout: Callable[..., Printed]) -> None:
    def made(rows: int) -> int:
        stdout(width=width)
        return count_calls(lambda: print_table(("name", "models", "n"), [["alice", LONG[:40], "1"]] * rows))

    made(1)
    assert made(200) - made(100) < 100 * 60


def test_table_without_column_names_has_no_header(stdout: Callable[..., Printed]) -> None:
    printed = stdout()
    print_table(("", ""), [["id", "s"]])
    assert printed().split() == ["id", "s"]
    assert not printed().startswith(" ")


def test_control_characters_in_cells_are_replaced(stdout: Callable[..., Printed]) -> None:
    printed = stdout()
    print_table(("model",), [["mo\x1b[2Jck\x07\nnl\u202eabc"]])
    assert printed().splitlines()[1].strip() == "mo?[2Jck??nl?abc"


def test_characters_outside_the_encoding_are_replaced_in_a_table(stdout: Callable[..., Printed]) -> None:
    printed = stdout(encoding="ascii")
    print_table(("model",), [["模型-1"]])
    assert printed().splitlines()[1].strip() == "??-1"


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii"])
def test_json_is_whole_in_every_encoding(encoding: str, stdout: Callable[..., Printed]) -> None:
    printed = stdout(encoding=encoding)
    print_json({"model": "模型\u2028"})
    assert json.loads(printed()) == {"model": "模型\u2028"}
    assert ("模" in printed()) == (encoding == "utf-8")


def test_control_characters_in_errors_are_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended:
        stop("one\x1b[2J\ntwo", Exit.USAGE)
    assert ended.value.exit_code == 2
    assert capsys.readouterr().err == "one?[2J\ntwo\n"


def test_long_user_input_is_shortened_with_its_length() -> None:
    assert quoted("a b") == '"a b"'
    assert quoted("a\nb") == '"a?b"'
    assert quoted(LONG * 10) == f'"{"x" * 80}…" (2,550 characters)'
