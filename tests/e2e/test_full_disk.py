"""A full disk under the SQLite file: calls are refused, nothing is lost, and calls work again when there is space.

The test limits from outside how much a running process may write to a file. Writes beyond the limit fail as on a full
disk: Python ignores the signal that accompanies them.
"""

from __future__ import annotations

import resource
import signal
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest

from gateway.mock import MockProvider, MockServer
from tests.conftest import StartProcess
from tests.support.gateways import GatewayProcess, until
from tests.support.timing import in_time
from tests.support.web import CHAT, CLIENT_TIMEOUT_S, HI, Reply

pytestmark = pytest.mark.long

#: `store.timeout_ms`; a full disk is detected at once
TIMEOUT_S: Final = 60.0
STREAM: Final = "chunks=20;interval=0.08;tokens=30/20"


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


@pytest.fixture
def gateway(mock_server: MockServer, mock: MockProvider, gateway_process: StartProcess) -> GatewayProcess:
    """Return a gateway with a budget, which reserves the cost of a call in the store before it sends the call."""
    return gateway_process(
        mock_server.url,
        **{"budget.tokens": 1_000_000, "store.timeout_ms": TIMEOUT_S * 1000, "store.on_failure": "closed"},
    )


def fill(gateway: GatewayProcess, size: int | None = None) -> None:
    """Limit the size of files. None: to the length of the database log, so that shorter files can grow."""
    log = gateway.store.with_name("gateway.db-wal")
    set_limit(gateway, log.stat().st_size if size is None else size)


def make_room(gateway: GatewayProcess) -> None:
    set_limit(gateway, resource.RLIM_INFINITY)


def set_limit(gateway: GatewayProcess, size: int) -> None:
    _, hard = resource.prlimit(gateway.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(gateway.process.pid, resource.RLIMIT_FSIZE, (size, hard))


def journals(gateway: GatewayProcess) -> list[Path]:
    return sorted(gateway.folder.glob("gateway.db-journals/*"))


def is_ready(gateway: GatewayProcess) -> bool:
    return gateway.web.get("/readyz").status == 200


def kept(gateway: GatewayProcess) -> dict[str, tuple[int, int, int, int]]:
    """Return calls, input, output and estimated tokens of each session from the file."""
    with closing(sqlite3.connect(gateway.store)) as db:
        query = "SELECT id, calls, input_tokens, output_tokens, estimated_tokens FROM sessions"
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        return {name: (calls, original, went, guessed) for name, calls, original, went, guessed in db.execute(query)}


def open_holds(gateway: GatewayProcess) -> int:
    with closing(sqlite3.connect(gateway.store)) as db:
        (number,) = db.execute("SELECT count(*) FROM holds").fetchone()
        return int(number)


def in_all(gateway: GatewayProcess) -> tuple[int, ...]:
    """Return calls, input, output and estimated tokens of all sessions together from the file."""
    return tuple(map(sum, zip(*kept(gateway).values(), strict=True)))


def billed(mock: MockProvider) -> tuple[int, int, int, int]:
    """Return calls, input, output and estimated tokens as the provider billed them: none are estimated."""
    ledger = mock.billed()
    return ledger.calls, ledger.input_tokens, ledger.output_tokens, 0


def ask_anthropic(gateway: GatewayProcess) -> Reply:
    body = {"model": "mock-small", "messages": HI, "max_tokens": 10}
    return gateway.web.post("/v1/messages", body, {"x-session-id": "s", "anthropic-version": "2023-06-01"})


def running_stream(
    gateway: GatewayProcess, mock: MockProvider, pool: ThreadPoolExecutor, session: str
) -> Future[Reply]:
    """Start a stream and wait until the provider has received it."""
    before = len(mock.calls)
    running = pool.submit(gateway.web.stream, session, STREAM)
    until(lambda: len(mock.calls) > before)
    return running


@pytest.mark.parametrize("journal", ["has room", "is full too"])
def test_with_a_full_disk_new_calls_are_refused_and_running_calls_are_settled_later(
    gateway: GatewayProcess, mock: MockProvider, pool: ThreadPoolExecutor, journal: str
) -> None:
    for _ in range(3):
        assert gateway.web.chat("s").status == 200
    running = [running_stream(gateway, mock, pool, session) for session in ("s", "other")]
    sent = len(mock.calls)
    fill(gateway, None if journal == "has room" else 0)

    with in_time():
        refused = gateway.web.chat("s")
    assert (refused.status, refused.error["code"]) == (503, "store_unavailable")
    about_totals = ("x-session-cumulative", "x-session-usage")
    assert [name for name, _ in refused.headers if name.startswith(about_totals)] == [], "the totals are unknown"
    assert refused.header("retry-after")
    with in_time():
        refused = ask_anthropic(gateway)
    assert (refused.status, refused.json["type"]) == (503, "error"), "the error has the format of the caller's API"
    assert refused.error["type"] in ("api_error", "overloaded_error")
    assert gateway.web.stream("new").status == 503
    assert len(mock.calls) == sent, "refused calls cost nothing"
    assert not is_ready(gateway)
    assert gateway.web.get("/healthz").status == 200

    for answer in (one.result(CLIENT_TIMEOUT_S) for one in running):
        assert answer.clean
        assert answer.data_lines[-1] == "[DONE]"
    written = "".join(file.read_text() for file in journals(gateway))
    assert written.count('"outcome":"ok"') == (2 if journal == "has room" else 0)
    assert kept(gateway).keys() <= {"s"}

    make_room(gateway)
    until(lambda: is_ready(gateway), what="it recovers without help")
    until(lambda: in_all(gateway) == billed(mock), what="each call is in the totals, once")
    until(lambda: gateway.web.chat("s").status == 200)
    assert in_all(gateway) == billed(mock)
    assert (kept(gateway)["s"][0], kept(gateway)["other"]) == (5, (1, 30, 20, 0))
    until(lambda: open_holds(gateway) == 0, what="nothing stays held")
    until(lambda: journals(gateway) == [], what="the journal is removed")
    assert "Traceback" not in gateway.errors.read_text()


def test_a_call_without_a_reservation_is_charged_after_the_disk_was_full(
    mock_server: MockServer, mock: MockProvider, gateway_process: StartProcess
) -> None:
    gateway = gateway_process(mock_server.url)
    assert gateway.web.chat("s").status == 200
    fill(gateway)
    assert [gateway.web.chat("s").status for _ in range(3)] == [200, 503, 503]
    make_room(gateway)
    until(lambda: in_all(gateway) == billed(mock))
    assert kept(gateway)["s"][0] == 2


def test_journal_entries_from_a_full_disk_survive_a_kill(
    gateway: GatewayProcess,
    mock_server: MockServer,
    mock: MockProvider,
    pool: ThreadPoolExecutor,
    gateway_process: StartProcess,
) -> None:
    assert gateway.web.chat("s").status == 200
    running = running_stream(gateway, mock, pool, "s")
    fill(gateway)
    assert running.result(CLIENT_TIMEOUT_S).data_lines[-1] == "[DONE]"
    gateway.signal(signal.SIGKILL)
    gateway.wait()
    assert kept(gateway)["s"][0] == 1
    again = gateway_process(mock_server.url, folder=gateway.folder)
    until(lambda: in_all(again) == billed(mock), what="the journal is read at the next start")
    assert open_holds(again) == 0


def test_records_not_written_at_shutdown_are_written_at_the_next_start(
    gateway: GatewayProcess,
    mock_server: MockServer,
    mock: MockProvider,
    pool: ThreadPoolExecutor,
    gateway_process: StartProcess,
) -> None:
    assert gateway.web.chat("s").status == 200
    running = running_stream(gateway, mock, pool, "s")
    fill(gateway)
    gateway.signal(signal.SIGTERM)
    assert running.result(CLIENT_TIMEOUT_S).data_lines[-1] == "[DONE]"
    gateway.wait()
    again = gateway_process(mock_server.url, folder=gateway.folder)
    until(lambda: in_all(again) == billed(mock))


def test_concurrent_calls_are_charged_once_while_the_disk_fills_repeatedly(
    gateway: GatewayProcess, mock: MockProvider, pool: ThreadPoolExecutor
) -> None:
    statuses: list[int] = []
    is_over = threading.Event()

    def client(number: int) -> Counter[tuple[str, int, str]]:
        """Make calls and return how they ended. A call of the session s2 has 32 input and 5 output tokens."""
        session = f"s{number % 3}"
        body = {"model": "mock-small", "messages": HI, "max_tokens": 9, "stream": number % 2 == 0}
        headers = {"x-session-id": session, "x-mock": f"chunks=5;interval=0.01;tokens={30 + number % 3}/5"}
        seen: Counter[tuple[str, int, str]] = Counter()
        while not is_over.wait(0.01):
            reply = gateway.web.post(CHAT, body, headers)
            assert reply.clean
            statuses.append(reply.status)
            seen[session, reply.status, reply.error["code"] if reply.status != 200 else ""] += 1
        return seen

    def wait_for(status: int) -> None:
        before = len(statuses)
        until(lambda: statuses[before:].count(status) >= 20, what=f"calls end with {status}")

    clients = [pool.submit(client, number) for number in range(8)]
    try:
        for size in (None, 0, None):
            wait_for(200)
            fill(gateway, size)
            wait_for(503)
            make_room(gateway)
        wait_for(200)
    finally:
        is_over.set()
    seen = sum((one.result(CLIENT_TIMEOUT_S) for one in clients), Counter[tuple[str, int, str]]())
    sessions = ("s0", "s1", "s2")
    assert {(status, code) for _, status, code in seen} == {(200, ""), (503, "store_unavailable")}
    answered = [seen[session, 200, ""] for session in sessions]
    expected = {
        session: (calls, (30 + number) * calls, 5 * calls, 0)
        for number, (session, calls) in enumerate(zip(sessions, answered, strict=True))
    }
    until(lambda: kept(gateway) == expected, what="each call is in the totals of its session, once")
    assert in_all(gateway) == billed(mock)
    until(lambda: open_holds(gateway) == 0)
    until(lambda: journals(gateway) == [])
    view: Any = gateway.web.get("/api/sessions/s0").json
    assert view["budget"]["used"]["tokens"] == view["cumulative_token_usage"]["total_tokens"]
