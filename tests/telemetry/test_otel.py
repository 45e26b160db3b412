"""Test the spans and metrics that a collector receives."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from gateway.core.record import CallRecord
from gateway.core.usage import Charge, Usage
from gateway.mock import MockProvider, MockServer
from gateway.telemetry.otel import MAX_NAMES, MAX_OPERATIONS, Otel
from tests.conftest import StartGateway
from tests.support.gateways import GatewayThread
from tests.support.web import CHAT, HI

DURATION = "gen_ai.client.operation.duration"
ANSWERED = CallRecord(
    call_id="01", request_id="r", session=None, derived_session=False, started_at=1.0, dialect="chat", operation="chat",
    provider="openai", model="gpt-5", response_model=None, stream=False, status=200, outcome="ok", error_code=None,
    finish_reason="stop", tools=(), charge=Charge(Usage(100, 20, 120, 40, 10, 5), "provider", None), overhead_s=0.003,
    first_byte_s=0.3, duration_s=3.0, request_bytes=1, response_bytes=1,
)  # fmt: skip
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """An OTLP receiver over HTTP."""

    def __init__(self) -> None:
        self.received: list[tuple[str, bytes]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                compressed = self.headers.get("content-encoding") == "gzip"
                collector.received.append((self.path, gzip.decompress(body) if compressed else body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self._thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()

    def spans(self) -> list[Any]:
        requests = [ExportTraceServiceRequest.FromString(body) for path, body in self.received if path == "/v1/traces"]
        return [
            s for r in requests for resource in r.resource_spans for scope in resource.scope_spans for s in scope.spans
        ]

    def metrics(self) -> dict[str, Any]:
        requests = [ExportMetricsServiceRequest.FromString(body) for path, body in self.received if "metrics" in path]
        found = [
            m for r in requests for one in r.resource_metrics for scope in one.scope_metrics for m in scope.metrics
        ]
        return {metric.name: metric.histogram.data_points for metric in found}


def said(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    found = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", found.url)
    yield found
    found.close()


@pytest.fixture
def traced(
    collector: Collector, gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider
) -> GatewayThread:
    assert collector.received == []
    assert mock.calls == []
    return gateway_server(mock_server.url, **{"telemetry.otel": True})


def call(gateway: GatewayThread, **headers: str) -> int:
    body = {"model": "mock-small", "messages": HI, "max_tokens": 9}
    return gateway.web.post(CHAT, body, {"x-session-id": "otel", **headers}).status


def test_call_is_exported_as_span_with_usage_and_session(traced: GatewayThread, collector: Collector) -> None:
    assert call(traced) == 200
    record = traced.web.get("/api/sessions/otel/calls").json["calls"][0]
    traced.stop()
    (span,) = collector.spans()
    found = said(span.attributes)
    assert span.name == "chat mock-small"
    assert found["gen_ai.conversation.id"] == "otel"
    assert found["gen_ai.usage.input_tokens"] == record["usage"]["input_tokens"]
    assert found["gen_ai.usage.output_tokens"] == record["usage"]["output_tokens"]
    assert found["gateway.call.id"] == record["call_id"]
    assert (span.end_time_unix_nano - span.start_time_unix_nano) / 1e6 == pytest.approx(record["duration_ms"], abs=0.01)
    assert "hi" not in str(collector.spans()).split('"'), "no text of a prompt"


def test_span_belongs_to_the_trace_of_the_client(
    traced: GatewayThread, collector: Collector, mock: MockProvider
) -> None:
    parent = f"00-{TRACE}-{PARENT}-01"
    assert call(traced, traceparent=parent) == 200
    assert mock.calls[-1].header("traceparent") == parent, "the provider is told of the same trace"
    assert call(traced, traceparent="00-nonsense") == 200
    traced.stop()
    inside, outside = collector.spans()
    assert (inside.trace_id.hex(), inside.parent_span_id.hex()) == (TRACE, PARENT)
    assert outside.parent_span_id == b""


def test_failed_call_is_an_error_span(traced: GatewayThread, collector: Collector) -> None:
    assert call(traced, **{"x-mock": "status=503"}) == 503
    assert call(traced, **{"x-context-trim": "perhaps"}) == 400
    traced.stop()
    failed = collector.spans()
    assert [said(span.attributes)["error.type"] for span in failed] == ["503", "invalid_request"]
    assert {span.status.code for span in failed} == {2}


def test_pending_call_is_not_an_error(traced: GatewayThread, collector: Collector) -> None:
    body = {"model": "mock-small", "input": "hi", "background": True}
    begun = traced.web.post("/v1/responses", body, {"x-session-id": "s"}).json["id"]
    for _ in range(2):
        traced.web.get(f"/v1/responses/{begun}")
    traced.stop()
    spans = [said(span.attributes) for span in collector.spans()]
    of_the_call = [span for span in spans if span.get("gen_ai.request.model") == "mock-small"]
    assert [span["gateway.outcome"] for span in of_the_call] == ["pending", "ok"]
    assert [span.get("gen_ai.usage.input_tokens", 0) > 0 for span in of_the_call] == [False, True]
    assert not any("error.type" in span for span in spans)


def test_tokens_and_durations_are_histograms(traced: GatewayThread, collector: Collector) -> None:
    for _ in range(3):
        assert call(traced) == 200
    totals = traced.web.get("/api/sessions/otel").json["cumulative_token_usage"]
    traced.stop()
    metrics = collector.metrics()
    tokens = {said(point.attributes)["gen_ai.token.type"]: point for point in metrics["gen_ai.client.token.usage"]}
    assert (tokens["input"].sum, tokens["output"].sum) == (totals["input_tokens"], totals["output_tokens"])
    (duration,) = metrics["gen_ai.client.operation.duration"]
    assert duration.count == 3
    assert "gen_ai.conversation.id" not in said(duration.attributes), "sessions are too many to tell metrics apart by"


def test_unknown_model_names_use_no_memory(traced: GatewayThread, collector: Collector) -> None:
    assert call(traced) == 200
    for number in range(3):
        body = {"model": f"made-up-{number}", "messages": HI, "max_tokens": 9}
        assert traced.web.post(CHAT, body, {"x-session-budget-tokens": "1"}).status == 400
    assert (
        traced.web.post(CHAT, {"model": "mock-small", "messages": HI}, {"x-session-budget-tokens": "1"}).status == 400
    )
    traced.stop()
    points = collector.metrics()[DURATION]
    shown = [said(point.attributes)["gen_ai.request.model"] for point in points]
    assert sorted(shown) == ["mock-small", "mock-small", "other"]
    # The SDK does not keep spans, so their names need no limit.
    assert {"chat made-up-0", "chat made-up-1", "chat made-up-2"} <= {span.name for span in collector.spans()}


def test_number_of_model_names_is_limited(collector: Collector) -> None:
    otel = Otel("1")
    for number in range(MAX_NAMES // 2 + 20):
        otel.record(replace(ANSWERED, model=f"model-{number}", response_model=f"model-{number}-x"), None)
    otel.close()
    points = {said(point.attributes)["gen_ai.request.model"]: point for point in collector.metrics()[DURATION]}
    assert len(points) == MAX_NAMES // 2 + 1
    assert points["other"].count == 20
    assert "gen_ai.response.model" not in said(points["other"].attributes)


def test_number_of_operations_is_limited(collector: Collector) -> None:
    otel = Otel("1")
    otel.record(replace(ANSWERED, operation="refused", status=404), None)
    for number in range(MAX_OPERATIONS + 20):
        otel.record(replace(ANSWERED, operation=f"path-{number}"), None)
    otel.record(ANSWERED, None)
    otel.close()
    shown = {said(point.attributes)["gen_ai.operation.name"] for point in collector.metrics()[DURATION]}
    assert {"chat", "path-0", "other"} <= shown
    assert "refused" not in shown
    assert len(shown) <= MAX_OPERATIONS + 1


def test_calls_work_without_a_collector(
    monkeypatch: pytest.MonkeyPatch, gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    gateway = gateway_server(mock_server.url, **{"telemetry.otel": True})
    assert call(gateway) == 200
    assert len(mock.calls) == 1
    gateway.stop()
