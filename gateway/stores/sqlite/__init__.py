"""Store in one SQLite file (WAL), shared by the workers of one machine.

- Writes of calls run in the event loop, in shared transactions (`writer.py`). A commit in WAL mode without fsync takes
  tens of microseconds, less than passing it to a thread. The reads of one or two rows that every call makes run in the
  event loop as well.
- The event loop never waits for a lock. A locked database raises an error at once, and a timer tries again until the
  deadline.
- Checkpoints, lists and deletions run in a thread with its own connection.
- Durability is `synchronous=NORMAL`: a commit survives the end of any process at once. It survives a power cut once it
  is on the disk, after the next checkpoint at the latest.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from gateway.core.agent_use import AgentUse
from gateway.core.audit import AuditEntry, AuditPage
from gateway.core.errors import StoreUnavailable
from gateway.core.ids import first_id_at
from gateway.core.ledger.arithmetic import AccountKey, Balance, Claim, Dimension, Granted, Moment, Refused
from gateway.core.ledger.session_key import SessionKey
from gateway.core.ports import Store
from gateway.core.record import CallRecord
from gateway.core.retention import DEFAULT_RETENTION, Retention
from gateway.core.rollup import UsageQuery, UsageRow
from gateway.core.session import Change, Remembered, SessionState
from gateway.core.stored import (
    MOST_SEARCHED,
    CallEnd,
    CallStart,
    KeyChange,
    LatestCalls,
    Lesson,
    OpenHold,
    Page,
    SessionView,
    Sort,
    StepEnding,
    StoredKey,
)
from gateway.core.usage import Totals
from gateway.stores import clock
from gateway.stores.compressed import Compressed
from gateway.stores.cursor import Cursor, Names, page_of
from gateway.stores.damage import Refusing, UnreadHolds, UnreadKeys, UnreadRecords
from gateway.stores.record_encoding import encode_record
from gateway.stores.sqlite import accounts, agents, audit, deletion, kept, latest, rows, usage
from gateway.stores.sqlite.place import FilesReplaced, FilesUnknown, StoreFiles
from gateway.stores.sqlite.schema import connect, migrate, rewrite_format
from gateway.stores.sqlite.transaction import transact
from gateway.stores.sqlite.writer import RETRY_S, Writer

T = TypeVar("T")

#: Commits between two checkpoints. A hold changes two pages, its settlement about eight.
_CHECKPOINT_EVERY: Final = 200
_CHECKPOINT: Final = "PRAGMA wal_checkpoint({})"
#: Pages (of 4 KiB) in the log (-wal) above which commits wait until a checkpoint has moved it into the database.
_LOG_PAGES: Final = 2048
#: Seconds between two transactions of a deletion: longer than the pause before a settlement tries again.
_DELETE_PAUSE_S: Final = 2.5 * RETRY_S
#: commits that such a transaction counts for towards the next checkpoint
_DELETE_COMMITS: Final = 25
#: Errors that a retry does not fix, by the lower byte of the code. The upper bytes only say where it happened.
_DAMAGED: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})


class SqliteStore:
    """A `Store` in one SQLite file. Create it while an event loop runs.

    `timeout_s`: how long to wait for a locked file. `now` returns Unix seconds, `moment` the time for holds.
    """

    def __init__(
        self,
        path: Path,
        *,
        timeout_s: float = 0.25,
        now: Callable[[], float] = time.time,
        moment: Callable[[], Moment] = clock.now,
        retention: Retention = DEFAULT_RETENTION,
    ) -> None:
        self._path = path
        self._retention = retention
        self._now = now
        self._moment = moment
        self._loop = asyncio.get_running_loop()
        self._unread = UnreadHolds()
        self._unread_keys = UnreadKeys()
        self._unread_records = UnreadRecords()
        self._since_checkpoint = 0
        self._checkpoint: asyncio.Task[None] | None = None
        # One thread for the one connection `_slow`. The default executor of the loop must not wait for locks.
        self._thread = ThreadPoolExecutor(1, "sqlite")
        self._hot = connect(path, busy_timeout_s=5)
        try:
            migrate(self._hot, path)
            self._hot.execute("PRAGMA busy_timeout=0")
            self._slow = connect(path, busy_timeout_s=timeout_s)
        except BaseException:
            self._hot.close()
            raise
        self._files = StoreFiles(path)
        self._writer = Writer(self._hot, self._files.check, timeout_s, self._unavailable, self._committed)

    async def settle(self, record: CallRecord, ending: StepEnding | None = None) -> Totals:
        """See `Store.settle`."""
        with Refusing(record.call_id):
            encoded = encode_record(record) if ending is None else None

            def write(db: sqlite3.Connection) -> Totals:
                key, ended, update = record.session, record, None
                if ending is not None and key is not None:
                    row = kept.read(db, key)
                    steps, ended = ending(row.steps)
                    update = kept.RowUpdate(row, steps)
                totals, is_written = rows.add(db, ended, encoded or encode_record(ended))
                # A call that was settled before changes nothing.
                if is_written and key is not None:
                    kept.add(db, key, update, ended.counted_tools, self._now())
                return totals

            return await self._writer.write(write)

    async def settle_and_read(self, record: CallRecord, ending: StepEnding | None, claims: Sequence[Claim]) -> CallEnd:
        """See `Store.settle_and_read`."""
        totals, balances = await self.settle(record, ending), None
        with contextlib.suppress(StoreUnavailable):
            balances = await self.balances(claims)
        return CallEnd(totals, balances)

    async def reserve(self, opened: OpenHold, lease_s: float) -> Granted | Refused:
        """See `Store.reserve`."""
        return await self._writer.write(lambda db: accounts.reserve(db, opened, lease_s, self._moment()))

    async def extend(self, hold_id: str, units: int) -> Granted | None:
        """See `Store.extend`."""
        return await self._writer.write(lambda db: accounts.extend(db, hold_id, units, self._moment()))

    async def renew(self, noted: Mapping[str, int]) -> frozenset[str]:
        """See `Store.renew`."""
        return await self._writer.write(lambda db: accounts.renew(db, noted, self._moment()))

    async def overdue_holds(self, limit: int) -> Sequence[OpenHold]:
        """See `Store.overdue_holds`."""
        return await self._in_thread(lambda db: accounts.overdue(db, limit, self._moment(), self._unread))

    async def balances(self, claims: Sequence[Claim]) -> tuple[Balance, ...]:
        """See `Store.balances`."""
        return self._in_loop(lambda db: accounts.balances(db, claims, self._moment()))

    async def open_call(
        self, session: SessionKey, claims: Sequence[Claim], *, with_totals: bool, above: Sequence[SessionKey] = ()
    ) -> CallStart:
        """See `Store.open_call`."""
        now = self._moment()
        return self._in_loop(lambda db: rows.opening(db, session, claims, above, now, with_totals=with_totals))

    async def override_limits(self, account: AccountKey, limits: Mapping[Dimension, int | None] | None) -> None:
        """See `Store.override_limits`."""
        await self._writer.write(lambda db: accounts.decide(db, account, limits, self._moment()))

    async def update(self, session: SessionKey, change: Change) -> SessionState:
        """See `Store.update`."""
        return await self._writer.write(lambda db: kept.change(db, session, change, self._now()))

    async def learn(self, lessons: Mapping[str, Lesson]) -> Mapping[str, bytes]:
        """See `Store.learn`."""
        return await self._writer.write(lambda db: rows.add_lessons(db, lessons, self._now()))

    def _committed(self, commits: int = 1) -> None:
        self._since_checkpoint += commits
        if self._since_checkpoint >= _CHECKPOINT_EVERY and (self._checkpoint is None or self._checkpoint.done()):
            self._since_checkpoint = 0
            self._checkpoint = self._loop.create_task(self._checkpoint_now())

    def _unavailable(self, error: Exception) -> StoreUnavailable:
        is_damaged = getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGED
        remedy = "Restore a copy of the file, or move it away" if is_damaged else "Try again shortly"
        remedy = "Restore them, or restart the gateway" if isinstance(error, FilesReplaced) else remedy
        remedy = "Give the gateway access to their folder again" if isinstance(error, FilesUnknown) else remedy
        return StoreUnavailable(f"The store {self._path.name} cannot be used: {error}. {remedy}.")

    async def _checkpoint_now(self) -> None:
        """Move the log into the database.

        With a steady stream of commits it never moves everything. Then commits wait for it.
        """
        with contextlib.suppress(StoreUnavailable):
            _, pages, moved = await self._in_thread(lambda db: db.execute(_CHECKPOINT.format("PASSIVE")).fetchone())
            # Pages after those that a reader still uses are not moved. After a short read these are few. During a long
            # one, such as a backup, commits would wait in vain.
            if pages <= _LOG_PAGES or pages - moved > _LOG_PAGES:
                return
            with self._writer.paused():
                await self._in_thread(lambda db: db.execute(_CHECKPOINT.format("RESTART")).fetchone())

    async def _in_thread(self, work: Callable[[sqlite3.Connection], T]) -> T:
        try:
            return await self._loop.run_in_executor(self._thread, work, self._slow)
        except sqlite3.Error as error:
            raise self._unavailable(error) from error

    def _in_loop(self, work: Callable[[sqlite3.Connection], T]) -> T:
        try:
            return work(self._hot)
        except sqlite3.Error as error:
            raise self._unavailable(error) from error

    async def missing_results(self, session: SessionKey, handles: Sequence[str]) -> Sequence[str]:
        """See `Store.missing_results`."""
        return self._in_loop(lambda db: [one for one in handles if not rows.has_result(db, session, one)])

    async def results_size(self, session: SessionKey) -> int:
        """See `Store.results_size`."""
        return self._in_loop(lambda db: rows.results_size(db, session))

    async def keep_results(self, session: SessionKey, texts: Mapping[str, str], most: int) -> Sequence[str]:
        """See `Store.keep_results`."""
        # Compressing megabytes would block the event loop.
        compressed = await asyncio.to_thread(lambda: {handle: Compressed.of(text) for handle, text in texts.items()})
        return await self._writer.write(lambda db: rows.add_results(db, session, compressed, most, self._now()))

    async def results(self, session: SessionKey, handles: Sequence[str]) -> Mapping[str, str]:
        """See `Store.results`."""
        return await self._in_thread(lambda db: rows.results(db, session, handles))

    async def result(self, namespace: str | None, handle: str) -> str | None:
        """See `Store.result`."""
        return await self._in_thread(lambda db: rows.result(db, namespace, handle))

    async def keys(self) -> Sequence[StoredKey]:
        """See `Store.keys`."""
        return self._unread_keys.read(self._in_loop(rows.keys))

    async def add_key(self, key: StoredKey) -> bool:
        """See `Store.add_key`."""
        return await self._writer.write(lambda db: rows.add_key(db, key))

    async def change_key(self, name: str, change: KeyChange) -> StoredKey | None:
        """See `Store.change_key`."""
        return await self._writer.write(lambda db: rows.change_key(db, name, change))

    async def revoke_key(self, name: str) -> bool:
        """See `Store.revoke_key`."""
        return await self._writer.write(lambda db: rows.revoke_key(db, name))

    async def totals(self, session: SessionKey) -> Totals:
        """See `Store.totals`."""
        return self._in_loop(lambda db: rows.read_totals(db, session))

    async def remembered(self, session: SessionKey) -> Remembered:
        """See `Store.remembered`."""
        return self._in_loop(lambda db: rows.remembered(db, session))

    async def learned(self, key: str) -> bytes | None:
        """See `Store.learned`."""
        return self._in_loop(lambda db: rows.lesson(db, key))

    async def session(self, session: SessionKey) -> SessionView | None:
        """See `Store.session`."""
        return await self._in_thread(lambda db: rows.session(db, session))

    async def agents(self, session: SessionKey) -> Sequence[AgentUse]:
        """See `Store.agents`."""
        return await self._in_thread(lambda db: agents.read(db, session))

    async def sessions(
        self, namespace: str | None, limit: int, cursor: str | None, sort: Sort, *, part: str = ""
    ) -> Page:
        """See `Store.sessions`."""
        after, names = Cursor.parse(cursor) if cursor else None, Names(namespace, part)
        most = MOST_SEARCHED if part else limit

        def read(db: sqlite3.Connection) -> Page:
            chosen, more = page_of(rows.places(db, namespace, sort, after, most + 1), names, limit)
            views = [rows.listed(db, place.key) for place in chosen]
            return Page([view for view in views if view is not None], more)

        return await self._in_thread(read)

    async def session_counts(self, namespaces: Sequence[str]) -> Sequence[int]:
        """See `Store.session_counts`."""
        return await self._in_thread(lambda db: rows.session_counts(db, namespaces))

    async def newest_calls(self, namespace: str | None, limit: int) -> Sequence[CallRecord]:
        """See `Store.newest_calls`."""
        return await self._in_thread(lambda db: rows.newest(db, namespace, limit, self._unread_records))

    async def calls(self, session: SessionKey, limit: int, before: str | None = None) -> Sequence[CallRecord]:
        """See `Store.calls`."""
        return await self._in_thread(lambda db: rows.calls(db, session, limit, before, self._unread_records))

    async def call(self, namespace: str | None, request_id: str) -> CallRecord | None:
        """See `Store.call`."""
        return await self._in_thread(lambda db: rows.call(db, namespace, request_id, self._unread_records))

    async def call_of_response(self, namespace: str, answer: str) -> CallRecord | None:
        """See `Store.call_of_response`."""
        return self._in_loop(lambda db: rows.answered(db, namespace, answer, self._unread_records))

    async def each_call(self, since: float) -> AsyncIterator[CallRecord]:
        """See `Store.each_call`."""
        after: str | None = first_id_at(since)
        while after is not None:
            records, after = await self._in_thread(partial(rows.some_calls, after=after, unread=self._unread_records))
            for record in records:
                yield record

    async def settled_after(self, after: int | None, limit: int) -> LatestCalls:
        """See `Store.settled_after`."""
        return await self._in_thread(lambda db: latest.read(db, after, limit, self._unread_records))

    async def usage(self, query: UsageQuery) -> Sequence[UsageRow]:
        """See `Store.usage`."""
        return await self._in_thread(lambda db: usage.read(db, query))

    async def reset(self, session: SessionKey) -> bool:
        """See `Store.reset`."""

        def clear(db: sqlite3.Connection) -> bool:
            accounts.clear(db, session.account)
            return rows.reset(db, session)

        return await self._writer.write(clear)

    async def delete(self, session: SessionKey) -> bool:
        """See `Store.delete`."""
        return await self._delete([(session.namespace, session.id)], None) > 0

    async def expire(self, before: float) -> int:
        """See `Store.expire`. It deletes in parts, so that a long list never keeps the file locked."""
        deleted = 0
        async for keys in self._sessions_of_old_rows(deletion.SESSIONS, before):
            deleted += await self._delete(keys, before)
        for table in deletion.ALONE:
            async for keys in self._sessions_of_old_rows(table, before):
                await self._delete_alone(table, keys, before)
        await self._delete_oldest_calls()
        calls_before = self._retention.calls_before(before, self._now())
        old_rows: tuple[Callable[[sqlite3.Connection], int], ...] = (
            lambda db: deletion.delete_old_calls(db, calls_before),
            lambda db: deletion.delete_old_gone(db, before),
            lambda db: deletion.delete_old_lessons(db, before),
            lambda db: usage.delete_old(db, self._retention, self._now()),
            lambda db: audit.delete_old(db, self._now() - self._retention.changes_s),
        )
        for delete in old_rows:
            while await self._in_thread(delete):
                await self._let_others_write()
        return deleted

    async def _delete_oldest_calls(self) -> None:
        """Delete the oldest calls of sessions with more than are kept."""
        most = self._retention.calls_per_session
        if most is None:
            return
        async for keys in self._sessions_of_old_rows(deletion.LONG_SESSIONS, most):
            for key in keys:
                while await self._in_thread(lambda db, key=key: deletion.delete_oldest_calls(db, key, most)):  # type: ignore[misc]
                    await self._let_others_write()

    async def _sessions_of_old_rows(
        self, table: deletion.CleanupTable, before: float
    ) -> AsyncIterator[Sequence[deletion.Key]]:
        """Go once through a table, and yield the sessions of its old rows in parts."""
        after: deletion.Key | None = deletion.FIRST
        while after is not None:
            keys, after = await self._in_thread(lambda db, after=after: deletion.look(db, table, before, after))  # type: ignore[misc]
            yield keys

    async def _delete_alone(self, table: deletion.CleanupTable, keys: Sequence[deletion.Key], before: float) -> None:
        while keys:
            keys = await self._in_thread(lambda db, keys=keys: deletion.delete_alone(db, table, keys, before))  # type: ignore[misc]
            await self._let_others_write()

    async def _delete(self, keys: Sequence[tuple[str, str]], before: float | None) -> int:
        """Delete sessions with all their data, and return their number. Those called at or after `before` stay.

        A session is deleted in the same transaction as its last calls:

        - No reader ever sees calls without their session.
        - A session that is called meanwhile loses that call, or keeps it together with its totals.
        - A deletion that a lock interrupts can simply be repeated.
        """
        deleted = 0
        while keys:
            part, keys = await self._in_thread(lambda db, keys=keys: deletion.delete_sessions(db, keys, before))  # type: ignore[misc]
            deleted += part
            await self._let_others_write()
        return deleted

    async def _let_others_write(self) -> None:
        self._committed(_DELETE_COMMITS)
        if self._checkpoint is not None:
            # Commits may have waited for the checkpoint. The next transaction of the thread would start before them.
            await asyncio.wait({self._checkpoint})
        await asyncio.sleep(_DELETE_PAUSE_S)

    async def record_change(self, entry: AuditEntry) -> None:
        """See `Store.record_change`."""
        await self._writer.write(lambda db: audit.add(db, entry))

    async def changes(self, limit: int, cursor: str | None = None, target: str = "") -> AuditPage:
        """See `Store.changes`."""
        return await self._in_thread(lambda db: audit.page(db, limit, cursor, target))

    async def ping(self) -> None:
        """See `Store.ping`."""

        def write(connection: sqlite3.Connection) -> None:
            self._files.check(at_once=True)
            # On a full disk, an empty transaction would succeed, so one has to write something.
            transact(connection, rewrite_format)

        await self._in_thread(write)

    async def aclose(self) -> None:
        """See `Store.aclose`. Waiting changes are written first."""
        if self._checkpoint is not None:
            await self._checkpoint
        try:
            await self._writer.drain()
        finally:
            # The thread ends its running reads first.
            await self._loop.run_in_executor(self._thread, self._slow.close)
            self._hot.close()


if TYPE_CHECKING:
    _: type[Store] = SqliteStore
