"""The numbers of one worker by name: in its memory, or in files that the other workers of a machine read.

A number in a file is written like one in memory, as the file is mapped into it; what was counted stays when its worker
is killed. A new worker goes on with the numbers of one that is gone, so that no count ever falls.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Final, cast

#: numbers of one worker; those beyond it are counted nowhere
MOST_SLOTS: Final = 32_768
_WIDTH: Final = 8


@dataclass(frozen=True, slots=True)
class Name:
    """A number's name: `series` as it is shown, with its labels; `family`: the metric it belongs to."""

    family: str
    series: str


class Slots:
    """See the module. `values[slot(name)]` is a number; the first slot takes what there is no room for.

    Args:
        folder: where the files of all workers are; None: in memory.
        transient: metrics that say how things are now: those of a worker that is gone say nothing.
    """

    def __init__(self, folder: Path | None = None, transient: Iterable[str] = ()) -> None:
        self._folder = folder
        self._transient = frozenset(transient)
        self._slots: dict[Name, int] = {}
        self._names: int | None = None
        self.worker = 1
        self.values: MutableSequence[float] = array("d", bytes(_WIDTH * MOST_SLOTS))
        if folder is not None:
            self._open(folder)

    def _open(self, folder: Path) -> None:
        """Take the files of a worker that is gone, or new ones."""
        for self.worker in count(1):
            values = os.open(folder / f"{self.worker}.values", os.O_RDWR | os.O_CREAT, 0o600)
            if _lock(values):
                break
            os.close(values)
        os.ftruncate(values, _WIDTH * MOST_SLOTS)
        # The file stays open, and so locked, for as long as this process lives.
        mapped = memoryview(mmap.mmap(values, _WIDTH * MOST_SLOTS)).cast("d")
        self.values = cast("MutableSequence[float]", mapped)
        names = folder / f"{self.worker}.names"
        known = _names_in(names)
        self._names = os.open(names, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.ftruncate(self._names, sum(len(_line(name)) for name in known))
        self._slots = {name: number for number, name in enumerate(known, 1)}
        for name, number in self._slots.items():
            if name.family in self._transient:
                self.values[number] = 0.0

    def slot(self, family: str, series: str) -> int:
        """Where a number is kept; it begins with zero."""
        name = Name(family, series)
        known = self._slots.get(name)
        if known is not None:
            return known
        number = len(self._slots) + 1
        if number >= MOST_SLOTS:
            return 0
        if self._names is not None:
            os.write(self._names, _line(name))
        self._slots[name] = number
        return number

    def read(self) -> dict[Name, float]:
        """The numbers of all workers, added up by name."""
        found: dict[Name, float] = {}
        for names, values, is_there in self._all():
            for number, name in enumerate(names, 1):
                if is_there or name.family not in self._transient:
                    found[name] = found.get(name, 0.0) + values[number]
        return found

    def _all(self) -> Iterator[tuple[Sequence[Name], Sequence[float], bool]]:
        """Names, numbers and whether its process is there, of each worker."""
        yield list(self._slots), self.values, True
        for file in self._folder.glob("*.names") if self._folder is not None else ():
            if file.stem != str(self.worker):
                names = _names_in(file)
                numbers = array("d")
                numbers.frombytes(file.with_suffix(".values").read_bytes()[: _WIDTH * (len(names) + 1)])
                yield names, numbers, _is_held(file.with_suffix(".values"))


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
    """Those that were written to their end."""
    if not file.exists():
        return []
    *lines, _ = file.read_bytes().decode().split("\n")
    return [Name(*line.split(" ", 1)) for line in lines]


def _lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_held(file: Path) -> bool:
    """Whether a process has it."""
    looked_at = os.open(file, os.O_RDWR)
    try:
        return not _lock(looked_at)
    finally:
        os.close(looked_at)
