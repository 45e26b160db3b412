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
    """(line, whether it is a problem) for the store, its journal, and the providers that can be asked."""
    yield from asyncio.run(_probe(settings))


async def _probe(settings: Settings) -> list[tuple[str, bool]]:
    answers = [_ask(provider_of(name, settings.providers[name]), settings) for name in _asked(settings)]
    store = await _open(settings)
    journal = [] if store[1] else [*_journal(settings)]  # which may be beside the store, and fail for its reason
    return [store, *journal, *await asyncio.gather(*answers)]


def _asked(settings: Settings) -> list[str]:
    """The providers whose key is held, the default one, and of those that take no key the ones that are spoken for.

    Those that are built in for this machine are not, unless the configuration names them: most run nowhere.
    """
    named = named_providers(settings)
    return [
        name
        for name, row in settings.providers.items()
        if row.key.get_secret_value() or name == settings.default_provider or (row.auth == "none" and name in named)
    ]


async def _open(settings: Settings) -> tuple[str, bool]:
    try:
        store = open_store(settings)
        try:
            await store.ping()
        finally:
            await store.aclose()
    except StoreUnavailable as fault:
        return f"store.url: {fault.message}", True
    return f"store.url: {settings.store.shown_url} can be written", False


def _journal(settings: Settings) -> Iterator[tuple[str, bool]]:
    """What speaks against the journal."""
    folder = settings.store.journal_path
    obstacle = Journal(folder).obstacle() if folder is not None else None
    if obstacle is not None:
        yield f"store.journal: {obstacle}", True


async def _ask(provider: ProviderAddress, settings: Settings) -> tuple[str, bool]:
    path = f"providers.{provider.name}"
    if settings.providers[provider.name].adapter == "litellm":
        return f"{path}: not asked; models cannot be listed through litellm", False
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
        held = bool(provider.key)
        reason = "refuses its key" if held else "is reached; it wants a key, which callers bring"
        return f"{path}.key: {url} {reason} ({status})", held
    return f"{path}: {url} answered {status}", status >= 500  # noqa: PLR2004


async def _status(upstream: Upstream, provider: ProviderAddress) -> int:
    headers = request_headers([], provider, client_key_headers=frozenset(), decompressed=False)
    async with upstream.send(Outgoing("GET", provider.url("models", ""), headers, b"")) as answer:
        return answer.status
