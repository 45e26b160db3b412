"""Open the SQLite file, check that it is the gateway's, and migrate older formats."""

from __future__ import annotations

import hashlib
import json
import logging
import sqlite3
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gateway.core.errors import StoreUnavailable
from gateway.stores.damage import UnreadRecords
from gateway.stores.rollups import Rollups
from gateway.stores.sqlite import audit, usage
from gateway.stores.sqlite.transaction import transact

logger = logging.getLogger("gateway")

#: Each entry migrates the file from the version of its index to the next one. Released entries are never changed.
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
    # `changed_at` is before `value`: after a long value, reading it would need all pages of the value.
    """
    ALTER TABLE sessions ADD COLUMN trimmed_calls INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE sessions ADD COLUMN saved_tokens INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE sessions ADD COLUMN last_key TEXT;
    ALTER TABLE sessions ADD COLUMN last_residual INTEGER;
    CREATE TABLE states (
        namespace TEXT NOT NULL, id TEXT NOT NULL, changed_at REAL NOT NULL, value BLOB NOT NULL,
        PRIMARY KEY (namespace, id)
    ) WITHOUT ROWID;
    CREATE TABLE lessons (key TEXT PRIMARY KEY, changed_at REAL NOT NULL, value BLOB NOT NULL) WITHOUT ROWID;
    """,
    # Earlier usage of sessions counts against their future budgets.
    """
    CREATE TABLE accounts (
        kind TEXT NOT NULL, namespace TEXT NOT NULL, id TEXT NOT NULL,
        used_tokens INTEGER NOT NULL, used_nano_usd INTEGER NOT NULL, used_calls INTEGER NOT NULL,
        held_tokens INTEGER NOT NULL, held_nano_usd INTEGER NOT NULL, held_calls INTEGER NOT NULL,
        opened_wall REAL, opened_mono REAL, opened_boot TEXT, decided BLOB, changed_at REAL NOT NULL,
        PRIMARY KEY (kind, namespace, id)
    ) WITHOUT ROWID;
    INSERT INTO accounts SELECT 'session', namespace, id, total_tokens, cost_pico_usd / 1000, calls,
        0, 0, 0, NULL, NULL, NULL, NULL, last_call_at FROM sessions;
    CREATE TABLE holds (
        id TEXT PRIMARY KEY, units INTEGER NOT NULL, noted INTEGER NOT NULL, accounts TEXT NOT NULL,
        held_tokens INTEGER NOT NULL, held_nano_usd INTEGER NOT NULL, held_calls INTEGER NOT NULL,
        boot TEXT NOT NULL, mono REAL NOT NULL, wall REAL NOT NULL, lease_s REAL NOT NULL, value BLOB NOT NULL
    ) WITHOUT ROWID;
    CREATE TABLE keys (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
    CREATE TABLE results (
        handle TEXT NOT NULL, namespace TEXT NOT NULL, id TEXT NOT NULL, changed_at REAL NOT NULL, text BLOB NOT NULL,
        PRIMARY KEY (namespace, id, handle)
    );
    CREATE INDEX results_by_handle ON results (handle);
    """,
    # Bytes of a text before compression. The index contains all columns that their sum needs.
    """
    ALTER TABLE results ADD COLUMN size INTEGER NOT NULL DEFAULT 0;
    UPDATE results SET size = unpacked_size(text);
    CREATE INDEX results_by_size ON results (namespace, id, size);
    """,
    # How often an account and a session were set to zero. `calls.periods`: when an orphaned call was charged, see
    # `rows._Orphaned`.
    """
    ALTER TABLE accounts ADD COLUMN epoch INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE sessions ADD COLUMN resets INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE calls ADD COLUMN epochs BLOB;
    """,
    # A separate table, so that a call that asks for no tool need not write it.
    """
    CREATE TABLE tools (namespace TEXT NOT NULL, id TEXT NOT NULL, value BLOB NOT NULL, PRIMARY KEY (namespace, id));
    """,
    # The order in which calls were settled. Call ids only have the order in which they began.
    """
    CREATE TABLE latest (number INTEGER PRIMARY KEY, call_id TEXT NOT NULL, totals BLOB);
    """,
    # Without a rowid, each row of more than a thousand bytes has its own pages: the file is four times as large, and
    # more is written.
    """
    ALTER TABLE holds RENAME TO old_holds;
    CREATE TABLE holds (
        id TEXT PRIMARY KEY NOT NULL, units INTEGER NOT NULL, noted INTEGER NOT NULL, accounts TEXT NOT NULL,
        held_tokens INTEGER NOT NULL, held_nano_usd INTEGER NOT NULL, held_calls INTEGER NOT NULL,
        boot TEXT NOT NULL, mono REAL NOT NULL, wall REAL NOT NULL, lease_s REAL NOT NULL, value BLOB NOT NULL
    );
    INSERT INTO holds SELECT * FROM old_holds;
    DROP TABLE old_holds;
    ALTER TABLE calls RENAME TO old_calls;
    CREATE TABLE calls (
        call_id TEXT PRIMARY KEY NOT NULL, request_id TEXT, namespace TEXT, session_id TEXT, record BLOB NOT NULL,
        epochs BLOB
    );
    INSERT INTO calls SELECT * FROM old_calls ORDER BY call_id;
    DROP TABLE old_calls;
    CREATE INDEX calls_of_session ON calls (namespace, session_id, call_id);
    CREATE INDEX calls_by_request ON calls (request_id) WHERE request_id IS NOT NULL;
    """,
    # The steps of agents move from the state to the row of tools, which a call that asks for tools writes anyway.
    """
    ALTER TABLE tools ADD COLUMN steps BLOB;
    ALTER TABLE tools ADD COLUMN changed_at REAL NOT NULL DEFAULT 0;
    INSERT INTO tools (namespace, id, value, steps, changed_at)
        SELECT namespace, id, x'7b7d', steps_of(value), changed_at FROM states WHERE steps_of(value) IS NOT NULL
        ON CONFLICT DO UPDATE SET steps = excluded.steps, changed_at = excluded.changed_at;
    """,
    # Each page that a call writes costs as much as a statement. So calls get numbers in the order in which they were
    # settled (zero and below if that order is unknown), and holds are found without an index. No number is used twice:
    # `forgotten` is the highest number of a deleted call.
    """
    ALTER TABLE calls RENAME TO old_calls;
    CREATE TABLE calls (
        number INTEGER PRIMARY KEY, call_id TEXT NOT NULL UNIQUE, request_id TEXT, namespace TEXT, session_id TEXT,
        totals BLOB, epochs BLOB, record BLOB NOT NULL
    );
    INSERT INTO calls SELECT row_number() OVER (ORDER BY call_id) - (SELECT count(*) FROM old_calls),
        call_id, request_id, namespace, session_id, NULL, epochs, record
        FROM old_calls WHERE call_id NOT IN (SELECT call_id FROM latest) ORDER BY call_id;
    INSERT INTO calls SELECT max(number), call_id, request_id, namespace, session_id, totals, epochs, record
        FROM latest JOIN old_calls USING (call_id) GROUP BY call_id ORDER BY 1;
    CREATE TABLE forgotten (number INTEGER NOT NULL);
    INSERT INTO forgotten SELECT coalesce(max(number), 0) FROM latest;
    DROP TABLE old_calls;
    DROP TABLE latest;
    CREATE INDEX calls_of_session ON calls (namespace, session_id, call_id);
    CREATE INDEX calls_by_request ON calls (request_id) WHERE request_id IS NOT NULL;
    CREATE TRIGGER call_forgotten BEFORE DELETE ON calls WHEN old.number > (SELECT max(number) FROM forgotten) BEGIN
        UPDATE forgotten SET number = old.number;
    END;
    ALTER TABLE holds RENAME TO old_holds;
    CREATE TABLE holds (
        key INTEGER PRIMARY KEY, id TEXT NOT NULL, units INTEGER NOT NULL, noted INTEGER NOT NULL,
        accounts TEXT NOT NULL,
        held_tokens INTEGER NOT NULL, held_nano_usd INTEGER NOT NULL, held_calls INTEGER NOT NULL,
        boot TEXT NOT NULL, mono REAL NOT NULL, wall REAL NOT NULL, lease_s REAL NOT NULL, value BLOB NOT NULL
    );
    INSERT INTO holds SELECT hold_key(id), * FROM old_holds;
    DROP TABLE old_holds;
    """,
    # The frames of the last turn, and what they add to its residual, see `LastTurn`.
    """
    ALTER TABLE sessions ADD COLUMN last_frames INTEGER;
    ALTER TABLE sessions ADD COLUMN last_added INTEGER;
    ALTER TABLE sessions ADD COLUMN last_over INTEGER;
    """,
    # Responses of the session that its provider stores, see `CallRecord.kept`.
    """
    ALTER TABLE sessions ADD COLUMN kept TEXT;
    """,
    # Calls that were settled, and deleted with their session. Other accounts stay charged for them, once. `record` and
    # `periods` are kept of orphaned calls only.
    """
    CREATE TABLE gone (call_id TEXT PRIMARY KEY, epochs BLOB, record BLOB) WITHOUT ROWID;
    """,
    # The response id by which a later call continues from this one, see `CallRecord.answer`. NULL if none can continue;
    # then the index has no entry.
    """
    ALTER TABLE calls ADD COLUMN answer TEXT;
    CREATE INDEX calls_by_answer ON calls (namespace, answer, call_id) WHERE answer IS NOT NULL;
    """,
    # For lists of sessions, and of the calls of all sessions. Each index costs one more page per call. So sessions have
    # one index with the values of all orders: it has the order of the last calls, and is sorted for the others.
    """
    CREATE INDEX sessions_listed ON sessions (last_call_at, namespace, id, total_tokens, cost_pico_usd);
    CREATE INDEX calls_by_namespace ON calls (namespace, call_id) WHERE namespace IS NOT NULL;
    """,
    # What each subagent of a session used, see `AgentUse`.
    """
    CREATE TABLE agents (
        namespace TEXT NOT NULL, id TEXT NOT NULL, agent TEXT NOT NULL, parent TEXT, type TEXT, step TEXT,
        created_at REAL NOT NULL, last_call_at REAL NOT NULL, tools BLOB NOT NULL,
        calls INTEGER NOT NULL, input_tokens INTEGER NOT NULL, output_tokens INTEGER NOT NULL,
        total_tokens INTEGER NOT NULL, cache_read_tokens INTEGER NOT NULL, cache_write_tokens INTEGER NOT NULL,
        reasoning_tokens INTEGER NOT NULL, estimated_tokens INTEGER NOT NULL, estimated_calls INTEGER NOT NULL,
        unpriced_calls INTEGER NOT NULL, trimmed_calls INTEGER NOT NULL, saved_tokens INTEGER NOT NULL,
        cost_pico_usd INTEGER NOT NULL, PRIMARY KEY (namespace, id, agent)
    ) WITHOUT ROWID;
    """,
    # The closing call of an account, see `ledger.closing_mark`. NULL if there was none.
    """
    ALTER TABLE accounts ADD COLUMN closing TEXT;
    """,
    # Usage by hour and day, which is kept longer than sessions and calls, see `gateway.core.rollup`. The calls that the
    # file has are added by `_add_usage`. The newest calls of a namespace are found through its sessions.
    """
    DROP INDEX calls_by_namespace;
    CREATE TABLE usage (
        day INTEGER NOT NULL, labels TEXT NOT NULL, hour INTEGER NOT NULL, calls INTEGER NOT NULL,
        charged_calls INTEGER NOT NULL, refused_calls INTEGER NOT NULL, failed_calls INTEGER NOT NULL,
        unpriced_calls INTEGER NOT NULL, input_tokens INTEGER NOT NULL, cache_read_tokens INTEGER NOT NULL,
        output_tokens INTEGER NOT NULL, total_tokens INTEGER NOT NULL, cost_pico_usd INTEGER NOT NULL,
        PRIMARY KEY (day, labels, hour)
    ) WITHOUT ROWID;
    """,
    audit.TABLE,
)

#: the first format with the table `usage`
_WITH_USAGE: Final = 1 + next(number for number, script in enumerate(MIGRATIONS) if "CREATE TABLE usage" in script)
#: longest wait for another worker that migrates the file
_MAX_WAIT_MS: Final = 60_000
#: marks a file as the gateway's ("GATE")
_APPLICATION_ID: Final = 0x47415445


def connect(path: Path, *, busy_timeout_s: float) -> sqlite3.Connection:
    """Open the file, or create it if it does not exist."""
    connection = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not path.exists():
            path.touch(mode=0o600)
        connection = sqlite3.connect(path, timeout=busy_timeout_s, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute("PRAGMA wal_autocheckpoint=0")
    except (sqlite3.Error, OSError) as error:
        if connection is not None:
            connection.close()
        reason = error.strerror if isinstance(error, OSError) else error
        raise StoreUnavailable(
            f"The store {path} cannot be opened: {reason}. Name another file in store.url."
        ) from error
    return connection


def migrate(connection: sqlite3.Connection, path: Path) -> None:
    """Bring the file to the newest format, in one transaction."""
    is_due = True
    try:
        is_due = _format_of(connection) < len(MIGRATIONS)
        if is_due:
            # Another worker may be migrating the file: a gigabyte takes half a minute.
            connection.execute(f"PRAGMA busy_timeout={_MAX_WAIT_MS}")
        transact(connection, lambda db: _migrate_within(db, path))
    except sqlite3.Error as error:
        if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_READONLY:
            what, remedy = "be written", "Let the gateway write to it and to its folder"
        else:
            what = f"be brought to format {len(MIGRATIONS)}" if is_due else "be used"
            is_full = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_FULL
            remedy = "Make room on its disk" if is_full else "Check if another program has locked it"
        raise StoreUnavailable(
            f"The store {path} cannot {what}: {error}. {remedy}, or name another file in store.url."
        ) from error


def _migrate_within(connection: sqlite3.Connection, path: Path) -> None:
    version = _format_of(connection)
    owner = connection.execute("PRAGMA application_id").fetchone()[0]
    tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if tables and owner != _APPLICATION_ID:
        raise StoreUnavailable(f"The store {path} was made by another program. Name another file in store.url.")
    if version > len(MIGRATIONS):
        raise StoreUnavailable(
            f"The store {path} has format {version}, this gateway knows formats up to {len(MIGRATIONS)}. "
            "It was written by a newer version: install that one, or name another file in store.url."
        )
    connection.create_function("unpacked_size", 1, _decompressed_size)
    connection.create_function("steps_of", 1, _steps_of)
    connection.create_function("hold_key", 1, hold_key)
    if 0 < version < len(MIGRATIONS):
        logger.warning(
            "store %s: migrating its file from format %d to %d before calls are accepted; a large file takes minutes",
            path.name,
            version,
            len(MIGRATIONS),
        )
    for script in MIGRATIONS[version:]:
        for statement in _statements(script):
            connection.execute(statement)
    if 0 < version < _WITH_USAGE:
        _add_usage(connection)
    connection.execute(f"PRAGMA application_id={_APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version={len(MIGRATIONS)}")
    if version < len(MIGRATIONS):
        connection.execute("DROP VIEW IF EXISTS format")
        connection.execute(f"CREATE VIEW format AS SELECT {len(MIGRATIONS)} AS version")  # a number


def _add_usage(connection: sqlite3.Connection) -> None:
    """Add the calls that an older version has settled to the usage of their hours and days."""
    rollups, unread = Rollups(), UnreadRecords()
    for table in ("calls", "gone"):
        for call_id, value in connection.execute(f"SELECT call_id, record FROM {table} WHERE record IS NOT NULL"):  # noqa: S608  # constants
            # An older version wrote JSON, which names the session.
            record = unread.read(call_id, value, None)
            if record is not None:
                rollups.add(record)
    usage.fill(connection, rollups)


def _decompressed_size(compressed: object) -> int:
    """Return the bytes of a text; 0 if it is damaged, as it cannot be shown then."""
    try:
        return len(zlib.decompress(compressed)) if isinstance(compressed, bytes) else 0
    except zlib.error:
        return 0


def _steps_of(state: object) -> bytes | None:
    """Return the steps of a state as JSON; None if there are none, or the state cannot be read."""
    try:
        steps = json.loads(state)["steps"] if isinstance(state, bytes) else None
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return json.dumps(steps).encode() if steps else None


def rewrite_format(connection: sqlite3.Connection) -> None:
    """Write the file's current format number again: it writes a page without changing anything."""
    connection.execute(f"PRAGMA user_version={_format_of(connection)}")


def _format_of(connection: sqlite3.Connection) -> int:
    """Return the format number of the file: the larger one of those in the header and in the view `format`.

    A gateway that only knows formats up to 9 and still has the file open writes its own number into the header.
    """
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    if connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'format'").fetchone() is None:
        return version
    kept: int = connection.execute("SELECT version FROM format").fetchone()[0]
    return max(version, kept)


def hold_key(hold_id: str) -> int:
    """Return the key of a hold's row, a hash of 64 bits. In the unlikely case of a collision one hold is refused.

    The hash is part of the format, and must never change.
    """
    return int.from_bytes(hashlib.blake2b(hold_id.encode(), digest_size=8).digest(), "big", signed=True)


def _statements(script: str) -> Iterator[str]:
    """Split a script into statements.

    `executescript` cannot run it: that would commit the transaction which keeps two starting workers apart.
    """
    statement = ""
    for part in script.split(";")[:-1]:
        statement += part + ";"
        if sqlite3.complete_statement(statement):  # otherwise it is inside a trigger
            yield statement
            statement = ""
