"""Describe to callers what is left of a budget, and why it is too small for a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from math import ceil
from shlex import quote
from typing import Final, Literal

from gateway.core.errors import BudgetBusy, BudgetExhausted, BudgetFault, RateLimited
from gateway.core.http.gateway_headers import BUDGET_TOKENS, BUDGET_USD
from gateway.core.ledger.arithmetic import (
    DIMENSIONS,
    MOST,
    MOST_USD,
    NANO,
    AccountKey,
    Balance,
    Claim,
    Dimension,
    Refused,
    nano,
    narrowest,
)
from gateway.core.ledger.charging import BudgetPolicy
from gateway.core.ledger.session_key import SessionKey
from gateway.core.values import dataclass

_UNITS: Final[Mapping[Dimension, str]] = {"tokens": "tokens", "nano_usd": "usd", "calls": "calls"}


@dataclass(frozen=True, slots=True)
class Allowance:
    """What a caller is told of the budgets in force: the one of each kind that has least left; None where none is.

    USD are text with six decimals. `warning`: the largest share used, 0 to 1 and beyond, where it is large enough to
    warn of; None else.
    """

    limit_tokens: int | None = None
    left_tokens: int | None = None
    limit_usd: str | None = None
    left_usd: str | None = None
    warning: float | None = None


def allowance(balances: Sequence[Balance], warn_at: float) -> Allowance | None:
    """What to tell of these accounts; None where nothing is limited."""
    nearest = narrowest(balances)
    if nearest is None:
        return None
    used = nearest.used_fraction or 0.0
    limit_tokens, left_tokens = _least_left(balances, "tokens")
    limit_nano, left_nano = _least_left(balances, "nano_usd")
    return Allowance(
        limit_tokens,
        left_tokens,
        usd(limit_nano) if limit_nano is not None else None,
        usd(left_nano) if left_nano is not None else None,
        used if used >= warn_at else None,
    )


def _least_left(balances: Sequence[Balance], name: Literal["tokens", "nano_usd"]) -> tuple[int | None, int | None]:
    """Limit and what is left of it, of the account that has the least left."""
    found = [
        (left, limit)
        for balance in balances
        if (left := balance.left(name)) is not None and (limit := balance.limits.of(name)) is not None
    ]
    left, limit = min(found, default=(None, None))
    return limit, left


def refusal(refused: Refused, claim: Claim, policy: BudgetPolicy, now: float) -> BudgetFault:
    """What the caller is told. `now`: the time of day, seconds since the epoch."""
    balance, name = refused.balance_of, refused.dimension
    at = DIMENSIONS.index(name)
    arithmetic = dimension_json(balance, name, now) | {"needed": _number(refused.needed, name)}
    if balance.key.kind == "rate":
        limited = RateLimited(
            f"The client key makes more than its {balance.limits.calls:,} requests a minute. "
            f"Wait {ceil(balance.resets_s or 0)} s.",
            arithmetic,
        )
        limited.retry_after = max(1, ceil(balance.resets_s or 0))
        return limited
    limit = balance.limits.of(name) or 0
    whose = (
        f'Session "{balance.key.id}"' if balance.key.kind == "session" else f'The client key "{balance.key.namespace}"'
    )
    used = f"{whose} has used {_said(balance.used[at], name)} of its {_said(limit, name, unit=True)}"
    if refused.is_busy:
        return BudgetBusy(
            f"{used}, and calls under way hold {_said(balance.held[at], name)}: this one needs "
            f"{_said(refused.needed, name)}. Try again when one of them has ended.",
            arithmetic,
        )
    short = "" if balance.used[at] >= limit else f", and this call needs {_said(refused.needed, name)}"
    exhausted = BudgetExhausted(f"{used}{short}. {_remedy(balance, name, claim, refused.needed)}", arithmetic)
    exhausted.status = policy.exhausted_status
    return exhausted


def _remedy(balance: Balance, name: Dimension, claim: Claim, needed: int) -> str:
    refills = f"It refills in {_time(balance.resets_s)}. " if balance.resets_s is not None else ""
    limit, at = balance.limits.of(name) or 0, DIMENSIONS.index(name)
    if claim.declared.of(name) == limit:
        header = {"tokens": BUDGET_TOKENS, "nano_usd": BUDGET_USD}.get(name, b"").decode()
        return f"{refills}The call itself declares this budget in {header}: raise it there, or start a new session."
    if balance.key.kind == "key":
        return f"{refills}Raise its budget where the key is configured (auth.keys, or gateway keys)."
    command = _command(balance.key, name, max(2 * limit, balance.used[at] + 2 * needed))
    return f"{refills}Raise it with: {command}, or start a new session."


def _command(key: AccountKey, name: Dimension, enough: int) -> str:
    """What sets a session's budget to this, or to the most there is, as a shell takes it."""
    said = SessionKey(key.namespace, key.id).shown()
    session = quote(said)
    words = {
        "tokens": [session, str(min(MOST, enough))],
        "nano_usd": [session, "--usd", f"{Decimal(min(nano(MOST_USD), enough)) / NANO:f}"],
        "calls": [session, "--calls", str(min(MOST, enough))],
    }[name]
    if said.startswith("-"):
        # It is no option behind two dashes, and neither is anything else.
        words = ["--", *words] if name == "tokens" else [*words[1:], "--", session]
    return " ".join(["gateway sessions budget", *words])


def dimension_json(balance: Balance, name: Dimension, now: float) -> dict[str, int | str | None]:
    """Return one budget for programs: whose account, its unit, limit and use, what is held, and when it refills.

    `id`: of the session, or the name of the client key.
    """
    at = DIMENSIONS.index(name)
    resets = None
    if balance.resets_s is not None:
        resets = (
            datetime.fromtimestamp(now + balance.resets_s, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        )
    limit = balance.limits.of(name)
    return {
        "account": balance.key.kind,
        "id": balance.key.id if balance.key.kind == "session" else balance.key.namespace,
        "unit": _UNITS[name],
        "limit": _number(limit, name) if limit is not None else None,
        "used": _number(balance.used[at], name),
        "held": _number(balance.held[at], name),
        "resets_at": resets,
    }


def usd(nano_usd: int) -> str:
    """US dollars as we write them: six decimals."""
    return f"{Decimal(nano_usd) / NANO:.6f}"


def _number(value: int, name: Dimension) -> int | str:
    return usd(value) if name == "nano_usd" else value


def _said(value: int, name: Dimension, *, unit: bool = False) -> str:
    if name == "nano_usd":
        return f"{usd(value)} USD"
    return f"{value:,} {_UNITS[name]}" if unit else f"{value:,}"


def _time(seconds: float) -> str:
    for size, name in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{round(seconds / size)} {name}"
    return f"{ceil(seconds)} s"
