"""Run `gateway bench`: all workloads, their cost, and a check that every token was counted."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from gateway.bench import servers
from gateway.bench.load import Load, TimedResponse, Workload, problem
from gateway.bench.store import pair_us, record_of
from gateway.core.ledger.session_key import OPEN_NAMESPACE, SessionKey

AT_ONCE: Final = "small call, 32 clients"
WORKLOADS: Final = (
    Workload("small call, 1 client", 1, 400, warm_up=30),
    Workload("the same, with a budget", 1, 400, warm_up=10, headers={"x-session-budget-tokens": "1000000000"}),
    Workload(AT_ONCE, 32, 60, warm_up=3),
    Workload("stream, 100 chunks at once, 8 clients", 8, 30, chunks=100),
    Workload("stream, a chunk each 10 ms, 16 clients", 16, 2, warm_up=0, chunks=100, interval_s=0.01),
    Workload("turn of a session of 50,000 tokens", 1, 20, warm_up=2, history=320),
    Workload(
        "the same, cut to 25,000", 1, 20, warm_up=2, history=320, headers={"x-context-budget": "25000"}, is_cut=True
    ),
)
#: by what the calls of a quick run are fewer
_QUICK: Final = 8
#: holds that are settled in each of five runs
_PAIRS: Final = 400
#: what is told of beside the workloads: the start, and what is measured in the store
OTHER_STEPS: Final = 2
#: what is done after an answer belongs to its cost, and is done by then
_SETTLES_S: Final = 0.2
_COUNTED_WITHIN_S: Final = 15.0
_PAGE: Final = 1000
_US: Final = 1e6
_MS: Final = 1e3
_MB: Final = 2**20
_LAST: Final = 0.99


@dataclass(frozen=True, slots=True)
class Times:
    """How long calls took, from sending one to the last byte of its answer."""

    p50_ms: float
    p99_ms: float

    @classmethod
    def of(cls, seen: Sequence[TimedResponse]) -> Times:
        """Of these calls."""
        found = sorted(one.seconds * _MS for one in seen) or [0.0]
        last = found[min(len(found) - 1, int(len(found) * _LAST))]
        return cls(round(statistics.median(found), 3), round(last, 3))


@dataclass(frozen=True, slots=True)
class ResultRow:
    """What a workload came to. `cpu_us`: CPU time of the gateway for a call, settling and logging included."""

    name: str
    clients: int
    calls: int
    cpu_us: float
    cpu_us_per_chunk: float | None
    through: Times
    direct: Times
    wrong: int


@dataclass(frozen=True, slots=True)
class Counted:
    """What was counted in all sessions of the gateway, and what the provider billed for them."""

    sessions: int
    calls: int
    tokens: int
    billed_tokens: int


@dataclass(frozen=True, slots=True)
class Report:
    """Everything measured. `problems`: what was wrong, none where all is right."""

    workloads: tuple[ResultRow, ...]
    counted: Counted
    hold_and_settle_us: float | None
    start_s: float
    memory_mb: float | None
    memory_after_mb: float | None
    problems: tuple[str, ...]

    @property
    def calls_per_second(self) -> int | None:
        """Small calls that one worker takes with all of a core; None where they were not measured."""
        return next((round(_US / row.cpu_us) for row in self.workloads if row.name == AT_ONCE and row.cpu_us), None)

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {**asdict(self), "calls_per_second_and_core": self.calls_per_second}


def fewer(todo: Sequence[Workload]) -> tuple[Workload, ...]:
    """The same with an eighth of the calls: sooner done, and rougher."""
    return tuple(replace(one, calls=max(1, one.calls // _QUICK), warm_up=min(one.warm_up, 3)) for one in todo)


def run(todo: Sequence[Workload], tell: Callable[[str], None]) -> Report:
    """Start what is needed, measure, and leave nothing behind. `tell` hears of each step before it begins.

    Raises:
        NotStarted: a process did not start.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gateway-bench-")))
        tell("start")
        billing = stack.enter_context(servers.provider())
        started = stack.enter_context(servers.gateway(folder, billing))
        _, memory = _process(started.url)
        bench = Bench(billing, started.url)
        rows = [bench.measured(number, workload, tell) for number, workload in enumerate(todo)]
        _, after = _process(started.url)
        counted = bench.counted()
        tell("hold and settle")
        record = asyncio.run(record_of(started.store, SessionKey(OPEN_NAMESPACE, "gateway-0-0")))
        pair = asyncio.run(pair_us(folder / "pairs.db", record, _PAIRS)) if record is not None else None
    return Report(tuple(rows), counted, pair, started.after_s, memory, after, tuple(bench.problems))


class Bench:
    """Drives both places, and keeps what went wrong and what each session was told."""

    def __init__(self, billing: str, gateway: str) -> None:
        self._billing = billing
        self._gateway = gateway
        self._told: dict[str, Counter[str]] = {}
        self.problems: list[str] = []

    def measured(self, number: int, workload: Workload, tell: Callable[[str], None]) -> ResultRow:
        """Run a workload at both places."""
        tell(workload.name)
        with Load(self._billing, f"direct-{number}", workload) as load:
            direct_before, direct = load.warm_up(), load.run()
        with Load(self._gateway, f"gateway-{number}", workload) as load:
            before = load.warm_up()
            time.sleep(_SETTLES_S)
            used, _ = _process(self._gateway)
            through = load.run()
            time.sleep(_SETTLES_S)
            spent = (_process(self._gateway)[0] - used) * _US
        wrong = self._check(workload, (*before, *through), (*direct_before, *direct))
        self._note(load.sessions, before, through)
        calls = sum(map(len, through))
        cost = spent / max(1, calls)
        return ResultRow(
            workload.name,
            workload.clients,
            calls,
            round(cost, 1),
            round(cost / workload.chunks, 2) if workload.chunks else None,
            Times.of(list(chain.from_iterable(through))),
            Times.of(list(chain.from_iterable(direct))),
            wrong,
        )

    def _check(
        self, workload: Workload, through: Sequence[Sequence[TimedResponse]], direct: Sequence[Sequence[TimedResponse]]
    ) -> int:
        """How many answers are wrong, or missing."""
        found = [
            problem(one, its_own, is_cut=workload.is_cut)
            for of_client, its_direct in zip(through, direct, strict=True)
            for one, its_own in zip(of_client, its_direct, strict=False)
        ]
        wrong = [one for one in found if one is not None]
        missing = workload.clients * (workload.warm_up + workload.calls) - len(found)
        self.problems += [f"{workload.name}: {one}" for one in wrong]
        self.problems += [f"{workload.name}: {missing} calls were not made"] if missing else []
        return len(wrong) + missing

    def _note(self, sessions: Sequence[str], *rounds: Sequence[Sequence[TimedResponse]]) -> None:
        """What each session's answers said of their usage."""
        for seen in rounds:
            for session, of_client in zip(sessions, seen, strict=True):
                told = self._told.setdefault(session, Counter())
                for one in of_client:
                    told.update(_usage(one))

    def counted(self) -> Counted:
        """What the gateway counted, beside what its answers said and what the provider billed."""
        calls, deadline = sum(told["calls"] for told in self._told.values()), time.monotonic() + _COUNTED_WITHIN_S
        totals = self._totals()
        while sum(one["calls"] for one in totals.values()) < calls and time.monotonic() < deadline:
            time.sleep(_SETTLES_S)
            totals = self._totals()
        self.problems += [
            f"session {name}: counted {dict(totals.get(name, {}))}, its answers said {dict(self._told.get(name, {}))}"
            for name in sorted({*totals, *self._told})
            if totals.get(name) != self._told.get(name)
        ]
        ledger = _get(self._billing, "/__mock/billed")
        billed = Counter(_bill(ledger["total"]))
        for name, bill in ledger["sessions"].items():
            if name.startswith("direct-"):
                billed.subtract(_bill(bill))
        total = sum(totals.values(), Counter[str]())
        if total != billed:
            self.problems.append(f"in all: counted {dict(total)}, the provider billed {dict(billed)}")
        tokens, paid = (one["input_tokens"] + one["output_tokens"] for one in (total, billed))
        return Counted(len(totals), total["calls"], tokens, paid)

    def _totals(self) -> dict[str, Counter[str]]:
        """What the gateway counted, by session."""
        return {
            one["id"]: Counter(_bill({**one["cumulative_token_usage"], "calls": one["calls"]}))
            for one in _get(self._gateway, f"/api/sessions?limit={_PAGE}")["sessions"]
        }


def _usage(seen: TimedResponse) -> dict[str, int]:
    try:
        tokens_in, tokens_out = seen.read().usage or (0, 0)
    except ValueError:
        return {}
    return {"calls": 1, "input_tokens": tokens_in, "output_tokens": tokens_out}


def _bill(parts: Mapping[str, int]) -> dict[str, int]:
    return {name: parts[name] for name in ("calls", "input_tokens", "output_tokens")}


def _process(gateway: str) -> tuple[float, float | None]:
    """CPU seconds of a gateway so far, and the MB it takes, where the system tells."""
    figures = dict(re.findall(r"^(process_\w+)\S* (\S+)$", _read(gateway, "/metrics").decode(), re.MULTILINE))
    memory = figures.get("process_resident_memory_bytes")
    return float(figures["process_cpu_seconds_total"]), float(memory) / _MB if memory is not None else None


def _get(url: str, path: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(_read(url, path))
    return found


def _read(url: str, path: str) -> bytes:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_COUNTED_WITHIN_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().read()
    finally:
        connection.close()
