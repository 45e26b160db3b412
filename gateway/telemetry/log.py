"""Write one line per call to stderr, as text or JSON.

No credential; prompts and answers in `bodies.py`.

Nobody ever waits for whoever reads stderr: all lines go through a bounded queue to a thread. When the queue is full,
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

#: lines that may wait to be written, and characters of them
_MAX_LINES: Final = 10_000
_MAX_CHARACTERS: Final = 32 * 1024 * 1024
#: lines that are written at once
_BATCH: Final = 500
#: how long the thread rests after each batch: under load it wakes up for many lines, not for each
_REST_S: Final = 0.01
_FLUSH_S: Final = 1.0
#: lines a minute, for each error code, of requests that are refused before they become calls: anybody can send those
_REFUSALS_A_MINUTE: Final = 10
_MINUTE_S: Final = 60.0
#: the note that has the hash of an unknown credential
_CREDENTIAL: Final = "credential"


class _Writer:
    """Writes lines to one stream in a thread of its own, which begins with the first line."""

    def __init__(self, stream: TextIO) -> None:
        self.as_json = False
        #: process id to mark lines with, where several workers write to the stream
        self.worker: int | None = None
        self._stream = stream
        self._queue = SimpleQueue[str | threading.Event]()
        self._dropped = 0
        self._waiting = 0
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def writes_to(self, stream: TextIO) -> bool:
        """Whether this is the writer of a stream."""
        return self._stream is stream

    def put(self, line: str) -> None:
        """Have a line written, or drop it where too many wait."""
        if self._queue.qsize() >= _MAX_LINES or self._waiting >= _MAX_CHARACTERS:
            with self._lock:
                self._dropped += 1
            return
        self._add((self._dropped_line() if self._dropped else "") + self._marked(line) + "\n")
        if self._thread is None:
            self._start()

    def _marked(self, line: str) -> str:
        """Return a line of text with the time before it, a JSON object as it is; both with the worker, if any."""
        if self.as_json:
            return line if self.worker is None else f'{line[:-1]},"worker":{self.worker}}}'
        worker = "" if self.worker is None else f" worker {self.worker}"
        return f"{time_text(time.time())}{worker} {line}"

    def flush(self, timeout_s: float) -> None:
        """Wait until what was put before is written, at most so long."""
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
            # Nobody else takes any.
            while len(items) < _BATCH and not self._queue.empty():
                items.append(self._queue.get())
            text = "".join([item for item in items if isinstance(item, str)])
            with self._lock:
                self._waiting -= len(text)
            if self._dropped and self._queue.empty():
                text += self._dropped_line()
            # A stream that is closed or whose reader has gone stops nothing.
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
        # Past the stream's buffer: its lock, held while nobody reads, would keep the process from ending.
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
        message = f"{dropped} lines of the log were dropped: nobody read it in time"
        record = logging.LogRecord("gateway", logging.WARNING, "", 0, message, (), None)
        return self._marked(_formatter(as_json=self.as_json).format(record)) + "\n"


_writers: Final[list[_Writer]] = []


def _writer_for(stream: TextIO, *, as_json: bool) -> _Writer:
    """The one writer of a stream: a reload of the configuration takes it over, and lines stay in order."""
    writer = next((known for known in _writers if known.writes_to(stream)), None)
    if writer is None:
        writer = _Writer(stream)
        _writers.append(writer)
    writer.as_json = as_json
    return writer


def flush(timeout_s: float = _FLUSH_S) -> None:
    """Wait until all lines are written, at most so long; a process that ends does so by itself."""
    deadline = time.monotonic() + timeout_s
    for writer in _writers.copy():
        writer.flush(max(0.0, deadline - time.monotonic()))


atexit.register(flush)


def put(stream: TextIO, *, as_json: bool) -> Callable[[str], None]:
    """What takes lines for a stream, among those of calls."""
    return _writer_for(stream, as_json=as_json).put


class _Sampler:
    """Lets the first lines of each minute pass, for each error code, and counts those that it keeps back."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        #: by code: when its minute began, lines that passed in it, lines kept back since the last one that passed
        self._seen: dict[str, tuple[float, int, int]] = {}

    def passes(self, code: str) -> int | None:
        """Return how many lines were kept back before this one, or None if this one is kept back too."""
        now = self._clock()
        since, passed, kept_back = self._seen.get(code, (now, 0, 0))
        if now - since >= _MINUTE_S:
            since, passed = now, 0
        if passed >= _REFUSALS_A_MINUTE:
            self._seen[code] = since, passed, kept_back + 1
            return None
        self._seen[code] = since, passed + 1, 0
        return kept_back


class CallLog(Observer):
    """Writes each call's line. `failures_only`: only calls that failed or were refused."""

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
        """See `Observer.record`."""
        if self._failures_only and call.outcome not in FAILED and call.outcome != REFUSED:
            return
        line = json_line(call, totals) if self._as_json else text_line(call, totals, left)
        self._writer.put(line)

    def refused(self, call: CallRecord) -> None:
        """See `Observer.refused`. A few lines a minute for each error code; a line says how many were left out."""
        left_out = self._sampler.passes(call.error_code or "")
        if left_out is None:
            return
        if self._as_json:
            line = json_line(call, None, left_out)
        else:
            line = text_line(call, None) + (f" · {left_out:,} more before it not logged" if left_out else "")
        self._writer.put(line)


def text_line(call: CallRecord, totals: Totals | None, left: Allowance | None = None) -> str:
    """One line.

    `chat m · session 7f3c · 41 items 18,204→7,960 tok (condense 12) · used 7,951+212 · session 63,410 tok ·
    36,590 of 100,000 left · 1.9 s`
    """
    parts = [f"{call.operation} {call.model or '-'}"]
    if call.session is not None:
        parts.append(f"session {call.session.id}")
    if call.outcome != "ok":
        parts.append(f"{call.outcome} {call.status}" + (f" {call.error_code}" if call.error_code else ""))
    if _CREDENTIAL in call.notes:
        parts.append(f"key with hash {call.notes[_CREDENTIAL]}")
    if call.context is not None and call.context.trimmed:
        parts.append(_trimmed(call.context))
    if call.charge is not None:
        usage = call.charge.usage
        mark = "" if call.charge.source == "provider" else f" ({call.charge.source})"
        parts.append(f"used {usage.input_tokens:,}+{usage.output_tokens:,}{mark}")
    if totals is not None and call.session is not None:
        price = "" if totals.unpriced_calls else f", ${totals.cost_usd:.6f}"
        parts.append(f"session {totals.total_tokens:,} tok{price}")
    # Of the narrowest budget, which may be a parent's or the key's: so not as a part of the session's total.
    if left is not None and left.limit_tokens is not None:
        parts.append(f"{left.left_tokens or 0:,} of {left.limit_tokens:,} left")
    parts.append(f"{call.duration_s:.1f} s")
    return " · ".join(parts)


def _trimmed(context: ContextRecord) -> str:
    rules = ", ".join(f"{rule} {number}" for rule, number in context.trimmed.items())
    if context.shadow:
        return f"{len(context.message_fates)} items {context.original_tokens:,} tok (shadow: {rules})"
    return f"{len(context.message_fates)} items {context.original_tokens:,}→{context.tokens:,} tok ({rules})"


def json_line(call: CallRecord, totals: Totals | None, left_out: int | None = None) -> str:
    """Return the record as one JSON object.

    `left_out`: of a request that was refused before it became a call, how many lines like it were left out before it.
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
        fields |= {"credential": call.notes.get(_CREDENTIAL), "left_out": left_out}
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


class _Handler(logging.Handler):
    """The gateway's own messages, through the writer of the calls' lines."""

    def __init__(self, writer: _Writer) -> None:
        super().__init__()
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler.emit`."""
        try:
            self._writer.put(self.format(record))
        except Exception:  # noqa: BLE001  # as the handlers of the standard library do
            self.handleError(record)


def _formatter(*, as_json: bool) -> logging.Formatter:
    return JsonFormatter() if as_json else logging.Formatter("%(levelname)s %(message)s")


def configure(*, as_json: bool, level: str, worker: int | None = None) -> None:
    """Send what the gateway itself has to say to stderr; uvicorn says nothing.

    `worker`: the id of this process where several write there. All lines are marked with it, those of calls too.
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
    # What it would say is either said by us already, or about a connection that we broke on purpose.
    for name in ("uvicorn.error", "uvicorn.access", "uvicorn.asgi"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
