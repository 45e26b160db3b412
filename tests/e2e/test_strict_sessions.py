"""Long agent sessions in front of a provider that enforces the rules of the real models' APIs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from gateway.mock import STRICT_MODELS, MockProvider, MockServer, ToolCall, Turn
from tests.support.gateways import GatewayThread
from tests.support.web import CHAT, Reply, Web

Json = dict[str, Any]

MODELS = ("gpt-6.2-sol", "gemini-3.1-pro", "deepseek-v4-pro", "kimi-k3", "ministral-14b-2512", "qwen3.5-plus")
NAMES = ("plan", "list_depot", "read_parcel")
SYSTEM = "You answer questions about a warehouse."
#: model calls of each task; the long task is trimmed while it runs
TASKS = (4, 4, 20, 4, 4, 4)
SHORT_TASKS = (4,) * 10
#: a review starts after a plan and forces two calls
STEPS = [
    {
        "name": "review",
        "conditions": [{"sequence_match": ["plan"]}],
        "sequence": ["list_depot", "read_parcel"],
        "enforce": "require",
    },
    {"name": "work", "is_default": True, "available_tools": {"denied": ["list_depot"]}},
]


def call(name: str, number: int) -> ToolCall:
    return ToolCall(name, json.dumps({"number": number}))


def script(task: int, length: int, *, parallel: bool) -> Iterator[Turn]:
    """Yield the model's turns in a task: a plan, then lists and parcels, then a final text."""
    yield Turn(text="I will make a plan.", tool_calls=(call("plan", task),))
    for number in range(task * 100, task * 100 + length // 2 - 1):
        lists = (call("list_depot", number), call("list_depot", number + 50))
        yield Turn(tool_calls=lists if parallel else lists[:1])
        yield Turn(tool_calls=(call("read_parcel", number),))
    yield Turn(text=f"Task {task} is done: parcel {task} stands in hall {task * 3}.")


def result(number: int) -> str:
    """Return a tool result of about 800 tokens, in rows."""
    rows = [{"parcel": f"{number}-{row}", "hall": number, "row": row * 3, "state": "stored"} for row in range(40)]
    return json.dumps(rows)


@dataclass
class ChatClient:
    """An agent on chat completions that sends back each message as it received it."""

    web: Web
    model: str
    headers: dict[str, str]
    history: list[Json] = field(default_factory=lambda: [{"role": "system", "content": SYSTEM}])
    numbers: int = 0

    def ask(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    def step(self, *, stream: bool) -> tuple[Reply, bool]:
        """Call the model once and run the tools that it calls; return the reply, and True if it called any."""
        tools = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in NAMES]
        body = {"model": self.model, "messages": self.history, "tools": tools, "stream": stream}
        reply = self.web.post(CHAT, body, self.headers)
        assert reply.status == 200, reply.body.decode()
        message = _gathered(reply.events) if stream else reply.json["choices"][0]["message"]
        self.history.append(message)
        calls = message.get("tool_calls") or []
        for made in calls:
            self.numbers += 1
            content = result(self.numbers)
            self.history.append({"role": "tool", "tool_call_id": made["id"], "content": content})
        return reply, bool(calls)


def _gathered(events: Sequence[Json]) -> Json:
    """Return the message of a chat stream, as a client builds it that keeps unknown fields."""
    message: Json = {"role": "assistant", "content": None}
    calls: list[Json] = []
    for delta in [event["choices"][0]["delta"] for event in events if event["choices"]]:
        for name in ("content", "reasoning_content"):
            if delta.get(name):
                message[name] = (message.get(name) or "") + delta[name]
        for part in delta.get("tool_calls") or ():
            if part["index"] == len(calls):
                calls.append({key: value for key, value in part.items() if key != "index"})
            else:
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    return {**message, "tool_calls": calls} if calls else message


@dataclass
class ResponsesClient:
    """An agent on the Responses API that keeps all items itself (`store: false`)."""

    web: Web
    model: str
    headers: dict[str, str]
    history: list[Json] = field(default_factory=list)
    numbers: int = 0

    def ask(self, text: str) -> None:
        self.history.append({"role": "user", "content": [{"type": "input_text", "text": text}]})

    def step(self, *, stream: bool) -> tuple[Reply, bool]:
        """Call the model once and run the tools that it calls; return the reply, and True if it called any."""
        body = {
            "model": self.model,
            "instructions": SYSTEM,
            "input": self.history,
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "tools": [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in NAMES],
            "stream": stream,
        }
        reply = self.web.post("/v1/responses", body, self.headers)
        assert reply.status == 200, reply.body.decode()
        output = reply.events[-1]["response"]["output"] if stream else reply.json["output"]
        self.history += output
        calls = [item for item in output if item["type"] == "function_call"]
        for made in calls:
            self.numbers += 1
            answer = {"type": "function_call_output", "call_id": made["call_id"], "output": result(self.numbers)}
            self.history.append(answer)
        return reply, bool(calls)


@dataclass(frozen=True)
class Strict:
    """A gateway in front of a strict provider."""

    gateway: GatewayThread
    provider: MockProvider

    def session(
        self, model: str, headers: dict[str, str], tasks: Sequence[int] = TASKS, *, parallel: bool = True
    ) -> list[Reply]:
        """Run a session of 40 model calls, every second one streamed; return the replies."""
        self.provider.reset()
        kind = ResponsesClient if model.startswith("gpt") else ChatClient
        client = kind(self.gateway.web, model, headers)
        replies: list[Reply] = []
        for task, length in enumerate(tasks):
            self.provider.push(*script(task, length, parallel=parallel))
            client.ask(f"Which hall holds parcel {task}? Look at every depot.")
            is_working = True
            while is_working:
                reply, is_working = client.step(stream=len(replies) % 2 == 1)
                replies.append(reply)
        assert len(replies) == sum(tasks) == 40
        return replies


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Strict]:
    with MockServer(MockProvider(strict=STRICT_MODELS)) as server:
        gateway = GatewayThread(
            tmp_path_factory.mktemp("strict"), server.url, {"agents": {"reviewer": {"steps": STEPS}}}
        )
        yield Strict(gateway, server.provider)
        gateway.stop()


@pytest.mark.parametrize("model", MODELS)
def test_a_session_far_over_its_context_budget_is_never_refused(strict: Strict, model: str, session: str) -> None:
    replies = strict.session(model, {"x-session-id": session, "x-context-budget": "3500"})
    untrimmed = [reply for reply in replies if reply.header("x-context-trimmed") == "none"]
    assert len(untrimmed) < 10
    assert sum(int(reply.header("x-context-tokens-original") or 0) > 10_000 for reply in replies) > 20
    assert all(call.status == 200 for call in strict.provider.calls), "the gateway retried nothing"


@pytest.mark.parametrize("model", MODELS)
def test_a_session_with_shortened_tool_results_is_never_refused(strict: Strict, model: str, session: str) -> None:
    replies = strict.session(model, {"x-session-id": session, "x-session-budget-tokens": "500000"})
    assert {reply.header("x-response-mode") for reply in replies} >= {"raw", "table", "summary"}
    assert all(call.status == 200 for call in strict.provider.calls), "the gateway retried nothing"


@pytest.mark.parametrize("model", MODELS)
def test_a_session_with_required_steps_is_never_refused(strict: Strict, model: str, session: str) -> None:
    headers = {"x-session-id": session, "x-session-agent": "reviewer"}
    replies = strict.session(model, headers, SHORT_TASKS, parallel=False)
    assert [reply.header("x-session-step-warning") for reply in replies] == [None] * len(replies)
    answered = [call for call in strict.provider.calls if call.status == 200]
    for number, due in ((1, "list_depot"), (2, "read_parcel")):
        assert [may_call(json.loads(call.body)) for call in answered[number::4]] == [{due}] * len(SHORT_TASKS)


def may_call(body: Json) -> set[str]:
    """Return the tools that a request lets the model call."""
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        return {choice["function"]["name"] if "function" in choice else choice["name"]}
    return {(tool.get("function") or tool)["name"] for tool in body["tools"]}
