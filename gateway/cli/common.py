"""Share exit codes, error output, the configuration option, tables and JSON between commands."""

from __future__ import annotations

import io
import json
import re
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


#: a line break inside a paragraph; lines of lists and indented lines keep theirs
_LINE_BREAK: Final = re.compile(r"(?<!\n)\n(?![\n\s*-])")


class Command(TyperCommand):
    """A command whose help describes the values of options in words, in paragraphs as wide as the terminal."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # typer keeps the line breaks of the source after the first paragraph.
        self.help = _LINE_BREAK.sub(" ", self.help) if self.help is not None else None

    def get_params(self, ctx: Any) -> list[Any]:
        """Return its parameters, including `--help` and flags."""
        return _in_plain_words(super().get_params(ctx))


class Group(TyperGroup):
    """A group of commands whose help describes the values of options in words.

    The name of a command may be two words, such as `models update` besides `models PATTERN`.
    """

    def get_params(self, ctx: Any) -> list[Any]:
        """Return its parameters."""
        return _in_plain_words(super().get_params(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        """Return the command that the first words name, and the other words."""
        both = " ".join(args[:2])
        return super().resolve_command(ctx, [both, *args[2:]] if both in self.commands else args)


def _in_plain_words(parameters: Sequence[Any]) -> list[Any]:
    """Make help show `on/off` for a flag, and the name of an argument, instead of the names of Python types."""
    for parameter in parameters:
        if parameter.param_type_name == "argument":
            parameter.display_type_rich = _no_type
        elif parameter.metavar is None and parameter.is_flag:
            parameter.metavar = "on/off"
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
    typer.Option(
        "-c", "--config", metavar="FILE", help="Configuration file; else $GATEWAY_CONFIG, else ./gateway.yaml."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


#: characters of user input that an error message repeats
_QUOTED_CHARS: Final = 80
#: width of a table that is written to a file
_FILE_WIDTH: Final = 100_000
#: least width of a shortened text, and of the first column, which names the row
_LEAST_WIDTH: Final = 12
_LEAST_NAME_WIDTH: Final = 28
#: value of `--store` that is not a URL: the store of `gateway serve --mock`
MOCK_STORE: Final = "mock"
#: spaces between two columns of a table
GAP: Final = 2


def printable(text: str) -> str:
    """Return the text with `?` instead of control characters, which a terminal would execute."""
    return text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)


def quoted(text: str) -> str:
    """Return user input for an error message: quoted, on one line, and shortened if it is long."""
    start = printable(text[:_QUOTED_CHARS])
    return f'"{start}"' if len(text) <= _QUOTED_CHARS else f'"{start}…" ({len(text):,} characters)'


def stop(message: str, code: Exit) -> NoReturn:
    """Print a message to stderr and end the command."""
    typer.echo("\n".join(map(printable, message.splitlines())), err=True)
    raise typer.Exit(code)


def refuse_early_options(context: typer.Context) -> None:
    """Refuse options before the subcommand, which would be ignored: `sessions --store URL delete ID`."""
    if context.invoked_subcommand is None:
        return
    early = [
        max(option.opts, key=len)
        for option in context.command.params
        if option.name and (source := context.get_parameter_source(option.name)) and source.name == "COMMANDLINE"
    ]
    if early:
        where = f"{context.command_path} {context.invoked_subcommand} {early[0]} …"
        stop(f"{' and '.join(early)} has no effect before the command. Write it after: {where}", Exit.USAGE)


def load(file: Path | None, flags: Mapping[str, object] | None = None) -> Loaded:
    """Return the configuration, or end the command and print its problems, one per line."""
    with config_problems():
        from gateway import config

        return config.load(file, flags=flags)


def load_settings(file: Path | None, url: str | None) -> Settings:
    """Return the settings with the store that `--store` names, if any: a URL, or `mock` for that of `serve --mock`."""
    if url != MOCK_STORE:
        return load(file, {"store.url": url} if url else None).settings
    return load(file, {"store.url": load(file).settings.store.mock_url}).settings


@contextmanager
def config_problems() -> Iterator[None]:
    """End the command with the problems of a ConfigError, one per line."""
    from gateway.core.errors import ConfigError

    try:
        yield
    except ConfigError as error:
        stop("\n".join(error.problems), Exit.USAGE)


def print_json(value: Any) -> None:
    """Print a JSON value on stdout."""
    # With another encoding than UTF-8, other characters than ASCII are escaped.
    json.dump(value, sys.stdout, indent=2, ensure_ascii=sys.stdout.encoding.lower() not in ("utf-8", "utf8"))
    sys.stdout.write("\n")


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = (), first_to_go: Sequence[str] = ()
) -> None:
    """Print a table on stdout. Cells are text, never markup.

    In a terminal each row fits into one line: texts are shortened, then columns are left out. Numbers are never
    shortened. A file or a pipe gets the whole table. The tables of rich take thirty times as long per row, which is
    seconds for a store with thousands of sessions.

    Args:
        columns: the names of the columns.
        rows: a cell for each column.
        right: names of the columns that hold numbers or times; they are aligned to the right.
        first_to_go: names of the columns that a small terminal leaves out first, in this order.
    """
    from rich.text import Text

    shown = [[*map(printable, row)] for row in rows]
    longest = [max(map(_cell_width, (column, *(row[place] for row in shown)))) for place, column in enumerate(columns)]
    least = [
        width if column in right else min(width, max(_cell_width(column), _LEAST_WIDTH if place else _LEAST_NAME_WIDTH))
        for place, (column, width) in enumerate(zip(columns, longest, strict=True))
    ]
    empty = [place for place in range(1, len(columns)) if not any(row[place] for row in shown)]
    out = console()
    widths = fitted(longest, least, out.width, [*empty, *map(columns.index, first_to_go)])
    is_right = {place for place in widths if columns[place] in right}
    if any(columns):
        out.print(Text(_line(columns, widths, is_right), "bold"), soft_wrap=True)
    out.file.writelines(f"{_line(row, widths, is_right)}\n" for row in shown)
    out.file.flush()  # a summary on stderr may go to the same file, and follows the rows


def fitted(longest: Sequence[int], least: Sequence[int], width: int, first_to_go: Sequence[int] = ()) -> dict[int, int]:
    """Return the columns that fit into a terminal, by index, each with its width. The first column always stays.

    Args:
        longest: width of each column if nothing is shortened.
        least: least width of each column.
        width: width of the terminal.
        first_to_go: indexes of the columns that are left out first; then the others are left out, from the right.
    """
    shown_columns = list(range(len(longest)))
    for place in dict.fromkeys([*first_to_go, *reversed(shown_columns[1:])]):
        if _line_width(least[place] for place in shown_columns) <= width:
            break
        shown_columns.remove(place)
    room = width - GAP * (len(shown_columns) - 1)
    bounds = [(min(least[place], room), longest[place]) for place in shown_columns]

    def at_most(most: int) -> list[int]:
        return [max(low, min(high, most)) for low, high in bounds]

    most = bisect_right(range(max(longest) + 1), room, key=lambda most: sum(at_most(most)))
    return dict(zip(shown_columns, at_most(most - 1), strict=True))


def _line_width(widths: Iterable[int]) -> int:
    return sum(width + GAP for width in widths) - GAP


def _line(cells: Sequence[str], widths: Mapping[int, int], is_right: Collection[int]) -> str:
    """Return the text of one row, with each cell padded to the width of its column."""
    padded = []
    for place, width in widths.items():
        text = _shortened(cells[place], width)
        space = " " * (width - _cell_width(text))
        padded.append(space + text if place in is_right else text + space)
    return (" " * GAP).join(padded)


def _cell_width(text: str) -> int:
    """Return how many columns of a terminal a text takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def _shortened(text: str, width: int) -> str:
    """Return the text, shortened with an ellipsis if it does not fit into `width` columns of a terminal."""
    if _cell_width(text) <= width:
        return text
    from rich.cells import set_cell_size

    return set_cell_size(text, width - 1).rstrip() + "…"


def console() -> Console:
    """Return a console for stdout. A file or a pipe has no width, so nothing is shortened there."""
    from rich.console import Console

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for names and bars with characters that the encoding lacks
    return Console(width=None if sys.stdout.isatty() else _FILE_WIDTH)
