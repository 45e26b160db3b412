"""`gateway top`."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gateway.mock import MockServer, Provider
from tests.conftest import StartGateway
from tests.support.commands import Commands, environment
from tests.support.gateways import GatewayThread, until
from tests.support.web import CHAT, HI


@pytest.fixture
def served(gateway_server: StartGateway, mock_server: MockServer, mock: Provider) -> GatewayThread:
    assert mock.calls == []
    gateway = gateway_server(mock_server.url, **{"budget.tokens": 1000})
    for session, calls in (("quiet", 1), ("busy", 3)):
        for _ in range(calls):
            body = {"model": "mock-small", "messages": HI, "max_tokens": 20}
            assert gateway.web.post(CHAT, body, {"x-session-id": session}).status == 200
    return gateway


def test_a_look_shows_what_sessions_used_and_have_left(served: GatewayThread, gateway_command: Commands) -> None:
    done = gateway_command("top", "-c", served.file, "--once")
    assert done.code == 0
    rows = {line.split()[0]: line for line in done.out.splitlines()}
    assert "3" in rows["busy"].split()
    assert "%" in rows["busy"]
    assert "raw" in rows["quiet"]


def test_calls_under_way_are_counted(served: GatewayThread, gateway_command: Commands) -> None:
    body = {"model": "mock-small", "messages": HI, "max_tokens": 20}
    slow = threading.Thread(target=served.web.post, args=(CHAT, body, {"x-session-id": "busy", "x-mock": "delay=3"}))
    slow.start()
    try:

        def running() -> int:
            found = json.loads(gateway_command("top", "-c", served.file, "--json").out)
            return int(next(row["calls_under_way"] for row in found if row["id"] == "busy"))

        until(lambda: running() == 1, what="the call is seen while it runs")
    finally:
        slow.join()
    assert running() == 0


def test_it_stays_until_it_is_interrupted(served: GatewayThread, tmp_path: Path) -> None:
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "gateway", "top", "-c", str(served.file), "--every", "0.2"]
    process = subprocess.Popen(command, stdout=slave, stderr=subprocess.PIPE, env=environment(tmp_path, None))
    os.close(slave)
    shown = b""
    while b"busy" not in shown:
        shown += os.read(master, 65536)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    os.close(master)
    assert process.returncode == 0
    assert errors == b""


def test_an_unknown_order_is_wrong_usage(gateway_command: Commands) -> None:
    assert gateway_command("top", "--sort", "name").code == 2
