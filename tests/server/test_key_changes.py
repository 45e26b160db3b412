"""Changes of client keys over the API, and their entries in the audit log."""

from __future__ import annotations

import json

from gateway.mock import MockProvider, MockServer
from tests.conftest import StartGateway

ADMIN = "admin-key-0123456789"
AS_ADMIN = {"authorization": f"Bearer {ADMIN}"}


def test_each_change_of_a_key_is_recorded_without_its_secrets(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    web = gateway_server(mock_server.url, **{"auth.admin_key": ADMIN}).web
    made = web.send("POST", "/api/keys", {"name": "bob", "budget": {"tokens": 5, "window": "1d"}}, AS_ADMIN)
    assert made.status == 201
    assert web.send("PATCH", "/api/keys/bob", {"budget": {"tokens": 9}, "models": ["gpt-*"]}, AS_ADMIN).status == 200
    rotated = web.send("POST", "/api/keys/bob/rotate", {"overlap": "1h"}, AS_ADMIN)
    assert web.send("DELETE", "/api/keys/bob", None, AS_ADMIN).status == 200
    # Refused changes are not recorded.
    assert web.send("PATCH", "/api/keys/bob", {"rpm": 3}, AS_ADMIN).status == 404
    assert web.send("POST", "/api/keys", {"name": "eve"}, {"x-api-key": rotated.json["key"]}).status == 403
    reply = web.get("/api/audit?target=bob", AS_ADMIN)
    revoke, rotate, change, add = reply.json["changes"]
    assert [one["action"] for one in (add, change, rotate, revoke)] == [
        *("key.add", "key.change", "key.rotate", "key.revoke")
    ]
    assert (add["old"], add["new"]["tokens"], add["new"]["window"]) == (None, 5, "1d")
    assert (change["old"], change["new"]["tokens"], change["new"]["models"]) == (add["new"], 9, ["gpt-*"])
    assert rotate["old"] == change["new"]
    assert len(rotate["new"]["replaced_until"]) == 1
    assert (revoke["old"], revoke["new"]) == (rotate["new"], None)
    assert {(one["actor"], one["origin"]) for one in (add, change, rotate, revoke)} == {("admin key", "127.0.0.1")}
    for secret in (made.json["key"], rotated.json["key"], ADMIN):
        assert secret not in json.dumps(reply.json)
