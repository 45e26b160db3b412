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
    load_settings,
    print_json,
    print_table,
    quoted,
    refuse_early_options,
    stop,
)
from gateway.cli.numbers import count, dollars, moment, number, share, span, until_empty
from gateway.cli.sessions import StoreUrl, with_store

if TYPE_CHECKING:
    from gateway.core.ledger.arithmetic import Balance, Claim, Limits
    from gateway.core.ports import Calls, Ledger, Store
    from gateway.core.stored import StoredKey

app = typer.Typer(cls=Group, help="List, add or revoke the client keys in the store.", invoke_without_command=True)

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the key; its sessions belong to it.")]


@app.callback()
def keys(context: typer.Context, config: ConfigFile = None, store: StoreUrl = None, as_json: AsJson = False) -> None:
    """List the keys if no other command is named."""
    refuse_early_options(context)
    if context.invoked_subcommand is None:
        show_list(config, store, as_json=as_json)


@app.command("list", cls=Command)
def show_list(config: ConfigFile = None, store: StoreUrl = None, as_json: AsJson = False) -> None:
    """List the keys, their budgets and their usage. The keys themselves are never shown again."""
    from gateway.config.policies import limits_of
    from gateway.core.stored import StoredKey

    configured = [
        StoredKey(row.name, b"", 0.0, row.models, limits_of(row.budget), row.rpm)
        for row in load(config).settings.auth.keys
    ]

    async def read(opened: Store) -> list[dict[str, Any]]:
        keys = [*configured, *await opened.keys()]
        balances = await _balances(opened, keys)
        rates = [await _burn_rate(opened, balance) for balance in balances]
        return [_row(*one) for one in zip(keys, balances, rates, strict=True)]

    rows = with_store(config, store, read)
    if as_json:
        print_json(rows)
        return
    columns = ("name", "models", "tokens", "dollars", "calls", "window", "rpm", "used", "empty", "created")
    numbers = ("tokens", "dollars", "calls", "window", "rpm", "used", "created")
    first_to_go = ("created", "rpm", "calls", "models", "empty")
    print_table(columns, [_cells(row) for row in rows], right=numbers, first_to_go=first_to_go)


@app.command(cls=Command)
def add(  # noqa: PLR0917  # typer calls it by name
    name: Name,
    budget_tokens: Annotated[
        int | None, typer.Option(metavar="N", parser=count(0), help="Budget in tokens for all sessions of the key.")
    ] = None,
    budget_usd: Annotated[
        str | None, typer.Option(metavar="N", help="Budget in US dollars for all sessions of the key.")
    ] = None,
    budget_calls: Annotated[
        int | None, typer.Option(metavar="N", parser=count(0), help="Budget in calls for all sessions of the key.")
    ] = None,
    window: Annotated[
        str | None, typer.Option(metavar="1h|1d|...", help="Time after which the budget refills.")
    ] = None,
    models: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Pattern of model names that it may call; repeat for more."),
    ] = None,
    rpm: Annotated[int | None, typer.Option(metavar="N", parser=count(1), help="Requests per minute.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation before the first key.")] = False,
    config: ConfigFile = None,
    store: StoreUrl = None,
    as_json: AsJson = False,
) -> None:
    """Create a key. It is printed once, on stdout; the store keeps a hash of it.

    If printing fails, the key is revoked. After the first key, calls without a key are refused; in a terminal, the
    command asks for confirmation first.
    """
    import secrets

    from gateway.core.identity import ID_FORM, is_valid
    from gateway.core.ledger.session_key import is_reserved
    from gateway.core.stored import StoredKey
    from gateway.server.auth import digest

    if not is_valid(name):
        stop(f"{quoted(name)} is not a valid name. A name is {ID_FORM}.", Exit.USAGE)
    if is_reserved(name):
        stop(f'"{name}" is reserved for callers without a key. Choose another name.', Exit.USAGE)
    auth = load(config).settings.auth
    if any(key.name == name for key in auth.keys):
        stop(f'The configuration already has a key "{name}" (auth.keys). Choose another name.', Exit.USAGE)
    for pattern in models or ():
        # An empty variable in a script must not create a key that is listed with all models, but may call none.
        if not pattern or any(char.isspace() or char == "," for char in pattern):
            stop(f"--models {quoted(pattern)} is not one pattern of model names. Repeat --models for more.", Exit.USAGE)
    limits = _limits(budget_tokens, budget_usd, budget_calls, window)
    if window is not None and (budget_tokens, budget_usd, budget_calls) == (None, None, None):
        stop("--window needs a budget: --budget-tokens, --budget-usd or --budget-calls.", Exit.USAGE)
    if not auth.needs_credential and not with_store(config, store, lambda opened: opened.keys(), make=True):
        _confirm_first_key(is_asked=not yes and sys.stdin.isatty() and sys.stderr.isatty())
    key = f"gw-{secrets.token_urlsafe(32)}"
    stored = StoredKey(name, digest(key), time.time(), tuple(models or ()), limits, rpm)
    row = with_store(config, store, lambda opened: _add(opened, stored), make=True)
    if row is None:
        stop(f'A key "{name}" already exists. Revoke it first: gateway keys revoke {name}', Exit.FAILED)
    try:
        _show(key, row, as_json=as_json)
    except OSError:
        _revoke_unseen(name, config, store)
        raise


def _confirm_first_key(*, is_asked: bool) -> None:
    """Print what the first key changes for all callers. `is_asked`: end the command unless the user confirms."""
    typer.echo("This is the first client key. Once it exists, calls without a client key are refused (401).", err=True)
    if is_asked and not typer.confirm("Create it?", err=True):
        stop("No key was created.", Exit.FAILED)


async def _add(opened: Store, key: StoredKey) -> dict[str, Any] | None:
    """Store a key and return its row of the list, or None if the name is in use."""
    # The balance is read first, because it can fail: a key that is stored must also be shown.
    (balance,) = await opened.balances([_claim(key)])
    return _row(key, balance) if await opened.add_key(key) else None


def _show(key: str, row: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json({**row, "key": key})
    else:
        notice = "this key is shown once. All running gateways accept it within seconds."
        typer.echo(f"{row['name']}: {notice}", err=True)
        typer.echo(key)
    sys.stdout.flush()


def _revoke_unseen(name: str, config: Path | None, store: str | None) -> None:
    """Revoke a key that could not be printed."""
    outcome = "and is revoked again."
    try:
        with_store(config, store, lambda opened: opened.revoke_key(name))
    except typer.Exit:  # the reason has been printed
        outcome = f"but is still in the store. Revoke it: gateway keys revoke {name}"
    with contextlib.suppress(OSError):
        typer.echo(f"{name}: the key could not be shown, {outcome}", err=True)


@app.command(cls=Command)
def revoke(name: Name, config: ConfigFile = None, store: StoreUrl = None, as_json: AsJson = False) -> None:
    """Revoke a key: within seconds its calls are refused. Its sessions and its usage stay."""
    settings = load_settings(config, store)
    is_configured = any(key.name == name for key in settings.auth.keys)
    path = settings.store.sqlite_path
    has_store = not settings.store.is_memory and (path is None or path.exists())
    # A missing store is an error only for a key that the configuration does not have.
    is_revoked = (has_store or not is_configured) and with_store(config, store, lambda opened: opened.revoke_key(name))
    if is_revoked and as_json:
        print_json({"name": name, "revoked": True})
    elif is_revoked:
        typer.echo(f"revoked {name}", err=True)
    if is_configured:
        also = "also " if is_revoked else ""
        stop(
            f"{quoted(name)} is {also}a key in the configuration. Remove it from auth.keys and reload.",
            Exit.FAILED,
        )
    if not is_revoked:
        stop(f"The store has no key {quoted(name)}{_suggest_key(name, config, store)}.", Exit.FAILED)


def _suggest_key(name: str, config: Path | None, store: str | None) -> str:
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
        stop("\n".join(_option_error(problem, given) for problem in error.problems), Exit.USAGE)


def _amount(usd: str | None) -> Decimal | str | None:
    """Return US dollars as a number. Another text is returned unchanged: the configuration reports the error."""
    with contextlib.suppress(ValueError):
        return number(usd) if usd is not None else None
    return usd


def _option_error(problem: str, given: Mapping[str, object]) -> str:
    """Return the configuration's error about a key of `budget` with the name and value of the option instead."""
    name, _, reason = problem.partition(": ")
    option = "--window" if name == "window" else f"--budget-{name}"
    return f"{option} {quoted(str(given.get(name)))}: {reason}"


async def _balances(opened: Ledger, stored: Sequence[StoredKey]) -> Sequence[Balance | None]:
    """Return the balances of client keys; None for a key whose account cannot be read.

    An unreadable account does not hide the balances of other keys.
    """
    from gateway.core.errors import StoreDamaged

    try:
        return await opened.balances([_claim(key) for key in stored])
    except StoreDamaged as fault:
        if len(stored) > 1:
            return [balance for key in stored for balance in await _balances(opened, [key])]
        typer.echo(fault.message, err=True)
        return [None]


async def _burn_rate(opened: Calls, balance: Balance | None) -> dict[str, Any] | None:
    """Return when the budget of a client key is empty, or None if that is unknown."""
    from gateway.core.ledger.burn_rate import NEWEST_CALLS, burn_rate
    from gateway.server.shown import burn_rate_json

    if balance is None or balance.limits.is_none:
        return None
    records = await opened.newest_calls(balance.key.namespace, NEWEST_CALLS)
    return burn_rate_json(burn_rate(balance, records, time.time()))


def _claim(key: StoredKey) -> Claim:
    from gateway.core.ledger.arithmetic import AccountKey, Claim

    return Claim(AccountKey("key", key.name), key.limits)


def _row(key: StoredKey, balance: Balance | None, rate: dict[str, Any] | None = None) -> dict[str, Any]:
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
        "burn_rate": rate,
        "created_at": datetime.fromtimestamp(key.created_at, UTC).isoformat(timespec="seconds")
        if key.created_at
        else "in the configuration",
    }


def _cells(row: dict[str, Any]) -> list[str]:
    """Return a row of the table."""

    def number_or_empty(value: int | None) -> str:
        return f"{value:,}" if value is not None else ""

    return [
        row["name"],
        ", ".join(row["models"]) or "all",
        number_or_empty(row["tokens"]),
        dollars(row["usd"]) if row["usd"] is not None else "",
        number_or_empty(row["calls"]),
        span(row["window_s"]) if row["window_s"] is not None else "",
        number_or_empty(row["rpm"]),
        share(row["used_fraction"]) if row["used_fraction"] is not None else "",
        until_empty(row["burn_rate"]),
        moment(row["created_at"]),
    ]
