"""Store the metric values of a worker in memory, or in memory-mapped files that other workers can read.

Each worker has two files: `N.values` holds one number per slot, `N.names` holds the series of each slot. Adding to a
value is a memory write in both cases. Values in files survive when their worker is killed.

A new worker takes over the files of a worker that ended, for two reasons:

- No counter ever falls.
- It also takes over the series, so limits on the number of series hold for all workers that ever used the files.

If the files cannot be written or locked, for example on a full disk, the worker counts in its own memory.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import math
import mmap
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence, Sequence
from itertools import count
from pathlib import Path
from typing import Final, cast

from gateway.core.values import dataclass

logger = logging.getLogger("gateway")

#: slots of one worker; series beyond this number are not counted
MAX_SLOTS: Final = 32_768
#: the value of a slot that is not shown; the slot stays reserved for its series
HIDDEN: Final = math.nan
_SLOT_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class Series:
    """One time series. `text`: its name and labels as Prometheus shows them; `family`: the metric it belongs to."""

    family: str
    text: str


class MetricSlots:
    """Values by slot: `values[slot(family, text)]` is the value of a series.

    The first slot is never shown: it receives the values of series for which there is no free slot.

    Args:
        folder: where all workers have their files; None to count in memory.
        transient: metrics that describe the present; those of a worker that ended are not shown.
        flock: locks a file, like `fcntl.flock`.
    """

    def __init__(
        self,
        folder: Path | None = None,
        transient: Iterable[str] = (),
        flock: Callable[[int, int], object] = fcntl.flock,
    ) -> None:
        self._folder = folder
        self._flock = flock
        self._transient = frozenset(transient)
        self._slots: dict[Series, int] = {}
        self._names_file: int | None = None
        #: a series could not be written to the file, and a warning was logged
        self._is_full = False
        self.worker = 1
        self.values: MutableSequence[float] = array("d", bytes(_SLOT_BYTES * MAX_SLOTS))
        if folder is not None:
            try:
                self._open(folder)
            except OSError as error:
                logger.warning("metrics of this worker are not shared with other workers: %s", error.strerror)

    def _open(self, folder: Path) -> None:
        """Take over the files of a worker that ended, or create new files.

        Raises:
            OSError: the files cannot be written or locked.
        """
        for self.worker in count(1):
            values = os.open(folder / f"{self.worker}.values", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                if self._try_lock(values):
                    _fill(values)
                    self._open_names(folder / f"{self.worker}.names")
                    break
            except OSError:
                os.close(values)
                raise
            os.close(values)
        # The file stays open, and therefore locked, until this process ends.
        mapped = memoryview(mmap.mmap(values, _SLOT_BYTES * MAX_SLOTS)).cast("d")
        self.values = cast("MutableSequence[float]", mapped)
        for series, slot in self._slots.items():
            if series.family in self._transient:
                self.values[slot] = HIDDEN

    def _open_names(self, file: Path) -> None:
        """Load the series of a file and open it for appending. Remove a line that was not written completely."""
        known = _read_names(file)
        self._names_file = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.ftruncate(self._names_file, sum(len(_line(series)) for series in known))
        self._slots = {series: slot for slot, series in enumerate(known, 1)}

    def _try_lock(self, file: int, kind: int = fcntl.LOCK_EX) -> bool:
        """Lock a file and return True, or return False if another process has locked it.

        Raises:
            OSError: files cannot be locked here, as on some network file systems.
        """
        try:
            self._flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _is_in_use(self, file: Path) -> bool:
        """Return True if a process has locked the file.

        The lock is shared: two workers that check at the same time must not see each other's lock.
        """
        descriptor = os.open(file, os.O_RDONLY)
        try:
            return not self._try_lock(descriptor, fcntl.LOCK_SH)
        except OSError:
            return False
        finally:
            os.close(descriptor)

    def has(self, family: str, text: str) -> bool:
        """Return True if a series has a slot, perhaps one that an earlier worker reserved."""
        return Series(family, text) in self._slots

    def series(self, family: str) -> list[str]:
        """Return the series of a metric that have a slot."""
        return [series.text for series in self._slots if series.family == family]

    def slot(self, family: str, text: str) -> int:
        """Return the slot of a series. Reserve one with the value 0 if it has none; return 0 if no slot is free."""
        series = Series(family, text)
        known = self._slots.get(series)
        if known is not None:
            return known
        slot = len(self._slots) + 1
        if slot >= MAX_SLOTS or not self._append_name(series):
            return 0
        self._slots[series] = slot
        return slot

    def _append_name(self, series: Series) -> bool:
        """Write a series to the file for other workers; return False if that failed.

        A line that was written in part is removed, because it would shift the slots of all later series.
        """
        if self._names_file is None:
            return True
        size = os.fstat(self._names_file).st_size
        try:
            _write(self._names_file, _line(series))
        except OSError as error:
            os.ftruncate(self._names_file, size)
            if not self._is_full:
                logger.warning("some metrics are not counted: %s", error.strerror)
            self._is_full = True
            return False
        self._is_full = False
        return True

    def read(self) -> dict[Series, float]:
        """Return the values of all workers, summed by series."""
        sums: dict[Series, float] = {}
        for names, values, is_running in self._workers():
            for slot, series in enumerate(names, 1):
                value = values[slot]
                if (is_running or series.family not in self._transient) and not math.isnan(value):
                    sums[series] = sums.get(series, 0.0) + value
        return sums

    def _workers(self) -> Iterator[tuple[Sequence[Series], Sequence[float], bool]]:
        """Yield the series and values of each worker, and True if its process is running."""
        yield list(self._slots), self.values, True
        for file in self._folder.glob("*.names") if self._folder is not None else ():
            if self._names_file is None or file.stem != str(self.worker):
                names = _read_names(file)
                values = array("d")
                values.frombytes(file.with_suffix(".values").read_bytes()[: _SLOT_BYTES * (len(names) + 1)])
                yield names, values, self._is_in_use(file.with_suffix(".values"))


def series_text(metric: str, labels: Mapping[str, str]) -> str:
    """Return the name of a series as Prometheus shows it: `metric{a="b"}`."""
    if not labels:
        return metric
    return metric + "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    text = value.encode("utf-8", "replace").decode()
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _line(series: Series) -> bytes:
    return f"{series.family} {series.text}\n".encode()


def _read_names(file: Path) -> list[Series]:
    """Return the series in a file, without a last line that is incomplete."""
    if not file.exists():
        return []
    *lines, _ = file.read_bytes().split(b"\n")
    return [Series(*line.decode().split(" ", 1)) for line in lines]


def _fill(file: int) -> None:
    """Extend a file to its full size with zeros.

    The zeros reserve space on the disk: a write to a mapped page for which the disk is full would kill the process.
    """
    size = os.fstat(file).st_size
    os.lseek(file, size, os.SEEK_SET)
    _write(file, bytes(max(0, _SLOT_BYTES * MAX_SLOTS - size)))


def _write(file: int, data: bytes) -> None:
    """Write all bytes to a file.

    Raises:
        OSError: the bytes cannot be written, or only a part of them.
    """
    if os.write(file, data) < len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
