"""Servers of tests that have ended, stopped while the next one runs: each takes a fifth of a second, and only waits."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from tests.support.timing import LIMIT_S

_threads = ThreadPoolExecutor(4, "stopping")
_under_way: list[Future[object]] = []


def soon(stop: Callable[[], object]) -> None:
    """Have it done beside the tests that follow; `wait` tells what went wrong in it."""
    _under_way.append(_threads.submit(stop))


def wait() -> None:
    """Until all that was begun is done.

    Raises:
        Exception: what went wrong in one of them.
    """
    while _under_way:
        _under_way.pop().result(LIMIT_S)
