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

#: number of invalid lines that are reported
_MOST_COMPLAINTS = 5
#: most characters of a session's name in a table
LONGEST_NAME = 40
#: file name extensions of plots
_PLOT_FORMATS: Final = (".png", ".svg", ".pdf")


class Complaints:
    """Report invalid lines, but only the first ones."""

    def __init__(self) -> None:
        self._count = 0

    def of(self, name: str) -> Callable[[int, str], None]:
        """Return a function that reports a line of this file by its number and what is wrong."""
        file = "stdin" if name == "-" else name

        def report(line: int, problem: str) -> None:
            self._count += 1
            if self._count <= _MOST_COMPLAINTS:
                typer.echo(printable(f"{file}, line {line}: {problem}"), err=True)
            elif self._count == _MOST_COMPLAINTS + 1:
                typer.echo("Further lines with problems are not reported.", err=True)

        return report


def lines_of(name: str) -> Iterator[bytes]:
    """Yield the lines of a file. End the command if it cannot be read completely: half of a recording misleads."""
    if name == "-":
        yield from sys.stdin.buffer
        return
    try:
        with gzip.open(name) if name.endswith(".gz") else Path(name).open("rb") as lines:
            yield from lines
    except (OSError, EOFError, zlib.error) as error:
        stop(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}", Exit.FAILED)


def share_of(part: int, whole: int) -> str:
    """Return a part in percent of the whole, or an empty text if the whole is 0."""
    return share(part / whole) if whole else ""


@dataclass(frozen=True, slots=True)
class PlotLines:
    """The lines of a plot: input tokens of each request, in order; None leaves a gap."""

    original: Sequence[int | None]
    sent: Sequence[int | None]
    cached: Sequence[int | None]
    budget: Sequence[int | None]


def check_plot(path: Path | None) -> None:
    """End the command if the plot could not be written to this path. Called before the work starts."""
    if path is None:
        return
    if path.suffix.lower() not in _PLOT_FORMATS:
        # matplotlib would append its own extension, and overwrite a file that the user did not name.
        stop(f"--plot {quoted(str(path))}: the name must end with .png, .svg or .pdf.", Exit.USAGE)
    reason = _plot_obstacle(path)
    if reason is not None:
        stop(f"--plot {quoted(str(path))} cannot be written: {reason}.", Exit.FAILED)
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        stop("--plot needs matplotlib: pip install matplotlib", Exit.FAILED)


def _plot_obstacle(path: Path) -> str | None:
    try:
        if not path.parent.is_dir():
            return "the folder does not exist"
        # From Python 3.14, `is_dir` returns False for a path without permission. `stat` raises the error.
        return "it is a folder" if stat.S_ISDIR(path.stat().st_mode) else None
    except FileNotFoundError:
        return None
    except OSError as error:
        return error.strerror


def draw(path: Path, lines: PlotLines) -> None:
    """Draw the tokens of each request into a file, or end the command. `path` has passed `check_plot`."""
    from matplotlib.figure import Figure

    def with_gaps(values: Sequence[int | None]) -> list[float]:
        return [math.nan if value is None else value for value in values]

    numbers = range(1, len(lines.original) + 1)
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.add_subplot(title="Input tokens of each request", xlabel="request", ylabel="tokens")
    axes.plot(numbers, with_gaps(lines.original), label="received")
    axes.plot(numbers, with_gaps(lines.sent), label="sent")
    axes.plot(numbers, with_gaps(lines.cached), label="cached")
    axes.plot(numbers, with_gaps(lines.budget), label="context budget", linestyle=":", color="gray")
    axes.set_ylim(bottom=0, top=1.1 * max((value for value in lines.original if value is not None), default=1))
    axes.legend()
    axes.grid(alpha=0.3)
    try:
        figure.savefig(path, format=path.suffix[1:].lower())
    except (OSError, ValueError) as error:
        stop(f"{path} cannot be written: {error}", Exit.FAILED)
    typer.echo(f"wrote {path}", err=True)
