"""Define the settings of a provider."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, Literal

from pydantic import Field, SecretStr, ValidationInfo, field_validator, model_validator

from gateway.config.section import HEADER_NAME, Positive, Section, expand_home
from gateway.core.http.addresses import is_address
from gateway.core.http.headers import AUTH_HEADER, CREDENTIALS, FRAMING, AuthStyle

_HEADER_VALUE: Final = re.compile(r"[\t\x20-\x7e]*")
#: headers that the gateway writes for each request; `host` may be set, for a provider that is called by its IP address
_WRITTEN: Final = FRAMING - {b"host"}
#: paths of calls, which do not belong to a base URL
_CALLED: Final = re.compile(r"/(?:chat/completions|responses|messages|completions|embeddings)\Z")
Format = Literal["chat", "responses", "messages", "completions", "embeddings"]
#: arguments of litellm's functions that come from the call or that the gateway sets
_NO_OPTIONS: Final = frozenset(
    {
        "model", "messages", "stream", "custom_llm_provider", "api_key", "api_base", "base_url", "timeout", "client",
        "num_retries", "max_retries", "fallbacks", "extra_headers", "extra_body", "mock_response", "callbacks",
    }
)  # fmt: skip


#: the message about a credential that cannot be sent
UNSENDABLE: Final = "contains a line break or another character that is not allowed in headers"


def is_sendable(text: str) -> bool:
    """Return whether a text can be a header value, ignoring blanks around it."""
    return _HEADER_VALUE.fullmatch(text.strip()) is not None


class Timeouts(Section):
    """Time limits of a provider in seconds."""

    connect: Positive = Field(10, description="Longest time to connect, including TLS.")
    first_byte: Positive = Field(300, description="Longest time until the response begins.")
    between_bytes: Positive = Field(120, description="Longest pause within a response.")


class Tls(Section):
    """TLS settings of a provider."""

    verify: bool = Field(default=True, description="Check the certificate of the provider.")
    ca_file: Path | None = Field(
        None, description="PEM file of certificate authorities to trust instead of the system's."
    )

    @field_validator("ca_file")
    @classmethod
    def _ca_file(cls, value: Path | None) -> Path | None:
        if value is not None:
            expand_home(value)
        return value


class Breaker(Section):
    """The circuit breaker of a provider."""

    failures: int = Field(
        5,
        ge=1,
        le=1000,
        description="Failed calls in a row that open the circuit: the provider is not called any more.",
    )
    open_s: Positive = Field(15, description="Seconds until one call probes the provider again.")


class Provider(Section):
    """One provider."""

    adapter: Literal["http", "litellm"] = Field(
        "http",
        description="http: forward calls in the format of the caller. litellm: translate calls into the provider's "
        "own format, see docs/guides/providers.md.",
    )
    litellm: str = Field(
        "",
        description="With adapter litellm: litellm's name of the provider, such as bedrock; empty: the name given "
        "here.",
    )
    options: dict[str, str] = Field(
        {},
        repr=False,
        description="With adapter litellm: additional arguments of litellm's functions, such as aws_region_name.",
    )
    base_url: str = Field(
        "",
        description="Base URL of its API, with the version segment. /v1 is added to a URL without a path. With "
        "adapter litellm: its api_base, unchanged; empty: litellm's default.",
    )
    key: SecretStr = Field(SecretStr(""), description="API key. Empty: the credential of the caller is forwarded.")
    auth: AuthStyle = Field(
        "bearer", description="How the key is sent: as a bearer token, in x-api-key or api-key, or not at all."
    )
    headers: dict[str, str] = Field({}, repr=False, description="Headers to add, unless the caller sends them.")
    dialects: tuple[Format, ...] | None = Field(
        None,
        description="Formats that it accepts. Calls in other formats go to the next provider of the model that "
        "accepts them, or are refused. null: unknown, so every call is sent.",
    )
    timeout_s: Timeouts = Field(Timeouts(), description="Time limits in seconds.")
    retries: int = Field(
        2,
        ge=0,
        le=10,
        description="Most retries before the first byte of a response: if no connection could be made, and for 429, "
        "502, 503, 521, 523 and 529. A Retry-After of up to 30 s (also as a date) is obeyed, or up to 2 s if a "
        "fallback is left.",
    )
    breaker: Breaker = Field(Breaker(), description="Circuit breaker: stop calling a provider that fails repeatedly.")
    max_connections: int = Field(1024, ge=1, description="Most connections from one worker.")
    tls: Tls = Field(Tls(), description="TLS settings.")
    key_prefixes: tuple[str, ...] = Field(
        (), description="Prefixes of its own keys. A key with the prefix of another provider is not sent to it."
    )
    limit_field: Literal["auto", "max_tokens", "max_completion_tokens"] = Field(
        "auto",
        description="Field for the output limit that a budget adds to a chat call without one. max_tokens also "
        "replaces max_completion_tokens, which this provider may ignore. auto: max_completion_tokens for hosts of "
        "OpenAI and Azure, otherwise max_tokens.",
    )
    allowed_tools: bool = Field(
        default=False,
        description="It accepts allowed_tools in tool_choice, like OpenAI. Steps then restrict tools without changing "
        "the list of tools, which keeps the prompt cache of the provider.",
    )
    compaction: bool | None = Field(
        None,
        description="It compacts conversations (/v1/responses with a compaction_trigger, /v1/responses/compact). "
        "false: the gateway compacts. null: true for hosts of OpenAI and Azure, false with adapter litellm; other "
        "providers are asked, and the gateway compacts if they cannot.",
    )
    reports_cost: bool = Field(
        default=False,
        description="Its usage contains the cost in USD, like that of OpenRouter (cost), xAI (cost_in_usd_ticks) or "
        "Perplexity (cost.total_cost). It is charged instead of list prices. Ignored with adapter litellm.",
    )
    strict_fields: bool = Field(
        default=False,
        description="It refuses requests with unknown fields. The field session_id, which names the session for the "
        "gateway, is then removed from bodies.",
    )
    billed_refusals: tuple[str, ...] | None = Field(
        None,
        description="Categories (stop_details.category) of refusals before any output that it bills, like Anthropic. "
        "Other refusals cost nothing. null: every call is charged by its usage.",
    )

    @field_validator("key")
    @classmethod
    def _key(cls, value: SecretStr) -> SecretStr:
        if not is_sendable(value.get_secret_value()):
            raise ValueError(f"{UNSENDABLE}; check where it is read from, only visible ASCII characters can be sent")
        return value

    @field_validator("key_prefixes")
    @classmethod
    def _key_prefixes(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if "" in value:
            raise ValueError("an empty prefix matches every key; leave it out")
        return value

    @field_validator("dialects")
    @classmethod
    def _dialects(cls, value: tuple[Format, ...] | None) -> tuple[Format, ...] | None:
        if value == ():
            raise ValueError("is empty; name formats, or leave it out to send every call")
        return value

    @field_validator("litellm")
    @classmethod
    def _litellm(cls, value: str) -> str:
        if value and not re.fullmatch(r"[a-z][a-z0-9_-]*", value):
            raise ValueError("must be a provider name of litellm, like bedrock or vertex_ai")
        return value

    @field_validator("options")
    @classmethod
    def _options(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            if name in _NO_OPTIONS or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
                raise ValueError(f"{name!r} is set by the gateway, or is not an argument of litellm")
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
            raise ValueError("must be an http:// or https:// URL without query, like http://127.0.0.1:8000/v1")
        if "@" in match[2]:
            raise ValueError("must not contain a user name or password; use key:")
        if not is_address(value):
            raise ValueError("must have a host, and optionally a port from 1 to 65535")
        # A URL that is put together from variables can contain two slashes in a row.
        path = re.sub("//+", "/", match[3] or "").rstrip("/")
        called = None if is_translated else _CALLED.search(path)
        if called is not None:
            raise ValueError(f"ends with the path of a call; remove {called[0]}")
        return f"{match[1]}://{match[2]}{path or ('' if is_translated else '/v1')}"

    @property
    def holds_credential(self) -> bool:
        """Return whether a key is configured, or a header that holds one."""
        return bool(self.key.get_secret_value()) or any(name.encode() in CREDENTIALS for name in self.headers)

    @model_validator(mode="after")
    def _key_is_sent(self) -> Provider:
        if not self.key.get_secret_value():
            return self
        if self.auth == "none":
            raise ValueError("auth: none sends no key; set auth: bearer, x-api-key or api-key")
        if AUTH_HEADER[self.auth].decode() in self.headers:
            raise ValueError(
                f"auth: {self.auth} sends the key as {AUTH_HEADER[self.auth].decode()}, which headers also has; remove "
                'it from headers, or set key: ""'
            )
        return self

    @model_validator(mode="after")
    def _one_adapter(self) -> Provider:
        if self.adapter == "litellm" and self.tls != Tls():
            raise ValueError("tls does not work with adapter: litellm; set SSL_CERT_FILE in the environment")
        if self.adapter == "litellm" and self.compaction:
            raise ValueError("compaction: true does not work with adapter: litellm; leave it out")
        if self.adapter == "http" and (self.litellm or self.options):
            raise ValueError("litellm and options need adapter: litellm")
        return self

    @field_validator("headers")
    @classmethod
    def _headers(cls, value: dict[str, str]) -> dict[str, str]:
        for name, text in value.items():
            if not HEADER_NAME.fullmatch(name):
                raise ValueError(f"{name!r} is not a valid header name")
            if name.lower().encode() in _WRITTEN:
                raise ValueError(f"{name!r} is set by the gateway for each request; leave it out")
            if not _HEADER_VALUE.fullmatch(text):
                raise ValueError(f"the value of {name!r} has characters that are not allowed in headers")
        return {name.lower(): text for name, text in value.items()}
