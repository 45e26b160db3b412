"""The audit log of a running gateway: what is recorded, and who may read it."""

from __future__ import annotations

import json
import logging
import signal
from collections.abc import Callable
from typing import Any

import pytest

from gateway.core.audit import AuditEntry, Author
from gateway.core.errors import StoreUnavailable
from gateway.mock import MockProvider, MockServer
from gateway.server.audit import line_of, record_change
from gateway.stores.memory import MemoryStore
from tests.conftest import StartGateway, StartProcess
from tests.support.gateways import STARTS_S, GatewayThread, until
from tests.support.web import Reply

ALICE, ADMIN = "alice-key-0123456789", "admin-key-0123456789"
AS_ADMIN, AS_ALICE = {"authorization": f"Bearer {ADMIN}"}, {"authorization": f"Bearer {ALICE}"}
STEPS = [
    {"name": "work", "is_default": True},
    {"name": "review", "conditions": [{"message_matches": "review"}], "sequence": ["a", "b"]},
]


@pytest.fixture
def open_gateway(mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway) -> GatewayThread:
    return gateway_server(mock_server.url, **{"budget.tokens": 1_000, "steps": STEPS})


@pytest.fixture
def with_keys(mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway) -> GatewayThread:
    keys = [{"name": "alice", "key": ALICE}]
    return gateway_server(mock_server.url, **{"auth.admin_key": ADMIN, "auth.keys": keys})


def changes(gateway: GatewayThread, query: str = "", headers: dict[str, str] | None = None) -> list[Any]:
    reply = gateway.web.get(f"/api/audit?{query}", headers)
    assert reply.status == 200, reply.body
    found: list[Any] = reply.json["changes"]
    return found


def change(gateway: GatewayThread, method: str, path: str, body: object = None, **headers: str) -> Reply:
    return gateway.web.send(method, f"/api/{path}", body, headers)


# --- what is recorded ---------------------------------------------------------------------------------------------


def test_a_budget_is_recorded_with_its_old_and_new_limits(open_gateway: GatewayThread) -> None:
    for budget in ({"tokens": 500, "usd": "1.5"}, {"tokens": None}, "default"):
        assert change(open_gateway, "PATCH", "sessions/s", {"budget": budget}).status == 200
    last, second, first = changes(open_gateway)
    assert first["old"] == {"tokens": 1_000, "usd": None, "calls": None}
    assert first["new"] == second["old"] == {"tokens": 500, "usd": "1.500000", "calls": None}
    assert second["new"] == last["old"] == {"tokens": None, "usd": "1.500000", "calls": None}
    assert last["new"] == first["old"]
    assert {(one["action"], one["target"], one["actor"], one["origin"]) for one in (first, second, last)} == {
        ("session.budget", "s", "this machine without a key", "127.0.0.1")
    }


def test_a_step_a_reset_and_a_deletion_are_recorded(open_gateway: GatewayThread) -> None:
    assert open_gateway.web.chat("s", "tokens=30/12").status == 200
    for _ in range(2):
        body = {"active_step": "review", "sequence_index": 1}
        assert change(open_gateway, "PATCH", "sessions/s", body).status == 200
    assert change(open_gateway, "POST", "sessions/s/reset").status == 200
    assert open_gateway.web.chat("s", "tokens=5/1").status == 200
    assert change(open_gateway, "DELETE", "sessions/s").status == 200
    deleted, reset, again, step = changes(open_gateway)
    assert (step["action"], step["old"]["active_step"]) == ("session.step", "work")
    assert step["new"] == again["old"] == {"agent": "default", "active_step": "review", "sequence_index": 1}
    assert (reset["action"], reset["old"]["used_tokens"], reset["old"]["used_calls"]) == ("session.reset", 42, 1)
    assert (deleted["action"], deleted["old"]["used_tokens"], deleted["new"]) == ("session.delete", 6, None)


def test_resuming_a_session_is_recorded_only_if_it_was_stopped(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url, **{"budget.seconds": 0.001})
    assert gateway.web.chat("s").status == 200
    assert change(gateway, "POST", "sessions/s/resume").status == 200
    assert changes(gateway) == []
    assert gateway.web.chat("s").error["code"] == "session_stopped"
    assert change(gateway, "POST", "sessions/s/resume").status == 200
    [entry] = changes(gateway)
    assert (entry["action"], entry["target"], entry["new"]) == ("session.resume", "s", None)
    assert entry["old"]["last_stop"]


def test_a_reload_is_recorded_with_the_keys_that_changed(with_keys: GatewayThread) -> None:
    settings = json.loads(with_keys.file.read_text())
    settings["budget"] = {"tokens": 77}
    settings["auth"]["keys"].append({"name": "bob", "key": "bob-key-0123456789abc"})
    with_keys.file.write_text(json.dumps(settings))
    assert change(with_keys, "POST", "reload", **AS_ADMIN).status == 200
    [entry] = changes(with_keys, headers=AS_ADMIN)
    assert (entry["action"], entry["target"], entry["actor"]) == ("config.reload", "configuration", "admin key")
    assert entry["old"] == {"budget.tokens": None}
    assert entry["new"] == {"budget.tokens": 77, "auth.keys[bob]": "set"}


def test_a_reload_of_several_workers_is_recorded_once(
    mock_server: MockServer, mock: MockProvider, gateway_process: StartProcess
) -> None:
    flags = {"server.workers": 2, "telemetry.log": {"level": "info"}, "budget.tokens": 1}
    gateway = gateway_process(mock_server.url, **flags)

    def answering() -> set[int]:
        return {gateway.web.get("/api/health").json["worker"]["pid"] for _ in range(20)}

    until(lambda: len(answering()) == 2, STARTS_S, "both workers have started")

    def reload_with(tokens: int, ask: Callable[[], object]) -> None:
        settings = json.loads(gateway.file.read_text())
        settings["budget"] = {"tokens": tokens}
        gateway.file.write_text(json.dumps(settings))
        ask()
        until(lambda: gateway.errors.read_text().count("configuration reloaded") == 2 * (tokens - 1))
        until(lambda: recorded()[-1:] == [tokens])

    def recorded() -> list[int]:
        return [one["new"]["budget.tokens"] for one in gateway.web.get("/api/audit").json["changes"][::-1]]

    reload_with(2, lambda: gateway.web.post("/api/reload"))
    for tokens in (3, 4):
        reload_with(tokens, lambda: gateway.signal(signal.SIGHUP))
    entries = gateway.web.get("/api/audit").json["changes"]
    assert [one["actor"] for one in entries] == [*["signal SIGHUP"] * 2, "this machine without a key"]
    assert recorded() == [2, 3, 4]
    until(lambda: gateway.errors.read_text().count("audit: config.reload") == 3)


def test_a_change_that_was_refused_is_not_recorded(with_keys: GatewayThread) -> None:
    budget = {"budget": {"tokens": 5}}
    for method, path, body, headers, status in (
        ("PATCH", "sessions/s", budget, AS_ALICE, 403),
        ("PATCH", "sessions/alice/s", budget, {}, 401),
        ("PATCH", "sessions/alice/s", {"budget": {"tokens": -1}}, AS_ADMIN, 400),
        ("DELETE", "sessions/alice/unknown", None, AS_ADMIN, 404),
        ("POST", "sessions/alice/unknown/reset", None, AS_ADMIN, 404),
        ("POST", "sessions/alice/unknown/resume", None, AS_ADMIN, 404),
        ("POST", "reload", None, AS_ALICE, 403),
    ):
        assert change(with_keys, method, path, body, **headers).status == status, path
    with_keys.file.write_text("budget: {tokens: wrong}")
    assert change(with_keys, "POST", "reload", **AS_ADMIN).status == 400
    assert changes(with_keys, headers=AS_ADMIN) == []


# --- who and from where -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x-forwarded-for", "x-real-ip", "forwarded"])
def test_a_forged_address_is_not_recorded(with_keys: GatewayThread, name: str) -> None:
    headers = {**AS_ADMIN, name: "for=203.0.113.9"}
    assert change(with_keys, "PATCH", "sessions/alice/s", {"budget": {"tokens": 5}}, **headers).status == 200
    [entry] = changes(with_keys, headers=AS_ADMIN)
    assert (entry["target"], entry["actor"], entry["origin"]) == ("alice/s", "admin key", "127.0.0.1")


def test_only_an_administrator_may_read(with_keys: GatewayThread) -> None:
    assert with_keys.web.get("/api/audit", AS_ALICE).status == 403
    assert with_keys.web.get("/api/audit").status == 401
    assert with_keys.web.get("/api/audit", {"x-api-key": ALICE, "x-forwarded-for": "127.0.0.1"}).status == 403
    assert with_keys.web.get("/api/audit", AS_ADMIN).json == {"changes": [], "cursor": None}


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_nobody_can_change_the_log(with_keys: GatewayThread, method: str) -> None:
    assert with_keys.web.send(method, "/api/audit", {}, AS_ADMIN).status == 405
    assert with_keys.web.send(method, "/api/audit/1", {}, AS_ADMIN).status == 404


def test_no_secret_is_in_an_entry_or_in_the_log(with_keys: GatewayThread, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("gateway").addHandler(caplog.handler)
    logging.getLogger("gateway").setLevel(logging.INFO)
    planted = "planted-secret-0123456789"
    settings = json.loads(with_keys.file.read_text())
    settings["auth"] |= {"keys": [{"name": "alice", "key": planted}], "admin_key": f"{planted}-admin"}
    settings["providers"]["upstream"]["headers"] = {"x-own": f"{planted}-header"}
    with_keys.file.write_text(json.dumps(settings))
    query = f"?key={planted}"
    for path in (f"sessions/alice/s{query}", f"reload{query}"):
        method, body = ("POST", None) if path.startswith("reload") else ("PATCH", {"budget": {"tokens": 5}})
        assert change(with_keys, method, path, body, **AS_ADMIN, cookie=planted, referer=planted).status == 200
    reply = with_keys.web.get("/api/audit", {"authorization": f"Bearer {planted}-admin"})
    lines = [record.getMessage() for record in caplog.records if "audit: " in record.getMessage()]
    assert len(reply.json["changes"]) == len(lines) == 2
    assert {"auth.admin_key", "auth.keys[alice].key", "providers.upstream.headers"} <= {
        key.removesuffix(".x-own") for key in reply.json["changes"][0]["new"]
    }
    for text in (reply.body.decode(), *lines):
        for secret in (planted, ALICE, ADMIN):
            assert secret not in text


# --- reading ------------------------------------------------------------------------------------------------------


def test_pages_and_targets(open_gateway: GatewayThread) -> None:
    for number in range(5):
        change(open_gateway, "PATCH", f"sessions/s{number}", {"budget": {"tokens": number + 1}})
    page = open_gateway.web.get("/api/audit?limit=2").json
    assert [one["target"] for one in page["changes"]] == ["s4", "s3"]
    rest = open_gateway.web.get(f"/api/audit?limit=9&cursor={page['cursor']}").json
    assert ([one["target"] for one in rest["changes"]], rest["cursor"]) == (["s2", "s1", "s0"], None)
    assert [one["target"] for one in changes(open_gateway, "target=s3")] == ["s3"]
    assert changes(open_gateway, "target=nothing") == []


@pytest.mark.parametrize(
    "query",
    ["limit=0", "limit=1001", "cursor=x", "cursor=-1", f"cursor={'9' * 30}", "target=%00", f"target={'x' * 513}"],
)
def test_a_bad_query_is_a_400(open_gateway: GatewayThread, query: str) -> None:
    assert open_gateway.web.get(f"/api/audit?{query}").error["code"] == "invalid_request"


# --- a store that fails -------------------------------------------------------------------------------------------


async def test_a_change_stays_if_its_entry_cannot_be_stored(caplog: pytest.LogCaptureFixture) -> None:
    class Away(MemoryStore):
        async def record_change(self, entry: AuditEntry) -> None:
            raise StoreUnavailable(f"gone with {entry.target}.")

    logging.getLogger("gateway").addHandler(caplog.handler)
    caplog.set_level(logging.INFO, "gateway")
    await record_change(Away(), Author("admin key", "192.0.2.1"), "session.reset", "s", old={"tokens": 5})
    line = 'session.reset s by admin key from 192.0.2.1: {"tokens":5} -> null'
    assert f"audit: {line}" in caplog.text
    assert f"lacks it: gone with s. {line}" in caplog.text


def test_an_entry_is_one_line() -> None:
    entry = AuditEntry(0.0, "key.add", "bob", "command line", "root@host", None, {"models": ["a\nb"]})
    assert line_of(entry) == 'key.add bob by command line from root@host: null -> {"models":["a\\nb"]}'
