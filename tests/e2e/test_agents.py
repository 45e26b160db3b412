"""Subagents of a session: counted one by one, capped one by one, as Claude Code, Codex and own agents name them."""

from __future__ import annotations

import json
import re
import signal
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import Any

import anthropic
import openai
import pytest
from websockets.sync.client import connect

from gateway.core.agent_use import MAX_SUBAGENTS
from gateway.mock import Behaviour, MockProvider, MockServer, ToolCall, Turn
from tests.conftest import StartGateway, StartProcess
from tests.support.gateways import GatewayThread, until
from tests.support.timing import LIMIT_S
from tests.support.web import CHAT, HI, Web

pytestmark = pytest.mark.long

PRICED = [{"match": "mock-small", "provider": "upstream", "price": {"input": 100, "output": 1000}, "window": 100_000}]
CAP = 1_500
#: the name of the agent in the headers of each client
Headers = Callable[[str], dict[str, str]]
ROOT = "0199a213-81c0-7800-8aa1-bbab2a035a53"


def of_claude_code(agent: str, kind: str = "Explore") -> dict[str, str]:
    named = {"agent-id": agent, "agent-type": kind, "request-class": "subagent"}
    return {f"x-claude-code-{name}": value for name, value in named.items()} | {"x-claude-code-session-id": ROOT}


def of_codex(agent: str) -> dict[str, str]:
    return {
        "session-id": ROOT,
        "thread-id": agent,
        "x-codex-window-id": f"{agent}:0",
        "x-codex-parent-thread-id": ROOT,
        "x-openai-subagent": "collab_spawn",
        "x-codex-turn-metadata": json.dumps({"turn_id": "t", "request_kind": "turn"}),
    }


def of_own(agent: str) -> dict[str, str]:
    return {"x-session-id": ROOT, "x-agent-id": agent, "x-agent-type": "researcher"}


def by_messages(gateway: GatewayThread, headers: dict[str, str]) -> None:
    with anthropic.Anthropic(base_url=gateway.url, api_key="any", max_retries=0, default_headers=headers) as client:
        client.messages.create(model="mock-small", max_tokens=100, messages=HI)  # type: ignore[arg-type]


def by_message_stream(gateway: GatewayThread, headers: dict[str, str]) -> None:
    with anthropic.Anthropic(base_url=gateway.url, api_key="any", max_retries=0, default_headers=headers) as client:
        with client.messages.stream(model="mock-small", max_tokens=100, messages=HI) as stream:  # type: ignore[arg-type]
            stream.get_final_message()


def by_responses(gateway: GatewayThread, headers: dict[str, str]) -> None:
    with openai.OpenAI(base_url=gateway.base_url, api_key="any", max_retries=0, default_headers=headers) as client:
        client.responses.create(model="mock-small", input="hi", max_output_tokens=100)


def by_response_stream(gateway: GatewayThread, headers: dict[str, str]) -> None:
    with openai.OpenAI(base_url=gateway.base_url, api_key="any", max_retries=0, default_headers=headers) as client:
        for _ in client.responses.create(model="mock-small", input="hi", max_output_tokens=100, stream=True):
            pass


def by_chat(gateway: GatewayThread, headers: dict[str, str]) -> None:
    with openai.OpenAI(base_url=gateway.base_url, api_key="any", max_retries=0, default_headers=headers) as client:
        client.chat.completions.create(model="mock-small", messages=HI, max_tokens=100)  # type: ignore[arg-type]


def agents(web: Web, session: str = ROOT) -> dict[str, Any]:
    return {one["id"]: one for one in web.get(f"/api/sessions/{session}").json["agents"]}


def total(row: Any) -> int:
    return int(row["cumulative_token_usage"]["total_tokens"])


def check_sums(web: Web, session: str = ROOT) -> None:
    """Check that the agents of a session add up to its totals."""
    found = web.get(f"/api/sessions/{session}").json
    rows = found["agents"]
    assert sum(row["calls"] for row in rows) == found["calls"]
    for name, number in found["cumulative_token_usage"].items():
        assert sum(row["cumulative_token_usage"][name] for row in rows) == number, name
    if found["cost_usd"] is not None:
        assert sum(Decimal(row["cost_usd"]) for row in rows) == Decimal(found["cost_usd"])
    assert rows[0]["with_children"]["calls"] == found["calls"]


@pytest.mark.parametrize(
    ("headers", "call"),
    [
        (of_claude_code, by_messages),
        (of_claude_code, by_message_stream),
        (of_codex, by_responses),
        (of_codex, by_response_stream),
        (of_own, by_chat),
    ],
)
def test_two_parallel_subagents_never_exceed_their_cap(
    mock_server: MockServer,
    mock: MockProvider,
    gateway_server: StartGateway,
    headers: Headers,
    call: Callable[[GatewayThread, dict[str, str]], None],
) -> None:
    gateway = gateway_server(mock_server.url, **{"budget.agents": {"*": {"tokens": CAP}}})
    mock.push(*[Turn(text="word " * 80)] * 200)

    def attempt(agent: str) -> tuple[str, str]:
        try:
            call(gateway, headers(agent))
        except (openai.APIStatusError, anthropic.APIStatusError) as refusal:
            return agent, refusal.message
        return agent, "ok"

    with ThreadPoolExecutor(8) as threads:
        found = [*threads.map(attempt, ["one", "two"] * 30)]
    outcomes = Counter((agent, message == "ok") for agent, message in found)
    rows = agents(gateway.web)
    for agent in ("one", "two"):
        assert CAP - 300 < total(rows[agent]) <= CAP, "the cap is used, and not exceeded"
        assert rows[agent]["budget"]["used"]["tokens"] == total(rows[agent])
        assert rows[agent]["calls"] == outcomes[agent, True]
        assert outcomes[agent, False], "the cap was reached"
        [refusal, *_] = [message for name, message in found if name == agent and message != "ok"]
        assert f'Agent "{agent}" of session "{ROOT}" has used' in refusal
        assert f"of its {CAP:,} tokens" in refusal
    assert rows["main"]["calls"] == 0
    check_sums(gateway.web)


def test_codex_names_the_agent_of_each_call_over_one_websocket(
    gateway: GatewayThread, mock: MockProvider, session: str
) -> None:
    del mock
    helper = {"session_id": session, "thread_id": "helper", "x-openai-subagent": "collab_spawn"}
    helper["x-codex-parent-thread-id"] = session
    root = {"session_id": session, "thread_id": session}
    compaction = {**root, "x-codex-turn-metadata": json.dumps({"request_kind": "compaction"})}
    headers = {"session-id": session, "thread-id": session}
    address = gateway.url.replace("http", "ws") + "/v1/responses"
    with connect(address, additional_headers=headers) as socket:
        for metadata in (root, helper, compaction):
            body = {"type": "response.create", "model": "mock-small", "input": "hi", "client_metadata": metadata}
            socket.send(json.dumps(body))
            while json.loads(socket.recv(LIMIT_S))["type"] != "response.completed":
                pass
    calls = gateway.web.get(f"/api/sessions/{session}/calls").json["calls"]
    assert [(call["agent"], call["parent_agent"], call["request_class"]) for call in calls] == [
        ("main", None, "compaction"),
        ("helper", "main", "subagent"),
        (None, None, None),
    ]
    check_sums(gateway.web, session)


def test_subagents_beyond_the_counted_ones_have_budgets_of_their_own(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    del mock
    gateway = gateway_server(mock_server.url, **{"budget.agents": {"*": {"calls": 1}}})
    body = {"model": "mock-small", "messages": HI, "max_tokens": 10}
    for number in range(MAX_SUBAGENTS + 2):
        assert gateway.web.post(CHAT, body, of_own(f"a{number}")).status == 200
    last = f"a{MAX_SUBAGENTS + 1}"
    assert gateway.web.post(CHAT, body, of_own(last)).error["budget"]["id"] == f"{ROOT}/{last}"
    rows = agents(gateway.web)
    assert len(rows) == MAX_SUBAGENTS + 2
    assert (rows["…"]["calls"], rows["…"]["budget"], rows["main"]["calls"]) == (2, None, 0)
    check_sums(gateway.web)
    found = gateway.web.get(f"/api/sessions/{ROOT}/calls?agent={last}").json["calls"]
    assert [call["outcome"] for call in found] == ["refused", "ok"]


def test_a_call_of_a_killed_worker_is_charged_to_its_agent(
    mock_server: MockServer, mock: MockProvider, gateway_process: StartProcess
) -> None:
    flags = {"budget.agents": {"*": {"tokens": CAP}}, "budget.lease_s": 5}
    first = gateway_process(mock_server.url, **flags)
    mock.push(Turn(text="word " * 400, behaviour=Behaviour(chunks=400, interval=0.05)))
    body = {"model": "mock-small", "messages": HI, "max_tokens": 500, "stream": True}
    with first.web.open("POST", CHAT, body, of_own("a")) as stream:
        for _ in range(40):  # lines: about 20 events
            assert stream.readline()
        first.signal(signal.SIGKILL)
        first.wait()
    second = gateway_process(mock_server.url, folder=first.folder, **flags)
    row = until(lambda: agents_if_known(second.web).get("a"), 60.0, "the orphaned call is settled")
    assert 0 < total(row) == row["budget"]["used"]["tokens"] <= CAP
    [call] = second.web.get(f"/api/sessions/{ROOT}/calls?agent=a").json["calls"]
    assert (call["outcome"], call["agent_type"]) == ("worker_lost", "researcher")


def agents_if_known(web: Web) -> dict[str, Any]:
    return agents(web) if web.get(f"/api/sessions/{ROOT}").status == 200 else {}


def test_refusal_names_agent_number_limit_and_remedy(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    del mock
    gateway = gateway_server(
        mock_server.url, models=PRICED, **{"budget.agents": {"Explore": {"usd": 0.1}, "*": {"calls": 1}}}
    )
    body = {"model": "mock-small", "max_tokens": 50, "messages": HI}
    refused = gateway.web.post("/v1/messages", body, of_claude_code("a1"))
    while refused.status == 200:
        refused = gateway.web.post("/v1/messages", body, of_claude_code("a1"))
    message, budget = refused.error["message"], refused.error["budget"]
    assert re.fullmatch(
        f'Agent "a1" of session "{ROOT}" has used 0\\.\\d+ USD of its 0\\.100000 USD, and this call needs 0\\.\\d+ USD\\. '
        r"Raise the limit in budget\.agents, or let the main agent or a new agent go on\.",
        message,
    )
    assert (budget["account"], budget["id"], budget["unit"]) == ("agent", f"{ROOT}/a1", "usd")
    # Another agent of the type has a budget of its own, and other types have the limits of "*".
    assert gateway.web.post("/v1/messages", body, of_claude_code("a2")).status == 200
    assert gateway.web.post("/v1/messages", body, of_claude_code("p1", "Plan")).status == 200
    assert gateway.web.post("/v1/messages", body, of_claude_code("p1", "Plan")).error["budget"]["unit"] == "calls"
    # The main agent goes on.
    main = {"x-claude-code-session-id": ROOT}
    for _ in range(3):
        assert gateway.web.post("/v1/messages", body, main).status == 200
    record = gateway.web.get(f"/api/sessions/{ROOT}/calls?agent=p1&limit=1").json["calls"][0]
    assert (record["agent"], record["agent_type"], record["request_class"]) == ("p1", "Plan", "subagent")
    assert record["error"]["budget"]["account"] == "agent"
    check_sums(gateway.web)


def test_calls_of_nested_agents_count_against_all_agents_above(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    del mock
    gateway = gateway_server(mock_server.url, **{"budget.agents": {"lead": {"calls": 4}, "*": {"calls": 3}}})
    body = {"model": "mock-small", "max_tokens": 50, "messages": HI}

    def call(agent: str, kind: str, parent: str | None = None) -> Any:
        above = {"x-claude-code-parent-agent-id": parent} if parent else {}
        return gateway.web.post("/v1/messages", body, of_claude_code(agent, kind) | above)

    assert call("a", "lead").status == 200
    assert call("b", "worker", "a").status == 200
    assert call("c", "worker", "b").status == 200
    assert call("c", "worker", "b").status == 200
    # Each of the four calls counts against "a", three against "b", two against "c".
    refused = call("c", "worker", "b")
    assert refused.error["budget"]["id"] == f"{ROOT}/a"
    assert call("d", "worker", "b").error["budget"]["id"] == f"{ROOT}/a"
    assert call("e", "worker").status == 200
    rows = agents(gateway.web)
    used = {name: row["budget"]["used"]["calls"] for name, row in rows.items() if row["budget"]}
    assert used == {"a": 4, "b": 3, "c": 2, "d": 0, "e": 1}
    assert {name: row["calls"] for name, row in rows.items()} == {"main": 0, "a": 1, "b": 1, "c": 2, "d": 0, "e": 1}
    assert {name: row["with_children"]["calls"] for name, row in rows.items() if row["with_children"]} == {
        "main": 5,
        "a": 4,
        "b": 3,
    }
    assert rows["c"]["parent"] == "b"
    check_sums(gateway.web)


def test_a_session_shows_what_each_agent_used(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    steps = [{"name": "plan", "is_default": True, "description": "d"}]
    gateway = gateway_server(mock_server.url, models=PRICED, steps=steps)
    body = {"model": "mock-small", "max_tokens": 100, "messages": HI, "tools": [tool("read"), tool("edit")]}
    mock.push(
        Turn(tool_calls=(ToolCall("edit", "{}"),)),
        Turn(tool_calls=(ToolCall("read", "{}"), ToolCall("read", "{}"))),
        Turn(text="done"),
        Turn(text="done"),
    )
    main = {"x-claude-code-session-id": ROOT, "x-claude-code-request-class": "main"}
    for headers in (main, of_claude_code("a1"), of_claude_code("a2", "Plan")):
        assert gateway.web.post("/v1/messages", body, headers).status == 200
    compaction = {**main, "x-claude-code-request-class": "compaction", "x-claude-code-compaction": "auto"}
    assert gateway.web.post("/v1/messages", body, compaction).status == 200
    rows = agents(gateway.web)
    assert {name: (row["type"], row["calls"], row["tools"], row["active_step"]) for name, row in rows.items()} == {
        "main": (None, 2, {"edit": 1}, "plan"),
        "a1": ("Explore", 1, {"read": 2}, "plan"),
        "a2": ("Plan", 1, {}, "plan"),
    }
    check_sums(gateway.web)
    calls = gateway.web.get(f"/api/sessions/{ROOT}/calls").json["calls"]
    assert [(call["agent"], call["agent_type"], call["request_class"]) for call in calls] == [
        ("main", None, "compaction"),
        ("a2", "Plan", "subagent"),
        ("a1", "Explore", "subagent"),
        ("main", None, "main"),
    ]
    of_main = gateway.web.get(f"/api/sessions/{ROOT}/calls?agent=main").json
    assert [call["call_id"] for call in of_main["calls"]] == [calls[0]["call_id"], calls[3]["call_id"]]
    metrics = gateway.web.get("/metrics").body.decode()
    assert 'gateway_agent_calls_total{agent_type="Explore",request_class="subagent"} 1' in metrics
    assert 'gateway_agent_calls_total{agent_type="main",request_class="compaction"} 1' in metrics
    assert "a1" not in metrics


def tool(name: str) -> dict[str, Any]:
    return {"name": name, "description": "d", "input_schema": {"type": "object", "properties": {}}}


def test_pages_of_an_agents_calls_continue(web: Web, mock: MockProvider, session: str) -> None:
    del mock
    for number in range(7):
        headers = {"x-session-id": session, **({"x-agent-id": "a"} if number % 2 else {})}
        assert web.post(CHAT, {"model": "mock-small", "messages": HI}, headers).status == 200
    path, found, cursor = f"/api/sessions/{session}/calls?agent=a&limit=2", list[str](), ""
    while True:
        page = web.get(f"{path}{cursor}").json
        found += [call["agent"] for call in page["calls"]]
        if page["cursor"] is None:
            break
        cursor = f"&cursor={page['cursor']}"
    assert found == ["a"] * 3
    assert web.get(f"/api/sessions/{session}/calls?agent=nobody").json == {"calls": [], "cursor": None}


def test_an_odd_agent_is_the_main_agent(web: Web, mock: MockProvider, session: str) -> None:
    for value in ("a/b", "x" * 300, "a b", "", "é"):
        headers = {"x-session-id": session, "x-agent-id": value, "x-claude-code-request-class": "nonsense"}
        assert web.post(CHAT, {"model": "mock-small", "messages": HI}, headers).status == 200, value
    found = web.get(f"/api/sessions/{session}").json
    assert (found["agents"], found["calls"]) == ([], 5)
    assert mock.calls[-1].header("x-agent-id") is None, "it is a header of the gateway"
    assert mock.calls[-1].header("x-claude-code-request-class") == "nonsense"


def test_caps_hold_after_a_restart_and_change_with_a_reload(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    del mock
    body = {"model": "mock-small", "messages": HI, "max_tokens": 10}
    first = gateway_server(mock_server.url, **{"budget.agents": {"*": {"calls": 2}}})
    assert first.web.post(CHAT, body, of_own("a")).status == 200
    first.stop()
    second = gateway_server(mock_server.url, folder=first.folder, **{"budget.agents": {"*": {"calls": 2}}})
    assert second.web.post(CHAT, body, of_own("a")).status == 200
    assert second.web.post(CHAT, body, of_own("a")).status == 400
    text = second.file.read_text()
    second.file.write_text(text.replace('"calls": 2', '"calls": 3').replace("calls: 2", "calls: 3"))
    assert second.web.post("/api/reload", {}).status == 200
    assert second.web.post(CHAT, body, of_own("a")).status == 200
    assert agents(second.web)["a"]["budget"]["used"]["calls"] == 3
    assert second.web.post(f"/api/sessions/{ROOT}/reset", {}).status == 200
    assert agents(second.web) == {}
    assert second.web.post(CHAT, body, of_own("a")).status == 200
    assert agents(second.web)["a"]["budget"]["used"]["calls"] == 1


def test_child_sessions_are_subagents(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    del mock
    gateway = gateway_server(mock_server.url, **{"budget.agents": {"*": {"calls": 2}}})
    body = {"model": "mock-small", "messages": HI, "max_tokens": 10}
    child = {"x-session-affinity": "child", "x-parent-session-id": "parent", "user-agent": "opencode/1.0"}
    assert gateway.web.post(CHAT, body, child).status == 200
    # The parent of a session stays, whatever its later calls name. An agent in a child session is below it.
    assert gateway.web.post(CHAT, body, {"x-session-affinity": "child", "x-agent-id": "a"}).status == 200
    for headers in (child, {"x-session-affinity": "child"}):
        assert gateway.web.post(CHAT, body, headers).error["budget"]["id"] == "child/main"
    rows = agents(gateway.web, "child")
    assert {name: row["budget"]["used"]["calls"] for name, row in rows.items()} == {"main": 2, "a": 1}
    for _ in range(3):
        assert gateway.web.post(CHAT, body, {"x-session-affinity": "parent"}).status == 200
    assert agents(gateway.web, "parent") == {}
    check_sums(gateway.web, "child")
