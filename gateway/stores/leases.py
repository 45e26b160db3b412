"""Renew and extend the holds of this worker, and settle calls whose worker is gone.

A worker that dies renews its holds no more. When their leases end, any worker that shares the store settles them by
what was noted last. While the store is away, that is noted in the journal of the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Final

from gateway.core.errors import StoreDamaged, StoreUnavailable
from gateway.core.ledger.arithmetic import NOTHING, Granted, Hold, Refused, units_left
from gateway.core.ports import Ledger, RecordRefused
from gateway.core.record import CallRecord
from gateway.core.stored import OpenHold

logger = logging.getLogger("gateway")

#: Seconds between two notes of how far a stream is, and tokens of a fast one: what came after the last one is not known
#: after a crash.
TICK_S: Final = 1.0
NOTE_TOKENS: Final = 256
#: bytes of an answer between two looks whether so many have come: as text without anything around it, they are no more
_NOTE_BYTES: Final = 1_024
#: a lease is renewed when this share of it has passed
_RENEW_AT: Final = 0.33
#: seconds between two looks for holds whose lease has ended, and how many of them one look settles
_SWEEP_S: Final = 5.0
_SWEEP_MOST: Final = 100
#: calls taken for lost that go on, and are settled at once
_AT_ONCE: Final = 64
#: A hold is extended when fewer tokens than this are left of it; a fast model gives some hundred tokens a second.
_SOON_USED: Final = 1_024


#: Bytes of a stream between two looks at what is left of its hold, at least and at most. The most are some hundred
#: tokens where each event carries one, and a few thousand where events are long.
LOOK_BYTES: Final = 2 * 1024
_MOST_LOOK_BYTES: Final = 16 * 1024


@dataclass(slots=True, eq=False)
class Lease:
    """One open hold.

    Attributes:
        lease_s: seconds that it lives on after it was renewed, in the store too; a reload changes that of later ones.
        tokens: how many of the answer are held so far.
        step: units (see `Hold`) by which it is extended when it is nearly used up; 0: it never is.
        most: tokens with which the answer has to end, although its hold is never extended; None: whatever comes.
        answers: how many the call asks for: a unit is one token of each.
        delivered: gives the tokens of the answer that have come.
        pending: gives the hold to take, while it is not taken yet (see `Leases.take`); None: it is taken.
        opened: the hold as it was or is to be taken, once it is known.
        taken: is told once that is done.
        is_over: all that is held has come, and no more can be held: the answer has to end.
        look_bytes: bytes of the answer until it is to be looked at again.
    """

    id: str
    lease_s: float
    tokens: int
    step: int = 0
    answers: int = 1
    most: int | None = None
    delivered: Callable[[], int] = field(default=lambda: 0)
    pending: Callable[[], OpenHold] | None = None
    opened: OpenHold | None = None
    taken: Callable[[Granted], None] = field(default=lambda _: None)
    is_over: bool = False
    look_bytes: int = LOOK_BYTES
    #: bytes of the answer that had come when it was looked at last
    looked_at: int = 0
    #: monotonic seconds, and tokens of the answer that the store knows of
    renewed_at: float = 0.0
    noted: int = 0
    #: the same that the journal knows of; None: it does not know the call
    journalled: int | None = None
    #: bytes of the answer that have come when it is to be looked at whether to note it
    note_at: int = _NOTE_BYTES

    @property
    def is_known(self) -> bool:
        """Whether the call is charged should this worker die."""
        return self.pending is None or self.journalled is not None

    @property
    def is_bounded(self) -> bool:
        """Return whether the answer has to end where more has come than its hold allows."""
        return self.step > 0 or self.most is not None

    @property
    def end(self) -> int:
        """Return the tokens with which the answer has to end if no more can be held."""
        return self.tokens if self.most is None else self.most

    def looked(self, come: int, delivered: int) -> None:
        """Set when to look next, by how dense the answer was so far: before half of what is left has come.

        Args:
            come: bytes of the answer.
            delivered: its tokens.
        """
        left = self.end - delivered
        self.looked_at = come
        self.look_bytes = min(_MOST_LOOK_BYTES, max(LOOK_BYTES, left * come // max(1, 2 * delivered)))

    def end_at(self, delivered: int) -> None:
        """End the answer if that is all that is held."""
        self.is_over = delivered >= self.tokens


class Leases:
    """Keeps the holds of one worker alive.

    Args:
        store: where they are.
        settle: takes the records of calls whose worker is gone.
        lease_s: of holds that are taken from now on, see `Lease`.
        is_unavailable: whether the store is known to be away.
        away: called with the error when the store is found to be away.
        note: writes down what is to be settled should this worker die, in the place of what it wrote last.
        tick_s: seconds between two notes of how far streams are.
        sweep_s: seconds between two looks for holds whose worker is gone.
    """

    def __init__(
        self,
        store: Ledger,
        settle: Callable[[CallRecord], Awaitable[object]],
        *,
        lease_s: float,
        is_unavailable: Callable[[], bool] = lambda: False,
        away: Callable[[StoreUnavailable], None] = lambda _: None,
        note: Callable[[Sequence[CallRecord]], Awaitable[None]] | None = None,
        tick_s: float = TICK_S,
        sweep_s: float = _SWEEP_S,
    ) -> None:
        self._store = store
        self._settle = settle
        self._is_unavailable = is_unavailable
        self._away = away
        self._note = note
        #: notes are written one after the other, and each holds all that had come when it was begun
        self._noting = asyncio.Lock()
        self._notes_asked = self._notes_written = 0
        self._has_notes = False
        self.lease_s = lease_s
        self._tick_s = tick_s
        self._sweep_s = sweep_s
        self._open: dict[str, Lease] = {}
        #: ids of left holds that were handed to `settle`: one that is still there was refused, and would be again
        self._handed_on: set[str] = set()
        #: whether the last look for left holds found the store there
        self._was_there = True
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def count(self) -> int:
        """Holds that are kept alive."""
        return len(self._open)

    def start(self) -> None:
        """Begin. Needs a running event loop."""
        self._tasks = [asyncio.create_task(self._keep()), asyncio.create_task(self._sweep())]

    def open(self, lease: Lease) -> Lease:
        """Keep a hold that was just taken, or is to be."""
        lease.renewed_at = time.monotonic()
        self._open[lease.id] = lease
        return lease

    def close(self, hold_id: str) -> None:
        """Keep a hold no longer: its call is being settled."""
        self._open.pop(hold_id, None)

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self._tick_s)
            await _survived(self.tick)

    async def tick(self) -> None:
        """Note how far streams are, renew what is due, extend what is nearly used up.

        While the store is away, what it would be told is journalled.

        Raises:
            StoreUnavailable: the store is away; answers whose hold is used up were ended.
        """
        if self._is_unavailable():
            await self._without_store()
            return
        try:
            await self._renew()
            for lease in self._growing():
                await self._keep_up_or_end(lease)
        except StoreUnavailable as error:
            self._away(error)
            await self._without_store()
            raise
        if self._has_notes:
            # The store knows it all now, but for what it could not take.
            await self._journal()

    async def _without_store(self) -> None:
        for lease in self._growing():
            lease.end_at(lease.delivered())
        await self._journal()

    async def _keep_up_or_end(self, lease: Lease) -> None:
        delivered = lease.delivered()
        try:
            await self._keep_up(lease, delivered)
        except StoreDamaged:
            # Only an account of this hold is damaged: all others go on.
            lease.end_at(delivered)

    def _growing(self) -> list[Lease]:
        return [lease for lease in self._open.values() if lease.step]

    async def _renew(self) -> None:
        now = time.monotonic()
        for lease in [one for one in self._open.values() if one.pending and now - one.renewed_at >= self._tick_s]:
            # Calls that are taken while the store is away have to wait for it.
            if lease.id in self._open and not self._is_unavailable():
                with contextlib.suppress(StoreDamaged):
                    await self.take(lease)
        noted = {lease.id: tokens for lease in self._open.values() if (tokens := self._news(lease, now)) is not None}
        if noted:
            await self._tell(noted)

    async def _tell(self, noted: Mapping[str, int]) -> None:
        """Tell the store how far streams are. Calls that it has no hold of are charged for what has come, at once.

        They were taken for lost, as this worker could not renew their leases in time, or their hold was refused: should
        it die, nobody would find them. When they end, their own record takes the place of this one.
        """
        now = time.monotonic()
        untold = await self._store.renew(noted)
        gone = iter(untold)
        while some := [*islice(gone, _AT_ONCE)]:
            leases = {one: self._open[one] for one in some if one in self._open}
            settled = await asyncio.gather(*(self._settled(lease, noted[one]) for one, lease in leases.items()))
            untold -= {one for one, is_settled in zip(leases, settled, strict=True) if is_settled}
        for hold_id, tokens in noted.items():
            lease = self._open.get(hold_id)
            if lease is not None and hold_id not in untold:
                lease.noted, lease.renewed_at = tokens, now

    async def _settled(self, lease: Lease, delivered: int) -> bool:
        """Settle a call that goes on, for what has come of it; whether the store can take that."""
        record = _orphaned(lease, delivered)
        try:
            if record is not None:
                await self._store.settle(record)
        except (StoreDamaged, RecordRefused):
            # The log names it when the call has ended. Until then it is in the journal.
            self._has_notes = True
            return False
        return True

    async def look(self, lease: Lease) -> None:
        """Extend a hold now, where what has come of the answer is about to use it up.

        While the store is away nothing can be held, and nobody waits for it: the answer ends where its hold does.
        """
        delivered = lease.delivered()
        if lease.most is not None:
            lease.is_over = delivered > lease.most
            return
        if not self._is_unavailable():
            try:
                await self._keep_up(lease, delivered)
            except StoreUnavailable as error:
                self._away(error)
            else:
                return
        lease.end_at(delivered)

    async def take(self, lease: Lease) -> bool:
        """Take a hold that was put off, as its call has lasted or its answer is about to come; whether it is held.

        It is not held where a budget was set meanwhile that has too little left.

        Raises:
            StoreUnavailable: nothing is held.
        """
        if lease.pending is not None:
            lease.opened = lease.pending()
            outcome = await self._store.reserve(lease.opened, lease.lease_s)
            if isinstance(outcome, Refused):
                return False
            lease.pending = None
            lease.taken(outcome)
        return True

    async def note(self, lease: Lease, come: int) -> None:
        """Before a part of an answer goes out: note what has come, where that is the first of it, or much.

        `come`: its bytes, with this part.
        """
        lease.note_at = come + _NOTE_BYTES
        delivered = lease.delivered()
        if lease.is_known and delivered - max(lease.noted, lease.journalled or 0) < NOTE_TOKENS:
            return
        if lease.pending is None and not self._is_unavailable():
            try:
                await self._tell({lease.id: delivered})
            except StoreUnavailable as error:
                self._away(error)
        if self._is_unavailable():
            await self._journal()

    async def _journal(self) -> None:
        """Note in the journal what the store does not know. Those who ask meanwhile share the next note."""
        if self._note is None:
            return
        self._notes_asked += 1
        asked = self._notes_asked
        async with self._noting:
            if self._notes_written >= asked:
                return
            upto, now = self._notes_asked, time.monotonic()
            come = {lease: lease.delivered() for lease in self._open.values() if self._is_news(lease, now)}
            await self._note([record for lease in come if (record := _orphaned(lease, come[lease])) is not None])
            for lease in self._open.values():
                lease.journalled = come.get(lease)
            self._notes_written, self._has_notes = upto, bool(come)

    def _is_news(self, lease: Lease, now: float) -> bool:
        """Whether the store does not know of a call what it is to be charged. One that has just begun may end soon."""
        delivered = lease.delivered()
        if lease.pending is None:
            return delivered != lease.noted
        return delivered > 0 or lease.is_known or now - lease.renewed_at >= self._tick_s

    def _news(self, lease: Lease, now: float) -> int | None:
        """The tokens to note of a hold; None where none have come since and its lease is not due."""
        if lease.pending is not None:
            return None
        delivered = lease.delivered()
        is_due = now - lease.renewed_at > lease.lease_s * _RENEW_AT
        return delivered if delivered != lease.noted or is_due else None

    async def _keep_up(self, lease: Lease, delivered: int) -> None:
        """Where little is left of a hold, extend it to a step beyond what has come, however much that is."""
        if lease.tokens - delivered >= _SOON_USED:
            return
        missing = delivered - lease.tokens
        asked = lease.step + max(0, math.ceil(missing / lease.answers))
        granted = await self._store.extend(lease.id, asked)
        if granted is not None:
            lease.tokens += granted.units * lease.answers
        elif lease.opened is not None:
            # Taken for lost: it may go on as far as its budgets have room, of which nothing can be held any more.
            lease.tokens = max(lease.tokens, lease.noted + await self._room(lease.opened.hold, asked) * lease.answers)
        lease.end_at(delivered)

    async def _room(self, hold: Hold, units: int) -> int:
        """How many of these units its accounts have left beside what they were charged for."""
        for balance in await self._store.balances(hold.claims):
            units = units_left(balance, NOTHING, hold.unit, units)
        return units

    async def _sweep(self) -> None:
        while True:
            await _survived(self.sweep)
            await asyncio.sleep(self._sweep_s)

    async def sweep(self) -> None:
        """Settle the calls whose worker is gone; not in the first look at a store that was away.

        Others, too, could not renew their leases meanwhile, and are left the time until the next one.

        Raises:
            StoreUnavailable: the store is away.
        """
        was_there, self._was_there = self._was_there, False
        # Our own may be among those found: so many more are asked for that they keep no others out.
        found = await self._store.overdue(_SWEEP_MOST + len(self._open) + len(self._handed_on))
        self._was_there = True
        if not was_there:
            return
        self._handed_on &= {opened.hold.id for opened in found}
        for opened in found:
            hold_id = opened.hold.id
            if hold_id in self._open or hold_id in self._handed_on:
                continue  # ours, which could not be renewed while the store was away; or handed on already
            logger.warning("call %s was left by its worker: charged for what is known of it", hold_id)
            await self._settle(opened.as_orphaned())
            self._handed_on.add(hold_id)

    async def aclose(self) -> None:
        """Stop; what is still open ends with its lease."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._has_notes:
            await self._journal()


def _orphaned(lease: Lease, delivered: int) -> CallRecord | None:
    """What is to be settled should this worker die when so much has been delivered."""
    if lease.opened is None and lease.pending is not None:
        lease.opened = lease.pending()
    return replace(lease.opened, noted=delivered).as_orphaned() if lease.opened is not None else None


async def _survived(work: Callable[[], Awaitable[None]]) -> None:
    """Run `work`, and log what it raises: a task that ended here would let the leases of calls end that are well.

    Where the store is away nothing can be noted; the leases are long enough to wait for it.
    """
    try:
        await work()
    except StoreUnavailable:
        pass
    except Exception:
        logger.exception("holds were not looked after this time")
