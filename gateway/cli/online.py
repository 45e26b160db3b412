"""Check providers, the store and the journal for `gateway check --online`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from gateway.app.resources import open_store, upstream_of
from gateway.config import Settings, named_providers
from gateway.config.policies import provider_of
from gateway.core.errors import ConfigError, GatewayError, StoreUnavailable
from gateway.core.http.headers import ProviderAddress, request_headers
from gateway.core.http.request import Outgoing
from gateway.core.ports import Upstream
from gateway.stores.journal import Journal


def probe(settings: Settings) -> Iterator[tuple[str, bool]]:
    """Yield (line, is_problem) for the store, its journal, and the providers that can be asked."""
    yield from asyncio.run(_probe(settings))


async def _probe(settings: Settings) -> list[tuple[str, bool]]:
    checks = [
        _check_provider(provider_of(name, settings.providers[name]), settings) for name in _providers_to_ask(settings)
    ]
    store = await _check_store(settings)
    # The journal may be next to the store, and then fails for the same reason.
    journal = [] if store[1] else [*_journal_problems(settings)]
    return [store, *journal, *await asyncio.gather(*checks)]


def _providers_to_ask(settings: Settings) -> list[str]:
    """Return the names of the providers to ask.

    - providers for which the gateway has a key
    - the default provider
    - providers without authentication that the configuration names: the others are built in for this machine, and most
      of them do not run
    """
    named = named_providers(settings)
    return [
        name
        for name, row in settings.providers.items()
        if row.key.get_secret_value() or name == settings.default_provider or (row.auth == "none" and name in named)
    ]


async def _check_store(settings: Settings) -> tuple[str, bool]:
    try:
        store = open_store(settings)
        try:
            await store.ping()
        finally:
            await store.aclose()
    except StoreUnavailable as fault:
        return f"store.url: {fault.message}", True
    return f"store.url: {settings.store.shown_url} is writable", False


def _journal_problems(settings: Settings) -> Iterator[tuple[str, bool]]:
    """Yield the problem of the journal, if it has one."""
    folder = settings.store.journal_path
    obstacle = Journal(folder).write_warning() if folder is not None else None
    if obstacle is not None:
        yield f"store.journal: {obstacle}", True


async def _check_provider(provider: ProviderAddress, settings: Settings) -> tuple[str, bool]:
    path = f"providers.{provider.name}"
    if settings.providers[provider.name].adapter == "litellm":
        return f"{path}: not asked, because litellm cannot list models", False
    try:
        upstream = upstream_of(provider.name, settings.providers[provider.name])
    except ConfigError as error:
        return error.problems[0], True
    try:
        status = await _status(upstream, provider)
    except GatewayError as fault:
        return f"{path}: {fault.message}", True
    finally:
        await upstream.aclose()
    url = provider.url("models", "")
    if status in (401, 403):
        has_key = bool(provider.key)
        reason = "refuses the key" if has_key else "can be reached and requires a key, which callers must send"
        return f"{path}.key: {url} {reason} ({status})", has_key
    return f"{path}: {url} answered {status}", status >= 500  # noqa: PLR2004


async def _status(upstream: Upstream, provider: ProviderAddress) -> int:
    headers = request_headers([], provider, client_key_headers=frozenset(), decompressed=False)
    async with upstream.send(Outgoing("GET", provider.url("models", ""), headers, b"")) as answer:
        return answer.status
