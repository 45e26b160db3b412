"""Refusals without a record in the store appear only in the log, the metrics and /api/health."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import replace

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from gateway.core.errors import InternalError, NotFound, Unauthenticated
from gateway.core.ledger.session_key import SessionKey
from gateway.mock import MockServer
from gateway.server.unrecorded import MOST_KEPT, UnrecordedRefusals
from tests.conftest import StartGateway, StartProcess
from tests.support.fakes import Recorder
from tests.support.gateways import GatewayThread, until
from tests.support.prometheus import read
from tests.support.records import record
from tests.support.web import CHAT, HI, Web

ALICE, ADMIN, WRONG = "alice-key-0123456789", "admin-key-0123456789", "sk-nobodys-key-0123456789"
HASH = hashlib.sha256(WRONG.encode()).hexdigest()[:8]
KEYS = {"auth.admin_key": ADMIN, "auth.keys": [{"name": "alice", "key": ALICE}]}
BODY = {"model": "mock-small", "messages": HI}


def with_key(url: str, key: str) -> Web:
    return Web(url, {"authorization": f"Bearer {key}"})


@pytest.fixture
def guarded(mock_server: MockServer, gateway_server: StartGateway) -> GatewayThread:
    """A gateway with a client key and an admin key."""
    return gateway_server(mock_server.url, **KEYS)


def refusals(gateway: GatewayThread) -> list[dict[str, object]]:
    found: list[dict[str, object]] = with_key(gateway.url, ADMIN).get("/api/health").json["unrecorded_refusals"]
    return found


def counted(gateway: GatewayThread, **labels: str) -> float:
    text = with_key(gateway.url, ADMIN).get("/metrics").body.decode()
    return read(text).value("gateway_refusals_total", **labels)


def test_unknown_key_is_counted_with_a_short_hash_and_not_stored(
    guarded: GatewayThread,
) -> None:
    stranger, admin = with_key(guarded.url, WRONG), with_key(guarded.url, ADMIN)
    for _ in range(3):
        refused = stranger.post(CHAT, BODY, {"x-session-id": "theirs"})
        assert (refused.status, refused.error["code"]) == (401, "invalid_api_key")
    [shown] = refusals(guarded)
    assert (shown["code"], shown["status"], shown["credential"], shown["count"]) == ("invalid_api_key", 401, HASH, 3)
    assert shown["message"] == refused.error["message"]
    assert WRONG not in json.dumps(shown)
    assert counted(guarded, code="invalid_api_key") == 3
    assert admin.get("/api/calls").json["calls"] == []
    assert admin.get("/api/sessions").json["sessions"] == []


def test_a_request_without_a_key_and_one_with_an_invalid_path_are_counted_too(guarded: GatewayThread) -> None:
    assert guarded.web.post(CHAT, BODY).status == 401
    assert with_key(guarded.url, ALICE).post("/s/bad%20id/v1/chat/completions", BODY).status == 400
    found = {(one["code"], one["credential"]): one["count"] for one in refusals(guarded)}
    assert found == {("invalid_request", None): 1, ("invalid_api_key", None): 1}


def test_unknown_key_at_the_api_is_counted_but_not_a_request_without_key(guarded: GatewayThread) -> None:
    assert guarded.web.get("/api/sessions").status == 401
    assert with_key(guarded.url, WRONG).get("/api/sessions").status == 401
    assert [(one["credential"], one["count"]) for one in refusals(guarded)] == [(HASH, 1)]


def test_an_unknown_key_at_a_websocket_is_counted(guarded: GatewayThread) -> None:
    address = guarded.url.replace("http", "ws") + "/v1/responses"
    with pytest.raises(InvalidStatus), connect(address, additional_headers={"authorization": f"Bearer {WRONG}"}):
        pass
    assert [(one["credential"], one["count"]) for one in refusals(guarded)] == [(HASH, 1)]


def test_a_refused_call_without_a_session_is_listed(mock_server: MockServer, gateway_server: StartGateway) -> None:
    gateway = gateway_server(mock_server.url, **{"sessions.on_missing": "require"})
    refused = gateway.web.post(CHAT, BODY)
    assert refused.error["code"] == "session_required"
    [shown] = gateway.web.get("/api/health").json["unrecorded_refusals"]
    assert (shown["code"], shown["count"], shown["message"]) == ("session_required", 1, refused.error["message"])


def test_calls_that_the_gateway_could_not_serve_are_listed_and_recorded_refusals_are_not() -> None:
    kept = UnrecordedRefusals([])
    session = SessionKey("alice", "s")
    refused = replace(record("s", 1_000.0), outcome="refused", charge=None, session=session)
    for code in ("overloaded", "store_unavailable", "budget_exhausted", "model_not_found"):
        kept.record(replace(refused, error_code=code), None)
    kept.record(replace(refused, outcome="upstream_failed", session=None, error_code="upstream_timeout"), None)
    assert [one.code for one in kept.newest()] == ["store_unavailable", "overloaded"]


def test_the_log_has_a_line_for_the_first_ones_without_the_key(
    mock_server: MockServer, gateway_process: StartProcess
) -> None:
    flags = {**KEYS, "telemetry.log": {"level": "info", "format": "json"}}
    gateway = gateway_process(mock_server.url, **flags)
    for _ in range(30):
        with_key(gateway.url, WRONG).post(CHAT, BODY)

    def lines() -> list[dict[str, object]]:
        written = [line for line in gateway.errors.read_text().splitlines() if line.startswith('{"event":"call"')]
        return [json.loads(line) for line in written]

    until(lambda: len(lines()) == 10)
    for line in lines():
        assert (line["outcome"], line["status"], line["error_code"]) == ("refused", 401, "invalid_api_key")
        assert (line["credential"], line["left_out"], line["session"]) == (HASH, 0, None)
    gateway.stop()
    assert len(lines()) == 10
    assert WRONG not in gateway.errors.read_text()


def test_only_the_newest_refusals_are_kept() -> None:
    recorder = Seen()
    refused = UnrecordedRefusals([recorder], wall=lambda: 1_000.0)
    for number in range(3 * MOST_KEPT):
        headers = [(b"authorization", b"Bearer key-%d" % number)]
        refused.note(Unauthenticated("no such key"), headers, f"id-{number}", "chat", "chat")
    kept = [one.credential for one in refused.newest()]
    wanted = [hashlib.sha256(b"key-%d" % number).hexdigest()[:8] for number in range(3 * MOST_KEPT)]
    assert kept == wanted[: -MOST_KEPT - 1 : -1]
    assert len(recorder.refusals) == 3 * MOST_KEPT, "observers hear of each"


def test_bug_is_not_a_refusal_and_failing_observers_are_ignored(caplog: pytest.LogCaptureFixture) -> None:
    refused = UnrecordedRefusals([Broken()], wall=lambda: 1_000.0)
    refused.note(InternalError("it failed"), [], "a", "chat", "chat")
    assert refused.newest() == []
    with caplog.at_level(logging.ERROR, "gateway"):
        refused.note(NotFound("x" * 5_000), [(b"authorization", b"Bearer key")], "b", "chat", "chat")
    [kept] = refused.newest()
    assert (kept.code, kept.credential, len(kept.message), kept.count) == ("not_found", None, 1_000, 1)
    assert "an observer failed" in caplog.text


class Seen(Recorder):
    def __init__(self) -> None:
        super().__init__()
        self.refusals: list[object] = []

    def refused(self, call: object) -> None:
        self.refusals.append(call)


class Broken(Recorder):
    def refused(self, call: object) -> None:
        raise RuntimeError(call)
