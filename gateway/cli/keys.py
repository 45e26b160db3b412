"""`gateway keys`: manage client keys in the store, without a restart."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from gateway.cli.authors import command_author
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
from gateway.cli.numbers import count, dollars, moment, number, share, until_empty
from gateway.cli.sessions import StoreUrl, with_store

if TYPE_CHECKING:
    from gateway.core.audit import Action
    from gateway.core.ledger.charging import KeyContext
    from gateway.core.ports import Store
    from gateway.core.stored import KeyChange, StoredKey

app = typer.Typer(
    cls=Group, help="List, add, change or revoke the client keys in the store.", invoke_without_command=True
)

_COLUMNS: Final = (
    "name",
    "models",
    "tokens",
    "dollars",
    "calls",
    "window",
    "rpm",
    "used",
    "empty",
    "group",
    "sessions",
    "last used",
    "expires",
)
_NUMBERS: Final = tuple(column for column in _COLUMNS if column not in ("name", "models", "empty", "group"))
#: columns that a small terminal does not show, in this order
_FIRST_TO_GO: Final = ("sessions", "rpm", "calls", "models", "empty", "expires", "group", "last used")
#: the word that removes a limit
_NONE: Final = "none"
#: the word for models without patterns
_ALL: Final = "all"

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the key; its sessions belong to it.")]


def _or_none(parse: Callable[[str | int], int]) -> Callable[[str | int], int | str]:
    """Return the parser of an option that also accepts the word none."""
    return lambda given: _NONE if str(given).strip() == _NONE else parse(given)


@app.callback()
def keys(context: typer.Context, config: ConfigFile = None, store: StoreUrl = None, as_json: AsJson = False) -> None:
    """List the keys if no other command is named."""
    refuse_early_options(context)
    if context.invoked_subcommand is None:
        show_list(config, store, as_json=as_json)


@app.command("list", cls=Command)
def show_list(config: ConfigFile = None, store: StoreUrl = None, as_json: AsJson = False) -> None:
    """List the keys, their budgets and their usage. The keys themselves are never shown again."""
    from gateway.config.policies import key_of, shared_budgets
    from gateway.server.client_keys import current, shared_rows

    settings, now = load(config).settings, time.time()
    configured, shared = [key_of(row, settings.timezone) for row in settings.auth.keys], shared_budgets(settings)

    async def read(opened: Store) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        keys = [*configured, *[current(key, now) for key in await opened.keys()]]
        return await _rows(opened, keys, configured), await shared_rows(opened, shared)

    rows, budgets = with_store(config, store, read)
    if as_json:
        print_json(rows)
        return
    print_table(_COLUMNS, [_cells(row) for row in rows], right=_NUMBERS, first_to_go=_FIRST_TO_GO)
    for row in budgets:
        _print_shared(row)


def _print_shared(row: dict[str, Any]) -> None:
    """Print how much of a budget that client keys share is used."""
    name = f"group {row['group']}" if row["group"] is not None else "all keys"
    if row["problem"] is not None:
        typer.echo(f"{name}: {row['problem']}", err=True)
    elif row["budget"] is None:
        typer.echo(f"{name}: no budget")
    else:
        typer.echo(f"{name}: {share(row['budget']['used_fraction'])} of the budget is used")


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
        str | None,
        typer.Option(metavar="1h|day|...", help="Time, or day, week or month, after which the budget refills."),
    ] = None,
    models: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Pattern of model names that it may call; repeat for more."),
    ] = None,
    rpm: Annotated[int | None, typer.Option(metavar="N", parser=count(1), help="Requests per minute.")] = None,
    expires: Annotated[
        str | None,
        typer.Option(metavar="DATE|30d", help="When its calls begin to be refused: a date, a time or a duration."),
    ] = None,
    group: Annotated[str | None, typer.Option(metavar="NAME", help="Group of auth.groups that it belongs to.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation before the first key.")] = False,
    config: ConfigFile = None,
    store: StoreUrl = None,
    as_json: AsJson = False,
) -> None:
    """Create a key. It is printed once, on stdout; the store keeps a hash of it.

    If printing fails, the key is revoked. After the first key, calls without a key are refused; in a terminal, the
    command asks for confirmation first.
    """
    from gateway.core.identity import ID_FORM, is_valid
    from gateway.core.ledger.session_key import is_reserved
    from gateway.server.client_keys import new_key, new_secret

    if not is_valid(name):
        stop(f"{quoted(name)} is not a valid name. A name is {ID_FORM}.", Exit.USAGE)
    if is_reserved(name):
        stop(f'"{name}" is reserved for callers without a key. Choose another name.', Exit.USAGE)
    auth = load(config).settings.auth
    if any(key.name == name for key in auth.keys):
        stop(f'The configuration already has a key "{name}" (auth.keys). Choose another name.', Exit.USAGE)
    given = {"tokens": budget_tokens, "usd": budget_usd, "calls": budget_calls, "window": window}
    asked = _asked(given, models=models, rpm=rpm, expires=expires, group=group)
    secret = new_secret()
    with _option_errors(asked):
        key = new_key(name, asked, secret, time.time(), _context(config))
    if not auth.needs_credential and not with_store(config, store, lambda opened: opened.keys(), make=True):
        _confirm_first_key(is_asked=not yes and sys.stdin.isatty() and sys.stderr.isatty())
    row = with_store(config, store, lambda opened: _add(opened, key), make=True)
    if row is None:
        stop(
            f'A key "{name}" already exists. Change it: gateway keys set {name}, or revoke it: gateway keys revoke '
            f"{name}",
            Exit.FAILED,
        )
    notice = "this key is shown once. All running gateways accept it within seconds."
    try:
        _show(secret, row, notice, as_json=as_json)
    except OSError:
        _revoke_unseen(name, config, store)
        raise


@app.command("set", cls=Command)
def change(  # noqa: PLR0917  # typer calls it by name
    name: Name,
    budget_tokens: Annotated[
        str | None, typer.Option(metavar="N|none", parser=_or_none(count(0)), help="Budget in tokens.")
    ] = None,
    budget_usd: Annotated[str | None, typer.Option(metavar="N|none", help="Budget in US dollars.")] = None,
    budget_calls: Annotated[
        str | None, typer.Option(metavar="N|none", parser=_or_none(count(0)), help="Budget in calls.")
    ] = None,
    window: Annotated[
        str | None,
        typer.Option(metavar="1h|day|...|none", help="Time, or day, week or month, after which the budget refills."),
    ] = None,
    models: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN|all",
            help="Pattern of model names that it may call; repeat for more. Replaces all patterns.",
        ),
    ] = None,
    rpm: Annotated[
        str | None, typer.Option(metavar="N|none", parser=_or_none(count(1)), help="Requests per minute.")
    ] = None,
    expires: Annotated[
        str | None, typer.Option(metavar="DATE|30d|none", help="When its calls begin to be refused.")
    ] = None,
    group: Annotated[str | None, typer.Option(metavar="NAME|none", help="Group of auth.groups.")] = None,
    config: ConfigFile = None,
    store: StoreUrl = None,
    as_json: AsJson = False,
) -> None:
    """Change a key without a new secret. Options that are not named stay; none removes a limit.

    All running gateways apply the change within seconds. What the key has used stays used.
    """
    from gateway.server.client_keys import changed

    given = {"tokens": budget_tokens, "usd": budget_usd, "calls": budget_calls, "window": window}
    asked = _asked(given, models=[] if models == [_ALL] else models, rpm=rpm, expires=expires, group=group)
    if not asked:
        stop("Name what to change, such as --budget-usd 20 or --expires 30d.", Exit.USAGE)
    now, context = time.time(), _context(config)
    row = _changed(name, lambda key: changed(key, asked, now, context), asked, (config, store), "key.change")
    if as_json:
        print_json(row)
    else:
        print_table(_COLUMNS, [_cells(row)], right=_NUMBERS, first_to_go=_FIRST_TO_GO)


@app.command(cls=Command)
def rotate(
    name: Name,
    overlap: Annotated[
        str, typer.Option(metavar="24h|0", help="How long the present secret is still accepted; 0: it ends at once.")
    ] = "24h",
    config: ConfigFile = None,
    store: StoreUrl = None,
    as_json: AsJson = False,
) -> None:
    """Give a key a new secret. It is printed once, on stdout. The present one is accepted for the overlap.

    Budget, sessions and settings stay. If printing fails, rotate the key again.
    """
    from gateway.server.client_keys import new_secret, rotated

    secret, now = new_secret(), time.time()
    row = _changed(
        name, lambda key: rotated(key, secret, now, overlap), {"overlap": overlap}, (config, store), "key.rotate"
    )
    until = (
        f"The secret before it ends at {moment(row['replaced_until'][-1])}."
        if row["replaced_until"]
        else ("Secrets before it have ended.")
    )
    _show(secret, row, f"this key is shown once. {until}", as_json=as_json)


def _changed(
    name: str, change: KeyChange, asked: Mapping[str, Any], place: tuple[Path | None, str | None], action: Action
) -> dict[str, Any]:
    """Change a key in the store and return its row, or end the command if there is none.

    Args:
        name: the name of the key.
        change: makes the changed key.
        asked: the settings by which it is changed, for errors.
        place: the configuration file and the URL of the store, as typed.
        action: names the change in the audit log.
    """
    from gateway.server.client_keys import current
    from gateway.server.key_changes import change_key

    if any(key.name == name for key in load(place[0]).settings.auth.keys):
        stop(f"{quoted(name)} is a key in the configuration. Change it in auth.keys and reload.", Exit.FAILED)

    async def apply(opened: Store) -> dict[str, Any] | None:
        with _option_errors(asked):
            key = await change_key(opened, name, change, command_author(), action)
        return (await _rows(opened, [current(key, time.time())]))[0] if key is not None else None

    row = with_store(*place, apply)
    if row is None:
        stop(f"The store has no key {quoted(name)}{_suggest_key(name, *place)}.", Exit.FAILED)
    return row


def _confirm_first_key(*, is_asked: bool) -> None:
    """Print what the first key changes for all callers. `is_asked`: end the command unless the user confirms."""
    typer.echo("This is the first client key. Once it exists, calls without a client key are refused (401).", err=True)
    if is_asked and not typer.confirm("Create it?", err=True):
        stop("No key was created.", Exit.FAILED)


async def _add(opened: Store, key: StoredKey) -> dict[str, Any] | None:
    """Store a key and return its row of the list, or None if the name is in use."""
    from gateway.server.key_changes import add_key

    # The row is read first, because it can fail: a key that is stored must also be shown.
    (row,) = await _rows(opened, [key])
    return row if await add_key(opened, key, command_author()) else None


def _show(key: str, row: dict[str, Any], notice: str, *, as_json: bool) -> None:
    if as_json:
        print_json({**row, "key": key})
    else:
        typer.echo(f"{row['name']}: {notice}", err=True)
        typer.echo(key)
    sys.stdout.flush()


def _revoke_unseen(name: str, config: Path | None, store: str | None) -> None:
    """Revoke a key that could not be printed."""
    outcome = "and is revoked again."
    try:
        with_store(config, store, lambda opened: _revoke(opened, name))
    except typer.Exit:  # the reason has been printed
        outcome = f"but is still in the store. Revoke it: gateway keys revoke {name}"
    with contextlib.suppress(OSError):
        typer.echo(f"{name}: the key could not be shown, {outcome}", err=True)


async def _revoke(opened: Store, name: str) -> bool:
    from gateway.server.key_changes import revoke_key

    return await revoke_key(opened, name, command_author())


@app.command(cls=Command)
def revoke(name: Name, config: ConfigFile = None, store: StoreUrl = None, as_json: AsJson = False) -> None:
    """Revoke a key: within seconds its calls are refused. Its sessions and its usage stay."""
    settings = load_settings(config, store)
    is_configured = any(key.name == name for key in settings.auth.keys)
    path = settings.store.sqlite_path
    has_store = not settings.store.is_memory and (path is None or path.exists())
    # A missing store is an error only for a key that the configuration does not have.
    is_revoked = (has_store or not is_configured) and with_store(config, store, lambda opened: _revoke(opened, name))
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


def _context(file: Path | None) -> KeyContext:
    """Return what the configuration says about all client keys."""
    from gateway.config.policies import shared_budgets
    from gateway.core.ledger.charging import KeyContext

    settings = load(file).settings
    return KeyContext(shared_budgets(settings), settings.timezone)


def _asked(budget: Mapping[str, object], **settings: object) -> dict[str, Any]:
    """Return the named options as settings of a client key; none as null."""
    limits = {unit: _amount(given) if unit == "usd" else given for unit, given in budget.items()}
    named = {"budget": {unit: _value(given) for unit, given in limits.items() if given is not None}, **settings}
    return {name: _value(given) for name, given in named.items() if given is not None and given != {}}


def _value(given: object) -> object:
    return None if given == _NONE else given


def _amount(usd: object) -> object:
    """Return US dollars as a number. Another text is returned unchanged: the check of the settings reports it."""
    with contextlib.suppress(ValueError):
        return number(usd) if isinstance(usd, str) else usd
    return usd


@contextlib.contextmanager
def _option_errors(asked: Mapping[str, Any]) -> Iterator[None]:
    """End the command for settings that are not valid, with the names and values of the options as typed."""
    from gateway.core.errors import ConfigError

    try:
        yield
    except ConfigError as error:
        stop("\n".join(_option_error(problem, asked) for problem in error.problems), Exit.USAGE)


def _option_error(problem: str, asked: Mapping[str, Any]) -> str:
    """Return the error about a setting with the name and value of the option instead."""
    path, _, reason = problem.partition(": ")
    setting, _, inner = path.partition(".")
    given = asked.get(setting)
    if setting == "budget" and isinstance(given, Mapping):
        option = "--window" if inner == "window" else f"--budget-{inner}"
        return f"{option} {quoted(str(given.get(inner)))}: {reason}"
    shown = " ".join(given) if isinstance(given, list) else str(given)
    return f"--{setting} {quoted(shown)}: {reason}"


async def _rows(opened: Store, keys: Sequence[StoredKey], configured: Sequence[StoredKey] = ()) -> list[dict[str, Any]]:
    """Return client keys as in the API, and with single limits as fields. Prints why an account cannot be read."""
    from gateway.core.ledger.refusals import usd
    from gateway.server.client_keys import burn_rate_of, rows_of

    now = time.time()
    rows = await rows_of(opened, keys, configured)
    for key, row in zip(keys, rows, strict=True):
        if row["problem"] is not None:
            typer.echo(row["problem"], err=True)
        limits, budget = key.limits, row["budget"]
        row |= {
            "tokens": limits.tokens,
            "usd": usd(limits.nano_usd) if limits.nano_usd is not None else None,
            "calls": limits.calls,
            "window_s": limits.window if isinstance(limits.window, float | int) else None,
            "used_fraction": budget["used_fraction"] if budget is not None else None,
            "burn_rate": await burn_rate_of(opened, key, now),
            "created_at": row["created_at"] or "in the configuration",
        }
    return rows


def _cells(row: dict[str, Any]) -> list[str]:
    """Return a row of the table, with the columns of `_COLUMNS`."""

    def number_or_empty(value: int | None) -> str:
        return f"{value:,}" if value is not None else ""

    def moment_or_empty(value: str | None) -> str:
        return moment(value) if value is not None else ""

    return [
        row["name"],
        ", ".join(row["models"]) or _ALL,
        number_or_empty(row["tokens"]),
        dollars(row["usd"]) if row["usd"] is not None else "",
        number_or_empty(row["calls"]),
        row["window"] or "",
        number_or_empty(row["rpm"]),
        share(row["used_fraction"]) if row["used_fraction"] is not None else "",
        until_empty(row["burn_rate"]),
        row["group"] or "",
        number_or_empty(row["sessions"]),
        moment_or_empty(row["last_used_at"]),
        moment_or_empty(row["expires_at"]),
    ]
