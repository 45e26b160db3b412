"""Export calls as OpenTelemetry spans and metrics.

https://opentelemetry.io/docs/specs/semconv/gen-ai/. A span is written when its call has ended; both are sent by threads
of the SDK's own, out of bounded queues, as the usual OTEL_* variables say. Its packages are an extra, loaded only
where `telemetry.otel` is on. Prompts and answers are in none of it.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Mapping
from threading import Thread
from typing import TYPE_CHECKING, Final

from gateway.core.errors import ConfigError
from gateway.core.ledger.refusals import Allowance
from gateway.core.ports import Observer
from gateway.core.record import PENDING, CallRecord
from gateway.core.usage import Totals

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.trace import TracerProvider

_NANO: Final = 1_000_000_000
#: the statuses from which on a call has failed
_FAILED: Final = 500
#: names of models that metrics tell apart; the SDK keeps a histogram of each for as long as the worker lives
MOST_NAMES: Final = 400
#: and the same of operations: where a path is not known, one is called as the path begins
MOST_OPERATIONS: Final = 40
#: the statuses from which on an answer says nothing of whether there is such a model, or such a path
_REFUSED_FROM: Final = 400
_OTHER: Final = "other"
#: modules that need all of its packages
_NEEDED: Final = (
    "opentelemetry.sdk.metrics",
    "opentelemetry.sdk.trace",
    "opentelemetry.exporter.otlp.proto.http.metric_exporter",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
)
#: seconds that a collector has when the gateway stops
_MAX_WAIT_S: Final = 3.0
#: the conventions' own words for providers, where ours differ
_PROVIDERS: Final[Mapping[str, str]] = {
    "azure": "azure.ai.openai",
    "gemini": "gcp.gemini",
    "mistral": "mistral_ai",
    "xai": "x_ai",
}
#: as the conventions advise for gen_ai.client.token.usage and gen_ai.client.operation.duration
_TOKEN_BUCKETS: Final = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304, 16777216, 67108864)
_SECOND_BUCKETS: Final = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)

Attributes = dict[str, str | int | float | bool | tuple[str, ...]]


def load_packages() -> None:
    """Load what `Otel` needs.

    Raises:
        ConfigError: the packages are not installed, or not all of them.
    """
    try:
        for name in _NEEDED:
            importlib.import_module(name)
    except ImportError:
        raise ConfigError(
            ["telemetry.otel: needs its packages: pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"]
        ) from None


class Otel(Observer):
    """Sends each call as a span, and its tokens and times as histograms."""

    def __init__(self, version: str) -> None:
        """Set up what the OTEL_* variables say.

        Raises:
            ConfigError: the packages are not installed.
        """
        load_packages()
        from opentelemetry import trace  # noqa: PLC0415  # an extra
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415

        self._tracers, self._meters = _providers(version)
        self._tracer = self._tracers.get_tracer("gateway", version)
        self._propagator = TraceContextTextMapPropagator()
        #: provider and model as asked for; and these with the model that answered
        self._names: set[tuple[str, ...]] = set()
        self._operations = {"chat", "text_completion", "embeddings"}
        self._kind = trace.SpanKind.SERVER
        self._error = trace.Status(trace.StatusCode.ERROR)
        meter = self._meters.get_meter("gateway", version)
        self._tokens = meter.create_histogram(
            "gen_ai.client.token.usage",
            unit="{token}",
            description="Tokens of a call, by type.",
            explicit_bucket_boundaries_advisory=_TOKEN_BUCKETS,
        )
        self._duration = meter.create_histogram(
            "gen_ai.client.operation.duration",
            unit="s",
            description="From a request's arrival to its settlement.",
            explicit_bucket_boundaries_advisory=_SECOND_BUCKETS,
        )

    def record(self, call: CallRecord, totals: Totals | None, left: Allowance | None = None) -> None:
        """See `Observer.record`."""
        del left
        common = _common(call)
        begin = int(call.started_at * _NANO)
        parent = {"traceparent": call.notes["traceparent"]} if "traceparent" in call.notes else {}
        span = self._tracer.start_span(
            f"{call.operation} {call.model}".strip(),
            context=self._propagator.extract(parent),
            kind=self._kind,
            attributes={**common, **_details(call, totals)},
            start_time=begin,
        )
        if "error.type" in common:
            span.set_status(self._error)
        span.end(begin + int(call.duration_s * _NANO))
        common = self._bounded(call, common)
        if not call.was_fetched:
            self._duration.record(call.duration_s, common)
        if call.charge is not None:
            usage = call.charge.usage
            self._tokens.record(usage.input_tokens, {**common, "gen_ai.token.type": "input"})
            self._tokens.record(usage.output_tokens, {**common, "gen_ai.token.type": "output"})

    def _bounded(self, call: CallRecord, attributes: Attributes) -> Attributes:
        """With the names of models and paths that answered, and not too many of them: callers can name anything."""
        found, asked = dict(attributes), (call.provider, call.model)
        if call.status < _REFUSED_FROM and len(self._operations) < MOST_OPERATIONS:
            self._operations.add(call.operation)
        if call.operation not in self._operations:
            found["gen_ai.operation.name"] = _OTHER
        if call.model and not self._is_told_apart(call, asked):
            found["gen_ai.request.model"] = _OTHER
        if call.response_model is not None and not self._is_told_apart(call, (*asked, call.response_model)):
            del found["gen_ai.response.model"]
        return found

    def _is_told_apart(self, call: CallRecord, names: tuple[str, ...]) -> bool:
        is_real = call.charge is not None and call.status < _REFUSED_FROM
        if is_real and len(self._names) < MOST_NAMES:
            self._names.add(names)
        return names in self._names

    def close(self) -> None:
        """Send what waits. Blocks, for a few seconds at the most: the SDK tries a collector that is away for long."""
        ending = [Thread(target=one.shutdown, daemon=True) for one in (self._tracers, self._meters)]
        for thread in ending:
            thread.start()
        deadline = time.monotonic() + _MAX_WAIT_S
        for thread in ending:
            thread.join(max(0.0, deadline - time.monotonic()))


def _providers(version: str) -> tuple[TracerProvider, MeterProvider]:
    """Not the global ones: an application that embeds the gateway has its own."""
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter  # noqa: PLC0415
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
    from opentelemetry.sdk.metrics import MeterProvider  # noqa: PLC0415
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader  # noqa: PLC0415
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

    named = {"service.name": os.environ.get("OTEL_SERVICE_NAME") or "llm-session-gateway"}
    resource = Resource.create({**named, "service.version": version, "process.pid": os.getpid()})
    tracers = TracerProvider(resource=resource, shutdown_on_exit=False)
    tracers.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    reader = PeriodicExportingMetricReader(OTLPMetricExporter())
    return tracers, MeterProvider([reader], resource=resource, shutdown_on_exit=False)


def _common(call: CallRecord) -> Attributes:
    """What spans and metrics are told apart by. No session: there are far too many."""
    found: Attributes = {
        "gen_ai.operation.name": call.operation,
        "gen_ai.provider.name": _PROVIDERS.get(call.provider, call.provider),
        "gen_ai.request.model": call.model,
    }
    if call.response_model is not None:
        found["gen_ai.response.model"] = call.response_model
    if call.error_code is not None:
        found["error.type"] = call.error_code
    elif call.status >= _FAILED or call.outcome not in {"ok", PENDING}:
        found["error.type"] = str(call.status) if call.outcome == "provider_error" else call.outcome
    return found


def _details(call: CallRecord, totals: Totals | None) -> Attributes:
    found: Attributes = {
        "http.response.status_code": call.status,
        "gateway.call.id": call.call_id,
        "gateway.request.id": call.request_id,
        "gateway.dialect": call.dialect,
        "gateway.outcome": call.outcome,
        "gateway.stream": call.stream,
        "gateway.overhead_s": call.overhead_s,
    }
    if call.session is not None:
        found["gen_ai.conversation.id"] = call.session.id
        found["gateway.client"] = call.session.namespace
    if call.finish_reason is not None:
        found["gen_ai.response.finish_reasons"] = (call.finish_reason,)
    if call.charge is not None:
        found["gen_ai.usage.input_tokens"] = call.charge.usage.input_tokens
        found["gen_ai.usage.output_tokens"] = call.charge.usage.output_tokens
        found["gen_ai.usage.cache_read.input_tokens"] = call.charge.usage.cache_read_tokens
        found["gateway.usage.source"] = call.charge.source
        if call.charge.cost_usd is not None:
            found["gateway.cost_usd"] = float(call.charge.cost_usd)
    if call.first_byte_s is not None:
        found["gateway.time_to_first_byte_s"] = call.first_byte_s
    if call.context is not None:
        found["gateway.context.tokens"] = call.context.tokens
        found["gateway.context.original_tokens"] = call.context.original_tokens
    if call.tools:
        found["gateway.tools"] = call.tools
    if totals is not None:
        found["gateway.session.total_tokens"] = totals.total_tokens
    return found
