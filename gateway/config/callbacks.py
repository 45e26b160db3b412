"""Define the settings under `callbacks:`."""

from __future__ import annotations

import re
from typing import Final, Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator

from gateway.config.section import HEADER_NAME, Section
from gateway.core.http.addresses import is_address
from gateway.core.http.signing import signing_key
from gateway.core.ledger.thresholds import DEFAULT_THRESHOLDS

_HEADER_VALUE: Final = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?")
#: headers that the gateway sets
_OURS: Final = frozenset({"content-type", "content-length", "host", "connection", "transfer-encoding", "user-agent"})
_DOTTED_PATH: Final = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*[.:][^\W\d]\w*")

EventName = Literal["on_usage", "on_finish", "on_step", "on_budget", "on_runaway"]
BodyFormat = Literal["event", "slack", "text"]
_MOST_THRESHOLDS: Final = 10
_MAX_PERCENT: Final = 100


class Webhook(Section):
    """A program that receives events over HTTP."""

    url: str = Field(repr=False, description="URL to which events are sent with POST. Only its host is logged.")
    events: tuple[EventName, ...] = Field(
        ("on_finish",),
        min_length=1,
        description="on_finish: a call ended; on_usage: it was charged; on_step: a session changed its step or "
        "advanced in it; on_budget: a budget reached one of budget_thresholds; "
        "on_runaway: an agent reached a limit of runaway protection.",
    )
    format: BodyFormat = Field(
        "event",
        description="Body of a request: event: JSON with all fields; slack: a message for an incoming webhook of "
        "Slack; text: one line of plain text, for mail relays and chat programs.",
    )
    secret: SecretStr | None = Field(
        None,
        description="Secret that signs the events (Standard Webhooks): whsec_ and 24 to 64 random bytes as Base64.",
    )
    timeout_s: float = Field(
        10, gt=0, le=60, description="Longest wait for a response in seconds, including connecting."
    )
    headers: dict[str, str] = Field({}, repr=False, description="Additional headers, such as Authorization.")

    @field_validator("url")
    @classmethod
    def _url(cls, value: str) -> str:
        is_valid = is_address(value) and value.isascii() and not any(char.isspace() for char in value)
        if not is_valid or urlsplit(value).fragment:
            raise ValueError("must be a URL like https://app.example/hooks/gateway")
        return value

    @field_validator("secret")
    @classmethod
    def _secret(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            try:
                signing_key(value.get_secret_value())
            except ValueError:
                raise ValueError(
                    "must be whsec_ and 24 to 64 random bytes as Base64, such as whsec_$(openssl rand -base64 32)"
                ) from None
        return value

    @field_validator("headers")
    @classmethod
    def _headers(cls, value: dict[str, str]) -> dict[str, str]:
        for name, text in value.items():
            if not HEADER_NAME.fullmatch(name) or name.lower() in _OURS or name.lower().startswith("webhook-"):
                raise ValueError(f"{name!r} is not allowed as an additional header")
            if not _HEADER_VALUE.fullmatch(text):
                raise ValueError(f"the value of {name!r} must be visible ASCII characters")
        return {name.lower(): text for name, text in value.items()}


class Callbacks(Section):
    """Receivers of events, besides the log."""

    webhooks: tuple[Webhook, ...] = Field((), max_length=16, description="Programs that receive events over HTTP.")
    observers: tuple[str, ...] = Field(
        (),
        max_length=16,
        description="Your own Python classes, as package.module.Class. The gateway calls their methods on_usage, "
        "on_finish, on_step, on_budget and on_runaway. Each worker has its own object.",
    )
    budget_thresholds: tuple[int, ...] = Field(
        DEFAULT_THRESHOLDS,
        min_length=1,
        max_length=_MOST_THRESHOLDS,
        description="Used percentages of a budget at which on_budget is sent, once in each window.",
    )

    @field_validator("budget_thresholds")
    @classmethod
    def _budget_thresholds(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if not all(0 < one <= _MAX_PERCENT for one in value):
            raise ValueError(f"must be percentages from 1 to {_MAX_PERCENT}, such as [50, 80, 95, 100]")
        return tuple(sorted(set(value)))

    @field_validator("observers")
    @classmethod
    def _observers(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not all(map(_DOTTED_PATH.fullmatch, value)):
            raise ValueError("must be dotted paths like package.module.Class")
        return value
