"""`gateway export`: print call records as JSON lines or CSV."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from gateway.cli.common import ConfigFile, Exit, quoted, stop
from gateway.cli.sessions import StoreUrl, with_store

if TYPE_CHECKING:
    from gateway.core.ports import Store

_FORMATS: Final = ("jsonl", "csv")
#: fields of a call whose values are objects, of which CSV has a column for each of these parts
_PARTS: Final = {"usage": ("input_tokens", "output_tokens", "total_tokens", "cache_read_tokens", "reasoning_tokens")}
#: fields that CSV leaves out, as their values have many parts
_NOT_IN_CSV: Final = frozenset({"error", "declared_budget", "notes", "unread_thinking", "context"})


def export(
    since: Annotated[
        str, typer.Option(metavar="SPAN|TIME", help="Calls that began in this span, such as 7d, or since 2026-11-28.")
    ] = "30d",
    form: Annotated[str, typer.Option("--format", metavar="jsonl|csv", help="Format of the output.")] = "jsonl",
    config: ConfigFile = None,
    store: StoreUrl = None,
) -> None:
    """Print the records of calls on stdout, one per line, as in the API. They contain no prompts or responses.

    A SQLite store prints them in the order of time, Redis session by session. The output starts at once, and needs
    little memory. A call that is settled meanwhile may be missing or, in Redis, printed twice.
    """
    if form not in _FORMATS:
        stop(f"--format must be one of {', '.join(_FORMATS)}, not {quoted(form)}.", Exit.USAGE)
    begin = _begin(since)

    async def write(opened: Store) -> None:
        import msgspec

        from gateway.server.auth import Access
        from gateway.server.shown import call_json
        from gateway.server.usage import csv_line

        admin, columns = Access(None, admin=True), list[str]()
        async for record in opened.each_call(begin):
            shown = call_json(record, admin)
            if form == "jsonl":
                sys.stdout.buffer.write(msgspec.json.encode(shown) + b"\n")
                continue
            cells = _cells(shown)
            if not columns:
                columns += cells
                sys.stdout.write(csv_line(columns))
            sys.stdout.write(csv_line(cells.values()))

    with_store(config, store, write)
    sys.stdout.flush()


def _begin(since: str) -> float:
    from gateway.config.section import duration
    from gateway.core.errors import InvalidRequest
    from gateway.server.usage import time_of

    try:
        return time.time() - duration(since)
    except ValueError:
        pass
    try:
        return time_of({"--since": since}, "--since", 0.0)
    except InvalidRequest as fault:
        stop(f"{fault.message} A span such as 7d is possible as well.", Exit.USAGE)


def _cells(shown: dict[str, Any]) -> dict[str, Any]:
    """Return a call as one row."""
    cells: dict[str, Any] = {}
    for name, value in shown.items():
        if name in _PARTS:
            cells |= {part: (value or {}).get(part) for part in _PARTS[name]}
        elif name == "labels":
            cells["tag"] = value.get("tag", "")
        elif name not in _NOT_IN_CSV:
            cells[name] = " ".join(value) if isinstance(value, tuple | list) else value
    return cells
