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

from gateway.mock import MockProvider, MockServer
from tests.conftest import StartGateway, StartUpstream
from tests.support.commands import Commands, environment
from tests.support.gateways import GatewayThread, until
from tests.support.scripted import Held, completion
from tests.support.terminals import Terminal
from tests.support.web import CHAT, HI


@pytest.fixture
def served(gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider) -> GatewayThread:
    assert mock.calls == []
    gateway = gateway_server(mock_server.url, **{"budget.tokens": 1000})
    for session, calls in (("quiet", 1), ("busy", 3)):
        for _ in range(calls):
            body = {"model": "mock-small", "messages": HI, "max_tokens": 20}
            assert gateway.web.post(CHAT, body, {"x-session-id": session}).status == 200
    return gateway


def test_table_shows_used_and_remaining_budgets(served: GatewayThread, gateway_command: Commands) -> None:
    done = gateway_command("top", "-c", served.file, "--once")
    assert done.code == 0
    rows = {line.split()[0]: line for line in done.out.splitlines()}
    assert "3" in rows["busy"].split()
    assert "%" in rows["busy"]
    assert "raw" in rows["quiet"]


def test_calls_under_way_are_counted(
    gateway_server: StartGateway, byte_server: StartUpstream, gateway_command: Commands
) -> None:
    upstream = byte_server(lambda connection: connection.whole(completion()))
    gateway = gateway_server(upstream.url, **{"budget.tokens": 1000})
    body = {"model": "m", "messages": HI, "max_tokens": 20}
    assert gateway.web.post(CHAT, body, {"x-session-id": "busy"}).status == 200
    upstream.script = held = Held()
    slow = threading.Thread(target=gateway.web.post, args=(CHAT, body, {"x-session-id": "busy"}))
    slow.start()
    try:

        def running() -> int:
            found = json.loads(gateway_command("top", "-c", gateway.file, "--json").out)
            return int(next(row["calls_under_way"] for row in found if row["id"] == "busy"))

        until(lambda: running() == 1, what="the call is seen while it runs")
    finally:
        held.release()
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


@pytest.mark.parametrize("columns", [40, 60, 80, 100])
def test_small_terminal_shortens_names_and_never_numbers(columns: int, served: GatewayThread, tmp_path: Path) -> None:
    name = "n" * 255
    body = {"model": "mock-small", "messages": HI, "max_tokens": 20}
    assert served.web.post(CHAT, body, {"x-session-id": name, "x-mock": "tokens=123456/7"}).status == 200
    lines = Terminal(tmp_path, columns, "top", "-c", served.file, "--once").shown()
    assert max(map(len, lines)) <= columns
    assert lines[0].split()[0] == "session"
    assert "budget left" in lines[0]
    row = next(line for line in lines if line.startswith("n"))
    assert "…" in row
    assert "%" in row
    assert ("123,456" in row) == ("input" in lines[0])
    assert ("input" in lines[0]) == (columns == 100)


def test_empty_store_shows_no_sessions(gateway_server: StartGateway, mock_server: MockServer, tmp_path: Path) -> None:
    gateway = gateway_server(mock_server.url)
    assert any(
        "no sessions yet" in line for line in Terminal(tmp_path, 40, "top", "-c", gateway.file, "--once").shown()
    )


def test_pipe_gets_one_table(served: GatewayThread, gateway_command: Commands) -> None:
    done = gateway_command.process("top", "-c", served.file)
    assert done.code == 0
    assert "busy" in done.out
