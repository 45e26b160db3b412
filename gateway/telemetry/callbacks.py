"""Send events about calls, usage and steps to the user's own Python code and to webhooks.

An event contains the same fields as /api. It is built once, and only if an observer or a webhook wants it. It never
contains prompts or responses.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import logging
import random
import time
from collections.abc import Callable, Sequence
from typing import Final

from gateway.core.errors import ConfigError
from gateway.core.ids import call_id
from gateway.core.ledger.refusals import Allowance
from gateway.core.ledger.session_key import SessionKey
from gateway.core.ledger.thresholds import BudgetAlert
from gateway.core.ports import Observer
from gateway.core.record import CallRecord
from gateway.core.runaway import RunawayAlert, finding_json
from gateway.core.steps import StepChange
from gateway.core.times import time_text
from gateway.core.usage import Totals
from gateway.core.values import dataclass
from gateway.telemetry.alert_outbox import Receiver
from gateway.telemetry.event_bodies import BodyFormat, Event, body_of, budget_event
from gateway.telemetry.webhooks import WebhookSender

logger = logging.getLogger("gateway")
#: errors of the user's code that are caught; code that calls `sys.exit` must not stop the gateway
_USER_ERRORS: Final = (Exception, SystemExit)

EVENTS: Final = ("on_usage", "on_finish", "on_step", "on_budget", "on_runaway")
#: seconds to wait for webhooks when the gateway stops
_MAX_WAIT_S: Final = 3.0
#: fields of a call that its usage event also contains
_USAGE_FIELDS: Final = ("call_id", "request_id", "session", "provider", "model", "usage", "usage_source", "cost_usd")


@dataclass(frozen=True, slots=True)
class Shapes:
    """Functions that turn calls, sessions and totals into JSON values, as shown to an administrator."""

    call: Callable[[CallRecord], Event]
    session: Callable[[SessionKey], str]
    totals: Callable[[Totals], Event]


class CallbackObserver(Observer):
    """Notify the user's own observers and webhooks."""

    def __init__(self, observers: Sequence[object], webhooks: Sequence[WebhookSender], shapes: Shapes) -> None:
        self._webhooks = webhooks
        self._shapes = shapes
        self._listeners = {
            name: [getattr(observer, name) for observer in observers if hasattr(observer, name)] for name in EVENTS
        }
        self._wanted = {name for name in EVENTS if self._listeners[name]}
        self._wanted |= {name for webhook in webhooks for name in webhook.events}

    @property
    def is_idle(self) -> bool:
        """Return True if no observer and no webhook wants any event."""
        return not self._wanted

    def record(self, call: CallRecord, totals: Totals | None, left: Allowance | None = None) -> None:
        """Send the usage and finish events of a call."""
        is_charged = call.charge is not None and "on_usage" in self._wanted
        if not is_charged and "on_finish" not in self._wanted:
            return
        shown = self._shapes.call(call)
        if is_charged:
            self._send("on_usage", f"usage_{call.call_id}", self._usage(shown, totals, left))
        if "on_finish" in self._wanted:
            # Receivers ignore an event whose id they know. A pending call is reported again when it has finished, so
            # its two events need different ids.
            kind = "pending" if call.is_pending else "finish"
            self._send("on_finish", f"{kind}_{call.call_id}", shown)

    def _usage(self, call: Event, totals: Totals | None, left: Allowance | None) -> Event:
        is_priced = totals is not None and not totals.unpriced_calls
        return {
            **{name: call[name] for name in _USAGE_FIELDS},
            "totals": self._shapes.totals(totals) if totals is not None else None,
            "total_cost_usd": f"{totals.cost_usd:.6f}" if totals is not None and is_priced else None,
            "budget": _left_json(left) if left is not None else None,
        }

    def stepped(self, change: StepChange) -> None:
        """Send the event of a step change."""
        if "on_step" in self._wanted:
            unique = call_id(time.time_ns() // 1_000_000, random.randbytes(10))  # noqa: S311  # no secret
            self._send("on_step", f"step_{unique}", self._step(change))

    def warned(self, alert: RunawayAlert) -> None:
        """Send the event of a warning or a refusal of runaway protection."""
        if "on_runaway" in self._wanted:
            self._send("on_runaway", f"runaway_{alert.found.kind}_{alert.call_id}", self._runaway(alert))

    def _runaway(self, alert: RunawayAlert) -> Event:
        return {
            "session": self._shapes.session(alert.session) if alert.session is not None else None,
            "call_id": alert.call_id,
            **finding_json(alert.found),
            "text": alert.found.text,
            "at": time_text(alert.at),
        }

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

    def _send(self, name: str, message_id: str, data: Event) -> None:
        self._notify(name, data)
        receivers = [webhook for webhook in self._webhooks if name in webhook.events]
        if receivers:
            now, bodies = time.time(), dict[BodyFormat, bytes]()
            for webhook in receivers:
                if webhook.format not in bodies:
                    bodies[webhook.format] = body_of(webhook.format, name, data, now)
                webhook.put(message_id, bodies[webhook.format])

    def _notify(self, name: str, data: Event) -> None:
        for listener in self._listeners[name]:
            try:
                listener(data)
            except _USER_ERRORS:
                logger.exception("callbacks.observers: %s failed", getattr(listener, "__qualname__", name))

    def alert_receivers(self) -> list[Receiver]:
        """Return the observers and webhooks that receive `on_budget`."""
        receivers: list[Receiver] = [
            _WebhookAlerts(webhook, self._shapes) for webhook in self._webhooks if "on_budget" in webhook.events
        ]
        if self._listeners["on_budget"]:
            receivers.append(_ObserverAlerts(lambda event: self._notify("on_budget", event), self._shapes))
        return receivers

    async def aclose(self) -> None:
        """Send the queued events, for a few seconds at most."""
        await asyncio.gather(*(webhook.aclose(_MAX_WAIT_S) for webhook in self._webhooks))


@dataclass(frozen=True, slots=True)
class _WebhookAlerts:
    """Sends budget alerts to a webhook."""

    webhook: WebhookSender
    shapes: Shapes

    @property
    def name(self) -> str:
        """See `Receiver`."""
        return self.webhook.name

    async def accept(self, alert: BudgetAlert) -> bool:
        """See `Receiver`."""
        event = budget_event(alert, self.shapes.session)
        return await self.webhook.offer(alert.id, body_of(self.webhook.format, "on_budget", event, time.time()))


@dataclass(frozen=True, slots=True)
class _ObserverAlerts:
    """Passes budget alerts to the observers of the leading worker."""

    notify: Callable[[Event], None]
    shapes: Shapes

    @property
    def name(self) -> str:
        """See `Receiver`."""
        return "observers"

    async def accept(self, alert: BudgetAlert) -> bool:
        """See `Receiver`. An observer that fails is not called again."""
        self.notify(budget_event(alert, self.shapes.session))
        return True


def _left_json(left: Allowance) -> Event:
    return {
        "limit_tokens": left.limit_tokens,
        "remaining_tokens": left.remaining_tokens,
        "limit_usd": left.limit_usd,
        "remaining_usd": left.remaining_usd,
    }


def load_observers(paths: Sequence[str]) -> list[object]:
    """Load the user's own observers from their dotted paths. A class is instantiated, another object is used directly.

    Raises:
        ConfigError: an observer cannot be loaded, or has no method for any event.
    """
    observers, problems = [], []
    for number, path in enumerate(paths):
        try:
            observers.append(_load(path))
        except _USER_ERRORS as error:  # importing the user's module can raise anything
            is_unusable = isinstance(error, _UnusableObserverError)
            problem = str(error) if is_unusable else f"cannot be loaded: {type(error).__name__}: {error}"
            problems.append(f"callbacks.observers[{number}]: {path} {problem}")
    if problems:
        raise ConfigError(problems)
    return observers


class _UnusableObserverError(Exception):
    """An observer without methods that can be called with events."""


def _load(path: str) -> object:
    module, _, name = path.replace(":", ".").rpartition(".")
    loaded = getattr(importlib.import_module(module), name)
    observer = loaded() if isinstance(loaded, type) else loaded
    listeners = [getattr(observer, event) for event in EVENTS if hasattr(observer, event)]
    if not listeners:
        raise _UnusableObserverError(f"has none of {', '.join(EVENTS)}")
    if any(not callable(listener) or inspect.iscoroutinefunction(listener) for listener in listeners):
        raise _UnusableObserverError("has methods that are not plain functions: they are called without await")
    return observer
