"""`gateway keys`: client keys that come and go while the gateway runs."""

from __future__ import annotations

import json

import pytest

from gateway.mock import MockServer, Provider
from tests.conftest import StartGateway
from tests.support.commands import Commands
from tests.support.gateways import GatewayThread, until


def test_a_key_is_shown_once_opens_its_sessions_and_is_refused_once_it_is_revoked(
    mock_server: MockServer, mock: Provider, gateway_server: StartGateway, gateway_command: Commands
) -> None:
    gateway = gateway_server(mock_server.url)
    store = ["--store", f"sqlite://{gateway.store}"]
    assert gateway.web.chat("s").status == 200
    added = gateway_command("keys", "add", "carol", "--budget-calls", "2", "--window", "1d", *store)
    key = added.out.strip()
    assert added.code == 0
    assert len(key) > 40
    assert key.encode() not in gateway.store.read_bytes()
    until(lambda: gateway.web.chat("s").status == 401)
    own = {"authorization": f"Bearer {key}"}
    body = {"model": "mock-small", "messages": [{"role": "user", "content": "hi"}]}
    statuses = [gateway.web.post("/v1/chat/completions", body, own).status for _ in range(3)]
    assert statuses == [200, 200, 400]
    assert gateway_command("keys", "add", "carol", *store).code == 1
    (row,) = json.loads(gateway_command("keys", "list", "--json", *store).out)
    assert (row["name"], row["calls"], row["used_fraction"]) == ("carol", 2, 1.0)
    assert key not in gateway_command("keys", *store).out
    assert gateway_command("keys", "revoke", "carol", *store).code == 0
    until(lambda: gateway.web.post("/v1/chat/completions", body).status == 200)
    assert gateway_command("keys", "revoke", "carol", *store).code == 1


@pytest.mark.parametrize(
    "asked",
    [
        ["a/b"],
        ["default"],
        ["anonymous"],
        ["cred-1"],
        ["x", "--window", "soon"],
        ["x", "--budget-usd", "much"],
        ["x", "--rpm", "0"],
        ["x", "--rpm", str(2**53 + 1)],
        ["x", "--rpm", "99999999999999999999999"],
    ],
)
def test_a_key_that_makes_no_sense_is_refused(
    gateway: GatewayThread, gateway_command: Commands, asked: list[str]
) -> None:
    done = gateway_command("keys", "add", *asked, "--store", f"sqlite://{gateway.store}")
    assert done.code == 2
