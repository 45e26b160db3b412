"""Start the gateway as in production, in a thread or in its own process."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gateway import config
from gateway.app import worker
from gateway.server import serving
from tests.support import stopping
from tests.support.timing import LIMIT_S
from tests.support.web import Web

ROOT = Path(__file__).parent.parent.parent
#: longer than the usual limit, since a new process loads all modules
STARTS_S = 60.0
#: This variable names the folder of compiled modules. A process without it would compile all of them again.
PYCACHE_VARIABLE = "PYTHONPYCACHEPREFIX"
_BANNER = re.compile(r"^gateway \S+ · (http://\S+)$", re.MULTILINE)


def write_config(folder: Path, upstream: str, flags: Mapping[str, object]) -> Path:
    """Write a configuration file (JSON is YAML) for one provider, "upstream". `flags`: dotted key path -> value."""
    settings: dict[str, Any] = {
        # Without retries and circuit breaker, tests see each error of a provider. tests/e2e/test_retries.py tests both.
        "providers": {
            "upstream": {"base_url": upstream, "auth": "none", "retries": 0, "breaker": {"failures": 1000}},
        },
        "default_provider": "upstream",
        "built_in_providers": False,
        "store": {"url": f"sqlite://{folder / 'gateway.db'}", "timeout_ms": 5000},
        "telemetry": {"log": {"level": "error"}},
        "context": {"deadline_ms": 60_000},
    }
    for dotted, value in flags.items():
        *parents, name = dotted.split(".")
        section = settings
        for parent in parents:
            section = section.setdefault(parent, {})
        section[name] = value
    file = folder / "gateway.yaml"
    file.write_text(json.dumps(settings))
    return file


def until(condition: Callable[[], Any], seconds: float = LIMIT_S, what: str = "") -> Any:
    """Poll until the condition holds; return its value."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"did not happen within {seconds:g} s: {what or condition}")
        time.sleep(0.01)


class GatewayThread:
    """A running gateway. `store` is its database, `file` its configuration."""

    def __init__(self, folder: Path, upstream: str, flags: Mapping[str, object]) -> None:
        self.folder = folder
        self.store = folder / "gateway.db"
        self.file = write_config(folder, upstream, flags)

        def load() -> config.Loaded:
            return config.load(self.file, environment={})

        server = load().settings.server
        log = logging.getLogger("gateway")
        self._log = log.handlers[:], log.propagate, log.level
        self._app = worker.build_app(load)
        options = serving.make_config(
            self._app,
            max_head_bytes=int(server.max_header_kb * 1024),
            max_body=int(server.max_body_mb * 2**20),
            head_timeout_s=server.header_timeout_s,
            grace_s=server.shutdown_grace_s,
        )
        self._thread = serving.ServerThread(options)
        self._thread.__enter__()
        self._running = True
        self.url = self._thread.url
        self.base_url = f"{self.url}/v1"
        self.web = Web(self.url)

    def stop(self) -> None:
        """Stop as after SIGTERM: running calls end within the grace period, and everything is settled."""
        if self._running:
            self._running = False
            self._thread.__exit__()
            self._restore_log()

    def stop_soon(self) -> None:
        """Stop in the background after a test. Wait only for running calls, which might affect the next test."""
        if self._app.running:
            self.stop()
        elif self._running:
            self._running = False
            self._restore_log()
            stopping.soon(self._thread.__exit__)

    def _restore_log(self) -> None:
        log = logging.getLogger("gateway")
        log.handlers[:], log.propagate, level = self._log
        log.setLevel(level)


class GatewayProcess:
    """`gateway serve` in its own process, for signals."""

    def __init__(self, folder: Path, upstream: str, flags: Mapping[str, object]) -> None:
        self.folder = folder
        self.store = folder / "gateway.db"
        self.file = write_config(folder, upstream, flags)
        self.errors = folder / "stderr.txt"
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HOME": str(folder)}
        if PYCACHE_VARIABLE in os.environ:
            environment[PYCACHE_VARIABLE] = os.environ[PYCACHE_VARIABLE]
        command = [sys.executable, "-m", "gateway", "serve", "-c", str(self.file), "--port", "0"]
        with self.errors.open("wb") as stderr:
            self.process = subprocess.Popen(command, cwd=folder, env=environment, stderr=stderr)
        self.url = until(self._printed_url, STARTS_S, "the gateway says where it is")
        self.base_url = f"{self.url}/v1"
        self.web = Web(self.url)

    def _printed_url(self) -> str | None:
        text = self.errors.read_text()
        assert self.process.poll() is None, text
        found = _BANNER.search(text)
        return found[1] if found else None

    @property
    def rss(self) -> int:
        """Return the resident memory in bytes."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGESIZE")

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
