"""`gateway sessions`: read, reset and delete sessions in the store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer

from gateway.cli.common import (
    AsJson,
    Command,
    ConfigFile,
    Exit,
    Group,
    config_problems,
    load,
    options_follow,
    print_json,
    print_table,
    quoted,
    stop,
    with_store_url,
)
from gateway.cli.listed import Row, SortName, order, rows
from gateway.cli.numbers import RAISE, cost, count, dollars, moment, number, raised, share, span, whole_number

if TYPE_CHECKING:
    from gateway.config import Settings
    from gateway.core.errors import InvalidRequest
    from gateway.core.ledger.arithmetic import Dimension
    from gateway.core.ledger.session_key import SessionKey
    from gateway.core.ports import Sessions, Store

T = TypeVar("T")

_UNITS = ("tokens", "usd", "calls")
#: columns of the list, and of a session's calls, that a narrow terminal has no room for, in this order
_LISTED_LAST = ("usage", "input", "output", "last call", "calls")
_CALLS_LAST = ("usage", "outcome", "tools", "ms")
#: sessions among which one is looked for whose name is like another one
_SEARCHED = 1_000
#: parts of a session that are not among its facts: most of them have a table of their own
_IN_TABLES = ("recent_tools", "tools", "steps", "last_calls", "parent", "parents", "declared_budget")

app = typer.Typer(cls=Group, help="List, show, reset or delete sessions.", invoke_without_command=True)

SessionId = Annotated[str, typer.Argument(metavar="ID", help="The session's id; KEY/ID for that of a client key.")]
Limit = Annotated[int, typer.Option(metavar="N", parser=count(1, 10_000), help="Maximum number of sessions.")]
StoreUrl = Annotated[
    str | None,
    typer.Option(
        "--store", metavar="URL|mock", help="Instead of store.url; mock selects the store of gateway serve --mock."
    ),
]


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


@app.command("list", cls=Command)
def show_list(
    config: ConfigFile = None,
    store: StoreUrl = None,
    sort: SortName = "recent",
    limit: Limit = 50,
    as_json: AsJson = False,
) -> None:
    """List sessions."""
    from gateway.config.policies import budget_policy

    by, policy = order(sort), budget_policy(load(config).settings)
    found = with_store(config, store, lambda opened: rows(opened, policy, by, limit))
    if as_json:
        print_json(found)
        return
    columns = ("session", "calls", "input", "output", "total", "budget left", "cost", "usage", "last call")
    numbers = ("calls", "input", "output", "total", "budget left", "cost", "last call")
    print_table(columns, [_row(row) for row in found], right=numbers, first_to_go=_LISTED_LAST)


@app.command(cls=Command)
def show(session: SessionId, config: ConfigFile = None, store: StoreUrl = None, as_json: AsJson = False) -> None:
    """Show one session and its last calls."""
    from gateway.config.policies import agents_of, budget_policy
    from gateway.server.auth import Access
    from gateway.server.sessions import LAST_CALLS, details_json
    from gateway.server.shown import call_json
    from gateway.stores.running_budget import with_running_budget

    key, everything, settings = _key(session), Access(None, admin=True), load(config).settings
    policy, agents = budget_policy(settings), agents_of(settings)

    async def read(opened: Store) -> dict[str, Any] | None:
        details = await details_json(opened, key, everything, await with_running_budget(opened, policy), agents)
        if details is None:
            return None
        records = await opened.calls(key, LAST_CALLS)
        return {**details, "last_calls": [call_json(record, everything) for record in records]}

    found = with_store(config, store, read)
    if found is None:
        _no_session(session, config, store)
    if as_json:
        print_json(found)
        return
    print_table(("", ""), [[name, value] for name, value in _facts(found)])
    typer.echo()
    if found["tools"]:
        numbers = ("calls", "results in context", "tokens")
        print_table(("tool", *numbers), [_tool_row(*one) for one in found["tools"].items()], right=numbers)
        typer.echo()
    columns = ("started", "model", "status", "outcome", "input", "output", "usage", "tools", "ms")
    calls = [_call_row(row) for row in found["last_calls"]]
    print_table(columns, calls, right=("started", "input", "output", "ms"), first_to_go=_CALLS_LAST)
    error = found["last_calls"][0]["error"] if found["last_calls"] else None
    if error is not None:
        typer.echo(f"\nThe last call was answered with: {error['message']}")


@app.command(cls=Command)
def budget(  # noqa: PLR0917  # typer calls it by name
    session: SessionId,
    tokens: Annotated[
        str | None, typer.Argument(metavar="N|+N%|none|default", help="Tokens: 600,000, 500k, or +50% for half more.")
    ] = None,
    usd: Annotated[str | None, typer.Option(metavar="N|+N%|none", help="US dollars.")] = None,
    calls: Annotated[str | None, typer.Option(metavar="N|+N%|none", help="Calls.")] = None,
    config: ConfigFile = None,
    store: StoreUrl = None,
    as_json: AsJson = False,
) -> None:
    """Raise, lower or lift (none) one session's budget, or let the configured one hold again (default).

    It holds from the session's next call on, without a restart.
    """
    named = {name: value for name, value in (("tokens", tokens), ("usd", usd), ("calls", calls)) if value is not None}
    if not named or ("default" in named.values() and len(named) > 1):
        stop("Name a number of tokens, none or default; or --usd, or --calls.", Exit.USAGE)
    key, settings = _key(session), load(config).settings

    is_raise = any(map(RAISE.fullmatch, named.values()))
    limits = None if is_raise else _limits(named, None)

    async def change(opened: Store) -> dict[str, Any]:
        now = (await _changed(opened, key, settings))["budget"] if is_raise else None
        await opened.decide(key.account, _limits(named, now) if is_raise else limits)
        return await _changed(opened, key, settings)

    now = with_store(config, store, change)
    remark = ""
    if "calls" not in now:
        alike = with_store(config, store, lambda opened: like_session(opened, session))
        remark = f"; it has made no call yet in {_place(config, store)}{alike}"
    _tell(now, f"{session}: {_budget_said(now['budget'])}{remark}", as_json=as_json)


@app.command(cls=Command)
def reset(session: SessionId, config: ConfigFile = None, store: StoreUrl = None, as_json: AsJson = False) -> None:
    """Set a session's totals to zero; its call records stay."""
    from gateway.server.sessions import reset_session

    key, settings = _key(session), load(config).settings

    async def change(opened: Store) -> dict[str, Any] | None:
        return await _changed(opened, key, settings) if await reset_session(opened, key) else None

    now = with_store(config, store, change)
    if now is None:
        _no_session(session, config, store)
    _tell(now, f"reset {session}", as_json=as_json)


@app.command(cls=Command)
def delete(session: SessionId, config: ConfigFile = None, store: StoreUrl = None, as_json: AsJson = False) -> None:
    """Forget a session and its call records."""
    from gateway.server.auth import Access
    from gateway.server.sessions import delete_session, deleted_json

    key = _key(session)
    if not with_store(config, store, lambda opened: delete_session(opened, key)):
        _no_session(session, config, store)
    _tell(deleted_json(key, Access(None, admin=True)), f"deleted {session}", as_json=as_json)


async def _changed(opened: Store, key: SessionKey, settings: Settings) -> dict[str, Any]:
    """A session after a change, as the API shows it to an administrator."""
    from gateway.config.policies import agents_of, budget_policy
    from gateway.server.auth import Access
    from gateway.server.sessions import changed_json
    from gateway.stores.running_budget import with_running_budget

    policy = await with_running_budget(opened, budget_policy(settings))
    return await changed_json(opened, key, Access(None, admin=True), policy, agents_of(settings))


def _limits(named: Mapping[str, str], budget: Mapping[str, Any] | None) -> Mapping[Dimension, int | None] | None:
    """Return the limits to set, from what was typed, or end the command. `budget`: the one in force."""
    from gateway.core.errors import InvalidRequest
    from gateway.server.sessions import decided_limits

    try:
        if named.get("tokens") == "default":
            return decided_limits("default")
        return decided_limits({name: _limit(named, name, (budget or {}).get(name)) for name in named})
    except InvalidRequest as fault:
        stop(_refused(fault, named), Exit.USAGE)


def _limit(named: Mapping[str, str], name: str, now: int | str | None) -> str | None:
    """Return the limit to set for one unit: a number, or None for no limit. `now`: the one in force."""
    text = named[name]
    match = RAISE.fullmatch(text)
    if text == "none":
        return None
    if match is None:
        try:
            return str(number(text) if name == "usd" else whole_number(text))
        except ValueError as error:
            stop(f"{_typed(named, name)}: {error}, or none for no limit.", Exit.USAGE)
    if now is None:
        stop(f"{_typed(named, name)}: there is no limit to raise; name a number.", Exit.USAGE)
    return raised(now, Decimal(match[1]), whole=name != "usd")


def _typed(named: Mapping[str, str], name: str) -> str:
    """Return an option with its value, as it was typed."""
    return f"{'' if name == 'tokens' else '--'}{name} {quoted(named.get(name, ''))}"


def _refused(fault: InvalidRequest, named: Mapping[str, str]) -> str:
    """The API's words about a limit, with what was typed; no limit is `null` there and `none` here."""
    name = (fault.param or "").rpartition(".")[2]
    return f"{_typed(named, name)}: {fault.message.replace('null', 'none')}"


def _tell(now: dict[str, Any], said: str, *, as_json: bool) -> None:
    if as_json:
        print_json(now)
    else:
        typer.echo(said, err=True)


def _key(text: str) -> SessionKey:
    from gateway.core.identity import ID_FORM
    from gateway.core.ledger.session_key import SessionKey

    key = SessionKey.parse(text)
    if key is None:
        stop(f"{quoted(text)} is no session id, which is {ID_FORM}. That of a client key is KEY/ID.", Exit.USAGE)
    return key


def with_store(file: Path | None, url: str | None, work: Callable[[Store], Awaitable[T]], *, make: bool = False) -> T:
    """What `work` gives, done on the configured store; `make`: where there is none yet, it is made."""
    from gateway.app.resources import open_store
    from gateway.core.errors import StoreUnavailable

    settings = with_store_url(file, url)
    path = settings.store.sqlite_path
    if path is None and not settings.store.is_redis:
        stop(
            "store.url is memory://: only the running gateway knows its sessions. Ask it: GET /api/sessions",
            Exit.FAILED,
        )
    if path is not None and not make and not path.exists():
        stop(f"There is no store at {path} yet; the first call makes it{_mock_said(settings, url)}.", Exit.FAILED)

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


def _no_session(session: str, config: Path | None, store: str | None) -> NoReturn:
    """End the command, with the name of a session that may have been meant."""
    alike = with_store(config, store, lambda opened: like_session(opened, session))
    stop(f"There is no session {quoted(session)} in {_place(config, store)}{alike}.", Exit.FAILED)


async def like_session(opened: Sessions, name: str) -> str:
    """Return a suggestion, from the newest sessions, to append to the error about an unknown one, or an empty text.

    That is the session of a client key with the same id, else the one whose name is most alike.
    """
    from gateway.config.complaints import did_you_mean

    page = await opened.sessions(None, _SEARCHED, None, "recent")
    names = [view.key.shown() for view in page.sessions]
    same_id = [known for known in names if known.rpartition("/")[2] == name]
    return f" (did you mean {same_id[0]}?)" if same_id else did_you_mean(name, names)


def _place(file: Path | None, url: str | None) -> str:
    """The store that was looked into: a running gateway may have been started on another, as `serve --mock` is."""
    settings = with_store_url(file, url)
    return settings.store.shown_url + _mock_said(settings, url)


def _mock_said(settings: Settings, url: str | None) -> str:
    """Return how to look into the store of `serve --mock`, where there is one and no store was named."""
    has_mock = url is None and Path(settings.store.mock_url.removeprefix("sqlite://")).exists()
    return " (that of serve --mock: --store mock)" if has_mock else ""


def _facts(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in found.items():
        if name in _IN_TABLES:
            continue
        if name == "budget" and isinstance(value, dict):
            yield from _budget_facts(value)
        elif isinstance(value, dict):
            prefix = "" if name == "cumulative_token_usage" else f"{name} "
            yield from ((prefix + part, f"{number:,}") for part, number in value.items())
        elif name == "cost_usd":
            yield name, cost(value)
        else:
            yield name, {"budget": "none", "active_step": "none"}.get(name, "?") if value is None else str(value)
    for parent in found["parents"]:
        yield f"parent {parent['id']}", _budget_said(parent["budget"])
    if found["declared_budget"] is not None:
        yield "declared by its last call", ", ".join(_limits_said(found["declared_budget"]))


def _budget_said(budget: dict[str, Any] | None) -> str:
    if budget is None:
        return "no budget"
    return f"{', '.join(_limits_said(budget))} ({share(budget['used_fraction'])} used)"


def _limits_said(limits: dict[str, Any]) -> list[str]:
    return [dollars(limits[unit]) if unit == "usd" else f"{limits[unit]:,} {unit}" for unit in _limited(limits)]


def _limited(budget: dict[str, Any]) -> list[str]:
    return [unit for unit in _UNITS if budget[unit] is not None]


def _budget_facts(budget: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for unit in _limited(budget):
        used, limit = budget["used"][unit], budget[unit]
        said = f"{cost(used)} of {dollars(limit)}" if unit == "usd" else f"{used:,} of {limit:,}"
        yield f"budget {unit}", f"{said} used"
    yield "budget held", f"{budget['held']:,}"
    yield "budget used", share(budget["used_fraction"], 1)
    if budget["resets_in_s"] is not None:
        yield "budget refills in", span(budget["resets_in_s"])


def _row(row: Row) -> list[str]:
    usage = row["cumulative_token_usage"]
    return [
        row["id"],
        f"{row['calls']:,}",
        f"{usage['input_tokens']:,}",
        f"{usage['output_tokens']:,}",
        f"{usage['total_tokens']:,}",
        _left(row["budget"]),
        cost(row["cost_usd"]),
        row["usage_source"],
        moment(row["last_call_at"]),
    ]


def _left(budget: dict[str, Any] | None) -> str:
    if budget is None:
        return ""
    if budget["tokens"] is not None:
        return f"{budget['remaining']:,}"
    return share(max(0.0, 1 - budget["used_fraction"]))


def _tool_row(name: str, use: dict[str, int]) -> list[str]:
    return [name, *(f"{use[part]:,}" for part in ("calls", "results", "result_tokens"))]


def _call_row(row: dict[str, Any]) -> list[str]:
    usage = row["usage"] or {}
    return [
        moment(row["started_at"]),
        row["model"],
        str(row["status"]),
        row["error_code"] or row["outcome"],
        f"{usage.get('input_tokens', 0):,}",
        f"{usage.get('output_tokens', 0):,}",
        row["usage_source"] or "",
        ", ".join(row["tools"]),
        f"{row['duration_ms']:,.0f}",
    ]
