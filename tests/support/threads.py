"""A thread pool that counts the functions submitted to it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class CountedThreads(ThreadPoolExecutor):
    """Count the submitted functions."""

    handed = 0

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        self.handed += 1
        return super().submit(fn, *args, **kwargs)
