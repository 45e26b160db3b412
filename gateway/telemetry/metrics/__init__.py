"""Count calls, tokens, cost and times as Prometheus metrics, and sum them over all workers.

This package does not use prometheus_client (measured with 0.26), for these reasons:

- CPU: a call with tools and context takes 4 µs here, 9 µs with that library in one process, and 20 µs in its
  multiprocess mode.
- /metrics with 200 models and 4 workers takes 28 ms of CPU here and 210 ms there.
- Its multiprocess mode extends its files without reserving space: on a full disk, the worker is killed by SIGBUS.
- An empty file of a killed worker makes its /metrics fail: https://github.com/prometheus/client_python/issues/1199.
"""

from __future__ import annotations

import contextlib
import os
import resource
from bisect import bisect_left
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from gateway.core.calling_agent import MAIN, CallingAgent
from gateway.core.ledger.refusals import Allowance
from gateway.core.ports import Observer
from gateway.core.record import CallRecord, ContextRecord
from gateway.core.runaway import RunawayAlert
from gateway.core.usage import Charge, Totals
from gateway.core.values import dataclass
from gateway.telemetry.metrics.exposition import CONTENT_TYPE, render
from gateway.telemetry.metrics.families import FAMILIES, TRANSIENT
from gateway.telemetry.metrics.slots import HIDDEN, MetricSlots, series_text

__all__ = ["CONTENT_TYPE", "FAMILIES", "MAX_AGENT_TYPES", "MAX_MODELS", "MAX_TOOLS", "Metrics", "WorkerState"]

#: names with a series of their own; all further names are counted together as "other"
MAX_MODELS: Final = 200
MAX_TOOLS: Final = 200
MAX_AGENT_TYPES: Final = 50
_OTHER: Final = "other"
#: label of a provider, model or error code that a call does not have, for example because it was refused early
_NONE: Final = "none"
#: ends of the series that are shared by several names
_UNNAMED: Final = (f'"{_OTHER}"}}', f'"{_NONE}"}}')
_MAX_LABEL: Final = 128
_ERROR_STATUS: Final = 400
#: each of these metrics has exactly one series for each model or tool, so its series are used to count the names
_BY_MODEL: Final = "gateway_cost_usd_total"
_BY_TOOL: Final = "gateway_tool_calls_total"
_RESULT_TOKENS: Final = "gateway_tool_result_tokens_total"
_AGENT_CALLS: Final = "gateway_agent_calls_total"
_AGENT_TOKENS: Final = "gateway_agent_tokens_total"
#: label of subagents whose client does not name their type
_UNTYPED: Final = "subagent"
#: prefix of the error codes of budget refusals
_BUDGET: Final = "budget_"
_STORE_ERRORS: Final = "gateway_store_errors_total"
_BUDGET_WARNINGS: Final = "gateway_budget_warnings_total"
_PAGE_BYTES: Final = os.sysconf("SC_PAGESIZE")


@dataclass(frozen=True, slots=True)
class WorkerState:
    """The present state of a worker.

    Attributes:
        started_at: Unix time in seconds.
        calls: running calls.
        holds: running calls that have reserved a part of a budget.
        waiting: settled calls that wait for the store.
        providers: by provider: True if calls are sent to it, False if its circuit is open.
        store_errors: times since the start that the store could not be used.
        prices: source and date of the price table.
    """

    version: str
    started_at: float
    calls: int
    holds: int
    is_store_unavailable: bool
    waiting: int
    providers: Mapping[str, bool]
    store_errors: int = 0
    prices: str = ""


class _Histogram:
    """Count values between each bound and the next smaller one; `exposition.py` makes the counts cumulative."""

    def __init__(self, slots: MetricSlots, family: str, labels: Mapping[str, str]) -> None:
        self._bounds = FAMILIES[family].buckets
        ends = [*map(repr, self._bounds), "+Inf"]
        self._counts = [slots.slot(family, series_text(f"{family}_bucket", {**labels, "le": end})) for end in ends]
        self._sum = slots.slot(family, series_text(f"{family}_sum", labels))
        self._values = slots.values

    def observe(self, value: float) -> None:
        values = self._values
        values[self._counts[bisect_left(self._bounds, value)]] += 1
        values[self._sum] += value


class _ModelCounters:
    """The counters and histograms of one model of one provider."""

    def __init__(self, slots: MetricSlots, provider: str, model: str) -> None:
        self._slots = slots
        self._labels = {"provider": provider, "model": model}
        self._calls: dict[tuple[str, int, str], int] = {}
        self._tokens = [
            slots.slot("gateway_tokens_total", series_text("gateway_tokens_total", {"type": kind, **self._labels}))
            for kind in ("input", "output", "cache_read", "cache_write", "reasoning")
        ]
        self._cost = self._counter(_BY_MODEL)
        self._unpriced = self._counter("gateway_unpriced_calls_total")
        self._estimated = self._counter("gateway_estimated_calls_total")
        self._trimmed: dict[str, int] = {}
        self._fallbacks = self._counter("gateway_fallbacks_total")
        self._duration = _Histogram(slots, "gateway_call_duration_seconds", self._labels)
        self._first_byte = _Histogram(slots, "gateway_time_to_first_byte_seconds", self._labels)

    def _counter(self, family: str) -> int:
        return self._slots.slot(family, series_text(family, self._labels))

    def count(self, call: CallRecord) -> None:
        """Count one call. Tokens, cost and times of a pending call are counted when its response is fetched."""
        values = self._slots.values
        values[self._call_slot(call)] += 1
        if call.is_pending:
            return
        if call.charge is not None:
            self._count_charge(call.charge)
        if call.context is not None and call.context.saved_tokens:
            self._count_trimmed(call.context)
        if call.has_fallen_back:
            values[self._fallbacks] += 1
        if call.outcome != "refused" and not call.was_fetched:
            self._duration.observe(call.duration_s)
        if call.first_byte_s is not None:
            self._first_byte.observe(call.first_byte_s)

    def _count_trimmed(self, context: ContextRecord) -> None:
        for strategy, tokens in context.saved_by_rule:
            slot = self._trimmed.get(strategy)
            if slot is None:
                labels = {"strategy": strategy, **self._labels}
                family = "gateway_trimmed_tokens_total"
                slot = self._trimmed[strategy] = self._slots.slot(family, series_text(family, labels))
            self._slots.values[slot] += tokens

    def _call_slot(self, call: CallRecord) -> int:
        key = (call.dialect, call.status // 100, call.outcome)
        slot = self._calls.get(key)
        if slot is None:
            labels = {"dialect": key[0], **self._labels, "status": f"{key[1]}xx", "outcome": key[2]}
            slot = self._slots.slot("gateway_calls_total", series_text("gateway_calls_total", labels))
            self._calls[key] = slot
        return slot

    def _count_charge(self, charge: Charge) -> None:
        values, usage = self._slots.values, charge.usage
        tokens_in, tokens_out, cache_read, cache_write, reasoning = self._tokens
        values[tokens_in] += usage.input_tokens
        values[tokens_out] += usage.output_tokens
        values[cache_read] += usage.cache_read_tokens
        values[cache_write] += usage.cache_write_tokens
        values[reasoning] += usage.reasoning_tokens
        if charge.cost_usd is None:
            values[self._unpriced] += 1
        else:
            values[self._cost] += float(charge.cost_usd)
        if charge.source != "provider":
            values[self._estimated] += 1


class _BoundedSeries:
    """A limited number of series of one metric.

    Series that an earlier worker left in the files count too. Otherwise, workers that are killed again and again would
    use up all slots.
    """

    def __init__(self, slots: MetricSlots, family: str, limit: int) -> None:
        self._slots = slots
        self._family = family
        self._free = limit - sum(not series.endswith(_UNNAMED) for series in slots.series(family))

    def has(self, series: str) -> bool:
        """Return True if the series has a slot."""
        return self._slots.has(self._family, series)

    def try_add(self, series: str) -> bool:
        """Reserve a slot for the series and return True, or return False if the limit is reached."""
        if self._free <= 0:
            return False
        self._free -= 1
        self._slots.slot(self._family, series)
        return True


class _NameCounter:
    """A counter with one series for each of a limited number of names, such as tools. `label`: of the name."""

    def __init__(self, slots: MetricSlots, family: str, label: str, limit: int) -> None:
        self._slots = slots
        self._family = family
        self._label = label
        self._series = _BoundedSeries(slots, family, limit)
        self._known: dict[str, int] = {}

    def add(self, full_name: str, number: float = 1) -> None:
        name = full_name[:_MAX_LABEL]
        slot = self._known.get(name)
        if slot is None:
            series = series_text(self._family, {self._label: name})
            if self._series.has(series) or self._series.try_add(series):
                slot = self._known[name] = self._slots.slot(self._family, series)
            else:
                slot = self._slots.slot(self._family, series_text(self._family, {self._label: _OTHER}))
        self._slots.values[slot] += number


class _AgentCounters:
    """Counters of the calls of agents. A label is a type and never an id, which is new for each agent."""

    def __init__(self, slots: MetricSlots) -> None:
        self._slots = slots
        self._tokens = _NameCounter(slots, _AGENT_TOKENS, "agent_type", MAX_AGENT_TYPES)
        self._cost = _NameCounter(slots, "gateway_agent_cost_usd_total", "agent_type", MAX_AGENT_TYPES)
        self._calls: dict[tuple[str, str], int] = {}

    def count(self, agent: CallingAgent, charge: Charge | None) -> None:
        name = (agent.type or (_UNTYPED if agent.is_subagent else MAIN))[:_MAX_LABEL]
        self._tokens.add(name, charge.usage.total_tokens if charge is not None else 0)
        if charge is not None and charge.cost_usd is not None:
            self._cost.add(name, float(charge.cost_usd))
        key = (name, agent.request_class)
        slot = self._calls.get(key)
        if slot is None:
            shown = name if self._slots.has(_AGENT_TOKENS, series_text(_AGENT_TOKENS, {"agent_type": name})) else _OTHER
            labels = {"agent_type": shown, "request_class": agent.request_class}
            slot = self._slots.slot(_AGENT_CALLS, series_text(_AGENT_CALLS, labels))
            if shown == name:
                self._calls[key] = slot
        self._slots.values[slot] += 1


class Metrics(Observer):
    """Count calls. `folder`: where the workers of this machine share their values; None for a single worker."""

    def __init__(self, folder: Path | None = None) -> None:
        self._slots = MetricSlots(folder, TRANSIENT)
        self._by_model: dict[tuple[str, str], _ModelCounters] = {}
        self._models = _BoundedSeries(self._slots, _BY_MODEL, MAX_MODELS)
        self._tools = _NameCounter(self._slots, _BY_TOOL, "tool", MAX_TOOLS)
        self._results = _NameCounter(self._slots, _RESULT_TOKENS, "tool", MAX_TOOLS)
        self._agents = _AgentCounters(self._slots)
        self._counters: dict[tuple[str, str], int] = {}
        self._providers: set[str] = set()
        self._estimate_errors: dict[tuple[str, str], _Histogram] = {}
        self._upstream: dict[str, _Histogram] = {}
        self._store_errors = 0
        self._overhead = _Histogram(self._slots, "gateway_overhead_seconds", {})
        self._warnings = self._slots.slot(_BUDGET_WARNINGS, _BUDGET_WARNINGS)

    def record(self, call: CallRecord, totals: Totals | None, left: Allowance | None = None) -> None:
        """Count a call that has ended."""
        del totals
        self._counters_of(call).count(call)
        if left is not None and left.warning is not None:
            self._slots.values[self._warnings] += 1
        if call.is_pending:
            return
        if call.outcome == "refused":
            code = call.error_code or _NONE
            self._add("gateway_refusals_total", "code", code)
            if code.startswith(_BUDGET):
                self._add("gateway_budget_refusals_total", "code", code)
        else:
            self._overhead.observe(call.overhead_s)
        if call.first_byte_s is not None:
            self._upstream_histogram(call.provider).observe(max(0.0, call.first_byte_s - call.overhead_s))
        for tool in call.tools:
            self._tools.add(tool)
        if call.context is not None:
            self._count_context(call, call.context)
        if call.agent is not None:
            self._agents.count(call.agent, call.charge)
        if call.retries:
            self._add("gateway_retries_total", "provider", call.provider or _NONE, call.retries)

    def refused(self, call: CallRecord) -> None:
        """Count a request that was refused before it became a call."""
        self.record(call, None)

    def warned(self, alert: RunawayAlert) -> None:
        """Count a warning of runaway protection. Refusals are counted by their error code."""
        if alert.found.action == "warn":
            self._add("gateway_runaway_warnings_total", "kind", alert.found.kind)

    def _upstream_histogram(self, provider: str) -> _Histogram:
        histogram = self._upstream.get(provider)
        if histogram is None:
            labels = {"provider": provider or _NONE}
            histogram = self._upstream[provider] = _Histogram(self._slots, "gateway_upstream_seconds", labels)
        return histogram

    def _counters_of(self, call: CallRecord) -> _ModelCounters:
        counters = self._by_model.get((call.provider, call.model))
        if counters is None:
            key = (call.provider, self._model_label(call))
            counters = self._by_model.get(key)
            if counters is None:
                counters = self._by_model[key] = _ModelCounters(self._slots, key[0] or _NONE, key[1] or _NONE)
        return counters

    def _model_label(self, call: CallRecord) -> str:
        """Return the name under which the model of a call is counted: its own name, or "other"."""
        model = call.model[:_MAX_LABEL]
        if not model:
            return model
        series = series_text(_BY_MODEL, {"provider": call.provider or _NONE, "model": model})
        # Clients can send any model name. A name gets a series only after a model has responded to it.
        is_real = call.charge is not None and call.status < _ERROR_STATUS
        return model if self._models.has(series) or (is_real and self._models.try_add(series)) else _OTHER

    def _count_context(self, call: CallRecord, context: ContextRecord) -> None:
        """Count trimmed messages, the tokens of tool results, and the error of the token estimate."""
        if not context.shadow:
            for rule, number in context.trimmed.items():
                self._add("gateway_trimmed_messages_total", "rule", rule, number)
        if call.charge is None:
            return
        for tool, counted in context.tool_weights.items():
            self._results.add(tool, counted.tokens)
        reported = call.request_tokens
        expected = context.original_tokens if context.shadow else context.tokens
        if reported:
            histogram = self._estimate_errors.get((call.provider, context.source))
            if histogram is None:
                labels = {"provider": call.provider or _NONE, "source": context.source}
                histogram = _Histogram(self._slots, "gateway_estimate_error_ratio", labels)
                self._estimate_errors[call.provider, context.source] = histogram
            histogram.observe(abs(reported - expected) / reported)

    def _add(self, family: str, label: str, value: str, number: float = 1) -> None:
        slot = self._counters.get((family, value))
        if slot is None:
            slot = self._counters[family, value] = self._slots.slot(family, series_text(family, {label: value}))
        self._slots.values[slot] += number

    def count_webhook_event(self, result: str) -> None:
        """Count a webhook event by its result: `count_webhook_event`, `failed` or `dropped`."""
        self._add("gateway_webhooks_total", "result", result)

    def update_gauges(self, state: WorkerState) -> None:
        """Update the gauges of this worker."""
        worker = {"worker": str(self._slots.worker)}
        gauges = {
            "gateway_running_calls": float(state.calls),
            "gateway_open_holds": float(state.holds),
            "gateway_store_up": float(not state.is_store_unavailable),
            "gateway_store_waiting_records": float(state.waiting),
            "process_start_time_seconds": state.started_at,
            **_process(),
        }
        for family, value in gauges.items():
            self._set(family, worker, value)
        # This counter is shared by all workers, so each worker adds only the errors since its last update.
        self._slots.values[self._slots.slot(_STORE_ERRORS, _STORE_ERRORS)] += state.store_errors - self._store_errors
        self._store_errors = state.store_errors
        self._set("gateway_info", {"version": state.version, **worker}, 1.0)
        self._set("gateway_price_table_info", {"table": state.prices, **worker}, 1.0)
        # A provider that a reload has removed is neither up nor down.
        removed = dict.fromkeys(self._providers - set(state.providers), HIDDEN)
        self._providers = set(state.providers)
        for provider, is_up in {**removed, **state.providers}.items():
            self._set("gateway_provider_up", {"provider": provider, **worker}, float(is_up))

    def _set(self, family: str, labels: Mapping[str, str], value: float) -> None:
        self._slots.values[self._slots.slot(family, series_text(family, labels))] = value

    def text(self) -> str:
        """Return the metrics of all workers in the Prometheus text format."""
        return render(self._slots.read())


def _process() -> dict[str, float]:
    """Return CPU time, memory and open files of this process; only CPU time on systems without /proc."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    values = {"process_cpu_seconds_total": used.ru_utime + used.ru_stime}
    with contextlib.suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
        values["process_resident_memory_bytes"] = float(pages * _PAGE_BYTES)
        values["process_open_fds"] = float(sum(1 for _ in Path("/proc/self/fd").iterdir()))
    return values
