"""Define the settings under `callbacks:`."""

from __future__ import annotations

import re
from typing import Final, Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator

from gateway.config.section import HEADER_NAME, Section
from gateway.core.http.addresses import is_address
from gateway.core.http.signing import signing_key

_HEADER_VALUE: Final = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?")
#: what we say ourselves
_OURS: Final = frozenset({"content-type", "content-length", "host", "connection", "transfer-encoding", "user-agent"})
_DOTTED_PATH: Final = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*[.:][^\W\d]\w*")

EventName = Literal["on_usage", "on_finish", "on_step"]


class Webhook(Section):
    """A program elsewhere that is told of events."""

    url: str = Field(repr=False, description="Where events are sent with POST; only its host is ever logged.")
    events: tuple[EventName, ...] = Field(
        ("on_finish",),
        min_length=1,
        description="on_finish: a call ended; on_usage: it was charged; on_step: a session went on in its steps.",
    )
    secret: SecretStr | None = Field(
        None, description="whsec_ and Base64 of 24 to 64 random bytes: events are signed with it (Standard Webhooks)."
    )
    timeout_s: float = Field(10, gt=0, le=60, description="Longest wait for an answer, connecting included.")
    headers: dict[str, str] = Field({}, repr=False, description="Further headers, such as an Authorization.")

    @field_validator("url")
    @classmethod
    def _url(cls, value: str) -> str:
        is_one = is_address(value) and value.isascii() and not any(char.isspace() for char in value)
        if not is_one or urlsplit(value).fragment:
            raise ValueError("must be an address like https://app.example/hooks/gateway")
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
                raise ValueError(f"{name!r} is no name for a further header")
            if not _HEADER_VALUE.fullmatch(text):
                raise ValueError(f"the value of {name!r} must be visible ASCII characters")
        return {name.lower(): text for name, text in value.items()}


class Callbacks(Section):
    """Who is told of calls, besides the log."""

    webhooks: tuple[Webhook, ...] = Field((), max_length=16, description="Programs elsewhere, told over HTTP.")
    observers: tuple[str, ...] = Field(
        (),
        max_length=16,
        description="Your own Python, as package.module.Class: on_usage, on_finish and on_step of it are called. One "
        "object for each worker.",
    )

    @field_validator("observers")
    @classmethod
    def _observers(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not all(map(_DOTTED_PATH.fullmatch, value)):
            raise ValueError("must be dotted paths like package.module.Class")
        return value
