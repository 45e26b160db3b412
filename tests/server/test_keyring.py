"""Client keys of the store are known within seconds, and a store that is away opens no door."""

from __future__ import annotations

import pytest

from gateway.core.errors import StoreUnavailable, Unauthenticated
from gateway.core.ledger import Limits
from gateway.core.ports import StoredKey
from gateway.core.spending import KeyBudget
from gateway.server.auth import Authenticator, KeyRule, digest
from gateway.server.keyring import KeyRing
from gateway.stores.memory import MemoryStore

CAROL = StoredKey("carol", digest("gw-carol"), 1.0, ("gpt-*",), Limits(tokens=5), 7)
HEADERS = [(b"authorization", b"Bearer gw-carol")]


class FlakyStore(MemoryStore):
    away = False
    asked = 0

    async def keys(self) -> list[StoredKey]:
        self.asked += 1
        if self.away:
            raise StoreUnavailable("away")
        return [*await super().keys()]


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


async def test_a_key_is_known_soon_after_it_was_made_and_soon_not_any_more() -> None:
    store, clock = FlakyStore(), Clock()
    ring = KeyRing(store, clock)
    await ring.ready()
    await store.add_key(CAROL)
    clock.seconds += 1
    await ring.ready()
    assert ring.keys == {}
    clock.seconds += 2
    for _ in range(100):
        await ring.ready()
    assert ring.keys == {CAROL.digest: CAROL}
    assert store.asked == 2
    await store.revoke_key("carol")
    clock.seconds += 3
    await ring.ready()
    assert ring.keys == {}


async def test_while_the_store_is_away_the_known_keys_hold_and_unread_ones_let_nobody_in() -> None:
    store, clock = FlakyStore(), Clock()
    await store.add_key(CAROL)
    ring = KeyRing(store, clock)
    await ring.ready()
    store.away = True
    clock.seconds += 10
    await ring.ready()
    assert CAROL.digest in ring.keys
    with pytest.raises(StoreUnavailable):
        await KeyRing(store, clock).ready()


async def test_a_stored_key_opens_what_it_may_and_closes_the_door_to_all_others() -> None:
    auth = Authenticator([], None, stored=lambda: {CAROL.digest: CAROL})
    caller = auth.caller(HEADERS, "127.0.0.1")
    assert (caller.namespace, caller.models) == ("carol", ("gpt-*",))
    assert caller.budget == KeyBudget(Limits(tokens=5), 7)
    assert auth.api(HEADERS, "10.0.0.1").namespace == "carol"
    with pytest.raises(Unauthenticated):
        auth.caller([(b"authorization", b"Bearer other")], "127.0.0.1")


async def test_where_a_key_is_required_none_at_all_lets_nobody_in() -> None:
    auth = Authenticator([], None, is_required=True)
    with pytest.raises(Unauthenticated, match="gateway keys add"):
        auth.caller(HEADERS, "127.0.0.1")


async def test_a_configured_key_stands_before_a_stored_one() -> None:
    rule = KeyRule("config", CAROL.digest)
    auth = Authenticator([rule], None, stored=lambda: {CAROL.digest: CAROL})
    assert auth.caller(HEADERS, "127.0.0.1").namespace == "config"


async def test_those_who_wait_for_a_store_that_is_away_do_not_wait_one_after_the_other() -> None:
    store, clock = FlakyStore(), Clock()
    store.away = True
    ring = KeyRing(store, clock)
    for _ in range(40):
        with pytest.raises(StoreUnavailable):
            await ring.ready()
    assert store.asked == 1
    store.away = False
    clock.seconds += 1
    await ring.ready()
