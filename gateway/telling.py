"""Telling observers of calls and steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import ParamSpec

logger = logging.getLogger("gateway")
P = ParamSpec("P")


def tell(listeners: Iterable[Callable[P, None]], *args: P.args, **kwargs: P.kwargs) -> None:
    """Tell each of them. What one raises is logged: it is no fault of the call, and the others are told too."""
    for listener in listeners:
        try:
            listener(*args, **kwargs)
        except Exception:
            logger.exception("an observer failed")
