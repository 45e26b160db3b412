"""Assemble the pipeline: make the parts that all calls share, and connect them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from gateway.background.index import BackgroundIndex
from gateway.background.settlement import BackgroundSettlement
from gateway.budget.accounts import Accounts
from gateway.budget.reservation import Budgets
from gateway.budget.settlement import CallSettlement
from gateway.budget.usual_output import UsualOutput
from gateway.call.record import RecordBuilder
from gateway.call.types import Incoming, SessionPolicy
from gateway.context.planner import Planner
from gateway.context.repair import Recomposer
from gateway.context.request import RequestComposer
from gateway.context.summaries import SUMMARY_S, Summaries
from gateway.context.thinking_origins import ThinkingOrigins
from gateway.context.tool_result_summaries import ToolResultSummaries
from gateway.context.tool_results import ToolResultRenderer
from gateway.core.context_budget import SummaryModel
from gateway.core.http.headers import ProviderAddress, secrets_of
from gateway.core.ports import Observer, Upstream
from gateway.core.routing import ModelFacts, Route, Routes
from gateway.core.runaway import RunawayPolicy
from gateway.core.steps import Agent
from gateway.core.thinking_origin import ThinkingRules
from gateway.core.times import Clocks
from gateway.pipeline.compaction import Compactions
from gateway.pipeline.dispatch import Dispatcher
from gateway.pipeline.downgrade import Downgrades
from gateway.pipeline.exchange import Exchange, Gateway
from gateway.pipeline.response import ResponseRelay, TotalsComment
from gateway.pipeline.token_counts import TokenCounts
from gateway.steps.enforcement import Steps
from gateway.steps.runaway import RunawayGuard
from gateway.stores.fallback import FallbackStore
from gateway.stores.learner import Learner
from gateway.stores.settler import Settler


def assemble(
    *,
    routes: Routes,
    providers: Mapping[str, ProviderAddress],
    upstreams: Mapping[str, Upstream],
    facts: Callable[[Route], ModelFacts],
    store: FallbackStore,
    settler: Settler,
    planner: Planner,
    budgets: Budgets,
    results: ToolResultRenderer,
    learner: Learner,
    observers: Sequence[Observer],
    policy: SessionPolicy,
    totals_comment: TotalsComment,
    new_id: Callable[[], str],
    clock: Callable[[], float] = time.monotonic,
    wall: Callable[[], float] = time.time,
    summary_s: float = SUMMARY_S,
    result_model: SummaryModel | None = None,
    agents: Mapping[str, Agent] | None = None,
    thinking: ThinkingRules | None = None,
    runaway: RunawayPolicy | None = None,
) -> Gateway:
    """Return the pipeline of one configuration.

    Args:
        routes: which models are at which providers.
        providers: their addresses and keys, by name.
        upstreams: the connections to them, by name.
        facts: what is known of a model: prices and limits.
        store: where sessions, calls and accounts are kept; knows what to do while that is unavailable.
        settler: writes the records of calls.
        planner: counts and trims.
        budgets: reserves what a call may cost.
        results: shows tool results in response modes.
        learner: keeps what earlier calls taught about token counts.
        observers: are notified of each call.
        policy: how sessions are named and counted.
        totals_comment: makes the comment with the session's totals at the end of a stream.
        new_id: makes the id of a call.
        clock: monotonic seconds.
        wall: Unix time in seconds.
        summary_s: seconds that a call waits for a summary.
        result_model: the model that summarizes tool results; None for extracts only.
        agents: the steps of each agent, by name.
        thinking: which models read whose thinking.
        runaway: when agents that run away are warned and stopped; None for never.
    """

    def handle(incoming: Incoming) -> Exchange:
        return gateway.handle(incoming)

    limits, clocks = budgets.policy, Clocks(clock, wall)
    steps = Steps(
        agents=agents or {},
        store=store,
        planner=planner,
        providers=providers,
        facts=facts,
        observers=observers,
        clocks=clocks,
    )
    guard = None
    if runaway is not None and runaway.least_messages is not None:
        guard = RunawayGuard(runaway, store=store, planner=planner, observers=observers, clocks=clocks)
    records = RecordBuilder(
        facts,
        clock,
        cached_weight=limits.cached_weight,
        estimate_missing=policy.estimate_missing,
        cost_reporters=frozenset(name for name, provider in providers.items() if provider.reports_cost),
        named_at=routes.route_at,
        billed_refusals=_billed_refusals(providers),
    )
    summaries = Summaries(routes, providers, store, handle, new_id=new_id, clock=clock, max_wait_s=summary_s)
    background = BackgroundIndex(store, records, routes, wall)
    background_settlement = BackgroundSettlement(settler, background, observers)
    accounts = Accounts(
        budgets=budgets,
        records=records,
        settler=settler,
        facts=facts,
        read_body=planner.read,
        usual=UsualOutput(learner, clock),
        clock=clock,
    )
    settlement = CallSettlement(
        accounts=accounts,
        settler=settler,
        records=records,
        steps=steps,
        background=background_settlement,
        observers=observers,
        read_body=planner.read,
    )
    composer = RequestComposer(
        planner=planner,
        results=results,
        summaries=summaries,
        result_summaries=ToolResultSummaries(results, summaries, result_model),
        store=store,
        facts=facts,
        has_modes=limits.modes,
    )
    compactions = Compactions(
        store=store,
        planner=planner,
        composer=composer,
        providers=providers,
        facts=facts,
        most=results.max_bytes,
        new_id=new_id,
        clocks=clocks,
    )
    dispatcher = Dispatcher(
        providers=providers,
        upstreams=upstreams,
        composer=composer,
        recomposer=Recomposer(composer, planner, learner),
        read_body=planner.read,
        steps=steps,
        clock=clock,
    )
    secrets = [secret for provider in providers.values() for secret in secrets_of(provider)]
    comment = totals_comment if policy.stream_totals else None
    origins = ThinkingOrigins(store, planner.read, thinking or ThinkingRules())
    gateway = Gateway(
        routes=routes,
        providers=providers,
        facts=facts,
        availability=store.availability,
        planner=planner,
        policy=policy,
        steps=steps,
        runaway=guard,
        background=background,
        background_settlement=background_settlement,
        thinking=origins,
        accounts=accounts,
        settlement=settlement,
        composer=composer,
        compactions=compactions,
        token_counts=TokenCounts(planner, providers, facts, clock),
        dispatcher=dispatcher,
        relay=ResponseRelay(
            accounts, background_settlement, settlement, clock, totals_comment=comment, secrets=secrets
        ),
        new_id=new_id,
        downgrades=Downgrades(limits.downgrade, planner=planner, facts=facts, thinking=origins, store=store),
        clock=clock,
        wall=wall,
    )
    return gateway


def _billed_refusals(providers: Mapping[str, ProviderAddress]) -> dict[str, tuple[str, ...]]:
    """Return the kinds of refusals that each provider bills, by the provider's name."""
    return {
        name: provider.billed_refusals for name, provider in providers.items() if provider.billed_refusals is not None
    }
