"""Plant loops in recorded conversations and count how many runaway protection finds, in all formats; measure its cost.

    python bench/loops.py DATA_DIR [--json] [--no-cost]

DATA_DIR holds files `*.jsonl.gz`, one conversation with chat `messages` in each line. Three questions, with the default
thresholds:

- Which of the recorded conversations raise an alarm? Each is printed. A person has to judge whether it really repeats
  itself. `REAL` lists those that do. Every other alarm is false.
- Are planted loops found, at exactly the round that reaches the threshold? Each kind is planted at several places of
  each conversation. So are rounds that only look like a loop, such as a status check whose result changes.
- What does a call cost? Each recorded request is sent through a pipeline without network, four times. The CPU time of
  the check alone is measured, and the least of each call counts. The messages are split by the rest of the call anyway.

The exit code is 1 if an alarm is false, a loop is not found in time, or the mean cost exceeds 10 µs.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, get_args

from steps import Upstream, answer, gateway_of, settings_of
from wires import elements_of

from gateway import config
from gateway.app.worker import collect_rarely
from gateway.call.state import CallState
from gateway.call.types import Caller, Incoming
from gateway.config.policies import runaway_policy
from gateway.core.counting.measure import Wire
from gateway.core.runaway import NO_ROUNDS, Finding, Kind, findings
from gateway.dialects import endpoint
from gateway.dialects.base import Call
from gateway.dialects.rounds import read_rounds
from gateway.pipeline.exchange import Gateway

Json = dict[str, Any]
WIRES: tuple[Wire, ...] = ("chat", "responses", "messages")
PATHS = {"chat": "chat/completions", "responses": "responses", "messages": "messages"}
#: recorded conversations in which the agent really repeats itself, by reading them
REAL = {
    "ctf-92": "runs the same script with the same output six times in a row",
    "sweagent-22364166-eps": "submits the same wrong flag four times in a row",
}
BAR_US = 10.0
RUNS = 4
POLICY = runaway_policy(config.Settings())
LOOP = int(POLICY.loop.warn or 0)
STALE = int(POLICY.no_progress.warn or 0)
MOST = int(POLICY.rounds.warn or 0)


# --- conversations ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recorded:
    """A recorded conversation as chat messages."""

    id: str
    messages: list[Json]


def recorded(folder: Path) -> list[Recorded]:
    rows = [
        json.loads(line)
        for file in sorted(folder.glob("*.jsonl.gz"))
        for line in gzip.decompress(file.read_bytes()).splitlines()
    ]
    return [Recorded(row["id"], row["messages"]) for row in rows]


def is_by_model(element: Json) -> bool:
    return element.get("role") == "assistant" or element.get("type") == "function_call"


def requests_of(elements: Sequence[Json]) -> list[int]:
    """Return the lengths of the prefixes that an agent sends: before each element of the model, and at the end."""
    ends = [
        end for end in range(1, len(elements))
        if is_by_model(elements[end]) and not is_by_model(elements[end - 1])
    ]  # fmt: skip
    return ends if is_by_model(elements[-1]) else [*ends, len(elements)]


def in_format(wire: Wire, messages: Sequence[Json]) -> list[Json]:
    return list(messages) if wire == "chat" else elements_of(wire, messages)


def alarms(wire: Wire, messages: Sequence[Json]) -> Iterator[tuple[int, Finding]]:
    """Yield each finding with the number of its request."""
    elements = in_format(wire, messages)
    raws, rounds, read = [json.dumps(element).encode() for element in elements], NO_ROUNDS, 0
    for number, end in enumerate(requests_of(elements)):
        rounds, after = read_rounds(wire, b"[%b]" % b",".join(raws[read:end]), rounds)
        read = end - 1
        for found in findings(after, POLICY):
            yield number, found


# --- planting ---------------------------------------------------------------------------------------------------------

_IDS = count(1)


def calls_of(*calls: tuple[str, Json, str]) -> list[Json]:
    """Return the messages of a round with these calls: name, arguments, result. Each has another id."""
    ids = [f"planted_{next(_IDS)}" for _ in calls]
    made = [
        {"id": one, "type": "function", "function": {"name": name, "arguments": json.dumps(given)}}
        for one, (name, given, _) in zip(ids, calls, strict=True)
    ]
    results = [
        {"role": "tool", "tool_call_id": one, "content": result} for one, (_, _, result) in zip(ids, calls, strict=True)
    ]
    return [{"role": "assistant", "content": None, "tool_calls": made}, *results]


def step(letter: str, number: int = 0) -> list[Json]:
    """Return a round by its letter. Every second one writes its arguments in another order."""
    given = {"path": f"{letter}.py", "line": 7}
    return calls_of(("view", given if number % 2 else dict(reversed(given.items())), f"content of {letter} " * 20))


def cycle(letters: str, times: int) -> list[list[Json]]:
    return [step(letter, number) for number in range(times) for letter in letters]


def parallel(times: int) -> list[list[Json]]:
    return [calls_of(("view", {"path": "a"}, "text of a"), ("grep", {"text": "x"}, "")) for _ in range(times)]


def exchanges(times: int) -> list[list[Json]]:
    said = {"role": "assistant", "content": "I cannot go on without the file."}
    return [[said, {"role": "user", "content": "Please continue."}] for _ in range(times)]


def wandering(known: int) -> list[list[Json]]:
    """Return four rounds, and then `known` of them in an order without a period."""
    draw = random.Random(5)
    letters, before = "wxyz", ""
    order = list(letters)
    while len(order) < known + len(letters):
        letter = draw.choice([one for one in letters if one != before])
        order, before = [*order, letter], letter
    return [step(letter, number) for number, letter in enumerate(order)]


def polling(times: int) -> list[list[Json]]:
    return [
        one
        for number in range(times)
        for one in (
            calls_of(("bash", {"command": "sleep 30"}, "")),
            calls_of(("bash", {"command": "status"}, f"{number} %")),
        )
    ]


@dataclass(frozen=True)
class Plant:
    """Rounds to plant. `kind`: what must be found at the last of them, and not before; None: nothing may be found."""

    name: str
    kind: str | None
    rounds: Callable[[], list[list[Json]]]


PLANTS = (
    Plant("A A A A", "loop", lambda: cycle("a", LOOP)),
    Plant("A-B", "loop", lambda: cycle("ab", LOOP)),
    Plant("parallel calls", "loop", lambda: parallel(LOOP)),
    Plant("same reply, same message", "loop", lambda: exchanges(LOOP)),
    Plant("A-B-C", "no_progress", lambda: cycle("abc", 5)[: STALE + 3]),
    Plant("A-B-C-D-E-F", "no_progress", lambda: cycle("abcdef", 5)[: STALE + 6]),
    Plant("cycle of 20", "no_progress", lambda: cycle("abcdefghijklmnopqrst", 2)[: STALE + 20]),
    Plant("known rounds in any order", "no_progress", lambda: wandering(STALE)),
    Plant("new results without end", "rounds", lambda: [step(f"new{number}") for number in range(MOST)]),
    Plant("one repetition less", None, lambda: cycle("a", LOOP - 1)),
    Plant("sleep and a changing status", None, lambda: polling(40)),
    Plant("a poll with a changing result", None, lambda: [calls_of(("poll", {}, f"{n} left")) for n in range(40)]),
    Plant("the same result of other calls", None, lambda: [calls_of(("find", {"n": n}, "nothing")) for n in range(40)]),
)


def with_plant(messages: Sequence[Json], at: int, planted: Sequence[Sequence[Json]]) -> list[Json]:
    return [*messages[:at], *(message for one in planted for message in one), *messages[at:]]


def places(messages: Sequence[Json]) -> list[int]:
    """Return three places where rounds can be planted: near the start, in the middle and at the end."""
    ends = requests_of(messages)
    return sorted({ends[0], ends[len(ends) // 2], ends[-1]})


def is_found(wire: Wire, messages: Sequence[Json], at: int, plant: Plant) -> bool:
    """Return whether a plant leads to the right finding at the right request."""
    planted = plant.rounds()
    changed = with_plant(messages, at, planted)
    # An earlier round of the work counts too, so only `rounds` may be found before its end.
    first = len(requests_of(messages[:at]))
    last = first + len(planted) - 1
    seen = [(number, one.kind) for number, one in alarms(wire, changed) if first <= number <= last]
    kinds = [(number, kind) for number, kind in seen if kind != "rounds"]
    if plant.kind is None:
        return not kinds
    if plant.kind == "rounds":
        return not kinds and (last, "rounds") in seen
    return min((number for number, kind in kinds if kind == plant.kind), default=None) == last


@dataclass
class Row:
    """A row of the table of planted loops."""

    planted: Counter[str] = field(default_factory=Counter)
    right: Counter[str] = field(default_factory=Counter)


def plant_all(conversations: Sequence[Recorded]) -> dict[str, Row]:
    rows = {plant.name: Row() for plant in PLANTS}
    for one in conversations:
        if one.id in REAL:
            # Its own loop would be found as well.
            continue
        for plant in PLANTS:
            for at in places(one.messages):
                for wire in WIRES:
                    rows[plant.name].planted[wire] += 1
                    rows[plant.name].right[wire] += is_found(wire, one.messages, at, plant)
    return rows


# --- cost -------------------------------------------------------------------------------------------------------------


class Watched:
    """A guard whose check is timed, without the reading of the messages, which each call does."""

    def __init__(self, gateway: Gateway) -> None:
        guard = gateway.runaway
        assert guard is not None
        self._guard, self._planner = guard, gateway.planner
        self.us: list[float] = []

    async def check(self, state: CallState, call: Call) -> None:
        wire = state.incoming.endpoint.wire
        assert wire is not None
        state.steps.contents = await self._planner.contents(call, wire)
        began = time.process_time_ns()
        await self._guard.check(state, call)
        self.us.append((time.process_time_ns() - began) / 1000)


def body_of(wire: Wire, elements: Sequence[Json]) -> bytes:
    if wire == "responses":
        return json.dumps({"model": "m", "input": elements}).encode()
    return json.dumps({"model": "m", "max_tokens": 100, "messages": elements}).encode()


async def send(gateway: Gateway, wire: Wire, body: bytes, session: str, number: int) -> None:
    incoming = Incoming(
        call_id=f"{number:032x}", request_id=f"r{number}", method="POST", path=PATHS[wire], query="",
        headers=[(b"x-session-id", session.encode()), (b"content-type", b"application/json")], body=body,
        decompressed=False, endpoint=endpoint("POST", PATHS[wire]), caller=Caller("default"), path_session=None,
        started=gateway.clock(),
    )  # fmt: skip
    async with gateway.handle(incoming) as reply:
        assert reply.status == 200, reply.body


@dataclass(frozen=True)
class Cost:
    """CPU time of the checks of one format in µs, and of whole calls without network."""

    calls: int
    mean_us: float
    median_us: float
    p99_us: float
    call_us: float


async def cost(wire: Wire, conversations: Sequence[Recorded]) -> Cost:
    """Replay all requests some times, and keep the least of each call: other work on the machine only adds to it."""
    collect_rarely()
    runs = [await replayed(wire, conversations) for _ in range(RUNS)]
    us = sorted(map(min, zip(*[checks for checks, _ in runs], strict=True)))
    whole = min(call_us for _, call_us in runs)
    return Cost(len(us), statistics.mean(us), statistics.median(us), us[int(len(us) * 0.99)], whole)


async def replayed(wire: Wire, conversations: Sequence[Recorded]) -> tuple[list[float], float]:
    """Return the µs of each check, and the µs of a whole call on average."""
    upstream = Upstream()
    upstream.body = answer(None)
    with tempfile.TemporaryDirectory() as folder:
        async with gateway_of(settings_of(Path(folder)), upstream) as gateway:
            watched = Watched(gateway)
            object.__setattr__(gateway, "runaway", watched)
            numbers, began = count(1), time.process_time_ns()
            for one in conversations:
                elements = in_format(wire, one.messages)
                for end in requests_of(elements):
                    await send(gateway, wire, body_of(wire, elements[:end]), one.id, next(numbers))
            used = (time.process_time_ns() - began) / 1000
    return watched.us, used / len(watched.us)


# --- the tables -------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--no-cost", action="store_true", help="only plant")
    options = parser.parse_args()
    conversations = recorded(options.data)
    heard = {
        (one.id, found.kind): found.text
        for one in conversations
        for wire in WIRES
        for _, found in alarms(wire, one.messages)
    }
    false = {key: text for key, text in heard.items() if key[0] not in REAL}
    rows = plant_all(conversations)
    costs = {} if options.no_cost else {wire: asyncio.run(cost(wire, conversations)) for wire in WIRES}
    if options.json:
        found = {name: {"planted": row.planted, "right": row.right} for name, row in rows.items()}
        shown = {wire: vars(one) for wire, one in costs.items()}
        print(json.dumps({"conversations": len(conversations), "false": len(false), "rows": found, "cost": shown}))
    else:
        _print(conversations, heard, rows, costs)
    is_right = all(row.right == row.planted for row in rows.values())
    return int(bool(false) or not is_right or any(one.mean_us > BAR_US for one in costs.values()))


def _print(
    conversations: Sequence[Recorded],
    heard: dict[tuple[str, Kind], str],
    rows: dict[str, Row],
    costs: dict[Wire, Cost],
) -> None:
    false = [key for key in heard if key[0] not in REAL]
    print(f"{len(conversations)} conversations in {len(get_args(Wire)) - 1} formats, {len(false)} false alarms")
    for (name, kind), text in heard.items():
        print(f"  {name}, {kind}: {text} ({'really: ' + REAL[name] if name in REAL else 'FALSE'})")
    print(f"\n{'planted':32}{'expected':14}" + "".join(f"{wire:>18}" for wire in WIRES))
    for plant in PLANTS:
        row = rows[plant.name]
        print(
            f"{plant.name:32}{plant.kind or 'nothing':14}"
            + "".join(f"{row.right[wire]:>9,} of {row.planted[wire]:>5,}" for wire in WIRES)
        )
    for wire, one in costs.items():
        print(
            f"\n{wire}: {one.calls:,} calls, check {one.mean_us:.1f} µs on average (median {one.median_us:.1f}, p99 "
            f"{one.p99_us:.1f}), whole call {one.call_us:,.0f} µs"
        )


if __name__ == "__main__":
    sys.exit(main())
