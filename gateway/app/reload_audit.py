"""Record reloads of the configuration in the audit log, once for all workers of a machine."""

from __future__ import annotations

import hashlib
import platform
import secrets
import time
from collections.abc import Callable
from typing import Final

import msgspec

from gateway.config import Settings
from gateway.config.differences import differences
from gateway.core.audit import CONFIGURATION, Author
from gateway.core.errors import StoreUnavailable
from gateway.core.ports import Lessons, Store
from gateway.server.audit import record_change

#: the actor of a reload that was not requested over the API
SIGNAL: Final = "signal SIGHUP"
#: All workers get the signal within this time. A second signal with the same changes is then not recorded.
_TOGETHER_S: Final = 10.0


class _Claim(msgspec.Struct):
    """The worker that records the last reload: what changed, when (Unix seconds), and the id of this worker's claim."""

    changed: str
    at: float
    id: str


async def record_reload(store: Store, author: Author, old: Settings, new: Settings) -> None:
    """Record a reload that this author requested."""
    values, now_in_force = differences(old, new)
    await record_change(store, author, "config.reload", CONFIGURATION, old=values, new=now_in_force)


async def record_signal(store: Store, old: Settings, new: Settings, clock: Callable[[], float] = time.time) -> None:
    """Record a reload by a signal, unless another worker of this machine records the same one."""
    if await claim_reload(store, old, new, clock):
        await record_reload(store, Author(SIGNAL, platform.node()), old, new)


async def claim_reload(store: Lessons, old: Settings, new: Settings, clock: Callable[[], float] = time.time) -> bool:
    """Return True if no other worker of this machine has claimed a reload with these changes just now.

    The worker that serves `POST /api/reload` claims it before the others get the signal. While the store is
    unavailable, each worker records the reload, in its log. `clock`: returns Unix seconds.
    """
    values = differences(old, new)
    changed = hashlib.sha256(msgspec.json.encode(values)).hexdigest()
    has_changes = any(values)
    mine = _Claim(changed, clock(), secrets.token_hex(8))

    def lesson(known: bytes | None) -> bytes:
        last = _decoded(known)
        if known is None or last is None or abs(mine.at - last.at) >= _TOGETHER_S:
            return msgspec.json.encode(mine)
        # A worker that has just started with the new configuration finds no changes.
        return known if last.changed == changed or not has_changes else msgspec.json.encode(mine)

    name = f"served/reload/{platform.node()}"
    try:
        found = _decoded((await store.learn({name: lesson}))[name])
    except StoreUnavailable:
        return True
    return found is not None and found.id == mine.id


def _decoded(known: bytes | None) -> _Claim | None:
    try:
        return msgspec.json.decode(known, type=_Claim) if known is not None else None
    except msgspec.MsgspecError:
        return None
