"""Keep what reported usage teaches in memory, and write it to the store later.

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

from gateway.core.context_budget import LengthLimit
from gateway.core.counting.calibration import KEPT, Residual, is_telling, residuals_from
from gateway.core.errors import StoreUnavailable
from gateway.core.ledger.refusals import Allowance
from gateway.core.ports import Lessons, Observer
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
_LIMIT: Final = "window\n"
#: Seconds for which a limit is believed. Not for ever: while it is, nothing longer is sent that could refute it.
_LIMIT_S: Final = 3600.0
#: Seconds after which the store is asked again for a limit, which another worker may have been told by now. Numbers
#: need no such question: each write brings back those of all workers.
_LIMIT_FRESH_S: Final = 30.0
#: seconds for which a store that was away is not asked again for the same key
_UNAVAILABLE_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class _Said:
    """What a provider named for a model, and when (Unix seconds); 0 tokens: a longer call was answered."""

    limit: LengthLimit
    at: float


#: what is kept of one key
Known = tuple[Residual, ...] | _Said | None


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
    """Offsets of estimates by calibration key, and limits by model. `now`: Unix seconds, the same for all workers."""

    def __init__(
        self, store: Lessons, write_after_s: float = _WRITE_AFTER_S, now: Callable[[], float] = time.time
    ) -> None:
        self._store = store
        self._write_after_s = write_after_s
        self._now = now
        self._kept: dict[str, _Kept] = {}
        self._new_numbers: dict[str, list[Residual]] = {}
        self._new_limits: dict[str, _Said] = {}
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

    async def limit(self, provider: str, model: str) -> LengthLimit | None:
        """What the provider itself named when it refused a request for its length; None where it did not lately."""
        name = f"{provider}\n{model}"
        said: Known = self._new_limits.get(name)
        if said is None:
            said = await self._look_up(_LIMIT + name, _LIMIT_FRESH_S)
        if not isinstance(said, _Said) or abs(self._now() - said.at) >= _LIMIT_S:
            return None
        return said.limit if said.limit.tokens else None

    async def _look_up(self, key: str, fresh_s: float = math.inf) -> Known:
        """From memory, else from the store; while that is away, what was known before."""
        kept = self._kept.get(key)
        if kept is not None and self._now() < kept.until:
            return kept.known
        try:
            return self._keep(key, _known_from(await self._store.learned(key)), fresh_s)
        except StoreUnavailable:
            return self._keep(key, kept.known if kept is not None else None, _UNAVAILABLE_S)

    def _keep(self, key: str, known: Known, fresh_s: float) -> Known:
        if len(self._kept) >= _MOST_KEYS and key not in self._kept:
            del self._kept[next(iter(self._kept))]
        self._kept[key] = _Kept(known, self._now() + fresh_s)
        return known

    def record(self, call: CallRecord, totals: Totals | None, left: Allowance | None = None) -> None:
        """See `Observer.record`: what the provider reported of a call, less what was estimated."""
        del totals, left
        tokens, context = call.request_tokens, call.context
        if context is not None and not is_telling(tokens, context.estimate + context.kept, context.key):
            return
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
        """Forget a limit that is smaller than the input of a call that was answered."""
        name = f"{provider}\n{model}"
        kept = self._kept.get(_LIMIT + name)
        known = self._new_limits.get(name) or (kept.known if kept is not None else None)
        if isinstance(known, _Said) and 0 < known.limit.tokens < tokens:
            self.report_limit(provider, model, LengthLimit(0))

    def report(self, key: str, residual: Residual) -> None:
        """Note one more residual under a calibration key."""
        self._add(_OFFSETS + key, residual)

    def _add(self, key: str, number: Residual) -> None:
        if len(self._new_numbers) < _MOST_KEYS or key in self._new_numbers:
            self._new_numbers[key] = [*self._new_numbers.get(key, ()), number][-KEPT:]
            self._write_soon()

    def report_limit(self, provider: str, model: str, limit: LengthLimit) -> None:
        """Note the limit that a provider named; one of 0 tokens forgets it."""
        if len(self._new_limits) < _MOST_KEYS:
            self._new_limits[f"{provider}\n{model}"] = _Said(limit, self._now())
            self._write_soon()

    def _write_soon(self) -> None:
        if self._writing is None or self._writing.done():
            self._writing = asyncio.get_running_loop().create_task(self._write_later())

    async def _write_later(self) -> None:
        await asyncio.sleep(self._write_after_s)
        await self._write()

    async def _write(self) -> None:
        """Offer what is new; what the store does not take now is offered with the next lessons."""
        numbers, limits = self._new_numbers, self._new_limits
        lessons: dict[str, Lesson] = {key: _one_more(new) for key, new in numbers.items()}
        lessons |= {_LIMIT + name: _lesson(said) for name, said in limits.items()}
        if not lessons:
            return
        self._new_numbers, self._new_limits = {}, {}
        names = list(lessons)
        for start in range(0, len(names), _SLICE):
            try:
                now = await self._store.learn({name: lessons[name] for name in names[start : start + _SLICE]})
            except StoreUnavailable:
                # What was written before must not be taught twice.
                self._put_back(names[start:], numbers, limits)
                return
            for key, value in now.items():
                fresh_s = _LIMIT_FRESH_S if key.startswith(_LIMIT) else math.inf
                self._keep(key, _known_from(value), fresh_s)

    def _put_back(
        self, names: Sequence[str], numbers: Mapping[str, list[Residual]], limits: Mapping[str, _Said]
    ) -> None:
        """Offer lessons again, before those that are newer."""
        for name in names:
            if name in numbers:
                self._new_numbers[name] = [*numbers[name], *self._new_numbers.get(name, ())][-KEPT:]
            else:
                model = name.removeprefix(_LIMIT)
                self._new_limits.setdefault(model, limits[model])

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


def _lesson(said: _Said) -> Lesson:
    tokens, of_input = said.limit
    return lambda _: msgspec.json.encode({"window": tokens, "of_input": of_input, "at": said.at})


def _decode(value: bytes | None) -> object:
    if value is None:
        return None
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.json.decode(value)
    return None


def _known_from(value: bytes | None) -> Known:
    """Numbers, or a limit; None for nothing, and for what is none of ours."""
    found = _decode(value)
    if isinstance(found, list):
        return residuals_from(found)
    if isinstance(found, dict):
        return _said_from(found)
    return None


def _said_from(found: Mapping[str, object]) -> _Said | None:
    tokens, at = found.get("window"), found.get("at")
    if type(tokens) is not int or tokens <= 0 or not isinstance(at, (int, float)):
        return None
    return _Said(LengthLimit(tokens, found.get("of_input") is True), at)
