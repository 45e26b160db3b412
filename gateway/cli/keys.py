"""`gateway keys`: manage client keys in the store, without a restart."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.cli.common import (
    AsJson,
    Command,
    ConfigFile,
    Exit,
    Group,
    load,
    options_follow,
    print_json,
    print_table,
    quoted,
    stop,
    with_store_url,
)
from gateway.cli.numbers import count, dollars, moment, number, share, span
from gateway.cli.sessions import StoreUrl, with_store

if TYPE_CHECKING:
    from gateway.core.ledger.arithmetic import Balance, Claim, Limits
    from gateway.core.ports import Ledger, Store
    from gateway.core.stored import StoredKey

app = typer.Typer(cls=Group, help="Client keys kept in the store: list, add, revoke.", invoke_without_command=True)

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the key; its sessions belong to it.")]


@app.callback()
def keys(context: typer.Context, config: ConfigFile = None, store: StoreUrl = None, as_json: AsJson = False) -> None:
    """List the keys where no other command is named."""
    options_follow(context)
    if context.invoked_subcommand is None:
        show_list(config, store, as_json=as_json)


@app.command("list", cls=Command)
def show_list(config: ConfigFile = None, store: StoreUrl = None, as_json: AsJson = False) -> None:
    """List the keys, their budgets and what they have used. The keys themselves are shown to nobody."""
    from gateway.config.policies import limits_of
    from gateway.core.stored import StoredKey

    configured = [
        StoredKey(row.name, b"", 0.0, row.models, limits_of(row.budget), row.rpm)
        for row in load(config).settings.auth.keys
    ]

    async def read(opened: Store) -> list[dict[str, Any]]:
        kept = [*configured, *await opened.keys()]
        return [_row(key, one) for key, one in zip(kept, await _balance(opened, kept), strict=True)]

    rows = with_store(config, store, read)
    if as_json:
        print_json(rows)
        return
    columns = ("name", "models", "tokens", "dollars", "calls", "window", "rpm", "used", "created")
    numbers = ("tokens", "dollars", "calls", "window", "rpm", "used", "created")
    going = ("created", "rpm", "calls", "models")
    print_table(columns, [_cells(row) for row in rows], right=numbers, first_to_go=going)


@app.command(cls=Command)
def add(  # noqa: PLR0917  # typer calls it by name
    name: Name,
    budget_tokens: Annotated[
        int | None, typer.Option(metavar="N", parser=count(0), help="Tokens of all its sessions together.")
    ] = None,
    budget_usd: Annotated[
        str | None, typer.Option(metavar="N", help="Budget in US dollars for all sessions of the key.")
    ] = None,
    budget_calls: Annotated[
        int | None, typer.Option(metavar="N", parser=count(0), help="Budget in calls for all sessions of the key.")
    ] = None,
    window: Annotated[str | None, typer.Option(metavar="1h|1d|...", help="The budget refills after this.")] = None,
    models: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Pattern of models it may call; repeat for more.")
    ] = None,
    rpm: Annotated[int | None, typer.Option(metavar="N", parser=count(1), help="Requests a minute.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before the first key, for scripts.")] = False,
    config: ConfigFile = None,
    store: StoreUrl = None,
    as_json: AsJson = False,
) -> None:
    """Make a key. It is printed once, on stdout; the store keeps a hash of it.

    If printing fails, the key is revoked. After the first key, calls without a key are refused; a terminal asks for
    confirmation.
    """
    import secrets

    from gateway.core.identity import ID_FORM, is_valid
    from gateway.core.ledger.session_key import is_reserved
    from gateway.core.stored import StoredKey
    from gateway.server.auth import digest

    if not is_valid(name):
        stop(f"{quoted(name)} is no name: it is {ID_FORM}.", Exit.USAGE)
    if is_reserved(name):
        stop(f'"{name}" is a name for callers without a key, whose sessions it would see; choose another.', Exit.USAGE)
    auth = load(config).settings.auth
    if any(key.name == name for key in auth.keys):
        stop(f'"{name}" is the name of a key in the configuration (auth.keys); choose another.', Exit.USAGE)
    for pattern in models or ():
        # A script's empty variable must not make a key that is shown to have all models, and has none.
        if not pattern or any(char.isspace() or char == "," for char in pattern):
            stop(f"--models {quoted(pattern)} is no pattern of a model's name; repeat --models for more.", Exit.USAGE)
    limits = _limits(budget_tokens, budget_usd, budget_calls, window)
    if window is not None and (budget_tokens, budget_usd, budget_calls) == (None, None, None):
        stop("--window needs something to refill: --budget-tokens, --budget-usd or --budget-calls.", Exit.USAGE)
    is_open = not auth.keys and not auth.required
    if is_open and not with_store(config, store, lambda opened: opened.keys(), make=True):
        _end_open_access(is_asked=not yes and sys.stdin.isatty() and sys.stderr.isatty())
    key = f"gw-{secrets.token_urlsafe(32)}"
    kept = StoredKey(name, digest(key), time.time(), tuple(models or ()), limits, rpm)
    row = with_store(config, store, lambda opened: _add(opened, kept), make=True)
    if row is None:
        stop(f'There is a key "{name}" already. Revoke it first: gateway keys revoke {name}', Exit.FAILED)
    try:
        _show(key, row, as_json=as_json)
    except OSError:
        _take_back(name, config, store)
        raise


def _end_open_access(*, is_asked: bool) -> None:
    """Say what the first key changes for everybody else. `is_asked`: go on only where the terminal says yes."""
    typer.echo("This is the first client key: from now on every call without a client key is refused (401).", err=True)
    if is_asked and not typer.confirm("Make it?", err=True):
        stop("No key was made.", Exit.FAILED)


async def _add(opened: Store, key: StoredKey) -> dict[str, Any] | None:
    """The key's row in the list; None where there is one of that name."""
    # What may fail comes first: once the key is kept it is to be shown.
    (balance,) = await opened.balances([_claim(key)])
    return _row(key, balance) if await opened.add_key(key) else None


def _show(key: str, row: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json({**row, "key": key})
    else:
        told = "this key is shown once. It holds within seconds, in every running gateway."
        typer.echo(f"{row['name']}: {told}", err=True)
        typer.echo(key)
    sys.stdout.flush()


def _take_back(name: str, config: Path | None, store: str | None) -> None:
    """Revoke a key that nobody has seen."""
    said = "and is revoked again."
    try:
        with_store(config, store, lambda opened: opened.revoke_key(name))
    except typer.Exit:  # the reason has been said
        said = f"but stands in the store. Revoke it: gateway keys revoke {name}"
    with contextlib.suppress(OSError):
        typer.echo(f"{name}: the key could not be shown, {said}", err=True)


@app.command(cls=Command)
def revoke(name: Name, config: ConfigFile = None, store: StoreUrl = None, as_json: AsJson = False) -> None:
    """Forget a key: within seconds its calls are refused. Its sessions and what it has used stay."""
    settings = with_store_url(config, store)
    is_configured = any(key.name == name for key in settings.auth.keys)
    path = settings.store.sqlite_path
    has_store = settings.store.is_redis or (path is not None and path.exists())
    # That there is no store is said only of a key that can stand nowhere else.
    is_gone = (has_store or not is_configured) and with_store(config, store, lambda opened: opened.revoke_key(name))
    if is_gone and as_json:
        print_json({"name": name, "revoked": True})
    elif is_gone:
        typer.echo(f"revoked {name}", err=True)
    if is_configured:
        also = "also " if is_gone else ""
        stop(
            f"{quoted(name)} {also}stands in auth.keys of the configuration: take it out there, and reload.",
            Exit.FAILED,
        )
    if not is_gone:
        stop(f"There is no key {quoted(name)} in the store{_like_key(name, config, store)}.", Exit.FAILED)


def _like_key(name: str, config: Path | None, store: str | None) -> str:
    """Return a suggestion to append to the error about an unknown key, or an empty text."""
    from gateway.config.complaints import did_you_mean

    return did_you_mean(name, [key.name for key in with_store(config, store, lambda opened: opened.keys())])


def _limits(tokens: int | None, usd: str | None, calls: int | None, window: str | None) -> Limits:
    from gateway.config import key_budget
    from gateway.config.policies import limits_of
    from gateway.core.errors import ConfigError

    given = {"tokens": tokens, "usd": _amount(usd), "calls": calls, "window": window}
    try:
        return limits_of(key_budget(given))
    except ConfigError as error:
        stop("\n".join(_refused(problem, given) for problem in error.problems), Exit.USAGE)


def _amount(usd: str | None) -> Decimal | str | None:
    """Return dollars as a number; a text that is none is left for the configuration's own complaint."""
    with contextlib.suppress(ValueError):
        return number(usd) if usd is not None else None
    return usd


def _refused(problem: str, given: Mapping[str, object]) -> str:
    """A complaint about a key of `budget`, with the option that stands for it and what was typed."""
    name, _, reason = problem.partition(": ")
    option = "--window" if name == "window" else f"--budget-{name}"
    return f"{option} {quoted(str(given.get(name)))}: {reason}"


async def _balance(opened: Ledger, kept: Sequence[StoredKey]) -> Sequence[Balance | None]:
    """How the budgets of keys stand; None for one whose account cannot be read, which hides no other key's."""
    from gateway.core.errors import StoreDamaged

    try:
        return await opened.balances([_claim(key) for key in kept])
    except StoreDamaged as fault:
        if len(kept) > 1:
            return [one for key in kept for one in await _balance(opened, [key])]
        typer.echo(fault.message, err=True)
        return [None]


def _claim(key: StoredKey) -> Claim:
    from gateway.core.ledger.arithmetic import AccountKey, Claim

    return Claim(AccountKey("key", key.name), key.limits)


def _row(key: StoredKey, balance: Balance | None) -> dict[str, Any]:
    from datetime import UTC, datetime

    from gateway.core.ledger.refusals import usd

    limits, used = key.limits, balance.used_fraction if balance is not None else None
    return {
        "name": key.name,
        "models": list(key.models),
        "tokens": limits.tokens,
        "usd": usd(limits.nano_usd) if limits.nano_usd is not None else None,
        "calls": limits.calls,
        "window_s": limits.window_s,
        "rpm": key.rpm,
        "used_fraction": round(used, 4) if used is not None else None,
        "created_at": datetime.fromtimestamp(key.created_at, UTC).isoformat(timespec="seconds")
        if key.created_at
        else "in the configuration",
    }


def _cells(row: dict[str, Any]) -> list[str]:
    """A row of the table."""

    def counted(value: int | None) -> str:
        return f"{value:,}" if value is not None else ""

    return [
        row["name"],
        ", ".join(row["models"]) or "all",
        counted(row["tokens"]),
        dollars(row["usd"]) if row["usd"] is not None else "",
        counted(row["calls"]),
        span(row["window_s"]) if row["window_s"] is not None else "",
        counted(row["rpm"]),
        share(row["used_fraction"]) if row["used_fraction"] is not None else "",
        moment(row["created_at"]),
    ]
