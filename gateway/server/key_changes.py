"""Change client keys in the store, each change recorded in the audit log.

The API and the commands share these functions.
"""

from __future__ import annotations

from typing import Any

from gateway.core.audit import Action, Author
from gateway.core.ledger.windows import window_text
from gateway.core.ports import Store
from gateway.core.stored import KeyChange, StoredKey
from gateway.core.times import time_text
from gateway.server.audit import record_change
from gateway.server.shown import limits_json


async def add_key(store: Store, key: StoredKey, author: Author) -> bool:
    """Keep a client key. Return False if there is one of that name."""
    if not await store.add_key(key):
        return False
    await record_change(store, author, "key.add", key.name, new=key_settings_json(key))
    return True


async def change_key(
    store: Store, name: str, change: KeyChange, author: Author, action: Action = "key.change"
) -> StoredKey | None:
    """Apply a change to a client key, and return the new one. Return None if there is none of that name."""
    old: Any = None

    def noted(key: StoredKey) -> StoredKey:
        nonlocal old
        old = key_settings_json(key)
        return change(key)

    key = await store.change_key(name, noted)
    if key is not None:
        await record_change(store, author, action, name, old=old, new=key_settings_json(key))
    return key


async def revoke_key(store: Store, name: str, author: Author) -> bool:
    """Revoke a client key. Return False if there is none of that name."""
    known = [key for key in await store.keys() if key.name == name]
    if not await store.revoke_key(name):
        return False
    # A key that cannot be read is not among those that are known.
    old = key_settings_json(known[0]) if known else None
    await record_change(store, author, "key.revoke", name, old=old)
    return True


def key_settings_json(key: StoredKey) -> dict[str, Any]:
    """Return the settings of a client key for the audit log, without its digests. null: not limited."""
    return {
        "group": key.group,
        "models": list(key.models) or None,
        **limits_json(key.limits),
        "window": window_text(key.limits.window),
        "rpm": key.rpm,
        "expires_at": time_text(key.expires_at) if key.expires_at is not None else None,
        "replaced_until": [time_text(one.until) for one in key.replaced] or None,
    }
