"""What a store cannot take or this version cannot read keeps nothing else waiting, and is not lost."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path

import pytest

from gateway.core.errors import StoreUnavailable
from gateway.core.ledger.arithmetic import Amount, Claim, Granted, Hold
from gateway.core.ledger.session_key import SessionKey
from gateway.core.ports import RecordRefused, Store
from gateway.core.record import ORPHANED, CallRecord
from gateway.core.session import Places, SessionState
from gateway.core.steps import StepState
from gateway.core.stored import OpenHold, StoredKey
from gateway.core.usage import Charge, Usage
from gateway.stores.journal import Journal
from gateway.stores.leases import Leases
from gateway.stores.redis import RedisStore
from gateway.stores.redis.keys import Keys, tag_of
from gateway.stores.settler import Settler
from gateway.stores.sqlite import SqliteStore
from tests.stores.files import PATIENT_S, Time, query, write
from tests.stores.redis_servers import RedisServer, cli
from tests.support.timing import eventually

MakeRecord = Callable[..., CallRecord]
#: replaces what a store has of a call, by its id
Spoil = Callable[[str], object]

KEY = SessionKey("alice", "s")
OTHER = SessionKey("alice", "other")
LEASE_S = 60.0
JUNK = '{"call_id":1}'
_KEYS = Keys("gateway:")


def rewrite(path: Path, call_id: str, record: object) -> None:
    """Replace a call's record by another value."""
    write(path, "UPDATE calls SET record = ? WHERE call_id = ?", record, call_id)


@dataclass(frozen=True)
class Spoilt:
    """A store, and ways to write values into it as another version might have done."""

    store: Store
    moments: Time
    orphaned: Spoil
    record: Spoil
    hold: Spoil
    key: Spoil


@pytest.fixture(params=["sqlite", "redis", "cluster"])
async def spoilt(request: pytest.FixtureRequest, path: Path, moments: Time) -> AsyncIterator[Spoilt]:
    made: Spoilt
    if request.param == "sqlite":
        in_file = SqliteStore(path, timeout_s=PATIENT_S, moment=moments)
        made = Spoilt(
            in_file,
            moments,
            lambda call_id: rewrite(path, call_id, JUNK.encode()),
            lambda call_id: rewrite(path, call_id, JUNK.encode()),
            lambda hold_id: write(path, "UPDATE holds SET value = ? WHERE id = ?", JUNK.encode(), hold_id),
            lambda name: write(path, "UPDATE keys SET value = ? WHERE name = ?", JUNK.encode(), name),
        )
    else:
        server = request.getfixturevalue(f"redis_{'server' if request.param == 'redis' else 'cluster'}")
        server.flush()
        port = str(server.port if request.param == "redis" else server.nodes[0].port)
        home = tag_of("alice", "s")
        tag = None if request.param == "redis" else home
        made = Spoilt(
            RedisStore(server.url, timeout_s=PATIENT_S, moment=moments.overhead, ahead_s=lambda: moments.passed),
            moments,
            lambda call_id: cli("-c", "-p", port, "hset", _KEYS.calls(home)[2], call_id, "junk"),
            lambda call_id: cli("-c", "-p", port, "hset", _KEYS.calls(home)[1], call_id, JUNK),
            lambda hold_id: cli("-c", "-p", port, "hset", _KEYS.hold(hold_id, tag), "v", JUNK),
            lambda name: cli("-c", "-p", port, "hset", _KEYS.client_keys, name, JUNK),
        )
    yield made
    await made.store.aclose()


@pytest.fixture
def journals(tmp_path: Path) -> Path:
    return tmp_path / "journals"


def held(record: CallRecord) -> OpenHold:
    charge = Charge(Usage.of(100, 0), "estimated", Decimal("0.1"))
    orphaned = replace(record, outcome=ORPHANED, charge=charge, accounts=(KEY.account,), spent=Amount(100, 0, 1))
    return OpenHold(Hold(record.call_id, (Claim(KEY.account),), Amount(100, 0, 1)), orphaned)


async def calls_of(store: Store, key: SessionKey) -> int:
    return (await store.totals(key)).calls


def said(caplog: pytest.LogCaptureFixture, *words: str) -> list[str]:
    texts = [entry.getMessage() for entry in caplog.records if entry.levelno == logging.ERROR]
    return [text for text in texts if all(word in text for word in words)]


# --- records --------------------------------------------------------------------------------------------------------------


async def test_record_that_cannot_replace_damaged_data_is_set_aside(
    spoilt: Spoilt, record: MakeRecord, journals: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settler, one = Settler(spoilt.store, Journal(journals)), record()
    await spoilt.store.settle(replace(one, outcome=ORPHANED))
    spoilt.orphaned(one.call_id)
    assert await settler.settle(one) is None
    settler.availability.check()
    assert await settler.settle(record("other")) is not None
    await settler.aclose()
    (aside,) = journals.iterdir()
    assert aside.suffix == ".unread"
    assert said(caplog, one.call_id, str(aside), "rename the file so that it ends in .journal again")
    assert (await calls_of(spoilt.store, KEY), await calls_of(spoilt.store, OTHER)) == (1, 1)


async def test_what_is_refused_is_refused_each_time_and_writes_nothing(spoilt: Spoilt, record: MakeRecord) -> None:
    store, one = spoilt.store, record(accounts=(KEY.account,), spent=Amount(15, 0, 1))
    await store.settle(replace(one, outcome=ORPHANED, charge=None, spent=Amount(7, 0, 1)))
    spoilt.orphaned(one.call_id)
    before = await store.balances([Claim(KEY.account)])
    for _ in range(2):
        with pytest.raises(RecordRefused, match=one.call_id):
            await store.settle(one, lambda _: ({"a": StepState("s", 1)}, one))
    assert await store.balances([Claim(KEY.account)]) == before
    assert (await store.remembered(KEY)).state == SessionState()
    assert await calls_of(store, KEY) == 0


async def test_unreadable_record_hides_no_other(
    spoilt: Spoilt, record: MakeRecord, caplog: pytest.LogCaptureFixture
) -> None:
    store = spoilt.store
    begin = (await store.settled_after(None, 0)).cursor
    made = [record() for _ in range(6)]
    for one in made:
        await store.settle(one)
    for place in (1, 3, 4):
        spoilt.record(made[place].call_id)
    readable = [made[place] for place in (5, 2, 0)]
    for _ in range(2):
        assert [list(await store.calls(KEY, limit)) for limit in (1, 2, 3, 9)] == [
            readable[:1], readable[:2], readable, readable
        ]  # fmt: skip
    assert list(await store.calls(KEY, 9, made[4].call_id)) == readable[1:]
    latest = await store.settled_after(begin, 9)
    assert [one.call for one in latest.settled] == readable[::-1]
    assert latest.cursor == begin + 6
    assert await store.call("alice", made[3].call_id) is None
    assert await store.call("alice", made[2].call_id) == made[2]
    assert await calls_of(store, KEY) == 6
    assert [len(said(caplog, "cannot be read", one.call_id)) for one in made] == [0, 1, 0, 1, 1, 0]


async def test_refused_record_does_not_block_waiting_ones(
    path: Path, record: MakeRecord, journals: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, one = SqliteStore(path, timeout_s=PATIENT_S), record()
    await store.settle(replace(one, outcome=ORPHANED))
    rewrite(path, one.call_id, JUNK.encode())
    settler = Settler(store, Journal(journals))
    settler.availability.report(StoreUnavailable("The store is unavailable."))
    for item in (one, record("other")):
        assert await settler.settle(item) is None
    await eventually(lambda: not settler.availability.is_unavailable, "the settler recovers")
    assert (await calls_of(store, KEY), await calls_of(store, OTHER)) == (1, 1)
    assert said(caplog, one.call_id, "set aside")
    await settler.aclose()
    assert [file.suffix for file in journals.iterdir()] == [".unread"], "the journal itself is settled"
    await store.aclose()


async def test_refused_record_in_a_journal_hides_no_other_and_is_settled_later(
    path: Path, record: MakeRecord, journals: Path
) -> None:
    store, one = SqliteStore(path, timeout_s=PATIENT_S), record()
    orphaned = replace(one, outcome=ORPHANED)
    await store.settle(orphaned)
    ((good,),) = query(path, "SELECT record FROM calls")
    rewrite(path, one.call_id, JUNK.encode())
    gone = Journal(journals)
    for items in ([one, record("other")], [record("other")]):
        for item in items:
            gone.append(item)
        gone.close()
    settler = Settler(store, Journal(journals))
    assert await settler.recover() == 2
    assert (await calls_of(store, KEY), await calls_of(store, OTHER)) == (1, 2)
    assert await settler.recover() == 0
    await settler.aclose()
    # As an operator does, when a version runs that can read it.
    rewrite(path, one.call_id, good)
    (aside,) = journals.iterdir()
    aside.rename(aside.with_suffix(".journal"))
    assert await settler.recover() == 1
    assert list(journals.iterdir()) == []
    assert await store.call(None, one.call_id) == one
    assert (await calls_of(store, KEY), await calls_of(store, OTHER)) == (1, 2), "nothing is charged twice"
    await store.aclose()


async def test_a_refused_record_that_cannot_be_set_aside_is_named_and_stays_in_its_journal(
    path: Path, record: MakeRecord, journals: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Full(Journal):
        def set_aside(self, record: CallRecord) -> Path:
            raise OSError(28, "No space left on device")

    store, one = SqliteStore(path, timeout_s=PATIENT_S), record()
    await store.settle(replace(one, outcome=ORPHANED))
    rewrite(path, one.call_id, JUNK.encode())
    settler = Settler(store, Full(journals))
    settler.availability.report(StoreUnavailable("The store is unavailable."))
    for item in (one, record("other")):
        await settler.settle(item)
    await eventually(lambda: not settler.availability.is_unavailable, "the settler recovers")
    assert await settler.recover() == 1, "the other one, once more"
    assert said(caplog, one.call_id, "nor set aside", "No space left")
    assert [file.suffix for file in journals.iterdir()] == [".journal"]
    assert await calls_of(store, OTHER) == 1
    await settler.aclose()
    await store.aclose()


async def test_without_a_journal_a_refused_record_is_named_as_lost(
    spoilt: Spoilt, record: MakeRecord, caplog: pytest.LogCaptureFixture
) -> None:
    settler, one = Settler(spoilt.store), record()
    await spoilt.store.settle(replace(one, outcome=ORPHANED))
    spoilt.orphaned(one.call_id)
    assert await settler.settle(one) is None
    settler.availability.check()
    await settler.aclose()
    assert said(caplog, one.call_id, "lost")


async def test_refused_record_of_a_deleted_session_leaves_the_store_available(
    spoilt: Spoilt, record: MakeRecord
) -> None:
    settler, one = Settler(spoilt.store), record()
    await spoilt.store.settle(replace(one, outcome=ORPHANED))
    spoilt.orphaned(one.call_id)
    with pytest.raises(RecordRefused):
        await settler.settle_with_step(one, lambda places: (places, one), ())
    settler.availability.check()
    await settler.aclose()


async def test_failing_step_ending_writes_nothing_and_leaves_the_store_available(
    store: Store, record: MakeRecord
) -> None:
    one = record()

    def fail(_: Places) -> tuple[Places, CallRecord]:
        raise KeyError("a bug")

    with pytest.raises(RecordRefused, match="KeyError: 'a bug'"):
        await store.settle(one, fail)
    assert await store.call(None, one.call_id) is None


async def test_a_text_that_cannot_be_written_is_refused_by_each_store_that_writes(
    spoilt: Spoilt, record: MakeRecord, journals: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = record(model="a\ud800b")
    with pytest.raises(RecordRefused, match="surrogates not allowed"):
        await spoilt.store.settle(one)
    settler = Settler(spoilt.store, Journal(journals))
    assert await settler.settle(one) is None
    assert said(caplog, one.call_id, "nor set aside", "surrogates not allowed")
    settler.availability.report(StoreUnavailable("The store is unavailable."))
    for item in (one, record("other")):
        await settler.settle(item)
    await eventually(lambda: not settler.availability.is_unavailable, "the settler recovers")
    assert await calls_of(spoilt.store, OTHER) == 1
    await settler.aclose()


async def test_redis_without_memory_is_unavailable_and_refuses_no_record(
    redis_server: RedisServer, record: MakeRecord
) -> None:
    redis_server.flush()
    store = RedisStore(redis_server.url, timeout_s=PATIENT_S)
    try:
        redis_server.cli("config", "set", "maxmemory", "1")
        with pytest.raises(StoreUnavailable, match="maxmemory") as caught:
            await store.settle(record())
        assert not isinstance(caught.value, RecordRefused)
    finally:
        redis_server.cli("config", "set", "maxmemory", "0")
        await store.aclose()


# --- holds ----------------------------------------------------------------------------------------------------------------


async def test_a_hold_that_cannot_be_read_is_named_once_and_hides_no_other(
    spoilt: Spoilt, record: MakeRecord, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = held(record(at=1_000)), held(record(at=2_000))
    for one in (bad, good):
        assert isinstance(await spoilt.store.reserve(one, LEASE_S), Granted)
    spoilt.hold(bad.hold.id)
    spoilt.moments.go_on(LEASE_S + 1)
    for _ in range(3):
        assert [one.hold.id for one in await spoilt.store.overdue_holds(9)] == [good.hold.id]
    assert len(said(caplog, bad.hold.id, "cannot be read", "version that wrote it")) == 1
    (balance,) = await spoilt.store.balances([Claim(KEY.account)])
    assert balance.held == Amount(200, 0, 2), "what it holds stays"


async def test_many_unreadable_holds_hide_no_other_for_long(spoilt: Spoilt, record: MakeRecord) -> None:
    ids = []
    for number in range(5):
        one = held(record(at=1_000 + number))
        await spoilt.store.reserve(one, LEASE_S)
        ids.append(one.hold.id)
        spoilt.moments.go_on(0.01)
    for hold_id in ids[:4]:
        spoilt.hold(hold_id)
    spoilt.moments.go_on(LEASE_S + 1)
    found = [[one.hold.id for one in await spoilt.store.overdue_holds(2)] for _ in range(4)]
    assert found[-1] == ids[4:]


async def test_refused_orphaned_call_is_set_aside_once(
    path: Path, moments: Time, record: MakeRecord, journals: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = SqliteStore(path, timeout_s=PATIENT_S, moment=moments)
    one = held(record())
    await store.reserve(one, LEASE_S)
    # A limit that an operator set: it is read when a call is treated as orphaned.
    write(path, "UPDATE accounts SET decided = ?", b'{"tokens": "many"}')
    settler = Settler(store, Journal(journals))
    leases = Leases(store, settler.settle, lease_s=LEASE_S)
    moments.go_on(LEASE_S + 1)
    for _ in range(3):
        await leases.sweep()
    assert len(said(caplog, one.hold.id, "set aside")) == 1
    settler.availability.check()
    write(path, "UPDATE accounts SET decided = NULL")
    await Leases(store, settler.settle, lease_s=LEASE_S).sweep()
    assert await calls_of(store, KEY) == 1, "it is still there for a worker that can settle it"
    await settler.aclose()
    await store.aclose()


async def test_unreadable_client_key_is_refused_and_others_work(
    spoilt: Spoilt, caplog: pytest.LogCaptureFixture
) -> None:
    good = StoredKey("good", b"digest", 1.0)
    for key in (good, StoredKey("bad", b"other", 1.0)):
        assert await spoilt.store.add_key(key)
    spoilt.key("bad")
    for _ in range(2):
        assert list(await spoilt.store.keys()) == [good]
    assert len(said(caplog, "client key bad")) == 1
    assert await spoilt.store.revoke_key("bad")


async def test_unchanged_client_keys_are_not_decoded_again(spoilt: Spoilt) -> None:
    """Each worker reads them once a second, and a service may have thousands."""
    for name in ("one", "two"):
        assert await spoilt.store.add_key(StoredKey(name, name.encode(), 1.0))
    before, after = await spoilt.store.keys(), await spoilt.store.keys()
    assert [key.name for key in after] == ["one", "two"]
    assert all(one is other for one, other in zip(before, after, strict=True))
    assert await spoilt.store.revoke_key("one")
    assert [key.name for key in await spoilt.store.keys()] == ["two"]
