"""Measure the CPU time of counting and trimming in a gateway process, and how long its event loop is blocked.

    python bench/context_work.py [--json] [--plot docs/img/context-work.svg] [--doc bench/context-work.md]

Linux. A gateway is started in front of the built-in provider, and one agent session grows in it, turn by turn, over one
connection. CPU time is measured by the clock of the process, in nanoseconds. Each session is played twice: alone, for
the CPU time, and with a request to /healthz every 5 ms, for the delay of the event loop.

To separate counting and trimming from the rest of a call, the same bodies are also sent to `/v1/images/generations`.
Such a call is read, named, forwarded, metered and settled like a chat, but its format is not counted. A straight line
through the cost of these calls gives the cost of forwarding alone for a body of any size.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import math
import multiprocessing
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from functools import lru_cache
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from overhead import cpu_seconds, environment, free_port

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from wires import elements_of  # noqa: E402

from gateway.core.counting.measure import Wire  # noqa: E402
from gateway.core.trimming.preread import START  # noqa: E402
from gateway.mock import MockServer  # noqa: E402

CHAT, UNWEIGHED = "/v1/chat/completions", "/v1/images/generations"
#: other formats in which the session is played
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
OTHERS = {MESSAGES: "Messages", RESPONSES: "Responses"}
#: Tokens of the growing session at its end, and of the history that is sent at once; bytes of the large body.
FINAL, HISTORY, LARGE = 120_000, 100_000, 4_000_000
#: number of fresh gateways for measurements of a first request
FRESH = 3
ASK_EVERY_S = 0.005
SPAWN = multiprocessing.get_context("spawn")

#: limits in ms; the first is the difference to forwarding alone
BARS = {
    "not trimmed": 2.0,
    "not trimmed, prepares": 50.0,
    "after a trim": 50.0,
    "trim": 50.0,
    "new history, fits": 300.0,
    "new history, trimmed": 300.0,
    "4 MB, first call": 300.0,
    "4 MB, next call": 20.0,
}
LAG_BAR = 20.0


# --- the session ------------------------------------------------------------------------------------------------------

WORDS = """
    request response session order invoice customer payment retry queue worker cache index shard replica token
    budget window handler timeout connection upstream region bucket snapshot migration schema column record batch
    failed passed skipped pending delayed expired restored checked updated created removed moved merged rejected
    slow fast partial stale empty missing duplicate unknown remote local nightly weekly primary secondary internal
""".split()  # noqa: SIM905 - a list would be sixty lines
NAMES = """
    amber birch cedar delta ember fjord grove heron iris jade kelp lotus maple nova onyx pearl quartz raven
""".split()  # noqa: SIM905
LEVELS = ("INFO", "WARN", "ERROR")
SYSTEM = (
    "You are an agent that keeps a shop's services running. Use the tools, read what they say, and work in small "
    "steps. Never restart a service without having read its log. Say in one sentence what you do next."
)
TASK = (
    "Since last night some orders are charged twice. Find out which service does it, since which release, and which "
    "customers were hit; then propose a change to the code and a query that finds all the duplicates."
)
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "description": said, "parameters": {"type": "object"}}}
    for name, said in (
        ("search_orders", "Orders that match a filter, as JSON."),
        ("read_log", "Lines of a service's log."),
        ("read_file", "A part of a source file."),
        ("describe", "The state of a service."),
        ("run_tests", "The outcome of a test run."),
    )
]


class Script:
    """The turns of an agent, all different from each other, and the same ones on every run."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._made = 0

    def opening(self) -> list[bytes]:
        return [_raw({"role": "system", "content": SYSTEM}), _raw({"role": "user", "content": TASK})]

    def turn(self) -> list[bytes]:
        """Return the messages of one turn, a reply and its result: about 350 to 600 tokens."""
        self._made += 1
        kinds = (self._orders, self._log, self._file, self._service, self._tests)
        name, arguments, result = kinds[self._made % len(kinds)]()
        number = f"call_{self._id(12)}"
        call = {"id": number, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        said = f"I look at {self._name()} next: {self._words(9)}."
        return [
            _raw({"role": "assistant", "content": said, "tool_calls": [call]}),
            _raw({"role": "tool", "tool_call_id": number, "content": result}),
        ]

    def _id(self, length: int) -> str:
        return "".join(self._random.choices("0123456789abcdef", k=length))

    def _name(self) -> str:
        return f"{self._random.choice(NAMES)}-{self._random.choice(WORDS)}"

    def _words(self, count: int) -> str:
        return " ".join(self._random.choices(WORDS, k=count))

    def _time(self) -> str:
        pick = self._random.randrange
        return f"2026-11-{pick(10, 21)}T{pick(24):02}:{pick(60):02}:{pick(60):02}Z"

    def _orders(self) -> tuple[str, dict[str, Any], str]:
        service = self._name()
        rows = [
            {
                "order": f"ord_{self._id(8)}",
                "customer": f"{self._random.choice(NAMES)}.{self._id(4)}@example.com",
                "amount": round(self._random.uniform(3, 900), 2),
                "state": self._random.choice(WORDS),
                "at": self._time(),
            }
            for _ in range(self._random.randrange(6, 9))
        ]
        return "search_orders", {"service": service, "limit": len(rows)}, json.dumps({"total": len(rows), "rows": rows})

    def _log(self) -> tuple[str, dict[str, Any], str]:
        service = self._name()
        lines = [
            f"{self._time()} {self._random.choice(LEVELS)} {service} {self._words(7)} id={self._id(6)}"
            for _ in range(self._random.randrange(9, 14))
        ]
        return "read_log", {"service": service, "last": len(lines)}, "\n".join(lines)

    def _file(self) -> tuple[str, dict[str, Any], str]:
        path = f"services/{self._name()}/{self._random.choice(WORDS)}.py"
        lines = []
        for _ in range(self._random.randrange(6, 9)):
            a, b, c = self._random.choices(WORDS, k=3)
            lines += [
                f"def {a}_{b}_{self._id(3)}(self, {c}: str) -> int:",
                f'    """{self._words(8).capitalize()}."""',
                f"    found = self._{b}.get({c}, {self._random.randrange(999)})",
                f"    return found + len({c})",
                "",
            ]
        return "read_file", {"path": path, "from": self._random.randrange(400)}, "\n".join(lines)

    def _service(self) -> tuple[str, dict[str, Any], str]:
        service = self._name()
        state: dict[str, Any] = {"service": service, "release": f"{self._random.randrange(9)}.{self._id(7)}"}
        for word in self._random.sample(WORDS, k=9):
            state[word] = {
                "host": f"10.{self._random.randrange(256)}.{self._random.randrange(256)}.7",
                "state": self._random.choice(WORDS),
                "since": self._time(),
            }
        return "describe", {"service": service}, json.dumps(state, indent=1)

    def _tests(self) -> tuple[str, dict[str, Any], str]:
        lines = [
            f"tests/test_{self._random.choice(WORDS)}.py::test_{'_'.join(self._random.choices(WORDS, k=4))} "
            f"{self._random.choice(('PASSED', 'PASSED', 'FAILED'))} [{self._random.random():.3f} s]"
            for _ in range(self._random.randrange(13, 18))
        ]
        closing = f"The first failure says: {self._words(14)}. {self._words(12).capitalize()}."
        return "run_tests", {"path": f"tests/{self._name()}"}, "\n".join([*lines, closing])


def _raw(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode()


def body_of(messages: Sequence[bytes], path: str = CHAT) -> bytes:
    """Return a request with chat messages in the format of an endpoint; the image endpoint gets a chat as prompt."""
    if path in OTHERS:
        return _in_other_words(messages, path)
    head = b'{"model": "gpt-4o", "prompt": "x", "tools": ' + json.dumps(TOOLS).encode() + b', "messages": ['
    return head + b", ".join(messages) + b"]}"


def _in_other_words(messages: Sequence[bytes], path: str) -> bytes:
    functions = [tool["function"] for tool in TOOLS]
    if path == MESSAGES:
        tools = [
            {"name": one["name"], "description": one["description"], "input_schema": one["parameters"]}
            for one in functions
        ]
        rest = {"model": "claude-sonnet-4-5", "max_tokens": 100, "system": SYSTEM, "tools": tools}
        array, elements = b"messages", [_elements("messages", raw) for raw in messages[1:]]
    else:
        rest = {"model": "gpt-4o", "tools": [{"type": "function", **one} for one in functions]}
        array, elements = b"input", [_elements("responses", raw) for raw in messages]
    return json.dumps(rest).encode()[:-1] + b', "' + array + b'": [' + b", ".join(elements) + b"]}"


@lru_cache(maxsize=10_000)
def _elements(wire: Wire, raw: bytes) -> bytes:
    """Return a chat message as elements of another format."""
    return b", ".join(map(_raw, elements_of(wire, [json.loads(raw)])))


def history_of(size: int, seed: int) -> list[bytes]:
    """Return messages of at least this number of bytes."""
    script = Script(seed)
    messages, length = script.opening(), 0
    while length < size:
        turn = script.turn()
        messages += turn
        length += sum(map(len, turn)) + 4
    return messages


# --- processes --------------------------------------------------------------------------------------------------------


def serve_provider(pipe: Connection) -> None:
    """Run the built-in provider until the process is stopped."""
    with MockServer() as server:
        pipe.send(server.url)
        with contextlib.suppress(KeyboardInterrupt, EOFError):
            pipe.recv()


@contextlib.contextmanager
def provider() -> Iterator[str]:
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=serve_provider, args=(theirs,), daemon=True)
    process.start()
    theirs.close()  # so that the wait ends if the provider does not start
    try:
        yield ours.recv()
    finally:
        process.terminate()
        process.join()


CONFIG = """
providers: {{bench: {{base_url: "{url}", key: none}}}}
default_provider: bench
built_in_providers: false
models: [{{match: "*", provider: bench, window: 8000000, tokenizer: o200k_base}}]
store: {{url: "sqlite://{folder}/gateway.db"}}
"""


@dataclass
class Running:
    """A gateway, and a persistent connection to it."""

    pid: int
    port: int
    client: http.client.HTTPConnection


class WrongAnswer(Exception):
    """A call did not get the expected response."""


@contextlib.contextmanager
def gateway(more: str = "") -> Iterator[Running]:
    """Yield a fresh gateway in front of a fresh provider. Its tokenizer is loaded, and it has served a small call.

    `more`: additional YAML of its configuration.
    """
    port = free_port()
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(provider())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="context-work-")))
        (folder / "gateway.yaml").write_text(CONFIG.format(url=url, folder=folder) + more)
        command = [sys.executable, "-m", "gateway", "serve", "--port", str(port), "--config", "gateway.yaml"]
        log = stack.enter_context((folder / "log").open("wb"))
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, env=environment())
        stack.callback(process.wait, 20)
        stack.callback(process.terminate)
        running = Running(process.pid, port, http.client.HTTPConnection("127.0.0.1", port, timeout=60))
        stack.callback(running.client.close)
        _wait_for(running, process, folder / "log")
        for path in (CHAT, UNWEIGHED):
            for _ in range(3):
                call(running, body_of([*Script(1).opening(), *Script(2).turn()]), session="warm", path=path)
        try:
            yield running
        except WrongAnswer as wrong:
            sys.exit(f"{wrong}\n{(folder / 'log').read_text()[-4000:]}")


def _wait_for(running: Running, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 20
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", running.port), 1):
            return
        if process.poll() is not None or time.monotonic() > end:
            sys.exit(f"the gateway did not start:\n{log.read_text()}")
        time.sleep(0.01)


def ask_health(port: int, pipe: Connection) -> None:
    """Ask every 5 ms on a separate connection until the pipe gets a message; then send (time, ms) of each request."""
    found: list[tuple[float, float]] = []
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        due = time.monotonic()
        while not pipe.poll():
            began = time.monotonic()
            connection.sendall(b"GET /healthz HTTP/1.1\r\nhost: bench\r\n\r\n")
            while not connection.recv(65536).endswith(b"}"):
                pass
            now = time.monotonic()
            found.append((began, (now - began) * 1e3))
            due = max(due + ASK_EVERY_S, now)
            time.sleep(due - now)
    pipe.recv()
    pipe.send(found)


class Asking:
    """Ask /healthz in the background during each phase."""

    def __init__(self, port: int) -> None:
        self._ours, theirs = SPAWN.Pipe()
        self._process = SPAWN.Process(target=ask_health, args=(port, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._marks: list[tuple[str, float, float]] = []

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self._marks.append((name, began, time.monotonic()))

    def ended(self) -> dict[str, list[float]]:
        """Return the ms of all requests of each phase."""
        self._ours.send(None)
        found = self._ours.recv()
        self._process.join()
        return {name: [ms for at, ms in found if began <= at < end] for name, began, end in self._marks}


# --- measuring --------------------------------------------------------------------------------------------------------


@dataclass
class Turn:
    """One call: its body, the token counts of the gateway, CPU and wall time in ms."""

    size: int
    original: int = 0
    sent: int = 0
    trimmed: str = "none"
    cpu: float = 0.0
    wall: float = 0.0


def call(
    running: Running, body: bytes, *, session: str, path: str = CHAT, budget: int | None = None, alone: bool = True
) -> Turn:
    """Make a call; with `alone`, wait until the process has finished all work for it."""
    headers = {"content-type": "application/json", "x-session-id": session}
    if budget is not None:
        headers["x-context-budget"] = str(budget)
    before, began = cpu_seconds(running.pid), time.perf_counter()
    running.client.request("POST", path, body, headers)
    answer = running.client.getresponse()
    content = answer.read()
    wall = time.perf_counter() - began
    if answer.status != http.HTTPStatus.OK:
        raise WrongAnswer(f"{path} answered {answer.status}: {content[:300]!r}")
    turn = Turn(len(body), wall=wall * 1e3)
    if alone:
        turn.cpu = (_at_rest(running.pid) - before) * 1e3
    if path != UNWEIGHED:
        turn.original = int(answer.headers["x-context-tokens-original"])
        turn.sent = int(answer.headers["x-context-tokens"])
        turn.trimmed = answer.headers["x-context-trimmed"]
    return turn


def _at_rest(pid: int) -> float:
    """Return the CPU seconds of the process once it has been idle for 3 ms."""
    spent = cpu_seconds(pid)
    for _ in range(100):
        time.sleep(0.003)
        before, spent = spent, cpu_seconds(pid)
        if spent - before < 0.0001:
            break
    return spent


class Play(Protocol):
    """Make calls to a fresh gateway."""

    def __call__(self, running: Running, *, alone: bool = True) -> list[Turn]: ...


def growing(name: str, turns: int | None, *, path: str = CHAT, budget: int | None = None) -> Play:
    """Return a session of this number of turns; None: until it has the final size."""

    def play(running: Running, *, alone: bool = True) -> list[Turn]:
        script = Script(7)
        messages, found = script.opening(), list[Turn]()
        while len(found) < turns if turns is not None else not found or found[-1].original < FINAL:
            body = body_of(messages, path)
            found.append(call(running, body, session=name, path=path, budget=budget, alone=alone))
            messages += script.turn()
        return found

    return play


def at_once(size: int, *, budget: int | None = None) -> Play:
    """Return a new history of this number of bytes, sent at once, and again with one more turn."""

    def play(running: Running, *, alone: bool = True) -> list[Turn]:
        messages = history_of(size, 7)
        more = [*messages, *Script(8).turn()]
        return [call(running, body_of(m), session="once", budget=budget, alone=alone) for m in (messages, more)]

    return play


@dataclass
class Line:
    """A straight line."""

    start: float
    slope: float

    def at(self, x: float) -> float:
        return self.start + self.slope * x

    @classmethod
    def through(cls, points: Sequence[tuple[float, float]]) -> Line:
        """Return the line through points by least squares."""
        mean_x, mean_y = (sum(p[i] for p in points) / len(points) for i in (0, 1))
        slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
        return cls(mean_y - slope * mean_x, slope)


@dataclass
class Row:
    """Calls of one kind, in ms of CPU; `beyond`: the difference to forwarding alone; `bar` applies to `barred`."""

    kind: str
    calls: int
    whole: dict[str, float]
    beyond: dict[str, float]
    wall_p95: float
    bar: float
    barred: float


@dataclass
class Lag:
    """The latency of /healthz during other work, in ms."""

    phase: str
    asked: int
    p50: float
    p99: float
    worst: float
    #: worst and p99, minus their values when idle
    beyond_p99: float = 0.0
    beyond_worst: float = 0.0


@dataclass
class Report:
    rows: list[Row] = field(default_factory=list)
    lags: list[Lag] = field(default_factory=list)
    #: session -> received tokens of each turn, and CPU seconds of counting and trimming up to that turn
    work: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    cuts: list[dict[str, Any]] = field(default_factory=list)
    forwarding: Line = field(default_factory=lambda: Line(0, 0))
    final_tokens: int = 0
    budget: int = 0


def spread(values: Sequence[float]) -> dict[str, float]:
    values = sorted(values)
    return {"p50": _share(values, 0.5), "p95": _share(values, 0.95), "max": values[-1]}


def _share(values: Sequence[float], share: float) -> float:
    return values[min(len(values) - 1, int(len(values) * share))]


def row(kind: str, turns: Sequence[Turn], forwarding: Line, form: str = "") -> Row:
    whole = spread([turn.cpu for turn in turns])
    beyond = spread([turn.cpu - forwarding.at(turn.size) for turn in turns])
    barred = beyond["p95"] if kind == "not trimmed" else whole["p95"]
    name = f"{kind}, {form}" if form else kind
    return Row(name, len(turns), whole, beyond, spread([turn.wall for turn in turns])["p95"], BARS[kind], barred)


def split(turns: Sequence[Turn], budget: int) -> tuple[list[Turn], list[Turn], list[Turn]]:
    """Return the turns that fit but read ahead for a trim, the turns that continue a trim, and the turns that trim.

    A turn trims if it changes other messages than the last trim did, or if it sends less than the turn before although
    it received more. Recalled lines do not count, because they are selected again on every turn.
    """
    ahead = [turn for turn in turns if turn.trimmed == "none" and turn.original > START * budget]
    cuts, resumed = list[Turn](), list[Turn]()
    last: list[str] = []
    for before, turn in pairwise(turns):
        if turn.trimmed == "none":
            continue
        rules = [rule for rule in turn.trimmed.split(",") if not rule.startswith("recall=")]
        shrunk = turn.sent < 0.95 * before.sent and turn.original >= before.original
        (cuts if rules != last or (shrunk and before.trimmed != "none") else resumed).append(turn)
        last = rules
    return ahead, resumed, cuts


def run() -> Report:
    report = Report()
    with gateway() as running:
        fits = growing("a", None)(running)
    report.final_tokens, report.budget = fits[-1].original, fits[-1].original // 2
    with gateway() as running:
        uncounted = growing("f", len(fits), path=UNWEIGHED)(running)
    forwarding = report.forwarding = Line.through([(turn.size, turn.cpu) for turn in uncounted])
    tight = growing("b", len(fits), budget=report.budget)
    with gateway() as running:
        budgeted = tight(running)
    report.rows.append(row("not trimmed", fits, forwarding))
    report.rows += _budgeted(budgeted, report.budget, forwarding)
    report.cuts = [asdict(turn) for turn in split(budgeted, report.budget)[-1]]
    for path, form in OTHERS.items():
        report.rows += _in_form(path, form, len(fits), forwarding)
    for name, played in (("never over its budget", fits), ("budget of half its size", budgeted)):
        spent, points = 0.0, list[tuple[int, float]]()
        for turn in played:
            spent += (turn.cpu - forwarding.at(turn.size)) / 1e3
            points.append((turn.original, spent))
        report.work[name] = points

    history = next(turn for turn in fits if turn.original >= HISTORY)
    size = history.size - len(body_of(Script(7).opening()))
    once: dict[str, tuple[Play, tuple[str, ...]]] = {
        "new history, fits": (at_once(size), ("new history, fits",)),
        "new history, trimmed": (at_once(size, budget=history.original // 2), ("new history, trimmed",)),
        "4 MB": (at_once(LARGE), ("4 MB, first call", "4 MB, next call")),
    }
    for play, kinds in once.values():
        found = [_fresh(play) for _ in range(FRESH)]
        report.rows += [row(kind, [turns[i] for turns in found], forwarding) for i, kind in enumerate(kinds)]

    phases = {
        "forwarding alone": growing("f", len(fits), path=UNWEIGHED),
        "not trimmed": growing("a", len(fits)),
        "budget of half its size": tight,
        **{name: play for name, (play, _) in once.items()},
    }
    report.lags = lags(phases)
    return report


def _in_form(path: str, form: str, turns: int, forwarding: Line) -> Iterator[Row]:
    """Yield the rows of the session in another format."""
    with gateway() as running:
        fits = growing("a", turns, path=path)(running)
    yield row("not trimmed", fits, forwarding, form)
    budget = fits[-1].original // 2
    with gateway() as running:
        budgeted = growing("b", turns, path=path, budget=budget)(running)
    yield from _budgeted(budgeted, budget, forwarding, form)


def _budgeted(turns: Sequence[Turn], budget: int, forwarding: Line, form: str = "") -> Iterator[Row]:
    for kind, some in zip(("not trimmed, prepares", "after a trim", "trim"), split(turns, budget), strict=True):
        yield row(kind, some, forwarding, form)


def _fresh(play: Play) -> list[Turn]:
    with gateway() as running:
        return play(running)


def lags(phases: dict[str, Play]) -> list[Lag]:
    """Return the latencies of each phase with a fresh gateway, and the latency of the same request when idle."""
    found, idle = [], list[float]()
    for name, play in phases.items():
        with gateway() as running:
            asking = Asking(running.port)
            time.sleep(0.3)
            with asking.phase("idle"):
                time.sleep(1)
            with asking.phase(name):
                play(running, alone=False)
                time.sleep(0.05)
            asked = asking.ended()
        idle += asked["idle"]
        found.append((name, sorted(asked[name])))
    found.insert(0, ("idle", sorted(idle)))
    lags_found = [Lag(name, len(ms), _share(ms, 0.5), _share(ms, 0.99), ms[-1]) for name, ms in found]
    for lag in lags_found[1:]:
        # A single late response among thousands when idle is caused by the machine. The usual latency is subtracted.
        lag.beyond_p99, lag.beyond_worst = lag.p99 - lags_found[0].p99, lag.worst - lags_found[0].p99
    return lags_found


# --- printing ---------------------------------------------------------------------------------------------------------


def heads() -> tuple[tuple[str, ...], tuple[str, ...]]:
    return (
        ("CPU ms per call", "calls", "p50", "p95", "max", "beyond forwarding: p50", "p95", "target"),
        ("/healthz meanwhile, ms", "requests", "p50", "p99", "worst", "beyond idle: p99", "worst", "target"),
    )


def tables(report: Report) -> tuple[list[list[str]], list[list[str]]]:
    work = [
        [
            found.kind,
            str(found.calls),
            *(f"{value:.1f}" for value in (*found.whole.values(), found.beyond["p50"], found.beyond["p95"])),
            f"{found.bar:.0f} {'met' if found.barred <= found.bar else 'MISSED'}",
        ]
        for found in report.rows
    ]
    waits = [
        [
            lag.phase,
            str(lag.asked),
            *(f"{value:.1f}" for value in (lag.p50, lag.p99, lag.worst)),
            *((f"{value:.1f}" for value in (lag.beyond_p99, lag.beyond_worst)) if lag.phase != "idle" else ("", "")),
            "" if lag.phase == "idle" else f"{LAG_BAR:.0f} {'met' if lag.beyond_worst <= LAG_BAR else 'MISSED'}",
        ]
        for lag in report.lags
    ]
    return work, waits


def print_report(report: Report) -> None:
    for head, lines in zip(heads(), tables(report), strict=True):
        widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
        for cells in (head, *lines):
            print("  ".join(cell.rjust(w) for cell, w in zip(cells, widths, strict=True)))
        print()
    line = report.forwarding
    print(f"forwarding alone: {line.start:.2f} ms and {line.slope * 1e6:.2f} ms for a million bytes")
    print(f"{report.final_tokens:,} tokens at the end, budget {report.budget:,}; trims:")
    for cut in report.cuts:
        print(f"  at {cut['original']:,} to {cut['sent']:,} tokens, {cut['cpu']:.0f} ms: {cut['trimmed']}")
    for name, points in report.work.items():
        print(f"{name}: {points[-1][1]:.2f} s of counting and trimming")
    fits = next(iter(report.work.values()))
    print(f"without trims it grows with tokens^{exponent(fits):.2f}")


def exponent(points: Sequence[tuple[int, float]]) -> float:
    """Return 1 if the work grows with the length, 2 if with its square; measured from a tenth of the length on."""
    late = [(math.log(x), math.log(y)) for x, y in points if x > points[-1][0] / 10 and y > 0]
    return Line.through(late).slope


SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">
<title>CPU time of counting and trimming over the length of a session</title>
<style>
text {{ font: 12px system-ui, sans-serif; fill: #3d444d }}
.back {{ fill: #fff }} .axis {{ stroke: #8b949e; fill: none }} .grid {{ stroke: #8b949e; opacity: .25 }}
.a, .b {{ fill: none; stroke-width: 2 }} .a {{ stroke: #0969da }} .b {{ stroke: #bc4c00 }}
.straight {{ stroke-width: 1; stroke-dasharray: 5 4 }} text.a {{ fill: #0969da; stroke: none }}
text.b {{ fill: #bc4c00; stroke: none }}
@media (prefers-color-scheme: dark) {{
text {{ fill: #c9d1d9 }} .back {{ fill: #0d1117 }} .a {{ stroke: #58a6ff }} .b {{ stroke: #f0883e }}
text.a {{ fill: #58a6ff }} text.b {{ fill: #f0883e }}
}}
</style>
<rect class="back" width="{width}" height="{height}"/>
{drawn}
</svg>
"""


def svg(report: Report) -> str:
    """Return a plot of the work of both sessions, with a straight line through each."""
    width, height, left, right, top, bottom = 640, 340, 58, 16, 16, 46
    most_x = max(x for points in report.work.values() for x, _ in points)
    most_y = max(max(points[-1][1], Line.through(points).at(most_x)) for points in report.work.values())
    step = _step(most_y)
    high = math.ceil(most_y / step) * step

    def x_of(tokens: float) -> float:
        return left + (width - left - right) * tokens / most_x

    def y_of(seconds: float) -> float:
        return height - bottom - (height - top - bottom) * seconds / high

    drawn = []
    for number in range(round(high / step) + 1):
        y = y_of(number * step)
        drawn.append(f'<path class="grid" d="M{left} {y:.1f}H{width - right}"/>')
        drawn.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{number * step:g}</text>')
    drawn += [
        f'<text x="{x_of(tokens):.1f}" y="{height - bottom + 17}" text-anchor="middle">{tokens // 1000}k</text>'
        for tokens in range(0, most_x + 1, 20_000)
    ]
    drawn.append(f'<path class="axis" d="M{left} {top}V{height - bottom}H{width - right}"/>')
    middle = (height - bottom + top) / 2
    drawn.append(
        f'<text x="{(left + width - right) / 2:.0f}" y="{height - 8}" text-anchor="middle">'
        "tokens of the session so far</text>"
        f'<text transform="translate(14 {middle:.0f}) rotate(-90)" text-anchor="middle">'
        "CPU seconds of counting and trimming, added up</text>"
    )
    for place, (name, points) in enumerate(report.work.items()):
        kind = "ab"[place]
        path = "L".join(f"{x_of(x):.1f} {y_of(max(0.0, y)):.1f}" for x, y in points)
        line = Line.through(points)
        begin = max(0.0, -line.start / line.slope) if line.slope > 0 else 0.0
        drawn.append(f'<path class="{kind}" d="M{path}"/>')
        drawn.append(
            f'<path class="{kind} straight" d="M{x_of(begin):.1f} {y_of(line.at(begin)):.1f}'
            f'L{x_of(most_x):.1f} {y_of(line.at(most_x)):.1f}"/>'
        )
        drawn.append(f'<text class="{kind}" x="{left + 14}" y="{top + 14 + 18 * place}">{name}</text>')
    drawn.append(f'<text x="{left + 14}" y="{top + 50}">dashed: the straight line through it</text>')
    return SVG.format(width=width, height=height, drawn="\n".join(drawn))


def _step(most: float) -> float:
    """Return a round number of about a fifth of `most`."""
    size = 10.0 ** math.floor(math.log10(most / 5))
    return next(size * factor for factor in (1, 2, 5, 10) if size * factor >= most / 5)


#: the page, one paragraph per line
PARAGRAPHS = (
    "# CPU time of counting and trimming",
    (
        "The gateway counts the tokens of each request, and trims a request that exceeds its context budget. This"
        " page shows the CPU time of that in the gateway process, and how long other calls had to wait for the "
        "event loop. Measured on {day} on {cpus} shared cores:"
    ),
    ("```\npython bench/context_work.py --plot docs/img/context-work.svg --doc bench/context-work.md\n```"),
    (
        "A gateway, started with `gateway serve`, runs in front of the built-in provider. An agent session grows to "
        "{tokens} tokens in {turns} turns. Each turn adds a tool call and a result of 350 to 600 tokens: tables, "
        "logs, code or JSON. The session is played twice, the second time with half of its final size as the "
        "budget. It is then trimmed {cuts} times."
    ),
    (
        "| row | what it shows |\n"
        "|---|---|\n"
        "| not trimmed | calls of the first run |\n"
        "| not trimmed, prepares | calls of the second run after half of the budget is used. The gateway reads a "
        "few messages ahead of the next trim |\n"
        "| after a trim | calls that send the trimmed prefix again, and new messages |\n"
        "| trim | calls with a new trim decision |\n"
        "| new history | one request of 100,000 tokens to a gateway that has never seen them |\n"
        "| 4 MB | a body of 4 MB that fits, then the same with one more turn |"
    ),
    "{work}",
    (
        'The target applies to the 95th percentile: to the time beyond forwarding for "not trimmed", to the whole'
        " call for all other rows. Forwarding is what the same body costs on a path that is not counted: "
        "{start:.1f} ms and {slope:.1f} ms per million bytes."
    ),
    "{lags}",
    (
        "In a second run, `/healthz` is requested every 5 ms on its own connection. The target applies to the "
        "slowest response, minus the 99th percentile of an idle gateway. Provider and clients share the cores "
        "with the gateway, so part of each wait is theirs."
    ),
    "![CPU seconds of counting and trimming over the tokens of the session](../docs/img/context-work.svg)",
    (
        "Without trims, the total time grows with the tokens of the session to the power of {fits:.2f} (1 is "
        "linear, 2 is quadratic). A known message costs one comparison of its bytes. Beyond forwarding, a call at"
        " the end of the session took {late:.1f} ms, one in the middle {middle:.1f} ms. With the smaller budget, "
        "a call from the first trim on took {tight:.1f} ms on average, trims included."
    ),
)


def doc(report: Report) -> str:
    work, waits = (_markdown(head, lines) for head, lines in zip(heads(), tables(report), strict=True))
    fits, cut = report.work.values()
    a_turn = [(after - before) * 1e3 for (_, before), (_, after) in pairwise(fits)]
    middle, few = len(a_turn) // 2, 10
    first_cut = next(i for i, (tokens, _) in enumerate(cut) if tokens >= report.cuts[0]["original"])
    return (
        "\n\n".join([*PARAGRAPHS, ""])
        .removesuffix("\n")
        .format(
            day=date.today(),  # noqa: DTZ011 - the day it is here
            cpus=os.cpu_count(),
            tokens=f"{report.final_tokens:,}",
            turns=report.rows[0].calls,
            cuts=len(report.cuts),
            work=work,
            lags=waits,
            start=report.forwarding.start,
            slope=report.forwarding.slope * 1e6,
            fits=exponent(fits),
            late=statistics.mean(a_turn[-few:]),
            middle=statistics.mean(a_turn[middle - few // 2 : middle + few // 2]),
            tight=(cut[-1][1] - cut[first_cut - 1][1]) * 1e3 / (len(cut) - first_cut),
        )
    )


def _markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = ["---", *("---:" for _ in head[1:])]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="JSON instead of tables")
    parser.add_argument("--plot", type=Path, metavar="SVG", help="write the picture there")
    parser.add_argument("--doc", type=Path, metavar="MD", help="write the page there")
    arguments = parser.parse_args()
    report = run()
    if arguments.json:
        print(json.dumps(asdict(report), indent=1))
    else:
        print_report(report)
    for path, text in ((arguments.plot, svg), (arguments.doc, doc)):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text(report), "utf-8")


if __name__ == "__main__":
    main()
