"""Settle calls without losing one: records that the store cannot take are journaled and tried again."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

from gateway.core.errors import StoreUnavailable
from gateway.core.ledger.arithmetic import Claim
from gateway.core.ports import RecordRefused, Store
from gateway.core.record import CallRecord
from gateway.core.stored import CallEnd, StepEnding
from gateway.core.usage import Totals
from gateway.stores.availability import Availability
from gateway.stores.journal import REMEDY, Journal, Left

T = TypeVar("T")

logger = logging.getLogger("gateway")

#: see `most_waiting` of `Settler`
_MAX_WAITING: Final = 10_000
#: seconds between two tries to settle waiting records
_RETRY_S: Final = 0.5
#: Number of records that are settled in parallel. If calls are accepted during an outage, they also end during it. One
#: record at a time would be too slow for a distant store: the queue would grow, and the store would stay marked as
#: unavailable.
_AT_ONCE: Final = 64
#: seconds between two searches for journals of ended workers
_RECOVER_S: Final = 10.0


class Settler:
    """Settle calls by writing their records. Settling is idempotent by `call_id`, so trying again is safe.

    Its `availability` is that of the worker's store. The settler marks the store as available again.

    Args:
        store: takes the records.
        journal: keeps waiting records on the disk. None: they are in memory only, and lost with the process.
        accepts_without_store: accept calls while the store is unavailable (`store.on_failure: open`).
        most_waiting: records that wait in memory. Further ones wait in the journal only; without a journal they are
            lost.
    """

    def __init__(
        self,
        store: Store,
        journal: Journal | None = None,
        *,
        accepts_without_store: bool = False,
        most_waiting: int = _MAX_WAITING,
    ) -> None:
        self.availability = Availability(
            accepts_without_store=accepts_without_store, waiting=lambda: len(self._waiting), on_failure=self._retry_soon
        )
        self._most_waiting = most_waiting
        self._store = store
        self._journal = journal
        self._waiting: deque[CallRecord] = deque()
        #: call ids of waiting records that are not in the journal
        self._unwritten: set[str] = set()
        #: The store is still marked as unavailable, but has taken some waiting records. New records then go straight to
        #: it. If they queued up as well, the queue would never get empty while calls are accepted.
        self._is_returning = False
        #: the journal has records that do not wait in memory
        self._overflowed = False
        #: records that are being written to the journal
        self._writing = 0
        self._retry: asyncio.Task[None] | None = None
        self._recovery: asyncio.Task[None] | None = None
        #: writes to the disk, which continue if their caller is cancelled
        self._unfinished: set[asyncio.Task[Any]] = set()
        #: unreadable journals that the log has named already
        self._unreadable: set[Path] = set()
        #: the last records given to `note` are on the disk, or there were none yet
        self._can_note = True

    def start(self) -> None:
        """Start to search for journals of ended workers regularly.

        Log a warning if the journal cannot be written, or if journals wait in folders that no worker reads.
        """
        if self._journal is not None:
            for warning in (self._journal.write_warning(), self._journal.other_stores_warning()):
                if warning is not None:
                    logger.warning(warning)
            self._recovery = asyncio.create_task(self._recover_regularly())

    @property
    def waiting(self) -> int:
        """Return the number of ended calls of this worker that wait for the store in memory."""
        return len(self._waiting)

    def _retry_soon(self) -> None:
        self._is_returning = False
        self._start_retrying()

    def _start_retrying(self) -> None:
        if self._retry is None or self._retry.done():
            self._retry = asyncio.get_running_loop().create_task(self._retry_until_settled())

    async def settle(self, record: CallRecord) -> Totals | None:
        """Settle a call and return its session's totals; None if the store is unavailable or refuses the record."""
        closing = await self.settle_and_read(record, ())
        return closing.totals if closing is not None else None

    async def settle_and_read(self, record: CallRecord, claims: Sequence[Claim]) -> CallEnd | None:
        """Settle a call like `settle`, and also return the balances of these accounts after it."""
        if self.availability.is_unavailable and not self._is_returning:
            await self._keep(record)
            return None
        try:
            settled = record if record.lesson is None else await self._without_lesson(record)
            if not claims:
                return CallEnd(await self._store.settle(settled))
            return await self._store.settle_and_read(settled, None, claims)
        except asyncio.CancelledError:
            # It may have been written or not. Settling it again counts it once.
            await self._keep(record)
            raise
        except RecordRefused as error:
            await self._shielded(self._set_aside(record, error))
            return None
        except StoreUnavailable as error:
            self.availability.report(error)
            await self._keep(record)
            return None

    async def settle_with_step(self, record: CallRecord, ending: StepEnding, claims: Sequence[Claim]) -> CallEnd:
        """Settle a call together with the change that it makes to its session's state; see `settle_and_read`.

        An ending is never queued with its record: the state of the session may change before the record is written.

        Raises:
            StoreUnavailable: nothing is settled or journaled. Then call `settle_and_read`, which needs no ending.
        """
        if self.availability.is_unavailable:
            raise self.availability.error()
        try:
            settled = record if record.lesson is None else await self._without_lesson(record)
            return await self._store.settle_and_read(settled, ending, claims)
        except asyncio.CancelledError:
            await self._keep(record)
            raise
        except StoreUnavailable as error:
            self.availability.report(error)
            raise

    async def _without_lesson(self, record: CallRecord) -> CallRecord:
        """Save the record's lesson, and return the record without it. Doing this again has no effect."""
        if record.lesson is None:
            return record
        key, value = record.lesson
        call_id, lesson = record.call_id.encode(), value.encode()
        await self._store.learn({key: lambda known: known if known is not None and call_id in known else lesson})
        return replace(record, lesson=None)

    async def _settle(self, record: CallRecord) -> None:
        """Settle a record that waited."""
        await self._store.settle(await self._without_lesson(record))

    async def _shielded(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` to its end, even if its caller is cancelled."""
        task = asyncio.get_running_loop().create_task(work)
        self._unfinished.add(task)
        task.add_done_callback(self._unfinished.discard)
        return await asyncio.shield(task)

    async def _keep(self, record: CallRecord) -> None:
        """Queue a record in memory for the next try, and write it to the journal, even if the caller is cancelled."""
        is_queued = len(self._waiting) < self._most_waiting
        if is_queued:
            self._waiting.append(record)
        self._writing += 1
        self._start_retrying()
        await self._shielded(self._write_kept(record, is_queued=is_queued))

    async def _write_kept(self, record: CallRecord, *, is_queued: bool) -> None:
        try:
            is_written = await self._journal_record(record)
            # Before `_writing` is decreased: `_all_settled` must not delete a file that alone holds this record.
            if is_queued:
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

    async def _journal_record(self, record: CallRecord) -> bool:
        if self._journal is None:
            return False
        try:
            await asyncio.to_thread(self._journal.append, record)
        except Exception as error:  # noqa: BLE001  # of the disk, or of encoding
            if record.call_id not in self._unwritten:
                logger.error("call %s cannot be journaled and waits in memory: %s", record.call_id, error)  # noqa: TRY400
            return False
        return True

    async def note(self, records: Sequence[CallRecord]) -> None:
        """Write records that are settled only if this worker dies while its calls run. They replace the last ones.

        If they cannot be written, calls continue, and the log says so once.
        """
        if self._journal is None:
            return
        try:
            await self._shielded(asyncio.to_thread(self._journal.note, records))
        except Exception as error:  # noqa: BLE001  # of the disk, or of encoding
            if self._can_note:
                logger.error("the progress of running calls cannot be journaled: %s", error)  # noqa: TRY400
            self._can_note = False
        else:
            self._can_note = True

    async def _journal_unwritten(self) -> None:
        """Try again to journal records: the disk may have room again before the store is available."""
        for record in [one for one in self._waiting if one.call_id in self._unwritten]:
            if not await self._shielded(self._journal_record(record)):
                return
            self._unwritten.discard(record.call_id)

    async def _set_aside(self, record: CallRecord, refused: RecordRefused) -> bool:
        """Write a record that the store refuses to a separate file, without further tries; return True if written."""
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

    async def _retry_until_settled(self) -> None:
        while self._waiting or self.availability.is_unavailable or self._writing:
            await asyncio.sleep(_RETRY_S)
            try:
                await self._drain()
                await self._journal_unwritten()
            except Exception:
                # Only this task notices that the store is available again, so it must not end.
                logger.exception("waiting calls were not settled this time")

    async def _drain(self) -> None:
        with contextlib.suppress(StoreUnavailable):
            if self.availability.is_unavailable:
                await self._store.ping()
            while self._waiting:
                await self._settle_oldest()
            if not self._writing:
                self._all_settled()

    async def _settle_oldest(self) -> None:
        """Settle the records that have waited longest. Those that the store does not take stay first in the queue."""
        oldest = [*itertools.islice(self._waiting, _AT_ONCE)]
        outcomes = await asyncio.gather(*map(self._settle_waiting, oldest), return_exceptions=True)
        for _ in oldest:
            self._waiting.popleft()
        errors = {record.call_id: one for record, one in zip(oldest, outcomes, strict=True) if one is not None}
        self._waiting.extendleft(record for record in reversed(oldest) if record.call_id in errors)
        self._is_returning = not errors
        for error in errors.values():
            raise error

    async def _settle_waiting(self, record: CallRecord) -> None:
        try:
            await self._settle(record)
        except RecordRefused as error:
            if not await self._set_aside(record, error):
                self._overflowed = True

    def _all_settled(self) -> None:
        """Release the journal and mark the store as available, as it has taken all records that waited in memory."""
        self._unwritten.clear()
        if self._journal is not None:
            self._release(self._journal)
        self.availability.restore()

    def _release(self, journal: Journal) -> None:
        """Delete the journal, or leave it to be recovered like that of an ended worker if it alone holds records."""
        release, what = (journal.leave, "left to others") if self._overflowed else (journal.clear, "deleted")
        try:
            release()
        except OSError as error:
            # Settled records that are read again charge nothing twice, so calls need not be refused.
            logger.error("the journal of settled calls cannot be %s: %s", what, error)  # noqa: TRY400
        else:
            self._overflowed = False

    async def _recover_regularly(self) -> None:
        while True:
            if not self.availability.is_unavailable:
                try:
                    await self.recover()
                except StoreUnavailable:
                    pass
                except Exception:
                    logger.exception("journals of ended workers were not read this time")
            await asyncio.sleep(_RECOVER_S)

    async def recover(self) -> int:
        """Settle the records in the journals of ended workers, and return their number.

        A file that cannot be read or deleted does not stop others from being settled.

        Raises:
            StoreUnavailable: the store is unavailable; records that are not settled stay in their files.
        """
        if self._journal is None:
            return 0
        settled = 0
        for left in self._journal.left_over():
            try:
                settled += await self._recover_file(left)
            except OSError as error:
                self._log_unreadable(left.path, error)
            else:
                self._unreadable.discard(left.path)
        return settled

    def _log_unreadable(self, path: Path, error: OSError) -> None:
        if path not in self._unreadable:
            self._unreadable.add(path)
            logger.error("journal %s cannot be settled completely and is tried again: %s", path, error)

    async def _recover_file(self, left: Left) -> int:
        # `is_safe`: each record that the store refused was written to another file, so this file can be deleted
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
            logger.warning("%d calls settled from the journal %s of an ended worker", settled, left.path.name)
        if is_safe:
            left.delete()
        return settled

    async def aclose(self) -> None:
        """Settle waiting records with one last try; those that the store does not take stay in the journal."""
        ended = [task for task in (self._retry, self._recovery) if task is not None]
        for task in ended:
            task.cancel()
        # Writes to the disk end before the files are unlocked for other workers.
        if under_way := {*ended, *self._unfinished}:
            await asyncio.wait(under_way)
        try:
            await self._drain()
            await self._journal_unwritten()
        finally:
            if self._journal is not None:
                self._journal.close()
            for record in self._waiting:
                if record.call_id in self._unwritten:
                    logger.error("settlement of call %s is lost: the store is unavailable at shutdown", record.call_id)
