"""Bounds that a slow machine keeps: work is counted where it can be, and waited for without haste where it cannot."""

from __future__ import annotations

import asyncio
import selectors
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import FrameType
from typing import Any, Final

#: What is done in time takes a small part of it even on a slow machine; what is not has to take several times as long,
#: so a test makes the wrong way minutes long, or endless.
LIMIT_S: Final = 15.0


@contextmanager
def in_time(at_least: float = 0.0, at_most: float = LIMIT_S) -> Iterator[None]:
    """What is done inside takes at least and less than at most so many seconds."""
    started = time.monotonic()
    yield
    took = time.monotonic() - started
    assert at_least <= took < at_most, f"it took {took:.2f} s"


def ends(work: Callable[[], object]) -> None:
    """Do in a thread what may never end, and fail where it does not end in time."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert not thread.is_alive(), "it does not end"


async def eventually(condition: Callable[[], object], what: str = "") -> None:
    """Let the event loop run on until the condition holds."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"did not happen within {LIMIT_S:g} s: {what or condition}"
        await asyncio.sleep(0.005)


class _Skipping(selectors.DefaultSelector):
    """Waits for no timer: says what the time would be at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            return super().select(None)
        ready = super().select(0)
        self.now += 0 if ready else timeout
        return ready


class _SkippingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _Skipping()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def in_no_time(work: Coroutine[Any, Any, None]) -> None:
    """Do it where each wait takes as long as it says, on the loop's own clock, and no time on ours."""
    with asyncio.Runner(loop_factory=_SkippingLoop) as runner:
        runner.run(work)


@asynccontextmanager
async def turns_counted() -> AsyncIterator[Callable[[], int]]:
    """How many turns the event loop has made since, for whoever asks."""
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    turning = asyncio.create_task(turn())
    await asyncio.sleep(0)
    yield lambda: turns
    turning.cancel()


def calls_made(work: Callable[[], object]) -> int:
    """How many functions are called for it, those written in C among them: its amount on any machine."""
    number = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal number
        number += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return number
