"""Measure the cost of a call in the gateway: CPU, latency and memory, compared with direct calls and with nginx.

    python bench/overhead.py [--gateway URL:PID] [--wire NAME] [--json]

Linux, standard library only. README.md describes the measurements.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import http.client
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
#: paths by format
PATHS = {
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "embeddings": "/v1/embeddings",
}
FIXED_PORT = 9100  # of the upstream, for a gateway that is already running
BACKLOG = 4096
ANSWER_WITHIN_S = 60.0
#: the place of the nonce of a call in a body or a stream
NONCE = b"@@@@@@@@"
SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Workload:
    """Load of `clients` connections, each making `calls` calls in sequence. `chunks` > 0: streams."""

    name: str
    clients: int
    calls: int
    chunks: int = 0
    interval_ms: int = 0
    body_bytes: int = 1_000
    warm_up: int = 3
    wire: str = "chat"


WORKLOADS = (
    Workload("small call, 1 client", 1, 500, warm_up=50),
    Workload("small call, 32 clients", 32, 100, warm_up=5),
    Workload("small to responses, 32 clients", 32, 100, warm_up=5, wire="responses"),
    Workload("small to messages, 32 clients", 32, 100, warm_up=5, wire="messages"),
    Workload("small to embeddings, 32 clients", 32, 100, warm_up=5, wire="embeddings"),
    Workload("burst of 100 chunks, 8 clients", 8, 40, chunks=100),
    Workload("burst of responses, 8 clients", 8, 40, chunks=100, wire="responses"),
    Workload("burst of messages, 8 clients", 8, 40, chunks=100, wire="messages"),
    Workload("100 chunks 10 ms apart, 16 clients", 16, 3, chunks=100, interval_ms=10, warm_up=0),
    Workload("50 chunks 100 ms apart, 1,000 clients", 1000, 1, chunks=50, interval_ms=100, warm_up=0),
    Workload("4 MB body, 1 client", 1, 8, body_bytes=4_000_000, warm_up=2),
    Workload("4 MB to responses, 1 client", 1, 8, body_bytes=4_000_000, warm_up=2, wire="responses"),
    Workload("4 MB to messages, 1 client", 1, 8, body_bytes=4_000_000, warm_up=2, wire="messages"),
    Workload("4 MB to embeddings, 1 client", 1, 8, body_bytes=4_000_000, warm_up=2, wire="embeddings"),
)


# --- bodies and responses: sent by the upstream and expected by the load client ----------------------------------


def request_body(workload: Workload) -> bytes:
    """Return a request; its nonce is replaced in each call by another of the same length."""
    words = random.Random(7).choices(("token", "session", "budget", "window", "answer", "tool", "of", "the"), k=200)
    text = " ".join(words)[:900]
    messages: list[dict[str, str]] = [{"role": "user", "content": text[: workload.body_bytes - 300]}]
    if workload.body_bytes > 4_000:
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": text} for i in range(workload.body_bytes // 940)]
    body: dict[str, Any] = {
        "model": "bench",
        "metadata": {"nonce": NONCE.decode(), "chunks": str(workload.chunks), "interval_ms": str(workload.interval_ms)},
    }
    if workload.wire == "embeddings":
        body["input"] = [message["content"] for message in messages]
    else:
        body["input" if workload.wire == "responses" else "messages"] = messages
    if workload.wire == "messages":
        body["max_tokens"] = 100
    if workload.chunks:
        body["stream"] = True
        if workload.wire == "chat":
            body["stream_options"] = {"include_usage": True}
    return json.dumps(body).encode()


_WANTED = re.compile(rb'"nonce": "(.{8})", "chunks": "(\d+)", "interval_ms": "(\d+)"')


def wire_of(path: str) -> str:
    return next((wire for wire, its_path in PATHS.items() if its_path == path), "chat")


def usage(body_bytes: int, chunks: int) -> dict[str, int]:
    """Return the upstream's usage, which shows that the whole body arrived."""
    tokens_in, tokens_out = body_bytes // 4, chunks or 16
    return {"prompt_tokens": tokens_in, "completion_tokens": tokens_out, "total_tokens": tokens_in + tokens_out}


def whole_answer(wire: str, nonce: bytes, body_bytes: int) -> bytes:
    text = "A short answer of some sixteen tokens, as small calls often get them."
    counts = usage(body_bytes, 0)
    named = {"input_tokens": counts["prompt_tokens"], "output_tokens": counts["completion_tokens"]}
    said: dict[str, Any]
    if wire == "responses":
        content = [{"type": "output_text", "text": text, "annotations": []}]
        item = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": content}
        usage_of_all = {**named, "total_tokens": counts["total_tokens"]}
        said = {"object": "response", "status": "completed", "output": [item], "usage": usage_of_all}
    elif wire == "messages":
        content = [{"type": "text", "text": text}]
        said = {"type": "message", "role": "assistant", "content": content, "stop_reason": "end_turn", "usage": named}
    elif wire == "embeddings":
        data = [{"object": "embedding", "index": 0, "embedding": [0.25] * 16}]
        said = {"object": "list", "data": data, "usage": {"prompt_tokens": 7, "total_tokens": 7}}
    else:
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        said = {"object": "chat.completion", "created": 1_700_000_000, "choices": [choice], "usage": counts}
    return json.dumps({"id": f"chatcmpl-{nonce.decode()}", "model": "bench", **said}).encode()


def events(wire: str, nonce: bytes, body_bytes: int, chunks: int) -> list[bytes]:
    """Return a stream: its chunks in the format of its API, the events at its start and end, and the usage."""
    counts, words = usage(body_bytes, chunks), [f" word{number}" for number in range(chunks)]
    named = {"input_tokens": counts["prompt_tokens"], "output_tokens": counts["completion_tokens"]}
    if wire == "responses":
        return responses_events(nonce.decode(), words, {**named, "total_tokens": counts["total_tokens"]})
    if wire == "messages":
        return messages_events(nonce.decode(), words, named)
    head = {"id": "chatcmpl-" + nonce.decode(), "object": "chat.completion.chunk", "created": 1_700_000_000}

    def event(choices: list[Any], **more: Any) -> bytes:
        return b"data: " + compact({**head, "model": "bench", "choices": choices, **more}) + b"\n\n"

    found = [event([{"index": 0, "delta": {"content": word}, "finish_reason": None}]) for word in words]
    return [*found, event([], usage=counts), b"data: [DONE]\n\n"]


def responses_events(nonce: str, words: Sequence[str], counts: Mapping[str, int]) -> list[bytes]:
    """Return a Responses stream, with the padding that OpenAI adds to hide the length of texts."""
    response = {"id": f"resp_{nonce}", "object": "response", "model": "bench", "output": []}
    item = {"type": "message", "id": "msg_1", "role": "assistant", "status": "in_progress", "content": []}
    text = {"type": "output_text", "text": "".join(words), "annotations": []}
    done = {**item, "status": "completed", "content": [text]}
    said: list[tuple[str, dict[str, Any]]] = [
        ("created", {"response": {**response, "status": "in_progress", "usage": None}}),
        ("output_item.added", {"output_index": 0, "item": item}),
        *(("output_text.delta", {
            "item_id": "msg_1", "output_index": 0, "content_index": 0, "delta": word, "logprobs": [],
            "obfuscation": "Xy7"[: number % 3] + "Qa" * (number % 7),
        }) for number, word in enumerate(words)),
        ("output_item.done", {"output_index": 0, "item": done}),
        ("completed", {"response": {**response, "status": "completed", "output": [done], "usage": counts}}),
    ]  # fmt: skip
    return [
        named_event({"type": f"response.{kind}", "sequence_number": number, **fields})
        for number, (kind, fields) in enumerate(said)
    ]


def messages_events(nonce: str, words: Sequence[str], counts: Mapping[str, int]) -> list[bytes]:
    """Return an Anthropic stream, without the spaces that hide the length of texts."""
    message = {"id": f"msg_{nonce}", "type": "message", "role": "assistant", "model": "bench", "content": []}
    begun: dict[str, Any] = {"type": "message_start", "message": {**message, "usage": {**counts, "output_tokens": 1}}}
    block: dict[str, Any] = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    deltas = [
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": one}} for one in words
    ]
    stopped = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": counts}
    ends: list[dict[str, Any]] = [{"type": "content_block_stop", "index": 0}, stopped, {"type": "message_stop"}]
    return [named_event(one) for one in [begun, block, *deltas, *ends]]


def named_event(value: Mapping[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (value["type"].encode(), compact(value))


def compact(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


# --- the upstream, in its own process ----------------------------------------------------------------------------


class Upstream(asyncio.Protocol):
    """A connection of the upstream: keep-alive HTTP/1.1, one request at a time."""

    #: (wire, chunks, body length) -> the events with the placeholder nonce, each framed as an HTTP chunk
    templates: dict[tuple[str, int, int], list[bytes]] = {}  # noqa: RUF012  # noqa: RUF012  # shared by all connections

    def __init__(self) -> None:
        self._seen = bytearray()
        self._needed = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self._seen += data
        if not self._needed:
            end = self._seen.find(b"\r\n\r\n")
            if end < 0:
                return
            length = re.search(rb"content-length: *(\d+)", bytes(self._seen[:end]), re.IGNORECASE)
            self._needed = end + 4 + (int(length[1]) if length else 0)
        if len(self._seen) >= self._needed:
            path = self._seen[: self._seen.find(b"\r\n")].split(b" ")[1].decode()
            body = bytes(self._seen[self._seen.find(b"\r\n\r\n") + 4 :])
            self._seen.clear()
            self._needed = 0
            self._answer(wire_of(path), body)

    def _answer(self, wire: str, body: bytes) -> None:
        wanted = _WANTED.search(body, 0, 300)
        nonce, chunks, interval = (wanted[1], int(wanted[2]), int(wanted[3])) if wanted else (NONCE, 0, 0)
        if not chunks:
            content = whole_answer(wire, nonce, len(body))
            head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(content)
            self._transport.write(head + content)
            return
        template = self.templates.get((wire, chunks, len(body)))
        if template is None:
            framed = (b"%x\r\n%b\r\n" % (len(event), event) for event in events(wire, NONCE, len(body), chunks))
            template = self.templates[wire, chunks, len(body)] = [*framed, b"0\r\n\r\n"]
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        if not interval:
            self._transport.write(head + b"".join(template).replace(NONCE, nonce))
            return
        self._transport.write(head)
        pieces = iter([piece.replace(NONCE, nonce) for piece in template])
        loop = asyncio.get_running_loop()

        def send(at: float, left: int) -> None:
            """Send the next chunk, and the end with the last one; a late chunk does not delay later ones."""
            if left > 1:
                self._transport.write(next(pieces))
                loop.call_at(at + interval / 1000, send, at + interval / 1000, left - 1)
            else:
                self._transport.write(b"".join(pieces))

        send(loop.time(), chunks)


def run_upstream(listener: socket.socket, cpu: int | None) -> None:
    """Serve until the process is stopped."""

    async def serve() -> None:
        server = await asyncio.get_running_loop().create_server(Upstream, sock=listener, backlog=BACKLOG)
        await server.serve_forever()

    pin(0, cpu)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve())


# --- the load, in its own process --------------------------------------------------------------------------------


@dataclass
class Result:
    """The results of a workload at the client. `wrong`: the first wrong responses."""

    seconds: list[float] = field(default_factory=list)
    failed: int = 0
    wrong: str = ""


class Client(asyncio.Protocol):
    """A connection that makes calls one after the other."""

    def __init__(self, workload: Workload, number: int, calls: int, result: Result) -> None:
        self.done = asyncio.get_running_loop().create_future()
        self._workload, self._number, self._left, self._result = workload, number, calls, result
        self._body = request_body(workload)
        self._head = (
            f"POST {PATHS[workload.wire]} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
            f"x-session-id: bench-{number}\r\ncontent-length: {len(self._body)}\r\n\r\n"
        ).encode()
        self._seen = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self._fail(f"connection closed: {error}", self._left)
            self.done.set_result(None)

    def call(self) -> None:
        """Send the next request."""
        self._nonce = f"{self._number:04d}{self._left:04d}".encode()
        self._seen.clear()
        self._started = time.perf_counter()
        self._transport.write(self._head + self._body.replace(NONCE, self._nonce, 1))

    def data_received(self, data: bytes) -> None:
        self._seen += data
        if not self._complete():
            return
        self._result.seconds.append(time.perf_counter() - self._started)
        problem = self._problem(bytes(self._seen))
        if problem:
            self._fail(problem, 1)
        self._left -= 1
        if self._left:
            self.call()
        else:
            self.done.set_result(None)
            self._transport.close()

    def _complete(self) -> bool:
        if self._workload.chunks and self._seen.startswith(b"HTTP/1.1 200"):
            return self._seen.endswith(b"\r\n0\r\n\r\n")
        end = self._seen.find(b"\r\n\r\n")
        length = re.search(rb"content-length: *(\d+)", bytes(self._seen[:end]), re.IGNORECASE) if end >= 0 else None
        return length is not None and len(self._seen) >= end + 4 + int(length[1])

    def _problem(self, answer: bytes) -> str:
        head, _, body = answer.partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            return (head[:60] + b" " + body[:200]).decode()
        if not self._workload.chunks:
            right = body == whole_answer(self._workload.wire, self._nonce, len(self._body))
            return "" if right else f"another answer: {body[:200]!r}"
        lines = [line for line in unchunked(body).split(b"\n\n") if line and not line.startswith(b":")]
        expected = b"".join(events(self._workload.wire, self._nonce, len(self._body), self._workload.chunks))
        right = b"".join(line + b"\n\n" for line in lines) == expected
        return "" if right else f"another stream: {len(lines)} events, the last {lines[-1][:200]!r}"

    def _fail(self, problem: str, calls: int) -> None:
        self._result.failed += calls
        self._result.wrong = self._result.wrong or problem


def unchunked(data: bytes) -> bytes:
    parts: list[bytes] = []
    at = 0
    while True:
        end = data.index(b"\r\n", at)
        size = int(data[at:end], 16)
        if not size:
            return b"".join(parts)
        parts.append(data[end + 2 : end + 2 + size])
        at = end + 4 + size


def run_load(port: int, workload: Workload, calls: int) -> Result:
    """Make the calls of a workload; all connections are opened before the first call."""

    async def load() -> Result:
        result, loop = Result(), asyncio.get_running_loop()
        clients = []
        for number in range(workload.clients):
            make = functools.partial(Client, workload, number, calls, result)
            _, client = await loop.create_connection(make, "127.0.0.1", port)
            clients.append(client)
        for client in clients:
            client.call()
        try:
            await asyncio.wait_for(asyncio.gather(*(client.done for client in clients)), ANSWER_WITHIN_S)
        except TimeoutError:
            result.wrong = result.wrong or f"not all answered within {ANSWER_WITHIN_S:.0f} s"
            result.failed += 1
        return result

    return asyncio.run(load())


# --- processes --------------------------------------------------------------------------------------------------


def pin(pid: int, cpu: int | None) -> None:
    """Keep a process on one CPU, including threads that it starts later."""
    if cpu is not None:
        os.sched_setaffinity(pid, {cpu})


def tree(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    found = [pid]
    for parent in found:
        for listed in Path(f"/proc/{parent}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += map(int, listed.read_text().split())
    return found


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process tree so far, by the nanosecond clock of each process."""
    total = 0.0
    for member in tree(pid):
        with contextlib.suppress(OSError):
            total += time.clock_gettime((~member << 3) | 2)
    return total


def memory_mb(pid: int, what: str) -> float:
    """Return `VmRSS` (now) or `VmHWM` (peak) of a process tree."""
    total = 0
    for member in tree(pid):
        with contextlib.suppress(OSError):
            line = re.search(rf"^{what}:\s+(\d+) kB", Path(f"/proc/{member}/status").read_text(), re.MULTILINE)
            total += int(line[1]) if line else 0
    return total / 1024


def forget_peak(pid: int) -> None:
    for member in tree(pid):
        with contextlib.suppress(OSError):
            Path(f"/proc/{member}/clear_refs").write_text("5")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
    return port


@dataclass
class Target:
    """The target of calls. `pid`: the process whose CPU and memory are measured; None: no process."""

    port: int
    pid: int | None


def running(text: str) -> Target:
    """Return the target for `http://127.0.0.1:PORT:PID`, a gateway on this machine."""
    match = re.fullmatch(r"http://(?:127\.0\.0\.1|localhost):(\d+)/?:(\d+)", text)
    if match is None:
        raise argparse.ArgumentTypeError("write it as http://127.0.0.1:PORT:PID")
    return Target(int(match[1]), int(match[2]))


@contextlib.contextmanager
def started(
    command: list[str], port: int, cpu: int | None, log: Path, **options: Any
) -> Iterator[tuple[Target, float]]:
    """Yield a running server, and the seconds from its start to its first response."""
    with log.open("ab") as output:
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, **options)
    try:
        pin(process.pid, cpu)
        while not answers(port):
            if process.poll() is not None or time.perf_counter() - began > 20:
                sys.exit(f"{command[0]} did not start:\n{log.read_text()}")
            time.sleep(0.002)
        yield Target(port, process.pid), time.perf_counter() - began
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()


def answers(port: int) -> bool:
    """Return True if a chat call gets a response."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("POST", PATHS["chat"], request_body(WORKLOADS[0]), {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status == http.HTTPStatus.OK and b"chatcmpl" in answer.read()
    except OSError:
        return False
    finally:
        connection.close()


def environment() -> dict[str, str]:
    """Return our environment without settings of a gateway, and with the checkout of this file."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GATEWAY_")}
    paths = [str(ROOT)] if (ROOT / "gateway").is_dir() else []
    return {**kept, "PYTHONPATH": os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])}


def gateway_command(upstream: int, port: int, folder: Path) -> list[str]:
    store = f"sqlite://{folder / f'gateway-{port}.db'}"
    options = ["--port", str(port), "--upstream", f"http://127.0.0.1:{upstream}", "--store", store]
    return [sys.executable, "-m", "gateway", "serve", *options]


NGINX_CONF = """
daemon off; worker_processes 1; pid nginx.pid; error_log stderr error;
events {{ worker_connections 8192; }}
http {{
  access_log off; client_max_body_size 0; client_body_buffer_size 8m; keepalive_requests 10000000;
  client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path f; uwsgi_temp_path u; scgi_temp_path s;
  upstream provider {{ server 127.0.0.1:{upstream}; keepalive 2048; keepalive_requests 10000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      proxy_pass http://provider; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    }}
  }}
}}
"""


def nginx_command(program: str, upstream: int, port: int, folder: Path) -> list[str]:
    conf = folder / "nginx.conf"
    conf.write_text(NGINX_CONF.format(upstream=upstream, port=port))
    return [program, "-e", "stderr", "-p", str(folder), "-c", str(conf)]


# --- measuring --------------------------------------------------------------------------------------------------


@dataclass
class Figures:
    """The results of a workload at one target. `cpu_us`: per call; None if no process was measured."""

    calls: int
    failed: int
    p50_ms: float
    p99_ms: float
    cpu_us: float | None = None
    peak_mb: float | None = None


def measure(target: Target, workload: Workload, load: Callable[..., Result]) -> Figures:
    if workload.warm_up:
        load(target.port, workload, workload.warm_up)
        time.sleep(0.1)
    before = cpu_seconds(target.pid) if target.pid else 0.0
    if target.pid:
        forget_peak(target.pid)
    result = load(target.port, workload, workload.calls)
    time.sleep(0.2)  # work after a response counts, too
    if result.failed:
        print(f"{workload.name}: {result.failed} wrong answers, the first: {result.wrong}", file=sys.stderr)
    times = sorted(result.seconds) or [float("nan")]
    figures = Figures(
        calls=len(result.seconds),
        failed=result.failed,
        p50_ms=statistics.median(times) * 1000,
        p99_ms=times[min(len(times) - 1, int(len(times) * 0.99))] * 1000,
    )
    if target.pid:
        figures.cpu_us = (cpu_seconds(target.pid) - before) / max(1, figures.calls) * 1e6
        figures.peak_mb = memory_mb(target.pid, "VmHWM")
    return figures


def measure_all(target: Target, workloads: Sequence[Workload], load: Callable[..., Result]) -> dict[str, Figures]:
    return {workload.name: measure(target, workload, load) for workload in workloads}


def help_seconds() -> float:
    """Return the seconds of `gateway --help`, the median of five runs."""
    runs = []
    for _ in range(5):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "gateway", "--help"], check=True, capture_output=True, env=environment())
        runs.append(time.perf_counter() - began)
    return statistics.median(runs)


@dataclass
class Report:
    """All measurements: seconds, MB, and figures by target and workload."""

    figures: dict[str, dict[str, Figures]] = field(default_factory=dict)
    first_answer_s: float | None = None
    idle_mb: float | None = None
    help_s: float | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def wrong_answers(self) -> int:
        return sum(figures.failed for by_workload in self.figures.values() for figures in by_workload.values())


def measure_gateway(
    report: Report,
    workloads: Sequence[Workload],
    folder: Path,
    load: Callable[..., Result],
    *,
    upstream: int,
    cpu: int | None,
) -> None:
    """Start a gateway three times, and measure it the last time."""
    starts = []
    for run in range(3):
        port = free_port()
        command = gateway_command(upstream, port, folder)
        log = folder / f"gateway-{port}.log"
        with started(command, port, cpu, log, cwd=folder, env=environment()) as (target, seconds):
            starts.append(seconds)
            if run == 2:
                time.sleep(1)
                report.idle_mb = memory_mb(target.pid or 0, "VmRSS")
                report.figures["gateway"] = measure_all(target, workloads, load)
    report.first_answer_s = statistics.median(starts)
    report.help_s = help_seconds()


def run(gateway: Target | None, workloads: Sequence[Workload]) -> Report:
    report = Report()
    cpus = sorted(os.sched_getaffinity(0))
    ours, theirs = (cpus[0], cpus[1]) if len(cpus) > 1 else (None, None)
    if ours is None:
        report.notes.append("one CPU only: the load and the gateway share it, so latencies say little")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 16384)), hard))
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="overhead-")))
        listener = stack.enter_context(
            socket.create_server(("127.0.0.1", FIXED_PORT if gateway else 0), backlog=BACKLOG)
        )
        upstream: int = listener.getsockname()[1]
        serving = SPAWN.Process(target=run_upstream, args=(listener, theirs), daemon=True)
        serving.start()
        stack.callback(serving.terminate)
        pool = stack.enter_context(ProcessPoolExecutor(1, mp_context=SPAWN, initializer=pin, initargs=(0, theirs)))

        def load(port: int, workload: Workload, calls: int) -> Result:
            return pool.submit(run_load, port, workload, calls).result()

        report.figures["direct"] = measure_all(Target(upstream, None), workloads, load)
        if gateway:
            report.figures["gateway"] = measure_all(gateway, workloads, load)
        else:
            measure_gateway(report, workloads, folder, load, upstream=upstream, cpu=ours)
        program = shutil.which("nginx")
        if program:
            port = free_port()
            command = nginx_command(program, upstream, port, folder)
            with started(command, port, ours, folder / "nginx.log") as (target, _seconds):
                report.figures["nginx"] = measure_all(target, workloads, load)
        else:
            report.notes.append("nginx is not on the PATH: no floor was measured")
    return report


# --- printing ----------------------------------------------------------------------------------------------------

COLUMNS = (
    ("workload", 38),
    ("CPU µs/call", 12),
    ("nginx", 8),
    ("above it", 9),
    ("µs/chunk", 9),
    ("nginx", 7),
    ("p50 ms", 9),
    ("direct", 8),
    ("p99 ms", 9),
    ("direct", 8),
    ("peak MB", 8),
    ("wrong", 6),
)


def table(report: Report) -> Iterator[str]:
    yield "".join(name.ljust(width) if i == 0 else name.rjust(width) for i, (name, width) in enumerate(COLUMNS))
    for workload in WORKLOADS:
        if workload.name not in report.figures["gateway"]:
            continue
        cells = row(report, workload)
        yield "".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, (_, width)) in enumerate(zip(cells, COLUMNS, strict=True))
        )


def row(report: Report, workload: Workload) -> list[str]:
    gateway, direct = (report.figures[name][workload.name] for name in ("gateway", "direct"))
    nginx = report.figures.get("nginx", {}).get(workload.name)
    cost = gateway.cpu_us or 0.0
    floor = nginx.cpu_us if nginx else None
    chunks = workload.chunks
    return [
        workload.name,
        f"{cost:,.0f}",
        f"{floor:,.0f}" if floor is not None else "",
        f"{cost - floor:,.0f}" if floor is not None else "",
        f"{cost / chunks:.1f}" if chunks else "",
        f"{floor / chunks:.1f}" if chunks and floor is not None else "",
        milliseconds(gateway.p50_ms),
        milliseconds(direct.p50_ms),
        milliseconds(gateway.p99_ms),
        milliseconds(direct.p99_ms),
        f"{gateway.peak_mb or 0:,.0f}",
        str(sum(figures[workload.name].failed for figures in report.figures.values())),
    ]


def milliseconds(value: float) -> str:
    return f"{value:,.2f}" if value < 100 else f"{value:,.0f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--gateway",
        metavar="URL:PID",
        type=running,
        help=f"one that already runs, with --upstream http://127.0.0.1:{FIXED_PORT}; else one is started",
    )
    parser.add_argument("--wire", choices=sorted(PATHS), help="only the workloads of this format; else all")
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    arguments = parser.parse_args()
    chosen = [workload for workload in WORKLOADS if arguments.wire in (None, workload.wire)]
    report = run(arguments.gateway, chosen)
    if arguments.json:
        print(json.dumps(asdict(report), indent=2))
    else:
        print("\n".join(table(report)))
        if report.first_answer_s is not None:
            print(f"\nstart to first answer  {report.first_answer_s:.2f} s (median of 3)")
            print(f"idle RSS               {report.idle_mb:.0f} MB")
            print(f"gateway --help         {report.help_s or 0:.2f} s (median of 5)")
        for note in report.notes:
            print(f"note: {note}")
    return 1 if report.wrong_answers else 0


if __name__ == "__main__":
    sys.exit(main())
