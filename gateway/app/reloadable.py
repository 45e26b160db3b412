"""Build the parts of a worker that a reload replaces, from one configuration.

A reload makes new `Parts` with the same `Lasting`; calls under way end under the parts they began with.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack

from gateway import config
from gateway.app.assembly import assemble
from gateway.app.resources import Tls, logs_json, planner_of, upstreams_of
from gateway.app.token_issuer import bearer_tokens_of
from gateway.budget.reservation import Budgets
from gateway.call.types import SessionPolicy
from gateway.config.model_catalog import Catalog
from gateway.config.policies import (
    agents_of,
    budget_policy,
    id_headers_of,
    key_of,
    provider_of,
    result_model,
    routes_of,
    runaway_policy,
    shared_budgets,
)
from gateway.context.caches import ContextCaches
from gateway.context.inspector import Inspector
from gateway.context.planner import Planner, PlannerThreads
from gateway.context.tool_results import ToolResultRenderer
from gateway.core.counting.estimate import Estimator
from gateway.core.errors import StoreDamaged
from gateway.core.ledger.arithmetic import AccountKey, Claim
from gateway.core.ledger.charging import KeyContext, claims_on
from gateway.core.ledger.session_key import SessionKey
from gateway.core.ports import Observer, Upstream
from gateway.core.record import CallRecord
from gateway.core.routing import Routes
from gateway.core.values import dataclass
from gateway.counters.registry import Counters
from gateway.pipeline.exchange import Gateway
from gateway.server import headers
from gateway.server.auth import Authenticator, KeyRule, digest
from gateway.server.bearer_tokens import BearerTokens
from gateway.server.endpoints import Bounds, Forwarder
from gateway.server.handling import ServerRules
from gateway.server.health import IdentityProviderHealth, ProviderHealth
from gateway.server.keyring import KeyRing
from gateway.server.unrecorded import UnrecordedRefusals
from gateway.stores.fallback import FallbackStore
from gateway.stores.learner import Learner
from gateway.stores.leases import Leases
from gateway.stores.settler import Settler
from gateway.telemetry import log
from gateway.telemetry.bodies import LoggedUpstream
from gateway.upstream.retrying import RetryingUpstream

logger = logging.getLogger("gateway")

_OLD_PARTS_CHECK_S = 1.0


@dataclass(frozen=True, slots=True)
class Lasting:
    """The parts of a worker that a reload keeps, as far as other parts need them."""

    store: FallbackStore
    settler: Settler
    leases: Leases
    results: ToolResultRenderer
    keys: KeyRing
    learner: Learner
    counters: Counters
    estimator: Estimator
    memory: ContextCaches
    threads: PlannerThreads
    catalog: Catalog
    observers: Sequence[Observer]
    unrecorded: UnrecordedRefusals
    new_id: Callable[[], str]

    def planner(self, settings: config.Settings) -> Planner:
        """Return a planner with these settings."""
        return planner_of(
            settings,
            self.counters,
            self.estimator,
            self.learner,
            self.catalog.facts,
            memory=self.memory,
            threads=self.threads,
        )

    def gateway(
        self,
        settings: config.Settings,
        routes: Routes,
        upstreams: Mapping[str, Upstream],
        planner: Planner,
    ) -> Gateway:
        """Return the pipeline with these settings."""
        sessions = settings.sessions
        known = config.built_in_providers()
        return assemble(
            routes=routes,
            providers={name: provider_of(name, row, guarded=name in known) for name, row in settings.providers.items()},
            upstreams=upstreams,
            facts=self.catalog.facts,
            store=self.store,
            settler=self.settler,
            planner=planner,
            budgets=Budgets(self.store, self.leases, budget_policy(settings), time.time),
            results=self.results,
            learner=self.learner,
            observers=self.observers,
            policy=SessionPolicy(
                id_headers_of(settings),
                sessions.on_missing,
                stream_totals=sessions.stream_totals == "comment",
                estimate_missing=sessions.usage_missing == "estimate",
            ),
            totals_comment=headers.totals_comment,
            new_id=self.new_id,
            result_model=result_model(settings, self.catalog.facts),
            agents=agents_of(settings),
            runaway=runaway_policy(settings),
            thinking=self.estimator.families.thinking,
        )


class Parts:
    """The parts of a worker that one configuration makes: authentication, routes, connections and rules."""

    def __init__(self, settings: config.Settings, lasting: Lasting, tls: Tls, earlier: Parts | None = None) -> None:
        self.settings = settings
        self._keys = lasting.keys
        self._store = lasting.store
        #: the callers of bearer tokens; keys of the identity provider that `earlier` parts know stay known
        self.bearer_tokens: BearerTokens | None = bearer_tokens_of(
            settings, earlier.bearer_tokens if earlier is not None else None
        )
        server, sessions = settings.server, settings.sessions
        routes = routes_of(settings)
        admin = settings.auth.admin_key
        shared, keys = shared_budgets(settings), [key_of(row, settings.timezone) for row in settings.auth.keys]
        digests = [digest(row.key.get_secret_value()) for row in settings.auth.keys]
        authenticator = Authenticator(
            [KeyRule.of(key, secret, shared) for key, secret in zip(keys, digests, strict=True)],
            admin.get_secret_value() if admin is not None else None,
            server.cors_origins,
            lambda: lasting.keys.keys,
            self.bearer_tokens,
            is_required=settings.auth.required,
            shared=shared,
        )
        bounds = Bounds(
            max_body=int(server.max_body_mb * 2**20),
            max_concurrency=server.max_concurrency,
            body_timeout_s=server.body_timeout_s,
            on_disconnect=sessions.on_disconnect,
            drain_s=sessions.drain_s,
            shutdown_grace_s=server.shutdown_grace_s,
            write_timeout_s=server.write_timeout_s,
        )
        self._upstreams = upstreams_of(settings.providers, tls, lasting.estimator.families)
        upstreams = _logged(self._upstreams, settings)
        planner = lasting.planner(settings)
        inspector = Inspector(planner, routes, lasting.catalog.facts)
        self.rules = ServerRules(
            authenticator,
            lasting.keys,
            routes,
            lasting.catalog,
            inspector,
            budget_policy(settings),
            bounds.max_body,
            bounds.body_timeout_s,
            lasting.unrecorded,
            lasting.new_id,
            agents=agents_of(settings),
            id_headers=id_headers_of(settings),
            configured_keys=keys,
            key_context=KeyContext(shared, settings.timezone),
        )
        gateway = lasting.gateway(settings, routes, upstreams, planner)
        #: settles a call whose worker died
        self.settle_orphaned = gateway.background_settlement.settle_orphaned
        self.forwarder = Forwarder(gateway, authenticator, lasting.keys, bounds, lasting.unrecorded)

    async def _agent_types(self, accounts: Iterable[AccountKey]) -> dict[AccountKey, str | None]:
        """Return the types of the subagents that these accounts belong to."""
        types: dict[AccountKey, str | None] = {}
        sessions = {SessionKey(one.namespace, one.session_id) for one in accounts if one.kind == "agent"}
        for session in sessions:
            with contextlib.suppress(StoreDamaged):
                types |= {session.agent_account(one.id): one.type for one in await self._store.agents(session)}
        return types

    async def claims_on(self, calls: Sequence[CallRecord]) -> list[Claim]:
        """Return the accounts that calls were charged to, with the limits that this configuration sets, each once."""
        accounts = dict.fromkeys(account for call in calls for account in call.accounts)
        keys = (*self._keys.keys.values(), *self.rules.configured_keys)
        limits = self.bearer_tokens.limits() if self.bearer_tokens is not None else {}
        limits |= {AccountKey("key", key.name): key.limits for key in keys} | self.rules.key_context.shared.limits()
        types = await self._agent_types(accounts)
        types |= {
            call.session.agent_account(call.agent.id): call.agent.type
            for call in calls
            if call.session is not None and call.agent is not None
        }
        return claims_on(accounts, self.rules.budget, limits, types)

    def providers(self) -> list[ProviderHealth]:
        """Return the health of each provider."""
        rows = self.settings.providers
        return [_provider_health(name, rows[name], upstream) for name, upstream in self._upstreams.items()]

    def identity_provider(self) -> IdentityProviderHealth | None:
        """Return the health of the identity provider, or None if no tokens are accepted."""
        tokens = self.bearer_tokens
        return IdentityProviderHealth(tokens.issuer, tokens.keys.failure) if tokens is not None else None

    async def aclose(self) -> None:
        """End the calls of this configuration, and close its connections."""
        async with AsyncExitStack() as closing:
            for upstream in self._upstreams.values():
                closing.push_async_callback(upstream.aclose)
            if self.bearer_tokens is not None:
                closing.push_async_callback(self.bearer_tokens.aclose)
            closing.push_async_callback(self.forwarder.close)

    async def retire(self) -> None:
        """Close the connections when the last call has ended, after another configuration was applied."""
        try:
            while self.forwarder.running:  # noqa: ASYNC110  # rare, and no call waits for it
                await asyncio.sleep(_OLD_PARTS_CHECK_S)
        finally:
            await self.aclose()


def _provider_health(name: str, row: config.Provider, upstream: RetryingUpstream) -> ProviderHealth:
    left_alone_s = upstream.opens_in_s
    if left_alone_s is not None:
        return ProviderHealth(name, row.adapter, "left_alone", upstream.failures, round(left_alone_s, 1))
    if not upstream.was_called:
        # litellm finds a key by itself.
        needs_key = row.auth != "none" and row.adapter != "litellm" and not row.holds_credential
        return ProviderHealth(name, row.adapter, "no_key" if needs_key else "not_called")
    return ProviderHealth(name, row.adapter, "failing" if upstream.failures else "ok", upstream.failures)


def _logged(upstreams: Mapping[str, Upstream], settings: config.Settings) -> Mapping[str, Upstream]:
    """Return the upstreams; if `telemetry.log.bodies` is on, each logs its requests and responses."""
    if not settings.telemetry.log.bodies:
        return upstreams
    logger.warning("prompts and answers are written to this log: telemetry.log.bodies is on")
    as_json = logs_json(settings)
    put = log.line_writer(sys.stderr, as_json=as_json)
    return {name: LoggedUpstream(one, name, put, as_json=as_json) for name, one in upstreams.items()}
