"""Share input files, errors, table cells and the plot between both kinds of `gateway replay`."""

from __future__ import annotations

import gzip
import math
import stat
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import typer

from gateway.cli.common import Exit, printable, quoted, stop
from gateway.cli.numbers import share

#: lines that are complained about one by one
_COMPLAINTS = 5
#: characters of a session's name in a table
LONGEST_NAME = 40
#: how the name of a plot ends
_PLOTS: Final = (".png", ".svg", ".pdf")


class Complaints:
    """Says what is wrong with lines; of many only with the first ones."""

    def __init__(self) -> None:
        self._told = 0

    def of(self, name: str) -> Callable[[int, str], None]:
        """Complain about lines of this file."""
        file = "stdin" if name == "-" else name

        def told(line: int, what: str) -> None:
            self._told += 1
            if self._told <= _COMPLAINTS:
                typer.echo(printable(f"{file}, line {line}: {what}"), err=True)
            elif self._told == _COMPLAINTS + 1:
                typer.echo("and more such lines", err=True)

        return told


def lines_of(name: str) -> Iterator[bytes]:
    """The lines of a file. One that cannot be read to its end ends the command: half of a recording misleads."""
    if name == "-":
        yield from sys.stdin.buffer
        return
    try:
        with gzip.open(name) if name.endswith(".gz") else Path(name).open("rb") as lines:
            yield from lines
    except (OSError, EOFError, zlib.error) as error:
        stop(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}", Exit.FAILED)


def share_of(part: int, whole: int) -> str:
    """Return a part in percent of the whole; empty where the whole is 0."""
    return share(part / whole) if whole else ""


@dataclass(frozen=True, slots=True)
class Drawn:
    """What is drawn of each request, in their order: input tokens, None where there is nothing to draw."""

    original: Sequence[int | None]
    sent: Sequence[int | None]
    cached: Sequence[int | None]
    budget: Sequence[int | None]


def check_plot(path: Path | None) -> None:
    """End the command where nothing could be drawn there, before it does its work."""
    if path is None:
        return
    if path.suffix.lower() not in _PLOTS:
        # matplotlib would add an ending of its own, and write over a file that nobody named.
        stop(f"--plot {quoted(str(path))}: the name must end with .png, .svg or .pdf.", Exit.USAGE)
    reason = _why_not(path)
    if reason is not None:
        stop(f"--plot {quoted(str(path))} cannot be drawn: {reason}.", Exit.FAILED)
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        stop("--plot needs matplotlib: pip install matplotlib", Exit.FAILED)


def _why_not(path: Path) -> str | None:
    try:
        if not path.parent.is_dir():
            return "there is no such folder"
        # Of a path that cannot be looked at, `is_dir` says no from Python 3.14 on.
        return "it is a folder" if stat.S_ISDIR(path.stat().st_mode) else None
    except FileNotFoundError:
        return None
    except OSError as error:
        return error.strerror


def draw(path: Path, drawn: Drawn) -> None:
    """Draw tokens over the requests, or end the command. `path` has passed `check_plot`."""
    from matplotlib.figure import Figure

    def heights(values: Sequence[int | None]) -> list[float]:
        return [math.nan if value is None else value for value in values]

    numbers = range(1, len(drawn.original) + 1)
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.add_subplot(title="Input tokens of each request", xlabel="request", ylabel="tokens")
    axes.plot(numbers, heights(drawn.original), label="as it came")
    axes.plot(numbers, heights(drawn.sent), label="as sent")
    axes.plot(numbers, heights(drawn.cached), label="of it cached")
    axes.plot(numbers, heights(drawn.budget), label="context budget", linestyle=":", color="gray")
    axes.set_ylim(bottom=0, top=1.1 * max((value for value in drawn.original if value is not None), default=1))
    axes.legend()
    axes.grid(alpha=0.3)
    try:
        figure.savefig(path, format=path.suffix[1:].lower())
    except (OSError, ValueError) as error:
        stop(f"{path} cannot be drawn: {error}", Exit.FAILED)
    typer.echo(f"drawn: {path}", err=True)
