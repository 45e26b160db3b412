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
    Workload("stream, a chunk every 10 ms, 16 clients", 16, 2, warm_up=0, chunks=100, interval_s=0.01),
    Workload("turn of a session of 50,000 tokens", 1, 20, warm_up=2, history=320),
    Workload(
        "the same, trimmed to 25,000",
        1,
        20,
        warm_up=2,
        history=320,
        headers={"x-context-budget": "25000"},
        is_trimmed=True,
    ),
)
#: a quick run makes one eighth of the calls
_QUICK: Final = 8
#: holds that are settled in each run
_PAIRS: Final = 400
#: steps that are reported besides the workloads: the start, and the measurement of the store
OTHER_STEPS: Final = 2
#: seconds after which the work that follows a response is done; it belongs to the cost of the call
_SETTLES_S: Final = 0.2
_COUNTED_WITHIN_S: Final = 15.0
_PAGE: Final = 1000
_US: Final = 1e6
_MS: Final = 1e3
_MB: Final = 2**20
_LAST: Final = 0.99


@dataclass(frozen=True, slots=True)
class Times:
    """Durations of calls, from sending to the last byte of the response."""

    p50_ms: float
    p99_ms: float

    @classmethod
    def of(cls, seen: Sequence[TimedResponse]) -> Times:
        """Return the durations of these calls."""
        times = sorted(response.seconds * _MS for response in seen) or [0.0]
        last = times[min(len(times) - 1, int(len(times) * _LAST))]
        return cls(round(statistics.median(times), 3), round(last, 3))


@dataclass(frozen=True, slots=True)
class ResultRow:
    """The results of a workload. `cpu_us`: CPU time of the gateway per call, including settling and logging."""

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
    """The counts of all sessions of the gateway, and the tokens that the provider billed for them."""

    sessions: int
    calls: int
    tokens: int
    billed_tokens: int


@dataclass(frozen=True, slots=True)
class Report:
    """All results. `problems`: what was wrong; empty if nothing was."""

    workloads: tuple[ResultRow, ...]
    counted: Counted
    hold_and_settle_us: float | None
    start_s: float
    memory_mb: float | None
    memory_after_mb: float | None
    problems: tuple[str, ...]

    @property
    def calls_per_second(self) -> int | None:
        """Return the small calls per second that one worker handles with one core, or None if not measured."""
        return next((round(_US / row.cpu_us) for row in self.workloads if row.name == AT_ONCE and row.cpu_us), None)

    def as_json(self) -> dict[str, Any]:
        """Return the results as JSON."""
        return {**asdict(self), "calls_per_second_and_core": self.calls_per_second}


def fewer(todo: Sequence[Workload]) -> tuple[Workload, ...]:
    """Return the workloads with an eighth of the calls, which is faster and less exact."""
    return tuple(replace(load, calls=max(1, load.calls // _QUICK), warm_up=min(load.warm_up, 3)) for load in todo)


def run(todo: Sequence[Workload], tell: Callable[[str], None]) -> Report:
    """Start the servers, run all workloads, and clean up. `tell` receives each step before it begins.

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
    """Run workloads at both URLs, and collect problems and the usage reported for each session."""

    def __init__(self, billing: str, gateway: str) -> None:
        self._billing = billing
        self._gateway = gateway
        self._reported: dict[str, Counter[str]] = {}
        self.problems: list[str] = []

    def measured(self, number: int, workload: Workload, tell: Callable[[str], None]) -> ResultRow:
        """Run a workload at both URLs."""
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
        """Return the number of wrong or missing responses."""
        checked = [
            problem(response, direct_response, is_trimmed=workload.is_trimmed)
            for of_client, direct_of_client in zip(through, direct, strict=True)
            for response, direct_response in zip(of_client, direct_of_client, strict=False)
        ]
        wrong = [text for text in checked if text is not None]
        missing = workload.clients * (workload.warm_up + workload.calls) - len(checked)
        self.problems += [f"{workload.name}: {text}" for text in wrong]
        self.problems += [f"{workload.name}: {missing} calls were not made"] if missing else []
        return len(wrong) + missing

    def _note(self, sessions: Sequence[str], *rounds: Sequence[Sequence[TimedResponse]]) -> None:
        """Add the usage in the responses of each session."""
        for seen in rounds:
            for session, of_client in zip(sessions, seen, strict=True):
                reported = self._reported.setdefault(session, Counter())
                for response in of_client:
                    reported.update(_usage(response))

    def counted(self) -> Counted:
        """Return the counts of the gateway, compared with the usage in responses and with the provider's bill."""
        calls, deadline = sum(usage["calls"] for usage in self._reported.values()), time.monotonic() + _COUNTED_WITHIN_S
        totals = self._totals()
        while sum(total["calls"] for total in totals.values()) < calls and time.monotonic() < deadline:
            time.sleep(_SETTLES_S)
            totals = self._totals()
        self.problems += [
            f"session {name}: counted {dict(totals.get(name, {}))}, its responses reported "
            f"{dict(self._reported.get(name, {}))}"
            for name in sorted({*totals, *self._reported})
            if totals.get(name) != self._reported.get(name)
        ]
        ledger = _get(self._billing, "/__mock/billed")
        billed = Counter(_bill(ledger["total"]))
        for name, bill in ledger["sessions"].items():
            if name.startswith("direct-"):
                billed.subtract(_bill(bill))
        total = sum(totals.values(), Counter[str]())
        if total != billed:
            self.problems.append(f"in all: counted {dict(total)}, the provider billed {dict(billed)}")
        tokens, paid = (sums["input_tokens"] + sums["output_tokens"] for sums in (total, billed))
        return Counted(len(totals), total["calls"], tokens, paid)

    def _totals(self) -> dict[str, Counter[str]]:
        """Return the counts of the gateway by session."""
        return {
            session["id"]: Counter(_bill({**session["cumulative_token_usage"], "calls": session["calls"]}))
            for session in _get(self._gateway, f"/api/sessions?limit={_PAGE}")["sessions"]
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
    """Return the CPU seconds of a gateway so far, and its memory in MiB, if the system reports it."""
    figures = dict(re.findall(r"^(process_\w+)\S* (\S+)$", _read(gateway, "/metrics").decode(), re.MULTILINE))
    memory = figures.get("process_resident_memory_bytes")
    return float(figures["process_cpu_seconds_total"]), float(memory) / _MB if memory is not None else None


def _get(url: str, path: str) -> Mapping[str, Any]:
    value: Mapping[str, Any] = json.loads(_read(url, path))
    return value


def _read(url: str, path: str) -> bytes:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_COUNTED_WITHIN_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().read()
    finally:
        connection.close()
