"""A session ends with one closing call that fits its budget; afterwards calls are refused as before."""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import anthropic
import openai
import pytest
from playwright.sync_api import Browser, expect
from websockets.sync.client import ClientConnection, connect

from gateway.mock import CLAUDE_RULES, Behaviour, MockProvider, MockServer
from tests.conftest import StartGateway
from tests.support import browsers
from tests.support.gateways import GatewayThread, until
from tests.support.timing import LIMIT_S
from tests.support.web import CHAT, HI, Reply, Web

pytestmark = pytest.mark.long

MESSAGE = "Finish now; {tokens} tokens are left."
LIMIT = 2_000
FLAGS: dict[str, object] = {"budget.tokens": LIMIT, "budget.closing": {"reserve": 0.25, "message": MESSAGE}}
SEARCH: Any = {
    "name": "search",
    "description": "Search the index.",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
}
TOOLS: Any = [{"type": "function", "function": SEARCH}]
BODY: Any = {"model": "mock-small", "messages": HI, "max_tokens": 40}
ROWS = json.dumps([{"id": number, "title": f"item {number} of the search"} for number in range(20)])
TASK = "Look into the login failures, and report what you found."
#: most calls of an agent in these tests
MOST_CALLS = 30


def sent(mock: MockProvider) -> Any:
    """Return the body of the last request that reached the provider."""
    return json.loads(mock.calls[-1].body)


def budget(web: Web) -> Any:
    return web.get("/api/sessions/s").json["budget"]


def used(web: Web) -> int:
    return int(budget(web)["used"]["tokens"])


def last_record(web: Web) -> Any:
    return web.get("/api/sessions/s/calls").json["calls"][0]


def said(role: str, number: int) -> dict[str, str]:
    return {"role": role, "content": f"Remark {number} about the login, which has failed again for some users today."}


def post(web: Web, **fields: Any) -> Reply:
    return web.post(CHAT, {**BODY, **fields}, {"x-session-id": "s"})


def ask(web: Web, **fields: Any) -> Reply:
    reply = post(web, **fields)
    assert reply.status == 200, reply.body
    return reply


def spend(web: Web, mock: MockProvider, tokens: int) -> None:
    """Let the session use so many tokens."""
    mock.behaviour = Behaviour(tokens=(10, tokens - 10))
    ask(web)
    mock.behaviour = Behaviour()
    assert used(web) == tokens


@pytest.fixture
def gateway(mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway) -> GatewayThread:
    return gateway_server(mock_server.url, **FLAGS)


def run_chat(client: openai.OpenAI, *, stream: bool) -> str:
    """Let an agent call its tool until the model gives a result, and return the result."""
    messages: list[Any] = [{"role": "user", "content": TASK}]
    for number in range(MOST_CALLS):
        tools = TOOLS
        calls: list[Any] = []
        text = ""
        if stream:
            for chunk in client.chat.completions.create(
                model="mock-small", messages=messages, tools=tools, stream=True
            ):
                for choice in chunk.choices:
                    text += choice.delta.content or ""
                    calls += choice.delta.tool_calls or []
        else:
            message = (
                client.chat.completions.create(model="mock-small", messages=messages, tools=tools).choices[0].message
            )
            calls, text = [*(message.tool_calls or [])], message.content or ""
        if not calls:
            return text
        function = {"name": "search", "arguments": "{}"}
        made = {"id": f"c{number}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": None, "tool_calls": [made]})
        messages.append({"role": "tool", "tool_call_id": f"c{number}", "content": ROWS})
        messages.append({"role": "user", "content": "Go on."})
    raise AssertionError("the agent did not end")


def run_responses(client: openai.OpenAI, *, stream: bool) -> str:
    """Do what `run_chat` does, with the Responses API."""
    items: list[Any] = [{"role": "user", "content": TASK}]
    for number in range(MOST_CALLS):
        tools: Any = [{"type": "function", **SEARCH}]
        create = partial(client.responses.create, model="mock-small", input=items, tools=tools)
        if stream:
            *_, last = create(stream=True)
            response: Any = last.response  # type: ignore[attr-defined]
        else:
            response = create()
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return str(response.output_text)
        made = {"type": "function_call", "call_id": f"c{number}", "name": "search", "arguments": "{}"}
        items += [made, {"type": "function_call_output", "call_id": f"c{number}", "output": ROWS}]
        items.append({"role": "user", "content": "Go on."})
    raise AssertionError("the agent did not end")


def run_messages(claude: anthropic.Anthropic, *, stream: bool, model: str, messages: list[Any] | None = None) -> str:
    """Do what `run_chat` does, with the Messages API. `messages`: the conversation, which is continued in place."""
    messages = messages if messages is not None else [{"role": "user", "content": TASK}]
    tools: Any = [{"name": "search", "description": "Search.", "input_schema": SEARCH["parameters"]}]
    for _ in range(MOST_CALLS):
        asked: Any = {"model": model, "max_tokens": 300, "messages": messages, "tools": tools}
        if stream:
            with claude.messages.stream(**asked) as events:
                message = events.get_final_message()
        else:
            message = claude.messages.create(**asked)
        messages.append(
            {"role": "assistant", "content": [one.model_dump(exclude_none=True) for one in message.content]}
        )
        calls = [block for block in message.content if block.type == "tool_use"]
        if not calls:
            return "".join(block.text for block in message.content if block.type == "text")
        results: Any = [{"type": "tool_result", "tool_use_id": call.id, "content": ROWS} for call in calls]
        messages.append({"role": "user", "content": results})
        messages += [{"role": "assistant", "content": "Noted."}, {"role": "user", "content": "Go on."}]
    raise AssertionError("the agent did not end")


def agent(gateway: GatewayThread, format_name: str, *, stream: bool, model: str = "mock-small") -> Callable[..., str]:
    """Return a function that runs an agent with the SDK of a format until the model gives a result."""
    headers = {"x-session-id": "s"}
    if format_name == "messages":
        claude = anthropic.Anthropic(base_url=gateway.url, api_key="any", max_retries=0, default_headers=headers)
        return partial(run_messages, claude, stream=stream, model=model)
    client = openai.OpenAI(base_url=gateway.base_url, api_key="any", max_retries=0, default_headers=headers)
    run = run_chat if format_name == "chat" else run_responses
    return partial(run, client, stream=stream)


# --- the agent's view -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("format_name", ["chat", "responses", "messages"])
def test_an_agent_that_always_calls_tools_ends_with_a_result(
    gateway: GatewayThread, mock: MockProvider, format_name: str, *, stream: bool
) -> None:
    run = agent(gateway, format_name, stream=stream)
    assert run()
    body = sent(mock)
    assert body["tools"], "the list of tools stays, because the provider's cache begins with it"
    assert body["tool_choice"] == ({"type": "none"} if format_name == "messages" else "none")
    last = json.dumps((body.get("messages") or body.get("input"))[-1])
    assert re.search(r"Finish now; \d+ tokens are left", last)
    assert budget(gateway.web)["is_closed"]
    assert used(gateway.web) <= LIMIT
    assert last_record(gateway.web)["notes"]["closing_call"]
    number = len(mock.calls)
    with pytest.raises((openai.BadRequestError, anthropic.BadRequestError), match="its one closing call was taken"):
        run()
    assert len(mock.calls) == number


def test_the_closing_call_changes_only_what_follows_the_last_message(
    gateway: GatewayThread, mock: MockProvider
) -> None:
    spend(gateway.web, mock, LIMIT - 500)
    system = {"role": "system", "content": "Be brief."}
    reply = ask(gateway.web, messages=[system, *HI], tools=TOOLS, tool_choice="required", max_tokens=4_000)
    assert reply.header("x-session-closing-call") == "true"
    body = sent(mock)
    assert body["messages"][0] == system
    assert body["messages"][1]["content"].startswith(HI[0]["content"])
    assert body["tools"] == TOOLS
    assert body["tool_choice"] == "none"
    left = int(re.findall(r"now; (\d+) tokens", body["messages"][1]["content"])[0])
    assert body["max_tokens"] == left < 500
    assert used(gateway.web) <= LIMIT


def test_a_websocket_has_its_closing_call_too(gateway: GatewayThread, mock: MockProvider) -> None:
    spend(gateway.web, mock, LIMIT - 500)
    create = {
        "type": "response.create",
        "model": "mock-small",
        "input": "Hi.",
        "tools": [{"type": "function", **SEARCH}],
    }

    def ends(socket: ClientConnection) -> str:
        socket.send(json.dumps(create))
        while True:
            event = json.loads(socket.recv(LIMIT_S))
            if event["type"] in ("response.completed", "response.incomplete", "error"):
                return json.dumps(event)

    address = gateway.base_url.replace("http", "ws") + "/responses"
    with connect(address, additional_headers={"x-session-id": "s"}) as socket:
        assert "Finish now" in ends(socket)
        assert sent(mock)["tool_choice"] == "none"
        assert "closing call was taken" in ends(socket)
    assert used(gateway.web) <= LIMIT


def test_a_call_before_it_has_no_header_and_no_change(gateway: GatewayThread, mock: MockProvider) -> None:
    reply = ask(gateway.web, tools=TOOLS)
    assert reply.header("x-session-closing-call") is None
    assert sent(mock)["messages"] == HI
    assert budget(gateway.web)["kept_for_closing"] == LIMIT // 4
    assert not budget(gateway.web)["is_closed"]


def test_a_long_conversation_is_trimmed_for_it(gateway: GatewayThread, mock: MockProvider) -> None:
    spend(gateway.web, mock, LIMIT - 450)
    long = [message for number in range(30) for message in (said("user", number), said("assistant", number))]
    reply = ask(gateway.web, messages=[*long, *HI])
    assert reply.header("x-session-closing-call") == "true"
    assert len(sent(mock)["messages"]) < len(long)
    assert used(gateway.web) <= LIMIT


def test_nothing_is_learned_from_the_tokens_of_the_instruction(gateway: GatewayThread, mock: MockProvider) -> None:
    spend(gateway.web, mock, LIMIT - 500)
    mock.behaviour = Behaviour(tokens=(200, 10))
    closing = ask(gateway.web)
    assert closing.header("x-session-closing-call")
    mock.behaviour = Behaviour()
    gateway.web.send("PATCH", "/api/sessions/s", {"budget": {"tokens": 9_000}})
    assert ask(gateway.web).header("x-context-tokens") == closing.header("x-context-tokens")


def test_the_dashboard_and_the_command_line_show_it(
    gateway: GatewayThread, mock: MockProvider, browser: Browser
) -> None:
    def shown() -> str:
        command = [sys.executable, "-m", "gateway", "sessions", "show", "s", "-c", str(gateway.file)]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT_S).stdout

    with browsers.opened(browser) as watched:
        spend(gateway.web, mock, LIMIT - 500)
        watched.page.goto(f"{gateway.url}/ui#/session/s")
        expect(watched.page.get_by_text("500 tokens are kept for its closing call.")).to_be_visible()
        assert "closing call" not in shown()
        ask(gateway.web)
        watched.page.reload()
        expect(watched.page.get_by_text("Its closing call was taken")).to_be_visible()
        watched.page.goto(f"{gateway.url}/ui#/call/{last_record(gateway.web)['call_id']}")
        expect(watched.page.get_by_text("the last call that the budget of the session allows")).to_be_visible()
    assert "closing call" in shown()


# --- exactly one ------------------------------------------------------------------------------------------------------


def test_of_parallel_calls_one_is_the_closing_call(gateway: GatewayThread, mock: MockProvider) -> None:
    spend(gateway.web, mock, LIMIT - 510)
    mock.behaviour = Behaviour(delay=0.2)
    with ThreadPoolExecutor(12) as threads:
        replies = [*threads.map(lambda _: post(gateway.web), range(24))]
    closing = [reply for reply in replies if reply.header("x-session-closing-call")]
    assert len(closing) == 1
    assert closing[0].status == 200
    assert {reply.status for reply in replies if reply is not closing[0]} == {400}
    assert used(gateway.web) <= LIMIT


def test_a_subagent_does_not_take_the_closing_call_of_the_main_agent(
    gateway: GatewayThread, mock: MockProvider
) -> None:
    spend(gateway.web, mock, LIMIT - 500)
    for named in (
        {"x-agent-id": "finder-1"},
        {"x-claude-code-agent-id": "a1", "x-claude-code-agent-type": "Explore"},
        {"x-openai-subagent": "review"},
    ):
        refused = gateway.web.post(CHAT, BODY, {"x-session-id": "s", **named})
        assert (refused.status, refused.error["code"]) == (400, "budget_exhausted")
        assert "500 tokens are kept for a closing call" in refused.error["message"]
    assert ask(gateway.web).header("x-session-closing-call") == "true"


def test_a_closing_call_that_fails_can_be_repeated(gateway: GatewayThread, mock: MockProvider) -> None:
    spend(gateway.web, mock, LIMIT - 500)
    for status in (500, 429, 400):
        mock.behaviour = Behaviour(status=status)
        assert post(gateway.web).status == status
        assert not budget(gateway.web)["is_closed"]
    mock.behaviour = Behaviour()
    assert ask(gateway.web).header("x-session-closing-call") == "true"
    assert post(gateway.web).status == 400


@pytest.mark.parametrize("change", [{"budget": {"tokens": 4_000}}, {"budget": {"tokens": None}}])
def test_a_raised_budget_reopens_the_session(gateway: GatewayThread, mock: MockProvider, change: Any) -> None:
    spend(gateway.web, mock, LIMIT - 500)
    ask(gateway.web)
    assert post(gateway.web).status == 400
    assert gateway.web.send("PATCH", "/api/sessions/s", change).status == 200
    assert ask(gateway.web).header("x-session-closing-call") is None


def test_a_reset_reopens_the_session_for_one_more_closing_call(gateway: GatewayThread, mock: MockProvider) -> None:
    for _ in range(2):
        spend(gateway.web, mock, LIMIT - 500)
        assert ask(gateway.web).header("x-session-closing-call") == "true"
        assert post(gateway.web).status == 400
        assert gateway.web.send("POST", "/api/sessions/s/reset").status < 300


def test_after_a_restart_the_closing_call_is_not_repeated(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    first = gateway_server(mock_server.url, **FLAGS)
    spend(first.web, mock, LIMIT - 500)
    ask(first.web)
    first.stop()
    second = gateway_server(mock_server.url, folder=first.folder, **FLAGS)
    refused = post(second.web)
    assert refused.status == 400
    assert "closing call was taken" in refused.json["error"]["message"]


# --- which budgets ----------------------------------------------------------------------------------------------------


def test_one_call_of_a_budget_in_calls_is_kept(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url, **{"budget.calls": 3, "budget.closing": {"message": MESSAGE}})
    headers = [ask(gateway.web).header("x-session-closing-call") for _ in range(3)]
    assert headers == [None, None, "true"]
    assert post(gateway.web).status == 400


def test_a_budget_in_usd_has_a_closing_call(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    models = [{"match": "priced", "provider": "upstream", "price": {"input": 100, "output": 1000}}]
    flags = {"budget.usd": 1, "budget.closing": {"reserve": 0.25, "message": MESSAGE}, "models": models}
    gateway = gateway_server(mock_server.url, **flags)
    mock.behaviour = Behaviour(tokens=(100, 800))
    ask(gateway.web, model="priced", max_tokens=700)
    mock.behaviour = Behaviour()
    reply = ask(gateway.web, model="priced", max_tokens=700)
    assert reply.header("x-session-closing-call") == "true"
    assert sent(mock)["max_tokens"] < 200
    assert float(budget(gateway.web)["used"]["usd"]) <= 1


def test_a_child_does_not_use_what_is_kept_for_its_parent(gateway: GatewayThread, mock: MockProvider) -> None:
    spend(gateway.web, mock, LIMIT - 450)
    child = gateway.web.post(CHAT, BODY, {"x-session-id": "child", "x-parent-session-id": "s"})
    assert child.status == 400
    assert "500 tokens are kept for a closing call" in child.json["error"]["message"]
    assert ask(gateway.web).header("x-session-closing-call") == "true"


def test_a_side_call_of_claude_code_does_not_take_the_closing_call(gateway: GatewayThread, mock: MockProvider) -> None:
    spend(gateway.web, mock, LIMIT - 500)
    reply = gateway.web.post(CHAT, BODY, {"x-session-id": "s", "x-claude-code-request-class": "auxiliary"})
    assert reply.status == 400
    assert ask(gateway.web).header("x-session-closing-call") == "true"


def test_the_budget_of_a_client_key_has_no_closing_call(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    keys = [{"name": "alice", "key": "0123456789abcdef", "budget": {"calls": 1}}]
    flags = {"auth.keys": keys, "budget.calls": 5, "budget.closing": {"message": MESSAGE}}
    gateway = gateway_server(mock_server.url, **flags)
    headers = {"authorization": "Bearer 0123456789abcdef", "x-session-id": "s"}
    assert gateway.web.post(CHAT, BODY, headers).status == 200
    refused = gateway.web.post(CHAT, BODY, headers)
    assert refused.status == 400
    assert refused.json["error"]["budget"]["account"] == "key"


def test_a_window_that_ends_gives_the_session_its_next_closing_call(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    flags = {"budget.calls": 2, "budget.window": "2s", "budget.closing": {"message": MESSAGE}}
    gateway = gateway_server(mock_server.url, **flags)

    def marks() -> list[str | None]:
        return [post(gateway.web).header("x-session-closing-call") for _ in range(2)]

    assert marks() == [None, "true"]
    until(lambda: not budget(gateway.web)["is_closed"])
    assert marks() == [None, "true"]


def test_a_closing_call_without_store_is_refused(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url, **FLAGS, **{"store.on_failure": "open", "store.timeout_ms": 300})
    spend(gateway.web, mock, LIMIT - 500)
    with contextlib.closing(sqlite3.connect(gateway.store, isolation_level=None)) as db:
        db.execute("BEGIN EXCLUSIVE")
        refused = post(gateway.web)
        db.execute("ROLLBACK")
    assert refused.status in (400, 503), refused.body
    until(lambda: post(gateway.web).header("x-session-closing-call") == "true")
    assert used(gateway.web) <= LIMIT


def test_a_free_model_passes_an_exhausted_budget_in_usd(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    models = [
        {"match": "priced", "provider": "upstream", "price": {"input": 100, "output": 1000}},
        {"match": "free", "provider": "upstream", "price": {"input": 0, "output": 0}},
    ]
    gateway = gateway_server(mock_server.url, **{"budget.usd": 0.1, "models": models})
    mock.behaviour = Behaviour(tokens=(1_000, 1_000))
    ask(gateway.web, model="priced", max_tokens=50)
    mock.behaviour = Behaviour()
    assert post(gateway.web, model="priced").status == 400
    assert ask(gateway.web, model="free").header("x-session-budget-remaining-usd") == "0.000000"
    result = json.dumps([{"id": number, "name": f"item {number}", "state": "open"} for number in range(60)])
    made = {"id": "c1", "type": "function", "function": {"name": "search", "arguments": "{}"}}
    messages = [
        *HI,
        {"role": "assistant", "tool_calls": [made]},
        {"role": "tool", "tool_call_id": "c1", "content": result},
    ]
    ask(gateway.web, model="free", messages=[*messages, {"role": "assistant", "content": "Done."}, *HI])
    assert sent(mock)["messages"][2]["content"] == result, "a budget that the call does not use shortens no results"


def test_the_cheaper_model_makes_the_closing_call(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    flags: dict[str, object] = {**FLAGS, "budget.downgrade": {"below": 0.5, "model": "mock-tiny"}}
    gateway = gateway_server(mock_server.url, **flags)
    spend(gateway.web, mock, LIMIT - 500)
    reply = ask(gateway.web)
    assert reply.header("x-session-closing-call") == "true"
    assert reply.header("x-session-budget-model") == sent(mock)["model"] == "mock-tiny"


# --- Claude -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["claude-sonnet-5-5", "claude-fable-5-2"])
def test_claude_is_told_its_task_budget_and_its_thinking_is_sent(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway, model: str
) -> None:
    gateway = gateway_server(mock_server.url, **{"budget.calls": 3, "budget.closing": {"message": MESSAGE}})
    mock.claude = CLAUDE_RULES
    try:
        messages: list[Any] = [{"role": "user", "content": TASK}]
        run = agent(gateway, "messages", stream=False, model=model)
        assert run(messages=messages)
        call, body = mock.calls[-1], sent(mock)
        assert body["output_config"]["task_budget"] == {"type": "tokens", "total": 20_000, "remaining": 300}
        assert "task-budgets-2026-03-13" in (call.header("anthropic-beta") or "")
        assert call.body.count(b'"type":"thinking"') == 2, "all thinking is sent, and the provider accepts it"
        # The client does not repeat the last instruction, so the thinking of the last response has lost its prefix.
        gateway.web.send("PATCH", "/api/sessions/s", {"budget": {"calls": 6}})
        messages.append({"role": "user", "content": "Thank you. Go on."})
        assert run(messages=messages)
    finally:
        mock.claude = ()


def test_a_refused_task_budget_is_left_out(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url, **FLAGS)
    mock.claude = tuple(replace(rules, least_task_budget=None) for rules in CLAUDE_RULES)
    try:
        assert agent(gateway, "messages", stream=True, model="claude-opus-5-5")()
        assert "output_config" not in sent(mock)
    finally:
        mock.claude = ()
