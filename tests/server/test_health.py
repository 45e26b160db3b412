"""/api/health on a running gateway: the worker, its store and its providers, and who may see them."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

import gateway as package
from gateway.mock import MockServer
from gateway.server.health import STATES, ProviderHealth, WorkerHealth, health_json
from gateway.server.openapi.shapes import SCHEMAS
from tests.conftest import Scripted, StartGateway
from tests.support.gateways import until
from tests.support.scripted import Held
from tests.support.web import CHAT, HI, Web

ALICE, ADMIN = "alice-key-0123456789", "admin-key-0123456789"
WORKER = WorkerHealth("1", 7, 2, 0.0, 3, 4, "memory://", False, 0, "closed", None, [ProviderHealth("p", "http", "ok")])


def test_health_reports_worker_store_and_providers(mock_server: MockServer, gateway_server: StartGateway) -> None:
    found = gateway_server(mock_server.url).web.get("/api/health").json
    assert (found["status"], found["version"]) == ("ready", package.__version__)
    assert (found["worker"]["pid"], found["worker"]["workers"]) == (os.getpid(), 1)
    assert found["store"]["url"].startswith("sqlite://")
    assert (found["store"]["reachable"], found["store"]["away"], found["store"]["waiting"]) == (True, False, 0)
    assert found["default_provider"] == "upstream"
    (provider,) = found["providers"]
    assert provider == {"name": "upstream", "adapter": "http", "state": "not_called", "failures": 0, "asked_in_s": None}


def test_running_call_is_counted_until_it_ends(scripted: Scripted) -> None:
    held = Held()
    scripted.play(held)
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(scripted.web.chat)
        assert until(lambda: scripted.web.get("/api/health").json["worker"]["calls"] == 1)
        held.release()
        assert answer.result().status == 200
    assert until(lambda: scripted.web.get("/api/health").json["worker"]["calls"] == 0)


def test_provider_is_failing_and_then_its_circuit_is_open(
    mock_server: MockServer, gateway_server: StartGateway
) -> None:
    flags = {"providers.upstream.breaker": {"failures": 2, "open_s": 60}}
    gateway = gateway_server(mock_server.url, **flags)

    def state() -> object:
        (provider,) = gateway.web.get("/api/health").json["providers"]
        return provider["state"], provider["failures"], provider["asked_in_s"] is not None

    assert state() == ("not_called", 0, False)
    gateway.web.chat()
    assert state() == ("ok", 0, False)
    gateway.web.chat(mock="status=503")
    assert state() == ("failing", 1, False)
    gateway.web.chat(mock="status=503")
    assert state() == ("left_alone", 2, True)


def test_provider_without_a_key_has_its_own_state_until_it_is_called(
    mock_server: MockServer, gateway_server: StartGateway
) -> None:
    providers = {
        "keyless": {"base_url": mock_server.url, "retries": 0},
        "keyed": {"base_url": mock_server.url, "key": "provider-key-0123456789"},
    }
    gateway = gateway_server(mock_server.url, providers=providers, default_provider="keyless")

    def states() -> dict[str, str]:
        return {one["name"]: one["state"] for one in gateway.web.get("/api/health").json["providers"]}

    assert states() == {"keyless": "no_key", "keyed": "not_called"}
    assert gateway.web.post(CHAT, {"model": "m", "messages": HI}, {"authorization": "Bearer sk-own"}).status == 200
    assert states() == {"keyless": "ok", "keyed": "not_called"}


def test_described_states_are_all_states() -> None:
    (provider,) = [SCHEMAS["Health"]["properties"]["providers"]["items"]]
    assert set(provider["properties"]["state"]["enum"]) == set(STATES)


@pytest.mark.parametrize("path", ["/api/health", "/metrics", "/api/reload"])
def test_client_key_on_this_machine_gets_a_helpful_error(
    path: str, mock_server: MockServer, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url, **{"auth.keys": [{"name": "alice", "key": ALICE}]})
    web = Web(gateway.url, {"authorization": f"Bearer {ALICE}"})
    refused = web.post(path, {}) if path == "/api/reload" else web.get(path)
    assert refused.status == 403
    assert refused.error["message"].endswith(
        "If none is set, call from the gateway's own machine without a client key."
    )


def test_a_client_key_does_not_see_it(mock_server: MockServer, gateway_server: StartGateway) -> None:
    keys = {"auth.admin_key": ADMIN, "auth.keys": [{"name": "alice", "key": ALICE}]}
    gateway = gateway_server(mock_server.url, **keys)
    answers = {
        key: Web(gateway.url, {"authorization": f"Bearer {key}"}).get("/api/health").status for key in (ALICE, ADMIN)
    }
    assert answers == {ALICE: 403, ADMIN: 200}
    assert gateway.web.get("/api/health").status == 401


@pytest.mark.parametrize(
    ("problem", "is_unavailable", "status"),
    [(None, False, "ready"), ("it is locked", False, "not ready"), (None, True, "not ready")],
)
def test_it_is_ready_when_the_store_is_available(problem: str | None, is_unavailable: bool, status: str) -> None:
    worker = replace(WORKER, is_unavailable=is_unavailable)
    found = health_json(worker, problem)
    assert (found["status"], found["store"]["problem"]) == (status, problem)
