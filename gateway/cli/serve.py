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

#: the built-in provider takes any model name, at the price of a small model where none is configured
_MOCK_FACTS = {"price": {"input": 0.15, "output": 0.60, "cache_read": 0.075}}
#: shown although not configured: what most people look for
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
            help="One OpenAI-compatible provider, for every model, in place of all that are configured; what models: "
            "says else of a model stays. Its name is upstream: GATEWAY_PROVIDERS_UPSTREAM_KEY gives it a key.",
        ),
    ] = None,
    mock: Annotated[
        bool,
        typer.Option(
            "--mock",
            help="The built-in provider in the same way: to try a configuration without a key. Its sessions are kept "
            "in a store of their own, which other commands find with --store mock.",
        ),
    ] = False,
    store: Annotated[str | None, typer.Option(metavar="URL", help="Where sessions are kept (store.url).")] = None,
    context: Annotated[
        int | None, typer.Option(metavar="N", parser=count(1), help="Input tokens of a call (context.budget).")
    ] = None,
    budget: Annotated[
        int | None, typer.Option(metavar="N", parser=count(0), help="Tokens of a session (budget.tokens).")
    ] = None,
    workers: Annotated[int | None, typer.Option(metavar="N", help="Processes (server.workers).")] = None,
) -> None:
    """Run the gateway."""
    if mock and upstream:
        stop("--mock and --upstream name two providers for every model; give one of them.", Exit.USAGE)
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
            flags |= only_provider("mock", server.url, _MOCK_FACTS, auth="none")
            if store is None:
                # What a trial spends and sets must not count among real sessions.
                flags["store.url"] = load(config, flags).settings.store.mock_url
        elif upstream is not None:
            flags |= only_provider("upstream", upstream)
        _run(load(config, flags), config, flags)


def only_provider(
    name: str, url: str, facts: Mapping[str, object] | None = None, **settings: object
) -> dict[str, object]:
    """Flags that send every model to one provider. `facts`: of models of which the configuration does not say them."""
    return {"only_provider": {"name": name, "block": {"base_url": url, **settings}, "facts": facts or {}}}


def _run(loaded: Loaded, file: Path | None, flags: dict[str, object]) -> None:
    from gateway import config
    from gateway.app.resources import logs_json
    from gateway.counters.registry import Counters
    from gateway.server import serving
    from gateway.telemetry import log

    settings = loaded.settings
    with config_problems():
        config.refuse_open_door(settings)
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
        stop(f"Cannot listen on {quoted(server.host)} port {server.port}: {_unbound(error)}.", Exit.FAILED)
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
        _try_store(settings)
    port = listener.getsockname()[1]
    with _shared_metrics(settings):
        is_done = serving.run(options, listener, lambda: _say(banner(loaded, port)))
    if not is_done:
        raise typer.Exit(Exit.FAILED)


def _unbound(error: OSError | UnicodeError) -> str:
    """Why nothing can be bound there, and what helps. Python repeats the address in words of its own."""
    number = error.errno if isinstance(error, OSError) else None
    if not number or number < 0:  # it never came to binding: nobody knows such a name
        return "that is no address, and no name of one. Choose another with --host"
    option = "--host" if number == errno.EADDRNOTAVAIL else "--port"
    return f"{os.strerror(number)}. Choose another with {option}"


@contextlib.contextmanager
def _shared_metrics(settings: Settings) -> Iterator[None]:
    """A folder in which several workers keep their figures for each other."""
    from gateway import config
    from gateway.telemetry.metrics.folders import shared_folder

    if settings.server.workers == 1 or not settings.telemetry.metrics:
        config.share_metrics(None)
        yield
        return
    with shared_folder() as folder:
        config.share_metrics(folder)
        yield


def _try_store(settings: Settings) -> None:
    """Open the store once before workers are started: what is wrong is said once, an old file is upgraded by one."""
    from gateway.app.resources import open_store
    from gateway.core.errors import StoreUnavailable

    async def attempt() -> None:
        await open_store(settings).aclose()

    try:
        asyncio.run(attempt())
    except StoreUnavailable as fault:
        stop(f"store.url: {fault.message}", Exit.FAILED)


def _say(text: str) -> None:
    """On stderr. Calls are taken also where that goes to a full disk."""
    with contextlib.suppress(OSError):
        typer.echo(text, err=True)


def banner(loaded: Loaded, port: int) -> str:
    """What `serve` says when it takes calls."""
    from gateway import __version__

    settings = loaded.settings
    url = url_of(settings.server.host, port)
    lines = [f"gateway {__version__} · {url}"]
    network = network_url_of(settings.server.host, port)
    if network is not None:
        lines.append(f"  network   {network}")
    shown_providers = _shown_providers(loaded)
    names = max((len(name) for name, _, _ in shown_providers), default=0)
    places = [_place(name, row) for name, row, _ in shown_providers]
    urls = max(map(len, places), default=0)
    lines += [
        f"  provider  {name:<{names}}  {place:<{urls}}  key: {key}"
        for (name, _, key), place in zip(shown_providers, places, strict=True)
    ]
    origin = str(loaded.file) if loaded.file else "built-in defaults"
    lines += [f"  store     {_store(settings)}", f"  budget    {_budget(settings)}", f"  config    {origin}"]
    if settings.auth.keys:
        lines.append(f"  clients   {', '.join(key.name for key in settings.auth.keys)}")
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
        held = loaded.key_sources.get(name) if row.key.get_secret_value() else None
        if name in routed or (held and settings.built_in_providers):
            fallback = "none needed" if row.auth == "none" else "caller's own"
            shown.append((name, row, held or fallback))
    return shown


def _place(name: str, row: Any) -> str:
    return f"litellm: {row.litellm or name} {row.base_url}".rstrip() if row.adapter == "litellm" else row.base_url


def _budget(settings: Settings) -> str:
    row = settings.budget
    limits = [f"{row.tokens:,} tokens"] if row.tokens is not None else []
    limits += [dollars(row.usd)] if row.usd is not None else []
    limits += [f"{row.calls:,} calls"] if row.calls is not None else []
    said = " or ".join(limits) + (f" per {row.window}" if row.window else "")
    return f"{said}, for each session" if limits else "none"


def _store(settings: Settings) -> str:
    if settings.store.is_redis:
        return settings.store.shown_url
    path = settings.store.sqlite_path
    return f"sqlite {path}" if path else "memory (gone with the process)"
