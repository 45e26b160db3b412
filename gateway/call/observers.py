"""Notify observers of settled calls and of steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import ParamSpec

from gateway.core.ledger.session_key import SessionKey
from gateway.core.steps import Agent, StepChange, StepState

logger = logging.getLogger("gateway")
P = ParamSpec("P")


def notify(listeners: Iterable[Callable[P, None]], *args: P.args, **kwargs: P.kwargs) -> None:
    """Call each listener. If one raises an error, it is logged, and the others are still called.

    An error of an observer must not fail the call.
    """
    for listener in listeners:
        try:
            listener(*args, **kwargs)
        except Exception:
            logger.exception("an observer failed")


def notify_step(
    listeners: Iterable[Callable[[StepChange], None]],
    session: SessionKey,
    agent: Agent,
    places: tuple[StepState, StepState],
    *,
    at: float,
    tools: Sequence[str] = (),
) -> None:
    """Notify the listeners that an agent has moved to another step, or to another entry of a sequence.

    Nothing happens if both states have the same position.

    Args:
        listeners: are called with the change.
        session: the session of the agent.
        agent: the agent that moved.
        places: its states before and after.
        at: Unix time in seconds.
        tools: the tool calls that moved it; empty if something else did.
    """
    before, after = places
    if (before.active, before.index) == (after.active, after.index):
        return
    change = StepChange(
        session, agent.name, before.active, after.active, agent.finished_entries(after), tuple(tools), at
    )
    notify(listeners, change)
