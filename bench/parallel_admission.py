"""Measure how many of 50 parallel calls without an output limit share a small budget, and what goes wrong.

    python bench/parallel_admission.py [--calls 50] [--budget 6000] [--seed N] [--json]

README.md describes the measurements. The exit code is 1 if fewer than 15 streams of usual length are admitted, or if
the budget is exceeded by more than the documented bound.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from gateway import config
from gateway.app.worker import build_app
from gateway.server import serving

#: seconds for which a provider makes a token
TOKEN_S = 0.0025
INPUT = 20
#: earlier calls that teach the usual output
EARLIER = 16
#: median length of a response
USUAL = 90
#: how many times longer the responses are than those that were learned from, and the tokens in one event
SCENARIOS = {"usual": (1, 2), "2 times": (2, 2), "8 times": (8, 2), "8 times, long events": (8, 60)}
LEAST_ADMITTED = 15
#: bound of what a stream costs after its budget has ended it: its last read
LAST_READ_BYTES, EVENT_BYTES, TOKEN_BYTES = 16 * 1024, 120, 5


@dataclass(frozen=True)
class Result:
    """What happened to the parallel calls of one case."""

    scenario: str
    rule: str
    kind: str
    admitted: int
    refused: int
    cut_short: int
    billed: int
    overshoot: int


class Provider:
    """A provider that makes one token after the other, bills each one that it makes, and stops when it is left."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.billed = 0
        self.per_event = 2

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            head = await reader.readuntil(b"\r\n\r\n")
            size = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            body = json.loads(await reader.readexactly(size))
            await self._answer(body, reader, writer)
        writer.close()

    async def _answer(
        self, body: dict[str, object], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        wanted = self.lengths.pop() if self.lengths else USUAL
        limits = [body[name] for name in ("max_tokens", "max_completion_tokens") if isinstance(body.get(name), int)]
        length = min([wanted, *[limit for limit in limits if isinstance(limit, int)]])
        finish = "length" if length < wanted else "stop"
        usage = {"prompt_tokens": INPUT, "completion_tokens": length, "total_tokens": INPUT + length}
        self.billed += INPUT
        kind = "text/event-stream" if body.get("stream") else "application/json"
        start = f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\nconnection: close\r\n\r\n".encode()
        if not body.get("stream"):
            await asyncio.sleep(length * TOKEN_S)
            self.billed += length
            message = {"role": "assistant", "content": " word" * length}
            choice = {"index": 0, "message": message, "finish_reason": finish}
            writer.write(start + json.dumps({"id": "c", "model": "m", "choices": [choice], "usage": usage}).encode())
            await writer.drain()
            return
        left = asyncio.create_task(reader.read())
        left.add_done_callback(lambda task: task.cancelled() or task.exception())
        writer.write(start)
        made = 0
        while made < length:
            await asyncio.wait([left], timeout=min(self.per_event, length - made) * TOKEN_S)
            if left.done():
                return
            count = min(self.per_event, length - made)
            made += count
            self.billed += count
            writer.write(event({"delta": {"content": " word" * count}, "finish_reason": None}))
        left.cancel()
        last = {"id": "c", "model": "m", "choices": [], "usage": usage}
        writer.write(event({"delta": {}, "finish_reason": finish}) + data(last) + b"data: [DONE]\n\n")
        await writer.drain()


def data(value: Mapping[str, object]) -> bytes:
    return f"data: {json.dumps(value)}\n\n".encode()


def event(choice: dict[str, object]) -> bytes:
    return data({"id": "c", "object": "chat.completion.chunk", "model": "m", "choices": [{"index": 0, **choice}]})


def settings(folder: Path, upstream: str, budget: int) -> Path:
    file = folder / "gateway.yaml"
    values = {
        "providers": {"upstream": {"base_url": upstream, "auth": "none", "retries": 0}},
        "default_provider": "upstream",
        "built_in_providers": False,
        "models": [{"match": "m", "provider": "upstream", "reasoning": False, "output": 16_000, "window": 128_000}],
        "budget": {"tokens": budget},
        "store": {"url": f"sqlite://{folder / 'gateway.db'}"},
        "telemetry": {"log": {"level": "error"}},
    }
    file.write_text(json.dumps(values))
    return file


async def call(client: httpx.AsyncClient, session: str, *, stream: bool) -> tuple[int, str]:
    """Make a call; return its status and finish reason."""
    body = {"model": "m", "stream": stream, "messages": [{"role": "user", "content": "Name some words, please."}]}
    response = await client.post("/v1/chat/completions", json=body, headers={"x-session-id": session})
    text = response.text
    finish = "length" if '"finish_reason": "length"' in text or '"finish_reason":"length"' in text else "stop"
    return response.status_code, finish


def lengths(count: int, factor: int, chance: random.Random) -> list[int]:
    return [max(5, int(chance.lognormvariate(0, 0.4) * USUAL * factor)) for _ in range(count)]


async def measure(case: tuple[str, str, str], calls: int, budget: int, seed: int) -> Result:
    """Measure one case in a new gateway with an empty store."""
    scenario, rule, kind = case
    provider, chance = Provider(), random.Random(seed)
    server = await asyncio.start_server(provider.serve, "127.0.0.1", 0)
    address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    limits = httpx.Limits(max_connections=calls)
    with tempfile.TemporaryDirectory() as folder:
        file = settings(Path(folder), address, budget)
        app = build_app(lambda: config.load(file, environment={}))
        options = serving.make_config(app, max_head_bytes=2**16, max_body=2**24, head_timeout_s=10, grace_s=5)
        with serving.ServerThread(options) as thread:
            async with httpx.AsyncClient(base_url=thread.url, timeout=120, limits=limits) as client:
                if rule == "learned":
                    provider.lengths = lengths(EARLIER, 1, chance)
                    await asyncio.gather(*[call(client, f"earlier-{n}", stream=True) for n in range(EARLIER)])
                factor, provider.per_event = SCENARIOS[scenario]
                provider.lengths = lengths(calls, factor, chance)
                provider.billed = 0
                tasks = [call(client, "shared", stream=kind == "stream") for _ in range(calls)]
                answers = await asyncio.gather(*tasks)
        billed = provider.billed
    server.close()
    admitted = [finish for status, finish in answers if status == 200]
    cut_short = admitted.count("length")
    refused = len(answers) - len(admitted)
    return Result(scenario, rule, kind, len(admitted), refused, cut_short, billed, max(0, billed - budget))


async def measure_all(calls: int, budget: int, seed: int) -> list[Result]:
    cases = [
        (scenario, rule, kind)
        for scenario in SCENARIOS
        for kind in ("stream", "whole")
        for rule in ("unknown", "learned")
    ]
    return [await measure(case, calls, budget, seed) for case in cases]


def problems(results: Sequence[Result]) -> list[str]:
    """Return which results are outside their limits."""
    found = []
    for one in results:
        # Each ended stream may have sent its last read, and made one more event.
        per_event = SCENARIOS[one.scenario][1]
        ended_at = LAST_READ_BYTES // (EVENT_BYTES + per_event * TOKEN_BYTES) + 1
        bound = one.cut_short * ended_at * per_event if one.kind == "stream" else 0
        if one.overshoot > bound:
            found.append(f"{one}: the bound is {bound}")
        if (one.scenario, one.rule, one.kind) == ("usual", "learned", "stream") and one.admitted < LEAST_ADMITTED:
            found.append(f"{one}: at least {LEAST_ADMITTED} should be admitted")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=50)
    parser.add_argument("--budget", type=int, default=6_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    results = asyncio.run(measure_all(asked.calls, asked.budget, asked.seed))
    if asked.json:
        print(json.dumps([asdict(one) for one in results], indent=1))
    else:
        print(f"{asked.calls} parallel calls without a limit, a budget of {asked.budget:,} tokens, seed {asked.seed}\n")
        print(
            f"{'answers':20} {'kind':7} {'lengths':8} {'admitted':>9} {'cut short':>10} {'billed':>8} {'overshoot':>10}"
        )
        for one in results:
            print(
                f"{one.scenario:20} {one.kind:7} {one.rule:8} {one.admitted:9} {one.cut_short:10} "
                f"{one.billed:8,} {one.overshoot:10,}"
            )
    found = problems(results)
    for problem in found:
        print(problem, file=sys.stderr)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
