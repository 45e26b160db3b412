from __future__ import annotations

import asyncio
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from gateway import config
from gateway.app.worker import Worker, build_app
from gateway.core.counting.calibration import Residual
from gateway.mock import MockServer
from gateway.server.app import GatewayApp
from gateway.stores.memory import MemoryStore
from tests.conftest import StartGateway
from tests.support.gateways import until, write_config
from tests.support.timing import LIMIT_S, in_time
from tests.support.web import HI


class Lifespan:
    """Run the lifespan of an application step by step."""

    def __init__(self, app: GatewayApp) -> None:
        self._to_app: asyncio.Queue[Any] = asyncio.Queue()
        self._from_app: asyncio.Queue[Any] = asyncio.Queue()
        self._task = asyncio.create_task(app({"type": "lifespan"}, self._to_app.get, self._from_app.put))

    async def tell(self, message: str) -> None:
        await self._to_app.put({"type": f"lifespan.{message}"})

    async def say(self, message: str) -> Any:
        await self.tell(message)
        async with asyncio.timeout(LIMIT_S):
            return await self._from_app.get()

    async def ended(self) -> None:
        async with asyncio.timeout(LIMIT_S):
            await self._task


async def ask(app: GatewayApp, path: str, kind: str = "http") -> list[Any]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    await app(scope_of(path, kind), receive, send)
    return sent


def scope_of(path: str, kind: str = "http") -> dict[str, Any]:
    return {
        "type": kind, "method": "GET", "path": path, "raw_path": path.encode(), "query_string": b"",
        "headers": [(b"host", b"localhost")], "client": ("127.0.0.1", 1), "http_version": "1.1", "scheme": "http",
        "server": ("127.0.0.1", 80), "root_path": "",
    }  # fmt: skip


def chat_body() -> bytes:
    return json.dumps({"model": "mock-small", "messages": HI}).encode()


def app_of(file: Path) -> GatewayApp:
    return build_app(lambda: config.load(file, environment={}))


async def test_unexpected_error_at_start_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def load() -> Any:
        raise RuntimeError("never thought of")

    lifespan = Lifespan(build_app(load))
    with pytest.raises(RuntimeError):
        await asyncio.gather(lifespan.ended(), lifespan.tell("startup"))
    [record] = caplog.records
    assert (record.levelname, record.message) == ("ERROR", "the gateway stops because of a bug")
    assert record.exc_info
    assert "never thought of" in str(record.exc_info[1])


async def test_error_while_sending_the_head_ends_the_request(tmp_path: Path, mock_server: MockServer) -> None:
    app = app_of(write_config(tmp_path, mock_server.url, {}))
    lifespan = Lifespan(app)
    await lifespan.say("startup")
    original = [{"type": "http.request", "body": chat_body(), "more_body": False}]

    async def receive() -> Any:
        return original.pop() if original else await asyncio.Future()

    async def send(message: Any) -> None:
        raise RuntimeError(f"Invalid HTTP header name in {message['type']}")

    scope = {**scope_of("/v1/chat/completions"), "method": "POST"}
    # It returns without a response, and the server then closes the connection.
    serving = asyncio.create_task(app(scope, receive, send))
    assert await asyncio.wait({serving}, timeout=LIMIT_S) == ({serving}, set())
    await lifespan.say("shutdown")
    await lifespan.ended()


async def test_it_serves_between_start_and_stop_only(tmp_path: Path) -> None:
    app = app_of(write_config(tmp_path, "http://127.0.0.1:1", {}))
    for path in ("/healthz", "/v1/models", "/api/sessions"):
        [start, _] = await ask(app, path)
        assert start["status"] == 503
        assert (b"x-should-retry", b"true") in start["headers"]
        assert any(name == b"retry-after" for name, _ in start["headers"])
    lifespan = Lifespan(app)
    assert (await lifespan.say("startup"))["type"] == "lifespan.startup.complete"
    assert (await ask(app, "/healthz"))[0]["status"] == 200
    assert (await ask(app, "/readyz"))[0]["status"] == 200
    assert (await lifespan.say("shutdown"))["type"] == "lifespan.shutdown.complete"
    await lifespan.ended()
    assert (await ask(app, "/healthz"))[0]["status"] == 503


async def test_error_while_closing_does_not_keep_other_resources_open(tmp_path: Path) -> None:
    def load() -> config.Loaded:
        return config.load(write_config(tmp_path, "http://127.0.0.1:1", {}), environment={})

    async def fail() -> None:
        raise OSError("stuck")

    store = MemoryStore()
    worker = Worker(store, load().settings, load)
    worker.api.events.aclose = worker.forwarder.close = fail  # type: ignore[method-assign]
    worker.lasting.learner.report("k", Residual(5, 1_000))  # what is closed last
    with pytest.raises(OSError, match="stuck"):
        await worker.aclose()
    assert await store.learned("offsets\nk") is not None


async def test_a_wrong_configuration_stops_the_start_and_says_why(tmp_path: Path) -> None:
    lifespan = Lifespan(app_of(write_config(tmp_path, "http://127.0.0.1:1", {"server.prt": 1})))
    answer = await lifespan.say("startup")
    assert answer["type"] == "lifespan.startup.failed"
    assert "server.prt" in answer["message"]
    await lifespan.ended()


@pytest.mark.parametrize("content", [b"no database, but something else entirely" * 100, None])
async def test_a_store_that_cannot_be_opened_stops_the_start_and_says_why(
    content: bytes | None, tmp_path: Path
) -> None:
    file = write_config(tmp_path, "http://127.0.0.1:1", {})
    if content is None:
        (tmp_path / "gateway.db").mkdir()
    else:
        (tmp_path / "gateway.db").write_bytes(content)
    lifespan = Lifespan(app_of(file))
    answer = await lifespan.say("startup")
    assert answer["type"] == "lifespan.startup.failed"
    assert "store.url" in answer["message"]
    await lifespan.ended()


async def test_a_database_of_a_newer_version_is_not_touched(tmp_path: Path) -> None:
    file = write_config(tmp_path, "http://127.0.0.1:1", {})
    with sqlite3.connect(tmp_path / "gateway.db") as database:
        database.execute("PRAGMA user_version=99")
    database.close()
    answer = await Lifespan(app_of(file)).say("startup")
    assert answer["type"] == "lifespan.startup.failed"
    assert "99" in answer["message"]


async def test_websocket_is_closed_while_the_gateway_does_not_run(tmp_path: Path) -> None:
    app = app_of(write_config(tmp_path, "http://127.0.0.1:1", {}))
    assert (await ask(app, "/v1/responses", kind="websocket"))[0]["type"] == "websocket.close"


async def test_all_problems_of_a_configuration_are_reported_at_once(tmp_path: Path) -> None:
    flags = {"server.prt": 1, "sessions.ttl": "soon"}
    answer = await Lifespan(app_of(write_config(tmp_path, "http://127.0.0.1:1", flags))).say("startup")
    assert "server.prt" in answer["message"]
    assert "sessions.ttl" in answer["message"]


def test_readiness_follows_the_state_of_the_store(gateway_server: StartGateway) -> None:
    gateway = gateway_server("http://127.0.0.1:1", **{"store.timeout_ms": 50})
    assert gateway.web.get("/readyz").status == 200
    lock = sqlite3.connect(gateway.store, isolation_level=None)
    try:
        lock.execute("BEGIN EXCLUSIVE")
        with in_time():  # store.timeout_ms is 50
            answer = gateway.web.get("/readyz")
        assert (answer.status, answer.json["status"]) == (503, "not ready")
        assert gateway.web.get("/healthz").status == 200
    finally:
        lock.execute("ROLLBACK")
        lock.close()
    assert gateway.web.get("/readyz").status == 200


def test_it_is_ready_again_only_when_calls_are_accepted_again(
    gateway_server: StartGateway, mock_server: MockServer
) -> None:
    gateway = gateway_server(mock_server.url, **{"store.timeout_ms": 50, "budget.tokens": 1_000_000})
    lock = sqlite3.connect(gateway.store, isolation_level=None)
    try:
        lock.execute("BEGIN EXCLUSIVE")
        assert gateway.web.chat("s").status == 503
    finally:
        lock.execute("ROLLBACK")
        lock.close()
    until(lambda: gateway.web.get("/readyz").status == 200)
    assert gateway.web.chat("s").status == 200
