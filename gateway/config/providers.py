"""Define the settings of a provider."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, Literal

from pydantic import Field, SecretStr, ValidationInfo, field_validator, model_validator

from gateway.config.section import HEADER_NAME, Positive, Section, at_home
from gateway.core.http.addresses import is_address
from gateway.core.http.headers import AUTH_HEADER, CREDENTIALS, FRAMING, AuthStyle

_HEADER_VALUE: Final = re.compile(r"[\t\x20-\x7e]*")
#: headers that the gateway writes for each request; `host` may be set, for a provider that is called by its IP address
_WRITTEN: Final = FRAMING - {b"host"}
#: what callers put behind a base URL
_CALLED: Final = re.compile(r"/(?:chat/completions|responses|messages|completions|embeddings)\Z")
Format = Literal["chat", "responses", "messages", "completions", "embeddings"]
#: arguments of litellm's functions that are a call's, or that the gateway sets
_NO_OPTIONS: Final = frozenset(
    {
        "model", "messages", "stream", "custom_llm_provider", "api_key", "api_base", "base_url", "timeout", "client",
        "num_retries", "max_retries", "fallbacks", "extra_headers", "extra_body", "mock_response", "callbacks",
    }
)  # fmt: skip


#: what is said of a credential that cannot be sent
UNSENDABLE: Final = "holds a line break or another character that no header may"


def is_sendable(text: str) -> bool:
    """Whether a header may hold it, as it is once the blanks around it are gone."""
    return _HEADER_VALUE.fullmatch(text.strip()) is not None


class Timeouts(Section):
    """How long a provider may take, in seconds."""

    connect: Positive = Field(10, description="To accept the connection, TLS included.")
    first_byte: Positive = Field(300, description="To begin its answer.")
    between_bytes: Positive = Field(120, description="Longest silence within an answer.")


class Tls(Section):
    """TLS towards a provider."""

    verify: bool = Field(default=True, description="Check the certificate.")
    ca_file: Path | None = Field(
        None, description="PEM file of certificate authorities to trust instead of the system's."
    )

    @field_validator("ca_file")
    @classmethod
    def _ca_file(cls, value: Path | None) -> Path | None:
        if value is not None:
            at_home(value)
        return value


class Breaker(Section):
    """When a provider is left alone."""

    failures: int = Field(5, ge=1, le=1000, description="Failed calls in a row after which it is left alone.")
    open_s: Positive = Field(15, description="For so many seconds; then one call asks whether it is well again.")


class Provider(Section):
    """One provider."""

    adapter: Literal["http", "litellm"] = Field(
        "http",
        description="http: it speaks the formats of its callers, which are forwarded. litellm: it speaks another, and "
        "calls are translated, see docs/guides/providers.md.",
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
        "and at 429, 502, 503, 521, 523 and 529. A Retry-After of up to 30 s, also as a date, is obeyed; "
        "where a fallback is left, of up to 2 s.",
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
    compaction: bool | None = Field(
        None,
        description="Whether it compacts conversations (/v1/responses with a compaction_trigger, "
        "/v1/responses/compact). false: the gateway does. null: so at hosts of OpenAI and Azure, never with adapter "
        "litellm; any other is asked, and the gateway compacts where it cannot.",
    )
    reports_cost: bool = Field(
        default=False,
        description="Its usage says what a call costs, in USD, as OpenRouter (cost), xAI (cost_in_usd_ticks) or "
        "Perplexity (cost.total_cost) write it: that is charged instead of list prices. Not read with adapter litellm.",
    )
    strict_fields: bool = Field(
        default=False,
        description="It refuses a request with a field that it does not know. Then session_id in a body, which names "
        "the session for the gateway, is not sent to it.",
    )
    billed_refusals: tuple[str, ...] | None = Field(
        None,
        description="Categories (stop_details.category) of a refusal before any output that it bills, as Anthropic "
        "does; one of another category, or of none, costs nothing. null: every call is charged as its usage says.",
    )

    @field_validator("key")
    @classmethod
    def _key(cls, value: SecretStr) -> SecretStr:
        if not is_sendable(value.get_secret_value()):
            raise ValueError(f"{UNSENDABLE}; look where it is read from: only visible ASCII characters can be sent")
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
            raise ValueError("must be an http:// or https:// address without query, like http://127.0.0.1:8000/v1")
        if "@" in match[2]:
            raise ValueError("must not hold a user name or password; use key:")
        if not is_address(value):
            raise ValueError("must name a host, and a port between 1 and 65535 where it names one")
        # Where it is put together, the first part may have ended with a slash too.
        path = re.sub("//+", "/", match[3] or "").rstrip("/")
        called = None if is_translated else _CALLED.search(path)
        if called is not None:
            raise ValueError(f"ends with the path of a call; give what stands before {called[0]}")
        return f"{match[1]}://{match[2]}{path or ('' if is_translated else '/v1')}"

    @property
    def holds_credential(self) -> bool:
        """Whether it has a key of the gateway's, or a header that holds one."""
        return bool(self.key.get_secret_value()) or any(name.encode() in CREDENTIALS for name in self.headers)

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
        if self.adapter == "litellm" and self.compaction:
            raise ValueError("compaction: true is not for adapter litellm, which cannot translate it; leave it out")
        if self.adapter == "http" and (self.litellm or self.options):
            raise ValueError("litellm and options are for adapter: litellm")
        return self

    @field_validator("headers")
    @classmethod
    def _headers(cls, value: dict[str, str]) -> dict[str, str]:
        for name, text in value.items():
            if not HEADER_NAME.fullmatch(name):
                raise ValueError(f"{name!r} is no header name")
            if name.lower().encode() in _WRITTEN:
                raise ValueError(f"{name!r} is written by the gateway for each request; leave it out")
            if not _HEADER_VALUE.fullmatch(text):
                raise ValueError(f"the value of {name!r} holds characters that no header may")
        return {name.lower(): text for name, text in value.items()}
