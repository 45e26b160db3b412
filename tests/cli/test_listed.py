"""The order of sessions is the same in `gateway sessions`, in `gateway top` and in the API."""

from __future__ import annotations

import json

import pytest

from gateway.core.stored import SORTS
from gateway.mock import MockServer
from tests.conftest import StartGateway
from tests.support.commands import Commands
from tests.support.gateways import GatewayThread

ORDERS = {"recent": ["last", "large", "dear"], "tokens": ["large", "dear", "last"], "cost": ["dear", "last", "large"]}
LISTS = (("sessions", "list"), ("sessions",), ("top",))


@pytest.fixture
def filled(mock_server: MockServer, gateway_server: StartGateway) -> GatewayThread:
    """A running gateway with three sessions, whose order is different for each sort key."""
    prices = [("dear", 1000), ("fair", 100), ("free", 0)]
    models = [
        {"match": name, "provider": "upstream", "price": {"input": price, "output": price}} for name, price in prices
    ]
    gateway = gateway_server(mock_server.url, models=models)
    for session, model, tokens in (("dear", "dear", "50/5"), ("large", "free", "500/5"), ("last", "fair", "10/1")):
        assert gateway.web.chat(session, f"tokens={tokens}", model=model).status == 200
    return gateway


@pytest.mark.parametrize("sort", SORTS)
def test_all_lists_have_the_order_of_the_api(sort: str, filled: GatewayThread, gateway_command: Commands) -> None:
    api = filled.web.get(f"/api/sessions?sort={sort}").json["sessions"]
    assert [row["id"] for row in api] == ORDERS[sort]
    for command in LISTS:
        done = gateway_command(*command, "--sort", sort, "--json", "-c", filled.file)
        assert [row["id"] for row in json.loads(done.out)] == ORDERS[sort]
        once = () if command[0] == "sessions" else ("--once",)
        lines = gateway_command(*command, "--sort", sort, "-c", filled.file, *once).lines
        assert [line.split()[0] for line in lines[1:]] == ORDERS[sort]


@pytest.mark.parametrize("sort", SORTS)
def test_limit_applies_to_all_sessions_and_not_to_a_page(
    sort: str, filled: GatewayThread, gateway_command: Commands
) -> None:
    for command in LISTS:
        done = gateway_command(*command, "--sort", sort, "--limit", "1", "--json", "-c", filled.file)
        assert [row["id"] for row in json.loads(done.out)] == ORDERS[sort][:1]


@pytest.mark.parametrize("command", LISTS)
@pytest.mark.parametrize("name", ["name", "", "RECENT", "co\x1b[2Jst", "x" * 5000])
def test_invalid_order_is_refused_with_the_valid_ones(
    name: str, command: tuple[str, ...], gateway_command: Commands
) -> None:
    done = gateway_command(*command, "--sort", name)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("--sort must be one of recent, tokens, cost, not ")
    assert len(done.err.splitlines()) == 1
    assert len(done.err) < 200
    assert "\x1b" not in done.err
