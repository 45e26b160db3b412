"""List the settings that a reload cannot change, because they are read only at the start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from gateway.config.schema import Settings
from gateway.config.section import Section

_SECTIONS: Final = ("store", "telemetry", "callbacks")
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
    """What a reload puts into force, and the key paths that were changed and stay as they were started."""
    # A Redis store was opened with the ttl, which it sets on each session; others are given it every hour.
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
    """The paths of keys whose values are not the same. No value is named: it may be a secret."""
    for name in type(one).model_fields:
        ours, theirs, path = getattr(one, name), getattr(other, name), f"{prefix}{name}"
        if isinstance(ours, Section) and isinstance(theirs, Section):
            yield from _different(ours, theirs, f"{path}.")
        elif ours != theirs:
            yield path
