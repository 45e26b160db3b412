"""Share a folder of metric files between workers, and remove those of killed ones."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

_PREFIX: Final = "gateway-metrics-"
#: held by the process that made the folder
_LOCK: Final = "serve.lock"
#: seconds that a folder without locks is left in place: its process may have made it just now
_SETTLING_S: Final = 60.0


@contextlib.contextmanager
def shared_folder(base: Path | None = None, now: Callable[[], float] = time.time) -> Iterator[Path]:
    """Make a folder for metrics and remove it at the end; before, remove those whose processes were killed.

    `base`: where such folders are; None: the folder for temporary files.
    """
    base = Path(tempfile.gettempdir()) if base is None else base
    remove_abandoned(base, now())
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=base, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with (folder / _LOCK).open("wb") as lock:
            # On a disk without locks this folder stays if the process is killed.
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield folder


def remove_abandoned(base: Path, now: float) -> None:
    """Remove the folders of this user that no process holds; `now`: seconds since the epoch."""
    for folder in base.glob(f"{_PREFIX}*"):
        # Another process may remove it at the same time, and a folder that cannot be removed does no harm.
        with contextlib.suppress(OSError):
            if _is_own(folder, now) and not _is_held(folder):
                shutil.rmtree(folder)


def _is_own(folder: Path, now: float) -> bool:
    """Return whether it is a folder of this user (no link to one) that was not made just now."""
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and now - found.st_mtime > _SETTLING_S


def _is_held(folder: Path) -> bool:
    """Return whether a process holds a lock in the folder, or it cannot be told."""
    files = [*folder.glob("*.values"), *folder.glob(_LOCK)]
    return any(_is_locked(file) for file in files)


def _is_locked(file: Path) -> bool:
    looked_at = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(looked_at, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(looked_at)
    return False
