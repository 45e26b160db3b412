"""Test metric values in memory and in files that several workers share."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gateway.telemetry.metrics.slots import HIDDEN, MAX_SLOTS, MetricSlots, Series, series_text
from tests.support.gateways import ROOT, until

CALLS, NOW = "calls_total", "running"


@pytest.fixture(params=["memory", "files"])
def slots(request: pytest.FixtureRequest, tmp_path: Path) -> MetricSlots:
    return MetricSlots(tmp_path if request.param == "files" else None, {NOW})


def numbers(slots: MetricSlots) -> dict[str, float]:
    return {series.text: value for series, value in slots.read().items()}


def test_value_starts_at_zero_and_can_be_increased(slots: MetricSlots) -> None:
    slot = slots.slot(CALLS, "calls_total")
    assert slots.read() == {Series(CALLS, "calls_total"): 0.0}
    slots.values[slot] += 1.5
    slots.values[slots.slot(CALLS, "calls_total")] += 1
    assert numbers(slots) == {"calls_total": 2.5}


def test_series_beyond_the_last_slot_are_not_counted(slots: MetricSlots) -> None:
    for number in range(MAX_SLOTS + 10):
        slots.values[slots.slot(CALLS, f"n{number}")] += number
    found = numbers(slots)
    assert len(found) == MAX_SLOTS - 1
    assert all(value == int(name[1:]) for name, value in found.items())


def test_each_worker_reads_the_sums_of_all_workers(tmp_path: Path) -> None:
    workers = [MetricSlots(tmp_path, {NOW}) for _ in range(3)]
    for number, worker in enumerate(workers, 1):
        worker.values[worker.slot(CALLS, f"only{number}")] += 1
        worker.values[worker.slot(CALLS, "all")] += number
    assert [worker.worker for worker in workers] == [1, 2, 3]
    for worker in workers:
        assert numbers(worker) == {"only1": 1, "only2": 1, "only3": 1, "all": 6}


CHILD = """
import json, sys
from pathlib import Path
from gateway.telemetry.metrics.slots import MetricSlots
slots = MetricSlots(Path(sys.argv[1]), {"running"})
slots.values[slots.slot("calls_total", "calls_total")] += 1
slots.values[slots.slot("running", "running")] = 5
print(json.dumps(slots.worker), flush=True)
sys.stdin.read()
"""


def worker_process(folder: Path) -> tuple[subprocess.Popen[str], int]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", CHILD, str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())


def test_values_of_a_killed_worker_stay_and_the_next_worker_continues_them(tmp_path: Path) -> None:
    watching = MetricSlots(tmp_path, {NOW})
    killed, number = worker_process(tmp_path)
    assert number == 2
    assert numbers(watching) == {"calls_total": 1, "running": 5}
    killed.kill()
    killed.communicate()
    # The gauges of the killed worker disappear; its counters stay.
    until(lambda: numbers(watching) == {"calls_total": 1})
    with (tmp_path / "2.names").open("a") as names:
        names.write("calls_total cut off in the midd")
    follower, number = worker_process(tmp_path)
    try:
        assert number == 2
        assert numbers(watching) == {"calls_total": 2, "running": 5}
        assert len(list(tmp_path.glob("*.values"))) == 2
    finally:
        follower.kill()
        follower.communicate()


def test_gauges_of_a_killed_worker_are_not_shown(tmp_path: Path) -> None:
    killed, number = worker_process(tmp_path)
    killed.kill()
    killed.communicate()
    following, watching = MetricSlots(tmp_path, {NOW}), MetricSlots(tmp_path, {NOW})
    assert (number, following.worker, watching.worker) == (1, 1, 2)
    assert numbers(following) == numbers(watching) == {"calls_total": 1}
    following.values[following.slot(NOW, "running")] = 0
    assert numbers(following) == numbers(watching) == {"calls_total": 1, "running": 0}


def test_new_worker_knows_the_series_of_its_predecessor(tmp_path: Path) -> None:
    killed, _ = worker_process(tmp_path)
    killed.kill()
    killed.communicate()
    following = MetricSlots(tmp_path, {NOW})
    assert following.series(CALLS) == ["calls_total"]
    assert following.has(CALLS, "calls_total")
    assert not following.has(CALLS, "calls_total{}")
    assert not following.has(NOW, "calls_total")


def test_hidden_value_is_not_shown_until_it_is_set_again(slots: MetricSlots) -> None:
    slots.values[slots.slot(NOW, "a")] = 1
    slots.values[slots.slot(NOW, "b")] = 2
    slots.values[slots.slot(NOW, "a")] = HIDDEN
    assert numbers(slots) == {"b": 2}
    slots.values[slots.slot(NOW, "a")] = 3
    assert numbers(slots) == {"a": 3, "b": 2}


def test_files_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    slots = MetricSlots(tmp_path)
    slots.slot(CALLS, "calls_total")
    assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o600}


@pytest.mark.parametrize(
    ("labels", "shown"),
    [
        ({}, "m"),
        ({"a": "b", "c": ""}, 'm{a="b",c=""}'),
        ({"a": 'say "hi" \\ there\nagain'}, r'm{a="say \"hi\" \\ there\nagain"}'),
        ({"a": "ü \ud800"}, 'm{a="ü ?"}'),
    ],
)
def test_labels_are_escaped_for_prometheus(labels: dict[str, str], shown: str) -> None:
    assert series_text("m", labels) == shown


def test_series_with_spaces_is_read_by_other_workers(tmp_path: Path) -> None:
    one, other = MetricSlots(tmp_path), MetricSlots(tmp_path)
    series = series_text(CALLS, {"model": "my model\nü"})
    one.values[one.slot(CALLS, series)] += 1
    assert other.read() == {Series(CALLS, series): 1.0}


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Limit the size of files of this process, which has the same effect as a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_disk_space_is_reserved_at_the_start(tmp_path: Path) -> None:
    MetricSlots(tmp_path)
    # A write to a hole in the file would kill the worker if the disk is full by then.
    assert (tmp_path / "1.values").stat().st_blocks * 512 >= 8 * MAX_SLOTS


def test_worker_counts_in_memory_on_a_full_disk(tmp_path: Path) -> None:
    with files_of_at_most(4_096):
        slots = MetricSlots(tmp_path, {NOW})
        slots.values[slots.slot(CALLS, "calls_total")] += 2
        assert numbers(slots) == {"calls_total": 2}
    other = MetricSlots(tmp_path, {NOW})
    other.values[other.slot(CALLS, "calls_total")] += 1
    assert numbers(other) == {"calls_total": 1}
    assert numbers(slots) == {"calls_total": 3}


def no_locks(file: int, kind: int) -> None:
    """Fail like a network file system without locks."""
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def test_worker_counts_in_memory_without_locks_and_logs_it_once(
    tmp_path: Path, heard: pytest.LogCaptureFixture
) -> None:
    other = MetricSlots(tmp_path, {NOW})
    other.values[other.slot(CALLS, "calls_total")] += 1
    other.values[other.slot(NOW, "running")] = 5
    slots = MetricSlots(tmp_path, {NOW}, no_locks)
    slots.values[slots.slot(CALLS, "calls_total")] += 2
    for _ in range(2):
        # Counters never fall. Gauges of other workers are not shown, because running workers cannot be recognized.
        assert numbers(slots) == {"calls_total": 3}
    assert [one.getMessage() for one in heard.records] == [
        f"metrics of this worker are not shared with other workers: {os.strerror(errno.ENOLCK)}"
    ]
    assert numbers(other) == {"calls_total": 1, "running": 5}


def test_unwritten_series_does_not_shift_other_slots(tmp_path: Path) -> None:
    slots, other = MetricSlots(tmp_path), MetricSlots(tmp_path)
    slots.values[slots.slot(CALLS, "first")] += 1
    size = (tmp_path / "1.names").stat().st_size
    with files_of_at_most(size + 5):
        assert slots.slot(CALLS, "lost") == 0
    assert (tmp_path / "1.names").stat().st_size == size
    slots.values[slots.slot(CALLS, "second")] += 2
    assert numbers(other) == numbers(slots) == {"first": 1, "second": 2}


def test_incomplete_series_of_another_worker_is_ignored(tmp_path: Path) -> None:
    slots, other = MetricSlots(tmp_path), MetricSlots(tmp_path)
    slots.values[slots.slot(CALLS, "first")] += 1
    with (tmp_path / "1.names").open("ab") as names:
        names.write("calls_total half of an ü".encode()[:-1])
    assert numbers(other) == {"first": 1}
