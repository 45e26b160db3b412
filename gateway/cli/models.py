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
#: what is said of a model that no table knows
_OF_ANY_NAME = frozenset({"tokenizer"})
#: columns that a narrow terminal has no room for, in this order
_FIRST_TO_GO = ("from", "input", "tokenizer", "cached/M", "provider", "output")


def models(
    pattern: Annotated[str, typer.Argument(help="Part of the model's name, or a shell pattern.")] = "",
    config: ConfigFile = None,
    limit: Annotated[int, typer.Option(metavar="N", parser=count(1, 100_000), help="Maximum number of rows.")] = 50,
    as_json: AsJson = False,
) -> None:
    """Show limits, prices and tokenizer of models, and the file that each came from."""
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
        add_counters(counters, settings)  # else it would show what nothing is counted with
        catalog, routes = open_catalog(settings, open_families(counters, settings)), routes_of(settings)
    rows = list(islice(models_json(routes, catalog, pattern), limit + 1))
    configured = {row.match for row in settings.models}
    if pattern and not is_pattern(pattern) and all(row["model"] != pattern for row in rows):
        # The tables list no name of a route's own, and none that only its pattern takes.
        with contextlib.suppress(UnknownModel):
            route = routes.resolve(pattern)
            if route.rule is not None and route.rule.match in configured:
                rows.insert(0, model_json(pattern, route, catalog.facts(route)))
    if not rows and is_pattern(pattern):
        stop(f"No model that is known has a name like {quoted(pattern)}.", Exit.FAILED)
    if not rows and pattern:
        # A name with its provider, `groq/llama-…`, stands in no list, and may be known.
        try:
            route = routes.resolve(pattern)
        except UnknownModel as fault:
            stop(fault.message, Exit.FAILED)
        rows = [model_json(pattern, route, catalog.facts(route))]
        if rows[0]["sources"].keys() <= _OF_ANY_NAME:
            alike = did_you_mean(pattern, [row["model"] for row in models_json(routes, catalog, "")])
            stop(f"No model {quoted(pattern)} is known{alike}. Calls for it go to {route.provider}.", Exit.FAILED)
    if as_json:
        print_json(rows[:limit])
        return
    print_table(_COLUMNS, [_row(row) for row in rows[:limit]], right=_NUMBERS, first_to_go=_FIRST_TO_GO)
    if len(rows) > limit:
        typer.echo(f"and more; name a part of the model, or raise --limit {limit}", err=True)


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
        ", ".join(dict.fromkeys(row["sources"].values())) or "nowhere",
    ]


def _price(usd: str | None) -> str:
    """Dollars for a million tokens."""
    return dollars(usd) if usd else ""
