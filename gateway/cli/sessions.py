"""`gateway sessions`: read, reset and delete sessions in the store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer

from gateway.cli.authors import command_author
from gateway.cli.common import (
    AsJson,
    Command,
    ConfigFile,
    Exit,
    Group,
    config_problems,
    load,
    load_settings,
    print_json,
    print_table,
    quoted,
    refuse_early_options,
    stop,
)
from gateway.cli.listed import Row, SortName, order, rows
from gateway.cli.numbers import (
    RAISE,
    cost,
    count,
    dollars,
    moment,
    number,
    raised,
    share,
    span,
    until_empty,
    whole_number,
)

if TYPE_CHECKING:
    from gateway.config import Settings
    from gateway.core.errors import InvalidRequest
    from gateway.core.ledger.arithmetic import Dimension
    from gateway.core.ledger.session_key import SessionKey
    from gateway.core.ports import Sessions, Store

T = TypeVar("T")

_UNITS = ("tokens", "usd", "calls")
#: columns of the list, and of a session's calls, that a small terminal leaves out, in this order
_LIST_FIRST_TO_GO = ("usage", "input", "output", "last call", "calls")
_CALLS_FIRST_TO_GO = ("usage", "outcome", "tools", "ms")
_AGENTS_FIRST_TO_GO = ("tools", "parent", "step", "with children")
#: tools of an agent that its row names
_AGENT_TOOLS = 3
#: newest sessions that are searched for a name similar to an unknown one
_SEARCHED = 1_000
#: fields without a value that are printed as "none"; others are unknown
_MAY_BE_NONE = ("budget", "active_step", "last_stop")
#: fields of a session that are not printed as single lines: most of them have a table
_IN_TABLES = (
    "recent_tools",
    "tools",
    "steps",
    "agents",
    "last_calls",
    "parent",
    "parents",
    "declared_budget",
    "burn_rate",
)

app = typer.Typer(cls=Group, help="List, show, reset or delete sessions.", invoke_without_command=True)

SessionId = Annotated[str, typer.Argument(metavar="ID", help="Session id; KEY/ID for a session of a client key.")]
Limit = Annotated[int, typer.Option(metavar="N", parser=count(1, 10_000), help="Maximum number of sessions.")]
StoreUrl = Annotated[
    str | None,
    typer.Option(
        "--store", metavar="URL|mock", help="Store to use instead of store.url; mock: the one of gateway serve --mock."
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
    """List the sessions if no other command is named."""
    refuse_early_options(context)
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
    print_table(columns, [_row(row) for row in found], right=numbers, first_to_go=_LIST_FIRST_TO_GO)


@app.command(cls=Command)
def show(session: SessionId, config: ConfigFile = None, store: StoreUrl = None, as_json: AsJson = False) -> None:
    """Show one session and its last calls."""
    from gateway.config.policies import agents_of, budget_policy
    from gateway.server.auth import Access
    from gateway.server.sessions import LAST_CALLS, details_json
    from gateway.server.shown import call_json
    from gateway.stores.running_budget import with_running_budget

    key, admin, settings = _key(session), Access(None, admin=True), load(config).settings
    policy, agents = budget_policy(settings), agents_of(settings)

    async def read(opened: Store) -> dict[str, Any] | None:
        details = await details_json(opened, key, admin, await with_running_budget(opened, policy), agents)
        if details is None:
            return None
        records = await opened.calls(key, LAST_CALLS)
        return {**details, "last_calls": [call_json(record, admin) for record in records]}

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
        print_table(("tool", *numbers), [_tool_row(*tool) for tool in found["tools"].items()], right=numbers)
        typer.echo()
    if found["agents"]:
        _print_agents(found["agents"])
        typer.echo()
    columns = ("started", "model", "status", "outcome", "input", "output", "usage", "tools", "ms")
    calls = [_call_row(row) for row in found["last_calls"]]
    print_table(columns, calls, right=("started", "input", "output", "ms"), first_to_go=_CALLS_FIRST_TO_GO)
    error = found["last_calls"][0]["error"] if found["last_calls"] else None
    if error is not None:
        typer.echo(f"\nThe last call failed: {error['message']}")


@app.command(cls=Command)
def budget(  # noqa: PLR0917  # typer calls it by name
    session: SessionId,
    tokens: Annotated[
        str | None,
        typer.Argument(
            metavar="N|+N%|none|default", help="Tokens, such as 600,000 or 500k; +50% raises the limit by half."
        ),
    ] = None,
    usd: Annotated[str | None, typer.Option(metavar="N|+N%|none", help="US dollars.")] = None,
    calls: Annotated[str | None, typer.Option(metavar="N|+N%|none", help="Calls.")] = None,
    config: ConfigFile = None,
    store: StoreUrl = None,
    as_json: AsJson = False,
) -> None:
    """Change or remove (none) one session's budget, or restore the configured one (default).

    The change applies to the session's next call, without a restart.
    """
    from gateway.config.policies import budget_policy
    from gateway.server.session_changes import change_budget
    from gateway.stores.running_budget import with_running_budget

    named = {name: value for name, value in (("tokens", tokens), ("usd", usd), ("calls", calls)) if value is not None}
    if not named or ("default" in named.values() and len(named) > 1):
        stop("Name a number of tokens, none or default; or use --usd or --calls.", Exit.USAGE)
    key, settings = _key(session), load(config).settings

    is_raise = any(map(RAISE.fullmatch, named.values()))
    limits = None if is_raise else _limits(named, None)

    async def change(opened: Store) -> dict[str, Any]:
        now = (await _changed(opened, key, settings))["budget"] if is_raise else None
        policy = await with_running_budget(opened, budget_policy(settings))
        await change_budget(opened, key, _limits(named, now) if is_raise else limits, policy, command_author())
        return await _changed(opened, key, settings)

    now = with_store(config, store, change)
    remark = ""
    if "calls" not in now:
        alike = with_store(config, store, lambda opened: suggest_session(opened, session))
        remark = f"; it has no call yet in {_store_text(config, store)}{alike}"
    _print_change(now, f"{session}: {_budget_text(now['budget'])}{remark}", as_json=as_json)


@app.command(cls=Command)
def reset(session: SessionId, config: ConfigFile = None, store: StoreUrl = None, as_json: AsJson = False) -> None:
    """Set a session's totals to zero. Its call records stay."""
    from gateway.server.session_changes import reset_session

    key, settings = _key(session), load(config).settings

    async def change(opened: Store) -> dict[str, Any] | None:
        return await _changed(opened, key, settings) if await reset_session(opened, key, command_author()) else None

    now = with_store(config, store, change)
    if now is None:
        _no_session(session, config, store)
    _print_change(now, f"reset {session}", as_json=as_json)


@app.command(cls=Command)
def resume(session: SessionId, config: ConfigFile = None, store: StoreUrl = None, as_json: AsJson = False) -> None:
    """Allow a session's calls again that runaway protection refuses."""
    from gateway.server.session_changes import resume_session

    key, settings = _key(session), load(config).settings

    async def change(opened: Store) -> dict[str, Any] | None:
        is_known = await resume_session(opened, key, command_author())
        return await _changed(opened, key, settings) if is_known else None

    now = with_store(config, store, change)
    if now is None:
        _no_session(session, config, store)
    _print_change(now, f"resumed {session}", as_json=as_json)


@app.command(cls=Command)
def delete(session: SessionId, config: ConfigFile = None, store: StoreUrl = None, as_json: AsJson = False) -> None:
    """Delete a session and its call records."""
    from gateway.server.auth import Access
    from gateway.server.session_changes import delete_session
    from gateway.server.sessions import deleted_json

    key = _key(session)
    if not with_store(config, store, lambda opened: delete_session(opened, key, command_author())):
        _no_session(session, config, store)
    _print_change(deleted_json(key, Access(None, admin=True)), f"deleted {session}", as_json=as_json)


async def _changed(opened: Store, key: SessionKey, settings: Settings) -> dict[str, Any]:
    """Return a session after a change, as JSON like in the API for an administrator."""
    from gateway.config.policies import agents_of, budget_policy
    from gateway.server.auth import Access
    from gateway.server.sessions import changed_json
    from gateway.stores.running_budget import with_running_budget

    policy = await with_running_budget(opened, budget_policy(settings))
    return await changed_json(opened, key, Access(None, admin=True), policy, agents_of(settings))


def _limits(named: Mapping[str, str], budget: Mapping[str, Any] | None) -> Mapping[Dimension, int | None] | None:
    """Return the limits to set, from the options as typed, or end the command. `budget`: the one in force."""
    from gateway.core.errors import InvalidRequest
    from gateway.server.sessions import parse_limits

    try:
        if named.get("tokens") == "default":
            return parse_limits("default")
        return parse_limits({name: _limit(named, name, (budget or {}).get(name)) for name in named})
    except InvalidRequest as fault:
        stop(_option_error(fault, named), Exit.USAGE)


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
            stop(f"{_option_text(named, name)}: {error}; none removes the limit.", Exit.USAGE)
    if now is None:
        stop(f"{_option_text(named, name)}: there is no limit to raise. Name a number.", Exit.USAGE)
    return raised(now, Decimal(match[1]), whole=name != "usd")


def _option_text(named: Mapping[str, str], name: str) -> str:
    """Return an option with its value, as it was typed."""
    return f"{'' if name == 'tokens' else '--'}{name} {quoted(named.get(name, ''))}"


def _option_error(fault: InvalidRequest, named: Mapping[str, str]) -> str:
    """Return the API's error about a limit, with the option as typed; `null` in the API is `none` here."""
    name = (fault.param or "").rpartition(".")[2]
    return f"{_option_text(named, name)}: {fault.message.replace('null', 'none')}"


def _print_change(now: dict[str, Any], sentence: str, *, as_json: bool) -> None:
    if as_json:
        print_json(now)
    else:
        typer.echo(sentence, err=True)


def _key(text: str) -> SessionKey:
    from gateway.core.identity import ID_FORM
    from gateway.core.ledger.session_key import SessionKey

    key = SessionKey.parse(text)
    if key is None:
        stop(f"{quoted(text)} is not a session id. An id is {ID_FORM}; KEY/ID for a client key.", Exit.USAGE)
    return key


def with_store(file: Path | None, url: str | None, work: Callable[[Store], Awaitable[T]], *, make: bool = False) -> T:
    """Run `work` with the configured store and return its result. `make`: create the store if it does not exist."""
    from gateway.app.resources import open_store
    from gateway.core.errors import StoreUnavailable

    settings = load_settings(file, url)
    path = settings.store.sqlite_path
    if settings.store.is_memory:
        stop(
            "store.url is memory://, so only the running gateway knows what it holds. Use its API: GET /api/sessions",
            Exit.FAILED,
        )
    if path is not None and not make and not path.exists():
        stop(f"The store {path} does not exist yet; the first call creates it{_mock_hint(settings, url)}.", Exit.FAILED)

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
    """End the command because the session is unknown, and suggest a similar name."""
    alike = with_store(config, store, lambda opened: suggest_session(opened, session))
    stop(f"There is no session {quoted(session)} in {_store_text(config, store)}{alike}.", Exit.FAILED)


async def suggest_session(opened: Sessions, name: str) -> str:
    """Return a suggestion to append to the error about an unknown session, or an empty text.

    It is one of the newest sessions: one of a client key with the same id, else the one with the most similar name.
    """
    from gateway.config.complaints import did_you_mean

    page = await opened.sessions(None, _SEARCHED, None, "recent")
    names = [view.key.shown() for view in page.sessions]
    same_id = [known for known in names if known.rpartition("/")[2] == name]
    return f" (did you mean {same_id[0]}?)" if same_id else did_you_mean(name, names)


def _store_text(file: Path | None, url: str | None) -> str:
    """Return the URL of the store, and a hint at the one of `serve --mock`: a running gateway may use another store."""
    settings = load_settings(file, url)
    return settings.store.shown_url + _mock_hint(settings, url)


def _mock_hint(settings: Settings, url: str | None) -> str:
    """Return a hint at the store of `serve --mock`, if it exists and `--store` was not used, or an empty text."""
    has_mock = url is None and Path(settings.store.mock_url.removeprefix("sqlite://")).exists()
    return " (for the store of serve --mock: --store mock)" if has_mock else ""


def _facts(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in found.items():
        if name in _IN_TABLES:
            continue
        if name == "budget" and isinstance(value, dict):
            yield from _budget_facts(value)
            if found["burn_rate"] is not None:
                yield "budget empty", f"{until_empty(found['burn_rate'])} (at the rate of the newest calls)"
        elif isinstance(value, dict):
            prefix = "" if name == "cumulative_token_usage" else f"{name} "
            yield from ((prefix + part, f"{number:,}") for part, number in value.items())
        elif name == "cost_usd":
            yield name, cost(value)
        else:
            yield name, ("none" if name in _MAY_BE_NONE else "?") if value is None else str(value)
    for parent in found["parents"]:
        yield f"parent {parent['id']}", _budget_text(parent["budget"])
    if found["declared_budget"] is not None:
        yield "declared by its last call", ", ".join(_limit_texts(found["declared_budget"]))


def _budget_text(budget: dict[str, Any] | None) -> str:
    if budget is None:
        return "no budget"
    return f"{', '.join(_limit_texts(budget))} ({share(budget['used_fraction'])} used)"


def _limit_texts(limits: dict[str, Any]) -> list[str]:
    return [dollars(limits[unit]) if unit == "usd" else f"{limits[unit]:,} {unit}" for unit in _limited_units(limits)]


def _limited_units(budget: dict[str, Any]) -> list[str]:
    return [unit for unit in _UNITS if budget[unit] is not None]


def _budget_facts(budget: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for unit in _limited_units(budget):
        used, limit = budget["used"][unit], budget[unit]
        text = f"{cost(used)} of {dollars(limit)}" if unit == "usd" else f"{used:,} of {limit:,}"
        yield f"budget {unit}", f"{text} used"
    yield "budget held", f"{budget['held']:,}"
    yield "budget used", share(budget["used_fraction"], 1)
    if budget["resets_in_s"] is not None:
        yield "budget refills in", span(budget["resets_in_s"])
    if budget["is_closed"]:
        yield "closing call", "taken; further calls are refused until the budget is raised or refilled"


def _row(row: Row) -> list[str]:
    usage = row["cumulative_token_usage"]
    return [
        row["id"],
        f"{row['calls']:,}",
        f"{usage['input_tokens']:,}",
        f"{usage['output_tokens']:,}",
        f"{usage['total_tokens']:,}",
        _remaining(row["budget"]),
        cost(row["cost_usd"]),
        row["usage_source"],
        moment(row["last_call_at"]),
    ]


def _remaining(budget: dict[str, Any] | None) -> str:
    if budget is None:
        return ""
    if budget["tokens"] is not None:
        return f"{budget['remaining']:,}"
    return share(max(0.0, 1 - budget["used_fraction"]))


def _tool_row(name: str, use: dict[str, int]) -> list[str]:
    return [name, *(f"{use[part]:,}" for part in ("calls", "results", "result_tokens"))]


def _print_agents(agents: list[dict[str, Any]]) -> None:
    """Print the agents of a session. Tokens are of an agent's own calls, without those of its children."""
    numbers = ("calls", "tokens", "cost", "with children", "budget left")
    columns = ("agent", "type", "parent", *numbers, "step", "tools")
    print_table(columns, [_agent_row(one) for one in agents], right=numbers, first_to_go=_AGENTS_FIRST_TO_GO)


def _agent_row(one: dict[str, Any]) -> list[str]:
    tools, total = list(one["tools"]), one["with_children"]
    more = f", {len(tools) - _AGENT_TOOLS:,} more" if len(tools) > _AGENT_TOOLS else ""
    return [
        one["id"],
        one["type"] or "",
        one["parent"] or "",
        f"{one['calls']:,}",
        f"{one['cumulative_token_usage']['total_tokens']:,}",
        cost(one["cost_usd"]),
        f"{total['cumulative_token_usage']['total_tokens']:,}" if total is not None else "",
        _remaining(one["budget"]),
        one["active_step"] or "",
        ", ".join(tools[:_AGENT_TOOLS]) + more,
    ]


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
