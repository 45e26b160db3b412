"""The composition root: Settings -> ASGI application. The only module that knows every class."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import gc
import logging
import os
import random
import signal
import ssl
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from urllib.parse import urlsplit

from gateway import __version__, catalog, config
from gateway.budgeting import Budgets
from gateway.calls import SessionPolicy
from gateway.core.counting.cache import CountCache
from gateway.core.counting.estimate import Estimator
from gateway.core.errors import ConfigError
from gateway.core.ids import call_id
from gateway.core.ports import Observer, Store, Upstream
from gateway.core.retrying import BreakerPolicy, RetryPolicy
from gateway.core.routing import ModelFacts, Route, Routes
from gateway.core.signing import signing_key
from gateway.core.spending import KeyBudget
from gateway.counters.registry import Counters, is_dotted_path
from gateway.inspection import Inspector
from gateway.pipeline import Gateway
from gateway.planning import Planner
from gateway.policies import (
    agents_of,
    budget_policy,
    context_policy,
    limits_of,
    provider_of,
    result_model,
    routes_of,
    table_names,
)
from gateway.results import Results
from gateway.server import headers
from gateway.server.app import GatewayApp
from gateway.server.auth import Access, Authenticator, KeyRule, digest
from gateway.server.context import ContextApi
from gateway.server.dashboard import Dashboard
from gateway.server.endpoints import Forwarder, Limits
from gateway.server.events import EventsApi
from gateway.server.health import HealthApi, ProviderHealth, WorkerHealth
from gateway.server.keyring import KeyRing
from gateway.server.metrics import MetricsApi
from gateway.server.sessions import Rules, SessionsApi, call_json, shown_id, totals_json
from gateway.stores.blind import Blind
from gateway.stores.journal import Journal
from gateway.stores.learner import Learner
from gateway.stores.leases import Leases
from gateway.stores.memory import MemoryStore
from gateway.stores.settler import Settler
from gateway.stores.sqlite import SqliteStore
from gateway.telemetry import callbacks, log
from gateway.telemetry.callbacks import Callbacks, Shapes
from gateway.telemetry.metrics import Metrics, State
from gateway.telemetry.otel import Otel
from gateway.telemetry.webhooks import SENDERS, Target, Webhook
from gateway.upstream import http
from gateway.upstream import litellm as translating
from gateway.upstream.retrying import RetryingUpstream

logger = logging.getLogger("gateway")

_GC_THRESHOLDS = (10_000, 20, 50)
_EXPIRE_EVERY_S = 3600.0
_OLD_PARTS_CHECK_S = 1.0
_STATE_EVERY_S = 2.0
_SEES_ALL = Access(None, admin=True)
#: in which callbacks are told what /api shows
_SHAPES = Shapes(partial(call_json, access=_SEES_ALL), partial(shown_id, access=_SEES_ALL), totals_json)
#: for the token counts of messages, the last ones seen
_COUNTS_BYTES = 32 * 2**20

Load = Callable[[], config.Loaded]


def app_from_environment() -> GatewayApp:
    """The application of a worker process, configured as its parent was (`config.pass_on`)."""
    # A full collection looks at every object there is, and all calls wait for it meanwhile (20-40 ms seen). What was
    # imported stays anyway, and what calls leave behind is hardly ever a cycle.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    return build_app(config.load_passed_on)


def build_app(load: Load) -> GatewayApp:
    """The application for one worker process. `load` reads the configuration, at start and at each reload."""

    @asynccontextmanager
    async def resources() -> AsyncIterator[Worker]:
        settings = load().settings
        store = open_store(settings)
        try:
            worker = Worker(store, settings, load)
            try:
                await worker.keys.begin()
                yield worker
            finally:
                await worker.aclose()
        finally:
            await store.aclose()

    return GatewayApp(resources, new_id)


def open_store(settings: config.Settings) -> Store:
    """The configured store. Needs a running event loop.

    Raises:
        StoreUnavailable: it cannot be opened.
    """
    path, timeout_s = settings.store.sqlite_path, settings.store.timeout_ms / 1000
    if settings.store.is_redis:
        from gateway.stores.redis import RedisStore  # noqa: PLC0415  # only whoever uses one needs its client

        return RedisStore(settings.store.url, timeout_s=timeout_s, ttl_s=settings.sessions.ttl_s)
    if path is None:
        return MemoryStore()
    return SqliteStore(path, timeout_s=timeout_s)


def open_catalog(settings: config.Settings) -> catalog.Catalog:
    """The model tables on disk."""
    families = config.families()
    tables = catalog.Catalog(
        config.model_facts(),
        catalog.load_litellm_table(),
        tokenizers=lambda route: families.of(route.model, route.provider, "chat").tokenizer,
    )
    tables.rename(table_names(settings))
    return tables


def add_counters(counters: Counters, settings: config.Settings) -> None:
    """Make the token counters known that routes name by their dotted path.

    Raises:
        ConfigError: one of them cannot be made; the problem names the route.
    """
    problems = []
    for index, row in enumerate(settings.models):
        if row.tokenizer is not None and is_dotted_path(row.tokenizer):
            try:
                counters.add(row.tokenizer)
            except ConfigError as error:
                problems += [f"models.{index}.tokenizer: {problem}" for problem in error.problems]
    if problems:
        raise ConfigError(problems)


def estimator_of(counters: Counters) -> Estimator:
    """An estimator that counts with these; token tables are loaded when they are first needed."""
    return Estimator(config.families(), counters.counter, CountCache(_COUNTS_BYTES, threading.Lock()))


@contextmanager
def inspector_of(settings: config.Settings) -> Iterator[Inspector]:
    """An inspector that needs no running gateway, and so knows nothing learned. Needs a running event loop.

    Raises:
        ConfigError: a file that stands beside the configuration, or a token counter it names, is wrong.
    """
    counters = Counters()
    add_counters(counters, settings)
    facts = open_catalog(settings).facts
    planner = planner_of(settings, counters, estimator_of(counters), Learner(MemoryStore()), facts)
    try:
        yield Inspector(planner, routes_of(settings), facts)
    finally:
        planner.close()


def planner_of(
    settings: config.Settings,
    counters: Counters,
    estimator: Estimator,
    learner: Learner,
    facts: Callable[[Route], ModelFacts],
) -> Planner:
    """The planner under these settings."""
    return Planner(
        estimator,
        counters.is_loaded,
        learner,
        context_policy(settings, facts),
        deadline_s=settings.context.deadline_ms / 1000,
        clock=time.monotonic,
    )


class Worker:
    """Everything one worker process holds: parts that stay (store, settler, log) and parts a reload replaces."""

    def __init__(self, store: Store, settings: config.Settings, load: Load) -> None:
        own = callbacks.made(settings.callbacks.observers)
        self.store = store
        self._load = load
        journal, blind = settings.store.journal_path, Blind()
        self._settler = Settler(
            store, Journal(journal) if journal else None, is_open=settings.store.on_failure == "open"
        )
        self._settler.on_return = blind.forget
        self._settler.start()
        self._blind = blind
        self._leases = Leases(
            store,
            self._settler.settle,
            lease_s=settings.budget.lease_s,
            is_away=lambda: self._settler.is_away,
            away=self._settler.away,
        )
        self._leases.start()
        self._results = Results(store, settings.sessions.results_max_bytes)
        self.keys = KeyRing(store)
        self._learner = Learner(store)
        self._counters = Counters()
        add_counters(self._counters, settings)
        self._estimator = estimator_of(self._counters)
        self._metrics = Metrics(config.shared_metrics()) if settings.telemetry.metrics else None
        self._callbacks = Callbacks(own, webhooks_of(settings.callbacks.webhooks, self._metrics), _SHAPES)
        self._observers = [self._learner, *_observers(settings), self._callbacks]
        self._observers += [self._metrics] if self._metrics is not None else []
        self._otel = Otel(__version__) if settings.telemetry.otel else None
        self._observers += [self._otel] if self._otel is not None else []
        self._catalog = open_catalog(settings)
        self._ttl_s = settings.sessions.ttl_s
        self._chores = {asyncio.create_task(self._expire()), asyncio.create_task(self._note_state())}
        self.cors_origins = settings.server.cors_origins
        self._parts = _Parts(settings, self)
        self._workers = settings.server.workers
        self._store_url = settings.store.shown_url
        self.api = SessionsApi(store, lambda: self._parts.rules, self.reload_all)
        self.context_api = ContextApi(store, lambda: self._parts.rules)
        self.events_api = EventsApi(store, lambda: self._parts.rules)
        self.metrics_api = MetricsApi(lambda: self._parts.rules, self._metrics, self._state)
        self.health_api = HealthApi(store, lambda: self._parts.rules, self._health)
        self.dashboard = Dashboard(is_on=settings.server.dashboard)
        self._started_at = time.time()
        # A server in a thread (tests, the demo) gets no signals.
        with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._reload_on_signal)

    @property
    def forwarder(self) -> Forwarder:
        """The one in force."""
        return self._parts.forwarder

    def _health(self) -> WorkerHealth:
        """How this worker does."""
        settings = self._parts.settings
        return WorkerHealth(
            version=__version__,
            pid=os.getpid(),
            workers=self._workers,
            started_at=self._started_at,
            calls=self.forwarder.running,
            holds=self._leases.count,
            store=self._store_url,
            is_away=self._settler.is_away,
            waiting=self._settler.waiting,
            on_failure=settings.store.on_failure,
            default_provider=settings.default_provider,
            providers=self._parts.providers(),
        )

    def _state(self) -> State:
        """The same in figures."""
        health = self._health()
        return State(
            version=health.version,
            started_at=health.started_at,
            calls=health.calls,
            holds=health.holds,
            is_store_away=health.is_away,
            waiting=health.waiting,
            providers={one.name: one.state != "left_alone" for one in health.providers},
        )

    async def _note_state(self) -> None:
        """For the other workers, any of which may be asked how all are doing."""
        while self._metrics is not None and self._workers > 1:
            self._metrics.look(self._state())
            await asyncio.sleep(_STATE_EVERY_S)

    def reload_all(self) -> None:
        """Reload every worker: this one, or through the supervisor all of them.

        Raises:
            ConfigError: the configuration is wrong; nothing was changed.
        """
        if self._workers == 1:
            self.reload()
        else:
            config.refuse_open_door(self._load().settings)
            os.kill(os.getppid(), signal.SIGHUP)

    def _reload_on_signal(self) -> None:
        try:
            self.reload()
        except ConfigError as error:
            logger.error("configuration not reloaded: %s", "; ".join(error.problems))  # noqa: TRY400  # no bug of ours

    def reload(self) -> None:
        """Put the configuration as it is now into force; calls under way end under the old one.

        Raises:
            ConfigError: it is wrong; nothing was changed.
        """
        settings = self._load().settings
        config.refuse_open_door(settings)
        add_counters(self._counters, settings)
        old, self._parts = self._parts, _Parts(settings, self)
        self._catalog.rename(table_names(settings))
        self._ttl_s = settings.sessions.ttl_s
        self._leases.lease_s = settings.budget.lease_s
        self._results.most = settings.sessions.results_max_bytes
        logger.info("configuration reloaded")
        chore = asyncio.create_task(_retire(old))
        self._chores.add(chore)
        chore.add_done_callback(self._chores.discard)

    def planner(self, settings: config.Settings) -> Planner:
        """The planner under these settings."""
        return planner_of(settings, self._counters, self._estimator, self._learner, self._catalog.facts)

    def gateway(
        self,
        settings: config.Settings,
        routes: Routes,
        upstreams: Mapping[str, Upstream],
        planner: Planner,
    ) -> Gateway:
        """The pipeline under these settings."""
        sessions = settings.sessions
        known = config.built_in_providers()
        return Gateway(
            routes=routes,
            providers={name: provider_of(name, row, guarded=name in known) for name, row in settings.providers.items()},
            upstreams=upstreams,
            facts=self._catalog.facts,
            store=self.store,
            settler=self._settler,
            planner=planner,
            budgets=Budgets(self.store, self._leases, self._blind, budget_policy(settings), time.time),
            results=self._results,
            learner=self._learner,
            observers=self._observers,
            policy=SessionPolicy(
                sessions.id_headers,
                sessions.on_missing,
                stream_totals=sessions.stream_totals == "comment",
                estimate_missing=sessions.usage_missing == "estimate",
            ),
            totals_comment=headers.totals_comment,
            new_id=new_id,
            result_model=result_model(settings, self._catalog.facts),
            agents=agents_of(settings),
        )

    @property
    def catalog(self) -> catalog.Catalog:
        """The model tables."""
        return self._catalog

    async def _expire(self) -> None:
        while True:
            with contextlib.suppress(Exception):
                await self.store.expire(time.time() - self._ttl_s)
            await asyncio.sleep(_EXPIRE_EVERY_S)

    async def aclose(self) -> None:
        """End calls, settle them, close connections."""
        for chore in self._chores:
            chore.cancel()
        await asyncio.gather(*self._chores, return_exceptions=True)
        await self.events_api.aclose()
        await self._parts.aclose()
        await self._callbacks.aclose()
        if self._otel is not None:
            await asyncio.to_thread(self._otel.close)
        await self._leases.aclose()
        await self._settler.aclose()
        await self._learner.aclose()


class _Parts:
    """What one configuration makes of a worker."""

    def __init__(self, settings: config.Settings, worker: Worker) -> None:
        self.settings = settings
        server, sessions = settings.server, settings.sessions
        routes = routes_of(settings)
        admin = settings.auth.admin_key
        authenticator = Authenticator(
            [
                KeyRule(
                    key.name,
                    digest(key.key.get_secret_value()),
                    key.models,
                    KeyBudget(limits_of(key.budget), key.rpm),
                )
                for key in settings.auth.keys
            ],
            admin.get_secret_value() if admin is not None else None,
            server.cors_origins,
            lambda: worker.keys.keys,
            is_required=settings.auth.required,
        )
        limits = Limits(
            max_body=int(server.max_body_mb * 2**20),
            max_concurrency=server.max_concurrency,
            body_timeout_s=server.body_timeout_s,
            on_disconnect=sessions.on_disconnect,
            drain_s=sessions.drain_s,
            shutdown_grace_s=server.shutdown_grace_s,
            write_timeout_s=server.write_timeout_s,
        )
        self._upstreams = upstreams_of(settings.providers)
        self._planner = worker.planner(settings)
        inspector = Inspector(self._planner, routes, worker.catalog.facts)
        self.rules = Rules(
            authenticator,
            worker.keys,
            routes,
            worker.catalog,
            inspector,
            budget_policy(settings),
            limits.max_body,
            limits.body_timeout_s,
            agents=agents_of(settings),
        )
        self.forwarder = Forwarder(
            worker.gateway(settings, routes, self._upstreams, self._planner), authenticator, worker.keys, limits
        )

    def providers(self) -> list[ProviderHealth]:
        """How each provider has done of late."""
        rows = self.settings.providers
        return [_provider_health(name, rows[name].adapter, upstream) for name, upstream in self._upstreams.items()]

    async def aclose(self) -> None:
        await self.forwarder.close()
        self._planner.close()
        for upstream in self._upstreams.values():
            await upstream.aclose()


def _provider_health(name: str, adapter: str, upstream: RetryingUpstream) -> ProviderHealth:
    left_alone_s = upstream.asked_in_s
    if left_alone_s is not None:
        return ProviderHealth(name, adapter, "left_alone", upstream.failures, round(left_alone_s, 1))
    return ProviderHealth(name, adapter, "failing" if upstream.failures else "ok", upstream.failures)


async def _retire(parts: _Parts) -> None:
    """Close the connections of a replaced configuration when its last call has ended."""
    try:
        while parts.forwarder.running:  # noqa: ASYNC110  # rare, and nobody waits for it
            await asyncio.sleep(_OLD_PARTS_CHECK_S)
    finally:
        await parts.aclose()


def upstream_of(name: str, row: config.Provider) -> Upstream:
    """The connections to a provider. Needs a running event loop.

    Raises:
        ConfigError: its certificate authorities cannot be read.
    """
    return upstreams_of({name: row})[name]


def upstreams_of(rows: Mapping[str, config.Provider]) -> dict[str, RetryingUpstream]:
    """The connections to all providers, or to none.

    Raises:
        ConfigError: the certificate authorities of one cannot be read.
    """
    contexts, problems = {}, []
    for name, row in rows.items():
        ca_file = str(row.tls.ca_file.expanduser()) if row.tls.ca_file else None
        try:
            contexts[name] = http.tls_context(verify=row.tls.verify, ca_file=ca_file)
        except OSError as error:
            problems.append(f"providers.{name}.tls.ca_file: {ca_file} cannot be used: {error}")
    if problems:
        raise ConfigError(problems)
    return {
        name: RetryingUpstream(
            name,
            _translated(name, row) if row.adapter == "litellm" else _plain(name, row, tls=contexts[name]),
            RetryPolicy(row.retries),
            BreakerPolicy(row.breaker.failures, row.breaker.open_s),
        )
        for name, row in rows.items()
    }


def webhooks_of(rows: Sequence[config.Webhook], metrics: Metrics | None) -> list[Webhook]:
    """The webhooks. Needs a running event loop."""
    return [_webhook_of(row, metrics) for row in rows]


def _webhook_of(row: config.Webhook, metrics: Metrics | None) -> Webhook:
    shown = urlsplit(row.url).netloc.rpartition("@")[2]
    target = Target(
        url=row.url,
        shown=shown,
        events=frozenset(row.events),
        key=signing_key(row.secret.get_secret_value()) if row.secret is not None else None,
        headers=[(name.encode(), value.encode()) for name, value in row.headers.items()],
        timeout_s=row.timeout_s,
    )
    limits = http.Limits(row.timeout_s, row.timeout_s, row.timeout_s)
    upstream = http.HttpUpstream(shown, row.url, limits, max_connections=SENDERS, proxy=http.proxy_for(row.url))
    return Webhook(target, upstream, counted=metrics.sent if metrics is not None else lambda _: None)


def translation_problems(settings: config.Settings) -> list[str]:
    """What is wrong with the providers that litellm is to speak to; loads it where there is one."""
    names = {name: row.litellm or name for name, row in settings.providers.items() if row.adapter == "litellm"}
    if not names:
        return []
    try:
        known = translating.library.load().providers
    except ImportError as error:
        return [f"providers.{name}.adapter: litellm cannot be loaded: {error}" for name in names]
    return [
        f"providers.{name}.litellm: litellm knows no provider {theirs!r}"
        + "".join(f" (did you mean {close}?)" for close in difflib.get_close_matches(theirs, known, n=1))
        for name, theirs in names.items()
        if theirs not in known
    ]


def _plain(name: str, row: config.Provider, *, tls: ssl.SSLContext | bool) -> Upstream:
    """A provider that speaks the formats of its callers."""
    return http.HttpUpstream(
        name,
        row.base_url,
        http.Limits(row.timeout_s.connect, row.timeout_s.first_byte, row.timeout_s.between_bytes),
        max_connections=row.max_connections,
        tls=tls,
        proxy=http.proxy_for(row.base_url),
    )


def _translated(name: str, row: config.Provider) -> Upstream:
    """A provider that speaks another."""
    return translating.LitellmUpstream(
        translating.Settings(
            name,
            provider=row.litellm or name,
            base_url=row.base_url,
            headers=frozenset(header.encode() for header in row.headers),
            is_keyless=row.auth == "none",
            options=row.options,
            connect_s=row.timeout_s.connect,
            first_byte_s=row.timeout_s.first_byte,
            between_bytes_s=row.timeout_s.between_bytes,
        )
    )


def _observers(settings: config.Settings) -> list[Observer]:
    as_json = logs_json(settings)
    log.configure(as_json=as_json, level=settings.telemetry.log.level)
    if settings.telemetry.log.level == "error":
        return []
    return [log.CallLog(sys.stderr, as_json=as_json, failures_only=settings.telemetry.log.level == "warning")]


def logs_json(settings: config.Settings) -> bool:
    """Whether the log is JSON lines: as configured, or where stderr is no terminal."""
    form = settings.telemetry.log.format
    return form == "json" or (form == "auto" and not sys.stderr.isatty())


def new_id() -> str:
    """A call id: wall time and 80 random bits; unique, not secret."""
    return call_id(time.time_ns() // 1_000_000, random.randbytes(10))  # noqa: S311
