"""What the commands share: exit codes, complaints on stderr, the configuration option, tables and JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
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
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of a table.")]


def stop(message: str, code: Exit) -> NoReturn:
    """End with a sentence on stderr."""
    typer.echo(message, err=True)
    raise typer.Exit(code)


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
    json.dump(value, sys.stdout, indent=2, ensure_ascii=False)
    sys.stdout.write("\n")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> None:
    """A table on stdout; `right`: columns of numbers. Cells are text, never markup."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    # A file or a pipe has no width: nothing is cut there.
    Console(width=None if sys.stdout.isatty() else 400).print(table)
