"""Time limits that a slow machine keeps: count work where possible, otherwise wait with a generous limit."""

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

#: Correct code needs a small part of this time even on a slow machine. Wrong code has to need several times as long, so
#: tests make it take minutes or forever.
LIMIT_S: Final = 15.0


@contextmanager
def in_time(at_least: float = 0.0, at_most: float = LIMIT_S) -> Iterator[None]:
    """Fail unless the block takes at least `at_least` and less than `at_most` seconds."""
    started = time.monotonic()
    yield
    took = time.monotonic() - started
    assert at_least <= took < at_most, f"it took {took:.2f} s"


def assert_ends(work: Callable[[], object]) -> None:
    """Run work in a thread and fail if it does not end within the limit."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert not thread.is_alive(), "it does not end"


async def eventually(condition: Callable[[], object], what: str = "") -> None:
    """Let the event loop run until the condition holds."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"did not happen within {LIMIT_S:g} s: {what or condition}"
        await asyncio.sleep(0.005)


class _SkippingSelector(selectors.DefaultSelector):
    """Skip timers: advance the clock by the timeout instead of waiting."""

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
        self._clock = _SkippingSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def run_without_waiting(work: Coroutine[Any, Any, None]) -> None:
    """Run work on an event loop whose clock skips all waits."""
    with asyncio.Runner(loop_factory=_SkippingLoop) as runner:
        runner.run(work)


@asynccontextmanager
async def count_loop_turns() -> AsyncIterator[Callable[[], int]]:
    """Yield a function that returns how many turns the event loop has made since."""
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


def count_calls(work: Callable[[], object]) -> int:
    """Return how many functions `work` calls, including C functions: a cost that does not depend on the machine."""
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
