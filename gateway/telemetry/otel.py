"""Export calls as OpenTelemetry spans and metrics.

Attribute names follow https://opentelemetry.io/docs/specs/semconv/gen-ai/. A span is created when its call has ended.
Threads of the SDK send spans and metrics from bounded queues; the usual OTEL_* variables configure them. The packages
are an optional extra and are loaded only if `telemetry.otel` is on. Prompts and responses are never exported.
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
from gateway.core.providers import PROVIDERS
from gateway.core.record import CallRecord
from gateway.core.usage import Totals

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.trace import TracerProvider

_NANOSECONDS: Final = 1_000_000_000
#: calls with this status or a higher one have failed
_FAILED: Final = 500
#: model names with metrics of their own; the SDK keeps a histogram of each name until the worker ends
MAX_NAMES: Final = 400
#: operations with metrics of their own; the operation of an unknown path is named after the path
MAX_OPERATIONS: Final = 40
#: a response with this status or a higher one does not prove that the model or the path exists
_ERROR_STATUS: Final = 400
_OTHER: Final = "other"
#: modules that together import every required package
_REQUIRED: Final = (
    "opentelemetry.sdk.metrics",
    "opentelemetry.sdk.trace",
    "opentelemetry.exporter.otlp.proto.http.metric_exporter",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
)
#: seconds to wait for the collector when the gateway stops
_MAX_WAIT_S: Final = 3.0
#: provider names of the conventions, if they differ from ours
_PROVIDERS: Final[Mapping[str, str]] = {row.name: row.telemetry for row in PROVIDERS if row.telemetry}
#: bounds that the conventions recommend for gen_ai.client.token.usage and gen_ai.client.operation.duration
_TOKEN_BUCKETS: Final = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304, 16777216, 67108864)
_SECOND_BUCKETS: Final = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)

Attributes = dict[str, str | int | float | bool | tuple[str, ...]]


def load_packages() -> None:
    """Import the OpenTelemetry packages.

    Raises:
        ConfigError: a package is not installed.
    """
    try:
        for name in _REQUIRED:
            importlib.import_module(name)
    except ImportError:
        raise ConfigError(
            ["telemetry.otel: packages missing: pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"]
        ) from None


class Otel(Observer):
    """Export each call as a span, and its tokens and duration as histograms."""

    def __init__(self, version: str) -> None:
        """Create the exporters that the OTEL_* variables configure.

        Raises:
            ConfigError: the packages are not installed.
        """
        load_packages()
        from opentelemetry import trace  # noqa: PLC0415  # an extra
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415

        self._tracers, self._meters = _providers(version)
        self._tracer = self._tracers.get_tracer("gateway", version)
        self._propagator = TraceContextTextMapPropagator()
        #: provider and requested model, with and without the model that responded
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
        """Export a call that has ended."""
        del left
        common = _common(call)
        start = int(call.started_at * _NANOSECONDS)
        parent = {"traceparent": call.traceparent} if call.traceparent is not None else {}
        span = self._tracer.start_span(
            f"{call.operation} {call.model}".strip(),
            context=self._propagator.extract(parent),
            kind=self._kind,
            attributes={**common, **_details(call, totals)},
            start_time=start,
        )
        if "error.type" in common:
            span.set_status(self._error)
        span.end(start + int(call.duration_s * _NANOSECONDS))
        common = self._bounded(call, common)
        if not call.was_fetched:
            self._duration.record(call.duration_s, common)
        if call.charge is not None:
            usage = call.charge.usage
            self._tokens.record(usage.input_tokens, {**common, "gen_ai.token.type": "input"})
            self._tokens.record(usage.output_tokens, {**common, "gen_ai.token.type": "output"})

    def _bounded(self, call: CallRecord, attributes: Attributes) -> Attributes:
        """Return the attributes for metrics, with a limited number of model and operation names.

        Clients can send any name. A name is kept only after a call with it has succeeded.
        """
        bounded, requested = dict(attributes), (call.provider, call.model)
        if call.status < _ERROR_STATUS and len(self._operations) < MAX_OPERATIONS:
            self._operations.add(call.operation)
        if call.operation not in self._operations:
            bounded["gen_ai.operation.name"] = _OTHER
        if call.model and not self._has_metrics(call, requested):
            bounded["gen_ai.request.model"] = _OTHER
        if call.response_model is not None and not self._has_metrics(call, (*requested, call.response_model)):
            del bounded["gen_ai.response.model"]
        return bounded

    def _has_metrics(self, call: CallRecord, names: tuple[str, ...]) -> bool:
        """Return True if these names have metrics of their own; add them if the call succeeded and there is room."""
        is_real = call.charge is not None and call.status < _ERROR_STATUS
        if is_real and len(self._names) < MAX_NAMES:
            self._names.add(names)
        return names in self._names

    def close(self) -> None:
        """Send everything that is queued. Block for a few seconds at most.

        Without this limit, the SDK would try for a long time to reach a collector that is unavailable.
        """
        threads = [Thread(target=provider.shutdown, daemon=True) for provider in (self._tracers, self._meters)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + _MAX_WAIT_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))


def _providers(version: str) -> tuple[TracerProvider, MeterProvider]:
    """Create the providers of spans and metrics.

    They are not set as the global providers, because an application that embeds the gateway has its own.
    """
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter  # noqa: PLC0415
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
    from opentelemetry.sdk.metrics import MeterProvider  # noqa: PLC0415
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader  # noqa: PLC0415
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

    name = os.environ.get("OTEL_SERVICE_NAME") or "llm-session-gateway"
    resource = Resource.create({"service.name": name, "service.version": version, "process.pid": os.getpid()})
    tracers = TracerProvider(resource=resource, shutdown_on_exit=False)
    tracers.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    reader = PeriodicExportingMetricReader(OTLPMetricExporter())
    return tracers, MeterProvider([reader], resource=resource, shutdown_on_exit=False)


def _common(call: CallRecord) -> Attributes:
    """Return the attributes that spans and metrics share. The session is not one of them: there are too many."""
    attributes: Attributes = {
        "gen_ai.operation.name": call.operation,
        "gen_ai.provider.name": _PROVIDERS.get(call.provider, call.provider),
        "gen_ai.request.model": call.model,
    }
    if call.response_model is not None:
        attributes["gen_ai.response.model"] = call.response_model
    if call.error_code is not None:
        attributes["error.type"] = call.error_code
    elif call.status >= _FAILED or not (call.outcome == "ok" or call.is_pending):
        attributes["error.type"] = str(call.status) if call.outcome == "provider_error" else call.outcome
    return attributes


def _details(call: CallRecord, totals: Totals | None) -> Attributes:
    """Return the attributes that only spans have."""
    attributes: Attributes = {
        "http.response.status_code": call.status,
        "gateway.call.id": call.call_id,
        "gateway.request.id": call.request_id,
        "gateway.dialect": call.dialect,
        "gateway.outcome": call.outcome,
        "gateway.stream": call.stream,
        "gateway.overhead_s": call.overhead_s,
    }
    if call.session is not None:
        attributes["gen_ai.conversation.id"] = call.session.id
        attributes["gateway.client"] = call.session.namespace
    if call.finish_reason is not None:
        attributes["gen_ai.response.finish_reasons"] = (call.finish_reason,)
    if call.charge is not None:
        attributes["gen_ai.usage.input_tokens"] = call.charge.usage.input_tokens
        attributes["gen_ai.usage.output_tokens"] = call.charge.usage.output_tokens
        attributes["gen_ai.usage.cache_read.input_tokens"] = call.charge.usage.cache_read_tokens
        attributes["gateway.usage.source"] = call.charge.source
        if call.charge.cost_usd is not None:
            attributes["gateway.cost_usd"] = float(call.charge.cost_usd)
    if call.first_byte_s is not None:
        attributes["gateway.time_to_first_byte_s"] = call.first_byte_s
    if call.context is not None:
        attributes["gateway.context.tokens"] = call.context.tokens
        attributes["gateway.context.original_tokens"] = call.context.original_tokens
    if call.tools:
        attributes["gateway.tools"] = call.tools
    if totals is not None:
        attributes["gateway.session.total_tokens"] = totals.total_tokens
    return attributes
