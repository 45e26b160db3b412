"""Define the settings of the store."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final, Literal

from pydantic import Field, ValidationInfo, field_validator

from gateway.config.section import LARGEST, Section, expand_home
from gateway.core import redis_url

_MEMORY: Final = "memory://"
_SQLITE: Final = "sqlite://"
_DEFAULT: Final = "sqlite://~/.local/share/gateway/gateway.db"
_JOURNALS: Final = "~/.local/share/gateway/journal"


class StoreSettings(Section):
    """The store of sessions, budgets and call records."""

    url: str = Field(
        _DEFAULT,
        description="memory://, sqlite://PATH, redis://HOST:PORT/DB, redis+sentinel://HOST:PORT,…/SERVICE/DB, "
        "redis+cluster://HOST:PORT,…; rediss instead of redis: with TLS. Optional: USER:PASSWORD@ before the host, "
        "and options such as ssl_ca_certs=FILE after a question mark.",
        repr=False,
    )
    timeout_ms: int = Field(
        250,
        ge=1,
        le=LARGEST,
        description="Longest wait in milliseconds for one round trip to the store. A call makes several.",
    )
    on_failure: Literal["closed", "open"] = Field(
        "closed",
        description="The store is unavailable. closed: refuse calls with 503 store_unavailable; open: forward calls "
        "within what was last known to be left of each budget, and record everything when the store is back.",
    )
    journal: Literal["auto", "off"] | Path = Field(
        "auto",
        description="Folder for usage that the store has not confirmed. auto: next to the SQLite file, otherwise "
        "~/.local/share/gateway/journal; off: in memory only.",
    )

    @field_validator("url")
    @classmethod
    def _url(cls, value: str) -> str:
        if value.startswith(_SQLITE) and "?" in value:
            raise ValueError("sqlite://PATH takes no options; remove the question mark and what follows it")
        path = value.removeprefix(_SQLITE)
        if value == _MEMORY or (path and path != value):
            expand_home(path)
            return value
        try:
            redis_url.parse(value)
        except ValueError:
            if value.partition("://")[0] in redis_url.SCHEMES:
                raise
            raise ValueError(
                "must be memory://, sqlite://PATH, redis://HOST:PORT/DB, redis+sentinel://HOST:PORT,…/SERVICE/DB or "
                "redis+cluster://HOST:PORT,… (rediss… for TLS)"
            ) from None
        return value

    @field_validator("journal")
    @classmethod
    def _journal(cls, value: str | Path, others: ValidationInfo) -> str | Path:
        is_redis = str(others.data.get("url")).startswith("redis")
        if isinstance(value, Path) or (value == "auto" and is_redis):
            expand_home(_JOURNALS if value == "auto" else value)
        return value

    @property
    def shown_url(self) -> str:
        """Return the URL without passwords and options."""
        return redis_url.parse(self.url).shown if self.is_redis else self.url

    @property
    def is_memory(self) -> bool:
        """Return whether it exists only in the running gateway."""
        return self.url == _MEMORY

    @property
    def is_redis(self) -> bool:
        """Return whether it is a Redis: one server, sentinels or a cluster."""
        return self.url.startswith("redis")

    @property
    def journal_path(self) -> Path | None:
        """Return the folder of the journals, or None if there is none."""
        if self.journal == "off" or self.is_memory:
            return None
        store = self.sqlite_path
        if store is not None and not isinstance(self.journal, Path):
            return store.with_name(f"{store.name}-journals")
        folder = self.journal if isinstance(self.journal, Path) else Path(_JOURNALS)
        # Usage that waits for one store must not be settled in another one.
        place = str(store.absolute()) if store is not None else redis_url.parse(self.url).place
        return expand_home(folder) / hashlib.sha256(place.encode()).hexdigest()[:12]

    @property
    def mock_url(self) -> str:
        """Return the URL of a separate store for `gateway serve --mock`, so that trials change no real session."""
        if self.is_memory:
            return self.url
        store = self.sqlite_path or expand_home(_DEFAULT.removeprefix(_SQLITE))
        return f"{_SQLITE}{store.with_name(f'{store.stem}-mock{store.suffix}')}"

    @property
    def sqlite_path(self) -> Path | None:
        """Return the SQLite file, or None for another kind of store."""
        return expand_home(self.url.removeprefix(_SQLITE)) if self.url.startswith(_SQLITE) else None
