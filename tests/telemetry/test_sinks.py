"""Files of call records: each record is written at least once, after crashes, full disks and long pauses too."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.core.ids import call_id
from gateway.core.ledger.session_key import SessionKey
from gateway.core.record import ORPHANED, CallRecord
from gateway.core.stored import MOST_LATEST
from gateway.mock import MockProvider, MockServer
from gateway.stores.memory import MemoryStore
from gateway.telemetry.sinks import CallSink
from tests.conftest import StartGateway
from tests.support import records
from tests.support.gateways import until

AT = 1_764_331_200.0  # 2025-11-28T12:00:00Z
DAY = 86_400.0


def shape(record: CallRecord) -> Mapping[str, Any]:
    return {"call_id": record.call_id, "outcome": record.outcome}


def made(number: int, at: float = AT, **fields: Any) -> CallRecord:
    name = call_id(int(at * 1000), number.to_bytes(10, "big"))
    return replace(records.record("s", at), call_id=name, request_id=name, started_at=at, **fields)


@contextlib.asynccontextmanager
async def running(store: MemoryStore, folder: Path, keep_s: float | None = None) -> AsyncIterator[None]:
    task = asyncio.create_task(CallSink(store, folder, shape, keep_s, lambda: AT, every_s=0.01).run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def lines(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.glob("calls-*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_bytes().splitlines()]


async def eventually(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not is_so():
            await asyncio.sleep(0.005)


@pytest.fixture
async def started(tmp_path: Path) -> MemoryStore:
    """A store whose sink in `tmp_path` has begun, and was stopped."""
    store = MemoryStore()
    async with running(store, tmp_path):
        await eventually((tmp_path / "position.json").exists)
    return store


async def test_each_call_is_a_line_in_the_file_of_its_day(started: MemoryStore, tmp_path: Path) -> None:
    async with running(started, tmp_path):
        for number in range(3):
            await started.settle(made(number, AT + number * DAY))
        await eventually(lambda: len(lines(tmp_path)) == 3)
    names = [file.name for file in sorted(tmp_path.glob("calls-*"))]
    assert names == ["calls-2025-11-28.jsonl", "calls-2025-11-29.jsonl", "calls-2025-11-30.jsonl"]


async def test_calls_while_no_worker_runs_are_written_later_and_none_twice(
    started: MemoryStore, tmp_path: Path
) -> None:
    calls = [made(number) for number in range(1_200)]
    for call in calls[:700]:
        await started.settle(call)
    for expected in (700, 1_200):
        async with running(started, tmp_path):
            await eventually(lambda expected=expected: len(lines(tmp_path)) == expected)  # type: ignore[misc]
        for call in calls[700:]:
            await started.settle(call)
    assert [line["call_id"] for line in lines(tmp_path)] == [call.call_id for call in calls]


async def test_a_corrected_call_has_a_later_line(started: MemoryStore, tmp_path: Path) -> None:
    call = made(1)
    async with running(started, tmp_path):
        await started.settle(replace(call, outcome=ORPHANED))
        await eventually(lambda: len(lines(tmp_path)) == 1)
        await started.settle(call)
        await eventually(lambda: len(lines(tmp_path)) == 2)
    assert [line["outcome"] for line in lines(tmp_path)] == [ORPHANED, "ok"]


async def test_after_a_long_pause_no_call_is_missing(started: MemoryStore, tmp_path: Path) -> None:
    keys = [SessionKey("alice", f"s{number}") for number in range(50)]
    calls = [made(number, session=keys[number % 50]) for number in range(MOST_LATEST + 900)]
    for call in calls:
        await started.settle(call)
    async with running(started, tmp_path):
        await eventually(lambda: {line["call_id"] for line in lines(tmp_path)} == {call.call_id for call in calls})


async def test_a_cut_line_is_replaced(started: MemoryStore, tmp_path: Path) -> None:
    (tmp_path / "calls-2025-11-28.jsonl").write_bytes(b'{"call_id":"whole"}\n{"call_id":"cu')
    await started.settle(made(1))
    async with running(started, tmp_path):
        await eventually(lambda: b"cu" not in (tmp_path / "calls-2025-11-28.jsonl").read_bytes())
    assert [line["call_id"] for line in lines(tmp_path)] == ["whole", made(1).call_id]


async def test_a_folder_that_cannot_be_written_is_tried_again(
    started: MemoryStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", logger="gateway")
    obstacle = tmp_path / "calls-2025-11-28.jsonl"
    obstacle.mkdir()
    await started.settle(made(1))
    async with running(started, tmp_path):
        await eventually(lambda: "cannot be written" in caplog.text)
        obstacle.rmdir()
        await eventually(lambda: obstacle.is_file() and len(lines(tmp_path)) == 1)
        await eventually(lambda: "is written again" in caplog.text)


async def test_one_worker_writes_at_a_time(started: MemoryStore, tmp_path: Path) -> None:
    async with running(started, tmp_path):
        async with running(started, tmp_path):
            for number in range(20):
                await started.settle(made(number))
            await eventually(lambda: len(lines(tmp_path)) >= 20)
    assert len(lines(tmp_path)) == 20


async def test_old_files_are_deleted(started: MemoryStore, tmp_path: Path) -> None:
    for name in ("calls-2025-11-20.jsonl", "calls-2025-11-27.jsonl", "notes-2025-01-01.jsonl"):
        (tmp_path / name).write_bytes(b"{}\n")
    await started.settle(made(1))
    async with running(started, tmp_path, keep_s=3 * DAY):
        await eventually(lambda: not (tmp_path / "calls-2025-11-20.jsonl").exists())
    assert (tmp_path / "calls-2025-11-27.jsonl").exists()
    assert (tmp_path / "notes-2025-01-01.jsonl").exists()


def test_a_gateway_writes_its_calls(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway, tmp_path: Path
) -> None:
    folder = tmp_path / "sink"
    gateway = gateway_server(mock_server.url, sinks=[{"kind": "jsonl", "path": str(folder)}])
    until((folder / "position.json").exists)
    for number in range(3):
        assert gateway.web.chat(f"s{number}").status == 200
    until(lambda: len(lines(folder)) == 3)
    assert {line["session"] for line in lines(folder)} == {"s0", "s1", "s2"}
