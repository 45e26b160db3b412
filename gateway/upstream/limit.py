"""Limit the number of calls at once; the others wait in order."""

from __future__ import annotations

import asyncio


class ConnectionLimit:
    """Limit the number of calls at once. Faster than `asyncio.Semaphore` if hardly any call has to wait."""

    def __init__(self, most: int) -> None:
        self._free = most
        #: the waiting calls, in the order in which they arrived
        self._waiting: dict[asyncio.Future[None], None] = {}

    def try_take(self) -> bool:
        """Take a place if one is free, and return whether it was taken. While calls wait, no place is free."""
        if not self._free:
            return False
        self._free -= 1
        return True

    async def take(self) -> None:
        """Wait for a place, and take it."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[turn] = None
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                # The place was given in the same moment, so it is passed to the next waiting call.
                self.give_back()
            raise
        finally:
            self._waiting.pop(turn, None)

    def give_back(self) -> None:
        """Give a place back; the call that has waited longest gets it."""
        for turn in self._waiting:
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
