"""Decide which accounts a call is charged to, and how much is held for it.

This module chooses the numbers; `gateway.core.ledger.arithmetic` computes with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from decimal import Decimal
from math import ceil
from typing import Final, NamedTuple

from gateway.core.ledger.arithmetic import (
    MOST,
    NANO,
    NO_LIMITS,
    NOTHING,
    AccountKey,
    Amount,
    Balance,
    Claim,
    Granted,
    Hold,
    Limits,
    most_used_balance,
    nano,
    units_left,
)
from gateway.core.ledger.session_key import SessionKey
from gateway.core.pricing import Price
from gateway.core.usage import Charge, Usage
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
#: a shorter output, in tokens, is useless
USEFUL: Final = 16
#: An output is also useless if it is shorter than a quarter of what it could have if no other call held anything.
_USEFUL_SHARE: Final = 4
#: when a request is trimmed to a budget, at most a quarter of what is left is kept free for its output
_FREE_SHARE: Final = 4
_MINUTE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class BudgetPolicy:
    """The `budget:` settings.

    Attributes:
        session: limits of every session.
        cached_weight: how much a cached input token counts; an uncached one counts 1.
        warn_at: the used share of a budget, 0 to 1, at which responses begin to carry a warning.
        modes: shorten tool results as the budget runs low.
        clamp: lower the output limit of a call to what is left, instead of refusing the call.
        deferred: forward calls whose cost arises after their response, where the gateway cannot see it.
        exhausted_status: the HTTP status of a refusal because too little is left.
    """

    session: Limits = NO_LIMITS
    cached_weight: float = 1.0
    warn_at: float = 0.8
    modes: bool = True
    clamp: bool = True
    deferred: bool = False
    exhausted_status: int = 400


class KeyLimits(NamedTuple):
    """Limits of a client key: for all its sessions together, and `rpm`, its requests per minute (None: any number)."""

    limits: Limits = NO_LIMITS
    rpm: int | None = None


NO_KEY_BUDGET: Final = KeyLimits()


@dataclass(frozen=True, slots=True)
class ChargedAccounts:
    """The accounts that a call is charged to: client key, session, and its parents, nearest first.

    `declared`: the budget that the call itself declares for its session.
    """

    namespace: str
    key: KeyLimits = NO_KEY_BUDGET
    session: SessionKey | None = None
    parents: tuple[SessionKey, ...] = ()
    declared: Limits = NO_LIMITS


def claims_of(policy: BudgetPolicy, charged: ChargedAccounts) -> tuple[Claim, ...]:
    """Return the claims of a call: client key, then parents from the topmost down, then session."""
    claims, key = [], charged.key
    if key.rpm is not None:
        claims.append(Claim(AccountKey("rate", charged.namespace), Limits(calls=key.rpm, window_s=_MINUTE_S)))
    if not key.limits.is_none:
        claims.append(Claim(AccountKey("key", charged.namespace), key.limits))
    claims += [Claim(parent.account, policy.session) for parent in reversed(charged.parents)]
    if charged.session is not None:
        claims.append(Claim(charged.session.account, policy.session, charged.declared))
    return tuple(claims)


def accounts_of(claims: Sequence[Claim]) -> tuple[AccountKey, ...]:
    """Return the accounts to which the cost of a call is added."""
    return tuple(claim.key for claim in claims if claim.key.kind != "rate")


def spent_by(charge: Charge | None, cached_weight: float) -> Amount:
    """Return how much of a charge counts against a budget."""
    if charge is None:
        return NOTHING
    usage = charge.usage
    # Some providers report more cached tokens than input tokens. Output tokens are never cached.
    cached = min(usage.cache_read_tokens, usage.input_tokens)
    tokens = usage.total_tokens - cached + ceil(cached * cached_weight)
    return Amount(min(MOST, tokens), nano(charge.cost_usd or 0), 1)


class TokenRate(NamedTuple):
    """The highest price in USD of one input and one output token. The kind of token is not known before the call."""

    input: Decimal
    output: Decimal


def rate_of(price: Price | None, input_tokens: int, tier: str | None, *, caches_1h: bool = False) -> TokenRate | None:
    """Return the highest price of a token of a call, or None if it is unknown.

    `caches_1h`: the call can ask the provider to cache a prefix for an hour, which costs more.
    """
    if price is None:
        return None
    rates = price.rates_for(Usage.of(input_tokens, 0), tier)
    if rates is None:
        return None
    return TokenRate(
        _dearest(rates.input, rates.cache_write, rates.cache_write_1h if caches_1h else None, rates.audio_input),
        _dearest(rates.output, rates.audio_output, rates.reasoning),
    )


def dearest(rates: Iterable[TokenRate | None]) -> TokenRate | None:
    """Return the highest of these rates, for input and output separately, or None if none is known."""
    known = [rate for rate in rates if rate is not None]
    return TokenRate(max(rate.input for rate in known), max(rate.output for rate in known)) if known else None


def _dearest(*rates: Decimal | None) -> Decimal:
    return max(rate for rate in rates if rate is not None)


@dataclass(frozen=True, slots=True)
class CallNeed:
    """The largest amounts that a call can need.

    Attributes:
        input_tokens: the upper bound of the input, with a safety margin.
        output: the output limit that the call sets for each choice; None if it sets none.
        model_output: the output limit of the model; None if it is unknown.
        room: tokens that the context window leaves after the input; None: the window is unknown, or leaves too few.
        expected: input tokens that the provider is expected to bill, without a safety margin; None: `input_tokens`.
        least_output: the smallest output limit, in tokens, that the provider accepts; 0: any.
        choices: how many choices the call asks for.
        has_output: the output is billed by its tokens.
        rate: the highest price of a token; None if it is unknown.
        is_priced: the price is known, or the call is not billed by tokens.
        model: the model that the price is for.
        can_grow: the hold can be extended while the output arrives.
        can_end: the output is streamed text, so that the stream can be ended when it far exceeds the hold.
        completes_without_client: the provider completes the output even if no client waits for it.
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


def output_room(window: int | None, tokens: int) -> int | None:
    """Return the output tokens that fit into a context window after `tokens` of input, or None.

    None: the window is unknown, or fewer than `USEFUL` tokens are left. In the second case either the provider refuses
    the call for its length, which costs nothing, or the estimate is wrong.
    """
    room = window - tokens if window is not None else 0
    return room if room >= USEFUL else None


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
    if need.output is None and need.can_grow:
        most = min(most, STREAM_STEP)
    least = _fewest_units(most, fixed, unit, balances) if clamp or need.output is None else most
    return Hold(call_id, claims, fixed, unit, max(least, min(need.least_output, most)), most)


def _fewest_units(most: int, fixed: Amount, unit: Amount, balances: Sequence[Balance]) -> int:
    """Return the fewest units with which a call is useful.

    Other calls may release their holds. Waiting for that is better than a small part of the output now.
    """
    if not any(any(balance.held) for balance in balances):
        return min(most, USEFUL)
    alone = _units_left([replace(balance, held=NOTHING) for balance in balances], fixed, unit, most)
    return min(most, max(USEFUL, alone // _USEFUL_SHARE))


def _most_units(need: CallNeed, fixed: Amount, unit: Amount, balances: Sequence[Balance]) -> int:
    """Return the most units to ask for: the output limit, or a share of what the budget has left."""
    if need.output is not None:
        return need.output if need.model_output is None else min(need.output, need.model_output)
    most = need.model_output or DEFAULT_OUTPUT
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


def limit_to_set(hold: Hold, granted: Granted, need: CallNeed) -> int | None:
    """Return the output limit to send so that the output stays within the hold, or None to send none."""
    if not need.has_output or not limits_output(granted.balances):
        return None
    if need.output is not None:
        return granted.units if granted.units < need.output else None
    most = need.model_output or DEFAULT_OUTPUT
    if not need.can_grow:
        return _within_room(granted.units, need) if need.model_output is None or granted.units < most else None
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


def limits_output(balances: Sequence[Balance]) -> bool:
    """Return whether a budget in tokens or USD is in force, so that a longer output costs more of it."""
    for balance in balances:
        limits = balance.limits
        if balance.key.kind != "rate" and (limits.tokens is not None or limits.nano_usd is not None):
            return True
    return False


def budgets_in(balances: Sequence[Balance]) -> tuple[Balance, ...]:
    """Return the balances with a budget in force, without rate limits of client keys."""
    return tuple([balance for balance in balances if balance.key.kind != "rate" and not balance.limits.is_none])


def affordable_input(balances: Sequence[Balance], output: int | None, rate: TokenRate | None) -> int | None:
    """Return the input tokens that the budgets still allow, or None if no budget limits them.

    Room is kept free for the output: as much as the call asks for, but at most a quarter of what is left.
    """
    allowed = []
    for balance in balances:
        tokens, usd = balance.left("tokens"), balance.left("nano_usd")
        if tokens is not None:
            allowed.append(tokens - min(output or _OUTPUT_LEAST, tokens // _FREE_SHARE))
        if usd is not None and rate is not None and rate.input > 0:
            for_input = usd - min(nano(rate.output * (output or _OUTPUT_LEAST)), usd // _FREE_SHARE)
            allowed.append(int(Decimal(for_input) / NANO / rate.input))
    return max(1, min(allowed)) if allowed else None


def remaining_fraction(balances: Sequence[Balance]) -> float:
    """Return the share, 0 to 1, that is left of the most used budget, ignoring holds. 1 without a budget."""
    balance = most_used_balance(balances)
    return 1.0 if balance is None else max(0.0, 1.0 - (balance.used_fraction or 0.0))
