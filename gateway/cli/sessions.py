"""`gateway sessions`: read, reset and delete sessions in the store, whether or not a gateway runs on it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from gateway.cli.common import (
    AsJson,
    ConfigFile,
    Exit,
    config_problems,
    load,
    options_follow,
    print_json,
    print_table,
    quoted,
    stop,
)
from gateway.cli.listed import Row, SortName, order, rows

if TYPE_CHECKING:
    from gateway.config import Settings
    from gateway.core.errors import InvalidRequest
    from gateway.core.namespaces import SessionKey
    from gateway.core.ports import Store

T = TypeVar("T")

_UNITS = ("tokens", "usd", "calls")
#: parts of a session that are not among its facts: most of them have a table of their own
_IN_TABLES = ("recent_tools", "tools", "steps", "last_calls", "parent", "parents", "declared_budget")

app = typer.Typer(help="Sessions: totals, calls, reset, delete.", invoke_without_command=True)

SessionId = Annotated[str, typer.Argument(metavar="ID", help="The session's id; KEY/ID for that of a client key.")]
Limit = Annotated[int, typer.Option(min=1, max=10_000, help="Most sessions.")]
StoreUrl = Annotated[str | None, typer.Option("--store", metavar="URL", help="Instead of store.url.")]


@app.callback()
def sessions(  # noqa: PLR0917  # typer calls it by name
    context: typer.Context,
    config: ConfigFile = None,
    store: StoreUrl = None,
    sort: SortName = "recent",
    limit: Limit = 50,
    as_json: AsJson = False,
) -> None:
    """List the sessions where no other command is named."""
    options_follow(context)
    if context.invoked_subcommand is None:
        show_list(config, store, sort, limit, as_json=as_json)


@app.command("list")
def show_list(
    config: ConfigFile = None,
    store: StoreUrl = None,
    sort: SortName = "recent",
    limit: Limit = 50,
    as_json: AsJson = False,
) -> None:
    """List sessions."""
    from gateway.policies import budget_policy

    by, policy = order(sort), budget_policy(load(config).settings)
    found = with_store(config, store, lambda opened: rows(opened, policy, by, limit))
    if as_json:
        print_json(found)
        return
    columns = ("session", "calls", "input", "output", "total", "budget left", "cost $", "usage", "last call")
    numbers = ("calls", "input", "output", "total", "budget left", "cost $")
    print_table(columns, [_row(row) for row in found], right=numbers)


@app.command()
def show(session: SessionId, config: ConfigFile = None, store: StoreUrl = None, as_json: AsJson = False) -> None:
    """Show one session and its last calls."""
    from gateway.policies import agents_of, budget_policy
    from gateway.server.auth import Access
    from gateway.server.sessions import LAST_CALLS, details_json
    from gateway.server.shown import call_json
    from gateway.stores.served import served

    key, everything, settings = _key(session), Access(None, admin=True), load(config).settings
    policy, agents = budget_policy(settings), agents_of(settings)

    async def read(opened: Store) -> dict[str, Any] | None:
        details = await details_json(opened, key, everything, await served(opened, policy), agents)
        if details is None:
            return None
        records = await opened.calls(key, LAST_CALLS)
        return {**details, "last_calls": [call_json(record, everything) for record in records]}

    found = with_store(config, store, read)
    if found is None:
        stop(f'There is no session "{session}" in {_place(config, store)}.', Exit.FAILED)
    if as_json:
        print_json(found)
        return
    print_table(("", ""), [[name, value] for name, value in _facts(found)])
    typer.echo()
    if found["tools"]:
        numbers = ("calls", "results in its context", "tokens")
        print_table(("tool", *numbers), [_tool_row(*one) for one in found["tools"].items()], right=numbers)
        typer.echo()
    columns = ("started", "model", "status", "outcome", "input", "output", "usage", "tools", "ms")
    print_table(columns, [_call_row(row) for row in found["last_calls"]], right=("input", "output", "ms"))
    error = found["last_calls"][0]["error"] if found["last_calls"] else None
    if error is not None:
        typer.echo(f"\nThe last call was answered with: {error['message']}")


@app.command()
def budget(  # noqa: PLR0917  # typer calls it by name
    session: SessionId,
    tokens: Annotated[str | None, typer.Argument(metavar="[N|none|default]", help="Tokens.")] = None,
    usd: Annotated[str | None, typer.Option(metavar="N|none", help="US dollars.")] = None,
    calls: Annotated[str | None, typer.Option(metavar="N|none", help="Calls.")] = None,
    config: ConfigFile = None,
    store: StoreUrl = None,
    as_json: AsJson = False,
) -> None:
    """Raise, lower or lift (none) one session's budget, or let the configured one hold again (default).

    It holds from the session's next call on, without a restart.
    """
    from gateway.core.errors import InvalidRequest
    from gateway.server.sessions import decided_limits

    named = {name: value for name, value in (("tokens", tokens), ("usd", usd), ("calls", calls)) if value is not None}
    if not named or ("default" in named.values() and len(named) > 1):
        stop("Name a number of tokens, none or default; or --usd, or --calls.", Exit.USAGE)
    asked = "default" if tokens == "default" else {name: None if v == "none" else v for name, v in named.items()}
    try:
        limits = decided_limits(asked)
    except InvalidRequest as fault:
        stop(_refused(fault, named), Exit.USAGE)
    key, settings = _key(session), load(config).settings

    async def change(opened: Store) -> dict[str, Any]:
        await opened.decide(key.account, limits)
        return await _changed(opened, key, settings)

    now = with_store(config, store, change)
    remark = "" if "calls" in now else f"; it has made no call yet in {_place(config, store)}"
    _tell(now, f"{session}: {_budget_said(now['budget'])}{remark}", as_json=as_json)


@app.command()
def reset(session: SessionId, config: ConfigFile = None, store: StoreUrl = None, as_json: AsJson = False) -> None:
    """Set a session's totals to zero; its call records stay."""
    from gateway.server.sessions import reset_session

    key, settings = _key(session), load(config).settings

    async def change(opened: Store) -> dict[str, Any] | None:
        return await _changed(opened, key, settings) if await reset_session(opened, key) else None

    now = with_store(config, store, change)
    if now is None:
        stop(f'There is no session "{session}" in {_place(config, store)}.', Exit.FAILED)
    _tell(now, f"reset {session}", as_json=as_json)


@app.command()
def delete(session: SessionId, config: ConfigFile = None, store: StoreUrl = None, as_json: AsJson = False) -> None:
    """Forget a session and its call records."""
    from gateway.server.auth import Access
    from gateway.server.sessions import delete_session, deleted_json

    key = _key(session)
    if not with_store(config, store, lambda opened: delete_session(opened, key)):
        stop(f'There is no session "{session}" in {_place(config, store)}.', Exit.FAILED)
    _tell(deleted_json(key, Access(None, admin=True)), f"deleted {session}", as_json=as_json)


async def _changed(opened: Store, key: SessionKey, settings: Settings) -> dict[str, Any]:
    """A session after a change, as the API shows it to an administrator."""
    from gateway.policies import agents_of, budget_policy
    from gateway.server.auth import Access
    from gateway.server.sessions import changed_json
    from gateway.stores.served import served

    policy = await served(opened, budget_policy(settings))
    return await changed_json(opened, key, Access(None, admin=True), policy, agents_of(settings))


def _refused(fault: InvalidRequest, named: Mapping[str, str]) -> str:
    """The API's words about a limit, with what was typed; no limit is `null` there and `none` here."""
    name = (fault.param or "").rpartition(".")[2]
    typed = f"{'' if name == 'tokens' else '--'}{name} {quoted(named.get(name, ''))}"
    return f"{typed}: {fault.message.replace('null', 'none')}"


def _tell(now: dict[str, Any], said: str, *, as_json: bool) -> None:
    if as_json:
        print_json(now)
    else:
        typer.echo(said, err=True)


def _key(text: str) -> SessionKey:
    from gateway.core.identity import ID_FORM
    from gateway.core.namespaces import SessionKey

    key = SessionKey.parse(text)
    if key is None:
        stop(f"{quoted(text)} is no session id, which is {ID_FORM}. That of a client key is KEY/ID.", Exit.USAGE)
    return key


def with_store(file: Path | None, url: str | None, work: Callable[[Store], Awaitable[T]], *, make: bool = False) -> T:
    """What `work` gives, done on the configured store; `make`: where there is none yet, it is made."""
    from gateway.core.errors import StoreUnavailable
    from gateway.opening import open_store

    settings = load(file, {"store.url": url} if url else None).settings
    path = settings.store.sqlite_path
    if path is None and not settings.store.is_redis:
        stop(
            "store.url is memory://: only the running gateway knows its sessions. Ask it: GET /api/sessions",
            Exit.FAILED,
        )
    if path is not None and not make and not path.exists():
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


def _place(file: Path | None, url: str | None) -> str:
    """The store that was looked into: a running gateway may have been started on another."""
    return load(file, {"store.url": url} if url else None).settings.store.shown_url


def _facts(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in found.items():
        if name in _IN_TABLES:
            continue
        if name == "budget" and isinstance(value, dict):
            yield from _budget_facts(value)
        elif isinstance(value, dict):
            prefix = "" if name == "cumulative_token_usage" else f"{name} "
            yield from ((prefix + part, f"{number:,}") for part, number in value.items())
        else:
            yield name, {"budget": "none", "active_step": "none"}.get(name, "?") if value is None else str(value)
    for parent in found["parents"]:
        yield f"parent {parent['id']}", _budget_said(parent["budget"])
    if found["declared_budget"] is not None:
        yield "declared by its last call", ", ".join(_limits_said(found["declared_budget"]))


def _budget_said(budget: dict[str, Any] | None) -> str:
    if budget is None:
        return "no budget"
    return f"{', '.join(_limits_said(budget))} ({budget['used_fraction']:.0%} used)"


def _limits_said(limits: dict[str, Any]) -> list[str]:
    return [f"{limits[unit]} USD" if unit == "usd" else f"{limits[unit]:,} {unit}" for unit in _limited(limits)]


def _limited(budget: dict[str, Any]) -> list[str]:
    return [unit for unit in _UNITS if budget[unit] is not None]


def _budget_facts(budget: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for unit in _limited(budget):
        used, limit = (f"{value:,}" if unit != "usd" else value for value in (budget["used"][unit], budget[unit]))
        yield f"budget {unit}", f"{used} of {limit} used"
    yield "budget held", f"{budget['held']:,}"
    yield "budget used", f"{budget['used_fraction']:.1%}"
    if budget["resets_in_s"] is not None:
        yield "budget refills in", f"{budget['resets_in_s']:,} s"


def _row(row: Row) -> list[str]:
    usage = row["cumulative_token_usage"]
    return [
        row["id"],
        f"{row['calls']:,}",
        f"{usage['input_tokens']:,}",
        f"{usage['output_tokens']:,}",
        f"{usage['total_tokens']:,}",
        _left(row["budget"]),
        row["cost_usd"] or "?",
        row["usage_source"],
        row["last_call_at"],
    ]


def _left(budget: dict[str, Any] | None) -> str:
    if budget is None:
        return ""
    if budget["tokens"] is not None:
        return f"{budget['remaining']:,}"
    return f"{max(0.0, 1 - budget['used_fraction']):.0%}"


def _tool_row(name: str, use: dict[str, int]) -> list[str]:
    return [name, *(f"{use[part]:,}" for part in ("calls", "results", "result_tokens"))]


def _call_row(row: dict[str, Any]) -> list[str]:
    usage = row["usage"] or {}
    return [
        row["started_at"],
        row["model"],
        str(row["status"]),
        row["error_code"] or row["outcome"],
        f"{usage.get('input_tokens', 0):,}",
        f"{usage.get('output_tokens', 0):,}",
        row["usage_source"] or "",
        ", ".join(row["tools"]),
        f"{row['duration_ms']:,.0f}",
    ]
