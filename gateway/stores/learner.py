"""Learn corrections of token estimates, and context limits, from what providers report; save them to the store later.

No call waits for a write: a lesson that is lost with its process is learned again within a few calls. Several workers
add to the same keys. So a lesson is a function of the stored value, and a write returns the lessons of all workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from gateway.core.bounded import BoundedDict
from gateway.core.context_budget import LengthLimit
from gateway.core.counting.calibration import MAX_RESIDUALS, Residual, is_plausible, residuals_from
from gateway.core.errors import StoreUnavailable
from gateway.core.ledger.refusals import Allowance
from gateway.core.ports import Lessons, Observer
from gateway.core.record import CallRecord
from gateway.core.stored import Lesson
from gateway.core.usage import Totals
from gateway.core.values import dataclass

#: Keys kept in memory. A key names a provider, a model and a kind of request.
_MOST_KEYS: Final = 4096
#: Keys of one write: a few hundred take half a millisecond.
_KEYS_PER_WRITE: Final = 500
_WRITE_AFTER_S: Final = 1.0
#: prefixes of the keys in the store, by what is kept under them
_OFFSETS: Final = "offsets\n"
_SURPRISES: Final = "surprises\n"
_FRAMES: Final = "frames\n"
_OUTPUTS: Final = "outputs\n"
_LIMIT: Final = "window\n"
#: Seconds for which a limit is trusted. It has to end: meanwhile no longer request is sent that could refute the limit.
_LIMIT_S: Final = 3600.0
#: Seconds after which the store is asked again for a limit, which another worker may have learned since. Numbers are
#: not asked for again: each write returns those of all workers.
_LIMIT_FRESH_S: Final = 30.0
#: Seconds for which the store is not asked again for a key after it was unavailable.
_UNAVAILABLE_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class _ReportedLimit:
    """The limit that a provider reported for a model, and when (Unix seconds).

    0 tokens: the limit was refuted, as a longer call got a response.
    """

    limit: LengthLimit
    at: float


#: the value of one key
Known = tuple[Residual, ...] | _ReportedLimit | None


class _Kept(NamedTuple):
    """The value of a key, and until when (Unix seconds) it is used without asking the store."""

    known: Known
    until: float


class Taught(NamedTuple):
    """The lessons of earlier calls under one calibration key, each list with the newest last.

    Attributes:
        offsets: the last residuals: reported minus estimated tokens.
        surprises: the last differences: reported minus expected tokens.
        frames: tokens that frames added in the last sessions, and the number of frames.
    """

    offsets: tuple[Residual, ...]
    surprises: tuple[Residual, ...]
    frames: tuple[Residual, ...]


class Learner(Observer):
    """Learns offsets of estimates by calibration key, and limits by model.

    `now` returns Unix seconds, as limits are shared with other workers.
    """

    def __init__(
        self, store: Lessons, write_after_s: float = _WRITE_AFTER_S, now: Callable[[], float] = time.time
    ) -> None:
        self._store = store
        self._write_after_s = write_after_s
        self._now = now
        self._kept = BoundedDict[str, _Kept](_MOST_KEYS)
        self._new_numbers: dict[str, list[Residual]] = {}
        self._new_limits: dict[str, _ReportedLimit] = {}
        self._writing: asyncio.Task[None] | None = None

    async def lessons(self, key: str) -> Taught:
        """Return what earlier calls taught under a calibration key."""
        return Taught(*[await self._numbers(name + key) for name in (_OFFSETS, _SURPRISES, _FRAMES)])

    async def _numbers(self, name: str) -> tuple[Residual, ...]:
        """Return the numbers of a key, with those that are not written yet."""
        kept = self._kept.get(name)
        known = kept.known if kept is not None and kept.until == math.inf else await self._look_up(name)
        numbers = known if isinstance(known, tuple) else ()
        if name in self._new_numbers:
            numbers = (*numbers, *self._new_numbers[name])[-MAX_RESIDUALS:]
        return numbers

    async def outputs(self, provider: str, model: str) -> tuple[int, ...]:
        """Return the output tokens of the last responses of a model that no limit shortened, the newest last."""
        numbers = await self._numbers(f"{_OUTPUTS}{provider}\n{model}")
        return tuple([number.tokens for number in numbers])

    def report_output(self, provider: str, model: str, tokens: int) -> None:
        """Add the output tokens of a response of a model that no limit shortened."""
        self._add(f"{_OUTPUTS}{provider}\n{model}", Residual(tokens, 0))

    async def limit(self, provider: str, model: str) -> LengthLimit | None:
        """Return the limit that the provider named when it refused a request as too long, or None.

        Limits older than an hour do not count.
        """
        name = f"{provider}\n{model}"
        known: Known = self._new_limits.get(name)
        if known is None:
            known = await self._look_up(_LIMIT + name, _LIMIT_FRESH_S)
        if not isinstance(known, _ReportedLimit) or abs(self._now() - known.at) >= _LIMIT_S:
            return None
        return known.limit if known.limit.tokens else None

    async def _look_up(self, key: str, fresh_s: float = math.inf) -> Known:
        """Return a value from memory, else from the store; while the store is unavailable, the last known value."""
        kept = self._kept.get(key)
        if kept is not None and self._now() < kept.until:
            return kept.known
        try:
            return self._keep(key, _known_from(await self._store.learned(key)), fresh_s)
        except StoreUnavailable:
            return self._keep(key, kept.known if kept is not None else None, _UNAVAILABLE_S)

    def _keep(self, key: str, known: Known, fresh_s: float) -> Known:
        self._kept[key] = _Kept(known, self._now() + fresh_s)
        return known

    def record(self, call: CallRecord, totals: Totals | None, left: Allowance | None = None) -> None:
        """See `Observer.record`: learn from the difference between reported and estimated tokens."""
        del totals, left
        tokens, context = call.request_tokens, call.context
        if context is not None and not is_plausible(tokens, context.estimate + context.kept, context.key):
            return
        if tokens:
            self._refute(call.provider, call.model, tokens)
        if not tokens or context is None:
            return
        last, surprise = context.reported(tokens), context.surprise(tokens)
        self.report(last.key, Residual(last.residual, context.estimate))
        if call.is_compaction:
            return  # it is far larger than the last turn, which says little about the error from one turn to the next
        if last.over:
            self._add(_FRAMES + last.key, Residual(last.added, last.over))
        if surprise is not None:
            self._add(_SURPRISES + last.key, Residual(surprise, context.estimate))

    def _refute(self, provider: str, model: str, tokens: int) -> None:
        """Forget a limit that is smaller than the input of a call that got a response."""
        name = f"{provider}\n{model}"
        kept = self._kept.get(_LIMIT + name)
        known = self._new_limits.get(name) or (kept.known if kept is not None else None)
        if isinstance(known, _ReportedLimit) and 0 < known.limit.tokens < tokens:
            self.report_limit(provider, model, LengthLimit(0))

    def report(self, key: str, residual: Residual) -> None:
        """Add a residual under a calibration key."""
        self._add(_OFFSETS + key, residual)

    def _add(self, key: str, number: Residual) -> None:
        if len(self._new_numbers) < _MOST_KEYS or key in self._new_numbers:
            self._new_numbers[key] = [*self._new_numbers.get(key, ()), number][-MAX_RESIDUALS:]
            self._write_soon()

    def report_limit(self, provider: str, model: str, limit: LengthLimit) -> None:
        """Save the limit that a provider named; 0 tokens forget the known limit."""
        if len(self._new_limits) < _MOST_KEYS:
            self._new_limits[f"{provider}\n{model}"] = _ReportedLimit(limit, self._now())
            self._write_soon()

    def _write_soon(self) -> None:
        if self._writing is None or self._writing.done():
            self._writing = asyncio.get_running_loop().create_task(self._write_later())

    async def _write_later(self) -> None:
        await asyncio.sleep(self._write_after_s)
        await self._write()

    async def _write(self) -> None:
        """Write new lessons to the store; those that it does not take are written with the next ones."""
        numbers, limits = self._new_numbers, self._new_limits
        lessons: dict[str, Lesson] = {key: _add_numbers(new) for key, new in numbers.items()}
        lessons |= {_LIMIT + name: _replace_limit(reported) for name, reported in limits.items()}
        if not lessons:
            return
        self._new_numbers, self._new_limits = {}, {}
        names = list(lessons)
        for start in range(0, len(names), _KEYS_PER_WRITE):
            try:
                now = await self._store.learn({name: lessons[name] for name in names[start : start + _KEYS_PER_WRITE]})
            except StoreUnavailable:
                # Only the rest: lessons written before must not be added twice.
                self._put_back(names[start:], numbers, limits)
                return
            for key, value in now.items():
                fresh_s = _LIMIT_FRESH_S if key.startswith(_LIMIT) else math.inf
                self._keep(key, _known_from(value), fresh_s)

    def _put_back(
        self, names: Sequence[str], numbers: Mapping[str, list[Residual]], limits: Mapping[str, _ReportedLimit]
    ) -> None:
        """Queue lessons again, before newer ones."""
        for name in names:
            if name in numbers:
                self._new_numbers[name] = [*numbers[name], *self._new_numbers.get(name, ())][-MAX_RESIDUALS:]
            else:
                model = name.removeprefix(_LIMIT)
                self._new_limits.setdefault(model, limits[model])

    async def aclose(self) -> None:
        """Write new lessons, with a single try."""
        if self._writing is not None:
            self._writing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._writing
        await self._write()


def _add_numbers(new: list[Residual]) -> Lesson:
    def lesson(known: bytes | None) -> bytes:
        return msgspec.json.encode((*residuals_from(_decode(known)), *new)[-MAX_RESIDUALS:])

    return lesson


def _replace_limit(reported: _ReportedLimit) -> Lesson:
    tokens, of_input = reported.limit
    return lambda _: msgspec.json.encode({"window": tokens, "of_input": of_input, "at": reported.at})


def _decode(value: bytes | None) -> object:
    if value is None:
        return None
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.json.decode(value)
    return None


def _known_from(value: bytes | None) -> Known:
    """Return the numbers or the limit of a stored value; None if it is absent or has another form."""
    decoded = _decode(value)
    if isinstance(decoded, list):
        return residuals_from(decoded)
    if isinstance(decoded, dict):
        return _limit_from(decoded)
    return None


def _limit_from(fields: Mapping[str, object]) -> _ReportedLimit | None:
    tokens, at = fields.get("window"), fields.get("at")
    if type(tokens) is not int or tokens <= 0 or not isinstance(at, (int, float)):
        return None
    return _ReportedLimit(LengthLimit(tokens, fields.get("of_input") is True), at)
