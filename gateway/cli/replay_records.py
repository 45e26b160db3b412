"""`gateway replay --records`: apply configured budgets to recorded usage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from gateway.cli.common import Exit, config_problems, load, print_json, print_table, quoted, stop
from gateway.cli.numbers import cost
from gateway.cli.recordings import LONGEST_NAME, Complaints, PlotLines, draw, lines_of, share_of
from gateway.cli.sessions import suggest_session, with_store

if TYPE_CHECKING:
    from gateway.config import Settings
    from gateway.core.ledger.charging import KeyLimits
    from gateway.core.ports import Store
    from gateway.replay.budgets import BudgetSums, ReplayOutcome, ReplayRules
    from gateway.replay.records import ReplayedCall

_USAGE_COLUMNS: Final = ("calls", "input", "output", "cached", "cost", "over budget", "most over")
#: columns that are shown if a session or a client key has a budget; `at`: the first call in that mode, or refused
_BUDGET_COLUMNS: Final = ("table at", "summary at", "handle at", "refused at", "refused", "spent", "spent usd")
#: columns that a small terminal leaves out, in this order
_FIRST_TO_GO: Final = (
    "most over", "table at", "summary at", "handle at", "spent usd", "spent", "cached", "over budget", "input",
    "output", "refused",
)  # fmt: skip
#: extensions of names that certainly mean a file, even if it does not exist
_FILE_SUFFIXES: Final = frozenset({".gz", ".json", ".jsonl", ".log", ".ndjson", ".txt"})
#: most client keys that a warning names
_MOST_NAMED: Final = 5
_MODES: Final = ("table", "summary", "handle_only")


@dataclass(frozen=True, slots=True)
class Selection:
    """The records to read, and the budgets to apply. `names`: files or sessions; empty: the whole store."""

    names: Sequence[str]
    config: Path | None
    store: str | None
    budget: int | None
    session_budget: int | None


def report(selection: Selection, top: int, plot: Path | None, *, as_json: bool) -> None:
    """Read the records, apply the budgets and print the result."""
    from gateway.replay.budgets import NO_SESSION, BudgetSums, outcomes

    flags = {"budget.tokens": selection.session_budget} if selection.session_budget is not None else None
    settings = load(selection.config, flags).settings
    with config_problems():
        rules = _rules(settings, selection.budget)
    calls, stored = _calls(selection)
    rules = replace(rules, keys={**stored, **rules.keys})
    found = list(outcomes(calls, rules))
    if not found:
        stop("The input contains no call record.", Exit.FAILED)
    _warn_of_unknown_keys(calls, rules)
    total, sessions = BudgetSums(), dict[str, BudgetSums]()
    for outcome in found:
        key = outcome.call.session
        total.add(outcome)
        sessions.setdefault(key.shown() if key is not None else NO_SESSION, BudgetSums()).add(outcome)
    if plot is not None:
        draw(plot, _plot_lines(found))
    if as_json:
        each = {name: {**sums.as_json(), **sums.places_json()} for name, sums in sessions.items()}
        print_json({"total": total.as_json(), "sessions": each})
        return
    limits = [rules.budgets.session, *(key.limits for key in rules.keys.values())]
    _print(sessions, total, top, has_budget=not all(limit.is_none for limit in limits))


def _warn_of_unknown_keys(calls: Sequence[ReplayedCall], rules: ReplayRules) -> None:
    """Print the names of client keys whose budgets are unknown."""
    from gateway.core.ledger.session_key import OPEN_NAMESPACE

    unknown = {call.session.namespace for call in calls if call.session is not None} - {*rules.keys, OPEN_NAMESPACE}
    if unknown:
        names = ", ".join(sorted(unknown)[:_MOST_NAMED]) + (", …" if len(unknown) > _MOST_NAMED else "")
        typer.echo(
            f"No budgets are known for these client keys: {names}. Configure them in auth.keys, or read the records "
            "from the store that has the keys.",
            err=True,
        )


def _rules(settings: Settings, budget: int | None) -> ReplayRules:
    from gateway.app.resources import open_catalog, open_families
    from gateway.config.policies import budget_policy, context_policy, limits_of, routes_of, shared_budgets
    from gateway.core.errors import UnknownModel
    from gateway.core.ledger.charging import KeyLimits
    from gateway.core.routing import ModelFacts, Route
    from gateway.counters.registry import Counters
    from gateway.replay.budgets import ReplayRules

    shared, zone = shared_budgets(settings), settings.timezone
    keys = {
        key.name: KeyLimits(limits_of(key.budget, zone), shared=shared.claims(key.group)) for key in settings.auth.keys
    }
    catalog, routes = open_catalog(settings, open_families(Counters(), settings)), routes_of(settings)

    def facts(call: ReplayedCall) -> ModelFacts:
        try:
            route = routes.resolve(call.model)
        except UnknownModel:
            route = Route(call.provider, call.model)
        is_same = (route.provider, route.model) == (call.provider, call.model)
        return catalog.facts(route if is_same else Route(call.provider, call.model))

    return ReplayRules(
        context_policy(settings, catalog.facts),
        budget_policy(settings),
        keys,
        facts,
        budget,
    )


def _calls(selection: Selection) -> tuple[list[ReplayedCall], dict[str, KeyLimits]]:
    """Return the records of the files and sessions, and the budgets of the client keys in the store."""
    from gateway.replay.records import read_records

    files = [name for name in selection.names if name == "-" or Path(name).is_file()]
    sessions = [name for name in selection.names if name not in files]
    missing = next((name for name in sessions if Path(name).suffix in _FILE_SUFFIXES), None)
    if missing is not None:
        stop(f"File {quoted(missing)} does not exist.", Exit.FAILED)
    complain = Complaints()
    found: list[ReplayedCall] = []
    for name in files:
        found += read_records(lines_of(name), complain.of(name))
    if not sessions and selection.names:
        return found, {}
    calls, keys = _stored(selection, sessions)
    return [*found, *calls], keys


def _stored(selection: Selection, sessions: Sequence[str]) -> tuple[list[ReplayedCall], dict[str, KeyLimits]]:
    from gateway.core.ledger.charging import KeyLimits
    from gateway.core.ledger.session_key import SessionKey
    from gateway.replay.records import read_store

    keys = [SessionKey.parse(name) for name in sessions]
    unknown = [name for name, key in zip(sessions, keys, strict=True) if key is None]
    if unknown:
        stop(f"{quoted(unknown[0])} is neither a file nor a valid session id.", Exit.FAILED)
    named = [key for key in keys if key is not None] if sessions else None

    async def read(store: Store) -> tuple[list[ReplayedCall], dict[str, KeyLimits]]:
        for name, key in zip(sessions, named or (), strict=True):
            if await store.session(key) is None:
                alike = await suggest_session(store, name)
                stop(f"{quoted(name)} is neither a file nor a session{alike}.", Exit.FAILED)
        budgets = {key.name: KeyLimits(key.limits) for key in await store.keys()}
        return [call async for call in read_store(store, named)], budgets

    return with_store(selection.config, selection.store, read)


def _plot_lines(found: Sequence[ReplayOutcome]) -> PlotLines:
    charges = [outcome.call.charge if outcome.call.has_details else None for outcome in found]
    return PlotLines(
        original=[outcome.original for outcome in found],
        sent=[outcome.call.sent for outcome in found],
        cached=[charge.usage.cache_read_tokens if charge else None for charge in charges],
        budget=[outcome.budget for outcome in found],
    )


def _print(sessions: dict[str, BudgetSums], total: BudgetSums, top: int, *, has_budget: bool) -> None:
    largest = sorted(sessions.items(), key=lambda pair: -pair[1].total)[:top]
    cells = [
        [name[:LONGEST_NAME], *_usage_cells(sums), *(_budget_cells(sums) if has_budget else ())]
        for name, sums in largest
    ]
    last = [f"all {len(sessions):,}", *_usage_cells(total)]
    last += ["", "", "", "", *_budget_cells(total)[4:]] if has_budget else []
    numbers = _USAGE_COLUMNS + (_BUDGET_COLUMNS if has_budget else ())
    first_to_go = [name for name in _FIRST_TO_GO if name in numbers]
    print_table(("session", *numbers), [*cells, last], right=numbers, first_to_go=first_to_go)
    for line in _remarks(total, has_budget=has_budget):
        typer.echo(line, err=True)


def _usage_cells(sums: BudgetSums) -> list[str]:
    return [
        f"{sums.calls:,}",
        f"{sums.input:,}",
        f"{sums.output:,}",
        share_of(sums.cached, sums.input) if sums.cached is not None else "?",
        cost(sums.cost_usd),
        f"{len(sums.over):,}" if sums.over else "",
        f"{sums.most_over:,}" if sums.over else "",
    ]


def _budget_cells(sums: BudgetSums) -> list[str]:
    from gateway.core.ledger.refusals import usd

    first = [sums.modes.get(mode) for mode in _MODES] + [sums.first_refused]
    return [
        *(f"call {call.number:,}" if call is not None else "" for call in first),
        f"{sums.refused:,}" if sums.refused else "",
        f"{sums.spent.tokens:,}",
        cost(usd(sums.spent.nano_usd) if sums.cost_usd is not None or sums.spent.nano_usd else None),
    ]


def _remarks(total: BudgetSums, *, has_budget: bool) -> Iterator[str]:
    """Yield sentences that explain the numbers of the table."""
    if total.uncharged:
        yield f"{total.uncharged:,} of {total.calls:,} calls cost nothing (refused or failed)"
    if total.estimated:
        yield f"the usage of {total.estimated:,} calls is an estimate"
    if total.shorter:
        yield f"{total.shorter:,} responses would have ended earlier"
    if not has_budget:
        yield "no session has a budget; set one: --session-budget N, or budget: in the configuration"
    yield (
        "Records contain no text, so the savings of trimming and shorter tool results are unknown, and these numbers "
        "are upper limits. To include the savings, replay the requests: gateway replay FILE"
    )
