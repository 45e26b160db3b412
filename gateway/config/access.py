"""Define the settings of client keys, bearer tokens and budgets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import date
from decimal import Decimal
from typing import Literal

from pydantic import Field, SecretStr, field_validator, model_validator

from gateway.config.section import Positive, Section, duration
from gateway.core.calling_agent import MAIN
from gateway.core.expiry import date_or_time
from gateway.core.http.addresses import is_private_address
from gateway.core.identity import ID_FORM, is_valid
from gateway.core.ledger.arithmetic import LEAST_USD, MOST_USD
from gateway.core.ledger.charging import ANY_AGENT
from gateway.core.ledger.closing import CLOSING_MESSAGE
from gateway.core.ledger.session_key import is_reserved
from gateway.core.ledger.windows import CALENDAR_UNITS, CalendarWindow, Window


def _long_enough(key: SecretStr) -> SecretStr:
    if len(key.get_secret_value()) < 16:  # noqa: PLR2004  # 16 random characters are at least 80 bits
        raise ValueError("a key needs at least 16 characters")
    return key


def _repeated(values: Sequence[str]) -> tuple[int, int] | None:
    """Return the positions of the first repeated value: first and second occurrence, or None."""
    first: dict[str, int] = {}
    return next(((seen, at) for at, value in enumerate(values) if (seen := first.setdefault(value, at)) != at), None)


class KeyBudget(Section):
    """The budget of a client key, for all its sessions together."""

    tokens: int | None = Field(None, ge=0, le=2**53, description="Most tokens; null: unlimited.")
    usd: Decimal | None = Field(None, ge=0, le=MOST_USD, description="Most US dollars; null: unlimited.")
    calls: int | None = Field(None, ge=0, le=2**53, description="Most calls; null: unlimited.")
    window: str | None = Field(
        None,
        description="The budget refills after this time, such as 1h or 1d, or at the beginning of each day, week or "
        "month (see timezone); null: never.",
    )

    @field_validator("usd")
    @classmethod
    def _usd(cls, value: Decimal | None) -> Decimal | None:
        if value is not None and 0 < value < LEAST_USD:
            raise ValueError(f"is less than a billionth of a dollar; use 0, or at least {LEAST_USD:f}")
        return value

    @field_validator("window")
    @classmethod
    def _window(cls, value: str | None) -> str | None:
        if value is not None and value not in CALENDAR_UNITS:
            try:
                duration(value)
            except ValueError as error:
                raise ValueError(f"{error}; or day, week or month") from None
        return value

    def window_in(self, zone: str) -> Window:
        """Return `window` in seconds, or by the calendar of a time zone."""
        unit = next((unit for unit in CALENDAR_UNITS if unit == self.window), None)
        if unit is not None:
            return CalendarWindow(unit, zone)
        return duration(self.window) if self.window is not None else None


class ClientKey(Section):
    """One client key."""

    name: str = Field(description="Name of the key. Its sessions are stored under this name.")
    key: SecretStr = Field(
        description="The key, at least 16 characters. Write ${VARIABLE} to keep it out of this file."
    )
    models: tuple[str, ...] = Field((), description="Shell patterns of the models that it may call; empty: all.")
    budget: KeyBudget = Field(KeyBudget(), description="Budget of all its sessions together.")
    rpm: int | None = Field(None, ge=1, le=2**53, description="Most requests per minute; null: unlimited.")
    expires: str | None = Field(
        None, description="Date or time (see timezone) from which its calls are refused; null: never."
    )

    group: str | None = Field(None, description="Group of auth.groups whose budget it shares; null: none.")

    @field_validator("expires", mode="before")
    @classmethod
    def _expires(cls, value: object) -> object:
        # YAML reads a date without quotes as a date.
        text = value.isoformat() if isinstance(value, date) else value
        if isinstance(text, str):
            date_or_time(text)
        return text

    @field_validator("name")
    @classmethod
    def _name(cls, value: str) -> str:
        if not is_valid(value):
            raise ValueError(f"use {ID_FORM}")
        if is_reserved(value):
            raise ValueError(
                "is reserved for callers without a key, and it would see their sessions; choose another name"
            )
        return value

    @field_validator("key")
    @classmethod
    def _key(cls, value: SecretStr) -> SecretStr:
        return _long_enough(value)


#: Signatures with a public key only. With a shared secret (HS256), each reader of the secret could make tokens.
SignatureAlgorithm = Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]


class TokenClaims(Section):
    """The claims of a token that name the caller and its groups."""

    name: str = Field(
        "sub",
        min_length=1,
        description="Claim with the name of the caller. Choose one that the identity provider never gives to another "
        "person. Its sessions are stored under jwt:NAME.",
    )
    group: str | None = Field(
        None,
        min_length=1,
        description="Claim with the group of the caller, or a list of groups. Names with dots are paths, such as "
        "realm_access.roles. null: groups are not read.",
    )


class TokenGroup(Section):
    """What each caller of a group may do."""

    models: tuple[str, ...] = Field((), description="Shell patterns of the models that it may call; empty: all.")
    budget: KeyBudget = Field(KeyBudget(), description="Budget of all sessions of one caller together.")
    rpm: int | None = Field(
        None, ge=1, le=2**53, description="Most requests per minute of one caller; null: unlimited."
    )
    admin: bool = Field(default=False, description="Its callers may use /api like the admin key.")


class TokenIssuer(Section):
    """The identity provider whose bearer tokens (JWT) are accepted like client keys."""

    issuer: str = Field(min_length=1, description="Issuer of the tokens, exactly as in their claim iss.")
    audience: str | tuple[str, ...] = Field(
        description="Audience of the gateway, or several. The claim aud must contain one of them."
    )
    jwks_url: str | None = Field(
        None, description="Address of the public keys (JWKS): https, or http on this machine. Set this or key_file."
    )
    key_file: str | None = Field(
        None,
        description="File with the public keys, in PEM or as JWKS. The path is relative to this file. A reload reads "
        "it again.",
    )
    algorithms: tuple[SignatureAlgorithm, ...] = Field(
        ("RS256", "ES256"), min_length=1, description="Accepted signature algorithms."
    )
    claims: TokenClaims = Field(TokenClaims(), description="Claims that name the caller and its groups.")
    groups: dict[str, TokenGroup] = Field(
        default_factory=dict,
        description="Rights of callers by group; the first group here that the caller is in applies. `*`: all others. "
        "Callers of no group here are refused. Empty: all callers are accepted, without limits.",
    )
    leeway_s: float = Field(60, ge=0, le=600, description="Accepted difference of the clocks in seconds.")

    @field_validator("audience")
    @classmethod
    def _audience(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not value or (isinstance(value, tuple) and not all(value)):
            raise ValueError("is empty; write the audience of the gateway")
        return value

    @field_validator("jwks_url")
    @classmethod
    def _jwks_url(cls, value: str | None) -> str | None:
        if value is not None and not is_private_address(value):
            raise ValueError(
                "must begin with https://, because an attacker who replaces the keys on their way can forge tokens; "
                "http:// is for localhost and 127.0.0.1 only"
            )
        return value

    @model_validator(mode="after")
    def _consistent(self) -> TokenIssuer:
        if (self.jwks_url is None) == (self.key_file is None):
            raise ValueError("needs either jwks_url or key_file")
        if self.groups and self.claims.group is None:
            raise ValueError("groups needs claims.group, the claim that names the groups of a caller")
        if self.claims.group is not None and not self.groups:
            raise ValueError("claims.group has no effect without groups; list the groups there, or remove it")
        return self

    @property
    def audiences(self) -> tuple[str, ...]:
        """Return `audience` as a list."""
        return (self.audience,) if isinstance(self.audience, str) else self.audience


class KeyGroup(Section):
    """A group of client keys."""

    budget: KeyBudget = Field(KeyBudget(), description="Budget of all client keys and tokens of this group together.")


class Auth(Section):
    """Client keys and the admin key."""

    keys: tuple[ClientKey, ...] = Field(
        (), description="Client keys. Without any key the gateway accepts every caller, so listen on loopback only."
    )
    groups: dict[str, KeyGroup] = Field(
        default_factory=dict,
        description="Groups of client keys that share a budget. A key names its group. A group of the same name in "
        "auth.jwt.groups shares it too.",
    )
    budget: KeyBudget = Field(KeyBudget(), description="Budget of all client keys and tokens together.")
    required: bool = Field(
        default=False,
        description="Refuse calls without a client key, even if no key is listed here. Set it if all keys are in the "
        "store (gateway keys).",
    )
    admin_key: SecretStr | None = Field(
        None, description="Key required for changes under /api. null: only callers on this machine may make changes."
    )
    jwt: TokenIssuer | None = Field(
        None,
        description="Identity provider whose bearer tokens are accepted like client keys. Needs the extra [jwt].",
    )

    @field_validator("keys")
    @classmethod
    def _distinct_keys(cls, keys: tuple[ClientKey, ...]) -> tuple[ClientKey, ...]:
        for what, values in (
            ("name", [key.name for key in keys]),
            ("key", [key.key.get_secret_value() for key in keys]),
        ):
            pair = _repeated(values)
            if pair is not None:
                raise ValueError(f"keys[{pair[0]}] and keys[{pair[1]}] have the same {what}")
        return keys

    @field_validator("groups")
    @classmethod
    def _groups(cls, groups: dict[str, KeyGroup]) -> dict[str, KeyGroup]:
        for name in groups:
            if not is_valid(name):
                raise ValueError(f"{name!r} cannot be the name of a group; use {ID_FORM}")
        return groups

    @field_validator("admin_key")
    @classmethod
    def _admin_key(cls, value: SecretStr | None) -> SecretStr | None:
        # An empty key (${ADMIN_KEY:-}) would match an empty credential.
        return _long_enough(value) if value is not None and value.get_secret_value().strip() else None

    @property
    def needs_credential(self) -> bool:
        """Return whether each call needs a client key or a token, even if the store has no client key."""
        return bool(self.keys) or self.required or self.jwt is not None

    @model_validator(mode="after")
    def _known_groups(self) -> Auth:
        for index, key in enumerate(self.keys):
            if key.group is not None and key.group not in self.groups:
                raise ValueError(f"keys[{index}].group: auth.groups has no group {key.group!r}")
        return self

    @model_validator(mode="after")
    def _distinct(self) -> Auth:
        secrets = [key.key.get_secret_value() for key in self.keys]
        if self.admin_key is not None and self.admin_key.get_secret_value() in secrets:
            raise ValueError(
                "admin_key is also a client key, and that client could raise every budget; choose another one"
            )
        return self


class Downgrade(Section):
    """The cheaper model that serves calls when little of a budget is left."""

    below: float = Field(
        0.2, gt=0, lt=1, description="Use it when less than this share, 0 to 1, of the most used budget is left."
    )
    model: str = Field(
        min_length=1,
        description="Cheaper model, named as in a call. A call that it cannot serve keeps its own model.",
    )


class Closing(Section):
    """The last call of a session whose budget is used up."""

    reserve: float = Field(
        0.1,
        gt=0,
        le=0.5,
        description="Share of each limit of the session, 0 to 0.5, that is kept for its closing call. At least one "
        "call is kept of a budget in calls.",
    )
    message: str = Field(
        CLOSING_MESSAGE,
        min_length=1,
        max_length=2000,
        description="Last instruction to the model in the closing call. {tokens}: the output tokens that it has left.",
    )

    @field_validator("message")
    @classmethod
    def _message(cls, value: str) -> str:
        if set(re.findall(r"{(.*?)}", value)) - {"tokens"}:
            raise ValueError("contains a name in braces other than {tokens}; leave it out")
        return value


class Budget(KeyBudget):
    """The budget of each session."""

    count_cached: float = Field(
        1.0, ge=0, le=1, description="How much a cached input token counts in token budgets; 0.1 is about its price."
    )
    warn_at: float = Field(
        0.8,
        ge=0,
        le=1,
        description="Used share of a budget, 0 to 1, at which responses begin to carry x-session-budget-warning.",
    )
    modes: bool = Field(
        default=True,
        description="Shorten tool results as the budget runs low: raw above 50 % left, then table, below 20 % "
        "summary, below 5 % handle_only. Results that the model has not read yet are at most reduced to tables while "
        "they fit.",
    )
    summary_model: str | None = Field(
        None,
        description="Model that summarizes large tool results in the mode summary, named as in a call. Its tokens are "
        "charged to the session. null: the gateway makes an extract without a call.",
    )
    downgrade: Downgrade | None = Field(
        None, description="A cheaper model for calls when little of a budget is left; null: none."
    )
    closing: Closing | None = Field(
        None,
        description="Let a session end with a result. When a call no longer fits the session's budget, it is sent once "
        "as the closing call: trimmed, without tool calls, with a last instruction. null: the call is refused.",
    )
    clamp_output: bool = Field(
        default=True,
        description="Lower the output limit of a call to what is left of the budget, instead of refusing the call.",
    )
    deferred: Literal["refuse", "forward"] = Field(
        "refuse",
        description="Calls that are billed after their response (batches, fine-tuning, videos, realtime sessions), if "
        "a budget in tokens or USD is in force. forward: they are not charged to the budget.",
    )
    exhausted_status: Literal[400, 402, 429] = Field(
        400, description="HTTP status of a refusal by a budget. Many clients retry 402 and 429."
    )
    agents: dict[str, KeyBudget] = Field(
        default_factory=dict,
        description="Budget of each subagent of a session, by the type or the id that its client sends. `*`: of all "
        "others. The calls of agents that a subagent starts count against its budget as well.",
    )
    lease_s: float = Field(
        180,
        ge=5,
        le=3600,
        description="A hold that is not renewed for this many seconds is settled with the usage last reported for it.",
    )
    seconds: Positive | None = Field(
        None,
        description="Longest time in seconds that a session may work without a new user message. Later calls are "
        "refused (400 session_stopped). null: unlimited.",
    )

    @field_validator("agents")
    @classmethod
    def _agents(cls, agents: dict[str, KeyBudget]) -> dict[str, KeyBudget]:
        for name in agents:
            if name == MAIN:
                raise ValueError(f"{name!r} is the whole session; set tokens, usd or calls of budget instead")
            if name != ANY_AGENT and not is_valid(name):
                raise ValueError(f"{name!r} cannot be the type or the id of an agent; use * or {ID_FORM}")
        return agents
