"""Write the records of all calls to files of JSON lines, one for each day, at least once.

- The records are read from the store after the calls, so no call waits for a disk.
- One worker per folder writes, the one that holds the lock. If it ends, another one continues.
- A position is stored after the records before it are on the disk. After a crash, some records are written again:
  readers keep the last line of each `call_id`. That is also the rule for calls that are corrected later.
- If a sink paused for so long that the store has lost the order of settlement, all records of that time are written
  again.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from gateway.core.errors import StoreUnavailable
from gateway.core.ports import Calls
from gateway.core.record import CallRecord

logger = logging.getLogger("gateway")

_EVERY_S: Final = 1.0
#: seconds after which a failed write is tried again, and another worker's lock is looked at
_RETRY_S: Final = 10.0
#: records that one write contains
_BATCH: Final = 500
#: Seconds before the last written call. Longer calls may be missing after a pause of thousands of calls.
_LONGEST_CALL_S: Final = 86_400.0
_FILE: Final = re.compile(r"calls-(\d{4}-\d\d-\d\d)\.jsonl")


class _Position(msgspec.Struct):
    """What is written: `cursor` of `Calls.settled_after`, and the latest start of a call (Unix seconds)."""

    cursor: int
    started_at: float


class CallSink:
    """Writes the records of a store to a folder.

    Args:
        store: the store of the calls.
        folder: of the files; it is created.
        shape: turns a record into a JSON value.
        keep_s: seconds after its day for which a file is kept; None: for ever.
        now: returns Unix seconds.
        every_s: seconds between two reads.
    """

    def __init__(  # noqa: PLR0917  # made in one place
        self,
        store: Calls,
        folder: Path,
        shape: Callable[[CallRecord], Mapping[str, Any]],
        keep_s: float | None = None,
        now: Callable[[], float] = time.time,
        every_s: float = _EVERY_S,
    ) -> None:
        self._store = store
        self._folder = folder
        self._shape = shape
        self._keep_s = keep_s
        self._now = now
        self._every_s = every_s
        self._position_file = folder / "position.json"
        self._is_failing = False

    async def run(self) -> None:
        """Write records until this task is cancelled."""
        while True:
            try:
                with self._locked() as is_ours:
                    while is_ours:
                        await self._write_new()
                        await asyncio.sleep(self._every_s)
            except StoreUnavailable:
                pass  # the next try continues from the same position
            except (OSError, ValueError) as error:
                self._log_failure(error)
            await asyncio.sleep(_RETRY_S if self._every_s == _EVERY_S else self._every_s)

    def _log_failure(self, error: Exception) -> None:
        if not self._is_failing:
            self._is_failing = True
            logger.error("the sink %s cannot be written: %s; it is tried again", self._folder, error)

    @contextlib.contextmanager
    def _locked(self) -> Any:
        """Hold the lock of the folder; the value is False if another worker has it."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(self._folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True
        finally:
            os.close(descriptor)

    async def _write_new(self) -> None:
        """Write the records that were settled since the last time."""
        position = self._read_position()
        while True:
            latest = await self._store.settled_after(position.cursor if position is not None else None, _BATCH)
            records = [one.call for one in latest.settled]
            if position is None:
                position = _Position(latest.cursor, self._now())
            elif latest.missed:
                await self._write_again(position.started_at - _LONGEST_CALL_S)
            elif not records and latest.cursor == position.cursor:
                return
            newest = max([position.started_at, *(record.started_at for record in records)])
            position = _Position(latest.cursor, newest)
            await self._save(records, position)
            if self._is_failing:
                self._is_failing = False
                logger.warning("the sink %s is written again", self._folder)
            if len(records) < _BATCH:
                return

    async def _write_again(self, since: float) -> None:
        some = list[CallRecord]()
        async for record in self._store.each_call(since):
            some.append(record)
            if len(some) == _BATCH:
                await self._save(some, None)
                some = []
        await self._save(some, None)

    async def _save(self, records: Sequence[CallRecord], position: _Position | None) -> None:
        """Run `_write` in a thread. If this task is cancelled, the lock is kept until the thread has ended."""
        writing = asyncio.ensure_future(asyncio.to_thread(self._write, records, position))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await asyncio.wait({writing})
            raise

    def _read_position(self) -> _Position | None:
        try:
            return msgspec.json.decode(self._position_file.read_bytes(), type=_Position)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError:
            logger.error("the sink %s: position.json cannot be read; records are written from now on", self._folder)  # noqa: TRY400  # the error says no more
            return None

    def _write(self, records: Sequence[CallRecord], position: _Position | None) -> None:
        """Append records to the files of their days, and then write the position. Both are on the disk after it."""
        by_day: defaultdict[str, list[bytes]] = defaultdict(list)
        for record in records:
            day = datetime.fromtimestamp(record.started_at, UTC).strftime("%Y-%m-%d")
            by_day[day].append(msgspec.json.encode(self._shape(record)))
        for day, lines in by_day.items():
            self._append(self._folder / f"calls-{day}.jsonl", b"\n".join(lines) + b"\n")
        if position is not None:
            new = self._position_file.with_suffix(".new")
            new.write_bytes(msgspec.json.encode(position))
            new.replace(self._position_file)
        if by_day:
            self._delete_old()

    @staticmethod
    def _append(file: Path, text: bytes) -> None:
        descriptor = os.open(file, os.O_CREAT | os.O_RDWR, 0o600)
        with os.fdopen(descriptor, "r+b") as out:
            end = out.seek(0, os.SEEK_END)
            # A crash or a full disk may have cut off the last line.
            while end and (out.seek(end - 1), out.read(1))[1] != b"\n":
                end -= 1
            out.truncate(end)
            out.seek(end)
            out.write(text)
            out.flush()
            os.fsync(out.fileno())

    def _delete_old(self) -> None:
        if self._keep_s is None:
            return
        oldest = datetime.fromtimestamp(self._now() - self._keep_s, UTC).strftime("%Y-%m-%d")
        for file in self._folder.iterdir():
            match = _FILE.fullmatch(file.name)
            if match is not None and match[1] < oldest:
                file.unlink()
