"""Threads that tell whether anything was handed to them, however soon it was done."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class CountedThreads(ThreadPoolExecutor):
    """Counts what is handed to it."""

    handed = 0

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        self.handed += 1
        return super().submit(fn, *args, **kwargs)
