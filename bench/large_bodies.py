"""Measure many concurrent large request bodies: how many are served, their memory, and the latency of /healthz.

Linux, standard library only. `python bench/large_bodies.py --help`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import multiprocessing
import random
import re
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from overhead import environment, forget_peak, free_port, gateway_command, memory_mb, started, whole_answer

MIB = 2**20
#: the requirement for /healthz while bodies are read
HEALTH_MS = 250.0
ASK_EVERY_S = 0.01
#: a slow machine needs minutes to count the tokens of 640 MiB
ANSWER_WITHIN_S = 900.0
SPAWN = multiprocessing.get_context("spawn")


# --- bodies -----------------------------------------------------------------------------------------------------


def message(text: str, role: str = "user") -> bytes:
    return json.dumps({"role": role, "content": text}, ensure_ascii=False).encode()


def chat(messages: Sequence[bytes], size: int) -> bytes:
    """Return a chat request of exactly `size` bytes, padded with spaces."""
    body = b'{"model":"bench","messages":[' + b",".join(messages) + b"]"
    return body + b" " * (size - len(body) - 1) + b"}"


def words(seed: int, alphabet: str = "etaoinshrdlu") -> str:
    """Return about 1 MB of prose-like text without equal lines."""
    some = random.Random(seed)
    return "\n".join(
        " ".join("".join(some.choices(alphabet, k=some.randint(2, 9))) for _ in range(16)) for _ in range(9000)
    )


def conversation(size: int, number: int) -> bytes:
    """Return a request with messages of 4 KB, one of them unique to this call."""
    line, found = words(number), [message(f"You are assistant {number}.", "system")]
    step, roles, left = 4000, ("user", "assistant"), size - 4000
    for place in range(size // step):
        start = place * step % (len(line) - step)
        raw = message(f"{number} {place} {line[start : start + step]}", roles[place % 2])
        left -= len(raw) + 1
        if left < 0:
            break
        found.append(raw)
    return chat(found, size)


def text(size: int, number: int) -> bytes:
    """Return a request with one message that has all of the text."""
    line = words(number)
    return chat([message((line * (size // len(line) + 1))[: size - 10_000 - size // 16])], size)


def cyrillic(size: int, number: int) -> bytes:
    """Return a request with messages of 64 KB in an alphabet of two bytes per letter, with an emoji in each."""
    line, found, left = words(number, "оеаинтсрвлкм"), [message("Ты помощник.", "system")], size - 4000
    while True:
        start = len(found) * 30_000 % (len(line) - 30_000)
        raw = message(f"\U0001f600 {len(found)} {line[start : start + 30_000]}")
        left -= len(raw) + 1
        if left < 0:
            return chat(found, size)
        found.append(raw)


def picture(size: int, number: int) -> bytes:
    """Return a question about one image in base64."""
    data = "iVBORw0KGgo" + "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdef" * ((size - 10_000) // 32)
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    parts = [{"type": "text", "text": f"What is this? {number}"}, url]
    return chat([json.dumps({"role": "user", "content": parts}).encode()], size)


def embeddings(size: int, number: int) -> bytes:
    """Return a request with inputs of 8 KB."""
    line = words(number)
    inputs = [line[at % (len(line) - 8000) :][:8000] for at in range(0, size - 100_000 - size // 64, 8000)]
    body = json.dumps({"model": "bench", "input": inputs}).encode()
    return body[:-1] + b" " * (size - len(body)) + b"}"


def file(size: int, number: int) -> bytes:
    """Return a file that the gateway forwards without reading it."""
    return bytes([number % 256]) * size


KINDS: dict[str, tuple[str, Callable[[int, int], bytes]]] = {
    "conversation": ("/v1/chat/completions", conversation),
    "text": ("/v1/chat/completions", text),
    "cyrillic": ("/v1/chat/completions", cyrillic),
    "picture": ("/v1/chat/completions", picture),
    "embeddings": ("/v1/embeddings", embeddings),
    "file": ("/v1/files", file),
}


# --- the provider, in its own process ---------------------------------------------------------------------------


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Read requests without storing them; the usage has the number of received bytes."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            found = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
            length = left = int(found[1]) if found else 0
            while left:
                piece = await reader.read(min(left, MIB))
                if not piece:
                    return
                left -= len(piece)
            content = whole_answer("chat", b"12345678", length)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n")
            writer.write(b"content-length: %d\r\n\r\n%b" % (len(content), content))
            await writer.drain()
    writer.close()


def provide(listener: socket.socket) -> None:
    async def serve() -> None:
        await (await asyncio.start_server(answer, sock=listener, limit=MIB)).serve_forever()

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve())


# --- the clients ------------------------------------------------------------------------------------------------


def ask_health(port: int, pipe: Connection) -> None:
    """Ask every 10 ms until the pipe gets a message, then send the latencies in ms."""
    found: list[float] = []
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.connect()
    pipe.send(None)
    while not pipe.poll(ASK_EVERY_S):
        began = time.perf_counter()
        connection.request("GET", "/healthz")
        connection.getresponse().read()
        found.append((time.perf_counter() - began) * 1e3)
    pipe.send(found)


@contextlib.contextmanager
def health(port: int) -> Iterator[list[float]]:
    """Yield the latencies of /healthz in ms; they are filled in at the end of the block."""
    found: list[float] = []
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=ask_health, args=(port, theirs), daemon=True)
    process.start()
    ours.recv()
    try:
        yield found
    finally:
        ours.send(None)
        found += ours.recv()
        process.join(10)


def send(port: int, path: str, body: bytes, ready: threading.Barrier, *, is_chunked: bool) -> str:
    """Send one body at the same time as the others; return "served", or the error."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_WITHIN_S)
    headers = {"content-type": "application/json", "x-session-id": f"bodies-{random.randrange(2**40)}"}
    connection.connect()
    ready.wait()
    try:
        if is_chunked:
            pieces = (body[at : at + MIB] for at in range(0, len(body), MIB))
            connection.request("POST", path, pieces, headers, encode_chunked=True)
        else:
            connection.request("POST", path, body, headers)
        reply = connection.getresponse()
        said = json.loads(reply.read())
    except OSError as error:
        return type(error).__name__
    finally:
        connection.close()
    if reply.status == http.HTTPStatus.OK:
        tokens = said["usage"]["prompt_tokens"]
        return "served" if tokens == len(body) // 4 else f"{tokens * 4} bytes came"
    return f"{reply.status} {said['error']['code']}"


@dataclass
class Figures:
    """The results of one workload. Memory in MiB, time in seconds, /healthz in ms."""

    kind: str
    bodies: int
    body_mb: int
    ends: dict[str, int]
    seconds: float
    before_mb: float
    peak_mb: float
    after_mb: float
    factor: float
    health_worst_ms: float
    health_p99_ms: float
    idle_worst_ms: float


def measure(kind: str, count: int, size_mb: int, options: argparse.Namespace) -> Figures:
    """Start a gateway and send it `count` bodies of this kind at once."""
    path, make = KINDS[kind]
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    provider = SPAWN.Process(target=provide, args=(listener,), daemon=True)
    provider.start()
    port, variables = free_port(), {**environment(), "GATEWAY_SERVER_MAX_BODY_MB": str(options.max_body_mb or size_mb)}
    try:
        with tempfile.TemporaryDirectory(prefix="large-bodies-") as folder:
            command = gateway_command(listener.getsockname()[1], port, Path(folder))
            log = Path(folder, "gateway.log")
            with started(command, port, None, log, env=variables) as (target, _):
                bodies = [make(size_mb * MIB, number) for number in range(count)]
                assert target.pid is not None
                with health(port) as idle:
                    time.sleep(3)
                before = memory_mb(target.pid, "VmRSS")
                forget_peak(target.pid)
                ready, began = threading.Barrier(count), time.perf_counter()
                with health(port) as latencies, ThreadPoolExecutor(count) as clients:
                    began = time.perf_counter()
                    sent = [
                        clients.submit(send, port, path, body, ready, is_chunked=options.chunked) for body in bodies
                    ]
                    ends = Counter(one.result() for one in sent)
                    seconds = time.perf_counter() - began
                peak, after = memory_mb(target.pid, "VmHWM"), memory_mb(target.pid, "VmRSS")
            if options.log:
                print(log.read_text(), file=sys.stderr)
    finally:
        provider.kill()
        listener.close()
    latencies.sort()
    held = max(1, ends["served"]) * size_mb
    return Figures(
        kind, count, size_mb, dict(ends), seconds, before, peak, after, (peak - before) / held,
        latencies[-1], latencies[int(len(latencies) * 0.99)], max(idle),
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", default=[*KINDS], help=f"kinds of bodies: {', '.join(KINDS)}; all")
    parser.add_argument("--count", type=int, default=10, help="bodies sent at once (10)")
    parser.add_argument("--mb", type=int, default=64, help="MiB of each body (64)")
    parser.add_argument("--max-body-mb", type=int, help="server.max_body_mb; the pool is 16 times that (--mb)")
    parser.add_argument("--chunked", action="store_true", help="send them without a content-length")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--log", action="store_true", help="print the gateway's log")
    options = parser.parse_args()
    is_met = True
    for kind in options.kinds:
        found = measure(kind, options.count, options.mb, options)
        is_met = is_met and found.health_worst_ms <= HEALTH_MS
        if options.json:
            print(json.dumps(asdict(found)), flush=True)
            continue
        ends = ", ".join(f"{times} {end}" for end, times in found.ends.items())
        print(
            f"{kind:13} {found.bodies} x {found.body_mb} MiB: {ends}; {found.seconds:.1f} s; memory "
            f"{found.before_mb:.0f} -> {found.peak_mb:.0f} MiB, then {found.after_mb:.0f}; "
            f"{found.factor:.2f} times the served bodies; /healthz p99 {found.health_p99_ms:.0f} ms, "
            f"worst {found.health_worst_ms:.0f} ms (idle {found.idle_worst_ms:.0f} ms)",
            flush=True,
        )
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
