"""Fixtures for tests that send requests to a running gateway: the built-in provider and several kinds of gateways."""

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
from tests.support.compiling import compile_tests
from tests.support.gateways import GatewayProcess, GatewayThread
from tests.support.scripted import ByteServer, Script, completion
from tests.support.web import Web


def pytest_xdist_auto_num_workers() -> int:
    """Return the number of processes for `-n auto`: two for each core, as many tests wait for servers and timers."""
    return 2 * (os.cpu_count() or 1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Compile the tests before the processes that run them start."""
    compile_tests(config.args, config.invocation_params.dir)


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


# The clients of the SDKs, of which the tests make thousands, would each load all authorities of the system: 17 ms of CPU.
# No test needs them, so a file that the environment names is not used either.
os.environ["SSL_CERT_FILE"] = str(Path(__file__).parent / "support" / "authority.pem")

# A slow example says nothing about the tested code, so examples have no deadline.
settings.register_profile("unhurried", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

# A shell that runs the tests in the background makes them, and the processes they start, ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Freeze all objects of the collected tests: garbage collection then skips 700,000 objects that stay."""
    gc.collect()
    gc.freeze()


_numbers = itertools.count(1)

StartGateway = Callable[..., GatewayThread]
StartProcess = Callable[..., GatewayProcess]
StartUpstream = Callable[[Script], ByteServer]


@pytest.fixture(scope="session", autouse=True)
def wait_for_stopped_servers() -> Iterator[None]:
    """Wait until all servers of the tests have stopped."""
    yield
    stopping.wait()


@pytest.fixture(scope="session")
def mock_server() -> Iterator[MockServer]:
    with MockServer() as server:
        yield server


@pytest.fixture
def mock(mock_server: MockServer) -> Iterator[MockProvider]:
    """Return the built-in provider with empty records and ledger; `behaviour` is reset after the test."""
    mock_server.provider.reset()
    yield mock_server.provider
    mock_server.provider.behaviour = Behaviour()


@pytest.fixture
def heard(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Capture everything that is logged, even if a gateway or command has configured the log itself."""
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
    """Return a shared gateway with default settings in front of the built-in provider.

    Tests share it, so each names its own session. The model "priced" costs 1 USD per million input tokens and 10 USD
    per million output tokens. No other model has a price.
    """
    return shared_gateway


@pytest.fixture
def web(gateway: GatewayThread) -> Web:
    """Return a plain HTTP client of the shared gateway."""
    return gateway.web


@pytest.fixture
def session() -> str:
    """Return an unused session id."""
    return f"session-{next(_numbers)}"


@pytest.fixture
def gateway_server(tmp_path: Path) -> Iterator[StartGateway]:
    """Return `start(upstream_url, **flags)`, which starts a gateway; flags are dotted key paths of the configuration.

    With `folder=` of an earlier gateway, the new one continues with its database.
    """
    running: list[GatewayThread] = []

    def start(upstream: str, *, folder: Path | None = None, **flags: object) -> GatewayThread:
        if folder is None:
            folder = tmp_path / f"gateway-{len(running)}"
            folder.mkdir()
        running.append(GatewayThread(folder, upstream, flags))
        return running[-1]

    yield start
    for gateway in reversed(running):  # each saved the log handlers of the one before it
        gateway.stop_soon()


@pytest.fixture
def gateway_process(tmp_path: Path) -> Iterator[StartProcess]:
    """Return a function like `gateway_server` that starts the gateway in its own process."""
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
    """Return `start(script)`, which starts an upstream whose script controls the socket."""
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

    The gateway times out after 0.6 s of silence: before the response for "hasty/m", between chunks for "halting/m".
    """

    gateway: GatewayThread
    upstream: ByteServer

    @property
    def web(self) -> Web:
        return self.gateway.web

    def play(self, script: Script) -> Web:
        """Respond to every call from now on with `script`."""
        self.upstream.script = script
        return self.gateway.web


@functools.cache
def _bound_socket() -> socket.socket:
    """Return a bound socket that never listens; no other process can get its port."""
    kept = socket.socket()
    kept.bind(("127.0.0.1", 0))
    atexit.register(kept.close)
    return kept


def closed_port() -> int:
    """Return a port on which no process listens."""
    port: int = _bound_socket().getsockname()[1]
    return port


@contextmanager
def full_backlog() -> Iterator[str]:
    """Yield the address of a server that accepts no connection and whose queue of waiting connections is full."""
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
            "closed": {"base_url": f"http://127.0.0.1:{closed_port()}", **impatient},
        }
        gateway = GatewayThread(tmp_path_factory.mktemp("scripted"), upstream.url, {"providers": providers})
        yield Scripted(gateway, upstream)
        gateway.stop()


@pytest.fixture
def scripted(scripted_gateway: Scripted) -> Scripted:
    """Return the shared gateway in front of a scripted upstream; tests name their own sessions."""
    scripted_gateway.upstream.requests.clear()
    scripted_gateway.upstream.script = lambda connection: connection.whole(completion())
    return scripted_gateway


@pytest.fixture
def client(gateway: GatewayThread) -> Iterator[openai.OpenAI]:
    """Yield the official SDK, connected to the shared gateway."""
    with openai.OpenAI(base_url=gateway.base_url, api_key="any", max_retries=0) as made:
        yield made
