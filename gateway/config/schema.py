"""The keys of gateway.yaml as frozen values: types, defaults, descriptions, and the checks that concern one key."""

from __future__ import annotations

import hashlib
import re
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field, SecretStr, ValidationInfo, field_validator, model_validator

from gateway.config.callbacks import Callbacks
from gateway.config.section import Section as _Section
from gateway.config.steps import AgentFile, AgentSteps, StepRow, check_steps
from gateway.core import redis_url
from gateway.core.addresses import is_address
from gateway.core.asked import OURS, REQUEST_ID, SESSION
from gateway.core.forwarding import AUTH_HEADER, FRAMING, is_credential
from gateway.core.identity import ID_FORM, is_valid
from gateway.core.ledger import LEAST_USD, MOST_USD
from gateway.core.ports import is_reserved
from gateway.core.steps import DEFAULT_AGENT

_DURATION: Final = re.compile(r"(\d+)([smhd])\Z")
_HEADER_NAME: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_HEADER_VALUE: Final = re.compile(r"[\t\x20-\x7e]*")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}

#: of a request to a provider; a host of one's own is for one that is called by its address
_WRITTEN: Final = FRAMING - {b"host"}
#: of our own headers, those that may name a session
_MAY_NAME_SESSIONS: Final = frozenset({SESSION, REQUEST_ID})

_JOURNALS: Final = "~/.local/share/gateway/journal"

Positive = Annotated[float, Field(gt=0)]

#: what is said of a duration that is none
NO_DURATION: Final = "must be a duration like 90s, 15m, 12h or 30d"


def duration(text: str) -> int:
    """Seconds of `90s`, `15m`, `12h`, `30d`.

    Raises:
        ValueError: it is none of these.
    """
    match = _DURATION.match(text)
    if match is None or int(match[1]) == 0:
        raise ValueError(NO_DURATION)
    return int(match[1]) * _SECONDS[match[2]]


class Server(_Section):
    """Where the gateway listens and what it takes."""

    host: str = Field("127.0.0.1", description='Address to listen on; ::1 or "[::1]" for IPv6.')
    port: int = Field(8484, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    workers: int = Field(1, ge=1, le=256, description="Processes. More than one needs a store they share.")
    max_body_mb: Positive = Field(64, description="Largest request body, also once unpacked (MiB).")
    max_concurrency: int = Field(1024, ge=1, description="Calls under way in one worker; above it 503 at once.")
    max_header_kb: Positive = Field(64, description="All headers of one request (KiB); above it 431.")
    header_timeout_s: Positive = Field(20, description="Time to send a request's head.")
    body_timeout_s: Positive = Field(30, description="Longest silence while a body is being sent.")
    write_timeout_s: Positive = Field(60, description="How long a client may take nothing of an answer that is sent.")
    cors_origins: tuple[str, ...] = Field(
        (),
        description="Web pages of these origins may call, as https://app.example; our response headers are exposed, "
        "and those of OpenAI and Anthropic.",
    )
    shutdown_grace_s: float = Field(30, ge=0, description="Time that running calls get when the gateway is stopped.")
    dashboard: bool = Field(
        default=True, description="A page at /ui that shows sessions and calls to whoever may see them."
    )

    @field_validator("host")
    @classmethod
    def _host(cls, value: str) -> str:
        return value.removeprefix("[").removesuffix("]")  # as it stands in a URL

    @field_validator("cors_origins")
    @classmethod
    def _origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(_origin(origin.lower()) for origin in value)


def _origin(value: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#\s]+", value):
        raise ValueError("an origin is a scheme and a host, like https://app.example")
    return value


def _long_enough(key: SecretStr) -> SecretStr:
    if len(key.get_secret_value()) < 16:  # noqa: PLR2004  # 16 random characters are 80 bits and more
        raise ValueError("a key needs at least 16 characters")
    return key


class KeyBudget(_Section):
    """What a client key may spend in all its sessions together."""

    tokens: int | None = Field(None, ge=0, le=2**53, description="Tokens.")
    usd: Decimal | None = Field(None, ge=0, le=MOST_USD, description="US dollars.")
    calls: int | None = Field(None, ge=0, le=2**53, description="Calls.")
    window: str | None = Field(None, description="The budget refills after 1h, 1d, …; null: it is for life.")

    @field_validator("usd")
    @classmethod
    def _usd(cls, value: Decimal | None) -> Decimal | None:
        if value is not None and 0 < value < LEAST_USD:
            raise ValueError(f"is less than a billionth of a dollar; use 0, or {LEAST_USD:f} and more")
        return value

    @field_validator("window")
    @classmethod
    def _window(cls, value: str | None) -> str | None:
        if value is not None:
            duration(value)
        return value

    @property
    def window_s(self) -> float | None:
        """`window` in seconds."""
        return duration(self.window) if self.window is not None else None


class ClientKey(_Section):
    """One client key."""

    name: str = Field(description="Its sessions are kept under this name.")
    key: SecretStr = Field(description="The key itself, at least 16 characters; best as ${VARIABLE}.")
    models: tuple[str, ...] = Field((), description="Shell patterns of the models it may call; empty: all.")
    budget: KeyBudget = Field(KeyBudget(), description="What it may spend in all its sessions together.")
    rpm: int | None = Field(None, ge=1, le=2**53, description="Requests a minute.")

    @field_validator("name")
    @classmethod
    def _name(cls, value: str) -> str:
        if not is_valid(value):
            raise ValueError(f"use {ID_FORM}")
        if is_reserved(value):
            raise ValueError("is a name for callers without a key, whose sessions it would see; choose another")
        return value

    @field_validator("key")
    @classmethod
    def _key(cls, value: SecretStr) -> SecretStr:
        return _long_enough(value)


class Auth(_Section):
    """Who may call."""

    keys: tuple[ClientKey, ...] = Field((), description="Client keys. Empty: open; then listen on loopback only.")
    required: bool = Field(
        default=False,
        description="Refuse calls without a client key even where none is listed here: for keys that are kept in the "
        "store (gateway keys).",
    )
    admin_key: SecretStr | None = Field(
        None, description="Needed for writes under /api when set; when unset those are for loopback only."
    )

    @field_validator("admin_key")
    @classmethod
    def _admin_key(cls, value: SecretStr | None) -> SecretStr | None:
        # An empty one (${ADMIN_KEY:-}) would be matched by an empty credential.
        return _long_enough(value) if value is not None and value.get_secret_value().strip() else None

    @model_validator(mode="after")
    def _distinct(self) -> Auth:
        names = [key.name for key in self.keys]
        secrets = [key.key.get_secret_value() for key in self.keys]
        if len(set(names)) < len(names):
            raise ValueError("two keys have the same name")
        if len(set(secrets)) < len(secrets):
            raise ValueError("two names have the same key")
        if self.admin_key is not None and self.admin_key.get_secret_value() in secrets:
            raise ValueError("admin_key is a client's key too, who could then raise every budget; choose another")
        return self


class Timeouts(_Section):
    """How long a provider may take, in seconds."""

    connect: Positive = Field(10, description="To accept the connection, TLS included.")
    first_byte: Positive = Field(300, description="To begin its answer.")
    between_bytes: Positive = Field(120, description="Longest silence within an answer.")


class Tls(_Section):
    """TLS towards a provider."""

    verify: bool = Field(default=True, description="Check the certificate.")
    ca_file: Path | None = Field(
        None, description="PEM file of certificate authorities to trust instead of the system's."
    )


AuthStyle = Literal["bearer", "x-api-key", "api-key", "none"]
Format = Literal["chat", "responses", "messages", "completions", "embeddings"]


#: arguments of litellm's functions that are a call's, or that the gateway sets
_NO_OPTIONS: Final = frozenset(
    {
        "model", "messages", "stream", "custom_llm_provider", "api_key", "api_base", "base_url", "timeout", "client",
        "num_retries", "max_retries", "fallbacks", "extra_headers", "extra_body", "mock_response", "callbacks",
    }
)  # fmt: skip


class Breaker(_Section):
    """When a provider is left alone."""

    failures: int = Field(5, ge=1, le=1000, description="Failures in a row after which it is left alone.")
    open_s: Positive = Field(15, description="For so many seconds; then one call asks whether it is well again.")


class Provider(_Section):
    """One provider."""

    adapter: Literal["http", "litellm"] = Field(
        "http",
        description="http: it speaks the formats of its callers, which are forwarded. litellm: it speaks another, and "
        "calls are translated, see docs/providers.md.",
    )
    litellm: str = Field(
        "", description="adapter litellm: litellm's name of the provider, such as bedrock; empty: its name here."
    )
    options: dict[str, str] = Field(
        {},
        repr=False,
        description="adapter litellm: further arguments of litellm's functions, such as aws_region_name.",
    )
    base_url: str = Field(
        "",
        description="Where its API begins, with the version segment; /v1 is added to a bare host. With adapter litellm "
        "its api_base as it is; empty: the address that litellm knows.",
    )
    key: SecretStr = Field(SecretStr(""), description="Its credential; empty: the caller's own is forwarded.")
    auth: AuthStyle = Field("bearer", description="How the credential is sent.")
    headers: dict[str, str] = Field({}, repr=False, description="Fixed headers, sent unless the caller sends them.")
    dialects: tuple[Format, ...] | None = Field(
        None,
        description="The formats that it takes. A call in another is not sent to it, but to the next provider of its "
        "model that takes that, or refused. null: nobody says, and every call is sent.",
    )
    timeout_s: Timeouts = Field(Timeouts(), description="Time limits in seconds.")
    retries: int = Field(
        2,
        ge=0,
        le=10,
        description="How often it is asked again before the first byte of an answer: where no connection came about, "
        "and at 429, 502, 503, 521, 523 and 529. A Retry-After of up to 30 s, also as a date, is obeyed.",
    )
    breaker: Breaker = Field(Breaker(), description="When it is left alone for a while.")
    max_connections: int = Field(1024, ge=1, description="Connections to it from one worker.")
    tls: Tls = Field(Tls(), description="TLS settings.")
    key_prefixes: tuple[str, ...] = Field((), description="How this provider's own credentials begin.")
    limit_field: Literal["auto", "max_tokens", "max_completion_tokens"] = Field(
        "auto",
        description="How an output limit is named that a budget sets in a chat call: where it has none, and "
        "max_tokens also in the place of a max_completion_tokens, which this provider may ignore. auto: "
        "max_completion_tokens at hosts of OpenAI and Azure, else max_tokens.",
    )
    allowed_tools: bool = Field(
        default=False,
        description="Whether tool_choice may name some of the tools (allowed_tools, as OpenAI has it): then a step "
        "narrows a request without changing its list of tools, and so keeps the provider's prompt cache.",
    )
    reports_cost: bool = Field(
        default=False,
        description="Its usage says what a call costs, in USD, as OpenRouter writes it (usage.cost): that is charged "
        "instead of list prices. Not read with adapter litellm.",
    )

    @field_validator("key")
    @classmethod
    def _key(cls, value: SecretStr) -> SecretStr:
        if not _HEADER_VALUE.fullmatch(value.get_secret_value()):
            raise ValueError(
                "holds a line break or another character that no header may; look where it is read from: only visible "
                "ASCII characters can be sent"
            )
        return value

    @field_validator("key_prefixes")
    @classmethod
    def _key_prefixes(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if "" in value:
            raise ValueError("an empty one is how every credential begins; leave it out")
        return value

    @field_validator("dialects")
    @classmethod
    def _dialects(cls, value: tuple[Format, ...] | None) -> tuple[Format, ...] | None:
        if value == ():
            raise ValueError("names no format; leave it out, and every call is sent")
        return value

    @field_validator("litellm")
    @classmethod
    def _litellm(cls, value: str) -> str:
        if value and not re.fullmatch(r"[a-z][a-z0-9_-]*", value):
            raise ValueError("is litellm's name of a provider, like bedrock or vertex_ai")
        return value

    @field_validator("options")
    @classmethod
    def _options(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            if name in _NO_OPTIONS or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
                raise ValueError(f"{name!r} is set by the gateway, or no argument of litellm")
        return value

    @field_validator("base_url")
    @classmethod
    def _base_url(cls, value: str, info: ValidationInfo) -> str:
        is_translated = info.data.get("adapter") == "litellm"
        if not value and is_translated:
            return value
        if not value:
            raise ValueError("field required")
        match = re.match(r"(https?)://([^/?#\s]+)(/[^?#\s]*)?\Z", value)
        if match is None:
            raise ValueError("must be an http:// or https:// address without query")
        if "@" in match[2]:
            raise ValueError("must not hold a user name or password; use key:")
        if not is_address(value):
            raise ValueError("must name a host, and a port between 1 and 65535 where it names one")
        # Where it is put together, the first part may have ended with a slash too.
        path = re.sub("//+", "/", match[3] or "").rstrip("/")
        return f"{match[1]}://{match[2]}{path or ('' if is_translated else '/v1')}"

    @model_validator(mode="after")
    def _key_is_sent(self) -> Provider:
        if not self.key.get_secret_value():
            return self
        if self.auth == "none":
            raise ValueError("auth: none sends no key; set auth: bearer, x-api-key or api-key")
        if AUTH_HEADER[self.auth].decode() in self.headers:
            raise ValueError(
                f"auth: {self.auth} sends the key as {AUTH_HEADER[self.auth].decode()}, and headers has another; take "
                'it out of headers, or set key: ""'
            )
        return self

    @model_validator(mode="after")
    def _one_adapter(self) -> Provider:
        if self.adapter == "litellm" and self.tls != Tls():
            raise ValueError("tls is not for adapter litellm; set SSL_CERT_FILE in the environment")
        if self.adapter == "http" and (self.litellm or self.options):
            raise ValueError("litellm and options are for adapter: litellm")
        return self

    @field_validator("headers")
    @classmethod
    def _headers(cls, value: dict[str, str]) -> dict[str, str]:
        for name, text in value.items():
            if not _HEADER_NAME.fullmatch(name):
                raise ValueError(f"{name!r} is no header name")
            if name.lower().encode() in _WRITTEN:
                raise ValueError(f"{name!r} is written by the gateway for each request; leave it out")
            if not _HEADER_VALUE.fullmatch(text):
                raise ValueError(f"the value of {name!r} holds characters that no header may")
        return {name.lower(): text for name, text in value.items()}


class PriceRow(_Section):
    """USD per million tokens."""

    input: Decimal = Field(ge=0, description="Of input tokens.")
    output: Decimal = Field(ge=0, description="Of output tokens.")
    cache_read: Decimal | None = Field(None, ge=0, description="Of input tokens read from a cache; null: as input.")
    cache_write: Decimal | None = Field(None, ge=0, description="Of input tokens put into a cache; null: as input.")
    cache_write_1h: Decimal | None = Field(None, ge=0, description="Of those kept for an hour; null: as cache_write.")


class Facts(_Section):
    """What is known of a model."""

    window: int | None = Field(None, ge=1, description="Context window in tokens.")
    output: int | None = Field(None, ge=1, description="Most output tokens of one call.")
    tokenizer: str | None = Field(None, description="Name of its tokenizer.")
    price: PriceRow | None = Field(None, description="USD per million tokens.")
    reasoning: bool | None = Field(
        None,
        description="Whether it may think before it answers, unseen and billed. A stream of a model that surely does "
        "not may grow under a budget, see docs/budgets.md.",
    )


class Model(Facts):
    """One route: which models, where to, under which name, and facts that override the tables."""

    match: str = Field(description="Shell pattern of model names.")
    provider: str | dict[str, Annotated[float, Field(gt=0, le=1000)]] = Field(
        description="Name of a provider; or several, each with its share: {azure-east: 3, azure-west: 1}. A session "
        "stays with its own as long as that one answers.",
    )
    name: str | None = Field(None, description="The name to send instead, for an alias.")
    fallback: tuple[str, ...] = Field(
        (),
        max_length=7,
        description="Models, as calls name them, to be called in this order where no provider of this one answers: it "
        "is not reached, is silent, or says 408, 429, 500, 502, 503, 504, 520 to 524 or 529, refuses the gateway's own "
        "key (401, 402, 403), or says that the request is too long or too large (413).",
    )

    agent: str | None = Field(
        None, description="The agent, out of agents:, whose steps its calls take; whatever x-session-agent says."
    )

    @field_validator("match")
    @classmethod
    def _match(cls, value: str) -> str:
        if not value:
            raise ValueError("matches no model; * matches all")
        return value

    @field_validator("provider")
    @classmethod
    def _some_provider(cls, value: str | dict[str, float]) -> str | dict[str, float]:
        if not value:
            raise ValueError("must name a provider")
        return value

    @property
    def providers(self) -> tuple[str, ...]:
        """The names of all that share its calls."""
        return (self.provider,) if isinstance(self.provider, str) else tuple(self.provider)


class Sessions(_Section):
    """How calls are put together to sessions."""

    id_headers: tuple[str, ...] = Field(
        (SESSION.decode(),), description="Headers that name the session, before the built-in list."
    )
    on_missing: Literal["derive", "require", "none"] = Field(
        "derive", description="A call that names no session: guess it, refuse it, or keep nothing."
    )
    ttl: str = Field("30d", description="A session is forgotten this long after its last call: 90s, 15m, 12h, 30d.")
    results_max_mb: float = Field(
        64,
        ge=0,
        le=2**20,
        description="Full texts of tool results kept for a session (MiB); a result beyond it is shown as a table at "
        "most. 0: none are kept.",
    )
    on_disconnect: Literal["drain", "cancel"] = Field(
        "drain", description="The client leaves: read the answer to its end for exact usage (at most drain_s), or stop."
    )
    drain_s: float = Field(30, ge=0, description="How long a left answer is read on.")
    stream_totals: Literal["off", "comment"] = Field(
        "comment", description="Totals in a last comment line of each stream."
    )
    usage_missing: Literal["estimate", "zero"] = Field(
        "estimate", description="What a side of a call counts of which no usage is reported."
    )

    @field_validator("id_headers")
    @classmethod
    def _header_names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not all(map(_HEADER_NAME.fullmatch, value)):
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


class Summary(_Section):
    """Who writes summaries of old messages."""

    model: str | None = Field(
        None, description="Model that is called for a summary, as a call would name it; needed by summarize."
    )
    max_tokens: int = Field(800, ge=50, le=4000, description="Longest summary.")


class Context(_Section):
    """How requests are made to fit."""

    trim: Literal["auto", "off", "shadow"] = Field(
        "auto", description="auto: only what is over its budget; off; shadow: decide and report, forward untouched."
    )
    budget: Literal["window"] | Annotated[int, Field(ge=1)] = Field(
        "window", description="Input tokens of a call: what the model's window leaves, or a smaller number."
    )
    reserve_tokens: Literal["auto"] | Annotated[int, Field(ge=0)] = Field(
        "auto",
        description="Kept free for the answer; auto: the call's own output limit, else 10 % of the window up to 4,096.",
    )
    low_water: Literal["auto"] | Annotated[float, Field(ge=0.1, le=1)] = Field(
        "auto",
        description="A cut goes down to this share of what is left beside that which must stay; auto: 0.48, without "
        "recall 0.7.",
    )
    strategies: tuple[StrategyName, ...] = Field(
        ("dedupe", "condense", "drop"), min_length=1, description="Tried in this order until the request fits."
    )
    keep_last_turns: int = Field(1, ge=1, le=1000, description="Turns at the end that are never touched.")
    result_max_tokens: int = Field(1000, ge=20, description="shorten: what is left of an old message, head and tail.")
    recall: Literal["off", "said", "all"] = Field(
        "said",
        description="Old lines that match the new question, repeated behind it: of user and assistant, or of all.",
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
        2000, description="Longest choice of what to keep; past it whole messages are dropped instead."
    )

    @field_validator("strategies")
    @classmethod
    def _distinct(cls, value: tuple[StrategyName, ...]) -> tuple[StrategyName, ...]:
        if len(set(value)) < len(value):
            raise ValueError("names a strategy twice")
        return value


class Budget(KeyBudget):
    """What a session may spend."""

    count_cached: float = Field(
        1.0, ge=0, le=1, description="What a cached input token counts in the token budget; 0.1: like its price."
    )
    warn_at: float = Field(0.8, ge=0, le=1, description="From this share on answers carry x-session-budget-warning.")
    modes: bool = Field(
        default=True,
        description="Tool results shrink as the budget does: raw above 50 % left, then table, below 20 % summary, "
        "below 5 % handle_only.",
    )
    summary_model: str | None = Field(
        None,
        description="Model that is called for a summary of a large tool result in the mode summary, as a call would "
        "name it; its tokens are added to the session. null: an extract is made, without a call.",
    )
    clamp_output: bool = Field(
        default=True, description="Lower a call's output limit to what is left, instead of refusing the call."
    )
    deferred: Literal["refuse", "forward"] = Field(
        "refuse",
        description="Calls whose cost arises after their answer (batches, background responses, fine-tuning, videos, "
        "realtime sessions), while a budget in tokens or USD is in force: its holder is not charged for them.",
    )
    exhausted_status: Literal[400, 402, 429] = Field(400, description="Status of a refusal; many clients repeat 429.")
    lease_s: float = Field(
        180, ge=5, le=3600, description="A hold not renewed for so long is settled from what was noted of it last."
    )


class StoreSettings(_Section):
    """Where sessions are kept."""

    url: str = Field(
        "sqlite://~/.local/share/gateway/gateway.db",
        description="memory://, sqlite://PATH, redis://HOST:PORT/DB, redis+sentinel://HOST:PORT,…/SERVICE/DB, "
        "redis+cluster://HOST:PORT,…; rediss instead of redis: over TLS. USER:PASSWORD@ may stand before the host, "
        "ssl_ca_certs=FILE and other options behind a question mark.",
        repr=False,
    )
    timeout_ms: int = Field(
        250, ge=1, description="Longest wait for one exchange with the store (a call makes several)."
    )
    on_failure: Literal["closed", "open"] = Field(
        "closed",
        description="The store is away. closed: 503 store_unavailable; open: forward, within what was left of each "
        "budget when it was last seen, and add everything when the store is back.",
    )
    journal: Literal["auto", "off"] | Path = Field(
        "auto",
        description="Folder for usage that the store has not confirmed; auto: beside the SQLite file, else "
        "~/.local/share/gateway/journal; off: in memory only.",
    )

    @field_validator("url")
    @classmethod
    def _url(cls, value: str) -> str:
        if value.startswith("sqlite://") and "?" in value:
            raise ValueError("sqlite://PATH takes no options; leave out the question mark and what is behind it")
        if value == "memory://" or (value.startswith("sqlite://") and len(value) > len("sqlite://")):
            return value
        try:
            redis_url.parse(value)
        except ValueError:
            if value.partition("://")[0] in redis_url.SCHEMES:
                raise
            raise ValueError(
                "must be memory://, sqlite://PATH, redis://HOST:PORT/DB, redis+sentinel://HOST:PORT,…/SERVICE/DB or "
                "redis+cluster://HOST:PORT,… (rediss… over TLS)"
            ) from None
        return value

    @property
    def shown_url(self) -> str:
        """Where it is, without a password."""
        return redis_url.parse(self.url).shown if self.is_redis else self.url

    @property
    def is_redis(self) -> bool:
        """Whether it is on servers of its own."""
        return self.url.startswith("redis")

    @property
    def journal_path(self) -> Path | None:
        """The folder of the journals, or None where there is none."""
        if self.journal == "off" or self.url == "memory://":
            return None
        beside = self.sqlite_path
        if beside is not None and not isinstance(self.journal, Path):
            return beside.with_name(f"{beside.name}-journals")
        folder = self.journal if isinstance(self.journal, Path) else Path(_JOURNALS)
        # What waits for one store must not be settled in another.
        return folder.expanduser() / hashlib.sha256(self.shown_url.encode()).hexdigest()[:12]

    @property
    def sqlite_path(self) -> Path | None:
        """The database file, or None for another kind of store."""
        if not self.url.startswith("sqlite://"):
            return None
        return Path(self.url.removeprefix("sqlite://")).expanduser()


class Log(_Section):
    """One line per call."""

    format: Literal["auto", "text", "json"] = Field("auto", description="auto: text on a terminal, else JSON lines.")
    level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="info: every call; warning: failed calls only; error: none, only the gateway's own errors."
    )
    bodies: bool = Field(
        default=False,
        description="Also what is sent to providers and what they answer, the first 64 KiB of each; no header.",
    )


class Telemetry(_Section):
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


class Settings(_Section):
    """The whole configuration."""

    server: Server = Field(Server(), description="Where the gateway listens and what it takes.")
    auth: Auth = Field(Auth(), description="Client keys and the admin key.")
    providers: dict[str, Provider] = Field({}, description="Providers by name; added to the built-in ones key by key.")
    default_provider: str | None = Field("openai", description="For a model that no route names; null: refuse it.")
    built_in_providers: bool = Field(default=True, description="Whether the built-in providers and their routes exist.")
    models: tuple[Model, ...] = Field((), description="Routes; first match wins; tried before the built-in ones.")
    context: Context = Field(Context(), description="How requests are made to fit their context budget.")
    sessions: Sessions = Field(Sessions(), description="How calls are put together to sessions.")
    budget: Budget = Field(Budget(), description="What a session may spend.")
    steps: tuple[StepRow, ...] = Field(
        (), description="Steps of calls whose agent is not named: which tools may be called when. See docs/steps.md."
    )
    agents: dict[str, AgentFile] = Field(
        {},
        description="Agents with steps of their own, by name: `steps:`, or the path of a file that holds it. A call is "
        "an agent's by its route (models[].agent), or by the header x-session-agent.",
    )
    store: StoreSettings = Field(StoreSettings(), description="Where sessions are kept.")
    telemetry: Telemetry = Field(Telemetry(), description="Log and metrics.")
    callbacks: Callbacks = Field(Callbacks(), description="Who else is told of calls. See docs/callbacks.md.")

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


#: routes every installation has, after the configured ones
BUILT_IN_ROUTES: Final = (
    ("gpt-*", "openai"),
    ("chatgpt-*", "openai"),
    ("o[0-9]*", "openai"),
    ("text-embedding-*", "openai"),
    ("claude-*", "anthropic"),
    ("gemini-*", "gemini"),
)


def json_schema() -> dict[str, Any]:
    """The JSON Schema of gateway.yaml, with descriptions."""
    schema = Settings.model_json_schema()
    # What a built-in provider brings along need not be written again.
    schema["$defs"]["Provider"].pop("required", None)
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "gateway.yaml"}
    return {**head, **schema, **head}
