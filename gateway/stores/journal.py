"""Write call records that the store did not take to a file that survives the worker.

Each line holds a record behind its checksum, and is on the disk when `append` returns. A worker holds a lock on its own
file for as long as it lives; a file that nobody holds is read, settled and deleted by whoever finds it. Settling is
idempotent by the call's id, so that a record may be read more than once. What is noted of calls under way stands in a
file of its own, of which each takes the place of the one before. An end that a crash cut off is left out: its
`append` never returned. What the store refuses goes to a second file, which nobody reads until its name is changed.
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
#: of a file with what cannot be settled by this version: an operator has to look at it
_ASIDE: Final = ".unread"
#: the folder of one store among those of others; see `StoreSettings.journal_path`
_OF_A_STORE: Final = re.compile(r"[0-9a-f]{12}")
_RECORDS: Final = msgspec.json.Decoder(CallRecord)
#: bytes of one line; a record is a few kilobytes, with the fate of each of 20,000 messages a few megabytes
_LONGEST: Final = 64 * 1024 * 1024
#: bytes of a file that are copied at once
_PIECE: Final = 1024 * 1024
#: what the log advises an operator to do
REMEDY: Final = "once a version that can runs here, let the name of the file end in .journal again"


class Journal:
    """The file of this worker, and those that others left. May be used from any thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._file: int | None = None
        self._path: Path | None = None
        self._aside: tuple[int, Path] | None = None
        self._notes: tuple[int, Path] | None = None

    def obstacle(self) -> str | None:
        """What keeps it from being written, and what to do; None: nothing that shows before it is."""
        there = next(place for place in (self._folder, *self._folder.parents) if os.path.exists(place))  # noqa: PTH110
        if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
            return None
        why = "cannot be written" if there.is_dir() else "is no folder"
        where = "" if there == self._folder else f", as {there} {why}"
        return (
            f"the journal {self._folder} cannot be written{where}. While the store is away, calls would wait in memory "
            "and be lost with the process. Let the gateway's user write there, or name another folder as store.journal"
        )

    def elsewhere(self) -> str | None:
        """What waits in the folders of other stores beside ours, and what to do; None: nothing.

        It may be that of ours, under an address that it had before: nobody would read it.
        """
        if not _OF_A_STORE.fullmatch(self._folder.name):
            return None
        folders = {path.parent for path in self._folder.parent.glob(f"*/*{_SUFFIX}")} - {self._folder}
        others = [one for one in sorted(folders) if _OF_A_STORE.fullmatch(one.name) and [*Journal(one).left_over()]]
        if not others:
            return None
        return (
            f"calls that were not settled wait in the journals of other stores: {', '.join(map(str, others))}. If "
            f"store.url had another address for this store before, move their files that end in {_SUFFIX} to "
            f"{self._folder}; else start a gateway with the store that they are for"
        )

    def append(self, record: CallRecord) -> None:
        """Write a record down; it is on the disk when this returns.

        Raises:
            OSError, ValueError: it is not.
        """
        line = _line(record)
        with self._lock:
            if self._file is None:
                self._file, self._path = self._made(_SUFFIX)
            elif _is_deleted(self._file):
                self._file, self._path = self._saved(self._file, _SUFFIX)
            _add(self._file, line)

    def note(self, records: Sequence[CallRecord]) -> None:
        """Write down what is to be settled of calls under way should this worker die, in the place of the last notes.

        Raises:
            OSError, ValueError: they are not on the disk; the last notes still are.
        """
        lines = b"".join(map(_line, records))
        with self._lock:
            old, made = self._notes, self._made(_SUFFIX) if records else None
            if made is not None:
                try:
                    _add(made[0], lines)
                except OSError:
                    _drop(*made)
                    raise
            self._notes = made
            if old is not None:
                _drop(*old)

    def set_aside(self, record: CallRecord) -> Path:
        """Write a record down that the store cannot take, where nobody reads it unasked; in which file it is.

        Raises:
            OSError, ValueError: it is not.
        """
        line = _line(record)
        with self._lock:
            if self._aside is None:
                self._aside = self._made(_ASIDE)
            elif _is_deleted(self._aside[0]):
                self._aside = self._saved(self._aside[0], _ASIDE)
            file, path = self._aside
            _add(file, line)
        return path

    def _saved(self, orphaned: int, suffix: str) -> tuple[int, Path]:
        """A new file with what is in one of ours that somebody has deleted, maybe with its folder.

        Raises:
            OSError: there is none; the old one is still open.
        """
        made = self._made(suffix)
        try:
            os.lseek(orphaned, 0, os.SEEK_SET)
            while piece := os.read(orphaned, _PIECE):
                _write(made[0], piece)
            os.fsync(made[0])
        except OSError:
            _drop(*made)
            raise
        os.close(orphaned)
        return made

    def _made(self, suffix: str) -> tuple[int, Path]:
        """A new file of ours."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        while True:
            # Never a name that was there before: what waits in another file must not be written over.
            path = self._folder / f"{time.time_ns()}-{os.getpid()}-{secrets.token_hex(4)}{suffix}"
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
            if _is_ours(file, path):
                return file, path
            os.close(file)

    def clear(self) -> None:
        """Delete the file: all that was appended has been settled."""
        with self._lock:
            file, path = self._file, self._path
            self._file = self._path = None
            if file is not None and path is not None:
                _drop(file, path)

    def leave(self) -> None:
        """Leave what was appended to whoever finds it. What is noted of calls under way stays ours.

        Raises:
            OSError: somebody has deleted it, and it cannot be written anew; it is still open.
        """
        with self._lock:
            if self._file is None:
                return
            if _is_deleted(self._file):
                self._file, self._path = self._saved(self._file, _SUFFIX)
            os.close(self._file)
            self._file = self._path = None

    def close(self) -> None:
        """Leave what is in all its files to whoever finds it."""
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
        """Files of workers that are gone, each locked for as long as it is looked at."""
        for path in sorted(self._folder.glob(f"*{_SUFFIX}")):
            if path == self._path or (self._notes is not None and path == self._notes[1]):
                continue
            try:
                file = os.open(path, os.O_RDWR)
            except FileNotFoundError:
                continue
            except OSError as error:
                logger.error("journal %s cannot be read and is left alone: %s", path, error.strerror)  # noqa: TRY400
                continue
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Another worker may have settled and deleted it between the two steps.
                if path.exists():
                    yield Left(path)
            except BlockingIOError:
                continue
            except OSError as error:
                logger.error("journal %s cannot be locked and is left alone: %s", path, error.strerror)  # noqa: TRY400
            finally:
                os.close(file)


class Left:
    """A file that a worker left."""

    def __init__(self, path: Path) -> None:
        self.path = path
        #: whether a line of it could not be read
        self._is_odd = False

    def parts(self, most: int) -> Iterator[Sequence[CallRecord]]:
        """The records in it that can be read, so many at once: after a long time without a store it has any number."""
        with self.path.open("rb") as lines:
            records = self._records(lines)
            while part := [*itertools.islice(records, most)]:
                yield _once_each(part)

    def _records(self, lines: BinaryIO) -> Iterator[CallRecord]:
        while line := lines.readline(_LONGEST):
            value = _value(line)
            record = _record(value) if value is not None else None
            if record is not None:
                yield record
            elif value is None and not line.endswith(b"\n"):
                logger.warning("journal %s: its end is not whole and was left out", self.path.name)
            else:
                self._is_odd = True

    def delete(self) -> None:
        """Delete it, as its records are settled; where some could not be read, set it aside: they are charges, too."""
        if self._is_odd:
            aside = self.path.with_suffix(_ASIDE)
            self.path.rename(aside)
            logger.error(
                "journal %s holds records that are damaged or that this version cannot read; %s", aside, REMEDY
            )
        else:
            self.path.unlink(missing_ok=True)


def _once_each(records: Sequence[CallRecord]) -> Sequence[CallRecord]:
    """Of several records of a call, which are settled side by side, the one that the others would give way to."""
    kept: dict[str, CallRecord] = {}
    for record in records:
        known = kept.get(record.call_id)
        if known is None or record.replaces(known):
            kept[record.call_id] = record
    return [*kept.values()]


def _drop(file: int, path: Path) -> None:
    """Delete a file of ours. One that cannot be is found like that of a worker that is gone, and charges nobody twice.

    Raises:
        OSError: it is still there.
    """
    try:
        path.unlink(missing_ok=True)
    finally:
        os.close(file)


def _is_deleted(file: int) -> bool:
    """Whether somebody else has deleted a file of ours: nobody would find what is in it."""
    return not os.fstat(file).st_nlink


def _is_ours(file: int, path: Path) -> bool:
    """Lock a file that was just made, unless another worker has taken it for one left behind and deletes it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return path.exists()


def _line(record: CallRecord) -> bytes:
    value = msgspec.json.encode(record)
    return b"%08x %b\n" % (zlib.crc32(value), value)


def _add(file: int, line: bytes) -> None:
    """Have a line on the disk, or nothing of it."""
    end = os.lseek(file, 0, os.SEEK_END)
    try:
        _write(file, line)
        os.fsync(file)
    except OSError:
        # Half a line on a full disk would hide the ones behind it.
        with contextlib.suppress(OSError):
            os.ftruncate(file, end)
        raise


def _write(file: int, line: bytes) -> None:
    written = 0
    while written < len(line):
        written += os.write(file, line[written:])


def _value(line: bytes) -> bytes | None:
    """What stands behind the checksum; None where it does not agree."""
    checksum, _, value = line.rstrip(b"\n").partition(b" ")
    return value if checksum == b"%08x" % zlib.crc32(value) else None


def _record(value: bytes) -> CallRecord | None:
    try:
        return _RECORDS.decode(value)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
