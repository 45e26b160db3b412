"""Learn the difference between estimated and reported input tokens.

The errors that remain after `estimate.py` are constants. A provider adds them to each request or to each frame. Frames
are the tool calls or messages of a request, see `Estimate.frames`. The gateway therefore learns offsets, not ratios:

- per provider, model, wire format and shape of the request: the median of the last residuals;
- per session: the residual of the last turn, which takes precedence.

If the residuals of a key differ, the part above the residual nearest to 0 is assumed to grow with the request. So the
residual of a large request is not added to a small request in full.

The residual of a session changes by a number of tokens for each frame that is added or removed. This number is learned
too. Otherwise a trim that drops half of the calls of a session would keep the offset of all of them. It is learned per
session, because the IDs and results that clients send differ more between the sessions of a key than within one
session.

This module only computes: it takes a state, returns a new state, and both are plain JSON values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import median
from typing import Any, Final, NamedTuple

from gateway.core.counting.estimate import MESSAGE_MARKS, Estimate, Source
from gateway.core.values import dataclass

#: number of residuals that are kept for a key
MAX_RESIDUALS: Final = 16
#: The most that an offset may add to an estimate, in tokens, and the most that it may subtract, as a share of the
#: estimate. Hosts add system prompts of up to 5,000 tokens; no known host subtracts more than half.
_MAX_ADDED: Final = 8_192
_MAX_SUBTRACTED: Final = 0.6
#: Minimum margin above an estimate: a share of it, and the few tokens by which the estimates of small prompts are
#: wrong.
_MIN_MARGIN: Final = 0.02
_MIN_MARGIN_TOKENS: Final = 8
#: After this many estimates that followed the last turn of their session, their errors are a better guide than any
#: rule. Then the smaller share `_MIN_LEARNED_MARGIN` is the minimum margin.
_MANY_SURPRISES: Final = 8
_MIN_LEARNED_MARGIN: Final = 0.005
#: The tokens that a frame adds are averaged over at most this many frames. Older frames fade out.
_MAX_FRAMES: Final = 32
#: Maximum tokens that one frame can add: an ID of 20 tokens occurs in a call and in its result, and templates put
#: markers around both. A turn whose error per frame is larger has other causes.
_MAX_FRAME_TOKENS: Final = 64
#: number of keys whose usual tokens per frame are cached
_CACHED_KEYS: Final = 128
#: The most that earlier residuals may add to the margin: a share of the tokens, or a number of tokens, whichever is
#: more. One wrong report must not block a whole context window.
_MAX_ERROR_SHARE: Final = 0.25
_MAX_ERROR_TOKENS: Final = 1_024
#: `_MAX_REPORTED`: tokens; no context window is that large. `_MAX_FACTOR`: no tokenizer makes this many times the
#: tokens that the gateway counts for readable text.
_MAX_REPORTED: Final = 2**24
_MAX_FACTOR: Final = 8
#: The report of a whole request is at least this share of its estimate.
_MIN_REPORTED_SHARE: Final = 1 - _MAX_SUBTRACTED
#: A report of only the newest messages is at most this many times their estimate, plus a few tokens for their frames.
_MAX_NEWEST_FACTOR: Final = 2.5
#: marks of a request shape with parts whose size the request does not show
_INVISIBLE: Final = frozenset({"image", "media", "server", "sealed", "other", "kept"})


class Residual(NamedTuple):
    """The error of one estimate: reported minus estimated tokens, and the estimated tokens (0 if unknown)."""

    tokens: int
    estimate: int


@dataclass(frozen=True, slots=True)
class LastTurn:
    """The last reported turn of a session.

    Attributes:
        key: the calibration key of its request.
        residual: reported minus estimated tokens.
        frames: number of frames of its request, see `Estimate`; None if unknown.
        added: tokens by which the residual grew per added frame and fell per removed frame, over all turns so far.
        over: number of frames that were added or removed in those turns. It has this name in stored records.
    """

    key: str
    residual: int
    frames: int | None = None
    added: int = 0
    over: int = 0

    def followed_by(self, residual: int, frames: int | None) -> LastTurn:
        """Return the next reported turn of the session, which must have the same key."""
        new_frames = frames - self.frames if frames is not None and self.frames is not None else 0
        growth = residual - self.residual
        if abs(growth) > _MAX_FRAME_TOKENS * abs(new_frames):
            return LastTurn(self.key, residual, frames, self.added, self.over)
        added, over = self.added + (growth if new_frames > 0 else -growth), self.over + abs(new_frames)
        if over > _MAX_FRAMES:
            added, over = round(added * _MAX_FRAMES / over), _MAX_FRAMES
        return LastTurn(self.key, residual, frames, added, over)


@dataclass(frozen=True, slots=True)
class CorrectedEstimate:
    """An estimate, corrected by what was learned.

    Attributes:
        tokens: input tokens that the provider is expected to report.
        margin: tokens to keep free above that: trim and reserve with `tokens + margin`.
        offset: tokens added to the estimate by learning; negative if subtracted. It is part of `tokens`.
        source: `exact`, `calibrated`, or `learned` if the estimate was corrected.
        last: the last turn of the session if it was used for the correction, else None.
        frame: tokens of the offset per frame of the request; 0 if not learned.
    """

    tokens: int
    margin: int
    offset: int
    source: Source
    last: LastTurn | None = None
    frame: float = 0.0

    @property
    def safe_tokens(self) -> int:
        """Return the tokens plus the margin."""
        return self.tokens + self.margin


def calibration_key(provider: str, model: str, wire: str, shape: str) -> str:
    """Return the key under which residuals are stored.

    The shape names images, files and tools that the provider runs.
    """
    return f"{provider}\n{model}\n{wire}\n{shape}"


def can_be_trimmed_to(key: str, other: str) -> bool:
    """Return True if a request with one key may have the other key after some of its messages are dropped."""
    (endpoint, marks), (other_endpoint, other_marks) = map(_parts, (key, other))
    return endpoint == other_endpoint and other_marks <= marks and marks - other_marks <= MESSAGE_MARKS


def is_plausible(reported: int, estimate: int, key: str) -> bool:
    """Return True if the reported input tokens are plausible for this estimate, so that they can be learned from.

    The report is charged in any case. But a single mistake of a provider must not change the estimates of other
    requests.
    """
    if reported > _MAX_REPORTED or _is_too_little(reported, estimate, key):
        return False
    return reported <= _MAX_FACTOR * estimate + _MAX_ADDED or not _INVISIBLE.isdisjoint(_parts(key)[1])


def _is_too_little(reported: int, estimate: int, key: str) -> bool:
    """Return True if the text of the request must have more tokens than were reported."""
    return reported < _MIN_REPORTED_SHARE * estimate and _INVISIBLE.isdisjoint(_parts(key)[1])


def whole_request_tokens(reported: int, estimate: int, newest: int, before: LastTurn | None, key: str) -> int | None:
    """Return the input tokens of the whole request that a report implies, or None if they cannot be derived.

    Some servers (Ollama, llama.cpp) report only the tokens that were not in their prompt cache. Such a report covers
    the newest messages. The rest of the request is then assumed to have the expected tokens: at least its estimate.

    Args:
        reported: input tokens that the provider reported.
        estimate: estimated tokens of the request, before correction.
        newest: the part of the estimate after the last assistant message; 0 if unknown.
        before: the last turn of the session if it corrected the estimate, else None.
        key: the calibration key.
    """
    if not _is_too_little(reported, estimate, key):
        return reported
    if not _MIN_REPORTED_SHARE * newest <= reported <= _MAX_NEWEST_FACTOR * newest + _MAX_FRAME_TOKENS or not newest:
        return None
    return estimate - newest + max(0, before.residual if before is not None else 0) + reported


def _parts(key: str) -> tuple[str, set[str]]:
    endpoint, _, shape = key.rpartition("\n")
    return endpoint, {*shape.split("+")} - {""}


def correct_estimate(
    estimate: Estimate,
    key: str,
    residuals: Sequence[Residual] = (),
    last: LastTurn | None = None,
    surprises: Sequence[Residual] = (),
    *,
    frames: Sequence[Residual] = (),
    estimated: int | None = None,
) -> CorrectedEstimate:
    """Correct an estimate by the residuals of its key, and by the session's last turn if that had the same key.

    What a provider adds differs more between the sessions of a key than within one session. So there are two margins:

    - After a known last turn, the margin comes from `surprises`: the errors of earlier estimates of this kind.
    - Otherwise the margin comes from how far the residuals are apart.

    Args:
        estimate: the estimate.
        key: its calibration key.
        residuals: the last residuals of the key.
        last: the last turn of the session.
        surprises: reported minus expected tokens of estimates that followed the last turn of their session.
        frames: for other sessions of the key: the tokens that frames added, and the number of frames.
        estimated: tokens to correct instead of those of the estimate.
    """
    if estimated is None:
        estimated = estimate.tokens
    if last is not None and last.key == key:
        return _corrected_by_last_turn(estimate, estimated, last, surprises, frames)
    if not residuals:
        return CorrectedEstimate(estimated, _margin(estimate, estimated), 0, estimate.source)
    scaled = _scaled(residuals, estimated)
    typical = round(median(scaled))
    offset = _clamped(typical, estimated)
    tokens = estimated + offset
    return CorrectedEstimate(tokens, _margin(estimate, tokens, max(scaled) - typical, len(scaled)), offset, "learned")


def _corrected_by_last_turn(
    estimate: Estimate, estimated: int, last: LastTurn, surprises: Sequence[Residual], frames: Sequence[Residual]
) -> CorrectedEstimate:
    per_frame = _tokens_per_frame(last, frames)
    new_frames = estimate.frames - last.frames if last.frames is not None else 0
    offset = _clamped(last.residual + round(per_frame * new_frames), estimated)
    tokens = estimated + offset
    scaled = _scaled(surprises, estimated) or (0,)
    least_margin = _MIN_LEARNED_MARGIN if len(surprises) >= _MANY_SURPRISES else _MIN_MARGIN
    return CorrectedEstimate(
        tokens, _margin(estimate, tokens, max(scaled), len(scaled), least_margin), offset, "learned", last, per_frame
    )


def _tokens_per_frame(last: LastTurn, others: Sequence[Residual]) -> float:
    """Return the tokens that a frame adds: as observed in this session, or before that in other sessions."""
    return _mean(last.added, last.over, _usual_tokens_per_frame(tuple(others)) if others else 0.0)


@lru_cache(maxsize=_CACHED_KEYS)  # a turn asks several times
def _usual_tokens_per_frame(frames: tuple[Residual, ...]) -> float:
    return median([_mean(added, over) for added, over in frames])


def _mean(added: int, over: int, first: float = 0.0) -> float:
    """Return the average tokens per frame over `over` frames, plus one assumed frame that added `first` tokens.

    The assumed frame dampens the average, because the tokens that a single frame seems to add may be chance.
    """
    return max(-_MAX_FRAME_TOKENS, min(_MAX_FRAME_TOKENS, (first + added) / (1 + max(0, over))))


def largest_estimate(
    estimate: Estimate,
    key: str,
    residuals: Sequence[Residual],
    last: LastTurn | None,
    surprises: Sequence[Residual],
    *,
    frames: Sequence[Residual] = (),
    budget: int,
) -> int:
    """Return the largest estimate that stays within `budget`, including the tokens that are learned per frame.

    The rest of the offset and the margin are subtracted from the budget.
    """
    result = correct_estimate(estimate, key, residuals, last, surprises, frames=frames, estimated=budget)
    # The second pass takes the margin of the budget alone, not of the budget plus the offset.
    largest = max(0, budget - result.offset)
    result = correct_estimate(estimate, key, residuals, last, surprises, frames=frames, estimated=largest)
    return budget - result.margin - result.offset + round(result.frame * estimate.frames)


def _scaled(residuals: Sequence[Residual], tokens: int) -> Sequence[float]:
    """Return the residuals, scaled down to a request of `tokens` estimated tokens.

    The residual nearest to 0 is treated as a constant that is added to every request. The rest of a larger residual is
    assumed to grow with the request, so that a smaller request gets less of it.
    """
    if not residuals:
        return ()
    errors, estimates = zip(*residuals, strict=True)
    if max(estimates) <= tokens:
        return errors
    least = min(errors, key=abs)
    return [
        least + (error - least) * tokens / estimate if estimate > tokens else error for error, estimate in residuals
    ]


def _clamped(offset: int, tokens: int) -> int:
    return max(-int(tokens * _MAX_SUBTRACTED), min(_MAX_ADDED, offset))


def _margin(estimate: Estimate, tokens: int, seen: float = 0, reports: int = 0, least: float = _MIN_MARGIN) -> int:
    """Return the tokens to keep free above an estimate.

    The margin is the largest of: a minimum share, the largest error that was observed, and a doubt that shrinks with
    each report.

    Args:
        estimate: the estimate, which names its spread and its doubt.
        tokens: its corrected tokens.
        seen: the largest error by which earlier reports exceeded the corrected estimates.
        reports: the number of these reports.
        least: the minimum margin as a share of `tokens`.
    """
    doubt = (estimate.spread * tokens + estimate.doubt) / (1 + reports)
    return math.ceil(
        max(_MIN_MARGIN_TOKENS, least * tokens, min(seen, max(_MAX_ERROR_SHARE * tokens, _MAX_ERROR_TOKENS)), doubt)
    )


def residuals_from(value: Any) -> tuple[Residual, ...]:
    """Read stored residuals: a list of pairs, or of numbers without estimates. Anything else in the list is ignored."""
    items = value if isinstance(value, list) else []
    pairs = [item if isinstance(item, list) else [item, 0] for item in items]
    return tuple([Residual(*pair) for pair in pairs if [*map(type, pair)] == [int, int]])[-MAX_RESIDUALS:]
