"""The usage by hour and day: on every store it equals what the ledger counts."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest

from gateway.core.calling_agent import CallingAgent
from gateway.core.ledger.session_key import SessionKey
from gateway.core.ports import Store
from gateway.core.record import ORPHANED, PENDING, CallRecord, Outcome
from gateway.core.retention import Retention
from gateway.core.rollup import COUNTS, MOST_ROWS, OTHER, Period, UsageQuery, grouped, labels_of
from gateway.core.stored import SessionView
from gateway.core.usage import Charge, Usage
from gateway.stores.memory import MemoryStore
from gateway.stores.redis import RedisStore
from gateway.stores.sqlite import SqliteStore
from gateway.stores.sums import SUMS, sums_of
from tests.stores.conftest import OpenStore
from tests.stores.files import PATIENT_S, Clock, Time
from tests.stores.redis_servers import RedisServer

MakeRecord = Callable[..., CallRecord]
HOUR, DAY = 3_600, 86_400
#: the first second of a recent day: Redis drops old usage by its own clock
AT = (time.time() // DAY - 4) * DAY


def query(period: Period, first: float = AT, last: float = AT, key: str | None = None) -> UsageQuery:
    length = HOUR if period == "hour" else DAY
    return UsageQuery(period, int(first // length), int(last // length), key)


async def usage_by(
    store: Store, *by: str, period: Period = "day", last: float = AT
) -> dict[tuple[str, ...], list[int]]:
    rows = await store.usage(query(period, last=last))
    return {group.labels: list(group.counts) for group in grouped(rows, by, None)}


def numbers(*records: CallRecord) -> list[int]:
    """Return the sums that the ledger has of these calls, as far as roll-ups have them."""
    names = ("unpriced_calls", "input_tokens", "cache_read_tokens", "output_tokens", "total_tokens", "cost_pico_usd")
    places = [2 + 2, *range(5, 10)]
    assert [COUNTS[place] for place in places] == list(names)
    sums = [sums_of(record.charge, 0) for record in records]
    return [sum(one[SUMS.index(name)] for one in sums) for name in names]


async def test_calls_are_added_by_hour_and_by_day(store: Store, record: MakeRecord) -> None:
    calls = [record(at=AT + hour * HOUR, model="a" if hour % 2 else "b") for hour in range(26)]
    for call in calls:
        await store.settle(call)
    hours = grouped(await store.usage(query("hour", last=AT + 2 * DAY)), ("model",), "hour")
    assert [(group.start, group.labels) for group in hours] == [(int(call.started_at), (call.model,)) for call in calls]
    days = grouped(await store.usage(query("day", last=AT + 2 * DAY)), (), "day")
    assert [(group.start, group.counts[0]) for group in days] == [(AT, 24), (AT + DAY, 2)]
    assert list(days[0].counts[4:]) == numbers(*calls[:24])


async def test_refused_and_failed_calls_are_counted_apart(store: Store, record: MakeRecord) -> None:
    for outcome, charge in (("ok", True), ("refused", False), ("upstream_failed", False), ("client_left", True)):
        call = record(at=AT, outcome=outcome)
        await store.settle(call if charge else replace(call, charge=None))
    [counts] = (await usage_by(store)).values()
    assert dict(zip(COUNTS, counts, strict=True)) | {"calls": 4} == {
        "calls": 4, "charged_calls": 2, "refused_calls": 1, "failed_calls": 1, "unpriced_calls": 0,
        "input_tokens": 20, "cache_read_tokens": 8, "output_tokens": 10, "total_tokens": 30,
        "cost_pico_usd": 2 * 123_000_000,
    }  # fmt: skip


async def test_labels_of_the_record_are_columns(store: Store, record: MakeRecord) -> None:
    await store.settle(record(at=AT, labels={"tag": "nightly", "group": "research"}))
    await store.settle(record(at=AT, namespace="bob", labels={"tag": "nightly"}))
    await store.settle(record(None, at=AT, labels={"key": "carol"}))
    await store.settle(record(at=AT + DAY, agent=CallingAgent("a1", type="Explore")))
    assert [*await usage_by(store, "agent", last=AT + DAY)] == [("",), ("Explore",)]
    assert sorted(await usage_by(store, "key", "group", "tag")) == [
        ("alice", "research", "nightly"),
        ("bob", "", "nightly"),
        ("carol", "", ""),
    ]
    [own] = await store.usage(query("day", key="bob"))
    assert labels_of(own.labels) == {"key": "bob", "provider": "openai", "model": "gpt-5", "tag": "nightly"}


async def test_a_call_is_added_once(store: Store, record: MakeRecord) -> None:
    call = record(at=AT)
    for _ in range(3):
        await store.settle(call)
    [counts] = (await usage_by(store)).values()
    assert counts[:2] == [1, 1]


@pytest.mark.parametrize("provisional", [ORPHANED, PENDING])
async def test_a_provisional_call_is_taken_back_when_it_ends(
    store: Store, record: MakeRecord, provisional: Outcome
) -> None:
    final = record(at=AT, labels={"tag": "x"})
    guess = replace(
        final, outcome=provisional, charge=Charge(Usage.of(7_000, 9), "estimated", None), model="guessed"
    )  # fmt: skip
    await store.settle(guess)
    await store.settle(guess)
    assert (await usage_by(store, "model"))["guessed",][4:] == numbers(guess)
    await store.settle(final)
    await store.settle(guess)
    found = await usage_by(store, "model")
    assert found["guessed",] == [0] * len(COUNTS)
    assert found["gpt-5",] == [1, 1, 0, 0, *numbers(final)]


async def test_an_orphaned_call_that_delivered_more_is_added_once(store: Store, record: MakeRecord) -> None:
    first = record(at=AT, outcome=ORPHANED)
    second = replace(
        first,
        charge=Charge(Usage.of(10, 500), "estimated", Decimal(1)),
        spent=first.spent.plus(first.spent._replace(tokens=1)),
    )
    await store.settle(first)
    await store.settle(second)
    [counts] = (await usage_by(store)).values()
    assert counts == [1, 1, 0, 1, *numbers(second)]


async def test_usage_stays_when_sessions_are_deleted_and_corrected_after_that(store: Store, record: MakeRecord) -> None:
    final = record(at=AT)
    await store.settle(replace(final, outcome=ORPHANED, charge=Charge(Usage.of(7, 9), "estimated", None)))
    await store.settle(record("other", at=AT))
    await store.delete(SessionKey("alice", "s"))
    await store.reset(SessionKey("alice", "other"))
    await store.settle(final)
    [counts] = (await usage_by(store)).values()
    assert counts == [2, 2, 0, 0, *numbers(final, final)]


@pytest.mark.parametrize(
    "open_store", ["memory", "sqlite", "redis"], indirect=True
)  # a cluster has the limit four times
async def test_beyond_the_limit_calls_are_added_by_key(store: Store, record: MakeRecord) -> None:
    calls = [record("s", at=AT, namespace="a", labels={"tag": f"t{number}"}) for number in range(4)]
    await store.settle(calls[0])
    for number in range(MOST_ROWS - 1):
        await store.settle(record(f"s{number % 7}", at=AT, namespace="b", charge=None, labels={"tag": f"{number}"}))
    guess = replace(calls[1], outcome=ORPHANED, charge=Charge(Usage.of(7_000, 9), "estimated", None))
    for call in (guess, *calls[1:], replace(calls[0], call_id=f"{calls[0].call_id}00")):
        await store.settle(call)
    found = await usage_by(store, "key", "tag")
    assert len(found) == MOST_ROWS + 1
    assert found["a", "t0"][0] == 2
    assert found["a", OTHER] == [3, 3, 0, 0, *numbers(*calls[1:])]


async def test_usage_in_redis_expires(redis_server: RedisServer, record: MakeRecord) -> None:
    redis_server.flush()
    store = RedisStore(redis_server.url, timeout_s=PATIENT_S, retention=Retention(hours_s=10 * DAY, days_s=20 * DAY))
    for number in range(2):
        await store.settle(record(at=AT, labels={"tag": f"{number}"}))
    for period, number, kept in (("hour", int(AT // HOUR), 10), ("day", int(AT // DAY), 20)):
        left = int(redis_server.cli("TTL", f"gateway:{{usage0}}:{period}:{number}"))
        ends = (number + 1) * (HOUR if period == "hour" else DAY) + kept * DAY
        assert abs(time.time() + left - ends) < 60
    await store.aclose()


async def test_a_key_of_another_type_in_redis_stops_no_call(redis_server: RedisServer, record: MakeRecord) -> None:
    redis_server.flush()
    store = RedisStore(redis_server.url, timeout_s=PATIENT_S)
    redis_server.cli("SET", f"gateway:{{usage0}}:day:{int(AT // DAY)}", "odd")
    await store.settle(record(at=AT))
    assert len(await store.usage(query("hour"))) == 1
    await store.aclose()


async def test_usage_is_kept_longer_than_sessions(open_embedded: OpenStore, record: MakeRecord) -> None:
    clock = Clock()
    store = await open_embedded(clock, Time())
    await store.settle(record(at=AT))
    clock.time = AT + 61 * DAY
    await store.expire(AT + 31 * DAY)
    assert await store.session(SessionKey("alice", "s")) is None
    assert await store.usage(query("hour")) == []
    assert len(await store.usage(query("day"))) == 1
    clock.time = AT + 802 * DAY
    await store.expire(AT + 31 * DAY)
    assert await store.usage(query("day")) == []
    await store.aclose()


def faults(record: MakeRecord, count: int, seed: int) -> Iterator[Sequence[CallRecord]]:
    """Yield the records of a call as workers, journals and leases settle them: guesses, repetitions, late ends."""
    dice = random.Random(seed)
    for number in range(count):
        at = AT + dice.randrange(2 * DAY)
        cost = Decimal(dice.randrange(10**9)) / 10**9 if dice.random() < 0.9 else None
        usage = Usage(dice.randrange(9_000), dice.randrange(900), dice.randrange(10_000), dice.randrange(99))
        final = record(
            f"s{number % 17}", at=at, namespace=dice.choice("abc"), model=dice.choice(("m", "n")),
            labels={"tag": dice.choice(("x", "y"))} if dice.random() < 0.5 else {},
            charge=Charge(usage, "provider", cost) if dice.random() < 0.9 else None,
            outcome=dice.choice(("ok", "ok", "refused", "client_left", "upstream_broken")),
        )  # fmt: skip
        guess = replace(final, outcome=dice.choice((ORPHANED, PENDING)), charge=Charge(Usage.of(50, 3), "estimated"))
        records = [guess, final, guess, final][dice.randrange(4) :]
        dice.shuffle(records)
        yield records


async def test_sums_equal_the_ledger_after_a_thousand_calls_with_repetitions(store: Store, record: MakeRecord) -> None:
    for records in faults(record, 1_000, 20261128):
        for one in records:
            await store.settle(one)
    views, cursor = list[SessionView](), None
    while True:
        page = await store.sessions(None, 100, cursor, "recent")
        views += page.sessions
        cursor = page.cursor
        if cursor is None:
            break
    totals = [view.totals for view in views]
    of_ledger = {name: sum(getattr(one, name) for one in totals) for name in SUMS[:-1]}
    cost = int(sum(one.cost_usd for one in totals) * 10**12)
    for period in ("hour", "day"):
        [counts] = (await usage_by(store, period=period, last=AT + 3 * DAY)).values()
        sums = dict(zip(COUNTS, counts, strict=True))
        assert sums["calls"] == 1_000
        assert sums["charged_calls"] == of_ledger["calls"]
        assert sums["cost_pico_usd"] == cost
        assert {name: sums[name] for name in COUNTS[4:-1]} == {name: of_ledger[name] for name in COUNTS[4:-1]}


@pytest.fixture(params=["memory", "sqlite", "redis"])
async def keeps_ten(
    request: pytest.FixtureRequest, redis_server: RedisServer, folder: Callable[[], Path]
) -> AsyncIterator[Store]:
    """A store that keeps ten records of each session, for a day."""
    retention, clock = Retention(calls_per_session=10, calls_s=DAY), lambda: AT + 2 * HOUR
    redis_server.flush()
    kinds: dict[str, Callable[[], Store]] = {
        "memory": lambda: MemoryStore(clock, retention=retention),
        "sqlite": lambda: SqliteStore(folder() / "a.db", now=clock, retention=retention),
        "redis": lambda: RedisStore(redis_server.url, timeout_s=PATIENT_S, now=clock, retention=retention),
    }
    store = kinds[request.param]()
    yield store
    await store.aclose()


async def test_a_session_keeps_only_its_newest_records(keeps_ten: Store, record: MakeRecord) -> None:
    calls = [record(at=AT + number) for number in range(25)]
    for call in [*calls, record("short", at=AT)]:
        await keeps_ten.settle(call)
    await keeps_ten.expire(AT - 30 * DAY)
    kept = await keeps_ten.calls(SessionKey("alice", "s"), 100)
    assert [call.call_id for call in kept] == [call.call_id for call in reversed(calls[-10:])]
    assert len(await keeps_ten.calls(SessionKey("alice", "short"), 100)) == 1
    await keeps_ten.settle(calls[0])
    assert (await keeps_ten.totals(SessionKey("alice", "s"))).calls == 25
    [counts] = (await usage_by(keeps_ten)).values()
    assert counts[0] == 26


async def test_records_are_deleted_before_their_session(keeps_ten: Store, record: MakeRecord) -> None:
    old, new = record(at=AT - 23 * HOUR), record(at=AT - 21 * HOUR)
    for call in (old, new):
        await keeps_ten.settle(call)
    await keeps_ten.expire(AT - 30 * DAY)
    assert [one.call_id for one in await keeps_ten.calls(SessionKey("alice", "s"), 9)] == [new.call_id]
    assert (await keeps_ten.totals(SessionKey("alice", "s"))).calls == 2


def test_retention_of_records_is_at_most_that_of_sessions() -> None:
    assert Retention().calls_before(5.0, 100.0) == 5.0
    assert Retention(calls_s=10).calls_before(5.0, 100.0) == 90.0
    assert Retention(calls_s=10).calls_before(95.0, 100.0) == 95.0


async def test_each_call_is_yielded_once_from_a_time_on(store: Store, record: MakeRecord) -> None:
    calls = [record(f"s{number % 3}" if number % 7 else None, at=AT + number) for number in range(250)]
    for call in calls:
        await store.settle(call)
    found = [one.call_id async for one in store.each_call(AT + 20)]
    assert sorted(found) == [call.call_id for call in calls[20:]]
