"""`gateway audit`: show who changed sessions, client keys and the configuration."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.cli.common import AsJson, ConfigFile, console, print_json, printable, quoted
from gateway.cli.numbers import count, dollars, moment
from gateway.cli.sessions import StoreUrl, with_store

if TYPE_CHECKING:
    from gateway.core.ports import Store

#: indent of the lines below the first one of a change
_INDENT = "    "


def audit(
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="Part of a session id or of the name of a key; omitted: all.")
    ] = "",
    limit: Annotated[int, typer.Option(metavar="N", parser=count(1, 10_000), help="Maximum number of changes.")] = 50,
    config: ConfigFile = None,
    store: StoreUrl = None,
    as_json: AsJson = False,
) -> None:
    """Show who changed sessions, client keys and the configuration, newest change first."""
    from gateway.server.audit import change_json

    async def read(opened: Store) -> list[dict[str, Any]]:
        return [change_json(entry) for entry in (await opened.changes(limit, None, target)).entries]

    found = with_store(config, store, read)
    if as_json:
        print_json(found)
        return
    width = console().width
    for row in found:
        typer.echo("\n".join(_lines(row, width)))
    if not found:
        typer.echo("No changes are recorded" + (f" for {quoted(target)}." if target else "."), err=True)


def _lines(row: dict[str, Any], width: int) -> Iterator[str]:
    """Yield the lines of a change: when and what, the values, and who."""
    parts = [
        f"{moment(row['at'])}  {row['action']}  {row['target']}",
        f"{_INDENT}{change_text(row['old'], row['new'])}",
        f"{_INDENT}by {row['actor']} from {row['origin']}",
    ]
    for part in map(printable, parts):
        yield from textwrap.wrap(part, width, subsequent_indent=_INDENT, break_on_hyphens=False)


def change_text(old: Any, new: Any) -> str:
    """Return what a change changed: `tokens 100 to 200, calls none to 5`."""
    if not isinstance(old, dict | None) or not isinstance(new, dict | None):
        return f"{_text(old)} to {_text(new)}"
    before, after = old or {}, new or {}
    parts = []
    for name in dict.fromkeys([*before, *after]):
        if before.get(name) == after.get(name):
            continue
        is_usd = name.endswith("usd")
        values = [_text(side.get(name), is_usd=is_usd) for side in (before, after)]
        if new is None or old is None:
            parts.append(f"{name} {values[old is None]}")
        else:
            parts.append(f"{name} {' to '.join(values)}")
    return ", ".join(parts)


def _text(value: Any, *, is_usd: bool = False) -> str:
    if value is None:
        return "none"
    if isinstance(value, list):
        return " ".join(map(_text, value))
    if is_usd and isinstance(value, str):
        return dollars(value)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
