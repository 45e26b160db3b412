"""A session's state as a store keeps it: JSON, read once as long as it does not change."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import msgspec

from gateway.core.session import SessionState

_STATES: Final = msgspec.json.Decoder(SessionState)
#: states that stay decoded; one that was trimmed a few hundred times takes 0.1 ms to read
_DECODED: Final = 256
_EMPTY: Final = SessionState()


def written(state: SessionState) -> bytes:
    """What `read` reads."""
    return msgspec.json.encode(state)


def read(value: object) -> SessionState:
    """What is no state of ours is none: the session's next request is looked at as if it were its first."""
    try:
        return _decoded(value) if isinstance(value, bytes) else _EMPTY
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return _EMPTY


@lru_cache(_DECODED)
def _decoded(value: bytes) -> SessionState:
    """The value has just been read, so nothing here is older than the store."""
    return _STATES.decode(value)
