"""Lint the Helm chart, render it with several sets of values, and check config/deploy/kubernetes.yaml against it.

    python .ci/chart.py            write config/deploy/kubernetes.yaml, which is the chart with its defaults
    python .ci/chart.py --check    fail if that file or the chart is wrong

It needs `pip install helm-python-sdk==0.2.2 pyyaml`, which contains Helm 4 as a library and works without a network.
"""

# ruff: noqa: INP001, PLR2004, T201  # a script

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

import helm_python
import yaml

ROOT: Final = Path(__file__).parent.parent
CHART: Final = ROOT / "config" / "deploy" / "helm"
PLAIN: Final = ROOT / "config" / "deploy" / "kubernetes.yaml"
HEAD: Final = """\
# The gateway on Kubernetes, several pods on one Redis. Written by `.ci/chart.py` from the chart in config/deploy/helm.
# First put your image's name below and your keys into a Secret:
#   kubectl create secret generic gateway --from-literal=OPENAI_API_KEY=… --from-literal=GATEWAY_AUTH_ADMIN_KEY=… \\
#     --from-literal=GATEWAY_STORE_URL=redis://:PASSWORD@redis:6379/0
# Then: kubectl apply -f config/deploy/kubernetes.yaml
"""
#: what the chart can do, all at once
EVERYTHING: Final[dict[str, Any]] = {
    "image": {"tag": "1.2.3", "pullSecrets": ["registry"]},
    "environment": {"HTTPS_PROXY": "http://proxy:3128"},
    "config": {"server": {"shutdown_grace_s": 300}, "store": {"on_failure": "open"}},
    "autoscaling": {"enabled": False},
    "replicas": 3,
    "disruptionBudget": {"enabled": False},
    "ingress": {"enabled": True, "className": "nginx", "host": "llm.example", "tlsSecret": "llm-tls"},
    "networkPolicy": {"enabled": True, "egress": [{"ports": [{"port": 4318}]}]},
    "serviceMonitor": {"enabled": True},
    "podAnnotations": {"team": "agents"},
    "nodeSelector": {"kubernetes.io/arch": "arm64"},
    "tolerations": [{"key": "spot", "operator": "Exists"}],
    "affinity": {"podAntiAffinity": {}},
}


def rendered(values: dict[str, Any]) -> dict[str, str]:
    """Return the manifests of a release named `gateway` as text, by kind, in the order in which they are applied."""
    with helm_python.Chart.load(CHART) as chart:
        texts = chart.render(values, name="gateway", namespace="default")
    found = {yaml.safe_load(text)["kind"]: text.strip() + "\n" for text in texts.values() if text.strip()}
    order = ["ConfigMap", "Deployment", "Service"]
    return {kind: found[kind] for kind in sorted(found, key=lambda kind: (kind not in order, kind))}


def problems() -> list[str]:
    """Return what is wrong with the chart."""
    found = []
    for values in ({}, EVERYTHING):
        report = helm_python.lint(CHART, values, strict=True)
        # An icon is only of use in a catalog of charts.
        found += [one["error"] for one in report["messages"] if one["severity"] > 1 and "icon" not in one["error"]]
    manifests = {kind: yaml.safe_load(text) for kind, text in rendered(EVERYTHING).items()}
    expected = {"ConfigMap", "Deployment", "Service", "Ingress", "NetworkPolicy", "ServiceMonitor"}
    if set(manifests) != expected:
        return [*found, f"kinds: {sorted(manifests)}"]
    pod = manifests["Deployment"]["spec"]["template"]["spec"]
    container = pod["containers"][0]
    facts = {
        "the pod stops before running streams have ended": pod["terminationGracePeriodSeconds"] >= 300 + 10,
        "a gateway that serves without a store is not ready": container["readinessProbe"]["httpGet"]["path"]
        == "/healthz",
        "the number of pods is not set": manifests["Deployment"]["spec"]["replicas"] == 3,
        "the variables are not set": container["env"] == [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
        "the image has another tag": container["image"].endswith(":1.2.3"),
        "an egress rule is missing": {"ports": [{"port": 4318}]} in manifests["NetworkPolicy"]["spec"]["egress"],
        "the ingress has another host": manifests["Ingress"]["spec"]["rules"][0]["host"] == "llm.example",
    }
    return found + [problem for problem, is_fine in facts.items() if not is_fine]


def main() -> int:
    """Write the plain file, or check it."""
    text = HEAD + "---\n".join(rendered({}).values())
    if "--check" not in sys.argv[1:]:
        PLAIN.write_text(text)
        return 0
    found = problems()
    if PLAIN.read_text() != text:
        found.append(f"{PLAIN.relative_to(ROOT)} is not what the chart gives. Write it again with: python .ci/chart.py")
    print("\n".join(found))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
