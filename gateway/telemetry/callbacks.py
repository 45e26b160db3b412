"""Send events to a user's own code and to webhooks: calls, usage and steps.

An event is a mapping of what /api shows, made once and only where somebody wants it. Prompts and answers are in none.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from gateway.core.errors import ConfigError
from gateway.core.ids import call_id
from gateway.core.ledger.refusals import Allowance
from gateway.core.ledger.session_key import SessionKey
from gateway.core.ports import Observer
from gateway.core.record import PENDING, CallRecord
from gateway.core.steps import StepChange
from gateway.core.times import time_text
from gateway.core.usage import Totals
from gateway.core.values import dataclass
from gateway.telemetry.webhooks import WebhookSender

logger = logging.getLogger("gateway")
#: what a stranger's code may end with; one that calls `sys.exit` must not take the gateway with it
_FAULTS: Final = (Exception, SystemExit)

EVENTS: Final = ("on_usage", "on_finish", "on_step")
#: seconds that receivers have when the gateway stops
_MAX_WAIT_S: Final = 3.0
#: fields of a call that its usage event repeats
_CHARGED: Final = ("call_id", "request_id", "session", "provider", "model", "usage", "usage_source", "cost_usd")

Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Shapes:
    """How calls, sessions and totals are shown to whoever may see all."""

    call: Callable[[CallRecord], Event]
    session: Callable[[SessionKey], str]
    totals: Callable[[Totals], Event]


class CallbackObserver(Observer):
    """Tells a user's own observers, and webhooks."""

    def __init__(self, observers: Sequence[object], webhooks: Sequence[WebhookSender], shapes: Shapes) -> None:
        self._webhooks = webhooks
        self._shapes = shapes
        self._listeners = {name: [getattr(one, name) for one in observers if hasattr(one, name)] for name in EVENTS}
        self._wanted = {name for name in EVENTS if self._listeners[name]}
        self._wanted |= {name for webhook in webhooks for name in webhook.events}

    @property
    def is_idle(self) -> bool:
        """Whether there is nobody to tell anything."""
        return not self._wanted

    def record(self, call: CallRecord, totals: Totals | None, left: Allowance | None = None) -> None:
        """See `Observer.record`."""
        is_charged = call.charge is not None and "on_usage" in self._wanted
        if not is_charged and "on_finish" not in self._wanted:
            return
        shown = self._shapes.call(call)
        if is_charged:
            self._tell("on_usage", f"usage_{call.call_id}", self._usage(shown, totals, left))
        if "on_finish" in self._wanted:
            # Receivers know an event that is sent again by its id, and the call that is pending comes once more.
            kind = "pending" if call.outcome == PENDING else "finish"
            self._tell("on_finish", f"{kind}_{call.call_id}", shown)

    def _usage(self, call: Event, totals: Totals | None, left: Allowance | None) -> Event:
        is_priced = totals is not None and not totals.unpriced_calls
        return {
            **{name: call[name] for name in _CHARGED},
            "totals": self._shapes.totals(totals) if totals is not None else None,
            "total_cost_usd": f"{totals.cost_usd:.6f}" if totals is not None and is_priced else None,
            "budget": _left_json(left) if left is not None else None,
        }

    def stepped(self, change: StepChange) -> None:
        """See `Observer.stepped`."""
        if "on_step" in self._wanted:
            unique = call_id(time.time_ns() // 1_000_000, random.randbytes(10))  # noqa: S311  # no secret
            self._tell("on_step", f"step_{unique}", self._step(change))

    def _step(self, change: StepChange) -> Event:
        return {
            "session": self._shapes.session(change.session),
            "agent": change.agent,
            "step_before": change.step_before,
            "step": change.step,
            "index": change.index,
            "tools": change.tools,
            "at": time_text(change.at),
        }

    def _tell(self, name: str, message_id: str, data: Event) -> None:
        for listener in self._listeners[name]:
            try:
                listener(data)
            except _FAULTS:
                logger.exception("callbacks.observers: %s failed", getattr(listener, "__qualname__", name))
        receivers = [webhook for webhook in self._webhooks if name in webhook.events]
        if receivers:
            body = msgspec.json.encode({"type": name, "timestamp": time_text(time.time()), "data": data})
            for webhook in receivers:
                webhook.put(message_id, body)

    async def aclose(self) -> None:
        """Send what waits, for a few seconds."""
        await asyncio.gather(*(webhook.aclose(_MAX_WAIT_S) for webhook in self._webhooks))


def _left_json(left: Allowance) -> Event:
    return {
        "limit_tokens": left.limit_tokens,
        "remaining_tokens": left.left_tokens,
        "limit_usd": left.limit_usd,
        "remaining_usd": left.left_usd,
    }


def made(paths: Sequence[str]) -> list[object]:
    """A user's own observers by their dotted paths: an object as it is, of a class a new one.

    Raises:
        ConfigError: one cannot be made, or hears nothing.
    """
    found, problems = [], []
    for number, path in enumerate(paths):
        try:
            found.append(_made(path))
        except _FAULTS as error:  # whatever a stranger's module does when it is loaded
            said = str(error) if isinstance(error, _Deaf) else f"cannot be made: {type(error).__name__}: {error}"
            problems.append(f"callbacks.observers[{number}]: {path} {said}")
    if problems:
        raise ConfigError(problems)
    return found


class _Deaf(Exception):
    """Something that cannot be told of events."""


def _made(path: str) -> object:
    module, _, name = path.replace(":", ".").rpartition(".")
    found = getattr(importlib.import_module(module), name)
    one = found() if isinstance(found, type) else found
    listeners = [getattr(one, event) for event in EVENTS if hasattr(one, event)]
    if not listeners:
        raise _Deaf(f"has none of {', '.join(EVENTS)}")
    if any(not callable(listener) or inspect.iscoroutinefunction(listener) for listener in listeners):
        raise _Deaf("has methods that are not plain functions: they are called without await")
    return one
