"""Records as the pipeline would make them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from decimal import Decimal
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from gateway.core.ids import call_id
from gateway.core.ledger.session_key import SessionKey
from gateway.core.ports import Store
from gateway.core.record import CallRecord
from gateway.core.usage import Charge, Usage
from gateway.stores.memory import MemoryStore
from gateway.stores.redis import RedisStore
from gateway.stores.sqlite import SqliteStore
from tests.stores.files import PATIENT_S, Clock, Time
from tests.stores.redis_servers import RedisCluster, RedisServer

MakeRecord = Callable[..., CallRecord]
OpenStore = Callable[[Clock, Time], Awaitable[Store]]

_TEMPLATE = CallRecord(
    call_id="",
    request_id="",
    session=SessionKey("alice", "s"),
    derived_session=False,
    started_at=0.0,
    dialect="chat",
    operation="chat",
    provider="openai",
    model="gpt-5",
    response_model="gpt-5-2025-08-07",
    stream=True,
    status=200,
    outcome="ok",
    error_code=None,
    finish_reason="stop",
    tools=("search", "search"),
    charge=Charge(Usage(10, 5, 15, 4, 3, 2, 1, 1), "provider", Decimal("0.000123")),
    overhead_s=0.001,
    first_byte_s=0.25,
    duration_s=2.0,
    request_bytes=100,
    response_bytes=200,
    notes={"stream_usage": "refused"},
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a store in a file may be: the folder is not there yet."""
    return tmp_path / "data" / "gateway.db"


@pytest.fixture
def clock() -> Clock:
    """The time of day of `store`."""
    return Clock()


@pytest.fixture
def moments() -> Time:
    """The time for the holds of `store`."""
    return Time()


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """`folder()`: one that is empty, each time."""
    return lambda: tmp_path_factory.mktemp("store")


#: The stores that use the clocks of this machine. Each is opened empty: its folder is new.
EMBEDDED: Mapping[str, Callable[[Path, Clock, Time], Store]] = {
    "memory": lambda _folder, clock, moments: MemoryStore(clock, moments),
    "sqlite": lambda folder, clock, moments: SqliteStore(
        folder / "gateway.db", timeout_s=PATIENT_S, now=clock, moment=moments
    ),
}


def opener_of(kind: str, folder: Callable[[], Path]) -> OpenStore:
    """Return a function that opens this kind of embedded store in a new folder."""

    async def opened(clock: Clock, moments: Time) -> Store:
        return EMBEDDED[kind](folder(), clock, moments)

    return opened


@pytest.fixture(params=EMBEDDED)
def open_embedded(request: pytest.FixtureRequest, folder: Callable[[], Path]) -> OpenStore:
    """`await open_embedded(clock, moments)`: each store that goes by the clocks of this machine, empty."""
    return opener_of(request.param, folder)


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One server for all tests. A test that opens a store on it empties it first."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture(scope="session")
def redis_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    """One cluster for all tests."""
    cluster = RedisCluster(tmp_path_factory.mktemp("cluster"))
    yield cluster
    cluster.kill()


@pytest.fixture
def open_redis(redis_server: RedisServer) -> OpenStore:
    """`await open_redis(clock, moments)`: a store on one server, empty."""

    async def opened(clock: Clock, moments: Time) -> Store:
        redis_server.flush()
        return RedisStore(
            redis_server.url, timeout_s=PATIENT_S, now=clock, moment=moments.overhead, ahead_s=lambda: moments.passed
        )

    return opened


@pytest.fixture
def open_cluster(redis_cluster: RedisCluster) -> OpenStore:
    """`await open_cluster(clock, moments)`: a store on a cluster, empty."""

    async def opened(clock: Clock, moments: Time) -> Store:
        redis_cluster.flush()
        return RedisStore(
            redis_cluster.url, timeout_s=PATIENT_S, now=clock, moment=moments.overhead, ahead_s=lambda: moments.passed
        )

    return opened


@pytest.fixture(params=[*EMBEDDED, "redis", "cluster"])
def open_store(request: pytest.FixtureRequest, folder: Callable[[], Path]) -> OpenStore:
    """`await open_store(clock, moments)`: each kind of store, empty."""
    if request.param in EMBEDDED:
        return opener_of(request.param, folder)
    shared: OpenStore = request.getfixturevalue(f"open_{request.param}")
    return shared


@pytest.fixture
async def embedded(open_embedded: OpenStore, clock: Clock, moments: Time) -> AsyncIterator[Store]:
    """Each store that goes by the clocks of this machine."""
    made = await open_embedded(clock, moments)
    yield made
    await made.aclose()


@pytest.fixture
async def store(open_store: OpenStore, clock: Clock, moments: Time) -> AsyncIterator[Store]:
    """Each kind of store, empty."""
    made = await open_store(clock, moments)
    yield made
    await made.aclose()


@pytest.fixture
def record() -> MakeRecord:
    """Makes a record; `at`: when the call began, in seconds, also the time in its id."""
    numbers = count()

    def make(session: str | None = "s", *, namespace: str = "alice", at: float = 1_000.0, **fields: Any) -> CallRecord:
        fields.setdefault("call_id", call_id(int(at * 1000), next(numbers).to_bytes(10, "big")))
        fields.setdefault("request_id", fields["call_id"])
        key = SessionKey(namespace, session) if session is not None else None
        return replace(_TEMPLATE, session=key, started_at=at, **fields)

    return make
