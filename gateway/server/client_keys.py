"""Create and change client keys of the store, and show client keys as JSON, for /api and the commands."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any, Final

from gateway import config
from gateway.config.policies import key_of
from gateway.core import errors
from gateway.core.expiry import NO_DATE, date_or_time
from gateway.core.ledger.arithmetic import NANO, NO_LIMITS, AccountKey, Balance, Claim
from gateway.core.ledger.burn_rate import NEWEST_CALLS, burn_rate
from gateway.core.ledger.charging import ALL_KEYS, KeyContext, SharedBudgets
from gateway.core.ledger.windows import time_zone, window_text
from gateway.core.ports import Ledger, Store
from gateway.core.stored import StoredKey
from gateway.core.times import time_text
from gateway.server.auth import digest
from gateway.server.shown import burn_rate_json, session_budget_json
from gateway.stores.key_uses import last_uses

#: the settings of a client key that can be changed; those of its budget are changed one by one
SETTINGS: Final = ("models", "budget", "rpm", "expires", "group")


_NO_CONTEXT: Final = KeyContext()


def new_secret() -> str:
    """Return a new secret of a client key, with 256 random bits."""
    return f"gw-{secrets.token_urlsafe(32)}"


def new_key(
    name: str, asked: Mapping[str, Any], secret: str, now: float, context: KeyContext = _NO_CONTEXT
) -> StoredKey:
    """Return a client key with the requested settings, see `changed`. `now`: Unix time in seconds.

    Raises:
        ConfigError: the name or a setting is invalid.
    """
    return changed(StoredKey(name, digest(secret), now), asked, now, context)


def changed(key: StoredKey, asked: Mapping[str, Any], now: float, context: KeyContext = _NO_CONTEXT) -> StoredKey:
    """Return a client key with the requested settings; others stay, also single limits of the budget.

    Args:
        key: the key as stored.
        asked: values of `SETTINGS`. `expires` is a date, a time, or a duration from now; null removes a setting.
        now: Unix time in seconds.
        context: the groups of which it may name one, and the time zone of its window and of dates.

    Raises:
        ConfigError: settings are unknown or invalid; each problem begins with the name of the setting.
    """
    unknown = [
        f"{name[:100]}: is not a setting of a client key; use {', '.join(SETTINGS)}"
        for name in asked
        if name not in SETTINGS
    ]
    if unknown:
        raise errors.ConfigError(unknown)
    expires_at = _expires_at(asked["expires"], now, context.zone) if "expires" in asked else key.expires_at
    settings = {name: asked.get(name, getattr(key, name)) for name in ("rpm", "group")}
    settings["models"] = asked.get("models", key.models) or ()
    budget = _merged_budget(key, asked.get("budget", {}))
    checked = key_of(config.client_key(key.name, {**settings, "budget": budget}), context.zone)
    _check_patterns(checked.models)
    if asked.get("group") is not None and checked.group not in context.shared.groups:
        problem = "group: auth.groups of the configuration has no group of this name; add it there, or name another one"
        raise errors.ConfigError([problem])
    limits = NO_LIMITS if checked.limits.is_none else checked.limits
    if limits.is_none and (asked.get("budget") or {}).get("window") is not None:
        raise errors.ConfigError(["budget.window: has no limit to refill; set tokens, usd or calls"])
    return replace(
        key, models=checked.models, limits=limits, rpm=checked.rpm, expires_at=expires_at, group=checked.group
    )


def _merged_budget(key: StoredKey, asked: Any) -> dict[str, Any]:
    """Return the budget of a client key as in the configuration, with the requested changes.

    Raises:
        ConfigError: it is not an object, or a limit is true or false, which would be read as 1 or 0.
    """
    if asked is None:
        return {}
    if not isinstance(asked, dict):
        raise errors.ConfigError(["budget: must contain tokens, usd, calls or window; null removes the budget"])
    for name, value in asked.items():
        if isinstance(value, bool):
            raise errors.ConfigError([f"budget.{name[:100]}: input should be a number, not true or false"])
    limits = key.limits
    present = {
        "tokens": limits.tokens,
        "usd": Decimal(limits.nano_usd) / NANO if limits.nano_usd is not None else None,
        "calls": limits.calls,
        "window": window_text(limits.window),
    }
    return {**present, **asked}


def _check_patterns(patterns: Sequence[str]) -> None:
    """Refuse a pattern that no model name matches: such a key would be listed with models, but may call none.

    Raises:
        ConfigError: a pattern is empty, or contains white space or a comma.
    """
    for pattern in patterns:
        if not pattern or any(char.isspace() or char == "," for char in pattern):
            raise errors.ConfigError(["models: each must be one pattern of model names, without commas or spaces"])


def _expires_at(asked: Any, now: float, zone: str) -> float | None:
    """Return the Unix time of a date, a time or a duration from now; None for null.

    Raises:
        ConfigError: it is none of these, or not in the future.
    """
    if asked is None:
        return None
    try:
        at = _time_of(asked if isinstance(asked, str) else "", now, zone)
    except ValueError:
        raise errors.ConfigError([f"expires: {NO_DATE}, or a duration like 30d"]) from None
    if at <= now:
        raise errors.ConfigError(["expires: must be in the future; revoke the key to end it now"])
    return at


def _time_of(text: str, now: float, zone: str) -> float:
    try:
        return now + config.duration(text)
    except ValueError:
        return date_or_time(text, time_zone(zone))


def rotated(key: StoredKey, secret: str, now: float, overlap: Any) -> StoredKey:
    """Return a client key with a new secret. The present one is accepted for the duration `overlap`; "0": ends now.

    Raises:
        ConfigError: the overlap is invalid, or too many replaced secrets are still accepted.
    """
    try:
        overlap_s = 0 if overlap in ("0", "0s", 0) else config.duration(overlap if isinstance(overlap, str) else "")
    except ValueError as error:
        raise errors.ConfigError([f"overlap: {error}; 0 ends the present secret at once"]) from None
    try:
        return key.rotated(digest(secret), now, overlap_s)
    except ValueError as error:
        raise errors.ConfigError([f"overlap: {error}"]) from None


async def rows_of(store: Store, keys: Sequence[StoredKey], configured: Sequence[StoredKey]) -> list[dict[str, Any]]:
    """Return client keys as JSON, with their budgets, their sessions and their last use.

    `configured`: those of the keys that are in the configuration, without a time of creation.
    """
    uses = await last_uses(store)
    counts = await store.session_counts([key.name for key in keys])
    balances = await _balances(store, [Claim(AccountKey("key", key.name), key.limits) for key in keys])
    rows = []
    for key, (balance, problem), sessions in zip(keys, balances, counts, strict=True):
        budget = session_budget_json(balance, has_modes=False)["budget"] if balance is not None else None
        rows.append(
            {
                "name": key.name,
                "in_configuration": any(key is one for one in configured),
                "group": key.group,
                "models": list(key.models),
                "budget": budget,
                "window": window_text(key.limits.window),
                "rpm": key.rpm,
                "created_at": time_text(key.created_at) if key.created_at else None,
                "expires_at": time_text(key.expires_at) if key.expires_at is not None else None,
                "replaced_until": [time_text(one.until) for one in key.replaced],
                "last_used_at": time_text(uses[key.name]) if key.name in uses else None,
                "sessions": sessions,
                "problem": problem,
            }
        )
    return rows


async def burn_rate_of(store: Store, key: StoredKey, now: float) -> dict[str, Any] | None:
    """Return when the budget of a client key is empty as JSON, or None if that is unknown. It reads many calls."""
    ((balance, _),) = await _balances(store, [Claim(AccountKey("key", key.name), key.limits)])
    if balance is None or balance.limits.is_none:
        return None
    return burn_rate_json(burn_rate(balance, await store.newest_calls(key.name, NEWEST_CALLS), now))


async def shared_rows(store: Ledger, shared: SharedBudgets) -> list[dict[str, Any]]:
    """Return the budgets that client keys share as JSON: that of all keys under the name null, and of each group."""
    claims = [Claim(ALL_KEYS, shared.every_key)] if not shared.every_key.is_none else []
    claims += [Claim(AccountKey("group", name), limits) for name, limits in shared.groups.items()]
    rows = []
    for claim, (balance, problem) in zip(claims, await _balances(store, claims), strict=True):
        budget = session_budget_json(balance, has_modes=False)["budget"] if balance is not None else None
        group = claim.key.namespace if claim.key.kind == "group" else None
        rows.append(
            {"group": group, "budget": budget, "window": window_text(claim.configured.window), "problem": problem}
        )
    return rows


def current(key: StoredKey, now: float) -> StoredKey:
    """Return a client key without replaced secrets that have ended. `now`: Unix time in seconds."""
    return replace(key, replaced=tuple([one for one in key.replaced if one.until > now]))


async def _balances(store: Ledger, claims: Sequence[Claim]) -> list[tuple[Balance | None, str | None]]:
    """Return the balance of each account, or the reason why it cannot be read.

    An unreadable account does not hide the balances of other keys.
    """
    try:
        found = await store.balances(claims)
    except errors.StoreDamaged as fault:
        if len(claims) > 1:
            return [one for claim in claims for one in await _balances(store, [claim])]
        return [(None, fault.message)]
    return [(balance, None) for balance in found]
