"""Test which metrics calls change, and their Prometheus text."""

from __future__ import annotations

import math
import os
import pickle
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest

from gateway.core.calling_agent import CallingAgent
from gateway.core.counting.context import ToolResultTokens
from gateway.core.ledger.refusals import Allowance
from gateway.core.ledger.session_key import SessionKey
from gateway.core.record import CallRecord, ContextRecord
from gateway.core.runaway import Finding, RunawayAlert
from gateway.core.usage import Charge, Usage
from gateway.telemetry.metrics import FAMILIES, MAX_AGENT_TYPES, MAX_MODELS, MAX_TOOLS, Metrics, WorkerState
from tests.support.gateways import ROOT
from tests.support.prometheus import Samples, read
from tests.support.timing import count_calls

CONTEXT = ContextRecord(
    tokens=90, original_tokens=150, source="learned", budget=1_000, conversation_tokens=60, tool_tokens=30, key="k",
    estimate=80, trimmed={"drop": 3, "condense": 1},
)  # fmt: skip
CALL = CallRecord(
    call_id="01", request_id="r", session=SessionKey("alice", "secret-session"), derived_session=False, started_at=1.0,
    dialect="chat", operation="chat", provider="openai", model="gpt-5", response_model="gpt-5-x", stream=True,
    status=200, outcome="ok", error_code=None, finish_reason="stop", tools=("search", "read", "search"),
    charge=Charge(Usage(100, 20, 120, 40, 10, 5), "provider", Decimal("0.25")), overhead_s=0.003, first_byte_s=0.3,
    duration_s=3.0, request_bytes=1, response_bytes=1, context=CONTEXT,
)  # fmt: skip
REFUSED = replace(
    CALL, status=400, outcome="refused", error_code="budget_exhausted", charge=None, first_byte_s=None, tools=(),
    context=None,
)  # fmt: skip
WELL = WorkerState(
    "1.2.3",
    1_000.5,
    3,
    2,
    is_store_unavailable=False,
    waiting=0,
    providers={"openai": True, "ollama": False},
    prices="litellm 1.2 (2026-11-28)",
)
WHERE = {"provider": "openai", "model": "gpt-5"}


def counted(*calls: CallRecord) -> Samples:
    metrics = Metrics()
    for call in calls:
        metrics.record(call, None)
    return read(metrics.text())


def test_calls_are_counted_by_model_status_and_outcome() -> None:
    found = counted(CALL, CALL, replace(CALL, status=502, outcome="upstream_failed", charge=None))
    labels = {"dialect": "chat", **WHERE, "status": "2xx", "outcome": "ok"}
    assert found.value("gateway_calls_total", **labels) == 2
    failed = {**labels, "status": "5xx", "outcome": "upstream_failed"}
    assert found.value("gateway_calls_total", **failed) == 1


def test_tokens_are_counted_by_type_and_cost_in_dollars() -> None:
    found = counted(CALL, CALL)
    tokens = {kind: found.value("gateway_tokens_total", type=kind, **WHERE) for kind in ("input", "output")}
    assert tokens == {"input": 200, "output": 40}
    assert found.value("gateway_tokens_total", type="cache_read", **WHERE) == 80
    assert found.value("gateway_tokens_total", type="cache_write", **WHERE) == 20
    assert found.value("gateway_tokens_total", type="reasoning", **WHERE) == 10
    assert found.value("gateway_cost_usd_total", **WHERE) == pytest.approx(0.5)
    assert found.value("gateway_unpriced_calls_total", **WHERE) == 0
    assert found.value("gateway_estimated_calls_total", **WHERE) == 0


def test_unpriced_and_estimated_calls_are_counted() -> None:
    found = counted(replace(CALL, charge=Charge(Usage.of(5, 1), "estimated")))
    assert found.value("gateway_unpriced_calls_total", **WHERE) == 1
    assert found.value("gateway_estimated_calls_total", **WHERE) == 1
    assert found.value("gateway_cost_usd_total", **WHERE) == 0


def test_histogram_buckets_are_cumulative() -> None:
    found = counted(CALL, replace(CALL, duration_s=0.1, first_byte_s=0.05), replace(CALL, duration_s=1_000.0))
    duration = "gateway_call_duration_seconds"
    assert found.value(f"{duration}_bucket", le="0.1", **WHERE) == 1
    assert found.value(f"{duration}_bucket", le="2.0", **WHERE) == 1
    assert found.value(f"{duration}_bucket", le="4.0", **WHERE) == 2
    assert found.value(f"{duration}_bucket", le="300.0", **WHERE) == 2
    assert found.value(f"{duration}_bucket", le="+Inf", **WHERE) == 3
    assert found.value(f"{duration}_count", **WHERE) == 3
    assert found.value(f"{duration}_sum", **WHERE) == pytest.approx(1_003.1)
    assert found.value("gateway_time_to_first_byte_seconds_bucket", le="0.05", **WHERE) == 1
    assert found.value("gateway_overhead_seconds_bucket", le="0.004") == 3
    assert found.value("gateway_overhead_seconds_bucket", le="0.002") == 0


def test_refused_call_is_counted_by_code_without_times() -> None:
    found = counted(REFUSED, REFUSED, replace(REFUSED, error_code="rate_limit_exceeded"))
    assert found.value("gateway_refusals_total", code="budget_exhausted") == 2
    assert found.value("gateway_refusals_total", code="rate_limit_exceeded") == 1
    assert found.value("gateway_overhead_seconds_count") == 0


def test_trimmed_messages_are_counted_by_rule_and_tokens_by_strategy() -> None:
    found = counted(CALL)
    assert found.value("gateway_trimmed_messages_total", rule="drop") == 3
    assert found.value("gateway_trimmed_messages_total", rule="condense") == 1
    assert found.value("gateway_trimmed_tokens_total", strategy="other", **WHERE) == 60
    shadow = counted(replace(CALL, context=replace(CONTEXT, shadow=True)))
    assert shadow.family("gateway_trimmed_tokens_total") == {}
    assert shadow.family("gateway_trimmed_messages_total") == {}


def test_trimmed_tokens_are_counted_by_the_rule_that_saved_them() -> None:
    context = replace(CONTEXT, saved={"condense": 40, "drop": 40})
    found = counted(replace(CALL, context=context), replace(CALL, context=replace(context, trimmed={"drop": 3})))
    assert found.value("gateway_trimmed_tokens_total", strategy="condense", **WHERE) == 30
    assert found.value("gateway_trimmed_tokens_total", strategy="drop", **WHERE) == 30 + 60


def test_budget_refusals_are_also_counted_separately() -> None:
    busy, other = replace(REFUSED, error_code="budget_busy"), replace(REFUSED, error_code="model_not_found")
    found = counted(REFUSED, busy, busy, other)
    assert found.family("gateway_budget_refusals_total") == {
        (("code", "budget_exhausted"),): 1,
        (("code", "budget_busy"),): 2,
    }


def test_calls_after_which_a_budget_is_nearly_used_are_counted() -> None:
    metrics = Metrics()
    for warning in (None, 0.8, 1.2):
        metrics.record(CALL, None, Allowance(100, 20, warning=warning))
    metrics.record(CALL, None)
    assert read(metrics.text()).value("gateway_budget_warnings_total") == 2


def test_upstream_time_excludes_gateway_overhead() -> None:
    found = counted(CALL, replace(CALL, overhead_s=0.4), REFUSED, replace(CALL, provider="groq"))
    assert found.value("gateway_upstream_seconds_count", provider="openai") == 2
    assert found.value("gateway_upstream_seconds_sum", provider="openai") == pytest.approx(0.297)
    assert found.value("gateway_upstream_seconds_count", provider="groq") == 1


def test_store_errors_of_all_workers_are_summed_once(tmp_path: Path) -> None:
    workers = [Metrics(tmp_path) for _ in range(2)]
    for errors in (2, 2, 3):
        for worker in workers:
            worker.update_gauges(replace(WELL, store_errors=errors))
    assert read(workers[0].text()).family("gateway_store_errors_total") == {(): 6}


def test_estimate_error_is_a_share_of_reported_input_tokens() -> None:
    labels = {"provider": "openai", "source": "learned"}
    error = "gateway_estimate_error_ratio"
    found = counted(CALL)
    assert found.value(f"{error}_sum", **labels) == pytest.approx(0.1)
    assert found.value(f"{error}_bucket", le="0.05", **labels) == 0
    assert found.value(f"{error}_bucket", le="0.1", **labels) == 1
    shadow = counted(replace(CALL, context=replace(CONTEXT, shadow=True)))
    assert shadow.value(f"{error}_sum", **labels) == pytest.approx(0.5)
    guessed = counted(replace(CALL, charge=Charge(Usage.of(90, 1), "estimated")), replace(CALL, charge=None))
    assert guessed.family(f"{error}_count") == {}
    assert CALL.charge is not None
    passes = Charge(Usage.of(CALL.charge.usage.input_tokens + 500, 1), "provider")
    advised = counted(replace(CALL, charge=passes, context=replace(CONTEXT, beyond=500)))
    assert advised.value(f"{error}_sum", **labels) == pytest.approx(0.1)


def test_tool_calls_retries_and_fallbacks_are_counted() -> None:
    found = counted(replace(CALL, notes={"retries": "2, the last after 503", "fallback": "a/b: 500"}), CALL)
    assert found.value("gateway_tool_calls_total", tool="search") == 4
    assert found.value("gateway_tool_calls_total", tool="read") == 2
    assert found.value("gateway_retries_total", provider="openai") == 2
    assert found.value("gateway_fallbacks_total", **WHERE) == 1


def test_tool_result_tokens_are_counted_in_each_charged_call() -> None:
    counted_tokens = replace(CONTEXT, tool_weights={"search": ToolResultTokens(2, 25), "read": ToolResultTokens(1, 5)})
    refused = replace(REFUSED, context=counted_tokens)
    estimated = replace(CALL, context=counted_tokens, charge=Charge(Usage.of(90, 1), "estimated"))
    found = counted(replace(CALL, context=counted_tokens), estimated, refused)
    assert found.value("gateway_tool_result_tokens_total", tool="search") == 50
    assert found.value("gateway_tool_result_tokens_total", tool="read") == 10


def test_tool_results_beyond_the_limit_are_counted_as_other() -> None:
    weights = {f"t{number}": ToolResultTokens(1, 3) for number in range(MAX_TOOLS + 50)}
    tools = counted(replace(CALL, context=replace(CONTEXT, tool_weights=weights))).family(
        "gateway_tool_result_tokens_total"
    )
    assert len(tools) == MAX_TOOLS + 1
    assert tools[("tool", "other"),] == 150


def test_calls_of_agents_are_counted_by_type_and_never_by_id() -> None:
    agents = [
        CallingAgent("id-1", None, "Explore", "subagent"),
        CallingAgent("id-2", "id-1", "Explore", "compaction"),
        CallingAgent("id-3"),
        CallingAgent(request_class="auxiliary"),
    ]
    found = counted(CALL, *(replace(CALL, agent=agent) for agent in agents), replace(REFUSED, agent=agents[0]))
    assert found.value("gateway_agent_calls_total", agent_type="Explore", request_class="subagent") == 2
    assert found.value("gateway_agent_calls_total", agent_type="Explore", request_class="compaction") == 1
    assert found.value("gateway_agent_tokens_total", agent_type="Explore") == 240
    assert found.value("gateway_agent_cost_usd_total", agent_type="Explore") == 0.5
    assert found.value("gateway_agent_tokens_total", agent_type="subagent") == 120
    assert found.value("gateway_agent_tokens_total", agent_type="main") == 120
    assert "id-" not in str(found)


def test_types_of_agents_beyond_the_limit_are_counted_as_other() -> None:
    agents = [CallingAgent(f"a{number}", None, f"t{number}", "subagent") for number in range(MAX_AGENT_TYPES + 20)]
    found = counted(*(replace(CALL, agent=agent) for agent in agents))
    for name in ("gateway_agent_calls_total", "gateway_agent_tokens_total"):
        series = found.family(name)
        assert len(series) == MAX_AGENT_TYPES + 1
        [other] = [value for labels, value in series.items() if ("agent_type", "other") in labels]
        assert other == (20 if name == "gateway_agent_calls_total" else 20 * 120)


def test_models_beyond_the_limit_are_counted_as_other() -> None:
    found = counted(*(replace(CALL, model=f"m{number}") for number in range(MAX_MODELS + 50)))
    calls = found.family("gateway_calls_total")
    assert len(calls) == MAX_MODELS + 1
    assert sum(calls.values()) == MAX_MODELS + 50
    assert found.value("gateway_tokens_total", type="input", provider="openai", model="other") == 50 * 100


def test_model_without_successful_call_gets_no_series() -> None:
    failed = [
        replace(CALL, model=f"junk{number}", status=404, outcome="provider_error", charge=None)
        for number in range(MAX_MODELS + 50)
    ]
    found = counted(*failed, CALL)
    models = {dict(labels)["model"] for labels in found.family("gateway_calls_total")}
    assert models == {"other", "gpt-5"}


def test_known_model_keeps_its_series_when_a_call_fails() -> None:
    found = counted(CALL, replace(CALL, status=500, outcome="provider_error", charge=None))
    assert {dict(labels)["model"] for labels in found.family("gateway_calls_total")} == {"gpt-5"}


def test_tools_beyond_the_limit_are_counted_as_other() -> None:
    names = tuple(f"t{number}" for number in range(MAX_TOOLS + 50))
    tools = counted(replace(CALL, tools=names)).family("gateway_tool_calls_total")
    assert len(tools) == MAX_TOOLS + 1
    assert tools[("tool", "other"),] == 50


def test_call_without_model_and_provider_is_labelled_none() -> None:
    found = counted(replace(REFUSED, model="", provider=""))
    [labels] = found.family("gateway_calls_total")
    assert dict(labels)["model"] == dict(labels)["provider"] == "none"


def test_long_labels_are_truncated_and_special_characters_escaped() -> None:
    strange = 'a"b\\c\n{x="1"} 5\n# TYPE \ud800' + "y" * 1_000
    found = counted(replace(CALL, model=strange, tools=(strange,), provider="p"))
    [labels] = found.family("gateway_tool_calls_total")
    assert dict(labels)["tool"].startswith('a"b\\c\n{x="1"} 5\n# TYPE ?yyy')
    assert len(dict(labels)["tool"]) == 128


def test_metrics_contain_no_session() -> None:
    metrics = Metrics()
    metrics.record(CALL, None)
    assert "secret-session" not in metrics.text()
    assert "alice" not in metrics.text()


def test_gauges_show_the_last_state_of_the_worker() -> None:
    metrics = Metrics()
    metrics.update_gauges(replace(WELL, calls=9, is_store_unavailable=True))
    metrics.update_gauges(WELL)
    found = read(metrics.text())
    assert found.value("gateway_running_calls", worker="1") == 3
    assert found.value("gateway_open_holds", worker="1") == 2
    assert found.value("gateway_store_up", worker="1") == 1
    assert found.value("gateway_provider_up", provider="ollama", worker="1") == 0
    assert found.value("gateway_info", version="1.2.3", worker="1") == 1
    assert found.value("gateway_price_table_info", table="litellm 1.2 (2026-11-28)", worker="1") == 1
    assert found.value("process_start_time_seconds", worker="1") == 1_000.5
    assert found.value("process_resident_memory_bytes", worker="1") > 1e6
    assert found.value("process_open_fds", worker="1") > 2
    assert found.types["process_cpu_seconds_total"] == "counter"


@pytest.mark.parametrize("is_shared", [False, True])
def test_removed_provider_is_no_longer_shown(tmp_path: Path, *, is_shared: bool) -> None:
    folder = tmp_path if is_shared else None
    metrics = Metrics(folder)
    watching = Metrics(folder) if is_shared else metrics

    def shown() -> dict[str, float]:
        found = read(watching.text()).family("gateway_provider_up")
        return {dict(labels)["provider"]: value for labels, value in found.items()}

    metrics.update_gauges(WELL)
    assert shown() == {"openai": 1, "ollama": 0}
    for _ in range(2):
        metrics.update_gauges(replace(WELL, providers={"openai": True}))
        assert shown() == {"openai": 1}
    metrics.update_gauges(WELL)
    assert shown() == {"openai": 1, "ollama": 0}


KILLED = """
import os, pickle, signal, sys
from dataclasses import replace
from pathlib import Path
from gateway.telemetry.metrics import Metrics
CALL = pickle.load(sys.stdin.buffer)
metrics = Metrics(Path(sys.argv[1]))
for number in range(250):
    name = f"{sys.argv[2]}-{number}"
    metrics.record(replace(CALL, model=name, tools=(name,)), None)
metrics.record(CALL, None)
os.kill(os.getpid(), signal.SIGKILL)
"""


def run_killed_worker(folder: Path, life: str) -> None:
    """Run a worker that counts 251 calls of different models and tools, and is killed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", KILLED, str(folder), life]
    ended = subprocess.run(command, env=environment, input=pickle.dumps(CALL), check=False)
    assert ended.returncode == -signal.SIGKILL


def test_repeatedly_killed_workers_do_not_use_up_slots(tmp_path: Path) -> None:
    sizes = []
    for life in range(3):
        run_killed_worker(tmp_path, str(life))
        sizes.append(len((tmp_path / "1.names").read_text("utf-8").splitlines()))
    assert sizes == [sizes[0]] * 3
    found = read(Metrics(tmp_path).text())
    assert len(found.family("gateway_cost_usd_total")) == MAX_MODELS + 1
    assert len(found.family("gateway_tool_calls_total")) == MAX_TOOLS + 1
    assert sum(found.family("gateway_calls_total").values()) == 3 * 251
    assert found.value("gateway_tokens_total", type="input", provider="openai", model="0-7") == 100


def test_new_worker_keeps_the_series_of_its_predecessor(tmp_path: Path) -> None:
    run_killed_worker(tmp_path, "old")
    metrics = Metrics(tmp_path)
    metrics.record(replace(CALL, model="old-7", tools=("old-7",)), None)
    metrics.record(replace(CALL, model="new", tools=("new",)), None)
    found = read(metrics.text())
    assert found.value("gateway_tool_calls_total", tool="old-7") == 2
    assert found.value("gateway_tokens_total", type="input", provider="openai", model="old-7") == 200
    assert {dict(labels)["model"] for labels in found.family("gateway_cost_usd_total")}.isdisjoint({"new"})


def test_each_worker_shows_the_calls_of_all_workers(tmp_path: Path) -> None:
    workers = [Metrics(tmp_path) for _ in range(2)]
    for worker in workers:
        worker.record(CALL, None)
        worker.update_gauges(WELL)
    for worker in workers:
        found = read(worker.text())
        assert sum(found.family("gateway_calls_total").values()) == 2
        assert found.value("gateway_call_duration_seconds_bucket", le="+Inf", **WHERE) == 2
        assert sum(found.family("gateway_running_calls").values()) == 6


def test_webhook_events_are_counted_by_result() -> None:
    metrics = Metrics()
    for result in ("sent", "sent", "failed"):
        metrics.count_webhook_event(result)
    assert read(metrics.text()).family("gateway_webhooks_total") == {
        (("result", "sent"),): 2,
        (("result", "failed"),): 1,
    }


def everything() -> Samples:
    metrics = Metrics()
    counted_tokens = replace(CALL, context=replace(CONTEXT, tool_weights={"search": ToolResultTokens(1, 30)}))
    subagent = CallingAgent("a1", None, "Explore", "subagent")
    for call in (counted_tokens, REFUSED, replace(CALL, notes={"retries": "1", "fallback": "x"}, agent=subagent)):
        metrics.record(call, None)
    metrics.update_gauges(WELL)
    metrics.count_webhook_event("sent")
    metrics.warned(RunawayAlert(None, "1", Finding("loop", "warn", 4, 4), 0.0))
    return read(metrics.text())


def test_every_metric_is_shown_with_type_labels_and_help() -> None:
    found = everything()
    assert set(found.types) == set(FAMILIES)
    for name, family in FAMILIES.items():
        shown = f"{name}_bucket" if family.kind == "histogram" else name
        ends = {"le"} if family.kind == "histogram" else set()
        for labels in found.family(shown):
            assert {label for label, _ in labels} == {*family.labels, *ends}
        assert found.helps[name] == family.help
        if name != "process_cpu_seconds_total":
            assert found.types[name] == family.kind


def test_metric_names_follow_prometheus_conventions() -> None:
    for name, family in FAMILIES.items():
        assert re.fullmatch(r"(?:gateway|process)_[a-z_]+", name)
        assert name.endswith("_total") == (family.kind == "counter" or name == "process_cpu_seconds_total")
        if family.kind == "histogram":
            assert name.endswith(("_seconds", "_ratio"))
            assert list(family.buckets) == sorted(set(family.buckets))
            assert all(end > 0 and math.isfinite(end) for end in family.buckets)


def test_histogram_counts_never_fall_from_bucket_to_bucket() -> None:
    found = everything()
    for name, family in FAMILIES.items():
        if family.kind != "histogram":
            continue
        rows: dict[Mapping[str, str] | str, list[float]] = {}
        for labels, value in found.family(f"{name}_bucket").items():
            rows.setdefault(str([one for one in labels if one[0] != "le"]), []).append(value)
        for counts in rows.values():
            assert len(counts) == len(family.buckets) + 1
            assert counts == sorted(counts)


def test_counting_a_call_takes_few_function_calls() -> None:
    metrics = Metrics()
    metrics.record(CALL, None)
    # A few microseconds: no strings are built for a call with known labels.
    assert count_calls(lambda: metrics.record(CALL, None)) < 60
