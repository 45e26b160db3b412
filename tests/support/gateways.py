"""The gateway as production starts it, in a thread or as a process of its own."""

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
#: a process of its own has all modules to load
STARTS_S = 60.0
#: the variable that says where compiled modules are; a process that did not know would compile all of them again
COMPILED = "PYTHONPYCACHEPREFIX"
_BANNER = re.compile(r"^gateway \S+ · (http://\S+)$", re.MULTILINE)


def write_config(folder: Path, upstream: str, flags: Mapping[str, object]) -> Path:
    """A configuration file (JSON is YAML) for one provider, "upstream". `flags`: dotted key path -> value."""
    settings: dict[str, Any] = {
        # What a provider says is seen as it is; tests/e2e/test_retries.py is about the patience with it.
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
    """Poll until the condition holds; its value."""
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
        """As SIGTERM: answers under way end within the grace, everything is settled."""
        if self._running:
            self._running = False
            self._thread.__exit__()
            self._give_log_back()

    def stop_soon(self) -> None:
        """As `stop`, for a test that has ended: nobody waits for it, unless a call is left that others might notice."""
        if self._app.running:
            self.stop()
        elif self._running:
            self._running = False
            self._give_log_back()
            stopping.soon(self._thread.__exit__)

    def _give_log_back(self) -> None:
        log = logging.getLogger("gateway")
        log.handlers[:], log.propagate, level = self._log
        log.setLevel(level)


class GatewayProcess:
    """`gateway serve` in a process of its own, for signals."""

    def __init__(self, folder: Path, upstream: str, flags: Mapping[str, object]) -> None:
        self.folder = folder
        self.store = folder / "gateway.db"
        self.file = write_config(folder, upstream, flags)
        self.errors = folder / "stderr.txt"
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HOME": str(folder)}
        if COMPILED in os.environ:
            environment[COMPILED] = os.environ[COMPILED]
        command = [sys.executable, "-m", "gateway", "serve", "-c", str(self.file), "--port", "0"]
        with self.errors.open("wb") as stderr:
            self.process = subprocess.Popen(command, cwd=folder, env=environment, stderr=stderr)
        self.url = until(self._announced, STARTS_S, "the gateway says where it is")
        self.base_url = f"{self.url}/v1"
        self.web = Web(self.url)

    def _announced(self) -> str | None:
        text = self.errors.read_text()
        assert self.process.poll() is None, text
        found = _BANNER.search(text)
        return found[1] if found else None

    @property
    def rss(self) -> int:
        """Resident bytes."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGESIZE")

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, seconds: float = LIMIT_S) -> int:
        """Its exit code."""
        return self.process.wait(seconds)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
