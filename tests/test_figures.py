"""The Grafana dashboard and the Prometheus example use existing metrics and labels."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.core.record import FAILED, OUTCOMES
from gateway.telemetry.metrics import FAMILIES

ROOT = Path(__file__).parent.parent
DASHBOARD = ROOT / "config" / "grafana" / "gateway.json"
_METRIC = re.compile(r"\b(?:gateway|process)_[a-z_]+\b")
_SUFFIX = re.compile(r"_(?:bucket|sum|count)\Z")
_SELECTOR = re.compile(r"((?:gateway|process)_[a-z_]+)\{([^}]*)\}")
_LABEL = re.compile(r"(\w+)(?:=~|!~|!=|=)")
_BY = re.compile(r"by \(([^)]*)\)")


def panels() -> list[dict[str, Any]]:
    shown: list[dict[str, Any]] = json.loads(DASHBOARD.read_text("utf-8"))["panels"]
    return shown


def expressions() -> Iterator[str]:
    for panel in panels():
        for target in panel.get("targets", ()):
            yield target["expr"]


def family_of(metric: str) -> str:
    without = _SUFFIX.sub("", metric)
    return without if without in FAMILIES and FAMILIES[without].kind == "histogram" else metric


def labels_of(metric: str) -> set[str]:
    family = FAMILIES[family_of(metric)]
    # Prometheus itself adds these two.
    return {*family.labels, "instance", "job", *({"le"} if family.kind == "histogram" else ())}


@pytest.mark.parametrize("expression", list(expressions()))
def test_an_expression_of_the_dashboard_uses_existing_metrics_and_labels(expression: str) -> None:
    found = _METRIC.findall(expression)
    assert found
    for metric in found:
        assert family_of(metric) in FAMILIES
    for metric, selector in _SELECTOR.findall(expression):
        assert set(_LABEL.findall(selector)) <= labels_of(metric)
    for names in _BY.findall(expression):
        assert set(names.replace(" ", "").split(",")) <= set.intersection(*map(labels_of, found))
    assert expression.count("(") == expression.count(")")


@pytest.mark.parametrize("expression", list(expressions()))
def test_a_counter_is_shown_as_a_rate_and_a_gauge_is_not(expression: str) -> None:
    for metric in _METRIC.findall(expression):
        is_counter = FAMILIES[family_of(metric)].kind != "gauge" or metric == "process_cpu_seconds_total"
        assert bool(re.search(rf"(?:rate|increase)\({metric}\b", expression)) == is_counter


def test_a_legend_uses_labels_of_its_expression() -> None:
    for panel in panels():
        for target in panel.get("targets", ()):
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                by = {name.strip() for names in _BY.findall(target["expr"]) for name in names.split(",")}
                every = set.intersection(*map(labels_of, _METRIC.findall(target["expr"])))
                assert label in (by or every)


def test_nearly_all_metrics_are_on_the_dashboard_without_duplicate_panels() -> None:
    shown = {family_of(metric) for expression in expressions() for metric in _METRIC.findall(expression)}
    # Budget refusals are included in the other refusals, by the same codes.
    left_out = {
        "gateway_info",
        "gateway_price_table_info",
        "process_start_time_seconds",
        "gateway_budget_refusals_total",
        "gateway_budget_warnings_total",  # for an alert rule
        # Few clients name their agents.
        "gateway_agent_calls_total",
        "gateway_agent_tokens_total",
        "gateway_agent_cost_usd_total",
    }
    assert set(FAMILIES) - shown == left_out
    ids = [panel["id"] for panel in panels()]
    titles = [panel["title"] for panel in panels()]
    assert len(set(ids)) == len(ids)
    assert len(titles) - len(set(titles)) <= 1


def test_failed_means_the_same_outcomes_in_grafana_and_in_the_dashboard() -> None:
    (failed,) = [one["targets"][0]["expr"] for one in panels() if one["title"] == "Failed calls"]
    (named,) = re.findall(r'outcome=~"([^"]*)"', failed)
    assert set(named.split("|")) == FAILED
    (refused,) = [one["targets"][0]["expr"] for one in panels() if one["title"] == "Refused calls"]
    assert 'outcome="refused"' in refused
    script = (ROOT / "gateway" / "server" / "static" / "views" / "calls.js").read_text("utf-8")
    (listed,) = re.findall(r"const FAILED = \[(.*?)\]", script, re.DOTALL)
    assert set(re.findall(r'"(\w+)"', listed)) == FAILED
    outcomes = set(re.findall(r"^  (\w+): ", script.partition("OUTCOMES = {")[2].partition("}")[0], re.MULTILINE))
    assert outcomes == set(OUTCOMES)


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        cells = {(place["x"] + column, place["y"] + line) for column in range(place["w"]) for line in range(place["h"])}
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_the_prometheus_example_scrapes_the_default_address() -> None:
    [job] = yaml.safe_load((ROOT / "config" / "prometheus.yml").read_text("utf-8"))["scrape_configs"]
    assert job["static_configs"][0]["targets"] == ["127.0.0.1:8484"]
    # /metrics is the default of Prometheus.
    assert job.get("metrics_path", "/metrics") == "/metrics"


def test_every_metric_is_documented_with_its_labels() -> None:
    text = (ROOT / "docs" / "guides" / "monitoring.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| `((?:gateway|process)_\w+)` \| ([^|]*) \|", text, re.MULTILINE))
    assert set(rows) == set(FAMILIES)
    for name, family in FAMILIES.items():
        assert set(re.findall(r"`(\w+)`", rows[name])) == set(family.labels)
