"""The embedded store: one SQLite file (WAL), several workers of one machine.

Settlements that arrive in one turn of the event loop share one transaction. It runs in the loop: a commit in WAL mode
without fsync costs tens of microseconds, less than handing it to a thread. What can wait does not: a locked database
raises at once and is tried again by timer until the deadline; checkpoints, lists and deletions run in a thread with
a connection of their own. `synchronous=NORMAL`: a commit survives the end of any process at once, and a power cut
from the last checkpoint of the operating system on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from gateway.core.errors import StoreUnavailable
from gateway.core.ids import first_id_at
from gateway.core.ports import CallRecord, Page, SessionKey, SessionView, Store
from gateway.core.usage import Charge, Totals
from gateway.stores.cursor import Cursor

T = TypeVar("T")

logger = logging.getLogger("gateway")

#: each entry takes the file from the version of its index to the next; entries are never changed once released
MIGRATIONS: Final = (
    """
    CREATE TABLE sessions (
        namespace TEXT NOT NULL, id TEXT NOT NULL, derived INTEGER NOT NULL,
        created_at REAL NOT NULL, last_call_at REAL NOT NULL,
        calls INTEGER NOT NULL, input_tokens INTEGER NOT NULL, output_tokens INTEGER NOT NULL,
        total_tokens INTEGER NOT NULL, cache_read_tokens INTEGER NOT NULL, cache_write_tokens INTEGER NOT NULL,
        reasoning_tokens INTEGER NOT NULL, estimated_tokens INTEGER NOT NULL, estimated_calls INTEGER NOT NULL,
        unpriced_calls INTEGER NOT NULL, cost_pico_usd INTEGER NOT NULL,
        PRIMARY KEY (namespace, id)
    ) WITHOUT ROWID;
    CREATE TABLE calls (
        call_id TEXT PRIMARY KEY, request_id TEXT, namespace TEXT, session_id TEXT, record BLOB NOT NULL
    ) WITHOUT ROWID;
    CREATE INDEX calls_of_session ON calls (namespace, session_id, call_id);
    CREATE INDEX calls_by_request ON calls (request_id) WHERE request_id IS NOT NULL;
    """,
)

_SUMS: Final = (
    "calls", "input_tokens", "output_tokens", "total_tokens", "cache_read_tokens", "cache_write_tokens",
    "reasoning_tokens", "estimated_tokens", "estimated_calls", "unpriced_calls", "cost_pico_usd",
)  # fmt: skip
#: a sum stops here, and an addend one step before: their sum still fits SQLite's 64 bits and never turns negative
_MAX_SUM: Final = 2**62
_SUM_LIST: Final = ", ".join(_SUMS)
_INSERT_CALL: Final = "INSERT OR IGNORE INTO calls VALUES (?, ?, ?, ?, ?)"
_ADD: Final = (
    f"INSERT INTO sessions (namespace, id, derived, created_at, last_call_at, {_SUM_LIST}) "  # noqa: S608  # constants
    f"VALUES ({', '.join('?' * (5 + len(_SUMS)))}) ON CONFLICT DO UPDATE SET "
    "last_call_at = max(last_call_at, excluded.last_call_at), "
    + ", ".join(f"{name} = min({name} + excluded.{name}, {_MAX_SUM})" for name in _SUMS)
    + f" RETURNING {_SUM_LIST}"
)
_TOTALS: Final = f"SELECT {_SUM_LIST} FROM sessions WHERE namespace = ? AND id = ?"  # noqa: S608  # constants
_VIEW: Final = f"SELECT namespace, id, derived, created_at, last_call_at, {_SUM_LIST} FROM sessions"  # noqa: S608
_IS_OLD: Final = "SELECT 1 FROM sessions WHERE namespace = ? AND id = ? AND last_call_at < ?"
_DELETE_CALLS: Final = (
    "DELETE FROM calls WHERE call_id IN (SELECT call_id FROM calls WHERE namespace = ? AND session_id = ? LIMIT ?)"
)
_DELETE_SESSION: Final = "DELETE FROM sessions WHERE namespace = ? AND id = ?"
_PICO: Final = Decimal(10) ** 12
_RETRY_S: Final = 0.002
#: commits between two checkpoints; a settlement touches about four pages
_CHECKPOINT_EVERY: Final = 250
_CHECKPOINT: Final = "PRAGMA wal_checkpoint({})"
#: pages (of 4 KiB) of the log from which on commits wait for it to be moved
_LOG_PAGES: Final = 2048
#: marks a file as ours ("GATE")
_APPLICATION_ID: Final = 0x47415445
#: call records that one transaction deletes: a few milliseconds in which nobody else can write
_DELETE_CHUNK: Final = 500
#: between two such transactions, longer than a settlement waits before it tries again
_DELETE_PAUSE_S: Final = 2.5 * _RETRY_S
#: what such a transaction writes, in commits of settlements
_DELETE_WEIGHT: Final = 25
_BUSY: Final = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})


@dataclass(slots=True)
class _Pending:
    """One settlement on its way into a transaction."""

    record: CallRecord
    encoded: bytes
    done: asyncio.Future[Totals]
    deadline: float


class SqliteStore:
    """See the module. Construct it where an event loop runs; `open` does the file work."""

    def __init__(self, path: Path, *, timeout_s: float = 0.25) -> None:
        self._path = path
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._pending: list[_Pending] = []
        self._flush_handle: asyncio.Handle | None = None
        self._since_checkpoint = 0
        self._checkpoint: asyncio.Task[None] | None = None
        self._paused = False
        self._thread_lock = threading.Lock()
        self._hot = _connect(path, busy_timeout_s=5)
        _migrate(self._hot)
        self._hot.execute("PRAGMA busy_timeout=0")
        self._slow = _connect(path, busy_timeout_s=timeout_s)

    async def settle(self, record: CallRecord) -> Totals:
        """See `Store.settle`."""
        done: asyncio.Future[Totals] = self._loop.create_future()
        encoded = msgspec.json.encode(record)
        self._pending.append(_Pending(record, encoded, done, self._loop.time() + self._timeout_s))
        self._schedule(0)
        return await done

    def _schedule(self, delay_s: float) -> None:
        if self._flush_handle is None and not self._paused:
            call = self._loop.call_later(delay_s, self._flush) if delay_s else self._loop.call_soon(self._flush)
            self._flush_handle = call

    def _flush(self) -> None:
        self._flush_handle = None
        batch, self._pending = self._pending, []
        self._flush_batch(batch)

    def _flush_batch(self, batch: list[_Pending]) -> None:
        try:
            results = self._write(batch)
        except sqlite3.Error as error:
            self._failed(batch, error)
            return
        except Exception as error:  # noqa: BLE001  # logged there; nobody may wait for ever
            self._refused(batch, error)
            return
        for pending, totals in zip(batch, results, strict=True):
            if not pending.done.done():
                pending.done.set_result(totals)
        self._committed(1)

    def _committed(self, weight: int) -> None:
        self._since_checkpoint += weight
        if self._since_checkpoint >= _CHECKPOINT_EVERY and (self._checkpoint is None or self._checkpoint.done()):
            self._since_checkpoint = 0
            self._checkpoint = self._loop.create_task(self._checkpoint_now())

    def _write(self, batch: list[_Pending]) -> list[Totals]:
        execute = self._hot.execute
        execute("BEGIN IMMEDIATE")
        try:
            results = [self._add(pending) for pending in batch]
            execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                execute("ROLLBACK")
            raise
        return results

    def _add(self, pending: _Pending) -> Totals:
        record, key = pending.record, pending.record.session
        namespace, session_id = (key.namespace, key.id) if key else (None, None)
        request_id = record.request_id if record.request_id != record.call_id else None
        inserted = self._hot.execute(_INSERT_CALL, (record.call_id, request_id, namespace, session_id, pending.encoded))
        if key is None:
            return Totals()
        if inserted.rowcount == 0 or record.charge is None:
            return _read_totals(self._hot, key)
        ended = record.started_at + record.duration_s
        values = (namespace, session_id, record.derived_session, record.started_at, ended, *_sums(record.charge))
        return _totals(self._hot.execute(_ADD, values).fetchone())

    def _failed(self, batch: list[_Pending], error: sqlite3.Error) -> None:
        now = self._loop.time()
        busy = getattr(error, "sqlite_errorcode", 0) & 0xFF in _BUSY
        waiting = [pending for pending in batch if busy and pending.deadline > now]
        for pending in batch:
            if pending not in waiting and not pending.done.done():
                pending.done.set_exception(_unavailable(self._path, error))
        if waiting:
            self._pending = waiting + self._pending
            self._schedule(_RETRY_S)

    def _refused(self, batch: list[_Pending], error: Exception) -> None:
        """A record holds what SQLite cannot take: it fails, and no other of its transaction does."""
        if len(batch) > 1:
            for pending in batch:
                self._flush_batch([pending])
            return
        for pending in batch:
            logger.error("the store cannot take call %s", pending.record.call_id, exc_info=error)
            if not pending.done.done():
                pending.done.set_exception(_unavailable(self._path, error))

    async def _checkpoint_now(self) -> None:
        """Move the log into the database. Beside a steady stream of commits it never catches up: then they wait."""
        with contextlib.suppress(StoreUnavailable):
            _, pages, moved = await self._in_thread(lambda db: db.execute(_CHECKPOINT.format("PASSIVE")).fetchone())
            if pages <= _LOG_PAGES or moved < 0:
                return
            self._paused = True
            try:
                await self._in_thread(lambda db: db.execute(_CHECKPOINT.format("RESTART")).fetchone())
            finally:
                self._paused = False
                if self._pending:
                    self._schedule(0)

    async def _in_thread(self, work: Callable[[sqlite3.Connection], T]) -> T:
        def locked() -> T:
            with self._thread_lock:
                return work(self._slow)

        try:
            return await asyncio.to_thread(locked)
        except sqlite3.Error as error:
            raise _unavailable(self._path, error) from error

    async def totals(self, session: SessionKey) -> Totals:
        """See `Store.totals`."""
        try:
            return _read_totals(self._hot, session)
        except sqlite3.Error as error:
            raise _unavailable(self._path, error) from error

    async def session(self, session: SessionKey) -> SessionView | None:
        """See `Store.session`."""

        def read(connection: sqlite3.Connection) -> SessionView | None:
            query = f"{_VIEW} WHERE namespace = ? AND id = ?"
            row = connection.execute(query, (session.namespace, session.id)).fetchone()
            return _view(row) if row else None

        return await self._in_thread(read)

    async def sessions(self, namespace: str | None, limit: int, cursor: str | None, sort: str) -> Page:
        """See `Store.sessions`."""
        after = Cursor.parse(cursor) if cursor else None
        column = "total_tokens" if sort == "tokens" else "last_call_at"

        def read(connection: sqlite3.Connection) -> list[SessionView]:
            conditions, values = ["1"], list[object]()
            if namespace is not None:
                conditions.append("namespace = ?")
                values.append(namespace)
            if after is not None:
                conditions.append(f"({column}, namespace, id) < (?, ?, ?)")
                values += after
            query = f"{_VIEW} WHERE {' AND '.join(conditions)} ORDER BY {column} DESC, namespace DESC, id DESC LIMIT ?"
            return [_view(row) for row in connection.execute(query, (*values, limit + 1))]

        views = await self._in_thread(read)
        more = str(Cursor.of(views[limit - 1], sort)) if len(views) > limit else None
        return Page(views[:limit], more)

    async def calls(self, session: SessionKey, limit: int) -> Sequence[CallRecord]:
        """See `Store.calls`."""
        query = "SELECT record FROM calls WHERE namespace = ? AND session_id = ? ORDER BY call_id DESC LIMIT ?"
        values = (session.namespace, session.id, limit)
        return await self._in_thread(lambda connection: [_record(row) for row in connection.execute(query, values)])

    async def call(self, namespace: str | None, request_id: str) -> CallRecord | None:
        """See `Store.call`."""
        condition = "" if namespace is None else " AND namespace = ?"
        scope = () if namespace is None else (namespace,)

        def read(connection: sqlite3.Connection) -> CallRecord | None:
            for column in ("call_id", "request_id"):
                query = f"SELECT record FROM calls WHERE {column} = ?{condition} ORDER BY call_id DESC LIMIT 1"  # noqa: S608
                row = connection.execute(query, (request_id, *scope)).fetchone()
                if row:
                    return _record(row)
            return None

        return await self._in_thread(read)

    async def reset(self, session: SessionKey) -> bool:
        """See `Store.reset`."""
        zero = ", ".join(f"{name} = 0" for name in _SUMS)
        query = f"UPDATE sessions SET {zero} WHERE namespace = ? AND id = ?"  # noqa: S608  # constants
        values = (session.namespace, session.id)
        return await self._in_thread(lambda connection: connection.execute(query, values).rowcount > 0)

    async def delete(self, session: SessionKey) -> bool:
        """See `Store.delete`."""
        return await self._delete([(session.namespace, session.id)], None) > 0

    async def expire(self, before: float) -> int:
        """See `Store.expire`. In pieces, so that a long list never keeps the file locked."""
        sessions = "SELECT namespace, id FROM sessions WHERE last_call_at < ? LIMIT ?"
        calls = "DELETE FROM calls WHERE call_id IN (SELECT call_id FROM calls WHERE call_id < ? LIMIT ?)"
        gone = 0
        while rows := await self._in_thread(lambda db: db.execute(sessions, (before, _DELETE_CHUNK)).fetchall()):
            gone += await self._delete(rows, before)
        oldest_kept = first_id_at(before)
        while await self._in_thread(lambda db: db.execute(calls, (oldest_kept, _DELETE_CHUNK)).rowcount):
            await self._let_others_write()
        return gone

    async def _delete(self, keys: Sequence[tuple[str, str]], before: float | None) -> int:
        """Delete sessions with their calls; those called last at or after `before` stay. Gives how many went.

        A session goes in the transaction that deletes the last of its calls: nobody ever sees calls without their
        session, one that is called meanwhile loses that call or keeps it together with its totals, and a deletion
        that a lock cut short is simply asked for again.
        """
        gone = 0
        while keys:
            some, keys = await self._in_thread(lambda db, keys=keys: _delete_some(db, keys, before))  # type: ignore[misc]
            gone += some
            await self._let_others_write()
        return gone

    async def _let_others_write(self) -> None:
        self._committed(_DELETE_WEIGHT)
        await asyncio.sleep(_DELETE_PAUSE_S)

    async def ping(self) -> None:
        """See `Store.ping`."""

        def write(connection: sqlite3.Connection) -> None:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")

        await self._in_thread(write)

    async def aclose(self) -> None:
        """See `Store.aclose`. What is still waiting to be written is written."""
        if self._checkpoint is not None:
            await self._checkpoint
        while self._pending:
            if self._flush_handle is not None:
                self._flush_handle.cancel()
            self._flush()
            await asyncio.sleep(_RETRY_S)
        with self._thread_lock:
            self._slow.close()
        self._hot.close()


def _connect(path: Path, *, busy_timeout_s: float) -> sqlite3.Connection:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not path.exists():
            path.touch(mode=0o600)
        connection = sqlite3.connect(path, timeout=busy_timeout_s, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute("PRAGMA wal_autocheckpoint=0")
    except (sqlite3.Error, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise StoreUnavailable(
            f"The store {path} cannot be opened: {reason}. Name another file in store.url."
        ) from error
    return connection


def _migrate(connection: sqlite3.Connection) -> None:
    connection.execute("BEGIN IMMEDIATE")
    try:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        owner = connection.execute("PRAGMA application_id").fetchone()[0]
        tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if tables and owner != _APPLICATION_ID:
            raise StoreUnavailable("The database was made by another program. Name another file in store.url.")
        if version > len(MIGRATIONS):
            raise StoreUnavailable(
                f"The database has format {version}, this gateway knows formats up to {len(MIGRATIONS)}. "
                "It was written by a newer version: install that one, or name another file in store.url."
            )
        for script in MIGRATIONS[version:]:
            for statement in _statements(script):
                connection.execute(statement)
        connection.execute(f"PRAGMA application_id={_APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version={len(MIGRATIONS)}")
        connection.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise


def _statements(script: str) -> Iterator[str]:
    """`executescript` would commit the transaction that keeps two starting workers apart."""
    return (statement for statement in map(str.strip, script.split(";")) if statement)


def _delete_some(
    connection: sqlite3.Connection, keys: Sequence[tuple[str, str]], before: float | None
) -> tuple[int, Sequence[tuple[str, str]]]:
    """One transaction of a deletion: how many sessions went, and those that still have to."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        result = _delete_within(connection, keys, before)
        connection.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise
    return result


def _delete_within(
    connection: sqlite3.Connection, keys: Sequence[tuple[str, str]], before: float | None
) -> tuple[int, Sequence[tuple[str, str]]]:
    gone, room = 0, _DELETE_CHUNK
    for index, key in enumerate(keys):
        if before is not None and not connection.execute(_IS_OLD, (*key, before)).fetchone():
            continue  # it was called since the list was read
        room -= connection.execute(_DELETE_CALLS, (*key, room)).rowcount
        if room == 0:
            return gone, keys[index:]
        gone += connection.execute(_DELETE_SESSION, key).rowcount
    return gone, ()


def _sums(charge: Charge) -> tuple[int, ...]:
    usage = charge.usage
    sums = (
        1,
        usage.input_tokens,
        usage.output_tokens,
        usage.total_tokens,
        usage.cache_read_tokens,
        usage.cache_write_tokens,
        usage.reasoning_tokens,
        charge.estimated_tokens,
        int(charge.source != "provider"),
        int(charge.cost_usd is None),
        int((charge.cost_usd or 0) * _PICO),
    )
    return tuple(min(value, _MAX_SUM) for value in sums)


def _read_totals(connection: sqlite3.Connection, key: SessionKey) -> Totals:
    row = connection.execute(_TOTALS, (key.namespace, key.id)).fetchone()
    return _totals(row) if row else Totals()


def _totals(row: Sequence[int]) -> Totals:
    calls, *tokens, cost_pico_usd = row
    return Totals(calls, *tokens, cost_usd=cost_pico_usd / _PICO)  # type: ignore[misc, arg-type]  # eleven columns, eleven fields


def _view(row: Sequence[Any]) -> SessionView:
    namespace, session_id, derived, created_at, last_call_at = row[:5]
    return SessionView(SessionKey(namespace, session_id), created_at, last_call_at, _totals(row[5:]), bool(derived))


def _record(row: tuple[bytes]) -> CallRecord:
    return msgspec.json.decode(row[0], type=CallRecord)


def _unavailable(path: Path, error: Exception) -> StoreUnavailable:
    return StoreUnavailable(f"The store {path.name} cannot be used: {error}. Try again shortly.")


if TYPE_CHECKING:
    _: type[Store] = SqliteStore
