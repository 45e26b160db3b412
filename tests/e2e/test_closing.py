"""A session ends with one closing call that fits its budget; afterwards calls are refused as before."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import anthropic
import openai
import pytest

from gateway.mock import Behaviour, MockProvider, MockServer, ToolCall, Turn
from tests.conftest import StartGateway
from tests.support.gateways import GatewayThread
from tests.support.web import CHAT, HI, Reply, Web

pytestmark = pytest.mark.long

MESSAGE = "Finish now; {tokens} tokens are left."
FLAGS: dict[str, object] = {"budget.tokens": 2_000, "budget.closing": {"reserve": 0.25, "message": MESSAGE}}
SEARCH: Any = {
    "name": "search",
    "description": "Search the index.",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
}
ROWS = json.dumps([{"id": number, "title": f"item {number} of the search"} for number in range(20)])
TASK = "Look into the login failures, and report what you found."
#: most calls of an agent in these tests
MOST_CALLS = 30


def sent(mock: MockProvider) -> Any:
    """Return the body of the last request that reached the provider."""
    return json.loads(mock.calls[-1].body)


def budget(web: Web, session: str) -> Any:
    return web.get(f"/api/sessions/{session}").json["budget"]


def last_record(web: Web, session: str) -> Any:
    return web.get(f"/api/sessions/{session}/calls").json["calls"][0]


@pytest.fixture
def gateway(mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway) -> GatewayThread:
    return gateway_server(mock_server.url, **FLAGS)


@pytest.fixture
def client(gateway: GatewayThread) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=gateway.base_url, api_key="any", max_retries=0, default_headers={"x-session-id": "s"}
    ) as made:
        yield made


@pytest.fixture
def claude(gateway: GatewayThread) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=gateway.url, api_key="any", max_retries=0, default_headers={"x-session-id": "s"}
    ) as made:
        yield made


def run_chat(client: openai.OpenAI, *, stream: bool) -> str:
    """Let an agent call its tool until the model gives a result, and return the result."""
    messages: list[Any] = [{"role": "user", "content": TASK}]
    for number in range(MOST_CALLS):
        tools: Any = [{"type": "function", "function": SEARCH}]
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


def run_messages(claude: anthropic.Anthropic, *, stream: bool) -> str:
    """Do what `run_chat` does, with the Messages API."""
    messages: list[Any] = [{"role": "user", "content": TASK}]
    tools: Any = [{"name": "search", "description": "Search.", "input_schema": SEARCH["parameters"]}]
    for number in range(MOST_CALLS):
        asked: Any = {"model": "mock-small", "max_tokens": 300, "messages": messages, "tools": tools}
        if stream:
            with claude.messages.stream(**asked) as events:
                message = events.get_final_message()
        else:
            message = claude.messages.create(**asked)
        if not any(block.type == "tool_use" for block in message.content):
            return "".join(block.text for block in message.content if block.type == "text")
        call: Any = {"type": "tool_use", "id": f"c{number}", "name": "search", "input": {}}
        result: Any = {"type": "tool_result", "tool_use_id": f"c{number}", "content": ROWS}
        messages += [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
        messages += [{"role": "assistant", "content": "Noted."}, {"role": "user", "content": "Go on."}]
    raise AssertionError("the agent did not end")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("format_name", ["chat", "responses", "messages"])
def test_an_agent_that_always_calls_tools_ends_with_a_result(
    gateway: GatewayThread,
    client: openai.OpenAI,
    claude: anthropic.Anthropic,
    mock: MockProvider,
    format_name: str,
    stream: bool,
) -> None:
    run: Callable[[], str] = {
        "chat": partial(run_chat, client, stream=stream),
        "responses": partial(run_responses, client, stream=stream),
        "messages": partial(run_messages, claude, stream=stream),
    }[format_name]
    assert run()
    body = sent(mock)
    assert body["tools"], "the list of tools stays, because the provider's cache begins with it"
    assert body["tool_choice"] == ({"type": "none"} if format_name == "messages" else "none")
    assert "Finish now; " in json.dumps((body.get("messages") or body.get("input"))[-1])
    used = budget(gateway.web, "s")
    assert used["used"]["tokens"] <= used["tokens"] == 2_000, used
    record = last_record(gateway.web, "s")
    assert record["notes"]["closing_call"]
    with pytest.raises((openai.BadRequestError, anthropic.BadRequestError)) as refused:
        run()
    assert "closing call" in str(refused.value)
    assert refused.value.response.json()["error"]["budget"]["account"] == "session"
    assert json.loads(refused.value.request.content) != body
