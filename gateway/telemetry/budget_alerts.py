"""Announce that budgets have reached thresholds: once each, also after a crash and with several workers.

One worker at a time, the leader, follows the list of settled calls in the store. Settlement writes this list in the
same transaction as the charge, so no charge is missed if a worker dies after it. What was announced and the alerts that
wait for receivers are changed in one transaction of the store. An alert is deleted when its receiver has accepted it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol, TypeVar

import msgspec

from gateway.core.bounded import BoundedDict
from gateway.core.errors import StoreDamaged, StoreUnavailable
from gateway.core.ledger.arithmetic import AccountKey, Balance, Claim
from gateway.core.ledger.thresholds import Announced, BudgetAlert, announced, due, is_watched, unit_of
from gateway.core.ports import Calls, Ledger, Lessons
from gateway.core.stored import LatestCalls, Lesson

logger = logging.getLogger("gateway")
T = TypeVar("T")

#: keys of the store's learned values: the leader, the waiting alerts, and what was announced of each account
_LEADER: Final = "alerts/leader"
_WAITING: Final = "alerts/waiting"
_ANNOUNCED: Final = "alerts/announced/"

#: alerts that wait for receivers, in the store; further ones are dropped
MOST_WAITING: Final = 500
#: settled calls that are read at once
_PAGE: Final = 128
#: accounts of which the leader knows what was announced
_MOST_KNOWN: Final = 10_000
#: alerts that a receiver gets before the store is told that it has accepted them
_BATCH: Final = 16
#: seconds between two reads, if there are more calls and if there are none
_PAUSE_S: Final = 0.01
_POLL_S: Final = 1.0
#: seconds without a sign of life after which another worker becomes the leader
_LEASE_S: Final = 10.0
_MAX_PAUSE_S: Final = 60.0


class AlertStore(Ledger, Calls, Lessons, Protocol):
    """The parts of a store that alerts need."""


class Receiver(Protocol):
    """A receiver of alerts. `name`: identifies it in the store."""

    @property
    def name(self) -> str:  # noqa: D102
        ...

    async def accept(self, alert: BudgetAlert) -> bool:
        """Send the alert. Return False to send it again later."""
        ...


class Leader(NamedTuple):
    """The leading worker. `until`: end of its lease (Unix seconds); `cursor`: the settled calls that it has read."""

    owner: str
    until: float
    cursor: int


class Waiting(NamedTuple):
    """An alert that waits, and the names of the receivers that have not accepted it."""

    alert: BudgetAlert
    receivers: tuple[str, ...]


class _NotLeaderError(Exception):
    """Another worker has become the leader, so nothing is written."""


class BudgetAlerts:
    """Find reached thresholds, and send alerts to all receivers.

    Args:
        store: contains the settled calls, the accounts and the alerts.
        claims_on: returns these accounts with their configured limits.
        receivers: where alerts are sent.
        thresholds: percentages that are announced.
        owner: identifies this worker.
        new_id: makes the id of an alert.
        dropped: called for each alert that is dropped, because too many wait.
    """

    def __init__(
        self,
        store: AlertStore,
        claims_on: Callable[[Iterable[AccountKey]], Sequence[Claim]],
        receivers: Sequence[Receiver],
        thresholds: Sequence[int],
        *,
        owner: str,
        new_id: Callable[[], str],
        dropped: Callable[[], None] = lambda: None,
        wall: Callable[[], float] = time.time,
        poll_s: float = _POLL_S,
        lease_s: float = _LEASE_S,
    ) -> None:
        self._store = store
        self._claims_on = claims_on
        self._receivers = {one.name: one for one in receivers}
        self._thresholds = thresholds
        self._owner = owner
        self._new_id = new_id
        self._dropped = dropped
        self._wall = wall
        self._poll_s = poll_s
        self._lease_s = lease_s
        self._cursor = 0
        #: end of this worker's lease; 0 while another worker is the leader
        self._until = 0.0
        self._known = BoundedDict[AccountKey, Announced](_MOST_KNOWN)
        self._waiting: tuple[Waiting, ...] = ()
        #: `_waiting` has to be assigned in the order in which the store was changed
        self._changing = asyncio.Lock()
        self._sending: dict[str, asyncio.Task[None]] = {}
        #: by receiver: failures since it accepted an alert, and the time before which it gets none
        self._failures: dict[str, tuple[int, float]] = {}
        self._task: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Become the leader if there is none, before the first call is settled."""
        with contextlib.suppress(StoreUnavailable):
            await self._lead()

    def start(self) -> None:
        """Start to follow the settled calls."""
        self._task = asyncio.create_task(self._look_regularly())

    async def _look_regularly(self) -> None:
        while True:
            try:
                await self.look()
            except StoreUnavailable:
                pass  # the settled calls are read when the store is available again
            except Exception:
                logger.exception("budgets were not compared with their thresholds; it will be tried again")
            await asyncio.sleep(self._poll_s)

    async def look(self) -> None:
        """Announce the thresholds that settled calls have reached, and send waiting alerts."""
        if not await self._lead():
            return
        try:
            await self._follow()
        except _NotLeaderError:
            self._until = 0.0
            return
        self._send()

    async def _lead(self) -> bool:
        """Return whether this worker is the leader, and become it if there is none."""
        now = self._wall()
        if self._until - now > self._lease_s / 2:
            return True
        leader = _decoded(await self._store.learned(_LEADER), Leader)
        if leader is not None and leader.owner != self._owner and leader.until > now:
            self._until = 0.0
            return False
        is_new = self._until == 0.0 or leader is None or leader.owner != self._owner
        if is_new:
            # Another worker may have announced something meanwhile.
            self._known.clear()
            self._cursor = leader.cursor if leader else (await self._store.settled_after(None, 0)).cursor
        try:
            await self._write({}, takes_over=True)
        except _NotLeaderError:
            self._until = 0.0
            return False
        if is_new:
            self._waiting = _waiting(await self._store.learned(_WAITING))
        return True

    async def _write(self, lessons: Mapping[str, Lesson], *, takes_over: bool = False) -> None:
        """Renew the lease and apply these lessons in one transaction.

        Args:
            lessons: what to write besides the lease.
            takes_over: become the leader if the lease of another worker has ended.

        Raises:
            _NotLeaderError: another worker is the leader. Nothing was written.
        """
        now = self._wall()
        mine = Leader(self._owner, now + self._lease_s, self._cursor)

        def renew(known: bytes | None) -> bytes:
            leader = _decoded(known, Leader)
            is_own = leader is not None and leader.owner == self._owner
            if not is_own and not (takes_over and (leader is None or leader.until <= now)):
                raise _NotLeaderError
            return msgspec.json.encode(mine)

        await self._store.learn({_LEADER: renew, **lessons})
        self._until = mine.until

    async def _follow(self) -> None:
        """Read the settled calls up to the last one, and announce thresholds."""
        has_more = True
        while has_more and self._until > self._wall():
            has_more = await self._read_page()
            await asyncio.sleep(_PAUSE_S)

    async def _read_page(self) -> bool:
        """Read the next settled calls, and announce thresholds. Return False if there are no more."""
        latest = await self._store.settled_after(self._cursor, _PAGE)
        if latest.missed:
            logger.warning(
                "budget alerts: %d calls were settled while no worker followed them; a threshold that they reached is "
                "announced at the next call of its account",
                latest.missed,
            )
        balances = [one for one in await self._balances(latest) if self._due(one, self._known.get(one.key))]
        is_end, self._cursor = latest.cursor == self._cursor, latest.cursor
        if balances:
            await self._announce(balances)
        return not is_end

    async def _balances(self, latest: LatestCalls) -> Sequence[Balance]:
        """Return the balances of the accounts that these calls were charged to."""
        keys = dict.fromkeys(key for settled in latest.settled for key in settled.call.accounts if key.kind != "rate")
        claims = self._claims_on(keys)
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

    def _due(self, balance: Balance, before: Announced | None) -> tuple[int, ...]:
        """Return the thresholds to announce, and remember the account as it is if there are none."""
        thresholds = due(balance, self._thresholds, before)
        if before is not None and not thresholds:
            self._known[balance.key] = announced(balance)
        return thresholds

    async def _announce(self, balances: Sequence[Balance]) -> None:
        """Keep alerts for these accounts, unless another worker has announced the thresholds before."""
        now, alerts, waiting, dropped = self._wall(), list[BudgetAlert](), list[Waiting](), 0

        def compare(balance: Balance, known: bytes | None) -> bytes:
            before = self._known.get(balance.key) or _decoded(known, Announced)
            alerts.extend(self._alert(balance, one, now) for one in due(balance, self._thresholds, before))
            return msgspec.json.encode(announced(balance))

        def begin(known: bytes | None) -> bytes:
            # The first of these functions: the store may run all of them again.
            alerts.clear()
            return compare(balances[0], known)

        def add(known: bytes | None) -> bytes:
            nonlocal dropped
            every = [*_waiting(known), *(Waiting(one, tuple(self._receivers)) for one in alerts)]
            waiting[:], dropped = every[:MOST_WAITING], len(every[MOST_WAITING:])
            return msgspec.json.encode(waiting)

        lessons: dict[str, Lesson] = {_ANNOUNCED + _digest(balances[0].key): begin}
        for balance in balances[1:]:
            lessons[_ANNOUNCED + _digest(balance.key)] = lambda known, balance=balance: compare(balance, known)  # type: ignore[misc]
        async with self._changing:
            await self._write(lessons | {_WAITING: add})
            self._waiting = tuple(waiting)
        for balance in balances:
            self._known[balance.key] = announced(balance)
        for _ in range(dropped):
            self._dropped()
        if dropped:
            logger.warning("budget alerts: %d wait for receivers; %d further ones are dropped", MOST_WAITING, dropped)

    def _alert(self, balance: Balance, threshold: int, now: float) -> BudgetAlert:
        resets_at = now + balance.resets_s if balance.resets_s is not None else None
        return BudgetAlert(
            f"budget_{self._new_id()}",
            now,
            balance.key,
            threshold,
            unit_of(balance),
            balance.used,
            balance.limits[:3],
            resets_at,
        )

    def _send(self) -> None:
        """Start to send the waiting alerts to the receivers that are not being sent to, and not failing."""
        now = self._wall()
        wanted = {name for one in self._waiting for name in one.receivers}
        for name in wanted - self._sending.keys():
            receiver = self._receivers.get(name)
            if self._failures.get(name, (0, 0.0))[1] <= now:
                task = asyncio.create_task(self._removed(name) if receiver is None else self._send_to(receiver))
                self._sending[name] = task
                task.add_done_callback(lambda _, name=name: self._sending.pop(name, None))  # type: ignore[misc]

    async def _removed(self, name: str) -> None:
        """Delete the alerts of a receiver that is no longer configured."""
        await self._drop({one.alert.id for one in self._waiting}, name)

    async def _send_to(self, receiver: Receiver) -> None:
        """Send waiting alerts to a receiver, in their order, until it fails."""
        name, accepted = receiver.name, set[str]()
        for one in [one for one in self._waiting if name in one.receivers][:_BATCH]:
            try:
                if not await receiver.accept(one.alert):
                    break
            except Exception:
                logger.exception("budget alert %s was not sent; it will be tried again", one.alert.id)
                break
            accepted.add(one.alert.id)
        if accepted:
            self._failures.pop(name, None)
            await self._drop(accepted, name)
            return
        failures = self._failures.get(name, (0, 0.0))[0] + 1
        self._failures[name] = (failures, self._wall() + min(_MAX_PAUSE_S, 2.0 ** (failures - 1)))

    async def _drop(self, alert_ids: set[str], name: str) -> None:
        """Delete alerts that a receiver has accepted. If that fails, it gets them again."""
        left: tuple[Waiting, ...] = ()

        def without(known: bytes | None) -> bytes:
            nonlocal left
            left = tuple(_without(_waiting(known), alert_ids, name))
            return msgspec.json.encode(left)

        with contextlib.suppress(StoreUnavailable):
            async with self._changing:
                await self._store.learn({_WAITING: without})
                self._waiting = left

    async def aclose(self, max_wait_s: float = 3.0) -> None:
        """Compare once more, send for a few seconds, and let another worker become the leader at once."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        with contextlib.suppress(StoreUnavailable, _NotLeaderError, TimeoutError):
            async with asyncio.timeout(max_wait_s):
                await self.look()
                await asyncio.gather(*self._sending.values(), return_exceptions=True)
        sending = [*self._sending.values()]
        for task in sending:
            task.cancel()
        await asyncio.gather(*sending, return_exceptions=True)
        if self._until:
            self._lease_s = 0.0
            with contextlib.suppress(StoreUnavailable, _NotLeaderError, TimeoutError):
                async with asyncio.timeout(max_wait_s):
                    await self._write({})


def _without(waiting: Sequence[Waiting], alert_ids: set[str], name: str) -> Sequence[Waiting]:
    kept = []
    for one in waiting:
        names = one.receivers
        if one.alert.id in alert_ids:
            names = tuple(other for other in names if other != name)
        if names:
            kept.append(Waiting(one.alert, names))
    return kept


def _digest(key: AccountKey) -> str:
    """Return a key of fixed length for an account: names of sessions are chosen by clients."""
    return hashlib.blake2b("\0".join(key).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _decoded(value: bytes | None, kind: type[T]) -> T | None:
    """Decode a value of the store; None if there is none, or another version has written it."""
    try:
        return msgspec.json.decode(value, type=kind) if value is not None else None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _waiting(value: bytes | None) -> tuple[Waiting, ...]:
    decoded: tuple[Waiting, ...] | None = _decoded(value, tuple[Waiting, ...])
    return decoded or ()
