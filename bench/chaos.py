"""Run calls and faults at random with a seed, and audit every call: does the ledger stay correct?

    python bench/chaos.py [--calls 10000] [--workers 4] [--clients 24] [--sessions 40] [--seed N]
                          [--store sqlite|redis|cluster] [--on-failure closed|open] [--kill-every 3] [--json]

Linux. Redis needs `redis-server` on the PATH. README.md describes the faults and the checks. The seed decides the
calls, their faults and when clients leave. When exactly a worker is hit also depends on the machine. The exit code is 1
if the audit finds a violation.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import re
import secrets
import shutil
import signal
import socket
import sqlite3
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import msgspec
from overhead import environment, free_port, tree

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from gateway import config  # noqa: E402
from gateway.app import resources  # noqa: E402
from gateway.core.counting.heuristic import estimate_tokens  # noqa: E402
from gateway.core.ledger.arithmetic import Amount, Claim  # noqa: E402
from gateway.core.ledger.session_key import OPEN_NAMESPACE, SessionKey  # noqa: E402
from gateway.core.ports import Store  # noqa: E402
from gateway.core.record import ORPHANED, CallRecord  # noqa: E402
from gateway.core.rollup import COUNTS, PERIOD_S, UsageQuery  # noqa: E402
from gateway.core.usage import Totals  # noqa: E402
from gateway.mock import MockProvider, MockServer  # noqa: E402
from gateway.mock.wire import MockUsage, ReceivedCall, Share  # noqa: E402

PATH = "/v1/chat/completions"
SPAWN = multiprocessing.get_context("spawn")
#: the shortest allowed lease, so that the end of the run takes less time
LEASE_S = 5
#: time after which a gateway gives up on a silent provider
FIRST_BYTE_S = 1.5
#: no call takes longer, with any fault
ANSWER_WITHIN_S = 40.0
#: at the end: time for leases, and for two checks of the journals of other workers
SETTLED_WITHIN_S = 40.0
CALLS_KEPT, SESSIONS_SHOWN = 1000, 1000
#: texts that a gateway logs only for bugs
COMPLAINTS = ("Traceback", " bug", "is lost")
#: time after which a client retries that was report_lines to retry later
AFTER_503_S = 0.3
#: a call without a budget, or made while the store is unavailable, is unknown until it has lasted two ticks
HELD_AFTER_S = 2.5
#: Output of a stream that a client may have without the store or the journal knowing it: this number of tokens, or what
#: arrived in this time. The time is a tick, and one wait for the store.
UNKNOWN_TOKENS, UNKNOWN_S = 256, 2.5
#: time of the kill after the start of an outage of the store
KILL_WITHIN_S = 0.9
#: One of several gateways is frozen for this time, which ends all its leases, after each pause like this. Then some of
#: its workers are killed, after they have continued for a while.
FROZEN_S, THAWED_S, KILL_AFTER_S = LEASE_S + 6.0, 20.0, 2.0
#: an input estimate that is further off is an error
MOST_OFF, OFF_BY = 2, 64


# --- the plan ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Session:
    """A session. `limit`: tokens, by the operator; `declared`: by its calls; `is_calm`: usage is always reported."""

    id: str
    parent: str | None = None
    limit: int | None = None
    declared: int | None = None
    is_calm: bool = False

    @property
    def is_limited(self) -> bool:
        """Return True if a parent has a budget."""
        return self.parent is not None or self.limit is not None or self.declared is not None

    @property
    def key(self) -> SessionKey:
        return SessionKey(OPEN_NAMESPACE, self.id)


@dataclass(frozen=True)
class Call:
    """A call. `mock`: the provider's behaviour. `tools`: whether tools are offered, so that one is called.

    `leave`: when the client leaves, "" for never; `rudely`: with a reset.
    """

    id: str
    session: Session
    model: str
    words: int
    stream: bool
    ask_usage: bool
    max_tokens: int | None
    answers: int
    mock: str
    tools: bool = False
    leave: str = ""
    leave_after_s: float = 0.0
    rudely: bool = False

    def body(self) -> bytes:
        words = random.Random(self.id).choices(WORDS, k=self.words)
        value: dict[str, Any] = {"model": self.model, "messages": [{"role": "user", "content": " ".join(words)}]}
        if self.stream:
            value["stream"] = True
        if self.ask_usage:
            value["stream_options"] = {"include_usage": True}
        if self.max_tokens is not None:
            value["max_tokens"] = self.max_tokens
        if self.answers > 1:
            value["n"] = self.answers
        if self.tools:
            value["tools"] = TOOLS
        return json.dumps(value).encode()

    def request(self) -> bytes:
        body = self.body()
        lines = [
            f"POST {PATH} HTTP/1.1", "host: chaos", "connection: close", "content-type: application/json",
            f"content-length: {len(body)}", f"x-session-id: {self.session.id}", f"x-request-id: {self.id}",
            f"x-call: {self.id}",
        ]  # fmt: skip
        if self.mock:
            lines.append(f"x-mock: {self.mock}")
        if self.session.parent is not None:
            lines.append(f"x-parent-session-id: {self.session.parent}")
        if self.session.declared is not None:
            lines.append(f"x-session-budget-tokens: {self.session.declared}")
        return "\r\n".join([*lines, "", ""]).encode() + body


WORDS = ("token", "session", "budget", "window", "answer", "tool", "of", "the", "ledger", "hold", "a", "lease")

#: tools that the steps of the configuration allow one after the other, repeatedly
SEQUENCE = ("search", "read", "write")
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in SEQUENCE]

#: (share, stream or either, behaviour of the provider)
BEHAVIOURS = (
    (30, "", ""),
    (12, "", "delay=0.1"),
    (6, "", "delay=0.5"),
    (14, "stream", "chunks=30;interval=0.005"),
    (8, "stream", "chunks=60;interval=0.02"),
    (3, "stream", "chunks=150;interval=0.03"),
    (1, "stream", "chunks=3000"),
    (4, "", "status=500"),
    (2, "", "status=429;retry_after=1"),
    (3, "", "html=1"),
    (3, "", "die=0"),
    (4, "", "die=5;chunks=20;interval=0.01"),
    (1, "", "hang=1"),
    (3, "", "usage=none"),
    (3, "", "usage=twice"),
    (3, "stream", "usage=running;chunks=20;interval=0.01"),
    (2, "", "usage=finish"),
    (2, "", "gzip=1"),
    (1, "stream", "no_done=1"),
    (1, "", "malformed=1"),
    (1, "", "refuse_stream_options=1"),
)  # fmt: skip


#: behaviours after which the provider's own usage is unknown
WITHOUT_USAGE = ("usage=none", "die=5", "malformed", "refuse", "chunks=3000")


def sessions_of(count: int, calls: int) -> list[Session]:
    """Return sessions. Of eight, one has a budget, one declares one, and one has one for itself and two children."""
    mean = max(1, calls // count) * 150
    found: list[Session] = []
    for number in range(count):
        name = f"s{number:03d}"
        match number % 8:
            case 0:
                found.append(Session(name, limit=mean // 2, is_calm=True))
            case 1:
                found.append(Session(name, declared=mean // 2))
            case 2:
                found.append(Session(name, limit=mean * 3 // 2))
            case 3 | 4:
                found.append(Session(name, parent=f"s{number - number % 8 + 2:03d}"))
            case _:
                found.append(Session(name, is_calm=number % 8 > 5))
    return found


def calls_of(count: int, sessions: Sequence[Session], seed: int) -> list[Call]:
    """Return the calls in order; the same calls for the same seed."""
    dice = random.Random(seed)
    weights = [weight for weight, _, _ in BEHAVIOURS]
    found = []
    for number in range(count):
        session = dice.choice(sessions)
        _, kind, mock = dice.choices(BEHAVIOURS, weights)[0]
        if session.is_calm and any(one in mock for one in WITHOUT_USAGE):
            mock = "delay=0.1"
        stream = kind == "stream" or dice.random() < 0.5
        leave = dice.choices(("", "early", "within"), (88, 6, 6))[0]
        found.append(
            Call(
                id=f"c{number:06d}",
                session=session,
                # Its provider is remembered for a while as one without usage in streams, so it is a separate model.
                model="old" if "refuse" in mock else "chaos",
                words=dice.choice((5, 20, 80, 300)),
                stream=stream,
                ask_usage=stream and dice.random() < 0.5,
                max_tokens=dice.choice((None, 20, 100, 400)),
                answers=2 if dice.random() < 0.05 else 1,
                mock=mock,
                tools=number % 3 == 0,
                leave=leave,
                leave_after_s=dice.uniform(0, 0.3),
                rudely=dice.random() < 0.5,
            )
        )
    return found


# --- the provider, in its own process ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bill:
    """A charge of the provider for one request, with its time. `limit`: the output limit in the request."""

    at: float
    call: str
    input: int
    output: int
    limit: int | None

    @property
    def total(self) -> int:
        return self.input + self.output


class Biller(MockProvider):
    """A provider that stores every bill under the name that the client gave the call."""

    def __init__(self) -> None:
        super().__init__()
        self.bills: list[Bill] = []

    def record(
        self,
        request: ReceivedCall,
        *,
        status: int,
        model: str = "",
        usage: MockUsage | None = None,
        shares: Sequence[Share] = (),
    ) -> None:
        super().record(request, status=status, model=model, usage=usage, shares=shares)
        if usage is not None:
            limit = json.loads(request.body).get("max_tokens")
            self.bills.append(Bill(time.time(), request.header("x-call") or "", usage.input, usage.output, limit))


def run_provider(pipe: Connection) -> None:
    """Serve until asked for the bills."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    provider = Biller()
    with MockServer(provider) as server, contextlib.suppress(EOFError):
        pipe.send(server.url)
        pipe.recv()
        pipe.send(provider.bills)


@contextlib.contextmanager
def provider() -> Iterator[tuple[str, Callable[[], list[Bill]]]]:
    """Yield the address of the provider, and a function that returns its bills once, at the end."""
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=run_provider, args=(theirs,), daemon=True)
    process.start()

    def bills() -> list[Bill]:
        ours.send("bills")
        found: list[Bill] = ours.recv()
        return found

    try:
        yield ours.recv(), bills
    finally:
        ours.close()
        process.terminate()


# --- stores and their outages -----------------------------------------------------------------------------------------


class Backend(Protocol):
    """A store that can be made unavailable. `outages`: the outages of a run, one after the other."""

    url: str

    @property
    def outages(self) -> Sequence[Callable[[], Awaitable[None]]]: ...

    def problems(self) -> list[str]: ...


class SqliteFile:
    """A SQLite store, made unavailable by a lock that is longer than a call waits."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "gateway.db"
        self.url = f"sqlite://{self._path}"
        self.outages: Sequence[Callable[[], Awaitable[None]]] = (self._lock, self._lock)

    async def _lock(self) -> None:
        with contextlib.closing(sqlite3.connect(self._path, isolation_level=None, timeout=5)) as db:
            db.execute("BEGIN EXCLUSIVE")
            await asyncio.sleep(1.4)
            db.execute("ROLLBACK")

    def problems(self) -> list[str]:
        with contextlib.closing(sqlite3.connect(self._path)) as db:
            (said,) = db.execute("PRAGMA integrity_check").fetchone()
        return [] if said == "ok" else [f"integrity_check says {said}"]


class RedisNode:
    """A `redis-server` that loses nothing when it is killed, with its own folder."""

    def __init__(self, folder: Path, *options: str) -> None:
        folder.mkdir()
        # A node of a cluster also listens on its port plus 10,000.
        self.port = next(port for port in random.sample(range(20_000, 30_000), 100) if _is_free(port, port + 10_000))
        self._command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder)]
        self._command += ["--save", "", "--appendonly", "yes", "--appendfsync", "always", *options]
        self._log = folder / "redis.log"
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        while "PONG" not in redis_cli("-p", str(self.port), "ping"):
            if self._process.poll() is not None:
                sys.exit(f"redis-server does not start:\n{self._log.read_text()}")
            time.sleep(0.02)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def flush(self) -> None:
        redis_cli("-p", str(self.port), "flushall")

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def redis_cli(*words: str) -> str:
    return subprocess.run(["redis-cli", *words], check=False, capture_output=True, text=True, timeout=60).stdout


def _is_free(*ports: int) -> bool:
    try:
        for port in ports:
            with socket.socket() as taken:
                taken.bind(("127.0.0.1", port))
    except OSError:
        return False
    return True


class RedisNodes:
    """One server or a cluster: a node is killed and restarted, frozen for two seconds, and killed again."""

    def __init__(self, folder: Path, count: int, seed: int) -> None:
        options = ("--cluster-enabled", "yes") if count > 1 else ()
        self._dice = random.Random(seed + 2)
        self._nodes = [RedisNode(folder / f"redis-{number}", *options) for number in range(count)]
        addresses = [f"127.0.0.1:{node.port}" for node in self._nodes]
        self.url = self._nodes[0].url
        if count > 1:
            redis_cli("--cluster", "create", *addresses, "--cluster-yes")
            while not all("state:ok" in redis_cli("-p", str(node.port), "cluster", "info") for node in self._nodes):
                time.sleep(0.05)
            self.url = f"redis+cluster://{','.join(addresses)}"
        self.outages: Sequence[Callable[[], Awaitable[None]]] = (self._restart, self._freeze, self._restart)

    async def _restart(self) -> None:
        node = self._dice.choice(self._nodes)
        node.kill()
        await asyncio.sleep(1.4)
        await asyncio.to_thread(node.start)

    async def _freeze(self) -> None:
        node = self._dice.choice(self._nodes)
        node.signal(signal.SIGSTOP)
        await asyncio.sleep(2)
        node.signal(signal.SIGCONT)

    def problems(self) -> list[str]:
        return []

    def kill(self) -> None:
        for node in self._nodes:
            node.kill()


@contextlib.contextmanager
def backend(kind: str, folder: Path, seed: int) -> Iterator[Backend]:
    if kind == "sqlite":
        yield SqliteFile(folder)
        return
    if not shutil.which("redis-server"):
        sys.exit("redis-server is not on the PATH")
    nodes = RedisNodes(folder, 3 if kind == "cluster" else 1, seed)
    try:
        yield nodes
    finally:
        nodes.kill()


# --- gateways ---------------------------------------------------------------------------------------------------------


class Gateway:
    """`gateway serve` with several workers, on the same port after restarts."""

    def __init__(self, folder: Path, file: Path, workers: int) -> None:
        self.port = free_port()
        self.log = folder / f"gateway-{self.port}.log"
        command = [sys.executable, "-m", "gateway", "serve", "-c", str(file), "--port", str(self.port)]
        self._command = [*command, "--workers", str(workers)]
        self._folder = folder

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, cwd=self._folder, env=environment(), stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    def stop(self) -> None:
        """Stop it as an operator does; kill it if that takes too long."""
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            self._process.wait()

    def signal(self, number: int) -> None:
        """Send a signal to all its processes."""
        for pid in tree(self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    @property
    def workers(self) -> list[int]:
        """Return the process ids of its workers, including one that is just starting."""
        return [pid for pid in tree(self._process.pid)[1:] if b"spawn_main" in _command_line(pid)]

    async def ready(self) -> None:
        deadline = time.monotonic() + 30
        while not await _is_ready(self.port):
            if time.monotonic() > deadline or self._process.poll() is not None:
                sys.exit(f"the gateway did not start:\n{self.log.read_text()}")
            await asyncio.sleep(0.05)

    async def set_limit(self, session: str, tokens: int) -> None:
        body = json.dumps({"budget": {"tokens": tokens}}).encode()
        head = f"PATCH /api/sessions/{session} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
        answer = await _ask(self.port, f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        if not answer.startswith(b"HTTP/1.1 200"):
            sys.exit(f"no budget could be set: {answer!r}")

    def complaints(self) -> list[str]:
        """Return what the gateway logs only for bugs, each with the line before it."""
        lines = self.log.read_text(errors="replace").splitlines()
        found = [place for place, line in enumerate(lines) if any(one in line for one in COMPLAINTS)]
        return ["\n".join(lines[max(0, place - 1) : _block_end(lines, place)]) for place in found]


def _block_end(lines: Sequence[str], place: int) -> int:
    """Return the place after one log entry: lines of a traceback are indented, except the exception at its end."""
    end = place + 1
    while end < len(lines) and lines[end].startswith(" "):
        end += 1
    return end + 1 if end > place + 1 else end


def _command_line(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


async def _ask(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        return await asyncio.wait_for(reader.read(), 10)
    finally:
        writer.close()


async def _is_ready(port: int) -> bool:
    with contextlib.suppress(OSError, TimeoutError):
        return (await _ask(port, b"GET /readyz HTTP/1.1\r\nhost: chaos\r\nconnection: close\r\n\r\n")).startswith(
            b"HTTP/1.1 200"
        )
    return False


def write_config(folder: Path, upstream: str, store: str, on_failure: str) -> Path:
    provider = {"base_url": upstream, "auth": "none", "timeout_s": {"first_byte": FIRST_BYTE_S}}
    value = {
        "providers": {"upstream": provider},
        "default_provider": "upstream",
        "built_in_providers": False,
        "models": [{"match": "*", "provider": "upstream", "reasoning": False, "price": {"input": 1, "output": 10}}],
        "budget": {"lease_s": LEASE_S},
        "steps": [{"name": "work", "sequence": SEQUENCE, "is_default": True}],
        "store": {"url": store, "on_failure": on_failure, "journal": str(folder / "journals")},
        "telemetry": {"log": {"level": "warning", "format": "text"}},
    }
    file = folder / "gateway.yaml"
    file.write_text(json.dumps(value))
    return file


# --- clients ----------------------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """The client view of its call. `usage`: total tokens, if reported; `ended`: Unix time.

    `received`: output tokens of a stream, as the gateway estimates them; `received_before`: the same, `UNKNOWN_S`
    before its end.
    """

    call: Call
    how: str
    code: str = ""
    usage: int | None = None
    ended: float = 0.0
    received: int = 0
    received_before: int = 0


class ReceivedBytes:
    """The received bytes of a response, with their times."""

    def __init__(self) -> None:
        self.answer = bytearray()
        self._times: list[tuple[float, int]] = []

    def add(self, piece: bytes) -> None:
        self.answer += piece
        self._times.append((time.monotonic(), len(self.answer)))

    def tokens(self, before_s: float = 0.0) -> int:
        """Return the tokens of the texts that had arrived this time before the last ones."""
        last = self._times[-1][0] - before_s if self._times else 0.0
        length = max((length for at, length in self._times if at <= last), default=0)
        return int(estimate_tokens("".join(map(json.loads, CONTENT.findall(self.answer[:length].decode())))))


#: matches the text of an event
CONTENT = re.compile(r'"content": ?("(?:[^"\\]|\\.)*")')


async def make(call: Call, port: int) -> Seen:
    """Make a call, and leave it when the plan says so."""
    come = ReceivedBytes()
    try:
        async with asyncio.timeout(ANSWER_WITHIN_S):
            seen = await _made(call, port, come)
    except TimeoutError:
        seen = Seen(call, "unanswered")
    except OSError:
        seen = Seen(call, "broken")
    seen.ended = time.time()
    if call.stream:
        seen.received, seen.received_before = come.tokens(), come.tokens(UNKNOWN_S)
    return seen


async def _made(call: Call, port: int, come: ReceivedBytes) -> Seen:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(call.request())
        try:
            async with asyncio.timeout(call.leave_after_s if call.leave == "early" else None):
                answer = await _read(reader, call, come)
        except TimeoutError:
            answer = None
        if answer is not None:
            return seen_of(call, answer)
        if call.rudely:
            # Close with a reset instead of a normal end.
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()
        return Seen(call, "left")
    finally:
        writer.close()


async def _read(reader: asyncio.StreamReader, call: Call, come: ReceivedBytes) -> bytes | None:
    """Return the whole response, or None if the client leaves before its end."""
    answer = come.answer
    while piece := await reader.read(65536):
        come.add(piece)
        if call.leave == "within" and answer.count(b"data:" if call.stream else b"\r\n\r\n") > call.stream:
            return None
    return bytes(answer)


def seen_of(call: Call, answer: bytes) -> Seen:
    """Return what a response reports, if it is complete."""
    head, _, body = answer.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 "):
        return Seen(call, "broken")
    status = int(head[9:12])
    whole = _whole(head.lower(), body)
    if whole is None:
        return Seen(call, "broken")
    if status != 200:
        return Seen(call, "refused", f"{status} {_code(whole)}")
    if call.stream and b'data: {"error"' in whole:
        return Seen(call, "broken")
    return Seen(call, "ended", usage=_usage(call, whole))


def _whole(head: bytes, body: bytes) -> bytes | None:
    if b"transfer-encoding: chunked" not in head:
        length = head.partition(b"content-length: ")[2].partition(b"\r")[0]
        return body if length.isdigit() and len(body) == int(length) else None
    found = bytearray()
    while body:
        size, _, body = body.partition(b"\r\n")
        count = int(size or b"0", 16)
        if not count:
            return bytes(found)
        found += body[:count]
        body = body[count + 2 :]
    return None


def _code(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["code"])
    except (ValueError, TypeError, KeyError):
        return "not JSON"


def _usage(call: Call, body: bytes) -> int | None:
    texts = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: {")] if call.stream else [body]
    found = None
    for text in texts:
        with contextlib.suppress(ValueError):
            usage = json.loads(text).get("usage")
            found = usage["total_tokens"] if usage else found
    return found


# --- the run ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """The options of the command line."""

    calls: int
    workers: int
    gateways: int
    clients: int
    sessions: int
    seed: int
    store: str
    on_failure: str
    kill_every: float


@dataclass
class Events:
    """The faults of a run: times, and the processes that were hit."""

    kills: list[tuple[float, int]] = field(default_factory=list)
    outages: list[float] = field(default_factory=list)
    #: start and end of each time in which a gateway was frozen
    freezes: list[tuple[float, float]] = field(default_factory=list)
    seconds: float = 0.0


@dataclass
class Books:
    """All records at the end of a run."""

    seen: list[Seen]
    bills: list[Bill]
    stored: Stored
    problems: list[str]


async def run(plan: Plan, folder: Path) -> tuple[Books, Events]:
    sessions = sessions_of(plan.sessions, plan.calls)
    calls = calls_of(plan.calls, sessions, plan.seed)
    events = Events()
    with backend(plan.store, folder, plan.seed) as kept, provider() as (upstream, bills):
        file = write_config(folder, upstream, kept.url, plan.on_failure)
        gateways = [Gateway(folder, file, plan.workers) for _ in range(plan.gateways)]
        try:
            for gateway in gateways:
                gateway.start()
            await asyncio.gather(*(gateway.ready() for gateway in gateways))
            for session in sessions:
                if session.limit is not None:
                    await gateways[0].set_limit(session.id, session.limit)
            began = time.monotonic()
            seen = await _storm(plan, calls, gateways, kept, events)
            events.seconds = time.monotonic() - began
            for gateway in gateways:
                gateway.stop()
            # The next worker that starts reads the journals that earlier workers left.
            gateways[0].start()
            await gateways[0].ready()
            problems, stored = await _settled(file, folder, sessions)
        finally:
            for gateway in gateways:
                gateway.stop()
        problems += kept.problems()
        problems += [f"log: {line}" for gateway in gateways for line in gateway.complaints()]
        return Books(seen, bills(), stored, problems), events


async def _storm(
    plan: Plan, calls: Sequence[Call], gateways: Sequence[Gateway], kept: Backend, events: Events
) -> list[Seen]:
    dice = random.Random(plan.seed + 1)
    todo, seen = iter(calls), list[Seen]()

    async def client(number: int) -> None:
        for call in todo:
            seen.append(await make(call, gateways[number % len(gateways)].port))
            if seen[-1].code.startswith("503"):
                await asyncio.sleep(AFTER_503_S)

    def kill(most: int = 1, of: Gateway | None = None) -> None:
        for victim in dice.sample(workers := (of or dice.choice(gateways)).workers, min(most, len(workers))):
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
                events.kills.append((time.time(), victim))

    async def killer() -> None:
        while True:
            await asyncio.sleep(plan.kill_every * dice.uniform(0.5, 1.5))
            kill()

    async def freezer() -> None:
        while len(gateways) > 1:
            await asyncio.sleep(THAWED_S * dice.uniform(0.5, 1.5))
            frozen, at = dice.choice(gateways), time.time()
            frozen.signal(signal.SIGSTOP)
            try:
                await asyncio.sleep(FROZEN_S)
            finally:
                frozen.signal(signal.SIGCONT)
                events.freezes.append((at, time.time()))
            await asyncio.sleep(KILL_AFTER_S)
            kill(plan.workers // 2, frozen)

    async def outages() -> None:
        for number, take_away in enumerate(kept.outages, 1):
            while len(seen) < plan.calls * number / (len(kept.outages) + 1):  # noqa: ASYNC110  # a poll will do
                await asyncio.sleep(0.05)
            events.outages.append(time.time())
            # All workers of a gateway die after they have answered calls that the store does not know yet.
            asyncio.get_running_loop().call_later(KILL_WITHIN_S, kill, plan.workers)
            await take_away()

    faults, aways = [asyncio.create_task(one()) for one in (killer, freezer)], asyncio.create_task(outages())
    await asyncio.gather(*(client(number) for number in range(plan.clients)))
    await aways
    for fault in faults:
        fault.cancel()
    await asyncio.gather(*faults, return_exceptions=True)
    return seen


@dataclass
class Stored:
    """The contents of the store at the end. Totals: tokens and calls; tools: calls by name; accounts: used and held."""

    records: list[CallRecord]
    totals: dict[str, tuple[int, int]]
    tools: dict[str, Mapping[str, int]]
    accounts: dict[str, tuple[Amount, Amount]]


async def _settled(file: Path, folder: Path, sessions: Sequence[Session]) -> tuple[list[str], Stored]:
    """Wait until nothing is held and no journal is left; return what is left, and the contents of the store."""
    settings = config.load(file, environment={}).settings
    store = resources.open_store(settings)
    try:
        deadline = time.monotonic() + SETTLED_WITHIN_S
        while (left := await unsettled(store, folder, sessions)) and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
        stored = Stored([], {session.id: (0, 0) for session in sessions}, {}, {})
        # Read all sessions, not only called ones, so that wrong entries are found.
        views = (await store.sessions(None, SESSIONS_SHOWN, None, "recent")).sessions
        left += await differences(store, settings.store.url, [view.totals for view in views])
        for view in views:
            stored.records += await store.calls(view.key, CALLS_KEPT)
            if view.key.namespace == OPEN_NAMESPACE:
                stored.totals[view.key.id] = (view.totals.total_tokens, view.totals.calls)
                # Lists leave out the tools of a session.
                whole = await store.session(view.key)
                stored.tools[view.key.id] = whole.tools.calls if whole is not None else {}
        balances = await store.balances([Claim(session.key.account) for session in sessions])
        stored.accounts = {balance.key.id: (balance.used, balance.held) for balance in balances}
        return left, stored
    finally:
        await store.aclose()


async def differences(store: Store, url: str, totals: Sequence[Totals]) -> list[str]:
    """Return the numbers that differ between the usage by hour and by day and the totals of all sessions.

    In a cluster, usage and sessions are on several servers, and a killed worker may have written only one of them.
    """
    wrong = list[str]()
    if url.startswith("redis+cluster"):
        return wrong
    for period, seconds in PERIOD_S.items():
        today = int(time.time() // seconds)
        rows = await store.usage(UsageQuery(period, today - 48, today))
        sums = dict(
            zip(COUNTS, [sum(column) for column in zip(*(row.counts for row in rows), strict=True)], strict=True)
        )
        expected = {
            "charged_calls": sum(one.calls for one in totals),
            "cost_pico_usd": int(sum(one.cost_usd for one in totals) * 10**12),
            **{
                name: sum(getattr(one, name) for one in totals)
                for name in ("input_tokens", "output_tokens", "total_tokens")
            },
        }
        wrong += [
            f"usage by {period}: {name} {sums.get(name)}, sessions {number}"
            for name, number in expected.items()
            if sums.get(name) != number
        ]
    return wrong


async def unsettled(store: Store, folder: Path, sessions: Sequence[Session]) -> list[str]:
    """Return the holds and the journals that are left."""
    balances = await store.balances([Claim(session.key.account) for session in sessions])
    held = [f"held on {balance.key.id} at the end: {balance.held}" for balance in balances if any(balance.held)]
    return held + [f"journal {path.name} is left" for path in (folder / "journals").glob("*.journal")]


# --- the audit --------------------------------------------------------------------------------------------------------


@dataclass
class Report:
    """The results of a run. In tokens, except for those named calls."""

    seed: int
    kills: int
    outages: int
    freezes: int
    seconds: float
    seen: dict[str, int]
    refusals: dict[str, int]
    records: dict[str, int]
    estimated: dict[str, int]
    acknowledged: int = 0
    charged: int = 0
    billed: int = 0
    lost_calls: int = 0
    twice_calls: int = 0
    unknown_calls: int = 0
    tool_calls: int = 0
    unknown: int = 0
    exact_calls: int = 0
    exact_sessions: int = 0
    overshoot: int = 0
    overshoot_allowed: int = 0
    overshoot_of: str = ""
    over_estimate: int = 0
    holds: int = 0
    violations: list[str] = field(default_factory=list)


class Audit:
    """Compare what clients saw, what the provider billed, and what the store contains."""

    def __init__(self, plan: Plan, books: Books, events: Events) -> None:
        self._plan = plan
        self._books = books
        self._kills = events.kills
        self._freezes = events.freezes
        self._bills: dict[str, list[Bill]] = defaultdict(list)
        for bill in books.bills:
            self._bills[bill.call].append(bill)
        self._records: dict[str, list[CallRecord]] = defaultdict(list)
        for record in books.stored.records:
            self._records[record.request_id].append(record)
        self._inexact: set[str] = set()
        self.report = Report(
            plan.seed, len(events.kills), len(events.outages), len(events.freezes), round(events.seconds, 1),
            seen=_counted(seen.how for seen in books.seen),
            refusals=_counted(seen.code for seen in books.seen if seen.code),
            records=_counted(record.outcome for record in books.stored.records),
            estimated={}, violations=list(books.problems),
            holds=sum(any(held) for _, held in books.stored.accounts.values()),
        )  # fmt: skip
        self._estimated: Counter[str] = Counter()

    def run(self) -> Report:
        report = self.report
        for seen in self._books.seen:
            self._call(seen)
        for session in {seen.call.session for seen in self._books.seen}:
            self._session(session)
        report.estimated = dict(self._estimated.most_common())
        report.billed = sum(bill.total for bill in self._books.bills)
        report.charged = sum(total for total, _ in self._books.stored.totals.values())
        return report

    def _wrong(self, seen: Seen, what: str) -> None:
        call = seen.call
        bills = [(bill.input, bill.output, bill.limit) for bill in self._bills[call.id]]
        records = [
            (one.outcome, one.charge.source, one.charge.usage.input_tokens, one.charge.usage.output_tokens)
            if one.charge
            else (one.outcome,)
            for one in self._records[call.id]
        ]
        plan = f"{'stream' if call.stream else 'whole'} {call.mock or 'plain'} max {call.max_tokens} n {call.answers}"
        self.report.violations.append(
            f"{call.id} of {call.session.id} ({plan}; {seen.how} {seen.code}): {what}; "
            f"billed {bills}, recorded {records}"
        )

    def _call(self, seen: Seen) -> None:
        report, call = self.report, seen.call
        bills = self._bills[call.id]
        charged = [record for record in self._records[call.id] if record.charge is not None]
        if seen.how == "unanswered":
            self._wrong(seen, f"not answered within {ANSWER_WITHIN_S:g} s")
        if len(bills) > 1:
            self._wrong(seen, "sent twice")
        if len(charged) > 1:
            report.twice_calls += 1
            self._wrong(seen, "charged twice")
        elif charged:
            self._charged(seen, charged[0], bills[0] if bills else None)
        elif bills:
            self._uncharged(seen, bills[0])

    def _charged(self, seen: Seen, record: CallRecord, bill: Bill | None) -> None:
        assert record.charge is not None
        report, tokens = self.report, record.charge.usage.total_tokens
        billed = bill.total if bill else 0
        if seen.how == "ended":
            report.acknowledged += seen.usage if seen.usage is not None else 0
            if record.outcome == ORPHANED or (seen.usage is not None and seen.usage > tokens):
                report.lost_calls += 1
                self._wrong(seen, "acknowledged, and charged for less or by estimate")
        if seen.how == "refused" and bill is None:
            self._wrong(seen, "refused, and charged")
        if record.session != seen.call.session.key:
            self._wrong(seen, f"charged to {record.session}")
        if record.charge.source == "provider":
            report.exact_calls += 1
            if tokens != billed:
                self._wrong(seen, "charged by the provider's word, and something else")
            return
        self._inexact.add(seen.call.session.id)
        reason = self._reason(seen, record)
        self._estimated[reason] += 1
        if reason == "unexplained":
            self._wrong(seen, "estimated without need")
        if record.outcome == ORPHANED and record.charge.usage.output_tokens < self._least(seen):
            self._wrong(seen, f"charged for less than its client had, {seen.received} tokens")
        bound = max(billed, self._hold(seen.call, record, bill))
        report.over_estimate += max(0, tokens - billed)
        if tokens > bound:
            self._wrong(seen, f"estimated at more than its hold or what was billed, {bound}")

    def _uncharged(self, seen: Seen, bill: Bill) -> None:
        """Check a bill that was not charged."""
        report = self.report
        if seen.how == "ended":
            report.lost_calls += 1
            self._wrong(seen, "acknowledged, and not charged")
            return
        self._inexact.add(seen.call.session.id)
        report.unknown_calls += 1
        report.unknown += bill.total
        if seen.received:
            self._wrong(seen, f"brought {seen.received} tokens, and not charged")
            return
        # At first, no store or journal knows a call without a budget, or one made during an outage.
        ends = [kill for kill, _ in self._kills if kill > bill.at]
        # The kill may precede the arrival of the call at the provider. Then the next kill did not end it.
        ends += [seen.ended] if seen.how == "broken" or not ends else []
        lasted = min(ends) - bill.at - self._frozen(bill.at, min(ends))
        is_put_off = not seen.call.session.is_limited or self._plan.on_failure == "open"
        if lasted >= HELD_AFTER_S or not is_put_off:
            self._wrong(seen, "billed, and not charged")

    @staticmethod
    def _least(seen: Seen) -> int:
        """Return the least tokens that were noted of a stream whose worker was killed."""
        return max(seen.received - UNKNOWN_TOKENS, seen.received_before)

    @staticmethod
    def _reason(seen: Seen, record: CallRecord) -> str:
        """Return why the provider's own usage was unknown."""
        mock, call = seen.call.mock, seen.call
        reasons = {
            "worker killed": record.outcome == ORPHANED,
            "ended at the budget": record.outcome == "budget_end",
            "no usage reported": "usage=none" in mock or (call.stream and call.model == "old"),
            "provider broke off": "die=" in mock,
            "answer not readable": "malformed" in mock and not call.stream,
            "client left": record.outcome == "client_left" and seen.how == "left",
        }
        return next((reason for reason, holds in reasons.items() if holds), "unexplained")

    @staticmethod
    def _hold(call: Call, record: CallRecord, bill: Bill | None) -> int:
        """Return the largest possible hold, as a client can calculate it."""
        known = bill.input if bill else record.charge.usage.input_tokens if record.charge else 0
        limit = call.max_tokens if call.max_tokens is not None else 16_384
        return MOST_OFF * known + OFF_BY + limit * call.answers

    def _frozen(self, begin: float, end: float) -> float:
        """Return for how many of these seconds some gateway was frozen."""
        return sum(max(0.0, min(end, until) - max(begin, since)) for since, until in self._freezes)

    def _most(self, record: CallRecord) -> int:
        """Return the largest possible charge of a call that was treated as orphaned."""
        return sum(bill.total for bill in self._bills[record.request_id]) + record.spent.tokens

    # --- sessions -----------------------------------------------------------------------------------------------------

    def _session(self, session: Session) -> None:
        report, books = self.report, self._books
        records = [record for record in books.stored.records if record.session == session.key]
        charged = [record.charge.usage.total_tokens for record in records if record.charge is not None]
        total, calls = books.stored.totals[session.id]
        if (total, calls) != (sum(charged), len(charged)):
            report.violations.append(f"{session.id}: totals {total} of {calls} calls, records {sum(charged)}")
        called = Counter(tool for record in records if record.outcome != ORPHANED for tool in record.tools)
        report.tool_calls += called.total()
        if (counted := books.stored.tools.get(session.id, {})) != called:
            report.violations.append(f"{session.id}: tools {dict(counted)}, records {dict(called)}")
        billed = sum(
            bill.total for one in books.seen if one.call.session == session for bill in self._bills[one.call.id]
        )
        if session.id not in self._inexact:
            report.exact_sessions += 1
            if total != billed:
                report.violations.append(f"{session.id}: totals {total}, billed {billed}, and no estimate")
        spent = [record for record in books.stored.records if session.key.account in record.accounts]
        used, _ = books.stored.accounts[session.id]
        expected = Amount()
        for record in spent:
            expected = expected.plus(record.spent)
        # In a cluster, the accounts of a call cannot be written in one step. If its worker is killed in between, one
        # account has the real charge and the other has that of an orphaned call.
        unsure = [record for record in spent if record.outcome == ORPHANED] if self._plan.store == "cluster" else []
        if abs(used.tokens - expected.tokens) > sum(map(self._most, unsure)) or (used != expected and not unsure):
            report.violations.append(f"{session.id}: account {used}, records {expected}")
        limit = session.limit if session.limit is not None else session.declared
        if limit is not None:
            self._budget(session, used.tokens - limit, spent)

    def _budget(self, session: Session, overshoot: int, spent: Iterable[CallRecord]) -> None:
        """Check the overshoot of a budget against its maximum: what calls were reported beyond their holds."""
        report = self.report
        allowed = sum(self._beyond(record) for record in spent if record.charge is not None)
        if overshoot > report.overshoot:
            report.overshoot, report.overshoot_allowed = overshoot, allowed
            kind = "set by an operator" if session.limit is not None else "declared"
            report.overshoot_of = f"by {session.id}, {kind}: {session.limit or session.declared:,}"
        if overshoot > allowed:
            report.violations.append(f"{session.id}: {overshoot} over its budget, {allowed} at the most to be expected")

    def _beyond(self, record: CallRecord) -> int:
        """Return by how much a call may have cost more than its hold."""
        assert record.charge is not None
        tokens = record.charge.usage.total_tokens
        bills = self._bills[record.request_id]
        call, ended = next((one.call, one.ended) for one in self._books.seen if one.call.id == record.request_id)
        # A call that continued after a freeze may have been treated as orphaned, and its hold released.
        was_lost = bool(bills) and self._frozen(bills[0].at, ended) >= LEASE_S
        if "store" in record.notes or record.context is None or was_lost:
            return tokens
        # The hold of a stream without a limit grows. Its minimum is a useful length.
        grew = call.stream and call.max_tokens is None
        limit = bills[0].limit if bills and bills[0].limit is not None and not grew else 16
        return max(0, tokens - record.context.tokens - limit * call.answers)


def _counted(values: Iterable[str]) -> dict[str, int]:
    return dict(Counter(values).most_common())


# --- printing ---------------------------------------------------------------------------------------------------------


def report_lines(plan: Plan, report: Report) -> Iterator[str]:
    yield (
        f"seed {plan.seed}: {plan.store}, {plan.gateways} x {plan.workers} workers, {plan.clients} clients, "
        f"{plan.sessions} sessions, on_failure {plan.on_failure}, {report.seconds:g} s"
    )
    rows: list[tuple[str, int | str, str]] = [
        ("calls", sum(report.seen.values()), _listed(report.seen)),
        ("refused or failed", sum(report.refusals.values()), _listed(report.refusals)),
        ("workers killed", report.kills, ""),
        ("store taken away", report.outages, "times"),
        ("gateway frozen", report.freezes, f"times, for {FROZEN_S:g} s: leases last {LEASE_S}"),
        ("recorded", sum(report.records.values()), _listed(report.records)),
        ("billed", report.billed, "tokens, by the provider's own count"),
        ("charged", report.charged, f"tokens, {report.over_estimate:,} of them estimated beyond what was billed"),
        ("acknowledged", report.acknowledged, "tokens that clients saw reported"),
        ("calls to the token", report.exact_calls, ""),
        ("sessions to the token", report.exact_sessions, f"of {plan.sessions}: those without an estimated call"),
        ("tool calls", report.tool_calls, "in answers, each counted once in its session"),
        ("estimated calls", sum(report.estimated.values()), _listed(report.estimated)),
        ("not charged", report.unknown_calls, f"calls, {report.unknown:,} tokens: cut before anything was held"),
        ("lost", report.lost_calls, "acknowledged, and not in the totals"),
        ("charged twice", report.twice_calls, ""),
        (
            "worst overshoot",
            report.overshoot,
            f"tokens, of {report.overshoot_allowed:,} to be expected at the most {report.overshoot_of}",
        ),
        ("holds left", report.holds, ""),
        ("violations", len(report.violations), ""),
    ]
    for name, number, more in rows:
        yield f"{name:<22}{number:>10,}  {more}".rstrip()
    yield from report.violations[:20]


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {number:,}" for name, number in counts.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=4, help="of each gateway, at least 2")
    parser.add_argument("--gateways", type=int, default=1, help="on the same store")
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--sessions", type=int, default=40)
    parser.add_argument("--seed", type=int, default=None, help="else one is drawn, and shown")
    parser.add_argument("--store", choices=("sqlite", "redis", "cluster"), default="sqlite")
    parser.add_argument("--on-failure", choices=("closed", "open"), default="closed")
    parser.add_argument("--kill-every", type=float, default=3.0, metavar="SECONDS", help="a worker, on average")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="for database and logs; else they are deleted")
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    given = vars(parser.parse_args())
    as_json, keep = given.pop("json"), given.pop("keep")
    seed = given.pop("seed")
    if given["workers"] < 2:
        parser.error("with one worker nobody would replace it: --workers 2 or more")
    plan = Plan(**given, seed=secrets.randbelow(10**6) if seed is None else seed)
    with contextlib.ExitStack() as stack:
        folder = keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
        folder.mkdir(parents=True, exist_ok=True)
        books, events = asyncio.run(run(plan, folder))
        if keep:
            evidence = {"seen": books.seen, "bills": books.bills, "events": events}
            (keep / "evidence.json").write_bytes(msgspec.json.encode(evidence))
    report = Audit(plan, books, events).run()
    print(json.dumps(asdict(report), indent=2) if as_json else "\n".join(report_lines(plan, report)))
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
