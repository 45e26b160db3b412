"""Time out a response that sends nothing, with one timer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

#: How often an expired wait is checked again before it counts, and the seconds before each check. After the process was
#: suspended, this timer is due although data has arrived. Between two checks, the event loop can read that data.
_CHECKS: Final = 2
_CHECK_S: Final = 0.05


class ReadTimeout:
    """Call `expired` when a single wait between `begin` and `end` has lasted `limit` seconds.

    The timer checks when it is due. Time outside of a wait does not count.
    """

    __slots__ = ("_checks", "_expired", "_limit", "_loop", "_since", "_timer")

    def __init__(self, limit: float, expired: Callable[[], object]) -> None:
        self._limit = limit
        self._expired = expired
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None
        self._checks = 0
        self._timer = self._loop.call_later(limit, self._check)

    def begin(self) -> None:
        """Begin a wait."""
        self._since = self._loop.time()

    def end(self) -> None:
        """End a wait."""
        self._since = None

    def stop(self) -> None:
        """Stop the timer."""
        self._timer.cancel()

    def _check(self) -> None:
        waited = 0.0 if self._since is None else self._loop.time() - self._since
        if waited < self._limit:
            self._checks = 0
            self._timer = self._loop.call_later(self._limit - waited, self._check)
        elif self._checks < _CHECKS:
            self._checks += 1
            self._timer = self._loop.call_later(_CHECK_S, self._check)
        else:
            self._expired()
