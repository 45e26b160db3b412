"""Write one log line per call to stderr, as text or JSON.

Lines contain no credentials, prompts or responses; `bodies.py` logs requests and responses if that is enabled.

Calls never wait for the reader of stderr: all lines go through a bounded queue to a thread. When the queue is full,
lines are dropped and counted.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final, TextIO

import msgspec

from gateway.core.ledger.refusals import Allowance
from gateway.core.ports import Observer
from gateway.core.record import FAILED, REFUSED, CallRecord, ContextRecord
from gateway.core.times import time_text
from gateway.core.usage import Totals

#: limits of the queue: lines, and characters in all of them
_MAX_LINES: Final = 10_000
_MAX_CHARACTERS: Final = 32 * 1024 * 1024
#: lines of one write
_BATCH: Final = 500
#: seconds that the thread sleeps after each batch, so that under load it wakes up for many lines at once
_REST_S: Final = 0.01
_FLUSH_S: Final = 1.0
#: Lines per minute and error code for requests that are refused before they become calls. Clients without a key can
#: send any number of these requests.
_REFUSALS_A_MINUTE: Final = 10
_MINUTE_S: Final = 60.0


class _Writer:
    """Write lines to one stream in its own thread, which starts with the first line."""

    def __init__(self, stream: TextIO) -> None:
        self.as_json = False
        #: process id that is added to each line if several workers write to the stream
        self.worker: int | None = None
        self._stream = stream
        self._queue = SimpleQueue[str | threading.Event]()
        self._dropped = 0
        self._waiting = 0
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def writes_to(self, stream: TextIO) -> bool:
        """Return True if this writer writes to the stream."""
        return self._stream is stream

    def put(self, line: str) -> None:
        """Queue a line, or drop it if the queue is full."""
        if self._queue.qsize() >= _MAX_LINES or self._waiting >= _MAX_CHARACTERS:
            with self._lock:
                self._dropped += 1
            return
        self._add((self._dropped_line() if self._dropped else "") + self._marked(line) + "\n")
        if self._thread is None:
            self._start()

    def _marked(self, line: str) -> str:
        """Return the line with the worker, if it is set. A line of text also gets the time; JSON already has it."""
        if self.as_json:
            return line if self.worker is None else f'{line[:-1]},"worker":{self.worker}}}'
        worker = "" if self.worker is None else f" worker {self.worker}"
        return f"{time_text(time.time())}{worker} {line}"

    def flush(self, timeout_s: float) -> None:
        """Wait until all queued lines are written, `timeout_s` seconds at most."""
        if self._thread is not None:
            written = threading.Event()
            self._add(self._dropped_line())
            self._queue.put(written)
            written.wait(timeout_s)

    def _add(self, text: str) -> None:
        with self._lock:
            self._waiting += len(text)
        self._queue.put(text)

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="log", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            items = [self._queue.get()]
            # Only this thread takes items, so `get` cannot block here.
            while len(items) < _BATCH and not self._queue.empty():
                items.append(self._queue.get())
            text = "".join([item for item in items if isinstance(item, str)])
            with self._lock:
                self._waiting -= len(text)
            if self._dropped and self._queue.empty():
                text += self._dropped_line()
            # A stream that is closed, or that has no reader, must not stop the thread.
            with contextlib.suppress(OSError, ValueError):
                self._write(text)
            for item in items:
                if isinstance(item, threading.Event):
                    item.set()
            time.sleep(_REST_S)

    def _write(self, text: str) -> None:
        try:
            descriptor = self._stream.fileno()
        except io.UnsupportedOperation:
            self._stream.write(text)
            self._stream.flush()
            return
        # Write to the descriptor and not to the stream: while its reader is slow, a write to the stream would hold the
        # lock of its buffer, and the process could not end.
        rest = memoryview(text.encode("utf-8", "backslashreplace"))
        while rest:
            try:
                rest = rest[os.write(descriptor, rest) :]
            except BlockingIOError:
                time.sleep(_REST_S)

    def _dropped_line(self) -> str:
        with self._lock:
            dropped, self._dropped = self._dropped, 0
        if not dropped:
            return ""
        message = f"{dropped} log lines were dropped: the reader of the log is too slow"
        record = logging.LogRecord("gateway", logging.WARNING, "", 0, message, (), None)
        return self._marked(_formatter(as_json=self.as_json).format(record)) + "\n"


_writers: Final[list[_Writer]] = []


def _writer_for(stream: TextIO, *, as_json: bool) -> _Writer:
    """Return the writer of a stream.

    There is only one per stream, also after a reload of the configuration, so that lines stay in order.
    """
    writer = next((known for known in _writers if known.writes_to(stream)), None)
    if writer is None:
        writer = _Writer(stream)
        _writers.append(writer)
    writer.as_json = as_json
    return writer


def flush(timeout_s: float = _FLUSH_S) -> None:
    """Wait until all lines are written, `timeout_s` seconds at most. This also happens when the process ends."""
    deadline = time.monotonic() + timeout_s
    for writer in _writers.copy():
        writer.flush(max(0.0, deadline - time.monotonic()))


atexit.register(flush)


def line_writer(stream: TextIO, *, as_json: bool) -> Callable[[str], None]:
    """Return a function that queues a line for the stream, in order with the lines of calls."""
    return _writer_for(stream, as_json=as_json).put


class _Sampler:
    """Limit the lines per minute of each error code, and count the lines that are left out."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        #: by error code: start of its minute, lines written in it, lines left out since the last written one
        self._seen: dict[str, tuple[float, int, int]] = {}

    def admit(self, code: str) -> int | None:
        """Return the number of lines left out before this one, or None if this line is to be left out too."""
        now = self._clock()
        minute, written, left_out = self._seen.get(code, (now, 0, 0))
        if now - minute >= _MINUTE_S:
            minute, written = now, 0
        if written >= _REFUSALS_A_MINUTE:
            self._seen[code] = minute, written, left_out + 1
            return None
        self._seen[code] = minute, written + 1, 0
        return left_out


class CallLog(Observer):
    """Write a line for each call. `failures_only`: only for calls that failed or were refused."""

    def __init__(
        self,
        stream: TextIO,
        *,
        as_json: bool,
        failures_only: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sampler = _Sampler(clock)
        self._writer = _writer_for(stream, as_json=as_json)
        self._as_json = as_json
        self._failures_only = failures_only

    def record(self, call: CallRecord, totals: Totals | None, left: Allowance | None = None) -> None:
        """Log a call that has ended."""
        if self._failures_only and call.outcome not in FAILED and call.outcome != REFUSED:
            return
        line = json_line(call, totals) if self._as_json else text_line(call, totals, left)
        self._writer.put(line)

    def refused(self, call: CallRecord) -> None:
        """Log a request that was refused before it became a call.

        Only a few lines per minute are written for each error code. A line shows how many were left out before it.
        """
        left_out = self._sampler.admit(call.error_code or "")
        if left_out is None:
            return
        if self._as_json:
            line = json_line(call, None, left_out)
        else:
            line = text_line(call, None) + (f" · {left_out:,} more before it not logged" if left_out else "")
        self._writer.put(line)


def text_line(call: CallRecord, totals: Totals | None, left: Allowance | None = None) -> str:
    """Return the line of a call as text.

    `chat m · session 7f3c · 41 items 18,204→7,960 tok (condense 12) · used 7,951+212 · session 63,410 tok ·
    36,590 of 100,000 left · 1.9 s`
    """
    parts = [f"{call.operation} {call.model or '-'}"]
    if call.session is not None:
        parts.append(f"session {call.session.id}")
    if call.outcome != "ok":
        parts.append(f"{call.outcome} {call.status}" + (f" {call.error_code}" if call.error_code else ""))
    if call.credential_hash is not None:
        parts.append(f"key with hash {call.credential_hash}")
    if call.context is not None and call.context.trimmed:
        parts.append(_trimmed(call.context))
    if call.charge is not None:
        usage = call.charge.usage
        mark = "" if call.charge.source == "provider" else f" ({call.charge.source})"
        parts.append(f"used {usage.input_tokens:,}+{usage.output_tokens:,}{mark}")
    if totals is not None and call.session is not None:
        price = "" if totals.unpriced_calls else f", ${totals.cost_usd:.6f}"
        parts.append(f"session {totals.total_tokens:,} tok{price}")
    # The rest of the smallest budget, which may belong to a parent session or to the key. It is therefore not shown as
    # a part of the session's total.
    if left is not None and left.limit_tokens is not None:
        parts.append(f"{left.remaining_tokens or 0:,} of {left.limit_tokens:,} left")
    parts.append(f"{call.duration_s:.1f} s")
    return " · ".join(parts)


def _trimmed(context: ContextRecord) -> str:
    rules = ", ".join(f"{rule} {number}" for rule, number in context.trimmed.items())
    if context.shadow:
        return f"{len(context.message_fates)} items {context.original_tokens:,} tok (shadow: {rules})"
    return f"{len(context.message_fates)} items {context.original_tokens:,}→{context.tokens:,} tok ({rules})"


def json_line(call: CallRecord, totals: Totals | None, left_out: int | None = None) -> str:
    """Return the line of a call as a JSON object.

    `left_out`: for a request that was refused before it became a call, the number of similar lines left out before it;
    None for a call.
    """
    charge, context = call.charge, call.context
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
        "context_tokens": context.tokens if context else None,
        "context_tokens_original": context.original_tokens if context else None,
        "trimmed": context.trimmed if context and context.trimmed else None,
        "session_total_tokens": totals.total_tokens if totals else None,
        "overhead_ms": round(call.overhead_s * 1000, 2),
        "duration_ms": round(call.duration_s * 1000, 2),
    }
    if left_out is not None:
        fields |= {"credential": call.credential_hash, "left_out": left_out}
    return msgspec.json.encode(fields).decode()


class JsonFormatter(logging.Formatter):
    """Format the gateway's own log messages as JSON lines, including tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a message as a JSON line."""
        fields = {
            "event": "log",
            "time": record.created,
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(fields).decode()


class _Handler(logging.Handler):
    """Send the gateway's own log messages to the writer that also writes the lines of calls."""

    def __init__(self, writer: _Writer) -> None:
        super().__init__()
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a message."""
        try:
            self._writer.put(self.format(record))
        except Exception:  # noqa: BLE001  # like the handlers of the standard library
            self.handleError(record)


def _formatter(*, as_json: bool) -> logging.Formatter:
    return JsonFormatter() if as_json else logging.Formatter("%(levelname)s %(message)s")


def configure(*, as_json: bool, level: str, worker: int | None = None) -> None:
    """Send the gateway's own log messages to stderr, and silence uvicorn.

    `worker`: the id of this process if several workers write to stderr. It is added to all lines, also those of calls.
    """
    writer = _writer_for(sys.stderr, as_json=as_json)
    writer.worker = worker
    handler = _Handler(writer)
    handler.setFormatter(_formatter(as_json=as_json))
    for name in ("gateway", "opentelemetry"):
        log = logging.getLogger(name)
        log.handlers[:] = [handler]
        log.propagate = False
        log.setLevel(level.upper())
    # The gateway already logs what uvicorn would log, except for connections that it closed on purpose.
    for name in ("uvicorn.error", "uvicorn.access", "uvicorn.asgi"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
