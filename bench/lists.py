"""Measure the latency of the lists of sessions and calls on a store with a million calls.

    python bench/lists.py [--store memory,sqlite,redis] [--calls 1000000] [--sessions 50000] [--keep FOLDER] [--json]

Linux only. Redis is skipped without `redis-server`. README.md describes the measurements. The exit code is 1 if a p95
is above 100 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import multiprocessing
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import uvloop
from chaos import RedisNode, redis_cli
from ledger import RECORD, open_store
from overhead import cpu_seconds, environment, free_port

from gateway import config
from gateway.app.worker import Worker, collect_rarely, new_id
from gateway.core.ids import call_id
from gateway.core.ledger.arithmetic import AccountKey
from gateway.core.ledger.session_key import OPEN_NAMESPACE, SessionKey
from gateway.core.ports import Store
from gateway.core.record import CallRecord
from gateway.core.times import time_text
from gateway.core.usage import Charge, Usage
from gateway.server.app import GatewayApp
from gateway.server.serving import ServerThread, make_config
from gateway.stores.memory import MemoryStore

SPAWN = multiprocessing.get_context("spawn")
BAR_MS = 100.0
#: concurrent settlements while a store is filled
AT_ONCE = 256
#: requests per row, unless they take longer than this many seconds
REPEAT, MOST_S = 40, 4.0
#: runs per command
RUNS = 5
#: The calls are spread over this number of days; the last hundredth of them in one second, so that they overlap.
DAYS, BURST_S = 20.0, 1.0
#: share of the longest session in all calls; number of sessions of the client key that has been idle since the first
#: day
LONGEST, IDLE = 0.01, 20
#: models and tags of the calls, by which usage is added up
MODELS, TAGS = ("gpt-5-mini", "gpt-5", "claude-sonnet-4-5", "gemini-2.5-pro"), ("nightly", "research", "support")
ADMIN, KEYS = "bench-key-of-the-admin", {"alice": "bench-key-of-alice", "idle": "bench-key-of-idle"}


# --- filling ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """The size of a filled store."""

    calls: int
    sessions: int

    def session(self, number: int) -> SessionKey:
        """Return the key of a session. A tenth has one client key; a few have a key that was used only at the start."""
        namespace = "idle" if number < IDLE else "alice" if number % 10 == 0 else OPEN_NAMESPACE
        return SessionKey(namespace, f"agent-{number:06d}-{number * 2654435761 % 2**32:08x}")

    @property
    def longest(self) -> SessionKey:
        return self.session(self.sessions - 1)

    def records(self, ended_at: float) -> Iterator[CallRecord]:
        """Yield the records in the order of settlement; all sessions continue until the end."""
        dice, burst = random.Random(self.calls), self.calls // 100
        began, spread = ended_at - DAYS * 86_400, DAYS * 86_400 / self.calls
        for number in range(self.calls):
            if number < 2 * IDLE:
                key = self.session(number % IDLE)
            elif dice.random() < LONGEST:
                key = self.longest
            else:
                key = self.session(
                    IDLE + (number if number < self.sessions else dice.randrange(10**9)) % (self.sessions - IDLE)
                )
            left = self.calls - number
            at = ended_at - BURST_S * left / burst if left < burst else began + number * spread
            yield _record(key, at, number, dice)


def _record(key: SessionKey, at: float, number: int, dice: random.Random) -> CallRecord:
    name = call_id(int(at * 1000), number.to_bytes(4, "big") + dice.randbytes(6))
    usage = Usage(dice.randrange(500, 90_000), dice.randrange(20, 3_000), 0, 1_000, 0, 64, 0, 0)
    usage = replace(usage, total_tokens=usage.input_tokens + usage.output_tokens)
    cost = RECORD.charge.cost_usd * dice.randrange(1, 1_000) if RECORD.charge and RECORD.charge.cost_usd else None
    return replace(
        RECORD,
        call_id=name,
        request_id=name if number % 4 else f"request-{number}",
        session=key,
        started_at=at,
        charge=Charge(usage, "provider", cost),
        accounts=(AccountKey("key", key.namespace), key.account),
        tools=RECORD.tools if number % 2 else (),
        model=MODELS[dice.randrange(len(MODELS))],
        labels={"tag": TAGS[dice.randrange(len(TAGS))]} if number % 3 else {},
    )


async def fill(store: Store, size: Size, ended_at: float) -> None:
    """Settle all calls like a gateway, so that the stored data is the same."""
    some, collected = list[CallRecord](), size.calls // 10 or 1
    for number, record in enumerate(size.records(ended_at), 1):
        some.append(record)
        if len(some) == AT_ONCE or number == size.calls:
            await asyncio.gather(*map(store.settle, some))
            some.clear()
        if number % collected == 0:
            print(f"  {number:,} calls settled", file=sys.stderr, flush=True)


def fill_url(url: str, size: Size) -> None:
    """Fill the store at this address, in its own process."""

    async def filled() -> None:
        store = open_store(url)
        try:
            await fill(store, size, time.time())
        finally:
            await store.aclose()

    collect_rarely()
    uvloop.run(filled())


# --- the servers ------------------------------------------------------------------------------------------------------


def configuration(folder: Path, url: str) -> Path:
    value = {
        "auth": {"admin_key": ADMIN, "keys": [{"name": name, "key": key} for name, key in KEYS.items()]},
        "store": {"url": url, "timeout_ms": 5_000, "journal": str(folder / "journals")},
        "budget": {"tokens": 10**9},
        "telemetry": {"log": {"level": "error"}},
    }
    file = folder / "gateway.yaml"
    file.write_text(json.dumps(value))
    return file


@dataclass(frozen=True)
class Server:
    """The port of a gateway, and its process."""

    port: int
    pid: int


@contextlib.contextmanager
def served(file: Path) -> Iterator[Server]:
    """Run `gateway serve` with one worker."""
    port = free_port()
    command = [sys.executable, "-m", "gateway", "serve", "-c", str(file), "--port", str(port)]
    with (file.parent / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment(), cwd=file.parent)
    try:
        _wait_for(port, lambda: process.poll() is None)
        yield Server(port, process.pid)
    finally:
        process.terminate()
        process.wait(30)


@contextlib.contextmanager
def served_from_memory(file: Path, size: Size) -> Iterator[Server]:
    """Run the same server in a process that has filled its own store."""
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=serve_memory, args=(theirs, file, size))
    process.start()
    theirs.close()
    try:
        yield Server(ours.recv(), process.pid or 0)
    finally:
        with contextlib.suppress(OSError):
            ours.send(None)
        process.join(30)
        process.kill()


def serve_memory(parent: Connection, file: Path, size: Size) -> None:
    """Fill a store in memory and serve it until the parent process ends it."""

    def load() -> config.Loaded:
        return config.load(file, environment={})

    @asynccontextmanager
    async def resources() -> AsyncIterator[Worker]:
        store = MemoryStore()
        await fill(store, size, time.time())
        collect_rarely()
        worker = Worker(store, load().settings, load)
        try:
            await worker.lasting.keys.load()
            yield worker
        finally:
            await worker.aclose()

    app = GatewayApp(resources, new_id)
    options = make_config(app, max_head_bytes=65_536, max_body=2**24, head_timeout_s=20, grace_s=1)
    with ServerThread(options) as gateway:
        parent.send(int(gateway.url.rpartition(":")[2]))
        parent.recv()


def _wait_for(port: int, is_alive: Callable[[], bool]) -> None:
    # A store of an older format is migrated first.
    end = time.monotonic() + 600
    while True:
        with contextlib.suppress(OSError):
            status, _ = Client(Server(port, 0), ADMIN).get("/readyz")
            if status == 200:
                return
        if time.monotonic() > end or not is_alive():
            sys.exit("the gateway did not start")
        time.sleep(0.05)


class Client:
    """Send requests over one connection."""

    def __init__(self, server: Server, key: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
        self._pid = server.pid
        self._headers = {"authorization": f"Bearer {key}"}

    def get(self, path: str) -> tuple[int, bytes]:
        self._connection.request("GET", path, headers=self._headers)
        response = self._connection.getresponse()
        return response.status, response.read()

    def cpu(self) -> float:
        """Return the CPU seconds that the gateway has used."""
        return cpu_seconds(self._pid)

    def json(self, path: str) -> Any:
        status, body = self.get(path)
        if status != 200:
            sys.exit(f"{path} was answered with {status}: {body[:300]!r}")
        return json.loads(body)


# --- measuring --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """The latency of requests for one list, in ms.

    `cpu`: of the gateway's process, on average; `entries`: of the last response, or of all pages.
    """

    what: str
    store: str
    p50: float
    p95: float
    worst: float
    cpu: float
    entries: int = 0

    @property
    def is_met(self) -> bool:
        return self.p95 <= BAR_MS


def _row(what: str, store: str, seconds: Sequence[float], cpu: float, entries: int = 0) -> Row:
    ordered = sorted(seconds)
    p95 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.95))]
    p50, worst = ordered[len(ordered) // 2], ordered[-1]
    return Row(what, store, p50 * 1000, p95 * 1000, worst * 1000, cpu / len(ordered) * 1000, entries)


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    found = work()
    return time.perf_counter() - began, found


def _entries(answer: bytes) -> int:
    with contextlib.suppress(ValueError):
        value = json.loads(answer)
        return next(
            (len(value[name]) for name in ("sessions", "calls", "usage") if isinstance(value.get(name), list)), 1
        )
    return 1


def asked(store: str, client: Client, path: str, what: str, status: int = 200) -> Row:
    """Request one address repeatedly."""
    seconds, answer, end, cpu = list[float](), b"", time.monotonic() + MOST_S, client.cpu()
    while len(seconds) < REPEAT and (len(seconds) < 2 or time.monotonic() < end):
        took, (code, answer) = _timed(lambda: client.get(path))
        if code != status:
            sys.exit(f"{path} was answered with {code}: {answer[:300]!r}")
        seconds.append(took)
    return _row(what, store, seconds, client.cpu() - cpu, _entries(answer))


def walked(store: str, client: Client, path: str, what: str) -> Row:
    """Request all pages of a list once, from the first to the last."""
    seconds, total, cursor, end = list[float](), 0, "", time.monotonic() + 10 * MOST_S
    cpu = client.cpu()
    while time.monotonic() < end:
        took, page = _timed(lambda cursor=cursor: client.json(path + cursor))  # type: ignore[misc]
        seconds.append(took)
        total += len(page.get("sessions", page.get("calls")))
        if page["cursor"] is None:
            break
        cursor = f"&cursor={quote(page['cursor'])}"
    return _row(what, store, seconds, client.cpu() - cpu, total)


def lists(store: str, server: Server, size: Size) -> Iterator[Row]:
    """Request every list and page of the API."""
    admin, alice, idle = Client(server, ADMIN), Client(server, KEYS["alice"]), Client(server, KEYS["idle"])
    callers = (("", admin), (", a client key", alice), (", an idle client key", idle))
    yield asked(store, admin, "/api/health", "health (no list)")
    yield asked(store, admin, "/metrics", "metrics (no list)")
    for limit in (50, 100, 1000):
        for who, client in callers:
            yield asked(store, client, f"/api/calls?limit={limit}", f"{limit} newest calls{who}")
    for sort in ("recent", "tokens", "cost"):
        for limit in (50, 1000):
            for who, client in callers:
                path = f"/api/sessions?limit={limit}&sort={sort}"
                yield asked(store, client, path, f"{limit} sessions by {sort}{who}")
        yield walked(store, admin, f"/api/sessions?limit=1000&sort={sort}", f"all sessions by {sort}, page by page")
        yield walked(store, alice, f"/api/sessions?limit=100&sort={sort}", f"the same of a client key, by {sort}")
        for name, part in (("common", "agent-00"), ("rare", size.session(size.sessions // 2).id), ("no", "nowhere")):
            query = urlencode({"limit": 50, "sort": sort, "q": part})
            yield asked(store, admin, f"/api/sessions?{query}", f"sessions by {sort} with a {name} name")
    yield walked(store, admin, "/api/sessions?limit=50&q=nowhere", "all sessions searched, page by page")
    some = size.session(size.sessions // 2)
    for name, key in (("a", some), ("the longest", size.longest)):
        path = f"/api/sessions/{key.shown(None)}"
        yield asked(store, admin, path, f"{name} session")
        yield asked(store, admin, f"{path}/calls?limit=50", f"{name} session's 50 calls")
        yield asked(store, admin, f"{path}/calls?limit=1000", f"{name} session's 1,000 calls")
        yield walked(store, admin, f"{path}/calls?limit=100", f"{name} session's calls, page by page")
    newest = admin.json("/api/calls?limit=20")["calls"]
    yield asked(store, admin, f"/api/calls/{newest[0]['call_id']}", "a call by its id")
    named = next(one["request_id"] for one in newest if one["request_id"] != one["call_id"])
    yield asked(store, admin, f"/api/calls/{named}?explain=1", "a call by its request id")
    for query in ("group_by=key,model", "group_by=tag&bucket=total", "group_by=key,model&bucket=hour"):
        for who, client in callers[:2]:
            begin = time_text(time.time() - DAYS * 86_400)
            yield asked(store, client, f"/api/usage?{query}&from={begin}", f"usage {query[9:]}{who}")
    yield asked(store, alice, "/api/calls/nothing", "no call", 404)
    yield asked(store, admin, "/api/sessions/nothing", "no session", 404)
    yield asked(store, admin, "/api/results/tr_nothing", "no tool result", 404)


def commands(store: str, file: Path, empty: Path, size: Size) -> Iterator[Row]:
    """Measure the CPU time of commands that read a store, minus the time with an empty store (the start of Python).

    The least of several runs counts, because other work on the machine only adds to it.
    """
    some = size.session(size.sessions // 2).shown(None)
    for words in (
        ("sessions",),
        ("sessions", "--limit", "1000"),
        ("sessions", "--sort", "tokens"),
        ("sessions", "--sort", "cost"),
        ("sessions", "show", some),
        ("sessions", "show", size.longest.shown(None)),
        ("top", "--once"),
        ("top", "--once", "--sort", "cost"),
        ("keys", "list"),
    ):
        runs = [(_run(words, empty), _run(words, file)) for _ in range(RUNS)]
        start, took = map(min, zip(*runs, strict=True))
        found = [max(0.0, took - start)]
        yield _row(f"gateway {' '.join(words[:4])}"[:44], store, found, sum(found))


def _run(words: Sequence[str], file: Path) -> float:
    """Return the CPU seconds of a command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "gateway", *words, "-c", str(file)]
    subprocess.run(command, check=False, capture_output=True, env=environment(), cwd=file.parent)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


# --- the stores -------------------------------------------------------------------------------------------------------


def measured(kind: str, folder: Path, size: Size) -> Iterator[Row]:
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "memory":
        with served_from_memory(configuration(folder, "memory://"), size) as server:
            yield from lists(kind, server, size)
        return
    with _sqlite(folder, size) if kind == "sqlite" else _redis(folder, size) as (url, empty):
        other = folder / "empty"
        other.mkdir(exist_ok=True)
        file, without = configuration(folder, url), configuration(other, empty)
        with served(file) as server:
            yield from lists(kind, server, size)
        with served(without):
            pass  # this creates the empty store
        yield from commands(kind, file, without, size)


@contextlib.contextmanager
def _sqlite(folder: Path, size: Size) -> Iterator[tuple[str, str]]:
    """Yield the addresses of a filled store and of an empty one."""
    path = folder / f"{size.calls}-{size.sessions}.db"
    url = f"sqlite://{path}"
    if not path.exists():
        _in_process(fill_url, url, size)
        bytes_each = path.stat().st_size / size.calls
        print(f"sqlite: {bytes_each:,.0f} bytes of the file for each call", file=sys.stderr)
    yield url, f"sqlite://{folder / 'empty' / 'empty.db'}"


@contextlib.contextmanager
def _redis(folder: Path, size: Size) -> Iterator[tuple[str, str]]:
    """Yield the same for Redis. The server keeps its data in its folder and starts with what is stored there."""
    place = folder / f"{size.calls}-{size.sessions}"
    is_filled = (place / "dump.rdb").exists()
    if is_filled:
        place.rename(folder / "kept")
    node = RedisNode(place, "--appendonly", "no")
    try:
        if is_filled:
            node.kill()
            (folder / "kept" / "dump.rdb").rename(place / "dump.rdb")
            shutil.rmtree(folder / "kept")
            node.start()
        else:
            before = _used(node)
            _in_process(fill_url, node.url, size)
            bytes_each = (_used(node) - before) / size.calls
            print(f"redis: {bytes_each:,.0f} bytes of memory for each call", file=sys.stderr)
        yield node.url, f"{node.url}/1"
    finally:
        redis_cli("-p", str(node.port), "-n", "1", "flushdb")
        redis_cli("-p", str(node.port), "save")
        node.kill()


def _used(node: RedisNode) -> int:
    said = redis_cli("-p", str(node.port), "info", "memory")
    return next(int(line.split(":")[1]) for line in said.splitlines() if line.startswith("used_memory:"))


def _in_process(work: Callable[..., None], *arguments: Any) -> None:
    process = SPAWN.Process(target=work, args=arguments)
    process.start()
    process.join()
    if process.exitcode:
        sys.exit("the store was not filled")


# --- printing ---------------------------------------------------------------------------------------------------------


def line(row: Row) -> str:
    entries = f"{row.entries:>8,}" if row.entries else f"{'':>8}"
    verdict = "met" if row.is_met else "MISSED"
    figures = "".join(f"{figure:>9.1f}" for figure in (row.p50, row.p95, row.worst, row.cpu))
    return f"{row.store:<8}{row.what:<50}{entries}{figures}  {verdict}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", default="memory,sqlite,redis", help="those to measure")
    parser.add_argument("--calls", type=int, default=1_000_000)
    parser.add_argument("--sessions", type=int, default=50_000)
    parser.add_argument("--keep", type=Path, help="a folder for the filled stores, which the next run takes from there")
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    options = parser.parse_args()
    size, rows = Size(options.calls, options.sessions), list[Row]()
    if not options.json:
        print(f"{options.calls:,} calls in {options.sessions:,} sessions; ms; the bar is a p95 of {BAR_MS:g} ms")
        print(f"{'store':<8}{'':<50}{'entries':>8}{'p50':>9}{'p95':>9}{'worst':>9}{'CPU':>9}")
    with tempfile.TemporaryDirectory(prefix="lists-") as temporary:
        for kind in options.store.split(","):
            if kind == "redis" and shutil.which("redis-server") is None:
                print("redis-server is not on the PATH: it was not measured", file=sys.stderr)
                continue
            for row in measured(kind, (options.keep or Path(temporary)).absolute() / kind, size):
                rows.append(row)
                if not options.json:
                    print(line(row), flush=True)
    if options.json:
        print(json.dumps([{**asdict(row), "met": row.is_met} for row in rows], indent=2))
    return 0 if all(row.is_met for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
