"""`gateway audit`: show who changed sessions, client keys and the configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.cli.common import AsJson, ConfigFile, print_json, print_table
from gateway.cli.numbers import count, moment
from gateway.cli.sessions import StoreUrl, with_store

if TYPE_CHECKING:
    from gateway.core.ports import Store

_COLUMNS = ("target", "action", "change", "by", "from", "time")
#: columns that a small terminal leaves out, in this order
_FIRST_TO_GO = ("from", "change")


def audit(
    target: Annotated[
        str, typer.Argument(metavar="[TARGET]", help="Part of a session id or of the name of a key; omitted: all.")
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
    else:
        print_table(_COLUMNS, [_cells(row) for row in found], right=("time",), first_to_go=_FIRST_TO_GO)


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        row["target"],
        row["action"],
        change_text(row["old"], row["new"]),
        row["actor"],
        row["origin"],
        moment(row["at"]),
    ]


def change_text(old: Any, new: Any) -> str:
    """Return what a change changed: `tokens 100 to 200, calls none to 5`."""
    if not isinstance(old, dict | None) or not isinstance(new, dict | None):
        return f"{_text(old)} to {_text(new)}"
    before, after = old or {}, new or {}
    parts = []
    for name in dict.fromkeys([*before, *after]):
        if before.get(name) == after.get(name):
            continue
        if new is None:
            parts.append(f"{name} {_text(before[name])}")
        elif old is None:
            parts.append(f"{name} {_text(after[name])}")
        else:
            parts.append(f"{name} {_text(before.get(name))} to {_text(after.get(name))}")
    return ", ".join(parts)


def _text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return " ".join(map(_text, value)) if isinstance(value, list) else str(value)
