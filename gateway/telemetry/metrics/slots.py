"""Keep the numbers of a worker in memory, or in a file that other workers can read.

A number in a file is written like one in memory, as the file is mapped into it; what was counted stays when its worker
is killed. A new worker goes on with the numbers of one that is gone, so that no count ever falls, and with their names,
so that whoever bounds names has to count those too. Where the files cannot be written or locked, as on a full disk or
one that has no locks, a worker counts for itself.
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

#: numbers of one worker; those beyond it are counted nowhere
MOST_SLOTS: Final = 32_768
#: the value of a number that is not shown; its place stays its own
NOTHING: Final = math.nan
_WIDTH: Final = 8


@dataclass(frozen=True, slots=True)
class Name:
    """A number's name: `series` as it is shown, with its labels; `family`: the metric it belongs to."""

    family: str
    series: str


class MetricSlots:
    """See the module. `values[slot(name)]` is a number; the first slot takes what there is no room for.

    Args:
        folder: where the files of all workers are; None: in memory.
        transient: metrics that say how things are now: those of a worker that is gone say nothing.
        flock: locks a file, as the function of that name does.
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
        self._slots: dict[Name, int] = {}
        self._names_file: int | None = None
        #: whether a name could not be written, and the log has said so
        self._is_full = False
        self.worker = 1
        self.values: MutableSequence[float] = array("d", bytes(_WIDTH * MOST_SLOTS))
        if folder is not None:
            try:
                self._open(folder)
            except OSError as error:
                logger.warning("other workers do not see the figures of this one: %s", error.strerror)

    def _open(self, folder: Path) -> None:
        """Take the files of a worker that is gone, or new ones.

        Raises:
            OSError: they cannot be written or locked.
        """
        for self.worker in count(1):
            values = os.open(folder / f"{self.worker}.values", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                if self._lock(values):
                    _fill(values)
                    self._take(folder / f"{self.worker}.names")
                    break
            except OSError:
                os.close(values)
                raise
            os.close(values)
        # The file stays open, and so locked, for as long as this process lives.
        mapped = memoryview(mmap.mmap(values, _WIDTH * MOST_SLOTS)).cast("d")
        self.values = cast("MutableSequence[float]", mapped)
        for name, number in self._slots.items():
            if name.family in self._transient:
                self.values[number] = NOTHING

    def _take(self, names: Path) -> None:
        """Go on with the names in this file, without one that was not written to its end."""
        known = _names_in(names)
        self._names_file = os.open(names, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.ftruncate(self._names_file, sum(len(_line(name)) for name in known))
        self._slots = {name: number for number, name in enumerate(known, 1)}

    def _lock(self, file: int, kind: int = fcntl.LOCK_EX) -> bool:
        """Whether nobody else holds it; it is locked then.

        Raises:
            OSError: nobody can lock it, as on a disk without locks.
        """
        try:
            self._flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _is_held(self, file: Path) -> bool:
        """Whether a process is known to have it. Shared: two that look at once must not take each other for it."""
        looked_at = os.open(file, os.O_RDONLY)
        try:
            return not self._lock(looked_at, fcntl.LOCK_SH)
        except OSError:
            return False
        finally:
            os.close(looked_at)

    def knows(self, family: str, series: str) -> bool:
        """Whether a number has its place here, perhaps since a worker before this one."""
        return Name(family, series) in self._slots

    def series(self, family: str) -> list[str]:
        """The numbers of a metric that have their place here."""
        return [name.series for name in self._slots if name.family == family]

    def slot(self, family: str, series: str) -> int:
        """Where a number is kept; it begins with zero."""
        name = Name(family, series)
        known = self._slots.get(name)
        if known is not None:
            return known
        number = len(self._slots) + 1
        if number >= MOST_SLOTS or not self._is_noted(name):
            return 0
        self._slots[name] = number
        return number

    def _is_noted(self, name: Name) -> bool:
        """Whether the others find a name: what stands in the file in part would put all later ones in a wrong place."""
        if self._names_file is None:
            return True
        size = os.fstat(self._names_file).st_size
        try:
            _write(self._names_file, _line(name))
        except OSError as error:
            os.ftruncate(self._names_file, size)
            if not self._is_full:
                logger.warning("some figures are not counted: %s", error.strerror)
            self._is_full = True
            return False
        self._is_full = False
        return True

    def read(self) -> dict[Name, float]:
        """The numbers of all workers, added up by name."""
        found: dict[Name, float] = {}
        for names, values, is_there in self._all():
            for number, name in enumerate(names, 1):
                value = values[number]
                if (is_there or name.family not in self._transient) and not math.isnan(value):
                    found[name] = found.get(name, 0.0) + value
        return found

    def _all(self) -> Iterator[tuple[Sequence[Name], Sequence[float], bool]]:
        """Names, numbers and whether its process is there, of each worker."""
        yield list(self._slots), self.values, True
        for file in self._folder.glob("*.names") if self._folder is not None else ():
            if self._names_file is None or file.stem != str(self.worker):
                names = _names_in(file)
                numbers = array("d")
                numbers.frombytes(file.with_suffix(".values").read_bytes()[: _WIDTH * (len(names) + 1)])
                yield names, numbers, self._is_held(file.with_suffix(".values"))


def labelled(metric: str, labels: Mapping[str, str]) -> str:
    """`metric{a="b"}`."""
    if not labels:
        return metric
    return metric + "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    text = value.encode("utf-8", "replace").decode()
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _line(name: Name) -> bytes:
    return f"{name.family} {name.series}\n".encode()


def _names_in(file: Path) -> list[Name]:
    """The names in a file that were written to their end."""
    if not file.exists():
        return []
    *lines, _ = file.read_bytes().split(b"\n")
    return [Name(*line.decode().split(" ", 1)) for line in lines]


def _fill(file: int) -> None:
    """Give a file its size. With zeros: to touch a page that the disk has no room for would end the process."""
    size = os.fstat(file).st_size
    os.lseek(file, size, os.SEEK_SET)
    _write(file, bytes(max(0, _WIDTH * MOST_SLOTS - size)))


def _write(file: int, data: bytes) -> None:
    """Write all of it.

    Raises:
        OSError: it cannot be written, or only in part.
    """
    if os.write(file, data) < len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
