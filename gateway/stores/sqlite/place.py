"""Notice that the store's files were moved or deleted."""

from __future__ import annotations

import contextlib
import math
import sqlite3
import time
from pathlib import Path
from typing import Final

#: seconds between two looks: one costs a tenth of a transaction
_LOOKS_S: Final = 0.1


class FilesReplaced(sqlite3.OperationalError):
    """The files that are open are not those that stand there now."""


class FilesUnknown(sqlite3.OperationalError):
    """Nobody can say which files stand there now."""


class StoreFiles:
    """The three open files of a store: the database, its log (-wal) and the log's index (-shm)."""

    def __init__(self, path: Path) -> None:
        self._paths = [path.with_name(path.name + end) for end in ("", "-wal", "-shm")]
        self._opened = self._found()
        self._looked_at = time.monotonic()

    def check(self, *, at_once: bool = False) -> None:
        """Make sure that they are where they were. Looks no more often than every `_LOOKS_S`, unless `at_once`.

        Raises:
            Moved: one is not, or another file is in its place.
            Hidden: that cannot be seen.
        """
        now = time.monotonic()
        if not at_once and now - self._looked_at < _LOOKS_S:
            return
        self._looked_at = -math.inf
        try:
            found = self._found()
        except OSError as error:
            raise FilesUnknown(f"its files cannot be found any more, {error.strerror}") from error
        if found != self._opened:
            raise FilesReplaced("its files were deleted, moved or replaced while they were open")
        self._looked_at = now

    def _found(self) -> list[tuple[int, int] | None]:
        return [_file_at(path) for path in self._paths]


def _file_at(path: Path) -> tuple[int, int] | None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        found = path.stat()
        return found.st_dev, found.st_ino
    return None
