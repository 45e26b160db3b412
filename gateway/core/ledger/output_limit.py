"""Decide how long a response may be: the output that is reserved, and the output limit that is sent.

| question | answered by |
|---|---|
| which length does the call ask for? | `wanted_output`, from the request and the active step |
| how much input may it have, so that room for the output is left? | `affordable_input` |
| how much output is reserved? | `hold_for` |
| which limit keeps the response within the reservation? | `limit_of_hold` |
| which limit is sent to the provider, and why? | `limit_to_set`, then `LimitToSend.within` |

`gateway.dialects.limits` reads what a request asks for (`OutputAsked`), and writes the limit into its fields. The other
modules only collect the numbers. A unit of a hold is one output token in each choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from math import ceil
from typing import Final, NamedTuple

from gateway.core.ledger.arithmetic import (
    MOST,
    NANO,
    NOTHING,
    Amount,
    Balance,
    Claim,
    Granted,
    Hold,
    nano,
    units_left,
)
from gateway.core.ledger.charging import TokenRate, limits_output
from gateway.core.values import dataclass

#: output tokens that are assumed if neither the call nor the model's known facts limit the output
DEFAULT_OUTPUT: Final = 16_384
#: If the call does not limit its output, a quarter of what is left is held for it. One call then does not block all
#: others.
_OUTPUT_SHARE: Final = 4
#: at least this many output tokens are held in that case
_OUTPUT_LEAST: Final = 4_096
#: output tokens that are held first for a stream, and by which its hold is extended while it runs
STREAM_STEP: Final = 2_048
#: The first hold of a stream whose usual output is known: this factor of it and some tokens more, at least the minimum.
_USUAL_FACTOR: Final = 1.125
_USUAL_MORE: Final = 32
USUAL_LEAST: Final = 128
#: The first extension is this part of the first hold. Each further one is twice as large as the last.
_USUAL_STEPS: Final = 4
#: While other calls hold budget, this part of what is left is kept for streams that become longer than usual.
_SPARE_SHARE: Final = 4
#: a shorter output, in tokens, is useless
USEFUL: Final = 16
#: Output tokens that a summary of the whole conversation needs at least: a client that receives a summary cut short
#: loses the rest of its conversation.
LEAST_SUMMARY: Final = 2_048
#: An output is also useless if it is shorter than a quarter of what it could have if no other call held anything.
_USEFUL_SHARE: Final = 4
#: when a request is trimmed to a budget, at most a quarter of what is left is kept free for its output
_FREE_SHARE: Final = 4


# --- what the call asks for -------------------------------------------------------------------------------------------


class OutputAsked(NamedTuple):
    """What a request says about the length of its response. `gateway.dialects.limits.output_asked` reads it.

    Attributes:
        limit: its output limit; None if it sets none.
        default: the limit that the API applies if the request sets none; None if only the model limits the output.
        least: the smallest limit that the request can have, see `gateway.dialects.limits.minimum_output`.
        is_none: the request asks for no output at all, so that no limit is set.
    """

    limit: int | None = None
    default: int | None = None
    least: int = 0
    is_none: bool = False


def limit_of_step(asked: OutputAsked, most: int | None) -> int | None:
    """Return the limit that the active step sets; None if it sets none, or the call asks for no more.

    `most`: `max_output_tokens` of the step.
    """
    if most is None:
        return None
    most = max(most, asked.least)
    return most if asked.limit is None or most < asked.limit else None


def wanted_output(asked: OutputAsked, most: int | None) -> int | None:
    """Return the output tokens that the call asks for within its step; None if neither limits them."""
    step = limit_of_step(asked, most)
    return asked.limit if step is None else step


def output_to_reserve(asked: OutputAsked, most: int | None) -> int | None:
    """Return the limit to reserve for; None if neither the call nor its step nor its API sets one."""
    wanted = wanted_output(asked, most) or asked.default
    return min(wanted, MOST) if wanted is not None else None


# --- the limit that is sent -------------------------------------------------------------------------------------------


class LimitToSend(NamedTuple):
    """An output limit that the gateway sets, and the reason."""

    tokens: int
    reason: str

    def within(self, asked: OutputAsked, *, model: int | None, refused: int | None, room: int | None) -> LimitToSend:
        """Return the limit lowered to what the provider accepts. None: no such limit.

        Args:
            asked: what the call asks for. A call with a limit of its own is not lowered to the room in the window.
            model: the output limit of the model.
            refused: the maximum that the provider named when it refused a higher limit.
            room: what the context window leaves after the input (`output_room`).
        """
        return self._replace(tokens=lowest(self.tokens, model, refused, room if asked.limit is None else None))


def limit_to_set(asked: OutputAsked, *, budget: int | None, step: int | None, held: int | None) -> LimitToSend | None:
    """Return the output limit to send, with the first reason that applies; None to keep the call's own.

    Args:
        asked: what the call asks for.
        budget: the limit that keeps the response within its reservation (`limit_of_hold`).
        step: the limit of the active step (`limit_of_step`).
        held: what is reserved, if the provider may ignore the limit that the call itself sets.
    """
    if asked.is_none:
        return None
    if budget is not None:
        return LimitToSend(budget, "set by the budget")
    if step is not None:
        return LimitToSend(step, "set by the step")
    return LimitToSend(held, "set by the hold") if held is not None else None


def lowest(limit: int, *bounds: int | None) -> int:
    """Return the lowest of these limits. None and 0 are no limits."""
    return min([limit, *filter(None, bounds)])


def output_room(window: int | None, tokens: int) -> int | None:
    """Return the output tokens that fit into a context window after `tokens` of input, or None.

    None: the window is unknown, or fewer than `USEFUL` tokens are left. In the second case no limit is derived from the
    window: either the provider refuses the call for its length, which costs nothing, or the estimate is wrong.
    """
    room = window - tokens if window is not None else 0
    return room if room >= USEFUL else None


def widest_room(windows: Sequence[int | None], tokens: int) -> int | None:
    """Return the most output that one of these context windows leaves; None if one is unknown, or leaves too little."""
    rooms = [output_room(window, tokens) for window in windows]
    return max((room for room in rooms if room is not None), default=None) if all(rooms) else None


def longest_output(outputs: Sequence[int | None]) -> int | None:
    """Return the highest output limit of the models that may respond; None if one is unknown."""
    return max((output for output in outputs if output is not None), default=None) if all(outputs) else None


# --- what is reserved -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CallNeed:
    """The largest amounts that a call can need.

    Attributes:
        input_tokens: the upper bound of the input, with a safety margin.
        output: the output limit that the call sets for each choice; None if it sets none.
        model_output: the output limit of the model; None if it is unknown.
        room: tokens that the context window leaves after the input; None: the window is unknown, or leaves too few.
        expected: input tokens that the provider is expected to bill, without a safety margin; None: `input_tokens`.
        usual_output: output tokens of most earlier responses; None if unknown. Only for a hold that can grow.
        least_output: the smallest output limit, in tokens, that the provider accepts; 0: any.
        choices: how many choices the call asks for.
        has_output: the output is billed by its tokens.
        rate: the highest prices of an input and an output token; None if they are unknown.
        is_priced: the price is known, or the call is not billed by tokens.
        model: the model that the price is for.
        can_grow: the hold can be extended while the output arrives.
        can_end: the output is streamed text, so that the stream can be ended when it far exceeds the hold.
        completes_without_client: the provider completes the output even if no client waits for it.
        is_last: it is the closing call of its session, so nothing is left for other calls and its limit is lowered.
    """

    input_tokens: int
    output: int | None = None
    model_output: int | None = None
    choices: int = 1
    has_output: bool = True
    rate: TokenRate | None = None
    is_priced: bool = True
    model: str = ""
    can_grow: bool = False
    can_end: bool = False
    completes_without_client: bool = False
    least_output: int = 0
    room: int | None = None
    expected: int | None = None
    is_last: bool = False
    usual_output: int | None = None

    @property
    def grows(self) -> bool:
        """Return whether the hold of the call is extended while it runs."""
        return self.output is None and self.can_grow

    @property
    def first_units(self) -> int:
        """Return the units to hold first, if the hold can be extended."""
        if self.usual_output is None:
            return STREAM_STEP
        return min(STREAM_STEP, max(USUAL_LEAST, ceil(self.usual_output * _USUAL_FACTOR) + _USUAL_MORE))

    @property
    def is_usual(self) -> bool:
        """Return whether less is held first than for a stream of which nothing is known."""
        return self.grows and self.first_units < STREAM_STEP

    @property
    def step(self) -> int:
        """Return the units of the first extension; 0 if the hold is never extended."""
        if not self.grows:
            return 0
        return self.first_units // _USUAL_STEPS if self.is_usual else STREAM_STEP


def hold_for(
    call_id: str, claims: tuple[Claim, ...], balances: Sequence[Balance], need: CallNeed, *, clamp: bool
) -> Hold:
    """Return the hold for a call. `balances`: of its accounts, as they were read."""
    rate = need.rate or TokenRate(Decimal(0), Decimal(0))
    fixed = Amount(max(1, need.input_tokens), nano(rate.input * need.input_tokens), 1)
    if not need.has_output:
        return Hold(call_id, claims, fixed)
    unit = Amount(need.choices, nano(rate.output * need.choices))
    most = _most_units(need, fixed, unit, balances)
    if need.grows:
        most = min(most, need.first_units)
    if need.is_usual:
        least = _fewest_usual_units(most, fixed, unit, balances)
        return Hold(call_id, claims, fixed, unit, least, max(least, most))
    is_lowered = clamp or need.is_last or need.output is None
    least = _fewest_units(most, fixed, unit, balances) if is_lowered else most
    return Hold(call_id, claims, fixed, unit, max(least, min(need.least_output, most)), most)


def _fewest_units(most: int, fixed: Amount, unit: Amount, balances: Sequence[Balance]) -> int:
    """Return the fewest units with which a call is useful.

    This is a share of the output that would be possible if no other call held anything: a later try is better than a
    very short output now. It does not depend on what other calls held when the balances were read, since a call that
    began at the same time may hold something by now.
    """
    alone = _units_left([replace(balance, held=NOTHING) for balance in balances], fixed, unit, most)
    return min(most, max(USEFUL, alone // _USEFUL_SHARE))


def _fewest_usual_units(most: int, fixed: Amount, unit: Amount, balances: Sequence[Balance]) -> int:
    """Return the fewest units with which a stream of usual length is sent, which are `most` if possible.

    While other calls hold something, it also waits until a share of what is left stays free, so that streams that
    become longer than usual can be extended. To ask for this share too makes the store refuse the call until then.
    """
    alone = _units_left([replace(balance, held=NOTHING) for balance in balances], fixed, unit, MOST)
    least = max(min(most, USEFUL), min(most, alone))
    if any(any(balance.held) for balance in balances):
        wanted = most + alone // _SPARE_SHARE
        if _units_left(balances, fixed, unit, MOST) < wanted:
            return max(least, min(alone, wanted))
    return least


def _most_units(need: CallNeed, fixed: Amount, unit: Amount, balances: Sequence[Balance]) -> int:
    """Return the most units to ask for: the output limit, or a share of what the budget has left."""
    if need.output is not None:
        return need.output if need.model_output is None else min(need.output, need.model_output)
    most = need.model_output or DEFAULT_OUTPUT
    if need.is_last:
        return _within_room(most, need)
    left = _units_left(balances, fixed, unit, most * _OUTPUT_SHARE)
    units = min(most, max(_OUTPUT_LEAST, left // _OUTPUT_SHARE))
    # If the model's longest output is held, no limit is sent, and the provider fits the output into the window.
    return units if units == need.model_output else _within_room(units, need)


def _within_room(units: int, need: CallNeed) -> int:
    """Return `units`, but at most what the context window has room for."""
    return units if need.room is None else min(units, need.room)


def _units_left(balances: Sequence[Balance], fixed: Amount, unit: Amount, most: int) -> int:
    """Return the units, at most `most`, that every account has left after `fixed`."""
    return min((units_left(balance, fixed, unit, most) for balance in balances), default=most)


def limit_of_hold(hold: Hold, granted: Granted, need: CallNeed) -> int | None:
    """Return the output limit that keeps the response within the hold; None if no limit is needed."""
    if not need.has_output or not limits_output(granted.balances):
        return None
    if need.output is not None:
        return granted.units if granted.units < need.output else None
    most = need.model_output or DEFAULT_OUTPUT
    if not need.can_grow:
        return _within_room(granted.units, need) if need.model_output is None or granted.units < most else None
    if need.is_usual:
        # Other calls hold more than most of them need. So the hold can grow up to what they may leave, and the stream
        # is ended if they leave less.
        alone = [replace(balance, held=NOTHING) for balance in granted.balances]
        total = _units_left(alone, hold.fixed, hold.unit, most)
        return _within_room(total, need) if total < most else None
    # The hold grows with the output, up to what is left. The provider gets the same bound.
    total = granted.units + _units_left(granted.balances, NOTHING, hold.unit, most)
    return _within_room(total, need) if total < most else None


def longest_text(held: int) -> int:
    """Return the estimated output tokens above which a stream has certainly exceeded its hold.

    A provider normally respects the output limit that it was sent, so an estimate slightly above the hold must not end
    a stream. Estimates of prose, code and data in many languages are at most 1.5 times the tokens of o200k_base.
    Estimates of a few words can be wrong by any factor.
    """
    return held + held // 2 + STREAM_STEP // 4


def affordable_input(balances: Sequence[Balance], output: int | None, rate: TokenRate | None) -> int | None:
    """Return the input tokens that the budgets still allow, or None if no budget limits them.

    Room is kept free for the output: as much as the call asks for, but at most a quarter of what is left.
    """
    allowed = []
    for balance in balances:
        tokens, usd = balance.free("tokens"), balance.free("nano_usd")
        if tokens is not None:
            allowed.append(tokens - min(output or _OUTPUT_LEAST, tokens // _FREE_SHARE))
        if usd is not None and rate is not None and rate.input > 0:
            for_input = usd - min(nano(rate.output * (output or _OUTPUT_LEAST)), usd // _FREE_SHARE)
            allowed.append(int(Decimal(for_input) / NANO / rate.input))
    return max(1, min(allowed)) if allowed else None
