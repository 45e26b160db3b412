"""Callbacks in the configuration of a running gateway, with a real webhook receiver and a user's observer class."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.mock import MockProvider, MockServer
from tests.conftest import StartGateway
from tests.support.gateways import until
from tests.support.receiver import Receiver, serving
from tests.support.timing import in_time

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
ALL = ["on_usage", "on_finish", "on_step"]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with serving(Receiver()) as made:
        yield made


def events(receiver: Receiver) -> list[Any]:
    return [json.loads(one.body) for one in receiver.requests]


def test_a_webhook_receives_what_the_api_shows_of_calls_but_no_prompt(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway, receiver: Receiver
) -> None:
    hook = {"url": receiver.url, "events": ALL, "secret": SECRET}
    gateway = gateway_server(mock_server.url, **{"callbacks.webhooks": [hook], "budget.tokens": 100_000})
    secret = [{"role": "user", "content": "the launch code is tulip"}]
    gateway.web.chat("s", "tokens=10/5", messages=secret)
    gateway.web.chat("s", "status=400")
    until(lambda: len(receiver.requests) == 3)
    usage, finished, refused = sorted(events(receiver), key=lambda one: (one["timestamp"], one["type"] != "on_usage"))
    assert [usage["type"], finished["type"], refused["type"]] == ["on_usage", "on_finish", "on_finish"]
    assert finished["data"] == gateway.web.get(f"/api/calls/{finished['data']['call_id']}").json
    assert refused["data"]["outcome"] == "provider_error"
    assert usage["data"]["usage"]["total_tokens"] == usage["data"]["totals"]["total_tokens"] == 15
    assert usage["data"]["budget"] == {
        "limit_tokens": 100_000,
        "remaining_tokens": 99_985,
        "limit_usd": None,
        "remaining_usd": None,
    }
    assert not any(b"tulip" in one.body for one in receiver.requests)
    assert all(one.headers["webhook-signature"].startswith("v1,") for one in receiver.requests)


def test_a_silent_receiver_slows_neither_calls_nor_the_shutdown(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway, receiver: Receiver
) -> None:
    receiver.gate.clear()
    hook = {"url": receiver.url, "timeout_s": 60}
    gateway = gateway_server(mock_server.url, **{"callbacks.webhooks": [hook]})
    with in_time():
        for number in range(50):
            assert gateway.web.chat(f"s{number}").status == 200
        gateway.stop()


def test_queued_events_are_sent_when_the_gateway_stops(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway, receiver: Receiver
) -> None:
    gateway = gateway_server(mock_server.url, **{"callbacks.webhooks": [{"url": receiver.url}]})
    for _ in range(10):
        gateway.web.chat("s")
    gateway.stop()
    assert len(receiver.requests) == 10


OBSERVER = """
    class Watcher:
        heard = []

        def on_finish(self, event):
            self.heard.append(event)
            raise RuntimeError("a bug of the user's")
"""


def test_an_observer_class_receives_calls_and_its_errors_change_nothing(
    mock_server: MockServer,
    mock: MockProvider,
    gateway_server: StartGateway,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "own_watcher.py").write_text(textwrap.dedent(OBSERVER))
    monkeypatch.syspath_prepend(str(tmp_path))
    gateway = gateway_server(mock_server.url, **{"callbacks.observers": ["own_watcher.Watcher"]})
    assert [gateway.web.chat("s").status for _ in range(3)] == [200] * 3
    heard = sys.modules["own_watcher"].Watcher.heard
    until(lambda: len(heard) == 3)
    assert {event["session"] for event in heard} == {"s"}


def test_a_webhook_receives_each_step_change_once(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway, receiver: Receiver
) -> None:
    steps = [
        {"name": "review", "conditions": [{"message_matches": "review"}]},
        {"name": "work", "is_default": True},
    ]
    hook = {"url": receiver.url, "events": ["on_step"], "secret": SECRET}
    gateway = gateway_server(mock_server.url, **{"steps": steps, "callbacks.webhooks": [hook]})
    for text in ("write", "write more", "now review it"):
        assert gateway.web.chat("s", messages=[{"role": "user", "content": text}]).status == 200
    until(lambda: len(receiver.requests) == 2)
    first, second = sorted((one["data"] for one in events(receiver)), key=lambda data: data["at"])
    assert (first["step_before"], first["step"]) == (None, "work")
    assert (second["step_before"], second["step"], second["session"]) == ("work", "review", "s")


def test_a_webhook_receives_a_step_set_by_the_api(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway, receiver: Receiver
) -> None:
    steps = [{"name": "review", "conditions": [{"message_matches": "review"}]}, {"name": "work", "is_default": True}]
    hook = {"url": receiver.url, "events": ["on_step"], "secret": SECRET}
    gateway = gateway_server(mock_server.url, **{"steps": steps, "callbacks.webhooks": [hook]})
    for _ in range(2):
        # The second time, nothing changes.
        assert gateway.web.send("PATCH", "/api/sessions/s", {"active_step": "review"}).status == 200
    assert gateway.web.send("PATCH", "/api/sessions/s", {"active_step": None}).status == 200
    until(lambda: len(receiver.requests) == 2)
    first, second = sorted((one["data"] for one in events(receiver)), key=lambda data: data["at"])
    assert (first["session"], first["step_before"], first["step"], first["tools"]) == ("s", None, "review", [])
    assert (second["step_before"], second["step"]) == ("review", None)
