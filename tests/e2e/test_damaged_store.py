"""An account that cannot be read refuses its own session in the caller's format, and delays no other session."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gateway.core.ledger.arithmetic import AccountKey
from gateway.mock import MockProvider, MockServer
from gateway.stores.redis.keys import Keys
from tests.conftest import StartGateway
from tests.stores.redis_servers import RedisServer
from tests.support.gateways import GatewayThread
from tests.support.web import CHAT, HI

BODIES = {
    CHAT: {"model": "mock-small", "messages": HI},
    "/v1/responses": {"model": "mock-small", "input": "hi"},
    "/v1/messages": {"model": "mock-small", "messages": HI, "max_tokens": 10},
}


def damage_file(store: Path) -> None:
    database = sqlite3.connect(store)
    with database:
        changed = database.execute("UPDATE accounts SET decided = ? WHERE kind = 'session' AND id = 's'", (b"junk",))
        assert changed.rowcount == 1
    database.close()


@pytest.fixture(params=["sqlite", "redis"])
def damaged(
    request: pytest.FixtureRequest, mock_server: MockServer, gateway_server: StartGateway, tmp_path: Path
) -> Iterator[tuple[GatewayThread, Callable[[], object]]]:
    """Yield a gateway with a session "s", and a function that damages its account."""
    flags: dict[str, object] = {"budget.tokens": 100_000}
    if request.param == "sqlite":
        gateway = gateway_server(mock_server.url, **flags)
        yield gateway, lambda: damage_file(gateway.store)
        return
    server = RedisServer(tmp_path)
    name = Keys("gateway:").account(AccountKey("session", "default", "s"))
    gateway = gateway_server(mock_server.url, **flags, **{"store.url": server.url})
    yield gateway, lambda: server.cli("hset", name, "u1", "junk")
    server.kill()


def test_a_damaged_session_is_refused_until_it_is_deleted_and_others_continue(
    damaged: tuple[GatewayThread, Callable[[], object]], mock: MockProvider
) -> None:
    (gateway, damage), web = damaged, damaged[0].web
    assert web.chat("s").status == 200
    damage()
    sent = len(mock.calls)
    for path, body in BODIES.items():
        answer = web.post(path, body, {"x-session-id": "s"})
        assert (answer.status, answer.error["code"]) == (503, "store_damaged")
        assert (answer.header("x-should-retry"), answer.header("retry-after")) == ("false", None)
        assert "an operator has to repair it, or to delete the session" in answer.error["message"]
        assert ("type" in answer.json) is (path == "/v1/messages")
        assert web.chat("other").status == 200, "the store is not treated as unavailable"
    assert len(mock.calls) == sent + len(BODIES)
    assert web.get("/readyz").status == 200
    assert [one["id"] for one in web.get("/api/sessions").json["sessions"]] == ["other"]
    assert web.get("/api/sessions/s").status == 503
    assert web.send("DELETE", "/api/sessions/s").status in (200, 204)
    answer = web.chat("s")
    assert answer.status == 200
    assert answer.totals[2] < 100_000
    gateway.stop()
