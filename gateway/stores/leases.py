"""Holds that are open in this worker: kept alive, noted how far they are, extended; and those that others left behind.

A worker that dies says nothing more of its holds. When their leases end, any worker that shares the store settles them
from what was noted last.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from gateway.core.errors import StoreDamaged, StoreUnavailable
from gateway.core.ledger import Refused
from gateway.core.ports import CallRecord, OpenHold, Store

logger = logging.getLogger("gateway")

#: between two notes of how far a stream is: what a crash may leave unknown
TICK_S: Final = 1.0
#: A lease is renewed when this share of it has passed, ...
_RENEW_AT: Final = 0.33
#: ... and looked for in the store, where its worker is gone, so often
_SWEEP_S: Final = 5.0
_SWEEP_MOST: Final = 100
#: A hold is extended when fewer tokens than this are left of it; a fast model gives some hundred tokens a second.
_SOON_USED: Final = 1_024


@dataclass(slots=True, eq=False)
class Lease:
    """One open hold.

    Attributes:
        tokens: of the answer, held so far.
        step: units by which it is extended as it is used up, see `Hold`; 0 where it is not.
        answers: asked for in one call: a unit is a token of each.
        delivered: tokens of the answer that have come.
        pending: makes the hold that is not taken yet, see `take`; None: it is taken.
        is_over: what has come is all that is held, and no more can be; the answer has to end.
    """

    id: str
    tokens: int
    step: int = 0
    answers: int = 1
    delivered: Callable[[], int] = field(default=lambda: 0)
    pending: Callable[[], OpenHold] | None = None
    is_over: bool = False
    #: bytes of the answer after which it was looked at last
    looked_at: int = 0
    renewed_at: float = 0.0
    noted: int = 0

    def end_at(self, delivered: int) -> None:
        """End the answer if that is all that is held."""
        self.is_over = delivered >= self.tokens


class Leases:
    """Keeps the holds of one worker alive.

    Args:
        store: where they are.
        settle: takes the records of calls whose worker is gone.
        lease_s: for how long a sign of life is enough.
        is_away: whether the store is known to be away.
        away: told when it is found to be.
        tick_s: between two notes of how far streams are.
        sweep_s: between two looks for holds that nobody keeps.
    """

    def __init__(
        self,
        store: Store,
        settle: Callable[[CallRecord], Awaitable[object]],
        *,
        lease_s: float,
        is_away: Callable[[], bool] = lambda: False,
        away: Callable[[StoreUnavailable], None] = lambda _: None,
        tick_s: float = TICK_S,
        sweep_s: float = _SWEEP_S,
    ) -> None:
        self._store = store
        self._settle = settle
        self._is_away = is_away
        self._away = away
        self.lease_s = lease_s
        self._tick_s = tick_s
        self._sweep_s = sweep_s
        self._open: dict[str, Lease] = {}
        #: holds of others that were settled, and may be there still: what the store refused once, it would again
        self._handed_on: set[str] = set()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def count(self) -> int:
        """Holds that are kept alive."""
        return len(self._open)

    def start(self) -> None:
        """Begin. Needs a running event loop."""
        self._tasks = [asyncio.create_task(self._keep()), asyncio.create_task(self._sweep())]

    def open(self, lease: Lease) -> Lease:
        """Keep a hold that was just taken."""
        lease.renewed_at = time.monotonic()
        self._open[lease.id] = lease
        return lease

    def close(self, hold_id: str) -> None:
        """It is being settled."""
        self._open.pop(hold_id, None)

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self._tick_s)
            await _survived(self.tick)

    async def tick(self) -> None:
        """Note how far streams are, renew what is due, extend what is nearly used up.

        Raises:
            StoreUnavailable: the store is away; what is used up has to end.
        """
        try:
            await self._renew()
            for lease in self._growing():
                await self._kept_up(lease)
        except StoreUnavailable:
            for lease in self._growing():
                lease.end_at(lease.delivered())
            raise

    async def _kept_up(self, lease: Lease) -> None:
        delivered = lease.delivered()
        try:
            await self._keep_up(lease, delivered)
        except StoreDamaged:
            # Of its accounts alone: the holds of others go on.
            lease.end_at(delivered)

    def _growing(self) -> list[Lease]:
        return [lease for lease in self._open.values() if lease.step]

    async def _renew(self) -> None:
        now = time.monotonic()
        for lease in [one for one in self._open.values() if one.pending and now - one.renewed_at >= self._tick_s]:
            if lease.id in self._open:
                with contextlib.suppress(StoreDamaged):
                    await self.take(lease)
        noted = {lease.id: tokens for lease in self._open.values() if (tokens := self._news(lease, now)) is not None}
        if noted:
            await self._store.renew(noted)
        for hold_id, tokens in noted.items():
            if hold_id in self._open:
                self._open[hold_id].noted, self._open[hold_id].renewed_at = tokens, now

    async def look(self, lease: Lease) -> None:
        """Extend a hold now, where what has come of the answer is about to use it up.

        While the store is away nothing can be held, and nobody waits for it: the answer ends where its hold does.
        """
        delivered = lease.delivered()
        if not self._is_away():
            try:
                await self._keep_up(lease, delivered)
            except StoreUnavailable as error:
                self._away(error)
            else:
                return
        lease.end_at(delivered)

    async def take(self, lease: Lease) -> bool:
        """Take the hold of a call that has lasted, or whose answer is about to be delivered; whether it is held.

        It is not where a budget was set meanwhile that has too little left.

        Raises:
            StoreUnavailable: nothing is held.
        """
        if lease.pending is not None:
            if isinstance(await self._store.reserve(lease.pending(), self.lease_s), Refused):
                return False
            lease.pending = None
        return True

    def _news(self, lease: Lease, now: float) -> int | None:
        if lease.pending is not None:
            return None
        delivered = lease.delivered()
        is_due = now - lease.renewed_at > self.lease_s * _RENEW_AT
        return delivered if delivered != lease.noted or is_due else None

    async def _keep_up(self, lease: Lease, delivered: int) -> None:
        """Hold a step more than has come, however much that was since the last look."""
        if lease.tokens - delivered >= _SOON_USED:
            return
        missing = delivered - lease.tokens
        asked = lease.step + max(0, math.ceil(missing / lease.answers))
        granted = await self._store.extend(lease.id, asked)
        if granted is not None:
            lease.tokens += granted.units * lease.answers
        lease.end_at(delivered)

    async def _sweep(self) -> None:
        while True:
            await _survived(self.sweep)
            await asyncio.sleep(self._sweep_s)

    async def sweep(self) -> None:
        """Settle the calls whose worker is gone.

        Raises:
            StoreUnavailable: the store is away.
        """
        # Ours may be among them, and all of ours are no reason not to see those of others.
        found = await self._store.overdue(_SWEEP_MOST + len(self._open) + len(self._handed_on))
        self._handed_on &= {opened.hold.id for opened in found}
        for opened in found:
            hold_id = opened.hold.id
            if hold_id in self._open or hold_id in self._handed_on:
                continue  # ours: a store that was away kept us from renewing it; or it cannot be settled
            logger.warning("call %s was left by its worker: charged for what is known of it", hold_id)
            await self._settle(opened.as_lost())
            self._handed_on.add(hold_id)

    async def aclose(self) -> None:
        """Stop; what is still open ends with its lease."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _survived(work: Callable[[], Awaitable[None]]) -> None:
    """Do it, and go on whatever comes of it: holds that nobody renews any more would end calls that are well.

    Where the store is away nothing can be noted; the leases are long enough to wait for it.
    """
    try:
        await work()
    except StoreUnavailable:
        pass
    except Exception:
        logger.exception("holds were not looked after this time")
