"""/metrics in a running gateway: access, and the same numbers from every worker."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest

from gateway.mock import MockProvider, MockServer
from tests.conftest import StartGateway, StartProcess
from tests.support.gateways import STARTS_S, GatewayProcess, until
from tests.support.prometheus import Samples, read
from tests.support.web import Web, talk

ADMIN, ALICE = "admin-key-0123456789", "alice-key-0123456789"
WHERE = {"provider": "upstream", "model": "mock-small"}


def figures(web: Web) -> Samples:
    answer = web.get("/metrics")
    assert answer.status == 200, answer.body
    return read(answer.body.decode())


def test_requests_from_this_machine_may_read_metrics(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url)
    for _ in range(3):
        gateway.web.chat("s", "tokens=10/5")
    answer = gateway.web.get("/metrics")
    assert answer.header("content-type") == "text/plain; version=0.0.4; charset=utf-8"
    found = read(answer.body.decode())
    assert found.value("gateway_tokens_total", type="input", **WHERE) == 30
    assert found.value("gateway_call_duration_seconds_count", **WHERE) == 3
    assert found.value("gateway_store_up", worker="1") == 1
    assert found.value("gateway_provider_up", provider="upstream", worker="1") == 1
    assert found.value("gateway_running_calls", worker="1") == 0


def test_admin_key_is_required_if_it_is_set(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    flags = {"auth.admin_key": ADMIN, "auth.keys": [{"name": "alice", "key": ALICE}]}
    gateway = gateway_server(mock_server.url, **flags)
    assert gateway.web.get("/metrics").status == 401
    assert gateway.web.get("/metrics", {"authorization": f"Bearer {ALICE}"}).status == 403
    assert gateway.web.get("/metrics", {"authorization": f"Bearer {ADMIN}"}).status == 200


def test_proxy_on_this_machine_needs_the_admin_key(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url)
    head = b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nx-forwarded-for: 1.2.3.4\r\nconnection: close\r\n\r\n"
    assert talk(gateway.url, head).status == 403


def test_they_can_be_turned_off(mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway) -> None:
    gateway = gateway_server(mock_server.url, **{"telemetry.metrics": False})
    assert gateway.web.chat("s").status == 200
    answer = gateway.web.get("/metrics")
    assert (answer.status, answer.error["code"]) == (404, "not_found")


@pytest.fixture
def two_workers(mock_server: MockServer, mock: MockProvider, gateway_process: StartProcess) -> GatewayProcess:
    return gateway_process(mock_server.url, **{"server.workers": 2})


def workers_of(gateway: GatewayProcess) -> list[int]:
    pids = Path(f"/proc/{gateway.process.pid}/task/{gateway.process.pid}/children").read_text().split()
    return [int(pid) for pid in pids if "spawn_main" in command_of(pid)]


def command_of(pid: str) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


def is_replaced(gateway: GatewayProcess, killed: int) -> bool:
    workers = workers_of(gateway)
    return len(workers) == 2 and killed not in workers


def test_every_worker_shows_the_calls_of_all_and_a_count_never_falls(two_workers: GatewayProcess) -> None:
    web = two_workers.web
    until(lambda: len(figures(web).family("gateway_info")) == 2, what="both workers are there")
    for number in range(12):
        assert web.chat(f"s{number}").status == 200
    # The kernel chooses which worker responds.
    seen = [figures(web).value("gateway_call_duration_seconds_count", **WHERE) for _ in range(8)]
    assert seen == [12] * 8
    killed = workers_of(two_workers)[0]
    os.kill(killed, signal.SIGKILL)
    until(lambda: is_replaced(two_workers, killed), STARTS_S, "another one takes its place")
    until(lambda: len(figures(web).family("gateway_info")) == 2, STARTS_S, "and says how it is doing")
    assert figures(web).value("gateway_call_duration_seconds_count", **WHERE) == 12
    assert web.chat("s").status == 200
    assert figures(web).value("gateway_call_duration_seconds_count", **WHERE) == 13
