"""Notice that the store's files were moved or deleted."""

from __future__ import annotations

import math
import os
import sqlite3
import time
from pathlib import Path
from typing import Final

#: Seconds between two checks. A check costs a tenth of a transaction.
_CHECK_S: Final = 0.1


class FilesReplaced(sqlite3.OperationalError):
    """The open files are not those at the path any more."""


class FilesUnknown(sqlite3.OperationalError):
    """The files at the path cannot be read."""


class StoreFiles:
    """The three open files of a store: the database, its log (-wal) and the log's index (-shm)."""

    def __init__(self, path: Path) -> None:
        self._paths = [f"{path}{end}" for end in ("", "-wal", "-shm")]
        self._opened = self._identities()
        self._checked_at = time.monotonic()

    def check(self, *, at_once: bool = False) -> None:
        """Make sure that the open files are still at their paths: every `_CHECK_S` seconds, or now with `at_once`.

        Raises:
            FilesReplaced: a file is not at its path, or another one is.
            FilesUnknown: the paths cannot be read.
        """
        now = time.monotonic()
        if not at_once and now - self._checked_at < _CHECK_S:
            return
        # After a failure, check each time.
        self._checked_at = -math.inf
        try:
            current = self._identities()
        except OSError as error:
            raise FilesUnknown(f"its files cannot be found any more, {error.strerror}") from error
        if current != self._opened:
            raise FilesReplaced("its files were deleted, moved or replaced while they were open")
        self._checked_at = now

    def _identities(self) -> list[tuple[int, int] | None]:
        return [_identity(path) for path in self._paths]


def _identity(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)  # noqa: PTH116  # a `Path` builds its text for each call
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_dev, status.st_ino
