"""The Prometheus alert rules: they use what a running gateway exports, and fire when they should."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.core.record import OUTCOMES
from gateway.mock import MockProvider, MockServer
from tests.conftest import StartGateway
from tests.support.gateways import until
from tests.support.prometheus import read
from tests.test_figures import ROOT

RULES = ROOT / "config" / "prometheus-alerts.yml"
UNIT_TESTS = ROOT / "tests" / "alert_rules.yml"
_METRIC = re.compile(r"\bgateway_[a-z_]+\b")
_SELECTOR = re.compile(r"(gateway_[a-z_]+)\{([^}]*)\}")
_LABEL = re.compile(r'(\w+)=~?"([^"]*)"')
_BY = re.compile(r"by \(([^)]*)\)")
_TEMPLATE = re.compile(r"\{\{ *\$labels\.(\w+) *\}\}")
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed: apt-get install prometheus")


def rules() -> list[dict[str, Any]]:
    [group] = yaml.safe_load(RULES.read_text("utf-8"))["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def test_rules_use_what_a_running_gateway_exports(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url, **{"budget.calls": 2})
    for session, behaviour in (("s", ""), ("s", ""), ("s", ""), ("other", "status=500")):
        gateway.web.chat(session, behaviour)
    until(lambda: "provider_error" in gateway.web.get("/metrics").body.decode())
    exported = read(gateway.web.get("/metrics").body.decode())
    for rule in rules():
        for metric in _METRIC.findall(rule["expr"]):
            assert exported.family(metric), f"{rule['alert']}: {metric} is not exported"
        for metric, selector in _SELECTOR.findall(rule["expr"]):
            for label, value in _LABEL.findall(selector):
                assert all(label in dict(labels) for labels in exported.family(metric))
                assert label != "outcome" or set(value.split("|")) <= set(OUTCOMES)


def test_groups_and_texts_use_labels_of_their_metrics(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url, **{"budget.calls": 1})
    for _ in range(2):
        gateway.web.chat("s")
    until(lambda: "budget_exhausted" in gateway.web.get("/metrics").body.decode())
    exported = read(gateway.web.get("/metrics").body.decode())
    for rule in rules():
        by = {name.strip() for names in _BY.findall(rule["expr"]) for name in names.split(",")}
        for metric in _METRIC.findall(rule["expr"]):
            assert by <= {"instance", *(name for labels in exported.family(metric) for name, _ in labels)}, rule[
                "alert"
            ]
        assert {name for text in rule["annotations"].values() for name in _TEMPLATE.findall(text)} <= by


def test_rules_are_named_once_and_have_texts() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    for rule in rules():
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert set(rule["annotations"]) == {"summary", "description"}


@needs_promtool
def test_promtool_accepts_the_rules_and_its_unit_tests_pass(tmp_path: Path) -> None:
    tests = tmp_path / "tests.yml"
    tests.write_text(UNIT_TESTS.read_text("utf-8").replace("RULES", str(RULES)))
    for arguments in (("check", "rules", RULES), ("test", "rules", tests)):
        done = subprocess.run([str(PROMTOOL), *map(str, arguments)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_promtool_accepts_the_scrape_configuration(tmp_path: Path) -> None:
    for name in ("prometheus.yml", RULES.name):
        shutil.copy(ROOT / "config" / name, tmp_path)
    done = subprocess.run(
        [str(PROMTOOL), "check", "config", str(tmp_path / "prometheus.yml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_example_and_compose_file_load_the_rules() -> None:
    example = yaml.safe_load((ROOT / "config" / "prometheus.yml").read_text("utf-8"))
    assert example["rule_files"] == [RULES.name]
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text("utf-8"))
    inner = yaml.safe_load(compose["configs"]["prometheus"]["content"])
    [mount] = [one for one in compose["services"]["prometheus"]["volumes"] if RULES.name in one]
    assert mount == f"./config/{RULES.name}:{inner['rule_files'][0]}:ro"
