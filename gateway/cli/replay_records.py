"""`gateway replay --records`: apply configured budgets to recorded usage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from gateway.cli.common import Exit, config_problems, load, print_json, print_table, quoted, stop
from gateway.cli.numbers import cost
from gateway.cli.recordings import LONGEST_NAME, Complaints, Drawn, draw, lines_of, share_of
from gateway.cli.sessions import like_session, with_store

if TYPE_CHECKING:
    from gateway.config import Settings
    from gateway.core.ledger.charging import KeyLimits
    from gateway.core.ports import Store
    from gateway.replay.budgets import BudgetSums, ReplayOutcome, ReplayRules
    from gateway.replay.records import ReplayedCall

_USED: Final = ("calls", "input", "output", "cached", "cost", "over budget", "most over")
#: what is shown where a session, or a client key, has a budget: the first call in each mode, and without room
_BUDGETED: Final = ("table at", "summary at", "handle at", "refused at", "refused", "spent", "of it dollars")
#: columns that a narrow terminal has no room for, in this order
_FIRST_TO_GO: Final = (
    "most over", "table at", "summary at", "handle at", "of it dollars", "spent", "cached", "over budget", "input",
    "output", "refused",
)  # fmt: skip
#: what is surely meant for a file, whether there is one or not
_OF_FILES: Final = frozenset({".gz", ".json", ".jsonl", ".log", ".ndjson", ".txt"})
#: client keys that are named where there are more of them
_MOST_NAMED: Final = 5
_MODES: Final = ("table", "summary", "handle_only")


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which records to read, and what to hold them against. `names`: files or sessions; none: the whole store."""

    names: Sequence[str]
    config: Path | None
    store: str | None
    budget: int | None
    session_budget: int | None


def report(wanted: Wanted, top: int, plot: Path | None, *, as_json: bool) -> None:
    """Read, reckon, print."""
    from gateway.replay.budgets import NO_SESSION, BudgetSums, outcomes

    flags = {"budget.tokens": wanted.session_budget} if wanted.session_budget is not None else None
    settings = load(wanted.config, flags).settings
    with config_problems():
        rules = _rules(settings, wanted.budget)
    calls, stored = _calls(wanted)
    rules = replace(rules, keys={**stored, **rules.keys})
    found = list(outcomes(calls, rules))
    if not found:
        stop("There is no record of a call in there.", Exit.FAILED)
    _name_strangers(calls, rules)
    total, sessions = BudgetSums(), dict[str, BudgetSums]()
    for outcome in found:
        key = outcome.call.session
        total.add(outcome)
        sessions.setdefault(key.shown() if key is not None else NO_SESSION, BudgetSums()).add(outcome)
    if plot is not None:
        draw(plot, _drawn(found))
    if as_json:
        each = {name: {**sums.as_json(), **sums.places_json()} for name, sums in sessions.items()}
        print_json({"total": total.as_json(), "sessions": each})
        return
    limits = [rules.budgets.session, *(key.limits for key in rules.keys.values())]
    _print(sessions, total, top, has_budget=not all(limit.is_none for limit in limits))


def _name_strangers(calls: Sequence[ReplayedCall], rules: ReplayRules) -> None:
    """Say of which client keys nobody knows the budget."""
    from gateway.core.ledger.session_key import OPEN_NAMESPACE

    strangers = {call.session.namespace for call in calls if call.session is not None} - {*rules.keys, OPEN_NAMESPACE}
    if strangers:
        names = ", ".join(sorted(strangers)[:_MOST_NAMED]) + (", …" if len(strangers) > _MOST_NAMED else "")
        said = f"budgets of client keys that the configuration does not have are not known here: {names}"
        typer.echo(f"{said}. Those that are kept in a store are known where its records are read", err=True)


def _rules(settings: Settings, budget: int | None) -> ReplayRules:
    from gateway.app.resources import open_catalog, open_families
    from gateway.config.policies import budget_policy, context_policy, limits_of, routes_of
    from gateway.core.errors import UnknownModel
    from gateway.core.ledger.charging import KeyLimits
    from gateway.core.routing import ModelFacts, Route
    from gateway.counters.registry import Counters
    from gateway.replay.budgets import ReplayRules

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
        {key.name: KeyLimits(limits_of(key.budget)) for key in settings.auth.keys},
        facts,
        budget,
    )


def _calls(wanted: Wanted) -> tuple[list[ReplayedCall], dict[str, KeyLimits]]:
    """The records of all files and of the sessions in the store, and the budgets of the client keys kept in that."""
    from gateway.replay.records import read_records

    files = [name for name in wanted.names if name == "-" or Path(name).is_file()]
    sessions = [name for name in wanted.names if name not in files]
    missing = next((name for name in sessions if Path(name).suffix in _OF_FILES), None)
    if missing is not None:
        stop(f"There is no file {quoted(missing)}.", Exit.FAILED)
    complain = Complaints()
    found: list[ReplayedCall] = []
    for name in files:
        found += read_records(lines_of(name), complain.of(name))
    if not sessions and wanted.names:
        return found, {}
    calls, keys = _stored(wanted, sessions)
    return [*found, *calls], keys


def _stored(wanted: Wanted, sessions: Sequence[str]) -> tuple[list[ReplayedCall], dict[str, KeyLimits]]:
    from gateway.core.ledger.charging import KeyLimits
    from gateway.core.ledger.session_key import SessionKey
    from gateway.replay.records import read_store

    keys = [SessionKey.parse(name) for name in sessions]
    unknown = [name for name, key in zip(sessions, keys, strict=True) if key is None]
    if unknown:
        stop(f"There is no file {quoted(unknown[0])}, and no session can have that name.", Exit.FAILED)
    named = [key for key in keys if key is not None] if sessions else None

    async def read(store: Store) -> tuple[list[ReplayedCall], dict[str, KeyLimits]]:
        for name, key in zip(sessions, named or (), strict=True):
            if await store.session(key) is None:
                alike = await like_session(store, name)
                stop(f"There is neither a file nor a session {quoted(name)}{alike}.", Exit.FAILED)
        budgets = {key.name: KeyLimits(key.limits) for key in await store.keys()}
        return [call async for call in read_store(store, named)], budgets

    return with_store(wanted.config, wanted.store, read)


def _drawn(found: Sequence[ReplayOutcome]) -> Drawn:
    charges = [one.call.charge if one.call.has_details else None for one in found]
    return Drawn(
        original=[one.original for one in found],
        sent=[one.call.sent for one in found],
        cached=[charge.usage.cache_read_tokens if charge else None for charge in charges],
        budget=[one.budget for one in found],
    )


def _print(sessions: dict[str, BudgetSums], total: BudgetSums, top: int, *, has_budget: bool) -> None:
    largest = sorted(sessions.items(), key=lambda pair: -pair[1].total)[:top]
    cells = [[name[:LONGEST_NAME], *_used(sums), *(_budgeted(sums) if has_budget else ())] for name, sums in largest]
    last = [f"all {len(sessions):,}", *_used(total)]
    last += ["", "", "", "", *_budgeted(total)[4:]] if has_budget else []
    numbers = _USED + (_BUDGETED if has_budget else ())
    going = [name for name in _FIRST_TO_GO if name in numbers]
    print_table(("session", *numbers), [*cells, last], right=numbers, first_to_go=going)
    for line in _remarks(total, has_budget=has_budget):
        typer.echo(line, err=True)


def _used(sums: BudgetSums) -> list[str]:
    return [
        f"{sums.calls:,}",
        f"{sums.input:,}",
        f"{sums.output:,}",
        share_of(sums.cached, sums.input) if sums.cached is not None else "?",
        cost(sums.cost_usd),
        f"{len(sums.over):,}" if sums.over else "",
        f"{sums.most_over:,}" if sums.over else "",
    ]


def _budgeted(sums: BudgetSums) -> list[str]:
    from gateway.core.ledger.refusals import usd

    first = [sums.modes.get(mode) for mode in _MODES] + [sums.first_refused]
    return [
        *(f"call {one.number:,}" if one is not None else "" for one in first),
        f"{sums.refused:,}" if sums.refused else "",
        f"{sums.spent.tokens:,}",
        cost(usd(sums.spent.nano_usd) if sums.cost_usd is not None or sums.spent.nano_usd else None),
    ]


def _remarks(total: BudgetSums, *, has_budget: bool) -> Iterator[str]:
    """What the figures do not say by themselves."""
    if total.uncharged:
        yield f"{total.uncharged:,} of {total.calls:,} calls cost nothing (refused, or failed)"
    if total.estimated:
        yield f"the usage of {total.estimated:,} calls is an estimate"
    if total.shorter:
        yield f"{total.shorter:,} answers would have ended earlier"
    if not has_budget:
        yield "no session has a budget: --session-budget N, or budget: in the configuration"
    yield (
        "Records hold no text: which messages would be cut, and what that and shorter tool results save, they cannot "
        "tell, so all here is the most. The requests themselves can: gateway replay FILE"
    )
