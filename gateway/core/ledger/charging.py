"""Decide which accounts a call is charged to, and how much is held for it.

The arithmetic is the ledger's; here it is decided with which numbers. See `gateway.core.ledger.arithmetic`.
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
    nano,
    narrowest,
    units_left,
)
from gateway.core.ledger.session_key import SessionKey
from gateway.core.pricing import Price
from gateway.core.usage import Charge, Usage
from gateway.core.values import dataclass

#: tokens taken for the limit of an answer that nobody limits, where the model's own limit is not known either
DEFAULT_OUTPUT: Final = 16_384
#: For an answer that the call does not limit, one part in so many of what is left is held, so that one call does not
#: keep all others waiting, ...
_OUTPUT_SHARE: Final = 4
#: ... but no fewer tokens than these
_OUTPUT_LEAST: Final = 4_096
#: tokens of its answer that are held for a stream at first, and by which its hold is extended while it runs
STREAM_STEP: Final = 2_048
#: an answer of fewer tokens is of no use to anyone
USEFUL: Final = 16
#: nor one with less than one part in so many of what it could have if no other call held anything
_STUMP: Final = 4
#: when a request is made to fit, at most one part in so many of what is left is kept for its answer
_ANSWER_SHARE: Final = 4
_MINUTE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class BudgetPolicy:
    """The `budget:` settings.

    Attributes:
        session: limits of every session.
        cached_weight: what an input token counts that the provider had cached; one that it had not counts 1.
        warn_at: share of a budget, used up, from which on answers carry a warning.
        modes: whether tool results shrink as the budget does.
        clamp: whether an answer's limit is lowered to what is left, instead of refusing the call.
        deferred: whether calls are forwarded whose cost arises after their answer, and is not seen.
        exhausted_status: HTTP status of a refusal because too little is left.
    """

    session: Limits = NO_LIMITS
    cached_weight: float = 1.0
    warn_at: float = 0.8
    modes: bool = True
    clamp: bool = True
    deferred: bool = False
    exhausted_status: int = 400


class KeyLimits(NamedTuple):
    """What a client key may spend in all its sessions, and how many requests it may make in a minute."""

    limits: Limits = NO_LIMITS
    rpm: int | None = None


NO_KEY_BUDGET: Final = KeyLimits()


@dataclass(frozen=True, slots=True)
class ChargedAccounts:
    """Who is charged: a client key, a session, its parents from the nearest up; and the budget that a call declares."""

    namespace: str
    key: KeyLimits = NO_KEY_BUDGET
    session: SessionKey | None = None
    parents: tuple[SessionKey, ...] = ()
    declared: Limits = NO_LIMITS


def claims_of(policy: BudgetPolicy, charged: ChargedAccounts) -> tuple[Claim, ...]:
    """The accounts of a call: its client key's, its parents' from the top down, its session's."""
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
    """The accounts that what a call spends is added to."""
    return tuple(claim.key for claim in claims if claim.key.kind != "rate")


def spent_by(charge: Charge | None, cached_weight: float) -> Amount:
    """What of a charge counts against a budget."""
    if charge is None:
        return NOTHING
    usage = charge.usage
    # Some providers report more cached tokens than there was input; tokens of the answer are never cached.
    cached = min(usage.cache_read_tokens, usage.input_tokens)
    tokens = usage.total_tokens - cached + ceil(cached * cached_weight)
    return Amount(min(MOST, tokens), nano(charge.cost_usd or 0), 1)


class TokenRate(NamedTuple):
    """USD for a token of input and of output, each of the dearest kind: which kind it will be is not known yet."""

    input: Decimal
    output: Decimal


def rate_of(price: Price | None, input_tokens: int, tier: str | None, *, caches_1h: bool = False) -> TokenRate | None:
    """The most that a token of a call may cost; None where nobody knows.

    `caches_1h`: the call may ask the provider to cache something for an hour, which costs more.
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
    """The most that a token of a call may cost, whichever of these rates it goes by; None where none is known."""
    known = [rate for rate in rates if rate is not None]
    return TokenRate(max(rate.input for rate in known), max(rate.output for rate in known)) if known else None


def _dearest(*rates: Decimal | None) -> Decimal:
    return max(rate for rate in rates if rate is not None)


@dataclass(frozen=True, slots=True)
class CallNeed:
    """What a call may take.

    Attributes:
        input_tokens: the most that its input may have, as far as one can be sure.
        output: tokens to which the call itself limits each answer; None where it does not.
        model_output: tokens that an answer of the model can have; None where nobody knows.
        room: tokens that its window leaves beside the input; None: nobody knows its window, or it leaves nothing.
        expected: input tokens that the provider is expected to bill, without a safety margin; None: `input_tokens`.
        least_output: the least limit of an answer, in tokens, that can be set; 0: any can.
        answers: how many answers it asks for.
        has_output: whether the answer is paid by its tokens at all.
        rate: what a token costs at the most; None where nobody knows.
        is_priced: its price is known, or it is no call that is billed by its tokens.
        model: the model that the price is for.
        can_grow: its hold can be extended while the answer comes.
        can_end: its answer is text that comes piece by piece, and can be ended where it passes what is held by far.
        goes_on: the answer is made to its end, whether or not anybody waits for it.
    """

    input_tokens: int
    output: int | None = None
    model_output: int | None = None
    answers: int = 1
    has_output: bool = True
    rate: TokenRate | None = None
    is_priced: bool = True
    model: str = ""
    can_grow: bool = False
    can_end: bool = False
    goes_on: bool = False
    least_output: int = 0
    room: int | None = None
    expected: int | None = None


def room_in(window: int | None, tokens: int) -> int | None:
    """Tokens of an answer for which a window has room beside so many of input.

    None where nobody knows the window, or where there is none for an answer of use: then the provider refuses the call
    for its length, which costs nothing, or what was estimated is wrong.
    """
    room = window - tokens if window is not None else 0
    return room if room >= USEFUL else None


def hold_for(
    call_id: str, claims: tuple[Claim, ...], balances: Sequence[Balance], need: CallNeed, *, clamp: bool
) -> Hold:
    """What to hold for a call; `balances`: of its accounts, as they were read."""
    rate = need.rate or TokenRate(Decimal(0), Decimal(0))
    fixed = Amount(max(1, need.input_tokens), nano(rate.input * need.input_tokens), 1)
    if not need.has_output:
        return Hold(call_id, claims, fixed)
    unit = Amount(need.answers, nano(rate.output * need.answers))
    most = _longest(need, fixed, unit, balances)
    if need.output is None and need.can_grow:
        most = min(most, STREAM_STEP)
    least = _shortest(most, fixed, unit, balances) if clamp or need.output is None else most
    return Hold(call_id, claims, fixed, unit, max(least, min(need.least_output, most)), most)


def _shortest(most: int, fixed: Amount, unit: Amount, balances: Sequence[Balance]) -> int:
    """The fewest units that are worth a call.

    What others hold may come back, so that it is better to wait for it than to take a small part of an answer now.
    """
    if not any(any(balance.held) for balance in balances):
        return min(most, USEFUL)
    alone = _units_left([replace(balance, held=NOTHING) for balance in balances], fixed, unit, most)
    return min(most, max(USEFUL, alone // _STUMP))


def _longest(need: CallNeed, fixed: Amount, unit: Amount, balances: Sequence[Balance]) -> int:
    """Units of an answer that nothing but the budget cuts short."""
    if need.output is not None:
        return need.output if need.model_output is None else min(need.output, need.model_output)
    most = need.model_output or DEFAULT_OUTPUT
    left = _units_left(balances, fixed, unit, most * _OUTPUT_SHARE)
    units = min(most, max(_OUTPUT_LEAST, left // _OUTPUT_SHARE))
    # Where the longest answer of the model is held, no limit is set: it is the provider's to fit it into the window.
    return units if units == need.model_output else _roomy(units, need)


def _roomy(units: int, need: CallNeed) -> int:
    """Units, but no more than the model's window has room for."""
    return units if need.room is None else min(units, need.room)


def _units_left(balances: Sequence[Balance], fixed: Amount, unit: Amount, most: int) -> int:
    """Units, up to `most`, that every account has left beside `fixed`."""
    return min((units_left(balance, fixed, unit, most) for balance in balances), default=most)


def limit_to_set(hold: Hold, granted: Granted, need: CallNeed) -> int | None:
    """The limit that the call has to be sent with, so that its answer stays within what is held; None: as it is."""
    if not need.has_output or not bounds_answers(granted.balances):
        return None
    if need.output is not None:
        return granted.units if granted.units < need.output else None
    most = need.model_output or DEFAULT_OUTPUT
    if not need.can_grow:
        return _roomy(granted.units, need) if need.model_output is None or granted.units < most else None
    # The hold grows with the answer; what is left bounds it at the provider too.
    total = granted.units + _units_left(granted.balances, NOTHING, hold.unit, most)
    return _roomy(total, need) if total < most else None


def most_text(held: int) -> int:
    """Return the estimated tokens of text with which an answer surely has passed what is held whole for it.

    Its provider keeps to the limit it was sent, as a rule, and then no estimate is a reason to end it. Estimates of
    prose, code and data in many languages are at most 1.5 times the tokens of o200k_base; those of a few words may be
    anything.
    """
    return held + held // 2 + STREAM_STEP // 4


def bounds_answers(balances: Sequence[Balance]) -> bool:
    """Whether a budget is in force in which a longer answer counts more."""
    for balance in balances:
        limits = balance.limits
        if balance.key.kind != "rate" and (limits.tokens is not None or limits.nano_usd is not None):
            return True
    return False


def budgets_in(balances: Sequence[Balance]) -> tuple[Balance, ...]:
    """Those in which a budget is in force; the count of a client key's requests is none."""
    return tuple([balance for balance in balances if balance.key.kind != "rate" and not balance.limits.is_none])


def affordable_input(balances: Sequence[Balance], output: int | None, rate: TokenRate | None) -> int | None:
    """Input tokens that the budgets still allow; None where no budget limits them.

    Room is kept for the answer: for as much as the call asks for, but at most a quarter of what is left.
    """
    found = []
    for balance in balances:
        tokens, usd = balance.left("tokens"), balance.left("nano_usd")
        if tokens is not None:
            found.append(tokens - min(output or _OUTPUT_LEAST, tokens // _ANSWER_SHARE))
        if usd is not None and rate is not None and rate.input > 0:
            for_input = usd - min(nano(rate.output * (output or _OUTPUT_LEAST)), usd // _ANSWER_SHARE)
            found.append(int(Decimal(for_input) / NANO / rate.input))
    return max(1, min(found)) if found else None


def remaining_fraction(balances: Sequence[Balance]) -> float:
    """The share, 0 to 1, that is left of the narrowest budget, holds not taken off. 1 where there is no budget."""
    balance = narrowest(balances)
    return 1.0 if balance is None else max(0.0, 1.0 - (balance.used_fraction or 0.0))
