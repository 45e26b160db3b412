from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from uvicorn.supervisors.multiprocess import SIGNALS, Process

from gateway import config
from gateway.app.worker import build_app
from gateway.server import serving
from gateway.server.protocol import GatewayProtocol, ServerConfig
from tests.support.gateways import write_config
from tests.support.muting import needs_linux


def config_of(file: Path, *, grace_s: float = 30) -> ServerConfig:
    app = build_app(lambda: config.load(file, environment={}))
    return serving.make_config(app, max_head_bytes=65536, max_body=2**24, head_timeout_s=20, grace_s=grace_s)


def test_uvicorn_uses_the_gateways_protocol_and_trusts_no_forwarded_header(tmp_path: Path) -> None:
    made = config_of(write_config(tmp_path, "http://127.0.0.1:1", {}))
    assert made.http is GatewayProtocol
    assert made.proxy_headers is False
    assert made.access_log is False
    assert made.server_header is False
    assert (made.max_head_bytes, made.head_timeout_s) == (65536, 20)


@pytest.mark.parametrize(("grace", "seconds"), [(0, 1), (0.4, 1), (30, 30)])
def test_grace_period_is_at_least_one_second(grace: float, seconds: int, tmp_path: Path) -> None:
    made = config_of(write_config(tmp_path, "http://127.0.0.1:1", {}), grace_s=grace)
    assert made.timeout_graceful_shutdown == seconds


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_port_in_use_is_an_oserror(host: str) -> None:
    try:
        first = serving.bind(host, 0)
    except OSError:
        pytest.skip("no such address on this machine")
    with first, pytest.raises(OSError):
        serving.bind(host, first.getsockname()[1]).close()


@needs_linux
@pytest.mark.parametrize(("write_timeout", "milliseconds"), [(60, 180_000), (240.5, 240_500)])
def test_listening_socket_detects_vanished_clients(write_timeout: float, milliseconds: int) -> None:
    with (
        serving.bind("127.0.0.1", 0, write_timeout_s=write_timeout) as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as accepted,
    ):
        assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == milliseconds


def test_a_server_that_cannot_start_says_so(tmp_path: Path) -> None:
    broken = config_of(write_config(tmp_path, "http://127.0.0.1:1", {"server.prt": 1}))
    with serving.bind("127.0.0.1", 0) as listener:
        assert serving.run(broken, listener, lambda: pytest.fail("it is not ready")) is False


@pytest.fixture
def signals() -> Iterator[None]:
    """A supervisor takes all signals of its process."""
    were = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, was in were.items():
        signal.signal(number, was)


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_signals_are_forwarded_although_a_worker_has_just_died(number: signal.Signals) -> None:
    made = serving.make_config("no:app", max_head_bytes=65536, max_body=2**24, head_timeout_s=20, grace_s=1)
    with serving.bind("127.0.0.1", 0) as listener:
        supervisor = serving.Supervisor(made, [listener], lambda: None)
        dead = Process(made, [listener])
        dead.start()
        dead.kill()
        dead.join()
        supervisor.processes.append(dead)
        for _ in range(2):
            signal.raise_signal(number)
        supervisor.handle_signals()


def test_server_thread_serves_until_its_context_ends(tmp_path: Path) -> None:
    with serving.ServerThread(config_of(write_config(tmp_path, "http://127.0.0.1:1", {}))) as server:
        port = int(server.url.rpartition(":")[2])
        socket.create_connection(("127.0.0.1", port)).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port)).close()


def test_server_thread_that_cannot_start_raises_and_frees_its_port(tmp_path: Path) -> None:
    server = serving.ServerThread(config_of(tmp_path / "no.yaml"))
    with pytest.raises(RuntimeError, match="cannot start"), server:
        pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))).close()
