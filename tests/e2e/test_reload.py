"""Reload the configuration of a running gateway: what changes, what needs a restart, and what is logged."""

from __future__ import annotations

import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gateway.mock import MockProvider, MockServer
from tests.conftest import StartGateway, StartProcess
from tests.support.gateways import GatewayProcess, GatewayThread, until
from tests.support.web import CHAT, HI

ALICE = "alice-key-0123456789"
PAGE = {"origin": "https://app.example"}


def edit(gateway: GatewayThread | GatewayProcess, **changes: dict[str, object] | None) -> None:
    """Change keys of sections in the file; None removes the section."""
    settings: dict[str, Any] = json.loads(gateway.file.read_text())
    for section, block in changes.items():
        settings[section] = {**settings.get(section, {}), **block} if block is not None else None
    gateway.file.write_text(json.dumps(settings))


def reload(gateway: GatewayProcess, says: str) -> None:
    """Reload, and wait for this text in the log."""
    times = gateway.errors.read_text().count(says)
    gateway.signal(signal.SIGHUP)
    until(lambda: gateway.errors.read_text().count(says) > times, what=says)


def test_settings_that_need_a_restart_are_unchanged_and_named_in_the_log(
    mock_server: MockServer, mock: MockProvider, gateway_process: StartProcess
) -> None:
    gateway = gateway_process(mock_server.url, **{"telemetry.log": {"level": "info"}, "store.on_failure": "open"})
    before = gateway.file.read_text()
    health = gateway.web.get("/api/health").json["store"]
    assert health["on_failure"] == "open"
    secret = "redis://:password-in-the-file@localhost/0"
    edit(
        gateway,
        server={"dashboard": False, "max_body_mb": 1},
        store={"url": secret, "on_failure": "closed"},
        telemetry={"metrics": False},
        sessions={"on_missing": "require", "ttl": "1d"},
    )
    reload(gateway, "needs a restart: ")
    log = gateway.errors.read_text()
    [line] = [line for line in log.splitlines() if "needs a restart" in line]
    named = json.loads(line)["message"].removeprefix("needs a restart: ").split(", ")
    assert sorted(named) == ["server.dashboard", "store.on_failure", "store.url", "telemetry.metrics"]
    assert "password-in-the-file" not in log
    assert gateway.web.get("/api/health").json["store"] == health
    assert gateway.web.get("/metrics").status == gateway.web.get("/ui").status == 200
    assert gateway.web.chat().status == 400, "sessions.on_missing follows"
    gateway.file.write_text(before)
    reload(gateway, "configuration reloaded")
    assert gateway.web.chat().status == 200
    assert gateway.errors.read_text().count("needs a restart") == 1


def test_a_reload_cannot_remove_keys_while_the_old_public_address_is_used(
    mock_server: MockServer, mock: MockProvider, gateway_process: StartProcess
) -> None:
    keys = [{"name": "alice", "key": ALICE}]
    flags = {"server.host": "0.0.0.0", "auth.keys": keys, "telemetry.log": {"level": "info"}}
    gateway = gateway_process(mock_server.url, **flags)
    upstream = {"base_url": mock_server.url, "key": "the-provider-key-that-is-held"}
    # After a restart this configuration would be safe. Now the gateway still listens to the whole network.
    edit(gateway, server={"host": "127.0.0.1"}, auth=None, providers={"upstream": upstream})
    reload(gateway, "not reloaded")
    assert gateway.web.chat("s").status == 401


@pytest.mark.parametrize("is_allowed", [False, True])
def test_cors_origins_are_unchanged_by_a_reload(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway, *, is_allowed: bool
) -> None:
    origins: tuple[list[str], list[str]] = ([], [PAGE["origin"]])
    gateway = gateway_server(mock_server.url, **{"server.cors_origins": origins[is_allowed]})

    def seen() -> tuple[int, str | None]:
        answer = gateway.web.post(CHAT, {"model": "mock-small", "messages": HI}, PAGE)
        return answer.status, answer.header("access-control-allow-origin")

    first = (200, PAGE["origin"]) if is_allowed else (403, None)
    assert seen() == first
    edit(gateway, server={"cors_origins": origins[not is_allowed]})
    assert gateway.web.post("/api/reload").status == 200
    assert seen() == first


def test_a_running_trim_request_completes_during_reloads(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url)
    messages = [{"role": "user", "content": f"{at} " + "word " * 300} for at in range(200)]
    body = {"model": "gpt-4o", "messages": messages}
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(gateway.web.post, "/api/trim", body, {"x-context-budget": "5000"})
        while not answer.done():
            assert gateway.web.post("/api/reload").status == 200
            time.sleep(0.05)
    assert answer.result().status == 200


def test_token_families_are_unchanged_by_a_reload(
    mock_server: MockServer, mock: MockProvider, gateway_process: StartProcess, tmp_path: Path
) -> None:
    own = tmp_path / "families.yaml"
    own.write_text('families: {mine: {models: "m", start: 5000}}')
    flags = {"context.families": str(own), "telemetry.log": {"level": "info"}}
    gateway = gateway_process(mock_server.url, **flags)
    body = {"model": "m", "messages": HI}
    before = gateway.web.post("/api/count", body).json["tokens"]
    assert before > 5000
    own.write_text("families: {mine: {text: -1}}")
    edit(gateway, sessions={"on_missing": "require"})
    reload(gateway, "configuration reloaded")
    assert gateway.web.chat().status == 400, "sessions.on_missing follows"
    assert gateway.web.post("/api/count", body).json["tokens"] == before
