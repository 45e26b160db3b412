"""Keep budget alerts in the store until each receiver has accepted them, and send them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

import msgspec

from gateway.core.errors import StoreUnavailable
from gateway.core.ledger.thresholds import BudgetAlert
from gateway.core.ports import Lessons
from gateway.core.stored import Lesson

logger = logging.getLogger("gateway")

#: key of the waiting alerts among the learned values of the store
_KEY: Final = "alerts/waiting"
#: alerts that wait for receivers; further ones are dropped
MOST_WAITING: Final = 500
#: alerts that a receiver gets before they are deleted from the store
_BATCH: Final = 16
_MAX_PAUSE_S: Final = 60.0


class Receiver(Protocol):
    """A receiver of alerts. `name`: identifies it in the store."""

    @property
    def name(self) -> str:  # noqa: D102
        ...

    async def accept(self, alert: BudgetAlert) -> bool:
        """Send the alert. Return False to send it again later."""
        ...


class Waiting(NamedTuple):
    """An alert that waits, and the names of the receivers that have not accepted it."""

    alert: BudgetAlert
    receivers: tuple[str, ...]


class AlertOutbox:
    """The alerts that wait in the store. Only one worker at a time may send them.

    Args:
        store: contains the alerts.
        receivers: where alerts are sent.
        dropped: called for each alert that is dropped, because too many wait.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        store: Lessons,
        receivers: Sequence[Receiver],
        *,
        dropped: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._receivers = {one.name: one for one in receivers}
        self._dropped = dropped
        self._clock = clock
        self._waiting: tuple[Waiting, ...] = ()
        #: `_waiting` has to be assigned in the order in which the store was changed
        self._changing = asyncio.Lock()
        self._sending: dict[str, asyncio.Task[None]] = {}
        #: by receiver: failures since it accepted an alert, and the time before which it gets none
        self._failures: dict[str, tuple[int, float]] = {}

    @property
    def size(self) -> int:
        """Return the number of waiting alerts."""
        return len(self._waiting)

    async def load(self) -> None:
        """Read the alerts that another worker has left.

        Raises:
            StoreUnavailable: they cannot be read.
        """
        async with self._changing:
            self._waiting = _decoded(await self._store.learned(_KEY))

    async def add(
        self, alerts: Sequence[BudgetAlert], write: Callable[[Mapping[str, Lesson]], Awaitable[object]]
    ) -> None:
        """Add alerts in a transaction of the caller.

        Args:
            alerts: filled by the lessons that the store applies before that of the outbox.
            write: applies the lesson of the outbox after others.

        Raises:
            Exception: raised by `write`; nothing was added.
        """
        waiting, dropped = list[Waiting](), 0

        def added(known: bytes | None) -> bytes:
            nonlocal dropped
            every = [*_decoded(known), *(Waiting(one, tuple(self._receivers)) for one in alerts)]
            waiting[:], dropped = every[:MOST_WAITING], len(every[MOST_WAITING:])
            return msgspec.json.encode(waiting)

        async with self._changing:
            await write({_KEY: added})
            self._waiting = tuple(waiting)
        for _ in range(dropped):
            self._dropped()
        if dropped:
            logger.warning("budget alerts: %d wait for receivers; %d further ones are dropped", MOST_WAITING, dropped)

    def send(self) -> None:
        """Start to send waiting alerts to the receivers that are not being sent to, and not failing."""
        now = self._clock()
        wanted = {name for one in self._waiting for name in one.receivers}
        for name in wanted - self._sending.keys():
            if self._failures.get(name, (0, 0.0))[1] <= now:
                receiver = self._receivers.get(name)
                work = self._send_to(receiver) if receiver is not None else self._remove_all(name)
                self._sending[name] = task = asyncio.create_task(work)
                task.add_done_callback(lambda _, name=name: self._sending.pop(name, None))  # type: ignore[misc]

    async def join(self) -> None:
        """Wait until what is being sent was sent."""
        await asyncio.gather(*self._sending.values(), return_exceptions=True)

    async def _remove_all(self, name: str) -> None:
        """Delete the alerts of a receiver that is no longer configured."""
        await self._remove({one.alert.id for one in self._waiting}, name)

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
            await self._remove(accepted, name)
            return
        failures = self._failures.get(name, (0, 0.0))[0] + 1
        self._failures[name] = (failures, self._clock() + min(_MAX_PAUSE_S, 2.0 ** (failures - 1)))

    async def _remove(self, alert_ids: set[str], name: str) -> None:
        """Delete alerts that a receiver has accepted. If that fails, it gets them again."""
        left: tuple[Waiting, ...] = ()

        def without(known: bytes | None) -> bytes:
            nonlocal left
            left = tuple(_without(_decoded(known), alert_ids, name))
            return msgspec.json.encode(left)

        with contextlib.suppress(StoreUnavailable):
            async with self._changing:
                await self._store.learn({_KEY: without})
                self._waiting = left

    async def aclose(self) -> None:
        """Stop sending. What was not sent waits in the store."""
        sending = [*self._sending.values()]
        for task in sending:
            task.cancel()
        await asyncio.gather(*sending, return_exceptions=True)


def _without(waiting: Sequence[Waiting], alert_ids: set[str], name: str) -> Sequence[Waiting]:
    kept = []
    for one in waiting:
        names = one.receivers
        if one.alert.id in alert_ids:
            names = tuple(other for other in names if other != name)
        if names:
            kept.append(Waiting(one.alert, names))
    return kept


def _decoded(value: bytes | None) -> tuple[Waiting, ...]:
    """Decode waiting alerts; none if another version has written them."""
    try:
        return msgspec.json.decode(value, type=tuple[Waiting, ...]) if value is not None else ()
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ()
