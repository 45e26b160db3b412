"""Announce that budgets have reached thresholds: once each, also after a crash and with several workers.

One worker at a time, the leader, follows the list of settled calls in the store. Settlement writes this list with the
charge, so no charge is missed if a worker dies after it. What was announced and the alerts that wait for receivers are
changed in one transaction of the store. An alert is deleted when its receiver has accepted it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple, Protocol, TypeVar

import msgspec

from gateway.core.bounded import BoundedDict
from gateway.core.errors import StoreDamaged, StoreUnavailable
from gateway.core.ledger.arithmetic import AccountKey, Balance, Claim
from gateway.core.ledger.thresholds import Announced, BudgetAlert, announced, due, is_watched, unit_of
from gateway.core.ports import Calls, Ledger, Lessons, Sessions
from gateway.core.record import CallRecord
from gateway.core.stored import Lesson
from gateway.telemetry.alert_outbox import AlertOutbox

logger = logging.getLogger("gateway")
T = TypeVar("T")

#: keys of the learned values of the store: the leader, and what was announced of each account
_LEADER: Final = "alerts/leader"
_ANNOUNCED: Final = "alerts/announced/"

#: settled calls that are read at once
_PAGE: Final = 128
#: newest calls of a session that name its accounts, and seconds by which the clocks of machines may differ, if the list
#: of settled calls does not reach back
_CALLS_OF_SESSION: Final = 20
_MARGIN_S: Final = 60.0
#: accounts of which the leader knows what was announced
_MOST_KNOWN: Final = 10_000
#: seconds between two reads, if there are more calls and if there are none
_PAUSE_S: Final = 0.01
_POLL_S: Final = 1.0
#: seconds without a sign of life after which another worker becomes the leader
_LEASE_S: Final = 10.0
#: longest time in seconds that alerts are still sent when the worker stops
_MAX_WAIT_S: Final = 3.0


class AlertStore(Ledger, Sessions, Calls, Lessons, Protocol):
    """The parts of a store that alerts need."""


class Leader(NamedTuple):
    """The leading worker. `until`: end of its lease (Unix seconds); `cursor`: the settled calls that it has read."""

    owner: str
    until: float
    cursor: int


class NotLeaderError(Exception):
    """Another worker is the leader, so nothing is written."""


class Leadership:
    """Makes one of the workers that share a store the leader, by a lease in the store.

    A lease has ended at its time, or if it was not renewed for as long as it lasts. The latter does not need the clocks
    of all machines to agree.

    Args:
        store: contains the lease and the settled calls.
        owner: identifies this worker.
        wall: returns Unix seconds.
        clock: returns monotonic seconds.

    Attributes:
        cursor: the settled calls that were read.
        read_at: Unix time in seconds at which they were read, or earlier.
    """

    def __init__(
        self,
        store: AlertStore,
        owner: str,
        *,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._owner = owner
        self._wall = wall
        self._clock = clock
        self.cursor = 0
        self.read_at = 0.0
        #: monotonic end of this worker's lease; None while another worker is the leader
        self._until: float | None = None
        #: the lease of another worker, and since when it is known unchanged
        self._seen: Leader | None = None
        self._seen_at = 0.0

    @property
    def is_leading(self) -> bool:
        """Return whether this worker's lease lasts."""
        return self._until is not None and self._until > self._clock()

    async def take(self, on_new: Callable[[], None]) -> bool:
        """Return whether this worker is the leader, and become it if there is none.

        `on_new`: called before the worker becomes the leader.

        Raises:
            StoreUnavailable: it is not known.
        """
        if self._until is not None and self._until - self._clock() > _LEASE_S / 2:
            return True
        leader = _decoded(await self._store.learned(_LEADER), Leader)
        if leader is not None and leader.owner == self._owner:
            await self._renew(leader)
            return self.is_leading
        self._until = None
        if leader is None or self._has_ended(leader):
            self.cursor = leader.cursor if leader else (await self._store.settled_after(None, 0)).cursor
            self.read_at = leader.until - _LEASE_S if leader else self._wall()
            on_new()
            await self._renew(leader)
        return self.is_leading

    def _has_ended(self, leader: Leader) -> bool:
        now = self._clock()
        if leader != self._seen:
            self._seen, self._seen_at = leader, now
        return leader.until <= self._wall() or now - self._seen_at > _LEASE_S

    async def _renew(self, before: Leader | None) -> None:
        with contextlib.suppress(NotLeaderError):
            await self._write({}, _LEASE_S, lambda leader: leader == before)

    async def write(self, lessons: Mapping[str, Lesson]) -> None:
        """Renew the lease and apply these lessons in one transaction.

        Raises:
            NotLeaderError: another worker is the leader. Nothing was written.
            StoreUnavailable: nothing was written, or it is not known.
        """
        await self._write(lessons, _LEASE_S, self._is_own)

    def _is_own(self, leader: Leader | None) -> bool:
        return leader is not None and leader.owner == self._owner

    async def _write(
        self, lessons: Mapping[str, Lesson], lease_s: float, may_write: Callable[[Leader | None], bool]
    ) -> None:
        began = self._clock()
        mine = Leader(self._owner, self._wall() + lease_s, self.cursor)

        def renew(known: bytes | None) -> bytes:
            if not may_write(_decoded(known, Leader)):
                raise NotLeaderError
            return msgspec.json.encode(mine)

        try:
            await self._store.learn({_LEADER: renew, **lessons})
        except NotLeaderError:
            self._until = None
            raise
        self._until = began + lease_s

    async def resign(self) -> None:
        """Let another worker become the leader at once."""
        if self._until is not None:
            with contextlib.suppress(StoreUnavailable, NotLeaderError):
                await self._write({}, 0.0, self._is_own)


class BudgetAlerts:
    """Compares the accounts of settled calls with thresholds.

    Args:
        store: contains the settled calls and the accounts.
        claims_on: returns the accounts that calls were charged to, with their configured limits, each once.
        thresholds: percentages that are announced.
        leadership: of this worker.
        outbox: sends the alerts.
        new_id: makes the id of an alert.
        wall: returns Unix seconds.
    """

    def __init__(
        self,
        store: AlertStore,
        claims_on: Callable[[Sequence[CallRecord]], Awaitable[Sequence[Claim]]],
        thresholds: Sequence[int],
        *,
        leadership: Leadership,
        outbox: AlertOutbox,
        new_id: Callable[[], str],
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._claims_on = claims_on
        self._thresholds = thresholds
        self._leadership = leadership
        self._outbox = outbox
        self._new_id = new_id
        self._wall = wall
        self._known = BoundedDict[AccountKey, Announced](_MOST_KNOWN)
        self._is_loaded = False
        self._task: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Become the leader if there is none, before the first call is settled. Then follow the settled calls."""
        with contextlib.suppress(StoreUnavailable):
            await self._leadership.take(self._forget)
        self._task = asyncio.create_task(self._look_regularly())

    async def _look_regularly(self) -> None:
        while True:
            try:
                await self.look()
            except StoreUnavailable:
                pass  # the settled calls are read when the store is available again
            except Exception:
                logger.exception("budgets were not compared with their thresholds; it will be tried again")
            await asyncio.sleep(_POLL_S)

    def _forget(self) -> None:
        """Forget what this worker knew when it was the leader before: another one may have changed it."""
        self._known.clear()
        self._is_loaded = False

    async def look(self) -> None:
        """Announce the thresholds that settled calls have reached, and send waiting alerts.

        Raises:
            StoreUnavailable: the rest is announced the next time.
        """
        if not await self._leadership.take(self._forget):
            return
        if not self._is_loaded:
            await self._outbox.load()
            self._is_loaded = True
        with contextlib.suppress(NotLeaderError):
            await self._follow()
            self._outbox.send()

    async def _follow(self) -> None:
        """Read the settled calls up to the last one, and announce thresholds."""
        has_more = True
        while has_more and self._leadership.is_leading:
            has_more = await self._read_page()
            await asyncio.sleep(_PAUSE_S)

    async def _read_page(self) -> bool:
        """Read the next settled calls, and announce thresholds. Return False if there are no more."""
        before, began = self._leadership.cursor, self._wall()
        latest = await self._store.settled_after(before, _PAGE)
        if latest.missed:
            await self._compare_recent_sessions(self._leadership.read_at - _MARGIN_S)
        await self._compare([settled.call for settled in latest.settled])
        self._leadership.cursor, self._leadership.read_at = latest.cursor, began
        return latest.cursor != before

    async def _compare_recent_sessions(self, since: float) -> None:
        """Announce the thresholds of sessions with a call since this Unix time, if the list does not reach back.

        The store lists a limited number of settled calls, and more can end while no worker follows them.
        """
        cursor, is_end = None, False
        while not is_end:
            page = await self._store.sessions(None, _PAGE, cursor, "recent")
            recent = [one.key for one in page.sessions if one.last_call_at >= since]
            for key in recent:
                with contextlib.suppress(StoreDamaged):
                    await self._compare(await self._store.calls(key, _CALLS_OF_SESSION))
            cursor, is_end = page.cursor, page.cursor is None or len(recent) < len(page.sessions)

    async def _compare(self, calls: Sequence[CallRecord]) -> None:
        """Announce the thresholds that the accounts of these calls have reached."""
        balances = [one for one in await self._balances(calls) if self._is_due(one)]
        if balances:
            await self._announce(balances)

    async def _balances(self, calls: Sequence[CallRecord]) -> Sequence[Balance]:
        """Return the balances of the accounts that these calls were charged to, if they have a limit."""
        claims = await self._claims_on(calls)
        try:
            found = await self._store.balances(claims)
        except StoreDamaged:
            found = await self._readable(claims)
        return [one for one in found if is_watched(one.limits)]

    async def _readable(self, claims: Sequence[Claim]) -> tuple[Balance, ...]:
        found: list[Balance] = []
        for claim in claims:
            with contextlib.suppress(StoreDamaged):
                found += await self._store.balances([claim])
        return tuple(found)

    def _is_due(self, balance: Balance) -> bool:
        """Return whether thresholds may have to be announced. If not, remember the account as it is."""
        before = self._known.get(balance.key)
        is_due = bool(due(balance, self._thresholds, before))
        if before is not None and not is_due:
            self._known[balance.key] = announced(balance)
        return is_due

    async def _announce(self, balances: Sequence[Balance]) -> None:
        """Keep alerts for these accounts, unless another worker has announced the thresholds before."""
        found: dict[AccountKey, list[BudgetAlert]] = {}
        alerts = list[BudgetAlert]()

        def compare(balance: Balance, known: bytes | None) -> bytes:
            # The store may run it again. Each run replaces what the last one has found.
            before = self._known.get(balance.key) or _decoded(known, Announced)
            found[balance.key] = [self._alert(balance, one) for one in due(balance, self._thresholds, before)]
            alerts[:] = [alert for some in found.values() for alert in some]
            return msgspec.json.encode(announced(balance))

        lessons = {_ANNOUNCED + _digest(one.key): partial(compare, one) for one in balances}
        await self._outbox.add(alerts, lambda outbox: self._leadership.write({**lessons, **outbox}))
        for balance in balances:
            self._known[balance.key] = announced(balance)

    def _alert(self, balance: Balance, threshold: int) -> BudgetAlert:
        now = self._wall()
        return BudgetAlert(
            f"budget_{self._new_id()}",
            now,
            balance.key,
            threshold,
            unit_of(balance),
            balance.used,
            balance.limits[:3],
            now + balance.resets_s if balance.resets_s is not None else None,
        )

    async def aclose(self) -> None:
        """Compare once more, send for a few seconds, and let another worker become the leader."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        try:
            async with asyncio.timeout(_MAX_WAIT_S):
                await self.look()
                await self._outbox.join()
        except (StoreUnavailable, TimeoutError):
            pass  # another worker continues
        except Exception:
            logger.exception("budgets were not compared with their thresholds when the worker stopped")
        await self._outbox.aclose()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_MAX_WAIT_S):
                await self._leadership.resign()


def _digest(key: AccountKey) -> str:
    """Return a key of fixed length for an account: names of sessions are chosen by clients."""
    return hashlib.blake2b("\0".join(key).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _decoded(value: bytes | None, kind: type[T]) -> T | None:
    """Decode a value of the store; None if there is none, or another version has written it."""
    try:
        return msgspec.json.decode(value, type=kind) if value is not None else None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
