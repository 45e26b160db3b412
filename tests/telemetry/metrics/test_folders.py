"""Test that folders of shared metrics are removed at the end, or at the next start if their process was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from gateway.telemetry.metrics.folders import remove_abandoned, shared_folder
from gateway.telemetry.metrics.slots import MetricSlots

LATER = 3_600.0

HOLDING = """
import sys, time
from pathlib import Path
from gateway.telemetry.metrics.folders import shared_folder
with shared_folder(Path(sys.argv[1])) as folder:
    print(folder, flush=True)
    time.sleep(600)
"""


def test_folder_is_removed_at_the_end(tmp_path: Path) -> None:
    with shared_folder(tmp_path) as folder:
        assert folder.is_dir()
        MetricSlots(folder)
    assert list(tmp_path.iterdir()) == []


def test_folder_of_a_killed_process_is_removed_at_the_next_start(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDING, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ}) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        remove_abandoned(tmp_path, time.time() + LATER)
        assert folder.is_dir(), "its process is there"
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert folder.is_dir()
    with shared_folder(tmp_path, lambda: time.time() + LATER) as own:
        assert list(tmp_path.iterdir()) == [own]


def test_folder_of_a_worker_that_outlives_its_parent_stays(tmp_path: Path) -> None:
    folder = tmp_path / "gateway-metrics-old"
    folder.mkdir()
    held = MetricSlots(folder)
    remove_abandoned(tmp_path, time.time() + LATER)
    assert folder.is_dir()
    del held


def test_new_folders_links_and_other_files_stay(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "gateway-metrics-link").symlink_to(tmp_path / "target")
    (tmp_path / "gateway-metrics-file").write_bytes(b"")
    (tmp_path / "gateway-metrics-other").mkdir()
    (tmp_path / "other").mkdir()
    before = sorted(tmp_path.iterdir())
    remove_abandoned(tmp_path, time.time())
    assert sorted(tmp_path.iterdir()) == before
    remove_abandoned(tmp_path, time.time() + LATER)
    assert sorted(tmp_path.iterdir()) == [one for one in before if one.name != "gateway-metrics-other"]
