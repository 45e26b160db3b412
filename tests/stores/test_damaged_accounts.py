"""An account that cannot be read refuses only its own calls, is never treated as empty, and can be repaired."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path

import pytest

from gateway.core.errors import StoreDamaged, StoreUnavailable
from gateway.core.ledger.arithmetic import AccountKey, Amount, Claim, Granted, Hold, Limits
from gateway.core.ledger.session_key import SessionKey
from gateway.core.ports import RecordRefused, Store
from gateway.core.record import ORPHANED, CallRecord
from gateway.core.stored import OpenHold
from gateway.core.usage import Charge, Usage
from gateway.stores.journal import Journal
from gateway.stores.leases import Lease, Leases
from gateway.stores.redis import RedisStore
from gateway.stores.redis.keys import Keys
from gateway.stores.settler import Settler
from gateway.stores.sqlite import SqliteStore
from tests.stores.files import PATIENT_S, Time, write
from tests.stores.redis_servers import cli

MakeRecord = Callable[..., CallRecord]

KEY = SessionKey("alice", "s")
OTHER = SessionKey("alice", "other")
CLIENT = AccountKey("key", "alice")
LIMITED = Claim(KEY.account, Limits(tokens=1_000))
LEASE_S = 60.0
_KEYS = Keys("gateway:")
#: how each kind of store is damaged: a column or a field, and what is put there
COLUMNS = {"decided": b"junk", "used_tokens": "many", "held_calls": b"\0", "opened_wall": "then", "epoch": "first"}
FIELDS = {"d1": "junk", "u1": "many", "h3": "x", "o": "then", "e": "first", "another type": ""}
KINDS = [
    *(("sqlite", column) for column in COLUMNS),
    *(("redis", field) for field in FIELDS),
    *(("cluster", field) for field in ("d1", "u1", "another type")),
]


@dataclass(frozen=True)
class Damaged:
    """A store, and what damages and mends the account of the session in it."""

    store: Store
    moments: Time
    damage: Callable[[], object]
    mend: Callable[[], object]


def in_file(path: Path, moments: Time, column: str) -> Damaged:
    change = f"UPDATE accounts SET {column} = ? WHERE kind = 'session' AND namespace = 'alice' AND id = 's'"  # noqa: S608
    sound = 0 if COLUMNS[column] != b"junk" and column != "opened_wall" else None

    def damage() -> None:
        write(path, change, COLUMNS[column])

    store = SqliteStore(path, timeout_s=PATIENT_S, moment=moments)
    return Damaged(store, moments, damage, lambda: write(path, change, sound))


def in_redis(url: str, port: str, moments: Time, field: str) -> Damaged:
    name = _KEYS.account(KEY.account)

    def damage() -> None:
        if field == "another type":
            cli("-c", "-p", port, "del", name)
            cli("-c", "-p", port, "set", name, "junk")
        else:
            cli("-c", "-p", port, "hset", name, field, FIELDS[field])

    def mend() -> None:
        cli("-c", "-p", port, *(("del", name) if field == "another type" else ("hdel", name, field)))

    return Damaged(
        RedisStore(url, timeout_s=PATIENT_S, moment=moments.overhead, ahead_s=lambda: moments.passed),
        moments,
        damage,
        mend,
    )


@pytest.fixture(params=KINDS, ids=" ".join)
async def damaged(request: pytest.FixtureRequest, path: Path, moments: Time) -> AsyncIterator[Damaged]:
    kind, place = request.param
    if kind == "sqlite":
        made = in_file(path, moments, place)
    else:
        server = request.getfixturevalue(f"redis_{'server' if kind == 'redis' else 'cluster'}")
        server.flush()
        port = server.port if kind == "redis" else server.nodes[0].port
        made = in_redis(server.url, str(port), moments, place)
    yield made
    await made.store.aclose()


def charged(record: CallRecord) -> CallRecord:
    return replace(record, accounts=(KEY.account, CLIENT), spent=Amount(15, 0, 1))


def opened(record: CallRecord, *claims: Claim) -> OpenHold:
    orphaned = replace(charged(record), outcome=ORPHANED, charge=Charge(Usage.of(100, 0), "estimated", Decimal("0.1")))
    return OpenHold(Hold(record.call_id, claims, Amount(100, 0, 1), Amount(1), 0, 50), orphaned)


async def numbers(store: Store, key: AccountKey) -> tuple[Amount, Amount]:
    (balance,) = await store.balances([Claim(key)])
    return balance.used, balance.held


def said(caplog: pytest.LogCaptureFixture, *words: str) -> list[str]:
    texts = [entry.getMessage() for entry in caplog.records if entry.levelno == logging.ERROR]
    return [text for text in texts if all(word in text for word in words)]


async def test_damaged_account_is_neither_read_nor_held_and_others_work(damaged: Damaged, record: MakeRecord) -> None:
    store = damaged.store
    await store.settle(charged(record()))
    damaged.damage()
    with pytest.raises(StoreDamaged, match="alice") as caught:
        await store.open_call(KEY, [LIMITED], with_totals=True)
    assert not caught.value.retry
    with pytest.raises(StoreDamaged):
        await store.balances([Claim(CLIENT), LIMITED])
    with pytest.raises(StoreDamaged):
        await store.reserve(opened(record(), Claim(CLIENT), LIMITED), LEASE_S)
    assert (await numbers(store, CLIENT))[1] == Amount(), "of a hold that was not taken nothing is left"
    assert isinstance(await store.reserve(opened(record("other"), Claim(OTHER.account)), LEASE_S), Granted)
    await store.open_call(OTHER, [Claim(OTHER.account)], with_totals=True)


async def test_call_is_settled_although_balances_cannot_be_read_afterwards(
    damaged: Damaged, record: MakeRecord
) -> None:
    store, others = damaged.store, replace(charged(record()), accounts=(CLIENT,))
    await store.settle(charged(record()))
    damaged.damage()
    closing = await store.settle_and_read(others, None, [Claim(CLIENT), LIMITED])
    assert closing.totals.calls == 2
    assert closing.balances is None
    assert await numbers(store, CLIENT) == (Amount(30, 0, 2), Amount())


async def test_records_of_a_damaged_account_are_set_aside_and_charged_after_its_repair(
    damaged: Damaged, record: MakeRecord, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, journals, one = damaged.store, tmp_path / "journals", charged(record())
    settler = Settler(store, Journal(journals))
    await store.reserve(opened(one, Claim(CLIENT), LIMITED), LEASE_S)
    damaged.damage()
    settled = await settler.settle(one)
    if settled is None:
        assert said(caplog, one.call_id, "set aside")
    settler.availability.check()
    await settler.aclose()
    damaged.mend()
    for file in journals.glob("*.unread"):
        file.rename(file.with_suffix(".journal"))
    again = Settler(store, Journal(journals))
    assert await again.recover() == (settled is None)
    await again.aclose()
    assert (await store.totals(KEY)).calls == 1
    assert await numbers(store, CLIENT) == (Amount(15, 0, 1), Amount()), "what was held on others is given back"


async def test_settlement_never_resets_an_invalid_number_to_zero(damaged: Damaged, record: MakeRecord) -> None:
    store = damaged.store
    await store.settle(charged(record()))
    damaged.damage()
    try:
        await store.settle(charged(record()))
    except RecordRefused:
        assert (await store.totals(KEY)).calls == 1
    with pytest.raises(StoreDamaged):
        await store.balances([LIMITED])


async def test_reset_keeps_an_unreadable_limit_and_deletion_removes_it(damaged: Damaged, record: MakeRecord) -> None:
    store = damaged.store
    await store.settle(charged(record()))
    damaged.damage()
    if not isinstance(store, RedisStore):
        await store.reset(KEY)
    assert await store.delete(KEY)
    assert await numbers(store, KEY.account) == (Amount(), Amount())
    await store.settle(charged(record()))
    assert await numbers(store, KEY.account) == (Amount(15, 0, 1), Amount())


async def test_holds_of_other_accounts_are_renewed_although_one_is_damaged(
    damaged: Damaged, record: MakeRecord
) -> None:
    store = damaged.store
    leases = Leases(store, store.settle, lease_s=LEASE_S, tick_s=0.0)
    bad, good, late = record(), record("other"), record()
    for one, claim in ((bad, LIMITED), (good, Claim(OTHER.account))):
        await store.reserve(opened(one, claim), LEASE_S)
    leases.open(Lease(late.call_id, 60, 0, pending=lambda: opened(late, LIMITED)))
    growing = {one.call_id: leases.open(Lease(one.call_id, 60, 50, 8, delivered=lambda: 50)) for one in (bad, good)}
    damaged.damage()
    await leases.tick()
    assert growing[good.call_id].tokens > 50
    assert [lease.is_over for lease in growing.values()] == [True, False]
    damaged.moments.go_on(LEASE_S * 0.9)
    growing[good.call_id].saved.renewed_at = -LEASE_S
    await leases.tick()
    damaged.moments.go_on(LEASE_S * 0.9)
    assert good.call_id not in [one.hold.id for one in await store.overdue_holds(10)]


async def test_damaged_account_leaves_the_store_available_and_is_logged_once(
    damaged: Damaged, record: MakeRecord, caplog: pytest.LogCaptureFixture
) -> None:
    settler = Settler(damaged.store)
    await damaged.store.settle(charged(record()))
    damaged.damage()
    for _ in range(3):
        try:
            await damaged.store.balances([LIMITED])
        except StoreUnavailable as error:
            settler.availability.report(error)
    assert not settler.availability.is_unavailable
    assert len(said(caplog, "store damaged")) == 1
    assert not said(caplog, "store unavailable")
    await settler.aclose()


async def test_old_sessions_expire_although_an_account_is_damaged(damaged: Damaged, record: MakeRecord) -> None:
    store = damaged.store
    for one in (charged(record()), record("other")):
        await store.settle(one)
    damaged.damage()
    await store.expire(2e9)
    assert await store.session(OTHER) is None
