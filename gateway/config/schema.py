"""Define the settings in gateway.yaml: types, defaults, descriptions and checks of single keys."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal

from pydantic import Field, field_validator

from gateway.config.access import Auth, Budget
from gateway.config.callbacks import Callbacks
from gateway.config.history import AuditSettings, CallSettings, UsageSettings
from gateway.config.models import Model
from gateway.config.providers import Provider
from gateway.config.runaway import Runaway
from gateway.config.section import HEADER_NAME, LARGEST, MOST_TOKENS, Duration, Positive, Section, duration
from gateway.config.sinks import Sink
from gateway.config.steps import AgentFile, AgentSteps, StepRow, check_steps
from gateway.config.store import StoreSettings
from gateway.core.http.addresses import is_host
from gateway.core.http.gateway_headers import GATEWAY_HEADERS, REQUEST_ID, SESSION
from gateway.core.http.headers import is_credential
from gateway.core.identity import ID_FORM, is_valid
from gateway.core.ledger.windows import time_zone
from gateway.core.providers import PROVIDERS
from gateway.core.retention import Retention
from gateway.core.steps import DEFAULT_AGENT

#: headers of the gateway that may name a session
_MAY_NAME_SESSIONS: Final = frozenset({SESSION, REQUEST_ID})


class Server(Section):
    """The address that the gateway listens on, and limits of requests."""

    host: str = Field("127.0.0.1", description='Address or host name to listen on; ::1 or "[::1]" for IPv6.')
    port: int = Field(8484, ge=0, le=65535, description="Port to listen on; 0: any free port.")
    workers: int = Field(
        1, ge=1, le=256, description="Number of processes. More than one needs a shared store, so not memory://."
    )
    max_body_mb: Positive = Field(64, description="Largest request body in MiB, also after decompression.")
    max_concurrency: int = Field(1024, ge=1, description="Most running calls in one worker. More are refused with 503.")
    max_header_kb: Positive = Field(
        64, description="Largest headers, or trailers, of a request in KiB. Larger ones are refused with 431."
    )
    header_timeout_s: Positive = Field(20, description="Longest time in seconds to receive the headers of a request.")
    body_timeout_s: Positive = Field(
        30,
        description="Longest pause in seconds while a request body arrives. The whole body may take four times this, "
        "plus one second per 512 bytes.",
    )
    write_timeout_s: Positive = Field(
        60, description="Longest time in seconds that a client may read nothing of a response."
    )
    cors_origins: tuple[str, ...] = Field(
        (),
        description="Origins of web pages that may call, in full, such as https://app.example. They can read the "
        "response headers of the gateway, OpenAI and Anthropic.",
    )
    shutdown_grace_s: float = Field(
        30, ge=0, le=LARGEST, description="Seconds that running calls get to finish when the gateway stops."
    )
    dashboard: bool = Field(
        default=True, description="Serve a dashboard of sessions and calls at /ui. Callers only see what they may see."
    )

    @field_validator("host")
    @classmethod
    def _host(cls, value: str) -> str:
        host = value.removeprefix("[").removesuffix("]")  # as written in a URL
        if not host:
            raise ValueError("is empty; write 127.0.0.1, or 0.0.0.0 to listen on every address")
        if not is_host(host):
            raise ValueError("is neither an address nor a host name; write one like 127.0.0.1, ::1 or a.example")
        return host

    @field_validator("cors_origins")
    @classmethod
    def _origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(_origin(origin.lower()) for origin in value)


def _origin(value: str) -> str:
    if "*" in value:
        raise ValueError("an origin cannot be a pattern; list each one in full, like https://app.example")
    if not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#\s]+", value):
        raise ValueError("an origin must be a scheme and a host, like https://app.example")
    return value


class SessionSettings(Section):
    """How calls are grouped into sessions."""

    id_headers: tuple[str, ...] = Field(
        (SESSION.decode(),), description="Request headers that name the session. They precede the built-in list."
    )
    on_missing: Literal["derive", "require", "none"] = Field(
        "derive",
        description="A call without a session id. derive: make an id from the conversation; require: refuse the call "
        "with 400; none: keep no session.",
    )
    ttl: Duration = Field(
        "30d",
        description="A session is deleted this long after its last call, such as 15m, 12h or 30d. The least is twice "
        "budget.lease_s.",
    )
    results_max_mb: float = Field(
        64,
        ge=0,
        le=2**20,
        description="Most MiB of full tool results, and of conversations that the gateway compacted, kept for a "
        "session. Results beyond it are at most reduced to tables. 0: keep none.",
    )
    on_disconnect: Literal["drain", "cancel"] = Field(
        "drain",
        description="The client disconnects during a response. drain: read the response to its end for exact usage, "
        "at most drain_s; cancel: stop.",
    )
    drain_s: float = Field(
        30, ge=0, le=LARGEST, description="Longest time in seconds to read a response after the client disconnected."
    )
    stream_totals: Literal["off", "comment"] = Field(
        "comment", description="Send the session totals as a last SSE comment of each stream."
    )
    usage_missing: Literal["estimate", "zero"] = Field(
        "estimate",
        description="The provider reports no usage for input or output. estimate: count an estimate, marked as one; "
        "zero: count nothing.",
    )

    @field_validator("id_headers")
    @classmethod
    def _header_names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not all(map(HEADER_NAME.fullmatch, value)):
            raise ValueError("contains an invalid header name; use letters, digits and -, as in x-session-id")
        names = tuple(name.lower() for name in value)
        for name in names:
            if is_credential(name.encode()):
                raise ValueError(f"{name} holds a credential, which would be stored and logged as a session id")
            if name.encode() in GATEWAY_HEADERS - _MAY_NAME_SESSIONS:
                raise ValueError(f"{name} has another meaning for the gateway; leave it out")
        return names

    @property
    def ttl_s(self) -> int:
        """Return `ttl` in seconds."""
        return duration(self.ttl)

    @property
    def results_max_bytes(self) -> int:
        """Return `results_max_mb` in bytes."""
        return int(self.results_max_mb * 2**20)


StrategyName = Literal["dedupe", "condense", "shorten", "summarize", "drop"]


class Summary(Section):
    """The model that summarizes old messages."""

    model: str | None = Field(
        None, description="Model that makes the summaries, named as in a call. The strategy summarize needs it."
    )
    max_tokens: int = Field(800, ge=50, le=4000, description="Longest summary in tokens.")


class Context(Section):
    """How requests are trimmed to their context budget."""

    trim: Literal["auto", "off", "shadow"] = Field(
        "auto",
        description="auto: trim requests over their budget; off: never; shadow: decide and report, but send requests "
        "unchanged.",
    )
    budget: Literal["window"] | Annotated[int, Field(ge=1, le=MOST_TOKENS)] = Field(
        "window",
        description="Most input tokens of a call. window: what the context window of the model leaves; or a smaller "
        "number.",
    )
    reserve_tokens: Literal["auto"] | Annotated[int, Field(ge=0, le=MOST_TOKENS)] = Field(
        "auto",
        description="Tokens of the window kept free for the output. auto: the output limit of the call, or else 10 % "
        "of the window, at most 4,096.",
    )
    low_water: Literal["auto"] | Annotated[float, Field(ge=0.1, le=1)] = Field(
        "auto",
        description="Trimming fills this share of the room that is left besides what must stay, so that later calls "
        "keep the same prefix. auto: 0.46, or 0.7 without recall; up to 0.55 or 0.85 if a conversation grows slowly.",
    )
    strategies: tuple[StrategyName, ...] = Field(
        ("dedupe", "condense", "drop"),
        min_length=1,
        description="Applied in this order until the request fits. Also available: shorten, summarize.",
    )
    keep_last_turns: int = Field(1, ge=1, le=1000, description="Turns at the end that are never changed.")
    result_max_tokens: int = Field(
        1000,
        ge=20,
        le=MOST_TOKENS,
        description="Strategy shorten: tokens that remain of an old message, from its head and tail.",
    )
    recall: Literal["off", "said", "all"] = Field(
        "said",
        description="After the newest message, repeat old lines that match it. said: lines of user and assistant, and "
        "after a tool result also lines of old results that the tools ask for; all: lines of all messages.",
    )
    summary: Summary = Field(
        Summary(), description="Strategy summarize: one call to a model. Its tokens are charged to the session."
    )
    on_overflow: Literal["error", "least", "forward"] = Field(
        "error",
        description="A request that cannot be trimmed to its budget. error: refuse it (400 context_length_exceeded); "
        "least: send the least that can be sent, over the budget; forward: send it unchanged.",
    )
    cache: Literal["off", "auto"] = Field(
        "off",
        description="auto: set cache marks (cache_control) in calls to Claude models whose client sets none, so that "
        "the provider caches the prompt. Writing to the cache costs more than plain input, reading from it much less.",
    )
    safety: Literal["auto"] | Annotated[float, Field(ge=1, le=10)] = Field(
        "auto",
        description="Safety margin over estimated tokens. auto: learned from reported usage; or a factor such as 1.05.",
    )
    deadline_ms: Positive = Field(
        2000,
        description="Longest time in milliseconds to choose what to keep, without waiting. After it whole messages "
        "are dropped.",
    )
    families: str = Field(
        "",
        description="Your own file like config/families.yaml: what providers add to the text of a request by model "
        "family, and rules for images. The path is relative to this file. Its families precede the built-in ones.",
    )
    memory_mb: float = Field(
        256,
        ge=16,
        le=65_536,
        description="Cache of conversations in MiB per worker, so that each turn only processes its new messages. 256 "
        "is enough for about 30 trimmed sessions of 100,000 tokens, or 120 that are not trimmed.",
    )

    @field_validator("strategies")
    @classmethod
    def _distinct(cls, value: tuple[StrategyName, ...]) -> tuple[StrategyName, ...]:
        if len(set(value)) < len(value):
            raise ValueError("names a strategy twice")
        return value


class Log(Section):
    """The log: one line per call."""

    format: Literal["auto", "text", "json"] = Field(
        "auto", description="auto: text on a terminal, otherwise JSON lines."
    )
    level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="info: all calls; warning: failed calls; error: no calls, only errors of the gateway."
    )
    bodies: bool = Field(
        default=False,
        description="Also log the bodies of requests to providers and of their responses, the first 64 KiB of each. "
        "Headers are never logged.",
    )


class Telemetry(Section):
    """Logs, metrics and traces."""

    log: Log = Field(Log(), description="The log on stderr.")
    metrics: bool = Field(
        default=True,
        description="Serve metrics for Prometheus at /metrics. They need the admin key; without one they are for this "
        "machine.",
    )
    otel: bool = Field(
        default=False,
        description="Send spans and metrics over OTLP, configured by OTEL_* variables. Needs the extra [otel].",
    )


class Settings(Section):
    """The whole configuration."""

    server: Server = Field(Server(), description="Address to listen on, and limits of requests.")
    auth: Auth = Field(Auth(), description="Client keys and the admin key.")
    timezone: str = Field(
        "UTC", description="Time zone of windows by day, week and month, and of dates, such as Europe/Berlin."
    )
    providers: dict[str, Provider] = Field(
        {}, description="Providers by name. Keys given here override those of the built-in providers."
    )
    default_provider: str | None = Field("openai", description="Provider of models without a route; null: refuse them.")
    built_in_providers: bool = Field(default=True, description="Use the built-in providers and their routes.")
    models: tuple[Model, ...] = Field((), description="Routes. The first match wins. They precede the built-in routes.")
    context: Context = Field(Context(), description="How requests are trimmed to their context budget.")
    sessions: SessionSettings = Field(SessionSettings(), description="How calls are grouped into sessions.")
    budget: Budget = Field(Budget(), description="The budget of each session.")
    runaway: Runaway = Field(
        Runaway(), description="Agents that repeat themselves: when to warn, and when to refuse calls."
    )
    steps: tuple[StepRow, ...] = Field(
        (), description="Steps of calls without an agent: which tools may be called when. See docs/concepts/steps.md."
    )
    agents: dict[str, AgentFile] = Field(
        {},
        description="Agents with their own steps, by name: `steps:`, or the path of a file with `steps:`. A call "
        "belongs to an agent by its route (models[].agent) or by the header x-session-agent.",
    )
    store: StoreSettings = Field(StoreSettings(), description="The store of sessions, budgets and call records.")
    calls: CallSettings = Field(CallSettings(), description="How long call records are kept.")
    usage: UsageSettings = Field(UsageSettings(), description="How long usage by hour and by day is kept.")
    audit: AuditSettings = Field(AuditSettings(), description="How long the audit log is kept.")
    sinks: tuple[Sink, ...] = Field(
        (), max_length=4, description="Receivers of the records of all calls. See docs/guides/monitoring.md."
    )
    telemetry: Telemetry = Field(Telemetry(), description="Log and metrics.")
    callbacks: Callbacks = Field(
        Callbacks(), description="Webhooks and Python classes that receive events. See docs/guides/callbacks.md."
    )

    @field_validator("timezone")
    @classmethod
    def _timezone(cls, value: str) -> str:
        time_zone(value)
        return value

    @field_validator("providers")
    @classmethod
    def _providers(cls, value: dict[str, Provider]) -> dict[str, Provider]:
        for name in value:
            if not name or "/" in name:
                raise ValueError(
                    f"{name!r} cannot be the name of a provider, because calls name provider/model; leave out the slash"
                )
        return value

    @field_validator("steps")
    @classmethod
    def _steps(cls, value: tuple[StepRow, ...]) -> tuple[StepRow, ...]:
        return check_steps(value)

    @field_validator("agents")
    @classmethod
    def _agents(cls, value: dict[str, AgentSteps]) -> dict[str, AgentSteps]:
        for name in value:
            if name == DEFAULT_AGENT:
                raise ValueError(f"{name!r} is the agent of calls that name none; put its steps under `steps:`")
            if not is_valid(name):
                raise ValueError(f"{name!r} cannot be the name of an agent; use {ID_FORM}")
        return value

    @property
    def kept_s(self) -> float:
        """Return the seconds for which a session is kept after its last call: at least two leases of a hold.

        A call whose worker died can be settled late and twice. It is charged once only while the store knows the call.
        """
        return max(self.sessions.ttl_s, self._least_kept_s)

    @property
    def retention(self) -> Retention:
        """Return how long a store keeps its data."""
        calls_s = self.calls.keep_s
        return Retention(
            sessions_s=self.sessions.ttl_s,
            hours_s=duration(self.usage.keep_hours),
            days_s=duration(self.usage.keep_days),
            calls_s=max(calls_s, self._least_kept_s) if calls_s is not None else None,
            calls_per_session=self.calls.per_session,
            changes_s=duration(self.audit.keep),
        )

    @property
    def _least_kept_s(self) -> float:
        return 2 * self.budget.lease_s


#: routes of every installation, tried after the configured ones
BUILT_IN_ROUTES: Final = tuple((pattern, row.name) for row in PROVIDERS for pattern in row.models)


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of gateway.yaml, with descriptions."""
    schema = Settings.model_json_schema()
    # Blocks of built-in providers need not repeat required keys.
    schema["$defs"]["Provider"].pop("required", None)
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "gateway.yaml"}
    return {**head, **schema, **head}
