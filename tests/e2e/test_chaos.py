"""The chaos run of `bench/chaos.py`, short; and what longer ones found."""

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


def test_no_call_is_lost_or_charged_twice_while_workers_are_killed_and_the_store_is_locked() -> None:
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


def test_a_request_whose_client_was_gone_before_it_was_accepted_is_never_another_ones(
    mock_server: MockServer, mock: MockProvider, gateway_process: StartProcess
) -> None:
    # Of a connection that was reset nobody can say any more where it came from.
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
