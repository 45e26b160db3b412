"""Define the settings in gateway.yaml: types, defaults, descriptions and checks of single keys."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal

from pydantic import Field, field_validator

from gateway.config.access import Auth, Budget
from gateway.config.callbacks import Callbacks
from gateway.config.models import Model
from gateway.config.providers import Provider
from gateway.config.section import HEADER_NAME, LARGEST, MOST_TOKENS, Positive, Section, duration
from gateway.config.steps import AgentFile, AgentSteps, StepRow, check_steps
from gateway.config.store import StoreSettings
from gateway.core.http.addresses import is_host
from gateway.core.http.gateway_headers import OURS, REQUEST_ID, SESSION
from gateway.core.http.headers import is_credential
from gateway.core.identity import ID_FORM, is_valid
from gateway.core.steps import DEFAULT_AGENT

#: of our own headers, those that may name a session
_MAY_NAME_SESSIONS: Final = frozenset({SESSION, REQUEST_ID})


class Server(Section):
    """Where the gateway listens and what it takes."""

    host: str = Field("127.0.0.1", description='Address to listen on; ::1 or "[::1]" for IPv6.')
    port: int = Field(8484, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    workers: int = Field(1, ge=1, le=256, description="Processes. More than one needs a store they share.")
    max_body_mb: Positive = Field(64, description="Largest request body, also once unpacked (MiB).")
    max_concurrency: int = Field(1024, ge=1, description="Calls under way in one worker; above it 503 at once.")
    max_header_kb: Positive = Field(64, description="All headers of one request, or its trailers (KiB); above it 431.")
    header_timeout_s: Positive = Field(20, description="Time to send a request's head.")
    body_timeout_s: Positive = Field(
        30,
        description="Longest silence while a body is being sent; all may take four such and a second per 512 bytes.",
    )
    write_timeout_s: Positive = Field(60, description="How long a client may take nothing of an answer that is sent.")
    cors_origins: tuple[str, ...] = Field(
        (),
        description="Web pages of these origins may call, as https://app.example, each named in full; our response "
        "headers are exposed, and those of OpenAI and Anthropic.",
    )
    shutdown_grace_s: float = Field(
        30, ge=0, le=LARGEST, description="Time that running calls get when the gateway is stopped."
    )
    dashboard: bool = Field(
        default=True, description="A page at /ui that shows sessions and calls to whoever may see them."
    )

    @field_validator("host")
    @classmethod
    def _host(cls, value: str) -> str:
        host = value.removeprefix("[").removesuffix("]")  # as it stands in a URL
        if not host:
            raise ValueError("is empty; write 127.0.0.1, or 0.0.0.0 to listen on every address")
        if not is_host(host):
            raise ValueError("is no address, and cannot be the name of one; write one like 127.0.0.1, ::1 or a.example")
        return host

    @field_validator("cors_origins")
    @classmethod
    def _origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(_origin(origin.lower()) for origin in value)


def _origin(value: str) -> str:
    if "*" in value:
        raise ValueError("an origin is compared as a whole and no pattern; name each, like https://app.example")
    if not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#\s]+", value):
        raise ValueError("an origin is a scheme and a host, like https://app.example")
    return value


class SessionSettings(Section):
    """How calls are put together to sessions."""

    id_headers: tuple[str, ...] = Field(
        (SESSION.decode(),), description="Headers that name the session, before the built-in list."
    )
    on_missing: Literal["derive", "require", "none"] = Field(
        "derive", description="A call that names no session: guess it, refuse it, or keep nothing."
    )
    ttl: str = Field(
        "30d",
        description="A session is forgotten this long after its last call: 15m, 12h, 30d. No sooner than two "
        "budget.lease_s.",
    )
    results_max_mb: float = Field(
        64,
        ge=0,
        le=2**20,
        description="Full texts of tool results, and conversations that the gateway compacted, kept for a session "
        "(MiB); a result beyond it is shown as a table at most. 0: none are kept.",
    )
    on_disconnect: Literal["drain", "cancel"] = Field(
        "drain", description="The client leaves: read the answer to its end for exact usage (at most drain_s), or stop."
    )
    drain_s: float = Field(30, ge=0, le=LARGEST, description="How long a left answer is read on.")
    stream_totals: Literal["off", "comment"] = Field(
        "comment", description="Totals in a last comment line of each stream."
    )
    usage_missing: Literal["estimate", "zero"] = Field(
        "estimate", description="What a side of a call counts of which no usage is reported."
    )

    @field_validator("id_headers")
    @classmethod
    def _header_names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not all(map(HEADER_NAME.fullmatch, value)):
            raise ValueError("holds what is no header name; use letters, digits and -, as in x-session-id")
        names = tuple(name.lower() for name in value)
        for name in names:
            if is_credential(name.encode()):
                raise ValueError(f"{name} holds a credential, which would be stored and logged as a session's id")
            if name.encode() in OURS - _MAY_NAME_SESSIONS:
                raise ValueError(f"{name} says something else of a call than its session; leave it out")
        return names

    @field_validator("ttl")
    @classmethod
    def _ttl(cls, value: str) -> str:
        duration(value)
        return value

    @property
    def ttl_s(self) -> int:
        """`ttl` in seconds."""
        return duration(self.ttl)

    @property
    def results_max_bytes(self) -> int:
        """`results_max_mb` in bytes."""
        return int(self.results_max_mb * 2**20)


StrategyName = Literal["dedupe", "condense", "shorten", "summarize", "drop"]


class Summary(Section):
    """Who writes summaries of old messages."""

    model: str | None = Field(
        None, description="Model that is called for a summary, as a call would name it; needed by summarize."
    )
    max_tokens: int = Field(800, ge=50, le=4000, description="Longest summary.")


class Context(Section):
    """How requests are made to fit."""

    trim: Literal["auto", "off", "shadow"] = Field(
        "auto", description="auto: only what is over its budget; off; shadow: decide and report, forward untouched."
    )
    budget: Literal["window"] | Annotated[int, Field(ge=1, le=MOST_TOKENS)] = Field(
        "window", description="Input tokens of a call: what the model's window leaves, or a smaller number."
    )
    reserve_tokens: Literal["auto"] | Annotated[int, Field(ge=0, le=MOST_TOKENS)] = Field(
        "auto",
        description="Kept free for the answer; auto: the call's own output limit, else 10 % of the window up to 4,096.",
    )
    low_water: Literal["auto"] | Annotated[float, Field(ge=0.1, le=1)] = Field(
        "auto",
        description="A cut goes down to this share of what is left beside that which must stay; auto: 0.46, without "
        "recall 0.7.",
    )
    strategies: tuple[StrategyName, ...] = Field(
        ("dedupe", "condense", "drop"), min_length=1, description="Tried in this order until the request fits."
    )
    keep_last_turns: int = Field(1, ge=1, le=1000, description="Turns at the end that are never touched.")
    result_max_tokens: int = Field(
        1000, ge=20, le=MOST_TOKENS, description="shorten: what is left of an old message, head and tail."
    )
    recall: Literal["off", "said", "all"] = Field(
        "said",
        description="Old lines that match the newest message, repeated behind it: of user and assistant, and behind a "
        "result what the tools ask for of old ones; or of all.",
    )
    summary: Summary = Field(
        Summary(), description="summarize: one call to a model; its tokens are added to the session like any other's."
    )
    on_overflow: Literal["error", "least", "forward"] = Field(
        "error",
        description="What cannot be made to fit: refuse it (400 context_length_exceeded), send the least that can be "
        "sent of it, or send it as it is.",
    )
    safety: Literal["auto"] | Annotated[float, Field(ge=1, le=10)] = Field(
        "auto", description="Margin over the estimate: learned from reported usage, or a factor such as 1.05."
    )
    deadline_ms: Positive = Field(
        2000,
        description="Longest choice of what to keep, once it is its turn; past it whole messages are dropped instead.",
    )
    families: str = Field(
        "",
        description="A file of your own like config/families.yaml (what a provider adds to the text of a request, by "
        "family of models; rules for images), beside the configuration; its families are asked before those.",
    )
    memory_mb: float = Field(
        256,
        ge=16,
        le=65_536,
        description="What a worker may remember of conversations, so that a turn costs its new messages. 256: some 30 "
        "sessions of 100,000 tokens that are cut, or 120 that are not.",
    )

    @field_validator("strategies")
    @classmethod
    def _distinct(cls, value: tuple[StrategyName, ...]) -> tuple[StrategyName, ...]:
        if len(set(value)) < len(value):
            raise ValueError("names a strategy twice")
        return value


class Log(Section):
    """One line per call."""

    format: Literal["auto", "text", "json"] = Field("auto", description="auto: text on a terminal, else JSON lines.")
    level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="info: every call; warning: failed calls only; error: none, only the gateway's own errors."
    )
    bodies: bool = Field(
        default=False,
        description="Also what is sent to providers and what they answer, the first 64 KiB of each; no header.",
    )


class Telemetry(Section):
    """What the gateway tells of itself."""

    log: Log = Field(Log(), description="The log on stderr.")
    metrics: bool = Field(
        default=True,
        description="Figures for Prometheus at /metrics, for the admin key, or where none is set this machine.",
    )
    otel: bool = Field(
        default=False,
        description="Spans and metrics over OTLP, as the OTEL_* variables say; needs the extra [otel].",
    )


class Settings(Section):
    """The whole configuration."""

    server: Server = Field(Server(), description="Where the gateway listens and what it takes.")
    auth: Auth = Field(Auth(), description="Client keys and the admin key.")
    providers: dict[str, Provider] = Field({}, description="Providers by name; added to the built-in ones key by key.")
    default_provider: str | None = Field("openai", description="For a model that no route names; null: refuse it.")
    built_in_providers: bool = Field(default=True, description="Whether the built-in providers and their routes exist.")
    models: tuple[Model, ...] = Field((), description="Routes; first match wins; tried before the built-in ones.")
    context: Context = Field(Context(), description="How requests are made to fit their context budget.")
    sessions: SessionSettings = Field(SessionSettings(), description="How calls are put together to sessions.")
    budget: Budget = Field(Budget(), description="What a session may spend.")
    steps: tuple[StepRow, ...] = Field(
        (), description="Steps of calls without an agent: which tools may be called when. See docs/concepts/steps.md."
    )
    agents: dict[str, AgentFile] = Field(
        {},
        description="Agents with steps of their own, by name: `steps:`, or the path of a file that holds it. A call is "
        "an agent's by its route (models[].agent), or by the header x-session-agent.",
    )
    store: StoreSettings = Field(StoreSettings(), description="Where sessions are kept.")
    telemetry: Telemetry = Field(Telemetry(), description="Log and metrics.")
    callbacks: Callbacks = Field(Callbacks(), description="Who else is told of calls. See docs/guides/callbacks.md.")

    @field_validator("providers")
    @classmethod
    def _providers(cls, value: dict[str, Provider]) -> dict[str, Provider]:
        for name in value:
            if not name or "/" in name:
                raise ValueError(
                    f"{name!r} cannot be a provider's name, as calls say provider/model; leave out the slash"
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
                raise ValueError(f"{name!r} is the agent of calls that name none; its steps stand in `steps:`")
            if not is_valid(name):
                raise ValueError(f"the name of an agent is {ID_FORM}; {name!r} does not do")
        return value

    @property
    def kept_s(self) -> float:
        """Seconds for which a session is kept after its last call.

        At least two leases of a hold: a call whose worker was gone may be settled late and twice, and that is one
        charge only as long as the store knows the call.
        """
        return max(self.sessions.ttl_s, 2 * self.budget.lease_s)


#: routes every installation has, after the configured ones
BUILT_IN_ROUTES: Final = (
    ("gpt-[!o]*", "openai"),  # all but gpt-oss, which others host under its bare name, and OpenAI does not
    ("chatgpt-*", "openai"),
    ("o[0-9]*", "openai"),
    ("text-embedding-*", "openai"),
    ("claude-*", "anthropic"),
    ("gemini-*", "gemini"),
    # Their own models, which they name so themselves; what they host of others has one more slash, or another name.
    ("openrouter/*", "openrouter"),
    ("groq/compound", "groq"),
    ("groq/compound-mini", "groq"),
)


def json_schema() -> dict[str, Any]:
    """The JSON Schema of gateway.yaml, with descriptions."""
    schema = Settings.model_json_schema()
    # What a built-in provider brings along need not be written again.
    schema["$defs"]["Provider"].pop("required", None)
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "gateway.yaml"}
    return {**head, **schema, **head}
