"""Generated agent sessions on Claude models through a gateway, with an independent check of each request it sends.

python -m tests.support.thinking_sessions 1000 [SEED]
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gateway.mock import CLAUDE_RULES, MockProvider, ToolCall, Turn
from gateway.mock.app import create_app
from gateway.server import serving
from tests.support.asgi import with_lifespan
from tests.support.claude_checker import ClaudeChecker
from tests.support.claude_grammar import BETA
from tests.support.gateways import GatewayThread
from tests.support.web import Reply

Json = dict[str, Any]

PATH = "/v1/messages"
#: refusals of the gateway that a session may get: budgets, and content that cannot be trimmed to fit
DOCUMENTED = ("budget_exhausted", "context_length_exceeded")
MODELS = ("claude-fable-5-2", "claude-opus-5-5", "claude-sonnet-5-5", "claude-haiku-5-5", "claude-mythos-5-1")
#: models without the check, whose thinking other models can read
OLDER = ("claude-opus-5", "claude-sonnet-5", "claude-opus-4-8")
NAMES = ("read", "search", "edit", "run")
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgoAAAANSUhEUg=="}}
MARK = {"type": "ephemeral"}
STEPS: Json = {
    "filtering": {
        "steps": [
            {"name": "edit", "conditions": [{"tool_used": {"tools": "search", "window": 2}}],
             "available_tools": {"denied": ["run"]}},
            {"name": "work", "is_default": True},
        ]
    },
    "requiring": {
        "steps": [
            {"name": "check", "conditions": [{"sequence_match": ["edit"]}], "sequence": ["run", "read"],
             "enforce": "require"},
            {"name": "work", "is_default": True},
        ]
    },
}  # fmt: skip
#: configurations of the gateway by dotted key path
SHAPES: tuple[Mapping[str, object], ...] = (
    {},
    {"context.recall": "off"},
    {"context.recall": "all", "context.strategies": ["dedupe", "shorten", "drop"]},
    {"context.strategies": ["dedupe", "condense", "summarize", "drop"], "context.summary.model": "claude-haiku-4-5"},
    {"context.on_overflow": "least"},
    {"store.url": "memory://"},
)
#: separators of the JSON of different clients
STYLES: tuple[Json, ...] = ({}, {"separators": (",", ":")}, {"separators": (",", ":"), "ensure_ascii": False})
#: the shape whose store loses everything at a restart
FORGETFUL = 5


class Recorder:
    """The built-in provider as an ASGI application that checks each request and response."""

    def __init__(self) -> None:
        self.provider = MockProvider(claude=CLAUDE_RULES)
        self.checker = ClaudeChecker()
        self.refused: list[str] = []
        self.faults: list[str] = []
        self.accepted = 0
        self.turn: Callable[[Json], Turn] = lambda _: Turn()
        self.redacts: Callable[[], bool] = lambda: False
        self._app = create_app(self.provider)

    def reset(self) -> None:
        """Forget the last session."""
        self.provider.reset()
        self.checker = ClaudeChecker()
        self.refused, self.faults, self.accepted = [], [], 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        raw, more = b"", True
        while more:
            message = await receive()
            raw, more = raw + message.get("body", b""), message.get("more_body", False)
        is_messages = scope["path"] == PATH
        body = json.loads(raw) if is_messages else {}
        # Requests for a summary have no tools.
        if body.get("tools"):
            self.provider.push(self.turn(body))
        sent: list[Any] = []
        waiting = [{"type": "http.request", "body": raw}]

        async def receive_again() -> Any:
            return waiting.pop() if waiting else await receive()

        async def keep(message: Any) -> None:
            sent.append(message)

        await self._app(scope, receive_again, keep)
        if is_messages:
            self._check(body, scope, sent)
        for message in sent:
            await send(message)

    def _check(self, body: Json, scope: Any, sent: list[Any]) -> None:
        answer = b"".join(one.get("body", b"") for one in sent[1:])
        if sent[0]["status"] != 200:
            self.refused.append(str(json.loads(answer)["error"]["message"]))
            return
        self.accepted += 1
        beta = next((value.decode() for name, value in scope["headers"] if name == b"anthropic-beta"), "")
        found = [one for one in self.checker.check(body, beta) if one.rule != "model"]
        self.faults += [f"{one.path} {one.rule}: {one.detail}{'' if one.sure else ' (unsure)'}" for one in found]
        if body.get("stream"):
            message = gathered([json.loads(line[5:]) for line in answer.decode().split("\n") if line[:5] == "data:"])
        else:
            message = json.loads(answer)
            if self.redacts():
                message["content"] = [redacted(block) for block in message["content"]]
                raw = json.dumps(message).encode()
                headers = [one for one in sent[0]["headers"] if one[0] != b"content-length"]
                sent[0]["headers"] = [*headers, (b"content-length", b"%d" % len(raw))]
                sent[1:] = [{"type": "http.response.body", "body": raw}]
        self.checker.record(body, message, beta)


def redacted(block: Json) -> Json:
    """Return a thinking block as redacted thinking."""
    return {"type": "redacted_thinking", "data": block["signature"]} if block["type"] == "thinking" else block


def gathered(events: list[Json]) -> Json:
    """Return the message of a stream."""
    content: list[Json] = []
    keys = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
    inputs: dict[int, str] = {}
    for event in events:
        if event["type"] == "content_block_start":
            content.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], content[event["index"]]
            if delta["type"] == "input_json_delta":
                inputs[event["index"]] = inputs.get(event["index"], "") + delta["partial_json"]
            else:
                key = keys[delta["type"]]
                block[key] = block.get(key, "") + delta[key]
    for index, text in inputs.items():
        content[index]["input"] = json.loads(text)
    return {"content": content}


@dataclass
class Plan:
    """The plan of a generated session."""

    seed: int
    most_turns: int = 40
    chance: random.Random = field(init=False)

    def __post_init__(self) -> None:
        chance = self.chance = random.Random(self.seed)
        self.shape = chance.randrange(len(SHAPES))
        self.model = chance.choice(MODELS)
        turns = chance.choice([chance.randint(5, 15), chance.randint(10, 25), chance.randint(20, 40)])
        self.turns = min(turns, self.most_turns)
        self.lines = chance.choice([3, 20, 60, 200])
        self.conversations = 2 if chance.random() < 0.2 else 1
        self.agent = chance.choice([None, None, None, None, *STEPS])
        self.streams = chance.choice([0.0, 0.3, 1.0])
        self.redacts = chance.choice([0.0, 0.0, 0.2])
        self.strips = chance.choice([None, None, None, None, "once", "window"])
        self.switches = chance.choice([0.0, 0.0, 0.0, 0.1])
        self.models = chance.choice([MODELS, MODELS, (*MODELS, *OLDER)])
        self.restarts = chance.random() < 0.25
        self.workers = 2 if self.shape != FORGETFUL and chance.random() < 0.15 else 1
        self.compacts = chance.random() < 0.1
        self.counts = chance.choice([0.0, 0.0, 0.2])
        self.style: Json = chance.choice(STYLES)
        self.marks = chance.random() < 0.4
        self.lists_from = chance.choice([None, None, chance.randint(1, self.turns)])
        self.beta = chance.random() < 0.2
        self.reminders = chance.choice([0.0, 0.0, 0.2])
        self.silent = chance.choice([0.0, 0.0, 0.1])
        size = self.turns * (self.lines * 6 + 150) // self.conversations
        self.budget = chance.choice([None, chance.uniform(0.15, 0.9), chance.uniform(0.15, 0.9)])
        self.context = int(size * self.budget) + 1500 if self.budget else None
        self.changes_context = chance.random() < 0.3
        self.session_budget = int(size * self.turns * chance.uniform(0.2, 0.9)) if chance.random() < 0.3 else None
        self.mode = chance.choice([None, None, None, None, "table", "summary", "handle_only"])

    @property
    def allowed_repairs(self) -> int:
        """Return how often the provider may refuse a request of the session.

        Once for each conversation that the client shortens itself or that a restart without a store makes unknown, and
        once where thinking of an older model, trimmed without regard to it, is sent to a model with the check.
        """
        forgets = self.restarts and self.shape == FORGETFUL
        is_older = self.switches > 0 and self.models != MODELS
        return self.conversations * (forgets + self.compacts) + is_older


class Client:
    """An agent: it sends its whole history with each call."""

    def __init__(self, plan: Plan, number: int) -> None:
        self.plan = plan
        self.chance = plan.chance
        self.calls = 0
        self.model = plan.model
        self.system: Any = f"You repair a large program. You are agent {number}."
        self.messages: list[Json] = [{"role": "user", "content": f"Repair part {number} of the program."}]
        self.is_stripped = False

    def request(self) -> Json:
        """Return the body of the next call."""
        plan, chance = self.plan, self.chance
        self.calls += 1
        if self.calls > 1 and chance.random() < plan.switches:
            self.model = chance.choice(plan.models)
        if plan.strips == "once" and self.calls == plan.turns // 2:
            self._strip(len(self.messages))
        if plan.compacts and self.calls == plan.turns // 2 + 1 and len(self.messages) > 6:
            self._compact()
        if plan.strips == "window":
            self._strip(len(self.messages) - 8)
        if plan.lists_from is not None and self.calls >= plan.lists_from:
            for message in self.messages:
                if isinstance(message["content"], str):
                    message["content"] = [{"type": "text", "text": message["content"]}]
        if plan.marks:
            self._mark()
        tools = [{"name": name, "description": f"Do {name}.", "input_schema": {"type": "object"}} for name in NAMES]
        body = {"model": self.model, "max_tokens": 1000, "system": self.system, "tools": tools,
                "messages": self.messages, "thinking": {"type": "adaptive"}}  # fmt: skip
        return {**body, "stream": True} if chance.random() < plan.streams else body

    def take(self, content: list[Json]) -> None:
        """Take a response, run its tools, and add a user message."""
        chance = self.chance
        self.messages.append({"role": "assistant", "content": content})
        calls = [block["id"] for block in content if block["type"] == "tool_use"]
        blocks: list[Json] = [{"type": "tool_result", "tool_use_id": one, "content": self._result()} for one in calls]
        reminder = {"type": "text", "text": "<system-reminder>Keep the list of tasks.</system-reminder>"}
        if not calls:
            text = f"Go on with part {chance.randrange(1000)}."
            blocks.append({"type": "text", "text": text})
        elif chance.random() < 0.15:
            blocks.append({"type": "text", "text": f"Also look at part {chance.randrange(1000)}."})
        if chance.random() < self.plan.reminders:
            blocks.append(reminder)
        if chance.random() < 0.03:
            blocks.append(IMAGE)
        is_text = len(blocks) == 1 and blocks[0]["type"] == "text"
        self.messages.append({"role": "user", "content": blocks[0]["text"] if is_text else blocks})
        if chance.random() < self.plan.reminders / 2:
            self.messages.append({"role": "system", "content": "The user is away."})

    def _result(self) -> Any:
        chance, lines = self.chance, self.chance.randint(1, self.plan.lines)
        start = chance.randrange(10**4)
        if chance.random() < 0.3:
            return json.dumps([{"id": start + row, "name": f"item {row}", "state": "stored"} for row in range(lines)])
        text = "\n".join(f"{start + row} value = compute({row})" for row in range(lines))
        if chance.random() < 0.05:
            return [{"type": "text", "text": text}, IMAGE]
        return [{"type": "text", "text": text}] if chance.random() < 0.2 else text

    def _strip(self, stop: int) -> None:
        """Leave out the thinking of the messages before `stop` from now on."""
        for message in self.messages[: max(0, stop)]:
            if message["role"] == "assistant":
                message["content"] = [one for one in message["content"] if "thinking" not in one["type"]]
        self.messages = [one for one in self.messages if one["content"]]

    def _compact(self) -> None:
        """Replace all but the newest messages by a summary. Their thinking is bound to the messages before them."""
        start = next((n for n in range(len(self.messages) - 4, 0, -1) if self.messages[n]["role"] == "assistant"), 0)
        summary = {"role": "user", "content": f"Summary of {start} messages: the first parts are done."}
        self.messages = [summary, *self.messages[start:]] if start else self.messages

    def _mark(self) -> None:
        """Move the cache mark to the end."""
        for message in self.messages:
            for block in message["content"] if isinstance(message["content"], list) else ():
                block.pop("cache_control", None)
        last = self.messages[-1]
        if isinstance(last["content"], list) and last["role"] == "user":
            last["content"][-1]["cache_control"] = MARK


@dataclass
class Outcome:
    """The results of a session."""

    plan: Plan
    failures: list[str] = field(default_factory=list)
    refusals: int = 0
    calls: int = 0
    trimmed: int = 0
    ended: str = "whole"


@dataclass
class Stage:
    """A recorder on a port, and gateways in front of it, by shape."""

    folder: Path
    recorder: Recorder
    url: str
    gateways: dict[tuple[int, int], GatewayThread] = field(default_factory=dict)

    def gateway(self, shape: int, worker: int = 0) -> GatewayThread:
        """Return a gateway of a shape; start it if it does not run. Workers of a shape share a store."""
        if (shape, worker) not in self.gateways:
            folder = self.folder / f"shape-{shape}"
            folder.mkdir(exist_ok=True)
            self.gateways[shape, worker] = GatewayThread(folder, self.url, {"agents": STEPS, **SHAPES[shape]})
        return self.gateways[shape, worker]

    def restart(self, shape: int) -> None:
        """Stop the first gateway of a shape; the next call of `gateway` starts it again on the same store."""
        self.gateways.pop((shape, 0)).stop()

    def play(self, seed: int, most_turns: int = 40) -> Outcome:
        """Play one session."""
        plan, recorder = Plan(seed, most_turns), self.recorder
        recorder.reset()
        recorder.turn = lambda body: _turn(plan, may_be_silent="tool_choice" not in body)
        recorder.redacts = lambda: plan.chance.random() < plan.redacts
        outcome = Outcome(plan)
        clients = [Client(plan, number) for number in range(plan.conversations)]
        restart_at = plan.chance.randint(2, plan.turns) if plan.restarts else 0
        for number in range(1, plan.turns + 1):
            if number == restart_at and (plan.shape, 0) in self.gateways:
                self.restart(plan.shape)
            web = self.gateway(plan.shape, plan.chance.randrange(plan.workers)).web
            client = plan.chance.choice(clients)
            body = client.request()
            if plan.chance.random() < plan.counts:
                counted = web.post(f"{PATH}/count_tokens", _countable(body), {"x-session-id": f"session-{seed}"})
                if counted.status != 200:
                    outcome.failures.append(f"count before call {number}: {counted.body.decode()[:400]}")
            reply = web.post(PATH, json.dumps(body, **plan.style).encode(), _headers(plan))
            outcome.calls += 1
            outcome.trimmed += reply.header("x-context-trimmed") not in (None, "none")
            if reply.status != 200:
                outcome.ended = _name(reply)
                if outcome.ended not in DOCUMENTED:
                    outcome.failures.append(f"call {number}: {reply.status} {reply.body.decode()[:400]}")
                if outcome.ended != "context_length_exceeded":
                    break
                plan.context = None
                continue
            client.take(gathered(reply.events)["content"] if body.get("stream") else reply.json["content"])
            if recorder.faults:
                outcome.failures.append(f"call {number}: accepted, but {recorder.faults[:3]}")
                break
        outcome.refusals = len(recorder.refused)
        if outcome.refusals > plan.allowed_repairs:
            outcome.failures.append(f"{outcome.refusals} refusals: {recorder.refused}")
        return outcome


def _countable(body: Json) -> Json:
    return {name: value for name, value in body.items() if name not in ("stream", "max_tokens")}


def _name(reply: Reply) -> str:
    error = reply.error
    return str(error.get("code") or error.get("type"))


def _headers(plan: Plan) -> dict[str, str]:
    context = plan.context
    if context is not None and plan.changes_context:
        context = int(context * plan.chance.choice([0.6, 1, 1, 1, 2]))
    values = {
        "x-session-id": f"session-{plan.seed}",
        "x-context-budget": context,
        "x-session-budget-tokens": plan.session_budget,
        "x-session-agent": plan.agent,
        "x-response-mode": plan.mode,
        "anthropic-beta": BETA if plan.beta else None,
    }
    return {name: str(value) for name, value in values.items() if value is not None}


def _turn(plan: Plan, *, may_be_silent: bool) -> Turn:
    """Return a response of the model. It is not empty where a forced tool call turns thinking off."""
    chance = plan.chance
    blocks = chance.choice([1, 1, 1, 2, 3])
    thinking = tuple(
        "\n".join(f"I look at part {chance.randrange(10**6)} next." for _ in range(chance.randint(1, 8)))
        for _ in range(blocks)
    )
    if may_be_silent and chance.random() < plan.silent:
        return Turn(text="", thinking=thinking)
    count = chance.choice([0, 1, 1, 1, 1, 2, 3])
    calls = tuple(
        ToolCall(chance.choice(NAMES), json.dumps({"path": f"src/part_{chance.randrange(1000)}.py"}))
        for _ in range(count)
    )
    text = f"I look at part {chance.randrange(1000)} of the caf\u00e9." if not calls or chance.random() < 0.6 else ""
    return Turn(text=text, thinking=thinking, tool_calls=calls)


@contextmanager
def stage(folder: Path) -> Iterator[Stage]:
    """Start the recorder; stop it and all gateways at the end."""
    recorder = Recorder()
    options = serving.make_config(
        with_lifespan(recorder), max_head_bytes=65_536, max_body=2**28, head_timeout_s=60, grace_s=1
    )
    with serving.ServerThread(options) as server:
        made = Stage(folder, recorder, server.url)
        yield made
        for gateway in made.gateways.values():
            gateway.stop()


def _shown(plan: Plan) -> Json:
    return {name: value for name, value in vars(plan).items() if name != "chance" and value not in (None, 0, False)}


def main() -> int:
    """Play as many sessions as the command line says; return 1 if one failed."""
    count, seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    folder = Path(tempfile.mkdtemp())
    endings: Counter[str] = Counter()
    failed = calls = trimmed = repaired = 0
    start = time.monotonic()
    with stage(folder) as made:
        for number in range(count):
            outcome = made.play(seed * 1_000_000 + number)
            endings[outcome.ended] += 1
            calls, trimmed = calls + outcome.calls, trimmed + outcome.trimmed
            if outcome.refusals:
                repaired += 1
                print(f"repaired {outcome.refusals}: {_shown(outcome.plan)}: {made.recorder.refused}", flush=True)
            failed += bool(outcome.failures)
            for failure in outcome.failures:
                print(f"FAILED {_shown(outcome.plan)}: {failure}", flush=True)
    shutil.rmtree(folder)
    print(f"{count} sessions in {time.monotonic() - start:.0f} s, {calls} calls, {trimmed} trimmed, "
          f"{repaired} sessions repaired, {failed} failed, {dict(endings)}")  # fmt: skip
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
