"""Describe to callers what is left of a budget, and why a call was refused."""

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
    most_used_balance,
    nano,
)
from gateway.core.ledger.charging import BudgetPolicy
from gateway.core.ledger.session_key import SessionKey
from gateway.core.values import dataclass

_UNITS: Final[Mapping[Dimension, str]] = {"tokens": "tokens", "nano_usd": "usd", "calls": "calls"}


@dataclass(frozen=True, slots=True)
class Allowance:
    """What response headers report about budgets: for tokens and USD each, the budget with the least left.

    A field is None if no budget limits it. USD are text with six decimals.

    Attributes:
        warning: the largest used share, if it has reached the threshold for a warning; it can exceed 1. None otherwise.
    """

    limit_tokens: int | None = None
    remaining_tokens: int | None = None
    limit_usd: str | None = None
    remaining_usd: str | None = None
    warning: float | None = None


def allowance(balances: Sequence[Balance], warn_at: float) -> Allowance | None:
    """Return what to report about these accounts, or None if nothing is limited."""
    most_used = most_used_balance(balances)
    if most_used is None:
        return None
    used = most_used.used_fraction or 0.0
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
    """Return the limit of the account with the least left, and what is left of it."""
    limited = [
        (left, limit)
        for balance in balances
        if (left := balance.left(name)) is not None and (limit := balance.limits.of(name)) is not None
    ]
    left, limit = min(limited, default=(None, None))
    return limit, left


def refusal(refused: Refused, claim: Claim, policy: BudgetPolicy, now: float) -> BudgetFault:
    """Return the error for a caller whose hold was refused. `now`: Unix time in seconds."""
    balance, name = refused.balance, refused.dimension
    at = DIMENSIONS.index(name)
    arithmetic = dimension_json(balance, name, now) | {"needed": _number(refused.needed, name)}
    if balance.key.kind == "rate":
        limited = RateLimited(
            f"The client key exceeds its limit of {balance.limits.calls:,} requests per minute. "
            f"Wait {ceil(balance.resets_s or 0)} s.",
            arithmetic,
        )
        limited.retry_after = max(1, ceil(balance.resets_s or 0))
        return limited
    limit = balance.limits.of(name) or 0
    owner = "have used" if balance.key.kind == "all" else "has used"
    spent, whole = _amount(balance.used[at], name), _amount(limit, name, unit=True)
    used = f"{_owner(balance.key)} {owner} {spent} of {'their' if balance.key.kind == 'all' else 'its'} {whole}"
    if refused.is_busy:
        return BudgetBusy(
            f"{used}, and running calls have reserved {_amount(balance.held[at], name)}. This call needs "
            f"{_amount(refused.needed, name)}. Try again when a running call has ended.",
            arithmetic,
        )
    exhausted = BudgetExhausted(
        f"{used}{_shortage(refused, limit)}. {_remedy(balance, name, claim, refused.needed)}", arithmetic
    )
    exhausted.status = policy.exhausted_status
    return exhausted


def _shortage(refused: Refused, limit: int) -> str:
    """Return why a call does not fit into what an account has left, as the end of a sentence."""
    balance, name = refused.balance, refused.dimension
    if balance.closing:
        return ", and its one closing call was taken"
    short = (
        ""
        if balance.used[DIMENSIONS.index(name)] >= limit
        else ", and this call needs " + _amount(refused.needed, name)
    )
    kept = balance.kept(name)
    return f"{short}; {_amount(kept, name, unit=True)} are kept for a closing call" if kept else short


def _owner(key: AccountKey) -> str:
    """Return the owner of an account as the subject of a sentence."""
    if key.kind == "session":
        return f'Session "{key.id}"'
    if key.kind == "agent":
        return f'Agent "{key.agent_id}" of session "{key.session_id}"'
    if key.kind == "group":
        return f'Group "{key.namespace}" of client keys'
    return "All client keys together" if key.kind == "all" else f'The client key "{key.namespace}"'


def _remedy(balance: Balance, name: Dimension, claim: Claim, needed: int) -> str:
    refills = f"It refills in {_duration(balance.resets_s)}. " if balance.resets_s is not None else ""
    limit, at = balance.limits.of(name) or 0, DIMENSIONS.index(name)
    if claim.declared.of(name) == limit:
        header = {"tokens": BUDGET_TOKENS, "nano_usd": BUDGET_USD}.get(name, b"").decode()
        return f"{refills}The call itself declares this budget in {header}: raise it there, or start a new session."
    enough = max(2 * limit, balance.used[at] + 2 * needed)
    if balance.key.kind == "key":
        option = f"--budget-{_UNITS[name]} {_argument(enough, name)}"
        return f"{refills}Raise it with: gateway keys set {balance.key.namespace} {option}, or in auth.keys."
    if balance.key.kind in ("group", "all"):
        place = f"auth.groups.{balance.key.namespace}.budget" if balance.key.kind == "group" else "auth.budget"
        return f"{refills}Raise it in {place} and reload."
    if balance.key.kind == "agent":
        return f"{refills}Raise the limit in budget.agents, or let the main agent or a new agent go on."
    command = _command(balance.key, name, enough)
    return f"{refills}Raise it with: {command}, or start a new session."


def _command(key: AccountKey, name: Dimension, enough: int) -> str:
    """Return a shell command that sets a session's budget to `enough`, or to the largest possible one."""
    name_shown = SessionKey(key.namespace, key.id).shown()
    session = quote(name_shown)
    limit = _argument(enough, name)
    words = {
        "tokens": [session, limit],
        "nano_usd": [session, "--usd", limit],
        "calls": [session, "--calls", limit],
    }[name]
    if name_shown.startswith("-"):
        # After two dashes nothing is read as an option.
        words = ["--", *words] if name == "tokens" else [*words[1:], "--", session]
    return " ".join(["gateway sessions budget", *words])


def _argument(enough: int, name: Dimension) -> str:
    """Return a limit as an argument of a command, at most the largest possible one."""
    if name == "nano_usd":
        return f"{Decimal(min(nano(MOST_USD), enough)) / NANO:f}"
    return str(min(MOST, enough))


def dimension_json(balance: Balance, name: Dimension, now: float) -> dict[str, int | str | None]:
    """Return a budget as JSON: its account, unit, limit, used and held amounts, and when it refills.

    `id` is the session id, `SESSION/AGENT`, or the name of the client key. `now`: Unix time in seconds.
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
        "id": balance.key.id if balance.key.kind in ("session", "agent") else balance.key.namespace,
        "unit": _UNITS[name],
        "limit": _number(limit, name) if limit is not None else None,
        "used": _number(balance.used[at], name),
        "held": _number(balance.held[at], name),
        "resets_at": resets,
    }


def usd(nano_usd: int) -> str:
    """Return billionths of a US dollar as dollars with six decimals."""
    return f"{Decimal(nano_usd) / NANO:.6f}"


def _number(value: int, name: Dimension) -> int | str:
    return usd(value) if name == "nano_usd" else value


def _amount(value: int, name: Dimension, *, unit: bool = False) -> str:
    if name == "nano_usd":
        return f"{usd(value)} USD"
    return f"{value:,} {_UNITS[name]}" if unit else f"{value:,}"


def _duration(seconds: float) -> str:
    for size, name in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{round(seconds / size)} {name}"
    return f"{ceil(seconds)} s"
