"""Write events as bodies of webhook requests: all fields as JSON, a message for Slack, or one line of text."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

import msgspec

from gateway.core.ledger.arithmetic import DIMENSIONS, Amount
from gateway.core.ledger.refusals import usd
from gateway.core.ledger.session_key import SessionKey
from gateway.core.ledger.thresholds import BudgetAlert
from gateway.core.times import time_text

Event = Mapping[str, Any]
BodyFormat = Literal["event", "slack", "text"]

CONTENT_TYPES: Final[Mapping[BodyFormat, bytes]] = {
    "event": b"application/json",
    "slack": b"application/json",
    "text": b"text/plain; charset=utf-8",
}
#: Clients choose some names. A line break could add a header to a mail.
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")
_MAX_NAME: Final = 200
#: characters of what runaway protection found, with the names of tools
_MAX_TEXT: Final = 600
_UNITS: Final = {"tokens": "tokens", "nano_usd": "usd", "calls": "calls"}


def body_of(form: BodyFormat, name: str, event: Event, at: float) -> bytes:
    """Return an event as the body of a request. `at`: Unix time in seconds at which it is sent."""
    if form == "event":
        return msgspec.json.encode({"type": name, "timestamp": time_text(at), "data": event})
    line = _LINES[name](event)
    if form == "slack":
        # Slack treats these three characters as markup.
        escaped = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        return msgspec.json.encode({"text": escaped})
    return f"{line}\n".encode("utf-8", "replace")


def budget_event(alert: BudgetAlert, shown: Callable[[SessionKey], str]) -> Event:
    """Return the data of `on_budget`. `shown`: returns the name of a session."""
    kind, namespace, account_id = alert.account
    name = namespace if kind in ("key", "group", "all") else shown(SessionKey(namespace, account_id))
    return {
        "account": kind,
        "name": name,
        "threshold": alert.threshold,
        "unit": _UNITS[alert.unit],
        "used_fraction": round(alert.used_fraction, 4),
        "used": _amounts(alert.used),
        "limit": _amounts(alert.limits),
        "resets_at": time_text(alert.resets_at) if alert.resets_at is not None else None,
        "at": time_text(alert.at),
    }


#: what the names of accounts are called in messages
_OWNERS: Final = {"key": "client key", "group": "group of client keys"}


def _amounts(values: Amount | tuple[int | None, ...]) -> Event:
    return {
        _UNITS[name]: usd(value) if name == "nano_usd" and value is not None else value
        for name, value in zip(DIMENSIONS, values, strict=True)
    }


def _budget_line(event: Event) -> str:
    unit = event["unit"]
    used, limit = event["used"][unit], event["limit"][unit]
    amounts = f"${used} of ${limit}" if unit == "usd" else f"{used:,} of {limit:,} {unit}"
    refill = f" It refills at {event['resets_at']}." if event["resets_at"] is not None else ""
    account = f"{_OWNERS.get(event['account'], event['account'])} {_safe(event['name'])}"
    owner = "all client keys together" if event["account"] == "all" else account
    return (
        f"The budget of {owner} has reached {event['threshold']} %: "
        f"{amounts} used ({event['used_fraction']:.1%}).{refill}"
    )


def _finish_line(event: Event) -> str:
    usage = event["usage"]
    tokens = f", {usage['input_tokens']:,} input and {usage['output_tokens']:,} output tokens" if usage else ""
    error = f" ({event['error_code']})" if event["error_code"] is not None else ""
    return (
        f"Call {_safe(event['request_id'])} of {_session(event)} ended: {event['outcome']}{error}, "
        f"status {event['status']}, {_safe(event['provider'])}/{_safe(event['model'])}{tokens}{_cost(event)}."
    )


def _usage_line(event: Event) -> str:
    model = f"{_safe(event['provider'])}/{_safe(event['model'])}"
    tokens = event["usage"]["total_tokens"]
    totals = f" Total: {event['totals']['total_tokens']:,} tokens." if event["totals"] is not None else ""
    return f"A call of {_session(event)} used {tokens:,} tokens of {model}{_cost(event)}.{totals}"


def _step_line(event: Event) -> str:
    before, after = (_safe(event[name] or "none") for name in ("step_before", "step"))
    return f"{_session(event).capitalize()} moved from step {before} to {after} (index {event['index']})."


def _runaway_line(event: Event) -> str:
    action = "is stopped" if event["action"] == "refuse" else "has a warning"
    text = _CONTROL.sub(" ", event["text"])[:_MAX_TEXT]
    return f"{_session(event).capitalize()} {action}: {text} ({event['setting']}: {event['limit']:,})."


def _session(event: Event) -> str:
    return f"session {_safe(event['session'])}" if event["session"] is not None else "no session"


def _cost(event: Event) -> str:
    return f", ${event['cost_usd']}" if event["cost_usd"] is not None else ""


def _safe(name: object) -> str:
    """Return a name in one line, without control characters, and not too long."""
    return _CONTROL.sub(" ", str(name))[:_MAX_NAME]


_LINES: Final[Mapping[str, Callable[[Event], str]]] = {
    "on_usage": _usage_line,
    "on_finish": _finish_line,
    "on_step": _step_line,
    "on_budget": _budget_line,
    "on_runaway": _runaway_line,
}
