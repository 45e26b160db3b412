"""Start the processes of `gateway bench`: the built-in provider and a gateway."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from gateway.mock.server import MockServer

_STARTS_WITHIN_S: Final = 60.0
_ENDS_WITHIN_S: Final = 10.0
_ADDRESS: Final = re.compile(r"OPENAI_BASE_URL=(http://\S+)/v1")
_PRICE: Final = {"input": 0.15, "output": 0.60, "cache_read": 0.075}


class NotStarted(Exception):
    """A process of the bench did not start. The message contains its output."""


@dataclass(frozen=True, slots=True)
class Started:
    """A running gateway. `after_s`: seconds that its start took. `store`: its SQLite file."""

    url: str
    after_s: float
    store: Path


@contextmanager
def provider() -> Iterator[str]:
    """Start the built-in provider in its own process, and yield its URL."""
    context = multiprocessing.get_context("spawn")
    own_end, child_end = context.Pipe()
    process = context.Process(target=_provide, args=(child_end,), name="provider", daemon=True)
    # Ctrl-C reaches all processes of a terminal. This one ignores it and ends when its pipe is closed.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process.start()
    finally:
        signal.signal(signal.SIGINT, before)
    child_end.close()
    try:
        try:
            url: str = own_end.recv() if own_end.poll(_STARTS_WITHIN_S) else ""
        except EOFError:
            url = ""
        if not url:
            raise NotStarted("The built-in provider did not start.")
        yield url
    finally:
        own_end.close()
        process.join(_ENDS_WITHIN_S)
        process.kill()
        process.join()


def _provide(pipe: Connection) -> None:
    """Serve until the other end of the pipe is closed, by the parent process or by its end."""
    with MockServer() as server, suppress(EOFError):
        pipe.send(server.url)
        pipe.recv()


@contextmanager
def gateway(folder: Path, upstream: str) -> Iterator[Started]:
    """Start a gateway that calls this provider, with its SQLite store and log in `folder`."""
    file, log, store = folder / "bench.yaml", folder / "gateway.log", folder / "gateway.db"
    file.write_text(json.dumps(_settings(upstream, store)))
    command = [sys.executable, "-m", "gateway", "serve", "-c", str(file), "--port", "0"]
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603  # this program
            command, env=_environment(), stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    try:
        url = _address(process, log, began)
        yield Started(url, time.monotonic() - began, store)
    finally:
        process.terminate()
        try:
            process.wait(_ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _settings(upstream: str, store: Path) -> dict[str, object]:
    return {
        "providers": {"bench": {"base_url": upstream, "auth": "none"}},
        "default_provider": "bench",
        "built_in_providers": False,
        "models": [{"match": "*", "provider": "bench", "price": _PRICE}],
        "store": {"url": f"sqlite://{store}"},
    }


def _environment() -> dict[str, str]:
    """Return the environment without gateway settings and proxies, so that nothing leaves this machine."""
    foreign = ("GATEWAY_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    return {name: value for name, value in os.environ.items() if not name.upper().startswith(foreign)}


def _address(process: subprocess.Popen[bytes], log: Path, began: float) -> str:
    """Wait for the URL of the gateway in its log, and return it.

    Raises:
        NotStarted: the process ended, or took too long.
    """
    while time.monotonic() - began < _STARTS_WITHIN_S:
        match = _ADDRESS.search(log.read_text("utf-8", "replace"))
        if match:
            return match[1]
        if process.poll() is not None:
            break
        time.sleep(0.005)
    raise NotStarted(f"The gateway did not start:\n{log.read_text('utf-8', 'replace')}")
