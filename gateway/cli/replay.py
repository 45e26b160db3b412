"""`gateway replay`: trim recorded requests with other settings, and compare."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from gateway.cli.common import AsJson, ConfigFile, Exit, config_problems, load, print_json, print_table, stop
from gateway.cli.numbers import cost, count
from gateway.cli.recordings import LONGEST_NAME, Complaints, PlotLines, check_plot, draw, lines_of, share_of
from gateway.cli.sessions import StoreUrl

if TYPE_CHECKING:
    from gateway.replay.requests import RecordedRequest, ReplayedTurn, RequestSums

_NUMBERS: Final = ("requests", "refused", "cuts", "tokens", "sent", "cached", "cached as sent", "cost", "as sent")
#: columns that a small terminal leaves out, in this order
_FIRST_TO_GO: Final = ("cuts", "cached", "cached as sent", "refused", "cost", "as sent")


@dataclass(slots=True)
class _Results:
    """The results of a replay: sums of each session, and all turns."""

    sessions: dict[str, RequestSums] = field(default_factory=dict)
    turns: list[ReplayedTurn] = field(default_factory=list)


def replay(  # noqa: PLR0917  # typer makes an option of each
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE|SESSION|-...",
            help="JSON lines, also compressed (.gz); - is stdin. With --records also sessions of the store; none: all.",
        ),
    ] = None,
    records: Annotated[
        bool, typer.Option("--records", help="Read the gateway's own call records, which contain no text.")
    ] = False,
    budget: Annotated[
        int | None,
        typer.Option(
            "--budget",
            metavar="N",
            parser=count(1),
            help="Most input tokens of a call; applies if lower than configured.",
        ),
    ] = None,
    session_budget: Annotated[
        int | None,
        typer.Option(
            "--session-budget",
            metavar="N",
            parser=count(0),
            help="Budget of a session in tokens (budget.tokens); with --records.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("-m", "--model", metavar="NAME", help="Plan for this model instead of the recorded ones."),
    ] = None,
    conversations: Annotated[
        bool, typer.Option("--conversations", help="Each line is a whole conversation; each of its calls is replayed.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="PNG|SVG|PDF", help="Draw the tokens of each request; needs matplotlib."),
    ] = None,
    top: Annotated[
        int,
        typer.Option(
            "--sessions", metavar="N", parser=count(0), help="Number of sessions to list, those with the most tokens."
        ),
    ] = 20,
    config: ConfigFile = None,
    store: StoreUrl = None,
    as_json: AsJson = False,
) -> None:
    """Report what the configuration would have done with recorded requests: tokens removed, sent and cached, and cost.

    A line is a request body, or {"session": …, "body": {…}}. With --records a line is a call record, and the report
    shows usage and when budgets would have taken effect. Nothing is sent.
    """
    from gateway.cli import replay_records

    check_plot(plot)
    if records:
        if model is not None or conversations:
            stop("-m and --conversations cannot be used with --records: a record contains no text.", Exit.USAGE)
        selection = replay_records.Selection(files or [], config, store, budget, session_budget)
        replay_records.report(selection, top, plot, as_json=as_json)
        return
    if session_budget is not None or store is not None:
        stop("--session-budget and --store need --records.", Exit.USAGE)
    if not files:
        stop("Name a file of requests, - for stdin, or --records for the gateway's own records.", Exit.USAGE)
    _report(_Requests(files, conversations, budget, model, config), top, plot, as_json=as_json)


@dataclass(frozen=True, slots=True)
class _Requests:
    """The requests to replay, and the options of the replay.

    `whole`: each line is a whole conversation.
    """

    files: Sequence[str]
    whole: bool
    budget: int | None
    model: str | None
    config: Path | None


def _report(wanted: _Requests, top: int, plot: Path | None, *, as_json: bool) -> None:
    from gateway.replay.requests import RequestSums

    results = _replayed(wanted)
    if not results.turns:
        stop("The input contains no request that can be replayed.", Exit.FAILED)
    total = RequestSums()
    for turn in results.turns:
        total.add(turn)
    if plot is not None:
        draw(plot, _plot_lines(results.turns))
    if as_json:
        sessions = {name: sums.as_json() for name, sums in results.sessions.items()}
        print_json({"total": total.as_json(), "sessions": sessions})
        return
    _print(results.sessions, total, top)


def _plot_lines(turns: Sequence[ReplayedTurn]) -> PlotLines:
    return PlotLines(
        original=[turn.original.tokens for turn in turns],
        sent=[turn.sent.tokens if turn.sent else None for turn in turns],
        cached=[turn.sent.cached if turn.sent else None for turn in turns],
        budget=[turn.budget for turn in turns],
    )


def _requests(wanted: _Requests, complain: Complaints) -> Iterator[tuple[str, RecordedRequest]]:
    """Yield the requests of all files, each with the name of its file."""
    from gateway.replay.requests import read_lines

    for name in wanted.files:
        for recorded in read_lines(lines_of(name), whole=wanted.whole, complain=complain.of(name)):
            yield name, recorded


def _replayed(wanted: _Requests) -> _Results:
    from rich.console import Console
    from rich.progress import Progress, TextColumn

    from gateway.app.resources import inspector_of
    from gateway.core.errors import GatewayError
    from gateway.replay.requests import Replay, RequestSums

    settings, complain, results = load(wanted.config).settings, Complaints(), _Results()

    async def run() -> None:
        with (
            inspector_of(settings) as inspector,
            Progress(
                TextColumn("{task.completed:,.0f} requests"), console=Console(stderr=True), transient=True
            ) as progress,
        ):
            task = progress.add_task("", total=None)
            player = Replay(inspector, budget=wanted.budget, model=wanted.model)
            for name, recorded in _requests(wanted, complain):
                try:
                    turn = await player.turn(recorded)
                except GatewayError as fault:
                    complain.of(name)(recorded.line, fault.message)
                    continue
                results.turns.append(turn)
                results.sessions.setdefault(turn.session, RequestSums()).add(turn)
                progress.advance(task)

    with config_problems():
        asyncio.run(run())
    return results


def _print(sessions: dict[str, RequestSums], total: RequestSums, top: int) -> None:
    columns = ("session", *_NUMBERS)
    shown = sorted(sessions.items(), key=lambda pair: -pair[1].original)[:top]
    rows = [_row(name[:LONGEST_NAME], sums) for name, sums in shown]
    rows.append(_row(f"all {len(sessions):,}", total))
    print_table(columns, rows, right=_NUMBERS, first_to_go=_FIRST_TO_GO)
    rules = ", ".join(f"{rule} {number:,}" for rule, number in total.rules.most_common()) or "nothing"
    typer.echo(f"{total.trimmed:,} of {total.turns:,} requests trimmed; messages changed: {rules}", err=True)
    if total.refused:
        typer.echo(f"{total.refused:,} would have been refused; the sums do not include them", err=True)


def _row(name: str, sums: RequestSums) -> list[str]:
    return [
        name,
        f"{sums.turns:,}",
        f"{sums.refused:,}" if sums.refused else "",
        f"{sums.cuts:,}" if sums.cuts else "",
        f"{sums.original:,}",
        f"{sums.sent:,}",
        share_of(sums.original_cached, sums.original),
        share_of(sums.sent_cached, sums.sent),
        cost(sums.original_usd),
        cost(sums.sent_usd),
    ]
