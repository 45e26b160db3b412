"""`gateway top`: the sessions of the store, live, whether or not the gateway that serves them runs on this machine."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from gateway.cli.common import AsJson, ConfigFile, Exit, load, print_json, stop
from gateway.cli.sessions import StoreUrl, with_store

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from gateway.core.ports import Store
    from gateway.core.spending import BudgetPolicy

_BAR: Final = 10
#: share of a budget that is left, from which down it is shown in this color
_COLORS: Final = ((0.05, "red"), (0.2, "yellow"))
_MINUTE_S: Final = 60.0
_COLUMNS: Final = ("session", "run", "calls", "input", "output", "tok/min", "budget left", "mode", "cost $", "idle")
_LEFT: Final = ("session", "budget left", "mode")

#: a session as the API shows it
Row = dict[str, Any]


def top(  # noqa: PLR0917  # typer makes an option of each
    config: ConfigFile = None,
    store: StoreUrl = None,
    sort: Annotated[str, typer.Option(help="recent or tokens")] = "recent",
    limit: Annotated[int, typer.Option(min=1, max=200, help="Sessions.")] = 20,
    every: Annotated[float, typer.Option(min=0.2, max=3600, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and end.")] = False,
    as_json: AsJson = False,
) -> None:
    """Watch the sessions: tokens, what is left of their budgets, calls under way. Ctrl-C ends it."""
    from gateway.policies import budget_policy

    if sort not in ("recent", "tokens"):
        stop("--sort is recent or tokens", Exit.USAGE)
    policy = budget_policy(load(config).settings)

    async def watch(opened: Store) -> None:
        if once or as_json:
            rows = await _look(opened, policy, sort, limit)
            print_json(rows) if as_json else _print(_table(rows, {}))
            return
        await _watch(lambda: _look(opened, policy, sort, limit), every)

    try:
        with_store(config, store, watch)
    except KeyboardInterrupt:
        raise typer.Exit(Exit.DONE) from None


async def _watch(look: Callable[[], Awaitable[list[Row]]], every: float) -> None:
    from rich.live import Live

    before: dict[str, int] = {}
    since = time.monotonic()
    with Live(_table((), {}), auto_refresh=False) as live:
        while True:
            rows = await look()
            now = time.monotonic()
            minutes = max(0.001, now - since) / _MINUTE_S
            rates = {row["id"]: (_total(row) - before[row["id"]]) / minutes for row in rows if row["id"] in before}
            before, since = {row["id"]: _total(row) for row in rows}, now
            live.update(_table(rows, rates), refresh=True)
            await asyncio.sleep(every)


async def _look(store: Store, policy: BudgetPolicy, sort: str, limit: int) -> list[Row]:
    """The sessions now, as the API shows them."""
    from gateway.server.auth import Access
    from gateway.server.sessions import session_json, standings_of

    page = await store.sessions(None, limit, None, sort)
    stands = await standings_of(store, [view.key for view in page.sessions], policy)
    everything = Access(None, admin=True)
    return [session_json(view, everything, one) for view, one in zip(page.sessions, stands, strict=True)]


def _total(row: Row) -> int:
    total: int = row["cumulative_token_usage"]["total_tokens"]
    return total


def _print(table: Table) -> None:
    from rich.console import Console

    # A file or a pipe has no width: nothing is cut there.
    Console(width=None if sys.stdout.isatty() else 400).print(table)


def _table(rows: Sequence[Row], rates: Mapping[str, float]) -> Table:
    """`rates`: tokens a minute since the last look, by session."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in _COLUMNS:
        # Where the terminal is narrow a session's name gives way, never a number.
        least = 10 if name == "session" else _BAR + 5 if name == "budget left" else len(name)
        table.add_column(name, justify="left" if name in _LEFT else "right", no_wrap=True, min_width=least)
    for row in rows:
        usage, budget, running, rate = (
            row["cumulative_token_usage"], row["budget"], row["calls_under_way"], rates.get(row["id"])
        )  # fmt: skip
        table.add_row(
            Text(row["id"]),
            Text(str(running) if running else "", style="green"),
            f"{row['calls']:,}",
            f"{usage['input_tokens']:,}",
            f"{usage['output_tokens']:,}",
            f"{rate:,.0f}" if rate else "",
            _bar(max(0.0, 1 - budget["used_fraction"])) if budget is not None else "",
            row["response_mode"] if budget is not None else "",
            row["cost_usd"] or "?",
            _ago(row["last_call_at"]),
        )
    if not rows:
        table.add_row(Text("no sessions yet", style="dim"))
    return table


def _bar(left: float) -> Text:
    from rich.text import Text

    full = round(left * _BAR)
    color = next((name for share, name in _COLORS if left <= share), "green")
    return Text.assemble(("█" * full, color), ("░" * (_BAR - full), "dim"), f" {left:>4.0%}")


def _ago(moment: str) -> str:
    seconds = max(0.0, (datetime.now(UTC) - datetime.fromisoformat(moment)).total_seconds())
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"
