"""Measure the cost of steps per call, and write the transcript of the example in docs/guides/restrict-tools.md.

    python bench/steps.py [--json]
    python bench/steps.py --transcript   # rewrites the marked block of docs/guides/restrict-tools.md

README.md describes the measurements. The exit code is 1 if a limit is exceeded.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

from gateway import config
from gateway.app import resources
from gateway.app.worker import Worker, build_app, collect_rarely
from gateway.call.types import Caller, ClientResponse, Incoming
from gateway.config.policies import routes_of
from gateway.core.http.request import Outgoing
from gateway.dialects import endpoint
from gateway.mock import MockServer
from gateway.pipeline.exchange import Gateway
from gateway.server import serving

ROOT = Path(__file__).resolve().parent.parent
EVALUATION = ROOT / "config/steps/evaluation.yaml"
DOCUMENT = ROOT / "docs/guides/restrict-tools.md"
BEGIN, END = "<!-- transcript: python bench/steps.py --transcript -->", "<!-- end of transcript -->"
PAIRS, WARM_UP = 3_000, 300
#: One in this many pairs counts, namely the fastest ones: other work on the machine only adds to them.
QUIET = 5
BAR_US = 50.0


# --- calls ------------------------------------------------------------------------------------------------------------


def tool(name: str) -> dict[str, Any]:
    """Return a tool of about 400 bytes, as agents have them."""
    text = f"Use this when the task asks to {name.replace('_', ' ')} something; say what and why, in short words."
    properties = {
        "path": {"type": "string", "description": "Where it is, from the root of the project."},
        "limit": {"type": "integer", "description": "The most that is given back."},
    }
    parameters = {"type": "object", "properties": properties, "required": ["path"], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": text, "parameters": parameters}}


TOOLS = [tool(f"{verb}_{what}") for verb in ("read", "write", "list", "search") for what in "abcde"]
STEPS: list[dict[str, Any]] = [
    {
        "name": "review",
        "conditions": [{"tool_used": {"tools": "write_*", "window": 5}}, {"message_matches": "(?i)review"}],
        "available_tools": {"allowed": ["read_*", "list_*"]},
        "sequence": ["read_*", "list_*"],
    },
    {
        "name": "careful",
        "conditions": [{"budget_below": 0.2}, {"not_recently_used": "list_*"}],
        "available_tools": {"denied": ["write_*"]},
    },
    {"name": "work", "is_default": True, "available_tools": {"denied": ["search_*"]}},
]
SEQUENCE: list[dict[str, Any]] = [
    {"name": "turns", "sequence": [["read_*", "list_*"]] * 256, "available_tools": {"denied": ["write_*"]}}
]
WEIGHED = [{"name": "long", "conditions": [{"tokens_above": 50_000}]}, *STEPS]
BODY: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "You work on a project. " * 40},
        {"role": "user", "content": "Please look at it and say what is to be done. " * 10},
    ],
}


def answer(tool_used: str | None) -> bytes:
    call = {"id": "c1", "type": "function", "function": {"name": tool_used, "arguments": '{"path":"x"}'}}
    message = {"role": "assistant", "content": None if tool_used else "done"}
    choice = {
        "index": 0,
        "message": {**message, **({"tool_calls": [call]} if tool_used else {})},
        "finish_reason": "tool_calls" if tool_used else "stop",
    }
    usage = {"prompt_tokens": 1000, "completion_tokens": 20, "total_tokens": 1020}
    found = {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
    return json.dumps(found).encode()


@dataclass(frozen=True)
class Kind:
    """A kind of call. `tools` of the request; `used` by responses, in turn; `allowed`: `allowed_tools` is supported."""

    name: str
    steps: Sequence[Mapping[str, Any]]
    tools: int = 0
    used: Sequence[str | None] = (None,)
    allowed: bool = True
    store: str = "sqlite"

    @property
    def body(self) -> bytes:
        tools = {"tools": TOOLS[: self.tools]} if self.tools else {}
        return json.dumps({**BODY, **tools}).encode()


#: The agent calls different tools in turn. With the same tool every time, the stored state would soon stop changing.
USED = ("read_a", "list_b", "read_c")
KINDS = (
    Kind("no tools", STEPS),
    Kind("20 tools offered, none used", STEPS, 20),
    Kind("the same, by a shorter list", STEPS, 20, allowed=False),
    Kind("20 tools offered, one used", STEPS, 20, USED),
    Kind("one used in a sequence", SEQUENCE, 20, USED),
    Kind("one used, store in memory", STEPS, 20, USED, store="memory"),
    Kind("a condition on tokens", WEIGHED, 20),
)


# --- measuring --------------------------------------------------------------------------------------------------------


@dataclass
class Whole:
    """The response of a fake upstream."""

    body: bytes
    status: int = 200
    headers: Sequence[tuple[bytes, bytes]] = ((b"content-type", b"application/json"),)

    async def chunks(self) -> AsyncIterator[bytes]:
        yield self.body


class Upstream:
    """Respond at once."""

    body = b""

    @asynccontextmanager
    async def send(self, request: Outgoing) -> AsyncIterator[Whole]:
        del request
        yield Whole(self.body)

    async def aclose(self) -> None:
        pass


def settings_of(folder: Path, store: str = "sqlite", **keys: Any) -> config.Settings:
    provider = {"base_url": "http://127.0.0.1:9/v1", "auth": "none", **keys.pop("provider", {})}
    return config.Settings.model_validate(
        {
            "providers": {"upstream": provider},
            "default_provider": "upstream",
            "built_in_providers": False,
            "store": {"url": f"sqlite://{folder / 'gateway.db'}" if store == "sqlite" else "memory://"},
            "telemetry": {"log": {"level": "error"}},
            **keys,
        }
    )


@asynccontextmanager
async def gateway_of(settings: config.Settings, upstream: Upstream) -> AsyncIterator[Gateway]:
    """Yield a pipeline as in a worker, with its store, without server and network."""
    store = resources.open_store(settings)
    loaded = config.Loaded(settings, None, {})
    worker = Worker(store, settings, lambda: loaded)
    try:
        planner = worker.lasting.planner(settings)
        yield worker.lasting.gateway(settings, routes_of(settings), {"upstream": upstream}, planner)
        planner.close()
    finally:
        await worker.aclose()
        await store.aclose()


_NUMBERS = count(1)


async def call(gateway: Gateway, body: bytes, session: str) -> ClientResponse:
    number = next(_NUMBERS)
    incoming = Incoming(
        call_id=f"{number:032x}", request_id=f"r{number}", method="POST", path="chat/completions", query="",
        headers=[(b"x-session-id", session.encode()), (b"content-type", b"application/json")], body=body,
        decompressed=False, endpoint=endpoint("POST", "chat/completions"), caller=Caller("default"), path_session=None,
        started=gateway.clock(),
    )  # fmt: skip
    async with gateway.handle(incoming) as reply:
        return reply


async def cpu_us(gateway: Gateway, body: bytes, session: str) -> float:
    began = time.process_time_ns()
    reply = await call(gateway, body, session)
    used = time.process_time_ns() - began
    assert reply.status == 200, reply.body
    return used / 1000


@dataclass(frozen=True)
class Figure:
    """Median CPU of a call in µs: without steps, and the addition of steps in the same pairs, with its `spread`."""

    kind: str
    without_us: float
    added_us: float
    spread_us: float
    bar_us: float

    @property
    def is_met(self) -> bool:
        return self.added_us <= self.bar_us


async def measured(kind: Kind, pairs: int) -> Figure:
    """Make the same call through two gateways in turn; a random one goes first."""
    upstream, body, draw = Upstream(), kind.body, random.Random(7)
    answers = [answer(tool) for tool in kind.used]
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        provider = {"allowed_tools": kind.allowed}
        plain = settings_of(Path(one), kind.store)
        stepped = settings_of(Path(other), kind.store, steps=kind.steps, provider=provider)
        async with gateway_of(plain, upstream) as without, gateway_of(stepped, upstream) as with_steps:
            both: list[tuple[float, float]] = []
            collect_rarely()
            for number in range(pairs + WARM_UP):
                session, order = f"s{number // 200}", [without, with_steps]
                upstream.body = answers[number % len(answers)]
                if draw.random() < 0.5:
                    order.reverse()
                used = {id(gateway): await cpu_us(gateway, body, session) for gateway in order}
                both.append((used[id(without)], used[id(with_steps)]))
    kept = sorted(both[WARM_UP:], key=sum)[: pairs // QUIET]
    added = [after - before for before, after in kept]
    quarters = statistics.quantiles(added, n=4)
    return Figure(
        kind.name,
        statistics.median(one for one, _ in kept),
        statistics.median(added),
        quarters[2] - quarters[0],
        BAR_US,
    )


async def unused_us(pairs: int) -> Figure:
    """Return the cost of the three checks for steps if none are configured."""
    with tempfile.TemporaryDirectory() as folder:
        async with gateway_of(settings_of(Path(folder)), upstream := Upstream()) as gateway:
            upstream.body = answer("read_a")
            seen: list[Any] = []
            real = gateway.steps.transition

            def keep(state: Any, record: Any) -> Any:
                seen.append((state, record))
                return real(state, record)

            gateway.steps.transition = keep  # type: ignore[method-assign]
            await call(gateway, Kind("", [], 20).body, "s")
            ((state, record),) = seen
            steps, runs = gateway.steps, []
            for _ in range(20):
                began = time.process_time_ns()
                for _ in range(pairs):
                    await steps.begin(state, state.call)
                    steps.restrict(state)
                    steps.accepted(state)
                    real(state, record)
                runs.append((time.process_time_ns() - began) / pairs / 1000)
    return Figure("no steps configured", 0.0, statistics.median(runs), max(runs) - min(runs), 2.0)


# --- the transcript ---------------------------------------------------------------------------------------------------

AGENT_TOOLS = ("search", "read_draft", "list_flaws", "argue_for", "argue_against", "verdict", "ask_user")
TASK = "Please evaluate the draft."


@contextmanager
def served(upstream: str, folder: Path) -> Iterator[str]:
    """Yield the address of a gateway whose agent "writer" has the steps of the example."""
    file = folder / "gateway.yaml"
    keys = {
        "providers": {"upstream": {"base_url": upstream, "auth": "none", "allowed_tools": True}},
        "default_provider": "upstream",
        "built_in_providers": False,
        "store": {"url": f"sqlite://{folder / 'gateway.db'}"},
        "telemetry": {"log": {"level": "error"}},
        "agents": {"writer": str(EVALUATION)},
    }
    file.write_text(json.dumps(keys))

    def load() -> config.Loaded:
        return config.load(file, environment={})

    options = serving.make_config(
        build_app(load),
        max_head_bytes=65536,
        max_body=2**26,
        head_timeout_s=20,
        grace_s=load().settings.server.shutdown_grace_s,
    )
    with serving.ServerThread(options) as server:
        yield server.url


def offered_tools(body: bytes) -> str:
    """Return a short form of the tools that the request offers to the model."""
    sent = json.loads(body)
    choice = sent.get("tool_choice", "auto")
    if isinstance(choice, str):
        return choice
    if choice["type"] == "allowed_tools":
        said = choice["allowed_tools"]
        names = ", ".join(one["function"]["name"] for one in said["tools"])
        return f"{said['mode']}: {names}"
    return f"must call {choice['function']['name']}"


def transcript() -> str:
    """Return an agent's run through the example: the offered tools, the tool called, and the next step."""
    import openai  # noqa: PLC0415  # noqa: PLC0415  # only this function needs it

    rows = [("call", "tool choice that is sent", "the model calls", "step after the call", "due next")]
    with MockServer() as mock, tempfile.TemporaryDirectory() as folder, served(mock.url, Path(folder)) as url:
        client = openai.OpenAI(api_key="none", base_url=f"{url}/v1", max_retries=0)
        messages: list[Any] = [{"role": "user", "content": TASK}]
        tools: Any = [{"type": "function", "function": {"name": name}} for name in AGENT_TOOLS]
        for number in range(1, 20):
            raw = client.chat.completions.with_raw_response.create(
                model="mock-small", messages=messages, tools=tools,
                extra_headers={"x-session-id": "essay", "x-session-agent": "writer"},
            )  # fmt: skip
            message = raw.parse().choices[0].message
            calls = message.tool_calls or []
            names = ", ".join(f"`{one.function.name}`" for one in calls if one.type == "function")
            step, index = raw.headers.get("x-session-step"), raw.headers.get("x-session-sequence-index")
            rows.append(
                (
                    str(number),
                    offered_tools(mock.provider.calls[-1].body),
                    names or "no tool: it answers",
                    f"`{step}`",
                    f"entry {int(index) + 1}" if index is not None else "",
                )
            )
            if not calls:
                break
            messages.append(message.model_dump(exclude_none=True))
            messages += [{"role": "tool", "tool_call_id": one.id, "content": "done"} for one in calls]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def with_transcript(text: str, block: str) -> str:
    """Return the document with this block between its marks."""
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"{DOCUMENT} has no block between {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{block}\n\n{END}{after}"


# --- the command ------------------------------------------------------------------------------------------------------


def shown(figures: Sequence[Figure]) -> str:
    lines = [f"{'call':32} {'without, µs':>12} {'steps add':>10} {'ratio':>6} {'quartiles':>10}  bar"]
    for one in figures:
        ratio = f"{1 + one.added_us / one.without_us:.2f}" if one.without_us else ""
        lines.append(
            f"{one.kind:32} {one.without_us:>12.0f} {one.added_us:>10.1f} {ratio:>6} {one.spread_us:>10.1f}  "
            f"{one.bar_us:g}{'' if one.is_met else ' MISSED'}"
        )
    return "\n".join(lines)


async def all_measured(pairs: int) -> list[Figure]:
    return [await unused_us(pairs), *[await measured(kind, pairs) for kind in KINDS]]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--transcript", action="store_true")
    options = parser.parse_args(arguments)
    if options.transcript:
        DOCUMENT.write_text(with_transcript(DOCUMENT.read_text("utf-8"), transcript()), "utf-8")
        return 0
    figures = asyncio.run(all_measured(options.pairs))
    printed: Callable[[], str] = lambda: json.dumps([asdict(one) for one in figures], indent=2)  # noqa: E731
    print(printed() if options.json else shown(figures))
    return 0 if all(one.is_met for one in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
