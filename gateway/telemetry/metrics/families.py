"""Define the metrics: names, kinds and descriptions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from gateway.core.values import dataclass


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """One metric. `buckets`: upper ends, of a histogram."""

    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


_SECONDS: Final = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0)
_FIRST_BYTE: Final = (0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 6.0, 12.0, 30.0, 60.0, 120.0)
_OVERHEAD: Final = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 1.0)
_ERROR: Final = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_WHERE: Final = ("provider", "model")
_WORKER: Final = ("worker",)

FAMILIES: Final[Mapping[str, MetricFamily]] = {
    "gateway_calls_total": MetricFamily(
        "counter", "Calls that ended.", ("dialect", "provider", "model", "status", "outcome")
    ),
    "gateway_tokens_total": MetricFamily(
        "counter",
        "Tokens that calls were charged; cache_read and cache_write are parts of input, reasoning of output.",
        ("type", *_WHERE),
    ),
    "gateway_cost_usd_total": MetricFamily("counter", "What calls cost, in US dollars.", _WHERE),
    "gateway_unpriced_calls_total": MetricFamily(
        "counter", "Calls that were charged and whose price is not known.", _WHERE
    ),
    "gateway_estimated_calls_total": MetricFamily(
        "counter", "Calls whose usage was estimated, at least in part.", _WHERE
    ),
    "gateway_call_duration_seconds": MetricFamily(
        "histogram", "From a request to the end of its answer; refused calls are left out.", _WHERE, _SECONDS
    ),
    "gateway_time_to_first_byte_seconds": MetricFamily(
        "histogram", "From a request to the head of the provider's answer.", _WHERE, _FIRST_BYTE
    ),
    "gateway_upstream_seconds": MetricFamily(
        "histogram",
        "From a request that is sent on to the head of the provider's answer, further tries included.",
        ("provider",),
        _FIRST_BYTE,
    ),
    "gateway_overhead_seconds": MetricFamily(
        "histogram", "What the gateway took before it sent a request on; refused calls are left out.", (), _OVERHEAD
    ),
    "gateway_trimmed_tokens_total": MetricFamily(
        "counter", "Input tokens that were not sent, by the gateway's estimate.", ("strategy", *_WHERE)
    ),
    "gateway_trimmed_messages_total": MetricFamily("counter", "Messages that were left out or shortened.", ("rule",)),
    "gateway_estimate_error_ratio": MetricFamily(
        "histogram",
        "Difference between expected and reported input tokens, as a share of those reported.",
        ("provider", "source"),
        _ERROR,
    ),
    "gateway_refusals_total": MetricFamily(
        "counter",
        "Calls that the gateway refused, and requests that never became calls, as with an unknown key.",
        ("code",),
    ),
    "gateway_budget_refusals_total": MetricFamily(
        "counter", "Those of them for a budget: nothing is left, or calls under way hold it.", ("code",)
    ),
    "gateway_tool_calls_total": MetricFamily("counter", "Tool calls in answers.", ("tool",)),
    "gateway_tool_result_tokens_total": MetricFamily(
        "counter", "Tokens of tool results in what was sent, in each call that held them.", ("tool",)
    ),
    "gateway_retries_total": MetricFamily("counter", "Requests that were sent again to a provider.", ("provider",)),
    "gateway_fallbacks_total": MetricFamily(
        "counter", "Calls that another provider or model was asked for, by who took them in the end.", _WHERE
    ),
    "gateway_webhooks_total": MetricFamily(
        "counter", "Events for webhooks: sent, failed after all tries, or dropped.", ("result",)
    ),
    "gateway_store_errors_total": MetricFamily(
        "counter", "Times that a call found the store away or damaged; those that are refused while it is away are not."
    ),
    "gateway_running_calls": MetricFamily("gauge", "Calls under way.", _WORKER),
    "gateway_open_holds": MetricFamily("gauge", "Calls under way that hold a part of a budget.", _WORKER),
    "gateway_store_up": MetricFamily("gauge", "1 while the store can be used, 0 while it is away.", _WORKER),
    "gateway_store_waiting_records": MetricFamily("gauge", "Settled calls that wait for the store.", _WORKER),
    "gateway_provider_up": MetricFamily(
        "gauge", "1 while a provider is asked, 0 while it is left alone.", ("provider", "worker")
    ),
    "gateway_info": MetricFamily("gauge", "1 for each worker.", ("version", "worker")),
    "process_cpu_seconds_total": MetricFamily("gauge", "Processor time of a worker.", _WORKER),
    "process_resident_memory_bytes": MetricFamily("gauge", "Memory of a worker.", _WORKER),
    "process_open_fds": MetricFamily("gauge", "Open files and connections of a worker.", _WORKER),
    "process_start_time_seconds": MetricFamily("gauge", "When a worker was started, since the epoch.", _WORKER),
}

TRANSIENT: Final = frozenset(name for name, family in FAMILIES.items() if family.kind == "gauge")
