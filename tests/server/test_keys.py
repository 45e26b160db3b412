"""/api/keys on a running gateway: a team's keys are made, changed, rotated and revoked while clients call."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import openai
import pytest

from gateway.mock import MockProvider, MockServer
from tests.conftest import StartGateway
from tests.support.gateways import GatewayThread, until
from tests.support.web import CHAT, HI, Reply, Web

ADMIN, ALICE = "admin-key-0123456789", "alice-key-0123456789"
BODY = {"model": "mock-small", "messages": HI}


@pytest.fixture
def team(mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway) -> GatewayThread:
    keys = [{"name": "alice", "key": ALICE, "budget": {"calls": 5}}]
    return gateway_server(mock_server.url, **{"auth.admin_key": ADMIN, "auth.keys": keys})


@pytest.fixture
def admin(team: GatewayThread) -> Web:
    return Web(team.url, {"authorization": f"Bearer {ADMIN}"})


def with_key(gateway: GatewayThread, key: str) -> Web:
    return Web(gateway.url, {"authorization": f"Bearer {key}"})


def made(admin: Web, **settings: Any) -> Any:
    reply = admin.post("/api/keys", {"name": "bob", **settings})
    assert reply.status == 201, reply.body
    return reply.json


def row(web: Web, name: str = "bob") -> Any:
    return next(one for one in web.get("/api/keys").json["keys"] if one["name"] == name)


def call(web: Web) -> Reply:
    return web.post(CHAT, BODY)


def test_a_spent_key_goes_on_with_the_same_secret_after_its_budget_is_raised(team: GatewayThread, admin: Web) -> None:
    key = made(admin, budget={"calls": 2, "window": "1d"})["key"]
    client = openai.OpenAI(api_key=key, base_url=f"{team.url}/v1", max_retries=0)
    until(lambda: call(with_key(team, key)).status == 200)
    client.chat.completions.create(model="mock-small", messages=[{"role": "user", "content": "hi"}])
    with pytest.raises(openai.BadRequestError, match="gateway keys set bob --budget-calls 4"):
        client.chat.completions.create(model="mock-small", messages=[{"role": "user", "content": "hi"}])
    changed = admin.send("PATCH", "/api/keys/bob", {"budget": {"calls": 4}})
    assert changed.json["budget"]["used"]["calls"] == 2
    assert (changed.json["window"], changed.json["budget"]["calls"]) == ("1d", 4)
    until(lambda: call(with_key(team, key)).status == 200)


def test_a_rotated_key_has_two_secrets_until_the_overlap_ends(team: GatewayThread, admin: Web) -> None:
    old = with_key(team, made(admin)["key"])
    until(lambda: call(old).status == 200)
    rotated = admin.post("/api/keys/bob/rotate", {"overlap": "24h"}).json
    new = with_key(team, rotated["key"])
    until(lambda: call(new).status == 200)
    assert call(old).status == 200
    assert old.get("/api/keys").json["keys"][0]["name"] == "bob"
    assert (len(row(admin)["replaced_until"]), row(admin)["sessions"] > 0) == (1, True)
    newest = with_key(team, admin.post("/api/keys/bob/rotate", {"overlap": "0"}).json["key"])
    until(lambda: call(newest).status == 200)
    assert (call(old).status, call(new).status, row(admin)["replaced_until"]) == (401, 401, [])


def test_an_expired_key_is_refused_and_names_when_it_ended(team: GatewayThread, admin: Web) -> None:
    ends = datetime.now(UTC) + timedelta(seconds=3)
    bob = with_key(team, made(admin, expires=ends.isoformat())["key"])
    until(lambda: call(bob).status == 200)
    until(lambda: call(bob).status == 401)
    error = call(bob).error
    assert error["code"] == "invalid_api_key"
    assert error["message"].startswith(f'The client key "bob" expired at {ends:%Y-%m-%dT%H:%M:%S}')
    assert bob.get("/api/keys").status == 401
    assert admin.send("PATCH", "/api/keys/bob", {"expires": "1d"}).status == 200
    until(lambda: call(bob).status == 200)


def test_a_key_sees_only_itself_and_changes_nothing(team: GatewayThread, admin: Web) -> None:
    made(admin)
    alice = with_key(team, ALICE)
    keys = alice.get("/api/keys").json["keys"]
    assert [(one["name"], one["budget"]["calls"], one["in_configuration"]) for one in keys] == [("alice", 5, True)]
    for method, path, body in (
        ("POST", "/api/keys", {"name": "eve"}),
        ("PATCH", "/api/keys/alice", {"rpm": 1}),
        ("POST", "/api/keys/bob/rotate", {"overlap": "1h"}),
        ("DELETE", "/api/keys/bob", None),
    ):
        assert alice.send(method, path, body).status == 403
    assert [one["name"] for one in admin.get("/api/keys").json["keys"]] == ["alice", "bob"]


def test_a_revoked_key_is_refused_and_its_sessions_stay(team: GatewayThread, admin: Web) -> None:
    bob = with_key(team, made(admin)["key"])
    until(lambda: call(bob).status == 200)
    assert admin.send("DELETE", "/api/keys/bob").json == {"name": "bob", "revoked": True}
    until(lambda: call(bob).status == 401)
    assert admin.get("/api/sessions").json["sessions"][0]["id"].startswith("bob/")


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "said"),
    [
        ("POST", "/api/keys", {}, 400, "Send the name"),
        ("POST", "/api/keys", [], 400, "must be a JSON object"),
        ("POST", "/api/keys", {"name": "bob"}, 400, "already exists"),
        ("POST", "/api/keys", {"name": "alice"}, 400, "in the configuration"),
        ("POST", "/api/keys", {"name": "eve", "budget": {"usd": "much"}}, 400, "budget.usd: "),
        ("PATCH", "/api/keys/alice", {"rpm": 1}, 400, "in the configuration"),
        ("PATCH", "/api/keys/nobody", {"rpm": 1}, 404, 'no client key "nobody"'),
        ("PATCH", "/api/keys/bob", {}, 400, "Send what to change"),
        ("PATCH", "/api/keys/bob", {"name": "eve"}, 400, "name: is not a setting"),
        ("POST", "/api/keys/bob/rotate", {}, 400, "Send how long"),
        ("POST", "/api/keys/bob/rotate", {"overlap": "soon"}, 400, "overlap: must be a duration"),
        ("DELETE", "/api/keys/alice", None, 400, "in the configuration"),
        ("DELETE", "/api/keys/nobody", None, 404, "no client key"),
    ],
)
def test_a_wrong_request_is_refused_and_says_why(  # noqa: PLR0917  # a table
    method: str, path: str, body: object, status: int, said: str, admin: Web
) -> None:
    made(admin)
    reply = admin.send(method, path, body)
    assert reply.status == status
    assert said in reply.error["message"]


def test_last_use_is_saved_when_the_worker_stops(
    team: GatewayThread, admin: Web, mock_server: MockServer, gateway_server: StartGateway
) -> None:
    bob = with_key(team, made(admin)["key"])
    until(lambda: call(bob).status == 200)
    assert row(admin)["last_used_at"] is None
    team.stop()
    again = gateway_server(mock_server.url, folder=team.store.parent, **{"auth.admin_key": ADMIN})
    ended = datetime.fromisoformat(row(with_key(again, ADMIN))["last_used_at"])
    assert abs(datetime.now(UTC) - ended) < timedelta(minutes=5)
