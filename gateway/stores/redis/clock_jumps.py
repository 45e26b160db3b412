"""Notice that a server's clock was set ahead, so that no lease ends too early.

Whoever looks for such leases regularly sees a leap by its own clock, and leaves each of them the time to be renewed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

#: seconds by which a clock may be further ahead without a leap: replies take their time
_SLACK_S: Final = 1.0
#: the longest lease there is, for a hold that does not say its own
_LONGEST_S: Final = 3600.0


class ClockJumps:
    """The leaps of one server. `moment`: a clock in seconds that nobody sets."""

    def __init__(self, moment: Callable[[], float]) -> None:
        self._moment = moment
        #: by how much the server's clock was ahead of ours at the last look; before the first, nothing is a leap
        self._ahead_s = math.inf
        self._leapt_at = -math.inf

    def look(self, now: int) -> None:
        """Take note of the server's clock, in microseconds."""
        at = self._moment()
        ahead_s = now / 1e6 - at
        if ahead_s > self._ahead_s + _SLACK_S:
            self._leapt_at = at
        self._ahead_s = ahead_s

    def leaves(self, lease: bytes | None) -> bool:
        """Whether to leave a hold alone whose lease (microseconds) is over: the last leap is no further back."""
        lease_s = _LONGEST_S if lease is None else int(lease) / 1e6
        return self._moment() - self._leapt_at <= lease_s
