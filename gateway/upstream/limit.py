"""Limit the number of calls at once; the others wait in order."""

from __future__ import annotations

import asyncio


class ConnectionLimit:
    """What an `asyncio.Semaphore` is, where each call takes one, and hardly any has to wait."""

    def __init__(self, most: int) -> None:
        self._free = most
        #: those who wait, in the order in which they came
        self._waiting: dict[asyncio.Future[None], None] = {}

    def take(self) -> bool:
        """Take one, if one is free. None is as long as somebody waits."""
        if not self._free:
            return False
        self._free -= 1
        return True

    async def turn(self) -> None:
        """Wait for one, and take it."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[turn] = None
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                # It came in the same moment, and is for the next one.
                self.give()
            raise
        finally:
            self._waiting.pop(turn, None)

    def give(self) -> None:
        """Give one back: whoever has waited longest has it now."""
        for turn in self._waiting:
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
