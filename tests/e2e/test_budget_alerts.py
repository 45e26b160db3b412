"""Budget alerts of running gateways, with real receivers."""

from __future__ import annotations

import json
import os
import signal
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.mock import MockProvider, MockServer
from tests.conftest import StartGateway, StartProcess
from tests.support.gateways import until
from tests.support.receiver import Receiver, serving
from tests.support.timing import LIMIT_S


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with serving(Receiver()) as made:
        yield made


def thresholds(receiver: Receiver) -> list[tuple[str, int]]:
    """Return the name and threshold of each event, each webhook-id once."""
    bodies = {one.headers["webhook-id"]: json.loads(one.body) for one in receiver.requests}
    return [(one["data"]["name"], one["data"]["threshold"]) for one in bodies.values()]


def hook(receiver: Receiver, **more: Any) -> dict[str, Any]:
    return {"url": receiver.url, "events": ["on_budget"], "timeout_s": 5, **more}


def test_session_parent_and_client_key_are_announced_alike(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway, receiver: Receiver
) -> None:
    gateway = gateway_server(
        mock_server.url,
        **{
            "callbacks.webhooks": [hook(receiver, secret="whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")],
            "budget.calls": 2,
            "auth.keys": [{"name": "alice", "key": "alice-key-0123456789", "budget": {"calls": 4}}],
        },
    )
    headers = {"authorization": "Bearer alice-key-0123456789", "x-parent-session-id": "top"}
    web = replace(gateway.web, headers=headers)
    assert [web.chat("child").status for _ in range(2)] == [200, 200]
    until(lambda: len(receiver.requests) == 9)
    both = [50, 80, 95, 100]
    assert sorted(thresholds(receiver)) == sorted(
        [("alice", 50), *(("alice/child", one) for one in both), *(("alice/top", one) for one in both)]
    )
    assert all(one.headers["webhook-signature"].startswith("v1,") for one in receiver.requests)


def test_restart_and_a_receiver_that_was_down_neither_lose_nor_repeat_alerts(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway, receiver: Receiver, tmp_path: Path
) -> None:
    settings = {
        "callbacks.webhooks": [hook(receiver)],
        "budget.calls": 4,
        "store.url": f"sqlite://{tmp_path / 'gateway.db'}",
    }
    receiver.answers = [(503, {})] * 2
    gateway = gateway_server(mock_server.url, **settings)
    for _ in range(2):
        gateway.web.chat("s")
    until(lambda: len(receiver.requests) >= 1)
    gateway.stop()
    receiver.answers = []
    gateway = gateway_server(mock_server.url, **settings)
    gateway.web.chat("s")
    until(lambda: thresholds(receiver) == [("s", 50)])
    gateway.web.chat("s")
    until(lambda: len(thresholds(receiver)) == 4)
    gateway.stop()
    gateway = gateway_server(mock_server.url, **settings)
    gateway.web.chat("other")
    gateway.web.chat("other")
    until(lambda: ("other", 50) in thresholds(receiver))
    assert [one for one in thresholds(receiver) if one[0] == "s"] == [("s", 50), ("s", 80), ("s", 95), ("s", 100)]


@pytest.mark.parametrize("form", ["slack", "text"])
def test_receiver_gets_the_body_that_it_understands(
    form: str, mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway, receiver: Receiver
) -> None:
    hooks = [hook(receiver, format=form, events=["on_budget", "on_finish"])]
    gateway_server(mock_server.url, **{"callbacks.webhooks": hooks, "budget.calls": 2}).web.chat("s")
    until(lambda: len(receiver.requests) == 2)
    bodies = [one.body.decode() for one in receiver.requests]
    texts = [json.loads(body)["text"] for body in bodies] if form == "slack" else [body[:-1] for body in bodies]
    types = {"slack": "application/json", "text": "text/plain; charset=utf-8"}
    assert {one.headers["content-type"] for one in receiver.requests} == {types[form]}
    assert "The budget of session s has reached 50 %: 1 of 2 calls used (50.0%)." in texts
    assert any(one.startswith("Call ") and " of session s ended: ok, status 200" in one for one in texts)


def test_killed_worker_neither_loses_nor_repeats_alerts(
    mock_server: MockServer, mock: MockProvider, gateway_process: StartProcess, receiver: Receiver
) -> None:
    settings = {"callbacks.webhooks": [hook(receiver)], "budget.calls": 2, "server.workers": 2}
    gateway = gateway_process(mock_server.url, **settings)
    sessions = [f"s{number}" for number in range(8)]
    for session in sessions[:4]:
        assert gateway.web.chat(session).status == 200
    # Both workers and their supervisor end at once, perhaps before any alert was sent.
    pid = gateway.process.pid
    for one in (pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())):
        os.kill(one, signal.SIGKILL)
    gateway.process.wait(LIMIT_S)
    gateway = gateway_process(mock_server.url, folder=gateway.folder, **settings)
    for session in sessions[4:]:
        assert gateway.web.chat(session).status == 200
    until(lambda: len(thresholds(receiver)) == 8, 30)
    # One more call of each reaches the other thresholds, and not the first one again.
    for session in sessions:
        assert gateway.web.chat(session).status == 200
    until(lambda: len(thresholds(receiver)) == 32, 30)
    assert sorted(thresholds(receiver)) == [(session, one) for session in sessions for one in (50, 80, 95, 100)]


def test_thresholds_that_parallel_calls_of_two_workers_reach_are_announced_once(
    mock_server: MockServer, mock: MockProvider, gateway_process: StartProcess, receiver: Receiver
) -> None:
    settings = {"callbacks.webhooks": [hook(receiver)], "budget.calls": 40, "server.workers": 2}
    web = gateway_process(mock_server.url, **settings).web
    with ThreadPoolExecutor(8) as threads:
        statuses = [reply.status for reply in threads.map(lambda _: web.chat("s"), range(40))]
    assert statuses == [200] * 40
    until(lambda: len(thresholds(receiver)) == 4, 30)
    assert sorted(thresholds(receiver)) == [("s", one) for one in (50, 80, 95, 100)]
    assert len(receiver.requests) == 4


OBSERVER = """
    class Watcher:
        heard = []

        def on_budget(self, event):
            self.heard.append(event)
"""


def test_an_observer_receives_each_alert_once(
    mock_server: MockServer,
    mock: MockProvider,
    gateway_server: StartGateway,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "own_budget_watcher.py").write_text(textwrap.dedent(OBSERVER))
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = {"callbacks.observers": ["own_budget_watcher.Watcher"], "budget.calls": 2}
    gateway = gateway_server(mock_server.url, **settings, **{"callbacks.budget_thresholds": [50, 100]})
    gateway.web.chat("s")
    gateway.web.chat("s")
    heard = sys.modules["own_budget_watcher"].Watcher.heard
    until(lambda: len(heard) == 2)
    assert [(event["name"], event["threshold"], event["unit"]) for event in heard] == [
        ("s", 50, "calls"),
        ("s", 100, "calls"),
    ]


def test_budget_of_a_subagent_is_announced_by_its_type(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway, receiver: Receiver
) -> None:
    hooks = {"callbacks.webhooks": [hook(receiver)], "callbacks.budget_thresholds": [100]}
    gateway = gateway_server(
        mock_server.url, **hooks, **{"budget.agents": {"Explore": {"calls": 2}, "*": {"calls": 9}}}
    )
    web = replace(gateway.web, headers={"x-agent-id": "sub-1", "x-agent-type": "Explore"})
    assert [web.chat("s").status for _ in range(2)] == [200, 200]
    until(lambda: thresholds(receiver) == [("s/sub-1", 100)])
    assert json.loads(receiver.requests[0].body)["data"]["account"] == "agent"
