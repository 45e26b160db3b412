"""One line per call on stderr: text for people, JSON for machines. No prompt, no answer, no credential."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, TextIO

import msgspec

from gateway.core.ports import CallRecord, Observer
from gateway.core.usage import Totals

_FAILED_FROM = 400


class CallLog:
    """Writes each call's line. `failures_only`: calls that went well are left out."""

    def __init__(self, stream: TextIO, *, as_json: bool, failures_only: bool = False) -> None:
        self._stream = stream
        self._as_json = as_json
        self._failures_only = failures_only

    def record(self, call: CallRecord, totals: Totals | None) -> None:
        """See `Observer.record`."""
        if self._failures_only and call.status < _FAILED_FROM and call.outcome == "ok":
            return
        line = json_line(call, totals) if self._as_json else text_line(call, totals)
        self._stream.write(line + "\n")
        self._stream.flush()


def text_line(call: CallRecord, totals: Totals | None) -> str:
    """`chat gpt-5.1 · session 7f3c · used 7,951+212 · session 63,410 tok, $0.103200 · 1.9 s`."""
    parts = [f"{call.operation} {call.model or '-'}"]
    if call.session is not None:
        parts.append(f"session {call.session.id}")
    if call.outcome != "ok":
        parts.append(f"{call.outcome} {call.status}" + (f" {call.error_code}" if call.error_code else ""))
    if call.charge is not None:
        usage = call.charge.usage
        mark = "" if call.charge.source == "provider" else f" ({call.charge.source})"
        parts.append(f"used {usage.input_tokens:,}+{usage.output_tokens:,}{mark}")
    if totals is not None and call.session is not None:
        price = "" if totals.unpriced_calls else f", ${totals.cost_usd:.6f}"
        parts.append(f"session {totals.total_tokens:,} tok{price}")
    parts.append(f"{call.duration_s:.1f} s")
    return " · ".join(parts)


def json_line(call: CallRecord, totals: Totals | None) -> str:
    """The record as one JSON object."""
    charge = call.charge
    fields = {
        "event": "call",
        "time": call.started_at,
        "call_id": call.call_id,
        "request_id": call.request_id,
        "namespace": call.session.namespace if call.session else None,
        "session": call.session.id if call.session else None,
        "operation": call.operation,
        "provider": call.provider,
        "model": call.model,
        "stream": call.stream,
        "status": call.status,
        "outcome": call.outcome,
        "error_code": call.error_code,
        "input_tokens": charge.usage.input_tokens if charge else None,
        "output_tokens": charge.usage.output_tokens if charge else None,
        "usage_source": charge.source if charge else None,
        "session_total_tokens": totals.total_tokens if totals else None,
        "overhead_ms": round(call.overhead_s * 1000, 2),
        "duration_ms": round(call.duration_s * 1000, 2),
    }
    return msgspec.json.encode(fields).decode()


class JsonFormatter(logging.Formatter):
    """The gateway's own messages as JSON lines, tracebacks included."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter.format`."""
        fields = {
            "event": "log",
            "time": record.created,
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(fields).decode()


def configure(*, as_json: bool, level: str) -> None:
    """Send what the gateway itself has to say to stderr; uvicorn says nothing."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json else logging.Formatter("%(levelname)s %(message)s"))
    log = logging.getLogger("gateway")
    log.handlers[:] = [handler]
    log.propagate = False
    log.setLevel(level.upper())
    # What it would say is either said by us already, or about a connection that we broke on purpose.
    for name in ("uvicorn.error", "uvicorn.access", "uvicorn.asgi"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)


if TYPE_CHECKING:
    _: type[Observer] = CallLog
