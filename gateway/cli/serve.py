"""`gateway serve`: run the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.cli.address import network_url_of, url_of
from gateway.cli.common import ConfigFile, Exit, config_problems, load, quoted, stop
from gateway.cli.numbers import count, dollars

if TYPE_CHECKING:
    from gateway.config import Loaded, Settings

#: prices at the built-in provider, which accepts every model name, for models without a configured price
_MOCK_PRICES = {"price": {"input": 0.15, "output": 0.60, "cache_read": 0.075}}
#: providers that the banner shows even if they are not configured, because most users look for them
_ALWAYS_SHOWN = ("openai", "anthropic")


def serve(  # noqa: PLR0917  # typer makes an option of each
    config: ConfigFile = None,
    host: Annotated[str | None, typer.Option(metavar="HOST", help="Address to listen on (server.host).")] = None,
    port: Annotated[
        int | None, typer.Option(metavar="N", help="Port to listen on (server.port); 0: a free one.")
    ] = None,
    upstream: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Send every model to this OpenAI-compatible provider instead of the configured ones. Prices and other "
            "settings under models: still apply. Its key is read from GATEWAY_PROVIDERS_UPSTREAM_KEY.",
        ),
    ] = None,
    mock: Annotated[
        bool,
        typer.Option(
            "--mock",
            help="Use the built-in provider for every model, to try a configuration without a key. It has its own "
            "store, which other commands read with --store mock.",
        ),
    ] = False,
    store: Annotated[str | None, typer.Option(metavar="URL", help="URL of the store for sessions (store.url).")] = None,
    context: Annotated[
        int | None, typer.Option(metavar="N", parser=count(1), help="Most input tokens of a call (context.budget).")
    ] = None,
    budget: Annotated[
        int | None, typer.Option(metavar="N", parser=count(0), help="Budget of each session in tokens (budget.tokens).")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(metavar="N", help="Number of worker processes (server.workers).")
    ] = None,
) -> None:
    """Run the gateway."""
    if mock and upstream:
        stop("--mock and --upstream both replace all providers. Use one of them.", Exit.USAGE)
    flags: dict[str, object] = {
        dotted: value
        for dotted, value in (
            ("server.host", host),
            ("server.port", port),
            ("server.workers", workers),
            ("store.url", store),
            ("context.budget", context),
            ("budget.tokens", budget),
        )
        if value is not None
    }
    with contextlib.ExitStack() as stack:
        if mock:
            from gateway.mock import CLAUDE_RULES, MODEL_WINDOWS, STRICT_MODELS, MockProvider, MockServer

            provider = MockProvider(windows=MODEL_WINDOWS, claude=CLAUDE_RULES, strict=STRICT_MODELS)
            server = stack.enter_context(MockServer(provider))
            flags |= only_provider("mock", server.url, _MOCK_PRICES, auth="none")
            if store is None:
                # The usage and settings of a trial must not appear among real sessions.
                flags["store.url"] = load(config, flags).settings.store.mock_url
        elif upstream is not None:
            flags |= only_provider("upstream", upstream)
        _run(load(config, flags), config, flags)


def only_provider(
    name: str, url: str, facts: Mapping[str, object] | None = None, **settings: object
) -> dict[str, object]:
    """Return flags that send every model to one provider. `facts`: limits and prices that are not configured."""
    return {"only_provider": {"name": name, "block": {"base_url": url, **settings}, "facts": facts or {}}}


def _run(loaded: Loaded, file: Path | None, flags: dict[str, object]) -> None:
    from gateway import config
    from gateway.app.resources import logs_json
    from gateway.counters.registry import Counters
    from gateway.server import serving
    from gateway.telemetry import log

    settings = loaded.settings
    with config_problems():
        config.check_exposure(settings)
        config.families(settings.context.families)
    config.pass_on(file, flags)
    log.configure(as_json=logs_json(settings), level=settings.telemetry.log.level)
    notes = [*loaded.notes, *Counters().notes()]
    if notes:
        logging.getLogger("gateway").warning("%s", "; ".join(notes))
    server = settings.server
    try:
        listener = serving.bind(server.host, server.port, write_timeout_s=server.write_timeout_s)
    except (OSError, UnicodeError) as error:
        stop(f"Cannot listen on {quoted(server.host)} port {server.port}: {_bind_problem(error)}.", Exit.FAILED)
    options = serving.make_config(
        "gateway.app.worker:app_from_environment",
        factory=True,
        workers=server.workers,
        max_head_bytes=int(server.max_header_kb * 1024),
        max_body=int(server.max_body_mb * 2**20),
        head_timeout_s=server.header_timeout_s,
        grace_s=server.shutdown_grace_s,
    )
    if server.workers > 1:
        _open_store_once(settings)
    port = listener.getsockname()[1]
    with _shared_metrics(settings):
        is_done = serving.run(options, listener, lambda: _print_stderr(banner(loaded, port)))
    if not is_done:
        raise typer.Exit(Exit.FAILED)


def _bind_problem(error: OSError | UnicodeError) -> str:
    """Return why the address cannot be bound, and what to do. Python's own text would repeat the address."""
    number = error.errno if isinstance(error, OSError) else None
    if not number or number < 0:  # the name was not resolved, so nothing was bound
        return "it is neither an address nor a known host name. Choose another with --host"
    option = "--host" if number == errno.EADDRNOTAVAIL else "--port"
    return f"{os.strerror(number)}. Choose another with {option}"


@contextlib.contextmanager
def _shared_metrics(settings: Settings) -> Iterator[None]:
    """Provide a folder in which several workers share their metrics."""
    from gateway import config
    from gateway.telemetry.metrics.folders import shared_folder

    if settings.server.workers == 1 or not settings.telemetry.metrics:
        config.share_metrics(None)
        yield
        return
    with shared_folder() as folder:
        config.share_metrics(folder)
        yield


def _open_store_once(settings: Settings) -> None:
    """Open the store once before the workers start.

    A problem is then reported once, and one process upgrades an old file.
    """
    from gateway.app.resources import open_store
    from gateway.core.errors import StoreUnavailable

    async def attempt() -> None:
        await open_store(settings).aclose()

    try:
        asyncio.run(attempt())
    except StoreUnavailable as fault:
        stop(f"store.url: {fault.message}", Exit.FAILED)


def _print_stderr(text: str) -> None:
    """Print to stderr. An error is ignored: a full disk must not stop the gateway."""
    with contextlib.suppress(OSError):
        typer.echo(text, err=True)


def banner(loaded: Loaded, port: int) -> str:
    """Return the text that `serve` prints when it accepts calls."""
    from gateway import __version__

    settings = loaded.settings
    url = url_of(settings.server.host, port)
    lines = [f"gateway {__version__} · {url}"]
    network = network_url_of(settings.server.host, port)
    if network is not None:
        lines.append(f"  network   {network}")
    shown_providers = _shown_providers(loaded)
    name_width = max((len(name) for name, _, _ in shown_providers), default=0)
    addresses = [_address(name, row) for name, row, _ in shown_providers]
    address_width = max(map(len, addresses), default=0)
    lines += [
        f"  provider  {name:<{name_width}}  {address:<{address_width}}  key: {key}"
        for (name, _, key), address in zip(shown_providers, addresses, strict=True)
    ]
    origin = str(loaded.file) if loaded.file else "built-in defaults"
    lines += [f"  store     {_store(settings)}", f"  budget    {_budget(settings)}", f"  config    {origin}"]
    if settings.auth.keys:
        lines.append(f"  clients   {', '.join(key.name for key in settings.auth.keys)}")
    if settings.auth.jwt is not None:
        lines.append(f"  tokens    {settings.auth.jwt.issuer}")
    lines.append(f"  try       export OPENAI_BASE_URL={url}/v1")
    lines.append(f"            export ANTHROPIC_BASE_URL={url}")
    if settings.server.dashboard:
        lines.append(f"  dashboard {url}/ui")
    return "\n".join(lines)


def _shown_providers(loaded: Loaded) -> list[tuple[str, Any, str]]:
    settings = loaded.settings
    routed = {name for rule in settings.models for name in rule.providers} | {settings.default_provider}
    if settings.built_in_providers:
        routed |= set(_ALWAYS_SHOWN)
    shown = []
    for name, row in settings.providers.items():
        key_source = loaded.key_sources.get(name) if row.key.get_secret_value() else None
        if name in routed or (key_source and settings.built_in_providers):
            fallback = "none needed" if row.auth == "none" else "caller's own"
            shown.append((name, row, key_source or fallback))
    return shown


def _address(name: str, row: Any) -> str:
    return f"litellm: {row.litellm or name} {row.base_url}".rstrip() if row.adapter == "litellm" else row.base_url


def _budget(settings: Settings) -> str:
    row = settings.budget
    limits = [f"{row.tokens:,} tokens"] if row.tokens is not None else []
    limits += [dollars(row.usd)] if row.usd is not None else []
    limits += [f"{row.calls:,} calls"] if row.calls is not None else []
    text = " or ".join(limits) + (f" per {row.window}" if row.window else "")
    return f"{text} for each session" if limits else "none"


def _store(settings: Settings) -> str:
    if settings.store.is_memory:
        return "memory (lost when the process ends)"
    path = settings.store.sqlite_path
    return f"sqlite {path}" if path else settings.store.shown_url
