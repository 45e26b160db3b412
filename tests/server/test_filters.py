"""Filters of lists: which sessions and calls /api/sessions and /api/calls list, for each caller."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

import pytest

from gateway.core.calling_agent import CallingAgent
from gateway.core.times import time_text
from gateway.mock import MockServer
from gateway.server import filters
from tests.conftest import StartGateway
from tests.support import records
from tests.support.gateways import GatewayThread
from tests.support.web import CHAT, HI, Web

ADMIN = "admin-key-0123456789"
KEYS = {"alice": "alice-key-0123456789", "bob": "bob-key-9876543210"}
NOW = 1_800_000_000.0
RECORD = replace(
    records.record("s", NOW, model="mock-large"),
    outcome="provider_error",
    error_code="upstream_error",
    status=502,
    agent=CallingAgent("a1", type="Explore"),
    labels={"tag": "nightly"},
)


@pytest.mark.parametrize(
    ("asked", "is_match"),
    [
        ({"model": "mock-large"}, True),
        ({"model": "mock"}, False),
        ({"status": "provider_error"}, True),
        ({"status": "failed"}, True),
        ({"status": "upstream_error"}, True),
        ({"status": "502"}, True),
        ({"status": "ok"}, False),
        ({"agent": "a1"}, True),
        ({"agent": "Explore"}, True),
        ({"agent": "Plan"}, False),
        ({"tag": "nightly"}, True),
        ({"tag": "prod"}, False),
        ({"from": time_text(NOW)}, True),
        ({"from": time_text(NOW + 1)}, False),
        ({"to": time_text(NOW)}, False),
        ({"to": time_text(NOW + 1)}, True),
        ({"model": "mock-large", "tag": "prod"}, False),
    ],
)
def test_a_filter_matches_calls_with_all_its_values(asked: Mapping[str, str], is_match: bool) -> None:
    found = filters.call_filter_of(asked)
    assert found is not None
    assert found.matches(RECORD) is is_match


def test_a_call_without_agent_and_error_matches_no_filter_for_them() -> None:
    record = records.record("s", NOW)
    for asked in ({"agent": "Explore"}, {"status": "failed"}, {"tag": "nightly"}):
        found = filters.call_filter_of(asked)
        assert found is not None
        assert not found.matches(record)


def test_empty_parameters_are_no_filter() -> None:
    assert filters.call_filter_of({"model": "", "from": "", "limit": "5"}) is None


@pytest.fixture
def gateway(mock_server: MockServer, gateway_server: StartGateway) -> GatewayThread:
    keys = [{"name": name, "key": key} for name, key in KEYS.items()]
    gateway = gateway_server(mock_server.url, **{"auth.admin_key": ADMIN, "auth.keys": keys})
    for name, key in KEYS.items():
        for model in ("mock-small", "mock-large"):
            body = {"model": model, "messages": HI}
            reply = caller(gateway, key).post(CHAT, body, {"x-session-id": "work", "x-session-tag": name})
            assert reply.status == 200
    return gateway


def caller(gateway: GatewayThread, key: str) -> Web:
    return Web(gateway.url, {"authorization": f"Bearer {key}"})


def listed(gateway: GatewayThread, key: str, path: str) -> list[str]:
    found = caller(gateway, key).get(path).json
    return [call["model"] + " " + call["session"] for call in found["calls"]]


def test_calls_are_listed_by_key_model_and_tag(gateway: GatewayThread) -> None:
    assert listed(gateway, ADMIN, "/api/calls?key=bob") == ["mock-large bob/work", "mock-small bob/work"]
    assert listed(gateway, ADMIN, "/api/calls?model=mock-small") == ["mock-small bob/work", "mock-small alice/work"]
    assert listed(gateway, ADMIN, "/api/calls?tag=alice&limit=1") == ["mock-large alice/work"]
    assert caller(gateway, ADMIN).get("/api/calls?tag=alice&limit=1").json["searched"] == 4
    assert listed(gateway, KEYS["alice"], "/api/calls?model=mock-small") == ["mock-small work"]


def test_a_client_key_cannot_list_the_sessions_and_calls_of_another(gateway: GatewayThread) -> None:
    alice = caller(gateway, KEYS["alice"])
    assert alice.get("/api/calls?key=bob").json["calls"] == []
    assert alice.get("/api/sessions?key=bob").json == {"sessions": [], "cursor": None}
    assert len(alice.get("/api/calls?key=alice").json["calls"]) == 2


def test_sessions_are_listed_by_key_and_time_of_the_last_call(gateway: GatewayThread) -> None:
    admin = caller(gateway, ADMIN)

    def ids(query: str) -> list[str]:
        return [row["id"] for row in admin.get(f"/api/sessions?{query}").json["sessions"]]

    assert ids("key=bob") == ["bob/work"]
    assert ids(f"from={time_text(time.time() - 60)}") == ["bob/work", "alice/work"]
    assert ids(f"from={time_text(time.time() + 60)}") == []
    wrong = admin.get("/api/sessions?from=yesterday")
    assert (wrong.status, wrong.error["param"]) == (400, "from")
