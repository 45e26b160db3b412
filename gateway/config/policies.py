"""Convert settings into the values that `core` uses: limits, policies, routes and providers.

This module only computes values. It opens no files or connections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from urllib.parse import urlsplit

from gateway import config
from gateway.config import model_catalog
from gateway.core.context_budget import ContextPolicy, SummaryModel
from gateway.core.expiry import date_or_time
from gateway.core.http.headers import ProviderAddress
from gateway.core.ledger import arithmetic as ledger
from gateway.core.ledger.charging import BudgetPolicy, DowngradePolicy, SharedBudgets
from gateway.core.ledger.closing import ClosingPolicy
from gateway.core.ledger.windows import time_zone
from gateway.core.modes.summary import MAX_SUMMARY_TOKENS
from gateway.core.providers import host_row, price_factor
from gateway.core.routing import ModelFacts, ModelRule, Route, Routes
from gateway.core.runaway import RunawayPolicy, Thresholds
from gateway.core.steps import (
    DEFAULT_AGENT,
    Agent,
    BudgetBelow,
    Condition,
    MessageMatches,
    NotRecentlyUsed,
    SequenceMatch,
    Step,
    TokensAbove,
    ToolUsed,
)
from gateway.core.stored import StoredKey
from gateway.core.trimming.policy import TrimPolicy
from gateway.core.trimming.strategies import strategies_of


def limits_of(row: config.KeyBudget, zone: str) -> ledger.Limits:
    """Convert a configured budget into limits of the ledger. `zone`: the time zone of windows by the calendar."""
    nano_usd = ledger.nano(row.usd) if row.usd is not None else None
    return ledger.Limits(row.tokens, nano_usd, row.calls, row.window_in(zone))


def key_of(row: config.ClientKey, zone: str) -> StoredKey:
    """Convert a checked client key, without its digest and without the time of its creation.

    `zone`: the time zone of dates, and of windows by day, week and month.
    """
    expires_at = date_or_time(row.expires, time_zone(zone)) if row.expires is not None else None
    limits = limits_of(row.budget, zone)
    return StoredKey(row.name, b"", 0.0, row.models, limits, row.rpm, expires_at, group=row.group)


def shared_budgets(settings: config.Settings) -> SharedBudgets:
    """Convert the budgets that client keys share for core."""
    auth, zone = settings.auth, settings.timezone
    groups = {name: limits_of(row.budget, zone) for name, row in auth.groups.items()}
    return SharedBudgets(limits_of(auth.budget, zone), groups)


def budget_policy(settings: config.Settings) -> BudgetPolicy:
    """Convert the `budget:` settings for core."""
    row = settings.budget
    return BudgetPolicy(
        session=limits_of(row, settings.timezone),
        cached_weight=row.count_cached,
        warn_at=row.warn_at,
        modes=row.modes,
        clamp=row.clamp_output,
        deferred=row.deferred == "forward",
        exhausted_status=row.exhausted_status,
        downgrade=DowngradePolicy(row.downgrade.below, row.downgrade.model) if row.downgrade is not None else None,
        closing=ClosingPolicy(row.closing.reserve, row.closing.message) if row.closing is not None else None,
        agents={name: limits_of(budget, settings.timezone) for name, budget in row.agents.items()},
    )


def runaway_policy(settings: config.Settings) -> RunawayPolicy:
    """Convert the `runaway:` settings, and the limits in seconds, for core."""
    rules, budget = settings.runaway, settings.budget
    seconds = budget.seconds
    rows = [*settings.steps, *(row for agent in settings.agents.values() for row in agent.steps)]
    return RunawayPolicy(
        loop=Thresholds(rules.loop.warn, rules.loop.refuse),
        no_progress=Thresholds(rules.no_progress.warn, rules.no_progress.refuse),
        rounds=Thresholds(rules.rounds.warn, rules.rounds.refuse),
        seconds=Thresholds(seconds * budget.warn_at, seconds) if seconds is not None else Thresholds(),
        warn_share=budget.warn_at,
        has_step_seconds=any(row.max_seconds is not None for row in rows),
    )


def context_policy(settings: config.Settings, facts: Callable[[Route], ModelFacts]) -> ContextPolicy:
    """Convert the `context:` settings for core."""
    row = settings.context
    return ContextPolicy(
        trim=row.trim,
        budget=row.budget if isinstance(row.budget, int) else None,
        reserve_tokens=row.reserve_tokens if isinstance(row.reserve_tokens, int) else None,
        keep_last_turns=row.keep_last_turns,
        overflow=row.on_overflow,
        safety=row.safety if isinstance(row.safety, float) else None,
        fit=TrimPolicy(
            strategies=strategies_of(
                row.strategies, shorten_tokens=row.result_max_tokens, summary_tokens=row.summary.max_tokens
            ),
            low_water=row.low_water if isinstance(row.low_water, float) else None,
            recall=row.recall,
        ),
        summary=_summary_model(settings, facts),
        deadline_s=settings.context.deadline_ms / 1000,
        sets_cache_marks=row.cache == "auto",
    )


def result_model(settings: config.Settings, facts: Callable[[Route], ModelFacts]) -> SummaryModel | None:
    """Return the model that summarizes tool results, or None."""
    name = settings.budget.summary_model
    if name is None:
        return None
    route = routes_of(settings).resolve(name)
    return SummaryModel(name, route, facts(route), MAX_SUMMARY_TOKENS)


def _summary_model(settings: config.Settings, facts: Callable[[Route], ModelFacts]) -> SummaryModel | None:
    row = settings.context.summary
    if row.model is None:
        return None
    route = routes_of(settings).resolve(row.model)
    return SummaryModel(row.model, route, facts(route), row.max_tokens)


def id_headers_of(settings: config.Settings) -> tuple[bytes, ...]:
    """Return the configured session headers, which precede the known ones."""
    return tuple([name.encode() for name in settings.sessions.id_headers])


def routes_of(settings: config.Settings) -> Routes:
    """Build the routing table: configured routes, then the built-in ones whose provider exists."""
    rules = [
        ModelRule(
            row.match,
            row.providers[0],
            row.name,
            model_catalog.facts_of(row),
            tuple(row.provider.items()) if isinstance(row.provider, dict) else (),
            row.fallback,
            row.agent,
        )
        for row in settings.models
    ]
    names, unused = list(settings.providers), config.unused_providers(settings)
    if settings.built_in_providers:
        rules += [
            ModelRule(match, name)
            for match, name in config.BUILT_IN_ROUTES
            if name in names and match.partition("/")[0] not in unused
        ]
    anthropic = "anthropic" if settings.built_in_providers and "anthropic" in names else None
    return Routes(rules, names, settings.default_provider, anthropic, unused)


def table_names(settings: config.Settings) -> dict[str, str]:
    """Return providers with another name in the tables: our name -> the name in the tables."""
    return {name: row.litellm for name, row in settings.providers.items() if row.litellm}


def uplifts(settings: config.Settings) -> dict[str, str]:
    """Return providers that are called in a dearer region: our name -> the key of the price factor in the table.

    At Vertex every location except `global` is dearer.
    """
    factors = {}
    for name, row in settings.providers.items():
        factor = price_factor(_host(row))
        if factor is not None:
            factors[name] = factor
        elif row.options.get("vertex_location", "global") != "global":
            factors[name] = "regional_endpoint_uplift_multiplier"
    return factors


def provider_of(name: str, row: config.Provider, *, guarded: bool = False) -> ProviderAddress:
    """Convert a configured provider for core."""
    return ProviderAddress(
        name,
        row.base_url,
        row.auth,
        row.key.get_secret_value(),
        tuple((header.encode(), value.encode()) for header, value in row.headers.items()),
        row.key_prefixes,
        _limit_field(row),
        dialects=row.dialects,
        allowed_tools=row.allowed_tools,
        reports_cost=row.reports_cost,
        compaction=_compaction(row),
        billed_refusals=row.billed_refusals,
        strict_fields=row.strict_fields,
        is_translated=row.adapter == "litellm",
        chat_cache_marks=row.adapter == "litellm" or host_row(_host(row)).chat_cache_marks,
        guarded=guarded,
    )


def _limit_field(row: config.Provider) -> str:
    """Return the field for the output limit of chat calls."""
    return host_row(_host(row)).limit_field if row.limit_field == "auto" else row.limit_field


def _compaction(row: config.Provider) -> bool | None:
    """Return whether a provider compacts conversations, or None if unknown."""
    if row.compaction is None:
        return False if row.adapter == "litellm" else host_row(_host(row)).compacts
    return row.compaction


def _host(row: config.Provider) -> str:
    return urlsplit(row.base_url).hostname or ""


def agents_of(settings: config.Settings) -> dict[str, Agent]:
    """Return the agents that have steps, by name."""
    rows = {name: agent.steps for name, agent in settings.agents.items()}
    if settings.steps:
        rows[DEFAULT_AGENT] = settings.steps
    return {name: _agent(name, steps) for name, steps in rows.items()}


def _agent(name: str, rows: Sequence[config.StepRow]) -> Agent:
    return Agent(
        name,
        [
            Step(
                name=row.name,
                description=row.description,
                conditions=tuple(condition for rule in row.conditions for condition in _conditions(rule)),
                allowed=row.available_tools.allowed,
                denied=row.available_tools.denied,
                sequence=row.sequence,
                is_default=row.is_default,
                enforce=row.enforce,
                context_budget=row.context_budget,
                model=row.model,
                max_output_tokens=row.max_output_tokens,
                max_seconds=row.max_seconds,
            )
            for row in rows
        ],
    )


def _conditions(row: config.StepCondition) -> Iterator[Condition]:
    if row.tool_used is not None:
        yield ToolUsed(row.tool_used.tools, row.tool_used.window)
    if row.not_recently_used is not None:
        yield NotRecentlyUsed(row.not_recently_used.tools, row.not_recently_used.window)
    if row.sequence_match is not None:
        yield SequenceMatch(row.sequence_match)
    if row.message_matches is not None:
        yield MessageMatches(config.matcher(row.message_matches))
    if row.tokens_above is not None:
        yield TokensAbove(row.tokens_above)
    if row.budget_below is not None:
        yield BudgetBelow(row.budget_below)
