"""What the commands share: exit codes, complaints on stderr, the configuration option, tables and JSON."""

from __future__ import annotations

import io
import json
import sys
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from gateway.config import Loaded


class Exit(IntEnum):
    """Exit codes."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    PROBLEMS = 3


ConfigFile = Annotated[
    Path | None,
    typer.Option("-c", "--config", metavar="FILE", help="Configuration; else $GATEWAY_CONFIG, else ./gateway.yaml."),
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of text.")]


#: characters of a user's own words that are repeated to them
_REPEATED: Final = 80
#: columns of a table that goes to a file
_WIDEST: Final = 100_000
#: columns that a folded text has at the least
_FOLDED: Final = 12
#: between two columns of a table
GAP: Final = 2


def printable(text: str) -> str:
    """The text with `?` for what a terminal would follow instead of show."""
    return text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)


def quoted(text: str) -> str:
    """A user's own words in a complaint: on one line, and not all of them where they are many."""
    start = printable(text[:_REPEATED])
    return f'"{start}"' if len(text) <= _REPEATED else f'"{start}…" ({len(text):,} characters)'


def stop(message: str, code: Exit) -> NoReturn:
    """End with a sentence on stderr, or a few lines of them."""
    typer.echo("\n".join(map(printable, message.splitlines())), err=True)
    raise typer.Exit(code)


def options_follow(context: typer.Context) -> None:
    """Refuse options between a group and its command, which would go nowhere: `sessions --store URL delete ID`."""
    if context.invoked_subcommand is None:
        return
    given = [
        max(one.opts, key=len)
        for one in context.command.params
        if one.name and (source := context.get_parameter_source(one.name)) and source.name == "COMMANDLINE"
    ]
    if given:
        where = f"{context.command_path} {context.invoked_subcommand} {given[0]} …"
        stop(f"{' and '.join(given)} would not be heard before the command; write it after: {where}", Exit.USAGE)


def load(file: Path | None, flags: Mapping[str, object] | None = None) -> Loaded:
    """The configuration, or the end of the command with its problems, one a line."""
    with config_problems():
        from gateway import config

        return config.load(file, flags=flags)


@contextmanager
def config_problems() -> Iterator[None]:
    """Turn a ConfigError into the end of the command."""
    from gateway.core.errors import ConfigError

    try:
        yield
    except ConfigError as error:
        stop("\n".join(error.problems), Exit.USAGE)


def print_json(value: Any) -> None:
    """One JSON value on stdout."""
    # Where stdout takes less than all characters, JSON can still say them.
    json.dump(value, sys.stdout, indent=2, ensure_ascii=sys.stdout.encoding.lower() not in ("utf-8", "utf8"))
    sys.stdout.write("\n")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> None:
    """A table on stdout; `right`: columns of numbers. Cells are text, never markup.

    In a narrow terminal text is folded, a number never: lines may be longer than it is wide. A table of rich's takes
    thirty times the work for a row, which is seconds for the thousands of a large store.
    """
    from rich.text import Text

    shown = [[*map(printable, row)] for row in rows]
    longest, least = [], []
    for place, column in enumerate(columns):
        longest.append(max(map(_cells, (column, *(row[place] for row in shown)))))
        least.append(longest[-1] if column in right else min(longest[-1], max(_cells(column), _FOLDED)))
    out = console()
    widths = _narrowed(longest, least, out.width - GAP * (len(columns) - 1))
    is_right = [column in right for column in columns]
    if any(columns):
        for line in _lines(columns, widths, is_right, out):
            out.print(Text(line, "bold"), soft_wrap=True)
    out.file.writelines(f"{line}\n" for row in shown for line in _lines(row, widths, is_right, out))


def _cells(text: str) -> int:
    """How many columns of a terminal a text takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def _narrowed(longest: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """How wide columns are: as their longest text, or the widest ones less, and none less than its least."""

    def bounded(most: int) -> list[int]:
        return [max(low, min(high, most)) for low, high in zip(least, longest, strict=True)]

    most = bisect_right(range(max(longest) + 1), room, key=lambda most: sum(bounded(most)))
    return bounded(most - 1)


def _lines(cells: Sequence[str], widths: Sequence[int], is_right: Sequence[bool], out: Console) -> Iterator[str]:
    """A row: one line, or several where a text is folded."""
    folded = [_folded(cell, width, out) for cell, width in zip(cells, widths, strict=True)]
    for line in zip_longest(*folded, fillvalue=""):
        padded = []
        for text, width, at_right in zip(line, widths, is_right, strict=True):
            space = " " * (width - _cells(text))
            padded.append(space + text if at_right else text + space)
        yield (" " * GAP).join(padded)


def _folded(text: str, width: int, out: Console) -> list[str]:
    if _cells(text) <= width:
        return [text]
    from rich.text import Text

    return [line.plain for line in Text(text).wrap(out, width, justify="left", overflow="fold")]


def console() -> Console:
    """Stdout. A file or a pipe has no width: nothing is cut there."""
    from rich.console import Console

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a name, or a bar, that its encoding does not have
    return Console(width=None if sys.stdout.isatty() else _WIDEST)
