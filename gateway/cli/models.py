"""`gateway models`: show limits and prices of models, and their source."""

from __future__ import annotations

import contextlib
from itertools import islice
from typing import Annotated, Any

import typer

from gateway.cli.common import AsJson, ConfigFile, Exit, config_problems, load, print_json, print_table, quoted, stop
from gateway.cli.numbers import count, dollars

_COLUMNS = ("model", "provider", "window", "input", "output", "in/M", "out/M", "cached/M", "tokenizer", "from")
_NUMBERS = ("window", "input", "output", "in/M", "out/M", "cached/M")
#: fields that are known even of a model that is in no table
_SOURCES_OF_UNKNOWN = frozenset({"tokenizer"})
#: columns that a small terminal leaves out, in this order
_FIRST_TO_GO = ("from", "input", "tokenizer", "cached/M", "provider", "output")


def models(
    pattern: Annotated[str, typer.Argument(help="Part of a model's name, or a shell pattern.")] = "",
    config: ConfigFile = None,
    limit: Annotated[int, typer.Option(metavar="N", parser=count(1, 100_000), help="Maximum number of rows.")] = 50,
    as_json: AsJson = False,
) -> None:
    """Show limits, prices and tokenizers of models, and the source of each."""
    from gateway.app.resources import add_counters, open_catalog, open_families
    from gateway.config.complaints import did_you_mean
    from gateway.config.policies import routes_of
    from gateway.core.errors import UnknownModel
    from gateway.core.routing import is_pattern
    from gateway.counters.registry import Counters
    from gateway.server.shown import model_json, models_json

    settings = load(config).settings
    with config_problems():
        counters = Counters()
        add_counters(counters, settings)  # otherwise it would show tokenizers that the gateway does not use
        catalog, routes = open_catalog(settings, open_families(counters, settings)), routes_of(settings)
    rows = list(islice(models_json(routes, catalog, pattern), limit + 1))
    configured = {row.match for row in settings.models}
    if pattern and not is_pattern(pattern) and all(row["model"] != pattern for row in rows):
        # The tables contain neither names that only a route defines, nor names that only a pattern matches.
        with contextlib.suppress(UnknownModel):
            route = routes.resolve(pattern)
            if route.rule is not None and route.rule.match in configured:
                rows.insert(0, model_json(pattern, route, catalog.facts(route)))
    if not rows and is_pattern(pattern):
        stop(f"No known model matches {quoted(pattern)}.", Exit.FAILED)
    if not rows and pattern:
        # A name with its provider, such as `groq/llama-…`, is in no table, but may be known.
        try:
            route = routes.resolve(pattern)
        except UnknownModel as fault:
            stop(fault.message, Exit.FAILED)
        rows = [model_json(pattern, route, catalog.facts(route))]
        if rows[0]["sources"].keys() <= _SOURCES_OF_UNKNOWN:
            alike = did_you_mean(pattern, [row["model"] for row in models_json(routes, catalog, "")])
            stop(f"Unknown model {quoted(pattern)}{alike}. Calls for it go to {route.provider}.", Exit.FAILED)
    if as_json:
        print_json(rows[:limit])
        return
    print_table(_COLUMNS, [_row(row) for row in rows[:limit]], right=_NUMBERS, first_to_go=_FIRST_TO_GO)
    if len(rows) > limit:
        typer.echo(f"Only the first {limit:,} are shown. Name a part of the model, or raise --limit.", err=True)


def _row(row: dict[str, Any]) -> list[str]:
    price = row["price"] or {}
    return [
        row["model"],
        row["provider"],
        f"{row['window']:,}" if row["window"] else "?",
        f"{row['input']:,}" if row["input"] else "",
        f"{row['output']:,}" if row["output"] else "?",
        _price(price.get("input")) or "?",
        _price(price.get("output")) or "?",
        _price(price.get("cache_read")),
        row["tokenizer"] or "",
        ", ".join(dict.fromkeys(row["sources"].values())) or "unknown",
    ]


def _price(usd: str | None) -> str:
    """Return a price in US dollars per million tokens, or an empty text."""
    return dollars(usd) if usd else ""
