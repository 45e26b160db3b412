"""`gateway top`: show the sessions of the store live."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Final

import typer

from gateway.cli.common import AsJson, ConfigFile, Exit, console, fitted, load, print_json
from gateway.cli.listed import Row, SortName, order, rows
from gateway.cli.numbers import cost, count, share
from gateway.cli.sessions import StoreUrl, with_store

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from gateway.core.ports import Store

#: characters of a full bar
_BAR_WIDTH: Final = 10
#: the color for each remaining share of a budget, up to this share
_COLORS: Final = ((0.05, "red"), (0.2, "yellow"))
_MINUTE_S: Final = 60.0
_COLUMNS: Final = ("session", "run", "calls", "input", "output", "tok/min", "budget left", "mode", "cost", "idle")
#: columns that are aligned to the left
_LEFT_ALIGNED: Final = ("session", "budget left", "mode")
#: least width of a session's name
_LEAST_NAME_WIDTH: Final = 15
#: columns that a small terminal leaves out, in this order
_FIRST_TO_GO: Final = ("mode", "input", "output", "tok/min", "cost", "calls", "run", "budget left")


def top(  # noqa: PLR0917  # typer makes an option of each
    config: ConfigFile = None,
    store: StoreUrl = None,
    sort: SortName = "recent",
    limit: Annotated[int, typer.Option(metavar="N", parser=count(1, 200), help="Maximum number of sessions.")] = 20,
    every: Annotated[float, typer.Option(metavar="N", min=0.2, max=3600, help="Seconds between two updates.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print the table once and exit.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the sessions live: tokens, remaining budgets, running calls. Press Ctrl-C to stop.

    Without a terminal it prints the table once.
    """
    from gateway.config.policies import budget_policy
    from gateway.stores.damage import UnreadSessions

    by, policy = order(sort), budget_policy(load(config).settings)

    async def watch(opened: Store) -> None:
        if as_json:
            print_json(await rows(opened, policy, by, limit))
        elif once or not sys.stdout.isatty():
            out = console()
            out.print(_table(await rows(opened, policy, by, limit), {}, out.width))
        else:
            unread = UnreadSessions()
            await _watch(lambda: rows(opened, policy, by, limit, unread), every)

    try:
        with_store(config, store, watch)
    except KeyboardInterrupt:
        raise typer.Exit(Exit.DONE) from None


async def _watch(look: Callable[[], Awaitable[list[Row]]], every: float) -> None:
    from rich.live import Live

    before: dict[str, int] = {}
    since = time.monotonic()
    with Live(auto_refresh=False) as live:
        while True:
            sessions = await look()
            now = time.monotonic()
            minutes = max(0.001, now - since) / _MINUTE_S
            rates = {row["id"]: (_total(row) - before[row["id"]]) / minutes for row in sessions if row["id"] in before}
            before, since = {row["id"]: _total(row) for row in sessions}, now
            live.update(_table(sessions, rates, live.console.width), refresh=True)
            await asyncio.sleep(every)


def _total(row: Row) -> int:
    total: int = row["cumulative_token_usage"]["total_tokens"]
    return total


def _table(sessions: Sequence[Row], rates: Mapping[str, float], width: int) -> Table:
    """Return the table of sessions.

    `rates`: tokens per minute since the last update, by session. `width`: width of the terminal.
    """
    from rich.table import Table
    from rich.text import Text

    lines = [dict(zip(_COLUMNS, _cells(row, rates.get(row["id"])), strict=True)) for row in sessions]
    if not lines:
        lines = [{**dict.fromkeys(_COLUMNS, Text("")), _COLUMNS[0]: Text("no sessions yet", style="dim")}]
    longest = [max([len(name), *(line[name].cell_len for line in lines)]) for name in _COLUMNS]
    # A session's name may be shortened, a number never.
    least = [min(longest[0], _LEAST_NAME_WIDTH), *longest[1:]]
    widths = fitted(longest, least, width, [*map(_COLUMNS.index, _FIRST_TO_GO)])
    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, wide in widths.items():
        is_left = _COLUMNS[place] in _LEFT_ALIGNED
        table.add_column(_COLUMNS[place], justify="left" if is_left else "right", no_wrap=True, width=wide)
    for line in lines:
        table.add_row(*(line[_COLUMNS[place]] for place in widths))
    return table


def _cells(row: Row, rate: float | None) -> Iterator[Text]:
    """Yield one cell for each column."""
    from rich.text import Text

    usage, budget, running = row["cumulative_token_usage"], row["budget"], row["calls_under_way"]
    yield Text(row["id"], overflow="ellipsis")
    yield Text(f"{running:,}" if running else "", style="green")
    yield Text(f"{row['calls']:,}")
    yield Text(f"{usage['input_tokens']:,}")
    yield Text(f"{usage['output_tokens']:,}")
    yield Text(f"{rate:,.0f}" if rate and rate > 0 else "")  # negative after a reset
    yield _bar(max(0.0, 1 - budget["used_fraction"])) if budget is not None else Text("")
    yield Text(row["response_mode"] if budget is not None else "")
    yield Text(cost(row["cost_usd"]))
    yield Text(_ago(row["last_call_at"]))


def _bar(left: float) -> Text:
    from rich.text import Text

    full = round(left * _BAR_WIDTH)
    color = next((name for share, name in _COLORS if left <= share), "green")
    return Text.assemble(("█" * full, color), ("░" * (_BAR_WIDTH - full), "dim"), f" {share(left):>5}")


def _ago(moment: str) -> str:
    seconds = max(0.0, (datetime.now(UTC) - datetime.fromisoformat(moment)).total_seconds())
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"
