"""Notify observers of settled calls and of steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import ParamSpec

from gateway.core.ledger.session_key import SessionKey
from gateway.core.steps import Agent, StepChange, StepState

logger = logging.getLogger("gateway")
P = ParamSpec("P")


def tell(listeners: Iterable[Callable[P, None]], *args: P.args, **kwargs: P.kwargs) -> None:
    """Tell each of them. What one raises is logged: it is no fault of the call, and the others are told too."""
    for listener in listeners:
        try:
            listener(*args, **kwargs)
        except Exception:
            logger.exception("an observer failed")


def tell_step(
    listeners: Iterable[Callable[[StepChange], None]],
    session: SessionKey,
    agent: Agent,
    places: tuple[StepState, StepState],
    *,
    at: float,
    tools: Sequence[str] = (),
) -> None:
    """Tell of an agent that went from one place to another; nothing where they are the same.

    `places`: before and after; `at`: seconds since the epoch; `tools`: those that moved it, none where none did.
    """
    before, after = places
    if (before.active, before.index) == (after.active, after.index):
        return
    change = StepChange(session, agent.name, before.active, after.active, agent.place(after), tuple(tools), at)
    tell(listeners, change)
