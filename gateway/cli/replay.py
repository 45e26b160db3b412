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
from gateway.cli.recordings import LONGEST_NAME, Complaints, Drawn, check_plot, draw, lines_of, share_of
from gateway.cli.sessions import StoreUrl

if TYPE_CHECKING:
    from gateway.replay.requests import RecordedRequest, ReplayedTurn, RequestSums

_NUMBERS: Final = ("requests", "refused", "cuts", "tokens", "sent", "cached", "cached as sent", "cost", "as sent")
#: columns that a narrow terminal has no room for, in this order
_FIRST_TO_GO: Final = ("cuts", "cached", "cached as sent", "refused", "cost", "as sent")


@dataclass(slots=True)
class _Found:
    """What a replay found: by session, in all, and each turn."""

    sessions: dict[str, RequestSums] = field(default_factory=dict)
    turns: list[ReplayedTurn] = field(default_factory=list)


def replay(  # noqa: PLR0917  # typer makes an option of each
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE|SESSION|-...",
            help="JSON lines, also packed (.gz); - is stdin. With --records also sessions of the store; none: all.",
        ),
    ] = None,
    records: Annotated[
        bool, typer.Option("--records", help="Read the gateway's own records of calls, which hold no text.")
    ] = False,
    budget: Annotated[
        int | None,
        typer.Option(
            "--budget", metavar="N", parser=count(1), help="Input tokens of a call, if lower than configured."
        ),
    ] = None,
    session_budget: Annotated[
        int | None,
        typer.Option(
            "--session-budget",
            metavar="N",
            parser=count(0),
            help="Tokens of a session (budget.tokens); with --records.",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option("-m", "--model", metavar="NAME", help="Plan for this model, not their own.")
    ] = None,
    conversations: Annotated[
        bool, typer.Option("--conversations", help="Each line is a whole conversation; every call of it is made anew.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="PNG|SVG|PDF", help="Draw tokens over the requests; needs matplotlib."),
    ] = None,
    top: Annotated[
        int,
        typer.Option("--sessions", metavar="N", parser=count(0), help="Sessions to list, those with most tokens."),
    ] = 20,
    config: ConfigFile = None,
    store: StoreUrl = None,
    as_json: AsJson = False,
) -> None:
    """Report what the configuration would have done with recorded requests: tokens removed, sent and cached, and cost.

    A line is a request body, or {"session": …, "body": {…}}. With --records it is the record of a call, and what is
    reported is what was used and when budgets would have been felt. Nothing is sent anywhere.
    """
    from gateway.cli import replay_records

    check_plot(plot)
    if records:
        if model is not None or conversations:
            stop("-m and --conversations need requests; a record has no text to plan with.", Exit.USAGE)
        wanted = replay_records.Wanted(files or [], config, store, budget, session_budget)
        replay_records.report(wanted, top, plot, as_json=as_json)
        return
    if session_budget is not None or store is not None:
        stop("--session-budget and --store go with --records.", Exit.USAGE)
    if not files:
        stop("Name a file of requests, or - for stdin; or --records for the gateway's own records.", Exit.USAGE)
    _report(_Asked(files, conversations, budget, model, config), top, plot, as_json=as_json)


@dataclass(frozen=True, slots=True)
class _Asked:
    """The requests to replay, and how."""

    files: Sequence[str]
    whole: bool
    budget: int | None
    model: str | None
    config: Path | None


def _report(asked: _Asked, top: int, plot: Path | None, *, as_json: bool) -> None:
    from gateway.replay.requests import RequestSums

    found = _replayed(asked)
    if not found.turns:
        stop("There is no request in there that could be replayed.", Exit.FAILED)
    total = RequestSums()
    for turn in found.turns:
        total.add(turn)
    if plot is not None:
        draw(plot, _lines_of(found.turns))
    if as_json:
        sessions = {name: sums.as_json() for name, sums in found.sessions.items()}
        print_json({"total": total.as_json(), "sessions": sessions})
        return
    _print(found.sessions, total, top)


def _lines_of(turns: Sequence[ReplayedTurn]) -> Drawn:
    return Drawn(
        original=[turn.original.tokens for turn in turns],
        sent=[turn.sent.tokens if turn.sent else None for turn in turns],
        cached=[turn.sent.cached if turn.sent else None for turn in turns],
        budget=[turn.budget for turn in turns],
    )


def _requests(asked: _Asked, complain: Complaints) -> Iterator[tuple[str, RecordedRequest]]:
    """The requests of all files, each with its file."""
    from gateway.replay.requests import read_lines

    for name in asked.files:
        for recorded in read_lines(lines_of(name), whole=asked.whole, complain=complain.of(name)):
            yield name, recorded


def _replayed(asked: _Asked) -> _Found:
    from rich.console import Console
    from rich.progress import Progress, TextColumn

    from gateway.app.resources import inspector_of
    from gateway.core.errors import GatewayError
    from gateway.replay.requests import Replay, RequestSums

    settings, complain, found = load(asked.config).settings, Complaints(), _Found()

    async def run() -> None:
        with (
            inspector_of(settings) as inspector,
            Progress(
                TextColumn("{task.completed:,.0f} requests"), console=Console(stderr=True), transient=True
            ) as progress,
        ):
            task = progress.add_task("", total=None)
            player = Replay(inspector, budget=asked.budget, model=asked.model)
            for name, recorded in _requests(asked, complain):
                try:
                    turn = await player.turn(recorded)
                except GatewayError as fault:
                    complain.of(name)(recorded.line, fault.message)
                    continue
                found.turns.append(turn)
                found.sessions.setdefault(turn.session, RequestSums()).add(turn)
                progress.advance(task)

    with config_problems():
        asyncio.run(run())
    return found


def _print(sessions: dict[str, RequestSums], total: RequestSums, top: int) -> None:
    columns = ("session", *_NUMBERS)
    shown = sorted(sessions.items(), key=lambda pair: -pair[1].original)[:top]
    rows = [_row(name[:LONGEST_NAME], sums) for name, sums in shown]
    rows.append(_row(f"all {len(sessions):,}", total))
    print_table(columns, rows, right=_NUMBERS, first_to_go=_FIRST_TO_GO)
    rules = ", ".join(f"{rule} {number:,}" for rule, number in total.rules.most_common()) or "nothing"
    typer.echo(f"{total.trimmed:,} of {total.turns:,} requests trimmed; messages changed: {rules}", err=True)
    if total.refused:
        typer.echo(f"{total.refused:,} would have been refused; they are in no sum", err=True)


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
