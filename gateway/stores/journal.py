"""Write call records that the store did not take to journal files, which survive the worker.

- Each line holds a checksum and a record. It is on the disk when `append` returns. A last line that a crash cut off is
  left out: its `append` never returned.
- A worker locks its own files while it lives. A file without a lock belongs to a worker that has ended: any other
  worker reads it, settles its records and deletes it.
- Settling is idempotent by call id, so a record may be read more than once.
- Notes about running calls have a file of their own, which each new note replaces.
- Records that the store refuses go to a third file. No worker reads it until an operator renames it.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import re
import secrets
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from gateway.core.record import CallRecord

logger = logging.getLogger("gateway")

_SUFFIX: Final = ".journal"
#: suffix of files with records that this version cannot settle: an operator has to look at them
_ASIDE: Final = ".unread"
#: name of one store's folder among those of other stores; see `StoreSettings.journal_path`
_STORE_FOLDER: Final = re.compile(r"[0-9a-f]{12}")
_RECORDS: Final = msgspec.json.Decoder(CallRecord)
#: Most bytes of a line. A record has a few kilobytes; one that lists 20,000 messages has a few megabytes.
_MOST_LINE_BYTES: Final = 64 * 1024 * 1024
#: bytes of a file that one read copies
_PIECE: Final = 1024 * 1024
#: the remedy in log messages
REMEDY: Final = "once a version that can read it runs here, rename the file so that it ends in .journal again"


class Journal:
    """The journal files of this worker, and those that ended workers left. May be used from any thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._file: int | None = None
        self._path: Path | None = None
        self._aside: tuple[int, Path] | None = None
        self._notes: tuple[int, Path] | None = None

    def write_warning(self) -> str | None:
        """Return a warning if the journal cannot be written, with the remedy; None if no obstacle is visible yet."""
        existing = next(path for path in (self._folder, *self._folder.parents) if os.path.exists(path))  # noqa: PTH110
        if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
            return None
        reason = "cannot be written" if existing.is_dir() else "is not a folder"
        where = "" if existing == self._folder else f", as {existing} {reason}"
        return (
            f"the journal {self._folder} cannot be written{where}. While the store is unavailable, calls would wait in "
            "memory and be lost with the process. Let the gateway's user write there, or set store.journal to another "
            "folder"
        )

    def other_stores_warning(self) -> str | None:
        """Return a warning if calls wait in the folders of other stores, with the remedy; None if there are none.

        They may belong to this store under a former address. Then no worker would read them.
        """
        if not _STORE_FOLDER.fullmatch(self._folder.name):
            return None
        folders = {path.parent for path in self._folder.parent.glob(f"*/*{_SUFFIX}")} - {self._folder}
        others = [one for one in sorted(folders) if _STORE_FOLDER.fullmatch(one.name) and [*Journal(one).left_over()]]
        if not others:
            return None
        return (
            f"calls that were not settled wait in the journals of other stores: {', '.join(map(str, others))}. If "
            f"store.url of this store has changed, move their files that end in {_SUFFIX} to {self._folder}; otherwise "
            "start a gateway with their store"
        )

    def append(self, record: CallRecord) -> None:
        """Append a record, which is on the disk when this returns.

        Raises:
            OSError, ValueError: the record is not on the disk.
        """
        line = _line(record)
        with self._lock:
            if self._file is None:
                self._file, self._path = self._create(_SUFFIX)
            elif _is_deleted(self._file):
                self._file, self._path = self._copy_deleted(self._file, _SUFFIX)
            _add(self._file, line)

    def note(self, records: Sequence[CallRecord]) -> None:
        """Write the records to settle if this worker dies with its calls still running. They replace the last notes.

        Raises:
            OSError, ValueError: these notes are not on the disk, but the last ones still are.
        """
        lines = b"".join(map(_line, records))
        with self._lock:
            old, made = self._notes, self._create(_SUFFIX) if records else None
            if made is not None:
                try:
                    _add(made[0], lines)
                except OSError:
                    _delete(*made)
                    raise
            self._notes = made
            if old is not None:
                _delete(*old)

    def set_aside(self, record: CallRecord) -> Path:
        """Write a record that the store refuses to a file that no worker reads by itself; return the path.

        Raises:
            OSError, ValueError: the record is not on the disk.
        """
        line = _line(record)
        with self._lock:
            if self._aside is None:
                self._aside = self._create(_ASIDE)
            elif _is_deleted(self._aside[0]):
                self._aside = self._copy_deleted(self._aside[0], _ASIDE)
            file, path = self._aside
            _add(file, line)
        return path

    def _copy_deleted(self, deleted: int, suffix: str) -> tuple[int, Path]:
        """Copy an open file that was deleted from outside, maybe with its folder, to a new file.

        Raises:
            OSError: there is no new file, and the old one is still open.
        """
        made = self._create(suffix)
        try:
            os.lseek(deleted, 0, os.SEEK_SET)
            while piece := os.read(deleted, _PIECE):
                _write(made[0], piece)
            os.fsync(made[0])
        except OSError:
            _delete(*made)
            raise
        os.close(deleted)
        return made

    def _create(self, suffix: str) -> tuple[int, Path]:
        """Create a file of this worker, and lock it."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        while True:
            # Always a new name: records that wait in another file must not be overwritten.
            path = self._folder / f"{time.time_ns()}-{os.getpid()}-{secrets.token_hex(4)}{suffix}"
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
            if _is_locked(file, path):
                return file, path
            os.close(file)

    def clear(self) -> None:
        """Delete the file, as all appended records are settled."""
        with self._lock:
            file, path = self._file, self._path
            self._file = self._path = None
            if file is not None and path is not None:
                _delete(file, path)

    def leave(self) -> None:
        """Close and unlock the file of appended records so that another worker can settle them.

        The notes about running calls stay with this worker.

        Raises:
            OSError: the file was deleted from outside and cannot be written again; it is still open.
        """
        with self._lock:
            if self._file is None:
                return
            if _is_deleted(self._file):
                self._file, self._path = self._copy_deleted(self._file, _SUFFIX)
            os.close(self._file)
            self._file = self._path = None

    def close(self) -> None:
        """Close and unlock all files so that another worker can settle their records."""
        try:
            self.leave()
        except OSError as error:
            logger.error("journal %s was deleted, and what it held is lost: %s", self._path, error)  # noqa: TRY400
        with self._lock:
            for made in (self._aside, self._notes):
                if made is not None:
                    os.close(made[0])
            self._aside = self._notes = None

    def left_over(self) -> Iterator[Left]:
        """Yield the files of workers that have ended, each locked until the next one is asked for."""
        for path in sorted(self._folder.glob(f"*{_SUFFIX}")):
            if path == self._path or (self._notes is not None and path == self._notes[1]):
                continue
            try:
                file = os.open(path, os.O_RDWR)
            except FileNotFoundError:
                continue
            except OSError as error:
                logger.error("journal %s cannot be read and is skipped: %s", path, error.strerror)  # noqa: TRY400
                continue
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Another worker may have settled and deleted it between the two steps.
                if path.exists():
                    yield Left(path)
            except BlockingIOError:
                continue
            except OSError as error:
                logger.error("journal %s cannot be locked and is skipped: %s", path, error.strerror)  # noqa: TRY400
            finally:
                os.close(file)


class Left:
    """A journal file that an ended worker left."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._has_unreadable = False

    def parts(self, most: int) -> Iterator[Sequence[CallRecord]]:
        """Yield the readable records in parts of at most `most`: after a long outage a file has any number of them."""
        with self.path.open("rb") as lines:
            records = self._records(lines)
            while part := [*itertools.islice(records, most)]:
                yield _one_per_call(part)

    def _records(self, lines: BinaryIO) -> Iterator[CallRecord]:
        while line := lines.readline(_MOST_LINE_BYTES):
            value = _value(line)
            record = _record(value) if value is not None else None
            if record is not None:
                yield record
            elif value is None and not line.endswith(b"\n"):
                logger.warning("journal %s: its last line is incomplete and was left out", self.path.name)
            else:
                self._has_unreadable = True

    def delete(self) -> None:
        """Delete the file, as its records are settled; rename it if lines cannot be read, as they are charges too."""
        if self._has_unreadable:
            aside = self.path.with_suffix(_ASIDE)
            self.path.rename(aside)
            logger.error(
                "journal %s holds records that are damaged or that this version cannot read; %s", aside, REMEDY
            )
        else:
            self.path.unlink(missing_ok=True)


def _one_per_call(records: Sequence[CallRecord]) -> Sequence[CallRecord]:
    """Return one record for each call, as records are settled in parallel: the one that replaces the others."""
    kept: dict[str, CallRecord] = {}
    for record in records:
        known = kept.get(record.call_id)
        if known is None or record.replaces(known):
            kept[record.call_id] = record
    return [*kept.values()]


def _delete(file: int, path: Path) -> None:
    """Close and delete a file of this worker.

    If it cannot be deleted, another worker will settle its records again, which charges nothing twice.

    Raises:
        OSError: the file is closed, but not deleted.
    """
    try:
        path.unlink(missing_ok=True)
    finally:
        os.close(file)


def _is_deleted(file: int) -> bool:
    """Return True if an open file was deleted from outside: no worker would find its records."""
    return not os.fstat(file).st_nlink


def _is_locked(file: int, path: Path) -> bool:
    """Lock a new file; return False if another worker treats it as left over and deletes it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return path.exists()


def _line(record: CallRecord) -> bytes:
    value = msgspec.json.encode(record)
    return b"%08x %b\n" % (zlib.crc32(value), value)


def _add(file: int, line: bytes) -> None:
    """Append a line and sync it to the disk, or append nothing."""
    end = os.lseek(file, 0, os.SEEK_END)
    try:
        _write(file, line)
        os.fsync(file)
    except OSError:
        # Half a line, as on a full disk, would make the next line unreadable.
        with contextlib.suppress(OSError):
            os.ftruncate(file, end)
        raise


def _write(file: int, line: bytes) -> None:
    written = 0
    while written < len(line):
        written += os.write(file, line[written:])


def _value(line: bytes) -> bytes | None:
    """Return the value of a line, or None if its checksum is wrong."""
    checksum, _, value = line.rstrip(b"\n").partition(b" ")
    return value if checksum == b"%08x" % zlib.crc32(value) else None


def _record(value: bytes) -> CallRecord | None:
    try:
        return _RECORDS.decode(value)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
