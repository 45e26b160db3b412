"""`gateway bench`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from gateway.bench.measure import WORKLOADS, Counted, Report, ResultRow, Times
from gateway.cli.bench import print_report
from tests.support.commands import Commands, command, environment
from tests.support.gateways import STARTS_S, until

pytestmark = pytest.mark.long

FINE = Report(
    workloads=(ResultRow("small call, 32 clients", 32, 64, 500.0, None, Times(2.0, 3.0), Times(0.5, 0.9), 0),),
    counted=Counted(32, 64, 6_400, 6_400),
    hold_and_settle_us=110.0,
    start_s=0.7,
    memory_mb=70.0,
    memory_after_mb=150.0,
    problems=(),
)


def test_a_quick_run_measures_everything_and_finds_nothing_wrong(gateway_command: Commands) -> None:
    done = gateway_command.process("bench", "--quick", "--json")
    assert done.code == 0, done.all
    found = json.loads(done.out)
    assert found["problems"] == []
    assert found["quick"] is True
    assert [row["name"] for row in found["workloads"]] == [workload.name for workload in WORKLOADS]
    for row in found["workloads"]:
        assert row["cpu_us"] > 0
        assert row["wrong"] == 0
        assert 0 < row["direct"]["p50_ms"] <= row["direct"]["p99_ms"]
        assert 0 < row["through"]["p50_ms"] <= row["through"]["p99_ms"]
    assert found["counted"]["tokens"] == found["counted"]["billed_tokens"] > 100_000
    assert found["hold_and_settle_us"] > 0
    assert found["calls_per_second_and_core"] > 0


def test_table_shows_all_results(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(FINE, quick=False, as_json=False)
    out = capsys.readouterr().out
    assert out.splitlines()[1].split() == ["small", "call,", "32", "clients", "64", "500", "2.00", "0.50", "3.00", "0.90", "0"]  # fmt: skip
    assert "2,000 small calls per second" in out


@pytest.mark.parametrize("as_json", [True, False])
def test_failed_checks_are_printed_with_exit_code_1(capsys: pytest.CaptureFixture[str], as_json: bool) -> None:
    wrong = Report(
        FINE.workloads, FINE.counted, None, 0.7, None, None, tuple(f"problem {number}" for number in range(9))
    )
    with pytest.raises(typer.Exit) as ended:
        print_report(wrong, quick=False, as_json=as_json)
    assert ended.value.exit_code == 1
    told = capsys.readouterr()
    assert "9 checks failed" in told.err
    assert "problem 4" in told.err
    assert "problem 5" not in told.err
    assert not as_json or json.loads(told.out)["problems"][8] == "problem 8"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_it_with_all_its_processes(gateway_command: Commands, number: signal.Signals) -> None:
    folder = gateway_command.folder / "tmp"
    folder.mkdir()
    running = subprocess.Popen(
        command(("bench",)),
        cwd=gateway_command.folder,
        env=environment(gateway_command.folder, {"TMPDIR": str(folder)}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with running:
        until(lambda: any("OPENAI_BASE_URL=" in log.read_text() for log in folder.glob("*/gateway.log")), STARTS_S)
        children = list(descendants(running.pid))
        running.send_signal(number)
        out, err = running.communicate(timeout=STARTS_S)
    assert len(children) >= 2
    assert running.returncode == 1
    assert (out, err.strip()) == ("", "Interrupted before the benchmark was complete.")
    assert list(folder.iterdir()) == []
    until(lambda: not any(is_running(child) for child in children), what="its processes end")


def descendants(pid: int) -> Iterator[int]:
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, listed.read_text().split()):
            yield child
            yield from descendants(child)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
