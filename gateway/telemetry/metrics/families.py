"""Define all Prometheus metrics: name, type, help text, labels and histogram buckets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from gateway.core.values import dataclass


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """One metric. `buckets`: the upper bounds of a histogram."""

    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


_SECONDS: Final = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0)
_UNTIL_FIRST_BYTE: Final = (0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 6.0, 12.0, 30.0, 60.0, 120.0)
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
    "gateway_cost_usd_total": MetricFamily("counter", "Cost of calls in US dollars.", _WHERE),
    "gateway_unpriced_calls_total": MetricFamily("counter", "Calls that were charged without a known price.", _WHERE),
    "gateway_estimated_calls_total": MetricFamily(
        "counter", "Calls whose usage was estimated, completely or in part.", _WHERE
    ),
    "gateway_call_duration_seconds": MetricFamily(
        "histogram", "Time from a request to the end of its response, without refused calls.", _WHERE, _SECONDS
    ),
    "gateway_time_to_first_byte_seconds": MetricFamily(
        "histogram", "Time from a request to the headers of the provider's response.", _WHERE, _UNTIL_FIRST_BYTE
    ),
    "gateway_upstream_seconds": MetricFamily(
        "histogram",
        "Time from sending a request to a provider to the headers of its response, including retries.",
        ("provider",),
        _UNTIL_FIRST_BYTE,
    ),
    "gateway_overhead_seconds": MetricFamily(
        "histogram", "Time in the gateway before it sent a request to a provider, without refused calls.", (), _OVERHEAD
    ),
    "gateway_trimmed_tokens_total": MetricFamily(
        "counter", "Input tokens that trimming removed, as estimated by the gateway.", ("strategy", *_WHERE)
    ),
    "gateway_trimmed_messages_total": MetricFamily("counter", "Messages removed or shortened by trimming.", ("rule",)),
    "gateway_estimate_error_ratio": MetricFamily(
        "histogram",
        "Difference between estimated and reported input tokens, as a share of the reported tokens.",
        ("provider", "source"),
        _ERROR,
    ),
    "gateway_refusals_total": MetricFamily(
        "counter",
        "Calls that the gateway refused, and requests that were refused before they became calls.",
        ("code",),
    ),
    "gateway_budget_refusals_total": MetricFamily(
        "counter", "Calls refused for a budget: it is used up, or running calls have reserved the rest.", ("code",)
    ),
    "gateway_runaway_warnings_total": MetricFamily(
        "counter", "Limits of runaway protection from which it warns, each time one was reached.", ("kind",)
    ),
    "gateway_budget_warnings_total": MetricFamily(
        "counter", "Calls after which the used share of a budget was at least budget.warn_at."
    ),
    "gateway_tool_calls_total": MetricFamily("counter", "Tool calls in responses.", ("tool",)),
    "gateway_tool_result_tokens_total": MetricFamily(
        "counter", "Tokens of tool results in requests; a result counts in each call that contains it.", ("tool",)
    ),
    "gateway_agent_calls_total": MetricFamily(
        "counter",
        "Calls whose client names the agent that makes them, by type of agent and request class.",
        ("agent_type", "request_class"),
    ),
    "gateway_agent_tokens_total": MetricFamily("counter", "Tokens that these calls were charged.", ("agent_type",)),
    "gateway_agent_cost_usd_total": MetricFamily("counter", "Cost of these calls in US dollars.", ("agent_type",)),
    "gateway_retries_total": MetricFamily("counter", "Requests that were retried.", ("provider",)),
    "gateway_fallbacks_total": MetricFamily(
        "counter", "Calls that fell back to another provider or model, by the last one that was asked.", _WHERE
    ),
    "gateway_webhooks_total": MetricFamily(
        "counter", "Webhook events by result: sent, failed after all retries, or dropped.", ("result",)
    ),
    "gateway_store_errors_total": MetricFamily(
        "counter", "Calls that found the store unavailable or damaged, without calls refused while it is unavailable."
    ),
    "gateway_running_calls": MetricFamily("gauge", "Running calls.", _WORKER),
    "gateway_open_holds": MetricFamily("gauge", "Running calls that have reserved a part of a budget.", _WORKER),
    "gateway_store_up": MetricFamily("gauge", "1 while the store is available, 0 while it is unavailable.", _WORKER),
    "gateway_store_waiting_records": MetricFamily("gauge", "Settled calls that wait for the store.", _WORKER),
    "gateway_provider_up": MetricFamily(
        "gauge", "1 while calls are sent to a provider, 0 while its circuit is open.", ("provider", "worker")
    ),
    "gateway_info": MetricFamily("gauge", "1 for each worker.", ("version", "worker")),
    "gateway_price_table_info": MetricFamily(
        "gauge",
        "1 for each worker; the label names the source of list prices and the day they were read.",
        ("table", "worker"),
    ),
    "process_cpu_seconds_total": MetricFamily("gauge", "CPU time of a worker.", _WORKER),
    "process_resident_memory_bytes": MetricFamily("gauge", "Memory of a worker.", _WORKER),
    "process_open_fds": MetricFamily("gauge", "Open files and connections of a worker.", _WORKER),
    "process_start_time_seconds": MetricFamily("gauge", "Start of a worker in Unix time.", _WORKER),
}

TRANSIENT: Final = frozenset(name for name, family in FAMILIES.items() if family.kind == "gauge")
