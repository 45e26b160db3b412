"""Budget alerts on every store: once for each threshold, with several workers, restarts and failing receivers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, cast

import pytest

from gateway.core.ledger.arithmetic import AccountKey, Amount, Claim, Hold, Limits
from gateway.core.ledger.session_key import SessionKey
from gateway.core.ledger.thresholds import DEFAULT_THRESHOLDS, BudgetAlert
from gateway.core.ports import Store
from gateway.core.record import CallRecord
from gateway.core.stored import MOST_LATEST, OpenHold
from gateway.stores.redis.per_server import home_of
from gateway.telemetry import alert_outbox
from gateway.telemetry.alert_outbox import AlertOutbox
from gateway.telemetry.budget_alerts import BudgetAlerts, Leadership
from tests.stores.conftest import MakeRecord, OpenStore
from tests.stores.files import Clock, Time

if TYPE_CHECKING:
    from gateway.stores.redis import RedisStore
    from gateway.stores.redis.per_slot import PerSlotLedger

SESSION = SessionKey("alice", "s")
KEY = AccountKey("key", "alice")
_numbers = count()


@dataclass
class Inbox:
    """A receiver of alerts. `is_up`: it accepts them."""

    name: str = "inbox"
    is_up: bool = True
    offered: list[BudgetAlert] = field(default_factory=list)
    accepted: list[BudgetAlert] = field(default_factory=list)

    async def accept(self, alert: BudgetAlert) -> bool:
        self.offered.append(alert)
        if self.is_up:
            self.accepted.append(alert)
        return self.is_up

    @property
    def reached(self) -> list[tuple[str, int]]:
        return [(one.account.kind, one.threshold) for one in self.accepted]


@dataclass
class Budget:
    """The configured limits of sessions and client keys."""

    session: Limits = field(default_factory=lambda: Limits(tokens=1_000))
    key: Limits = field(default_factory=Limits)

    def claims(self, accounts: Iterable[AccountKey]) -> Sequence[Claim]:
        return [Claim(one, self.key if one.kind == "key" else self.session) for one in accounts]

    async def claims_on(self, calls: Sequence[CallRecord]) -> Sequence[Claim]:
        return self.claims(dict.fromkeys(key for call in calls for key in call.accounts))


@dataclass
class World:
    """A store that several workers share, the receiver of alerts, the limits and the clocks."""

    store: Store
    record: MakeRecord
    clock: Clock
    moments: Time
    inbox: Inbox = field(default_factory=Inbox)
    budget: Budget = field(default_factory=Budget)
    dropped: int = 0

    def worker(self, inbox: Inbox | None = None, *, ahead_s: float = 0.0) -> BudgetAlerts:
        """Return the alerts of one more worker. `ahead_s`: its wall clock is ahead by so many seconds."""
        number, ids = next(_numbers), count()
        return BudgetAlerts(
            self.store,
            self.budget.claims_on,
            DEFAULT_THRESHOLDS,
            leadership=Leadership(
                self.store, f"worker-{number}", wall=lambda: self.clock() + ahead_s, clock=self.clock
            ),
            outbox=AlertOutbox(self.store, [inbox or self.inbox], dropped=self.count_dropped, clock=self.clock),
            new_id=lambda: f"{number}-{next(ids)}",
            wall=self.clock,
        )

    def count_dropped(self) -> None:
        self.dropped += 1

    async def spend(self, tokens: int, session: str = "s", *, with_key: bool = False) -> None:
        """Reserve and settle a call."""
        accounts = (*([KEY] if with_key else []), SessionKey("alice", session).account)
        made = self.record(session, accounts=accounts, spent=Amount(tokens, 0, 1))
        claims = [Claim(one.key, Limits(window=one.configured.window)) for one in self.budget.claims(accounts)]
        await self.store.reserve(OpenHold(Hold(made.call_id, tuple(claims), Amount()), made), 60.0)
        await self.store.settle(made)

    async def settle(self, tokens: int, session: str) -> None:
        """Settle a call without a reservation."""
        accounts = (SessionKey("alice", session).account,)
        await self.store.settle(self.record(session, accounts=accounts, spent=Amount(tokens, 0, 1)))


async def look(one: BudgetAlerts) -> None:
    """Let a worker compare, and wait until it has sent what it has."""
    await one.look()
    await one._outbox.join()


@pytest.fixture
def world(store: Store, record: MakeRecord, clock: Clock, moments: Time) -> World:
    return World(store, record, clock, moments)


async def test_each_threshold_is_announced_once(world: World) -> None:
    one = world.worker()
    await one.look()
    for tokens in (499, 1, 1, 299, 1, 250, 100):
        await world.spend(tokens)
        await look(one)
    assert world.inbox.reached == [("session", 50), ("session", 80), ("session", 95), ("session", 100)]
    [first, *_] = world.inbox.accepted
    assert (first.account, first.unit, first.used.tokens, first.limits) == (
        SESSION.account,
        "tokens",
        500,
        (1_000, None, None),
    )


async def test_one_call_can_reach_several_thresholds_of_several_accounts(world: World) -> None:
    world.budget.key = Limits(calls=2)
    one = world.worker()
    await one.look()
    await world.spend(960, with_key=True)
    await look(one)
    assert sorted(world.inbox.reached) == [("key", 50), ("session", 50), ("session", 80), ("session", 95)]


async def test_two_workers_announce_parallel_calls_once(world: World) -> None:
    workers = [world.worker() for _ in range(2)]
    await asyncio.gather(*(one.look() for one in workers))
    await asyncio.gather(*(world.spend(50) for _ in range(20)), *(one.look() for one in workers for _ in range(3)))
    for one in workers:
        await look(one)
    assert sorted(world.inbox.reached) == [("session", 50), ("session", 80), ("session", 95), ("session", 100)]


async def test_charge_of_a_killed_worker_is_announced_by_another(world: World) -> None:
    killed, other = world.worker(Inbox()), world.worker()
    await killed.look()
    await world.spend(600)
    # The first worker ends here, without having looked.
    await look(other)
    assert world.inbox.reached == [], "its lease has not ended"
    world.clock.time += 11
    await look(other)
    assert world.inbox.reached == [("session", 50)]


@pytest.mark.parametrize("ahead_s", [3_600.0, -3_600.0])
async def test_killed_worker_is_replaced_even_if_its_clock_is_wrong(world: World, ahead_s: float) -> None:
    killed, other = world.worker(ahead_s=ahead_s), world.worker()
    await killed.look()
    await world.spend(600)
    await look(other)
    world.clock.time += 11
    await look(other)
    assert world.inbox.reached == [("session", 50)]
    await look(killed)
    await world.spend(300)
    await look(killed)
    await look(other)
    assert world.inbox.reached == [("session", 50), ("session", 80)]


async def test_alert_of_a_worker_killed_before_delivery_is_sent_by_another(world: World) -> None:
    killed = world.worker(Inbox(is_up=False))
    await killed.look()
    await world.spend(600)
    await look(killed)
    # With its next lease it also saves that it has read the call.
    world.clock.time += 6
    await look(killed)
    world.clock.time += 11
    restarted = world.worker()
    await restarted.look()
    await look(restarted)
    assert world.inbox.reached == [("session", 50)]
    await world.spend(1)
    await look(restarted)
    assert world.inbox.reached == [("session", 50)]


async def test_worker_that_leads_again_repeats_nothing(world: World) -> None:
    one, other = world.worker(), world.worker()
    for leader in (one, other, one):
        await world.spend(300)
        await look(leader)
        await world.spend(0)
        world.clock.time += 11
    assert world.inbox.reached == [("session", 50), ("session", 80)]
    await look(other)
    await world.spend(1)
    await look(other)
    world.clock.time += 11
    await world.spend(1)
    await look(one)
    assert world.inbox.reached == [("session", 50), ("session", 80)]


async def test_restart_does_not_repeat_an_alert(world: World) -> None:
    for _ in range(3):
        one = world.worker()
        await one.look()
        await world.spend(200)
        await look(one)
        world.clock.time += 11
    assert world.inbox.reached == [("session", 50)]


async def test_receiver_that_was_down_gets_all_alerts(world: World) -> None:
    world.inbox.is_up = False
    one = world.worker()
    await one.look()
    for _ in range(4):
        await world.spend(250)
        await look(one)
    assert world.inbox.accepted == []
    world.inbox.is_up = True
    world.clock.time += 61
    await look(one)
    assert world.inbox.reached == [("session", 50), ("session", 80), ("session", 95), ("session", 100)]
    assert {one.id for one in world.inbox.offered} == {one.id for one in world.inbox.accepted}
    accepted = len(world.inbox.accepted)
    world.clock.time += 61
    await look(one)
    assert len(world.inbox.accepted) == accepted


async def test_failing_receiver_is_offered_alerts_at_growing_intervals(world: World) -> None:
    world.inbox.is_up = False
    one = world.worker()
    await one.look()
    await world.spend(600)
    for _ in range(20):
        await look(one)
        world.clock.time += 1
    assert 4 <= len(world.inbox.offered) <= 6
    assert len({one.id for one in world.inbox.offered}) == 1


async def test_refilled_window_announces_again(world: World) -> None:
    world.budget.session = Limits(tokens=1_000, window=60)
    one = world.worker()
    await one.look()
    await world.spend(600)
    await look(one)
    world.moments.go_on(61)
    await world.spend(600)
    await look(one)
    assert world.inbox.reached == [("session", 50)] * 2
    assert world.inbox.accepted[0].resets_at is not None


async def test_reset_session_announces_again(world: World) -> None:
    one = world.worker()
    await one.look()
    await world.spend(600)
    await look(one)
    await world.store.reset(SESSION)
    await world.spend(600)
    await look(one)
    assert world.inbox.reached == [("session", 50)] * 2


@pytest.mark.parametrize("restarts", [False, True])
async def test_raised_budget_announces_again_when_it_is_reached_again(world: World, *, restarts: bool) -> None:
    one = world.worker()
    await one.look()
    await world.spend(1_000)
    await look(one)
    world.inbox.accepted.clear()
    await world.store.override_limits(SESSION.account, {"tokens": 2_000})
    if restarts:
        world.clock.time += 11
        one = world.worker()
        await one.look()
    await world.spend(100)
    await look(one)
    assert world.inbox.reached == [], "55 %, and 50 % was reached before"
    await world.spend(600)
    await look(one)
    assert world.inbox.reached == [("session", 80)]


async def test_lowered_budget_announces_what_it_has_reached(world: World) -> None:
    one = world.worker()
    await one.look()
    await world.spend(600)
    await look(one)
    await world.store.override_limits(SESSION.account, {"tokens": 700})
    await world.spend(1)
    await look(one)
    assert world.inbox.reached == [("session", 50), ("session", 80)]


async def test_alerts_of_a_removed_receiver_are_deleted(world: World) -> None:
    one = world.worker(Inbox("old", is_up=False))
    await one.look()
    await world.spend(600)
    await look(one)
    world.clock.time += 11
    after = world.worker()
    await after.look()
    await look(after)
    assert await world.store.learned("alerts/waiting") == b"[]"


async def test_charges_that_the_list_of_settled_calls_no_longer_has_are_announced(world: World) -> None:
    one = world.worker()
    await one.look()
    await world.spend(600, "quiet", with_key=True)
    for _ in range(MOST_LATEST + 64):
        await world.settle(0, "busy")
    assert (await world.store.settled_after(0, 1)).missed > 0
    await look(one)
    assert world.inbox.reached == [("session", 50)]
    assert world.inbox.accepted[0].account.id == "quiet"


async def test_waiting_alerts_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alert_outbox, "MOST_WAITING", 3)
    world.inbox.is_up = False
    one = world.worker()
    await one.look()
    for number in range(5):
        await world.spend(600, f"s{number}")
    await look(one)
    assert (one._outbox.size, world.dropped) == (3, 2)
    world.inbox.is_up = True
    world.clock.time += 61
    await look(one)
    assert len({alert.account.id for alert in world.inbox.accepted}) == 3


async def test_charge_is_announced_if_a_worker_of_a_cluster_ends_before_it_lists_the_call(
    open_cluster: OpenStore, record: MakeRecord, clock: Clock, moments: Time
) -> None:
    store = await open_cluster(clock, moments)
    world = World(store, record, clock, moments)
    one = world.worker()
    await one.look()
    made = record("s", accounts=(SESSION.account,), spent=Amount(600, 0, 1))
    await store.reserve(OpenHold(Hold(made.call_id, (Claim(SESSION.account),), Amount()), made), 60.0)
    ledger = cast("RedisStore", store)._ledger
    # The first part of a settlement; the worker ends before the second one.
    await cast("PerSlotLedger", ledger)._settle(made, home_of(made), None, None)
    await look(one)
    assert world.inbox.reached == []
    moments.go_on(61)
    assert await store.overdue_holds(10) == []
    await look(one)
    assert world.inbox.reached == [("session", 50)]
    await store.aclose()
