"""Notice that a server's clock was set ahead, so that no lease ends too early.

A worker that searches for ended leases regularly sees a jump by its own clock. It then leaves each hold the time to be
renewed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

#: seconds by which the server's clock may be further ahead without counting as a jump: replies take time
_SLACK_S: Final = 1.0
#: the longest lease, for a hold whose lease is not stored
_LONGEST_S: Final = 3600.0


class ClockJumps:
    """Detects jumps of one server's clock. `monotonic`: returns seconds of this worker's monotonic clock."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        #: how far the server's clock was ahead of `monotonic` at the last check; infinite before the first check, so
        #: that the first one sees no jump
        self._ahead_s = math.inf
        self._jumped_at = -math.inf

    def check(self, now: int) -> None:
        """Compare the server's clock, in microseconds, with the clock of this worker."""
        at = self._monotonic()
        ahead_s = now / 1e6 - at
        if ahead_s > self._ahead_s + _SLACK_S:
            self._jumped_at = at
        self._ahead_s = ahead_s

    def may_be_renewed(self, lease: bytes | None) -> bool:
        """Return True if the last jump is less than this lease (microseconds) ago: the hold may still be renewed."""
        lease_s = _LONGEST_S if lease is None else int(lease) / 1e6
        return self._monotonic() - self._jumped_at <= lease_s
