"""Share exit codes, error output, the configuration option, tables and JSON between commands."""

from __future__ import annotations

import io
import json
import sys
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

if TYPE_CHECKING:
    from rich.console import Console

    from gateway.config import Loaded, Settings


class Command(TyperCommand):
    """A command whose help names what an option takes in words."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return its parameters, those of `--help` and of flags included."""
        return _in_words(super().get_params(ctx))


class Group(TyperGroup):
    """A group of commands whose help does the same."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return its parameters."""
        return _in_words(super().get_params(ctx))


def _in_words(parameters: Sequence[Any]) -> list[Any]:
    """Have help show `on/off` for a flag and its name for an argument, not the names of their types in Python."""
    for one in parameters:
        if one.param_type_name == "argument":
            one.display_type_rich = _no_type
        elif one.metavar is None and one.is_flag:
            one.metavar = "on/off"
    return list(parameters)


def _no_type(ctx: object) -> None:
    del ctx


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
#: columns of a terminal that a shortened text has at the least, and what names a row
_LEAST: Final = 12
_LEAST_NAME: Final = 28
#: what `--store` accepts instead of a URL
MOCK_STORE: Final = "mock"
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


def with_store_url(file: Path | None, url: str | None) -> Settings:
    """The settings with the store that `--store` names, if any: a URL, or `mock` for that of `serve --mock`."""
    if url != MOCK_STORE:
        return load(file, {"store.url": url} if url else None).settings
    return load(file, {"store.url": load(file).settings.store.mock_url}).settings


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


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = (), first_to_go: Sequence[str] = ()
) -> None:
    """Print a table on stdout. Cells are text, never markup.

    In a terminal each row is one line that fits: texts are shortened, then columns are left out, and no number is
    ever cut. A file or a pipe gets all of it. rich's tables take thirty times the work for a row, which is seconds
    for the thousands of rows of a large store.

    Args:
        columns: their names.
        rows: a cell for each column.
        right: names of the columns that hold numbers or times.
        first_to_go: names of the columns that a narrow terminal shows last, in the order in which they are left out.
    """
    from rich.text import Text

    shown = [[*map(printable, row)] for row in rows]
    longest = [max(map(_cells, (column, *(row[place] for row in shown)))) for place, column in enumerate(columns)]
    least = [
        width if column in right else min(width, max(_cells(column), _LEAST if place else _LEAST_NAME))
        for place, (column, width) in enumerate(zip(columns, longest, strict=True))
    ]
    empty = [place for place in range(1, len(columns)) if not any(row[place] for row in shown)]
    out = console()
    widths = fitted(longest, least, out.width, [*empty, *map(columns.index, first_to_go)])
    is_right = {place for place in widths if columns[place] in right}
    if any(columns):
        out.print(Text(_line(columns, widths, is_right), "bold"), soft_wrap=True)
    out.file.writelines(f"{_line(row, widths, is_right)}\n" for row in shown)


def fitted(longest: Sequence[int], least: Sequence[int], width: int, first_to_go: Sequence[int] = ()) -> dict[int, int]:
    """Return the columns that fit into `width`, each with its own width. The first column always stays.

    Args:
        longest: the width that each column takes with nothing shortened.
        least: the width that each column needs.
        width: of the terminal.
        first_to_go: the columns that are left out first; all others follow, from the right.
    """
    kept = list(range(len(longest)))
    for place in dict.fromkeys([*first_to_go, *reversed(kept[1:])]):
        if _line_width(least[place] for place in kept) <= width:
            break
        kept.remove(place)
    room = width - GAP * (len(kept) - 1)
    bounds = [(min(least[place], room), longest[place]) for place in kept]

    def at_most(most: int) -> list[int]:
        return [max(low, min(high, most)) for low, high in bounds]

    most = bisect_right(range(max(longest) + 1), room, key=lambda most: sum(at_most(most)))
    return dict(zip(kept, at_most(most - 1), strict=True))


def _line_width(widths: Iterable[int]) -> int:
    return sum(width + GAP for width in widths) - GAP


def _line(cells: Sequence[str], widths: Mapping[int, int], is_right: Collection[int]) -> str:
    """Return one row, as wide as its columns."""
    padded = []
    for place, width in widths.items():
        text = _shortened(cells[place], width)
        space = " " * (width - _cells(text))
        padded.append(space + text if place in is_right else text + space)
    return (" " * GAP).join(padded)


def _cells(text: str) -> int:
    """How many columns of a terminal a text takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def _shortened(text: str, width: int) -> str:
    """Return the text, with an ellipsis for what does not fit into `width` columns of a terminal."""
    if _cells(text) <= width:
        return text
    from rich.cells import set_cell_size

    return set_cell_size(text, width - 1).rstrip() + "…"


def console() -> Console:
    """Stdout. A file or a pipe has no width: nothing is cut there."""
    from rich.console import Console

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a name, or a bar, that its encoding does not have
    return Console(width=None if sys.stdout.isatty() else _WIDEST)
