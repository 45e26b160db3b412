"""Fixtures of the tests that talk to a running gateway: the built-in provider behind it, and gateways of all kinds."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import itertools
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest
from hypothesis import HealthCheck, settings

from gateway.mock import Behaviour, MockProvider, MockServer
from tests.support import stopping
from tests.support.gateways import GatewayProcess, GatewayThread
from tests.support.scripted import ByteServer, Script, completion
from tests.support.web import Web


def pytest_xdist_auto_num_workers() -> int:
    """Return the number of processes for `-n auto`: two for each core, as many tests wait for servers and timers."""
    return 2 * (os.cpu_count() or 1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put long files first. Mix files that wait for servers with those that compute, so that no core is idle."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    long = [path for path, found in files.items() if found[0].get_closest_marker("long")]
    rest = [path for path in files if path not in long]
    waiting = [path for path in rest if path.parent.name in {"e2e", "cli"}]
    computing = [path for path in rest if path.parent.name not in {"e2e", "cli"}]
    mixed = itertools.chain.from_iterable(itertools.zip_longest(waiting, computing))
    items[:] = [item for path in [*long, *mixed] if path is not None for item in files[path]]


# How long an example takes is no property of what is tested.
settings.register_profile("unhurried", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

# A shell that runs the tests in the background has them ignore Ctrl-C, and what they start would ignore it, too.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Have garbage looked for only among what tests make: all tests together are 700,000 objects that stay."""
    gc.collect()
    gc.freeze()


_numbers = itertools.count(1)

StartGateway = Callable[..., GatewayThread]
StartProcess = Callable[..., GatewayProcess]
StartUpstream = Callable[[Script], ByteServer]


@pytest.fixture(scope="session", autouse=True)
def all_stopped() -> Iterator[None]:
    """No server of a test is still there at the end."""
    yield
    stopping.wait()


@pytest.fixture(scope="session")
def mock_server() -> Iterator[MockServer]:
    with MockServer() as server:
        yield server


@pytest.fixture
def mock(mock_server: MockServer) -> Iterator[MockProvider]:
    """The built-in provider, its records and ledger empty. It behaves for this test alone as it is told."""
    mock_server.provider.reset()
    yield mock_server.provider
    mock_server.provider.behaviour = Behaviour()


@pytest.fixture
def heard(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """All that is logged, also where a gateway or a command has set the log up for itself."""
    log = logging.getLogger("gateway")
    was, log.propagate = log.propagate, True
    caplog.set_level(logging.DEBUG, logger="gateway")
    yield caplog
    log.propagate = was


@pytest.fixture(scope="session")
def shared_gateway(mock_server: MockServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayThread]:
    models = [{"match": "priced", "provider": "upstream", "price": {"input": 1, "output": 10}, "window": 1000}]
    gateway = GatewayThread(tmp_path_factory.mktemp("gateway"), mock_server.url, {"models": models})
    yield gateway
    gateway.stop()


@pytest.fixture
def gateway(shared_gateway: GatewayThread, mock: MockProvider) -> GatewayThread:
    """A gateway with default settings in front of the built-in provider; tests share it, so they name sessions.

    The model "priced" costs 1 and 10 USD per million tokens, all others have no price.
    """
    return shared_gateway


@pytest.fixture
def web(gateway: GatewayThread) -> Web:
    """A plain client of the shared gateway."""
    return gateway.web


@pytest.fixture
def session() -> str:
    """A session id nobody used before."""
    return f"session-{next(_numbers)}"


@pytest.fixture
def gateway_server(tmp_path: Path) -> Iterator[StartGateway]:
    """`gateway_server(upstream_url, **flags)`: a gateway of its own; flags are dotted key paths of the configuration.

    Called again with `folder=` of an earlier one, it continues on that one's database.
    """
    running: list[GatewayThread] = []

    def start(upstream: str, *, folder: Path | None = None, **flags: object) -> GatewayThread:
        if folder is None:
            folder = tmp_path / f"gateway-{len(running)}"
            folder.mkdir()
        running.append(GatewayThread(folder, upstream, flags))
        return running[-1]

    yield start
    for gateway in reversed(running):  # each had the log from the one before it
        gateway.stop_soon()


@pytest.fixture
def gateway_process(tmp_path: Path) -> Iterator[StartProcess]:
    """As `gateway_server`, in a process of its own."""
    running: list[GatewayProcess] = []

    def start(upstream: str, *, folder: Path | None = None, **flags: object) -> GatewayProcess:
        if folder is None:
            folder = tmp_path / f"process-{len(running)}"
            folder.mkdir()
        running.append(GatewayProcess(folder, upstream, flags))
        return running[-1]

    yield start
    for gateway in running:
        gateway.stop()


@pytest.fixture
def byte_server() -> Iterator[StartUpstream]:
    """`byte_server(script)`: an upstream that does what the script does to the socket."""
    running: list[ByteServer] = []

    def start(script: Script) -> ByteServer:
        running.append(ByteServer(script).__enter__())
        return running[-1]

    yield start
    for server in running:
        server.__exit__()


@dataclass(frozen=True)
class Scripted:
    """A gateway in front of an upstream whose script each test writes.

    It bears 0.6 s of its silence, for "hasty/m" before the answer, for "halting/m" between its pieces.
    """

    gateway: GatewayThread
    upstream: ByteServer

    @property
    def web(self) -> Web:
        return self.gateway.web

    def play(self, script: Script) -> Web:
        """Answer every call from now on with `script`."""
        self.upstream.script = script
        return self.gateway.web


@functools.cache
def _kept_closed() -> socket.socket:
    """Bound, so that no other process is given its port, and never listening."""
    kept = socket.socket()
    kept.bind(("127.0.0.1", 0))
    atexit.register(kept.close)
    return kept


def closed_port() -> int:
    """A port on which nobody listens, and nobody will."""
    port: int = _kept_closed().getsockname()[1]
    return port


@contextmanager
def full_backlog() -> Iterator[str]:
    """The address of a server that accepts no connection, and whose queue of those that wait is full."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(8):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture(scope="session")
def scripted_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    with ByteServer(lambda connection: connection.reset()) as upstream:
        impatient = {"auth": "none", "retries": 0, "breaker": {"failures": 1000}}
        providers = {
            "upstream": {"base_url": upstream.url, **impatient},
            "hasty": {"base_url": upstream.url, **impatient, "timeout_s": {"first_byte": 0.6}},
            "halting": {"base_url": upstream.url, **impatient, "timeout_s": {"between_bytes": 0.6}},
            "nobody": {"base_url": f"http://127.0.0.1:{closed_port()}", **impatient},
        }
        gateway = GatewayThread(tmp_path_factory.mktemp("scripted"), upstream.url, {"providers": providers})
        yield Scripted(gateway, upstream)
        gateway.stop()


@pytest.fixture
def scripted(scripted_gateway: Scripted) -> Scripted:
    """The shared gateway in front of a scripted upstream; name sessions."""
    scripted_gateway.upstream.requests.clear()
    scripted_gateway.upstream.script = lambda connection: connection.whole(completion())
    return scripted_gateway


@pytest.fixture
def client(gateway: GatewayThread) -> Iterator[openai.OpenAI]:
    """The official SDK, pointed at the shared gateway."""
    with openai.OpenAI(base_url=gateway.base_url, api_key="any", max_retries=0) as made:
        yield made
