"""List the settings that a reload cannot change, because they are read only at the start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from gateway.config.schema import Settings
from gateway.config.section import Section

_SECTIONS: Final = ("store", "calls", "usage", "audit", "sinks", "telemetry", "callbacks")
_CONTEXT_KEYS: Final = ("families", "memory_mb")
_SERVER_KEYS: Final = (
    "host",
    "port",
    "workers",
    "max_header_kb",
    "header_timeout_s",
    "cors_origins",
    "shutdown_grace_s",
    "dashboard",
)


def reloaded(started: Settings, read: Settings) -> tuple[Settings, list[str]]:
    """Return the settings after a reload, and the paths of changed keys that need a restart."""
    # A Redis store gets the ttl when it is opened. Other stores get it with each hourly cleanup.
    session_keys = ("ttl",) if started.store.is_redis else ()
    kept: dict[str, Any] = {name: getattr(started, name) for name in _SECTIONS}
    kept["server"] = _with(read.server, started.server, _SERVER_KEYS)
    kept["context"] = _with(read.context, started.context, _CONTEXT_KEYS)
    kept["sessions"] = _with(read.sessions, started.sessions, session_keys)
    in_force = read.model_copy(update=kept)
    return in_force, list(_different(in_force, read, ""))


def _with(read: Section, started: Section, keys: tuple[str, ...]) -> Section:
    return read.model_copy(update={key: getattr(started, key) for key in keys})


def _different(one: Section, other: Section, prefix: str) -> Iterator[str]:
    """Yield the paths of keys with different values. Values are not returned, because they can be secrets."""
    for name in type(one).model_fields:
        value, other_value, path = getattr(one, name), getattr(other, name), f"{prefix}{name}"
        if isinstance(value, Section) and isinstance(other_value, Section):
            yield from _different(value, other_value, f"{path}.")
        elif value != other_value:
            yield path
