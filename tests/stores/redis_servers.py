"""Real Redis servers for tests: one, or a cluster of three."""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

_STARTS_S = 60.0
#: a node of a cluster also listens on its port plus 10,000, and another port is not easily taken from this range
_PORTS = range(20_000, 30_000)


class RedisServer:
    """One `redis-server` on a port of this machine, which keeps nothing on disk; `config`: of a sentinel."""

    def __init__(self, folder: Path, *options: str, config: Path | None = None) -> None:
        if shutil.which("redis-server") is None:
            raise RuntimeError("redis-server is missing, and these tests need it: apt-get install redis-server")
        self.port = free_port()
        self._config = config
        self._folder = folder
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = ["redis-server", *([str(self._config)] if self._config else [])]
        command += ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._folder)]
        command += ["--sentinel"] if self._config else ["--save", "", "--appendonly", "no", *self._options]
        log = (self._folder / f"redis-{self.port}.log").open("ab")
        with log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + _STARTS_S
        while not _is_listening(self.port):
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise RuntimeError(f"redis-server does not start: see {log.name}")
            time.sleep(0.01)

    def send_signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def flush(self) -> None:
        """Empty it. It is done before most tests, and costs no process."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=_STARTS_S) as sock:
            sock.sendall(b"FLUSHALL\r\n")
            answer = sock.recv(1024)
        assert answer == b"+OK\r\n", answer

    def cli(self, *words: str) -> str:
        return cli("-p", str(self.port), *words)


class RedisCluster:
    """Three of them, each with a third of the keys."""

    def __init__(self, folder: Path) -> None:
        self.nodes: list[RedisServer] = []
        for number in range(3):
            options = ("--cluster-enabled", "yes", "--cluster-config-file", f"nodes-{number}.conf")
            self.nodes.append(RedisServer(folder, *options))
        addresses = [f"127.0.0.1:{node.port}" for node in self.nodes]
        cli("--cluster", "create", *addresses, "--cluster-yes")
        deadline = time.monotonic() + _STARTS_S
        while not all("cluster_state:ok" in node.cli("cluster", "info") for node in self.nodes):
            if time.monotonic() > deadline:
                raise RuntimeError("the nodes do not become a cluster")
            time.sleep(0.05)
        self.url = f"redis+cluster://{','.join(addresses)}"

    def flush(self) -> None:
        for node in self.nodes:
            node.flush()

    def kill(self) -> None:
        for node in self.nodes:
            node.kill()


def cli(*words: str) -> str:
    return subprocess.run(["redis-cli", *words], check=True, capture_output=True, text=True, timeout=120).stdout


def free_port() -> int:
    for port in random.sample(_PORTS, 200):
        with contextlib.suppress(OSError), _bound(port), _bound(port + 10_000):
            return port
    raise RuntimeError("no port is free")


@contextlib.contextmanager
def _bound(port: int) -> Iterator[socket.socket]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        yield taken


def _is_listening(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False
