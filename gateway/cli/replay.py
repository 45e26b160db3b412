"""`gateway replay`: recorded requests run through the planner, to choose settings before they are turned on."""

from __future__ import annotations

import asyncio
import gzip
import math
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.cli.common import AsJson, ConfigFile, Exit, config_problems, load, print_json, print_table, stop

if TYPE_CHECKING:
    from gateway.config import Settings
    from gateway.replaying import Recorded, Sums, Turn

#: lines that are complained about one by one
_COMPLAINTS = 5
_LONGEST_NAME = 40


@dataclass(slots=True)
class _Found:
    """What a replay found: by session, in all, and each turn."""

    sessions: dict[str, Sums] = field(default_factory=dict)
    turns: list[Turn] = field(default_factory=list)


def replay(  # noqa: PLR0917  # typer makes an option of each
    files: Annotated[list[str], typer.Argument(metavar="FILE|-...", help="JSON lines, also packed (.gz); - is stdin.")],
    budget: Annotated[
        int | None, typer.Option("--budget", min=1, help="Input tokens of a call, if lower than configured.")
    ] = None,
    model: Annotated[str | None, typer.Option("-m", "--model", help="Plan for this model, not their own.")] = None,
    conversations: Annotated[
        bool, typer.Option("--conversations", help="Each line is a whole conversation; every call of it is made anew.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="PNG|SVG", help="Draw tokens over the requests; needs matplotlib.")
    ] = None,
    top: Annotated[int, typer.Option("--sessions", min=0, help="Sessions to list, those with most tokens.")] = 20,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Report what the configuration would have done with recorded requests: left out, sent, cached, paid.

    A line is a request body, or {"session": …, "body": {…}}. Nothing is sent anywhere.
    """
    from gateway.replaying import Sums

    settings = load(config).settings
    complain = _Complaints()
    found = _replayed(settings, _lines(files, complain, whole=conversations), complain, budget, model)
    if not found.turns:
        stop("There is no request in there that could be replayed.", Exit.FAILED)
    total = Sums()
    for turn in found.turns:
        total.add(turn)
    if plot is not None:
        _draw(plot, found.turns)
    if as_json:
        sessions = {name: sums.as_json() for name, sums in found.sessions.items()}
        print_json({"total": total.as_json(), "sessions": sessions})
        return
    _print(found.sessions, total, top)


class _Complaints:
    """Says what is wrong with lines; of many only with the first ones."""

    def __init__(self) -> None:
        self._told = 0

    def __call__(self, place: str, what: str) -> None:
        self._told += 1
        if self._told <= _COMPLAINTS:
            typer.echo(f"{place}: {what}", err=True)
        elif self._told == _COMPLAINTS + 1:
            typer.echo("and more such lines", err=True)


def _lines(files: Sequence[str], complain: _Complaints, *, whole: bool) -> Iterator[Recorded]:
    from gateway.replaying import read_lines

    for name in files:

        def told(line: int, what: str, name: str = name) -> None:
            complain(f"{name}, line {line}", what)

        yield from read_lines(_read(name), whole=whole, complain=told)


def _read(name: str) -> Iterator[bytes]:
    """The lines of a file. One that cannot be read to its end ends the command: half of a recording misleads."""
    if name == "-":
        yield from sys.stdin.buffer
        return
    try:
        with gzip.open(name) if name.endswith(".gz") else Path(name).open("rb") as lines:
            yield from lines
    except (OSError, EOFError, zlib.error) as error:
        stop(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}", Exit.FAILED)


def _replayed(
    settings: Settings, requests: Iterable[Recorded], complain: _Complaints, budget: int | None, model: str | None
) -> _Found:
    from rich.console import Console
    from rich.progress import Progress, TextColumn

    from gateway.core.errors import GatewayError
    from gateway.replaying import Replay, Sums
    from gateway.wiring import inspector_of

    found = _Found()

    async def run() -> None:
        with (
            inspector_of(settings) as inspector,
            Progress(
                TextColumn("{task.completed:,.0f} requests"), console=Console(stderr=True), transient=True
            ) as progress,
        ):
            task = progress.add_task("", total=None)
            player = Replay(inspector, budget=budget, model=model)
            for recorded in requests:
                try:
                    turn = await player.turn(recorded)
                except GatewayError as fault:
                    complain(f"line {recorded.line}", fault.message)
                    continue
                found.turns.append(turn)
                found.sessions.setdefault(turn.session, Sums()).add(turn)
                progress.advance(task)

    with config_problems():
        asyncio.run(run())
    return found


def _print(sessions: dict[str, Sums], total: Sums, top: int) -> None:
    numbers = ("requests", "refused", "cuts", "tokens", "sent", "cached", "cached as sent", "cost $", "as sent")
    columns = ("session", *numbers)
    shown = sorted(sessions.items(), key=lambda pair: -pair[1].came)[:top]
    rows = [_row(_shown(name), sums) for name, sums in shown]
    print_table(columns, [*rows, _row(f"all {len(sessions):,}", total)], right=numbers)
    rules = ", ".join(f"{rule} {number:,}" for rule, number in total.rules.most_common()) or "nothing"
    typer.echo(f"{total.trimmed:,} of {total.turns:,} requests trimmed; messages changed: {rules}", err=True)
    if total.refused:
        typer.echo(f"{total.refused:,} would have been refused; they are in no sum", err=True)


def _shown(name: str) -> str:
    """A name out of a recording; a terminal would follow what it may hold."""
    return "".join(char if char.isprintable() else "?" for char in name[:_LONGEST_NAME])


def _row(name: str, sums: Sums) -> list[str]:
    def money(value: Any) -> str:
        return f"{value:.4f}" if value is not None else "?"

    return [
        name,
        f"{sums.turns:,}",
        f"{sums.refused:,}" if sums.refused else "",
        f"{sums.cuts:,}" if sums.cuts else "",
        f"{sums.came:,}",
        f"{sums.sent:,}",
        _share(sums.came_cached, sums.came),
        _share(sums.sent_cached, sums.sent),
        money(sums.came_usd),
        money(sums.sent_usd),
    ]


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else ""


def _draw(path: Path, turns: Sequence[Turn]) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        stop("--plot needs matplotlib: pip install matplotlib", Exit.FAILED)
    numbers = range(1, len(turns) + 1)
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.add_subplot(title="Input tokens of each request", xlabel="request", ylabel="tokens")
    axes.plot(numbers, [turn.came.tokens for turn in turns], label="as it came")
    for label, part in (("as sent", "tokens"), ("of it cached", "cached")):
        axes.plot(numbers, [getattr(turn.sent, part) if turn.sent else math.nan for turn in turns], label=label)
    budgets = [turn.budget if turn.budget is not None else math.nan for turn in turns]
    axes.plot(numbers, budgets, label="context budget", linestyle=":", color="gray")
    axes.set_ylim(bottom=0, top=1.1 * max(turn.came.tokens for turn in turns))
    axes.legend()
    axes.grid(alpha=0.3)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        stop(f"{path} cannot be drawn: {error}", Exit.FAILED)
    typer.echo(f"drawn: {path}", err=True)
