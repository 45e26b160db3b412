"""`gateway env`: print the settings that connect a client to the gateway."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Annotated, Final
from urllib.parse import urlsplit

import typer

from gateway.cli import client_limits
from gateway.cli.address import url_of
from gateway.cli.client_limits import ClientLimits
from gateway.cli.common import AsJson, ConfigFile, Exit, config_problems, load, print_json, quoted, stop

#: characters of a base URL that are safe in shells, TOML, JSON and Python, and allow a path to be appended
_URL: Final = re.compile(r"https?://[A-Za-z0-9\[][A-Za-z0-9._~:/\[\]@!$&'()*+,;=%-]*")
_SHELL: Final = "a shell"


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """The settings of one client.

    Attributes:
        text: settings to print; `$v1` and `$root` are the base URL with and without `/v1`, and with the session path.
            `$limits` is what `limits` returns.
        where: where to write or enter the text; None for shell variables.
        note: further advice for the user.
        names_sessions: the client names its sessions itself, so the path must not name one.
        limits: returns the client's settings for the window of a model; None if it has none.
    """

    text: str
    where: str | None = None
    note: str = ""
    names_sessions: bool = False
    limits: Callable[[ClientLimits], str] | None = None


_PYTHON_HEADER: Final = "default_headers={'x-session-id': ...} names a session for each conversation"
CLIENTS: Final[dict[str, ClientSettings]] = {
    "openai": ClientSettings("export OPENAI_BASE_URL=$v1", note=_PYTHON_HEADER),
    "anthropic": ClientSettings("export ANTHROPIC_BASE_URL=$root", note=_PYTHON_HEADER),
    "claude-code": ClientSettings(
        "export ANTHROPIC_BASE_URL=$root$limits", names_sessions=True, limits=client_limits.claude_code
    ),
    "codex": ClientSettings(
        'model_provider = "gateway"$limits\n\n[model_providers.gateway]\nname = "gateway"\nbase_url = "$v1"\n'
        'wire_api = "responses"\nenv_key = "OPENAI_API_KEY"',
        where="~/.codex/config.toml",
        names_sessions=True,
        limits=client_limits.codex,
    ),
    "opencode": ClientSettings(
        '{\n  "provider": {\n    "gateway": {\n      "npm": "@ai-sdk/openai-compatible",\n'
        '      "options": { "baseURL": "$v1", "apiKey": "{env:OPENAI_API_KEY}" },\n'
        '      "models": { $limits }\n    }\n  }\n}',
        where="opencode.json",
        note="list your models under models",
        names_sessions=True,
        limits=client_limits.opencode,
    ),
    "aider": ClientSettings(
        "export OPENAI_API_BASE=$v1",
        note="aider --model openai/gpt-5.1; it sends no session id, so name one in the path: --session",
    ),
    "langchain": ClientSettings(
        'ChatOpenAI(base_url="$v1", default_headers={"x-session-id": "..."}, include_response_headers=True)',
        where="your program",
    ),
    "litellm": ClientSettings(
        'litellm.completion(api_base="$v1", extra_headers={"x-session-id": "..."}, ...)', where="your program"
    ),
    "vercel-ai": ClientSettings(
        'createOpenAICompatible({ name: "gateway", baseURL: "$v1", headers: { "x-session-id": "..." } })',
        where="your program",
    ),
    "jupyter": ClientSettings(
        "from uuid import uuid4\n\nfrom openai import OpenAI\n\n"
        'client = OpenAI(base_url="$v1", default_headers={"x-session-id": f"nb-{uuid4().hex}"})',
        where="the notebook's first cell",
        note="each start of the kernel is a session",
    ),
    "cursor": ClientSettings(
        "Override OpenAI Base URL: $v1\nOpenAI API Key: a client key of the gateway",
        where="Cursor Settings, Models",
        note="Cursor's servers make the calls, so --url must be a public address, with auth.keys set; it sends no "
        "session id, so name one in the path: --session",
    ),
    "open-webui": ClientSettings(
        "URL: $v1\nKey: a client key of the gateway, or the provider's key",
        where="Admin Panel, Settings, Connections, OpenAI API",
        note="with ENABLE_FORWARD_USER_INFO_HEADERS=true in its environment each chat is a session; in a container, "
        "set --url http://HOST:PORT to the gateway's address as seen from there",
    ),
    "librechat": ClientSettings(
        'endpoints:\n  custom:\n    - name: "gateway"\n      apiKey: "user_provided"\n      baseURL: "$v1"\n'
        '      headers:\n        x-session-id: "{{LIBRECHAT_BODY_CONVERSATIONID}}"\n'
        '      models:\n        default: ["gpt-5.1"]',
        where="librechat.yaml",
        note="list your models under models; each conversation is a session",
    ),
    "continue": ClientSettings("apiBase: $v1\nrequestOptions:\n  headers:\n    x-session-id: ...", where="config.yaml"),
    "curl": ClientSettings(
        "curl $v1/chat/completions -H 'content-type: application/json' -d @request.json", where=_SHELL
    ),
}


def env(  # noqa: PLR0917  # typer calls it by name
    client: Annotated[
        str,
        typer.Argument(metavar="CLIENT", help=f"One of {', '.join(CLIENTS)}.", autocompletion=lambda: list(CLIENTS)),
    ],
    session: Annotated[
        str | None, typer.Option("--session", metavar="ID", help="Name a session in the path of the base URL.")
    ] = None,
    url: Annotated[
        str | None,
        typer.Option("--url", metavar="URL", help="URL of the gateway, if clients reach it at another address."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="NAME", help="Set this model and its limits (Claude Code, Codex and opencode)."
        ),
    ] = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Print the environment variables that make a client use the gateway: eval "$(gateway env claude-code)"."""
    known = CLIENTS.get(client)
    if known is None:
        from gateway.config.complaints import did_you_mean

        alike = did_you_mean(client, CLIENTS)
        stop(f"Unknown client {quoted(client)}{alike}. Known clients: {', '.join(CLIENTS)}.", Exit.USAGE)
    session_path = _session_path(client, known, session)
    if model is not None and known.limits is None:
        stop(f"gateway env sets no model for {client}; omit --model.", Exit.USAGE)
    limits = known.limits(_limits(config, model)) if known.limits is not None else ""
    root = (_configured_url(config) if url is None else _checked_url(url)).rstrip("/").removesuffix(
        "/v1"
    ) + session_path
    written = shlex.quote if known.where in (None, _SHELL) else str
    text = Template(known.text).substitute(root=written(root), v1=written(f"{root}/v1"), limits=limits)
    if as_json:
        base_url = root if "$root" in known.text else f"{root}/v1"
        print_json({"client": client, "base_url": base_url, "where": known.where, "text": text, "note": known.note})
        return
    typer.echo(text)
    advice = "; ".join(part for part in (f"in {known.where}" if known.where else "", known.note) if part)
    if advice:
        typer.echo(f"# {advice}", err=True)


def _session_path(client: str, known: ClientSettings, session: str | None) -> str:
    """Return the path that names the session, or an empty text."""
    from gateway.core.identity import ID_FORM, is_valid

    if session is None:
        return ""
    if known.names_sessions:
        stop(f"{client} names its sessions itself; omit --session.", Exit.USAGE)
    if not is_valid(session):
        stop(f"--session {quoted(session)}: a session id is {ID_FORM}.", Exit.USAGE)
    return f"/s/{session}"


def _limits(config: Path | None, model: str | None) -> ClientLimits:
    """Return what the gateway allows of a model; without a model, what it allows of any."""
    from gateway.app.resources import open_catalog, open_families
    from gateway.config.policies import context_policy, routes_of
    from gateway.core.context_budget import smallest_limit, usable_window
    from gateway.core.errors import UnknownModel
    from gateway.core.routing import ModelFacts
    from gateway.counters.registry import Counters

    settings = load(config).settings
    facts = ModelFacts()
    with config_problems():
        if model is not None:
            counters = Counters()
            catalog = open_catalog(settings, open_families(counters, settings))
            try:
                facts = catalog.facts(routes_of(settings).resolve(model))
            except UnknownModel as fault:
                stop(fault.message, Exit.USAGE)
        policy = context_policy(settings, lambda _: ModelFacts())
    # Clients compact when their input is nearly as long as the window.
    window = smallest_limit(usable_window(policy, facts), facts.input)
    if model is not None and window is None:
        advice = "Set its window in gateway.yaml under models."
        typer.echo(f"# The context window of {quoted(model)} is unknown. {advice}", err=True)
    return ClientLimits(model, window, facts.output)


def _checked_url(url: str) -> str:
    """Return the URL of `--url`, or end the command if it is not valid."""
    try:
        is_valid_url = _URL.fullmatch(url) is not None and urlsplit(url).port != 0
    except ValueError:  # a port above 65535, or an unclosed bracket
        is_valid_url = False
    if not is_valid_url:
        stop(f"--url {quoted(url)} is not a URL such as https://gateway.example:8484.", Exit.USAGE)
    return url


def _configured_url(config: Path | None) -> str:
    server = load(config).settings.server
    if server.port == 0:
        stop("server.port is 0, which is a different port at each start. Name it: --url http://HOST:PORT", Exit.USAGE)
    return url_of(server.host, server.port)
