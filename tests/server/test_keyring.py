"""Client keys of the store are known within seconds, and an unavailable store gives no access."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.core.errors import StoreDamaged, StoreUnavailable, Unauthenticated
from gateway.core.ledger.arithmetic import NO_LIMITS, Limits
from gateway.core.ledger.charging import KeyLimits
from gateway.core.stored import StoredKey
from gateway.mock import MockProvider, MockServer
from gateway.server.auth import Authenticator, KeyRule, digest
from gateway.server.keyring import KeyRing
from gateway.stores.memory import MemoryStore
from gateway.stores.redis import RedisStore
from tests.conftest import StartGateway
from tests.stores.redis_servers import RedisServer
from tests.support.timing import eventually
from tests.support.web import CHAT, HI

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


async def test_added_and_revoked_keys_are_known_soon() -> None:
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


async def asked_again(store: FlakyStore) -> None:
    asked = store.asked
    await eventually(lambda: store.asked > asked + 1)


async def test_keys_are_read_again_in_the_background(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(FlakyStore):
        is_broken = False

        async def keys(self) -> list[StoredKey]:
            found = await super().keys()
            if self.is_broken:
                raise ZeroDivisionError
            return found

    store, clock = Failing(), Clock()
    ring = KeyRing(store, clock, away=lambda _: pytest.fail("no call has missed it"), look_s=0.001)
    await ring.ready()
    looking = asyncio.create_task(ring.keep_fresh())
    clock.seconds += 10
    await eventually(lambda: store.asked > 1)
    store.away = True
    await asked_again(store)
    store.away, store.is_broken = False, True
    await asked_again(store)
    store.is_broken = False
    assert "reading the client keys from the store failed; it will be tried again" in caplog.messages
    await store.add_key(CAROL)
    await eventually(lambda: CAROL.digest in ring.keys)
    looking.cancel()
    asked = store.asked
    await ring.ready()
    assert store.asked == asked


class SlowStore(MemoryStore):
    """A store whose first read returns late, with the keys from when it was requested. The second returns at once."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        self.may_answer = {1: asyncio.Event(), 3: asyncio.Event()}

    async def keys(self) -> list[StoredKey]:
        self.asked += 1
        slow, found = self.may_answer.get(self.asked), [*await super().keys()]
        if slow is not None:
            await slow.wait()
        return found


async def test_overtaken_read_does_not_restore_a_revoked_key() -> None:
    store, clock = SlowStore(), Clock()
    await store.add_key(CAROL)
    ring = KeyRing(store, clock, look_s=0.001)
    looking = asyncio.create_task(ring.keep_fresh())
    await eventually(lambda: store.asked == 1)
    await store.revoke_key("carol")
    clock.seconds += 1
    await ring.ready()
    assert ring.keys == {}
    store.may_answer[1].set()
    await eventually(lambda: store.asked == 3)
    looking.cancel()
    assert ring.keys == {}


async def test_age_of_keys_counts_from_the_start_of_the_read() -> None:
    store, clock = SlowStore(), Clock()
    await store.add_key(CAROL)
    ring = KeyRing(store, clock)
    first = asyncio.create_task(ring.ready())
    await eventually(lambda: store.asked == 1)
    await store.revoke_key("carol")
    clock.seconds += 1.5
    store.may_answer[1].set()
    await first
    assert CAROL.digest in ring.keys
    clock.seconds += 1
    await ring.ready()
    assert ring.keys == {}


async def test_calls_share_one_slow_read() -> None:
    class Late(FlakyStore):
        async def keys(self) -> list[StoredKey]:
            await asyncio.sleep(0)
            clock.seconds += 5
            return await super().keys()

    clock = Clock()
    store = Late()
    ring = KeyRing(store, clock)
    await asyncio.gather(*(ring.ready() for _ in range(5)))
    assert store.asked == 1


async def test_known_keys_stay_valid_while_the_store_is_unavailable() -> None:
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


async def test_unavailable_store_is_reported_once_and_no_call_waits_for_it() -> None:
    store, clock, errors = FlakyStore(), Clock(), list[StoreUnavailable]()
    ring = KeyRing(store, clock, is_unavailable=lambda: bool(errors), away=errors.append)
    await ring.ready()
    await store.add_key(CAROL)
    store.away = True
    for _ in range(3):
        clock.seconds += 10
        await ring.ready()
    assert (store.asked, len(errors)) == (2, 1)
    store.away = False
    errors.clear()
    await ring.ready()
    assert CAROL.digest in ring.keys


async def test_damaged_store_is_not_treated_as_unavailable() -> None:
    class Damaged(MemoryStore):
        async def keys(self) -> list[StoredKey]:
            raise StoreDamaged("no keys")

    with pytest.raises(StoreDamaged):
        await KeyRing(Damaged(), Clock(), away=lambda _: pytest.fail("it is not away")).ready()


async def test_each_call_gets_its_own_error_while_the_store_is_not_retried() -> None:
    store = FlakyStore()
    store.away = True
    ring = KeyRing(store, Clock())
    told = await asyncio.gather(*(ring.ready() for _ in range(3)), return_exceptions=True)
    assert [str(error) for error in told] == ["away"] * 3
    assert len({id(error) for error in told}) == 3, "an exception that is raised again grows with each time"
    assert store.asked == 1


async def test_keys_read_at_the_start_stay_valid_without_the_store() -> None:
    store, clock = FlakyStore(), Clock()
    await store.add_key(CAROL)
    ring = KeyRing(store, clock)
    await ring.load()
    store.away = True
    clock.seconds += 10
    await ring.ready()
    assert CAROL.digest in ring.keys


async def test_store_unavailable_at_the_start_is_read_by_the_first_call() -> None:
    store, clock = FlakyStore(), Clock()
    await store.add_key(CAROL)
    store.away = True
    ring = KeyRing(store, clock)
    await ring.load()
    store.away = False
    clock.seconds += 1
    await ring.ready()
    assert CAROL.digest in ring.keys


def test_idle_worker_knows_the_keys_when_the_store_becomes_unavailable(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway, tmp_path: Path
) -> None:
    async def add(url: str) -> None:
        store = RedisStore(url)
        await store.add_key(replace(CAROL, models=(), limits=NO_LIMITS))
        await store.aclose()

    server = RedisServer(tmp_path)
    try:
        asyncio.run(add(server.url))
        flags = {"store.url": server.url, "store.on_failure": "open", "store.timeout_ms": 250}
        gateway = gateway_server(mock_server.url, **flags)
        server.kill()
        own, other = ({"authorization": f"Bearer {key}"} for key in ("gw-carol", "gw-other"))
        body = {"model": "mock-small", "messages": HI}
        assert gateway.web.post(CHAT, body, own).status == 200
        assert gateway.web.post(CHAT, body, other).status == 401
    finally:
        server.kill()


async def test_stored_key_gets_its_access_and_calls_without_a_key_are_refused() -> None:
    auth = Authenticator([], None, stored=lambda: {CAROL.digest: CAROL})
    caller = auth.caller(HEADERS, "127.0.0.1")
    assert (caller.namespace, caller.models) == ("carol", ("gpt-*",))
    assert caller.budget == KeyLimits(Limits(tokens=5), 7)
    assert auth.api(HEADERS, "10.0.0.1").namespace == "carol"
    with pytest.raises(Unauthenticated):
        auth.caller([(b"authorization", b"Bearer other")], "127.0.0.1")


async def test_required_key_refuses_all_calls_if_no_key_exists() -> None:
    auth = Authenticator([], None, is_required=True)
    with pytest.raises(Unauthenticated, match="gateway keys add"):
        auth.caller(HEADERS, "127.0.0.1")


async def test_configured_key_has_priority_over_a_stored_one() -> None:
    rule = KeyRule("config", CAROL.digest)
    auth = Authenticator([rule], None, stored=lambda: {CAROL.digest: CAROL})
    assert auth.caller(HEADERS, "127.0.0.1").namespace == "config"


async def test_calls_do_not_wait_one_after_the_other_for_an_unavailable_store() -> None:
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
