"""Build a worker process and its ASGI application from settings; start, reload and stop it.

`app/reloadable.py` makes the parts of a worker that a reload replaces.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

from gateway import __version__, config
from gateway.app.reload_audit import claim_reload, record_reload, record_signal
from gateway.app.reloadable import Lasting, Parts
from gateway.app.resources import (
    add_counters,
    estimator_of,
    logs_json,
    memory_of,
    open_catalog,
    open_families,
    open_store,
    tls_contexts,
    webhooks_of,
)
from gateway.config.policies import table_names, uplifts
from gateway.context.planner import PlannerThreads
from gateway.context.tool_results import ToolResultRenderer
from gateway.core.audit import Author
from gateway.core.errors import ConfigError, StoreUnavailable
from gateway.core.ids import call_id
from gateway.core.ledger.arithmetic import Claim
from gateway.core.ledger.session_key import SessionKey
from gateway.core.ports import Observer, Store
from gateway.core.record import CallRecord
from gateway.core.values import dataclass
from gateway.counters.registry import Counters
from gateway.server.app import GatewayApp, OwnApi
from gateway.server.audit import AuditApi
from gateway.server.auth import Access
from gateway.server.context import ContextApi
from gateway.server.dashboard import Dashboard
from gateway.server.endpoints import Forwarder
from gateway.server.events import EventsApi
from gateway.server.health import HealthApi, WorkerHealth
from gateway.server.keyring import KeyRing
from gateway.server.keys import KeysApi
from gateway.server.metrics import MetricsApi
from gateway.server.serving import stop_with_supervisor
from gateway.server.sessions import SessionsApi
from gateway.server.shown import call_json, totals_json
from gateway.server.unrecorded import UnrecordedRefusals
from gateway.server.usage import UsageApi
from gateway.stores.fallback import FallbackStore
from gateway.stores.journal import Journal
from gateway.stores.key_uses import KeyUses
from gateway.stores.learner import Learner
from gateway.stores.leases import Leases
from gateway.stores.running_budget import save_running_budget
from gateway.stores.settler import Settler
from gateway.telemetry import callbacks, log
from gateway.telemetry.alert_outbox import AlertOutbox, Receiver
from gateway.telemetry.budget_alerts import BudgetAlerts, Leadership
from gateway.telemetry.callbacks import CallbackObserver, Shapes
from gateway.telemetry.metrics import Metrics, WorkerState
from gateway.telemetry.otel import Otel
from gateway.telemetry.sinks import CallSink

logger = logging.getLogger("gateway")

_GC_THRESHOLDS = (10_000, 20, 50)
#: Expired data is searched after this share of the time that it is kept, but at least every `_EXPIRE_EVERY_S` seconds.
#: The search takes at most the share `_EXPIRE_WORK` of a worker's time.
_EXPIRE_SHARE = 0.25
_EXPIRE_EVERY_S = 3600.0
_EXPIRE_WORK = 0.05
_STATE_EVERY_S = 2.0
_SEES_ALL = Access(None, admin=True)
#: callbacks receive what /api shows to a caller who may see all sessions
_SHAPES = Shapes(partial(call_json, access=_SEES_ALL), SessionKey.shown, totals_json)

Load = Callable[[], config.Loaded]


def app_from_environment() -> GatewayApp:
    """Return the application of a worker process, with the configuration of its parent (`config.pass_on`)."""
    stop_with_supervisor()
    collect_rarely()
    return build_app(config.load_passed_on)


def collect_rarely() -> None:
    """Configure the garbage collector for a worker.

    A full collection visits every object, and all calls wait for it (20 to 40 ms measured). Imported objects stay
    anyway, and calls hardly ever leave cycles. Nothing is collected before the start either: that would take as long,
    and free less than 1 MB.
    """
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


def build_app(load: Load) -> GatewayApp:
    """Return the application of one worker process. `load` reads the configuration, at start and at each reload."""

    @asynccontextmanager
    async def resources() -> AsyncIterator[Worker]:
        settings = load().settings
        store = open_store(settings)
        try:
            worker = Worker(store, settings, load)
            try:
                await worker.lasting.keys.load()
                await worker.begin_alerts()
                yield worker
            finally:
                await worker.aclose()
        finally:
            await store.aclose()

    return GatewayApp(resources, new_id)


@dataclass(frozen=True, slots=True)
class _Telemetry:
    """The observers of calls that a worker closes when it stops. None: off."""

    callbacks: CallbackObserver
    metrics: Metrics | None
    otel: Otel | None

    def observers(self) -> list[Observer]:
        """Return those that are notified of calls."""
        used: list[Observer | None] = [None if self.callbacks.is_idle else self.callbacks, self.metrics, self.otel]
        return [one for one in used if one is not None]

    async def aclose(self) -> None:
        """Deliver what is still waiting, and close the connections."""
        try:
            await self.callbacks.aclose()
        finally:
            if self.otel is not None:
                await asyncio.to_thread(self.otel.close)


class Worker:
    """One worker process: parts that stay (store, settler, log), and parts that a reload replaces."""

    def __init__(self, store: Store, settings: config.Settings, load: Load) -> None:
        as_json = logs_json(settings)
        number = os.getpid() if settings.server.workers > 1 else None
        log.configure(as_json=as_json, level=settings.telemetry.log.level, worker=number)
        # Steps that can fail on a wrong configuration come before steps that open something.
        own = callbacks.load_observers(settings.callbacks.observers)
        counters = Counters()
        add_counters(counters, settings)
        families = open_families(counters, settings)
        catalog = open_catalog(settings, families)
        # The caches outlive a reload: otherwise all long sessions would be read again at once.
        memory = memory_of(settings)
        estimator = estimator_of(families, counters, memory)
        tls = tls_contexts(settings.providers)
        otel = Otel(__version__) if settings.telemetry.otel else None
        self._load = load
        #: for work that no call waits for
        self._store = store
        journal = settings.store.journal_path
        settler = Settler(
            store, Journal(journal) if journal else None, accepts_without_store=settings.store.on_failure == "open"
        )
        #: for calls: none waits for it while it is unavailable
        fallback = FallbackStore(store, settler.availability)
        leases = Leases(
            fallback,
            self._settle_orphaned,
            lease_s=settings.budget.lease_s,
            availability=fallback.availability,
            note=settler.note,
        )
        learner = Learner(store)
        metrics = Metrics(config.shared_metrics()) if settings.telemetry.metrics else None
        calls = CallbackObserver(own, webhooks_of(settings.callbacks.webhooks, metrics), _SHAPES)
        self._telemetry = _Telemetry(calls, metrics, otel)
        self._alerts = self._alerts_to(calls.alert_receivers(), settings, metrics)
        key_uses = KeyUses(store)
        observers = [learner, key_uses, *_call_log(settings, as_json=as_json), *self._telemetry.observers()]
        unrecorded = UnrecordedRefusals(observers)
        self._key_uses = key_uses
        self._kept_s = settings.kept_s
        self.cors_origins = settings.server.cors_origins
        #: what the parts of each configuration are made with
        self.lasting = Lasting(
            store=fallback,
            settler=settler,
            leases=leases,
            results=ToolResultRenderer(fallback, settings.sessions.results_max_bytes),
            keys=KeyRing(
                store, is_unavailable=lambda: fallback.availability.is_unavailable, away=fallback.availability.report
            ),
            learner=learner,
            counters=counters,
            estimator=estimator,
            memory=memory,
            # The threads outlive a reload: a body that is being read is read to its end.
            threads=PlannerThreads(),
            catalog=catalog,
            observers=[*observers, unrecorded],
            unrecorded=unrecorded,
            new_id=new_id,
        )
        self._parts = Parts(settings, self.lasting, tls)
        self._workers = settings.server.workers
        self._store_url = settings.store.shown_url
        self.api = OwnApi(
            SessionsApi(store, lambda: self._parts.rules, self.reload_all, observers),
            KeysApi(store, lambda: self._parts.rules),
            UsageApi(store, lambda: self._parts.rules),
            AuditApi(store, lambda: self._parts.rules),
            ContextApi(store, lambda: self._parts.rules),
            HealthApi(store, lambda: self._parts.rules, self._health),
            EventsApi(store, lambda: self._parts.rules),
            MetricsApi(lambda: self._parts.rules, metrics, self._state),
            Dashboard(is_on=settings.server.dashboard),
        )
        self._started_at = time.time()
        settler.start()
        leases.start()
        sinks = [CallSink(store, sink.path, _SHAPES.call, sink.keep_s).run() for sink in settings.sinks]
        chores = (self._expire(), self._note_state(), self.lasting.keys.keep_fresh(), *sinks)
        self._chores = {asyncio.create_task(chore) for chore in chores}
        # A server in a thread (tests, the demo) gets no signals.
        with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._reload_on_signal)

    def _alerts_to(
        self, receivers: Sequence[Receiver], settings: config.Settings, metrics: Metrics | None
    ) -> BudgetAlerts | None:
        """Return what sends budget alerts, or None if there is no receiver."""
        if not receivers:
            return None
        dropped = partial(metrics.count_webhook_event, "dropped") if metrics is not None else lambda: None
        return BudgetAlerts(
            self._store,
            self._claims_on,
            settings.callbacks.budget_thresholds,
            leadership=Leadership(self._store, new_id()),
            outbox=AlertOutbox(self._store, receivers, dropped=dropped),
            new_id=new_id,
        )

    async def _claims_on(self, calls: Sequence[CallRecord]) -> list[Claim]:
        """Return the accounts that calls were charged to, with the limits of the current configuration."""
        return await self._parts.claims_on(calls)

    async def begin_alerts(self) -> None:
        """Start to compare budgets with their thresholds, before the first call."""
        if self._alerts is not None:
            await self._alerts.begin()

    @property
    def forwarder(self) -> Forwarder:
        """Return the forwarder of the current configuration."""
        return self._parts.forwarder

    def _health(self) -> WorkerHealth:
        """Return the health of this worker."""
        settings = self._parts.settings
        return WorkerHealth(
            version=__version__,
            pid=os.getpid(),
            workers=self._workers,
            started_at=self._started_at,
            calls=self.forwarder.running,
            holds=self.lasting.leases.count,
            store=self._store_url,
            is_unavailable=self.lasting.settler.availability.is_unavailable,
            waiting=self.lasting.settler.waiting,
            on_failure=settings.store.on_failure,
            default_provider=settings.default_provider,
            providers=self._parts.providers(),
            unrecorded_refusals=self.lasting.unrecorded.newest(),
            identity_provider=self._parts.identity_provider(),
        )

    def _state(self) -> WorkerState:
        """Return the health of this worker as metrics."""
        health = self._health()
        return WorkerState(
            version=health.version,
            started_at=health.started_at,
            calls=health.calls,
            holds=health.holds,
            is_store_unavailable=health.is_unavailable,
            waiting=health.waiting,
            providers={one.name: one.state != "left_alone" for one in health.providers},
            store_errors=self.lasting.settler.availability.failures,
            prices=self.lasting.catalog.table_name,
        )

    async def _settle_orphaned(self, record: CallRecord) -> None:
        """Settle a call whose worker died, under the current configuration."""
        await self._parts.settle_orphaned(record)

    async def _note_state(self) -> None:
        """Update this worker's metrics regularly, because each worker shows the metrics of all."""
        metrics = self._telemetry.metrics
        while metrics is not None and self._workers > 1:
            metrics.update_gauges(self._state())
            await asyncio.sleep(_STATE_EVERY_S)

    async def reload_all(self, author: Author) -> list[str]:
        """Reload every worker: this one, or through the supervisor all of them. It is recorded in the audit log.

        Returns:
            The changed keys that need a restart.

        Raises:
            ConfigError: the configuration is wrong; nothing was changed.
        """
        old = self._parts.settings
        if self._workers == 1:
            needing_restart = self.reload()
            new = self._parts.settings
        else:
            new, needing_restart = self._reread()
            await claim_reload(self._store, old, new)
            os.kill(os.getppid(), signal.SIGHUP)
        await record_reload(self._store, author, old, new)
        return needing_restart

    def _reload_on_signal(self) -> None:
        old = self._parts.settings
        try:
            self.reload()
            self._start_chore(record_signal(self._store, old, self._parts.settings))
        except ConfigError as error:
            logger.error("configuration not reloaded: %s", "; ".join(error.problems))  # noqa: TRY400  # no bug of ours

    def reload(self) -> list[str]:
        """Apply the configuration as it is now. Running calls end under the old one.

        Returns:
            The changed keys that need a restart.

        Raises:
            ConfigError: the configuration is wrong; nothing was changed.
        """
        settings, needing_restart = self._reread()
        add_counters(self.lasting.counters, settings)
        old, self._parts = self._parts, Parts(settings, self.lasting, tls_contexts(settings.providers), self._parts)
        if old.forwarder.is_stopping:
            # The worker is stopping: a reload must not accept calls again.
            self._parts.forwarder.stop_accepting()
        self.lasting.catalog.configure(table_names(settings), uplifts(settings))
        self._kept_s = settings.kept_s
        self.lasting.leases.lease_s = settings.budget.lease_s
        self.lasting.results.max_bytes = settings.sessions.results_max_bytes
        logger.info("configuration reloaded")
        if needing_restart:
            logger.warning("needs a restart: %s", ", ".join(needing_restart))
        for work in (old.retire(), self._note_budget()):
            self._start_chore(work)
        return needing_restart

    def _start_chore(self, work: Coroutine[Any, Any, None]) -> None:
        """Start work that no caller waits for. `aclose` cancels it."""
        chore = asyncio.create_task(work)
        self._chores.add(chore)
        chore.add_done_callback(self._chores.discard)

    async def _note_budget(self) -> None:
        """Store the current budget for commands in other terminals. If that fails, `_expire` does it later."""
        with contextlib.suppress(StoreUnavailable):
            await save_running_budget(self._store, self._parts.rules.budget)

    def _reread(self) -> tuple[config.Settings, list[str]]:
        """Return the settings that a reload applies, and the changed keys that need a restart.

        Raises:
            ConfigError: the configuration is wrong.
        """
        read = self._load().settings
        settings, needing_restart = config.reloaded(self._parts.settings, read)
        # Neither the current address nor the one after a restart may be open to everyone.
        for one in (settings, read):
            config.check_exposure(one)
        return settings, needing_restart

    async def _expire(self) -> None:
        while True:
            began = time.monotonic()
            try:
                await save_running_budget(self._store, self._parts.rules.budget)
                await self._store.expire(time.time() - self._kept_s)
            except StoreUnavailable:
                pass  # expired data is still there the next time
            except Exception:
                logger.exception("expiring old sessions failed; it will be tried again")
            took = time.monotonic() - began
            await asyncio.sleep(max(min(_EXPIRE_SHARE * self._kept_s, _EXPIRE_EVERY_S), took / _EXPIRE_WORK))

    async def aclose(self) -> None:
        """End all calls, settle them, and close connections."""
        for chore in self._chores:
            chore.cancel()
        await asyncio.gather(*self._chores, return_exceptions=True)
        # They are closed from the last to the first, and each one even if another fails.
        async with AsyncExitStack() as closing:
            closing.push_async_callback(self.lasting.learner.aclose)
            closing.push_async_callback(self._key_uses.aclose)
            closing.push_async_callback(self.lasting.settler.aclose)
            closing.push_async_callback(self.lasting.leases.aclose)
            closing.push_async_callback(self._telemetry.aclose)
            if self._alerts is not None:
                closing.push_async_callback(self._alerts.aclose)
            closing.callback(self.lasting.threads.close)
            closing.push_async_callback(self._parts.aclose)
            closing.push_async_callback(self.api.events.aclose)


def _call_log(settings: config.Settings, *, as_json: bool) -> list[Observer]:
    if settings.telemetry.log.level == "error":
        return []
    return [log.CallLog(sys.stderr, as_json=as_json, failures_only=settings.telemetry.log.level == "warning")]


def new_id() -> str:
    """Return a new call id: Unix time and 80 random bits. It is unique, but not secret."""
    return call_id(time.time_ns() // 1_000_000, random.randbytes(10))  # noqa: S311
