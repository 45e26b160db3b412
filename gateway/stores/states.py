"""Encode and decode a session's state as JSON, and cache decoded ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from threading import Lock
from typing import Any, Final, Generic, TypeVar

import msgspec

from gateway.core.bounded import BoundedDict
from gateway.core.modes.unread import UnreadForm
from gateway.core.runaway import Works
from gateway.core.session import Places, SessionState
from gateway.core.steps import StepState
from gateway.core.thinking_origin import ThinkingOrigin
from gateway.core.tool_changes import ToolChange

T = TypeVar("T")

_EMPTY: Final = SessionState()
#: Decoded states to keep: decoding the state of a session that was trimmed a few hundred times takes 0.1 ms.
_MOST: Final = 256


class _DecodedCache(Generic[T]):
    """Cache the newest decoded values by their encoded bytes.

    A changed value has other bytes, so no cached value is out of date. `empty`: the value for bytes that cannot be
    decoded. Threads of SQLite use it as well, hence the lock.
    """

    def __init__(self, encode: Callable[[T], bytes], decode: Callable[[bytes], T], empty: T) -> None:
        self._encode = encode
        self._decode = decode
        self._empty = empty
        self._values = BoundedDict[bytes, T](_MOST)
        self._lock = Lock()

    def written(self, value: T) -> bytes:
        encoded = self._encode(value)
        self._put(encoded, value)
        return encoded

    def read(self, encoded: object) -> T:
        if not isinstance(encoded, bytes):
            return self._empty
        known = self._values.get(encoded)
        if known is not None:
            return known
        try:
            value = self._decode(encoded)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return self._empty
        self._put(encoded, value)
        return value

    def _put(self, encoded: bytes, value: T) -> None:
        with self._lock:
            self._values[encoded] = value


class _StoredState(msgspec.Struct, frozen=True, rename={"trim_decisions": "epochs"}):
    """The stored form of a `SessionState`, with the same fields in the same order.

    Its names must not change: versions of the gateway that share a store read each other's states.
    """

    trim_decisions: Mapping[str, Mapping[str, Any]] = _EMPTY.trim_decisions
    summaries: Mapping[str, str] = _EMPTY.summaries
    parent: str | None = None
    steps: Places = _EMPTY.steps
    sent_prefixes: Mapping[str, Mapping[str, Any]] = _EMPTY.sent_prefixes
    thinking: Mapping[str, tuple[ThinkingOrigin, ...]] = _EMPTY.thinking
    tool_changes: tuple[ToolChange, ...] = ()
    unread: Mapping[str, UnreadForm] = _EMPTY.unread
    cheaper_model: str | None = None
    works: Works = _EMPTY.works


_FIELDS: Final = _StoredState.__struct_fields__
_DECODER: Final = msgspec.json.Decoder(_StoredState)
_PLACES_DECODER: Final = msgspec.json.Decoder(dict[str, StepState])


def _encode_state(state: SessionState) -> bytes:
    return msgspec.json.encode(_StoredState(*[getattr(state, name) for name in _FIELDS]))


def _decode_state(encoded: bytes) -> SessionState:
    stored = _DECODER.decode(encoded)
    return SessionState(*[getattr(stored, name) for name in _FIELDS])


_STATES: Final = _DecodedCache(_encode_state, _decode_state, _EMPTY)
_PLACES: Final = _DecodedCache[Places](msgspec.json.encode, _PLACES_DECODER.decode, _EMPTY.steps)


def written(state: SessionState) -> bytes:
    """Return a state as JSON for `read`. It stays cached, so that the session's next call does not decode it."""
    return _STATES.written(state)


def read(value: object) -> SessionState:
    """Return a decoded state, or an empty one if it cannot be read: the next request is then treated as the first."""
    return _STATES.read(value)


def written_steps(steps: Places) -> bytes:
    """Return the steps of a state as JSON, for a store that keeps them separately."""
    return _PLACES.written(steps)


def read_steps(value: object) -> Places:
    """Return decoded steps, or none if they cannot be read: each agent then starts at its first step."""
    return _PLACES.read(value)
