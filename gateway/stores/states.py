"""Encode and decode a session's state as JSON, and cache decoded ones."""

from __future__ import annotations

from threading import Lock
from typing import Final, Generic, TypeVar

import msgspec

from gateway.core.bounded import BoundedDict
from gateway.core.session import Places, SessionState
from gateway.core.steps import StepState

T = TypeVar("T")

_EMPTY: Final = SessionState()
#: states that stay decoded: to decode one of a session that was trimmed a few hundred times takes 0.1 ms
_MOST: Final = 256


class _Known(Generic[T]):
    """Decoded values, found by their encoded bytes: a state that has changed has other bytes, so none is out of date.

    Those that came last are kept. `none`: the value of bytes that cannot be decoded.
    """

    def __init__(self, kind: type[T], none: T) -> None:
        self._decoder = msgspec.json.Decoder(kind)
        self._none = none
        self._values = BoundedDict[bytes, T](_MOST)
        self._lock = Lock()

    def written(self, value: T) -> bytes:
        encoded = msgspec.json.encode(value)
        self._put(encoded, value)
        return encoded

    def read(self, encoded: object) -> T:
        if not isinstance(encoded, bytes):
            return self._none
        known = self._values.get(encoded)
        if known is not None:
            return known
        try:
            value = self._decoder.decode(encoded)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return self._none
        self._put(encoded, value)
        return value

    def _put(self, encoded: bytes, value: T) -> None:
        with self._lock:
            self._values[encoded] = value


_STATES: Final = _Known(SessionState, _EMPTY)
_PLACES: Final = _Known[Places](dict[str, StepState], _EMPTY.steps)


def written(state: SessionState) -> bytes:
    """The state as `read` takes it. It stays known here: the session's next call in this worker need not decode it."""
    return _STATES.written(state)


def read(value: object) -> SessionState:
    """A state; an empty one where it cannot be read: the session's next request is then treated as its first."""
    return _STATES.read(value)


def written_steps(steps: Places) -> bytes:
    """The steps of a state, for a store that keeps them apart from its rest."""
    return _PLACES.written(steps)


def read_steps(value: object) -> Places:
    """The steps that `written_steps` wrote; none where they cannot be read: each agent then begins anew."""
    return _PLACES.read(value)
