"""What reported usage teaches, kept in memory for the next call and written to the store behind the calls.

A lesson that is lost with its process is learned again within a few calls, so nothing here is waited for. Several
workers add to the same keys: each lesson is a function of what is known, and what comes back is everybody's.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from gateway.core.allowance import Allowance
from gateway.core.counting.calibration import KEPT, Residual, residuals_from
from gateway.core.errors import StoreUnavailable
from gateway.core.ports import Observer, Store
from gateway.core.record import CallRecord
from gateway.core.stored import Lesson
from gateway.core.usage import Totals
from gateway.core.values import dataclass

#: keys that are kept in memory; a key is a provider, a model and a kind of request
_MOST_KEYS: Final = 4096
#: keys of one write: a few hundred take half a millisecond
_SLICE: Final = 500
_WRITE_AFTER_S: Final = 1.0
#: what the keys in the store begin with, by what is kept under them
_OFFSETS: Final = "offsets\n"
_SURPRISES: Final = "surprises\n"
_FRAMES: Final = "frames\n"
_WINDOW: Final = "window\n"
#: Seconds for which a window is believed. Not for ever: while it is, nothing longer is sent that could refute it.
_WINDOW_S: Final = 3600.0
#: Seconds after which the store is asked again for a window, which another worker may have been told by now. Numbers
#: need no such question: each write brings back those of all workers.
_WINDOW_FRESH_S: Final = 30.0
#: seconds for which a store that was away is not asked again for the same key
_AWAY_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class _Window:
    """The window that a provider named for a model, and when (Unix seconds); 0 tokens: a longer call was answered."""

    tokens: int
    at: float


#: what is kept of one key
Known = tuple[Residual, ...] | _Window | None


class _Kept(NamedTuple):
    """What is known of a key, and until when (Unix seconds) that holds without asking the store."""

    known: Known
    until: float


class Taught(NamedTuple):
    """What earlier calls taught under a calibration key, each the newest last.

    Attributes:
        offsets: the last residuals, reported less estimated tokens.
        surprises: the last reported less expected tokens.
        frames: what frames added in the last sessions, and over how many.
    """

    offsets: tuple[Residual, ...]
    surprises: tuple[Residual, ...]
    frames: tuple[Residual, ...]


class Learner(Observer):
    """Offsets of estimates by calibration key, and windows by model. `now`: Unix seconds, the same for all workers."""

    def __init__(
        self, store: Store, write_after_s: float = _WRITE_AFTER_S, now: Callable[[], float] = time.time
    ) -> None:
        self._store = store
        self._write_after_s = write_after_s
        self._now = now
        self._kept: dict[str, _Kept] = {}
        self._new_numbers: dict[str, list[Residual]] = {}
        self._new_windows: dict[str, _Window] = {}
        self._writing: asyncio.Task[None] | None = None

    async def taught(self, key: str) -> Taught:
        """What earlier calls taught under a calibration key."""
        found = []
        for name in (_OFFSETS + key, _SURPRISES + key, _FRAMES + key):
            kept = self._kept.get(name)
            known = kept.known if kept is not None and kept.until == math.inf else await self._look_up(name)
            new, numbers = self._new_numbers.get(name), known if isinstance(known, tuple) else ()
            found.append((*numbers, *new)[-KEPT:] if new else numbers)
        return Taught(*found)

    async def window(self, provider: str, model: str) -> int | None:
        """The window that the provider itself named when it refused a request; None where it did not lately."""
        name = f"{provider}\n{model}"
        said: Known = self._new_windows.get(name)
        if said is None:
            said = await self._look_up(_WINDOW + name, _WINDOW_FRESH_S)
        if not isinstance(said, _Window) or abs(self._now() - said.at) >= _WINDOW_S:
            return None
        return said.tokens or None

    async def _look_up(self, key: str, fresh_s: float = math.inf) -> Known:
        """From memory, else from the store; while that is away, what was known before."""
        kept = self._kept.get(key)
        if kept is not None and self._now() < kept.until:
            return kept.known
        try:
            return self._keep(key, _known_from(await self._store.learned(key)), fresh_s)
        except StoreUnavailable:
            return self._keep(key, kept.known if kept is not None else None, _AWAY_S)

    def _keep(self, key: str, known: Known, fresh_s: float) -> Known:
        if len(self._kept) >= _MOST_KEYS and key not in self._kept:
            del self._kept[next(iter(self._kept))]
        self._kept[key] = _Kept(known, self._now() + fresh_s)
        return known

    def record(self, call: CallRecord, totals: Totals | None, left: Allowance | None = None) -> None:
        """See `Observer.record`: what the provider reported of a call, less what was estimated."""
        del totals, left
        tokens, context = call.request_tokens, call.context
        if tokens:
            self._refute(call.provider, call.model, tokens)
        if not tokens or context is None:
            return
        last, surprise = context.reported(tokens), context.surprise(tokens)
        self.report(last.key, Residual(last.residual, context.estimate))
        if last.over:
            self._add(_FRAMES + last.key, Residual(last.added, last.over))
        if surprise is not None:
            self._add(_SURPRISES + last.key, Residual(surprise, context.estimate))

    def _refute(self, provider: str, model: str, tokens: int) -> None:
        """Forget a window that is smaller than the input of a call that was answered."""
        name = f"{provider}\n{model}"
        kept = self._kept.get(_WINDOW + name)
        known = self._new_windows.get(name) or (kept.known if kept is not None else None)
        if isinstance(known, _Window) and 0 < known.tokens < tokens:
            self.report_window(provider, model, 0)

    def report(self, key: str, residual: Residual) -> None:
        """Note one more residual under a calibration key."""
        self._add(_OFFSETS + key, residual)

    def _add(self, key: str, number: Residual) -> None:
        if len(self._new_numbers) < _MOST_KEYS or key in self._new_numbers:
            self._new_numbers[key] = [*self._new_numbers.get(key, ()), number][-KEPT:]
            self._write_soon()

    def report_window(self, provider: str, model: str, window: int) -> None:
        """Note the window (tokens) that a provider named; 0 forgets it."""
        if len(self._new_windows) < _MOST_KEYS:
            self._new_windows[f"{provider}\n{model}"] = _Window(window, self._now())
            self._write_soon()

    def _write_soon(self) -> None:
        if self._writing is None or self._writing.done():
            self._writing = asyncio.get_running_loop().create_task(self._write_later())

    async def _write_later(self) -> None:
        await asyncio.sleep(self._write_after_s)
        await self._write()

    async def _write(self) -> None:
        """Offer what is new; what the store does not take now is offered with the next lessons."""
        numbers, windows = self._new_numbers, self._new_windows
        lessons: dict[str, Lesson] = {key: _one_more(new) for key, new in numbers.items()}
        lessons |= {_WINDOW + name: _said(window) for name, window in windows.items()}
        if not lessons:
            return
        self._new_numbers, self._new_windows = {}, {}
        names = list(lessons)
        for start in range(0, len(names), _SLICE):
            try:
                now = await self._store.learn({name: lessons[name] for name in names[start : start + _SLICE]})
            except StoreUnavailable:
                # What was written before must not be taught twice.
                self._put_back(names[start:], numbers, windows)
                return
            for key, value in now.items():
                fresh_s = _WINDOW_FRESH_S if key.startswith(_WINDOW) else math.inf
                self._keep(key, _known_from(value), fresh_s)

    def _put_back(
        self, names: Sequence[str], numbers: Mapping[str, list[Residual]], windows: Mapping[str, _Window]
    ) -> None:
        """Offer lessons again, before those that are newer."""
        for name in names:
            if name in numbers:
                self._new_numbers[name] = [*numbers[name], *self._new_numbers.get(name, ())][-KEPT:]
            else:
                model = name.removeprefix(_WINDOW)
                self._new_windows.setdefault(model, windows[model])

    async def aclose(self) -> None:
        """Write what is new, once."""
        if self._writing is not None:
            self._writing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._writing
        await self._write()


def _one_more(new: list[Residual]) -> Lesson:
    def lesson(known: bytes | None) -> bytes:
        return msgspec.json.encode((*residuals_from(_decode(known)), *new)[-KEPT:])

    return lesson


def _said(window: _Window) -> Lesson:
    return lambda _: msgspec.json.encode({"window": window.tokens, "at": window.at})


def _decode(value: bytes | None) -> object:
    if value is None:
        return None
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.json.decode(value)
    return None


def _known_from(value: bytes | None) -> Known:
    """Numbers, or a window; None for nothing, and for what is none of ours."""
    found = _decode(value)
    if isinstance(found, list):
        return residuals_from(found)
    if isinstance(found, dict):
        return _window_from(found.get("window"), found.get("at"))
    return None


def _window_from(tokens: object, at: object) -> _Window | None:
    return _Window(tokens, at) if type(tokens) is int and tokens > 0 and isinstance(at, (int, float)) else None
