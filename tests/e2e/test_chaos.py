"""Run `bench/chaos.py` for a short time, and test what longer runs have found."""

from __future__ import annotations

import json
import signal
import socket
import struct
import subprocess
import sys
from typing import Any

import pytest

from gateway.mock import MockProvider, MockServer
from tests.conftest import StartProcess
from tests.support.gateways import ROOT, until
from tests.support.web import CHAT, HI, chat_bytes, connect

pytestmark = pytest.mark.long

SHORT = "--calls 400 --workers 2 --clients 12 --sessions 10 --kill-every 1.5 --seed 20261121 --json"


def test_killed_workers_and_a_locked_store_lose_no_call_and_charge_none_twice() -> None:
    command = [sys.executable, str(ROOT / "bench" / "chaos.py"), *SHORT.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.stdout, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["violations"] == []
    assert done.returncode == 0
    assert report["kills"] >= 2
    assert report["outages"] == 2
    assert sum(report["seen"].values()) == 400
    assert report["seen"]["ended"] > 100
    assert report["acknowledged"] > 5_000
    assert report["lost_calls"] == report["twice_calls"] == report["holds"] == 0


def test_a_request_of_a_reset_connection_is_never_charged_to_another_session(
    mock_server: MockServer, mock: MockProvider, gateway_process: StartProcess
) -> None:
    # The address of a client is unknown after its connection was reset.
    gateway = gateway_process(mock_server.url, **{"budget.tokens": 1_000})
    gateway.signal(signal.SIGSTOP)
    body = json.dumps({"model": "mock-small", "messages": HI}).encode()
    with connect(gateway.url) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.sendall(chat_bytes(body, b"x-session-id: gone"))
    gateway.signal(signal.SIGCONT)
    assert gateway.web.post(CHAT, body, {"x-session-id": "here"}).status == 200
    until(lambda: gateway.web.get("/api/sessions/here").status == 200)
    shown = {
        row["id"]: row["cumulative_token_usage"]["total_tokens"]
        for row in gateway.web.get("/api/sessions").json["sessions"]
    }
    assert set(shown) <= {"gone", "here"}
    assert sum(shown.values()) == mock.billed().total_tokens
