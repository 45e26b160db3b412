"""Change sessions: budget, step, reset, resume and deletion, each recorded in the audit log.

The API and the commands share these functions.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.core import errors
from gateway.core.audit import Author
from gateway.core.ledger.arithmetic import NOTHING, Balance, Claim, Dimension
from gateway.core.ledger.charging import BudgetPolicy, claim_of_session
from gateway.core.ledger.refusals import usd
from gateway.core.ledger.session_key import SessionKey
from gateway.core.ports import Observer, Store
from gateway.core.session import SessionState
from gateway.server.audit import record_change
from gateway.server.shown import limits_json
from gateway.server.steps import StepSetting, set_step


async def change_budget(
    store: Store, key: SessionKey, limits: Mapping[Dimension, int | None] | None, policy: BudgetPolicy, author: Author
) -> None:
    """Set limits of one session, or the configured ones again (None)."""
    claim = claim_of_session(policy, key)
    before = await _balance(store, claim)
    await store.override_limits(key.account, limits)
    old = before.limits if before is not None else claim.configured
    changed = {str(name): limit for name, limit in (limits or {}).items()}
    new = claim.configured if limits is None else old._replace(**changed)
    known = limits_json(old) if before is not None else None
    await record_change(store, author, "session.budget", key.shown(), old=known, new=limits_json(new))


async def change_step(
    store: Store, key: SessionKey, setting: StepSetting, observers: Sequence[Observer], author: Author
) -> None:
    """Set the step of an agent of a session."""
    before = (await store.remembered(key)).state
    after = await set_step(store, key, setting, observers, time.time())
    old, new = _step_json(before, setting), _step_json(after, setting)
    await record_change(store, author, "session.step", key.shown(), old=old, new=new)


def _step_json(state: SessionState, setting: StepSetting) -> dict[str, Any]:
    agent = setting.agent
    step = state.steps.get(agent.name)
    return {
        "agent": agent.name,
        "active_step": step.active if step is not None else None,
        "sequence_index": agent.finished_entries(step) if step is not None else None,
    }


async def reset_session(store: Store, key: SessionKey, author: Author) -> bool:
    """Set the totals and the used budget to zero. Return False if nothing is stored under this name."""
    was_stored, used = await is_stored(store, key), await _used_json(store, key)
    was_reset = await store.reset(key) or was_stored
    if was_reset:
        await record_change(store, author, "session.reset", key.shown(), old=used)
    return was_reset


async def resume_session(store: Store, key: SessionKey, author: Author) -> bool:
    """Allow the calls of a stopped session again. Return False if nothing is stored under this name.

    What it repeated so far no longer counts, and its limits in seconds begin again.
    """
    stopped = (await store.remembered(key)).state.stopped
    if stopped is None:
        return await is_known(store, key)
    now = time.time()
    await store.update(key, lambda state: state.resumed(now))
    await record_change(store, author, "session.resume", key.shown(), old={"last_stop": stopped.stopped})
    return True


async def delete_session(store: Store, key: SessionKey, author: Author) -> bool:
    """Delete a session and its budget. Return False if nothing is stored under this name."""
    was_stored, used = await is_stored(store, key), await _used_json(store, key)
    was_deleted = await store.delete(key) or was_stored
    if was_deleted:
        await record_change(store, author, "session.delete", key.shown(), old=used)
    return was_deleted


async def is_known(store: Store, key: SessionKey) -> bool:
    """Return True if the session has a charged call, or `is_stored`."""
    return await store.session(key) is not None or await is_stored(store, key)


async def is_stored(store: Store, key: SessionKey) -> bool:
    """Return True if something is stored under this name, even without a charged call.

    That can be a budget, usage of child sessions, or records of failed calls.
    """
    balance = await _balance(store, Claim(key.account))
    if balance is None:
        # The account exists. Deleting the session repairs it.
        return True
    return balance.used != NOTHING or not balance.limits.is_none or bool(await store.calls(key, 1))


async def _used_json(store: Store, key: SessionKey) -> dict[str, Any] | None:
    """Return what a session has used of its budget; None if its account cannot be read."""
    balance = await _balance(store, Claim(key.account))
    if balance is None:
        return None
    used = balance.used
    return {"used_tokens": used.tokens, "used_usd": usd(used.nano_usd), "used_calls": used.calls}


async def _balance(store: Store, claim: Claim) -> Balance | None:
    """Return the balance of an account, or None if it cannot be read."""
    try:
        (balance,) = await store.balances([claim])
    except errors.StoreDamaged:
        return None
    return balance
