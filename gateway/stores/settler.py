"""Settle calls without losing one: what the store does not take is journaled and offered again."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

from gateway.core.errors import StoreConflict, StoreDamaged, StoreUnavailable
from gateway.core.ledger.arithmetic import Claim
from gateway.core.ports import RecordRefused, Store
from gateway.core.record import CallRecord
from gateway.core.stored import CallClosing, Ending
from gateway.core.usage import Totals
from gateway.stores.journal import REMEDY, Journal, Left

T = TypeVar("T")

logger = logging.getLogger("gateway")

#: see `most_waiting` of `Settler`
_MAX_WAITING: Final = 10_000
#: seconds between two offers of what waits
_RETRY_S: Final = 0.5
#: Records that are offered at once. One by one a store that is far away takes them more slowly than calls end while it
#: is away and calls are taken, and would never be back.
_AT_ONCE: Final = 64
#: seconds between two looks for what other workers left
_LOOK_S: Final = 10.0
#: messages about damage that are remembered, so that each is logged once
_MOST_DAMAGES: Final = 1_000


class Settler:
    """Writes call records. Settling is idempotent by `call_id`, so offering one again is safe.

    It also knows whether the store is away: from the first time that it could not be used, until it can again.

    Args:
        store: where records belong.
        journal: where they wait for the store; None: in memory only, and they are gone with the process.
        is_open: whether calls are taken while the store is away.
        most_waiting: records that wait in memory; further ones wait in the journal alone, and without one are lost.
    """

    def __init__(
        self,
        store: Store,
        journal: Journal | None = None,
        *,
        is_open: bool = False,
        most_waiting: int = _MAX_WAITING,
    ) -> None:
        self.is_open = is_open
        self._most_waiting = most_waiting
        #: called when the store is back
        self.on_return: Callable[[], None] = lambda: None
        self._store = store
        self._journal = journal
        self._waiting: deque[CallRecord] = deque()
        #: ids of those among them that are not in the journal
        self._unwritten: set[str] = set()
        self._is_unavailable = False
        #: how often the store could not be used
        self.failures = 0
        #: The store is away, and has taken some of what waits. What is settled from now on goes straight to it: there
        #: would always be something that waits, where calls are taken all the while.
        self._is_returning = False
        #: whether the journal has records that do not wait in memory
        self._overflowed = False
        #: how many records are on their way into the journal
        self._writing = 0
        self._retry: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None
        #: writes to the disk, which go on though whoever waits for them is cancelled
        self._unfinished: set[asyncio.Task[Any]] = set()
        #: what the log has named already
        self._damages: set[str] = set()
        self._unreadable: set[Path] = set()
        #: whether the last notes are on the disk, or there was no need of any
        self._can_note = True

    def start(self) -> None:
        """Look for journals of workers that are gone, now and again, from now on.

        Says so if none can be written, or if some wait where nobody may look for them.
        """
        if self._journal is not None:
            for warning in (self._journal.obstacle(), self._journal.elsewhere()):
                if warning is not None:
                    logger.warning(warning)
            self._looking = asyncio.create_task(self._look())

    @property
    def is_unavailable(self) -> bool:
        """Whether the store cannot be used."""
        return self._is_unavailable

    @property
    def waiting(self) -> int:
        """How many settled calls of this worker wait for the store in memory."""
        return len(self._waiting)

    def check(self) -> None:
        """Refuse a new call while the store is away, at once, unless calls are taken nevertheless.

        Raises:
            StoreUnavailable: the store is away.
        """
        if self._is_unavailable and not self.is_open:
            raise StoreUnavailable(
                f"The store is away. Settled calls that wait for it: {len(self._waiting)}. Try again shortly."
            )

    def away(self, error: StoreUnavailable) -> None:
        """Take note that the store could not be used: until it can again, no call waits for it.

        Damage in one place is only logged: for all other calls the store is there.
        """
        self.failures += 1
        if isinstance(error, StoreDamaged):
            self._name_damage(error)
            return
        if not self._is_unavailable:
            logger.error("store away, %s: %s", self._consequence, error.message)
            self._is_unavailable = True
        self._is_returning = False
        self._begin_offering()

    def _name_damage(self, error: StoreDamaged) -> None:
        if error.message not in self._damages:
            if len(self._damages) == _MOST_DAMAGES:
                self._damages.clear()
            self._damages.add(error.message)
            logger.error("store damaged, calls are refused: %s", error.message)

    def _begin_offering(self) -> None:
        if self._retry is None or self._retry.done():
            self._retry = asyncio.get_running_loop().create_task(self._offer_again())

    @property
    def _consequence(self) -> str:
        return "calls go on and are journalled" if self.is_open else "calls are refused"

    async def settle(self, record: CallRecord) -> Totals | None:
        """Write one record; the session's totals after it, or None while the store is away, or cannot take it."""
        closing = await self.close(record, ())
        return closing.totals if closing is not None else None

    async def close(self, record: CallRecord, claims: Sequence[Claim]) -> CallClosing | None:
        """The same, and how these accounts stand after it."""
        if self._is_unavailable and not self._is_returning:
            await self._keep(record)
            return None
        try:
            settled = record if record.lesson is None else await self._taught(record)
            if not claims:
                return CallClosing(await self._store.settle(settled))
            return await self._store.closing(settled, None, claims)
        except asyncio.CancelledError:
            # Whether it was written is not known; offered again, it counts once.
            await self._keep(record)
            raise
        except RecordRefused as error:
            await self._surely(self._set_aside(record, error))
            return None
        except StoreUnavailable as error:
            self.away(error)
            await self._keep(record)
            return None

    async def close_with(self, record: CallRecord, ending: Ending, claims: Sequence[Claim]) -> CallClosing:
        """Write one record, and with it what its call makes of its session's state; see `close`.

        No record waits for the store with its ending: nobody knows now what state its session will be in by then.

        Raises:
            StoreUnavailable: nothing is settled or journalled. `close` has to be called, without the ending.
        """
        try:
            settled = record if record.lesson is None else await self._taught(record)
            return await self._store.closing(settled, ending, claims)
        except asyncio.CancelledError:
            await self._keep(record)
            raise
        except (StoreConflict, RecordRefused):
            raise
        except StoreUnavailable as error:
            self.away(error)
            raise

    async def _taught(self, record: CallRecord) -> CallRecord:
        """The record as a store gets it, once its lesson is learned. Offered again, that changes nothing."""
        if record.lesson is None:
            return record
        key, value = record.lesson
        call_id, told = record.call_id.encode(), value.encode()
        await self._store.learn({key: lambda known: known if known is not None and call_id in known else told})
        return replace(record, lesson=None)

    async def _settle(self, record: CallRecord) -> None:
        """Have the store take a record that waited."""
        await self._store.settle(await self._taught(record))

    async def _surely(self, work: Coroutine[Any, Any, T]) -> T:
        """Do it to its end, also where whoever waits for it is cancelled."""
        task = asyncio.get_running_loop().create_task(work)
        self._unfinished.add(task)
        task.add_done_callback(self._unfinished.discard)
        return await asyncio.shield(task)

    async def _keep(self, record: CallRecord) -> None:
        """Write the record into the journal, and let it wait in memory to be offered again. No cancel ends that."""
        is_at_hand = len(self._waiting) < self._most_waiting
        if is_at_hand:
            self._waiting.append(record)
        self._writing += 1
        self._begin_offering()
        await self._surely(self._kept(record, is_at_hand=is_at_hand))

    async def _kept(self, record: CallRecord, *, is_at_hand: bool) -> None:
        try:
            is_written = await self._journalled(record)
            # Before `_writing` falls: a file that alone holds this record must not be deleted by `_all_settled`.
            if is_at_hand:
                if not is_written:
                    self._unwritten.add(record.call_id)
            elif is_written:
                self._overflowed = True
            else:
                logger.error(
                    "settlement of call %s is lost: %d are waiting already", record.call_id, self._most_waiting
                )
        finally:
            self._writing -= 1

    async def _journalled(self, record: CallRecord) -> bool:
        if self._journal is None:
            return False
        try:
            await asyncio.to_thread(self._journal.append, record)
        except Exception as error:  # noqa: BLE001  # of the disk, or of encoding
            if record.call_id not in self._unwritten:
                logger.error("call %s cannot be journalled and waits in memory: %s", record.call_id, error)  # noqa: TRY400
            return False
        return True

    async def note(self, records: Sequence[CallRecord]) -> None:
        """Write down what is to be settled of calls under way should this worker die, in the place of the last notes.

        Nobody but who finds the journal of a worker that is gone ever reads them. Where they cannot be written, calls
        go on all the same: the log says so once.
        """
        if self._journal is None:
            return
        try:
            await self._surely(asyncio.to_thread(self._journal.note, records))
        except Exception as error:  # noqa: BLE001  # of the disk, or of encoding
            if self._can_note:
                logger.error("what has come of calls under way cannot be journalled: %s", error)  # noqa: TRY400
            self._can_note = False
        else:
            self._can_note = True

    async def _write_down(self) -> None:
        """Try again to journal what could not be: the disk may have room again before the store is back."""
        for record in [one for one in self._waiting if one.call_id in self._unwritten]:
            if not await self._surely(self._journalled(record)):
                return
            self._unwritten.discard(record.call_id)

    async def _set_aside(self, record: CallRecord, refused: RecordRefused) -> bool:
        """Write a record that the store cannot take where it is not offered again; whether it is on the disk."""
        if self._journal is None:
            logger.error("settlement of call %s is lost", record.call_id, exc_info=refused)
            return False
        try:
            path = await asyncio.to_thread(self._journal.set_aside, record)
        except Exception as error:  # the disk fails, or a value cannot be encoded
            logger.error("call %s cannot be settled, nor set aside: %s", record.call_id, error, exc_info=refused)  # noqa: TRY400
            return False
        logger.error("call %s is not settled but set aside in %s; %s", record.call_id, path, REMEDY, exc_info=refused)
        return True

    async def _offer_again(self) -> None:
        while self._waiting or self._is_unavailable or self._writing:
            await asyncio.sleep(_RETRY_S)
            try:
                await self._drain()
                await self._write_down()
            except Exception:
                # Go on, whatever it was: nobody else would find out that the store is back.
                logger.exception("settlements were not offered again this time")

    async def _drain(self) -> None:
        with contextlib.suppress(StoreUnavailable):
            if self._is_unavailable:
                await self._store.ping()
            while self._waiting:
                await self._offer_some()
            if not self._writing:
                self._all_settled()

    async def _offer_some(self) -> None:
        """Offer those that wait longest. Whatever the store does not take goes on waiting, before all others."""
        offered = [*itertools.islice(self._waiting, _AT_ONCE)]
        outcomes = await asyncio.gather(*map(self._offer, offered), return_exceptions=True)
        for _ in offered:
            self._waiting.popleft()
        errors = {record.call_id: one for record, one in zip(offered, outcomes, strict=True) if one is not None}
        self._waiting.extendleft(record for record in reversed(offered) if record.call_id in errors)
        self._is_returning = not errors
        for error in errors.values():
            raise error

    async def _offer(self, record: CallRecord) -> None:
        try:
            await self._settle(record)
        except RecordRefused as error:
            if not await self._set_aside(record, error):
                self._overflowed = True

    def _all_settled(self) -> None:
        """The store has taken all that waited in memory: let go of the journal, and say that the store is back."""
        self._unwritten.clear()
        if self._journal is not None:
            self._let_go(self._journal)
        if self._is_unavailable:
            self._is_unavailable = False
            logger.warning("store back, all settlements written")
            self.on_return()

    def _let_go(self, journal: Journal) -> None:
        """Delete the journal. What waits in it alone is left, to be found like that of a worker that is gone."""
        todo, done = (journal.leave, "left to others") if self._overflowed else (journal.clear, "deleted")
        try:
            todo()
        except OSError as error:
            # Of what is settled and read again nobody is charged twice: no reason to refuse calls.
            logger.error("the journal of what is settled cannot be %s: %s", done, error)  # noqa: TRY400
        else:
            self._overflowed = False

    async def _look(self) -> None:
        while True:
            if not self._is_unavailable:
                try:
                    await self.recover()
                except StoreUnavailable:
                    pass
                except Exception:
                    logger.exception("journals of workers that are gone were not read this time")
            await asyncio.sleep(_LOOK_S)

    async def recover(self) -> int:
        """Settle the records in the journals of workers that are gone; how many it was.

        A file that cannot be read, or not be deleted, keeps no other from being settled.

        Raises:
            StoreUnavailable: the store is away; what was not settled stays.
        """
        if self._journal is None:
            return 0
        found = 0
        for left in self._journal.left_over():
            try:
                found += await self._recovered(left)
            except OSError as error:
                self._name_unreadable(left.path, error)
            else:
                self._unreadable.discard(left.path)
        return found

    def _name_unreadable(self, path: Path, error: OSError) -> None:
        if path not in self._unreadable:
            self._unreadable.add(path)
            logger.error("journal %s cannot be settled to its end and is tried again: %s", path, error)

    async def _recovered(self, left: Left) -> int:
        settled, is_safe, parts = 0, True, left.parts(_AT_ONCE)
        while records := await asyncio.to_thread(next, parts, None):
            outcomes = await asyncio.gather(*map(self._settle, records), return_exceptions=True)
            for record, outcome in zip(records, outcomes, strict=True):
                if isinstance(outcome, RecordRefused):
                    is_safe = await self._set_aside(record, outcome) and is_safe
                elif isinstance(outcome, BaseException):
                    raise outcome
                else:
                    settled += 1
        if settled and left.path not in self._unreadable:
            logger.warning("%d calls settled from the journal %s of a worker that is gone", settled, left.path.name)
        if is_safe:
            left.delete()
        return settled

    async def aclose(self) -> None:
        """Offer what is waiting one last time; what the store does not take stays in the journal."""
        ended = [task for task in (self._retry, self._looking) if task is not None]
        for task in ended:
            task.cancel()
        # What is on its way to the disk gets there before the file is left to others.
        if under_way := {*ended, *self._unfinished}:
            await asyncio.wait(under_way)
        try:
            await self._drain()
            await self._write_down()
        finally:
            if self._journal is not None:
                self._journal.close()
            for record in self._waiting:
                if record.call_id in self._unwritten:
                    logger.error("settlement of call %s is lost: the store is away at the end", record.call_id)
