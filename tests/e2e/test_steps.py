"""Steps through a running gateway: offered tools, transitions between steps, and several clients of one session."""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest

from gateway.mock import Behaviour, MockProvider, MockServer, ToolCall, Turn
from tests.conftest import StartGateway, StartProcess, StartUpstream
from tests.stores.redis_servers import RedisServer
from tests.support.formats import Format
from tests.support.gateways import STARTS_S, GatewayProcess, until
from tests.support.scripted import Held
from tests.support.timing import LIMIT_S
from tests.support.web import CHAT, HI, Reply, Web

ROOT = Path(__file__).parent.parent.parent
EVALUATION = ROOT / "config/steps/evaluation.yaml"
NAMES = ("search", "read_draft", "list_flaws", "argue_for", "argue_against", "verdict", "ask_user")
#: the steps of a short example: a step with a sequence, and a default step
REVIEW = {
    "name": "review",
    "conditions": [{"message_matches": "(?i)review"}],
    "available_tools": {"allowed": ["read_*", "comment"]},
    "sequence": ["read_*", "comment"],
}
WORK = {"name": "work", "is_default": True, "available_tools": {"denied": ["publish"]}}
OFFERED = ("publish", "search", "read_a", "comment")


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}


TOOLS: Any = [tool(name) for name in NAMES]


def agent_run(client: openai.OpenAI, task: str, headers: dict[str, str], most: int = 10) -> list[tuple[str, str, str]]:
    """Run an agent until the model calls no tool; return (step, index, tool) of each call."""
    messages: Any = [{"role": "user", "content": task}]
    seen = []
    for _ in range(most):
        raw = client.chat.completions.with_raw_response.create(
            model="mock-small", messages=messages, tools=TOOLS, extra_headers=headers
        )
        message = raw.parse().choices[0].message
        calls = message.tool_calls or []
        name = calls[0].function.name if calls and calls[0].type == "function" else ""
        seen.append((raw.headers.get("x-session-step", ""), raw.headers.get("x-session-sequence-index", ""), name))
        if not calls:
            return seen
        messages.append(message.model_dump(exclude_none=True))
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "done"} for call in calls]
    return seen


@pytest.mark.parametrize("has_choice", [True, False], ids=["allowed_tools", "shorter list"])
def test_the_evaluation_example_passes_through_its_steps_within_one_turn(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider, has_choice: bool
) -> None:
    gateway = gateway_server(
        mock_server.url,
        **{"agents": {"writer": str(EVALUATION)}, "providers.upstream.allowed_tools": has_choice},
    )
    headers = {"x-session-id": "essay", "x-session-agent": "writer"}
    with openai.OpenAI(api_key="none", base_url=gateway.base_url, max_retries=0) as client:
        taken = agent_run(client, "Please evaluate the draft.", headers)
    assert taken == [
        ("critique", "1", "read_draft"),
        ("debate", "0", "list_flaws"),
        ("debate", "1", "argue_for"),
        ("reflect", "0", "argue_against"),
        ("work", "", "verdict"),
        ("work", "", ""),
    ]
    found = gateway.web.get("/api/sessions/essay").json
    assert found["active_step"] == "work"
    assert found["recent_tools"] == ["read_draft", "list_flaws", "argue_for", "argue_against", "verdict"]
    lists = {tuple(one["function"]["name"] for one in json.loads(call.body)["tools"]) for call in mock.calls}
    if has_choice:
        assert lists == {NAMES}, "the list is unchanged, so the provider's cache stays valid"


def test_the_transcript_in_the_guide_matches_the_output_of_the_command() -> None:
    file = ROOT / "bench" / "steps.py"
    spec = importlib.util.spec_from_file_location("bench_steps", file)
    assert spec is not None
    assert spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = bench
    try:
        spec.loader.exec_module(bench)
        document = (ROOT / "docs" / "guides" / "restrict-tools.md").read_text("utf-8")
        assert bench.with_transcript(document, bench.transcript()) == document, "python bench/steps.py --transcript"
    finally:
        del sys.modules[spec.name]


# --- the three formats ----------------------------------------------------------------------------------------------


def written(wire: str, name: str) -> dict[str, Any]:
    """Return a tool in the request format of this API."""
    schema = {"type": "object", "properties": {}}
    if wire == "chat":
        return {"type": "function", "function": {"name": name, "parameters": schema}}
    if wire == "responses":
        return {"type": "function", "name": name, "parameters": schema}
    return {"name": name, "input_schema": schema}


def ask(wire: str, text: str, *names: str, **fields: Any) -> dict[str, Any]:
    body = Format(wire).body([{"role": "user", "content": text}], model="mock-small", **fields)
    return {**body, "tools": [written(wire, name) for name in names]} if names else body


def forced(wire: str, name: str) -> dict[str, Any]:
    if wire == "chat":
        return {"type": "function", "function": {"name": name}}
    return {"type": "function" if wire == "responses" else "tool", "name": name}


def place(reply: Reply) -> tuple[str | None, str | None]:
    return reply.header("x-session-step"), reply.header("x-session-sequence-index")


def in_session(session: str, mock: str = "", **more: str) -> dict[str, str]:
    return {"x-session-id": session, **({"x-mock": mock} if mock else {}), **more}


def offers(body: bytes) -> list[str]:
    return [(one.get("function") or one)["name"] for one in json.loads(body).get("tools", [])]


def may_call(body: bytes) -> list[str]:
    """Return the tools that the request lets the model call."""
    choice = json.loads(body).get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        said = choice.get("allowed_tools", choice)
        return [(one.get("function") or one)["name"] for one in said["tools"]]
    if isinstance(choice, dict) and "name" in (inner := choice.get("function", choice)):
        return [inner["name"]]
    return offers(body)


WIRES = pytest.mark.parametrize("wire", ["chat", "responses", "messages"])


@WIRES
@pytest.mark.parametrize(("stream", "has_choice"), [(True, True), (True, False), (False, True), (False, False)])
def test_a_sequence_advances_in_every_format_with_and_without_streaming(  # noqa: PLR0917
    wire: str, stream: bool, has_choice: bool, gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider
) -> None:
    gateway = gateway_server(
        mock_server.url, **{"steps": [REVIEW, WORK], "providers.upstream.allowed_tools": has_choice}
    )

    def call(text: str, **fields: Any) -> tuple[tuple[str | None, str | None], tuple[str | None, str | None]]:
        """Return the step and index before and after the call."""
        reply = gateway.web.post(Format(wire).path, ask(wire, text, *OFFERED, stream=stream, **fields), in_session("s"))
        assert reply.status == 200, reply.body
        if not stream:
            return place(reply), place(reply)
        comments = reply.comments
        return place(reply), (comments.get("x-session-step"), comments.get("x-session-sequence-index"))

    before, after = call("review it")
    assert after == ("review", "1")
    if stream:
        assert before == ("review", "0")
    assert may_call(mock.calls[-1].body) == ["read_a"]
    _, after = call("review it")
    assert after == ("review", "2")
    assert may_call(mock.calls[-1].body) == ["comment"]
    call("review it")
    assert may_call(mock.calls[-1].body) == ["read_a", "comment"], (
        "a finished sequence lets all tools of the step through"
    )
    _, after = call("thanks")
    assert after == ("work", None)
    assert may_call(mock.calls[-1].body) == ["search", "read_a", "comment"]
    keeps_list = has_choice and wire != "messages"
    assert {tuple(offers(one.body)) == OFFERED for one in mock.calls} == {keeps_list}


@WIRES
@pytest.mark.parametrize("stream", [True, False])
def test_tools_not_allowed_by_the_step_are_refused_in_the_format_of_the_caller(
    wire: str, stream: bool, gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider
) -> None:
    gateway = gateway_server(mock_server.url, steps=[{**REVIEW, "enforce": "reject"}, WORK])
    path = Format(wire).path
    refused = [
        ask(wire, "hello", *OFFERED, tool_choice=forced(wire, "publish"), stream=stream),
        ask(wire, "review it", "publish", "search", stream=stream),
        ask(wire, "review it", "read_a", "publish", stream=stream),
    ]
    for body in refused:
        reply = gateway.web.post(path, body, in_session("s"))
        assert reply.status == 400
        assert reply.header("x-should-retry") == "false"
        if wire == "messages":
            assert reply.json["type"] == "error"
            assert reply.error["type"] == "invalid_request_error"
        else:
            assert reply.error["code"] == "tool_not_allowed"
        assert "PATCH /api/sessions/s" in reply.error["message"]
    assert mock.calls == []
    reply = gateway.web.post(path, ask(wire, "review it", "read_a", stream=stream), in_session("s"))
    assert reply.status == 200


@WIRES
@pytest.mark.parametrize("enforce", ["filter", "require", "reject", "observe"])
def test_a_request_without_tools_is_forwarded_byte_for_byte(
    wire: str, enforce: str, gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider
) -> None:
    gateway = gateway_server(mock_server.url, steps=[{**REVIEW, "enforce": enforce}])
    body = json.dumps(ask(wire, "review  it", x_odd=[1.0, None])).encode()
    reply = gateway.web.post(Format(wire).path, body, in_session("s"))
    assert place(reply) == ("review", "0")
    assert mock.calls[-1].body == body


@WIRES
def test_a_due_tool_is_forced_if_the_step_requires_it(
    wire: str, gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider
) -> None:
    two = {"name": "two", "sequence": [["read_a", "comment"], "search"], "enforce": "require"}
    gateway = gateway_server(mock_server.url, **{"steps": [two], "providers.upstream.allowed_tools": True})
    gateway.web.post(Format(wire).path, ask(wire, "hi", *OFFERED), in_session("s"))
    choice = json.loads(mock.calls[-1].body)["tool_choice"]
    assert may_call(mock.calls[-1].body) == ["read_a", "comment"]
    inner = choice.get("allowed_tools", choice)
    assert (inner.get("mode") or inner["type"]) == ("any" if wire == "messages" else "required")
    gateway.web.post(Format(wire).path, ask(wire, "hi", *OFFERED), in_session("s"))
    assert json.loads(mock.calls[-1].body)["tool_choice"] == forced(wire, "search")
    assert tuple(offers(mock.calls[-1].body)) == OFFERED


@WIRES
@pytest.mark.parametrize("stream", [True, False])
def test_a_stray_tool_call_is_reported_in_a_header_and_noted(
    wire: str, stream: bool, gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider
) -> None:
    gateway = gateway_server(mock_server.url, steps=[{**REVIEW, "enforce": "observe"}])
    mock.push(
        Turn(tool_calls=(ToolCall("publish", "{}"), ToolCall("read_a", "{}"), ToolCall("caf\u00e9\r\nx: 1", "{}")))
    )
    reply = gateway.web.post(Format(wire).path, ask(wire, "review it", *OFFERED, stream=stream), in_session("s"))
    warning = (reply.comments if stream else dict(reply.headers))["x-session-step-warning"]
    assert warning == "not due or not allowed: publish, caf???x: 1"
    assert reply.header("x") is None
    assert "x" not in reply.comments
    (found,) = gateway.web.get("/api/sessions/s/calls").json["calls"]
    assert found["notes"]["stray_tools"] == "publish, caf\u00e9??x: 1"
    assert gateway.web.get("/api/sessions/s").json["steps"]["default"]["sequence_index"] == 1


# --- providers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", ["chat", "responses"])
def test_after_a_refused_tool_choice_the_tool_list_is_shortened_instead(
    wire: str, gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider
) -> None:
    gateway = gateway_server(mock_server.url, **{"steps": [WORK], "providers.upstream.allowed_tools": True})
    headers = in_session("s", "refuse_allowed_tools=1")
    for _ in range(2):
        reply = gateway.web.post(Format(wire).path, ask(wire, "hi", *OFFERED), headers)
        assert reply.status == 200
    assert [offers(one.body) for one in mock.calls] == [list(OFFERED), *[["search", "read_a", "comment"]] * 2]
    notes = [one["notes"] for one in gateway.web.get("/api/sessions/s/calls").json["calls"]]
    assert ["tool_choice" in one for one in notes] == [False, True]
    assert gateway.web.get("/api/sessions/s").json["calls"] == 2


def test_a_fallback_gets_the_tool_restriction_in_the_form_that_it_supports(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider
) -> None:
    gateway = gateway_server(
        mock_server.url,
        **{
            "steps": [WORK],
            "providers.upstream.allowed_tools": True,
            "providers.other": {"base_url": mock_server.url, "auth": "none", "retries": 0},
            "models": [{"match": "mock-small", "provider": "upstream", "fallback": ["other/mock-large"]}],
        },
    )
    mock.push(Turn(behaviour=Behaviour(status=503)), Turn())
    reply = gateway.web.chat("s", tools=[written("chat", name) for name in OFFERED])
    assert (reply.status, reply.json["model"]) == (200, "mock-large")
    assert [len(offers(one.body)) for one in mock.calls] == [4, 3]
    assert [may_call(one.body) for one in mock.calls] == [["search", "read_a", "comment"]] * 2


# --- what a step sets -----------------------------------------------------------------------------------------------


@WIRES
def test_tokens_are_counted_and_reserved_for_the_restricted_request(
    wire: str, gateway_server: StartGateway, byte_server: StartUpstream
) -> None:
    many = [f"tool_{number}_with_a_long_name" for number in range(40)]
    steps = [{"name": "s", "available_tools": {"allowed": ["search"]}}]

    upstream = byte_server(lambda connection: None)

    def counted_and_held(*tools: str) -> tuple[str | None, int]:
        """Return the counted and the reserved tokens of a gateway that has learned nothing yet."""
        upstream.script = held_upstream = Held()
        gateway = gateway_server(upstream.url, steps=steps, **{"budget.tokens": 100_000})
        under_way = Running(lambda: gateway.web.post(Format(wire).path, ask(wire, "hi", *tools), in_session("s")))
        held = until(lambda: held_of(gateway.web, "s"))
        held_upstream.release()
        return under_way.end().header("x-context-tokens"), held

    restrict = counted_and_held(*many, "search")
    assert restrict == counted_and_held("search")
    first, second = upstream.requests
    assert first.json == second.json


def held_of(web: Web, session: str) -> int:
    """Return the reserved tokens of a session. A PATCH reports the budget before the session is listed."""
    shown = web.send("PATCH", f"/api/sessions/{session}", {"active_step": "s"}).json
    return int(shown["budget"]["held"])


class Running:
    """A call in its own thread."""

    def __init__(self, call: Callable[[], Reply]) -> None:
        self._answers: list[Reply] = []
        self._thread = threading.Thread(target=lambda: self._answers.append(call()), daemon=True)
        self._thread.start()

    def end(self) -> Reply:
        self._thread.join(LIMIT_S)
        return self._answers[0]


LIMITS = {"chat": "max_completion_tokens", "responses": "max_output_tokens", "messages": "max_tokens"}


@WIRES
def test_the_output_limit_of_a_step_applies_and_a_budget_can_lower_it(
    wire: str, gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider
) -> None:
    step = {"name": "s", "max_output_tokens": 60}
    gateway = gateway_server(mock_server.url, steps=[step])

    def limit(own: int | None, **headers: str) -> int:
        reply = gateway.web.post(
            Format(wire).path, ask(wire, "hi", limit=own), in_session("s", "tokens=1/1", **headers)
        )
        assert reply.status == 200, reply.body
        sent = json.loads(mock.calls[-1].body)
        return int(sent.get(LIMITS[wire]) or sent["max_tokens"])

    assert limit(500) == 60
    assert limit(20) == 20
    if wire != "messages":
        assert limit(None) == 60
    assert limit(500, **{"x-session-budget-tokens": "50"}) < 50
    notes = gateway.web.get("/api/sessions/s/calls").json["calls"]
    assert notes[0]["notes"]["output_limit"].endswith("set by the budget")
    assert notes[-1]["notes"]["output_limit"] == "60, set by the step"


def test_the_output_limit_of_a_step_is_capped_by_the_model(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider
) -> None:
    models = [{"match": "mock-small", "provider": "upstream", "output": 100}]
    gateway = gateway_server(mock_server.url, steps=[{"name": "s", "max_output_tokens": 5000}], models=models)
    gateway.web.chat("s")
    assert json.loads(mock.calls[-1].body)["max_tokens"] == 100


@WIRES
def test_a_request_is_trimmed_to_the_context_budget_of_its_step(
    wire: str, gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider
) -> None:
    gateway = gateway_server(mock_server.url, steps=[{"name": "s", "context_budget": 3000}])
    body = Format(wire).agent(20, model="mock-small")
    reply = gateway.web.post(Format(wire).path, body, in_session("s"))
    assert reply.status == 200, reply.body
    assert int(reply.header("x-context-tokens") or 0) <= 3000 < int(reply.header("x-context-tokens-original") or 0)
    reply = gateway.web.post(Format(wire).path, body, in_session("s", **{"x-context-budget": "2000"}))
    assert int(reply.header("x-context-tokens") or 0) <= 2000


@WIRES
def test_a_step_can_select_another_model_that_the_client_key_may_use(
    wire: str, gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider
) -> None:
    keys: list[dict[str, Any]] = [
        {"name": "alice", "key": "alice-key-0123456789"},
        {"name": "bob", "key": "bob-key-0123456789", "models": ["mock-small"]},
    ]
    gateway = gateway_server(mock_server.url, steps=[{"name": "s", "model": "mock-large"}], **{"auth.keys": keys})
    alice, bob = (Web(gateway.url, {"authorization": f"Bearer {key['key']}"}) for key in keys)
    reply = alice.post(Format(wire).path, ask(wire, "hi"), in_session("s"))
    assert (reply.status, json.loads(mock.calls[-1].body)["model"]) == (200, "mock-large")
    (found,) = gateway.web.get("/api/sessions/alice/s/calls").json["calls"]
    assert (found["model"], found["notes"]["model"]) == ("mock-large", "mock-large, set by the step")
    reply = bob.post(Format(wire).path, ask(wire, "hi"), in_session("s"))
    assert (reply.status, len(mock.calls)) == (404, 1)
    assert 'The step "s" calls it.' in reply.error["message"]


@pytest.mark.parametrize(
    "sets",
    [
        {},
        {"available_tools": {"allowed": ["search"]}},
        {"model": "mock-large"},
        {"model": "mock-large", "available_tools": {"allowed": ["search"]}},
    ],
    ids=["nothing", "fewer tools", "another model", "both"],
)
def test_tokens_counted_for_a_condition_are_not_reported_for_the_sent_request(
    sets: Mapping[str, Any], gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider
) -> None:
    models = [{"match": "mock-large", "provider": "upstream", "tokenizer": "chars/4"}]

    def counted(**conditions: int) -> str | None:
        steps = [{"name": "s", "conditions": [{name: value} for name, value in conditions.items()], **sets}]
        gateway = gateway_server(mock_server.url, steps=steps, models=models)
        reply = gateway.web.post(CHAT, ask("chat", "ни́же — 数える", *OFFERED), in_session("s"))
        assert reply.header("x-session-step") == "s"
        return reply.header("x-context-tokens")

    assert counted(tokens_above=1) == counted()
    assert mock.calls[0].body == mock.calls[1].body


# --- whose steps ----------------------------------------------------------------------------------------------------


def test_the_agent_of_a_route_precedes_the_agent_of_the_header(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider
) -> None:
    agents = {name: {"steps": [{"name": f"step-of-{name}"}]} for name in ("writer", "editor")}
    models = [{"match": "mock-large", "provider": "upstream", "agent": "editor"}]
    gateway = gateway_server(mock_server.url, agents=agents, models=models, steps=[{"name": "step-of-all"}])

    def step(model: str, agent: str | None) -> str | None:
        headers = {"x-session-id": "s", **({"x-session-agent": agent} if agent else {})}
        reply = gateway.web.post(CHAT, {"model": model, "messages": HI}, headers)
        assert reply.status == 200
        return reply.header("x-session-step")

    assert step("mock-small", None) == "step-of-all"
    assert step("mock-small", "default") == "step-of-all"
    assert step("mock-small", "writer") == "step-of-writer"
    assert step("mock-large", "writer") == step("mock-large", None) == "step-of-editor"
    assert "x-session-agent" not in {name for call in mock.calls for name, _ in call.headers}


@WIRES
@pytest.mark.parametrize("name", ["nobody", "two words", "", "caf\u00e9"])
def test_an_agent_that_does_not_exist_is_refused(
    wire: str, name: str, gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider
) -> None:
    gateway = gateway_server(mock_server.url, agents={"writer": {"steps": [{"name": "s"}]}})
    reply = gateway.web.post(Format(wire).path, ask(wire, "hi"), in_session("s", **{"x-session-agent": name}))
    assert (reply.status, mock.calls) == (400, [])
    assert "agent" in reply.error["message"]


# --- restart and reload ---------------------------------------------------------------------------------------------


def test_a_restart_keeps_the_step_and_a_reload_leaves_a_removed_step(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider
) -> None:
    first = gateway_server(mock_server.url, steps=[REVIEW, WORK])
    first.web.post(CHAT, ask("chat", "review it", *OFFERED), in_session("s"))
    first.stop()
    again = gateway_server(mock_server.url, folder=first.folder, steps=[REVIEW, WORK])
    reply = again.web.post(CHAT, ask("chat", "go on"), in_session("s"))
    assert place(reply) == ("review", "1")
    settings = json.loads(again.file.read_text())
    again.file.write_text(json.dumps({**settings, "steps": [WORK]}))
    assert again.web.post("/api/reload").status == 200
    found = again.web.get("/api/sessions/s").json
    assert (found["active_step"], found["steps"]["default"]["due"]) == ("review", None)
    assert place(again.web.post(CHAT, ask("chat", "go on"), in_session("s"))) == ("work", None)
    again.file.write_text(json.dumps({**settings, "steps": []}))
    again.web.post("/api/reload")
    assert place(again.web.post(CHAT, ask("chat", "review it", *OFFERED), in_session("s"))) == (None, None)
    assert offers(mock.calls[-1].body) == list(OFFERED)


# --- several clients of one session ---------------------------------------------------------------------------------

ENTRIES, CLIENTS = 60, 6
LONG = [{"name": "long", "sequence": [["go", "walk"]] * ENTRIES}]


def ready(gateway: GatewayProcess) -> bool:
    try:
        return gateway.web.get("/readyz").status == 200
    except (OSError, TimeoutError):
        return False


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    yield server
    server.kill()


def clients_of_one_session(webs: list[Web]) -> None:
    """Check that each client sees the index grow, and that all clients together see each index once."""
    seen: dict[int, list[int]] = {number: [] for number in range(CLIENTS)}
    body = ask("chat", "hi", "go", "walk", "other")

    def work(number: int) -> None:
        for turn in range(ENTRIES // CLIENTS):
            web = webs[(number + turn) % len(webs)]
            reply = web.post(CHAT, body, in_session("shared"))
            seen[number].append(int(reply.header("x-session-sequence-index") or -1))

    watched: list[int] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            reply = webs[0].get("/api/sessions/shared")
            if reply.status == 200:
                watched.append(reply.json["steps"]["default"]["sequence_index"])

    threads = [threading.Thread(target=work, args=(number,)) for number in seen]
    watcher = threading.Thread(target=watch)
    for thread in (*threads, watcher):
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    done.set()
    watcher.join(LIMIT_S)
    for indices in (*seen.values(), watched):
        assert indices == sorted(indices), "the index never decreases"
    assert all(first < second for indices in seen.values() for first, second in pairwise(indices))
    assert sorted(index for indices in seen.values() for index in indices) == list(range(1, ENTRIES + 1))


def test_clients_of_one_session_on_two_workers_see_each_sequence_index_once(
    mock_server: MockServer, mock: MockProvider, gateway_process: StartProcess
) -> None:
    gateway = gateway_process(mock_server.url, steps=LONG, **{"server.workers": 2})
    until(lambda: ready(gateway), STARTS_S, "a worker answers")
    clients_of_one_session([gateway.web])


def test_clients_of_one_session_on_two_machines_see_each_sequence_index_once(
    redis: RedisServer, mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    store = {"url": redis.url, "timeout_ms": 5000}
    gateways = [gateway_server(mock_server.url, steps=LONG, store=store) for _ in range(2)]
    clients_of_one_session([gateway.web for gateway in gateways])


def test_an_agent_from_a_file_is_known_to_every_worker(
    mock_server: MockServer, mock: MockProvider, gateway_process: StartProcess
) -> None:
    gateway = gateway_process(mock_server.url, agents={"writer": str(EVALUATION)}, **{"server.workers": 2})
    until(lambda: ready(gateway), STARTS_S, "a worker answers")
    headers = in_session("s", **{"x-session-agent": "writer"})
    steps = {gateway.web.post(CHAT, ask("chat", "hi"), headers).header("x-session-step") for _ in range(12)}
    assert steps == {"work"}
