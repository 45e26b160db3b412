"""Stop the servers of finished tests while the next test runs: stopping one takes 0.2 s of waiting."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from tests.support.timing import LIMIT_S

_threads = ThreadPoolExecutor(4, "stopping")
_under_way: list[Future[object]] = []


def soon(stop: Callable[[], object]) -> None:
    """Run `stop` in the background while tests continue; `wait` raises its errors."""
    _under_way.append(_threads.submit(stop))


def wait() -> None:
    """Wait until everything that was submitted is done.

    Raises:
        Exception: the error of one of the functions.
    """
    while _under_way:
        _under_way.pop().result(LIMIT_S)
