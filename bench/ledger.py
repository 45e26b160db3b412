"""Measure the cost of holds and settlements: CPU and latency in the store, and a budget under 64 concurrent calls.

    python bench/ledger.py [--json]

Linux. Redis is measured if `redis-server` is on the PATH. README.md describes the measurements. The exit code is 1 if a
limit is exceeded.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from decimal import Decimal
from multiprocessing.synchronize import Barrier
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any

import uvloop
from chaos import Bill, Call, Gateway, RedisNode, Session, make, provider, unsettled, write_config

from gateway import config
from gateway.app import resources, worker
from gateway.core.ids import call_id
from gateway.core.ledger.arithmetic import AccountKey, Amount, Claim, Granted, Hold, Limits
from gateway.core.ledger.session_key import SessionKey
from gateway.core.ports import Store
from gateway.core.record import ORPHANED, CallRecord, ContextRecord
from gateway.core.stored import OpenHold
from gateway.core.usage import Charge, Usage

SPAWN = multiprocessing.get_context("spawn")
PAIRS, WARM_UP = 2_000, 300
AT_ONCE, ROUNDS, PROCESSES = 64, 25, 4
#: Number of stores for the rounds. The calls of a round wait together, so few rounds give a slowest call instead of a
#: p99.
STORES = 4
#: pause between two rounds: a burst is measured, not a queue that only grows
PAUSE_S = 0.05
BARS_US = {"sqlite": 150.0, "redis": 250.0}
P99_BAR_MS = 20.0
LIMIT = 10**12


# --- holds and settlements --------------------------------------------------------------------------------------------

SESSION = SessionKey("default", "agent-7f3a")
RECORD = CallRecord(
    call_id="", request_id="", session=SESSION, derived_session=False, started_at=0.0, dialect="chat",
    operation="chat", provider="openai", model="gpt-5-mini", response_model="gpt-5-mini-2025-08-07", stream=True,
    status=200, outcome="ok", error_code=None, finish_reason="tool_calls", tools=("search", "read_file"),
    charge=Charge(Usage(4_210, 312, 4_522, 3_968, 0, 64, 0, 0), "provider", Decimal("0.00123456")),
    overhead_s=0.0021, first_byte_s=0.412, duration_s=3.1, request_bytes=18_204, response_bytes=22_118,
    context=ContextRecord(
        tokens=4_230, original_tokens=4_230, source="learned", budget=100_000, conversation_tokens=2_100,
        tool_tokens=2_130, key="openai\ngpt-5-mini\nchat\n", estimate=4_180,
    ),
    accounts=(SESSION.account,), spent=Amount(4_522, 1_234_560, 1),
)  # fmt: skip


def claims(count: int) -> tuple[Claim, ...]:
    """Return the account of the session with a budget; for three, also those of its client key and its parent."""
    keys = [AccountKey("key", "default"), SessionKey("default", "parent").account, SESSION.account]
    return tuple(Claim(key, Limits(tokens=LIMIT)) for key in keys[-count:])


def pair(accounts: int) -> tuple[OpenHold, CallRecord]:
    """Return the hold of a call and its record."""
    charged, now = claims(accounts), time.time()
    name = call_id(int(now * 1000), secrets.token_bytes(10))
    keys = tuple(claim.key for claim in charged)
    record = replace(RECORD, call_id=name, request_id=name, started_at=now, accounts=keys)
    orphaned = replace(record, outcome=ORPHANED, charge=Charge(Usage.of(4_400, 0), "estimated", Decimal("0.0011")))
    hold = Hold(name, charged, Amount(4_400, 1_100_000, 1), Amount(1, 2_000), 16, 4_096)
    return OpenHold(hold, orphaned, unit_usd=Decimal("0.000002")), record


async def hold_and_settle(store: Store, opened: OpenHold, record: CallRecord) -> None:
    assert isinstance(await store.reserve(opened, 180.0), Granted)
    await store.settle(record)


def open_store(url: str) -> Store:
    settings = config.Settings.model_validate({"store": {"url": url, "timeout_ms": 5_000}})
    return resources.open_store(settings)


# --- measuring --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figure:
    """One row. `bar`: the maximum; None: for information only."""

    what: str
    store: str
    value: float
    unit: str
    bar: float | None = None

    @property
    def is_met(self) -> bool:
        return self.bar is None or self.value <= self.bar


async def cpu_us(url: str, accounts: int, at_once: int) -> float:
    """Return the CPU time for a hold and its settlement: the least of five runs, as other work only adds."""
    store = open_store(url)
    try:
        runs = []
        for number in range(6):
            count = PAIRS // 5 if number else WARM_UP
            todo = [pair(accounts) for _ in range(count)]
            worker.collect_rarely()
            began = time.process_time()
            if at_once == 1:
                for one in todo:
                    await hold_and_settle(store, *one)
            for start in range(0, count, at_once) if at_once > 1 else ():
                await asyncio.gather(*(hold_and_settle(store, *one) for one in todo[start : start + at_once]))
            runs.append((time.process_time() - began) / count * 1e6)
        return min(runs[1:])
    finally:
        await store.aclose()


async def burst(url: str, count: int, barrier: Callable[[], Awaitable[Any]]) -> list[float]:
    """Return the seconds of `count` concurrent holds with their settlements, repeatedly."""
    store, seconds = open_store(url), list[float]()

    async def timed(opened: OpenHold, record: CallRecord, *, counts: bool) -> None:
        began = time.perf_counter()
        await hold_and_settle(store, opened, record)
        if counts:
            seconds.append(time.perf_counter() - began)

    try:
        worker.collect_rarely()
        for number in range(ROUNDS + 2):
            todo = [pair(1) for _ in range(count)]
            await barrier()
            await asyncio.gather(*(timed(*one, counts=number > 1) for one in todo))
            await asyncio.sleep(PAUSE_S)
        return seconds
    finally:
        await store.aclose()


_barrier: Barrier | None = None


def set_barrier(barrier: Barrier) -> None:
    global _barrier  # noqa: PLW0603  # noqa: PLW0603  # an initializer cannot pass a value in another way
    _barrier = barrier


def burst_in_step(url: str, count: int) -> list[float]:
    """Run a burst at the same time as other processes."""
    barrier = _barrier
    assert barrier is not None

    async def together() -> None:
        await asyncio.to_thread(barrier.wait, 30)

    return uvloop.run(burst(url, count, together))


def bursts(url: str) -> list[float]:
    """Return the seconds of the same number of calls, distributed over several processes."""
    barrier = SPAWN.Barrier(PROCESSES)
    with ProcessPoolExecutor(PROCESSES, mp_context=SPAWN, initializer=set_barrier, initargs=(barrier,)) as pool:
        running = [pool.submit(burst_in_step, url, AT_ONCE // PROCESSES) for _ in range(PROCESSES)]
        # If one process fails, the others only report that it is missing.
        running.sort(key=lambda one: isinstance(one.exception(), BrokenBarrierError))
        return [second for one in running for second in one.result()]


def measured(kind: str, fresh: Callable[[], str]) -> Iterator[Figure]:
    """Yield the figures, each with its own store, so that no store is slower because of earlier data."""
    one = uvloop.run(cpu_us(fresh(), 1, 1))
    yield Figure("CPU of hold + settle, one after the other", kind, one, "µs", BARS_US[kind])
    yield Figure("the same, 64 at once", kind, uvloop.run(cpu_us(fresh(), 1, AT_ONCE)), "µs", BARS_US[kind])
    yield Figure("the same on three accounts, one by one", kind, uvloop.run(cpu_us(fresh(), 3, 1)), "µs")

    async def at_once() -> None:
        pass

    alone = [second for _ in range(STORES) for second in uvloop.run(burst(fresh(), AT_ONCE, at_once))]
    yield from _latency("64 at once, one process", kind, alone)
    overhead = [second for _ in range(STORES) for second in bursts(fresh())]
    yield from _latency(f"64 at once, {PROCESSES} processes", kind, overhead)


def _latency(what: str, kind: str, seconds: Sequence[float]) -> Iterator[Figure]:
    ordered = sorted(seconds)
    yield Figure(f"{what}: p50", kind, ordered[len(ordered) // 2] * 1000, "ms")
    yield Figure(f"{what}: p99", kind, ordered[int(len(ordered) * 0.99)] * 1000, "ms", P99_BAR_MS)


# --- through the gateway ----------------------------------------------------------------------------------------------


async def one_budget(folder: Path, kind: str, url: str) -> list[Figure]:
    """Make 64 concurrent calls over 4 workers in one session, repeatedly until its budget is used up."""
    session = Session("one", limit=30_000)
    with provider() as (upstream, bills):
        file = write_config(folder, upstream, url, "closed")
        gateway = Gateway(folder, file, PROCESSES)
        gateway.start()
        try:
            await gateway.ready()
            await gateway.set_limit(session.id, session.limit or 0)
            answered = refused = 0
            for wave in range(20):
                calls = [
                    Call(f"w{wave}-{number}", session, "chaos", 20, stream=number % 2 == 0, ask_usage=False,
                         max_tokens=60, answers=1, mock="delay=0.05")
                    for number in range(AT_ONCE)
                ]  # fmt: skip
                seen = await asyncio.gather(*(make(call, gateway.port) for call in calls))
                answered += sum(one.how == "ended" for one in seen)
                refused += sum(one.code.startswith(("400", "429")) for one in seen)
                if all(one.code.startswith("400") for one in seen):
                    break
            return [
                *await _books(file, folder, kind, session, bills()),
                Figure("calls answered", kind, answered, ""),
                Figure("calls refused", kind, refused, ""),
                Figure("calls that ended otherwise", kind, AT_ONCE * (wave + 1) - answered - refused, "", 0),
            ]
        finally:
            gateway.stop()


async def _books(file: Path, folder: Path, kind: str, session: Session, bills: Sequence[Bill]) -> list[Figure]:
    store = resources.open_store(config.load(file, environment={}).settings)
    try:
        totals = await store.totals(session.key)
        left = await unsettled(store, folder, [session])
    finally:
        await store.aclose()
    billed = sum(bill.total for bill in bills)
    over = max(0, totals.total_tokens - (session.limit or 0))
    return [
        Figure("64 calls at once, 4 workers, 1 budget: over it", kind, over, "tokens", 0),
        Figure("its totals beside what was billed: off by", kind, abs(totals.total_tokens - billed), "tokens", 0),
        Figure("holds and journals left", kind, len(left), "", 0),
    ]


# --- printing ---------------------------------------------------------------------------------------------------------


def run(folder: Path) -> Iterator[Figure]:
    numbers = iter(range(100))

    def new_file() -> str:
        return f"sqlite://{folder / f'ledger-{next(numbers)}.db'}"

    yield from measured("sqlite", new_file)
    yield from uvloop.run(one_budget(_folder(folder / "sqlite"), "sqlite", new_file()))
    if shutil.which("redis-server") is None:
        print("redis-server is not on the PATH: it was not measured", file=sys.stderr)
        return
    node = RedisNode(folder / "redis-node", "--appendfsync", "everysec")
    try:

        def emptied() -> str:
            node.flush()
            return node.url

        yield from measured("redis", emptied)
        yield from uvloop.run(one_budget(_folder(folder / "redis"), "redis", emptied()))
    finally:
        node.kill()


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


def line(figure: Figure) -> str:
    value = f"{figure.value:,.1f}" if figure.unit in ("µs", "ms") else f"{figure.value:,.0f}"
    bar = "" if figure.bar is None else f"{figure.bar:,.0f}  {'met' if figure.is_met else 'MISSED'}"
    return f"{figure.store:<8}{figure.what:<48}{value:>10} {figure.unit:<7}{bar:>14}".rstrip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    as_json = parser.parse_args().json
    figures = []
    with tempfile.TemporaryDirectory(prefix="ledger-") as folder:
        if not as_json:
            print(f"{'store':<8}{'':<48}{'':>10} {'':<7}{'bar':>6}")
        for figure in run(Path(folder)):
            figures.append(figure)
            if not as_json:
                print(line(figure), flush=True)
    if as_json:
        print(json.dumps([{**asdict(figure), "met": figure.is_met} for figure in figures], indent=2))
    return 0 if all(figure.is_met for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
