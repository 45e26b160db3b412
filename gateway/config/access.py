"""Define the settings of client keys and budgets."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Literal

from pydantic import Field, SecretStr, field_validator, model_validator

from gateway.config.section import Section, duration
from gateway.core.identity import ID_FORM, is_valid
from gateway.core.ledger.arithmetic import LEAST_USD, MOST_USD
from gateway.core.ledger.session_key import is_reserved


def _long_enough(key: SecretStr) -> SecretStr:
    if len(key.get_secret_value()) < 16:  # noqa: PLR2004  # 16 random characters are 80 bits and more
        raise ValueError("a key needs at least 16 characters")
    return key


def _alike(values: Sequence[str]) -> tuple[int, int] | None:
    """Where the first value stands that is there twice, and where again."""
    first: dict[str, int] = {}
    return next(((found, at) for at, value in enumerate(values) if (found := first.setdefault(value, at)) != at), None)


class KeyBudget(Section):
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


class ClientKey(Section):
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


class Auth(Section):
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

    @field_validator("keys")
    @classmethod
    def _distinct_keys(cls, keys: tuple[ClientKey, ...]) -> tuple[ClientKey, ...]:
        for what, values in (
            ("name", [key.name for key in keys]),
            ("key", [key.key.get_secret_value() for key in keys]),
        ):
            pair = _alike(values)
            if pair is not None:
                raise ValueError(f"keys[{pair[0]}] and keys[{pair[1]}] have the same {what}")
        return keys

    @field_validator("admin_key")
    @classmethod
    def _admin_key(cls, value: SecretStr | None) -> SecretStr | None:
        # An empty one (${ADMIN_KEY:-}) would be matched by an empty credential.
        return _long_enough(value) if value is not None and value.get_secret_value().strip() else None

    @model_validator(mode="after")
    def _distinct(self) -> Auth:
        secrets = [key.key.get_secret_value() for key in self.keys]
        if self.admin_key is not None and self.admin_key.get_secret_value() in secrets:
            raise ValueError("admin_key is a client's key too, who could then raise every budget; choose another")
        return self


class Budget(KeyBudget):
    """What a session may spend."""

    count_cached: float = Field(
        1.0, ge=0, le=1, description="What a cached input token counts in the token budget; 0.1: like its price."
    )
    warn_at: float = Field(0.8, ge=0, le=1, description="From this share on answers carry x-session-budget-warning.")
    modes: bool = Field(
        default=True,
        description="Tool results shrink as the budget does: raw above 50 % left, then table, below 20 % summary, "
        "below 5 % handle_only. Results that the model has not read yet are shown as tables at most while they fit.",
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
        description="Calls whose cost arises after their answer (batches, fine-tuning, videos, realtime "
        "sessions), while a budget in tokens or USD is in force: its holder is not charged for them.",
    )
    exhausted_status: Literal[400, 402, 429] = Field(
        400, description="Status of a refusal; many clients repeat the other two."
    )
    lease_s: float = Field(
        180, ge=5, le=3600, description="A hold not renewed for so long is settled from what was noted of it last."
    )
