"""Learn the difference between estimated and reported tokens.

The errors that remain after `estimate.py` are constants that a provider adds, to a request or to each of its frames:
its calls of tools or its messages, see `Estimate.frames`. So offsets are learned, not ratios: per provider, model, wire
format and shape of the request the median of the last residuals, and per session the last turn's residual, which wins.
Where residuals differ, what one has beyond the one nearest to 0 is taken to grow with the request, so that the residual
of a large request is not added to a small one in full.

A session's residual changes as frames come and go, by so many tokens for each frame. These are learned too, or a cut
that leaves out half of a session's calls would keep the offset of them all. They are learned for each session: which
ids and which results a client sends differs more between sessions of a key than within one.

Pure values: a state goes in, a state comes out, and both are plain JSON.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import median
from typing import Any, Final, NamedTuple

from gateway.core.counting.estimate import OF_MESSAGES, Estimate, Source
from gateway.core.values import dataclass

#: residuals kept for a key
KEPT: Final = 16
#: The most that an offset may add to an estimate, in tokens, and take from it, as a share of it. Hosts add system
#: prompts of up to 5,000 tokens; nothing known takes more than half.
_MOST_ADDED: Final = 8_192
_MOST_TAKEN: Final = 0.6
#: what is always kept free above an estimate: a share of it, and the few tokens by which small prompts are off
_LEAST_MARGIN: Final = 0.02
_LEAST_TOKENS: Final = 8
#: After so many estimates that followed their session's last turn, what they were off by says more than any rule: then
#: this smaller share is kept free.
_WELL_KNOWN: Final = 8
_LEAST_KNOWN: Final = 0.005
#: What a frame adds is a mean over at most so many frames, in which older ones fade.
_FRAMES_KEPT: Final = 32
#: Tokens that a frame can add at the most: an id of 20 tokens stands in a call and in its result, beside the marks that
#: templates set round both. A turn that is off by more for each frame has other reasons.
_MOST_FRAME: Final = 64
#: what the frames of so many keys add is kept at hand
_STATES_KEPT: Final = 128
#: One strange report must not shut a window: the most that earlier residuals may add to the margin, as a share of the
#: tokens or in tokens, whichever is more.
_MOST_SEEN: Final = 0.25
_SOME_SEEN: Final = 1_024
#: No window is as large. And no tokenizer makes so many times the tokens that we count of what can be read here.
_MOST_REPORTED: Final = 2**24
_MOST_TIMES: Final = 8
#: What is reported of a whole request is no less than this share of its estimate.
_LEAST_REPORTED: Final = 1 - _MOST_TAKEN
#: A report of the newest messages alone is at most so many times their estimate, and a few tokens for their frames.
_MOST_OF_NEWEST: Final = 2.5
#: marks of a shape with parts whose size cannot be seen in the request
_UNSEEN: Final = frozenset({"image", "media", "server", "sealed", "other", "kept"})


class Residual(NamedTuple):
    """Of one request: reported less estimated tokens, and its estimated tokens (0 where these were not kept)."""

    tokens: int
    estimate: int


@dataclass(frozen=True, slots=True)
class LastTurn:
    """A session's last reported turn.

    Attributes:
        key: under which it was reported.
        residual: reported less estimated tokens.
        frames: how many frames its request had, see `Estimate`; None where that was not kept.
        added: tokens by which the residual grew as frames came, and fell as frames went, over all turns until now.
        over: how many frames came and went in those turns.
    """

    key: str
    residual: int
    frames: int | None = None
    added: int = 0
    over: int = 0

    def then(self, residual: int, frames: int | None) -> LastTurn:
        """The session's next reported turn, which has the same key."""
        more = frames - self.frames if frames is not None and self.frames is not None else 0
        grown = residual - self.residual
        if abs(grown) > _MOST_FRAME * abs(more):
            return LastTurn(self.key, residual, frames, self.added, self.over)
        added, over = self.added + (grown if more > 0 else -grown), self.over + abs(more)
        if over > _FRAMES_KEPT:
            added, over = round(added * _FRAMES_KEPT / over), _FRAMES_KEPT
        return LastTurn(self.key, residual, frames, added, over)


@dataclass(frozen=True, slots=True)
class Corrected:
    """An estimate after what was learned.

    Attributes:
        tokens: what the provider is expected to report.
        margin: tokens to keep free above that: trim and hold against `tokens + margin`.
        offset: tokens added to the estimate for what was learned, less than 0 where taken from it; part of `tokens`.
        source: `exact`, `calibrated`, or `learned` where something was.
        last: the session's last turn, where it was corrected by that; None else.
        frame: tokens of the offset for each of its frames; 0 where that was not learned.
    """

    tokens: int
    margin: int
    offset: int
    source: Source
    last: LastTurn | None = None
    frame: float = 0.0

    @property
    def safe_tokens(self) -> int:
        """Tokens and margin."""
        return self.tokens + self.margin


def calibration_key(provider: str, model: str, wire: str, shape: str) -> str:
    """The key under which residuals are kept; images, files and provider-run tools are marks of the shape."""
    return f"{provider}\n{model}\n{wire}\n{shape}"


def may_become(key: str, other: str) -> bool:
    """Whether a request of one key may be one of the other once some of its messages are left out."""
    (made_for, marks), (made_for_other, left) = map(_parts, (key, other))
    return made_for == made_for_other and left <= marks and marks - left <= OF_MESSAGES


def is_telling(reported: int, estimate: int, key: str) -> bool:
    """Whether reported input tokens can be those of a request of so many estimated ones, and say something of others.

    What is reported is charged in any case. But one provider's slip in one session is no reason to expect it of all.
    """
    if reported > _MOST_REPORTED or _is_too_little(reported, estimate, key):
        return False
    return reported <= _MOST_TIMES * estimate + _MOST_ADDED or not _UNSEEN.isdisjoint(_parts(key)[1])


def _is_too_little(reported: int, estimate: int, key: str) -> bool:
    """Return whether the text of a request must have more tokens than were reported."""
    return reported < _LEAST_REPORTED * estimate and _UNSEEN.isdisjoint(_parts(key)[1])


def whole_report(reported: int, estimate: int, newest: int, before: LastTurn | None, key: str) -> int | None:
    """Return the input tokens of the whole request that a report stands for, or None if it teaches nothing of them.

    Some servers report only the tokens that their prompt cache did not have (Ollama, llama.cpp). Such a report stands
    for the newest messages, and the rest of the request has what was expected of it: at least its estimate.

    Args:
        reported: input tokens as the provider reported them.
        estimate: of the request, before anything learned.
        newest: the part of the estimate after the last message of an assistant; 0: not known.
        before: the session's last turn, by which the request's estimate was corrected; None where it was not.
        key: under which it is learned.
    """
    if not _is_too_little(reported, estimate, key):
        return reported
    if not _LEAST_REPORTED * newest <= reported <= _MOST_OF_NEWEST * newest + _MOST_FRAME or not newest:
        return None
    return estimate - newest + max(0, before.residual if before is not None else 0) + reported


def _parts(key: str) -> tuple[str, set[str]]:
    made_for, _, shape = key.rpartition("\n")
    return made_for, {*shape.split("+")} - {""}


def corrected(
    estimate: Estimate,
    key: str,
    residuals: Sequence[Residual] = (),
    last: LastTurn | None = None,
    surprises: Sequence[Residual] = (),
    *,
    frames: Sequence[Residual] = (),
    estimated: int | None = None,
) -> Corrected:
    """An estimate corrected by a key's residuals and by the session's last turn, if that had the same key.

    What a provider adds differs between sessions of one key more than within a session. So the margin of an estimate
    that follows its session's last turn comes from `surprises`: by how much such estimates were off, reported less
    expected tokens. The margin of any other comes from how far the residuals lie apart. `frames`: for sessions of the
    key, tokens that frames added, and over how many frames. `estimated`: correct it as if it were of so many tokens.
    """
    if estimated is None:
        estimated = estimate.tokens
    if last is not None and last.key == key:
        return _following(estimate, estimated, last, surprises, frames)
    if not residuals:
        return Corrected(estimated, _margin(estimate, estimated), 0, estimate.source)
    seen = _scaled(residuals, estimated)
    wanted = round(median(seen))
    offset = _clamped(wanted, estimated)
    tokens = estimated + offset
    return Corrected(tokens, _margin(estimate, tokens, max(seen) - wanted, len(seen)), offset, "learned")


def _following(
    estimate: Estimate, estimated: int, last: LastTurn, surprises: Sequence[Residual], frames: Sequence[Residual]
) -> Corrected:
    frame = _frame(last, frames)
    more = estimate.frames - last.frames if last.frames is not None else 0
    offset = _clamped(last.residual + round(frame * more), estimated)
    tokens = estimated + offset
    above = _scaled(surprises, estimated) or (0,)
    least = _LEAST_KNOWN if len(surprises) >= _WELL_KNOWN else _LEAST_MARGIN
    return Corrected(tokens, _margin(estimate, tokens, max(above), len(above), least), offset, "learned", last, frame)


def _frame(last: LastTurn, frames: Sequence[Residual]) -> float:
    """What a frame adds: as the session has seen it, and before that as others have."""
    return _mean(last.added, last.over, _usual_frame(tuple(frames)) if frames else 0.0)


@lru_cache(maxsize=_STATES_KEPT)  # a turn asks several times
def _usual_frame(frames: tuple[Residual, ...]) -> float:
    return median([_mean(added, over) for added, over in frames])


def _mean(added: int, over: int, first: float = 0.0) -> float:
    """Tokens for each of `over` frames and one more that added `first`: what one frame seems to add may be chance."""
    return max(-_MOST_FRAME, min(_MOST_FRAME, (first + added) / (1 + max(0, over))))


def ceiling(
    estimate: Estimate,
    key: str,
    residuals: Sequence[Residual],
    last: LastTurn | None,
    surprises: Sequence[Residual],
    *,
    frames: Sequence[Residual] = (),
    budget: int,
) -> int:
    """The most tokens that an estimate may have within `budget`, once what its frames add is part of it.

    The rest of the offset and the margin are taken off the budget.
    """
    found = corrected(estimate, key, residuals, last, surprises, frames=frames, estimated=budget)
    # The margin is that of the budget, not of the budget and the offset.
    largest = max(0, budget - found.offset)
    found = corrected(estimate, key, residuals, last, surprises, frames=frames, estimated=largest)
    return budget - found.margin - found.offset + round(found.frame * estimate.frames)


def _scaled(residuals: Sequence[Residual], tokens: int) -> Sequence[float]:
    """The residuals, as they would be for a request of so many estimated tokens.

    The one nearest to 0 is taken for what is added to every request. What another one has beyond that is taken to have
    grown with its request, so that a smaller request gets less of it.
    """
    if not residuals:
        return ()
    offs, estimates = zip(*residuals, strict=True)
    if max(estimates) <= tokens:
        return offs
    least = min(offs, key=abs)
    return [least + (off - least) * tokens / estimate if estimate > tokens else off for off, estimate in residuals]


def _clamped(offset: int, tokens: int) -> int:
    return max(-int(tokens * _MOST_TAKEN), min(_MOST_ADDED, offset))


def _margin(estimate: Estimate, tokens: int, seen: float = 0, reports: int = 0, least: float = _LEAST_MARGIN) -> int:
    """Tokens to keep free: the most that was seen above the correction, or doubt that shrinks with each report.

    `seen`: the most by which what was reported of earlier requests, so many `reports`, was above what was corrected;
    `least`: the smallest margin, a share of `tokens`.
    """
    unseen = (estimate.spread * tokens + estimate.doubt) / (1 + reports)
    return math.ceil(max(_LEAST_TOKENS, least * tokens, min(seen, max(_MOST_SEEN * tokens, _SOME_SEEN)), unseen))


def residuals_from(value: Any) -> tuple[Residual, ...]:
    """Residuals as they were stored: a list of pairs, or of residuals without estimates; all else in it is left out."""
    items = value if isinstance(value, list) else []
    pairs = [item if isinstance(item, list) else [item, 0] for item in items]
    return tuple([Residual(*pair) for pair in pairs if [*map(type, pair)] == [int, int]])[-KEPT:]
