"""Read the time for stores: wall time, and a monotonic clock that no one can set."""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path
from typing import Final

from gateway.core.ledger.arithmetic import Moment

#: Linux's clock that also runs while the machine sleeps, else the monotonic clock. All processes see the same time.
_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", None)
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def now() -> Moment:
    """Return the current moment."""
    mono = time.clock_gettime(_CLOCK) if _CLOCK is not None else time.monotonic()
    return Moment(time.time(), mono, _boot())


@cache
def _boot() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        # Without an id, a reboot is noticed because the clock has gone back; see `Moment.is_same_boot`.
        return ""
