"""Open holds are renewed and extended; holds of ended workers are settled by any other worker."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from functools import partial
from itertools import groupby

import pytest

from gateway.core.errors import StoreDamaged, StoreUnavailable
from gateway.core.ledger.arithmetic import Amount, Claim, Granted, Hold, Limits, Moment, Refused
from gateway.core.ledger.session_key import SessionKey
from gateway.core.record import ORPHANED, CallRecord
from gateway.core.stored import OpenHold, StepEnding
from gateway.core.usage import Charge, Totals, Usage
from gateway.stores.availability import Availability
from gateway.stores.fallback import FallbackStore
from gateway.stores.leases import Lease, Leases
from gateway.stores.memory import MemoryStore
from tests.support.timing import eventually

MakeRecord = Callable[..., CallRecord]
KEY = SessionKey("alice", "s")
CLAIM = Claim(KEY.account, Limits(tokens=10_000))


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> Moment:
        return Moment(self.seconds, self.seconds)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> MemoryStore:
    return MemoryStore(moment=clock)


@pytest.fixture
async def leases(store: MemoryStore) -> AsyncIterator[Leases]:
    made = Leases(store, store.settle, lease_s=60, tick_s=0.01, sweep_s=0.01)
    yield made
    await made.aclose()


def opened(record: CallRecord) -> OpenHold:
    charge = Charge(Usage.of(100, 0), "estimated", Decimal("0.1"))
    orphaned = CallRecord(
        **{name: getattr(record, name) for name in record.__slots__}
        | {"outcome": ORPHANED, "charge": charge, "accounts": (KEY.account,), "spent": Amount(100, 10**8, 1)}
    )
    hold = Hold(record.call_id, (CLAIM,), Amount(100, 0, 1), Amount(1), 0, 2_000)
    return OpenHold(hold, orphaned, unit_usd=Decimal("0.01"))


async def taken(store: MemoryStore, record: CallRecord) -> Granted:
    granted = await store.reserve(opened(record), 60)
    assert isinstance(granted, Granted)
    return granted


async def test_hold_is_renewed_before_its_lease_ends(
    leases: Leases, store: MemoryStore, clock: Clock, record: MakeRecord
) -> None:
    one = record()
    await taken(store, one)
    lease = leases.open(Lease(one.call_id, 60, 2_000, delivered=lambda: 7))
    for _ in range(5):
        clock.seconds += 50
        lease.saved.renewed_at = time.monotonic() - 50
        await leases.tick()
        assert await store.overdue_holds(9) == []


async def test_a_hold_is_renewed_by_the_lease_it_was_taken_with_after_a_reload_made_leases_longer(
    leases: Leases, store: MemoryStore, clock: Clock, record: MakeRecord
) -> None:
    at_once, put_off = opened(record()), opened(record())
    await taken(store, at_once.orphaned)
    lease = leases.open(Lease(at_once.hold.id, 60, 2_000))
    late = leases.open(Lease(put_off.hold.id, 60, 0, pending=lambda: put_off))
    leases.lease_s = 3_600
    await leases.take(late)
    clock.seconds += 50
    lease.saved.renewed_at = late.saved.renewed_at = time.monotonic() - 50
    await leases.tick()
    clock.seconds += 50
    assert await store.overdue_holds(9) == []
    clock.seconds += 11
    assert len(await store.overdue_holds(9)) == 2, "in the store they live on for as long as was said then"


async def test_saved_tokens_are_charged_when_the_worker_ends(
    leases: Leases, store: MemoryStore, clock: Clock, record: MakeRecord
) -> None:
    one = record()
    await taken(store, one)
    leases.open(Lease(one.call_id, 60, 2_000, delivered=lambda: 250))
    await leases.tick()
    clock.seconds += 61
    await leases.sweep()
    assert (await store.totals(KEY)).calls == 0, "it is ours, and will be settled"
    leases.close(one.call_id)
    await leases.sweep()
    totals = await store.totals(KEY)
    assert (totals.input_tokens, totals.output_tokens, totals.estimated_tokens) == (100, 250, 350)
    assert totals.cost_usd == Decimal("2.6")
    (balance,) = await store.balances([CLAIM])
    assert (balance.used, balance.held) == (Amount(350, 2_600_000_000, 1), Amount())
    await leases.sweep()
    assert await store.totals(KEY) == totals


@pytest.mark.parametrize("way", ["tick", "note"])
async def test_orphaned_call_of_a_living_worker_is_charged_for_later_tokens(
    leases: Leases, store: MemoryStore, record: MakeRecord, way: str
) -> None:
    one, delivered = opened(record()), 0
    await taken(store, one.orphaned)
    lease = leases.open(Lease(one.hold.id, 60, 2_000, opened=one, delivered=lambda: delivered))
    await store.settle(replace(one, noted=100).as_orphaned())
    for delivered in (100, 400, 700):
        await (leases.tick() if way == "tick" else leases.save_progress(lease, 4 * delivered))
        totals = await store.totals(KEY)
        assert (totals.calls, totals.output_tokens) == (1, delivered)
    (balance,) = await store.balances([CLAIM])
    assert (balance.used.tokens, balance.held) == (800, Amount())
    whole = replace(one.orphaned, outcome="ok", charge=Charge(Usage.of(90, 720), "provider"), spent=Amount(810, 0, 1))
    await store.settle(whole)
    await leases.tick()
    totals = await store.totals(KEY)
    assert (totals.calls, totals.input_tokens, totals.output_tokens) == (1, 90, 720), "its own record is the last word"


async def test_later_tokens_of_an_orphaned_call_are_journaled_if_the_store_refuses_them(
    record: MakeRecord,
) -> None:
    class Damaged(Gone):
        async def settle(self, record: CallRecord, ending: StepEnding | None = None) -> Totals:
            raise StoreDamaged("its session cannot be read")

    notes, one = Notes(Damaged()), opened(record())
    lease = notes.leases.open(Lease(one.hold.id, 60, 2_000, opened=one, delivered=lambda: 7))
    await notes.tick()
    assert notes.written == [{one.hold.id: 7}]
    assert not notes.availability.is_unavailable, "the store is well"
    assert lease.is_known


async def test_first_sweep_after_an_outage_settles_no_call(clock: Clock, record: MakeRecord) -> None:
    store = Gone(moment=clock)
    leases = Leases(store, store.settle, lease_s=60)
    await taken(store, record())
    clock.seconds += 61
    store.is_gone = True
    with pytest.raises(StoreUnavailable):
        await leases.sweep()
    store.is_gone = False
    await leases.sweep()
    assert (await store.totals(KEY)).calls == 0, "others could not renew it either, and may be about to"
    await leases.sweep()
    assert (await store.totals(KEY)).calls == 1


async def test_own_overdue_holds_do_not_hide_others(
    leases: Leases, store: MemoryStore, clock: Clock, record: MakeRecord
) -> None:
    for number in range(121):
        one = opened(record("ours" if number < 120 else "other"))
        await store.reserve(replace(one, hold=replace(one.hold, claims=())), 60)
        if number < 120:
            leases.open(Lease(one.hold.id, 60, 0))
        clock.seconds += 0.01
    clock.seconds += 61
    await leases.sweep()
    assert (await store.totals(SessionKey("alice", "other"))).calls == 1
    assert (await store.totals(SessionKey("alice", "ours"))).calls == 0


async def test_overdue_calls_that_cannot_be_settled_do_not_hide_others(
    store: MemoryStore, clock: Clock, record: MakeRecord
) -> None:
    async def refuse(orphaned: CallRecord) -> None:
        handed_on.append(orphaned.call_id)

    handed_on = list[str]()
    leases = Leases(store, refuse, lease_s=60)
    left = [opened(record()) for _ in range(120)]
    for one in left:
        await store.reserve(replace(one, hold=replace(one.hold, claims=())), 60)
        clock.seconds += 0.01
    clock.seconds += 61
    for _ in range(3):
        await leases.sweep()
    assert handed_on == [one.hold.id for one in left]


class Counting(MemoryStore):
    """A store that records which holds are taken and renewed, and runs a function while one is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.taken = list[str]()
        self.renewed = list[dict[str, int]]()
        self.meanwhile: Callable[[], Awaitable[object]] | None = None

    async def reserve(self, opened: OpenHold, lease_s: float) -> Granted | Refused:
        self.taken.append(opened.hold.id)
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            await meanwhile()
        return await super().reserve(opened, lease_s)

    async def renew(self, noted: Mapping[str, int]) -> frozenset[str]:
        self.renewed.append(dict(noted))
        return await super().renew(noted)


async def test_a_call_that_ends_soon_or_has_nothing_new_costs_the_store_nothing(record: MakeRecord) -> None:
    store = Counting()
    leases = Leases(store, store.settle, lease_s=60, tick_s=60)
    leases.open(Lease("short", 60, 0, pending=lambda: opened(record())))
    one = record()
    await taken(store, one)
    leases.open(Lease(one.call_id, 60, 2_000))
    await leases.tick()
    assert (store.taken, store.renewed) == ([one.call_id], [])


async def test_pending_hold_is_taken_once_and_then_renewed(record: MakeRecord) -> None:
    store, delivered = Counting(), 0
    leases = Leases(store, store.settle, lease_s=60, tick_s=0)
    first, second = opened(record()), opened(record())
    leases.open(Lease(first.hold.id, 60, 0, pending=lambda: first, delivered=lambda: delivered))
    lease = leases.open(Lease(second.hold.id, 60, 0, pending=lambda: second, delivered=lambda: delivered))
    store.meanwhile = lambda: leases.take(lease)  # its answer is about to come
    await leases.tick()
    delivered = 7
    for _ in range(2):
        assert await leases.take(lease)
        await leases.tick()
    assert store.taken == [first.hold.id, second.hold.id]
    assert store.renewed == [{first.hold.id: 7, second.hold.id: 7}]


async def test_hold_of_a_call_accepted_in_an_outage_waits_for_the_store(record: MakeRecord) -> None:
    store, availability, told = Counting(), Availability(), list[Granted]()
    availability.report(StoreUnavailable("away"))
    leases = Leases(store, store.settle, lease_s=60, tick_s=0, availability=availability)
    one = opened(record())
    leases.open(Lease(one.hold.id, 60, 0, pending=lambda: one, on_taken=told.append))
    await leases.tick()
    assert (store.taken, told) == ([], [])
    availability.restore()
    for _ in range(2):
        await leases.tick()
    assert (store.taken, [outcome.units for outcome in told]) == ([one.hold.id], [2_000])


async def test_a_hold_grows_with_its_stream_until_there_is_no_more(
    leases: Leases, store: MemoryStore, record: MakeRecord
) -> None:
    one, delivered = record(), 0
    granted = await taken(store, one)
    lease = leases.open(Lease(one.call_id, 60, granted.units, step=2_048, delivered=lambda: delivered))
    for delivered in range(500, 9_900, 500):
        await leases.tick()
        assert not lease.is_over
        assert lease.tokens >= delivered
    assert lease.tokens == 9_900
    delivered = 9_900
    await leases.tick()
    assert lease.is_over


async def test_final_hold_neither_grows_nor_ends_its_response(
    leases: Leases, store: MemoryStore, record: MakeRecord
) -> None:
    """The provider has its limit: what has come is estimated, and may seem to be more."""
    one = record()
    granted = await taken(store, one)
    lease = leases.open(Lease(one.call_id, 60, granted.units, delivered=lambda: granted.units + 9))
    await leases.tick()
    assert (lease.tokens, lease.is_over) == (granted.units, False)


async def test_no_more_is_held_than_a_stream_will_use_soon(
    leases: Leases, store: MemoryStore, record: MakeRecord
) -> None:
    one, delivered = record(), 1_975
    granted = await taken(store, one)
    lease = leases.open(Lease(one.call_id, 60, granted.units, step=50, delivered=lambda: delivered))
    for _ in range(3):
        await leases.tick()
    assert lease.tokens == granted.units == 2_000
    delivered = 1_976
    for _ in range(3):
        await leases.tick()
    assert (lease.tokens, lease.step) == (2_050, 100), "the next extension is larger"
    delivered = 2_001
    for _ in range(3):
        await leases.tick()
    assert (lease.tokens, lease.step) == (2_150, 200)


@pytest.mark.parametrize("answers", [1, 2])
async def test_a_stream_that_is_ahead_of_its_hold_goes_on(
    leases: Leases, store: MemoryStore, record: MakeRecord, answers: int
) -> None:
    """A part of it that came at once was longer than what a hold is extended by."""
    one = record()
    await taken(store, one)
    lease = leases.open(Lease(one.call_id, 60, 2_000, step=50, responses=answers, delivered=lambda: 6_001))
    await leases.tick()
    assert 6_001 < lease.tokens <= 6_001 + 51 * answers
    assert not lease.is_over


async def test_a_unit_of_several_answers_holds_a_token_of_each(
    leases: Leases, store: MemoryStore, record: MakeRecord
) -> None:
    one = record()
    await taken(store, one)
    lease = leases.open(Lease(one.call_id, 60, 100, step=50, responses=3, delivered=lambda: 76))
    await leases.tick()
    assert lease.tokens == 100 + 50 * 3


async def test_hold_that_cannot_be_made_does_not_stop_other_renewals(
    store: MemoryStore, clock: Clock, record: MakeRecord, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> OpenHold:
        raise OverflowError("a number that no store takes")

    leases = Leases(store, store.settle, lease_s=60, tick_s=0.01, sweep_s=0.01)
    one = record()
    await taken(store, one)
    with caplog.at_level(logging.ERROR, "gateway"):
        leases.start()
        leases.open(Lease("bad", 60, 0, pending=fails))
        await eventually(lambda: any("holds were not renewed" in entry.getMessage() for entry in caplog.records))
        leases.close("bad")
        lease = leases.open(Lease(one.call_id, 60, 2_000, delivered=lambda: 7))
        await eventually(lambda: lease.saved.tokens)
    await leases.aclose()
    clock.seconds += 61
    (overdue,) = await store.overdue_holds(1)
    assert overdue.noted == 7


async def test_outage_ends_no_response_within_its_hold(store: MemoryStore, record: MakeRecord) -> None:
    class Away(MemoryStore):
        renewals = looks = 0

        async def renew(self, noted: object) -> frozenset[str]:
            self.renewals += 1
            raise StoreUnavailable("away")

        async def overdue_holds(self, limit: int) -> list[OpenHold]:
            self.looks += 1
            raise StoreUnavailable("away")

    away = Away()
    leases = Leases(away, away.settle, lease_s=60, tick_s=0.01, sweep_s=0.01)
    leases.start()
    lease = leases.open(Lease("x", 60, 10, step=10, delivered=lambda: 5))
    await eventually(lambda: min(away.renewals, away.looks) > 1)
    assert not lease.is_over
    assert lease.saved.tokens == 0
    await leases.aclose()


class Gone(MemoryStore):
    """A store that a test can make unavailable."""

    is_gone = False
    asked = 0

    async def renew(self, noted: Mapping[str, int]) -> frozenset[str]:
        self._check()
        return await super().renew(noted)

    async def extend(self, hold_id: str, units: int) -> Granted | None:
        self._check()
        return await super().extend(hold_id, units)

    async def overdue_holds(self, limit: int) -> Sequence[OpenHold]:
        self._check()
        return await super().overdue_holds(limit)

    def _check(self) -> None:
        self.asked += 1
        if self.is_gone:
            raise StoreUnavailable("away")


@pytest.mark.parametrize("way", ["look", "tick"])
async def test_response_ends_with_its_hold_during_an_outage(record: MakeRecord, way: str) -> None:
    store, one = Gone(), record()
    leases = Leases(store, store.settle, lease_s=60)
    granted = await taken(store, one)
    lease = leases.open(Lease(one.call_id, 60, granted.units, step=2_048))
    store.is_gone = True
    for delivered in (1_000, 1_999, 2_000):
        lease.delivered = lambda come=delivered: come  # type: ignore[misc]
        with contextlib.suppress(StoreUnavailable):
            await (leases.check(lease) if way == "look" else leases.tick())
        assert lease.is_over is (delivered == 2_000)
    (balance,) = await store.balances([CLAIM])
    assert balance.held.tokens == 100 + lease.tokens


async def test_response_continues_if_the_store_is_available_in_time(record: MakeRecord) -> None:
    store, one, delivered = Gone(), record(), 1_900
    leases = Leases(store, store.settle, lease_s=60)
    granted = await taken(store, one)
    lease = leases.open(Lease(one.call_id, 60, granted.units, step=2_048, delivered=lambda: delivered))
    store.is_gone = True
    await leases.check(lease)
    store.is_gone = False
    await leases.check(lease)
    delivered = 3_000
    await leases.check(lease)
    assert not lease.is_over
    assert lease.tokens > 3_000


def _same(one: OpenHold) -> OpenHold:
    return one


class Notes:
    """The notes that a worker writes while the store is unavailable."""

    def __init__(self, store: Gone) -> None:
        self.store, self.availability, self.written = store, Availability(), list[dict[str, int]]()
        self.leases = Leases(
            FallbackStore(store, self.availability),
            store.settle,
            lease_s=60,
            tick_s=60,
            availability=self.availability,
            note=self._note,
        )

    def lose_store(self) -> None:
        self.store.is_gone = True
        self.availability.report(StoreUnavailable("away"))

    def restore_store(self) -> None:
        self.store.is_gone = False
        self.availability.restore()

    async def _note(self, records: Sequence[CallRecord]) -> None:
        await asyncio.sleep(0)
        self.written.append({one.call_id: one.charge.usage.output_tokens for one in records if one.charge})

    async def tick(self) -> None:
        with contextlib.suppress(StoreUnavailable):
            await self.leases.tick()


async def kept(notes: Notes, record: CallRecord) -> Lease:
    """The lease of a hold that the store has."""
    granted = await taken(notes.store, record)
    return notes.leases.open(Lease(record.call_id, 60, granted.units, opened=opened(record)))


async def test_stream_progress_is_journaled_until_the_store_knows_it(
    record: MakeRecord,
) -> None:
    notes, one = Notes(Gone()), record()
    lease, still = await kept(notes, one), await kept(notes, record())
    notes.store.is_gone = True
    for delivered in (7, 9):
        lease.delivered = lambda come=delivered: come  # type: ignore[misc]
        await notes.tick()
    assert notes.availability.is_unavailable, "found out although no call came"
    assert notes.written == [{one.call_id: 7}, {one.call_id: 9}], "of the other nothing has come"
    assert still.saved.journaled is None
    notes.restore_store()
    await notes.tick()
    await notes.tick()
    assert notes.written[2:] == [{}], "once"
    assert lease.saved.tokens == 9


async def test_call_unknown_to_the_store_is_journaled_after_its_first_tokens_or_a_tick(
    record: MakeRecord,
) -> None:
    notes = Notes(Gone())
    notes.lose_store()
    young, old, begun = opened(record()), opened(record()), opened(record())
    leases = [notes.leases.open(Lease(one.hold.id, 60, 0, pending=partial(_same, one))) for one in (young, old, begun)]
    leases[1].saved.renewed_at -= 60
    leases[2].delivered = lambda: 1
    await notes.leases.save_progress(leases[2], 10)
    await notes.tick()
    assert notes.written == [{old.hold.id: 0, begun.hold.id: 1}] * 2
    assert [lease.is_known for lease in leases] == [False, True, True]
    notes.restore_store()
    for lease in leases:
        lease.saved.renewed_at -= 60
    await notes.tick()
    assert notes.written[2:] == [{}]
    (balance,) = await notes.store.balances([CLAIM])
    assert balance.held.calls == 3


@pytest.mark.parametrize("is_gone", [False, True])
async def test_fast_streams_are_saved_every_256_tokens_and_together(record: MakeRecord, *, is_gone: bool) -> None:
    notes, delivered = Notes(Gone()), 0
    leases = [await kept(notes, record()) for _ in range(4)]
    for lease in leases:
        lease.delivered = lambda: delivered
    if is_gone:
        notes.lose_store()
    asked = notes.store.asked
    for delivered in range(0, 1_024, 64):
        await asyncio.gather(*(notes.leases.save_progress(lease, 9 * delivered) for lease in leases))
        assert delivered - (leases[0].saved.journaled or leases[0].saved.tokens) < 256
    if is_gone:
        written = [noted for noted, _ in groupby(notes.written)]
        assert written == [dict.fromkeys((lease.id for lease in leases), come) for come in (256, 512, 768)]
        assert len(notes.written) <= 2 * len(written), "those who ask meanwhile share the next one"
        assert notes.store.asked == asked
    else:
        assert notes.written == []
        assert notes.store.asked == asked + 3 * len(leases)


async def test_no_response_waits_for_a_store_known_to_be_unavailable(record: MakeRecord) -> None:
    store, one, availability = Gone(), record(), Availability()
    leases = Leases(FallbackStore(store, availability), store.settle, lease_s=60, availability=availability)
    granted = await taken(store, one)
    lease = leases.open(Lease(one.call_id, 60, granted.units, step=2_048, delivered=lambda: 1_900))
    store.is_gone = True
    for _ in range(50):
        await leases.check(lease)
    assert (availability.failures, store.asked) == (1, 1)


async def test_orphaned_stream_continues_while_its_budget_has_room(
    leases: Leases, store: MemoryStore, record: MakeRecord
) -> None:
    one, delivered = opened(record()), 0
    await taken(store, one.orphaned)
    lease = leases.open(Lease(one.hold.id, 60, 2_000, step=2_048, opened=one, delivered=lambda: delivered))
    await store.settle(replace(one, noted=100).as_orphaned())
    for delivered in (1_500, 3_000, 4_500):
        await leases.tick()
        assert not lease.is_over, f"{delivered} of 10,000 tokens are used"
    delivered = 10_000
    await leases.tick()
    await leases.tick()
    assert lease.is_over, "nothing is left"


async def test_orphaned_streams_exceed_their_budget_by_one_step_each_at_most(
    leases: Leases, store: MemoryStore, record: MakeRecord
) -> None:
    delivered, going = {}, list[Lease]()
    for _ in range(3):
        one = opened(record())
        await taken(store, one.orphaned)
        delivered[one.hold.id] = 0
        come = partial(delivered.__getitem__, one.hold.id)
        going.append(leases.open(Lease(one.hold.id, 60, 2_000, step=2_048, opened=one, delivered=come)))
        await store.settle(one.as_orphaned())
    for _ in range(200):
        for lease in going:
            delivered[lease.id] += 0 if lease.is_over else 100
        await leases.tick()
    assert all(lease.is_over for lease in going)
    (balance,) = await store.balances([CLAIM])
    assert 10_000 <= balance.used.tokens <= 10_000 + 3 * 2_048


def test_dense_response_is_checked_before_its_hold_is_used_up() -> None:
    lease = Lease("h", 60, 4_000, end_tokens=6_500)
    assert (lease.is_bounded, lease.end, lease.check_bytes) == (True, 6_500, 2_048)
    for come, delivered, next_look in (
        (2_048, 10, 16_384),  # an event a token
        (20_000, 4_500, 4_444),  # five bytes a token
        (30_000, 6_400, 2_048),
        (40_000, 9_000, 2_048),
        (0, 0, 2_048),
    ):
        lease.schedule_check(come, delivered)
        assert (lease.checked_at, lease.check_bytes) == (come, next_look)


def test_response_without_a_bound_is_never_checked() -> None:
    assert not Lease("h", 60, 4_000).is_bounded
    assert Lease("h", 60, 4_000, step=2_048).is_bounded
    assert Lease("h", 60, 4_000, step=2_048).end == 4_000


@pytest.mark.parametrize(("delivered", "size", "is_free"), [(255, 2, True), (255, 3, False), (10, 1_000, False)])
def test_a_part_that_may_bring_too_many_unsaved_tokens_is_not_passed_on_freely(
    delivered: int, size: int, is_free: bool
) -> None:
    lease = Lease("call", 60, 10**6, delivered=lambda: delivered)
    lease.free_up(2_000, size)
    assert (lease.free_until > 2_000) is is_free


def test_a_response_is_not_passed_on_freely_if_its_worker_could_not_charge_it() -> None:
    lease = Lease("call", 60, 100, end_tokens=100)
    lease.free_up(10)
    assert lease.free_until == lease.saved.next_at == 1_024
    lease.end_at(100)
    assert lease.free_until == 0
    lease.free_up(10)
    assert lease.free_until == 0


@pytest.mark.parametrize(
    ("tokens", "step", "fewest"), [(128, 32, 256), (900, 225, 900), (2_048, 2_048, 2_048), (128, 0, 2_048)]
)
def test_a_small_hold_that_grows_is_checked_more_often(tokens: int, step: int, fewest: int) -> None:
    lease = Lease("h", 60, tokens, step=step, end_tokens=None if step else tokens)
    assert lease.least_check_bytes == fewest
    lease.schedule_check(come=4_000, delivered=tokens)
    assert lease.check_bytes == fewest


def test_a_stream_is_checked_soon_until_its_bytes_per_token_are_known() -> None:
    lease = Lease("h", 60, 900, step=225)
    lease.schedule_check(come=9_000, delivered=0)
    assert lease.check_bytes == 900
    lease.schedule_check(come=9_000, delivered=16)
    assert lease.check_bytes == 16 * 1024
    lease.schedule_check(come=30_000, delivered=600)
    assert lease.check_bytes == 300 * 30_000 // 1_200
