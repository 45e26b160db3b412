"""`gateway sessions`: read, reset and delete sessions in the store, whether or not a gateway runs on it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from gateway.cli.common import AsJson, ConfigFile, Exit, config_problems, load, print_json, print_table, stop

if TYPE_CHECKING:
    from gateway.core.ports import SessionKey, Store

T = TypeVar("T")

app = typer.Typer(help="Sessions: totals, calls, reset, delete.", invoke_without_command=True)

SessionId = Annotated[str, typer.Argument(metavar="ID", help="The session's id; KEY/ID for that of a client key.")]
Sort = Annotated[str, typer.Option(help="recent or tokens")]
Limit = Annotated[int, typer.Option(min=1, max=10_000)]
StoreUrl = Annotated[str | None, typer.Option("--store", metavar="URL", help="Instead of store.url.")]


@app.callback()
def sessions(  # noqa: PLR0917  # typer calls it by name
    context: typer.Context,
    config: ConfigFile = None,
    store: StoreUrl = None,
    sort: Sort = "recent",
    limit: Limit = 50,
    as_json: AsJson = False,
) -> None:
    """List the sessions where no other command is named."""
    if context.invoked_subcommand is None:
        show_list(config, store, sort, limit, as_json=as_json)


@app.command("list")
def show_list(
    config: ConfigFile = None,
    store: StoreUrl = None,
    sort: Sort = "recent",
    limit: Limit = 50,
    as_json: AsJson = False,
) -> None:
    """List sessions."""
    from gateway.server.auth import Access
    from gateway.server.sessions import session_json

    if sort not in ("recent", "tokens"):
        stop("--sort is recent or tokens", Exit.USAGE)
    page = _with_store(config, store, lambda opened: opened.sessions(None, limit, None, sort))
    rows = [session_json(view, Access(None, admin=True)) for view in page.sessions]
    if as_json:
        print_json(rows)
        return
    columns = ("session", "calls", "input", "output", "total", "cost $", "usage", "last call")
    print_table(columns, [_row(row) for row in rows], right=("calls", "input", "output", "total", "cost $"))


@app.command()
def show(session: SessionId, config: ConfigFile = None, store: StoreUrl = None, as_json: AsJson = False) -> None:
    """Show one session and its last calls."""
    from gateway.server.auth import Access
    from gateway.server.sessions import call_json, session_json

    key, everything = _key(session), Access(None, admin=True)

    async def read(opened: Store) -> dict[str, Any] | None:
        view = await opened.session(key)
        if view is None:
            return None
        calls = [call_json(record, everything) for record in await opened.calls(key, 20)]
        return {**session_json(view, everything), "last_calls": calls}

    found = _with_store(config, store, read)
    if found is None:
        stop(f'There is no session "{session}".', Exit.FAILED)
    if as_json:
        print_json(found)
        return
    print_table(("", ""), [[name, value] for name, value in _facts(found)])
    typer.echo()
    columns = ("started", "model", "status", "outcome", "input", "output", "usage", "tools", "ms")
    print_table(columns, [_call_row(row) for row in found["last_calls"]], right=("input", "output", "ms"))


@app.command()
def reset(session: SessionId, config: ConfigFile = None, store: StoreUrl = None) -> None:
    """Set a session's totals to zero; its call records stay."""
    key = _key(session)
    _say(_with_store(config, store, lambda opened: opened.reset(key)), session, "reset")


@app.command()
def delete(session: SessionId, config: ConfigFile = None, store: StoreUrl = None) -> None:
    """Forget a session and its call records."""
    key = _key(session)
    _say(_with_store(config, store, lambda opened: opened.delete(key)), session, "deleted")


def _say(done: bool, session: str, what: str) -> None:
    if not done:
        stop(f'There is no session "{session}".', Exit.FAILED)
    typer.echo(f"{what} {session}", err=True)


def _key(text: str) -> SessionKey:
    from gateway.server.sessions import session_key

    key = session_key(text, None)
    if key is None:
        stop(f'"{text}" is no session id: 1-255 characters of A-Z a-z 0-9 . _ : -', Exit.USAGE)
    return key


def _with_store(file: Path | None, url: str | None, work: Callable[[Store], Awaitable[T]]) -> T:
    from gateway.core.errors import StoreUnavailable
    from gateway.wiring import open_store

    settings = load(file, {"store.url": url} if url else None).settings
    path = settings.store.sqlite_path
    if path is None:
        stop(
            "store.url is memory://: only the running gateway knows its sessions. Ask it: GET /api/sessions",
            Exit.FAILED,
        )
    if not path.exists():
        stop(f"There is no store at {path} yet; the first call makes it.", Exit.FAILED)

    async def run() -> T:
        store = open_store(settings)
        try:
            return await work(store)
        finally:
            await store.aclose()

    with config_problems():
        try:
            return asyncio.run(run())
        except StoreUnavailable as fault:
            stop(fault.message, Exit.FAILED)


def _facts(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in found.items():
        if isinstance(value, dict):
            yield from ((part, f"{number:,}") for part, number in value.items())
        elif name != "last_calls":
            yield name, "?" if value is None else str(value)


def _row(row: dict[str, Any]) -> list[str]:
    usage = row["cumulative_token_usage"]
    return [
        row["id"],
        f"{row['calls']:,}",
        f"{usage['input_tokens']:,}",
        f"{usage['output_tokens']:,}",
        f"{usage['total_tokens']:,}",
        row["cost_usd"] or "?",
        row["usage_source"],
        row["last_call_at"],
    ]


def _call_row(row: dict[str, Any]) -> list[str]:
    usage = row["usage"] or {}
    return [
        row["started_at"],
        row["model"],
        str(row["status"]),
        row["outcome"],
        f"{usage.get('input_tokens', 0):,}",
        f"{usage.get('output_tokens', 0):,}",
        row["usage_source"] or "",
        ", ".join(row["tools"]),
        f"{row['duration_ms']:,.0f}",
    ]
