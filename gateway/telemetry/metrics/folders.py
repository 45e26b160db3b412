"""Create the folder of metric files that workers share, and remove folders of killed gateways."""

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
#: locked by the process that created the folder
_LOCK: Final = "serve.lock"
#: Seconds for which a folder without locks is kept: its process may have just created it and not locked it yet.
_MIN_AGE_S: Final = 60.0


@contextlib.contextmanager
def shared_folder(base: Path | None = None, now: Callable[[], float] = time.time) -> Iterator[Path]:
    """Create a folder for metric files and remove it at the end. Remove folders of killed processes first.

    Args:
        base: the parent folder; None for the system's folder of temporary files.
        now: returns Unix time in seconds.
    """
    base = Path(tempfile.gettempdir()) if base is None else base
    remove_abandoned(base, now())
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=base, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with (folder / _LOCK).open("wb") as lock:
            # Some network file systems have no locks. The folder then stays on disk if this process is killed.
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield folder


def remove_abandoned(base: Path, now: float) -> None:
    """Remove this user's metric folders that no process has locked.

    Args:
        base: the parent folder.
        now: Unix time in seconds.
    """
    for folder in base.glob(f"{_PREFIX}*"):
        # Another process may remove the folder at the same time, and a folder that cannot be removed does no harm.
        with contextlib.suppress(OSError):
            if _may_be_removed(folder, now) and not _is_in_use(folder):
                shutil.rmtree(folder)


def _may_be_removed(folder: Path, now: float) -> bool:
    """Return True for a folder of this user that is old enough; False for a symbolic link."""
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and now - status.st_mtime > _MIN_AGE_S


def _is_in_use(folder: Path) -> bool:
    """Return True if a process has locked a file of the folder, or if locks cannot be checked."""
    files = [*folder.glob("*.values"), *folder.glob(_LOCK)]
    return any(_is_locked(file) for file in files)


def _is_locked(file: Path) -> bool:
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False
