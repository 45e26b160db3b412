"""When a budget is empty, as the API and the commands show it."""

from __future__ import annotations

import json
from dataclasses import replace

from gateway.mock import MockProvider, MockServer
from tests.conftest import StartGateway
from tests.support.commands import Commands
from tests.support.gateways import until

KEY = "alice-key-0123456789"


def test_session_shows_when_its_budget_is_empty(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway, gateway_command: Commands
) -> None:
    gateway = gateway_server(mock_server.url, **{"budget.tokens": 150})
    for _ in range(2):
        gateway.web.chat("s", "tokens=10/5")
    assert gateway.web.get("/api/sessions/s").json["burn_rate"] is None
    gateway.web.chat("s", "tokens=10/5")
    rate = gateway.web.get("/api/sessions/s").json["burn_rate"]
    assert (rate["unit"], rate["calls"], rate["per_call"], rate["empty_in_calls"]) == ("tokens", 3, 15.0, 7)
    assert 0 < rate["empty_in_s"] < 600
    assert rate["refills_first"] is False
    shown = gateway_command("sessions", "show", "s", "-c", gateway.file)
    [line] = [line for line in shown.lines if line.startswith("budget empty")]
    assert "7 calls (at the rate of the newest calls)" in line


def test_session_without_a_budget_shows_nothing(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url)
    for _ in range(4):
        gateway.web.chat("s")
    assert gateway.web.get("/api/sessions/s").json["burn_rate"] is None


def test_calls_of_children_and_of_a_client_key_count(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway, gateway_command: Commands
) -> None:
    keys = [{"name": "alice", "key": KEY, "budget": {"calls": 10}}]
    gateway = gateway_server(mock_server.url, **{"budget.calls": 8, "auth.keys": keys})
    web = replace(gateway.web, headers={"authorization": f"Bearer {KEY}", "x-parent-session-id": "top"})
    for number in range(4):
        assert web.chat(f"child-{number}").status == 200
    rate = web.get("/api/sessions/top").json["burn_rate"]
    assert (rate["unit"], rate["calls"], rate["empty_in_calls"]) == ("calls", 4, 4)
    (row,) = json.loads(gateway_command("keys", "--json", "-c", gateway.file).out)
    assert (row["burn_rate"]["calls"], row["burn_rate"]["empty_in_calls"]) == (4, 6)
    until(lambda: "in " in gateway_command("keys", "-c", gateway.file).out)
