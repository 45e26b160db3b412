"""Renew and extend the holds of this worker, and settle calls whose worker has ended.

A worker that dies stops renewing its holds. When their leases end, any worker that shares the store settles these
calls by the tokens that were saved last. While the store is unavailable, a worker saves them in its journal.
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
from gateway.core.ledger.output_limit import STREAM_STEP
from gateway.core.ports import Ledger, RecordRefused
from gateway.core.record import CallRecord
from gateway.core.stored import OpenHold
from gateway.stores.availability import Availability

logger = logging.getLogger("gateway")

#: Seconds, and tokens of a fast stream, after which its progress is saved. A crash loses output after the last save.
TICK_S: Final = 1.0
SAVE_TOKENS: Final = 256
#: Bytes of a response between two checks for `SAVE_TOKENS`: even as plain text, these are no more than so many tokens.
_NOTE_BYTES: Final = 1_024
#: The densest text that is estimated has a token in each character of three bytes.
_LEAST_TOKEN_BYTES: Final = 3
#: share of a lease after which it is renewed
_RENEW_AT: Final = 0.33
#: seconds between two searches for holds whose lease has ended, and holds that one search settles
_SWEEP_S: Final = 5.0
_SWEEP_MOST: Final = 100
#: orphaned calls that still run and are settled in parallel
_AT_ONCE: Final = 64
#: A hold is extended when less than this part of its next extension is left: 1,024 tokens of the usual 2,048. A fast
#: model produces a few hundred tokens per second.
_SOON_USED: Final = 2

#: Least and most bytes of a stream between two checks of its hold. The most are a few hundred tokens with one token per
#: event, and a few thousand tokens with long events. A hold of fewer tokens is checked after as many bytes.
CHECK_BYTES: Final = 2 * 1024
_FEWEST_LOOK_BYTES: Final = 256
#: With fewer tokens, the bytes per token say nothing of what follows.
_FEW_TOKENS: Final = 16
_MOST_LOOK_BYTES: Final = 16 * 1024


@dataclass(slots=True)
class SavedProgress:
    """What the store and the journal know of a running call.

    Attributes:
        renewed_at: monotonic seconds of the last renewal of its lease.
        tokens: output tokens that the store knows.
        journaled: output tokens that the journal knows; None: the call is not in the journal.
        next_at: bytes of the response at which to check whether its tokens have to be saved.
    """

    renewed_at: float = 0.0
    tokens: int = 0
    journaled: int | None = None
    next_at: int = _NOTE_BYTES


@dataclass(slots=True, eq=False)
class Lease:
    """The lease of one open hold.

    Attributes:
        lease_s: seconds from a renewal to the end of the lease, also in the store. A reload changes only later leases.
        tokens: output tokens that are held so far.
        step: units (see `Hold`) by which the hold is extended when it is nearly used up; 0: never. A small step doubles
            with each extension, so that a long stream does not ask the store too often.
        end_tokens: output tokens at which the response has to end, for a hold that is never extended; None: no end.
        responses: responses that the call asks for. A unit is one token of each.
        delivered: returns the output tokens received so far.
        pending: returns the hold to take, while it is not taken yet (see `Leases.take`); None: it is taken.
        opened: the hold as it was or will be taken, once known.
        on_taken: called with the grant when a pending hold was taken.
        is_over: the hold is used up and cannot be extended, so the response has to end.
        check_bytes: bytes of the response until the hold is checked again.
        saved: what the store and the journal know of the call.
    """

    id: str
    lease_s: float
    tokens: int
    step: int = 0
    responses: int = 1
    end_tokens: int | None = None
    delivered: Callable[[], int] = field(default=lambda: 0)
    pending: Callable[[], OpenHold] | None = None
    opened: OpenHold | None = None
    on_taken: Callable[[Granted], None] = field(default=lambda _: None)
    is_over: bool = False
    check_bytes: int = CHECK_BYTES
    #: bytes of the response at the last check of the hold
    checked_at: int = 0
    saved: SavedProgress = field(default_factory=SavedProgress)
    #: bytes of the response up to which nothing has to be saved or checked; 0: it must be asked before each part
    free_until: int = 0

    @property
    def is_known(self) -> bool:
        """Return True if the call is charged even when this worker dies."""
        return self.pending is None or self.saved.journaled is not None

    @property
    def is_bounded(self) -> bool:
        """Return True if the response has to end when it exceeds its hold."""
        return self.step > 0 or self.end_tokens is not None

    @property
    def end(self) -> int:
        """Return the output tokens at which the response has to end if the hold is not extended."""
        return self.tokens if self.end_tokens is None else self.end_tokens

    def schedule_check(self, come: int, delivered: int) -> None:
        """Set when to check the hold next: before half of the remaining tokens come, at the bytes per token so far.

        Args:
            come: bytes of the response.
            delivered: its tokens.
        """
        left = self.end - delivered
        self.checked_at = come
        if self.step and delivered < _FEW_TOKENS:
            # The bytes per token are unknown: the first events have no text, and later ones may have much.
            self.check_bytes = self.least_check_bytes
            return
        self.check_bytes = min(_MOST_LOOK_BYTES, max(self.least_check_bytes, left * come // max(1, 2 * delivered)))

    @property
    def least_check_bytes(self) -> int:
        """Return the fewest bytes between two checks: a token has at least one byte."""
        return min(CHECK_BYTES, max(_FEWEST_LOOK_BYTES, self.tokens)) if self.step else CHECK_BYTES

    def unsaved(self, delivered: int) -> int:
        """Return the delivered tokens that would not be charged if this worker died."""
        return delivered - max(self.saved.tokens, self.saved.journaled or 0)

    def free_up(self, come: int, size: int = 0) -> None:
        """Set `free_until`.

        Args:
            come: bytes of the response, including a part that has arrived and was not read yet.
            size: bytes of that part.
        """
        self.free_until = 0
        if self.is_over or not self.is_known:
            return
        if come >= self.saved.next_at:
            if self.unsaved(self.delivered()) + size // _LEAST_TOKEN_BYTES >= SAVE_TOKENS:
                return
            self.saved.next_at = come + _NOTE_BYTES
        next_at = self.saved.next_at
        self.free_until = min(next_at, self.checked_at + self.check_bytes) if self.is_bounded else next_at

    def end_at(self, delivered: int) -> None:
        """Mark the response as over if it has used up its hold."""
        self.is_over = delivered >= self.tokens
        if self.is_over:
            self.free_until = 0


class Leases:
    """Keeps the holds of one worker alive.

    Args:
        store: keeps the holds. It raises at once while it is unavailable, see `FallbackStore`.
        settle: settles the records of calls whose worker has ended.
        lease_s: see `Lease`; of holds that are taken from now on.
        availability: whether the store is unavailable.
        save_progress: writes the records to settle if this worker dies. They replace those that it wrote last.
        tick_s: seconds between two saves of the progress of streams.
        sweep_s: seconds between two searches for holds of ended workers.
    """

    def __init__(
        self,
        store: Ledger,
        settle: Callable[[CallRecord], Awaitable[object]],
        *,
        lease_s: float,
        availability: Availability | None = None,
        note: Callable[[Sequence[CallRecord]], Awaitable[None]] | None = None,
        tick_s: float = TICK_S,
        sweep_s: float = _SWEEP_S,
    ) -> None:
        self._store = store
        self._settle = settle
        self._availability = availability if availability is not None else Availability()
        self._note = note
        #: Notes are written one after the other. Each contains the progress of all calls at the start of its write.
        self._noting = asyncio.Lock()
        self._notes_asked = self._notes_written = 0
        self._has_notes = False
        self.lease_s = lease_s
        self._tick_s = tick_s
        self._sweep_s = sweep_s
        self._open: dict[str, Lease] = {}
        #: Ids of overdue holds that were passed to `settle`. If such a hold still exists, its record was refused, and
        #: would be refused again.
        self._passed_on: set[str] = set()
        #: the last search for overdue holds could use the store
        self._was_available = True
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def count(self) -> int:
        """Return the number of holds that are kept alive."""
        return len(self._open)

    def start(self) -> None:
        """Start the background tasks. Needs a running event loop."""
        self._tasks = [asyncio.create_task(self._tick_regularly()), asyncio.create_task(self._sweep_regularly())]

    def open(self, lease: Lease) -> Lease:
        """Keep a hold alive that was just taken, or will be, and return its lease."""
        lease.saved.renewed_at = time.monotonic()
        self._open[lease.id] = lease
        return lease

    def close(self, hold_id: str) -> None:
        """Stop keeping a hold alive, as its call is being settled."""
        self._open.pop(hold_id, None)

    async def _tick_regularly(self) -> None:
        while True:
            await asyncio.sleep(self._tick_s)
            await _run_logged(self.tick)

    async def tick(self) -> None:
        """Save the progress of streams, renew leases that are due, and extend holds that are nearly used up.

        While the store is unavailable, progress is saved in the journal.

        Raises:
            StoreUnavailable: the store is unavailable; responses whose hold is used up were ended.
        """
        if self._availability.is_unavailable:
            await self._without_store()
            return
        try:
            await self._renew()
            for lease in self._extendable():
                await self._extend_or_end(lease)
        except StoreUnavailable:
            await self._without_store()
            raise
        if self._has_notes:
            # The store knows all calls again, except those that it refused, so the journal can drop the others.
            await self._journal()

    async def _without_store(self) -> None:
        for lease in self._extendable():
            lease.end_at(lease.delivered())
        await self._journal()

    async def _extend_or_end(self, lease: Lease) -> None:
        delivered = lease.delivered()
        try:
            await self._extend(lease, delivered)
        except StoreDamaged:
            # Only an account of this hold is damaged. All other holds continue.
            lease.end_at(delivered)

    def _extendable(self) -> list[Lease]:
        return [lease for lease in self._open.values() if lease.step]

    async def _renew(self) -> None:
        now = time.monotonic()
        for lease in [one for one in self._open.values() if one.pending and now - one.saved.renewed_at >= self._tick_s]:
            # The holds of calls that were accepted during an outage are taken as soon as the store is available.
            if lease.id in self._open and not self._availability.is_unavailable:
                with contextlib.suppress(StoreDamaged):
                    await self.take(lease)
        noted = {
            lease.id: tokens
            for lease in self._open.values()
            if (tokens := self._tokens_to_save(lease, now)) is not None
        }
        if noted:
            await self._save_progress(noted)

    async def _save_progress(self, noted: Mapping[str, int]) -> None:
        """Renew these holds in the store, with the tokens delivered so far.

        Calls without a hold in the store are charged at once for the tokens so far, as no worker would find them if
        this one died. There are two reasons: they were treated as orphaned because their leases were not renewed in
        time, or their hold was refused. When they end, their own record replaces this one.
        """
        now = time.monotonic()
        unsaved = await self._store.renew(noted)
        without_hold = iter(unsaved)
        while hold_ids := [*islice(without_hold, _AT_ONCE)]:
            leases = {one: self._open[one] for one in hold_ids if one in self._open}
            charging = [self._charge_so_far(lease, noted[one]) for one, lease in leases.items()]
            unsaved -= {
                one for one, is_charged in zip(leases, await asyncio.gather(*charging), strict=True) if is_charged
            }
        for hold_id, tokens in noted.items():
            lease = self._open.get(hold_id)
            if lease is not None and hold_id not in unsaved:
                lease.saved.tokens, lease.saved.renewed_at = tokens, now

    async def _charge_so_far(self, lease: Lease, delivered: int) -> bool:
        """Charge a running call for its tokens so far; return False if the store refuses that."""
        record = _orphaned(lease, delivered)
        try:
            if record is not None:
                await self._store.settle(record)
        except (StoreDamaged, RecordRefused):
            # The call is kept in the journal until it ends. Then its own record is refused, which is logged.
            self._has_notes = True
            return False
        return True

    async def check(self, lease: Lease) -> None:
        """Extend a hold now if the response is about to use it up.

        While the store is unavailable, no hold can be extended, so the response ends where its hold ends.
        """
        delivered = lease.delivered()
        if lease.end_tokens is not None:
            lease.is_over = delivered > lease.end_tokens
            return
        try:
            await self._extend(lease, delivered)
        except StoreUnavailable:
            lease.end_at(delivered)

    async def take(self, lease: Lease) -> bool:
        """Take a pending hold; return False if it is refused.

        Holds of calls without limits are put off, as most of these calls end soon: they are taken when a call lasts, or
        when a part of its response is about to be sent. So are holds of calls that began during an outage. A hold is
        refused if a budget with too little left was set meanwhile.

        Raises:
            StoreUnavailable: nothing is held.
        """
        if lease.pending is not None:
            lease.opened = lease.pending()
            outcome = await self._store.reserve(lease.opened, lease.lease_s)
            if isinstance(outcome, Refused):
                return False
            lease.pending = None
            lease.on_taken(outcome)
        return True

    async def save_progress(self, lease: Lease, come: int) -> None:
        """Save the tokens of a response before a part is sent, if it is the first part or many tokens are unsaved.

        `come`: bytes of the response, including this part.
        """
        lease.saved.next_at = come + _NOTE_BYTES
        delivered = lease.delivered()
        if lease.is_known and lease.unsaved(delivered) < SAVE_TOKENS:
            return
        if lease.pending is None:
            with contextlib.suppress(StoreUnavailable):
                await self._save_progress({lease.id: delivered})
        if self._availability.is_unavailable:
            await self._journal()

    async def _journal(self) -> None:
        """Write to the journal what the store does not know. Callers that ask during a write share the next one."""
        if self._note is None:
            return
        self._notes_asked += 1
        asked = self._notes_asked
        async with self._noting:
            if self._notes_written >= asked:
                return
            asked, now = self._notes_asked, time.monotonic()
            tokens = {lease: lease.delivered() for lease in self._open.values() if self._is_unsaved(lease, now)}
            await self._note([record for lease in tokens if (record := _orphaned(lease, tokens[lease])) is not None])
            for lease in self._open.values():
                lease.saved.journaled = tokens.get(lease)
            self._notes_written, self._has_notes = asked, bool(tokens)

    def _is_unsaved(self, lease: Lease, now: float) -> bool:
        """Return True if the store does not know the tokens of a call. A call that has just begun may end soon."""
        delivered = lease.delivered()
        if lease.pending is None:
            return delivered != lease.saved.tokens
        return delivered > 0 or lease.is_known or now - lease.saved.renewed_at >= self._tick_s

    def _tokens_to_save(self, lease: Lease, now: float) -> int | None:
        """Return the tokens to save for a hold; None if there are no new ones and its lease is not due."""
        if lease.pending is not None:
            return None
        delivered = lease.delivered()
        is_due = now - lease.saved.renewed_at > lease.lease_s * _RENEW_AT
        return delivered if delivered != lease.saved.tokens or is_due else None

    async def _extend(self, lease: Lease, delivered: int) -> None:
        """Extend a hold of which little is left, to one step beyond the tokens delivered so far."""
        if lease.tokens - delivered >= lease.step // _SOON_USED:
            return
        missing = delivered - lease.tokens
        asked = lease.step + max(0, math.ceil(missing / lease.responses))
        granted = await self._store.extend(lease.id, asked)
        if granted is not None:
            lease.tokens += granted.units * lease.responses
            lease.step = min(STREAM_STEP, 2 * lease.step)
        elif lease.opened is not None:
            # The call was charged as orphaned and cannot get a hold again. It may use what its budgets have left.
            lease.tokens = max(
                lease.tokens, lease.saved.tokens + await self._room(lease.opened.hold, asked) * lease.responses
            )
        lease.end_at(delivered)

    async def _room(self, hold: Hold, units: int) -> int:
        """Return how many of these units fit into what the accounts of a hold have left."""
        for balance in await self._store.balances(hold.claims):
            units = units_left(balance, NOTHING, hold.unit, units)
        return units

    async def _sweep_regularly(self) -> None:
        while True:
            await _run_logged(self.sweep)
            await asyncio.sleep(self._sweep_s)

    async def sweep(self) -> None:
        """Settle the calls of ended workers. The first search after an outage of the store settles none.

        Other workers could not renew their leases during the outage either, and get the time until the next search.

        Raises:
            StoreUnavailable: the store is unavailable.
        """
        was_available, self._was_available = self._was_available, False
        # Holds of this worker may be among them. Ask for as many more, so that these do not hide others.
        overdue = await self._store.overdue_holds(_SWEEP_MOST + len(self._open) + len(self._passed_on))
        self._was_available = True
        if not was_available:
            return
        self._passed_on &= {opened.hold.id for opened in overdue}
        for opened in overdue:
            hold_id = opened.hold.id
            if hold_id in self._open or hold_id in self._passed_on:
                continue  # of this worker, not renewed during an outage; or passed to `settle` already
            logger.warning("call %s lost its worker: charged for the tokens saved so far", hold_id)
            await self._settle(opened.as_orphaned())
            self._passed_on.add(hold_id)

    async def aclose(self) -> None:
        """Stop the background tasks; open holds end with their leases."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._has_notes:
            await self._journal()


def _orphaned(lease: Lease, delivered: int) -> CallRecord | None:
    """Return the record to settle if this worker dies after `delivered` tokens; None if the hold is not known."""
    if lease.opened is None and lease.pending is not None:
        lease.opened = lease.pending()
    return replace(lease.opened, noted=delivered).as_orphaned() if lease.opened is not None else None


async def _run_logged(work: Callable[[], Awaitable[None]]) -> None:
    """Run `work`, and log its errors: if the background task ended, the leases of running calls would end as well.

    While the store is unavailable nothing can be saved; leases last long enough to wait for it.
    """
    try:
        await work()
    except StoreUnavailable:
        pass
    except Exception:
        logger.exception("holds were not renewed or swept this time")
