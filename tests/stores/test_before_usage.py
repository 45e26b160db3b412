"""Data that the last version without usage by hour and day has written, with records as JSON, is used as before."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import AsyncIterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest
import redis

from gateway.core.ids import first_id_at
from gateway.core.ledger.arithmetic import AccountKey, Amount, Claim
from gateway.core.ledger.session_key import SessionKey
from gateway.core.ports import Store
from gateway.core.record import ORPHANED, CallRecord
from gateway.core.rollup import COUNTS, UsageQuery, grouped
from gateway.core.usage import Charge, Usage
from gateway.stores.redis import RedisStore
from gateway.stores.sqlite import SqliteStore
from tests.stores.files import PATIENT_S
from tests.stores.redis_servers import RedisServer

#: SQL statements and Redis commands that write the same eight calls; bytes are Latin-1
DATA = json.loads((Path(__file__).parent / "data" / "before_usage.json").read_text("utf-8"))
AT = 1_795_000_000.0
DAY = 86_400
KEY = SessionKey("alice", "s")
DEAREST = Charge(Usage.of(100, 10), "provider", Decimal("0.000001"))


def written_file(path: Path) -> Path:
    connection = sqlite3.connect(path, isolation_level=None)
    for statement in DATA["sqlite"]:
        connection.execute(statement)
    connection.close()
    return path


def fill(server: RedisServer) -> None:
    server.flush()
    with redis.Redis(port=server.port) as client:
        for words in DATA["redis"]:
            client.execute_command(*(word.encode("latin-1") for word in words))


@pytest.fixture(params=["sqlite", "redis"])
async def store(request: pytest.FixtureRequest, redis_server: RedisServer, tmp_path: Path) -> AsyncIterator[Store]:
    """A store with these calls."""
    opened: Store
    if request.param == "sqlite":
        opened = SqliteStore(written_file(tmp_path / "old.db"), now=lambda: AT + DAY)
    else:
        fill(redis_server)
        opened = RedisStore(redis_server.url, timeout_s=PATIENT_S, now=lambda: AT + DAY)
    yield opened
    await opened.aclose()


async def all_calls(store: Store) -> dict[str, CallRecord]:
    return {record.call_id: record async for record in store.each_call(0)}


async def used(store: Store, key: AccountKey) -> Amount:
    [balance] = await store.balances([Claim(key)])
    return balance.used


async def usage(store: Store, *by: str) -> dict[tuple[str, ...], dict[str, int]]:
    rows = await store.usage(UsageQuery("day", int(AT // DAY), int(AT // DAY) + 2))
    return {group.labels: dict(zip(COUNTS, group.counts, strict=True)) for group in grouped(rows, by, None)}


async def test_records_and_totals_are_read(store: Store) -> None:
    calls = await all_calls(store)
    assert sorted(record.model for record in calls.values()) == ["gpt-5", *["gpt-5-mini"] * 6]
    found = await store.call(None, "r-2")
    assert found is not None
    assert found.labels == {}
    assert found == calls[found.call_id]
    assert [record.call_id for record in await store.calls(KEY, 9)] == sorted(
        (one.call_id for one in calls.values() if one.session == KEY), reverse=True
    )
    assert [one.session for one in await store.newest_calls("bob", 9)] == [SessionKey("bob", "t")] * 2
    assert (await store.totals(KEY)).calls == 4
    latest = await store.settled_after(0, 100)
    assert len(latest.settled) == 7
    assert latest.settled[0].totals is not None
    assert latest.settled[0].totals.calls == 1


async def test_provisional_calls_are_corrected_once(store: Store) -> None:
    calls, before = await all_calls(store), await used(store, AccountKey("key", "alice"))
    provisional = [record for record in calls.values() if record.is_provisional]
    assert len(provisional) == 2
    for record in provisional:
        final = replace(record, outcome="ok", charge=DEAREST, spent=Amount(110, 1_000, 1))
        for _ in range(2):
            await store.settle(final)
    totals = await store.totals(KEY)
    assert totals.calls == 4
    assert totals.total_tokens == 2 * 4_522 + 2 * 110
    wrong = [record.spent for record in provisional]
    after = await used(store, AccountKey("key", "alice"))
    assert after.tokens == before.tokens - sum(one.tokens for one in wrong) + 2 * 110
    assert after.calls == before.calls
    sums = (await usage(store, "key"))["alice",]
    assert min(sums.values()) >= 0
    if isinstance(store, SqliteStore):
        # Those of the deleted session count as well.
        assert sums["total_tokens"] == totals.total_tokens + 8


async def test_a_call_of_a_deleted_session_is_corrected_once(store: Store) -> None:
    before = await used(store, AccountKey("key", "alice"))
    template = next(iter((await all_calls(store)).values()))
    key = SessionKey("alice", "gone")
    name = first_id_at(AT + 400) + (8).to_bytes(10, "big").hex()
    final = replace(
        template, call_id=name, request_id=name, session=key, started_at=AT + 400, outcome="ok", charge=DEAREST,
        spent=Amount(110, 1_000, 1), accounts=(AccountKey("key", "alice"), key.account),
    )  # fmt: skip
    for _ in range(2):
        await store.settle(final)
    after = await used(store, AccountKey("key", "alice"))
    assert after.tokens == before.tokens - 8 + 110
    sums = await usage(store)
    assert min(sums[()].values()) >= 0


async def test_a_file_has_the_usage_of_its_calls(tmp_path: Path) -> None:
    store = SqliteStore(written_file(tmp_path / "old.db"), now=lambda: AT + DAY)
    sums = await usage(store, "key")
    assert {key: (line["calls"], line["charged_calls"], line["refused_calls"]) for (key,), line in sums.items()} == {
        "alice": (5, 5, 0),  # one of a deleted session
        "bob": (2, 1, 1),
        "": (1, 1, 0),
    }
    assert sums["bob",]["unpriced_calls"] == 1
    assert sums["alice",]["failed_calls"] == 2
    totals = await store.totals(KEY)
    assert sums["alice",]["cost_pico_usd"] == int((totals.cost_usd + Decimal("0.125")) * 10**12)
    assert sums["alice",]["total_tokens"] == totals.total_tokens + 8
    await store.aclose()


async def test_new_records_are_next_to_old_ones(store: Store) -> None:
    [old] = await store.calls(KEY, 1)
    name = first_id_at(AT + DAY) + "00" * 10
    new = replace(old, call_id=name, request_id=name, started_at=AT + DAY, outcome="ok", labels={"tag": "x"})
    await store.settle(new)
    assert list(await store.calls(KEY, 2)) == [new, old]
    assert ORPHANED in {one.outcome for one in await store.calls(KEY, 9)}
