"""Run the `gateway` command as a user does: quick commands in this process, `gateway serve` in its own process."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from gateway.cli import app
from tests.support.gateways import PYCACHE_VARIABLE, ROOT, STARTS_S, until
from tests.support.timing import LIMIT_S
from tests.support.web import Web


@dataclass(frozen=True)
class Done:
    """The result of a command. `out` is stdout, `err` stderr."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    @property
    def all(self) -> str:
        return self.out + self.err


def checked(code: int, out: str, err: str) -> Done:
    """Return the result of a command; fail if its output has a traceback."""
    assert "Traceback" not in out + err, out + err
    return Done(code, out, err)


@dataclass(frozen=True)
class Commands:
    """Run commands in `folder`, with their own environment."""

    folder: Path

    def __call__(self, *args: str | Path, env: Mapping[str, str] | None = None) -> Done:
        """Run a command in this process."""
        result = CliRunner().invoke(app, [str(arg) for arg in args], env=dict(env or {}), catch_exceptions=False)
        return checked(result.exit_code, result.stdout, result.stderr)

    def process(self, *args: str | Path, env: Mapping[str, str] | None = None, stdin: str | None = None) -> Done:
        """Run `python -m gateway …` in its own process."""
        ended = subprocess.run(
            command(args),
            check=False,
            cwd=self.folder,
            env=environment(self.folder, env),
            capture_output=True,
            text=True,
            timeout=STARTS_S,
            input=stdin,
        )
        return checked(ended.returncode, ended.stdout, ended.stderr)

    def file(self, text: str, name: str = "own.yaml") -> Path:
        """Write a configuration file and return its path."""
        path = self.folder / name
        path.write_text(text)
        return path


def _command_line(pid: str) -> str:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the process has ended since
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


class Serving:
    """`gateway serve …` in its own process, started as soon as its first lines are printed."""

    def __init__(self, folder: Path, args: tuple[str | Path, ...], env: Mapping[str, str] | None) -> None:
        self._errors = folder / f"stderr-{time.monotonic_ns()}.txt"
        self._out = folder / f"stdout-{time.monotonic_ns()}.txt"
        with self._errors.open("wb") as stderr, self._out.open("wb") as stdout:
            self.process = subprocess.Popen(
                command(("serve", *args)), cwd=folder, env=environment(folder, env), stdout=stdout, stderr=stderr
            )
        until(
            lambda: "ANTHROPIC_BASE_URL=" in self.log or self.process.poll() is not None,
            STARTS_S,
            "the start-up lines",
        )
        found = re.search(r"OPENAI_BASE_URL=(http://\S+)/v1", self.log)
        assert found, self.log
        self.url = found[1]
        self.web = Web(self.url)

    @property
    def log(self) -> str:
        """Return everything that was written to stderr so far."""
        return self._errors.read_text()

    @property
    def said(self) -> str:
        """Return everything that was written to stdout so far."""
        return self._out.read_text()

    @property
    def children(self) -> list[int]:
        """Return the process ids of its workers."""
        pids = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(pid) for pid in pids if "spawn_main" in _command_line(pid)]

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, seconds: float = LIMIT_S) -> int:
        """Wait for the process and return its exit code."""
        return self.process.wait(seconds)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        checked(0, self.said, self.log)


def run_with_closed_streams(
    closed: str, commands: Commands, args: list[str], env: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run `gateway …` from a shell that closes some of its streams, as in `>&-`."""
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", *command(tuple(args))], check=False, timeout=STARTS_S,
        capture_output=True, text=True, cwd=commands.folder, env=environment(commands.folder, env),
    )  # fmt: skip


def run_with_output(
    stdout: int, commands: Commands, args: list[str], env: dict[str, str], stderr: int = subprocess.PIPE
) -> subprocess.CompletedProcess[str]:
    """Run `gateway …` with these file descriptors as its output."""
    return subprocess.run(
        command(tuple(args)), check=False, stdout=stdout, stderr=stderr, text=True, timeout=STARTS_S,
        cwd=commands.folder, env=environment(commands.folder, env),
    )  # fmt: skip


def command(args: tuple[Any, ...]) -> list[str]:
    return [sys.executable, "-m", "gateway", *map(str, args)]


def environment(folder: Path, more: Mapping[str, str] | None) -> dict[str, str]:
    """Return an environment without the settings, keys and home folder of the person who runs the tests."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL", PYCACHE_VARIABLE) if name in os.environ}
    return {**kept, "HOME": str(folder), "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **(more or {})}
