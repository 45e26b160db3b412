"""Check the files for Docker, compose, Kubernetes and systemd against the settings of the gateway."""

from __future__ import annotations

import configparser
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway import __version__, config

ROOT = Path(__file__).parent.parent
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
KUBERNETES = list(yaml.safe_load_all((ROOT / "config/deploy/kubernetes.yaml").read_text()))
SERVICE = ROOT / "config/deploy/gateway.service"
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def settings(tmp_path: Path, text: str, environment: dict[str, str]) -> config.Settings:
    file = tmp_path / "gateway.yaml"
    file.write_text(text)
    return config.load(file, environment=environment).settings


def of_kind(kind: str) -> Any:
    (found,) = (one for one in KUBERNETES if one["kind"] == kind)
    return found


def plain(variables: dict[str, str]) -> dict[str, str]:
    """Return the variables as compose fills them in: with a default or a value."""
    return {
        name: re.sub(r"\$\{\w+:([-?])[^}]*\}", lambda m: "" if m[1] == "-" else "x" * 16, value)
        for name, value in variables.items()
    }


def test_every_variable_of_the_compose_file_is_a_setting_or_a_key(tmp_path: Path) -> None:
    variables = plain(COMPOSE["services"]["gateway"]["environment"])
    found = settings(tmp_path, "", {"GATEWAY_STORE_URL": "redis://redis:6379/0", **variables})
    assert found.store.url == "redis://redis:6379/0"
    assert found.auth.required
    assert found.auth.admin_key is not None
    known = {f"GATEWAY_{key}" for key in ("STORE_URL", "STORE_JOURNAL", "AUTH_REQUIRED", "AUTH_ADMIN_KEY")}
    keys = {name for name in variables if name.endswith("_API_KEY")}
    assert set(variables) == known | keys
    providers = (ROOT / "config/providers.yaml").read_text()
    assert [name for name in keys if f"${{{name}:-}}" not in providers] == []


def test_the_compose_file_lets_running_streams_end_and_keeps_budgets() -> None:
    grace = int(COMPOSE["services"]["gateway"]["stop_grace_period"].removesuffix("s"))
    assert grace > config.Settings().server.shutdown_grace_s
    assert "noeviction" in COMPOSE["services"]["redis"]["command"]
    written = yaml.safe_load(COMPOSE["configs"]["prometheus"]["content"].replace("${", "$ {"))
    assert written["scrape_configs"][0]["static_configs"] == [{"targets": ["gateway:8484"]}]


def test_every_config_and_volume_of_the_compose_file_exists() -> None:
    for service in COMPOSE["services"].values():
        assert {one["source"] for one in service.get("configs", ())} <= set(COMPOSE["configs"])
        for mount in service.get("volumes", ()):
            source = mount.partition(":")[0]
            assert source in COMPOSE["volumes"] or (ROOT / source).exists()


def test_the_configuration_of_the_kubernetes_file_is_valid(tmp_path: Path) -> None:
    text = of_kind("ConfigMap")["data"]["gateway.yaml"]
    found = settings(tmp_path, text, {"GATEWAY_STORE_URL": "redis://redis:6379/0"})
    assert found.auth.required
    pod = of_kind("Deployment")["spec"]["template"]["spec"]
    pause = int(re.findall(r"sleep\((\d+)\)", str(pod["containers"][0]["lifecycle"]))[0])
    assert pod["terminationGracePeriodSeconds"] > found.server.shutdown_grace_s + pause


def test_the_kubernetes_file_uses_the_user_of_the_image_and_existing_probe_paths() -> None:
    pod = of_kind("Deployment")["spec"]["template"]["spec"]
    assert f"USER {pod['securityContext']['runAsUser']}:" in DOCKERFILE
    container = pod["containers"][0]
    assert f"EXPOSE {container['ports'][0]['containerPort']}" in DOCKERFILE
    assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}


def test_kubernetes_adds_no_service_variables_that_look_like_configuration() -> None:
    assert of_kind("Deployment")["spec"]["template"]["spec"]["enableServiceLinks"] is False


@pytest.mark.parametrize("kind", ["Service", "PodDisruptionBudget"])
def test_selectors_match_the_labels_of_the_pods(kind: str) -> None:
    selector = of_kind(kind)["spec"]["selector"]
    labels = of_kind("Deployment")["spec"]["template"]["metadata"]["labels"]
    assert selector.get("matchLabels", selector).items() <= labels.items()


def test_systemd_waits_longer_than_the_shutdown_grace_and_starts_an_existing_command() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]  # names are letter for letter
    unit.read(SERVICE)
    service = unit["Service"]
    assert int(service["TimeoutStopSec"]) > config.Settings().server.shutdown_grace_s
    assert service["ExecStart"].split()[1:3] == ["serve", "-c"]
    assert service["ExecReload"].endswith("-HUP $MAINPID")


def test_the_grafana_dashboard_is_json() -> None:
    assert json.loads((ROOT / "config/grafana/gateway.json").read_text())["panels"]


def test_a_release_has_one_version() -> None:
    chart = yaml.safe_load((ROOT / "config/deploy/helm/Chart.yaml").read_text())
    assert chart["appVersion"] == __version__
    checked = [sys.executable, str(ROOT / ".ci/versions.py"), "v0.0.0"]
    done = subprocess.run(checked, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"gateway/__init__.py has the version {__version__}, and the tag is v0.0.0" in done.stdout


def test_nothing_is_published_before_the_tests_pass() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    jobs = workflow["jobs"]
    assert "bash .ci/run" in [step.get("run") for step in jobs["check"]["steps"]]
    publishing = {name for name, job in jobs.items() if "id-token" in job.get("permissions", {})}
    assert publishing == {"publish-python", "publish-image"}
    assert all(jobs[name]["needs"] == ["check", "build"] for name in publishing)
    assert workflow["permissions"] == {"contents": "read"}
